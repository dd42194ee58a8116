"""Betas that are a function of the step: the Adam of the reference, in every recipe, on from a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from small_models import bits
from trained import steps

import zfunc
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State

STEPS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.55},
    "in 3, 8 bits": {"micro_batches": 3, "moments": "8bit"},
}


def falling(step: int) -> tuple[float, float]:
    return 0.95 - 0.05 * step, 0.99 - 0.01 * step


def compiled(betas: Any, **settings: Any) -> tuple[Program, Callable[[int], Any]]:
    return trained.compiled("odd sizes", betas=betas, precision="fp32", **settings)


def train(program: Program, data: Callable[[int], Any], first: int = 0, state: State | None = None) -> State:
    return steps(program, state or zfunc.init(program, seed=1), data, first, STEPS)[0]


@pytest.mark.parametrize("settings", SETTINGS)
def test_each_update_is_adams_with_the_betas_of_its_step(settings: str, tmp_path: Path) -> None:
    """Beside one program a step, each with constant betas, that goes on from what the one before has saved."""
    program, data = compiled(falling, **SETTINGS[settings])
    state = train(program, data)
    for i in range(STEPS):
        constant, _ = compiled(falling(i + 1), **SETTINGS[settings])
        expected = zfunc.load(tmp_path, constant) if i else zfunc.init(constant, seed=1)
        expected, _ = zfunc.train_step(constant, expected, data(i))
        zfunc.save(tmp_path, constant, expected)
    assert all(map(torch.equal, bits(state), bits(expected)))
    fixed = train(*compiled(falling(1), **SETTINGS[settings]))
    assert not all(map(torch.equal, bits(state), bits(fixed)))


def test_torch_with_other_betas_in_every_step_does_the_same() -> None:
    torch.manual_seed(0)
    ours, adam = torch.randn(1000), zfunc.AdamW(lr=1e-2, betas=falling)
    theirs, moments = ours.clone().requires_grad_(), torch.zeros(2, 1000)
    optimizer = torch.optim.AdamW([theirs], lr=1e-2)
    for step in range(1, STEPS + 1):
        theirs.grad = torch.randn(1000)
        optimizer.param_groups[0]["betas"] = falling(step)
        optimizer.step()
        zfunc.adam_update_(
            ours,
            *moments,
            theirs.grad,
            step=step,
            lr=1e-2,
            betas=adam.factors(step)["betas"],
            weight_decay=0.01,
        )
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_deferral_and_partial_offload_keep_the_bits() -> None:
    def params(**settings: Any) -> dict[str, torch.Tensor]:
        program, data = compiled(falling, clip_norm=0.55, **settings)
        return zfunc.params(program, train(program, data))

    expected = params()
    for settings in ({"defer": True}, {"state_on": "device:0.5,host"}):
        got = params(**settings)
        assert all(torch.equal(got[name], x) for name, x in expected.items())


@pytest.mark.parametrize("betas", [(0.9, 1.0), (0.9,), None, ("a", 0.9)])
def test_betas_out_of_range_are_refused_with_the_step_and_the_state_unharmed(betas: Any) -> None:
    program, data = compiled(lambda step: betas if step == 2 else (0.9, 0.99))
    state, _ = zfunc.train_step(program, zfunc.init(program, seed=1), data(0))
    before = bits(state)
    with pytest.raises(ValueError, match="betas at step 2: got"):
        zfunc.train_step(program, state, data(1))
    assert all(map(torch.equal, bits(state), before))
