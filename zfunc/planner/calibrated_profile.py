"""A machine's Profile from measured steps: costs of operations, the rates and latencies that follow from them.

The steps are of a plan with one lane, where operations run alone. An operation is charged with the time until the
next one begins, in which that is issued and memory is freed. Nothing is assumed: a figure that was not measured is
not in the profile. Every figure says how it was measured, and counts in full.

The invariant: the costs of a step's operations add up to the step. So the simulated time of a Serial step on the
machine so described is what such steps took.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean as mean
from typing import Literal

from attrs import field, frozen

from zfunc.core.dtypes import Precision
from zfunc.core.graph import KINDS, Kind, Op
from zfunc.core.hardware import Measured
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.planner.profile import Figure, Profile

NEEDED: tuple[Kind, ...] = ("compute", "host", "d2h", "h2d")
RATE_OF: dict[Kind, str] = {"compute": "device_memory", "host": "host_memory"}
# Kind, FLOPs, those of attention, bytes: operations alike in these count as one.
Work = tuple[Kind, int, int, int]


@frozen
class MeasuredStep:
    """A measured step: its plan, when each operation ran, and its length in seconds."""

    plan: Plan
    timeline: Timeline
    seconds: float


@frozen
class LatencyBandwidth:
    """Seconds of an operation that moves bytes: `latency`, plus bytes over `rate` (B/s)."""

    latency: float
    rate: float


@frozen
class Costs:
    """The mean seconds of each kind of work."""

    seconds: Mapping[Work, float] = field(converter=dict[Work, float])

    @property
    def measured(self) -> tuple[Measured, ...]:
        """The costs for a Hardware, in the order of kinds and sizes."""
        works = sorted(self.seconds, key=lambda work: (KINDS.index(work[0]), *work[1:]))
        return tuple(
            Measured(kind, flops, nbytes, _rounded(self.seconds[kind, flops, attention, nbytes]), attention)
            for kind, flops, attention, nbytes in works
        )

    def line(self, kind: Kind) -> LatencyBandwidth | None:
        """Latency and rate of a kind's operations that move bytes and count no FLOPs; None without any."""
        points = [
            (work[3], s) for work, s in self.seconds.items() if work[0] == kind and work[3] and not work[1]
        ]
        return fit_line(points) if points else None


def middle_half(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The middle half of `steps` by their length: those that were disturbed are left out."""
    ordered = sorted(steps, key=lambda step: step.seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def handoff(steps: Iterable[MeasuredStep]) -> float | None:
    """Seconds from the end of an operation to the start of one on another lane that waits for it alone: the mean of
    the middle half of all in `steps`. None without any.

    >>> from zfunc.core.graph import Graph, Region
    >>> from zfunc.core.plan import build
    >>> from zfunc.core.timeline import Event
    >>> x = Region("x")
    >>> graph = Graph((Op("make", (), "compute", (), (x,)), Op("use", (), "host", (x,))))
    >>> events = Event("gpu", "make", "compute", 0.0, 1.0), Event("cpu", "use", "host", 1.5, 2.0)
    >>> handoff([MeasuredStep(build(graph, {"gpu": [0], "cpu": [1]}), Timeline(events, "measured"), 2.0)])
    0.5
    """
    gaps = sorted(gap for step in steps for gap in _gaps(step))
    inner = gaps[len(gaps) // 4 : len(gaps) - len(gaps) // 4]
    return mean(inner) if inner else None


def _gaps(step: MeasuredStep) -> Iterable[float]:
    ops, events = step.plan.graph.ops, {e.op: e for e in step.timeline.events}
    for lane in step.plan.lanes:
        free = 0.0
        for i in lane.ops:
            e = events[ops[i].name]
            ready = max((events[ops[n].name].end for n in step.plan.waits[i]), default=0.0)
            if ready > free:
                yield max(0.0, e.start - ready)  # clocks of two devices may cross
            free = e.end


def fit_costs(steps: Iterable[MeasuredStep]) -> Costs:
    """The costs of operations in `steps` of a plan with one lane. Raises ValueError for more lanes, or no step.

    >>> from zfunc.core.plan import build
    >>> from zfunc.core.timeline import Event
    >>> from zfunc.core.graph import Graph
    >>> graph = Graph((Op("a", (), "compute", flops=5), Op("b", (), "host", nbytes=7)))
    >>> events = Event("all", "a", "compute", 0.1, 0.5), Event("all", "b", "host", 0.6, 0.9)
    >>> step = MeasuredStep(build(graph, {"all": [0, 1]}), Timeline(events, "measured"), 1.0)
    >>> fit_costs([step]).seconds
    {('compute', 5, 0, 0): 0.6, ('host', 0, 0, 7): 0.4}
    """
    spent: dict[Work, list[float]] = {}
    for step in steps:
        for op, seconds in _durations(step):
            spent.setdefault((op.kind, op.flops, op.attention_flops, op.nbytes), []).append(seconds)
    if not spent:
        raise ValueError("got no operation of any step, expected some: measure a step first")
    return Costs({work: mean(times) for work, times in spent.items()})


def _durations(step: MeasuredStep) -> Iterable[tuple[Op, float]]:
    busy = [lane for lane in step.plan.lanes if lane.ops]
    if len(busy) > 1:
        raise ValueError(
            f"got a plan on the lanes {', '.join(lane.name for lane in busy)}, expected one, where operations run "
            "alone: measure steps under Serial"
        )
    graph, events = step.plan.graph, step.timeline.events
    starts = [0.0, *(e.start for e in events[1:]), step.seconds]
    for e, (start, end) in zip(events, pairwise(starts), strict=True):
        yield graph.ops[graph.position[e.op]], max(end - start, 1e-9)  # clocks of two devices may cross


def fit_line(points: Sequence[tuple[int, float]]) -> LatencyBandwidth:
    """The line through (bytes, seconds) with the least squared relative error, latency and rate not negative.

    >>> fit_line([(1_000, 3e-6), (9_000, 11e-6)])
    LatencyBandwidth(latency=2e-06, rate=1000000000.0)
    """
    weights = [1 / seconds**2 for _, seconds in points]

    def total(of: Callable[[float, float], float]) -> float:
        return sum(w * of(n, s) for w, (n, s) in zip(weights, points, strict=True))

    x, y = (total(of) / sum(weights) for of in (lambda n, _: n, lambda _, s: s))
    spread, joint = total(lambda n, _: (n - x) ** 2), total(lambda n, s: (n - x) * (s - y))
    slope = joint / spread if spread else 0.0
    if slope <= 0 or y - slope * x < 0:  # one size, or noise: all of it is rate
        slope = total(lambda n, s: n * s) / total(lambda n, _: n * n)
    return LatencyBandwidth(max(0.0, _rounded(y - slope * x)), _rounded(1 / slope))


def _rounded(value: float, digits: int = 6) -> float:
    """To as many digits: the rest is noise."""
    return float(f"{value:.{digits}g}")


# --- the profile ------------------------------------------------------------


@frozen
class Arithmetic:
    """FLOP/s that the device reaches in products of large matrices and in attention."""

    products: float
    attention: float


@frozen
class MachineFacts:
    """Devices and cores of a node, free bytes on each tier, and the ranks that trained.

    `grouped` is the Hardware's. `threads` are those that each kind of operation keeps busy where the device is the
    host (`unified`); else {}.
    """

    title: str
    precision: Precision
    devices: int
    cores: int
    memory: Mapping[Literal["device", "host", "disk"], int] = field(
        converter=dict[Literal["device", "host", "disk"], int]
    )
    unified: bool
    grouped: bool = True
    threads: Mapping[Kind, int] = field(factory=dict[Kind, int], converter=dict[Kind, int])
    world: int = 1
    local_ranks: int = 1


def make_profile(
    machine: MachineFacts,
    costs: Costs,
    arithmetic: Arithmetic,
    disk: Mapping[Literal["read", "write"], LatencyBandwidth],
    how: str,
    *,
    handoff: float = 0.0,
    launch: float | None = None,
) -> Profile:
    """The Profile of `machine` from the costs of its operations; `how` says how they were measured. `handoff` are
    the seconds until a lane learns that an operation of another has ended, `launch` those of one launch on the
    device.

    Raises ValueError where no operation of the steps gives a rate of bytes.
    """
    kinds: tuple[Kind, ...] = (*NEEDED, "network") if machine.world > 1 else NEEDED
    lines: dict[Kind, LatencyBandwidth] = {k: line for k in kinds if (line := costs.line(k)) is not None}
    for kind in NEEDED:
        if kind not in lines:
            what = f"got no operation of kind {kind!r} that moves bytes in the steps"
            raise ValueError(f"{what}, expected some: take a model that has one")
    lines |= disk
    rates = _rates(machine, lines)
    latencies = {**_latencies(machine, lines), "handoff": min(1.0, handoff)}
    latencies |= {} if launch is None else {"launch": launch}
    figures: dict[str, dict[str, float]] = {
        "count": {"devices": machine.devices, "cores": machine.cores},
        "bytes": {tier: float(nbytes) for tier, nbytes in machine.memory.items()},
        "flops_per_s": {machine.precision: (peak := max(arithmetic.products, arithmetic.attention))},
        "bytes_per_s": rates,
        "seconds": latencies,
        "reached": dict.fromkeys((*(f"{tier}_bytes" for tier in machine.memory), *rates), 1.0)
        | {machine.precision: arithmetic.products / peak, "attention": arithmetic.attention / peak},
    }
    words = {
        "count": "read from the operating system",
        "bytes": "free when this was measured",
        "reached": "the figure was reached",
        machine.precision: "products of large matrices, and attention of a long row, forward and backward",
        "attention": "attention of a long row, forward and backward, beside products of large matrices",
        "launch": "launches of a small block, forward and backward",
        "read": "transfers past the page cache",
        "write": "transfers past the page cache, until the drive has them",
    }
    return Profile(
        "calibrated",
        machine.title,
        {
            table: {
                key: Figure(_rounded(value, 5), "measured", words.get(key, words.get(table, how)))
                for key, value in of.items()
            }
            for table, of in figures.items()
        },
        unified=machine.unified,
        grouped=machine.grouped,
        shared=_shared(machine),
        measured=costs.measured,
    )


def _rates(machine: MachineFacts, lines: Mapping[Kind, LatencyBandwidth]) -> dict[str, float]:
    """A rate of the node is that of each of its ranks, all running at once, times their number."""
    rates = {RATE_OF.get(kind, kind): line.rate for kind, line in lines.items() if kind != "network"}
    for shared in ("host_memory", "read", "write"):
        rates[shared] *= machine.local_ranks
    return rates | ({_network(machine): lines["network"].rate} if "network" in lines else {})


def _latencies(machine: MachineFacts, lines: Mapping[Kind, LatencyBandwidth]) -> dict[str, float]:
    latencies: dict[str, float] = {kind: line.latency for kind, line in lines.items() if kind != "network"}
    latencies |= {kind: min(1.0, latencies[kind]) for kind in ("read", "write")}
    if "network" in lines:
        latencies[_network(machine)] = lines["network"].latency / (machine.world - 1)
    return latencies


def _network(machine: MachineFacts) -> str:
    return "network_in_node" if machine.world == machine.local_ranks else "network_between_nodes"


def _shared(machine: MachineFacts) -> dict[str, dict[str, Figure]]:
    """Where the device is the host, operations compete for its cores: each takes those of its threads."""
    shares = {
        kind: Figure(
            min(1.0, n / machine.cores), "measured", f"{n} of {machine.cores} cores are busy with it"
        )
        for kind, n in machine.threads.items()
    }
    return {"cores": {**shares}} if shares else {}
