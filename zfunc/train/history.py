"""What a training left in its run folder, read back, also while it still grows.

`RunHistory` has settings, plan and summary of a run, and a row for every step, whose numbers rise; a figure that is
not a finite number is None. `LiveHistory` looks at a run again and again. `RecordedStep` is the measured step: its
plan and timeline are of each other. What is not zfunc's is refused, with its path.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

from attrs import define, field, frozen, validators

from zfunc.core.bottleneck import events_of
from zfunc.core.plan import Plan, parse
from zfunc.core.timeline import Timeline
from zfunc.viz.chrome_trace import read_chrome_trace

CONFIG, PLAN, TRACE = "config.json", "plan.txt", "timeline.json"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
RECENT = 20  # steps that a speed is the median of
Row = dict[str, Any]
T = TypeVar("T")


@frozen
class RunHistory:
    """A run up to now. `rows` as in metrics.jsonl; `summary` is empty for one that goes on, or was killed.

    `lost` says which line of the metrics is none, after which nothing was read; "" if all were.
    """

    path: Path
    config: dict[str, Any]
    rows: tuple[Row, ...]
    summary: dict[str, Any]
    lost: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Those it trained with, nothing left open."""
        return self.config["settings"]

    @property
    def model(self) -> str:
        """What is trained, in a few words."""
        s, what = self.settings, self.config.get("architecture", "GPT")
        parameters = finite_number(self.config.get("parameters")) or 0
        return f"{what} {s.get('num_layers')} x {s.get('hidden_size')}, {parameters:,.0f} parameters"

    @property
    def held_out(self) -> str:
        """The name of an evaluation among the figures of a row."""
        return f"held_out_bits_per_{self.config.get('unit', 'byte')}"

    @property
    def planned(self) -> dict[str, int]:
        """The most bytes on each tier, by the plan."""
        return {tier: n for tier, n in self.config["plan"].get("planned_bytes", {}).items() if n}

    @property
    def planned_on_host(self) -> int:
        """Bytes of tensors that are planned in the memory of the host. A CPU is its own device."""
        tiers = ("host", "pinned") if self.config["machine"].get("gpu") else ("host", "pinned", "device")
        return sum(self.planned.get(tier, 0) for tier in tiers)

    @property
    def steps(self) -> tuple[Row, ...]:
        """The rows of steps: the evaluation before the first has a row of its own."""
        return tuple(row for row in self.rows if "seconds" in row)

    @property
    def skipped(self) -> list[Row]:
        """The rows of steps that were skipped for an overflow."""
        return [row for row in self.steps if row.get("skipped") is True]

    def of(self, name: str) -> tuple[tuple[int, float | None], ...]:
        """A figure by step, from the rows that have it."""
        return tuple((row["step"], finite_number(row[name])) for row in self.rows if name in row)


def read_history(run: Path, *, rows: bool = True) -> RunHistory:
    """The run in a folder, or but for its `rows`. Raises ValueError for a folder or files that are not zfunc's."""
    config = _object(run / CONFIG)
    if not all(isinstance(config.get(part), dict) for part in ("settings", "plan", "machine")):
        raise ValueError(
            f"{run / CONFIG}: got no settings, plan and machine of a run, expected what zfunc train wrote: name "
            "the folder of another run"
        )
    metrics, summary = run / METRICS, run / SUMMARY
    kept, lost = rows_of(metrics.read_bytes() if rows and metrics.exists() else b"")
    note = f"{metrics}: line {lost} is none that zfunc wrote; what follows it is not read" if lost else ""
    return RunHistory(run, config, kept, _object(summary) if summary.exists() else {}, note)


def rows_of(text: bytes, after: int = -1) -> tuple[tuple[Row, ...], int]:
    """The whole lines of metrics as rows, and the number of the first that is none, 0 if all are.

    >>> rows_of(b'{"step": 1}\\n{"step": 2')
    (({'step': 1},), 0)
    """
    rows: list[Row] = []
    for n, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            return tuple(rows), n
        row = cast("Row", content) if isinstance(content, dict) else {}
        if type(row.get("step")) is not int or row["step"] <= after:
            return tuple(rows), n
        rows.append(row)
        after = row["step"]
    return tuple(rows), 0


def finite_number(value: object) -> float | None:
    """A finite number as one; anything else is None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def numbers(values: Iterable[tuple[int, float | None]]) -> list[float]:
    """Those of a figure by step that are numbers."""
    return [y for _, y in values if y is not None]


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"got {path.parent} without a {path.name} that can be read ({reason}), expected the folder of a run: "
            "name one that `zfunc train` left, such as runs/DATE-TIME"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got no JSON object, expected what zfunc train wrote: name the folder of another run"
        )
    return cast("dict[str, Any]", content)


# --- the measured step ------------------------------------------------------------------------------------


@frozen
class Setting:
    """What a prediction of the step needs: its schedule, the precision it computed in, and the number of ranks."""

    schedule: str = field(validator=validators.instance_of(str))
    precision: str = field(validator=validators.instance_of(str))
    world: int = field(validator=[validators.instance_of(int), validators.ge(1)])


@frozen
class RecordedStep:
    """A step that a run measured, and its plan."""

    plan: Plan
    timeline: Timeline
    setting: Setting


def read_recorded_step(run: Path) -> RecordedStep:
    """The measured step in the folder of a run.

    Raises ValueError for a folder without one, for files that are none of zfunc's, or not of one plan.
    """
    plan, timeline = _read(run, PLAN, _plan), _read(run, TRACE, read_chrome_trace)
    try:
        events_of(plan, timeline)
    except ValueError as error:
        raise ValueError(f"{run / TRACE}, beside {PLAN}: {error}") from error
    return RecordedStep(plan, timeline, _read(run, CONFIG, _setting))


def _plan(text: str) -> Plan:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; expected the plan that zfunc train wrote: name the folder of another run"
        ) from error


def _setting(text: str) -> Setting:
    try:
        config = json.loads(text)
        settings = config["settings"]
        return Setting(settings["schedule"], settings["precision"], config["machine"]["ranks"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"got no settings of a run ({error!r}), expected what zfunc train wrote: name the folder of another run"
        ) from error


def _read(run: Path, name: str, reader: Callable[[str], T]) -> T:
    try:
        text = (run / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"got {run} without a {name} that can be read ({reason}), expected the folder of a run that measured a "
            "step: name one that `zfunc train` left, such as runs/DATE-TIME"
        ) from error
    try:
        return reader(text)
    except ValueError as error:
        raise ValueError(f"{run / name}: {error}") from error


# --- while it grows ---------------------------------------------------------------------------------------


@define(eq=False)
class LiveHistory:
    """A run folder that is looked at again and again."""

    path: Path
    run: RunHistory = field(init=False)
    losses: list[float] = field(factory=list[float])
    recent: list[Row] = field(factory=list[Row])  # the last steps
    held_out: float | None = None
    skipped: int = 0
    step: RecordedStep | None = None  # the measured one
    latest: Row | None = None  # the last whole line, which may still grow
    at: int = 0  # bytes of the metrics that were read for good
    inode: int = 0
    measured: float = 0.0  # when the trace was written that `step` is from

    def __attrs_post_init__(self) -> None:
        self.look()

    @property
    def rows(self) -> list[Row]:
        """The last steps, the newest included."""
        return [*self.recent, *([self.latest] if self.latest and "seconds" in self.latest else [])]

    @property
    def curve(self) -> list[float]:
        """The loss of every step up to now that has one."""
        newest = finite_number(self.latest.get("loss")) if self.latest else None
        return self.losses if newest is None else [*self.losses, newest]

    @property
    def last_held_out(self) -> float | None:
        """The newest evaluation."""
        newest = finite_number(self.latest.get(self.run.held_out)) if self.latest else None
        return self.held_out if newest is None else newest

    @property
    def overflows(self) -> int:
        """Steps that were skipped."""
        return self.skipped + bool(self.latest and self.latest.get("skipped") is True)

    def look(self) -> None:
        """Read what is new. Raises ValueError for a folder that is no run's."""
        self.run = read_history(self.path, rows=False)
        path = self.path / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # of this very file: it may be replaced meanwhile
            if status.st_ino != self.inode or status.st_size < self.at:
                self._forget(status.st_ino)
            file.seek(self.at)
            self._take(file.read())
        self._measured()

    def _forget(self, inode: int) -> None:
        self.inode, self.at, self.skipped, self.held_out, self.latest = inode, 0, 0, None, None
        self.losses.clear()
        self.recent.clear()

    def _take(self, text: bytes) -> None:
        """All but the last whole line for good; that one for now: it is `latest` until it is read again."""
        rows, _ = rows_of(text)
        lines = text.splitlines(keepends=True)[: len(rows)]
        for row, line in zip(rows[:-1], lines[:-1], strict=True):
            self._keep(row)
            self.at += len(line)
        self.latest = rows[-1] if rows else None

    def _keep(self, row: Row) -> None:
        value = finite_number(row.get(self.run.held_out))
        self.held_out = self.held_out if value is None else value
        if "seconds" not in row:
            return
        self.skipped += row.get("skipped") is True
        loss = finite_number(row.get("loss"))
        self.losses += [] if loss is None else [loss]
        self.recent = [*self.recent[-RECENT:], row]

    def _measured(self) -> None:
        trace = self.path / TRACE
        if not (trace.exists() and (self.path / PLAN).exists()):
            return
        written = trace.stat().st_mtime
        if written != self.measured:
            try:
                self.step, self.measured = read_recorded_step(self.path), written
            except ValueError:  # the plan is written before the trace: they may be of two steps for a moment
                self.step = None


def typical(rows: Sequence[Row], name: str) -> float | None:
    """The median of a figure; None if no row has it."""
    values = [v for row in rows if (v := finite_number(row.get(name))) is not None]
    return median(values) if values else None
