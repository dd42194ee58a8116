"""Segments that are alike are traced once for all tests of a process: that is most of what a short training takes.

Only those of the library's models, of torch's modules and of small_models, and those cut from a module for any
values of its batch: a test with a function of its own may change what that does between two programs, and traces it
for each of them, as a user's program does.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from attrs import evolve
from torch import Tensor
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_flatten

from zfunc.core.spec import StepSpec
from zfunc.engine import compile as compiling
from zfunc.engine.program import passes, program, traced_spec
from zfunc.engine.rows.tiled_vjp import tiled_vjp
from zfunc.engine.stages.stage_context import CompiledSegment
from zfunc.engine.trace import joint_graph, segment_vjp
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.tensor_memory import layouts
from zfunc.models.cut.modules import _run
from zfunc.models.hf import cutting
from zfunc.models.hf.attention import AttentionSettings
from zfunc.planner import traced_costs
from zfunc.runtime import accelerator

SHARED = ("zfunc.models.", "torch.nn.", "small_models")
_calls, _checked = passes.segment_calls, passes.checked
_trace_one, _check = traced_spec._trace_one, traced_spec.check_deterministic
_dispatch_trace = proxy_tensor.dispatch_trace
_functions: dict[Any, list[tuple[Segment, Callable[..., Any]]]] = {}
_cut: dict[Any, Callable[..., Any]] = {}
_shared: set[Callable[..., Any]] = set()
_with_buffers: set[Callable[..., Any]] = set()
_pure: dict[Any, Any] = {}
_checks: dict[Any, Callable[..., Any]] = {}
_passes: dict[Any, segment_vjp.SegmentVJP] = {}
_joints: dict[Any, joint_graph.Joints] = {}
_traces: dict[Any, tuple[Any, Any]] = {}
_init_settings, _stop_before = AttentionSettings.__init__, cutting.stop_before
_stops: dict[Any, Callable[..., Any]] = {}
_at_cut = WeakKeyDictionary[AttentionSettings, str]()


def share_traces() -> None:
    """From now on, in this process."""
    compiling.segment_calls = traced_costs.segment_calls = _shared_calls
    passes.checked, passes.tiled_vjp = _shared_checked, _shared_vjp
    traced_spec._trace_one, traced_spec.check_deterministic = _shared_trace, _shared_check
    proxy_tensor.dispatch_trace = _trace_of_operations
    AttentionSettings.__init__, AttentionSettings.__eq__ = _init_and_note, _same_config
    AttentionSettings.__hash__ = object.__hash__
    cutting.stop_before = _stop_alike


def _trace_of_operations(root: Any, tracer: Any, concrete_args: Any = None) -> Any:
    """Without two methods of nn.Module that a trace sets and resets, which do nothing where operations alone are
    traced: each graph that is kept is a subclass of it, and setting a method walks all of them."""
    if type(tracer) is not proxy_tensor.PythonKeyTracer:  # torch.export's keeps the stack of modules by them
        return _dispatch_trace(root, tracer, concrete_args)
    with mock.patch.object(_symbolic_trace._Patcher, "patch_method", new=_set_no_method):
        return _dispatch_trace(root, tracer, concrete_args)


def _set_no_method(*_: Any, **__: Any) -> None:
    """Instead of `patch_method`."""


def _config_of(settings: AttentionSettings) -> str:
    """All that layers read of it, and not where it was read from."""
    given = settings.config.to_dict()
    return repr(
        {name: x for name, x in given.items() if name not in ("_name_or_path", "transformers_version")}
    )


def _init_and_note(settings: AttentionSettings, *given: Any) -> None:
    _init_settings(settings, *given)
    _at_cut[settings] = _config_of(settings)


def _same_config(mine: AttentionSettings, other: object) -> bool:
    """Of two loads of one model: the same values, when they were cut and now."""
    if mine is other or not isinstance(other, AttentionSettings):
        return mine is other
    if mine._attn_implementation != other._attn_implementation:
        return False
    return _at_cut[mine] == _at_cut[other] == _config_of(mine) == _config_of(other)


def _stop_alike(module: Any) -> None:
    """The hook of a head, the same function under the same number in all of them: it reads nothing of a model."""
    _stop_before(module)
    _, stop = module._forward_pre_hooks.popitem()
    assert stop.__closure__ is None
    module._forward_pre_hooks[-1] = _stops.setdefault(stop.__code__, stop)


def _is_cut(function: Any) -> bool:
    """Whether it is of a cut module, whose trace does not depend on values."""
    traces = function.args[0] if isinstance(function, partial) and function.func is _run else None
    return traces is not None and not (traces.by_value or traces.in_eval)


def _shareable(segment: Segment) -> bool:
    if segment.function in _shared:
        return True
    origin = segment.function if segment.module is None else type(segment.module)
    return origin.__module__.startswith(SHARED)


def _shared_calls(
    segments: Any, options: Any, spec: StepSpec, _joints: Any = None
) -> tuple[CompiledSegment, ...]:
    settings = spec.settings
    way = settings.compile_segments, settings.deterministic, accelerator._GROUPED.get()
    return _calls([_with_earliest(x, way) for x in segments], options, spec)


def _with_earliest(segment: Segment, way: tuple[Any, ...]) -> Segment:
    """`segment` with the function of the first such segment."""
    if _is_cut(segment.function):  # which is one of all segments that are alike
        function = _cut.setdefault((segment.function, way), partial(segment.function))
        _shared.add(function)
        return evolve(segment, function=function)
    if not _shareable(segment):
        return segment
    alike = _functions.setdefault((segment.name, segment.short, way), [])
    for other, function in alike:
        if segment.like(other):
            return evolve(segment, function=function)

    @wraps(segment.function)
    def function(*args: Any) -> Any:
        return segment.function(*args)

    alike.append((segment, function))
    _shared.add(function)
    return evolve(segment, function=function)


def _shared_checked(segment: Segment, last: bool) -> Callable[..., Any]:
    if segment.function not in _shared:
        return _checked(segment, last)
    key = segment.function, last
    if key not in _checks:
        _checks[key] = _checked(segment, last)
        _shared.add(_checks[key])
        if segment.buffers:
            _with_buffers.add(_checks[key])
    return _checks[key]


def _shared_check(module: Any, function: Callable[..., Any], params: Any, inputs: Any, constants: Any) -> Any:
    """That a function is pure is tried once for each layout of what it gets, whatever backward recomputes. New
    buffers are written to those of the program, which has fake tensors of its own."""
    if function not in _shared or function in _with_buffers:
        return _check(module, function, params, inputs, constants)
    leaves, structure = tree_flatten((params, inputs))
    key = function, structure, layouts(leaves)
    if key not in _pure:
        _pure[key] = _check(module, function, params, inputs, constants)
    return _pure[key]


def _shared_vjp(function: Callable[..., Any], options: PassOptions, **how: Any) -> segment_vjp.SegmentVJP:
    """Passes of one function are cut from one trace, however they recompute and whether they move."""
    if function not in _shared:
        return tiled_vjp(function, options, **how)
    how["joints"] = _joints.setdefault((function, options.wrt_input, options.last), {})
    key = function, evolve(options, keys_on_host=False)
    if key not in _passes:
        _passes[key] = tiled_vjp(function, options, **how)
    return _passes[key]


def _shared_trace(owner: program.Program, s: int, inputs: tuple[Any, ...], of_accelerator: bool) -> Any:
    segment, call = owner.segments[s], owner.calls[s]
    if not _shareable(segment):
        return _trace_one(owner, s, inputs, of_accelerator)
    leaves, structure = tree_flatten((call.trained, inputs, segment.constants, call.buffers))
    shapes = tuple((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in leaves)
    pulled = s >= owner.layout.first_trainable
    key = (
        id(call.passes),
        traced_spec._dtypes(owner, s),
        owner.dtype,
        owner.device,
        pulled,
        structure,
        shapes,
        of_accelerator,
        owner.settings.keys_on,
    )
    if key not in _traces:
        trace = _trace_one(owner, s, inputs, of_accelerator)
        _traces[key] = trace, owner.cache.outside.get(id(call.passes))
    trace, facts = _traces[key]
    if facts is not None:
        owner.cache.outside.setdefault(id(call.passes), facts)
    return trace
