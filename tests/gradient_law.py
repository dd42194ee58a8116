"""Law 11, element by element: a training whose optimizer remembers what reaches it, held against autograd."""

from typing import Any

import plain
import trained
from attrs import evolve
from small_models import IN_FP32

import zfunc
from zfunc.engine.program.program import Program
from zfunc.optim.loss_scale import LossScale

RECIPES: dict[str, dict[str, Any]] = {
    "no barrier": {"clip_norm": None},
    "clipped": {},
    "stage 1": {"stage": 1},
    "stage 1, no barrier": {"stage": 1, "clip_norm": None},
    "half on the device": {"state_on": "device:0.5,host"},
    "all on the device": {"state_on": "device", "clip_norm": None},
    "moments in 16 bits": {"moments": "16bit"},
    "vertical": {"order": "vertical"},
    "some in fp32": {"fp32_params": IN_FP32, "clip_norm": None},
    "some in fp32, stage 1": {"fp32_params": IN_FP32, "stage": 1},
    "some in fp32, stage 3": {
        "fp32_params": IN_FP32,
        "stage": 3,
        "params_on": "host",
        "update_on": "device,host",
    },
    "stage 3": {"stage": 3, "clip_norm": None, "activations_on": "host"},
}


CLIPS = {"odd sizes": 3.0, "pairs": 14.0}  # of each model: some steps have a larger norm, some a smaller one


STEPS = 3


SCALE = 2.0**7


def program_of(model: str, precision: str, **settings: Any) -> tuple[Program, Any]:
    """One that clips, unless told otherwise, and remembers the gradient; on a CPU, in small buckets."""
    moments = settings.pop("moments", "fp32")
    settings = {"clip_norm": CLIPS[model], "bucket_size": 100, "norms": True, **settings}
    if settings.get("fp32_params") is IN_FP32:
        settings["fp32_params"] = IN_FP32[model]
    program, batch = trained.compiled(model, precision=precision, moments=moments, **settings)
    return evolve(program, optimizer=plain.remembering(program.optimizer)), batch


def check(program: Program, batch: Any) -> None:
    """Train it, and hold what reaches its optimizer against autograd."""
    # To the order of sums; where the first moment itself is rounded, to that.
    tolerance = 3e-6 if program.optimizer.moments == "fp32" else 2.0**-7
    state = zfunc.init(
        program, seed=1, loss_scale=LossScale(SCALE) if program.settings.precision == "fp16" else None
    )
    parts = [plain.Part.of(s) for s in program.segments]
    norms = plain.follow(program, state, parts, batch, steps=STEPS, tolerance=tolerance)
    if program.settings.clip_norm is not None:
        assert min(norms) < program.settings.clip_norm < max(norms)
