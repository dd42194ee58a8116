"""Pages as tests see them: their elements, the data they show, steps that are hostile or large, run folders."""

import json
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

from attrs import evolve
from table import plan_of

from zfunc.core.graph import Graph, Op, Region
from zfunc.core.plan import Plan, build
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Timeline
from zfunc.viz.chrome_trace import chrome_trace

VOID = {"meta", "input", "br", "link", "img"}


HOSTILE = (
    "</script><script>document.title='broken'</script><!-- \\u003c/script> ]]> & \" ' ${x} $style \u2028"
)


WORD = "".join(HOSTILE.split())  # as the name of an operation, a region or a lane may be


class Elements(HTMLParser):
    """The elements of a page: raises where tags do not match; `text` by the number of the element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[int, str] = {}
        self._open: list[int] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(len(self.tags) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.tags[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text[self._open[-1]] = self.text.get(self._open[-1], "") + data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(of, self.text.get(n, "")) for n, (name, of) in enumerate(self.tags) if name == tag]


def shown_data(html: str) -> dict[str, Any]:
    """The data in a page."""
    (text,) = (text for of, text in Elements(html).all("script") if of.get("type") == "application/json")
    return json.loads(text)


def late(timeline: Timeline, seed: int = 0) -> Timeline:
    """A step like it, measured: everything takes longer, and begins late."""
    random = Random(seed)
    scale = [1 + random.random() for _ in timeline.events]
    events = [
        evolve(e, start=2.1 * e.start, end=2.1 * e.start + s * e.seconds)
        for e, s in zip(timeline.events, scale, strict=True)
    ]
    return Timeline(events, "measured")


def hostile() -> tuple[Plan, Timeline]:
    x = Region(WORD)
    ops = Op(f"{WORD}a", (), "compute", writes=(x,)), Op(f"{WORD}b", (1, 2), "host", reads=(x,))
    plan = build(Graph(ops), {f"{WORD}gpu": [0], "cpu": [1]})
    return plan, evolve(simulate(plan), source=HOSTILE)


@cache
def large(num_ops: int) -> tuple[Plan, Timeline]:
    """A pipeline over five lanes, and its step: operations hand a region on, to another lane."""
    kinds = "compute", "d2h", "host", "h2d", "network"
    regions = tuple(Region("slot", (n,)) for n in range(num_ops))
    ops = [
        Op(
            f"verb{n % 13}",
            (n,),
            kinds[n % 5],
            regions[max(0, n - 6) : n][:1],
            (regions[n],),
            nbytes=10**6 * (n % 7),
        )
        for n in range(num_ops)
    ]
    plan = build(Graph(tuple(ops)), {kind: range(k, num_ops, 5) for k, kind in enumerate(kinds)})
    return plan, simulate(plan)


def luminance(colour: str) -> float:
    """Relative, of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


# --- run folders, as a training would leave them ---------------------------------------------------------

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
        "fp32_params": [],
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
