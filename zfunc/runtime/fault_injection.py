"""Failures and delays on purpose, as values the executor is given: a failure at a rank, step and operation.

The invariant: a fault names an operation of the plan, so that the test which asks for it knows where the rank was;
`check_faults` refuses one that would never happen.
"""

import logging
import os
import re
import signal
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal, cast, get_args

from attrs import field, frozen, validators

from zfunc.core.plan import Plan
from zfunc.errors import did_you_mean
from zfunc.values import number, whole

log = logging.getLogger("zfunc")

Action = Literal["kill", "hang", "raise", "terminate"]
ACTIONS: tuple[Action, ...] = get_args(Action)
VARIABLE = "ZFUNC_FAULTS"
FORM = "rank=1,step=7,op=update[3],do=kill"
_FORM = re.compile(rf"rank=([0-9]{{1,18}}),step=([0-9]{{1,18}}),op=([^=\s]+),do=({'|'.join(ACTIONS)})")
_whole = validators.and_(validators.instance_of(int), validators.ge(0))


@frozen
class Jitter:
    """Seeded random delays of up to `seconds` before every operation, to expose races between lanes."""

    seed: int = field(default=0, converter=partial(whole, "Jitter: seed"))
    seconds: float = field(default=1e-3, converter=partial(number, "Jitter: seconds", least=0.0, most=60.0))


class InjectedFault(RuntimeError):  # noqa: N818
    """Raised by an injected fault whose action is "raise"."""


@frozen
class Fault:
    """A fault for tests: on `rank`, in step number `step`, just before operation `op` runs.

    `action` "kill" or "terminate" sends SIGKILL or SIGTERM to this process, "hang" never returns, "raise"
    raises InjectedFault.

    >>> print(Fault(rank=1, step=7, op="update[3]", action="kill"))
    rank=1,step=7,op=update[3],do=kill
    """

    rank: int = field(validator=_whole)
    step: int = field(validator=_whole)
    op: str
    action: Action = field(validator=validators.in_(ACTIONS))

    def __str__(self) -> str:
        """The fault as text that `parse_faults` reads."""
        return f"rank={self.rank},step={self.step},op={self.op},do={self.action}"

    def happen(self) -> None:
        """Carry out the fault in this process, and log the fault."""
        log.warning("fault injected: %s", self)
        if self.action == "raise":
            raise InjectedFault(f"{self.op}: got the injected fault {self}, expected to fail here")
        if self.action == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGTERM)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults from text, joined by `;`. Raises ValueError for any other text.

    >>> first, second = parse_faults("rank=0,step=2,op=pack[0,2,0],do=hang; rank=1,step=1,op=load[0],do=kill")
    >>> first.op, second.action
    ('pack[0,2,0]', 'kill')
    """
    return tuple(_parse(one.strip()) for one in text.split(";") if one.strip())


def from_environment(environment: Mapping[str, str] = os.environ) -> tuple[Fault, ...]:
    """The faults in the variable ZFUNC_FAULTS, or none. Raises ValueError as `parse_faults` does."""
    return parse_faults(environment.get(VARIABLE, ""))


def faults_at(faults: Iterable[Fault], rank: int, step: int) -> tuple[Fault, ...]:
    """The faults among `faults` that are of this rank and step.

    >>> faults_at(parse_faults("rank=1,step=7,op=update[3],do=kill"), rank=0, step=7)
    ()
    """
    return tuple(fault for fault in faults if (fault.rank, fault.step) == (rank, step))


def check_faults(faults: Iterable[Fault], plan: Plan) -> None:
    """Raise ValueError, with the nearest name, for a fault in an operation that `plan` does not have."""
    for fault in faults:
        if fault.op not in plan.graph.position:
            known = list(plan.graph.position)
            raise ValueError(
                f"fault {fault}: got the operation {fault.op!r}, expected one of the plan's "
                f"{len(known)}{did_you_mean(fault.op, known)}. Print the plan to see them"
            )


def _parse(text: str) -> Fault:
    if (match := _FORM.fullmatch(text)) is None:
        raise ValueError(
            f"{VARIABLE}: got {text!r}, expected a fault such as {FORM}, with do one of {', '.join(ACTIONS)}: "
            "write it so, and a ; between two"
        )
    rank, step, op, action = match.groups()
    return Fault(int(rank), int(step), op, cast("Action", action))
