"""Muon: the bits of its element-wise halves, a whole matrix in between, and torch's own numbers."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adam_states import TYPES, array, assert_same, gradient
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode
from update_law import one_buffer_state

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import MATRIX_FORMATS, weight_buffers
from zfunc.optim.base import ParameterPart
from zfunc.optim.compact import as_tensor
from zfunc.optim.host_one_buffer import host_one_buffer_
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.optim.muon import Muon
from zfunc.optim.newton_schulz import orthogonalize_
from zfunc.optim.one_buffer_reference import reference_one_buffer_update
from zfunc.optim.workspaces import newton_schulz_work

MUON = Muon(0.02, weight_decay=0.1)
SHAPES = [(16, 16), (24, 8), (8, 40), (1, 7), (64, 3)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("state_format", MATRIX_FORMATS)
def test_the_momentum_has_the_bits_of_its_reference_and_leaves_the_weights(
    state_format: str, nesterov: bool
) -> None:
    muon = Muon(nesterov=nesterov, moments=state_format.removeprefix("muon-"))  # pyright: ignore
    rng = np.random.default_rng(0)
    for n, grad_type in itertools.product([0, 1, 63, 65, 129, 40_001], TYPES):
        p, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
        state, grad = one_buffer_state(p, m, state_format), gradient(n, grad_type)
        arguments = muon.direction_arguments(StepDecision(False, 0.3, 3, muon.factors(3)))
        arrays = {name: array(x) for name, x in state.items()}
        new, out = reference_one_buffer_update(arrays, array(grad), out="bf16", **arguments)
        expected = arrays | new
        assert not new.keys() & {*weight_buffers(state_format)}
        for isa, threads in itertools.product(range(len(cpu_adam.instruction_sets())), (1, 2)):
            mine = {name: x.clone() for name, x in state.items()}
            direction = torch.zeros(n, dtype=torch.bfloat16)
            host_one_buffer_(mine, grad, out=direction, threads=threads, isa=isa, **arguments)
            assert_same(mine.values(), [as_tensor(expected[name]).view(x.dtype) for name, x in mine.items()])
            assert_same([direction], [as_tensor(out).view(torch.bfloat16)])
        decision, there = StepDecision(False, 0.3, 3, muon.factors(3)), torch.zeros(n, dtype=torch.bfloat16)
        muon.device_direction(state, grad, decision, group=0, out=there)
        assert_same([*state.values(), there], [*mine.values(), direction])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_is_made_orthogonal_as_torch_does(shape: tuple[int, int]) -> None:
    for x in (
        torch.zeros(shape),
        *(gradient(shape[0] * shape[1], torch.float32, k).view(shape) for k in (1, 2)),
    ):
        for steps in (1, 5):
            theirs = _zeropower_via_newtonschulz(x, MUON.ns_coefficients, steps, 1e-7)
            mine = orthogonalize_(x.bfloat16(), steps=steps)
            assert torch.equal(mine, theirs)
    singular = torch.linalg.svdvals(mine.float())
    assert singular[0] < 1.3
    assert singular[-1] > 0.3


def test_the_work_of_a_matrix_is_that_of_its_products() -> None:
    for shape in SHAPES:
        with FlopCounterMode(display=False) as counted:
            orthogonalize_(torch.ones(shape, dtype=torch.bfloat16), steps=5)
        assert newton_schulz_work(shape, 5).flops == counted.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES[1:3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "momentum": 0.5},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3},
    ],
)
def test_a_hundred_steps_of_torch(shape: tuple[int, int], settings: dict[str, Any]) -> None:
    """Means that differ in the last bit of fp32 may round to neighbours in bf16, and then Newton-Schulz does not
    return the same: so the weights stay within a thousandth of the way that they went."""
    muon, n = Muon(0.02, weight_decay=0.1, **settings), shape[0] * shape[1]
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theirs = torch.optim.Muon([weights], 0.02, weight_decay=0.1, **settings)
    state = one_buffer_state(weights.detach().numpy().reshape(-1), np.zeros(n, np.float32), "muon-fp32")
    group, way = muon.group("w", shape), 0.0
    assert 0.02 * muon.lr_ratio(shape) == pytest.approx(
        _adjust_lr(0.02, muon.adjust_lr_fn, torch.Size(shape))
    )
    for step in range(1, 101):
        grad = gradient(n, torch.float32, step) * 0.1 + 0.05 * weights.detach().view(-1)
        before = weights.detach().clone()
        weights.grad = grad.view(shape)
        theirs.step()
        decision = StepDecision(False, 1.0, step, muon.factors(step))
        direction = torch.empty(n, dtype=torch.bfloat16)
        muon.host_direction(state, grad, decision, group=group, out=direction)
        along = muon.orthogonalize(direction.view(shape), group=group).reshape(-1).contiguous()
        muon.host_update(state, along, decision, group=group, part=ParameterPart.whole(shape))
        way += (weights.detach() - before).norm().item()
    torch.testing.assert_close(
        state["momentum_buffer"].view(shape), theirs.state[weights]["momentum_buffer"], rtol=1e-4, atol=1e-5
    )
    assert (state["master"].view(shape) - weights.detach()).norm() < 1e-3 * way


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Muon(momentum=1.0), r"momentum: got 1.0; expected a number in \[0, 1\)"),
        (lambda: Muon(ns_steps=0), "ns_steps: got 0, expected a whole number of at least 1 and at most 99"),
        (lambda: Muon(adjust_lr_fn="rms"), "adjust_lr_fn: got 'rms'; expected original or match_rms_adamw"),
        (lambda: Muon(eps=-1), "eps: got -1; expected a finite float32 at or above 0"),
        (
            lambda: Muon(lr=3e38).host_update(
                {}, torch.ones(1), DECISION, group=0, part=ParameterPart.whole((9, 1))
            ),
            "lr of a matrix",
        ),
        (
            lambda: orthogonalize_(torch.ones(4, dtype=torch.bfloat16), steps=1),
            "expected a whole matrix in bf",
        ),
    ],
)
def test_a_wrong_setting_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


DECISION = StepDecision(False, 1.0, 1, {"lr": 3e38})
