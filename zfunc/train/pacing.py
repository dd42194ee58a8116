"""How far a training is, besides its State: seconds, losses, and which step is the last.

TrainingClock is all that the loop carries from step to step. It is saved in every checkpoint, so a resumed training
counts as if it had never stopped.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import evolve, frozen

from zfunc.checkpoint.strict_json import COUNT, MAX_INT, JsonNode, Within, of_kind
from zfunc.train.settings import TrainSettings

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
class TrainingClock:
    """Time and losses of all sessions of a run."""

    settings: TrainSettings
    elapsed: float = 0.0  # seconds, evaluations included
    skipped: int = 0  # steps, for an overflow
    losses: tuple[float, ...] = ()  # of the last LOSSES steps

    def stepped(self, loss: float, *, skipped: bool) -> "TrainingClock":
        """After a step."""
        losses = (*self.losses[1 - LOSSES :], loss)
        return evolve(self, losses=losses, skipped=self.skipped + skipped)

    def end_reason(self, step: int, *, stopping: str = "") -> str:
        """Why `step` is the last one, or "". `stopping` is the reason if there is no other."""
        if self.settings.steps is not None and step >= self.settings.steps:
            return "steps"
        if self.settings.seconds is not None and self.elapsed >= self.settings.seconds:
            return "seconds"
        return stopping

    def extra(self, data: tuple[str, ...]) -> dict[str, Any]:
        """What a checkpoint keeps of it, in JSON's types. `data` is the description of the corpus."""
        fields = {
            "settings": plain_settings(self.settings),
            "data": [_text(line) for line in data],
            "elapsed": self.elapsed,
            "skipped": self.skipped,
            "losses": [x if math.isfinite(x) else None for x in self.losses],
        }
        return {KEY: fields}


def restored_clock(extra: Mapping[str, Any], settings: TrainSettings) -> TrainingClock:
    """The clock in a checkpoint, to continue with `settings`.

    A checkpoint that `zfunc train` did not write has none: seconds count from here. Raises CheckpointError for
    values out of range.
    """
    if KEY not in extra:
        return TrainingClock(settings)
    kept, zero = JsonNode(extra[KEY], f"extra.{KEY}").entries(), JsonNode(0, KEY)
    saved = _saved_settings(kept)
    if settings.steps is None and settings.epochs is not None and saved.get("epochs") == settings.epochs:
        settings = evolve(settings, steps=saved["steps"])  # as they were counted; the data is not open yet
    losses = kept.get("losses", JsonNode([], KEY)).read(
        [lambda x: math.nan if x is None else of_kind(x, float)]
    )
    return TrainingClock(
        settings,
        kept.get("elapsed", zero).read(Within(float, 0, math.inf)),
        kept.get("skipped", zero).read(COUNT),
        losses[-LOSSES:],
    )


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
    # Runs of before had fewer steps than requested, and their schedule, where --seconds was too short for all.
    if "total" in kept and kept["total"].value != saved.get("steps"):
        yield f"the learning rate's {kept['total'].value} steps are now {now['steps']}"
    before = kept["data"].value if "data" in kept else None
    if saved.get("data") == now["data"] and before is not None and before != [_text(line) for line in data]:
        yield f"the data {before!r} is now {list(data)!r}"


def _saved_settings(kept: Mapping[str, JsonNode]) -> dict[str, Any]:
    return kept["settings"].read(dict) if "settings" in kept else {}


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
