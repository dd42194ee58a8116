"""A folder of checkpoints in which the newest complete one survives a crash at any moment.

    latest                              the name of a complete one; never ahead of the data
    step-00001234/                      complete: named when everything in it was on the disk
    unfinished-step-00001250-1f0c77aa/  being written, or left behind by a writer that was killed

Nothing is ever overwritten, and names sort in the order in which they were given. If training goes back and saves
the same or an earlier step again, names continue as step-00001234.1: the number after the dot counts how often
training went back, and sorts first. A writer locks its folder for the life of its process, so an unfinished folder
without a lock is abandoned.
"""

import logging
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

from attrs import define

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import FILE, Checkpoint, Manifest, read_manifest, to_json
from zfunc.checkpoint.safetensors_file import open_shard
from zfunc.checkpoint.swap_checkpoint import has_swap_files, open_swap_checkpoint
from zfunc.checkpoint.swap_file import read_space
from zfunc.checkpoint.swap_space import swap_files
from zfunc.errors import CheckpointError

LATEST = "latest"
FOLDER = "checkpoints"  # in the folder of a run
OF_OTHERS = (".metadata", "*_states.pt", "optimizer.pt")  # files in checkpoints of DCP, DeepSpeed and Trainer
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")
_UNFINISHED = re.compile(f"{disk.UNFINISHED}{_STEP.pattern}-[0-9a-f]{{8}}")
log = logging.getLogger("zfunc")


@define(eq=False)
class UnfinishedCheckpoint:
    """A checkpoint that is being written to the temporary folder `path`; end it by `publish_checkpoint` or
    `abandon_checkpoint`.

    The folder is also deleted when this object is, unless it was published: an interrupt may come at any
    line.
    """

    folder: Path
    path: Path
    step: int
    _lock: int = -1

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, _delete, self.path, os.getpid())

    def hold(self, lock: int) -> None:
        """Keep `lock`, an open file descriptor that holds the folder's lock, until `release`."""
        self._lock = lock

    def release(self) -> None:
        """Release the folder's lock. A second call does nothing."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            disk.unlock(fd)


def _delete(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has a copy of the object, and not the checkpoint
        shutil.rmtree(path, ignore_errors=True)


def shard_name(rank: int, world: int) -> str:
    """The file name of one rank's shard in a checkpoint of `world` ranks.

    >>> shard_name(0, 2)
    'rank-00000-of-00002.safetensors'
    """
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def begin_checkpoint(folder: Path, step: int) -> UnfinishedCheckpoint:
    """Make a temporary folder for a new checkpoint of step number `step` in `folder`, which is created if
    missing.

    One process begins and publishes the checkpoint; others may write shards to `path` of the result. Raises
    CheckpointError, naming the folder, if it cannot be written.
    """
    with disk.os_errors_as(folder, "making a folder for checkpoints"):
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    if new:
        disk.sync(folder.parent)
    path = _unfinished(folder, f"step-{step:08d}")
    with disk.locked(folder), disk.os_errors_as(path, "making a folder for a checkpoint"):
        pending = UnfinishedCheckpoint(folder, path, step)
        path.mkdir()
        pending.hold(disk.lock(path))
        return pending


def publish_checkpoint(
    pending: UnfinishedCheckpoint, manifest: Manifest, *, keep: int = 2, spare: str = ""
) -> Path:
    """Give the complete checkpoint `pending` its final name, and return its folder.

    All files are on the disk before the folder is renamed, and the new name before the file `latest` changes.
    Then all checkpoints but the newest `keep` and the one named `spare` are deleted, and folders left by
    killed writers. Raises CheckpointError if a shard is missing or contradicts the manifest, or the disk
    fails; older checkpoints are unchanged then.
    """
    _check_files(pending.path, manifest)
    for shard in manifest.shards:
        disk.sync(pending.path / shard.file)
    disk.write_durably(pending.path / FILE, to_json(manifest))
    with disk.locked(pending.folder):
        with disk.os_errors_as(pending.path, "giving a checkpoint its name"):
            path = _free(pending.folder, pending.step)
            os.rename(pending.path, path)
        pending.release()
        try:
            disk.sync(pending.folder)
            disk.write_durably(pending.folder / LATEST, f"{path.name}\n".encode())
        except CheckpointError as error:  # the checkpoint is complete and named, which is what counts
            log.warning("checkpoints: %s is saved, but not synced to the disk: %s", path, error)
        obsolete = _set_aside(pending.folder, keep, spare)
    for old in obsolete:
        shutil.rmtree(old, ignore_errors=True)
    if left := [old.name for old in obsolete if old.exists()]:
        log.warning("checkpoints: in %s these cannot be deleted: %s", pending.folder, ", ".join(left))
    return path


def abandon_checkpoint(pending: UnfinishedCheckpoint) -> None:
    """Delete the temporary folder of a checkpoint that will not be finished; if that fails, the next
    `publish_checkpoint` deletes it."""
    shutil.rmtree(pending.path, ignore_errors=True)
    pending.release()


def find_checkpoint(folder: Path, *, warn: bool = True) -> Checkpoint | None:
    """The newest complete checkpoint in `folder`, or None if none was ever saved.

    The folders' names decide, not `latest`, which is for people. Where a newer one is damaged, a warning is logged
    if `warn`. Raises CheckpointError if there are checkpoints but none is complete: training must not silently
    start again.
    """
    refused: list[str] = []
    checkpoint = next(complete_checkpoints(folder, refused), None)
    reasons = "; ".join(refused)
    if checkpoint is not None and refused and warn:
        log.warning("checkpoints: %s is the newest complete one: %s", checkpoint.path, reasons)
    elif checkpoint is None and refused:
        disk.reject(folder, "no complete checkpoint", "one", reasons)
    return checkpoint


def complete_checkpoints(folder: Path, refused: list[str]) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints in `folder`, the newest first; errors of incomplete ones are added to
    `refused`.

    For callers that go on to the next one if the data of the newest turns out to be damaged.
    """
    for path in _steps(folder):
        try:
            yield open_checkpoint(path)
        except CheckpointError as error:
            refused.append(str(error))


def locate_checkpoint(path: Path) -> Path:
    """The folder of the checkpoint at `path`: `path` itself, or the newest complete checkpoint in it.

    `path` is the folder of a checkpoint or a swap space, a folder of checkpoints, or the folder of a run, with its
    checkpoints in `checkpoints`. A checkpoint's own folder is returned even if the checkpoint is not complete.
    Raises CheckpointError if there is none.
    """
    if _STEP.fullmatch(path.name) or os.path.lexists(path / FILE) or has_swap_files(path):
        return path
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if (checkpoint := find_checkpoint(folder)) is not None:
        return checkpoint.path
    got, do = "no checkpoint in it" if os.path.lexists(folder) else "no such folder", "check the path"
    if folder.is_dir() and any(next(folder.glob(x), None) for y in OF_OTHERS for x in (y, f"*[0-9]/{y}")):
        got, do = "one of another program", "make one of zfunc of it, by zfunc import"
    disk.reject(folder, got, f"a checkpoint, a folder of them, or a run with a folder {FOLDER!r}", do)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in folder `path`, if its manifest is valid and every shard has the right size and header.

    In a swap space's folder, open the space's last commit. Raises CheckpointError, naming the file, unless the
    checkpoint is complete.
    """
    if has_swap_files(path):
        return open_swap_checkpoint(path)
    manifest = read_manifest(path)
    name, step = _STEP.fullmatch(path.name), manifest.position.step
    if name and int(name[1]) != step:
        disk.reject(path, f"a manifest of step {step}", "that of the folder's name")
    _check_files(path, manifest)
    return Checkpoint(path, manifest)


def has_commit(folder: Path) -> bool:
    """Whether the swap space whose first folder is `folder` has a commit of any rank."""
    return has_swap_files(folder) and any(any(read_space(path)[1]) for path in swap_files(folder))


def _check_files(path: Path, manifest: Manifest) -> None:
    for shard in manifest.shards:
        open_shard(path / shard.file, shard).close()


def _steps(folder: Path, names: re.Pattern[str] = _STEP) -> list[Path]:
    """The folders in `folder` whose names match `names` (default: checkpoints), newest first. Links are ignored."""
    if not os.path.lexists(folder):
        return []
    with disk.os_errors_as(folder, "looking for checkpoints"), os.scandir(folder) as entries:
        named = [(names.fullmatch(x.name), x) for x in entries]
        steps = [(_order(m), Path(x.path)) for m, x in named if m and x.is_dir(follow_symlinks=False)]
    return [path for _, path in sorted(steps, reverse=True)]


def _order(name: re.Match[str]) -> tuple[int, int]:
    """The sort key of a checkpoint's folder name: (times that training had gone back to an older step,
    step)."""
    return int(name[2] or 0), int(name[1])


def _unfinished(folder: Path, name: str) -> Path:
    return folder / f"{disk.UNFINISHED}{name}-{os.urandom(4).hex()}"


def _free(folder: Path, step: int) -> Path:
    """A new folder name for a checkpoint of this step, which sorts after all existing ones."""
    back, last = max((_order(m) for x in os.listdir(folder) if (m := _STEP.fullmatch(x))), default=(0, -1))
    back += step <= last
    return folder / (f"step-{step:08d}.{back}" if back else f"step-{step:08d}")


def _set_aside(folder: Path, keep: int, spare: str) -> list[Path]:
    """Rename those checkpoints in `folder` that are to be deleted: all but the newest `keep`, the one just
    published and the one named `spare`. Returns the folders to delete, with those that killed writers left.
    """
    obsolete: list[Path] = []
    try:
        newest = [x.path for _, x in zip(range(keep), complete_checkpoints(folder, []), strict=False)]
        steps = _steps(folder)
        obsolete += [x for x in _steps(folder, _UNFINISHED) if not disk.is_locked(x)]
        older = steps[steps.index(newest[-1]) + 1 :] if newest else []
        for path in (x for x in older if x.name != spare):
            os.rename(path, aside := _unfinished(folder, path.name))
            obsolete.append(aside)
    except (OSError, CheckpointError) as error:  # must not fail the save, which is complete
        log.warning("checkpoints: old ones in %s are not deleted: %s", folder, error)
    return obsolete
