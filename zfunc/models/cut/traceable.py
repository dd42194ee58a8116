"""A mode in which a model is called for a trace: what a trace would lose is refused, and tensors of the user's
model that a loss closes over are those of the trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, _refs, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zfunc.engine.trace.module_copies import changing_memory, refuse_stale, viewed
from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.errors import refuse, setting
from zfunc.models.cut.exported_graph import is_branch
from zfunc.models.cut.known import tensors_written, without_modes
from zfunc.models.cut.user_code import passing_check, place_here

CHECKED = {"__bool__", "is_nonzero", "equal", "allclose"}
DATA, DATA_SET = Tensor.data.__get__, Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
REQUIRES_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]
GRAD = (Tensor.grad.__get__, Tensor.grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]


def _unhooked(f: Any) -> Any:
    """The function `f` of torch, which tells modes of what it calls, not of its own call."""
    unknown = {**f.__globals__, "has_torch_function_variadic": lambda *_: False}
    return FunctionType(f.__code__, unknown, f.__name__, f.__defaults__)


_gaussian_nll_loss = _unhooked(F.gaussian_nll_loss)


@contextmanager
def as_if_eager() -> Iterator[None]:
    """A context in which the user's code in a trace is told that it is neither compiled nor exported, as in plain
    PyTorch; libraries, which choose code that can be traced, are told that it is. A module may be cast to what it
    is."""
    asked: Any = (torch.compiler.is_compiling, torch.compiler.is_exporting)
    codes = [f.__code__ for f in asked]  # which are exchanged, as a module may have imported a function
    if not torch.compiler.is_exporting():
        yield
        return
    try:
        for f in asked:
            f.__code__ = _of_library.__code__
        items = patch.object(nn.ParameterList, "__getitem__", _item)
        with patch.object(nn.Module, "_apply", _applied), items:
            yield
    finally:
        for f, code in zip(asked, codes, strict=True):
            f.__code__ = code


def _of_library() -> bool:
    """Whether what asks is installed, or Python's own. Functions that ask for others, such as
    torch._dynamo.is_compiling and transformers' is_torchdynamo_compiling, are passed over."""
    import sys  # as the code runs in torch.compiler

    from zfunc.engine.trace.facts import LIBRARIES

    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_name.endswith(("compiling", "exporting")):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    return name in LIBRARIES or "-packages/" in frame.f_code.co_filename


_apply_of_torch, _item_of_torch = nn.Module._apply, nn.ParameterList.__getitem__


def _item(parameters: nn.ParameterList, index: Any) -> Any:
    """An item, or for a slice a list: a ParameterList would make parameters of its own of tensors of a trace."""
    if isinstance(index, slice):
        return [parameters[i] for i in range(len(parameters))[index]]
    return _item_of_torch(parameters, index)


def _applied(module: nn.Module, f: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What `module._apply(f, recurse)` returns, which replaces tensors: the module as it is if `f`, such as a cast,
    returns such tensors themselves, unwritten."""
    with without_modes():
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        like = [torch.empty((0,) * t.dim(), dtype=t.dtype, device=t.device) for t in tensors]
        same = all(f(t) is t and not t._version for t in like)
    return module if same else _apply_of_torch(module, f, recurse)


class Traceable(TorchFunctionMode):
    """A mode that refuses what a trace would lose: an assignment to .data of a tensor, and a parameter of `model`
    that forward freezes or unfreezes. The user's own parameters and buffers, as a loss that closes over the user's
    model reads, are those of `model`; views of these made before, which would keep their values, are refused.
    Checks of values that a trace lacks are passed, and noted if they are the user's. copy.deepcopy of a tensor is a
    constant. The error of a branch on a value, which forward might catch, is noted, too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.unchecked = model.unchecked if model.passes_checks else None
        self.names = {id(t): repr(x) for x, t in (*model.named_parameters(), *model.named_buffers())}
        self.called, self.model = model, model.wrapped_model
        source = {x: t for x, ref in model.source.items() if (t := ref()) is not None}
        self.now = {*map(id, tensors_of(self.model).values())}
        self.source = {id(t): x for own in (source, model.tensors) for x, t in own.items()}
        self.source = {x: name for x, name in self.source.items() if x not in self.now}
        self.memory = changing_memory(source.items(), model.changing)
        self.data: list[Tensor] = []  # of results that have gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in tensors:
            own = id(t) in self.source or id(t) in self.now
            if not own and (base := self._viewed(t)):
                refuse_stale(func, args, base, place_here())
        if any(id(t) in self.source for t in tensors):
            args, kwargs = tree_map_only(Tensor, self._own, (args, kwargs))
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
        if name and func in GRAD:
            do = f"read norms after the step ({setting('norms', True)}), or call torch.func.grad in forward; "
            do += "cast inputs, not modules (a module's .to() looks at .grad)"
            refuse("model", f".grad of {name} {place_here()}", "a forward that a trace has", do)
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
        if any(t is x for t in tensors_written(kind, args, kwargs or {}) for x in self.data):
            got = f"a write into .data of what has a gradient {place_here()}"
            refuse("model", got, "one that autograd knows", "assign another tensor (x = ...)")
        try:
            if func != DATA:
                return func(*args, **(kwargs or {}))
            y = args[0].detach()  # of whose values a trace knows
            self.data += [y] if args[0].requires_grad and not name else []
            return y
        except Exception as error:
            self.called.swallowed = error if is_branch(error) else self.called.swallowed
            raise

    def _viewed(self, t: Tensor) -> str:
        """The name of the tensor of the user's model, which a step changes, that `t` is a view of; else ""."""
        inner = torch.func.debug_unwrap(t)
        return "" if is_fake(inner) else viewed(inner, self.memory)

    def _own(self, t: Tensor) -> Tensor:
        """The tensor that the model has now for a parameter or buffer `t` of the user's model; else `t`."""
        return tensors_of(self.model).get(self.source.get(id(t), ""), t)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of `model` by name, tied ones by the first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def unwrapped_storage(t: Tensor) -> int:
    """The identity of the storage of `t`, also where torch.func has wrapped `t`."""
    return storage_of(torch.func.debug_unwrap(t))
