"""SGD, Lion and Adagrad: the bits of their NumPy reference wherever an update is made, and torch's own numbers."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adam_states import TYPES, around, array, assert_same, gradient, placed, random_bytes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.optimizer_state import HIGH_HALF, STATE_FORMATS, Moments
from zfunc.errors import CheckpointError
from zfunc.optim.compact import as_tensor
from zfunc.optim.compact_reference import dither, join, pack_floats, unpack_floats
from zfunc.optim.host_one_buffer import host_one_buffer_
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.optim.one_buffer import OneBufferOptimizer
from zfunc.optim.one_buffer_reference import pack_one_buffer, reference_one_buffer_update
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

OPTIMIZERS: dict[str, OneBufferOptimizer] = {
    "SGD": zfunc.SGD(0.1),
    "momentum": zfunc.SGD(0.1, momentum=0.9, dampening=0.25, weight_decay=0.1),
    "Nesterov": zfunc.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lion": zfunc.Lion(0.01, weight_decay=0.1),
    "Adagrad": zfunc.Adagrad(0.1, weight_decay=0.1, lr_decay=0.01),
    "Adagrad from 0.1": zfunc.Adagrad(0.1, initial_accumulator_value=0.1),
}
NAMES: dict[torch.dtype, Dtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
State = dict[str, Tensor]
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_format = pytest.mark.parametrize("moments", ["fp32", "16bit", "8bit"])


def of(name: str, moments: Moments) -> OneBufferOptimizer:
    return OPTIMIZERS[name].with_moments(moments, split_master=False)


def arrays(state: State) -> dict[str, np.ndarray]:
    return {name: array(x) for name, x in state.items()}


def tensors(state: dict[str, np.ndarray], state_format: str) -> State:
    return {x.name: as_tensor(state[x.name]).view(TORCH_DTYPES[x.dtype]) for x in STATE_FORMATS[state_format]}


def state_of(p: np.ndarray, m: np.ndarray, state_format: str) -> State:
    """A state of such fp32 weights and buffer."""
    with np.errstate(all="ignore"):
        return tensors(pack_one_buffer(p.copy(), m.copy(), state_format=state_format, step=1), state_format)


def fresh(n: int, state_format: str, seed: int = 0) -> State:
    """Weights of unit size, and a buffer whose elements differ by powers of ten inside a block."""
    rng = np.random.default_rng(seed)
    p, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    m = m * np.exp2(rng.uniform(-20, 0, n)).astype(np.float32)
    return state_of(p, np.square(m) if state_format.startswith("adagrad") else m, state_format)


def clone(state: State, change: Callable[[Tensor], Tensor] = Tensor.clone) -> State:
    return {name: change(x) for name, x in state.items()}


def check(
    optimizer: OneBufferOptimizer,
    state: State,
    grad: Tensor,
    *,
    step: int = 3,
    scale: float = 0.3,
    out: torch.dtype | None = None,
    threads: tuple[int, ...] = (1,),
    group: int = 0,
    offset: int = 0,
    device: str = "cpu",
) -> State:
    """One step by kernel, in place and into other buffers, and in torch operations; returns the new state.

    Buffers of the kernel begin `offset` elements into their storage, which it leaves as it is around them.
    """
    decision = StepDecision(False, scale, step, optimizer.factors(step))
    arguments = optimizer.arguments(decision, group)
    kind = None if out is None else NAMES[out]
    new, copy = reference_one_buffer_update(arrays(state), array(grad), out=kind, **arguments)
    expected = tensors(new, arguments["state_format"])
    before = grad.clone()

    def assert_expected(got: State, copied: Tensor | None) -> None:
        assert_same(got.values(), expected.values())
        if copied is not None:
            assert_same([copied], [as_tensor(copy).view(copied.dtype)])

    def copies() -> Tensor | None:
        return None if out is None else torch.zeros(grad.numel(), dtype=out)

    for isa, team in itertools.product(range(len(cpu_adam.instruction_sets())), threads):
        mine, into = (clone(state, lambda x: placed(x, offset)) for _ in range(2))
        outside = [around(x) for x in (*mine.values(), *into.values())]
        for target in (into, None):
            copied = copies()
            host_one_buffer_(mine, grad, out=copied, into=target, threads=team, isa=isa, **arguments)
            assert_expected(target or mine, copied)
        assert all(map(torch.equal, outside, (around(x) for x in (*mine.values(), *into.values()))))
    mine, copied = clone(state, lambda x: x.to(device, copy=True)), copies()
    there = None if copied is None else copied.to(device)
    optimizer.device_update(mine, grad.to(device), decision, group=group, out=there)
    assert_expected(mine, there)
    assert_same([grad], [before])
    return expected


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
        state = state_of(p, kept, optimizer.state_format())
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
        state = state_of(start.numpy(), np.zeros(n, np.float32), optimizer.state_format())
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
    states = [state_of(start, np.zeros(n, np.float32), x.state_format()) for x in optimizers]
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
