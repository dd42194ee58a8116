"""Forward and backward of one segment, as a pair of functions: what is kept in between is explicit.

The invariant: however little or much is kept, gradients are those of `torch.func.vjp`, to the bit.

- `recompute="all"` recomputes everything: only the segment's input is kept, and backward runs the forward
  again inside `vjp`.
- `recompute="none"` recomputes nothing: the pullback itself is kept.
- `recompute="min-cut"` traces both into pure functions once; residuals are the tensors the min-cut
  partitioner chose to hand from one to the other.

The last segment never recomputes: its backward follows its forward at once.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch._ops import OpOverload
from torch.func import functionalize, vjp
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zfunc.core.settings import Recompute
from zfunc.runtime.rng import count_draws, enter_backward, number_draws, redirect_draws, redirected, seeded

MAX_TRACES = 64  # kept of one segment: one for each set of shapes of its input
Values = dict[str, Tensor]
Grads = tuple[Values, list[Tensor]]
log = logging.getLogger("zfunc")


@frozen
class SegmentWeights:
    """What a segment is called with: `trained` is differentiated, `fixed` (frozen, constants) is not."""

    trained: Values
    fixed: Values


Pull = Callable[[SegmentWeights, tuple[Any, ...]], tuple[Any, Callable[..., Grads]]]


@frozen
class SegmentVJP:
    """`forward(weights, inputs)` returns `(y, residuals)`; `backward(weights, inputs, residuals, cotangents)`
    returns the gradients of `weights.trained` by name and those of the input's floating-point leaves.

    `inputs` is `(x,)` or `(x, targets)`. `cotangents` has one tensor for each floating-point leaf of `y`.
    `keeps` is False where residuals are always None and backward recomputes. `prepare(weights, inputs, y)` does now
    what the first call for such shapes would do once; to know the shapes of `y`, or to guess them, saves time.
    """

    forward: Callable[[SegmentWeights, tuple[Any, ...]], tuple[Any, Any]]
    backward: Callable[[SegmentWeights, tuple[Any, ...], Any, Sequence[Tensor]], Grads]
    keeps: bool
    prepare: Callable[[SegmentWeights, tuple[Any, ...], Any], None] = lambda _weights, _inputs, _y: None


def make_vjp(
    function: Callable[..., Any],
    *,
    recompute: Recompute,
    wrt_input: bool,
    last: bool = False,
    compiled: bool = False,
    name: str = "",
) -> SegmentVJP:
    """The pair for `function(params, *inputs)`. `wrt_input` is whether anything below needs a gradient.

    With `compiled` both go through `torch.compile`, once for all that share the pair. Where the segment called
    `name` cannot be traced for "min-cut", it recomputes all instead, or nothing if it is the `last`; where not for
    "all", it runs eagerly. That is logged.
    """
    pull = _pull(function, wrt_input)
    keeping = SegmentVJP(pull, lambda _w, _i, residuals, cotangents: residuals(cotangents), keeps=True)
    if recompute == "none":  # a pullback cannot be compiled: zfunc.compile refuses that
        return keeping
    if recompute == "all":
        otherwise = f"segment {name!r} runs without being traced"
        return _traced(pull, compiled, _recomputing(pull), otherwise, keeps=False)
    if last:
        return _traced(pull, compiled, keeping, f"segment {name!r} runs with recompute='none'")
    other = make_vjp(function, recompute="all", wrt_input=wrt_input, compiled=compiled, name=name)
    return _traced(pull, compiled, other, f"segment {name!r} runs with recompute='all'")


def _recomputing(pull: Pull) -> SegmentVJP:
    """The plain reference of recompute="all"."""

    def backward(
        weights: SegmentWeights, inputs: tuple[Any, ...], _: Any, cotangents: Sequence[Tensor]
    ) -> Grads:
        _, pullback = pull(weights, inputs)
        return pullback(cotangents)

    return SegmentVJP(lambda w, i: (pull(w, i)[0], None), backward, keeps=False)


def _pull(function: Callable[..., Any], wrt_input: bool) -> Pull:
    """`(weights, inputs) -> (y, pullback)`, by `vjp` with respect to a tuple of views, never the flat buffer."""

    def pull(weights: SegmentWeights, inputs: tuple[Any, ...]) -> tuple[Any, Callable[..., Grads]]:
        leaves, spec = tree_flatten(inputs[0])
        moving = [i for i, leaf in enumerate(leaves) if wrt_input and _floating(leaf)]

        def call(trained: Values, moved: list[Tensor]) -> tuple[list[Tensor], Any]:
            x = list(leaves)
            for i, leaf in zip(moving, moved, strict=True):
                x[i] = leaf
            y = function({**trained, **weights.fixed}, tree_unflatten(x, spec), *inputs[1:])
            return [t for t in tree_leaves(y) if _floating(t)], y

        # Some operations keep what their backward needs only where grad mode is on: oneDNN's LSTM does.
        with torch.enable_grad(), redirected():
            if not weights.trained and not moving:
                return call({}, [])[1], lambda _: ({}, [])
            _, pullback, y = vjp(call, weights.trained, [leaves[i] for i in moving], has_aux=True)

        def pull_back(cotangents: Sequence[Tensor]) -> Grads:
            enter_backward()
            with redirected():
                # retain_graph defaults to True, create_graph to the grad mode: both would keep residuals.
                grads, below = pullback(list(cotangents), retain_graph=False, create_graph=False)
            return grads, [_laid_out(g, _strides(leaves[i])) for g, i in zip(below, moving, strict=True)]

        return y, pull_back

    return pull


def _strides(x: Tensor) -> tuple[int, ...]:
    """How a cotangent of `x` is laid out: as `x`, unless elements of that overlap.

    So what a segment is traced with, and what it costs, does not depend on the segment above it.
    """
    return torch.empty_like(x, device="meta").stride()


def _laid_out(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    if all(n <= 1 or a == b for n, a, b in zip(grad.shape, grad.stride(), strides, strict=True)):
        return grad if grad.stride() == strides else grad.as_strided(grad.shape, strides)
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


def _floating(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


@frozen(eq=False)
class _Joint:
    """Forward and backward of a segment as one graph: `(*leaves, *cotangents) -> (*outputs, *gradients)`."""

    module: GraphModule
    num_leaves: int
    num_forward: int  # nodes, the first of all
    forward_draws: int
    out_spec: Any
    num_out: int
    strides: list[tuple[int, ...]]  # of the cotangents


def _traced(
    pull: Pull, compiled: bool, plain: SegmentVJP, otherwise: str, *, keeps: bool = True
) -> SegmentVJP:
    """The passes as two graphs, made of the joint one: `forward(*leaves) -> (*outputs, *residuals)` and
    `backward(*residuals, *cotangents) -> gradients`, which is given the leaves where nothing is kept.

    Traced once for each set of shapes, for every segment that shares the pair. `plain` serves where that fails.
    """
    made: dict[Any, tuple[_Joint, Any, Any] | None] = {}

    def graphs_of(
        weights: SegmentWeights, inputs: tuple[Any, ...], guess: Any = None
    ) -> tuple[list[Any], Any]:
        leaves, spec = tree_flatten((weights.trained, weights.fixed, inputs))
        key = _key(leaves, spec)
        if key not in made and len(made) == MAX_TRACES:
            del made[next(iter(made))]  # the longest unused
        made[key] = made.pop(key) if key in made else trace(leaves, spec, guess)
        return leaves, made[key]

    def trace(leaves: list[Any], spec: Any, guess: Any) -> tuple[_Joint, Any, Any] | None:
        try:
            try:
                joint = _joint(pull, leaves, spec, _cotangents_of(guess))
            except _OtherOutputError as error:
                joint = _joint(pull, leaves, spec, error.cotangents)
            forward, backward = (_min_cut if keeps else _split)(joint)
            return joint, _runnable(forward, compiled), _runnable(backward, compiled)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.warning("%s, because it cannot be traced: %s", otherwise, str(error).partition("\n")[0])
            return None

    def forward(weights: SegmentWeights, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        leaves, graphs = graphs_of(weights, inputs)
        if graphs is None:
            return plain.forward(weights, inputs)
        joint, run, _ = graphs
        with torch.enable_grad():  # as it was traced
            flat = run(*leaves)
        residuals = list(flat[joint.num_out :]) if keeps else None
        return tree_unflatten(flat[: joint.num_out], joint.out_spec), residuals

    def backward(
        weights: SegmentWeights, inputs: tuple[Any, ...], residuals: Any, cotangents: Sequence[Tensor]
    ) -> Grads:
        leaves, graphs = graphs_of(weights, inputs)
        if graphs is None:
            return plain.backward(weights, inputs, residuals, cotangents)
        joint, _, run = graphs
        laid_out = [_laid_out(c, strides) for c, strides in zip(cotangents, joint.strides, strict=True)]
        with torch.enable_grad():
            grads = run(*(residuals if keeps else leaves), *laid_out)
        num = len(weights.trained)
        return dict(zip(weights.trained, grads[:num], strict=True)), list(grads[num:])

    def prepare(weights: SegmentWeights, inputs: tuple[Any, ...], y: Any) -> None:
        if graphs_of(weights, inputs, y)[1] is None:
            plain.prepare(weights, inputs, y)

    return SegmentVJP(forward, backward, keeps, prepare)


def _key(leaves: list[Any], spec: Any) -> Any:
    """What a trace depends on. A leaf that is no tensor is part of the program."""
    return (
        tuple((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves),
        spec,
    )


class _OtherOutputError(Exception):
    """A segment returns what has other `cotangents` than those it was being traced with."""

    def __init__(self, cotangents: list[tuple[Any, ...]]) -> None:
        super().__init__("got another output than expected")
        self.cotangents = cotangents


def _cotangents_of(y: Any) -> list[tuple[Any, ...]]:
    """Shape, strides, dtype and device of each."""
    return [(t.shape, _strides(t), t.dtype, t.device) for t in tree_leaves(y) if _floating(t)]


def _joint(pull: Pull, leaves: list[Any], spec: Any, cotangents: list[tuple[Any, ...]]) -> _Joint:
    """Raises _OtherOutputError, with what they are, where the segment's cotangents are others."""
    num_forward = forward_draws = num_out = 0
    out_spec: Any = None

    def run(primals: list[Any]) -> tuple[Any, Callable[..., Grads]]:
        trained, fixed, inputs = tree_unflatten(primals, spec)
        return pull(SegmentWeights(trained, fixed), inputs)

    def joint(primals: list[Any], tangents: list[Tensor]) -> list[Any]:
        nonlocal num_forward, forward_draws, num_out, out_spec
        y, pullback = run(primals)
        with disable_proxy_modes_tracing():
            if (found := _cotangents_of(y)) != cotangents:
                raise _OtherOutputError(found)
        out, out_spec = tree_flatten(y)
        num_out = len(out)
        mode = get_proxy_mode()
        assert mode is not None
        num_forward, forward_draws = len(mode.tracer.graph.nodes), count_draws(mode.tracer.graph)
        grads, below = pullback(tangents)
        return [*out, *grads.values(), *below]

    with seeded(None):
        tangents = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in cotangents
        ]
        module = make_fx(joint, tracing_mode="fake")(leaves, tangents)
    number_draws(module.graph, forward_draws)
    strides = [t.stride() for t in tangents]
    return _Joint(module, len(leaves), num_forward, forward_draws, out_spec, num_out, strides)


def _split(joint: _Joint) -> tuple[GraphModule, GraphModule]:
    """Backward does again what it needs of forward."""
    num = joint.num_leaves + len(joint.strides)
    forward = _copied(
        joint.module, [*range(joint.num_leaves), *range(num, joint.num_forward)], slice(joint.num_out)
    )
    return forward, _copied(joint.module, None, slice(joint.num_out, None))


def _copied(module: GraphModule, kept: Sequence[int] | None, outputs: slice) -> GraphModule:
    """The nodes `kept` of a graph, or all, with some of its `outputs`."""
    copy, copies = Graph(), {}
    nodes = list(module.graph.nodes)
    for n in range(len(nodes) - 1) if kept is None else kept:
        copies[nodes[n]] = copy.node_copy(nodes[n], copies.__getitem__)
    copy.output([copies[node] for node in nodes[-1].args[0][outputs]])
    return GraphModule(module, copy)


def _min_cut(joint: _Joint) -> tuple[GraphModule, GraphModule]:
    """Backward is handed what is cheapest to keep, as the min-cut partitioner sees it."""
    module = joint.module
    changes = [node for node in module.graph.nodes if _mutates(node.target)]
    for node in changes:
        changed = node.meta["val"]
        if changed.stride() != _strides(changed):  # a vectorized kernel takes the result, but not the view
            raise ValueError(f"{node.target} changes a view in place, and its bits as a function are others")
    if changes:
        pure = functionalize(module)
        placeholders = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        primals, tangents = placeholders[: joint.num_leaves], placeholders[joint.num_leaves :]
        by_name = lambda primals, tangents: pure(primals, tangents)  # noqa: E731  # as the partitioner knows them
        module = make_fx(by_name, tracing_mode="fake")(primals, tangents)
        number_draws(module.graph, joint.forward_draws)
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(module, None, num_fwd_outputs=joint.num_out)


def _mutates(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.is_mutable


def _runnable(graph: GraphModule, compiled: bool) -> Callable[..., Any]:
    """The graph without what it does for nothing, drawing from the pass that runs it."""
    redirect_draws(graph.graph, compiled=compiled)
    graph.graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or _mutates(node.target)
    )
    graph.recompile()
    return torch.compile(graph, dynamic=False) if compiled else graph
