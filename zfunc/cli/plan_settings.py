"""Settings of `zfunc plan` as a value, and what each option means.

The invariant: as in `zfunc.train.settings`, the fields' defaults are the command line's. No torch here.
"""

from attrs import evolve, frozen

from zfunc import schedules
from zfunc.cli.draw_settings import (
    HARDWARE,
    UNRUN_PRECISION,
    VOCABULARY,
    check_precision,
    check_sizes,
)
from zfunc.core.settings import StepSettings
from zfunc.options import AUTO, Option, anything, check_each, count, flag_fields, multiple, options_of
from zfunc.train.settings import MODEL, OFFLOAD_RATIO, STEP, GPTFlags, check_rows

UNPLANNED = ("compile_segments", "delay_from")  # settings without a flag here: `delay` is the second's

PLAN = {
    **MODEL,
    **options_of(StepSettings, without=UNPLANNED),
    **VOCABULARY,
    "max": Option("model", "find the most layers that fit, whatever --num-layers says", anything),
    "batch_size": Option(
        "step", "sequences of a step, a multiple of the ranks times the micro-batches", count
    ),
    "precision": UNRUN_PRECISION,
    "schedule": STEP["schedule"].offering(
        (*schedules.__all__, AUTO),
        f"; {AUTO} searches for schedule, bucket size, slots, ratio and speculation",
    ),
    "offload_ratio": evolve(OFFLOAD_RATIO, help=f"{OFFLOAD_RATIO.help}. {AUTO}: the fastest"),
    "delay": Option("offload", "apply every gradient a step late", anything),
    "hardware": HARDWARE,
    "world": Option("hardware", "ranks that train together, one on a device", count),
    "json": Option("output", "print one JSON object, for programs", anything),
}


PlannedStepFlags = flag_fields(StepSettings, GPTFlags, without=UNPLANNED, precision=AUTO, clip=1.0)


@frozen(kw_only=True)
class PlanSettings(PlannedStepFlags):
    """A step to plan. The defaults are the model and the step of `zfunc train`, on a GPU."""

    max: bool = False
    delay: bool = False
    hardware: str = "v100-32gb"
    world: int = 1
    json: bool = False

    def __attrs_post_init__(self) -> None:
        check_each(self, PLAN)
        check_sizes(self)
        check_precision(self.hardware, self.precision)
        multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.world == 1:
            multiple("batch_size", self.batch_size, "micro_batches", self.micro_batches)
        check_rows(self.batch_size, self.world, self.micro_batches)

    @property
    def rows(self) -> int:
        """Sequences of a step that one rank is given."""
        return self.batch_size // self.world
