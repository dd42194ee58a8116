"""A folder of checkpoints, of which a crash at any moment leaves the newest complete one in place.

    latest                              the name of one that is complete; never ahead of the data
    step-00001234/                      complete: it got this name when all in it was on the disk
    unfinished-step-00001250-1f0c77aa/  being written, or left behind by a writer that was killed

The invariant: nothing is ever overwritten, and the order of the names is the order they were given in. Where
training went back, to save a step again or an earlier one, names go on as step-00001234.1: the number after the dot
counts how often, and comes first in the order. Writers hold a lock on their folder, which ends with their process:
what is unfinished and not locked is nobody's.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from attrs import define, frozen

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import manifest_json as manifest_file
from zfunc.checkpoint.manifest import FILE, Manifest
from zfunc.checkpoint.shard_reader import open_shard
from zfunc.errors import CheckpointError

LATEST = "latest"
FOLDER = "checkpoints"  # of a run, in its folder
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")
_UNFINISHED = re.compile(f"{disk.UNFINISHED}{_STEP.pattern}-[0-9a-f]{{8}}")
log = logging.getLogger("zfunc")


@frozen
class Checkpoint:
    """A complete checkpoint: its folder, and what is in it. The data is checked as it is read."""

    path: Path
    manifest: Manifest


@define(eq=False)
class UnfinishedCheckpoint:
    """A checkpoint being written: put its shards into `path`, then `publish_checkpoint` or `abandon_checkpoint`
    it."""

    folder: Path
    path: Path
    step: int
    _lock: int

    def release(self) -> None:
        """Give the lock back. Nothing happens the second time."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            disk.unlock(fd)


def shard_name(rank: int, world: int) -> str:
    """The file of one rank.

    >>> shard_name(0, 2)
    'rank-00000-of-00002.safetensors'
    """
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def begin_checkpoint(folder: Path, step: int) -> UnfinishedCheckpoint:
    """Make a folder for a new checkpoint in `folder`, which is made too if need be.

    One process begins and publishes; others may write shards into `path`. Raises CheckpointError, naming the
    folder, if it cannot be written.
    """
    if not 0 <= step < 10**18:
        raise ValueError(f"step: got {step}, expected 0 to 10^18")
    with disk.os_errors_as(folder, "making a folder for checkpoints"):
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    if new:
        disk.sync(folder.parent)
    path = _unfinished(folder, f"step-{step:08d}")
    with disk.locked(folder), disk.os_errors_as(path, "making a folder for a checkpoint"):
        path.mkdir()
        return UnfinishedCheckpoint(folder, path, step, disk.lock(path))


def publish_checkpoint(pending: UnfinishedCheckpoint, manifest: Manifest, *, keep: int = 2) -> Path:
    """Give a checkpoint whose shards are all written its name, and return its folder.

    Everything is on the disk before the name is, and the name before `latest` has it. Then all but the newest
    `keep` complete checkpoints are deleted, and what killed writers left. Raises CheckpointError if a shard is
    missing or not the manifest's, or the disk fails; then the checkpoints before it are as they were.
    """
    if keep < 1:
        raise ValueError(f"keep: got {keep}, expected at least 1: the newest checkpoint is always kept")
    if manifest.position.step != pending.step:
        raise ValueError(f"got a manifest of step {manifest.position.step}, expected step {pending.step}")
    _check_files(pending.path, manifest)
    for shard in manifest.shards:
        disk.sync(pending.path / shard.file)
    disk.write_durably(pending.path / FILE, manifest_file.to_json(manifest))
    with disk.locked(pending.folder):
        with disk.os_errors_as(pending.path, "giving a checkpoint its name"):
            path = _free(pending.folder, pending.step)
            os.rename(pending.path, path)
        pending.release()
        try:
            disk.sync(pending.folder)
            disk.write_durably(pending.folder / LATEST, f"{path.name}\n".encode())
        except CheckpointError as error:  # it is whole and has its name, which is what counts
            log.warning("checkpoints: %s is there, but not all is on the disk: %s", path, error)
        doomed = _set_aside(pending.folder, keep)
    for old in doomed:
        shutil.rmtree(old, ignore_errors=True)
    if left := [old.name for old in doomed if old.exists()]:
        log.warning("checkpoints: in %s these cannot be deleted: %s", pending.folder, ", ".join(left))
    return path


def abandon_checkpoint(pending: UnfinishedCheckpoint) -> None:
    """Delete a checkpoint that will not be finished. What cannot be deleted is left for the next
    `publish_checkpoint`."""
    shutil.rmtree(pending.path, ignore_errors=True)
    pending.release()


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None if there never was one.

    `latest` is a pointer for people: where it and the folders differ, the folders count, and one logged line says
    so. Raises CheckpointError if there were checkpoints and none is complete: starting afresh is no answer to that.
    """
    refused: list[str] = []
    checkpoint = next(complete_checkpoints(folder, refused), None)
    latest = _latest(folder)
    if checkpoint is None:
        if refused or latest:
            refused = refused or [f"{LATEST} names {latest}, which is not there"]
            reasons = "; ".join(refused)
            raise CheckpointError(f"{folder}: got no checkpoint that is complete, expected one: {reasons}")
        return None
    if latest != checkpoint.path.name:
        refused.append(f"{LATEST} names {latest or 'none'}")
    if refused:
        log.warning("checkpoints: %s is the newest that is complete: %s", checkpoint.path, "; ".join(refused))
    return checkpoint


def complete_checkpoints(folder: Path, refused: list[str]) -> Iterator[Checkpoint]:
    """All complete checkpoints, the newest first; why others are not is added to `refused`.

    For who finds in reading that the newest is damaged, and goes on with the one before.
    """
    for path in _steps(folder):
        try:
            yield open_checkpoint(path)
        except CheckpointError as error:
            refused.append(str(error))


def locate_checkpoint(path: Path) -> Path:
    """The folder of the checkpoint that `path` stands for: itself, or the newest complete one in it.

    `path` is a checkpoint's folder, a folder of checkpoints, or a run's, which has one named FOLDER. A checkpoint
    that is named is the one, whole or not. Raises CheckpointError if there is none.
    """
    if _STEP.fullmatch(path.name) or os.path.lexists(path / FILE):
        return path
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if (checkpoint := find_checkpoint(folder)) is not None:
        return checkpoint.path
    what = "no checkpoint in it" if os.path.lexists(folder) else "nothing there"
    raise CheckpointError(
        f"{folder}: got {what}, expected a checkpoint, a folder of them, or a run with a folder {FOLDER!r}: name "
        f"one, such as {folder / 'step-00001234'}"
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder: its manifest, and every shard there, whole by size and header.

    Raises CheckpointError, naming the file, if it is not complete.
    """
    manifest = manifest_file.read_manifest(path)
    name, step = _STEP.fullmatch(path.name), manifest.position.step
    if name and int(name[1]) != step:
        raise CheckpointError(
            f"{path}: got a manifest of step {step}, expected the folder's: use another checkpoint"
        )
    _check_files(path, manifest)
    return Checkpoint(path, manifest)


def _check_files(path: Path, manifest: Manifest) -> None:
    for shard in manifest.shards:
        open_shard(path / shard.file, shard).close()


def _steps(folder: Path) -> list[Path]:
    """The folders that have a checkpoint's name, the newest first. Links are none."""
    if not os.path.lexists(folder):
        return []
    with disk.os_errors_as(folder, "looking for checkpoints"), os.scandir(folder) as entries:
        named = [(_STEP.fullmatch(x.name), x) for x in entries]
        steps = [(_order(m), Path(x.path)) for m, x in named if m and x.is_dir(follow_symlinks=False)]
    return [path for _, path in sorted(steps, reverse=True)]


def _order(name: re.Match[str]) -> tuple[int, int]:
    """How often training went back before this name was given, and its step."""
    return int(name[2] or 0), int(name[1])


def _latest(folder: Path) -> str:
    """The name in `latest`, or what is wrong with it; nothing if there is no such file."""
    if not os.path.lexists(folder / LATEST):
        return ""
    try:
        name = disk.read_small(folder / LATEST, 100).decode(errors="replace").strip()
    except CheckpointError as error:
        return f"nothing ({error})"
    return name if _STEP.fullmatch(name) else f"{name!r}, no checkpoint's name"


def _unfinished(folder: Path, name: str) -> Path:
    return folder / f"{disk.UNFINISHED}{name}-{os.urandom(4).hex()}"


def _free(folder: Path, step: int) -> Path:
    """The name for this step that comes after all there are."""
    back, last = max((_order(m) for x in os.listdir(folder) if (m := _STEP.fullmatch(x))), default=(0, -1))
    back += step <= last
    return folder / (f"step-{step:08d}.{back}" if back else f"step-{step:08d}")


def _set_aside(folder: Path, keep: int) -> list[Path]:
    """Take their names from old checkpoints; the one just published comes first in the order, so it is none.

    Returns what is to be deleted, leftovers too.
    """
    doomed: list[Path] = []
    try:
        newest = [x.path for _, x in zip(range(keep), complete_checkpoints(folder, []), strict=False)]
        steps = _steps(folder)
        doomed += _leftovers(folder)
        for path in steps[steps.index(newest[-1]) + 1 :] if newest else ():
            os.rename(path, aside := _unfinished(folder, path.name))
            doomed.append(aside)
    except (OSError, CheckpointError) as error:  # the new checkpoint is there, which is what was asked for
        log.warning("checkpoints: old ones in %s are not deleted: %s", folder, error)
    return doomed


def _leftovers(folder: Path) -> list[Path]:
    """What is unfinished and has no writer."""
    with os.scandir(folder) as entries:
        leftovers = [
            Path(x.path) for x in entries if _UNFINISHED.fullmatch(x.name) and x.is_dir(follow_symlinks=False)
        ]
    return [path for path in leftovers if not disk.is_locked(path)]
