"""The delayed update of examples/ is that of plain PyTorch a step late, and has one result under any schedule."""

import sys
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
import trained
from pairs import in_pairs
from small_models import bits
from table import SPECS, waiting
from torch import Tensor
from trained import steps

import zfunc
from zfunc.core.graph import Graph
from zfunc.errors import CheckpointError

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "systems"))
from delayed_update import delayed  # noqa: E402

GOLDENS = ROOT / "tests" / "goldens" / "delayed"
DELAYED = {"recipe": delayed, "defer": True}
SETTINGS: dict[str, dict[str, Any]] = {  # the norms of the first steps are 0.85, 0.59, 0.54, 0.47, 0.52
    "clipped": {"precision": "fp32", "clip_norm": 0.55},
    "never clipped": {"precision": "fp32", "clip_norm": 1e6},
    "bf16, 16 bits": {"precision": "bf16", "clip_norm": 0.55, "moments": "16bit"},
    "8 bits, in 3": {"precision": "bf16", "clip_norm": 0.5, "moments": "8bit", "micro_batches": 3},
    "stage 1": {"precision": "fp32", "clip_norm": 0.55, "stage": 1, "micro_batches": 2},
    "partial": {"precision": "bf16", "clip_norm": 0.55, "state_on": "device:0.4,host"},
    "fp16": {"precision": "fp16"},
}


def run(settings: str, **more: Any) -> tuple[str, list[Tensor]]:
    """Five steps; with fp16 from a scale that overflows at first."""
    program, batch = trained.compiled(**SETTINGS[settings], **more)
    scale = zfunc.LossScale(scale=2.0**20, window=2, hysteresis=1)
    state, seen = steps(program, zfunc.init(program, seed=1, loss_scale=scale), batch, 0, 5)
    return repr(seen), [*bits(zfunc.flush(program, state))]


def same(a: tuple[str, list[Tensor]], b: tuple[str, list[Tensor]]) -> bool:
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


def test_the_delayed_update_is_that_of_plain_pytorch_a_step_late() -> None:
    chosen = {"precision": "fp32", "clip_norm": 0.5, "bucket_size": 100}
    program, batch = trained.compiled("odd sizes", **chosen, **DELAYED)
    values, names = zfunc.params(program, zfunc.init(program, seed=1)), {x.name for x in program.layout.spans}
    kinds = {d: [values[x] for x in names if (values[x].dim() == 2) == d] for d in (True, False)}
    adamw = torch.optim.AdamW([{"params": x, "weight_decay": 0.1 * d} for d, x in kinds.items()], lr=1e-2)
    parts = [plain.Part.of(segment) for segment in program.segments]
    losses = plain.train(parts, values, names, batch, [adamw], steps=31, clip_norm=0.5, late=True)
    state, seen = steps(program, zfunc.init(program, seed=1), batch, 0, 30)
    assert [loss for _, loss, *_ in seen] == pytest.approx(losses[:30], abs=2e-4)
    for name, value in zfunc.params(program, zfunc.flush(program, state)).items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=3e-4)


@pytest.mark.parametrize(("settings", "schedule"), in_pairs(SETTINGS, ["Overlapped", "Interleaved"]))
def test_a_delayed_update_has_one_result_under_any_schedule(settings: str, schedule: str) -> None:
    serial = run(settings, schedule="Serial", **DELAYED)
    assert same(run(settings, schedule=schedule, **DELAYED), serial)
    if settings != "fp16":
        assert serial[0] != run(settings, schedule="Serial")[0]


def test_the_host_updates_beside_all_of_forward_and_backward() -> None:
    late = [op.verb for op in Graph(delayed(waiting(SPECS["small buckets"])))]
    assert late.index("update") < late.index("forward") < late.index("to_device") < late.index("decide")


def test_a_gradient_that_waits_in_a_checkpoint_of_an_earlier_version_is_refused() -> None:
    """It was saved with `delay_from`, before and after its update."""
    program, batch = trained.compiled("pairs", precision="fp32", clip_norm=0.5, defer=True)
    with pytest.raises(
        CheckpointError, match=r"got a gradient that is still to be applied.*call zfunc\.flush"
    ):
        zfunc.load(GOLDENS / "waiting", program)
    assert steps(program, zfunc.load(GOLDENS / "applied", program), batch, 3, 5)[1][0][0] == 4
