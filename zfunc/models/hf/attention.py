"""Attention that depends on shapes alone: what the decoder layers call here instead of what their config names.

The invariant: causal, and over no more than the layer's window; no mask is passed from segment to segment, nothing
branches on data. A layer's config is a `AttentionSettings`, so the model it came from stays as it was.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zfunc.models.kv_cache import KVCache
from zfunc.runtime.accelerator import fuses_grouped_queries

NAME = "zfunc"  # by which transformers knows it
_FUSED_GQA = 256  # features of a head, at most, for flash attention


class AttentionSettings:
    """A config as the decoder layers see it: the same, but for the attention. Copies of it are it.

    Equality is identity, so modules with one config in common can be told to be alike.
    """

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        if name == "config":  # not there yet
            raise AttributeError(name)
        return getattr(self.config, name)

    def __deepcopy__(self, memo: Any) -> "AttentionSettings":
        return self


def register() -> None:
    """Make `attend` known to transformers under NAME; nothing happens the second time."""
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
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention, with the signature of transformers' interface: `([batch, seq, heads, head_size], None)`.

    A position sees itself and those before it, `sliding_window` in all. `softcap` bounds the scores by tanh, as
    Gemma 2 does; no fused kernel does that, so the scores are in memory then. With a `cache` that has tokens, there
    is one position, after those.
    """
    if cache is not None:
        key, value = cache.extended(key, value)
    rows, columns = query.shape[-2], key.shape[-2]
    window = None if sliding_window is None or sliding_window >= columns else sliding_window
    groups = query.shape[1] // key.shape[1]
    grouped = groups > 1 and window is None and softcap is None and _takes_groups(key)
    if groups > 1 and not grouped:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    if softcap is not None:
        y = _softcapped(
            query, key, value, _seen(rows, columns, window, query.device), dropout, scaling, softcap
        )
    else:
        y = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if window is None else _seen(rows, columns, window, query.device),
            dropout_p=dropout,
            is_causal=window is None and rows == columns,
            scale=scaling,
            enable_gqa=grouped,
        )
    return y.transpose(1, 2).contiguous(), None


def _takes_groups(key: Tensor) -> bool:
    """Whether a kernel that keeps no scores takes fewer heads of keys than of queries."""
    return key.shape[-1] <= _FUSED_GQA and fuses_grouped_queries(key.device, key.dtype)


def _seen(rows: int, columns: int, window: int | None, device: torch.device) -> Tensor:
    """[rows, columns] bool: which positions (columns) each of the last ones (rows) sees."""
    at = torch.arange(columns, device=device)
    back = at[columns - rows :, None] - at
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(shares, dropout) @ value
