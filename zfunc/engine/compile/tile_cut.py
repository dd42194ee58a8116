"""The forward of a segment for rows of tokens, cut at its attention; and what cannot pass in tiles: it is refused.

It is traced for a whole row and for one tile, node by node the same. What depends on no input, as rotary positions,
is made for the row and sliced. At attention the graph of a tile is cut in two, each of which knows no other token:
`before` makes queries, keys and values of tokens, `after` what follows of the result. Without attention all is in
`after`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zfunc.engine.compile.recompute import part_of_graph
from zfunc.engine.compile.tensor_memory import FakeTensors
from zfunc.engine.compile.tile_attention import ROW_TOKENS
from zfunc.runtime.rng import is_draw_node, seeded

Values = dict[str, Tensor]
Function = Callable[..., Any]
NUMBERS = ("Tensor", "number", "Optional[number]", "float", "Optional[float]")  # types of arguments, no sizes
# Operations along dimensions, and which argument has these.
ALONG = dict.fromkeys(
    ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_softmax", "_log_softmax"), 1
)
ALONG |= dict.fromkeys(("mean", "sum", "amax", "amin", "flip"), 1) | {"roll": 2}
_ops = torch.library.Library("zfunc", "DEF")
_ops.define("attention(Tensor q, Tensor k, Tensor v, Tensor? first, int? window, float? scale) -> Tensor")


@frozen(eq=False)
class Half:
    """One of the two parts of a tile, and the names of the weights that it reads."""

    passes: Any  # a SegmentVJP of `(weights, rows, constants)`
    trained: tuple[str, ...]
    fixed: tuple[str, ...]

    def weights(self, weights: Any) -> Any:
        """Those of the segment that it reads."""
        return type(weights)(
            {x: weights.trained[x] for x in self.trained}, {x: weights.fixed[x] for x in self.fixed}
        )


@frozen(eq=False)
class Split:
    """A segment for rows of one shape, cut."""

    tile: int  # tokens
    rows: tuple[int, ...]  # numbers of the input leaves that are rows of tokens
    before: Half | None
    after: Half
    constants: Callable[[], list[Any]]  # for the row
    sliced: tuple[int | None, ...]  # of each constant: the dimension of its tokens
    passed: dict[int, int]  # result -> the input leaf that it is
    spec: Any  # of the results
    scale: float
    window: int | None


def cut_at_attention(
    function: Function, tiles: int, make_vjp: Callable[..., Any], weights: Any, inputs: tuple[Any, ...]
) -> Split:
    """`function` of such weights and inputs, cut for so many tiles; `make_vjp` makes the passes of a half. Raises
    ValueError for rows that `tiles` does not divide, and for what tiles cannot do."""
    # 1. The forward of a row and of a tile, node by node the same.
    named, leaves = f"tiles={tiles}: ", tree_leaves(inputs)
    shape, rows = _rows_of(leaves, named)
    tokens, tile = shape[1], tile_of(shape[1], tiles)
    names = [*weights.trained, *weights.fixed]
    graph, whole, spec = _traces(function, weights, inputs, [len(names) + i for i in rows], (tile, tokens))
    of_row = dict(zip(graph.graph.nodes, whole.graph.nodes, strict=False))
    if len(graph.graph.nodes) != len(whole.graph.nodes) or any(
        a.target != b.target for a, b in of_row.items()
    ):
        raise ValueError(
            f"{named}got other operations for a row than for a tile, expected the same: use tiles=1"
        )
    *nodes, output = graph.graph.nodes
    given, body = nodes[: len(names) + len(leaves)], nodes[len(names) + len(leaves) :]

    # 2. Constants, which depend on no input: made for the row.
    depends = _dependents(given, body)
    free = [x for x in body if x not in depends]
    read = {x for node in (*depends, output) for x in node.all_input_nodes if x not in depends}
    crossing = [x for x in free if x in read]
    constants = part_of_graph(whole, (), [of_row[x] for x in free], [of_row[x] for x in crossing])
    sliced = tuple(_tokens_of(x, of_row[x], tile, tokens) for x in crossing)
    _refuse_mixing(body, depends, [given[len(names) + i] for i in rows], of_row, tiles)

    # 3. Results: rows, or leaves of the input that pass.
    passed, results = dict[int, int](), list[Any]()
    for n, x in enumerate(output.args[0]):
        value = x.meta["val"] if isinstance(x, Node) else x
        if x in given and not (isinstance(value, Tensor) and value.is_floating_point()):
            passed[n] = given.index(x) - len(names)
        elif x in depends and isinstance(value, Tensor) and value.shape[:2] == (shape[0], tile):
            results.append(x)
        else:
            got = list(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(f"{named}got a result of shape {got}, expected rows of tokens: use tiles=1")

    # 4. Two halves, cut at attention.
    tiled = _Tile(graph, names, len(weights.trained), given, rows, crossing, depends, body, make_vjp, named)
    mark = _attention_of(body, of_row, shape, tile, named)
    before, window, scale = None, None, 1.0
    if mark is not None:
        q, k, v, first, window, scale = mark.args
        scale = q.meta["val"].shape[-1] ** -0.5 if scale is None else scale
        made = [q, k, v, *([] if first is None else [first])]
        if any(is_draw_node(x) for x in _needed(made, body, None) & _needed(results, body, mark)):
            raise ValueError(
                f"{named}got random numbers before attention that what follows it reads, too, expected them in "
                "one of the two: drop the input in the segment before, or use tiles=1"
            )
        before = tiled.half(made, None)
    after = tiled.half(results, mark)
    return Split(tile, rows, before, after, constants, sliced, passed, spec, scale, window)


@frozen(eq=False)
class _Tile:
    """The graph of a tile, and what its nodes are."""

    graph: GraphModule
    names: list[str]  # of weights
    num_trained: int
    given: list[Node]  # placeholders of weights and inputs
    rows: tuple[int, ...]
    crossing: list[Node]  # constants
    depends: Mapping[Node, None]  # on what is given
    body: list[Node]
    make_vjp: Callable[..., Any]
    named: str  # how errors begin

    def half(self, results: list[Node], mark: Node | None) -> Half:
        """The part that makes `results`, with that of the attention `mark` given."""
        needed, names, given = _needed(results, self.body, mark), self.names, self.given
        own = [x for x in self.body if x in needed and x in self.depends and x is not mark]
        inputs = given[len(names) :]
        rows = [inputs[i] for i in self.rows]
        if any(x in needed and x not in rows and isinstance(x.meta["val"], Tensor) for x in inputs):
            raise ValueError(f"{self.named}got an input of every tile, expected rows of tokens: use tiles=1")
        used = [i for i, _ in enumerate(names) if given[i] in needed]
        moved = [*rows, *([mark] if mark is not None else [])]
        run = part_of_graph(self.graph, [*(given[i] for i in used), *moved, *self.crossing], own, results)

        def function(weights: Values, moved: list[Any], constants: list[Any]) -> list[Any]:
            return list(run(*(weights[names[i]] for i in used), *moved, *constants))

        return Half(
            self.make_vjp(function, recompute="none", wrt_input=True),
            tuple(names[i] for i in used if i < self.num_trained),
            tuple(names[i] for i in used if i >= self.num_trained),
        )


# --- traces -------------------------------------------------------------------------------------------------


@torch.library.register_fake("zfunc::attention", lib=_ops)
def _row_result(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Marks the place of attention in a trace, where nothing runs."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)


class _Marked(TorchFunctionMode):
    """Marks attention. Raises ValueError for one that tiles cannot do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._mark if func is scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))

    @staticmethod
    def _mark(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG004
    ) -> Tensor:
        causal = (None, None) if attn_mask is None and is_causal else None
        made_of = getattr(attn_mask, "made_of", causal)
        if dropout_p:
            raise ValueError(
                "got attention with dropout, expected it without: set its rate to 0, or use tiles=1"
            )
        if query.dim() != 4:
            raise ValueError(
                f"got attention of queries of shape {list(query.shape)}, expected [batch, heads, tokens, "
                "features]: give one head a dimension, or use tiles=1"
            )
        if made_of is None:
            raise ValueError(
                f"got attention with {'all tokens' if attn_mask is None else 'a mask'}, expected a causal one, of "
                "documents or a window at most: leave out the mask, or use tiles=1"
            )
        return torch.ops.zfunc.attention(query, key, value, *made_of, scale)


def _rows_of(leaves: list[Any], named: str) -> tuple[torch.Size, tuple[int, ...]]:
    """The batch and tokens of rows, and which leaves of the input are such."""
    floats = floats_of(leaves)
    if any(t.dim() < 3 or t.shape[:2] != floats[0].shape[:2] for t in floats):
        shapes = [tuple(t.shape) for t in floats]
        raise ValueError(
            f"{named}got inputs of shape {shapes}, expected rows [batch, tokens, features]: use tiles=1"
        )
    shape = floats[0].shape[:2]
    return shape, tuple(i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.shape[:2] == shape)


def _traces(
    function: Function, weights: Any, inputs: tuple[Any, ...], rows: list[int], tokens: tuple[int, int]
) -> tuple[GraphModule, GraphModule, Any]:
    """The graphs of a tile and of a row of so many tokens, with attention marked; the structure of the results."""
    everything, spec = tree_flatten((weights.trained, weights.fixed, inputs))
    before = ROW_TOKENS.set(tokens[1])
    try:
        with torch.no_grad(), _Marked():
            (tile, out_spec), (row, _) = (
                forward_graph(function, everything, spec, partial(_of_tokens, rows, n)) for n in tokens
            )
    finally:
        ROW_TOKENS.reset(before)
    return tile, row, out_spec


def _of_tokens(rows: Sequence[int], tokens: int, i: int, t: Tensor) -> Tensor:
    """A tensor like leaf `i`; where that is one of the `rows`, so many tokens of a longer row."""
    if i not in rows:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    longer = torch.empty(t.shape[0], 2 * t.shape[1], *t.shape[2:], dtype=t.dtype, device=t.device)
    return longer[:, :tokens]


def forward_graph(
    function: Function, leaves: list[Any], spec: Any, like: Callable[[int, Tensor], Tensor]
) -> tuple[GraphModule, Any]:
    """The operations of `function` of a tree of `leaves` (weights that are trained, others, inputs), and the
    structure of its results. Leaf `i` is traced as the fake tensor `like(i, leaf)`."""
    out_spec: Any = None

    def flat(leaves: list[Any]) -> list[Any]:
        nonlocal out_spec
        trained, fixed, inputs = tree_unflatten(leaves, spec)
        results, out_spec = tree_flatten(function({**trained, **fixed}, *inputs))
        return results

    with seeded(None), detect_fake_mode(leaves) or FakeTensors():
        given = [like(i, t) if isinstance(t, Tensor) else t for i, t in enumerate(leaves)]
        module = make_fx(flat, tracing_mode="fake")(given)
    module.graph.eliminate_dead_code()
    return module, out_spec


def floats_of(tree: Any) -> list[Tensor]:
    """The floating-point tensors of a pytree."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def tile_of(tokens: int, tiles: int) -> int:
    """The tokens of a tile. Raises ValueError for tiles that are not equal."""
    if tokens % tiles:
        near = min((n for n in range(1, tokens + 1) if tokens % n == 0), key=lambda n: abs(n - tiles))
        raise ValueError(f"tiles={tiles}: got rows of {tokens} tokens, expected a divisor: use tiles={near}")
    return tokens // tiles


# --- what tiles cannot do -----------------------------------------------------------------------------------


def _dependents(roots: Sequence[Node], body: list[Node]) -> dict[Node, None]:
    """What depends on `roots`, these first."""
    found = dict.fromkeys(roots)
    for node in body:
        if any(x in found for x in node.all_input_nodes):
            found[node] = None
    return found


def _needed(results: list[Node], body: list[Node], mark: Node | None) -> set[Node]:
    """What makes `results`, with that of the attention `mark` given."""
    needed = set(results)
    for node in reversed(body):
        if node in needed and node is not mark:
            needed |= {*node.all_input_nodes}
    return needed


def _attention_of(
    body: list[Node], of_row: Mapping[Node, Node], shape: torch.Size, tile: int, named: str
) -> Node | None:
    """The attention of a tile, if there is one."""
    marks = [x for x in body if x.target is torch.ops.zfunc.attention.default]
    if len(marks) > 1:
        raise ValueError(
            f"{named}got {len(marks)} attentions in a segment, expected one: make each layer a segment"
        )
    for x in (y for mark in marks for y in mark.args[:3]):
        got, theirs = x.meta["val"].shape, of_row[x].meta["val"].shape
        if (got[0], got[2], theirs[0], theirs[2]) != (shape[0], tile, *shape):
            raise ValueError(
                f"{named}got attention of shape {list(theirs)}, expected [batch, heads, tokens, features] of "
                f"the rows {list(shape)}: use tiles=1"
            )
    return marks[0] if marks else None


def _refuse_mixing(
    body: list[Node], depends: Mapping[Node, None], rows: list[Node], of_row: Mapping[Node, Node], tiles: int
) -> None:
    """Raise ValueError for an operation of which a tile has another part than its tokens of the row's."""
    of_rows, named = _dependents(rows, body), f"tiles={tiles}: "
    for a in body:
        x, y = a.meta.get("val"), of_row[a].meta.get("val")
        alike = isinstance(x, Tensor) and x.shape == y.shape
        if is_draw_node(a) and (a not in depends or alike):
            raise ValueError(
                f"{named}got random numbers of shape {list(y.shape)} that are no token's own, expected such as "
                "those of nn.Dropout: use it, or tiles=1"
            )
        if a not in depends:
            continue
        # As many elements for each token, or whatever the tokens.
        if isinstance(x, Tensor) and y.numel() not in (x.numel(), x.numel() * tiles):
            raise ValueError(
                f"{named}got a value of shape {list(x.shape)} in a tile and {list(y.shape)} in a row, expected "
                "one token after the other, none that is padded or left out: use tiles=1"
            )
        if a not in of_rows and a.target is torch.ops.aten.slice.Tensor and not alike:
            source = list(a.args[0].meta["val"].shape)
            raise ValueError(
                f"{named}got a slice as long as the tile of a weight or buffer of shape {source}, expected its "
                "elements by place in the row: index it by torch.arange(tokens), or use tiles=1"
            )
        if numbers := _other_numbers(a, of_row[a]):
            raise ValueError(
                f"{named}got the numbers {numbers} of {a.target} in a tile and a row, expected the same "
                "whatever the tokens, so no scale or capacity made of their number: use tiles=1"
            )
        if a in of_rows and _over_tokens(a, of_row[a]):
            raise ValueError(
                f"{named}got {a.target} over the tokens, expected tokens that depend on others through "
                "attention alone: use tiles=1"
            )


def _other_numbers(short: Node, long: Node) -> list[Any]:
    """Two numbers that are no sizes, by which an operation of a tile differs from that of a row."""
    types = (
        [str(x.type) for x in short.target._schema.arguments] if isinstance(short.target, OpOverload) else []
    )
    for kind, a, b in zip(types, short.args, long.args, strict=False):
        if isinstance(a, int | float) and a != b and kind in NUMBERS:
            return [a, b]
    return []


def _over_tokens(short: Node, long: Node) -> bool:
    """Whether an operation goes along a dimension that is longer in a row than in a tile."""
    name = getattr(getattr(short.target, "_schema", None), "name", "").removeprefix("aten::")
    if name not in ALONG:
        return False
    a, b = (x.args[0].meta["val"].shape for x in (short, long))
    along = short.args[ALONG[name]] if len(short.args) > ALONG[name] else range(len(a))
    return any(a[n] != b[n] for n in ([along] if isinstance(along, int) else along))


def _tokens_of(short: Node, long: Node, tile: int, tokens: int) -> int | None:
    """The dimension of a constant that has the tokens of a tile, or of a row; None if it is the same for both."""
    a, b = (x.meta["val"] for x in (short, long))
    if not isinstance(a, Tensor) or a.shape == b.shape:
        return None
    differ = [n for n, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    if len(differ) != 1 or (a.shape[differ[0]], b.shape[differ[0]]) != (tile, tokens):
        raise ValueError(
            f"got a constant of shape {list(a.shape)} in a tile and {list(b.shape)} in a row, expected one "
            "dimension of tokens (attention by hand, as with a softcap or sinks, has a mask of two): use tiles=1"
        )
    return differ[0]
