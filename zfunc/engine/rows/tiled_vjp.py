"""Forward and backward of a segment whose rows of tokens pass in tiles, tried with the first row of each shape."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from zfunc.engine.rows.check import check_tokens
from zfunc.engine.rows.tiles import Tiled, TiledLoss
from zfunc.engine.trace.vjp import (
    Compiled,
    SegmentVJP,
    SegmentWeights,
    differentiated,
    make_vjp,
    moving_passes,
    with_own_gradients,
)


def tiled_vjp(
    function: Callable[..., Any],
    *,
    tiles: int,
    wrt_input: bool,
    last: bool = False,
    compiled: Compiled = False,
    moving: bool = False,
    name: str = "",
    evaluate: Callable[..., Any] | None = None,
    summed: Callable[..., Any] | None = None,
    **cut: Any,
) -> SegmentVJP:
    """Forward and backward of `function`, whose rows of tokens pass in `tiles`; backward recomputes whole tiles.

    `evaluate` is the function without dropout. A `last` segment passes in tiles if there is `summed`, which makes
    targets with which its loss is a sum over tokens. `cut` are arguments of `make_vjp` for a segment that is not in
    tiles: of one tile, or the last without `summed`.
    """
    make = partial(make_vjp, compiled=compiled, name=name)
    if tiles == 1:
        return make(function, wrt_input=wrt_input, last=last, moving=moving, **cut)
    if last and summed:
        loss = TiledLoss(function, evaluate or function, tiles, make, wrt_input, summed, name, check_tokens)
        return SegmentVJP(loss.forward, loss.backward, False, loss.prepare)
    if last:
        passes = with_own_gradients(make(function, wrt_input=wrt_input, last=True, **cut))
    else:
        whole = make(function, recompute="all", wrt_input=wrt_input)
        tiled = Tiled(function, evaluate or function, tiles, make, wrt_input, whole, name, check=check_tokens)
        passes = SegmentVJP(tiled.forward, tiled.backward, False, tiled.prepare)
    return moving_passes(passes) if moving else passes


def evaluated_in_tiles(function: Callable[..., Any], tiles: int, name: str) -> Callable[..., Any]:
    """`function` in `tiles` of its rows of tokens, without gradients. Other inputs, such as rows that `tiles` does
    not divide, or one token after those in a cache, pass whole."""

    def eager(part: Callable[..., Any], **_: Any) -> SegmentVJP:
        return SegmentVJP(lambda w, inputs: (part(w.fixed, *inputs), None), lambda *_: ({}, []), False)

    tiled = Tiled(function, function, tiles, eager, False, None, name, check=check_tokens)

    def evaluate(values: dict[str, Tensor], x: Any, *more: Any) -> Any:
        rows = differentiated(x)
        whole = more or not rows or rows[0].dim() < 3 or rows[0].shape[1] % tiles
        return function(values, x, *more) if whole else tiled.forward(SegmentWeights({}, values), (x,))[0]

    return evaluate if tiles > 1 else function
