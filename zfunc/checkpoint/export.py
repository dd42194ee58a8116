"""Exports the weights of a checkpoint as one safetensors file that other programs read. NumPy, no torch.

A file with the requested name is complete and on the disk, an existing one is never touched, and every value passed
its checksum when it was read. It takes the memory of the largest parameter, twice.
"""

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import BUFFER, Checkpoint, Manifest, ParameterEntry
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.safetensors_file import BYTES, ShardWriter, TensorInfo, create_shard
from zfunc.core.dtypes import DTYPES, PRECISIONS, Dtype, Precision
from zfunc.core.optimizer_state import EMA, weight_buffers
from zfunc.core.spec import FROZEN
from zfunc.options import one_of

SUFFIX = ".safetensors"
PIECE = 1 << 16  # elements at a time: they are converted while they are in the cache
Array = NDArray[Any]  # NumPy has no bf16: uint16 holds its bits
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
    one_of(PRECISIONS)("dtype", dtype)
    partial = _partial_path(out)
    checkpoint = checkpoints.open_checkpoint(checkpoints.locate_checkpoint(source))
    manifest, step = checkpoint.manifest, checkpoint.manifest.position.step
    if ema:
        check_averages(checkpoint)
    log.info("export: the weights of %s as %s", checkpoint.path, dtype)
    buffers = [x for x in manifest.parameters if BUFFER in x.pieces]
    weights = [x for x in manifest.parameters if BUFFER not in x.pieces]
    tensors = [TensorInfo(x.name, DTYPES[dtype].safetensors, x.shape) for x in weights]
    tensors += [TensorInfo(x.name, _stored_type(manifest, x), x.shape) for x in buffers]
    writer = create_shard(partial, tensors, metadata={"format": "pt", "step": str(step)}, mode=0o666)
    try:
        with np.errstate(all="ignore"), CheckpointReader(checkpoint) as reader:  # inf and NaN are copied
            for x in weights:
                _write(writer, x, read_weights(reader, x, ema=ema).reshape(-1), dtype)
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
    return ExportedWeights(out, len(weights), writer.shard.size, step, dtype)


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
    kinds = (FROZEN,) if not entry.trainable else weight_buffers(reader.manifest.format_of(entry))
    kinds = (EMA.name,) if ema and entry.trainable else kinds
    stored = [np.empty(entry.numel, DTYPES[reader.dtype(entry.name, kind)].numpy) for kind in kinds]
    reader.read([(WantedSlice(k, entry.name, 0, entry.numel), x) for k, x in zip(kinds, stored, strict=True)])
    return (to_float32(*stored) if len(stored) == 1 else join_halves(*stored)).reshape(entry.shape)


def join_halves(high: Array, low: Array, exp_avg_sq: Array | None = None) -> Array:
    """The fp32 weights whose halves these are: `zfunc.optim.formats.join` on arrays."""
    bits = (high.astype(np.int32) << 16) + low
    return (bits if exp_avg_sq is None else bits + (np.signbit(exp_avg_sq).astype(np.int32) << 16)).view(
        np.float32
    )


def to_float32(x: Array) -> Array:
    """Convert fp16 or bf16 to fp32, exactly."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def round_to(x: Array, dtype: Dtype) -> Array:
    """Round fp32 to "fp32", "fp16" or "bf16": to nearest, ties to even; NaN stays NaN."""
    if dtype != "bf16":
        return x.astype(DTYPES[dtype].numpy)
    bits = x.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return (np.where(np.isnan(x), bits | 0x400000, rounded) >> 16).astype(np.uint16)


def _write(writer: ShardWriter, entry: ParameterEntry, values: Array, dtype: Precision) -> None:
    """Write a parameter's weights, rounded in pieces that fit the cache. Raises ValueError for one too large."""
    for start in range(0, values.size, PIECE):
        piece = values[start : start + PIECE]
        rounded = round_to(piece, dtype)
        if (became := np.isfinite(piece) & np.isinf(to_float32(rounded))).any():
            raise ValueError(
                f"{entry.name!r}: got a weight of {piece[became][0]:g}, expected one that {dtype} can hold: export "
                "as bf16 or fp32"
            )
        writer.write_at(entry.name, start, rounded)


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
