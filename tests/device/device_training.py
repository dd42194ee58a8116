"""Short trainings on a device, and what they leave."""

from functools import partial
from typing import Any

import pytest
import torch
from small_models import SHORTER
from torch import Tensor

import zfunc
from zfunc.models.gpt import Head, gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.loss import linear_next_token_loss

LIBRARIES = {
    "pretend": 0,
    "cuda": 160 << 20,
}  # bytes that cuBLAS and its kin allocate through torch for themselves: 32 MiB a stream on a GPU of 2022
at_night = partial(pytest.param, marks=pytest.mark.slow)


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


def needs(devices: int) -> None:
    """Skip the test where there are fewer."""
    if devices > (there := torch.accelerator.device_count()):
        pytest.skip(f"needs {devices} devices, torch sees {there}")


class InPieces(Head):
    """A head whose logits are computed in pieces, though they are few."""

    def forward(self, x: Tensor, targets: Any = None) -> Tensor:
        return linear_next_token_loss(self.ln_f(x), self.out.weight, targets, logits_bytes=0)


def gpt(
    device: str,
    layers: int = 0,
    *,
    head: type[Head] = Head,
    tied: bool = True,
    packed: bool = False,
    **settings: Any,
) -> tuple[Any, Any]:
    """A GPT of 100 million parameters; of 100,000 for the pretend device."""
    hidden, length = (1024, 512) if device == "cuda" else (64, 32)
    config = GPTConfig(
        vocab_size=512,
        seq_length=length,
        num_layers=layers or (8 if device == "cuda" else 4),
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        tied=tied,
    )
    needs(settings.get("devices", 1))
    segments = gpt_segments(config)
    if head is not Head:
        with torch.device("meta"):
            segments = (
                *segments[:-1],
                zfunc.segment("head", head(config), share={"out.weight": "embed.tok.weight"}),
            )
    program = zfunc.compile(
        segments,
        device=device,
        precision="bf16",
        bucket_size=16 * hidden * hidden,
        schedule="Overlapped",
        **settings,
    )
    tokens = torch.randint(0, 512, (8, length + 1), generator=torch.Generator().manual_seed(0))
    ids, places = tokens[:, :-1], torch.arange(length).repeat(8, 1) % (length - 12)
    return program, ({"input_ids": ids, "position_ids": places} if packed else ids, tokens[:, 1:])
