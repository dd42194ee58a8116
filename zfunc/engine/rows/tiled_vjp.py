"""Forward and backward of a segment whose rows of tokens pass in tiles, tried with the first row of each shape."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from zfunc.engine.rows.check import check_tokens
from zfunc.engine.rows.cut import Function
from zfunc.engine.rows.tiles import Tiled, TiledLoss
from zfunc.engine.trace.joint_graph import CotangentLayout, Joints
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentVJP, SegmentWeights, differentiated
from zfunc.engine.trace.tensor_memory import Tree, Values
from zfunc.engine.trace.vjp import make_vjp, moving_passes, with_own_gradients


def tiled_vjp(
    function: Function,
    options: PassOptions,
    *,
    name: str = "",
    joints: Joints | None = None,
    evaluate: Function | None = None,
    summed: Callable[..., Tree] | None = None,
) -> SegmentVJP:
    """Forward and backward of a segment's `function`, which run tile by tile on rows of tokens; backward
    recomputes each tile.

    `evaluate` is the function without dropout. A last segment runs in tiles only with `summed`, which changes
    targets so that the loss is a sum over tokens. `joints` caches graphs of rows that are not divided.
    """

    def make(part: Function, *, cotangents: Sequence[CotangentLayout] = (), **how: Any) -> SegmentVJP:
        own = PassOptions(compiled=options.compiled, **how)
        return make_vjp(part, own, name=name, cotangents=cotangents)

    tiles, wrt_input, evaluate = options.tiles, options.wrt_input, evaluate or function
    if tiles == 1:
        return make_vjp(function, options, name=name, joints=joints)
    if options.last and summed:
        loss = TiledLoss(function, evaluate, tiles, make, wrt_input, summed, name, check_tokens)
        return SegmentVJP(loss.forward, loss.backward, False, loss.prepare)
    if options.last:
        whole = make_vjp(function, evolve(options, moving=False), name=name, joints=joints)
        passes = with_own_gradients(whole)
    else:
        whole = make(function, recompute="all", wrt_input=wrt_input)
        tiled = Tiled(function, evaluate, tiles, make, wrt_input, whole, name, check=check_tokens)
        passes = SegmentVJP(tiled.forward, tiled.backward, False, tiled.prepare)
    return moving_passes(passes) if options.moving else passes


def evaluated_in_tiles(function: Function, tiles: int, name: str) -> Function:
    """`function` without gradients, run on its rows of tokens in `tiles` parts. Inputs whose tokens `tiles`
    does not divide, or that continue a cache of keys, are not divided."""

    def eager(part: Function, **_: Any) -> SegmentVJP:
        return SegmentVJP(lambda w, inputs: (part(w.fixed, *inputs), None), lambda *_: ({}, []), False)

    tiled = Tiled(function, function, tiles, eager, False, None, name, check=check_tokens)

    def evaluate(values: Values, x: Tree, *more: Tree) -> Tree:
        rows = differentiated(x)
        whole = more or not rows or rows[0].dim() < 3 or rows[0].shape[1] % tiles
        return function(values, x, *more) if whole else tiled.forward(SegmentWeights({}, values), (x,))[0]

    return evaluate if tiles > 1 else function
