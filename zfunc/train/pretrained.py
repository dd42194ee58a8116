"""`zfunc train --hf`: the model in a local folder, and what data has to be to train it.

The invariant: what does not go with the model, its vocabulary, length or tokenizer, is refused by the flag that
said it, before the data is read.
"""

from pathlib import Path
from typing import Any

from attrs import frozen

from zfunc.engine.segment import Segment
from zfunc.models import hf
from zfunc.train.data.packing import holds_tokens
from zfunc.train.data.tokenizer import Tokenizer, open_tokenizer
from zfunc.train.settings import TrainSettings

TOKENIZER = "tokenizer.json"


@frozen(eq=False)
class PretrainedModel:
    """A model of a folder: its weights are read when a State is made."""

    folder: Path
    config: Any
    segments: tuple[Segment, ...]

    @property
    def architecture(self) -> str:
        """The name of its class, or of its kind where the config does not say it."""
        return next(iter(self.config.architectures or ()), self.config.model_type)

    @property
    def sizes(self) -> dict[str, int]:
        """Its layers, features and heads, by the names `TrainSettings` has for them."""
        layers, heads = self.config.num_hidden_layers, self.config.num_attention_heads
        return {"num_layers": layers, "hidden_size": self.config.hidden_size, "num_attention_heads": heads}

    @property
    def vocab_size(self) -> int:
        """Tokens it has embeddings of."""
        return int(self.config.vocab_size)


def pretrained(settings: TrainSettings) -> PretrainedModel | None:
    """The model of `settings.hf`. Raises ValueError for other settings than it can be trained with, and what
    `zfunc.hf.load` raises.
    """
    if settings.hf is None:
        return None
    try:
        config, segments = hf.load(settings.hf)
    except (ValueError, OSError) as error:
        raise ValueError(f"--hf: {error}") from error
    found = PretrainedModel(settings.hf, config, segments)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and settings.seq_length > longest:
        raise ValueError(
            f"--seq-length: got {settings.seq_length} for {settings.hf}, expected at most the {longest} positions "
            f"it has: pass --seq-length {longest}"
        )
    if settings.vocab_size not in (None, found.vocab_size):
        raise ValueError(
            f"--vocab-size: got {settings.vocab_size} for {settings.hf}, expected its {found.vocab_size}: leave "
            "it out"
        )
    return found


def tokenizer(settings: TrainSettings, model: PretrainedModel | None) -> Tokenizer | None:
    """The tokenizer that was asked for, or the model's own; None for data that needs none.

    Raises ValueError where a model has none and the data is text, or it has more tokens than the model.
    """
    path, end = settings.tokenizer, None
    if model is not None:
        end = _end(model.config)
        if path is None:
            path = _own(settings, model)
    if path is None:
        return None
    made = open_tokenizer(path, end=end)
    if model is not None and made.vocab_size > model.vocab_size:
        raise ValueError(
            f"--tokenizer: got {path} with {made.vocab_size:,} tokens, expected at most the {model.vocab_size:,} "
            f"of {model.folder}: name the one the model was trained with"
        )
    return made


def _own(settings: TrainSettings, model: PretrainedModel) -> Path | None:
    if settings.data is not None and holds_tokens(settings.data):
        return None
    if not (model.folder / TOKENIZER).is_file():
        raise ValueError(
            f"--tokenizer: got none, and no {TOKENIZER} in {model.folder}, expected one, for text: name one, or "
            "give a .bin of its tokens"
        )
    return model.folder / TOKENIZER


def _end(config: Any) -> int | None:
    """The end token in a config, of several the first."""
    told = getattr(config, "eos_token_id", None)
    return told[0] if isinstance(told, list) and told else told if isinstance(told, int) else None
