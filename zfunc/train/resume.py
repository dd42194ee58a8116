"""How far a training is, and where it goes on: at step 0, or from which checkpoint.

A checkpoint has the seconds that the run was trained, so a resumed training counts as if it had never stopped.
Where to begin is decided once, by rank 0, which broadcasts it; if it raises, no rank starts.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
from attrs import evolve, field, frozen
from attrs.converters import optional

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint.directory import Checkpoint
from zfunc.checkpoint.strict_json import JsonNode, Within
from zfunc.checkpoint.writer import all_or_none
from zfunc.core.setting_values import DISK
from zfunc.core.shares import words_of
from zfunc.errors import CheckpointError, about, refuse, setting
from zfunc.runtime.collectives import RankGroup
from zfunc.train.evaluations import Evaluation, num_without_improvement
from zfunc.train.events import COMPLETE, EARLY
from zfunc.train.run_files import CONFIG, METRICS, SUMMARY
from zfunc.train.run_folder import jsonable
from zfunc.train.run_history import read_history, read_json_object
from zfunc.train.settings import AUTO, TrainSettings

KEY = "train"  # in a checkpoint's extra
# Settings that change which steps are taken; `load` itself compares a checkpoint's optimizer.
# fmt: off
DECIDING = (
    "data", "stream", "shuffle_buffer", "packing", "dtype", "tokenizer", "hf", "text_only", "quantize",
    "quantize_parameters", "lora_alpha", "vocab_size", "seq_length", "loss", "dpo_beta", "dpo_type", "dropout",
    "batch_size", "micro_batches", "seed", "lr", "lr_schedule", "warmup", "steps", "seconds",
)
# fmt: on
STREAM = "stream"  # in a checkpoint's extra, with the rest of the progress
RUN = "run"  # in a commit's extra, with the rest of the progress: whose swap space it is
log = logging.getLogger("zfunc")


def end_reason(
    settings: TrainSettings,
    step: int,
    elapsed: float,
    evaluations: Sequence[Evaluation] = (),
    *,
    stopping: str = "",
) -> str:
    """Why training ends after `step`, or "" if it goes on. `elapsed` are the seconds trained, `evaluations` those
    up to now, `stopping` the reason to return if there is no other."""
    if settings.steps is not None and step >= settings.steps:
        return "steps"
    if settings.seconds is not None and elapsed >= settings.seconds:
        return "seconds"
    patience, threshold = settings.early_stopping, settings.early_stopping_threshold
    if patience is not None and num_without_improvement(evaluations, threshold) >= patience:
        return EARLY
    return stopping


def saved_extra(
    settings: TrainSettings,
    elapsed: float,
    data: tuple[str, ...],
    run: Path | None = None,
    stream: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `extra` of a checkpoint of `zfunc train`. `elapsed` are the seconds trained, `data` describes the corpus,
    `run` owns the swap space, and `stream` is the position in streamed data."""
    own = {} if run is None else {RUN: run}
    own |= {} if stream is None else {STREAM: stream}
    return {KEY: jsonable({"settings": settings.recorded(), "elapsed": elapsed, "data": data, **own})}


def elapsed_in(extra: Mapping[str, Any]) -> float:
    """The seconds trained that a checkpoint's `extra` records, over all sessions, evaluations included; 0 if `zfunc
    train` did not write the checkpoint. Raises CheckpointError for a value out of range."""
    kept = _saved_progress(extra)[0]
    return kept["elapsed"].read(Annotated[float, Within(float, 0, math.inf)]) if "elapsed" in kept else 0.0


def stream_position_in(extra: Mapping[str, Any]) -> dict[str, Any] | None:
    """The position in streamed data that a checkpoint's `extra` records; None if its run did not stream."""
    kept = _saved_progress(extra)[0]
    return kept[STREAM].read(dict) if STREAM in kept else None


def changed_settings(
    extra: Mapping[str, Any], settings: TrainSettings, data: tuple[str, ...]
) -> Iterator[str]:
    """Texts, old and new value, on data and settings that decide steps and differ from a checkpoint's `extra`."""
    (kept, saved), now = _saved_progress(extra), jsonable(settings.recorded())
    for name in DECIDING:
        if name in saved and saved[name] != now[name]:
            yield f"{name} {saved[name]!r} is now {now[name]!r}"
    before = kept["data"].value if "data" in kept else None
    if saved.get("data") == now["data"] and before is not None and before != jsonable(data):
        yield f"the data {before!r} is now {list(data)!r}"


def _saved_progress(extra: Mapping[str, Any]) -> tuple[Mapping[str, JsonNode], dict[str, Any]]:
    """The progress and the settings in a checkpoint's `extra`; both empty if `zfunc train` did not write it."""
    kept = JsonNode(extra.get(KEY, {}), f"extra.{KEY}").entries()
    return kept, kept["settings"].read(dict) if "settings" in kept else {}


# --- where to begin ---------------------------------------------------------------------------------------


def _evaluation(x: Evaluation | Mapping[str, Any]) -> Evaluation:
    return x if isinstance(x, Evaluation) else Evaluation(**x)


@frozen
class ResumePoint:
    """Where a run begins: the checkpoint to load and the folder to save in; by default neither."""

    folder: Path | None = field(default=None, converter=optional(Path))  # of new checkpoints
    origin: Path | None = field(default=None, converter=optional(Path))  # a checkpoint, or a folder of them
    own: bool = False  # whether `origin` is in the run's own folder
    over: bool = False  # nothing is left to train
    # All of the run that are known, also those after the checkpoint
    evaluations: tuple[Evaluation, ...] = field(
        default=(), converter=lambda found: tuple(map(_evaluation, found))
    )


def agreed(ranks: RankGroup, choose: Callable[[], ResumePoint]) -> ResumePoint:
    """The ResumePoint that `choose` returns on rank 0, on every rank; if `choose` raises, every rank raises."""
    own = all_or_none(ranks, lambda: None if ranks.rank else choose())
    choice = "" if own is None else json.dumps(attrs.asdict(own), default=str)
    return ResumePoint(**json.loads(ranks.texts(choice)[0]))


def choose_resume_point(run: Path, settings: TrainSettings) -> ResumePoint:
    """The ResumePoint of run folder `run` by `settings.resume`. Raises ValueError if there is nothing to load."""
    folder = (run / checkpoints.FOLDER).absolute()
    if settings.resume is None:
        return ResumePoint(folder)
    try:
        if settings.resume == AUTO:
            return _continue_run(run, folder, settings)
        path = Path(settings.resume).expanduser().absolute()
        checkpoint = _newest(path, _swap_in_config(path)) or _open(path)
        _check_model(checkpoint, settings)
        return ResumePoint(folder, checkpoint.path)
    except CheckpointError as error:
        raise ValueError(about("resume", error)) from error


def _check_model(checkpoint: Checkpoint, settings: TrainSettings) -> None:
    """Raise SettingError unless `settings` name the model of a checkpoint: its sizes and adapters, and a Hugging
    Face model, wherever it is now, if it was one."""
    saved = _saved_progress(checkpoint.manifest.extra)[1]
    for name in ("hf", "lora", "num_layers", "hidden_size"):
        before, now = saved.get(name), getattr(settings, name)
        if name in saved and before != now and (name != "hf" or None in (before, now)):
            do = f"pass {setting(name, before)}"
            if before is None:
                do = "leave it out; to begin at step 0, export that run and pass its model as `hf`"
            got = f"{now or 'none'}, where {checkpoint.path} was trained with {before or 'none'}"
            refuse(name, got, "the model of that run", do)


def _continue_run(run: Path, folder: Path, settings: TrainSettings) -> ResumePoint:
    """The ResumePoint of an earlier run: its newest checkpoint, else the one it began from, else none."""
    swap = _first(settings.swap) if {DISK, AUTO} & {*words_of(settings.state_on)} else []
    checkpoint = _newest(run.absolute(), [*swap, *_swap_in_config(run)], warn=False)
    ended, before = _text_in(run / SUMMARY, "ended"), _text_in(run / CONFIG, "resumed_from")
    if checkpoint is not None:
        origin = checkpoint.path
        if origin.parent == folder:
            origin = folder  # or the one before, if damaged: loading it warns
        else:
            checkpoints.find_checkpoint(folder)  # for its warning
        _check_model(checkpoint, settings)
        step, extra = checkpoint.manifest.position.batches, checkpoint.manifest.extra
        saved = _saved_progress(extra)[1]
        if settings.steps is None and settings.epochs is not None and saved.get("epochs") == settings.epochs:
            settings = evolve(
                settings, steps=saved["steps"]
            )  # as they were counted; the data is not open yet
        found = read_history(run).evaluations if (run / METRICS).exists() else ()
        due = settings.eval_every and not step % settings.eval_every  # not the one that ended the run
        counted = [x for x in found if x.step < step or (due and x.step == step)]
        why = end_reason(settings, step, elapsed_in(extra), counted)
        over = ended in COMPLETE and why != ""
        if over:
            more = f"without more {'`early_stopping`' if why == EARLY else '`steps`, `epochs` or `seconds`'}"
            log.info("%s: it ended at step %s: nothing is left to train %s", run, f"{step:,}", more)
        return ResumePoint(folder, origin, True, over, found)
    if ended in COMPLETE:
        got = f"{run}, whose training ended without a checkpoint"
        refuse(f"`resume={AUTO}`", got, "one to continue from", "name another `out`")
    if before is not None:
        return ResumePoint(folder, _open(Path(before)).path)
    log.info("`resume=%s`: no checkpoint in %s yet: starting at the first step", AUTO, run)
    return ResumePoint(folder)


def _newest(run: Path, swap: Iterable[Path], *, warn: bool = True) -> Checkpoint | None:
    """The newest checkpoint in the folder `run` or in a folder of `swap`; `warn` is that of `find_checkpoint`.
    Raises CheckpointError for a swap space that another run owns."""
    saved = checkpoints.find_checkpoint(run / checkpoints.FOLDER, warn=warn)
    found = [] if saved is None else [saved]
    for folder in filter(checkpoints.has_commit, dict.fromkeys(swap)):
        checkpoint = checkpoints.open_checkpoint(folder)
        of = JsonNode(checkpoint.manifest.extra, f"{folder}: extra").entries().get(KEY)
        name = of and of.entries().get(RUN)
        if name is None or name.value != str(run):
            got = "another training" if name is None else f"the run {name.value}"
            do = (
                "resume that run, name another folder with `swap`, or begin a new `out` with "
                f"`resume={folder}`"
            )
            refuse(str(folder), f"the swap space of {got}", f"that of {run}", do, CheckpointError)
        found.append(checkpoint)
    return max(found, key=lambda x: x.manifest.position.batches, default=None)


def _swap_in_config(run: Path) -> list[Path]:
    """The first folder of the swap space that a run used, read from its `config.json`; [] for none."""
    try:
        settings = JsonNode(read_json_object(run / CONFIG), CONFIG).entries()["settings"].entries()
        on_disk = {DISK, AUTO} & {*words_of(settings["state_on"].value)}
        return _first(settings["swap"].value) if on_disk else []
    except (ValueError, KeyError, CheckpointError):
        return []


def _first(swap: Sequence[str]) -> list[Path]:
    return [Path(x).expanduser().absolute() for x in swap[:1]]


def _open(path: Path) -> Checkpoint:
    return checkpoints.open_checkpoint(checkpoints.locate_checkpoint(path))


def _text_in(path: Path, name: str) -> str | None:
    """The text under key `name` in the JSON file `path`; None if the file, the key or a text is missing."""
    try:
        value = read_json_object(path).get(name)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
