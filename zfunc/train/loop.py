"""The training loop: a job in, events out. It writes checkpoints and nothing else; the caller prints and records.

Two jobs with equal settings give equal losses on one machine, however often one is stopped and resumed, unless
--seconds reduces the number of steps, which is an event.
"""

import logging
import math
import resource
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from attrs import define, field
from torch.utils._pytree import tree_leaves

from zfunc.checkpoint.writer import Save
from zfunc.core.decision import StepDecision
from zfunc.core.memory_model import peak_memory
from zfunc.engine.evaluate import outputs
from zfunc.engine.flush import flush
from zfunc.engine.init import init
from zfunc.engine.loss_outputs import loss_and_aux
from zfunc.engine.metrics import Metrics
from zfunc.engine.program import Program
from zfunc.engine.save_load import restore, save
from zfunc.engine.state import State
from zfunc.engine.swap_state import close_swap, swap_folders
from zfunc.engine.train_step import commits, train_step
from zfunc.errors import CheckpointError
from zfunc.models.kv_cache import KVCache
from zfunc.runtime.accelerator import allocated_bytes, on_accelerator, peak_bytes, reset_peak
from zfunc.runtime.fault_injection import Fault, from_environment
from zfunc.train.deepspeed.convert import config_extras
from zfunc.train.events import (
    INTERRUPT,
    TEMPERATURE,
    TERMINATED,
    Evaluated,
    Event,
    Finished,
    Notice,
    Overflowed,
    Sampled,
    Saved,
    Started,
    Stepped,
    Timed,
    Traced,
    Working,
)
from zfunc.train.pacing import StepBudget, TrainingClock, changed_settings, restored_clock
from zfunc.train.resume import ResumePoint, with_run
from zfunc.train.settings import LOG_EVERY
from zfunc.train.setup import Batch, TrainingJob, machine_record, with_total_steps

TRACED_STEP = 10  # of the session: the one whose timeline is recorded, when everything is warm
SAMPLE_TOKENS = 320
Stop = Callable[[], str]  # INTERRUPT or TERMINATED to end, "" to continue
FROM_THE_BEGINNING = ResumePoint()
log = logging.getLogger("zfunc")


def train_events(
    job: TrainingJob, *, stop: Stop = lambda: "", start: ResumePoint = FROM_THE_BEGINNING
) -> Iterator[Event]:
    """Run the job from `start`; `stop` is called after every step.

    Checkpoints go to `start.folder`; one that cannot be written is an event, and training continues. With a swap
    space that is the checkpoint, of which each commit says how far the run is; it is closed at the end. Raises
    CheckpointError if `start` cannot be loaded, OutOfMemory, and what `zfunc.train_step` raises.
    """
    host_before = host_bytes()
    reset_peak(job.program.device)
    loop = _Loop(job, stop, start)
    try:
        yield from loop.begin()
        while not loop.ended:
            yield from loop.step()
        yield from loop.end(host_before)
    finally:
        close_swap(job.program)


@define(eq=False)
class _Loop:
    """The state of a training, and its parts as methods."""

    job: TrainingJob
    stop: Stop
    start: ResumePoint
    program: Program = field(init=False)
    state: State = field(init=False)
    progress: TrainingClock = field(init=False)
    first: int = field(init=False)  # steps of earlier sessions
    began: float = field(init=False)  # now, minus the seconds trained
    faults: tuple[Fault, ...] = field(factory=from_environment)
    busy: float = 0.0  # seconds in steps of this session
    tokens: int = 0
    ended: str = ""
    held_out: float | None = None
    checkpoint: Path | None = None
    saved_step: int | None = None  # of `checkpoint`
    cut: bool = False  # a signal interrupted an evaluation: no other follows

    def begin(self) -> Iterator[Event]:
        """Make or load the state, and evaluate if that is due before the next step."""
        checkpoint, job = self._load(), self.job
        settings, at = job.settings, self.state.batches
        self.first = at
        if checkpoint is None or self.start.own:
            self.checkpoint, self.saved_step = checkpoint, at
        yield Started(
            settings,
            job.corpus.description,
            job.unit,
            self.program.layout.num_trainable,
            self.program.plan,
            self._planned(),
            {**machine_record(self.program.device), "ranks": job.ranks.world},
            at,
            checkpoint,
            self.start.own,
            job.architecture,
            job.sizes,
            self.state.sequences,
            self.progress.skipped,
            self.progress.elapsed,
        )
        self.began = time.perf_counter() - self.progress.elapsed
        self.ended = self.progress.budget.end_reason(at, self.progress.elapsed)
        if not at or (self._due_to_evaluate(at) and not self.ended):
            yield from self._evaluate(at)
        signal = self._elapsed_and_signal()[1]
        self.ended = signal if signal == TERMINATED else self.ended or signal

    def step(self) -> Iterator[Event]:
        """One step, and what follows it."""
        settings, number, before = self.job.settings, self.state.batches + 1, self.progress.budget
        traced = number == min(self.first + TRACED_STEP, before.total or self.first + TRACED_STEP)
        timed = (
            settings.log_style == "deepspeed"
            and number % (config_extras(settings).steps_per_print or LOG_EVERY) == 0
        )
        start, scale = time.perf_counter(), self.state.loss_scale
        batch = self.job.batch(self.state.sequences)
        metrics, saved = self._train_step(batch, traced=traced or timed)
        seconds = time.perf_counter() - start
        if saved is not None:
            yield saved
        self.busy, self.tokens = self.busy + seconds, self.tokens + settings.batch_size * settings.seq_length
        self.progress = self.progress.stepped(metrics.loss, skipped=metrics.skipped)
        elapsed = yield from self._settle(number)
        if metrics.skipped:
            yield Overflowed(number, scale, self.state.loss_scale)
        yield Stepped(
            step=number,
            total=self.progress.budget.total,
            loss=metrics.loss,
            lr=metrics.lr,
            grad_norm=metrics.grad_norm,
            skipped=metrics.skipped,
            loss_scale=metrics.loss_scale,
            tokens_per_second=settings.batch_size * settings.seq_length / seconds,
            seconds=metrics.seconds,
            host_seconds=metrics.host_seconds,
            device_bytes=allocated_bytes(self.program.device),
            host_bytes=host_bytes(),
            seconds_left=self.progress.budget.seconds_left(number, elapsed),
            held_out=self.held_out,
            epoch=None if settings.epochs is None else self.state.sequences / self.job.sequences_per_epoch,
            aux=metrics.aux,
            norms=metrics.norms,
        )
        if timed and metrics.timeline is not None:
            yield Timed(number, metrics.timeline)
        if traced and metrics.timeline is not None and metrics.plan is not None:
            yield Traced(number, metrics.timeline, metrics.plan)
        if (after := self.progress.budget).total != before.total:
            self.program = with_total_steps(self.program, settings, after.total)
            if not self.ended:
                yield Notice(_new_total(before, after, elapsed))

    def _settle(self, number: int) -> Generator[Event, None, float]:
        """After a step: whether it is the last, and the evaluation if one is due. Returns the seconds trained."""
        before = self.progress
        elapsed = self._stepped(before, number)
        self.held_out = None
        if not self.ended and self._due_to_evaluate(number):
            self.held_out = yield from evaluate_held_out(self.job, self.program, self.state, self.stop)
            self.cut = self.held_out is None
            elapsed = self._stepped(before, number)  # again: the evaluation's time belongs to this step
        return elapsed

    def _stepped(self, before: TrainingClock, number: int) -> float:
        """Set progress after step `number`, and whether it was the last. Returns the seconds trained."""
        elapsed, signal = self._elapsed_and_signal()
        self.progress = before.timed(number, elapsed)
        ended = self.progress.budget.end_reason(number, elapsed, stopping=signal)
        self.ended = signal if signal == TERMINATED else ended
        return elapsed

    def end(self, host_before: int) -> Iterator[Event]:
        """Save, evaluate, sample: in this order, nothing is lost if the process is killed on the way.

        A pending gradient is applied first, unless the training was interrupted and may be resumed.
        """
        if self.ended not in (INTERRUPT, TERMINATED) and self.state.pending is not None:
            self.state, self.saved_step = flush(self.program, self.state), None
        job, state, at = self.job, self.state, self.state.batches
        folder = self.swap or self.start.folder
        if folder is not None and job.settings.save_every != 0 and self.saved_step != at:
            yield self._save(folder)
        if self.ended != TERMINATED:
            if self.held_out is None and not self.cut:
                yield from self._evaluate(at)
            if self._elapsed_and_signal()[1] == TERMINATED:  # agreed on by all ranks
                self.ended = TERMINATED
        yield Finished(
            ended=self.ended,
            steps=at,
            skipped=self.progress.skipped,
            loss=fmean(self.progress.losses or (math.nan,)),
            held_out=self.held_out,
            tokens_per_second=self.tokens / self.busy if self.busy else 0.0,
            seconds=time.perf_counter() - self.began,
            peak_bytes=_peaks(self.program, host_before),
            planned_bytes=self._planned(),
            checkpoint=self.checkpoint,
        )
        if self.ended != TERMINATED and not self.cut and not job.settings.no_sample:
            prompt = job.corpus.sample_prompt(job.settings.seq_length)
            tokens = yield from sample(job, self.program, state, self.stop)
            asked = "" if job.corpus.held_out_loss_mask is None else job.decode(prompt)
            yield Sampled(tokens, job.decode(tokens), asked)

    def _due_to_evaluate(self, step: int) -> bool:
        every = self.job.settings.eval_every
        return every > 0 and step % every == 0

    def _evaluate(self, at: int) -> Iterator[Event]:
        """Before the first step, or after the last."""
        if self.job.settings.eval_every:
            self.held_out = yield from evaluate_held_out(self.job, self.program, self.state, self.stop)
            self.cut = self.held_out is None
        if self.held_out is not None:
            yield Evaluated(self.held_out, at)

    def _load(self) -> Path | None:
        """Set program, state and progress. Returns the checkpoint that was loaded, if any."""
        job, start = self.job, self.start
        if start.origin is None:
            self.program, self.progress = job.program, TrainingClock.new(job.settings)
            self.state = init(
                self.program, seed=job.settings.seed, loss_scale=config_extras(job.settings).loss_scale
            )
            self._commit()
            return None
        total = restored_clock(start.extra, job.settings, 0).budget.total
        restored = restore(start.origin, with_total_steps(job.program, job.settings, total))
        self.state, extra = restored.state, restored.extra
        self.progress = restored_clock(extra, job.settings, self.state.batches)
        self.program = with_total_steps(job.program, job.settings, self.progress.budget.total)
        changed = list(changed_settings(extra, job.settings, job.corpus.description))
        if changed and not job.ranks.rank:
            names = ", ".join(changed)
            log.warning("resume: %s: settings have changed: %s", restored.path, names)
        if restored.path != self.swap or not start.own:
            self._commit()
        return restored.path

    @property
    def swap(self) -> Path | None:
        """The first folder of the swap space."""
        return next(iter(swap_folders(self.job.program)), None)

    def _commit(self) -> None:
        """Say in the swap space, if there is one, whose it is."""
        if self.swap is not None:
            save(self.swap, self.program, self.state, extra=self._extra())

    def _train_step(self, batch: Batch, *, traced: bool) -> tuple[Metrics, Saved | None]:
        """The next step, which writes a checkpoint of the step before it if one is due."""
        due, at, failure = self._due(), self.state.batches, ""
        step = partial(train_step, self.program, self.state, batch, trace=traced, faults=self.faults)
        if self.swap is not None:
            commit = Save(self.swap, extra_after=self._extra) if commits(self.program, self.state) else None
            self.state, metrics = step(save=commit)
            return metrics, None
        if due is not None:
            try:
                self.state, metrics = step(save=due)
                assert metrics.saved is not None
                return metrics, self._saved(at, metrics.saved.path, metrics.saved.failure, None)
            except CheckpointError as error:  # raised before the step began
                failure = str(error)
                if not self.job.ranks.rank:
                    log.warning("checkpoint: none was saved of step %d: %s", at, failure)
        self.state, metrics = step()
        return metrics, None if due is None else self._saved(at, None, failure, None)

    def _due(self) -> Save | None:
        """The checkpoint that the next step writes, if one is due."""
        settings, at = self.job.settings, self.state.batches
        if self.start.folder is None or not settings.save_every or at in (self.first, self.saved_step):
            return None
        if at % settings.save_every:
            return None
        return Save(self.start.folder, keep=settings.keep, extra=self._extra())

    def _save(self, folder: Path) -> Saved:
        start, at = time.perf_counter(), self.state.batches
        path, failure = None, ""
        try:
            path = save(folder, self.program, self.state, keep=self.job.settings.keep, extra=self._extra())
        except CheckpointError as error:
            failure = str(error)
        return self._saved(at, path, failure, time.perf_counter() - start)

    def _saved(self, at: int, path: Path | None, failure: str, seconds: float | None) -> Saved:
        """The event of a save; what was saved is the run's checkpoint from now on."""
        if path is not None:
            self.checkpoint, self.saved_step = path, at
        return Saved(at, path, failure, seconds)

    def _extra(self, decision: StepDecision | None = None) -> dict[str, Any]:
        """What is saved of the progress; after a step with this decision, whose time does not count yet."""
        progress = self.progress
        if decision is not None:
            progress = progress.stepped(decision.loss, skipped=decision.skip)
            progress = progress.timed(self.state.batches + 1, progress.elapsed)
        extra = progress.extra(self.job.settings, self.job.corpus.description)
        return (
            extra
            if self.swap is None or self.start.folder is None
            else with_run(extra, self.start.folder.parent)
        )

    def _elapsed_and_signal(self) -> tuple[float, str]:
        """Seconds trained, in all sessions, and the signal to end with: the same on all ranks.

        The clock is rank 0's. A signal to any rank ends all; TERMINATED outranks INTERRUPT.
        """
        ranks, signal = self.job.ranks, self.stop()
        seconds = time.perf_counter() - self.began if ranks.rank == 0 else 0.0
        elapsed, stopping, terminated = ranks.sums(
            [seconds, float(signal != ""), float(signal == TERMINATED)]
        )
        return elapsed, TERMINATED if terminated else INTERRUPT if stopping else ""

    def _planned(self) -> dict[str, int]:
        return {tier: peak.nbytes for tier, peak in peak_memory(self.program.plan).items()}


def evaluate_held_out(
    job: TrainingJob, program: Program, state: State, stop: Stop = lambda: ""
) -> Generator[Working, None, float | None]:
    """Yields its progress and returns the mean loss on the held-out windows, in bits per byte or token.

    None if a signal arrived in the meantime.
    """
    losses, before = list[float](), stop()
    parts = len(job.held_out) * len(program.segments)
    for n, (inputs, targets) in enumerate(job.held_out):
        more = [*[()] * (len(program.segments) - 1), (targets,)]
        for s, y in enumerate(outputs(program, state, inputs, more)):
            if (signal := stop()) == TERMINATED or signal != before:
                return None
            yield Working("evaluation", (n * len(program.segments) + s) / parts)
            last = y
        losses.append(float(loss_and_aux(program.segments[-1].name, last)[0]))
    rows = [len(tree_leaves(inputs)[0]) for inputs, _ in job.held_out]  # the last batch may have fewer
    return fmean(losses, rows) / math.log(2)


def sample(
    job: TrainingJob, program: Program, state: State, stop: Stop = lambda: ""
) -> Generator[Working, None, tuple[int, ...]]:
    """Yields its progress and returns tokens the model generates after the corpus's `sample_prompt`.

    They are fewer if a signal arrives in the meantime, or where the answer to a prompt ends. Keys and values are
    cached. A full sequence is continued in a new one that starts with its second half.
    """
    seq_length, before = job.settings.seq_length, stop()
    text, stops = job.corpus.sample_prompt(seq_length), job.stops
    kept, caches = (seq_length + 1) // 2, list[KVCache]()
    generator = torch.Generator().manual_seed(job.settings.seed % 2**63)
    generated: list[int] = []
    while len(generated) < SAMPLE_TOKENS:
        new = text[-1:]
        if not caches or caches[0].length == seq_length:
            new = text if not generated else text[-kept:]
            caches = [KVCache() for _ in program.segments[:-1]]
        more = [*((cache,) for cache in caches), ()]
        for y in outputs(program, state, torch.tensor([new]), more):
            if (signal := stop()) == TERMINATED or signal != before:
                return tuple(generated)
            yield Working("sample", len(generated) / SAMPLE_TOKENS)
            logits = y
        probabilities = torch.softmax(logits[0, -1].cpu() / TEMPERATURE, dim=-1)  # [vocab]
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token in stops:
            break
        generated.append(token)
        text.append(token)
    return tuple(generated)


def host_bytes() -> int:
    """Resident memory of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * resource.getpagesize()


def _new_total(old: StepBudget, new: StepBudget, elapsed: float) -> str:
    before = "" if old.total is None else f" instead of {old.total:,}"
    each = new.seconds_per_step(elapsed)
    return (
        f"time: {new.total:,} steps{before} fit into {new.settings.seconds:g} s ({each:.2g} s each); the learning "
        "rate decays by then"
    )


def _peaks(program: Program, before: int) -> dict[str, int]:
    """Measured peaks of the process: in all, and on the host since `before`, when torch was already loaded."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = {"process": highest, "host": max(0, highest - before)}
    if on_accelerator(program.device):
        peaks["device"] = peak_bytes(program.device)
    return peaks
