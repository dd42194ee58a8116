"""`Elementwise`, the base of an optimizer that sees one element at a time: its file says what it computes.

A class has `state`, the names of its moments, fields with its settings, `scalars`, and the rule `update`. The
formats of the state, its memory and names in checkpoints, conversion, the NumPy reference, the update on the device
and on the host follow from them; a rule that the compiled kernel has (`kernel`) runs there, others in torch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import STATE_FORMATS, Moments, formats_of
from zfunc.optim.base import ParameterPart
from zfunc.optim.kernel_optimizer import KernelOptimizer
from zfunc.optim.optimizer_settings import checked_finite
from zfunc.optim.rules import Decay, Factors, Operations, Rule, grad_floor_of
from zfunc.optim.workspaces import elementwise_workspace


class Elementwise(KernelOptimizer):
    """The methods of `zfunc.optim.base.Optimizer`, for a frozen class with fields `lr`, `weight_decay`, `decay` and
    `moments`. Weights and moments are float32 in a rule, whatever format they have between steps."""

    state: ClassVar[tuple[str, ...]] = ()
    unsigned: ClassVar[tuple[str, ...]] = ()  # those of them that are never below 0
    kernel: ClassVar[str | None] = None  # the rule's name in the compiled kernel
    decoupled: bool = False  # whether weight decay is

    weight_decay: float
    moments: Moments

    @abstractmethod
    def update(self, o: Operations, k: Factors, g: Any, *moments: Any) -> tuple[Any, ...]:
        """The change of the weights and the new moments, in `o`'s operations and + - * / on any kind of array."""

    @abstractmethod
    def scalars(self, step: int, lr: float, **factors: Any) -> dict[str, float]:
        """What `update` needs of step `step`, counted from 1, by the names of `Factors`, from its `factors`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "update" in cls.__dict__ and "kernel" not in cls.__dict__:
            cls.kernel = None  # a rule of its own is not what its base's kernel computes
        if cls.state and cls.kind():
            STATE_FORMATS.update(formats_of(cls.kind(), cls.state, cls.unsigned))

    @classmethod
    def kind(cls) -> str:
        """What the formats of its state are called."""
        return cls.__name__.lower()

    def __attrs_post_init__(self) -> None:
        """Check what the fields make together; a schedule's values are checked at each step."""
        if not callable(self.lr) and not callable(getattr(self, "betas", None)):
            self.checked_factors(StepDecision(False, 1.0, 1, self.factors(1)), 0)

    def state_format(self, group: int = 0) -> str:
        """A row of `zfunc.core.optimizer_state.STATE_FORMATS`."""
        del group
        return f"{self.kind()}-{self.moments}"

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of `numel` parameters allocates."""
        return elementwise_workspace(numel, self.state_format())

    def host_kernel(self, *args: Any, **arguments: Any) -> None:
        """The update in host memory (`zfunc.optim.host_update`)."""
        from zfunc.optim.host_update import host_update_

        host_update_(*args, **arguments)

    def device_kernel(self, *args: Any, **arguments: Any) -> None:
        """The update in torch operations (`zfunc.optim.device_update`)."""
        from zfunc.optim.device_update import device_update_

        device_update_(*args, **arguments)

    def arguments(
        self, decision: StepDecision, group: int, part: ParameterPart | None = None
    ) -> dict[str, Any]:
        """What an update takes besides tensors."""
        del part
        factors = self.checked_factors(decision, group)
        decay: Decay = "none" if not factors.decay else "decoupled" if self.decoupled else "l2"
        return {
            "rule": self.rule,
            "state_format": self.state_format(group),
            "factors": factors,
            "number": decision.number,
            "decay": decay,
        }

    @property
    def rule(self) -> Rule:
        """What a step computes."""
        return Rule(self.update, self.state, self.kernel)

    def checked_factors(self, decision: StepDecision, group: int) -> Factors:
        """The scalars of a step; ValueError for one that float32 cannot hold. Group 1 has no weight decay."""
        scale = checked_finite("grad_scale", decision.grad_scale)
        decay = 0.0 if group else self.weight_decay
        found = {
            "decay": decision.factors["lr"] * decay if self.decoupled else decay,
            **self.scalars(decision.number, **decision.factors),
        }
        for name, value in found.items():
            checked_finite(f"{type(self).__name__}'s settings (as {name})", value)
        return Factors(scale, grad_floor_of(scale), **found)
