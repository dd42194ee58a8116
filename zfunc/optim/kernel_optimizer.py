"""What optimizers have in common whose update is a kernel on the host, and its twin on the device.

Parameters with weight decay are a group, those without are another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from attrs import evolve, fields

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import Moments, stored_buffers
from zfunc.optim.base import ParameterPart
from zfunc.optim.optimizer_settings import Decay, LearningRate, another_optimizer, lr_at_step

if TYPE_CHECKING:
    from torch import Tensor

# Fields that depend on the step, are a function, or say how bits are stored
UNDESCRIBED = ("lr", "betas", "decay", "split_master")


class KernelOptimizer(ABC):
    """Methods of `zfunc.optim.base.Optimizer`; both kernels take the arguments that `arguments` returns."""

    lr: LearningRate
    decay: Decay
    moments: Moments

    @abstractmethod
    def state_format(self, group: int = 0) -> str:
        """A row of `zfunc.core.optimizer_state.STATE_FORMATS`."""

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

    def with_moments(self, moments: Moments, *, split_master: bool) -> Self:
        """The same optimizer with its state in another format; beside fp32 the master is not split.

        A split that rounds as a copy does needs a bit beside the 32, and no bit of a momentum is free.
        """
        del split_master
        return evolve(self, moments=moments)  # pyright: ignore

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int = 0
    ) -> dict[str, Tensor]:
        """From another format of the same optimizer, through fp32; CheckpointError for one of another optimizer.

        Weights stay exact, moments are rounded as update `step` would have rounded them.
        """
        from zfunc.optim.formats import pack_moments, pack_weights, unpack_moments, unpack_weights

        wanted = self.state_format(group)
        if not self.reads(state_format, wanted):
            raise another_optimizer(state_format, wanted)
        moments = pack_moments(unpack_moments(state, state_format), wanted, step)
        packed = pack_weights(unpack_weights(state), wanted, moments) | moments
        return {x.name: packed[x.name] for x in stored_buffers(wanted)}

    def reads(self, state_format: str, wanted: str) -> bool:
        """Whether state of a format can be converted to `wanted`: they differ in their moments alone."""
        return state_format.rpartition("-")[0] == wanted.rpartition("-")[0]

    def host_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        part: ParameterPart | None = None,
        **given: Any,
    ) -> None:
        """The update by the compiled kernel; `given` are `out` and `into`."""
        self.host_kernel(state, grad, **given, **self.arguments(decision, group, part))

    def device_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        part: ParameterPart | None = None,
        **given: Any,
    ) -> None:
        """The same update, to the bit, in torch operations on the tensors' device; `given` is `out`."""
        self.device_kernel(state, grad, **given, **self.arguments(decision, group, part))
