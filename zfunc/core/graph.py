"""What a step means: operations in serial order, each with the regions it reads and writes.

The invariant: everything else about order is derived. Two operations conflict if they touch a region and one
of them writes it; a conflicting pair keeps its serial order in every plan. Nobody writes a dependency down.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, cast, get_args

from attrs import field, frozen, validators

from zfunc.core.dtypes import DTYPES, Dtype

Tier = Literal["device", "pinned", "host", "disk"]
Kind = Literal["compute", "network", "d2h", "h2d", "host", "disk"]
Lifetime = Literal["operation", "program", "state", "value"]
Role = Literal["params", "state", "shadow", "grad", "grad_shard", "copy", "squares", "loss"]
RegionDtype = Dtype | Literal["compute"]  # "compute" is the precision of parameters on the device
TIERS: tuple[Tier, ...] = get_args(Tier)
KINDS: tuple[Kind, ...] = get_args(Kind)
LIFETIMES: tuple[Lifetime, ...] = get_args(Lifetime)
ROLES: tuple[Role, ...] = get_args(Role)
ALLOCATED: tuple[Lifetime, ...] = ("program", "state")


def label(name: str, index: tuple[int, ...]) -> str:
    """Name and index as everything prints them: `forward[0,3]`, `decision`."""
    return f"{name}[{','.join(map(str, index))}]" if index else name


def _tuple(given: Any) -> tuple[Any, ...]:
    """What is listed, as a tuple; `Graph` looks at what is in it."""
    if type(given) is tuple:  # nearly always
        return cast("tuple[Any, ...]", given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"Op, Region: got {given!r:.200}, expected a tuple: (x,) for one alone")
    return tuple(cast("Iterable[Any]", given))


@frozen(cache_hash=True)
class Region:
    """A piece of memory an operation can read or write; `buffer` and `index` are its identity.

    `nbytes` is its size in bytes and `tier` where it lives. `lifetime` says for how long:

    - "operation": from its first write to its last access;
    - "program": a staging buffer of `dtype` that the program allocates once; its content is a step's own;
    - "state": memory of the training state, of `dtype`, allocated with it;
    - "value": what a step is given or leaves: the batch, a norm, a decision.

    `role` is what operations use it for, where several buffers serve one purpose: "params" as forward reads them,
    the optimizer's "state" of a bucket and its "shadow", the "grad" of a whole bucket, a rank's "grad_shard"
    wherever it waits, the "copy" of new parameters on its way to the device, "squares" of a gradient, a "loss".
    """

    buffer: str
    index: tuple[int, ...] = field(default=(), converter=_tuple)
    nbytes: int = field(default=0, eq=False, validator=validators.ge(0))
    tier: Tier = field(default="device", eq=False, validator=validators.in_(TIERS))
    lifetime: Lifetime = field(default="operation", eq=False, validator=validators.in_(LIFETIMES))
    dtype: RegionDtype | None = field(default=None, eq=False)
    role: Role | None = field(default=None, eq=False, validator=validators.in_((*ROLES, None)))

    @dtype.validator  # pyright: ignore
    def _check_dtype(self, _: object, dtype: RegionDtype | None) -> None:
        """What is allocated has a type, and nothing else has."""
        if (dtype is not None) != (self.lifetime in ALLOCATED):
            raise ValueError(
                f"{self}: got dtype {dtype!r} with lifetime {self.lifetime!r}, expected a dtype where the lifetime "
                "is 'program' or 'state', and only there"
            )
        if dtype is not None and dtype != "compute" and dtype not in DTYPES:
            raise ValueError(f"{self}: got dtype {dtype!r}, expected 'compute' or one of {', '.join(DTYPES)}")

    @property
    def kept(self) -> bool:
        """Whether it is there from step to step."""
        return self.lifetime != "operation"

    @property
    def trained(self) -> bool:
        """Whether a step updates it: once an operation that writes it has begun, the State before it is gone."""
        return self.lifetime == "state" and self.role in ("params", "state")

    def __str__(self) -> str:
        return label(self.buffer, self.index)


@frozen
class Op:
    """One operation: a verb, its index, what it touches, and how much work it is.

    `kind` is the resource it occupies: the device's arithmetic, the network, the bus to the host (d2h) and back
    (h2d), the host's cores, the disk. `flops` and `nbytes` are its work (floating-point operations; bytes
    moved over the resource `kind` stands for). `workspace` is the device memory it needs for itself while it
    runs, in bytes.
    """

    verb: str
    index: tuple[int, ...] = field(converter=_tuple)
    kind: Kind = field(validator=validators.in_(KINDS))
    reads: tuple[Region, ...] = field(default=(), converter=_tuple)
    writes: tuple[Region, ...] = field(default=(), converter=_tuple)
    flops: int = 0
    nbytes: int = 0
    workspace: int = 0

    @cached_property
    def name(self) -> str:
        """The verb and index, unique in a graph: `adam[3]`."""
        return label(self.verb, self.index)

    def __str__(self) -> str:
        return self.name

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Every region touched, once each."""
        return tuple(dict.fromkeys(self.reads + self.writes))

    def read(self, name: str) -> Region:
        """The one region of that role or buffer that this operation reads."""
        (region,) = (r for r in self.reads if name in (r.role, r.buffer))
        return region

    def write(self, name: str) -> Region:
        """The one region of that role or buffer that this operation writes."""
        (region,) = (r for r in self.writes if name in (r.role, r.buffer))
        return region

    def touches(self, name: str) -> bool:
        """Whether any region of that role or buffer is read or written."""
        return any(name in (r.role, r.buffer) for r in self.regions)

    def operands(self, role: Role) -> tuple[Region, ...]:
        """The regions of that role, in the order they are declared."""
        return tuple(r for r in self.regions if r.role == role)


@frozen
class Conflict:
    """Two operations, by position in the graph, that must keep their order because of `region`."""

    before: int
    after: int
    region: Region


@frozen
class Graph:
    """Operations in serial order: run top to bottom, they *are* the reference result.

    Raises ValueError where two operations share a name, or a region has two sizes or tiers, and TypeError for what
    is no operation.

    >>> x = Region("x", nbytes=4)
    >>> graph = Graph((Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,))))
    >>> graph.predecessors
    ((), (0,))
    """

    ops: tuple[Op, ...] = field(converter=tuple)

    @ops.validator  # pyright: ignore
    def _check(self, _: object, ops: tuple[Any, ...]) -> None:
        seen: set[str] = set()
        sizes: dict[Region, tuple[Any, ...]] = {}
        for op in ops:
            if not isinstance(op, Op):
                raise TypeError(
                    f"recipe: got {op!r:.200} among the operations, expected zfunc.core.graph.Op alone"
                )
            _check_name("operation", op.verb, op.index)
            if op.name in seen:
                raise ValueError(f"two operations are named {op.name}: give each its own index")
            seen.add(op.name)
            for r in op.regions:
                if not isinstance(r, Region):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(
                        f"{op.name}: got {r!r:.200} among what it touches, expected zfunc.core.graph.Region"
                    )
                if r not in sizes:
                    _check_name("region", r.buffer, r.index)
                now = (r.nbytes, r.tier, r.lifetime, r.dtype, r.role)
                if (was := sizes.setdefault(r, now)) != now:
                    raise ValueError(
                        f"{op.name} declares {r} as {now}, an earlier operation as {was} (bytes, tier, lifetime, "
                        "dtype, role): a region has one size and one place"
                    )

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    @cached_property
    def position(self) -> dict[str, int]:
        """Where each operation stands, by name."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Every region any operation touches, in order of first appearance."""
        return tuple(dict.fromkeys(r for op in self.ops for r in op.regions))

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """The pairs that order must keep; every other conflicting pair follows from these by transitivity.

        Linear in operations x regions touched: a read follows the last write, a write follows the last write
        and every read since.
        """
        return tuple(_conflicts(self.ops))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the positions of the operations it must follow."""
        before: list[dict[int, None]] = [{} for _ in self.ops]
        for c in self.conflicts:
            before[c.after][c.before] = None
        return tuple(map(tuple, before))


def _check_name(what: str, name: Any, index: tuple[Any, ...]) -> None:
    """A name and an index as the text of a plan has them."""
    if not isinstance(name, str) or name.split() != [name] or "[" in name:
        raise ValueError(f"{what}: got the name {name!r}, expected a word, without spaces and brackets")
    if not all(type(i) is int for i in index):
        raise TypeError(f"{what} {name}: got the index {index!r:.200}, expected whole numbers")


def _conflicts(ops: Iterable[Op]) -> Iterator[Conflict]:
    last_write: dict[Region, int] = {}
    reads_since: dict[Region, list[int]] = {}
    for i, op in enumerate(ops):
        for r in dict.fromkeys(op.reads):
            if r in last_write:
                yield Conflict(last_write[r], i, r)
        for r in dict.fromkeys(op.writes):
            if r in last_write and r not in op.reads:
                yield Conflict(last_write[r], i, r)
            for reader in reads_since.get(r, ()):
                yield Conflict(reader, i, r)
        for r in dict.fromkeys(op.reads):
            reads_since.setdefault(r, []).append(i)
        for r in op.writes:
            last_write[r] = i
            reads_since[r] = []
