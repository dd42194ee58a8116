"""What can be chosen about a step without changing its result, or with it (delay), and the step that comes of it.

The invariant: a `PlannedStep` is its choice applied to a job and played through by simulation, nothing else; equal
jobs, choices and hardware give equal steps, on every rank. No torch: what segments cost is in the job.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal

import attrs
from attrs import evolve, frozen

from zfunc import schedules
from zfunc.core.graph import Graph, Op, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.layout import make_layout, part_size, resident_buckets
from zfunc.core.memory_model import Peak, peak_memory
from zfunc.core.ops import StepSpec
from zfunc.core.optimizer_state import Moments
from zfunc.core.plan import Plan
from zfunc.core.recipes import delayed, zero_offload
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Timeline
from zfunc.core.verifier import verify
from zfunc.units import format_gigabytes

Schedule = Callable[[Graph], Plan]


@frozen
class Choice:
    """Settings by their names in `zfunc.compile`. A `schedule` is a name in `zfunc.schedules`, or one made already.

    `offload_ratio` is the share of the state that is kept on the host, `speculate` how many buckets are updated
    before the norm is known. `delay` applies every gradient a step late: the only choice that changes numbers.
    """

    schedule: str | Schedule = "Overlapped"
    bucket_size: int = 50_000_000
    grad_slots: int = 2
    host_slots: int = 2
    offload_ratio: float = 1.0
    speculate: int = 0
    delay: bool = False

    @property
    def schedule_name(self) -> str:
        """The schedule as people call it."""
        return self.schedule if isinstance(self.schedule, str) else type(self.schedule).__name__


@frozen
class Setup:
    """All that is set about a step: what cannot be chosen freely, and the choice. Names as in `zfunc.compile`.

    `moments` is what the optimizer keeps of them; `world` is the number of ranks.
    """

    precision: str = "bf16"
    clip_norm: float | None = None
    micro_batches: int = 1
    recompute: str = "all"
    moments: Moments = "fp32"
    stage: Literal[1, 2] = 2
    world: int = 1
    choice: Choice = Choice()

    def having(self, **changes: Any) -> "Setup":
        """The same with other values, of its own or of its choice, by name.

        >>> Setup().having(micro_batches=2, host_slots=3).choice.host_slots
        3
        """
        own = {name: value for name, value in changes.items() if name in attrs.fields_dict(Setup)}
        chosen = {name: value for name, value in changes.items() if name not in own}
        return evolve(self, **{"choice": evolve(self.choice, **chosen), **own})

    def value(self, name: str) -> Any:
        """What it has under that name."""
        return getattr(self if name in attrs.fields_dict(Setup) else self.choice, name)


@frozen(eq=False)
class PlannedStep:
    """A choice played through on `hardware`. `lacking` is the bytes there is no room for, by tier."""

    choice: Choice
    job: StepSpec
    hardware: Hardware
    plan: Plan
    timeline: Timeline
    peaks: dict[Tier, Peak]
    lacking: dict[Tier, int]

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.timeline.seconds

    @property
    def fits(self) -> bool:
        """Whether there is room for it on every tier whose size is known."""
        return not self.lacking

    @cached_property
    def memory(self) -> dict[Tier, int]:
        """Bytes needed on each tier."""
        return {tier: peak.nbytes for tier, peak in self.peaks.items()}


def with_choice(job: StepSpec, choice: Choice) -> StepSpec:
    """`job` with the settings of `choice`, laid out anew in buckets of its size.

    Raises ValueError for a ratio outside [0, 1] and for sizes and counts below 1.
    """
    size = part_size(choice.bucket_size, job.layout.num_trainable, choice.offload_ratio)
    layout = make_layout(job.layout.parameters, bucket_size=size, world=job.world)
    return evolve(
        job,
        layout=layout,
        grad_slots=choice.grad_slots,
        host_slots=choice.host_slots,
        resident=resident_buckets(layout, choice.offload_ratio),
        shadows=choice.speculate,
        delayed=choice.delay,
        pending=choice.delay,
    )


def operations_of(job: StepSpec, choice: Choice) -> Graph:
    """The operations of the step; of a delayed one, of a step with a gradient that waits."""
    recipe: Callable[[StepSpec], Iterator[Op]] = delayed if choice.delay else zero_offload
    return Graph(tuple(recipe(with_choice(job, choice))))


def play_through(
    job: StepSpec, choice: Choice, hardware: Hardware, graph: Graph | None = None
) -> PlannedStep:
    """The step that `choice` makes of `job`, on `hardware`. `graph` is what `operations_of` gives, where it is at
    hand.

    Raises PlanError for a schedule whose plan is wrong.
    """
    plan = verify(make_schedule(choice.schedule, hardware)(graph or operations_of(job, choice)))
    peaks = peak_memory(plan)
    lacking = hardware.lacking({tier: peak.nbytes for tier, peak in peaks.items()})
    return PlannedStep(
        choice, with_choice(job, choice), hardware, plan, simulate(plan, hardware), peaks, lacking
    )


def make_schedule(schedule: str | Schedule, hardware: Hardware) -> Schedule:
    """The schedule of that name, made for `hardware` if it asks for one; one that is made already is left as it is.

    >>> from zfunc.core.hardware import ROUND
    >>> make_schedule("CriticalPath", ROUND).hardware is ROUND
    True
    """
    if not isinstance(schedule, str):
        return schedule
    kind: Any = getattr(schedules, schedule)
    asks = any(f.name == "hardware" for f in attrs.fields(kind))
    return kind(hardware=hardware) if asks else kind()


def gains_and_costs(new: PlannedStep, old: PlannedStep) -> str:
    """What `new` gains and costs against `old`: "3 % faster, 0.4 GB more pinned"."""
    return ", ".join([_faster(new.seconds, old.seconds), *_bytes(new.memory, old.memory)])


def short_of(lacking: dict[Tier, int]) -> str:
    """What there is no room for.

    >>> short_of({"device": 2_500_000_000})
    '2.5 GB of device memory short'
    """
    return ", ".join(f"{format_gigabytes(nbytes)} of {tier} memory short" for tier, nbytes in lacking.items())


def _faster(new: float, old: float) -> str:
    change = new / old - 1 if old else 0.0
    if abs(change) < 0.0005:
        return "as fast"
    return f"{_percent(abs(change))} {'slower' if change > 0 else 'faster'}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.0095 else f"{share:.1%}".replace("%", " %")


def _bytes(new: dict[Tier, int], old: dict[Tier, int]) -> Iterator[str]:
    """The tiers whose need changes by what can be seen."""
    for tier, nbytes in new.items():
        change = nbytes - old[tier]
        if abs(change) > 0.01 * max(nbytes, old[tier]) and abs(change) >= 1e6:
            yield f"{format_gigabytes(abs(change))} {'more' if change > 0 else 'less'} {tier}"
