"""Learning rates are pure functions of the step, counted from 1."""

import pytest

from zfunc.optim.learning_rate_schedules import linear_warmup, warmup_cosine, warmup_linear

SCHEDULES = [
    linear_warmup(0.5, 0),
    linear_warmup(0.5, 10),
    warmup_cosine(0.5, 10, 100, final=0.1),
    warmup_linear(0.5, 10, 100, final=0.1),
]


@pytest.mark.parametrize("rate", SCHEDULES)
def test_bounds_and_purity(rate):
    values = [rate(step) for step in range(1, 200)]
    assert values == [rate(step) for step in range(1, 200)]
    assert all(0 < value <= 0.5 for value in values)
    assert rate(10) == 0.5
    with pytest.raises(ValueError, match="counted from 1"):
        rate(0)


@pytest.mark.parametrize("make", [warmup_cosine, warmup_linear])
def test_decay_is_monotone_and_ends_at_final(make):
    rate = make(0.5, 10, 100, final=0.1)
    values = [rate(step) for step in range(10, 101)]
    assert values == sorted(values, reverse=True)
    assert rate(55) == pytest.approx(0.3)
    assert rate(100) == rate(1000) == pytest.approx(0.1)
    assert make(0.5, 0, 100)(1) < 0.5


@pytest.mark.parametrize("rate", SCHEDULES)
def test_values_print_and_compare(rate):
    assert rate == eval(repr(rate), vars(__import__("zfunc.optim.learning_rate_schedules", fromlist=["lr"])))
    assert hash(rate) == hash(rate)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: linear_warmup(-1.0, 0), "lr"),
        (lambda: linear_warmup(float("nan"), 0), "lr"),
        (lambda: linear_warmup(1.0, -1), "warmup"),
        (lambda: linear_warmup(1.0, 1.5), "warmup"),
        (lambda: warmup_cosine(1.0, 10, 10), "total"),
        (lambda: warmup_linear(1.0, 10, 20, final=-1.0), "final"),
    ],
)
def test_bad_values_are_refused_at_birth(make, match):
    with pytest.raises(ValueError, match=match):
        make()
