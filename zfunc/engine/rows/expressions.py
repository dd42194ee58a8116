"""Whether two graphs return the same values: equal operations on equal values have one number, in any graph.

`zfunc.engine.rows.check` compares the joint graph of a function with that of its forward's trace, because a trace
of forward loses `torch.no_grad`, and the custom backward of a `torch.autograd.Function`.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from zfunc.engine.trace.graph_cuts import needs_of

NO_COPY = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def expression(joint: GraphModule, known: dict[Any, int]) -> int:
    """A number that identifies the operations of the graph `joint`: equal for graphs of equal operations, if
    `known`, which numbers expressions, is the same dict."""
    numbers = dict[Node, int]()
    for i, (node, needs) in enumerate(needs_of(joint.graph).items()):
        leaves, structure = tree_flatten((node.args, node.kwargs))
        read = [numbers[x] if isinstance(x, Node) else (type(x), repr(x)) for x in leaves]
        constant = str(getattr(joint, str(node.target), None))
        own = {"placeholder": i, "get_attr": constant}.get(node.op, node.target)
        key = own, structure, *read, frozenset(numbers[x] for x in needs)
        numbers[node] = numbers[node.args[0]] if node.target in NO_COPY else known.setdefault(key, len(known))
    return [*numbers.values()][-1]
