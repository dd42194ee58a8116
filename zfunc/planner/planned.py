"""A planned step as figures, text and HTML: does it fit, how long does it take, what bounds it, what would help."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from textwrap import wrap
from typing import Any, cast

from attrs import evolve, frozen

from zfunc.core.critical_path import bound_seconds, bounds_in_words, critical_path_of, largest_shares
from zfunc.core.display import counted
from zfunc.core.graph import TIERS, Kind, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import initial_memory
from zfunc.core.pipeline import B, F
from zfunc.core.plan import Plan
from zfunc.core.regions import Regions
from zfunc.core.setting_values import DISK
from zfunc.core.settings import named_settings
from zfunc.core.timeline import Timeline
from zfunc.planner.candidate import DRIVES, PlannedStep, operations_of, shortage_text
from zfunc.planner.profile import Profile
from zfunc.planner.suggestions import Suggestion
from zfunc.schedules import make_schedule, order_name
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.notebook import MOST_DRAWN, timeline_html
from zfunc.viz.timeline_svg import svg
from zfunc.viz.web_page import web_page

BUSES: tuple[Kind, ...] = ("d2h", "h2d", "network", "host", "read", "write")
LARGEST = 3  # buffers of a peak that are named
SMALL = 0.01  # of a peak: not named
WIDTH = 118  # columns of a sentence


@frozen
class DiskTraffic:
    """What one rank's step reads from and writes to its drives. Mappings are by direction, "read" and "write".

    - `step_bytes`: bytes of the planned step. `commit_bytes`: bytes of a step that commits, which also writes
    the part of the state that is in memory; equal to `step_bytes` if every step commits. - `needed`: bytes/s
    with which transfers would last no longer than the busiest other kind of work. `available`: bytes/s of the
    hardware. Both directions share the drives. - `space`: bytes on the drives: state in two copies, frozen
    parameters, waiting gradients and activations. `written`: bytes that an average step writes.
    """

    step_bytes: Mapping[Kind, int]
    commit_bytes: Mapping[Kind, int]
    needed: Mapping[Kind, float]
    available: Mapping[Kind, float]
    space: int
    written: float

    @property
    def busy(self) -> float:
        """Seconds of work of the drives in each second of the busiest other kind of work; a ratio."""
        return sum(self.needed[kind] / self.available[kind] for kind in DRIVES)


@frozen
class ReleaseCost:
    """The cost of `zfunc.release` on one rank: bytes copied off its device, bytes copied back, and the
    seconds of each copy, over the bus, and to the drives if the master weights are on the disk."""

    bytes_out: int
    bytes_back: int
    seconds_out: float
    seconds_back: float


@frozen(eq=False, repr=False)
class Planned:
    """A step that was planned. Its `str` is one screen of text: what fits, how fast, why, and what would help.

    `step` has the simulated plan and all settings, with values for those that were "auto". `tokens` is the
    number of target elements in one rank's batch; `world` is the number of ranks. `suggestions` are changes
    that were planned too, and `advised` tells whether any were tried; `reasons` and `tried` are those of the
    search, if there was one. `profile` is what `hardware` was made from, or None. `most` is the argument with
    which `zfunc.segments` cuts the module into the planned segments, in elements of parameters; None for
    segments.
    """

    hardware: Hardware
    profile: Profile | None
    step: PlannedStep
    tokens: int
    world: int
    suggestions: tuple[Suggestion, ...]
    reasons: tuple[str, ...] = ()
    tried: tuple[PlannedStep, ...] = ()
    advised: bool = True
    most: int | None = None

    def __str__(self) -> str:
        return report(self)

    def html(self) -> str:
        """The plan's report on one HTML page, with a picture of the step's timeline."""
        return report_html(self)

    def __repr__(self) -> str:
        answer = "fits" if self.fits else f"does not fit: {shortage_text(self.lacking)}"
        speed = f"a step takes {format_seconds(self.step_seconds)}, {self.tokens_per_second:,.0f} tokens/s"
        return f"Planned({answer} on {self.hardware.name}; {speed}; bound by {self.bound})"

    @property
    def fits(self) -> bool:
        """Whether the step and `zfunc.init` fit on every tier of the hardware whose size is known."""
        return not self.lacking

    @property
    def lacking(self) -> dict[Tier, int]:
        """Bytes that the step needs beyond each tier's memory; if the step fits, bytes that `init` lacks."""
        return self.step.lacking

    @property
    def step_seconds(self) -> float:
        """Simulated duration of the step in seconds."""
        return self.step.seconds

    @property
    def devices(self) -> int:
        """The number of devices of a rank."""
        return self.step.settings.devices

    @property
    def tflops(self) -> float:
        """TFLOP/s (1e12) of the model's matrix products, with attention, on each GPU: forward, and twice for
        backward.

        Backward of frozen parameters counts once: they have no gradient. Recomputation is not counted.
        """
        forward = sum(cost.forward.flops for cost in self.step.spec.costs) * self.step.settings.micro_batches
        layout = self.step.spec.layout
        times = 2 + layout.num_trainable / layout.num_parameters
        return times * forward / self.devices / self.step.seconds / 1e12 if self.step.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all ranks together train on in a second."""
        return self.tokens * self.world / self.step.seconds if self.step.seconds else 0.0

    @property
    def memory(self) -> dict[Tier, int]:
        """Peak bytes of one rank on each tier, and on each of several devices; "host" is without pinned memory."""
        return self.step.memory

    @property
    def bus_bytes(self) -> dict[str, int]:
        """Bytes that a step of one rank moves: "d2h" and "h2d" over the bus ("d2h:1" for a second device),
        "network", "read" and "write" with the disk.

        "host" counts what the step's updates read and write in host memory.
        """

        def moved(step: PlannedStep) -> dict[str, int]:
            nbytes = dict.fromkeys(map(str, BUSES), 0)
            for op in step.plan.graph.ops:
                if op.kind in BUSES:
                    nbytes[op.resource] = nbytes.get(op.resource, 0) + op.nbytes
            return nbytes

        return self.step.total(moved)

    @property
    def bubble(self) -> float:
        """Share (0 to 1) of the step in which a device does not compute, averaged over the rank's devices."""
        busy = self.step.total(_compute_seconds)
        whole = self.devices * self.step_seconds
        return 1 - sum(busy.values()) / whole if whole else 0.0

    @cached_property
    def disk(self) -> DiskTraffic | None:
        """The step's traffic with the drives; None if the step uses no drive."""
        step, every = self.step, self.step.settings.commit_every
        if not step.spec.uses_disk:
            return None
        planned, commits = (
            {kind: sum(op.nbytes for op in graph if op.kind == kind) for kind in DRIVES}
            for graph in (step.graph, operations_of(evolve(step.spec, commit=step.spec.swaps)))
        )
        busiest = max(seconds for kind, seconds in step.work.items() if kind not in DRIVES)
        return DiskTraffic(
            planned,
            commits,
            needed={kind: planned[kind] / busiest for kind in DRIVES},
            available={kind: step.hardware.rates[kind] for kind in DRIVES},
            space=step.memory["disk"],
            written=planned["write"] + (commits["write"] - planned["write"]) / every,
        )

    @property
    def release(self) -> ReleaseCost | None:
        """The cost of `zfunc.release` between two steps; None where the device's memory is the host's."""
        spec, rates = self.step.spec, self.hardware.rates
        if self.hardware.unified:
            return None
        on_device = Regions(spec).on_device()
        out = sum(r.nbytes for r, remade in on_device.items() if not remade)
        masters = {r.index[0]: r.nbytes for r, remade in on_device.items() if remade}
        back = out + spec.constant_bytes + sum(n for b, n in masters.items() if b not in spec.resident)
        read = sum(spec.extents[b].moved_bytes for b in spec.paged & masters.keys())
        return ReleaseCost(out, back, out / rates["d2h"], back / rates["h2d"] + read / rates["read"])

    @property
    def lanes(self) -> dict[str, float]:
        """Share (0 to 1) of the step in which each lane is busy."""
        busy, whole = self.step.total(lambda step: step.timeline.busy_seconds), self.step_seconds
        return {lane: seconds / whole if whole else 0.0 for lane, seconds in busy.items()}

    @property
    def bound(self) -> str:
        """Shares of the step's critical path, the largest first: "compute 71%, d2h 20%, host 9%"."""
        seconds = self.step.total(lambda step: bound_seconds(critical_path_of(step.plan, step.timeline)))
        return bounds_in_words(largest_shares(seconds))

    @property
    def advice(self) -> tuple[str, ...]:
        """The suggested changes, each as text, that make the step fit, or if it fits make it faster."""
        return tuple(map(str, self.suggestions))

    @property
    def held(self) -> dict[Tier, dict[str, int]]:
        """Bytes of the step's peak memory on each tier, by buffer, the largest first."""
        return self.step.held

    @property
    def plan(self) -> Plan:
        """The plan of the step, to print or to draw."""
        return self.step.plan

    @property
    def timeline(self) -> Timeline:
        """The simulated timeline of the step: when each operation would run."""
        return self.step.timeline

    def _repr_html_(self) -> str:
        title, whole = f"One step, on {self.hardware.name}", self.step.repetition is None
        picture = timeline_html(self.timeline, self.plan, title) if whole else ""
        return f"<pre>{escape(str(self))}</pre>{picture}"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by which `zfunc.compile` makes this plan, by argument name, without the optimizer."""
        settings = self.step.settings
        return {
            **{name: getattr(settings, name) for name in named_settings()},
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
    """The plan `p` as one screen of text.

    With `chosen_precision` the text lists the precisions to choose from; `found` are more lines on what a search
    found, and `written` turns a suggestion into text.
    """
    of = f" (chosen of {', '.join(p.profile.precisions)})" if p.profile and chosen_precision else ""
    parts = [
        [f"hardware   {p.hardware.name}{of}", *_nodes(p), *wrapped(f"plan       {', '.join(_plan(p))}", 11)],
        [*_memory(p)],
        [*_time(p), *_devices(p), *_disk(p)],
        ["found by search:", *(f"  {reason}" for reason in p.reasons)] if p.reasons else [],
        found,
        [*_suggestions(p, written)],
        wrapped(
            "assumed of the step: memory is a bound for every timing; segments are traced with the CPU's kernels, "
            "attention is one of them; TFLOP/s counts forward with attention, and twice as much for backward"
            + (", but once for what is frozen" if p.step.spec.layout.frozen else "")
        ),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def report_html(p: Planned, text: str = "") -> str:
    """The report of `p`, or `text` in its place, as one HTML page with the picture of the step if not too large."""
    # The operations of a step that was made from a few micro-batches would have to be made first.
    drawn = p.step.repetition is None and len(p.plan.graph.ops) <= MOST_DRAWN
    picture = svg(p.timeline, plan=p.plan, title="One simulated step") if drawn else ""
    return web_page(
        "plan.html",
        stylesheets=("report.css",),
        styles=re.findall(r"<style>(.*?)</style>", picture, re.DOTALL),
        title=f"A step in {p.step.settings.schedule_name} on {p.hardware.name}",
        text=escape(text or report(p)),
        picture=picture,
    )


def wrapped(sentence: str, indent: int = 2) -> list[str]:
    """`sentence` in lines of the report's width, all but the first indented; no flag or value is cut in two."""
    return wrap(
        sentence, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def _nodes(p: Planned) -> Iterator[str]:
    """The report's line on nodes: their number, the devices used in each, and a rate in GB/s: of the network
    between ranks, or, for one rank, of the bus from host to device. No line without a profile."""
    if p.profile is not None:
        local = min(p.world, int(p.profile.value("count", "devices")) // p.devices)
        nodes = -(-p.world // local)
        kind, where = ("h2d", "from the host to a device")
        if p.world > 1:
            kind, where = "network", "between" if nodes > 1 else "inside"
        link = f"{p.hardware.rates[kind] / 1e9:,.3g} GB/s {where}"
        devices = counted(local * p.devices, "device")
        yield f"nodes      {nodes}, of {devices} and all the node's memory{' each' * (nodes > 1)}; {link}"


def _plan(p: Planned) -> Iterator[str]:
    """Words of the report for the plan's settings, the unusual settings last."""
    settings, spec = p.step.settings, p.step.spec
    count = settings.micro_batches
    on_disk, on_device = map(settings.share_of_state, ("disk", "device"))
    share = "state" if on_disk == 1 else f"{on_disk:.0%} of the state"
    waiting = " with waiting gradients" if settings.grads_on == DISK else ""
    yield settings.schedule_name
    if p.most is not None:
        yield f"cut into {counted(len(spec.costs), 'segment')} (most={p.most:,})"
    yield counted(len(spec.layout.buckets), "bucket")
    yield f"the largest of {spec.slot_numel:,}; {count} micro-batch{'es' * (count != 1)}"
    yield f"recompute {settings.recompute}"
    yield f"moments {settings.moments}"
    for said, unusual in (
        (f"{1 - on_device:.0%} of the state on the host", on_device > 0),
        (f"ZeRO stage {settings.stage}", p.world > 1 and settings.stage != 2),
        (f"parameters on the {settings.params_on}", settings.params_on != "device"),
        (f"{share}{waiting} on the disk", settings.pages_state),
        (f"activations on the {settings.activations_on}", settings.stashes),
        (f"{settings.group_size} micro-batches at a time", settings.group_size > 1),
        (f"rows in {settings.tiles} tiles", settings.tiles != 1),
        (f"their keys on the {settings.keys_on}", settings.keys_on != "device"),
        ("updates deferred", spec.deferred),
        (f"{settings.devices} devices in the order {order_name(settings.order)}", settings.devices > 1),
    ):
        if unusual:
            yield said


def _memory(p: Planned) -> Iterator[str]:
    yield "it fits" if p.fits else f"it does not fit: {shortage_text(p.lacking)}"
    yield f"  {'':7}{'needed':>13}{'available':>14}{'':>8}  most of it, at the peak"
    # Out of the host's capacity come pinned memory, and that of a unified device.
    with_host: dict[Tier, bool] = {"pinned": True, "device": p.hardware.unified}
    shared = sum(p.memory[tier] for tier, there in with_host.items() if there)
    for tier in sorted(p.memory, key=lambda place: TIERS.index(cast("Tier", place.partition(":")[0]))):
        capacity, nbytes = p.hardware.memory.get(cast("Tier", tier.partition(":")[0])), p.memory[tier]
        known, share = format_bytes(capacity) if capacity else "not known", ""
        if with_host.get(tier) and (tier == "device" or "host" in p.hardware.memory):
            known = "with host"
        elif capacity:
            share = f"{(nbytes + (shared if tier == 'host' else 0)) / capacity:.0%}"
        large = [(name, n) for name, n in p.held[tier].items() if n > SMALL * nbytes]
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in large[:LARGEST])
        at = f" (at {op})" if (op := p.step.peaks[tier].op) else ""
        yield f"  {tier:8}{format_bytes(nbytes):>12}{known:>14}{share:>8}  {parts}{at}".rstrip()
    if (lent := p.release) is not None:
        out = f"{format_bytes(lent.bytes_out)} to the host in {format_seconds(lent.seconds_out)}"
        back = f"{format_bytes(lent.bytes_back)} back in {format_seconds(lent.seconds_back)}"
        yield f"  released between steps: {out}, {back}"
    if p.lacking and not p.hardware.lacking(p.memory):
        yield f"  a step fits, init does not: it has {initial_memory(p.step.spec)['host'].op} beside the state"


def _time(p: Planned) -> Iterator[str]:
    each = " on each GPU" if p.world * p.devices > 1 else ""
    speed = f"{p.tokens_per_second:,.0f} tokens/s, {p.tflops:,.3g} TFLOP/s{each}"
    yield f"a step takes {format_seconds(p.step_seconds)}: {speed}"
    yield f"  bound by {p.bound}"
    if p.step.settings.tiles != 1 and (launched := sum(p.step.total(launch_seconds).values())):
        share = launched / p.devices / p.step_seconds
        yield f"  {share:.0%} of it in passes that the host launches no faster: fewer tiles have fewer launches"
    lanes = sorted(
        ((lane, share) for lane, share in p.lanes.items() if p.devices == 1 or lane in ("host", "network")),
        key=lambda item: -item[1],
    )
    yield f"  busy     {', '.join(f'{lane} {share:.0%}' for lane, share in lanes)}"


def _devices(p: Planned) -> Iterator[str]:
    """The report's lines on a pipeline's devices: each device's share of time in compute, and bytes moved."""
    if p.devices == 1:
        return
    busy, moved, spec = p.step.total(_compute_seconds), p.bus_bytes, p.step.spec
    yield f"the bubble: of the time of {p.devices} devices, {p.bubble:.0%} without compute"
    for d in range(p.devices):
        place = f":{d}" if d else ""
        out, back = (moved.get(f"{bus}{place}", 0) / 1e9 for bus in ("d2h", "h2d"))
        share = busy.get(d, 0.0) / p.step_seconds if p.step_seconds else 0.0
        segments = _ranges(spec.mesh.segments_on(d, F, B))
        yield (
            f"  {f'device{place}':9} computes {share:>4.0%}   d2h {out:8,.1f} GB   h2d {back:8,.1f} GB   "
            f"segments {segments}"
        )


def _ranges(segments: Sequence[int]) -> str:
    """Text of ascending `segments` (numbers), consecutive ones as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    starts = [s for s in segments if s - 1 not in segments]
    ends = [s for s in segments if s + 1 not in segments]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def launch_seconds(step: PlannedStep) -> dict[str, float]:
    """{"launch": seconds}: the host's seconds of kernel launches, of operations bound by them (no faster on the
    device)."""
    launch, on = step.hardware.launch, step.hardware
    return {"launch": sum(x for op in step.graph if 0 < (x := op.launches * launch) >= on.seconds(op))}


def _compute_seconds(step: PlannedStep) -> dict[int, float]:
    """Simulated seconds of the step in which each device computes, by device."""
    busy: dict[int, float] = {}
    for e in step.timeline.events:
        if e.kind == "compute":
            device = step.graph.ops[step.graph.position[e.op]].device
            busy[device] = busy.get(device, 0.0) + e.seconds
    return busy


def _disk(p: Planned) -> Iterator[str]:
    """The report's lines on the step's traffic with the drives; none if the step uses no drive."""
    if (disk := p.disk) is None:
        return
    read, write = (
        f"{disk.needed[kind] / 1e9:,.3g} of {disk.available[kind] / 1e9:,.3g} GB/s" for kind in DRIVES
    )
    reads, writes = (f"{kind}s {disk.step_bytes[kind] / 1e9:,.4g} GB" for kind in DRIVES)
    committed, swaps = f"{disk.commit_bytes['write'] / 1e9:,.4g} GB", p.step.spec.swaps
    count = p.step.settings.commit_every
    every = f"{count:,} steps; such a step writes {committed}" if count > 1 else "step"
    generations = ", with two generations of the state" if swaps else ""
    yield f"the disk: a step {reads} and {writes}"
    if swaps:
        yield f"  commits  every {every}"
    yield f"  needed   to hide them: read {read}, write {write}; both, {disk.busy:.0%} of the time"
    yield f"  space    {disk.space / 1e9:,.4g} GB{generations}"
    yield f"  wear     {disk.written / 1e12:,.3g} TB written a step"


def _suggestions(p: Planned, written: Callable[[Suggestion], str]) -> Iterator[str]:
    if not p.suggestions:
        if p.advised:
            yield "no change of one setting that was tried makes it " + ("faster" if p.step.fits else "fit")
        return
    yield "to make it faster, each planned alone:" if p.step.fits else "to make it fit, each planned:"
    yield from (f"  {written(suggestion)}" for suggestion in p.suggestions)
