"""Whether a token of a segment depends on others outside attention, tried before the segment passes in tiles.

A segment is not tried if each operation of its forward is known to keep tokens apart (token_operations.py), and its
backward is that of these operations. Any other segment is tried in two ways; none is allowed without a trial:

    pieces    a few tokens in tiles of several sizes: results and gradients are those of `function` on all of them,
              and gradients of weights add up. In fp64, or in fp32 where an operation or the memory has no fp64, up
              to a largest difference, without dropout
    poison    a row of the length that trains, in its own dtype, as the only question is whether a token changes:
              some tokens are NaN, huge, large or zero, and no other token changes; the same for gradients that
              come in. Before attention, after it, and of the loss. If there are comparisons, also with all of them
              true, or false, but for poisoned numbers. If memory lacks, the row is halved, which is logged

A trace is tried once with random weights, as initial ones may hide tokens, and once with each segment's weights.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zfunc.engine.rows.cut import Function, Half, Split, floats_of, forward_graph
from zfunc.engine.rows.expressions import expression
from zfunc.engine.rows.tile_attention import ROW_TOKENS
from zfunc.engine.rows.tiles import Tiled, TiledLoss, TiledRow, Tried
from zfunc.engine.trace.fake_tensors import FakeTensors
from zfunc.engine.trace.joint_graph import cotangents_of, joint_graph
from zfunc.engine.trace.segment_vjp import Cotangents, Inputs, SegmentVJP, SegmentWeights
from zfunc.engine.trace.tensor_memory import Leaves, Tree, Values, empty_like_strided
from zfunc.engine.trace.vjp import pull_of
from zfunc.errors import Message, refuse, setting
from zfunc.runtime.rng import seeded

FEW = 256  # tokens in pieces
SIZES = (2, 16)  # numbers of pieces
# The dtype of a trial, None for the segment's own, and whether gradients of weights are compared.
WAYS = ((torch.float64, True), (torch.float32, True), (None, False))
TOLERANCE = {2: 3e-2, 4: 1e-4, 8: 1e-5}  # relative to the largest element, by the bytes of an element
LARGE = 2.0**10  # times a gradient: a backward that is linear in it gives as many times itself, to the bit
OTHERWISE = (
    "expected tokens that depend on others through attention alone, on their place through torch.arange(tokens), "
    f"a backward that is linear in its gradient, and no random numbers in evaluation: use {setting('tiles', 1)}"
)
Answers = Callable[[int], bool] | None
# Results of a part of a segment, and a function of their gradients that returns those of its rows, or None.
Run = tuple[Leaves, Callable[[Cotangents], list[Tensor]] | None]
# What comparisons give in trials, by their number: what they do, then true, false, and by turns.
ANSWERS: tuple[Answers, ...] = (None, lambda _: True, lambda _: False, lambda n: n % 2 == 0)
log = logging.getLogger("zfunc")


def check_tokens(tiled: Tiled | TiledLoss, weights: SegmentWeights, inputs: Inputs, tried: Tried) -> Tried:
    """Check, by running a segment with `weights`, that no token of its rows depends on others but through
    attention, or raise ValueError. `tried` is what an earlier call returned, None at first, when random
    weights are tried, too. Returns None if the segment's operations prove it without a trial."""
    split = tiled.split(weights, inputs)[0] if isinstance(tiled, Tiled) else None
    if not tried and split and not split.unknown and _pulled_alike(tiled.function, split, weights, inputs):
        return None
    began = time.perf_counter()
    said = Message(f"segment {weights.name or tiled.name!r}: {setting('tiles', tiled.tiles)}")
    unknown = f" ({split.unknown} is not known to keep them apart)" if split and split.unknown else ""
    ways = [weights]
    if not tried:
        opened = {name: _opened(w) for name, w in weights.trained.items()}
        ways, tried = [evolve(weights, trained=opened), weights], _tried(tiled, _few(inputs))
    for values in ways:
        with seeded(0):
            found = _in_pieces(tried[1:], values, inputs) or _poisoned(tried[0], values, inputs)
        if found:
            raise ValueError(Message(f"{said.marked}: got {found}{unknown}, {OTHERWISE}"))
    log.info("%s: no token depends on others, seen in %.1f s%s", said, time.perf_counter() - began, unknown)
    return tried


def _tried(tiled: Tiled | TiledLoss, few: int) -> list[Tiled | TiledLoss]:
    """Copies of the tiled segment `tiled` for a trial: its function in one tile; and `evaluate`, its function
    without dropout, in numbers of tiles that divide `few` tokens."""
    counts = [n for n in SIZES if few % n == 0] or [few]
    how: dict[str, Any] = {"make_vjp": _eager, "wrt_input": True, "check": None}
    made = [(1, tiled.function), *((n, tiled.evaluate) for n in counts)]
    own = lambda: {"splits": {}} if isinstance(tiled, Tiled) else {}  # noqa: E731
    return [evolve(tiled, tiles=n, function=f, **how, **own()) for n, f in made]


def _opened(weight: Tensor) -> Tensor:
    """Random values in the shape of `weight`, for a trial in which gates initialized to 0 and mixing factors
    initialized to 1 have an effect."""
    one = sum(n > 1 for n in weight.shape) < 2
    made = torch.rand(weight.shape, generator=_generator(weight.device), device=weight.device)
    made = made * 0.6 + 0.2 if one else (made - 0.5) * (12 * weight.shape[0] / weight.numel()) ** 0.5
    return made.to(weight.dtype)


def _pulled_alike(function: Function, split: Split, weights: SegmentWeights, inputs: Inputs) -> bool:
    """Whether the backward of `function` is what differentiating a trace of its forward gives; it is not if
    it has a custom backward or torch.no_grad, which a trace of forward loses."""
    leaves, structure = tree_flatten(inputs)

    def expressions() -> list[int]:
        ROW_TOKENS.set(_tokens(inputs))
        with torch.no_grad(), FakeTensors():
            trained, fixed, few = empty_like_strided((weights.trained, weights.fixed, leaves))
            for i in split.rows:
                few[i] = few[i].new_empty(few[i].shape[0], split.tile, *few[i].shape[2:])
            x = tree_unflatten(few, structure)
            graph, out_spec = forward_graph(function, ({**trained, **fixed}, *x))
        *_, output = graph.graph.nodes
        given, known = tree_flatten((trained, fixed, x)), dict[Any, int]()
        given = *given, cotangents_of([y.meta["val"] for y in output.all_input_nodes])

        def traced(values: Values, *x: Tree) -> Tree:
            return tree_unflatten(list(graph([*values.values(), *tree_leaves(x)])), out_spec)

        pulls = (pull_of(f, True, False) for f in (function, traced))
        return [expression(joint_graph(pull, None, *given).module, known) for pull in pulls]

    try:
        one, other = copy_context().run(expressions)
    except Exception:  # the segment is tried then
        return False
    return one == other


# --- pieces -----------------------------------------------------------------------------------------------------


def _in_pieces(pieces: Sequence[Tiled | TiledLoss], weights: SegmentWeights, inputs: Inputs) -> str:
    """Text on how the results for a few tokens differ between `pieces`, copies of a segment that divide them
    into different numbers of tiles; "" if they agree, or if the segment runs in no dtype that is tried."""
    tokens, few = _tokens(inputs), _few(inputs)
    # The loss of tokens of the whole row, as the first may have no labels.
    step = tokens // few if isinstance(pieces[0], TiledLoss) else 1
    inputs = _rows(inputs, lambda x: x[:, : few * step : step])
    for dtype, of_weights in WAYS:
        own = evolve(weights, **{k: _cast(getattr(weights, k), dtype) for k in ("trained", "fixed")})
        own = own if of_weights else evolve(own, trained={}, fixed={**own.trained, **own.fixed})
        try:
            return _difference(pieces, own, _cast(inputs, dtype))
        except Exception as error:
            if dtype is None:
                got = f"an error on {few} tokens in tiles"
                do = f"use {setting('tiles', 1)} ({error})"
                refuse(f"segment {pieces[0].name!r}", got, "a forward of any number of them", do, cause=error)
    return ""


def _difference(pieces: Sequence[Tiled | TiledLoss], weights: SegmentWeights, inputs: Inputs) -> str:
    run = pull_of(pieces[0].evaluate, True, isinstance(pieces[0], TiledLoss))
    y, pull = run(weights, inputs)
    given = [_random_like(x) for x in floats_of(y)]
    grads, below = pull(given)
    # A gradient may be zero but for rounding, as that of the keys' bias.
    least = 0.1 * max((float(x.abs().max()) for x in grads.values() if x.numel()), default=0.0)
    # In fp16 less, where what follows of a large gradient may be infinite.
    times = min([LARGE, *(2.0 ** (math.frexp(torch.finfo(x.dtype).max)[1] // 4) for x in given)])
    large, beneath = run(weights, inputs)[1]([x * times for x in given])
    for x, z in zip([*large.values(), *beneath], [*grads.values(), *below], strict=True):
        if _far(x, z * times, least * times) > TOLERANCE[z.element_size()]:
            return "a backward that is not linear in the gradient"
    for tiled in pieces:
        got, _ = tiled.forward(weights, inputs)
        own, under = tiled.backward(weights, inputs, None, [x.clone() for x in given])
        pairs = [("results", x, z, 0.0) for x, z in zip(floats_of(got), floats_of(y), strict=True)]
        pairs += [("gradients of rows", x, z, 0.0) for x, z in zip(under, below, strict=True)]
        pairs += [(f"gradients of {name!r}", own[name], x, least) for name, x in grads.items()]
        for what, x, z, floor in pairs:
            if (far := _far(x, z, floor)) > TOLERANCE[z.element_size()]:
                return f"{what} of {tiled.tiles} tiles that differ by {far:.1e} from those of a whole row"
    return ""


def _far(x: Tensor, y: Tensor, least: float = 0.0) -> float:
    """The largest difference of elements of `x` and `y`, relative to the largest finite element of `y`, or to
    `least` if that is larger; two NaNs are equal."""
    if not y.numel() or torch.equal(x, y):
        return 0.0
    both = x.isnan() & y.isnan()
    most = max(least, float(y.abs().masked_fill(~y.isfinite(), 0).max()), 1e-30)
    far = float((x - y).abs().masked_fill(both | (x == y), 0).max()) / most
    return far if far == far else torch.inf


# --- poison -----------------------------------------------------------------------------------------------------


def _poisoned(whole: Tiled | TiledLoss, weights: SegmentWeights, inputs: Inputs) -> str:
    """Text that names tokens of a row whose values, when set to NaN, huge, large or zero, change other
    tokens' results or gradients; "" if there are none."""
    weights = evolve(weights, trained={}, fixed={**weights.trained, **weights.fixed})
    parts = _of_loss if isinstance(whole, TiledLoss) else _of_halves
    while True:
        try:
            return next((found for found in parts(whole, weights, inputs) if found), "")
        except torch.OutOfMemoryError:
            if (tokens := _tokens(inputs) // 2) < FEW:
                raise
            log.info("segment %r: no memory for a row: %d tokens are looked at", whole.name, tokens)
            inputs = _rows(inputs, lambda x: x[:, :tokens])


def _of_halves(whole: Tiled, weights: SegmentWeights, inputs: Inputs) -> Iterator[str]:
    split, leaves = whole.split(weights, inputs)
    places = [i for i in split.rows if leaves[i].is_floating_point()]

    def run(half: Half, given: list[Tensor]) -> Run:
        own, more = dict(zip(places, given, strict=False)), given[len(places) :]
        row = TiledRow(split, weights, [own.get(i, x) for i, x in enumerate(leaves)], 1)
        results, residuals = row.run(half, 0, *more)
        return results, lambda c: row.pull(half, 0, residuals, c, *more)[1]

    rows, dims = [leaves[i] for i in places], [1 for _ in places]
    if split.before is not None:
        (q, _, v, *_), _ = run(split.before, rows)
        yield _changed(partial(run, split.before), rows, dims, [2, 2, 2, 1], "before attention")
        attended = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])  # laid out as attention is
        rows, dims = [*rows, _random_like(attended).transpose(1, 2)], [*dims, 2]
    made = [1] * (split.spec.num_leaves - len(split.passed))
    yield _changed(
        partial(run, split.after), rows, dims, made, "after attention" if dims[-1] == 2 else "of the row"
    )


def _of_loss(whole: TiledLoss, weights: SegmentWeights, inputs: Inputs) -> Iterator[str]:
    (x, *targets), pull_back = inputs, pull_of(whole.function, True, True)
    leaves, spec = tree_flatten(x)
    places, summed = [i for i, t in enumerate(leaves) if floats_of(t)], [whole.summed(t) for t in targets]

    def run(given: list[Tensor]) -> Run:
        own = dict(zip(places, given, strict=True))
        moved = tree_unflatten([own.get(i, t) for i, t in enumerate(leaves)], spec)
        y, pull = pull_back(weights, (moved, *summed))
        return pull([torch.ones_like(y)])[1], None  # of which a token's is made of its own

    yield _changed(run, [leaves[i] for i in places], [1] * len(places), [1] * len(places), "of the loss")


def _changed(
    run: Callable[[list[Tensor]], Run],
    rows: list[Tensor],
    dims: Sequence[int],
    made: Sequence[int],
    where: str,
) -> str:
    """Text, ending in `where`, that names tokens of the tensors `rows` which change the results or gradients
    of other tokens in `run(rows)`; "" if none do. `dims` has the token dimension of each of `rows`, `made`
    that of each result."""
    tokens = rows[0].shape[dims[0]]
    places = [
        sorted({*few} - {end})
        for *few, end in ((0, 5 * tokens // 8, tokens - 1), (tokens // 3, tokens - 1, 0))
    ]
    # Values beyond most thresholds, and those of padding; for all others each comparison gives what ANSWERS say.
    huge = torch.finfo(rows[0].dtype).max ** 0.4
    of_row = ((places[0], torch.nan), (places[1], huge), (places[1], -8.0), (places[1], 0.0))

    def made_of(x: list[Tensor], answers: Answers, cotangents: list[Tensor] | None = None) -> Any:
        with _Answered(answers) as mode:
            results, pull = run(x)
            return results, pull(cotangents) if cotangents else [], mode.compared

    results, pull = run(rows)
    given = [_random_like(x) for x in results if x.is_floating_point()] if pull else []
    del pull
    for answers in ANSWERS:
        results, below, compared = made_of(rows, answers, given)
        for at, factor in of_row if answers is None else of_row[:1]:
            x = [_times(x, dim, at, factor) for x, dim in zip(rows, dims, strict=False)]
            if _others_differ(made_of(x, answers)[0], results, made, at):
                return f"tokens {at} that change others {where}"
        for at, factor in zip(places, (torch.nan, huge), strict=True) if given else ():
            floats = [dim for dim, x in zip(made, results, strict=False) if x.is_floating_point()]
            bad = [_times(x, dim, at, factor) for x, dim in zip(given, floats, strict=True)]
            if _others_differ(made_of(rows, answers, bad)[1], below, dims, at):
                return f"gradients of tokens {at} that change those of others {where}"
        if not compared:
            break
    return ""


class _Answered(TorchDispatchMode):
    """A mode in which comparison number n of floats returns `answers(n)`, but the opposite where an operand
    is NaN: so a result that depends on a comparison with a token set to NaN changes, whatever the threshold.
    """

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers, self.compared = answers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        given = floats_of((args, kwargs))
        if not given or not isinstance(y, Tensor) or y.dtype != torch.bool:
            return y
        self.compared += 1
        if self.answers is not None and torch.Tag.pointwise in func.tags:
            answer = self.answers(self.compared)
            y.fill_(answer)
            for x in given:
                y.masked_fill_(x.isnan().expand_as(y), not answer)
        return y


def _others_differ(
    found: Sequence[Tensor], before: Sequence[Tensor], dims: Sequence[int], at: list[int]
) -> bool:
    """Whether the tensors `found` and `before` differ anywhere but at the tokens `at`; `dims` has the token
    dimension of each."""
    for x, y, dim in zip(found, before, dims, strict=False):
        for start, stop in pairwise([-1, *at, y.shape[dim]]):
            a, b = (t.narrow(dim, start + 1, stop - start - 1) for t in (x, y))
            if _far(a, b) > (TOLERANCE[b.element_size()] if b.is_floating_point() else 0):
                return True
    return False


def _times(x: Tensor, dim: int, at: list[int], factor: float) -> Tensor:
    index = torch.tensor(at, device=x.device)
    return x.clone().index_copy_(dim, index, x.index_select(dim, index) * factor)


# --- rows -------------------------------------------------------------------------------------------------------


def _eager(function: Function, **_: Any) -> SegmentVJP:
    return SegmentVJP(pull_of(function, True, False), lambda _w, _i, residuals, c: residuals(c), keeps=True)


def _tokens(inputs: Inputs) -> int:
    return floats_of(inputs)[0].shape[1]


def _few(inputs: Inputs) -> int:
    """The number of tokens of each row in `inputs`, at most FEW, for a trial in tiles of several sizes."""
    tokens = _tokens(inputs)
    return min(tokens, FEW) // SIZES[-1] * SIZES[-1] or tokens


def _cast(tree: Tree, dtype: torch.dtype | None) -> Tree:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def _rows(inputs: Inputs, part: Callable[[Tensor], Tensor]) -> Inputs:
    """`inputs` with `part(x)` in place of each leaf `x` [batch, tokens, ...] that is a row of tokens."""
    shape = floats_of(inputs)[0].shape[:2]
    return tree_map_only(Tensor, lambda x: part(x) if x.shape[:2] == shape else x, inputs)


def _random_like(x: Tensor) -> Tensor:
    g = _generator(x.device)
    return torch.randn(x.shape, generator=g, device=x.device).to(x.dtype)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)
