"""Operations known to keep tokens apart, and the first operation of a traced forward that is not.

An operation is known if it is named here and shapes show its tokens. Any other is tried before training (check.py).
Tokens lie in the one dimension that is longer in the trace of a row than in that of a tile.
"""

import operator
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.graph_cuts import changed_by, mutates

# Operations element by element, beside those that torch tags so. Dropout's random numbers are a token's own.
ELEMENTS = {"_to_copy", "alias", "bernoulli_", "copy_", "detach", "fill_", "native_dropout", "polar"}
MOVED = {"empty_like", "expand", "full_like", "ones_like", "permute", "squeeze", "stack", "t", "transpose"}
MOVED |= {"unsqueeze", "view_as_complex", "view_as_real", "zeros_like"}
REGROUPED = {"_unsafe_view", "reshape", "view"}
ALONG = {  # operations along their argument `dim`, element by element along other dimensions
    *(
        "_log_softmax",
        "_softmax",
        "all",
        "amax",
        "amin",
        "any",
        "argmax",
        "argmin",
        "cat",
        "cummax",
        "cummin",
    ),
    *("cumprod", "cumsum", "flip", "gather", "glu", "index_select", "linalg_vector_norm", "logcumsumexp"),
    *("logsumexp", "max", "mean", "min", "roll", "scatter", "scatter_", "select", "slice", "sort", "split"),
    *("split_with_sizes", "std", "sum", "topk", "unbind", "var"),
}
NORMS = {"_fused_rms_norm", "native_layer_norm"}  # over their last dimensions
PRODUCTS = {"addmm", "baddbmm", "bmm", "mm"}
Places = tuple[int, int]  # outer, inner: the longer dimension is [outer, tokens, inner]


class _UnknownError(Exception):
    """Raised for an operation that may mix tokens: none known to compute each token of a row on its own."""


def unknown_operation(
    of_row: Mapping[Node, Node], nodes: Iterable[Node], given: Iterable[Node], results: Iterable[Node]
) -> str:
    """The name of the first of `nodes` that is not known to compute each token on its own; "" if all are.
    `nodes` are of a tile's graph, which `of_row` maps to a row's; in the nodes `given` and `results`, tokens
    have a dimension of their own."""
    known: dict[Node, Places | None] = {x: (1, 1) if _longer(x, of_row[x]) else None for x in given}
    try:
        for x in (y for y in nodes if y not in known):
            known[x] = _places(x, of_row, known)
    except _UnknownError:
        return str(x.target)
    return next((f"the order of {x}" for x in results if known.get(x) != (1, 1)), "")


def _places(x: Node, of_row: Mapping[Node, Node], known: Mapping[Node, Places | None]) -> Places | None:
    """How tokens are arranged in the result of node `x`: sizes (outer, inner) if the dimension that is longer
    in a row than in a tile is [outer, tokens, inner]; None for a result without tokens. `known` has the
    answers of earlier nodes."""
    having = [y for y in x.all_input_nodes if known[y] is not None]
    places, longer = {known[y] for y in having}, _longer(x, of_row[x])
    if not having and not longer:
        return None
    _require(len(places) == 1 and (len(longer) == 1 or isinstance(x.meta["val"], tuple | list)))
    (found,) = places
    assert found is not None
    if x.target is operator.getitem:
        return found
    _require(isinstance(x.target, OpOverload))
    _require(not mutates(x.target) or {*changed_by(x)} <= {*having})
    at = {y: (_longer(y, of_row[y]) or [-1])[0] for y in having}
    name, given, others = x.target._schema.name.removeprefix("aten::"), arguments(x), arguments(of_row[x])
    if name in REGROUPED:
        return _regrouped(x.args[0].meta["val"].shape, x.meta["val"].shape, *at.values(), *longer, found)
    _require(name == "expand" or all(_alike(given[k], y) for k, y in others.items()))
    if name not in MOVED:
        _require(_keeps_apart(x, name, given, at, longer))
    return found


def _keeps_apart(x: Node, name: str, given: Mapping[str, Any], at: Mapping[Node, int], longer: Any) -> bool:
    """Whether operation `name` of node `x`, with arguments `given`, computes each token on its own. `at` has
    the token dimension of each tensor argument, `longer` those of the result."""
    dims = lambda y: next(t for t in tree_leaves(y.meta["val"]) if isinstance(t, Tensor)).dim()  # noqa: E731
    from_last = {dims(y) - n for y, n in at.items()}
    if torch.Tag.pointwise in x.target.tags or name in ELEMENTS:
        return from_last == {dims(x) - longer[0]}
    if name == "embedding":
        return {*at} == {x.args[1]}
    if name == "index":  # of a table, by numbers of tokens
        return {*at} == {*x.args[1]} and len(from_last) == 1
    if len({*at.values()}) > 1:
        return False
    first, n = next(iter(at.items()))
    if name in ALONG:
        along = given.get("dim", given.get("dims"))
        all_of_them = name == "slice" and x.meta["val"].shape == first.meta["val"].shape
        apart = along is not None and n not in {i % dims(first) for i in tree_leaves(along)}
        return {*at} >= {y for y in x.all_input_nodes if dims(y) > 1} and (apart or all_of_them)
    if name in NORMS:
        return {*at} == {x.args[0]} and n < dims(first) - len(x.args[1])
    if name in PRODUCTS:
        *added, a, b = x.args[: 3 if "add" in name else 2]
        summed = at.get(a) == dims(a) - 1 or at.get(b) == dims(b) - 2
        return not summed and {*at}.isdisjoint(added) and (len(at) == 1 or n == 0)
    return False


def _regrouped(before: Any, after: Any, old: int, new: int, places: Places) -> Places:
    """The sizes (outer, inner) around tokens after a view changes shape `before` to `after`, in which tokens
    move from dimension `old` to `new`; `places` are the sizes before."""
    outer, rest = divmod(prod(before[:old]) * places[0], prod(after[:new]))
    inner, left = divmod(prod(before[old + 1 :]) * places[1], prod(after[new + 1 :]))
    tokens = before[old] // prod(places)
    _require(not rest and not left and after[new] == outer * tokens * inner)
    return outer, inner


def arguments(x: Node) -> dict[str, Any]:
    """The arguments of the operation of node `x` by name, with defaults for those not given."""
    declared = x.target._schema.arguments
    given = dict(zip((y.name for y in declared), x.args, strict=False))
    return {**{y.name: y.default_value for y in declared}, **given, **x.kwargs}


def _alike(one: Any, other: Any) -> bool:
    """Whether an argument of an operation is the same in the traces of a tile (`one`) and of a row (`other`);
    nodes in it are not compared."""
    a, b = tree_leaves(one), tree_leaves(other)
    return len(a) == len(b) and all(isinstance(p, Node) or p == q for p, q in zip(a, b, strict=True))


def _longer(short: Node, long: Node) -> list[int]:
    """The dimensions in which the result of node `long`, in a row's trace, is longer than that of `short`, in
    a tile's."""
    values = [[t for t in tree_leaves(x.meta.get("val")) if isinstance(t, Tensor)] for x in (short, long)]
    if not all(values):
        return []
    a, b = (found[0].shape for found in values)
    return [n for n in range(max(len(a), len(b))) if a[n : n + 1] != b[n : n + 1]]


def _require(known: bool) -> None:
    if not known:
        raise _UnknownError
