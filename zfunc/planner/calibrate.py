"""What this machine does in a second, measured by training on it: a Profile for `zfunc plan` and `zfunc draw`.

Steps of the segments at hand run under Serial, one operation at a time, so that each is timed alone; and in turns
with them under Overlapped, to see how long lanes take to hear of each other. What operations took, and the rates
and latencies that follow, become the profile (`zfunc.planner.fit_rates`, `zfunc.planner.calibrated_profile`). The
disk is measured apart.

The invariant: what is timed is what a training runs: the same program, the same operations, of the same sizes.
"""

import logging
import os
import platform
import shutil
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from zfunc.core.graph import Kind
from zfunc.core.timeline import Timeline
from zfunc.engine.init import init
from zfunc.engine.program import Program, rescheduled, specialize
from zfunc.engine.train_step import train_step
from zfunc.planner.bandwidth import clocks, other_processes
from zfunc.planner.calibrated_profile import MachineFacts, make_profile
from zfunc.planner.fit_rates import LatencyBandwidth, MeasuredStep, fit_costs, fit_line, handoff, middle_half
from zfunc.planner.profile import Profile
from zfunc.runtime.accelerator import available_bytes, device_count, device_name, on_accelerator
from zfunc.runtime.cpu_topology import cpu_model, physical_cores
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.thread_budget import allowed_cpus, default_threads, local_ranks
from zfunc.schedules import Overlapped

log = logging.getLogger("zfunc")

Batch = tuple[Any, Any]

WARM_UP = 3  # steps that begin threads, trace, and fill caches
PATIENCE = 60  # steps in a row whose gradient may overflow, while the loss scale comes down
CROWDED = 0.1  # of the cores, busy with something else, is worth a warning
SMALL, LARGE, REPEATS = 4096, 64 << 20, 3  # bytes written to the disk, and how often


def calibrate(program: Program, batch: Batch, *, turns: int = 20, folder: str | Path = ".") -> Profile:
    """Train `turns` steps of `program` on `batch`, and as many overlapped ones, and describe the machine by them.

    The program's schedule has to be Serial. Memory counts as it is free before the program takes any. `folder` is
    on the disk that is measured: files of 64 MB are written there and removed. All ranks have to call this.

    Raises ValueError for another schedule, or steps there is nothing to tell by; OutOfMemory where the model does
    not fit; OSError where `folder` cannot be written.
    """
    here = machine_facts(program, Path(folder))
    disk = measure_disk(Path(folder))
    before = clocks()
    alone, beside = traced_steps((program, rescheduled(program, Overlapped())), batch, turns)
    if here.world == 1:  # of several, each is another process
        _warn(other_processes(before, clocks()), here.cores)
    steps = middle_half(alone)
    how = f"the middle half of {turns} steps of {len(program.segments)} segments"
    profile = make_profile(here, fit_costs(steps), disk, how, handoff=handoff(middle_half(beside)) or 0.0)
    log.info("%s: measured by %s, of %.3g s each", here.title, how, steps[len(steps) // 2].seconds)
    if program.ranks.world == 1:
        log.info(
            "the network is not in the profile: a single rank sends nothing. With torchrun it is measured"
        )
    return profile


def _warn(busy: float | None, cores: int) -> None:
    """Whoever shares the cores is in the figures: threads that wait for one another wait for theirs."""
    if busy is not None and busy > CROWDED * cores:
        log.warning("other processes kept %.1f of %d cores busy: measure again when they do not", busy, cores)


def traced_steps(programs: Sequence[Program], batch: Batch, turns: int) -> list[list[MeasuredStep]]:
    """`turns` measured steps of each of `programs`, which take turns at one fresh State. A turn in which a gradient
    overflowed, so that a step was cut short, does not count."""
    plans = [specialize(program, batch).plan for program in programs]
    state, skipped = init(programs[0]), 0
    kept: list[list[MeasuredStep]] = [[] for _ in programs]
    for n in count():
        seen = []
        for program in programs:
            state, metrics = train_step(program, state, batch, trace=True)
            seen.append(metrics)
        skipped = skipped + 1 if any(m.skipped for m in seen) else 0
        if skipped > PATIENCE:
            raise ValueError(f"got {skipped} overflows in a row, expected steps that count: use bf16 or fp32")
        if n >= WARM_UP and not skipped:
            for steps, plan, m in zip(kept, plans, seen, strict=True):
                steps.append(MeasuredStep(plan, m.timeline or Timeline((), "measured"), m.seconds))
        if len(kept[0]) == turns:
            return kept
    raise AssertionError


def measure_disk(folder: Path) -> LatencyBandwidth:
    """Latency and rate of writing a file and waiting until it is on the disk. Raises OSError."""
    data = os.urandom(1 << 20)
    with TemporaryDirectory(dir=folder, prefix=".zfunc-calibrate-") as made:
        path = Path(made) / "file"
        seconds = {n: median(_written(path, data, n) for _ in range(REPEATS)) for n in (SMALL, LARGE)}
    return fit_line(list(seconds.items()))


def _written(path: Path, data: bytes, nbytes: int) -> float:
    start = time.perf_counter()
    with path.open("wb") as file:
        for at in range(0, nbytes, len(data)):
            file.write(data[: nbytes - at])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


def machine_facts(program: Program, folder: Path) -> MachineFacts:
    """What the operating system tells of this machine, before the program takes any memory."""
    device, has_own_memory = program.device, on_accelerator(program.device)
    cores, host = physical_cores(allowed_cpus()), available_host_bytes()
    gpu = device_name(device)
    return MachineFacts(
        title=", ".join(str(x) for x in (gpu, cpu_model() or platform.machine(), f"{cores} cores") if x),
        precision=program.settings.precision,
        devices=device_count(device) if has_own_memory else cores,
        cores=cores,
        memory={
            "device": available_bytes(device) if has_own_memory else host,
            "host": host,
            "disk": shutil.disk_usage(folder).free,
        },
        unified=not has_own_memory,
        threads={} if has_own_memory else _threads(),
        world=program.ranks.world,
        local_ranks=min(local_ranks(), program.ranks.world),
    )


def _threads() -> dict[Kind, int]:
    """How many threads each kind of operation runs on, on a CPU: in a Serial step copies have the caller's too."""
    callers = torch.get_num_threads()
    return {
        "compute": callers,
        "d2h": callers,
        "h2d": callers,
        "host": default_threads(),
        "disk": 1,
        "network": 1,
    }
