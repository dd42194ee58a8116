"""Settings to a job: open choices are made, the data is opened, the model is compiled. Nothing is trained.

After `prepare_job`, everything that can be wrong with settings, data and machine has been raised, and no memory has
been allocated for the model.
"""

import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import evolve, field, frozen

from zfunc._version import __version__
from zfunc.core.bucketing import default_bucket_size
from zfunc.core.display import counted
from zfunc.core.setting_values import schedule_for
from zfunc.engine.compile import compile
from zfunc.engine.program.program import Program
from zfunc.engine.trace.segment import Segment
from zfunc.errors import OutOfMemory, refuse
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import num_parameters
from zfunc.optim.by_name import NamedOptimizer, make_optimizer
from zfunc.optim.elementwise import matrices_only
from zfunc.options import AUTO
from zfunc.planner.traced_costs import check_fits
from zfunc.runtime.accelerator import best_precision, device_name, on_accelerator, pick_device
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.memory_limits import available_host_bytes
from zfunc.runtime.stage_ranks import ranks_of_stage
from zfunc.runtime.thread_budget import allowed_cpus, cpu_model
from zfunc.train.data.corpus import Batch, Corpus, held_out_parts, rank_batch
from zfunc.train.data.opening import open_data
from zfunc.train.data.record_files import open_stream
from zfunc.train.data.tokenizer import BYTES, Tokenizer
from zfunc.train.deepspeed.mapping import ConfigExtras, config_extras, startup_notes
from zfunc.train.pretrained import PretrainedModel, choose_tokenizer, pretrained_model
from zfunc.train.settings import (
    CPU_BUCKET_SIZE,
    DPO,
    ENDLESS,
    GPT2_VOCAB_SIZE,
    TrainSettings,
    check_rows,
    gpt_config,
    reading,
    step_settings,
)
from zfunc.train.trainer.mapping import trainer_extras

SHUFFLE_BUFFER = 1000  # records, where none is set
PLANNED_LAYERS = 400  # up to which a model that cannot fit is planned nevertheless, to suggest what would
FAR_TOO_LARGE = 100  # times the host's free memory, even with 8 bits a moment: no suggestion would help

log = logging.getLogger("zfunc")


@frozen(eq=False)
class TrainingJob:
    """A training that is ready to run: its compiled program, data and resolved settings; `extras` are values
    without a setting, from a DeepSpeed or Trainer file."""

    settings: TrainSettings
    extras: ConfigExtras
    corpus: Corpus
    held_out: tuple[Batch, ...]
    program: Program
    tokenizer: Tokenizer | None  # None: the data is tokens, and nobody said of which tokenizer
    architecture: str = ""  # of a Hugging Face model, with its `sizes` by the names of the settings
    sizes: dict[str, int] = field(factory=dict[str, int])

    @property
    def ranks(self) -> RankGroup:
        """The ranks that train together: those of all pipeline stages."""
        return self.program.ranks.job

    @property
    def sequences_per_epoch(self) -> int:
        """The number of sequences in one pass over the training data."""
        return self.corpus.train.num_sequences(self.settings.seq_length)

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a generated sample, if the data has prompts and answers; else none."""
        prompts = self.corpus.held_out.loss_mask is not None
        return self.tokenizer.stops if prompts and self.tokenizer is not None else frozenset()

    def decode(self, tokens: Sequence[int]) -> str:
        """`tokens` of the job's data as text; without a tokenizer, their numbers."""
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Peak bytes of memory on each tier by the plan of the job's program."""
        return self.program.plan.peak_bytes()

    @property
    def machine(self) -> dict[str, Any]:
        """A description of the job's machine, package versions and number of ranks, for the run folder."""
        return {
            "cpu": cpu_model() or platform.machine(),
            "cores": len(allowed_cpus()),
            "threads": torch.get_num_threads(),
            "gpu": device_name(self.program.device),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "zfunc": __version__,
            "ranks": self.ranks.world,
        }

    def batch(self, position: int) -> Batch:
        """This rank's rows of the batch at `position`, which counts sequences since the start of training."""
        return rank_batch(self.settings, self.corpus, position, self.program.ranks)


def prepare_job(settings: TrainSettings, *, cache: Path) -> TrainingJob:
    """Make a TrainingJob: resolve settings, open the data, compile the model. `cache` is a folder for packed data.

    Raises ValueError or FileNotFoundError for settings and data that do not work together or on this machine.
    """
    ranks = ranks_of_stage(RankGroup.of(), settings.pp)  # the n-th of each stage has the same rows
    say = partial(log.log, logging.DEBUG if ranks.job.rank else logging.INFO)
    # What is trained, and on what
    settings = resolve_settings(settings)
    extras = trainer_extras(settings, config_extras(settings))
    model = pretrained_model(settings)
    tokenizer = choose_tokenizer(settings, model)
    corpus = _open_corpus(settings, model, tokenizer, cache)
    settings = _settled(settings, extras.by_pass, model, tokenizer, corpus, say)
    # Whether it can be, before anything is compiled
    segments = segments_of(settings, model)
    rate = extras.learning_rate(settings.steps)
    for line in (*startup_notes(settings, extras.config, ranks.world, rate), *extras.notes):
        say("%s", line)
    if settings.steps is None and rate != extras.learning_rate(10**9):  # it depends on the number
        say(
            "learning rate: `seconds` alone says no last step to fall to: it stays after the warm-up; pass "
            "`steps` or `epochs` for `lr_schedule`"
        )
    check_rows(settings.batch_size, ranks.world, settings.micro_batches, 2 if corpus.train.pairs else 1)
    if (empty := corpus.train.unlearned(settings.seq_length)) > 0:
        count = corpus.train.num_sequences(settings.seq_length)
        say("%d of %d sequences have no label; a step without any makes no update", empty, count)
    example = rank_batch(settings, corpus, 0, ranks)
    nothing = settings.stream and settings.eval_data is None
    held_out = () if nothing else held_out_parts(settings, corpus, ranks)
    optimizer = optimizer_of(settings, extras, rate)
    step, device = step_settings(settings), settings.device
    program = compile(segments, step, optimizer=optimizer, device=device, example=example)
    if settings.keep_best and program.swap_folders:
        say("keep_best: no effect: the state is on the disk, whose last commit is the only checkpoint")
    check_fits(program, example, settable=attrs.fields_dict(TrainSettings))
    say("precision: %s", settings.precision)
    decoder = BYTES if tokenizer is None and corpus.unit == "byte" else tokenizer
    source = {} if model is None else {"architecture": model.architecture, "sizes": model.sizes}
    return TrainingJob(settings, extras, corpus, held_out, program, decoder, **source)


def _open_corpus(
    settings: TrainSettings, model: PretrainedModel | None, tokenizer: Tokenizer | None, cache: Path
) -> Corpus:
    """The corpus to train and evaluate on. Raises ValueError, naming the setting, for data that cannot be read."""
    of_tokens = settings.vocab_size or (GPT2_VOCAB_SIZE if model is None else model.vocab_size)
    pairs = settings.loss == DPO
    whole = settings.seq_length if pairs or settings.packing == "documents" else None

    def opened(name: str, *, split: bool) -> Corpus:
        given: dict[str, Any] = {"tokenizer": tokenizer, "dtype": settings.dtype, "vocab_size": of_tokens}
        given |= {"whole_documents": whole, "long_documents": settings.long_documents, "pairs": pairs}
        path = getattr(settings, name)
        with reading(name, path):
            return open_data(path, cache=cache, split=split, **given)

    def streamed() -> Corpus:
        sizes = {"seq_length": settings.seq_length, "batch_size": settings.batch_size}
        drawn = {"buffer": settings.shuffle_buffer or SHUFFLE_BUFFER, "seed": settings.seed}
        with reading("data", settings.data):
            return open_stream(
                Path(settings.data or ""), tokenizer=tokenizer, vocab_size=of_tokens, **sizes, **drawn
            )

    corpus = streamed() if settings.stream else opened("data", split=settings.eval_data is None)
    return corpus if settings.eval_data is None else corpus.evaluated_on(opened("eval_data", split=False))


def _settled(
    settings: TrainSettings,
    by_pass: Mapping[str, str],
    model: PretrainedModel | None,
    tokenizer: Tokenizer | None,
    corpus: Corpus,
    say: Callable[..., None],
) -> TrainSettings:
    """`settings` with the number of steps and the vocabulary size that follow from data and model. Each
    setting named in `by_pass` becomes the number of steps in one epoch. `say` logs a line."""
    own, found = settings.vocab_size, corpus.vocab_size
    if own is not None and (own < found if tokenizer is not None else own != found):
        of, expected = f"{corpus.name}, which is read as bytes", f"{found}"
        if tokenizer is not None:
            of, expected = tokenizer.name, f"its {found} or more"
        refuse("vocab_size", f"{own} for {of}", expected, "leave it out")
    if settings.stream and by_pass:
        got = f"epoch with {ENDLESS}"
        do = "write steps, with the number of them, or leave `stream` out"
        refuse([*by_pass.values()], got, "a number of steps", do)
    sequences = (
        corpus.train.num_sequences(settings.seq_length) if by_pass or settings.epochs is not None else 0
    )
    settings = evolve(settings, **dict.fromkeys(by_pass, math.ceil(sequences / settings.batch_size)))
    if settings.epochs is not None:
        settings = evolve(settings, steps=math.ceil(settings.epochs * sequences / settings.batch_size))
        stream, of = corpus.train, f"{counted(sequences, 'sequence')} each"
        if stream.firsts is None and (len(stream) - 1) // settings.seq_length > sequences:
            of += (
                f" ({len(stream):,} tokens, of which each pass leaves out some at its ends, others each time)"
            )
        say("epochs: %g of %s: %s", settings.epochs, of, counted(settings.steps, "step"))
    return evolve(settings, vocab_size=own or found if model is None else model.vocab_size)


def segments_of(settings: TrainSettings, model: PretrainedModel | None) -> tuple[Segment, ...]:
    """The segments of the Hugging Face `model`, or without one of the GPT that the settings describe. Raises
    OutOfMemory, by arithmetic alone, for a GPT or a batch too large to be worth planning."""
    if model is not None:
        return model.segments
    config = gpt_config(settings)
    parameters, available = num_parameters(config), available_host_bytes()
    tokens = settings.batch_size * (settings.seq_length + 1)
    worth_planning = available * (1 if settings.num_layers > PLANNED_LAYERS else FAR_TOO_LARGE)
    of_model = f"a model of {parameters:,} parameters (`num_layers`, `hidden_size`)"
    of_batch = f"a batch of {tokens:,} tokens (`batch_size`, `seq_length`)"
    needs = (of_model, 6 * parameters, worth_planning), (of_batch, 8 * tokens, available)
    for subject, needed, most in needs:
        if needed > most:
            raise OutOfMemory(
                f"{subject} needs {needed:,} bytes of host memory at least, {available:,} are available; nothing "
                "was allocated. Make it smaller"
            )
    return gpt_segments(config)


def resolve_settings(settings: TrainSettings) -> TrainSettings:
    """`settings` with the device, precision, schedule and bucket size chosen for this machine."""
    device, world = pick_device(settings.device), RankGroup.of().world // settings.pp
    on_gpu = on_accelerator(device)
    precision = best_precision(device) if settings.precision == AUTO else settings.precision
    default = default_bucket_size(world) if on_gpu else CPU_BUCKET_SIZE
    schedule = schedule_for(settings.schedule, on_cpu=not on_gpu)
    return evolve(
        settings,
        device=str(device),
        precision=precision,
        schedule=schedule,
        bucket_size=settings.bucket_size or default,
    )


def optimizer_of(
    settings: TrainSettings, extras: ConfigExtras, lr: float | Callable[[int], float]
) -> NamedOptimizer:
    """The optimizer that `settings.optimizer` names, at rate `lr`, with the arguments that `extras` adds."""
    return make_optimizer(
        settings.optimizer,
        lr=lr,
        weight_decay=settings.weight_decay,
        decay=matrices_only,
        **extras.optimizer,
    )
