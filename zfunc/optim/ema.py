"""The exponential moving average of the weights, in torch operations on the tensors' device.

Two products and their sum are each rounded once, so the bits do not depend on how a bucket was cut, on the device
or on threads. `torch.lerp`, which `torch.optim.swa_utils` averages with, rounds once less in vectorized parts.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF
from zfunc.optim.device_formats import Scratch, join_
from zfunc.optim.workspaces import EMA_PIECE

_own = threading.local()  # the scratch of a thread


def average_(ema: Tensor, state: Mapping[str, Tensor], decay: float) -> None:
    """`ema` [n] fp32 becomes `decay * ema + (1 - decay) * weights`, of the weights in any format of the state."""
    first, second = _scratch(min(ema.numel(), EMA_PIECE), ema.device)
    for start in range(0, ema.numel(), EMA_PIECE):
        part = ema[start : start + EMA_PIECE]
        n = part.numel()
        weights, product = first[:n], second[:n]
        if "master" in state:
            weights = state["master"][start : start + n]
        else:
            high, low = (state[x][start : start + n] for x in (HIGH_HALF, "master_low"))
            signs = state["exp_avg_sq"][start : start + n] if "exp_avg_sq" in state else None
            join_(weights, high, low, Scratch(product, product, product, product), signs)
        torch.mul(weights, 1 - decay, out=product)
        part.mul_(decay).add_(product)


def _scratch(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for two parts: one for each host thread, a new one on an accelerator, where streams are apart."""
    if device.type != "cpu":
        return torch.empty(numel, device=device), torch.empty(numel, device=device)
    if not hasattr(_own, "scratch"):
        _own.scratch = torch.empty(EMA_PIECE, device="cpu"), torch.empty(EMA_PIECE, device="cpu")
    return _own.scratch
