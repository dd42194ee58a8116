"""The default job of `zfunc train`, trained to its end, for benchmarks that compare what becomes of it.

A run is determined by its settings, so the curves of a seed start from the same weights and read the same batches:
the sources of Python's standard library as bytes, a GPT of 4 x 128.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from zfunc.train.events import Evaluated, Finished, Stepped
from zfunc.train.loop import train_events
from zfunc.train.settings import TrainSettings
from zfunc.train.setup import prepare_job

WINDOW = 50  # steps a training loss is averaged over


def trained(seed: int, steps: int, cache: Path, **settings: Any) -> dict[str, Any]:
    """Run `zfunc train`; returns held-out loss in bits per byte by step, and means of training losses."""
    made = TrainSettings(seed=seed, steps=steps, seconds=None, device="cpu", **settings)
    held_out: list[tuple[int, float]] = []
    losses: list[float] = []
    for event in train_events(prepare_job(made, cache=cache)):
        if isinstance(event, Evaluated):
            held_out.append((event.step, event.held_out))
        elif isinstance(event, Stepped):
            losses.append(event.metrics.loss)
            if event.held_out is not None:
                held_out.append((event.step, event.held_out))
        elif isinstance(event, Finished) and event.held_out is not None and held_out[-1][0] != event.steps:
            held_out.append((event.steps, event.held_out))
    means = [fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]
    return {"seed": seed, "steps": steps, "held_out": held_out, "loss": means}
