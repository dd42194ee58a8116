"""`segments`: any `nn.Module` as segments, by a trace of the module that is cut between its blocks.

A trace is of one set of shapes and dtypes, in training mode or in eval mode. The first trace is of the example;
others are made of a copy of the module without memory, when the first segment gets a batch of other shapes.
"""

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from zfunc.engine.trace.batches import Batch, check_leaves, unmarked
from zfunc.engine.trace.facts import held
from zfunc.engine.trace.model_segments import check_loss
from zfunc.engine.trace.outside import Outside
from zfunc.engine.trace.segment import IDLE, Segment, make_segment
from zfunc.engine.trace.tensor_memory import Values
from zfunc.errors import refuse
from zfunc.models.cut.batch_call import BatchCall, call_of, mark_values
from zfunc.models.cut.called import CalledModel, Loss, without_idle_draws
from zfunc.models.cut.exported_graph import BuffersWrittenError, NotCutError, ValueBranchError
from zfunc.models.cut.inputs_read import find_late, inputs_by_value
from zfunc.models.cut.module_export import ModuleExport, without_values
from zfunc.models.cut.module_traces import ModuleTrace, ModuleTraces, file_of
from zfunc.models.hf.adapters import with_pure_adapters
from zfunc.models.hf.attention import with_static_experts
from zfunc.values import of_type
from zfunc.values import whole as whole_number

PARTS = 8
"""Segments of a model at least, where none was asked for: the device holds two or three of them at a time."""
log = logging.getLogger("zfunc")


def segments(
    model: nn.Module,
    example: Batch | Mapping[str, Any],
    loss: Loss | None = None,
    *,
    most: int | None = None,
) -> tuple[Segment, ...]:
    """Make segments of any module: trace it on `example`, and cut the trace between children of its module
    lists. A child with more than `most` elements of parameters (by default, an eighth of the model's) is also
    cut inside, where the fewest bytes are alive, into parts of at most `most` elements, or of the largest
    part that cannot be cut.

    `example` is a batch as `zfunc.train_step` gets it, of any number of rows, of which only shapes matter: a dict
    of the model's arguments by name, as collators of transformers make it, or `(inputs, targets)`, where inputs are
    a tensor, a tuple of arguments, or a dict. The loss is the model's own: a scalar, or `.loss` of its output; or
    `loss(output, targets)`, with "labels" of a dict as targets.

    Parameters keep the model's names. Tied parameters are trained once, under their first name; frozen parameters
    (`requires_grad=False`) stay frozen. Buffers are constants, but for running statistics. Tensors alive at a cut
    are passed on. Blocks with equal operations are traced and compiled once. A batch of other shapes, a precision,
    and evaluation, in eval mode, cost a trace each, of which 64 are kept. The model is not changed.

    A model whose trace lacks some of its operations, such as a torch.func.grad, becomes one segment, and the log
    says why. Raises ValueError for a branch on data, or an example that does not fit.

    >>> blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> batch = torch.ones(2, 4), torch.ones(2, 4)
    >>> [s.name for s in segments(blocks, batch, nn.functional.mse_loss)]
    ['0', '1']
    """
    return next(cuts(model, example, loss, most=most)).segments


@frozen(eq=False)
class ModuleCut:
    """A module cut into `segments`; `places[s]` is where segment `s` first reads a parameter, as "file:line", and
    `most` the argument of `segments` that makes this cut."""

    segments: tuple[Segment, ...]
    places: list[str]
    most: int


def cuts(
    model: nn.Module,
    example: Batch | Mapping[str, Any],
    loss: Loss | None = None,
    *,
    most: int | None = None,
    planned: bool = False,
) -> Iterator[ModuleCut]:
    """Yield cuts of a module from one trace: first the cut that `segments` makes, then cuts with `most`
    halved each time, until segments get no smaller. Arguments and errors are those of `segments`. If
    `planned`, only costs are read, and the module may be on the meta device."""
    # 1. The model that is called, and what is compared before each step to see whether it has changed.
    of_type("model", model, nn.Module, "an nn.Module")
    check_loss(loss)
    _check_trains_model(loss, model)
    most = None if most is None else whole_number("most", most, least=1)
    traced = _with_buffers(model) if planned else model
    if not planned and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("model: got one on the meta device, expected one with values: build it on the CPU")
    watched = nn.ModuleDict({"model": traced} | ({"loss": loss} if isinstance(loss, nn.Module) else {}))
    source, outside = (watched, held(watched)), Outside(watched, loss)
    pure = without_idle_draws(with_pure_adapters(with_static_experts(traced)))
    called = CalledModel(pure, loss, source=model)
    check_leaves("example", call_of(example, loss is not None)[0])
    # 2. Its first trace; another one if forward writes further buffers, or branches on values of inputs.
    by_value = dict[str, bool]()
    while True:
        read = partial(call_of, has_loss=loss is not None, by_value=by_value)
        call = read(example)[0]
        whole = make_segment("model", called, None, "", called.changing, source)
        limit = most or sum(math.prod(p.shape) for p in whole.parameters) // PARTS
        export = ModuleExport(whole)
        export.called.constants = whole.constants if traced is model else {}  # whose values are real
        traces = ModuleTraces(export, outside, limit, by_value, {**by_value}, called.by_value)
        try:
            with outside.tracing():
                first = traces.of(without_values(call), torch.float32, training=True)
            with outside.tracing():
                find_late(traces, call, first)
            with outside.tracing():
                first = traces.with_late(first, call)
            first.check_functions()
            break
        except BuffersWrittenError as error:
            called.changing |= error.args[0]
        except ValueBranchError:
            if called.by_value:
                raise
            called.by_value, by_value = True, inputs_by_value(traces.export, call)
        except NotCutError as error:
            log.warning("model: one segment, because %s", error)
            names = {x: x for x in (*whole.buffers, *whole.constants)}
            one = evolve(whole, read_batch=read, buffer_names=names, outside=Outside(watched, loss))
            yield ModuleCut((one,), [file_of(traced)], limit)
            return
    if idle := [p.name for p in whole.parameters if p.trainable and p.name not in first.read]:
        log.warning("%s: %s", ", ".join(idle), IDLE)
    for name, p in model.named_parameters():
        if type(p) is not nn.Parameter:
            log.warning("model: forward gets a tensor for %r, which is no %s there", name, type(p).__name__)
    if len(first.pieces) == 1:
        log.warning("model: one segment, because %s", first.whole)
    # 3. Its cuts, finer each time: the first segment compares for all, the last one reads batches.
    try:
        while True:
            segments = _segments_of(traces, first)
            segments[0] = evolve(segments[0], source=source, outside=outside)
            segments[-1] = evolve(segments[-1], read_batch=read)
            yield ModuleCut((*segments,), first.places, traces.most)
            starts = first.like.starts
            while first.like.starts == starts:
                if traces.most <= first.least:
                    return
                finer = max(first.least, traces.most // 2)
                traces = evolve(traces, most=finer, known={}, first=None)
                first = traces.with_late(traces.of(without_values(call), torch.float32, training=True), call)
    finally:
        traces.uncut.clear()


def _check_trains_model(loss: Any, model: nn.Module) -> None:
    """Raise SettingError for a module as `loss` that trains parameters of its own."""
    known = {id(p) for p in model.parameters()}
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if name := next((x for x, p in named if p.requires_grad and id(p) not in known), ""):
        got = f"a {type(loss).__name__} that trains {name!r}"
        refuse("loss", got, "one that trains the model's parameters alone", "call it in forward")


def _with_buffers(model: nn.Module) -> nn.Module:
    """A copy of `model` with zeros for buffers on the meta device, which a trace reads; `model` if it has none."""
    zeros = {id(t): torch.zeros_like(t, device="cpu") for t in model.buffers() if t.is_meta}
    return copy.deepcopy(model, dict[int, Any](zeros)) if zeros else model


# --- segments of a trace ------------------------------------------------------------------------------------


def _segments_of(traces: ModuleTraces, first: ModuleTrace) -> list[Segment]:
    """The segments of a module whose first trace is `first`: one for each of its pieces. The last one also owns the
    parameters that no piece reads."""
    whole, owned, segments = traces.export.whole, set[str](), list[Segment]()
    # What no loss of training depends on stays as it is.
    parameters = {p.name: evolve(p, trainable=p.trainable and p.name in first.read) for p in whole.parameters}
    functions: dict[Any, tuple[Any, Any]] = {}  # training and evaluation, one pair for pieces that are alike
    last = len(first.pieces) - 1
    for s in range(last + 1):
        short = first.short(s)
        weights = {x: parameters[name] for x, name in short.items() if name in parameters}
        buffers = {x: name for x, name in short.items() if name not in parameters}
        alike = (first.first_alike[s], s == last, *short)
        new = partial(_run, traces, s, True), partial(_run, traces, s, False)
        train, evaluate = functions.setdefault(alike, new)
        if s == last:
            read = {p.name for p in weights.values()} | owned
            weights |= {f"unused {x}": p for x, p in parameters.items() if x not in read}
        names = [p.name for p in weights.values()]
        segments.append(
            Segment(
                first.names[s],
                train,
                tuple(weights.values()),
                tuple(weights),
                initial=partial(_initial, whole, [x for x in names if x not in owned]),
                evaluate=evaluate,
                shared=owned.intersection(names),
                origins={x: whole.origins[x] for x in names},
                buffer_names=buffers,
                constants={x: whole.constants[y] for x, y in buffers.items() if y in whole.constants},
                buffers={x: whole.buffers[y] for x, y in buffers.items() if y in whole.buffers},
            )
        )
        owned |= {*names}
    return segments


def _initial(whole: Segment, names: list[str], seed: int) -> Values:
    values = whole.initial(seed)
    return {name: values[name] for name in names}


def _run(traces: ModuleTraces, s: int, training: bool, params: Mapping[str, Tensor], x: Any, *_: Any) -> Any:
    """Run segment `s` of a module, by its piece in the trace for these shapes and mode (`training` or eval)."""
    # 1. The piece, and the tensors alive before it.
    if s == 0:
        if not training and traces.in_eval:
            alone = not isinstance(x, BatchCall)  # inputs of zfunc.apply
            x = unmarked(mark_values(BatchCall(x) if alone else x, traces.in_eval))
            x = x.inputs if alone else x
        dtype = next(t.dtype for t in params.values() if t.is_floating_point())
        trace = traces.of(x, dtype, training=training)
        leaves = tree_leaves(x)
        alive = [leaves[i] for i in trace.inputs]
    else:
        key, place, *alive = x
        trace = traces.by_key(key)
        s = s if place is None else place
    piece, written, tensors, results = trace.pieces[s], [], dict(params), alive
    # 2. Unless the block is not called: its tensors, some in others' dtype, and copies of those that it writes.
    if piece is not None:
        device = next(t.device for t in (*params.values(), *alive) if isinstance(t, Tensor))
        export, short = traces.export, {name: x for x, name in piece.short.items()}
        writes = export.whole.buffers if training else trace.written
        written = [x for x, name in piece.short.items() if name in writes]
        like = {x: short.get(export.called.types.get(name, "")) for x, name in piece.short.items()}
        tensors |= {x: params[x].to(params[other].dtype) for x, other in like.items() if other}
        tensors |= {x: tensors[x].clone() for x in written}
        results = piece.run(device, *(tensors[x] for x in piece.short), *alive)
    # 3. What it passes on: for the next piece, or in the form that the module returns.
    if s < len(trace.pieces) - 1:
        y: Any = (trace.key, s + 1 if trace.apart else None, *results)
    else:
        outputs, spec = trace.output
        values = iter(results)
        y = tree_unflatten([next(values) if x is ... else x for x in outputs], spec)
    return (y, {x: tensors[x] for x in written}) if written and training else y
