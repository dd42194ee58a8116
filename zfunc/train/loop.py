"""The training loop: a job in, events out. It writes checkpoints and nothing else; the caller prints and records.

Two jobs with equal settings give equal losses on one machine, however often one is stopped and resumed. `seconds`
end a training after the step in which they have passed, and changes none before it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from attrs import define, evolve, field
from torch.utils._pytree import tree_leaves

from zfunc.checkpoint.writer import Save
from zfunc.engine.program.program import Program
from zfunc.engine.stages.metrics import Metrics
from zfunc.engine.state.state import State
from zfunc.engine.step.evaluate import outputs
from zfunc.engine.step.init import init
from zfunc.engine.step.save_load import restore, save
from zfunc.engine.step.train_step import train_step
from zfunc.errors import CheckpointError, refuse
from zfunc.models.sequences import KVCache
from zfunc.runtime.accelerator import allocated_bytes, on_accelerator, peak_bytes, reset_peak
from zfunc.runtime.fault_injection import Fault, from_environment
from zfunc.runtime.memory_limits import peak_resident_bytes, resident_bytes
from zfunc.train.data.corpus import without_labels
from zfunc.train.evaluations import Evaluation, best_saved
from zfunc.train.events import (
    INTERRUPT,
    TEMPERATURE,
    TERMINATED,
    Evaluated,
    Event,
    Finished,
    Sampled,
    Saved,
    Started,
    Stepped,
    Traced,
    Working,
)
from zfunc.train.reference import kept_reference, with_reference
from zfunc.train.resume import (
    ResumePoint,
    changed_settings,
    elapsed_in,
    end_reason,
    saved_extra,
    stream_position_in,
)
from zfunc.train.run_history import held_out_unit
from zfunc.train.setup import Batch, TrainingJob

TRACED_STEP = 10  # of the session: the one whose timeline is recorded, when everything is warm
SAMPLE_TOKENS = 320
SAMPLE_ROW = 2048  # tokens: as if rows were no longer, so that a sample needs no memory of a long one
Stop = Callable[[], str]  # INTERRUPT or TERMINATED to end, "" to continue
FROM_THE_BEGINNING = ResumePoint()
log = logging.getLogger("zfunc")


def train_events(
    job: TrainingJob, *, stop: Stop = lambda: "", start: ResumePoint = FROM_THE_BEGINNING
) -> Iterator[Event]:
    """Train the job from `start` on and yield its events; a signal that `stop` returns after a step ends training.

    Checkpoints go to `start.folder`; if one cannot be written, that is an event, and training continues. With
    a swap space, commits to it take the place of checkpoints and record the run's progress; it is closed at
    the end. Raises CheckpointError if `start` cannot be loaded, OutOfMemory, and what `zfunc.train_step`
    raises.
    """
    host_before = resident_bytes()
    for device in job.program.memories.values():
        reset_peak(device)
    loop = _Loop(job, stop, start)
    try:
        yield from loop.begin()
        while not loop.ended:
            yield from loop.step()
        yield from loop.end(host_before)
    finally:
        job.program.close_swap()


@define(eq=False)
class _Loop:
    """A training in progress: its State and progress, with a method for each phase."""

    job: TrainingJob
    stop: Stop
    start: ResumePoint
    state: State = field(init=False)
    first: int = field(init=False)  # steps of earlier sessions
    began: float = field(init=False)  # now, minus the seconds trained
    elapsed: float = 0.0  # seconds trained, in all sessions, evaluations included
    faults: tuple[Fault, ...] = field(factory=from_environment)
    busy: float = 0.0  # seconds in steps of this session
    tokens: int = 0
    ended: str = ""
    held_out: float | None = None
    checkpoint: Path | None = None
    saved_step: int | None = None  # of `checkpoint`
    evaluations: tuple[Evaluation, ...] = ()  # of all sessions of the run
    cut: bool = False  # a signal interrupted an evaluation: no other follows

    def begin(self) -> Iterator[Event]:
        """Initialize or load the training's State, and evaluate if an evaluation is due before the next step."""
        checkpoint, job = self._load(), self.job
        self.first = at = self.state.batches
        if checkpoint is None or self.start.own:
            self.checkpoint, self.saved_step = checkpoint, at
        self.evaluations = tuple(
            x for x in self.start.evaluations if x.step < at
        )  # that of `at` is repeated if due
        kept = kept_reference(job, self.start, at) if job.corpus.train.pairs else None
        yield Started(job, at, checkpoint, self.start.own, self.elapsed)
        if job.corpus.train.pairs:
            yield Working("reference")
            self.job = job = with_reference(job, self.state, self.start, kept, self.stop)
        self.began = time.perf_counter() - self.elapsed
        self.ended = self._end_reason(at)
        if not at or (self._due_to_evaluate(at) and not self.ended):
            yield from self._evaluate_apart()
            self.ended = self._end_reason(at)
        signal = self._elapsed_and_signal()[1]
        if signal == INTERRUPT and not at:
            raise KeyboardInterrupt  # there is nothing yet to save or to report
        self.ended = signal if signal == TERMINATED else self.ended or signal

    def step(self) -> Iterator[Event]:
        """Train one step; yield events of a checkpoint saved in it, an evaluation after it, and the step."""
        settings, number = self.job.settings, self.state.batches + 1
        traced = number == min(self.first + TRACED_STEP, settings.steps or self.first + TRACED_STEP)
        start = time.perf_counter()
        batch = self.job.batch(self.state.sequences)
        if without_labels(batch):
            yield from self._pass_over(number)
            return
        metrics, saved = self._train_step(batch, traced=traced)
        seconds = time.perf_counter() - start
        if saved is not None:
            yield saved
        self.busy, self.tokens = self.busy + seconds, self.tokens + settings.batch_size * settings.seq_length
        yield from self._settle(number)
        yield Stepped(
            step=number,
            metrics=metrics,
            tokens_per_second=settings.batch_size * settings.seq_length / seconds,
            device_bytes=max(map(allocated_bytes, self.program.devices)),
            host_bytes=resident_bytes(),
            seconds_left=self._seconds_left(number, seconds),
            held_out=self.held_out,
            epoch=None if settings.epochs is None else self.state.sequences / self.job.sequences_per_epoch,
        )
        if traced and metrics.timeline is not None and metrics.plan is not None:
            yield Traced(number, metrics.timeline, metrics.plan)

    def _pass_over(self, number: int) -> Iterator[Event]:
        """Count step `number`, whose batch has no label, without an update; saves and evaluates if due."""
        if self.swap is None and (due := self._save_due()) is not None:
            yield self._save(due.folder)
        if not self.job.ranks.rank:
            log.warning("step %d: no label in its batch, no update", number)
        sequences = self.state.sequences + self.job.settings.batch_size
        self.state = evolve(self.state, batches=number, sequences=sequences)
        yield from self._settle(number)
        if self.held_out is not None:
            yield Evaluated(self.held_out, number)

    def _settle(self, number: int) -> Iterator[Event]:
        """After step `number`, find whether training ends here; if not, evaluate if an evaluation is due."""
        self._find_end(number)
        self.held_out = None
        if not self.ended and self._due_to_evaluate(number):
            yield from self._evaluate()
            self._find_end(number)  # again: the evaluation's time belongs to this step

    def _find_end(self, number: int) -> None:
        """After step `number`, set `elapsed`, the seconds trained, and `ended`, why training ends, or ""."""
        self.elapsed, signal = self._elapsed_and_signal()
        self.ended = signal if signal == TERMINATED else self._end_reason(number, signal)

    def _end_reason(self, number: int, signal: str = "") -> str:
        return end_reason(self.job.settings, number, self.elapsed, self.evaluations, stopping=signal)

    def _seconds_left(self, number: int, pace: float) -> float | None:
        """Seconds from step `number` until training ends: by `settings.seconds`, or by steps of `pace` seconds."""
        steps, seconds = self.job.settings.steps, self.job.settings.seconds
        left = [] if seconds is None else [max(0.0, seconds - self.elapsed)]
        return min([*left, *([] if steps is None else [(steps - number) * pace])], default=None)

    def end(self, host_before: int) -> Iterator[Event]:
        """End the training: first save, so that a kill loses no state, then evaluate and sample. `host_before` are
        the bytes of the process before the training."""
        job, state, at = self.job, self.state, self.state.batches
        folder = self.swap or self.start.folder
        if folder is not None and job.settings.save_every != 0 and self.saved_step != at:
            yield self._save(folder)
        if self.ended != TERMINATED:
            if self.held_out is None and not self.cut:
                yield from self._evaluate_apart()
            if self._elapsed_and_signal()[1] == TERMINATED:  # agreed on by all ranks
                self.ended = TERMINATED
        yield Finished(
            ended=self.ended,
            steps=at,
            held_out=self.held_out,
            tokens_per_second=self.tokens / self.busy if self.busy else 0.0,
            seconds=time.perf_counter() - self.began,
            peak_bytes=_peaks(self.program, host_before),
            planned_bytes=job.planned_bytes,
            checkpoint=self.checkpoint,
        )
        if self.ended != TERMINATED and not self.cut and not job.settings.no_sample:
            yield Working("sample")
            prompt = job.corpus.held_out.first_prompt(job.settings.seq_length)
            tokens = sample(job, self.program, state, self.stop)
            asked = "" if job.corpus.held_out.loss_mask is None else job.decode(prompt)
            yield Sampled(tokens, job.decode(tokens), asked)

    def _due_to_evaluate(self, step: int) -> bool:
        every = self.job.settings.eval_every
        return every > 0 and step % every == 0

    def _evaluate(self) -> Iterator[Event]:
        """Evaluate the held-out data and yield events; sets `held_out`, the loss, or None after a signal."""
        yield Working("evaluation")
        self.held_out = evaluate_held_out(self.job, self.program, self.state, self.stop)
        self.cut = self.held_out is None
        self._note_evaluation()

    def _note_evaluation(self) -> None:
        """Add rank 0's held-out loss to `evaluations` on every rank, unless an evaluation was interrupted."""
        at, ranks, loss = self.state.batches, self.job.ranks, self.held_out
        total, num_cut = ranks.sums([0.0 if ranks.rank or loss is None else loss, float(loss is None)])
        if not num_cut:
            saved = self.checkpoint.name if self.checkpoint is not None and self.saved_step == at else ""
            self.evaluations += (Evaluation(at, total if math.isfinite(total) else math.inf, saved),)

    def _evaluate_apart(self) -> Iterator[Event]:
        """Evaluate before the first step or after the last, if the settings ask for evaluations."""
        if self.job.settings.eval_every:
            yield from self._evaluate()
        if self.held_out is not None:
            yield Evaluated(self.held_out, self.state.batches)

    def _load(self) -> Path | None:
        """Initialize or load the training's State and progress. Returns the loaded checkpoint, or None."""
        job, start = self.job, self.start
        if start.origin is None:
            self.state = init(self.program, seed=job.settings.seed, loss_scale=job.extras.loss_scale)
            self._commit()
            return None
        restored = restore(start.origin, self.program)
        self.state, extra = restored.state, restored.extra
        self.elapsed = elapsed_in(extra)
        changed = list(changed_settings(extra, job.settings, job.corpus.description))
        if changed and not job.ranks.rank:
            names = ", ".join(changed)
            log.warning("resume: %s: settings have changed: %s", restored.path, names)
        if not start.own and (why := end_reason(job.settings, self.state.batches, self.elapsed)):
            got = f"{restored.path}, after which `{why}={getattr(job.settings, why)}` leaves nothing to train"
            do = "raise `steps`, `epochs` or `seconds`; to begin at step 0, export it and pass that as `hf`"
            refuse("resume", got, "more, as what a checkpoint has done counts", do)
        if job.corpus.stream is not None and (position := stream_position_in(extra)) is not None:
            job.corpus.stream.load_state_dict(self.state.sequences, position)
        if restored.path != self.swap or not start.own:
            self._commit()
        return restored.path

    @property
    def program(self) -> Program:
        """The compiled program of the training's job."""
        return self.job.program

    @property
    def swap(self) -> Path | None:
        """The first folder of the program's swap space on disk; None if the program has no swap space."""
        return next(iter(self.program.swap_folders), None)

    def _commit(self) -> None:
        """Commit State and progress to the swap space, if there is one, with the name of the run that owns
        the space."""
        if self.swap is not None:
            save(self.swap, self.program, self.state, extra=self._extra())

    def _train_step(self, batch: Batch, *, traced: bool) -> tuple[Metrics, Saved | None]:
        """Train on `batch`, with a timeline if `traced`. Returns the metrics, and the event of the
        checkpoint, if one was due, of the state before the step."""
        due, at = self._save_due(), self.state.batches
        step = partial(train_step, self.program, self.state, batch, trace=traced, faults=self.faults)
        try:
            self.state, metrics = step(save=due)
        except CheckpointError as error:  # raised before the step began
            if self.swap is not None or due is None:
                raise
            if not self.job.ranks.rank:
                log.warning("checkpoint: none was saved of step %d: %s", at, error)
            self.state, metrics = step()
            return metrics, self._saved(at, None, str(error))
        if self.swap is not None or metrics.saved is None:
            return metrics, None
        return metrics, self._saved(at, metrics.saved.path, metrics.saved.failure)

    def _save_due(self) -> Save | None:
        """What the next step has to write: a commit of the swap space, or a checkpoint; None if neither is due."""
        settings, at = self.job.settings, self.state.batches
        if self.swap is not None:
            return Save(self.swap, extra=self._extra()) if self.program.commits(self.state.step) else None
        every = settings.save_every
        due = (every and at % every == 0) or (settings.keep_best and self._is_best(at))
        if self.start.folder is None or not due or at in (self.first, self.saved_step):
            return None
        return Save(self.start.folder, keep=settings.keep, spare=self._best_to_keep(), extra=self._extra())

    def _is_best(self, at: int) -> bool:
        """Whether the held-out loss after step `at` is known, and lower than at any checkpoint of the run."""
        best, last = best_saved(self.evaluations), self.evaluations[-1:]
        return any(x.step == at and x.held_out < (math.inf if best is None else best.held_out) for x in last)

    def _best_to_keep(self) -> str:
        """The name of the best checkpoint, kept whatever its age with `keep_best`; "" for none."""
        best = best_saved(self.evaluations) if self.job.settings.keep_best else None
        return "" if best is None or self._is_best(self.state.batches) else best.saved

    def _save(self, folder: Path) -> Saved:
        at, kept = self.state.batches, {"keep": self.job.settings.keep, "spare": self._best_to_keep()}
        try:
            return self._saved(at, save(folder, self.program, self.state, extra=self._extra(), **kept))
        except CheckpointError as error:
            return self._saved(at, None, str(error))

    def _saved(self, at: int, path: Path | None, failure: str = "") -> Saved:
        """The event of a save after step `at`; a `path` becomes the newest checkpoint, None means a failure."""
        if path is not None:
            self.checkpoint, self.saved_step = path, at
            same = [evolve(x, saved=path.name) if x.step == at else x for x in self.evaluations]
            self.evaluations = tuple(same)
        return Saved(at, path, failure)

    def _extra(self) -> dict[str, Any]:
        """The progress to save beside a State; the seconds of a step in progress do not count yet."""
        folder = self.start.folder
        run = None if self.swap is None or folder is None else folder.parent
        stream = self.job.corpus.stream
        position = None if stream is None else stream.state_dict(self.state.sequences)
        return saved_extra(self.job.settings, self.elapsed, self.job.corpus.description, run, position)

    def _elapsed_and_signal(self) -> tuple[float, str]:
        """Seconds trained over all sessions, and the signal that ends the training, or ""; the same on all ranks.

        The clock is rank 0's. A signal to any rank ends all; of two, SIGTERM counts before SIGINT.
        """
        ranks, signal = self.job.ranks, self.stop()
        seconds = time.perf_counter() - self.began if ranks.rank == 0 else 0.0
        elapsed, stopping, terminated = ranks.sums(
            [seconds, float(signal != ""), float(signal == TERMINATED)]
        )
        return elapsed, TERMINATED if terminated else INTERRUPT if stopping else ""


def evaluate_held_out(
    job: TrainingJob, program: Program, state: State, stop: Stop = lambda: ""
) -> float | None:
    """The mean loss on the held-out sequences, in bits per byte or token, or for preferences DPO's own loss; None
    if `stop` returned a signal meanwhile."""
    losses, before = list[float](), stop()
    for inputs, targets in job.held_out:
        more = [*[()] * (len(program.segments) - 1), (targets,)]
        for y in outputs(program, state, inputs, more):
            if (signal := stop()) == TERMINATED or signal != before:
                return None
            last = y
        losses.append(float(last[0] if isinstance(last, tuple) else last))  # beside auxiliary outputs
    rows = [len(tree_leaves(inputs)[0]) for inputs, _ in job.held_out]  # the last batch may have fewer
    return fmean(losses, rows) / held_out_unit(job.corpus.unit, job.settings.loss).nats


def sample(job: TrainingJob, program: Program, state: State, stop: Stop = lambda: "") -> tuple[int, ...]:
    """The tokens that the model generates after the `first_prompt` of the held-out data.

    Fewer tokens are generated if a signal arrives, or where the answer to a prompt ends. Keys and values are
    cached. A full sequence is continued in a new one that starts with its second half.
    """
    seq_length, before = job.settings.seq_length, stop()
    text, stops = job.corpus.held_out.first_prompt(min(seq_length, SAMPLE_ROW)), job.stops
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
            logits = y
        probabilities = torch.softmax(logits[0, -1].cpu() / TEMPERATURE, dim=-1)  # [vocab]
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token in stops:
            break
        generated.append(token)
        text.append(token)
    return tuple(generated)


def _peaks(program: Program, before: int) -> dict[str, int]:
    """Measured peak bytes: "process", "host" (the process's, less the bytes `before`), and each device memory."""
    highest = peak_resident_bytes()
    peaks = {"process": highest, "host": max(0, highest - before)}
    if on_accelerator(program.device):
        peaks |= {place: peak_bytes(device) for place, device in program.memories.items()}
    return peaks
