"""The settings of a training step: each is one field, with its default, its check, and help that names the unit.

`zfunc.compile` and `zfunc.plan` take them by name, commands get their flags from them, and a program keeps them. A
new setting is one field here and the code where it has an effect.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import Any, Literal, TypeVar, get_args

from attrs import evolve, field, fields, fields_dict, frozen

from zfunc.core.dtypes import PRECISIONS, Precision
from zfunc.core.graph import Graph
from zfunc.core.layout import Layout, Parameter, make_layout, part_size, resident_buckets
from zfunc.core.optimizer_state import MOMENTS, Moments
from zfunc.core.plan import Plan
from zfunc.errors import did_you_mean
from zfunc.options import AUTO, Check, Option, not_negative, one_of, ratio, share
from zfunc.values import number, of_type, truth, whole

Recompute = Literal["all", "none", "min-cut"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
Schedule = Callable[[Graph], Plan]
Function = TypeVar("Function", bound=Callable[..., Any])

MOST_MICRO_BATCHES = 1 << 16  # each is planned, operation by operation
WIDTH = 116  # columns of a docstring
OPTION, CHECK, HELP = "option", "check", "help"  # keys of a field's metadata

_names = ", ".join
_count = partial(whole, least=1)


def _setting(
    default: Any,
    check: Check,
    group: str,
    help: str,
    detail: str = "",
    *,
    typed: Check | None = None,
    note: str = "",
    **more: Any,
) -> Any:
    """A field. `typed` checks what is typed for it, where that is not the value itself; `more` is of its Option.

    To `help` documentation adds `detail`, and the help of commands `note`. One without a `group` has no flag.
    """
    option = Option(group, help + note, typed or check, **more)
    told = f"{help}. {detail}" if detail else f"{help}."
    return field(default=default, metadata={OPTION: option, CHECK: check, HELP: told})


def _schedule(name: str, value: Any) -> Any:
    """A name, or something callable; a class is called without arguments."""
    if isinstance(value, type):
        try:
            return value()
        except TypeError as error:
            raise TypeError(
                f"{name}: got the class {value.__name__}, expected one that can be made without arguments, or an "
                f"object: {error}"
            ) from error
    if not isinstance(value, str) and not callable(value):
        raise TypeError(f"{name}: got a {type(value).__name__}, expected something callable Graph -> Plan")
    return value


def _stage(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in (1, 2):
        raise ValueError(f"{name}: got {value!r}, expected 1 or 2, as ZeRO numbers them")
    return value


def _offload_ratio(name: str, value: Any) -> float | str:
    if isinstance(value, str) and value == AUTO:
        return AUTO
    hint = "pass the share of the optimizer's state that is on the host, such as 0.75"
    return number(name, value, least=0.0, most=1.0, hint=hint)


def _clip_as_typed(typed: float) -> float | None:
    return typed or None


@frozen(kw_only=True)
class StepSettings:
    """How a step is trained. Values are checked at birth; see `zfunc.compile` for what each means.

    >>> StepSettings(micro_batches=2).bucket_size
    50000000
    >>> StepSettings(micro_batches=0)
    Traceback (most recent call last):
    ValueError: micro_batches: got 0, expected a whole number of at least 1 and at most 65536: pass 1 or more
    """

    precision: Precision = _setting(
        "bf16",
        one_of(PRECISIONS),
        "how it runs",
        f"of parameters and gradients on the device: {_names(PRECISIONS)}",
        "Master weights are fp32 always; fp16 trains with dynamic loss scaling.",
    )
    schedule: str | Schedule = _setting(
        "Overlapped",
        _schedule,
        "how it runs",
        "what runs when, and on which lane",
        "The name of a class in `zfunc.schedules`, or anything callable `Graph -> Plan`.",
    )
    recompute: Recompute = _setting(
        "all",
        one_of(RECOMPUTE),
        "how it runs",
        f"what a block forgets between forward and backward: {_names(RECOMPUTE)}",
        "With all, a segment keeps only its input; with none, all that autograd would; with min-cut, the residuals "
        "that are cheapest to keep.",
    )
    compile_segments: bool = _setting(
        False, truth, "how it runs", "put the blocks through torch.compile", note="; needs a compiler"
    )
    micro_batches: int = _setting(
        1,
        partial(_count, most=MOST_MICRO_BATCHES),
        "step",
        "equal parts of a batch; their gradients are accumulated",
        f"In fp32, on the host. {MOST_MICRO_BATCHES:,} at most.",
    )
    clip_norm: float | None = _setting(
        None,
        partial(number, positive=True, hint="pass None not to clip"),
        "step",
        "largest global gradient norm",
        "None does not clip. As `torch.nn.utils.clip_grad_norm_`; no update starts before the norm is known.",
        note="; 0 does not clip",
        typed=not_negative,
        name="clip",
        read=_clip_as_typed,
    )
    stage: Literal[1, 2] = _setting(
        2,
        _stage,
        "",
        "of ZeRO: 2 reduces each micro-batch's gradient as it comes, 1 adds up on the device and reduces once",
        "The sum of 1 is in full, in the compute precision.",
    )
    moments: Moments = _setting(
        "fp32",
        one_of(MOMENTS),
        "offload",
        f"what the host keeps of Adam's moments: {_names(MOMENTS)}; the less, the faster the host's step",
        "It may be set here or in `zfunc.AdamW`.",
    )
    bucket_size: int = _setting(
        50_000_000, _count, "offload", "elements that are moved and updated as a unit"
    )
    grad_slots: int = _setting(
        2,
        _count,
        "offload",
        "buckets of gradients that the device has room for",
        "Each slot is as large as the largest bucket.",
    )
    host_slots: int = _setting(2, _count, "offload", "buckets on their way, in pinned memory, each way")
    offload_ratio: float | Literal["auto"] = _setting(
        1.0,
        _offload_ratio,
        "offload",
        "share of the optimizer's state on the host, 0 to 1; the rest stays on the device",
        'In whole buckets, of which there are more then. "auto", with `example`: as much stays as fits.',
        typed=ratio,
        read=share,
        metavar=f"X|{AUTO}",
    )
    speculate: int = _setting(
        0,
        partial(whole, least=0),
        "offload",
        "buckets that are updated before the norm is known, with clipping or fp16; same result, more memory",
        "The update goes into a shadow, as if nothing were clipped or skipped; it is made again if that was wrong.",
    )
    delay_from: int | None = _setting(
        None,
        _count,
        "offload",
        "from this step on the host applies each gradient a step late, beside the next; it changes what is trained",
        "`zfunc.flush` applies the last one. What stays on the device is not delayed.",
        note=" (default: never)",
    )

    def __attrs_post_init__(self) -> None:
        """Check every field, and what excludes what."""
        for f in fields(StepSettings):
            value = getattr(self, f.name)
            if value is None and f.name == "schedule":
                value = f.default
            if value is not None or f.default is not None:
                object.__setattr__(self, f.name, f.metadata[CHECK](f.name, value))
        if self.compile_segments and self.recompute == "none":
            raise ValueError(
                "compile_segments: got it with recompute='none', expected all or min-cut: leave one out"
            )
        if self.speculate and self.delayed:
            raise ValueError(
                f"speculate: got {self.speculate} with delay_from={self.delay_from}, expected one of the two: a "
                "delayed update waits for no norm. Leave speculate out"
            )

    @property
    def delayed(self) -> bool:
        """Whether gradients are applied a step late, from some step on."""
        return self.delay_from is not None

    @property
    def waits_for_norm(self) -> bool:
        """Whether no parameter is updated before the norm of the whole gradient is known."""
        return self.clip_norm is not None or self.precision == "fp16"

    @property
    def schedule_name(self) -> str:
        """The schedule as people call it."""
        return self.schedule if isinstance(self.schedule, str) else type(self.schedule).__name__


def settings_with(settings: StepSettings | None, changes: Mapping[str, Any]) -> StepSettings:
    """`settings`, or the defaults, with `changes` by name. Raises TypeError for a name that is no setting."""
    settings = StepSettings() if settings is None else settings
    of_type(
        "settings",
        settings,
        StepSettings,
        "a zfunc.core.settings.StepSettings: pass one, or settings by name",
    )
    known = list(fields_dict(StepSettings))
    for name in changes:
        if name not in known:
            raise TypeError(
                f"{name}: got no setting of a step, expected one of {_names(known)}{did_you_mean(name, known)}"
            )
    return evolve(settings, **changes)


def takes_settings(**defaults: Any) -> Callable[[Function], Function]:
    """A decorator: signature and docstring of a function whose `**changes` are settings list each of them.

    `defaults` are those of the function where they are not the settings' own. The list is where the docstring has
    `{settings}`.
    """

    def decorate(function: Function) -> Function:
        given = inspect.signature(function)
        own = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=f.type)
            for f in fields(StepSettings)
            for default in (defaults.get(f.name, f.default),)
        ]
        function.__signature__ = given.replace(parameters=[*own, *taken])  # type: ignore[attr-defined]
        function.__doc__ = (function.__doc__ or "").replace("{settings}", "\n".join(_list(defaults)).strip())
        return function

    return decorate


def _list(defaults: Mapping[str, Any]) -> Iterator[str]:
    for f in fields(StepSettings):
        default = defaults.get(f.name, f.default)
        told = f"{default:,}" if type(default) is int else repr(default)
        yield fill(
            f"- `{f.name}` (default {told}): {f.metadata[HELP]}",
            WIDTH,
            initial_indent="    ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        )


# --- what a spec is made of ----------------------------------------------------------------------------------


def lay_out(parameters: Sequence[Sequence[Parameter]], settings: StepSettings, world: int) -> Layout:
    """The layout of the segments' parameters: buckets of the size set; smaller where only a share is offloaded."""
    trainable = {p.name: p.numel for own in parameters for p in own if p.trainable}
    size = part_size(settings.bucket_size, sum(trainable.values()), settings.offload_ratio)
    return make_layout(parameters, bucket_size=size, world=world)


def in_buckets(layout: Layout, settings: StepSettings) -> dict[str, Any]:
    """The fields of a StepSpec that say what is where, and when it is updated."""
    share_on_host = 1.0 if settings.offload_ratio == AUTO else settings.offload_ratio
    return {
        "layout": layout,
        "grad_slots": settings.grad_slots,
        "host_slots": settings.host_slots,
        "resident": resident_buckets(layout, share_on_host),
        "shadows": settings.speculate,
        "delayed": settings.delayed,
    }
