"""What `zfunc plan` says: one screen for a person, one JSON object for a program.

The invariant: everything said is in the answer; nothing is computed here but sums and words.
"""

import json
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from attrs import fields

from zfunc.cli.planning import PlannedModel
from zfunc.core.graph import TIERS, Tier
from zfunc.core.hardware import ROUND
from zfunc.core.settings import StepSettings
from zfunc.planner.candidate import shortage_text
from zfunc.planner.plan_step import Planned
from zfunc.planner.profile import Profile
from zfunc.planner.search_space import SEARCHED
from zfunc.planner.suggestions import Suggestion, as_flag
from zfunc.schedules import make_schedule
from zfunc.train.settings import AUTO
from zfunc.units import format_gigabytes, format_seconds

ALWAYS_TYPED = SEARCHED[:4]  # the others are named where they are not off
LARGEST = 3  # buffers of a peak that are named
SMALL = 0.01  # of a peak: not named
WIDTH = 118  # columns of what is a sentence


def as_json(answer: PlannedModel) -> str:
    """The answer as one object; memory in bytes, times in seconds."""
    p = answer.planned
    told: dict[str, Any] = {
        "fits": p.fits,
        "step_seconds": p.step_seconds,
        "tflops": p.tflops,
        "tokens_per_second": p.tokens_per_second,
        "memory": p.memory,
        "lanes": p.lanes,
        "bound": p.bound,
        "advice": [in_flags(a) for a in p.suggestions],
        "lacking": p.step.lacking,
        "peaks": {tier: {"op": p.step.peaks[tier].op, "holds": held} for tier, held in p.held.items()},
        "parameters": answer.parameters,
        "num_layers": answer.asked.num_layers,
        "hardware": p.hardware.name,
        "world": p.world,
        "settings": {**p.settings, "schedule": p.step.settings.schedule_name},
        "reasons": list(p.reasons),
    }
    return json.dumps(told, indent=2)


def plan_text(answer: PlannedModel) -> str:
    """The answer in plain words, a screen of them."""
    p = answer.planned
    lines = [*_what(answer), "", *_memory(p), "", *_time(p)]
    if p.reasons:
        lines += ["", "found by search:", *(f"  {reason}" for reason in p.reasons)]
    if answer.asked.schedule == AUTO:
        lines += ["", *_as_options(p)]
    lines += ["", *_advice(p), "", *_assumed(p)]
    return "\n".join(lines) + "\n"


def in_flags(advice: Suggestion) -> str:
    """Advice as one types it, and what comes of it."""
    return f"{advice.flags}: {advice.told}"


def _what(answer: PlannedModel) -> Iterator[str]:
    asked, p = answer.asked, answer.planned
    settings, buckets = p.step.settings, p.step.spec.layout.buckets
    if asked.max:
        yield f"the most that fits with these settings: {asked.num_layers} layers"
    ranks = f"{p.world} rank{'s' * (p.world != 1)}"
    yield (
        f"GPT of {asked.num_layers} layers x {asked.hidden_size:,}: {answer.parameters:,} parameters; a step of "
        f"{asked.batch_size:,} x {asked.seq_length:,} tokens on {ranks}"
    )
    yield f"hardware   {_machine(answer)}"
    more = [
        *([f"{settings.offload_ratio:.0%} of the state on the host"] if settings.offload_ratio != 1 else []),
        *([f"{settings.speculate} buckets speculated"] if settings.speculate else []),
        *(["updates delayed"] if settings.delayed else []),
    ]
    told = (
        f"plan       {settings.schedule_name}, {len(buckets)} buckets, the largest of {p.step.spec.slot_numel:,}; "
        f"{settings.micro_batches} micro-batch{'es' * (settings.micro_batches != 1)}, recompute "
        f"{settings.recompute}, moments {settings.moments}{''.join(f', {x}' for x in more)}"
    )
    yield from wrap(told, WIDTH, subsequent_indent=" " * 11)


def _machine(answer: PlannedModel) -> str:
    p = answer.planned
    if p.profile is None or answer.asked.precision != AUTO:
        return p.hardware.name
    there = ", ".join(p.profile.precisions)
    return f"{p.hardware.name} (chosen of {there})"


def _as_options(p: Planned) -> list[str]:
    """What was chosen, to train so. A schedule made for this hardware gets another by its name."""
    schedule = make_schedule(p.step.settings.schedule, p.hardware)
    orders = hasattr(schedule, "hardware") and p.hardware != ROUND
    note = " (which orders for round numbers, not for this hardware)" if orders else ""
    told = f"as options of zfunc train{note}: {_options(p)}"
    return wrap(told, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _options(p: Planned) -> str:
    """What was chosen, as one types it."""
    settings = p.step.settings
    chosen = {
        f.name: settings.schedule_name if f.name == "schedule" else getattr(settings, f.name)
        for f in fields(StepSettings)
        if f.name in ALWAYS_TYPED or (f.name in SEARCHED and getattr(settings, f.name) != f.default)
    }
    return " ".join(as_flag(name, value) for name, value in chosen.items())


def _memory(p: Planned) -> Iterator[str]:
    yield "it fits" if p.fits else f"it does not fit: {shortage_text(p.step.lacking)}"
    yield f"  {'':7}{'needed':>12}{'there':>12}{'':>8}  most of it, at the peak"
    there, held = p.hardware.memory, p.held
    for tier in TIERS:
        room = there.get("host" if tier == "pinned" else tier)
        known = "with host" if tier == "pinned" and room else format_gigabytes(room) if room else "not known"
        if p.hardware.unified and tier == "device":
            known = "with host"
        share = f"{_counted(p, tier) / room:.0%}" if room and known != "with host" else ""
        large = [(name, n) for name, n in held[tier].items() if n > SMALL * p.memory[tier]]
        parts = ", ".join(f"{name} {format_gigabytes(n)}" for name, n in large[:LARGEST])
        at = f" (at {op})" if (op := p.step.peaks[tier].op) else ""
        yield f"  {tier:7}{format_gigabytes(p.memory[tier]):>12}{known:>12}{share:>8}  {parts}{at}".rstrip()


def _counted(p: Planned, tier: Tier) -> int:
    """What comes out of a tier's room."""
    more = p.memory["pinned"] if tier == "host" else 0
    return p.memory[tier] + more + (p.memory["device"] if tier == "host" and p.hardware.unified else 0)


def _time(p: Planned) -> Iterator[str]:
    each = " on each GPU" if p.world > 1 else ""
    speed = f"{p.tokens_per_second:,.0f} tokens/s, {p.tflops:,.3g} TFLOP/s{each}"
    yield f"a step takes {format_seconds(p.step_seconds)}: {speed}"
    yield f"  bound by {p.bound}"
    lanes = sorted(p.lanes.items(), key=lambda item: -item[1])
    yield f"  busy     {', '.join(f'{lane} {share:.0%}' for lane, share in lanes)}"


def _advice(p: Planned) -> Iterator[str]:
    if not p.suggestions:
        yield "no change of one setting that was tried makes it " + ("faster" if p.fits else "fit")
        return
    yield "to make it faster, each planned alone:" if p.fits else "to make it fit, each planned:"
    yield from (f"  {in_flags(advice)}" for advice in p.suggestions)


def _device_bytes(profile: Profile) -> str:
    """What is counted on of those its driver reports."""
    share, context = profile.figures["reached"]["device_bytes"], profile.figures["bytes"].get("context")
    return f"{share.value:.0%}" + (
        "" if context is None else f" less {format_gigabytes(context.value)} of context"
    )


def _assumed(p: Planned) -> Iterator[str]:
    if p.profile is not None:
        shares = p.profile.figures["reached"]
        rates = p.step.settings.precision, "d2h", "h2d", "host_memory", "device_memory"
        used = [k for k in shares if k in rates]
        reached = ", ".join(f"{key} {shares[key].value:.0%}" for key in used)
        told = (
            f"assumed of the profile's peaks: {reached}; of the device's bytes {_device_bytes(p.profile)}; "
        )
        yield from wrap(f"{told}why is in the profile", WIDTH, subsequent_indent="  ")
    yield from wrap(
        "assumed of the step: memory is a bound for every timing; segments are traced with the CPU's kernels, "
        "attention is one of them; TFLOP/s counts forward, and twice as much for backward",
        WIDTH,
        subsequent_indent="  ",
    )
