"""A Profile of this machine for `zfunc plan` and `zfunc draw`, measured by training on it.

Steps run under Serial, where each operation is timed alone, and in turns with them under Overlapped, to time the
handoff between lanes. The operations are those of a training, in program and sizes. An operation is charged with
the time until the next one begins, in which that is issued and memory is freed. Rates and latencies are the lines
through one table of operations; drives, launches, products and attention are timed separately. Nothing is assumed:
a figure that was not measured is not in the profile, and every figure says how it was.

The invariant: the costs of a step's operations add up to the step. So the simulated time of a Serial step on the
machine so described is what such steps took.
"""

import logging
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention

from zfunc.core.dtypes import Precision
from zfunc.core.graph import KINDS, Kind
from zfunc.core.hardware import Measured
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.engine.compile.cost_trace import AllocationTracker
from zfunc.engine.compile.program import Program, rescheduled
from zfunc.engine.compile.specialize import specialize
from zfunc.engine.compile.vjp import SegmentWeights, make_vjp
from zfunc.engine.state.init import init
from zfunc.engine.step.train_step import train_step
from zfunc.planner.bandwidth import clocks, other_processes
from zfunc.planner.profile import Figure, Profile
from zfunc.runtime.accelerator import (
    available_bytes,
    device_count,
    device_name,
    has_grouped_kernels,
    on_accelerator,
)
from zfunc.runtime.direct_io import ALIGNED, DirectFile, measure
from zfunc.runtime.host_memory import available_host_bytes, map_pages
from zfunc.runtime.thread_budget import (
    allowed_cpus,
    cpu_model,
    default_threads,
    local_ranks,
    physical_cores,
)
from zfunc.schedules import Overlapped

log = logging.getLogger("zfunc")

Batch = tuple[Any, Any]
Line = tuple[float, float]  # seconds to start, and bytes a second

WARM_UP = 3  # steps that start threads, trace, and fill caches
MOST_SKIPPED = 60  # steps in a row whose gradient may overflow, while the loss scale comes down
BUSY = 0.1  # share of the cores that other processes may use without a warning
REPEATS = 5  # of a page, to time how long a drive takes to answer
ENOUGH_SECONDS = 0.002  # of one product or one attention, to time its FLOP/s
LAUNCH_TURNS, PASSES = 5, 10  # of a small block, to time a launch
NAMED: dict[Kind, str] = {
    "compute": "device_memory",
    "host": "host_memory",
}  # other rates have their kind's name
HOW = {  # a table or a figure was measured, where not by the steps
    "count": "read from the operating system",
    "bytes": "free when this was measured",
    "reached": "the figure was reached",
    "flops_per_s": "products of large matrices, and attention of a long row, forward and backward",
    "attention": "attention of a long row, forward and backward, beside products of large matrices",
    "launch": "launches of a small block, forward and backward",
    "read": "transfers past the page cache",
    "write": "transfers past the page cache, until the drive has them",
}


@frozen
class MeasuredStep:
    """A measured step: its plan, when each operation ran, and its length in seconds."""

    plan: Plan
    timeline: Timeline
    seconds: float


@frozen
class Measurements:
    """A machine as it was measured.

    `devices`, `cores` and free `memory` are the node's; `products` and `attention` the FLOP/s of one device;
    `drives` the lines of "read" and "write"; `operations` those of steps; `handoff` the seconds until a lane
    learns that an operation of another has ended, `launch` those of one launch on the device. `threads` are those
    that each kind of operation keeps busy where the device is the host (`unified`). `grouped` is the Hardware's.
    """

    title: str
    precision: Precision
    devices: int
    cores: int
    memory: Mapping[str, int]
    products: float
    attention: float
    drives: Mapping[Kind, Line]
    operations: tuple[Measured, ...] = ()
    handoff: float = 0.0
    launch: float | None = None
    unified: bool = False
    grouped: bool = True
    threads: Mapping[Kind, int] = field(factory=dict[Kind, int])
    world: int = 1
    local_ranks: int = 1


def calibrate(program: Program, batch: Batch, *, turns: int = 20, folder: str | Path = ".") -> Profile:
    """Train `turns` steps of `program` on `batch`, and as many overlapped ones, and describe the machine by them.

    The program's schedule has to be Serial. The profile's memory is what is free before the program takes any.
    `folder` is on the drive that is measured: half a GiB is written there and removed. All ranks have to call
    this.

    Raises ValueError for another schedule, and for steps without the operations that give a rate; OutOfMemory where
    the model does not fit; DiskError where `folder` cannot be written.
    """
    machine, before = measure_beside(program, Path(folder)), clocks()
    serial, overlapped = traced_steps((program, rescheduled(program, Overlapped())), batch, turns)
    busy = other_processes(before, clocks())
    if machine.world == 1 and busy > BUSY * machine.cores:  # ranks are processes too
        log.warning(
            "other processes kept %.1f of %d cores busy: measure again when they do not", busy, machine.cores
        )
    steps = middle_half(serial)
    how = f"the middle half of {turns} steps of {len(program.segments)} segments"
    told = handoff(middle_half(overlapped)) or 0.0
    profile = make_profile(evolve(machine, operations=operation_costs(steps), handoff=told), how)
    log.info("%s: measured by %s, of %.3g s each", machine.title, how, steps[len(steps) // 2].seconds)
    if machine.world == 1:
        log.info(
            "the network is not in the profile: a single rank sends nothing. With torchrun it is measured"
        )
    return profile


# --- steps, and the table of their operations ------------------------------------------------------------------


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


def middle_half(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The middle half of `steps` by their length: those that were disturbed are left out."""
    ordered = sorted(steps, key=lambda step: step.seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def operation_costs(steps: Iterable[MeasuredStep]) -> tuple[Measured, ...]:
    """The mean seconds of operations of equal kind, FLOPs and bytes, in `steps` of a plan with one lane.

    Raises ValueError for more lanes, or no step.
    """
    spent: dict[tuple[Kind, int, int, int], list[float]] = {}
    for step in steps:
        busy = [lane.name for lane in step.plan.lanes if lane.ops]
        if len(busy) > 1:
            raise ValueError(
                f"got a plan on the lanes {', '.join(busy)}, expected one, where operations run alone: measure "
                "steps under Serial"
            )
        graph, events = step.plan.graph, step.timeline.events
        starts = [0.0, *(e.start for e in events[1:]), step.seconds]
        for e, (start, end) in zip(events, pairwise(starts), strict=True):
            op, seconds = (
                graph.ops[graph.position[e.op]],
                max(end - start, 1e-9),
            )  # clocks of devices may cross
            spent.setdefault((op.kind, op.flops, op.attention_flops, op.nbytes), []).append(seconds)
    if not spent:
        raise ValueError("got no operation of any step, expected some: measure a step first")
    return tuple(
        Measured(kind, flops, nbytes, _rounded(fmean(spent[kind, flops, attention, nbytes])), attention)
        for kind, flops, attention, nbytes in sorted(spent, key=lambda x: (KINDS.index(x[0]), *x[1:]))
    )


def handoff(steps: Iterable[MeasuredStep]) -> float | None:
    """Seconds from the end of an operation to the start of one on another lane that waits for it alone: the mean of
    the middle half of all in `steps`. None without any."""
    gaps: list[float] = []
    for step in steps:
        ops, events = step.plan.graph.ops, {e.op: e for e in step.timeline.events}
        for lane in step.plan.lanes:
            free = 0.0
            for i in lane.ops:
                e = events[ops[i].name]
                ready = max((events[ops[n].name].end for n in step.plan.waits[i]), default=0.0)
                if ready > free:
                    gaps.append(max(0.0, e.start - ready))  # clocks of two devices may cross
                free = e.end
    inner = sorted(gaps)[len(gaps) // 4 : len(gaps) - len(gaps) // 4]
    return fmean(inner) if inner else None


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """The line through (bytes, seconds) with the least squared relative error, latency and rate not negative.

    >>> fit_line([(1_000, 3e-6), (9_000, 11e-6)])
    (2e-06, 1000000000.0)
    """
    sizes, seconds = np.array(points, dtype=float).T
    slope = latency = 0.0
    if len({*sizes}) > 1:
        slope, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    if slope <= 0 or latency < 0:  # one size, or noise: all of it is rate
        relative = sizes / seconds
        slope, latency = relative.sum() / (relative**2).sum(), 0.0
    return _rounded(latency), _rounded(1 / slope)


def _rounded(value: float, digits: int = 6) -> float:
    """To as many digits: the rest is noise."""
    return float(f"{value:.{digits}g}")


# --- what is timed beside the steps ----------------------------------------------------------------------------


def measure_beside(program: Program, folder: Path) -> Measurements:
    """What the system says of this machine before the program takes any memory, and what is timed alone."""
    device, has_own_memory = program.device, on_accelerator(program.device)
    cores, host, callers = physical_cores(allowed_cpus()), available_host_bytes(), torch.get_num_threads()
    named = device_name(device), cpu_model() or platform.machine(), f"{cores} cores"
    threads: dict[Kind, int] = dict.fromkeys(KINDS, 1)  # in a Serial step copies run on the caller's
    threads |= {"compute": callers, "d2h": callers, "h2d": callers, "host": default_threads()}
    products, attention = measure_arithmetic(device, program.dtype)
    return Measurements(
        title=", ".join(str(x) for x in named if x),
        precision=program.settings.precision,
        devices=device_count(device) if has_own_memory else cores,
        cores=cores,
        memory={
            "device": available_bytes(device) if has_own_memory else host,
            "host": host,
            "disk": shutil.disk_usage(folder).free,
        },
        products=products,
        attention=attention,
        drives=measure_disk(folder),
        launch=measure_launch(device),
        unified=not has_own_memory,
        grouped=not has_own_memory or has_grouped_kernels(device),
        threads={} if has_own_memory else threads,
        world=program.ranks.world,
        local_ranks=min(local_ranks(), program.ranks.world),
    )


def measure_disk(folder: Path) -> dict[Kind, Line]:
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

        return {
            "read": (_median_seconds(lambda: file.read(page, 0)), speeds.read),
            "write": (_median_seconds(write), speeds.write),
        }


def _median_seconds(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def measure_arithmetic(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of a product of square matrices, and of causal attention, forward and backward, of 16 heads of 128.

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

    return rate(lambda n: 2 * n**3, product), rate(lambda n: 7 * 16 * 128 * n**2, attention)


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


# --- the profile -----------------------------------------------------------------------------------------------


def make_profile(m: Measurements, how: str) -> Profile:
    """The Profile of a measured machine; `how` says how its steps were measured.

    A rate of the node is that of each of its ranks, all running at once, times their number. Raises ValueError
    where no operation gives the rate of a kind.
    """
    lines: dict[Kind, Line] = dict(m.drives)
    for kind in ("compute", "host", "d2h", "h2d", *(["network"] if m.world > 1 else [])):
        points = [(x.nbytes, x.seconds) for x in m.operations if x.kind == kind and x.nbytes and not x.flops]
        if points:
            lines[kind] = fit_line(points)
        elif kind != "network":
            what = f"got no operation of kind {kind!r} that moves bytes in the steps"
            raise ValueError(f"{what}, expected some: take a model that has one")
    hop = "network_in_node" if m.world == m.local_ranks else "network_between_nodes"
    rates, seconds = dict[str, float](), {"handoff": min(1.0, m.handoff)}
    for kind, (latency, rate) in lines.items():
        name, of_node = hop if kind == "network" else NAMED.get(kind, kind), kind in ("host", "read", "write")
        rates[name] = rate * (m.local_ranks if of_node else 1)
        if kind == "network":
            seconds[hop] = latency / (m.world - 1)
        else:
            seconds[kind] = min(1.0, latency)
    seconds |= {} if m.launch is None else {"launch": m.launch}
    peak = max(m.products, m.attention)
    figures: dict[str, dict[str, float]] = {
        "count": {"devices": m.devices, "cores": m.cores},
        "bytes": {tier: float(nbytes) for tier, nbytes in m.memory.items()},
        "flops_per_s": {m.precision: peak},
        "bytes_per_s": rates,
        "seconds": seconds,
        "reached": dict.fromkeys((*(f"{tier}_bytes" for tier in m.memory), *rates), 1.0)
        | {m.precision: m.products / peak, "attention": m.attention / peak},
    }
    shares = {
        kind: Figure(min(1.0, n / m.cores), "measured", f"{n} of {m.cores} cores are busy with it")
        for kind, n in m.threads.items()
    }
    return Profile(
        "calibrated",
        m.title,
        {
            table: {
                key: Figure(_rounded(value, 5), "measured", HOW.get(key, HOW.get(table, how)))
                for key, value in of.items()
            }
            for table, of in figures.items()
        },
        unified=m.unified,
        grouped=m.grouped,
        shared={"cores": shares} if shares else {},
        measured=m.operations,
    )
