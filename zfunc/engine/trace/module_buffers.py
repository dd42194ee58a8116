"""Buffers that a module's forward changes in training mode: running statistics, and spectral norm's vectors.

Such buffers are part of the training state. A segment gets them as arguments and returns their new values, so a
pass that is repeated from the same buffers computes the same results.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zfunc.core.layout import round_up
from zfunc.core.spec import ALLOCATION
from zfunc.errors import refuse


def changed_by_forward(segment: str, module: nn.Module) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the buffers that forward of `module` changes in training mode, such as running statistics;
    and a dict that maps a tensor to be cast to the tensor whose dtype it needs.

    Running statistics stay in fp32 where the step computes in 16 bits, so a norm's weight and bias are cast
    to that, as PyTorch's kernels expect. Vectors of spectral norm have the dtype of their matrix. Raises
    ValueError, with the name of the `segment`, for a norm in training mode that sends to ranks or reads a counter.
    """
    names, types = list[str](), dict[str, str]()
    for path, m in module.named_modules():
        buffers: list[str] = []
        if isinstance(m, nn.modules.batchnorm._NormBase) and m._buffers.get("running_mean") is not None:
            if m.training and isinstance(m, nn.SyncBatchNorm):
                raise ValueError(
                    f"segment {segment!r}: got the SyncBatchNorm {path!r}, whose forward sends to other ranks, "
                    "expected a norm of each rank's own rows: use nn.BatchNorm2d, or nn.GroupNorm"
                )
            if m.training and m.momentum is None and isinstance(m, nn.modules.batchnorm._BatchNorm):
                got = f"momentum=None of the {type(m).__name__} {path!r}, which divides by a counter's value"
                refuse(f"segment {segment!r}", got, "a number", "set its momentum, such as torch's 0.1")
            buffers = [x for x, t in m._buffers.items() if t is not None]
            types |= {_joined(path, x): _joined(path, "running_mean") for x in ("weight", "bias")}
        elif isinstance(m, parametrizations._SpectralNorm):
            buffers, original = [*m._buffers], _joined(path.rpartition(".")[0], "original")
            types |= {_joined(path, x): original for x in buffers}
        names += [_joined(path, x) for x in buffers if m.training]
    return tuple(names), types


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def buffer_views(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of `flat` [nbytes(like)] uint8 as module buffers, by name, in the shapes and dtypes of `like`."""
    ends = accumulate((round_up(t.nbytes, ALLOCATION) for t in like.values()), initial=0)
    return {
        name: flat[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for (name, t), (start, _) in zip(like.items(), pairwise(ends), strict=True)
    }


def copy_buffers(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy the module buffers `values` into the tensors `into` of the same names; other names raise ValueError."""
    if into.keys() != values.keys():
        raise ValueError(
            f"got the buffers {sorted(values)} from the function, expected {sorted(into)}: return (y, buffers) "
            "with each of the segment's buffers"
        )
    for name, t in into.items():
        t.copy_(values[name])


def clone_buffers(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies of module buffers, by name, in memory of their own."""
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in buffers.items()}
