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
from attrs import define

from zfunc.checkpoint.durable_files import atomic_replace, is_partial, lock, replace_text
from zfunc.train.deepspeed.keys import read_file
from zfunc.train.events import Evaluated, Event, Finished, Sampled, Saved, Started, Stepped, Traced
from zfunc.train.history import CONFIG, METRICS, PLAN, SUMMARY, TRACE, read_json_object, rows_of
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
    _metrics: BinaryIO | None = None  # None in a resumed run, until it begins
    step: int = -1  # of the last line
    begun: bool = False
    summary: dict[str, Any] | None = None  # as written

    def begin(self, event: Started, held_out: str) -> None:
        """Write the configuration. A resumed run first removes its summary and the metrics after its checkpoint."""
        if self._metrics is None:
            self.path.joinpath(SUMMARY).unlink(missing_ok=True)
            for partial in filter(is_partial, self.path.iterdir()):
                partial.unlink()
            self._truncate_metrics(event, held_out)
        replace_text(self.path / CONFIG, _json(_config(event)))
        self.begun = True

    def append(self, step: int, fields: dict[str, Any]) -> None:
        """Write the line of a step."""
        assert self._metrics is not None
        self._metrics.write(_line({"step": step, **fields}))
        self._metrics.flush()  # a run that is killed keeps every step
        self.step = step

    def amend(self, step: int, fields: dict[str, Any]) -> None:
        """Add to the last line, in place, or write a new line if the last one is another step's."""
        if self.step != step:
            self.append(step, fields)
            return
        assert self._metrics is not None
        self._metrics.seek(-2, SEEK_END)  # the closing brace and the newline
        self._metrics.write(b", " + _line(fields)[1:])
        self._metrics.flush()

    def summarize(self, fields: dict[str, Any]) -> None:
        """Write the summary, or add to it."""
        self.summary = {**(self.summary or {}), **fields}
        replace_text(self.path / SUMMARY, _json(self.summary))

    def _truncate_metrics(self, event: Started, held_out: str) -> None:
        """Keep the lines up to the checkpoint that was loaded, if it is the run's own; otherwise none.

        The checkpoint's own step loses its evaluation, which is repeated if it is due.
        """
        path, last = self.path / METRICS, event.step if event.own else 0
        read = rows_of(path.read_bytes() if last and path.exists() else b"")[0]
        rows = [row for row in read if row["step"] <= last]
        if event.own and (not rows or rows[-1]["step"] != last):
            log.warning(
                "%s: got no line of step %d, after which the run resumes: lines are missing", path, last
            )
        elif event.own and event.checkpoint is not None:
            row = {k: v for k, v in rows[-1].items() if k not in (held_out, "not_saved")}
            rows[-1] = {**row, "saved": event.checkpoint.name}
        with atomic_replace(path) as file:
            file.writelines(map(_line, rows))
        self._metrics = path.open("r+b")
        self._metrics.seek(0, SEEK_END)
        self.step = rows[-1]["step"] if rows else -1

    def close(self) -> None:
        """Close the files. A folder that this run created and wrote nothing to is removed."""
        if self._metrics is not None:
            self._metrics.close()
        if not (self.path / CONFIG).exists():
            self.path.joinpath(METRICS).unlink(missing_ok=True)
            if self.new:
                self.path.rmdir()
        os.close(self._lock)


def create_run(out: Path | None, *, again: bool = False) -> RunFolder:
    """Make the folder `out`, or one in `runs` named after date and time, and open its metrics.

    With `again` the folder may be that of a run, which is resumed. Raises ValueError if it holds other files, is
    locked by another process, or cannot be written.
    """
    try:
        path = out or _unnamed()
        new = not path.exists() or out is None
        path.mkdir(parents=True, exist_ok=True)
        descriptor = lock(path, wait=False)
        try:
            if again and _is_run(path):
                return RunFolder(path, False, descriptor)
            _check_empty(path, again=again)
            return RunFolder(path, new, descriptor, path.joinpath(METRICS).open("x+b"))
        except BaseException:
            os.close(descriptor)
            raise
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


def record_event(run: RunFolder, event: Event, unit: str) -> None:
    """Write an event to the folder. `unit` is that of the data, "byte" or "token"."""
    held_out = f"held_out_bits_per_{unit}"
    match event:
        case Started():
            run.begin(event, held_out)
        case Evaluated():
            run.amend(event.step, {held_out: event.held_out})
        case Saved():
            outcome = {"not_saved": event.failure} if event.path is None else {"saved": event.path.name}
            run.amend(event.step, outcome)
        case Stepped():
            fields = attrs.asdict(
                event, filter=attrs.filters.exclude("step", "held_out", "epoch", "seconds_left")
            )
            more = {"epoch": event.epoch, held_out: event.held_out}
            run.append(event.step, {k: x for k, x in (fields | more).items() if x not in (None, {})})
        case Traced():
            title = _title(event, json.loads((run.path / CONFIG).read_text()))
            replace_text(run.path / "timeline.svg", svg(event.timeline, plan=event.plan, title=title))
            replace_text(run.path / "timeline.html", page(event.timeline, plan=event.plan, title=title))
            replace_text(run.path / PLAN, event.plan.text())
            replace_text(run.path / TRACE, chrome_trace(event.timeline))
        case Finished():
            fields = attrs.asdict(event, filter=attrs.filters.exclude("held_out", "checkpoint"))
            name = event.checkpoint and event.checkpoint.name
            run.summarize({**fields, held_out: event.held_out, "checkpoint": name, "sample": ""})
        case Sampled():
            run.summarize({"sample": event.text, **({"prompt": event.prompt} if event.prompt else {})})
        case _:
            pass


def record_failure(run: RunFolder, error: BaseException) -> None:
    """Write to the summary why the run failed. Training that had ended stays so: only the sample is missing."""
    stopped = isinstance(error, KeyboardInterrupt)
    if run.begun and not (stopped and run.summary):
        message = f"{type(error).__name__}: {error}".rstrip(": ")
        ended = {} if run.summary else {"ended": "stopped at once" if stopped else "failed"}
        with suppress(OSError):  # a full disk may be the error itself
            run.summarize({**ended, "error": message})


def _unnamed() -> Path:
    """A new folder, created here, so that two runs started in the same second get different ones."""
    RUNS.mkdir(exist_ok=True)
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{RUNS / name} and a thousand more exist")


def _config(event: Started) -> dict[str, Any]:
    plan = event.plan
    return {
        "settings": {**attrs.asdict(event.settings), **event.sizes},
        "architecture": event.architecture or "GPT",
        "deepspeed": None if event.settings.config is None else read_file(event.settings.config),
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


def _title(event: Traced, config: dict[str, Any]) -> str:
    s, machine = config["settings"], config["machine"]
    where = machine["gpu"] or f"{machine['cores']} cores of {machine['cpu']}"
    model = f"{s['num_layers']} x {s['hidden_size']} {config['architecture']}, {s['precision']}"
    return f"{s['schedule']}: step {event.step} of a {model}, measured on {where}"


def _line(fields: dict[str, Any]) -> bytes:
    return (json.dumps({k: _plain(v) for k, v in fields.items()}) + "\n").encode()


def _is_run(path: Path) -> bool:
    try:
        return {"settings", "plan"} <= read_json_object(path / CONFIG).keys()
    except ValueError:
        return False


def _check_empty(path: Path, *, again: bool) -> None:
    """Refuse a folder with files, except for those of a run that was killed before it began, which are deleted."""
    files = list(path.iterdir())
    if again:
        leftovers = [x for x in files if is_partial(x) or (x.name == METRICS and not x.stat().st_size)]
        if len(leftovers) == len(files):
            for x in leftovers:
                x.unlink()
            return
        raise ValueError(
            f"out: got {path}, which holds files, but no {CONFIG} of a run, expected the folder of a run, or one "
            "that is new or empty: name another"
        )
    if files:
        raise ValueError(
            f"out: got {path}, which holds files already, expected a new or empty folder: name another, or "
            "resume the run in it with `resume=auto`; no run is ever overwritten"
        )


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
