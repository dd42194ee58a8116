"""From settings to a job: what is open is chosen, the data is opened, the GPT is compiled. Nothing is trained.

The invariant: after `prepare_job`, everything that can be wrong with settings, data and machine has been said, and
no memory has been taken for the model.
"""

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import evolve, field, frozen

from zfunc._version import __version__
from zfunc.core.layout import ALIGNMENT
from zfunc.core.optimizer_state import STATE_FORMATS
from zfunc.engine.compile import compile
from zfunc.engine.program import Program
from zfunc.engine.segment import Segment
from zfunc.errors import OutOfMemory
from zfunc.models.gpt import GPTConfig, gpt_segments, num_parameters
from zfunc.optim.adamw import AdamW, matrices_only
from zfunc.optim.lr import linear_warmup, warmup_cosine
from zfunc.options import AUTO
from zfunc.planner.memory_check import check_fits
from zfunc.runtime.accelerator import best_precision, device_name, on_accelerator, pick_device
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.cpu_topology import cpu_model
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.thread_budget import local_ranks
from zfunc.train.data.batches import Batch, held_out_parts, rank_batch
from zfunc.train.data.corpus import Corpus
from zfunc.train.data.packing import holds_tokens, open_data
from zfunc.train.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from zfunc.train.deepspeed.convert import config_extras, startup_notes
from zfunc.train.pretrained import PretrainedModel, pretrained, tokenizer
from zfunc.train.settings import (
    CPU_BUCKET_SIZE,
    GPU_BUCKET_SIZE,
    GPTFlags,
    TrainSettings,
    check_rows,
    step_settings,
)

FINAL_LR = 0.1  # of the highest
LONGEST_WARMUP = 150  # steps, where none is asked for
GPT2_VOCAB_SIZE = 50_257
PLANNED = (
    400  # layers, at most, of a model that is planned although it surely does not fit, to say what would
)
FAR_TOO_LARGE = 100  # times the host's free memory: nothing that could be advised would help
FASTEST = {  # why a precision was chosen
    "fp32": "a CPU computes fastest in it",
    "bf16": "a GPU computes fastest in it",
    "fp16": "a GPU computes fastest in 16 bits, and this one has no bf16",
}

log = logging.getLogger("zfunc")


@frozen(eq=False)
class TrainingJob:
    """A program and its data, with the settings it was made from: nothing in them is open any more."""

    settings: TrainSettings
    corpus: Corpus
    held_out: tuple[Batch, ...]
    program: Program
    tokenizer: Tokenizer | None = None
    architecture: str = ""  # of the model of --hf, and its `sizes` by the settings' names
    sizes: dict[str, int] = field(factory=dict[str, int])

    @property
    def ranks(self) -> RankGroup:
        """Those that train this job together."""
        return self.program.ranks

    @property
    def unit(self) -> str:
        """What the data is made of: "byte" or "token"."""
        return "byte" if self.corpus.train.dtype.itemsize == 1 else "token"

    def batch(self, position: int) -> Batch:
        """This rank's rows of the batch at `position`, in sequences since the start."""
        return rank_batch(self.settings, self.corpus, position, self.ranks)


def prepare_job(settings: TrainSettings, *, cache: Path) -> TrainingJob:
    """Choose, open, compile. `cache` is a folder for gathered sources.

    Raises ValueError or FileNotFoundError for settings and data that cannot work together or on this machine.
    """
    settings, chosen = resolve_settings(settings), settings.precision == "auto"
    model = pretrained(settings)
    words = tokenizer(settings, model)
    corpus = _corpus(settings, model, words, cache)
    vocab_size = corpus.vocab_size if words is None else settings.vocab_size or corpus.vocab_size
    settings = evolve(settings, vocab_size=vocab_size if model is None else model.vocab_size)
    if model is None:
        check_size(settings, RankGroup.of())
    ranks = RankGroup.of()
    for line in startup_notes(settings, ranks.world, learning_rate(settings, settings.steps)):
        log.log(logging.DEBUG if ranks.rank else logging.INFO, "%s", line)
    check_rows(settings.batch_size, ranks.world, settings.micro_batches)
    example = rank_batch(settings, corpus, 0, ranks)
    held_out = held_out_parts(settings, corpus, ranks)
    program = compile_job(settings, example, None if model is None else model.segments)
    settable = attrs.fields_dict(TrainSettings)
    check_fits(program, example, settable=settable)
    reason = f", because {FASTEST[settings.precision]}" if chosen else ""
    log.log(logging.DEBUG if ranks.rank else logging.INFO, "precision: %s%s", settings.precision, reason)
    known = {} if model is None else {"architecture": model.architecture, "sizes": model.sizes}
    return TrainingJob(settings, corpus, held_out, program, words, **known)


def _corpus(
    settings: TrainSettings, model: PretrainedModel | None, words: Tokenizer | None, cache: Path
) -> Corpus:
    most = settings.vocab_size or (GPT2_VOCAB_SIZE if model is None else model.vocab_size)
    try:
        corpus = open_data(settings.data, cache=cache, tokenizer=words, dtype=settings.dtype, vocab_size=most)
    except (ValueError, OSError) as error:
        raise ValueError(f"--data: {error}") from error
    if words is not None and settings.vocab_size is not None and settings.vocab_size < corpus.vocab_size:
        raise ValueError(
            f"--vocab-size: got {settings.vocab_size} for {words.name}, expected its {corpus.vocab_size} or "
            "more: leave it out"
        )
    if words is None and settings.vocab_size not in (None, corpus.vocab_size):
        raise ValueError(
            f"--vocab-size: got {settings.vocab_size} for {corpus.name}, which is read as bytes, expected "
            f"{corpus.vocab_size}: leave it out, or give a .bin of tokens"
        )
    return corpus


def check_size(settings: TrainSettings, ranks: RankGroup) -> None:
    """Raise OutOfMemory, by arithmetic, for what is too large to be planned, before a model is built of it."""
    parameters, there = num_parameters(gpt_config(settings)), available_host_bytes()
    tokens = settings.batch_size * (settings.seq_length + 1)
    here = min(local_ranks(), ranks.world) / ranks.world  # of the state: what this machine's ranks keep
    kept = here * sum(x.nbytes(ALIGNMENT) for x in STATE_FORMATS[settings.moments]) / ALIGNMENT
    bound = there if settings.num_layers > PLANNED else FAR_TOO_LARGE * there
    for what, needed, most in (
        (f"a model of {parameters:,} parameters (--num-layers, --hidden-size)", parameters * kept, bound),
        (f"a batch of {tokens:,} tokens (--batch-size, --seq-length)", tokens * 8, there),
    ):
        if needed > most:
            raise OutOfMemory(
                f"{what} needs {needed:,.0f} bytes of host memory, {there:,} are there; nothing was allocated. "
                "Make it smaller"
            )


def resolve_settings(settings: TrainSettings) -> TrainSettings:
    """The settings with device, precision and bucket size chosen for this machine."""
    device = pick_device(settings.device)
    precision = best_precision(device) if settings.precision == AUTO else settings.precision
    bucket_size = settings.bucket_size or (GPU_BUCKET_SIZE if on_accelerator(device) else CPU_BUCKET_SIZE)
    return evolve(settings, device=str(device), precision=precision, bucket_size=bucket_size)


def gpt_config(settings: GPTFlags) -> GPTConfig:
    """The model of the settings."""
    return GPTConfig(
        vocab_size=settings.vocab_size or vocabulary(settings),
        seq_length=settings.seq_length,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        dropout=getattr(settings, "dropout", 0.0),
    )


def vocabulary(settings: GPTFlags) -> int:
    """Tokens there are of data that was not read yet, which `prepare_job` finds there too: GPT-2's in a file of
    tokens, else those of the tokenizer, or bytes.
    """
    if settings.data is not None and holds_tokens(settings.data):
        return GPT2_VOCAB_SIZE
    return BYTES.vocab_size if settings.tokenizer is None else open_tokenizer(settings.tokenizer).vocab_size


def compile_job(settings: TrainSettings, example: Batch, model: tuple[Segment, ...] | None = None) -> Program:
    """The program of resolved settings, planned for batches like `example`: of the GPT, or of another model."""
    return compile(
        gpt_segments(gpt_config(settings)) if model is None else model,
        step_settings(settings, **config_extras(settings).step),
        optimizer=AdamW(
            lr=learning_rate(settings, settings.steps),
            weight_decay=settings.weight_decay,
            decay=matrices_only,
            **config_extras(settings).adam,
        ),
        device=settings.device,
        example=example,
    )


def learning_rate(settings: TrainSettings, total: int | None) -> Callable[[int], float]:
    """Warm-up, then a cosine down to a tenth at step `total`; while that is not known, only the warm-up. Where the
    settings' configuration has a scheduler, that.
    """
    warmup = settings.warmup
    if warmup is None:
        warmup = LONGEST_WARMUP if total is None else min(LONGEST_WARMUP, total // 10)
    if (rate := config_extras(settings).rate(settings.lr, total, warmup)) is not None:
        return rate
    if total is None:
        return linear_warmup(settings.lr, warmup)
    return warmup_cosine(settings.lr, min(warmup, total - 1), total, final=FINAL_LR * settings.lr)


def with_total_steps(program: Program, settings: TrainSettings, total: int | None) -> Program:
    """The program with the learning rate of so many steps; the same in all else, so it takes the same State."""
    rate = learning_rate(settings, total)
    return evolve(program, optimizer=evolve(program.optimizer, lr=rate))


def machine_record(device: torch.device) -> dict[str, Any]:
    """What this runs on and with, for the record."""
    return {
        "cpu": cpu_model() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zfunc": __version__,
    }
