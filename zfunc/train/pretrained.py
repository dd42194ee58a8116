"""The Hugging Face model of a training or a plan: its config in a local folder, its weights, and its tokenizer.

A setting that does not go with the model (vocabulary, length, tokenizer) is refused before the data is read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from zfunc.engine.trace.segment import Segment
from zfunc.errors import about, refuse
from zfunc.models import hf
from zfunc.models.config_file import check_flags
from zfunc.train.data.documents import holds_tokens
from zfunc.train.data.tokenizer import Tokenizer, open_tokenizer
from zfunc.train.settings import TrainSettings

TOKENIZER = "tokenizer.json"
OF_LORA = {
    **dict.fromkeys(("lora", "lora.target_modules"), "lora_targets"),
    "lora.target_parameters": "lora_target_parameters",
    "lora.use_dora": "use_dora",
}
"""Settings of a training by what errors of `zfunc.hf.load` name."""


@frozen(eq=False)
class PretrainedModel:
    """A Hugging Face model: its `folder` (or that of its config alone), config and segments. `zfunc.init`
    reads the weights from the folder."""

    folder: Path
    config: Any
    segments: tuple[Segment, ...]

    @property
    def architecture(self) -> str:
        """The name of the model's class, or its model type where the config does not name the class."""
        return next(iter(self.config.architectures or ()), self.config.model_type)

    @property
    def text_config(self) -> Any:
        """The config of the model's language part; a model that reads images has a vision config beside it."""
        return self.config.get_text_config()

    @property
    def sizes(self) -> dict[str, int]:
        """The model's numbers of layers, of features and of attention heads, by their names in `TrainSettings`."""
        config = self.text_config
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        return {"num_layers": layers, "hidden_size": config.hidden_size, "num_attention_heads": heads}

    @property
    def vocab_size(self) -> int:
        """The number of rows of the model's token embedding."""
        return int(self.text_config.vocab_size)

    @property
    def longest(self) -> int | None:
        """The most tokens in a sequence that the model has positions for; None if unlimited."""
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "dynamic":
            return None
        return getattr(self.text_config, "max_position_embeddings", None)


def names_in(flag: str | None) -> list[str]:
    """The names in the value of a flag, which commas separate."""
    return [] if flag is None else flag.split(",")


def pretrained_model(flags: Any, *, weights: bool = True) -> PretrainedModel | None:
    """The model in the folder of flag `hf`, or None without the flag. If `weights` is False, the model
    without weights, whose config alone `hf_config` may name.

    Raises ValueError for flags that contradict the model, and for a folder that `zfunc.hf.load` refuses.
    """
    name = "hf" if flags.hf is not None else "hf_config"
    place: Path | None = getattr(flags, name, None)
    if place is None:
        return None
    try:
        lora = adapters(attrs.asdict(flags))
        read = hf.load if weights else hf.describe
        packed = {"quantize": flags.quantize, "quantize_parameters": names_in(flags.quantize_parameters)}
        config, segments = read(place, lora=lora, text_only=flags.text_only, **packed)
    except (ValueError, OSError) as error:
        names = getattr(error, "names", ())
        if own := next((OF_LORA[x] for x in names if x in OF_LORA), None):
            refuse(own, *error.args[1:], cause=error)
        if names in (("text_only",), ("quantize",), ("quantize_parameters",)):
            raise
        raise ValueError(about(name, error)) from error
    model = PretrainedModel(place, config, segments)
    check_flags(flags, place, model.longest, model.vocab_size)
    return model


def adapters(settings: Mapping[str, Any]) -> Any:
    """The `peft.LoraConfig` that a training's settings ask for; None if they ask for no LoRA."""
    if (rank := settings.get("lora")) is None:
        return None
    given = {"alpha": settings["lora_alpha"], "targets": settings["lora_targets"], "base": settings["hf"]}
    given |= {"parameters": settings.get("lora_target_parameters")}  # newer than runs, as the next
    return hf.lora_config(rank, use_dora=settings.get("use_dora", False), **given)


def choose_tokenizer(settings: TrainSettings, model: PretrainedModel | None) -> Tokenizer | None:
    """The tokenizer that the settings name, or the model's own; None for data that needs none.

    Raises ValueError for text without a tokenizer, and for a tokenizer with more tokens than the model.
    """
    path, end = settings.tokenizer, None
    if model is not None:
        ends = (getattr(x, "eos_token_id", None) for x in (model.config, model.text_config))
        end = next((x for x in ends if x is not None), None)
        end = next(iter(end), None) if isinstance(end, list) else end  # of several, the first
        if path is None and not (settings.data is not None and holds_tokens(settings.data)):
            path = model.folder / TOKENIZER
            if not path.is_file():
                got = f"none, and no {TOKENIZER} in {model.folder}"
                refuse("tokenizer", got, "one for text", "name one, or pass a .bin of its tokens")
    if path is None:
        return None
    opened = open_tokenizer(path, end=end, template_args=json.loads(settings.chat_template_args or "{}"))
    if model is not None and opened.vocab_size > model.vocab_size:
        got = f"{path} with {opened.vocab_size:,} tokens"
        expected = f"at most the {model.vocab_size:,} of {model.folder}"
        refuse("tokenizer", got, expected, "name the one the model was trained with")
    return opened
