"""Buffers in stripes on the files of several drives: transferred at once, summed, and compared when read.

Each drive has its own threads, so that none waits for a slower one; after an error or an interrupt none goes on.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from zfunc.checkpoint.durable_files import in_parallel
from zfunc.checkpoint.safetensors_file import cut, num_chunks
from zfunc.core.extents import BLOCK, SUMMED, cut_in_shares, whole_blocks
from zfunc.errors import CheckpointError
from zfunc.runtime.direct_io import DirectFile

BATCH = 16 << 20  # bytes that a thread sums and transfers at a time


@frozen
class Stripe:
    """Bytes `start` to `stop` of a buffer, which file number `file` has from `place` on.

    Each SUMMED bytes of them, and the remainder, have a checksum; `first` is the index of their first one among the
    buffer's.
    """

    file: int
    start: int
    stop: int
    place: int
    first: int

    @property
    def last(self) -> int:
        """The index behind that of its last checksum."""
        return self.first + num_chunks(self.stop - self.start, SUMMED)


def lay_stripes(nbytes: int, shares: Sequence[int], ends: list[int]) -> tuple[Stripe, ...]:
    """Append the stripes of a buffer to files that end at `ends`, which this advances."""
    stripes: list[Stripe] = []
    first = 0
    for n, (start, stop) in enumerate(cut_in_shares(nbytes, shares)):
        if start < stop:
            stripes.append(Stripe(n, start, stop, ends[n], first))
            ends[n] += whole_blocks(stop - start)
            first = stripes[-1].last
    return tuple(stripes)


def num_checksums(stripes: Sequence[Stripe]) -> int:
    """The number of checksums of a buffer in these stripes."""
    return stripes[-1].last if stripes else 0


@frozen(eq=False)
class StripedBuffer:
    """A buffer in memory, in whole blocks from the beginning of a page on, and where files have it.

    `checksums` are those of its chunks: `write_striped` sets them, `read_striped` compares. `name` is for errors.
    """

    name: str
    data: memoryview
    stripes: Sequence[Stripe]
    checksums: list[int]


def write_striped(files: Sequence[DirectFile], buffers: Sequence[StripedBuffer]) -> None:
    """Write buffers and sum them. Raises DiskError."""
    _transfer(_write, files, buffers)


def read_striped(files: Sequence[DirectFile], buffers: Sequence[StripedBuffer]) -> None:
    """Read buffers. Raises DiskError, and CheckpointError for other bytes than were written."""
    _transfer(_read, files, buffers)


def block_checksum(data: memoryview) -> int:
    """The CRC-32 of Fletcher's checksums of each block, and of the rest: at the speed of memory, not a tenth of it.

    Of a block: the sum of its 512 64-bit words, and the sum of (512 - i) times word i, modulo 2^64. Flipped bits,
    words that change places, and blocks that are zero, old or of another place are found, but for one in 2^32.

    >>> block_checksum(memoryview(bytes(4096))) == block_checksum(memoryview(bytes(8192)))
    False
    """
    import numpy as np  # here, as the kernel that comes with torch: what reads no checkpoint needs none

    from zfunc.optim.kernel_loader import cpu_adam

    blocks, rest = divmod(data.nbytes, BLOCK)
    sums = np.empty(2 * blocks, "<u8")
    cpu_adam.block_sums(np.frombuffer(data, np.uint8).ctypes.data, sums.ctypes.data, blocks)
    return zlib.crc32(data[data.nbytes - rest :], zlib.crc32(sums.data))


@frozen
class _Chunk:
    """Bytes that share a checksum: their memory, in whole blocks, and where the file has them."""

    buffer: StripedBuffer
    number: int
    data: memoryview
    nbytes: int
    place: int

    def sum(self) -> int:
        return block_checksum(self.data[: self.nbytes])


def _chunks(buffer: StripedBuffer, stripe: Stripe) -> Iterator[_Chunk]:
    data = buffer.data[stripe.start : whole_blocks(stripe.stop)]
    for n, (start, stop) in enumerate(cut(0, stripe.stop - stripe.start, SUMMED), stripe.first):
        yield _Chunk(buffer, n, data[start : whole_blocks(stop)], stop - start, stripe.place + start)


def _batches(chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
    """Chunks that follow one another, BATCH bytes at most: one batch is transferred while another is summed."""
    batch: list[_Chunk] = []
    end = room = 0
    for x in chunks:
        if x.place != end or room < x.data.nbytes:
            if batch:
                yield batch
            batch, room = [], BATCH
        batch.append(x)
        end, room = x.place + x.data.nbytes, room - x.data.nbytes
    if batch:
        yield batch


def _transfer(
    call: Callable[[DirectFile, list[_Chunk]], None],
    files: Sequence[DirectFile],
    buffers: Sequence[StripedBuffer],
) -> None:
    by_file: dict[int, list[_Chunk]] = {}  # a file is that of a drive
    for buffer in buffers:
        for stripe in buffer.stripes:
            by_file.setdefault(stripe.file, []).extend(_chunks(buffer, stripe))
    # Of the threads of a drive one sums while another waits for it.
    in_parallel(call, *([(files[n], x) for x in _batches(chunks)] for n, chunks in by_file.items()))


def _write(file: DirectFile, batch: list[_Chunk]) -> None:
    for x in batch:
        x.buffer.checksums[x.number] = x.sum()
    file.write([x.data for x in batch], batch[0].place, _names(batch))


def _read(file: DirectFile, batch: list[_Chunk]) -> None:
    file.read([x.data for x in batch], batch[0].place, _names(batch))
    for x in batch:
        if x.sum() != x.buffer.checksums[x.number]:
            raise CheckpointError(
                f"{file.path}: {x.buffer.name}: got other bytes than were written at {x.place} of the file, "
                f"{x.nbytes} of them: the checksum differs; check this disk, and resume from a checkpoint"
            )


def _names(batch: list[_Chunk]) -> str:
    return " and ".join(dict.fromkeys(x.buffer.name for x in batch))
