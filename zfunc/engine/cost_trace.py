"""The cost of a segment, traced on fake tensors: shapes, FLOPs, peak memory, whether it draws random numbers.

The code of training runs on tensors without data, and their allocations are counted, so the memory of a plan is
known before it runs.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from zfunc.core.layout import round_up
from zfunc.core.spec import ALLOCATION
from zfunc.engine.vjp import differentiated
from zfunc.runtime.rng import is_draw

T = TypeVar("T")

# They allocate, or look at memory in another shape, though their schemas do not say so.
UNLAUNCHED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten._unsafe_view,
}
PRODUCTS = {  # matrix products, and which argument is their first factor
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}


class InPlaceError(ValueError):
    """A function wrote into `tensor`, which it did not allocate. `name` describes it, `instead` is what to use."""

    def __init__(self, func: Any, tensor: Tensor, name: str = "", instead: str = "") -> None:
        name = name or (
            f"a tensor of shape {tuple(tensor.shape)} made outside the function (a parameter, the input, a buffer "
            "or a captured tensor)"
        )
        if func is torch.ops.aten.embedding_renorm_.default:
            instead = "leave out max_norm, which scales the weight in place"
        instead = instead or "return a new tensor instead (of a module, with inplace=False)"
        super().__init__(f"got an in-place change ({func}) of {name}, expected a pure function: {instead}")
        self.func, self.tensor = func, tensor


class AllocationTracker(TorchDispatchMode):
    """Counts the FLOPs, the launches and the bytes of live storages allocated under it, now (`live`) and at most
    (`peak`).

    `random` records whether an operation drew random numbers. With `pure`, a write into a tensor allocated
    elsewhere raises InPlaceError. What the CPU's kernels allocate themselves counts too, unless this is a model of
    the operations `of_accelerator`.
    """

    def __init__(self, *, pure: bool = False, of_accelerator: bool = False) -> None:
        super().__init__()
        self.live = self.peak = self.flops = self.launches = 0
        self.random = False
        self._pure, self._of_accelerator = pure, of_accelerator
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pure:
            self._check_pure(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        self.launches += is_launched(func)
        self.random = self.random or is_draw(func, args, kwargs or {})
        # A view, or an argument returned, allocates nothing.
        if not any(r.alias_info for r in func._schema.returns):
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    self._count(t)
        if not self._of_accelerator:
            self.peak = max(self.peak, self.live + cpu_kernel_bytes(func, args, out))
        return out

    def _count(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = round_up(storage.nbytes(), ALLOCATION)
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def holds(self, t: Tensor) -> bool:
        """Whether the storage of `t` was allocated under this tracker."""
        return t.untyped_storage()._cdata in self._sizes

    def _check_pure(self, func: Any, args: Any, kwargs: Any) -> None:
        if any(isinstance(t, torch.nn.Parameter) for t in tree_leaves((args, kwargs))):
            raise ValueError(
                f"got an nn.Parameter the function captured (in {func}), expected it to use the parameters it is "
                "passed: a captured one would never be trained"
            )
        if kwargs.get("generator") is not None:
            raise ValueError(
                f"got a generator of the function's own (in {func}), expected the default one, which is seeded the "
                "same for the forward and for recomputing it"
            )
        if not func._schema.is_mutable:
            return
        by_name = {declared.name: declared for declared in func._schema.arguments}
        passed = [
            *zip(func._schema.arguments, args, strict=False),
            *((by_name[k], x) for k, x in kwargs.items()),
        ]
        for declared, value in passed:
            if declared.alias_info is not None and declared.alias_info.is_write:
                for t in tree_leaves(value):
                    if isinstance(t, Tensor) and not self.holds(t):
                        raise InPlaceError(func, t)


def cpu_kernel_bytes(func: Any, args: Any, out: Any) -> int:
    """What the CPU's kernel of an operation allocates beside its result.

    A product of 16-bit matrices whose first factor is transposed is summed in fp32 (`gemm_transb_impl` in torch's
    ATen/native/cpu/BlasKernel.cpp), those of a batch one by one.

    >>> x = torch.ones(2, 3, dtype=torch.bfloat16)
    >>> [cpu_kernel_bytes(torch.ops.aten.mm.default, (a, a.mT), a @ a.mT) for a in (x, x.mT)]
    [0, 36]
    """
    factor = PRODUCTS.get(func._overloadpacket)
    if factor is None or out.device.type != "cpu" or out.dtype not in (torch.bfloat16, torch.float16):
        return 0
    rows, columns = args[factor].stride()[-2:]
    return 4 * out.shape[-2] * out.shape[-1] if rows == 1 and columns != 1 else 0


@cache
def is_launched(func: Any) -> bool:
    """Whether an accelerator computes something for this operation: not for views, memory alone, or questions of
    shape or device.

    >>> [is_launched(f) for f in (torch.ops.aten.mm.default, torch.ops.aten.t.default, torch.ops.aten.add_.Tensor)]
    [True, False, True]
    """
    tensors = any("Tensor" in str(r.type) for r in func._schema.returns) or func._schema.is_mutable
    return tensors and not func.is_view and func._overloadpacket not in UNLAUNCHED


@frozen
class Trace:
    """The cost of a segment for one micro-batch, in FLOPs and bytes, and its output (`out`, on meta).

    The peaks are those of each pass, results included, and so are the launches. `residual_bytes` is alive between
    them beside the output, `stash_bytes` with the input and what of the output is a residual, if it
    `keeps_output`. `random` is whether one of them draws random numbers. `copied_bytes` is as in `SegmentCost`.
    """

    out: Any
    forward_flops: int
    backward_flops: int
    forward_launches: int
    backward_launches: int
    output_bytes: int
    residual_bytes: int
    stash_bytes: int
    keeps_output: bool
    forward_peak: int
    backward_peak: int
    random: bool
    copied_bytes: int = 0


Forward = Callable[..., tuple[Any, Any]]
Backward = Callable[..., Any]


def run_on_fake_tensors(function: Callable[..., T], *args: Any, device: torch.device) -> T:
    """`function(*args)` with fake tensors for those in `args`."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return function(*_faked(args, device))


def trace(
    forward: Forward,
    backward: Backward | None,
    *args: Any,
    device: torch.device,
    prepare: Callable[..., None] = lambda *_: None,
    of_accelerator: bool = False,
) -> Trace:
    """Trace one segment: `forward(*args)` returns `(y, residuals)`; `backward(*args, residuals, cotangents)` is
    None if nothing below is trained. `prepare(*args)` runs first, to leave out of the costs what happens only once.
    `of_accelerator` is whether a trace on the CPU is for an accelerator.

    `args` are pytrees of tensors, of which only shape, strides and dtype matter.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        args = _faked(args, device)
        prepare(*args)
        with AllocationTracker(of_accelerator=of_accelerator) as tracker:
            y, residuals = forward(*args)
            forward_flops, forward_launches = tracker.flops, tracker.launches
            forward_peak, after, random_numbers = tracker.peak, tracker.live, tracker.random
            output_bytes = _storage_bytes(y)
            out = tree_map_only(Tensor, lambda t: empty_like_strided(t, "meta"), y)
            own = [t for t in tree_leaves(y) if isinstance(t, Tensor) and tracker.holds(t)]
            cotangents, own_bytes, before = _cotangents(y), _storage_bytes(own), tracker.live
            del y, own
            keeps_output = before - tracker.live < own_bytes
        backward_peak = backward_flops = backward_launches = 0
        if backward is not None:
            with AllocationTracker(of_accelerator=of_accelerator) as tracker:
                backward(*args, residuals, cotangents)
            backward_peak, backward_flops, backward_launches = tracker.peak, tracker.flops, tracker.launches
            random_numbers = random_numbers or tracker.random
        return Trace(
            out=out,
            forward_flops=forward_flops,
            backward_flops=backward_flops,
            forward_launches=forward_launches,
            backward_launches=backward_launches,
            output_bytes=output_bytes,
            residual_bytes=max(0, after - output_bytes),
            stash_bytes=_storage_bytes((args[-1][0], residuals)),
            keeps_output=keeps_output,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            random=random_numbers,
        )


@contextmanager
def silence_fake_errors() -> Iterator[None]:
    """Mute torch's log of errors in this thread's fake tensors, which are raised as well."""
    logger, thread = logging.getLogger(fake_tensor.__name__), threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def _faked(args: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda t: empty_like_strided(t, device), args)


def _cotangents(y: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t in differentiated(y)]


def empty_like_strided(t: Tensor, device: torch.device | str) -> Tensor:
    """An empty tensor of the same shape, strides and dtype, all of which a trace depends on."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)


def _storage_bytes(tree: Any) -> int:
    held = [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)]
    storages = {storage._cdata: storage.nbytes() for storage in held}
    return sum(round_up(n, ALLOCATION) for n in storages.values())


def nbytes(tree: Any) -> int:
    """The bytes of the tensors of a pytree, each rounded up as by an allocator."""
    leaves = [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
    return sum(round_up(t.numel() * t.dtype.itemsize, ALLOCATION) for t in leaves)
