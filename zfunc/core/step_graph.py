"""The graph of a step without a model: to write, check, time and draw a schedule without torch."""

from typing import Any

from attrs import evolve

from zfunc.core.bucketing import in_buckets, lay_out
from zfunc.core.graph import Graph
from zfunc.core.layout import Parameter
from zfunc.core.pipeline import Order
from zfunc.core.recipes import zero_offload
from zfunc.core.settings import settings_with
from zfunc.core.spec import PassCost, SegmentCost, StepSpec


def step_graph(
    segments: int = 4,
    parameters: int = 12 * 2048**2,
    tokens: int = 4096,
    *,
    world: int = 1,
    order: Order | None = None,
    **settings: Any,
) -> Graph:
    """The graph of a training step of equal segments, which are sizes alone: there is no model.

    Each of the `segments` has so many `parameters`, by default a bucket each. On `tokens` tokens of a micro-batch
    its forward takes 2 FLOPs a parameter and token, its backward 6, as that repeats forward,
    whatever `recompute` says. Its output is that of
    a transformer's layer of 12 n^2 parameters: n numbers a token, 2 bytes each. `world` is the number of ranks,
    `order` that of passes on several `devices`; `settings` are those of `zfunc.compile`, by name, none "auto".

    Raises TypeError for an unknown setting, ValueError for a value out of range.

    >>> graph = step_graph(segments=2, clip_norm=1.0)
    >>> graph.ops[graph.position["global_norm"]].kind
    'host'
    """
    chosen = settings_with(None, {"bucket_size": parameters, **settings})
    state = "fp32-split" if chosen.splits_master else "fp32"
    names = [f"segment{n}" for n in range(segments)]
    layout = lay_out([[Parameter(x, (parameters,), state_format=state)] for x in names], chosen, world)
    forward, output = 2 * parameters * tokens, 2 * tokens * int((parameters / 12) ** 0.5)
    cost = SegmentCost(PassCost(forward), PassCost(3 * forward), input_bytes=output)
    spec = StepSpec(costs=(cost,) * segments, world=world, order=order, **in_buckets(layout, chosen))
    return Graph(zero_offload(evolve(spec, commit=spec.swaps and chosen.commit_every == 1)))
