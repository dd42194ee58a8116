"""A run while it goes on: its metrics as they grow, and what its plan says of a step.

The invariant: every line is read once it is whole, and the last one again, because what follows a step is added to
its line. A file that was cut, as by a run that goes on from a checkpoint, is read from its beginning.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from attrs import define, field

from zfunc.train.history import Row, RunHistory, finite_number, read_history, rows_of
from zfunc.train.recorded import METRICS, PLAN, TRACE, RecordedStep, read_recorded_step

RECENT = 20  # steps that a speed is the median of


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
            there = os.fstat(file.fileno())  # of this very file: it may be replaced meanwhile
            if there.st_ino != self.inode or there.st_size < self.at:
                self._forget(there.st_ino)
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
