"""Law 11, element by element: what reaches the optimizer is what autograd and clip_grad_norm_ give.

Adam hides the scale of a gradient, and losses hide what is small; here both are seen. The optimizer's first decay
rate is 0, so its first moment is the gradient it was given, to the bit, after the kernel has unscaled and clipped.
"""

from itertools import product
from typing import Any

import plain
import pytest
import trained
from attrs import evolve

import zfunc
from zfunc import updates
from zfunc.device_adam import device_adam_update_
from zfunc.loss_scale import LossScale
from zfunc.program import Cache, Program

RECIPES: dict[str, dict[str, Any]] = {
    "no barrier": {"clip_norm": None},
    "clipped": {},
    "stage 1": {"stage": 1},
    "stage 1, no barrier": {"stage": 1, "clip_norm": None},
    "speculative": {"speculate": 2},
    "half on the device": {"offload_ratio": 0.5},
    "all on the device": {"offload_ratio": 0.0, "clip_norm": None},
    "delayed": {"delay_from": 2},
    "moments in 16 bits": {"moments": "16bit"},
}
PRECISIONS = ("fp32", "bf16", "fp16")
MICRO_BATCHES = (1, 2, 3)
CLIPS = {"odd sizes": 3.0, "pairs": 8.0}  # of each model: some steps have a larger norm, some a smaller one
STEPS = 3
SCALE = 2.0**7

_calls: dict[tuple[str, str], Any] = {}


def program_of(model: str, precision: str, **settings: Any) -> tuple[Program, Any]:
    """Traced once for each precision: what a step's recipe does is not in a trace."""
    moments = settings.pop("moments", "fp32")
    settings = {"clip_norm": CLIPS[model], "bucket_size": 100, **settings}
    made, batch = trained.compiled(model, precision=precision, moments=moments, **settings)
    calls = _calls.setdefault((model, precision), made.calls)
    optimizer = plain.remembering(made.optimizer)
    return evolve(made, calls=calls, optimizer=optimizer, cache=Cache()), batch


def check(model: str, precision: str, micro_batches: int, **settings: Any) -> None:
    # To the order of sums; where the first moment itself is rounded, to that.
    tolerance = 2.0**-7 if "moments" in settings else 3e-6
    program, batch = program_of(model, precision, micro_batches=micro_batches, **settings)
    state = zfunc.init(program, seed=1, loss_scale=LossScale(SCALE) if precision == "fp16" else None)
    parts = [plain.Part.of(s) for s in program.segments]
    norms = plain.follow(program, state, parts, batch, steps=STEPS, tolerance=tolerance)
    if program.clip_norm is not None:
        assert min(norms) < program.clip_norm < max(norms)


@pytest.mark.parametrize(("precision", "micro_batches"), list(product(PRECISIONS, MICRO_BATCHES)))
@pytest.mark.parametrize("recipe", RECIPES)
def test_11_what_reaches_the_optimizer_is_the_gradient(
    recipe: str, precision: str, micro_batches: int
) -> None:
    for model in CLIPS if micro_batches == 3 else ["pairs"]:
        check(model, precision, micro_batches, **RECIPES[recipe])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_11_so_it_is_with_the_update_a_device_makes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the kernel, that a GPU runs, on the CPU."""
    monkeypatch.setattr(updates, "adam_update_", device_adam_update_)
    for recipe in ("all on the device", "half on the device"):
        check("pairs", precision, 2, **RECIPES[recipe])
