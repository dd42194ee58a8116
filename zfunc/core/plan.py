"""Plans: the operations of a graph on FIFO lanes, and the waits between lanes.

`build` keeps a wait only if nothing else implies it, so deleting any one breaks a dependency. A plan prints as text
and parses back; ranks compare its digest. (`zfunc.plan`, which plans a training step, is in
`zfunc.planner.plan_step`.)
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import Any

from attrs import Factory, evolve, field, frozen

from zfunc.core.display import counted
from zfunc.core.graph import EVERY, HOST_CODE, Graph, Kind, Op, Region, Tier
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.methods import above, in_notebook
from zfunc.core.timeline import Timeline
from zfunc.errors import PlanError, refuse

# The work of an operation, as a plan prints it.
WORKS = ("flops", "attention_flops", "nbytes", "workspace", "launches", "copied_bytes")

# For each lane, the position of the last operation known to have finished; -1 if none.
Clock = tuple[int, ...]


def _tuple_of(what: str, item: Callable[[Any], Any], expected: str) -> Callable[[Any], tuple[Any, ...]]:
    """An attrs converter to a tuple, with `item` applied to each element; `what`, `expected` are for its error."""

    def convert(items: Any) -> tuple[Any, ...]:
        try:
            return tuple(map(item, items))
        except TypeError:
            raise PlanError(f"{what}: got {items!r:.200}, expected {expected}") from None

    return convert


def _lane(lane: Any) -> "Lane":
    if not isinstance(lane, Lane):
        raise TypeError
    return lane


_positions = _tuple_of(
    "operations of a lane, waits of one",
    index,
    "positions of operations in the graph, as integers: [i for i, op in enumerate(graph) if ...]; of one by its "
    "name, graph.position[name]",
)
_lanes = _tuple_of("lanes", _lane, "zfunc.core.plan.Lanes: make a plan with build")
_waits = _tuple_of("waits", _positions, "the waits of each operation: make a plan with build")


@frozen
class Lane:
    """A lane of a plan: it runs the operations `ops`, given by position in the graph, in order; on a device it is a
    stream. `thread` names the Python thread that issues them, by default one of the lane's own name.

    Raises PlanError for a name with spaces, or positions that are not integers.
    """

    name: str = field()
    ops: tuple[int, ...] = field(converter=_positions)
    thread: str = field(default=Factory(lambda self: self.name, takes_self=True))

    def __repr__(self) -> str:
        return f"Lane({self.name!r}, {counted(len(self.ops), 'operation')})"

    @name.validator  # pyright: ignore
    @thread.validator  # pyright: ignore
    def _check_name(self, which: Any, name: Any) -> None:
        if not isinstance(name, str) or name.split() != [name]:
            raise PlanError(f"lane: got the {which.name} {name!r}, expected a word without spaces")


@frozen
class Plan:
    """The operations of `graph` on `lanes` (FIFO queues, run by a thread or stream each). `waits[i]` are the
    operations on other lanes that operation `i` waits for.

    `build` makes a Plan, `zfunc.core.verifier.verify` checks it. Raises PlanError for arguments of other
    types.
    """

    graph: Graph = field()
    lanes: tuple[Lane, ...] = field(converter=_lanes)
    waits: tuple[tuple[int, ...], ...] = field(converter=_waits)

    @graph.validator  # pyright: ignore
    def _check_graph(self, _: object, graph: Any) -> None:
        if not isinstance(graph, Graph):
            raise PlanError(f"plan: got {graph!r:.200}, expected the Graph that was passed to the schedule")

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """For each operation, by position in the graph, the number of its lane and its position on the lane."""
        return {op: (n, p) for n, lane in enumerate(self.lanes) for p, op in enumerate(lane.ops)}

    @cached_property
    def threads(self) -> dict[str, tuple[int, ...]]:
        """For each thread, by name, the operations that it issues, in order: those of its lane, or of several
        lanes merged.

        The merged order is part of one order of the whole plan in which no operation comes before one that it
        waits for, so no thread waits for an operation that it issues later. Raises PlanError for a deadlock.
        """
        issued: dict[str, list[int]] = {lane.thread: [] for lane in self.lanes}
        for op in topological_order(self, self.waits):
            issued[self.thread_of(op)].append(op)
        return {thread: tuple(ops) for thread, ops in issued.items()}

    def thread_of(self, op: int) -> str:
        """The name of the thread that issues operation number `op` of the graph."""
        return self.lanes[self.place[op][0]].thread

    def behind(self, waited_for: Collection[Kind] = HOST_CODE) -> dict[int, tuple[int, ...]]:
        """If a thread issues several lanes: for each operation, the last operation of each other lane that is
        sure to have ended when the thread issues it. The thread waits for operations of the kinds
        `waited_for` to end. {} if each lane has its own thread."""
        if len({lane.thread for lane in self.lanes}) == len(self.lanes):
            return {}
        found: dict[int, tuple[int, ...]] = {}
        clocks: dict[int, Clock] = {}
        last: dict[str, Clock] = dict.fromkeys(self.threads, (-1,) * len(self.lanes))
        for op in topological_order(self, self.waits):
            (lane, position), clock = self.place[op], last[self.thread_of(op)]
            found[op] = tuple(self.lanes[n].ops[p] for n, p in enumerate(clock) if n != lane and p >= 0)
            known = _tick(clock, lane, position, self.waits[op], clocks)
            if self.graph.ops[op].kind not in waited_for:
                known = (*known[:lane], clock[lane], *known[lane + 1 :])
            clocks[op] = last[self.thread_of(op)] = known
        return found

    @cached_property
    def clocks(self) -> dict[int, Clock]:
        """The vector clock of every operation, from lane order and waits alone.

        For `a != b`, `a` finishes before `b` starts in every run exactly if
        `clocks[b][lane of a] >= position of a`.
        Raises PlanError for a deadlock.
        """
        clocks: dict[int, Clock] = {}
        last = _no_clocks(self)
        for op in topological_order(self, self.waits):
            lane, position = self.place[op]
            clocks[op] = last[lane] = _tick(last[lane], lane, position, self.waits[op], clocks)
        return clocks

    @property
    def num_waits(self) -> int:
        """The number of waits between lanes in this plan."""
        return sum(map(len, self.waits))

    def verify(self) -> "Plan":
        """Return this plan if every timing of its lanes gives the result of the serial graph. Raises
        PlanError, which names the race, if one does not."""
        return above("verify")(self)

    def simulate(self, hardware: Hardware = ROUND) -> Timeline:
        """When each operation of this plan runs on `hardware`, in seconds; raises PlanError for a deadlock."""
        return above("simulate")(self, hardware)

    def lower_bound(self, hardware: Hardware = ROUND) -> float:
        """Seconds on `hardware` of the longest chain of dependencies: no plan of this graph is faster."""
        return above("lower_bound")(self.graph, hardware)

    def peak_bytes(self) -> dict[Tier, int]:
        """Upper bound, in bytes, of the memory in each tier that a step of this plan takes, in any timing."""
        return {tier: peak.nbytes for tier, peak in above("peak_memory")(self).items()}

    def text(self) -> str:
        """The whole plan as text: regions, operations in serial order, lanes with their waits."""
        return "\n".join(_lines(self)) + "\n"

    @cached_property
    def digest(self) -> str:
        """Hash of the plan's text, 16 hex digits, by which ranks check that they have the same plan."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return "\n".join(_lane_lines(self))

    def __repr__(self) -> str:
        on = f"{counted(len(self.graph), 'operation')} on {counted(len(self.lanes), 'lane')}"
        return f"Plan({on}, {counted(self.num_waits, 'wait')}: print it to read it)"

    def _repr_html_(self) -> str:
        return in_notebook("plan", self)


def check_is_plan(plan: Any, origin: str = "") -> None:
    """Raise PlanError unless `plan` is a Plan; `origin` says in the message where it comes from."""
    if isinstance(plan, Plan):
        return
    reason = ""
    if plan is None:
        reason = "; a function without return gives None"
    elif isinstance(plan, Graph):
        reason = "; a graph has no lanes"
    elif isinstance(plan, Iterator):
        reason = "; a function with yield gives a generator"
    lanes = f"the operations of each lane by their position in the graph{reason}"
    do = f"return zfunc.core.plan.build(graph, lanes), with {lanes}"
    refuse("schedule", f"{plan!r:.200}{origin}", "a Plan", do, PlanError)


def build(graph: Graph, lanes: Mapping[str, Iterable[int]]) -> Plan:
    """Put `graph` on `lanes` (name to positions of its operations, in order) and derive the waits.

    The waits are the conflicting pairs across lanes that lane order and other waits do not imply: a transitive
    reduction, with one vector clock an operation. Raises PlanError for an order that deadlocks, and for an
    operation that is on the lanes twice or not in the graph.

    >>> x = Region("x")
    >>> graph = Graph((Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,))))
    >>> print(build(graph, {"gpu": [0], "cpu": [1]}))
    lane gpu
      make
    lane cpu
      use  after make
    """
    if not isinstance(lanes, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"build: got {lanes!r:.200}, expected lanes by name: {{'gpu': positions, 'cpu': positions}}"
        )
    # 1. The lanes alone, without waits: each operation at most once.
    order = Plan(graph, tuple(Lane(name, ops) for name, ops in lanes.items()), ((),) * len(graph))
    for problem in lane_errors(order):
        raise PlanError(problem)
    # 2. The waits, in an order in which all that an operation depends on comes before it, on every lane: so the
    #    clocks that its waits are compared with are known. There is no such order exactly if the lanes deadlock.
    clocks: dict[int, Clock] = {}
    waits: list[tuple[int, ...]] = [()] * len(graph)
    last = _no_clocks(order)  # of each lane's operation before
    for op in topological_order(order, graph.predecessors):
        lane, position = order.place[op]
        waits[op] = _waits_of(op, last[lane], clocks, order)
        # 3. What is known when it ends: all that was known before it, what it waited for, and itself.
        clocks[op] = last[lane] = _tick(last[lane], lane, position, waits[op], clocks)
    plan = Plan(graph, order.lanes, tuple(waits))
    # Lanes and waits alone decide these, so the plan's are not computed again.
    object.__setattr__(plan, "place", order.place)
    object.__setattr__(plan, "clocks", clocks)
    return plan


def project(plan: Plan, stage: int | None) -> Plan:
    """The part of `plan`, made for all pipeline stages, that a rank of stage `stage` executes: the stage's
    operations, in order, and the joint operations, which all ranks execute together. If `stage` is None,
    `plan` itself.

    The waits of the part are derived anew, because a wait may have been implied by one on another rank. Where
    `plan` has no deadlock, the ranks have none, as a receive waits for its send. Joint operations and the
    stage's messages are on one lane, in an order that `plan` allows, so computation does not wait for them.
    """
    if stage is None:
        return plan
    if shared := [lane.name for lane in plan.lanes if lane.thread != lane.name]:
        raise PlanError(
            f"got lanes of pipeline stages on threads of others ({', '.join(shared)}), expected a thread for each: "
            "ranks, each of which merges its own lanes, could wait for each other. Use a schedule without"
        )
    here = {r: evolve(r, device=0, of_rank=False) for r in plan.graph.regions}

    def own(regions: tuple[Region, ...], *, joint: bool) -> list[Region]:
        return [here[r] for r in regions if not joint or r.device in (stage, EVERY)]

    ops, number = list[Op](), dict[int, int]()
    for i, op in enumerate(plan.graph):
        if op.joint or op.device == stage:
            number[i] = len(ops)
            ops.append(evolve(op, reads=own(op.reads, joint=op.joint), writes=own(op.writes, joint=op.joint)))
    lanes = {lane.name: [i for i in lane.ops if i in number] for lane in plan.lanes}
    network = [x for x, own in lanes.items() if own and all(plan.graph.ops[i].kind == "network" for i in own)]
    if network[1:]:
        together = {i for x in network for i in lanes.pop(x)}
        order = topological_order(plan, plan.graph.predecessors)
        lanes[network[0]] = [i for i in order if i in together]
    used = {name: [number[i] for i in own] for name, own in lanes.items() if own}
    return build(Graph(tuple(ops)), used or dict(list(lanes.items())[:1]))


def lane_errors(plan: Plan) -> Iterator[str]:
    """Yield a text for each mistake in the lanes of `plan`: an operation that the graph does not have, an
    operation on lanes twice, two lanes of one name."""
    expected = "expected every operation of the graph once"
    times = Counter(op for lane in plan.lanes for op in lane.ops)
    for i in sorted(times.keys() - range(len(plan.graph))):
        names = ", ".join(lane.name for lane in plan.lanes if i in lane.ops)
        yield (
            f"got operation number {i} on a lane ({names}), {expected}. Correct the schedule's lanes: the "
            f"graph has operations 0 to {len(plan.graph) - 1}"
        )
    for i, op in enumerate(plan.graph):
        if times[i] > 1:
            on = " and ".join(lane.name for lane in plan.lanes for x in lane.ops if x == i)
            writes = ", ".join(map(str, op.writes)) or "nothing"
            yield (
                f"{op.name}: got it on the lanes {times[i]} times, {expected}. Correct the schedule's lanes: leave "
                f"it on one of {on}, or it writes {writes} again:\n{plan_excerpt(plan, [i])}"
            )
    for name, count in Counter(lane.name for lane in plan.lanes).items():
        if count > 1:
            yield f"got {count} lanes named {name}, expected unique names: a lane is one thread or stream"


def topological_order(plan: Plan, needs: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the numbers of all operations of `plan` in an order that keeps each lane's order and puts each
    operation `op` after all of `needs[op]`.

    Raises PlanError, naming the operations that wait for each other, if there is no such order.
    """
    place = plan.place
    in_order = all(a < b for lane in plan.lanes for a, b in pairwise(lane.ops))
    if in_order and all(n < op for op in place for n in needs[op]):
        yield from sorted(place)  # the usual case, and fast
        return
    pending: dict[int, int] = {}
    unlocks: dict[int, list[int]] = {op: [] for op in place}
    for op, (lane, p) in place.items():
        before = [n for n in needs[op] if n in unlocks]
        if p > 0:
            before.append(plan.lanes[lane].ops[p - 1])
        pending[op] = len(before)
        for n in before:
            unlocks[n].append(op)
    ready = [op for op in reversed(place) if pending[op] == 0]
    while ready:
        op = ready.pop()
        del pending[op]
        yield op
        for after in unlocks[op]:
            pending[after] -= 1
            if pending[after] == 0:
                ready.append(after)
    if pending:
        raise PlanError(_deadlock(plan, needs, pending))


def _waits_of(op: int, known: Clock, clocks: Mapping[int, Clock], order: Plan) -> tuple[int, ...]:
    """The operations on other lanes that `op` has to wait for: its dependencies, in the lanes of plan
    `order`, less those that lane order or another of these waits implies.

    `known` is the vector clock of the operation before `op` on its lane, `clocks` those of all earlier
    operations.
    """
    place = order.place
    # Of each lane the position of the last operation that is needed and not known to be done. Earlier ones there
    # are done with it, and its own lane's are known.
    latest: dict[int, int] = {}
    for n in order.graph.predecessors[op]:
        if n in place:
            other, p = place[n]
            if p > known[other] and p > latest.get(other, -1):
                latest[other] = p
    needed = {other: order.lanes[other].ops[p] for other, p in sorted(latest.items())}
    if len(needed) < 2:
        return tuple(needed.values())
    # Two of these cannot imply each other, so dropping every implied one at once is safe.
    return tuple(
        n
        for other, n in needed.items()
        if not any(clocks[m][other] >= latest[other] for m in needed.values() if m != n)
    )


def _no_clocks(plan: Plan) -> list[Clock]:
    """For each lane of `plan`, the vector clock before the lane's first operation."""
    return [(-1,) * len(plan.lanes)] * len(plan.lanes)


def _tick(
    before: Clock, lane: int, position: int, waits: Sequence[int], clocks: Mapping[int, Clock]
) -> Clock:
    """The vector clock of the operation at `position` of `lane`: the clock `before` it on its lane, joined
    with the `clocks` of the operations that it `waits` for, and advanced by itself."""
    for n in waits:
        if n in clocks:
            before = tuple(map(max, before, clocks[n]))
    return (*before[:lane], position, *before[lane + 1 :])


def _deadlock(plan: Plan, needs: Sequence[Sequence[int]], pending: Mapping[int, int]) -> str:
    """The error text for a deadlock: a cycle of `pending` operations in which each has to follow the next, by
    lane order or because of `needs`."""
    op = next(iter(pending))
    path: list[int] = []
    while op not in path:
        path.append(op)
        lane, p = plan.place[op]
        behind = [n for n in needs[op] if n in pending]
        op = behind[0] if behind else plan.lanes[lane].ops[p - 1]
    cycle = [*path[path.index(op) :], op]
    names = " waits for ".join(plan.graph.ops[i].name for i in cycle)
    why = "; ".join(_why(plan, a, b, waits=b in needs[a]) for a, b in pairwise(cycle))
    return (
        f"deadlock: {names}. Got an order in which none of these can be first ({why}), expected every operation "
        f"after those it depends on. Move one of them on its lane:\n{plan_excerpt(plan, cycle)}"
    )


def _why(plan: Plan, op: int, behind: int, *, waits: bool) -> str:
    """Text on why `op` must follow operation `behind`: a wait over a region (`waits`), or lane order."""
    name, before = plan.graph.ops[op].name, plan.graph.ops[behind].name
    lane, other = (plan.lanes[plan.place[i][0]].name for i in (op, behind))
    if not waits:
        return f"{name} is after {before} on lane {lane}"
    regions = (c.region for c in plan.graph.conflicts if (c.before, c.after) == (behind, op))
    reason = next((f" because of {r}" for r in regions), "")
    return f"{name} (lane {lane}) waits for {before} (lane {other}){reason}"


def plan_excerpt(plan: Plan, ops: Iterable[int]) -> str:
    """The lanes of `plan` as text with "->" before the operations `ops`, cut to the lines near them."""
    names = {f"  {plan.graph.ops[i].name}" for i in ops}
    lines = [("->" if line.split("  after ")[0] in names else "  ") + line for line in _lane_lines(plan)]
    if len(lines) <= 60:
        return "\n".join(lines)
    hits = [i for i, line in enumerate(lines) if line.startswith("->")]
    near = [i for i, line in enumerate(lines) if "  lane " in line or any(abs(i - h) <= 2 for h in hits)]
    shown: list[str] = []
    for i, previous in zip(near, [-1, *near], strict=False):
        shown += [*(["    ..."] if i > previous + 1 else []), lines[i]]
    return "\n".join(shown)


def _lane_lines(plan: Plan) -> Iterator[str]:
    names = [op.name for op in plan.graph.ops]
    for lane in plan.lanes:
        yield f"lane {lane.name}" + (f" thread {lane.thread}" if lane.thread != lane.name else "")
        for i in lane.ops:
            after = " ".join(names[n] for n in plan.waits[i])
            yield f"  {names[i]}  after {after}" if after else f"  {names[i]}"


def _lines(plan: Plan) -> Iterator[str]:
    yield "zfunc plan 1"
    for r in plan.graph.regions:
        shown = r.lifetime == "program" or r.role == "grad_shard"  # the settings determine all other dtypes
        kept = [*(["kept"] if r.kept else []), *([str(r.dtype)] if r.dtype and shown else [])]
        yield " ".join(["region", str(r), str(r.nbytes), r.place, *kept])
    for op in plan.graph.ops:
        work = [f"{k}={v}" for k in WORKS if (v := getattr(op, k))]
        yield " ".join(["op", op.name, op.kind, *work, ":", *map(str, op.reads), "->", *map(str, op.writes)])
    yield from _lane_lines(plan)


def parse(text: str) -> Plan:
    """The plan that `Plan.text` printed. Raises ValueError, with the line, for any other text.

    >>> plan = build(Graph((Op("make", (), "compute", writes=(Region("x"),)),)), {"gpu": [0]})
    >>> parse(plan.text()) == plan
    True
    """
    regions: dict[str, Region] = {}
    ops: list[Op] = []
    position: dict[str, int] = {}
    lanes: list[tuple[str, list[int], str]] = []
    waits: dict[int, tuple[int, ...]] = {}

    def region(words: list[str]) -> None:
        name, nbytes, tier, *rest = words
        kept, dtype = rest[:1] == ["kept"], rest[1:] or [None]
        lifetime = "operation" if not kept else "program" if rest[1:] else "value"
        tier, at, stage = tier.partition("@")
        tier, _, device = tier.partition(":")
        own = int(nbytes), _any(tier), lifetime, _any(*dtype)
        regions[name] = Region(*_split(name), *own, device=int(stage or device or 0), of_rank=bool(at))

    def op(words: list[str]) -> None:
        colon, arrow = words.index(":"), words.index("->")
        verb, index = _split(words[0])
        work = {k: int(v) for k, v in (word.split("=") for word in words[2:colon])}
        reads = tuple(regions[w] for w in words[colon + 1 : arrow])
        writes = tuple(regions[w] for w in words[arrow + 1 :])
        position[words[0]] = len(ops)
        ops.append(Op(verb, index, _any(words[1]), reads, writes, **work))

    def lane(words: list[str]) -> None:
        lanes.append((words[0], [], words[2] if words[1:2] == ["thread"] else words[0]))

    def step(words: list[str]) -> None:
        i = position[words[0]]
        lanes[-1][1].append(i)
        waits[i] = tuple(position[name] for name in words[2:])

    readers: dict[str, Callable[[list[str]], None]] = {"region": region, "op": op, "lane": lane}
    first, *lines = text.splitlines() or [""]
    if first != "zfunc plan 1":
        raise ValueError(f"got {first!r} as the first line, expected 'zfunc plan 1': pass the text of a plan")
    for number, line in enumerate(lines, start=2):
        word, *rest = line.split() or [""]
        try:
            step([word, *rest]) if line.startswith("  ") else readers[word](rest)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise ValueError(f"line {number} of the plan cannot be read: {line!r} ({error!r})") from error
    graph = Graph(tuple(ops))
    return Plan(
        graph,
        tuple(Lane(*lane) for lane in lanes),
        tuple(waits.get(i, ()) for i in range(len(ops))),
    )


def _split(name: str) -> tuple[str, tuple[int, ...]]:
    buffer, _, index = name.rstrip("]").partition("[")
    return buffer, tuple(int(i) for i in index.split(",") if i)


def _any(value: object) -> Any:
    """`value` itself: an attrs converter for a field that has a validator."""
    return value
