"""A training's metrics as scalars, for the sinks that flags or DeepSpeed's configuration ask for.

A scalar is a finite number of metrics.jsonl. It is written once, however often the run is stopped and resumed. A
sink that fails is closed with a warning, and the training goes on.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
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
from zfunc.train.sinks import SINKS, RunInfo, Sink

SCALARS: Mapping[str, str] = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "skipped": "train/skipped",
    "epoch": "train/epoch",
    "held_out_bits_per_byte": "held_out/bits_per_byte",
    "held_out_bits_per_token": "held_out/bits_per_token",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/seconds",
    "host_seconds": "speed/host_seconds",
    "device_bytes": "memory/device_bytes",
    "host_bytes": "memory/host_bytes",
}
"""The metrics that are written, and the names of their scalars, against steps."""
GROUPS: Mapping[str, str] = {"aux": "train", "norms": "grad_norm"}
"""The metrics that are several, each with a name, and what the names of their scalars begin with."""
DEEPSPEED_SCALARS: Mapping[str, str] = {
    **SCALARS,
    "loss": "Train/Samples/train_loss",
    "lr": "Train/Samples/lr",
    "loss_scale": "Train/Samples/loss_scale",
}
"""The same for a block of DeepSpeed's configuration, with its names, against samples."""
FP16_ONLY = ("loss_scale", "skipped")  # constant in other precisions
log = logging.getLogger("zfunc")


@frozen
class SinkRequest:
    """`label` is the flag, or the block of DeepSpeed's configuration, that asks for the sink; `block` its keys."""

    kind: str
    label: str
    block: Mapping[str, Any] | None = None


def sink_requests(settings: TrainSettings) -> Iterator[SinkRequest]:
    """The sinks that flags and configuration ask for."""
    values = config_extras(settings).values
    for kind in SINKS:
        enabled = getattr(settings, kind, False)
        if values is not None and values.has(kind):
            if enabled or values[f"{kind}.enabled"]:
                block = {key.last: values[key.name] for key in KEYS.values() if key.block == kind}
                yield SinkRequest(kind, f"{values.source}: {kind}", block)
        elif enabled:
            yield SinkRequest(kind, flag(kind))


def check_packages(settings: TrainSettings) -> None:
    """Raises ValueError, with what to install, for a sink whose package is missing."""
    for request in sink_requests(settings):
        try:
            import_module(SINKS[request.kind].PACKAGE)
        except ImportError as error:
            raise ValueError(
                f"{request.label}: {error}: pip install 'zfunc[{request.kind}]', or leave it out"
            ) from error


@contextmanager
def tracking(settings: TrainSettings, run: Path) -> Iterator[Callable[[Event], None]]:
    """A function that writes the scalars of an event; call it after the event is recorded in the run folder.

    Enter this before the first event: if the folder has a configuration by then, the run is being resumed.
    """
    resumed = (run / CONFIG).exists()
    tracks, failed = [_Track(request, run, resumed) for request in sink_requests(settings)], True

    def write(event: Event) -> None:
        for track in tracks:
            track.write(event)

    try:
        yield write
        failed = False
    finally:
        for track in tracks:
            track.close(failed=failed)


@define(eq=False)
class _Track:
    """One sink, opened by the first event. `resumed`: an earlier session of the run may have written to it."""

    request: SinkRequest
    run: Path
    resumed: bool
    sink: Sink | None = None
    started: Started = field(init=False)

    def write(self, event: Event) -> None:
        """Write the metrics of the event. An error is logged, and closes the sink for good."""
        try:
            if isinstance(event, Started):
                self._open(event)
            elif isinstance(event, Evaluated | Stepped) and self.sink is not None:
                held_out = f"held_out_bits_per_{self.started.unit}"
                self._write_row(self.sink, {**attrs.asdict(event), held_out: event.held_out})
        except Exception as error:  # of any kind: W&B and the disk have their own
            message = f"{type(error).__name__}: {error}"
            log.warning("%s: %s: this sink is closed, training goes on", self.request.label, message)
            self.close(failed=True)

    def close(self, *, failed: bool) -> None:
        """Close the sink, if it is open."""
        sink, self.sink = self.sink, None
        if sink is not None:
            with suppress(Exception):
                sink.close(failed=failed)

    def _open(self, event: Started) -> None:
        """Open the sink, and write the rows of metrics.jsonl that it lacks."""
        self.started, settings = event, plain_settings(event.settings)
        config = {**settings, **event.sizes, "parameters": event.parameters, **event.machine}
        x = self._x(event.step) if self.resumed else None
        self.sink = SINKS[self.request.kind](RunInfo(self.run, config, x), self.request.block)
        for row in rows_of((self.run / METRICS).read_bytes())[0] if self.resumed else ():
            if self.sink.empty or row["step"] == event.step:  # an evaluation may be added to that row
                self._write_row(self.sink, row)

    def _write_row(self, sink: Sink, row: Row) -> None:
        names = SCALARS if self.request.block is None else DEEPSPEED_SCALARS
        left_out = () if self.started.settings.precision == "fp16" else FP16_ONLY
        left_out = left_out if row.get("device_bytes") else (*left_out, "device_bytes")
        values = {names[name]: value for name, value in row.items() if name in names and name not in left_out}
        for group, begin in GROUPS.items():
            values |= {f"{begin}/{name}": value for name, value in row.get(group, {}).items()}
        scalars = {name: y for name, value in values.items() if (y := _scalar(value)) is not None}
        if scalars:
            sink.write(self._x(row["step"]), scalars)

    def _x(self, step: int) -> int:
        """The step; or the samples up to it, with those before the session spread evenly over its steps."""
        if self.request.block is None:
            return step
        started = self.started
        if step >= started.step:
            return started.sequences + (step - started.step) * started.settings.batch_size
        return step * started.sequences // started.step


def _scalar(value: object) -> float | None:
    """A finite number; True and False as 1 and 0."""
    return finite_number(int(value) if isinstance(value, bool) else value)
