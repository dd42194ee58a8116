"""The types of elements as torch has them, by their names in `zfunc.core.dtypes`; and elements as bytes."""

import torch
from torch import Tensor

from zfunc.core.dtypes import DTYPES, Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, x.torch) for name, x in DTYPES.items()}
SAFETENSORS_TYPES: dict[torch.dtype, str] = {
    **{getattr(torch, x.torch): x.safetensors for x in DTYPES.values()},
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


def byte_view(t: Tensor) -> Tensor:
    """The bytes of tensor `t`, uint8 [bytes], in the order of its elements; a view where `t` is contiguous.

    >>> byte_view(torch.ones(3, 2)[::2, 1])  # two elements of 4 bytes
    tensor([  0,   0, 128,  63,   0,   0, 128,  63], dtype=torch.uint8)
    """
    # A contiguous tensor of one element may have any stride, with which `view` to bytes is refused.
    return t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)
