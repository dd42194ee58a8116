"""The run folder: the files that a training run writes, readable at every moment.

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
`zfunc.train.history` reads these files.
"""

import errno
import json
import logging
import math
import os
from contextlib import suppress
from datetime import datetime
from io import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from attrs import define, field

from zfunc.checkpoint.durable_files import atomic_replace, is_partial, lock, replace_text
from zfunc.train.deepspeed.keys import read_file
from zfunc.train.events import Evaluated, Event, Finished, Sampled, Saved, Started, Stepped, Traced
from zfunc.train.history import CONFIG, METRICS, PLAN, SUMMARY, TRACE, Row, read_json_object, rows_of
from zfunc.viz.chrome_trace import chrome_trace
from zfunc.viz.timeline_html import page
from zfunc.viz.timeline_svg import svg

RUNS = Path("runs")
log = logging.getLogger("zfunc")


@define(eq=False)
class RunFolder:
    """An open run folder, locked against other processes."""

    path: Path
    new: bool  # created by this run
    _lock: int
    begun: bool = False
    summary: dict[str, Any] = field(factory=dict[str, Any])  # as written
    _config: dict[str, Any] = field(factory=dict[str, Any])  # as written
    _metrics: BinaryIO | None = None
    _row: Row = field(factory=dict[str, Any])  # the last line of the metrics
    _at: int = 0  # byte at which it begins

    def record(self, event: Event) -> None:
        """Write an event."""
        match event:
            case Started():
                self._begin(event)
            case Evaluated():
                self._add(event.step, {self._held_out: event.held_out})
            case Saved():
                saved = {"not_saved": event.failure} if event.path is None else {"saved": event.path.name}
                self._add(event.step, saved)
            case Stepped():
                fields = attrs.asdict(event, filter=attrs.filters.exclude("step", "held_out", "seconds_left"))
                fields[self._held_out] = event.held_out
                self._add(event.step, {k: x for k, x in fields.items() if x not in (None, {})})
            case Traced():
                plan, timeline, title = event.plan, event.timeline, self._title(event)
                replace_text(self.path / "timeline.svg", svg(timeline, plan=plan, title=title))
                replace_text(self.path / "timeline.html", page(timeline, plan=plan, title=title))
                replace_text(self.path / PLAN, plan.text())
                replace_text(self.path / TRACE, chrome_trace(timeline))
            case Finished():
                fields = attrs.asdict(event, filter=attrs.filters.exclude("held_out", "checkpoint"))
                name = event.checkpoint and event.checkpoint.name
                self._summarize({**fields, self._held_out: event.held_out, "checkpoint": name, "sample": ""})
            case Sampled():
                self._summarize({"sample": event.text, **({"prompt": event.prompt} if event.prompt else {})})
            case _:
                pass

    def fail(self, error: BaseException) -> None:
        """Write to the summary why the run failed. Training that had ended stays so: only the sample is missing."""
        stopped = isinstance(error, KeyboardInterrupt)
        if self.begun and not (stopped and self.summary):
            message = f"{type(error).__name__}: {error}".rstrip(": ")
            ended = {} if self.summary else {"ended": "stopped at once" if stopped else "failed"}
            with suppress(OSError):  # a full disk may be the error itself
                self._summarize({**ended, "error": message})

    def close(self) -> None:
        """Close the files. A folder that this run created and wrote nothing to is removed."""
        if self._metrics is not None:
            self._metrics.close()
        if self.new and not self.begun:
            self.path.joinpath(METRICS).unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty where beginning failed
                self.path.rmdir()
        os.close(self._lock)

    def _begin(self, event: Started) -> None:
        """Write the configuration, and the metrics up to the checkpoint if that is the run's own."""
        self.path.joinpath(SUMMARY).unlink(missing_ok=True)
        for partial in filter(is_partial, self.path.iterdir()):
            partial.unlink()
        self._config = _config(event)
        lines = [_line(row) for row in self._kept(event)]
        with atomic_replace(self.path / METRICS) as file:
            file.writelines(lines)
        self._metrics = self.path.joinpath(METRICS).open("r+b")
        if lines:
            self._row, self._at = json.loads(lines[-1]), sum(map(len, lines[:-1]))
        replace_text(self.path / CONFIG, _json(self._config))
        self.begun = True

    def _kept(self, event: Started) -> list[Row]:
        """The rows up to the checkpoint. Its own step loses its evaluation, which is repeated if it is due."""
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
        return f"held_out_bits_per_{self._config['unit']}"

    def _add(self, step: int, fields: dict[str, Any]) -> None:
        """Add to the row of a step, which is the last one or a new one. A run that is killed keeps every step."""
        assert self._metrics is not None
        if self._row.get("step") != step:
            self._row, self._at = {"step": step}, self._metrics.seek(0, SEEK_END)
        self._row |= fields
        self._metrics.seek(self._at)
        self._metrics.write(_line(self._row))
        self._metrics.flush()

    def _summarize(self, fields: dict[str, Any]) -> None:
        """Write the summary, or add to it."""
        self.summary |= fields
        replace_text(self.path / SUMMARY, _json(self.summary))

    def _title(self, event: Traced) -> str:
        s, machine = _plain(self._config["settings"]), self._config["machine"]
        where = machine["gpu"] or f"{machine['cores']} cores of {machine['cpu']}"
        model = f"{s['num_layers']} x {s['hidden_size']} {self._config['architecture']}, {s['precision']}"
        return f"{s['schedule']}: step {event.step} of a {model}, measured on {where}"


def create_run(out: Path | None, *, again: bool = False) -> RunFolder:
    """Make the folder `out`, or one in `runs` named after date and time.

    With `again` the folder may be that of a run, which is resumed. Raises ValueError if it holds other files, is
    locked by another process, or cannot be written.
    """
    try:
        path = out or _unnamed()
        new = not path.exists() or out is None
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = lock(path, wait=False)
        try:
            if not again or not _is_run(path):
                _check_empty(path, again=again)
        except BaseException:
            os.close(descriptor)
            raise
        return RunFolder(path, new, descriptor)
    except BlockingIOError as error:
        raise ValueError(
            f"out: got {out or RUNS}, in which another process is at work, expected a folder of this run alone: "
            "wait for it, or name another"
        ) from error
    except OSError as error:
        raise ValueError(
            f"out: got {out or RUNS}, which cannot be written ({error.strerror or error}), expected a folder "
            "that can be created and written: name another"
        ) from error


def _unnamed() -> Path:
    """A new folder, created here, so that two runs started in the same second get different ones."""
    RUNS.mkdir(exist_ok=True)
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise FileExistsError(f"{RUNS / name} and a thousand more exist")


def _is_run(path: Path) -> bool:
    try:
        return {"settings", "plan"} <= read_json_object(path / CONFIG).keys()
    except ValueError:
        return False


def _check_empty(path: Path, *, again: bool) -> None:
    """Refuse a folder with files, except for those of a run that was killed before it began, to go on with."""
    files = list(path.iterdir())
    if again and all(is_partial(x) or (x.name == METRICS and not x.stat().st_size) for x in files):
        return
    if again:
        raise ValueError(
            f"out: got {path}, which holds files, but no {CONFIG} of a run, expected the folder of a run, or one "
            "that is new or empty: name another"
        )
    if files:
        raise ValueError(
            f"out: got {path}, which holds files already, expected a new or empty folder: name another, or "
            "resume the run in it with `resume=auto`; no run is ever overwritten"
        )


def _config(event: Started) -> dict[str, Any]:
    plan, file = event.plan, event.settings.config
    return {
        "settings": {**attrs.asdict(event.settings), **event.sizes},
        "architecture": event.architecture or "GPT",
        "deepspeed": None if file is None else read_file(file),
        "data": event.data,
        "unit": event.unit,
        "parameters": event.parameters,
        "trained": event.trained,
        "plan": {
            "digest": plan.digest,
            "operations": len(plan.graph.ops),
            "lanes": [lane.name for lane in plan.lanes],
            "waits": plan.num_waits,
            "planned_bytes": event.planned_bytes,
        },
        "machine": event.machine,
        "resumed_from": event.checkpoint and str(event.checkpoint),
    }


def _line(fields: dict[str, Any]) -> bytes:
    return (json.dumps(_plain(fields)) + "\n").encode()


def _json(value: dict[str, Any]) -> str:
    return json.dumps(_plain(value), indent=2) + "\n"


def _plain(value: Any) -> Any:
    """JSON's own types; it has no inf and no NaN."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
