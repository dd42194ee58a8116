"""The user's autograd functions in a segment have autograd's gradients; refused is what would lose gradients."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_functions import Asking, Gated, Reversed, Straight
from test_purity import program_of, step
from torch import Tensor, nn

import zfunc
from zfunc.core.setting_values import RECOMPUTE
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.engine.trace.vjp import make_vjp
from zfunc.runtime.rng import redirected, seeded

Function = torch.autograd.Function


class Returned(Function):
    """It saves an input that it returns as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(y)
        return x, y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0], None


class Noting(Function):
    """It writes a number into a dict that it gets before a tensor that it saves."""

    @staticmethod
    def forward(ctx: Any, noted: dict[str, int], x: Tensor) -> Tensor:
        noted["rows"] = len(x)
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0] * ctx.saved_tensors[0] * 3


straight = Straight.apply  # as modules keep it
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "straight": lambda x, w: straight(x @ w),  # pyright: ignore
    "reversed": lambda x, w: Reversed.apply(x @ w, 0.3) * 2,  # pyright: ignore
    "gated": lambda x, w: (lambda y: y[0] + y[1] * x + y[2][..., None])(Gated.apply(x, w)),
    "returned": lambda x, w: (lambda y: y[0] * 2 + y[1])(Returned.apply(x @ w, x.cos())),  # pyright: ignore
    "noting": lambda x, w: Noting.apply({}, x @ w),  # pyright: ignore
    "asking": lambda x, w: Asking.apply(x, w)[0] + x,
    "asked of a constant": lambda x, w: Asking.apply(x.detach(), w)[0],
    "asked for the input": lambda x, w: Asking.apply(x * w.sum(), w.detach())[0],
}


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_one_without_setup_context_has_the_gradients_of_autograd(
    name: str, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def function(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = CASES[name](x, params["w"])
        return y if traced or float(x.detach().sum()) < 1e9 else x  # a branch on a value

    torch.manual_seed(0)
    x, w, grad = torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(2, 3, 4)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    with seeded(5), redirected():
        y = function({"w": leaves[1]}, leaves[0])
    expected = torch.autograd.grad(y, leaves, grad, allow_unused=True, materialize_grads=True)
    for recompute in RECOMPUTE:
        pair = make_vjp(function, PassOptions(recompute, wrt_input=True), name="s")
        given = SegmentWeights({"w": w}, {}), (x,)
        with torch.no_grad(), seeded(5):
            mine, residuals = pair.forward(*given)
        with torch.no_grad(), seeded(5):
            grads, below = pair.backward(*given, residuals, [grad])
        got = [mine, *below, *grads.values()]
        assert all(map(torch.equal, got, [y, *expected])), recompute
    assert ("without being traced" in caplog.text) == (not traced)


class Changed(Straight):
    """A function that marks its input, which it changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Checkpointed(Function):
    """As CheckpointFunction, by `setup_context`: parameters of a closure receive gradients beside backward's."""

    @staticmethod
    def forward(run: Any, x: Tensor) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.run, x = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(x), *grads)
        return None, x.grad


class Reading(Checkpointed):
    """Backward reads a parameter of a module that it was given."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0] @ ctx.run.weight


class Older(Function):
    """Reading in the older style."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        return run(x)

    backward = Reading.backward


class Turned(Older):
    """Reading the parameter transposed."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0] @ ctx.run.weight.T.mT


class Buffered(Function):
    """Backward reads a buffer of a module that it was given."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor) -> Tensor:
        ctx.module = module
        return x * module.scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0] * ctx.module.scale


def by_closure(kind: type[Function]) -> Callable[[Any, Tensor], Any]:
    def forward(self: Any, x: Tensor) -> Any:
        w = self.inner.weight
        return kind.apply(lambda y: y @ w, x)

    return forward


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "changed": (lambda self, x: Changed.apply(self.inner(x)), "got ctx.mark_dirty in Changed of "),
    "closure": (by_closure(Checkpointed), "got torch.autograd.backward in the backward of Checkpointed of "),
    "module": (
        lambda self, x: Reading.apply(self.inner, x),
        "got an nn.Parameter in the backward of Reading ",
    ),
    "older": (lambda self, x: Older.apply(self.inner, x), "got an nn.Parameter in the backward of Older "),
    "turned": (lambda self, x: Turned.apply(self.inner, x), "got an nn.Parameter in the backward of Turned "),
    "buffer": (
        lambda self, x: Buffered.apply(self, x),
        "got a buffer of a module in the backward of Buffered ",
    ),
}


class Applied(nn.Module):
    def __init__(self, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.before, self.inner, self.call = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), call
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        return self.call(self, self.before(x))


@pytest.mark.parametrize(("call", "got"), REFUSED.values(), ids=[*REFUSED])
def test_what_would_lose_gradients_is_refused_by_name(call: Callable[[Any, Tensor], Any], got: str) -> None:
    with pytest.raises(ValueError, match=f"^segment 's': {re.escape(got)}.*, expected "):
        step(program_of(zfunc.segment("s", Applied(call))))


def test_other_code_has_torchs_functions_while_a_segment_runs() -> None:
    """Code of another thread, and torch.func outside of a segment."""
    x, said, own, codes = torch.ones(4), list[str](), Function.apply.__code__, set[Any]()

    def elsewhere() -> None:
        try:
            torch.func.vjp(Straight.apply, x)
        except RuntimeError as error:
            said.append(str(error))

    def inside(_: Any, y: Tensor) -> Any:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        codes.add(Function.apply.__code__)
        return Straight.apply(y)

    step(program_of(zfunc.segment("s", Applied(inside))))
    elsewhere()
    assert Function.apply.__code__ is own
    assert codes - {own}
    assert own.co_filename == torch.autograd.function.__file__
    assert len(said) > 1
    assert all("must override the setup_context" in text for text in said)
