"""Where a training begins: at step 0, or from which checkpoint. Decided once, before anything is computed.

Rank 0 decides and broadcasts; if it raises, no rank begins.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import field, frozen

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint.directory import Checkpoint
from zfunc.errors import CheckpointError
from zfunc.runtime.collectives import RankGroup
from zfunc.train.history import CONFIG, SUMMARY
from zfunc.train.pacing import restored_clock
from zfunc.train.settings import AUTO, TrainSettings

COMPLETE = ("steps", "seconds")  # how a training ended that has nothing left to do


@frozen
class ResumePoint:
    """`origin`, a checkpoint or a folder of them, is what to load; `own` if it is in the run's own folder.

    `folder` is for new checkpoints; without one there are none. `extra` is that of the checkpoint. `line` is for
    the log; `over`: there is nothing left to train.
    """

    folder: Path | None = None
    origin: Path | None = None
    own: bool = False
    extra: dict[str, Any] = field(factory=dict[str, Any])
    line: str = ""
    over: bool = False


def choose_resume_point(run: Path, settings: TrainSettings) -> ResumePoint:
    """What `--resume` means for the run in the folder `run`. Raises ValueError where there is nothing to load."""
    folder = (run / checkpoints.FOLDER).absolute()
    if settings.resume is None:
        return ResumePoint(folder)
    try:
        if settings.resume == AUTO:
            return _go_on(run, folder, settings)
        checkpoint = _open(Path(settings.resume).expanduser().absolute())
    except CheckpointError as error:
        raise ValueError(f"--resume: {error}") from error
    return ResumePoint(folder, checkpoint.path, extra=dict(checkpoint.manifest.extra))


def broadcast(ranks: RankGroup, start: ResumePoint) -> None:
    """On rank 0: send the others the resume point."""
    fields = attrs.asdict(start)
    ranks.texts(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}))


@contextmanager
def broadcasting_errors(ranks: RankGroup) -> Generator[None, None, None]:
    """On rank 0: an error raised in this context is broadcast, and keeps the other ranks from beginning."""
    try:
        yield
    except Exception as error:
        ranks.texts(f"\n{error}")
        raise


def receive(ranks: RankGroup) -> ResumePoint:
    """On any other rank: what rank 0 says. Raises ValueError if it refuses."""
    message = ranks.texts("")[0]
    if message.startswith("\n"):
        raise ValueError(f"rank 0 cannot begin: {message[1:]}")
    fields = json.loads(message)
    folder, origin = (fields.pop(name) for name in ("folder", "origin"))
    return ResumePoint(folder and Path(folder), origin and Path(origin), **fields)


def resumed_from(run: Path) -> str | None:
    """The checkpoint that a run's `config.json` says it began from, if it did from one."""
    try:
        origin = json.loads((run / CONFIG).read_text())["resumed_from"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return cast("str | None", origin)


def _go_on(run: Path, folder: Path, settings: TrainSettings) -> ResumePoint:
    """From the run's newest checkpoint; or from the one it began from, or at the beginning."""
    checkpoint = checkpoints.find_checkpoint(folder)
    if checkpoint is not None:
        over = _over(run, checkpoint, settings)
        line = (
            f"{run}: it was over at step {checkpoint.manifest.position.batches:,}: nothing is left to train"
        )
        return ResumePoint(folder, folder, True, dict(checkpoint.manifest.extra), line if over else "", over)
    if _ended(run) in COMPLETE:
        raise ValueError(
            f"--resume {AUTO}: got {run}, whose training is over and left no checkpoint, expected one to go on "
            "from: name another --out"
        )
    if (before := resumed_from(run)) is not None:
        checkpoint = _open(Path(before))
        return ResumePoint(folder, checkpoint.path, extra=dict(checkpoint.manifest.extra))
    return ResumePoint(folder, line=f"--resume auto: no checkpoint in {run} yet: it begins at the first step")


def _open(path: Path) -> Checkpoint:
    return checkpoints.open_checkpoint(checkpoints.locate_checkpoint(path))


def _over(run: Path, checkpoint: Checkpoint, settings: TrainSettings) -> bool:
    """Whether all of it was done, the summary too, and the settings ask for no more."""
    step = checkpoint.manifest.position.batches
    progress = restored_clock(checkpoint.manifest.extra, settings, step)
    return _ended(run) in COMPLETE and progress.budget.ended(step, progress.elapsed) != ""


def _ended(run: Path) -> str:
    """How the run ended, by its summary; "" without one."""
    try:
        return str(json.loads((run / SUMMARY).read_text())["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
