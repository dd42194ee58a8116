"""How far a training has come, besides its State: seconds, losses, and how many steps there will be.

TrainingClock is all that the loop carries from one step to the next. It goes into every checkpoint, so a resumed
training counts as if it had never stopped.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, frozen

from zfunc.checkpoint.strict_json import MAX_INT, JsonNode
from zfunc.train.settings import TrainSettings

WARM_STEPS = (
    3  # first steps of a process: they trace and compile, and say nothing about the pace of the others
)
LOSSES = 50  # of the last steps, which the summary gives the mean of
KEY = "train"  # of what is kept here, in a checkpoint's extra
# Settings without which the same steps are not taken; `load` compares a checkpoint's optimizer.
# fmt: off
DECIDING = (
    "data", "dtype", "tokenizer", "hf", "vocab_size", "seq_length", "dropout", "batch_size", "micro_batches",
    "seed", "lr", "warmup", "steps", "seconds",
)
# fmt: on


@frozen
class StepBudget:
    """How many steps there will be: as many as requested, or as fit into the seconds where those are fewer.

    The pace is that of warm steps, evaluations between them included. It is judged after a twentieth of the
    seconds, but not before there were three warm steps, or one that took a twentieth of the seconds; then after
    every further tenth. A pure function of steps and seconds, so it is tested without a clock.
    """

    settings: TrainSettings
    total: int | None  # None: only the seconds are given, and nothing has been measured yet
    looks: int = 0  # tenths of the seconds, from a twentieth on, in which the pace was judged
    counted: int = 0  # warm steps, of all sessions
    cold: float = 0.0  # seconds of the steps that were not warm, of all sessions
    warming: int = WARM_STEPS  # steps of this session that are not warm and still to come
    last: float = 0.0  # when the last of those was over

    def after(self, step: int, elapsed: float) -> "StepBudget":
        """When `step` is over, `elapsed` seconds after the first began. To be called after each step."""
        if self.warming:
            cold = self.cold + elapsed - self.last
            return evolve(self, cold=cold, warming=self.warming - 1, last=elapsed)
        return evolve(self, counted=self.counted + 1).judged(step, elapsed)

    def judged(self, step: int, elapsed: float) -> "StepBudget":
        """With the steps that will fit, if it is time to judge the pace."""
        requested, seconds, pace = self.settings.steps, self.settings.seconds, self.seconds_per_step(elapsed)
        if seconds is None or not pace or elapsed >= seconds or step == requested:
            return self
        if self.counted < WARM_STEPS and self.counted * pace < 0.05 * seconds:
            return self
        fits, reached = int((seconds - elapsed) / pace), self.total is not None and step >= self.total
        # The last of fewer steps than requested is over: as many are added as still fit.
        due = fits > 0 if reached else elapsed >= seconds * (0.05 + 0.1 * self.looks)
        if not due:
            return self
        total = step + max(1, fits)
        total = min(total, requested or total)
        # Small changes are not worth another learning rate: one step in twenty too many, one in seven too few.
        if self.total is not None and not reached and 0.95 * self.total <= total <= 1.15 * self.total:
            total = self.total
        looks = int((elapsed / seconds - 0.05) / 0.1) + 1
        return evolve(self, total=total, looks=looks)

    def seconds_per_step(self, elapsed: float) -> float | None:
        """The mean of the warm steps; evaluations are in it. None while there were none."""
        return (elapsed - self.cold) / self.counted if self.counted else None

    def left(self, step: int, elapsed: float) -> float | None:
        """Seconds to the end, as far as one can tell."""
        bounds = [] if self.settings.seconds is None else [max(0.0, self.settings.seconds - elapsed)]
        if self.total is not None and (pace := self.seconds_per_step(elapsed)) is not None:
            bounds.append((self.total - step) * pace)
        return min(bounds, default=None)

    def ended(self, step: int, elapsed: float, *, stopping: str = "") -> str:
        """Why `step` was the last one, or "". `stopping` is the reason if there is no other."""
        if self.total is not None and step >= self.total:
            return "steps" if self.total == self.settings.steps else "seconds"
        if self.settings.seconds is not None and elapsed >= self.settings.seconds:
            return "seconds"
        return stopping


@frozen
class TrainingClock:
    """`elapsed` seconds of training, evaluations included, in all sessions of the run; `losses` are the last."""

    budget: StepBudget
    elapsed: float = 0.0
    skipped: int = 0
    losses: tuple[float, ...] = ()

    @classmethod
    def new(cls, settings: TrainSettings) -> "TrainingClock":
        """Before the first step."""
        return cls(StepBudget(settings, settings.steps))

    def stepped(self, loss: float, *, skipped: bool) -> "TrainingClock":
        """A step is over."""
        losses = (*self.losses[1 - LOSSES :], loss)
        return evolve(self, losses=losses, skipped=self.skipped + skipped)

    def looked(self, step: int, elapsed: float) -> "TrainingClock":
        """The clock was looked at after `step`."""
        return evolve(self, elapsed=elapsed, budget=self.budget.after(step, elapsed))

    def extra(self, settings: TrainSettings, data: tuple[str, ...]) -> dict[str, Any]:
        """What goes into a checkpoint, in JSON's own types; `data` describes what is trained on."""
        budget = self.budget
        kept = {
            "settings": plain_settings(settings),
            "data": [_text(line) for line in data],
            "total": budget.total,
            "looks": budget.looks,
            "counted": budget.counted,
            "cold": budget.cold,
            "elapsed": self.elapsed,
            "skipped": self.skipped,
            "losses": [x if math.isfinite(x) else None for x in self.losses],
        }
        return {KEY: kept}


def restored_clock(extra: Mapping[str, Any], settings: TrainSettings, step: int) -> TrainingClock:
    """The clock in a checkpoint of `step`, to go on under `settings`.

    One that `zfunc train` did not write has none: then seconds count from here. Raises CheckpointError for values
    that no training has.
    """
    if KEY not in extra:
        return TrainingClock.new(settings)
    kept = JsonNode(extra[KEY], f"extra.{KEY}").entries()
    zero = JsonNode(0, KEY)
    looks, counted, skipped = (kept.get(name, zero).integer() for name in ("looks", "counted", "skipped"))
    elapsed, cold = (kept.get(name, zero).number(0) for name in ("elapsed", "cold"))
    total = kept["total"].integer() if "total" in kept and kept["total"].value is not None else None
    losses = kept["losses"].items()[-LOSSES:] if "losses" in kept else ()
    budget = StepBudget(settings, total, looks, counted, cold if counted else elapsed, last=elapsed)
    clock = TrainingClock(
        budget, elapsed, skipped, tuple(math.nan if x.value is None else x.number() for x in losses)
    )
    saved, now = _saved_settings(kept), plain_settings(settings)
    if all(saved.get(name) == now[name] for name in ("steps", "seconds")):
        return clock
    bounds = evolve(budget, total=settings.steps, looks=0)  # others than the budget was made for
    return evolve(clock, budget=bounds.judged(step, elapsed) if step else bounds)


def changed_settings(
    extra: Mapping[str, Any], settings: TrainSettings, data: tuple[str, ...]
) -> Iterator[str]:
    """Of a checkpoint's settings that decide the data or the step: those that are others now, with both values."""
    if KEY not in extra:
        return
    kept, now = JsonNode(extra[KEY], f"extra.{KEY}").entries(), plain_settings(settings)
    saved = _saved_settings(kept)
    for name in DECIDING:
        if name in saved and saved[name] != now[name]:
            yield f"{name} {saved[name]!r} is now {now[name]!r}"
    read = kept["data"].value if "data" in kept else None
    if saved.get("data") == now["data"] and read is not None and read != [_text(line) for line in data]:
        yield f"the data {read!r} is now {list(data)!r}"


def _saved_settings(kept: Mapping[str, JsonNode]) -> dict[str, Any]:
    entries = kept["settings"].entries() if "settings" in kept else {}
    return {name: node.value for name, node in entries.items()}


def plain_settings(settings: TrainSettings) -> dict[str, Any]:
    """The settings in a checkpoint's types: paths are texts, and so are numbers of more than 64 bits."""
    return {name: _plain(value) for name, value in attrs.asdict(settings).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path | str) or (isinstance(value, int) and abs(value) > MAX_INT):
        return _text(str(value))
    return value


def _text(text: str) -> str:
    """A path may hold what cannot be encoded."""
    return text.encode(errors="replace").decode()
