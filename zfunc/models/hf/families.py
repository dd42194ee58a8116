"""Which models can be cut, and where their parts are.

A model that passes `family_of` computes the same in segments. Settings of its config that segments would not honour
are refused by name.
"""

from collections.abc import Iterator
from typing import Any

from attrs import frozen

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions whose frequencies depend on the config alone."""


@frozen
class Family:
    """Attribute names: `base` is the model below the head, the others are parts of it."""

    base: str = "model"
    tokens: str = "embed_tokens"
    positions: str | None = None
    dropout: str | None = None
    layers: str = "layers"
    norm: str = "norm"
    rotary: str | None = "rotary_emb"


_ROTARY = Family()
FAMILIES = {
    "GPT2LMHeadModel": Family("transformer", "wte", "wpe", "drop", "h", "ln_f", rotary=None),
    "LlamaForCausalLM": _ROTARY,
    "MistralForCausalLM": _ROTARY,
    "Qwen2ForCausalLM": _ROTARY,
    "Qwen3ForCausalLM": _ROTARY,
    "GemmaForCausalLM": _ROTARY,
    "Gemma2ForCausalLM": _ROTARY,
    "Gemma3ForCausalLM": _ROTARY,
}


def family_of(model: Any) -> Family:
    """The family of a model. Raises ValueError for an unsupported class or setting.

    >>> family_of(object())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: model: got a object, which is not supported, expected one of GPT2LMHeadModel, ...
    """
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers."):
        raise why_unsupported(name)
    for setting, action in _unsupported_settings(model):
        raise ValueError(f"model: got a {name} with {setting}: {action}")
    return FAMILIES[name]


def why_unsupported(name: str) -> ValueError:
    """The error for a class without a family."""
    return ValueError(
        f"model: got a {name}, which is not supported, expected one of {', '.join(FAMILIES)}, of transformers "
        "itself: cut another into modules that run one after the other, each as zfunc.segment(name, module), the "
        "last one returning the mean loss; or add its class to zfunc/models/hf/families.py if it has Llama's parts"
    )


def _unsupported_settings(model: Any) -> Iterator[tuple[str, str]]:
    """Settings of the model that segments would not honour, and what to do."""
    config = model.config
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(x for x in ropes.values() if isinstance(x, dict))]:
        kind = rope.get("rope_type", "default")
        if kind not in STATIC_ROPE:
            action = f"use one of {', '.join(STATIC_ROPE)}, whose frequencies do not depend on the length"
            yield f"rotary positions of type {kind!r}", action
    if getattr(config, "use_bidirectional_attention", False):
        yield "use_bidirectional_attention", "turn it off: attention is causal"
    if getattr(config, "add_cross_attention", False):
        yield "add_cross_attention", "turn it off: there is no encoder"
    if getattr(model, "hf_quantizer", None) is not None or getattr(config, "quantization_config", None):
        yield (
            f"quantized weights{_kind_of_quantization(config)}",
            "load it without quantization_config. The frozen weights of LoRA are in 16 bits instead, on the host "
            "with params_on='host'",
        )


def _kind_of_quantization(config: Any) -> str:
    """Such as " (bitsandbytes, load_in_4bit)"."""
    given = getattr(config, "quantization_config", None) or {}
    given = given if isinstance(given, dict) else given.to_dict()
    kinds = [str(given.get("quant_method", "")), *(x for x in given if x.startswith("load_in_") and given[x])]
    return f" ({', '.join(filter(None, kinds))})" if any(kinds) else ""
