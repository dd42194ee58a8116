"""A Profile of this machine for `zfunc plan` and `zfunc draw`, measured by training on it.

Steps run under Serial, where each operation is timed alone, and in turns with them under Overlapped, to time the
handoff between lanes. The operations are those of a training, in program and sizes. Their costs become the profile
(`zfunc.planner.calibrated_profile`). The drive and launches are measured separately.
"""

import logging
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention

from zfunc.core.graph import Kind
from zfunc.core.timeline import Timeline
from zfunc.engine.compile.cost_trace import AllocationTracker
from zfunc.engine.compile.program import Program, rescheduled
from zfunc.engine.compile.specialize import specialize
from zfunc.engine.compile.vjp import SegmentWeights, make_vjp
from zfunc.engine.state.init import init
from zfunc.engine.step.train_step import train_step
from zfunc.planner.bandwidth import clocks, other_processes
from zfunc.planner.calibrated_profile import (
    Arithmetic,
    LatencyBandwidth,
    MachineFacts,
    MeasuredStep,
    fit_costs,
    handoff,
    make_profile,
    middle_half,
)
from zfunc.planner.profile import Profile
from zfunc.runtime.accelerator import (
    available_bytes,
    device_count,
    device_name,
    has_grouped_kernels,
    on_accelerator,
)
from zfunc.runtime.cpu_topology import cpu_model, physical_cores
from zfunc.runtime.direct_io import ALIGNED, DirectFile
from zfunc.runtime.drive_speed import measure
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.host_pages import map_pages
from zfunc.runtime.thread_budget import allowed_cpus, default_threads, local_ranks
from zfunc.schedules import Overlapped

log = logging.getLogger("zfunc")

Batch = tuple[Any, Any]

WARM_UP = 3  # steps that start threads, trace, and fill caches
MOST_SKIPPED = 60  # steps in a row whose gradient may overflow, while the loss scale comes down
BUSY = 0.1  # share of the cores that other processes may use without a warning
REPEATS = 5  # of a page, to time how long a drive takes to answer
ENOUGH_SECONDS = 0.002  # of one product or one attention, to time its FLOP/s
LAUNCH_TURNS, PASSES = 5, 10  # of a small block, to time a launch


def calibrate(program: Program, batch: Batch, *, turns: int = 20, folder: str | Path = ".") -> Profile:
    """Train `turns` steps of `program` on `batch`, and as many overlapped ones, and describe the machine by them.

    The program's schedule has to be Serial. The profile's memory is what is free before the program takes any.
    `folder` is on the drive that is measured: half a GiB is written there and removed. All ranks have to call
    this.

    Raises ValueError for another schedule, and for steps without the operations that give a rate; OutOfMemory where
    the model does not fit; DiskError where `folder` cannot be written.
    """
    machine = machine_facts(program, Path(folder))
    disk, launch = measure_disk(Path(folder)), measure_launch(program.device)
    arithmetic = measure_arithmetic(program.device, program.dtype)
    before = clocks()
    serial, overlapped = traced_steps((program, rescheduled(program, Overlapped())), batch, turns)
    busy = other_processes(before, clocks())
    if machine.world == 1 and busy is not None and busy > BUSY * machine.cores:  # ranks are processes too
        log.warning(
            "other processes kept %.1f of %d cores busy: measure again when they do not", busy, machine.cores
        )
    steps = middle_half(serial)
    how = f"the middle half of {turns} steps of {len(program.segments)} segments"
    seconds = handoff(middle_half(overlapped)) or 0.0
    profile = make_profile(machine, fit_costs(steps), arithmetic, disk, how, handoff=seconds, launch=launch)
    log.info("%s: measured by %s, of %.3g s each", machine.title, how, steps[len(steps) // 2].seconds)
    if program.ranks.world == 1:
        log.info(
            "the network is not in the profile: a single rank sends nothing. With torchrun it is measured"
        )
    return profile


def traced_steps(programs: Sequence[Program], batch: Batch, turns: int) -> list[list[MeasuredStep]]:
    """`turns` measured steps of each of `programs`, which take turns at one new State. A turn in which a gradient
    overflowed does not count."""
    plans = [specialize(program, batch).plan for program in programs]
    state, skipped, warm_up = init(programs[0]), 0, WARM_UP
    steps: list[list[MeasuredStep]] = [[] for _ in programs]
    while len(steps[0]) < turns:
        turn: list[MeasuredStep] = []
        overflowed = False
        for program, plan in zip(programs, plans, strict=True):
            state, m = train_step(program, state, batch, trace=True)
            turn.append(MeasuredStep(plan, m.timeline or Timeline((), "measured"), m.seconds))
            overflowed |= m.skipped
        skipped = skipped + 1 if overflowed else 0
        if skipped > MOST_SKIPPED:
            raise ValueError(f"got {skipped} overflows in a row, expected steps that count: use bf16 or fp32")
        if warm_up == 0 and not overflowed:
            for measured, step in zip(steps, turn, strict=True):
                measured.append(step)
        warm_up = max(0, warm_up - 1)
    return steps


def measure_disk(folder: Path) -> dict[Literal["read", "write"], LatencyBandwidth]:
    """Latency and rate of reading past the page cache, and of writing until the drive has it. Raises DiskError."""
    speeds = measure(folder)
    with (
        closing(DirectFile.unnamed(folder, ALIGNED)) as file,
        closing(map_pages(ALIGNED)) as pages,
        memoryview(pages) as page,
    ):

        def write() -> None:
            file.write(page, 0)
            file.sync()

        latencies = {"read": _median_seconds(lambda: file.read(page, 0)), "write": _median_seconds(write)}
    return {
        "read": LatencyBandwidth(latencies["read"], speeds.read),
        "write": LatencyBandwidth(latencies["write"], speeds.write),
    }


def _median_seconds(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def measure_arithmetic(device: torch.device, dtype: torch.dtype) -> Arithmetic:
    """FLOP/s of a product of square matrices and of causal attention, forward and backward, of 16 heads of 128.

    Sizes double from 512 until the work takes `ENOUGH_SECONDS`, beside which a launch is nothing."""

    def seconds(call: Callable[[], Any]) -> float:
        def run() -> None:
            call()
            if on_accelerator(device):
                torch.accelerator.synchronize(device)

        run()  # which loads the kernels
        return _median_seconds(run)

    def rate(flops: Callable[[int], float], work: Callable[[int], Callable[[], Any]]) -> float:
        size, taken = 512, seconds(work(512))
        while taken < ENOUGH_SECONDS:
            size *= 2
            taken = seconds(work(size))
        return flops(size) / taken

    def product(side: int) -> Callable[[], Any]:
        a = torch.zeros(side, side, device=device, dtype=dtype)
        return lambda: a @ a

    def attention(row: int) -> Callable[[], Any]:
        q = torch.zeros(1, 16, row, 128, device=device, dtype=dtype)

        def both() -> None:
            y, pull, *_ = torch.func.vjp(lambda q: scaled_dot_product_attention(q, q, q, is_causal=True), q)
            pull(y)

        return both

    return Arithmetic(rate(lambda n: 2 * n**3, product), rate(lambda n: 7 * 16 * 128 * n**2, attention))


def measure_launch(device: torch.device) -> float | None:
    """Seconds of the host for one launch on `device`: those of forward and backward of a block so small that the
    device waits for its host. None on the CPU, where nothing is launched."""
    if not on_accelerator(device):
        return None
    with torch.device(device):
        block = nn.Sequential(*(x for _ in range(2) for x in (nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())))
        x = torch.ones(8, 8)
    weights = SegmentWeights({name: p.detach() for name, p in block.named_parameters()}, {})
    passes = make_vjp(lambda given, x: functional_call(block, given, (x,)), recompute="all", wrt_input=True)

    def run() -> None:
        y, residuals = passes.forward(weights, (x,))
        passes.backward(weights, (x,), residuals, [y])

    def seconds() -> float:
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(PASSES):
            run()
        torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    run()  # traces
    with AllocationTracker() as tracker:
        run()
    return median(seconds() for _ in range(LAUNCH_TURNS)) / (PASSES * tracker.launches)


def machine_facts(program: Program, folder: Path) -> MachineFacts:
    """What the operating system says of this machine, before the program takes any memory."""
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
        grouped=not has_own_memory or has_grouped_kernels(device),
        threads={} if has_own_memory else _threads(),
        world=program.ranks.world,
        local_ranks=min(local_ranks(), program.ranks.world),
    )


def _threads() -> dict[Kind, int]:
    """Threads of each kind of operation on a CPU: in a Serial step copies run on the caller's too."""
    callers = torch.get_num_threads()
    return {
        "compute": callers,
        "d2h": callers,
        "h2d": callers,
        "host": default_threads(),
        "read": 1,
        "write": 1,
        "network": 1,
    }
