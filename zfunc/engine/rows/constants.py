"""Constants of a traced forward: what depends on no input, as tables of positions that forward makes.

They are made for a whole row, and a tile is given its slice. No memory is both a constant's and a tile's: where
forward writes into the memory of a constant, copies keep the two apart.

    if only constants are written into it      what else reads the constant reads a copy, as it is at that place
    if something of the input is, too          the memory is the tile's, and begins as a copy of the slice
"""

import operator
from collections.abc import Iterable, Sequence, Set

import torch
from attrs import frozen
from torch import Tensor
from torch.fx import Graph, Node

from zfunc.engine.trace.graph_cuts import (
    changed_by,
    depending_on,
    memory_of,
    mutates,
    needs_of,
    of_written_memory,
)

FILLED = (
    "zeros",
    "ones",
    "full",
    "empty",
    "scalar_tensor",
)  # operations with one value, or none, in any shape
SHAPED = (operator.getitem, torch.ops.aten._to_copy.default)  # beside views


@frozen(eq=False)
class Constants:
    """The nodes of a traced forward, sorted into those that depend on its input, and constants."""

    depends: Set[Node]  # on an input, or in memory into which such a value is written
    free: Sequence[Node]  # of all others
    read: Sequence[
        Node
    ]  # of these, read by what depends on an input; or memory that a tile makes to write into
    given: Sequence[
        Node
    ]  # of these, given to a tile; the others have one value everywhere, and a tile makes its own


def constants_of(graph: Graph) -> Constants:
    """Sort the nodes of the traced forward `graph` into `Constants`. If `graph` writes into a constant's
    memory, copies are inserted first."""
    # 1. What depends on an input, and what has memory into which such a value is written.
    needs, depends = needs_of(graph), set[Node]()
    more = {x for x in needs if x.op == "placeholder"}
    while more:
        depends = depending_on(depends | more, needs)
        written = {m for x in depends if mutates(x.target) for y in changed_by(x) for m in memory_of(y)}
        more = {
            x for x in needs if isinstance(x.meta.get("val"), Tensor) and memory_of(x) & written
        } - depends
    begun = [
        x for x in needs if x in depends and x.op != "placeholder" and depends.isdisjoint(x.all_input_nodes)
    ]
    for x in [x for x in begun if not _is_filled(x)]:
        depends = depends - {x} | {_copied(graph, x, [*x.users], x.next)}
    # 2. Copies of constants that are written, one as long as nothing more is.
    written, copies = of_written_memory(graph), dict[Node, Node]()
    for node in [*graph.nodes]:
        if mutates(node.target) and node not in depends:
            copies = {}
        for x in node.all_input_nodes if node in depends else ():
            if x in written and x not in depends:
                copies[x] = copies.get(x) or _copied(graph, x, [], node)
                node.replace_input_with(x, copies[x])
    # 3. What is read, and what of it has one value.
    free, one_value = [x for x in graph.nodes if x not in depends], set[Node]()
    for x in free:
        shaped = x.target in SHAPED or getattr(x.target, "is_view", False)
        if x not in written and (_is_filled(x) or (shaped and one_value.issuperset(x.all_input_nodes))):
            one_value.add(x)
    read = [x for x in free if not depends.isdisjoint(x.users)]
    given = [x for x in read if x not in one_value]
    return Constants(depends, free, [*read, *(x for x in begun if x in depends)], given)


def _is_filled(x: Node) -> bool:
    return str(getattr(x.target, "overloadpacket", "")).removeprefix("aten.") in FILLED


def _copied(graph: Graph, x: Node, users: Iterable[Node], before: Node) -> Node:
    """Insert a copy of constant `x` before node `before`, which `users` read instead of `x`; returns it."""
    with graph.inserting_before(before):
        copy = graph.call_function(torch.ops.aten.clone.default, (x,))
    copy.meta["val"] = x.meta["val"].clone()
    for user in users:
        user.replace_input_with(x, copy)
    return copy
