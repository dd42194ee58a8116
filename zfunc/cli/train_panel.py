"""What a person watches on a terminal: a panel redrawn in place, with lines scrolling by above it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from attrs import define, field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zfunc.cli.terminal import printable, sparkline
from zfunc.cli.train_lines import (
    adam_share,
    ending,
    introduction,
    job_title,
    sample_title,
    saved_line,
    summary_lines,
    working_line,
)
from zfunc.train.events import (
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

CURVE = 16  # bars of the loss curve
KEPT = 40 * CURVE  # points it is made from
WIDEST, NARROW = 100, 72  # columns: of the panel; in which two figures do not fit side by side


@define
class LivePanel:
    """A Screen that keeps the last of everything, and draws it when it is asked to."""

    run: RunFolder
    unit: str
    stopping: Callable[[], str]
    console: Console = field(factory=lambda: Console(highlight=False))
    started: Started | None = None
    stepped: Stepped | None = None
    at: float = 0.0  # when `stepped` came
    held_out: float | None = None
    losses: tuple[float, ...] = ()
    working: Working | None = None  # if that is what happens now
    finished: Finished | None = None
    sampled: Sampled | None = None

    def line(self, text: str) -> None:
        """Print it above the panel."""
        self.console.print(Text(printable(text)))

    def show(self, event: Event) -> None:
        """Take it in for the next drawing."""
        self.working = event if isinstance(event, Working) else None
        match event:
            case Started():
                for text in introduction(event, self.run):
                    self.line(text)
                self.started = event
            case Evaluated():
                self.held_out = event.held_out
            case Stepped():
                self.stepped, self.at = event, time.monotonic()
                self.losses = _thinned((*self.losses, event.loss))
                if event.held_out is not None:
                    self.held_out = event.held_out
            case Saved():
                if event.path is not None:  # else it is in the log
                    self.line(f"step {event.step:,}: {saved_line(event, self.run)}")
            case Notice():
                self.line(event.line)
            case Finished():
                self.finished = event
            case Sampled():
                self.sampled = event
            case _:
                pass

    def render(self) -> RenderableType:
        """The panel as it is now."""
        if self.started is None:
            return Text("")
        parts = self._progress(), Text(""), self._figures()
        return _panel(self.console, job_title(self.started), *parts)

    def end(self) -> None:
        """The summary and the sample, once the panel rests."""
        event = self.finished
        if event is None:
            return
        table = Table.grid(padding=(0, 3))
        for what, value in summary_lines(event, self.run, self.unit):
            table.add_row(Text(what, "dim"), Text(printable(value), overflow="fold"))
        self.console.print(_panel(self.console, ending(event), table))
        if self.sampled is not None:
            lines = map(printable, sample_text(self.sampled, self.unit).split("\n"))
            sample = Text("\n".join(lines), overflow="fold")
            self.console.print(_panel(self.console, sample_title(self.sampled, self.unit), sample))

    def _progress(self) -> RenderableType:
        step = self.stepped.step if self.stepped else self.started.step if self.started else 0
        total = self.stepped.total if self.stepped else self.started and self.started.settings.steps
        share = min(1.0, step / total) if total else 0.0
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        count = Text.assemble(
            ("step ", "dim"), (f"{step:,}", "bold"), (f" / {total:,}" if total else "", "dim")
        )
        row.add_row(count, ProgressBar(total=1.0, completed=share, complete_style="cyan"), self._status())
        return row

    def _status(self) -> Text:
        """What it is doing, and until when; the clock runs on between two steps."""
        working = self.working and working_line(self.working)
        if self.finished is not None and working is None:
            return Text("done", "green")
        if (how := self.stopping()) == TERMINATED:
            return Text("terminated: stopping", "yellow")
        if how:
            return Text(f"{working or 'stopping'}; Ctrl-C again: at once", "yellow")
        if working is not None:
            return Text(working, "dim")
        if self.stepped is None:
            return Text("the first step", "dim")
        if self.stepped.seconds_left is None:
            return Text("measuring", "dim")
        left = max(0.0, self.stepped.seconds_left - (time.monotonic() - self.at))
        return Text.assemble((format_clock(left), "bold"), (" left", "dim"))

    def _figures(self) -> RenderableType:
        wide = _width(self.console) >= NARROW
        table = Table.grid(padding=(0, 2), expand=wide)
        for ratio in (3, 2) if wide else (None,):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
        cells = list(self._cells())
        rows = zip(cells[::2], cells[1::2], strict=True) if wide else ((cell,) for cell in cells)
        for row in rows:
            table.add_row(*(part for cell in row for part in cell))
        return table

    def _cells(self) -> Iterator[tuple[str, Text]]:
        """Names and values, in an even number."""
        s = self.stepped
        unknown = Text("-", "dim")

        def value(text: str, unit: str = "") -> Text:
            return Text.assemble((text, "bold"), (f" {unit}" if unit else "", "dim"))

        bars = "" if self.console.options.ascii_only else sparkline(self.losses, CURVE)
        loss = Text.assemble((f"{s.loss:.4f} ", "bold"), (bars, "cyan")) if s else unknown
        if s and s.skipped:
            loss = Text("overflow: step skipped", "yellow")
        yield "loss", loss
        yield "learning rate", value(f"{s.lr:.2e}") if s else unknown
        held_out = self.held_out
        yield "held out", value(f"{held_out:.4f}", f"bits per {self.unit}") if held_out else unknown
        yield "gradient norm", value(f"{s.grad_norm:.3f}") if s else unknown
        yield "speed", value(f"{s.tokens_per_second:,.0f}", "tokens/s") if s else unknown
        yield "host Adam", value(f"{adam_share(s):.1%}", "of a step") if s else unknown
        on_device = bool(s and s.device_bytes)
        yield (
            "device memory",
            value(format_bytes(s.device_bytes)) if s and on_device else Text("no GPU", "dim"),
        )
        yield "host memory", value(format_bytes(s.host_bytes)) if s else unknown


@contextmanager
def live_panel(run: RunFolder, unit: str, stopping: Callable[[], str]) -> Iterator[LivePanel]:
    """A panel on the terminal that stdout is, from here to the end of the context."""
    panel = LivePanel(run, unit, stopping)
    with Live(get_renderable=panel.render, console=panel.console, refresh_per_second=5):
        yield panel
    panel.end()


def _panel(console: Console, title: str, *parts: RenderableType) -> Panel:
    return Panel(
        Group(*parts),
        title=Text(printable(title), "bold"),
        title_align="left",
        border_style="cyan",
        padding=(0, 1),
        width=_width(console),
    )


def _width(console: Console) -> int:
    return min(console.width - 5, WIDEST)  # the terminal echoes ^C after the last line: two have to fit


def _thinned(points: tuple[float, ...]) -> tuple[float, ...]:
    """At most KEPT points: of more, the means of neighbours, so that the curve spans the whole run."""
    if len(points) <= KEPT:
        return points
    return tuple(fmean(points[i : i + 2]) for i in range(0, len(points), 2))
