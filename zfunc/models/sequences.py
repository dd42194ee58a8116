"""What attention has to know of a sequence: the documents in it, and the keys and values of past tokens.

Tokens of several documents come with `position_ids`, which start at 0 in each, as transformers packs sequences.
"""

from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor


@define(eq=False)
class KVCache:
    """Keys, values and states of one segment's past tokens. The first call may have many tokens, later ones one."""

    length: int = 0  # tokens so far
    keys: Tensor | None = None  # [batch, heads, length, head_size]; None in segments without attention
    values: Tensor | None = None
    states: dict[Any, Tensor] = field(factory=dict[Any, Tensor])  # of convolutions and linear attention

    def advanced(self, tokens: int) -> int:
        """Count `tokens` new tokens in the cache. Returns the position of the first of them."""
        if self.length and tokens != 1:
            raise ValueError(
                f"got {tokens} tokens after the first {self.length}, expected one: give one at a time"
            )
        self.length += tokens
        return self.length - tokens

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens [batch, heads, tokens, head_size]. Returns the whole cache."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values
        return keys, values


@frozen(eq=False)
class Seen:
    """Which tokens a token attends to: itself and earlier ones, at most `window` in all (None: any number),
    from its document's `first` [batch, seq] on (None: the row's). Attention of whole rows computes it without
    a mask."""

    first: Tensor | None = None
    window: int | None = None

    def mask(self, query: Tensor) -> Tensor:
        """The mask of queries [batch, heads, seq, head_size], true where attended: bool [batch or 1, 1, seq, seq].

        >>> documents_of(torch.tensor([[0, 1, 0]])).mask(torch.ones(1, 1, 3, 4))[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        at = torch.arange(query.shape[2], device=query.device)
        seen = (at[:, None] >= at)[None]  # a row attends to columns
        if self.window is not None:
            seen = seen & (at[:, None] - self.window < at)
        if self.first is not None:
            seen = seen & (at >= self.first[..., None])
        return seen[:, None]


def documents_of(position_ids: Tensor) -> Seen:
    """Attention within documents, of which each begins where `position_ids` [batch, seq] are 0 in a row."""
    return Seen(torch.arange(position_ids.shape[-1], device=position_ids.device) - position_ids)
