"""A planned step as figures, text and HTML: does it fit, how long does it take, what bounds it, what would help."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from html import escape
from textwrap import wrap
from typing import Any

from attrs import asdict, frozen

from zfunc.core.bottleneck import Bound, bound_seconds, bounds_in_words, critical_path_of, largest_shares
from zfunc.core.display import html_table
from zfunc.core.graph import TIERS, Kind, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import initial_memory
from zfunc.core.plan import Plan
from zfunc.core.settings import DISK, StepSettings
from zfunc.core.timeline import Timeline
from zfunc.planner.candidate import PlannedStep, shortage_text
from zfunc.planner.disk_traffic import DRIVES, DiskTraffic, disk_traffic
from zfunc.planner.profile import Profile
from zfunc.planner.suggestions import Suggestion
from zfunc.schedules import make_schedule
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.notebook import timeline_html
from zfunc.viz.timeline_svg import svg
from zfunc.viz.web_page import web_page

BUSES: tuple[Kind, ...] = ("d2h", "h2d", "network", "host", "read", "write")
LARGEST = 3  # buffers of a peak that are named
MOST_DRAWN = 3000  # operations of a picture that is worth its bytes
SMALL = 0.01  # of a peak: not named
WIDTH = 118  # columns of a sentence


@frozen(eq=False, repr=False)
class Planned:
    """A step that was planned. As `str` it is one screen of text: what fits, how fast, why, and what would help.

    `step` has the simulated plan and the settings, what was chosen among them. `tokens` are those of one rank's
    batch, a token being an element of the targets; `world` is the number of ranks. `suggestions` are changes that
    were planned too; `reasons` and `tried` are of the search, if there was one. `profile` is what `hardware` was
    made from, or None.
    """

    hardware: Hardware
    profile: Profile | None
    step: PlannedStep
    tokens: int
    world: int
    suggestions: tuple[Suggestion, ...]
    reasons: tuple[str, ...] = ()
    tried: tuple[PlannedStep, ...] = ()

    def __str__(self) -> str:
        return report(self)

    def html(self) -> str:
        """The same text as one HTML page, with the picture of the step."""
        return report_html(self)

    def __repr__(self) -> str:
        answer = "fits" if self.fits else f"does not fit: {shortage_text(self.lacking)}"
        speed = f"a step takes {format_seconds(self.step_seconds)}, {self.tokens_per_second:,.0f} tokens/s"
        return f"Planned({answer} on {self.hardware.name}; {speed}; bound by {self.bound})"

    @property
    def fits(self) -> bool:
        """Whether a step and `init` fit on every tier of the hardware."""
        return not self.lacking

    @property
    def lacking(self) -> dict[Tier, int]:
        """The bytes that do not fit, by tier; of `init` where a step fits."""
        peaks = initial_memory(self.step.spec).items()
        initial: dict[Tier, int] = {tier: peak.nbytes for tier, peak in peaks}
        return self.step.lacking or self.hardware.lacking(initial)

    @property
    def step_seconds(self) -> float:
        """Simulated time of a step."""
        return self.step.seconds

    @property
    def tflops(self) -> float:
        """The model's products, attention among them, on each GPU in 1e12 FLOP/s: forward, and twice as much for
        backward.

        For frozen parameters backward counts once: they have no gradient. Recomputation is not counted.
        """
        forward = sum(cost.flops for cost in self.step.spec.costs) * self.step.settings.micro_batches
        layout = self.step.spec.layout
        times = 2 + layout.num_trainable / layout.num_parameters
        return times * forward / self.step.seconds / 1e12 if self.step.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """All ranks together."""
        return self.tokens * self.world / self.step.seconds if self.step.seconds else 0.0

    @property
    def memory(self) -> dict[Tier, int]:
        """Peak bytes of one rank on each tier; "host" is without pinned memory."""
        return self.step.memory

    @property
    def bus_bytes(self) -> dict[Kind, int]:
        """Bytes that a step of one rank moves over each bus and the network, and from and to the disk.

        For "host": that its updates read and write in host memory.
        """

        def moved(step: PlannedStep) -> dict[Kind, int]:
            ops = step.plan.graph.ops
            return {bus: sum(op.nbytes for op in ops if op.kind == bus) for bus in BUSES}

        return self.step.total(moved)

    @cached_property
    def disk(self) -> DiskTraffic | None:
        """What the step asks of the drives; None where nothing is there."""
        return disk_traffic(self.step, self.profile.endurance(self.world) if self.profile else None)

    @property
    def lanes(self) -> dict[str, float]:
        """The share of the step in which each lane is busy, 0 to 1."""
        busy = self.step.total(lambda step: step.timeline.busy_seconds)
        return {
            lane: seconds / self.step_seconds if self.step_seconds else 0.0 for lane, seconds in busy.items()
        }

    @property
    def bounds(self) -> dict[Bound, float]:
        """Shares of the step's critical path, the largest first."""
        return largest_shares(
            self.step.total(lambda step: bound_seconds(critical_path_of(step.plan, step.timeline)))
        )

    @property
    def bound(self) -> str:
        """Shares of the step's critical path: "compute 71%, d2h 20%, host 9%"."""
        return bounds_in_words(self.bounds)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change to make it fit, or to make it faster."""
        return tuple(map(str, self.suggestions))

    @property
    def held(self) -> dict[Tier, dict[str, int]]:
        """Bytes of each tier's peak by buffer, the largest first."""
        return self.step.held

    @property
    def plan(self) -> Plan:
        """The plan, to print or to draw."""
        return self.step.plan

    @property
    def timeline(self) -> Timeline:
        """When each operation would run."""
        return self.step.timeline

    def _repr_html_(self) -> str:
        head = f"{self.hardware.name}: {'fits' if self.fits else shortage_text(self.lacking)}"
        rows: list[tuple[str, str]] = [
            ("a step takes", format_seconds(self.step_seconds)),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("bound by", self.bound),
            *((f"{tier} memory", format_bytes(nbytes)) for tier, nbytes in self.memory.items() if nbytes),
            *(("could be faster" if self.fits else "could fit", advice) for advice in self.advice),
        ]
        table = html_table([head, ""], rows)
        if self.step.repetition is not None:  # its operations would have to be made first
            return table
        return table + timeline_html(self.timeline, self.plan, f"One step, on {self.hardware.name}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that `zfunc.compile` takes by name to make this plan, beside the optimizer."""
        settings = self.step.settings
        return {
            **asdict(settings, recurse=False),
            "schedule": make_schedule(settings.schedule, self.hardware),
        }


# --- the report -------------------------------------------------------------------------------------------


def report(
    p: Planned,
    *,
    chosen_precision: bool = False,
    found: Sequence[str] = (),
    written: Callable[[Suggestion], str] = str,
) -> str:
    """The plan as one screen of text.

    With `chosen_precision` it says of which the precision was chosen; `found` are more lines on what a search
    found, and `written` is how a suggestion is.
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
    lines += ["", *found] if found else []
    lines += ["", *_suggestions(p, written), "", *_assumptions(p)]
    return "\n".join(lines) + "\n"


def report_html(p: Planned, text: str = "") -> str:
    """The report, or this text of it, as one HTML page with the picture of the step, if that is not too large."""
    title = f"A step in {p.step.settings.schedule_name} on {p.hardware.name}"
    # The operations of a step that was made from a few micro-batches would have to be made first.
    drawn = p.step.repetition is None and len(p.plan.graph.ops) <= MOST_DRAWN
    picture = svg(p.timeline, plan=p.plan, title="One simulated step") if drawn else ""
    return web_page(
        "plan.html",
        style="report.css",
        styles=re.findall(r"<style>(.*?)</style>", picture, re.DOTALL),
        title=title,
        text=escape(text or report(p)),
        picture=picture,
    )


def wrapped(sentence: str, indent: int = 2) -> list[str]:
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
        *([f"ZeRO stage {settings.stage}"] if p.world > 1 and settings.stage != 2 else []),
        *([f"parameters on the {settings.params_on}"] if settings.params_on != "device" else []),
        *([_state(settings)] if settings.state_on == DISK else []),
        *([f"activations on the {settings.activations_on}"] if settings.stashes else []),
        *([f"{settings.group_size} micro-batches at a time"] if settings.group_size > 1 else []),
        *(["updates deferred"] if p.step.spec.deferred else []),
    ]
    yield from wrapped(f"plan       {', '.join(parts)}", 11)


def _hardware(p: Planned, chosen_precision: bool) -> str:
    if p.profile is None or not chosen_precision:
        return p.hardware.name
    return f"{p.hardware.name} (chosen of {', '.join(p.profile.precisions)})"


def _memory(p: Planned) -> Iterator[str]:
    yield "it fits" if p.fits else f"it does not fit: {shortage_text(p.lacking)}"
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
    if p.step.fits and not p.fits:
        yield f"  a step fits, init does not: it has {initial_memory(p.step.spec)['host'].op} beside the state"


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
    every = "every step"
    if disk.commit_every > 1:
        writes = f"{disk.commit_bytes['write'] / 1e9:,.4g} GB"
        every = f"every {disk.commit_every:,} steps; such a step writes {writes}"
    reads, writes = (f"{kind}s {disk.step_bytes[kind] / 1e9:,.4g} GB" for kind in DRIVES)
    yield f"the disk: a step {reads} and {writes}"
    if p.step.spec.swaps:
        yield f"  commits  {every}"
    yield f"  needed   to hide them: read {read}, write {write}; both, {disk.busy:.0%} of the time"
    of_size = "" if disk.drive_writes is None else f", {disk.drive_writes:.2g} of the disk's size"
    wear = f"{disk.written / 1e12:,.3g} TB written a step{of_size}"
    if disk.steps is not None:
        wear += f"; the rated endurance is used up in {disk.steps:,} steps"
    generations = ", with two generations of the state" if p.step.spec.swaps else ""
    yield f"  space    {disk.space / 1e9:,.4g} GB{generations}"
    yield f"  wear     {wear}"


def _suggestions(p: Planned, written: Callable[[Suggestion], str]) -> Iterator[str]:
    if not p.suggestions:
        yield "no change of one setting that was tried makes it " + ("faster" if p.step.fits else "fit")
        return
    yield "to make it faster, each planned alone:" if p.step.fits else "to make it fit, each planned:"
    yield from (f"  {written(suggestion)}" for suggestion in p.suggestions)


def _assumptions(p: Planned) -> Iterator[str]:
    if p.profile is not None:
        shares = p.profile.figures["reached"]
        rates = p.step.settings.precision, "attention", "d2h", "h2d", "host_memory", "device_memory"
        reached = ", ".join(f"{key} {shares[key].value:.0%}" for key in shares if key in rates)
        yield from wrapped(
            f"assumed of the profile's peaks: {reached}; of the device's bytes {_device_bytes(p.profile)}; why is "
            "in the profile"
        )
    if p.step.settings.schedule_name == "SharedCores":
        yield from wrapped(
            "SharedCores is the default on a CPU: there all lanes share the cores, so one does all but to wait for "
            "drives and other ranks"
        )
    yield from wrapped(
        "assumed of the step: memory is a bound for every timing; segments are traced with the CPU's kernels, "
        "attention is one of them; TFLOP/s counts forward with attention, and twice as much for backward"
        + (", but once for what is frozen" if p.step.spec.layout.frozen else "")
    )


def _device_bytes(profile: Profile) -> str:
    """How much is counted on of the bytes that the driver reports."""
    share, context = profile.figures["reached"]["device_bytes"], profile.figures["bytes"].get("context")
    less = "" if context is None else f" less {format_bytes(context.value)} of context"
    return f"{share.value:.0%}{less}"
