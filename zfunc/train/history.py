"""What a training left in its run folder, read back: settings, plan, a row for every step, and how it ended.

The invariant: a value that exists has settings and plan of a run, and rows whose steps rise; a figure that is not
a finite number is None. A run may still be writing: a last line that is not whole is not there yet.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from zfunc.train.recorded import CONFIG, METRICS, SUMMARY

Row = dict[str, Any]


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
        """A figure by step, where it was told."""
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
    found, lost = rows_of(metrics.read_bytes() if rows and metrics.exists() else b"")
    told = f"{metrics}: line {lost} is none that zfunc wrote; what follows it is not read" if lost else ""
    return RunHistory(run, config, found, _object(summary) if summary.exists() else {}, told)


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
            found = json.loads(line)
        except (ValueError, RecursionError):
            return tuple(rows), n
        row = cast("Row", found) if isinstance(found, dict) else {}
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"got {path.parent} without a {path.name} that can be read ({reason}), expected the folder of a run: "
            "name one that `zfunc train` left, such as runs/DATE-TIME"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path}: got no JSON object, expected what zfunc train wrote: name the folder of another run"
        )
    return cast("dict[str, Any]", found)
