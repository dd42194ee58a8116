"""The run folder: the files that a training run writes, readable at every moment, and read back.

- `config.json`: all settings, resolved, data, plan, machine and versions, and the checkpoint it was resumed from;
  written at the start.
- `metrics.jsonl`: one JSON object a step, appended and flushed as the step ends. An evaluation adds
  `held_out_bits_per_byte` (or `..._per_token`, for tokens) to the object of the step it follows, a checkpoint adds
  `saved`, its name, or `not_saved`, the reason. The evaluation before the first step is an object of its own, with
  step 0. `aux` and `norms` are objects in it, where the model or `norms` has them.
- `checkpoints`: see `zfunc.checkpoint.directory`.
- `timeline.svg`, `timeline.html`, `timeline.json`: one measured step, as a picture, an interactive page and a
  Chrome trace. `plan.txt`: the plan it ran. `zfunc draw` compares plan and trace.
- `summary.json`: how it ended. A run that was killed has none. The sample is added to it when it is complete.

Every file is complete, except for the last line of `metrics.jsonl`, and no run writes into another's folder. A run
that resumes in its folder removes the lines after its checkpoint, so they are those of a run that never stopped.
Files that zfunc did not write are refused with their path.
"""

import errno
import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, cast

import attrs
from attrs import define, field

from zfunc.checkpoint.durable_files import atomic_replace, is_partial, lock, replace_text, write_all
from zfunc.checkpoint.strict_json import MAX_INT
from zfunc.core.display import counted
from zfunc.errors import DiskError, explain_os_errors, refuse
from zfunc.train.events import AT_ONCE, Evaluated, Event, Finished, Sampled, Saved, Started, Stepped, Traced
from zfunc.train.run_files import CONFIG, METRICS, PLAN, SUMMARY, TRACE
from zfunc.train.run_history import (
    Row,
    held_out_unit,
    read_history,
    read_json_object,
    rows_of,
    words_of_stage,
)
from zfunc.viz.chrome_trace import chrome_trace
from zfunc.viz.timeline_html import page
from zfunc.viz.timeline_svg import svg

RUNS = Path("runs")
# Of a step's metrics, what is recorded.
MEASURED = "loss", "lr", "grad_norm", "skipped", "loss_scale", "seconds", "host_seconds", "aux", "norms"
log = logging.getLogger("zfunc")


def jsonable(value: Any) -> Any:
    """`value` in JSON's own types, which a checkpoint takes too: a path or an integer of more than 64 bits becomes
    a text, inf and NaN null; characters of a text that cannot be encoded are replaced."""
    if isinstance(value, Mapping):
        return {name: jsonable(x) for name, x in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [jsonable(x) for x in cast("list[Any]", value)]
    if isinstance(value, Path | str) or (isinstance(value, int) and abs(value) > MAX_INT):
        return str(value).encode(errors="replace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@define(eq=False)
class RunFolder:
    """The folder of a run, open for writing and locked against other processes."""

    path: Path
    new: bool  # created by this run
    _lock: int
    begun: bool = False
    summary: dict[str, Any] = field(factory=dict[str, Any])  # as written
    _config: dict[str, Any] = field(factory=dict[str, Any])  # as written
    _metrics: BinaryIO | None = None
    row: Row = field(factory=dict[str, Any])  # the last line of the metrics
    _before: list[bytes] = field(factory=list[bytes])  # lines before it to write with it, from byte `_at` on
    _at: int = 0
    _told: bool = False  # that they cannot be written now

    def record(self, event: Event) -> None:
        """Write an event of the training into the run folder's files. While steps are taken a disk that takes
        nothing, such as a full one, is a warning: lines of the metrics wait, a timeline is left out."""
        try:
            self._record(event)
        except DiskError as error:
            if isinstance(event, Started | Finished | Sampled):
                raise
            if not self._told:
                log.warning("%s; training goes on", error)
            self._told = True

    def _record(self, event: Event) -> None:
        match event:
            case Started():
                self._begin(event)
            case Evaluated():
                self._add_to_row(event.step, {self._held_out: event.held_out})
            case Saved():
                saved = {"not_saved": event.failure} if event.path is None else {"saved": event.path.name}
                self._add_to_row(event.step, saved)
            case Stepped():
                left_out = attrs.filters.exclude("step", "metrics", "held_out", "seconds_left")
                fields = {name: getattr(event.metrics, name) for name in MEASURED}
                # No line of text is for outputs of rows.
                fields["aux"] = {name: x for name, x in fields["aux"].items() if isinstance(x, int | float)}
                fields |= attrs.asdict(event, filter=left_out) | {self._held_out: event.held_out}
                self._add_to_row(event.step, {k: x for k, x in fields.items() if x not in (None, {})})
            case Traced():
                plan, timeline, title = event.plan, event.timeline, self._title(event)
                replace_text(self.path / "timeline.svg", svg(timeline, plan=plan, title=title))
                replace_text(self.path / "timeline.html", page(timeline, plan=plan, title=title))
                replace_text(self.path / PLAN, plan.text())
                replace_text(self.path / TRACE, chrome_trace(timeline))
            case Finished():
                if self.row:
                    self._write_rows()
                fields = attrs.asdict(event, filter=attrs.filters.exclude("held_out", "checkpoint"))
                run, name = read_history(self.path), event.checkpoint and event.checkpoint.name
                fields |= {"loss": fmean(run.last_losses or [math.nan]), "skipped": len(run.skipped)}
                fields |= {self._held_out: event.held_out, "checkpoint": name}
                self._summarize({**fields, "best": run.best and run.best.saved, "sample": ""})
            case Sampled():
                self._summarize({"sample": event.text, **({"prompt": event.prompt} if event.prompt else {})})
            case _:
                pass

    def fail(self, error: BaseException) -> None:
        """Write the error to the run's summary.json, and "failed" as the ending unless training had ended
        before. A run interrupted before its first step leaves no config or metrics."""
        stopped = isinstance(error, KeyboardInterrupt)
        if (
            stopped and self.begun and not self.row.get("step")
        ):  # before the first step: the next run may begin here
            self.path.joinpath(CONFIG).unlink(missing_ok=True)
            self.path.joinpath(METRICS).unlink(missing_ok=True)
            self.begun = False
        if self.begun and not (stopped and self.summary):
            message = f"{type(error).__name__}: {error}".rstrip(": ")
            ended = {} if self.summary else {"ended": AT_ONCE if stopped else "failed"}
            with suppress(OSError):  # a full disk may be the error itself
                self._summarize({**ended, "error": message})

    def close(self) -> None:
        """Close the files of the run folder. A folder that this run created and wrote nothing to is removed."""
        if self._metrics is not None:
            self._metrics.close()
        if self.new and not self.begun:
            self.path.joinpath(METRICS).unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty where beginning failed
                self.path.rmdir()
        os.close(self._lock)

    def _begin(self, event: Started) -> None:
        """Begin the run's files: write config.json and a new metrics.jsonl, with the run's earlier rows up to
        the checkpoint that it resumes from."""
        self.path.joinpath(SUMMARY).unlink(missing_ok=True)
        for partial in filter(is_partial, self.path.iterdir()):
            partial.unlink()
        self._config = _begun(event)
        rows = self._rows_to_keep(event)
        with self._writing(), atomic_replace(self.path / METRICS) as file:
            file.writelines(map(_line, rows))
        self._metrics = self.path.joinpath(METRICS).open("r+b", buffering=0)
        if rows:
            self.row, self._at = rows[-1], sum(len(_line(x)) for x in rows[:-1])
        self._write(CONFIG, self._config)
        self.begun = True

    def _rows_to_keep(self, event: Started) -> list[Row]:
        """The run's rows of metrics.jsonl up to the step of the checkpoint that it resumes from, the last row
        without its evaluation, which is repeated if due."""
        path = self.path / METRICS
        if not event.own or not event.step:
            return []
        rows = [x for x in rows_of(path.read_bytes() if path.exists() else b"")[0] if x["step"] <= event.step]
        if not rows or rows[-1]["step"] != event.step:
            lost = "%s: got no line of step %d, after which the run resumes: lines are missing"
            log.warning(lost, path, event.step)
        elif event.checkpoint is not None:
            row = {k: v for k, v in rows[-1].items() if k not in (self._held_out, "not_saved")}
            rows[-1] = {**row, "saved": event.checkpoint.name}
        return rows

    @property
    def _held_out(self) -> str:
        return held_out_unit(self._config["unit"], self._config["settings"].get("loss")).name

    def _add_to_row(self, step: int, fields: dict[str, Any]) -> None:
        """Add `fields` to the row of `step` in metrics.jsonl, the last row or a new one."""
        if self.row.get("step") != step:
            self._before += [_line(self.row)] if self.row else []
            self.row = {"step": step}
        self.row |= fields
        self._write_rows()

    def _write_rows(self) -> None:
        """Write the last row, and those before it from byte `_at` on. Raises DiskError."""
        assert self._metrics is not None
        done = b"".join(self._before)
        with self._writing():
            write_all(self._metrics.fileno(), memoryview(done + _line(self.row)), self._at)
        self._before, self._at, self._told = [], self._at + len(done), False

    def _writing(self) -> AbstractContextManager[None]:
        return explain_os_errors(DiskError, self.path / METRICS, "writing it", {})

    def _summarize(self, fields: dict[str, Any]) -> None:
        """Add `fields` to the run's summary.json, which is written if there is none."""
        self.summary |= fields
        self._write(SUMMARY, self.summary)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        replace_text(self.path / name, json.dumps(jsonable(value), indent=2) + "\n")

    def _title(self, event: Traced) -> str:
        s, machine = self._config["settings"], self._config["machine"]
        where = machine["gpu"] or f"{counted(machine['cores'], 'core')} of {machine['cpu']}"
        model = f"{s['num_layers']} x {s['hidden_size']} {self._config['architecture']}, {s['precision']}"
        return f"{s['schedule']}: step {event.step} of a {model}{words_of_stage(s)}, measured on {where}"


def _line(row: Row) -> bytes:
    return (json.dumps(jsonable(row)) + "\n").encode()


def _begun(event: Started) -> dict[str, Any]:
    job = event.job
    program, plan, file = job.program, job.program.plan, job.settings.config
    return {
        "settings": {**job.settings.recorded(), **job.sizes},
        "architecture": job.architecture or "GPT",
        "deepspeed": None if file is None else file.written,
        "data": job.corpus.description,
        "unit": job.corpus.unit,
        "parameters": program.layout.num_parameters,
        "trained": program.layout.num_trainable,
        "plan": {
            "digest": plan.digest,
            "operations": len(plan.graph.ops),
            "lanes": [lane.name for lane in plan.lanes],
            "waits": plan.num_waits,
            "planned_bytes": job.planned_bytes,
        },
        "machine": job.machine,
        "resumed_from": event.checkpoint and str(event.checkpoint),
    }


def create_run(out: Path | None, *, again: bool = False) -> RunFolder:
    """Make and lock the folder `out` of a run, or one in `runs` named after date and time.

    With `again` the folder may be that of an earlier run, to resume it. Raises ValueError if it holds other files,
    is locked by another process, or cannot be written.
    """
    try:
        path = out or _unnamed()
        new = not path.exists() or out is None
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = lock(path, wait=False)
    except OSError as error:
        got, do = f"which cannot be written ({error.strerror or error})", "name another"
        if isinstance(error, FileExistsError):  # a file, or a link that leads nowhere
            got = "which is no folder"
        if isinstance(error, BlockingIOError):
            got, do = "in which another process is at work", "wait for it, or name another"
        expected = "a folder of this run alone that can be written"
        refuse("out", f"{out or RUNS}, {got}", expected, do, cause=error)
    # What a run that was killed before it began leaves is nothing
    left = [x for x in path.iterdir() if not again or not _is_left(x)]
    if left and not (again and _is_run(path)):
        os.close(descriptor)
        got, do = "files already", "name another, or resume the run in it with `resume=auto`"
        if again:
            got, do = f"files, but no {CONFIG} of a run", "name another"
        do = f"{do}; no run is ever overwritten"
        refuse("out", f"{path}, which holds {got}", "a new or empty folder", do)
    return RunFolder(path, new, descriptor)


def _unnamed() -> Path:
    """Create a folder in `runs`, named after date and time; two runs of one second get different names."""
    RUNS.mkdir(exist_ok=True)
    path = RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
    path = RUNS / f"{path.name}-{os.getpid()}" if path.exists() else path
    path.mkdir()
    return path


def _is_left(path: Path) -> bool:
    return is_partial(path) or (path.name == METRICS and not path.stat().st_size)


def _is_run(path: Path) -> bool:
    try:
        return {"settings", "plan"} <= read_json_object(path / CONFIG).keys()
    except ValueError:
        return False
