"""Copies of modules: without memory, or with other tensors, whose hooks know the copies of what they close over."""

import copy
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.facts import content_of
from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.errors import refuse


def skeleton_of(module: nn.Module) -> nn.Module:
    """A copy of the module on the meta device, without memory."""
    memo = dict[int, Any]()
    for t in (*module.parameters(), *module.buffers()):
        meta = t.detach().to("meta")
        memo[id(t)] = nn.Parameter(meta, t.requires_grad) if isinstance(t, nn.Parameter) else meta
    trained = {storage_of(p): x for x, p in module.named_parameters() if p.requires_grad}
    for t in tensors_held(module):
        if id(t) in memo:
            continue
        if t.layout is torch.strided and (name := trained.get(storage_of(t))):
            memo[id(t)] = _StaleView(t, name)
        elif (
            not t.is_leaf
        ):  # forward has kept it of an earlier call, with a graph, and torch copies no such tensor
            memo[id(t)] = t.detach().clone()
    return deep_copy(module, memo)


class _StaleView(Tensor):
    """In a copy of a module, an attribute that is a view of the trained parameter `parameter`, without memory.
    It may be replaced, as nn.utils.spectral_norm does; a read raises SettingError, as a trace would keep values."""

    parameter: str

    def __new__(cls, t: Tensor, parameter: str) -> "_StaleView":
        view = t.detach().to("meta").as_subclass(cls)
        view.parameter = parameter
        return view

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StaleView":
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__get__" not in str(func):  # a look at its shape
            name = next(x.parameter for x in tree_leaves((args, kwargs)) if isinstance(x, _StaleView))
            got = f"an attribute that is a view of {name!r}, which would keep its first values"
            refuse(
                "model", got, "one made in forward", "make it there, as self.weight[0], or clone() it before"
            )
        return super().__torch_function__(func, types, args, kwargs)


def modules_held(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it, also such as are in containers that are attributes."""
    left, seen = [module], set[int]()
    while left:
        if id(m := left.pop()) not in seen:
            seen.add(id(m))
            left += [x for x in tree_leaves(vars(m)) if isinstance(x, nn.Module)]
            yield m


def tensors_held(module: nn.Module) -> list[Tensor]:
    """The tensors in attributes of a module, and of those in it: parameters, buffers, and any in containers."""
    return [t for m in modules_held(module) for t in tree_leaves(vars(m)) if isinstance(t, Tensor)]


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a module, whose hooks, and other functions in attributes, know the copies of what they
    close over: a hook that writes into an attribute of a module writes into that of its copy."""
    held = (x for m in modules_held(module) for x in vars(m).values())
    memo.update({id(x): x for x in held if isinstance(x, torch.Generator)})  # torch copies none
    copied = copy.deepcopy(module, memo)
    for m in modules_held(copied):
        for holder in (vars(m), *(x for x in vars(m).values() if isinstance(x, dict))):
            for name, f in [*holder.items()]:
                if isinstance(f, FunctionType) and any(
                    id(content_of(c)) in memo for c in f.__closure__ or ()
                ):
                    holder[name] = _rebound(f, memo)
    return copied


def _rebound(f: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    contents = [content_of(c) for c in f.__closure__ or ()]
    cells = tuple(CellType(memo.get(id(x), x)) for x in contents)
    other = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, cells)
    other.__kwdefaults__ = f.__kwdefaults__
    vars(other).update(vars(f))
    return other
