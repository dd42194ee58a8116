"""SGD, Lion and Adagrad: the bits of their NumPy reference wherever an update is made, and torch's own numbers."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from adam_states import NAMES, TYPES, array, assert_same, gradient, random_bytes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from update_law import State, check_update, clone, one_buffer_state, tensors

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.core.dtypes import DTYPES
from zfunc.core.optimizer_state import HIGH_HALF, STATE_FORMATS, Moments
from zfunc.errors import CheckpointError
from zfunc.optim.compact_reference import dither, join, pack_floats, unpack_floats
from zfunc.optim.host_one_buffer import host_one_buffer_
from zfunc.optim.one_buffer import OneBufferOptimizer
from zfunc.optim.one_buffer_reference import reference_one_buffer_update

OPTIMIZERS: dict[str, OneBufferOptimizer] = {
    "SGD": zfunc.SGD(0.1),
    "momentum": zfunc.SGD(0.1, momentum=0.9, dampening=0.25, weight_decay=0.1),
    "Nesterov": zfunc.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lion": zfunc.Lion(0.01, weight_decay=0.1),
    "Adagrad": zfunc.Adagrad(0.1, weight_decay=0.1, lr_decay=0.01),
    "Adagrad from 0.1": zfunc.Adagrad(0.1, initial_accumulator_value=0.1),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_format = pytest.mark.parametrize("moments", ["fp32", "16bit", "8bit"])


def of(name: str, moments: Moments) -> OneBufferOptimizer:
    return OPTIMIZERS[name].with_moments(moments, split_master=False)


def fresh(n: int, state_format: str, seed: int = 0) -> State:
    """Weights of unit size, and a buffer whose elements differ by powers of ten inside a block."""
    rng = np.random.default_rng(seed)
    p, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    m = m * np.exp2(rng.uniform(-20, 0, n)).astype(np.float32)
    return one_buffer_state(p, np.square(m) if state_format.startswith("adagrad") else m, state_format)


def check(
    optimizer: OneBufferOptimizer,
    state: State,
    grad: Tensor,
    *,
    step: int = 3,
    scale: float = 0.3,
    out: torch.dtype | None = None,
    group: int = 0,
    **more: Any,
) -> None:
    decision = StepDecision(False, scale, step, optimizer.factors(step))
    arguments = optimizer.arguments(decision, group)
    arrays = {name: array(x) for name, x in state.items()}
    new, copy = reference_one_buffer_update(arrays, array(grad), out=out and NAMES[out], **arguments)
    check_update(
        state,
        grad,
        tensors(new, arguments["state_format"]),
        copy,
        partial(host_one_buffer_, **arguments),
        partial(optimizer.device_update, decision=decision, group=group),
        out=out,
        **more,
    )


@every_optimizer
@every_format
def test_sizes_types_and_threads(name: str, moments: Moments) -> None:
    optimizer = of(name, moments)
    for i, n in enumerate([0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, 40_001]):
        for k, (grad, out) in enumerate(itertools.product(TYPES, [None, *TYPES])):
            pairs = (i + k // 4 + k) % 2 == 0  # each two of size, gradient and copy meet
            if (n > 1000 and out not in (None, grad)) or not pairs:
                continue
            threads = (1, 2, 3) if n > 1000 else (1,)
            state = fresh(n, optimizer.state_format())
            check(optimizer, state, gradient(n, grad), step=1 + i % 3, out=out, threads=threads, group=i % 2)


@every_optimizer
@every_format
def test_new_state_and_copies_that_bypass_the_caches(name: str, moments: Moments) -> None:
    optimizer, n = of(name, moments), 300_001
    check(
        optimizer,
        fresh(n, optimizer.state_format()),
        gradient(n, torch.bfloat16),
        out=torch.bfloat16,
        threads=(2,),
    )


@every_optimizer
@every_format
def test_buffers_may_begin_anywhere_and_nothing_around_them_changes(name: str, moments: Moments) -> None:
    optimizer = of(name, moments)
    for n, offset in ((55, 1), (129, 3), (300_001, 16)):
        state, grad = fresh(n, optimizer.state_format()), gradient(n, torch.float16)
        check(optimizer, state, grad, out=torch.bfloat16, threads=(3,), offset=offset)


@pytest.mark.gpu
@every_optimizer
@every_format
def test_a_gpu_has_the_bits_of_the_reference(name: str, moments: Moments) -> None:
    optimizer = of(name, moments)
    for n, grad in itertools.product((1, 129, 40_001), TYPES):
        check(
            optimizer, fresh(n, optimizer.state_format()), gradient(n, grad), out=torch.float16, device="cuda"
        )


@every_optimizer
@every_format
def test_special_values_meet(name: str, moments: Moments) -> None:
    some = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 2.0**-126, 2.0**-100, 3.4e38]
    rows = np.array([*itertools.product(some, some, [*some, 2.0**-56, 2.0**-57, 65504.0])], np.float32)
    p, m, g = np.random.default_rng(0).permutation(rows).T.copy()
    optimizer = of(name, moments)
    if name.startswith("Adagrad"):
        m = np.abs(m)
    for calm, scale in itertools.product((False, True), (1.0, 0.0, -0.5, 2.0**80)):
        kept = np.nan_to_num(m, nan=2.0**-90, posinf=2.0**-60, neginf=-1e-3) if calm else m
        state = one_buffer_state(p, kept, optimizer.state_format())
        check(optimizer, state, torch.from_numpy(g), scale=scale, out=torch.float16)


@given(
    st.sampled_from([*OPTIMIZERS]),
    st.sampled_from(["fp32", "16bit", "8bit"]),
    st.integers(0, 300),
    st.integers(0, 99),
    st.sampled_from([*TYPES]),
    st.booleans(),
)
def test_any_bytes(
    name: str, moments: Moments, n: int, seed: int, dtype: torch.dtype, any_gradient: bool
) -> None:
    """Every bit pattern of a state and of a gradient: no trap, no difference."""
    optimizer, grad = of(name, moments), gradient(n, dtype, seed)
    state = clone(fresh(n, optimizer.state_format()), lambda x: random_bytes(x, seed))
    check(optimizer, state, random_bytes(grad, seed) if any_gradient else grad, out=torch.float32)


# ---- the numbers of others -----------------------------------------------------------------------------


def plain_lion(p: Tensor, m: Tensor, g: Tensor, *, lr: float, betas: tuple[float, float], wd: float) -> None:
    """Algorithm 2 of the paper, as its authors wrote it for torch."""
    p.mul_(1 - lr * wd)
    p.add_(torch.sign(m * betas[0] + g * (1 - betas[0])), alpha=-lr)
    m.mul_(betas[1]).add_(g, alpha=1 - betas[1])


def others(name: str, weights: Tensor) -> Callable[[Tensor], None]:
    """A step of the counterpart, on `weights`."""
    ours = OPTIMIZERS[name]
    if isinstance(ours, zfunc.Lion):
        m = torch.zeros_like(weights)
        return lambda g: plain_lion(weights, m, g, lr=ours.lr, betas=ours.betas, wd=ours.weight_decay)
    made = getattr(torch.optim, type(ours).__name__)
    names = (
        "lr",
        "weight_decay",
        "momentum",
        "dampening",
        "nesterov",
        "lr_decay",
        "initial_accumulator_value",
        "eps",
    )
    optimizer = made([weights], **{x: getattr(ours, x) for x in names if hasattr(ours, x)})

    def step(g: Tensor) -> None:
        weights.grad = g
        optimizer.step()

    return step


@every_optimizer
def test_a_hundred_steps_of_its_counterpart(name: str) -> None:
    optimizer, n = OPTIMIZERS[name], 1000
    start = torch.randn(n, generator=torch.Generator().manual_seed(0))
    theirs = start.clone().double().requires_grad_()
    with torch.no_grad():
        follow = others(name, theirs)
        state = one_buffer_state(start.numpy(), np.zeros(n, np.float32), optimizer.state_format())
        for step in range(1, 101):
            g = gradient(n, torch.float32, step) * 0.1 + 0.05 * theirs.float()
            optimizer.host_update(state, g, StepDecision(False, 1.0, step, optimizer.factors(step)), group=0)
            follow(g.double())
    torch.testing.assert_close(state["master"].double(), theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["momentum", "Nesterov", "Lion", "Adagrad"])
@pytest.mark.parametrize("moments", ["16bit", "8bit"])
def test_a_compact_buffer_follows_the_fp32_one(name: str, moments: Moments) -> None:
    """On average over elements: rounding has no bias, or small changes of a large sum would never arrive."""
    optimizers, n = [of(name, "fp32"), of(name, moments)], 4096
    start = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    states = [one_buffer_state(start, np.zeros(n, np.float32), x.state_format()) for x in optimizers]
    for step in range(1, 201):
        grad = gradient(n, torch.float32, step) + 0.5
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.host_update(
                state, grad, StepDecision(False, 1.0, step, optimizer.factors(step)), group=1
            )
    exact = states[0]["master"].double()
    got = torch.from_numpy(join(array(states[1][HIGH_HALF]), array(states[1]["master_low"]))).double()
    moved = (exact - torch.from_numpy(start).double()).abs().mean()
    assert (got - exact).mean().abs() < 2e-3 * moved
    assert (got - exact).abs().mean() < 0.05 * moved


# ---- the codes with a sign -----------------------------------------------------------------------------


def test_codes_with_a_sign_are_found_again_and_reach_over_63_binades() -> None:
    values = np.concatenate([np.exp2(np.linspace(0, x, 32)) for x in (-7, -15, -30, -62)]).astype(np.float32)
    x = np.stack([values, -values], axis=1).reshape(-1)
    packed = pack_floats(x, np.zeros(x.size, np.uint32), signed=True)
    got = unpack_floats(*packed, signed=True)
    assert (np.sign(got) == np.sign(x)).all()
    again = pack_floats(got, dither(x.size, 7, 0), signed=True)
    assert all((a == b).all() for a, b in zip(packed, again, strict=True))
    for i, mantissa_bits in enumerate((4, 3, 2, 1)):
        block = slice(64 * i, 64 * i + 64)
        assert (np.abs(got - x)[block] <= np.abs(x)[block] * 2.0**-mantissa_bits).all()


def test_bytes_of_a_parameter() -> None:
    sizes = {
        f"{kind}-{moments}": sum(x.nbytes(64) for x in STATE_FORMATS[f"{kind}-{moments}"]) / 64
        for kind in ("sgd", "lion", "adagrad", "weights")
        for moments in ("fp32", "16bit", "8bit")
    }
    assert {x for name, x in sizes.items() if name.startswith("weights")} == {4}
    for kind in ("sgd", "lion", "adagrad"):
        assert [sizes[f"{kind}-{x}"] for x in ("fp32", "16bit", "8bit")] == [8, 6, 5.03125]
    assert all(
        sum(DTYPES[x.dtype].nbytes for x in row if x.shared == 1) <= 12 for row in STATE_FORMATS.values()
    )


# ---- the optimizers as values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: zfunc.SGD(nesterov=True),
            "nesterov: got momentum=0.0 and dampening=0.0; expected a momentum above",
        ),
        (lambda: zfunc.SGD(momentum=-1), "momentum: got -1; expected a finite float32 at or above 0"),
        (lambda: zfunc.SGD(lr=math.inf), "lr: got inf; expected a finite float32 at or above 0"),
        (lambda: zfunc.Lion(betas=(0.9, 1.0)), r"betas: got \(0.9, 1.0\); expected two numbers in \[0, 1\)"),
        (
            lambda: zfunc.Lion(lr=1e30, weight_decay=1e30),
            "Lion's settings .as decay.: got 1.0000000000000001e.60; expected a finite",
        ),
        (lambda: zfunc.Adagrad(eps=1e-40), "eps: got 1e-40; expected a float32 of at least"),
        (lambda: zfunc.Adagrad(moments="4bit"), "moments: got '4bit'; expected one of fp32, 16bit, 8bit"),
        (lambda: zfunc.Adagrad(lr_decay=-1), "lr_decay: got -1; expected a finite float32 at or above 0"),
    ],
)
def test_a_wrong_setting_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [math.nan, -1e-3, math.inf])
def test_a_schedule_is_checked_at_each_step(value: float) -> None:
    for make in (zfunc.SGD, zfunc.Lion, zfunc.Adagrad):
        with pytest.raises(ValueError, match="lr at step 12"):
            make(lr=lambda _: value).factors(12)


def test_state_of_another_optimizer_is_not_converted() -> None:
    state = fresh(64, "lion-16bit")
    with pytest.raises(
        CheckpointError, match="got optimizer state in the format 'lion-16bit', expected 'sgd-fp32'"
    ):
        zfunc.SGD(momentum=0.9).convert_state(state, "lion-16bit", 3)
    again = zfunc.Lion().convert_state(state, "lion-16bit", 3)
    assert_same(zfunc.Lion(moments="16bit").convert_state(again, "lion-fp32", 3).values(), state.values())
