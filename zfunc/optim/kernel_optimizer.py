"""What optimizers have in common whose update is a kernel on the host, and its twin on the device.

Parameters with weight decay are a group, those without are another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from attrs import fields

from zfunc.core.decision import StepDecision
from zfunc.optim.base import ParameterPart
from zfunc.optim.optimizer_settings import Decay, LearningRate, lr_at_step

if TYPE_CHECKING:
    from torch import Tensor

# Fields that depend on the step, are a function, or say how bits are stored
UNDESCRIBED = ("lr", "betas", "decay", "split_master")


class KernelOptimizer(ABC):
    """Methods of `zfunc.optim.base.Optimizer`; both kernels take the arguments that `arguments` returns."""

    lr: LearningRate
    decay: Decay

    @abstractmethod
    def host_kernel(self, *args: Any, **arguments: Any) -> None:
        """The update by the compiled kernel. Imported here: settings need no torch."""

    @abstractmethod
    def device_kernel(self, *args: Any, **arguments: Any) -> None:
        """The same, to the bit, in torch operations."""

    @abstractmethod
    def arguments(
        self, decision: StepDecision, group: int, part: ParameterPart | None = None
    ) -> dict[str, Any]:
        """What both kernels take besides tensors."""

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1; TypeError or ValueError where the schedule returns none."""
        return lr_at_step(self.lr, step)

    def factors(self, step: int) -> dict[str, Any]:
        """What depends on the step, counted from 1: the learning rate."""
        return {"lr": self.lr_at(step)}

    def describe(self) -> dict[str, Any]:
        """The settings that are constant over all steps, as JSON values."""
        values = {x.name: getattr(self, x.name) for x in fields(cast("Any", type(self)))}
        constant = {name: x for name, x in values.items() if name not in UNDESCRIBED}
        return {name: [*x] if isinstance(x, tuple) else x for name, x in constant.items()}

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """0 for a parameter with weight decay, 1 for one without."""
        return int(not self.decay(name, shape))

    def host_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        part: ParameterPart | None = None,
        out: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        """The update by the compiled kernel."""
        self.host_kernel(state, grad, out=out, into=into, **self.arguments(decision, group, part))

    def device_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        part: ParameterPart | None = None,
        out: Tensor | None = None,
    ) -> None:
        """The same update, to the bit, in torch operations on the tensors' device."""
        self.device_kernel(state, grad, out=out, **self.arguments(decision, group, part))
