"""Which models can be cut, where their parts are, and what of them cannot be trained here.

The invariant: what passes `family_of` computes in segments what the model itself does. A family is a class in this
table; what else of a config would change the function is refused by name.
"""

from typing import Any

from attrs import frozen

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies depend on the config alone."""


@frozen
class Family:
    """Names of the parts: of the model below the head, and in that its embeddings, layers, norm, positions."""

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
    """The family of a model. Raises ValueError for a class or a setting there is none for.

    >>> family_of(object())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: model: got a object, which is not supported, expected one of GPT2LMHeadModel, ...
    """
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers."):
        raise why_unsupported(name)
    for flaw, mend in _flaws(model):
        raise ValueError(f"model: got a {name} with {flaw}: {mend}")
    return FAMILIES[name]


def why_unsupported(name: str) -> ValueError:
    """The error for a class of models there is no family for."""
    return ValueError(
        f"model: got a {name}, which is not supported, expected one of {', '.join(FAMILIES)}, of transformers "
        "itself: cut another into modules that run one after the other, with zfunc.segment(name, module) for each "
        "and the last one returning the mean loss, or add its class to zfunc/models/hf/families.py if its parts "
        "are those of Llama"
    )


def _flaws(model: Any) -> list[tuple[str, str]]:
    """What of this model segments would leave out, and what to do."""
    config = model.config
    flaws: list[tuple[str, str]] = []
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(x for x in ropes.values() if isinstance(x, dict))]:
        kind = rope.get("rope_type", "default")
        if kind not in STATIC_ROPE:
            mend = f"use one of {', '.join(STATIC_ROPE)}, whose frequencies do not depend on the length"
            flaws.append((f"rotary positions of type {kind!r}", mend))
    if getattr(config, "use_bidirectional_attention", False):
        flaws.append(("use_bidirectional_attention", "turn it off: a causal language model looks back only"))
    if getattr(config, "add_cross_attention", False):
        flaws.append(("add_cross_attention", "turn it off: there is nothing to attend to"))
    if getattr(model, "hf_quantizer", None) is not None or getattr(config, "quantization_config", None):
        flaws.append(("quantized weights", "load it without: its master weights are kept in fp32"))
    return flaws
