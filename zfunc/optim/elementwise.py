"""What zfunc's optimizers have in common, and `Elementwise`: one that sees one element at a time.

A class of the latter has `state`, the names of its moments, fields with its settings, `scalars`, and the rule
`update`. The formats of the state, its memory and names in checkpoints, conversion, the update on the device and on
the host follow from them.

A setting is checked when it is made; a schedule, a pure function of the step counted from 1, at each step.
Parameters with weight decay are a group, those without are another. No torch is needed before an update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from attrs import evolve, field, fields, frozen

from zfunc.core.decision import StepDecision
from zfunc.core.layout import ALIGNMENT, round_up
from zfunc.core.optimizer_state import MOMENTS, STATE_FORMATS, Moments, formats_of, owner_of
from zfunc.errors import CheckpointError, refuse
from zfunc.optim import rules
from zfunc.optim.rules import Decay, Factors, Operations, Rule, RuleStep, grad_floor_of
from zfunc.options import one_of
from zfunc.values import NamedSettings, number

if TYPE_CHECKING:
    from torch import Tensor

# Fields that depend on the step, are a function, or say how bits are stored
UNDESCRIBED = ("lr", "betas", "decay", "split_master")
_OWNERS: dict[str, str] = {}  # the class of each kind, whose state formats are registered

Betas = tuple[float, float]
LearningRate = float | Callable[[int], float]
WhichDecay = Callable[[str, tuple[int, ...]], bool]


def decay_all(name: str, shape: tuple[int, ...]) -> bool:
    """Return True: weight decay applies to every parameter, as in torch. A value for `decay`."""
    del name, shape
    return True


def matrices_only(name: str, shape: tuple[int, ...]) -> bool:
    """A value for an optimizer's `decay`: weight decay applies to matrices and embeddings, not to norms and
    biases (parameters with fewer than two dimensions).

    >>> matrices_only("head.weight", (8, 4)), matrices_only("head.bias", (8,))
    (True, False)
    """
    del name
    return len(shape) >= 2


def hidden_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix, but no embedding or head by its name in zfunc's GPT or Hugging Face models.

    >>> [hidden_matrices(x, (8, 4)) for x in ("block0.up.weight", "embed.tok.weight", "lm_head.weight")]
    [True, False, False]
    """
    return len(shape) == 2 and not any(x in name for x in ("embed", "lm_head", "wte", "wpe"))


# ---- fields of settings: each converter raises TypeError or ValueError ---------------------------------


def lr_field(default: float) -> Any:
    """An attrs field for a learning rate: a number of at least 0, or a schedule, a function of the step."""
    return field(default=default, converter=_schedule_or(partial(number, "lr", least=0)))


def betas_field(default: Betas) -> Any:
    """An attrs field for Adam's betas, two decay rates in [0, 1), or a schedule, a function of the step."""
    return field(default=default, kw_only=True, converter=_schedule_or(partial(checked_betas, "betas")))


def _schedule_or(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An attrs converter for a setting that may be a schedule: a function of the step is kept, any other value
    passes through `check`."""
    return lambda value: value if callable(value) and not isinstance(value, type) else check(value)


def number_field(name: str, default: float, *, least: float = 0.0, **bounds: float) -> Any:
    """An attrs field for a number `name` of at least `least`. `bounds` may have `most`, the largest allowed
    value, and `below`, a limit that the value must be smaller than."""
    return field(default=default, kw_only=True, converter=partial(number, name, least=least, **bounds))


def eps_field(default: float) -> Any:
    """An attrs field for `eps`: 0 or a normal float32, as the kernel flushes subnormal values to 0."""

    def converted(value: Any) -> float:
        if 0.0 < (eps := number("eps", value, least=0)) < rules.SMALLEST_NORMAL:
            refuse("eps", repr(value), "a float32 of at least 1.2e-38, or 0", "pass such as 1e-8")
        return eps

    return field(default=default, kw_only=True, converter=converted)


def choice_field(name: str, default: str, choices: tuple[str, ...]) -> Any:
    """An attrs field for setting `name`, which takes one of the texts `choices`."""
    return field(default=default, kw_only=True, converter=partial(one_of(choices), name))


def _decay(value: Any) -> WhichDecay:
    if not callable(value):
        refuse("decay", repr(value), "(name, shape) -> bool", "pass such as matrices_only", TypeError)
    return value


def checked_betas(name: str, betas: Any, *, computed: bool = False) -> Betas:
    """Check that setting `name` is two decay rates in [0, 1), and return them as floats. Those that were `computed`
    for this call may be tensors."""
    try:
        beta1, beta2 = (number(name, beta, least=0.0, computed=computed) for beta in betas)
        if max(beta1, beta2) < 1.0:
            return beta1, beta2
    except (TypeError, ValueError, RuntimeError):
        pass
    refuse(name, repr(betas), "two numbers in [0, 1)", "pass such as (0.9, 0.999), or .tolist() of a tensor")


# ---- optimizers ----------------------------------------------------------------------------------------


@frozen
class KernelOptimizer(NamedSettings, ABC):
    """Base class of optimizers with a compiled kernel. It has the settings that they share and most methods
    of the interface `zfunc.optim.base.Optimizer`.

    A subclass adds the field `lr`; it changes the default of a shared setting by a field of the same name.
    """

    # Of a class in `by_name`: learning rate, weight decay and other arguments with which `zfunc train` begins; and
    # of the DeepSpeed type of this name, if there is one, the parameters that are arguments here.
    usual: ClassVar[tuple[float, float, Mapping[str, Any]]]
    deepspeed: ClassVar[str] = ""

    weight_decay: float = number_field("weight_decay", 0.0)
    decay: WhichDecay = field(default=decay_all, kw_only=True, converter=_decay)
    moments: Moments = choice_field("moments", "fp32", MOMENTS)

    @abstractmethod
    def state_format(self, group: int = 0) -> str:
        """The name of the state format of parameter group `group` in `zfunc.core.optimizer_state.STATE_FORMATS`."""

    @abstractmethod
    def checked_factors(self, decision: StepDecision, group: int) -> Any:
        """The scalars of the update of `group` under `decision`; ValueError if float32 cannot hold one."""

    def __attrs_post_init__(self) -> None:
        """Check the settings together, by the scalars of step 1; values of schedules are checked at each step."""
        if not callable(self.lr) and not callable(getattr(self, "betas", None)):
            self.factors(1)

    def factors(self, step: int) -> dict[str, Any]:
        """The optimizer's learning rate `lr` in step `step`, counted from 1, and its `betas` if it has some.

        Raises TypeError or ValueError if a schedule returns another type, or a value that float32 cannot hold.
        """
        lr, betas = self.lr, getattr(self, "betas", None)
        factors = {
            "lr": number(f"lr at step {step}", lr(step), least=0, computed=True) if callable(lr) else lr
        }
        if callable(betas):
            factors["betas"] = checked_betas(f"betas at step {step}", betas(step), computed=True)
        elif betas is not None:
            factors["betas"] = betas
        self.checked_factors(StepDecision(False, 1.0, step, factors), 0)
        return factors

    def describe(self) -> dict[str, Any]:
        """The optimizer's settings that are constant over all steps, by name, as JSON values."""
        values = {x.name: getattr(self, x.name) for x in fields(cast("Any", type(self)))}
        constant = {name: x for name, x in values.items() if name not in UNDESCRIBED}
        return {name: [*x] if isinstance(x, tuple) else x for name, x in constant.items()}

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """The number of a parameter's group: 0 with weight decay, 1 without."""
        return int(not self.decay(name, shape))

    def with_moments(self, moments: Moments, *, split_master: bool) -> Self:
        """A copy of the optimizer with its state in format `moments`. With "fp32" the master weights stay
        whole, whatever `split_master` says.

        A high half that equals the rounded bf16 copy needs 33 bits in all; only Adam has a spare bit, a sign.
        """
        del split_master
        return evolve(self, moments=moments)  # pyright: ignore

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int = 0
    ) -> dict[str, Tensor]:
        """Convert the buffers `state` from `state_format` to the format of `group`. Raises CheckpointError
        for a format of another optimizer.

        Weights are exact; moments are converted by way of fp32 and rounded as update number `step` would.
        """
        from zfunc.optim.formats import pack, unpack_moments, unpack_weights

        wanted = self.state_format(group)
        if owner_of(state_format) != owner_of(wanted):
            raise CheckpointError(
                f"got optimizer state in the format {state_format!r}, expected {wanted!r}, this program's: load it "
                "with the optimizer that saved it, or pass its parameters to init(program, params=...)"
            )
        packed = pack(unpack_weights(state), unpack_moments(state, state_format), wanted, step)
        return {x.name: packed[x.name] for x in STATE_FORMATS[wanted]}


class Elementwise(KernelOptimizer):
    """Base class of optimizers whose rule treats each element alone. A subclass is a frozen attrs class with
    a field `lr` and a method `update`, which computes in float32 for any format of the state."""

    state: ClassVar[tuple[str, ...]] = ()
    unsigned: ClassVar[tuple[str, ...]] = ()  # those of them that are never below 0
    matrix: ClassVar[bool] = False  # whether an update needs all of a matrix
    kernel: ClassVar[str | None] = None  # the rule's name in the compiled kernel
    decoupled: bool = False  # whether weight decay is

    @abstractmethod
    def update(self, o: Operations, k: Factors, g: Any, *moments: Any) -> tuple[Any, ...]:
        """The optimizer's rule: from gradient `g` and the moments, compute the change of the weights and the
        new moments. `k` has the step's scalars; only the operations in `o` and + - * / may be used."""

    @abstractmethod
    def scalars(self, step: int, lr: float, **factors: Any) -> dict[str, float]:
        """The scalars of step `step`, counted from 1, for the rule `update`: some of rate, keep, add, look_keep,
        look_add, keep_sq, add_sq, root_scale, eps and initial, the fields of `zfunc.optim.rules.Factors`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "update" in cls.__dict__ and "kernel" not in cls.__dict__:
            cls.kernel = None  # a rule of its own is not what its base's kernel computes
        if not cls.state or not cls.kind():
            return
        formats = formats_of(cls.kind(), cls.state, cls.unsigned, matrix=cls.matrix)
        name = f"{cls.__module__}.{cls.__qualname__}"
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
        """The prefix of the names of this optimizer's state formats, such as "lion" of "lion-8bit"."""
        return cls.__name__.lower()

    def state_format(self, group: int = 0) -> str:
        """The name of the state format of parameter group `group` in `zfunc.core.optimizer_state.STATE_FORMATS`."""
        del group
        return f"{self.kind()}-{self.moments}"

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of `numel` parameters (elements) allocates.

        These are for gradient, new moments and a rule's temporaries in fp32, and fp32 copies of compact state.
        """
        n, rows = (
            min(round_up(numel, ALIGNMENT), rules.PIECE),
            7 if self.state_format().endswith("fp32") else 10,
        )
        return n * 4 * rows + n // ALIGNMENT * 96 + (1 << 15)  # per block, and what the allocator rounds up

    def host_update(
        self, state: Any, grad: Any, decision: StepDecision, *, group: int, shape: Any = None, **how: Any
    ) -> None:
        """Update consecutive parameters of `group` in host memory, as `Optimizer.host_update`; `how` goes to
        `updates.host_update_`. `shape` is for subclasses."""
        from zfunc.optim.updates import host_update_

        host_update_(self.rule_step(decision, group, shape), state, grad, **how)

    def gathers_calls(self, group: int) -> bool:
        """Whether `host_update` can collect kernel calls in a list, `calls=`: not if a subclass overrides
        it."""
        del group
        return type(self).host_update is Elementwise.host_update

    def device_update(
        self, state: Any, grad: Any, decision: StepDecision, *, group: int, shape: Any = None, **how: Any
    ) -> None:
        """Update consecutive parameters of `group` in place on the tensors' device, with the bits of
        `host_update`; `how` goes to `updates.device_update_`. `shape` is for subclasses."""
        from zfunc.optim.updates import device_update_

        device_update_(self.rule_step(decision, group, shape), state, grad, **how)

    def rule_step(self, decision: StepDecision, group: int, shape: tuple[int, ...] | None = None) -> RuleStep:
        """The rule of parameter group `group` together with the scalars of the update that `decision`
        decided. `shape` is for subclasses."""
        del shape
        factors = self.checked_factors(decision, group)
        decay: Decay = "none" if not factors.decay else "decoupled" if self.decoupled else "l2"
        return RuleStep(self.rule, self.state_format(group), factors, decision.number, decay)

    @property
    def rule(self) -> Rule:
        """The optimizer's element-wise rule: its update, and its name in the compiled kernel."""
        return Rule(self.update, self.state, self.kernel)

    def checked_factors(self, decision: StepDecision, group: int) -> Factors:
        """The scalars of an update of `group` (1: no weight decay); ValueError if float32 cannot hold one."""
        scale = number("grad_scale", decision.grad_scale, computed=True)
        decay = 0.0 if group else self.weight_decay
        scalars = {
            "decay": decision.factors["lr"] * decay if self.decoupled else decay,
            **self.scalars(decision.number, **decision.factors),
        }
        for name, value in scalars.items():
            if name not in Factors._fields[2:]:
                got, known = f"the number {name!r}", f"some of {', '.join(Factors._fields[3:])}"
                refuse(f"{type(self).__name__}.scalars", got, known, "name it as one of them", TypeError)
            number(f"{type(self).__name__}'s settings (as {name})", value, computed=True)
        return Factors(scale, grad_floor_of(scale), **scalars)
