"""A machine as figures, each with its origin, and the Hardware that a rank on it gets.

A figure is a peak from a data sheet, an assumption with its reason, or a measurement. The table `reached` has the
share of each peak that is counted on, so what is assumed is in the profile, in words, and not in this code.

The invariant: a Profile has every figure it needs, each of a plausible size in its table's unit, with its origin.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

from attrs import evolve, field, frozen

from zfunc.core.display import brief
from zfunc.core.dtypes import PRECISIONS, Precision
from zfunc.core.graph import KINDS, Kind, Tier
from zfunc.core.hardware import Hardware, Measured
from zfunc.errors import did_you_mean

Origin = Literal["source", "assumed", "measured"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)

RATES = ("device_memory", "host_memory", "d2h", "h2d", "read", "write")
NETWORKS = ("network_in_node", "network_between_nodes")
LL128 = ("ll128", "ll128_in_node", "ll128_between_nodes")  # a protocol of NCCL's rings
PAT = ("pat", "pat_rank", "pat_level")  # NCCL's algorithm of Parallel Aggregated Trees
FP16_ACCUMULATE = "fp16_accumulate"
# A table's name is the unit of its figures: first those that are required, then those that are optional.
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # of a node
    "count": (("devices", "cores"), ()),
    # of one device, as its driver reports it; of the node; of the node; of one device, before its first tensor; of
    # the node's drives, what they are rated to write in their life
    "bytes": (("device", "host", "disk"), ("context", "endurance")),
    # the peak of one device, without sparsity; of fp16 with sums in fp16 too, which torch has to be asked for
    "flops_per_s": ((), (*PRECISIONS, FP16_ACCUMULATE)),
    # the peak, one way: host_memory, read and write (of its drives) of the node, all else of one device
    "bytes_per_s": (RATES, NETWORKS),
    # to start an operation; to tell another lane that an operation has ended; of a network, a hop of a ring, inside
    # a node and between nodes; of the host, to launch one piece of work on the device; to start a collective; the
    # same three of a ring with the protocol LL128; of trees (PAT), which need a node for each rank: to start them,
    # a rank, a level
    "seconds": (
        ("compute", "host", "d2h", "h2d", "read", "write", "handoff"),
        (*NETWORKS, "launch", "network", *LL128, *PAT),
    ),
    # the share of the figure of that name that is counted on: of FLOP/s, what large products reach, and what fused
    # attention does of them; of LL128 and trees, the share of the network's rate
    "reached": (
        ("device_bytes", "host_bytes", "disk_bytes", *RATES),
        (*PRECISIONS, FP16_ACCUMULATE, "attention", *NETWORKS, LL128[0], PAT[0]),
    ),
}
# A figure outside has the wrong unit: GB/s instead of B/s, microseconds instead of seconds.
BOUNDS: dict[str, tuple[float, float]] = {
    "count": (1, 1e6),
    "bytes": (1e6, 1e16),
    "flops_per_s": (1e8, 1e18),
    "bytes_per_s": (1e6, 1e15),
    "seconds": (0, 1),
    "reached": (1e-3, 1),
    "shared": (1e-6, 1),
}
NONE_SENT = 1.0  # B/s of the network of a single rank, which sends nothing


@frozen
class Figure:
    """A number and its origin: the key of a source, the reason for an assumption, or how it was measured."""

    value: float
    origin: Origin
    words: str
    note: str = ""


def _figures(given: Mapping[str, Mapping[str, Figure]]) -> dict[str, dict[str, Figure]]:
    return {table: dict(figures) for table, figures in given.items()}


@frozen
class Profile:
    """A machine: `figures[table][key]`, in the unit that the table is named after (see TABLES).

    `sources` are titles and addresses of data sheets, by the keys that figures refer to. On a `unified` machine the
    device is the host; `grouped` is the Hardware's. `shared` are the resources that kinds of operations compete for
    (see `Hardware`); where it is empty and the device is not the host, copies compete with the host's work for host
    memory. Drives that read and write at once are shared in proportion, unless `shared` has a "disk". `measured`
    are operations timed on the machine.

    Raises ValueError with the profile, the table and the key for a figure that is missing or implausible.
    """

    name: str
    title: str
    figures: Mapping[str, Mapping[str, Figure]] = field(converter=_figures, hash=False)
    sources: Mapping[str, str] = field(factory=dict[str, str], converter=dict[str, str], hash=False)
    unified: bool = False
    grouped: bool = True
    shared: Mapping[str, Mapping[str, Figure]] = field(
        factory=dict[str, dict[str, Figure]], converter=_figures, hash=False
    )
    measured: tuple[Measured, ...] = field(default=(), converter=tuple)

    def __repr__(self) -> str:
        return brief(self, "name", "title")

    def __attrs_post_init__(self) -> None:
        check_names(self.name, "", self.figures, tuple(TABLES))
        for table, (needed, optional) in TABLES.items():
            figures = self.figures.get(table, {})
            check_names(self.name, table, figures, (*needed, *optional))
            for key in needed:
                self._figure(table, key)
            for key, figure in figures.items():
                self._check(table, table, key, figure)
        for resource, shares in self.shared.items():
            check_names(self.name, f"shared.{resource}", shares, KINDS)
            for kind, figure in shares.items():
                self._check(f"shared.{resource}", "shared", kind, figure)
        if not self.precisions:
            self._refuse("flops_per_s", "", "nothing", f"at least one of {', '.join(PRECISIONS)}: add it")
        for key in (*self.figures["flops_per_s"], *self.figures["bytes_per_s"]):
            self._figure("reached", key)
        for key in NETWORKS:
            if key in self.figures["bytes_per_s"]:
                self._figure("seconds", key)
        for keys in (LL128, PAT):
            if keys[0] in self.figures["seconds"]:
                self._figure("reached", keys[0])
                for key in keys:
                    self._figure("seconds", key)
        if self.device_bytes <= 0:
            got = f"{self.value('bytes', 'context'):g}"
            self._refuse("bytes", "context", got, "less than the device has: lower it")

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Those whose FLOP/s are known."""
        return tuple(p for p in PRECISIONS if p in self.figures.get("flops_per_s", {}))

    def value(self, table: str, key: str) -> float:
        """A figure's value. Raises ValueError where it is unknown."""
        return self._figure(table, key).value

    def reached(self, table: str, key: str) -> float:
        """A peak times its share that is counted on."""
        share = f"{key}_bytes" if table == "bytes" else key
        return self.value(table, key) * self.value("reached", share)

    @property
    def device_bytes(self) -> float:
        """A device's bytes for tensors: those that are counted on, less the context of the process."""
        context = self.figures["bytes"].get("context")
        return self.reached("bytes", "device") - (context.value if context is not None else 0)

    def endurance(self, world: int = 1) -> float | None:
        """The bytes that one rank's share of the node's drives may write in their life; None if it is unknown."""
        rated = self.figures["bytes"].get("endurance")
        return None if rated is None else rated.value / self._local(world)

    def _local(self, world: int) -> int:
        """The ranks that share a node."""
        return min(world, int(self.value("count", "devices")))

    def hardware(self, precision: str, world: int = 1) -> Hardware:
        """One rank's share of the machine, of `world` ranks that compute in `precision`.

        The ranks of a node share its host memory, bandwidth and disk evenly. Collectives run at the rate inside the
        node while all ranks are in one; between nodes at that of all ports of a node together, because rings enter
        a node through every port, but never faster than inside. Of the algorithms and protocols of NCCL that the
        profile has, each takes the one that NCCL's own model (src/graph/tuning.cc) finds fastest for its bytes.

        Raises ValueError for a precision or a network whose figures are unknown, and for a `world` below 1.
        """
        if precision not in self.precisions:
            raise ValueError(
                f"{self.name}: got precision {precision!r}, expected one it has: use {', '.join(self.precisions)}, "
                "or calibrate with it"
            )
        if world < 1:
            raise ValueError(f"{self.name}: got a world of {world}, expected at least 1 rank: give a count")
        local = self._local(world)
        rates, latencies = self._rates(local), self._latencies()
        collectives = [*self._collectives(world, local)] if world > 1 else []
        for latency, rate in collectives[:1]:
            latencies["network"], rates["network"] = latency, rate
        of = f", one of {world} ranks" if world > 1 else ""
        return Hardware(
            f"{self.title}, {precision}{of}",
            flops=self.reached("flops_per_s", precision),
            attention=self._attention(precision),
            rates=rates,
            handoff=self.value("seconds", "handoff"),
            launch=self.value("seconds", "launch") if "launch" in self.figures["seconds"] else 0.0,
            latencies=latencies,
            memory=self._memory(local),
            unified=self.unified,
            grouped=self.grouped,
            shared=self._shared(rates),
            collectives=collectives[1:],
            measured=self.measured,
        )

    def _attention(self, precision: str) -> float:
        """FLOP/s of fused attention; 0, as of products, where a file is older than that: its one share was of
        whole steps."""
        share = self.figures["reached"].get("attention")
        return self.value("flops_per_s", precision) * share.value if share else 0.0

    def _collectives(self, world: int, local: int) -> Iterator[tuple[float, float]]:
        """Latency and rate of an all-gather or a reduce-scatter by each algorithm, the plain ring first.

        A ring has world - 1 hops, of which one fewer than there are nodes are between nodes.
        """
        seconds, nodes = self.figures["seconds"], math.ceil(world / local)
        rate = self.reached("bytes_per_s", NETWORKS[nodes > 1])
        if nodes > 1 and local > 1:
            rate = min(self.reached("bytes_per_s", NETWORKS[0]), local * rate)

        def ring(start: str, *hops: str) -> float:
            counts = zip(hops, (world - nodes, nodes - 1), strict=True)
            passed = math.fsum(n * self.value("seconds", hop) for hop, n in counts if n)
            return passed + (seconds[start].value if start in seconds else 0.0)

        yield ring("network", *NETWORKS), rate
        if LL128[0] in seconds:
            yield ring(*LL128), rate * self.value("reached", LL128[0])
        if PAT[0] in seconds and local == 1:
            start, rank, level = (seconds[key].value for key in PAT)
            trees = start + nodes * rank + math.floor(math.log2(nodes)) * level
            yield trees, rate * self.value("reached", PAT[0])

    def _rates(self, local: int) -> dict[Kind, float]:
        return {
            "compute": self.reached("bytes_per_s", "device_memory"),
            "host": self.reached("bytes_per_s", "host_memory") / local,
            "d2h": self.reached("bytes_per_s", "d2h"),
            "h2d": self.reached("bytes_per_s", "h2d"),
            "read": self.reached("bytes_per_s", "read") / local,
            "write": self.reached("bytes_per_s", "write") / local,
            "network": NONE_SENT,
        }

    def _latencies(self) -> dict[Kind, float]:
        return {kind: self.value("seconds", kind) for kind in KINDS if kind in self.figures["seconds"]}

    def _memory(self, local: int) -> dict[Tier, int]:
        memory: dict[Tier, int] = {
            tier: int(self.reached("bytes", tier) / local) for tier in ("host", "disk")
        }
        return memory if self.unified else {"device": int(self.device_bytes), **memory}

    def _shared(self, rates: Mapping[Kind, float]) -> dict[str, dict[Kind, float]]:
        shared: dict[str, dict[Kind, float]] = {"disk": {"read": 1.0, "write": 1.0}}
        if not self.shared and not self.unified:
            crossing: tuple[Kind, ...] = ("host", "d2h", "h2d", "read", "write")
            shared["host memory"] = {kind: min(1.0, rates[kind] / rates["host"]) for kind in crossing}
        for resource, of in self.shared.items():
            shared[resource] = {k: of[k].value for k in KINDS if k in of}
        return shared

    def _figure(self, table: str, key: str) -> Figure:
        try:
            return self.figures[table][key]
        except KeyError:
            self._refuse(table, key, "no figure", "one: add it, with its source or the reason it is assumed")
            raise

    def _check(self, where: str, unit: str, key: str, figure: Figure) -> None:
        low, high = BOUNDS[unit]
        if not low <= figure.value <= high:
            expected = f"between {low:g} and {high:g} ({unit}): write it in that unit"
            self._refuse(where, key, f"{figure.value:g}", expected)
        if unit == "count" and figure.value != int(figure.value):
            self._refuse(where, key, f"{figure.value:g}", "a whole number: round it")
        if not figure.words.strip():
            self._refuse(where, key, f"nothing for {figure.origin!r}", "the origin of the figure: add it")
        if figure.origin == "source" and figure.words not in self.sources:
            hint = (
                did_you_mean(figure.words, list(self.sources)) or ": add it to [sources], title and address"
            )
            self._refuse(where, key, f"the source {figure.words!r}", f"one of [sources]{hint}")

    def _refuse(self, table: str, key: str, got: str, expected: str) -> None:
        place = " ".join([*([f"[{table}]"] if table else []), *([key] if key else [])])
        raise ValueError(f"{self.name}: {place}: got {got}, expected {expected}")


def replace_figures(profile: Profile, values: Mapping[str, float]) -> Profile:
    """`profile` with other values of some figures, by table and key; a figure that changes is assumed.

    Raises ValueError for a table or a key that is not known, and for an implausible value.

    >>> from zfunc.planner.profile_toml import load_profile
    >>> replace_figures(load_profile("h100"), {"bytes.host": 1.28e11}).value("bytes", "host")
    128000000000.0
    """
    figures, shared = _figures(profile.figures), _figures(profile.shared)
    tables = {table: figures.setdefault(table, {}) for table in TABLES}
    tables |= {f"shared.{resource}": of for resource, of in shared.items()}
    for place, value in values.items():
        table, _, key = place.rpartition(".")
        check_names(profile.name, "", [table], tuple(tables))
        check_names(profile.name, table, [key], sum(TABLES[table], ()) if table in TABLES else KINDS)
        if key not in tables[table] or tables[table][key].value != value:
            tables[table][key] = Figure(value, "assumed", "given with the command")
    return evolve(profile, figures=figures, shared=shared)


def check_names(profile: str, table: str, names: Iterable[str], known: tuple[str, ...]) -> None:
    """Raise ValueError for a name in a table of a profile, or at its top (""), that is not known."""
    for name in names:
        if name not in known:
            hint = did_you_mean(name, list(known)) or ": leave it out"
            place = f"[{table}] {name}" if table else name
            raise ValueError(
                f"{profile}: {place}: got an unknown name, expected one of {', '.join(known)}{hint}"
            )
