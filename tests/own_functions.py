"""Autograd functions in the older style, whose forward saves what backward reads, as tests share them."""

from typing import Any

import torch
from torch import Tensor

Function = torch.autograd.Function


class Straight(Function):
    """A straight-through estimator, which saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0]


class Reversed(Function):
    """A gradient reversal, which returns its input and keeps a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.rate * grads[0], None


class Gated(Function):
    """Inputs, results and what is between them, saved and in attributes; results of all kinds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, noise: float = 0.5) -> tuple[Any, ...]:
        y = x @ w
        gate, between = y.sigmoid() + noise * torch.rand_like(y), x.cos()
        ctx.save_for_backward(x, w, gate, None)
        ctx.kept, ctx.shape = {"between": [between, y], "half": 0.5}, x.shape
        ctx.mark_non_differentiable(gate)
        return y * gate, gate, y.argmax(-1), None, y.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w, gate, nothing = ctx.saved_tensors
        (between, y), half = ctx.kept["between"], ctx.kept["half"]
        assert nothing is None
        assert x.shape == ctx.shape
        grad = grads[0] * (gate + half * y) + grads[1] + grads[-1]  # zeros: marked, not read
        return grad @ w.T * between, x.flatten(0, -2).T @ grad.flatten(0, -2), None


class Asking(Function):
    """Forward computes what backward needs alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.x = x if w.requires_grad else None
        ctx.w = w if ctx.needs_input_grad[0] else None
        return x @ w, x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, none = grads
        assert none is None
        below = None if ctx.w is None else 3 * grad @ ctx.w.T
        return below, None if ctx.x is None else ctx.x.flatten(0, -2).T @ grad.flatten(0, -2)
