"""Forward and backward of one segment as a pair of functions, with explicit residuals between them.

Gradients are those of `torch.func.vjp`, to the bit, whatever backward recomputes. Both passes are traced into pure
functions of tensors, which launch faster than autograd does. A segment that cannot be traced runs `vjp` itself. The
last segment never repeats its whole forward, because its backward follows at once.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeGuard, TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import vjp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from zfunc.core.pipeline import PASSES, B, F, I, R, W
from zfunc.engine.trace.graph_cuts import (
    Cut,
    JointGraph,
    Paths,
    decode_late,
    graph_of,
    keep_as_autograd,
    min_cut,
    mutates,
    of_written_memory,
    repeat_forward,
    sized_min_cut,
    split_backward,
    with_code,
)
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.tensor_memory import (
    FakeTensors,
    Leaves,
    Tree,
    Values,
    byte_range,
    dense_strides,
    extent,
    layouts,
    storage_of,
)
from zfunc.errors import refuse, setting
from zfunc.runtime.accelerator import on_accelerator, record_use
from zfunc.runtime.rng import count_draws, enter_backward, number_draws, redirect_draws, redirected, seeded

GRAPHS_IN_THREADS = torch.__version__ >= "2.13"  # pytorch/pytorch#123177
MAX_TRACES = 64  # cached for each segment, one for each set of input shapes
Grads = tuple[Values, list[Tensor]]  # of weights; of floating-point leaves of the input, in their shapes
Inputs = tuple[Tree, ...]  # of a segment beside its weights: (x,), or (x, targets)
Cotangents = Sequence[Tensor]  # gradients of `differentiated(y)`, in its order
Pullback = Callable[[Cotangents], Grads]
Residuals = Leaves | Pullback | None  # from forward to backward; None: backward recomputes
Joints = dict[Hashable, JointGraph]  # by layouts of leaves and cotangents
Pending = tuple[Callable[..., Values], list[Tensor]]  # run(*pending) -> gradients of weights
GraphCall = Callable[..., Sequence[Any]]  # a graph, or what runs it: flat tensors in, flat results out
Graphs = tuple[JointGraph, dict[str, GraphCall]]  # and its parts, by kind of pass
CotangentLayout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # shape, strides, ...
T = TypeVar("T")
log = logging.getLogger("zfunc")
# A graph's code cannot name the overload `from`.
for _packet in (torch.ops.aten.random, torch.ops.aten.random_):
    _packet.from_ = getattr(_packet, "from")
    _packet.from_.__name__ = f"{_packet.__name__}.from_"


@frozen
class SegmentWeights:
    """The tensors that a segment's function gets, by short name: `trained` ones are differentiated, `fixed`
    ones (frozen parameters, constants) are not."""

    trained: Values
    fixed: Values
    name: str = ""  # of the segment


@frozen(eq=False)
class Detached:
    """Tensors in a segment's output that are not differentiated, and their `names`, the same for every batch."""

    names: tuple[str, ...]
    # Scalars [len(names)] fp32, a list of rows [rows, ...], or buffers by name.
    tensors: Tensor | list[Tensor] | dict[str, Tensor] | None


register_pytree_node(Detached, lambda x: ([x.tensors], x.names), lambda parts, names: Detached(names, *parts))


def differentiated(y: Tree) -> list[Tensor]:
    """The tensors of a segment's output that have a cotangent: floating-point tensors outside of `Detached`."""
    return [t for t in tree_leaves(y, is_leaf=lambda x: isinstance(x, Detached)) if _floating(t)]


Pull = Callable[..., tuple[Tree, Pullback]]  # of weights, inputs, and perhaps a list that receives `Paths`
Backward = Callable[[SegmentWeights, Inputs, Residuals, Cotangents], T]  # T: which gradients it returns


def _unsplit(*_: object) -> NoReturn:
    got = "a backward that cannot be traced, which the log explains"
    expected = "one that is split in two halves"
    refuse((), got, expected, f"pass {setting('order', 'OneFOneB')}, or another whose passes are all F or B")


@frozen
class SegmentVJP:
    """Forward and backward of a segment.

    - `forward(weights, inputs)` returns `(y, residuals)`; `inputs` is `(x,)` or `(x, targets)`. If the
      segment changes buffers, `y` is `(y, Detached buffers)`.
    - `backward(weights, inputs, residuals, cotangents)` returns the gradients of `weights.trained`, by name,
      and those of the input's floating-point leaves. `cotangents` are the gradients of `differentiated(y)`.
    - `backward_input`, with the arguments of `backward`, returns the gradients of the input, and `(run,
      pending)`; `run(*pending)` returns the gradients of the weights. Both equal those of `backward`.
    - `recompute(weights, inputs)` returns the residuals for a backward that recomputes, and may be called any
      time before it; None if `backward` recomputes by itself.
    - `keeps` is False if `forward` never returns residuals, because backward recomputes.
    - `prepare(weights, inputs, y)` traces forward and backward for the shapes of its arguments ahead of the
      first step; a `y` like the output saves a second trace. Returns, for each output, the trained weights
      and input leaves that it depends on.
    """

    forward: Callable[[SegmentWeights, Inputs], tuple[Tree, Residuals]]
    backward: Backward[Grads]
    keeps: bool
    prepare: Callable[[SegmentWeights, Inputs, Tree], Paths] = lambda _weights, _inputs, _y: []
    backward_input: Backward[tuple[list[Tensor], Pending]] = _unsplit
    recompute: Callable[[SegmentWeights, Inputs], Residuals] = lambda _weights, _inputs: None

    def run(
        self,
        way: str,
        weights: SegmentWeights,
        inputs: Inputs,
        residuals: Residuals | Pending,
        cotangents: Cotangents,
    ) -> Any:
        """Run the pass of kind `way`: "F" forward, "B" backward, "I" its input half, "W" its weight half
        (whose `residuals` are the second result of `backward_input`), "R" recomputation."""
        if way == W:
            run, pending = residuals
            return run(*pending)
        given = (residuals, cotangents) if "above" in PASSES[way].takes else ()
        return getattr(self, PASSES[way].verb)(weights, inputs, *given)


def make_vjp(
    function: Callable[..., Tree],
    options: PassOptions,
    *,
    name: str = "",
    joints: "Joints | None" = None,
) -> SegmentVJP:
    """Make forward and backward of `function(params, *inputs)` with `options`, for inputs that are not
    divided into tiles.

    If memory is `moving`, a result that is a view of a weight is copied, and a residual that is a view of a
    weight or an input is made again in backward. A segment that cannot be traced for "min-cut", or is
    `moving` with residuals of a size unknown in a trace, recomputes all (or nothing, if it is the `last`);
    one that cannot be traced for "all" runs eagerly. Both are logged with the segment's `name`. `joints`
    caches graphs of forward and backward, to be divided for other options as well.
    """
    recompute, last, moving = options.recompute, options.last, options.moving
    pull = pull_of(function, options.wrt_input, last)
    traced = partial(_Traced, partial(joint_graph, pull, joints), options)
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
        moving = [i for i, leaf in enumerate(leaves) if wrt_input and _floating(leaf)]

        output: Tree = None

        def call(trained: Values, moved: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            nonlocal output
            x = list(leaves)
            for i, leaf in zip(moving, moved, strict=True):
                x[i] = leaf
            output = function({**trained, **weights.fixed}, tree_unflatten(x, spec), *inputs[1:])
            outputs = differentiated(output)
            if not outputs:
                raise _NoGradientError(
                    "got no floating-point output, expected one, or its parameters get no gradient: freeze them "
                    "(requires_grad_(False)), or join the segment with the next"
                )
            # In segments below, a detached output is the user's, as it is autograd's.
            if last and (trained or moved) and not any(t.requires_grad for t in outputs):
                raise _NoGradientError(
                    "got a loss without a gradient, expected one that depends on parameters or the input: leave "
                    "out detach(), item() and torch.no_grad()"
                )
            if paths is not None:
                paths.extend(paths_to(outputs, {**trained, **dict(enumerate(moved))}))
            return outputs, [t for t in tree_leaves(output) if isinstance(t, Tensor)]

        # Some operations, such as oneDNN's LSTM, keep what backward needs only with grad mode on.
        with torch.enable_grad(), redirected():
            if not weights.trained and not moving:
                call({}, [])
                if paths is not None:
                    paths.extend(set[str | int]() for _ in differentiated(output))
                return output, lambda _: ({}, [])
            _, pullback, tensors = vjp(call, weights.trained, [leaves[i] for i in moving], has_aux=True)
        outer = iter(tensors)  # of `vjp`, in place of its inner ones
        y = tree_map_only(Tensor, lambda _: next(outer), output)

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
    keys, found = {id(t): key for key, t in leaves.items()}, Paths()
    for y in outputs:
        nodes = [y.grad_fn] if y.grad_fn is not None else []
        known = {*nodes}
        for node in nodes:  # which grows
            further = {x for x, _ in node.next_functions if x is not None} - known
            nodes += further
            known |= further
        ends = [y, *(getattr(x, "variable", None) for x in nodes)]
        found.append({keys[id(t)] for t in ends if id(t) in keys})
    return found


def _use_here(grads: list[Tensor]) -> None:
    """Keep the memory of `grads` for this thread's stream: autograd makes them on that of the forward."""
    real = [t for t in grads if not isinstance(t, FakeTensor)]
    if real:
        record_use(real[0].device, real)


def restrided(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values of `grad` in a tensor with `strides`: `grad` itself, a view, or a copy."""
    if all(n <= 1 or a == b for n, a, b in zip(grad.shape, grad.stride(), strides, strict=True)):
        return grad if grad.stride() == strides else grad.as_strided(grad.shape, strides)
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


def _floating(t: object) -> TypeGuard[Tensor]:
    return isinstance(t, Tensor) and t.is_floating_point()


# --- traced: a joint graph, cut in two (graph_cuts.py) ------------------------------------------------------


@define(eq=False)
class _Traced:
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
    known: dict[Hashable, "Graphs | None"] = field(factory=dict)  # None: it failed

    @property
    def passes(self) -> SegmentVJP:
        own = self._forward, self._backward, self.keeps, self._prepare, self._backward_input
        return SegmentVJP(*own, self._recompute)

    def _forward(self, weights: SegmentWeights, inputs: Inputs) -> tuple[Tree, Residuals]:
        leaves, found = self._graphs(weights, inputs)
        if found is None:
            return self.fallback.forward(weights, inputs)
        joint, run = found
        with torch.enable_grad():  # grad mode as in the trace
            flat, num = run[F](*leaves), len(joint.results)
        residuals = list(flat[num:]) if self.keeps else None
        return tree_unflatten(list(flat[:num]), joint.out_spec), residuals

    def _recompute(self, weights: SegmentWeights, inputs: Inputs) -> Leaves | None:
        leaves, found = self._graphs(weights, inputs)
        if found is None or R not in found[1]:
            return None
        with torch.enable_grad():
            return list(found[1][R](*leaves))

    def _backward(
        self, weights: SegmentWeights, inputs: Inputs, residuals: Residuals, cotangents: Cotangents
    ) -> Grads:
        leaves, found = self._graphs(weights, inputs)
        if found is None:
            return self.fallback.backward(weights, inputs, residuals, cotangents)
        joint, run = found
        grads = self._pull(run[B], joint, leaves if residuals is None else residuals, cotangents)
        num = len(weights.trained)
        return dict(zip(weights.trained, grads[:num], strict=True)), grads[num:]

    def _backward_input(
        self, weights: SegmentWeights, inputs: Inputs, residuals: Residuals, cotangents: Cotangents
    ) -> tuple[list[Tensor], Pending]:
        leaves, found = self._graphs(weights, inputs)
        if found is None or not self.options.split:
            return self.fallback.backward_input(weights, inputs, residuals, cotangents)
        joint, run = found
        made = self._pull(run[I], joint, leaves if residuals is None else residuals, cotangents)
        num = len(joint.gradients) - len(weights.trained)
        return made[:num], (partial(_named, run[W], tuple(weights.trained)), made[num:])

    def _pull(self, run: GraphCall, joint: JointGraph, given: Leaves, cotangents: Cotangents) -> list[Tensor]:
        laid_out = [restrided(c, strides) for c, strides in zip(cotangents, joint.strides, strict=True)]
        with torch.enable_grad():
            return list(run(*given, *laid_out))

    def _prepare(self, weights: SegmentWeights, inputs: Inputs, y: Tree) -> Paths:
        _, found = self._graphs(weights, inputs, y)
        return self.fallback.prepare(weights, inputs, y) if found is None else found[0].paths

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
        found = self.known.pop(key) if key in self.known else self._trace(weights, inputs, guess)
        if len(self.known) == MAX_TRACES:
            del self.known[next(iter(self.known))]  # the least recently used
        self.known[key] = found
        return leaves, found

    def _trace(self, weights: SegmentWeights, inputs: Inputs, guess: Tree) -> "Graphs | None":
        leaves, spec = tree_flatten((weights.trained, weights.fixed, inputs))
        options = self.options
        try:
            try:
                joint = self.joint_of(leaves, spec, cotangents_of(guess))
            except _OtherOutputError as error:
                joint = self.joint_of(leaves, spec, error.args[0])
            (forward, backward), again = self.cut(joint), list[GraphModule]()
            with suppress(ValueError):  # if backward reads a value that is no tensor
                if options.ahead:
                    *again, backward = keep_as_autograd(evolve(joint, results=[]))
            fixed = 0 if self.keeps or again else len(weights.trained) + len(weights.fixed)
            halves = split_backward(backward, len(weights.trained), fixed) if options.split else ()
            graphs = [
                (F, forward),
                (B, backward),
                *zip((I, W), halves, strict=False),
                *((R, x) for x in again),
            ]
            return joint, {way: _runnable(x, options.compiled) for way, x in graphs}
        except (torch.OutOfMemoryError, _NoGradientError):
            raise
        except Exception as error:
            log.warning("%s, because it cannot be traced: %s", self.note, str(error).partition("\n")[0])
            return None


def _named(run: GraphCall, names: tuple[str, ...], *pending: Tensor) -> Values:
    """The gradients of a segment's weights, by short name, which the graph `run` makes of `pending` tensors."""
    with torch.enable_grad():
        return dict(zip(names, run(*pending), strict=True))


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
        weights: SegmentWeights, inputs: Inputs, made: tuple[Tree, Residuals]
    ) -> tuple[Tree, Residuals]:
        # Slots hold bytes, which do not say that they are meant conjugated or negated.
        y, residuals = tree_map_only(Tensor, lambda t: t.resolve_conj().resolve_neg(), made)
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
            made = pull(weights, inputs, residuals, cotangents)
            return _apart_from([*leaves, *tree_leaves(residuals)], made)

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


# --- tracing the joint graph --------------------------------------------------------------------------------


class _NoGradientError(ValueError):
    """Raised for a segment whose output has no tensor that can be differentiated."""


class _OtherOutputError(Exception):
    """Raised if the output of a segment has other shapes than its trace assumed; `args[0]` describes the
    cotangents (output gradients) that it needs."""


def cotangents_of(y: Tree) -> list[CotangentLayout]:
    """Shape, strides, dtype and device of the cotangent of each differentiable tensor in a segment's output `y`."""
    return [(t.shape, dense_strides(t), t.dtype, t.device) for t in differentiated(y)]


def joint_graph(
    pull: Pull, joints: Joints | None, leaves: Leaves, spec: TreeSpec, cotangents: list[CotangentLayout]
) -> JointGraph:
    """Trace forward and backward of a segment as one graph, from `leaves`, the weights and inputs, of pytree
    structure `spec`; cached in `joints`. Raises _OtherOutputError if the outputs do not fit `cotangents`, the
    descriptions of their gradients."""
    key = layouts(leaves), spec, tuple(cotangents)
    if joints is not None and key in joints:
        return joints[key]
    num_forward = forward_draws = num_out = 0
    out_spec: TreeSpec | None = None
    paths: Paths = []

    def joint(primals: Leaves, tangents: list[Tensor]) -> Leaves:
        nonlocal num_forward, forward_draws, num_out, out_spec
        # 1. Forward, and whether its output is the one that the cotangents are for.
        trained, fixed, inputs = tree_unflatten(primals, spec)
        paths.clear()
        y, pullback = pull(SegmentWeights(trained, fixed), inputs, paths)
        with disable_proxy_modes_tracing():
            if (actual := cotangents_of(y)) != cotangents:
                raise _OtherOutputError(actual)
        out, out_spec = tree_flatten(y)
        num_out = len(out)
        # 2. What has been recorded so far is the forward's: backward's nodes and draws come behind it.
        mode = get_proxy_mode()
        assert mode is not None
        num_forward, forward_draws = len(mode.tracer.graph.nodes), count_draws(mode.tracer.graph)
        grads, below = pullback(tangents)
        return [*out, *grads.values(), *below]

    with seeded(None), detect_fake_mode(leaves) or FakeTensors(allow_non_fake_inputs=True):
        tangents = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in cotangents
        ]
        module = graph_of(joint, leaves, tangents)
    number_draws(module.graph, forward_draws)
    decode_late(module.graph, num_forward)
    *nodes, output = module.graph.nodes
    given, outputs = len(leaves) + len(tangents), list(output.args[0])
    traced = JointGraph(
        module,
        leaves=nodes[: len(leaves)],
        cotangents=nodes[len(leaves) : given],
        forward=nodes[given:num_forward],
        backward=nodes[num_forward:],
        results=outputs[:num_out],
        gradients=outputs[num_out:],
        forward_draws=forward_draws,
        out_spec=out_spec,
        strides=[t.stride() for t in tangents],
        paths=paths,
    )
    return traced if joints is None else joints.setdefault(key, traced)


# --- running a graph ----------------------------------------------------------------------------------------


def _runnable(graph: GraphModule, compiled: bool | str) -> GraphCall:
    """A callable that runs `graph` with the random numbers of the pass it is called in; `compiled`: whether
    torch.compile compiles it, or in which mode."""
    # An operation that writes into an argument is never dead; `mutates` knows it until draws are redirected.
    graph.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or mutates(node.target))
    # A kernel may return other strides than were traced. A view that those do not allow is a copy then, as eager
    # code makes one, but not of what is written: that would lose the writes, so it fails instead.
    written = of_written_memory(graph.graph)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if node not in written:
            node.target = torch.ops.aten.reshape.default
    redirect_draws(graph.graph, compiled=compiled)
    with_code(graph)
    if compiled == "reduce-overhead":
        return _as_device_graph(torch.compile(graph, dynamic=False, mode=compiled))
    return torch.compile(graph, dynamic=False) if compiled else graph


def _as_device_graph(run: GraphCall) -> GraphCall:
    """A wrapper of the compiled pass `run`, which may replay a CUDA graph: copies results out of the graph's
    memory, which the next replay overwrites."""

    def call(*tensors: object) -> Leaves:
        if any(isinstance(x, Tensor) and on_accelerator(x.device) for x in tensors):
            check_device_graphs(threading.current_thread() is not threading.main_thread())
        torch.compiler.cudagraph_mark_step_begin()
        return [x.clone() if isinstance(x, Tensor) else x for x in run(*tensors)]

    return call


def check_device_graphs(beside: bool) -> None:
    """Raise ValueError if steps run `beside` the main thread and this torch has CUDA graphs only there."""
    if beside and not GRAPHS_IN_THREADS:
        got = f'"reduce-overhead" beside the main thread with torch {torch.__version__}'
        got += ", whose graphs of a device are the main thread's"
        one = f"{setting('devices', 1)} with all steps in the main thread"
        do = f"expected torch 2.13 or later, or {one}, or {setting('compile_segments', True)}"
        refuse("compile_segments", got, do=do)
