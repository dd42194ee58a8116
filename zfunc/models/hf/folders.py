"""`save_folder` and `export_folder`: trained weights as a folder that `from_pretrained` loads.

A folder with the requested name is complete and on disk; an existing one is never touched.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.export import ExportedWeights, check_averages, read_weights
from zfunc.checkpoint.reader import CheckpointReader
from zfunc.checkpoint.safetensors_file import ShardWriter, TensorInfo, create_shard
from zfunc.checkpoint.writer import all_or_none, as_bytes
from zfunc.core.dtypes import DTYPES, PRECISIONS, Precision
from zfunc.engine.compile.program import Program, check_state
from zfunc.engine.compile.segment import Values
from zfunc.engine.state.state import State
from zfunc.engine.state.weights import parameter_weights
from zfunc.engine.step.flush import make_deferred_update
from zfunc.errors import CheckpointError, did_you_mean
from zfunc.models.hf.adapters import ADAPTER, AdaptedWeights
from zfunc.models.hf.families import check_transformers
from zfunc.models.hf.weights import SINGLE, empty_model, read_buffers, read_config
from zfunc.options import one_of
from zfunc.runtime.torch_dtypes import SAFETENSORS_TYPES, TORCH_DTYPES

KEPT = (  # copied from the folder of the config
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files of a tokenizer, and settings for generation."""


def export_folder(
    source: Path | str,
    out: Path | str,
    *,
    config: Any,
    dtype: Precision = "fp32",
    lora: Any = None,
    adapter_only: bool = False,
    ema: bool = False,
) -> ExportedWeights:
    """Write a checkpoint of a `zfunc.hf` program as a new folder that `from_pretrained` loads.

    `source` is a checkpoint, a folder of them or a run. `config` is a config, or the folder that was trained from,
    whose tokenizer is then copied too. A tied head is stored once, as in transformers. `dtype`, `ema`, memory and
    errors are those of `zfunc.checkpoint.export.export_weights`.

    Where adapters were trained, `lora` is their `peft.LoraConfig`, or a folder with adapter_config.json. They are
    merged into the model's weights, in fp32 and one layer at a time; with `adapter_only` they alone are written, as
    peft does, for `PeftModel.from_pretrained`.

    Raises ValueError if the checkpoint is not of the config's model, or `out` exists.
    """
    check_transformers()
    checkpoint = checkpoints.open_checkpoint(checkpoints.locate_checkpoint(Path(source)))
    if ema:
        check_averages(checkpoint)
    entries, step = checkpoint.manifest.parameters, checkpoint.manifest.position.step
    shapes = {x.name: x.shape for x in entries}
    folder = _Folder.begin(Path(out), config, dtype, shapes, lora, adapter_only, step)
    try:
        with CheckpointReader(checkpoint) as reader:
            for entry in sorted(entries, key=lambda x: not x.trainable):  # adapters wait for what they change
                if entry.trainable or not adapter_only:
                    folder.write(entry.name, torch.from_numpy(read_weights(reader, entry, ema=ema)))
        folder.finish()
    finally:
        folder.abandon()
    return ExportedWeights(Path(out), folder.parameters, folder.writer.shard.size, step, dtype)


def save_folder(
    out: Path | str,
    program: Program,
    state: State,
    *,
    config: Any,
    dtype: Precision = "fp32",
    lora: Any = None,
    adapter_only: bool = False,
) -> Path:
    """Write the weights of a `zfunc.hf` program as a new folder that `from_pretrained` loads. Returns its path.

    The arguments are as for `export_folder`: the master weights, exact or rounded to nearest, adapters merged or
    alone. They are written bucket by bucket, without a second copy of the model. `state` can be trained further.
    Every rank has to call this, and rank 0 writes. Raises ValueError and CheckpointError as `export_folder` does.
    """
    check_state(program, state, "hf.save")
    make_deferred_update(program, state, "hf.save")
    ranks, layout = program.ranks, program.layout
    ranks.agree("hf.save")

    def begin() -> _Folder | None:
        if ranks.rank:
            return None
        shapes = {span.name: span.shape for span in (*layout.spans, *layout.frozen)}
        return _Folder.begin(Path(out), config, dtype, shapes, lora, adapter_only, state.step)

    folder = all_or_none(ranks, begin)
    trained = {span.name for span in layout.spans}
    try:
        for name, values in parameter_weights(state.buffers, layout, ranks):
            if adapter_only and name not in trained:
                break  # on all ranks: frozen buckets are the last
            if folder is not None:
                folder.write(name, values)
        all_or_none(ranks, folder.finish if folder is not None else lambda: None)
    finally:
        if folder is not None:
            folder.abandon()
    return Path(out)


@define(eq=False)
class _Folder:
    """A folder that gets its name when it is complete. The first failure of a weight is raised by `finish`."""

    out: Path
    partial: Path
    dtype: Precision
    adapted: AdaptedWeights | None
    buffers: Values  # copied from the files of the model
    writer: ShardWriter
    parameters: int  # to write
    failure: Exception | None = None

    @classmethod
    def begin(
        cls,
        out: Path,
        config: Any,
        dtype: Precision,
        trained: dict[str, tuple[int, ...]],
        lora: Any,
        adapter_only: bool,
        step: int,
    ) -> "_Folder":
        """Make it, with everything but the weights. `trained` are the shapes of what was trained, by name.

        Raises ValueError for a path that cannot be a new folder, and unless these are the config's parameters.
        """
        one_of(PRECISIONS)("dtype", dtype)
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
        if adapter_only and lora is None:
            raise ValueError(
                "adapter_only: got it without lora, expected the peft.LoraConfig of the training"
            )
        adapted = None
        if lora is not None:
            adapted = AdaptedWeights.of(model, lora, trained, adapter_only=adapter_only)
        own = {name: tuple(p.shape) for name, p in model.named_parameters()}
        _check_trained(trained, own if adapted is None else adapted.expected)
        buffers = {} if adapter_only else read_buffers(model, origin)
        partial = out.with_name(f"{disk.UNFINISHED}{out.name}")
        with disk.os_errors_as(
            partial, "making a folder (of another export that is writing it, or was killed?)"
        ):
            partial.mkdir()
        try:
            with disk.os_errors_as(partial, "copying a model's small files"):
                if adapted is not None and adapter_only:
                    adapted.write_config(partial, origin)
                else:
                    _write_config(partial, config, model, dtype)
                for name in KEPT if origin and not adapter_only else ():
                    if (origin / name).is_file():
                        shutil.copyfile(origin / name, partial / name)
            shapes = own if adapted is None else adapted.shapes
            stored = DTYPES[dtype].safetensors
            tensors = [TensorInfo(name, stored, shape) for name, shape in shapes.items()]
            tensors += [TensorInfo(k, SAFETENSORS_TYPES[t.dtype], tuple(t.shape)) for k, t in buffers.items()]
            file, metadata = ADAPTER if adapter_only else SINGLE, {"format": "pt", "step": str(step)}
            writer = create_shard(partial / file, tensors, metadata=metadata, mode=0o666)
            return cls(out, partial, dtype, adapted, buffers, writer, len(shapes))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def write(self, name: str, values: Tensor) -> None:
        """Write a parameter, fp32, in its shape; or what it completes, where adapters are merged."""
        if self.failure is not None:
            return
        try:
            for written, x in ((name, values),) if self.adapted is None else self.adapted.add(name, values):
                self._write(written, x.flatten())
        except (ValueError, CheckpointError) as error:
            self.failure = error

    def _write(self, name: str, values: Tensor) -> None:
        rounded = values.to(TORCH_DTYPES[self.dtype])
        if not torch.equal(rounded.isfinite(), values.isfinite()):
            raise ValueError(f"{name!r}: got a weight too large for {self.dtype}: save as bf16 or fp32")
        self.writer.write_at(name, 0, as_bytes(rounded.contiguous()))

    def finish(self) -> None:
        """Complete the file, sync all to the disk, then rename the folder."""
        if self.failure is not None:
            raise self.failure
        for name, t in self.buffers.items():
            self.writer.write_at(name, 0, as_bytes(t.flatten()))
        self.writer.finish()
        for path in self.partial.iterdir():
            disk.sync(path)
        disk.sync(self.partial)
        with disk.os_errors_as(self.out, "giving a folder its name"):
            os.rename(self.partial, self.out)
        disk.sync(self.out.parent)

    def abandon(self) -> None:
        """Delete the folder unless it was finished. Idempotent."""
        self.writer.close()
        shutil.rmtree(self.partial, ignore_errors=True)


def _check_trained(trained: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the parameters that were trained are the config's."""
    for name in (*trained, *expected):
        if trained.get(name) != expected.get(name):
            hint = "" if name in expected else did_you_mean(name, list(expected))
            raise ValueError(
                f"config: got one whose model has {name!r} of shape {expected.get(name)}{hint}, expected "
                f"{trained.get(name)}: pass the config that the segments were made from, or its folder, and lora "
                "where adapters were trained, with their peft.LoraConfig"
            )


def _write_config(folder: Path, config: Any, model: Any, dtype: Precision) -> None:
    """Write config.json with the dtype of the weights; from_pretrained would round them to another."""
    copy = type(config).from_dict(config.to_dict())
    copy.dtype = TORCH_DTYPES[dtype]
    copy.architectures = [type(model).__name__]
    copy.save_pretrained(folder)
