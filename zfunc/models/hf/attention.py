"""Attention that depends on shapes alone: what layers call instead of the implementation in their config.

Masks are the model's own, made only where one is needed, and nothing branches on data.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from zfunc.engine.rows.row_attention import attend_row
from zfunc.engine.rows.tile_attention import ROW_TOKENS
from zfunc.errors import refuse, setting
from zfunc.models.hf.experts import run_experts
from zfunc.models.hf.families import BY_TRACE
from zfunc.models.sequences import KVCache, Seen, documents_of
from zfunc.runtime.accelerator import fuses_grouped_queries

NAME = "zfunc"  # registered with transformers
_FUSED_GQA = 256  # features of a head, at most, for flash attention


class AttentionSettings:
    """A model's config as layers read it, with zfunc's attention and experts; the config itself is not changed.

    A deep copy is the same object, so that layers with a common config compare equal.
    """

    _experts_implementation = NAME
    use_cache = output_router_logits = output_hidden_states = output_attentions = False
    return_dict = True

    def __init__(self, config: Any, implementation: str = NAME) -> None:
        self.config, self._attn_implementation = config, implementation

    def __getattr__(self, name: str) -> Any:
        if name == "config":  # not set yet
            raise AttributeError(name)
        return getattr(self.config, name)

    def __deepcopy__(self, memo: Any) -> "AttentionSettings":
        return self


def register() -> None:
    """Register zfunc's attention, masks and experts with transformers as "zfunc"; calling it again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    ExpertsInterface.register(NAME, run_experts)


def with_static_experts(model: Any) -> Any:
    """A copy of `model` with experts whose shapes depend on no data; `model` itself if it has no experts."""
    if not any(getattr(m, "num_experts", 0) and hasattr(m, "config") for m in model.modules()):
        return model
    register()
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo)
    for m in copied.modules():
        if vars(m).get("config") is not None:
            m.config._experts_implementation = NAME
    return copied


def implementation_for(model: Any) -> str:
    """The attention for `model`: "zfunc", or where zfunc's cannot replace the model's own, "eager" or "sdpa"."""
    if model._supports_attention_backend:
        return NAME
    own = model.config._attn_implementation
    return own if own in ("eager", "sdpa") else "eager"


GIVEN: ContextVar[Mapping[str, Tensor]] = ContextVar("inputs of the model", default=MappingProxyType({}))


RECORDING: ContextVar[bool] = ContextVar(
    "every mask is a tensor, by which layers are told apart", default=False
)


@contextmanager
def inputs_given(given: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which causal masks separate documents by `position_ids` [batch, seq], if these are given."""
    before = GIVEN.set(given)
    try:
        yield
    finally:
        GIVEN.reset(before)


def _lacks(_: Any, name: str) -> Any:
    raise AttributeError(f"it asks its cache for {name}, which zfunc's does not have")


class _ByNumber(dict[int, Any]):
    """Looks up what a function returns for a number."""

    def __init__(self, of: Callable[[int], Any]) -> None:
        self.of = of

    def __missing__(self, number: int) -> Any:
        return self.of(number)


@frozen(eq=False)
class _LayerStates:
    """The states of one layer, each kind by number, for models that read them from a layer of the cache."""

    conv_states: _ByNumber
    recurrent_states: _ByNumber
    record_past = True  # as `PastTokens.is_recording_past`
    __getattr__ = _lacks


@frozen(eq=False)
class PastTokens:
    """The methods of transformers' caches that layers call. Without a `KVCache` (None), as in training,
    nothing is kept.

    A model that gets this cache does not read position ids to find documents in a row: see `inputs_given`.
    """

    cache: KVCache | None = None
    first: int = 0  # position of the first new token

    def get_seq_length(self, *_: Any) -> int:
        """The number of past tokens in the cache."""
        return self.first

    get_query_offset = get_seq_length

    def get_mask_sizes(self, tokens: int, *_: Any) -> tuple[int, int]:
        """The number of keys (past and new tokens) of a mask, and the position of the first key."""
        return self.first + tokens, 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens [batch, heads, tokens, head_size]; returns the whole cache."""
        return (keys, values) if self.cache is None else self.cache.extended(keys, values)

    def is_recording_past(self, _: int) -> bool:
        """Always true: a convolution then takes past inputs from `update_conv_state` and edits nothing in place."""
        return True

    def _state(self, *key: Any) -> Tensor | None:
        if ROW_TOKENS.get() is not None or "position_ids" in GIVEN.get():
            got = "a convolution or linear attention, whose state is of a whole row"
            do = f"use {setting('tiles', 1)}, and the packing 'stream' or a document a row"
            refuse((), got, "uncut rows of one document", do)
        return None if self.cache is None else self.cache.states.get(key)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Inputs of convolution `state_idx` of a layer, [batch, features, tokens], before the new tokens."""
        return self._state("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """State number `state_idx` of a layer's linear attention before the new tokens; None without any."""
        return self._state("recurrent", layer_idx, state_idx)

    def update_conv_state(
        self, x: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Append inputs `x` of a convolution; the cache keeps the last `conv_kernel_size`. Returns all inputs."""
        if self.cache is None:
            return x
        before = self.get_conv_state(layer_idx, state_idx)
        x = x if before is None else torch.cat([before, x], dim=-1)
        self.cache.states["conv", layer_idx, state_idx] = x[..., -(conv_kernel_size or x.shape[-1]) :]
        return x

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Keep and return a layer's linear attention state after the new tokens."""
        if self.cache is not None:
            self.cache.states["recurrent", layer_idx, state_idx] = state
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there are inputs of a convolution from past tokens, of any layer for None: transformers 5.17 asks
        before it reads states from `layers`."""
        self._state()  # refused in tiles
        states = () if self.cache is None else self.cache.states
        asked = "conv", layer_idx, state_idx
        return any(all(x in (None, y) for x, y in zip(asked, key, strict=True)) for key in states)

    @property
    def layers(self) -> _ByNumber:
        """The recurrent states of a model's layers, as this cache has them, by the number of the layer."""
        reads = self.get_conv_state, self.get_recurrent_state
        return _ByNumber(lambda layer: _LayerStates(*(_ByNumber(partial(read, layer)) for read in reads)))

    __getattr__ = _lacks


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Tensor | Seen | None:
    """The mask, true where attended: bool [batch or 1, 1, q_length, kv_length]; or a Seen, which `attend` takes.

    The signature is that of transformers' interface. None where all positions up to the query's are attended to;
    but never None while a model is run to record its layers.
    """
    tokens, recording = ROW_TOKENS.get() or q_offset + q_length, RECORDING.get()
    local = local_size is not None and local_size < tokens
    positions = GIVEN.get().get("position_ids")
    plain = not local and positions is None and allow_is_causal_skip
    if plain and attention_mask is None and not recording:
        return None
    assert mask_function is not None
    rows = torch.arange(q_length, device=device) + q_offset
    columns = torch.arange(kv_length, device=device) + kv_offset
    differs = attention_mask is not None or not allow_is_causal_skip  # from row to row
    batch = torch.arange(batch_size if differs else 1, device=device)
    seen = None if positions is None else documents_of(positions)
    if differs or q_offset or kv_offset or recording:
        mask = mask_function(batch[:, None, None, None], 0, rows[None, None, :, None], columns)
        mask = mask.expand(len(batch), 1, q_length, kv_length)
        mask = mask if seen is None else mask & seen.mask(rows[None, None, :, None])
        return mask if attention_mask is None else mask & attention_mask[:, None, None].bool()
    first = None if seen is None else seen.first
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        behind = (rows if positions is None else positions) % local_size  # in a document's chunk
        first, local_size = (rows - behind).expand(batch_size, q_length), None
    return Seen(first, local_size)


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [batch, heads, seq, head_size]
    key: Tensor,  # [batch, key_value_heads, seq, head_size]
    value: Tensor,
    attention_mask: Tensor | Seen | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention, with the signature of transformers' interface: `([batch, seq, heads, head_size], None)`.

    Without a mask a position attends to itself and those before it. Raises ValueError where `is_causal`, or if that
    is None the module's, says otherwise.
    `softcap` bounds the scores by tanh, as in Gemma 2, and `s_aux` [heads] are the scores of a position without a
    value, as in GPT-OSS; no fused kernel does either, so scores are materialised.
    """
    by_hand, mask = softcap is not None or s_aux is not None, attention_mask
    if isinstance(mask, Seen):
        if not by_hand and not dropout:
            y = attend_row(query, key, value, mask.first, mask.window, scaling)
            return y.transpose(1, 2).contiguous(), None
        mask = mask.mask(query)
    causal = mask is None and (ROW_TOKENS.get() or query.shape[-2]) > 1
    if causal and not (own := getattr(module, "is_causal", True) if is_causal is None else is_causal):
        # transformers' sdpa attends to all positions then, its eager to those before where the model makes masks
        got, do = f"a {type(module).__name__} with is_causal {own!r}, and no mask", "set it to True, or "
        refuse("model", got, "attention to positions up to a token's own", do + BY_TRACE)
    groups = query.shape[1] // key.shape[1]
    fused = key.shape[-1] <= _FUSED_GQA and fuses_grouped_queries(key.device, key.dtype)
    grouped = groups > 1 and not by_hand and ((mask is None and fused) or ROW_TOKENS.get() is not None)
    if groups > 1 and not grouped:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    if not by_hand:
        given = {"dropout_p": dropout, "is_causal": causal, "scale": scaling, "enable_gqa": grouped}
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **given)
        return y.transpose(1, 2).contiguous(), None
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        own = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat([scores, own], -1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    y = F.dropout(weights if s_aux is None else weights[..., :-1], dropout) @ value
    return y.transpose(1, 2).contiguous(), None
