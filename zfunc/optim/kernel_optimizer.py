"""What optimizers have in common whose update is a kernel on the host, and its twin on the device.

Parameters with weight decay are a group, those without are another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zfunc.core.decision import StepDecision
from zfunc.optim.base import ParameterPart
from zfunc.optim.optimizer_settings import Decay

if TYPE_CHECKING:
    from torch import Tensor


class KernelOptimizer(ABC):
    """Methods of `zfunc.optim.base.Optimizer`; both kernels take the arguments that `arguments` returns."""

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
