"""Folders whose weights bitsandbytes has quantized: which tensors in the files are one weight, and their bytes.

A weight in 4 bits is written as `weight` with `weight.absmax` and others behind its name, one in 8
bits with `SCB` beside it. What is no NF4 in blocks of 64 and no LLM.int8 in rows is refused by name.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError, Message, setting
from zfunc.models.quantization import BLOCK, FORMATS, NESTED_BLOCK, NF4, dynamic_map, joined

STATE, METHOD = ".quant_state.bitsandbytes__", "bitsandbytes"
INSTEAD = f"use the model's folder in 16 bits, with {setting('quantize', 'nf4')} or 'int8'"
SAID = {"quant_type": "nf4", "blocksize": BLOCK, "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
"""What a weight in 4 bits says of itself, and has to."""
TABLES = {"quant_map": NF4, "nested_quant_map": dynamic_map()}
READ = "bitsandbytes' NF4 with blocks of 64, or its 8 bits (load_in_8bit)"
Read = Callable[[], Tensor]


def kind_of_folder(config: Any) -> str:
    """How the weights of a folder are quantized, by its config: "" for not at all, zfunc's name of the format
    ("nf4", "nf4-single", "int8"), or words for a format that zfunc does not read."""
    given = getattr(config, "quantization_config", None) or {}
    given = given if isinstance(given, dict) else given.to_dict()
    if not given:
        return ""
    method = str(given.get("quant_method", "an unknown method"))
    if method != METHOD:
        return method
    if given.get("load_in_8bit"):
        return "int8"
    if given.get("load_in_4bit") and given.get("bnb_4bit_quant_type") == "nf4":
        return "nf4" if given.get("bnb_4bit_use_double_quant") else "nf4-single"
    return f"{METHOD} in {given.get('bnb_4bit_quant_type', 'fp4')}"


def kept_in_16_bits(config: Any, weight: str) -> bool:
    """Whether a folder's config lists the module of `weight` as not quantized, matched as transformers does."""
    given = getattr(config, "quantization_config", None) or {}
    given = given if isinstance(given, dict) else given.to_dict()
    module = weight.rpartition(".")[0]
    named: list[str] = given.get("llm_int8_skip_modules") or []
    return any(re.match(rf"(?:{x})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(x) for x in named)


def encoded_weights(
    reads: Mapping[str, Read], shapes: Mapping[str, tuple[int, ...]], file: Path | str
) -> dict[str, tuple[str, tuple[int, ...], Read, list[str]]]:
    """The quantized weights among the tensors of a folder, by name: format, shape, a function that reads their
    bytes, and the names of the tensors that hold them. `reads` reads a tensor by name, `shapes` has their shapes.

    Raises CheckpointError for a weight in another format, or if one of the tensors that hold a weight is
    missing.
    """
    found: dict[str, tuple[str, tuple[int, ...], Read, list[str]]] = {}
    for name in reads:
        weight, _, kind = name.partition(STATE)
        if kind:
            found[weight] = _in_4_bits(weight, kind, reads, file)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('SCB')}weight"
            found[weight] = _in_8_bits(weight, name, reads, shapes, file)
    inside = {x for _, _, _, names in found.values() for x in names}
    for name in (x for x in reads if x.endswith((".absmax", ".quant_map")) and x not in inside):
        _refuse(file, f"{name!r} without a quant_state", "the tensors that save_pretrained writes with it")
    return found


def _in_4_bits(weight: str, kind: str, reads: Mapping[str, Read], file: Path | str) -> Any:
    state = f"{weight}{STATE}{kind}"
    said = json.loads(bytes(reads[state]().tolist()))
    nested = "nested_offset" in said
    others = [*TABLES, "absmax", "nested_absmax"] if nested else ["quant_map", "absmax"]
    names = {x: f"{weight}.{x}" for x in others}
    _check_there((weight, *names.values()), reads, file)
    for key, expected in SAID.items():
        if (nested or "nested" not in key) and said.get(key) != expected:
            _refuse(file, f"{weight!r} with {key} {said.get(key)!r}", f"{expected!r}, of {READ}")
    for x, values in TABLES.items():
        if x in names and not torch.equal(reads[names[x]](), torch.tensor(values)):
            _refuse(file, f"{names[x]!r} of other values", f"those of {READ}")

    def read() -> Tensor:
        if not nested:
            return joined(reads[names["absmax"]](), reads[weight]())
        mean = torch.tensor(said["nested_offset"], dtype=torch.float32)
        return joined(reads[names["nested_absmax"]](), mean, reads[names["absmax"]](), reads[weight]())

    return "nf4" if nested else "nf4-single", tuple(said["shape"]), read, [state, *names.values()]


def _in_8_bits(
    weight: str,
    scales: str,
    reads: Mapping[str, Read],
    shapes: Mapping[str, tuple[int, ...]],
    file: Path | str,
) -> Any:
    _check_there([weight], reads, file)
    form = f"{weight}_format"
    if form in reads and reads[form]().item() != 0:
        _refuse(file, f"{form!r} of {reads[form]().item()}", "0, rows")
    return "int8", shapes[weight], lambda: joined(reads[scales](), reads[weight]()), [scales, form]


def check_sizes(name: str, kind: str, shape: tuple[int, ...], stored: Tensor, file: Path | str) -> Tensor:
    """Return `stored`, the bytes of weight `name` in `file`. Raises CheckpointError unless format `kind`
    takes as many bytes for a weight of `shape`."""
    if stored.numel() != (expected := FORMATS[kind].nbytes(shape)):
        _refuse(file, f"{stored.numel()} bytes of {name!r}", f"{expected} of a {kind} of shape {shape}")
    return stored


def _check_there(names: Iterable[str], reads: Mapping[str, Read], file: Path | str) -> None:
    for name in names:
        if name not in reads:
            _refuse(file, f"no {name!r}", "every tensor of a quantized weight")


def _refuse(file: Path | str, got: str, expected: str) -> None:
    raise CheckpointError(Message(f"{file}: got {got}, expected {expected}: {INSTEAD}"))
