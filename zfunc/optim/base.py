"""What a training step asks of an optimizer: the state it keeps, the factors of a step, its update here and there.

The invariant: state, gradient and decision determine the bits of an update, wherever it is made.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from zfunc.core.decision import StepDecision


@runtime_checkable
class Optimizer(Protocol):
    """Settings as a value, and what they mean. State comes by the names of its format's buffers, as flat slices."""

    @property
    def state_format(self) -> str:
        """What is kept of a parameter: a row of `zfunc.core.optimizer_state.STATE_FORMATS`. It begins as zeros."""
        ...

    def decay(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether weight decay touches a parameter."""
        ...

    def factors(self, step: int) -> Mapping[str, Any]:
        """What differs from update to update, counted from 1: numbers and tuples of them, `lr` among them."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """The settings that are the same at every step, in JSON's own types."""
        ...

    def host_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        decayed: bool,
        out: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        """One update in host memory, in place or `into` other buffers; `out` receives the rounded new weights.

        The gradient, fp32 or 16-bit, is multiplied by the decision's `grad_scale` and not written.
        """
        ...

    def device_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        decayed: bool,
        out: Tensor | None = None,
    ) -> None:
        """The same update, to the bit, in torch operations where the tensors are."""
        ...

    def device_workspace(self, numel: int) -> int:
        """At most so many bytes does `device_update` of `numel` parameters allocate."""
        ...
