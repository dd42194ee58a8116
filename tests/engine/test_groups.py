"""Several optimizers in one model, and each of zfunc's: wherever and whenever an update is made, the same bits."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from small_models import MODELS, flats
from threaded_ranks import on_every, programs_of
from torch import Tensor

import zfunc
from zfunc.engine.compile.program import Program
from zfunc.engine.state.state import State
from zfunc.errors import CheckpointError
from zfunc.optim.groups import GroupedOptimizer

BACKBONE = zfunc.AdamW(1e-3, weight_decay=0.1, decay=zfunc.matrices_only)
GROUPS = zfunc.groups(
    ("huge.*", zfunc.AdamW(zfunc.lr.linear_warmup(1e-2, 3))),
    ("*.weight", zfunc.SGD(0.1, momentum=0.9, nesterov=True)),
    (lambda name, shape: not shape, zfunc.Adagrad(0.1)),
    ("loss.*", zfunc.SGD(0.1)),
    zfunc.Lion(1e-3, weight_decay=0.1),
)
OPTIMIZERS: dict[str, Any] = {
    "momentum": zfunc.SGD(0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "Lion": zfunc.Lion(1e-3, weight_decay=0.1),
    "Adagrad": zfunc.Adagrad(0.1),
    "Adafactor": zfunc.groups(("huge.*", zfunc.Adafactor(0.1)), zfunc.Adafactor(0.05, weight_decay=0.1)),
    "groups": GROUPS,
    "Muon": zfunc.groups((zfunc.matrices_only, zfunc.Muon(0.02)), BACKBONE),
    "two AdamW": zfunc.groups(("huge.*", zfunc.AdamW(1e-2, betas=(0.8, 0.9))), BACKBONE),
}
PLACES: dict[str, dict[str, Any]] = {
    "deferred": {"defer": True},
    "half on the device": {"offload_ratio": 0.5},
    "on the device": {"offload_ratio": 0.0},
    "on the host": {"params_on": "host"},
    "large buckets": {"bucket_size": 1 << 20, "schedule": "Serial"},
    "on the disk": {"params_on": "disk", "state_on": "disk", "disk_ratio": 0.6},
}


def compiled(optimizer: Any, tmp_path: Path | None = None, **settings: Any) -> tuple[Program, Any]:
    segments, data = MODELS["odd sizes"]()
    if settings.get("state_on") == "disk":
        settings["swap"] = [str(tmp_path)]
    usual = {"precision": "bf16", "bucket_size": 300, "device": "cpu", "clip_norm": 0.5, "micro_batches": 2}
    return zfunc.compile(segments, optimizer=optimizer, **{**usual, **settings}), data


def trained(program: Program, data: Any, steps: int = 3, start: State | None = None) -> State:
    state = start or zfunc.init(program, seed=1)
    for i in range(state.step, state.step + steps):
        state, _ = zfunc.train_step(program, state, data(i))
    return state


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("groups", "fp32"),
        ("groups", "8bit"),
        ("two AdamW", "fp32"),
        ("Muon", "8bit"),
        *(
            pytest.param(name, moments, marks=() if moments == "16bit" else pytest.mark.slow)
            for name in ("momentum", "Lion", "Adagrad", "Adafactor")
            for moments in ("fp32", "16bit", "8bit")
        ),
    ],
)
def test_where_and_when_an_update_is_made_changes_no_bit(name: str, moments: str, tmp_path: Path) -> None:
    program, data = compiled(OPTIMIZERS[name], moments=moments)
    expected = zfunc.params(program, trained(program, data))
    assert all(x.isfinite().all() for x in expected.values())
    for where, settings in PLACES.items():
        (folder := tmp_path / where.replace(" ", "-")).mkdir()
        program, data = compiled(OPTIMIZERS[name], folder, moments=moments, **settings)
        assert same(zfunc.params(program, trained(program, data)), expected), where


def test_alike_groups_are_one_optimizer() -> None:
    """In as many buckets, whose runs differ by group."""
    one, data = compiled(BACKBONE)
    several, _ = compiled(zfunc.groups(("huge.*", BACKBONE), ("*.bias", evolve(BACKBONE)), BACKBONE))
    assert len(one.layout.buckets) == len(several.layout.buckets)
    assert same(zfunc.params(one, trained(one, data)), zfunc.params(several, trained(several, data)))


def test_each_parameter_moves_by_its_own_learning_rate() -> None:
    still = zfunc.groups(("huge.*", zfunc.AdamW(0.0)), ("back.*", zfunc.Lion(0.0)), zfunc.SGD(0.1))
    program, data = compiled(still)
    before = {name: x.clone() for name, x in zfunc.params(program, zfunc.init(program, seed=1)).items()}
    state, metrics = zfunc.train_step(program, zfunc.init(program, seed=1), data(0))
    assert metrics.lr == 0.1
    trains = {x.name for x in program.layout.spans}
    for name, x in zfunc.params(program, state).items():
        assert torch.equal(x, before[name]) == (name.startswith(("huge.", "back.")) or name not in trains), (
            name
        )


@pytest.mark.parametrize("name", ["groups", "Adafactor"])
def test_two_ranks_make_the_update_of_one_and_load_what_the_other_saved(name: str, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS[name]
    one, data = compiled(optimizer, moments="16bit")
    alone = trained(one, data, 1)
    path = zfunc.save(tmp_path / "one", one, alone)
    ranks = programs_of(2, lambda: compiled(optimizer, moments="16bit", bucket_size=500, stage=3)[0])
    shares = on_every(ranks, partial(zfunc.load, path))
    saved, _ = on_every(ranks, partial(zfunc.save, tmp_path / "two"), shares)
    again = zfunc.load(saved, one)
    assert same(flats(again, "params", "state"), flats(alone, "params", "state"))


def test_a_swap_space_of_several_formats_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    program, data = compiled(GROUPS, tmp_path / "swap", **PLACES["on the disk"])
    state = trained(program, data, 2)
    zfunc.save(tmp_path / "swap", program, state)
    weights = {name: x.clone() for name, x in zfunc.params(program, state).items()}
    resumed = zfunc.load(tmp_path / "swap", program)
    assert same(zfunc.params(program, resumed), weights)
    del program, state, resumed
    other, data = compiled(GROUPS, bucket_size=500)
    loaded = zfunc.load(tmp_path / "swap", other)
    whole, data = compiled(GROUPS)
    assert same(
        zfunc.params(other, trained(other, data, 1, loaded)), zfunc.params(whole, trained(whole, data))
    )


def test_groups_may_change_where_the_state_fits(tmp_path: Path) -> None:
    program, data = compiled(OPTIMIZERS["two AdamW"])
    path = zfunc.save(tmp_path, program, state := trained(program, data, 1))
    moved, _ = compiled(zfunc.groups(("*.bias", zfunc.AdamW(1e-2)), BACKBONE), moments="8bit")
    assert same(zfunc.params(moved, zfunc.load(path, moved)), zfunc.params(program, state))
    with pytest.raises(
        CheckpointError, match="'back.weight': got optimizer state in the format 'fp32', expected 'lion"
    ):
        zfunc.load(path, compiled(zfunc.groups(("back.*", zfunc.Lion()), BACKBONE))[0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: zfunc.groups(), ValueError, "got no optimizer for the parameters that no rule matches"),
        (
            lambda: zfunc.groups(("a.*", BACKBONE)),
            ValueError,
            "got no optimizer for the parameters that no rule",
        ),
        (
            lambda: zfunc.groups(BACKBONE, BACKBONE),
            TypeError,
            "got AdamW in place 1, expected .rule, optimizer.",
        ),
        (
            lambda: zfunc.groups((3, BACKBONE), BACKBONE),
            TypeError,
            "got the rule 3, expected a glob over names",
        ),
        (
            lambda: zfunc.groups((len, zfunc.Lion), BACKBONE),
            TypeError,
            "groups: got <class .*Lion'>, expected an opti",
        ),
        (
            lambda: zfunc.groups(("a", GROUPS), BACKBONE),
            TypeError,
            "groups: got GroupedOptimizer.*expected an optim",
        ),
        (
            lambda: zfunc.groups(("a", zfunc.Lion(moments="8bit")), BACKBONE),
            ValueError,
            "got Lion.moments='8bit'. and AdamW.moments='fp32'., expected one format",
        ),
        (
            lambda: compiled(zfunc.groups(("hug.*", BACKBONE), BACKBONE)),
            ValueError,
            "got the rule 'hug..', which matches no parameter, expected one that does: names are such as 'inlet.0",
        ),
        (
            lambda: compiled(zfunc.groups(("*.weight", BACKBONE), ("back.*", zfunc.Lion()), BACKBONE)),
            ValueError,
            "got the rule 'back..', whose parameters, such as 'back.weight', all match an earlier rule",
        ),
        (
            lambda: compiled(zfunc.groups(("*", BACKBONE), zfunc.Lion())),
            ValueError,
            "got rules that match every parameter, expected one for the default",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_birth(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_rule_for_frozen_parameters_alone_is_refused() -> None:
    segments, _ = MODELS["frozen below"]()
    frozen = next(p.name for s in segments for p in s.parameters if not p.trainable)
    with pytest.raises(
        ValueError, match=f"such as '{frozen}', all are frozen, expected one for its optimizer: leave"
    ):
        zfunc.compile(segments, optimizer=zfunc.groups((frozen, BACKBONE), BACKBONE), device="cpu")


def test_what_a_group_is_of_is_said() -> None:
    assert isinstance(GROUPS, GroupedOptimizer)
    described = GROUPS.describe()["groups"]
    assert [x["rule"] for x in described] == ["huge.*", "*.weight", "<lambda>", "loss.*", "default"]
    assert [x["optimizer"] for x in described] == ["AdamW", "SGD", "Adagrad", "SGD", "Lion"]
    factors = GROUPS.factors(2)
    assert (factors["lr"], factors["0.lr"], factors["0.betas"]) == (1e-3, 1e-2 * (2 / 3), (0.9, 0.999))
