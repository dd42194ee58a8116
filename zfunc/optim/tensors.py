"""What rules and codecs need of torch beside + - * / and the operators of integers."""

from typing import Any

import torch
from torch import Tensor

from zfunc.core.dtypes import Dtype
from zfunc.core.layout import ALIGNMENT as BLOCK
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


class Torch:
    """`rules.Operations` on float32 tensors, and what codecs need, as `formats.Numpy` has it."""

    where, minimum, maximum = map(staticmethod, (torch.where, torch.minimum, torch.maximum))

    def flush(self, x: Tensor, floor: float, /) -> Tensor:
        """x, which is 0 where its size is below the floor."""
        return x.masked_fill_(x.abs() < floor, 0.0)

    def sqrt(self, x: Tensor, /) -> Tensor:
        """The nearest float32."""
        return x.double().sqrt_().float()

    def signed(self, x: Tensor, size: float, /) -> Tensor:
        """`size` with the sign of x; 0 where x is 0, NaN where it is NaN."""
        full = torch.full_like(x, size).copysign_(x).masked_fill_(x == 0, 0.0)
        return full.masked_fill_(x.isnan(), torch.nan)

    def bits(self, x: Tensor) -> Tensor:
        """Those of float32, as int32."""
        return x.view(torch.int32)

    def floats(self, bits: Tensor) -> Tensor:
        """And back."""
        return bits.view(torch.float32)

    def ints(self, x: Tensor) -> Tensor:
        """Stored 8 or 16 bits, of bfloat16 too, or truth as int32."""
        return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).int()

    def stored(self, x: Tensor, dtype: Dtype) -> Tensor:
        """int32 that fit as such a dtype; bf16 by its bits."""
        return x.to(torch.int16).view(torch.bfloat16) if dtype == "bf16" else x.to(TORCH_DTYPES[dtype])

    def blocks(self, x: Tensor) -> Tensor:
        """Blocks of 64, the last one filled up with zeros; of a whole number of them a view."""
        return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)

    def largest(self, x: Tensor) -> Tensor:
        """Of every block: [blocks, 1]."""
        return x.amax(1, keepdim=True)

    def smallest(self, x: Tensor) -> Tensor:
        """Of every block: [blocks, 1]."""
        return x.amin(1, keepdim=True)

    def places(self, like: Tensor) -> Tensor:
        """0 to 63, int64, on its device."""
        return torch.arange(BLOCK, device=like.device)

    def of_array(self, x: Any) -> Tensor:
        """A tensor of an array's memory."""
        return torch.from_numpy(x)


TORCH = Torch()
