"""The loss of CTC by operations whose results have sizes that a trace knows.

Torch's keeps a table as long as the longest target of a batch. Here backward computes the table again, and targets
that a mask selects are selected inside.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from zfunc.engine.trace.operation_flops import MADE_OF

aten, ops = torch.ops.aten, torch.ops.zfunc
SELECTS = {torch.masked_select, Tensor.masked_select, Tensor.__getitem__}


class SizedCTC(TorchFunctionMode):
    """A mode in which F.ctc_loss is made of `ctc_losses`, with masks in place of what they selected as targets."""

    def __init__(self) -> None:
        super().__init__()
        self.selected: Any = WeakTensorKeyDictionary()  # (tensor, mask), by what was selected

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.ctc_loss:
            return self._ctc_loss(*args, **(kwargs or {}))
        y = func(*args, **(kwargs or {}))
        mask = args[1] if func in SELECTS and len(args) == 2 else None
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == args[0].shape:
            self.selected[y] = args
        return y

    def _ctc_loss(
        self,
        log_probs: Tensor,  # [times, rows, classes], or of one row [times, classes]
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        targets, mask = self.selected.get(targets, (targets, None))
        lengths = [
            n if isinstance(n, Tensor) else torch.tensor(n, device=targets.device)
            for n in (input_lengths, target_lengths)
        ]
        rows = log_probs if log_probs.dim() == 3 else log_probs[:, None]
        losses = ctc_losses(rows, targets, mask, *lengths, blank, zero_infinity)
        if reduction == "mean":
            return (losses / lengths[1].clamp(min=1)).mean()
        return losses.sum() if reduction == "sum" else losses.view(log_probs.shape[1:-1])


def ctc_losses(*arguments: Any) -> Tensor:
    """The losses [rows] of log-probabilities [times, rows, classes], targets, a mask that selects them or None, the
    lengths of rows and of their targets, the blank class, and whether an infinite loss is 0."""
    return _CTCLosses.apply(*arguments)  # type: ignore[return-value]


class _CTCLosses(Function):
    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return ops.ctc_losses(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _: Any) -> None:
        *tensors, ctx.blank, ctx.zero_infinity = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ops.pull_ctc_losses(*grads, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), *[None] * 6


def _losses(*arguments: Any) -> Tensor:
    losses, _ = aten._ctc_loss(*_selected(*arguments))
    return losses.masked_fill(losses == torch.inf, 0.0) if arguments[-1] else losses


def _pulled(grad: Tensor, *arguments: Any) -> Tensor:
    *tensors, blank, zero_infinity = _selected(*arguments)
    table = aten._ctc_loss(*tensors, blank, zero_infinity)
    return aten._ctc_loss_backward(grad, *tensors, *table, blank, zero_infinity)


def _selected(log_probs: Tensor, targets: Tensor, mask: Tensor | None, *more: Any) -> tuple[Any, ...]:
    """The arguments of torch's `_ctc_loss`. Raises ValueError for a selected target beyond the classes."""
    if mask is not None:
        targets = targets.masked_select(mask)
        if targets.numel() and (largest := int(targets.max())) >= log_probs.shape[-1]:
            got = f"the target {largest} for ctc_loss of {log_probs.shape[-1]} classes"
            raise ValueError(f"batch: got {got}, expected targets below that")
    return log_probs, targets.to(log_probs.device, torch.long), *more


def _traced_losses(log_probs: Tensor, *arguments: Any) -> Tensor:
    """The result of `_losses` for traces, which count its memory."""
    _kept = _tables(log_probs, *arguments, count=1)
    return log_probs.new_zeros(log_probs.shape[1])


def _traced_pull(_: Tensor, log_probs: Tensor, *arguments: Any) -> Tensor:
    """The result of `_pulled` for traces, which count its memory."""
    _kept = _tables(log_probs, *arguments, count=2)
    return log_probs.new_zeros(log_probs.shape)


def _tables(log_probs: Tensor, targets: Tensor, mask: Tensor | None, *_: Any, count: int) -> list[Tensor]:
    """The `count` tables for the longest targets, what the mask selects, and what kernels of CUDA know of rows."""
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"ctc_loss: got {log_probs.dtype}, expected torch.float32: use log_probs.float()")
    times, rows, _ = log_probs.shape
    tables = [log_probs.new_zeros(rows, times, 2 * targets.shape[-1] + 1) for _ in range(count)]
    tables += [targets.new_zeros(targets.shape, dtype=torch.long)] * (mask is not None)
    return tables + [targets.new_zeros(rows, dtype=torch.long) for _ in range(3)]


_GIVEN = "Tensor log_probs, Tensor targets, Tensor? mask, Tensor lengths, Tensor target_lengths"
_LIBRARY = torch.library.Library("zfunc", "FRAGMENT")
for _name, _first, _function, _traced in (
    ("ctc_losses", "", _losses, _traced_losses),
    ("pull_ctc_losses", "Tensor grad, ", _pulled, _traced_pull),
):
    _LIBRARY.define(f"{_name}({_first}{_GIVEN}, int blank, bool zero_infinity) -> Tensor")
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zfunc::{_name}", _traced, lib=_LIBRARY)
    MADE_OF[getattr(ops, _name).default] = _traced
