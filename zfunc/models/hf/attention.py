"""Attention that depends on shapes alone: what decoder layers call instead of the implementation in their config.

It is causal, within the layer's window. No mask is passed between segments, and nothing branches on data.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zfunc.models.document_mask import document_mask
from zfunc.models.kv_cache import KVCache
from zfunc.runtime.accelerator import fuses_grouped_queries

NAME = "zfunc"  # registered with transformers
_FUSED_GQA = 256  # features of a head, at most, for flash attention


class AttentionSettings:
    """A config for decoder layers, with this attention; the model's own config is not changed.

    A deep copy is the same object, so that layers with a common config compare equal.
    """

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        if name == "config":  # not set yet
            raise AttributeError(name)
        return getattr(self.config, name)

    def __deepcopy__(self, memo: Any) -> "AttentionSettings":
        return self


def register() -> None:
    """Register `attend` with transformers as NAME. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    _module: torch.nn.Module,
    query: Tensor,  # [batch, heads, seq, head_size]
    key: Tensor,  # [batch, key_value_heads, seq, head_size]
    value: Tensor,
    _mask: None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cache: KVCache | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention, with the signature of transformers' interface: `([batch, seq, heads, head_size], None)`.

    A position attends to itself and those before it, `sliding_window` in all. `softcap` bounds the scores by tanh,
    as in Gemma 2; no fused kernel does that, so they are materialised. With a `cache` that has tokens, `query` has
    one position, after those. With `position_ids` [batch, seq], which start at 0 in each document of a sequence,
    documents do not attend to each other.
    """
    if cache is not None:
        key, value = cache.extended(key, value)
    rows, columns = query.shape[-2], key.shape[-2]
    window = None if sliding_window is None or sliding_window >= columns else sliding_window
    groups = query.shape[1] // key.shape[1]
    mask = None
    if window is not None or softcap is not None or position_ids is not None:
        mask = _causal_mask(rows, columns, window, query.device)
    if position_ids is not None:
        mask = mask & document_mask(position_ids)
    grouped = groups > 1 and mask is None and _takes_groups(key)
    if groups > 1 and not grouped:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    if softcap is not None:
        y = _softcapped(query, key, value, mask, dropout, scaling, softcap)
    else:
        y = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and rows == columns,
            scale=scaling,
            enable_gqa=grouped,
        )
    return y.transpose(1, 2).contiguous(), None


def _takes_groups(key: Tensor) -> bool:
    """Whether a fused kernel supports fewer key heads than query heads."""
    return key.shape[-1] <= _FUSED_GQA and fuses_grouped_queries(key.device, key.dtype)


def _causal_mask(rows: int, columns: int, window: int | None, device: torch.device) -> Tensor:
    """[rows, columns] bool: the positions (columns) that each of the last `rows` positions attends to."""
    at = torch.arange(columns, device=device)
    distance = at[columns - rows :, None] - at
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value
