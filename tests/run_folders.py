"""Run folders as a training would leave them."""

import json
from pathlib import Path
from typing import Any

from html_pages import late
from table import plan_of

from zfunc.core.simulator import simulate
from zfunc.viz.chrome_trace import chrome_trace

Row = dict[str, Any]


def row(step: int, **more: Any) -> Row:
    told = {"step": step, "loss": 5 / step, "lr": 1e-3, "grad_norm": 1.5, "skipped": False}
    speed = {"tokens_per_second": 900.0, "seconds": 0.2, "host_seconds": 0.05}
    return told | speed | {"loss_scale": 1.0, "device_bytes": 0, "host_bytes": 3 << 20} | more


def written(folder: Path, rows: list[Row], *, step: bool = False, name: str = "run", **summary: Any) -> Path:
    """A run folder."""
    run = folder / name
    run.mkdir()
    settings = {
        "num_layers": 2,
        "clip": 1.0,
        "schedule": "Overlapped",
        "precision": "fp32",
        "seed": 7,
        "steps": 9,
    }
    config = {
        "settings": settings,
        "data": ["30 files"],
        "unit": "byte",
        "parameters": 1234,
        "plan": {"digest": "abc", "planned_bytes": {"device": 1 << 20, "pinned": 0, "host": 2 << 20}},
        "machine": {"cpu": "a processor", "cores": 2, "gpu": None, "ranks": 1},
        "resumed_from": None,
    }
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if summary:
        (run / "summary.json").write_text(json.dumps(summary))
    if step:
        plan = plan_of("zero_offload", "tied", "Overlapped")
        (run / "plan.txt").write_text(plan.text())
        (run / "timeline.json").write_text(chrome_trace(late(simulate(plan))))
    return run


STEPS = [{"step": 0, "held_out_bits_per_byte": 8.0}, *(row(n) for n in range(1, 9))]
