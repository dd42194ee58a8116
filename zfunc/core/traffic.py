"""What the kernels of a pass read from and write to device memory."""

from collections.abc import Hashable, Iterable

from attrs import define, field

Moved = Iterable[tuple[Hashable, int]]  # memory, and how many bytes of it


@define
class Traffic:
    """Adds up the bytes of device memory that the kernels of a pass read and write, one kernel after another.

    In a `compiled` pass, consecutive kernels that can be fused count as one, which reads each input once and writes
    what other kernels read.

    >>> for compiled in (False, True):
    ...     traffic = Traffic(compiled)
    ...     traffic.add([("x", 8)], [("y", 8)], fusable=True)
    ...     traffic.add([("x", 8), ("y", 8)], [("z", 8)], fusable=True)
    ...     print(traffic.total_bytes(["z"]))
    40
    16
    """

    compiled: bool = False
    nbytes: int = 0
    _unwritten: dict[Hashable, int] = field(factory=dict[Hashable, int])  # what fused kernels made
    _at_hand: set[Hashable] = field(factory=set[Hashable])  # what the kernel that is being fused read or made

    def add(self, reads: Moved, writes: Moved, *, fusable: bool) -> None:
        """Count the next kernel. `reads` and `writes` are pairs (name of a tensor's memory, bytes);
        `fusable`: whether a compiler can fuse the kernel with its neighbours."""
        fused = self.compiled and fusable
        if not fused:
            self._at_hand.clear()
        for memory, nbytes in reads:
            if memory not in self._at_hand:
                self.nbytes += nbytes + self._unwritten.pop(memory, 0)
            if fused:
                self._at_hand.add(memory)
        for memory, nbytes in writes:
            if fused:
                self._unwritten[memory] = nbytes
                self._at_hand.add(memory)
            else:
                self.nbytes += nbytes

    def freed(self, memory: Hashable) -> None:
        """Record that `memory`, a name as in `add`, was freed: the name may stand for other memory now."""
        self._unwritten.pop(memory, None)
        self._at_hand.discard(memory)

    def total_bytes(self, results: Iterable[Hashable]) -> int:
        """The bytes that all kernels counted so far read and write. `results` names memory that outlives the
        pass, whose writes count even between fused kernels."""
        return self.nbytes + sum(self._unwritten.get(memory, 0) for memory in results)
