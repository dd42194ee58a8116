"""Partial offload: how much of the optimizer's state fits on the device, and what was chosen.

The invariant: what is said to be on the host is what the plan has there.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from attrs import evolve

from zfunc.core.layout import resident_buckets
from zfunc.core.memory_model import peak_memory
from zfunc.core.spec import StepSpec
from zfunc.engine.program import Program, ProgramCache, batch_key, make_plan, specialize
from zfunc.errors import OutOfMemory
from zfunc.options import AUTO
from zfunc.runtime.accelerator import available_bytes
from zfunc.runtime.host_memory import available_host_bytes

STEPS = 32  # ratios that are tried
HEADROOM = 0.05  # of what is free, left free: an allocator cannot use every byte

log = logging.getLogger("zfunc")


def fit_to_memory(program: Program, example: tuple[Any, Any]) -> Program:
    """The program with as much of the optimizer's state on the device as fits beside a step on such a batch.

    On a CPU the device is the host, and everything stays where it is. Raises OutOfMemory if not even a step without
    any of it fits.
    """
    spec = specialize(program, example).spec
    on_cpu = program.device.type == "cpu"
    there = available_host_bytes() if on_cpu else available_bytes(program.device)

    def needed(spec: StepSpec) -> int:
        peaks = peak_memory(make_plan(spec, program.schedule, program.recipe))
        return sum(peak.nbytes for tier, peak in peaks.items() if on_cpu or tier == "device")

    room = int(there * (1 - HEADROOM))

    def fits(ratio: float) -> bool:
        return needed(with_ratio(spec, ratio)) <= room

    # On a CPU less is needed the more stays where it is.
    ratio = 0.0 if on_cpu and fits(0.0) else smallest_ratio(fits)
    program.ranks.agree("compile")
    told = program.ranks.texts(
        "" if ratio is None else str(ratio)
    )  # the same on all ranks: the most any needs
    if "" in told:
        raise OutOfMemory(
            f"offload_ratio 'auto': got {there:,} free bytes on {program.device}, of which {room:,} may be used, "
            f"expected {needed(spec):,} for a step with all of the optimizer's state on the host, on every rank. "
            "Use more micro_batches, or a smaller model"
        )
    ratio = max(map(float, told))
    key = batch_key(program, example)
    _, random = program.cache.costs[key]
    spec = with_ratio(spec, ratio)
    bare = evolve(program.spec, resident=spec.resident)
    return evolve(
        program, spec=bare, cache=ProgramCache(costs={key: (spec, random)}, reached=program.cache.reached)
    )


def smallest_ratio(fits: Callable[[float], bool]) -> float | None:
    """The smallest share of the state on the host for which `fits` holds, in STEPS; None if for none."""
    ratios = [n / STEPS for n in range(STEPS + 1)]
    found = bisect_left(ratios, True, key=fits)
    return ratios[found] if found < len(ratios) else None


def with_ratio(spec: StepSpec, offload_ratio: float) -> StepSpec:
    """The spec with that share of its state on the host, in the buckets it has."""
    return evolve(spec, resident=resident_buckets(spec.layout, offload_ratio))


def share_on_host(spec: StepSpec) -> float:
    """The share of the optimizer's state that is on the host, 0 to 1."""
    return sum(spec.layout.buckets[b].numel for b in spec.offloaded) / spec.layout.numel


def log_offload(program: Program) -> Program:
    """The program, after a logged line on what is where unless everything is on the host."""
    spec, asked = program.spec, program.settings.offload_ratio
    if spec.resident or asked != 1:
        log.info(
            "offload: %.1f%% of the optimizer's state is on the host (asked: %s); %d of %d buckets stay on the "
            "device",
            100 * share_on_host(spec),
            asked if asked == AUTO else f"{100 * asked:g}%",
            len(spec.resident),
            len(spec.layout.buckets),
        )
    if spec.shadows and not spec.shadowed:
        why = (
            "without clipping or fp16 nothing waits for the norm"
            if spec.offloaded
            else "nothing is on the host"
        )
        log.info("speculate: %s: there is nothing to speculate on", why)
    if spec.delayed and not spec.offloaded:
        log.info("delay_from: nothing is on the host, so nothing is delayed")
    return program
