"""Reads a run folder, also while the run is still writing it.

`RunHistory` has settings, plan and summary of a run, and a row for every step, in ascending order. `LiveHistory`
follows a run. `RecordedStep` is the measured step, a plan and its timeline. Files that zfunc did not write are
refused with their path.
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
from zfunc.core.display import brief
from zfunc.core.plan import Plan, parse
from zfunc.core.timeline import Timeline
from zfunc.viz.chrome_trace import read_chrome_trace
from zfunc.viz.notebook import curves_html

CONFIG, PLAN, TRACE = "config.json", "plan.txt", "timeline.json"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
RECENT = 20  # steps that a speed is the median of
Row = dict[str, Any]
T = TypeVar("T")


@frozen
class RunHistory:
    """A run up to now. `rows` are those of metrics.jsonl; `summary` is empty while it runs, or if it was killed.

    `damage` says which line of the metrics is not valid, and was the last one read; "" if all are.
    """

    path: Path
    config: dict[str, Any]
    rows: tuple[Row, ...]
    summary: dict[str, Any]
    damage: str = ""

    def __repr__(self) -> str:
        return brief(self, "path", "model")

    def _repr_html_(self) -> str:
        names = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}
        return curves_html({title: self.of(name) for name, title in names.items()})

    @property
    def settings(self) -> dict[str, Any]:
        """The settings it trained with, all resolved."""
        return self.config["settings"]

    @property
    def model(self) -> str:
        """A short description of the model."""
        s, what = self.settings, self.config.get("architecture", "GPT")
        parameters = finite_number(self.config.get("parameters")) or 0
        return f"{what} {s.get('num_layers')} x {s.get('hidden_size')}, {parameters:,.0f} parameters"

    @property
    def held_out(self) -> str:
        """The name of the evaluation in a row."""
        return f"held_out_bits_per_{self.unit}"

    @property
    def unit(self) -> str:
        """What a token is: "byte" or "token"."""
        return str(self.config.get("unit", "byte"))

    @property
    def planned(self) -> dict[str, int]:
        """The plan's peak bytes on each tier."""
        return {tier: n for tier, n in self.config["plan"].get("planned_bytes", {}).items() if n}

    @property
    def planned_on_host(self) -> int:
        """The plan's bytes of tensors in host memory, which is also the device's on a CPU."""
        tiers = ("host", "pinned") if self.config["machine"].get("gpu") else ("host", "pinned", "device")
        return sum(self.planned.get(tier, 0) for tier in tiers)

    @property
    def steps(self) -> tuple[Row, ...]:
        """The rows of steps, without that of the evaluation before the first."""
        return tuple(row for row in self.rows if "seconds" in row)

    @property
    def skipped(self) -> list[Row]:
        """The rows of steps that an overflow skipped."""
        return [row for row in self.steps if row.get("skipped") is True]

    def of(self, name: str) -> tuple[tuple[int, float | None], ...]:
        """(step, value) of every row that has a figure; None for a value that is not a finite number."""
        return tuple((row["step"], finite_number(row[name])) for row in self.rows if name in row)


def read_history(run: Path, *, rows: bool = True) -> RunHistory:
    """The run in a folder, on request without its `rows`. Raises ValueError for files that zfunc did not write."""
    config = read_json_object(run / CONFIG)
    if not all(isinstance(config.get(part), dict) for part in ("settings", "plan", "machine")):
        raise ValueError(
            f"{run / CONFIG}: got no settings, plan and machine of a run, expected what zfunc train wrote: name "
            "the folder of another run"
        )
    metrics, summary = run / METRICS, run / SUMMARY
    valid, bad_line = rows_of(metrics.read_bytes() if rows and metrics.exists() else b"")
    damage = f"{metrics}: line {bad_line} is not valid; the rest is not read" if bad_line else ""
    return RunHistory(run, config, valid, read_json_object(summary) if summary.exists() else {}, damage)


def rows_of(text: bytes, after: int = -1) -> tuple[tuple[Row, ...], int]:
    """The complete lines of metrics as rows, and the number of the first invalid one, 0 if all are valid.

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
    """The value as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def numbers(values: Iterable[tuple[int, float | None]]) -> list[float]:
    """The values of a figure by step, without None."""
    return [y for _, y in values if y is not None]


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder. Raises ValueError, naming the folder, if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error, "the folder of a run") from error
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got a damaged file, expected the JSON object that zfunc train wrote: name the folder of "
            "another run"
        )
    return cast("dict[str, Any]", content)


def _unreadable(path: Path, error: OSError, expected: str) -> ValueError:
    """The error for a file of a run folder that cannot be read; the folder itself may be missing."""
    folder = path.parent
    if not os.path.lexists(folder):
        what = f"{folder}, which does not exist"
    elif not folder.is_dir():
        what = f"{folder}, which is not a folder"
    elif isinstance(error, FileNotFoundError):
        what = f"{folder} without a {path.name}"
    else:
        what = f"{folder}, whose {path.name} cannot be read ({error.strerror})"
    return ValueError(
        f"got {what}, expected {expected}: name one that `zfunc train` wrote, such as runs/DATE-TIME"
    )


# --- the measured step ------------------------------------------------------------------------------------


@frozen
class Setting:
    """What a prediction of the step needs to know of the run."""

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

    Raises ValueError for a folder without one, for files that zfunc did not write, or that are not of one plan.
    """
    plan, timeline = _read(run, PLAN, _plan), _read(run, TRACE, read_chrome_trace)
    try:
        events_of(plan, timeline)
    except ValueError as error:
        raise ValueError(f"{run / TRACE}, beside {PLAN}: {error}") from error
    return RecordedStep(plan, timeline, _setting(run))


def _plan(text: str) -> Plan:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; expected the plan that zfunc train wrote: name the folder of another run"
        ) from error


def _setting(run: Path) -> Setting:
    config = read_json_object(run / CONFIG)
    try:
        settings = config["settings"]
        return Setting(settings["schedule"], settings["precision"], config["machine"]["ranks"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{run / CONFIG}: got no settings of a run ({error!r}), expected what zfunc train wrote: name the "
            "folder of another run"
        ) from error


def _read(run: Path, name: str, reader: Callable[[str], T]) -> T:
    try:
        text = (run / name).read_text(encoding="utf-8")
        return reader(text)
    except OSError as error:
        raise _unreadable(run / name, error, "the folder of a run that measured a step") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{run / name}: got a damaged file, expected text: name the folder of another run"
        ) from error
    except ValueError as error:
        raise ValueError(f"{run / name}: {error}") from error


# --- while it grows ---------------------------------------------------------------------------------------


@define(eq=False)
class LiveHistory:
    """Follows a run folder: `update` reads what was added since the last call."""

    path: Path
    run: RunHistory = field(init=False)
    losses: list[float] = field(factory=list[float])
    recent: list[Row] = field(factory=list[Row])  # the last steps
    held_out: float | None = None
    skipped: int = 0
    step: RecordedStep | None = None  # the measured one
    latest: Row | None = None  # the last complete line, to which an evaluation may still be added
    offset: int = 0  # in the metrics, of the line of `latest`
    inode: int = 0
    trace_time: float = 0.0  # when the trace of `step` was written

    def __attrs_post_init__(self) -> None:
        self.update()

    @property
    def rows(self) -> list[Row]:
        """The last steps, including the newest."""
        return [*self.recent, *([self.latest] if self.latest and "seconds" in self.latest else [])]

    @property
    def curve(self) -> list[float]:
        """The losses of all steps up to now."""
        newest = finite_number(self.latest.get("loss")) if self.latest else None
        return self.losses if newest is None else [*self.losses, newest]

    @property
    def last_held_out(self) -> float | None:
        """The newest evaluation."""
        newest = finite_number(self.latest.get(self.run.held_out)) if self.latest else None
        return self.held_out if newest is None else newest

    @property
    def overflows(self) -> int:
        """Number of skipped steps."""
        return self.skipped + bool(self.latest and self.latest.get("skipped") is True)

    def update(self) -> None:
        """Read what is new. Raises ValueError if the folder is not that of a run."""
        self.run = read_history(self.path, rows=False)
        path = self.path / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # the path may name another file by now
            if status.st_ino != self.inode or status.st_size < self.offset:
                self._restart(status.st_ino)
            file.seek(self.offset)
            self._add_lines(file.read())
        self._read_step()

    def _restart(self, inode: int) -> None:
        self.inode, self.offset, self.skipped, self.held_out, self.latest = inode, 0, 0, None, None
        self.losses.clear()
        self.recent.clear()

    def _add_lines(self, text: bytes) -> None:
        """Add all complete lines but the last one, which becomes `latest` and is read again by the next update."""
        rows, _ = rows_of(text)
        lines = text.splitlines(keepends=True)[: len(rows)]
        for row, line in zip(rows[:-1], lines[:-1], strict=True):
            self._add(row)
            self.offset += len(line)
        self.latest = rows[-1] if rows else None

    def _add(self, row: Row) -> None:
        value = finite_number(row.get(self.run.held_out))
        self.held_out = self.held_out if value is None else value
        if "seconds" not in row:
            return
        self.skipped += row.get("skipped") is True
        loss = finite_number(row.get("loss"))
        self.losses += [] if loss is None else [loss]
        self.recent = [*self.recent[-RECENT:], row]

    def _read_step(self) -> None:
        trace = self.path / TRACE
        if not (trace.exists() and (self.path / PLAN).exists()):
            return
        written = trace.stat().st_mtime
        if written != self.trace_time:
            try:
                self.step, self.trace_time = read_recorded_step(self.path), written
            except ValueError:  # the plan is written before the trace: for a moment they may not match
                self.step = None


def typical(rows: Sequence[Row], name: str) -> float | None:
    """The median of a figure over the rows that have it; None if none has."""
    values = [v for row in rows if (v := finite_number(row.get(name))) is not None]
    return median(values) if values else None
