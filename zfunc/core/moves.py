"""Every copy of a step is one operation: a thing moves from a tier to another. A verb is a row.

What moves takes a slot of its ring where it arrives, if it has one there. A fifth tier is a row of `LANES` for each
way there, and a place in each thing that is to go there; a tenth thing is a row of `THINGS`.
"""

from collections.abc import Callable
from typing import NamedTuple

from attrs import frozen

from zfunc.core.extents import whole_blocks
from zfunc.core.graph import Kind, Op, Region, Tier
from zfunc.core.optimizer_state import GRADIENT, PARAMS
from zfunc.core.pipeline import B, F
from zfunc.core.places import BucketPlaces
from zfunc.core.region_table import BF16, FLOWS, left_bytes
from zfunc.core.regions import Regions
from zfunc.core.spec import StepSpec


class Item(NamedTuple):
    """One thing to copy to tier `to`: data of bucket `b`, or of micro-batch `m` in segment `b`."""

    spec: StepSpec
    at: Regions
    to: Tier
    m: int  # its micro-batch
    b: int  # its bucket or segment

    @property
    def place(self) -> BucketPlaces:
        """Where the parameters, gradient and optimizer state of the item's bucket are."""
        return self.spec.places[self.b]

    @property
    def in_group(self) -> int:
        """The item's micro-batch as a number, from 0, among those that have activations at the same time."""
        return self.m % self.spec.settings.in_flight


RegionsOf = Callable[[Item], tuple[Region, ...]]


@frozen
class Place:
    """Where data of one kind is in one memory tier: in a staging slot of the first of `rings` (ring buffers
    of slots, by name) that has slots for the item, else in the regions that `otherwise(item)` returns; if
    `beside`, a part of it may be in these beside a slot, too."""

    rings: tuple[str, ...] = ()
    otherwise: RegionsOf | None = None
    beside: bool = False

    def of(self, x: Item, *, arrives: bool) -> tuple[Region, ...]:
        """The regions of item `x` in this tier. If it `arrives`, an item that uses staging slots gets a new
        slot; otherwise the regions are those where the item already is."""
        rings = [x.at.ring(buffer) for buffer in self.rings]
        passed = [ring for ring in rings if x.b in ring]
        others = self.otherwise(x) if self.otherwise is not None and (self.beside or not passed) else ()
        if not passed and self.otherwise is not None:
            return others
        slots = [ring.give(x.b) if arrives else ring.slot(x.b) for ring in passed] or [rings[0].slot(x.b)]
        return (slots[0], *others)


@frozen
class Thing:
    """A kind of data that is copied between memory tiers, such as weights or activations: the bytes of one
    item, and where an item is in each tier."""

    nbytes: Callable[[Item], int]
    places: dict[Tier, Place]


class Move(NamedTuple):
    """What a copying operation does, by its verb: copies the kind of data `thing` from tier `source` to tier
    `to`.

    A `numbered` move may happen several times in a step, so its index begins with a count. A `decided` move
    copies nothing in a skipped step.
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


def _new_params(x: Item) -> tuple[Region, ...]:
    """The region off the device from which a bucket's new parameters are copied there: a staging slot, the
    high half of split master weights, or the slot of optimizer state from the disk."""
    if not x.place.sends_high_half:
        return (x.at.slot_of("param_slot", x.b),)
    return x.at.paged(x.b) if x.place.state == "disk" else (x.at.high_half(x.b),)


def _state_at_home(x: Item) -> tuple[Region, ...]:
    """The regions off the device with all that an update of the bucket on the device needs: optimizer state,
    parameters on the host, the waiting gradient. All but the gradient are copied back after the update."""
    parts = x.place.staged_bytes
    apart = (x.at.params(x.b),) if PARAMS in parts and x.place.params == "host" else ()
    waits = (x.at.gradient_to_apply(x.b),) if GRADIENT in parts and x.to == "device" else ()
    return (*x.at.bucket_state(x.b), *x.at.paged(x.b), *apart, *waits)


def _staged_bytes(x: Item) -> int:
    """Bytes copied for the update of bucket `x.b`: its state and gradient if `x` goes to the device, its
    state and new parameters if `x` goes back."""
    stays = PARAMS if x.to == "device" else GRADIENT
    return sum(nbytes for name, nbytes in x.place.staged_bytes.items() if name != stays)


def _between_devices(way: str) -> Thing:
    """A segment's input (`way` F) or the gradient of that (B), which one device makes and another takes: in the
    memory of both devices, and on its way between them in pinned memory."""
    flow = FLOWS[way]
    return Thing(
        lambda x: flow.size(x.spec.costs[x.b]),
        {
            "device": Place(otherwise=lambda x: x.at.between(way, x.m, x.b, sent=x.to != "device")),
            "pinned": Place((f"{flow.own}_hop",), lambda x: (x.at(f"{flow.own}_wire", x.m, x.b),)),
        },
    )


def _offloaded_bytes(x: Item) -> int:
    """Bytes of a segment's activations without the tensors that earlier segments have offloaded."""
    before = {leaf for leaf, of in x.spec.shared_stashes[x.b].items() if of.first != x.b}
    return left_bytes(x.spec, x.b, before)


def _stash(tier: Tier, *, new: bool = False) -> RegionsOf:
    """Where a segment's offloaded activations are in `tier`; `new`: without what earlier segments offload."""
    return lambda x: x.at.stash(x.in_group, x.b, tier, new=new)


def _between_page_and_disk(regions: RegionsOf) -> Thing:
    """What is copied between a page, which has all of it, and those `regions` on the disk."""
    return Thing(
        lambda x: sum(r.nbytes for r in regions(x)),
        {"pinned": Place(("act_page",)), "disk": Place(otherwise=regions)},
    )


_EXTENT = Place(otherwise=lambda x: (x.at("extent", x.b),))
_STATE: dict[Tier, Place] = {"pinned": Place(("state_slot",)), "disk": _EXTENT}

THINGS: dict[str, Thing] = {
    "weights": Thing(
        lambda x: x.place.weight_bytes,
        {
            "device": Place(("weight_slot",)),
            "pinned": Place(
                ("weight_page",),
                lambda x: (x.at.high_half(x.b) if x.place.keeps_high_half else x.at.params(x.b),),
            ),
            "disk": _EXTENT,
        },
    ),
    "activations": Thing(
        _offloaded_bytes,
        {
            "device": Place(otherwise=lambda x: x.at.left_by_forward(x.m, x.b)),
            "pinned": Place(("act_page",), _stash("pinned", new=True), beside=True),
        },
    ),
    "page of activations": _between_page_and_disk(_stash("disk", new=True)),
    "page for backward": _between_page_and_disk(_stash("disk")),
    "activations for backward": Thing(
        lambda x: left_bytes(x.spec, x.b),
        {"device": Place(("act_slot",)), "pinned": Place(("act_page",), _stash("pinned"), beside=True)},
    ),
    "input": _between_devices(F),
    "gradient of input": _between_devices(B),
    # On the host in a slot, if it is applied or added at once, or else where it waits for its update: in memory, or
    # in a page that is spilled. One that is added and then spilled takes both, and arrives in the slot.
    "gradient": Thing(
        lambda x: x.place.delivered_bytes,
        {
            "device": Place(otherwise=lambda x: (x.at.delivered(x.b),)),
            "pinned": Place(("host_slot", "grad_page"), lambda x: (x.at.waiting(x.b),)),
        },
    ),
    "waiting gradient": Thing(
        lambda x: x.at("spilled", x.b).nbytes,
        {"pinned": Place(("grad_page",)), "disk": Place(otherwise=lambda x: (x.at("spilled", x.b),))},
    ),
    "squares": Thing(
        lambda x: x.at("squares", x.b).nbytes,
        {
            "device": Place(otherwise=lambda x: (x.at("squares", x.b),)),
            "pinned": Place(otherwise=lambda x: (x.at("host_squares", x.b),)),
        },
    ),
    "state": Thing(lambda x: x.spec.extents[x.b].moved_bytes, _STATE),
    "whole state": Thing(lambda x: x.spec.extents[x.b].nbytes, _STATE),  # with what memory has of it, too
    "updated state": Thing(
        _staged_bytes, {"pinned": Place(otherwise=_state_at_home), "device": Place(("update_slot",))}
    ),
    "direction": Thing(
        lambda x: x.place.shard_numel * BF16,
        {"device": Place(("direction_shard",)), "pinned": Place(("host_direction",))},
    ),
    "new parameters": Thing(
        lambda x: x.place.shard_bytes,
        {"pinned": Place(otherwise=_new_params), "device": Place(otherwise=lambda x: (x.at.params(x.b),))},
    ),
}

BETWEEN_DEVICES = ("input", "gradient of input")
RECEIVED = tuple((thing, "device") for thing in BETWEEN_DEVICES)

MOVES: dict[str, Move] = {
    "page_in_weights": Move("weights", "disk", "pinned", numbered=True),
    "fetch": Move("weights", "pinned", "device", numbered=True),
    "stash": Move("activations", "device", "pinned"),
    "spill_act": Move("page of activations", "pinned", "disk"),
    "unspill_act": Move("page for backward", "disk", "pinned"),
    "unstash": Move("activations for backward", "pinned", "device"),
    "to_host": Move("gradient", "device", "pinned"),
    "squares_to_host": Move("squares", "device", "pinned"),
    "spill": Move("waiting gradient", "pinned", "disk"),
    "unspill": Move("waiting gradient", "disk", "pinned"),
    "page_in": Move("state", "disk", "pinned", numbered=True),
    "page_out": Move("state", "pinned", "disk", decided=True),
    "page_out_all": Move("whole state", "pinned", "disk", decided=True),
    "state_to_device": Move("updated state", "pinned", "device"),
    "state_to_host": Move("updated state", "device", "pinned", decided=True),
    "direction_to_device": Move("direction", "pinned", "device"),
    "direction_to_host": Move("direction", "device", "pinned"),
    "to_device": Move("new parameters", "pinned", "device", decided=True),
    # From a device to another: through pinned memory, or from rank to rank over the network. Peers receive, in one
    # operation, what the other device has.
    "send_act": Move("input", "device", "pinned"),
    "recv_act": Move("input", "pinned", "device"),
    "send_grad_act": Move("gradient of input", "device", "pinned"),
    "recv_grad_act": Move("gradient of input", "pinned", "device"),
}
"""The operations that only copy, in the order in which something is first moved on its way."""


def move(at: Regions, verb: str, *index: int) -> Op:
    """The copying operation `verb`. Its `index` is (bucket,), or (micro-batch, segment or bucket); for
    gradients the number of the delivery (of a tied bucket's partial gradients) may follow."""
    row, thing = MOVES[verb], THINGS[MOVES[verb].thing]
    x = Item(at.spec, at, row.to, index[0], index[min(1, len(index) - 1)])
    # What it leaves is looked up first: where it arrives may be another place of the same tier.
    direct = at.spec.mesh.peers and (row.thing, row.to) in RECEIVED
    leaving = x._replace(to="pinned") if direct else x
    leaves = thing.places["device" if direct else row.source].of(leaving, arrives=False)
    arrives = thing.places[row.to].of(x, arrives=True)
    nbytes = thing.nbytes(x)
    over_network = at.spec.mesh.over_ranks and row.thing in BETWEEN_DEVICES
    return Op(
        verb,
        (at.number(verb, *index), *index) if row.numbered else index,
        "network" if over_network else LANES[row.source, row.to],
        (*((at("decision"), *arrives) if row.decided else ()), *leaves),
        arrives,
        nbytes=whole_blocks(nbytes) if "disk" in (row.source, row.to) else nbytes,
    )
