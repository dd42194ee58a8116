"""A swap space gives back what was written or says what is wrong, and leaves alone what is not its own."""

import logging
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from saved import refused

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import swap_file
from zfunc.checkpoint.swap_file import (
    CommitRecord,
    SwapHeader,
    block_checksum,
    new_header,
    parse_header,
    parse_record,
)
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.core.extents import Extent, whole_blocks
from zfunc.errors import CheckpointError, DiskError
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.runtime.direct_io import DirectFile
from zfunc.runtime.host_memory import map_pages

SIZES = {0: {"low": 9000, "scale": 100, "high": 4096}, 7: {"low": 4096, "high": 1}}
EXTENTS = {b: Extent.of(sizes.items()) for b, sizes in SIZES.items()}
IDENTITY = {"layout": "two buckets", "state_format": "16bit"}


@pytest.fixture(autouse=True)
def any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the tests may be in memory."""
    monkeypatch.setattr(disk, "IN_MEMORY", ())


def header_of(*folders: Path, shares: tuple[int, ...] = (), **changed: Any) -> SwapHeader:
    made = new_header(folders, **{"identity": IDENTITY, "run": "one", "extents": EXTENTS, **changed})
    return evolve(made, shares=shares or made.shares)


def create(*folders: Path, **changed: Any) -> SwapSpace:
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return SwapSpace.create(header_of(*folders, **changed))


def reopen(*folders: Path, **changed: Any) -> SwapSpace:
    at = changed.pop("at", None)
    return SwapSpace.open(header_of(*folders, **changed), at=at)


def pages(data: bytes) -> memoryview:
    """In whole blocks at the beginning of a page, with something behind it."""
    mapped = map_pages(whole_blocks(len(data)))
    mapped[:] = data.ljust(len(mapped), b"?")
    return memoryview(mapped)


def write(space: SwapSpace, b: int, salt: int, *names: str) -> None:
    names = names or tuple(SIZES[b])
    space.write(b, names, [pages(content(b, n, salt, SIZES[b][n])) for n in names])


def content(b: int, name: str, salt: int, nbytes: int) -> bytes:
    return f"{b} {name} {salt} ".encode().ljust(64, b".") * (nbytes // 64) + b"x" * (nbytes % 64)


def read(space: SwapSpace, b: int, *names: str) -> list[bytes]:
    names = names or tuple(SIZES[b])
    into = [pages(bytes(SIZES[b][n])) for n in names]
    space.read(b, names, into)
    return [bytes(x[: SIZES[b][n]]) for n, x in zip(names, into, strict=True)]


def records(space: SwapSpace) -> dict[int, Any]:
    """What the commits that `open` can go back to say, by number."""
    return {n: x.metadata for n, x in space._records.items()}


def expected(b: int, salt: int, *names: str) -> list[bytes]:
    return [content(b, n, salt, SIZES[b][n]) for n in names or SIZES[b]]


def filled(*folders: Path, salt: int = 1, **changed: Any) -> SwapSpace:
    space = create(*folders, **changed)
    for b in EXTENTS:
        write(space, b, salt)
    space.commit({"step": salt})
    return space


def test_what_was_written_is_read_and_committed_and_found(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    space = filled(*folders)
    write(space, 0, 2)
    assert read(space, 0) == expected(0, 2)
    assert read(space, 0, "high", "low") == expected(0, 2, "high", "low")
    assert read(space, 7) == expected(7, 1)
    write(space, 0, 3)  # in place: the commit is of neither
    space.close()
    space = reopen(*folders)
    assert (read(space, 0), read(space, 7), space.record(), space.number) == (
        expected(0, 1),
        expected(7, 1),
        {"step": 1},
        1,
    )
    write(space, 0, 4)
    space.commit({"step": 4, "scale": 0.5})
    space.commit({"step": 5})  # nothing but the counters
    assert records(space) == {2: {"step": 4, "scale": 0.5}, 3: {"step": 5}}
    write(space, 7, 6, "low")
    assert (read(space, 7), records(space)) == (
        [*expected(7, 6, "low"), *expected(7, 1, "high")],
        {3: {"step": 5}},
    )
    space.close()
    space.close()
    space = reopen(*folders)
    assert (read(space, 0), read(space, 7), space.number) == (expected(0, 4), expected(7, 1), 3)
    space.close()
    assert sorted(os.listdir(folders[0]) + os.listdir(folders[1])) == [
        "rank-00000-of-00001-folder-0.swap",
        "rank-00000-of-00001-folder-1.swap",
    ]


def test_what_is_written_once_has_one_generation(tmp_path: Path) -> None:
    extents = {0: EXTENTS[0], 7: evolve(EXTENTS[7], generations=1)}
    twice = filled(tmp_path / "twice")
    space = filled(tmp_path / "once", extents=extents)
    assert twice.header.sizes[0] - space.header.sizes[0] == EXTENTS[7].nbytes
    for salt in (2, 3):
        write(space, 0, salt)
        space.commit({"step": salt})
        with pytest.raises(ValueError, match="bucket 7: got a write after a commit, expected none"):
            write(space, 7, salt)
    space.close()
    twice.close()
    with refused("got a swap space with buckets .others."):
        reopen(tmp_path / "twice", extents=extents)
    space = reopen(tmp_path / "once", extents=extents)
    assert (read(space, 0), read(space, 7)) == (expected(0, 3), expected(7, 1))
    for salt in (4, 5, 6):  # with room for it, it changes as the others do
        space.make_room()
        write(space, 7, salt)
        space.commit({"step": salt})
        space.close()
        space = reopen(tmp_path / "once", extents=extents)
        assert (read(space, 0), read(space, 7)) == (expected(0, 3), expected(7, salt))
    path = tmp_path / "once" / "rank-00000-of-00001-folder-0.swap"
    assert path.stat().st_size == space.header.sizes_of_two[0] > space.header.sizes[0]
    space.close()
    for size in (space.header.sizes[0], 1 << 20):
        os.truncate(path, size)
        with refused(f"got {size} bytes, expected its .*: it was cut off"):
            reopen(tmp_path / "once", extents=extents)


def test_ranks_go_back_to_the_commit_that_all_have(tmp_path: Path) -> None:
    """And the later one is gone, before its extents are overwritten."""
    space = filled(tmp_path)
    write(space, 0, 2)
    space.commit({"step": 2})
    space.close()
    space = reopen(tmp_path, at=1)
    assert (read(space, 0), records(space)) == (expected(0, 1), {1: {"step": 1}})
    space.close()
    with refused(r"folder-0.swap: got no commit 2, expected one of 1: "):
        reopen(tmp_path, at=2)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda space: read(space, 0), "bucket 0, 'low': got none, expected it to be written before it is read"),
        (lambda space: write(space, 0, 1) or space.commit({}), "bucket 7: got low, high not written since the l"),
        (lambda space: space.write(0, ["low"], [pages(b"x")]), "'low': got 4096 bytes, expected 12288"),
        (lambda space: space.commit({"x": float("nan")}), "record: got .*nan.*, expected a dict of JSON's own"),
        (lambda space: space.close() or read(space, 0), r"got a swap space that is lost \(it is closed\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, act: Callable[[SwapSpace], Any], message: str) -> None:
    space = create(tmp_path)
    with pytest.raises((CheckpointError, ValueError), match=message):
        act(space)
    space.close()


def test_a_bucket_written_in_part_is_not_committed(tmp_path: Path) -> None:
    space = filled(tmp_path)
    assert [space.missing(b) for b in (0, 7)] == [[], []]
    write(space, 0, 2, "low", "high")
    assert [space.missing(b) for b in (0, 7)] == [["scale"], []]
    with refused("bucket 0: got scale not written since the last commit, expected all"):
        space.commit({"step": 2})
    write(space, 0, 2, "scale")
    space.commit({"step": 2})
    assert read(space, 0) == expected(0, 2)
    space.close()


def test_a_folder_that_cannot_be_a_swap_space_is_refused_in_one_line(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left in it, and what was in it stays."""
    (tmp_path / "file").write_text("mine")
    (full := tmp_path / "full").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "IN_MEMORY", ("tmpfs",))
        assert_refused("disk: got a folder in memory (tmpfs), expected one on a drive", small_disk)
    assert_refused("'No space left on device'", small_disk, full)  # a record alone is larger
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_refused("'Read-only file system'", full, small_disk)
    assert os.listdir(full) == os.listdir(small_disk) == []
    assert_refused(
        "none: got none, expected a folder: mount the drive, and make", tmp_path / "none", made=False
    )
    assert_refused("file: got something else, expected a folder", tmp_path / "file", made=False)
    (tmp_path / "link").symlink_to(full)
    assert_refused("twice, expected one for each drive", full, tmp_path / "link")
    assert_refused("swap: got no folder")


def assert_refused(message: str, *folders: Path, made: bool = True, **changed: Any) -> None:
    with pytest.raises((CheckpointError, OSError)) as caught:
        SwapSpace.create(header_of(*folders, **changed))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_space_of_another_run_stays(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    filled(folder).close()
    (folder / "notes.txt").write_text("mine")
    before = {x.name: x.read_bytes() for x in folder.iterdir()}
    for changed in ({}, {"run": "two"}, {"run": "two", "rank": 1, "world": 2}):
        assert_refused(
            "folder-0.swap: got the swap space of another run, expected none: resume", folder, **changed
        )
    assert {x.name: x.read_bytes() for x in folder.iterdir()} == before
    reopen(folder).close()


def test_a_space_without_a_commit_makes_room_for_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless its process lives, or it is of the same run."""
    a, b = tmp_path / "a", tmp_path / "b"
    live = create(a, b, rank=1, world=2)
    create(a, b, world=2).close()
    with caplog.at_level(logging.WARNING, "zfunc"):
        assert_refused(
            "rank-00001-of-00002-folder-0.swap: got the swap space of another run", a, b, run="two"
        )
    assert [x.rsplit("/")[-1] for x in caplog.messages if "deleted" in x] == [
        f"rank-00000-of-00002-folder-{n}.swap is deleted: nothing was committed to it" for n in (1, 0)
    ]
    live.close()
    create(a, b, run="two").close()
    assert sorted(os.listdir(a) + os.listdir(b)) == [
        "rank-00000-of-00001-folder-0.swap",
        "rank-00000-of-00001-folder-1.swap",
    ]


def test_ranks_that_begin_at_once_delete_an_uncommitted_space_once(tmp_path: Path) -> None:
    folders, world = [tmp_path / "a", tmp_path / "b"], 4
    with ThreadPoolExecutor(world) as threads:
        for n in range(10):
            begin = partial(create, *folders, run=str(n), world=world)
            for space in list(threads.map(lambda rank, begin=begin: begin(rank=rank), range(world))):
                space.close()


def test_ranks_of_one_run_share_a_folder(tmp_path: Path) -> None:
    spaces = [filled(tmp_path, salt=3, rank=rank, world=2) for rank in (0, 1)]
    with refused("rank-00001-of-00002-folder-0.swap: got a swap space that a process uses"):
        reopen(tmp_path, rank=1, world=2)
    for space in spaces:
        space.close()


@pytest.mark.parametrize("named", [0, 1, 2])
def test_what_was_killed_while_it_named_its_files_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: int
) -> None:
    folders, rename, names = [tmp_path / "a", tmp_path / "b"], os.rename, iter(range(named))

    def killed(*paths: Path) -> None:
        if next(names, None) is None:
            raise KeyboardInterrupt
        rename(*paths)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(os, "rename", killed)
        patched.setattr(
            Path, "unlink", lambda *_, **__: rename("", "")
        )  # raises OSError: nothing is cleaned up
        create(*folders, run="killed").close()
    assert [len(os.listdir(x)) for x in folders] == [1, 1]
    filled(*folders).close()
    assert [len(os.listdir(x)) for x in folders] == [1, 1]


def test_what_a_killed_process_left_unfinished_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of any rank, world and folder; not what a process holds, nor what has another name or is no file."""
    left = [f"unfinished-{swap_file.swap_file_name(*x)}-0a1b2c3d" for x in ((0, 1, 0), (1, 2, 0), (9, 16, 3))]
    held = "unfinished-rank-00001-of-00002-folder-0.swap-0a1b2c3e"
    mine = ["unfinished-rank-00001-of-00002-folder-0.swap", f"{held}.old", "unfinished-model.swap-0a1b2c3d"]
    for name in (*left, held, *mine):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f"{held[:-1]}f").symlink_to(tmp_path / mine[0])
    lock = disk.lock(tmp_path / held)
    with caplog.at_level(logging.WARNING, "zfunc"):
        create(tmp_path).close()
    expected = {held, f"{held[:-1]}f", *mine, swap_file.swap_file_name(0, 1, 0)}
    assert {*os.listdir(tmp_path)} == expected
    assert caplog.text.count("is deleted: its process ended before it was complete") == len(left)
    disk.unlock(lock)


ANOTHER_7 = {**EXTENTS, 7: Extent.of([("high", 1), ("low", 4096)])}
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    # folders that are opened, what is expected of them, and what is said; "ab" is a space, "cd" is another run's
    (
        "ab",
        {"identity": {**IDENTITY, "state_format": "8bit"}},
        "with state_format '16bit', expected '8bit': ",
    ),
    (
        "ab",
        {"extents": {0: EXTENTS[0]}},
        "a swap space with buckets 'others', expected 'those of this model'",
    ),
    ("ab", {"extents": ANOTHER_7}, "a swap space with buckets 'others'"),
    (
        "ab",
        {"world": 2},
        "got none, expected a file of the swap space: .* if another number of ranks made it, pass",
    ),
    ("ba", {}, "b/rank-00000-of-00001-folder-0.swap: got none, expected a file of the swap space: name all"),
    ("a", {}, "with number of folders 2, expected 1: .* its folders in their order, .*/a, .*b"),
    ("ad", {}, "got a file of another swap space than .*/a, expected one of the same"),
]


@pytest.mark.parametrize(("folders", "changed", "message"), OTHERS)
def test_another_layout_order_number_or_run_is_refused(
    tmp_path: Path, folders: str, changed: dict[str, Any], message: str
) -> None:
    filled(tmp_path / "a", tmp_path / "b").close()
    filled(tmp_path / "c", tmp_path / "d", run="two").close()
    with refused(message):
        reopen(*(tmp_path / x for x in folders), **changed)


def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path) -> None:
    space = filled(tmp_path)
    header, path = space.header, tmp_path / "rank-00000-of-00001-folder-0.swap"
    space.close()
    whole = path.read_bytes()

    def damage(at: int) -> None:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])

    for at, message in ((0, "got another kind of file"), (40, "got another header than was written")):
        damage(at)
        with refused(f"folder-0.swap: {message}"):
            reopen(tmp_path)
    damage(header.record_at(1) + 60)
    reopen(tmp_path).close()  # number 0 is whole
    path.write_bytes(whole[: header.record_at(0)] + bytes(2 * header.record_size))
    with refused("got no record of a commit, expected one: the file is damaged"):
        reopen(tmp_path)
    damage(header.stripes[0][0]["low"][0].place + 8999)
    space = reopen(tmp_path)
    with refused("bucket 0, 'low': got other bytes than were written at \\d+ of the file, 9000 of"):
        read(space, 0)
    assert read(space, 7) == expected(7, 1)
    space.close()
    damage(header.stripes[0][0]["low"][0].place + 9000)  # padding
    space = reopen(tmp_path)
    assert read(space, 0) == expected(0, 1)
    space.close()


def test_the_kernel_sums_blocks_as_the_reference_does() -> None:
    """With every instruction set, whatever the number of blocks and the address are."""
    by = np.random.default_rng(0)
    weights = np.arange(512, 0, -1, dtype=np.uint64)
    for isa, blocks, shift in product(range(len(cpu_adam.instruction_sets())), (0, 1, 3, 4, 9), (0, 1)):
        data = by.integers(0, 256, blocks * 4096 + shift, np.uint8)
        got = np.full((blocks + 1, 2), 7, np.uint64)
        cpu_adam.block_sums(data.ctypes.data + shift, got.ctypes.data, blocks, isa)
        words = data[shift:].copy().view(np.uint64).reshape(blocks, 512)
        expected = [[x.sum(), (x * weights).sum()] for x in words]
        assert got.tolist() == [*expected, [7, 7]]


def test_no_flipped_bit_and_no_zeroed_or_moved_block_or_word_gets_through() -> None:
    by = np.random.default_rng(0)
    data = by.integers(0, 256, 5 * 4096 + 100, np.uint8)
    right = block_checksum(memoryview(data))
    assert right == block_checksum(memoryview(data.copy()))
    for at in by.integers(0, 8 * data.size, 300):
        for width in (1, 17, 64):  # neighbouring bits: the first and the last are flipped, others at random
            wrong = np.unpackbits(data)
            burst = by.integers(0, 2, width, np.uint8)
            burst[[0, -1]] = 1
            burst = burst[: wrong.size - at]
            wrong[at : at + burst.size] ^= burst
            assert block_checksum(memoryview(np.packbits(wrong))) != right
    for size in (8, 64, 4096):
        parts = data[: 5 * 4096].reshape(-1, size)
        for n, m in (by.choice(len(parts), 2, replace=False) for _ in range(5)):
            for changed in ({n: 0 * parts[n]}, {n: parts[m]}, {n: parts[m], m: parts[n]}):
                wrong = data.copy()
                for k, x in changed.items():
                    wrong[k * size : (k + 1) * size] = x
                assert block_checksum(memoryview(wrong)) != right
    words = data[: 5 * 4096].view(np.uint64)
    for n, m in by.choice(512, (50, 2), replace=False):  # a bit of one word, and back in another of its block
        bit = np.uint64(1 << int(by.integers(40)))
        wrong = data.copy()
        changed = wrong[: 5 * 4096].view(np.uint64)
        changed[n], changed[m] = words[n] + bit, words[m] - bit
        assert block_checksum(memoryview(wrong)) != right


def test_headers_and_records_read_back(tmp_path: Path) -> None:
    header = SwapHeader(IDENTITY, "one", 1, 2, ("/a", "/b"), (1, 2), EXTENTS, 1)
    assert parse_header(header.raw, "x") == header
    with refused(r"got 2 of \[1, 2\], expected a file of one of the folders"):
        parse_header(evolve(header, folder=2).raw, "x")
    record = CommitRecord((0, 1), {"step": 9}, 3, (2**32 - 1, *range(header.num_checksums - 1)))
    assert parse_record(record.raw(header.record_size), header, "x") == record
    with refused("got a record of .* bytes, expected at most .*: save less as extra="):
        evolve(record, metadata={"x": "x" * (1 << 21)}).raw(header.record_size)


def test_a_large_buffer_goes_in_batches_and_what_is_damaged_is_found_in_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_file, "SUMMED", 4096)
    monkeypatch.setattr(swap_file, "BATCH", 3 * 4096)
    transfer, moved = DirectFile.write, list[int]()
    monkeypatch.setattr(
        DirectFile, "write", lambda *x: (moved.append(sum(v.nbytes for v in x[1])), transfer(*x))
    )
    sizes = {"low": 7 * 4096 + 5, "high": 2 * 4096}
    extents = {0: Extent.of(sizes.items())}
    space = create(tmp_path, extents=extents)
    assert not space.is_written(0)
    moved.clear()
    data = [pages(np.random.default_rng(n).bytes(size)) for n, size in enumerate(sizes.values())]
    space.write(0, ["low", "high"], data)
    assert (sorted(moved), space.is_written(0)) == ([4096, 3 * 4096, 3 * 4096, 3 * 4096], True)
    space.commit({})
    into = [pages(bytes(size)) for size in sizes.values()]
    space.read(0, ["low", "high"], into)
    assert ([bytes(x) for x in into], space.is_written(0)) == ([bytes(x) for x in data], True)
    begin = space.header.stripes[0][0]["low"][0].place
    space.close()
    with (tmp_path / swap_file.swap_file_name(0, 1, 0)).open("r+b") as file:
        file.seek(begin + 7 * 4096 + 4)  # the last byte of "low"
        file.write(bytes([data[0][7 * 4096 + 4] ^ 1]))
    space = reopen(tmp_path, extents=extents)
    with refused(f"'low': got other bytes than were written at {begin + 7 * 4096} of .*, 5 "):
        space.read(0, ["low", "high"], into)
    space.close()


def test_after_an_error_on_one_drive_the_others_do_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SUMMED", "BATCH"):
        monkeypatch.setattr(swap_file, name, 4096)
    good, bad, written = tmp_path / "good", tmp_path / "bad", list[int]()
    space = create(good, bad, extents={0: Extent.of([("low", 100 * 4096)])})

    def write(file: DirectFile, _: Any, offset: int, __: str = "") -> None:
        if file.path.parent == bad:
            raise DiskError("the drive is gone")
        sleep(0.005)
        written.append(offset)

    with monkeypatch.context() as patched, pytest.raises(DiskError, match="gone"):
        patched.setattr(DirectFile, "write", write)
        space.write(0, ["low"], [pages(bytes(100 * 4096))])
    assert len(written) < 10  # of 50
    space.close()


def test_every_drive_has_an_equal_part_and_moves_it_while_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each buffer: a step moves some of a bucket and not others."""
    folders = [tmp_path / x for x in "abc"]
    space = create(*folders, extents={0: Extent.of([("low", 6 << 12), ("high", 3 << 12)])})
    together, moved, write = Barrier(len(folders), timeout=20), list[tuple[str, int]](), DirectFile.write

    def spied(file: DirectFile, data: Any, *rest: Any) -> None:
        together.wait()
        moved.append((file.path.parent.name, sum(x.nbytes for x in data)))
        write(file, data, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, "write", spied)
        space.write(0, ["low"], [pages(bytes(6 << 12))])
        space.write(0, ["high"], [pages(bytes(3 << 12))])
    assert sorted(moved) == sorted((x.name, n) for x in folders for n in (4096, 8192))
    space.close()


def test_a_space_of_unequal_parts_goes_on(tmp_path: Path) -> None:
    """Older versions of zfunc gave a faster drive more."""
    folders = [tmp_path / "fast", tmp_path / "slow"]
    filled(*folders, shares=(667, 333)).close()
    space = reopen(*folders)
    assert space.header.shares == (667, 333)
    write(space, 0, 2)
    space.commit({"step": 2})
    space.close()
    space = reopen(*folders)
    assert (read(space, 0), read(space, 7)) == (expected(0, 2), expected(7, 1))
    space.close()
