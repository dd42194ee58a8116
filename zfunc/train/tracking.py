"""The figures of a training as scalars, for TensorBoard, Weights & Biases and CSV: which, named how, against what.

The invariant: a scalar is a finite figure of metrics.jsonl, and is written once, however often the run was stopped
and went on. A sink that fails ends with a warning; the training does not.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from zfunc.options import flag
from zfunc.train.deepspeed.convert import SINKS, config_extras
from zfunc.train.deepspeed.keys import KEYS
from zfunc.train.events import Evaluated, Event, Started, Stepped
from zfunc.train.history import Row, finite_number, rows_of
from zfunc.train.pacing import plain_settings
from zfunc.train.recorded import CONFIG, METRICS
from zfunc.train.settings import TrainSettings
from zfunc.train.sinks import CSV, RunInfo, Sink, TensorBoard, WandB, check_package

OURS: Mapping[str, str] = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "skipped": "train/skipped",
    "held_out_bits_per_byte": "held_out/bits_per_byte",
    "held_out_bits_per_token": "held_out/bits_per_token",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/seconds",
    "host_seconds": "speed/host_seconds",
    "device_bytes": "memory/device_bytes",
    "host_bytes": "memory/host_bytes",
}
"""Figures of metrics.jsonl by the names of their scalars, against steps."""
THEIRS: Mapping[str, str] = {
    **OURS,
    "loss": "Train/Samples/train_loss",
    "lr": "Train/Samples/lr",
    "loss_scale": "Train/Samples/loss_scale",
}
"""Where DeepSpeed's configuration asks: its names for what it writes, against samples."""
FP16 = ("loss_scale", "skipped")  # figures that stay the same in other precisions
log = logging.getLogger("zfunc")


@frozen
class SinkRequest:
    """A sink that is asked for, `by` a flag or by a block of DeepSpeed's configuration, which has its keys."""

    kind: str
    by: str
    block: Mapping[str, Any] | None = None

    def open(self, begin: RunInfo) -> Sink:
        """Open it where the block says; without one in the run folder."""
        block = self.block
        if self.kind == "wandb":
            if block is None:
                return WandB.open(begin, project="zfunc")
            return WandB.open(begin, project=block["project"], group=block["group"], entity=block["team"])
        folder = begin.run / self.kind
        if block is not None:
            folder = Path(block["output_path"], block["job_name"]).expanduser()
        log.info("%s: %s", self.kind, folder)
        return (TensorBoard if self.kind == "tensorboard" else CSV).open(folder, begin)


def sink_requests(settings: TrainSettings) -> tuple[SinkRequest, ...]:
    """The sinks that flags and configuration ask for."""
    values, found = config_extras(settings).values, list[SinkRequest]()
    for kind in SINKS:
        if values is not None and values.has(kind):
            if getattr(settings, kind, False) or values[f"{kind}.enabled"]:
                block = {key.last: values[key.name] for key in KEYS.values() if key.block == kind}
                found.append(SinkRequest(kind, f"{values.source}: {kind}", block))
        elif getattr(settings, kind, False):
            found.append(SinkRequest(kind, flag(kind)))
    return tuple(found)


def check_packages(settings: TrainSettings) -> None:
    """Raises ValueError, with what to install, for a sink that is asked for and whose package is not there."""
    for one in sink_requests(settings):
        check_package(one.kind, one.by)


@contextmanager
def tracking(settings: TrainSettings, run: Path) -> Iterator[Callable[[Event], None]]:
    """What takes the events of a training, after they were recorded in the run folder, and writes the scalars.

    To be entered before that: a folder that has a configuration had an earlier life.
    """
    goes_on = (run / CONFIG).exists()
    tracks, failed = [Track(one, run, goes_on) for one in sink_requests(settings)], True

    def take(event: Event) -> None:
        for track in tracks:
            track.take(event)

    try:
        yield take
        failed = False
    finally:
        for track in tracks:
            track.close(failed=failed)


@define(eq=False)
class Track:
    """One sink, from the first event on. `goes_on`: an earlier life of the run may have written to it."""

    asked: SinkRequest
    run: Path
    goes_on: bool
    sink: Sink | None = None
    started: Started | None = field(default=None, repr=False)

    def take(self, event: Event) -> None:
        """Write what the event tells. What is raised is told, and the sink is closed for good."""
        try:
            match event:
                case Started():
                    self._begin(event)
                case Evaluated() if self.started is not None:
                    held_out = f"held_out_bits_per_{self.started.unit}"
                    self._write({"step": event.step, held_out: event.held_out})
                case Stepped() if self.started is not None:
                    held_out = f"held_out_bits_per_{self.started.unit}"
                    self._write({**attrs.asdict(event), held_out: event.held_out})
                case _:
                    pass
        except Exception as error:  # of any kind: W&B and the disk have their own
            told = f"{type(error).__name__}: {error}"
            log.warning(
                "%s: got %s: nothing more is written there; the training goes on", self.asked.by, told
            )
            self.close(failed=True)

    def close(self, *, failed: bool) -> None:
        """Close the sink, if it is open."""
        sink, self.sink = self.sink, None
        if sink is not None:
            with suppress(Exception):
                sink.close(failed=failed)

    def _begin(self, event: Started) -> None:
        self.started = event
        rows = rows_of((self.run / METRICS).read_bytes())[0] if self.goes_on else ()  # no more than are left
        x = self._x(event.step) if self.goes_on else None
        config = {
            **plain_settings(event.settings),
            **event.sizes,
            "parameters": event.parameters,
            **event.machine,
        }
        self.sink = self.asked.open(RunInfo(self.run, config, x))
        for row in rows:
            if self.sink.empty or row["step"] == event.step:  # the row of this step may grow
                self._write(row)

    def _write(self, row: Row) -> None:
        assert self.started is not None
        if self.sink is None:
            return
        names = OURS if self.asked.block is None else THEIRS
        left_out = () if self.started.settings.precision == "fp16" else FP16
        found = {
            names[name]: value
            for name, got in row.items()
            if name in names and name not in left_out and (value := _figure(got)) is not None
        }
        if not row.get("device_bytes"):
            found.pop(names["device_bytes"], None)
        if found:
            self.sink.write(self._x(row["step"]), found)

    def _x(self, step: int) -> int:
        """The step, or the samples up to it: those of earlier steps as if all had been of one size."""
        begun = self.started
        assert begun is not None
        if self.asked.block is None:
            return step
        if step >= begun.step:
            return begun.sequences + (step - begun.step) * begun.settings.batch_size
        return step * begun.sequences // begun.step


def _figure(value: object) -> float | None:
    """A finite number; of yes and no 1 and 0."""
    return finite_number(int(value) if isinstance(value, bool) else value)
