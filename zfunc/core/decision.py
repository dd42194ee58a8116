"""What a step decided about its gradient, and which operations have to wait for that decision."""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from zfunc.core.graph import Graph, Op


@frozen
class StepDecision:
    """What a step has decided about its update of the parameters; with deferred updates the next step applies
    the decision.

    `skip`: nothing is updated, because of an fp16 overflow. `grad_scale`: the factor of every gradient, for
    unscaling and clipping. `number`: the update's number, from 1. `factors`: the optimizer's values for this
    update, such as the learning rate. `loss` and `aux`: the mean loss and mean auxiliary outputs, for
    metrics. `unused`: the names of parameters on which the loss does not depend; they are not updated.
    """

    skip: bool
    grad_scale: float
    number: int
    factors: Mapping[str, Any]
    loss: float = field(default=0.0, eq=False)
    aux: Mapping[str, float] = field(factory=dict[str, float], eq=False)
    unused: tuple[str, ...] = ()


def ops_unguarded_by_decision(graph: Graph) -> Iterator[Op]:
    """The operations with an effect outside of the step that may run although the step is refused.

    A correct recipe has none. An operation that updates or publishes the state has to depend on the operation that
    writes the decision, or to read the decision of the step before (a deferred update). A collective has to precede
    the decision or to depend on it: otherwise a rank that refuses the step could leave the others waiting. A graph
    without a decision refuses no step.
    """
    writers = [i for i, op in enumerate(graph) if any(r.buffer == "decision" for r in op.writes)]
    if not writers:
        return
    decide, needs = writers[0], graph.predecessors
    behind, before = {decide}, {decide}
    for i in range(decide + 1, len(graph)):
        behind |= {i} if behind.intersection(needs[i]) else set()
    for i in range(decide, -1, -1):
        before |= {*needs[i]} if i in before else set()
    for i, op in enumerate(graph):
        applies_pending = i < decide and any(r.buffer == "decision" for r in op.reads)
        persists = any(r.trained or r.buffer == "published" for r in op.writes) and not applies_pending
        communicates = op.kind == "network" and i not in before
        if i not in behind and (persists or communicates):
            yield op
