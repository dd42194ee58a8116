"""A training on stdout: lines of text, and on a terminal that can redraw a progress bar below them.

A pipe, a file, Jupyter and a dumb terminal get a line for a step every few seconds instead of the bar.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import attrs
from attrs import define
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zfunc.checkpoint.directory import FOLDER
from zfunc.cli.terminal import printable
from zfunc.train.events import (
    INTERRUPT,
    TEMPERATURE,
    TERMINATED,
    Evaluated,
    Event,
    Finished,
    Sampled,
    Saved,
    Started,
    Stepped,
    Working,
)
from zfunc.train.run_folder import RunFolder
from zfunc.units import format_bytes, format_clock, format_parameters

INTERVAL = 5.0  # seconds between two lines of steps, or of the progress of an evaluation
ENDINGS = {
    "steps": "all steps done",
    "seconds": "the time was up",
    "interrupt": "stopped as asked",
    "terminated": "terminated",
    "failed": "failed",
    "stopped at once": "stopped at once, in the middle of a step",
}


@define
class TrainingOutput:
    """A line for a step every few seconds, or every `steps` of them, for every evaluation, and for all else.

    `render` is what a terminal shows below the lines: how far it is, the newest step, and what goes on.
    """

    run: RunFolder
    unit: str
    steps: int | None = None
    interval: float = INTERVAL
    stopping: Callable[[], str] = lambda: ""
    step: int = 0
    total: int | None = None
    newest: Stepped | None = None
    working: Working | None = None  # if that is the newest event
    told_at: float = 0.0  # when a step was printed, or an evaluation or the sample began, or its progress was

    def show(self, event: Event) -> None:
        """Print the lines of an event, and flush: the reader of a pipe waits for them."""
        self.working = event if isinstance(event, Working) else None
        for text in self._lines(event):
            print(printable(text), flush=True)

    def _lines(self, event: Event) -> Iterator[str]:
        match event:
            case Started():
                self.step, self.total = event.step, event.settings.steps
                yield from introduction(event, self.run)
            case Stepped() | Evaluated():
                self.step = event.step
                if isinstance(event, Stepped):
                    self.newest = event
                    due = self._due() if self.steps is None else event.step % self.steps == 0
                    if due or event.step == self.total or event.held_out is not None:
                        epoch = f"  epoch {event.epoch:.2f}" if event.epoch is not None else ""
                        yield f"{self._count(event.step)}{epoch}  {step_figures(event)}{time_left(event)}"
                if event.held_out is not None:
                    yield f"{self._count(event.step)}  held out {event.held_out:.4f} bits per {self.unit}"
            case Saved(path=path) if path is not None:  # else the failure is in the log
                own = self.run.path / FOLDER / path.name
                where = own if path.parent == own.parent.absolute() else path  # a swap space
                took = "" if event.seconds is None else f" in {event.seconds:.1f} s"
                yield f"{self._count(event.step)}  saved {where}{took}"
            case Working():
                if self._due(restart=not event.fraction):
                    yield f"{event.activity}: {event.fraction:.0%}"
            case Finished():
                yield ""
                yield f"{ENDINGS[event.ended]}: {event.steps:,} steps in {format_clock(event.seconds)}"
                for name, value in summary_lines(event, self.run, self.unit):
                    yield f"  {name:<12}  {value}"
            case Sampled():
                yield f"sample: {len(event.tokens)} {self.unit}s at temperature {TEMPERATURE}"
                yield from (f"  > {text}".rstrip() for text in event.prompt.split("\n") if event.prompt)
                yield from (f"  | {text}".rstrip() for text in event.text.split("\n"))
            case _:
                pass

    def _due(self, *, restart: bool = False) -> bool:
        """Whether it is time for a line; not where what it tells of only begins."""
        now = time.monotonic()
        due = not restart and now - self.told_at >= self.interval
        self.told_at = now if due or restart else self.told_at
        return due

    def _count(self, step: int) -> str:
        return f"step {step:>{len(str(self.total))}}/{self.total}" if self.total else f"step {step:>5}"

    def render(self) -> RenderableType:
        """What is drawn now."""
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        share = min(1.0, self.step / self.total) if self.total else 0.0
        bar = ProgressBar(total=1.0, completed=share, complete_style="cyan")
        row.add_row(self._count(self.step), bar, self._status())
        return Group(row, Text("" if self.newest is None else step_figures(self.newest), "dim"))

    def _status(self) -> Text:
        """What the training does."""
        working = f"{self.working.activity}: {self.working.fraction:.0%}" if self.working else ""
        if (how := self.stopping()) == TERMINATED:
            return Text("terminated: stopping", "yellow")
        if how:
            return Text(f"{working or 'stopping'}; Ctrl-C again: at once", "yellow")
        return Text(working or (time_left(self.newest).strip() if self.newest else "") or "measuring")


@contextmanager
def progress(output: TrainingOutput) -> Generator[TrainingOutput]:
    """Lines on stdout, a terminal, with a progress bar below them until the context ends.

    Steps get no line of their own then, but for those with an evaluation, and the last.
    """
    output.steps, output.interval = None, math.inf
    console = Console(highlight=False)

    def drawn() -> RenderableType:  # the terminal echoes ^C behind the last line: two of them have to fit
        return Constrain(output.render(), console.width - 5)

    with Live(get_renderable=drawn, console=console, refresh_per_second=5, transient=True):
        yield output


def introduction(event: Started, run: RunFolder) -> Iterator[str]:
    """Data, model, plan and run folder, in a few lines."""
    s, plan = event.settings, event.plan
    first, *more = event.data
    yield f"data: {first}"
    yield from (f"  {text}" for text in more)
    size = attrs.asdict(s) | event.sizes
    source = f" of {s.hf}:" if s.hf is not None else " of"
    yield (
        f"model: {event.architecture or 'GPT'}{source} {size['num_layers']} blocks of {size['hidden_size']} "
        f"features with {size['num_attention_heads']} heads, sequences of {s.seq_length} {event.unit}s: "
        f"{format_parameters(event.parameters, event.trained)}"
    )
    planned = ", ".join(f"{format_bytes(n)} {tier}" for tier, n in event.planned_bytes.items() if n)
    lanes = f"{len(plan.lanes)} lane{'s' * (len(plan.lanes) != 1)}"
    yield f"plan: {s.schedule}, {len(plan.graph.ops):,} operations on {lanes} ({plan.digest})"
    yield f"  memory at most: {planned}"
    yield f"run folder: {run.path}"
    if event.checkpoint is not None:
        of_time = "" if s.seconds is None else f", {event.seconds:.1f} of {s.seconds:g} s"
        yield f"resumed: {event.checkpoint}; goes on after step {event.step:,}{of_time}"


def step_figures(event: Stepped) -> str:
    """Loss, learning rate, gradient norm, speed and memory."""
    scale = f"  scale {event.loss_scale:g}" if event.loss_scale != 1 else ""
    adam = event.host_seconds / event.seconds if event.seconds else 0.0  # most of what the host does is Adam
    device = f"  device {format_bytes(event.device_bytes)}" if event.device_bytes else ""
    skipped = "  skipped: overflow" if event.skipped else ""
    return (
        f"loss {event.loss:.4f}  lr {event.lr:.2e}  norm {event.grad_norm:.2f}{scale}"
        f"  {event.tokens_per_second:,.0f} tokens/s  Adam {adam:.1%}{device}"
        f"  host {format_bytes(event.host_bytes)}{skipped}"
    )


def time_left(event: Stepped) -> str:
    """The time that is left, where that is known."""
    return "" if event.seconds_left is None else f"  {format_clock(event.seconds_left)} left"


def summary_lines(event: Finished, run: RunFolder, unit: str) -> Iterator[tuple[str, str]]:
    """The summary, as names and values."""
    yield "loss", f"{event.loss:.4f}, the mean of the last {min(50, event.steps)} steps"
    if event.held_out is not None:
        yield "held out", f"{event.held_out:.4f} bits per {unit}"
    yield "speed", f"{event.tokens_per_second:,.0f} tokens/s"
    peaks, planned = event.peak_bytes, event.planned_bytes
    on_host = (
        ("host", "pinned") if "device" in peaks else ("host", "pinned", "device")
    )  # a CPU is its own device
    if "device" in peaks:
        yield "device peak", f"{format_bytes(peaks['device'])}; planned {format_bytes(planned['device'])}"
    process, before = format_bytes(peaks["process"]), format_bytes(peaks["process"] - peaks["host"])
    tensors = format_bytes(sum(planned[tier] for tier in on_host))
    yield (
        "host peak",
        f"{process} of this process, {before} of it before training; planned for tensors: {tensors}",
    )
    if event.skipped:
        yield "skipped", f"{event.skipped:,} steps, for an overflow"
    yield "run folder", str(run.path)
    if event.checkpoint and event.ended in (INTERRUPT, TERMINATED):
        yield "to go on", f"the same command with --resume auto --out {run.path}"
