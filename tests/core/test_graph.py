"""Laws of graphs and of recipes: what is derived is complete, and every recipe moves every gradient."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st
from table import RECIPES, SPECS, TRAINING, chain, changed, every_graph, graphs, spec, specs, waiting
from zfunc.schedules import Overlapped

from zfunc.core.decision import ops_unguarded_by_decision
from zfunc.core.dtypes import DTYPES
from zfunc.core.extents import BLOCK, whole_blocks
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.memory_model import peak_breakdown
from zfunc.core.optimizer_state import STATE_FORMATS, moment_buffers
from zfunc.core.region_table import left_bytes
from zfunc.core.regions import Regions
from zfunc.core.spec import SharedInput, StepSpec

Recipe = Callable[[StepSpec], Iterator[Op]]


def conflicting_pairs(graph: Graph) -> set[tuple[int, int]]:
    """By definition: two operations that touch a region which one of them writes."""
    reads, writes = [set(op.reads) for op in graph], [set(op.writes) for op in graph]
    return {
        (a, b)
        for b in range(len(graph))
        for a in range(b)
        if writes[a] & (reads[b] | writes[b]) or reads[a] & writes[b]
    }


def implied_pairs(graph: Graph) -> set[tuple[int, int]]:
    """All that follows from `graph.predecessors` by transitivity."""
    before: list[set[int]] = []
    for needs in graph.predecessors:
        before.append(set(needs).union(*(before[n] for n in needs)))
    return {(a, b) for b, known in enumerate(before) for a in known}


@st.composite
def scribbles(draw: st.DrawFn) -> Graph:
    """Operations that read and write five kept regions at random."""
    some = st.lists(
        st.sampled_from([Region("r", (n,), lifetime="value") for n in range(5)]), max_size=3, unique=True
    ).map(tuple)
    size = draw(st.integers(0, 14))
    return Graph(tuple(Op("op", (n,), "compute", draw(some), draw(some)) for n in range(size)))


@given(st.one_of(scribbles(), graphs()))
def test_derived_order_implies_every_conflict_and_adds_none(graph: Graph) -> None:
    pairs = conflicting_pairs(graph)
    assert pairs <= implied_pairs(graph)
    for c in graph.conflicts:
        assert (c.before, c.after) in pairs
        before, after = graph.ops[c.before], graph.ops[c.after]
        assert c.region in before.writes + after.writes
        assert c.region in before.regions
        assert c.region in after.regions


@given(st.one_of(scribbles(), graphs()))
def test_derived_order_is_linear_in_the_regions_touched(graph: Graph) -> None:
    assert len(set(graph.conflicts)) == len(graph.conflicts)
    assert len(graph.conflicts) <= sum(2 * len(op.reads) + len(op.writes) for op in graph)


def test_a_region_has_one_size_one_tier_and_one_lifetime() -> None:
    for other in (
        Region("x", nbytes=8),
        Region("x", nbytes=4, tier="host"),
        Region("x", nbytes=4, lifetime="value"),
        Region("x", nbytes=4, role="grad"),
    ):
        with pytest.raises(
            ValueError, match=r"b declares x as .* an earlier operation as .*: declare a region the same"
        ):
            Graph(
                (Op("a", (), "compute", (), (Region("x", nbytes=4),)), Op("b", (), "compute", (), (other,)))
            )


def test_a_region_is_its_buffer_and_index() -> None:
    assert Region("x", (1,), 4, "host") == Region("x", (1,), 8)
    assert Region("x", (1,)) != Region("x", (2,))
    assert str(Region("x", (1, 2))) == "x[1,2]"
    assert str(Region("x")) == "x"


def test_unknown_kinds_and_tiers_and_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        Op("a", (), "gpu")
    with pytest.raises(ValueError, match="tier"):
        Region("a", tier="gpu")
    with pytest.raises(ValueError, match="nbytes"):
        Region("a", nbytes=-1)
    with pytest.raises(ValueError, match="lifetime"):
        Region("a", lifetime="step")
    with pytest.raises(ValueError, match="role"):
        Region("a", role="gradient")
    for wrong in ({"dtype": "fp32"}, {"lifetime": "program"}, {"lifetime": "state", "dtype": "float"}):
        with pytest.raises(ValueError, match="a: got dtype"):
            Region("a", **wrong)


def test_an_operation_finds_its_regions_by_buffer_and_role() -> None:
    x, y = Region("x", (1,), role="grad"), Region("y")
    op = Op("f", (), "compute", (x, y), (y,))
    assert (op.read("x"), op.write("y"), op.regions) == (x, y, (x, y))
    assert (op.read("grad"), op.operands("grad")) == (x, (x,))
    assert op.touches("x")
    assert op.touches("grad")
    assert not op.touches("z")


# --- laws of every recipe; but for the first, of those that train ------------------------------------------

any_job = st.one_of(specs(), st.sampled_from([*SPECS.values()]))
PLAIN, DEFERRED = TRAINING["zero_offload"], TRAINING["deferred"]
UPDATES = ("update", "update_on_device")
BEGUN = ("momentum", "momentum_on_device")
PASSED_ON = (  # from one part of an update to the next
    *("host_direction", "direction_shard", "direction_slot", "param_slot"),
)
of_any_job = given(st.sampled_from([*TRAINING.values()]), any_job)
of_any_job_of_stage_2 = given(
    st.sampled_from([*TRAINING.values()]),
    any_job.map(lambda spec: changed(spec, stage=max(2, spec.settings.stage))),
)
of_any_job_of_stage_1 = given(
    st.sampled_from([*TRAINING.values()]),
    # Several devices that use the same weights have them from the host.
    any_job.filter(lambda spec: spec.settings.devices == 1 or spec.settings.params_on == "device").map(
        lambda spec: changed(
            spec, stage=1, order=spec.settings.order if spec.settings.stages > 1 else 1, params_on="device"
        )
    ),
)


@every_graph
def test_no_region_is_read_before_it_is_written_unless_it_is_kept(graph: Graph) -> None:
    written = {r for r in graph.regions if r.kept}
    for op in graph:
        assert set(op.reads) <= written, op.name
        written.update(op.writes)


@example(RECIPES["zero_offload"], SPECS["whole matrices, barrier"])  # of which drawn jobs have few
@of_any_job
def test_every_bucket_is_delivered_as_often_as_it_is_due_and_updated_once(
    recipe: Recipe, spec: StepSpec
) -> None:
    ops = list(recipe(spec))
    sent = Counter(op.index[1] for op in ops if op.verb == "to_host")
    held = Counter(op.index[1] for op in ops if op.verb == "hold")
    updates = (op for op in ops if op.verb in ("update_on_device", "momentum_on_device"))
    held += Counter(op.index[0] for op in updates if op.touches("grad_slot"))
    packed = Counter(op.index[:2] for op in ops if op.verb in ("pack", "add"))
    for b in spec.layout.buckets:
        due = 1 if spec.settings.stage == 1 else spec.settings.micro_batches * len(b.deliveries)
        assert due == spec.places[b.index].deliveries
        if spec.places[b.index].summed:
            assert (held[b.index], sent[b.index]) == (due, len(b.deliveries))
        else:
            assert held[b.index] + sent[b.index] == due
        for m in range(spec.settings.micro_batches):
            assert packed[m, b.index] == sum(map(len, b.deliveries))

    def done(*verbs: str) -> list[int]:
        return sorted(op.index[0] for op in ops if op.verb in verbs)

    everywhere = [b.index for b in spec.layout.buckets]
    assert done(*UPDATES) == everywhere
    assert done("to_device") == [
        b for b in spec.offloaded if not spec.places[b].staged and spec.places[b].params == "device"
    ]
    assert done("update_on_device") == [b for b in everywhere if spec.places[b].update == "device"]
    assert (
        done("state_to_device")
        == done("state_to_host")
        == [b for b in spec.offloaded if spec.places[b].staged]
    )
    assert done(*BEGUN) == done("orthogonalize") == [b for b in everywhere if spec.places[b].matrices]
    assert done("all_gather") == [b for b in everywhere if spec.world > 1 and not spec.places[b].streamed]


@of_any_job_of_stage_2
def test_a_slot_holds_one_bucket_from_its_first_pack_to_its_delivery(recipe: Recipe, spec: StepSpec) -> None:
    """Nothing else can see this: the slot is kept, so a lost gradient would be no race."""
    holds: dict[Region, tuple[int, ...]] = {}
    filled: dict[Region, list[int]] = {}
    for op in recipe(spec):
        if op.verb == "pack":
            m, b, s = op.index
            slot = op.write("grad_slot")
            if slot in op.reads:
                assert holds[slot] == (m, b), f"{op.name} adds to a slot of another bucket"
            else:
                assert slot not in holds, f"{op.name} overwrites {holds.get(slot)}"
                holds[slot], filled[slot] = (m, b), []
            filled[slot].append(s)
        elif op.touches("grad_slot"):
            slot = op.read("grad_slot")
            assert holds[slot][1] == op.index[len(op.index) > 1]
            place = (spec if recipe is PLAIN else waiting(spec)).places[holds[slot][1]]
            held = place.gradient == "device" or place.summed
            if op.verb == (_leaves(spec, recipe, place.index) if held else "to_host"):
                m, b = holds.pop(slot)
                d = op.index[2] if len(op.index) > 1 else 0
                assert op.index in ((m, b, d), (b,))
                assert tuple(filled.pop(slot)) == spec.layout.buckets[b].deliveries[d]
            elif op.verb == "hold":
                raise AssertionError(op.name)
    assert not holds


def _leaves(spec: StepSpec, recipe: Recipe, b: int) -> str:
    """The verb with which the gradient of a bucket that is updated on the device leaves its slot."""
    if recipe is not PLAIN or spec.barrier or spec.places[b].added:
        return "hold"
    return "momentum_on_device" if spec.places[b].matrices else "update_on_device"


@of_any_job_of_stage_1
def test_in_stage_1_a_bucket_is_delivered_after_everything_was_added_to_it(
    recipe: Recipe, spec: StepSpec
) -> None:
    added: dict[Region, list[tuple[int, int]]] = {}
    for op in recipe(spec):
        if op.verb in ("pack", "add"):
            m, b, s = op.index
            slot = op.write("grad_slot")
            assert slot.index == (b,)
            assert (slot in op.reads) == (slot in added), (
                f"{op.name} overwrites what was added, or adds to nothing"
            )
            added.setdefault(slot, []).append((m, s))
        elif op.verb == "square_sum":
            slot = op.read("grad_slot")
            groups = spec.layout.buckets[slot.index[0]].deliveries
            assert added.pop(slot) == [
                (m, s) for m in range(spec.settings.micro_batches) for group in groups for s in group
            ]
    assert not added


@of_any_job
def test_a_host_slot_is_read_before_it_is_overwritten(recipe: Recipe, spec: StepSpec) -> None:
    full: dict[Region, str] = {}
    for op in recipe(spec):
        for r in op.reads:
            if r.buffer == "host_slot":
                del full[r]  # a KeyError is a slot read after its bucket's update, or never filled
        for r in op.writes:
            if r.buffer == "host_slot":
                assert r not in full, f"{op.name} overwrites what {full[r]} left"
                full[r] = op.name
    assert not full


@every_graph
def test_each_part_of_an_update_finds_what_the_part_before_left(graph: Graph) -> None:
    left: dict[Region, int] = {}  # for which bucket
    for op in graph:
        for r in op.reads:
            if r.buffer.removeprefix("device_") in PASSED_ON:
                assert left[r] == op.index[-1], f"{op.name} reads what was left for bucket {left[r]}"
        for r in op.writes:
            if r.buffer.removeprefix("device_") in PASSED_ON:
                left[r] = op.index[-1]


@of_any_job
def test_a_sum_starts_once_and_takes_every_later_delivery(recipe: Recipe, spec: StepSpec) -> None:
    """In the order that no order of micro-batches changes: those of a segment, then segment by segment."""
    terms: dict[Region, list[tuple[int, int]]] = {}  # (delivery, micro-batch) of each
    for op in recipe(spec):
        if op.verb not in ("accumulate", "hold", "join_sums", "to_host"):
            continue
        if not spec.places[op.index[op.verb != "join_sums"]].added:
            assert not any(r.role == "grad_shard" for r in op.reads), (
                f"{op.name} adds to the gradient of before"
            )
            continue
        (into,) = (r for r in op.writes if r.role == "grad_shard")
        if op.verb == "join_sums":
            terms[into] += terms.pop(op.reads[1])
            continue
        sums = [r for r in op.reads if r != into and r.buffer in ("sum_slot", "host_slot")]
        new = terms.pop(sums[0]) if sums else [(op.index[2], op.index[0])]
        assert (into in op.reads) == (into in terms)
        terms.setdefault(into, []).extend(new)
    for r, order in terms.items():
        deliveries = spec.layout.buckets[r.index[0]].deliveries
        assert order == [
            (d, m) for d in range(len(deliveries)) for m in range(spec.settings.micro_batches)
        ], r


@of_any_job
def test_slots_take_no_more_memory_than_as_many_of_the_largest_bucket(recipe: Recipe, spec: StepSpec) -> None:
    regions = Graph(tuple(recipe(spec))).regions
    shard = spec.slot_numel // spec.world
    width = sum(
        {DTYPES[spec.places[b].dtype].nbytes for b in range(len(spec.layout.buckets))}
    )  # slots of each dtype
    leaving = [x for x in spec.places if x.trainable and x.gradient != "device"]
    landed = sum({DTYPES[x.delivered_dtype].nbytes for x in leaving})
    for buffer, most in (
        (
            "grad_slot",
            width
            * (
                spec.layout.numel
                if spec.settings.stage == 1
                else spec.settings.stages * spec.settings.slots * spec.slot_numel
            ),
        ),
        ("host_slot", landed * spec.settings.slots * shard * spec.settings.stages),
        ("param_slot", width * spec.settings.slots * shard * spec.settings.stages),
    ):
        assert sum(r.nbytes for r in regions if r.buffer == buffer) <= most


@of_any_job_of_stage_2
def test_slots_of_one_size_are_dealt_round_robin(recipe: Recipe, spec: StepSpec) -> None:
    packs = [op for op in recipe(spec) if op.verb == "pack"]
    written = [op.write("grad_slot") for op in packs if not any(r.buffer == "grad_slot" for r in op.reads)]
    for kind in {(r.nbytes, r.dtype, r.place) for r in written}:
        used = [r.index for r in written if (r.nbytes, r.dtype, r.place) == kind]
        slots = sorted({*used})
        assert used == [slots[n % len(slots)] for n in range(len(used))]


@of_any_job
def test_nothing_is_updated_before_the_decision_nor_before_the_norm_with_a_barrier(
    recipe: Recipe, spec: StepSpec
) -> None:
    """A late update has the decision of the step before; that of a state on the device never is late."""
    verbs = [op.verb for op in recipe(spec)]
    assert verbs.count("decide") == verbs.count("global_norm") == 1
    late = recipe is DEFERRED
    for i, op in enumerate(recipe(spec)):
        if op.verb in (*UPDATES, *BEGUN):
            assert verbs.index("decide") < i or (late and op.index[-1] in spec.offloaded)
    if spec.barrier or late:
        measured = [i for i, verb in enumerate(verbs) if verb in ("to_host", "squares_to_host")]
        assert measured[-1] < verbs.index("global_norm") < verbs.index("decide")
    if late:
        updates = [op.index for op in recipe(spec) if op.verb in UPDATES and op.index[0] in spec.offloaded]
        sent = [op.index for op in recipe(spec) if op.verb == "to_device"]
        on_host = [index for index in updates if not spec.places[index[0]].staged]
        assert sent == [index for index in on_host if spec.places[index[0]].params == "device"]
        assert verbs.index("load") == 0
        updated = set(spec.resident)
        for op in recipe(spec):
            updated |= {op.index[0]} if op.verb in UPDATES else set()
            assert op.verb != "forward" or updated.issuperset(spec.layout.buckets_of(op.index[1]))
        if not any(spec.places[b].matrices for b in spec.offloaded):
            assert updates == sorted(updates)
        if not any(x.matrices for x in spec.places):
            assert all(verbs.index("forward") > i for i, verb in enumerate(verbs) if verb == "to_device")


@of_any_job
def test_what_leaves_a_step_is_ordered_behind_its_decision(recipe: Recipe, spec: StepSpec) -> None:
    """What a refused step leaves behind, on a disk, in the state or on other ranks, is no matter of chance."""
    graph = Graph(tuple(recipe(evolve(spec, save=True))))
    assert [op.name for op in ops_unguarded_by_decision(graph)] == []
    # Or the law would say nothing: that they read the decision is what orders them, and without it they are found.
    blind = Graph(evolve(op, reads=tuple(r for r in op.reads if r.buffer != "decision")) for op in graph)
    found = {op.name for op in ops_unguarded_by_decision(blind)}
    on_copies = {f"{verb}[{b}]" for verb in (*UPDATES, *BEGUN) for b, x in enumerate(spec.places) if x.staged}
    leaving = {op.name for op in blind if op.verb in (*UPDATES, *BEGUN, "state_to_host", "publish")}
    assert leaving - on_copies <= found


@given(any_job)
def test_the_regions_of_the_state_are_those_that_operations_touch(spec: StepSpec) -> None:
    """Memory of a State is allocated from the one list, and the other says what becomes of it."""
    for recipe in (PLAIN, DEFERRED):
        spec = waiting(spec) if recipe is DEFERRED else spec
        listed = {r: r for r in Regions(spec).state()}
        touched = {r for r in Graph(tuple(recipe(evolve(spec, save=True)))).regions if r.lifetime == "state"}
        assert touched == {*listed}
        for r in touched:
            assert listed[r] in touched
            assert (r.nbytes, r.tier, r.dtype, r.role) == (
                listed[r].nbytes,
                listed[r].tier,
                listed[r].dtype,
                listed[r].role,
            )


@given(any_job)
def test_every_bucket_is_handed_on_from_the_device_to_the_host_and_back(spec: StepSpec) -> None:
    ops = {op.name: op for op in PLAIN(spec)}
    in_memory = (b for b in spec.offloaded if spec.places[b].state == "host")  # else test_disk_ops.py
    for b in (b for b in in_memory if not spec.places[b].staged):
        arrivals = [op for op in ops.values() if op.verb in ("to_host", "accumulate") and op.index[1] == b]
        arrivals += (op for op in ops.values() if op.verb == "join_sums" and op.index[0] == b)
        update = ops[f"update[{b}]"]
        begun = ops.get(f"momentum[{b}]", update)
        for op in (begun, update):
            assert op.read("decision") == ops["decide"].write("decision")
        if spec.places[b].params != "device":
            home = {op.reads[0] for op in ops.values() if op.verb == "fetch" and op.index[1] == b}
            assert home < set(update.reads) & set(update.writes)
            continue
        back = ops[f"to_device[{b}]"]
        assert set(arrivals[-1].writes) & set(begun.reads)
        assert set(update.writes) & set(back.reads)
        assert update.read("decision") == back.read("decision")
        assert back.write("params").index == (b,)
    for b in (b.index for b in spec.layout.buckets if spec.places[b.index].update == "device"):
        update = ops[f"update_on_device[{b}]"]
        assert update.read("decision") == ops["decide"].write("decision")
        assert spec.places[b].params != "device" or update.write("params").index == (b,)
        if spec.places[b].staged:  # it changes a copy of the state, which goes back
            there, back = ops[f"state_to_device[{b}]"], ops[f"state_to_host[{b}]"]
            assert there.write("update_slot") == update.write("update_slot") == back.read("update_slot")
            waiting = {r for r in there.reads if r.role == "grad_shard"}
            assert bool(waiting) != (spec.places[b].gradient == "device")
            assert {*back.writes} == {*there.reads} - waiting == {*there.reads} & {*back.reads}
            assert back.read("decision") == update.read("decision")
            home = {op.reads[0] for op in ops.values() if op.verb == "fetch" and op.index[1] == b}
            assert home <= {*back.writes}
    if spec.mesh.several_ranks:
        assert ops["decide"].read("mean_loss") in ops["mean_loss"].writes
    losses = [
        r.index for r in ops["mean_loss" if spec.mesh.several_ranks else "decide"].reads if r.buffer == "loss"
    ]
    assert losses == [(m,) for m in range(spec.settings.micro_batches)]
    assert ops["decide"].touches("norm") == spec.barrier


@given(any_job)
def test_the_next_step_and_a_flush_apply_the_gradients_a_step_leaves(spec: StepSpec) -> None:
    left = {r for op in DEFERRED(spec) for r in op.writes if r.lifetime == "state" and r.role == "grad_shard"}
    for recipe in (DEFERRED, RECIPES["flush"]):
        applied = (op for op in recipe(spec) if op.verb in (*UPDATES, *BEGUN, "state_to_device"))
        used = {r for op in applied for r in op.operands("grad_shard")}
        assert {r for r in used if r.lifetime == "state"} == left
    assert {r.index for r in left} == {(b,) for b in spec.offloaded}


@pytest.mark.parametrize("group_size", [1, 2])
def test_activations_on_the_host_leave_no_more_on_the_device_for_a_deeper_model(group_size: int) -> None:
    def activations(depth: int) -> int:
        passes = {"micro_batches": 2, "group_size": group_size, "barrier": True}
        made = spec(chain(*[(8, 8)] * depth), bucket_size=64, activations_on="host", **passes)
        made = evolve(made, costs=[made.costs[0]] * depth)
        return peak_breakdown(Overlapped()(Graph(PLAIN(made))))["device"]["act"]

    assert activations(12) == activations(6)


@of_any_job
def test_the_norm_counts_every_bucket(recipe: Recipe, spec: StepSpec) -> None:
    (norm,) = (op for op in recipe(spec) if op.verb == "global_norm")
    assert len(norm.reads) == len(spec.layout.buckets)


@of_any_job
def test_backward_stops_where_nothing_more_can_be_trained(recipe: Recipe, spec: StepSpec) -> None:
    ops = list(recipe(spec))
    trained = spec.layout.first_trainable
    for verbs, first in ((("forward",), 0), (("backward", "backward_input"), trained)):
        done = sorted(op.index for op in ops if op.verb in verbs)
        assert done == [
            (m, s) for m in range(spec.settings.micro_batches) for s in range(first, spec.num_segments)
        ]


@of_any_job
def test_backward_reads_the_parameters_its_pullback_holds(recipe: Recipe, spec: StepSpec) -> None:
    for op in recipe(spec):
        if op.verb in ("forward", "backward"):
            read = {r.index[0] for r in op.reads if r.buffer == "params"}
            whole = {b for b in spec.layout.buckets_of(op.index[1]) if not spec.places[b].streamed}
            assert read == whole, op.name


@of_any_job
def test_a_pass_finds_the_parameters_of_its_segment_in_slots(recipe: Recipe, spec: StepSpec) -> None:
    """Each is fetched and gathered once for a pass of a group, unless a slot has it from the pass before."""
    has: dict[Region, int] = {}
    for op in recipe(spec):
        if op.verb in ("fetch", "gather"):
            (slot,), b = op.writes, op.index[1]
            assert spec.places[b].params != "device" if op.verb == "fetch" else spec.places[b].sharded
            assert slot.dtype == spec.places[b].dtype
            assert spec.layout.all_buckets[b].numel * spec.places[b].element_bytes <= slot.nbytes
            has[slot] = b
        if op.verb in ("forward", "backward"):
            slots = [has[r] for r in op.reads if r.buffer == "weight_slot"]
            assert slots == [b for b in spec.layout.weights_of(op.index[1]) if spec.places[b].streamed], (
                op.name
            )


@given(any_job)
def test_a_slot_more_never_fetches_more_and_one_for_each_segment_fetches_once(spec: StepSpec) -> None:
    def fetches(slots: int) -> list[int]:
        return sorted(op.index[1] for op in PLAIN(changed(spec, slots=slots)) if op.verb == "fetch")

    fewer, more = fetches(spec.settings.slots), fetches(spec.settings.slots + 1)
    assert len(more) <= len(fewer)
    of_host = {
        (b, device)
        for device in range(spec.settings.stages)
        for s in spec.mesh.segments_on(device, "F", "B")
        for b in spec.layout.weights_of(s)
        if spec.places[b].params != "device"
    }
    assert fetches(spec.num_segments) == sorted(b for b, _ in of_host)
    settings = spec.settings
    group = settings.group_size if settings.stages == 1 else 1
    passes = 2 * -(-settings.micro_batches // group)
    assert all(n <= passes * spec.num_segments for n in Counter(fewer).values())


def of_shared_tensors(test: Any) -> Any:
    """The law `test` of drawn jobs, and of all rows of SPECS with tensors of many inputs, which few jobs have."""
    sharing = (spec for spec in SPECS.values() if any(x.shared for x in spec.costs))
    return reduce(lambda test, spec: example(PLAIN, spec)(test), sharing, test)


@of_shared_tensors
@of_any_job
def test_what_is_stashed_comes_back_before_its_backward(recipe: Recipe, spec: StepSpec) -> None:
    ops = {op.name: op for op in recipe(spec)}
    for m, s in (op.index for op in ops.values() if op.verb == "backward"):
        backward = ops[f"backward[{m},{s}]"]
        place = spec.activations[s]
        assert (f"stash[{m},{s}]" in ops) == (f"unstash[{m},{s}]" in ops) == (place != "device")
        assert (f"spill_act[{m},{s}]" in ops) == (f"unspill_act[{m},{s}]" in ops) == (place == "disk")
        if spec.activations[s] != "device":
            away, back = ops[f"stash[{m},{s}]"], ops[f"unstash[{m},{s}]"]
            if spec.activations[s] == "disk":
                written, read = ops[f"spill_act[{m},{s}]"], ops[f"unspill_act[{m},{s}]"]
                assert (written.reads, read.writes) == (away.writes[:1], back.reads[:1])
                assert {r.buffer for r in (*written.reads, *read.writes)} == {"act_page"}
                assert written.nbytes == sum(r.nbytes for r in written.writes)
                assert read.nbytes == sum(r.nbytes for r in read.reads) <= read.writes[0].nbytes
            assert back.writes == (ops.get(f"recompute[{m},{s}]", backward).read("act"),)
            assert not backward.touches("residuals")
            left, found = stored(ops, m, s), stored(ops, m, s, back=True)
            assert left == {r for r in found if r.index[1] == s}
            assert all(r in stored(ops, m, r.index[1]) for r in found)
            before = {leaf for leaf, x in spec.shared_stashes[s].items() if x.first < s}
            there = sum(x.nbytes for x in spec.costs[s].shared if x.leaf in before)
            assert away.nbytes + there == back.nbytes >= sum(r.nbytes for r in away.reads)
            assert back.writes[0].nbytes >= back.nbytes


def stored(ops: dict[str, Op], m: int, s: int, *, back: bool = False) -> set[Region]:
    """The regions off the device, but for pages, to which a segment's activations go, or `back` from which they
    come."""
    verbs = ("unspill_act", "unstash") if back else ("stash", "spill_act")
    its = (ops[name] for verb in verbs if (name := f"{verb}[{m},{s}]") in ops)
    return {
        r
        for op in its
        for r in (op.reads if back else op.writes)
        if r.buffer != "act_page" and r.tier != "device"
    }


@of_shared_tensors
@of_any_job
def test_a_tensor_of_many_inputs_leaves_each_rank_once(recipe: Recipe, spec: StepSpec) -> None:
    """With its first stash: to the host if any of its segments' activations go there; else to the disk, if that has
    less to store then."""
    ops, mesh = {op.name: op for op in recipe(spec)}, spec.mesh
    for m in range(spec.settings.micro_batches if any(op.verb == "forward" for op in ops.values()) else 0):
        sharing: dict[Any, list[tuple[int, SharedInput]]] = {}
        for s, x in ((s, x) for s, cost in enumerate(spec.costs) for x in cost.shared):
            if spec.activations[s] != "device":
                there = mesh.device_of("F", m, s) if mesh.over_ranks else 0
                sharing.setdefault((x.origin, there), []).append((s, x))
        for own in sharing.values():
            (first, x), places = own[0], {spec.activations[s] for s, _ in own}
            at = m % spec.settings.in_flight, first, x.leaf
            blocks = x.nbytes // BLOCK  # of which each stash has less
            apart = len(own) > 1 and ("host" in places or blocks * BLOCK * len(own) > whole_blocks(x.nbytes))
            one = [("pinned", "host_shared") if "host" in places else ("disk", "disk_shared")] * apart
            assert [(r.tier, r.buffer) for s, _ in own for r in stored(ops, m, s) if r.index == at] == one
            for s, _ in own:
                assert [(r.tier, r.buffer) for r in stored(ops, m, s, back=True) if r.index == at] == one
        on_disk = [
            s for s, place in enumerate(spec.activations) if place == "disk" and f"stash[{m},{s}]" in ops
        ]
        stored_there = {r for s in on_disk for r in stored(ops, m, s) if r.tier == "disk"}
        assert sum(r.nbytes for r in stored_there) <= sum(whole_blocks(left_bytes(spec, s)) for s in on_disk)


@of_any_job
@example(PLAIN, SPECS["activations on the host, shared"])
@example(PLAIN, SPECS["dealt to three devices, shared"])
def test_a_device_has_what_segments_in_a_row_pass_on_once(recipe: Recipe, spec: StepSpec) -> None:
    """Of each micro-batch, until it comes from another device; and who reads an input reads all of it."""
    ops, device_of = [*recipe(spec)], spec.mesh.device_of
    inputs = {
        op.index: {r for r in op.reads if r.buffer in ("act", "passed")} for op in ops if op.verb == "forward"
    }
    for m in range(spec.settings.micro_batches):
        there = set[Region]()
        for s, cost in enumerate(spec.costs):
            there = there if s and device_of("F", m, s - 1) == device_of("F", m, s) else set()
            known = sum(x.nbytes for x in cost.passed_on if x.origin.first < s) if there else 0
            assert sum(r.nbytes for r in inputs[m, s] - there) == cost.input_bytes - known
            assert sum(r.nbytes for r in inputs[m, s]) == cost.input_bytes
            there |= inputs[m, s]
    for op in ops:
        for r in op.reads:
            assert r.buffer != "act" or inputs[r.index] <= {*op.regions}, op.name


@of_any_job
@example(PLAIN, SPECS["activations on the host, shared"])
@example(PLAIN, SPECS["dealt to three devices, shared"])
def test_a_device_has_a_gradient_that_passes_unchanged_once(recipe: Recipe, spec: StepSpec) -> None:
    """Of each micro-batch, with all that was made with it, until a copy of it goes to another device."""
    ops, device_of, last = [*recipe(spec)], spec.mesh.device_of, spec.num_segments - 1
    pulled = {
        (op.index[0], op.index[1] + 1): {r for r in op.reads if r.buffer in ("grad_act", "passed_grad")}
        for op in ops
        if op.verb in ("backward", "backward_input")
    }
    for m in range(spec.settings.micro_batches if pulled else 0):
        there = set[Region]()
        for s in range(last, spec.layout.first_trainable, -1):
            came, cost = device_of("B", m, s) != device_of("B", m, s - 1), spec.costs[s]
            there = set[Region]() if came else there
            lone = cost.gradient_bytes - sum(x.nbytes for x in cost.passed_back)
            new = [x for x in cost.passed_back if came or x.origin.first == s]
            made = sum(x.nbytes if came else x.most for x in new)
            assert sum(r.nbytes for r in pulled[m, s] - there) == lone + made
            known = sum(x.nbytes for x in cost.passed_back if x not in new)
            assert sum(r.nbytes for r in pulled[m, s] & there) >= known
            there |= pulled[m, s]
    for op in ops:
        for r in op.regions:
            assert r.buffer != "grad_act" or pulled[r.index] <= {*op.regions}, op.name


MOVING = {
    "pack",
    "add",
    "hold",
    "square_sum",
    "accumulate",
    "update",
    "update_on_device",
    "join_sums",
    *BEGUN,
}
DIRECTIONS = {"direction_to_device", "gather_direction", "direction_to_host"}
SENDING = {"to_host", "to_device", "reduce_scatter", "all_gather", "fetch", "gather", *DIRECTIONS}


@of_any_job
def test_an_operation_moves_the_bytes_of_its_bucket_in_each_region(recipe: Recipe, spec: StepSpec) -> None:
    """Once for a read and once for a write; of a slot as much as is in it, and over a link every byte once."""

    def moved(region: Region) -> int:
        if region.buffer in ("decision", "squares", "host_squares"):
            return 0  # one number
        if "direction" in region.buffer:
            return elements * 2
        if region.buffer == "update_slot":
            parts = moment_buffers(layout.buckets[b].state_format) if spec.places[b].matrices else ()
            weights = [x for x in spec.places[b].buffers if x not in parts]
            parts = parts if op.verb == "momentum_on_device" else weights
            return sum(x.nbytes(elements) for x in parts)
        if region.buffer.endswith("_slot"):
            return elements * DTYPES[region.dtype].nbytes
        return elements * spec.places[b].element_bytes if region.buffer == "grads" else region.nbytes

    layout = spec.layout
    for op in recipe(spec):
        if op.verb == "load":
            assert op.nbytes == sum(r.nbytes for r in op.writes)
        if op.verb not in MOVING | SENDING:
            continue
        b = op.index[0 if op.verb == "join_sums" else min(1, len(op.index) - 1)]
        if spec.places[b].state == "disk":  # in a slot of the state: test_disk_ops.py
            continue
        elements = spec.layout.all_buckets[b].numel
        whole = op.verb in ("pack", "add") or (op.verb == "fetch" and not spec.places[b].sharded)
        elements //= 1 if whole else spec.world
        share = elements * spec.places[b].element_bytes
        if op.verb in SENDING:
            if op.verb in ("to_host", "direction_to_host"):
                share = moved(op.reads[0])
            elif op.verb in DIRECTIONS:
                share = moved(op.writes[0])
            assert op.nbytes == share * (spec.world - 1 if op.kind == "network" else 1), op.name
            continue
        reads = op.reads[:1] if op.verb == "pack" else op.reads  # what is in the slot is left there
        expected = sum(moved(r) for r in (*reads, *op.writes) if r.buffer != "params")
        means = {x.name for x in spec.places[b].buffers if x.whole}
        if means and op.verb in ("update", "update_on_device"):
            # What measures a whole parameter: the gradient three times, and the weights.
            weights = [x for x in spec.places[b].buffers if x.name not in means]
            expected += 3 * moved(op.reads[1]) + sum(x.nbytes(elements) for x in weights)
        place = spec.places[b]
        takes_gradient = BEGUN if place.matrices else ("update_on_device",)
        if place.staged and place.gradient != "device" and op.verb in takes_gradient:
            width = 4 if place.added or place.summed else place.element_bytes
            expected += elements * width  # the gradient, which is in the slot of the state
        if op.verb == "update" and any(r.buffer == "params" for r in op.writes):
            expected += share  # where they live on the host
        if op.verb == "update_on_device" and not spec.places[op.index[0]].sends_high_half:
            expected += share  # the weights: written
        assert op.nbytes == expected, op.name


@of_any_job
def test_a_step_that_saves_writes_every_bucket_before_its_next_update_and_publishes_them_all(
    recipe: Recipe, spec: StepSpec
) -> None:
    """That the update then waits is the verifier's affair: the write reads what the update writes."""
    ops = {op.name: op for op in recipe(evolve(spec, save=True))}
    order = {name: i for i, name in enumerate(ops)}
    for bucket in spec.layout.buckets:
        b = bucket.index
        write = ops[f"write[{b}]"]
        update = next((ops[name] for verb in UPDATES if (name := f"{verb}[{b}]") in ops), None)
        assert set(write.writes) <= set(ops["publish"].reads)
        if update is None:
            continue
        kept = {x.name for x in STATE_FORMATS[bucket.state_format]}
        begun = next((ops[name] for verb in BEGUN if (name := f"{verb}[{b}]") in ops), update)
        home = ops[f"state_to_host[{b}]"].writes if spec.places[b].staged else ()
        state = {r for r in (*begun.writes, *update.writes, *home) if r.buffer in kept}
        assert len(state) == len(kept)
        assert state <= set(write.reads)
        # The update before the saved state opens the step.
        deferred = recipe is DEFERRED and b in spec.offloaded
        assert (order[write.name] < min(order[begun.name], order[update.name])) == (not deferred)
        assert (order[write.name] < order[update.name]) == (not deferred)
        waits = {r for r in begun.reads if r.buffer in ("host_grad", "grad_sum") and r.index == (b,)}
        assert not waits & set(write.reads)
    assert all(f"write[{b.index}]" in ops for b in spec.layout.frozen_buckets)
    assert [*ops][-1] == "publish"
    plain = [op for op in ops.values() if op.verb not in ("write", "write_buffers", "publish")]
    without = list(recipe(evolve(spec, save=False)))
    if recipe is DEFERRED and (
        any(x.matrices or x.staged for x in spec.places)
    ):  # whose updates move ahead, unless the step saves
        plain, without = (sorted(ops, key=lambda op: op.name) for ops in (plain, without))
    assert plain == without
