"""`load_folder`: a local folder as transformers writes it, as segments whose initial values are in its files.

Before any weights are read, every parameter is known to be in a file with its shape, and every tensor in the files
to be a parameter. Files are memory-mapped, and `zfunc.init` reads them segment by segment, so the model is in
memory once.
"""

import copy
import logging
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from zfunc.checkpoint.hf_files import ADAPTER_CONFIG, SHARDS, SINGLE
from zfunc.checkpoint.trainer_files import adapters_in, indexed_shards
from zfunc.core.dtypes import SAFETENSORS_FLOATS
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.tensor_memory import Values
from zfunc.errors import CheckpointError, Message, did_you_mean, refuse, setting
from zfunc.models.config_file import LARGEST_SIZE, MOST_LAYERS, NEXT, check_config_file
from zfunc.models.hf.adapters import adapt, adapted_modules, base_name, draw_adapters, found_tensors
from zfunc.models.hf.bitsandbytes import (
    INSTEAD,
    READ,
    check_sizes,
    encoded_weights,
    kept_in_16_bits,
    kind_of_folder,
)
from zfunc.models.hf.cutting import cut_model
from zfunc.models.hf.families import (
    check_supported,
    check_transformers,
    kind_of,
    why_unsupported,
)
from zfunc.models.quantization import FORMATS, decode, encode, keep_encoded
from zfunc.options import one_of
from zfunc.values import of_type

_POINTER = b"version https://git-lfs"  # in the place of a file that git lfs has not fetched
_OLD_BUFFERS = r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq|position_ids)$"  # that older versions saved
LARGEST = {
    "num_hidden_layers": MOST_LAYERS,
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), LARGEST_SIZE
    ),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 16),
}
"""Sizes of a config, and up to which one is believed: beyond, building it would take hours and all memory."""
log = logging.getLogger("zfunc")


def load_folder(
    folder: Path | str,
    *,
    lora: Any = None,
    text_only: bool = False,
    quantize: str | None = None,
    quantize_parameters: Sequence[str] = (),
) -> tuple[Any, tuple[Segment, ...]]:
    """`(config, segments)` of a folder with config.json and model.safetensors, or its shards.

    Nothing is downloaded, and no code from the folder is run. `zfunc.init` reads the weights, in fp64, fp32, bf16
    or fp16, as fp32 master weights; keep the files until then.

    With `lora`, a `peft.LoraConfig`, the model is frozen, and only its adapters are trained: `segments` of what
    `peft.get_peft_model` makes of it. The frozen weights are in the compute precision, without a master.

    With `quantize`, "nf4" or "int8", the frozen weights of linear layers but the head are kept in that format of
    bitsandbytes (`zfunc.quantized`), made a tensor at a time as the folder is read. A folder that bitsandbytes has
    quantized is read as it is. Both need `lora`. `quantize_parameters` are ends of names of further tensors that
    are kept in the format, which bitsandbytes leaves as they are: those of experts, "experts.gate_up_proj".

    With `text_only`, of a model of images and text only the language model is read: the config is its own, and
    `save` and `export` write it alone.

    Raises CheckpointError for missing files, and for names or shapes other than the config's; ValueError for a
    model that `segments` refuses.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder, text_only=text_only)
    if adapters_in(folder) and not isinstance(lora, str | PathLike):
        got = f"{folder}: got {ADAPTER_CONFIG}, of an adapter that transformers would put on the model's weights"
        do = "save the model with the adapter merged into it, or move that file away to begin without the adapter"
        raise CheckpointError(f"{got}, expected a model alone: {do}")
    stored = _check_quantized(read_config(folder), quantize, lora, folder)
    config = config if not stored else unquantized(config)
    model = empty_model(config, folder)
    check_supported(model)  # first, because files of an unsupported family have other names too
    weights = FolderWeights.of(folder, model)
    log.info("hf: %s: %d tensors", folder, len(weights.names))
    for name, t in weights.buffers().items():
        owner, _, short = name.rpartition(".")
        model.get_submodule(owner)._buffers[short] = t
    first = {id(p): name for name, p in model.named_parameters()}
    own = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    encoded: dict[str, str] = weights.encoded()
    if encoded and not stored:
        raise CheckpointError(
            f"{folder}: got weights in {', '.join(sorted({*encoded.values()}))}, of which config.json says "
            "nothing, expected the quantization_config that bitsandbytes writes there: copy config.json again"
        )
    if quantize and not encoded:
        encoded = dict.fromkeys(_linear_weights(model), quantize)
    encoded |= _further(model, quantize_parameters, quantize or stored)
    if lora is not None:
        model = adapt(model, lora)
        log.info(
            "hf: LoRA: %s of %s parameters are trained, adapters of %s",
            *map("{:,}".format, model.get_nb_trainable_parameters()),
            ", ".join(adapted_modules(model)),
        )
    names = {name: own[base_name(name)] for name, _ in model.named_parameters() if base_name(name) in own}
    kinds = {x: encoded.get(y) for x, y in names.items()}
    values = partial(_initial, model=model, weights=weights, names=names, kinds=kinds)
    return config, _quantized((evolve(s, initial=partial(values, s)) for s in cut_model(model)), kinds)


def trainer_groups(
    folder: Path | str, *, lora: Any = None, text_only: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the trained parameters, with weight decay and without: the groups of a Trainer's optimizer for the
    model of a folder, with the adapters of `lora`, in the order of its optimizer.pt."""
    folder = Path(folder).expanduser()
    config = read_config(folder, text_only=text_only)
    model = empty_model(unquantized(config) if kind_of_folder(config) else config, folder)
    model = model if lora is None else adapt(model, lora)
    from transformers import Trainer

    decayed = {*Trainer.get_decay_parameter_names(None, model)}  # pyright: ignore[reportArgumentType]
    own = [name for name, p in model.named_parameters() if p.requires_grad]
    return tuple(x for x in own if x in decayed), tuple(x for x in own if x not in decayed)


def _check_quantized(config: Any, quantize: str | None, lora: Any, place: Path | None) -> str:
    """The stored format, "" for 16 bits. ValueError if it is unknown or not `quantize`, or lacks a `lora`."""
    stored = kind_of_folder(config)
    if quantize is not None:
        one_of(FORMATS)("quantize", quantize)
    if stored not in ("", *FORMATS):
        got = f"weights quantized by {stored}"
        raise ValueError(Message(f"{place}: got {got}, expected {READ}, or 16 bits: {INSTEAD}"))
    if stored and quantize not in (None, stored):
        refuse("quantize", f"{quantize!r} for {place}, which has its weights in {stored}", do="leave it out")
    if (stored or quantize) and lora is None:
        got = f"weights in {quantize or stored} without `lora`"
        expected = "adapters, as encoded weights are not trained"
        refuse("quantize", got, expected, "pass `lora`, or train all of a model in 16 bits")
    return stored


def _linear_weights(model: Any) -> list[str]:
    """The names of the weights of linear layers but the head, as bitsandbytes chooses them. ValueError for none."""
    head, tied = model.get_output_embeddings(), model.get_input_embeddings().weight
    layers = ((x, m) for x, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head)
    if not (names := [f"{x}.weight" for x, m in layers if m.weight is not tied]):
        got = f"a {type(model).__name__}, which has no linear layers (torch.nn.Linear) but its head"
        refuse("quantize", got, "some", "leave it out")
    return names


def _further(model: Any, names: Sequence[str], kind: str) -> dict[str, str]:
    """The format `kind` by name of each tensor whose name ends in one of `names`."""
    if names and not kind:
        refuse("quantize_parameters", "it without `quantize`", "both", "add `quantize`")
    found = found_tensors("quantize_parameters", model, names, "linear layers alone, which `quantize` packs")
    if found and kind == "int8":
        do = f"pass {setting('quantize', 'nf4')}"
        refuse("quantize_parameters", "it with int8, whose scales are of rows of a matrix", "nf4", do)
    return dict.fromkeys(found, kind)


def _quantized(segments: Iterable[Segment], kinds: Mapping[str, str | None]) -> tuple[Segment, ...]:
    """Segments that keep the parameters in `kinds` (format by full name) encoded. ValueError for a trained one."""
    made: list[Segment] = []
    for s in segments:
        own = {p.name: kinds[p.name] for p in s.parameters if kinds.get(p.name)}
        for p in s.parameters:
            if p.name in own and p.trainable:
                got = f"{p.name!r}, which is trained as a whole, in {own[p.name]}"
                refuse("lora", got, "adapters alone", "leave it out of modules_to_save")
        made.append(keep_encoded(s, {x: kind for x, kind in own.items() if kind}))
    return tuple(made)


def describe(
    config: Any,
    *,
    lora: Any = None,
    text_only: bool = False,
    quantize: str | None = None,
    quantize_parameters: Sequence[str] = (),
) -> tuple[Any, tuple[Segment, ...]]:
    """`(config, segments)` of a model from its config alone, without memory: for `zfunc.plan`, or to train it anew.

    `config` is a config of transformers, a config.json, or a folder with one; no weights are read. Initial
    values are drawn as transformers draws them. The other arguments are as for `zfunc.hf.load`. For weights
    quantized in a format that `load` does not read, the segments are those of the unquantized model.

    Raises CheckpointError for a missing file, and ValueError for a file that is no config, or a model that
    `segments` refuses.

    >>> describe("nowhere/config.json")
    Traceback (most recent call last):
    zfunc.errors.CheckpointError: nowhere/config.json: got no such file, expected the config.json of a model
    """
    place = Path(config).expanduser() if isinstance(config, str | PathLike) else None
    whole = config if place is None else read_config(place)  # which says how the weights are stored
    config = language_config(whole) if text_only else whole
    if stored := quantize is None and lora is not None and kind_of_folder(whole) in FORMATS:
        quantize = kind_of_folder(whole)
    _check_quantized(None, quantize, lora, place)
    model = empty_model(unquantized(config), place)
    check_supported(model)
    linear = _linear_weights(model) if quantize else []
    encoded = {x: quantize for x in linear if not (stored and kept_in_16_bits(whole, x))}
    encoded |= _further(model, quantize_parameters, quantize or "")
    segments = cut_model(model if lora is None else adapt(model, lora))
    names = [p.name for s in segments for p in s.parameters]
    return config, _quantized(segments, {x: encoded.get(base_name(x)) for x in names})


def unquantized(config: Any) -> Any:
    """A copy of a model's config without its settings of quantized weights."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def read_config(place: Path, *, text_only: bool = False) -> Any:
    """Read the config in folder or file `place`; if `text_only`, that of its language model. Raises CheckpointError
    if there is none, ValueError for a file that is no config."""
    check_transformers()
    check_config_file(place)
    from transformers import AutoConfig

    with _errors_of_config(place):
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        of_type("architectures", config.architectures, list | None, "names of classes: correct it")
    return language_config(config) if text_only else config


def language_config(config: Any) -> Any:
    """A copy of the config of the language model in a model of images and text, with the whole model's weight
    tying and special token ids.

    Raises ValueError for a config of text alone, and for an encoder with a decoder.
    """
    text = copy.deepcopy(config.get_text_config())
    if type(text) is type(config) or config.is_encoder_decoder:
        got = f"it for a {config.model_type}, which is of text alone"
        refuse("text_only", got, "a model of images too", "leave it out")
    for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    return text


def empty_model(config: Any, place: Path | None = None, *, images: bool = False) -> Any:
    """The causal language model of a config, on the meta device, or its model of `images` and text. Errors name
    `place`, the config's file.

    Raises ValueError if transformers has none, and for sizes that no model has.
    """
    import transformers

    auto: Any = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        raise why_unsupported(next(iter(config.architectures or ()), config.model_type), kind_of(config))
    for name, most in LARGEST.items():
        size = getattr(config.get_text_config(), name, None)
        if isinstance(size, int) and not 1 <= size <= most:  # some families have one for each layer
            raise ValueError(
                f"{place or 'config'}: got {name} {size!r:.30}, expected a whole number from 1 to {most:,}: {NEXT}"
            )
    with _errors_of_config(place or "config"), torch.device("meta"):
        return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)


@contextmanager
def _errors_of_config(place: Path | str) -> Generator[None]:
    """A context that turns any exception of transformers about a config into a ValueError naming `place`."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{place}: got what transformers does not read as a config ({type(error).__name__}: {reason:.200}), "
            "expected the config.json of a model that it has"
        ) from error


@frozen
class _StoredTensor:
    """A tensor in a file of weights; `pattern` names the conversion that makes one parameter of several tensors."""

    file: Path
    name: str  # in the file
    dtype: str
    shape: tuple[int, ...]
    pattern: str | None = None
    encoded: Callable[[], Tensor] | None = None  # makes the bytes of a weight whose `dtype` is one of FORMATS

    def value(self) -> Tensor:
        """The stored tensor, as a view of the mapped file; of an encoded weight its bytes."""
        from safetensors import safe_open

        if self.encoded is not None:
            return check_sizes(self.name, self.dtype, self.shape, self.encoded(), self.file)

        with safe_open(self.file, "pt") as opened:
            return opened.get_tensor(self.name)


@frozen(eq=False)
class FolderWeights:
    """The tensors in a folder's weight files, by the names that `model` has for them: parameters, and buffers
    that `save_pretrained` writes, such as the bias of DeepSeek-V3's routers. A tied parameter has its first
    name.

    `names` maps the trained model's names to those of `model`, which may contain the trained language model.
    """

    model: Any
    parts: dict[str, list[_StoredTensor]]
    names: dict[str, str]

    @classmethod
    def of(cls, folder: Path, language: Any) -> "FolderWeights":
        """Open the weights of a folder for `language`: the folder's own model, or the language model within that.
        Raises CheckpointError unless the folder's tensors are those of its model, in name and shape.

        A folder saved from the model without its head is read too: its names lack the base model's prefix.
        """
        from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

        model, config = language, read_config(folder)
        if type(config) is not type(model.config):
            model = empty_model(config, folder, images=True)
        first = {id(p): name for name, p in model.named_parameters()}
        owners = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        state, conversions = model.state_dict(), _conversions(model)
        renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
        converters = [x for x in conversions if not isinstance(x, WeightRenaming)]
        parts: dict[str, list[_StoredTensor]] = {owners.get(name, name): [] for name in state}
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _OLD_BUFFERS}
        stored = sorted(_stored_tensors(folder), key=lambda t: dot_natural_key(t.name))  # experts in order
        for t in stored:
            name, pattern = t.name, None
            if name not in state:
                name, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            if name in state:
                parts[owners.get(name, name)].append(evolve(t, pattern=pattern))
            elif not any(re.search(x, name) for x in ignored):
                hint = did_you_mean(t.name, [x for x in parts if not parts[x]])
                raise CheckpointError(
                    f"{t.file}: got {t.name!r}{hint}, which the model does not have: {NEXT}"
                )
        names = {x: x for x in parts} if model is language else _names_in(model, language)
        weights = cls(model, parts, {name: owners.get(there, there) for name, there in names.items()})
        for name, own in parts.items():
            if not own:
                hint = did_you_mean(name, [t.name for t in stored])
                raise CheckpointError(f"{folder}: got no {name!r}{hint}, expected every parameter: {NEXT}")
            weights._check(name, tuple(state[name].shape))
        return weights

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        """Raise CheckpointError if the stored tensors of `name` are quantized, or not of the `expected` shape."""
        for t in self.parts[name]:
            if t.dtype not in SAFETENSORS_FLOATS and t.encoded is None:
                raise CheckpointError(
                    f"{t.file}: got {t.name!r} in {t.dtype}, expected {', '.join(SAFETENSORS_FLOATS)}: use weights "
                    "that are not quantized, or quantized by bitsandbytes"
                )
            if t.encoded is not None and t.pattern is not None:
                got = f"{t.name!r} in {t.dtype}, one of the tensors that make {name!r}"
                said = f"{t.file}: got {got}, expected floating point there: {INSTEAD}"
                raise CheckpointError(Message(said))
        t = self.parts[name][0]
        try:
            shape = tuple(self._read(name, on_meta=True).shape)
        except (ValueError, RuntimeError) as error:  # of pieces that do not go together
            raise CheckpointError(f"{t.file}: got {t.name!r} for {name!r} ({error}): {NEXT}") from error
        if shape != expected:
            raise CheckpointError(
                f"{t.file}: got {t.name!r} of shape {shape}, expected {expected} of {name!r}: {NEXT}"
            )

    def encoded(self) -> dict[str, str]:
        """The format, as "nf4", of each weight that the folder has encoded, by its name in the trained model."""
        kinds = {name: self.parts[there][0] for name, there in self.names.items()}
        return {name: t.dtype for name, t in kinds.items() if t.encoded is not None}

    def buffers(self) -> Values:
        """The module buffers of the model by full name, each in the dtype of the folder's file."""
        parameters = dict(self.model.named_parameters())
        return {name: self.read(name).clone() for name, x in self.names.items() if x not in parameters}

    def read(self, name: str) -> Tensor:
        """Tensor `name` of the trained model: a view of the mapped file, or made of several stored tensors."""
        return self._read(self.names[name])

    def _read(self, name: str, *, on_meta: bool = False) -> Tensor:
        """Tensor `name` of the folder's model; with `on_meta` only its shape, and no file is read."""
        first, *others = parts = self.parts[name]
        values = [torch.empty(t.shape, device="meta") if on_meta else t.value() for t in parts]
        if first.pattern is not None:
            conversion = next(x for x in _conversions(self.model) if first.pattern in x.source_patterns)
            for t, value in zip(parts, values, strict=True):
                conversion.add_tensor(name, t.name, t.pattern, value)
            made = conversion.convert(name, model=self.model, config=self.model.config)[name]
            return made[0] if isinstance(made, list) else made
        for t, value in zip(others, values[1:], strict=True):
            if value.shape != values[0].shape or not (on_meta or torch.equal(value, values[0])):
                raise CheckpointError(
                    f"{t.file}: got other values in {t.name!r} than in {first.name!r}, expected the same, because "
                    f"the config ties them to {name!r}: set tie_word_embeddings to false in config.json"
                )
        return values[0]


def _names_in(whole: Any, language: Any) -> dict[str, str]:
    """The names of the tensors of `language` in the model `whole` around it, by their names in `language`."""
    names: dict[str, str] = {}
    for part in ("get_decoder", "get_output_embeddings"):
        own, there = (
            next(f"{x}." for x, module in model.named_modules() if module is getattr(model, part)())
            for model in (language, whole)
        )
        tensors = language.get_submodule(own[:-1]).state_dict()
        names |= {f"{own}{x}".lstrip("."): f"{there}{x}" for x in tensors}
    if names.keys() != language.state_dict().keys() or not {*names.values()} <= whole.state_dict().keys():
        raise why_unsupported(type(whole).__name__, "whose language model has other parameters alone")
    return names


def _conversions(model: Any) -> list[Any]:
    """The conversions by which transformers makes a model's tensors of a file's, made anew for one use."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return [*get_model_conversion_mapping(model)]


def _stored_tensors(folder: Path) -> list[_StoredTensor]:
    """Every tensor in a folder's weight files; one model.safetensors goes before shards, as in transformers."""
    from safetensors import SafetensorError, safe_open

    tensors: list[_StoredTensor] = []
    for file in _weight_files(folder):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a dict
                    part = opened.get_slice(name)
                    tensors.append(_StoredTensor(file, name, part.get_dtype(), tuple(part.get_shape())))
        except (SafetensorError, OSError) as error:
            pointer = isinstance(error, SafetensorError) and _begin(file) == _POINTER
            got = "a pointer of git lfs" if pointer else f"a file that cannot be read ({error})"
            do = "fetch the weights, by git lfs pull in its folder" if pointer else NEXT
            raise CheckpointError(f"{file}: got {got}: {do}") from error
    shapes = {t.name: t.shape for t in tensors}
    encoded = encoded_weights({t.name: t.value for t in tensors}, shapes, folder)
    inside = {x for _, _, _, names in encoded.values() for x in names}

    def joined_parts(t: _StoredTensor) -> _StoredTensor:
        kind, shape, read, _ = encoded[t.name]
        return evolve(t, dtype=kind, shape=shape, encoded=read)

    return [joined_parts(t) if t.name in encoded else t for t in tensors if t.name not in inside]


def _begin(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(_POINTER))  # the file may have gigabytes


def _weight_files(folder: Path) -> list[Path]:
    """The paths of a model's weights in `folder`, chosen as transformers does: model.safetensors alone if it is
    there, or the shards that the index names, or, without an index, all shards. Raises CheckpointError if one is
    missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = indexed_shards(folder) or sorted(folder.glob(SHARDS))
    if not files:
        pickled = next(folder.glob("pytorch_model*.bin"), None)
        do = f"let transformers read {pickled.name}, and save_pretrained write them" if pickled else NEXT
        do = "name its folder" if folder.is_file() else do
        raise CheckpointError(f"{folder}: got neither {SINGLE} nor {SHARDS}, expected one of them: {do}")
    return files


def saved_buffers(model: Any, folder: Path | None) -> Values:
    """The buffers of a model that are in the files of its folder, by name; most models have none.

    Raises ValueError for a model with such buffers, but without a folder.
    """
    buffers = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    if buffers and folder is None:
        got = f"one of a model that saves {min(buffers)!r}, which is not trained"
        refuse("config", got, "its folder", "the values are copied from there")
    return FolderWeights.of(folder, model).buffers() if buffers and folder else {}


def _initial(
    segment: Segment,
    seed: int,
    *,
    model: Any,
    weights: FolderWeights,
    names: Mapping[str, str],
    kinds: Mapping[str, str | None],
) -> Values:
    """Parameters that a segment owns, by full name: views of mapped files, and adapters drawn with `seed`. As in
    peft, DoRA's magnitudes are of the weights that the formats in `kinds` decode to."""
    own = {full: short for short, full in segment.by_short.items() if full not in segment.shared}
    values = {full: weights.read(names[full]) for full in own if full in names}
    if drawn := own.keys() - values.keys():
        shapes = {p.name: p.shape for p in segment.parameters}

        def base(short: str) -> Tensor | None:
            full = segment.by_short.get(short, "")
            if full not in values or not (kind := kinds[full]):
                return values.get(full)
            return decode(encode(values[full], kind), kind, shapes[full])

        adapters = draw_adapters(segment.module, *model.peft_config.values(), seed, base)
        values |= {full: adapters[own[full]] for full in drawn}
    return values
