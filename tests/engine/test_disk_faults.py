"""A drive, a stage or a user fails while the state is on the disk: no value is wrong, what failed is said, and the
next life goes on from a whole step to the bit."""

import ctypes
import errno
import gc
import logging
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from attrs import frozen
from bad_disks import FAULTS, fails, once
from pairs import in_pairs
from parity import NUMBERS
from saved import refused
from small_models import rows_of
from test_disk import ON_DISK, on_disk
from threaded_ranks import on_every, programs_of

import zfunc
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.state import memory
from zfunc.engine.state.state import State
from zfunc.errors import AbandonedCalls
from zfunc.runtime import blocking_calls, direct_io, executor
from zfunc.runtime.direct_io import DirectFile
from zfunc.runtime.fault_injection import Jitter

STEPS = 4
Seen = list[tuple[Any, ...]]


@cache
def in_memory(model: str, numbers: str) -> Seen:
    """What each step of a training has that nothing disturbs."""
    program, batch = trained.compiled(model, **NUMBERS[numbers])
    return trained.steps(program, zfunc.init(program, seed=2), batch, 0, STEPS)[1]


@frozen
class Job:
    """A training with a swap space of its own."""

    folder: Path
    placed: str
    model: str = "frozen below"
    numbers: str = "fp32, clipped"

    def program(self, **more: Any) -> Program:
        settings = on_disk(self.folder, self.placed, **NUMBERS[self.numbers])
        return trained.compiled(self.model, **{**settings, **more})[0]

    def steps(self, program: Program, state: State, start: int, stop: int, **more: Any) -> tuple[State, Seen]:
        return trained.steps(program, state, trained.MODELS[self.model]()[1], start, stop, **more)

    def check(self, seen: Seen, start: int = 0) -> None:
        """These steps are those of memory, from number `start` on."""
        assert repr(seen) == repr(self.rest(start)[: len(seen)])

    def rest(self, start: int) -> Seen:
        """The steps of memory from that number on."""
        return in_memory(self.model, self.numbers)[start:]

    def goes_on(self, made: int) -> None:
        """In another life, from the last commit of a life that has made so many steps, or the one under way."""
        program = self.program()
        try:
            state = zfunc.load(self.folder, program)
            every, late = program.settings.commit_every, program.spec.deferred
            at = state.batches
            assert (made - late) // every * every <= at <= made + 1
            self.check(self.steps(program, state, at, STEPS)[1], at)
        finally:
            program.close_swap()


# --- drives --------------------------------------------------------------------------------------------

WHILE_MADE = {
    "ENOSPC when reserved": ("posix_fallocate", fails(errno.ENOSPC), True),
    "EIO when named": ("rename", fails(errno.EIO), True),
    "EIO when its folder is synced": ("fsync", fails(errno.EIO), True),
}
ALWAYS = [(name, "everything", 1 if name in WHILE_MADE else 17) for name in (*FAULTS, *WHILE_MADE)]
EVERY_CALL = [(name, placed, 1) for name in (*FAULTS, *WHILE_MADE) for placed in ON_DISK]


@pytest.mark.parametrize(
    ("name", "placed", "step"), [*ALWAYS, *(pytest.param(*x, marks=pytest.mark.slow) for x in EVERY_CALL)]
)
def test_whatever_call_fails_nothing_is_wrong_and_the_next_life_is_whole(
    name: str, placed: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that init, four steps and their commits make, one fails: a later one each time."""
    function, fault, due = {**FAULTS, **WHILE_MADE}[name]
    right, happened = getattr(os, function), 0
    for at in count(len(name) % min(step, 7), step):
        job, calls = Job(tmp_path / str(at), placed), count()
        program, seen, error, made = job.program(), [], None, False
        with monkeypatch.context() as patched:
            patched.setattr(os, function, once(right, fault(right), calls, at))
            try:
                state, made = zfunc.init(program, seed=2), True
                for i in range(STEPS):
                    state, new = job.steps(program, state, i, i + 1)
                    seen += new
            except (zfunc.errors.CheckpointError, zfunc.errors.DiskError) as caught:
                error = caught
        program.close_swap()
        if next(calls) <= at:
            break
        happened += 1
        job.check(seen)
        assert (error is not None) == due or name == "zeros written"  # which may not have been read yet
        assert error is None or str(job.folder) in str(error)
        try:
            job.goes_on(len(seen))
        except zfunc.errors.CheckpointError as lost:
            if made:
                damage = "the checksum differs" in str(lost) or "got another kind of file" in str(lost)
                assert (damage, name) == (True, "zeros written")
            else:  # there was no commit yet, or the first one is not on the drive
                program = job.program()
                job.check(job.steps(program, zfunc.init(program, seed=2), 0, STEPS)[1])
                program.close_swap()
    assert happened > (0 if name in WHILE_MADE else 1)


def test_a_slow_drive_is_seen_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, write, sleeping = Job(tmp_path, "state"), os.pwritev, threading.Event()
    program = job.program()
    state, seen = job.steps(program, zfunc.init(program, seed=2), 0, 2)
    monkeypatch.setattr(os, "pwritev", lambda *x: sleeping.wait(0.05) or write(*x))
    _, metrics = zfunc.train_step(program, state, trained.MODELS[job.model]()[1](2), trace=True)
    job.check([*seen, (3, metrics.loss, metrics.grad_norm, metrics.lr, False, 1.0)])
    assert metrics.timeline is not None
    longest = max(metrics.timeline.events, key=lambda x: x.end - x.start)
    assert longest.op in ("page_out[0]", "commit")
    assert 0.05 < longest.end - longest.start < metrics.seconds


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("schedule", ["Overlapped", "Serial"])
def test_a_drive_that_hangs_is_named_and_an_interrupt_leaves_it(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the state; this process keeps the lock of the swap space, for the drive may still write."""
    monkeypatch.setattr(blocking_calls, "SLOW", 0.02)
    for module in (blocking_calls, direct_io, executor):
        monkeypatch.setattr(module, "LEAVE_AFTER", 0.05)
    job, write, go_on = Job(tmp_path, "state"), os.pwritev, threading.Event()
    program = job.program(schedule=schedule)
    state, _ = job.steps(program, zfunc.init(program, seed=2), 0, 2)

    def hang(*of: Any) -> int:
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        monkeypatch.setattr(os, "pwritev", lambda *x: go_on.wait() and write(*x))
        go_on.wait()
        return write(*of)

    monkeypatch.setattr(os, "pwritev", hang)
    with caplog.at_level(logging.WARNING, "zfunc"), pytest.raises(AbandonedCalls, match="interrupted"):
        job.steps(program, state, 2, 3)
    assert any("folder-0.swap: writing bytes " in x and "has not answered for" in x for x in caplog.messages)
    with pytest.raises(zfunc.errors.DonatedStateError, match="step 3 was given up"):
        job.steps(program, state, 2, 3)
    program.close_swap()
    with refused("got a swap space that a process uses"):
        job.goes_on(2)
    go_on.set()


@pytest.mark.slow
def test_fifty_lives_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    """Not a descriptor, thread or mapping; and no page of the files in memory."""
    job, counts = Job(tmp_path, "everything"), list[tuple[int, ...]]()
    for life in range(50):
        program = job.program()
        state = zfunc.load(tmp_path, program) if life else zfunc.init(program, seed=2)
        job.steps(program, state, life, life + 1)
        if life % 2:
            program.close_swap()
        del program, state
        gc.collect()
        tables = ("/proc/self/fd", "/proc/self/task")
        counts.append(
            (*(len(os.listdir(x)) for x in tables), Path("/proc/self/maps").read_text().count("\n"))
        )
    assert counts[-1] <= counts[9]
    for path in tmp_path.glob("**/*.swap"):
        with closing(DirectFile.open(path)) as file:
            assert not file.direct or resident_pages(path) == 0


def resident_pages(path: Path) -> int:
    """Pages of a file in the page cache."""
    libc = ctypes.CDLL(None)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        found = (ctypes.c_ubyte * (len(pages) // mmap.PAGESIZE))()
        view = ctypes.c_char.from_buffer(pages)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(pages)), found) == 0
        del view
        return sum(x & 1 for x in found)


# --- stages, and who calls them ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placed", "step"),
    [
        ("everything", 9),
        ("half of the state", 11),
        *(pytest.param(x, 1, marks=pytest.mark.slow) for x in ON_DISK),
    ],
)
def test_whatever_operation_fails_the_state_is_whole_or_said_to_be_gone(
    placed: str, step: int, tmp_path: Path
) -> None:
    """By an error or an interrupt; in the third step, which is made again where that is possible."""
    job, kept = Job(tmp_path / "first", placed), set[bool]()
    batch = trained.MODELS[job.model]()[1]
    program = job.program()
    third = 2 if program.spec.deferred else 3  # the step whose update it makes
    commit = third % program.settings.commit_every == 0
    names = [op.name for op in specialize(program, batch(0), commit=commit).plan.graph]
    for number, name in [*enumerate(names)][::step]:
        job, error, armed = (
            Job(tmp_path / str(number), placed),
            (ValueError, KeyboardInterrupt)[number % 2],
            [],
        )

        def fail(op: Any, mem: Any, now: Any, name: str = name, armed: list[Any] = armed) -> None:
            if op.name == name and armed:
                raise armed.pop()("got this in the middle")
            STAGES[op.verb](op, mem, now)

        program = job.program(stages={name.split("[")[0]: fail})
        state, seen = job.steps(program, zfunc.init(program, seed=2), 0, 2)
        armed.append(error)
        with pytest.raises((zfunc.errors.ExecutionError, KeyboardInterrupt), match="got this in the middle"):
            job.steps(program, state, 2, 3)
        try:
            seen += job.steps(program, state, 2, STEPS)[1]
            kept.add(True)
        except zfunc.errors.DonatedStateError as gone:
            kept.add("Go on from the last commit" not in str(gone))
        program.close_swap()
        job.check(seen)
        job.goes_on(len(seen))
    assert True in kept


@pytest.mark.parametrize("placed", ["everything, one slot", "half of the state"])
def test_looking_tracing_and_delays_change_no_bit(placed: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "swap", placed)
    program, alone = job.program(), trained.compiled(job.model, **NUMBERS[job.numbers])[0]
    batch = trained.MODELS[job.model]()[1]
    state, other, seen = zfunc.init(program, seed=2), zfunc.init(alone, seed=2), list[Any]()
    for i, how in enumerate(({"debug": True}, {"jitter": Jitter(7, 1e-3)}, {"trace": True}, {})):
        state, new = job.steps(program, state, i, i + 1, **how)
        other, _ = job.steps(alone, other, i, i + 1)
        seen += new
        assert zfunc.evaluate(program, state, batch(9)) == zfunc.evaluate(alone, other, batch(9))
        theirs = zfunc.params(alone, other)
        assert all(torch.equal(theirs[name], x) for name, x in zfunc.params(program, state).items())
        saved = zfunc.save(tmp_path / "saved", program, state)
        assert job.steps(alone, zfunc.load(saved, alone), i + 1, STEPS)[1] == job.rest(i + 1)
        other = zfunc.load(saved, alone)
    job.check(seen)
    program.close_swap()
    job.goes_on(len(seen))


NUMBERS_THAT_STOP: dict[str, tuple[str, float, dict[str, Any]]] = {
    "clipped": ("fp32, clipped", float("nan"), {}),
    "not clipped": ("bf16 in 2, 16 bits", float("inf"), {}),
    "skipped, then at the least loss scale": (
        "fp16 in 2",
        float("inf"),
        {"loss_scale": zfunc.LossScale(scale=2.0)},
    ),
}


@pytest.mark.parametrize(
    ("name", "placed"), in_pairs(NUMBERS_THAT_STOP, ["state", "half of the state", "everything"])
)
def test_numbers_that_are_not_finite_end_as_in_memory(name: str, placed: str, tmp_path: Path) -> None:
    """What a step raises, the steps after it, and the life after those; a refused step is never committed."""
    numbers, value, more = NUMBERS_THAT_STOP[name]
    ends = []
    job = Job(tmp_path, placed, "odd sizes", numbers)
    for make in (job.program, partial(trained.compiled, job.model, **NUMBERS[numbers])):
        made: Any = make(stages=trained.injecting(value, {3, 4, 5}))
        program = made if isinstance(made, Program) else made[0]
        state, seen = zfunc.init(program, seed=2, **more), list[Any]()
        for _ in range(7):
            try:
                state, new = job.steps(program, state, state.batches, state.batches + 1)
                seen += new
            except zfunc.NonFiniteError as error:
                seen.append(str(error))
            except zfunc.errors.DonatedStateError as error:
                seen.append(str(error).partition(". Go on")[0])
        program.close_swap()
        ends.append(seen)
    assert repr(ends[0]) == repr(ends[1])
    assert any(isinstance(x, str) for x in ends[0])
    program = job.program()
    state = zfunc.load(tmp_path, program)
    step = [x for x in ends[0] if not isinstance(x, str)][state.batches - 1] if state.batches else ()
    assert state.step == (step[0] - step[4] if step else 0)
    program.close_swap()


# --- ranks ---------------------------------------------------------------------------------------------


def of_two(
    folder: Path,
    where: str = "state beside streamed parameters",
    numbers: str = "bf16 in 2, 16 bits",
) -> list[Program]:
    """The programs of two ranks, which are threads."""
    placed = {**on_disk(folder, where, **NUMBERS[numbers]), "stage": 3, "schedule": "Serial"}
    rows = rows_of(trained.MODELS["frozen below"]()[1](0), 0, 2)
    return programs_of(2, lambda: trained.compiled("frozen below", **placed)[0], rows)


def tried(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but it returns what it raises."""

    def attempt(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            return error

    return attempt


@pytest.mark.parametrize("where", ["everything", "everything, one slot"])
def test_a_drive_without_room_on_one_rank_is_said_on_all(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For gradients, before the first commit and after it, and for activations in the first step."""
    programs, batch = of_two(tmp_path, where, "fp32, clipped"), trained.MODELS["frozen below"]()[1]
    full, spill = set[int](), memory.spill_files

    def limited(regions: Iterable[Any], folders: Sequence[str]) -> Any:
        regions = [*regions]
        if regions and threading.get_ident() in full:
            raise zfunc.errors.DiskError("no room")
        return spill(regions, folders)

    def without_room(function: Callable[..., Any], *of_each: Any) -> None:
        def attempt(program: Program, *own: Any) -> Any:
            if program.ranks.rank:
                full.add(threading.get_ident())
            return function(program, *own)

        errors = on_every(programs, tried(attempt), *of_each)
        full.clear()
        assert [str(x) for x in errors] == ["rank 1: DiskError: no room", "no room"]

    def step(program: Program, state: State) -> Any:
        return zfunc.train_step(program, state, rows_of(batch(0), program.ranks.rank, 2))

    monkeypatch.setattr(memory, "spill_files", limited)
    begin = partial(zfunc.init, seed=2)
    without_room(begin)
    states = on_every(programs, begin if programs[0].spec.deferred else partial(zfunc.load, tmp_path))
    without_room(step, states)
    losses = [x[1].loss for x in on_every(programs, step, states)]
    assert losses[0] == losses[1]
    on_every(programs, Program.close_swap)


def test_memory_that_one_rank_lacks_is_said_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then they go on together."""
    programs, batch = of_two(tmp_path), trained.MODELS["frozen below"]()[1]
    short = set[int]()
    monkeypatch.setattr(
        "zfunc.engine.program.program.available_host_bytes",
        lambda: 0 if threading.get_ident() in short else 1 << 60,
    )

    def train_step(program: Program, state: State) -> State:
        return zfunc.train_step(program, state, rows_of(batch(state.batches), program.ranks.rank, 2))[0]

    def after_a_refusal(function: Callable[..., State], *of_each: Any) -> list[State]:
        def attempt(program: Program, *own: Any) -> Any:
            if program.ranks.rank:
                short.add(threading.get_ident())
            return function(program, *own)

        errors = on_every(programs, tried(attempt), *of_each)
        assert all(isinstance(x, zfunc.errors.OutOfMemory) for x in errors)
        assert str(errors[1]).startswith(f"{function.__name__}: needs ")
        assert str(errors[0]) == f"rank 1: {errors[1]}"
        short.clear()
        return on_every(programs, function, *of_each)

    def load(program: Program) -> State:
        return zfunc.load(tmp_path, program)

    states = after_a_refusal(zfunc.init)
    states = after_a_refusal(train_step, states)
    on_every(programs, Program.close_swap)
    states = after_a_refusal(load)
    assert [x.batches for x in after_a_refusal(train_step, states)] == [1, 1]
    on_every(programs, Program.close_swap)


def test_a_commit_that_one_rank_could_not_make_is_not_built_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would overwrite the last one that all have."""
    programs, batch = of_two(tmp_path), trained.MODELS["frozen below"]()[1]
    states = on_every(programs, partial(zfunc.init, seed=2))

    def step(program: Program, state: State) -> Any:
        return zfunc.train_step(program, state, rows_of(batch(state.batches), program.ranks.rank, 2))

    for _ in range(2):
        states = [x[0] for x in on_every(programs, step, states)]
    sync = DirectFile.sync

    def gone(file: DirectFile) -> None:
        if "rank-00001" in file.path.name:
            raise zfunc.errors.DiskError(f"{file.path}: the drive is gone")
        sync(file)

    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, "sync", gone)
        errors = on_every(programs, tried(partial(zfunc.save, tmp_path)), states)
        assert all("rank-00001" in str(x) and "the drive is gone" in str(x) for x in errors)
    for _ in range(2):
        errors = on_every(programs, tried(step), states)
        assert all(isinstance(x, Exception) for x in errors)
        for program in programs:
            program.ranks.barrier.reset()  # type: ignore[attr-defined]
    on_every(programs, Program.close_swap)
    others = of_two(tmp_path)
    states = on_every(others, partial(zfunc.load, tmp_path))
    assert [x.batches for x in states] == [2, 2]
    on_every(others, Program.close_swap)
