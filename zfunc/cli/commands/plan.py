"""`zfunc plan`: plan the GPT of the flags, or the largest that fits, and print the answer.

The segments are on the meta device and the batch has no data, so nothing is allocated. The answer is printed as one
screen of text, or as one JSON object for programs.
"""

import json
from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, field, fields, frozen

from zfunc import schedules
from zfunc.cli.command import EXIT_FAILED, EXIT_OK, Command
from zfunc.cli.simulated_step import (
    HARDWARE,
    SIMULATED_PRECISION,
    VOCABULARY,
    WITH,
    check_precision,
    check_sizes,
    profile_of,
)
from zfunc.core.graph import TIERS, Tier
from zfunc.core.hardware import ROUND
from zfunc.core.settings import BY_DEVICE, CHOICES, DISK, StepSettings
from zfunc.options import AUTO, Option, anything, check_each, count, flag_fields, multiple, options_of
from zfunc.planner.candidate import garbage_collection_paused, shortage_text
from zfunc.planner.disk_traffic import DRIVES
from zfunc.planner.profile import Profile
from zfunc.planner.search_space import SEARCHED
from zfunc.planner.suggestions import Suggestion, as_flag
from zfunc.schedules import make_schedule
from zfunc.train.settings import (
    MODEL,
    OFFLOAD_RATIO,
    OPTIMIZER,
    STEP,
    GPTFlags,
    check_rows,
    step_settings,
)
from zfunc.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zfunc.planner.plan_step import Planned

UNPLANNED = ("compile_segments", "deterministic")  # settings without a flag here
ALWAYS_TYPED = SEARCHED[:4]  # the others are named where they are not off
LARGEST = 3  # buffers of a peak that are named
SMALL = 0.01  # of a peak: not named
WIDTH = 118  # columns of a sentence

PLAN = {
    **MODEL,
    **options_of(StepSettings, without=UNPLANNED),
    **VOCABULARY,
    "optimizer": OPTIMIZER,
    "max": Option("model", "find the most layers that fit, whatever --num-layers says", anything),
    "batch_size": Option(
        "step", "sequences of a step, a multiple of the ranks times the micro-batches", count
    ),
    "precision": SIMULATED_PRECISION,
    "schedule": STEP["schedule"].offering(
        (BY_DEVICE, *schedules.__all__, AUTO),
        f"; {AUTO} searches for all settings that change no number, but precision and micro-batches",
    ),
    **{
        name: STEP[name].offering((*STEP[name].words, AUTO), f". {AUTO}: the fastest that fits")
        for name in CHOICES
    },
    "offload_ratio": evolve(OFFLOAD_RATIO, help=f"{OFFLOAD_RATIO.help}. {AUTO}: the fastest"),
    "hardware": HARDWARE,
    "with_": WITH,
    "world": Option("hardware", "ranks that train together, one on a device", count),
    "json": Option("output", "print one JSON object, for programs", anything),
}

PlannedStepFlags = flag_fields(StepSettings, GPTFlags, without=UNPLANNED, precision=AUTO, clip=1.0)


@frozen(kw_only=True)
class PlanSettings(PlannedStepFlags):
    """A step to plan. The defaults are the model and the step of `zfunc train`, on a GPU."""

    max: bool = False
    hardware: str = "v100-32gb"
    with_: tuple[str, ...] = field(default=(), converter=tuple)
    world: int = 1
    json: bool = False

    def __attrs_post_init__(self) -> None:
        check_each(self, PLAN)
        check_sizes(self)
        check_precision(self)
        multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.world == 1:
            multiple("batch_size", self.batch_size, "micro_batches", self.micro_batches)
        check_rows(self.batch_size, self.world, self.micro_batches)


@garbage_collection_paused()  # the import of torch, too
def run_plan(settings: PlanSettings) -> int:
    """`zfunc plan`: 0 if it fits, 1 if it does not."""
    answer = plan_model(settings)
    print(as_json(answer) + "\n" if settings.json else plan_text(answer), end="", flush=True)
    return EXIT_OK if answer.planned.fits else EXIT_FAILED


@frozen(eq=False)
class PlannedModel:
    """A GPT that was planned. With `max`, `settings` have the number of layers that fits."""

    settings: PlanSettings
    planned: "Planned"
    parameters: int  # tied ones counted once


def plan_model(settings: PlanSettings) -> PlannedModel:
    """Plan the step of `settings`.

    Raises ValueError for what cannot work, FileNotFoundError for hardware that is not known.
    """
    from zfunc.models.gpt_config import num_parameters
    from zfunc.models.gpt_costs import GPTCosts
    from zfunc.planner.cost_model import CostModel, precision_for
    from zfunc.planner.max_layers import max_layers
    from zfunc.planner.plan_step import plan_settings, search_start
    from zfunc.train.gpt_flags import gpt_config, planned_optimizer

    hardware = profile_of(settings)
    assert hardware is not None

    def cost_model(settings: PlanSettings) -> CostModel:
        rows, optimizer = settings.batch_size // settings.world, planned_optimizer(settings)
        return CostModel(GPTCosts(gpt_config(settings), rows, optimizer, settings.world), hardware)

    precision = precision_for(hardware, settings.precision)
    step = step_settings(settings, precision=precision)
    if settings.max:
        one = cost_model(evolve(settings, num_layers=1))
        placed = map(search_start, step.placed(settings.world, disk=True))
        most = max(max_layers(one.spec, x, one.hardware(x)) for x in placed)
        settings = evolve(settings, num_layers=max(1, most))
    planned = plan_settings(cost_model(settings), step)
    return PlannedModel(settings, planned, num_parameters(gpt_config(settings)))


# --- the answer ------------------------------------------------------------------------------------------


def as_json(answer: PlannedModel) -> str:
    """The answer as one object; memory in bytes, times in seconds."""
    p = answer.planned
    content: dict[str, Any] = {
        "fits": p.fits,
        "step_seconds": p.step_seconds,
        "tflops": p.tflops,
        "tokens_per_second": p.tokens_per_second,
        "memory": p.memory,
        "bus_bytes": p.bus_bytes,
        "disk": p.disk and {**asdict(p.disk), "busy": p.disk.busy},
        "lanes": p.lanes,
        "bound": p.bound,
        "advice": [as_flags(suggestion) for suggestion in p.suggestions],
        "lacking": p.step.lacking,
        "peaks": {tier: {"op": p.step.peaks[tier].op, "holds": held} for tier, held in p.held.items()},
        "parameters": answer.parameters,
        "num_layers": answer.settings.num_layers,
        "hardware": p.hardware.name,
        "world": p.world,
        "settings": {**p.settings, "schedule": p.step.settings.schedule_name},
        "reasons": list(p.reasons),
    }
    return json.dumps(content, indent=2)


def plan_text(answer: PlannedModel) -> str:
    """The answer as one screen of text."""
    p = answer.planned
    lines = [*_job(answer), "", *_memory(p), "", *_time(p), *_disk(p)]
    if p.reasons:
        lines += ["", "found by search:", *(f"  {reason}" for reason in p.reasons)]
    if answer.settings.schedule == AUTO:
        lines += ["", *_as_options(p)]
    lines += ["", *_suggestions(p), "", *_assumptions(p)]
    return "\n".join(lines) + "\n"


def as_flags(suggestion: Suggestion) -> str:
    """A suggestion as one types it, and its effect."""
    return f"{suggestion.flags}: {suggestion.effect}"


def _wrapped(sentence: str, indent: int = 2) -> list[str]:
    """The lines of a sentence. No flag or value is cut in two."""
    return wrap(
        sentence, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def _job(answer: PlannedModel) -> Iterator[str]:
    flags, p = answer.settings, answer.planned
    settings, buckets = p.step.settings, p.step.spec.layout.buckets
    if flags.max:
        yield f"the most that fits with these settings: {flags.num_layers} layers"
    ranks = f"{p.world} rank{'s' * (p.world != 1)}"
    yield (
        f"GPT of {flags.num_layers} layers x {flags.hidden_size:,}: {answer.parameters:,} parameters; a step of "
        f"{flags.batch_size:,} x {flags.seq_length:,} tokens on {ranks}"
    )
    yield f"hardware   {_hardware(answer)}"
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


def _hardware(answer: PlannedModel) -> str:
    p = answer.planned
    if p.profile is None or answer.settings.precision != AUTO:
        return p.hardware.name
    return f"{p.hardware.name} (chosen of {', '.join(p.profile.precisions)})"


def _as_options(p: "Planned") -> list[str]:
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


def _memory(p: "Planned") -> Iterator[str]:
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


def _of_capacity(p: "Planned", tier: Tier) -> int:
    """The bytes that come out of a tier's capacity: pinned memory, and that of a unified device, is the host's."""
    if tier != "host":
        return p.memory[tier]
    return p.memory["host"] + p.memory["pinned"] + (p.memory["device"] if p.hardware.unified else 0)


def _time(p: "Planned") -> Iterator[str]:
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


def _disk(p: "Planned") -> Iterator[str]:
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


def _suggestions(p: "Planned") -> Iterator[str]:
    if not p.suggestions:
        yield "no change of one setting that was tried makes it " + ("faster" if p.fits else "fit")
        return
    yield "to make it faster, each planned alone:" if p.fits else "to make it fit, each planned:"
    yield from (f"  {as_flags(suggestion)}" for suggestion in p.suggestions)


def _assumptions(p: "Planned") -> Iterator[str]:
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
    )


def _device_bytes(profile: Profile) -> str:
    """How much is counted on of the bytes that the driver reports."""
    share, context = profile.figures["reached"]["device_bytes"], profile.figures["bytes"].get("context")
    less = "" if context is None else f" less {format_bytes(context.value)} of context"
    return f"{share.value:.0%}{less}"


COMMAND = Command(
    "say whether a step fits, how long it takes, and what would help",
    "Nothing is allocated and no GPU is needed: the step is simulated on a hardware profile.",
    PlanSettings,
    PLAN,
    run_plan,
    """
    # 10 billion parameters on one V100
    zfunc plan --num-layers 50 --hidden-size 4096 --num-attention-heads 32 \\
        --seq-length 1024 --vocab-size 50257 --batch-size 10
    # the fastest settings that fit eight H100s
    zfunc plan --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 \\
        --vocab-size 50257 --hardware h100 --world 8 --schedule auto
    # the most layers that fit this machine
    zfunc plan --hidden-size 1024 --data texts --hardware machine.toml --max
    """,
    "Exit codes: 0 it fits, 1 it does not, 2 it cannot be planned.",
)
