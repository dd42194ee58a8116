"""Models with autograd functions of their own are cut around each call, with the function's backward."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from module_law import HOST, WAYS, Block, Tied, batch, check
from own_functions import Asking, Gated, Reversed, Straight
from torch import Tensor, nn

import zfunc

Function = torch.autograd.Function
straight = Straight.apply


class Halved(Function):
    """In the newer style, for torch.func."""

    @staticmethod
    def forward(x: Tensor, by: dict[str, Any]) -> tuple[Tensor, None]:
        return x * by["scale"].to(by["dtype"]), None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[1]["scale"])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0] * 0.5, None


@torch.library.custom_op("zfunc_tests::squared", mutates_args=())
def squared(x: Tensor) -> Tensor:
    return x * x


squared.register_fake(torch.empty_like)
squared.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Own(Block):
    """Functions of both styles, one of them under no_grad and one in autocast, and an operator with a backward;
    `rate` is of the block."""

    def __init__(self, p: float, rate: float = 0.3, noise: float = 0.0) -> None:
        super().__init__(p)
        self.w, self.rate, self.noise = nn.Parameter(torch.eye(8) * 0.1), rate, noise

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = super().forward(x, table)
        gated, gate, places, nothing, _ = Gated.apply(x, self.w, self.noise)  # pyright: ignore
        halved, none = Halved.apply(x, {"scale": table, "dtype": x.dtype})  # pyright: ignore
        assert (nothing, none, gate.requires_grad) == (None, None, False)
        assert gated.requires_grad == (x.requires_grad and torch.is_grad_enabled())
        with torch.no_grad():
            rounded = straight(x)  # pyright: ignore
        with torch.autocast(x.device.type, torch.bfloat16):
            turned = Reversed.apply(self.down(self.up(x)), self.rate).to(x.dtype)  # pyright: ignore
        more = gated + gate * places[..., None] + halved + rounded + turned + Asking.apply(x, self.w)[0]
        return x + 0.01 * (more + straight(x) + squared(x))  # pyright: ignore


KINDS = WAYS | {x: {"recompute": x} for x in ("none", "min-cut")}


@cache
def cut() -> tuple[nn.Module, Any]:
    """A model, and its segments, of which all tests share the traces."""
    torch.manual_seed(0)
    model = Tied(block=Own)
    return model, zfunc.segments(model, batch())


@pytest.mark.parametrize("way", KINDS)
def test_models_with_own_functions_train_as_they_do(way: str) -> None:
    torch.manual_seed(0)
    model, segments = cut()
    assert len(segments) > 3
    blocks = [s for s in segments if s.name.startswith("layers.1") or s.name.startswith("layers.2")]
    assert 2 * len({id(s.function) for s in blocks}) == len(blocks)  # each is traced once
    check(segments, model, batch(), None, **KINDS[way])


def test_values_of_a_call_are_of_its_block() -> None:
    torch.manual_seed(0)
    rates = iter((0.1, 9.0, 3.0))
    model = Tied(block=lambda p: Own(p, next(rates)))
    check(zfunc.segments(model, batch()), model, batch(), None)


def test_backward_draws_what_forward_drew() -> None:
    """Also in 16 bits, whose loss is near that in 32."""

    def run(**settings: Any) -> tuple[dict[str, Any], float]:
        program = zfunc.compile(segments, device="cpu", **settings)
        state, metrics = zfunc.train_step(program, zfunc.init(program), x)
        return {name: t.tolist() for name, t in zfunc.params(program, state).items()}, metrics.loss

    torch.manual_seed(0)
    x = batch()
    segments = zfunc.segments(Tied(block=lambda p: Own(p, noise=0.5)), x)
    kept, loss = run(precision="fp32", recompute="none")
    for recompute in ("all", "min-cut"):
        assert run(precision="fp32", **HOST | {"recompute": recompute}) == (kept, loss)
    assert run(precision="bf16", **HOST)[1] == pytest.approx(loss, rel=0.02)


class Given(Halved):
    """It gets a module."""

    @staticmethod
    def forward(x: Tensor, module: Any) -> tuple[Tensor, None]:
        return module.down(module.up(x)), None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0] * 0.5, None


class Scaled(Given):
    """It gets an object whose number the model sets before each call."""

    @staticmethod
    def forward(x: Tensor, module: Any) -> tuple[Tensor, None]:
        return x * module.scale, None


class Classed(Given):
    """It reads a number of its class, which the model sets before each call."""

    scale = 1.0

    @staticmethod
    def forward(x: Tensor, _: Any) -> tuple[Tensor, None]:
        return x * Classed.scale, None


class RATES:
    now = 1.0


class Global(Straight):
    """It keeps a number of another class, which the model sets before each call, for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Any) -> tuple[Tensor]:
        ctx.rate = RATES.now
        return (x.round(),)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.rate, None


class Counted(Given):
    """It writes into an argument."""

    @staticmethod
    def forward(x: Tensor, table: Tensor) -> tuple[Tensor, None]:
        return x * table.add_(0.5), None


def in_turn(_: Any, x: Tensor) -> Tensor:
    for RATES.now in (0.5, 0.7):
        x = Global.apply(x, None)[0]  # pyright: ignore
    return x


def twice(self: Any, holder: Any, kind: Any, x: Tensor) -> Tensor:
    for holder.scale in (0.5, 0.7):
        x = kind.apply(x, self if holder is self else None)[0]
    return x


def moded(self: Any, x: Tensor) -> Tensor:
    Classed.scale = self.scale if self.training else 0.5
    return Classed.apply(x, None)[0]  # pyright: ignore


ONE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "module": (lambda self, x: Given.apply(x, self)[0], "has no GivenBackward"),
    "object": (lambda self, x: twice(self, self, Scaled, x), "has no ScaledBackward"),
    "class": (
        lambda self, x: twice(self, Classed, Classed, x),
        "sets what the autograd function Classed reads",
    ),
    "class in eval mode": (moded, "sets what the autograd function Classed reads"),
    "global": (in_turn, "sets what the autograd function Global reads"),
    "written": (lambda _, x: Counted.apply(x, torch.ones(8) * 1)[0], "has no CountedBackward"),
    "closure": (lambda self, x: closed(self.w)(x), "has no ClosedBackward"),
}


def closed(w: Tensor) -> Callable[[Tensor], Tensor]:
    class Closed(Straight):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            return x @ w

    return Closed.apply  # pyright: ignore


class Calling(Own):
    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(0.0)
        self.call, self.scale = call, 1.0

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return Block.forward(self, x, table) + 0.01 * self.call(self, x) * self.w.sum()


@pytest.mark.parametrize(("call", "why"), ONE.values(), ids=[*ONE])
def test_a_function_with_more_than_its_arguments_leaves_one_segment(
    call: Callable[[Any, Tensor], Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Tied(block=lambda _: Calling(call))
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, batch())
    assert [s.name for s in segments] == ["model"]
    assert why in caplog.text
    check(segments, model, batch(), None)


def test_a_constant_of_a_functions_class_is_as_in_the_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what sets it later is told."""
    torch.manual_seed(0)
    model = Tied(block=lambda _: Calling(lambda _, x: Classed.apply(x, None)[0]))
    segments = zfunc.segments(model, batch())
    assert len(segments) > 3
    check(segments, model, batch(), None)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    state = zfunc.init(program)
    state, _ = zfunc.train_step(program, state, batch())
    assert not caplog.messages
    monkeypatch.setattr(Classed, "scale", 0.3)
    for _ in range(2):
        state, _ = zfunc.train_step(program, state, batch())
    (said,) = caplog.messages
    assert "Classed, changed since" in said
