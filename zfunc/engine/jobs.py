"""From settings to a `StepSpec`: what a recipe has to know, of segments that no memory was taken for.

The invariant: everything about these settings is checked here, for `zfunc.compile` and for planning alike.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from attrs import evolve

from zfunc.core.graph import Graph, Region
from zfunc.core.layout import Layout, make_layout, part_size, resident_buckets
from zfunc.core.ops import SegmentCost, StepSpec
from zfunc.core.regions import WAITING, undecided
from zfunc.engine.cost_trace import nbytes
from zfunc.engine.program import DTYPES, Precision, Recipe, graph_of
from zfunc.engine.segment import Segment
from zfunc.engine.vjp import Recompute
from zfunc.errors import did_you_mean
from zfunc.optim.adamw import AdamW
from zfunc.optim.device_adam import workspace
from zfunc.values import number, whole

MOST_MICRO_BATCHES = 1 << 16  # each is planned, operation by operation


def make_spec(
    segments: Sequence[Segment],
    optimizer: AdamW,
    *,
    precision: Precision,
    clip_norm: float | None,
    micro_batches: int,
    bucket_size: int,
    recompute: Recompute,
    stage: Literal[1, 2],
    world: int,
    grad_slots: int,
    host_slots: int,
    offload_ratio: float | Literal["auto"],
    speculate: int,
    delay_from: int | None,
    on_gpu: bool,
) -> StepSpec:
    """The job of one rank of `world`, with costs of 0 until a batch is known. Arguments are `zfunc.compile`'s.

    Raises ValueError for values that cannot work, alone or together.
    """
    check_name("precision", precision, list(DTYPES))
    whole("micro_batches", micro_batches, 1, MOST_MICRO_BATCHES)
    _counts(1, grad_slots=grad_slots, host_slots=host_slots, bucket_size=bucket_size)
    _counts(0, speculate=speculate)
    if clip_norm is not None:
        number("clip_norm", clip_norm, positive=True, hint="pass None not to clip")
    if offload_ratio != "auto":
        hint = "pass the share of the optimizer's state that is on the host, such as 0.75"
        offload_ratio = number("offload_ratio", offload_ratio, least=0.0, most=1.0, hint=hint)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (1, 2):
        raise ValueError(f"stage: got {stage!r}, expected 1 or 2, as ZeRO numbers them")
    if delay_from is not None:
        _counts(1, delay_from=delay_from)
        if speculate:
            raise ValueError(
                f"speculate: got {speculate} with delay_from={delay_from}, expected one of the two: a delayed "
                "update waits for no norm. Leave speculate out"
            )
    layout = _layout(segments, optimizer, bucket_size, world, offload_ratio)
    last, moments = len(segments) - 1, optimizer.moments
    return StepSpec(
        layout,
        costs=(SegmentCost(),) * len(segments),
        recompute=tuple(recompute == "all" and s != last for s in range(len(segments))),
        element_bytes=DTYPES[precision].itemsize,
        micro_batches=micro_batches,
        barrier=clip_norm is not None or precision == "fp16",
        grad_slots=grad_slots,
        host_slots=host_slots,
        world=world,
        stage=stage,
        constant_bytes=sum(nbytes(s.constants) for s in segments),
        moments=moments,
        send_high_half=moments != "fp32" and precision == "bf16",
        resident=resident_buckets(layout, 1.0 if offload_ratio == "auto" else offload_ratio),
        update_workspace=workspace(max(b.numel for b in layout.buckets) // world, moments) if on_gpu else 0,
        shadows=speculate,
        delayed=delay_from is not None,
    )


def _layout(
    segments: Sequence[Segment], optimizer: AdamW, bucket_size: int, world: int, offload_ratio: Any
) -> Layout:
    """Buckets; where only a share of them is offloaded, enough of them."""
    parameters = [
        [evolve(p, decay=bool(optimizer.decay(p.name, p.shape))) for p in s.parameters] for s in segments
    ]
    trained = {p.name: p.numel for own in parameters for p in own if p.trainable}
    size = part_size(bucket_size, sum(trained.values()), offload_ratio)
    return make_layout(parameters, bucket_size=size, world=world)


def check_recipe(recipe: Recipe, job: StepSpec, stages: Collection[str]) -> None:
    """Raise ValueError unless steps of such a recipe can be run, told of, and saved."""
    for name, of in (("a step", job), ("a step that saves", evolve(job, save=True))):
        graph = graph_of(recipe, of)
        written = {r.buffer for op in graph for r in op.writes}
        needed = ["verdict", "norm", *(["published"] if of.save else [])]
        if missing := [x for x in needed if x not in written]:
            raise ValueError(
                f"recipe: got {name} in which nothing writes {', '.join(missing)}, expected what zero_offload's "
                "decide, global_norm and, with job.save, publish write: keep these operations"
            )
        if unknown := sorted({op.verb for op in graph} - set(stages)):
            raise ValueError(
                f"recipe: got operations {unknown} without a stage, expected a function for each: pass them in "
                "stages"
            )
        _check_waiting(graph)
        for op in undecided(graph):
            raise ValueError(
                f"recipe: got {op}, whose effect leaves the step, with nothing that orders it behind the decision "
                "whether the step counts: let it read the region verdict"
            )


def _check_waiting(graph: Graph) -> None:
    """A gradient of the step before is only there in delayed steps, which have a recipe of their own."""
    written: set[Region] = set()
    for op in graph:
        for r in op.reads:
            if r.buffer in (*WAITING, "verdict") and r not in written:
                raise ValueError(
                    f"recipe: got {op.name}, which reads {r} before anything writes it, expected a step that "
                    "begins with no gradient: for delayed updates pass delay_from"
                )
        written.update(op.writes)
    left = {r for r in written if r.buffer in WAITING}
    for op in graph:
        left -= set(op.reads)
    if left:
        raise ValueError(
            f"recipe: got gradients in {', '.join(sorted(map(str, left)))} that nothing is updated with, expected "
            "every one to be used: for delayed updates pass delay_from"
        )


def check_name(what: str, got: Any, known: list[str]) -> None:
    """Raise ValueError, with the nearest of them, unless `got` is one of the known names."""
    if got not in known:
        raise ValueError(
            f"{what}: got {got!r}, expected one of {', '.join(known)}{did_you_mean(str(got), known)}"
        )


def _counts(least: int, **counts: int) -> None:
    for what, value in counts.items():
        whole(what, value, least)
