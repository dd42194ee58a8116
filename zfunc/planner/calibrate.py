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
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import thread_time
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention

from zfunc.core.dtypes import Precision
from zfunc.core.graph import KINDS, Graph, Kind, Op, Region
from zfunc.core.hardware import Measured
from zfunc.core.plan import Plan, build
from zfunc.core.timeline import Timeline
from zfunc.engine.program.program import Program, rescheduled
from zfunc.engine.program.specialize import specialize
from zfunc.engine.step.init import init
from zfunc.engine.step.train_step import train_step
from zfunc.engine.trace.cost_trace import AllocationTracker
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.engine.trace.vjp import make_vjp
from zfunc.planner.profile import BOUNDS, ISSUE, NAMED, NETWORKS, OF_NODE, SHARED, Figure, Profile
from zfunc.runtime.accelerator import (
    available_bytes,
    device_count,
    device_name,
    has_grouped_kernels,
    on_accelerator,
)
from zfunc.runtime.direct_io import ALIGNED, DirectFile, measure
from zfunc.runtime.executor import Executor, RunOptions
from zfunc.runtime.host_memory import map_pages
from zfunc.runtime.memory_limits import available_host_bytes
from zfunc.runtime.prepared_plan import prepare_plan
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
REPEATS = 5  # of what is timed alone
ENOUGH_SECONDS = 0.002  # of one product or one attention, to time its FLOP/s
PASSES = 10  # of a small block, to time a launch
DRIVEN = "transfers past the page cache; those that are written, until the drive has them"


@frozen
class MeasuredStep:
    """A measured step: its plan, when each operation ran, and its length in seconds."""

    plan: Plan
    timeline: Timeline
    seconds: float


@frozen(eq=False)
class Machine:
    """What `calibrate` knows before it measures steps: `figures` of a Profile by table and key, those of a node as
    sums over its ranks; whether device and host share memory (`unified`), and torch has `grouped` kernels there."""

    title: str
    precision: Precision
    figures: Mapping[str, Mapping[str, Figure]]
    unified: bool = False
    grouped: bool = True
    world: int = 1
    local_ranks: int = 1


def calibrate(program: Program, batch: Batch, *, turns: int = 20, folder: str | Path = ".") -> Profile:
    """Measure this machine's Profile by `turns` steps of `program` on `batch`, and as many of `program` under the
    schedule Overlapped.

    The program's schedule has to be Serial. The profile's memory is what is free before the program takes any.
    `folder` is on the drive that is measured: half a GiB is written there and removed. All ranks have to call
    `calibrate`.

    Raises ValueError for another schedule than Serial, and for steps without operations that give a rate;
    OutOfMemory where the model does not fit; DiskError where `folder` cannot be written.
    """
    machine = measure_beside(program, Path(folder))
    alone, spent = clocked(program)
    serial, overlapped = traced_steps((alone, rescheduled(program, Overlapped())), batch, turns)
    steps = middle_half(serial)
    how = f"the middle half of {turns} steps of {len(program.segments)} segments"
    profile = make_profile(
        machine, operation_costs(steps), handoff(middle_half(overlapped)) or 0.0, how, spent
    )
    log.info("%s: measured by %s, of %.3g s each", machine.title, how, steps[len(steps) // 2].seconds)
    if machine.world == 1:
        log.info(
            "the network is not in the profile: a single rank sends nothing. With torchrun it is measured"
        )
    return profile


# --- steps, and the table of their operations ------------------------------------------------------------------


def traced_steps(programs: Sequence[Program], batch: Batch, turns: int) -> list[list[MeasuredStep]]:
    """Train one new State by `programs` in turn, and return, by program, its `turns` measured steps. A turn, of one
    step of each program, does not count if a gradient overflowed; another replaces it."""
    plans = [specialize(program, batch).plan for program in programs]
    state, skipped, counted = init(programs[0]), 0, list[list[MeasuredStep]]()
    while len(counted) < WARM_UP + turns:
        turn: list[MeasuredStep] = []
        overflowed = False
        for program, plan in zip(programs, plans, strict=True):
            state, m = train_step(program, state, batch, trace=True)
            turn.append(MeasuredStep(plan, m.timeline or Timeline((), "measured"), m.seconds))
            overflowed |= m.skipped
        skipped = skipped + 1 if overflowed else 0
        if skipped > MOST_SKIPPED:
            raise ValueError(f"got {skipped} overflows in a row, expected steps that count: use bf16 or fp32")
        counted += [] if overflowed else [turn]
    return [[*steps] for steps in zip(*counted[WARM_UP:], strict=True)]


def middle_half(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The middle half of `steps` by duration; the fastest and slowest quarters count as disturbed."""
    ordered = sorted(steps, key=lambda step: step.seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def operation_costs(steps: Iterable[MeasuredStep]) -> tuple[Measured, ...]:
    """The mean seconds of operations of equal kind, FLOPs and bytes, in `steps` of a plan with one lane.

    Raises ValueError for a plan with several lanes, or without a step.
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
            op = graph.ops[graph.position[e.op]]
            seconds = max(end - start, 1e-9)  # clocks of devices may cross
            spent.setdefault((op.kind, op.flops, op.attention_flops, op.nbytes), []).append(seconds)
    if not spent:
        raise ValueError("got no operation of any step, expected some: measure a step first")
    return tuple(
        Measured(kind, flops, nbytes, _rounded(fmean(spent[kind, flops, attention, nbytes])), attention)
        for kind, flops, attention, nbytes in sorted(spent, key=lambda x: (KINDS.index(x[0]), *x[1:]))
    )


def handoff(steps: Iterable[MeasuredStep]) -> float | None:
    """Seconds of a hand-over between lanes: from the end of an operation to the start of one on another lane that
    waits for nothing else; the mean of the middle half of these gaps in `steps`, None without a gap."""
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
    """Latency (s) and rate (bytes/s), 0 or more, of the line fitted to `points` (bytes, seconds) by relative error.

    >>> fit_line([(1_000, 3e-6), (9_000, 11e-6)])
    (2e-06, 1000000000.0)
    >>> fit_line([(1_000, 1e-5), (2_000, 1e-5 + 1e-14)])  # which do not differ: the highest rate of a profile
    (1e-05, 1000000000000000.0)
    """
    sizes, seconds = np.array(points, dtype=float).T
    slope = latency = 0.0
    if len({*sizes}) > 1:
        slope, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    if slope <= 0 or latency < 0:  # one size, or noise: all of it is rate
        relative = sizes / seconds
        slope, latency = relative.sum() / (relative**2).sum(), 0.0
    return _rounded(latency), _rounded(min(1 / slope, BOUNDS["bytes_per_s"][1]))


def _rounded(value: float, digits: int = 6) -> float:
    """`value` rounded to `digits` significant digits: the rest of a measurement is noise."""
    return float(f"{value:.{digits}g}")


def clocked(program: Program) -> tuple[Program, list[tuple[Op, float]]]:
    """A copy of `program` whose stages append each operation, with the CPU seconds that Python took to issue it, to
    the returned list. On the CPU, where these seconds would include the compute: `program`, and an empty list."""
    spent: list[tuple[Op, float]] = []
    if not on_accelerator(program.device):
        return program, spent

    def timed(stage: Callable[..., None]) -> Callable[..., None]:
        def run(op: Op, *given: Any) -> None:
            start = thread_time()
            stage(op, *given)
            spent.append((op, thread_time() - start))

        return run

    stages = {verb: timed(stage) for verb, stage in program.stages.items()}
    return rescheduled(evolve(program, stages=stages), program.schedule), spent


def issue_seconds(spent: Iterable[tuple[Op, float]]) -> dict[str, float]:
    """Median CPU seconds that Python takes to issue an operation of a kind, keyed by the Profile's figure for the
    kind, such as "issue_h2d"; `spent` is the list that `clocked` returned. Host updates also sweep memory: for them
    the result is the intercept, at 0 bytes, of a line fitted to their seconds."""
    found: dict[Kind, dict[int, list[float]]] = {}
    for op, seconds in spent:
        if op.nbytes and not op.flops:
            found.setdefault(op.kind, {}).setdefault(op.nbytes, []).append(seconds)
    issue: dict[str, float] = {}
    for kind, key in ISSUE.items():
        if of := found.get(kind):
            sized = [(nbytes, max(median(taken), 1e-9)) for nbytes, taken in of.items()]
            every = [x for taken in of.values() for x in taken]
            issue[key] = fit_line(sized)[0] if kind == "host" else median(every)
    return {key: seconds for key, seconds in issue.items() if seconds}


def measure_handoff(num_ops: int = 1000) -> float:
    """Seconds to wake a lane, per operation: how much longer `num_ops` empty operations take on two lanes that wait
    for each other than on one lane."""
    x = Region("x")
    graph = Graph(tuple(Op(f"nothing{i}", (), "host", reads=(x,), writes=(x,)) for i in range(num_ops)))
    executor, device = Executor(torch.device("cpu")), torch.device("cpu")
    stages: dict[str, Any] = dict.fromkeys((op.verb for op in graph), lambda *_: None)

    def taken(num_lanes: int) -> float:
        plan = build(graph, {f"lane{n}": range(n, num_ops, num_lanes) for n in range(num_lanes)})
        ready = prepare_plan(plan, stages, device)
        return min(executor.run(ready, {x: None}, None, RunOptions(), {}).seconds for _ in range(REPEATS))

    return max(0.0, taken(2) - taken(1)) / (num_ops - 1)


# --- what is timed beside the steps ----------------------------------------------------------------------------


def measure_beside(program: Program, folder: Path) -> Machine:
    """Describe this machine before `program` takes memory; time the device's arithmetic and `folder`'s drive."""
    device, precision = program.device, program.settings.precision
    has_own_memory, ranks = on_accelerator(device), min(local_ranks(), program.ranks.world)
    cores, host, callers = physical_cores(allowed_cpus()), available_host_bytes(), torch.get_num_threads()
    named = device_name(device), cpu_model() or platform.machine(), f"{cores} cores"
    products, attention = measure_arithmetic(device, program.dtype)
    drives, launch = measure_disk(folder), measure_launch(device)
    peak = max(products, attention)
    arithmetic = "products of large matrices, and attention of a long row, forward and backward"
    counted = {"devices": device_count(device) if has_own_memory else cores, "cores": cores}
    free = {"host": host, "disk": shutil.disk_usage(folder).free}
    free |= {"device": available_bytes(device) if has_own_memory else host}
    figures = {
        "count": measured("read from the operating system", counted),
        "bytes": measured("free when this was measured", free),
        "flops_per_s": measured(arithmetic, {precision: peak}),
        "bytes_per_s": measured(DRIVEN, {kind: rate * ranks for kind, (_, rate) in drives.items()}),
        "seconds": measured(DRIVEN, {kind: latency for kind, (latency, _) in drives.items()}),
        "reached": measured(arithmetic, {precision: products / peak, "attention": attention / peak}),
    }
    if launch is not None:
        figures["seconds"] |= measured("launches of a small block, forward and backward", {"launch": launch})
    if not has_own_memory:
        # The threads that each kind of operation keeps busy; in a Serial step copies run on the caller's.
        threads = dict.fromkeys(KINDS, 1) | dict.fromkeys(("compute", "d2h", "h2d"), callers)
        shares = {kind: min(1.0, n / cores) for kind, n in (threads | {"host": default_threads()}).items()}
        figures[f"{SHARED}cores"] = measured(f"of {cores} cores, by its busy threads", shares)
    return Machine(
        ", ".join(str(x) for x in named if x),
        precision,
        figures,
        unified=not has_own_memory,
        grouped=not has_own_memory or has_grouped_kernels(device),
        world=program.ranks.world,
        local_ranks=ranks,
    )


def measured(how: str, values: Mapping[str, float]) -> dict[str, Figure]:
    """A Figure for each of `values`, by the same key, rounded to 5 digits; `how` tells how all were measured."""
    return {key: Figure(_rounded(value, 5), measured=how) for key, value in values.items()}


def measure_disk(folder: Path) -> dict[Kind, Line]:
    """Latency (s) and rate (bytes/s) of the drive that has `folder`, for "read" past the page cache and for synced
    "write". Raises DiskError where `folder` cannot be used."""
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
            "read": (min(1.0, _median_seconds(lambda: file.read(page, 0))), speeds.read),
            "write": (min(1.0, _median_seconds(write)), speeds.write),
        }


def _median_seconds(call: Callable[[], Any]) -> float:
    return median(timeit.repeat(call, number=1, repeat=REPEATS))


def measure_arithmetic(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of `device` in products of square matrices, and in attention (causal, 16 heads of 128) with backward.

    The size doubles from 512 until the work takes 2 ms, so that the launch does not count.
    """

    def product(side: int) -> tuple[float, Callable[[], Any]]:
        a = torch.randn(side, side, device=device, dtype=dtype)  # zeros would be faster
        return 2 * side**3, lambda: a @ a

    def attention(row: int) -> tuple[float, Callable[[], Any]]:
        q = torch.randn(1, 16, row, 128, device=device, dtype=dtype)

        def both() -> None:
            y, pull, *_ = torch.func.vjp(lambda q: scaled_dot_product_attention(q, q, q, is_causal=True), q)
            pull(y)

        return 7 * 16 * 128 * row**2, both

    def rate(work: Callable[[int], tuple[float, Callable[[], Any]]], size: int = 512) -> float:
        flops, call = work(size)

        def run() -> None:
            call()
            if on_accelerator(device):
                torch.accelerator.synchronize(device)

        run()  # which loads the kernels
        taken = _median_seconds(run)
        return flops / taken if taken >= ENOUGH_SECONDS else rate(work, 2 * size)

    return rate(product), rate(attention)


def measure_launch(device: torch.device) -> float | None:
    """Host seconds of one kernel launch on `device`, from forward and backward of a block so small that the device
    waits for its host. None on the CPU, where nothing is launched."""
    if not on_accelerator(device):
        return None
    with torch.device(device):
        block = nn.Sequential(*(x for _ in range(2) for x in (nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())))
        x = torch.ones(8, 8)
    weights = SegmentWeights({name: p.detach() for name, p in block.named_parameters()}, {})
    passes = make_vjp(lambda given, x: functional_call(block, given, (x,)), PassOptions("all"))

    def run() -> None:
        y, residuals = passes.forward(weights, (x,))
        passes.backward(weights, (x,), residuals, [y])

    def run_many() -> None:
        for _ in range(PASSES):
            run()
        torch.accelerator.synchronize(device)

    run()  # traces
    with AllocationTracker() as tracker:
        run()
    torch.accelerator.synchronize(device)
    return _median_seconds(run_many) / (PASSES * tracker.launches)


# --- the profile -----------------------------------------------------------------------------------------------


def make_profile(
    machine: Machine,
    operations: tuple[Measured, ...],
    handoff: float,
    how: str,
    spent: Sequence[tuple[Op, float]] = (),
) -> Profile:
    """Make the Profile of `machine` from the measured `operations` of its steps and the seconds of a `handoff`
    between lanes; `how` says how both were measured. `spent` is the list of `clocked`: unless it is empty,
    `handoff` is replaced by a measurement without a step, as lanes of a step also wait for Python's lock (GIL).

    A rate of the node is the rate of one of its ranks, while all run, times their number. Raises ValueError where
    no operation gives the rate of a kind.
    """
    ranks, rates, seconds = machine.local_ranks, dict[str, float](), {"handoff": min(1.0, handoff)}
    for kind in ("compute", "host", "d2h", "h2d", *(["network"] if machine.world > 1 else [])):
        points = [(x.nbytes, x.seconds) for x in operations if x.kind == kind and x.nbytes and not x.flops]
        if points and kind == "network":
            hop = NETWORKS[machine.world != ranks]
            latency, rates[hop] = fit_line(points)
            seconds[hop] = latency / (machine.world - 1)
        elif points:
            latency, rate = fit_line(points)
            rates[NAMED.get(kind, kind)] = rate * (ranks if kind in OF_NODE else 1)
            seconds[kind] = min(1.0, latency)
        elif kind != "network":
            what = f"got no operation of kind {kind!r} that moves bytes in the steps"
            raise ValueError(f"{what}, expected some: take a model that has one")
    figures = {table: dict(of) for table, of in machine.figures.items()}
    figures["bytes_per_s"] |= measured(how, rates)
    figures["seconds"] |= measured(how, seconds)
    if issue := issue_seconds(spent):
        figures["seconds"] |= measured("Python's time in the stages of these steps", issue)
        waking = measured("lanes of operations that do nothing", {"handoff": measure_handoff()})
        figures["seconds"] |= waking
    peaks = *(f"{tier}_bytes" for tier in figures["bytes"]), *figures["bytes_per_s"]
    figures["reached"] |= measured("the figure was reached", dict.fromkeys(peaks, 1.0))
    return Profile(
        "calibrated",
        machine.title,
        figures,
        unified=machine.unified,
        grouped=machine.grouped,
        measured=operations,
    )
