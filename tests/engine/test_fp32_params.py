"""Parameters that are fp32 on the device beside others in 16 bits: exactly their masters, in any checkpoint.

That no way of training with them changes a bit, and that plain PyTorch agrees, are rows of tests/parity.py,
tests/gradient_law.py and of law 11.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from pairs import in_pairs
from small_models import IN_FP32, MODELS
from threaded_ranks import on_every, programs_of

import zfunc
from zfunc.engine.state.state import State

pytestmark = pytest.mark.usefixtures("poisoned")

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"params_on": "host", "moments": "16bit"},
    "updated on the device": {"update_on": "device", "moments": "8bit"},
    "resident": {"state_on": "device", "moments": "16bit"},
    "disk": {"state_on": "disk", "params_on": "disk", "moments": "8bit"},
}


def program_of(model: str, folder: Path, **settings: Any) -> tuple[Any, Any]:
    folder.mkdir(exist_ok=True)
    given = {"precision": "bf16", "fp32_params": IN_FP32[model], "clip_norm": 0.5, **settings}
    return trained.compiled(
        model, bucket_size=100, **given, **({"swap": folder} if "disk" in given.get("state_on", "") else {})
    )


def on_device(program: Any, state: State) -> dict[str, torch.Tensor]:
    """The parameters as forward reads them."""
    return {
        span.name: flat[span.start - bucket.start : span.stop - bucket.start]
        for bucket in program.layout.all_buckets
        for flat in [state.buffers.parameters(bucket.index).flat]
        for span in bucket.spans
    }


@pytest.mark.parametrize(("model", "place"), in_pairs(["odd sizes", "tied GPT"], PLACES, meet=1))
def test_a_parameter_in_fp32_is_its_master_wherever_it_lives(model: str, place: str, tmp_path: Path) -> None:
    """Trained or frozen; the others are rounded."""
    program, batch = program_of(model, tmp_path, **PLACES[place])
    state, _ = trained.steps(program, zfunc.init(program, seed=1), batch, 0, 3, debug=True)
    masters, rounded = zfunc.params(program, state), 0
    in_fp32 = {x.name for bucket in program.layout.all_buckets if bucket.in_fp32 for x in bucket.spans}
    for name, values in on_device(program, state).items():
        assert values.dtype == (torch.float32 if name in in_fp32 else torch.bfloat16)
        assert name not in in_fp32 or torch.equal(values, masters[name].flatten())
        rounded += not torch.equal(values.float(), masters[name].flatten())
    assert in_fp32
    assert rounded


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_goes_on_with_other_parameters_in_fp32(place: str, tmp_path: Path) -> None:
    """From a folder and from a swap space, to one rank and to two; frozen ones keep the values that were saved."""
    model, settings = "odd sizes", PLACES[place]
    program, batch = program_of(model, tmp_path / "first", **settings)
    state, _ = trained.steps(program, zfunc.init(program, seed=1), batch, 0, 2)
    saved = {k: x.clone() for k, x in zfunc.params(program, state).items()}
    sources = [zfunc.save(tmp_path / "saved", program, state)]
    if "disk" in settings.get("state_on", ""):
        zfunc.save(tmp_path / "first", program, state)
        program.close_swap()
        sources.append(tmp_path / "first")
    for n, source in enumerate(sources):
        for m, fp32_params in enumerate(("", "*", IN_FP32[model][0])):
            plain = {"fp32_params": fp32_params, "precision": "fp32" if fp32_params == "*" else "bf16"}
            other, _ = program_of(model, tmp_path / f"other {n}{m}", **settings, **plain)
            again = zfunc.load(source, other)
            assert all(torch.equal(x, saved[name]) for name, x in zfunc.params(other, again).items())
            again, _ = trained.steps(other, again, batch, 2, 3)
            then = zfunc.load(
                zfunc.save(tmp_path / f"then {n}{m}", other, again),
                program_of(model, tmp_path / f"back {n}{m}", **settings)[0],
            )
            assert then.step == 3
        alike = {**settings, "stage": 3, "fp32_params": "scale.gain"}
        pair = programs_of(
            2, lambda alike=alike, n=n: program_of(model, tmp_path / f"two {n}", **alike)[0], batch(0)
        )
        for own in on_every(pair, lambda p, source=source: zfunc.params(p, zfunc.load(source, p))):
            assert all(torch.equal(x, saved[name]) for name, x in own.items())


def test_averages_and_apply_read_parameters_in_fp32() -> None:
    """An evaluation is that of the weights that `params` has: those in fp32 are not rounded."""
    program, batch = trained.compiled("odd sizes", precision="bf16", fp32_params="loss.*", ema=0.9)
    state, _ = trained.steps(program, zfunc.init(program, seed=1), batch, 0, 3)
    averaged = zfunc.evaluate(program, state, batch(9), ema=True)
    other = zfunc.init(program, params=zfunc.params(program, state, ema=True))
    assert zfunc.evaluate(program, other, batch(9)) == averaged


@pytest.mark.parametrize("model", MODELS)
def test_nothing_changes_in_fp32(model: str) -> None:
    plain, named = (trained.compiled(model, precision="fp32", fp32_params=x)[0] for x in ("", IN_FP32[model]))
    assert plain.layout == named.layout
    assert str(plain.plan) == str(named.plan)
