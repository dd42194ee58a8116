"""How far a training is, besides its State: seconds, losses, and how many steps there will be.

TrainingClock is all that the loop carries from step to step. It is saved in every checkpoint, so a resumed training
counts as if it had never stopped.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import evolve, frozen

from zfunc.checkpoint.strict_json import MAX_INT, JsonNode
from zfunc.train.settings import TrainSettings

WARM_STEPS = 3  # steps of a process that trace and compile; also how many to time before the pace is reviewed
LOSSES = 50  # last steps, whose mean loss is in the summary
KEY = "train"  # in a checkpoint's extra
# Settings that change which steps are taken; `load` itself compares a checkpoint's optimizer.
# fmt: off
DECIDING = (
    "data", "packing", "dtype", "tokenizer", "hf", "lora_alpha", "vocab_size", "seq_length", "dropout",
    "batch_size", "micro_batches", "seed", "lr", "lr_schedule", "warmup", "steps", "seconds",
)
# fmt: on


@frozen
class StepBudget:
    """How many steps there will be: those requested, or those that fit into --seconds if they are fewer.

    The pace is that of warm steps, with the evaluations between them. It is reviewed after 5 % of the seconds, once
    there are three warm steps or one that took 5 % of the seconds; then after every further 10 %. A pure function
    of steps and seconds, so tests need no clock.
    """

    settings: TrainSettings
    total: int | None  # None while nothing is measured and no steps are requested
    reviews: int = 0  # of the pace: 10ths of the seconds, from 5 % on, that had passed at the last one
    warm_steps: int = 0  # of all sessions
    cold_seconds: float = 0.0  # of the other steps, of all sessions
    warmup_left: int = WARM_STEPS  # steps of this session until they are warm
    cold_until: float = 0.0  # when the last step before that ended

    def after(self, step: int, elapsed: float) -> "StepBudget":
        """The budget after `step`, `elapsed` seconds into the training. To be called after each step."""
        if self.warmup_left:
            cold = self.cold_seconds + elapsed - self.cold_until
            return evolve(self, cold_seconds=cold, warmup_left=self.warmup_left - 1, cold_until=elapsed)
        return evolve(self, warm_steps=self.warm_steps + 1).reviewed(step, elapsed)

    def reviewed(self, step: int, elapsed: float) -> "StepBudget":
        """The budget with the steps that will fit, if a review of the pace is due."""
        requested, seconds, pace = self.settings.steps, self.settings.seconds, self.seconds_per_step(elapsed)
        if seconds is None or not pace or elapsed >= seconds or step == requested:
            return self
        if self.warm_steps < WARM_STEPS and self.warm_steps * pace < 0.05 * seconds:
            return self
        fits, reached = int((seconds - elapsed) / pace), self.total is not None and step >= self.total
        # Past the last of fewer steps than requested, as many are added as still fit.
        due = fits > 0 if reached else elapsed >= seconds * (0.05 + 0.1 * self.reviews)
        if not due:
            return self
        total = step + max(1, fits)
        total = min(total, requested or total)
        # A small change is not worth another learning rate: up to 5 % fewer steps, or 15 % more.
        if self.total is not None and not reached and 0.95 * self.total <= total <= 1.15 * self.total:
            total = self.total
        reviews = int((elapsed / seconds - 0.05) / 0.1) + 1
        return evolve(self, total=total, reviews=reviews)

    def seconds_per_step(self, elapsed: float) -> float | None:
        """The mean over warm steps, evaluations included. None before the first."""
        return (elapsed - self.cold_seconds) / self.warm_steps if self.warm_steps else None

    def seconds_left(self, step: int, elapsed: float) -> float | None:
        """Estimated seconds to the end; None if nothing bounds them yet."""
        bounds = [] if self.settings.seconds is None else [max(0.0, self.settings.seconds - elapsed)]
        if self.total is not None and (pace := self.seconds_per_step(elapsed)) is not None:
            bounds.append((self.total - step) * pace)
        return min(bounds, default=None)

    def end_reason(self, step: int, elapsed: float, *, stopping: str = "") -> str:
        """Why `step` is the last one, or "". `stopping` is the reason if there is no other."""
        if self.total is not None and step >= self.total:
            return "steps" if self.total == self.settings.steps else "seconds"
        if self.settings.seconds is not None and elapsed >= self.settings.seconds:
            return "seconds"
        return stopping


@frozen
class TrainingClock:
    """Time and losses of all sessions of a run."""

    budget: StepBudget
    elapsed: float = 0.0  # seconds, evaluations included
    skipped: int = 0  # steps, for an overflow
    losses: tuple[float, ...] = ()  # of the last LOSSES steps

    @classmethod
    def new(cls, settings: TrainSettings) -> "TrainingClock":
        """Before the first step."""
        return cls(StepBudget(settings, settings.steps))

    def stepped(self, loss: float, *, skipped: bool) -> "TrainingClock":
        """After a step."""
        losses = (*self.losses[1 - LOSSES :], loss)
        return evolve(self, losses=losses, skipped=self.skipped + skipped)

    def timed(self, step: int, elapsed: float) -> "TrainingClock":
        """After `step`, `elapsed` seconds into the training."""
        return evolve(self, elapsed=elapsed, budget=self.budget.after(step, elapsed))

    def extra(self, settings: TrainSettings, data: tuple[str, ...]) -> dict[str, Any]:
        """What a checkpoint keeps of it, in JSON's types. `data` is the description of the corpus."""
        budget = self.budget
        fields = {
            "settings": plain_settings(settings),
            "data": [_text(line) for line in data],
            "total": budget.total,
            "looks": budget.reviews,
            "counted": budget.warm_steps,
            "cold": budget.cold_seconds,
            "elapsed": self.elapsed,
            "skipped": self.skipped,
            "losses": [x if math.isfinite(x) else None for x in self.losses],
        }
        return {KEY: fields}


def restored_clock(extra: Mapping[str, Any], settings: TrainSettings, step: int) -> TrainingClock:
    """The clock in a checkpoint of `step`, to continue with `settings`.

    A checkpoint that `zfunc train` did not write has none: seconds count from here. Raises CheckpointError for
    values out of range.
    """
    if KEY not in extra:
        return TrainingClock.new(settings)
    kept = JsonNode(extra[KEY], f"extra.{KEY}").entries()
    zero = JsonNode(0, KEY)
    looks, counted, skipped = (kept.get(name, zero).integer() for name in ("looks", "counted", "skipped"))
    elapsed, cold = (kept.get(name, zero).number(0) for name in ("elapsed", "cold"))
    total = kept["total"].integer() if "total" in kept and kept["total"].value is not None else None
    losses = kept["losses"].items()[-LOSSES:] if "losses" in kept else ()
    budget = StepBudget(settings, total, looks, counted, cold if counted else elapsed, cold_until=elapsed)
    clock = TrainingClock(
        budget, elapsed, skipped, tuple(math.nan if x.value is None else x.number() for x in losses)
    )
    saved, now = _saved_settings(kept), plain_settings(settings)
    steps = "epochs" if settings.epochs is not None and settings.steps is None else "steps"  # not counted yet
    if all(saved.get(name) == now[name] for name in (steps, "seconds")):
        return clock
    budget = evolve(budget, total=settings.steps, reviews=0)  # the bounds have changed
    return evolve(clock, budget=budget.reviewed(step, elapsed) if step else budget)


def changed_settings(
    extra: Mapping[str, Any], settings: TrainSettings, data: tuple[str, ...]
) -> Iterator[str]:
    """What has changed, of DECIDING and the data, since a checkpoint was saved; both values of each."""
    if KEY not in extra:
        return
    kept, now = JsonNode(extra[KEY], f"extra.{KEY}").entries(), plain_settings(settings)
    saved = _saved_settings(kept)
    for name in DECIDING:
        if name in saved and saved[name] != now[name]:
            yield f"{name} {saved[name]!r} is now {now[name]!r}"
    before = kept["data"].value if "data" in kept else None
    if saved.get("data") == now["data"] and before is not None and before != [_text(line) for line in data]:
        yield f"the data {before!r} is now {list(data)!r}"


def _saved_settings(kept: Mapping[str, JsonNode]) -> dict[str, Any]:
    entries = kept["settings"].entries() if "settings" in kept else {}
    return {name: node.value for name, node in entries.items()}


def plain_settings(settings: TrainSettings) -> dict[str, Any]:
    """The settings in a checkpoint's types: paths and numbers of more than 64 bits are texts, tuples lists."""
    return {name: _plain(value) for name, value in attrs.asdict(settings).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path | str) or (isinstance(value, int) and abs(value) > MAX_INT):
        return _text(str(value))
    return [_plain(x) for x in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value


def _text(text: str) -> str:
    """Without what cannot be encoded, which a path may hold."""
    return text.encode(errors="replace").decode()
