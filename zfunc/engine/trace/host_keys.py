"""Host memory for keys and values of rows in tiles: a pass keeps them there, a trace only counts their bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from attrs import define
from torch import Tensor

from zfunc.engine.trace.fake_tensors import COUNTED


@define(eq=False)
class HostMemory:
    """Host memory for attention's keys, values and gradient sums of one row of tokens at a time, pinned for
    an accelerator. `nbytes` and `copied_bytes` count what a pass uses and copies. In a trace, which only
    counts, `flat` is None."""

    flat: Tensor | None = None  # uint8
    nbytes: int = 0
    copied_bytes: int = 0

    def rows(self, start: int, count: int, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A view [count, numel] of `dtype` from byte `start` of the host memory on; None in a trace."""
        stop = start + count * numel * dtype.itemsize
        self.nbytes = max(self.nbytes, stop)
        return None if self.flat is None else self.flat[start:stop].view(dtype).view(count, numel)

    def count(self, *copied: Tensor) -> None:
        """Add to `copied_bytes` the bytes of the tensors `copied` between host memory and the device."""
        self.copied_bytes += COUNTED.get() * sum(x.nbytes for x in copied)


ON_HOST: ContextVar[HostMemory | None] = ContextVar("where keys and values of a row lie", default=None)
WAIT: ContextVar[Callable[[], None]] = ContextVar("what waits for the device", default=lambda: None)


@contextmanager
def keys_in(host: HostMemory | None, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A context in which attention of rows in tiles keeps keys and values in `host`, or, if that is None, on
    the device. Passes call `wait`, which waits for the device, before they read its results on the host."""
    before = ON_HOST.set(host), WAIT.set(wait)
    try:
        yield
    finally:
        ON_HOST.reset(before[0])
        WAIT.reset(before[1])
