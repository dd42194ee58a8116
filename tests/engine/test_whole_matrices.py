"""Updates that need whole parameters: any number of ranks makes that of one, and one of a part is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import MODELS
from threaded_ranks import on_every, programs_of
from torch import Tensor
from zfunc.schedules import Overlapped

import zfunc
from zfunc.core.graph import Graph
from zfunc.core.plan import PlanError
from zfunc.core.recipes import zero_offload
from zfunc.core.verifier import verify
from zfunc.engine.compile.program import Program

MUON = zfunc.Muon(0.02, momentum=0.8)
GROUPS = zfunc.groups((lambda _, shape: len(shape) == 2, MUON), zfunc.AdamW(1e-3))
BOTH = zfunc.groups(
    ("huge.*", zfunc.Adafactor(0.1)),
    ("inlet.*", zfunc.Adafactor(0.05, weight_decay=0.1)),
    (lambda _, shape: len(shape) == 2, MUON),
    zfunc.AdamW(1e-3),
)
PLACES: dict[str, dict[str, Any]] = {
    "stage 2": {"moments": "8bit"},
    "stage 2, without a barrier": {"clip_norm": None, "micro_batches": 1, "offload_ratio": 0.5},
    "stage 3": {"stage": 3, "defer": True, "moments": "16bit"},
    "on the disk": {"stage": 3, "params_on": "disk", "state_on": "disk", "defer": True, "state_slots": 1},
}


def programs(world: int, **settings: Any) -> tuple[list[Program], Any]:
    segments, data = MODELS["odd sizes"]()
    usual = {"precision": "bf16", "bucket_size": 5000, "device": "cpu", "clip_norm": 0.5, "micro_batches": 2}
    chosen = {**usual, "optimizer": GROUPS, **settings}
    return programs_of(world, lambda: zfunc.compile(segments, **chosen), data(0)), data


def trained(world: int, tmp_path: Path, **settings: Any) -> list[dict[str, Tensor]]:
    """The weights after three steps in which each rank has the same rows, so their mean is exactly the gradient."""
    if settings.get("state_on") == "disk":
        settings["swap"] = [str(tmp_path / str(world))]
        (tmp_path / str(world)).mkdir()
    every, data = programs(world, **settings)

    def one(program: Program) -> dict[str, Tensor]:
        state = zfunc.init(program, seed=1)
        for i in range(3):
            state, _ = zfunc.train_step(program, state, data(i))
        return {name: x.clone() for name, x in zfunc.params(program, state).items()}

    return on_every(every, one)


@pytest.mark.parametrize("place", PLACES)
def test_any_world_has_the_bits_of_one_rank(place: str, tmp_path: Path) -> None:
    """The slices of four ranks cut every matrix but the smallest, and a vector of Adafactor's."""
    settings = {**PLACES[place], "optimizer": BOTH}
    (alone,) = trained(1, tmp_path, **settings)
    assert all(x.isfinite().all() for x in alone.values())
    for world in (2, 4):
        for mine in trained(world, tmp_path, **settings):
            assert all(torch.equal(x, alone[name]) for name, x in mine.items()), world


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        ("gather_direction", "orthogonalize.* reads direction_slot.*, which no operation before it writes"),
        ("join_measures", "measure.* reads joined.*, which no operation before it writes"),
    ],
)
def test_a_part_of_a_parameter_does_not_verify(verb: str, message: str) -> None:
    program = programs(2, optimizer=BOTH)[0][0]
    ops = tuple(zero_offload(program.spec))
    verify(Overlapped()(Graph(ops)))
    with pytest.raises(PlanError, match=message):
        verify(Overlapped()(Graph(op for op in ops if op.verb != verb)))


def test_it_is_made_once_a_step_with_the_flops_of_newton_schulz() -> None:
    """On several ranks with those of the matrices that the slice of the busiest has a part of."""
    flops = {}
    for world in (1, 2):
        program = programs(world, micro_batches=4)[0][0]
        made = [op for op in program.plan.graph if op.verb == "orthogonalize"]
        assert [op.index[0] for op in made] == sorted(program.spec.matrix_buckets, reverse=True)
        flops[world] = sum(op.flops for op in made)
    each = [MUON.update_work(x.shape, group=0).flops for x in program.layout.spans if len(x.shape) == 2]
    assert flops[1] == sum(each)
    assert max(each) <= flops[2] <= flops[1]


def test_what_is_no_matrix_is_refused_at_birth() -> None:
    with pytest.raises(
        ValueError, match="got Muon for 'inlet.0.bias' of .16,..*expected matrices alone: pass zfunc.groups"
    ):
        zfunc.compile(MODELS["odd sizes"]()[0], optimizer=MUON, device="cpu")


def test_a_training_follows_that_of_torch() -> None:
    """Plain fp32 PyTorch with torch's own Muon and AdamW, clipped."""
    segments, data = MODELS["odd sizes"]()
    program = zfunc.compile(segments, optimizer=GROUPS, precision="fp32", clip_norm=0.5, device="cpu")
    state = zfunc.init(program, seed=1)
    start = {name: x.clone() for name, x in zfunc.params(program, state).items()}
    theirs = {x.name: start[x.name].clone().requires_grad_() for x in program.layout.spans}
    frozen = {name: x for name, x in start.items() if name not in theirs}
    matrices = [x for x in theirs.values() if x.dim() == 2]
    others = [x for x in theirs.values() if x.dim() != 2]
    optimizers = torch.optim.Muon(matrices, 0.02, momentum=0.8), torch.optim.AdamW(others, 1e-3)
    for i in range(20):
        x, targets = data(i)
        for s in segments:
            own = {short: (theirs | frozen)[full] for short, full in s.by_short.items()} | dict(s.constants)
            x = s.function(own, x, *((targets,) if s is segments[-1] else ()))
        x = x[0] if isinstance(x, tuple) else x
        for optimizer in optimizers:
            optimizer.zero_grad()
        x.backward()
        torch.nn.utils.clip_grad_norm_([*theirs.values()], 0.5)
        for optimizer in optimizers:
            optimizer.step()
        state, metrics = zfunc.train_step(program, state, data(i))
        assert metrics.loss == pytest.approx(x.item(), rel=2e-3)
