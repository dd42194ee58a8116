"""The run folder: what a job leaves on disk, readable at every moment.

- `config.json`: all settings with nothing left open, data, plan, machine and versions; written at the start.
- `metrics.jsonl`: one JSON object a step, appended and flushed as the step ends. An evaluation adds
  `held_out_bits_per_byte` (or `..._per_token`, for tokens) to the object of the step it follows; the one before the
  first step is an object of its own, with step 0.
- `timeline.svg`, `timeline.json`: one measured step, as a picture and as a Chrome trace.
- `summary.json`: how it ended. A job that was killed has none.

The invariant: a file that is there is whole, but for the last line of `metrics.jsonl`, and no run writes into
another's folder.
"""

import json
import math
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import attrs
from attrs import frozen

from zfunc.draw import chrome_trace, svg
from zfunc.train import Evaluated, Event, Finished, Started, Stepped, Traced

RUNS = Path("runs")


@frozen(eq=False)
class Run:
    """An open run folder."""

    path: Path
    new: bool  # made for this run
    metrics: TextIO

    def close(self) -> None:
        """Close the files; a folder in which nothing was written is removed if it was made for this run."""
        self.metrics.close()
        if not (self.path / "config.json").exists():
            self.path.joinpath("metrics.jsonl").unlink()
            if self.new:
                self.path.rmdir()


def create(out: Path | None) -> Run:
    """Make the folder `out`, or one in `runs` named after date and time, and open its metrics.

    Raises ValueError if it holds files already, or cannot be written: said before anything is computed.
    """
    try:
        path = out or _unnamed()
        new = not path.exists() or out is None
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ValueError(
                f"--out: got {path}, which holds files already, expected a new or empty folder: name another; "
                "no run is ever overwritten"
            )
        return Run(path, new, path.joinpath("metrics.jsonl").open("x", encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--out: got {out or RUNS}, which cannot be written ({error.strerror or error}), expected a folder "
            "with room for a few files: name another with --out"
        ) from error


def record(run: Run, event: Event, unit: str) -> None:
    """Write down what happened. `unit` is that of the data."""
    held_out = f"held_out_bits_per_{unit}"
    match event:
        case Started():
            write_whole(run.path / "config.json", _json(_config(event)))
        case Evaluated():
            _append(run.metrics, {"step": event.step, held_out: event.held_out})
        case Stepped():
            fields = attrs.asdict(event, filter=attrs.filters.exclude("held_out", "seconds_left"))
            _append(run.metrics, fields if event.held_out is None else {**fields, held_out: event.held_out})
        case Traced():
            title = _title(event, json.loads((run.path / "config.json").read_text()))
            write_whole(run.path / "timeline.svg", svg(event.timeline, plan=event.plan, title=title))
            write_whole(run.path / "timeline.json", chrome_trace(event.timeline))
        case Finished():
            fields = attrs.asdict(event, filter=attrs.filters.exclude("held_out", "sample"))
            fields |= {held_out: event.held_out, "sample": sample_text(event, unit)}
            write_whole(run.path / "summary.json", _json(fields))


def record_failure(run: Run, error: BaseException) -> None:
    """Write down that, and why, the job did not end by itself."""
    if (run.path / "config.json").exists():
        told = f"{type(error).__name__}: {error}".rstrip(": ")
        ended = "stopped at once" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(OSError):  # a full disk may be the error itself, which is what has to be told
            write_whole(run.path / "summary.json", _json({"ended": ended, "error": told}))


def sample_text(event: Finished, unit: str) -> str:
    """The sample as text, for bytes; as numbers, for tokens whose words are not known."""
    if unit == "byte":
        return bytes(event.sample).decode("utf-8", errors="replace")
    return " ".join(map(str, event.sample))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole, or not at all. A link is followed; a device or pipe is written to."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _unnamed() -> Path:
    """A folder nobody has: made here, so that two runs of one second get one each."""
    RUNS.mkdir(exist_ok=True)
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{RUNS / name} and a thousand more are there")


def _config(event: Started) -> dict[str, Any]:
    plan = event.plan
    return {
        "settings": attrs.asdict(event.settings),
        "data": event.data,
        "unit": event.unit,
        "parameters": event.parameters,
        "plan": {
            "digest": plan.digest,
            "operations": len(plan.graph.ops),
            "lanes": [lane.name for lane in plan.lanes],
            "waits": plan.num_waits,
            "planned_bytes": event.planned_bytes,
        },
        "machine": event.machine,
    }


def _title(event: Traced, config: dict[str, Any]) -> str:
    s, machine = config["settings"], config["machine"]
    where = machine["gpu"] or f"{machine['cores']} cores of {machine['cpu']}"
    model = f"{s['num_layers']} x {s['hidden_size']} GPT, {s['precision']}"
    return f"{s['schedule']}: step {event.step} of a {model}, measured on {where}"


def _append(metrics: TextIO, fields: dict[str, Any]) -> None:
    metrics.write(json.dumps({k: _plain(v) for k, v in fields.items()}) + "\n")
    metrics.flush()  # a run that is killed keeps every step


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
