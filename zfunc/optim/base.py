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
    """An optimizer: its settings, and methods that update flat slices of parameters' state, passed by buffer name.

    A slice has parameters of one group, side by side. If the state format has a buffer marked `whole` or `matrix`,
    it has one parameter, whose `shape=` is passed too.

    - `whole`, as of `zfunc.optim.adafactor`: an update needs statistics of a whole parameter, so a single rank,
      whose slice has it whole.
    - `matrix`, as of `zfunc.optim.muon`: an update needs a whole matrix. `direction(state, grad, decision, group=,
      out=)` updates the momentum and writes a direction in bf16, with the same bits anywhere;
      `orthogonalize(direction, group=)` turns the direction of a whole matrix [rows, columns] into what the weights
      move along, and `update_work(shape, group=)` returns the work of that; an update gets the result as its
      gradient, whatever the `grad_scale`.

    An optimizer with a choice of state formats has `moments`, the format chosen, and `with_moments(moments,
    split_master=)`, which returns the same optimizer with another format; `split_master` keeps fp32 weights as two
    16-bit halves, if no bit changes.
    """

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """The number of a parameter's group of settings, such as 0 with weight decay and 1 without."""

    def state_format(self, group: int) -> str:
        """The name of a group's format in `core.optimizer_state.STATE_FORMATS`; all but the weights start at 0."""

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
        """Update parameters of a group in host memory, in place or `into` other buffers.

        `out` receives the rounded new weights. `grad` (fp32 or 16-bit, read only) is to be multiplied by the
        decision's `grad_scale`.
        """

    def device_update(
        self, state: State, grad: Tensor, decision: StepDecision, *, group: int, out: Tensor | None = None
    ) -> None:
        """As `host_update`, with the same bits, but in place and in torch operations on the tensors' device."""

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
    """Whether `host_update` for `group` takes `calls=`, to collect kernel calls in: zfunc's own optimizers do."""
    return hasattr(optimizer, "gathers_calls") and optimizer.gathers_calls(group)
