"""Adam on the host: the kernel is the NumPy reference to the bit, and the reference is Adam."""

import ctypes
import itertools
import math
import mmap
import threading
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import zfunc.runtime.thread_budget
from zfunc.optim.adam_reference import (
    coefficients,
    reference_square_sum,
    reference_update,
    round_to,
    to_float32,
)
from zfunc.optim.adamw import AdamW, matrices_only
from zfunc.optim.host_adam import accumulate_, adam_update_, square_sum
from zfunc.optim.kernel_loader import cpu_adam as kernel

ISAS = range(len(kernel.instruction_sets()))
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODES = {"fp32": kernel.FP32, "bf16": kernel.BF16, "fp16": kernel.FP16, None: kernel.NONE}
DECAYS = {"none": (0.0, True), "decoupled": (0.1, True), "l2": (0.1, False)}
SIZES = [0, 1, 15, 55, 127, (1 << 20) + 1]


def bits(x):
    """Bits of an array, every NaN alike: its payload is not promised."""
    x = np.asarray(x)
    if x.dtype == np.uint16:  # bf16
        return np.where((x & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), x)
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x).view(f"u{x.dtype.itemsize}")


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(bits(one), bits(other))


def placed(x, offset):
    """A copy of x that starts `offset` elements into its storage."""
    store = np.empty(x.size + offset, x.dtype)
    store[offset:] = x
    return store[offset:]


def problem(n, grad="fp32", seed=0):
    rng = np.random.default_rng(seed)
    p, m, g = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    v = rng.random(n, dtype=np.float32)
    return p, m * np.float32(0.1), v, round_to(g, grad)


def run_kernel(buffers, grad, *, out, weight_decay=0.0, decoupled=True, threads=1, isa=-1, chunks=(), **kind):
    """The raw kernel on NumPy arrays, in place, split at `chunks`; returns the copy."""
    p, m, v, g = buffers
    types = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
    copy = None if out is None else placed(np.zeros(p.size, types[out]), 1)
    mode = kernel.NO_DECAY if not weight_decay else kernel.DECOUPLED if decoupled else kernel.L2
    setting = {"betas": (0.9, 0.999), "eps": 1e-8, "grad_scale": 1.0, **kind}
    factors = coefficients(**setting, weight_decay=weight_decay, decoupled=decoupled)
    for start, stop in itertools.pairwise([0, *chunks, p.size]):
        parts = [x[start:stop].ctypes.data for x in (p, m, v, g)]
        to = 0 if copy is None else copy[start:stop].ctypes.data
        state = [parts[0], 0, *parts[1:3], 0, 0, 0]  # no low half, no scales, no dither
        types = CODES[grad], CODES[out], mode
        kernel.adam_update(
            kernel.MOMENTS_FP32, *state, parts[3], to, stop - start, *types, *factors, threads, isa
        )
    return copy


def check_steps(n, grad, out, decay, *, offset=0, steps=1, **how):
    weight_decay, decoupled = DECAYS[decay]
    kind = {"weight_decay": weight_decay, "decoupled": decoupled, "lr": 1e-3, "grad_scale": 0.3}
    p, m, v, _ = problem(n)
    mine = [placed(x, offset) for x in (p, m, v)]
    for step in range(1, steps + 1):
        g = problem(n, grad, seed=step)[3]
        p, m, v, expected = reference_update(p, m, v, g, out=out, step=step, **kind)
        copy = run_kernel([*mine, placed(g, offset)], grad, out=out, step=step, **kind, **how)
        assert_same([*mine, copy], [p, m, v, expected])


# ---- law 8: the bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("out", [None, *TYPES])
@pytest.mark.parametrize("grad", TYPES)
def test_types_and_instruction_sets(grad, out, decay, isa):
    for n in SIZES[:-1]:
        check_steps(n, grad, out, decay, isa=isa, steps=3)
    check_steps(40_001, grad, out, decay, isa=isa, threads=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("grad", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_and_threads(grad, threads, isa):
    out = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}[grad]
    check_steps(SIZES[-1], grad, out, "decoupled", threads=threads, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("offset", [1, 3, 7, 16])
def test_unaligned_offsets(offset, isa):
    for n in (55, 127, 300_001):  # the largest also streams its copy
        check_steps(n, "bf16", "bf16", "decoupled", offset=offset, isa=isa, threads=3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunks", [(1,), (128, 256), (100, 101, 5000, 33_333)])
def test_chunking(chunks, isa):
    check_steps(40_000, "fp16", "bf16", "l2", chunks=chunks, isa=isa, threads=2)


def test_public_call_is_the_reference():
    p, m, v, _ = problem(1000)
    g = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    kind = {"step": 7, "lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "grad_scale": 2.0}
    expected = reference_update(p, m, v, g.view(torch.uint16).numpy(), out="bf16", **kind)
    mine = [torch.from_numpy(x.copy()) for x in (p, m, v)]
    out, before = torch.empty(1000, dtype=torch.bfloat16), g.clone()
    assert adam_update_(*mine, g, out=out, **kind) is None
    assert_same([*(x.numpy() for x in mine), out.view(torch.uint16).numpy()], expected)
    assert torch.equal(g, before)


EXTREMES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 2.0**-126, 2.0**-56]
EXTREMES += [2.0**-57, 2.0**-100, 2.0**-120, 3.4028234663852886e38, 65504.0, 65520.0, 2.0**-24, 2.0**-25]
values = st.lists(st.sampled_from(EXTREMES) | st.floats(width=32), min_size=4, max_size=4)


def check_special(rows, grad, out, decay, scale):
    p, m, v, g = np.array(rows, np.float32).T.copy()
    with np.errstate(all="ignore"):
        g = round_to(g, grad)
    weight_decay, decoupled = DECAYS[decay]
    kind = {"weight_decay": weight_decay, "decoupled": decoupled, "lr": 1e-3, "grad_scale": scale, "step": 2}
    expected = reference_update(p, m, v, g, out=out, **kind)
    for isa in ISAS:
        mine = [p.copy(), m.copy(), v.copy()]
        copy = run_kernel([*mine, g], grad, out=out, isa=isa, **kind)
        assert_same([*mine, copy], expected)


SCALES = [1.0, 0.0, -0.5, 2.0**-16, 2.0**80]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("decay", DECAYS)
def test_special_values_meet(decay, scale):
    some = [0.0, 1.0, math.inf, math.nan, 2.0**-100, 2.0**-120, 1e-40]
    check_special(list(itertools.product(EXTREMES, some, some, EXTREMES)), "fp32", "fp16", decay, scale)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(values, min_size=1, max_size=40),
    grad=st.sampled_from(list(TYPES)),
    out=st.sampled_from(list(TYPES)),
    decay=st.sampled_from(list(DECAYS)),
    scale=st.sampled_from(SCALES),
)
def test_special_values(rows, grad, out, decay, scale):
    check_special(rows, grad, out, decay, scale)


def test_decayed_moments_become_zero_and_nan_does_not():
    p, m, v = torch.ones(3), torch.full((3,), 1e-40), torch.full((3,), 1e-40)
    g = torch.tensor([0.0, 1e-20, math.nan])
    adam_update_(p, m, v, g, step=9, lr=1e-3)
    assert m[:2].tolist() == v[:2].tolist() == [0.0, 0.0]
    assert p[:2].tolist() == [1.0, 1.0]
    assert all(x[2].isnan() for x in (p, m, v))


def test_flush_modes_of_the_caller_change_nothing():
    a, b = problem(5000), problem(5000)
    kind = {"out": "fp16", "step": 3, "lr": 1e-3, "weight_decay": 0.1}
    for x in (a, b):
        x[1][::3], x[2][::3], x[3][::3] = 1.1 * 2.0**-100, 1.1 * 2.0**-120, 0.0  # about to decay below
    first = run_kernel(list(a), "fp32", **kind)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush mode")
    try:
        second = run_kernel(list(b), "fp32", **kind)
    finally:
        torch.set_flush_denormal(False)
    assert_same([*a, first], [*b, second])


# ---- it is Adam ------------------------------------------------------------------------------------


def usual(n, step):
    """Weights well above one update, moments as gradients of about unit size leave them."""
    rng = np.random.default_rng(step)
    p = rng.uniform(0.02, 2.0, n) * rng.choice([-1.0, 1.0], n)
    v = rng.uniform(0.1, 2.0, n) * (1.0 - 0.999 ** (step - 1))
    m = rng.uniform(-1.0, 1.0, n) * np.sqrt(v) * (1.0 - 0.9 ** (step - 1))
    return tuple(x.astype(np.float32) for x in (p, m, v, rng.standard_normal(n)))


def cancelling(n, step):
    """Moments that a gradient cancels, to any number of bits, and weights down to far below one update."""
    rng = np.random.default_rng(step)
    p, _, v, g = usual(n, step)
    m = -0.1 / 0.9 * g * (1.0 + rng.choice([0.0, 1e-7, 1e-4, 1e-2], n) * rng.standard_normal(n))
    p = p * rng.choice([1e-6, 1e-3, 1.0], n)
    return p.astype(np.float32), m.astype(np.float32), v, g


@pytest.mark.parametrize("state", [usual, cancelling])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("step", [1, 2, 10, 1000])
def test_within_two_ulp_of_float64(decay, step, state):
    weight_decay, decoupled = DECAYS[decay]
    lr, b1, b2, eps = 1e-3, 0.9, 0.999, 1e-8
    before = state(100_000, step)
    kind = {"step": step, "lr": lr, "weight_decay": weight_decay, "decoupled": decoupled}
    got = reference_update(*before, **kind)
    p, m, v, g = (x.astype(np.float64) for x in before)
    l2 = 0.0 if decoupled else weight_decay * p
    m1 = b1 * m + (1 - b1) * (g + l2)
    v1 = b2 * v + (1 - b2) * (g + l2) ** 2
    rate = lr / (1 - b1**step) / (np.sqrt(v1 / (1 - b2**step)) + eps)
    p1 = p - rate * m1 - (lr * weight_decay * p if decoupled else 0.0)
    # An ulp is that of the sum of the terms' sizes: no arithmetic keeps the last bits of what cancels. The update
    # is one of the weights' terms, with the terms of the moments in it.
    # The moments carry the rounded 1 - beta, exp_avg_sq a squared gradient's error.
    size = np.abs(g) + np.abs(l2)
    m_terms, v_terms = b1 * np.abs(m) + (1 - b1) * size, b2 * v + (1 - b2) * size**2
    p_terms = np.abs(p) + rate * (m_terms + np.abs(m1) * v_terms / v1)
    cases = zip(got[:3], (p1, m1, v1), (p_terms, m_terms, v_terms), (2.0, 3.0, 5.0), strict=True)
    for mine, exact, terms, most in cases:
        ulp = np.spacing(terms.astype(np.float32)).astype(np.float64)
        assert (np.abs(mine - exact) / ulp).max() <= most
    if (
        state is cancelling
    ):  # it does, or this would be the same test twice: in ulp of the result no bound holds
        ulp = np.spacing(np.abs(m1).astype(np.float32)).astype(np.float64)
        assert (np.abs(got[1] - m1) / ulp).max() > 1e6


@pytest.mark.parametrize(
    ("kind", "weight_decay", "decoupled"),
    [(torch.optim.AdamW, 0.1, True), (torch.optim.Adam, 0.1, False), (torch.optim.AdamW, 0.0, True)],
)
def test_hundred_steps_of_torch(kind, weight_decay, decoupled):
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(1000, generator=generator))
    mine, m, v = theirs.detach().clone(), torch.zeros(1000), torch.zeros(1000)
    optimizer = kind([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=weight_decay)
    for step in range(1, 101):
        theirs.grad = torch.randn(1000, generator=generator)
        grad = theirs.grad * 8  # the scale must undo exactly this
        optimizer.step()
        options = {"weight_decay": weight_decay, "decoupled": decoupled, "grad_scale": 0.125}
        adam_update_(mine, m, v, grad, step=step, lr=1e-2, betas=(0.9, 0.99), **options)
    torch.testing.assert_close(mine, theirs.detach(), rtol=2e-5, atol=2e-6)


# ---- conversions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_16_bit_value_widens_as_in_torch(kind, isa):
    every = np.arange(1 << 16, dtype=np.uint16)
    acc = np.zeros(1 << 16, np.float32)
    kernel.accumulate(acc.ctypes.data, every.ctypes.data, every.size, CODES[kind], True, 1, isa)
    expected = torch.from_numpy(every).view(TYPES[kind]).float().numpy()
    assert_same([acc], [expected])
    assert_same([to_float32(every if kind == "bf16" else every.view(np.float16))], [expected])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_rounding_as_in_torch(kind, isa):
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    x = (high[:, None] | np.array(lows, np.uint32)).reshape(-1)  # every exponent; the ties; their neighbours
    more = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([x, more]).view(np.float32)
    zero = np.zeros_like(x)
    # With a zero gradient and learning rate the weights stay, and the copy is their rounding.
    copy = run_kernel([x.copy(), zero, zero.copy(), zero], "fp32", out=kind, step=1, lr=0.0, isa=isa)
    expected = torch.from_numpy(x).to(TYPES[kind]).view(torch.uint16).numpy()
    expected = expected if kind == "bf16" else expected.view(np.float16)
    assert_same([copy], [expected])
    with np.errstate(all="ignore"):
        assert_same([round_to(x, kind)], [expected])


# ---- the other sweeps ------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", TYPES)
@pytest.mark.parametrize("n", [*SIZES, 16_384, 16_385, 100_003])
def test_accumulate_and_square_sum(n, grad):
    first, second = problem(n, grad, seed=1)[3], problem(n, grad, seed=2)[3]
    total = to_float32(first) + to_float32(second)
    for isa, threads, offset in itertools.product(ISAS, (1, 3), (0, 1)):
        acc = placed(np.full(n, np.nan, np.float32), offset)
        a, b = placed(first, offset), placed(second, 0)
        how = (CODES[grad], threads, isa)
        one = kernel.accumulate(acc.ctypes.data, a.ctypes.data, n, how[0], True, *how[1:])
        assert one == reference_square_sum(first)
        two = kernel.accumulate(acc.ctypes.data, b.ctypes.data, n, how[0], False, *how[1:])
        assert two == reference_square_sum(total)
        assert_same([acc], [total])
        assert kernel.accumulate(0, a.ctypes.data, n, how[0], False, *how[1:]) == one
    assert one == pytest.approx(float((to_float32(first).astype(np.float64) ** 2).sum()), rel=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_sums_propagate_inf_and_nan(bad):
    grad = torch.ones(50_000)
    grad[40_000] = bad
    assert not math.isfinite(square_sum(grad))
    assert not math.isfinite(square_sum(grad.half()))
    acc = torch.zeros(50_000)
    assert not math.isfinite(accumulate_(acc, grad.bfloat16(), first=False))
    assert not math.isfinite(accumulate_(acc, torch.ones(50_000), first=False))


# ---- bad input -------------------------------------------------------------------------------------


def good(n=64):
    p, m, v, g = (torch.from_numpy(x) for x in problem(n))
    return {"master": p, "exp_avg": m, "exp_avg_sq": v, "grad": g, "out": torch.zeros(n).half()}


SCALARS = [
    ({"step": 0}, ValueError, "step"),
    ({"step": 1.0}, TypeError, "step"),
    ({"step": True}, TypeError, "step"),
    ({"lr": math.nan}, ValueError, "lr"),
    ({"lr": -1.0}, ValueError, "lr"),
    ({"lr": "1"}, TypeError, "lr"),
    ({"betas": (0.9, 1.0)}, ValueError, "betas"),
    ({"betas": (-0.1, 0.9)}, ValueError, "betas"),
    ({"betas": 0.9}, ValueError, "betas"),
    ({"eps": -1e-8}, ValueError, "eps"),
    ({"weight_decay": math.inf}, ValueError, "weight_decay"),
    ({"grad_scale": math.inf}, ValueError, "grad_scale"),
    ({"grad_scale": 1e39}, ValueError, "grad_scale"),
    ({"step": 10**400}, ValueError, "step"),
    ({"lr": 3e38}, ValueError, "as step_size"),
    ({"lr": 1e38, "weight_decay": 1e30}, ValueError, "lr, betas and weight_decay"),
    ({"lr": torch.ones(2)}, TypeError, "lr"),
    ({"lr": np.ones(2)}, TypeError, "lr"),
    ({"threads": 0}, ValueError, "threads"),
    ({"threads": 1.5}, TypeError, "threads"),
]
BUFFERS = [
    ("master", lambda x: x.double(), TypeError),
    ("master", lambda x: x.numpy(), TypeError),
    ("exp_avg", lambda x: x.bfloat16(), TypeError),
    ("grad", lambda x: x.to(torch.int32), TypeError),
    ("out", lambda x: x.double(), TypeError),
    ("grad", lambda x: x[:-1], ValueError),
    ("exp_avg_sq", lambda x: x.reshape(8, 8), ValueError),
    ("grad", lambda x: x.repeat(2)[::2], ValueError),
    ("grad", lambda x: x.to("meta"), ValueError),
    ("grad", lambda x: x.to_sparse(), ValueError),
]


def assert_refused(call, buffers, error, match):
    before = {name: x.clone() for name, x in buffers.items()}
    with pytest.raises(error, match=match) as caught:
        call()
    assert "got" in str(caught.value)
    assert "expected" in str(caught.value)
    assert all(torch.equal(x, before[name]) for name, x in buffers.items())


@pytest.mark.parametrize(("change", "error", "match"), SCALARS)
def test_bad_scalars_touch_nothing(change, error, match):
    buffers = good()
    call = {"step": 1, "lr": 1e-3, **change}
    assert_refused(lambda: adam_update_(**buffers, **call), buffers, error, match)


@pytest.mark.parametrize(("name", "spoil", "error"), BUFFERS)
def test_bad_buffers_touch_nothing(name, spoil, error):
    buffers = good()
    spoiled = {**buffers, name: spoil(buffers[name])}
    assert_refused(lambda: adam_update_(**spoiled, step=1, lr=1e-3), buffers, error, name)


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "out"])
@pytest.mark.parametrize("where", ["all of it", "its end"])
def test_memory_that_cannot_be_written_is_refused(name, where):
    """A page without write permission would end the process with a signal; a gradient may lie in one."""
    n = mmap.PAGESIZE // 2  # 4-byte elements: two pages
    pages = mmap.mmap(-1, n * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    locked = torch.frombuffer(pages, dtype=torch.float32)
    libc = ctypes.CDLL(None, use_errno=True)
    start, size = (0, n * 4) if where == "all of it" else (mmap.PAGESIZE, mmap.PAGESIZE)
    assert (
        libc.mprotect(ctypes.c_void_p(locked.data_ptr() + start), ctypes.c_size_t(size), mmap.PROT_READ) == 0
    )
    buffers = {x: torch.ones(n) for x in ("master", "exp_avg", "exp_avg_sq", "grad", "out")}
    frozen = {**buffers, name: locked}
    assert_refused(
        lambda: adam_update_(**frozen, step=1, lr=1e-3),
        {x: t for x, t in frozen.items() if x != name},
        ValueError,
        f"{name}: got read-only memory",
    )
    adam_update_(**{**buffers, "grad": locked}, step=1, lr=1e-3)
    with pytest.raises(ValueError, match="acc: got read-only memory"):
        accumulate_(locked, buffers["grad"], first=True)


def shrunk():
    t = torch.ones(64)
    t.untyped_storage().resize_(16)
    return t


def gone():
    t = torch.ones(64)
    t.untyped_storage().resize_(0)
    return t


def fake():
    with FakeTensorMode():
        return torch.ones(64)


@pytest.mark.parametrize("make", [shrunk, gone, fake])
@pytest.mark.parametrize("name", ["master", "exp_avg", "grad", "out"])
def test_a_tensor_whose_memory_is_not_there_is_refused(name, make):
    buffers = good()
    spoiled = {**buffers, name: make()}
    kept = {x: t for x, t in buffers.items() if x != name}
    assert_refused(
        lambda: adam_update_(**spoiled, step=1, lr=1e-3), kept, ValueError, f"{name}: got a tensor whose"
    )
    with pytest.raises(ValueError, match="grad: got a tensor whose"):
        square_sum(make())


def test_the_callers_mode_for_denormal_numbers_changes_no_bit():
    """It is a mode of each thread: those of a team would not agree."""
    results = []
    for flush, threads in ((False, 1), (True, 1), (True, 2)):
        torch.set_flush_denormal(flush)
        p = torch.full((1 << 16,), 1e-36)
        zero = [torch.zeros(1 << 16) for _ in range(3)]
        adam_update_(p, *zero, step=1, lr=1e-2, weight_decay=0.1, threads=threads)
        results.append(p)
    torch.set_flush_denormal(False)
    assert all(torch.equal(p, results[0]) for p in results)


def test_overlap_is_refused():
    buffers = good()
    store = torch.zeros(100)
    overlapping = {**buffers, "master": store[:64], "exp_avg": store[36:]}
    assert_refused(lambda: adam_update_(**overlapping, step=1, lr=1e-3), buffers, ValueError, "overlaps")
    aliased = {**buffers, "grad": buffers["out"]}
    assert_refused(lambda: adam_update_(**aliased, step=1, lr=1e-3), buffers, ValueError, "grad and out")
    apart = {**buffers, "master": store[:32], "exp_avg": store[32:64]}
    rest = {name: x[:32] for name, x in buffers.items() if name not in ("master", "exp_avg")}
    adam_update_(**{**apart, **rest}, step=1, lr=1e-3)


def test_bad_sums_touch_nothing():
    acc, grad = torch.zeros(8), torch.ones(8)
    calls = [
        (lambda: accumulate_(acc, grad[:4], first=True), ValueError),
        (lambda: accumulate_(acc, acc, first=False), ValueError),
        (lambda: accumulate_(acc.half(), grad, first=True), TypeError),
        (lambda: accumulate_(acc, grad, first=True, threads=0), ValueError),
        (lambda: square_sum(grad.double()), TypeError),
        (lambda: square_sum(grad.reshape(2, 4)), ValueError),
    ]
    for call, error in calls:
        assert_refused(call, {"acc": acc, "grad": grad}, error, "acc|grad|threads")


def test_wrappers_of_func_are_refused():
    def loss(p):
        adam_update_(p, torch.zeros(4), torch.zeros(4), torch.ones(4), step=1, lr=1.0)
        return p.sum()

    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.grad(loss)(torch.ones(4))


def test_an_instruction_set_the_cpu_lacks_is_refused():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="does not run"):
        kernel.accumulate(0, x.data_ptr(), 4, kernel.FP32, False, 1, 99)


# ---- threads and the runtime -----------------------------------------------------------------------


def test_one_openmp_runtime():
    adam_update_(*(torch.zeros(1 << 17) for _ in range(4)), step=1, lr=1e-3, threads=2)
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) == 1


def test_too_many_threads_are_clamped_and_logged_once(caplog):
    zfunc.runtime.thread_budget.limit_threads.cache_clear()
    for _ in range(2):
        assert square_sum(torch.ones(4), threads=100_000) == 4.0
    assert caplog.text.count("100000 threads asked for") == 1


# ---- the optimizer as a value ----------------------------------------------------------------------


def test_optimizer_is_a_frozen_value():
    assert AdamW(1e-3, betas=[0.9, 0.99]) == AdamW(lr=1e-3, betas=(0.9, 0.99))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        AdamW().lr = 1.0
    assert AdamW(lr=lambda step: 0.1 / step).lr_at(2) == 0.05
    chosen = AdamW(decay=matrices_only)
    assert chosen.decay("a.weight", (2, 2))
    assert not chosen.decay("a.bias", (2,))
    assert AdamW().decay("a.bias", (2,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -1.0),
        ("lr", math.inf),
        ("lr", None),
        ("betas", (0.9, 1.0)),
        ("betas", 0.9),
        ("eps", -1.0),
        ("weight_decay", math.nan),
        ("decoupled", 1),
        ("decay", 0.1),
    ],
)
def test_optimizer_checks_at_birth(field, value):
    with pytest.raises((ValueError, TypeError), match=field):
        AdamW(**{field: value})


@pytest.mark.parametrize("value", [math.nan, -1e-3, math.inf])
def test_a_bad_learning_rate_names_its_step(value):
    with pytest.raises(ValueError, match="step 12"):
        AdamW(lr=lambda _: value).lr_at(12)


def test_other_threads_run_while_the_kernel_does():
    n = 1 << 23
    buffers = [torch.ones(n) for _ in range(4)]
    interval: list[float] = []

    def update() -> None:
        start = time.perf_counter()
        adam_update_(*buffers, step=1, lr=0.1, threads=1)
        interval.extend((start, time.perf_counter()))

    update()
    interval.clear()
    worker, beats = threading.Thread(target=update), []
    worker.start()
    while worker.is_alive():
        beats.append(time.perf_counter())
    start, end = interval
    middle = [t for t in beats if start + (end - start) / 4 < t < end - (end - start) / 4]
    assert len(middle) > 3  # with the GIL held there would be none
