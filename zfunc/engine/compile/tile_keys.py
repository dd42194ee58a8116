"""Where keys and values of a row in tiles lie, and the sums of their gradients. Attention sees them by parts."""

from collections.abc import Iterator, Sequence

import torch
from attrs import define
from torch import Tensor

Part = tuple[int, int]  # keys: the first, and the one after the last


@define(eq=False)
class DeviceKeys:
    """Keys and values [batch, key heads, tokens, features] of a row, and the fp32 sums of their gradients."""

    kept: tuple[Tensor, ...]
    sums: tuple[Tensor, ...] = ()

    @classmethod
    def like(cls, made: Sequence[Tensor], tokens: int) -> "DeviceKeys":
        """Memory for a row of so many tokens, of what a tile `made`."""
        return cls(tuple(x.new_empty(*x.shape[:2], tokens, x.shape[3]) for x in made))

    @property
    def features(self) -> int:
        """Those of a value."""
        return self.kept[1].shape[3]

    def put(self, part: Part, made: Sequence[Tensor]) -> None:
        """Keep keys and values of a part."""
        for row, x in zip(self.kept, made, strict=True):
            row[:, :, slice(*part)] = x

    def start_sums(self) -> None:
        """Zero the sums."""
        self.sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in self.kept)

    def visit(self, parts: Sequence[Part], *, sums: bool = False) -> Iterator[tuple[Part, list[Tensor]]]:
        """Keys and values of each part, and its `sums`: what is added to these is kept."""
        for part in parts:
            yield part, [x[:, :, slice(*part)] for x in (*self.kept, *(self.sums if sums else ()))]

    def sums_of(self, part: Part) -> list[Tensor]:
        """The sums of a part."""
        return [x[:, :, slice(*part)] for x in self.sums]
