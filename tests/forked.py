"""Processes of the tests, forked from one that has imported what a step needs: each would spend seconds on that."""

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shared_traces import share_traces
from small_models import MODELS, Batch

import zfunc
from zfunc.engine.compile.program import Program
from zfunc.engine.compile.specialize import specialize

ERROR = 3  # the exit code of a process that has seen one
NIGHT = "night"  # the argument of a worker that plays what slow tests read too


def warm(traced: Iterable[tuple[Program, Batch]] = ()) -> None:
    """Import what tracing imports and trace these, for all forks; start no threads: a fork would lose them."""
    torch.set_num_threads(1)
    share_traces()
    segments, data = MODELS["odd sizes"]()
    specialize(zfunc.compile(segments, precision="fp32", device="cpu"), data(0))
    for program, batch in traced:
        specialize(program, batch)
    gc.freeze()  # or the garbage collector of each fork would look at all of this, and so copy its pages


def fork(work: Callable[[], Any], *, ends_as_python: bool = False) -> int:
    """A process that does this. It takes a second or two to take a torch apart at the end; so only some do."""
    pid = os.fork()
    if pid:
        return pid
    code = 0
    torch.set_num_threads(
        1
    )  # makes the pool anew that a fork leaves: two threads that did at once would abort
    try:
        work()
    except Exception:
        traceback.print_exc()
        code = ERROR
    if ends_as_python:  # with destructors, which may wait for threads
        sys.exit(code)
    sys.stderr.flush()
    os._exit(code)


def play(
    main: Callable[[int, int, Path], None], world: int = 4, traced: Iterable[tuple[Program, Batch]] = ()
) -> None:
    """All ranks of a worker, `python WORKER FOLDER`: main(rank, world, folder) in a process each."""
    warm(traced)
    pids = [fork(partial(main, rank, world, Path(sys.argv[1]))) for rank in range(world)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))


def played(worker: Path, out: Path, *more: str) -> Path:
    """Run a worker that plays its ranks, which meet in `out`, and return that when all have ended well."""
    command = [sys.executable, "-W", "error::FutureWarning", str(worker), str(out), *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as ranks:
        try:
            errors = ranks.communicate(timeout=400)[1]
        finally:
            with suppress(ProcessLookupError):  # of a session that has ended
                os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors
    return out
