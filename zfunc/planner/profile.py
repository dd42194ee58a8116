"""A machine as figures, each with its origin; as a TOML file; and the Hardware that a rank on it gets.

A figure is a peak from a data sheet, an assumption with its reason, or a measurement. The table `reached` has the
share of each peak that is counted on, so what is assumed is in the profile, in words, and not in this code.
`profiles/` has those that come with zfunc, `zfunc calibrate` writes others.

The invariant: a Profile has every required figure, each of a plausible size in its table's unit, with its origin;
a Profile that is written to a file reads back equal.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from attrs import asdict, evolve, field, frozen

from zfunc.checkpoint.strict_json import Refusal, decoded
from zfunc.core.display import brief
from zfunc.core.dtypes import PRECISIONS, Precision
from zfunc.core.graph import KINDS, Kind, Tier
from zfunc.core.hardware import Hardware, Measured
from zfunc.errors import did_you_mean, refuse
from zfunc.options import one_of

FOLDER = Path(__file__).parent / "profiles"

RATES = ("device_memory", "host_memory", "d2h", "h2d", "read", "write")
# The rates of kinds of operations that have another name than these, and those that the ranks of a node share.
NAMED: dict[Kind, str] = {"compute": "device_memory", "host": "host_memory"}
OF_NODE: tuple[Kind, ...] = ("host", "read", "write")
NETWORKS = ("network_in_node", "network_between_nodes")
LL128 = ("ll128", "ll128_in_node", "ll128_between_nodes")  # a protocol of NCCL's rings
PAT = ("pat", "pat_rank", "pat_level")  # NCCL's algorithm of Parallel Aggregated Trees
FP16_ACCUMULATE = "fp16_accumulate"
ISSUE: dict[Kind, str] = {kind: f"issue_{kind}" for kind in ("compute", "host", "d2h", "h2d")}
CORE = "host_core"  # what one core sweeps of host memory in an update
# A table's name is the unit of its figures: first those that are required, then those that are optional.
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # of a node
    "count": (("devices", "cores"), ()),
    # of one device, as its driver reports it; of the node; of the node; of one device, before its first tensor
    "bytes": (("device", "host", "disk"), ("context",)),
    # the peak of one device, without sparsity; of fp16 with sums in fp16 too, which torch has to be asked for
    "flops_per_s": ((), (*PRECISIONS, FP16_ACCUMULATE)),
    # the peak, one way: host_memory, read and write (of its drives) of the node, host_core of a core, all else of a
    # device
    "bytes_per_s": (RATES, (*NETWORKS, CORE)),
    # to start an operation; to tell another lane that an operation has ended; of a network, a hop of a ring, inside
    # a node and between nodes; of the host, to launch one piece of work on the device; to start a collective; the
    # same three of a ring with the protocol LL128; of trees (PAT), which need a node for each rank: to start them,
    # a rank, a level; of Python, to issue an operation of a kind, beside its launches
    "seconds": (
        ("compute", "host", "d2h", "h2d", "read", "write", "handoff"),
        (*NETWORKS, "launch", "network", *LL128, *PAT, *ISSUE.values()),
    ),
    # the share of the figure of that name that is counted on: of FLOP/s, what large products reach, and what fused
    # attention does of them; of LL128 and trees, the share of the network's rate
    "reached": (
        ("device_bytes", "host_bytes", "disk_bytes", "attention", *RATES),
        (*PRECISIONS, FP16_ACCUMULATE, *NETWORKS, CORE, LL128[0], PAT[0]),
    ),
}
SHARED = "shared."  # begins the name of a resource's table: the shares that kinds of operations take of it
NEIGHBOURS = (
    "devices"  # in such a table: how many devices share it, one after the other; without it all of a node
)
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
GIVEN = "given with the command"  # the reason of a figure that was replaced
NONE_SENT = 1.0  # B/s of the network of a single rank, which sends nothing


@frozen
class Figure:
    """A number and its origin: the key of a `source`, the reason why it is `assumed`, or how it was `measured`."""

    value: float
    source: str = ""
    assumed: str = ""
    measured: str = ""
    note: str = ""

    def __attrs_post_init__(self) -> None:
        if sum(bool(x.strip()) for x in (self.source, self.assumed, self.measured)) != 1:
            raise ValueError("no origin, or several: give it one, source, assumed or measured")


def _figures(given: Mapping[str, Mapping[str, Figure]]) -> dict[str, dict[str, Figure]]:
    return {table: dict(figures) for table, figures in given.items()}


@frozen
class Profile:
    """A machine: `figures[table][key]`, in the unit that the table is named after, as "bytes".

    `sources` are titles and addresses of data sheets, by the keys that figures refer to. On a `unified`
    machine the device is the host; `grouped`: torch has grouped kernels for the device. Table
    "shared.RESOURCE" has, by kind of operation, the share of a resource that an operation takes (see
    `Hardware`); its key `devices` is the number of neighbouring devices that share one such resource; without
    the key all do. Copies and host work also compete for host memory, unless some resource is shared by all
    or the device is the host. Reads and writes share the drives, unless table "shared.disk" says otherwise.
    `measured` are operations timed on the machine.

    Raises ValueError with the profile, the table and the key for a figure that is missing or implausible.
    """

    name: str
    title: str
    figures: Mapping[str, Mapping[str, Figure]] = field(converter=_figures, hash=False)
    sources: Mapping[str, str] = field(factory=dict[str, str], converter=dict[str, str], hash=False)
    unified: bool = False
    grouped: bool = True
    measured: tuple[Measured, ...] = field(default=(), converter=tuple)

    def __repr__(self) -> str:
        return brief(self, "name", "title")

    def __attrs_post_init__(self) -> None:
        self._check_names("", (x for x in self.figures if not x.startswith(SHARED)), tuple(TABLES))
        for table in {**TABLES, **self.figures}:
            needed, optional = TABLES.get(table, ((), (*KINDS, NEIGHBOURS)))
            found = self.figures.get(table, {})
            self._check_names(table, found, (*needed, *optional))
            for key in (*needed, *found):
                self._check(table, key, self._figure(table, key))
        if not self.precisions:
            self._refuse("flops_per_s", "nothing", f"at least one of {', '.join(PRECISIONS)}: add it")
        rates, seconds = self.figures["bytes_per_s"], self.figures["seconds"]
        algorithms = [keys for keys in (LL128, PAT) if keys[0] in seconds]
        for key in (*self.figures["flops_per_s"], *rates, *(keys[0] for keys in algorithms)):
            self._figure("reached", key)
        for key in (*(x for x in NETWORKS if x in rates), *(x for keys in algorithms for x in keys)):
            self._figure("seconds", key)
        if self.device_bytes <= 0:
            got = f"{self.value('bytes', 'context'):g}"
            self._refuse("bytes.context", got, "less than the device has: lower it")

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions, such as "bf16", for which the profile has the device's FLOP/s."""
        return tuple(p for p in PRECISIONS if p in self.figures.get("flops_per_s", {}))

    def value(self, table: str, key: str) -> float:
        """Value of the figure `key` of `table`, in the table's unit. Raises ValueError for a missing figure."""
        return self._figure(table, key).value

    def reached(self, table: str, key: str) -> float:
        """The peak `key` of `table` times the share that real work is assumed to reach, in the table's unit."""
        share = f"{key}_bytes" if table == "bytes" else key
        return self.value(table, key) * self.value("reached", share)

    @property
    def given(self) -> dict[str, float]:
        """Values of the figures that `replace_figures` replaced, by "table.key"."""
        of = ((f"{x}.{key}", f) for x, figures in self.figures.items() for key, f in figures.items())
        return {place: figure.value for place, figure in of if figure.assumed == GIVEN}

    @property
    def device_bytes(self) -> float:
        """Bytes of a device that tensors may use: the memory counted on, less the context of the process."""
        context = self.figures["bytes"].get("context")
        return self.reached("bytes", "device") - (context.value if context is not None else 0)

    def hardware(self, precision: str, world: int = 1, devices: int = 1) -> Hardware:
        """One rank's share of the machine; `world` ranks compute in `precision` on `devices` devices each.

        The ranks of a node share its cores, host memory, bandwidth and disk evenly. Collectives run at the rate
        inside the node while all ranks are in one; between nodes at that of all ports of a node together, as
        rings enter a node through every port, but never faster than inside. Of the algorithms and protocols of
        NCCL that the profile has, each takes the one that NCCL's own model (src/graph/tuning.cc) finds fastest
        for its bytes.

        Raises ValueError for a precision or a network whose figures are unknown, for a `world` below 1, and for a
        rank with more devices than a node has.
        """
        if devices > (of_node := int(self.value("count", "devices"))):
            box = f", or the profile {x}" if (x := box_of(self.name, devices)) != self.name else ""
            self._refuse("devices", str(devices), f"at most the {of_node} of a node: use more ranks{box}")
        if precision not in self.precisions:
            has = f"one it has: use {', '.join(self.precisions)}, or calibrate with it"
            raise ValueError(f"{self.name}: got precision {precision!r}, expected {has}")
        if world < 1:
            raise ValueError(f"{self.name}: got a world of {world}, expected at least 1 rank: give a count")
        local = min(world, of_node // devices)  # ranks that share a node
        seconds = self.figures["seconds"]
        rates: dict[Kind, float] = {
            kind: NONE_SENT
            if kind == "network"
            else self.reached("bytes_per_s", NAMED.get(kind, kind)) / (local if kind in OF_NODE else 1)
            for kind in KINDS
        }
        shared = self._shared(rates)
        if CORE in self.figures["bytes_per_s"]:  # after what copies take of host memory: they take no cores
            cores = self.value("count", "cores") / local
            swept, rates["host"] = (
                rates["host"],
                min(rates["host"], cores * self.reached("bytes_per_s", CORE)),
            )
            if "host memory" in shared:
                shared["host memory"]["host"] = rates["host"] / swept
        latencies = {kind: seconds[kind].value for kind in KINDS if kind in seconds}
        collectives = [*self._collectives(world, local)] if world > 1 else []
        for latency, rate in collectives[:1]:
            latencies["network"], rates["network"] = latency, rate
        memory: dict[Tier, int] = {x: int(self.reached("bytes", x) / local) for x in ("host", "disk")}
        of = f", one of {world} ranks" if world > 1 else ""
        return Hardware(
            f"{self.title}, {precision}{of}",
            flops=self.reached("flops_per_s", precision),
            attention=self.value("flops_per_s", precision) * self.value("reached", "attention"),
            rates=rates,
            handoff=seconds["handoff"].value,
            launch=seconds["launch"].value if "launch" in seconds else 0.0,
            latencies=latencies,
            issue={kind: seconds[key].value for kind, key in ISSUE.items() if key in seconds},
            memory=memory if self.unified else {"device": int(self.device_bytes), **memory},
            unified=self.unified,
            grouped=self.grouped,
            shared=shared,
            neighbours={x: int(of[NEIGHBOURS].value) for x, of in self._resources if NEIGHBOURS in of},
            collectives=collectives[1:],
            measured=self.measured,
        )

    def _collectives(self, world: int, local: int) -> Iterator[tuple[float, float]]:
        """Latency (s) and rate (bytes/s) of an all-gather or reduce-scatter by algorithm, the plain ring first.

        A ring of `world` ranks, `local` of them in a node, has world - 1 hops, nodes - 1 of them between nodes.
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

    @property
    def _resources(self) -> list[tuple[str, Mapping[str, Figure]]]:
        return [(x.removeprefix(SHARED), of) for x, of in self.figures.items() if x.startswith(SHARED)]

    def _shared(self, rates: Mapping[Kind, float]) -> dict[str, dict[Kind, float]]:
        shared: dict[str, dict[Kind, float]] = {"disk": {"read": 1.0, "write": 1.0}}
        if all(NEIGHBOURS in of for _, of in self._resources) and not self.unified:
            crossing: tuple[Kind, ...] = ("host", "d2h", "h2d", "read", "write")
            shared["host memory"] = {kind: min(1.0, rates[kind] / rates["host"]) for kind in crossing}
        for resource, of in self._resources:
            shared[resource] = {kind: of[kind].value for kind in KINDS if kind in of}
        return shared

    # --- checks ----------------------------------------------------------------------------------------------

    def _figure(self, table: str, key: str) -> Figure:
        figure = self.figures.get(table, {}).get(key)
        if figure is None:
            expected = "one: add it, with its source or the reason it is assumed"
            self._refuse(f"{table}.{key}", "no figure", expected)
        return figure

    def _check_names(self, table: str, names: Iterable[str], known: tuple[str, ...]) -> None:
        for name in names:
            if name not in known:
                hint = did_you_mean(name, list(known)) or ": leave it out"
                expected = f"one of {', '.join(known)}{hint}"
                place = f"{table}.{name}".lstrip(".") or "a figure without a table"
                self._refuse(place, "an unknown name", expected)

    def _check(self, table: str, key: str, figure: Figure) -> None:
        place = f"{table}.{key}"
        unit = "count" if table.startswith(SHARED) and key == NEIGHBOURS else table.partition(".")[0]
        low, high = BOUNDS[unit]
        if not low <= figure.value <= high:
            expected = f"between {low:g} and {high:g} ({unit}): write it in that unit"
            self._refuse(place, f"{figure.value:g}", expected)
        if unit == "count" and figure.value != int(figure.value):
            self._refuse(place, f"{figure.value:g}", "a whole number: round it")
        if figure.source and figure.source not in self.sources:
            hint = did_you_mean(figure.source, list(self.sources)) or ": add it there, title and address"
            self._refuse(place, f"the source {figure.source!r}", f"one of `sources`{hint}")

    def _refuse(self, place: str, got: str, expected: str) -> NoReturn:
        raise ValueError(f"{self.name}: {place}: got {got}, expected {expected}")


def replace_figures(profile: Profile, values: Mapping[str, float]) -> Profile:
    """A copy of `profile` with new values of some figures, by "table.key"; a replaced figure counts as assumed.

    Raises ValueError for a table or a key that is not known, and for an implausible value.

    >>> replace_figures(load_profile("h100"), {"bytes.host": 1.28e11}).value("bytes", "host")
    128000000000.0
    """
    figures = _figures(profile.figures)
    for place, value in values.items():
        table, _, key = place.rpartition(".")
        now = figures.setdefault(table, {})
        if key not in now or now[key].value != value:
            now[key] = Figure(value, assumed=GIVEN)
    return evolve(profile, figures=figures)


# --- files ---------------------------------------------------------------------------------------------------


@cache
def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with zfunc.

    >>> "v100-32gb" in profile_names()
    True
    """
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_profile(name: str | PathLike[str]) -> Profile:
    """The profile that comes with zfunc under this name, or the profile in the file at this path.

    Raises FileNotFoundError for an unknown name or path, and ValueError for a file that is not a profile.

    >>> load_profile("h100").value("count", "devices")
    8
    """
    if name in profile_names():
        return parse_profile((FOLDER / f"{name}.toml").read_text(), str(name))
    if not (path := Path(name)).is_file():
        similar = [known for known in profile_names() if name and known.startswith(str(name).lower())]
        hint = did_you_mean(str(name), similar or list(profile_names()))
        got = f"{str(name)!r}, which is no profile and no file"
        expected = f"one of {', '.join(profile_names())}, or a path{hint}"
        do = "" if hint else "zfunc calibrate writes one of this machine"
        refuse("hardware", got, expected, do, FileNotFoundError)
    return parse_profile(path.read_text(), str(path))


def box_of(name: str, gpus: int) -> str:
    """Name of the smallest known machine with at least `gpus` cards of profile `name`; `name` if none has.

    >>> box_of("rtx4090", 2), box_of("rtx4090", 4), box_of("h100", 8), box_of("t4", 2)
    ('rtx4090x2', 'rtx4090x8', 'h100', 't4')
    """
    boxes = filter(re.compile(rf"{re.escape(name)}(x\d+)?").fullmatch, profile_names())
    counts = {x: load_profile(x).value("count", "devices") for x in boxes}
    return min((x for x in counts if counts[x] >= gpus), key=lambda x: counts[x], default=name)


Table: TypeAlias = Mapping[str, Figure]


_NONE: Mapping[str, Any] = MappingProxyType({})


@frozen
class _File:
    """The tables that a profile's file may have; figures, `unified` and `grouped` that the file leaves out are
    taken from the profile named as `base`."""

    base: str = ""
    title: str = ""
    unified: bool = False
    grouped: bool = True
    sources: Mapping[str, str] = _NONE
    count: Table = _NONE
    bytes: Table = _NONE
    flops_per_s: Table = _NONE
    bytes_per_s: Table = _NONE
    seconds: Table = _NONE
    reached: Table = _NONE
    shared: Mapping[str, Table] = _NONE
    measured: tuple[Measured, ...] = ()


def parse_profile(text: str, name: str) -> Profile:
    """The Profile in `text`, the TOML of a profile's file; errors, too, call it `name`. Raises ValueError.

    >>> parse_profile("titel = 'mine'", "mine.toml")
    Traceback (most recent call last):
    ValueError: mine.toml: got a field 'titel' (did you mean 'title'?), expected only base, ...: mend that line
    """
    try:
        found: _File = decoded(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: got {error}, expected TOML: mend that place") from error
    except Refusal as error:
        place = f"{error.place.lstrip('.')}: " if error.place else ""
        raise ValueError(
            f"{name}: {place}got {error.got}, expected {error.expected}: mend that line"
        ) from error
    figures: dict[str, Table] = {table: of for table in TABLES if (of := getattr(found, table))}
    figures |= {f"{SHARED}{resource}": of for resource, of in found.shared.items()}
    sources = found.sources
    if found.base:
        base = load_profile(one_of(profile_names())(f"{name}: base", found.base))
        sources = {**base.sources, **sources}
        figures = {x: {**base.figures.get(x, {}), **figures.get(x, {})} for x in {**base.figures, **figures}}
        found = evolve(found, unified=base.unified, grouped=base.grouped)
    more = sources, found.unified, found.grouped, found.measured
    return Profile(name, found.title or name, figures, *more)


def profile_text(profile: Profile) -> str:
    """The TOML text of the file of `profile`; `parse_profile` reads the same profile from it."""
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: Profile) -> Iterator[str]:
    yield "# A machine's figures. A table's name is the unit of what is in it."
    yield f"title = {_plain(profile.title)}"
    if profile.unified:
        yield "unified = true  # the device is the host"
    if not profile.grouped:
        yield "grouped = false  # keys and values are repeated for grouped queries, every expert sees every token"
    if profile.sources:
        yield from ["", "[sources]"]
        yield from (f"{_key(x)} = {_plain(value)}" for x, value in profile.sources.items())
    for table, figures in profile.figures.items():
        resource = table.removeprefix(SHARED)
        yield ""
        yield f"[{table}]" if resource == table else f"[{SHARED}{_key(resource)}]"
        for key, f in figures.items():
            known = ", ".join(f"{x} = {_plain(value)}" for x, value in asdict(f).items() if value != "")
            yield f"{_key(key)} = {{ {known} }}"
    for entry in profile.measured:
        yield from ["", "[[measured]]", *(f"{x} = {_plain(value)}" for x, value in asdict(entry).items())]


def _plain(value: str | float) -> str:
    """`value` as TOML text; a number in the fewest digits that read back exactly."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    short = f"{value:g}"
    return short if isinstance(value, float) and "e" in short and float(short) == value else repr(value)


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _plain(key)
