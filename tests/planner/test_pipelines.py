"""Plans of several devices: the search against trying everything, and what is said of each device."""

import json
from functools import partial
from itertools import product
from typing import Any

import pytest
from attrs import evolve
from zfunc.schedules import RoundPipe
from zfunc.schedules.stages import cuts_by_cost

import zfunc
from zfunc.cli.commands.plan import PlanSettings, plan_model
from zfunc.cli.main import main
from zfunc.core.bucketing import in_buckets
from zfunc.core.graph import Graph
from zfunc.core.hardware import Hardware
from zfunc.core.pipeline import B, F
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.errors import PlanError
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.gpt_costs import gpt_costs
from zfunc.planner import candidate, pipelines
from zfunc.planner.candidate import PlannedStep
from zfunc.planner.cost_model import CostModel
from zfunc.planner.plan_step import plan_settings
from zfunc.planner.profile import load_profile, replace_figures

ROWS = 8
LARGE_HEAD = GPTConfig(
    vocab_size=16_384, seq_length=256, num_layers=4, hidden_size=512, num_attention_heads=8
)
EQUAL = evolve(LARGE_HEAD, vocab_size=512)
ROOM = load_profile("rtx4090x8").hardware("bf16", 1, 2)
LITTLE = evolve(ROOM, memory={**ROOM.memory, "device": 150 * 10**6})
LESS = evolve(ROOM, memory={**ROOM.memory, "device": 60 * 10**6})
SLOW_LINKS = replace_figures(
    load_profile("rtx3090x4"), {"bytes_per_s.d2h": 8e9, "bytes_per_s.h2d": 8e9}
).hardware("bf16", 1, 2)
SEVERAL = ("Interleaved1F1B", "LoopedBFS", "ZeroBubble", "DualPipeV")
GIVEN: dict[str, Any] = {"devices": 2, "precision": "bf16", "clip_norm": 1.0, "bucket_size": 1 << 22}


def every_cut(num_segments: int, count: int) -> list[list[int]]:
    """All lengths of so many stages."""
    if count == 1:
        return [[num_segments]]
    return [
        [n, *rest]
        for n in range(1, num_segments - count + 2)
        for rest in every_cut(num_segments - n, count - 1)
    ]


def every_order(num_segments: int) -> list[str]:
    """All orders of two devices with at most two stages on each, and RoundPipe with equal cuts of all counts."""
    orders = [
        f"{name}:{','.join(map(str, cut))}"
        for name, count in (*product(("GPipe", "OneFOneB", "ZeroBubble"), (2,)), *product(SEVERAL, (4,)))
        for cut in every_cut(num_segments, count)
    ]
    ones = ",".join("1" * (num_segments - 1)), ",".join("1" * num_segments)
    return [*orders, f"RoundPipe:{ones[0]}/{ones[1]}"]


CASES: dict[str, tuple[GPTConfig, Hardware, dict[str, Any]]] = {
    "large head, slow host links": (LARGE_HEAD, SLOW_LINKS, {}),
    "large head, little room": (LARGE_HEAD, LITTLE, {}),
    "equal layers": (EQUAL, ROOM, {}),
    "equal layers, little room": (EQUAL, LESS, {}),
    # Whose backward has no halves: RoundPipe is the fastest.
    "large head, compiled": (evolve(LARGE_HEAD, num_layers=5), SLOW_LINKS, {"compile_segments": True}),
}


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("equal layers", (8,)),
        *(pytest.param(x, (2, 4, 8), marks=pytest.mark.slow) for x in CASES),
    ],
)
def test_the_search_is_within_5_percent_of_trying_everything(case: str, parts: tuple[int, ...]) -> None:
    """Placement, order, micro-batches and tiers: all of them on two devices. The weights of embedding and head are
    one: without `params_on="host"` they are refused on two devices, which leaves some orders of all."""
    config, machine, more = CASES[case]
    model, given = CostModel(gpt_costs(config, ROWS, zfunc.AdamW(), 1), machine), {**GIVEN, **more}
    found = plan_settings(
        model, StepSettings(order="auto", params_on="auto", activations_on="auto", **given), advice=False
    )
    best = None
    for order, m, params_on, activations_on in product(
        every_order(config.num_layers + 2), parts, ("device", "host"), ("device", "host")
    ):
        places = {"params_on": params_on, "activations_on": activations_on}
        try:
            step = model.step(StepSettings(order=order, micro_batches=m, **places, **given))
        except PlanError:
            continue
        if best is not None and step.work["compute"] > best.seconds:  # no schedule is faster than that
            step.forget_operations()
        elif step.without_operations().fits and (best is None or step.seconds < best.seconds):
            best = step
    assert best is not None
    assert found.fits
    assert found.step_seconds <= 1.05 * best.seconds, f"{found.settings} instead of {best.settings}"


@pytest.mark.usefixtures("without_advice")
def test_a_plan_tells_memory_segments_and_bytes_of_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        *("plan", "--num-layers", "6", "--hidden-size", "256", "--num-attention-heads", "4", "--json"),
        *("--seq-length", "128", "--vocab-size", "512", "--batch-size", "8", "--micro-batches", "8"),
        *("--devices", "2", "--params-on", "host", "--hardware", "rtx3090x4"),
    ]
    assert main([*flags, "--order", "OneFOneB:5,3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["segments"] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert answer["memory"].keys() >= {"device", "device:1", "host"}
    assert answer["bus_bytes"]["d2h"] != answer["bus_bytes"]["d2h:1"] > 0
    busy = answer["lanes"]["compute"] + answer["lanes"]["compute:1"]
    assert answer["bubble"] == pytest.approx(1 - busy / 2)
    assert main([*flags[:-2], "--hardware", "rtx3090x4", "--order", "OneFOneB:5,3", "--with", SHORT]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert {*answer["lacking"]} == {"device", "device:1"}
    assert main([*flags, "--order", "OneFOneB:5,x"]) == 2
    assert "--order: got 'OneFOneB:5,x', expected such as 'OneFOneB:5,4,4,4,4'" in capsys.readouterr().err


SHORT = "bytes.device=6.2e8"


@pytest.mark.usefixtures("without_advice")
def test_gpus_are_divided_into_ranks_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        *("plan", "--num-layers", "6", "--hidden-size", "256", "--num-attention-heads", "4"),
        *("--seq-length", "128", "--vocab-size", "512", "--batch-size", "8", "--params-on", "host"),
        *("--stage", "3", "--gpus", "4", "--order", "auto", "--hardware", "rtx3090x4", "--json"),
    ]
    assert main(flags) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["layouts"]) == 3
    assert answer["world"] * answer["devices"] == 4


def test_few_of_the_orders_of_many_layers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of each leaves out the others, none of which is faster than the fastest by what is worth a change."""
    config = evolve(EQUAL, num_layers=40)
    model = CostModel(gpt_costs(config, ROWS, zfunc.AdamW(), 1), ROOM)
    on_host = {"params_on": "host", "activations_on": "host"}
    step = model.step(StepSettings(order="OneFOneB", micro_batches=ROWS, **on_host, **GIVEN))
    work, made = pipelines.work_of(step), dict[tuple[str, int], float]()
    takes = pipelines._makespan  # pyright: ignore[reportPrivateUsage]

    def timed(step: PlannedStep, order: str, m: int, work: Any) -> float:
        made[order, m] = takes(step, order, m, work)
        return made[order, m]

    monkeypatch.setattr(pipelines, "_makespan", timed)
    found = [*pipelines.best_orders(step, (4,), ())]
    every = {
        (x, m): takes(step, x, m, work)
        for x in {*pipelines._orders(step, work)}  # pyright: ignore[reportPrivateUsage]
        for m in (4, ROWS)
    }
    for asked, seconds in every.items():
        least = pipelines._least_makespan(step, *asked, work)  # pyright: ignore[reportPrivateUsage]
        assert least <= seconds, asked
    assert len(made) < 0.7 * len(every)
    for m in (4, ROWS):
        fastest = min(seconds for (_, n), seconds in every.items() if n == m)
        first = next(x["order"] for x in found if x["micro_batches"] == m)
        assert every[first, m] <= fastest / (1 - pipelines.WORTH)


def test_between_stages_an_input_is_copied_twice_or_once_where_devices_are_peers() -> None:
    step = CostModel(gpt_costs(EQUAL, ROWS, zfunc.AdamW(), 1), ROOM).step(
        StepSettings(order="OneFOneB", params_on="host", **GIVEN)
    )
    work = pipelines.work_of(step)
    once, twice = (
        pipelines._passes(PlannedStep(evolve(step.spec, peers=x), ROOM), "OneFOneB", 1, work)[-1]  # pyright: ignore
        for x in (True, False)
    )
    assert twice == pytest.approx([2 * x for x in once], abs=1)
    assert max(once) > 100


@pytest.mark.parametrize("config", [EQUAL, LARGE_HEAD])
def test_few_cuts_of_a_round_are_as_fast_as_all_pairs_of_cuts(config: GPTConfig) -> None:
    model = CostModel(gpt_costs(evolve(config, num_layers=10), ROWS, zfunc.AdamW(), 1), ROOM)
    on_host = {"params_on": "host", "activations_on": "host"}
    step = model.step(StepSettings(order="RoundPipe", micro_batches=4, **on_host, **GIVEN))
    work = pipelines.work_of(step)
    (*there, last), back = [x[F] for x in work], [x[B] for x in work]
    cuts = (cuts_by_cost(there), cuts_by_cost([*back[:-1], last + back[-1]]))
    texts = product(*([",".join(map(str, x)) for x in of] for of in cuts))
    pairs = [f"RoundPipe:{x}/{y}" for x, y in texts if (x + y).count(",") % 2 == 0]
    few = [x for x in pipelines._orders(step, work) if "/" in x]  # pyright: ignore[reportPrivateUsage]
    assert len(few) < len(pairs) / 4

    def fastest(orders: list[str]) -> float:
        return min(pipelines._makespan(step, x, 4, work) for x in orders)  # pyright: ignore[reportPrivateUsage]

    assert fastest(few) <= fastest(pairs) / (1 - pipelines.WORTH)


def test_a_step_is_the_same_whatever_was_planned_before() -> None:
    """Layouts, meshes and places are found once for all steps that share them."""
    costs = partial(gpt_costs, EQUAL, ROWS, zfunc.AdamW(), 1)
    host = {"params_on": "host", "micro_batches": 2, "order": "RoundPipe"}
    tried: list[dict[str, Any]] = [
        host,
        host | {"activations_on": "host"},
        host | {"state_on": "disk", "defer": True},
        host | {"moments": "8bit"},
        host | {"bucket_size": 1 << 16, "update_on": "host,device"},
        {"micro_batches": 4, "order": "ZeroBubble:2,2,1,1", "params_on": "host"},
    ]
    model = CostModel(costs(), ROOM)
    for changes in (*tried, *tried):
        settings = StepSettings(**{**GIVEN, **changes})
        spec, alone = model.spec(settings), CostModel(costs(), ROOM).spec(settings)
        assert (spec, spec.places) == (alone, alone.places)
        assert candidate.operations_of(spec) == candidate.operations_of(alone)
        for other in (model.spec(StepSettings(**{**GIVEN, **x})) for x in tried):
            moved = evolve(spec, order=other.order, **in_buckets(other.layout, other.settings))
            assert (moved.places, moved.mesh.listed) == (other.places, other.mesh.listed)
    with pytest.raises(PlanError, match="expected one"):
        evolve(
            model.spec(StepSettings(**{**GIVEN, **host})), order=RoundPipe(), settings=StepSettings(**GIVEN)
        )


@pytest.mark.slow
def test_a_model_of_70_billion_on_two_cards_is_searched_with_little_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in operations that are made: the seconds of a machine that others use say little."""
    made, all_of = list[int](), candidate.operations_of

    def counting(spec: StepSpec) -> Graph:
        graph = all_of(spec)
        made.append(len(graph))
        return graph

    monkeypatch.setattr(candidate, "operations_of", counting)
    size = {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "vocab_size": 32_000}
    job = {"seq_length": 1024, "batch_size": 8, "hardware": "rtx4090x8", "devices": 2}
    answer = plan_model(PlanSettings(**size, **job, schedule="auto", order="auto"))
    assert answer.planned.fits
    assert answer.planned.step_seconds < 464
    assert sum(made) < 270_000
