"""Operations in serial order, each with the regions it reads and writes; dependencies are derived from these.

Two operations conflict if both touch a region and one of them writes it. Every plan keeps the serial order of a
conflicting pair.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast, get_args

from attrs import evolve, field, frozen

from zfunc.core.display import counted
from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.errors import PlanError, did_you_mean, refuse

Tier = Literal["device", "pinned", "host", "disk"]
Kind = Literal["compute", "network", "d2h", "h2d", "host", "read", "write"]
Lifetime = Literal["operation", "program", "state", "value"]
Role = Literal[
    "params",
    "state",
    "paged",
    "grad",
    "grad_shard",
    "copy",
    "act",
    "squares",
    "loss",
    "aux",
    "module_buffers",
    "ema",
]
TIERS: tuple[Tier, ...] = get_args(Tier)
KINDS: tuple[Kind, ...] = get_args(Kind)
EVERY = -1  # the number of the device of what all of them have
HOST_CODE: tuple[Kind, ...] = ("host", "read", "write")  # they never run on a stream: Python waits for them
OF_DEVICE: tuple[Kind, ...] = ("compute", "d2h", "h2d")  # each device has its own
LIFETIMES: tuple[Lifetime, ...] = get_args(Lifetime)
ROLES: tuple[Role, ...] = get_args(Role)
SHOWN = 4  # regions of an operation that prints
ALLOCATED: tuple[Lifetime, ...] = ("program", "state")


def label(name: str, index: tuple[int, ...]) -> str:
    """The printed form of an operation or region by name and index: `forward[0,3]`; `decision` has no index."""
    return f"{name}[{','.join(map(str, index))}]" if index else name


def _tuple(items: Any) -> tuple[Any, ...]:
    """An attrs converter of an iterable to a tuple; `Graph` checks the items."""
    if type(items) is tuple:  # nearly always
        return items  # pyright: ignore[reportUnknownVariableType]
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise PlanError(f"Op, Region: got {items!r:.200}, expected a tuple: pass (x,) for a single item")
    return tuple(cast("Iterable[Any]", items))


@frozen(cache_hash=True)
class Region:
    """A piece of memory that operations read and write; `buffer` and `index` identify it.

    `nbytes` is its size in bytes and `tier` its place. `lifetime` is one of

    - "operation": from its first write to its last access;
    - "program": a staging buffer of `dtype`, allocated once a program; its content is valid within one step;
    - "state": memory of the training state, of `dtype`, allocated with it;
    - "value": an input or output of a step: the batch, a norm, a decision.

    `device` is the number of the device of this process that has the region; 0 in memory off the devices, which
    they share. In a pipeline over ranks (`of_rank`) it is the number of the stage, for memory off the device, too,
    or -1 for data of which all stages have a copy.

    `role` is its use, where several buffers serve the same one: "params" as forward reads them, the optimizer's
    "state" of a bucket or "paged" in from the disk, the "grad" of a whole bucket, a rank's "grad_shard", the "copy"
    of new parameters on its way to the device, an "act" that waits for backward, "squares" of a gradient, a "loss",
    the auxiliary outputs beside it ("aux"), the "module_buffers" that forward changes, the moving average of the
    weights ("ema").

    Raises PlanError for an unknown tier, lifetime or role, or a dtype that does not match the lifetime.
    """

    buffer: str
    index: tuple[int, ...] = field(default=(), converter=_tuple)
    nbytes: int = field(default=0, eq=False)
    tier: Tier = field(default="device", eq=False)
    lifetime: Lifetime = field(default="operation", eq=False)
    dtype: Dtype | None = field(default=None, eq=False)
    role: Role | None = field(default=None, eq=False)
    device: int = field(default=0, eq=False)
    of_rank: bool = field(default=False, eq=False)

    # One function, because a plan has hundreds of thousands of regions.
    def __attrs_post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError(f"{self}: got nbytes {self.nbytes}, expected 0 or more")
        for what, value, known in (
            ("tier", self.tier, TIERS),
            ("lifetime", self.lifetime, LIFETIMES),
            ("role", self.role, (None, *ROLES)),
            ("dtype", self.dtype, (None, *DTYPES)),
        ):
            if value not in known:
                raise PlanError(f"{self}: got {what} {value!r}, expected one of {', '.join(map(str, known))}")
        if (self.dtype is not None) != (self.lifetime in ALLOCATED):
            raise PlanError(
                f"{self}: got dtype {self.dtype!r} with lifetime {self.lifetime!r}, expected a dtype where the "
                "lifetime is 'program' or 'state', and only there"
            )

    @property
    def place(self) -> Tier:
        """The name of the memory that has the region: its tier, with the device ("device:1") or pipeline
        stage ("host@1") unless that is number 0."""
        mark = "@" if self.of_rank else ":"
        return cast("Tier", f"{self.tier}{mark}{self.device}") if self.device else self.tier

    @property
    def kept(self) -> bool:
        """Whether the region's memory outlives the operations that use it."""
        return self.lifetime != "operation"

    @property
    def trained(self) -> bool:
        """Whether steps update this region as a part of the training State, so that the first write in a step
        makes the State from before the step unusable."""
        return self.lifetime == "state" and self.role in ("params", "state", "module_buffers", "ema")

    def __str__(self) -> str:
        return label(self.buffer, self.index)


def of_stage(regions: Iterable[Region], stage: int | None) -> Iterator[Region]:
    """Yield those of `regions` that belong to pipeline stage `stage`, with 0 as their device number; if
    `stage` is None, all of them, unchanged."""
    return (
        r if stage is None else evolve(r, device=0, of_rank=False)
        for r in regions
        if stage in (None, r.device)
    )


@frozen
class Op:
    """One operation of a step: a verb, its index, the regions it reads and writes, and its work.

    `kind` is the resource it occupies: device arithmetic ("compute"), the "network", the bus to the host ("d2h")
    and to the device ("h2d"), cores of the "host", the disk ("read", "write"). `flops` counts its floating-point
    operations, including `attention_flops` of fused attention; `nbytes` the bytes it moves over that resource;
    `workspace` the bytes of device memory it needs while it runs; `launches` the pieces of work that the host
    launches on an accelerator for it (0: not counted); `copied_bytes` the bytes it copies between host and device
    beside that work.

    Raises PlanError for an unknown kind, and for an index or regions that are no tuples.
    """

    verb: str
    index: tuple[int, ...] = field(converter=_tuple)
    kind: Kind
    reads: tuple[Region, ...] = field(default=(), converter=_tuple)
    writes: tuple[Region, ...] = field(default=(), converter=_tuple)
    flops: int = 0
    nbytes: int = 0
    workspace: int = 0
    launches: int = 0
    attention_flops: int = 0
    copied_bytes: int = 0
    name: str = field(init=False, eq=False, repr=False)
    """Verb and index, unique in a graph: `update[3]`."""
    device: int = field(init=False, eq=False, repr=False)
    """The number of the device or pipeline stage that it occupies: its regions tell; 0 where it has none."""

    @name.default  # pyright: ignore
    def _name(self) -> str:
        return label(self.verb, self.index)

    @device.default  # pyright: ignore
    def _device(self) -> int:
        for r in self.reads + self.writes:
            if getattr(r, "device", 0):  # `Graph` checks what they are
                break
        else:
            return 0  # nearly always
        of_ranks = self._of_ranks
        if self.joint or not (of_ranks or self.kind in OF_DEVICE):
            return 0
        read, written = (
            {r.device for r in regions if of_ranks or getattr(r, "tier", None) == "device"} - {EVERY}
            for regions in (self.reads, self.writes)
        )
        # Over the network it may write another's memory, and a copy to a device read that of a peer.
        mine = {"network": read, "h2d": written}.get(self.kind, set[int]())
        found = mine or read | written
        if len(found) > 1:
            names = " and ".join(map(str, sorted(found)))
            copy = "in an operation of the kind 'network'" if of_ranks else "to pinned memory and from there"
            raise PlanError(
                f"{self.name}: got regions of the devices {names}, expected those of one: copy what another has "
                f"{copy}, in operations of their own"
            )
        return found.pop() if found else 0

    @property
    def _of_ranks(self) -> bool:
        """Whether the operation is part of a pipeline whose stages run on different ranks, so that its
        regions are in the memory of single ranks."""
        return any(getattr(r, "of_rank", False) for r in (*self.reads, *self.writes))

    @property
    def joint(self) -> bool:
        """Whether all ranks of a pipeline execute this operation together, and each gets its results."""
        return any(getattr(r, "device", 0) == EVERY for r in self.writes)

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(
                f"{self}: got the kind {self.kind!r}, expected one of {', '.join(KINDS)}"
                f"{did_you_mean(str(self.kind), list(KINDS))}: name the resource that it occupies"
            )

    @property
    def resource(self) -> str:
        """The resource the operation occupies: its kind, on the second device "compute:1", in stage 1 "host@1"."""
        if not self.device:
            return self.kind
        return f"{self.kind}{'@' if self._of_ranks else ':'}{self.device}"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Op({self.name}, {self.kind}: {_some(self.reads)} -> {_some(self.writes)})"

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that the operation reads or writes, each once."""
        return tuple(dict.fromkeys(self.reads + self.writes))

    def read(self, name: str) -> Region:
        """The only region with role or buffer `name` that the operation reads; ValueError for none or several."""
        (region,) = (r for r in self.reads if name in (r.role, r.buffer))
        return region

    def write(self, name: str) -> Region:
        """The only region with role or buffer `name` that the operation writes; ValueError for none or several."""
        (region,) = (r for r in self.writes if name in (r.role, r.buffer))
        return region

    @cached_property
    def _names(self) -> frozenset[str | None]:
        return frozenset(x for r in self.reads + self.writes for x in (r.role, r.buffer))

    def touches(self, name: str) -> bool:
        """Whether the operation reads or writes a region with role or buffer `name`."""
        return name in self._names

    def operands(self, role: Role) -> tuple[Region, ...]:
        """The operation's regions with role `role`, in the order of declaration."""
        return tuple(r for r in self.regions if r.role == role)


def _some(regions: tuple[Region, ...]) -> str:
    """Text that names the first of `regions` and says how many more there are."""
    names = ", ".join(map(str, regions[:SHOWN]))
    return f"{names} and {counted(len(regions) - SHOWN, 'region')} more" if regions[SHOWN:] else names


class Access(NamedTuple):
    """The regions that an operation reads and the regions it writes, each once, by position in `Graph.regions`."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Conflict(NamedTuple):
    """Two operations of a graph, by position, that conflict over `region`: one writes it, the other touches it."""

    before: int
    after: int
    region: Region


def _operations(ops: Any) -> tuple[Any, ...]:
    """An attrs converter to a tuple of operations from whatever a recipe returned. Raises PlanError for a
    value that cannot be iterated; `Graph` checks the items."""
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        got = f"{ops!r:.200}"
        refuse("recipe", got, "operations", f"{_instead(ops)}, or return a list of them", PlanError)
    return tuple(cast("Iterable[Any]", ops))


def _instead(got: Any) -> str:
    """Advice for an error message: what to write where a recipe yielded `got`, which is not an operation."""
    if isinstance(got, Op):
        return "yield it"
    if isinstance(got, Iterator):
        return "write yield from for the operations of another generator"
    if callable(got):
        return f"call {getattr(got, '__name__', 'it')}, with what it takes"
    return "yield each (a function without yield and return gives None)" if got is None else "yield each"


@frozen
class Graph:
    """The operations of a step in serial order: run from first to last, they define the reference result.

    Raises PlanError for two operations with one name, a region declared in two ways, and an item that is not an Op.

    >>> x = Region("x", nbytes=4)
    >>> graph = Graph((Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,))))
    >>> graph.predecessors
    ((), (0,))
    """

    ops: tuple[Op, ...] = field(converter=_operations)

    _numbered: tuple[tuple[Region, ...], tuple[Access, ...]] = field(init=False, eq=False, repr=False)

    @_numbered.default  # pyright: ignore
    def _check(self) -> tuple[tuple[Region, ...], tuple[Access, ...]]:
        """Check all operations, or raise PlanError. Returns the distinct regions in order of first use, and
        each operation's reads and writes as positions in that tuple."""
        seen: set[str] = set()
        words: set[str] = set()
        number: dict[Region, int] = {}
        known: dict[int, int] = {}  # by id: most operations share the objects of their regions
        regions: list[Region] = []
        accesses: list[Access] = []
        for op in self.ops:
            if not isinstance(op, Op):  # pyright: ignore[reportUnnecessaryIsInstance]
                got = f"{op!r:.200} among the operations"
                refuse("recipe", got, "only zfunc.core.graph.Op", _instead(op), PlanError)
            _check_name("operation", op.verb, op.index, words)
            if op.name in seen:
                got = f"two operations named {op.name}"
                refuse("recipe", got, "each once", "give each its own index, or leave one out", PlanError)
            seen.add(op.name)
            for r in op.reads + op.writes:
                if id(r) in known:
                    continue
                if not isinstance(r, Region):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise PlanError(
                        f"{op.name}: got {r!r:.200} among its regions, expected zfunc.core.graph.Region alone: "
                        "pass one"
                    )
                n = known[id(r)] = number.setdefault(r, len(regions))
                if n == len(regions):
                    _check_name("region", r.buffer, r.index, words)
                    regions.append(r)
                elif (now := _declaration(r)) != (before := _declaration(regions[n])):
                    raise PlanError(
                        f"{op.name} declares {r} as {now}, an earlier operation as {before} (bytes, tier, "
                        "lifetime, dtype, role): declare a region the same way everywhere"
                    )
            reads = dict.fromkeys([known[id(r)] for r in op.reads])
            accesses.append(Access(tuple(reads), tuple(dict.fromkeys([known[id(r)] for r in op.writes]))))
        return tuple(regions), tuple(accesses)

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __repr__(self) -> str:
        return f"Graph({counted(len(self), 'operation')}, {counted(len(self.regions), 'region')})"

    @cached_property
    def position(self) -> dict[str, int]:
        """The position of each operation in the graph, by the operation's name."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions of all operations, in order of first appearance."""
        return self._numbered[0]

    @property
    def accesses(self) -> tuple[Access, ...]:
        """For each operation, the regions it reads and writes, as positions in `regions` (faster as keys)."""
        return self._numbered[1]

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Pairs of operations that conflict over a region (one writes it): only the pairs from which all
        other conflicting pairs follow by transitivity.

        A read follows the last write of its region; a write follows the last write and every read since.
        Takes time linear in the number of operations times the regions of each.
        """
        return tuple(_conflicts(self))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the positions of the operations that it depends on directly."""
        before: list[dict[int, None]] = [{} for _ in self.ops]
        for earlier, later, _ in self.conflicts:
            before[later][earlier] = None
        return tuple(map(tuple, before))


def _check_name(what: str, name: Any, index: tuple[Any, ...], words: set[str]) -> None:
    """Raise PlanError, on a `what`, for a name or index that a plan's text cannot hold; add the name to `words`."""
    if not isinstance(name, str) or (name not in words and (name.split() != [name] or "[" in name)):
        raise PlanError(f"{what}: got the name {name!r}, expected a word without spaces and brackets")
    words.add(name)
    if not {*map(type, index)} <= {int}:
        raise PlanError(
            f"{what} {name}: got the index {index!r:.200}, expected integers: pass a tuple of int"
        )


def _declaration(r: Region) -> tuple[Any, ...]:
    return r.nbytes, r.place, r.lifetime, r.dtype, r.role


def _conflicts(graph: Graph) -> Iterator[Conflict]:
    regions = graph.regions
    last_write = [-1] * len(regions)
    reads_since: list[list[int]] = [[] for _ in regions]
    for i, (reads, writes) in enumerate(graph.accesses):
        for n in reads:
            if last_write[n] >= 0:
                yield Conflict(last_write[n], i, regions[n])
        for n in writes:
            if last_write[n] >= 0 and n not in reads:
                yield Conflict(last_write[n], i, regions[n])
            for reader in reads_since[n]:
                yield Conflict(reader, i, regions[n])
        for n in reads:
            reads_since[n].append(i)
        for n in writes:
            last_write[n] = i
            reads_since[n] = []
