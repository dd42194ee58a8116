"""`zfunc.plan(...)`: does a step fit, how long does it take, what bounds it, and what would help?

The plan is the one that `zfunc.compile` makes of the same settings, traced without data and simulated on the given
hardware. Nothing is allocated and no GPU is used, whatever the size of the model and the number of ranks.
"""

from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, fields, frozen

from zfunc import schedules
from zfunc.core.bottleneck import Bound, bound_seconds, bounds_in_words, critical_path_of, largest_shares
from zfunc.core.display import html_table
from zfunc.core.graph import Kind, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.plan import Plan
from zfunc.core.settings import BY_DEVICE, StepSettings, settings_with, takes_settings
from zfunc.core.timeline import Timeline
from zfunc.engine.step_spec import choose_optimizer
from zfunc.optim.base import Optimizer
from zfunc.options import AUTO, one_of
from zfunc.planner.candidate import PlannedStep, garbage_collection_paused, shortage_text
from zfunc.planner.cost_model import CostModel, precision_for, resolve_hardware
from zfunc.planner.disk_traffic import DiskTraffic, disk_traffic
from zfunc.planner.profile import Profile
from zfunc.planner.search import TriedChoice
from zfunc.planner.search_space import SearchSpace
from zfunc.planner.suggestions import Suggestion, suggest
from zfunc.schedules import make_schedule
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.notebook import timeline_html

if TYPE_CHECKING:
    from zfunc.engine.segment import Segment

BUSES: tuple[Kind, ...] = ("d2h", "h2d", "network", "host", "read", "write")
# Settings that a search does not vary: only these are worth a suggestion after one.
UNSEARCHED = ("precision", "micro_batches", "moments", "stage", "delay_from", "speculate")


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
    tried: tuple[TriedChoice, ...] = ()

    def __str__(self) -> str:
        from zfunc.planner.plan_report import report

        return report(self)

    def html(self) -> str:
        """The same text as one HTML page, with the picture of the step."""
        from zfunc.planner.plan_report import report_html

        return report_html(self)

    def __repr__(self) -> str:
        answer = "fits" if self.fits else f"does not fit: {shortage_text(self.step.lacking)}"
        speed = f"a step takes {format_seconds(self.step_seconds)}, {self.tokens_per_second:,.0f} tokens/s"
        return f"Planned({answer} on {self.hardware.name}; {speed}; bound by {self.bound})"

    @property
    def fits(self) -> bool:
        """Whether it fits on every tier of the hardware."""
        return self.step.fits

    @property
    def step_seconds(self) -> float:
        """Simulated time of a step."""
        return self.step.seconds

    @property
    def tflops(self) -> float:
        """The model's arithmetic on each GPU, in 1e12 FLOP/s: forward, and twice as much for backward.

        For frozen parameters backward counts once: they have no gradient. Recomputation is not counted.
        """
        forward = sum(cost.flops for cost in self.step.spec.costs) * self.step.settings.micro_batches
        layout = self.step.spec.layout
        num_frozen = sum(x.stop - x.start for x in layout.frozen)
        times = 2 + layout.num_trainable / (layout.num_trainable + num_frozen)
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
        head = f"{self.hardware.name}: {'fits' if self.fits else shortage_text(self.step.lacking)}"
        rows: list[tuple[str, str]] = [
            ("a step takes", format_seconds(self.step_seconds)),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("bound by", self.bound),
            *((f"{tier} memory", format_bytes(nbytes)) for tier, nbytes in self.memory.items() if nbytes),
            *(("could be faster" if self.fits else "could fit", advice) for advice in self.advice),
        ]
        table = html_table([head, ""], rows)
        if self.step.of_few is not None:  # its operations would have to be made first
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


@takes_settings(precision=AUTO)
def plan(
    segments: "Sequence[Segment]",
    example: tuple[Any, Any],
    settings: StepSettings | None = None,
    *,
    optimizer: Optimizer | None = None,
    hardware: str | PathLike[str] | Profile | Hardware = "v100-32gb",
    world: int = 1,
    advice: bool = True,
    **changes: Any,
) -> Planned:
    """Plan a training step of `segments` on `hardware`; nothing is allocated, segments may be on the meta device.

    - `example`: one rank's batch `(inputs, targets)`, of which only shapes count: on the meta device it takes no
      memory.
    - `optimizer`: as in `zfunc.compile`: AdamW, or one of your own.
    - `hardware`: the name of a profile, the path of one that `zfunc calibrate` wrote, a Profile or a Hardware.
    - `world`: ranks. `advice`: also plan changes that may help, which takes longer.

    The settings of the step are as in `zfunc.compile`: `settings`, by name, or both, of which names win. Also,
    `schedule="auto"` searches for the fastest step that fits, varying schedule, bucket size, slots, ratio,
    speculation, deferral, where parameters and activations live, what each share of the segments recomputes, and
    the order of micro-batches. `precision="auto"` is bf16 where the profile has it, else fp16; fp32 where the
    device is the host. `offload_ratio`, `recompute` and the places of "auto" are the fastest that fit; the disk is
    one where the host is full.

    {settings}

    Raises ValueError and PlanError as `zfunc.compile`, and FileNotFoundError for unknown hardware.
    """
    from zfunc.engine.batches import unpacked
    from zfunc.planner.traced_costs import TracedCosts

    segments = tuple(segments)
    example = unpacked(example, segments[-1]) if segments else example
    machine = resolve_hardware(hardware)
    if settings is None:
        changes = {"precision": AUTO, **changes}
    if "precision" in changes:
        changes["precision"] = precision_for(machine, changes["precision"])
    optimizer, settings = choose_optimizer(optimizer, settings_with(settings, changes))
    model = CostModel(TracedCosts(segments, example, optimizer, world), machine)
    if isinstance(settings.schedule, str):
        one_of((BY_DEVICE, *schedules.__all__, AUTO))("schedule", settings.schedule)
    return plan_settings(model, settings, advice=advice)


@garbage_collection_paused()
def plan_settings(model: CostModel, settings: StepSettings, *, advice: bool = True) -> Planned:
    """Plan `settings`, of which some may be "auto", as in `plan`."""
    given, searched_all = settings, settings.schedule == AUTO
    space, result = _space(settings), None
    settings = search_start(settings).scheduled(on_cpu=model.machine.unified)
    if space is not None:
        result = model.search(settings, space)
        settings = result.step.settings
    settings = evolve(settings, swap=given.swap if settings.needs_folders else ())
    step = model.step(settings)
    settable = UNSEARCHED if searched_all and step.fits else None
    return Planned(
        step.hardware,
        model.machine if isinstance(model.machine, Profile) else None,
        step,
        model.segments.tokens,
        model.segments.world,
        suggest(settings, step, rows=model.segments.rows, replan=model.estimate, settable=settable)
        if advice
        else (),
        result.reasons if result else (),
        result.tried if result else (),
    )


def _space(settings: StepSettings) -> SearchSpace | None:
    """What a search varies: every setting for `schedule` "auto", else those that are; None if nothing is."""
    if settings.schedule == AUTO:
        return SearchSpace(delay=(settings.delayed,))
    values: dict[str, tuple[str, ...] | None] = {}
    if settings.offload_ratio == AUTO:
        values["offload_ratios"] = None  # those that fit
    values |= {place: getattr(SearchSpace(), place) for place in settings.automatic}
    if settings.state_on == AUTO:
        values["disk_ratios"] = None
    return SearchSpace.only(**values) if values else None


def search_start(settings: StepSettings) -> StepSettings:
    """The settings where a search begins: those that are "auto" at their defaults."""
    auto = {f.name: f.default for f in fields(StepSettings) if getattr(settings, f.name) == AUTO}
    return evolve(settings.at(**auto), swap=())
