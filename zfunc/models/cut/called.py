"""A wrapper that calls a model with a whole batch and returns the loss; parameters keep the model's own names."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, _refs, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_leaves, tree_map_only, tree_map_with_path

from zfunc.engine.trace.batches import LABELS, ByValue, Whole
from zfunc.engine.trace.segment import NO_LOSS
from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.errors import refuse
from zfunc.models.cut.ctc import SizedCTC
from zfunc.models.cut.known import KnownValues
from zfunc.models.cut.user_code import passing_check, place_here

Loss = Callable[[Any, Any], Tensor]
CHECKED = {"__bool__", "is_nonzero", "equal", "allclose"}
DATA_SET = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
REQUIRES_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]


class BatchCall(NamedTuple):
    """A whole batch as the input of the first segment: the model's inputs, and the targets for a loss."""

    inputs: Any
    targets: tuple[Any, ...] = ()


class CalledModel(nn.Module):
    """A wrapper of `model` that keeps the names of its parameters. Called with a BatchCall, it returns the loss;
    called with inputs alone, as by `zfunc.apply`, it returns the model's output."""

    def __init__(self, model: nn.Module, loss: Loss | None, *, by_value: bool = False) -> None:
        super().__init__()
        self.by_value = by_value  # whether forward reads values that are known
        self.read: Any = None  # is told the inputs whose values are read
        self.passes_checks = by_value  # of values that are not known
        self.unchecked = set[str]()  # the places of these in the user's code
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        if not isinstance(getattr(loss, "__self__", loss), nn.Module | FunctionType | None):
            loss = _function_of(loss)  # whose object is not copied with the model
        self.own = (model, loss)  # in a tuple, or they would be children
        self.trained = {id(p): x for x, p in model.named_parameters()}  # which a loss may close over

    def train(self, mode: bool = True) -> "CalledModel":
        """Set training mode, or eval mode, of this wrapper and of the wrapped model, which is no child module."""
        self.own[0].train(mode)
        self.training = mode
        return self

    def forward(self, x: Any, *_: Any) -> Any:
        """The loss if `x` is a BatchCall, whose targets it uses; the model's output if `x` is inputs alone."""
        with self._writing_assigned_buffers():
            device = next((t.device for t in self.parameters()), torch.device("cpu"))
            known = KnownValues(device, self.read) if self.by_value else None
            with _Traceable(self), known or nullcontext(), SizedCTC():  # which knows some values
                return self._called(known.with_tensors(x) if known else x)

    @contextmanager
    def _writing_assigned_buffers(self) -> Iterator[None]:
        """A context at whose end tensors assigned to buffers are written into the buffers. Raises SettingError for
        what no write stands for: another shape or dtype, None, or memory that another tensor of the model has."""
        owners = [*{id(m._buffers): (path, m._buffers) for path, m in self.named_modules()}.values()]
        before = {(path, x): t for path, buffers in owners for x, t in buffers.items()}
        # torch.export would write the model's own as well, and beside a None into another one: it looks here.
        own, self._buffers = self._buffers, {**self._buffers}
        try:
            yield
        finally:
            self._buffers = own
        after = {(path, x): t for path, buffers in owners for x, t in buffers.items()}
        assigned = [x for x in {**before, **after} if before.get(x) is not after.get(x)]
        for x in assigned:
            name, t, new = ".".join(filter(None, x)), before.get(x), after.get(x)
            if t is None or new is None or (new.shape, new.dtype) != (t.shape, t.dtype):
                got = f"an assignment of {_kind(new)} to the buffer {name!r}"
                do = "register it so, or keep what is made anew for each batch as a plain attribute"
                refuse("model", got, f"its {_kind(t)}", do)
            if _shared(t, before.values()) or _shared(new, [*after.values(), *self.parameters()]):
                got = f"an assignment to the buffer {name!r}, whose memory another tensor of the model has"
                refuse("model", got, "memory of its own", "clone() what is assigned, or untie the buffer")
        # A value that is a former buffer, as of two that are swapped, is copied before any is written.
        places = {_memory(before[x]) for x in assigned}
        values = {x: after[x].clone() if _memory(after[x]) in places else after[x] for x in assigned}
        for path, buffers in owners:
            for name in [x for x in buffers if (path, x) in values]:
                before[path, name].copy_(values[path, name])
                buffers[name] = before[path, name]

    def _called(self, x: Any) -> Any:
        model, loss = self.own
        inputs, targets = x if isinstance(x, BatchCall) else (x, ())
        if isinstance(inputs, Mapping):
            args, named = (), inputs
        else:
            args, named = (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
        given = () if loss is not None else targets
        output = model(*args, *given, **named)
        if not isinstance(x, BatchCall):
            return output
        return loss_in(model, output) if loss is None else loss(output, *targets)


def _unhooked(f: Any) -> Any:
    """The function `f` of torch, which tells modes of what it calls, not of its own call."""
    unknown = {**f.__globals__, "has_torch_function_variadic": lambda *_: False}
    return FunctionType(f.__code__, unknown, f.__name__, f.__defaults__)


_gaussian_nll_loss = _unhooked(F.gaussian_nll_loss)


def _function_of(f: Any) -> Callable[..., Any]:
    """What can be called, such as a method, as a function, which copy.deepcopy returns as it is."""

    def call(*args: Any) -> Any:
        return f(*args)

    return wraps(f, updated=())(call)


class _Traceable(TorchFunctionMode):
    """A mode that refuses what a trace would lose: an assignment to .data of a tensor, and a parameter of `model`
    that forward freezes or unfreezes. The user's own parameters, as a loss that closes over the user's model reads,
    are those of `model`. Checks of values that a trace lacks are passed, and noted if they are the
    user's. copy.deepcopy of a tensor is a constant."""

    def __init__(self, model: CalledModel) -> None:
        super().__init__()
        self.unchecked = model.unchecked if model.passes_checks else None
        self.names = {id(t): repr(x) for x, t in (*model.named_parameters(), *model.named_buffers())}
        given = dict(model.named_parameters())
        self.own = {i: given[x] for i, x in model.trained.items() if x in given}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(id(t) in self.own for t in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(Tensor, lambda t: self.own.get(id(t), t), (args, kwargs))
        name = self.names.get(id(args[0])) if args else None
        if func == DATA_SET:
            got = f"an assignment to .data of {name or 'a tensor'} {place_here()}"
            do = "write into a buffer with copy_(), assign others (x = ...), and leave parameters to the optimizer"
            refuse("model", got, "one that a trace has", do)
        if name and func in REQUIRES_GRAD:
            wanted = (kwargs or {}).get("requires_grad", args[1] if len(args) > 1 else True)
            if wanted != args[0].requires_grad:
                got = f"requires_grad={wanted} for {name} {place_here()}"
                do = "freeze them before, or call a part by torch.func.functional_call with its parameters detached"
                refuse("model", got, "parameters that forward neither freezes nor unfreezes", do)
        kind = getattr(func, "__name__", "")
        asked = self.unchecked is not None and kind in CHECKED and any(map(is_fake, args))
        if asked and (check := passing_check()):
            self.unchecked.update({check[1]} - {""})
            return check[0]
        if func is Tensor.__deepcopy__:
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        if func is F.gaussian_nll_loss:  # which hides its check
            with self:
                return _gaussian_nll_loss(*args, **(kwargs or {}))
        func = _refs.istft if func is torch.istft else func  # the same bits, and no check
        return func(*args, **(kwargs or {}))


def _kind(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.dtype}{[*t.shape]}"


def _memory(t: Tensor) -> int:
    return storage_of(torch.func.debug_unwrap(t))  # also where torch.func has wrapped it


def _shared(t: Tensor, tensors: Iterable[Tensor | None]) -> bool:
    """Whether more than one of `tensors`, of which `t` is one, are in its memory."""
    return sum(x is not None and _memory(x) == _memory(t) for x in tensors) > 1


def without_idle_draws(model: nn.Module) -> nn.Module:
    """A copy of `model` in which adapters of peft that draw a random number even for a dropout of 0 (LoHa, LoKr)
    are in eval mode, which computes the same without the draw; `model` itself if it has no such adapters."""

    def idle(m: nn.Module) -> bool:
        kinds = [vars(m).get(x) for x in ("module_dropout", "rank_dropout")]
        return all(isinstance(x, dict) and not any(x.values()) for x in kinds)

    if not any(map(idle, model.modules())):
        return model
    copied = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for m in filter(idle, copied.modules()):
        kind = type(m)
        m.__class__ = type(
            kind.__name__, (kind,), {"training": property(lambda _: False, lambda _, _mode: None)}
        )
    return copied


def takes_inputs_alone(model: nn.Module, call: BatchCall) -> bool:
    """Whether the model's forward can be called with the inputs of `call`, but with no target or "labels"."""
    inputs, args, named = call.inputs, (), {}
    if isinstance(inputs, Mapping):
        named = {name: x for name, x in inputs.items() if name != LABELS}
    else:
        args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)

    def takes(*more: Any, **labels: Any) -> bool:
        try:
            inspect.signature(model.forward).bind(*args, *more, **named, **labels)
        except (TypeError, ValueError):
            return False
        return True

    labels = {LABELS: None} if isinstance(inputs, Mapping) and LABELS in inputs else {}
    return takes() and not takes(*call.targets[:1], **labels)


def lacks_targets(loss: Loss, call: BatchCall) -> bool:
    """Whether `call` has no targets, and `loss` cannot be called without."""
    try:
        inspect.signature(loss).bind(None)
    except TypeError:
        return not call.targets
    except ValueError:
        pass
    return False


def loss_in(model: nn.Module, output: Any) -> Tensor:
    """The loss in `output`: its `.loss`, item "loss", or only floating-point scalar. Raises ValueError if none."""
    found: Any = getattr(output, "loss", None)
    if isinstance(output, Mapping):
        found = output.get("loss", found)
    if found is None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        scalars = [t for t in tensors if not t.dim()] or [t for t in tensors if t.shape == (1,)]
        found = scalars[0] if len(scalars) == 1 else None
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {[*output.shape]}" if isinstance(output, Tensor) else type(output).__name__
        got = f"none, and {type(model).__name__} returns no scalar and no .loss ({kind})"
        refuse(
            "loss", got, NO_LOSS[0], f"{NO_LOSS[1]}; or labels in the batch of a model that returns its loss"
        )
    return found


def mark_values(call: BatchCall, names: Mapping[str, bool]) -> BatchCall:
    """Wrap tensors of `call` in `ByValue`, which makes a trace depend on their values: those at pytree paths
    in `names`; True in `names` means that only the number of elements a mask selects matters."""

    def mark(path: Any, t: Any) -> Any:
        if (name := keystr(path)) not in names or not isinstance(t, Tensor | Whole):
            return t
        whole = isinstance(t, Whole)
        return ByValue(t.tensor if whole else t, whole, names[name])

    return tree_map_with_path(mark, call)


def call_of(batch: Any, has_loss: bool, by_value: Mapping[str, bool] | None = None) -> tuple[BatchCall, None]:
    """A batch as `(inputs, targets)` of segments: a BatchCall of the whole batch for the first segment, and None.

    A dict has the model's arguments by name; if `has_loss`, its "labels" are the targets. The first of a tuple is
    the model's input, a tuple of inputs or a dict; the rest are targets, or, without a loss, further arguments.
    A trace depends on the values of the tensors named in `by_value`, as in `mark_values`.
    """
    call = _call_of(batch, has_loss)
    return (mark_values(call, by_value) if by_value else call), None


def _call_of(batch: Any, has_loss: bool) -> BatchCall:
    if not isinstance(batch, Mapping):
        inputs, *targets = batch if isinstance(batch, tuple | list) else (batch,)
        while targets and targets[-1] is None:
            targets.pop()
        return BatchCall(inputs, tuple(targets))
    if not has_loss:
        return BatchCall(dict(batch))
    if LABELS not in batch:
        raise ValueError(
            f"batch: got a dict of {sorted(batch)} for a loss of (output, targets), expected {LABELS!r} in it: "
            "pass (inputs, targets), or leave loss out if the model returns it"
        )
    return BatchCall({name: x for name, x in batch.items() if name != LABELS}, (batch[LABELS],))
