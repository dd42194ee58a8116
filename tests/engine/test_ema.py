"""The moving average of the weights: that of NumPy to the bit, saved, exported, on ranks, and after a failure.

That schedules change no bit of it is with the other laws.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trained
from safetensors.torch import load_file
from torch import Tensor

import zfunc
from zfunc.checkpoint.export import export_weights
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State
from zfunc.runtime.fault_injection import Fault, InjectedFault

DECAY, STEPS = 0.9, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "half on the device, moments in 8 bits": {
        "precision": "fp32",
        "state_on": "device:0.5,host",
        "moments": "8bit",
    },
    "deferred, a split master": {"precision": "bf16", "clip_norm": 0.5, "defer": True, "split_master": True},
    "with skips": {"precision": "fp16"},
    "parameters on the host": {"precision": "bf16", "params_on": "host"},
    "whole matrices": {
        "precision": "fp32",
        "optimizer": zfunc.groups(("huge.weight", zfunc.Muon(0.01)), zfunc.AdamW(0.01)),
    },
}


def compiled(settings: str, **more: Any) -> tuple[Program, Any]:
    return trained.compiled("odd sizes", **{"ema": DECAY, "bucket_size": 700, **SETTINGS[settings], **more})


def expected_after(average: Tensor, weights: Tensor) -> Tensor:
    """One step of the average, each product and the sum rounded to fp32."""
    moved = average.numpy() * np.float32(DECAY) + weights.numpy() * np.float32(1 - DECAY)
    return torch.from_numpy(np.asarray(moved))


def averages(program: Program, state: State) -> dict[str, Tensor]:
    return zfunc.params(program, state, ema=True)


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_is_that_of_numpy(settings: str) -> None:
    program, batch = compiled(settings)
    state = zfunc.init(program, loss_scale=zfunc.LossScale(2.0**20))
    expected = zfunc.params(program, state)
    own = [x.name for x in program.layout.spans]
    assert all(torch.equal(x, expected[name]) for name, x in averages(program, state).items())
    for i in range(STEPS):
        before = zfunc.params(program, state)
        state, metrics = zfunc.train_step(program, state, batch(i))
        after = zfunc.params(program, state)
        made = not metrics.skipped
        for name in own if made else ():
            expected[name] = expected_after(expected[name], after[name])
        assert made or all(torch.equal(x, before[name]) for name, x in after.items())
    got = averages(program, state)
    assert all(torch.equal(x, expected[name]) for name, x in got.items())
    if program.settings.precision == "fp32":
        plain = zfunc.init(program, params=got)
        assert zfunc.evaluate(program, state, batch(9), ema=True) == zfunc.evaluate(program, plain, batch(9))


def test_it_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    program, batch = compiled("fp32")
    state, _ = trained.steps(program, zfunc.init(program), batch, 0, STEPS)
    path, kept = zfunc.save(tmp_path, program, state), averages(program, state)
    other, _ = compiled("half on the device, moments in 8 bits", schedule="Overlapped", bucket_size=90)
    for again in (program, other):
        assert all(torch.equal(x, kept[name]) for name, x in averages(again, zfunc.load(path, again)).items())
    without, _ = compiled("fp32", ema=None)
    plain = zfunc.load(path, without)
    export_weights(path, tmp_path / "average.safetensors", ema=True)
    exported = load_file(tmp_path / "average.safetensors")
    assert all(torch.equal(x, kept[name]) for name, x in exported.items())
    with pytest.raises(ValueError, match=r"params: got ema=True for a program that keeps no.*ema=0\.999"):
        zfunc.params(without, plain, ema=True)
    path = zfunc.save(tmp_path / "without", without, plain)
    assert all(
        torch.equal(x, zfunc.params(without, plain)[name])
        for name, x in averages(program, zfunc.load(path, program)).items()
    )
    with pytest.raises(ValueError, match=r"ema: got True for .*, which has no moving average"):
        export_weights(path, tmp_path / "none.safetensors", ema=True)


@pytest.mark.parametrize("op", ["to_device[1]", "forward[0,1]"])
def test_a_failed_step_makes_no_average_twice(op: str) -> None:
    """With deferred updates a step that failed has made some of the last step's updates and averages."""
    name = "deferred, a split master"
    program, batch = compiled(name)
    expected, _ = trained.steps(program, zfunc.init(program), batch, 0, STEPS)
    state, _ = trained.steps(program, zfunc.init(program), batch, 0, STEPS - 1)
    with pytest.raises(InjectedFault):
        zfunc.train_step(program, state, batch(STEPS - 1), faults=[Fault(0, STEPS, op, "raise")])
    state, _ = zfunc.train_step(program, state, batch(STEPS - 1))
    for ema in (False, True):
        got, want = (zfunc.params(program, x, ema=ema) for x in (state, expected))
        assert all(torch.equal(x, want[name]) for name, x in got.items())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, "much"])
def test_a_decay_that_is_none_is_refused_as_is_one_on_the_disk(decay: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="ema: got .*such as 0.999"):
        compiled("fp32", ema=decay)
    with pytest.raises(ValueError, match="state_on: got 'disk' with ema=0.9.*a swap space has no averages"):
        compiled("fp32", state_on="disk", swap=["none"])
