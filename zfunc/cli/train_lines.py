"""A training on stdout: lines of text, and on a terminal that can redraw a progress bar below them."""

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import attrs
from attrs import define
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from zfunc.checkpoint.directory import FOLDER
from zfunc.cli.terminal import show_line
from zfunc.core.display import counted
from zfunc.train.events import (
    ENDINGS,
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
from zfunc.train.run_history import held_out_unit, read_history
from zfunc.units import format_bytes, format_clock, format_parameters

INTERVAL = 5.0  # seconds between two lines of steps


@define
class TrainingOutput:
    """Prints a training's lines: a step every few seconds, or every `steps` steps, and all other events."""

    run: RunFolder
    unit: str
    steps: int | None = None
    stopping: Callable[[], str] = lambda: ""
    step: int = 0
    total: int | None = None
    left: str = "measuring"  # the time, after the newest step
    working: str = ""  # what goes on beside steps
    loss: str = ""  # the setting
    told_at: float = 0.0  # when a step was printed

    def show(self, event: Event) -> None:
        """Print the lines of an event."""
        self.working = event.activity if isinstance(event, Working) else ""
        for text in self._lines(event):
            show_line(text)

    def _lines(self, event: Event) -> Iterator[str]:
        match event:
            case Started():
                self.step, self.total = event.step, event.job.settings.steps
                self.loss = event.job.settings.loss
                yield from introduction(event, self.run)
            case Stepped() | Evaluated():
                self.step = event.step
                if isinstance(event, Stepped):
                    now, left = time.monotonic(), event.seconds_left
                    self.left = "" if left is None else f"{format_clock(left)} left"
                    due = (
                        now - self.told_at >= INTERVAL if self.steps is None else event.step % self.steps == 0
                    )
                    if due or event.step == self.total or event.held_out is not None:
                        self.told_at = now
                        yield f"{self.counted_step(event.step)}  {step_figures(event)}  {self.left}".rstrip()
                if event.held_out is not None:
                    held_out = f"held out {event.held_out:.4f}{held_out_unit(self.unit, self.loss).words}"
                    yield f"{self.counted_step(event.step)}  {held_out}"
            case Saved(path=path) if path is not None:  # else the failure is in the log
                yield f"{self.counted_step(event.step)}  saved {os.path.relpath(path)}"
            case Finished():
                yield ""
                yield f"{ENDINGS[event.ended]}: {counted(event.steps, 'step')} in {format_clock(event.seconds)}"
                for name, value in summary_lines(event, self.run):
                    yield f"  {name:<12}  {value}"
            case Sampled():
                yield f"sample: {len(event.tokens)} {self.unit}s at temperature {TEMPERATURE}"
                yield from (f"  > {text}".rstrip() for text in event.prompt.split("\n") if event.prompt)
                yield from (f"  | {text}".rstrip() for text in event.text.split("\n"))
            case _:
                pass

    def counted_step(self, step: int) -> str:
        """The label of a step: 'step 12/500', padded to one width; 'step 12' if the total is unknown."""
        return f"step {step:>{len(str(self.total))}}/{self.total}" if self.total else f"step {step:>5}"

    def status(self) -> Text:
        """What the training does now, or the time it has left, for the end of the progress bar."""
        if how := self.stopping():
            asked = f"{self.working or 'stopping'}; Ctrl-C again: at once"
            return Text("terminated: stopping" if how == TERMINATED else asked, "yellow")
        return Text(self.working or self.left)


@contextmanager
def progress(output: TrainingOutput) -> Generator[None]:
    """A context that shows a training's progress bar below its lines on stdout, which must be a terminal."""
    console = Console(highlight=False)

    def drawn() -> RenderableType:
        row = Table.grid(
            Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 2), expand=True
        )
        share = min(1.0, output.step / output.total) if output.total else 0.0
        bar = ProgressBar(total=1.0, completed=share, complete_style="cyan")
        row.add_row(output.counted_step(output.step), bar, output.status())
        return Constrain(row, console.width - 5)  # the terminal echoes ^C behind it: two of them have to fit

    with Live(get_renderable=drawn, console=console, refresh_per_second=5, transient=True):
        yield


def introduction(event: Started, run: RunFolder) -> Iterator[str]:
    """The lines that begin `zfunc train`: data, model, plan, run folder, and the checkpoint it resumes from."""
    job, s, plan = event.job, event.job.settings, event.job.program.plan
    first, *more = job.corpus.description
    yield f"data: {first}"
    yield from (f"  {text}" for text in more)
    size, layout = attrs.asdict(s) | job.sizes, job.program.layout
    source = f" of {s.hf}:" if s.hf is not None else " of"
    blocks, heads = counted(size["num_layers"], "block"), counted(size["num_attention_heads"], "head")
    yield (
        f"model: {job.architecture or 'GPT'}{source} {blocks} of {size['hidden_size']} "
        f"features with {heads}, sequences of {counted(s.seq_length, job.corpus.unit)}: "
        f"{format_parameters(layout.num_parameters, layout.num_trainable)}"
    )
    planned = ", ".join(f"{format_bytes(n)} {tier}" for tier, n in job.planned_bytes.items() if n)
    what = f"{counted(len(plan.graph), 'operation')} on {counted(len(plan.lanes), 'lane')}"
    yield f"plan: {s.schedule}, {what} ({plan.digest})"
    yield f"  memory at most: {planned}"
    yield f"run folder: {run.path}"
    if event.checkpoint is not None:
        of_time = "" if s.seconds is None else f", {event.seconds:.1f} of {s.seconds:g} s"
        yield f"resumed: {event.checkpoint}; goes on after step {event.step:,}{of_time}"


def step_figures(event: Stepped) -> str:
    """One line of a step's figures: epoch, loss, learning rate, gradient norm, speed and memory."""
    m, epoch = event.metrics, f"epoch {event.epoch:.2f}  " if event.epoch is not None else ""
    scale = f"  scale {m.loss_scale:g}" if m.loss_scale != 1 else ""
    adam = m.host_seconds / m.seconds if m.seconds else 0.0  # most of what the host does is Adam
    device = f"  device {format_bytes(event.device_bytes)}" if event.device_bytes else ""
    skipped = "  skipped: overflow" if m.skipped else ""
    rewards = "".join(
        f"  {word} {m.aux[name]:.3g}"
        for word, name in (("accuracy", "rewards/accuracies"), ("margin", "rewards/margins"))
        if name in m.aux
    )
    return (
        f"{epoch}loss {m.loss:.4f}{rewards}  lr {m.lr:.2e}  norm {m.grad_norm:.2f}{scale}"
        f"  {event.tokens_per_second:,.0f} tokens/s  Adam {adam:.1%}{device}"
        f"  host {format_bytes(event.host_bytes)}{skipped}"
    )


def summary_lines(event: Finished, folder: RunFolder) -> Iterator[tuple[str, str]]:
    """The lines that end `zfunc train`: names and values of a run's summary."""
    run, peaks = read_history(folder.path), event.peak_bytes
    if n := len(run.last_losses):  # none if a signal came before the first step of a resumed run
        of = "" if n == 1 else f", the mean of the last {n} steps"
        yield "loss", f"{folder.summary['loss']:.4f}{of}"
    if event.held_out is not None:
        yield "held out", f"{event.held_out:.4f}{run.held_out_unit.words}"
    if best := run.best:
        words = f"{best.held_out:.4f}{run.held_out_unit.words} after step {best.step:,}"
        yield "best", f"{words}, in {os.path.relpath(run.path / FOLDER / best.saved)}"
    yield "speed", f"{event.tokens_per_second:,.0f} tokens/s"
    if "device" in peaks:
        planned = event.planned_bytes["device"]
        yield "device peak", f"{format_bytes(peaks['device'])}; planned {format_bytes(planned)}"
    process, before = format_bytes(peaks["process"]), format_bytes(peaks["process"] - peaks["host"])
    tensors = format_bytes(run.planned_on_host)
    yield (
        "host peak",
        f"{process} of this process, {before} of it before training; planned for tensors: {tensors}",
    )
    if run.skipped:
        yield "skipped", f"{counted(len(run.skipped), 'step')}, for an overflow"
    yield "run folder", str(folder.path)
    if event.checkpoint and event.ended in (INTERRUPT, TERMINATED):
        yield "to go on", f"the same command with --resume auto --out {folder.path}"
