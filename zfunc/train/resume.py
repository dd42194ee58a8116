"""How far a training is, and where it goes on: at step 0, or from which checkpoint.

`TrainingClock` is what the loop carries from step to step beside its State: seconds, losses, and which step is the
last. It is saved in every checkpoint, so a resumed training counts as if it had never stopped. Where to begin is
decided once, by rank 0, which broadcasts it; if it raises, no rank starts.
"""

import json
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import attrs
from attrs import evolve, field, frozen

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint.directory import Checkpoint
from zfunc.checkpoint.strict_json import MAX_INT, Count, JsonNode, Within, decoded
from zfunc.checkpoint.swap_checkpoint import has_commit
from zfunc.errors import CheckpointError
from zfunc.runtime.collectives import RankGroup
from zfunc.train.history import CONFIG, SUMMARY, read_json_object
from zfunc.train.settings import AUTO, TrainSettings

LOSSES = 50  # last steps, whose mean loss is in the summary
KEY = "train"  # in a checkpoint's extra
# Settings that change which steps are taken; `load` itself compares a checkpoint's optimizer.
# fmt: off
DECIDING = (
    "data", "packing", "dtype", "tokenizer", "hf", "lora_alpha", "vocab_size", "seq_length", "dropout",
    "batch_size", "micro_batches", "seed", "lr", "lr_schedule", "warmup", "steps", "seconds",
)
# fmt: on
RUN = "run"  # in a commit's extra, with the rest of the progress: whose swap space it is
COMPLETE = ("steps", "seconds")  # endings after which nothing is left to train


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
    (kept, saved), nothing = _kept(extra), JsonNode(0, KEY)
    if settings.steps is None and settings.epochs is not None and saved.get("epochs") == settings.epochs:
        settings = evolve(settings, steps=saved["steps"])  # as they were counted; the data is not open yet
    losses = kept.get("losses", JsonNode([], KEY)).read(tuple[Annotated[float, _loss], ...])
    return TrainingClock(
        settings,
        kept.get("elapsed", nothing).read(Annotated[float, Within(float, 0, math.inf)]),
        kept.get("skipped", nothing).read(Count),
        losses[-LOSSES:],
    )


def _loss(value: Any) -> float:
    return math.nan if value is None else decoded(value, float)


def changed_settings(
    extra: Mapping[str, Any], settings: TrainSettings, data: tuple[str, ...]
) -> Iterator[str]:
    """What has changed, of DECIDING and the data, since a checkpoint was saved; both values of each."""
    (kept, saved), now = _kept(extra), plain_settings(settings)
    for name in DECIDING:
        if name in saved and saved[name] != now[name]:
            yield f"{name} {saved[name]!r} is now {now[name]!r}"
    # Runs of before had fewer steps than requested, and their schedule, where --seconds was too short for all.
    if "total" in kept and kept["total"].value != saved.get("steps"):
        yield f"the learning rate's {kept['total'].value} steps are now {now['steps']}"
    before = kept["data"].value if "data" in kept else None
    if saved.get("data") == now["data"] and before is not None and before != [_text(line) for line in data]:
        yield f"the data {before!r} is now {list(data)!r}"


def _kept(extra: Mapping[str, Any]) -> tuple[Mapping[str, JsonNode], dict[str, Any]]:
    """What a checkpoint keeps of a clock, and of the settings; nothing of one that `zfunc train` did not write."""
    kept = JsonNode(extra.get(KEY, {}), f"extra.{KEY}").entries()
    return kept, kept["settings"].read(dict) if "settings" in kept else {}


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


# --- where to begin ---------------------------------------------------------------------------------------


@frozen
class ResumePoint:
    """What to load and where to save; by default nothing."""

    folder: Path | None = None  # of new checkpoints
    origin: Path | None = None  # a checkpoint, or a folder of them
    own: bool = False  # whether `origin` is in the run's own folder
    extra: dict[str, Any] = field(factory=dict[str, Any])  # of the checkpoint
    line: str = ""  # for the log
    over: bool = False  # nothing is left to train


def choose_resume_point(run: Path, settings: TrainSettings) -> ResumePoint:
    """What `settings.resume` means for the run in a folder. Raises ValueError where there is nothing to load."""
    folder = (run / checkpoints.FOLDER).absolute()
    if settings.resume is None:
        return ResumePoint(folder)
    try:
        if settings.resume == AUTO:
            return _continue_run(run, folder, settings)
        path = Path(settings.resume).expanduser().absolute()
        checkpoint = _newest(path, _swap_in_config(path)) or _open(path)
    except CheckpointError as error:
        raise ValueError(f"resume: {error}") from error
    return ResumePoint(folder, checkpoint.path, extra=dict(checkpoint.manifest.extra))


def broadcast(ranks: RankGroup, start: ResumePoint) -> None:
    """On rank 0: send the others the resume point."""
    fields = attrs.asdict(start)
    ranks.texts(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}))


@contextmanager
def broadcasting_errors(ranks: RankGroup) -> Generator[None, None, None]:
    """On rank 0: broadcast an error raised in this context, so that no other rank starts."""
    try:
        yield
    except Exception as error:
        ranks.texts(f"\n{error}")
        raise


def receive(ranks: RankGroup) -> ResumePoint:
    """On any other rank: rank 0's resume point. Raises ValueError with rank 0's error."""
    message = ranks.texts("")[0]
    if message.startswith("\n"):
        raise ValueError(f"rank 0 cannot start: {message[1:]}")
    fields = json.loads(message)
    folder, origin = (fields.pop(name) for name in ("folder", "origin"))
    return ResumePoint(folder and Path(folder), origin and Path(origin), **fields)


def resumed_from(run: Path) -> str | None:
    """The checkpoint that a run started from, by its `config.json`."""
    return _entry(run / CONFIG, "resumed_from")


def _continue_run(run: Path, folder: Path, settings: TrainSettings) -> ResumePoint:
    """From the run's newest checkpoint, or the one it started from, or the beginning."""
    swap = _first(settings.swap) if settings.state_on != "host" else []
    checkpoint = _newest(run.absolute(), [*swap, *_swap_in_config(run)])
    if checkpoint is not None:
        # Or the one before, if damaged.
        origin = folder if checkpoint.path.parent == folder else checkpoint.path
        over = _over(run, checkpoint, settings)
        line = (
            f"{run}: it ended at step {checkpoint.manifest.position.batches:,}: nothing is left to train without "
            "more `steps`, `epochs` or `seconds`"
        )
        return ResumePoint(folder, origin, True, dict(checkpoint.manifest.extra), line if over else "", over)
    if _ended(run) in COMPLETE:
        raise ValueError(
            f"`resume={AUTO}`: got {run}, whose training ended without a checkpoint, expected one to "
            "continue from: name another `out`"
        )
    if (before := resumed_from(run)) is not None:
        checkpoint = _open(Path(before))
        return ResumePoint(folder, checkpoint.path, extra=dict(checkpoint.manifest.extra))
    return ResumePoint(
        folder, line=f"`resume={AUTO}`: no checkpoint in {run} yet: starting at the first step"
    )


def with_run(extra: dict[str, Any], run: Path) -> dict[str, Any]:
    """What a commit of a run's swap space says: the run's folder, beside what a checkpoint does."""
    return {KEY: {**extra[KEY], RUN: str(run)}}


def _newest(run: Path, swap: Iterable[Path]) -> Checkpoint | None:
    """The newest checkpoint of a run, in its folder or a swap space. Raises CheckpointError for another run's."""
    saved = checkpoints.find_checkpoint(run / checkpoints.FOLDER)
    found = [] if saved is None else [saved]
    for folder in dict.fromkeys(swap):
        if has_commit(folder):
            checkpoint = checkpoints.open_checkpoint(folder)
            of = JsonNode(checkpoint.manifest.extra, f"{folder}: extra").entries().get(KEY)
            name = of and of.entries().get(RUN)
            if name is None or name.value != str(run):
                got = "another training" if name is None else f"the run {name.value}"
                raise CheckpointError(
                    f"{folder}: got the swap space of {got}, expected that of {run}: resume that run, name another "
                    f"folder with `swap`, or begin a new `out` with `resume={folder}`"
                )
            found.append(checkpoint)
    return max(found, key=lambda x: x.manifest.position.batches, default=None)


def _swap_in_config(run: Path) -> list[Path]:
    """The first folder of the swap space that a run used, by its `config.json`."""
    try:
        settings = JsonNode(read_json_object(run / CONFIG), CONFIG).entries()["settings"].entries()
        return _first(settings["swap"].value) if settings["state_on"].value != "host" else []
    except (ValueError, KeyError, CheckpointError):
        return []


def _first(swap: Sequence[str]) -> list[Path]:
    return [Path(x).expanduser().absolute() for x in swap[:1]]


def _open(path: Path) -> Checkpoint:
    return checkpoints.open_checkpoint(checkpoints.locate_checkpoint(path))


def _over(run: Path, checkpoint: Checkpoint, settings: TrainSettings) -> bool:
    """Whether the run ended, with its summary, and the settings ask for no more steps."""
    step = checkpoint.manifest.position.batches
    clock = restored_clock(checkpoint.manifest.extra, settings)
    return _ended(run) in COMPLETE and clock.end_reason(step) != ""


def _ended(run: Path) -> str:
    """How the run ended, by its summary; "" without a summary."""
    return _entry(run / SUMMARY, "ended") or ""


def _entry(path: Path, name: str) -> str | None:
    """A text in a JSON file; None without it."""
    try:
        value = read_json_object(path).get(name)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
