"""`save_folder` and `export_folder`: trained weights as a folder that `from_pretrained` loads.

A folder with the requested name is complete and on disk; an existing one is never touched.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.export import OVERFLOW, ExportedWeights, export_weights
from zfunc.checkpoint.safetensors_file import TensorInfo
from zfunc.checkpoint.shard_writer import ShardWriter, create_shard
from zfunc.checkpoint.writer import all_or_none, as_bytes
from zfunc.core.dtypes import DTYPES, Precision
from zfunc.engine.flush import make_deferred_update
from zfunc.engine.program import Program, check_state
from zfunc.engine.state import State
from zfunc.engine.weights import parameter_weights
from zfunc.errors import CheckpointError, did_you_mean
from zfunc.models.hf.weights import SINGLE, empty_model, read_config
from zfunc.options import one_of
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

KEPT = (  # copied from the folder of the config
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files of a tokenizer, and settings for generation."""


def export_folder(
    source: Path | str, out: Path | str, *, config: Any, dtype: Precision = "fp32"
) -> ExportedWeights:
    """Write a checkpoint of a `zfunc.hf` program as a new folder that `from_pretrained` loads.

    `source` is a checkpoint, a folder of them or a run. `config` is a config, or the folder that was trained from,
    whose tokenizer is then copied too. A tied head is stored once, as in transformers. `dtype`, memory and errors
    are those of `zfunc.checkpoint.export.export_weights`.

    Raises ValueError if the checkpoint is not of the config's model, or `out` exists.
    """
    folder = _Folder.begin(Path(out), config, dtype)
    try:
        manifest = checkpoints.open_checkpoint(checkpoints.locate_checkpoint(Path(source))).manifest
        folder.check({x.name: x.shape for x in manifest.parameters})
        done = export_weights(Path(source), folder.partial / SINGLE, dtype=dtype)
        folder.publish()
    finally:
        folder.abandon()
    return ExportedWeights(Path(out), done.parameters, done.bytes, done.step, dtype)


def save_folder(
    out: Path | str, program: Program, state: State, *, config: Any, dtype: Precision = "fp32"
) -> Path:
    """Write the weights of a `zfunc.hf` program as a new folder that `from_pretrained` loads. Returns its path.

    `config` and `dtype` are as for `export_folder`: the master weights, exact or rounded to nearest. They are
    written bucket by bucket, without a second copy of the model. `state` can be trained further. Every rank has to
    call this, and rank 0 writes. Raises ValueError and CheckpointError as `export_folder` does.
    """
    check_state(program, state, "hf.save")
    make_deferred_update(program, state, "hf.save")
    ranks = program.ranks
    ranks.agree("hf.save")

    def begin() -> _Saving | None:
        return _Saving.begin(Path(out), program, config, dtype, state.step) if not ranks.rank else None

    saving = all_or_none(ranks, begin)
    try:
        for name, values in parameter_weights(state.buffers, program.layout, ranks):
            if saving is not None:
                saving.write(name, values.flatten())
        all_or_none(ranks, saving.finish if saving is not None else lambda: None)
    finally:
        if saving is not None:
            saving.abandon()
    return Path(out)


@define(eq=False)
class _Folder:
    """A folder that gets its name when it is complete."""

    out: Path
    partial: Path
    shapes: dict[str, tuple[int, ...]]  # of the config's model, by name

    @classmethod
    def begin(cls, out: Path, config: Any, dtype: Precision) -> "_Folder":
        """Make it, with everything but the weights. Raises ValueError for a path that cannot be a new folder."""
        one_of(OVERFLOW)("dtype", dtype)
        if os.path.lexists(out):
            raise ValueError(
                f"out: got {out}, which exists, expected a new folder: name another, or move that one"
            )
        if not out.parent.is_dir():
            raise ValueError(f"out: got {out}, expected a folder in an existing one: make {out.parent}")
        origin = Path(config).expanduser() if isinstance(config, (str, os.PathLike)) else None
        try:
            config = read_config(origin) if origin else config
            model = empty_model(config)
        except CheckpointError:
            raise
        except (ValueError, OSError) as error:  # transformers' own, which name no argument
            raise ValueError(f"config: {error}") from error
        partial = out.with_name(f"{disk.UNFINISHED}{out.name}")
        with disk.os_errors_as(
            partial, "making a folder (of another export that is writing it, or was killed?)"
        ):
            partial.mkdir()
        result = cls(out, partial, {name: tuple(p.shape) for name, p in model.named_parameters()})
        try:
            with disk.os_errors_as(partial, "copying a model's small files"):
                _write_config(partial, config, model, dtype)
                for name in KEPT if origin else ():
                    if (origin / name).is_file():
                        shutil.copyfile(origin / name, partial / name)
        except BaseException:
            result.abandon()
            raise
        return result

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless these are the config's parameters."""
        for name in (*shapes, *self.shapes):
            if shapes.get(name) != self.shapes.get(name):
                hint = "" if name in self.shapes else did_you_mean(name, list(self.shapes))
                raise ValueError(
                    f"config: got one whose model has {name!r} of shape {self.shapes.get(name)}{hint}, expected "
                    f"{shapes.get(name)}: pass the config that the segments were made from, or its folder"
                )

    def publish(self) -> None:
        """Sync all files to the disk, then rename the folder."""
        for path in self.partial.iterdir():
            disk.sync(path)
        disk.sync(self.partial)
        with disk.os_errors_as(self.out, "giving a folder its name"):
            os.rename(self.partial, self.out)
        disk.sync(self.out.parent)

    def abandon(self) -> None:
        """Delete the folder unless it was published. Idempotent."""
        with suppress(OSError):
            shutil.rmtree(self.partial)


def _write_config(folder: Path, config: Any, model: Any, dtype: Precision) -> None:
    """Write config.json with the dtype of the weights; from_pretrained would round them to another."""
    copy = type(config).from_dict(config.to_dict())
    copy.dtype = TORCH_DTYPES[dtype]
    copy.architectures = [type(model).__name__]
    copy.save_pretrained(folder)


@define(eq=False)
class _Saving:
    """Weights being written to such a folder. The first failure is raised by `finish`."""

    folder: _Folder
    writer: ShardWriter
    dtype: Precision
    failure: Exception | None = None

    @classmethod
    def begin(cls, out: Path, program: Program, config: Any, dtype: Precision, step: int) -> "_Saving":
        folder = _Folder.begin(out, config, dtype)
        try:
            shapes = {span.name: span.shape for span in (*program.layout.spans, *program.layout.frozen)}
            folder.check(shapes)
            tensors = [TensorInfo(name, DTYPES[dtype].safetensors, shape) for name, shape in shapes.items()]
            metadata = {"format": "pt", "step": str(step)}
            return cls(folder, create_shard(folder.partial / SINGLE, tensors, metadata=metadata), dtype)
        except BaseException:
            folder.abandon()
            raise

    def write(self, name: str, values: Tensor) -> None:
        if self.failure is not None:
            return
        try:
            rounded = values.to(TORCH_DTYPES[self.dtype])
            if not torch.equal(rounded.isfinite(), values.isfinite()):
                raise ValueError(f"{name!r}: got a weight too large for {self.dtype}: save as bf16 or fp32")
            self.writer.write_at(name, 0, as_bytes(rounded.contiguous()))
        except (ValueError, CheckpointError) as error:
            self.failure = error

    def finish(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.writer.finish()
        self.folder.publish()

    def abandon(self) -> None:
        self.writer.close()
        self.folder.abandon()
