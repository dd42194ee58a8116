"""A segment is a function: what changes between two calls is refused by name, and so is what would be ignored."""

import copy
import itertools
import logging
import random
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_models import Apply
from small_models import Loss, regression
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfunc

SCALE, EMBEDDING = 1.0, nn.Embedding(5, 8, max_norm=1.0)


def hand_made(name: str, body: Callable[[Tensor], Tensor]) -> zfunc.Segment:
    """A segment without parameters, made of a function."""
    return zfunc.Segment(name, lambda p, x: body(x), (), (), initial=lambda _: {})


def program_of(first: zfunc.Segment | nn.Module, **settings: Any) -> Any:
    if isinstance(first, nn.Module):
        first = zfunc.segment("s", first)
    torch.manual_seed(0)
    segments = [first, zfunc.segment("body", nn.Linear(8, 8)), zfunc.segment("loss", Loss(8))]
    return zfunc.compile(segments, **{"device": "cpu", "precision": "fp32", **settings})


def step(program: Any) -> float:
    return zfunc.train_step(program, zfunc.init(program), regression(4)(0))[1].grad_norm


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls % 7 == 0 else x


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Tanh(), Calls())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Rolls(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x * self.generator.random()


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + getattr(self, "last", 0)
        self.last = x * 1
        return y


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "total"):
            self.total = torch.zeros(8)
        return x + self.total.add_(1)


def counts_in_closure() -> zfunc.Segment:
    count = 0

    def body(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * (1 + count)

    return hand_made("s", body)


def takes_turns() -> zfunc.Segment:
    turns = itertools.cycle([torch.sin, torch.cos])
    return hand_made("s", lambda x: next(turns)(x))


def makes_constants() -> zfunc.Segment:
    def body(x: Tensor) -> Tensor:
        nonlocal n
        n = [n[0] + 1]
        return x * torch.tensor(float(n[0]))

    n = [0]
    return hand_made("s", body)


def numpys_global(method: str) -> zfunc.Segment:
    return hand_made("s", lambda x: x + torch.from_numpy(getattr(np.random, method)(size=8)).to(x.dtype))


IMPURE: dict[str, tuple[Callable[[], Any], str]] = {
    "a counter": (Calls, r"attribute calls \(1, then 2\), which changes from call"),
    "a counter inside": (Inside, r"attribute block\.1\.calls \(1, then 2\)"),
    "a closure": (counts_in_closure, r"closure variable count \(1, then 2\)"),
    "an iterator": (takes_turns, r"another operation number 0 \(aten.cos.default, then aten.sin.default\)"),
    "a constant made anew": (makes_constants, r"another tensor in operation number \d+ \(aten"),
    "a generator": (
        lambda: Rolls(random.Random(0)),
        r"another number \(0\.75.*, then 0\.42.*\) in operation number 0 \(aten.mul",
    ),
    "NumPy's generator": (lambda: Rolls(np.random.default_rng(0)), r"another number \(0\.\d+, then 0\.\d+\)"),
    "numpy.random": (lambda: numpys_global("normal"), "random numbers from numpy.random"),
    "a choice": (
        lambda: hand_made("s", lambda x: x * random.choice([1, 1])),
        "random numbers from Python's random",
    ),
    "the last input": (
        Keeps,
        r"another tensor in operation number 0 \(aten.add.Tensor\), perhaps .* attribute last",
    ),
    "an embedding with max_norm": (
        lambda: Apply(lambda self, x: x + self.inner(torch.zeros(1, dtype=torch.int64)), inner=EMBEDDING),
        "an in-place change.*leave out max_norm",
    ),
    "requires_grad_": (
        lambda: Apply(lambda self, x: self.inner(x) + torch.zeros(8).requires_grad_(), inner=nn.Linear(8, 8)),
        r"an error on inputs .*call Tensor\.requires_grad_\(\)",
    ),
    "a sum": (Sums, r"an in-place change \(aten.add_.Tensor\) of attribute total"),
    "a buffer replaced": (Average, r"an assignment to 'mean' in forward"),
}


@pytest.mark.parametrize(("make", "message"), IMPURE.values(), ids=list(IMPURE))
def test_a_change_between_two_calls_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"segment 's': got {message}") as raised:
        step(program_of(make()))
    assert "expected" in str(raised.value)


class Settles(nn.Module):
    """Sets itself up in the first call, keeps what it last saw, reads constants, and draws from torch."""

    table = (0.5, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "width"):
            self.width = torch.ones(1).numel() + x.shape[-1]
        self.seen = x.detach()
        scale = torch.from_numpy(np.full(8, SCALE, np.float32)) + torch.tensor(self.table[0])
        return F.dropout(x * scale, 0.5) / self.width


class Counts(nn.Module):
    """Keeps a record that no operation depends on."""

    calls, seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        self.seen.append(Counts.calls)
        return x * 1


@pytest.mark.parametrize("make", [Settles, Counts])
def test_what_changes_no_operation_is_accepted(make: Callable[[], nn.Module]) -> None:
    assert step(program_of(make())) > 0


@pytest.mark.parametrize("recompute", ["all", "none", "min-cut"])
def test_a_trace_calls_forward_three_times(recompute: str) -> None:
    """Twice to see that both calls are alike, once for the graphs of all passes; and in no later step."""
    calls: list[str] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        calls.append("")
        return torch.tanh(self.inner(x))

    segments = [zfunc.segment(name, Apply(forward, inner=nn.Linear(8, 8))) for name in ("one", "other")]
    program = zfunc.compile(
        [*segments, zfunc.segment("loss", Loss(8))], recompute=recompute, device="cpu", precision="fp32"
    )
    for _ in range(2):
        step(program)
        assert len(calls) == 2 * 3, "two traces, as backward of the first gives no gradient of its input"


@pytest.mark.parametrize("draw", [random.random, np.random.standard_normal])
def test_another_thread_may_draw(draw: Callable[[], float]) -> None:
    program, stop = program_of(nn.Tanh()), threading.Event()

    def draws() -> None:
        while not stop.wait(1e-4):
            draw()

    thread = threading.Thread(target=draws)
    thread.start()
    try:
        for rows in range(1, 4):
            zfunc.train_step(program, zfunc.init(program), regression(rows)(0))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("recompute", ["all", "none"])
def test_a_change_between_two_steps_is_refused_by_name(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmth = 1.0
    program = program_of(hand_made("s", lambda x: x * warmth * SCALE), recompute=recompute)
    state = zfunc.init(program)
    state, _ = zfunc.train_step(program, state, regression(4)(0))
    for change in ("closure variable warmth", "global SCALE"):
        warmth = 0.5 if "warmth" in change else 1.0
        monkeypatch.setitem(globals(), "SCALE", 1.0 if "warmth" in change else 0.5)
        with pytest.raises(
            ValueError, match=rf"segment 's': got {change} \(1\.0, then 0\.5\), changed since"
        ):
            zfunc.train_step(program, state, regression(4)(0))
    warmth = 1.0
    monkeypatch.undo()
    zfunc.train_step(program, state, regression(4)(0))


# --- the module that a segment was made of ---------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * self.weight + self.shift)


def test_an_attribute_is_no_global_of_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as `weight` of a module in a script whose loop has a variable `weight`."""
    program = program_of(zfunc.segment("s", Dropped()))
    state = zfunc.init(program)
    for value in (1, 2, [3]):
        monkeypatch.setitem(globals(), "weight", value)
        state, _ = zfunc.train_step(program, state, regression(4)(0))
    assert "changed" not in caplog.text


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (lambda m: setattr(m.drop, "p", 0.0), r"attribute drop.p \(0.5, then 0.0\)"),
    "eval": (lambda m: m.eval(), r"attribute training \(True, then False\)"),
    "a buffer": (lambda m: m.shift.add_(1), "attribute shift changed"),
    "a parameter": (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(8))), "attribute weight changed"),
    "frozen": (lambda m: m.weight.requires_grad_(False), "attribute weight changed"),
    "a child": (lambda m: setattr(m, "drop", nn.Tanh()), "attribute drop "),
    "a hook": (lambda m: m.drop.register_forward_hook(lambda *_: None), "drop._forward_hooks"),
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=list(CHANGES))
def test_a_later_change_of_the_module_is_logged(
    change: Callable[[Any], Any], message: str, planned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = Dropped()
    program = program_of(module, **{"example": regression(4)(0)} if planned else {})
    change(module)
    with caplog.at_level(logging.WARNING, "zfunc"):
        step(program)
        step(program)
    (warning,) = [
        r.getMessage() for r in caplog.records if "changed after the segment was made" in r.getMessage()
    ]
    assert warning.startswith("segment 's': ")
    assert message.replace("\\", "") in warning


SETTINGS, TABLE = {"warmth": 1.0}, torch.ones(8)


class Rate:
    now = 1.0


LATER: dict[str, tuple[Callable[[Any], Any], str]] = {
    **CHANGES,
    "an attribute of its own": (lambda m: setattr(m, "warmth", 3.0), r"attribute warmth \(2.0, then 3.0\)"),
    "an item of a dict": (lambda m: m.kept.update(one=3), "attribute kept"),
    "an attribute of an object": (lambda m: setattr(m.config, "power", 2), "attribute config"),
    "what an object holds": (lambda m: m.config.table.update(one=3), "attribute config"),
    "values": (lambda m: m.weight.detach().mul_(2), "the values of s.weight changed"),
    "an item of a global": (lambda m: SETTINGS.update(warmth=5.0), "global SETTINGS"),
    "the class": (lambda m: setattr(Warm, "power", 2), "class attribute Warm.power"),
    "a global tensor": (lambda m: TABLE.add_(0), "global TABLE"),
    "a global class": (lambda m: setattr(Rate, "now", 2.0), "global Rate"),
}


class Warm(Dropped):
    power = 1

    def __init__(self) -> None:
        super().__init__()
        self.warmth, self.kept = 2.0, {"one": 1}
        self.config = SimpleNamespace(power=1, table={})

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(x * self.warmth) ** self.power

    def _scaled(self, x: Tensor) -> Tensor:
        return super().forward(x * SETTINGS["warmth"] * Rate.now + TABLE)


def warning_of(caplog: pytest.LogCaptureFixture, *changes: Callable[[Any], Any]) -> str:
    """The one warning of five steps of a Warm, to which `changes` are made after the second step and those that
    follow: it comes after the last."""
    module = Warm()
    program = program_of(module)
    state, batch = zfunc.init(program), regression(4)(0)
    with caplog.at_level(logging.WARNING, "zfunc"):
        for i in range(5):
            state, _ = zfunc.train_step(program, state, batch)
            if 0 < i <= len(changes):
                assert not caplog.records
                changes[i - 1](module)
    (warning,) = [r.getMessage() for r in caplog.records]
    return warning


@pytest.mark.parametrize(("change", "message"), LATER.values(), ids=list(LATER))
def test_a_change_after_the_first_step_is_logged_once(
    change: Callable[[Any], Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    warning = warning_of(caplog, change)
    SETTINGS["warmth"], Warm.power, Rate.now = 1.0, 1, 1.0
    assert message.replace("\\", "") in warning


@pytest.mark.parametrize(("replaced", "way"), [("kept", "an item of a dict"), ("drop", "an attribute")])
def test_a_change_in_what_has_replaced_its_equal_is_logged(
    replaced: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """To replace it is no change, and a look sees that it was."""
    change, message = LATER[way]
    warning = warning_of(caplog, lambda m: setattr(m, replaced, copy.copy(getattr(m, replaced))), change)
    assert message.replace("\\", "") in warning


def test_new_values_of_parameters_are_used_silently(caplog: pytest.LogCaptureFixture) -> None:
    module = Dropped()
    program = program_of(module)
    nn.init.constant_(module.weight, 3.0)
    with caplog.at_level(logging.WARNING, "zfunc"):
        assert zfunc.params(program, zfunc.init(program))["s.weight"].eq(3).all()
        step(program)
    assert not [r for r in caplog.records if "changed after" in r.getMessage()]


class Scaled(Dropped):
    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


def test_a_later_change_of_the_class_has_its_effect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a module has the same class."""
    program = program_of(Scaled())
    monkeypatch.setattr(Scaled, "factor", 3.0)
    with caplog.at_level(logging.WARNING, "zfunc"):
        step(program)
    assert not [r for r in caplog.records if "changed after" in r.getMessage()]
    assert program.segments[0].function({"weight": torch.ones(8)}, torch.ones(8)).eq(3).all()


# --- what would be dropped ---------------------------------------------------------------------------------------


HOOKS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "register_hook": (lambda m: m.weight.register_hook(lambda g: g * 2), "parameter 'weight'"),
    "register_post_accumulate_grad_hook": (
        lambda m: m.bias.register_post_accumulate_grad_hook(lambda p: None),
        "parameter 'bias'",
    ),
    "register_full_backward_hook": (lambda m: m.register_full_backward_hook(lambda *_: None), "module ''"),
    "register_full_backward_pre_hook": (
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        "module ''",
    ),
}


@pytest.mark.parametrize(("register", "what"), HOOKS.values(), ids=list(HOOKS))
def test_gradient_hooks_are_refused(register: Callable[[nn.Module], Any], what: str) -> None:
    module = nn.Linear(8, 8)
    handle = register(module)
    with pytest.raises(ValueError, match=rf"segment 's': got a gradient hook on {what}.*clip_norm.*Function"):
        zfunc.segment("s", module)
    handle.remove()
    zfunc.segment("s", module)


def test_a_gradient_hook_registered_later_is_refused_too() -> None:
    module = nn.Linear(8, 8)
    segment = zfunc.segment("s", module)
    module.weight.register_hook(lambda g: g * 2)
    with pytest.raises(ValueError, match=r"segment 's': got a gradient hook on parameter 's\.weight'"):
        program_of(segment)


# --- parameters in the same memory -------------------------------------------------------------------------------


def two(weight: Callable[[Tensor], Tensor]) -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = nn.Parameter(weight(module[0].weight.data))
    return module


SHARING: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it": lambda w: w,
    "transposed": lambda w: w.t(),
    "a row": lambda w: w[3],
    "columns": lambda w: w[:, ::2],
}


@pytest.mark.parametrize("view", SHARING.values(), ids=list(SHARING))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_in_the_same_memory_are_refused_by_name(
    view: Callable[[Tensor], Tensor], device: str
) -> None:
    module = two(view).to(device) if device == "cpu" else None
    if module is None:
        with torch.device("meta"):
            module = two(view)
    with pytest.raises(
        ValueError, match=r"segment 's': got '[01].weight' and '[01].weight' in the same memory"
    ):
        zfunc.segment("s", module)


def test_disjoint_parameters_in_one_storage_are_accepted() -> None:
    flat = torch.randn(16, 8)
    module = nn.Module()
    module.a, module.b = nn.Parameter(flat[:8]), nn.Parameter(flat[8:])
    module.register_buffer("c", torch.ones(4))
    module.register_buffer("d", module.c)
    assert len(zfunc.segment("s", module).parameters) == 2
    module.register_buffer("live", module.a.detach()[0])
    with pytest.raises(ValueError, match="'live' and 'a' in the same memory"):
        zfunc.segment("s", module)


class Kept(nn.Linear):
    """A view of the weight in an attribute, which forward reads, or makes anew before."""

    def __init__(self, made_anew: bool) -> None:
        super().__init__(8, 8)
        self.made_anew, self.row = made_anew, self.weight.detach()[0]

    def forward(self, x: Tensor) -> Tensor:
        self.row = self.weight[0] if self.made_anew else self.row
        return super().forward(x) * self.row


def test_a_view_of_a_parameter_in_an_attribute_may_be_made_anew_and_is_not_read() -> None:
    assert step(program_of(Kept(made_anew=True))) > 0
    with pytest.raises(ValueError, match="segment 's': .*a view of 'weight' that was made before, which"):
        step(program_of(Kept(made_anew=False)))


def test_two_segments_in_the_same_memory_are_refused_by_name() -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = nn.Parameter(one.weight.data)
    segments = [zfunc.segment("one", one), zfunc.segment("other", other), zfunc.segment("loss", Loss(8))]
    with pytest.raises(
        ValueError, match=r"segments: got 'one\.weight' and 'other\.weight' in the same memory"
    ):
        zfunc.compile(segments, device="cpu")


def gradient_inside(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]


def nested_inside(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x.split([1, 3])], layout=torch.jagged).values()


def backward_inside(x: Tensor) -> Tensor:
    x.pow(3).sum().backward()
    return x


INSIDE: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "autograd.grad": (gradient_inside, "got torch.autograd.grad", "torch.func.grad"),
    "backward": (backward_inside, "got torch.autograd.grad or backward()", "torch.func.grad"),
    "checkpoint": (
        lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
        "got torch.utils.checkpoint",
        "recompute",
    ),
    "reentrant checkpoint": (
        lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
        "reentrant torch.utils.checkpoint",
        "recompute",
    ),
    "nested": (nested_inside, "got a nested tensor", "pad its rows"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("body", "got", "instead"), INSIDE.values(), ids=[*INSIDE])
def test_what_torch_func_does_not_differentiate_is_refused_by_name(
    body: Callable[[Tensor], Tensor], got: str, instead: str
) -> None:
    first = zfunc.segment("s", Apply(lambda self, x: body(self.inner(x)), inner=nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=f"^segment 's': .*{re.escape(got)}.*in forward.*{instead}"):
        step(program_of(first))


@pytest.mark.parametrize("targets", [None, 3, 0.5, torch.ones(4)])
def test_an_error_in_a_forward_is_shown_whatever_the_targets_are(targets: Any) -> None:
    def fails(self: Any, x: Tensor, y: Any) -> Tensor:
        raise KeyError(f"no such noise, and {type(y).__name__}")

    loss = zfunc.segment("loss", Apply(fails, inner=nn.Linear(8, 8)))
    program = zfunc.compile([loss], device="cpu", precision="fp32")
    with pytest.raises(
        ValueError, match=r"segment 'loss': got an error on inputs .*KeyError: 'no such noise"
    ):
        zfunc.train_step(program, zfunc.init(program), (torch.randn(4, 8), targets))
