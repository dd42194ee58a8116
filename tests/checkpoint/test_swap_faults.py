"""Drives that fail, lie or are slow, and processes that are killed: the state is lost or whole, and never wrong."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from bad_disks import FAULTS, once
from test_swap_crashes import CHANGING, EXTENTS, SIZES, Training

from zfunc.checkpoint import swap_folders, swap_space
from zfunc.errors import CheckpointError
from zfunc.runtime.host_pages import map_pages


@pytest.fixture(autouse=True)
def any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_folders, "IN_MEMORY", ())


def in_pages(data: bytes) -> memoryview:
    pages = map_pages(len(data))
    pages[:] = data
    return memoryview(pages)


@pytest.mark.parametrize("name", FAULTS)
def test_the_state_is_lost_or_whole_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One call fails, a later one each time, until no step makes so many."""
    function, fault, due = FAULTS[name]
    right = getattr(os, function)
    said = 0
    for at in range(100):
        (folder := tmp_path / str(at)).mkdir()
        training = Training(swap_space, [folder], random.Random(at), world=1, memory=in_pages)
        training.create()
        calls = count()
        with monkeypatch.context() as patched:
            patched.setattr(os, function, once(right, fault(right), calls, at))
            error = None
            try:
                for _ in range(2):
                    training.write()
                    training.commit()
                    training.check(0, training.spaces[0], training.now)
            except (CheckpointError, OSError) as caught:
                error = caught
        training.spaces[0].close()
        if next(calls) <= at:  # it did not happen
            break
        assert due or error is None
        said += error is not None
        assert error is None or str(folder) in str(error)
        with closing(training.open(0)) as space:
            assert training.commits <= space.number <= training.commits + 1
            try:
                training.check(0, space, training.committed[space.number])
            except CheckpointError:  # what is there is damaged, and is not given out
                assert (name, error is None) == ("zeros written", False)
    assert at > 4
    assert said >= (at - 1) * due  # a record that is retired is zeros anyway


WRITER = """
import os, random, sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from test_swap_crashes import CHANGING, EXTENTS, SIZES, Training, content
from test_swap_faults import in_pages, swap_folders, swap_space
from zfunc.optim import kernel_loader  # not in every child
swap_folders.IN_MEMORY = ()
folders = [Path(x) for x in sys.argv[3:]]
for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    print(os.getpid(), flush=True)
    training = Training(swap_space, folders, random.Random(int(line)), world=1, memory=in_pages)
    training.spaces = [training.open(0)]
    training.number = training.spaces[0].number
    print(training.number, flush=True)
    while True:
        for b in CHANGING if training.number else EXTENTS:
            data = [in_pages(content(0, b, n, training.number + 1)) for n in SIZES]
            training.spaces[0].write(b, list(SIZES), data)
        training.number += 1
        training.spaces[0].commit({"number": training.number})
        print(training.number, flush=True)
"""


@pytest.mark.slow
def test_killed_five_hundred_times_it_goes_on_from_a_whole_commit(tmp_path: Path) -> None:
    """Each process is killed a moment after it began; the commits it told of are there, or one more."""
    moments = random.Random(0)
    for folder in (folders := [tmp_path / "a", tmp_path / "b"]):
        folder.mkdir()
    training = Training(swap_space, folders, random.Random(0), world=1, memory=in_pages)
    training.create()
    training.spaces[0].close()
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", WRITER, str(here), str(here.parent), *map(str, folders)]
    told = killed_in = 0
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for n in range(500):
            print(n, file=writer.stdin, flush=True)
            child = int(writer.stdout.readline())
            if n % 4:  # else it may not have opened it
                assert int(writer.stdout.readline()) == told
            time.sleep(moments.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            before = told
            while not (line := writer.stdout.readline()).startswith("dead"):
                told = int(line)
            with closing(training.open(0)) as space:
                assert told <= space.number <= told + 1
                killed_in += told > before
                told = space.number
                state = {(b, name): told if b in CHANGING else 1 for b in EXTENTS for name in SIZES}
                training.check(0, space, state if told else {})
        writer.stdin.close()
    assert told > 100
    assert killed_in > 50  # that many had gone on
