"""The delayed update as a recipe: the host applies every gradient a step late, beside forward and backward.

    zfunc.compile(segments, recipe=delayed, defer=True, clip_norm=1.0, ...)

It is the deferred recipe in another order. There the update of the step before comes first, and forward reads
the new parameters. Here forward and backward read the old ones, which the device keeps until backward is done:
so Adam overlaps with all of the step, and the training is another one. What reads the State (`zfunc.params`,
`save`, `evaluate`, `flush`) makes the update that is left, and the step after it has that one's parameters from
the start.

No row of docs/published.md: no time of a step was found with the batch that it had.

Source: Ren et al., "ZeRO-Offload" (2021), section 5.2.
"""

from collections.abc import Iterator

from attrs import evolve

from zfunc.core.graph import Op, Region
from zfunc.core.recipes import deferred
from zfunc.core.spec import StepSpec

SETTINGS = {"defer": True, "clip_norm": 1.0}
PUBLISHED = ()
SENDING = ("to_device", "all_gather")


def delayed(spec: StepSpec) -> Iterator[Op]:
    """The operations of a delayed step; a spec with `defer` and clipping has room for what waits."""
    if spec.settings.params_on != "device" or spec.settings.stage == 3 or spec.paged:
        raise ValueError("delayed: got parameters or state off the device and the host, expected them there")
    ops = [with_own_copy(op) for op in deferred(spec)]
    decision = next(i for i, op in enumerate(ops) if op.verb == "global_norm")
    yield from (op for op in ops[:decision] if op.verb not in SENDING)
    yield from (op for op in ops[:decision] if op.verb in SENDING)  # backward is done with the old parameters
    yield from ops[decision:]


def with_own_copy(op: Op) -> Op:
    """The operation with room of its bucket's own for new parameters: they wait longer than in a slot."""

    def own(r: Region) -> Region:
        return evolve(r, buffer="param_copy", index=op.index) if r.buffer == "param_slot" else r

    return evolve(op, reads=map(own, op.reads), writes=map(own, op.writes))
