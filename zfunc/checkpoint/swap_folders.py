"""What is in the folders of swap spaces: which are refused, and what of it is deleted.

The invariant: nothing is deleted that zfunc did not make, that a process uses, or that has a commit.
"""

import logging
import os
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.swap_file import (
    SWAP_FILE,
    CommitRecord,
    SwapHeader,
    read_header,
    read_records,
    reader_of,
    swap_file_name,
)
from zfunc.errors import CheckpointError
from zfunc.runtime.direct_io import DirectFile, file_system_of

IN_MEMORY = ("tmpfs", "ramfs")  # file systems in the memory that swapping is to save
_UNFINISHED_FILE = re.compile(f"{disk.UNFINISHED}{SWAP_FILE.pattern}-[0-9a-f]{{8}}")
log = logging.getLogger("zfunc")


def check_folders(folders: Sequence[Path]) -> None:
    """Raise CheckpointError, in one line, for a folder that is missing, in memory or given twice."""
    if not folders:
        raise CheckpointError("swap: got no folder, expected one for each drive")
    real = dict[Path, Path]()
    for folder in folders:
        if not folder.is_dir():
            got = "something else" if os.path.lexists(folder) else "none"
            raise CheckpointError(
                f"{folder}: got {got}, expected a folder: mount the drive, and make the folder"
            )
        if (other := real.setdefault(folder.resolve(), folder)) is not folder:
            raise CheckpointError(
                f"{folder}: got the folder {other} twice, expected one for each drive: name it once"
            )
        if (kind := file_system_of(folder)) in IN_MEMORY:
            raise CheckpointError(
                f"{folder}: got a folder in memory ({kind}), expected one on a drive, because swapping is to save "
                "memory: name another folder"
            )


def tell_shared_drives(folders: Sequence[Path]) -> None:
    """Log which folders are on one drive."""
    devices = dict[int, Path]()
    for folder in folders:
        if (other := devices.setdefault(folder.stat().st_dev, folder)) is not folder:
            log.warning("swap: %s and %s are on one drive, whose speed they share", other, folder)


def refuse_others(path: Path, run: str) -> None:
    """Refuse a folder that has a swap space of another run, or this file."""
    for other in _files(path.parent, SWAP_FILE):
        if _header_at(other).run != run or other == path:
            raise CheckpointError(
                f"{other}: got the swap space of another run, expected none: resume that run, name another folder, "
                "or delete its .swap files if its state is not wanted"
            )


def refuse_other_worlds(path: Path, world: int) -> None:
    """Refuse a folder with the swap space of another number of ranks than `world`."""
    made = {int(x.name.split("-")[3]) for x in _files(path.parent, SWAP_FILE)}
    if made and world not in made:
        raise CheckpointError(
            f"{path.parent}: got a swap space of {min(made)} ranks, expected one of {world}: keep it, make another "
            "folder, and pass that one as `swap` with `resume=auto` (in Python: swap=[that], and zfunc.load("
            f"{str(path.parent)!r}, program)); its state is read for any number of ranks"
        )


def delete_uncommitted(folder: Path, run: str) -> None:
    """Delete the spaces of other runs that ended before anything was committed: there is no state in them."""
    for first in _files(folder, SWAP_FILE):
        with suppress(BlockingIOError):
            fd = disk.lock(first, wait=False)
            try:
                header = _header_at(first)
                if header.folder == 0 and header.run != run and not max(_records_at(first, header)):
                    rest = [
                        Path(x) / swap_file_name(header.rank, header.world, n)
                        for n, x in enumerate(header.folders)
                    ][1:]
                    for path in [*(x for x in rest if x.exists() and _header_at(x).run == header.run), first]:
                        log.warning("swap: %s is deleted: nothing was committed to it", path)
                        with disk.os_errors_as(path, "deleting it"):
                            path.unlink()
            finally:
                disk.unlock(fd)


def unfinished_name(path: Path) -> Path:
    """A new name for a file of a swap space until it is complete, which no other program gives."""
    return path.with_name(f"{disk.UNFINISHED}{path.name}-{os.urandom(4).hex()}")


def delete_unfinished(folder: Path) -> None:
    """Delete unfinished files of swap spaces whose process was killed: they have no lock. Of any rank and world.

    For a caller that has the folder's lock, under which others make and lock theirs.
    """
    for path in _files(folder, _UNFINISHED_FILE):
        if path.is_file() and not disk.is_locked(path):
            log.warning("swap: %s is deleted: its process ended before it was complete", path)
            with disk.os_errors_as(path, "deleting it"):
                path.unlink()


def _files(folder: Path, names: re.Pattern[str]) -> list[Path]:
    with disk.os_errors_as(folder, "looking for swap spaces"):
        return [folder / x for x in sorted(os.listdir(folder)) if names.fullmatch(x)]


def _header_at(path: Path) -> SwapHeader:
    with disk.os_errors_as(path, "opening it"), closing(DirectFile.open(path)) as file:
        return read_header(reader_of(file), str(path))


def _records_at(path: Path, header: SwapHeader) -> dict[int, CommitRecord]:
    with disk.os_errors_as(path, "opening it"), closing(DirectFile.open(path)) as file:
        return read_records(reader_of(file), header, str(path))
