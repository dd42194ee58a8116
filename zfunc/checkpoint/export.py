"""Exports the weights of a checkpoint as one safetensors file that other programs read.

A file with the requested name is complete and on the disk, an existing one is never touched, and every value passed
its checksum when it was read. It takes the memory of the largest parameter, twice.
"""

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from attrs import frozen
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import BUFFER, Checkpoint, Manifest, ParameterEntry
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.safetensors_file import BYTES, ShardWriter, TensorInfo, create_shard
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.dtypes import DTYPES, Precision, one_precision
from zfunc.core.optimizer_state import EMA, FROZEN
from zfunc.errors import refuse
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

SUFFIX = ".safetensors"
PIECE = 1 << 16  # elements at a time: they are converted while they are in the cache
log = logging.getLogger("zfunc")


@frozen
class ExportedWeights:
    """A file of exported weights: its path, number of parameters, size in bytes, step and dtype."""

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
    that training changed (running statistics) are there in their own type, encoded weights as their bytes. With
    `ema` the weights are their moving average.

    A tied parameter is in the file once, under the first of its names. Tie it in the model, as for training, and
    load with `safetensors.torch.load_model` or `load_state_dict(..., strict=False)`, which need one copy.

    Raises ValueError for invalid arguments, and for a weight too large for `dtype`, with its name; CheckpointError
    for a damaged checkpoint, with file, tensor and offset, and where the file cannot be written. Then no file is
    left.

    >>> export_weights(Path("runs/mine"), Path("mine.safetensors"), dtype="bf61")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zfunc.errors.SettingError: dtype: got 'bf61', expected one of fp32, bf16, fp16 (did you mean 'bf16'?)...
    """
    dtype = one_precision("dtype", dtype)
    partial = _partial_path(out)
    checkpoint = checkpoints.open_checkpoint(checkpoints.locate_checkpoint(source))
    manifest, step = checkpoint.manifest, checkpoint.manifest.position.step
    if ema:
        check_averages(checkpoint)
    log.info("export: the weights of %s as %s", checkpoint.path, dtype)
    buffers = [x for x in manifest.parameters if _kept_as_stored(manifest, x)]
    weights = [x for x in manifest.parameters if not _kept_as_stored(manifest, x)]
    tensors = [TensorInfo(x.name, DTYPES[dtype].safetensors, x.shape) for x in weights]
    tensors += [TensorInfo(x.name, _stored_type(manifest, x), x.shape) for x in buffers]
    writer = create_shard(partial, tensors, metadata={"format": "pt", "step": str(step)}, mode=0o666)
    try:
        with CheckpointReader(checkpoint) as reader:
            for x in weights:
                _write(writer, x.name, reader.weights(x.name, 0, x.numel, ema=ema), dtype)
            for x in buffers:
                raw = bytearray(x.numel * BYTES[_stored_type(manifest, x)])
                reader.read([(WantedSlice(_stored_kind(x), x.name, 0, x.numel), raw)])
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
    """The dtype in which a checkpoint stores a module's buffer, or a frozen parameter."""
    pieces = entry.pieces[_stored_kind(entry)]
    return next((manifest.tensor(x).dtype for x in pieces), DTYPES["fp32"].safetensors)


def _stored_kind(entry: ParameterEntry) -> str:
    """The kind of state under which a checkpoint has a module buffer's or frozen parameter's values."""
    return BUFFER if BUFFER in entry.pieces else FROZEN


def _kept_as_stored(manifest: Manifest, entry: ParameterEntry) -> bool:
    """Whether an export copies the values of `entry` unchanged: a module buffer, or encoded weights."""
    encoded = FROZEN in entry.pieces and _stored_type(manifest, entry) == DTYPES["uint8"].safetensors
    return BUFFER in entry.pieces or encoded


def check_averages(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless the checkpoint has a moving average of the weights."""
    if not any(EMA.name in x.pieces for x in checkpoint.manifest.parameters):
        got = f"True for {checkpoint.path}, which has no moving average of the weights"
        refuse("ema", got, "one of a training with ema", "leave it out")


def _write(writer: ShardWriter, name: str, values: Tensor, dtype: Precision) -> None:
    """Write the weights of parameter `name` from `values`, rounded to `dtype` piece by piece. Raises
    ValueError for a weight too large for `dtype`."""
    for start, piece in zip(range(0, len(values), PIECE), values.split(PIECE), strict=False):
        rounded = piece.to(TORCH_DTYPES[dtype])
        if (became := piece.isfinite() & rounded.isinf()).any():
            got = f"a weight of {piece[became][0]:g}"
            refuse(repr(name), got, f"one that {dtype} can hold", "export as bf16 or fp32")
        writer.write_at(name, start, as_bytes(rounded))


def _partial_path(out: Path) -> Path:
    """The path of the export `out` until it is complete. Raises ValueError if `out` cannot be a new file."""
    if out.suffix != SUFFIX:
        refuse("out", str(out), f"the name of a file that ends in {SUFFIX}", "add that")
    if os.path.lexists(out):
        refuse("out", f"{out}, which exists", "a new file", "name another, or move that one")
    if not out.parent.is_dir():
        refuse("out", str(out), "a file in an existing folder", f"make {out.parent}")
    partial = out.with_name(f"{disk.UNFINISHED}{out.name}")
    if os.path.lexists(partial):
        do = "another export is writing it or was killed; delete it if none is running, or name another file"
        refuse("out", f"{out}, but {partial.name} exists", do=do)
    return partial


def _publish(partial: Path, out: Path) -> None:
    """Rename the complete file `partial` to `out`. Raises CheckpointError if `out` exists by now."""
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
