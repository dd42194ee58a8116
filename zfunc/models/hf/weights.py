"""`load_folder`: a local folder as transformers writes it, as segments whose initial values are in its files.

Before any weights are read, every parameter is known to be in a file with its shape, and every tensor in the files
to be a parameter. Files are memory-mapped, and `zfunc.init` reads them segment by segment, so the model is in
memory once.
"""

import copy
import logging
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import strict_json
from zfunc.core.dtypes import SAFETENSORS_FLOATS
from zfunc.engine.compile.segment import Segment, Values
from zfunc.errors import CheckpointError, did_you_mean
from zfunc.models.config_file import NEXT, check_config_file
from zfunc.models.hf.adapters import adapt, adapted_modules, draw_adapters
from zfunc.models.hf.cutting import cut_model
from zfunc.models.hf.families import (
    check_supported,
    check_transformers,
    kind_of_quantization,
    why_unsupported,
)
from zfunc.values import of_type

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_LIMIT = 64 << 20  # bytes
_BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # that older versions saved
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_HALVES = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1}  # of gate_up_proj; the others are of down_proj
LARGEST = {
    "num_hidden_layers": 10_000,
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 16),
}
"""Sizes of a config, and up to which one is believed: beyond, building it would take hours and all memory."""
log = logging.getLogger("zfunc")


@frozen
class StoredTensor:
    """A tensor in a file."""

    file: Path
    name: str  # in the file
    dtype: str
    shape: tuple[int, ...]
    piece: tuple[int, int] | None = None  # of the parameter of all experts: the expert, and the half


def load_folder(folder: Path | str, *, lora: Any = None) -> tuple[Any, tuple[Segment, ...]]:
    """`(config, segments)` of a folder with config.json and model.safetensors, or shards and their index.

    Nothing is downloaded, and no code from the folder is run. `zfunc.init` reads the weights, in fp64, fp32, bf16
    or fp16, as fp32 master weights; keep the files until then.

    With `lora`, a `peft.LoraConfig`, the model is frozen, and only its adapters are trained: `segments` of what
    `peft.get_peft_model` makes of it. The frozen weights are in the compute precision, without a master.

    Raises CheckpointError for missing files, and for names or shapes other than the config's; ValueError for a
    model that `segments` refuses.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    model = empty_model(config, folder)
    check_supported(model, loss=False)  # first, because files of an unsupported family have other names too
    stored = _stored(folder)
    places = _places(model, stored)
    log.info("hf: %s: %d parameters in %d files", folder, len(places), len({s.file for s in stored}))
    for name, t in _stored_buffers(model, stored).items():
        owner, _, short = name.rpartition(".")
        model.get_submodule(owner)._buffers[short] = t
    if lora is not None:
        own = {id(p): name for name, p in model.named_parameters()}
        model = adapt(model, lora)
        places = {name: places[own[id(p)]] for name, p in model.named_parameters() if id(p) in own}
        log.info(
            "hf: LoRA: %s of %s parameters are trained, adapters of %s",
            *map("{:,}".format, model.get_nb_trainable_parameters()),
            ", ".join(adapted_modules(model)),
        )
    return config, tuple(evolve(s, initial=partial(_initial, s, model, places)) for s in cut_model(model))


def describe(config: Any, *, lora: Any = None) -> tuple[Any, tuple[Segment, ...]]:
    """`(config, segments)` of a model from its config alone, without memory: for `zfunc.plan`, or to train it anew.

    `config` is a config of transformers, a config.json, or a folder with one; no weights are looked for. Initial
    values are drawn as transformers draws them. `lora` is a `peft.LoraConfig`, as for `load`. Where the weights are
    quantized, the segments are those of the model without: what a training holds.

    Raises CheckpointError for a missing file, and ValueError for one that is no config, or of a model that
    `segments` refuses.

    >>> describe("nowhere/config.json")
    Traceback (most recent call last):
    zfunc.errors.CheckpointError: nowhere/config.json: got no such file, expected the config.json of a model
    """
    place = Path(config).expanduser() if isinstance(config, str | PathLike) else None
    config = unquantized = config if place is None else read_config(place)
    if kind_of_quantization(config):
        unquantized = copy.deepcopy(config)
        del unquantized.quantization_config
    model = empty_model(unquantized, place)
    check_supported(model, loss=False)
    return config, cut_model(model if lora is None else adapt(model, lora))


def read_config(place: Path) -> Any:
    """The config in a folder, or in a file. Raises CheckpointError without one, ValueError for what is none."""
    check_transformers()
    check_config_file(place)
    from transformers import AutoConfig

    with _errors_of_config(place):
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        of_type("architectures", config.architectures, list | None, "names of classes: correct it")
        return config


def empty_model(config: Any, place: Path | None = None) -> Any:
    """The causal language model of a config, on the meta device. `place` is where that was read, for errors.

    Raises ValueError if transformers has none, and for sizes that no model has.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise why_unsupported(next(iter(config.architectures or ()), config.model_type), "which is none")
    for name, most in LARGEST.items():
        size = getattr(config, name, None)
        if isinstance(size, int) and not 1 <= size <= most:  # some families have one for each layer
            raise ValueError(
                f"{place or 'config'}: got {name} {size!r:.30}, expected a whole number from 1 to {most:,}: {NEXT}"
            )
    with _errors_of_config(place or "config"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


@contextmanager
def _errors_of_config(place: Path | str) -> Generator[None]:
    """Whatever transformers raises about a config, which has no common class, is an error of its file."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{place}: got what transformers does not read as a config ({type(error).__name__}: {reason:.200}), "
            "expected the config.json of a model that it has"
        ) from error


def _stored(folder: Path) -> list[StoredTensor]:
    """Every tensor in the folder's files; the single file comes before shards, as in transformers."""
    if (folder / SINGLE).is_file():
        return _tensors(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder}: got neither {SINGLE} nor {INDEX}, expected one of them: {NEXT}")
    read = disk.read_small((folder / INDEX).resolve(), INDEX_LIMIT)
    index = strict_json.parse_json(read, str(folder / INDEX))
    indexed = index.entries()["weight_map"].read(Mapping[str, strict_json.Text])
    names = sorted(set(indexed.values()))
    if alien := [x for x in names if Path(x).name != x or not (folder / x).is_file()]:
        raise CheckpointError(
            f"{folder / INDEX}: got the file {alien[0]!r:.200}, which is not in the folder: {NEXT}"
        )
    tensors = [t for name in names for t in _tensors(folder / name)]
    if differing := {(t.name, t.file.name) for t in tensors} ^ indexed.items():
        name, file = min(differing)
        raise CheckpointError(f"{folder / INDEX}: got {name!r} in one of it and {file} alone: {NEXT}")
    return tensors


def _tensors(file: Path) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    tensors: list[StoredTensor] = []
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                part = opened.get_slice(name)
                tensors.append(StoredTensor(file, name, part.get_dtype(), tuple(part.get_shape())))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: got a file that cannot be read ({error}): {NEXT}") from error
    return tensors


def _places(model: Any, stored: list[StoredTensor]) -> dict[str, list[StoredTensor]]:
    """The tensors of each parameter; a tied one may be stored under several of its names.

    A file may be of the model without its head: then names lack the base model's prefix.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    names, renamed, buffers = known_names(model), _renamings(model), _saved_buffers(model)
    places: dict[str, list[StoredTensor]] = {name: [] for name in shapes}
    for t in stored:
        owner, piece = (t.name, None) if t.name in names else _merged(renamed(t.name))
        if (name := names.get(owner)) is not None:
            _check(t, name, shapes[name] if piece is None else _of_piece(shapes[name], owner))
            places[name].append(evolve(t, piece=piece))
        elif owner not in buffers and not _BUFFERS.search(t.name):
            hint = did_you_mean(t.name, [x for x in shapes if not places[x]])
            raise CheckpointError(f"{t.file}: got {t.name!r}{hint}, which the model does not have: {NEXT}")
    for name, parts in places.items():
        if not parts:
            folder, hint = stored[0].file.parent, did_you_mean(name, [t.name for t in stored])
            raise CheckpointError(f"{folder}: got no {name!r}{hint}, expected every parameter: {NEXT}")
        if (pieces := [t.piece for t in parts if t.piece is not None]) and sorted(pieces) != [
            (expert, half)
            for expert in range(shapes[name][0])
            for half in range(2 if name.endswith("gate_up_proj") else 1)
        ]:
            raise CheckpointError(f"{parts[0].file.parent}: got some experts of {name!r} alone: {NEXT}")
    return places


def read_buffers(model: Any, folder: Path | None) -> Values:
    """The buffers of a model that are in the files of its folder, by name; most models have none.

    Raises ValueError for one that has, without a folder.
    """
    buffers = _saved_buffers(model)
    if buffers and folder is None:
        raise ValueError(
            f"config: got one of a model that saves {min(buffers)!r}, which is not trained, expected its folder: "
            "the values are copied from there"
        )
    return _stored_buffers(model, _stored(folder)) if buffers and folder else {}


def _stored_buffers(model: Any, stored: list[StoredTensor]) -> Values:
    buffers, renamed = _saved_buffers(model), _renamings(model)
    found = {renamed(t.name): t for t in stored if renamed(t.name) in buffers}
    for name, t in found.items():
        _check(t, name, tuple(buffers[name].shape))
    return {name: _tensor(name, [t]).clone() for name, t in found.items()}


def _saved_buffers(model: Any) -> Values:
    """The buffers that `save_pretrained` writes, such as the bias of DeepSeek-V3's routers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: t for name, t in model.state_dict().items() if name not in parameters}


def _renamings(model: Any) -> Callable[[str], str]:
    """The name that a tensor of a file has in the model, where transformers has renamed modules since."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [x for x in get_model_conversion_mapping(model) if isinstance(x, WeightRenaming)]
    return lambda name: reduce(lambda x, renaming: renaming.rename_source_key(x)[0], renamings, name)


def _merged(name: str) -> tuple[str, tuple[int, int] | None]:
    """The parameter that a tensor of one expert is a piece of, where each has its own tensors in files."""
    if (match := _EXPERT.fullmatch(name)) is None:
        return name, None
    half = _HALVES.get(match[3])
    return f"{match[1]}.experts.{'down' if half is None else 'gate_up'}_proj", (int(match[2]), half or 0)


def _of_piece(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    return (shape[1] // 2, *shape[2:]) if name.endswith("gate_up_proj") else shape[1:]


def known_names(model: Any) -> dict[str, str]:
    """Parameters by their names in files: their own, those they are tied to, and both without the prefix."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    prefix = f"{model.base_model_prefix}."
    return {**{name.removeprefix(prefix): x for name, x in every.items()}, **every}


def _check(t: StoredTensor, name: str, shape: tuple[int, ...]) -> None:
    if t.shape != shape:
        raise CheckpointError(
            f"{t.file}: got {t.name!r} of shape {t.shape}, expected {shape} of {name!r}: {NEXT}"
        )
    if t.dtype not in SAFETENSORS_FLOATS:
        raise CheckpointError(
            f"{t.file}: got {t.name!r} in {t.dtype}, expected {', '.join(SAFETENSORS_FLOATS)}: use weights that "
            "are not quantized"
        )


def _initial(segment: Segment, model: Any, places: Mapping[str, list[StoredTensor]], seed: int) -> Values:
    """The parameters that a segment owns: views of the mapped files, and adapters that are drawn."""
    own = {p.name: short for p, short in zip(segment.parameters, segment.short, strict=True)}
    own = {name: short for name, short in own.items() if name not in segment.shared}
    values = {name: _tensor(name, places[name]) for name in own if name in places}
    if drawn := own.keys() - values.keys():
        adapters = draw_adapters(segment.module, *model.peft_config.values(), seed)
        values |= {name: adapters[own[name]] for name in drawn}
    return values


def _tensor(name: str, parts: list[StoredTensor]) -> Tensor:
    from safetensors import safe_open

    values: list[Tensor] = []
    for t in parts:
        with safe_open(t.file, "pt") as opened:
            values.append(opened.get_tensor(t.name))
    if parts[0].piece is not None:
        by_piece = {t.piece: value for t, value in zip(parts, values, strict=True)}
        ordered = [by_piece[piece] for piece in sorted(by_piece)]
        halves = 1 + max(half for _, half in by_piece)
        return torch.stack([torch.cat(ordered[n : n + halves]) for n in range(0, len(ordered), halves)])
    for t, value in zip(parts[1:], values[1:], strict=True):
        if not torch.equal(value, values[0]):
            raise CheckpointError(
                f"{t.file}: got other values in {t.name!r} than in {parts[0].name!r}, expected the same, because "
                f"the config ties them to {name!r}: set tie_word_embeddings to false in config.json"
            )
    return values[0]
