"""What happens in a training, as values: the loop yields them, the run folder keeps them, the screens show them.

An event has all that is kept or shown of what happened; nothing reads the loop's own state.
"""

from pathlib import Path

from attrs import field, frozen

from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.optim.loss_scale import LossScale
from zfunc.train.settings import TrainSettings

INTERRUPT, TERMINATED = "interrupt", "terminated"  # how a signal ends a training
TEMPERATURE = 0.8  # of the sample


@frozen
class Started:
    """The job is ready: what was chosen, read and planned. `settings` has nothing open any more.

    It begins after `step`, from `checkpoint`; `own` if an earlier session of the run saved it.
    """

    settings: TrainSettings
    data: tuple[str, ...]
    unit: str  # "byte" or "token"
    parameters: int
    plan: Plan
    planned_bytes: dict[str, int]
    machine: dict[str, object]
    step: int = 0
    checkpoint: Path | None = None
    own: bool = False
    architecture: str = ""  # of the model of --hf, and its `sizes` by the settings' names
    sizes: dict[str, int] = field(factory=dict[str, int])
    sequences: int = 0  # that were trained on before, of all ranks
    skipped: int = 0  # steps before that an overflow has skipped


@frozen
class Evaluated:
    """An evaluation on held-out data that no Stepped has: before the first step, and after the last.

    In bits per byte, or per token.
    """

    held_out: float
    step: int = 0


@frozen
class Stepped:
    """A step is over. `held_out`, as in Evaluated, where it was followed by an evaluation."""

    step: int
    total: int | None  # steps there will be; None while that is not known
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    tokens_per_second: float
    seconds: float
    host_seconds: float
    device_bytes: int
    host_bytes: int
    seconds_left: float | None
    held_out: float | None


@frozen
class Saved:
    """A checkpoint of the state after `step`: its folder, or None and why there is none.

    In so many `seconds`; None where it was written while the next step went on.
    """

    step: int
    path: Path | None
    failure: str
    seconds: float | None


@frozen
class Notice:
    """Something was decided on the way, in one line."""

    line: str


@frozen
class Working:
    """What goes on between steps, an "evaluation" or the "sample"; a `share` of it, 0 to 1, is done."""

    what: str
    share: float


@frozen
class Traced:
    """The measured timeline of one step, and the plan it ran."""

    step: int
    timeline: Timeline
    plan: Plan


@frozen
class Overflowed:
    """The step of the next Stepped was skipped: the loss scale it was taken with, and the one after it."""

    step: int
    before: LossScale
    after: LossScale


@frozen
class Timed:
    """The timeline of a step, for the log."""

    step: int
    timeline: Timeline


@frozen
class Finished:
    """Training ended: by "steps" if all requested were taken, by "seconds", "interrupt" or "terminated".

    After "terminated" there is no evaluation and no sample. Peaks are in bytes.
    """

    ended: str
    steps: int
    skipped: int
    loss: float  # the mean of the last 50 steps
    held_out: float | None
    tokens_per_second: float
    seconds: float  # of training, evaluations included
    peak_bytes: dict[str, int]
    planned_bytes: dict[str, int]
    checkpoint: Path | None  # the newest of this run


@frozen
class Sampled:
    """What the trained model wrote, after everything else; `words` is the text, where a tokenizer says it."""

    tokens: tuple[int, ...]
    words: str | None = None


Event = (
    Started
    | Evaluated
    | Stepped
    | Saved
    | Notice
    | Working
    | Traced
    | Overflowed
    | Timed
    | Finished
    | Sampled
)
