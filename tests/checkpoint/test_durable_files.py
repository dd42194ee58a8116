"""A file is replaced as a whole or not at all, and a folder has one owner."""

import os
from pathlib import Path

import pytest

from zfunc.checkpoint.durable_files import atomic_replace, is_partial, lock, replace_text


def test_the_old_file_stays_until_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with atomic_replace(path, mode=0o600) as one, atomic_replace(path) as two:
        one.write(b"one")
        two.write(b"two")
        partials = [x for x in tmp_path.iterdir() if is_partial(x)]
        assert len(partials) == 2
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_nothing_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_replace(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == {"x.bin": b"old"}


def test_a_link_is_followed_but_not_one_in_place_of_the_partial_file(tmp_path: Path) -> None:
    (tmp_path / "to").write_text("old")
    (tmp_path / "link").symlink_to("to")
    replace_text(tmp_path / "link", "new")
    assert ((tmp_path / "link").is_symlink(), (tmp_path / "to").read_text()) == (True, "new")
    left = tmp_path / "left"
    left.symlink_to("to")
    with atomic_replace(tmp_path / "x", partial=left) as file:
        file.write(b"x")
    assert ((tmp_path / "to").read_text(), (tmp_path / "x").read_text()) == ("new", "x")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_text(tmp_path / "pipe", "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    unnamed = os.pipe()  # as /dev/stdout may be
    replace_text(Path(f"/dev/fd/{unnamed[1]}"), "text")
    assert os.read(unnamed[0], 100) == b"text"
    for fd in unnamed:
        os.close(fd)


def test_a_held_lock_is_refused_without_waiting(tmp_path: Path) -> None:
    fd = lock(tmp_path, wait=False)
    with pytest.raises(BlockingIOError):
        lock(tmp_path, wait=False)
    os.close(fd)
    os.close(lock(tmp_path, wait=False))
