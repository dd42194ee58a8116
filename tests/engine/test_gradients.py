"""Law 11, element by element: what reaches the optimizer is what autograd and clip_grad_norm_ give.

Adam hides the scale of a gradient, and losses hide what is small; here both are seen. The optimizer's first decay
rate is 0, so its first moment is the gradient it was given, to the bit, after the kernel has unscaled and clipped.
"""

from functools import partial
from typing import Any

import pytest
from attrs import evolve
from gradient_law import CLIPS, RECIPES, check, program_of
from pairs import in_pairs
from small_models import MODELS, rows_of
from threaded_ranks import on_every, programs_of

import zfunc

pytestmark = pytest.mark.usefixtures("poisoned")

PRECISIONS = ("fp32", "bf16", "fp16")
MICRO_BATCHES = (1, 2, 3)

_calls: dict[tuple[str, str], Any] = {}


@pytest.mark.parametrize(
    ("recipe", "precision", "micro_batches"), in_pairs(RECIPES, PRECISIONS, MICRO_BATCHES)
)
def test_11_what_reaches_the_optimizer_is_the_gradient(
    recipe: str, precision: str, micro_batches: int
) -> None:
    for model in CLIPS if micro_batches == 3 else ["pairs"]:
        program, batch = program_of(model, precision, micro_batches=micro_batches, **RECIPES[recipe])
        # Traced once for each precision: what a step's recipe does is not in a trace.
        calls = _calls.setdefault((model, precision), program.calls)
        check(evolve(program, calls=calls), batch)


@pytest.mark.parametrize("recipe", RECIPES)
def test_11_on_two_ranks(recipe: str) -> None:
    """In one process: real ones do the same in test_ranks.py."""
    # In one bucket, of which each rank has parameters that are decayed and others.
    model, more = ("odd sizes", {"bucket_size": 100_000}) if recipe == "no barrier" else ("pairs", {})
    batch = MODELS[model]()[1]
    programs = programs_of(
        2,
        lambda: program_of(model, "bf16", micro_batches=2, **RECIPES[recipe], **more)[0],
        rows_of(batch(0), 0, 2),
    )
    on_every(programs, partial(check, batch=batch))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_11_with_the_update_of_a_device(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the kernel, that a GPU runs, on the CPU."""
    monkeypatch.setattr(zfunc.AdamW, "host_update", zfunc.AdamW.device_update)
    for recipe in ("all on the device", "half on the device"):
        check(*program_of("pairs", precision, micro_batches=2, **RECIPES[recipe]))
