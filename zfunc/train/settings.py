"""Settings of `zfunc train` as a value, what each option means, and the options that other commands have too.

The invariant: the fields' defaults are the command line's, and a value that exists can be run, as far as that can
be told without the data and the machine. No torch here: `zfunc --help` answers at once.
"""

from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, frozen

from zfunc import schedules
from zfunc.core.dtypes import PRECISIONS
from zfunc.core.settings import StepSettings
from zfunc.errors import did_you_mean
from zfunc.options import (
    AUTO,
    Option,
    anything,
    check_each,
    count,
    flag,
    flag_fields,
    multiple,
    not_negative,
    one_of,
    options_of,
    path,
    positive,
    probability,
    values_of_flags,
    zero_or_more,
)

DEVICES = ("auto", "cpu", "cuda", "xpu")  # the usual ones; any other that torch has is taken, too
LOG_STYLES = ("zfunc", "deepspeed")
LOG_EVERY = 10  # steps from one of deepspeed's lines to the next where no configuration says, as there
TOKEN_TYPES = ("uint16", "uint32")
FINE_TUNING_LR = 2e-5
LARGEST_SEED = 2**63 - 1  # which a checkpoint can hold
CPU_BUCKET_SIZE, GPU_BUCKET_SIZE = 1 << 18, 50_000_000  # elements, where none is set
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "dropout")  # that the model of --hf has itself


def _device(name: str, value: Any) -> None:
    kind, colon, index = value.partition(":")
    hint = "" if kind in DEVICES else did_you_mean(kind, list(DEVICES))
    if hint or not kind.isidentifier() or (colon and (kind in ("auto", "cpu") or not index.isdecimal())):
        raise ValueError(
            f"{name}: got {value!r}, expected {', '.join(DEVICES)}, another device of torch, or cuda:N for one of "
            f"several{hint or ': choose one of them'}"
        )


def _seed(name: str, value: Any) -> None:
    zero_or_more(name, value)
    if value > LARGEST_SEED:
        raise ValueError(f"{name}: got {value}, expected at most {LARGEST_SEED}: pass a smaller one")


def _resume(name: str, value: Any) -> None:
    if not value:
        raise ValueError(
            f"{name}: got nothing, expected a checkpoint, a folder of them, a run, or {AUTO}: name it"
        )


_names = ", ".join

MODEL = {
    "num_layers": Option("model", "transformer blocks", count),
    "hidden_size": Option("model", "features of a token, a multiple of the heads", count),
    "num_attention_heads": Option("model", "attention heads", count),
    "seq_length": Option("model", "tokens of a sequence", count),
    "batch_size": Option("step", "sequences of a step, a multiple of the micro-batches", count),
}
STEP = options_of(StepSettings)
PRECISION, BUCKET_SIZE, OFFLOAD_RATIO = STEP["precision"], STEP["bucket_size"], STEP["offload_ratio"]

TRAIN = {
    "config": Option(
        "configuration",
        f"a DeepSpeed configuration, JSON. What it says holds; flags do where it says nothing or {AUTO} "
        "(default: none)",
        path,
        metavar="FILE",
    ),
    "data": Option(
        "data",
        'a text file, JSONL ({"text": ...} or {"prompt": ..., "completion": ...} a line), JSON (an array of '
        "those), a folder of such files, a .bin of tokens as nanoGPT writes them, or a folder that datasets' "
        "save_to_disk wrote, with the columns of JSONL, or input_ids and perhaps labels; it needs zfunc[datasets] "
        "(default: the sources of Python's standard library)",
        path,
    ),
    "tokenizer": Option(
        "data",
        "a local tokenizer.json, for text and JSONL (default: that of --hf; without one, bytes are the tokens)",
        path,
        metavar="FILE",
    ),
    "dtype": Option("data", f"type of the tokens in a .bin: {_names(TOKEN_TYPES)}", one_of(TOKEN_TYPES)),
    "vocab_size": Option(
        "data", "tokens there are in a .bin (default: 50257, GPT-2's; of bytes there are 256)", count
    ),
    "hf": Option(
        "model",
        "folder of a Hugging Face model to begin with: its config, safetensors and tokenizer (default: a new GPT)",
        path,
        metavar="FOLDER",
    ),
    **MODEL,
    **STEP,
    "precision": PRECISION.offering((AUTO, *PRECISIONS), f"; {AUTO}: bf16 on a GPU, fp32 on a CPU"),
    "schedule": STEP["schedule"].offering(schedules.__all__),
    "bucket_size": evolve(
        BUCKET_SIZE,
        help=f"{BUCKET_SIZE.help} (default: {CPU_BUCKET_SIZE} on a CPU, for its caches; {GPU_BUCKET_SIZE} on a "
        "GPU)",
    ),
    "offload_ratio": evolve(OFFLOAD_RATIO, help=f"{OFFLOAD_RATIO.help}. {AUTO}: as much as fits there"),
    "dropout": Option("model", "probability to drop an activation", probability),
    "lr": Option(
        "step",
        f"highest learning rate, {FINE_TUNING_LR:g} with --hf; it falls to a tenth of it along a cosine",
        positive,
    ),
    "warmup": Option(
        "step",
        "steps in which the learning rate rises to --lr (default: a tenth of all, at most 150)",
        zero_or_more,
    ),
    "weight_decay": Option("step", "decay of matrices and embeddings, not of norms and biases", not_negative),
    "steps": Option("how long", "steps to train; without limit if only --seconds is given", count),
    "seconds": Option(
        "how long",
        "seconds to train, evaluations included; without limit if only --steps is given. If all steps "
        "will not fit, there will be fewer: the learning rate comes down either way",
        positive,
    ),
    "eval_every": Option(
        "how long",
        "steps from one held-out evaluation to the next, beside those before the first step and after the last; 0: "
        "none at all",
        zero_or_more,
    ),
    "no_sample": Option("how long", "end without a sample of what the model writes", anything),
    "save_every": Option(
        "run folder",
        "steps from one checkpoint to the next, and one of the last step; 0 saves none at all (default: the last "
        "step alone)",
        zero_or_more,
    ),
    "keep": Option("run folder", "the newest checkpoints that stay; older ones are deleted", count),
    "resume": Option(
        "run folder",
        f"go on from a checkpoint, from the newest in a folder of them, or from a run's; {AUTO}: in --out itself, "
        "from its newest, or from the beginning if it has none (default: from the beginning)",
        _resume,
        metavar=f"PATH|{AUTO}",
    ),
    "device": Option(
        "how it runs",
        f"{_names(DEVICES)}, or cuda:N; auto: a GPU where there is one",
        _device,
        words=DEVICES,
    ),
    "seed": Option("how it runs", "seed of initial values, the order of data, dropout and the sample", _seed),
    "log_style": Option(
        "log",
        f"what is printed: {_names(LOG_STYLES)}. zfunc: a live panel on a terminal, whatever steps_per_print says, "
        "else lines, every steps_per_print steps if --config has it; deepspeed: its lines, for programs that read "
        f"those, every {LOG_EVERY} steps or steps_per_print, each of which is measured",
        one_of(LOG_STYLES),
    ),
    "tensorboard": Option(
        "log", "write every step for TensorBoard too, to RUN/tensorboard; needs zfunc[tensorboard]", anything
    ),
    "wandb": Option(
        "log",
        "write every step for Weights & Biases too, to RUN/wandb; offline unless WANDB_MODE says otherwise; needs "
        "zfunc[wandb]",
        anything,
    ),
    "out": Option(
        "run folder",
        f"run folder, new or empty, or with --resume {AUTO} the run's own (default: runs/DATE-TIME)",
        path,
        metavar="FOLDER",
    ),
}


@frozen(kw_only=True)
class ModelFlags:
    """The GPT of a command and the size of its batch."""

    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    seq_length: int = 128
    batch_size: int = 8


@frozen(kw_only=True)
class GPTFlags(ModelFlags):
    """With what decides its vocabulary."""

    data: Path | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None


StepFlags = flag_fields(StepSettings, GPTFlags, precision=AUTO, clip=1.0, bucket_size=None)


@frozen(kw_only=True)
class TrainSettings(StepFlags):
    """A training job. The defaults are that of `zfunc train`, made to end within 3 minutes on two cores.

    None stands for what is only known when the job starts; the help of the option tells. Raises ValueError for
    values that cannot be run, alone or together.
    """

    config: Path | None = None
    dtype: str = "uint16"
    hf: Path | None = None
    dropout: float = 0.0
    lr: float = 4e-3
    warmup: int | None = None
    weight_decay: float = 0.1
    steps: int | None = 1500
    seconds: float | None = 140.0
    eval_every: int = 250
    no_sample: bool = False
    out: Path | None = None
    save_every: int | None = None
    keep: int = 2
    resume: str | None = None
    device: str = "auto"
    seed: int = 0
    log_style: str = "zfunc"
    tensorboard: bool = False
    wandb: bool = False

    def __attrs_post_init__(self) -> None:
        check_together(self, TRAIN)
        if self.resume == AUTO and self.out is None:
            raise ValueError(
                f"--resume {AUTO}: got no --out, expected the run's folder, new at first: add such as --out run"
            )
        if self.steps is None and self.seconds is None:
            raise ValueError(
                "--steps, --seconds: got neither, expected one at least: pass such as --steps 1500"
            )
        if self.steps is not None and self.warmup is not None and self.warmup >= self.steps:
            raise ValueError(
                f"--warmup: got {self.warmup} of {self.steps} steps, expected fewer: lower it, or raise --steps"
            )
        if self.hf is not None:
            for f in attrs.fields(TrainSettings):
                if f.name in SIZES and getattr(self, f.name) != f.default:
                    raise ValueError(
                        f"{flag(f.name)}: got it with --hf, whose config has it, expected one of them: leave one "
                        "out"
                    )


def check_rows(batch_size: int, world: int, micro_batches: int) -> None:
    """Raise ValueError unless the batch can be dealt out to `world` ranks in so many micro-batches each.

    >>> check_rows(10, 4, 2)
    Traceback (most recent call last):
    ValueError: --batch-size: got 10 for 4 ranks with 2 micro-batches each, expected ...
    """
    parts = world * micro_batches
    if batch_size % parts:
        each = f" with {micro_batches} micro-batches each" if micro_batches > 1 else ""
        raise ValueError(
            f"--batch-size: got {batch_size} for {world} ranks{each}, expected a multiple of {parts}: try "
            f"--batch-size {max(parts, batch_size // parts * parts)}"
        )


def step_settings(flags: Any, **changes: Any) -> StepSettings:
    """The settings of the step that a command was given, with `changes` by their names there."""
    return StepSettings(**{**values_of_flags(StepSettings, flags), **changes})


def check_together(settings: Any, options: dict[str, Option]) -> None:
    """Check every field, what excludes what, and what has to divide what."""
    check_each(settings, options)
    given = values_of_flags(StepSettings, settings)
    StepSettings(**{name: value for name, value in given.items() if value not in (None, AUTO)})
    heads, parts = settings.num_attention_heads, settings.micro_batches
    multiple("hidden_size", settings.hidden_size, "num_attention_heads", heads)
    multiple("batch_size", settings.batch_size, "micro_batches", parts)
