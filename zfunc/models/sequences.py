"""What attention has to know of a sequence: the documents in it, and the keys and values of past tokens.

Tokens of several documents come with `position_ids`, which start at 0 in each, as transformers packs sequences.
"""

import torch
from attrs import define
from torch import Tensor


@define(eq=False)
class KVCache:
    """The keys and values of one segment. Its first call has any number of tokens, each later one has one."""

    length: int = 0  # tokens so far
    keys: Tensor | None = None  # [batch, heads, length, head_size]; None in segments without attention
    values: Tensor | None = None

    def advanced(self, tokens: int) -> int:
        """Count `tokens` more. Returns the position of the first."""
        if self.length and tokens != 1:
            raise ValueError(
                f"got {tokens} tokens after the first {self.length}, expected one: give one at a time"
            )
        self.length += tokens
        return self.length - tokens

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of new tokens, [batch, heads, tokens, head_size]. Returns all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values
        return keys, values


def document_mask(position_ids: Tensor) -> Tensor:
    """Who attends to whom, bool [batch, 1, seq, seq], of `position_ids` [batch, seq].

    A token (a row) attends to those (columns) of its own document, up to itself.

    >>> document_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    at = torch.arange(position_ids.shape[-1], device=position_ids.device)
    starts = at - position_ids  # where a token's document begins
    own = starts[:, :, None] == starts[:, None, :]
    return made_of((own & (at[:, None] >= at))[:, None], starts)


def made_of(mask: Tensor, first: Tensor | None, window: int | None = None) -> Tensor:
    """A causal `mask`, with what it is made of: the `first` tokens [batch, seq] of documents, a `window` of tokens.

    A segment in tiles reads this, and the mask is never made.
    """
    mask.made_of = first, window  # type: ignore[attr-defined]
    return mask
