"""A segment whose row of tokens passes in tiles: its memory follows the tile, not the row.

The segment is cut at its attention (cut.py). A pass keeps keys and values of the row.

    forward     for each tile:            before, attend to all keys so far, after
    backward    for each tile:            before, for the keys and values
                for each tile, last first: before, attend, after; pull after, attention, before

Nothing is kept between the passes. Gradients of weights are added in fp32, last tile first, and rounded once.
A last segment whose loss is a sum over tokens passes one tile of tokens at a time, too (`TiledLoss`).
The sources are FPDT (2408.16978), which cuts attention, and DeepSpeed's ALST, which cuts the MLP.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator

import torch
from attrs import define, field
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zfunc.engine.rows.cut import Function, Half, MakeVJP, Split, cut_at_attention, floats_of, tile_of
from zfunc.engine.rows.keys import Part, keys_like
from zfunc.engine.rows.tile_attention import Attended, Keys, View, attend_tile, pull_tile, tile_numbers
from zfunc.engine.trace.graph_cuts import Paths
from zfunc.engine.trace.host_keys import WAIT
from zfunc.engine.trace.segment_vjp import Cotangents, Grads, Inputs, Residuals, SegmentVJP, SegmentWeights
from zfunc.engine.trace.tensor_memory import Leaves, Tree, Values, fills_storage, layouts
from zfunc.engine.trace.vjp import paths_of, pull_of
from zfunc.errors import Message, marked, refuse, setting
from zfunc.runtime.rng import seeded_part

# Of a trial: the copies of the segment that ran in it, or True; None: none has been, or none is needed.
Tried = list["Tiled | TiledLoss"] | bool | None
# Tries whether tokens depend on others but through attention, given what it returned before for such rows.
Check = Callable[["Tiled | TiledLoss", SegmentWeights, Inputs, Tried], Tried]


@define(eq=False)
class Tiled:
    """Forward and backward of a segment that run tile by tile on rows [batch, tokens, ...], so memory follows
    the tile. `make_vjp` makes forward and backward of the parts before and after attention.

    Raises ValueError if `tiles` does not divide the tokens, and for a segment in which a token depends on
    others but through attention.
    """

    function: Function
    evaluate: Function  # the same without dropout
    tiles: int
    make_vjp: MakeVJP
    wrt_input: bool
    whole: SegmentVJP | None  # for inputs that have no rows, as tokens to embed; None: all have
    name: str = ""
    splits: dict[Hashable, Split] = field(factory=dict)
    check: Check | None = None  # check.check_tokens
    checked: dict[Hashable, Tried] = field(factory=dict)  # see `_check_once`

    def forward(self, weights: SegmentWeights, inputs: Inputs) -> tuple[Tree, Residuals]:
        """Run forward tile by tile. Returns (the segment's output for whole rows, None): no residuals are
        kept."""
        if not floats_of(inputs):
            return self.whole.forward(weights, inputs)
        split, leaves = self.split(weights, inputs)
        _check_once(self, weights, inputs)
        return self._forward(split, weights, leaves, self.tiles), None

    def backward(
        self, weights: SegmentWeights, inputs: Inputs, _: Residuals, cotangents: Cotangents
    ) -> Grads:
        """Run backward tile by tile; returns gradients of weights, by name, and of the input's rows."""
        if not floats_of(inputs):
            return self.whole.backward(weights, inputs, None, cotangents)
        split, leaves = self.split(weights, inputs)
        return self._backward(split, weights, leaves, cotangents, self.tiles)

    def prepare(self, weights: SegmentWeights, inputs: Inputs, y: Tree) -> Paths:
        """Trace forward and backward of a tile ahead of the first step. Returns, for each output, the weights
        and input leaves that it depends on."""
        if not floats_of(inputs):
            return self.whole.prepare(weights, inputs, y)
        split, leaves = self.split(weights, inputs)
        leaves = [x[:, : split.tile] if i in split.rows else x for i, x in enumerate(leaves)]
        y = self._forward(split, weights, leaves, 1)
        given = [torch.empty_like(t) for t in floats_of(y)]
        self._backward(split, weights, leaves, given, 1)
        return paths_of(pull_of(self.function, self.wrt_input, False), weights, inputs)

    # --- the passes ---------------------------------------------------------------------------------------------

    def _forward(self, split: Split, weights: SegmentWeights, leaves: Leaves, tiles: int) -> Tree:
        row = TiledRow(split, weights, leaves, tiles)
        results: list[Tensor] = []
        for i in row.numbers():
            queries, _ = row.queries(i)
            found, _ = row.run(split.after, i, *(x.out for x in row.attended(i, queries)))
            results = results or [row.empty_like(x) for x in found]
            for y, x in zip(results, found, strict=True):
                y[:, row.at(i)] = x
        made = iter(results)
        number = len(results) + len(split.passed)
        flat = [leaves[split.passed[n]] if n in split.passed else next(made) for n in range(number)]
        return tree_unflatten(flat, split.spec)

    def _backward(
        self, split: Split, weights: SegmentWeights, leaves: Leaves, cotangents: Cotangents, tiles: int
    ) -> Grads:
        row = TiledRow(split, weights, leaves, tiles)
        sums: Values = {}
        moved = [i for i in split.rows if leaves[i].is_floating_point()]
        memory = _memory_for if len(moved) == 1 else lambda x, _: torch.empty_like(x)
        below = [memory(leaves[i], cotangents) for i in moved] if self.wrt_input else []
        if split.before is not None:
            row.look((i, row.queries(i)[0][1]) for i in row.numbers())
            row.keys.start_sums()
        for i in row.numbers(backward=True):
            # 1. A tile's forward again.
            queries, before = row.queries(i)
            attended = row.attended(i, queries)
            out = [x.out for x in attended]
            _, after = row.run(split.after, i, *out)
            # 2. Back through what follows attention, attention, and what comes before; all tiles behind have been.
            grads, own = row.pull(split.after, i, after, [c[:, row.at(i)] for c in cotangents], *out)
            _add(sums, grads)
            if split.before is not None:
                pulled = row.pull_attention(i, own.pop(), *attended)
                grads, others = row.pull(split.before, i, before, pulled)
                del pulled
                _add(sums, grads)
                own = [a + b for a, b in zip(own, others, strict=True)]  # two may be one tensor
            for x, dx in zip(below, own, strict=False):
                x[:, row.at(i)] = dx
        return _rounded(sums, weights.trained), below

    # --- the cut ------------------------------------------------------------------------------------------------

    def split(self, weights: SegmentWeights, inputs: Inputs) -> tuple[Split, Leaves]:
        """The segment divided at attention, cached for these shapes, and the leaves of `inputs`."""
        leaves = tree_leaves(inputs)
        everything = [*weights.trained.values(), *weights.fixed.values(), *leaves]
        key = layouts(everything)
        if key in self.splits:
            return self.splits[key], leaves
        try:
            split = cut_at_attention(self.function, self.tiles, self.make_vjp, weights, inputs)
        except ValueError as error:
            said = Message(f"{setting('tiles', self.tiles)}: {marked(error)}")
            raise ValueError(said) from error
        return self.splits.setdefault(key, split), leaves


@define(eq=False)
class TiledLoss:
    """Forward and backward of a last segment that run tile by tile on rows of tokens. `summed` changes a
    batch's targets so that the loss is the sum of the tiles' losses. `passes` are forward and backward of one
    tile, which backward recomputes."""

    function: Function
    evaluate: Function  # the same without dropout
    tiles: int
    make_vjp: MakeVJP  # of `function`, for a tile
    wrt_input: bool
    summed: Callable[..., Tree]
    name: str = ""
    check: Check | None = None  # check.check_tokens
    checked: dict[Hashable, Tried] = field(factory=dict)  # see `_check_once`
    passes: SegmentVJP = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.passes = self.make_vjp(self.function, recompute="none", wrt_input=self.wrt_input, last=True)

    def forward(self, weights: SegmentWeights, inputs: Inputs) -> tuple[Tensor, None]:
        """Run forward tile by tile. Returns (loss, None): the sum of the tiles' losses, and no residuals."""
        _check_once(self, weights, inputs)
        losses = list[Tensor]()
        for n, (_, tile) in enumerate(self._each(inputs)):
            loss, _ = self.passes.forward(weights, tile)
            if not isinstance(loss, Tensor):
                expected = "the loss alone, a sum over tokens"
                do = "leave the auxiliary outputs out, or summed_targets, and the segment passes whole"
                refuse("tiles", f"{self.tiles} and a loss with auxiliary outputs", expected, do)
            losses = losses or [loss.new_zeros(self.tiles)]  # one tensor, however many are traced
            losses[0][n] = loss
        return losses[0].sum(), None

    def backward(
        self, weights: SegmentWeights, inputs: Inputs, _: Residuals, cotangents: Cotangents
    ) -> Grads:
        """Run backward tile by tile; returns gradients of weights, by name, and of the input's rows."""
        sums: Values = {}
        below: list[Tensor] = []
        for at, tile in self._each(inputs, backward=True):
            _, residuals = self.passes.forward(weights, tile)
            grads, own = self.passes.backward(weights, tile, residuals, cotangents)
            _add(sums, grads)
            below = below or [torch.empty_like(x) for x in floats_of(inputs[0])[: len(own)]]
            for x, dx in zip(below, own, strict=True):
                x[:, at] = dx
        return _rounded(sums, weights.trained), below

    def prepare(self, weights: SegmentWeights, inputs: Inputs, y: Tree) -> Paths:
        """Trace forward and backward of a tile ahead of the first step. Returns the weights and input leaves
        that the loss depends on."""
        return self.passes.prepare(weights, next(self._each(inputs))[1], y)

    def _each(self, inputs: Inputs, *, backward: bool = False) -> Iterator[tuple[slice, Inputs]]:
        x, *targets = inputs
        leaves, spec = tree_flatten((x, *(self.summed(t) for t in targets)))
        shape = floats_of(x)[0].shape[:2]
        tile, fake = tile_of(shape[1], self.tiles), isinstance(floats_of(x)[0], FakeTensor)
        for i in tile_numbers(self.tiles, 1, fake=fake, backward=backward):
            at = slice(i * tile, (i + 1) * tile)
            own = [t[:, at] if isinstance(t, Tensor) and t.shape[:2] == shape else t for t in leaves]
            with seeded_part(i, 0):
                yield at, tree_unflatten(own, spec)


def _check_once(tiled: Tiled | TiledLoss, weights: SegmentWeights, inputs: Inputs) -> None:
    """Raise ValueError if tokens of a row depend on others but through attention; checked once for each row
    shape and segment name. `tiled.checked` has what `check` returned by shape (None: no trial is needed), and
    True by (shape, name)."""
    row = floats_of(inputs)[0]
    done, key = tiled.checked, (row.shape, weights.name)
    if tiled.check is None or isinstance(row, FakeTensor) or key in done or done.get(row.shape, ()) is None:
        return
    done[row.shape] = tiled.check(tiled, weights, inputs, done.get(row.shape))
    done[key] = True


def _memory_for(x: Tensor, cotangents: Cotangents) -> Tensor:
    """Memory for the gradient of a segment's input `x`: that of the only cotangent (gradient of the output),
    if it is laid out like `x`, else new memory. Overwriting is safe, as each tile reads its cotangent before
    its own gradient is written."""
    c = cotangents[0]
    alike = (c.shape, c.stride(), c.dtype) == (x.shape, x.stride(), x.dtype)
    whole = c.is_contiguous() and fills_storage(c)
    return c if len(cotangents) == 1 and alike and whole else torch.empty_like(x)


def _rounded(sums: Values, trained: Values) -> Values:
    """The fp32 gradient `sums` rounded to the dtypes of the `trained` weights, by name. Each sum is removed
    from `sums` when it is rounded, to free its memory."""
    found: Values = {}
    for name, w in trained.items():
        total = sums.pop(name, None)
        found[name] = torch.zeros_like(w) if total is None else total.to(w.dtype)
    return found


def _add(sums: Values, grads: Values) -> None:
    for name, grad in grads.items():  # two weights whose sum is used may have one tensor as their gradient
        sums[name] = sums[name].add_(grad) if name in sums else grad.to(torch.float32, copy=True)


@define(eq=False)
class TiledRow:
    """Rows of tokens in one pass of a tiled segment: their tiles, constants, keys and values."""

    split: Split
    weights: SegmentWeights
    leaves: Leaves
    tiles: int
    constants: Leaves = field(init=False)
    begins: dict[int, int] = field(factory=dict)  # by tile: the first key that it may see
    keys: Keys | None = None  # keys and values, with the sums of their gradients
    there: set[int] = field(
        factory=set
    )  # tiles whose keys and values are kept: made again, they are the same

    def __attrs_post_init__(self) -> None:
        self.constants = list(self.split.constants())

    def at(self, i: int) -> slice:
        """The range of tokens of tile `i` in its row."""
        return slice(*self.part(i))

    def numbers(self, *, backward: bool = False) -> Iterator[int]:
        """Yield the row's tile indices, last first if `backward`; of fake tensors a few stand for all."""
        window, fake = self.split.window, isinstance(self.leaves[self.split.rows[0]], FakeTensor)
        grown = 1 if window is None else 1 + -(-window // self.split.tile)
        return tile_numbers(self.tiles, grown, fake=fake, backward=backward)

    def empty_like(self, x: Tensor) -> Tensor:
        """An empty tensor [batch, tokens, ...] for whole rows, given `x` [batch, tile, ...], one tile of
        it."""
        return x.new_empty(x.shape[0], self.tiles * self.split.tile, *x.shape[2:])

    def _inputs(self, i: int, *more: Tensor) -> tuple[Leaves, Leaves]:
        rows = [self.leaves[n][:, self.at(i)] for n in self.split.rows]
        start, tile = i * self.split.tile, self.split.tile
        constants = [
            x if dim is None else x.narrow(dim, start, tile)
            for x, dim in zip(self.constants, self.split.sliced, strict=True)
        ]
        return [*rows, *more], constants

    def run(self, half: Half, i: int, *more: Tensor) -> tuple[Leaves, Residuals]:
        """Run forward of `half`, the part of the segment before or after attention, on tile `i` and the
        inputs `more`; returns results and residuals."""
        with seeded_part(i, int(half is self.split.after)):
            return half.passes.forward(half.weights(self.weights), self._inputs(i, *more))

    def pull(self, half: Half, i: int, residuals: Residuals, cotangents: Cotangents, *more: Tensor) -> Grads:
        """Run backward of `half`, the part before or after attention, on tile `i`; returns the gradients of
        weights, by name, and of the tile's rows and the inputs `more`."""
        with seeded_part(i, int(half is self.split.after)):
            return half.passes.backward(
                half.weights(self.weights), self._inputs(i, *more), residuals, cotangents
            )

    def queries(self, i: int) -> tuple[Leaves, Residuals]:
        """Run the part before attention on tile `i`, and keep the tile's keys and values. Returns its queries
        and the first keys that they may see, as a list, empty without attention; and the part's residuals."""
        if self.split.before is None:
            return [], None
        (q, k, v, *first), residuals = self.run(self.split.before, i)
        self.keys = self.keys or keys_like((k, v), self.tiles)
        if i not in self.there:
            self.keys.put(self.part(i), (k, v))
        self.there.add(i)
        return [q, *(first or [None])], residuals

    def look(self, firsts: Iterable[tuple[int, Tensor | None]]) -> None:
        """Copy to the host, waiting for the device, the first key that each tile may see, so that tiles skip
        keys of earlier documents. `firsts` has pairs (tile, first keys of its queries). Fake tensors have no
        data: only the copy is counted, and no keys are skipped."""
        known = {i: None if x is None else x.amin() for i, x in firsts}
        if found := [x for x in known.values() if x is not None]:
            begins = torch.stack(found)
            WAIT.get()()
            here = begins.to("cpu", copy=True)
            if not isinstance(here, FakeTensor):
                self.begins = dict(zip(known, here.tolist(), strict=True))

    def part(self, i: int) -> Part:
        """The tokens of tile `i` in its row, as (first, one after the last)."""
        return i * self.split.tile, (i + 1) * self.split.tile

    def attended(self, i: int, queries: Leaves) -> list[Attended]:
        """Attention of the `queries` of tile `i` over the row's keys, as a list of one; [] for none."""
        if not queries:
            return []
        q, first = queries
        view = View(i * self.split.tile, self.split.scale, first, self.split.window, self.begins.get(i, 0))
        return [attend_tile(q, self.keys, view)]

    def pull_attention(self, i: int, cotangent: Tensor, tile: Attended) -> list[Tensor]:
        """The gradients of queries, keys and values of tile `i`, given that of attention's result; call it
        after all later tiles."""
        dq = pull_tile(cotangent, tile, self.keys)
        return [dq, *(x.to(tile.q.dtype) for x in self.keys.sums_of(self.part(i)))]
