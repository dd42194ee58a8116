"""A pass of a micro-batch through a segment is one operation, by the row of `zfunc.core.pipeline.PASSES`."""

from collections.abc import Callable

from attrs import asdict

from zfunc.core.graph import Op, Region
from zfunc.core.pipeline import PASSES, B, F, R
from zfunc.core.regions import Regions
from zfunc.core.spec import ALLOCATION


def _weights(at: Regions, _m: int, s: int) -> tuple[Region, ...]:
    """The device regions that a pass through segment `s` reads beside activations: the segment's parameters,
    bucket by bucket, and the model's constants."""
    used, places = at.spec.layout.weights_of(s), at.spec.places
    return (
        *(at.slot_of("weight_slot", b) if places[b].streamed else at.params(b) for b in used),
        *at.constants,
    )


def _left(at: Regions, m: int, s: int) -> tuple[Region, ...]:
    """The device regions with what forward left for backward of segment `s`; if this had been offloaded, the
    staging slot into which it was copied back."""
    return at.left_by_forward(m, s) if at.spec.activations[s] == "device" else (at.slot_of("act_slot", s),)


def _kept(at: Regions, m: int, s: int) -> tuple[Region, ...]:
    """The device regions that backward of segment `s` reads: the results of a separate recomputation, if
    there was one, and what forward left."""
    recomputed = (at("recomputed", m, s),) if (R, s) in at.spec.mesh.parts else ()
    return (*recomputed, *(() if recomputed and at.spec.activations[s] != "device" else _left(at, m, s)))


OPERANDS: dict[str, Callable[[Regions, int, int], tuple[Region, ...]]] = {
    "weights": _weights,  # of backward, too, which may not recompute: the pullback holds them
    "input": lambda at, m, s: at.between(F, m, s),
    "targets": lambda at, m, s: (at("targets", m),) if at.spec.is_last(s) else (),
    # What forward changes, as the micro-batch before left it; what it read of that is a residual.
    "buffers": lambda at, m, s: at.buffers(s, new=m > 0),
    "changed": lambda at, _, s: at.buffers(s, new=True),
    "output": lambda at, m, s: at.losses(m) if at.spec.is_last(s) else at.made_between(F, m, s + 1),
    "residuals": lambda at, m, s: at.residuals(m, s),  # unless backward recomputes them
    # Of rows in tiles what waits for its copy is as large as all that is computed: the loss lets it go first.
    "room": lambda at, _, s: at.act_room(s - (at.spec.is_last(s) and at.spec.settings.tiles != 1)),
    "left": _left,
    "recomputed": lambda at, m, s: (at("recomputed", m, s),),
    "kept": _kept,
    # The gradient of the output, or what that of the loss is made of.
    "above": lambda at, m, s: (at("targets", m),) if at.spec.is_last(s) else at.between(B, m, s + 1),
    "below": lambda at, m, s: at.made_between(B, m, s) if s > at.spec.layout.first_trainable else (),
    "grads": lambda at, m, s: (at("grads", m, s),) if at.spec.layout.buckets_of(s) else (),
    "pending": lambda at, m, s: (
        at("pending", m, s),
    ),  # for W: the input, weights and residuals are free then
    # Rows in tiles have the gradient of the input in the memory of that of the output.
    "reused": lambda at, m, s: (
        at.between(B, m, s + 1) if at.spec.settings.tiles != 1 and not at.spec.is_last(s) else ()
    ),
    "keys": lambda at, _, s: at.keys(s),  # of rows in tiles, on the host
}
"""The regions that a pass of micro-batch `m` through segment `s` takes or makes, by word."""


def make_pass(at: Regions, way: str, m: int, s: int) -> Op:
    """The compute operation for the pass of micro-batch `m` through segment `s` whose kind has the letter
    `way`: "F" forward, "B" backward, "I" its input half, "W" its weight half, "R" recomputation."""
    kind, spec = PASSES[way], at.spec
    if way == F and spec.activations[s] != "device":
        at.ring("act_room").give(s)
    takes, makes = (
        tuple(r for word in words.split() for r in OPERANDS[word](at, m, s))
        for words in (kind.takes, kind.makes)
    )
    cost = asdict(spec.costs[s].passes[way])
    # Beside its cost: the buffers that forward reads, unless a residual has them, and the gradient of the loss.
    if way == F and s in spec.stateful and not at.residuals(m, s):
        cost["workspace"] += spec.buffer_bytes[s]
    if spec.is_last(s) and "above" in kind.takes:
        cost["workspace"] += ALLOCATION
    return Op(kind.verb, (m, s), "compute", takes, makes, **cost)
