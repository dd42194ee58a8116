"""`zfunc train --log-style deepspeed`: a training in the lines that DeepSpeed prints, for programs that read those.

Wording, names and order are DeepSpeed's (0.19: `engine._report_progress`, `utils/timer.py`, `fp16/loss_scaler.py`);
all else is in zfunc's own lines. They are printed, because users of DeepSpeed redirect stdout; a run folder is the
same in either style.

In DeepSpeed a step is forward, then backward, then the optimizer. Here they overlap: `fwd`, `bwd` and
`bwd_allreduce` are the time of those operations, and `step` is the rest of the step after the last backward.
"""

from collections.abc import Iterator

from attrs import define, field

from zfunc.cli.train_lines import PlainOutput, held_out_line
from zfunc.core.timeline import Timeline
from zfunc.optim.adamw import AdamW
from zfunc.optim.by_name import NamedOptimizer, make_optimizer
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.convert import config_extras
from zfunc.train.events import Event, Overflowed, Started, Stepped, Timed
from zfunc.train.settings import LOG_EVERY
from zfunc.viz.legend import verb_of

WARM = 2  # steps that the running average leaves out
RANK = "[Rank 0] "


@define
class DeepSpeedLines:
    """DeepSpeed's lines for steps, overflows and times; those of `plain` for all else."""

    plain: PlainOutput
    optimizer: NamedOptimizer = field(factory=AdamW)  # for its momenta
    every: int = LOG_EVERY
    samples: int = 0  # of a step
    micro_batches: int = 1
    skipped: int = 0
    steps: int = 0  # since the beginning or the resume
    seconds: float = 0.0  # of those after WARM
    peak_bytes: int = 0

    def show(self, event: Event) -> None:
        """Print the lines of an event."""
        match event:
            case Stepped():
                self._count(event)
                for text in self._lines(event):
                    self.plain.line(text)
            case Overflowed():
                self.plain.line(overflow_line(event.before, event.after))
            case Timed():
                self.plain.line(time_line(event.timeline))
            case _:
                if isinstance(event, Started):
                    self._begin(event)
                self.plain.show(event)

    def _begin(self, event: Started) -> None:
        extras = config_extras(event.settings)
        self.optimizer = make_optimizer(event.settings.optimizer, **extras.optimizer)
        self.every = extras.steps_per_print or LOG_EVERY
        self.skipped = event.skipped
        self.samples, self.micro_batches = event.settings.batch_size, event.settings.micro_batches

    def _count(self, event: Stepped) -> None:
        self.skipped += event.skipped
        self.steps += 1
        self.peak_bytes = max(self.peak_bytes, event.device_bytes or event.host_bytes)
        if self.steps > WARM:
            self.seconds += event.seconds

    def _lines(self, event: Stepped) -> Iterator[str]:
        if event.step % self.every == 0:
            factors = self.optimizer.factors(max(1, event.step - self.skipped))
            mom = factors.get("betas", getattr(self.optimizer, "momentum", 0.0))
            yield f"{RANK}step={event.step}, skipped={self.skipped}, lr=[{event.lr}], mom=[{mom}]"
            yield RANK + self._speed(event)
        if event.held_out is not None:
            yield f"step {event.step}  {held_out_line(event.held_out, self.plain.unit)}"

    def _speed(self, event: Stepped) -> str:
        """Memory is the device's, or of a training on a CPU the process's, as in DeepSpeed."""
        now = self.samples / event.seconds
        average = self.samples * (self.steps - WARM) / self.seconds if self.seconds else now
        memory = event.device_bytes or event.host_bytes
        return (
            f"epoch=0/micro_step={event.step * self.micro_batches}/global_step={event.step}, "
            f"RunningAvgSamplesPerSec={average}, CurrSamplesPerSec={now}, "
            f"MemAllocated={memory / 2**30:.2f}GB, MaxMemAllocated={self.peak_bytes / 2**30:.2f}GB"
        )


def overflow_line(before: LossScale, after: LossScale) -> str:
    """A skipped step, and the change of the loss scale.

    >>> overflow_line(LossScale(scale=4.0, hysteresis=1), LossScale(scale=2.0, hysteresis=1))
    '[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4, reducing to 2'
    """
    if before.window == 0:
        return "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated."
    lead = f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {int(before.scale)}"
    if before.left > 1:
        return f"{lead}, but hysteresis is {before.left}. Reducing hysteresis to {before.left - 1}"
    return f"{lead}, reducing to {int(after.scale)}"


def time_line(timeline: Timeline) -> str:
    """Where the time of a measured step went, in milliseconds."""
    forward, backward = (_of(timeline, verb) for verb in ("forward", "backward"))
    last = max((e.end for e in timeline.events if verb_of(e.op) == "backward"), default=0.0)
    parts = {
        "fwd": forward,
        "bwd": backward,
        "bwd_allreduce": timeline.seconds_of("network"),
        "step": timeline.seconds - last,
    }
    return f"{RANK}time (ms)" + "".join(f" | {name}: {1e3 * seconds:.2f}" for name, seconds in parts.items())


def _of(timeline: Timeline, verb: str) -> float:
    return sum(e.seconds for e in timeline.events if verb_of(e.op) == verb)
