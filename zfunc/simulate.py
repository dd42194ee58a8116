"""How long a plan takes on given hardware: each lane in order, each operation when its waits are over.

The invariant: the result lies between the critical path (no lane is ever busy) and the serial sum (one lane).
An operation's time follows from its kind and its declared work alone.
"""

from collections.abc import Mapping

from attrs import field, frozen

from zfunc.graph import KINDS, Graph, Kind, Op
from zfunc.plan import Plan, in_order
from zfunc.timeline import Event, Timeline


def _rates(rates: Mapping[Kind, float]) -> dict[Kind, float]:
    return dict(rates)


@frozen
class Hardware:
    """What a machine does in a second: `flops` (FLOP/s, as reached, not as advertised), and for each kind of
    operation the bytes it moves (B/s). `latency` is what starting any operation costs, in seconds.

    Raises ValueError for a rate that is missing, zero or negative.
    """

    name: str
    flops: float
    rates: dict[Kind, float] = field(converter=_rates, hash=False)
    latency: float = 10e-6

    def __attrs_post_init__(self) -> None:
        got: dict[str, float] = {"flops": self.flops, **{k: self.rates.get(k, 0.0) for k in KINDS}}
        for what, rate in got.items():
            if not 0 < rate < float("inf"):
                raise ValueError(
                    f"{self.name}: got a {what} rate of {rate}, expected a positive number a second"
                )
        if not 0 <= self.latency < float("inf"):
            raise ValueError(f"{self.name}: got a latency of {self.latency}, expected seconds, 0 or more")

    def seconds(self, op: Op) -> float:
        """Latency, plus arithmetic, plus bytes."""
        return self.latency + op.flops / self.flops + op.nbytes / self.rates[op.kind]


ROUND = Hardware(
    "round numbers",
    flops=200e12,
    rates={"compute": 2e12, "network": 20e9, "d2h": 20e9, "h2d": 20e9, "host": 100e9, "disk": 4e9},
)
"""Figures of the order of a data-centre GPU and its host, to draw with: neither measured nor advertised."""


def simulate(plan: Plan, hardware: Hardware = ROUND) -> Timeline:
    """The timeline of `plan` on `hardware`. Raises PlanError if the plan deadlocks."""
    free = [0.0] * len(plan.lanes)
    end: dict[int, float] = {}
    start: dict[int, float] = {}
    for i in in_order(plan, plan.waits):
        lane, _ = plan.place[i]
        start[i] = max([free[lane], *(end[n] for n in plan.waits[i] if n in end)])
        free[lane] = end[i] = start[i] + hardware.seconds(plan.graph.ops[i])
    events = (
        Event(lane.name, plan.graph.ops[i].name, plan.graph.ops[i].kind, start[i], end[i])
        for lane in plan.lanes
        for i in lane.ops
    )
    return Timeline(tuple(events), "simulated")


def critical_path(graph: Graph, hardware: Hardware = ROUND) -> float:
    """Seconds of the longest chain of dependencies: no schedule is faster."""
    end: list[float] = []
    for op, before in zip(graph, graph.predecessors, strict=True):
        end.append(max((end[n] for n in before), default=0.0) + hardware.seconds(op))
    return max(end, default=0.0)


def serial_time(graph: Graph, hardware: Hardware = ROUND) -> float:
    """Seconds of one operation after another: what `Serial` takes."""
    return sum(map(hardware.seconds, graph))
