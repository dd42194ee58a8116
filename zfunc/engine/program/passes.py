"""The passes of all segments: the forward and backward of each, with checked outputs; equal segments share them."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.core.mesh import Parts
from zfunc.core.pipeline import B, F, R, W
from zfunc.core.spec import StepSpec
from zfunc.engine.rows.tiled_vjp import evaluated_in_tiles, tiled_vjp
from zfunc.engine.stages.outputs import loss_and_aux
from zfunc.engine.stages.stage_context import CompiledSegment
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.vjp import Detached, Joints, SegmentVJP


def segment_calls(
    segments: Sequence[Segment],
    spec: StepSpec,
    devices: Sequence[torch.device],
    joints: dict[str, Joints] | None = None,
    *,
    parts: Parts,
) -> tuple[CompiledSegment, ...]:
    """The segments with their passes; `parts`, as (pass, segment), run apart from backward. Equal segments share
    passes, traced and compiled once; with `joints`, segments recomputed differently share traced joint graphs."""
    settings, layout, last = spec.settings, spec.layout, len(segments) - 1
    compiled = settings.compile_segments
    modes = settings.recompute_modes(len(segments))
    trainable = {span.name for span in layout.spans}
    pairs: list[tuple[Segment, tuple[Any, ...], tuple[SegmentVJP, SegmentVJP, Callable[..., Any]]]] = []
    calls: list[CompiledSegment] = []
    for s, segment in enumerate(segments):
        function = checked(segment, s == last)
        options = modes[s], s > layout.first_trainable, s == last, (W, s) in parts, (R, s) in parts
        pair = next((p for other, same, p in pairs if same == options and segment.like(other)), None)
        if pair is None:
            make = partial(
                tiled_vjp,
                function,
                recompute=modes[s],
                wrt_input=options[1],
                last=s == last,
                moving=settings.moves,
                name=segment.name,
                joints=None if joints is None else joints.setdefault(segment.name, {}),
                tiles=settings.tiles,
                split=options[3],
                ahead=options[4],
                summed=_own(segment.module, "summed_targets"),
                evaluate=segment.evaluation,
            )
            eager = make()
            tiles = 1 if s == last else settings.tiles
            evaluate = evaluated_in_tiles(segment.evaluation, tiles, segment.name)
            pair = make(compiled=True) if compiled else eager, eager, evaluate
            pairs.append((segment, options, pair))
        names = segment.by_short
        used = [n for n in range(len(devices)) if spec.mesh.over_ranks or s in spec.mesh.segments_on(n, F, B)]
        calls.append(
            CompiledSegment(
                segment.name,
                function,
                pair[2] if settings.tiles > 1 else segment.evaluation,
                *pair[:2],
                {short: full for short, full in names.items() if full in trainable},
                {short: full for short, full in names.items() if full not in trainable},
                {n: {short: t.to(devices[n]) for short, t in segment.constants.items()} for n in used},
                {short: t.to("meta") for short, t in segment.buffers.items()},
            )
        )
    return tuple(calls)


def _own(module: nn.Module | None, name: str) -> Any:
    """The attribute `name` of a module or its own class, or None: an inherited one may not fit the class's loss."""
    return None if module is None else {**vars(type(module)), **vars(module)}.get(name)


def checked(segment: Segment, last: bool) -> Callable[..., Any]:
    """The segment's function as its passes run it: outputs are checked, and only the output `y` is differentiated.

    That of the `last` segment returns the loss or `(loss, Detached(names, values))` in fp32: a loss in fp16 would
    overflow at a loss scale of 2**16. A function that changes module buffers returns `(y, Detached buffers)`.
    """

    @wraps(segment.function)
    def function(*args: Any) -> Any:
        y, *changed = segment.function(*args) if segment.buffers else (segment.function(*args),)
        y = _with_detached_aux(segment.name, y) if last else y
        return (y, Detached((), *changed)) if changed else y

    return function


def _with_detached_aux(segment: str, y: Any) -> Any:
    """The last segment's output in fp32: its loss, with auxiliary outputs as one vector in the order of names."""
    loss, aux = loss_and_aux(segment, y)
    if not aux:
        return loss.float()
    values = [
        x.detach().float()
        if isinstance(x, Tensor)
        else torch.full((), x, dtype=torch.float32, device=loss.device)
        for x in aux.values()
    ]
    return loss.float(), Detached(tuple(aux), torch.stack(values))
