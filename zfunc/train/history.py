"""Reads a run folder, also while the run is still writing it.

`RunHistory` has settings, plan and summary of a run, and a row for every step, in ascending order. `RecordedStep`
is the measured step, a plan and its timeline. Files that zfunc did not write are refused with their path.
"""

import json
import math
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen, validators

from zfunc.checkpoint.strict_json import MAX_INT, JsonNode, Text, parse_json
from zfunc.core.bottleneck import events_of
from zfunc.core.display import brief
from zfunc.core.plan import Plan, parse
from zfunc.core.timeline import Timeline
from zfunc.errors import CheckpointError
from zfunc.units import format_parameters
from zfunc.viz.chrome_trace import read_chrome_trace
from zfunc.viz.notebook import curves_html

CONFIG, PLAN, TRACE = "config.json", "plan.txt", "timeline.json"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
Row = dict[str, Any]


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
        count, trained = (finite_number(self.config.get(x)) for x in ("parameters", "trained"))
        of = format_parameters(count or 0, trained or count or 0)
        return f"{what} {s.get('num_layers')} x {s.get('hidden_size')}, {of}"

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


def read_history(run: Path) -> RunHistory:
    """The run in a folder. Raises ValueError for files that zfunc did not write."""
    config = read_json_object(run / CONFIG)
    if not all(isinstance(config.get(part), dict) for part in ("settings", "plan", "machine")):
        raise ValueError(
            f"{run / CONFIG}: got no settings, plan and machine of a run, expected what zfunc train wrote: name "
            "the folder of another run"
        )
    metrics, end = run / METRICS, run / SUMMARY
    summary = read_json_object(end) if end.exists() else {}
    with _reading(run / CONFIG):
        _check_types(JsonNode(config, str(run / CONFIG)), JsonNode(summary, str(end)))
    valid, bad_line = rows_of(metrics.read_bytes() if metrics.exists() else b"")
    damage = f"{metrics}: line {bad_line} is not valid; the rest is not read" if bad_line else ""
    return RunHistory(run, config, valid, summary, damage)


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
        if type(row.get("step")) is not int or not after < row["step"] <= MAX_INT:
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
    """The JSON object in a file of a run folder. Raises ValueError, naming file and line, if there is none."""
    with _reading(path):
        node = parse_json(path.read_bytes(), str(path))
        node.entries()
        return cast("dict[str, Any]", node.value)


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Whatever is wrong with a file of a run folder: its path, what is wrong, and to name another folder."""
    try:
        yield
    except OSError as error:
        folder, what = path.parent, f"{path.parent}, whose {path.name} cannot be read ({error.strerror})"
        if not os.path.lexists(folder):
            what = f"{folder}, which does not exist"
        elif not folder.is_dir():
            what = f"{folder}, which is not a folder"
        elif isinstance(error, FileNotFoundError):
            what = f"{folder} without a {path.name}"
        raise ValueError(
            f"got {what}, expected the folder of a run{' that measured a step' * (path.name in (PLAN, TRACE))}: "
            "name one that `zfunc train` wrote, such as runs/DATE-TIME"
        ) from error
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        what = str(error).partition(": the file is damaged")[0]
        if isinstance(error, KeyError | TypeError):
            what = f"got no settings of a run ({error!r})"
        place = "" if what.startswith(str(path.parent)) else f"{path}: "
        expected = "" if "expected" in what else ", expected what zfunc train wrote"
        raise ValueError(f"{place}{what}{expected}: name the folder of another run") from error


def _check_types(config: JsonNode, summary: JsonNode) -> None:
    """Raise CheckpointError, with the place, for what readers take as it is."""
    begun, ended, nothing = config.entries(), summary.entries(), JsonNode({}, "")
    planned = begun["plan"].entries().get("planned_bytes", nothing)
    for sizes in (planned, ended.get("peak_bytes", nothing)):
        for size in sizes.entries().values():
            size.read(float)
    if "data" in begun:
        begun["data"].read(tuple[str, ...])
    if "ended" in ended:
        ended["ended"].read(Text)


# --- the measured step ------------------------------------------------------------------------------------


@frozen
class RecordedStep:
    """A step that a run measured, its plan, and what a prediction of it needs to know of the run."""

    plan: Plan
    timeline: Timeline
    schedule: str = field(validator=validators.instance_of(str))
    precision: str = field(validator=validators.instance_of(str))
    world: int = field(validator=[validators.instance_of(int), validators.ge(1)])


def read_recorded_step(run: Path) -> RecordedStep:
    """The measured step in the folder of a run.

    Raises ValueError for a folder without one, for files that zfunc did not write, or that are not of one plan.
    """
    with _reading(run / PLAN):
        plan = parse((run / PLAN).read_text(encoding="utf-8"))
    with _reading(run / TRACE):
        timeline = read_chrome_trace((run / TRACE).read_text(encoding="utf-8"))
        events_of(plan, timeline)
    config = read_json_object(run / CONFIG)
    with _reading(run / CONFIG):
        settings = config["settings"]
        ranks = config["machine"]["ranks"]
        return RecordedStep(plan, timeline, settings["schedule"], settings["precision"], ranks)
