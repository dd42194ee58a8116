"""Every copy of a step is one operation: a thing moves from a tier to another. A verb is a row.

What moves takes a slot of its ring where it arrives, if it has one there. A fifth tier is a row of `LANES` for each
way there, and a place in each thing that is to go there; a tenth thing is a row of `THINGS`.
"""

from collections.abc import Callable
from typing import NamedTuple

from attrs import frozen

from zfunc.core.extents import whole_blocks
from zfunc.core.graph import Kind, Op, Region, Tier
from zfunc.core.ops import OpBuilder
from zfunc.core.regions import BF16


class Place(NamedTuple):
    """Where a tier has a thing: the regions of one of an index, and the rings in which it takes slots."""

    regions: Callable[..., tuple[Region, ...]]
    rings: tuple[str, ...] = ()


@frozen
class Thing:
    """What moves: the bytes of a bucket's or a segment's, and its place in each tier."""

    nbytes: Callable[[OpBuilder, int], int]
    places: dict[Tier, Place]


class Move(NamedTuple):
    """A verb: a thing, and the tiers that it moves from and to.

    A `numbered` one comes several times in a step, and the first of its index is its number. A `decided` one leaves
    what was there where the step is skipped.
    """

    thing: str
    source: Tier
    to: Tier
    numbered: bool = False
    decided: bool = False


LANES: dict[tuple[Tier, Tier], Kind] = {
    ("disk", "pinned"): "read",
    ("pinned", "disk"): "write",
    ("pinned", "device"): "h2d",
    ("device", "pinned"): "d2h",
}
"""The resource that a move from a tier to another occupies."""


def _home(op: OpBuilder, b: int) -> tuple[Region, ...]:
    """The parameters of a bucket in memory: in a page if they live on the disk."""
    return (op.at.slot("weight_page", b) if op.spec.on_disk(b) else op.at.home(b),)


def _stashed(op: OpBuilder, m: int, s: int) -> tuple[Region, ...]:
    on_disk = op.spec.stashed_on_disk(s)
    return (op.at.slot("act_page", s) if on_disk else op.at.host_activation(m, s),)


def _arrived(op: OpBuilder, _m: int, b: int, _d: int) -> tuple[Region, ...]:
    """A gradient on the host: in a slot if it is to be applied or added at once, or where it waits."""
    return (op.at.slot("host_slot", b) if op.spec.lands(b) else op.at.gradient_to_apply(b),)


def _new_params(op: OpBuilder, b: int) -> tuple[Region, ...]:
    if not op.spec.sends_high_half(b):
        return (op.at.slot("param_slot", b),)
    return op.at.paged(b) if b in op.spec.paged else (op.at.high_half(b),)


THINGS: dict[str, Thing] = {
    "weights": Thing(
        lambda op, b: op.at.weight_bytes(b),
        {
            "device": Place(lambda op, b: (op.at.slot("weight_slot", b),), ("weight_slot",)),
            "pinned": Place(_home, ("weight_page",)),
            "disk": Place(lambda op, b: (op.at.extent(b),)),
        },
    ),
    "activations": Thing(
        lambda op, s: op.at.stashed_bytes(s),
        {
            "device": Place(lambda op, m, s: op.for_backward(m, s), ("act_slot",)),
            "pinned": Place(_stashed, ("act_page",)),
            "disk": Place(lambda op, m, s: (op.at.disk_activation(m, s),)),
        },
    ),
    "gradient": Thing(
        lambda op, b: op.at.shard_bytes(b, op.at.delivered_bytes),
        {
            "device": Place(lambda op, _m, b, _d: (op.at.delivered(b),)),
            "pinned": Place(_arrived, ("host_slot", "grad_page")),
        },
    ),
    "waiting gradient": Thing(
        lambda op, b: op.spec.spilled_bytes(b),
        {
            "pinned": Place(lambda op, b: (op.at.gradient_to_apply(b),), ("grad_page",)),
            "disk": Place(lambda op, b: (op.at.spilled(b),)),
        },
    ),
    "squares": Thing(
        lambda op, b: op.at.squares(b).nbytes,
        {
            "device": Place(lambda op, b: (op.at.squares(b),)),
            "pinned": Place(lambda op, b: (op.at.host_squares(b),)),
        },
    ),
    "state": Thing(
        lambda op, b: op.spec.extent(b).moved_bytes,
        {
            "pinned": Place(lambda op, b: (op.at.slot("state_slot", b),), ("state_slot",)),
            "disk": Place(lambda op, b: (op.at.extent(b),)),
        },
    ),
    "whole state": Thing(  # with what memory has of it
        lambda op, b: op.spec.extent(b).nbytes,
        {
            "pinned": Place(lambda op, b: (op.at.slot("state_slot", b),)),
            "disk": Place(lambda op, b: (op.at.extent(b),)),
        },
    ),
    "direction": Thing(
        lambda op, b: op.at.shard_bytes(b, BF16),
        {
            "device": Place(lambda op, b: (op.at.slot("direction_shard", b),), ("direction_shard",)),
            "pinned": Place(lambda op, b: (op.at.slot("host_direction", b),), ("host_direction",)),
        },
    ),
    "new parameters": Thing(
        lambda op, b: op.at.shard_bytes(b, op.spec.element_bytes),
        {
            "pinned": Place(_new_params),
            "device": Place(lambda op, b: (op.at.params(b),)),
        },
    ),
}

MOVES: dict[str, Move] = {
    "page_in_weights": Move("weights", "disk", "pinned", numbered=True),
    "fetch": Move("weights", "pinned", "device", numbered=True),
    "stash": Move("activations", "device", "pinned"),
    "spill_act": Move("activations", "pinned", "disk"),
    "unspill_act": Move("activations", "disk", "pinned"),
    "unstash": Move("activations", "pinned", "device"),
    "to_host": Move("gradient", "device", "pinned"),
    "squares_to_host": Move("squares", "device", "pinned"),
    "spill": Move("waiting gradient", "pinned", "disk"),
    "unspill": Move("waiting gradient", "disk", "pinned"),
    "page_in": Move("state", "disk", "pinned", numbered=True),
    "page_out": Move("state", "pinned", "disk", decided=True),
    "page_out_all": Move("whole state", "pinned", "disk", decided=True),
    "direction_to_device": Move("direction", "pinned", "device"),
    "direction_to_host": Move("direction", "device", "pinned"),
    "to_device": Move("new parameters", "pinned", "device", decided=True),
}
"""The operations that only copy, in the order in which something is first moved on its way."""


def move(op: OpBuilder, verb: str, *index: int) -> Op:
    """The operation of this verb. `index` is a bucket, or a micro-batch, then a segment or bucket, then more."""
    row = MOVES[verb]
    thing, item = THINGS[row.thing], index[min(1, len(index) - 1)]
    source, to = thing.places[row.source], thing.places[row.to]
    # What it leaves is looked up before it has a slot where it goes: both may be on one tier.
    leaves = source.regions(op, *index)
    for ring in to.rings:
        if item in op.at.rings[ring]:
            op.at.rings[ring].give(item)
    number = op.number(verb, *index)
    arrives = to.regions(op, *index)
    nbytes = thing.nbytes(op, item)
    if "disk" in (row.source, row.to):
        nbytes = whole_blocks(nbytes)
    decided = (op.at.decision(), *arrives) if row.decided else ()
    return Op(
        verb,
        (number, *index) if row.numbered else index,
        LANES[row.source, row.to],
        (*decided, *leaves),
        arrives,
        nbytes=nbytes,
    )
