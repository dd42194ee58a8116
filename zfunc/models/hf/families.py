"""Which models can be cut: those of the table, and any other whose segments compute the same as it does.

Settings of a config that segments would not honour are refused by name.
"""

import importlib
import re
from typing import Any

from zfunc.errors import install, refuse

OLDEST = (5, 12)  # transformers; 5.0 computes some of these models differently
MISSING = f"zfunc.hf: got no transformers, expected version 5.12 or newer: {install('hf')}"
BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies follow the length: `rotary.py` makes them."""
ROPE = ("default", "linear", "llama3", "yarn", "proportional", *BY_LENGTH)

FAMILIES = (
    *("GPT2LMHeadModel", "GPTNeoXForCausalLM"),
    *("LlamaForCausalLM", "Llama4ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Olmo2ForCausalLM", "GptOssForCausalLM"),
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
)
"""Models whose segments are tested with zfunc."""

BY_TRACE = "try zfunc.segments(model, batch), which cuts a module by its trace"


def check_transformers() -> None:
    """Raise ImportError unless a supported version of transformers is installed."""
    check_package("transformers", OLDEST, MISSING)


def check_package(name: str, oldest: tuple[int, int], missing: str) -> None:
    """Raise ImportError with text `missing` unless package `name` is installed, as `oldest` or later."""
    try:
        version: str = importlib.import_module(name).__version__
    except ImportError as error:
        raise ImportError(missing) from error
    if tuple(int(x) for x in version.split(".")[:2]) < oldest:
        raise ImportError(missing.replace(f"no {name}", f"{name} {version}"))


def is_tested(model: Any) -> bool:
    """Whether the class of a model is in FAMILIES, the models that zfunc's tests cut and compare."""
    return type(model).__name__ in FAMILIES and type(model).__module__.startswith("transformers.")


def check_supported(model: Any) -> None:
    """Raise ValueError for a `model` that `zfunc.hf.segments` never cuts, such as one that is no causal language
    model of transformers."""
    from transformers import PreTrainedModel

    name, config = type(model).__name__, getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: got a {name}, expected a model of transformers: {BY_TRACE}")
    if not _is_causal(model):
        raise why_unsupported(name, kind_of(config))
    if not is_tested(model) and getattr(config, "is_decoder", True) is False:
        raise why_unsupported(name, "which is not supported as an encoder: its is_decoder is off")
    for parameter, p in model.named_parameters():
        if not p.is_floating_point():
            raise ValueError(
                f"model: got {parameter!r} of {p.dtype}, expected floating point: load it without quantization"
            )
    if getattr(model, "hf_quantizer", None) is not None or kind_of_quantization(config):
        got = f"a {name} with quantized weights ({kind_of_quantization(config)})"
        from_folder = "from its folder with zfunc.hf.load(folder, quantize='nf4', lora=...)"
        refuse("model", got, do=f"load it without quantization_config, or {from_folder}")
    for field, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        if bool(value := getattr(config, field, causal)) != causal:
            raise ValueError(
                f"model: got a {name} with {field} {value!r}: set it to {causal}: attention is causal"
            )
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(x for x in ropes.values() if isinstance(x, dict))]:
        if (kind := rope.get("rope_type", "default")) not in ROPE:
            raise ValueError(
                f"model: got a {name} with rotary positions of type {kind!r}: use one of {', '.join(ROPE)}"
            )


def in_fp32(model: Any, name: str) -> tuple[str, ...]:
    """The precisions (bf16, fp16) in which the model's class keeps parameter `name` in fp32 at loading."""
    strict, fp16 = model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules
    kept = {"bf16": strict or (), "fp16": {*(strict or ()), *(fp16 or ())}}
    return tuple(p for p, globs in kept.items() if any(re.search(x.replace("*", ".*"), name) for x in globs))


def _is_causal(model: Any) -> bool:
    """Whether transformers has a causal language model of the class of `model`, found by config type without
    importing all model classes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    classes = MODEL_FOR_CAUSAL_LM_MAPPING
    return any(kind in classes and isinstance(model, classes[kind]) for kind in type(model.config).__mro__)


def kind_of(config: Any) -> str:
    """The kind of a model that is no causal language model, in words, by its config."""
    if getattr(config, "is_encoder_decoder", False):
        return "which is an encoder-decoder, with two inputs"
    if hasattr(config, "vision_config") or hasattr(config, "image_size"):
        return "which is a model of images"
    return "which has no next-token loss of its own"


def why_unsupported(name: str, reason: str) -> ValueError:
    """The ValueError for a model class `name` that cannot be cut into segments, for `reason`."""
    return ValueError(
        f"model: got a {name}, {reason}, expected a causal language model such as {FAMILIES[2]}: {BY_TRACE}"
    )


def kind_of_quantization(config: Any) -> str:
    """The quantization of a config's weights, such as "bitsandbytes, load_in_4bit"; "" for none."""
    given = getattr(config, "quantization_config", None) or {}
    given = given if isinstance(given, dict) else given.to_dict()
    kinds = [str(given.get("quant_method", "")), *(x for x in given if x.startswith("load_in_") and given[x])]
    return ", ".join(filter(None, kinds)) or "of an unknown kind" * bool(given)
