"""Adafactor and Muon: the bits of a NumPy reference wherever an update is made, and torch's own numbers."""

import itertools
import math
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native.adafactor import reference_adafactor_update
from numpy_reference import array, reference_update, split, tensor
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode
from update_law import NAMES, TYPES, State, assert_same, check_update, gradient, packed, random_bytes, tensors

from zfunc import Adafactor, Muon
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import STATE_FORMATS, Moments, updates_matrices, weight_buffers
from zfunc.errors import CheckpointError
from zfunc.optim import adafactor
from zfunc.optim.adafactor import Matrices, exact_sum
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.optim.updates import device_update_, host_update_

Shape = tuple[int, ...]
SHAPES: list[Shape] = [
    *[(), (0,), (1,), (7,), (64,), (65,), (1000,), (0, 3), (1, 1), (1, 70), (70, 1), (3, 5), (40, 33), (66, 160)],
    *[(2, 1, 5), (2, 5, 1), (6, 4, 3, 3), (300, 64), (5, 2000, 1), (8, 3, 1, 1)],
]  # fmt: skip
MATRICES = [(16, 16), (24, 8), (8, 40), (1, 7), (64, 3)]
MUON = Muon(0.02, weight_decay=0.1)
SETTINGS = [
    {},
    {"nesterov": False, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3},
]
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_format = pytest.mark.parametrize("moments", ["fp32", "16bit"])  # those of 8 bits are 16bit's


def decided(optimizer: Any, step: int = 3, scale: float = 0.3) -> StepDecision:
    return StepDecision(False, scale, step, optimizer.factors(step))


# ---- Adafactor ----------------------------------------------------------------------------------------------


def fresh(optimizer: Any, shape: Shape, seed: int = 0) -> State:
    """Weights of unit size, and variances that differ by powers of ten."""
    rng, n = np.random.default_rng(seed), prod(shape)
    state_format = optimizer.state_format(optimizer.group("", shape))
    kinds = STATE_FORMATS[state_format]
    p = rng.standard_normal(n).astype(np.float32)
    variance = np.exp2(rng.uniform(-40, 0, kinds[-1].numel(n))).astype(np.float32)
    variance[Matrices.of(shape).num_kept :] = 0
    values = *([p] if len(kinds) == 2 else split(p)), variance
    return tensors({x.name: y for x, y in zip(kinds, values, strict=True)}, state_format)


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
    group, decision = optimizer.group("", shape), decided(optimizer, step, scale)
    *weights, variance = (array(x) for x in state.values())
    kept = (matrices := Matrices.of(shape)).num_kept
    of = weights, variance[:kept], array(grad), matrices, optimizer.checked_factors(decision, group)
    *new, after, copy = reference_adafactor_update(*of, out=out and NAMES[out])
    values = zip(state, (*new, np.concatenate([after, variance[kept:]])), strict=True)
    expected = {name: tensor(x) for name, x in values}
    check_update(optimizer, state, grad, expected, copy, decision, out=out, group=group, shape=shape, **more)


@every_device
@every_format
def test_shapes_types_threads_and_places(
    moments: Moments, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers may begin anywhere, and copies may bypass the caches."""
    optimizer = Adafactor(0.1, weight_decay=0.1, moments=moments)
    for i, shape in enumerate(SHAPES):
        n = prod(shape)
        monkeypatch.setattr(adafactor, "PIECE", 512 if n <= 10_000 else 4096)
        for k, (grad, out) in enumerate(itertools.product(TYPES, [None, *TYPES])):
            # Each two of size, gradient and copy meet; of large ones fewer.
            if (i + k // 4 + k) % 2 == 0 and (n <= 1000 or out in (None, grad)):
                threads, state = (1, 2, 3) if n > 10_000 else (1,), fresh(optimizer, shape)
                how: dict[str, Any] = {"step": 1 + i % 3, "out": out, "threads": threads, "device": device}
                check(optimizer, shape, state, gradient(n, grad), **how)
    for shape, offset in (((5, 11), 1), ((3, 43), 3), ((547, 513), 16), ((1100, 2, 5, 24), 32)):
        state, grad = fresh(optimizer, shape), gradient(prod(shape), torch.float16)
        monkeypatch.setattr(adafactor, "PIECE", 512 if prod(shape) <= 10_000 else 1 << 15)
        check(optimizer, shape, state, grad, out=torch.bfloat16, threads=(3,), offset=offset)


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
    shape, optimizer = tuple(dims), Adafactor(0.1, weight_decay=0.1, moments=moments)
    n, state = prod(shape), fresh(optimizer, tuple(dims))
    *weights, variance = state
    state |= {name: random_bytes(state[name], seed).nan_to_num(0.0, 1.0, -1.0) for name in weights}
    kept = state[variance][: Matrices.of(shape).num_kept]
    kept.copy_(random_bytes(kept, seed).abs().nan_to_num(0.0, 1.0))
    sizes = torch.exp2(-spread * torch.rand(n, generator=torch.Generator().manual_seed(seed)))
    grad = random_bytes(torch.empty(n, dtype=dtype), seed).nan_to_num(0.0, 0.0, 0.0)
    check(optimizer, shape, state, (grad.clamp_(-1e4, 1e4) * sizes).to(dtype), scale=scale, out=torch.float32)


def test_a_gradient_that_is_not_finite_leaves_weights_that_are_not() -> None:
    optimizer, shape = Adafactor(0.1), (70, 70)
    group = optimizer.group("", shape)
    for wrong in (math.inf, math.nan):
        grad = gradient(4900, torch.float32)
        grad[77] = wrong
        states = [fresh(optimizer, shape) for _ in range(2)]
        for state, update in zip(states, (optimizer.host_update, optimizer.device_update), strict=True):
            update(state, grad, decided(optimizer), group=group, shape=shape)
            assert not state["master"].isfinite().all()
        of_host, of_device = ([*state.values()][-1] for state in states)
        torch.testing.assert_close(of_host, of_device, rtol=0, atol=0, equal_nan=True)


@given(st.integers(0, 999), st.integers(1, 3000), st.integers(0, 80))
def test_the_order_of_a_sum_changes_no_bit_and_it_is_near(seed: int, count: int, spread: int) -> None:
    terms = torch.exp2(-spread * torch.rand(2, count, generator=torch.Generator().manual_seed(seed)).double())
    total = exact_sum(terms)
    assert torch.equal(exact_sum(terms[:, torch.randperm(count)]), total)
    for got, row in zip(total, terms, strict=True):
        assert abs(got.item() - math.fsum(row)) <= count * row.max() * 2.0 ** (count.bit_length() - 51)


@pytest.mark.parametrize("given", [{}, {"weight_decay": 0.1, "d": 1.5, "eps": (1e-3, 0.1)}], ids=str)
def test_a_hundred_steps_of_torch(given: dict[str, Any]) -> None:
    for shape in [(), (1,), (33,), (1, 20), (20, 1), (16, 24), (3, 5, 7), (8, 4, 1, 1)]:
        optimizer = Adafactor(0.05, **given)
        state = fresh(optimizer, shape)
        state = {name: x if name == "master" else torch.zeros_like(x) for name, x in state.items()}
        theirs = state["master"].double().view(shape).requires_grad_()
        follow = torch.optim.Adafactor([theirs], 0.05, **{"eps": (2.0**-23, 1e-3), **given})
        group, scale = optimizer.group("", shape), 10.0 ** -(len(shape) % 3)
        for step in range(1, 101):
            noise = gradient(theirs.numel(), torch.float32, step) * 0.1 * scale
            g = noise + 0.05 * theirs.detach().float().flatten()
            optimizer.host_update(state, g, decided(optimizer, step, 1.0), group=group, shape=shape)
            theirs.grad = g.double().view(shape)
            follow.step()
        torch.testing.assert_close(state["master"].double(), theirs.detach().flatten(), rtol=1e-5, atol=1e-5)


def test_the_means_have_room_where_they_are_kept() -> None:
    """And what a parameter of the size of a model's takes."""
    optimizer = Adafactor(moments="16bit")
    for shape in [*SHAPES, (768, 3072), (50257, 768), (128, 128), (64, 4096), (512, 512, 3, 3)]:
        buffer = STATE_FORMATS[optimizer.state_format(optimizer.group("", shape))][-1]
        assert Matrices.of(shape).num_kept <= buffer.numel(prod(shape))
    assert optimizer.state_format(optimizer.group("", (768, 3072))) == "adafactor-16bit"
    assert sum(x.nbytes(1 << 20) for x in STATE_FORMATS["adafactor-16bit"]) / (1 << 20) == 4.0625


def test_state_of_another_format_is_converted_and_that_of_another_optimizer_is_not() -> None:
    one, other = Adafactor(), Adafactor(moments="8bit")
    for shape in ((300, 64), (64,)):
        state, group = fresh(one, shape), one.group("", shape)
        compact = other.convert_state(state, one.state_format(group), 3, group=group)
        assert [*compact] == [x.name for x in STATE_FORMATS[other.state_format(group)]]
        back = one.convert_state(compact, other.state_format(group), 3, group=group)
        assert_same(back.values(), state.values())
    with pytest.raises(
        CheckpointError, match="got optimizer state in the format 'fp32', expected 'adafactor-"
    ):
        one.convert_state({}, "fp32", 3)


# ---- Muon ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("state_format", [*filter(updates_matrices, STATE_FORMATS)])
def test_the_momentum_has_the_bits_of_its_reference_and_leaves_the_weights(
    state_format: str, nesterov: bool
) -> None:
    muon = Muon(nesterov=nesterov, moments=state_format.removeprefix("muon-"))  # pyright: ignore
    rng = np.random.default_rng(0)
    for n, grad_type in itertools.product([0, 1, 63, 65, 129, 40_001], TYPES):
        p, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
        state, grad = packed(state_format, p, m), gradient(n, grad_type)
        how = muon.direction_step(decided(muon))
        arrays = {name: array(x) for name, x in state.items()}
        new, out = reference_update(how, arrays, array(grad), out="bf16")
        expected = arrays | new
        assert not new.keys() & {*weight_buffers(state_format)}
        for isa, threads in itertools.product(range(len(cpu_adam.instruction_sets())), (1, 2)):
            mine = {name: x.clone() for name, x in state.items()}
            direction = torch.zeros(n, dtype=torch.bfloat16)
            host_update_(how, mine, grad, out=direction, threads=threads, isa=isa)
            assert_same(mine.values(), [tensor(expected[name]) for name in mine])
            assert_same([direction], [tensor(out)])
        there = torch.zeros(n, dtype=torch.bfloat16)
        device_update_(how, state, grad, out=there)
        assert_same([*state.values(), there], [*mine.values(), direction])


@pytest.mark.parametrize("shape", MATRICES)
def test_a_matrix_is_made_orthogonal_as_torch_does_with_the_work_of_its_products(shape: Shape) -> None:
    for x in (torch.zeros(shape), *(gradient(prod(shape), torch.float32, k).view(shape) for k in (1, 2))):
        for steps in (1, 5):
            theirs = _zeropower_via_newtonschulz(x, MUON.ns_coefficients, steps, 1e-7)
            mine = Muon(ns_steps=steps).orthogonalize(x.bfloat16(), group=0)
            assert torch.equal(mine, theirs)
    singular = torch.linalg.svdvals(mine.float())
    assert singular[0] < 1.3
    assert singular[-1] > 0.3
    with FlopCounterMode(display=False) as counted:
        MUON.orthogonalize(torch.ones(shape, dtype=torch.bfloat16), group=0)
    assert MUON.update_work(shape, group=0).flops == counted.get_total_flops()


@pytest.mark.parametrize("shape", MATRICES[1:3])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_hundred_steps_of_torchs_muon(shape: tuple[int, int], settings: dict[str, Any]) -> None:
    """Means that differ in the last bit of fp32 may round to neighbours in bf16, and then Newton-Schulz does not
    return the same: so the weights stay within a thousandth of the way that they went."""
    muon, n = Muon(0.02, weight_decay=0.1, **settings), shape[0] * shape[1]
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theirs = torch.optim.Muon([weights], 0.02, weight_decay=0.1, **settings)
    state = packed("muon-fp32", weights.detach().numpy().reshape(-1), np.zeros(n, np.float32))
    group, way = muon.group("w", shape), 0.0
    of_torch = _adjust_lr(0.02, muon.adjust_lr_fn, torch.Size(shape))
    assert 0.02 * muon.lr_ratio(shape) == pytest.approx(of_torch)
    for step in range(1, 101):
        grad = gradient(n, torch.float32, step) * 0.1 + 0.05 * weights.detach().view(-1)
        before = weights.detach().clone()
        weights.grad = grad.view(shape)
        theirs.step()
        decision, direction = decided(muon, step, 1.0), torch.empty(n, dtype=torch.bfloat16)
        muon.direction(state, grad, decision, group=group, out=direction)
        along = muon.orthogonalize(direction.view(shape), group=group).reshape(-1).contiguous()
        muon.host_update(state, along, decision, group=group, shape=shape)
        way += (weights.detach() - before).norm().item()
    torch.testing.assert_close(
        state["momentum_buffer"].view(shape), theirs.state[weights]["momentum_buffer"], rtol=1e-4, atol=1e-5
    )
    assert (state["master"].view(shape) - weights.detach()).norm() < 1e-3 * way
