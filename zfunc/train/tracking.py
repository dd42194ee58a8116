"""The figures of a training as scalars, for the sinks that flags or DeepSpeed's configuration ask for.

A scalar is a finite figure of metrics.jsonl, and is written once, however often the run was stopped and resumed. A
sink that fails ends with a warning; the training goes on.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from zfunc.options import flag
from zfunc.train.deepspeed.convert import config_extras
from zfunc.train.deepspeed.keys import KEYS
from zfunc.train.events import Evaluated, Event, Started, Stepped
from zfunc.train.history import CONFIG, METRICS, Row, finite_number, rows_of
from zfunc.train.pacing import plain_settings
from zfunc.train.settings import TrainSettings
from zfunc.train.sinks import SINKS, RunInfo, Sink, check_package

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
"""The same for a block of DeepSpeed's configuration: its names for what it writes, against samples."""
FP16_ONLY = ("loss_scale", "skipped")  # figures that never change in other precisions
log = logging.getLogger("zfunc")


@frozen
class SinkRequest:
    """A sink by its kind; `label` names the flag or the block of DeepSpeed's configuration that asks for it."""

    kind: str
    label: str
    block: Mapping[str, Any] | None = None  # the block's keys


def sink_requests(settings: TrainSettings) -> tuple[SinkRequest, ...]:
    """The sinks that flags and configuration ask for."""
    values, requests = config_extras(settings).values, list[SinkRequest]()
    for kind in SINKS:
        if values is not None and values.has(kind):
            if getattr(settings, kind, False) or values[f"{kind}.enabled"]:
                block = {key.last: values[key.name] for key in KEYS.values() if key.block == kind}
                requests.append(SinkRequest(kind, f"{values.source}: {kind}", block))
        elif getattr(settings, kind, False):
            requests.append(SinkRequest(kind, flag(kind)))
    return tuple(requests)


def check_packages(settings: TrainSettings) -> None:
    """Raises ValueError, with what to install, for a sink whose package is missing."""
    for request in sink_requests(settings):
        check_package(request.kind, request.label)


@contextmanager
def tracking(settings: TrainSettings, run: Path) -> Iterator[Callable[[Event], None]]:
    """What takes the events of a training, after they were recorded in the run folder, and writes the scalars.

    To be entered before that: a folder that has a configuration already is a run's that goes on.
    """
    resumed = (run / CONFIG).exists()
    tracks, failed = [Track(request, run, resumed) for request in sink_requests(settings)], True

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
    """One sink, opened by the first event. `resumed`: an earlier session of the run may have written to it."""

    request: SinkRequest
    run: Path
    resumed: bool
    sink: Sink | None = None
    started: Started | None = field(default=None, repr=False)

    def take(self, event: Event) -> None:
        """Write the figures of the event. An error is logged, and closes the sink for good."""
        try:
            if isinstance(event, Started):
                self._begin(event)
            elif isinstance(event, Evaluated | Stepped) and self.started is not None:
                held_out = f"held_out_bits_per_{self.started.unit}"
                self._write({**attrs.asdict(event), held_out: event.held_out})
        except Exception as error:  # of any kind: W&B and the disk have their own
            message = f"{type(error).__name__}: {error}"
            log.warning(
                "%s: got %s: nothing more is written there; the training goes on", self.request.label, message
            )
            self.close(failed=True)

    def close(self, *, failed: bool) -> None:
        """Close the sink, if it is open."""
        sink, self.sink = self.sink, None
        if sink is not None:
            with suppress(Exception):
                sink.close(failed=failed)

    def _begin(self, event: Started) -> None:
        """Open the sink, and write what it does not have of the metrics that are kept."""
        self.started = event
        config = {
            **plain_settings(event.settings),
            **event.sizes,
            "parameters": event.parameters,
            **event.machine,
        }
        run = RunInfo(self.run, config, self._x(event.step) if self.resumed else None)
        self.sink = SINKS[self.request.kind](run, self.request.block)
        rows = rows_of((self.run / METRICS).read_bytes())[0] if self.resumed else ()
        for row in rows:
            if self.sink.empty or row["step"] == event.step:  # an evaluation may be added to that row
                self._write(row)

    def _write(self, row: Row) -> None:
        if self.sink is None or self.started is None:
            return
        names = OURS if self.request.block is None else THEIRS
        left_out = () if self.started.settings.precision == "fp16" else FP16_ONLY
        left_out = left_out if row.get("device_bytes") else (*left_out, "device_bytes")
        scalars = {
            names[name]: y
            for name, value in row.items()
            if name in names and name not in left_out and (y := _scalar(value)) is not None
        }
        if scalars:
            self.sink.write(self._x(row["step"]), scalars)

    def _x(self, step: int) -> int:
        """The step, or the samples up to it: those of earlier steps as if all had been of one size."""
        started = self.started
        assert started is not None
        if self.request.block is None:
            return step
        if step >= started.step:
            return started.sequences + (step - started.step) * started.settings.batch_size
        return step * started.sequences // started.step


def _scalar(value: object) -> float | None:
    """A finite number; True and False as 1 and 0."""
    return finite_number(int(value) if isinstance(value, bool) else value)
