"""The reference of DPO: log-probabilities of all answers under the model as a run began, computed once.

They are computed by the run's own program, streamed from wherever its weights are, before the first step, when the
model is still the reference (adapters of LoRA begin without effect, so under them it is the base). A run keeps them
in its folder, and a resume takes them from there: the weights have changed since.
"""

import logging
from collections.abc import Callable, Sequence
from io import BytesIO

import numpy as np
from attrs import evolve

from zfunc.checkpoint.durable_files import atomic_replace
from zfunc.checkpoint.writer import all_or_none
from zfunc.engine.state.state import State
from zfunc.engine.step.evaluate import apply
from zfunc.errors import refuse
from zfunc.models.loss import Preferences
from zfunc.train.data.corpus import TokenStream, held_out_parts, held_out_places
from zfunc.train.resume import ResumePoint
from zfunc.train.setup import TrainingJob

REFERENCE = (
    "reference.npz"  # in the run folder: `train` and `held_out` [rows] fp32, and the `digest` of the data
)
Rows = dict[str, np.ndarray]
log = logging.getLogger("zfunc")


def kept_reference(job: TrainingJob, start: ResumePoint, at: int) -> Rows | None:
    """The DPO reference log-probabilities that the run, now at step `at`, saved, or else the run it started
    from; None if neither saved any, and on ranks other than 0. All ranks must call this. Raises ValueError if
    the saved ones are lost or are of other data."""
    return all_or_none(job.ranks, lambda: None if job.ranks.rank else _read_kept(start, _digest(job), at))


def with_reference(
    job: TrainingJob, state: State, start: ResumePoint, kept: Rows | None, stop: Callable[[], str]
) -> TrainingJob:
    """The job with DPO reference log-probabilities, `kept` or computed with the weights of `state`, saved in the
    run's folder. All ranks have to call this. Raises KeyboardInterrupt if `stop` asks for it meanwhile."""
    streams = {"train": job.corpus.train, "held_out": job.corpus.held_out}
    if job.ranks.sums([float(kept is not None)])[0]:
        own = {name: _on_all_ranks(job, name, kept) for name in streams}
    else:
        places = {"train": range(streams["train"].num_sequences(job.settings.seq_length))}
        places |= {"held_out": held_out_places(job.settings, job.corpus)}
        own = {name: _compute_reference(job, state, x, places[name], stop) for name, x in streams.items()}
    if start.folder is not None and not job.ranks.rank:
        written = BytesIO()
        np.savez(written, digest=np.array(_digest(job)), train=own["train"], held_out=own["held_out"])
        with atomic_replace(start.folder.parent / REFERENCE) as file:
            file.write(written.getvalue())
    corpus = evolve(job.corpus, **{x: evolve(stream, reference=own[x]) for x, stream in streams.items()})
    return evolve(job, corpus=corpus, held_out=held_out_parts(job.settings, corpus, job.program.ranks))


def _digest(job: TrainingJob) -> str:
    return job.corpus.train.digest + job.corpus.held_out.digest


def _read_kept(start: ResumePoint, digest: str, at: int) -> Rows | None:
    """The DPO reference of data `digest`, read from the run's folder, or from the folder of the run whose
    checkpoint it begins with; None without either. Raises ValueError if the run has one of other data, or is
    at step `at` without any."""
    run, origin = start.folder and start.folder.parent, start.origin
    others = [] if start.own or origin is None else [origin, *origin.parents][:3]
    for folder in [run, *others]:
        if folder is None or not (path := folder / REFERENCE).is_file():
            continue
        try:
            with np.load(path) as file:
                found = {name: file[name] for name in ("digest", "train", "held_out")}
        except Exception as error:  # of zipfile and NumPy, whose texts advise to trust the file
            do = f"restore it, or begin a new run with `resume={run}` and another `out`"
            got = f"{path}, which is damaged ({type(error).__name__})"
            refuse("resume", got, "what zfunc wrote", do, cause=error)
        if str(found.pop("digest")) == digest:
            log.info("reference: %s", path)
            return found
        if folder == run:
            do = f"pass them, or begin a new run with `resume={run}` and another `out`"
            refuse("data", f"other data, seq_length or tokenizer than {path} is of", "those of the run", do)
    if start.own and at:
        got = f"dpo for the run {run} at step {at}, which has kept no reference ({REFERENCE})"
        expected = "a run that began with dpo"
        refuse("loss", got, expected, f"begin a new one with `resume={run}` and another `out`")
    return None


def _on_all_ranks(job: TrainingJob, name: str, kept: Rows | None) -> np.ndarray:
    """The fp32 array `name` ("train" or "held_out") of `kept`, on all ranks; rank 0 alone has `kept`."""
    sizes = job.ranks.sums([0.0 if kept is None else len(kept[name])])
    rows = np.zeros(int(sizes[0])) if kept is None else kept[name]
    return np.array(job.ranks.sums(rows.tolist()), np.float32)


def _compute_reference(
    job: TrainingJob, state: State, stream: TokenStream, places: Sequence[int], stop: Callable[[], str]
) -> np.ndarray:
    """Log-probabilities of the answers in the sequences `places`: fp32, an element for each sequence of
    `stream`, 0 for other sequences. Ranks divide the work. Raises KeyboardInterrupt if `stop` asks for it."""
    ranks, settings = job.program.ranks, job.settings
    rows = settings.batch_size // (settings.micro_batches * ranks.world)
    found = np.zeros(stream.num_sequences(settings.seq_length), np.float32)
    for first in range(0, len(places), rows * ranks.world):
        if job.ranks.sums([float(stop() != "")])[0]:
            raise KeyboardInterrupt
        mine = [*places[first + ranks.rank * rows : first + (ranks.rank + 1) * rows]]
        read = [*mine, *[places[0]] * (rows - len(mine))]  # all ranks make equal calls
        inputs, labels = stream.read(read, seq_length=settings.seq_length, vocab_size=job.corpus.vocab_size)
        sums = apply(job.program, state, inputs, Preferences(labels))
        found[mine] = sums[: len(mine)].float().cpu().numpy()
    stages = job.ranks.world // ranks.world  # of a pipeline, each of which has the same rows
    return (np.array(job.ranks.sums(found.tolist())) / stages).astype(np.float32)
