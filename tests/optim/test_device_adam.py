"""Adam in torch operations, on whatever device: the bits of the host kernel, which are those of the reference."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from adam_states import (
    DECAYS,
    MOMENTS,
    TYPES,
    any_bytes,
    assert_same,
    buffers,
    copied,
    exact,
    fresh,
    gradient,
    of_floats,
    on,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from zfunc.engine.cost_trace import AllocationTracker
from zfunc.optim import device_adam
from zfunc.optim.adam_reference import reference_update, round_to
from zfunc.optim.compact import QuantizedMoment, SplitMaster, named_state
from zfunc.optim.device_adam import device_adam_, workspace
from zfunc.optim.host_adam import adam_update_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [0, 1, 15, 55, 63, 64, 65, 127, 128, 1000, 4097]
every_device = pytest.mark.parametrize("device", DEVICES)
every_kind = pytest.mark.parametrize("moments", MOMENTS)


def update_(master, exp_avg, exp_avg_sq, grad, **options: Any) -> None:
    """`adam_update_` on the device of its buffers."""
    device_adam_(named_state(master, exp_avg, exp_avg_sq), grad, **options)


def check(state, grads, device, *, out=torch.float32, **kind: Any):
    """Some steps in a row, both ways; returns the state they end with."""
    mine, theirs = on(state, lambda x: x.to(device, copy=True)), copied(state)
    for step, grad in enumerate(grads, kind.pop("step", 1)):
        told = {"lr": 1e-2, "grad_scale": 0.3, **kind, "step": step}
        copy, expected = (None if out is None else torch.zeros(grad.numel(), dtype=out) for _ in range(2))
        mine_copy = None if copy is None else copy.to(device)
        there = grad.to(device)
        update_(*mine, there, out=mine_copy, **told)
        adam_update_(*theirs, grad, out=expected, **told)
        assert_same(mine, theirs)
        assert torch.equal(exact(there.cpu()), exact(grad))
        if mine_copy is not None:
            assert_same((mine_copy,), (expected,))
    return theirs


# ---- the bits ------------------------------------------------------------------------------------------


@every_device
@every_kind
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("grad", TYPES, ids=str)
def test_the_bits_of_the_kernel(moments, grad, decay, device):
    weight_decay, decoupled = DECAYS[decay]
    for n, out in zip(SIZES, [None, *TYPES] * len(SIZES), strict=False):
        grads = [gradient(n, grad, step) for step in range(4)]
        kind = {"weight_decay": weight_decay, "decoupled": decoupled, "step": 1 + n}
        check(fresh(n, moments), grads, device, out=out, **kind)


@every_device
@every_kind
@pytest.mark.parametrize("n", [1024, 1025, 2047, 3 * 1024 + 64])
def test_pieces(moments, n, device, monkeypatch):
    monkeypatch.setattr(device_adam, "PIECE", 1024)
    check(fresh(n, moments), [gradient(n, torch.bfloat16, s) for s in range(3)], device, weight_decay=0.1)


@every_device
@every_kind
def test_many_elements(moments, device):
    """Square roots and quotients of a few hundred thousand numbers: one that is rounded twice would show."""
    n = 300_001
    check(fresh(n, moments), [gradient(n, torch.float32, s) for s in range(2)], device, weight_decay=0.1)


@every_device
@every_kind
def test_factors_that_float32_has_to_round(moments, device):
    """The host rounds a factor once; torch would convert a double by itself, wherever and however."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        lr, eps, decay, scale = np.exp(rng.uniform(-12, 2, 4)).tolist()
        kind = {"lr": lr, "betas": tuple(rng.uniform(0, 1, 2).tolist()), "eps": eps, "weight_decay": decay}
        grad = gradient(500, torch.float32, seed)
        check(fresh(500, moments, seed), [grad], device, **kind, grad_scale=scale, step=1 + seed)


@every_device
@every_kind
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5, 2.0**-16, 2.0**80, 2.0**-126])
def test_special_values_meet(moments, decay, scale, device):
    some = [0.0, -0.0, 1.0, math.inf, math.nan, 2.0**-100, 2.0**-120, 1e-40, 1.0001 * 2.0**-100]
    grads = [*some, -math.inf, 1e-45, 2.0**-126, 2.0**-56, 2.0**-57, 3.4028234663852886e38, 65504.0]
    rows = np.array(list(itertools.product([0.0, -1.0, math.inf, 1e-40], some, some, grads)), np.float32)
    p, m, v, g = np.random.default_rng(0).permutation(rows).T.copy()
    for calm in (False, True):  # in a block with an inf there is nothing else
        if calm:
            m, v = (np.nan_to_num(x, nan=2.0**-110, posinf=2.0**-90) for x in (m, v))
        weight_decay, decoupled = DECAYS[decay]
        kind = {"weight_decay": weight_decay, "decoupled": decoupled, "grad_scale": scale, "step": 2}
        state = of_floats(p, m, v, moments)
        check(state, [torch.from_numpy(g)], device, **kind)
        check(state, [torch.from_numpy(g).half()], device, out=torch.float16, eps=0.0, **kind)


@every_device
@every_kind
def test_moments_without_gradients_decay_to_zero(moments, device):
    state = on(fresh(200, moments), lambda x: x.fill_(1e-30) if x.is_floating_point() else x)
    zeros = [torch.zeros(200)] * 50
    end = check(state, zeros, device, betas=(0.1, 0.1))
    for x in end[1:]:
        assert not (x.codes if isinstance(x, QuantizedMoment) else x).any()


@every_device
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), moments=st.sampled_from(sorted(MOMENTS)), n=st.integers(0, 300), seed=st.integers(0, 99)
)
def test_any_bytes_in_a_state(device, data, moments, n, seed):
    grad = gradient(n, data.draw(st.sampled_from(list(TYPES))), seed)
    weight_decay, decoupled = DECAYS[data.draw(st.sampled_from(sorted(DECAYS)))]
    check(any_bytes(n, moments, seed), [grad], device, weight_decay=weight_decay, decoupled=decoupled)


@every_device
def test_every_code_under_many_scales(device):
    """Also infinite ones and scales that no state has, and betas that leave no room for an exponent."""
    scales = torch.arange(-32768, 32768, 128, dtype=torch.int16) + torch.arange(512, dtype=torch.int16) % 16
    n = 64 * scales.numel()
    codes = torch.arange(251, dtype=torch.uint8).repeat(n // 251 + 1)[:n]
    master = fresh(n, "8bit")[0]
    for betas in ((0.9, 0.999), (0.0, 0.5), (1e-40, 2.0**-126)):
        state = master, codes, QuantizedMoment(codes.flip(0) + 5, scales)
        check(state, [gradient(n, torch.bfloat16)], device, betas=betas, step=2)


@every_device
def test_rounding_of_the_copy(device):
    """Every exponent, the ties and their neighbours; a zero learning rate leaves the weights as they are."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    p = (high[:, None] | lows).reshape(-1).view(np.float32)
    p = p[~np.isnan(p)]
    zero = np.zeros_like(p)
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        state = on(of_floats(p, zero, zero, "fp32"), lambda x: x.to(device))
        copy = torch.empty(p.size, dtype=dtype, device=device)
        update_(*state, torch.zeros(p.size, device=device), out=copy, step=1, lr=0.0)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(exact(copy.cpu()).numpy(), round_to(p, kind).view(np.int16))


def test_the_reference_itself():
    rng = np.random.default_rng(0)
    p, m, g = (rng.standard_normal(1000).astype(np.float32) for _ in range(3))
    state = of_floats(p, m, m * m, "fp32")
    kind = {"step": 7, "lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.1, "grad_scale": 2.0}
    update_(*state, torch.from_numpy(g), **kind)
    expected = reference_update(p, m, m * m, g, **kind)[:3]
    assert_same(state, tuple(map(torch.from_numpy, expected)))


# ---- memory --------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("n", [0, 1, 63, 1000, 4096, 10_001, 1 << 20])
def test_the_workspace_bounds_what_is_allocated(moments, n, monkeypatch):
    monkeypatch.setattr(device_adam, "PIECE", 1 << 18)
    state, grad, out = fresh(n, moments), gradient(n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
    with AllocationTracker() as tracker:
        update_(*state, grad, out=out, step=1, lr=1e-3, weight_decay=0.1, decoupled=False)
    assert tracker.peak <= workspace(n, moments)
    assert n < 1 << 20 or tracker.peak > 0.8 * workspace(n, moments)


@pytest.mark.gpu
@every_kind
def test_the_workspace_bounds_what_the_device_allocates(moments):
    n = 3 * device_adam.PIECE + 65
    state = on(fresh(n, moments), lambda x: x.cuda())
    grad = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    update_(*state, grad, step=1, lr=1e-3, weight_decay=0.1)
    assert torch.cuda.max_memory_allocated() - before <= workspace(n, moments)


@pytest.mark.gpu
@every_kind
def test_nothing_waits_for_the_device(moments):
    state = on(fresh(1000, moments), lambda x: x.cuda())
    grad = torch.ones(1000, device="cuda")
    update_(*state, grad, step=1, lr=1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        update_(*state, grad, step=2, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gradient_may_be_asked_of_nothing():
    """Weights that require a gradient, as a leaf would: the step is not recorded."""
    weights = torch.ones(4, requires_grad=True)
    update_(weights, torch.zeros(4), torch.zeros(4), torch.ones(4), step=1, lr=0.5)
    assert weights.is_leaf
    assert torch.equal(weights, torch.full((4,), 0.5))


# ---- bad input -----------------------------------------------------------------------------------------


def good(moments="16bit", n=128):
    p, m, v = fresh(n, moments)
    return {"master": p, "exp_avg": m, "exp_avg_sq": v, "grad": torch.ones(n), "out": torch.zeros(n)}


def uint8(n):
    return torch.zeros(n, dtype=torch.uint8)


LOW = torch.zeros(128, dtype=torch.int16)
REFUSED = [
    ("fp32", {"grad": torch.ones(127)}, ValueError, r"grad: got shape \[127\]"),
    ("fp32", {"grad": torch.ones(256)[::2]}, ValueError, r"grad: got stride 2"),
    ("fp32", {"grad": torch.ones(128).double()}, TypeError, "grad: got float64; expected float32 or bf"),
    ("fp32", {"grad": [1.0] * 128}, TypeError, "grad: got list"),
    (
        "fp32",
        {"grad": torch.ones(128).to("meta")},
        ValueError,
        "grad: got a tensor on meta; expected a tensor on cpu",
    ),
    ("fp32", {"out": torch.ones(128).int()}, TypeError, "out: got int32"),
    (
        "fp32",
        {"exp_avg": QuantizedMoment.zeros(128)},
        TypeError,
        "exp_avg: got QuantizedMoment; expected a torch.Tensor",
    ),
    (
        "8bit",
        {"exp_avg": QuantizedMoment.zeros(128)},
        TypeError,
        "exp_avg: got QuantizedMoment; expected a torch.Tensor",
    ),
    ("16bit", {"exp_avg": torch.zeros(128)}, TypeError, "exp_avg: got float32; expected bfloat16"),
    ("16bit", {"exp_avg_sq": QuantizedMoment.zeros(128)}, TypeError, "exp_avg: got bfloat16; expected uint8"),
    ("16bit", {"master": torch.zeros(128)}, TypeError, "exp_avg: got bfloat16; expected float32"),
    ("8bit", {"exp_avg_sq": torch.zeros(128)}, TypeError, "exp_avg: got uint8; expected bfloat16"),
    (
        "8bit",
        {"exp_avg_sq": QuantizedMoment(uint8(128), LOW[:3])},
        ValueError,
        r"exp_avg_sq.scales: got shape \[3\]",
    ),
    ("8bit", {"master": SplitMaster(torch.zeros(64).bfloat16(), LOW)}, ValueError, r"master.low: got shape"),
    ("fp32", {"step": 0}, ValueError, "step"),
    ("fp32", {"lr": -1.0}, ValueError, "lr"),
    ("fp32", {"betas": (0.9, 1.0)}, ValueError, "betas"),
    ("fp32", {"grad_scale": math.nan}, ValueError, "grad_scale"),
]


@pytest.mark.parametrize(("moments", "change", "error", "words"), REFUSED)
def test_what_cannot_be_is_refused_untouched(moments, change, error, words):
    before, mine = good(moments), good(moments)
    with pytest.raises(error, match=words) as caught:
        update_(**{**mine, "step": 1, "lr": 1.0, **change})
    assert "expected" in str(caught.value)
    for x, y in zip(buffers(mine.values()), buffers(before.values()), strict=True):
        assert torch.equal(exact(x), exact(y))


def test_buffers_that_overlap_are_refused():
    call = good("fp32")
    with pytest.raises(ValueError, match="grad and out: got memory that overlaps|out and grad"):
        update_(**{**call, "out": call["grad"]}, step=1, lr=1.0)
