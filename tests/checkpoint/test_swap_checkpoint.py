"""A swap space reads like a checkpoint: every slice of every parameter, from the files of all ranks and folders."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import saved
from saved import MODEL, assert_complete, refused, save_swap

from zfunc.checkpoint import durable_files
from zfunc.checkpoint.directory import locate_checkpoint, open_checkpoint
from zfunc.checkpoint.swap_checkpoint import swap_identity
from zfunc.checkpoint.swap_file import read_header, swap_file_name
from zfunc.core.layout import Parameter
from zfunc.core.optimizer_state import AdamFormat

FROZEN = [
    [Parameter("frozen.a", (5, 3), trainable=False), *MODEL[0]],
    [*MODEL[1], Parameter("empty", (0,)), Parameter("striped", (99, 131))],
]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(durable_files, "IN_MEMORY", ())
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("moments", get_args(AdamFormat))
def test_every_byte_is_found_where_a_checkpoint_would_have_it(
    folders: list[Path], moments: AdamFormat, world: int
) -> None:
    save_swap(folders, moments=moments, world=world, model=FROZEN, salt=5)
    for folder in folders:
        checkpoint = open_checkpoint(locate_checkpoint(folder))
        assert (checkpoint.manifest.world, checkpoint.manifest.position.step) == (world, 3)
        assert_complete(checkpoint)


def test_files_that_are_no_commit_of_all_ranks_are_refused(folders: list[Path]) -> None:
    save_swap(folders, world=2)
    paths = [folders[0] / swap_file_name(rank, 2, 0) for rank in (0, 1)]
    said = "rank-00001-of-00002-folder-0.swap: got a swap space that a process uses"
    command = (
        "import fcntl, sys; fcntl.flock(file := open(sys.argv[1]), 2); print(flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", command, paths[1]], **pipes) as other:
        assert other.stdout.readline()
        with refused(said):
            open_checkpoint(folders[0])
        other.communicate()
    whole = paths[1].read_bytes()
    header = read_header(lambda offset, n: whole[offset : offset + n], "it")
    paths[1].write_bytes(whole[: header.record_at(1)] + bytes(4096) + whole[header.record_at(1) + 4096 :])
    with refused("a: got no commit that all ranks have, expected one: resume from a ch"):
        open_checkpoint(folders[0])
    paths[1].unlink()
    with refused("rank-00001-of-00002-folder-0.swap: got none, expected the files of all ranks: mou"):
        open_checkpoint(folders[0])


def test_stages_that_the_ranks_do_not_divide_into_are_refused(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "swap_identity", partial(swap_identity, pp=3))
    save_swap(folders, world=2)
    with refused("folder-0.swap: got 3 stages of 2 ranks, expected a number that divides them"):
        open_checkpoint(folders[0])


def test_a_training_that_goes_on_is_not_mistaken_for_the_commit(folders: list[Path]) -> None:
    save_swap(folders, world=1)
    checkpoint = open_checkpoint(folders[0])
    path = checkpoint.file(1)
    at = min(checkpoint.manifest.shards[1].places.values())  # type: ignore[union-attr]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"later")
    with refused("folder-1.swap: got other bytes than were written in '.*elements 0 to"):
        assert_complete(checkpoint)
