"""Betas that are a function of the step: the Adam of the reference, in every recipe, on from a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import MODELS, bits

import zfunc
from zfunc.engine.program import Program
from zfunc.engine.state import State

STEPS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.55},
    "in 3, 8 bits": {"micro_batches": 3, "moments": "8bit"},
}


def falling(step: int) -> tuple[float, float]:
    return 0.95 - 0.05 * step, 0.99 - 0.01 * step


def compiled(betas: Any, *, moments: Any = "fp32", **more: Any) -> tuple[Program, Callable[[int], Any]]:
    segments, data = MODELS["odd sizes"]()
    adam = zfunc.AdamW(lr=1e-2, betas=betas, moments=moments)
    return zfunc.compile(
        segments, optimizer=adam, device="cpu", precision="fp32", bucket_size=3000, **more
    ), data


def trained(
    program: Program, data: Callable[[int], Any], first: int = 0, state: State | None = None
) -> State:
    state = zfunc.init(program, seed=1) if state is None else state
    for i in range(first, STEPS):
        state, _ = zfunc.train_step(program, state, data(i))
    return state


@pytest.mark.parametrize("settings", SETTINGS)
def test_each_update_is_adams_with_the_betas_of_its_step(settings: str, tmp_path: Path) -> None:
    """Beside one program a step, each with constant betas, that goes on from what the one before has saved."""
    program, data = compiled(falling, **SETTINGS[settings])
    state = trained(program, data)
    for i in range(STEPS):
        constant, _ = compiled(falling(i + 1), **SETTINGS[settings])
        expected = zfunc.load(tmp_path, constant) if i else zfunc.init(constant, seed=1)
        expected, _ = zfunc.train_step(constant, expected, data(i))
        zfunc.save(tmp_path, constant, expected)
    assert all(map(torch.equal, bits(state), bits(expected)))
    fixed = trained(*compiled(falling(1), **SETTINGS[settings]))
    assert not all(map(torch.equal, bits(state), bits(fixed)))


def test_so_does_torch_where_a_group_gets_other_betas_before_every_step() -> None:
    torch.manual_seed(0)
    ours, adam = torch.randn(1000), zfunc.AdamW(lr=1e-2, betas=falling)
    theirs, moments = ours.clone().requires_grad_(), torch.zeros(2, 1000)
    optimizer = torch.optim.AdamW([theirs], lr=1e-2)
    for step in range(1, STEPS + 1):
        theirs.grad = torch.randn(1000)
        optimizer.param_groups[0]["betas"] = falling(step)
        optimizer.step()
        zfunc.adam_update_(
            ours, *moments, theirs.grad, step=step, lr=1e-2, betas=adam.betas_at(step), weight_decay=0.01
        )
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_speculation_and_partial_offload_keep_the_bits() -> None:
    expected = zfunc_params(*compiled(falling, clip_norm=0.55))
    for more in ({"speculate": 3}, {"offload_ratio": 0.5}):
        got = zfunc_params(*compiled(falling, clip_norm=0.55, **more))
        assert all(torch.equal(got[name], x) for name, x in expected.items())


def zfunc_params(program: Program, data: Callable[[int], Any]) -> dict[str, torch.Tensor]:
    return zfunc.params(program, zfunc.flush(program, trained(program, data)))


def test_a_delayed_gradient_is_applied_with_the_betas_of_its_own_step(tmp_path: Path) -> None:
    program, data = compiled(falling, delay_from=2)
    state = zfunc.init(program, seed=1)
    for i in range(3):
        state, _ = zfunc.train_step(program, state, data(i))
    assert state.pending is not None
    assert state.pending.factors["betas"] == falling(3)
    zfunc.save(tmp_path, program, state)
    state = trained(program, data, 3, state)
    other, _ = compiled(lambda step: falling(step) if step > 3 else (0.1, 0.1), delay_from=2)
    resumed = trained(other, data, 3, zfunc.load(tmp_path, other))
    assert all(map(torch.equal, bits(resumed), bits(state)))


@pytest.mark.parametrize("betas", [(0.9, 1.0), (0.9,), None, ("a", 0.9)])
def test_betas_out_of_range_are_refused_with_the_step_and_the_state_unharmed(betas: Any) -> None:
    program, data = compiled(lambda step: betas if step == 2 else (0.9, 0.99))
    state, _ = zfunc.train_step(program, zfunc.init(program, seed=1), data(0))
    before = bits(state)
    with pytest.raises(ValueError, match="betas at step 2: got"):
        zfunc.train_step(program, state, data(1))
    assert all(map(torch.equal, bits(state), before))
