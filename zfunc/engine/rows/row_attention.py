"""Causal attention of rows in which documents or a window hide keys before the query, too, without a mask.

`attend_row` is one operation of a trace. Inside, CUDA's kernel of ranges takes all documents at once, the CPU's
kernel one after the other. Elsewhere, and for a window on the CPU, scores of a tile by as many keys are made at a
time (tile_attention.py). A trace of costs runs the same code on fake tensors, as if a row were one document.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function

from zfunc.engine.rows.keys import DeviceKeys
from zfunc.engine.rows.tile_attention import (
    Attended,
    View,
    attend_tile,
    by_ranges,
    pull_tile,
    tile_numbers,
)
from zfunc.engine.trace.operation_flops import MADE_OF
from zfunc.runtime.accelerator import runs_on_cpu

TILE = 512  # queries, at most, whose scores are in memory at a time, by as many keys


def attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention over rows of tokens. `query` is [batch, heads, tokens, features]; `key` and `value`
    have as many tokens, and as many heads or a divisor of that number. Returns [batch, heads, tokens, value
    features]. Scores are multiplied by `scale`, features ** -0.5 if None.

    A token attends to itself and to tokens before it, from `first` [batch, tokens] on, where its document
    begins, and to at most `window` of them.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if has_torch_function(given := (query, key, value)):
        return handle_torch_function(attend_row, given, *given, first, window, scale)
    first = None if first is None else first.expand(query.shape[0], query.shape[2])
    return _Attention.apply(*given, first, window, scale)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.zfunc.attend_row(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.window, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        *given, out, lse = ctx.saved_tensors
        return *_Pull.apply(grad, *given, ctx.window, ctx.scale, out, lse), None, None, None


class _Pull(torch.autograd.Function):
    """Backward of `attend_row`. Double backward raises: torch would silently drop a term."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        return torch.ops.zfunc.pull_row(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        raise NotImplementedError(
            "attention: got a gradient of its gradient, expected one gradient: of documents or a window use "
            "F.scaled_dot_product_attention with a mask there"
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, *hidden: Any) -> tuple[Tensor, Tensor]:
    """Forward of `attend_row`: attention's result, and the fp32 log-sum-exp of scores [batch, heads, tokens]."""
    out, lse = _results(q, k, v)
    for part, own, view in _tiles(q, (k, v), *hidden):
        attended = attend_tile(part(q), DeviceKeys(own), view)
        part(out).copy_(attended.out)
        part(lse).copy_(attended.lse)
    return out, lse


def _pull(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """Backward of `attend_row` for the result's gradient `grad`: gradients of queries, keys and values."""
    *hidden, out, lse = more
    sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    dq, _ = _results(q, k, q)
    for part, own, view in _tiles(q, (k, v, *sums), *hidden):
        attended = Attended(part(q), view, part(out), part(lse))
        part(dq).copy_(pull_tile(part(grad), attended, DeviceKeys(own[:2], own[2:])))
    return dq, *(x.to(q.dtype) for x in sums)


def _results(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    """For traces: empty tensors with the shapes and strides of attention's result and of its log-sum-exp."""
    batch, heads, tokens, _features = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, tokens, dtype=torch.float32)


def _gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, ...]:
    """For traces: empty tensors like attention's gradients of queries, keys and values."""
    return _results(q, k, q)[0], k.new_empty(k.shape), v.new_empty(v.shape)


Tile = tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...], View]


def _tiles(
    q: Tensor, keys: tuple[Tensor, ...], first: Tensor | None, window: int | None, scale: float
) -> Iterator[Tile]:
    """Yield, for each tile of the rows, what its attention needs: a function that takes the tile's part out
    of a tensor like `q`; the `keys` (keys, values, gradient sums) of its rows; the `View`, which says what
    keys the tile sees."""
    whole, tokens = View(0, scale, first, window), q.shape[2]
    if by_ranges(q, DeviceKeys(keys), whole):
        yield (lambda x: x), keys, whole
        return
    on_cpu, fake = runs_on_cpu(q.device), isinstance(q, FakeTensor)
    for rows, start, stop in _documents(first, tokens) if on_cpu else [(slice(None), 0, tokens)]:
        own, length = tuple(x[rows, :, start:stop] for x in keys), stop - start
        near = None if window is None or window >= length else window
        fused = on_cpu and near is None and q.shape[-1] == keys[1].shape[-1]
        count = 1 if fused else -(-length // TILE)
        tile = -(-length // count)
        for i in tile_numbers(count, 1 if near is None else 1 + -(-near // tile), fake=fake):
            at, end = i * tile, min(length, (i + 1) * tile)
            seen = None if on_cpu or first is None else first[:, at:end]
            view = View(at, scale, seen, near)
            yield (lambda x: x[rows, :, start + at : start + end]), own, view  # noqa: B023


def _documents(first: Tensor | None, tokens: int) -> Iterator[tuple[slice, int, int]]:
    """Yield, for each document, its batch rows, first token and end. `first` [batch, tokens] has the first
    token of each token's document; if it is None or fake, all tokens are one document.

    >>> [(start, stop) for _, start, stop in _documents(torch.tensor([[0, 0, 2, 2, 2]]), 5)]
    [(0, 2), (2, 5)]
    """
    if first is None:
        yield slice(None), 0, tokens
        return
    for b, row in enumerate(first):
        fake = isinstance(row, FakeTensor)
        starts = [] if fake else (row[1:] != row[:-1]).nonzero().flatten().add(1).tolist()
        for start, stop in pairwise([0, *starts, tokens]):
            yield slice(b, b + 1), start, stop


_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? first, int? window, float scale"
_LIBRARY = torch.library.Library("zfunc", "DEF")
for _schema, _function, _empty in (
    (f"attend_row({_GIVEN}) -> (Tensor, Tensor)", _attend, _results),
    (
        f"pull_row(Tensor grad, {_GIVEN}, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor)",
        _pull,
        _gradients,
    ),
):
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zfunc::{_name}", _empty, lib=_LIBRARY)
    MADE_OF[getattr(torch.ops.zfunc, _name).default] = _function
