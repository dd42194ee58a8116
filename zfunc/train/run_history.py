"""Run folders read back: a run's history, up to now or ended, and the step that it measured.

`zfunc.train.run_folder` writes them.
"""

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen, validators

from zfunc.checkpoint.directory import FOLDER
from zfunc.checkpoint.strict_json import MAX_INT, JsonNode, Text, parse_json
from zfunc.core.critical_path import events_of
from zfunc.core.plan import Plan, parse
from zfunc.core.timeline import Timeline
from zfunc.errors import CheckpointError
from zfunc.train.evaluations import Evaluation, best_saved
from zfunc.train.run_files import CONFIG, METRICS, PLAN, SUMMARY, TRACE
from zfunc.train.settings import DPO
from zfunc.units import format_parameters
from zfunc.viz.chrome_trace import read_chrome_trace

LAST = 50  # steps that the loss of a run is the mean of
Row = dict[str, Any]


@frozen
class HeldOutUnit:
    """The unit of a held-out loss: the loss's name in metrics.jsonl, words to print behind it, size in nats."""

    name: str
    words: str
    nats: float


def held_out_unit(unit: str, loss: Any) -> HeldOutUnit:
    """The unit of a held-out loss on data in bytes or tokens, by the setting `loss`: bits, or DPO's own loss.

    >>> held_out_unit("byte", "tokens").words, held_out_unit("token", "dpo").name
    (' bits per byte', 'held_out_loss')
    """
    if loss == DPO:
        return HeldOutUnit("held_out_loss", "", 1.0)
    return HeldOutUnit(f"held_out_bits_per_{unit}", f" bits per {unit}", math.log(2))


@frozen
class RunHistory:
    """A run up to now. `rows` are those of metrics.jsonl; `summary` is {} if the run goes on or was killed.

    `damage` is text on the first invalid line of metrics.jsonl, where reading stopped; "" if all lines are valid.
    """

    path: Path
    config: dict[str, Any]
    rows: tuple[Row, ...]  # in ascending order of steps
    summary: dict[str, Any]
    damage: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, with defaults and "auto" replaced by the values that were used."""
        return self.config["settings"]

    @property
    def model(self) -> str:
        """A short description of the run's model: its architecture, layers, hidden size and parameters."""
        s, what = self.settings, self.config.get("architecture", "GPT")
        count, trained = (finite_number(self.config.get(x)) for x in ("parameters", "trained"))
        of = format_parameters(count or 0, trained or count or 0)
        return f"{what} {s.get('num_layers')} x {s.get('hidden_size')}, {of}"

    @property
    def held_out(self) -> str:
        """The key of the held-out loss in a row of the run's metrics.jsonl."""
        return self.held_out_unit.name

    @property
    def held_out_unit(self) -> HeldOutUnit:
        """The unit of the held-out losses in the run's metrics: bits per byte or token, or DPO's own loss."""
        return held_out_unit(self.unit, self.settings.get("loss"))

    @property
    def unit(self) -> str:
        """The unit of the run's data: "byte" if bytes are the tokens, else "token"."""
        return str(self.config.get("unit", "byte"))

    @property
    def planned(self) -> dict[str, int]:
        """The peak bytes that the run's plan expected on each tier; tiers without any are left out."""
        return {tier: n for tier, n in self.config["plan"].get("planned_bytes", {}).items() if n}

    @property
    def planned_on_host(self) -> int:
        """The run's planned bytes of tensors in host memory, which without a GPU include the device's."""
        tiers = ("host", "pinned") if self.config["machine"].get("gpu") else ("host", "pinned", "device")
        return sum(self.planned.get(tier, 0) for tier in tiers)

    @property
    def steps(self) -> tuple[Row, ...]:
        """The rows of metrics.jsonl that are of training steps: without the evaluation before the first step."""
        return tuple(row for row in self.rows if "seconds" in row)

    @property
    def skipped(self) -> list[Row]:
        """The rows of training steps whose update was skipped, because a gradient overflowed."""
        return [row for row in self.steps if row.get("skipped") is True]

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The run's held-out losses by step, each with the name of that step's checkpoint, if it still exists."""
        losses, folder = self.of(self.held_out), self.path / FOLDER
        names = {row["step"]: str(row["saved"]) for row in self.rows if "saved" in row}
        there = {step: name for step, name in names.items() if (folder / name).is_dir()}
        return tuple(
            Evaluation(step, math.inf if loss is None else loss, there.get(step, "")) for step, loss in losses
        )

    @property
    def best(self) -> Evaluation | None:
        """The evaluation of least held-out loss whose checkpoint exists; None without the setting `keep_best`."""
        return best_saved(self.evaluations) if self.settings.get("keep_best") else None

    @property
    def last_losses(self) -> list[float]:
        """The training losses of the last 50 steps at most; steps without a finite loss are left out."""
        return self.numbers("loss")[-LAST:]

    def of(self, name: str) -> tuple[tuple[int, float | None], ...]:
        """(step, value) of every row that has the key `name`; None for a value that is not a finite number."""
        return tuple((row["step"], finite_number(row[name])) for row in self.rows if name in row)

    def numbers(self, name: str) -> list[float]:
        """The finite values of key `name` in the rows, in ascending order of steps."""
        return [y for _, y in self.of(name) if y is not None]


def read_history(run: Path) -> RunHistory:
    """The RunHistory of run folder `run`, finished or not. Raises ValueError for files zfunc did not write."""
    config, end, metrics = read_json_object(run / CONFIG), run / SUMMARY, run / METRICS
    summary = read_json_object(end) if end.exists() else {}
    with _reading(run / CONFIG):  # what readers take as it is
        begun, ended = (JsonNode(x, str(at)).entries() for x, at in ((config, run / CONFIG), (summary, end)))
        for name in ("settings", "plan", "machine"):
            begun[name].read(dict)
        for entries, name, kind in (
            (begun, "data", tuple[str, ...]),
            (begun["plan"].entries(), "planned_bytes", Mapping[str, float]),
            (ended, "peak_bytes", Mapping[str, float]),
            (ended, "ended", Text),
        ):
            if name in entries:
                entries[name].read(kind)
    valid, bad_line = rows_of(metrics.read_bytes() if metrics.exists() else b"")
    damage = f"{metrics}: line {bad_line} is not valid; the rest is not read" if bad_line else ""
    return RunHistory(run, config, valid, summary, damage)


def settings_of(place: Path) -> dict[str, Any]:
    """The settings of the run whose folder, or whose checkpoint, `place` is; empty if there is no run."""
    for config in (folder / CONFIG for folder in (place, *place.absolute().parents[:2])):
        if config.is_file() and (settings := read_json_object(config).get("settings")):
            return settings
    return {}


def best_checkpoint(run: Path) -> Path | None:
    """The path of the checkpoint of least held-out loss in a run with `keep_best`; None for any other folder."""
    if not (run / CONFIG).is_file() or not settings_of(run).get("keep_best"):
        return None
    best = read_history(run).best
    return best and run / FOLDER / best.saved


def rows_of(text: bytes, after: int = -1) -> tuple[tuple[Row, ...], int]:
    """The rows in `text`, lines of metrics.jsonl of rising steps above `after`; number of the first bad line, or 0.

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
    """`value` as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in file `path` of a run folder. Raises ValueError, naming file and line, if there is none."""
    with _reading(path):
        return parse_json(path.read_bytes(), str(path)).read(dict)


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """A context that turns an error in reading a run's file `path` into a ValueError with reason and advice."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"got {path.parent}, whose {path.name} cannot be read ({error.strerror}), expected the folder of a run"
            f"{' that measured a step' * (path.name in (PLAN, TRACE))}: name one that `zfunc train` wrote"
        ) from error
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        what = f"got no {error}" if isinstance(error, KeyError) else str(error)
        what = what.partition(": the file is damaged")[0]
        at = "" if what.startswith(str(path.parent)) else f"{path}: "
        expected = "" if "expected" in what else ", expected what zfunc train wrote"
        raise ValueError(f"{at}{what}{expected}: name the folder of another run") from error


@frozen
class RecordedStep:
    """A step that a run measured: its plan and timeline, and the run's schedule, precision and number of ranks."""

    plan: Plan
    timeline: Timeline
    schedule: str = field(validator=validators.instance_of(str))
    precision: str = field(validator=validators.instance_of(str))
    world: int = field(validator=[validators.instance_of(int), validators.ge(1)])
    stage: str = ""  # which one, of a pipeline over ranks


def read_recorded_step(run: Path) -> RecordedStep:
    """The measured step in the run folder `run`.

    Raises ValueError for a folder without a measured step, for files that zfunc did not write, and for a
    timeline of another plan.
    """
    with _reading(run / PLAN):
        plan = parse((run / PLAN).read_text(encoding="utf-8"))
    with _reading(run / TRACE):
        timeline = read_chrome_trace((run / TRACE).read_text(encoding="utf-8"))
        events_of(plan, timeline)
    config = read_json_object(run / CONFIG)
    with _reading(run / CONFIG):
        settings, ranks = config["settings"], config["machine"]["ranks"]
        how = settings["schedule"], settings["precision"], ranks, words_of_stage(settings)
        return RecordedStep(plan, timeline, *how)


def words_of_stage(settings: Mapping[str, Any]) -> str:
    """Text on a measured step of 4 pipeline stages: ", the first of 4 stages"; "" for a step without."""
    pp = settings.get("pp", 1)  # runs of older versions have no such setting
    return f", the first of {pp} stages" if pp > 1 else ""
