"""`zfunc top`: a training seen from outside while it goes on, with what the machine does meanwhile.

The invariant: it only reads, so the training does not know of it; a line holds printable characters only, and what
is not known is said so.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import define, field
from rich.console import Console
from rich.live import Live
from rich.text import Text

from zfunc.cli.panel import curve
from zfunc.cli.report import ENDED
from zfunc.cli.sensors import Cores, cores, gpus, host_memory, process_of
from zfunc.cli.terminal import printable
from zfunc.train.history import METRICS, LiveHistory, finite_number, typical
from zfunc.units import format_bytes, format_clock, format_seconds

CURVE, BAR = 24, 20  # characters
LEAST = 0.3  # seconds between two readings of the cores
UNKNOWN = "unknown"


@define(eq=False)
class TopView:
    """A run and the machine under it, read when `frame` is asked for."""

    path: Path
    plain: bool = False  # ASCII alone
    follow: LiveHistory = field(init=False)
    before: Cores = field(factory=cores)

    def __attrs_post_init__(self) -> None:
        self.follow = LiveHistory(self.path)

    @property
    def ended(self) -> bool:
        """Whether the run says so."""
        return bool(self.follow.run.summary)

    def frame(self) -> list[str]:
        """What there is to see now, a line each."""
        self.follow.look()
        rows = [
            ("run", self._run()),
            ("state", self._state()),
            *self._training(),
            *self._machine(),
            *self._lanes(),
        ]
        wide = max(len(name) for name, _ in rows)
        return [printable(f"{name:<{wide}}  {text}".rstrip()) for name, text in rows]

    def _run(self) -> str:
        run = self.follow.run
        s, where = run.settings, run.config["machine"].get("gpu") or "cpu"
        return f"{run.model}, {s.get('precision')} on {where}; {self.path}"

    def _state(self) -> str:
        summary, pid = self.follow.run.summary, process_of(self.path)
        if summary:
            error = f": {summary['error']}" if "error" in summary else ""
            return ENDED.get(summary.get("ended", ""), "ended") + error
        return "no process is known to train in it" if pid is None else f"trains, in process {pid}"

    # --- the training ------------------------------------------------------------------------------------

    def _training(self) -> Iterator[tuple[str, str]]:
        rows = self.follow.rows
        if not rows:
            yield "step", "none is done yet"
            return
        last, took = rows[-1], typical(rows, "seconds")
        yield "step", self._step(last["step"], finite_number(last.get("total")), took)
        loss, held_out = finite_number(last.get("loss")), self.follow.last_held_out
        bars = "" if self.plain else curve(self.follow.curve, CURVE)
        told = (
            ""
            if held_out is None
            else f"  held out {held_out:.4f} {self.follow.run.held_out[9:].replace('_', ' ')}"
        )
        yield "loss", f"{_form(loss, '.4f')} {bars}{told}"
        scale = finite_number(last.get("loss_scale"))
        rest = f"  scale {scale:g}" if scale not in (None, 1.0) else ""
        lr, norm = finite_number(last.get("lr")), finite_number(last.get("grad_norm"))
        yield "lr", f"{_form(lr, '.2e')}  norm {_form(norm, '.3f')}{rest}  skipped {self.follow.overflows}"
        speed = typical(rows, "tokens_per_second")
        yield "speed", f"{_form(speed, ',.0f')} tokens/s, a step in {format_seconds(took or 0.0)}"
        yield "optimizer", self._host(took)

    def _step(self, step: int, total: float | None, took: float | None) -> str:
        ago = time.time() - (self.path / METRICS).stat().st_mtime
        age = "" if self.ended else f", the last one {format_clock(max(0.0, ago))} ago"
        if not total:
            return f"{step:,}{age}"
        left = (
            ""
            if self.ended or took is None
            else f", about {format_clock(took * max(0.0, total - step))} left"
        )
        return f"{step:,} of {total:,.0f} {self._bar(step / total)}{left}{age}"

    def _host(self, took: float | None) -> str:
        """Host operations of a step: their share, and the bytes that the plan says they move, in that time."""
        seconds = typical(self.follow.rows, "host_seconds")
        if seconds is None or not took:
            return UNKNOWN
        share = f"host operations are {seconds / took:.0%} of the step"
        if self.follow.step is None:
            return f"{share}; host bandwidth is known once a step was measured"
        nbytes = sum(op.nbytes for op in self.follow.step.plan.graph if op.kind == "host")
        return f"{share}, at {nbytes / seconds / 1e9:.1f} GB/s" if seconds else share

    # --- the machine -------------------------------------------------------------------------------------

    def _machine(self) -> Iterator[tuple[str, str]]:
        now = cores()
        busy, self.before = now.busy_since(self.before), now
        share = "" if busy is None else f" {self._bar(busy / now.count)}"
        yield "cores", f"{_form(busy, '.1f')} of {now.count} busy{share}"
        memory, rows = host_memory(), self.follow.rows
        whole = (
            UNKNOWN if memory is None else f"{format_bytes(memory[0])} of {format_bytes(memory[1])} in use"
        )
        own = finite_number(rows[-1].get("host_bytes")) if rows else None
        yield "memory", whole + ("" if own is None else f", {format_bytes(own)} by the training")
        if self.follow.run.config["machine"].get("gpu") is None:
            return
        found = gpus()
        if isinstance(found, str):
            yield "GPU", found
            return
        for n, gpu in enumerate(found):
            used = f"{format_bytes(gpu.used)} of {format_bytes(gpu.total)}"
            yield f"GPU {n}", f"{gpu.busy:>4.0%} {self._bar(gpu.busy)} {used}  {gpu.name}"

    def _lanes(self) -> Iterator[tuple[str, str]]:
        if self.follow.step is None:
            return
        timeline = self.follow.step.timeline
        for n, lane in enumerate(timeline.lanes):
            busy = timeline.busy(lane)
            told = " of the measured step" if n == 0 else ""
            yield f"lane {lane}", f"{busy:>4.0%} {self._bar(busy)}{told}"

    def _bar(self, share: float) -> str:
        full = round(BAR * min(1.0, max(0.0, share)))
        return "#" * full + "." * (BAR - full) if self.plain else "█" * full + "░" * (BAR - full)


def _form(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def show_run(path: Path, *, once: bool, every: float) -> None:
    """Print one frame, or draw it anew every so many seconds until the run has ended.

    One frame it is too where stdout is no terminal. Raises ValueError for a folder that is no run's.
    """
    console = Console(highlight=False)
    top = TopView(path, plain=(sys.stdout.encoding or "").lower().replace("-", "") != "utf8")
    if once or not console.is_terminal:
        time.sleep(LEAST)
        print("\n".join(top.frame()), flush=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            text = "\n".join(top.frame())
            live.update(Text(text, overflow="ellipsis", no_wrap=True), refresh=True)
            if top.ended:
                return
            time.sleep(every)
