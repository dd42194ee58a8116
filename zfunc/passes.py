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
from typing import Any, Literal

import torch
from attrs import frozen
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Recompute = Literal["all", "none", "min-cut"]
RECOMPUTE: tuple[Recompute, ...] = ("all", "none", "min-cut")
Values = dict[str, Tensor]
Grads = tuple[Values, list[Tensor]]
log = logging.getLogger("zfunc")


@frozen
class Weights:
    """What a segment is called with: `trained` is differentiated, `fixed` (frozen, constants) is not."""

    trained: Values
    fixed: Values


Pull = Callable[[Weights, tuple[Any, ...]], tuple[Any, Callable[..., Grads]]]
Backward = Callable[[Weights, tuple[Any, ...], Sequence[Tensor]], Grads]


@frozen
class Passes:
    """`forward(weights, inputs)` returns `(y, residuals)`; `backward(weights, inputs, residuals, cotangents)`
    returns the gradients of `weights.trained` by name and those of the input's floating-point leaves.

    `inputs` is `(x,)` or `(x, targets)`. `cotangents` has one tensor for each floating-point leaf of `y`.
    `keeps` is False where residuals are always None and backward recomputes.
    """

    forward: Callable[[Weights, tuple[Any, ...]], tuple[Any, Any]]
    backward: Callable[[Weights, tuple[Any, ...], Any, Sequence[Tensor]], Grads]
    keeps: bool


def passes(
    function: Callable[..., Any], *, recompute: Recompute, wrt_input: bool, compiled: bool = False
) -> Passes:
    """The pair for `function(params, *inputs)`. `wrt_input` is whether anything below needs a gradient.

    With `compiled` both go through `torch.compile`, once for all that share the pair.
    """
    if recompute == "min-cut":
        return _min_cut(function, wrt_input, compiled)
    pull = _pull(function, wrt_input)
    if recompute == "none":  # a pullback cannot be compiled: zfunc.compile refuses that
        return Passes(pull, lambda _w, _i, residuals, cotangents: residuals(cotangents), keeps=True)

    def forward(weights: Weights, inputs: tuple[Any, ...]) -> Any:
        # Grad mode is on as in backward, for a function that asks; nothing here requires a gradient.
        with torch.enable_grad():
            return function({**weights.trained, **weights.fixed}, *inputs)

    run = _compiled_forward(forward) if compiled else forward
    backward = _retraced(pull, compiled)
    return Passes(lambda w, i: (run(w, i), None), lambda w, i, _, c: backward(w, i, c), keeps=False)


def _pulled(pull: Pull) -> Backward:
    """Recompute and pull back: the plain reference."""

    def backward(weights: Weights, inputs: tuple[Any, ...], cotangents: Sequence[Tensor]) -> Grads:
        _, pullback = pull(weights, inputs)
        return pullback(cotangents)

    return backward


def _retraced(pull: Pull, compiled: bool) -> Backward:
    """`_pulled` as a graph, traced once for each set of shapes: the same operations less those whose result
    backward does not need (the end of the recomputed forward), and no autograd around them.

    Where a function cannot be traced so (a custom autograd Function, say), `_pulled` itself serves: logged.
    """
    plain = _pulled(pull)

    def make(leaves: list[Any], spec: Any, cotangents: Sequence[Tensor]) -> Callable[..., Any] | None:
        graph = _trace_backward(pull, leaves, spec, list(cotangents))
        return torch.compile(graph, dynamic=False) if graph and compiled else graph

    graph_of = _traced_once(make)

    def backward(weights: Weights, inputs: tuple[Any, ...], cotangents: Sequence[Tensor]) -> Grads:
        leaves, graph = graph_of(weights, inputs, cotangents)
        if graph is None:
            return plain(weights, inputs, cotangents)
        return _named(weights, graph(leaves, list(cotangents)))

    return backward


def _traced_once(make: Callable[..., Any]) -> Callable[..., tuple[list[Any], Any]]:
    """`(weights, inputs, *more) -> (leaves, make(leaves, spec, *more))`, made once for all that trace alike."""
    made: dict[Any, Any] = {}

    def get(weights: Weights, inputs: tuple[Any, ...], *more: Any) -> tuple[list[Any], Any]:
        leaves, spec = tree_flatten((weights.trained, weights.fixed, inputs))
        key = _key(leaves, spec)
        if key not in made:
            made[key] = make(leaves, spec, *more)
        return leaves, made[key]

    return get


def _trace_backward(
    pull: Pull, leaves: list[Any], spec: Any, cotangents: list[Tensor]
) -> Callable[..., Any] | None:
    def grads(primals: list[Any], tangents: list[Tensor]) -> list[Tensor]:
        trained, fixed, inputs = tree_unflatten(primals, spec)
        _, pullback = pull(Weights(trained, fixed), inputs)
        of_weights, below = pullback(tangents)
        return [*of_weights.values(), *below]

    try:
        graph = make_fx(functionalize(grads), tracing_mode="fake")(leaves, cotangents)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.warning("a segment's backward cannot be traced and runs through vjp itself: %s", error)
        return None
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _compiled_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` as a graph through `torch.compile`: traced first, so that it sees tensors and nothing else."""

    def make(leaves: list[Any], spec: Any) -> tuple[Callable[..., Any], Any]:
        specs: list[Any] = []

        def flat(primals: list[Any]) -> list[Any]:
            trained, fixed, inputs = tree_unflatten(primals, spec)
            out, out_spec = tree_flatten(forward(Weights(trained, fixed), inputs))
            specs[:] = [out_spec]
            return out

        graph = make_fx(functionalize(flat), tracing_mode="fake")(leaves)
        return torch.compile(graph, dynamic=False), specs[0]

    graph_of = _traced_once(make)

    def run(weights: Weights, inputs: tuple[Any, ...]) -> Any:
        leaves, (graph, out_spec) = graph_of(weights, inputs)
        return tree_unflatten(graph(leaves), out_spec)

    return run


def _named(weights: Weights, grads: Sequence[Tensor]) -> Grads:
    num = len(weights.trained)
    return dict(zip(weights.trained, grads[:num], strict=True)), list(grads[num:])


def _key(leaves: list[Any], spec: Any) -> Any:
    """What a trace depends on. A leaf that is no tensor is part of the program."""
    return (
        tuple((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves),
        spec,
    )


def _floating(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def _pull(function: Callable[..., Any], wrt_input: bool) -> Pull:
    """`(weights, inputs) -> (y, pullback)`, by `vjp` with respect to a tuple of views, never the flat buffer."""

    def pull(weights: Weights, inputs: tuple[Any, ...]) -> tuple[Any, Callable[..., Any]]:
        leaves, spec = tree_flatten(inputs[0])
        moving = [i for i, leaf in enumerate(leaves) if wrt_input and _floating(leaf)]

        def call(trained: Values, moved: list[Tensor]) -> tuple[list[Tensor], Any]:
            x = list(leaves)
            for i, leaf in zip(moving, moved, strict=True):
                x[i] = leaf
            y = function({**trained, **weights.fixed}, tree_unflatten(x, spec), *inputs[1:])
            return [t for t in tree_leaves(y) if _floating(t)], y

        _, pullback, y = vjp(call, weights.trained, [leaves[i] for i in moving], has_aux=True)
        # retain_graph defaults to True there, and create_graph to the grad mode: both would keep residuals.
        return y, lambda cotangents: pullback(list(cotangents), retain_graph=False, create_graph=False)

    return pull


def _min_cut(function: Callable[..., Any], wrt_input: bool, compiled: bool) -> Passes:
    """Trace on first use for each set of shapes; the two graphs serve every segment that shares the pair."""
    pull = _pull(function, wrt_input)
    graphs_of = _traced_once(lambda leaves, spec: _trace(pull, leaves, spec, compiled))

    def forward(weights: Weights, inputs: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        leaves, (run, _, out_spec, num_out) = graphs_of(weights, inputs)
        flat = run(*leaves)
        return tree_unflatten(flat[:num_out], out_spec), list(flat[num_out:])

    def backward(
        weights: Weights, inputs: tuple[Any, ...], residuals: list[Any], cotangents: Sequence[Tensor]
    ) -> Grads:
        _, (_, run, _, _) = graphs_of(weights, inputs)
        return _named(weights, run(*residuals, *cotangents))

    return Passes(forward, backward, keeps=True)


def _trace(pull: Pull, leaves: list[Any], spec: Any, compiled: bool) -> tuple[Any, ...]:
    specs: list[Any] = []

    def joint(primals: list[Any], tangents: list[Tensor]) -> list[Any]:
        trained, fixed, inputs = tree_unflatten(primals, spec)
        y, pullback = pull(Weights(trained, fixed), inputs)
        out, out_spec = tree_flatten(y)
        specs[:] = [out_spec, len(out)]
        if not tangents:
            tangents += [torch.ones_like(t) for t in out if _floating(t)]
            return out
        grads, below = pullback(tangents)
        return [*out, *grads.values(), *below]

    empty = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), leaves)
    tangents: list[Tensor] = []
    joint(empty, tangents)  # on meta: what shapes the cotangents have
    tangents = [torch.empty_like(t, device=leaves[0].device) for t in tangents]
    graph = make_fx(functionalize(joint), tracing_mode="fake")(leaves, tangents)
    forward, backward = min_cut_rematerialization_partition(graph, None, num_fwd_outputs=specs[1])
    if compiled:
        forward, backward = (torch.compile(g, dynamic=False) for g in (forward, backward))
    return forward, backward, *specs
