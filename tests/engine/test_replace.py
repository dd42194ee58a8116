"""`zfunc.replace`: weights that come from elsewhere in a run, with or without the moments of trained ones."""

from typing import Any

import pytest
import torch
from small_models import Loss, bits, regression
from threaded_ranks import on_every, programs_of
from torch import nn

import zfunc
from zfunc.errors import DonatedStateError

BATCH = regression()
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "moments beside halves": {"precision": "bf16", "split_master": True},
    "16 bits": {"precision": "bf16", "moments": "16bit", "params_on": "host"},
    "8 bits": {"precision": "fp16", "moments": "8bit", "update_on": "device"},
    "Adafactor": {"optimizer": zfunc.Adafactor(0.1), "offload_ratio": 0.5},
    "deferred, with an average": {"defer": True, "clip_norm": 1.0, "ema": 0.5},
}


def modules() -> dict[str, nn.Module]:
    """A trained part, a frozen one, running statistics."""
    torch.manual_seed(0)
    frozen = nn.Linear(100, 16).requires_grad_(False)
    return {"body": nn.Sequential(nn.Linear(8, 100), nn.BatchNorm1d(100)), "frozen": frozen, "loss": Loss(16)}


def compiled(**way: Any) -> Any:
    split = way.pop("split_master", False)
    settings = {"optimizer": zfunc.AdamW(0.1, split_master=split), "precision": "fp32", **way}
    return zfunc.compile(
        [zfunc.segment(*x) for x in modules().items()], device="cpu", bucket_size=300, **settings
    )


@pytest.mark.parametrize("name", WAYS)
def test_it_has_the_bits_of_a_state_that_began_so(name: str) -> None:
    program = compiled(**WAYS[name])
    state = zfunc.init(program)
    values = {x: t * 1.1 + 1 / 3 for x, t in zfunc.params(program, state).items()}
    values |= {x: t + 2 for x, t in zfunc.buffers(program, state).items()}
    for i in range(3):
        state, _ = zfunc.train_step(program, state, BATCH(i))
    # 1. What it has already changes nothing, and the state that was given is gone.
    before, given = bits(zfunc.flush(program, state)), state
    state = zfunc.replace(program, state, zfunc.params(program, state))
    assert all(torch.equal(a, b) for a, b in zip(bits(state), before, strict=True))
    with pytest.raises(DonatedStateError):
        zfunc.train_step(program, given, BATCH(0))
    # 2. Without moments it is a new State but for its counters; with them, moments stay.
    new = bits(zfunc.init(program, params=values))
    state = zfunc.replace(program, state, values, keep_moments=False)
    assert all(torch.equal(a, b) for a, b in zip(bits(state), new, strict=True))
    assert (state.step, state.batches) == (given.step, given.batches)


def test_a_trained_weight_and_a_teacher_move_as_in_torch() -> None:
    program, plain = compiled(optimizer=zfunc.AdamW(0.1, eps=1e-2)), nn.ModuleDict(modules())
    state = zfunc.init(program)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.1, eps=1e-2, weight_decay=0.01)
    for i in range(6):
        state, _ = zfunc.train_step(program, state, BATCH(i))
        optimizer.zero_grad()
        x, targets = BATCH(i)
        plain["loss"](plain["frozen"](plain["body"](x)), targets).backward()
        optimizer.step()
        given = {
            x: torch.lerp(t, torch.ones_like(t), 0.1) for x, t in plain.state_dict().items() if "loss" in x
        }
        given["frozen.weight"] = plain["body"][0].weight.detach()[:16].repeat(1, 13)[:, :100]
        plain.load_state_dict(given, strict=False)
        state = zfunc.replace(program, state, given)
    for x, value in zfunc.params(program, state).items():
        torch.testing.assert_close(value, plain.state_dict()[x], rtol=1e-4, atol=1e-5)


def test_ranks_replace_together() -> None:
    """Slices of parameters, and parameters that each has whole."""
    programs = programs_of(2, lambda: compiled(stage=3))
    states = on_every(programs, zfunc.init)
    alone = compiled()
    values = {x: t * 1.1 + 1 / 3 for x, t in zfunc.params(alone, zfunc.init(alone)).items()}
    states = on_every(programs, lambda program, state: zfunc.replace(program, state, values), states)
    got = on_every(programs, zfunc.params, states)
    assert all(torch.equal(own[x], t) for own in got for x, t in values.items())


def test_what_it_cannot_do_is_refused(tmp_path: Any) -> None:
    program = compiled()
    state = zfunc.init(program)
    with pytest.raises(ValueError, match="got 'body.1', which the program does not have"):
        zfunc.replace(program, state, {"body.1": torch.ones(1)})
    with pytest.raises(ValueError, match="expected \\(16, 100\\)"):
        zfunc.replace(program, state, {"frozen.weight": torch.ones(16)})
    zfunc.train_step(program, state, BATCH(0))
