"""Laws of the folder: whatever happens, a complete checkpoint is found, and no other is touched.

Of writers that are killed at random moments the soak says that.
"""

import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from attrs import evolve
from bad_disks import stopped_everywhere, with_more_room
from saved import assert_complete, refused, save

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.directory import (
    abandon_checkpoint,
    begin_checkpoint,
    complete_checkpoints,
    find_checkpoint,
    open_checkpoint,
    publish_checkpoint,
)
from zfunc.checkpoint.manifest import FILE
from zfunc.checkpoint.safetensors_file import TensorInfo, create_shard


def names(folder: Path) -> list[str]:
    return sorted(x.name for x in folder.iterdir())


def found_in(folder: Path) -> str:
    newest = find_checkpoint(folder)
    assert newest is not None
    assert_complete(newest)
    return newest.path.name


def test_the_newest_is_found_and_the_last_k_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    for step in (2, 9, 10, 100):
        path = save(folder, step=step, keep=2, salt=step)
        assert found_in(folder) == path.name == f"step-{step:08d}"
        assert (folder / "latest").read_text() == f"{path.name}\n"
    assert names(folder) == ["latest", "step-00000010", "step-00000100"]
    assert names(path) == [
        "manifest.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "nowhere") is None
    begin_checkpoint(tmp_path, 1).release()  # killed before it was done
    assert find_checkpoint(tmp_path) is None


def test_what_is_saved_last_is_the_newest_whatever_its_step(tmp_path: Path) -> None:
    """What is saved last is the newest, whatever its step, and nothing there is overwritten."""
    for step in (10, 20, 30):
        save(tmp_path, step=step, keep=9)
    for step, name in ((30, "step-00000030.1"), (15, "step-00000015.2"), (25, "step-00000025.2")):
        assert save(tmp_path, step=step, keep=9, salt=step).name == found_in(tmp_path) == name
    assert [x.path.name[5:] for x in complete_checkpoints(tmp_path, [])] == [
        "00000025.2",
        "00000015.2",
        "00000030.1",
        "00000030",
        "00000020",
        "00000010",
    ]
    save(tmp_path, step=26, keep=2)
    assert names(tmp_path) == ["latest", "step-00000025.2", "step-00000026.2"]


def test_a_damaged_one_is_passed_over_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, step=4)
    shard = save(tmp_path, step=5) / "rank-00001-of-00002.safetensors"
    os.truncate(shard, 100)
    with caplog.at_level(logging.WARNING, "zfunc"):
        assert found_in(tmp_path) == "step-00000004"
    (line,) = caplog.messages
    assert "step-00000004 is the newest complete one: " in line
    assert f"{shard}: got 100 bytes, expected " in line
    assert save(tmp_path, step=5).name == "step-00000005.1"  # the damaged one is not in its way
    assert found_in(tmp_path) == "step-00000005.1"
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005", "step-00000005.1"]


def test_if_no_checkpoint_is_complete_it_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, step=4)
    (path / "rank-00000-of-00002.safetensors").unlink()
    with refused(r"no complete checkpoint, expected one: .*rank-00000-of.*No such file"):
        find_checkpoint(tmp_path)


def test_only_unfinished_folders_of_dead_writers_are_deleted(tmp_path: Path) -> None:
    dead, live = begin_checkpoint(tmp_path, 1), begin_checkpoint(tmp_path, 2)
    dead.release()  # as its end would
    (dead.path / "half").write_bytes(b"abc")
    (tmp_path / "mine").mkdir()
    (tmp_path / "unfinished-business").mkdir()
    save(tmp_path, step=3)
    assert not dead.path.exists()
    assert names(tmp_path) == ["latest", "mine", "step-00000003", "unfinished-business", live.path.name]
    abandon_checkpoint(live)
    abandon_checkpoint(live)
    assert not live.path.exists()


def test_links_are_not_followed_when_old_ones_are_deleted(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    target = save(other, step=1)
    for step in (1, 2):
        save(folder, step=step)
    (folder / "step-00000000").symlink_to(target)
    (folder / "unfinished-step-00000000-00000000").symlink_to(target)
    save(folder, step=3, keep=1)
    assert_complete(open_checkpoint(target))
    assert found_in(folder) == "step-00000003"


def test_one_without_all_its_shards_is_not_published(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    before = names(tmp_path)
    pending = begin_checkpoint(tmp_path, 2)
    manifest = open_checkpoint(tmp_path / "step-00000001").manifest
    manifest = evolve(manifest, position=evolve(manifest.position, step=2))
    with refused(r"unfinished-.*/rank-00000-of-00002.safetensors: got 'No such file"):
        publish_checkpoint(pending, manifest)
    for shard in manifest.shards:
        shutil.copy(tmp_path / "step-00000001" / shard.file, pending.path)
    torn = pending.path / manifest.shards[1].file
    torn.write_bytes(torn.read_bytes()[:-1])
    with refused(r"rank-00001-of-00002.safetensors: got \d+ bytes, expected \d+"):
        publish_checkpoint(pending, manifest)
    assert found_in(tmp_path) == "step-00000001"
    abandon_checkpoint(pending)
    assert names(tmp_path) == before


def test_stopped_before_any_operation_of_the_disk_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `latest` names is complete, and so is what is found."""

    def save_one(number: int) -> None:
        save(tmp_path, step=number + 2, salt=number + 2)

    def check() -> None:
        assert_complete(open_checkpoint(tmp_path / (tmp_path / "latest").read_text().strip()))
        found_in(tmp_path)

    save(tmp_path, step=1, salt=1)
    functions = [(disk, name) for name in ("sync", "write_all", "write_durably")]
    stops = stopped_everywhere(monkeypatch, functions, save_one, check, killed=True)
    assert stops > 20
    assert found_in(tmp_path) == f"step-{stops + 2:08d}"


def test_everything_is_on_the_disk_before_its_name_and_that_before_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut would need: the order of the calls that promise."""
    calls: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(Path(f"/proc/self/fd/{fd}").readlink().name), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(f"named {Path(b).name}"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(f"replaced {Path(b).name}"), replace(a, b)))
    path = save(tmp_path, step=7)
    (unfinished,) = {x for x in calls if x.startswith("unfinished-step")}
    ranks = ["rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"]
    assert calls[calls.index("unfinished-manifest.json") - 2 :] == [
        *ranks,
        "unfinished-manifest.json",
        "replaced manifest.json",
        unfinished,
        f"named {path.name}",
        tmp_path.name,
        "unfinished-latest",
        "replaced latest",
        tmp_path.name,
    ]


def test_a_full_disk_is_named_and_the_one_before_stays(small_disk: Path) -> None:
    save(small_disk, step=1)
    pending = begin_checkpoint(small_disk, 2)
    with refused(r"/a: got 'No space left on device' while making a file of \d+ byt"):
        create_shard(pending.path / "a", [TensorInfo("w", "U8", (2 << 20,))])
    assert not list(pending.path.iterdir())
    abandon_checkpoint(pending)


def test_whatever_file_has_no_room_the_checkpoint_before_stays(small_disk: Path) -> None:
    """A shard does not fit, then the manifest, then `latest`; at last all do."""
    save(small_disk, step=1, salt=1)
    refused = with_more_room(
        small_disk,
        lambda room: save(small_disk, step=room + 2, salt=room),
        check=lambda: found_in(small_disk),
    )
    assert found_in(small_disk) == f"step-{len(refused) + 2:08d}"
    assert all("No space left on device" in x for x in refused)
    paths = [Path(x.partition(": got ")[0]) for x in refused]
    assert all(x.is_relative_to(small_disk) for x in paths)
    assert {x.suffix for x in paths} == {".safetensors", ".json"}  # without `latest` there is a checkpoint


def test_a_folder_that_cannot_be_written_is_named(small_disk: Path) -> None:
    save(small_disk, step=1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with refused(r"unfinished-step-00000002-\w+: got 'Read-only file system' while mak"):
        save(small_disk, step=2)
    assert found_in(small_disk) == "step-00000001"


@pytest.mark.parametrize("inner", ["", "below"])
def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path, inner: str) -> None:
    (tmp_path / "x").write_text("mine")
    folder = tmp_path / "x" / inner
    for use in (find_checkpoint, lambda folder: begin_checkpoint(folder, 1)):
        if use is find_checkpoint and inner:
            continue
        with refused(r"/x(/below)?: got '(File exists|Not a directory)' while .*: name "):
            use(folder)
    assert (tmp_path / "x").read_text() == "mine"


def test_a_checkpoint_is_saved_where_old_ones_cannot_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step=step)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING, "zfunc"):
        save(tmp_path, step=3, keep=1)
    assert (
        f"checkpoints: in {tmp_path} these cannot be deleted: unfinished-step-0000000" in caplog.messages[0]
    )
    assert found_in(tmp_path) == "step-00000003"


def test_without_locks_nothing_unfinished_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    dead = begin_checkpoint(tmp_path, 1)
    dead.release()
    monkeypatch.setattr("fcntl.flock", unsupported)
    with caplog.at_level(logging.WARNING, "zfunc"):
        save(tmp_path, step=2)
    assert "cannot be locked (Operation not supported): use only one writer for it" in caplog.messages[0]
    assert dead.path.exists()


def test_the_manifest_is_the_last_file(tmp_path: Path) -> None:
    path = save(tmp_path, step=1)
    (path / FILE).unlink()
    with refused(r"step-00000001/manifest.json: got 'No such file or directory' while o"):
        open_checkpoint(path)
    assert checkpoints.shard_name(3, 16) == "rank-00003-of-00016.safetensors"
