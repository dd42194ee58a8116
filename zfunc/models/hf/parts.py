"""The three kinds of segments of a causal language model, as wrappers of the model's modules.

Hidden states, [batch, seq, hidden], pass from one to the next; positions and masks follow from their shape, or from
the positions [batch, seq] that pass with them where a sequence has several documents.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zfunc.models.kv_cache import KVCache
from zfunc.models.loss import linear_next_token_loss, next_token_loss

Passed = Tensor | tuple[Tensor, Tensor]


class EmbedSegment(nn.Module):
    """Token embeddings, with learned positions and dropout where the model has them: int64 [batch, seq] in."""

    def __init__(self, tokens: nn.Module, positions: nn.Embedding | None, dropout: nn.Module | None) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, input_ids: Tensor | dict[str, Tensor], cache: KVCache | None = None) -> Passed:
        """Embed tokens that follow those in `cache`, or `input_ids` and `position_ids` by name.

        Raises ValueError beyond the learned positions.
        """
        position_ids = None
        if isinstance(input_ids, dict):
            input_ids, position_ids = input_ids["input_ids"], input_ids["position_ids"]
        x = self.tokens(input_ids)
        first = 0 if cache is None else cache.advanced(input_ids.shape[-1])
        if self.positions is not None:
            seq, longest = first + input_ids.shape[-1], self.positions.num_embeddings
            if seq > longest:
                raise ValueError(
                    f"got {seq} tokens, expected at most the {longest} learned positions: shorten the sequence"
                )
            at = torch.arange(first, seq, device=input_ids.device) if position_ids is None else position_ids
            x = x + self.positions(at)
        x = x if self.dropout is None else self.dropout(x)
        return x if position_ids is None else (x, position_ids)


class LayerSegment(nn.Module):
    """A decoder layer, with its rotary positions."""

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, kind: str | None) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary
        self.kind = kind  # of attention, if positions depend on it

    def forward(self, passed: Passed, cache: KVCache | None = None) -> Passed:
        """Mix along the sequence, then along the features; `cache` has the tokens before those of `passed`."""
        x, position_ids = parts_of(passed)
        if position_ids is not None:
            return self._mixed(x, position_ids, {"position_ids": position_ids}), position_ids
        first = 0 if cache is None else cache.advanced(x.shape[1])
        kwargs: dict[str, Any] = {} if cache is None else {"cache": cache}  # passed on to `attention.attend`
        return self._mixed(x, torch.arange(first, first + x.shape[1], device=x.device)[None], kwargs)

    def _mixed(self, x: Tensor, at: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if self.rotary is None:
            return self.layer(x, **kwargs)
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

    def forward(self, passed: Passed, targets: Any = None) -> Tensor:
        """The mean loss in nats, an fp32 scalar; the logits without targets."""
        x, _ = parts_of(passed)
        if targets is None:
            return self.logits(x)
        if type(self.lm_head) is nn.Linear and self.lm_head.bias is None:
            return linear_next_token_loss(self.norm(x), self.lm_head.weight, targets, softcap=self.softcap)
        return next_token_loss(self.logits(x).float(), targets)


def parts_of(passed: Passed) -> tuple[Tensor, Tensor | None]:
    """Hidden states, and the positions with them."""
    return passed if isinstance(passed, tuple) else (passed, None)
