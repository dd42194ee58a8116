"""Settings of `zfunc plan` as a value, and what each option means.

The invariant: as in `zfunc.train.settings`, the fields' defaults are the command line's. No torch here.
"""

from typing import Any

from attrs import field, frozen

from zfunc import schedules
from zfunc.cli.draw_settings import DRAW, HARDWARE, VOCABULARY, UnrunStep, check_precision, check_sizes
from zfunc.options import (
    AUTO,
    Option,
    anything,
    check_each,
    count,
    multiple,
    one_of,
    ratio,
    share,
    zero_or_more,
)
from zfunc.train.settings import COMMON, check_rows

PLAN = {
    **COMMON,
    **VOCABULARY,
    "max": Option("model", "find the most layers that fit, whatever --num-layers says", anything),
    "batch_size": Option(
        "step", "sequences of a step, a multiple of the ranks times the micro-batches", count
    ),
    "precision": DRAW["precision"],
    "schedule": Option(
        "how it runs",
        f"{COMMON['schedule'].help}; {AUTO} searches for schedule, bucket size, slots, ratio and speculation",
        one_of((*schedules.__all__, AUTO)),
    ),
    "offload_ratio": Option(
        "offload",
        f"share of the optimizer's state on the host, 0 to 1; the rest stays on the device. {AUTO}: the fastest",
        ratio,
        metavar=f"X|{AUTO}",
    ),
    "speculate": Option(
        "offload",
        "buckets that are updated before the norm is known, with clipping or fp16",
        zero_or_more,
    ),
    "delay": Option("offload", "apply every gradient a step late", anything),
    "hardware": HARDWARE,
    "world": Option("hardware", "ranks that train together, one on a device", count),
    "json": Option("output", "print one JSON object, for programs", anything),
}


@frozen(kw_only=True)
class PlanSettings(UnrunStep):
    """A step to plan."""

    max: bool = False
    offload_ratio: str = field(default="1", converter=str)
    speculate: int = 0
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
    def ratio(self) -> Any:
        """The share of the state on the host, or "auto"."""
        return share(self.offload_ratio)

    @property
    def rows(self) -> int:
        """Sequences of a step that one rank is given."""
        return self.batch_size // self.world
