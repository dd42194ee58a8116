"""The table of laws: every recipe, spec and schedule here goes through every torch-free law, for one line each.

`cases` are the fixed ones, `specs()` makes more of them with hypothesis. A spec's sizes are small on purpose.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from itertools import product
from random import Random
from typing import Any

import pytest
from attrs import evolve, fields, fields_dict, frozen
from hypothesis import given
from hypothesis import strategies as st
from pairs import by_day
from zfunc.schedules import OneFOneB, ZeroBubble
from zfunc.schedules.stages import RecomputeAhead

import zfunc.optim  # noqa: F401 whose classes add their formats
from zfunc import schedules
from zfunc.core.graph import Graph, Op
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.layout import Parameter, UpdateWork, make_layout
from zfunc.core.optimizer_state import updates_matrices
from zfunc.core.plan import Plan, build
from zfunc.core.recipes import checkpoint, deferred, flush_recipe, zero_offload
from zfunc.core.settings import StepSettings
from zfunc.core.spec import Origin, PassCost, PassedOn, SegmentCost, SharedInput, StepSpec

Segments = list[list[Parameter]]


@frozen
class Scattered:
    """No schedule at all: operations on lanes at random, in any order that does not deadlock; with `num_threads`,
    lanes on threads in turn."""

    seed: int = 0
    num_lanes: int = 4
    num_threads: int = 0

    def __call__(self, graph: Graph) -> Plan:
        random = Random(self.seed)
        lanes: dict[str, list[int]] = {f"lane{n}": [] for n in range(self.num_lanes)}
        for op in shuffled(graph, random):
            lanes[random.choice(list(lanes))].append(op)
        plan, threads = build(graph, lanes), self.num_threads
        if not threads or any(r.of_rank for r in graph.regions):
            return plan
        return evolve(
            plan, lanes=[evolve(lane, thread=f"lane{n % threads}") for n, lane in enumerate(plan.lanes)]
        )


def shuffled(graph: Graph, random: Random) -> Iterator[int]:
    """Some order of the operations that keeps every dependency."""
    left = [set(before) for before in graph.predecessors]
    ready = [i for i, before in enumerate(left) if not before]
    while ready:
        done = ready.pop(random.randrange(len(ready)))
        yield done
        for i, before in enumerate(left):
            if done in before:
                before.remove(done)
                if not before:
                    ready.append(i)


def spec(
    segments: Segments,
    *,
    bucket_size: int = 128,
    recompute: Iterable[bool] = (),
    barrier: bool = False,
    group_size: int = 1,
    state_format: str | None = None,
    persistent: Collection[str] = (),
    in_fp32: Collection[str] = (),
    resident: Iterable[int] = (),
    shared: int = 0,
    **given: Any,
) -> StepSpec:
    """A spec with costs that differ from segment to segment, so that no two regions are alike by accident.

    `given` are settings, and other fields of the spec. If `shared`, a tensor of 40 times so many bytes is in all
    inputs but the first, one of 24 in every second. On the device the latter is passed on by those from 2 to 4;
    so are two gradients, back from the last and from 4, of which the first is a part of what is made.
    """
    if state_format is not None:
        segments = [[evolve(p, state_format=state_format) for p in own] for own in segments]
    works = {p.name: _work(p, n) for n, p in enumerate(p for own in segments for p in own)}
    segments = [[evolve(p, work=works[p.name]) for p in own] for own in segments]
    settings = StepSettings(
        recompute=",".join("all" if x else "min-cut" for x in recompute) or "all",
        clip_norm=1.0 if barrier else None,
        **({} if {"devices", "pp"} & given.keys() else {"order": group_size}),
        **{name: given.pop(name) for name in fields_dict(StepSettings) if name in given},
    )
    layout = make_layout(
        segments,
        bucket_size=bucket_size,
        world=given.get("world", 1),
        within_segments=settings.streams or settings.group_size > 1 or settings.stages > 1,
        persistent=persistent if settings.streams else (),
        in_fp32=in_fp32,
    )
    last = len(segments) - 1
    costs = [
        SegmentCost(
            PassCost(1000 * (s + 1), 0, 40 + 4 * s, 3 + s),
            PassCost(2500 * (s + 1), 0, 90 + 12 * s, 5 + s),
            PassCost(1500 * (s + 1), 0, 50 + 8 * s, 3 + s),
            PassCost(1000 * (s + 1), 0, 20 + 4 * s, 2),
            PassCost(900 * (s + 1), 0, 30 + 4 * s, 2 + s),
            *(64 * (shared or 1) + 8 * s, 200 + 16 * s, 64 * (shared or 1) + 236 + 24 * s),
            pending_bytes=100 + 8 * s,
            recomputed_bytes=150 + 16 * s,
            shared=(
                *(SharedInput(1, Origin(1, 1, last), 40 * shared) for _ in range(shared > 0 and s > 0)),
                *(
                    SharedInput(2 + s, Origin(0, 2, last), 24 * shared)
                    for _ in range(shared > 0 and s % 2 == 0)
                ),
            ),
            passed_on=(
                *(PassedOn(Origin(1, 1, last), 40) for _ in range(shared > 0 and s > 0)),
                *(PassedOn(Origin(2, 4, min(4, last)), 24) for _ in range(shared > 0 and 1 < s < 5)),
            ),
            passed_back=(
                *(PassedOn(Origin(last, 1, 1), 40, 56) for _ in range(shared > 0 and s > 0)),
                *(PassedOn(Origin(min(4, last), 0, 2), 24) for _ in range(shared > 0 and 1 < s < 5)),
            ),
        )
        for s in range(len(segments))
    ]
    resident = {*resident} & {*range(len(layout.buckets))}
    if settings.stages > 1:
        given["order"] = schedules.make_order(settings.order)
    return StepSpec(layout, costs, settings, target_bytes=16, resident=resident, **given)


def changed(of: StepSpec, **settings: Any) -> StepSpec:
    """The spec with other settings, in the same buckets."""
    return evolve(of, settings=evolve(of.settings, **settings))


def waiting(of: StepSpec) -> StepSpec:
    """The spec with updates that are deferred."""
    return changed(of, defer=True, clip_norm=1.0)


def _work(p: Parameter, n: int) -> UpdateWork:
    """What the update of parameter number `n` takes, as optimizers say it."""
    if updates_matrices(p.state_format):
        return UpdateWork(700 * (n + 1), 50 + 8 * n, 2 + n)
    return UpdateWork()


def chain(*shapes: tuple[int, ...]) -> Segments:
    """One segment a shape, with a weight of that shape and a bias that does not decay."""
    return [[Parameter(f"{s}.w", x), Parameter(f"{s}.b", x[-1:], group=1)] for s, x in enumerate(shapes)]


EMBED = Parameter("embed", (10, 8))
TIED: Segments = [[EMBED], [Parameter("block", (8, 8))], [Parameter("norm", (8,), group=1), EMBED]]
TIED_NEXT: Segments = [[Parameter("a", (9,)), EMBED], [EMBED, Parameter("b", (70,))], [Parameter("c", (5,))]]
TIED_THREE: Segments = [[EMBED], [EMBED, Parameter("a", (64,))], [Parameter("b", (3, 3))], [EMBED]]
SPANNING: Segments = [[Parameter(f"p{s}", (8,))] for s in range(4)]  # one bucket of all four
SPANNING_TIE: Segments = [
    [EMBED],
    [Parameter("a", (8,))],
    [Parameter("b", (8,)), EMBED],
    [Parameter("c", (8,))],
]
FROZEN: Segments = [
    [Parameter("stem", (7, 7), trainable=False)],
    [],
    [Parameter("adapter", (8, 2)), Parameter("base", (64,), trainable=False)],
    [Parameter("out", (20,))],
]
FROZEN_BETWEEN: Segments = [[Parameter(f"{s}.w", (8, 16), trainable=s not in (4, 6))] for s in range(8)]
TWO_FORMATS: Segments = [
    [EMBED, Parameter("a", (70,), group=1, state_format="16bit")],
    [Parameter("b", (8, 8), state_format="16bit"), Parameter("c", (8,), group=2)],
    [Parameter("d", (5,), state_format="16bit"), EMBED],
]
MATRICES: Segments = [
    [evolve(EMBED, state_format="muon-16bit"), Parameter("a", (70,))],
    [Parameter("b", (30, 8), state_format="muon-16bit"), Parameter("c", (8,), group=2)],
    [Parameter("d", (9, 9), state_format="muon-16bit"), evolve(EMBED, state_format="muon-16bit")],
]
MATRICES_APART: Segments = [
    [Parameter(name, shape, state_format="muon-16bit")]
    for name, shape in (("a", (9, 8)), ("b", (30, 8)), ("c", (9, 9)))
]
WHOLE: Segments = [
    [evolve(EMBED, state_format="adafactor-16bit"), Parameter("a", (300,))],
    [Parameter("b", (30, 8), state_format="adafactor-16bit"), Parameter("c", (8,), group=2)],
    [Parameter("d", (20, 20), state_format="adafactor-16bit"), evolve(EMBED, state_format="adafactor-16bit")],
]
SCALARS: Segments = [[Parameter("scale", ())], [Parameter("one", (1,)), Parameter("shift", (), group=1)]]

TRAINING: dict[str, Callable[[StepSpec], Iterator[Op]]] = {
    "zero_offload": zero_offload,
    "deferred": lambda spec: deferred(waiting(spec)),
}
RECIPES: dict[str, Callable[[StepSpec], Iterator[Op]]] = {
    **TRAINING,
    "checkpoint": checkpoint,
    "flush": lambda spec: flush_recipe(waiting(spec)),
}

PLACES = [
    ("device",),
    ("host",),
    ("disk",),
    ("disk", "device"),
    ("device", "host"),
]  # of shares of activations
FORMATS = (None, "fp32", "8bit", "16bit", "fp32-split")  # of every parameter; None: each has its own

SPECS: dict[str, StepSpec] = {
    "tied": spec(TIED, recompute=[True, False, False]),
    "tied barrier": spec(TIED, barrier=True),
    "tied accumulated": spec(
        TIED, micro_batches=2, world=2, barrier=True, recompute=[False] * 3, aux=["accuracy"]
    ),
    "tied neighbours": spec(TIED_NEXT, bucket_size=1000, world=2),
    "tied in three": spec(TIED_THREE, bucket_size=64, slots=3),
    "spanning": spec(SPANNING, bucket_size=256, micro_batches=2),
    "spanning a tie": spec(SPANNING_TIE, bucket_size=1000),
    "frozen": spec(FROZEN, recompute=[False, True, False, True], precision="fp32"),
    "frozen accumulated": spec(FROZEN, micro_batches=3, slots=1, barrier=True),
    "scalars": spec(SCALARS, bucket_size=1),
    "one huge": spec(chain((4,), (5000,), (3, 3)), slots=1, world=3),
    "small buckets": spec(chain((8, 8), (8, 8), (8, 8)), bucket_size=64, barrier=True, slots=3),
    "one segment": spec([[Parameter("w", (2, 2))]], micro_batches=2),
    "16 bits": spec(TIED_NEXT, state_format="16bit", slots=1),
    "two formats": spec(TWO_FORMATS, micro_batches=2, world=2, barrier=True, ema=0.5),
    "two formats, streamed": spec(TWO_FORMATS, params_on="host", save=True),
    "whole matrices": spec(MATRICES, resident={0}, save=True, ema=0.5),
    "whole matrices, barrier": spec(MATRICES_APART, micro_batches=2, world=2, barrier=True, resident={0, 2}),
    "whole matrices, stage 3": spec(MATRICES, stage=3, world=3, params_on="host", barrier=True, slots=1),
    "whole parameters": spec(WHOLE, micro_batches=2, barrier=True, resident={0}, save=True),
    "stage 1": spec(TIED, stage=1, micro_batches=2, world=2, barrier=True),
    "stage 1, spanning": spec(SPANNING_TIE, bucket_size=1000, stage=1, micro_batches=3),
    "8 bits": spec(TIED_THREE, state_format="8bit", barrier=True, world=3),
    "partial": spec(TIED, resident={0, 2}, update_workspace=30, ema=0.5),
    "partial, barrier": spec(
        TIED_THREE, bucket_size=64, resident={1}, barrier=True, micro_batches=2, world=2
    ),
    "partial, barrier, spanning": spec(SPANNING_TIE, bucket_size=64, resident={0, 1}, barrier=True),
    "norms in fp32": spec(TIED_NEXT, in_fp32={"a", "c"}, micro_batches=2, barrier=True, save=True),
    "two of a bucket in fp32, 16 bits": spec(SPANNING, in_fp32={"p1", "p2"}, state_format="16bit", slots=1),
    "some in fp32, from the host": spec(
        FROZEN, in_fp32={"stem", "adapter"}, params_on="host", state_format="8bit", slots=1, save=True
    ),
    "a tie in fp32, stage 3": spec(
        TIED,
        in_fp32={"embed"},
        stage=3,
        world=2,
        micro_batches=2,
        group_size=2,
        update_on="host,device",
        ema=0.5,
    ),
    "norms in fp32, stage 1": spec(
        TIED_NEXT, in_fp32={"a", "b"}, stage=1, micro_batches=2, world=3, precision="fp16", resident={1}
    ),
    "all resident": spec(chain((8, 8), (8, 8)), bucket_size=64, resident={0, 1, 2, 3}, save=True),
    "updated on the device": spec(TIED, update_on="device", update_workspace=30, ema=0.5, save=True),
    "updated on the device, barrier": spec(
        TIED_THREE, bucket_size=64, update_on="device", barrier=True, micro_batches=2, world=2, resident={1}
    ),
    "half updated on the device, from the host": spec(
        FROZEN, params_on="host", update_on="host,device", slots=1, micro_batches=2, group_size=2
    ),
    "16 bits, from the host, updated on the device": spec(
        TIED, bucket_size=64, params_on="host", state_format="16bit", update_on="device", barrier=True
    ),
    "updated on the device, gradients on the host": spec(
        TIED, update_on="device", grads_on="host", barrier=True, micro_batches=2, group_size=2, world=2
    ),
    "whole matrices, updated on the device": spec(MATRICES, world=3, update_on="device", barrier=True),
    "whole parameters, updated on the device": spec(WHOLE, update_on="device", slots=1),
    "vertical": spec(TIED, micro_batches=3, group_size=3, barrier=True, slots=1),
    "vertical, two ranks": spec(TIED_THREE, micro_batches=2, group_size=2, world=2, resident={1}),
    "in groups": spec(
        TIED_NEXT, micro_batches=3, group_size=2, world=2, slots=1, aux=["accuracy", "perplexity"]
    ),
    "parameters on the host": spec(TIED, bucket_size=64, params_on="host", state_format="16bit", slots=1),
    "parameters on the host, copied": spec(
        FROZEN, params_on="host", micro_batches=2, group_size=2, barrier=True, resident={1}, constant_bytes=40
    ),
    "persistent": spec(TIED, params_on="host", persistent={"embed", "norm"}, state_format="16bit"),
    "stage 3, some persistent": spec(
        FROZEN, stage=3, world=2, persistent={"stem", "adapter", "out"}, barrier=True, save=True
    ),
    "stage 3, frozen": spec(FROZEN, stage=3, world=2, params_on="host", save=True, barrier=True),
    "stage 3": spec(TIED, stage=3, world=2, micro_batches=2, resident={0}, save=True),
    "stage 3, on the host": spec(
        TIED, stage=3, world=3, params_on="host", micro_batches=3, group_size=2, activations_on="host"
    ),
    "activations on the host": spec(
        FROZEN, recompute=[False] * 4, activations_on="host", micro_batches=4, group_size=2, barrier=True
    ),
    "activations on host and disk": spec(
        TIED_THREE, recompute=[True, False] * 2, activations_on="host,disk,device", micro_batches=2, slots=1
    ),
    "activations on the host, shared": spec(
        chain(*[(8, 8)] * 6), activations_on="host", micro_batches=3, group_size=2, shared=1
    ),
    "activations on disk and host, shared": spec(
        chain(*[(8, 8)] * 7), activations_on="disk,host,host,device", micro_batches=2, slots=1, shared=1
    ),
    "activations on the disk, shared": spec(
        chain(*[(8, 8)] * 7), activations_on="disk", micro_batches=3, group_size=2, slots=1, shared=150
    ),
    "activations on the disk, shared in large": spec(
        chain(*[(8, 8)] * 6), activations_on="disk,disk,device", micro_batches=2, shared=200
    ),
    "modules' buffers": spec(
        TIED, micro_batches=3, buffer_bytes=(0, 24, 40), recompute=[True, True, False], save=True
    ),
    "modules' buffers, vertical, two ranks": spec(
        FROZEN, micro_batches=2, group_size=2, world=2, barrier=True, buffer_bytes=(8, 0, 16, 32), save=True
    ),
    "two devices": spec(chain(*[(8, 8)] * 3), devices=2, micro_batches=3, constant_bytes=40, save=True),
    "two peers": spec(chain(*[(8, 8)] * 3), devices=2, micro_batches=3, constant_bytes=40, peers=True),
    "two peers, backward split": spec(
        chain(*[(8, 8)] * 4), devices=2, order="ZeroBubble", micro_batches=3, barrier=True, peers=True
    ),
    "two devices, stage 1": spec(
        FROZEN, devices=2, micro_batches=2, order="GPipe", stage=1, world=2, barrier=True, aux=["accuracy"]
    ),
    "three devices, some resident": spec(
        chain(*[(8, 8)] * 5),
        devices=3,
        micro_batches=4,
        barrier=True,
        resident={0, 3},
        update_workspace=30,
        ema=0.5,
    ),
    "two devices, from the host": spec(
        TIED_THREE,
        devices=2,
        order="Interleaved1F1B",
        micro_batches=3,
        params_on="host",
        grads_on="host",
        activations_on="host,disk,device",
        world=2,
        stage=3,
    ),
    "two devices, breadth first": spec(
        chain(*[(8, 8)] * 4),
        devices=2,
        order="LoopedBFS",
        micro_batches=2,
        update_on="device",
        recompute=[False] * 4,
        buffer_bytes=(8, 0, 16, 32),
    ),
    "two devices, backward split": spec(
        chain(*[(8, 8)] * 4), devices=2, order="ZeroBubble", micro_batches=3, barrier=True, resident={0, 3}
    ),
    "two devices, backward split, from the host": spec(
        TIED_THREE,
        devices=2,
        order=RecomputeAhead(ZeroBubble()),
        micro_batches=3,
        params_on="host",
        grads_on="host",
        activations_on="host,disk,device",
        recompute=[True, False] * 2,
        world=2,
        stage=3,
        save=True,
    ),
    "two devices, backward split, sums on the device": spec(
        FROZEN_BETWEEN, devices=2, order="ZeroBubble", micro_batches=4, params_on="host"
    ),
    "down a V and up": spec(
        FROZEN, devices=2, order="DualPipeV", micro_batches=4, update_on="device", buffer_bytes=(8, 0, 16, 32)
    ),
    "dealt to three devices": spec(
        TIED,
        devices=3,
        order="RoundPipe",
        micro_batches=4,
        params_on="host",
        grads_on="host",
        activations_on="host",
        save=True,
    ),
    "dealt to three devices, shared": spec(
        chain(*[(8, 8)] * 7),
        devices=3,
        order="RoundPipe",
        micro_batches=4,
        params_on="host",
        activations_on="host",
        shared=1,
    ),
    "two stages, shared": spec(
        chain(*[(8, 8)] * 7),
        pp=2,
        order="Interleaved1F1B",
        micro_batches=2,
        activations_on="host",
        shared=1,
    ),
    "two stages": spec(
        chain(*[(8, 8)] * 3), pp=2, micro_batches=3, constant_bytes=40, buffer_bytes=(8, 0, 24), save=True
    ),
    "two stages, stage 1": spec(
        FROZEN,
        pp=2,
        micro_batches=2,
        order="GPipe",
        stage=1,
        world=2,
        barrier=True,
        aux=["accuracy"],
        norms=True,
    ),
    "three stages, some resident": spec(
        chain(*[(8, 8)] * 5),
        pp=3,
        order=RecomputeAhead(OneFOneB()),
        micro_batches=4,
        barrier=True,
        resident={0, 3},
        update_workspace=30,
        ema=0.5,
    ),
    "two stages, from the host": spec(
        chain(*[(8, 8)] * 4),
        pp=2,
        order="Interleaved1F1B",
        micro_batches=2,
        params_on="host",
        grads_on="host",
        activations_on="host,disk,device",
        world=2,
        stage=3,
        save=True,
    ),
    "two stages, all on the disk": spec(
        chain(*[(8, 8)] * 4),
        **{"pp": 2, "micro_batches": 2, "world": 2, "stage": 3, "barrier": True, "activations_on": "disk"},
        **{
            "state_on": "disk",
            "params_on": "disk",
            "grads_on": "disk",
            "paged": {0, 1, 2, 3},
            "commit": True,
        },
    ),
    "saving": spec(FROZEN, world=2, save=True),
    "saving, barrier": spec(
        TIED, state_format="16bit", precision="fp32", barrier=True, micro_batches=2, save=True
    ),
}

SCHEDULES: dict[str, Callable[[Graph], Plan]] = {
    **{name: schedules.make_schedule(name) for name in schedules.__all__},
    "scattered over four lanes": Scattered(),
    "scattered over two lanes": Scattered(seed=1, num_lanes=2),
    "scattered over four lanes of two threads": Scattered(seed=2, num_threads=2),
    "one lane of two": lambda graph: build(graph, {"all": range(len(graph)), "none": []}),
}

HARDWARE: dict[str, Hardware] = {
    "round": ROUND,
    "no latency": evolve(ROUND, latency=0.0),
    "slow host": evolve(ROUND, rates={**ROUND.rates, "host": 1e3}),
    "all at one byte a second": Hardware("slow", flops=1.0, rates=dict.fromkeys(ROUND.rates, 1.0)),
    "one memory for all": evolve(
        ROUND, shared={"memory": {"host": 1.0, "d2h": 0.2, "h2d": 0.2, "compute": 0.1}}
    ),
}


@cache
def graph_of(recipe: str, name: str) -> Graph:
    """The graph of a recipe on a spec, by their names in the table."""
    return Graph(tuple(RECIPES[recipe](SPECS[name])))


@cache
def plan_of(recipe: str, name: str, schedule: str) -> Plan:
    """That graph under a schedule."""
    return SCHEDULES[schedule](graph_of(recipe, name))


@cache
def met(name: str) -> frozenset[tuple[str, str]]:
    """What a spec of the table sets, and what its buckets are, as (field, value)."""
    of, ours = SPECS[name], ("state_format", "persistent", "in_fp32")
    return frozenset(
        [
            *((x.name, str(getattr(of.settings, x.name))) for x in fields(StepSettings)),
            *((x.name, "given") for x in fields(StepSpec) if x.name not in EACH_HAS and getattr(of, x.name)),
            *((x, str(getattr(b, x))) for b in of.layout.buckets for x in ours),
            *(("deliveries", "several" if b.deliveries[1:] else "one") for b in of.layout.buckets),
        ]
    )


EACH_HAS = {"layout", "costs", "settings", "order", "like", "target_bytes"}


def graph_meets(row: tuple[str, ...]) -> Iterator[Any]:
    """What of a row (recipe, spec) has to be met by day: the spec, and the recipe with each value of a setting."""
    recipe, name = row
    yield name
    yield from product([recipe], met(name))


def plan_meets(row: tuple[str, ...]) -> Iterator[Any]:
    """What of a row (recipe, spec, schedule) has to: the schedule with the recipe and with each setting too."""
    recipe, name, schedule = row
    yield from graph_meets((recipe, name))
    yield schedule, recipe
    yield from ((schedule, setting) for setting, _ in met(name) - met("tied"))


@cache
def graph_rows() -> list[Any]:
    return by_day([*product(RECIPES, SPECS)], graph_meets)


@cache
def plan_rows() -> list[Any]:
    rows = [*product(RECIPES, SPECS, SCHEDULES)]
    rows.sort(key=lambda row: sum(map([*RECIPES, *SPECS, *SCHEDULES].index, row)) % len(SCHEDULES))  # in turn
    return by_day(rows, plan_meets)


def every_graph(test: Callable[..., None] | None = None, **others: tuple[Any, Any]) -> Any:
    """A law of graphs: for those of the table, `by_day`, and for any. `others` that the test takes are pairs: their
    value with the table's graphs, and a strategy for the value with any graph.
    """
    return _law(graph_of, graph_rows, "graph", graphs, test, others)


def every_plan(test: Callable[..., None] | None = None, **others: tuple[Any, Any]) -> Any:
    """So for plans."""
    return _law(plan_of, plan_rows, "plan", plans, test, others)


def _law(
    value_of: Callable[..., Any],
    rows: Callable[[], list[Any]],
    argument: str,
    strategy: Callable[[], st.SearchStrategy[Any]],
    test: Callable[..., None] | None,
    others: dict[str, tuple[Any, Any]],
) -> Any:
    if test is None:
        return partial(_law, value_of, rows, argument, strategy, others=others)
    fixed = {name: value for name, (value, _) in others.items()}
    of_any = given(**{argument: strategy()}, **{name: some for name, (_, some) in others.items()})(test)

    # A case a recipe: most rows take less than pytest does for a case.
    cases = {(x, rest): [pytest.mark.slow] * rest for rest in (False, True) for x in RECIPES}

    @pytest.mark.parametrize(
        "case",
        [
            *(
                pytest.param(case, marks=marks, id=f"{case[0]}{', others' * case[1]}")
                for case, marks in cases.items()
            ),
            pytest.param(None, id="any", marks=pytest.mark.hypothesis),
        ],
    )
    def law(case: tuple[str, bool] | None) -> None:
        if case is None:
            return of_any()
        for row in rows():
            if (row.values[0], bool(row.marks)) == case:
                try:
                    test(**{argument: value_of(*row.values)}, **fixed)
                except BaseException as error:
                    error.add_note(f"of the row {row.values}")
                    raise

    law.__name__, law.__doc__, law.__module__ = test.__name__, test.__doc__, test.__module__
    return law


shapes = st.one_of(
    st.just(()),
    st.just((1,)),
    st.tuples(st.integers(1, 200)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.just((3000,)),
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Segments, int, int]:
    """Segments, bucket size and world: sizes, ties, frozen parameters and empty segments of any kind."""
    num_segments = draw(st.integers(1, 5))
    segments: Segments = [[] for _ in range(num_segments)]
    for n in range(draw(st.integers(1, 8))):
        users = draw(st.sets(st.integers(0, num_segments - 1), min_size=1, max_size=min(3, num_segments)))
        if draw(st.integers(0, 3)):  # most are not tied
            users = {min(users)}
        trainable = n == 0 or draw(st.integers(0, 4)) > 0
        p = Parameter(
            f"p{n}",
            draw(shapes),
            trainable,
            draw(st.integers(0, 2)),
            draw(st.sampled_from(["fp32", "16bit", "muon-8bit", "adafactor-fp32"])),
        )
        for s in users:
            segments[s].append(p)
    bucket_size = draw(st.sampled_from([1, 64, 128, 300, 1024, 10_000]))
    return segments, bucket_size, draw(st.integers(1, 3))


@st.composite
def specs(draw: st.DrawFn) -> StepSpec:
    """Jobs over such layouts."""
    segments, bucket_size, world = draw(layouts())
    stage = draw(st.sampled_from([1, 2, 3]))
    aux = ("accuracy", "perplexity")[: bucket_size % 3]
    return spec(
        segments,
        bucket_size=bucket_size,
        world=world,
        aux=aux,
        recompute=draw(st.tuples(*[st.booleans()] * len(segments))),
        micro_batches=draw(st.integers(1, 3)),
        barrier=draw(st.booleans()),
        slots=draw(st.integers(1, 3)),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        state_format=draw(st.sampled_from(FORMATS)),
        stage=stage,
        group_size=1 if stage == 1 else draw(st.integers(1, 3)),
        params_on="device" if stage == 1 else draw(st.sampled_from(["device", "host"])),
        persistent={f"p{n}" for n in draw(st.sets(st.integers(0, 7)))},
        in_fp32={f"p{n}" for n in draw(st.sets(st.integers(0, 7)))},
        update_on=draw(st.sampled_from(["host", "device", "host,device"])),
        grads_on=draw(st.sampled_from(["device", "host"])),
        activations_on=",".join(draw(st.sampled_from(PLACES))[: len(segments)]),
        shared=draw(st.sampled_from([0, 1, 150])),
        save=draw(st.booleans()),
        ema=draw(st.sampled_from([None, 0.5])),
        update_workspace=draw(st.integers(0, 50)),
        resident=draw(st.frozensets(st.integers(0, 4))),
    )


def graphs() -> st.SearchStrategy[Graph]:
    """Graphs of any recipe on such specs."""
    return st.builds(lambda recipe, j: Graph(tuple(recipe(j))), st.sampled_from([*RECIPES.values()]), specs())


def plans() -> st.SearchStrategy[Plan]:
    """Plans of such graphs under any schedule of the table, or scattered anew."""
    scattered = st.builds(Scattered, st.integers(0, 1000), st.integers(1, 5), st.integers(0, 3))
    schedule = st.one_of(st.sampled_from([*SCHEDULES.values()]), scattered)
    return st.builds(lambda s, graph: s(graph), schedule, graphs())


def hardware() -> st.SearchStrategy[Hardware]:
    """Machines of any proportions."""
    rate = st.floats(1e-3, 1e15)
    rates = st.fixed_dictionaries(dict.fromkeys(ROUND.rates, rate))
    kinds = st.sampled_from([*ROUND.rates])
    shares = st.dictionaries(kinds, st.floats(0, 1, exclude_min=True))
    shared = st.dictionaries(st.sampled_from(["cores", "memory"]), shares)
    handoff = st.one_of(st.just(0.0), st.floats(0, 1e3))
    return st.builds(
        Hardware,
        st.just("made"),
        rate,
        rates,
        st.floats(0, 1e3),
        handoff,
        unified=st.booleans(),
        shared=shared,
        launch=st.floats(0, 1e3),
        issue=st.one_of(st.just({}), st.dictionaries(kinds, st.floats(0, 1e3))),
    )
