"""Processes of the tests, forked from one that has imported what a step needs: each would spend seconds on that.

`played` runs a function of a test's module in such a process: `python forked.py MODULE FUNCTION FOLDER ...`.
"""

import gc
import inspect
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared_traces import share_traces
from small_models import MODELS, Batch, rows_of

import zfunc
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize

ERROR = 3  # the exit code of a process that has seen one
# A torch for CUDA that sees no GPU has a stand-in for one, for which autograd starts a thread; a fork has lost it.
torch._C._ensureCUDADeviceGuardSet = lambda: None
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


WORLDS = (1, 2, 4)
ROWS = 12  # of a global batch: a multiple of every world and micro-batch count


def global_batch(data: Any, i: int) -> Any:
    """Twelve rows, from as many of the model's own batches as that takes."""
    parts = [data(i * 100 + k) for k in range(ROWS)]
    flat = [torch.cat([p[k] for p in parts])[:ROWS] for k in range(2)]
    return flat[0], flat[1]


def each_world(program: Program, data: Any) -> Iterator[tuple[Program, Batch]]:
    """The program with a rank's rows on every world."""
    return ((program, rows_of(global_batch(data, 0), 0, world)) for world in WORLDS)


def groups_of(rank: int, world: int, out: Path) -> dict[int, Any]:
    """In one of the processes of a world: a group of the first ranks for each size in WORLDS."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    return {size: dist.new_group(range(size)) for size in WORLDS}


def play(
    main: Callable[[int, int, Path], None],
    out: Path,
    world: int = 4,
    traced: Iterable[tuple[Program, Batch]] = (),
) -> None:
    """All ranks: main(rank, world, out) in a process each."""
    warm(traced)
    pids = [fork(partial(main, rank, world, out)) for rank in range(world)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))


def played(work: Callable[..., Any], out: Path, *more: str) -> Path:
    """Let a process do work(out, *more), which may fork its ranks, and return `out` when all have ended well."""
    command = [sys.executable, "-W", "error::FutureWarning", __file__, inspect.getfile(work), work.__name__]
    with subprocess.Popen(
        [*command, str(out), *more], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as ranks:
        try:
            errors = ranks.communicate(timeout=400)[1]
        finally:
            with suppress(ProcessLookupError):  # of a session that has ended
                os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors
    return out


if __name__ == "__main__":
    module, function, folder, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(module).parent))
    getattr(import_module(Path(module).stem), function)(Path(folder), *arguments)
