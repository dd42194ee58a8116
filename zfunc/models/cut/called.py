"""A wrapper that calls a model with a whole batch and returns the loss; parameters keep the model's own names."""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.batches import LABELS
from zfunc.engine.trace.model_segments import NO_LOSS
from zfunc.engine.trace.module_buffers import changed_by_forward
from zfunc.engine.trace.module_copies import deep_copy, tensors_held
from zfunc.engine.trace.purity import result_and_reads
from zfunc.engine.trace.tensor_memory import Values
from zfunc.errors import refuse
from zfunc.models.cut.batch_call import BatchCall
from zfunc.models.cut.ctc import SizedCTC
from zfunc.models.cut.kept import counterparts, shown
from zfunc.models.cut.known import KnownValues
from zfunc.models.cut.traceable import Traceable, as_if_eager, tensors_of, unwrapped_storage

Loss = Callable[[Any, Any], Tensor]


class CalledModel(nn.Module):
    """A wrapper of `model` that keeps the names of its parameters. Called with a BatchCall, it returns the loss;
    called with inputs alone, as by `zfunc.apply`, it returns the model's output. A loss may close over `source`,
    the user's model, of which `model` may be a copy."""

    def __init__(
        self, model: nn.Module, loss: Loss | None, *, by_value: bool = False, source: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.by_value = by_value  # whether forward reads values that are known
        self.read: Any = None  # is told the inputs whose values are read
        self.unchecked = set[str]()  # the places of these in the user's code
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        if not isinstance(getattr(loss, "__self__", loss), nn.Module | FunctionType | None):
            loss = _function_of(loss)  # whose object is not copied with the model
        self.wrapped = (model, loss)  # in a tuple, or they would be children
        self.merged = False  # whether train() or eval() has changed parameters or buffers
        source = model if source is None else source
        self.users = weakref.ref(source)
        # What a loss may close over, by name.
        self.source = {x: weakref.ref(t) for x, t in tensors_of(source).items()}
        # In a copy, its own: what it may have in lists, while others replace them.
        self.tensors = tensors_of(model)
        self.attributes = {x: dict(vars(t)) for x, t in self.tensors.items()}  # which these others lack
        self.swallowed: Exception | None = None  # for a branch on a value, which forward has caught
        changing, self.types = changed_by_forward("model", self)
        self.changing = {*changing}  # names of buffers that forward writes, as far as is known
        self.constants: Values = {}  # the other buffers by name, if a trace may depend on their values

    @property
    def wrapped_model(self) -> nn.Module:
        """The user's model, or a copy, that a CalledModel calls; without the loss."""
        return self.wrapped[0]

    @property
    def passes_checks(self) -> bool:
        """Whether checks of values that are not known are passed: where others are, and in eval mode."""
        return self.by_value or not self.training

    def train(self, mode: bool = True) -> "CalledModel":
        """Set training mode, or eval mode, of this wrapper and of the wrapped model, which is no child module."""
        before = tensors_of(self)
        _, _, writes = result_and_reads(lambda: self.wrapped_model.train(mode))
        same = {x: id(t) for x, t in before.items()} == {x: id(t) for x, t in tensors_of(self).items()}
        self.merged, self.training = self.merged or writes or not same, mode
        return self

    def with_tensors(self, tensors: Values) -> "CalledModel":
        """A copy with `tensors`, by name, as parameters and buffers."""
        memo: dict[int, Any] = {
            id(t): nn.Parameter(tensors[x], t.requires_grad) for x, t in self.named_parameters()
        }
        memo[id(self.constants)] = self.constants
        return deep_copy(self, memo | {id(t): tensors[x] for x, t in self.named_buffers()})

    def uncalled(self) -> "CalledModel":
        """A copy with the same tensors, to be called: forward may keep fake ones (a mask, Qwen3-VL's rope_deltas),
        which the next trace is not to find."""
        with _TensorsKept():
            return deep_copy(self, {id(t): t for t in tensors_held(self)})

    def forward(self, x: Any, *_: Any) -> Any:
        """The loss if `x` is a BatchCall, whose targets it uses; the model's output if `x` is inputs alone."""
        if self.merged:
            got, do = "parameters or buffers that its train() or eval() changes", "leave that out"
            refuse("model", got, "modes that set flags alone", f"{do} (of loralib, turn merge_weights off)")
        for name, t in tensors_of(self).items():
            vars(t).update(self.attributes[name])
        with self._writing_assigned_buffers():
            device = next((t.device for t in self.parameters()), torch.device("cpu"))
            known = KnownValues(device, self.read) if self.by_value else None
            if known:
                constants = self.constants.items()
                known.add_constants((self.get_buffer(name), values) for name, values in constants)
            with as_if_eager(), Traceable(self), known or nullcontext(), SizedCTC():
                y = self._called(known.with_tensors(x) if known else x)
            if self.swallowed is not None:
                raise self.swallowed
            return y

    @contextmanager
    def _writing_assigned_buffers(self) -> Iterator[None]:
        """A context at whose end tensors assigned to buffers are written into the buffers. Raises SettingError for
        what no write stands for: another shape or dtype, None, or memory that another tensor of the model has."""
        owners = [*{id(m._buffers): (path, m._buffers) for path, m in self.named_modules()}.values()]
        before = {(path, x): t for path, buffers in owners for x, t in buffers.items()}
        # torch.export would write the model's own as well, and beside a None into another one: it looks here.
        registered, self._buffers = self._buffers, {**self._buffers}
        try:
            yield
        finally:
            self._buffers = registered
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
        places = {unwrapped_storage(before[x]) for x in assigned}
        values = {x: t.clone() if unwrapped_storage(t := after[x]) in places else t for x in assigned}
        for path, buffers in owners:
            for name in [x for x in buffers if (path, x) in values]:
                before[path, name].copy_(values[path, name])
                buffers[name] = before[path, name]

    def _called(self, x: Any) -> Any:
        model, loss = self.wrapped
        inputs, targets = x if isinstance(x, BatchCall) else (x, ())
        args, named = _arguments(inputs)
        more = () if loss is not None else targets
        kept = counterparts(self.users(), model) if loss is not None else {}
        output = model(*args, *more, **named)
        if not isinstance(x, BatchCall):
            return output
        if loss is None:
            return loss_in(model, output)
        with shown(kept):
            y = loss(output, *targets)
        if not isinstance(y, Tensor):
            got, do = f"a {type(y).__name__} from it", "log what else it computes elsewhere"
            refuse("loss", got, "a scalar tensor", do)
        return y


class _TensorsKept(TorchFunctionMode):
    """A mode in which `copy.deepcopy` of a tensor, such as one in a deque, returns the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and the named arguments with which a model is called for `inputs`."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _function_of(f: Any) -> Callable[..., Any]:
    """What can be called, such as a method, as a function, which copy.deepcopy returns as it is."""

    def call(*args: Any) -> Any:
        return f(*args)

    return wraps(f, updated=())(call)


def _kind(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.dtype}{[*t.shape]}"


def _shared(t: Tensor, tensors: Iterable[Tensor | None]) -> bool:
    """Whether more than one of `tensors`, of which `t` is one, are in its memory."""
    return sum(x is not None and unwrapped_storage(x) == unwrapped_storage(t) for x in tensors) > 1


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
        never = property(lambda _: False, lambda _, _mode: None)
        m.__class__ = type(type(m).__name__, (type(m),), {"training": never})
    return copied


def takes_inputs_alone(model: nn.Module, call: BatchCall) -> bool:
    """Whether the model's forward can be called with the inputs of `call`, but with no target or "labels"."""
    args, named = _arguments(call.inputs)
    labels = {LABELS: None} if LABELS in named else {}
    named = {name: x for name, x in named.items() if name != LABELS}

    def takes(*more: Any, **labels: Any) -> bool:
        try:
            inspect.signature(model.forward).bind(*args, *more, **named, **labels)
        except (TypeError, ValueError):
            return False
        return True

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
    loss: Any = getattr(output, "loss", None)
    if isinstance(output, Mapping):
        loss = output.get("loss", loss)
    if loss is None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        scalars = [t for t in tensors if not t.dim()] or [t for t in tensors if t.shape == (1,)]
        loss = scalars[0] if len(scalars) == 1 else None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {[*output.shape]}" if isinstance(output, Tensor) else type(output).__name__
        got = f"none, and {type(model).__name__} returns no scalar and no .loss ({kind})"
        do = f"{NO_LOSS[1]}; or labels in the batch of a model that returns its loss"
        refuse("loss", got, NO_LOSS[0], do)
    return loss
