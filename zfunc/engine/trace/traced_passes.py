"""The passes of a segment as graphs cut from its joint graph: traced at first use for shapes, and cached.

Graphs launch faster than autograd does. A segment that cannot be traced runs its passes by `torch.func.vjp`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from attrs import define, evolve, field
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zfunc.core.pipeline import B, F, I, R, W
from zfunc.engine.trace.graph_cuts import Cut, JointGraph, Paths, keep_as_autograd, split_backward
from zfunc.engine.trace.joint_graph import (
    CotangentLayout,
    GraphCall,
    OtherOutputError,
    cotangents_of,
    runnable,
)
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import (
    Cotangents,
    Grads,
    Inputs,
    NoGradientError,
    Pending,
    Residuals,
    SegmentVJP,
    SegmentWeights,
)
from zfunc.engine.trace.tensor_memory import Leaves, Tree, Values, layouts

MAX_TRACES = 64  # cached for each segment, one for each set of input shapes
Graphs = tuple[JointGraph, dict[str, GraphCall]]  # and its parts, by kind of pass
T = TypeVar("T")
log = logging.getLogger("zfunc")


@define(eq=False)
class TracedPasses:
    """A segment's passes as graphs `cut` from its joint graph: `forward(*leaves) -> (*outputs, *residuals)`
    and `backward(*residuals, *cotangents) -> gradients`. Unless forward `keeps` residuals, backward gets the
    leaves instead, or residuals that a third graph, `(*leaves) -> residuals`, makes `ahead` of it.

    Graphs are cached for the last 64 sets of shapes; where tracing fails, that is logged, and `fallback`
    runs.
    """

    joint_of: Callable[[Leaves, TreeSpec, list[CotangentLayout]], JointGraph]
    options: PassOptions
    fallback: SegmentVJP
    note: str  # what is logged of a failure, before its reason
    cut: Cut
    keeps: bool = True
    cotangents: list[CotangentLayout] = field(factory=list)  # of an output that nothing else tells
    known: OrderedDict[Hashable, Graphs | None] = field(factory=OrderedDict)  # None: it failed

    @property
    def passes(self) -> SegmentVJP:
        """The passes of the segment that these graphs run."""
        forward, backward, by_halves = self._forward, self._backward, self._backward_input
        return SegmentVJP(forward, backward, self.keeps, self._prepare, by_halves, self._recompute)

    def _forward(self, weights: SegmentWeights, inputs: Inputs) -> tuple[Tree, Residuals]:
        leaves, graphs = self._graphs(weights, inputs)
        if graphs is None:
            return self.fallback.forward(weights, inputs)
        joint, run = graphs
        with torch.enable_grad():  # grad mode as in the trace
            flat, num = run[F](*leaves), len(joint.results)
        residuals = list(flat[num:]) if self.keeps else None
        return tree_unflatten(list(flat[:num]), joint.out_spec), residuals

    def _recompute(self, weights: SegmentWeights, inputs: Inputs) -> Leaves | None:
        leaves, graphs = self._graphs(weights, inputs)
        if graphs is None or R not in graphs[1]:
            return None
        with torch.enable_grad():
            return list(graphs[1][R](*leaves))

    def _backward(
        self, weights: SegmentWeights, inputs: Inputs, residuals: Residuals, cotangents: Cotangents
    ) -> Grads:
        leaves, graphs = self._graphs(weights, inputs)
        if graphs is None:
            return self.fallback.backward(weights, inputs, residuals, cotangents)
        joint, run = graphs
        grads = self._pull(run[B], joint, leaves if residuals is None else residuals, cotangents)
        num = len(weights.trained)
        return dict(zip(weights.trained, grads[:num], strict=True)), grads[num:]

    def _backward_input(
        self, weights: SegmentWeights, inputs: Inputs, residuals: Residuals, cotangents: Cotangents
    ) -> tuple[list[Tensor], Pending]:
        leaves, graphs = self._graphs(weights, inputs)
        if graphs is None or not self.options.split:
            return self.fallback.backward_input(weights, inputs, residuals, cotangents)
        joint, run = graphs
        results = self._pull(run[I], joint, leaves if residuals is None else residuals, cotangents)
        num = len(joint.gradients) - len(weights.trained)
        return results[:num], (partial(_named, run[W], tuple(weights.trained)), results[num:])

    def _pull(self, run: GraphCall, joint: JointGraph, reads: Leaves, cotangents: Cotangents) -> list[Tensor]:
        laid_out = [restrided(c, strides) for c, strides in zip(cotangents, joint.strides, strict=True)]
        with torch.enable_grad():
            return list(run(*reads, *laid_out))

    def _prepare(self, weights: SegmentWeights, inputs: Inputs, y: Tree) -> Paths:
        _, graphs = self._graphs(weights, inputs, y)
        return self.fallback.prepare(weights, inputs, y) if graphs is None else graphs[0].paths

    def _graphs(
        self, weights: SegmentWeights, inputs: Inputs, guess: Tree = None
    ) -> tuple[Leaves, Graphs | None]:
        """The leaves of weights and inputs, and the graphs for their shapes, traced at first use for an
        output like `guess`; None for the graphs if they cannot be traced."""
        # No TreeSpec where it can be helped: hashing one takes as long as launching several operations.
        plain = all(isinstance(x, Tensor) for x in inputs)
        moved, structure = (inputs, len(inputs)) if plain else tree_flatten(inputs)
        leaves = [*weights.trained.values(), *weights.fixed.values(), *moved]
        key = tuple(weights.trained), tuple(weights.fixed), structure, layouts(leaves)
        return leaves, cached(self.known, key, partial(self._trace, weights, inputs, guess), most=MAX_TRACES)

    def _trace(self, weights: SegmentWeights, inputs: Inputs, guess: Tree) -> Graphs | None:
        leaves, spec = tree_flatten((weights.trained, weights.fixed, inputs))
        options = self.options
        try:
            try:
                joint = self.joint_of(leaves, spec, cotangents_of(guess) or self.cotangents)
            except OtherOutputError as error:
                joint = self.joint_of(leaves, spec, error.args[0])
            (forward, backward), again = self.cut(joint), list[GraphModule]()
            with suppress(ValueError):  # if backward reads a value that is no tensor
                if options.ahead:
                    *again, backward = keep_as_autograd(evolve(joint, results=[]))
            fixed = 0 if self.keeps or again else len(weights.trained) + len(weights.fixed)
            halves = split_backward(backward, len(weights.trained), fixed) if options.split else ()
            graphs = {F: forward, B: backward, **dict(zip((I, W), halves, strict=False))}
            graphs |= dict(zip((R,), again, strict=False))
            return joint, {way: runnable(x, options.compiled) for way, x in graphs.items()}
        except (torch.OutOfMemoryError, NoGradientError):
            raise
        except Exception as error:
            log.warning("%s, because it cannot be traced: %s", self.note, str(error).partition("\n")[0])
            return None


def cached(cache: OrderedDict[Any, T], key: Any, make: Callable[[], T], *, most: int) -> T:
    """Look up `cache[key]`, calling `make` if missing; beyond `most` entries, drop the least recently used.

    >>> cache = OrderedDict({1: "one", 2: "two"})
    >>> cached(cache, 1, str, most=2), cached(cache, 3, lambda: "three", most=2), dict(cache)
    ('one', 'three', {1: 'one', 3: 'three'})
    """
    missing: Any = cache  # so a key is hashed twice at most, which takes long of one with a TreeSpec
    if (value := cache.get(key, missing)) is not missing:
        cache.move_to_end(key)  # at no time is it missing: lanes of several devices look it up at once
        return value
    value = cache[key] = make()
    while len(cache) > most:
        cache.popitem(last=False)
    return value


def _named(run: GraphCall, names: tuple[str, ...], *pending: Tensor) -> Values:
    """The gradients of a segment's weights, by short name, which the graph `run` makes of `pending` tensors."""
    with torch.enable_grad():
        return dict(zip(names, run(*pending), strict=True))


def restrided(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values of `grad` in a tensor with `strides`: `grad` itself, a view, or a copy."""
    if all(n <= 1 or a == b for n, a, b in zip(grad.shape, grad.stride(), strides, strict=True)):
        return grad if grad.stride() == strides else grad.as_strided(grad.shape, strides)
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)
