"""Whether a trace has the gradients of its module, by the graphs that autograd makes of both; none is computed.

A trace may lose what autograd does: an autograd.Function's own backward, no_grad, detach, requires_grad_() inside.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.autograd_functions import applied_by
from zfunc.engine.trace.facts import held, of_library
from zfunc.engine.trace.purity import SEEDED, changes_from_call_to_call
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.tensor_memory import Values
from zfunc.errors import refuse
from zfunc.models.cut.called import CalledModel
from zfunc.models.cut.exported_graph import BRANCH, NotCutError, ValueBranchError, aten, place_of
from zfunc.models.cut.functions import apply_in_module
from zfunc.models.cut.pieces import module_piece
from zfunc.models.cut.spans import CutGraph
from zfunc.models.cut.user_code import asked_by_user, place_here

BESIDE_TORCH = (
    f"Python's random module or NumPy, expected torch's: {SEEDED}. Pass them in the batch, or leave out what draws "
    "them (of transformers, apply_spec_augment=False)"
)
GRAD_FN = Tensor.grad_fn.__get__  # pyright: ignore[reportAttributeAccessIssue]
HOOKED = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, GRAD_FN)
log = logging.getLogger("zfunc")


def check_gradients(whole: Segment, uncut: CutGraph, tensors: Values, inputs: Any, *, tell: bool) -> None:
    """Raise NotCutError if the autograd graph of the CalledModel in segment `whole`, called on `inputs` with
    parameters and buffers `tensors`, has nodes that the traced graph `uncut` lacks; ValueError for what changes
    from call to call. If `tell`, the log says which buffers plain PyTorch would write more often."""
    # 1. The module's graph, of two calls that change nothing from one to the other.
    assert isinstance(whole.module, CalledModel)
    called = whole.module.uncalled()

    def module(params: Values, x: Any) -> Tensor:
        with _HooksRefused(), _lost_in_traces_refused(), applied_by(apply_in_module):
            y = whole.function(params, x, skeleton=called)
        return y[0] if whole.buffers else y

    with checkpoints_watched(called.wrapped_model) as again:
        wanted, (value, state, operation) = changes_from_call_to_call(
            lambda: gradient_graphs(module, tensors, inputs),
            place_here,
            lambda: held(called.wrapped_model, tensors=False, by=type),
        )
    for place, names in again.items() if tell else ():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning(
            "model: the checkpoint %s writes the buffer %r%s once a step; plain PyTorch may write again, where "
            "its backward repeats forward",
            *(place, next(iter(names)), more),
        )
    if value:
        got = f"{value}, which changes from call to call and would stay as in the trace"
        do = "keep it in a buffer, or pass it in the batch"
        refuse("model", got, "a forward that changes no Python value", do)
    if state:
        got = f"a tensor that forward keeps from call to call {state}, which would stay as in the trace"
        do = "register it (register_buffer; a loss that has one can be called in forward), or pass it in the batch"
        refuse("model", got, "a buffer of the model", do)
    if operation:
        raise ValueError(
            f"model: got {operation} when called again, perhaps by a value that is kept outside of it, or "
            f"random numbers from {BESIDE_TORCH}"
        )
    # 2. The trace's.
    piece, leaves = module_piece(uncut, 0), tree_leaves(inputs)

    def graph(params: Values, _: Any) -> Tensor:
        copies = {**params, **{x: params[x].clone() for x in whole.buffers}}
        weights = (copies[x] for x in piece.short.values())
        return piece.run(torch.device("cpu"), *weights, *(leaves[i] for i in uncut.inputs))[0]

    traced = gradient_graphs(graph, tensors, inputs)
    if n := next((n for n in uncut.exported.graph.nodes if _selects_gradient(n, uncut.differentiable)), None):
        raise ValueBranchError(f"model: got values assigned where a mask selects, at {place_of(n)}, {BRANCH}")
    if missing := next((node for digest, node in wanted.items() if digest not in traced), None):
        raise NotCutError(f"its trace by torch.export has no {missing.name()} where the module has one")


def gradient_graphs(function: Callable[..., Any], params: Mapping[str, Tensor], x: Any) -> dict[str, Any]:
    """The autograd nodes of the loss `function(params, x)` with a path to one of `params`, by a hex digest of the
    node and such nodes below it."""
    with torch.enable_grad():
        loss = function(params, x)
    names = {id(t): name for name, t in params.items()}
    digests: dict[Any, str] = {}
    left = [loss.grad_fn] if loss.grad_fn is not None else []
    while left:
        node = left[-1]
        below = [(f, n) for f, n in node.next_functions if f is not None]
        if unknown := [f for f, _ in below if f not in digests]:
            left += unknown
            continue
        left.pop()
        name = names.get(id(getattr(node, "variable", None)))
        paths = [(digests[f], n) for f, n in below if digests[f]]
        text = repr((node.name(), name, paths)).encode()
        digests[node] = hashlib.blake2b(text, digest_size=12).hexdigest() if name or paths else ""
    return {digest: f for f, digest in digests.items() if digest}


def _selects_gradient(n: Node, differentiable: set[Node]) -> bool:
    """Whether a node is `x[mask] = y` where the gradient of y, of elements that the mask selects, has a shape that
    depends on values, which forward does not."""
    if n.target not in (aten.index_put.default, aten.index_put_.default) or n.args[2] not in differentiable:
        return False
    return any(i is not None and i.meta["val"].dtype == torch.bool for i in n.args[1])  # pyright: ignore


class _HooksRefused(TorchFunctionMode):
    """A mode in which a gradient hook on a tensor, which a trace would lose, or a look at its `grad_fn`, which may
    get one, raises NotCutError."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKED and (func != GRAD_FN or asked_by_user()):
            raise NotCutError(f"forward may set a gradient hook {place_here()}, which a trace would lose")
        return func(*args, **(kwargs or {}))


@contextmanager
def _lost_in_traces_refused() -> Iterator[None]:
    """A context in which this thread may neither set torch's seeds nor the hooks of saved tensors, which a trace
    lacks; save_on_cpu and checkpoints, which change no result, may. A TorchDispatchMode of the user's raises
    NotCutError."""
    here = threading.get_ident()
    enter, enter_mode = saved_tensors_hooks.__enter__, TorchDispatchMode.__enter__

    def refusing(f: Any, name: str, do: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here and (f is not enter or type(args[0]) is saved_tensors_hooks):
                got = f"torch.{name} {place_here()}, which a trace lacks"
                refuse("model", got, "a forward without it", do)
            return f(*args, **kwargs)

        return call

    def entering(mode: TorchDispatchMode) -> Any:
        if threading.get_ident() == here and not of_library(type(mode)):
            raise NotCutError(
                f"a {type(mode).__name__} {place_here()} sees operations, which a trace changes"
            )
        return enter_mode(mode)

    hooks = refusing(enter, "autograd.graph.saved_tensors_hooks", "let activations_on say where they wait")
    drawn = "draw from torch's default generator, which each step seeds, or keep the numbers in a buffer"
    with ExitStack() as stack:
        stack.enter_context(patch.object(saved_tensors_hooks, "__enter__", hooks))
        stack.enter_context(patch.object(TorchDispatchMode, "__enter__", entering))
        for name in ("manual_seed", "seed", "set_rng_state"):  # the last of fork_rng, too
            call = refusing(getattr(torch, name), name, drawn)
            for owner in (torch, torch.random):
                stack.enter_context(patch.object(owner, name, call))
        yield


@contextmanager
def checkpoints_watched(model: nn.Module) -> Iterator[dict[str, dict[str, None]]]:
    """A context in which a call of torch.utils.checkpoint keeps for backward what other code keeps, as the setting
    `recompute` decides that. Its value names, by place and in order, the buffers of `model` that are written or
    assigned in these calls."""
    name, written = "_checkpoint_without_reentrant_generator", dict[str, dict[str, None]]()

    def buffers() -> dict[str, tuple[int, int]]:
        return {x: (id(t), t._version) for x, t in model.named_buffers()}

    def watched(_: Any, __: bool, contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Iterator[None]:  # noqa: ARG001
        before = buffers()
        with contexts()[0] if torch.is_grad_enabled() else nullcontext():  # as torch does
            yield  # ends when forward has run
        if changed := {x: None for x, state in buffers().items() if state != before.get(x)}:
            written.setdefault(place_here(), {}).update(changed)

    with patch.object(torch.utils.checkpoint, name, watched):
        yield written
