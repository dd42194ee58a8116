"""The laws that need tensors: one table of models x settings x schedules, and what must hold for every row.

The laws of plans alone are in test_plan.py, test_verify.py and their neighbours; law 8 is in test_adam.py.
"""

import itertools
from typing import Any

import pytest
import torch
from models import MODELS
from table import Scattered

import zfunc
from zfunc import schedules
from zfunc.errors import DonatedStateError
from zfunc.execute import Jitter
from zfunc.program import Program, specialize
from zfunc.tracing import Tracker

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16 clipped": {"precision": "bf16", "clip_norm": 0.1},
    "fp16 in 3 micro-batches": {"precision": "fp16", "micro_batches": 3},
    "fp32 in 2, one slot": {"precision": "fp32", "micro_batches": 2, "grad_slots": 1, "host_slots": 1},
    "bf16 in 3, clipped, small buckets": {
        "precision": "bf16",
        "micro_batches": 3,
        "clip_norm": 1.0,
        "bucket_size": 100,
    },
}
SCHEDULES = [*schedules.__all__, Scattered(0), Scattered(1, num_lanes=3)]
RECOMPUTE = ("all", "none", "min-cut")
ROWS = list(itertools.product(MODELS, SETTINGS))
STEPS = 3


def program(model: str, settings: str, **more: Any) -> tuple[Program, Any]:
    segments, batch = MODELS[model]()
    options = {"bucket_size": 3000, **SETTINGS[settings], **more}
    optimizer = zfunc.AdamW(lr=1e-2, weight_decay=0.1, decay=zfunc.matrices_only)
    return zfunc.compile(segments, optimizer=optimizer, device="cpu", **options), batch


def result(model: str, settings: str, *, step: dict[str, Any] | None = None, **more: Any) -> tuple[Any, ...]:
    """Losses, norms, scale, parameters and moments after a few steps: everything a step can change."""
    made, batch = program(model, settings, **more)
    state = zfunc.init(made, seed=1)
    seen = []
    for i in range(STEPS):
        state, m = zfunc.train_step(made, state, batch(i), **(step or {}))
        seen.append((m.loss, m.grad_norm, m.skipped, m.loss_scale))
    b = state.buffers
    return seen, [t.clone() for t in (b.params, b.frozen, b.master, b.exp_avg, b.exp_avg_sq)]


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return repr(a[0]) == repr(b[0]) and all(map(torch.equal, a[1], b[1]))  # a skipped step's norm is NaN


_serial: dict[tuple[str, str], tuple[Any, ...]] = {}


def serial(model: str, settings: str) -> tuple[Any, ...]:
    """The reference result: the recipe, top to bottom."""
    if (model, settings) not in _serial:
        _serial[model, settings] = result(model, settings, schedule="Serial")
    return _serial[model, settings]


@pytest.mark.parametrize(("model", "settings"), ROWS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_2_any_schedule_gives_the_serial_bits(model: str, settings: str, schedule: Any) -> None:
    assert same(result(model, settings, schedule=schedule), serial(model, settings))


@pytest.mark.parametrize(("model", "settings"), ROWS)
@pytest.mark.parametrize("seed", [0, 1])
def test_3_random_delays_change_nothing(model: str, settings: str, seed: int) -> None:
    schedule = [schedules.Overlapped(), Scattered(seed)][seed % 2]
    jitter = Jitter(seed, 3e-4)
    assert same(result(model, settings, schedule=schedule, step={"jitter": jitter}), serial(model, settings))


@pytest.mark.parametrize(("model", "settings"), ROWS)
@pytest.mark.parametrize("recompute", RECOMPUTE[1:])
def test_what_is_kept_for_backward_changes_nothing(model: str, settings: str, recompute: str) -> None:
    assert same(result(model, settings, recompute=recompute), serial(model, settings))


@pytest.mark.parametrize(("model", "settings"), ROWS)
def test_10_every_stage_does_with_what_it_declares(model: str, settings: str) -> None:
    assert same(result(model, settings, step={"debug": True}), serial(model, settings))


@pytest.mark.parametrize("model", MODELS)
def test_one_bucket_or_many_is_the_same_but_for_the_order_of_the_norm(model: str) -> None:
    whole = result(model, "fp32", bucket_size=10**6)
    small = result(model, "fp32", bucket_size=64)
    assert [loss for loss, *_ in whole[0]] == [loss for loss, *_ in small[0]]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("model", "settings"), ROWS)
def test_9_measured_memory_stays_within_the_plan(model: str, settings: str, recompute: str) -> None:
    made, batch = program(model, settings, schedule="Serial", recompute=recompute)
    state = zfunc.init(made)
    state, _ = zfunc.train_step(made, state, batch(0))
    with Tracker() as measured:
        zfunc.train_step(made, state, batch(1))
    planned = specialize(made, batch(1)).memory["device"].transient
    assert 0 < measured.peak <= planned
    assert planned <= 1.25 * measured.peak + 40 * 512  # small models: every scalar counts 512 bytes
    assert measured.live == 0  # nothing is left behind


def test_7_a_donated_state_raises_with_what_to_do() -> None:
    made, batch = program("tied GPT", "fp32")
    old = zfunc.init(made)
    new, _ = zfunc.train_step(made, old, batch(0))
    for use in (lambda: zfunc.train_step(made, old, batch(1)), lambda: zfunc.params(made, old)):
        with pytest.raises(DonatedStateError, match=r"state, metrics = zfunc\.train_step"):
            use()
    zfunc.train_step(made, new, batch(1))
