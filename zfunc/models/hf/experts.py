"""Mixtures of experts in shapes that depend on no data, so that layers are traced, recomputed and recorded.

What decoder layers call instead of the implementation in their config, where a model leaves the choice: one product
of groups where the device has it, else every expert on every token, with weights of zero.
"""

from typing import Any

import torch
from torch import Tensor

from zfunc.runtime.accelerator import multiplies_groups


def run_experts(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' outputs, weighted and summed: [tokens, hidden], with the signature of transformers' interface.

    `x` is [tokens, hidden], `chosen` and `weights` [tokens, top_k] name the experts of a token and weigh them.
    """
    if multiplies_groups(x.device, x.dtype):
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(experts, x, chosen, weights)
    return run_all_experts(experts, x, chosen, weights)


def run_all_experts(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the experts' outputs [tokens, hidden], with every expert computed for every token."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    y = _products(experts, x.expand(experts.num_experts, *x.shape), first)
    y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    y = _products(experts, y, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # not there before transformers 5.23
        y = experts.post_expert_norm(y)
    each = weights.new_zeros(len(x), experts.num_experts).scatter(1, chosen, weights)
    return (y * each.T[..., None]).sum(0).to(x.dtype)


def _products(experts: Any, x: Tensor, name: str) -> Tensor:
    """Apply a linear layer of each expert: [experts, tokens, features in] -> [experts, tokens, features out]."""
    weight = getattr(experts, name)
    y = torch.bmm(x, weight if experts.is_transposed else weight.transpose(1, 2))
    return y + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else y


def router_sums(logits: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
    """The times that each expert was among a token's `top_k`, and the sum of its probabilities: fp32 [2, experts].

    `logits` is [tokens, experts]. Tokens whose `mask` is 0 do not count.
    """
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, -1).indices, 1.0)
    both = torch.stack([chosen, probabilities]).float()
    return (both if mask is None else both * mask.flatten()[:, None]).sum(1)


def balance_loss(sums: Tensor, tokens: Tensor | int) -> Tensor:
    """The load balancing loss of Switch Transformer (arXiv 2101.03961, equations 4 to 6) over several layers.

    `sums` adds up the `router_sums` of the layers; `tokens` is the number of tokens times the number of
    layers.
    """
    chosen, probabilities = sums / tokens
    return (chosen * probabilities).sum() * sums.shape[1]
