"""Settings that are "auto": the offload ratio and the places that fit device and host memory; the choice's log.

The places of updates are chosen by their time, from measured rates of the host's sweep and of copies.
"""

import logging
import math
import timeit
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from attrs import evolve

from zfunc.core.bucketing import resident_buckets
from zfunc.core.decision import StepDecision
from zfunc.core.dtypes import DTYPES
from zfunc.core.graph import Tier
from zfunc.core.memory_model import Peak, initial_memory, peak_memory
from zfunc.core.optimizer_state import STATE_FORMATS
from zfunc.core.plan import project
from zfunc.core.setting_values import UPDATE_SHARES, tile_counts
from zfunc.core.settings import StepSettings
from zfunc.core.shares import shares_of, words_of
from zfunc.core.spec import StepSpec
from zfunc.engine.program.program import (
    Program,
    ProgramCache,
    make_plan,
    memory_shortage,
    needed_bytes,
    warn_once,
)
from zfunc.engine.program.specialize import specialize
from zfunc.engine.program.traced_spec import row_tokens
from zfunc.engine.trace.batches import Batch, unpacked
from zfunc.engine.trace.segment import Segment
from zfunc.errors import Message, OutOfMemory, marked
from zfunc.optim.adamw import AdamW
from zfunc.optim.base import Optimizer
from zfunc.options import AUTO
from zfunc.runtime.accelerator import available_bytes, behind, copy_stream, on_accelerator
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.memory_limits import available_host_bytes
from zfunc.runtime.thread_budget import local_ranks

STEPS = 32  # the shares 0, 1/32, ..., 1 are tried
# Elements that are swept and copied to measure the rates of both: 1 GiB, which no cache holds.
MEASURED = 1 << 26
REPEATS = 3
HEADROOM = 0.05  # share of the free memory that stays free: an allocator cannot use every byte

log = logging.getLogger("zfunc")


def fit_to_memory(program: Program, example: Batch) -> Program:
    """Plan the program for a step on `example`; with `state_on="device:auto,host"`, also choose how much of
    the optimizer state is on the device: as much as fits there beside the step.

    On a CPU, where device and host are one, all of the state stays on it. Raises OutOfMemory if a step does
    not fit even with all of the state on the host.
    """
    shaped = specialize(program, example)
    if not program.settings.fits_state:
        return evolve(program, plan=shaped.plan)
    spec = shaped.spec
    limit = next(iter(_room(program).values()))  # of the device, or the first of several that are alike

    def needed(spec: StepSpec) -> int:
        plan = project(make_plan(spec, program.schedule, program.recipe), spec.stage)
        found = needed_bytes(program, peak_memory(plan))
        return max(found[x] for x in program.memories or found)

    def fits(share: float) -> bool:
        return needed(with_share(spec, share)) <= limit

    # On a CPU, memory shrinks as the device's share grows, so all of it is first.
    share = 1.0 if not on_accelerator(program.device) and fits(1.0) else largest_share(fits)
    program.ranks.agree("compile")
    shares = program.ranks.texts("" if share is None else str(share))
    if "" in shares:
        raise OutOfMemory(
            f"state_on {program.settings.state_on!r}: got {limit:,} usable bytes on {program.device}, "
            f"expected {needed(spec):,} for a step with all of the optimizer's state on the host, on every rank. "
            "Use more micro_batches, or a smaller model"
        )
    share = min(map(float, shares))  # the same on all ranks: the smallest that any has room for
    spec = with_share(spec, share)
    known = program.cache.costs.items()
    costs = OrderedDict((key, (with_share(own, share), random)) for key, (own, random) in known)
    cache = ProgramCache(costs=costs, outside=program.cache.outside)
    program = evolve(program, spec=evolve(program.spec, resident=spec.resident), cache=cache)
    return evolve(program, plan=specialize(program, example).plan)


def first_places_that_fit(
    make: Callable[[StepSettings], Program],
    settings: StepSettings,
    optimizer: Optimizer,
    example: Batch,
    device: torch.device,
    ranks: RankGroup,
) -> Program:
    """Choose the places ("device", "host", "disk") of settings that are "auto". Returns the program that
    `make(settings)` compiles with parameters, activations and other data as near to the device as every rank
    has memory for, in a step on `example`."""
    fastest, tiles = fastest_shares(optimizer, settings, device, ranks), tile_counts(row_tokens(example))
    ways = settings.placed(ranks.world, disk=bool(settings.swap), update_on=fastest, tiles=tiles)
    return first_that_fits([partial(make, way) for way in ways], example, settings.automatic)


def first_that_fits(
    ways: Sequence[Callable[[], Program]], example: Batch, chosen: Iterable[str] = ()
) -> Program:
    """The first of the programs that the functions `ways` compile whose step on `example` fits the devices
    and hosts of all ranks; no step is run.

    If none fits, the first that fits the devices, else the last. Logs the values of the settings named in
    `chosen`.
    """
    last = ways[-1]
    found: Program | None = None
    for make in ways:
        try:
            program = make()
        except OutOfMemory:  # whatever share of the state the device has
            if make is last and found is None:
                raise
            continue
        needed, room = needed_bytes(program, specialize(program, example).memory), _room(program)
        missing = [memory for memory, nbytes in needed.items() if nbytes > room[memory]]
        program.ranks.agree("compile")
        of_ranks = program.ranks.texts(" ".join(missing))
        if not any(of_ranks):
            found = program
            break
        devices = {*(program.memories or needed)}  # or the host where that is one
        if found is None and (make is last or devices.isdisjoint(" ".join(of_ranks).split())):
            found = program
    assert found is not None
    named = ", ".join(f"{name}={getattr(found.settings, name)!r}" for name in chosen)
    log.info("chosen where the settings say auto: %s", named)
    return found


class Attempt(NamedTuple):
    """The outcome of planning a step for a model cut into segments: `made`, its program or plan; `missing`,
    the bytes that the device lacks (0 or less if the step fits); `futile`, whether it lacks them for the
    model's state alone, so that finer segments do not help."""

    made: Any
    missing: int
    futile: bool

    @property
    def is_last(self) -> bool:
        """Whether no finer cut is worth a try: the step fits, or no cut can fit."""
        return self.missing <= 0 or self.futile


def coarsest_cut(
    cuts: Iterable[Any], attempt: Callable[[Any], Attempt]
) -> tuple[Attempt | None, Any, OutOfMemory | None]:
    """Call `attempt` for each of `cuts`, ever finer divisions of a model into segments, until a step fits the
    device or none can. Returns that attempt, else the one that lacks fewest bytes; the last cut tried; the
    last OutOfMemory raised."""
    cut: Any = None
    tried = list[Attempt]()
    error: OutOfMemory | None = None
    for n, cut in enumerate(cuts):
        try:
            tried.append(attempt(cut))
        except OutOfMemory as refused:  # whatever share of the state the device has
            error = refused
            continue
        except ValueError:  # an order may list passes by the numbers of the segments
            if not tried:
                raise
            break
        if tried[-1].missing <= 0 and n:
            log.info(
                "model: cut into %d segments of at most %s elements of parameters, as a step in larger ones does "
                "not fit the device",
                *(len(cut.segments), f"{max(map(_numel, cut.segments)):,}"),
            )
        if tried[-1].is_last:
            return tried[-1], cut, error
    return min(tried, key=lambda x: x.missing, default=None), cut, error


def first_cut_that_fits(
    cuts: Iterable[Any], make: Callable[[Sequence[Segment]], Program], example: Batch | Mapping[str, Any]
) -> Program:
    """Compile, by `make(segments)`, the coarsest of `cuts`, ever finer divisions of a model into segments,
    whose step on `example` fits the devices. If the devices lack room for the model's state alone, it is the
    first that compiles.

    Raises OutOfMemory, which names the model's largest part, if no cut fits.
    """

    def attempt(cut: Any) -> Attempt:
        program = make(cut.segments)
        missing = _missing(program, specialize(program, unpacked(example, program.segments[-1])).memory)
        return Attempt(program, missing, missing > 0 and _missing(program, initial_memory(program.spec)) > 0)

    found, cut, error = coarsest_cut(cuts, attempt)
    if found is not None and found.is_last:
        return found.made
    numel, place, name = max(
        (_numel(s), place, s.name) for s, place in zip(cut.segments, cut.places, strict=True)
    )
    part = f"; no cut is finer: the largest part is {name!r} at {place}, of {numel:,} elements of parameters"
    if found is None:
        assert error is not None
        raise OutOfMemory(Message(f"{marked(error)}{part}")) from error
    program = found.made
    peaks = specialize(program, unpacked(example, program.segments[-1])).memory
    shortage = memory_shortage(program, peaks, needed_bytes(program, peaks), action="compile")
    nbytes = numel * DTYPES[program.settings.precision].nbytes
    program.ranks.agree("compile", shortage=shortage and f"{shortage}{part}, {nbytes:,} bytes")
    return program


def _numel(segment: Segment) -> int:
    return sum(math.prod(p.shape) for p in segment.parameters)


def _missing(program: Program, peaks: Mapping[Tier, Peak]) -> int:
    """Bytes by which `peaks` exceed the usable memory of a device, for the rank and device where that is
    most; 0 or less if all fit. A collective."""
    needed, room = needed_bytes(program, peaks), _room(program)
    own = max(needed[x] - room[x] for x in program.memories or needed)
    program.ranks.agree("compile")
    return max(map(int, program.ranks.texts(str(own))))


def _room(program: Program) -> dict[str, int]:
    """Usable bytes by memory: of each accelerator, and on "host" this rank's share: 95 % of the available
    bytes."""
    if not on_accelerator(program.device):
        return {"host": int(available_host_bytes() * (1 - HEADROOM))}
    own = available_host_bytes() // min(local_ranks(), program.ranks.world)
    free = {**{x: available_bytes(device) for x, device in program.memories.items()}, "host": own}
    return {memory: int(nbytes * (1 - HEADROOM)) for memory, nbytes in free.items()}


def fastest_shares(
    optimizer: Optimizer, settings: StepSettings, device: torch.device, ranks: RankGroup
) -> Sequence[str]:
    """The values of the setting `update_on` to try where it is "auto", those with the fastest updates first;
    the same order on all ranks.

    An update takes as long as the slower of two things that run at the same time, at measured rates: the
    host's update of its share of the state, and the copies between host and device. On a CPU nothing is
    measured.
    """
    if settings.update_on != AUTO or not on_accelerator(device):
        return UPDATE_SHARES
    element = DTYPES[settings.precision].nbytes
    state = sum(x.nbytes(1024) for x in STATE_FORMATS[optimizer.state_format(0)]) / 1024
    host, copies = measured_rates(device)

    def longest(places: str) -> float:
        on_device = float(shares_of(places).get("device", 0))
        copied = on_device * state + (1 - on_device) * element
        return max((1 - on_device) * 2 * (state + element) / host, copied / copies)

    return ranks.texts(" ".join(sorted(UPDATE_SHARES, key=longest)))[0].split()


def measured_rates(device: torch.device) -> tuple[float, float]:
    """Measure two rates in bytes a second: of memory traffic in Adam's update on the host; and of copies
    between host and device in one direction, while copies run in both."""
    decision = StepDecision(False, 1.0, 1, AdamW().factors(1))
    state = {x.name: alloc_host(MEASURED, torch.float32) for x in STATE_FORMATS["fp32"]}
    pinned = alloc_host(MEASURED, torch.float32, pinned_for=device)
    there, half = torch.empty(MEASURED, device=device), MEASURED // 2

    def copy() -> None:
        with behind(copy_stream(device, "up")):
            there[:half].copy_(pinned[:half], non_blocking=True)
        with behind(copy_stream(device, "down")):
            pinned[half:].copy_(there[half:], non_blocking=True)
        torch.accelerator.synchronize(device)

    def seconds(call: Callable[[], Any]) -> float:
        return min(timeit.repeat(call, number=1, repeat=REPEATS))

    swept = seconds(lambda: AdamW().host_update(state, pinned, decision, group=0))
    moved = 2 * sum(x.nbytes for x in state.values()) + pinned.nbytes  # the state twice, and the gradient
    return moved / swept, pinned.nbytes / 2 / seconds(copy)


def largest_share(fits: Callable[[float], bool]) -> float | None:
    """The largest of the shares 0, 1/32, ..., 1 for which `fits` holds; None if it holds for none."""
    shares = [n / STEPS for n in range(STEPS, -1, -1)]
    first = bisect_left(shares, True, key=fits)
    return shares[first] if first < len(shares) else None


def with_share(spec: StepSpec, share: float) -> StepSpec:
    """`spec` with a `share` (0 to 1) of the optimizer state resident on the device; the layout is unchanged."""
    return evolve(spec, resident=resident_buckets(spec.layout, share))


def log_offload(program: Program) -> Program:
    """Log the share of the state on the host, unless it is 1, and settings without effect. Returns `program`."""
    spec, requested = program.spec, program.settings.state_on
    if spec.resident or "device" in words_of(requested):
        log.info(
            "offload: %.1f%% of the optimizer's state is on the host (requested: %s); %d of %d buckets stay on the "
            "device",
            100 * spec.share_on_host,
            requested,
            len(spec.resident),
            len(spec.layout.buckets),
        )
    if program.settings.defer and not (spec.deferred and spec.offloaded):
        reason = "without clipping or fp16 no update waits" if spec.offloaded else "nothing is on the host"
        log.info("defer: %s: there is nothing to defer", reason)
    devices, micro_batches = program.settings.stages, program.settings.micro_batches
    if micro_batches < devices:
        log.warning(
            "`%s`: %d for `micro_batches=%d`: each idles for %.0f%% of a step or so, (n - 1) / (m + n - 1); "
            "`micro_batches=%d` would make that %.0f%%",
            *("pp" if spec.mesh.over_ranks else "devices", devices, micro_batches),
            100 * (devices - 1) / (micro_batches + devices - 1),
            *(4 * devices, 100 * (devices - 1) / (5 * devices - 1)),
        )
    if products_are_tf32(program.settings.tiles, program.devices):
        warn_once(program, "fp32 products on CUDA are TF32, in tiles of attention too (docs/devices.md)")
    return program


def products_are_tf32(tiles: int | str, devices: Iterable[torch.device]) -> bool:
    """Whether attention of rows in `tiles` computes fp32 matmuls in TF32, by torch's process-wide CUDA setting."""
    on_cuda = any(x.type == "cuda" for x in devices)
    return tiles != 1 and on_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
