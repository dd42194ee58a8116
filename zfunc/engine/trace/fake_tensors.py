"""Fake tensors, which have shapes, strides and dtypes but no data: segments are traced on them."""

import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, run_fallback_kernel
from torch.utils._pytree import tree_flatten

T = TypeVar("T")
aten = torch.ops.aten
OWN_STRIDES = {  # operations whose kernels return other strides or types than torch's fake ones
    aten._batch_norm_with_update.default,
    aten._log_softmax_backward_data.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.batch_norm_backward.default,
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.huber_loss_backward.default,
    aten.log_sigmoid_forward.default,
    aten.logaddexp.default,
    aten.max_unpool2d.default,
    aten.mse_loss_backward.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.native_dropout_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.normal.Tensor_Tensor,
    aten.pow.Scalar,
    aten.rrelu_with_noise.default,
    aten.rrelu_with_noise_backward.default,
    aten.rrelu_with_noise_functional.default,
    aten.smooth_l1_loss_backward.default,
    aten.special_xlog1py.default,
    aten.xlogy.Tensor,
}
# Products of matrices of one dtype.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# Fake kernels that return one tensor twice; from its cache torch returns two, so a second trace would need more.
UNCACHED = {aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default}
# Some operations on fake tensors stand for others like them, as those of a few tiles for those of all tiles.
COUNTED: ContextVar[int] = ContextVar("times that an operation is counted", default=1)
MOST_RUN = 1 << 22  # elements of all arguments of a kernel that is run while a segment is traced


def counted_times(items: Iterable[tuple[T, int]]) -> Iterator[T]:
    """Yield `x` of each pair `(x, times)`; in the code that handles `x`, each operation on fake tensors
    counts `times` times."""
    for x, times in items:
        before = COUNTED.set(COUNTED.get() * times)
        yield x
        COUNTED.reset(before)


@cache
def keep_device_guard() -> None:
    """Have torch's stand-in for a missing GPU made by a thread that never ends.

    A torch for CUDA that sees no GPU needs one for fake tensors. It belongs to the thread that first enters a mode
    of them, and all threads read it, also when that one has ended.
    """
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)  # not there in torch 2.9
    if make is None or not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    ready = threading.Event()

    def stay() -> None:
        make()
        ready.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="zfunc device guard", daemon=True).start()
    ready.wait()


class FakeMode(FakeTensorMode):
    """Torch's mode of fake tensors (tensors without data), entered in any thread."""

    def __enter__(self) -> Any:
        keep_device_guard()
        return super().__enter__()


VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
}  # of which fake ones have own strides where a size is 1


class FakeTensors(FakeMode):
    """A mode of fake tensors (tensors without data) that have the strides and dtypes of real results where
    these are cheap to know: kernels of which torch's fake tensors get strides wrong run on zeros, if
    arguments are small."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The results of an operation as fake tensors, with the strides of real ones where known."""
        if func in UNCACHED:
            enabled, self.cache_enabled = self.cache_enabled, False
            try:
                return super().dispatch(func, types, args, kwargs)
            finally:
                self.cache_enabled = enabled
        if func in PRODUCTS and len(dtypes := {t.dtype for t in args if isinstance(t, Tensor)}) > 1:
            got = " and ".join(sorted(map(str, dtypes)))
            raise RuntimeError(f"{func}: got matrices of {got}, expected one type")
        if func in VIEWS and not args[0].is_contiguous():
            return self._viewed(func, types, args)
        if func not in OWN_STRIDES:
            return super().dispatch(func, types, args, kwargs)
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [t for t in flat if isinstance(t, Tensor)]
        small = sum(t.numel() for t in tensors) <= MOST_RUN
        plain = all(t.is_contiguous() for t in tensors) and len({t.dtype for t in tensors}) == 1
        if not small or plain:
            return super().dispatch(func, types, args, kwargs)
        names = [a.name for a in func._schema.arguments]
        if "generator" in names:  # torch's own is not advanced
            named = {**(kwargs or {}), "generator": torch.Generator(tensors[0].device)}
            flat, spec = tree_flatten((args[: names.index("generator")], named))
        return run_fallback_kernel(self, func, flat, spec, NotImplementedError(f"{func} has no kernel"))

    def _viewed(self, func: Any, types: Any, args: Any) -> Any:
        """What a view of another shape returns, with the strides of a real one: the layout that further operations
        choose depends on them."""
        t, made = args[0], super().dispatch(func, types, args)
        real = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta").view(made.shape)
        if made.stride() == real.stride():
            return made
        placed = (t, real.shape, real.stride(), t.storage_offset())
        return super().dispatch(aten.as_strided.default, types, placed)
