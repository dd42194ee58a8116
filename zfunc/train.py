"""The training loop: a job in, events out. Nothing here prints or writes; whoever iterates does.

The invariant: two jobs with equal settings give equal losses on one machine, unless the time bound takes steps
away; and that is an event of its own.
"""

import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import torch
from attrs import evolve, frozen

import zfunc
from zfunc.gpt import num_parameters
from zfunc.job import Job, config, learning_rate, machine
from zfunc.memory import memory
from zfunc.plan import Plan
from zfunc.program import Program, specialize
from zfunc.settings import Settings
from zfunc.state import State
from zfunc.step import Metrics
from zfunc.timeline import Timeline

TRACED_STEP = 10  # the one whose timeline is kept: by then everything is warm
WARM_STEPS = 3  # steps that trace and compile, and tell nothing about those to come
SAMPLE_TOKENS, TEMPERATURE = 320, 0.8


@frozen
class Started:
    """The job is ready: what was chosen, read and planned. `settings` has nothing open any more."""

    settings: Settings
    data: tuple[str, ...]
    unit: str  # "byte" or "token"
    parameters: int
    plan: Plan
    planned_bytes: dict[str, int]
    machine: dict[str, object]


@frozen
class Evaluated:
    """Held-out data was read before the first step: bits per byte, or per token."""

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
class Said:
    """Something was decided on the way, in one line."""

    line: str


@frozen
class Traced:
    """The measured timeline of one step, and the plan it ran."""

    step: int
    timeline: Timeline
    plan: Plan


@frozen
class Finished:
    """The end: by "steps" if all asked for were taken, by "seconds" or "interrupt". Peaks are in bytes."""

    ended: str
    steps: int
    skipped: int
    loss: float  # the mean of the last 50 steps
    held_out: float
    tokens_per_second: float
    seconds: float  # of training, evaluations included
    peak_bytes: dict[str, int]
    planned_bytes: dict[str, int]
    sample: tuple[int, ...]  # tokens


Event = Started | Evaluated | Stepped | Said | Traced | Finished


def train(job: Job, *, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
    """Run the job; `stop` is asked after every step. Raises OutOfMemory, and what `zfunc.train_step` raises."""
    program, settings = job.program, job.settings
    peaks = {tier: peak.nbytes for tier, peak in memory(program.plan).items()}
    host_before = host_bytes()
    if program.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(program.device)
    state = zfunc.init(program, seed=settings.seed)
    told = machine(program.device)
    yield Started(
        settings,
        job.corpus.description,
        job.unit,
        num_parameters(config(settings)),
        program.plan,
        peaks,
        told,
    )
    length, start = Length(settings, settings.steps), time.perf_counter()
    held_out = evaluate(job, program, state)
    yield Evaluated(held_out)

    losses: list[float] = []
    busy, skipped, ended = 0.0, 0, ""
    while not ended:
        begun = time.perf_counter()
        number = state.batches + 1
        traced = number == min(TRACED_STEP, length.total or TRACED_STEP)
        batch = job.batch(state.sequences)
        state, metrics = zfunc.train_step(program, state, batch, trace=traced)
        seconds = time.perf_counter() - begun
        losses, busy, skipped = [*losses[-49:], metrics.loss], busy + seconds, skipped + metrics.skipped
        elapsed, stopping = agreed(job, start, stop)
        ended = length.ended(number, elapsed, stopping=stopping)
        evaluated = None
        if ended or number % settings.eval_every == 0:
            evaluated = held_out = evaluate(job, program, state)
            elapsed, stopping = agreed(job, start, stop)  # it takes a while
            ended = ended or ("interrupt" if stopping else "")
        before_look, length = length, length.after(number, elapsed)
        yield _stepped(settings, program, number, length, metrics, seconds, elapsed, evaluated)
        if traced and metrics.timeline is not None:
            yield Traced(number, metrics.timeline, specialize(program, batch).plan)
        if length.total != before_look.total:
            rate = learning_rate(settings, length.total)
            program = evolve(program, optimizer=evolve(program.optimizer, lr=rate))
            if not ended:
                yield Said(_changed(before_look, length, number, elapsed))
    yield Finished(
        ended=ended,
        steps=state.batches,
        skipped=skipped,
        loss=fmean(losses),
        held_out=held_out,
        tokens_per_second=state.sequences * settings.seq_length / busy,
        seconds=time.perf_counter() - start,
        peak_bytes=_peaks(program, host_before),
        planned_bytes=peaks,
        sample=sample(job, program, state),
    )


@frozen
class Length:
    """How many steps there will be: as many as asked for, or as fit into the seconds where those are fewer.

    The time is looked at after a twentieth of the seconds, then after every further tenth. Steps are taken away
    where a twentieth of them will not fit, and given back where a seventh more will. A pure function of steps and
    seconds, so it can be tested without a clock.
    """

    settings: Settings
    total: int | None  # None: only the seconds are given, and nothing has been measured yet
    warm: float = 0.0  # seconds until the first WARM_STEPS steps were over
    looks: int = 0

    def after(self, step: int, elapsed: float) -> "Length":
        """Seen when `step` is over, `elapsed` seconds after the first began."""
        seen = evolve(self, warm=elapsed) if step == WARM_STEPS else self
        seconds = self.settings.seconds
        if seconds is None or elapsed < seconds * (0.05 + 0.1 * self.looks):
            return seen
        fits = step + max(1, int((seconds - elapsed) / seen.seconds_per_step(step, elapsed)))
        total = min(fits, self.settings.steps or fits)
        if self.total is not None and 0.95 * self.total <= total <= 1.15 * self.total:
            total = self.total
        looks = int((elapsed / seconds - 0.05) / 0.1) + 1
        return evolve(seen, total=total, looks=looks)

    def seconds_per_step(self, step: int, elapsed: float) -> float:
        """The mean, without the first steps as soon as there are others; evaluations are in it."""
        if step > WARM_STEPS:
            return (elapsed - self.warm) / (step - WARM_STEPS)
        return elapsed / step

    def left(self, step: int, elapsed: float) -> float | None:
        """Seconds to the end, as far as one can tell."""
        bounds = [] if self.settings.seconds is None else [max(0.0, self.settings.seconds - elapsed)]
        if self.total is not None:
            bounds.append((self.total - step) * self.seconds_per_step(step, elapsed))
        return min(bounds, default=None)

    def ended(self, step: int, elapsed: float, *, stopping: bool) -> str:
        """Why `step` was the last one, or nothing."""
        if self.total is not None and step >= self.total:
            return "steps" if self.total == self.settings.steps else "seconds"
        if self.settings.seconds is not None and elapsed >= self.settings.seconds:
            return "seconds"
        return "interrupt" if stopping else ""


def agreed(job: Job, start: float, stop: Callable[[], bool]) -> tuple[float, bool]:
    """Seconds since `start`, by the clock of rank 0, and whether any rank is to stop: the same on all of them."""
    seconds = time.perf_counter() - start if job.ranks.rank == 0 else 0.0
    elapsed, stopping = job.ranks.sums([seconds, float(stop())])
    return elapsed, stopping > 0


def evaluate(job: Job, program: Program, state: State) -> float:
    """The mean loss on the held-out windows, in bits per byte or token."""
    return fmean(zfunc.evaluate(program, state, batch) for batch in job.held_out) / math.log(2)


def sample(job: Job, program: Program, state: State) -> tuple[int, ...]:
    """Tokens the model makes, one at a time, after the beginning of the held-out data."""
    tokens = job.corpus.held_out[: (job.settings.seq_length + 1) // 2].tolist()
    generator = torch.Generator().manual_seed(job.settings.seed % 2**63)
    made: list[int] = []
    while len(made) < SAMPLE_TOKENS:
        window = torch.tensor([[*tokens, *made][-job.settings.seq_length :]])  # [1, tokens]
        logits = zfunc.apply(program, state, window)[0, -1].cpu()  # [vocab] fp32
        chances = torch.softmax(logits / TEMPERATURE, dim=-1)
        made.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tuple(made)


def host_bytes() -> int:
    """What this process holds of the host's memory now."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * resource.getpagesize()


def _stepped(
    settings: Settings,
    program: Program,
    number: int,
    length: Length,
    metrics: Metrics,
    seconds: float,
    elapsed: float,
    held_out: float | None,
) -> Stepped:
    cuda = program.device.type == "cuda"
    return Stepped(
        step=number,
        total=length.total,
        loss=metrics.loss,
        lr=metrics.lr,
        grad_norm=metrics.grad_norm,
        skipped=metrics.skipped,
        loss_scale=metrics.loss_scale,
        tokens_per_second=settings.batch_size * settings.seq_length / seconds,
        seconds=metrics.seconds,
        host_seconds=metrics.host_seconds,
        device_bytes=torch.cuda.memory_allocated(program.device) if cuda else 0,
        host_bytes=host_bytes(),
        seconds_left=length.left(number, elapsed),
        held_out=held_out,
    )


def _changed(old: Length, new: Length, step: int, elapsed: float) -> str:
    before = "" if old.total is None else f" instead of {old.total:,}"
    each = new.seconds_per_step(step, elapsed)
    return (
        f"time: {new.total:,} steps{before} will fit into {new.settings.seconds:g} s ({each:.2g} s each); "
        "the learning rate comes down by then"
    )


def _peaks(program: Program, before: int) -> dict[str, int]:
    """Measured: of the process what it took since `before`, in which torch itself had its part already."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = {"process": highest, "host": max(0, highest - before)}
    if program.device.type == "cuda":
        peaks["device"] = torch.cuda.max_memory_allocated(program.device)
    return peaks
