"""Law 8 for every element-wise optimizer and format of its state: the bits of the NumPy reference, whoever makes an
update, and torch's own numbers."""

import ctypes
import itertools
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy_reference import array, reference_update, unpack_weights
from torch import Tensor
from update_law import (
    ADAMS,
    ISAS,
    ROWS,
    RULES,
    TYPES,
    assert_same,
    check,
    clone,
    fresh,
    gradient,
    packed,
    placed,
    random_bytes,
)

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.core.dtypes import DTYPES
from zfunc.core.optimizer_state import STATE_FORMATS, moment_buffers, state_slice
from zfunc.engine.trace.cost_trace import AllocationTracker
from zfunc.errors import CheckpointError
from zfunc.optim import formats, rules, updates
from zfunc.optim.by_name import CLASSES
from zfunc.optim.elementwise import Elementwise

SIZES = [0, 1, 15, 55, 63, 64, 65, 127, 128, 129, 1000, 4097]
STREAMED = (1 << 18) + 67  # elements from which on new state and copy bypass the caches, and a few more
EXTREMES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 2.0**-126, 2.0**-56]
EXTREMES += [2.0**-57, 2.0**-100, 2.0**-120, 3.4028234663852886e38, 65504.0, 65520.0, 2.0**-24, 2.0**-25]
SCALES = [1.0, 0.0, -0.5, 2.0**-16, 2.0**80, 2.0**-126]
every_row = pytest.mark.parametrize("row", ROWS)
# By day where much is computed of each: AdamW in every format, and each other rule in one of them, in turn.
IN_TURN = {*ADAMS, *(f"{name}, {('fp32', '16bit', '8bit')[n % 3]}" for n, name in enumerate(RULES))}
NIGHTLY = [pytest.param(row, marks=[pytest.mark.slow] * (row not in IN_TURN)) for row in ROWS]
rows_in_turn = pytest.mark.parametrize("row", NIGHTLY)
every_rule = pytest.mark.parametrize("name", RULES)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def format_of(row: str) -> str:
    return ROWS[row].state_format()


def step_of(optimizer: Elementwise, step: int, scale: float = 1.0) -> StepDecision:
    return StepDecision(False, scale, step, optimizer.factors(step))


# ---- its bits ----------------------------------------------------------------------------------------


@every_device
@rows_in_turn
def test_sizes_types_places_and_decays(row: str, device: str) -> None:
    for i, n in enumerate(SIZES):
        for k, (grad, out) in enumerate(itertools.product(TYPES, [None, *TYPES])):
            if (i + k // 4 + k) % 2 == 0:  # each two of size, gradient and copy meet
                how: dict[str, Any] = {"step": 1 + i % 3, "group": (i + k // 8) % 2, "device": device}
                check(ROWS[row], fresh(n, format_of(row)), gradient(n, grad), out=out, offset=k % 4, **how)


@every_row
def test_step_after_step(row: str) -> None:
    state = fresh(1000, format_of(row))
    for step in range(1, 6):
        state = check(ROWS[row], state, gradient(1000, torch.bfloat16, step), step=step)


@pytest.mark.parametrize(
    ("row", "grad", "threads", "offset"),
    [
        *((row, torch.bfloat16, (1, 2, 3, 4), 0) for row in ADAMS),
        *(
            pytest.param(row, torch.bfloat16, (2,), 0, marks=[pytest.mark.slow] * (row not in IN_TURN))
            for row in ROWS
            if row not in ADAMS
        ),
        *((row, grad, (3,), 0) for row, grad in zip(ADAMS, [torch.float32, torch.float16] * 2, strict=True)),
        *((row, torch.float16, (3,), 16) for row in ROWS if row.startswith(("AdamW", "Lion", "one's"))),
        *((row, torch.float16, (3,), 3) for row in ADAMS),
    ],
)
def test_threads_offsets_and_what_bypasses_the_caches(
    row: str, grad: torch.dtype, threads: tuple[int, ...], offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers begin anywhere, and nothing around them changes."""
    monkeypatch.setattr(updates, "PIECE", 1 << 16)
    state = fresh(STREAMED, format_of(row))
    assert all(placed(x, 0).data_ptr() % 64 == 0 for x in state.values())  # else nothing would bypass them
    isas = ISAS if row in ADAMS else ISAS[-1:]
    check(ROWS[row], state, gradient(STREAMED, grad), out=grad, threads=threads, offset=offset, isas=isas)


@every_row
def test_it_may_be_split_anywhere(row: str) -> None:
    n, optimizer = 4097, ROWS[row]
    state, grad = fresh(n, format_of(row)), gradient(n, torch.float16)
    decision, whole, out = step_of(optimizer, 2, 0.3), clone(state), torch.zeros(2, n)
    optimizer.host_update(whole, grad, decision, group=0, out=out[0])
    for update in (optimizer.host_update, optimizer.device_update):
        parts = clone(state)
        for start, stop in itertools.pairwise((0, 64, 192, 320, 640, 3968, n)):
            cut = state_slice(format_of(row), parts, start, stop)
            update(cut, grad[start:stop], decision, group=0, out=out[1, start:stop])
        assert_same((*parts.values(), out[1]), (*whole.values(), out[0]))


@every_device
@rows_in_turn
@pytest.mark.parametrize("scale", SCALES[:4])
def test_special_values_meet(row: str, scale: float, device: str) -> None:
    own = [x for x in moment_buffers(format_of(row)) if x.shared == 1]
    some = [0.0, -0.0, 1.0, math.inf, math.nan, 2.0**-100, 2.0**-120, 1e-40, 1.0001 * 2.0**-100]
    weights = [0.0, -1.0, math.inf, math.nan, 1e-40, 2.0**-57]
    rows = np.array([*itertools.product(weights, EXTREMES, *[some] * len(own))], np.float32)
    p, g, *moments = np.random.default_rng(0).permutation(rows).T.copy()
    if len(own) == 1 and own[0].signed:
        moments[0][::3] *= -1
    for calm in (False, True):  # in a block with an inf there is nothing else
        if calm:
            moments = [np.nan_to_num(x, nan=2.0**-110, posinf=2.0**-90, neginf=-1e-3) for x in moments]
        state = packed(format_of(row), p, *moments)
        for grad, out in ((torch.from_numpy(g), torch.float16), (torch.from_numpy(g).half(), torch.bfloat16)):
            check(ROWS[row], state, grad, step=2, scale=scale, out=out, device=device)


floats = st.lists(st.sampled_from(EXTREMES) | st.floats(width=32), min_size=4, max_size=4)
rows, types = st.sampled_from([*ROWS]), st.sampled_from([*TYPES])


@given(
    st.lists(floats, min_size=1, max_size=40), rows, types, types, st.sampled_from(SCALES), st.integers(0, 1)
)
def test_any_floats(
    values: list[list[float]], row: str, grad: torch.dtype, out: torch.dtype, scale: float, group: int
) -> None:
    p, g, *moments = np.array(values, np.float32).T.copy()
    kinds = [x for x in moment_buffers(format_of(row)) if x.shared == 1]
    own = [m if x.signed else np.abs(m) for x, m in zip(kinds, moments, strict=False)]
    state, given_grad = packed(format_of(row), p, *own), torch.from_numpy(g).to(grad)
    check(ROWS[row], state, given_grad, scale=scale, out=out, group=group)


@given(rows, st.integers(0, 300), st.integers(0, 99), types, st.booleans(), st.integers(0, 1))
def test_any_bytes(row: str, n: int, seed: int, dtype: torch.dtype, any_grad: bool, group: int) -> None:
    """Every bit pattern of a state and of a gradient: no trap, no difference."""
    state = clone(fresh(n, format_of(row)), lambda x: random_bytes(x, seed))
    grad = gradient(n, dtype, seed)
    grad = random_bytes(grad, seed) if any_grad else grad
    check(ROWS[row], state, grad, out=torch.float32, group=group)


@every_row
def test_a_gradient_whose_bits_are_all_set(row: str) -> None:
    """A NaN: what rounds such bits up has to expect them."""
    for dtype in TYPES:
        grad = gradient(128, dtype)
        grad.view(torch.uint8)[: grad.element_size()] = 0xFF
        check(ROWS[row], fresh(128, format_of(row)), grad, out=dtype)


TINY = [(0.9, 0.999), (0.0, 0.0), (0.0, 0.5), (1e-45, 1e-40), (2.0**-126, 0.999), (1e-40, 2.0**-126)]


@every_device
@pytest.mark.parametrize(
    "optimizer",
    [
        *(zfunc.AdamW(betas=x, moments="8bit") for x in (*TINY, (2.0**-46, 0.5))),
        *(ROWS[f"{x}, 8bit"] for x in ("Lion", "Adagrad")),
    ],
)
def test_every_code_under_many_scales(optimizer: Elementwise, device: str) -> None:
    """Also infinite scales and such as no state has, and betas that leave no room for the exponent of a unit."""
    scales = torch.arange(-32768, 32768, 128, dtype=torch.int16) + torch.arange(512, dtype=torch.int16) % 16
    n = 64 * scales.numel()
    codes = torch.arange(251, dtype=torch.uint8).repeat(n // 251 + 1)[:n]
    state = fresh(n, optimizer.state_format())
    own = [x.name for x in moment_buffers(optimizer.state_format())]
    state |= dict(zip(own, [codes, codes.flip(0) + 5, scales][-len(own) :], strict=True))
    check(optimizer, state, gradient(n, torch.bfloat16), step=2, device=device)


@pytest.mark.parametrize("row", ADAMS)
def test_factors_that_float32_has_to_round(row: str) -> None:
    """The host rounds a factor once; torch would convert a double by itself, wherever and however."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        lr, eps, decay, scale = np.exp(rng.uniform(-12, 2, 4)).tolist()
        betas = tuple(rng.uniform(0, 1, 2).tolist())
        adam = zfunc.AdamW(lr, betas=betas, eps=eps, weight_decay=decay).with_moments(
            ROWS[row].moments, split_master=row.endswith("split")
        )
        check(
            adam,
            fresh(500, format_of(row), seed),
            gradient(500, torch.float32, seed),
            scale=scale,
            step=1 + seed,
        )


@pytest.mark.parametrize(
    ("row", "out"),
    [("AdamW, fp32", torch.bfloat16), ("AdamW, fp32", torch.float16), ("AdamW, fp32-split", torch.bfloat16)],
)
def test_rounding_of_the_copy(row: str, out: torch.dtype) -> None:
    """Every exponent, the ties and their neighbours; a zero learning rate leaves the weights as they are."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    p = (high[:, None] | lows).reshape(-1).view(np.float32)
    adam = zfunc.AdamW(0.0, split_master=row.endswith("split"))
    check(adam, packed(format_of(row), p, *np.zeros((2, p.size), np.float32)), torch.zeros(p.size), out=out)


def locked(x: Tensor, start: int = 0) -> Tensor:
    """A copy in pages that cannot be written from byte `start` on: a write is a signal."""
    nbytes = -(-max(x.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    copy = torch.frombuffer(pages, dtype=x.dtype, count=x.numel())
    copy.copy_(x)
    libc = ctypes.CDLL(None, use_errno=True)
    protected = ctypes.c_void_p(copy.data_ptr() + start), ctypes.c_size_t(nbytes - start)
    assert libc.mprotect(*protected, mmap.PROT_READ) == 0
    return copy


@pytest.mark.parametrize("isa", ISAS)
@every_row
def test_the_state_may_lie_in_memory_that_cannot_be_written(row: str, isa: int) -> None:
    optimizer = ROWS[row]
    for n in (5000, STREAMED) if row in ADAMS else (5000,):
        state, grad, decision = fresh(n, format_of(row)), gradient(n, torch.bfloat16), step_of(optimizer, 3)
        grad[::999] = torch.nan  # what the fast loops leave to the plain ones as well
        into = clone(state, torch.zeros_like)
        how: dict[str, Any] = {"into": into, "threads": 2, "isa": isa}
        optimizer.host_update(clone(state, locked), locked(grad), decision, group=0, **how)
        optimizer.host_update(state, grad, decision, group=0)
        assert_same(into.values(), state.values())


def test_the_callers_mode_for_denormal_numbers_changes_no_bit() -> None:
    """It is a mode of each thread: those of a team would not agree."""
    n, adam = 1 << 16, RULES["AdamW"]
    p, m, v, g = np.full((4, n), 1e-36, np.float32)
    m[::3], v[::3], g[::3] = 1.1 * 2.0**-100, 1.1 * 2.0**-120, 0.0  # about to decay below
    state, decision = packed("fp32", p, m, v), step_of(adam, 3, 0.3)
    expected, copy = reference_update(adam.rule_step(decision, 0), clone(state, array), g, out="fp16")  # pyright: ignore
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush mode")
    try:
        got: list[tuple[Tensor, ...]] = []
        for threads in (1, 2):
            mine, out = clone(state), torch.zeros(n).half()
            adam.host_update(mine, torch.from_numpy(g), decision, group=0, out=out, threads=threads)
            got.append((*mine.values(), out))
    finally:
        torch.set_flush_denormal(False)
    for result in got:
        assert_same(result, map(torch.from_numpy, (*expected.values(), copy)))


def test_the_public_call() -> None:
    """As the method of an AdamW with these settings."""
    state, expected = fresh(1000, "fp32"), fresh(1000, "fp32")
    how: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    adam = zfunc.AdamW(**how)
    for step in range(1, 6):
        grad, copies = gradient(1000, torch.bfloat16, step), torch.empty(2, 1000)
        adam.host_update(expected, grad, step_of(adam, step, 0.5), group=0, out=copies[0])
        zfunc.adam_update_(*state.values(), grad, out=copies[1], step=step, grad_scale=0.5, **how)
        assert_same([*state.values(), copies[1]], [*expected.values(), copies[0]])


# ---- in torch operations: pieces, memory, and nothing waits --------------------------------------------------


@pytest.mark.parametrize("n", [1024, 1025, 2047, 3 * 1024 + 64])
@every_row
def test_pieces_change_no_bit(row: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "PIECE", 1024)
    check(ROWS[row], fresh(n, format_of(row)), gradient(n, torch.bfloat16), isas=())


@pytest.mark.parametrize(
    "row", ["AdamW, 8bit", "AdamW, 16bit", "AdamW, fp32", "AdamW, fp32-split", "Lion, 8bit"]
)
def test_the_workspace_bounds_what_is_allocated(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (updates, rules):
        monkeypatch.setattr(module, "PIECE", 1 << 18)
    most = 0.0
    for n in (0, 1, 63, 1000, 4096, 10_001, 1 << 20):
        state, grad, out = fresh(n, format_of(row)), gradient(n, torch.bfloat16), torch.empty(n).bfloat16()
        with AllocationTracker() as tracker:
            ROWS[row].device_update(state, grad, step_of(ROWS[row], 1), group=0, out=out)
        most = tracker.peak / ROWS[row].device_workspace(n)
        assert most <= 1
    assert most > 0.75


@pytest.mark.gpu
@pytest.mark.parametrize("row", ADAMS)
def test_a_gpu_keeps_to_the_workspace_and_nothing_waits_for_it(row: str) -> None:
    n = 3 * updates.PIECE + 65
    state, grad = clone(fresh(n, format_of(row)), Tensor.cuda), torch.ones(n, device="cuda").bfloat16()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ROWS[row].device_update(state, grad, step_of(ROWS[row], 1), group=0)
    assert torch.cuda.max_memory_allocated() - before <= ROWS[row].device_workspace(n)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ROWS[row].device_update(state, grad, step_of(ROWS[row], 2), group=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_that_require_a_gradient_stay_leaves() -> None:
    """The step is not recorded."""
    state = {"master": torch.ones(4, requires_grad=True)}
    zfunc.SGD(0.5).device_update(state, torch.ones(4), step_of(RULES["SGD"], 1), group=0)
    assert state["master"].is_leaf


# ---- the numbers of others -----------------------------------------------------------------------------


def plain_lion(p: Tensor, m: Tensor, g: Tensor, *, lr: float, betas: tuple[float, float], wd: float) -> None:
    """Algorithm 2 of the paper, as its authors wrote it for torch."""
    p.mul_(1 - lr * wd)
    p.add_(torch.sign(m * betas[0] + g * (1 - betas[0])), alpha=-lr)
    m.mul_(betas[1]).add_(g, alpha=1 - betas[1])


SETTINGS = ("lr", "betas", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "eps")


def others(ours: Any, weights: Tensor) -> Callable[[Tensor], None]:
    """A step of the counterpart, on `weights`."""
    if isinstance(ours, zfunc.Lion):
        m = torch.zeros_like(weights)
        return lambda g: plain_lion(weights, m, g, lr=ours.lr, betas=ours.betas, wd=ours.weight_decay)  # pyright: ignore
    kind = "Adam" if isinstance(ours, zfunc.AdamW) and not ours.decoupled else type(ours).__name__
    names = (*SETTINGS, "initial_accumulator_value")
    optimizer = getattr(torch.optim, kind)(
        [weights], **{x: getattr(ours, x) for x in names if hasattr(ours, x)}
    )

    def step(g: Tensor) -> None:
        weights.grad = g
        optimizer.step()

    return step


@pytest.mark.parametrize("name", [x for x in RULES if x != "one's own"])
def test_a_hundred_steps_of_its_counterpart_in_float64(name: str) -> None:
    optimizer, n = RULES[name], 1000
    start = torch.randn(n, generator=torch.Generator().manual_seed(0))
    theirs = start.clone().double().requires_grad_()
    with torch.no_grad():
        follow = others(optimizer, theirs)
        state = clone(fresh(n, optimizer.state_format()), torch.zeros_like) | {"master": start}
        for step in range(1, 101):
            g = gradient(n, torch.float32, step) * 0.1 + 0.05 * theirs.float()
            optimizer.host_update(
                state, g * 8, step_of(optimizer, step, 0.125), group=0
            )  # the scale undoes it
            follow(g.double())
    torch.testing.assert_close(state["master"].double(), theirs.detach(), rtol=1e-5, atol=1e-5)


def usual(n: int, step: int) -> tuple[np.ndarray, ...]:
    """Weights well above one update, moments as gradients of about unit size leave them."""
    rng = np.random.default_rng(step)
    p = rng.uniform(0.02, 2.0, n) * rng.choice([-1.0, 1.0], n)
    v = rng.uniform(0.1, 2.0, n) * (1.0 - 0.999 ** (step - 1))
    m = rng.uniform(-1.0, 1.0, n) * np.sqrt(v) * (1.0 - 0.9 ** (step - 1))
    return tuple(x.astype(np.float32) for x in (p, m, v, rng.standard_normal(n)))


def cancelling(n: int, step: int) -> tuple[np.ndarray, ...]:
    """Moments that a gradient cancels, to any number of bits, and weights down to far below one update."""
    rng = np.random.default_rng(step)
    p, _, v, g = usual(n, step)
    m = -0.1 / 0.9 * g * (1.0 + rng.choice([0.0, 1e-7, 1e-4, 1e-2], n) * rng.standard_normal(n))
    p = p * rng.choice([1e-6, 1e-3, 1.0], n)
    return p.astype(np.float32), m.astype(np.float32), v, g


@pytest.mark.parametrize("before", [usual, cancelling])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_within_two_ulp_of_float64(before: Any, weight_decay: float, decoupled: bool) -> None:
    b1, b2, lr = 0.9, 0.999, 1e-3
    adam = zfunc.AdamW(lr, weight_decay=weight_decay, decoupled=decoupled)
    for step in (1, 2, 10, 1000):
        given_state = before(50_000, step)
        state = dict(zip(("master", "exp_avg", "exp_avg_sq"), given_state, strict=False))
        got, _ = reference_update(adam.rule_step(step_of(adam, step), 0), state, given_state[3])
        p, m, v, g = (x.astype(np.float64) for x in given_state)
        l2 = 0.0 if decoupled else weight_decay * p
        m1 = b1 * m + (1 - b1) * (g + l2)
        v1 = b2 * v + (1 - b2) * (g + l2) ** 2
        rate = lr / (1 - b1**step) / (np.sqrt(v1 / (1 - b2**step)) + 1e-8)
        p1 = p - rate * m1 - (lr * weight_decay * p if decoupled else 0.0)
        # An ulp is that of the sum of the terms' sizes: no arithmetic keeps the last bits of what cancels. The
        # update is one of the weights' terms, with the terms of the moments in it. The moments carry the rounded
        # 1 - beta, exp_avg_sq a squared gradient's error.
        size = np.abs(g) + np.abs(l2)
        m_terms, v_terms = b1 * np.abs(m) + (1 - b1) * size, b2 * v + (1 - b2) * size**2
        p_terms = np.abs(p) + rate * (m_terms + np.abs(m1) * v_terms / v1)
        cases = zip(got.values(), (p1, m1, v1), (p_terms, m_terms, v_terms), (2.0, 3.0, 5.0), strict=True)
        for mine, true, terms, most in cases:
            ulp = np.spacing(terms.astype(np.float32)).astype(np.float64)
            assert (np.abs(mine - true) / ulp).max() <= most
        if before is cancelling:  # it does, or this would be the same test twice
            ulp = np.spacing(np.abs(m1).astype(np.float32)).astype(np.float64)
            assert (np.abs(got["exp_avg"] - m1) / ulp).max() > 1e6


@pytest.mark.parametrize("name", ["momentum", "Nesterov", "Lion", "Adagrad"])
@pytest.mark.parametrize("moments", ["16bit", "8bit"])
def test_a_compact_moment_follows_the_fp32_one(name: str, moments: str) -> None:
    """On average over elements: rounding has no bias, or small changes of a large sum would never arrive."""
    optimizers, n = [ROWS[f"{name}, fp32"], ROWS[f"{name}, {moments}"]], 4096
    start = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    states = [packed(x.state_format(), start, np.zeros(n, np.float32)) for x in optimizers]
    for step in range(1, 201):
        grad = gradient(n, torch.float32, step) + 0.5
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.host_update(state, grad, step_of(optimizer, step), group=1)
    true, got = (torch.from_numpy(unpack_weights(clone(x, array))).double() for x in states)  # pyright: ignore
    moved = (true - torch.from_numpy(start).double()).abs().mean()
    assert (got - true).mean().abs() < 2e-3 * moved
    assert (got - true).abs().mean() < 0.05 * moved


def test_decayed_moments_become_zero_and_nan_does_not() -> None:
    p, m, v = torch.ones(3), torch.full((3,), 1e-40), torch.full((3,), 1e-40)
    zfunc.adam_update_(p, m, v, torch.tensor([0.0, 1e-20, math.nan]), step=9, lr=1e-3)
    assert m[:2].tolist() == v[:2].tolist() == [0.0, 0.0]
    assert p[:2].tolist() == [1.0, 1.0]
    assert all(x[2].isnan() for x in (p, m, v))


# ---- as values -----------------------------------------------------------------------------------------


def test_bytes_of_a_parameter() -> None:
    sizes = {name: sum(x.nbytes(64) for x in row) / 64 for name, row in STATE_FORMATS.items()}
    expected = {"weights": (4, 4, 4), **dict.fromkeys(("sgd", "lion", "adagrad"), (8, 6, 5.03125))}
    for kind, each in expected.items():
        assert tuple(sizes[f"{kind}-{x}"] for x in ("fp32", "16bit", "8bit")) == each
    assert [sizes[x] for x in ("fp32", "fp32-split", "16bit", "8bit")] == [12, 12, 8, 6.03125]
    of_zfunc = {*sizes} - {name for name in sizes if "-" in name and name.partition("-")[0] not in CLASSES}
    assert all(
        sum(DTYPES[x.dtype].nbytes for x in STATE_FORMATS[name] if x.shared == 1) <= 12 for name in of_zfunc
    )


def test_every_optimizer_by_name_has_its_rows() -> None:
    """A rule for each element has rows of this file, as all have of `parity`; and a learning rate to begin with."""
    elementwise = {x for x in CLASSES.values() if issubclass(x, Elementwise) and not x.matrix}
    assert elementwise <= {type(x) for x in RULES.values()}
    assert all(x.usual[0] > 0 for x in CLASSES.values())


def test_optimizers_are_frozen_values() -> None:
    assert zfunc.AdamW(1e-3, betas=[0.9, 0.99]) == zfunc.AdamW(lr=1e-3, betas=(0.9, 0.99))  # pyright: ignore
    with pytest.raises(AttributeError):
        zfunc.AdamW().lr = 1.0  # pyright: ignore
    chosen = zfunc.AdamW(decay=zfunc.matrices_only)
    assert [x.group("a", (2,)) for x in (chosen, zfunc.AdamW())] == [1, 0]


@pytest.mark.parametrize("value", [math.nan, -1e-3, math.inf])
def test_a_schedule_is_checked_at_each_step(value: float) -> None:
    for make in (zfunc.AdamW, zfunc.SGD, zfunc.Lion, zfunc.Adagrad):
        with pytest.raises(ValueError, match="lr at step 12"):
            make(lr=lambda _: value).factors(12)


def test_state_goes_through_fp32_into_other_formats_and_to_no_other_optimizer() -> None:
    state = fresh(64, "lion-16bit")
    with pytest.raises(
        CheckpointError, match="got optimizer state in the format 'lion-16bit', expected 'sgd-fp32'"
    ):
        zfunc.SGD(momentum=0.9).convert_state(state, "lion-16bit", 3)
    for row, optimizer in ((row, x) for row, x in ROWS.items() if x.moments != "8bit"):
        moments, name = optimizer.moments, format_of(row)
        kept, wide = fresh(64, name), optimizer.with_moments("fp32", split_master=False)
        back = wide.with_moments(moments, split_master=row.endswith("split"))
        again = back.convert_state(wide.convert_state(kept, name, 3), wide.state_format(), 3)
        assert_same(again.values(), kept.values())


def test_what_is_not_rounded_takes_no_dithers() -> None:
    """Of fp32 moments nothing is computed to keep them."""
    p, *moments = torch.ones(3, 256)
    with AllocationTracker() as seen:
        kept = formats.pack(p, moments, "fp32", 1)
    assert seen.launches == 0
    assert all(x is y for x, y in zip(kept.values(), (p, *moments), strict=True))
