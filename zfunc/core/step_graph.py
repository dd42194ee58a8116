"""The graph of a step without a model: to write, check, time and draw a schedule without torch."""

from math import isqrt
from typing import Any

from attrs import evolve

from zfunc.core.bucketing import in_buckets, lay_out
from zfunc.core.graph import Graph
from zfunc.core.layout import Parameter
from zfunc.core.methods import above
from zfunc.core.optimizer_state import MOMENTS, Moments, adam_format
from zfunc.core.pipeline import R
from zfunc.core.recipes import Recipe, recipe_of
from zfunc.core.settings import settings_with
from zfunc.core.spec import PassCost, SegmentCost, StepSpec
from zfunc.errors import refuse
from zfunc.options import one_of
from zfunc.values import whole


def step_graph(
    segments: int = 4,
    parameters: int = 12 * 2048**2,
    tokens: int = 4096,
    *,
    world: int = 1,
    recipe: Recipe | None = None,
    moments: Moments = "fp32",
    **settings: Any,
) -> Graph:
    """The graph of a training step of equal segments, which are sizes alone: there is no model.

    Each of the `segments` has `parameters` elements, by default in one bucket, and Adam's state of them. On
    `tokens` tokens of a micro-batch its forward takes 2 FLOPs a parameter and token, its backward 6, which repeats
    forward, whatever `recompute` says. Its output is that of a transformer's layer of 12 n^2 parameters: n numbers
    a token, 2 bytes each; nothing else that passes keep or allocate counts. `world` is the number of ranks,
    `recipe` as in `zfunc.compile`, `moments` the format of the state; `settings` are those of `zfunc.compile`, by
    name, no place, share or number of tiles "auto".

    Raises TypeError for an unknown setting, ValueError for a value out of range, PlanError for an `order` that is
    none of so many segments and devices.

    >>> graph = step_graph(segments=2, clip_norm=1.0)
    >>> graph.ops[graph.position["global_norm"]].kind
    'host'
    """
    for name, value in (("segments", segments), ("parameters", parameters), ("tokens", tokens)):
        whole(name, value, 1)
    chosen = settings_with(None, {"bucket_size": parameters, **settings})
    if chosen.fits_state:
        refuse(
            "state_on",
            repr(chosen.state_on),
            "the share that it stands for",
            "pass such as 'device:0.25,host'",
        )
    one_of(MOMENTS)("moments", moments)
    state = adam_format(moments, split_master=chosen.splits_master)
    names = [f"segment{n}" for n in range(segments)]
    layout = lay_out([[Parameter(x, (parameters,), state_format=state)] for x in names], chosen, world)
    once, twice, thrice = (PassCost(n * 2 * parameters * tokens) for n in (1, 2, 3))
    output = 2 * tokens * isqrt(parameters // 12)
    cost = SegmentCost(once, thrice, twice, once, input_bytes=output)
    ahead = SegmentCost(once, twice, once, once, once, input_bytes=output)  # forward is repeated apart
    order = above("make_order")(chosen.order)  # refuses an unknown one of one device, too
    several = order if chosen.stages > 1 else None
    spec = StepSpec(costs=(cost,) * segments, world=world, order=several, **in_buckets(layout, chosen))
    costs = [ahead if (R, s) in spec.mesh.parts else cost for s in range(segments)]
    spec = evolve(spec, costs=costs, commit=spec.swaps and chosen.commit_every == 1)
    return Graph((recipe or recipe_of(spec))(spec))
