"""Every optimizer in a training: one of one's own, several in one model, and those that need whole parameters.

That a way of training changes no bit of any, and that torch's optimizers do the same, are laws (test_laws.py).
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
import torch
import trained
from attrs import evolve
from parity import (
    ADAMW,
    GROUPS,
    MATRICES,
    NUMBERS,
    TWO,
    WAYS,
    WHOLE,
    Momentum,
    Row,
    is_matrix,
    own_format,  # noqa: F401
    results,
)
from small_models import MODELS, flats
from threaded_ranks import programs_of
from torch import Tensor
from trained import adam_of
from zfunc.schedules import Overlapped

import zfunc
import zfunc.optim
from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND
from zfunc.core.plan import PlanError
from zfunc.core.recipes import zero_offload
from zfunc.core.settings import StepSettings
from zfunc.core.verifier import verify
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.errors import CheckpointError, ExecutionError
from zfunc.optim.base import Optimizer
from zfunc.optim.elementwise import matrices_only
from zfunc.optim.groups import GroupedOptimizer
from zfunc.optim.updates import checked_span

pytestmark = pytest.mark.usefixtures("own_format")
MUON = zfunc.Muon(0.02, momentum=0.8)
ALONE = Row("groups", "one slot", "odd sizes")
TWO_ADAMW = NUMBERS["two AdamW"]["optimizer"]


OWN = Momentum()


def compiled(optimizer: Any = OWN, **settings: Any) -> tuple[Program, Any]:
    return trained.compiled("odd sizes", optimizer=optimizer, **{**TWO, "bucket_size": 300, **settings})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, b[name]) for name, x in a.items())


def test_every_optimizer_of_zfunc_is_in_the_table() -> None:
    modules = [import_module(m.name) for m in iter_modules(zfunc.optim.__path__, "zfunc.optim.")]
    classes = [
        x for m in modules for x in vars(m).values() if isinstance(x, type) and x.__module__ == m.__name__
    ]
    optimizers = {x for x in classes if hasattr(x, "host_update") and not isabstract(x)} - {Optimizer}
    every = [NUMBERS[name]["optimizer"] for name in WITH_OWN]
    members = (x for made in every for x in (made, *getattr(made, "optimizers", ())))
    assert {type(optimizer) for optimizer in members} == optimizers | {Momentum}


WITH_OWN = [name for name, row in NUMBERS.items() if "optimizer" in row]
PLANNED = [name for name, way in WAYS.items() if "pp" not in way]
OF_A_PLAN = [Row(name, PLANNED[(5 * n) % len(PLANNED)], "odd sizes") for n, name in enumerate(WITH_OWN)]
IN_PARTS = "ZeroBubble", "DualPipeV", "RoundPipe"
PARTED = [name for name in PLANNED if any(x in str(WAYS[name].get("order")) for x in IN_PARTS)]
OF_A_PLAN += [Row(WITH_OWN[0], name, "odd sizes") for name in PARTED]
AT_NIGHT = {x for x in OF_A_PLAN[len(WITH_OWN) :] if "params_on" in x.settings and x.settings["devices"] < 3}


@pytest.mark.parametrize(
    "row", [pytest.param(x, marks=[pytest.mark.slow] * (x in AT_NIGHT), id=str(x)) for x in OF_A_PLAN]
)
def test_it_is_planned_as_it_is_compiled(row: Row, tmp_path: Path) -> None:
    segments, data = MODELS["odd sizes"]()
    on = evolve(ROUND, memory={"host": 1}, unified=True)  # so that everything that may save memory is tried
    settings = {"bucket_size": 300, **adam_of(**row.given(tmp_path))}
    advised = row.way == "one slot" or row.numbers in ("groups", "Adafactor, 16 bits")
    p = zfunc.plan(segments, data(0), hardware=on, advice=advised, **settings)
    program = zfunc.compile(segments, example=data(0), device="cpu", **settings)
    special = specialize(program, data(0), commit=p.step.spec.commit)
    assert [*p.step.graph] == [*special.plan.graph]
    assert p.memory == {tier: peak.nbytes for tier, peak in special.memory.items()}
    if advised and row.numbers in ("momentum of one's own", "groups"):  # whose state has one format, several
        assert any("moments" in x.changes for x in p.suggestions) == (row.numbers == "groups")
    if row.numbers == "Adafactor, 16 bits":  # whose state of 8 bits is that of 16
        assert not any("moments" in x.changes for x in p.suggestions)


def test_it_has_no_choice_of_moments() -> None:
    with pytest.raises(ValueError, match="got '8bit' with Momentum, whose state is in the format 'momentum'"):
        compiled(settings=StepSettings(moments="8bit"))


def test_its_state_is_no_other_optimizers(tmp_path: Path) -> None:
    program, _ = compiled()
    path = zfunc.save(tmp_path, program, zfunc.init(program))
    with pytest.raises(
        CheckpointError, match="got optimizer state in the format 'momentum', expected 'fp32'"
    ):
        zfunc.load(path, compiled(zfunc.AdamW())[0])


def test_it_converts_the_state_of_others_itself(tmp_path: Path) -> None:
    adam, data = compiled(zfunc.AdamW(), bucket_size=200)
    state, _ = zfunc.train_step(adam, zfunc.init(adam, seed=1), data(0))
    program, _ = compiled()
    loaded = zfunc.load(zfunc.save(tmp_path / "fp32", adam, state), program)
    weights = zfunc.params(adam, state)
    assert all(torch.equal(x, weights[name]) for name, x in zfunc.params(program, loaded).items())
    assert flats(loaded, "state")["buf"].norm() == flats(state, "state")["exp_avg"].norm() > 0
    compact, _ = compiled(zfunc.AdamW(moments="16bit"))
    path = zfunc.save(tmp_path / "16bit", compact, zfunc.init(compact))
    with pytest.raises(CheckpointError, match="step 0: no momentum from 16bit"):
        zfunc.load(path, program)


# --- several in one model ---


def test_alike_groups_are_one_optimizer() -> None:
    """In as many buckets, whose runs differ by group."""
    one, _ = compiled(ADAMW)
    several, _ = compiled(zfunc.groups(("huge.*", ADAMW), ("*.bias", evolve(ADAMW)), ADAMW))
    assert len(one.layout.buckets) == len(several.layout.buckets)
    (expected,), (got,) = (results(ALONE, {**TWO, "optimizer": x.optimizer}) for x in (one, several))
    assert got.same(expected)


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


def test_groups_may_change_where_the_state_fits(tmp_path: Path) -> None:
    program, data = compiled(TWO_ADAMW)
    state, _ = zfunc.train_step(program, zfunc.init(program, seed=1), data(0))
    path = zfunc.save(tmp_path, program, state)
    moved, _ = compiled(zfunc.groups(("*.bias", zfunc.AdamW(1e-2)), ADAMW), moments="8bit")
    assert same(zfunc.params(moved, zfunc.load(path, moved)), zfunc.params(program, state))
    with pytest.raises(
        CheckpointError, match="'back.weight': got optimizer state in the format 'fp32', expected 'lion"
    ):
        zfunc.load(path, compiled(zfunc.groups(("back.*", zfunc.Lion()), ADAMW))[0])


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: zfunc.groups(), ValueError, "got no optimizer for the parameters that no rule matches"),
    (lambda: zfunc.groups(("a.*", ADAMW)), ValueError, "got no optimizer for the parameters that no rule"),
    (lambda: zfunc.groups(ADAMW, ADAMW), TypeError, "got AdamW in place 1, expected .rule, optimizer."),
    (lambda: zfunc.groups((3, ADAMW), ADAMW), TypeError, "got the rule 3, expected a glob over names"),
    (
        lambda: zfunc.groups((len, zfunc.Lion), ADAMW),
        TypeError,
        "groups: got <class .*Lion'>, expected an opti",
    ),
    (
        lambda: zfunc.groups(("a", GROUPS), ADAMW),
        TypeError,
        "groups: got GroupedOptimizer.*expected an optim",
    ),
    (
        lambda: zfunc.groups(("a", zfunc.Lion(moments="8bit")), ADAMW),
        ValueError,
        "got Lion.moments='8bit'. and AdamW.moments='fp32'., expected one format",
    ),
    (
        lambda: compiled(zfunc.groups(("hug.*", ADAMW), ADAMW)),
        ValueError,
        "got the rule 'hug..', which matches no parameter, expected one with.* names are such as 'inlet.0",
    ),
    (
        lambda: compiled(zfunc.groups(("*.weight", ADAMW), ("back.*", zfunc.Lion()), ADAMW)),
        ValueError,
        "got the rule 'back..', whose parameters, such as 'back.weight', are frozen or match an earlier rule",
    ),
    (
        lambda: compiled(zfunc.groups(("*", ADAMW), zfunc.Lion())),
        ValueError,
        "got the rule '.', whose parameters, .*, are frozen or match an earlier rule, expected .*the default's too",
    ),
    (
        lambda: trained.compiled("frozen below", optimizer=zfunc.groups(("frozen.bias", ADAMW), ADAMW)),
        ValueError,
        "such as 'frozen.bias', are frozen or match .*, expected one with a parameter for its optimizer, .* leave",
    ),
    (
        lambda: compiled(MUON),
        ValueError,
        "got Muon for 'inlet.0.bias' of .16,..*expected matrices alone: pass zfunc.groups",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_cannot_be_is_refused_at_birth(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_what_a_group_is_of_is_said() -> None:
    assert isinstance(GROUPS, GroupedOptimizer)
    described = GROUPS.describe()["groups"]
    assert [x["rule"] for x in described] == ["huge.*", "*.weight", "<lambda>", "loss.*", "default"]
    assert [x["optimizer"] for x in described] == ["AdamW", "SGD", "Adagrad", "SGD", "Lion"]
    factors = GROUPS.factors(2)
    assert (factors["lr"], factors["0.lr"], factors["0.betas"]) == (1e-3, 1e-2 * (2 / 3), (0.9, 0.999))


# --- of whole parameters ---


def test_a_part_of_a_matrix_does_not_verify() -> None:
    program = programs_of(2, lambda: compiled(MATRICES)[0])[0]
    ops = tuple(zero_offload(program.spec))
    verify(Overlapped()(Graph(ops)))
    message = "orthogonalize.* reads direction_slot.*, which no operation before it writes"
    with pytest.raises(PlanError, match=message):
        verify(Overlapped()(Graph(op for op in ops if op.verb != "gather_direction")))


def test_a_part_of_another_parameter_is_refused() -> None:
    """With what to use instead; one rank, and a stage of a pipeline, have parameters whole."""
    refused = "optimizer: got Adafactor for '.*' on 2 ranks.*pass zfunc.AdamW.moments='8bit'"
    for optimizer in (zfunc.Adafactor(), zfunc.groups(("huge.*", zfunc.Adafactor()), zfunc.AdamW())):
        compiled(optimizer)
        with pytest.raises(ValueError, match=refused):
            programs_of(2, lambda optimizer=optimizer: compiled(optimizer)[0])


def test_it_is_made_once_a_step_with_the_flops_of_newton_schulz() -> None:
    """On several ranks with those of the matrices that the slice of the busiest has a part of."""
    flops = {}
    for world in (1, 2):
        made = partial(compiled, zfunc.groups((is_matrix, MUON), zfunc.AdamW(1e-3)), micro_batches=4)
        program = programs_of(world, lambda made=made: made()[0])[0]
        made = [op for op in program.plan.graph if op.verb == "orthogonalize"]
        matrices = [x.index for x in program.spec.places if x.matrices]
        assert [op.index[0] for op in made] == sorted(matrices, reverse=True)
        flops[world] = sum(op.flops for op in made)
    each = [MUON.update_work(x.shape, group=0).flops for x in program.layout.spans if len(x.shape) == 2]
    assert flops[1] == sum(each)
    assert max(each) <= flops[2] <= flops[1]


CHECKED_ONCE: dict[str, dict[str, Any]] = {
    **{name: NUMBERS[name] for name in ("fp32", "bf16 in 2, 16 bits", "groups, 8 bits", "a split master")},
    "whole matrices, 8 bits": NUMBERS["whole matrices, 8 bits"],
    "whole parameters": {**TWO, "optimizer": WHOLE, "moments": "16bit"},
    **{name: {**TWO, **WAYS[name]} for name in ("half on the device", "from the host")},
}


@pytest.mark.parametrize("name", CHECKED_ONCE)
def test_an_update_checks_its_buffers_once_for_a_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again in debug mode, for another State, and where a buffer becomes another, which is refused by its name."""
    asked = list[str]()

    def checked(name: str, *args: Any, **given: Any) -> Any:
        asked.append(name)
        return checked_span(name, *args, **given)

    monkeypatch.setattr("zfunc.optim.updates.checked_span", checked)
    program, batch = trained.compiled("odd sizes", **adam_of(**{"clip_norm": 1.0, **CHECKED_ONCE[name]}))

    def checks(i: int, state: Any, **how: Any) -> tuple[Any, int]:
        asked.clear()
        state, _ = zfunc.train_step(program, state, batch(i), **how)
        return state, sum(x not in ("acc", "grad") for x in asked)

    state, first = checks(0, zfunc.init(program))
    state, second = checks(1, state)
    assert first > 0 == second
    state, in_debug_mode = checks(2, state, debug=True)
    other, of_another = checks(0, zfunc.init(program))
    assert first == in_debug_mode == of_another
    assert checks(3, state)[1] == 0  # each has its own

    region = next(r for r in other.buffers.memory if r.role == "state" and not r.buffer.startswith("master"))
    buffer = other.buffers.memory[region]
    other.buffers.memory[region] = buffer.double()
    with pytest.raises(ExecutionError, match=rf"{region.buffer}: got float64, expected"):
        checks(1, other)


@pytest.mark.parametrize("name", ["fp32", "groups, 8 bits"])
def test_an_update_of_several_runs_is_one_call_of_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bits of an optimizer whose `host_update` is another's, so that each run is a call of its own."""
    kernel, calls = zfunc.optim.updates.cpu_adam, list[int]()
    settings: dict[str, Any] = {"weight_decay": 0.1, "decay": matrices_only}

    def seen(of: Callable[..., None], count: Callable[..., int]) -> Callable[..., None]:
        return lambda *args: (calls.append(count(*args)), of(*args))[1]

    spied: Any = ModuleType("spied")
    spied.__dict__.update(vars(kernel))
    spied.update, spied.update_runs = seen(kernel.update, lambda *_: 1), seen(kernel.update_runs, len)
    monkeypatch.setattr("zfunc.optim.updates.cpu_adam", spied)

    def trained_with(optimizer: Any) -> tuple[dict[str, Tensor], list[int]]:
        calls.clear()
        program, batch = trained.compiled("odd sizes", **adam_of(**{**NUMBERS[name], "optimizer": optimizer}))
        state, _ = zfunc.train_step(program, zfunc.init(program), batch(0))
        assert {len(x.runs) for x in program.cache.prepared[state.buffers].values()} != {1}
        return flats(state, "params", "state"), [*calls]

    class Alone(zfunc.AdamW):
        def host_update(self, *args: Any, **how: Any) -> None:
            super().host_update(*args, **how)

    together, at_once = trained_with(zfunc.AdamW(1e-2, **settings))
    single, each = trained_with(Alone(1e-2, **settings))
    assert max(at_once) > 1 == max(each)
    assert len(at_once) < len(each) == sum(at_once)
    assert together
    assert all(torch.equal(x, single[buffer]) for buffer, x in together.items())


def test_what_an_update_was_prepared_with_is_freed_with_its_state() -> None:
    program, batch = compiled(zfunc.AdamW())
    state, _ = zfunc.train_step(program, zfunc.init(program), batch(0))
    memory = [weakref.ref(x) for x in state.buffers.memory.values() if isinstance(x, Tensor)]
    assert program.cache.prepared[state.buffers]
    del state
    gc.collect()
    assert not program.cache.prepared
    assert not any(x() is not None for x in memory)
