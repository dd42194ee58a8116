"""Adafactor: the bits of its NumPy reference wherever an update is made, and torch's own numbers."""

import itertools
import math
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from adam_states import NAMES, TYPES, array, assert_same, gradient, random_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from update_law import State, check_update, clone

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import STATE_FORMATS, Moments, state_slice
from zfunc.errors import CheckpointError
from zfunc.optim import device_adafactor
from zfunc.optim.adafactor_reference import exact_sum, matrices_of, reference_adafactor_update
from zfunc.optim.base import ParameterPart
from zfunc.optim.compact import as_state
from zfunc.optim.compact_reference import split
from zfunc.optim.host_adafactor import host_adafactor_, host_adafactor_round

Shape = tuple[int, ...]
SHAPES: list[Shape] = [
    *[(), (0,), (1,), (7,), (64,), (65,), (1000,), (0, 3), (1, 1), (1, 70), (70, 1), (3, 5), (40, 33), (66, 1200)],
    *[(2, 1, 5), (2, 5, 1), (6, 4, 3, 3), (300, 64), (5, 2000, 1), (8, 3, 1, 1)],
]  # fmt: skip
every_format = pytest.mark.parametrize("moments", ["fp32", "16bit"])  # those of 8 bits are 16bit's


def fresh(optimizer: Any, shape: Shape, seed: int = 0) -> State:
    """Weights of unit size, and variances that differ by powers of ten."""
    rng, n = np.random.default_rng(seed), prod(shape)
    state_format = optimizer.state_format(optimizer.group("", shape))
    kinds = STATE_FORMATS[state_format]
    p = rng.standard_normal(n).astype(np.float32)
    variance = np.exp2(rng.uniform(-40, 0, kinds[-1].numel(n))).astype(np.float32)
    variance[sum(matrices_of(shape).kept) :] = 0
    arrays = [*([p] if len(kinds) == 2 else split(p)), variance]
    return as_state(arrays, state_format)


def check(
    optimizer: Any,
    shape: Shape,
    state: State,
    grad: Tensor,
    *,
    step: int = 3,
    scale: float = 0.3,
    out: torch.dtype | None = None,
    **more: Any,
) -> None:
    decision = StepDecision(False, scale, step, optimizer.factors(step))
    arguments = optimizer.arguments(decision, optimizer.group("", shape), ParameterPart.whole(shape))
    *weights, variance = (array(x) for x in state.values())
    matrices = matrices_of(shape)
    kept = sum(matrices.kept)
    new = reference_adafactor_update(
        tuple(weights),
        variance[:kept],
        array(grad),
        matrices,
        arguments["factors"],
        out=out and NAMES[out],
    )
    after = np.concatenate([new.variance, variance[kept:]])
    check_update(
        state,
        grad,
        as_state([*new.weights, after], arguments["state_format"]),
        new.out,
        partial(host_adafactor_, **arguments),
        partial(device_adafactor.device_adafactor_, **arguments),
        out=out,
        **more,
    )


@every_format
def test_shapes_types_and_threads(moments: Moments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_adafactor, "ADAFACTOR_PIECE", 512)  # tiles of rows and columns
    optimizer = zfunc.Adafactor(0.1, weight_decay=0.1, moments=moments)
    for i, shape in enumerate(SHAPES):
        n = prod(shape)
        for grad, out in itertools.product(TYPES, [None, *TYPES]):
            if n > 1000 and out not in (None, grad):
                continue
            threads = (1, 2, 3) if n > 10_000 else (1,)
            state = fresh(optimizer, shape)
            check(optimizer, shape, state, gradient(n, grad), step=1 + i % 3, out=out, threads=threads)


@every_format
def test_buffers_may_begin_anywhere_and_copies_may_bypass_the_caches(moments: Moments) -> None:
    optimizer = zfunc.Adafactor(0.1, moments=moments)
    for shape, offset in (((5, 11), 1), ((3, 43), 3), ((547, 513), 16), ((1100, 2, 5, 50), 32)):
        state, grad = fresh(optimizer, shape), gradient(prod(shape), torch.float16)
        check(optimizer, shape, state, grad, out=torch.bfloat16, threads=(3,), offset=offset)


@settings(max_examples=20)
@given(st.sampled_from([x for x in SHAPES if prod(x) > 64]), st.data())
def test_parts_that_join_what_they_measure_are_the_whole(shape: Shape, data: st.DataObject) -> None:
    """On the host, and in torch operations."""
    optimizer, n = (
        zfunc.Adafactor(0.1, weight_decay=0.1, moments=data.draw(st.sampled_from(["fp32", "16bit"]))),
        prod(shape),
    )
    cuts = data.draw(st.sets(st.integers(1, (n - 1) // 64), max_size=3))
    slices = [*itertools.pairwise([0, *(64 * x for x in sorted(cuts)), n])]
    state_format, state = optimizer.state_format(group := optimizer.group("", shape)), fresh(optimizer, shape)
    grad, decision = gradient(n, torch.bfloat16), StepDecision(False, 0.3, 2, optimizer.factors(2))
    whole = clone(state)
    optimizer.host_update(whole, grad, decision, group=group, part=ParameterPart.whole(shape))
    for measure, update in (
        (host_adafactor_round, optimizer.host_update),
        (device_adafactor.device_adafactor_round, optimizer.device_update),
    ):
        mine, joined = clone(state), list[Tensor]()
        rooms = [
            torch.full((2 * -(-(stop - start) // 64),), -1.0, dtype=torch.float64) for start, stop in slices
        ]
        for i, size in enumerate(optimizer.num_measures(shape, group=group)):
            every = [
                measure(
                    state_slice(state_format, mine, *at),
                    grad[slice(*at)],
                    **optimizer.arguments(decision, group, ParameterPart(shape, *at, tuple(joined), room)),
                )
                for at, room in zip(slices, rooms, strict=True)
            ]
            assert all(x.numel() == size for x in every)
            together = torch.stack(every)
            joined.append(together.sum(0) if i % 2 else together.amax(0) if size else together[0])
        for at in slices:
            part = ParameterPart(shape, *at, tuple(joined))
            own = state_slice(state_format, mine, *at)
            update(own, grad[slice(*at)], decision, group=group, part=part)
        assert_same(mine.values(), whole.values())


@pytest.mark.gpu
@every_format
def test_a_gpu_has_the_bits_of_the_reference(moments: Moments) -> None:
    optimizer = zfunc.Adafactor(0.1, weight_decay=0.1, moments=moments)
    for shape, grad in itertools.product(SHAPES, TYPES):
        state = fresh(optimizer, shape)
        check(optimizer, shape, state, gradient(prod(shape), grad), out=torch.float16, device="cuda")


@given(
    st.lists(st.integers(1, 12), max_size=4),
    st.sampled_from(["fp32", "16bit"]),
    st.integers(0, 99),
    st.sampled_from([*TYPES]),
    st.sampled_from([1.0, 0.0, -0.5, 2.0**40]),
    st.integers(0, 60),
)
def test_any_finite_bits(
    dims: list[int], moments: Moments, seed: int, dtype: torch.dtype, scale: float, spread: int
) -> None:
    """Weights and variances of any bits, and gradients from denormals up: no trap, no difference."""
    shape, optimizer = tuple(dims), zfunc.Adafactor(0.1, weight_decay=0.1, moments=moments)
    n, state = prod(shape), fresh(optimizer, tuple(dims))
    *weights, variance = state
    state |= {name: random_bytes(state[name], seed).nan_to_num(0.0, 1.0, -1.0) for name in weights}
    kept = state[variance][: sum(matrices_of(shape).kept)]
    kept.copy_(random_bytes(kept, seed).abs().nan_to_num(0.0, 1.0))
    sizes = torch.exp2(-spread * torch.rand(n, generator=torch.Generator().manual_seed(seed)))
    grad = random_bytes(torch.empty(n, dtype=dtype), seed).nan_to_num(0.0, 0.0, 0.0)
    check(optimizer, shape, state, (grad.clamp_(-1e4, 1e4) * sizes).to(dtype), scale=scale, out=torch.float32)


def test_a_gradient_that_is_not_finite_leaves_weights_that_are_not() -> None:
    optimizer, shape = zfunc.Adafactor(0.1), (70, 70)
    for wrong in (math.inf, math.nan):
        grad = gradient(4900, torch.float32)
        grad[77] = wrong
        states = [fresh(optimizer, shape) for _ in range(2)]
        for state, update in zip(states, (host_adafactor_, device_adafactor.device_adafactor_), strict=True):
            decision = StepDecision(False, 1.0, 1, optimizer.factors(1))
            update(
                state,
                grad,
                **optimizer.arguments(decision, optimizer.group("", shape), ParameterPart.whole(shape)),
            )
            assert not state["master"].isfinite().all()
        of_host, of_device = ([*state.values()][-1] for state in states)
        torch.testing.assert_close(of_host, of_device, rtol=0, atol=0, equal_nan=True)


@given(st.integers(0, 999), st.integers(1, 3000), st.integers(0, 80))
def test_the_order_of_a_sum_changes_no_bit_and_it_is_near(seed: int, count: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    terms = np.exp2(rng.uniform(-spread, spread, (2, count)))
    total = exact_sum(terms, 1)
    assert (exact_sum(rng.permutation(terms, axis=1), 1) == total).all()
    for got, row in zip(total, terms, strict=True):
        assert abs(got - math.fsum(row)) <= count * row.max() * 2.0 ** (count.bit_length() - 51)


@pytest.mark.parametrize("given", [{}, {"weight_decay": 0.1, "d": 1.5, "eps": (1e-3, 0.1)}], ids=str)
def test_a_hundred_steps_of_torch(given: dict[str, Any]) -> None:
    for shape in [(), (1,), (33,), (1, 20), (20, 1), (16, 24), (3, 5, 7), (8, 4, 1, 1)]:
        optimizer = zfunc.Adafactor(0.05, **given)
        state = fresh(optimizer, shape)
        state = {name: x if name == "master" else torch.zeros_like(x) for name, x in state.items()}
        theirs = state["master"].double().view(shape).requires_grad_()
        follow = torch.optim.Adafactor([theirs], 0.05, **{"eps": (2.0**-23, 1e-3), **given})
        group, scale = optimizer.group("", shape), 10.0 ** -(len(shape) % 3)
        for step in range(1, 101):
            g = (
                gradient(theirs.numel(), torch.float32, step) * 0.1 * scale
                + 0.05 * theirs.detach().float().flatten()
            )
            decision = StepDecision(False, 1.0, step, optimizer.factors(step))
            optimizer.host_update(state, g, decision, group=group, part=ParameterPart.whole(shape))
            theirs.grad = g.double().view(shape)
            follow.step()
        torch.testing.assert_close(state["master"].double(), theirs.detach().flatten(), rtol=1e-5, atol=1e-5)


def test_the_means_have_room_where_they_are_kept() -> None:
    """And what a parameter of the size of a model's takes."""
    optimizer = zfunc.Adafactor(moments="16bit")
    for shape in [*SHAPES, (768, 3072), (50257, 768), (128, 128), (64, 4096), (512, 512, 3, 3)]:
        buffer = STATE_FORMATS[optimizer.state_format(optimizer.group("", shape))][-1]
        assert sum(matrices_of(shape).kept) <= buffer.numel(prod(shape))
    assert optimizer.state_format(optimizer.group("", (768, 3072))) == "adafactor-16bit"
    assert sum(x.nbytes(1 << 20) for x in STATE_FORMATS["adafactor-16bit"]) / (1 << 20) == 4.0625


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eps": 1e-3}, "eps: got 0.001; expected two numbers"),
        ({"eps": (None, -1.0)}, r"eps\[1\]: got -1.0; expected a finite float32 at or above 0"),
        ({"beta2_decay": 0.8}, "beta2_decay: got 0.8; expected a number of at most 0"),
        ({"d": 0.5}, "d: got 0.5; expected a finite float32"),
        ({"lr": 1e30, "weight_decay": 1e30}, "Adafactor's settings .as decay.: got 1.0000000000000001e.60"),
        ({"moments": "4bit"}, "moments: got '4bit'; expected one of fp32, 16bit, 8bit"),
    ],
)
def test_a_wrong_setting_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zfunc.Adafactor(**given)


def test_state_of_another_format_is_converted_and_that_of_another_optimizer_is_not() -> None:
    one, other = zfunc.Adafactor(), zfunc.Adafactor(moments="8bit")
    for shape in ((300, 64), (64,)):
        state, group = fresh(one, shape), one.group("", shape)
        compact = other.convert_state(state, one.state_format(group), 3, group=group)
        assert [*compact] == [x.name for x in STATE_FORMATS[other.state_format(group)]]
        assert_same(
            one.convert_state(compact, other.state_format(group), 3, group=group).values(), state.values()
        )
    with pytest.raises(
        CheckpointError, match="got optimizer state in the format 'fp32', expected 'adafactor-fp32'"
    ):
        one.convert_state({}, "fp32", 3)
