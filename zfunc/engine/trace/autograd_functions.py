"""The user's `torch.autograd.Function`s within `torch.func.vjp`: one without setup_context as one that has it.

torch.func refuses the older style, in which `forward(ctx, *args)` itself saves what `backward(ctx, *grads)` reads,
and tells forward of no argument that it requires a gradient. What a backward would lose in silence is refused.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from zfunc.errors import refuse

Apply = Callable[..., Any]  # takes a class derived from Function, and what its `apply` gets
_thread = threading.local()  # .carrier: what carries out `apply` in this thread


@contextmanager
def applied_by(carrier: Apply | None) -> Iterator[None]:
    """A context in which `carrier(kind, *args, **kwargs)` carries out each `kind.apply(*args, **kwargs)` of this
    thread; None: torch does, as outside of such contexts."""
    before = getattr(_thread, "carrier", None)
    _thread.carrier = carrier
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _thread.carrier = before


def _apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    carrier: Apply = getattr(_thread, "carrier", None) or apply_of_torch
    return carrier(kind, *args, **kwargs)


class _Hooked:
    """The code of `Function.apply` while a context of `applied_by` is open in any thread."""

    def apply(self, *args: Any, _apply: Apply, **kwargs: Any) -> Any:
        __class__  # noqa: B018 - a cell, as torch's function has one
        return _apply(self, *args, **kwargs)


# The code is exchanged, not the function, because a module may keep `sine = Sine.apply`.
_hooked: Any = Function.apply.__func__  # type: ignore[attr-defined]
_hooked.__kwdefaults__ = {"_apply": _apply}  # which torch's code does not look at
apply_of_torch = FunctionType(
    _hooked.__code__, _hooked.__globals__, _hooked.__name__, _hooked.__defaults__, _hooked.__closure__
)
_lock, _contexts = threading.Lock(), 0  # of all threads


def _count(change: int) -> None:
    """Add `change`, 1 or -1, to the number of contexts of `applied_by` that are open in all threads. While any is,
    `Function.apply` has the code of _Hooked."""
    global _contexts
    with _lock:
        _contexts += change
        _hooked.__code__ = _Hooked.apply.__code__ if _contexts else apply_of_torch.__code__


def apply_in_vjp(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    """What `kind.apply(*args, **kwargs)` returns, with gradients by `torch.func` for either style of `kind`."""
    if not torch._C._are_functorch_transforms_active() or kind is CheckpointFunction:
        return apply_of_torch(kind, *args, **kwargs)
    if kind.__module__ == "torch._library.autograd":  # of torch.library.custom_op, called below torch.func
        with enable_single_level_autograd_function():
            return super(Function, kind).apply(*args, **kwargs)
    needs = tuple(isinstance(x, Tensor) and _requires_grad(x) for x in args)
    if kind.setup_context is not Function.setup_context:
        methods = {"forward": _told(kind.forward, needs), "backward": _checked(kind)}
        return apply_of_torch(_class_of(kind, kind, methods), *args, **kwargs)
    *results, held = apply_of_torch(_with_setup_context(kind, needs), *args, **kwargs)
    return tuple(results[: len(held.outputs)]) if held.several else results[0]


class _At(int):
    """Stands for a tensor: its place among the arguments, results and further tensors of a forward."""


@frozen(eq=False)
class _Held:
    """What a forward leaves on its ctx: the attributes as a pytree's leaves, with _At in place of tensors."""

    leaves: list[Any]
    spec: TreeSpec
    outputs: list[Any]  # arguments of torch.zeros, or None, of each result
    several: bool  # whether the results are a tuple

    def attributes(self, tensors: Callable[[_At], Any]) -> dict[str, Any]:
        """The attributes, with what `tensors` returns in place of _At."""
        return tree_unflatten([tensors(x) if isinstance(x, _At) else x for x in self.leaves], self.spec)


def _with_setup_context(kind: type[Function], needs: tuple[bool, ...]) -> type[Function]:
    """A class with setup_context that computes what `kind`, without one, does. Its forward returns the results,
    the further tensors on the ctx, and a _Held. `needs` says which arguments need gradients."""

    def forward(*args: Any) -> tuple[Any, ...]:
        ctx: Any = FunctionCtx()
        ctx.needs_input_grad = needs
        y = _told(kind.forward, needs, first=1)(ctx, *args)
        if getattr(ctx, "dirty_tensors", ()):
            refuse((), f"ctx.mark_dirty in {_name(kind)}", "setup_context with it", "return a new tensor")
        outputs = y if isinstance(y, tuple) else (y,)
        tensors = _tensors_in((args, outputs))
        at = {id(t): n for n, t in enumerate(tensors)}
        leaves, spec = tree_flatten(vars(ctx))
        more = {id(t): t for t in leaves if isinstance(t, Tensor) and id(t) not in at}
        at |= {x: len(tensors) + n for n, x in enumerate(more)}
        leaves = [_At(at[id(t)]) if isinstance(t, Tensor) else t for t in leaves]
        zeros = [
            (t.shape, {"dtype": t.dtype, "device": t.device}) if isinstance(t, Tensor) else None
            for t in outputs
        ]
        passed = {id(t) for t in args}  # of which setup_context may not save one that is returned as it is
        fresh = (t.view_as(t) if isinstance(t, Tensor) and id(t) in passed else t for t in outputs)
        return *fresh, *more.values(), _Held(leaves, spec, zeros, isinstance(y, tuple))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *results, ctx.held = output
        num = len(ctx.held.outputs)
        tensors = [*_tensors_in((inputs, tuple(results[:num]))), *results[num:]]
        attributes = ctx.held.attributes(tensors.__getitem__)
        ctx.mark_non_differentiable(*attributes.get("non_differentiable", ()), *results[num:])
        ctx.set_materialize_grads(False)  # or there would be zeros for the further tensors, too
        ctx.save_for_backward(*(tensors[x] for x in ctx.held.leaves if isinstance(x, _At)))

    def backward(ctx: Any, *grads: Any) -> Any:
        inner, saved = FunctionCtx(), iter(ctx.saved_tensors)
        vars(inner).update(ctx.held.attributes(lambda _: next(saved)))
        inner.saved_tensors, inner.needs_input_grad = getattr(inner, "to_save", ()), ctx.needs_input_grad
        if getattr(inner, "materialize_grads", True):
            pairs = zip(grads, ctx.held.outputs, strict=False)
            grads = tuple(x and torch.zeros(x[0], **x[1]) if g is None else g for g, x in pairs)
        return _checked(kind)(inner, *grads[: len(ctx.held.outputs)])

    return _class_of(
        kind, Function, {"forward": forward, "setup_context": setup_context, "backward": backward}
    )


def _tensors_in(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]


def _class_of(
    kind: type[Function], base: type[Function], methods: dict[str, Callable[..., Any]]
) -> type[Function]:
    return type(kind.__name__, (base,), {name: staticmethod(f) for name, f in methods.items()})


def _requires_grad(t: Tensor) -> bool:
    """Whether `t` requires a gradient, at any level of `torch.func`."""
    inner = torch._C._functorch
    return t.requires_grad or (inner.is_gradtrackingtensor(t) and _requires_grad(inner.get_unwrapped(t)))


def _told(forward: Callable[..., Any], needs: tuple[bool, ...], first: int = 0) -> Callable[..., Any]:
    """`forward`, to which arguments from number `first` on say whether a gradient is asked of them: `needs`."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Told({id(x): need for x, need in zip(args[first:], needs, strict=False) if need}):
            return forward(*args, **kwargs)

    return call


class _Told(TorchFunctionMode):
    """A mode in which `requires_grad` of the tensors `needing`, by id, is True."""

    def __init__(self, needing: dict[int, bool]) -> None:
        super().__init__()
        self.needing = needing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = func == Tensor.requires_grad.__get__  # type: ignore[attr-defined]
        return (asked and self.needing.get(id(args[0]))) or func(*args, **(kwargs or {}))


def _checked(kind: type[Function]) -> Callable[..., Any]:
    """The backward of `kind`, which raises ValueError where gradients would be lost."""

    @wraps(kind.backward)
    def backward(*args: Any) -> Any:
        with _Checked(_name(kind)):
            return kind.backward(*args)

    return backward


class _Checked(TorchFunctionMode):
    """A mode in which the backward of the autograd function `name` runs, and what would lose a gradient raises
    ValueError."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        got, do = "", "pass what it reads as an argument of apply (of a module, its weight)"
        tensors = _tensors_in((args, kwargs))
        if func in (Tensor.backward, torch.autograd.backward):
            got, do = "torch.autograd.backward", "use torch.autograd.grad(y, inputs, grads)"
        elif any(type(t) is Tensor and t.is_meta and not is_fake(t) for t in tensors):
            got = "a buffer of a module"
        elif any(isinstance(t, nn.Parameter) for t in tensors):
            looks = "__get__" in str(func)  # at its shape; a transposed one is a tensor
            got = "an nn.Parameter" if not looks or isinstance(func(*args), Tensor) else ""
        if got:
            expected = "gradients of the function's arguments alone, or others would be lost"
            refuse((), f"{got} in the backward of {self.name}", expected, do)
        return func(*args, **(kwargs or {}))


def _name(kind: type[Function]) -> str:
    return f"{kind.__qualname__} of {kind.__module__}, a torch.autograd.Function"
