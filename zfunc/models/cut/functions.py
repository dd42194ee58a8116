"""The user's autograd functions in an exported graph: each call is a node, so that pieces have its own backward.

Without such a node, a trace by torch.export has the operations of the function's forward, and not its backward. No
node stands for a function that gets other objects than tensors and plain values, or reads or writes other tensors:
a model that calls one is one segment.
"""

import threading
from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity, checkpoint

from zfunc.engine.trace.autograd_functions import applied_by, apply_of_torch
from zfunc.engine.trace.facts import Facts, first_change
from zfunc.engine.trace.outside import read_outside
from zfunc.engine.trace.purity import result_and_reads
from zfunc.errors import refuse

_thread = threading.local()  # .results: the tensors among those of the call that is being traced


@frozen(eq=False)
class FunctionCall:
    """A call of the autograd function `kind` as the target of a node: of a list of tensors, those among the
    arguments, it returns the list of those among the results. Arguments are a pytree of `leaves`, with Tensor in
    place of each; `at` has the places of tensors among `num` leaves of the results."""

    kind: type[Function]
    leaves: list[Any]
    spec: TreeSpec
    at: list[int]
    num: int
    number: int
    state: Facts

    @property
    def __name__(self) -> str:  # in the code of graphs
        return f"{self.kind.__name__}_{self.number}"

    def __call__(self, tensors: list[Tensor]) -> list[Any]:
        """Call the function on `tensors`."""
        if change := self.change():
            got = f"{change}, which the autograd function {self.kind.__qualname__} reads, changed since its trace"
            refuse("model", got, "the same value in training and evaluation", "pass it to apply")
        arguments, device = iter(tensors), tensors[0].device
        leaves = [next(arguments) if x is Tensor else x for x in self.leaves]
        leaves = [device if isinstance(x, torch.device) else x for x in leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        results = tree_leaves(self.kind.apply(*args, **kwargs))
        if len(results) != self.num:
            got = f"{len(results)} results of {self.kind.__qualname__}"
            raise ValueError(f"got {got}, expected {self.num} as traced")
        return [results[n] for n in self.at]

    def change(self) -> str:
        """A description of the first value that the function reads otherwise now than in this call, or ""."""
        return first_change(self.state, _state(self.kind))

    @property
    def key(self) -> Any:
        """What two calls have in common that compute the same of their tensors: equal calls of a graph are one."""
        return self.kind, self.state, [(type(x), repr(x)) for x in self.leaves], self.spec, self.at, self.num


def _plain(x: Any) -> bool:
    return isinstance(x, bool | int | float | complex | str | None | torch.dtype | torch.device | Enum | type)


def _state(kind: type[Function]) -> Facts:
    """What the code of `kind` reads from closures, globals and its class, which a model may set before a call."""
    return read_outside(None, kind, plain=False)


def apply_in_module(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    """What `kind.apply(*args, **kwargs)` returns; of a reentrant checkpoint as one that is not, in torch.no_grad()
    if no input requires a gradient, as torch runs it."""
    if kind is not CheckpointFunction:
        return apply_of_torch(kind, *args, **kwargs)
    function, preserve_rng_state, *inputs = args
    known = {"preserve_rng_state": preserve_rng_state, "use_reentrant": False}
    check_backward_validity(inputs)  # which warns of no_grad
    with nullcontext() if any(isinstance(t, Tensor) and t.requires_grad for t in inputs) else torch.no_grad():
        return checkpoint(function, *inputs, **known)


class _Traced(Function):
    """Stands for a call in a trace: its results require gradients where `results`, those of the call, do."""

    @staticmethod
    def forward(ctx: Any, number: int, results: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        _thread.results = results
        outputs = torch.ops.zfunc.function_call(number, tensors)
        pairs = zip(outputs, results, strict=True)
        ctx.mark_non_differentiable(*(t for t, x in pairs if not x.requires_grad))
        return tuple(outputs)


@define(eq=False)
class FunctionCalls:
    """The calls of autograd functions in a graph, by number; equal ones have one."""

    calls: list[FunctionCall] = field(factory=list)
    mapped: str = ""  # the name of a function that was called within torch.func

    def apply(self, kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        """What `kind.apply(*args, **kwargs)` returns, as a node of the graph that is traced if it can be one."""
        inside = torch._C._are_functorch_transforms_active()
        if kind.__module__.startswith("torch.") or inside:
            self.mapped = kind.__qualname__ if inside else self.mapped
            return apply_in_module(kind, *args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        with applied_by(None):
            # 1. What it does, outside of the graph.
            try:
                with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
                    y, read, writes = result_and_reads(lambda: apply_of_torch(kind, *args, **kwargs))
            except Exception:  # which comes again
                y, read, writes = None, [], True
            results, structure = tree_flatten(y)
            at = [n for n, x in enumerate(results) if isinstance(x, Tensor)]
            known = {id(t) for t in tensors}
            beside = any(isinstance(t, FakeTensor | nn.Parameter) and id(t) not in known for t in read)
            described = [Tensor if isinstance(x, Tensor) else x for x in leaves]
            if beside or writes or not tensors or not at or not all(map(_plain, described)):
                return apply_of_torch(kind, *args, **kwargs)
            # 2. Its node, with results like those.
            number, state = len(self.calls), _state(kind)
            call = FunctionCall(kind, described, spec, at, len(results), number, state)
            call = next((x for x in self.calls if x.key == call.key), call)
            self.calls += [call] if call.number == number else []
            traced = apply_of_torch(_Traced, call.number, [results[n] for n in at], *tensors)
        for n, t in zip(at, traced, strict=True):
            results[n] = t
        return tree_unflatten(results, structure)

    @property
    def changed(self) -> str:
        """The name of a function that reads other values now than it did in a call; "" if there is none."""
        return next((x.kind.__qualname__ for x in self.calls if x.change()), "")

    def expand(self, exported: ExportedProgram) -> None:
        """Replace the numbers of calls in the graphs of `exported` by the FunctionCalls themselves, as targets."""
        target = torch.ops.zfunc.function_call.default
        for graph in {m.graph for m in exported.graph_module.modules() if hasattr(m, "graph")}:
            for n in graph.find_nodes(op="call_function", target=target):
                n.target, n.args = self.calls[n.args[0]], n.args[1:]


def _results(_: int, __: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in _thread.results]


_LIBRARY = torch.library.Library("zfunc", "FRAGMENT")
_LIBRARY.define("function_call(int number, Tensor[] tensors) -> Tensor[]")
torch.library.register_fake("zfunc::function_call", _results, lib=_LIBRARY)
