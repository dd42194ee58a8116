"""What a plan says: does the step fit, how long does it take, what bounds it, and what would help; text or HTML."""

import re
from collections.abc import Iterator
from html import escape
from textwrap import wrap

from attrs import fields

from zfunc.core.graph import TIERS, Tier
from zfunc.core.hardware import ROUND
from zfunc.core.settings import DISK, StepSettings
from zfunc.planner.candidate import shortage_text
from zfunc.planner.disk_traffic import DRIVES
from zfunc.planner.plan_step import Planned
from zfunc.planner.profile import Profile
from zfunc.planner.search_space import SEARCHED
from zfunc.planner.suggestions import Suggestion, as_flag
from zfunc.schedules import make_schedule
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.timeline_svg import svg
from zfunc.viz.web_page import web_page

ALWAYS_TYPED = SEARCHED[:4]  # the others are named where they are not off
LARGEST = 3  # buffers of a peak that are named
MOST_DRAWN = 3000  # operations of a picture that is worth its bytes
SMALL = 0.01  # of a peak: not named
WIDTH = 118  # columns of a sentence


def report(p: Planned, *, chosen_precision: bool = False, as_options: bool = False) -> str:
    """The plan as one screen of text.

    With `chosen_precision` it says of which the precision was chosen; with `as_options` what to type for
    `zfunc train`.
    """
    lines = [
        f"hardware   {_hardware(p, chosen_precision)}",
        *_plan(p),
        "",
        *_memory(p),
        "",
        *_time(p),
        *_disk(p),
    ]
    if p.reasons:
        lines += ["", "found by search:", *(f"  {reason}" for reason in p.reasons)]
    if as_options:
        lines += ["", *_as_options(p)]
    lines += ["", *_suggestions(p), "", *_assumptions(p)]
    return "\n".join(lines) + "\n"


def report_html(p: Planned, text: str = "") -> str:
    """The report, or this text of it, as one HTML page with the picture of the step, if that is not too large."""
    title = f"A step in {p.step.settings.schedule_name} on {p.hardware.name}"
    drawn = len(p.plan.graph.ops) <= MOST_DRAWN
    picture = svg(p.timeline, plan=p.plan, title="One simulated step") if drawn else ""
    return web_page(
        "plan.html",
        style="report.css",
        styles=re.findall(r"<style>(.*?)</style>", picture, re.DOTALL),
        title=title,
        text=escape(text or report(p)),
        picture=picture,
    )


def as_flags(suggestion: Suggestion) -> str:
    """A suggestion as one types it, and its effect."""
    return f"{suggestion.flags}: {suggestion.effect}"


def _wrapped(sentence: str, indent: int = 2) -> list[str]:
    """The lines of a sentence. No flag or value is cut in two."""
    return wrap(
        sentence, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def _plan(p: Planned) -> Iterator[str]:
    settings, buckets = p.step.settings, p.step.spec.layout.buckets
    parts = [
        settings.schedule_name,
        f"{len(buckets)} buckets",
        f"the largest of {p.step.spec.slot_numel:,}; {settings.micro_batches} "
        f"micro-batch{'es' * (settings.micro_batches != 1)}",
        f"recompute {settings.recompute}",
        f"moments {settings.moments}",
        *([f"{settings.offload_ratio:.0%} of the state on the host"] if settings.offload_ratio != 1 else []),
        *([f"{settings.speculate} buckets speculated"] if settings.speculate else []),
        *([f"ZeRO stage {settings.stage}"] if p.world > 1 and settings.stage != 2 else []),
        *([f"parameters on the {settings.params_on}"] if settings.params_on != "device" else []),
        *([_state(settings)] if settings.state_on == DISK else []),
        *([f"activations on the {settings.activations_on}"] if settings.stashes else []),
        *([f"{settings.group_size} micro-batches at a time"] if settings.group_size > 1 else []),
        *(["updates delayed"] if settings.delayed else []),
        *(["updates deferred"] if p.step.spec.deferred else []),
    ]
    yield from _wrapped(f"plan       {', '.join(parts)}", 11)


def _hardware(p: Planned, chosen_precision: bool) -> str:
    if p.profile is None or not chosen_precision:
        return p.hardware.name
    return f"{p.hardware.name} (chosen of {', '.join(p.profile.precisions)})"


def _as_options(p: Planned) -> list[str]:
    """The result of a search as options of zfunc train, which makes a schedule by its name alone."""
    settings = p.step.settings
    chosen = {
        f.name: settings.schedule_name if f.name == "schedule" else getattr(settings, f.name)
        for f in fields(StepSettings)
        if f.name in ALWAYS_TYPED or (f.name in SEARCHED and getattr(settings, f.name) != f.default)
    }
    options = " ".join(as_flag(name, value) for name, value in chosen.items())
    orders = hasattr(make_schedule(settings.schedule, p.hardware), "hardware") and p.hardware != ROUND
    note = " (which orders for round numbers, not for this hardware)" if orders else ""
    return _wrapped(f"as options of zfunc train{note}: {options}")


def _memory(p: Planned) -> Iterator[str]:
    yield "it fits" if p.fits else f"it does not fit: {shortage_text(p.step.lacking)}"
    yield f"  {'':7}{'needed':>13}{'available':>14}{'':>8}  most of it, at the peak"
    for tier in TIERS:
        capacity = p.hardware.memory.get("host" if tier == "pinned" else tier)
        shared = (tier == "pinned" and capacity) or (tier == "device" and p.hardware.unified)
        known = "with host" if shared else format_bytes(capacity) if capacity else "not known"
        share = f"{_of_capacity(p, tier) / capacity:.0%}" if capacity and not shared else ""
        large = [(name, n) for name, n in p.held[tier].items() if n > SMALL * p.memory[tier]]
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in large[:LARGEST])
        at = f" (at {op})" if (op := p.step.peaks[tier].op) else ""
        yield f"  {tier:7}{format_bytes(p.memory[tier]):>13}{known:>14}{share:>8}  {parts}{at}".rstrip()


def _of_capacity(p: Planned, tier: Tier) -> int:
    """The bytes that come out of a tier's capacity: pinned memory, and that of a unified device, is the host's."""
    if tier != "host":
        return p.memory[tier]
    return p.memory["host"] + p.memory["pinned"] + (p.memory["device"] if p.hardware.unified else 0)


def _time(p: Planned) -> Iterator[str]:
    each = " on each GPU" if p.world > 1 else ""
    speed = f"{p.tokens_per_second:,.0f} tokens/s, {p.tflops:,.3g} TFLOP/s{each}"
    yield f"a step takes {format_seconds(p.step_seconds)}: {speed}"
    yield f"  bound by {p.bound}"
    lanes = sorted(p.lanes.items(), key=lambda item: -item[1])
    yield f"  busy     {', '.join(f'{lane} {share:.0%}' for lane, share in lanes)}"


def _state(settings: StepSettings) -> str:
    gradients = " with waiting gradients" if settings.grads_on == DISK else ""
    share = "state" if settings.disk_ratio == 1 else f"{settings.disk_ratio:.0%} of the state"
    return f"{share}{gradients} on the disk"


def _disk(p: Planned) -> Iterator[str]:
    """What the step asks of the drives, where something is there."""
    if (disk := p.disk) is None:
        return
    read, write = (
        f"{disk.needed[kind] / 1e9:,.3g} of {disk.available[kind] / 1e9:,.3g} GB/s" for kind in DRIVES
    )
    commits = disk.commit_bytes["write"]
    every = f"every {disk.commit_every:,} steps" if disk.commit_every > 1 else "every step"
    reads, writes = (f"{kind}s {disk.step_bytes[kind] / 1e9:,.4g} GB" for kind in DRIVES)
    yield f"the disk: a step {reads} and {writes}"
    if p.step.spec.swaps:
        yield f"  commits  {every}; such a step writes {commits / 1e9:,.4g} GB"
    yield f"  needed   to hide them: read {read}, write {write}; both, {disk.busy:.0%} of the time"
    wear = f"{disk.written / 1e12:,.3g} TB written a step"
    if disk.drive_writes is not None:
        wear += f", {disk.drive_writes:.2g} of the disk's size"
    if disk.steps is not None:
        wear += f"; the rated endurance is used up in {disk.steps:,} steps"
    generations = ", with two generations of the state" if p.step.spec.swaps else ""
    yield f"  space    {disk.space / 1e9:,.4g} GB{generations}"
    yield f"  wear     {wear}"


def _suggestions(p: Planned) -> Iterator[str]:
    if not p.suggestions:
        yield "no change of one setting that was tried makes it " + ("faster" if p.fits else "fit")
        return
    yield "to make it faster, each planned alone:" if p.fits else "to make it fit, each planned:"
    yield from (f"  {as_flags(suggestion)}" for suggestion in p.suggestions)


def _assumptions(p: Planned) -> Iterator[str]:
    if p.profile is not None:
        shares = p.profile.figures["reached"]
        rates = p.step.settings.precision, "d2h", "h2d", "host_memory", "device_memory"
        reached = ", ".join(f"{key} {shares[key].value:.0%}" for key in shares if key in rates)
        yield from _wrapped(
            f"assumed of the profile's peaks: {reached}; of the device's bytes {_device_bytes(p.profile)}; why is "
            "in the profile"
        )
    if p.step.settings.schedule_name == "SharedCores":
        yield from _wrapped(
            "SharedCores is the default on a CPU: there all lanes share the cores, so one does all but to wait for "
            "drives and other ranks"
        )
    yield from _wrapped(
        "assumed of the step: memory is a bound for every timing; segments are traced with the CPU's kernels, "
        "attention is one of them; TFLOP/s counts forward, and twice as much for backward"
        + (", but once for what is frozen" if p.step.spec.layout.frozen else "")
    )


def _device_bytes(profile: Profile) -> str:
    """How much is counted on of the bytes that the driver reports."""
    share, context = profile.figures["reached"]["device_bytes"], profile.figures["bytes"].get("context")
    less = "" if context is None else f" less {format_bytes(context.value)} of context"
    return f"{share.value:.0%}{less}"
