"""A segment whose row of tokens passes in tiles: its memory follows the tile, not the row.

The forward of the segment is traced for a whole row and for one tile. What depends on no input, as rotary positions
do, is made for the row and sliced. At its attention the graph of a tile is cut in two, each of which knows no other
token: `before` makes queries, keys and values of tokens, `after` what follows of the result. Keys and values of the
row are kept, 4 bytes a token and key feature in 16 bits. A segment without attention is all `after`.

    forward     for each tile:            before, attend to all keys so far, after
    backward    for each tile:            before, for the keys and values
                for each tile, last first: before, attend, after; pull after, attention, before

Nothing else is kept between the passes. Gradients of weights are added in fp32, last tile first, and rounded once.
A last segment whose loss is a sum over tokens passes a tile of them at a time, too (`TiledLoss`).
The sources are FPDT (2408.16978), which cuts attention, and DeepSpeed's ALST, which cuts the MLP.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zfunc.engine.compile.recompute import part_of_graph
from zfunc.engine.compile.tensor_memory import COUNTED, FakeTensors
from zfunc.engine.compile.tile_attention import ROW_TOKENS, View, attend_tile, pull_tile
from zfunc.runtime.rng import is_draw_node, seeded, seeded_part

Values = dict[str, Tensor]
Function = Callable[..., Any]
TOLERANCE = {2: 3e-2, 4: 1e-4, 8: 1e-9}  # of tiles against the row, relative, by the bytes of an element
NUMBERS = ("Tensor", "number", "Optional[number]", "float", "Optional[float]")  # types of arguments, no sizes
# Operations along dimensions, and which argument has these.
ALONG = dict.fromkeys(
    ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_softmax", "_log_softmax"), 1
)
ALONG |= dict.fromkeys(("mean", "sum", "amax", "amin", "flip"), 1) | {"roll": 2}
FEW = 3  # tiles of fake tensors that all run; of more some stand for all
_ops = torch.library.Library("zfunc", "DEF")
_ops.define("attention(Tensor q, Tensor k, Tensor v, Tensor? first, int? window, float? scale) -> Tensor")


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


@frozen(eq=False)
class _Half:
    """One of the two parts of a tile, and the names of the weights that it reads."""

    passes: Any  # a SegmentVJP of `(weights, rows, constants)`
    trained: tuple[str, ...]
    fixed: tuple[str, ...]
    results: int

    def weights(self, weights: Any) -> Any:
        """Those of the segment that it reads."""
        return type(weights)(
            {x: weights.trained[x] for x in self.trained}, {x: weights.fixed[x] for x in self.fixed}
        )


@frozen(eq=False)
class _Split:
    """A segment for rows of one shape, cut."""

    tile: int
    rows: tuple[int, ...]  # numbers of the input leaves that are rows of tokens
    before: _Half | None
    after: _Half
    constants: Callable[[], list[Any]]
    sliced: tuple[int | None, ...]  # of each constant: the dimension of its tokens
    passed: dict[int, int]  # result -> the input leaf that it is
    spec: Any  # of the results
    scale: float
    window: int | None


@define(eq=False)
class Tiled:
    """The passes of a segment over tiles of its rows [batch, tokens, ...]; `make_vjp` makes those of a half.

    Raises ValueError for a number of tiles that does not divide the tokens, and for a segment in which a token
    depends on others but through attention.
    """

    function: Function
    evaluate: Function  # the same without dropout, for the comparison
    tiles: int
    make_vjp: Callable[..., Any]
    wrt_input: bool
    whole: Any  # the passes of a segment that has no rows, as an embedding of tokens
    name: str = ""
    splits: dict[Any, _Split] = field(factory=dict)
    compared: bool = False

    def forward(self, weights: Any, inputs: tuple[Any, ...]) -> tuple[Any, None]:
        """The segment's output, and no residuals."""
        if not _floats(inputs):
            return self.whole.forward(weights, inputs)
        split, leaves = self._split(weights, inputs)
        if not self.compared and not isinstance(leaves[split.rows[0]], FakeTensor):
            self._compare(weights, inputs)
            self.compared = True
        return self._forward(split, weights, leaves, self.tiles), None

    def backward(self, weights: Any, inputs: tuple[Any, ...], _: None, cotangents: Sequence[Tensor]) -> Any:
        """The gradients of weights by name, and of the input's rows."""
        if not _floats(inputs):
            return self.whole.backward(weights, inputs, None, cotangents)
        split, leaves = self._split(weights, inputs)
        return self._backward(split, weights, leaves, cotangents, self.tiles)

    def prepare(self, weights: Any, inputs: tuple[Any, ...], y: Any) -> Any:
        """Trace both halves of a tile now."""
        if not _floats(inputs):
            return self.whole.prepare(weights, inputs, y)
        split, leaves = self._split(weights, inputs)
        leaves = [x[:, : split.tile] if i in split.rows else x for i, x in enumerate(leaves)]
        y = self._forward(split, weights, leaves, 1)
        given = [torch.empty_like(t) for t in _floats(y)]
        return self._backward(split, weights, leaves, given, 1)

    # --- the passes ---------------------------------------------------------------------------------------------

    def _forward(self, split: _Split, weights: Any, leaves: list[Any], tiles: int) -> Any:
        row = _Row(split, weights, leaves, tiles)
        results: list[Any] = []
        for i in row.numbers():
            q, first, _ = row.before(i)
            out, _ = row.attend(i, q, first) if q is not None else (None, None)
            found, _ = row.run_after(i, out)
            results = results or [row.empty_like(x) for x in found]
            for y, x in zip(results, found, strict=True):
                y[:, row.at(i)] = x
        made = iter(results)
        number = len(results) + len(split.passed)
        flat = [leaves[split.passed[n]] if n in split.passed else next(made) for n in range(number)]
        return tree_unflatten(flat, split.spec)

    def _backward(
        self, split: _Split, weights: Any, leaves: list[Any], cotangents: Sequence[Tensor], tiles: int
    ) -> Any:
        row = _Row(split, weights, leaves, tiles)
        sums: Values = {}
        moved = [i for i in split.rows if leaves[i].is_floating_point()]
        memory = _memory_for if len(moved) == 1 else lambda x, _: torch.empty_like(x)
        below = [memory(leaves[i], cotangents) for i in moved] if self.wrt_input else []
        if split.before is not None:
            for i in row.numbers():
                row.before(i)
            row.start_sums()
        for i in row.numbers(backward=True):
            q, first, before = row.before(i)
            out, lse = row.attend(i, q, first) if q is not None else (None, None)
            _, after = row.run_after(i, out)
            grads, own = row.pull_after(i, out, after, [c[:, row.at(i)] for c in cotangents])
            _add(sums, grads)
            if split.before is not None:
                grads, others = row.pull_before(i, q, first, out, lse, own.pop(), before)
                _add(sums, grads)
                own = [a + b for a, b in zip(own, others, strict=True)]  # two may be one tensor
            for x, dx in zip(below, own, strict=False):
                x[:, row.at(i)] = dx
        return _rounded(sums, weights.trained), below

    # --- the cut ------------------------------------------------------------------------------------------------

    def _split(self, weights: Any, inputs: tuple[Any, ...]) -> tuple[_Split, list[Any]]:
        leaves = tree_leaves(inputs)
        everything = [*weights.trained.values(), *weights.fixed.values(), *leaves]
        key = tuple(
            (t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in everything
        )
        if key not in self.splits:
            self.splits[key] = self._cut(weights, inputs, leaves)
        return self.splits[key], leaves

    def _cut(self, weights: Any, inputs: tuple[Any, ...], leaves: list[Any]) -> _Split:
        # 1. Which leaves are rows, and how long a tile is.
        floats, named = _floats(leaves), f"tiles={self.tiles}: "
        if any(t.dim() < 3 or t.shape[:2] != floats[0].shape[:2] for t in floats):
            shapes = [tuple(t.shape) for t in floats]
            raise ValueError(
                f"{named}got inputs of shape {shapes}, expected rows [batch, tokens, features]: use tiles=1"
            )
        shape = floats[0].shape[:2]
        tokens, tile = shape[1], _tile_of(shape[1], self.tiles)
        rows = tuple(i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.shape[:2] == shape)

        # 2. The forward of a row and of a tile, node by node the same.
        trained, fixed = weights.trained, weights.fixed
        everything, spec = tree_flatten((trained, fixed, inputs))
        number = len(trained) + len(fixed)
        sliced_rows = [number + i for i in rows]
        before = ROW_TOKENS.set(tokens)
        try:
            with torch.no_grad(), _Marked():
                row, part = (partial(_of_tokens, sliced_rows, n) for n in (tokens, tile))
                whole, _ = forward_graph(self.function, everything, spec, row)
                graph, out_spec = forward_graph(self.function, everything, spec, part)
        finally:
            ROW_TOKENS.reset(before)
        pairs = list(zip(graph.graph.nodes, whole.graph.nodes, strict=False))
        if len(graph.graph.nodes) != len(whole.graph.nodes) or any(a.target != b.target for a, b in pairs):
            raise ValueError(
                f"{named}got other operations for a row than for a tile, expected the same: use tiles=1"
            )
        *nodes, output = graph.graph.nodes
        given, body = nodes[: number + len(leaves)], nodes[number + len(leaves) :]

        # 3. Constants, which depend on no input: made for the row.
        depends = dict.fromkeys(given)
        for node in body:
            if any(x in depends for x in node.all_input_nodes):
                depends[node] = None
        free = [x for x in body if x not in depends]
        read = {x for node in (*depends, output) for x in node.all_input_nodes if x not in depends}
        crossing = [x for x in free if x in read]
        of_row = dict(pairs)
        made = part_of_graph(whole, (), [of_row[x] for x in free], [of_row[x] for x in crossing])
        sliced = tuple(_tokens_of(x, of_row[x], tile, tokens) for x in crossing)

        for a, b in pairs:  # as many elements for each token, or whatever the tokens
            x, y = a.meta.get("val"), b.meta.get("val")
            if (
                a in depends
                and isinstance(x, Tensor)
                and y.numel() not in (x.numel(), x.numel() * self.tiles)
            ):
                raise ValueError(
                    f"{named}got a value of shape {list(x.shape)} in a tile and {list(y.shape)} in a row, expected "
                    "one token after the other, none that is padded or left out: use tiles=1"
                )

        of_rows = dict.fromkeys(given[number + i] for i in rows)
        for a in body:
            if any(x in of_rows for x in a.all_input_nodes):
                of_rows[a] = None
            x, y = a.meta.get("val"), of_row[a].meta.get("val")
            alike = isinstance(x, Tensor) and x.shape == y.shape
            if a in depends and a not in of_rows and a.target is torch.ops.aten.slice.Tensor and not alike:
                source = list(a.args[0].meta["val"].shape)
                raise ValueError(
                    f"{named}got a slice as long as the tile of a weight or buffer of shape {source}, expected its "
                    "elements by place in the row: index it by torch.arange(tokens), or use tiles=1"
                )
            if a in depends and (numbers := _other_numbers(a, of_row[a])):
                raise ValueError(
                    f"{named}got the numbers {numbers} of {a.target} in a tile and a row, expected the same "
                    "whatever the tokens, so no scale or capacity made of their number: use tiles=1"
                )
            if a in of_rows and _over_tokens(a, of_row[a]):
                raise ValueError(
                    f"{named}got {a.target} over the tokens, expected tokens that depend on others through "
                    "attention alone: use tiles=1"
                )
            if is_draw_node(a) and (a in free or alike):
                raise ValueError(
                    f"{named}got random numbers of shape {list(y.shape)} that are no token's own, expected such as "
                    "those of nn.Dropout: use it, or tiles=1"
                )

        # 4. Two halves, cut at attention.
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
        passed, results = dict[int, int](), list[Any]()
        for n, x in enumerate(output.args[0]):
            value = x.meta["val"] if isinstance(x, Node) else x
            if x in given and not (isinstance(value, Tensor) and value.is_floating_point()):
                passed[n] = given.index(x) - number
            elif x in depends and isinstance(value, Tensor) and value.shape[:2] == (shape[0], tile):
                results.append(x)
            else:
                got = list(value.shape) if isinstance(value, Tensor) else value
                raise ValueError(f"{named}got a result of shape {got}, expected rows of tokens: use tiles=1")
        names = [*trained, *fixed]
        half = partial(
            self._half, graph, [*names], given, [number + i for i in rows], crossing, len(trained), depends
        )
        before, window, scale = None, None, 1.0
        mark = marks[0] if marks else None
        if mark is not None:
            q, k, v, first, window, scale = mark.args
            scale = q.meta["val"].shape[-1] ** -0.5 if scale is None else scale
            made_before = [q, k, v, *([] if first is None else [first])]
            both = _needed(made_before, body, None) & _needed(results, body, mark)
            if any(is_draw_node(x) for x in both):
                raise ValueError(
                    f"{named}got random numbers before attention that what follows it reads, too, expected them in "
                    "one of the two: drop the input in the segment before, or use tiles=1"
                )
            before = half(body, made_before, None)
        after = half(body, results, mark)
        return _Split(tile, rows, before, after, made, sliced, passed, out_spec, scale, window)

    def _half(
        self,
        graph: GraphModule,
        names: list[str],
        given: list[Node],
        rows: list[int],
        crossing: list[Node],
        num_trained: int,
        depends: Mapping[Node, None],
        body: list[Node],
        results: list[Node],
        mark: Node | None,
    ) -> _Half:
        """The part of a tile's graph that makes `results`, with that of the attention `mark` given."""
        needed = _needed(results, body, mark)
        own = [x for x in body if x in needed and x in depends and x is not mark]
        others = [given[i] for i in range(len(names), len(given)) if i not in rows]
        if any(x in needed and isinstance(x.meta["val"], Tensor) for x in others):
            raise ValueError(
                f"tiles={self.tiles}: got an input of every tile, expected rows of tokens: use tiles=1"
            )
        used = [i for i, _ in enumerate(names) if given[i] in needed]
        inputs = [*(given[i] for i in rows), *([mark] if mark is not None else [])]
        run = part_of_graph(graph, [*(given[i] for i in used), *inputs, *crossing], own, results)

        def function(weights: Values, moved: list[Any], constants: list[Any]) -> list[Any]:
            return list(run(*(weights[names[i]] for i in used), *moved, *constants))

        return _Half(
            self.make_vjp(function, recompute="none", wrt_input=True),
            tuple(names[i] for i in used if i < num_trained),
            tuple(names[i] for i in used if i >= num_trained),
            len(results),
        )

    def _compare(self, weights: Any, inputs: tuple[Any, ...]) -> None:
        """Raise ValueError unless small tiles of a part of the row give what the part gives, of a tile's memory."""
        leaves, spec = tree_flatten(inputs)
        split, _ = self._split(weights, inputs)
        tile = min(32, max(1, split.tile // 8))
        count = max(2, min(split.tile, 512) // tile)
        few = [t[:, : count * tile] if i in split.rows else t for i, t in enumerate(leaves)]
        inputs, weights = tree_unflatten(few, spec), evolve(weights, trained=_as_trained(weights.trained))
        small = Tiled(self.evaluate, self.evaluate, count, self.make_vjp, self.wrt_input, None, compared=True)
        with torch.no_grad():
            expected = self.evaluate({**weights.trained, **weights.fixed}, *inputs)
            try:
                got, _ = small.forward(weights, inputs)
            except Exception as error:
                raise ValueError(
                    f"segment {self.name!r}: tiles={self.tiles}: got an error on {count} tiles of {tile} tokens, "
                    f"expected a forward of any number of them: use tiles=1 ({error})"
                ) from error
        for a, b in zip(_floats(got), _floats(expected), strict=True):
            # Where tiles meet, and there for most tokens: by another order of sums a router may choose otherwise.
            x, y = (t.double().reshape(*t.shape[:2], -1) for t in (a, b))
            off = (x - y).norm(dim=-1) / y.norm(dim=-1)
            meet = [off[:, n::tile] for n in (tile, tile - 1)]
            if (far := max(float(t.nanmedian()) for t in meet)) > TOLERANCE[a.element_size()]:
                raise ValueError(
                    f"segment {self.name!r}: tiles={self.tiles}: got results that differ by {far:.1e} from those "
                    "of a whole row, expected tokens that depend on others through attention alone: use tiles=1"
                )


@frozen(eq=False)
class TiledLoss:
    """The passes of a last segment whose loss is the sum of those of tiles of its rows, given targets that `summed`
    makes of those it gets; `passes` are those of a tile. Backward computes a tile again."""

    tiles: int
    passes: Any
    summed: Function

    def forward(self, weights: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, None]:
        """The loss, and no residuals."""
        losses = [self.passes.forward(weights, tile)[0] for _, tile in self._each(inputs)]
        return torch.stack(losses).sum(), None

    def backward(self, weights: Any, inputs: tuple[Any, ...], _: None, cotangents: Sequence[Tensor]) -> Any:
        """The gradients of weights by name, and of the input's rows."""
        sums: Values = {}
        below: list[Tensor] = []
        for at, tile in self._each(inputs, backward=True):
            _, residuals = self.passes.forward(weights, tile)
            grads, own = self.passes.backward(weights, tile, residuals, cotangents)
            _add(sums, grads)
            below = below or [torch.empty_like(x) for x in _floats(inputs[0])[: len(own)]]
            for x, dx in zip(below, own, strict=True):
                x[:, at] = dx
        return _rounded(sums, weights.trained), below

    def prepare(self, weights: Any, inputs: tuple[Any, ...], y: Any) -> Any:
        """Trace a tile now."""
        return self.passes.prepare(weights, next(self._each(inputs))[1], y)

    def _each(self, inputs: tuple[Any, ...], *, backward: bool = False) -> Iterator[tuple[slice, Any]]:
        x, *targets = inputs
        leaves, spec = tree_flatten((x, *(self.summed(t) for t in targets)))
        shape = _floats(x)[0].shape[:2]
        tile, fake = _tile_of(shape[1], self.tiles), isinstance(_floats(x)[0], FakeTensor)
        for i in _numbers(self.tiles, 1, fake=fake, backward=backward):
            at = slice(i * tile, (i + 1) * tile)
            own = [t[:, at] if isinstance(t, Tensor) and t.shape[:2] == shape else t for t in leaves]
            with seeded_part(i, 0):
                yield at, tree_unflatten(own, spec)


def _tile_of(tokens: int, tiles: int) -> int:
    """The tokens of a tile. Raises ValueError for tiles that are not equal."""
    if tokens % tiles:
        near = min((n for n in range(1, tokens + 1) if tokens % n == 0), key=lambda n: abs(n - tiles))
        raise ValueError(f"tiles={tiles}: got rows of {tokens} tokens, expected a divisor: use tiles={near}")
    return tokens // tiles


def _numbers(tiles: int, grown: int, *, fake: bool, backward: bool = False) -> Iterator[int]:
    """The numbers of the tiles. Of `fake` tensors a few, counted as all: but for the last tile, costs grow evenly
    behind the first ones, which are `grown`."""
    between, times = tiles - 1 - grown, dict.fromkeys(range(tiles), 1)
    if between > FEW and fake:
        ends = {grown: between // 2, tiles - 2: between // 2}
        middle = {(tiles - 1 + grown) // 2: 1} if between % 2 else {}
        times = dict(sorted({**dict.fromkeys(range(grown), 1), **ends, **middle, tiles - 1: 1}.items()))
    for i in reversed(times) if backward else times:
        before = COUNTED.set(times[i])
        yield i
        COUNTED.reset(before)


def _other_numbers(short: Node, long: Node) -> list[Any]:
    """Two numbers that are no sizes, by which an operation of a tile differs from that of a row."""
    types = (
        [str(x.type) for x in short.target._schema.arguments] if isinstance(short.target, OpOverload) else []
    )
    for kind, a, b in zip(types, short.args, long.args, strict=False):
        if isinstance(a, int | float) and a != b and kind in NUMBERS:
            return [a, b]
    return []


def _needed(results: list[Node], body: list[Node], mark: Node | None) -> set[Node]:
    """What makes `results`, with that of the attention `mark` given."""
    needed = set(results)
    for node in reversed(body):
        if node in needed and node is not mark:
            needed |= {*node.all_input_nodes}
    return needed


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


def _memory_for(x: Tensor, cotangents: Sequence[Tensor]) -> Tensor:
    """Memory for the gradient of rows `x`: that of the cotangent if there is one like it, which no tile reads after
    its own gradient is there, and nothing else after this pass."""
    c = cotangents[0]
    alike = (c.shape, c.stride(), c.dtype) == (x.shape, x.stride(), x.dtype)
    whole = c.is_contiguous() and c.untyped_storage().nbytes() == c.numel() * c.itemsize
    return c if len(cotangents) == 1 and alike and whole else torch.empty_like(x)


def _rounded(sums: Values, trained: Values) -> Values:
    """The gradients in the types of their weights, one at a time, as each is twice as large before."""
    found: Values = {}
    for name, w in trained.items():
        total = sums.pop(name, None)
        found[name] = torch.zeros_like(w) if total is None else total.to(w.dtype)
    return found


def _as_trained(values: Values) -> Values:
    """Weights, those close to zero replaced by others: gates and positions that begin there hide what they will let
    through."""
    made: Values = {}
    for name, w in values.items():
        g = torch.Generator(w.device).manual_seed(0)
        small = float(w.abs().amax()) < 1e-2 if w.numel() else False
        random = partial(torch.randn, w.shape, generator=g, dtype=w.dtype, device=w.device)
        made[name] = random().mul_(0.1) if small else w
    return made


def _add(sums: Values, grads: Values) -> None:
    for name, grad in grads.items():  # two weights whose sum is used may have one tensor as their gradient
        sums[name] = sums[name].add_(grad) if name in sums else grad.to(torch.float32, copy=True)


@define(eq=False)
class _Row:
    """The tiles of one row in one pass, with its constants, keys and values."""

    split: _Split
    weights: Any
    leaves: list[Any]
    tiles: int
    constants: list[Any] = field(init=False)
    keys: Tensor | None = None
    values: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None

    def __attrs_post_init__(self) -> None:
        self.constants = list(self.split.constants())

    def at(self, i: int) -> slice:
        """The tokens of tile `i`."""
        return slice(i * self.split.tile, (i + 1) * self.split.tile)

    def numbers(self, *, backward: bool = False) -> Iterator[int]:
        """The numbers of the tiles; of fake tensors see `_numbers`: a window ends growth."""
        window, fake = self.split.window, isinstance(self.leaves[self.split.rows[0]], FakeTensor)
        grown = 1 if window is None else 1 + -(-window // self.split.tile)
        return _numbers(self.tiles, grown, fake=fake, backward=backward)

    def empty_like(self, x: Tensor) -> Tensor:
        """Memory for a row of what a tile has as `x`."""
        return x.new_empty(x.shape[0], self.tiles * self.split.tile, *x.shape[2:])

    def _inputs(self, i: int, *more: Any) -> tuple[list[Any], list[Any]]:
        rows = [self.leaves[n][:, self.at(i)] for n in self.split.rows]
        start, tile = i * self.split.tile, self.split.tile
        constants = [
            x if dim is None else x.narrow(dim, start, tile)
            for x, dim in zip(self.constants, self.split.sliced, strict=True)
        ]
        return [*rows, *more], constants

    def before(self, i: int) -> tuple[Any, Any, Any]:
        """Queries of tile `i`, the first keys that they see, and what its pull takes; keys and values are kept."""
        half = self.split.before
        if half is None:
            return None, None, None
        with seeded_part(i, 0):
            (q, k, v, *first), residuals = half.passes.forward(half.weights(self.weights), self._inputs(i))
        if self.keys is None or self.values is None:
            rows = self.tiles * self.split.tile
            self.keys, self.values = (x.new_empty(*x.shape[:2], rows, x.shape[3]) for x in (k, v))
        self.keys[:, :, self.at(i)], self.values[:, :, self.at(i)] = k, v
        return q, first[0] if first else None, residuals

    def attend(self, i: int, q: Tensor, first: Any) -> tuple[Tensor, Tensor]:
        """The result of attention of tile `i`, and its log-sum-exp."""
        assert self.keys is not None
        assert self.values is not None
        return attend_tile(q, self.keys, self.values, self._view(i, first))

    def _view(self, i: int, first: Any) -> View:
        return View(i * self.split.tile, self.split.scale, first, self.split.window)

    def run_after(self, i: int, out: Any) -> tuple[list[Tensor], Any]:
        """The results of tile `i`, and what its pull takes."""
        half = self.split.after
        with seeded_part(i, 1):
            return half.passes.forward(half.weights(self.weights), self._inputs(i, *_some(out)))

    def pull_after(
        self, i: int, out: Any, residuals: Any, cotangents: list[Tensor]
    ) -> tuple[Values, list[Tensor]]:
        """Gradients of weights, and of the rows of tile `i` and the result of attention."""
        half = self.split.after
        with seeded_part(i, 1):
            return half.passes.backward(
                half.weights(self.weights), self._inputs(i, *_some(out)), residuals, cotangents
            )

    def start_sums(self) -> None:
        """Zero the gradients of keys and values."""
        assert self.keys is not None
        assert self.values is not None
        self.sums = tuple(  # type: ignore[assignment]
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (self.keys, self.values)
        )

    def pull_before(
        self, i: int, q: Tensor, first: Any, out: Any, lse: Any, cotangent: Tensor, residuals: Any
    ) -> tuple[Values, list[Tensor]]:
        """Gradients of weights, and of the rows of tile `i`, after those of all tiles behind it."""
        half = self.split.before
        assert half is not None
        assert self.keys is not None
        assert self.values is not None
        assert self.sums is not None
        view = self._view(i, first)
        dq = pull_tile(cotangent, q, self.keys, self.values, out, lse, view, self.sums)
        others = [x[:, :, self.at(i)].to(q.dtype) for x in self.sums]
        with seeded_part(i, 0):
            return half.passes.backward(half.weights(self.weights), self._inputs(i), residuals, [dq, *others])


def _floats(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _some(x: Any) -> Iterator[Any]:
    return iter(() if x is None else (x,))
