"""What happens in a training: the loop yields these events, the run folder records them, the screens show them.

An event has everything that is recorded or shown; nobody reads the loop's state.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline

if TYPE_CHECKING:  # they need torch
    from zfunc.engine.stages.metrics import Metrics
    from zfunc.train.setup import TrainingJob

INTERRUPT, TERMINATED = "interrupt", "terminated"  # how a signal (SIGINT, SIGTERM) ends a training
EARLY, AT_ONCE = "early stopping", "stopped at once"
COMPLETE = ("steps", "seconds", EARLY)  # endings after which nothing is left to train
TEMPERATURE = 0.8  # of the sample
ENDINGS = {  # how a training may end, in words
    "steps": "all steps done",
    "seconds": "the time was up",
    EARLY: "the held-out loss no longer improves",
    "interrupt": "stopped as asked",
    "terminated": "terminated",
    "failed": "failed",
    AT_ONCE: "stopped at once, in the middle of a step",
}


@frozen
class Started:
    """The event of a training that is ready to run, either from the start or after `step` from `checkpoint`."""

    job: "TrainingJob"
    step: int = 0
    checkpoint: Path | None = None
    own: bool = False  # whether an earlier session of this run saved the checkpoint
    seconds: float = 0.0  # trained before


@frozen
class Evaluated:
    """The event of an evaluation on held-out data apart from a step, such as before the first or after the last."""

    held_out: float  # bits per byte or per token; of preferences, their loss
    step: int = 0


@frozen
class Stepped:
    """The event of a step that ended, together with the evaluation after the step, if there was one."""

    step: int
    metrics: "Metrics"  # what the step itself measured
    tokens_per_second: float
    device_bytes: int
    host_bytes: int
    seconds_left: float | None
    held_out: float | None  # as in Evaluated
    epoch: float | None = None  # passes over the data so far; None without --epochs


@frozen
class Saved:
    """The event of a checkpoint of the state after `step` that was saved, or could not be."""

    step: int
    path: Path | None  # None if it failed
    failure: str = ""


@frozen
class Working:
    """The event of an evaluation, a sample or DPO's reference that has begun; it lasts until the next event."""

    activity: str  # "evaluation", "sample" or "reference"


@frozen
class Traced:
    """The event of a step that was measured: its timeline, and the plan that the step ran."""

    step: int
    timeline: Timeline
    plan: Plan


@frozen
class Finished:
    """The event of a training that ended. After SIGTERM, its last evaluation and its sample are skipped."""

    ended: str  # of ENDINGS
    steps: int
    held_out: float | None
    tokens_per_second: float
    seconds: float  # of training, evaluations included
    peak_bytes: dict[str, int]
    planned_bytes: dict[str, int]
    checkpoint: Path | None  # the newest of this run


@frozen
class Sampled:
    """The event of a sample, text that the trained model generated."""

    tokens: tuple[int, ...]
    text: str
    prompt: str = ""  # that it answers, where the data has prompts


Event = Started | Evaluated | Stepped | Saved | Working | Traced | Finished | Sampled
