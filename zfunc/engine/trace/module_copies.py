"""Copies of modules: without memory, or with other tensors, whose hooks know the copies of what they close over.

A trace would keep the first values of a view that was made before, of a tensor that a step changes: it is refused.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.facts import content_of, globals_in, is_open
from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.errors import refuse

M = TypeVar("M", bound=nn.Module)
SHAPES = ("size", "dim", "numel", "stride", "__len__", "is_floating_point")  # methods that read no value


def skeleton_of(module: nn.Module, written: Collection[str]) -> nn.Module:
    """A copy of `module` on the meta device, without memory. A _StaleView is in place of each attribute that is a
    view of a trained parameter, or of one of the buffers `written`."""
    memo, named = dict[int, Any](), [*module.named_parameters(), *module.named_buffers()]
    for _, t in named:
        meta = t.detach().to("meta")
        memo[id(t)] = nn.Parameter(meta, t.requires_grad) if isinstance(t, nn.Parameter) else meta
    memory = changing_memory(named, written)
    for t in tensors_held(module):
        if id(t) in memo:
            continue
        if name := viewed(t, memory):
            memo[id(t)] = _StaleView(t, name)
        elif not t.is_leaf:  # kept by forward of an earlier call, with a graph: torch copies no such tensor
            memo[id(t)] = t.detach().clone()
    return deep_copy(module, memo)


def changing_memory(named: Iterable[tuple[str, Tensor]], written: Collection[str]) -> dict[int, str]:
    """The names of the tensors among `named`, pairs of a name and a tensor, whose values a step changes, by their
    storages: of those that require gradients, and of the buffers `written`."""
    return {storage_of(t): name for name, t in named if t.requires_grad or name in written}


def viewed(t: Tensor, memory: Mapping[int, str]) -> str:
    """The name of the tensor of which `t` is a view, of those in `memory` by storage; "" if of none, and of a
    _StaleView, which refuses its reads itself."""
    if isinstance(t, _StaleView) or t.layout is not torch.strided:
        return ""
    return memory.get(storage_of(t), "")


def refuse_stale(func: Any, args: Any, name: str, place: str = "") -> None:
    """Raise SettingError for a call of `func`, at `place` as text, on a view of the tensor `name` that was made
    before, unless `func` returns the view's shape, dtype or such: a trace would keep the view's first values."""
    asks = "__get__" in str(func) or getattr(func, "__name__", "") in SHAPES
    if asks and not isinstance(func(*args), Tensor):  # as that of .T is
        return
    got = f"a view of {name!r} that was made before{place and f', read {place}'}, which would keep its first values"
    do = "make it there, as self.weight[0], or clone() it"
    refuse("model", got, "one made in forward or in the loss", do)


class _StaleView(Tensor):
    """In a copy of a module, an attribute that is a view of the tensor `viewed`, which a step changes; without
    memory. It may be replaced, as nn.utils.spectral_norm does; a read of it is refused."""

    viewed: str

    def __new__(cls, t: Tensor, viewed: str) -> "_StaleView":
        view = t.detach().to("meta").as_subclass(cls)
        view.viewed = viewed
        return view

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StaleView":
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            view = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, _StaleView))
            refuse_stale(func, args, view.viewed)
            return func(*args, **(kwargs or {}))


def modules_held(module: nn.Module) -> list[nn.Module]:
    """A module and those in it, also in containers and objects of the user's that are attributes."""
    return [x for x in _values_held(module) if isinstance(x, nn.Module)]


def tensors_held(module: nn.Module) -> list[Tensor]:
    """The tensors in attributes of a module, and of those in it: parameters, buffers, and any in containers and in
    objects of the user's."""
    return [x for x in _values_held(module) if isinstance(x, Tensor)]


def _values_held(module: nn.Module) -> Iterator[Any]:
    """Yield a module and, once each, the values in its attributes, in containers, and in attributes of these."""
    left, seen = [module], set[int]()
    while left:
        if id(x := left.pop()) not in seen:
            seen.add(id(x))
            yield x
            left += tree_leaves(vars(x)) if isinstance(x, nn.Module) or is_open(x, called=True) else []


def deep_copy(module: M, memo: dict[int, Any]) -> M:
    """`copy.deepcopy` of a module, whose hooks, and other functions in attributes, know the copies of what they
    close over: a hook that writes into an attribute of a module writes into that of its copy."""
    held = (x for m in modules_held(module) for x in vars(m).values())
    memo.update({id(x): x for x in held if isinstance(x, torch.Generator)})  # torch copies none
    copied = copy.deepcopy(module, memo)
    for m in modules_held(copied):
        for holder in (vars(m), *(x for x in vars(m).values() if isinstance(x, dict))):
            for name, f in [*holder.items()]:
                if isinstance(f, FunctionType):
                    holder[name] = _rebound(f, memo)
    return copied


def _rebound(f: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    """The function `f`; if `memo` has copies of what it reads from closures and globals, one that reads these."""
    contents = [content_of(c) for c in f.__closure__ or ()]
    read = {x: f.__globals__[x] for x in globals_in(f.__code__) if x in f.__globals__}
    if not any(id(x) in memo for x in (*contents, *read.values())):
        return f
    cells = tuple(CellType(memo.get(id(x), x)) for x in contents)
    own = f.__globals__ | {name: memo.get(id(x), x) for name, x in read.items()}
    other = FunctionType(f.__code__, own, f.__name__, f.__defaults__, cells)
    other.__kwdefaults__ = f.__kwdefaults__
    vars(other).update(vars(f))
    return other
