"""The size of a GPT-2: no torch."""

from typing import Any

from attrs import field, frozen

from zfunc.errors import refuse, setting
from zfunc.options import probability
from zfunc.values import whole


def _count(_: Any, attribute: Any, value: Any) -> None:
    whole(attribute.name, value, least=1)


def _probability(_: Any, attribute: Any, value: Any) -> None:
    probability(attribute.name, value)


@frozen
class GPTConfig:
    """The size of a GPT-2. The default reads bytes and trains in about two minutes on two CPU cores.

    `seq_length` is the longest sequence (it sizes the learned positions); if `tied`, the output projection is the
    token embedding. Raises ValueError for a size below 1, and for heads that do not divide the hidden size.

    >>> GPTConfig(hidden_size=768, num_attention_heads=12).head_size
    64
    >>> GPTConfig(hidden_size=100, num_attention_heads=12)
    Traceback (most recent call last):
    zfunc.errors.SettingError: hidden_size: got 100 with num_attention_heads=12, ...
    """

    vocab_size: int = field(default=256, validator=_count)
    seq_length: int = field(default=128, validator=_count)
    num_layers: int = field(default=4, validator=_count)
    hidden_size: int = field(default=128, validator=_count)
    num_attention_heads: int = field(default=4, validator=_count)
    dropout: float = field(default=0.0, validator=_probability)
    tied: bool = True

    def __attrs_post_init__(self) -> None:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if hidden % heads:
            below, above = hidden // heads * heads, (hidden // heads + 1) * heads
            got = f"{hidden} with {setting('num_attention_heads', heads)}"
            do = f"try {setting('hidden_size', below or above)}{f' or {above}' if below else ''}"
            refuse("hidden_size", got, "a multiple of it", do)

    @property
    def head_size(self) -> int:
        """The number of features of one attention head."""
        return self.hidden_size // self.num_attention_heads


def num_parameters(config: GPTConfig) -> int:
    """The number of parameter elements of a GPT-2, without building it; a tied embedding counts once.

    >>> num_parameters(GPTConfig(50257, 1024, num_layers=12, hidden_size=768, num_attention_heads=12))
    124439808
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    embed = (vocab + config.seq_length) * hidden
    block = 12 * hidden * hidden + 13 * hidden
    head = 2 * hidden + (0 if config.tied else vocab * hidden)
    return embed + config.num_layers * block + head
