"""`zfunc top`: watch a training from outside, and what the machine does meanwhile.

It only reads the run folder, so the training goes on undisturbed. What cannot be read is shown as unknown.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from attrs import define, field, frozen

from zfunc.cli.command import EXIT_OK, Command
from zfunc.cli.commands.report import RUN
from zfunc.cli.sensors import Cores, cores, gpus, host_memory, process_of
from zfunc.cli.terminal import printable, sparkline
from zfunc.cli.train_lines import ENDINGS, held_out_line
from zfunc.options import Option, anything, check_each, positive
from zfunc.train.history import METRICS, LiveHistory, finite_number, typical
from zfunc.units import format_bytes, format_clock, format_seconds

CURVE, BAR = 24, 20  # characters
SHORTEST = 0.3  # seconds between two readings of the cores

TOP = {
    "run": RUN,
    "once": Option("screen", "print one frame, and end; in a pipe it always does", anything),
    "every": Option("screen", "seconds from one frame to the next", positive),
}


@frozen(kw_only=True)
class TopSettings:
    """A run to watch."""

    run: Path
    once: bool = False
    every: float = 1.0

    def __attrs_post_init__(self) -> None:
        check_each(self, TOP)


def run_top(settings: TopSettings) -> int:
    """`zfunc top`: one frame, or a new one every so many seconds until the run ends, or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with suppress(KeyboardInterrupt):
        console = Console(highlight=False)
        ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        view = TopView(settings.run, plain=ascii_only)
        if settings.once or not console.is_terminal:
            time.sleep(SHORTEST)
            print("\n".join(view.frame()), flush=True)
            return EXIT_OK
        with Live(console=console, auto_refresh=False) as live:
            while True:
                text = "\n".join(view.frame())
                live.update(Text(text, overflow="ellipsis", no_wrap=True), refresh=True)
                if view.ended:
                    break
                time.sleep(settings.every)
    return EXIT_OK


@define(eq=False)
class TopView:
    """A run and its machine; `frame` reads both."""

    path: Path
    plain: bool = False  # ASCII alone
    history: LiveHistory = field(init=False)
    before: Cores = field(factory=cores)

    def __attrs_post_init__(self) -> None:
        self.history = LiveHistory(self.path)

    @property
    def ended(self) -> bool:
        """Whether the run has a summary."""
        return bool(self.history.run.summary)

    def frame(self) -> list[str]:
        """The lines to show now."""
        self.history.update()
        rows = [
            ("run", self._run()),
            ("state", self._state()),
            *self._training(),
            *self._machine(),
            *self._lanes(),
        ]
        width = max(len(name) for name, _ in rows)
        return [printable(f"{name:<{width}}  {text}".rstrip()) for name, text in rows]

    def _run(self) -> str:
        run = self.history.run
        device = run.config["machine"].get("gpu") or "cpu"
        return f"{run.model}, {run.settings.get('precision')} on {device}; {self.path}"

    def _state(self) -> str:
        summary, pid = self.history.run.summary, process_of(self.path)
        if summary:
            error = f": {summary['error']}" if "error" in summary else ""
            return ENDINGS.get(summary.get("ended", ""), "ended") + error
        return "no process is known to train in it" if pid is None else f"trains, in process {pid}"

    # --- the training ------------------------------------------------------------------------------------

    def _training(self) -> Iterator[tuple[str, str]]:
        rows = self.history.rows
        if not rows:
            yield "step", "none is done yet"
            return
        last, seconds = rows[-1], typical(rows, "seconds")
        yield "step", self._step(last["step"], finite_number(last.get("total")), seconds)
        loss, held_out = finite_number(last.get("loss")), self.history.last_held_out
        bars = "" if self.plain else sparkline(self.history.curve, CURVE)
        evaluated = "" if held_out is None else f"  {held_out_line(held_out, self.history.run.unit)}"
        yield "loss", f"{_format(loss, '.4f')} {bars}{evaluated}"
        loss_scale = finite_number(last.get("loss_scale"))
        scale = f"  scale {loss_scale:g}" if loss_scale not in (None, 1.0) else ""
        lr, norm = finite_number(last.get("lr")), finite_number(last.get("grad_norm"))
        skipped = self.history.overflows
        yield "lr", f"{_format(lr, '.2e')}  norm {_format(norm, '.3f')}{scale}  skipped {skipped}"
        speed = typical(rows, "tokens_per_second")
        yield "speed", f"{_format(speed, ',.0f')} tokens/s, a step in {format_seconds(seconds or 0.0)}"
        yield "optimizer", self._host(seconds)

    def _step(self, step: int, total: float | None, seconds: float | None) -> str:
        ago = time.time() - (self.path / METRICS).stat().st_mtime
        age = "" if self.ended else f", the last one {format_clock(max(0.0, ago))} ago"
        if not total:
            return f"{step:,}{age}"
        remaining = None if self.ended or seconds is None else seconds * max(0.0, total - step)
        left = "" if remaining is None else f", about {format_clock(remaining)} left"
        return f"{step:,} of {total:,.0f} {self._bar(step / total)}{left}{age}"

    def _host(self, seconds: float | None) -> str:
        """Host operations: their share of the step, and the bytes that they move by the plan, in that time."""
        host_seconds = typical(self.history.rows, "host_seconds")
        if host_seconds is None or not seconds:
            return "unknown"
        share = f"host operations are {host_seconds / seconds:.0%} of the step"
        if self.history.step is None:
            return f"{share}; host bandwidth is known once a step was measured"
        nbytes = sum(op.nbytes for op in self.history.step.plan.graph if op.kind == "host")
        return f"{share}, at {nbytes / host_seconds / 1e9:.1f} GB/s" if host_seconds else share

    # --- the machine -------------------------------------------------------------------------------------

    def _machine(self) -> Iterator[tuple[str, str]]:
        now = cores()
        busy, self.before = now.busy_since(self.before), now
        share = "" if busy is None else f" {self._bar(busy / now.count)}"
        yield "cores", f"{_format(busy, '.1f')} of {now.count} busy{share}"
        memory, rows = host_memory(), self.history.rows
        in_use = "unknown" if memory is None else "{} of {} in use".format(*map(format_bytes, memory))
        own = finite_number(rows[-1].get("host_bytes")) if rows else None
        yield "memory", in_use + ("" if own is None else f", {format_bytes(own)} by the training")
        if self.history.run.config["machine"].get("gpu") is None:
            return
        devices = gpus()
        if isinstance(devices, str):
            yield "GPU", devices
            return
        for n, gpu in enumerate(devices):
            used = f"{format_bytes(gpu.used)} of {format_bytes(gpu.total)}"
            yield f"GPU {n}", f"{gpu.busy:>4.0%} {self._bar(gpu.busy)} {used}  {gpu.name}"

    def _lanes(self) -> Iterator[tuple[str, str]]:
        if self.history.step is None:
            return
        timeline = self.history.step.timeline
        for n, lane in enumerate(timeline.lanes):
            busy = timeline.busy(lane)
            note = " of the measured step" if n == 0 else ""
            yield f"lane {lane}", f"{busy:>4.0%} {self._bar(busy)}{note}"

    def _bar(self, share: float) -> str:
        full = round(BAR * min(1.0, max(0.0, share)))
        return "#" * full + "." * (BAR - full) if self.plain else "█" * full + "░" * (BAR - full)


def _format(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


COMMAND = Command(
    "watch a run: loss, speed, cores, memory, GPUs, lanes",
    "The run goes on undisturbed: only its folder is read. GPUs are shown where nvidia-ml-py is installed.",
    TopSettings,
    TOP,
    run_top,
    """
    # until it ends
    zfunc top runs/20261121-050604
    # what there is to see now
    zfunc top runs/20261121-050604 --once
    """,
    "It ends with the run, or at Ctrl-C (exit code 0).",
)
