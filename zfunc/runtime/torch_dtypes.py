"""The types of elements as torch has them, by their names in `zfunc.core.dtypes`."""

import torch

from zfunc.core.dtypes import DTYPES, Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, x.torch) for name, x in DTYPES.items()}
SAFETENSORS_TYPES: dict[torch.dtype, str] = {
    **{getattr(torch, x.torch): x.safetensors for x in DTYPES.values()},
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
