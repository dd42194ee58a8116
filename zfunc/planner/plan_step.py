"""`zfunc.plan(...)`: does a step fit, how long does it take, what bounds it, what would help? Before it is there.

The plan is the one `zfunc.compile` makes of the same settings, traced without data and simulated on given hardware:
what is answered is answered of that.

The invariant: nothing is allocated and no GPU is asked, whatever the size of the model and the number of ranks.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

from attrs import evolve, frozen
from torch.utils._pytree import tree_leaves

from zfunc import schedules
from zfunc.core.critical_path import bound_by, bounds_in_words, critical_path_of
from zfunc.core.graph import Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import held
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.engine.jobs import check_name
from zfunc.engine.segment import Segment
from zfunc.options import AUTO
from zfunc.planner.candidate import Choice, PlannedStep, Schedule, Setup, make_schedule
from zfunc.planner.cost_model import CostModel, precision_for, resolve_hardware
from zfunc.planner.profile import Profile
from zfunc.planner.search import Trial
from zfunc.planner.search_space import SearchSpace
from zfunc.planner.suggestions import Suggestion, suggest

# What a search does not vary, and what goes with it: of all else there is nothing left to advise.
BESIDE_SEARCH = ("precision", "micro_batches", "recompute", "moments", "stage", "delay", "speculate")


@frozen(eq=False)
class Planned:
    """A step that was planned, and what is to be said of it.

    `setup` are the settings, with what was chosen; `step` has the simulated plan. `tokens` is how many one rank's
    batch has, a token being an element of the targets. `suggestions` are changes that were planned too, `reasons`
    and `tried` are of the search, if there was one. `profile` is where `hardware` comes from, unless it was given.
    """

    setup: Setup
    hardware: Hardware
    profile: Profile | None
    step: PlannedStep
    tokens: int
    suggestions: tuple[Suggestion, ...]
    reasons: tuple[str, ...] = ()
    tried: tuple[Trial, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every tier of the hardware has room for it."""
        return self.step.fits

    @property
    def step_seconds(self) -> float:
        """Simulated time of a step."""
        return self.step.seconds

    @property
    def tflops(self) -> float:
        """The model's arithmetic on each GPU, in 1e12 FLOP/s: forward, and twice as much for backward.

        What backward computes again is not counted.
        """
        forward = sum(cost.flops for cost in self.step.job.costs) * self.setup.micro_batches
        return 3 * forward / self.step.seconds / 1e12 if self.step.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens * self.setup.world / self.step.seconds if self.step.seconds else 0.0

    @property
    def memory(self) -> dict[Tier, int]:
        """Bytes one rank needs on each tier, at the most; "host" is without what is pinned."""
        return self.step.memory

    @property
    def lanes(self) -> dict[str, float]:
        """The share of the step, 0 to 1, in which each lane is busy."""
        return {lane: self.timeline.busy(lane) for lane in self.timeline.lanes}

    @property
    def bound(self) -> str:
        """What the step's critical path consists of: "compute 71%, d2h 20%, host 9%"."""
        return bounds_in_words(bound_by(critical_path_of(self.plan, self.timeline)))

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change to make it fit, or to make it faster."""
        return tuple(map(str, self.suggestions))

    @property
    def held(self) -> dict[Tier, dict[str, int]]:
        """What each tier's peak consists of, in bytes by buffer, the most first."""
        return held(self.plan)

    @property
    def plan(self) -> Plan:
        """The plan, to print or to draw."""
        return self.step.plan

    @property
    def timeline(self) -> Timeline:
        """When everything would run."""
        return self.step.timeline

    @property
    def settings(self) -> dict[str, Any]:
        """What `zfunc.compile` is told to get this very plan, with an optimizer that has `setup.moments`."""
        names = "precision", "clip_norm", "micro_batches", "recompute", "stage"
        choice = self.setup.choice
        more = "bucket_size", "grad_slots", "host_slots", "offload_ratio", "speculate"
        return {
            **{name: getattr(self.setup, name) for name in names},
            **{name: getattr(choice, name) for name in more},
            "schedule": make_schedule(choice.schedule, self.hardware),
            "delay_from": 1 if choice.delay else None,
        }


def plan(
    segments: Sequence[Segment],
    example: tuple[Any, Any],
    *,
    hardware: str | PathLike[str] | Profile | Hardware = "v100-32gb",
    schedule: str | Schedule = "Overlapped",
    precision: str = AUTO,
    clip_norm: float | None = None,
    micro_batches: int = 1,
    bucket_size: int = 50_000_000,
    recompute: str = "all",
    moments: Literal["fp32", "16bit", "8bit"] = "fp32",
    grad_slots: int = 2,
    host_slots: int = 2,
    offload_ratio: float | Literal["auto"] = 1.0,
    speculate: int = 0,
    delay: bool = False,
    world: int = 1,
    stage: Literal[1, 2] = 2,
    advice: bool = True,
) -> Planned:
    """Plan a training step of `segments` on `hardware`; nothing is allocated, segments may be on the meta device.

    - `example`: a batch `(inputs, targets)` as one rank is given it, of which only shapes count: on the meta device
      it takes no memory.
    - `hardware`: the name of a profile, the path of one that `zfunc calibrate` wrote, or a value.
    - `schedule`: a name in `zfunc.schedules`, or anything callable `Graph -> Plan`. "auto" searches: schedule,
      bucket size, slots, ratio and speculation are varied from those given, and the fastest that fits is taken.
    - `precision`: "auto" is bf16 where the profile has it, else fp16; fp32 where the device is the host itself.
    - `offload_ratio`: "auto" is the one that is fastest of those that fit.
    - `delay`: plan a step of delayed updates. `world`: ranks. `advice`: whether to look for some; it takes longer.
    - everything else as in `zfunc.compile`; `moments` as in `zfunc.AdamW`.

    Raises ValueError and PlanError as `zfunc.compile`, and FileNotFoundError for hardware that is not known.
    """
    if isinstance(schedule, str):
        check_name("schedule", schedule, [*schedules.__all__, AUTO])
    task = CostModel(tuple(segments), example, resolve_hardware(hardware))
    choice = Choice(
        "Overlapped" if schedule == AUTO else schedule,
        bucket_size,
        grad_slots,
        host_slots,
        1.0 if offload_ratio == AUTO else offload_ratio,
        speculate,
        delay,
    )
    chosen = precision_for(task.on, precision)
    setup = Setup(chosen, clip_norm, micro_batches, recompute, moments, stage, world, choice)
    return plan_setup(task, setup, vary=schedule == AUTO, vary_ratio=offload_ratio == AUTO, advice=advice)


def plan_setup(
    task: CostModel, setup: Setup, *, vary: bool = False, vary_ratio: bool = False, advice: bool = True
) -> Planned:
    """Plan `setup`; with `vary` search from its choice on, with `vary_ratio` for the offload ratio alone."""
    found = None
    if vary or vary_ratio:
        alone = SearchSpace((), (), (), (), speculate=(), delay=())
        found = task.search(setup, SearchSpace(delay=(setup.choice.delay,)) if vary else alone)
        setup = evolve(setup, choice=found.step.choice)
    made = task.step(setup)
    searched = made.fits and found is not None and vary
    settable = BESIDE_SEARCH if searched else None
    return Planned(
        setup,
        made.hardware,
        task.on if isinstance(task.on, Profile) else None,
        made,
        sum(t.numel() for t in tree_leaves(task.example[1])),
        suggest(setup, made, rows=task.rows, replan=task.step, settable=settable) if advice else (),
        found.reasons if found else (),
        found.tried if found else (),
    )
