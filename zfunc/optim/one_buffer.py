"""What SGD, Lion and Adagrad have in common as values: one buffer beside the weights, in one of three formats.

Their files have their settings and factors; `one_buffer_reference` defines their updates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from attrs import evolve

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import Moments, stored_buffers
from zfunc.optim.base import ParameterPart
from zfunc.optim.kernel_optimizer import KernelOptimizer
from zfunc.optim.one_buffer_reference import Rule, RuleFactors, pack_one_buffer, unpack_one_buffer
from zfunc.optim.optimizer_settings import check_moments_and_decay
from zfunc.optim.setting_checks import check_same_optimizer, checked_finite
from zfunc.optim.workspaces import one_buffer_workspace

if TYPE_CHECKING:
    from torch import Tensor


class OneBufferOptimizer(KernelOptimizer):
    """The methods of `zfunc.optim.base.Optimizer`; fields, rule and factors are each optimizer's own."""

    decoupled: ClassVar[bool] = False  # whether weight decay is

    weight_decay: float
    moments: Moments

    @property
    @abstractmethod
    def kind(self) -> str:
        """Of the formats of its state."""

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """The update that the kernel makes."""

    @abstractmethod
    def rule_factors(
        self, step: int, factors: Mapping[str, Any], weight_decay: float, grad_scale: float
    ) -> RuleFactors:
        """The scalars of step `step`, whose `factors` these are."""

    def __attrs_post_init__(self) -> None:
        """Check what the fields do not check themselves; a schedule's values are checked at each step."""
        check_moments_and_decay(self.moments, self.decay)
        if not callable(self.lr) and not callable(getattr(self, "betas", None)):
            self._check_factors(1, self.factors(1))

    def state_format(self, group: int = 0) -> str:
        """A row of `zfunc.core.optimizer_state.STATE_FORMATS`."""
        del group
        return f"{self.kind}-{self.moments}"

    def with_moments(self, moments: Moments, *, split_master: bool) -> Self:
        """The same optimizer with its buffer in another format; beside fp32 the master is never split.

        A split that rounds as a copy does needs a bit beside the 32, and no bit of a momentum is free.
        """
        del split_master
        return evolve(self, moments=moments)  # pyright: ignore

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of `numel` parameters allocates."""
        return one_buffer_workspace(numel)

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int = 0
    ) -> dict[str, Tensor]:
        """From another format of the same optimizer, through fp32; CheckpointError for one of another optimizer."""
        from zfunc.optim.compact import as_array, as_state

        wanted = self.state_format(group)
        check_same_optimizer(state_format, wanted)
        arrays = {x.name: as_array(state[x.name]) for x in stored_buffers(state_format)}
        packed = pack_one_buffer(*unpack_one_buffer(arrays, state_format), state_format=wanted, step=step)
        return as_state((packed[x.name] for x in stored_buffers(wanted)), wanted)

    def host_kernel(self, *args: Any, **arguments: Any) -> None:
        """The update in host memory (`zfunc.optim.host_one_buffer`)."""
        from zfunc.optim.host_one_buffer import host_one_buffer_

        host_one_buffer_(*args, **arguments)

    def device_kernel(self, *args: Any, **arguments: Any) -> None:
        """The update in torch operations (`zfunc.optim.device_one_buffer`)."""
        from zfunc.optim.device_one_buffer import device_one_buffer_

        device_one_buffer_(*args, **arguments)

    def arguments(
        self, decision: StepDecision, group: int, part: ParameterPart | None = None
    ) -> dict[str, Any]:
        """What both kernels take besides tensors."""
        del part
        weight_decay = 0.0 if group else self.weight_decay
        return {
            "state_format": self.state_format(group),
            "rule": self.rule,
            "factors": self._check_factors(
                decision.number,
                decision.factors,
                weight_decay,
                checked_finite("grad_scale", decision.grad_scale),
            ),
            "step": decision.number,
            "decoupled": self.decoupled,
        }

    def _check_factors(
        self,
        step: int,
        factors: Mapping[str, Any],
        weight_decay: float | None = None,
        grad_scale: float = 1.0,
    ) -> RuleFactors:
        """The scalars of a step; ValueError for one that float32 cannot hold."""
        decay = self.weight_decay if weight_decay is None else weight_decay
        scalars = self.rule_factors(step, factors, decay, grad_scale)
        for name, value in scalars._asdict().items():
            if name != "grad_floor":
                checked_finite(f"{type(self).__name__}'s settings (as {name})", value)
        return scalars
