"""From settings to a job: what is open is chosen, the data is opened, the GPT is compiled. Nothing is trained.

The invariant: after `prepare`, everything that can be wrong with settings, data and machine has been said, and no
memory has been taken for the model.
"""

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import evolve, frozen
from torch import Tensor

import zfunc
from zfunc.compiling import pick_device
from zfunc.configured import beside, told
from zfunc.data import Corpus, batch_at, held_out_batches, open_corpus
from zfunc.errors import OutOfMemory
from zfunc.gpt import GPTConfig, modules, num_parameters
from zfunc.layout import ALIGNMENT
from zfunc.lr import linear_warmup, warmup_cosine
from zfunc.moments import BUFFERS
from zfunc.options import share
from zfunc.plan_settings import Planning
from zfunc.program import Program
from zfunc.ranks import Ranks
from zfunc.resources import available_host_bytes
from zfunc.room import check_room
from zfunc.segments import Segment
from zfunc.settings import Settings, Sketch
from zfunc.threads import local_ranks

FINAL_LR = 0.1  # of the highest
LONGEST_WARMUP = 150  # steps, where none is asked for
HELD_OUT_TOKENS = 32_768  # that one evaluation reads, at most
GPT2_VOCAB_SIZE = 50_257
PLANNED = (
    400  # layers, at most, of a model that is planned although it surely does not fit, to say what would
)
FAR_TOO_LARGE = 100  # times the host's free memory: nothing that could be advised would help

Batch = tuple[Tensor, Tensor]
log = logging.getLogger("zfunc")


@frozen(eq=False)
class Job:
    """A program and its data, with the settings it was made from: nothing in them is open any more."""

    settings: Settings
    corpus: Corpus
    held_out: tuple[Batch, ...]
    program: Program

    @property
    def ranks(self) -> Ranks:
        """Those that train this job together."""
        return self.program.ranks

    @property
    def unit(self) -> str:
        """What the data is made of: "byte" or "token"."""
        return "byte" if self.corpus.train.dtype.itemsize == 1 else "token"

    def batch(self, position: int) -> Batch:
        """This rank's rows of the batch at `position`, in sequences since the start."""
        return _batch(self.settings, self.corpus, position, self.ranks)


def prepare(settings: Settings, *, cache: Path) -> Job:
    """Choose, open, compile. `cache` is a folder for gathered sources.

    Raises ValueError or FileNotFoundError for settings and data that cannot work together or on this machine.
    """
    settings = resolve(settings)
    vocab_size = settings.vocab_size or GPT2_VOCAB_SIZE
    corpus = open_corpus(settings.data, cache=cache, dtype=settings.dtype, vocab_size=vocab_size)
    if settings.vocab_size not in (None, corpus.vocab_size):
        raise ValueError(
            f"--vocab-size: got {settings.vocab_size} for {corpus.name}, which is read as bytes, expected "
            f"{corpus.vocab_size}: leave it out, or give a .bin of tokens"
        )
    settings = evolve(settings, vocab_size=corpus.vocab_size)
    _check_size(settings, Ranks.of())
    ranks = Ranks.of()
    for line in told(settings, ranks.world, learning_rate(settings, settings.steps)):
        log.log(logging.DEBUG if ranks.rank else logging.INFO, "%s", line)
    _check_rows(settings, ranks)
    example = _batch(settings, corpus, 0, ranks)
    held_out = _held_out(settings, corpus, ranks)
    program = build(settings, example)
    settable = attrs.fields_dict(Settings)
    check_room(program, example, bucket_size=settings.bucket_size or 0, settable=settable)
    return Job(settings, corpus, held_out, program)


def _check_size(settings: Settings, ranks: Ranks) -> None:
    """Refuse by arithmetic what is too large even to be planned, before a model without memory is built of it."""
    parameters, there = num_parameters(config(settings)), available_host_bytes()
    tokens = settings.batch_size * (settings.seq_length + 1)
    here = min(local_ranks(), ranks.world) / ranks.world  # of the state: what this machine's ranks keep
    kept = here * sum(x.nbytes(ALIGNMENT) for x in BUFFERS[settings.moments]) / ALIGNMENT
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


def _check_rows(settings: Settings, ranks: Ranks) -> None:
    parts = ranks.world * settings.micro_batches
    if settings.batch_size % parts:
        raise ValueError(
            f"--batch-size: got {settings.batch_size} for {ranks.world} ranks with {settings.micro_batches} "
            f"micro-batches each, expected a multiple of {parts}: try --batch-size "
            f"{max(parts, settings.batch_size // parts * parts)}"
        )


def resolve(settings: Settings) -> Settings:
    """The settings with device, precision and bucket size chosen for this machine."""
    device = pick_device(None if settings.device == "auto" else settings.device)
    cuda = device.type == "cuda"
    if cuda and settings.device in ("auto", "cuda"):
        device = torch.device("cuda", torch.cuda.current_device())  # that of this rank
    precision = settings.precision
    if precision == "auto":
        precision = "fp32" if not cuda else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    bucket_size = settings.bucket_size or (50_000_000 if cuda else 1 << 18)
    return evolve(settings, device=str(device), precision=precision, bucket_size=bucket_size)


def config(settings: Settings | Sketch | Planning) -> GPTConfig:
    """The model of the settings."""
    return GPTConfig(
        vocab_size=settings.vocab_size or GPT2_VOCAB_SIZE,
        seq_length=settings.seq_length,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        dropout=settings.dropout if isinstance(settings, Settings) else 0.0,
    )


def segments(settings: Settings | Sketch | Planning) -> tuple[Segment, ...]:
    """The GPT of the settings, on the meta device: it takes no memory until `init` fills it."""
    with torch.device("meta"):
        built = modules(config(settings))
    tied = {"out.weight": "embed.tok.weight"}
    return tuple(zfunc.segment(name, m, share=tied if name == "head" else None) for name, m in built)


def build(settings: Settings, example: Batch) -> Program:
    """The program of resolved settings, planned for batches like `example`."""
    return zfunc.compile(
        segments(settings),
        optimizer=zfunc.AdamW(
            lr=learning_rate(settings, settings.steps),
            weight_decay=settings.weight_decay,
            decay=zfunc.matrices_only,
            moments=settings.moments,
            **beside(settings).adam,
        ),
        schedule=settings.schedule,
        precision=settings.precision,
        clip_norm=settings.clip or None,
        micro_batches=settings.micro_batches,
        bucket_size=settings.bucket_size,
        device=settings.device,
        recompute=settings.recompute,
        compile_segments=settings.compile_segments,
        offload_ratio=share(settings.offload_ratio),
        speculate=settings.speculate,
        delay_from=settings.delay_from,
        stage=beside(settings).stage,
        example=example,
    )


def learning_rate(settings: Settings, total: int | None) -> Callable[[int], float]:
    """Warm-up, then a cosine down to a tenth at step `total`; while that is not known, only the warm-up. Where the
    settings' configuration has a scheduler, that.
    """
    warmup = settings.warmup
    if warmup is None:
        warmup = LONGEST_WARMUP if total is None else min(LONGEST_WARMUP, total // 10)
    if (rate := beside(settings).rate(settings.lr, total, warmup)) is not None:
        return rate
    if total is None:
        return linear_warmup(settings.lr, warmup)
    return warmup_cosine(settings.lr, min(warmup, total - 1), total, final=FINAL_LR * settings.lr)


def paced(program: Program, settings: Settings, total: int | None) -> Program:
    """The program with the learning rate of so many steps; the same in all else, so it takes the same State."""
    rate = learning_rate(settings, total)
    return evolve(program, optimizer=evolve(program.optimizer, lr=rate))


def machine(device: torch.device) -> dict[str, Any]:
    """What this runs on and with, for the record."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zfunc": zfunc.__version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _batch(settings: Settings, corpus: Corpus, position: int, ranks: Ranks) -> Batch:
    rows = settings.batch_size // ranks.world
    return batch_at(
        corpus.train,
        position + ranks.rank * rows,
        batch_size=rows,
        seq_length=settings.seq_length,
        seed=settings.seed,
        vocab_size=corpus.vocab_size,
    )


def _held_out(settings: Settings, corpus: Corpus, ranks: Ranks) -> tuple[Batch, ...]:
    """Always the same windows. In batches as small as a micro-batch: what fits in training has to fit here."""
    rows = settings.batch_size // (settings.micro_batches * ranks.world)
    try:
        batches = held_out_batches(
            corpus.held_out,
            batch_size=rows,
            seq_length=settings.seq_length,
            limit=max(rows, HELD_OUT_TOKENS // settings.seq_length),
            vocab_size=corpus.vocab_size,
        )
        return tuple(batches)
    except ValueError as error:
        raise ValueError(f"the held-out part of {corpus.name}: {error}") from error
