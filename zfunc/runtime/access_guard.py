"""Debug mode: a stage sees only the regions its operation declared, and only in the way it declared them.

What is checked: a key that was not declared raises; a kept tensor that is only written holds NaN beforehand, so a
read of it shows; tensors that are only read must come out unchanged; memory that is written is in no other region.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.core.graph import Op, Region
from zfunc.errors import UndeclaredAccess
from zfunc.runtime.torch_dtypes import byte_view


class AccessGuard(MutableMapping[Region, Any]):
    """The memory regions `mem` as operation `op` sees them in debug mode: access to a region that `op` does
    not declare raises UndeclaredAccess. Regions that `op` only reads are copied, for `check` (slow)."""

    def __init__(self, op: Op, mem: MutableMapping[Region, Any]) -> None:
        self._op, self._mem = op, mem
        reads, writes = set(op.reads), set(op.writes)
        self._may = reads | writes
        self._writable = writes
        self._refuse_shared(writes)
        self._before = {r: [t.clone() for t in tensors(mem[r])] for r in reads - writes if r in mem}
        for r in writes - reads:
            for t in tensors(mem.get(r)):
                if t.is_floating_point():
                    t.fill_(float("nan"))

    def check(self) -> None:
        """Raise UndeclaredAccess if the operation has changed a region that it declared as read only."""
        for r, before in self._before.items():
            after = list(tensors(self._mem.get(r)))
            if len(before) != len(after) or not all(map(_identical, before, after)):
                raise UndeclaredAccess(
                    f"{self._op.name} changed {r}, which it declares as read only: declare it under writes in "
                    "zfunc.core.ops, or do not write it"
                )

    def _refuse_shared(self, writes: set[Region]) -> None:
        """Raise UndeclaredAccess if a region in `writes` shares memory with a region outside of `writes`."""
        own: dict[int, list[tuple[int, int, Region]]] = {}
        for r in writes:
            for t in tensors(self._mem.get(r)):
                storage, start, stop = _place(t)
                own.setdefault(storage, []).append((start, stop, r))
        # A copy in one step of the interpreter: lanes add and drop regions meanwhile.
        for r, value in dict(self._mem).items() if own else ():
            for t in () if r in writes else tensors(value):
                storage, first, last = _place(t)
                for start, stop, written in own.get(storage, ()):
                    if first < stop and start < last:
                        raise UndeclaredAccess(
                            f"{self._op.name} writes {written}, whose memory {r} has, too, which it does not "
                            "declare as written: make one of the two in memory of its own"
                        )

    def _allowed(self, region: Region, allowed: set[Region], how: str) -> None:
        if region not in allowed:
            declared = ", ".join(sorted(map(str, allowed)))
            raise UndeclaredAccess(
                f"{self._op.name} {how} {region}, expected one of the regions it declares ({declared}): "
                "declare it in zfunc.core.ops, or it may race with whoever else touches it"
            )

    def __getitem__(self, region: Region) -> Any:
        self._allowed(region, self._may, "reads")
        return self._mem[region]

    def __setitem__(self, region: Region, value: Any) -> None:
        self._allowed(region, self._writable, "writes")
        self._mem[region] = value

    def __delitem__(self, region: Region) -> None:
        raise UndeclaredAccess(
            f"{self._op.name} drops {region}: the executor does that after its last access"
        )

    def __iter__(self) -> Iterator[Region]:
        return iter(self._may)

    def __len__(self) -> int:
        return len(self._may)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a region's value, which is a tensor, a pytree of tensors, or a flat buffer with its views."""
    return [t for t in tree_leaves(getattr(value, "flat", value)) if isinstance(t, Tensor)]


def _place(t: Tensor) -> tuple[int, int, int]:
    """The storage of tensor `t`, and the byte offsets in the storage of its first element and its end."""
    start, size = int(t.storage_offset()), t.itemsize
    last = sum((int(n) - 1) * int(stride) for n, stride in zip(t.shape, t.stride(), strict=True))
    storage: Any = t.untyped_storage()
    return storage._cdata, start * size, (start + last + 1) * size if t.numel() else start * size


def _identical(a: Tensor, b: Tensor) -> bool:
    """Whether tensors `a` and `b` have the same bytes: NaN equals NaN."""
    return torch.equal(byte_view(a), byte_view(b))
