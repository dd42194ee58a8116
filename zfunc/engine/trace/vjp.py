"""Forward and backward of one segment as a pair of functions, with explicit residuals between them.

Gradients are those of `torch.func.vjp`, to the bit, whatever backward recomputes. Both passes are traced into pure
functions of tensors (`traced_passes`). The last segment never repeats its whole forward, because its backward
follows at once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zfunc.engine.trace.autograd_functions import applied_by, apply_in_vjp
from zfunc.engine.trace.graph_cuts import Paths, keep_as_autograd, min_cut, repeat_forward, sized_min_cut
from zfunc.engine.trace.joint_graph import CotangentLayout, Joints, joint_graph
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import (
    Backward,
    Cotangents,
    Grads,
    Inputs,
    NoGradientError,
    Pull,
    Pullback,
    Residuals,
    SegmentVJP,
    SegmentWeights,
    differentiated,
    floating,
)
from zfunc.engine.trace.tensor_memory import (
    Leaves,
    Tree,
    Values,
    byte_range,
    dense_strides,
    extent,
    storage_of,
)
from zfunc.engine.trace.traced_passes import TracedPasses, restrided
from zfunc.runtime.accelerator import record_use
from zfunc.runtime.rng import enter_backward, redirected

T = TypeVar("T")


def make_vjp(
    function: Callable[..., Tree],
    options: PassOptions,
    *,
    name: str = "",
    joints: Joints | None = None,
    cotangents: Sequence[CotangentLayout] = (),
) -> SegmentVJP:
    """Make forward and backward of `function(params, *inputs)` with `options`, for inputs that are not
    divided into tiles.

    If memory is `moving`, a result that is a view of a weight is copied, and a residual that is a view of a
    weight or an input is made again in backward. A segment that cannot be traced for "min-cut", or is
    `moving` with residuals of a size unknown in a trace, recomputes all (or nothing, if it is the `last`);
    one that cannot be traced for "all" runs eagerly. Both are logged with the segment's `name`. `joints`
    caches graphs of forward and backward, to be divided for other options as well. `cotangents` are those of
    the output, if known: they save a trace of forward that finds them.
    """
    recompute, last, moving = options.recompute, options.last, options.moving
    pull = pull_of(function, options.wrt_input, last)
    traced = partial(TracedPasses, partial(joint_graph, pull, joints), options, cotangents=list(cotangents))
    pulled, eager = lambda _w, _i, residuals, c: residuals(c), partial(paths_of, pull)
    keeping = SegmentVJP(pull, pulled, keeps=True, prepare=eager)
    again = SegmentVJP(lambda w, i: (pull(w, i)[0], None), lambda w, i, _, c: pull(w, i)[1](c), False, eager)
    runs = f"segment {name!r} runs with"
    if keeps := recompute == "none" or (last and recompute == "min-cut"):
        graphs = traced(keeping, f"{runs}out being traced", keep_as_autograd)
    else:
        graphs = traced(again, f"{runs}out being traced", repeat_forward, keeps=False)
    if recompute == "min-cut":
        instead, cut = "none" if keeps else "all", sized_min_cut if moving and not last else min_cut
        graphs = traced(graphs.passes, f"{runs} `recompute={instead}`", cut)
    return moving_passes(graphs.passes) if moving else graphs.passes


# --- eager: torch.func.vjp of a segment ---------------------------------------------------------------------


def pull_of(function: Callable[..., Tree], wrt_input: bool, last: bool) -> Pull:
    """A function `(weights, inputs) -> (y, pullback)` made of `function` by torch's `vjp`; the pullback
    returns gradients of weights and, if `wrt_input`, of the input. A list passed as third argument receives,
    for each output, the weights and input leaves that it depends on.

    Raises ValueError, when called, for a function without a floating-point output, and for the `last`
    segment's if the loss depends on no tensor that is differentiated.
    """

    def pull(weights: SegmentWeights, inputs: Inputs, paths: Paths | None = None) -> tuple[Tree, Pullback]:
        leaves, spec = tree_flatten(inputs[0])
        moving = [i for i, leaf in enumerate(leaves) if wrt_input and floating(leaf)]

        output: Tree = None

        def call(trained: Values, moved: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            nonlocal output
            x = list(leaves)
            for i, leaf in zip(moving, moved, strict=True):
                x[i] = leaf
            output = function({**trained, **weights.fixed}, tree_unflatten(x, spec), *inputs[1:])
            outputs = differentiated(output)
            if not outputs:
                raise NoGradientError(
                    "got no floating-point output, expected one, or its parameters get no gradient: freeze them "
                    "(requires_grad_(False)), or join the segment with the next"
                )
            # In segments below, a detached output is the user's, as it is autograd's.
            if last and (trained or moved) and not any(t.requires_grad for t in outputs):
                raise NoGradientError(
                    "got a loss without a gradient, expected one that depends on parameters or the input: leave "
                    "out detach(), item() and torch.no_grad()"
                )
            if paths is not None:
                paths.extend(paths_to(outputs, {**trained, **dict(enumerate(moved))}))
            return outputs, [t for t in tree_leaves(output) if isinstance(t, Tensor)]

        # 1. Forward. Some operations, such as oneDNN's LSTM, keep what backward needs only with grad mode on.
        with torch.enable_grad(), redirected(), applied_by(apply_in_vjp):
            if not weights.trained and not moving:
                call({}, [])
                if paths is not None:
                    paths.extend(set[str | int]() for _ in differentiated(output))
                return output, lambda _: ({}, [])
            _, pullback, tensors = vjp(call, weights.trained, [leaves[i] for i in moving], has_aux=True)
        outer = iter(tensors)  # of `vjp`, in place of its inner ones
        y = tree_map_only(Tensor, lambda _: next(outer), output)

        # 2. Backward, when it is called.
        def pull_back(cotangents: Cotangents) -> Grads:
            enter_backward()
            # On this thread: torch has one for each accelerator otherwise.
            with torch.autograd.set_multithreading_enabled(False), redirected():
                # retain_graph defaults to True, create_graph to the grad mode: both would keep residuals.
                grads, below = pullback(list(cotangents), retain_graph=False, create_graph=False)
            _use_here([*grads.values(), *below])
            return grads, [restrided(g, dense_strides(leaves[i])) for g, i in zip(below, moving, strict=True)]

        return y, pull_back

    return pull


def paths_of(pull: Pull, weights: SegmentWeights, inputs: Inputs, _: Tree = None) -> Paths:
    """For each output of a segment, which trained weights and input leaves it depends on, by a call of `pull`."""
    paths = Paths()
    pull(weights, inputs, paths)
    return paths


def paths_to(outputs: Sequence[Tensor], leaves: Mapping[str | int, Tensor]) -> Paths:
    """For each of `outputs`, which of `leaves`, by key, autograd's graph connects it to. Values would not
    tell that: a gradient may be zero, and a parameter detached."""
    keys, paths = {id(t): key for key, t in leaves.items()}, Paths()
    for y in outputs:
        nodes = [y.grad_fn] if y.grad_fn is not None else []
        known = {*nodes}
        for node in nodes:  # which grows
            further = {x for x, _ in node.next_functions if x is not None} - known
            nodes += further
            known |= further
        ends = [y, *(getattr(x, "variable", None) for x in nodes)]
        paths.append({keys[id(t)] for t in ends if id(t) in keys})
    return paths


def _use_here(grads: list[Tensor]) -> None:
    """Keep the memory of `grads` for this thread's stream: autograd makes them on that of the forward."""
    real = [t for t in grads if not isinstance(t, FakeTensor)]
    if real:
        record_use(real[0].device, real)


# --- memory that moves between the passes -------------------------------------------------------------------


@frozen
class _LeafView:
    """Stands for a residual that is a view of a weight or an input: of leaf number `leaf` of these, as `dtype`,
    from element `offset` on."""

    leaf: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, leaves: Leaves) -> Tensor:
        """The view itself, of leaf number `leaf` in `leaves`, the weights and inputs that backward gets."""
        leaf: Tensor = leaves[self.leaf].view(self.dtype)
        return leaf.as_strided(self.shape, self.strides, leaf.storage_offset() + self.offset)


def moving_passes(passes: SegmentVJP) -> SegmentVJP:
    """The forward and backward of `passes`, with results copied out of memory that weights, inputs or
    residuals use, because it is overwritten later."""

    def moved(
        weights: SegmentWeights, inputs: Inputs, results: tuple[Tree, Residuals]
    ) -> tuple[Tree, Residuals]:
        # Slots hold bytes, which do not say that they are meant conjugated or negated.
        y, residuals = tree_map_only(Tensor, lambda t: t.resolve_conj().resolve_neg(), results)
        held = [*weights.trained.values(), *weights.fixed.values()]
        if isinstance(residuals, list):  # else they are a pullback, which is used at once
            leaves = _leaves(weights, inputs)
            residuals = _apart_from(held, [_without_leaves(x, leaves) for x in residuals])
        return _apart_from(held, y), residuals

    def apart(pull: Backward[T]) -> Backward[T]:
        def backward(
            weights: SegmentWeights, inputs: Inputs, residuals: Residuals, cotangents: Cotangents
        ) -> T:
            leaves = _leaves(weights, inputs)
            if isinstance(residuals, list):
                residuals = [x.of(leaves) if isinstance(x, _LeafView) else x for x in residuals]
            # The gradient of an unused parameter is a residual, of zeros.
            results = pull(weights, inputs, residuals, cotangents)
            return _apart_from([*leaves, *tree_leaves(residuals)], results)

        return backward

    return evolve(
        passes,
        forward=lambda w, inputs: moved(w, inputs, passes.forward(w, inputs)),
        backward=apart(passes.backward),
        backward_input=apart(passes.backward_input),
        recompute=lambda w, inputs: moved(w, inputs, ((), passes.recompute(w, inputs)))[1],
    )


def with_own_gradients(passes: SegmentVJP) -> SegmentVJP:
    """The forward and backward of `passes`, with input gradients copied to new memory, because a tiled
    segment below overwrites them."""

    def backward(
        weights: SegmentWeights, inputs: Inputs, residuals: Residuals, cotangents: Cotangents
    ) -> Grads:
        grads, below = passes.backward(weights, inputs, residuals, cotangents)
        held = [*_leaves(weights, inputs), *tree_leaves(residuals), *cotangents, *grads.values()]
        return grads, _apart_from(held, below)

    return evolve(passes, backward=backward)


def _leaves(weights: SegmentWeights, inputs: Inputs) -> Leaves:
    return [*weights.trained.values(), *weights.fixed.values(), *tree_leaves(inputs)]


def _without_leaves(x: object, leaves: Leaves) -> object:
    """Residual `x`, or, if it is a view of one of `leaves` (weights, inputs), a _LeafView in its place."""
    if not isinstance(x, Tensor):
        return x
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and storage_of(leaf) == storage_of(x) and leaf.itemsize == x.itemsize:
            (first, last), (begin, end) = byte_range(leaf), byte_range(x)
            if first <= begin <= end <= last:  # or in another leaf in that memory, which may wait elsewhere
                offset = x.storage_offset() - leaf.storage_offset()
                return _LeafView(n, x.dtype, tuple(x.shape), x.stride(), offset)
    return x


def _apart_from(held: Sequence[object], tree: T) -> T:
    """`tree` with copies in place of the tensors that share memory with one of the tensors `held`."""
    memory = {storage_of(t) for t in held if isinstance(t, Tensor)}
    return tree_map_only(Tensor, lambda t: _copy(t) if storage_of(t) in memory else t, tree)


def _copy(t: Tensor) -> Tensor:
    """A copy of a tensor with its strides, also where its elements overlap."""
    return t.as_strided((extent(t),), (1,)).clone().as_strided(t.shape, t.stride(), 0)  # of [extent(t)]
