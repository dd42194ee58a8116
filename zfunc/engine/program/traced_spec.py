"""A step's spec with costs: the segments traced for a micro-batch, and what their traces say of a step."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import astuple, evolve, fields, has
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from zfunc.core.pipeline import PASSES
from zfunc.core.spec import Origin, PassedOn, SegmentCost, SharedInput, StepSpec
from zfunc.engine.program.program import Program
from zfunc.engine.stages.outputs import aux_names, aux_rows, check_aux_names
from zfunc.engine.trace.batches import CONSTANTS, Batch
from zfunc.engine.trace.cost_trace import Storages, Trace, nbytes, numbered, trace
from zfunc.engine.trace.graph_cuts import Paths
from zfunc.engine.trace.module_buffers import clone_buffers, copy_buffers
from zfunc.engine.trace.purity import check_deterministic
from zfunc.engine.trace.segment_vjp import SegmentWeights, differentiated
from zfunc.engine.trace.tensor_memory import layouts
from zfunc.errors import Message, PlanError, marked, refuse, setting
from zfunc.runtime.accelerator import deterministic_kernels, on_accelerator
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

SHOWN = 3  # names in an error
NOT_FUNCTIONAL = {  # what torch says where it is used: what that is, and what to use instead
    "does not require grad and does not have a grad_fn": (
        "torch.autograd.grad or backward()",
        "use torch.func.grad, which nests",
    ),
    "saved tensor hooks": (
        "torch.utils.checkpoint or other hooks of saved tensors",
        "leave it out, and set recompute, which is 'all' unless set",
    ),
    "must override the setup_context staticmethod": (
        "reentrant torch.utils.checkpoint",
        "leave it out, and set recompute, which is 'all' unless set",
    ),
    "DataDependentOutputException": (
        "a branch on the value of a tensor",
        "write it with torch.where, or move it between segments",
    ),
    "shape_env must not be None": ("a nested tensor", "pad its rows to one length"),
}
FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def traced_spec(
    program: Program, micro: Batch, *, of_accelerator: bool | None = None
) -> tuple[StepSpec, frozenset[int]]:
    """The StepSpec with costs traced for micro-batch `micro`, and the indices of the segments that draw
    random numbers.

    The costs are those on the program's device; `of_accelerator` True or False overrides that: on an
    accelerator, or on the CPU.
    """
    of_accelerator = on_accelerator(program.device) if of_accelerator is None else of_accelerator
    with deterministic_kernels(program.settings.deterministic):  # torch picks some of them while it traces
        traces, random, unused = _trace_all(program, micro, of_accelerator)
    costs: list[SegmentCost] = []
    each = traces, _inputs(program, micro[0], traces), _gradients(program, traces), program.spec.grad_bytes
    for x, given, (gradient, below), grads in zip(*each, strict=True):
        made = {"grads": grads, "below": below}  # regions of their own
        own = {k: sum(made.get(word, 0) for word in kind.makes.split()) for k, kind in PASSES.items()}
        passes = {PASSES[k].verb: cost.beside(own[k]) for k, cost in x.cost.passes.items()}
        costs.append(evolve(x.cost, **given, **gradient, **passes))
    aux, rows = aux_names(traces[-1].out), aux_rows(traces[-1].out)
    names = *aux, *(x.name for x in rows)
    for before, _ in program.cache.costs.values():
        check_aux_names(program.segments[-1].name, names, (*before.aux, *(x.name for x in before.aux_rows)))
    made = {"aux": aux, "aux_rows": rows, "unused": unused}
    spec = evolve(program.spec, costs=tuple(costs), target_bytes=nbytes(micro[1:]), **made)
    if spec.mesh.made_on != program.spec.mesh.made_on:
        got = "other passes than when the program was compiled"
        refuse("order", got, "the same in every call", "draw what is random once, before", PlanError)
    return spec, random


def _trace_all(
    program: Program, micro: Batch, of_accelerator: bool
) -> tuple[list[Trace], frozenset[int], list[str]]:
    """Trace all segments, each on the output of the one before; equal ones once. Returns the traces, the
    indices of segments that draw random numbers, and the names of trained parameters on which the loss does
    not depend. Costs are the CPU's unless `of_accelerator`."""
    seen: dict[Any, Trace] = {}
    traces: list[Trace] = []
    random: set[int] = set()
    x = tree_map_only(Tensor, lambda t: _fake(program, t), micro[0])
    targets = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), micro[1:])
    last = len(program.segments) - 1
    for s, call in enumerate(program.calls):
        leaves, structure = tree_flatten(x)
        _check_inputs(program, s, leaves)
        key = id(call.passes), structure, layouts(leaves), _dtypes(program, s)
        if key not in seen:
            seen[key] = _trace_one(program, s, (x, *targets) if s == last else (x,), of_accelerator)
        made = seen[key]
        traces.append(made)
        random |= {s} if made.random else set()
        x = made.out
    return traces, frozenset(random), _unused(program, [x.paths for x in traces])


def _inputs(program: Program, inputs: Any, traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """For each segment, the fields of its `SegmentCost` that say what is in its input, and in those of other
    segments as well. `inputs` are those of the first segment."""
    given, made = numbered(inputs), traces[:-1]
    memory = _held(program, [{n: (~n, nbytes(t)) for n, t in given.items()}, *(x.memory for x in made)])
    tensors = _origins([{n: ~n for n in given}, *(x.tensors for x in made)])
    found: list[dict[str, Any]] = []
    for x, own, views in zip(traces, memory, tensors, strict=True):
        held = dict(own.values())
        passed_on = (PassedOn(of, size) for of, size in held.items() if of.last > of.first)
        apart = ((n, of) for n, of in views.items() if of.last > of.first and x.alone[n])
        shared = (SharedInput(n, of, x.alone[n]) for n, of in apart)
        found.append(
            {"input_bytes": sum(held.values()), "passed_on": tuple(passed_on), "shared": tuple(shared)}
        )
    return found


def _gradients(program: Program, traces: Sequence[Trace]) -> list[tuple[dict[str, Any], int]]:
    """For each segment, the fields of its `SegmentCost` that say what is in the gradient of its input, and in those
    of other inputs as well; and the bytes of it that its backward makes."""
    found, top = list[tuple[dict[str, Any], int]](), len(traces) - 1
    for at, own in enumerate(
        _held(program, [x.gradients for x in reversed(traces)])
    ):  # from the last segment
        copies, tensors = Counter[tuple[Origin, int]](), differentiated(traces[top - at - 1].out)
        for n, storage in own.items():
            copies[storage] += nbytes(tensors[n])
        passed = tuple(
            PassedOn(Origin(top - of.first, of.leaf, top - of.last), min(copy, size), size)
            for (of, size), copy in copies.items()
            if of.last > of.first
        )
        lone = sum(size for of, size in copies if of.last == of.first)
        fields = {"gradient_bytes": lone + sum(x.nbytes for x in passed), "passed_back": passed}
        found.append((fields, sum(size for of, size in copies if of.first == at)))
    return found[::-1]


def _held(program: Program, memories: Sequence[Storages]) -> list[dict[int, tuple[Origin, int]]]:
    """For each segment, the origin of the storage of each leaf of its input, and the bytes of this storage where it
    was made. `memories` are those of the first input, and of each after it as a `Trace` has them."""
    copied = program.settings.compile_segments == "reduce-overhead"  # what such a pass returns
    origins = _origins([{n: of for n, (of, _) in own.items()} for own in memories], copied=copied)
    room: dict[Origin, int] = {}
    for own, memory in zip(origins, memories, strict=True):  # the first size of each: a part may be passed on
        room = {of: memory[n][1] for n, of in own.items()} | room
    return [{n: (of, room[of]) for n, of in own.items()} for own in origins]


def _origins(found: Iterable[Mapping[int, int]], *, copied: bool = False) -> list[dict[int, Origin]]:
    """For each segment, the origin of each leaf of its input. `found` has for each the number of a leaf of the
    input before, or a negative one, as a `Trace` has them. `copied`: no input has what another has."""
    names: list[dict[int, tuple[int, int]]] = []
    for s, own in enumerate(found):
        known = {} if copied or not names else names[-1]
        names.append({n: known.get(of, (s, ~of)) for n, of in own.items()})
    last = {at: s for s, own in enumerate(names) for at in own.values()}
    return [{n: Origin(*at, last[at]) for n, at in own.items()} for own in names]


def _unused(program: Program, paths: Sequence[Paths]) -> list[str]:
    """Names of the trained parameters on which the loss does not depend. `paths` has, for each output of each
    segment, the weights and inputs that it depends on."""
    used, reached = set[str](), set[str | int]({0})  # outputs by number, of which the loss is one
    for call, own in zip(reversed(program.calls), reversed(paths), strict=True):
        reached = {x for n in reached if isinstance(n, int) for x in own[n]}
        used |= {call.trained[x] for x in reached if isinstance(x, str)}
    return [x.name for x in program.layout.spans if x.name not in used]


def _check_inputs(program: Program, s: int, leaves: list[Any]) -> None:
    """Raise ValueError unless the inputs of segment `s` are real tensors, numbers or None."""
    for t in leaves:
        if not isinstance(t, (Tensor, *CONSTANTS)):
            got, action = f"a {type(t).__name__}", "pass tensors, or close over it"
        elif isinstance(t, Tensor) and t.is_complex():
            got, action = "a complex tensor", "pass torch.view_as_real(x)"
        else:
            continue
        raise ValueError(
            f"segment {program.segments[s].name!r}: got {got} in its input, expected real tensors, numbers or "
            f"None: {action}"
        )


def _fake(program: Program, t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=program.dtype if t.is_floating_point() else t.dtype, device="meta")


def _dtypes(program: Program, s: int) -> tuple[torch.dtype, ...]:
    """The dtype on the device of each parameter of segment `s`, in their order."""
    places, layout = program.spec.places, program.layout
    own = {x.name: places[bucket.index].dtype for bucket in layout.all_buckets for x in bucket.spans}
    return tuple(TORCH_DTYPES[own[p.name]] for p in program.segments[s].parameters)


def _mixed(program: Program, s: int) -> str:
    """Advice at the end of an error message about segment `s` if some of its parameters are fp32 beside
    others in 16 bits; else ""."""
    if not any(x.in_fp32 for x in program.layout.all_buckets):
        return ""
    own = zip(program.segments[s].parameters, _dtypes(program, s), strict=True)
    names = [repr(p.name) for p, x in own if x == torch.float32] or ["none of its parameters"]
    kept = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
    given = ",".join(program.settings.fp32_params)
    by = setting("fp32_params", given) if given else "the model's class"
    return (
        f" ({by} keeps {kept} in fp32: let the code of the segment cast what meets them, or the "
        "segment below what it returns; or leave names out)"
    )


def _trace_one(program: Program, s: int, inputs: tuple[Any, ...], of_accelerator: bool) -> Trace:
    segment, call, device = program.segments[s], program.calls[s], program.device
    dtypes = _dtypes(program, s)
    values = {
        short: torch.empty(p.shape, dtype=dtype, device="meta")
        for short, p, dtype in zip(segment.short, segment.parameters, dtypes, strict=True)
    }
    fixed = {**{short: values[short] for short in call.fixed}, **segment.constants, **call.buffers}
    weights = SegmentWeights({short: values[short] for short in call.trained}, fixed)

    def output(weights: SegmentWeights, inputs: tuple[Any, ...]) -> Any:
        """The segment's output for `inputs`, computed and checked once for each layout, then cached."""
        leaves, structure = tree_flatten(inputs)
        known, key = program.cache.checked, (segment.name, dtypes, structure, layouts(leaves))
        if key not in known:
            params = {**weights.trained, **weights.fixed}
            _, outside = program.cache.outside.setdefault(
                id(call.passes), (segment, segment.outside_of_trace())
            )
            with outside.tracing():
                y = check_deterministic(segment.module, call.function, params, inputs, segment.constants)
            if call.buffers:
                copy_buffers(clone_buffers({x: params[x] for x in call.buffers}), y[1].tensors)
            known[key] = y
        return known[key]

    before, FAKE_LOG.disabled = FAKE_LOG.disabled, True  # 25 lines before the message below
    try:
        passes = call.plain, call.options, weights, inputs
        how: Any = {"device": device, "guess": output, "of_accelerator": of_accelerator}
        return trace(*passes, **how, buffers=call.buffers, fake=program.cache.fake)
    except ValueError as error:
        if f"{segment.name!r}" in str(error):
            raise
        raise ValueError(Message(f"segment {segment.name!r}: {marked(error)}")) from error
    except Exception as error:
        for says, (got, action) in NOT_FUNCTIONAL.items():
            if says in f"{type(error).__name__}: {error}":
                raise ValueError(
                    f"segment {segment.name!r}: got {got} in forward, expected what torch.func can trace and "
                    f"differentiate: {action}"
                ) from error
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else t for t in tree_leaves(inputs)]
        said = f"segment {segment.name!r}: got an error on inputs of shape {shapes}, expected it to accept them: "
        said += f"{type(error).__name__}: {error}{_mixed(program, s)}"
        raise ValueError(Message(said)) from error
    finally:
        FAKE_LOG.disabled = before


def row_tokens(batch: Batch) -> int:
    """The number of tokens in a row of `batch`; 1 if its rows are single elements."""
    rows = [t.shape[1] for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim() > 1]
    return rows[0] if rows else 1


def largest_spec(specs: Sequence[StepSpec]) -> StepSpec:
    """A spec in which each segment has the largest cost and sizes of those in `specs`, of one program."""
    return evolve(
        max(specs, key=lambda x: sum(cost.input_bytes for cost in x.costs)),
        costs=[_largest(of) for of in zip(*(x.costs for x in specs), strict=True)],
        target_bytes=max(x.target_bytes for x in specs),
        unused=[name for name in specs[0].unused if all(name in x.unused for x in specs)],
    )


def _largest(values: Sequence[Any]) -> Any:
    """The largest of numbers; of objects of an attrs class, one with the largest value in each field; of
    tuples of what inputs share, that which all have, with the smallest and the largest size."""
    if isinstance(values[0], tuple):
        ends = {"nbytes": min, "most": max}
        by_name = [{astuple(x, filter=lambda f, _: f.name not in ends): x for x in own} for own in values]
        common = ([own[at] for own in by_name] for at in by_name[0] if all(at in own for own in by_name))
        return tuple(
            evolve(
                of[0], **{k: end(getattr(x, k) for x in of) for k, end in ends.items() if hasattr(of[0], k)}
            )
            for of in common
        )
    if not has(type(values[0])):
        return max(values)
    names = [f.name for f in fields(type(values[0]))]
    return evolve(values[0], **{x: _largest([getattr(v, x) for v in values]) for x in names})
