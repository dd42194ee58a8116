"""The law of `verify`, on every small graph and plan: it accepts what ends as the serial order does, in any timing.

The witness shares no code with zfunc. It lists every interleaving that lanes and waits allow, and executes each on
symbols: what an operation writes is its number with all that it read. A run *ends as the serial one* if every
operation reads the same, and every region has the same content at the end. It *keeps versions* if every write
also finds the content that it finds serially: a write may leave a part of its region as it was.

- `verify` accepts a plan exactly if it has an interleaving, and all of them keep versions.
- So what it accepts ends as the serial order does. What it refuses though that ends so, too, has races at writes
  alone, of a region that their operation does not read: results that nobody reads change places, or whole lifetimes
  of a slot do. In a graph without such writes there is no such plan.

Complete up to names of lanes and regions, in two steps: all plans on the one graph in which every two operations
conflict, up to 4 operations; then all graphs, of 3 operations and 2 regions and of 4 and 1, at night of 4 and 2, on
one plan of each set of interleavings. Left out are all of 5 operations (a million of 5 and 6 are drawn at night)
and waits within a lane beyond 3 operations. Operations are atomic here; docs/proof.md has those that overlap.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, combinations_with_replacement, permutations, product
from random import Random

import pytest

from zfunc.core.graph import Graph, Lifetime, Op, Region
from zfunc.core.plan import Lane, Plan
from zfunc.core.verifier import races, verify
from zfunc.errors import PlanError

Accesses = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], ...
]  # of each operation: regions read, regions written
Lanes = tuple[tuple[int, ...], ...]
Waits = tuple[tuple[int, ...], ...]
Terms = dict[int, object]
READS, WRITES = 1, 2  # of one region, or the sum
lane = cache(Lane)


# --- the witness -----------------------------------------------------------------------------------------


def interleavings(lanes: Lanes, waits: Waits, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every order in which the operations can run; none on a deadlock."""
    if len(done) == len(waits):
        yield done
    for lane in lanes:
        following = next((i for i in lane if i not in done), None)
        if following is not None and all(n in done for n in waits[following]):
            yield from interleavings(lanes, waits, (*done, following))


def run(accesses: Accesses, order: Iterable[int]) -> tuple[tuple[Terms, Terms], Terms]:
    """What operations read and memory at the end; and what their writes found."""
    memory, read, found = Terms(), Terms(), Terms()
    for i in order:
        reads, writes = accesses[i]
        read[i], found[i] = [memory.get(r) for r in reads], [memory.get(r) for r in writes]
        memory |= dict.fromkeys(writes, (i, read[i]))
    return (read, memory), found


def judged(accesses: Accesses, orders: Iterable[tuple[int, ...]]) -> tuple[list[bool], list[bool]]:
    """Of each order whether it ends as the serial one, and whether it keeps versions as well."""
    end, found = run(accesses, range(len(accesses)))
    runs = [run(accesses, order) for order in orders]
    return [x == end for x, _ in runs], [x == end and y == found for x, y in runs]


# --- all graphs and plans --------------------------------------------------------------------------------


def accesses_of(table: Iterable[Sequence[int]]) -> Accesses:
    """From READS and WRITES of each operation and region."""
    return tuple(
        (tuple(r for r, x in enumerate(row) if x & READS), tuple(r for r, x in enumerate(row) if x & WRITES))
        for row in table
    )


def all_graphs(ops: int, regions: int) -> Iterator[Accesses]:
    """Up to names of regions."""
    for columns in combinations_with_replacement(product(range(4), repeat=ops), regions):
        yield accesses_of(zip(*columns, strict=True))


def all_lanes(ops: int) -> Iterator[Lanes]:
    """Up to three lanes, up to their names."""
    for order, num in product(permutations(range(ops)), range(1, min(ops, 3) + 1)):
        for cuts in combinations(range(1, ops), num - 1):
            lanes = tuple(order[a:b] for a, b in zip((0, *cuts), (*cuts, ops), strict=True))
            if lanes == tuple(sorted(lanes)):
                yield lanes


def all_plans(ops: int) -> Iterator[tuple[Lanes, Waits]]:
    for lanes in all_lanes(ops):
        on = {i: n for n, lane in enumerate(lanes) for i in lane}
        pairs = [(a, b) for a, b in permutations(range(ops), 2) if ops <= 3 or on[a] != on[b]]
        for chosen in product((False, True), repeat=len(pairs)):
            waits: list[list[int]] = [[] for _ in range(ops)]
            for (before, after), wanted in zip(pairs, chosen, strict=True):
                if wanted:
                    waits[after].append(before)
            yield lanes, tuple(map(tuple, waits))


def graph_of(accesses: Accesses, lifetime: Lifetime = "value") -> Graph:
    region = [Region("r", (n,), lifetime=lifetime) for n in range(10)]
    return Graph(
        tuple(
            Op("op", (i,), "compute", tuple(region[r] for r in reads), tuple(region[w] for w in writes))
            for i, (reads, writes) in enumerate(accesses)
        )
    )


def plan_of(graph: Graph, lanes: Lanes, waits: Waits) -> Plan:
    return Plan(graph, tuple(lane(f"lane{n}", ops) for n, ops in enumerate(lanes)), waits)


def accepted(plan: Plan) -> bool:
    try:
        return verify(plan) is plan
    except PlanError:
        return False


def check_strictness(plan: Plan) -> None:
    """A plan that is refused though it ends as the serial order does: the races are at writes without a read."""
    for race in races(plan):
        op = plan.graph.ops[race.after]
        assert race.region in op.writes
        assert race.region not in op.reads


NIGHT = pytest.mark.slow


@pytest.mark.parametrize(("ops", "plans"), [(1, 1), (2, 12), (3, 832), (4, 16_920)])
def test_races_are_the_pairs_that_some_interleaving_of_a_plan_has_in_another_order(
    ops: int, plans: int
) -> None:
    """Each two operations write a region of their own, so that every pair is asked for."""
    pairs = list(combinations(range(ops), 2))
    graph = graph_of(tuple(((), tuple(n for n, pair in enumerate(pairs) if i in pair)) for i in range(ops)))
    count = 0
    for lanes, waits in all_plans(ops):
        plan = plan_of(graph, lanes, waits)
        orders = list(interleavings(lanes, waits))
        count += 1
        if not orders:
            with pytest.raises(PlanError, match="deadlock"):
                verify(plan)
            continue
        swapped = {(a, b) for a, b in pairs if any(o.index(b) < o.index(a) for o in orders)}
        assert {(race.before, race.after) for race in races(plan)} == swapped
    assert count == plans


# Operations, regions; then how many graphs there are, and how many sets of interleavings; of their pairs, how many
# are accepted, and how many are refused though they end as the serial order does.
BOUNDS = [
    (1, 3, 20, 1, 20, 0),
    (2, 3, 816, 3, 1_056, 0),
    (3, 2, 2_080, 19, 6_698, 66),
    (4, 1, 256, 218, 9_976, 118),
    pytest.param(4, 2, 32_896, 218, 309_096, 8_603, marks=NIGHT),
]


@pytest.mark.parametrize(("ops", "regions", "graphs", "plans", "right", "stricter"), BOUNDS)
def test_verify_accepts_exactly_what_keeps_versions_in_every_interleaving(
    ops: int, regions: int, graphs: int, plans: int, right: int, stricter: int
) -> None:
    number = {order: n for n, order in enumerate(permutations(range(ops)))}
    sets: dict[int, tuple[Lanes, Waits]] = {}  # the first plan of each set of interleavings, as a sum of bits
    for lanes, waits in all_plans(ops):
        if orders := sum(1 << number[order] for order in interleavings(lanes, waits)):
            sets.setdefault(orders, (lanes, waits))
    counts = [0, len(sets), 0, 0]
    for accesses in all_graphs(ops, regions):
        graph = graph_of(accesses)
        # The orders that are wrong, as a sum of bits.
        ends, keeps = (sum(1 << n for n, x in enumerate(y) if not x) for y in judged(accesses, number))
        counts[0] += 1
        for orders, (lanes, waits) in sets.items():
            plan = plan_of(graph, lanes, waits)
            verdict = accepted(plan)
            assert verdict == (not orders & keeps), str(plan)
            counts[2] += verdict
            if not verdict and not orders & ends:
                check_strictness(plan)
                counts[3] += 1
    assert counts == [graphs, plans, right, stricter]


@pytest.mark.parametrize(("ops", "regions"), [(2, 3), (4, 1)])
def test_a_graph_may_read_before_it_writes_only_what_has_a_value_before(ops: int, regions: int) -> None:
    serial = (tuple(range(ops)),), ((),) * ops
    for accesses in all_graphs(ops, regions):
        (read, _), _ = run(accesses, range(ops))
        undefined = "None" in str(read)
        assert accepted(plan_of(graph_of(accesses, "operation"), *serial)) == (not undefined)
        assert accepted(plan_of(graph_of(accesses), *serial))


@pytest.mark.parametrize("number", [1_000, pytest.param(1_000_000, marks=NIGHT)])
def test_random_larger_ones(number: int) -> None:
    """Of up to 6 operations, 4 regions and 4 lanes; half of the plans keep nearly all that the graph asks for."""
    random, verdicts, stricter = Random(number), [0, 0], 0
    for _ in range(number):
        ops, regions = random.randint(5, 6), random.randint(2, 4)
        weights = [random.randint(1, 8), *random.choices(range(4), k=3)]
        accesses = accesses_of(random.choices(range(4), weights, k=regions) for _ in range(ops))
        order = random.sample(range(ops), ops) if random.random() < 0.3 else list(range(ops))
        on = [random.randrange(4) for _ in range(ops)]
        lanes = tuple(tuple(i for i in order if on[i] == n) for n in range(4))
        density = random.choice([0.2, 0.5, 0.9])
        waits = tuple(
            tuple(n for n in order[: order.index(i)] if random.random() < density) for i in range(ops)
        )
        if random.random() < 0.1:
            waits = (*waits[:-1], (*waits[-1], random.randrange(ops)))
        plan = plan_of(graph_of(accesses), lanes, waits)
        orders = list(interleavings(lanes, waits))
        ends, keeps = judged(accesses, orders)
        verdict = accepted(plan)
        assert verdict == (bool(orders) and all(keeps)), plan.text()
        verdicts[verdict] += 1
        if orders and all(ends) and not verdict:
            check_strictness(plan)
            stricter += 1
    assert min(*verdicts, 100 * stricter) > number // 10, (verdicts, stricter)
