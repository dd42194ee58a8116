"""A training as a panel on a terminal, redrawn in place, with lines scrolling by above it."""

import time
from collections.abc import Callable, Generator, Iterator
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
from zfunc.train.run_folder import RunFolder
from zfunc.units import format_bytes, format_clock

CURVE = 16  # characters of the loss curve
MAX_LOSSES = 40 * CURVE  # points of the curve
WIDEST, NARROW = 100, 72  # columns: of the panel; below which two figures do not fit side by side
UNKNOWN = Text("-", "dim")


@define
class LivePanel:
    """The last event of each kind, and the panel drawn from them."""

    run: RunFolder
    unit: str
    stopping: Callable[[], str]
    console: Console = field(factory=lambda: Console(highlight=False))
    started: Started | None = None
    stepped: Stepped | None = None
    stepped_at: float = 0.0
    held_out: float | None = None
    losses: tuple[float, ...] = ()
    working: Working | None = None  # if that is the newest event
    finished: Finished | None = None
    sampled: Sampled | None = None

    def line(self, text: str) -> None:
        """Print it above the panel."""
        self.console.print(Text(printable(text)))

    def show(self, event: Event) -> None:
        """Keep it for the next drawing."""
        self.working = event if isinstance(event, Working) else None
        match event:
            case Started():
                for text in introduction(event, self.run):
                    self.line(text)
                self.started = event
            case Evaluated():
                self.held_out = event.held_out
            case Stepped():
                self.stepped, self.stepped_at = event, time.monotonic()
                self.losses = _thinned((*self.losses, event.loss))
                if event.held_out is not None:
                    self.held_out = event.held_out
            case Saved():
                if event.path is not None:  # else the failure is in the log
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
        return self._panel(job_title(self.started), self._progress(self.started), Text(""), self._figures())

    def end(self) -> None:
        """Print the summary and the sample below the last panel."""
        if self.finished is None:
            return
        table = Table.grid(padding=(0, 3))
        for name, value in summary_lines(self.finished, self.run, self.unit):
            table.add_row(Text(name, "dim"), Text(printable(value), overflow="fold"))
        self.console.print(self._panel(ending(self.finished), table))
        if self.sampled is not None:
            lines = map(printable, f"{self.sampled.prompt}{self.sampled.text}".split("\n"))
            sample = Text("\n".join(lines), overflow="fold")
            self.console.print(self._panel(sample_title(self.sampled, self.unit), sample))

    @property
    def _width(self) -> int:
        # The terminal echoes ^C after the last line: two have to fit.
        return min(self.console.width - 5, WIDEST)

    def _panel(self, title: str, *parts: RenderableType) -> Panel:
        return Panel(
            Group(*parts),
            title=Text(printable(title), "bold"),
            title_align="left",
            border_style="cyan",
            padding=(0, 1),
            width=self._width,
        )

    def _progress(self, started: Started) -> RenderableType:
        step = self.stepped.step if self.stepped else started.step
        total = self.stepped.total if self.stepped else started.settings.steps
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        of_total = f" / {total:,}" if total else ""
        count = Text.assemble(("step ", "dim"), (f"{step:,}", "bold"), (of_total, "dim"))
        share = min(1.0, step / total) if total else 0.0
        row.add_row(count, ProgressBar(total=1.0, completed=share, complete_style="cyan"), self._status())
        return row

    def _status(self) -> Text:
        """What it is doing, and the time that is left, which runs on between two steps."""
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
        left = max(0.0, self.stepped.seconds_left - (time.monotonic() - self.stepped_at))
        return Text.assemble((format_clock(left), "bold"), (" left", "dim"))

    def _figures(self) -> RenderableType:
        wide = self._width >= NARROW
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
        s, held_out = self.stepped, self.held_out
        yield "loss", self._loss()
        yield "learning rate", _value(f"{s.lr:.2e}") if s else UNKNOWN
        yield "held out", _value(f"{held_out:.4f}", f" bits per {self.unit}") if held_out else UNKNOWN
        yield "gradient norm", _value(f"{s.grad_norm:.3f}") if s else UNKNOWN
        yield "speed", _value(f"{s.tokens_per_second:,.0f}", " tokens/s") if s else UNKNOWN
        yield "host Adam", _value(f"{adam_share(s):.1%}", " of a step") if s else UNKNOWN
        device = _value(format_bytes(s.device_bytes)) if s and s.device_bytes else Text("no GPU", "dim")
        yield "device memory", device
        yield "host memory", _value(format_bytes(s.host_bytes)) if s else UNKNOWN

    def _loss(self) -> Text:
        if self.stepped is None:
            return UNKNOWN
        if self.stepped.skipped:
            return Text("overflow: step skipped", "yellow")
        bars = "" if self.console.options.ascii_only else sparkline(self.losses, CURVE)
        return Text.assemble((f"{self.stepped.loss:.4f} ", "bold"), (bars, "cyan"))


@contextmanager
def live_panel(run: RunFolder, unit: str, stopping: Callable[[], str]) -> Generator[LivePanel]:
    """A panel on stdout, a terminal, until the context ends."""
    panel = LivePanel(run, unit, stopping)
    with Live(get_renderable=panel.render, console=panel.console, refresh_per_second=5):
        yield panel
    panel.end()


def _value(text: str, unit: str = "") -> Text:
    return Text.assemble((text, "bold"), (unit, "dim"))


def _thinned(points: tuple[float, ...]) -> tuple[float, ...]:
    """At most MAX_LOSSES points: of more, the means of neighbours, so that the curve spans the whole run."""
    if len(points) <= MAX_LOSSES:
        return points
    return tuple(fmean(points[i : i + 2]) for i in range(0, len(points), 2))
