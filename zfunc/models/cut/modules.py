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
    of_type("model", model, nn.Module, "an nn.Module")
    check_loss(loss)
    own = {id(p) for p in model.parameters()}
    others = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if name := next((x for x, p in others if p.requires_grad and id(p) not in own), ""):
        got = f"a {type(loss).__name__} that trains {name!r}"
        refuse("loss", got, "one that trains the model's parameters alone", "call it in forward")
    most = None if most is None else whole_number("most", most, least=1)
    given = model
    if planned:  # a trace reads buffers
        buffers = {id(t): torch.zeros_like(t, device="cpu") for t in model.buffers() if t.is_meta}
        model = copy.deepcopy(model, {**buffers}) if buffers else model
    elif any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("model: got one on the meta device, expected one with values: build it on the CPU")
    watched = nn.ModuleDict({"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {}))
    source, outside = (watched, held(watched)), Outside(watched, loss)
    called = CalledModel(
        without_idle_draws(with_pure_adapters(with_static_experts(model))), loss, source=given
    )
    read = partial(call_of, has_loss=loss is not None)
    check_leaves("example", example)
    call = read(example)[0]
    names = None
    while True:
        whole = make_segment("model", called, None, "", called.changing, source)
        limit = most or sum(math.prod(p.shape) for p in whole.parameters) // PARTS
        export = ModuleExport(whole)
        traces = ModuleTraces(export, outside, limit, names or {}, {**(names or {})})
        try:
            with outside.tracing():
                first = traces.of(without_values(call), torch.float32, training=True)
                find_late(traces, call, first)
                first = traces.with_late(first, call)
            first.check_functions()
        except BuffersWrittenError as error:
            called.changing |= error.args[0]
        except ValueBranchError:
            if names is not None:
                raise
            called.by_value, names = True, inputs_by_value(export, call)
            read = partial(call_of, has_loss=loss is not None, by_value=names)
            call = read(example)[0]
        except NotCutError as error:
            log.warning("model: one segment, because %s", error)
            names = {x: x for x in (*whole.buffers, *whole.constants)}
            one = evolve(whole, read_batch=read, buffer_names=names, outside=Outside(watched, loss))
            yield ModuleCut((one,), [file_of(model)], limit)
            return
        else:
            break
    if idle := [p.name for p in whole.parameters if p.trainable and p.name not in first.read]:
        log.warning("%s: %s", ", ".join(idle), IDLE)
    if len(first.pieces) == 1:
        log.warning("model: one segment, because %s", first.whole)
    try:
        while True:
            made = _segments_of(traces, first)
            made[0] = evolve(made[0], source=source, outside=outside)  # which looks at them for all
            made[-1] = evolve(made[-1], read_batch=read)
            yield ModuleCut((*made,), first.places, traces.most)
            known = first.starts
            while first.starts == known:
                if traces.most <= first.least:
                    return
                finer = max(first.least, traces.most // 2)
                traces = evolve(traces, most=finer, known={}, first=None)
                first = traces.with_late(traces.of(without_values(call), torch.float32, training=True), call)
    finally:
        traces.uncut.clear()


# --- segments of a trace ------------------------------------------------------------------------------------


def _segments_of(traces: ModuleTraces, first: ModuleTrace) -> list[Segment]:
    whole, owned, made = traces.export.whole, set[str](), list[Segment]()
    # What no loss of training depends on stays as it is.
    parameters = {p.name: evolve(p, trainable=p.trainable and p.name in first.read) for p in whole.parameters}
    functions: dict[Any, tuple[Any, Any]] = {}
    for s in range(len(first.pieces)):
        short = first.short(s)
        own = {x: parameters[name] for x, name in short.items() if name in parameters}
        full = {x: name for x, name in short.items() if name not in parameters}
        alike = (first.first_alike[s], s == len(first.pieces) - 1, *short)
        if alike not in functions:
            functions[alike] = (
                partial(_run, traces, s, True),
                partial(_run, traces, s, False),
            )
        train, evaluate = functions[alike]
        made.append(
            Segment(
                first.names[s],
                train,
                tuple(own.values()),
                tuple(own),
                initial=partial(_initial, whole, [p.name for p in own.values() if p.name not in owned]),
                evaluate=evaluate,
                shared=frozenset(p.name for p in own.values() if p.name in owned),
                origins={p.name: whole.origins[p.name] for p in own.values()},
                buffer_names=full,
                constants={x: whole.constants[name] for x, name in full.items() if name in whole.constants},
                buffers={x: whole.buffers[name] for x, name in full.items() if name in whole.buffers},
            )
        )
        owned |= {p.name for p in own.values()}
    unused = {x: p for x, p in parameters.items() if x not in owned}
    last = made[-1]
    made[-1] = evolve(
        last,
        parameters=(*last.parameters, *unused.values()),
        short=(*last.short, *(f"unused {x}" for x in unused)),
        initial=partial(
            _initial, whole, [p.name for p in last.parameters if p.name not in last.shared] + [*unused]
        ),
    )
    return made


def _initial(whole: Segment, names: list[str], seed: int) -> Values:
    values = whole.initial(seed)
    return {name: values[name] for name in names}


def _run(traces: ModuleTraces, s: int, training: bool, params: Mapping[str, Tensor], x: Any, *_: Any) -> Any:
    """Run segment `s` of a module, by its piece in the trace for these shapes and mode (`training` or eval)."""
    if s == 0:
        if not training and traces.in_eval:
            alone = not isinstance(x, BatchCall)  # inputs of zfunc.apply
            x = unmarked(mark_values(BatchCall(x) if alone else x, traces.in_eval))
            x = x.inputs if alone else x
        dtype = next(t.dtype for t in params.values() if t.is_floating_point())
        trace = traces.of(x, dtype, training=training)
        leaves = tree_leaves(x)
        alive = [leaves[i] for i in trace.given]
    else:
        key, place, *alive = x
        trace = traces.by_key(key)
        s = s if place is None else place
    piece = trace.pieces[s]
    if piece is None:
        return (x[0], s + 1, *alive)
    device = next(t.device for t in (*params.values(), *alive) if isinstance(t, Tensor))
    tensors = dict(params)
    changing = {x: name for x, name in piece.short.items() if name in traces.export.whole.buffers}
    short = {name: x for x, name in piece.short.items()}
    like = {x: short.get(traces.export.called.types.get(name, "")) for x, name in piece.short.items()}
    tensors |= {x: params[x].to(params[other].dtype) for x, other in like.items() if other}
    tensors |= {x: tensors[x].clone() for x in changing}
    results = piece.run(device, *(tensors[x] for x in piece.short), *alive)
    if s < len(trace.pieces) - 1:
        y: Any = (trace.key, s + 1 if trace.apart else None, *results)
    else:
        outputs, spec = trace.output
        found = iter(results)
        y = tree_unflatten([next(found) if x is ... else x for x in outputs], spec)
    return (y, {x: tensors[x] for x in changing}) if changing and training else y
