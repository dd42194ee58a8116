"""Law 8: whoever makes an update, in place or into other buffers, it has the bits of the NumPy reference.

The kernel on every instruction set of this machine, and the torch operations that a device runs.
"""

import ctypes
import itertools
import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from adam_states import (
    DECAYS,
    MOMENTS,
    TYPES,
    State,
    any_bytes,
    around,
    assert_same,
    buffers,
    copied,
    device_update_,
    exact,
    fresh,
    gradient,
    of_floats,
    on,
    placed,
    random_bytes,
    raw_update,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zfunc.optim.compact import QuantizedMoment
from zfunc.optim.host_adam import adam_update_
from zfunc.optim.kernel_loader import cpu_adam as kernel

ISAS = range(len(kernel.instruction_sets()))
SIZES = [0, 1, 15, 55, 63, 64, 65, 127, 128, 129, 1000, 4097]
STREAMED = 300_001  # elements from which on new state and copy bypass the caches, and a few more
USUAL: dict[str, Any] = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "grad_scale": 0.3}
# The kernel, or torch operations on that device.
every_place = pytest.mark.parametrize("where", ["host", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_format = pytest.mark.parametrize("moments", MOMENTS)
every_decay = pytest.mark.parametrize("decay", DECAYS)


def stale(state: State) -> State:
    """Buffers of the same kind that hold bits no result has."""
    return on(state, lambda x: torch.full((x.nbytes,), 0xA5, dtype=torch.uint8).view(x.dtype))


def unchanged(got: Any, expected: Any) -> bool:
    return all(torch.equal(exact(x), exact(y)) for x, y in zip(buffers(got), buffers(expected), strict=True))


def check(
    state: State,
    grad: Tensor,
    where: str,
    *,
    out: torch.dtype | None = None,
    threads: tuple[int, ...] = (1,),
    chunks: tuple[int, ...] = (),
    offset: int = 0,
    other: int = 0,
    **arguments: Any,
) -> State:
    """One step in every way of a place; returns the new state. Buffers begin `offset` elements into their storage,
    new ones `other` elements.
    """
    arguments = {**USUAL, **DECAYS["none"], **arguments}
    expected, expected_copy = reference(state, grad, out, **arguments)

    def assert_expected(got: State, copy: Tensor | None) -> None:
        assert_same(got, expected)
        if copy is not None:
            assert_same((copy,), (expected_copy,))

    if where != "host":
        mine, moved = on(state, lambda x: x.to(where, copy=True)), grad.to(where, copy=True)
        copy = None if out is None else torch.zeros(grad.numel(), dtype=out, device=where)
        device_update_(*mine, moved, out=copy, **arguments)
        assert_expected(mine, copy)
        assert unchanged((moved.cpu(),), (grad,))
        return expected
    for isa, team in itertools.product(ISAS, threads):
        mine, into, moved = copied(state, offset), copied(stale(state), other), placed(grad, offset)
        outside = [around(x) for x in buffers(into)]
        for target in (into, None):  # in place at last
            copy = None if out is None else placed(torch.zeros(grad.numel(), dtype=out), other)
            raw_update(mine, moved, copy, into=target, threads=team, isa=isa, chunks=chunks, **arguments)
            assert_expected(target or mine, copy)
            assert target is None or unchanged(mine, state)
        assert unchanged((moved,), (grad,))
        assert all(torch.equal(around(x), y) for x, y in zip(buffers(into), outside, strict=True))
    return expected


@every_place
@every_format
@every_decay
@pytest.mark.parametrize("grad", TYPES, ids=str)
def test_sizes_types_and_decays(moments: str, grad: torch.dtype, decay: str, where: str) -> None:
    for n, out in itertools.product(SIZES, [None, *TYPES]):
        check(fresh(n, moments), gradient(n, grad), where, out=out, step=1 + n % 3, **DECAYS[decay])


@every_place
@every_format
def test_step_after_step(moments: str, where: str) -> None:
    state = fresh(1000, moments)
    for step in range(1, 6):
        state = check(state, gradient(1000, torch.bfloat16, step), where, step=step, **DECAYS["decoupled"])


@every_place
@pytest.mark.parametrize(
    ("moments", "grad", "out"),
    [*(("fp32", x, x) for x in TYPES), *((x, torch.bfloat16, torch.float16) for x in MOMENTS if x != "fp32")],
)
def test_many_elements_on_many_threads(moments: str, grad: torch.dtype, out: torch.dtype, where: str) -> None:
    n = STREAMED
    state = fresh(n, moments)
    assert all(x.data_ptr() % 64 == 0 for x in buffers(copied(state)))  # else nothing would bypass the caches
    check(state, gradient(n, grad), where, out=out, threads=(1, 2, 3, 4), **DECAYS["decoupled"])


@every_format
@pytest.mark.parametrize(("offset", "other"), [(1, 0), (0, 1), (3, 7), (16, 32)])
def test_offsets(moments: str, offset: int, other: int) -> None:
    where: dict[str, Any] = {"offset": offset, "other": other, "threads": (3,)}
    for n in (55, 127, 40_001, STREAMED):
        grad = gradient(n, torch.float16)
        check(fresh(n, moments), grad, "host", out=torch.bfloat16, **where, **DECAYS["decoupled"])


@pytest.mark.parametrize(
    ("moments", "chunks"),
    [
        ("fp32", (1,)),
        ("fp32", (100, 101, 5000, 33_333)),
        *((moments, (64, 128, 192, 5 * 64, 33_344)) for moments in MOMENTS),
    ],
)
def test_chunks(moments: str, chunks: tuple[int, ...]) -> None:
    grad = gradient(40_001, torch.float16)
    how: dict[str, Any] = {"chunks": chunks, "threads": (2,), **DECAYS["l2"]}
    check(fresh(40_001, moments), grad, "host", out=torch.bfloat16, **how)


EXTREMES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 2.0**-126, 2.0**-56]
EXTREMES += [2.0**-57, 2.0**-100, 2.0**-120, 3.4028234663852886e38, 65504.0, 65520.0, 2.0**-24, 2.0**-25]
SCALES = [1.0, 0.0, -0.5, 2.0**-16, 2.0**80, 2.0**-126]


@every_place
@every_format
@every_decay
@pytest.mark.parametrize("scale", SCALES)
def test_special_values_meet(moments: str, decay: str, scale: float, where: str) -> None:
    some = [0.0, -0.0, 1.0, math.inf, math.nan, 2.0**-100, 2.0**-120, 1e-40, 1.0001 * 2.0**-100]
    weights = [0.0, -1.0, math.inf, math.nan, 1e-40, 2.0**-57]
    rows = np.array([*itertools.product(weights, some, some, EXTREMES)], np.float32)
    p, m, v, g = np.random.default_rng(0).permutation(rows).T.copy()
    how: dict[str, Any] = {"grad_scale": scale, "step": 2, **DECAYS[decay]}
    for calm in (False, True):  # in a block with an inf there is nothing else
        if calm:
            m, v = (np.nan_to_num(x, nan=2.0**-110, posinf=2.0**-90) for x in (m, v))
        state = of_floats(p, m, v, moments)
        check(state, torch.from_numpy(g), where, out=torch.float16, **how)
        check(state, torch.from_numpy(g).half(), where, out=torch.bfloat16, eps=0.0, **how)


floats = st.lists(st.sampled_from(EXTREMES) | st.floats(width=32), min_size=4, max_size=4)
types, formats, decays = (st.sampled_from([*x]) for x in (TYPES, MOMENTS, DECAYS))


@every_place
@given(rows=st.lists(floats, min_size=1, max_size=40), data=st.data())
def test_any_floats(rows: list[list[float]], data: st.DataObject, where: str) -> None:
    p, m, v, g = np.array(rows, np.float32).T.copy()
    scale, decay = data.draw(st.sampled_from(SCALES)), data.draw(decays)
    grad = torch.from_numpy(g).to(data.draw(types))
    state = of_floats(p, m, np.abs(v), data.draw(formats))
    check(state, grad, where, out=data.draw(types), grad_scale=scale, **DECAYS[decay])


@every_place
@given(moments=formats, n=st.integers(0, 300), seed=st.integers(0, 99), data=st.data())
def test_any_bytes(moments: str, n: int, seed: int, data: st.DataObject, where: str) -> None:
    """Every bit pattern of a state and of a gradient: no trap, no difference."""
    grad = gradient(n, data.draw(types), seed)
    if data.draw(st.booleans()):
        grad = random_bytes(grad, seed)
    check(any_bytes(n, moments, seed), grad, where, out=torch.float32, **DECAYS[data.draw(decays)])


@every_place
@every_format
def test_a_gradient_whose_bits_are_all_set(moments: str, where: str) -> None:
    """A NaN: what rounds such bits up has to expect them."""
    for dtype in TYPES:
        grad = gradient(128, dtype)
        grad.view(torch.uint8)[: grad.element_size()] = 0xFF
        check(fresh(128, moments), grad, where, out=dtype)


@every_place
@pytest.mark.parametrize(
    "betas",
    [
        (0.9, 0.999),
        (0.0, 0.0),
        (0.0, 0.5),
        (1e-45, 1e-40),
        (2.0**-126, 0.999),
        (1e-40, 2.0**-126),
        (2.0**-46, 0.5),
    ],
)
def test_every_code_under_many_scales(betas: tuple[float, float], where: str) -> None:
    """Also infinite scales and such as no state has, and betas that leave no room for the exponent of a unit."""
    scales = torch.arange(-32768, 32768, 128, dtype=torch.int16) + torch.arange(512, dtype=torch.int16) % 16
    n = 64 * scales.numel()
    codes = torch.arange(251, dtype=torch.uint8).repeat(n // 251 + 1)[:n]
    state = fresh(n, "8bit")[0], codes, QuantizedMoment(codes.flip(0) + 5, scales)
    check(state, gradient(n, torch.bfloat16), where, betas=betas, step=2)


@every_place
@every_format
def test_factors_that_float32_has_to_round(moments: str, where: str) -> None:
    """The host rounds a factor once; torch would convert a double by itself, wherever and however."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        lr, eps, decay, scale = np.exp(rng.uniform(-12, 2, 4)).tolist()
        kind = {"lr": lr, "betas": tuple(rng.uniform(0, 1, 2).tolist()), "eps": eps, "weight_decay": decay}
        grad = gradient(500, torch.float32, seed)
        check(fresh(500, moments, seed), grad, where, **kind, grad_scale=scale, step=1 + seed)


@every_place
@pytest.mark.parametrize(
    ("moments", "out"), [("fp32", torch.bfloat16), ("fp32", torch.float16), ("fp32-split", torch.bfloat16)]
)
def test_rounding_of_the_copy(moments: str, out: torch.dtype, where: str) -> None:
    """Every exponent, the ties and their neighbours; a zero learning rate leaves the weights as they are."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    p = (high[:, None] | lows).reshape(-1).view(np.float32)
    zero = np.zeros_like(p)
    check(of_floats(p, zero, zero, moments), torch.zeros(p.size), where, out=out, lr=0.0)


def locked(x: Tensor) -> Tensor:
    """A copy in pages that cannot be written: a write is a signal."""
    nbytes = max(x.nbytes, 1)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    copy = torch.frombuffer(pages, dtype=x.dtype, count=x.numel())
    copy.copy_(x)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(copy.data_ptr()), ctypes.c_size_t(nbytes), mmap.PROT_READ) == 0
    return copy


@pytest.mark.parametrize("isa", ISAS)
@every_format
def test_the_state_may_lie_in_memory_that_cannot_be_written(moments: str, isa: int) -> None:
    kind = {**USUAL, **DECAYS["none"]}
    for n in (5000, STREAMED):
        state, grad = fresh(n, moments), gradient(n, torch.bfloat16)
        grad[::999] = torch.nan  # what the fast loops leave to the plain ones as well
        into = stale(state)
        raw_update(on(state, locked), locked(grad), None, into=into, threads=2, isa=isa, **kind)
        assert_same(into, reference(state, grad, None, **kind)[0])


@every_format
def test_the_public_call(moments: str) -> None:
    """As a speculative update uses it: shadows become the state, or are dropped and the step is taken again."""
    state, in_place = fresh(1000, moments), fresh(1000, moments)
    shadow = stale(state)
    for step in range(1, 6):
        kind: dict[str, Any] = {
            "step": step,
            "lr": 1e-2,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.1,
        }
        grad = gradient(1000, torch.bfloat16, step)
        copies = torch.empty(1000), torch.empty(1000)
        expected, copy = reference(state, grad, torch.float32, **kind, grad_scale=0.5)
        if step % 2:
            adam_update_(*state, grad, into=shadow, **kind, grad_scale=7.0)  # dropped
        adam_update_(*state, grad, into=shadow, out=copies[0], **kind, grad_scale=0.5)
        assert adam_update_(*in_place, grad, out=copies[1], **kind, grad_scale=0.5) is None
        state, shadow = shadow, state
        for got in (state, in_place):
            assert_same(got, expected)
        assert torch.equal(copies[0], copies[1])
        assert torch.equal(copies[0], copy)


def test_the_callers_mode_for_denormal_numbers_changes_no_bit() -> None:
    """It is a mode of each thread: those of a team would not agree."""
    n = 1 << 16
    p, m, v, g = np.full((4, n), 1e-36, np.float32)
    m[::3], v[::3], g[::3] = 1.1 * 2.0**-100, 1.1 * 2.0**-120, 0.0  # about to decay below
    state, kind = of_floats(p, m, v, "fp32"), {**USUAL, **DECAYS["decoupled"]}
    expected, copy = reference(state, torch.from_numpy(g), torch.float16, **kind)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush mode")
    try:
        got = []
        for threads in (1, 2):
            mine, out = copied(state), torch.zeros(n).half()
            raw_update(mine, torch.from_numpy(g), out, threads=threads, **kind)
            got.append((*mine, out))
    finally:
        torch.set_flush_denormal(False)
    for result in got:
        assert_same(result, (*expected, copy))
