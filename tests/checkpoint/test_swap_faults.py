"""Drives that fail, lie or are slow: the state is lost or whole, and never wrong.

Of processes that are killed tests/engine/test_disk.py and the soak say that.
"""

import os
import random
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from bad_disks import FAULTS, once
from test_swap_crashes import Training

from zfunc.checkpoint import durable_files, swap_space
from zfunc.errors import CheckpointError
from zfunc.runtime.host_memory import map_pages


@pytest.fixture(autouse=True)
def any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files, "IN_MEMORY", ())


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
