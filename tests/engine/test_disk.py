"""The optimizer state on the disk, alone or with the rest of it: a checkpoint, whatever is killed or fails.

That it is the same training is a law (test_laws.py).
"""

import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from pairs import in_pairs
from parity import NUMBERS
from saved import refused
from threaded_ranks import on_every, programs_of

import zfunc
from zfunc.checkpoint.swap_checkpoint import open_swap_checkpoint
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.engine.program.program import Program
from zfunc.engine.step.save_load import restore
from zfunc.runtime.direct_io import DirectFile

ON_DISK: dict[str, dict[str, Any]] = {
    "state": {},
    "state, deferred": {"defer": True, "commit_every": 2},
    "half of the state": {"state_on": "host:0.5,disk", "commit_every": 3, "slots": 1},
    "state beside streamed parameters": {"params_on": "host", "commit_every": 2},
    "everything": {"params_on": "disk", "grads_on": "disk", "activations_on": "disk", "defer": True},
    "everything, one slot": {
        **{"params_on": "disk", "grads_on": "disk", "slots": 1},
        **{"order": "horizontal", "schedule": "CriticalPath", "activations_on": "host,disk"},
    },
}
PLACED = [x for x in ON_DISK if x != "state"]  # which is there in "everything, one slot"


def on_disk(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Settings with a swap space in a new folder and one in it."""
    (second := folder / "second").mkdir(parents=True, exist_ok=True)
    return {"state_on": "disk", **settings, "swap": [folder, second], **ON_DISK[name]}


def test_a_swap_space_of_other_ranks_or_in_use_is_refused_with_what_to_type(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    (other := tmp_path / "other").mkdir()
    batch = trained.MODELS["frozen below"]()[1]

    def make(folder: Path) -> Program:
        return trained.compiled("frozen below", precision="bf16", state_on="disk", swap=[folder])[0]

    def train(program: Program) -> dict[str, torch.Tensor]:
        state, _ = zfunc.train_step(program, zfunc.init(program, seed=1), batch(0))
        zfunc.save(one, program, state)
        zfunc.save(tmp_path / "saved", program, state)
        return zfunc.params(program, state)

    programs = programs_of(2, partial(make, one), batch(0))
    expected, _ = on_every(programs, train)
    alone = make(other)
    with refused("one.*: got a swap space that a process uses"):
        zfunc.load(one, alone)
    del programs
    gc.collect()
    said = (
        r"got none, expected a file of the swap space: .* another number of ranks .* `swap` with `resume=auto` .*"
        rf"zfunc\.load\('{one}', program\)"
    )
    with refused(said):
        zfunc.load(one, make(one))
    got = zfunc.params(alone, zfunc.load(one, alone))
    assert all(torch.equal(got[name], x) for name, x in expected.items())
    files = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert {x.stat().st_mode & 0o777 for x in files} == {0o600}
    assert {"manifest.json", "latest"} < {x.name for x in files}


def test_activations_alone_wait_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residuals of min-cut too, for the largest batch so far, in files that nobody sees."""
    numbers = {"precision": "bf16", "recompute": "min-cut", "micro_batches": 2, "clip_norm": 0.1}
    chosen = {"activations_on": "disk", "swap": [tmp_path], "slots": 1}
    results = []
    for more in ({}, chosen):
        program, batch = trained.compiled("odd sizes", **numbers, **more)
        state, losses = zfunc.init(program, seed=2), list[float]()
        for i in (0, 1, 2):  # the second batch is larger
            rows = tuple(torch.cat([x] * (2 if i == 1 else 1)) for x in batch(i))
            state, metrics = zfunc.train_step(program, state, rows)
            losses += metrics.loss, metrics.grad_norm
        results.append((losses, zfunc.params(program, state)))
        assert not os.listdir(tmp_path)
    (expected, weights), (got, moved) = results
    assert repr(got) == repr(expected)
    assert all(torch.equal(x, weights[name]) for name, x in moved.items())
    pages = {r for r in program.cache.staging if r.buffer == "act_page"}
    assert len(pages) == 1
    monkeypatch.setattr(DirectFile, "read", failing(DirectFile.read, 0))
    with pytest.raises(zfunc.errors.DiskError, match="gone"):
        zfunc.train_step(program, state, batch(3))
    monkeypatch.undo()
    zfunc.train_step(program, state, batch(3))  # nothing was updated


def test_memory_has_no_frozen_parameters_and_no_step_writes_them(tmp_path: Path) -> None:
    """Also where nothing else is on the disk: adapters of a base that is larger than memory."""
    chosen = on_disk(tmp_path, "state", params_on="disk", state_on="host:1,disk")
    program, batch = trained.compiled("frozen below", **chosen)
    state, write, written = zfunc.init(program, seed=2), DirectFile.write, list[str]()
    before, names = zfunc.params(program, state), {x.name for x in program.layout.frozen}
    assert not any(r.buffer == "frozen" for r in state.buffers.memory)
    once = [x.index for x in program.layout.frozen_buckets]
    planned = {r.index[0]: r.nbytes for r in state.buffers.memory if r.buffer == "extent"}
    assert sum(planned[b] for b in once) == program.spec.swap_records + sum(
        program.spec.extents[b].nbytes for b in once
    )

    def noted(self: DirectFile, data: Any, offset: int, what: str = "") -> None:
        written.append(what)
        write(self, data, offset, what)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DirectFile, "write", noted)
        trained.steps(program, state, batch, 0, 3)
    assert written
    assert not any("frozen" in what for what in written)
    killed(program)
    state, read, places = zfunc.load(tmp_path, program), DirectFile.read, list[Any]()

    def seen(self: DirectFile, into: Any, offset: int, what: str = "") -> None:
        places.append((self.path, offset))
        read(self, into, offset, what)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DirectFile, "read", seen)
        after = zfunc.params(program, state)
    assert len(places) == len(set(places)) > 0
    assert {x for x in after if torch.equal(after[x], before[x])} == names


def killed(program: Program) -> None:
    """What is left of a program after its process was killed: its files, and nobody who holds them."""
    swap: Any = program.cache.swap
    swap.close()


@pytest.mark.parametrize(
    ("settings", "placed"), in_pairs(["fp32, clipped", "bf16 in 2, 16 bits", "fp16 in 2"], PLACED)
)
def test_a_killed_training_goes_on_from_its_last_commit(settings: str, placed: str, tmp_path: Path) -> None:
    chosen = on_disk(tmp_path, placed, **NUMBERS[settings])
    program, batch = trained.compiled("frozen below", **chosen)
    state, whole = trained.steps(program, zfunc.init(program, seed=2), batch, 0, 6)
    killed(program)
    again, _ = trained.compiled("frozen below", **chosen)
    state = zfunc.load(tmp_path, again)
    late = again.spec.deferred
    every = again.settings.commit_every
    assert state.batches == (6 - late) // every * every
    _, rest = trained.steps(again, state, batch, state.batches, 6)
    assert rest == whole[state.batches : 6]


BEFORE_A_COMMIT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a skipped step": {"precision": "fp16"},
    "an evaluation, which made the deferred update": {"defer": True, "clip_norm": 0.1, "commit_every": 2},
}


@pytest.mark.parametrize("before", BEFORE_A_COMMIT)
def test_what_memory_alone_has_is_in_the_next_commit(before: str, tmp_path: Path) -> None:
    chosen = {**on_disk(tmp_path, "half of the state"), **BEFORE_A_COMMIT[before]}
    skipping = trained.injecting(float("inf"), {3} if "precision" in chosen else set())
    program, batch = trained.compiled("odd sizes", **chosen, stages=skipping)
    state = zfunc.init(program, seed=2, loss_scale=zfunc.LossScale(scale=2.0))
    state, _ = trained.steps(program, state, batch, 0, 2)
    expected = zfunc.params(program, state)
    if before == "nothing":
        zfunc.save(tmp_path, program, state)
    else:
        trained.steps(program, state, batch, 2, 3)
    killed(program)
    again, _ = trained.compiled("odd sizes", **chosen)
    got = zfunc.params(again, zfunc.load(tmp_path, again))
    assert all(torch.equal(got[name], x) for name, x in expected.items())


def live(pipe: int, last: int, chosen: dict[str, Any], between: Callable[..., Any]) -> None:
    """A process that trains from the last commit on, and says what it sees; `between` two steps it does this."""
    program, batch = trained.compiled("frozen below", **chosen)
    try:
        state = zfunc.load(chosen["swap"][0], program)
    except zfunc.errors.CheckpointError:  # killed before the first commit
        state = zfunc.init(program, seed=2)
    while state.batches < last:
        number = state.batches
        state, seen = trained.steps(program, state, batch, number, number + 1)
        state = between(program, state)
        os.write(pipe, f"{number} {seen}\n".encode())
    os.write(pipe, b"end\n")


BETWEEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "nothing": (lambda _, state: state, {}),
    "a flush, which commits": (zfunc.flush, {"clip_norm": 0.1}),
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BETWEEN)
def test_a_process_killed_before_any_call_of_a_commit_goes_on_from_a_whole_step(
    name: str, every: int, tmp_path: Path
) -> None:
    """By SIGKILL. Each life comes a call further, by day two, and does not tell of its last step."""
    between, more = BETWEEN[name]
    numbers = {**NUMBERS["bf16 in 2, 16 bits"], **more}
    chosen, last = on_disk(tmp_path, "everything", **numbers), 7
    program, batch = trained.compiled("frozen below", **numbers)
    _, expected = trained.steps(program, zfunc.init(program, seed=2), batch, 0, last)
    program, _ = trained.compiled("frozen below", **chosen)
    state, _ = trained.steps(program, zfunc.init(program, seed=2), batch, 0, 1)  # traced for all lives
    between(program, state)
    killed(program)
    at, calls, grown = 1, 0, set[int]()
    while not (told := one_life(calls, last, chosen, between)).endswith("end\n"):
        now = at + told.count("\n")
        assert told == "".join(f"{n} {expected[n : n + 1]}\n" for n in range(at, now))
        at = open_swap_checkpoint(tmp_path).manifest.position.batches
        grown.add(at - now)
        calls += every
    assert grown == {0, 1}  # its last step was committed or not
    assert calls > 6


def one_life(at: int, last: int, chosen: dict[str, Any], between: Callable[..., Any]) -> str:
    """What a process says of its steps that is killed before that call of its commits."""
    source, pipe = os.pipe()
    if not (child := os.fork()):
        try:
            die_in_a_commit(at)
            live(pipe, last, chosen, between)
        except BaseException as error:
            os.write(pipe, f"-1 {error!r}\n".encode())
        finally:
            os._exit(0)
    os.close(pipe)
    with open(source) as lines:
        os.waitpid(child, 0)
        return lines.read()


def die_in_a_commit(at: int) -> None:
    """SIGKILL for this process before so many calls that its commits make of the system."""
    left, commit, inside = iter(range(at, -1, -1)), SwapSpace.commit, threading.Event()

    def watched(call: Callable[..., Any], *of: Any) -> Any:
        if inside.is_set() and not next(left):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*of)

    def within(self: SwapSpace, record: Any) -> None:
        inside.set()
        commit(self, record)
        inside.clear()

    SwapSpace.commit = within
    for name in ("pwritev", "preadv", "fdatasync"):
        setattr(os, name, partial(watched, getattr(os, name)))


FLUSHED: dict[str, dict[str, Any]] = {
    "half of it": {"commit_every": 1},
    "read before": {"commit_every": 1},
    "every third": {},
    "a skipped step": {"precision": "fp16", "clip_norm": None, "commit_every": 1},
}


@pytest.mark.parametrize("way", FLUSHED)
def test_a_flush_commits_what_the_next_step_would(way: str, tmp_path: Path) -> None:
    """The updates so far, with the `extra` of the commit before; a second flush commits nothing."""
    chosen = {**on_disk(tmp_path, "half of the state"), "defer": True, "clip_norm": 0.1, **FLUSHED[way]}
    skipping = trained.injecting(float("inf"), {3} if "precision" in chosen else set())
    program, batch = trained.compiled("odd sizes", **chosen, stages=skipping)
    state = zfunc.init(program, seed=2, loss_scale=zfunc.LossScale(scale=2.0))
    save = zfunc.Save(tmp_path, extra={"mine": 7})
    numbers, swap = list[int](), program.cache.swap
    assert swap
    for n in range(3):
        state, _ = zfunc.train_step(program, state, batch(n), save=save)
        before = swap.number
        if way == "read before":
            zfunc.params(program, state)
        state = zfunc.flush(program, zfunc.flush(program, state))
        numbers.append(swap.number - before)
    assert numbers == ([0, 0, 1] if way == "every third" else [1, 1, 1])
    expected, position = zfunc.params(program, state), state.position
    killed(program)
    again, _ = trained.compiled("odd sizes", **chosen)
    restored = restore(tmp_path, again)
    assert (restored.state.position, restored.extra) == (position, {"mine": 7})
    got = zfunc.params(again, restored.state)
    assert all(torch.equal(got[name], x) for name, x in expected.items())


def test_it_loads_in_memory_on_two_ranks_and_back(tmp_path: Path) -> None:
    """A swap space is a checkpoint: for another number of ranks, other buckets, and no swap space at all."""
    numbers = NUMBERS["bf16 in 2, 16 bits"]
    program, batch = trained.compiled("frozen below", **on_disk(tmp_path / "one", "everything", **numbers))
    state, _ = trained.steps(program, zfunc.init(program, seed=2), batch, 0, 3)
    # Makes the deferred update, which no step has committed.
    expected = zfunc.evaluate(program, state, batch(9))
    zfunc.save(tmp_path / "one", program, state)
    killed(program)
    chosen = {**on_disk(tmp_path / "two", "everything", **numbers), "stage": 3, "bucket_size": 900}
    pair = programs_of(2, lambda: trained.compiled("frozen below", **chosen)[0])
    on_every(pair, partial(zfunc.load, tmp_path / "one"))
    on_every(pair, killed)
    alone, _ = trained.compiled("frozen below", **numbers)
    assert zfunc.evaluate(alone, zfunc.load(tmp_path / "two", alone), batch(9)) == expected


def failing(write: Callable[..., None], number: int) -> Callable[..., None]:
    """`write`, but the call of this number fails, and those after it."""
    calls = iter(range(1 << 30))

    def attempt(self: DirectFile, *args: Any, **more: Any) -> None:
        if next(calls) >= number:
            raise zfunc.errors.DiskError(f"{self.path}: the drive is gone")
        write(self, *args, **more)

    return attempt


def test_a_swap_space_serves_one_state_and_is_never_overwritten(tmp_path: Path) -> None:
    chosen = on_disk(tmp_path, "state")
    program, batch = trained.compiled("odd sizes", **chosen)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DirectFile, "write", failing(DirectFile.write, 4))
        with pytest.raises(zfunc.errors.DiskError, match="gone"):
            zfunc.init(program)  # a space that nothing is committed to makes room
    state = zfunc.init(program)
    with refused("got the swap space of another run"):
        zfunc.init(program)
    state, _ = zfunc.train_step(program, state, batch(0))  # it is still in use
    other, _ = trained.compiled("odd sizes", **chosen)
    with refused("in use|locked|another"):
        zfunc.load(tmp_path, other)
    newer = zfunc.load(tmp_path, program)
    with refused("closed"):
        zfunc.train_step(program, state, batch(0))
    with refused("closed"):
        zfunc.save(tmp_path, program, state)
    zfunc.train_step(program, newer, batch(0))
    del program, state, newer
    gc.collect()
    with refused("swap"):
        zfunc.init(other)  # it has a training
    zfunc.train_step(other, zfunc.load(tmp_path, other), batch(0))
