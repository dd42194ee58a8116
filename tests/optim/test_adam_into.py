"""Adam into other buffers: the bits of the step in place, and the state it began with left as it was."""

import ctypes
import mmap
from typing import Any

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
    on,
    placed,
    raw_update,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zfunc.optim.compact import QuantizedMoment, SplitMaster
from zfunc.optim.host_adam import adam_update_
from zfunc.optim.kernel_loader import cpu_adam as kernel

ISAS = range(len(kernel.instruction_sets()))
SIZES = [0, 1, 15, 55, 63, 64, 65, 127, 128, 1023, 1024, 1025]
STREAMED = 300_001  # elements from which on new state and copy bypass the caches, and a few more


def stale(state: Any) -> Any:
    """Buffers of the same kind, on lines of the cache, that hold bits no result has."""
    return on(
        state, lambda x: torch.full((x.numel() * x.element_size(),), 0xA5, dtype=torch.uint8).view(x.dtype)
    )


def around(x: Tensor) -> Tensor:
    """What lies before and after a buffer in its storage, as bytes."""
    whole = torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage())
    start = x.storage_offset() * x.element_size()
    return torch.cat([whole[:start], whole[start + x.nbytes :]])


def check(moments, state, grad, *, out=None, into=None, **how):
    """One step both ways, with the same settings but for the instruction set, threads and parts."""
    told = {x: how.pop(x) for x in ("step", "weight_decay", "decoupled", "grad_scale") if x in how}
    before, in_place = copied(state), copied(state)
    into = stale(state) if into is None else into
    outside = [around(x) for x in buffers(into)]
    copies = [None if out is None else torch.zeros(grad.numel(), dtype=out) for _ in range(2)]
    raw_update(moments, in_place, grad, copies[0], **told)
    raw_update(moments, state, grad, copies[1], into=into, **told, **how)
    assert_same(into, in_place)
    assert all(torch.equal(exact(x), exact(y)) for x, y in zip(buffers(state), buffers(before), strict=True))
    assert all(torch.equal(around(x), y) for x, y in zip(buffers(into), outside, strict=True))
    if out is not None:
        assert_same((copies[1],), (copies[0],))


# ---- the bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("grad", TYPES, ids=str)
@pytest.mark.parametrize("moments", MOMENTS)
def test_the_bits_of_the_step_in_place(moments, grad, decay, isa):
    weight_decay, decoupled = DECAYS[decay]
    for n, out in zip(SIZES, [None, *TYPES] * len(SIZES), strict=False):
        state = fresh(n, moments)
        how = {"weight_decay": weight_decay, "decoupled": decoupled, "isa": isa, "step": 1 + n % 3}
        check(moments, state, gradient(n, grad), out=out, **how)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("moments", MOMENTS)
def test_threads_and_new_state_that_bypasses_the_caches(moments, threads, isa):
    state, grad = fresh(STREAMED, moments), gradient(STREAMED, torch.bfloat16)
    into = stale(state)
    assert all(x.data_ptr() % 64 == 0 for x in buffers(into))  # else nothing would bypass them
    check(moments, state, grad, out=torch.float16, into=into, threads=threads, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("offset", "other"), [(1, 0), (0, 1), (3, 7), (16, 32)])
@pytest.mark.parametrize("moments", MOMENTS)
def test_offsets_of_either(moments, offset, other, isa):
    for n in (127, 40_001, STREAMED):
        state = copied(fresh(n, moments), offset)
        grad, into = placed(gradient(n, torch.float16), offset), copied(stale(state), other)
        check(moments, state, grad, into=into, weight_decay=0.1, threads=3, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_parts(moments, isa):
    chunks = (64, 128, 192, 5 * 64, 33_344)
    check(moments, fresh(40_001, moments), gradient(40_001, torch.float32), chunks=chunks, threads=2, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3e38, 1e-45])
@pytest.mark.parametrize("moments", MOMENTS)
def test_special_gradients(moments, bad, isa):
    for n, first in ((200, 77), (STREAMED, 1)):
        grad = gradient(n, torch.float32)
        grad[first::1000] = bad
        check(moments, fresh(n, moments), grad, out=torch.float32, isa=isa, grad_scale=1.0)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), moments=st.sampled_from(sorted(MOMENTS)), n=st.integers(0, 300), seed=st.integers(0, 99)
)
def test_any_bytes_in_a_state(data, moments, n, seed):
    isa, decay = data.draw(st.sampled_from(list(ISAS))), data.draw(st.sampled_from(sorted(DECAYS)))
    weight_decay, decoupled = DECAYS[decay]
    grad = gradient(n, data.draw(st.sampled_from(list(TYPES))), seed)
    how = {"weight_decay": weight_decay, "decoupled": decoupled, "isa": isa}
    check(moments, any_bytes(n, moments, seed), grad, out=torch.float32, **how)


# ---- only read -----------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("moments", MOMENTS)
def test_the_state_may_lie_in_memory_that_cannot_be_written(moments, isa):
    for n in (5000, STREAMED):
        grad = gradient(n, torch.bfloat16)
        grad[::999] = torch.nan  # what the fast loops leave to the plain ones as well
        check(moments, on(fresh(n, moments), locked), locked(grad), out=torch.bfloat16, threads=2, isa=isa)


# ---- the public call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", MOMENTS)
def test_step_after_step_from_one_to_the_other(moments):
    """As a speculative update does it: shadows become the state, or are dropped and the step is taken again."""
    in_place, state = fresh(1000, moments), fresh(1000, moments)
    shadow = stale(state)
    for step in range(1, 6):
        kind = {"step": step, "lr": 1e-2, "weight_decay": 0.1}
        grad = gradient(1000, torch.bfloat16, step)
        copies = torch.empty(1000), torch.empty(1000)
        if step % 2:
            adam_update_(*state, grad, into=shadow, **kind, grad_scale=7.0)  # dropped
        adam_update_(*state, grad, into=shadow, out=copies[0], **kind, grad_scale=0.5)
        adam_update_(*in_place, grad, out=copies[1], **kind, grad_scale=0.5)
        state, shadow = shadow, state
        assert_same(state, in_place)
        assert torch.equal(*copies)


def good(moments="16bit", n=128):
    state = fresh(n, moments)
    return {
        "master": state[0], "exp_avg": state[1], "exp_avg_sq": state[2], "grad": torch.ones(n),
        "out": torch.zeros(n), "into": stale(state),
    }  # fmt: skip


def tensors(call: dict[str, Any]) -> list[Tensor]:
    state = call["master"], call["exp_avg"], call["exp_avg_sq"]
    into = call["into"] if isinstance(call["into"], tuple) else ()
    known = [x for x in (*state, *into) if isinstance(x, Tensor | SplitMaster | QuantizedMoment)]
    return [*buffers(known), call["grad"], call["out"]]


def with_shadow(position, make):
    def change(call):
        into = list(call["into"])
        into[position] = make(call)
        call["into"] = tuple(into)

    return change


def aliased(name):
    def change(call):
        call[name] = call["into"][1].view(torch.bfloat16)

    return change


REFUSED = [
    (
        "fp32",
        with_shadow(0, lambda c: c["master"]),
        ValueError,
        "master and into master|into master and master",
    ),
    ("fp32", with_shadow(1, lambda c: c["exp_avg_sq"]), ValueError, "overlaps"),
    ("fp32", with_shadow(2, lambda c: c["into"][1]), ValueError, "into exp_avg and into exp_avg_sq|overlaps"),
    ("fp32", with_shadow(2, lambda c: c["grad"]), ValueError, "overlaps"),
    ("fp32", with_shadow(2, lambda c: c["out"]), ValueError, "overlaps"),
    ("16bit", aliased("grad"), ValueError, "into exp_avg"),
    ("16bit", aliased("out"), ValueError, "into exp_avg"),
    ("fp32", with_shadow(1, lambda _: torch.zeros(129)), ValueError, r"into exp_avg: got shape \[129\]"),
    ("fp32", with_shadow(1, lambda _: torch.zeros(128).half()), TypeError, "into exp_avg: got float16"),
    ("fp32", with_shadow(1, lambda _: torch.zeros(256)[::2]), ValueError, "into exp_avg: got stride 2"),
    (
        "fp32",
        with_shadow(0, lambda _: fresh(128, "8bit")[0]),
        TypeError,
        "into master: got SplitMaster; expected Te",
    ),
    (
        "8bit",
        with_shadow(0, lambda _: torch.zeros(128)),
        TypeError,
        "into master: got Tensor; expected SplitMaster",
    ),
    (
        "8bit",
        with_shadow(2, lambda _: torch.zeros(128)),
        TypeError,
        "into exp_avg_sq: got Tensor; expected QuantizedMoment",
    ),
    (
        "16bit",
        with_shadow(2, lambda _: QuantizedMoment.zeros(128)),
        TypeError,
        "into exp_avg_sq: got QuantizedMoment; expected Tensor",
    ),
    (
        "8bit",
        with_shadow(2, lambda _: QuantizedMoment.zeros(129)),
        ValueError,
        r"into exp_avg_sq.codes: got shape \[129\]",
    ),
    (
        "16bit",
        lambda c: c.update(into=(*c["into"], None)),
        TypeError,
        "into: got 4 of them; expected a tuple",
    ),
    (
        "16bit",
        lambda c: c.update(into=c["into"][0]),
        TypeError,
        "into: got SplitMaster; expected a tuple of three",
    ),
    (
        "fp32",
        with_shadow(1, lambda _: locked(torch.zeros(128))),
        ValueError,
        "into exp_avg: got read-only memory",
    ),
    ("fp32", lambda c: c.update(lr=-1.0), ValueError, "lr"),
    ("8bit", lambda c: c.update(grad_scale=torch.nan), ValueError, "grad_scale"),
]


@pytest.mark.parametrize(("moments", "change", "error", "words"), REFUSED)
def test_what_cannot_be_is_refused_untouched(moments, change, error, words):
    call = {**good(moments), "step": 1, "lr": 1.0}
    change(call)
    before = [x.clone() for x in tensors(call)]
    with pytest.raises(error, match=words) as caught:
        adam_update_(**call)
    assert "expected" in str(caught.value)
    for x, y in zip(tensors(call), before, strict=True):
        assert torch.equal(exact(x), exact(y))
