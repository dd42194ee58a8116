"""The law of `verify`, on every small graph and plan: it accepts what ends as the serial order does, in any timing.

The witness shares no code with zfunc. It lists every interleaving that lanes and waits allow, and executes each on
symbols: what an operation writes is its number with all that it read. A run *ends as the serial one* if every
operation reads the same, and every region has the same content at the end. It *keeps versions* if every write
also finds the content that it finds serially: a write may leave a part of its region as it was.

- `verify` accepts a plan exactly if it has an interleaving, and all of them keep versions.
- So what it accepts ends as the serial order does. What it refuses though that ends so, too, has races at writes
  alone, of a region that their operation does not read: results that nobody reads change places, or whole lifetimes
  of a slot do. In a graph without such writes there is no such plan.

Complete for up to 5 operations, 3 regions and 3 lanes, in three steps. (1) Every plan, on the graph in which each
two operations conflict: `races` gives the pairs that some interleaving swaps. So plans with the same interleavings
have the same races, and one plan stands for each set of them. (2) Every graph of one region on all these sets. (3)
More regions. Content is judged region by region: the first operation that reads something else does so in some
region. And a conflict is over one region, so `verify` refuses for a graph what it refuses for one of its regions.
So what is right for each region is right for all 4^15 graphs.

What these steps leave out is asked again without them: `verify` itself for each pair of a smaller graph and plan,
other names of lanes, several regions together for smaller graphs, and at night, in parts, the conflicts of each
graph of 5 operations and 3 regions, up to names of regions. Waits within a lane are only up to 3 operations: a plan
has none. Operations are atomic here; docs/proof.md has those that overlap.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, combinations_with_replacement, pairwise, permutations, product
from random import Random
from typing import NamedTuple

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
Pair = tuple[int, int]
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


@cache
def numbers(ops: int) -> dict[tuple[int, ...], int]:
    """Each order of the operations with its number; the serial one is 0. A set of orders is a sum of bits."""
    return {order: n for n, order in enumerate(permutations(range(ops)))}


@cache
def having(ops: int) -> dict[Pair, int]:
    """For each two operations the set of orders that have the first before the second."""
    return {
        (a, b): sum(1 << n for order, n in numbers(ops).items() if order.index(a) < order.index(b))
        for a, b in permutations(range(ops), 2)
    }


def set_of_interleavings(lanes: Lanes, waits: Waits) -> int:
    """The orders that have what lanes and waits ask for: faster than to list them, a law holds it to that."""
    ops = len(waits)
    asked = [
        *(pair for lane in lanes for pair in pairwise(lane)),
        *((n, i) for i in range(ops) for n in waits[i]),
    ]
    orders = (1 << len(numbers(ops))) - 1
    for pair in asked:
        orders &= having(ops)[pair]
    return orders


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


def all_graphs(ops: int, regions: int) -> Iterator[tuple[Accesses, int]]:
    """Up to names of regions; each with how many graphs are the same but for these."""
    for columns in combinations_with_replacement(product(range(4), repeat=ops), regions):
        yield accesses_of(zip(*columns, strict=True)), len({*permutations(columns)})


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


@cache
def plans_by_interleavings(ops: int) -> dict[int, tuple[Lanes, Waits]]:
    """A plan for each set of interleavings: those that lanes alone allow, cut by one wait after another."""
    found: dict[int, tuple[Lanes, Waits]] = {
        set_of_interleavings(lanes, ((),) * ops): (lanes, ((),) * ops) for lanes in all_lanes(ops)
    }
    new = [*found]
    while new:
        orders = new.pop()
        lanes, waits = found[orders]
        for (before, after), kept in having(ops).items():
            if (cut := orders & kept) and cut not in found:
                found[cut] = lanes, (*waits[:after], (*waits[after], before), *waits[after + 1 :])
                new.append(cut)
    return found


@cache
def op_of(i: int, reads: tuple[int, ...], writes: tuple[int, ...], lifetime: Lifetime = "value") -> Op:
    region = [Region("r", (n,), lifetime=lifetime) for n in range(10)]
    return Op("op", (i,), "compute", tuple(region[r] for r in reads), tuple(region[w] for w in writes))


def graph_of(accesses: Accesses, lifetime: Lifetime = "value") -> Graph:
    return Graph(tuple(op_of(i, reads, writes, lifetime) for i, (reads, writes) in enumerate(accesses)))


def crossed(ops: int) -> Graph:
    """Each two operations write a region of their own, so that every pair is asked for."""
    pairs = [*combinations(range(ops), 2)]
    return graph_of(tuple(((), tuple(n for n, pair in enumerate(pairs) if i in pair)) for i in range(ops)))


def plan_of(graph: Graph, lanes: Lanes, waits: Waits) -> Plan:
    return Plan(graph, tuple(lane(f"lane{n}", ops) for n, ops in enumerate(lanes)), waits)


def accepted(plan: Plan) -> bool:
    try:
        return verify(plan) is plan
    except PlanError:
        return False


def pairs_that_race(plan: Plan) -> set[Pair] | None:
    """None for a deadlock."""
    try:
        return {(race.before, race.after) for race in races(plan)}
    except PlanError as error:
        if "deadlock" not in str(error):
            raise
        return None


def check_strictness(plan: Plan) -> None:
    """A plan that is refused though it ends as the serial order does: the races are at writes without a read."""
    for race in races(plan):
        op = plan.graph.ops[race.after]
        assert race.region in op.writes
        assert race.region not in op.reads


NIGHT = pytest.mark.slow


@pytest.mark.parametrize(
    ("ops", "plans"), [(1, 1), (2, 12), (3, 832), (4, 16_920), pytest.param(5, 5_437_560, marks=NIGHT)]
)
def test_races_are_the_pairs_that_some_interleaving_of_a_plan_has_in_another_order(
    ops: int, plans: int
) -> None:
    graph, sets, count = crossed(ops), set[int](), 0
    swapped = {(a, b): orders for (b, a), orders in having(ops).items() if a < b}
    for lanes, waits in all_plans(ops):
        orders = set_of_interleavings(lanes, waits)
        if ops < 5:
            assert orders == sum(1 << numbers(ops)[order] for order in {*interleavings(lanes, waits)})
        count += 1
        found = pairs_that_race(plan_of(graph, lanes, waits))
        if not orders:
            assert found is None
            continue
        assert found == {pair for pair, those in swapped.items() if orders & those}
        sets.add(orders)
    assert count == plans
    assert sets == {*plans_by_interleavings(ops)}


@pytest.mark.parametrize("ops", [2, 3])
def test_other_names_of_lanes_and_empty_ones_change_nothing(ops: int) -> None:
    graph = crossed(ops)
    for lanes, waits in all_plans(ops):
        races = pairs_that_race(plan_of(graph, lanes, waits))
        for renamed in permutations((*lanes, *((),) * (3 - len(lanes)))):
            assert pairs_that_race(plan_of(graph, renamed, waits)) == races


# Operations, regions; then how many graphs there are, and how many sets of interleavings; of their pairs, how many
# are accepted, and how many are refused though they end as the serial order does.
BOUNDS = [
    (1, 3, 64, 1, 64, 0),
    (2, 3, 4_096, 3, 5_120, 0),
    (3, 2, 4_096, 19, 12_952, 130),
    (4, 1, 256, 218, 9_976, 118),
    pytest.param(4, 2, 65_536, 218, 608_216, 17_088, marks=NIGHT),
    pytest.param(5, 1, 1_024, 4_100, 345_826, 6_990, marks=NIGHT),
]
LARGER = [
    (3, 3, 262_144, 19, 486_960, 6_338),
    (4, 3, 16_777_216, 218, 55_109_968, 2_161_054),
    (5, 3, 1_073_741_824, 4_100, 7_535_182_072, 575_082_078),
]


@pytest.mark.parametrize(("ops", "regions", "graphs", "plans", "right", "stricter"), BOUNDS)
def test_verify_accepts_exactly_what_keeps_versions_in_every_interleaving(
    ops: int, regions: int, graphs: int, plans: int, right: int, stricter: int
) -> None:
    sets = plans_by_interleavings(ops)
    counts = [0, len(sets), 0, 0]
    for accesses, names in all_graphs(ops, regions):
        graph = graph_of(accesses)
        # The orders that are wrong, as a sum of bits.
        ends, keeps = (sum(1 << n for n, x in enumerate(y) if not x) for y in judged(accesses, numbers(ops)))
        counts[0] += names
        for orders, (lanes, waits) in sets.items():
            plan = plan_of(graph, lanes, waits)
            verdict = accepted(plan)
            assert verdict == (not orders & keeps), str(plan)
            counts[2] += verdict * names
            if not verdict and not orders & ends:
                check_strictness(plan)
                counts[3] += names
    assert counts == [graphs, plans, right, stricter]


def any_of(sets: Iterable[int]) -> int:
    whole = 0
    for some in sets:
        whole |= some
    return whole


class Wrong(NamedTuple):
    """Plans of a graph that are wrong: of all sets of interleavings by number, sums of bits."""

    refused: int  # `verify` finds a race
    not_strict: int  # one that is not at a write without a read
    ends: int  # some interleaving does not end as the serial order
    keeps: int  # or does not keep versions


@cache
def swapping(ops: int) -> dict[Pair, int]:
    """For each two operations the sets of interleavings that swap them, says `races`."""
    graph, found = crossed(ops), dict.fromkeys(combinations(range(ops), 2), 0)
    for n, (lanes, waits) in enumerate(plans_by_interleavings(ops).values()):
        for pair in pairs_that_race(plan_of(graph, lanes, waits)) or ():
            found[pair] += 1 << n
    return found


@cache
def holding(ops: int) -> list[int]:
    """For each order the sets of interleavings that it is in."""
    sets = [*plans_by_interleavings(ops)]
    return [sum(1 << n for n, orders in enumerate(sets) if orders >> k & 1) for k in numbers(ops).values()]


def wrong(accesses: Accesses) -> Wrong:
    ops = len(accesses)
    refused = not_strict = 0
    for before, after, region in graph_of(accesses).conflicts:
        refused |= swapping(ops)[before, after]
        reads, writes = accesses[after]
        if region.index[0] in reads or region.index[0] not in writes:
            not_strict |= swapping(ops)[before, after]
    ends, keeps = (
        any_of(x for x, right in zip(holding(ops), y, strict=True) if not right)
        for y in judged(accesses, numbers(ops))
    )
    return Wrong(refused, not_strict, ends, keeps)


@cache
def wrong_of_regions(ops: int) -> list[Wrong]:
    """For each graph of one region."""
    return [wrong(accesses_of(zip(column))) for column in product(range(4), repeat=ops)]


@pytest.mark.parametrize(
    ("ops", "regions"), [(2, 3), (3, 2), *(pytest.param(*x, marks=NIGHT) for x in [(3, 3), (4, 2)])]
)
def test_a_graph_is_judged_region_by_region(ops: int, regions: int) -> None:
    columns = [*zip(product(range(4), repeat=ops), wrong_of_regions(ops), strict=True)]
    for chosen in product(columns, repeat=regions):
        accesses = accesses_of(zip(*(column for column, _ in chosen), strict=True))
        assert wrong(accesses) == (*map(any_of, zip(*(x for _, x in chosen), strict=True)),), accesses


@pytest.mark.parametrize(("ops", "regions", "graphs", "plans", "right", "stricter"), [*BOUNDS, *LARGER])
def test_verify_accepts_exactly_what_keeps_versions_for_all_graphs_by_region(
    ops: int, regions: int, graphs: int, plans: int, right: int, stricter: int
) -> None:
    """What holds for each region holds for each graph, as a plan is wrong if it is for one region. Graphs with the
    same wrong plans are counted together."""
    count = Counter((x.refused, x.ends) for x in wrong_of_regions(ops))
    for x in wrong_of_regions(ops):
        assert x.refused == x.keeps
        assert x.not_strict & ~x.ends == 0
    together = Counter({(0, 0): 1})
    for _ in range(regions):
        more = Counter[Pair]()
        for (refused, ends), n in together.items():
            for (also, too), m in count.items():
                more[refused | also, ends | too] += n * m
        together = more
    sets = len(plans_by_interleavings(ops))
    found = [
        together.total(),
        sets,
        sum(n * (sets - refused.bit_count()) for (refused, _), n in together.items()),
        sum(n * (refused & ~ends).bit_count() for (refused, ends), n in together.items()),
    ]
    assert found == [graphs, plans, right, stricter]


PARTS = 64


@pytest.mark.parametrize(
    ("ops", "regions", "part", "parts"),
    [(5, 2, 0, 100), *(pytest.param(5, 3, part, PARTS, marks=NIGHT) for part in range(PARTS))],
)
def test_conflicts_of_a_graph_refuse_what_is_wrong_for_its_regions(
    ops: int, regions: int, part: int, parts: int
) -> None:
    """Each graph up to names of regions, its own conflicts against the witness on all sets of interleavings."""
    columns = [*zip(product(range(4), repeat=ops), (x.keeps for x in wrong_of_regions(ops)), strict=True)]
    swaps = swapping(ops)

    @cache
    def op(i: int, row: tuple[int, ...]) -> Op:
        return op_of(i, *accesses_of([row])[0])

    for number, some in enumerate(combinations_with_replacement(range(len(columns)), regions - 1)):
        if number % parts != part:
            continue
        tables, keeps = zip(*(columns[n] for n in some), strict=True)
        known = any_of(keeps)
        for table, wrong in columns[some[-1] :]:
            refused = 0
            for before, after, _ in Graph(
                tuple(map(op, range(ops), zip(*tables, table, strict=True)))
            ).conflicts:
                refused |= swaps[before, after]
            assert refused == known | wrong, (*tables, table)


@pytest.mark.parametrize(("ops", "regions"), [(2, 3), (4, 1)])
def test_a_graph_may_read_before_it_writes_only_what_has_a_value_before(ops: int, regions: int) -> None:
    serial = (tuple(range(ops)),), ((),) * ops
    for accesses, _ in all_graphs(ops, regions):
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
