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
from zfunc.core.regions import BF16, Regions
from zfunc.core.spec import StepSpec


@frozen
class Item:
    """One bucket's thing, or one segment's of a micro-batch, at this point of a step."""

    op: OpBuilder
    spec: StepSpec
    at: Regions
    m: int  # its micro-batch
    b: int  # its bucket or segment


@frozen
class Place:
    """The place of a thing in a tier: the regions of an item, and the rings in which it takes slots."""

    regions: Callable[[Item], tuple[Region, ...]]
    rings: tuple[str, ...] = ()


@frozen
class Thing:
    """A kind of data that moves: the bytes of an item, and its place in each tier."""

    nbytes: Callable[[Item], int]
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


def _weights_in_memory(x: Item) -> tuple[Region, ...]:
    """The parameters of a bucket in memory: in a page if they live on the disk."""
    return (x.at.slot("weight_page", x.b) if x.spec.params_at(x.b) == "disk" else x.at.home(x.b),)


def _stashed(x: Item) -> tuple[Region, ...]:
    """The activations of a segment in pinned memory, in a page on their way to the disk or back."""
    on_disk = x.spec.activations_at(x.b) == "disk"
    return (
        x.at.slot("act_page", x.b) if on_disk else x.at("host_act", x.m % x.spec.settings.group_size, x.b),
    )


def _arrived(x: Item) -> tuple[Region, ...]:
    """A gradient on the host: in a slot if it is to be applied or added at once, or where it waits."""
    return (x.at.slot("host_slot", x.b) if x.spec.lands(x.b) else x.at.gradient_to_apply(x.b),)


def _new_params(x: Item) -> tuple[Region, ...]:
    """The new parameters of a bucket, unless they are the high half of its master, which memory or a slot has."""
    if not x.spec.sends_high_half(x.b):
        return (x.at.slot("param_slot", x.b),)
    return x.at.paged(x.b) if x.b in x.spec.paged else (x.at.high_half(x.b),)


def _slot(buffer: str) -> Place:
    """A slot of a ring."""
    return Place(lambda x: (x.at.slot(buffer, x.b),), (buffer,))


_EXTENT = Place(lambda x: (x.at("extent", x.b),))

THINGS: dict[str, Thing] = {
    "weights": Thing(
        lambda x: x.at.weight_bytes(x.b),
        {
            "device": _slot("weight_slot"),
            "pinned": Place(_weights_in_memory, ("weight_page",)),
            "disk": _EXTENT,
        },
    ),
    "activations": Thing(
        lambda x: x.at("host_act", 0, x.b).nbytes,
        {
            "device": Place(lambda x: x.op.for_backward(x.m, x.b), ("act_slot",)),
            "pinned": Place(_stashed, ("act_page",)),
            "disk": Place(lambda x: (x.at("disk_act", x.m % x.spec.settings.group_size, x.b),)),
        },
    ),
    "gradient": Thing(
        lambda x: x.at.shard_bytes(x.b, x.at.delivered_bytes),
        {
            "device": Place(lambda x: (x.at.delivered(x.b),)),
            "pinned": Place(_arrived, ("host_slot", "grad_page")),
        },
    ),
    "waiting gradient": Thing(
        lambda x: x.at.spilled(x.b).nbytes,
        {"pinned": _slot("grad_page"), "disk": Place(lambda x: (x.at.spilled(x.b),))},
    ),
    "squares": Thing(
        lambda x: x.at("squares", x.b).nbytes,
        {
            "device": Place(lambda x: (x.at("squares", x.b),)),
            "pinned": Place(lambda x: (x.at("host_squares", x.b),)),
        },
    ),
    "state": Thing(
        lambda x: x.spec.extent(x.b).moved_bytes, {"pinned": _slot("state_slot"), "disk": _EXTENT}
    ),
    # With what memory has of it, too.
    "whole state": Thing(
        lambda x: x.spec.extent(x.b).nbytes, {"pinned": _slot("state_slot"), "disk": _EXTENT}
    ),
    "direction": Thing(
        lambda x: x.at.shard_bytes(x.b, BF16),
        {"device": _slot("direction_shard"), "pinned": _slot("host_direction")},
    ),
    "new parameters": Thing(
        lambda x: x.at.shard_bytes(x.b, x.spec.element_bytes),
        {"pinned": Place(_new_params), "device": Place(lambda x: (x.at.params(x.b),))},
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
    """The operation of this verb on a bucket, or on a micro-batch, then a segment or bucket, then more."""
    row, thing = MOVES[verb], THINGS[MOVES[verb].thing]
    x = Item(op, op.spec, op.at, index[0], index[min(1, len(index) - 1)])
    source, to = thing.places[row.source], thing.places[row.to]
    # What it leaves is looked up first: where it arrives may be another place of the same tier.
    leaves = source.regions(x)
    for ring in to.rings:
        if x.b in op.at.rings[ring]:
            op.at.rings[ring].give(x.b)
    number = op.number(verb, *index)
    arrives = to.regions(x)
    nbytes = thing.nbytes(x)
    return Op(
        verb,
        (number, *index) if row.numbered else index,
        LANES[row.source, row.to],
        (*((op.at("decision"), *arrives) if row.decided else ()), *leaves),
        arrives,
        nbytes=whole_blocks(nbytes) if "disk" in (row.source, row.to) else nbytes,
    )
