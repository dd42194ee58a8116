"""Several optimizers in one model: `groups` gives each parameter that of the first rule that matches its name.

An update of a group has the bits of its optimizer alone. A bucket of the layout has parameters whose states are of
one format, so groups that differ in their settings alone share buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from attrs import evolve, field, frozen

from zfunc.core.decision import StepDecision
from zfunc.core.layout import Parameter
from zfunc.core.optimizer_state import Moments
from zfunc.errors import refuse
from zfunc.optim.base import Optimizer, gathers_calls, has_moments

Rule = str | Callable[[str, tuple[int, ...]], bool]


def groups(*members: tuple[Rule, Optimizer] | Optimizer) -> GroupedOptimizer:
    """Make one optimizer of several: `groups((rule, optimizer), ..., default)`.

    A rule is a glob over parameters' full names ("head.*") or a function `(name, shape) -> bool`. A parameter
    belongs to the optimizer of the first rule that matches, else to the default, whose learning rate the
    metrics show.

    Raises TypeError for an invalid rule or optimizer, ValueError without a default and for optimizers with
    different `moments`. `compile` raises ValueError for a rule that matches nothing, and for an optimizer
    without parameters.

    >>> from zfunc import SGD, AdamW, groups
    >>> optimizer = groups(("head.*", AdamW(1e-3)), ("*.bias", SGD(1e-2)), AdamW(1e-5))
    >>> [optimizer.group(name, (8,)) for name in ("head.bias", "block.bias", "block.weight")]
    [0, 1, 2]
    """
    if not members or isinstance(members[-1], tuple):
        got = "no optimizer for the parameters that no rule matches"
        refuse("groups", got, "one at the end", "pass groups((rule, optimizer), ..., default)")
    pairs: list[Any] = [*members[:-1], ("*", members[-1])]
    for n, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            got = f"{type(pair).__name__} in place {n + 1}"
            refuse("groups", got, "(rule, optimizer), and a default at the end", "pass a pair", TypeError)
        rule, optimizer = pair
        if not isinstance(rule, str) and (not callable(rule) or isinstance(rule, type)):
            expected = "a glob over names such as 'head.*', or a function (name, shape) -> bool"
            refuse("groups", f"the rule {rule!r}", expected, "pass one of them", TypeError)
        if isinstance(optimizer, type | GroupedOptimizer) or not isinstance(optimizer, Optimizer):
            expected = "an optimizer of zfunc's, or one of your own"
            refuse("groups", repr(optimizer), expected, "pass such as zfunc.AdamW(lr=...)", TypeError)
    return GroupedOptimizer(*zip(*pairs, strict=True))


def _of_member(method: str) -> Any:
    """A method of GroupedOptimizer that calls `method` of the optimizer of the given parameter group."""

    def call(self: GroupedOptimizer, *args: Any, group: int, **given: Any) -> Any:
        own, n = divmod(group, len(self.optimizers))
        args = tuple(_decision(x, n) if isinstance(x, StepDecision) else x for x in args)
        return getattr(self.optimizers[n], method)(*args, group=own, **given)

    return call


@frozen
class GroupedOptimizer:
    """The optimizer that `groups` makes: several optimizers by rules on parameter names, the default last."""

    rules: tuple[Rule, ...]
    optimizers: tuple[Optimizer, ...] = field()

    @optimizers.validator  # pyright: ignore
    def _check_moments(self, _: object, optimizers: tuple[Optimizer, ...]) -> None:
        formats = {x.moments: type(x).__name__ for x in optimizers if has_moments(x)}
        if len(formats) > 1:
            got = " and ".join(f"{name}(moments={moments!r})" for moments, name in formats.items())
            refuse("groups", got, "one format", "pass the same `moments` to each")

    def check_parameters(self, parameters: Iterable[Parameter]) -> None:
        """Raise ValueError unless every rule matches a parameter, and every group has one that is trained."""
        known = {p.name: p for p in parameters}.values()
        found = {self._member(p.name, p.shape) for p in known if p.trainable}
        for n, rule in enumerate(self.rules):
            if n not in found:
                matched = [p.name for p in known if _matches(rule, p.name, p.shape)]
                why = f"whose parameters, such as {', '.join(matched[:1])!r}, are frozen or match an earlier rule"
                got = f"the rule {rule!r}, {why if matched else 'which matches no parameter'}"
                names = ", ".join(repr(p.name) for p in [*known][:3])
                do = f"move it to the front or leave it out; names are such as {names}"
                refuse("groups", got, "one with a parameter for its optimizer, the default's too", do)

    def _member(self, name: str, shape: tuple[int, ...]) -> int:
        return next(n for n, rule in enumerate(self.rules) if _matches(rule, name, shape))

    @property
    def moments(self) -> Moments:
        """The state format of all member optimizers that have a choice of formats."""
        return next((x.moments for x in self.optimizers if has_moments(x)), "fp32")

    def with_moments(self, moments: Moments, *, split_master: bool) -> GroupedOptimizer:
        """A copy with `moments`, `split_master` for all members. Raises ValueError if one has no such choice."""
        without = [type(x).__name__ for x in self.optimizers if not has_moments(x)]
        if moments != "fp32" and without:
            got = f"{moments!r} with {without[0]}, which has no choice"
            refuse("moments", got, "zfunc's own optimizers", "leave it out")
        changed = (
            x.with_moments(moments, split_master=split_master) if has_moments(x) else x
            for x in self.optimizers
        )
        return evolve(self, optimizers=tuple(changed))

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """The number of a parameter's group, distinct for each member optimizer and each of its own
        groups."""
        n = self._member(name, shape)
        return n + len(self.optimizers) * self.optimizers[n].group(name, shape)

    def state_format(self, group: int) -> str:
        """The name of `group`'s state format in `zfunc.core.optimizer_state.STATE_FORMATS`."""
        own, n = divmod(group, len(self.optimizers))
        return self.optimizers[n].state_format(own)

    def factors(self, step: int) -> dict[str, Any]:
        """The scalars of update number `step` of every member optimizer, by names such as "2.lr" (member 2);
        "lr" is the default optimizer's."""
        each = [x.factors(step) for x in self.optimizers]
        named = {f"{n}.{name}": value for n, own in enumerate(each) for name, value in own.items()}
        return {"lr": each[-1]["lr"], **named}

    def describe(self) -> dict[str, Any]:
        """The rules, and of each member optimizer the settings that are constant over all steps, as JSON values."""
        shown = [x if isinstance(x, str) else getattr(x, "__name__", "a function") for x in self.rules]
        each = zip([*shown[:-1], "default"], self.optimizers, strict=True)
        return {"groups": [{"rule": rule, "optimizer": type(x).__name__, **x.describe()} for rule, x in each]}

    def gathers_calls(self, group: int) -> bool:
        """Whether the member optimizer of `group` takes `calls=` in `host_update`, to collect kernel calls in."""
        own, n = divmod(group, len(self.optimizers))
        return gathers_calls(self.optimizers[n], own)

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that any member's `device_update` of `numel` elements allocates."""
        return max(x.device_workspace(numel) for x in self.optimizers)

    # The rest is up to the group's optimizer, with its own groups, and its own factors of a decision.
    host_update = _of_member("host_update")
    device_update = _of_member("device_update")
    direction = _of_member("direction")
    orthogonalize = _of_member("orthogonalize")
    update_work = _of_member("update_work")
    convert_state = _of_member("convert_state")


def _matches(rule: Rule, name: str, shape: tuple[int, ...]) -> bool:
    return fnmatchcase(name, rule) if isinstance(rule, str) else bool(rule(name, shape))


def _decision(decision: StepDecision, n: int) -> StepDecision:
    """A copy of `decision` with the factors of member optimizer number `n` alone, such as "lr" for "2.lr"."""
    prefix = f"{n}."
    own = {name.removeprefix(prefix): x for name, x in decision.factors.items() if name.startswith(prefix)}
    return evolve(decision, factors=own)
