"""Settings of the commands as values: defaults in two frozen classes, what each option means in one table.

The invariant: the fields' defaults are the command line's, and a value that exists can be run, as far as that can
be told without the data and the machine. No torch here: `zfunc --help` answers at once.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from zfunc import schedules
from zfunc.errors import nearest
from zfunc.hardware import ROUND
from zfunc.moments import BUFFERS
from zfunc.options import (
    AUTO,
    Option,
    anything,
    check_each,
    count,
    flag,
    multiple,
    not_negative,
    one_of,
    path,
    positive,
    probability,
    ratio,
    zero_or_more,
)
from zfunc.profile_file import load
from zfunc.profile_file import names as profiles

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
RECOMPUTE = ("all", "none", "min-cut")
MOMENTS = tuple(BUFFERS)
WEIGHTS = ("fp32", "bf16", "fp16")
LOG_STYLES = ("zfunc", "deepspeed")
LOG_EVERY = 10  # steps from one of deepspeed's lines to the next where no configuration says, as there
FORMATS = ("text", "svg", "chrome", "html")
TOKEN_TYPES = ("uint16", "uint32")
FINE_TUNING_LR = 2e-5
LARGEST_SEED = 2**63 - 1  # which a checkpoint can hold
MOST_LAYERS, MOST_ELEMENTS = (
    10_000,
    10**17,
)  # of what is planned: each layer takes time; torch counts bytes in 63 bits
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "dropout")  # that the model of --hf has itself


def _device(name: str, value: Any) -> None:
    kind, colon, index = value.partition(":")
    if kind not in DEVICES or (colon and not (kind == "cuda" and index.isdecimal())):
        hint = nearest(kind, list(DEVICES)) or ": choose one of them"
        raise ValueError(
            f"{flag(name)}: got {value!r}, expected {', '.join(DEVICES)}, or cuda:N for one of several{hint}"
        )


def profile(name: str, value: Any) -> None:
    """A profile that comes with zfunc, or a file of one."""
    try:
        load(value)
    except FileNotFoundError as error:  # which names the argument of zfunc.plan
        raise ValueError(f"{flag(name)}: {str(error).partition(': ')[2]}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{flag(name)}: got {value}, which is no text, expected TOML: name a file that zfunc calibrate wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag(name)}: {error}") from error


def check_paper(model: Any) -> None:
    """Refuse sizes that cannot be planned, by arithmetic: too many segments, or more elements than are counted."""
    layers, width, tokens = model.num_layers, model.hidden_size, model.batch_size * model.seq_length
    widest = max(4 * width, model.vocab_size, model.num_attention_heads * model.seq_length)
    for flags, what, got, most in (
        ("--num-layers", "layers", layers, MOST_LAYERS),
        (
            "--hidden-size, --num-layers, --vocab-size",
            "parameters",
            (12 * layers * width + model.vocab_size) * width,
            MOST_ELEMENTS,
        ),
        ("--batch-size, --seq-length", "elements of an activation", tokens * widest, MOST_ELEMENTS),
    ):
        if got > most:
            raise ValueError(f"{flags}: got {got:.3g} {what}, expected at most {most:.3g}: make it smaller")


def check_precision(hardware: str | None, precision: str) -> None:
    """Refuse a precision that a profile does not have."""
    there = (AUTO, *load(hardware).precisions) if hardware is not None else PRECISIONS
    if precision not in there:
        raise ValueError(
            f"--precision: got {precision!r} with --hardware {hardware}, expected one that it has: pass "
            f"{' or '.join(there)}"
        )


def _seed(name: str, value: Any) -> None:
    zero_or_more(name, value)
    if value > LARGEST_SEED:
        raise ValueError(f"{flag(name)}: got {value}, expected at most {LARGEST_SEED}: pass a smaller one")


def _resume(name: str, value: Any) -> None:
    if not value:
        raise ValueError(
            f"{flag(name)}: got nothing, expected a checkpoint, a folder of them, a run, or {AUTO}: name it"
        )


_names = ", ".join

COMMON = {
    "num_layers": Option("model", "transformer blocks", count),
    "hidden_size": Option("model", "features of a token, a multiple of the heads", count),
    "num_attention_heads": Option("model", "attention heads", count),
    "seq_length": Option("model", "tokens of a sequence", count),
    "batch_size": Option("step", "sequences of a step, a multiple of the micro-batches", count),
    "micro_batches": Option("step", "equal parts of a batch; their gradients are accumulated", count),
    "clip": Option("step", "largest global gradient norm; 0 does not clip", not_negative),
    "precision": Option(
        "how it runs",
        f"of parameters and gradients on the device: {_names(PRECISIONS)}; auto: bf16 on a GPU, fp32 on a CPU",
        one_of(PRECISIONS),
    ),
    "moments": Option(
        "offload",
        f"what the host keeps of Adam's moments: {_names(MOMENTS)}; the less, the faster the host's step",
        one_of(MOMENTS),
    ),
    "schedule": Option(
        "how it runs",
        f"what runs when, and on which lane: {_names(schedules.__all__)}",
        one_of(schedules.__all__),
    ),
    "bucket_size": Option("offload", "elements that are moved and updated as a unit", count),
    "grad_slots": Option("offload", "buckets of gradients that the device has room for", count),
    "host_slots": Option("offload", "buckets on their way, in pinned memory, each way", count),
    "recompute": Option(
        "how it runs",
        f"what a block forgets between forward and backward: {_names(RECOMPUTE)}",
        one_of(RECOMPUTE),
    ),
}

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
        'a text file, JSONL ({"text": ...} or {"prompt": ..., "completion": ...} a line), a folder of such '
        "files, a .bin of tokens as nanoGPT writes them, or a folder that datasets' save_to_disk wrote, with the "
        "columns of JSONL, or input_ids and perhaps labels; it needs zfunc[datasets] (default: the sources of "
        "Python's standard library)",
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
    **COMMON,
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
    "eval_every": Option("how long", "steps from one held-out evaluation to the next", count),
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
    "bucket_size": Option(
        "offload",
        f"{COMMON['bucket_size'].help} (default: 262144 on a CPU, for its caches; 50000000 on a GPU)",
        count,
    ),
    "offload_ratio": Option(
        "offload",
        f"share of the optimizer's state on the host, 0 to 1; the rest stays on the device. {AUTO}: as much as "
        "fits there",
        ratio,
        metavar=f"X|{AUTO}",
    ),
    "speculate": Option(
        "offload",
        "buckets that are updated before the norm is known; same result, more memory",
        zero_or_more,
    ),
    "delay_from": Option(
        "offload",
        "from this step on the host applies each gradient a step late, beside the next; it changes what is trained "
        "(default: never)",
        count,
    ),
    "compile_segments": Option(
        "how it runs", "put the blocks through torch.compile; needs a compiler", anything
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

DRAW = {
    **COMMON,
    "precision": Option(
        "how it runs",
        f"{COMMON['precision'].help.partition(';')[0]}; {AUTO}: the 16 bits that the hardware is fast in",
        COMMON["precision"].check,
    ),
    "vocab_size": Option("model", "tokens there are", count),
    "schedule": Option(
        "how it runs", f"{COMMON['schedule'].help}; or all", one_of((*schedules.__all__, "all"))
    ),
    "hardware": Option(
        "hardware",
        f"{_names(profiles())}, or a file that zfunc calibrate wrote (default: the figures below)",
        profile,
        metavar="NAME|FILE",
        words=profiles(),
    ),
    "compute_tflops": Option("hardware", "arithmetic, as reached, in TFLOP/s", positive),
    "device_gbs": Option("hardware", "device memory, in GB/s", positive),
    "d2h_gbs": Option("hardware", "device to host, in GB/s", positive),
    "h2d_gbs": Option("hardware", "host to device, in GB/s", positive),
    "host_gbs": Option("hardware", "host memory, in GB/s", positive),
    "format": Option(
        "picture",
        f"{_names(FORMATS)} (default: what --out ends in, .svg, .html or .json; else text, of --compare html)",
        one_of(FORMATS),
    ),
    "compare": Option(
        "picture",
        "folder of a run: the step that it measured, beside what its plan would take on the hardware above "
        "(default: draw a step that was not run)",
        path,
        metavar="RUN",
    ),
    "out": Option(
        "picture",
        "file to write, or to write anew (default: print the picture; of --compare: RUN/compare.html or .svg)",
        path,
        metavar="FILE",
    ),
}


EXPORT = {
    "checkpoint": Option(
        "file",
        "folder of a checkpoint; or of several, or of a run, whose newest complete one is taken",
        anything,
        metavar="CHECKPOINT",
        positional=True,
    ),
    "out": Option(
        "file", "new file to write, which ends in .safetensors; with --hf a new folder; to be given", path
    ),
    "hf": Option(
        "file",
        "folder of the Hugging Face model that training began with: write one like it (default: one file)",
        path,
        metavar="FOLDER",
    ),
    "dtype": Option("file", f"type of the weights: {_names(WEIGHTS)}; fp32 is exact", one_of(WEIGHTS)),
}

DOCTOR = {"json": Option("output", "print one JSON object, for programs", anything)}


@frozen(kw_only=True)
class Settings:
    """A training job. The defaults are that of `zfunc train`, made to end within 3 minutes on two cores.

    None stands for what is only known when the job starts; the help of the option tells. Raises ValueError for
    values that cannot be run, alone or together.
    """

    config: Path | None = None
    data: Path | None = None
    dtype: str = "uint16"
    tokenizer: Path | None = None
    vocab_size: int | None = None
    hf: Path | None = None
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    seq_length: int = 128
    dropout: float = 0.0
    batch_size: int = 8
    micro_batches: int = 1
    lr: float = 4e-3
    warmup: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    steps: int | None = 1500
    seconds: float | None = 140.0
    eval_every: int = 250
    out: Path | None = None
    save_every: int | None = None
    keep: int = 2
    resume: str | None = None
    device: str = "auto"
    precision: str = "auto"
    moments: str = "fp32"
    schedule: str = "Overlapped"
    recompute: str = "all"
    bucket_size: int | None = None
    grad_slots: int = 2
    host_slots: int = 2
    offload_ratio: str = field(default="1", converter=str)
    speculate: int = 0
    delay_from: int | None = None
    compile_segments: bool = False
    seed: int = 0
    log_style: str = "zfunc"
    tensorboard: bool = False
    wandb: bool = False

    def __attrs_post_init__(self) -> None:
        _check(self, TRAIN)
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
            for f in attrs.fields(Settings):
                if f.name in SIZES and getattr(self, f.name) != f.default:
                    raise ValueError(
                        f"{flag(f.name)}: got it with --hf, whose config has it, expected one of them: leave one "
                        "out"
                    )
        if self.compile_segments and self.recompute == "none":
            raise ValueError(
                "--compile-segments: got it with --recompute none, expected all or min-cut: leave one out"
            )


@frozen(kw_only=True)
class Sketch:
    """A step to draw. The defaults are a model large enough to see something, on round-number hardware."""

    num_layers: int = 4
    hidden_size: int = 2048
    num_attention_heads: int = 16
    seq_length: int = 1024
    vocab_size: int = 50257
    batch_size: int = 8
    micro_batches: int = 1
    clip: float = 1.0
    precision: str = AUTO
    moments: str = "fp32"
    schedule: str = "Overlapped"
    recompute: str = "all"
    bucket_size: int = 50_000_000
    grad_slots: int = 2
    host_slots: int = 2
    hardware: str | None = None
    compute_tflops: float = ROUND.flops / 1e12
    device_gbs: float = ROUND.rates["compute"] / 1e9
    d2h_gbs: float = ROUND.rates["d2h"] / 1e9
    h2d_gbs: float = ROUND.rates["h2d"] / 1e9
    host_gbs: float = ROUND.rates["host"] / 1e9
    format: str | None = None
    compare: Path | None = None
    out: Path | None = None

    def __attrs_post_init__(self) -> None:
        _check(self, DRAW)
        check_paper(self)
        check_precision(self.hardware, self.precision)
        if self.hardware is not None:
            self._check_alone("hardware", ("hardware",), "which has these figures")
        if self.compare is not None:
            groups = "model", "step", "how it runs", "offload"
            self._check_alone("compare", groups, "which draws the run's own plan")

    def _check_alone(self, name: str, groups: Collection[str], why: str) -> None:
        """Refuse what would be ignored beside option `name`."""
        for f in attrs.fields(Sketch):
            given = getattr(self, f.name) != f.default
            if given and f.name != name and DRAW[f.name].group in groups:
                raise ValueError(
                    f"{flag(f.name)}: got it with {flag(name)}, {why}, expected one of them: leave one out"
                )


@frozen(kw_only=True)
class Export:
    """Weights to take out of a checkpoint."""

    checkpoint: Path
    out: Path | None = None
    hf: Path | None = None
    dtype: str = "fp32"

    def __attrs_post_init__(self) -> None:
        check_each(self, EXPORT)
        if self.hf is not None and not (self.hf / "config.json").is_file():
            raise ValueError(
                f"--hf: got {self.hf} with no config.json in it, expected the folder of a Hugging Face model: name "
                "the one that training began with"
            )
        if self.out is None:
            what, such = ("file", "weights.safetensors") if self.hf is None else ("folder", "trained")
            raise ValueError(f"--out: got none, expected a new {what} to write: pass such as --out {such}")


@frozen(kw_only=True)
class Doctor:
    """How to tell what is found."""

    json: bool = False


def _check(settings: Settings | Sketch, options: dict[str, Option]) -> None:
    check_each(settings, options)
    heads, parts = settings.num_attention_heads, settings.micro_batches
    multiple("hidden_size", settings.hidden_size, "num_attention_heads", heads)
    multiple("batch_size", settings.batch_size, "micro_batches", parts)
