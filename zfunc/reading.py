"""What reads a State and changes nothing: its parameters by name, and the model it is, run forward.

The invariant: nothing here is part of a step, so none of it is planned.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zfunc.program import Program
from zfunc.state import Flat, State, regions
from zfunc.weights import parameter_weights


def params(program: Program, state: State) -> dict[str, Tensor]:
    """Every parameter by full name, as fp32 on the host: copies of the master weights; tied ones once.

    With several ranks all of them have to call this, and each gets everything. Frozen parameters have no master:
    theirs are the values on the device, in the compute precision. Raises DonatedStateError for a state that a step
    has taken.
    """
    state.check(program.identity, "params")
    program.ranks.agree("params")
    weights = parameter_weights(state.buffers, program.layout, program.ranks)
    return {name: values.clone() for name, values in weights}


def apply(program: Program, state: State, inputs: Any, *more: Any) -> Any:
    """Run the segments forward, without dropout, with the device's parameters.

    The last segment is called with `more` after its input: the targets for a loss, or nothing if it can do
    without (as `zfunc.gpt.Head`, which then returns logits). No gradient, no change.
    """
    state.check(program.identity, "apply")
    program.executor.check_process("apply")
    views: dict[str, Tensor] = {}
    for value in regions(state.buffers, program.layout).values():
        if isinstance(value, Flat):
            views.update(value.views)
    x = tree_map_only(
        Tensor, lambda t: t.to(program.device, program.dtype if t.is_floating_point() else t.dtype), inputs
    )
    more = tree_map_only(Tensor, lambda t: t.to(program.device), more)
    with torch.no_grad():
        for s, (segment, call) in enumerate(zip(program.segments, program.calls, strict=True)):
            weights = {short: views[full] for short, full in {**call.trained, **call.fixed}.items()}
            extra = more if s == len(program.segments) - 1 else ()
            x = segment.evaluation({**weights, **call.constants}, x, *extra)
    return x


def evaluate(program: Program, state: State, batch: tuple[Any, Any]) -> float:
    """The mean loss of `batch = (inputs, targets)`, without dropout. Changes nothing.

    The batch is run at once, not in micro-batches; with several ranks it is each one's own. Raises
    DonatedStateError for a state that a step has taken.
    """
    inputs, targets = batch
    return float(apply(program, state, inputs, targets))
