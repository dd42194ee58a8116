"""The passes of all segments: the forward and backward of each, with checked outputs; equal segments share them."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from zfunc.core.spec import StepSpec
from zfunc.engine.rows.tiled_vjp import evaluated_in_tiles, tiled_vjp
from zfunc.engine.stages.outputs import loss_and_aux, outputs_of_rows
from zfunc.engine.stages.stage_context import CompiledSegment
from zfunc.engine.trace.joint_graph import Joints
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.segment_vjp import Detached, SegmentVJP


def segment_calls(
    segments: Sequence[Segment],
    options: Sequence[PassOptions],
    spec: StepSpec,
    joints: dict[str, Joints] | None = None,
) -> tuple[CompiledSegment, ...]:
    """For each segment, the functions that a step calls: forward and backward made with the segment's
    `options`. Equal segments with equal options share functions, traced and compiled once. `joints` caches,
    by segment name, graphs that segments share if they differ only in recomputation."""
    trainable = {span.name for span in spec.layout.spans}
    pairs: list[tuple[Segment, PassOptions, tuple[SegmentVJP, SegmentVJP, Callable[..., Any]]]] = []
    calls: list[CompiledSegment] = []
    for segment, own in zip(segments, options, strict=True):
        function = checked(segment, own.last)
        pair = next((p for other, same, p in pairs if same == own and segment.like(other)), None)
        if pair is None:
            make = partial(
                tiled_vjp,
                function,
                name=segment.name,
                joints=None if joints is None else joints.setdefault(segment.name, {}),
                evaluate=segment.evaluation,
                summed=_own(segment.module, "summed_targets"),
            )
            eager = make(evolve(own, compiled=False))
            evaluate = evaluated_in_tiles(segment.evaluation, 1 if own.last else own.tiles, segment.name)
            pair = make(own) if own.compiled else eager, eager, evaluate
            pairs.append((segment, own, pair))
        names = segment.by_short
        calls.append(
            CompiledSegment(
                segment.name,
                function,
                pair[2] if own.tiles > 1 else segment.evaluation,
                *pair[:2],
                own,
                {short: full for short, full in names.items() if full in trainable},
                {short: full for short, full in names.items() if full not in trainable},
                {short: t.to("meta") for short, t in segment.buffers.items()},
            )
        )
    return tuple(calls)


def _own(module: nn.Module | None, name: str) -> Any:
    """The attribute `name` of `module` if the object or its own class defines it; None if it is inherited, as
    it may then belong to another model."""
    return None if module is None else {**vars(type(module)), **vars(module)}.get(name)


def checked(segment: Segment, last: bool) -> Callable[..., Any]:
    """The function of `segment` with checks of its outputs, in which only the output `y` is differentiated.

    The function of the `last` segment returns the loss in fp32 (in fp16 it would overflow at a loss scale of
    2**16), or `(loss, Detached(names, values))` with auxiliary scalars, then perhaps a third result with
    auxiliary tensors that have one entry per row. A function that changes module buffers returns `(y,
    Detached buffers)`.
    """

    @wraps(segment.function)
    def function(*args: Any) -> Any:
        y, *changed = segment.function(*args) if segment.buffers else (segment.function(*args),)
        y = _with_detached_aux(segment.name, y) if last else y
        return (y, Detached((), *changed)) if changed else y

    return function


def _with_detached_aux(segment: str, y: Any) -> Any:
    """The last segment's output `y` with its loss in fp32, its scalar auxiliary outputs as one detached fp32
    vector, and copies of those with one entry per row, in their own dtypes; copies keep no larger tensor in
    memory."""
    loss, aux = loss_and_aux(segment, y)
    if not aux:
        return loss.float()
    rows = outputs_of_rows(aux)
    values = [
        x.detach().float()
        if isinstance(x, Tensor)
        else torch.full((), x, dtype=torch.float32, device=loss.device)
        for name, x in aux.items()
        if name not in rows
    ]
    scalars = Detached(tuple(x for x in aux if x not in rows), torch.stack(values) if values else None)
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in rows.values()]
    return (loss.float(), scalars, Detached(tuple(rows), copies)) if rows else (loss.float(), scalars)
