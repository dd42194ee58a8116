"""What a model computes from the values of a few inputs, such as the sizes of images, while it is traced.

A trace has no values, but shapes and branches may depend on these: what they become is computed beside the trace.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr, tree_leaves, tree_map_only, tree_map_with_path
from torch.utils.weak import WeakTensorKeyDictionary

from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.engine.trace.traced_values import BySample, Values
from zfunc.models.cut.user_code import in_a_check

LARGEST = 1 << 20
"""Elements of a tensor whose values are computed beside a trace, at most."""
READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero"}
READS |= {f"__{x}__" for x in ("bool", "int", "float", "index", "complex", "contains", "array")}
OF_VALUES = {"nonzero", "argwhere", "unique", "unique_consecutive", "bincount"}
OF_VALUES |= {"tensor", "as_tensor", "new_tensor"}
"""Functions whose results have shapes that depend on values, or that read numbers."""
FACTORIES = {"arange", "zeros", "ones", "full", "linspace", "eye", "tensor", "as_tensor"}
FACTORIES |= {"tril_indices", "triu_indices"}
LIKE = {f"{x}_like" for x in ("zeros", "ones", "full")} | {f"new_{x}" for x in ("zeros", "ones", "full")}
SIZED = {
    "view",
    "reshape",
    "expand",
    "repeat",
    "narrow",
    "split",
    "chunk",
    "unflatten",
    "tensor_split",
    "pad",
}
SIZED |= {"tile", "roll", "topk", "interpolate", "select", "unfold", "split_with_sizes"}
"""Functions that take numbers from tensors."""
NOT_IN_PLACE = {"__index__", "__invert__", "__int__", "__iter__", "__init__"}
UNKNOWN = ("empty", "rand", "dropout", "bernoulli", "multinomial", "normal", "poisson")
UNKNOWN += ("uniform", "exponential", "geometric", "cauchy", "rrelu", "gumbel")
"""Parts of the names of functions whose results no trace knows: random numbers and memory as it is."""


def tensors_written(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call of torch's function `name` writes, in place or to `out`."""
    in_place = (name.endswith("_") and not name.endswith("__")) or "inplace" in kwargs
    in_place = in_place or name == "__setitem__" or (name.startswith("__i") and name not in NOT_IN_PLACE)
    written = tree_leaves((args[:1] if in_place else (), kwargs.get("out")))
    return [t for t in written if isinstance(t, Tensor)]


class KnownValues(TorchFunctionMode):
    """A mode that computes, while a model is traced, the values of tensors made of known inputs alone. Inputs
    wrapped in `Values` are known; of inputs in `BySample` only the number of elements that a mask selects is
    known.

    With `read`, all of `BySample` is known, and `read(name, count)` is told each input read; `count`: as a
    number only.
    """

    def __init__(self, device: torch.device, read: Callable[[str, bool], None] | None = None) -> None:
        super().__init__()
        self.device, self.read = device, read
        self.sampled = set[str]()  # names of inputs in BySample
        # By tensor: its values, and the names of inputs behind them.
        self.known: Any = WeakTensorKeyDictionary()
        self.written = dict[int, Any]()  # storages of values that are known no more

    def with_tensors(self, x: Any) -> Any:
        """A copy of a pytree with tensors in place of its `Values` and `BySample`, which are known from here on."""

        def tensor(path: Any, v: Any) -> Any:
            name = keystr(path)
            if isinstance(v, Values):
                return self._constant(v.tensor, frozenset([name]))
            if isinstance(v, BySample):
                self.known[v.tensor] = v.sample.tensor, frozenset([name])
                self.sampled.add(name)
                return v.tensor
            return v

        return tree_map_with_path(tensor, x, is_leaf=lambda v: isinstance(v, Values | BySample))

    def add_constants(self, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Know the second of each pair of tensors as the values of the first, whatever the inputs are."""
        for t, values in tensors:
            if values.numel() <= LARGEST:
                self.known[t] = values.to("cpu", t.dtype), frozenset[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func is Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args))
        if name == "masked_select" and "out" not in kwargs:
            return self._masked_select(types, *args, **kwargs)
        by_scalar = name == "__setitem__" and not (isinstance(args[2], Tensor) and args[2].dim())
        if name == "__getitem__" or (name == "__setitem__" and not by_scalar):
            args = (args[0], self._known_index(args[1]), *args[2:])
        if name == "repeat_interleave" and "output_size" not in kwargs:
            kwargs |= self._output_size(*args, **kwargs)
        if name in SIZED or name in FACTORIES or name in LIKE:
            first = 0 if name in FACTORIES else 1
            rest, kwargs = tree_map_only(Tensor, self._number, (args[first:], kwargs))
            args = (*args[:first], *rest)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        values = [self._of(t) for t in tensors]
        known = all(values) and not any(x in name for x in UNKNOWN)
        names = frozenset[str]().union(*(x[1] for x in values if x))
        # 1. What reads values: numbers, or a constant in place of the result.
        free = known and bool(tensors) and self._may_depend_on(names)
        checks = known and bool(tensors) and name in READS and in_a_check()
        if name in READS and (free or checks):
            self._note(names, count=checks)
            return self._real(func, args, kwargs)
        if free and (name in OF_VALUES or (name == "where" and len(args) + len(kwargs) == 1)):
            self._note(names)
            real = self._real(func, args, kwargs)
            return tree_map_only(Tensor, lambda t: self._constant(t, names), real)
        # 2. Any other function, and its values beside it.
        y = func(*args, **kwargs)
        results = [t for t in tree_leaves(y) if isinstance(t, Tensor)]
        if name in LIKE and results:
            real = self._real(func, args, kwargs, shapes_alone=True) if _small(results) else None
        elif known and (results or name == "__setitem__") and _small(results):
            real = self._real(func, args, kwargs)
        else:
            self._forget(name, args, kwargs)
            return y
        for t, value in zip(results, (v for v in tree_leaves(real) if isinstance(v, Tensor)), strict=False):
            if t.shape == value.shape:
                self.known[t] = value, frozenset[str]() if name in LIKE else names
        return y

    def _masked_select(self, types: Any, input: Tensor, mask: Tensor) -> Any:
        """The elements of `input` where boolean `mask` is true, both broadcast, as masked_select returns."""
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        x, mask = (self.__torch_function__(Tensor.expand, types, (t, shape)) for t in (input, mask))
        return self.__torch_function__(Tensor.__getitem__, types, (x, mask))

    def _output_size(self, input: Tensor, repeats: Any = None, dim: int | None = None) -> dict[str, int]:
        """The argument `output_size` for torch.repeat_interleave, if the `repeats` are known; else {}."""
        x, times = input, input if repeats is None else repeats
        known = self._of(times) if isinstance(times, Tensor) else None
        if not known or not self._may_depend_on(known[1]):
            return {}
        self._note(known[1])
        each = (x.numel() if dim is None else x.shape[dim]) if times is not x and times.numel() == 1 else 1
        with without_modes():
            return {"output_size": int(known[0].sum()) * each}

    def _number(self, t: Tensor) -> Any:
        """The Python number in `t`, a tensor without dimensions, if its value is known; else `t`."""
        known = None if t.dim() or t.is_floating_point() else self._of(t)
        if known is None or not self._may_depend_on(known[1]):
            return t
        self._note(known[1])
        with without_modes():
            return known[0].item()

    def _known_index(self, index: Any) -> Any:
        """A tensor's `index` with known masks as integer indices, and known tensors in slices as Python numbers."""
        parts = index if isinstance(index, tuple) else (index,)
        indices = list[Any]()
        for x in parts:
            if isinstance(x, slice):
                ends = (x.start, x.stop, x.step)
                indices.append(slice(*(self._number(v) if isinstance(v, Tensor) else v for v in ends)))
            elif isinstance(x, Tensor) and x.dtype == torch.bool and x.dim() and (known := self._of(x)):
                indices += self._index_tensors(x, *known)
            else:
                indices.append(x)
        return tuple(indices) if isinstance(index, tuple) or len(indices) > 1 else indices[0]

    def _index_tensors(self, mask: Tensor, value: Tensor, names: frozenset[str]) -> list[Tensor]:
        """Index tensors, one for each dimension, of the true elements of `mask`, whose known values are
        `value`, computed from the inputs `names`."""
        with without_modes():
            places = value.nonzero(as_tuple=True)
        if self.read is None and self._may_depend_on(names):
            return [self._constant(t, names) for t in places]
        self._note(names, count=True)
        # Any other number is an index out of range, not a wrong result: also where none is selected here.
        n, far = len(places[0]), torch.iinfo(torch.int64).max
        zeros = torch.zeros(1, dtype=torch.int64, device=mask.device)
        zero = zeros[torch.where(mask.sum()[None] == n, 0, far)]
        indices = [*(torch.nonzero_static(mask, size=n) + zero).unbind(1)]
        for t, known in zip(indices, places, strict=True):
            self.known[t] = known, names
        return indices

    def _may_depend_on(self, names: frozenset[str]) -> bool:
        """Whether a trace may depend on values of the inputs `names`: with `read`, or if none is BySample."""
        return self.read is not None or names.isdisjoint(self.sampled)

    def _of(self, t: Tensor) -> Any:
        """The known values of `t` and the names of the inputs that they come from; None if unknown. A tensor that
        was made outside of the trace is a constant of it."""
        known = self.known.get(t)
        own = known is None and type(t) is Tensor and not is_fake(t) and torch.func.debug_unwrap(t) is t
        if own and t.numel() <= LARGEST:
            with without_modes():
                known = self.known[t] = t.to("cpu", copy=True), frozenset[str]()
        return None if known is None or storage_of(known[0]) in self.written else known

    def _constant(self, value: Tensor, names: frozenset[str]) -> Tensor:
        """Put a copy of `value`, made of inputs `names`, into the trace as a constant; if small, it stays known."""
        with without_modes():
            stored, constant = value.clone(), value.clone()
        t = constant.to(self.device, copy=True)
        if stored.numel() <= LARGEST:
            self.known[t] = stored, names
        return t

    def _real(self, func: Any, args: Any, kwargs: Any, shapes_alone: bool = False) -> Any:
        """Run `func` on the CPU with the known values of its arguments, or, if `shapes_alone`, with uninitialized
        ones."""

        def value(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cpu")
            if not isinstance(x, Tensor):
                return x
            return torch.empty(x.shape, dtype=x.dtype) if shapes_alone else self.known[x][0]

        symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
        if any(isinstance(x, symbolic) for x in tree_leaves((args, kwargs))):
            return None
        shapes = (Tensor, torch.device)
        with without_modes():
            args, kwargs = (tree_map_only(shapes, value, x) for x in (args, kwargs))
            if "device" in kwargs:
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    def _forget(self, name: str, args: Any, kwargs: Any) -> None:
        """Mark as unknown the tensors that function `name` writes, in place or to `out`, and their views."""
        for t in tensors_written(name, args, kwargs):
            if known := self._of(t):
                self.written[storage_of(known[0])] = known[0].untyped_storage()

    def _note(self, names: frozenset[str], *, count: bool = False) -> None:
        for name in names if self.read else ():
            self.read(name, count)  # pyright: ignore


def _small(tensors: list[Tensor]) -> bool:
    return all(isinstance(t.numel(), int) and t.numel() <= LARGEST for t in tensors)


@contextmanager
def without_modes() -> Iterator[None]:
    """A context that suspends surrounding modes and transforms, so that operations on real tensors just run."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch.no_grad(),
    ):
        yield
