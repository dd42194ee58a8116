"""The step that a run measured, read back from its folder: the plan that ran, and when it ran.

The invariant: plan and timeline are of each other. What is not whole, or not zfunc's, is refused with its path.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from attrs import field, frozen, validators

from zfunc.core.critical_path import events_of
from zfunc.core.plan import Plan, parse
from zfunc.core.timeline import Timeline
from zfunc.viz.chrome_trace import read_chrome_trace

CONFIG, PLAN, TRACE = "config.json", "plan.txt", "timeline.json"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
T = TypeVar("T")


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
