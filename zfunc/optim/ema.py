"""The exponential moving average of the weights, in torch operations on the tensors' device.

Two products and their sum are each rounded once, so the bits do not depend on how a bucket was cut, on the device
or on threads. `torch.lerp`, which `torch.optim.swa_utils` averages with, rounds once less in vectorized parts.
"""

from collections.abc import Mapping

from torch import Tensor

from zfunc.optim.formats import unpack_weights
from zfunc.optim.workspaces import EMA_PIECE


def average_(ema: Tensor, state: Mapping[str, Tensor], decay: float) -> None:
    """`ema` [n] fp32 becomes `decay * ema + (1 - decay) * weights`, of the weights in any format of the state."""
    for start in range(0, ema.numel(), EMA_PIECE):
        part = ema[start : start + EMA_PIECE]
        weights = unpack_weights({name: x[start : start + part.numel()] for name, x in state.items()})
        part.mul_(decay).add_(weights * (1 - decay))
