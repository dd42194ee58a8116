"""`segments`: any `nn.Module` as segments, by a trace of the module that is cut between its blocks.

A trace is of one set of shapes and dtypes, in training mode or in eval mode. The first trace is of the example;
others are made of a copy of the module without memory, when the first segment gets a batch of other shapes.
"""

import contextvars
import copy
import logging
import math
import os
import random
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from zfunc.core.layout import Parameter
from zfunc.engine.trace.batches import Batch, unmarked
from zfunc.engine.trace.facts import Facts, first_change, held
from zfunc.engine.trace.graph_cuts import alone
from zfunc.engine.trace.module_buffers import changed_by_forward
from zfunc.engine.trace.purity import SEEDED
from zfunc.engine.trace.segment import (
    NO_LOSS,
    Segment,
    Values,
    check_loss,
    deep_copy,
    make_segment,
    tensors_held,
)
from zfunc.engine.trace.traced_passes import MAX_TRACES
from zfunc.errors import SettingError, refuse, setting
from zfunc.models.cut.called import (
    BatchCall,
    CalledModel,
    Loss,
    call_of,
    lacks_targets,
    mark_values,
    takes_inputs_alone,
    without_idle_draws,
)
from zfunc.models.cut.gradients import gradient_graphs
from zfunc.models.cut.pieces import ModulePiece, module_piece
from zfunc.models.cut.spans import (
    BRANCH,
    REGIONS,
    BuffersWrittenError,
    CutGraph,
    NotCutError,
    ValueBranchError,
    blocks_of,
    cut_graph,
    place_of,
)
from zfunc.models.cut.vmap import expand_vmaps
from zfunc.models.hf.adapters import with_pure_adapters
from zfunc.models.hf.attention import with_static_experts
from zfunc.runtime.rng import fold_seed
from zfunc.values import of_type
from zfunc.values import whole as whole_number

BRANCHES = (
    "DataDependentOutput",
    "GuardOnDataDependent",
    "Unbacked",
    "unbacked",
    "data-dependent",
    "_local_scalar_dense",
    "but got FakeTensor",
)
IN_EVAL = -1  # the key of the example in eval mode, which is cut for what it reads alone
PARTS = 8
"""Segments of a model at least, where none was asked for: the device holds two or three of them at a time."""
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "concurrent")
_LOUD = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export._trace"
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

    A model whose trace lacks some of its operations, such as an autograd.Function's own backward, becomes one
    segment, and the log says why. Raises ValueError for a branch on data, or an example that does not fit.

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
    if planned:  # a trace reads buffers
        buffers = {id(t): torch.zeros_like(t, device="cpu") for t in model.buffers() if t.is_meta}
        model = copy.deepcopy(model, {**buffers}) if buffers else model
    elif any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("model: got one on the meta device, expected one with values: build it on the CPU")
    called = CalledModel(without_idle_draws(with_pure_adapters(with_static_experts(model))), loss)
    read = partial(call_of, has_loss=loss is not None)
    call = read(example)[0]
    written, names = set[str](), None
    while True:
        whole = make_segment("model", called, None, "", sorted(written))
        limit = most or sum(math.prod(p.shape) for p in whole.parameters) // PARTS
        types = changed_by_forward("model", called)[1]
        traces = ModuleTraces(whole, limit, tuple(whole.buffers), types, names or {}, {**(names or {})})
        try:
            first = traces.of(_without_values(call), torch.float32, training=True)
        except BuffersWrittenError as error:
            written |= error.args[0]
        except ValueBranchError:
            if names is not None:
                raise
            called = CalledModel(called.own[0], loss, by_value=True)
            traces = evolve(traces, whole=make_segment("model", called, None, "", sorted(written)))
            names = _inputs_read(traces, call)
            read = partial(call_of, has_loss=loss is not None, by_value=names)
            call = read(example)[0]
        except NotCutError as error:
            log.warning("model: one segment, because %s", error)
            names = {x: x for x in (*whole.buffers, *whole.constants)}
            yield ModuleCut((evolve(whole, read_batch=read, buffer_names=names),), [_file_of(model)], limit)
            return
        else:
            break
    _find_late(traces, call, first)
    first = traces.with_late(first, call)
    if len(first.pieces) == 1:
        log.warning("model: one segment, because %s", first.whole)
    try:
        while True:
            *before, last = _segments_of(traces, first)
            yield ModuleCut((*before, evolve(last, read_batch=read)), first.places, traces.most)
            known = first.starts
            while first.starts == known:
                if traces.most <= first.least:
                    return
                finer = max(first.least, traces.most // 2)
                traces = evolve(traces, most=finer, known={}, first=None)
                first = traces.with_late(traces.of(_without_values(call), torch.float32, training=True), call)
    finally:
        traces.uncut.clear()


def _inputs_read(traces: "ModuleTraces", call: BatchCall) -> dict[str, bool]:
    """The integer inputs of `call` on whose values a trace depends, by name: False if on all values, which is
    logged; True if only on how many elements masks made of the input select."""
    values, counted, _ = traces.read_by(_numbers_marked(call), training=True, by_value=True)
    for name, place in values.items():
        log.warning(
            "model: the values of %s decide shapes or a branch %s: each other ones cost a trace, of which %d are "
            "kept; compute what depends on many in the collator",
            *(name.removeprefix(".inputs"), place, MAX_TRACES),
        )
    return {name: name not in values for name in (*values, *counted)}


def _numbers_marked(call: BatchCall) -> Any:
    """`call` for a trace, with the values of all its integer inputs known."""
    given = ((keystr(path), unmarked(t)) for path, t in tree_flatten_with_path(call)[0])
    numbers = {name: True for name, t in given if isinstance(t, Tensor) and not t.is_floating_point()}
    return _without_values(mark_values(call, numbers))


def _find_late(traces: "ModuleTraces", call: BatchCall, first: "ModuleTrace") -> None:
    """Run the module of `traces` on the example `call` in eval mode, and set what that reads and training mode,
    whose trace is `first`, does not: `traces.in_eval`, `traces.late`. Where it fails, evaluation will say why."""
    with suppress(ValueError):
        try:
            *_, read = traces.read_by(_without_values(call), training=False, by_value=bool(traces.by_value))
        except ValueBranchError:
            values, counted, read = traces.read_by(_numbers_marked(call), training=False, by_value=True)
            traces.in_eval |= {name: name not in values for name in (*values, *counted)}
        traces.late = read - first.read - {*traces.changing}


def _file_of(model: nn.Module) -> str:
    """The file that defines the class of `model`; the name of its module if that has no file."""
    home = type(model).__module__
    return getattr(sys.modules.get(home), "__file__", None) or home


class _HooksRefused(TorchFunctionMode):
    """A mode in which a gradient hook on a tensor, which a trace would lose, raises NotCutError."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise NotCutError("forward registers a gradient hook on a tensor, which a trace would lose")
        return func(*args, **(kwargs or {}))


class _TensorsRead(TorchFunctionMode):
    """A mode that notes in `read` the first names of the parameters and buffers of `module` that functions get."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        own = (*module.named_parameters(), *module.named_buffers())
        self.names, self.read = {id(t): name for name, t in own}, set[str]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.read |= {self.names[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self.names}
        return func(*args, **(kwargs or {}))


@frozen(eq=False)
class ModuleTrace:
    """A module traced and cut for one set of shapes, `key` of its cache, as `pieces` in order; `given` are
    the indices of the input leaves that the graph reads.

    `first_alike[s]` is the index of the first piece equal to piece `s`. `apart` is true if this trace differs
    in pieces that the module's first trace has equal.
    """

    key: int
    names: list[str]
    pieces: list[ModulePiece | None]  # None: a block that is not called
    given: list[int]
    output: Any  # of the last piece: the places of its results in what the module returns
    first_alike: list[int]
    whole: str  # why it is one piece
    starts: frozenset[str]  # parameters before which a block is cut
    least: int  # elements of parameters of the largest part that cannot be cut
    places: list[str]  # where each piece first reads a parameter
    apart: bool = False
    late: list[dict[str, str]] = field(factory=list)  # by piece, as `short`; of the first trace

    @property
    def read(self) -> set[str]:
        """The names of the parameters and buffers that the pieces read."""
        return {name for p in self.pieces if p is not None for name in p.short.values()}

    def with_late(self, other: "ModuleTrace", late: set[str]) -> "ModuleTrace":
        """This trace, whose pieces also have the tensors `late` that those of `other`, of eval mode, read."""
        other = other.with_places(self.names)
        if other.names != self.names:
            return self
        read = (p.short.items() if p is not None else () for p in other.pieces)
        return evolve(self, late=[{x: name for x, name in own if name in late} for own in read])

    def short(self, s: int) -> dict[str, str]:
        """The names of the parameters and buffers that piece `s` reads, in eval mode too, by short name."""
        piece = self.pieces[s]
        return {**(piece.short if piece is not None else {}), **(self.late[s] if self.late else {})}

    def with_places(self, names: list[str]) -> "ModuleTrace":
        """This trace with its pieces at the places of `names`, None for a name it lacks; unchanged if its own
        names come in another order."""
        if [x for x in names if x in self.names] != self.names or self.names[-1] != names[-1]:
            return self
        at = [self.names.index(x) if x in self.names else None for x in names]
        if at[0] is None:
            return self
        alike = [s if n is None else at.index(self.first_alike[n]) for s, n in enumerate(at)]
        pieces = [None if n is None else self.pieces[n] for n in at]
        return evolve(self, names=names, pieces=pieces, first_alike=alike)


@define(eq=False)
class ModuleTraces:
    """The traces of a module by key, of which the last 64 are kept."""

    whole: Segment
    most: int  # elements of parameters of a segment that can be cut
    changing: tuple[str, ...]
    types: dict[str, str]
    by_value: Mapping[str, bool]  # inputs on whose values a trace in training depends, as of `mark_values`
    in_eval: dict[str, bool]  # the same, in eval mode
    late: set[str] = field(factory=set)  # names of what eval mode alone reads
    known: dict[int, ModuleTrace] = field(factory=dict)
    first: ModuleTrace | None = None
    lock: Any = field(factory=threading.RLock)
    uncut: dict[int, Any] = field(factory=dict)  # by key, what cuts the graphs of the example

    def with_late(self, first: ModuleTrace, call: BatchCall) -> ModuleTrace:
        """The trace `first` of the example `call`, with what its pieces read in eval mode alone."""
        if self.late:
            x = _without_values(mark_values(call, self.in_eval))
            with suppress(ValueError, NotCutError, BuffersWrittenError):  # which evaluation will raise
                other = _in_thread(self._trace, IN_EVAL, x, torch.float32, False)
                self.first = self.known[first.key] = first.with_late(other, self.late)
        return self.first or first

    def of(self, x: Any, dtype: torch.dtype, *, training: bool) -> ModuleTrace:
        """The module's trace for inputs like `x`, parameters of `dtype`, and train or eval mode; cached."""
        leaves, structure = tree_flatten(x)
        facts = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else (type(t), t) for t in leaves]
        key = fold_seed(training, dtype, str(structure), facts) >> 2
        with self.lock:
            found = self.known.pop(key, None) or self._made(key, x, dtype, training)
            self.first = self.first or found
            self.known[key] = found
            if len(self.known) > MAX_TRACES:
                del self.known[next(iter(self.known))]
        return found

    def by_key(self, key: int) -> ModuleTrace:
        """The module's trace under `key`, which the first segment passes on after it has looked the trace up."""
        with self.lock:
            found = self.known[key] = self.known.pop(key)
            return found

    def _made(self, key: int, x: Any, dtype: torch.dtype, training: bool) -> ModuleTrace:
        mode = "training" if training else "eval mode"
        try:
            made = _in_thread(self._trace, key, x, dtype, training)
        except (NotCutError, BuffersWrittenError) as error:
            if self.first is None:
                raise
            why = f"buffers are written: {error}" if isinstance(error, BuffersWrittenError) else str(error)
            got = f"a batch that cannot be cut in {mode} as the example is ({why})"
            raise ValueError(f"model: got {got}, expected operations like those of the example") from error
        first = self.first or made
        if made.names != first.names:  # some blocks may not be called, as in eval mode
            made = made.with_places(first.names)
        if made.names != first.names or any(
            p and p.short.items() - first.short(s).items() for s, p in enumerate(made.pieces)
        ):
            got = f"a batch for which it runs other blocks or reads other parameters in {mode}"
            do = "pass a batch of this shape as the example"
            if not training:
                do = "a block may read there what it trains and what no block trains, or evaluate the module itself"
            raise ValueError(f"model: got {got}, expected those of the example: {do}")
        # Else the functions of blocks that are alike in the first trace need to be told their place.
        return evolve(
            made,
            apart=any(made.first_alike[s] != made.first_alike[n] for s, n in enumerate(first.first_alike)),
        )

    def _trace(self, key: int, x: Any, dtype: torch.dtype, training: bool) -> ModuleTrace:
        cut_in = self.uncut.get(key) or self._uncut(x, dtype, training)
        if self.first is None or key == IN_EVAL:
            self.uncut[key] = cut_in
        starts, read = (self.first.starts, self.first.read) if self.first else (None, None)
        assert self.whole.module is not None
        blocks = blocks_of(self.whole.module.own[0])
        return self._pieces(key, cut_in(blocks, starts=starts, read=read, most=self.most))

    def _uncut(self, x: Any, dtype: torch.dtype, training: bool) -> Any:
        """Export the module's graph for inputs like `x`, weights in `dtype`; returns a partial of `cut_graph`
        that lacks `blocks`, `most` and `starts`."""
        # 1. The module with weights that have no memory, on an input without any.
        mode, fakes, inputs = self._fake_tensors(x, dtype)
        trained = {p.name for p in self.whole.parameters if p.trainable}
        buffers = self._buffers(dtype)
        module = _with_tensors(self.whole, fakes, buffers)
        if not training:
            module.eval()
            module.by_value = bool(self.in_eval)
        # 2. Its graph, cut.
        drawn = _generator_states()
        with alone(), _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes that are views of parameters
            try:
                exported = torch.export.export(module, (inputs,), strict=False)
            except Exception as error:
                if reason := data_dependent(error):
                    raise ValueBranchError(
                        f"model: got a branch on the value of a tensor {reason}, {BRANCH}"
                    ) from error
                with mode:
                    self._try(fakes | buffers, inputs, dtype)
                reason = str(error).strip().partition("\n")[0][:300]
                if found := re.search(r"Found <class '(\S+)'> in output", reason):
                    do = "return a dict or a tuple, or, for a dataclass, call torch.export.register_dataclass"
                    raise NotCutError(
                        f"it returns a {found[1]}, of which torch knows no tensors: {do}"
                    ) from error
                raise NotCutError(
                    f"torch.export cannot trace it ({type(error).__name__}: {reason})"
                ) from error
        if _generator_states() != drawn:
            raise ValueError(
                f"model: got random numbers from Python's random module or numpy.random, expected torch's: {SEEDED}"
            )
        specs = exported.graph_signature.output_specs
        if assigned := {x.target for x in specs if x.kind.name == "BUFFER_MUTATION"} - {*self.changing}:
            raise BuffersWrittenError(assigned)
        if {x.kind.name for x in specs} != {"USER_OUTPUT"}:
            raise NotCutError("forward assigns to a buffer: write into it in place (copy_)")
        expand_vmaps(exported)
        cut_in = partial(
            cut_graph,
            exported,
            names=_first_names(module),
            trained=trained,
            changed={*self.changing},
        )
        # 3. Whether the graph has the module's own gradients.
        if training:
            with alone(), mode, _compiling_state_context():
                self._compare(cut_in(set(), starts=frozenset(), most=self.most), fakes, inputs, dtype)
        return cut_in

    def _fake_tensors(self, x: Any, dtype: torch.dtype) -> tuple[FakeTensorMode, Values, Any]:
        """Make a mode of fake tensors (shapes without memory), and in it the module's parameters in `dtype`
        by short name, and inputs like `x`."""
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        buffers = {**self.whole.constants, **self.whole.buffers}
        types = {x: buffers[own].dtype for x, own in self.types.items() if own in buffers}
        with mode:
            fakes = {
                x: torch.empty(p.shape, dtype=types.get(x, dtype), device="cpu") for x, p in self._by_short()
            }
            inputs = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), x)
        return mode, fakes, inputs

    def _buffers(self, dtype: torch.dtype) -> Values:
        """The module's buffers by name; a buffer that takes its dtype from a parameter is in `dtype`."""
        own = {**self.whole.constants, **self.whole.buffers}
        return {x: t if self.types.get(x, x) in own else t.to(dtype) for x, t in own.items()}

    def read_by(
        self, x: Any, *, training: bool, by_value: bool
    ) -> tuple[dict[str, str], dict[str, str], set[str]]:
        """For inputs `x`, of which those in BySample are known if `by_value`, in training or eval mode: two dicts
        from name to text "at file:line", of inputs whose values forward reads, and of inputs that it uses as
        masks; and the names of the parameters and buffers that it reads. Raises ValueBranchError for a branch on
        any other value."""
        return _in_thread(self._read_by, x, training, by_value)

    def _read_by(self, x: Any, training: bool, by_value: bool) -> Any:
        mode, fakes, inputs = self._fake_tensors(x, torch.float32)
        buffers = {x: t.clone() for x, t in self._buffers(torch.float32).items()}  # which forward may write
        module = _with_tensors(self.whole, fakes, buffers)
        if not training:
            module.eval()
        module.by_value, found = by_value, (dict[str, str](), dict[str, str]())
        module.read = lambda name, count: found[count].setdefault(name, _place_in(traceback.extract_stack()))
        # A check of values, which no trace keeps, reads none.
        checks = [patch.object(torch, x, lambda *_, **__: None) for x in dir(torch) if x.startswith("_check")]
        with alone(), mode, _compiling_state_context(), _quiet(), ExitStack() as stack:
            for check in checks:
                stack.enter_context(check)
            try:
                with _TensorsRead(module) as tensors:
                    module(inputs)
            except Exception as error:
                if reason := data_dependent(error):
                    raise ValueBranchError(
                        f"model: got a branch on the value of a tensor {reason}, {BRANCH}"
                    ) from error
                got = f"values that do not fit the model ({type(error).__name__} {_place(error)}: {error})"
                refuse("example", got, "a real batch", "the model branches on values", cause=error)
        return *found, tensors.read

    def _try(self, params: Values, inputs: Any, dtype: torch.dtype) -> None:
        """Run the module with `params`, of `dtype`, on `inputs`; raises ValueError for the example, or the model in
        `dtype`, if this fails."""
        try:
            self.whole.function(params, inputs, skeleton=_uncalled(self.whole))
        except Exception as error:
            assert self.whole.module is not None
            model, loss = self.whole.module.own
            if loss is None and takes_inputs_alone(model, inputs):
                got = f"none with a {type(model).__name__}, whose forward takes the inputs alone"
                refuse("loss", got, *NO_LOSS, cause=error)
            if isinstance(error, SettingError) and error.names == ("loss",):
                raise
            said = f"{type(error).__name__} {_place(error)}: {error}"
            if dtype != torch.float32:  # the example's trace was
                kind = str(dtype).removeprefix("torch.")
                got = f"an error of its parameters and inputs in {kind} ({said}); buffers keep their dtype"
                do = f"cast what meets them (x.to(weight.dtype)), or pass {setting('precision', 'fp32')}"
                refuse("model", got, f"code that runs in {kind}", do, cause=error)
            given = "batch" if self.first else "example"
            if loss is not None and lacks_targets(loss, inputs):
                got = f"no targets for {getattr(loss, '__name__', 'the loss')}, a loss of (output, targets)"
                refuse(
                    given, got, "(inputs, targets)", "pass both, or a loss of the output alone", cause=error
                )
            got, expected = f"one that does not fit the model ({said})", "a batch that it takes"
            refuse(given, got, expected, "a dict of its arguments, or (inputs, targets)", cause=error)

    def _compare(self, uncut: CutGraph, fakes: Values, inputs: Any, dtype: torch.dtype) -> None:
        """Raise NotCutError if the autograd graph of the module has nodes that the traced graph `uncut` lacks."""
        piece, buffers = module_piece(uncut, 0), self._buffers(dtype)
        leaves = [tree_leaves(inputs)[i] for i in self._given(uncut)]
        params = {
            p.name: fakes[x].detach().requires_grad_(p.trainable) for x, p in self._by_short()
        } | buffers

        def graph(params: Values, _: Any) -> Tensor:
            tensors = {**params, **{x: params[x].clone() for x in self.changing}}
            return piece.run(torch.device("cpu"), *(tensors[x] for x in piece.short.values()), *leaves)[0]

        called = _uncalled(self.whole)

        def module(params: Values, x: Any) -> Tensor:
            with _HooksRefused():
                y = self.whole.function(params, x, skeleton=called)
            return y[0] if self.changing else y

        def facts() -> Facts:
            return held(called.own[0], tensors=False, by=type)

        before = facts()
        own, others = (gradient_graphs(f, params, inputs) for f in (module, graph))
        if first_change(before, after := facts()):  # a first call may initialize
            module(params, inputs)
            if change := first_change(after, facts()):
                raise ValueError(
                    f"model: got {change}, which changes from call to call and would stay as in the trace, "
                    "expected a forward that changes no Python value: keep it in a buffer, or pass it in the batch"
                )
        different = next((node for digest, node in own.items() if digest not in others), None)
        if different is None:
            return
        kind = getattr(type(different), "_forward_cls", Function)
        if kind is not Function and kind.setup_context is Function.setup_context:
            got = f"{kind.__qualname__} of {kind.__module__}, a torch.autograd.Function without setup_context"
            refuse("model", got, "what torch.func differentiates", "give it setup_context, or leave it out")
        raise NotCutError(f"its trace by torch.export has no {different.name()} where the module has one")

    def _pieces(self, key: int, cut: CutGraph) -> ModuleTrace:
        for why in cut.why:
            log.info("model: %s", why)
        pieces = [module_piece(cut, s) for s in range(len(cut.spans))]
        texts = [p.text for p in pieces]
        outputs = [
            x if not isinstance(x, torch.fx.Node) else ... for x in [*cut.exported.graph.nodes][-1].args[0]
        ]
        return ModuleTrace(
            key,
            [span.name for span in cut.spans],
            pieces,
            self._given(cut),
            (outputs, cut.exported.call_spec.out_spec),
            [texts.index(x) for x in texts],
            self._why_whole(cut) if len(pieces) == 1 else "",
            cut.starts,
            cut.least,
            [span.place for span in cut.spans],
        )

    def _why_whole(self, cut: CutGraph) -> str:
        """Why there is no cut in a graph of one span, as text for the log."""
        if cut.why:
            return cut.why[0]
        if (numel := sum(math.prod(p.shape) for p in self.whole.parameters)) <= self.most:
            return f"its {numel:,} elements of parameters are not more than {self.most:,}, the most for a segment"
        weights = cut.exported.graph_signature.inputs_to_parameters
        for n in cut.spans[0].nodes:
            if n.target in REGIONS and any(x.name in weights for x in n.all_input_nodes):
                return f"its parameters are read within the torch.autocast or torch.no_grad at {place_of(n)}"
        model: Any = self.whole.module
        return (
            f"{type(model.own[0]).__name__} in {_file_of(model.own[0])} reads its parameters in one operation, or "
            "several times, or behind frozen ones alone"
        )

    def _given(self, cut: CutGraph) -> list[int]:
        given = [n for n in cut.exported.graph.nodes if n.op == "placeholder" and n.name not in cut.sources]
        return [given.index(x) for x in cut.alive[0]]

    def _by_short(self) -> list[tuple[str, Parameter]]:
        return [*zip(self.whole.short, self.whole.parameters, strict=True)]


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a thread of its own, which has none of this thread's modes and autograd graphs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, function, *arguments).result()


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which torch neither logs nor prints about a failed trace; the error raised has the reason."""
    loggers = [logging.getLogger(x) for x in _LOUD]
    levels = [x.level for x in loggers]
    with patch("torch.export._trace.print", lambda *_, **__: None, create=True):
        try:
            for x in loggers:
                x.setLevel(logging.CRITICAL + 1)
            yield
        finally:
            for x, level in zip(loggers, levels, strict=True):
                x.setLevel(level)


def _generator_states() -> str:
    """The states of Python's and NumPy's generators as text, which numbers drawn from them change."""
    return repr((random.getstate(), np.random.get_bit_generator().state))


def _without_values(call: BatchCall) -> Any:
    """`call` with floating-point tensors as the model computes with them, on the meta device, as traces get it."""
    return unmarked(tree_map_only(Tensor, _as_computed, call))


def _as_computed(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=torch.float32 if t.is_floating_point() else t.dtype, device="meta")


def _with_tensors(whole: Segment, fakes: Values, buffers: Values) -> Any:
    """A copy of the module of segment `whole` with the tensors `fakes` as parameters, and `buffers`."""
    module: Any = whole.module
    memo: dict[int, Any] = {
        id(t): nn.Parameter(fakes[x], t.requires_grad) for x, t in module.named_parameters()
    }
    memo |= {id(t): buffers[x] for x, t in module.named_buffers()}
    return deep_copy(module, memo)


def _uncalled(whole: Segment) -> Any:
    """A copy of the module of segment `whole`, with its tensors, to be called: forward may keep fake ones (a mask,
    Qwen3-VL's rope_deltas), which the next trace is not to find."""
    assert whole.module is not None
    return deep_copy(whole.module, {id(t): t for t in tensors_held(whole.module)})


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of every parameter and buffer of a module, by each of its names (tied ones have several)."""
    first = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    every = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    return {name: first[id(t)] for name, t in every}


def data_dependent(error: Exception) -> str:
    """The file and line where traced code branched on a tensor's value, if `error` says so; else ""."""
    text = f"{type(error).__name__}: {error}"
    return _place(error) if any(x in text for x in BRANCHES) else ""


def _place(error: Exception) -> str:
    """The file and line of the user's code, neither torch's nor zfunc's, that raised `error`, as text."""
    return _place_in(traceback.extract_tb(error.__traceback__))


def _place_in(stack: traceback.StackSummary) -> str:
    frames = [f for f in stack if not any(x in f.filename for x in _LIBRARIES)]
    return f"at {frames[-1].filename}:{frames[-1].lineno}" if frames else "in forward"


# --- segments of a trace ------------------------------------------------------------------------------------


def _segments_of(traces: ModuleTraces, first: ModuleTrace) -> list[Segment]:
    whole, owned, made = traces.whole, set[str](), list[Segment]()
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
    changing = {x: name for x, name in piece.short.items() if name in traces.changing}
    short = {name: x for x, name in piece.short.items()}
    like = {x: short.get(traces.types.get(name, "")) for x, name in piece.short.items()}
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
