"""`save_folder` and `export_folder`: trained weights as a folder that `from_pretrained` loads.

A folder with the requested name is complete and on disk; an existing one is never touched.
"""

import copy
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.export import ExportedWeights, check_averages
from zfunc.checkpoint.hf_files import ADAPTER, SINGLE
from zfunc.checkpoint.reader import CheckpointReader
from zfunc.checkpoint.safetensors_file import Shape, TensorInfo, create_shard
from zfunc.checkpoint.writer import all_or_none, as_bytes
from zfunc.core.dtypes import DTYPES, Precision, one_precision
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State
from zfunc.engine.state.weights import rounded
from zfunc.engine.step.evaluate import weights
from zfunc.engine.step.run import check_state
from zfunc.errors import CheckpointError, about, did_you_mean, refuse, setting
from zfunc.models.hf.adapters import AdaptedWeights, base_name
from zfunc.models.hf.families import check_transformers, in_fp32
from zfunc.models.hf.loading import (
    empty_model,
    language_config,
    read_config,
    saved_buffers,
    unquantized,
)
from zfunc.models.quantization import FORMATS, decode, decoded_name
from zfunc.runtime.accelerator import CPU
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
    contents = _Contents(config, dtype, {x.name: x.shape for x in entries}, lora, adapter_only)
    with CheckpointReader(checkpoint) as reader:
        weights = (
            (x.name, reader.weights(x.name, 0, x.numel, ema=ema).view(x.shape))
            for x in sorted(entries, key=lambda x: not x.trainable)  # adapters wait for what they change
            if x.trainable or not adapter_only
        )
        size = contents.write(Path(out), weights, step)
    return ExportedWeights(Path(out), len(contents.shapes), size, step, dtype)


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

    The arguments are as for `export_folder`: the master weights, exact or rounded to nearest, adapters merged
    or alone. Weights are written bucket by bucket, without a second copy of the model. `state` can be trained
    further. Every rank has to call this, and rank 0 writes. Raises ValueError and CheckpointError as
    `export_folder` does.
    """
    check_state(program, state, "hf.save")
    ranks, shapes = program.ranks.job, _shapes(program)
    ranks.agree("hf.save")
    trained = {span.name for span in program.layout.spans}
    exact = (
        (name, values)
        for name, values in weights(program, state, dtype="fp32", device="cpu")
        if name in trained or not adapter_only
    )

    def write() -> None:
        try:
            if ranks.rank == 0:
                _Contents(config, dtype, shapes, lora, adapter_only).write(Path(out), exact, state.step)
        finally:
            if ranks.world > 1:  # they are collectives, also where writing failed
                deque(exact, maxlen=0)

    all_or_none(ranks, write)
    return Path(out)


def model_weights(
    program: Program,
    state: State,
    *,
    config: Any,
    lora: Any = None,
    dtype: Precision | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `save` would write, by their names in transformers: for an engine that generates with them.

    They are `zfunc.weights` of a `zfunc.hf` program; `dtype` and `device` mean the same as there.
    With `lora` each layer is merged with its adapters in fp32 and rounded to `dtype`, or to the program's
    precision; adapters wait on the host for their layer. Buffers that the config's folder has come first. Raises
    ValueError as `save` does.
    """
    check_state(program, state, "hf.weights")
    rounding = dtype or (None if lora is None else program.settings.precision)
    of_model = partial(_Contents, config, rounding or "fp32", _shapes(program), lora, adapter_only=False)
    contents = all_or_none(program.ranks, of_model)
    place = program.device if device is None else torch.device(device)
    exact = {"dtype": "fp32", "device": "cpu"} if rounding else {"device": place}
    return contents.named(weights(program, state, **exact), rounding, place)


def _shapes(program: Program) -> dict[str, Shape]:
    return {span.name: span.shape for span in (*program.layout.spans, *program.layout.frozen)}


def _trained_config(config: Any, trained: Iterable[str]) -> Any:
    """`config`, or the config of the language model in it if `trained` has the names of all its parameters."""
    with suppress(ValueError):  # there is none
        text = language_config(config)
        if {*map(base_name, trained)} >= dict(empty_model(text).named_parameters()).keys():
            return text
    return config


class _Contents:
    """The contents of a model's folder to write: config, tokenizer, adapters, names and shapes of weights."""

    def __init__(
        self, config: Any, dtype: Precision, trained: dict[str, Shape], lora: Any, adapter_only: bool
    ) -> None:
        """`trained` has the shapes of trained parameters by name. Raises ValueError unless these are the config's
        parameters. The other arguments are as for `export_folder`."""
        self.dtype: Precision = one_precision("dtype", dtype)
        self.origin = Path(config).expanduser() if isinstance(config, (str, os.PathLike)) else None
        try:
            names = [decoded_name(x)[0] for x in trained]
            self.config = unquantized(
                _trained_config(read_config(self.origin) if self.origin else config, names)
            )
            self.model = empty_model(self.config)
        except CheckpointError:
            raise
        except (ValueError, OSError) as error:  # transformers' own, which name no argument
            raise ValueError(about("config", error)) from error
        if adapter_only and lora is None:
            refuse("adapter_only", "it without `lora`", "the peft.LoraConfig of the training")
        self.adapter_only = adapter_only
        self.shapes = expected = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.buffers = {} if adapter_only else saved_buffers(self.model, self.origin)
        self.adapted = None
        if lora is not None:
            self.adapted = AdaptedWeights(self.model, lora, adapter_only=adapter_only)
            self.shapes, expected = self.adapted.shapes, self.adapted.expected
            if self.adapted.unties:
                self._untie()
        self.encoded = {x: decoded_name(x) for x in trained if decoded_name(x)[1]}
        shapes = ((x, self._decoded_shape(x, shape, expected)) for x, shape in trained.items())
        trained = {decoded_name(x)[0]: shape for x, shape in shapes}
        self.decoded = {x: trained[own] for x, (own, _) in self.encoded.items()}
        for name in (*trained, *expected):
            own, there = trained.get(name), expected.get(name)
            if own != there:
                has = f"{name!r} of shape {there}"
                has = f"no {name!r}{did_you_mean(name, [*expected])}" if there is None else has
                got = f"one whose model has {has}"
                do = (
                    "pass the config that the segments were made from, or its folder, and lora where "
                    "adapters were trained, with their peft.LoraConfig"
                )
                refuse("config", got, "one without it" if own is None else f"it of shape {own}", do)

    def _decoded_shape(self, name: str, shape: Shape, expected: dict[str, Shape]) -> Shape:
        """The shape of the weight that parameter `name` holds encoded, if the byte counts agree; else `shape`."""
        own, kind = decoded_name(name)
        there = expected.get(own)
        return there if kind and there and (FORMATS[kind].nbytes(there),) == shape else shape

    def _decode(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of `weights`; parameters that hold encoded weights become the decoded weights."""
        for name, values in weights:
            own, kind = self.encoded.get(name, (name, ""))
            yield own, decode(values.to(torch.uint8), kind, self.decoded[name]) if kind else values

    def _untie(self) -> None:
        """Turn off weight tying in a copy of the config. ValueError if the model still ties its weights."""
        self.config = copy.deepcopy(self.config)
        self.config.tie_word_embeddings = self.config.get_text_config().tie_word_embeddings = False
        if dict(empty_model(self.config).named_parameters()).keys() != self.shapes.keys():
            got = f"adapters of weights that a {type(self.model).__name__} ties"
            expected = "ones that it can have apart, to merge them"
            refuse("lora", got, expected, f"pass {setting('adapter_only', True)}")

    def named(
        self, weights: Iterable[tuple[str, Tensor]], dtype: Precision | None, device: torch.device = CPU
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the folder, on `device`: buffers, then `weights`, rounded to `dtype` unless None."""
        yield from ((name, t.to(device)) for name, t in self.buffers.items())
        weights = self._decode(weights)
        for name, values in weights if self.adapted is None else self.adapted.written(weights):
            yield name, (rounded(name, values, self._stored(name, dtype)) if dtype else values).to(device)
            del values  # before the next one is made

    def _stored(self, name: str, dtype: Precision) -> Precision:
        """The precision of a tensor in a folder of `dtype`: fp32 where the class of the model keeps it so."""
        return "fp32" if dtype in in_fp32(self.model, name) else dtype

    def write(self, out: Path, weights: Iterable[tuple[str, Tensor]], step: int) -> int:
        """Write the folder `out`, named so once complete, with `step` as metadata. Returns the weights' bytes.

        `weights` are fp32, in their shapes. Raises ValueError for a path that cannot be a new folder.
        """
        if os.path.lexists(out):
            refuse("out", f"{out}, which exists", "a new folder", "name another, or move that one")
        if not out.parent.is_dir():
            refuse("out", str(out), "a folder in an existing one", f"make {out.parent}")
        partial = out.with_name(f"{disk.UNFINISHED}{out.name}")
        making = "making a folder (of another export that is writing it, or was killed?)"
        with disk.os_errors_as(partial, making):
            partial.mkdir()
        try:
            with disk.os_errors_as(partial, "copying a model's small files"):
                self._write_small_files(partial)
            size = self._write_weights(partial, weights, step)
            for path in (*partial.iterdir(), partial):
                disk.sync(path)
            with disk.os_errors_as(out, "giving a folder its name"):
                os.rename(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        disk.sync(out.parent)
        return size

    def _write_small_files(self, folder: Path) -> None:
        """Write the config, with the dtype to which from_pretrained rounds weights, and the tokenizer's files."""
        if self.adapted is not None and self.adapter_only:
            self.adapted.write_config(folder, self.origin)
            return
        config = type(self.config).from_dict(self.config.to_dict())
        config.dtype, config.architectures = TORCH_DTYPES[self.dtype], [type(self.model).__name__]
        config.save_pretrained(folder)
        for name in KEPT if self.origin else ():
            if (self.origin / name).is_file():
                shutil.copyfile(self.origin / name, folder / name)

    def _write_weights(self, folder: Path, weights: Iterable[tuple[str, Tensor]], step: int) -> int:
        tensors = [
            TensorInfo(name, DTYPES[self._stored(name, self.dtype)].safetensors, shape)
            for name, shape in self.shapes.items()
        ]
        tensors += [
            TensorInfo(k, SAFETENSORS_TYPES[t.dtype], tuple(t.shape)) for k, t in self.buffers.items()
        ]
        file, metadata = ADAPTER if self.adapter_only else SINGLE, {"format": "pt", "step": str(step)}
        writer = create_shard(folder / file, tensors, metadata=metadata, mode=0o666)
        try:
            for name, values in self.named(weights, self.dtype):
                writer.write_at(name, 0, as_bytes(values.flatten()))
            writer.finish()
        finally:
            writer.close()
        return writer.shard.size
