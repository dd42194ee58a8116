"""The graph of a module by torch.export, of a copy without memory: what forward computes for inputs of some shapes.

Whatever a graph would lack or keep wrongly raises: a branch on a value, a gradient hook, numbers drawn outside
torch, a backward of the module's own. So a graph that is returned has the module's results and gradients.
"""

import contextvars
import logging
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from zfunc.engine.trace.autograd_functions import applied_by
from zfunc.engine.trace.batches import unmarked
from zfunc.engine.trace.fake_tensors import FakeMode
from zfunc.engine.trace.graph_cuts import alone
from zfunc.engine.trace.model_segments import NO_LOSS
from zfunc.engine.trace.purity import SEEDED
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.tensor_memory import Values
from zfunc.errors import SettingError, refuse, setting
from zfunc.models.cut.batch_call import BatchCall
from zfunc.models.cut.called import CalledModel, lacks_targets, takes_inputs_alone
from zfunc.models.cut.exported_graph import BRANCH, NotCutError, ValueBranchError, is_branch
from zfunc.models.cut.functions import FunctionCalls
from zfunc.models.cut.gradients import BESIDE_TORCH, check_gradients, checkpoints_watched
from zfunc.models.cut.spans import CutGraph, cut_graph
from zfunc.models.cut.user_code import place_of_error
from zfunc.models.cut.vmap import expand_vmaps

log = logging.getLogger("zfunc")
_LOUD = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export._trace"


@frozen(eq=False)
class ModuleExport:
    """What exports the graphs of the CalledModel in the segment `whole`."""

    whole: Segment

    def graph(
        self, x: Any, dtype: torch.dtype, *, training: bool, by_value: bool | None, subject: str
    ) -> Callable[..., CutGraph]:
        """Export the module's graph for inputs like `x`, which an error calls `subject`, and weights in `dtype`.
        `by_value` says whether a trace knows the values of inputs in ByValue; None: as the module does. Returns a
        partial of `cut_graph` that lacks `blocks`, `most` and `like`."""
        # 1. The module with weights that have no memory, on an input without any.
        fakes = self.fakes(x, dtype)
        called = self.called.with_tensors(fakes.params | fakes.buffers)
        if not training:
            called.eval()
        if by_value is not None:
            called.by_value = by_value
        # 2. Its graph, cut.
        drawn, functions = _generator_states(called.wrapped_model), FunctionCalls()
        traced, checkpoints = applied_by(functions.apply), checkpoints_watched(called.wrapped_model)
        grads, warned = torch.set_grad_enabled, warnings.catch_warnings()
        with alone(), quiet(), _states_of_lstm(), traced, checkpoints, grads(training), warned:
            warnings.simplefilter("ignore")  # of attributes that are views of parameters
            try:
                exported = torch.export.export(called, (fakes.inputs,), strict=False)
            except Exception as error:
                refuse_branch(error)
                if isinstance(error, SettingError) and error.names == ("model",):
                    raise
                if functions.mapped:
                    got = f"a torch.vmap or torch.func is around the autograd function {functions.mapped}"
                    raise NotCutError(f"{got}, and a trace has no call of one there") from error
                raise self._not_traced(error, fakes, dtype, subject) from error
        for place in sorted(called.unchecked) if subject == "example" else ():
            checked = "model: the values that are checked %s are not known to a trace: the check is left out"
            log.warning(checked, place)
        drew = _generator_states(called.wrapped_model) != drawn
        if any(isinstance(x, torch.Generator) for x in exported.constants.values()):
            raise ValueError(f"model: got a torch.Generator of its own, expected the default one: {SEEDED}")
        if functions.changed:
            raise NotCutError(f"forward sets what the autograd function {functions.changed} reads")
        expand_vmaps(exported)
        functions.expand(exported)
        parameters = dict(zip(self.whole.short, self.whole.parameters, strict=True))
        trained = {x for x, p in parameters.items() if p.trainable}
        written = {*self.whole.buffers, *(() if training else self.whole.constants)}  # evaluation keeps none
        cut_in = partial(cut_graph, exported, names=_first_names(called), trained=trained, changed=written)
        # 3. Whether the graph has the module's own gradients.
        if training:
            with alone(), fakes.mode, _compiling_state_context():
                uncut = cut_in(set(), most=sys.maxsize)
                leaves = {x: t.detach().requires_grad_(x in trained) for x, t in fakes.params.items()}
                try:
                    tensors = leaves | fakes.buffers
                    check_gradients(self.whole, uncut, tensors, fakes.inputs, tell=subject == "example")
                except Exception as error:  # of operations that torch.export has made of others
                    refuse_branch(error)
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
        return self.called.wrapped_model

    def fakes(self, x: Any, dtype: torch.dtype) -> "Fakes":
        """What a trace of the module is made on, for inputs like `x` and parameters in `dtype`; a tensor that takes
        its dtype from another has that one's."""
        mode, types = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), self.called.types
        buffers = {**self.whole.constants, **self.whole.buffers}
        kinds = {x: buffers[other].dtype for x, other in types.items() if other in buffers}
        buffers = {x: t if types.get(x, x) in buffers else t.to(dtype) for x, t in buffers.items()}
        with mode:
            params = {
                x: torch.empty(p.shape, dtype=kinds.get(x, dtype), device="cpu")
                for x, p in zip(self.whole.short, self.whole.parameters, strict=True)
            }
            inputs = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), x)
        return Fakes(mode, params, buffers, inputs)

    def _not_traced(self, error: Exception, fakes: "Fakes", dtype: torch.dtype, subject: str) -> NotCutError:
        """A NotCutError with the reason, the `error` of torch.export. If the module cannot be called on `fakes`,
        raises ValueError for the inputs, which it calls `subject`, or for the model in `dtype`."""
        try:
            with fakes.mode:
                tensors = fakes.params | fakes.buffers
                self.whole.function(tensors, fakes.inputs, skeleton=self.called.uncalled())
        except Exception as own:
            self._refuse_call(own, fakes.inputs, dtype, subject)
        reason = str(error).strip().partition("\n")[0][:300]
        if kind := re.search(r"Found <class '(\S+)'> in output", reason):
            do = "return a dict or a tuple, or, for a dataclass, call torch.export.register_dataclass"
            return NotCutError(f"it returns a {kind[1]}, of which torch knows no tensors: {do}")
        return NotCutError(f"torch.export cannot trace it ({type(error).__name__}: {reason})")

    def _refuse_call(self, error: Exception, inputs: Any, dtype: torch.dtype, subject: str) -> NoReturn:
        """Raise for `error`, which the module raises for `inputs` without values and parameters in `dtype`."""
        model, loss = self.called.wrapped
        if loss is None and subject == "example" and takes_inputs_alone(model, inputs):
            got = f"none with a {type(model).__name__}, whose forward takes the inputs alone"
            refuse("loss", got, *NO_LOSS, cause=error)
        if isinstance(error, SettingError) and error.names == ("loss",):
            raise error
        said = f"{type(error).__name__} {place_of_error(error)}: {error}"
        if dtype != torch.float32:  # the example's trace was
            kind = str(dtype).removeprefix("torch.")
            got = f"an error of its parameters and inputs in {kind} ({said}); buffers keep their dtype"
            do = f"cast what meets them (x.to(weight.dtype)), or pass {setting('precision', 'fp32')}"
            refuse("model", got, f"code that runs in {kind}", do, cause=error)
        if loss is not None and lacks_targets(loss, inputs):
            got = f"no targets for {getattr(loss, '__name__', 'the loss')}, a loss of (output, targets)"
            do = "pass both, or a loss of the output alone"
            refuse(subject, got, "(inputs, targets)", do, cause=error)
        if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
            told = str(error).partition("\n")[0]
            got = f"an operation without a fake kernel {place_of_error(error)} ({told:.200})"
            do = "register one (torch.library.register_fake), or write it with other operations"
            refuse("model", got, "operations that torch can trace", do, cause=error)
        got, expected = f"one that does not fit the model ({said})", "a batch that it takes"
        refuse(subject, got, expected, "a dict of its arguments, or (inputs, targets)", cause=error)


@frozen(eq=False)
class Fakes:
    """What a module is called with in a trace: parameters and inputs of a `mode` of fake tensors, which have shapes
    and no memory, and real buffers; tensors of the module by name."""

    mode: FakeMode
    params: Values
    buffers: Values
    inputs: Any


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a thread of its own, which has none of this thread's modes and autograd graphs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, function, *arguments).result()


@contextmanager
def quiet() -> Iterator[None]:
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
    attributes = [x for m in model.modules() for x in vars(m).values()]
    states = [x.getstate() for x in attributes if isinstance(x, random.Random)]
    states += [x.bit_generator.state for x in attributes if isinstance(x, np.random.Generator)]
    return repr((random.getstate(), np.random.get_bit_generator().state, states))


def without_values(call: BatchCall) -> Any:
    """`call` with floating-point tensors as the model computes with them, on the meta device, as traces get it."""
    return unmarked(tree_map_only(Tensor, _as_computed, call))


def _as_computed(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=torch.float32 if t.is_floating_point() else t.dtype, device="meta")


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of every parameter and buffer of a module, by each of its names (tied ones have several)."""
    first = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    every = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    return {name: first[id(t)] for name, t in every}


def refuse_branch(error: Exception) -> None:
    """Raise ValueBranchError if `error` says that traced code branched on a tensor's value."""
    if is_branch(error):
        got = f"model: got a branch on the value of a tensor {place_of_error(error)}, {BRANCH}"
        raise ValueBranchError(got) from error
