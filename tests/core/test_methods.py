"""Methods of plans and timelines are the functions of modules above, and `step_graph` is the graph of `compile`."""

from typing import Any

import pytest
from attrs import evolve
from trained import adam_of

import zfunc
from zfunc import schedules
from zfunc.core.graph import KINDS
from zfunc.core.memory_model import peak_memory
from zfunc.core.methods import FUNCTIONS, above
from zfunc.core.simulator import lower_bound, simulate
from zfunc.errors import PlanError
from zfunc.viz.timeline_svg import svg
from zfunc.viz.timeline_text import text

SLOW = zfunc.Hardware("slow", 1e12, dict.fromkeys(KINDS, 1e9))


def test_methods_are_the_functions_above() -> None:
    plan = schedules.Overlapped()(zfunc.step_graph())
    timeline = plan.simulate(SLOW)
    assert timeline == simulate(plan, SLOW) != plan.simulate()
    assert plan.lower_bound(SLOW) == lower_bound(plan.graph, SLOW) <= timeline.seconds
    assert plan.peak_bytes() == {tier: peak.nbytes for tier, peak in peak_memory(plan).items()}
    assert timeline.text(width=80) == text(timeline, 80)
    assert timeline.svg(title="a step") == svg(timeline, title="a step")
    assert plan.verify() is plan
    with pytest.raises(PlanError):
        evolve(plan, waits=((),) * len(plan.graph)).verify()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_is_there(name: str) -> None:
    assert above(name).__name__ == name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_norm": 1.0},
        {"params_on": "host", "stage": 3, "micro_batches": 2},
        {"state_on": "disk", "swap": ["/nowhere"]},
        {"moments": "8bit", "clip_norm": 1.0, "defer": True},
        {"params_on": "host", "stage": 3, "moments": "16bit"},
        {"devices": 2, "micro_batches": 2, "order": "GPipe"},
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_the_graph_of_sizes_is_the_graph_of_a_model_of_these_sizes(
    settings: dict[str, Any], world: int
) -> None:
    """Operation by operation what `zfunc.compile` makes of such a model, but for what a trace counts."""
    import torch

    class Loss(torch.nn.Linear):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) - targets).square().mean()

    size = 64 * 64
    modules = [torch.nn.Linear(64, 64, bias=False), Loss(64, 64, bias=False)]
    segments = [zfunc.segment(f"segment{n}", module) for n, module in enumerate(modules)]
    batch = torch.zeros(2, 64), torch.zeros(2, 64)
    traced = zfunc.plan(
        segments, batch, hardware=SLOW, world=world, advice=False, bucket_size=size, **adam_of(**settings)
    )
    mine = zfunc.step_graph(2, size, world=world, **settings)
    assert [(op.name, op.kind) for op in mine] == [(op.name, op.kind) for op in traced.plan.graph]
    sizes = {str(r): r.nbytes for r in traced.plan.graph.regions if r.role == "state"}
    assert {str(r): r.nbytes for r in mine.regions if r.role == "state"} == sizes


@pytest.mark.parametrize("order", ["OneFOneB", "ZeroBubble", schedules.ORDERS["DualPipeV"], "RoundPipe"])
def test_the_passes_of_any_order_have_the_work_of_one_device(order: Any) -> None:
    """A backward in halves, or recomputed ahead, is no less work."""
    there = {"params_on": "host", "activations_on": "host"} if order == "RoundPipe" else {}
    one, two = (
        zfunc.step_graph(micro_batches=4, **of, **there) for of in ({}, {"devices": 2, "order": order})
    )
    passes = [sum(op.flops for op in graph) for graph in (one, two)]
    assert passes[0] == passes[1] > 0


@pytest.mark.parametrize(
    "given",
    [
        *({"segments": 0}, {"parameters": 1e6}, {"tokens": -1}, {"state_on": "device:auto,host"}),
        {"order": "vertikal"},
    ],
)
def test_a_graph_of_bad_sizes_names_them(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))}: got"):
        zfunc.step_graph(**given)
