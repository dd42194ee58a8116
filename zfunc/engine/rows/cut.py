"""The forward of a segment for rows of tokens, cut at attention; a segment that cannot pass in tiles is refused.

Forward is traced for a whole row and for one tile, node by node the same. Values that depend on no input, as rotary
positions, are made for the row and sliced (constants.py). At attention the graph of a tile is cut in two halves, in
which no token knows another: `before` makes queries, keys and values, `after` takes the result of attention.
Without attention all nodes are in `after`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zfunc.engine.rows.constants import constants_of
from zfunc.engine.rows.row_attention import attend_row
from zfunc.engine.rows.tile_attention import ROW_TOKENS
from zfunc.engine.rows.token_operations import arguments, unknown_operation
from zfunc.engine.trace.fake_tensors import FakeTensors
from zfunc.engine.trace.graph_cuts import (
    GraphPiece,
    graph_of,
    needs_of,
    of_written_memory,
    part_of_graph,
    piece_of,
    with_code,
)
from zfunc.engine.trace.joint_graph import cotangents_of
from zfunc.engine.trace.segment_vjp import Inputs, SegmentVJP, SegmentWeights
from zfunc.engine.trace.tensor_memory import Leaves, Tree, Values, empty_like_strided
from zfunc.errors import refuse, setting
from zfunc.runtime.rng import is_draw_node, seeded

Function = Callable[..., Tree]  # a forward: of weights by name, and inputs
MakeVJP = Callable[..., SegmentVJP]  # of a function, with its `cotangents` and fields of `PassOptions`
NUMBERS = ("Tensor", "number", "Optional[number]", "float", "Optional[float]")  # types of arguments, no sizes
ATTENTION = {  # functions of attention, and their arguments that may be positional
    scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    attend_row: ("query", "key", "value", "first", "window", "scale"),
}


@frozen(eq=False)
class Half:
    """The part of a segment before its attention, or after it: its forward and backward for one tile of
    tokens (`passes`), and the names of the weights that it reads."""

    passes: SegmentVJP  # its inputs are `(rows, constants)`
    reads: tuple[str, ...]

    def weights(self, weights: SegmentWeights) -> SegmentWeights:
        """Those of a segment's `weights` that this part, before or after attention, reads."""
        own = ({x: t for x, t in w.items() if x in self.reads} for w in (weights.trained, weights.fixed))
        return SegmentWeights(*own)


@frozen(eq=False)
class Split:
    """A segment divided at its attention into the operations before and after, to run tile by tile on rows
    (sequences of tokens) of one length."""

    before: Half | None
    after: Half
    tile: int  # tokens
    rows: tuple[int, ...]  # numbers of the input leaves that are rows of tokens
    constants: Callable[[], Leaves]  # makes those of a row
    sliced: tuple[int | None, ...]  # of each constant: the dimension of its tokens
    passed: dict[int, int]  # number of a result -> number of the input leaf that it is
    spec: TreeSpec  # of the results
    unknown: str  # the first operation that is not known to keep tokens apart, or ""
    scale: float = 1.0  # of attention
    window: int | None = None


def cut_at_attention(
    function: Function, tiles: int, make_vjp: MakeVJP, weights: SegmentWeights, inputs: Inputs
) -> Split:
    """Divide `function` of `weights` and `inputs` at its attention, for rows in `tiles`; `make_vjp` makes
    forward and backward of each part. Raises ValueError if `tiles` does not divide the tokens, or the
    function cannot run tile by tile."""
    # 1. The forward of a row and of a tile, node by node the same.
    values, leaves = {**weights.trained, **weights.fixed}, tree_leaves(inputs)
    shape, numbers = _rows_of(leaves)
    tokens, tile = shape[1], tile_of(shape[1], tiles)
    graph, whole, spec = _traces(function, values, inputs, numbers, tile)

    # 2. Constants, which depend on no input, are made for the row.
    known, _ = constants_of(graph.graph), constants_of(whole.graph)
    of_row = dict(zip(graph.graph.nodes, whole.graph.nodes, strict=True))
    *nodes, output = graph.graph.nodes
    given, needs = nodes[len(values) : len(values) + len(leaves)], needs_of(graph.graph)
    rows, depends, constants = [given[i] for i in numbers], known.depends, known.given
    _refuse_bags(nodes)
    made = [of_row[x] for x in known.free], [of_row[x] for x in constants]
    make = with_code(part_of_graph(whole, (), *made))
    sliced = tuple(_tokens_of(x, of_row[x], tile, tokens) for x in constants)
    if tiles > 1:
        _refuse_numbers(of_row, depends)

    # 3. Results: rows, or leaves of the input that pass.
    passed, results = dict[int, int](), list[Node]()
    for n, x in enumerate(output.args[0]):
        value = x.meta["val"] if isinstance(x, Node) else x
        if x in given and not (isinstance(value, Tensor) and value.is_floating_point()):
            passed[n] = given.index(x)
        elif x in depends and isinstance(value, Tensor) and value.shape[:2] == (shape[0], tile):
            results.append(x)
        else:
            got = list(value.shape) if isinstance(value, Tensor) else value
            got = f"a result of shape {got}"
            refuse((), got, "rows of tokens, made of the input", f"use {setting('tiles', 1)}")
    others = (x for x in given if x not in rows and isinstance(x.meta.get("val"), Tensor))
    if any(user is not output for x in others for user in x.users):
        refuse((), "an input of every tile", "rows of tokens", f"use {setting('tiles', 1)}")

    # 4. Operations known to keep tokens apart. Memory may be laid out unlike in a trace: views may be copies.
    marks = [x for x in nodes if x.target in ATTENTION]
    of_attention = [x for mark in marks for x in mark.all_input_nodes]
    apart = [x for x in nodes if x in depends]
    starts = [*nodes[: len(values) + len(leaves)], *known.read, *marks]
    unknown = unknown_operation(of_row, apart, starts, [*of_attention, *results])
    _refuse_noise(of_row, apart, starts, depends)
    written = of_written_memory(graph.graph)
    for x in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        x.target = x.target if x in written else torch.ops.aten.reshape.default

    # 5. Two halves, cut at attention.
    piece = partial(piece_of, graph, needs, dict(zip(values, nodes, strict=False)))

    def half(piece: GraphPiece) -> Half:
        def run(weights: Values, moved: Leaves, constants: Leaves) -> Leaves:
            return list(piece.run(*(weights[x] for x in piece.reads), *moved, *constants))

        *_, end = piece.run.graph.nodes
        made = cotangents_of([x.meta["val"] for x in end.args[0] if isinstance(x, Node)])
        return Half(make_vjp(run, recompute="none", wrt_input=True, cotangents=made), piece.reads)

    if len(marks) > 1:
        raise ValueError(f"got {len(marks)} attentions in a segment, expected one: make each layer a segment")
    common = tile, numbers, make, sliced, passed, spec, unknown
    if not marks:
        return Split(None, half(piece([*rows, *constants], results, output)), *common)
    (mark,) = marks
    q, k, v = (mark.kwargs[x] for x in ("query", "key", "value"))
    first, window = mark.kwargs.get("first"), mark.kwargs.get("window")
    scale = mark.kwargs.get("scale") or q.meta["val"].shape[-1] ** -0.5
    before = piece([*rows, *constants], [q, k, v, *([] if first is None else [first])], mark)
    after = piece([*rows, mark, *constants], results, output)
    if before.draws & after.draws:
        got = "random numbers before attention that what follows it reads, too"
        expected = "them in one of the two"
        refuse((), got, expected, f"drop the input in the segment before, or use {setting('tiles', 1)}")
    return Split(half(before), half(after), *common, scale, window)


# --- traces -------------------------------------------------------------------------------------------------


class _Marked(TorchFunctionMode):
    """A mode in which a trace records each call of attention as a single node, so that its kernel can be
    chosen later."""

    def __init__(self, rows: tuple[int, int] | None) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ATTENTION:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(ATTENTION[func], args, strict=False)), **(kwargs or {})}
        y = func(**given) if self.rows is None else _of_tile(self.rows, func, given)
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        node_of = lambda t: tracer.unwrap_proxy(t).node  # noqa: E731
        node = node_of(y)  # the last of those that it is made of
        node.target, node.args, node.kwargs = func, (), tree_map_only(Tensor, node_of, given)
        return y


def _of_tile(rows: tuple[int, int], func: Any, given: dict[str, Any]) -> Tensor:
    """An empty tensor like the result of attention `func(**given)`, so that a trace of `rows` (batch, tokens)
    runs no kernel. Raises ValueError for attention that cannot be computed tile by tile, such as one with a
    mask."""
    q, k, v = (given[x] for x in ("query", "key", "value"))
    if given.get("dropout_p"):
        refuse((), "attention with dropout", "it without", f"set its rate to 0, or use {setting('tiles', 1)}")
    if shapes := [list(x.shape) for x in (q, k, v) if x.dim() != 4 or (x.shape[0], x.shape[2]) != rows]:
        got = f"attention of shape {shapes[0]}"
        expected = f"[batch, heads, tokens, features] of the rows {list(rows)}"
        refuse((), got, expected, f"give one head a dimension, or use {setting('tiles', 1)}")
    masked = given.get("attn_mask") is not None
    if masked or (func is scaled_dot_product_attention and not given.get("is_causal")):
        got = f"attention with {'a mask' if masked else 'all tokens'}"
        expected = "a causal one, of documents or a window at most"
        refuse((), got, expected, f"leave out the mask, or use {setting('tiles', 1)}")
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)


def _rows_of(leaves: Leaves) -> tuple[torch.Size, tuple[int, ...]]:
    """The shape [batch, tokens] of an input's rows (sequences of tokens), and the indices of the `leaves`
    that are rows."""
    floats = floats_of(leaves)
    if any(t.dim() < 3 or t.shape[:2] != floats[0].shape[:2] for t in floats):
        shapes = [tuple(t.shape) for t in floats]
        got = f"inputs of shape {shapes}"
        refuse((), got, "rows [batch, tokens, features]", f"use {setting('tiles', 1)}")
    shape = floats[0].shape[:2]
    return shape, tuple(i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.shape[:2] == shape)


def _traces(
    function: Function, values: Values, inputs: Inputs, rows: tuple[int, ...], tile: int
) -> tuple[GraphModule, GraphModule, TreeSpec]:
    """Trace forward for one tile of `tile` tokens and for a whole row. Returns both graphs, and the pytree
    structure of the results."""
    leaves, spec = tree_flatten(inputs)
    batch, row = leaves[rows[0]].shape[:2]

    def trace(tokens: int) -> tuple[GraphModule, TreeSpec]:
        ROW_TOKENS.set(row)
        weights, x = empty_like_strided((values, leaves))
        for i in rows:  # of a longer one
            x[i] = x[i].new_empty(batch, 2 * row, *x[i].shape[2:])[:, :tokens]
        return forward_graph(function, (weights, *tree_unflatten(x, spec)), (batch, tokens))

    with torch.no_grad(), detect_fake_mode([*values.values(), *leaves]) or FakeTensors():
        whole, out_spec = copy_context().run(trace, row)
        try:
            short, _ = copy_context().run(trace, tile)
        except Exception as error:
            expected = "a forward of any number of tokens, which takes none by its place as x[:, 5] does"
            do = f"use {setting('tiles', 1)} ({type(error).__name__}: {error})"
            refuse((), f"an error on {tile} tokens and none on {row}", expected, do, cause=error)
    pairs = zip(whole.graph.nodes, short.graph.nodes, strict=False)
    if other := next((f"{a.target}, {b.target}" for a, b in pairs if a.target != b.target), None):
        got = f"other operations for a row than for a tile ({other})"
        expected = "the same, as without a loop over tokens, or a buffer just as long as the row"
        refuse((), got, expected, f"use {setting('tiles', 1)}")
    return short, whole, out_spec


def forward_graph(
    function: Function, arguments: tuple[Tree, ...], rows: tuple[int, int] | None = None
) -> tuple[GraphModule, TreeSpec]:
    """Trace `function` on fake tensors. Returns the graph, in which attention is one node, and the results'
    pytree structure. With `rows` (batch, tokens), for tiles, raises ValueError for attention that cannot be
    computed tile by tile."""
    leaves, spec = tree_flatten(arguments)
    out_spec: Any = None

    def flat(leaves: Leaves) -> Leaves:
        nonlocal out_spec
        results, out_spec = tree_flatten(function(*tree_unflatten(leaves, spec)))
        return results

    with seeded(None), _Marked(rows):
        module = graph_of(flat, leaves)
    module.graph.eliminate_dead_code()
    return module, out_spec


def floats_of(tree: Tree) -> list[Tensor]:
    """The leaves of a pytree that are floating-point tensors."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def tile_of(tokens: int, tiles: int) -> int:
    """The number of tokens in each tile of a row. Raises ValueError unless `tiles` divides `tokens`."""
    if tokens % tiles:
        near = min((n for n in range(1, tokens + 1) if tokens % n == 0), key=lambda n: abs(n - tiles))
        refuse((), f"rows of {tokens} tokens", f"a divisor, not {tiles}", f"use {setting('tiles', near)}")
    return tokens // tiles


# --- what tiles cannot do -----------------------------------------------------------------------------------


def _refuse_numbers(of_row: Mapping[Node, Node], depends: Set[Node]) -> None:
    """Raise ValueError for random numbers that several tokens share, and for a number among an operation's
    arguments that differs between a tile and a row. `of_row` maps nodes of a tile's graph to a row's;
    `depends` are the nodes that depend on the input."""
    for a, b in of_row.items():
        x, y = a.meta.get("val"), b.meta.get("val")
        if is_draw_node(a) and (a not in depends or x.shape == y.shape):
            got = f"random numbers of shape {list(y.shape)} that are no token's own"
            refuse((), got, "such as those of nn.Dropout", f"use it, or {setting('tiles', 1)}")
        if a not in depends or not isinstance(a.target, OpOverload):
            continue
        short, long = arguments(a), arguments(b)
        for declared in a.target._schema.arguments:
            numbers = [short[declared.name], long[declared.name]]
            plain = str(declared.type) in NUMBERS and all(isinstance(n, int | float) for n in numbers)
            if plain and numbers[0] != numbers[1]:
                got = f"the numbers {numbers} of {a.target} in a tile and a row"
                expected = "the same whatever the tokens, so no scale or capacity made of their number"
                refuse((), got, expected, f"use {setting('tiles', 1)}")


def _refuse_bags(nodes: Sequence[Node]) -> None:
    """Raise ValueError for an `embedding_bag`, whose offsets count from the start of a row, not of a tile."""
    if bag := next((x for x in nodes if "embedding_bag" in str(x.target)), None):
        got = f"{bag.target}, whose bags begin at places in a whole row"
        do = f"use embedding(numbers).sum(-2), or .mean or .amax, or {setting('tiles', 1)}"
        refuse((), got, "the embedding of each number", do)


def _refuse_noise(
    of_row: Mapping[Node, Node], apart: Sequence[Node], starts: Sequence[Node], depends: Set[Node]
) -> None:
    """Raise ValueError unless operations on random numbers, among the nodes `apart`, keep tokens independent:
    a cumulative sum along tokens would start anew in each tile, and no trial would show that. `starts` are
    the nodes that these are computed from."""
    noise = {x for x in apart if is_draw_node(x)}
    draws, made = [*noise], list[Node]()
    for x in (x for x in apart if x not in noise):
        of_input = depends.intersection(x.all_input_nodes)
        if of_input and of_input <= noise:
            noise.add(x)
            made.append(x)
    if unknown := unknown_operation(of_row, made, [*starts, *draws], ()):
        got = f"random numbers of tokens in {unknown}, which is not known to keep tokens apart"
        refuse((), got, "such as those of nn.Dropout", f"use it, or {setting('tiles', 1)}")


def _tokens_of(short: Node, long: Node, tile: int, tokens: int) -> int | None:
    """The dimension along which a constant has one entry per token: node `short` of a tile's graph and `long`
    of a row's differ in it. None if their shapes are equal."""
    a, b = (x.meta["val"] for x in (short, long))
    if not isinstance(a, Tensor) or a.shape == b.shape:
        return None
    differ = [n for n, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    if len(differ) != 1 or (a.shape[differ[0]], b.shape[differ[0]]) != (tile, tokens):
        got = f"a constant of shape {list(a.shape)} in a tile and {list(b.shape)} in a row"
        expected = (
            "one dimension of tokens (attention by hand, as with a softcap or sinks, has a mask of two)"
        )
        refuse((), got, expected, f"use {setting('tiles', 1)}")
    return differ[0]
