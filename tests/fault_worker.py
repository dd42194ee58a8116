"""The ranks of tests/runtime/test_faults.py. Not a test of its own.

`play_all` forks the ranks of one scenario after the other, so that torch is imported once. Each rank leaves a file
about the error it has seen; the parent one about how each process ended.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from forked import ERROR, fork, warm
from small_models import MODELS

import zfunc
from zfunc.errors import RankError
from zfunc.runtime import collectives as ranks
from zfunc.runtime import failure_detection
from zfunc.runtime import fault_injection as faults
from zfunc.runtime.collectives import RankGroup

LONG = 120.0  # a time-out that no scenario waits for
SHORT = 6.0  # the one of ranks that do not come; their store has it too, and a busy disk takes its time
PATIENCE = 60.0  # seconds for everything that is not under test


Faults = tuple[faults.Fault, ...]


@frozen
class Scenario:
    """`work` on `world` ranks of a group with this time-out, with faults as text. `hung` ranks do not end."""

    work: Callable[[int, Path, Faults], None]
    world: int = 3
    faults: str = ""
    timeout: float = LONG
    asked: float | None = None  # ZFUNC_TIMEOUT
    store: str = "file"  # or "rank 0", or "elsewhere"
    hung: tuple[int, ...] = ()
    ends_as_python: bool = False


def compiled(**more: Any) -> tuple[Any, Any]:
    segments, data = MODELS["odd sizes"]()
    options: dict[str, Any] = {"precision": "fp32", "bucket_size": 200, "schedule": "Overlapped"}
    return zfunc.compile(segments, device="cpu", **options, **more), data


def train(rank: int, out: Path, given: Faults, **more: Any) -> None:
    """Three steps."""
    program, data = compiled(**more)
    state = zfunc.init(program, seed=1)
    for i in range(3):
        begun = time.monotonic()
        try:
            state, _ = zfunc.train_step(program, state, data(0), faults=given)
        except Exception as error:
            note(rank, out, error, time.monotonic() - begun, steps=i)
            try:
                program.ranks.sums([1.0])
            except Exception as again:
                write(out / f"{rank}.again", str(again))
            raise


def signal_here(number: signal.Signals) -> None:
    """Send a signal to this process, which has it before this returns. What os.kill sends may reach another thread
    first, while this one goes on."""
    signal.pthread_kill(threading.get_ident(), number)


def signalled_in_a_send(
    rank: int, out: Path, given: Faults, *, sends: int, gets: signal.Signals, who: int = 1, **more: Any
) -> None:
    """The rank `who` of a pipeline gets a signal before it sends the part of this number of a message, for which
    its receiver waits: sizes and text are one part, and the data another."""
    sent, awaited = Counter[int](), Counter[int]()
    send, receive = dist.isend, dist.irecv

    def isend(part: torch.Tensor, peer: int, **named: Any) -> Any:
        sent[peer] += 1
        if rank == who and sent.total() == sends:
            when_there(out / f"{peer}.awaits.{sent[peer]}")  # so all collectives before it have ended there
            signal_here(gets)
        return send(part, peer, **named)

    def irecv(part: torch.Tensor, peer: int, **named: Any) -> Any:
        work = receive(part, peer, **named)
        if peer == who:
            awaited[peer] += 1
            write(out / f"{rank}.awaits.{awaited[peer]}", "")
        return work

    dist.isend, dist.irecv = isend, irecv
    train(rank, out, given, **more)


def in_group_of_two(rank: int, out: Path, _: Faults) -> None:
    """Ranks 1 and 2 have a group of their own, in which 2 does not come."""
    group = dist.new_group([1, 2])
    if rank == 1:
        write(out / "1.ready", "")
        collective(RankGroup.of(group), rank, out)
    if rank == 2:
        when_there(out / "1.ready")
        signal_here(signal.SIGKILL)


def leaves(rank: int, out: Path, _: Faults) -> None:
    """Rank 1 says that it leaves, but its process stays until the others have seen it."""
    together = RankGroup.of()
    if rank == 1:
        together.leave("step 3 failed with OSError: No space left on device")
        when_there(out / "0.json", out / "2.json")
    collective(together, rank, out)


def leaves_others_behind(rank: int, out: Path, given: Faults) -> None:
    """Rank 2 leaves, and rank 1 is not in the collective until rank 0, which keeps the store, has given up."""
    if rank == 1:
        when_there(out / "2.left")
        time.sleep(2 * ranks.LISTEN + failure_detection.EXIT_GRACE)
    if rank == 2:
        RankGroup.of().leave("step 3 failed with OSError: No space left on device")
        write(out / "2.left", "")
        when_there(out / "0.json", out / "1.json")
        return
    try:
        collective(RankGroup.of(), rank, out)
    except RankError:
        os._exit(ERROR)  # rank 0 does not stay for connections that are still open, either


def comes_late(rank: int, out: Path, _: Faults) -> None:
    """Rank 2 comes when the others have given up; they stay until it has seen that."""
    if rank == 2:
        when_there(out / "0.json", out / "1.json")
    try:
        collective(RankGroup.of(), rank, out)
    finally:
        when_there(out / "2.json")


CALLS = ("save", "train_step", "params", "load")


def apart(rank: int, out: Path, _: Faults) -> None:
    """Each rank in another call, in all combinations; after that they go on together."""
    program, data = compiled()
    state, _ = zfunc.train_step(program, zfunc.init(program, seed=1), data(0))
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: zfunc.save(out / "saved", program, state),
        "train_step": lambda: zfunc.train_step(program, state, data(1)),
        "params": lambda: zfunc.params(program, state),
        "load": lambda: zfunc.load(out / "saved", program),
    }
    seen: dict[str, str] = {}
    for pair in permutations(CALLS, 2):
        try:
            calls[pair[rank]]()
        except RankError as error:
            seen[" ".join(pair)] = str(error)
    state, metrics = zfunc.train_step(program, state, data(1))
    seen["together"] = str(metrics.step)
    write(out / f"{rank}.json", json.dumps(seen))


def impatient(work: Callable[[int, Path, Faults], None], rank: int, out: Path, given: Faults) -> None:
    """The same with short waits for a store that does not answer: they would take 12 s."""
    failure_detection.STORE_TIMEOUT = ranks.SETTLE_LATE = 1.0
    work(rank, out, given)


def freezes(rank: int, out: Path, _: Faults) -> None:
    """Rank 0 stops as its machine would without power: its connections stay, and the store does not answer."""
    together = RankGroup.of()
    together.sums([1.0])
    write(out / f"{rank}.ready", "")
    if rank == 0:
        when_there(out / "1.ready", out / "2.ready")
        signal_here(signal.SIGSTOP)
    collective(together, rank, out)


def collective(together: RankGroup, rank: int, out: Path) -> None:
    begun = time.monotonic()
    try:
        together.sums([1.0])
    except Exception as error:
        note(rank, out, error, time.monotonic() - begun)
        raise


STEP = "step=2,op=update[1]"  # in the middle of the second step
SCENARIOS = {
    # Of four, one is not the neighbour of the one that is gone: its own connections hold.
    "killed": Scenario(
        train, world=4, faults="rank=3,step=2,op=reduce_scatter[0,1,0],do=kill", ends_as_python=True
    ),
    "terminated": Scenario(train, world=2, faults=f"rank=0,{STEP},do=terminate"),
    "hung": Scenario(train, faults=f"rank=1,{STEP},do=hang", asked=SHORT, hung=(1,), ends_as_python=True),
    # Rank 0 waits for gradients, rank 2 for what rank 1 would have made of its output.
    "stage killed": Scenario(partial(train, pp=3), faults="rank=1,step=2,op=forward[0,2],do=kill"),
    # Rank 1 sends a message each way in a step, rank 0 of two stages one.
    "stage killed in a send": Scenario(
        partial(signalled_in_a_send, sends=2 * 2 + 2, gets=signal.SIGKILL, pp=3)
    ),
    "stage frozen with the store": Scenario(
        partial(impatient, partial(signalled_in_a_send, sends=2 + 1, gets=signal.SIGSTOP, who=0, pp=2)),
        world=2,
        asked=SHORT,
        store="rank 0",
        hung=(0,),
    ),
    "stage hung": Scenario(
        partial(train, pp=3), faults="rank=1,step=2,op=forward[0,2],do=hang", asked=SHORT, hung=(1,)
    ),
    "raised": Scenario(train, faults=f"rank=1,{STEP},do=raise"),
    "killed with the store": Scenario(train, faults=f"rank=0,{STEP},do=kill", store="rank 0"),
    "killed without the store": Scenario(train, faults=f"rank=0,{STEP},do=kill", store="elsewhere"),
    "group of two": Scenario(in_group_of_two, ends_as_python=True),
    "leaves": Scenario(leaves),
    "leaves others behind": Scenario(leaves_others_behind, store="rank 0", ends_as_python=True),
    "apart": Scenario(apart, world=2, timeout=SHORT),
    "late": Scenario(comes_late, timeout=SHORT),
    "frozen with the store": Scenario(partial(impatient, freezes), timeout=SHORT, store="rank 0", hung=(0,)),
}


def note(rank: int, out: Path, error: Exception, seconds: float, **more: Any) -> None:
    report = {"type": type(error).__name__, "text": str(error), "seconds": seconds, **more}
    write(out / f"{rank}.json", json.dumps(report))


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.with_suffix(f"{path.suffix}.part").write_text(text)
    path.with_suffix(f"{path.suffix}.part").rename(path)


def when_there(*paths: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            raise TimeoutError(f"got no {paths}")
        time.sleep(0.02)


def join(scenario: Scenario, rank: int, out: Path) -> None:
    """The default group, with the store where the scenario wants it."""
    port = out / "port"
    if scenario.store == "file":
        store: Any = dist.FileStore(str(out / "store"), scenario.world)
    elif scenario.store == "rank 0" and rank == 0:
        store = host(port)
    else:
        when_there(port)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False)
    timeout = timedelta(seconds=scenario.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario.world, timeout=timeout)


def host(port: Path) -> dist.TCPStore:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    write(port, str(store.port))
    return store


def keep(out: Path) -> None:
    """Keep the store of a job in a process that is no rank."""
    store = host(out / "port")
    signal.pause()
    del store


def run(scenario: Scenario, rank: int, out: Path) -> None:
    """All that one rank does, in a process of its own."""
    torch.set_num_threads(1)
    if scenario.asked is not None:
        os.environ["ZFUNC_TIMEOUT"] = str(scenario.asked)
    join(scenario, rank, out)
    try:
        scenario.work(rank, out, faults.parse_faults(scenario.faults))
    finally:
        dist.destroy_process_group()


def play(scenario: Scenario, out: Path) -> None:
    """Fork the ranks, and keep how each ended: its exit code, minus a signal, or "still there"."""
    out.mkdir()
    as_python = scenario.ends_as_python
    pids = [
        fork(partial(run, scenario, rank, out), ends_as_python=as_python) for rank in range(scenario.world)
    ]
    keeper = fork(partial(keep, out), ends_as_python=False) if scenario.store == "elsewhere" else None
    ends: dict[int, int] = {}
    until = time.monotonic() + PATIENCE
    try:
        while len(ends) < scenario.world - len(scenario.hung) and time.monotonic() < until:
            for rank, pid in enumerate(pids):
                if rank not in ends and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    ends[rank] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.02)
    finally:
        left = [pid for rank, pid in enumerate(pids) if rank not in ends]
        for pid in [*left, *([keeper] if keeper else [])]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    (out / "ends.json").write_text(json.dumps([ends.get(r, "still there") for r in range(scenario.world)]))


def play_all(out: Path) -> None:
    """Those that only wait for a time-out at the same time, beside the others one by one."""
    warm()
    waiting = [name for name, x in SCENARIOS.items() if SHORT in (x.timeout, x.asked)]
    pids = [fork(partial(play, SCENARIOS[name], out / name)) for name in waiting]
    for name in SCENARIOS:
        if name not in waiting:
            play(SCENARIOS[name], out / name)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        sys.exit(f"one of {waiting} could not be played")
