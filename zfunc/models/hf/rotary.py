"""Rotary positions whose frequencies follow the length of a row, LongRoPE and dynamic NTK, as a pure function.

transformers writes the frequencies for a length that it reads into a buffer, where with dynamic NTK those of the
longest row so far stay. Here a call has those that a new model has for its positions.
"""

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.models.hf.attention import GIVEN
from zfunc.models.hf.families import BY_LENGTH

LENGTHS = "length of the longest document"  # for each token, as a tile has no other


def follows_length(module: nn.Module) -> bool:
    """Whether a module makes rotary positions with frequencies that depend on the length of a row."""
    kinds = getattr(module, "rope_type", None)
    kinds = [*kinds.values()] if isinstance(kinds, dict) else [kinds]
    own = any(name.endswith("original_inv_freq") for name in module._buffers)
    return own and not {*kinds}.isdisjoint(BY_LENGTH)


def replace_forward(module: Any) -> None:
    """Make the forward of a rotary embedding with length-dependent frequencies pure; LongRoPE's become a buffer."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for layers in module.rope_type if isinstance(module.rope_type, dict) else (None,):
        prefix, kind, settings, named = _rope_of(module, layers)
        if kind == "longrope":
            long = settings["original_max_position_embeddings"] + 1
            freq, _ = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=long, **named)
            freq = freq.to(module._buffers[f"{prefix}inv_freq"].dtype)
            module.register_buffer(f"{prefix}long_inv_freq", freq, persistent=False)
    module.forward = MethodType(_forward, module)


def _rope_of(module: Any, layers: str | None) -> tuple[str, str, Any, dict[str, str]]:
    """For layers of type `layers` (None: all): prefix of their buffers' names, rope type, rope settings, and
    the keyword arguments of forward."""
    kind, settings = module.rope_type, module.config.rope_parameters
    if layers is None:
        return "", kind, settings, {}
    return f"{layers}_", kind[layers], settings[layers], {"layer_type": layers}


@torch.no_grad()
def _forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    prefix, kind, settings, named = _rope_of(self, layer_type)
    buffers, name, lengths = self._buffers, f"{prefix}inv_freq", GIVEN.get().get(LENGTHS)
    length = position_ids.amax() + 1 if lengths is None else lengths[0, 0]
    before, short = buffers[name], buffers[f"{prefix}original_inv_freq"]
    if kind == "longrope":
        longer = length > settings["original_max_position_embeddings"]
        buffers[name] = torch.where(longer, buffers[f"{prefix}long_inv_freq"], short)
    elif kind == "dynamic":  # the operations of transformers
        most, factor, dim = self.original_max_seq_len, settings["factor"], 2 * short.numel()
        scale = factor * length / most - (factor - 1)
        base = settings["rope_theta"] * scale ** (dim / (dim - 2))
        long = 1.0 / base ** (torch.arange(0, dim, 2, device=x.device).float() / dim)
        buffers[name] = torch.where(length > most, long, short)
    try:
        return inspect.unwrap(type(self).forward)(self, x, position_ids, **named)
    finally:
        buffers[name] = before
