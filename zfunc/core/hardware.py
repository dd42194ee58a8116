"""The rates, latencies, memory and shared resources of a machine.

Every rate is positive and finite and every share above 0 and at most 1. The time of an operation follows from its
kind and its declared work, not from its name.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from numbers import Real
from typing import Any

from attrs import field, frozen, validators

from zfunc.core.display import brief
from zfunc.core.graph import KINDS, Kind, Op, Tier
from zfunc.errors import did_you_mean
from zfunc.values import of_type

CAPACITIES: tuple[Tier, ...] = ("device", "host", "disk")  # pinned memory is host memory


@frozen
class Measured:
    """The measured `seconds` of an operation of `kind` that runs alone, with `flops` FLOPs (`attention_flops` of
    them in attention) and `nbytes` bytes."""

    kind: Kind = field(validator=validators.in_(KINDS))
    flops: int
    nbytes: int
    seconds: float
    attention_flops: int = 0

    def __attrs_post_init__(self) -> None:
        """Check that FLOPs and bytes are 0 or more and seconds above 0; raises ValueError."""
        if self.flops < 0 or self.nbytes < 0 or not 0 < self.seconds < math.inf:
            raise ValueError(
                f"got {self}, expected FLOPs and bytes of 0 or more and seconds above 0: measure it again"
            )


def _numbers(name: str) -> Callable[[Any], dict[Any, Any]]:
    """An attrs converter of a mapping with numbers as values to a dict; TypeError, with `name`, for others."""

    def convert(given: Any) -> dict[Any, Any]:
        of_type(
            name,
            given,
            Mapping,
            "a number for each name: pass such as {'host': 1e-5}, with names that it knows",
        )
        for key, value in given.items():
            of_type(f"{name}[{key!r}]", value, Real, "a number: pass one")
        return dict(given)

    return convert


def _shares(given: Any) -> dict[str, dict[Kind, float]]:
    of_type(
        "shared", given, Mapping, "shares by resource: pass such as {'disk': {'read': 1.0, 'write': 1.0}}"
    )
    return {resource: _numbers(f"shared[{resource!r}]")(shares) for resource, shares in given.items()}


def _pairs(given: Any) -> tuple[tuple[float, float], ...]:
    try:
        return tuple((seconds + 0.0, rate + 0.0) for seconds, rate in given)
    except (TypeError, ValueError):
        expected = "pairs of numbers (seconds, bytes a second): pass such as [(2e-5, 3e11)]"
        raise TypeError(f"collectives: got {given!r:.200}, expected {expected}") from None


def _measured(given: Any) -> tuple[Measured, ...]:
    of_type("measured", given, Iterable, "a list of Measured: pass [Measured(kind, flops, nbytes, seconds)]")
    for x in (measured := tuple(given)):
        of_type("measured", x, Measured, "a Measured(kind, flops, nbytes, seconds): pass one")
    return measured


@frozen
class Hardware:
    """The rates, latencies and memory of a machine.

    - `flops`: FLOP/s that large matrix products reach, not advertised ones; `attention`: FLOP/s of fused attention,
      0 if the same. `rates`: bytes a second that an operation of each kind moves.
    - `latency`: seconds to start an operation; `latencies` for kinds that differ.
    - `handoff`: seconds from the end of an operation to the start of one on another lane that waits for it, to wake
      a thread or to see an event.
    - `launch`: seconds of the host to launch one piece of work on the device (`Op.launches`).
    - `issue`: seconds, by kind, for which Python holds its lock to issue an operation, beside its launches; no
      other lane of the process issues one meanwhile. Kinds left out have none. If any kind is given, a hand-off to
      another lane takes this lock, too.
    - `memory`: bytes on each "device", on the "host" (pinned and pageable together) and the "disk". A tier that is
      left out has no known limit. On a `unified` machine, device memory is host memory.
    - `grouped`: torch has grouped kernels on the device: grouped-query attention, matrix products by experts.
    - `shared`: resources that several kinds compete for, with the share that one operation of a kind uses while it
      runs alone: {"cores": {"compute": 1.0, "host": 1.0, "d2h": 0.5}}. See `zfunc.core.simulator`.
    - `neighbours`: the number of consecutive devices that share such a resource, as a PCIe root complex; all
      devices share a resource that is left out.
    - `collectives`: alternatives to the network's latency and rate for a collective, as pairs (seconds of latency,
      bytes a second); each collective takes the fastest for its bytes.
    - `measured`: operations whose time is known.

    Raises TypeError for what is no number, ValueError for a rate that is missing, zero or negative, a share outside
    (0, 1], or an unknown kind or tier.

    >>> Hardware("unit", flops=10.0, rates={**ROUND.rates, "compute": 5.0}, latency=1.0).seconds(
    ...     Op("work", (), "compute", flops=20, nbytes=15)
    ... )
    6.0
    """

    name: str
    flops: float
    rates: Mapping[Kind, float] = field(converter=_numbers("rates"), hash=False)
    attention: float = field(default=0.0, kw_only=True)
    latency: float = 10e-6
    handoff: float = 0.0
    launch: float = 0.0
    latencies: Mapping[Kind, float] = field(
        factory=dict[Kind, float], converter=_numbers("latencies"), hash=False
    )
    issue: Mapping[Kind, float] = field(
        factory=dict[Kind, float], converter=_numbers("issue"), hash=False, kw_only=True
    )
    memory: Mapping[Tier, int] = field(factory=dict[Tier, int], converter=_numbers("memory"), hash=False)
    unified: bool = False
    grouped: bool = True
    shared: Mapping[str, Mapping[Kind, float]] = field(
        factory=dict[str, Mapping[Kind, float]], converter=_shares, hash=False
    )
    neighbours: Mapping[str, int] = field(
        factory=dict[str, int], converter=_numbers("neighbours"), hash=False
    )
    collectives: tuple[tuple[float, float], ...] = field(default=(), converter=_pairs)
    measured: tuple[Measured, ...] = field(default=(), converter=_measured)

    def __repr__(self) -> str:
        return brief(self, "name", "flops", "rates", "memory")

    def __attrs_post_init__(self) -> None:
        """Check every figure of the machine; raises TypeError or ValueError."""
        for name in ("flops", "attention", "latency", "handoff", "launch"):
            of_type(name, getattr(self, name), Real, "a number: pass one")
        others = [("attention", self._attention), *(("collective", rate) for _, rate in self.collectives)]
        for what, rate in (("flops", self.flops), *((k, self.rates.get(k, 0.0)) for k in KINDS), *others):
            if not 0 < rate < math.inf:
                self._refuse(f"a {what} rate of {rate}", "a positive number a second: pass one")
        others = (latency for latency, _ in self.collectives)
        latencies = self.latency, self.handoff, self.launch, *self.latencies.values(), *others
        for what, all_of in (("a latency", latencies), ("an issue", self.issue.values())):
            for seconds in all_of:
                if not 0 <= seconds < math.inf:
                    self._refuse(f"{what} of {seconds}", "seconds, 0 or more: leave it out for the default")
        self._check_names("rates", self.rates, KINDS)
        self._check_names("latencies", self.latencies, KINDS)
        self._check_names("issue", self.issue, KINDS)
        self._check_names("memory", self.memory, CAPACITIES)
        for tier, nbytes in self.memory.items():
            if not 0 < nbytes < math.inf:
                self._refuse(
                    f"{nbytes} bytes on the tier {tier}", "more than 0: leave it out if it is not known"
                )
        self._check_names("neighbours", self.neighbours, tuple(self.shared))
        for resource, count in self.neighbours.items():
            if count < 1:
                self._refuse(
                    f"{count} neighbours of {resource!r}", "1 or more devices that share it: pass them"
                )
        for resource, shares in self.shared.items():
            self._check_names(f"shared {resource!r}", shares, KINDS)
            for kind, share in shares.items():
                if not 0 < share <= 1:
                    self._refuse(
                        f"a share of {share} of {resource!r} for {kind}",
                        "above 0 and at most 1: pass what one operation uses alone, or leave the kind out",
                    )

    def _check_names(self, what: str, names: Iterable[Any], known: tuple[str, ...]) -> None:
        for name in names:
            if name not in known:
                hint = did_you_mean(str(name), list(known)) or ": use one of them"
                self._refuse(f"{name!r} in {what}", f"only {', '.join(known)}{hint}")

    def _refuse(self, got: str, expected: str) -> None:
        raise ValueError(f"{self.name}: got {got}, expected {expected}")

    def seconds(self, op: Op) -> float:
        """The seconds that operation `op` takes when it runs alone.

        The measured time of an equal operation, if the hardware has one; else the longest of three that overlap:
        its work, its launches by the host, and its copies between host and device.
        """
        if self.measured and (known := self._known.get((op.kind, op.flops, op.nbytes))) is not None:
            return known
        copies = op.copied_bytes / min(self.rates["h2d"], self.rates["d2h"])
        return max(self._seconds_of_work(op), op.launches * self.launch, copies)

    def issue_seconds(self, op: Op) -> float:
        """The seconds for which Python issues operation `op`, with its launches; 0 for a kind not in `issue`."""
        own = self.issue.get(op.kind, 0.0)
        return own + op.launches * self.launch if own else 0.0

    def _seconds_of_work(self, op: Op) -> float:
        """Seconds of the device or bus work of `op`: if `op` has FLOPs, interpolated (log-log) between the
        measured operations of its kind; else latency plus its FLOPs and bytes over the hardware's rates."""
        if self.measured and op.flops and (curve := self._curves.get(op.kind)):
            return _interpolated(self._at_rates(op, self.rates[op.kind]), curve)
        ways = [(self.latencies.get(op.kind, self.latency), self.rates[op.kind])]
        if op.kind == "network":
            ways += self.collectives
        return min(latency + self._at_rates(op, rate) for latency, rate in ways)

    def _at_rates(self, work: Op | Measured, rate: float) -> float:
        products = (work.flops - work.attention_flops) / self.flops
        return products + work.attention_flops / self._attention + work.nbytes / rate

    @property
    def _attention(self) -> float:
        return self.attention or self.flops

    @cached_property
    def _known(self) -> dict[tuple[Kind, int, int], float]:
        return {(m.kind, m.flops, m.nbytes): m.seconds for m in self.measured}

    @cached_property
    def _curves(self) -> dict[Kind, list[tuple[float, float]]]:
        """For each kind of operation, the measured operations as pairs (seconds that the rates predict,
        seconds measured), in ascending order."""
        curves: dict[Kind, dict[float, float]] = {}
        for m in self.measured:
            if m.flops:
                curves.setdefault(m.kind, {})[self._at_rates(m, self.rates[m.kind])] = m.seconds
        return {kind: sorted(points.items()) for kind, points in curves.items()}

    def lacking(self, needed: Mapping[Tier, int]) -> dict[Tier, int]:
        """Bytes by tier by which `needed` exceeds the hardware's memory; empty if everything fits.

        >>> Hardware("small", flops=1.0, rates=ROUND.rates, memory={"host": 10}).lacking({"host": 8, "pinned": 5})
        {'host': 3}
        """
        demand: dict[Tier, int] = {**dict.fromkeys(CAPACITIES, 0), **needed}
        devices = {place: n for place, n in demand.items() if place.startswith("device")}
        demand["host"] += demand.pop("pinned", 0) + (sum(devices.values()) if self.unified else 0)
        limits = dict(self.memory)
        if "device" in limits:
            limits |= dict.fromkeys(devices, limits["device"])
        return {x: n - limits[x] for x, n in demand.items() if x in limits and n > limits[x]}


def _interpolated(work: float, curve: list[tuple[float, float]]) -> float:
    """Seconds for an operation for which the rates predict `work` seconds, by log-log interpolation on
    `curve`, pairs (predicted, measured); beyond the curve's ends in proportion to the nearest pair."""
    at = bisect_left(curve, (work, 0.0))
    if at in (0, len(curve)):
        nearest_work, seconds = curve[min(at, len(curve) - 1)]
        return seconds * work / nearest_work
    (low, fast), (high, slow) = curve[at - 1], curve[at]
    share = math.log(work / low) / math.log(high / low)
    return fast * (slow / fast) ** share


ROUND = Hardware(
    "round numbers",
    flops=200e12,
    rates={
        "compute": 2e12,
        "network": 20e9,
        "d2h": 20e9,
        "h2d": 20e9,
        "host": 100e9,
        "read": 8e9,
        "write": 4e9,
    },
    shared={"disk": {"read": 1.0, "write": 1.0}},
)
"""Round figures of the order of a data-centre GPU and its host, for pictures: neither measured nor advertised."""
