"""Who may use the memory of a training State: one State at a time, and which updates of it a step has begun."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from attrs import define

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Region
from zfunc.errors import AbandonedCalls, DonatedStateError, LaneTimeout, NonFiniteError


@define(eq=False)
class Ownership:
    """Which State may use a set of buffers: the one of this `generation`, or none if they are `lost`, which
    has the reason. A step passes buffers on to the next State.

    `deferred` is the decision of an update that is still to be made, except for the buckets in `updated`, and
    for the moving averages of the buckets in `averaged`.
    """

    generation: int = 0
    lost: str = ""
    deferred: StepDecision | None = None
    updated: frozenset[int] = frozenset()
    averaged: frozenset[int] = frozenset()

    def check(self, generation: int, step: int, action: str) -> None:
        """Raise DonatedStateError, for the call `action`, unless the State of `generation`, at `step`
        updates, owns the buffers."""
        if self.lost:
            raise DonatedStateError(f"{action}: this state is gone: {self.lost}")
        if generation != self.generation:
            raise DonatedStateError(
                f"{action}: got a state that an earlier train_step or replace consumed (step {step}), expected the "
                "one it returned: write `state, metrics = zfunc.train_step(program, state, batch)`, or "
                "`state = zfunc.replace(program, state, params)`"
            )

    def settle(self, name: str, decision: StepDecision, norm: float, *, defers: bool) -> None:
        """Record the `decision` of the step called `name`, which has ended; with `defers`, its update is
        still to be made.

        Raises NonFiniteError for a gradient `norm` that is not finite if the updates did not wait for it.
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

    def undo_donation(self) -> None:
        """Return the buffers to the State from before the last step, which has changed nothing in them."""
        self.generation -= 1

    @contextmanager
    def running(
        self, name: str, ops: Sequence[Op], *, defers: bool, donated: bool, resume_hint: str
    ) -> Iterator[dict[int, bool]]:
        """A context in which operations `ops` run on a State's buffers, which are `donated` to the next
        State, or changed in place.

        With `defers`, the operations before the decision make the deferred updates of the step before.

        Yields a dict that the caller fills: by index, the operations that have started, and whether they have
        ended. After a failure the old State owns the buffers again, unless an update of this step has begun,
        or a deferred one has begun and not ended; deferred updates not begun are made later. Errors quote
        `name` and `resume_hint`.
        """
        started: dict[int, bool] = {}
        self.generation += donated
        self.lost = f"{name} did not finish" if donated else ""
        try:
            yield started
            # An interrupt here comes after deferred updates, which must not be made again.
            self.lost, self.deferred, self.updated, self.averaged = "", None, frozenset(), frozenset()
        except (LaneTimeout, AbandonedCalls) as error:
            self.lost = f"{name} was given up while a lane was still busy ({error})"
            raise
        except BaseException as error:
            if update := self._unfinished(ops, started, defers=defers):
                why = f"({type(error).__name__}: {error}). {resume_hint}"
                self.lost = f"{name} failed after {update} had begun to update it {why}"
            else:
                self.generation -= donated
                self.lost = ""
            raise

    def _unfinished(self, ops: Sequence[Op], started: Mapping[int, bool], *, defers: bool) -> str:
        """The name of the first update that has begun and makes the State unusable after a failure; "" if
        there is none. Also records the deferred updates that have ended.

        A deferred update has ended once its optimizer state or average is written: copies to devices are
        repeated.
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
