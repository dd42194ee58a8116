"""Short trainings on a device, and what they leave."""

from typing import Any

import torch
from small_models import SHORTER
from torch import Tensor

import zfunc


def compiled(model: str, device: str | torch.device, **settings: Any) -> tuple[Any, Any]:
    """A program, and its batches by number."""
    segments, data = SHORTER[model]()
    state = {name: settings.pop(name) for name in ("moments", "split_master") if name in settings}
    usual = {"optimizer": zfunc.AdamW(lr=1e-2, weight_decay=0.1, **state), "bucket_size": 3000}
    return zfunc.compile(segments, device=device, **{**usual, **settings}), data


def run(program: Any, data: Any, steps: int = 3, **step: Any) -> tuple[list[tuple[float, float]], Tensor]:
    """Losses and gradient norms of `steps` steps, and all parameters after them."""
    state, losses = zfunc.init(program, seed=1), []
    for i in range(steps):
        state, m = zfunc.train_step(program, state, data(i), **step)
        losses.append((m.loss, m.grad_norm))
    return losses, weights_of(program, state)


def weights_of(program: Any, state: Any) -> Tensor:
    return torch.cat([p.flatten().cpu() for p in zfunc.params(program, state).values()])


def train(
    model: str,
    device: str | torch.device,
    steps: int = 3,
    *,
    step: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[tuple[float, float]], Tensor]:
    """`run` of a program compiled for it."""
    return run(*compiled(model, device, **settings), steps, **(step or {}))
