"""What benchmarks share: flags, what they say of the machine, how they write results, the model that some train."""

import argparse
import json
import os
import platform
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from zfunc.cli.commands.draw import DrawSettings
from zfunc.engine.trace.segment import Segment
from zfunc.models.gpt import gpt_segments
from zfunc.runtime.accelerator import accelerator_type, device_name
from zfunc.train.setup import gpt_config

SMALL_GPT = {
    "num_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 256,
    "batch_size": 4,
}


def make_parser(doc: str | None, **sizes: int) -> argparse.ArgumentParser:
    """A parser with the flags of a benchmark: `--json`, and a flag for each of `sizes` with its default."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in sizes.items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    p.add_argument("--json", help="a file, or a folder for a file named after the hardware and the date")
    return p


def describe() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    kind = accelerator_type()
    name = device_name(torch.device(kind)) if kind else None
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "accelerator": name,
        "torch": torch.__version__,
    }


def hardware_name() -> str:
    """The name under which results of this machine are stored: its accelerator, or its number of cores."""
    machine = describe()
    return (machine["accelerator"] or f"cpu{machine['cores']}").lower().replace(" ", "-")


def result_path(json_path: str, name: str) -> Path:
    """The file of results `name`: `json_path`, or in that folder one named by hardware and date."""
    path = Path(json_path)
    if path.is_dir() or not path.suffix:
        path = path / f"{name}-{hardware_name()}-{date.today()}.json"
    return path


def write(json_path: str | None, name: str, results: Any) -> None:
    """Write `results` as JSON to the file `json_path`, or in that folder, named by hardware and date."""
    if json_path is None:
        return
    path = result_path(json_path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), "results": results}, indent=2, default=str) + "\n")
    print(f"written: {path}")


def ratios(ours: list[float], theirs: list[float]) -> float:
    """The median over turns of the ratio ours / theirs, as drift of the machine hits both in a turn."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def quarters(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The lower and the upper quartile over turns of the ratio ours / theirs."""
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return low, high


def gpt(args: argparse.Namespace) -> tuple[Segment, ...]:
    """The segments of the byte-level GPT that a benchmark's `args` describe, on the meta device."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return gpt_segments(
        gpt_config(DrawSettings(vocab_size=256, **{name: getattr(args, name) for name in names}))
    )
