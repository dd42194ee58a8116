"""What zfunc's optimizers have in common, and `Elementwise`: one that sees one element at a time.

A class of the latter has `state`, the names of its moments, fields with its settings, `scalars`, and the rule
`update`. The formats of the state, its memory and names in checkpoints, conversion, the NumPy reference, the update
on the device and on the host follow from them.

Parameters with weight decay are a group, those without are another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from attrs import evolve, fields

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import STATE_FORMATS, Moments, formats_of, stored_buffers
from zfunc.errors import CheckpointError
from zfunc.optim.base import ParameterPart
from zfunc.optim.optimizer_settings import Decay as Decays
from zfunc.optim.optimizer_settings import LearningRate, lr_at_step
from zfunc.optim.rules import Decay, Factors, Operations, Rule, grad_floor_of
from zfunc.optim.workspaces import elementwise_workspace
from zfunc.values import number

if TYPE_CHECKING:
    from torch import Tensor

# Fields that depend on the step, are a function, or say how bits are stored
UNDESCRIBED = ("lr", "betas", "decay", "split_master")
_OWNERS: dict[str, str] = {}  # the class of each kind, whose state formats are registered


class KernelOptimizer(ABC):
    """Methods of `zfunc.optim.base.Optimizer`; both kernels take the arguments that `arguments` returns."""

    # Learning rate, weight decay and other arguments with which `zfunc train` begins; and of the DeepSpeed type of
    # this name, if there is one, the parameters that are arguments here, and those with another effect, or none.
    usual: ClassVar[tuple[float, float, Mapping[str, Any]]] = (0.0, 0.0, {})
    deepspeed: ClassVar[tuple[str, str] | None] = None

    lr: LearningRate
    decay: Decays
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
            raise CheckpointError(
                f"got optimizer state in the format {state_format!r}, expected {wanted!r}, this program's: load it "
                "with the optimizer that saved it, or pass its parameters to init(program, params=...)"
            )
        moments = pack_moments(unpack_moments(state, state_format), wanted, step)
        packed = pack_weights(unpack_weights(state), wanted, moments) | moments
        return {x.name: packed[x.name] for x in stored_buffers(wanted)}

    def reads(self, state_format: str, wanted: str) -> bool:
        """Whether state of a format can be converted to `wanted`: they differ in their moments alone."""
        return state_format.rpartition("-")[0] == wanted.rpartition("-")[0]

    def host_update(
        self, *args: Any, group: int, part: ParameterPart | None = None, into: Any = None, out: Any = None
    ) -> None:
        """The update of state, gradient and decision by the compiled kernel."""
        *tensors, decision = args
        self.host_kernel(*tensors, out=out, into=into, **self.arguments(decision, group, part))

    def device_update(
        self, *args: Any, group: int, part: ParameterPart | None = None, out: Any = None
    ) -> None:
        """The same update, to the bit, in torch operations on the tensors' device."""
        *tensors, decision = args
        self.device_kernel(*tensors, out=out, **self.arguments(decision, group, part))


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
            formats, name = (
                formats_of(cls.kind(), cls.state, cls.unsigned),
                f"{cls.__module__}.{cls.__qualname__}",
            )
            other = _OWNERS.get(cls.kind(), "zfunc")
            if other != name and any(STATE_FORMATS.get(x, new) != new for x, new in formats.items()):
                raise TypeError(
                    f"{cls.__name__}: got the state {', '.join(cls.state) or 'none'}, expected that of {other}, "
                    "whose checkpoints have this name: give the class another one"
                )
            STATE_FORMATS.update(formats)
            _OWNERS[cls.kind()] = name  # a notebook's cell may run again

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
        """The update in host memory."""
        from zfunc.optim.updates import host_update_

        host_update_(*args, **arguments)

    def device_kernel(self, *args: Any, **arguments: Any) -> None:
        """The update in torch operations."""
        from zfunc.optim.updates import device_update_

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
        scale = number("grad_scale", decision.grad_scale)
        decay = 0.0 if group else self.weight_decay
        found = {
            "decay": decision.factors["lr"] * decay if self.decoupled else decay,
            **self.scalars(decision.number, **decision.factors),
        }
        for name, value in found.items():
            number(f"{type(self).__name__}'s settings (as {name})", value)
        return Factors(scale, grad_floor_of(scale), **found)
