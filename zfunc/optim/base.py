"""The `Optimizer` protocol: a state format, the factors of a step, and an update on the host and on the device.

State, gradient and decision determine the bits of an update, on the host and on the device alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from zfunc.core.decision import StepDecision

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor]


@runtime_checkable
class Optimizer(Protocol):
    """The interface of an optimizer: its settings, and methods that update a flat slice of parameters, given
    the slices of the optimizer state by buffer name.

    A slice has consecutive parameters of one group. If the group's state format has a buffer marked `whole`
    or `matrix`, a slice has one parameter, whose `shape=` is passed too.

    - `whole` (see `zfunc.optim.adafactor`): an update needs statistics of a whole parameter, so it runs on a
      single rank.
    - `matrix` (see `zfunc.optim.muon`): an update needs a whole matrix. `direction(state, grad, decision,
      group=, out=)` updates the momentum and writes an update direction in bf16, with the same bits on any
      device; `orthogonalize(direction, group=)` makes of a whole matrix's direction [rows, columns] what the
      weights move along; `update_work(shape, group=)` returns the cost of that. The update gets the result as
      its gradient, and ignores `grad_scale`.

    An optimizer with several state formats has `moments`, the one chosen, and `with_moments(moments,
    split_master=)`, which returns a copy with another; `split_master` keeps fp32 weights as two 16-bit halves
    where that changes no bit.
    """

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """The number of a parameter's group of settings, such as 0 with weight decay and 1 without."""

    def state_format(self, group: int) -> str:
        """The name of the state format of parameter group `group` in
        `zfunc.core.optimizer_state.STATE_FORMATS`. All buffers but the weights start at 0."""

    def factors(self, step: int) -> Mapping[str, Any]:
        """The settings that may change by `step`, counted from 1, by name: `lr`, and other numbers or tuples."""

    def describe(self) -> Mapping[str, Any]:
        """The optimizer's settings that are constant over all steps, by name, as JSON values."""

    def host_update(
        self,
        state: State,
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        out: Tensor | None = None,
        into: State | None = None,
    ) -> None:
        """Update consecutive parameters of `group` in host memory: the buffers in `state` in place, or `into`
        others.

        `grad` (fp32 or 16-bit, read only) is multiplied by the decision's `grad_scale`. `out` receives the
        rounded new weights.
        """

    def device_update(
        self, state: State, grad: Tensor, decision: StepDecision, *, group: int, out: Tensor | None = None
    ) -> None:
        """Update consecutive parameters of `group` in place, in torch operations on the device of the
        tensors, with the bits of `host_update`; arguments as there."""

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of `numel` parameters allocates."""

    def convert_state(self, state: State, state_format: str, step: int, *, group: int) -> State:
        """Convert a checkpoint's `state`, in `state_format` after update `step`, to the format of `group`.

        The tensors are parts of one parameter's buffers, on the host. Raises CheckpointError for a format that the
        optimizer cannot convert.
        """


def has_moments(optimizer: Any) -> bool:
    """Whether an optimizer offers a choice of state formats (the method `with_moments`)."""
    return hasattr(optimizer, "with_moments")


def gathers_calls(optimizer: Any, group: int) -> bool:
    """Whether `host_update` of `group` has the argument `calls=`, a list to which kernel calls are added
    instead of being made; zfunc's own optimizers have it."""
    return hasattr(optimizer, "gathers_calls") and optimizer.gathers_calls(group)
