"""Exports the weights of a checkpoint as one safetensors file that other programs read. NumPy, no torch.

A file with the requested name is complete and on the disk, an existing one is never touched, and every value passed
its checksum when it was read. Shards are read one after the other, a chunk at a time, so memory does not grow with
the weights.
"""

import errno
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from attrs import frozen

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import BUFFER, Checkpoint, Manifest, ParameterEntry
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice, plan_reads
from zfunc.checkpoint.safetensors_file import BYTES, TensorInfo, cut_elements
from zfunc.checkpoint.shard_writer import create_shard
from zfunc.core.dtypes import DTYPES, Precision
from zfunc.core.optimizer_state import EMA, weight_buffers
from zfunc.core.spec import FROZEN
from zfunc.optim.adam_reference import Array, round_to, to_float32
from zfunc.optim.compact_reference import join
from zfunc.options import one_of

SUFFIX = ".safetensors"
PIECE = 1 << 16  # elements at a time: they are converted while they are in the cache
OVERFLOW: dict[Precision, float] = {  # the smallest magnitude that becomes inf
    "fp32": math.inf,
    "bf16": 2.0**128 - 2.0**119,  # halfway to what would be the next value, as in fp16
    "fp16": 2.0**16 - 2.0**4,
}
log = logging.getLogger("zfunc")


@frozen
class ExportedWeights:
    """An exported file: how many parameters it has, of which step and type, and its size in bytes."""

    path: Path
    parameters: int
    bytes: int
    step: int
    dtype: Precision


def export_weights(
    source: Path, out: Path, *, dtype: Precision = "fp32", ema: bool = False
) -> ExportedWeights:
    """Write the weights of a checkpoint, each parameter by its full name and in its shape, as a new file.

    `source` is a checkpoint, a folder of them or a run, found by `directory.locate_checkpoint`. It must not be
    deleted meanwhile, as a running training does with its oldest. `out` is a new file whose name ends in
    .safetensors.

    "fp32" gives the master weights, exactly. "bf16" and "fp16" are rounded to nearest, ties to even; NaN stays NaN.
    These are the bits the device computes with, except for "bf16" of a checkpoint with compact moments: there the
    device has the high half of the master, whose ties are rounded away from zero, and of 2^17 evenly spread values
    one differs, in its last bit. Frozen parameters are converted from the type they are stored in. Modules' buffers
    that training changed (running statistics) are there in their own type. With `ema` the weights are their moving
    average.

    A tied parameter is in the file once, under the first of its names. Tie it in the model, as for training, and
    load with `safetensors.torch.load_model` or `load_state_dict(..., strict=False)`, which need one copy.

    Raises ValueError for invalid arguments, and for a weight too large for `dtype`, with its name; CheckpointError
    for a damaged checkpoint, with file, tensor and offset, and where the file cannot be written. Then no file is
    left.

    >>> export_weights(Path("runs/mine"), Path("mine.safetensors"), dtype="bf61")
    Traceback (most recent call last):
    ValueError: dtype: got 'bf61', expected one of fp32, bf16, fp16 (did you mean 'bf16'?)
    """
    one_of(OVERFLOW)("dtype", dtype)
    partial = _partial_path(out)
    checkpoint = checkpoints.open_checkpoint(checkpoints.locate_checkpoint(source))
    manifest, step = checkpoint.manifest, checkpoint.manifest.position.step
    if ema:
        check_averages(checkpoint)
    log.info("export: the weights of %s as %s", checkpoint.path, dtype)
    if manifest.position.pending is not None:
        log.warning(
            "export: %s: its last gradient is not applied yet and not in the weights", checkpoint.path
        )
    buffers = [x for x in manifest.parameters if BUFFER in x.pieces]
    weights = [x for x in manifest.parameters if BUFFER not in x.pieces]
    tensors = [TensorInfo(x.name, DTYPES[dtype].safetensors, x.shape) for x in weights]
    tensors += [TensorInfo(x.name, _stored_type(manifest, x), x.shape) for x in buffers]
    writer = create_shard(partial, tensors, metadata={"format": "pt", "step": str(step)})
    try:
        with np.errstate(all="ignore"), CheckpointReader(checkpoint) as reader:  # inf and NaN are copied
            for entry, start, values in _weights(reader, weights, ema=ema):
                if _largest(values) >= OVERFLOW[dtype]:
                    raise _too_large(reader, entry, dtype)
                writer.write_at(entry.name, start, round_to(values, dtype))
            for x in buffers:
                raw = np.empty(x.numel * BYTES[_stored_type(manifest, x)], np.uint8)
                reader.read([(WantedSlice(BUFFER, x.name, 0, x.numel), raw)])
                writer.write_at(x.name, 0, raw)
        writer.finish()
        _publish(partial, out)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    finally:
        writer.close()
    return ExportedWeights(out, len(weights), writer.header.size, step, dtype)


def _stored_type(manifest: Manifest, entry: ParameterEntry) -> str:
    """The type in which a checkpoint has a module's buffer."""
    return next((manifest.tensor(x).dtype for x in entry.pieces[BUFFER]), DTYPES["fp32"].safetensors)


def check_averages(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless it has a moving average of the weights."""
    if not checkpoint.manifest.averages:
        raise ValueError(
            f"ema: got True for {checkpoint.path}, which has no moving average of the weights, expected one of a "
            "training with ema: leave it out"
        )


def read_weights(reader: CheckpointReader, entry: ParameterEntry, *, ema: bool = False) -> Array:
    """The fp32 weights of a parameter, exact, in its shape; with `ema` their moving average."""
    weights = np.empty(entry.numel, np.float32)
    for _, start, values in _weights(reader, [entry], ema=ema):
        weights[start : start + values.size] = values
    return weights.reshape(entry.shape)


def _weights(
    reader: CheckpointReader, entries: Sequence[ParameterEntry], *, ema: bool = False
) -> Iterator[tuple[ParameterEntry, int, Array]]:
    """The parameters' fp32 weights: PIECE elements at most, [n] float32, exact, and the first one's number.

    In the order of the shards, a chunk at a time, so that every byte is read once.
    """
    manifest = reader.manifest
    kinds = [(EMA.name,) if ema and x.trainable else _weight_kinds(manifest, x) for x in entries]
    first_kind = [WantedSlice(kind[0], x.name, 0, x.numel) for kind, x in zip(kinds, entries, strict=True)]
    for read in plan_reads(manifest, first_kind):
        entry, shard = entries[read.wanted], manifest.shards[read.shard]
        item = BYTES[shard.by_name[read.tensor].dtype]
        for begin, end in cut_elements(read.start, read.stop, item, shard.chunk):
            start = read.to + begin - read.start
            stop = start + end - begin
            for at, values in _joined(_read(reader, entry.name, kinds[read.wanted], start, stop)):
                yield entry, start + at, values


def _joined(buffers: list[Array]) -> Iterator[tuple[int, Array]]:
    """fp32 weights from the buffers they are kept in, PIECE elements at a time, and the first one's number."""
    for at in range(0, buffers[0].size, PIECE):
        part = [x[at : at + PIECE] for x in buffers]
        yield at, to_float32(*part) if len(part) == 1 else join(*part)


def _read(reader: CheckpointReader, name: str, kinds: Sequence[str], start: int, stop: int) -> list[Array]:
    halves = [np.empty(stop - start, DTYPES[reader.dtype(name, kind)].numpy) for kind in kinds]
    reader.read([(WantedSlice(kind, name, start, stop), x) for kind, x in zip(kinds, halves, strict=True)])
    return halves


def _weight_kinds(manifest: Manifest, entry: ParameterEntry) -> tuple[str, ...]:
    """The kinds of state that make a parameter's fp32 weights: one, or those that `join` takes."""
    if not entry.trainable:
        return (FROZEN,)
    return weight_buffers(manifest.format_of(entry))


def _largest(values: Array) -> float:
    """The largest finite magnitude."""
    size = np.abs(values)
    return float(size.max(initial=0, where=size < math.inf))


def _too_large(reader: CheckpointReader, entry: ParameterEntry, dtype: Precision) -> ValueError:
    largest = max(_largest(values) for _, _, values in _weights(reader, [entry]))
    other = "bf16" if largest < OVERFLOW["bf16"] else "fp32"
    return ValueError(
        f"{entry.name!r}: got a weight of magnitude {largest:g}, expected less than {OVERFLOW[dtype]:g}, the "
        f"smallest that {dtype} rounds to inf: export as {other}"
    )


def _partial_path(out: Path) -> Path:
    """The name of the file until it is complete. Raises ValueError if `out` cannot be a new file."""
    if out.suffix != SUFFIX:
        raise ValueError(f"out: got {out}, expected the name of a file that ends in {SUFFIX}: add that")
    if os.path.lexists(out):
        raise ValueError(f"out: got {out}, which exists, expected a new file: name another, or move that one")
    if not out.parent.is_dir():
        raise ValueError(f"out: got {out}, expected a file in an existing folder: make {out.parent}")
    partial = out.with_name(f"{disk.UNFINISHED}{out.name}")
    if os.path.lexists(partial):
        raise ValueError(
            f"out: got {out}, but {partial.name} exists: another export is writing it or was killed; delete it if "
            "none is running, or name another file"
        )
    return partial


def _publish(partial: Path, out: Path) -> None:
    """Give the complete file its name, unless another file has taken it."""
    with disk.os_errors_as(out, "giving a file its name"):
        try:
            os.link(partial, out)  # a rename would replace a file that was made there meanwhile
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            log.info("export: no hard links in %s: %s is renamed", out.parent, partial.name)
            if os.path.lexists(out):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(partial, out)
        else:
            partial.unlink()
    disk.sync(out.parent)
