"""A small model with adapters beside frozen weights, in 4 or 8 bits or as decoded ones, for their laws."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc.models.quantization import FORMATS, decode

WIDTH, RANK = 96, 4
BATCH = tuple(torch.randn(8, n, generator=torch.Generator().manual_seed(n)) for n in (WIDTH, 1))


class Block(nn.Module):
    """Frozen matrices, of which one has a short last block of 64, and an adapter."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide)
        self.down = nn.Linear(wide, WIDTH, bias=False)
        self.requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn(*x) / 8) for x in ((RANK, WIDTH), (WIDTH, RANK)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.gelu(self.up(y))) + y @ self.a.mT @ self.b.mT


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.out(x).float(), targets)  # of two types it has no gradient before torch 2.13


class Shifted(Block):
    """A block with a constant in half precision."""

    def __init__(self, wide: int) -> None:
        super().__init__(wide)
        self.register_buffer("shift", torch.ones(WIDTH, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def modules(layers: int = 3, wide: int = 321) -> list[nn.Module]:
    """An input layer, blocks and a head."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), *(Block(wide) for _ in range(layers)), Head()]


def segments_of(own: list[nn.Module]) -> list[zfunc.Segment]:
    return [zfunc.segment(str(n), m) for n, m in enumerate(own)]


def rounded(own: list[nn.Module], kind: str, dtype: torch.dtype) -> list[nn.Module]:
    """The modules with the weights that a program with format `kind` computes with."""
    for m in own:
        for layer in (m.up, m.down) if isinstance(m, Block) else ():
            stored = FORMATS[kind].encode(layer.weight)
            layer.weight.data = decode(stored, kind, tuple(layer.weight.shape), dtype).float()
    return own
