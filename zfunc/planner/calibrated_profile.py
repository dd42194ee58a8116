"""A machine's Profile from the costs of operations that were measured on it.

Nothing is assumed: a figure that was not measured is not in the profile. Every figure says how it was measured, and
counts in full.
"""

import math
from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from zfunc.core.dtypes import Precision
from zfunc.core.graph import Kind
from zfunc.planner.fit_rates import Costs, LatencyBandwidth
from zfunc.planner.profile import Figure, Profile

NEEDED: tuple[Kind, ...] = ("compute", "host", "d2h", "h2d")
RATE_OF: dict[Kind, str] = {"compute": "device_memory", "host": "host_memory"}


@frozen
class MachineFacts:
    """Devices and cores of a node, free bytes on each tier, and the ranks that trained.

    `threads` are those that each kind of operation keeps busy where the device is the host (`unified`); else {}.
    """

    title: str
    precision: Precision
    devices: int
    cores: int
    memory: Mapping[Literal["device", "host", "disk"], int] = field(
        converter=dict[Literal["device", "host", "disk"], int]
    )
    unified: bool
    threads: Mapping[Kind, int] = field(factory=dict[Kind, int], converter=dict[Kind, int])
    world: int = 1
    local_ranks: int = 1


def make_profile(
    machine: MachineFacts,
    costs: Costs,
    disk: Mapping[Literal["read", "write"], LatencyBandwidth],
    how: str,
    *,
    handoff: float = 0.0,
    launch: float | None = None,
) -> Profile:
    """The Profile of `machine` from the costs of its operations; `how` says how they were measured. `handoff` are
    the seconds until a lane learns that an operation of another has ended, `launch` those of one launch on the
    device.

    Raises ValueError where no operation of the steps gives a rate.
    """
    kinds: tuple[Kind, ...] = (*NEEDED, "network") if machine.world > 1 else NEEDED
    lines: dict[Kind, LatencyBandwidth] = {k: line for k in kinds if (line := costs.line(k)) is not None}
    flops = costs.flops()
    missing = [f"of kind {kind!r} that moves bytes" for kind in NEEDED if kind not in lines]
    if missing or flops is None:
        what = missing[0] if missing else "with FLOPs"
        raise ValueError(f"got no operation {what} in the steps, expected some: take a model that has one")
    lines |= disk
    rates = _rates(machine, lines)
    latencies = {**_latencies(machine, lines), "handoff": min(1.0, handoff)}
    latencies |= {} if launch is None else {"launch": launch}
    figures: dict[str, dict[str, float]] = {
        "count": {"devices": machine.devices, "cores": machine.cores},
        "bytes": {tier: float(nbytes) for tier, nbytes in machine.memory.items()},
        "flops_per_s": {machine.precision: flops},
        "bytes_per_s": rates,
        "seconds": latencies,
        "reached": dict.fromkeys(
            (*(f"{tier}_bytes" for tier in machine.memory), machine.precision, *rates), 1.0
        ),
    }
    words = {
        "count": "read from the operating system",
        "bytes": "free when this was measured",
        "reached": "the figure was reached",
        "launch": "launches of a small block, forward and backward",
        "read": "transfers past the page cache",
        "write": "transfers past the page cache, until the drive has them",
    }
    return Profile(
        "calibrated",
        machine.title,
        {
            table: {
                key: Figure(_short(value), "measured", words.get(key, words.get(table, how)))
                for key, value in of.items()
            }
            for table, of in figures.items()
        },
        unified=machine.unified,
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
        latencies[_network(machine)] = lines["network"].latency / math.ceil(math.log2(machine.world))
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


def _short(value: float) -> float:
    """To 5 digits: the rest is noise."""
    return float(f"{value:.5g}")
