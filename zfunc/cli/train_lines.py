"""What a person reads of a job: the words, and the plain lines that go into a pipe or a file.

The invariant: nothing here knows more than the events tell, and a line holds printable characters only.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import attrs
from attrs import define

from zfunc.checkpoint.directory import FOLDER
from zfunc.cli.terminal import printable
from zfunc.train.events import (
    INTERRUPT,
    TEMPERATURE,
    TERMINATED,
    Evaluated,
    Event,
    Finished,
    Notice,
    Sampled,
    Saved,
    Started,
    Stepped,
    Working,
)
from zfunc.train.run_folder import RunFolder, sample_text
from zfunc.units import format_bytes, format_clock

EVERY = 5.0  # seconds from one plain line to the next


class Screen(Protocol):
    """Something that shows lines and events."""

    def line(self, text: str) -> None:
        """Show one line."""

    def show(self, event: Event) -> None:
        """Show what happened."""


@define
class PlainOutput:
    """A line for a step every few seconds, or every `steps` of them, for every evaluation, and for all else that is
    said.
    """

    run: RunFolder
    unit: str
    steps: int | None = None
    shown: float = float("-inf")
    total: int | None = None
    kept: Stepped | None = None  # the last, if it was not printed
    told: float = 0.0  # when it was last told how far an evaluation or the sample is, or that began

    def line(self, text: str) -> None:
        """Print it at once: who reads a pipe waits for it."""
        print(printable(text), flush=True)

    def show(self, event: Event) -> None:
        """Print what is worth a line."""
        for text in self._lines(event):
            self.line(text)

    def _lines(self, event: Event) -> Iterator[str]:
        match event:
            case Started():
                self.total = event.settings.steps
                yield from introduction(event, self.run)
            case Evaluated():
                yield from self._last()
                yield f"{_count(event.step, self.total)}  {held_out_line(event.held_out, self.unit)}"
            case Stepped():
                self.kept, self.total = event, event.total
                if self._due(event.step) or event.held_out is not None:
                    yield from self._last()
                if event.held_out is not None:
                    yield f"{_count(event.step, event.total)}  {held_out_line(event.held_out, self.unit)}"
            case Saved():
                if event.seconds is not None:  # not while the next step went on
                    yield from self._last()
                if event.path is not None:  # else it is in the log
                    yield f"{_count(event.step, self.total)}  {saved_line(event, self.run)}"
            case Notice():
                yield event.line
            case Working():
                yield from self._working(event)
            case Finished():
                yield from self._last()
                yield ""
                yield ending(event)
                yield from (
                    f"  {name:<12}  {value}" for name, value in summary_lines(event, self.run, self.unit)
                )
            case Sampled():
                yield sample_title(event, self.unit)
                yield from (f"  | {text}".rstrip() for text in sample_text(event, self.unit).split("\n"))
            case _:
                pass

    def _working(self, event: Working) -> Iterator[str]:
        now = time.monotonic()
        if not event.share:
            self.told = now
        elif now - self.told >= EVERY:
            self.told = now
            yield working_line(event)

    def _due(self, step: int) -> bool:
        return time.monotonic() - self.shown >= EVERY if self.steps is None else step % self.steps == 0

    def _last(self) -> Iterator[str]:
        if self.kept is not None:
            yield step_line(self.kept)
            self.kept, self.shown = None, time.monotonic()


# --- the words -------------------------------------------------------------------------------------------


def introduction(event: Started, run: RunFolder) -> Iterator[str]:
    """What was read, built and planned, in a few lines."""
    s, plan = event.settings, event.plan
    first, *more = event.data
    yield f"data: {first}"
    yield from (f"  {text}" for text in more)
    model = attrs.asdict(s) | event.sizes
    of = f" of {s.hf}:" if s.hf is not None else " of"
    yield (
        f"model: {event.architecture or 'GPT'}{of} {model['num_layers']} blocks of {model['hidden_size']} features "
        f"with {model['num_attention_heads']} heads, sequences of {s.seq_length} {event.unit}s: "
        f"{event.parameters:,} parameters"
    )
    planned = ", ".join(f"{format_bytes(n)} {tier}" for tier, n in event.planned_bytes.items() if n)
    yield f"plan: {s.schedule}, {len(plan.graph.ops):,} operations on {len(plan.lanes)} lanes ({plan.digest})"
    yield f"  memory at most: {planned}"
    yield f"run folder: {run.path}"
    if event.checkpoint is not None:
        yield f"resumed: {event.checkpoint}; goes on after step {event.step:,}"


def job_title(event: Started) -> str:
    """The job in a few words."""
    s = event.settings
    model = attrs.asdict(s) | event.sizes
    return (
        f"{event.architecture or 'GPT'} {model['num_layers']} x {model['hidden_size']}, "
        f"{event.parameters:,} parameters, {s.precision} on {s.device}"
    )


def step_line(event: Stepped) -> str:
    """One step in one line."""
    device = f"  device {format_bytes(event.device_bytes)}" if event.device_bytes else ""
    scale = f"  scale {event.loss_scale:g}" if event.loss_scale != 1 else ""
    skipped = "  skipped: overflow" if event.skipped else ""
    left = f"  {format_clock(event.seconds_left)} left" if event.seconds_left is not None else ""
    return (
        f"{_count(event.step, event.total)}  loss {event.loss:.4f}  lr {event.lr:.2e}  norm {event.grad_norm:.2f}"
        f"{scale}  {event.tokens_per_second:,.0f} tokens/s  Adam {adam_share(event):.1%}{device}"
        f"  host {format_bytes(event.host_bytes)}{left}{skipped}"
    )


def held_out_line(held_out: float, unit: str) -> str:
    """An evaluation in a few words."""
    return f"held out {held_out:.4f} bits per {unit}"


def working_line(event: Working) -> str:
    """How far an evaluation or the sample is."""
    return f"{event.what}: {event.share:.0%}"


def saved_line(event: Saved, run: RunFolder) -> str:
    """A checkpoint in a few words."""
    name = event.path.name if event.path else "nothing"
    took = "" if event.seconds is None else f" in {event.seconds:.1f} s"
    return f"saved {run.path / FOLDER / name}{took}"


def ending(event: Finished) -> str:
    """How it ended."""
    why = {
        "steps": "all steps done",
        "seconds": "the time is up",
        "interrupt": "stopped as asked",
        "terminated": "terminated",
    }
    return f"{why[event.ended]}: {event.steps:,} steps in {format_clock(event.seconds)}"


def summary_lines(event: Finished, run: RunFolder, unit: str) -> Iterator[tuple[str, str]]:
    """What it came to, as names and values."""
    yield "loss", f"{event.loss:.4f}, the mean of the last {min(50, event.steps)} steps"
    if event.held_out is not None:
        yield "held out", f"{event.held_out:.4f} bits per {unit}"
    yield "speed", f"{event.tokens_per_second:,.0f} tokens/s"
    peaks, planned = event.peak_bytes, event.planned_bytes
    host = planned["host"] + planned["pinned"]
    if "device" in peaks:
        yield "device peak", f"{format_bytes(peaks['device'])}; planned {format_bytes(planned['device'])}"
    else:
        host += planned["device"]  # a CPU is its own device
    yield (
        "host peak",
        f"{format_bytes(peaks['process'])} of this process, "
        f"{format_bytes(peaks['process'] - peaks['host'])} of it before training; planned for tensors: "
        f"{format_bytes(host)}",
    )
    if event.skipped:
        yield "skipped", f"{event.skipped:,} steps, for an overflow"
    yield "run folder", str(run.path)
    if event.checkpoint and event.ended in (INTERRUPT, TERMINATED):
        yield "to go on", f"the same command with --resume auto --out {run.path}"


def sample_title(event: Sampled, unit: str) -> str:
    """What the sample is."""
    return f"sample: {len(event.tokens)} {unit}s at temperature {TEMPERATURE}"


def adam_share(event: Stepped) -> float:
    """The share of the step that operations of the host took, Adam before all."""
    return event.host_seconds / event.seconds if event.seconds else 0.0


def _count(step: int, total: int | None) -> str:
    wide = len(str(total)) if total else 5
    return f"step {step:>{wide}}" + (f"/{total}" if total else "")
