"""The three kinds of segments of a causal language model, as wrappers of the model's modules.

Only hidden states, [batch, seq, hidden], pass from one to the next; positions and masks follow from their shape.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zfunc.models.kv_cache import KVCache
from zfunc.models.loss import linear_next_token_loss, next_token_loss


class EmbedSegment(nn.Module):
    """Token embeddings, with learned positions and dropout where the model has them: int64 [batch, seq] in."""

    def __init__(self, tokens: nn.Module, positions: nn.Embedding | None, dropout: nn.Module | None) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, input_ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Embed tokens that follow those in `cache`. Raises ValueError beyond the learned positions."""
        x = self.tokens(input_ids)
        first = 0 if cache is None else cache.advanced(input_ids.shape[-1])
        if self.positions is not None:
            seq, longest = first + input_ids.shape[-1], self.positions.num_embeddings
            if seq > longest:
                raise ValueError(
                    f"got {seq} tokens, expected at most the {longest} learned positions: shorten the sequence"
                )
            x = x + self.positions(torch.arange(first, seq, device=input_ids.device))
        return x if self.dropout is None else self.dropout(x)


class LayerSegment(nn.Module):
    """A decoder layer, with its rotary positions."""

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, kind: str | None) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary
        self.kind = kind  # of attention, if positions depend on it

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Mix along the sequence, then along the features; `cache` has the tokens before those of `x`."""
        first = 0 if cache is None else cache.advanced(x.shape[1])
        kwargs: dict[str, Any] = {} if cache is None else {"cache": cache}  # passed on to `attention.attend`
        if self.rotary is None:
            return self.layer(x, **kwargs)
        at = torch.arange(first, first + x.shape[1], device=x.device)[None]
        cos_sin = self.rotary(x, at) if self.kind is None else self.rotary(x, at, self.kind)
        return self.layer(x, position_embeddings=cos_sin, **kwargs)


class HeadSegment(nn.Module):
    """Final norm, projection to the vocabulary, loss: the last segment."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module, softcap: float | None) -> None:
        super().__init__()
        self.norm, self.lm_head, self.softcap = norm, lm_head, softcap

    def logits(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, vocab], in the compute precision."""
        y = self.lm_head(self.norm(x))
        return y if self.softcap is None else torch.tanh(y / self.softcap) * self.softcap

    def forward(self, x: Tensor, targets: Any = None) -> Tensor:
        """The mean loss in nats, an fp32 scalar; the logits without targets."""
        if targets is None:
            return self.logits(x)
        if type(self.lm_head) is nn.Linear and self.lm_head.bias is None:
            return linear_next_token_loss(self.norm(x), self.lm_head.weight, targets, softcap=self.softcap)
        return next_token_loss(self.logits(x).float(), targets)
