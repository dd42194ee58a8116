"""Segments that are alike are traced once for all tests of a process: that is most of what a short training takes.

Only those of the library's models, of torch's modules and of small_models: a test with a function of its own may
change what that does between two programs, and traces it for each of them, as a user's program does.
"""

from typing import Any

from attrs import evolve
from torch.utils._pytree import tree_flatten

from zfunc.core.settings import StepSettings
from zfunc.engine import compile as compiling
from zfunc.engine import program, specialize
from zfunc.engine.segment import Segment
from zfunc.engine.stage_context import CompiledSegment

SHARED = ("zfunc.models.", "torch.nn.", "small_models")
_calls, _trace_one = compiling._calls, specialize._trace_one
_segments: dict[Any, list[tuple[Segment, CompiledSegment]]] = {}
_traces: dict[Any, tuple[Any, Any]] = {}


def share_traces() -> None:
    """From now on, in this process."""
    compiling._calls, specialize._trace_one = _shared_calls, _shared_trace


def _shareable(segment: Segment) -> bool:
    origin = segment.function if segment.module is None else type(segment.module)
    return origin.__module__.startswith(SHARED)


def _shared_calls(
    segments: Any, layout: Any, settings: StepSettings, device: Any
) -> tuple[CompiledSegment, ...]:
    calls = _calls(segments, layout, settings, device)
    how, last = (
        (
            settings.recompute,
            settings.compile_segments,
            settings.device_graphs,
            settings.deterministic,
            settings.moves,
            device,
        ),
        len(calls) - 1,
    )
    return tuple(
        _earliest(segment, call, (*how, s > layout.first_trainable, s == last))
        for s, (segment, call) in enumerate(zip(segments, calls, strict=True))
    )


def _earliest(segment: Segment, call: CompiledSegment, way: tuple[Any, ...]) -> CompiledSegment:
    """`call` with what was traced for the first such segment."""
    if not _shareable(segment):
        return call
    alike = _segments.setdefault((segment.name, tuple(segment.short), way), [])
    for other, known in alike:
        if segment.like(other):
            return evolve(call, passes=known.passes, plain=known.plain)
    alike.append((segment, call))
    return call


def _shared_trace(owner: program.Program, s: int, inputs: tuple[Any, ...], of_accelerator: bool) -> Any:
    segment, call = owner.segments[s], owner.calls[s]
    if not _shareable(segment):
        return _trace_one(owner, s, inputs, of_accelerator)
    leaves, structure = tree_flatten((call.trained, inputs, call.constants))
    shapes = tuple((t.shape, t.stride(), t.dtype) if not isinstance(t, str) else None for t in leaves)
    pulled = s >= owner.layout.first_trainable
    key = (id(call.passes), owner.dtype, pulled, structure, shapes, of_accelerator)
    if key not in _traces:
        trace = _trace_one(owner, s, inputs, of_accelerator)
        _traces[key] = trace, owner.cache.facts.get(id(call.passes))
    trace, facts = _traces[key]
    if facts is not None:
        owner.cache.facts.setdefault(id(call.passes), facts)
    return trace
