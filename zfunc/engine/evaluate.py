"""What reads a State and changes nothing: its parameters by name, and the model it is, run forward.

The invariant: nothing here is part of a step, so none of it is planned.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zfunc.engine.program import Program, check_state
from zfunc.engine.state import State
from zfunc.engine.weights import parameter_weights
from zfunc.runtime.rng import fold_seed, redirected, seeded


def params(program: Program, state: State) -> dict[str, Tensor]:
    """Every parameter by full name, as fp32 on the host: copies of the master weights; tied ones once.

    With several ranks all of them have to call this, and each gets everything. Frozen parameters have no master:
    theirs are the values on the device, in the compute precision. Raises DonatedStateError for a state that a step
    has taken.
    """
    check_state(program, state, "params")
    program.ranks.agree("params")
    weights = parameter_weights(state.buffers, program.layout, program.ranks)
    return {name: values.clone() for name, values in weights}


def apply(program: Program, state: State, inputs: Any, *more: Any) -> Any:
    """Run the segments forward, without dropout, with the device's parameters.

    The last segment is called with `more` after its input: the targets for a loss, or nothing if it can do
    without (as `zfunc.models.gpt.Head`, which then returns logits). No gradient, no change; where a segment returns
    a parameter or a part of one, this returns a copy. What a segment draws all the same depends on the state alone.
    """
    check_state(program, state, "apply")
    program.executor.check_process("apply")
    for y in outputs(program, state, inputs, [*[()] * (len(program.segments) - 1), more]):
        last = y  # without keeping those before it
    lent = [*state.buffers.params(), *(t for c in program.calls for t in c.constants.values())]
    storages = {t.untyped_storage()._cdata for t in lent}
    return tree_map_only(Tensor, lambda t: t.clone() if t.untyped_storage()._cdata in storages else t, last)


def outputs(program: Program, state: State, inputs: Any, more: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """The output of one segment after the other, of which the last is that of `apply`; as they are asked for.

    `more` is what each segment is called with after its input: targets for a loss, a
    `zfunc.models.kv_cache.KVCache` to go on token by token.
    """
    views = state.buffers.views
    x = tree_map_only(
        Tensor, lambda t: t.to(program.device, program.dtype if t.is_floating_point() else t.dtype), inputs
    )
    more = tree_map_only(Tensor, lambda t: t.to(program.device), list(more))
    for segment, call, extra in zip(program.segments, program.calls, more, strict=True):
        weights = {short: views[full] for short, full in {**call.trained, **call.fixed}.items()}
        randomness = seeded(fold_seed(state.seed, state.batches, "apply", segment.name))
        with torch.no_grad(), randomness, redirected():  # not around the yield, which would let it out
            x = segment.evaluation({**weights, **call.constants}, x, *extra)
        yield x


def evaluate(program: Program, state: State, batch: tuple[Any, Any]) -> float:
    """The mean loss of `batch = (inputs, targets)`, without dropout. Changes nothing.

    The batch is run at once, not in micro-batches; with several ranks it is each one's own. Raises
    DonatedStateError for a state that a step has taken.
    """
    inputs, targets = batch
    return float(apply(program, state, inputs, targets))
