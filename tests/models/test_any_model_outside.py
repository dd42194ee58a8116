"""What a training loop sets after a model was cut, which has no effect, is told or refused; and nothing else is."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import copy_context
from functools import cache, partial
from threading import Lock, Thread
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from any_models import MODELS
from module_law import CLOSE, WAYS, check
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

import zfunc
from zfunc.engine.trace.graph_cuts import alone
from zfunc.errors import SettingError


class Annealed(nn.Module):
    """A model with a number that a training loop may set; `whole` of one segment."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.weight, self.whole = 1.0, whole
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.weight * (x * torch.func.grad(torch.sum)(x) if self.whole else x)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_set_after_the_cut_is_told_once(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of the model, a block of it and the loss."""
    torch.manual_seed(0)
    model, loss, data = Annealed(whole), nn.CrossEntropyLoss(), (torch.randn(4, 8), torch.arange(4))
    model.config = LlamaConfig()
    segments = zfunc.segments(model, data, loss)
    assert (len(segments) == 1) == whole
    program = zfunc.compile(segments)
    state = zfunc.init(program, seed=0)
    changes: dict[str, tuple[Any, str, Any, Any]] = {  # what is set to what, and was
        "": (model, "weight", 1.0, 1.0),
        "layers.2.weight": (model.layers[2].weight, "requires_grad", False, True),
        "model.weight (1.0, then 0.5)": (model, "weight", 0.5, 1.0),
        "model.layers.1.training": (model.layers[1], "training", False, True),
        "loss.label_smoothing (0.0, then 0.1)": (loss, "label_smoothing", 0.1, 0.0),
        "attribute model.config": (model.config, "rms_norm_eps", 0.1, 1e-6),
    }
    for name, (owner, attribute, value, former) in changes.items():
        caplog.clear()
        setattr(owner, attribute, value)
        for _ in range(2):
            state, _ = zfunc.train_step(program, state, data)
        setattr(owner, attribute, former)
        told = [r.getMessage() for r in caplog.records if "after the segment was made" in r.getMessage()]
        assert [name in x for x in told] == [True] * bool(name), told


def test_a_parameter_that_the_loss_does_not_read_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It stays as it is, and a fixed one is expected to."""
    model = Annealed(False)
    model.idle, model.fixed = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
    zfunc.segments(model, (torch.randn(4, 8), torch.arange(4)), nn.CrossEntropyLoss())
    llama, *_ = MODELS["Llama"]()
    llama.idle, llama.fixed = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
    zfunc.hf.segments(llama)
    told = [r.getMessage() for r in caplog.records if "no path from the loss" in r.getMessage()]
    assert [x.startswith("idle.weight, idle.bias: ") for x in told] == [True, True]


class Settings:
    """What code may read besides its arguments; a `step` that only a training loop reads."""

    def __init__(self) -> None:
        self.beta, self.step = 1.0, 0

    def value(self) -> float:
        return self.beta

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(y, targets) * self.value()


SMOOTHING, BETAS, LENGTHS, SETTINGS = 0.0, {"beta": 1.0, "step": 0}, {}, Settings()
CALLS, HEATS = {"number": 0}, [Settings() for _ in range(3)]
NAMED, GIVEN, OWNER = (
    SimpleNamespace(beta=1.0, step=0, inner=SimpleNamespace(beta=1.0)),
    Settings(),
    Settings(),
)
CRITERION, READ = nn.CrossEntropyLoss(), ModuleType("read")
READ.BETA = READ.STEP = 1.0  # type: ignore[attr-defined]
READ.READ = READ  # type: ignore[attr-defined]  # packages import their parts, which import them


def scaled(x: Tensor) -> Tensor:
    return x * 1.0


def heated(heat: Settings) -> Callable[..., Tensor]:
    return lambda _, __, y: y * heat.beta


def reading_outside() -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[float], None]]:
    """A loss that reads all of these, and what sets a variable that it closes over."""
    warmth = 1.0

    def set_warmth(value: float) -> None:
        nonlocal warmth
        warmth = value

    def loss(given: Settings, y: Tensor, targets: Tensor) -> Tensor:
        LENGTHS[len(y)] = len(y)  # a cache
        CALLS["number"] += 1
        kept = sum(F.cross_entropy(y, targets, label_smoothing=SMOOTHING) for _ in range(2))
        kept = kept * BETAS["beta"] * SETTINGS.value() * NAMED.inner.beta * READ.BETA * given.beta
        return kept + CRITERION(scaled(y) / warmth, targets) + OWNER.loss(y, targets)

    return partial(loss, GIVEN), set_warmth


def test_what_changes_outside_after_the_cut_is_refused_or_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    (loss, set_warmth), model = reading_outside(), Annealed(whole=False)
    model.settings = Settings()  # type: ignore[assignment]
    for layer, heat in zip(model.layers, HEATS, strict=True):
        layer.register_forward_hook(heated(heat))

    def data(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 8), torch.arange(rows)

    program = zfunc.compile(zfunc.segments(model, data(4), loss))
    state, own = zfunc.init(program, seed=0), globals()
    beta = {"beta": 0.5}
    changes: dict[str, Callable[[], Any]] = {
        "global SMOOTHING (0.0, then 0.1), ": lambda: monkeypatch.setitem(own, "SMOOTHING", 0.1),
        "closure variable warmth (1.0, then 2.0), ": lambda: set_warmth(2.0),
        "global READ.BETA (1.0, then 0.5), ": lambda: monkeypatch.setattr(READ, "BETA", 0.5),
        "global BETAS": lambda: BETAS.update(beta=0.5),
        "global SETTINGS": lambda: vars(SETTINGS).update(beta),
        "global NAMED": lambda: vars(NAMED.inner).update(beta),
        "attribute of partial": lambda: vars(GIVEN).update(beta),
        "global OWNER": lambda: vars(OWNER).update(beta),
        "global CRITERION": lambda: vars(CRITERION).update(label_smoothing=0.1),
        "closure variable heat of heated.": lambda: vars(HEATS[1]).update(beta),
        "attribute model.settings": lambda: vars(model.settings).update(beta),
    }
    nothing: list[Callable[[], Any]] = [
        lambda: [vars(x).update(step=1) for x in (SETTINGS, NAMED, GIVEN, OWNER)],
        lambda: (BETAS.update(step=1), monkeypatch.setattr(READ, "STEP", 2.0)),
        lambda: monkeypatch.setitem(
            own, "scaled", FunctionType(scaled.__code__, own)
        ),  # as by its cell run again
    ]
    for rows, change in enumerate((lambda: None, *nothing), start=3):
        change()
        state, _ = zfunc.train_step(program, state, data(rows))
        zfunc.evaluate(program, state, data(rows))
    assert not caplog.messages
    for name, change in changes.items():
        change()
        with pytest.raises(ValueError, match=re.escape(name)) if "(" in name else nullcontext():
            for _ in range(2):
                state, _ = zfunc.train_step(program, state, data(4))
        assert [name in x for x in caplog.messages] == [True] * ("(" not in name), (name, caplog.messages)
        caplog.clear()
        monkeypatch.undo()
        set_warmth(1.0)
        for x in (SETTINGS, NAMED.inner, GIVEN, OWNER, *HEATS):
            x.beta = 1.0
        BETAS["beta"], CRITERION.label_smoothing = 1.0, 0.0


def test_classes_of_one_name_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """What was set in the first was not noticed."""

    def kind() -> Any:
        class Scaled(nn.Linear):
            scale = 1.0

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * self.scale

        return Scaled

    kinds, data = (kind(), kind()), (torch.randn(4, 8), torch.randn(4, 8))
    program = zfunc.compile(zfunc.segments(nn.Sequential(*(x(8, 8) for x in kinds)), data, F.mse_loss))
    state, _ = zfunc.train_step(program, zfunc.init(program), data)
    kinds[0].scale = 2.0
    zfunc.train_step(program, state, data)
    assert "class attribute Scaled.scale" in caplog.text


class Trainer:
    """An object with a loss that reads the model, and with what cannot be copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rate, self.lock = model, 0.1, Lock()

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        norms = [
            F.linear(torch.ones(1, 8), p).square().mean() for p in self.model.parameters() if p.dim() > 1
        ]
        return F.mse_loss(y, targets) + self.rate * sum(norms)


def trained(
    segments: tuple[zfunc.Segment, ...], way: str, plain: nn.Module, loss: Any, data: tuple[Tensor, Tensor]
) -> Iterator[tuple[Any, Any, Any]]:
    """Train three steps in one of `WAYS`, and the module `plain`, which has the same weights, with its `loss` by
    PyTorch; yield the program, the State and the metrics of each step, whose loss is that of `plain`."""
    program = zfunc.compile(
        segments, optimizer=zfunc.SGD(lr=0.1), precision="fp32", device="cpu", **WAYS[way]
    )
    state, optimizer = zfunc.init(program), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        state, metrics = zfunc.train_step(program, state, data)
        optimizer.zero_grad()
        expected = loss(plain(data[0]), data[1])
        expected.backward()
        optimizer.step()
        assert metrics.loss == pytest.approx(expected.item(), rel=CLOSE)
        yield program, state, metrics


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_closes_over_the_model_trains_it(way: str) -> None:
    """Gradients of what it reads were lost."""
    torch.manual_seed(0)
    data = torch.randn(4, 8), torch.randn(4, 8)
    for kind in ("method", "closure"):
        model, plain = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        trainer = Trainer(model)
        loss = trainer.loss if kind == "method" else lambda y, t, trainer=trainer: trainer.loss(y, t)
        segments = zfunc.segments(model, data, loss)
        for _, _, metrics in trained(segments, way, plain, Trainer(plain).loss, data):
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
            assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-5)


class Cooling(nn.Module):
    """Blocks with running statistics, a constant, and a temperature that forward lowers, in place or `assigned`."""

    def __init__(self, assigned: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.register_buffer("temperature", torch.tensor(2.0))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))
        self.assigned = assigned

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.assigned:
            self.temperature = self.temperature * 0.9
        elif self.training:
            self.temperature.mul_(0.9)
        return x


BUFFERS: dict[
    str, Callable[[Any], Callable[[Tensor, Tensor], Tensor]]
] = {  # losses of a model that they read
    "a number": lambda m: lambda y, t: F.mse_loss(y / m.temperature, t),
    "statistics": lambda m: (
        lambda y, t: F.mse_loss(y, t) + m.blocks[0][1].running_var.mean() + m.table[:].sum()
    ),
    "the model called again": lambda m: lambda y, t: F.mse_loss(y, t) + F.mse_loss(m(t), y),
}


@pytest.mark.parametrize(
    ("kind", "assigned", "way"),
    [(0, False, "host"), (0, True, "device"), (1, False, "device"), (2, False, "host")],
)
def test_a_loss_reads_the_buffers_of_the_model_that_it_closes_over(
    kind: int, assigned: bool, way: str
) -> None:
    """It read those of the user's model, which no step changes."""
    torch.manual_seed(0)
    data, of = (torch.randn(4, 8), torch.randn(4, 8)), [*BUFFERS.values()][kind]
    model, plain = Cooling(assigned), Cooling(assigned)
    plain.load_state_dict(model.state_dict())
    segments = zfunc.segments(model, data, of(model))
    *_, (program, state, _) = trained(segments, way, plain, of(plain), data)
    mine, tensors = {**zfunc.params(program, state), **zfunc.buffers(program, state)}, plain.state_dict()
    torch.testing.assert_close(mine, {x: tensors[x] for x in mine}, rtol=1e-5, atol=CLOSE)


TABLES = dict[int, Tensor]()


@cache
def table(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size)


class Lazy(dict[int, Tensor]):
    """A cache whose values are made as they are asked for."""

    def values(self) -> Iterator[Tensor]:  # type: ignore[override]
        yield from super().values()


class Angles:
    """An object that makes a tensor when it is first asked for."""

    made: Tensor | None = None
    of_class: ClassVar[Tensor | None] = None

    def __call__(self, size: int) -> Tensor:
        self.made = torch.linspace(0, 1, size) if self.made is None else self.made
        return self.made


ANGLES = Angles()


@cache
def angles(size: int) -> Angles:
    (own := Angles())(size)
    return own


class Caching(Annealed):
    """It keeps constants in globals, in classes, and in what functools.cache returns."""

    rows: ClassVar = Lazy()

    def forward(self, x: Tensor) -> Tensor:
        for kept in (TABLES, self.rows):
            if len(x) not in kept:
                kept[len(x)] = torch.ones(len(x), 1)
        if Angles.of_class is None:
            Angles.of_class = torch.ones(8)
        own = angles(8)(8) + ANGLES(8) + Angles.of_class
        return super().forward(x * own * table(8) * TABLES[len(x)] * self.rows[len(x)])


def test_caches_of_the_user_keep_no_tensors_of_traces() -> None:
    """The user's own call got them from there, and so did the trace of an evaluation, which was refused."""
    torch.manual_seed(0)
    model, data = Caching(whole=False), (torch.randn(4, 8), torch.randn(4, 8))
    table.cache_clear()
    kept = table(3)
    program = zfunc.compile(zfunc.segments(model, data, F.mse_loss), precision="fp32", device="cpu")
    state = zfunc.init(program)
    zfunc.evaluate(program, state, tuple(t[:3] for t in data))
    assert table.cache_info().currsize == 1
    assert table(3) is kept
    assert not TABLES
    assert not Caching.rows
    assert (ANGLES.made, Angles.of_class, angles.cache_info().currsize) == (None, None, 0)
    expected = F.mse_loss(model(data[0]), data[1]).item()
    assert zfunc.evaluate(program, state, data) == pytest.approx(expected, rel=CLOSE)
    TABLES.clear()


class Seen:
    """What a hook keeps of blocks, until the loss has taken it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def keep(self, _: nn.Module, __: Any, y: Tensor) -> None:
        self.tensors.append(y)


class Keeping(nn.Module):
    """Blocks of which a number, a list, a deque and an object of a hook keep tensors; a list of their weights; and
    an object that has a tensor before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.balance, self.parts, self.seen = 0.0, [], Seen()
        self.last, self.angles = deque[Tensor](maxlen=2), angles(8)
        self.weights = [block.weight for block in self.blocks]
        for block in self.blocks:
            block.register_forward_hook(self.seen.keep)

    def forward(self, x: Tensor) -> Tensor:
        self.parts.clear()
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.parts.append(x.square().mean())
            self.last.append(x)
        self.balance = torch.stack(self.parts).prod()
        return x * self.angles(8) + 0.1 * sum(w.square().mean() for w in self.weights)

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        taken = torch.stack(self.seen.tensors).square().mean()
        self.seen.tensors.clear()
        loss = F.mse_loss(y, targets) + self.balance + sum(self.parts) + self.last[0].mean()
        return loss + taken * (2 if self.training else 1)


@pytest.mark.parametrize("way", [pytest.param(x, marks=[pytest.mark.slow] * (x != "host")) for x in WAYS])
def test_a_loss_reads_what_forward_has_kept_in_the_model(way: str) -> None:
    """It read what the user's model had at the cut, which forward of a copy does not set."""
    torch.manual_seed(0)
    data, model, plain = (torch.randn(4, 8), torch.randn(4, 8)), Keeping(), Keeping()
    plain.load_state_dict(model.state_dict())
    segments = zfunc.segments(model, data, lambda y, t: model.loss(y, t))
    for program, state, _ in trained(segments, way, plain, plain.loss, data):
        torch.testing.assert_close(
            zfunc.params(program, state), dict(plain.named_parameters()), rtol=1e-5, atol=CLOSE
        )
    expected = plain.eval().loss(plain(data[0]), data[1]).item()
    assert zfunc.evaluate(program, state, data) == pytest.approx(expected, rel=CLOSE)
    assert (model.balance, model.parts, model.seen.tensors, *model.last) == (0.0, [], [])


def test_a_loss_that_would_keep_first_values_of_the_model_is_refused() -> None:
    """Views and detached tensors of parameters or of written buffers, which share memory in plain PyTorch; read in
    one operation with the parameter itself, too."""
    data, model = (torch.randn(4, 8), torch.randn(4, 8)), Cooling(assigned=False)
    weight: Any = model.blocks[0][0].weight
    kept = {
        "blocks.0.0.weight": (weight.T, weight.detach()[0], weight.data),
        "temperature": (model.temperature[None],),
    }
    for name, views in kept.items():
        for view in views:
            with pytest.raises(SettingError, match=f"a view of '{name}' that was made before, read at "):
                zfunc.segments(model, data, lambda y, t, view=view: F.mse_loss(y, t) + (weight * view).sum())
    for same in (weight.detach().clone(), model.table[2:]):
        zfunc.segments(model, data, lambda y, t, same=same: F.mse_loss(y, t) + same.sum())
    with pytest.raises(SettingError, match="a tuple from it, expected a scalar tensor"):
        zfunc.segments(model, data, lambda y, t: (F.mse_loss(y, t), {}))  # type: ignore[arg-type]


def test_an_evaluation_that_is_traced_does_not_hold_up_the_trace_of_a_step() -> None:
    """Each held a lock that the other waited for, for ever."""
    data, model = (torch.randn(4, 8), torch.randn(4, 8)), Annealed(whole=False)
    program = zfunc.compile(zfunc.segments(model, data, F.mse_loss), precision="fp32", device="cpu")
    state, other, few = zfunc.init(program), zfunc.init(program), tuple(t[:3] for t in data)
    evaluation = Thread(target=zfunc.evaluate, args=(program, other, few), daemon=True)
    with alone():
        evaluation.start()
        evaluation.join(0.5)  # waits for `alone`
        step = partial(zfunc.train_step, program, state, few)
        step = Thread(target=copy_context().run, args=(step,), daemon=True)
        step.start()
        step.join(60)
        assert not step.is_alive()
    evaluation.join(60)
    assert not evaluation.is_alive()


def test_a_compiled_function_in_forward_is_traced_as_it_was_before() -> None:
    """Its code crashed on tensors without memory."""

    def compiles(*_: Any) -> Any:
        raise AssertionError

    compiled = torch.compile(lambda x: x * torch.sigmoid(x), backend=compiles)
    torch.manual_seed(0)
    model = Annealed(whole=False)
    model.layers[1].register_forward_hook(lambda _, __, y: compiled(y))
    data, eager = (torch.randn(4, 8), torch.randn(4, 8)), Annealed(whole=False)
    eager.load_state_dict(model.state_dict())
    eager.layers[1].register_forward_hook(lambda _, __, y: y * torch.sigmoid(y))
    check(zfunc.segments(model, data, F.mse_loss), eager, data, F.mse_loss)
