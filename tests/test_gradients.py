"""Law 11, element by element: what reaches the optimizer is what autograd and clip_grad_norm_ give.

Adam hides the scale of a gradient, and losses hide what is small; here both are seen. The optimizer's first decay
rate is 0, so its first moment is the gradient it was given, to the bit, after the kernel has unscaled and clipped.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import plain
import pytest
import trained
from attrs import evolve
from models import rows_of
from threaded_ranks import ThreadedRanks

import zfunc
from zfunc import compiling, updates
from zfunc.device_adam import device_adam_update_
from zfunc.loss_scale import LossScale
from zfunc.program import Program, specialize

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
    """One that clips, unless told otherwise, and remembers the gradient; on a CPU, in small buckets."""
    moments = settings.pop("moments", "fp32")
    settings = {"clip_norm": CLIPS[model], "bucket_size": 100, **settings}
    made, batch = trained.compiled(model, precision=precision, moments=moments, **settings)
    return evolve(made, optimizer=plain.remembering(made.optimizer)), batch


def check(program: Program, batch: Any) -> None:
    """Train it, and hold what reaches its optimizer against autograd."""
    # To the order of sums; where the first moment itself is rounded, to that.
    tolerance = 3e-6 if program.optimizer.moments == "fp32" else 2.0**-7
    state = zfunc.init(program, seed=1, loss_scale=LossScale(SCALE) if program.precision == "fp16" else None)
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
        program, batch = program_of(model, precision, micro_batches=micro_batches, **RECIPES[recipe])
        # Traced once for each precision: what a step's recipe does is not in a trace.
        calls = _calls.setdefault((model, precision), program.calls)
        check(evolve(program, calls=calls), batch)


@pytest.mark.parametrize("recipe", RECIPES)
def test_11_so_it_is_on_two_ranks(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: real ones do the same in test_ranks.py."""
    made = []
    for ranks in ThreadedRanks.all(2):
        monkeypatch.setattr(compiling, "_ranks", lambda group, ranks=ranks: ranks)
        made.append(program_of("pairs", "bf16", micro_batches=2, **RECIPES[recipe]))
    for program, batch in made:  # traced here: two threads must not trace at a time
        specialize(program, rows_of(batch(0), 0, 2))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(check, *zip(*made, strict=True)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_11_so_it_is_with_the_update_a_device_makes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the kernel, that a GPU runs, on the CPU."""
    monkeypatch.setattr(updates, "adam_update_", device_adam_update_)
    for recipe in ("all on the device", "half on the device"):
        check(*program_of("pairs", precision, micro_batches=2, **RECIPES[recipe]))
