"""Where keys and values of a row in tiles lie, and the sums of their gradients.

Attention visits keys and values by parts, one for each tile: on the device, or one by one from the host. Both ways
have the same arithmetic, and so the same bits.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from attrs import define, field
from torch import Tensor

from zfunc.core.layout import round_up
from zfunc.core.spec import ALLOCATION
from zfunc.engine.trace.host_keys import ON_HOST, HostMemory
from zfunc.runtime.accelerator import behind, copy_stream, rejoin

Part = tuple[int, int]  # tokens of keys: the first, and the one after the last
SLOTS = 2  # parts from the host that have room on the device: one is copied while the other is attended


@define(eq=False)
class DeviceKeys:
    """Attention's keys and values [batch, key heads, tokens, features] of a whole row of tokens, in device
    memory, and the fp32 sums of their gradients."""

    kept: tuple[Tensor, ...]
    sums: tuple[Tensor, ...] = ()

    def put(self, part: Part, made: Sequence[Tensor]) -> None:
        """Store `made`, keys and values of the tokens in range `part`, in the memory for the whole row."""
        for row, x in zip(self.kept, made, strict=True):
            row[:, :, slice(*part)] = x

    def start_sums(self) -> None:
        """Allocate the fp32 gradient sums of keys and values, as zeros."""
        self.sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in self.kept)

    def visit(self, parts: Sequence[Part], *, sums: bool) -> Iterator[list[Tensor]]:
        """Yield, for each range of tokens in `parts`, its keys and values, and with `sums` also its gradient
        sums, to which the caller adds."""
        for part in parts:
            yield [x[:, :, slice(*part)] for x in (*self.kept, *(self.sums if sums else ()))]

    def sums_of(self, part: Part) -> list[Tensor]:
        """The fp32 gradient sums of keys and values for the tokens in range `part`."""
        return [x[:, :, slice(*part)] for x in self.sums]


def keys_like(made: Sequence[Tensor], count: int) -> "DeviceKeys | HostKeys":
    """Make memory for the keys and values of a row of `count` parts, each like `made`: on the host in a
    context `keys_in`, else on the device."""
    if (host := ON_HOST.get()) is not None:
        return HostKeys(host, made[0].device, made[0].dtype, [x.shape for x in made], count)
    return DeviceKeys(tuple(x.new_empty(*x.shape[:2], count * x.shape[2], x.shape[3]) for x in made))


@define(eq=False)
class HostKeys:
    """Attention's keys and values of a row of tokens, and the sums of their gradients, in host memory; two
    parts of the row at a time are on the device. While one part is used, copy streams bring the next and take
    back the sums of the one before."""

    host: HostMemory
    device: torch.device
    dtype: torch.dtype
    shapes: Sequence[torch.Size]  # of keys and values of a part
    count: int  # parts
    kept: Tensor | None = field(init=False)  # [parts, elements]
    sums: Tensor | None = None  # fp32 [parts, elements], of gradients
    summed: set[Part] = field(factory=set)  # parts whose sums are in host memory; other sums are zero
    # Keys and values on their way to the host, and the event of their arrival.
    leaving: deque[tuple[Part, Tensor, torch.Event | None]] = field(factory=deque)

    def __attrs_post_init__(self) -> None:
        self.kept = self.host.rows(0, self.count, self._numel, self.dtype)

    def put(self, part: Part, made: Sequence[Tensor]) -> None:
        """Copy `made`, keys and values of the tokens in range `part`, to host memory, without waiting: by way
        of a slot on the device."""
        if len(self.leaving) == SLOTS:
            _, _, sent = self.leaving.popleft()
            if sent is not None:  # before the memory of the slot is another's
                torch.accelerator.current_stream(self.device).wait_event(sent)
        slot = self._slot(self.dtype)
        for x, y in zip(self._views(slot), made, strict=True):
            x.copy_(y)
        self.host.count(slot)
        down = self._stream("down")
        if self.kept is not None:
            with behind(down):
                self.kept[self._row(part)].copy_(slot, non_blocking=True)
        self.leaving.append((part, slot, None if down is None else down.record_event()))

    def still_here(self, part: Part) -> Tensor | None:
        """The device slot that still has keys and values of `part`, put among the last; else None."""
        return next((slot for other, slot, _ in self.leaving if other == part), None)

    def start_sums(self) -> None:
        """Reserve host memory for the fp32 gradient sums of all parts; unvisited parts count as zero."""
        start = round_up(self.count * self._numel * self.dtype.itemsize, ALLOCATION)
        self.sums = self.host.rows(start, self.count, self._numel, torch.float32)

    def visit(self, parts: Sequence[Part], *, sums: bool) -> Iterator[list[Tensor]]:
        """Yield, for each range of tokens in `parts`, its keys and values on the device, and with `sums` also
        its gradient sums, to which the caller adds."""
        dtypes = (self.dtype, torch.float32) if sums else (self.dtype,)
        slots = [[self._slot(dtype) for dtype in dtypes] for _ in parts[:SLOTS]]
        up, down = self._stream("up"), self._stream("down")
        try:
            arrived = self._fetch(parts[0], slots[0], up, down)
            for n, part in enumerate(parts):
                slot, ready = slots[n % SLOTS], arrived
                if parts[n + 1 :]:  # behind the pair before, which had its slot
                    arrived = self._fetch(parts[n + 1], slots[(n + 1) % SLOTS], up, down)
                if ready is not None:
                    torch.accelerator.current_stream(self.device).wait_event(ready)
                yield [x for flat in slot for x in self._views(flat)]
                if sums and self.sums is not None:
                    with behind(down):
                        self.sums[self._row(part)].copy_(slot[1], non_blocking=True)
                    self.summed.add(part)
        finally:
            rejoin(up)
            rejoin(down)  # before the memory of the slots is another's
            self.leaving.clear()

    def sums_of(self, part: Part) -> list[Tensor]:
        """The fp32 gradient sums of keys and values for the tokens in range `part`, copied to the device."""
        slot = self._slot(torch.float32)
        self.host.count(slot)
        if self.sums is not None:
            slot.copy_(self.sums[self._row(part)], non_blocking=True)
        return self._views(slot)

    def _fetch(
        self, part: Part, slot: Sequence[Tensor], up: torch.Stream | None, down: torch.Stream | None
    ) -> torch.Event | None:
        """Copy keys and values of `part`, and, if `slot` has room, its gradient sums, to `slot` on stream
        `up`; sums after the work of stream `down`. Returns the event of the end."""
        if self.kept is None:
            return None
        here = self.still_here(part)
        with behind(up):
            slot[0].copy_(self.kept[self._row(part)] if here is None else here, non_blocking=True)
            if slot[1:] and up is not None:
                up.wait_stream(down)  # which takes the sums that are in the slot
            for total in slot[1:]:
                if self.sums is not None and part in self.summed:
                    total.copy_(self.sums[self._row(part)], non_blocking=True)
                else:
                    total.zero_()
        return None if up is None else up.record_event()

    def _stream(self, way: Literal["up", "down"]) -> torch.Stream | None:
        return None if self.kept is None else copy_stream(self.device, way)

    @property
    def _numel(self) -> int:
        return sum(x.numel() for x in self.shapes)

    def _row(self, part: Part) -> int:
        return part[0] // self.shapes[0][2]

    def _slot(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._numel, dtype=dtype, device=self.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Views of the flat slot `flat` as keys and values (or their gradient sums), each [batch, key heads,
        tokens, features]."""
        parts = flat.split([x.numel() for x in self.shapes])
        return [x.view(shape) for x, shape in zip(parts, self.shapes, strict=True)]
