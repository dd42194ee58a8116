"""Every optimizer, and one of one's own: a value with the protocol's methods, and a row of state buffers."""

from collections.abc import Mapping
from importlib import import_module
from inspect import isabstract
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from small_models import MODELS, bits, flats
from torch import Tensor

import zfunc
import zfunc.optim
from zfunc.core.decision import StepDecision
from zfunc.core.hardware import ROUND
from zfunc.core.memory_model import peak_memory
from zfunc.core.optimizer_state import STATE_FORMATS, StateBuffer
from zfunc.engine.compile.program import Program
from zfunc.errors import CheckpointError
from zfunc.optim.base import Optimizer

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped, in 2": {"clip_norm": 0.5, "micro_batches": 2},
    "deferred": {"clip_norm": 0.5, "defer": True},
    "on the device": {"offload_ratio": 0.0},
    "half on the device, in 16 bits": {"offload_ratio": 0.5, "precision": "bf16"},
    "from the host": {"params_on": "host", "precision": "bf16"},
}
MOMENTUM = "momentum"


@frozen
class Momentum:
    """SGD with momentum, as `torch.optim.SGD` writes it."""

    lr: float = 0.01
    momentum: float = 0.9

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        return len(shape) > len(name)  # never

    def state_format(self, group: int) -> str:
        assert group == 0
        return MOMENTUM

    def factors(self, step: int) -> dict[str, Any]:
        return {"lr": self.lr / step}

    def describe(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def host_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        out: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        assert group == 0
        new = state if into is None else into
        new["buf"].copy_(state["buf"] * self.momentum + grad.float() * decision.grad_scale)
        new["master"].copy_(state["master"] - decision.factors["lr"] * new["buf"])
        if out is not None:
            out.copy_(new["master"])

    device_update = host_update

    def device_workspace(self, numel: int) -> int:
        return 16 * numel

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int
    ) -> Mapping[str, Tensor]:
        if group or state_format != "fp32":
            raise CheckpointError(f"step {step}: no momentum from {state_format}")
        return {"master": state["master"], "buf": -state["exp_avg"]}


OPTIMIZERS: dict[str, Any] = {
    "Momentum": Momentum(),
    "AdamW": zfunc.AdamW(),
    "SGD": zfunc.SGD(0.1, weight_decay=0.1, decay=zfunc.matrices_only),
    "SGD with momentum": zfunc.SGD(0.1, momentum=0.9, moments="16bit"),
    "Lion": zfunc.Lion(lr=lambda step: 0.01 / step, weight_decay=0.1),
    "Adagrad": zfunc.Adagrad(0.1, moments="8bit"),
    "Adafactor": zfunc.Adafactor(0.1, weight_decay=0.1, moments="16bit"),
    "groups": zfunc.groups(
        ("*.weight", zfunc.AdamW(1e-2, weight_decay=0.1)),
        ("*.bias", zfunc.SGD(lambda step: 0.1 / step, momentum=0.9, nesterov=True)),
        zfunc.Lion(1e-3),
    ),
    "Muon": zfunc.groups((zfunc.matrices_only, zfunc.Muon(lambda step: 0.1 / step)), zfunc.AdamW()),
}


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = StateBuffer("master", "fp32"), StateBuffer("buf", "fp32")
    monkeypatch.setitem(STATE_FORMATS, MOMENTUM, buffers)


def compiled(optimizer: Any = Momentum(), **settings: Any) -> tuple[Program, Any]:
    segments, data = MODELS["odd sizes"]()
    settings = {"precision": "fp32", "bucket_size": 300, "device": "cpu", **settings}
    return zfunc.compile(segments, optimizer=optimizer, **settings), data


def test_every_optimizer_of_zfunc_is_in_the_table() -> None:
    modules = [import_module(m.name) for m in iter_modules(zfunc.optim.__path__, "zfunc.optim.")]
    classes = [
        x for m in modules for x in vars(m).values() if isinstance(x, type) and x.__module__ == m.__name__
    ]
    optimizers = {x for x in classes if hasattr(x, "host_update") and not isabstract(x)} - {Optimizer}
    members = (x for made in OPTIMIZERS.values() for x in (made, *getattr(made, "optimizers", ())))
    assert {type(optimizer) for optimizer in members} == optimizers | {Momentum}


ROWS = [*zip([*OPTIMIZERS] * 2, [*SETTINGS] * 2, strict=False)]
REST = [pytest.param(*x, marks=pytest.mark.slow) for x in product(OPTIMIZERS, SETTINGS) if x not in ROWS]


@pytest.mark.parametrize(("name", "settings"), [*dict.fromkeys(ROWS), *REST])
def test_it_trains_alike_under_any_schedule_and_goes_on_from_a_checkpoint(
    name: str, settings: str, tmp_path: Path
) -> None:
    ends, optimizer = [], OPTIMIZERS[name]
    for schedule in ("Serial", "Overlapped"):
        program, data = compiled(optimizer, schedule=schedule, **SETTINGS[settings])
        state = zfunc.init(program, seed=1)
        for i in range(4):
            state, metrics = zfunc.train_step(program, state, data(i), save=tmp_path / schedule, debug=True)
        assert metrics.lr == optimizer.factors(4)["lr"]
        assert metrics.saved is not None
        assert metrics.saved.path is not None
        resumed = zfunc.load(metrics.saved.path, program)
        resumed, _ = zfunc.train_step(program, resumed, data(3))
        assert all(map(torch.equal, bits(resumed), bits(state)))
        ends.append(state)
    assert all(map(torch.equal, *map(bits, ends)))


def test_momentum_is_the_sgd_of_torch() -> None:
    """One buffer of the whole model, and its gradient read from the momentum: only the update is compared."""
    program, data = compiled(bucket_size=1 << 20)
    state = zfunc.init(program, seed=1)
    kept = {name: x.clone() for name, x in state.buffers.state(0).items()}
    theirs = kept["master"].requires_grad_()
    sgd = torch.optim.SGD([theirs], lr=1.0, momentum=0.9)
    for i in range(3):
        before = state.buffers.state(0)["buf"].clone()
        state, metrics = zfunc.train_step(program, state, data(i))
        ours = state.buffers.state(0)
        theirs.grad, sgd.param_groups[0]["lr"] = ours["buf"] - 0.9 * before, metrics.lr
        sgd.step()
        torch.testing.assert_close(ours["master"], theirs.detach())


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Momentum", "plain"), ("groups", "clipped, in 2"), ("Adafactor", "deferred"), *REST],
)
def test_it_is_planned_as_it_is_compiled(name: str, settings: str) -> None:
    segments, data = MODELS["odd sizes"]()
    on = evolve(ROUND, memory={"host": 1}, unified=True)  # so that everything that may save memory is tried
    usual = {"precision": "fp32", "bucket_size": 300, **SETTINGS[settings]}
    p = zfunc.plan(segments, data(0), optimizer=OPTIMIZERS[name], hardware=on, **usual)
    program, _ = compiled(OPTIMIZERS[name], example=data(0), **SETTINGS[settings])
    assert p.memory == {tier: peak.nbytes for tier, peak in peak_memory(program.plan).items()}
    if name in ("Momentum", "groups"):  # whose state has one format, and several
        assert any("moments" in x.changes for x in p.suggestions) == (name == "groups")
    if name == "Adafactor":  # whose state of 8 bits is that of 16
        assert not any("moments" in x.changes for x in p.suggestions)


def test_it_has_no_choice_of_moments() -> None:
    with pytest.raises(ValueError, match="got '8bit' with Momentum, whose state is in the format 'momentum'"):
        compiled(moments="8bit")


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
