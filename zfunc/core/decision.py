"""What a step decided about its gradient, before anything is updated with it. No torch here.

The invariant: with the gradient itself this is all an update needs, however much later it is made.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from zfunc.core.graph import Graph, Op


@frozen
class StepDecision:
    """What was decided of a gradient: all that an update needs besides.

    `skip` for an overflow; the factor for every gradient (unscale and clip); the update it goes into: its
    `number`, from 1, and the optimizer's `factors` of it. `loss` is the mean loss, for whoever wants to know.
    """

    skip: bool
    grad_scale: float
    number: int
    factors: Mapping[str, Any]
    loss: float = field(default=0.0, eq=False)


def ops_before_decision(graph: Graph) -> Iterator[Op]:
    """The operations whose effect leaves the step although it may be refused: there must be none.

    What updates the state, or publishes it, has to be ordered behind what writes the decision, or to read the
    decision that the step began with: a delayed update was decided one step earlier. A collective has to be ordered
    behind the decision or before it: in between, a rank that refuses the step may leave others waiting. A graph
    without a decision refuses nothing.
    """
    decides = [i for i, op in enumerate(graph) if any(r.buffer == "decision" for r in op.writes)]
    if not decides:
        return
    (decide, *_), needs = decides, graph.predecessors
    behind, before = {decide}, {decide}
    for i in range(decide + 1, len(graph)):
        behind |= {i} if behind.intersection(needs[i]) else set()
    for i in range(decide, -1, -1):
        before |= {*needs[i]} if i in before else set()
    for i, op in enumerate(graph):
        applies_pending = i < decide and any(r.buffer == "decision" for r in op.reads)
        lasts = any(r.trained or r.buffer == "published" for r in op.writes) and not applies_pending
        sends = op.kind == "network" and i not in before
        if i not in behind and (lasts or sends):
            yield op
