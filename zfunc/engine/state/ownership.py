"""Who may use the buffers of a State: fresh, donated to a step, or lost; which deferred updates they lack."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from attrs import define

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Region
from zfunc.errors import AbandonedCalls, DonatedStateError, LaneTimeout, NonFiniteError


@define(eq=False)
class Ownership:
    """The owner of a State's buffers: the State of this `generation`, or none if they are `lost`, with the reason.

    `deferred` is the decision of an update that is still to be made: of all but the `updated` buckets, and of the
    moving averages of all but the `averaged` ones.
    """

    generation: int = 0
    lost: str = ""
    deferred: StepDecision | None = None
    updated: frozenset[int] = frozenset()
    averaged: frozenset[int] = frozenset()

    def check(self, generation: int, step: int, action: str) -> None:
        """Raise DonatedStateError unless the State of this generation may use the buffers for `action`."""
        if self.lost:
            raise DonatedStateError(f"{action}: this state is gone: {self.lost}")
        if generation != self.generation:
            raise DonatedStateError(
                f"{action}: got a state that an earlier train_step consumed (step {step}), expected the one it "
                "returned: write `state, metrics = zfunc.train_step(program, state, batch)`"
            )

    def settle(self, name: str, decision: StepDecision, norm: float, *, defers: bool) -> None:
        """Record what a step that has ended decided: with `defers` its update is still to be made.

        Raises NonFiniteError if its updates did not wait for the norm of a gradient that is not finite.
        """
        if not math.isfinite(norm) and not decision.skip:
            self.lost = f"{name} had a gradient norm of {norm}, seen only after the updates"
            raise NonFiniteError(
                f"{name}: got a gradient norm of {norm} with a loss of {decision.loss}, expected finite numbers; "
                "without clipping the updates do not wait for the norm, so this state is gone. Go on from an "
                "earlier copy of the parameters, with clip_norm: then such a step is refused unharmed"
            )
        if defers and not decision.skip:
            self.deferred = decision

    def take_back(self) -> None:
        """The State before a step that changed nothing owns the buffers again."""
        self.generation -= 1

    @contextmanager
    def running(
        self, name: str, ops: Sequence[Op], *, defers: bool, donated: bool, way_on: str
    ) -> Iterator[dict[int, bool]]:
        """A context in which `ops` run on the buffers: `donated` to the next State, or for the one that has them.

        With `defers`, the operations before the decision make the deferred updates of the step before.

        Yields a dict for the operations that have started, and whether they have ended. After a failure the State
        owns the buffers again, unless an update of this step had begun, or a deferred one had not ended. What is
        left of deferred updates is made later.
        """
        started: dict[int, bool] = {}
        self.generation += donated
        self.lost = f"{name} did not finish" if donated else ""
        try:
            yield started
        except (LaneTimeout, AbandonedCalls) as error:
            self.lost = f"{name} was given up while a lane was still busy ({error})"
            raise
        except BaseException as error:
            if update := self._unfinished(ops, started, defers=defers):
                why = f"({type(error).__name__}: {error}). {way_on}"
                self.lost = f"{name} failed after {update} had begun to update it {why}"
            else:
                self.generation -= donated
                self.lost = ""
            raise
        self.lost, self.deferred, self.updated, self.averaged = "", None, frozenset(), frozenset()

    def _unfinished(self, ops: Sequence[Op], started: Mapping[int, bool], *, defers: bool) -> str:
        """The first update after which the State cannot be used again, or ""; records deferred ones that ended.

        Of a deferred update only that of the optimizer's state and averages counts: copies to devices are repeated.
        """
        decide = next((i for i, op in enumerate(ops) if op.writes == (Region("decision"),)), len(ops))
        late = decide if defers else 0  # operations before are of the deferred updates
        unfinished = [i for i in started if i >= late and any(r.trained for r in ops[i].writes)]
        by_bucket: dict[tuple[str, int], list[int]] = {}  # an update, and what writes its result to the disk
        for i in range(late if self.deferred is not None else 0):
            for role in {r.role for r in ops[i].writes} & {"state", "ema"}:
                by_bucket.setdefault((role, ops[i].index[0]), []).append(i)
        begun = {key: own for key, own in by_bucket.items() if any(i in started for i in own)}
        ended = {key for key, own in begun.items() if all(started.get(i) for i in own)}
        self.updated |= {b for role, b in ended if role == "state"}
        self.averaged |= {b for role, b in ended if role == "ema"}
        unfinished += [i for key in begun.keys() - ended for i in begun[key] if i in started]
        return ops[min(unfinished)].name if unfinished else ""
