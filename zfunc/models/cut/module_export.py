"""The graph of a module by torch.export, of a copy without memory: what forward computes for inputs of some shapes.

Whatever a graph would lack or keep wrongly raises: a branch on a value, a gradient hook, numbers drawn outside
torch, a backward of the module's own. So a graph that is returned has the module's results and gradients.
"""

import contextvars
import logging
import random
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zfunc.core.layout import Parameter
from zfunc.engine.trace.autograd_functions import applied_by
from zfunc.engine.trace.batches import unmarked
from zfunc.engine.trace.facts import held
from zfunc.engine.trace.graph_cuts import alone
from zfunc.engine.trace.model_segments import NO_LOSS
from zfunc.engine.trace.module_copies import deep_copy, tensors_held
from zfunc.engine.trace.purity import SEEDED, changes_from_call_to_call
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.tensor_memory import FakeMode, Values
from zfunc.errors import SettingError, refuse, setting
from zfunc.models.cut.batch_call import BatchCall
from zfunc.models.cut.called import CalledModel, lacks_targets, takes_inputs_alone
from zfunc.models.cut.exported_graph import BRANCH, NotCutError, ValueBranchError
from zfunc.models.cut.functions import FunctionCalls, apply_in_module
from zfunc.models.cut.gradients import gradient_graphs
from zfunc.models.cut.pieces import module_piece
from zfunc.models.cut.spans import CutGraph, cut_graph
from zfunc.models.cut.user_code import place_here, place_of_error
from zfunc.models.cut.vmap import expand_vmaps

BESIDE_TORCH = (
    f"Python's random module or NumPy, expected torch's: {SEEDED}. Pass them in the batch, or leave out what draws "
    "them (of transformers, apply_spec_augment=False)"
)
BRANCHES = (
    "DataDependentOutput",
    "DynamicOutputShape",
    "GuardOnDataDependent",
    "Unbacked",
    "unbacked",
    "data-dependent",
    "_local_scalar_dense",
    "but got FakeTensor",
)
log = logging.getLogger("zfunc")
_LOUD = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export._trace"


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
class ModuleExport:
    """What exports the graphs of the CalledModel in the segment `whole`."""

    whole: Segment

    def graph(
        self, x: Any, dtype: torch.dtype, *, training: bool, by_value: bool | None, given: str
    ) -> Callable[..., CutGraph]:
        """Export the module's graph for inputs like `x`, which an error calls `given`, and weights in `dtype`.
        `by_value` says whether a trace knows the values of inputs in ByValue; None: as the module does. Returns a
        partial of `cut_graph` that lacks `blocks`, `most` and `starts`."""
        # 1. The module with weights that have no memory, on an input without any.
        mode, fakes, inputs = self._fake_tensors(x, dtype)
        trained = {p.name for p in self.whole.parameters if p.trainable}
        buffers = self._buffers(dtype)
        module = _with_tensors(self.called, fakes, buffers)
        if not training:
            module.eval()
        if by_value is not None:
            module.by_value = by_value
        # 2. Its graph, cut.
        drawn, functions = _generator_states(module.own[0]), FunctionCalls()
        traced = applied_by(functions.apply)
        with alone(), _quiet(), _states_of_lstm(), traced, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes that are views of parameters
            try:
                exported = torch.export.export(module, (inputs,), strict=False)
            except Exception as error:
                _refuse_branch(error)
                if isinstance(error, SettingError) and error.names == ("model",):
                    raise
                with mode:
                    self._try(fakes | buffers, inputs, dtype, given)
                reason = str(error).strip().partition("\n")[0][:300]
                if found := re.search(r"Found <class '(\S+)'> in output", reason):
                    do = "return a dict or a tuple, or, for a dataclass, call torch.export.register_dataclass"
                    raise NotCutError(
                        f"it returns a {found[1]}, of which torch knows no tensors: {do}"
                    ) from error
                raise NotCutError(
                    f"torch.export cannot trace it ({type(error).__name__}: {reason})"
                ) from error
        for place in sorted(module.unchecked) if given == "example" else ():
            log.warning(
                "model: the values that are checked %s are not known to a trace: the check is left out", place
            )
        drew = _generator_states(module.own[0]) != drawn
        if any(isinstance(x, torch.Generator) for x in exported.constants.values()):
            raise ValueError(f"model: got a torch.Generator of its own, expected the default one: {SEEDED}")
        if functions.changed:
            raise NotCutError(f"forward sets what the autograd function {functions.changed} reads")
        expand_vmaps(exported)
        functions.expand(exported)
        cut_in = partial(
            cut_graph,
            exported,
            names=_first_names(module),
            trained=trained,
            changed={*self.whole.buffers},
        )
        # 3. Whether the graph has the module's own gradients.
        if training:
            with alone(), mode, _compiling_state_context():
                uncut = cut_in(set(), starts=frozenset(), most=0)
                try:
                    self._compare(uncut, fakes, inputs, dtype, given)
                except Exception as error:  # of operations that torch.export has made of others
                    _refuse_branch(error)
                    raise
        if drew:
            raise ValueError(f"model: got random numbers from {BESIDE_TORCH}")
        return cut_in

    @property
    def called(self) -> CalledModel:
        """The user's module called for its loss, without memory."""
        assert isinstance(self.whole.module, CalledModel)
        return self.whole.module

    @property
    def model(self) -> nn.Module:
        """The user's module, without the loss."""
        return self.called.own[0]

    def _fake_tensors(self, x: Any, dtype: torch.dtype) -> tuple[FakeMode, Values, Any]:
        """Make a mode of fake tensors (shapes without memory), and in it the module's parameters in `dtype`
        by short name, and inputs like `x`."""
        mode = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        buffers = {**self.whole.constants, **self.whole.buffers}
        types = {x: buffers[own].dtype for x, own in self.called.types.items() if own in buffers}
        with mode:
            fakes = {
                x: torch.empty(p.shape, dtype=types.get(x, dtype), device="cpu") for x, p in self._by_short()
            }
            inputs = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), x)
        return mode, fakes, inputs

    def _buffers(self, dtype: torch.dtype) -> Values:
        """The module's buffers by name; a buffer that takes its dtype from a parameter is in `dtype`."""
        own = {**self.whole.constants, **self.whole.buffers}
        types = self.called.types
        return {x: t if types.get(x, x) in own else t.to(dtype) for x, t in own.items()}

    def read_by(
        self, x: Any, *, training: bool, by_value: bool
    ) -> tuple[dict[str, str], dict[str, str], set[str]]:
        """For inputs `x`, of which those in BySample are known if `by_value`, in training or eval mode: two dicts
        from name to text "at file:line", of inputs whose values forward reads, and of inputs that it uses as
        masks; and the names of the parameters and buffers that it reads. Raises ValueBranchError for a branch on
        any other value."""
        return in_thread(self._read_by, x, training, by_value)

    def _read_by(self, x: Any, training: bool, by_value: bool) -> Any:
        mode, fakes, inputs = self._fake_tensors(x, torch.float32)
        buffers = {x: t.clone() for x, t in self._buffers(torch.float32).items()}  # which forward may write
        module = _with_tensors(self.called, fakes, buffers)
        if not training:
            module.eval()
        module.by_value = by_value
        found = (dict[str, str](), dict[str, str]())
        module.read = lambda name, count: found[count].setdefault(name, place_here())
        # A check of values, which no trace keeps, reads none.
        checks = [patch.object(torch, x, lambda *_, **__: None) for x in dir(torch) if x.startswith("_check")]
        with alone(), mode, _compiling_state_context(), _quiet(), ExitStack() as stack:
            for check in checks:
                stack.enter_context(check)
            try:
                with _TensorsRead(module) as tensors:
                    module(inputs)
            except Exception as error:
                _refuse_branch(error)
                got = f"values that do not fit the model ({type(error).__name__} {place_of_error(error)}: {error})"
                refuse("example", got, "a real batch", "the model branches on values", cause=error)
        return *found, tensors.read

    def _try(self, params: Values, inputs: Any, dtype: torch.dtype, given: str) -> None:
        """Run the module with `params`, of `dtype`, on `inputs`. If this fails, raises ValueError for the inputs,
        which it calls `given`, or for the model in `dtype`."""
        try:
            self.whole.function(params, inputs, skeleton=_uncalled(self.called))
        except Exception as error:
            model, loss = self.called.own
            if loss is None and given == "example" and takes_inputs_alone(model, inputs):
                got = f"none with a {type(model).__name__}, whose forward takes the inputs alone"
                refuse("loss", got, *NO_LOSS, cause=error)
            if isinstance(error, SettingError) and error.names == ("loss",):
                raise
            said = f"{type(error).__name__} {place_of_error(error)}: {error}"
            if dtype != torch.float32:  # the example's trace was
                kind = str(dtype).removeprefix("torch.")
                got = f"an error of its parameters and inputs in {kind} ({said}); buffers keep their dtype"
                do = f"cast what meets them (x.to(weight.dtype)), or pass {setting('precision', 'fp32')}"
                refuse("model", got, f"code that runs in {kind}", do, cause=error)
            if loss is not None and lacks_targets(loss, inputs):
                got = f"no targets for {getattr(loss, '__name__', 'the loss')}, a loss of (output, targets)"
                refuse(
                    given, got, "(inputs, targets)", "pass both, or a loss of the output alone", cause=error
                )
            if isinstance(error, UnsupportedOperatorException):
                got = f"{error.func} {place_of_error(error)}"
                refuse("model", got, "operations that torch can trace", "write it with others", cause=error)
            got, expected = f"one that does not fit the model ({said})", "a batch that it takes"
            refuse(given, got, expected, "a dict of its arguments, or (inputs, targets)", cause=error)

    def _compare(self, uncut: CutGraph, fakes: Values, inputs: Any, dtype: torch.dtype, given: str) -> None:
        """Raise NotCutError if the autograd graph of the module has nodes that the traced graph `uncut` lacks, and
        ValueError for what changes from call to call. Log, of inputs `given` as an example, which buffers plain
        PyTorch would write more often."""
        piece, buffers = module_piece(uncut, 0), self._buffers(dtype)
        leaves = [tree_leaves(inputs)[i] for i in uncut.given]
        params = {
            p.name: fakes[x].detach().requires_grad_(p.trainable) for x, p in self._by_short()
        } | buffers

        def graph(params: Values, _: Any) -> Tensor:
            tensors = {**params, **{x: params[x].clone() for x in self.whole.buffers}}
            return piece.run(torch.device("cpu"), *(tensors[x] for x in piece.short.values()), *leaves)[0]

        called = _uncalled(self.called)

        def module(params: Values, x: Any) -> Tensor:
            with _HooksRefused(), applied_by(apply_in_module):
                y = self.whole.function(params, x, skeleton=called)
            return y[0] if self.whole.buffers else y

        with _writes_in_checkpoints(called.own[0]) as again:
            own, (value, state, operation) = changes_from_call_to_call(
                lambda: gradient_graphs(module, params, inputs),
                place_here,
                lambda: held(called.own[0], tensors=False, by=type),
            )
        for place, names in again.items() if given == "example" else ():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            log.warning(
                "model: the checkpoint %s writes the buffer %r%s once a step; plain PyTorch may write again, where "
                "its backward repeats forward",
                *(place, next(iter(names)), more),
            )
        if value:
            raise ValueError(
                f"model: got {value}, which changes from call to call and would stay as in the trace, "
                "expected a forward that changes no Python value: keep it in a buffer, or pass it in the batch"
            )
        if state:
            raise ValueError(
                f"model: got a tensor that forward keeps from call to call {state}, which would stay as in the "
                "trace, expected a buffer of the model: register it (register_buffer; a loss that has one can be "
                "called in forward), or pass it in the batch"
            )
        if operation:
            raise ValueError(
                f"model: got {operation} when called again, perhaps by a value that is kept outside of it, or "
                f"random numbers from {BESIDE_TORCH}"
            )
        others = gradient_graphs(graph, params, inputs)
        different = next((node for digest, node in own.items() if digest not in others), None)
        if different is None:
            return
        raise NotCutError(f"its trace by torch.export has no {different.name()} where the module has one")

    def _by_short(self) -> list[tuple[str, Parameter]]:
        return [*zip(self.whole.short, self.whole.parameters, strict=True)]


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
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


@contextmanager
def _writes_in_checkpoints(model: nn.Module) -> Iterator[dict[str, dict[str, None]]]:
    """A context whose value names, in order by place, the buffers of `model` that are written or assigned in calls
    of torch.utils.checkpoint that are made in it."""
    name, found = "_checkpoint_without_reentrant_generator", dict[str, dict[str, None]]()
    plain = getattr(torch.utils.checkpoint, name)

    def buffers() -> dict[str, tuple[int, int]]:
        return {x: (id(t), t._version) for x, t in model.named_buffers()}

    def watched(*args: Any, **kwargs: Any) -> Iterator[None]:
        before = buffers()
        yield from plain(*args, **kwargs)  # ends when forward has run
        if changed := {x: None for x, state in buffers().items() if state != before.get(x)}:
            found.setdefault(place_here(), {}).update(changed)

    with patch.object(torch.utils.checkpoint, name, watched):
        yield found


@contextmanager
def _states_of_lstm() -> Iterator[None]:
    """A context in which exports know the shape of an LSTM's last states: before torch 2.13 they took it for
    [layers, 1, batch, size] (issue 151200)."""
    layer = decompositions.one_layer_lstm

    def one_layer(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, states = layer(*args, **kwargs)
        return y, tuple(x.view(x.shape[-2:]) for x in states)  # [batch, size]

    with patch.object(decompositions, "one_layer_lstm", one_layer):
        yield


def _generator_states(model: nn.Module) -> str:
    """The states of Python's and NumPy's generators, and of those that `model` has, as text, which draws change."""
    own = [x for m in model.modules() for x in vars(m).values()]
    states = [x.getstate() for x in own if isinstance(x, random.Random)]
    states += [x.bit_generator.state for x in own if isinstance(x, np.random.Generator)]
    return repr((random.getstate(), np.random.get_bit_generator().state, states))


def without_values(call: BatchCall) -> Any:
    """`call` with floating-point tensors as the model computes with them, on the meta device, as traces get it."""
    return unmarked(tree_map_only(Tensor, _as_computed, call))


def _as_computed(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=torch.float32 if t.is_floating_point() else t.dtype, device="meta")


def _with_tensors(called: CalledModel, fakes: Values, buffers: Values) -> CalledModel:
    """A copy of `called` with the tensors `fakes` as parameters, and `buffers`."""
    memo: dict[int, Any] = {
        id(t): nn.Parameter(fakes[x], t.requires_grad) for x, t in called.named_parameters()
    }
    memo |= {id(t): buffers[x] for x, t in called.named_buffers()}
    return deep_copy(called, memo)


def _uncalled(called: CalledModel) -> CalledModel:
    """A copy of `called`, with its tensors, to be called: forward may keep fake ones (a mask, Qwen3-VL's
    rope_deltas), which the next trace is not to find."""
    return deep_copy(called, {id(t): t for t in tensors_held(called)})


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of every parameter and buffer of a module, by each of its names (tied ones have several)."""
    first = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    every = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    return {name: first[id(t)] for name, t in every}


def _refuse_branch(error: Exception) -> None:
    """Raise ValueBranchError if `error` says that traced code branched on a tensor's value."""
    text = f"{type(error).__name__}: {error}"
    if any(x in text for x in BRANCHES):
        got = f"model: got a branch on the value of a tensor {place_of_error(error)}, {BRANCH}"
        raise ValueBranchError(got) from error
