"""Keys and values of past tokens, so that a new token costs one token and not the whole sequence."""

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
