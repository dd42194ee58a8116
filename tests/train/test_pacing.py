"""How long a training is: by steps, by the clock, over all its lives."""

import json
from typing import Any

import pytest

from zfunc.errors import CheckpointError
from zfunc.train.events import INTERRUPT
from zfunc.train.resume import TrainingClock, changed_settings, restored_clock
from zfunc.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("steps", "seconds", "step", "elapsed", "why"),
    [
        (10, None, 9, 1e9, INTERRUPT),
        (10, None, 10, 1.0, "steps"),
        (10, 5.0, 9, 4.9, INTERRUPT),
        (10, 5.0, 9, 5.0, "seconds"),
        (10, 5.0, 10, 5.0, "steps"),  # all that were requested
        (None, 5.0, 10**6, 4.9, INTERRUPT),
        (None, 5.0, 1, 5.1, "seconds"),
    ],
)
def test_what_ends_a_training(
    steps: int | None, seconds: float | None, step: int, elapsed: float, why: str
) -> None:
    clock = TrainingClock(TrainSettings(steps=steps, seconds=seconds), elapsed)
    assert clock.end_reason(step, stopping=INTERRUPT) == why


def test_the_seconds_of_all_sessions_count() -> None:
    settings = TrainSettings(steps=1000, seconds=100.0)
    clock = TrainingClock(settings, elapsed=60.0)
    for step in range(1, 301):
        clock = clock.stepped(1.0 / step, skipped=step == 7)
    extra = json.loads(json.dumps(clock.extra(("data",))))
    assert restored_clock(extra, settings) == clock
    assert restored_clock({}, settings) == TrainingClock(settings)
    assert not list(changed_settings(extra, settings, ("data",)))


def test_a_checkpoint_whose_length_was_planned_by_the_clock() -> None:
    """As it was written before: the steps that were to fit into --seconds, and what their pace was counted from."""
    settings = TrainSettings(steps=1000, seconds=100.0)
    extra = TrainingClock(settings, 20.0, 1, (2.0, 1.0)).extra(("data",))
    extra["train"] |= {"total": 400, "looks": 2, "counted": 70, "cold": 3.5}
    assert restored_clock(extra, settings) == TrainingClock(settings, 20.0, 1, (2.0, 1.0))
    assert not list(changed_settings(extra, settings, ("data",)))


@pytest.mark.parametrize("value", [-1, "many", None, True, [1]])
def test_a_damaged_clock_is_refused(value: Any) -> None:
    settings = TrainSettings()
    extra = TrainingClock(settings).extra(())
    extra["train"]["elapsed"] = value
    with pytest.raises(CheckpointError, match="extra.train.elapsed: got"):
        restored_clock(extra, settings)
