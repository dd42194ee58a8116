"""How long a training is: by steps, by the clock, over all its lives."""

import json
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from zfunc.errors import CheckpointError
from zfunc.train.events import INTERRUPT
from zfunc.train.pacing import WARM_STEPS, StepBudget, TrainingClock, restored_clock
from zfunc.train.settings import TrainSettings


def budget(steps: int | None, seconds: float | None) -> StepBudget:
    return StepBudget(TrainSettings(steps=steps, seconds=seconds), steps)


def paced(
    seconds_each: list[float], *, steps: int | None, seconds: float
) -> tuple[int, float, str, StepBudget]:
    """Steps that take so long, the last of them for ever: when it ended, why, and the length."""
    length, elapsed, step, why = budget(steps, seconds), 0.0, 0, ""
    while not why:
        elapsed += seconds_each[min(step, len(seconds_each) - 1)]
        step += 1
        length = length.after(step, elapsed)
        why = length.end_reason(step, elapsed)
    return step, elapsed, why, length


@pytest.mark.parametrize(
    ("seconds_each", "steps", "seconds", "end"),
    [
        ([0.09], 1000, 100.0, (1000, "steps")),
        ([0.25], 1000, 100.0, (400, "seconds")),
        ([10.0], None, 100.0, (10, "seconds")),
        # Imports and tracing beside two busy loops say nothing about the pace.
        ([8.0] * WARM_STEPS + [0.05], 1500, 140.0, (1500, "steps")),
    ],
)
def test_the_clock_reduces_steps_only_if_it_must(
    seconds_each: list[float], steps: int | None, seconds: float, end: tuple[int, str]
) -> None:
    assert paced(seconds_each, steps=steps, seconds=seconds)[::2] == end


def test_the_totals_of_a_budget_over_time() -> None:
    slow = budget(1000, 100.0)
    for step in range(1, 100):
        slow = slow.after(step, step * 0.2)
    assert slow.total == 500
    assert slow.end_reason(499, 99.8) == ""
    assert slow.end_reason(400, 100.0) == "seconds"
    assert slow.end_reason(10, 1.0, stopping=INTERRUPT) == "interrupt"
    assert budget(None, 100.0).seconds_left(1, 1.0) == 99.0
    # One warm step, of a tenth of the time.
    assert paced([10.0] * 4, steps=1000, seconds=100.0)[3].total == 10
    assert budget(7, None).after(1, 1e9).total == 7
    warming = budget(1500, 140.0)
    for step in range(1, WARM_STEPS + 1):
        warming = warming.after(step, 8.0 * step)
        assert (warming.total, warming.seconds_left(step, 8.0 * step)) == (1500, 140.0 - 8.0 * step)
    assert warming.after(WARM_STEPS + 1, 8.0 * WARM_STEPS + 1.0).total == 1500, "one step is no pace"


@hypothesis(max_examples=50)
@given(
    cold=st.lists(st.floats(0.001, 30), min_size=WARM_STEPS, max_size=WARM_STEPS),
    warm=st.lists(st.floats(0.02, 2), min_size=1, max_size=60),
    steps=st.one_of(st.none(), st.integers(1, 400)),
)
def test_no_run_ends_by_the_clock_while_a_step_still_fits(
    cold: list[float], warm: list[float], steps: int | None
) -> None:
    """However uneven the steps are; and a number of steps that was lowered is no end by itself."""
    taken, elapsed, why, length = paced([*cold, *warm], steps=steps, seconds=30.0)
    if taken == steps:
        assert why == "steps"
    else:
        pace = length.seconds_per_step(elapsed)
        assert why == "seconds"
        assert elapsed >= 30.0 or (30.0 - elapsed) / pace < 1


def test_the_seconds_of_all_sessions_count() -> None:
    settings = TrainSettings(steps=1000, seconds=100.0)
    progress = TrainingClock(StepBudget(settings, 1000))
    for step in range(1, 301):
        progress = progress.stepped(1.0 / step, skipped=False).timed(step, step * 0.2)
    extra = json.loads(json.dumps(progress.extra(settings, ("data",))))
    again = restored_clock(extra, settings, 300)
    afresh = evolve(progress.budget, warmup_left=WARM_STEPS, cold_until=progress.elapsed)  # it traces again
    assert again == evolve(progress, budget=afresh)
    assert again.budget.end_reason(500, 99.0) == "seconds"
    longer = restored_clock(extra, TrainSettings(steps=1000, seconds=200.0), 300)
    assert (longer.budget.total, longer.elapsed) == (1000, progress.elapsed)
    assert restored_clock({}, settings, 300) == TrainingClock.new(settings)


@pytest.mark.parametrize("value", [-1, "many", None, True, [1]])
def test_a_damaged_clock_is_refused(value: Any) -> None:
    settings = TrainSettings()
    extra = TrainingClock.new(settings).extra(settings, ())
    extra["train"]["elapsed"] = value
    with pytest.raises(CheckpointError, match="extra.train.elapsed: got"):
        restored_clock(extra, settings, 1)
