"""The types of elements as torch has them, by their names in `zfunc.core.dtypes`."""

import torch

from zfunc.core.dtypes import DTYPES, Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, x.torch) for name, x in DTYPES.items()}
