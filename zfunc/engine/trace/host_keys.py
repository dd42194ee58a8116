"""Host memory for keys and values of rows in tiles, which a pass finds there and a trace only counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from attrs import define
from torch import Tensor

from zfunc.engine.trace.tensor_memory import COUNTED


@define(eq=False)
class HostMemory:
    """Host memory for the keys, values and sums of one row at a time, pinned for an accelerator; and what of it a
    pass took and copied, by which a trace, which has none, knows the cost."""

    flat: Tensor | None = None  # uint8
    nbytes: int = 0
    copied_bytes: int = 0

    def rows(self, start: int, count: int, numel: int, dtype: torch.dtype) -> Tensor | None:
        """`count` rows of `numel` elements, from the byte `start` of the memory on; None for a trace."""
        stop = start + count * numel * dtype.itemsize
        self.nbytes = max(self.nbytes, stop)
        return None if self.flat is None else self.flat[start:stop].view(dtype).view(count, numel)

    def count(self, *copied: Tensor) -> None:
        """Add the bytes of tensors to those that a pass copied between this memory and the device."""
        self.copied_bytes += COUNTED.get() * sum(x.nbytes for x in copied)


ON_HOST: ContextVar[HostMemory | None] = ContextVar("where keys and values of a row lie", default=None)
WAIT: ContextVar[Callable[[], None]] = ContextVar("what waits for the device", default=lambda: None)


@contextmanager
def keys_in(host: HostMemory | None, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A context in which rows in tiles have their keys in `host`; with None on the device. They call `wait` before
    they read on the host what the device has made."""
    before = ON_HOST.set(host), WAIT.set(wait)
    try:
        yield
    finally:
        ON_HOST.reset(before[0])
        WAIT.reset(before[1])
