"""Settings of `zfunc train`, a field for each option, and the fields that other commands share.

The fields' defaults are the command line's. A value that exists can be run, as far as that can be checked without
the data and the machine. No torch here: the help of `zfunc` answers at once.
"""

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import evolve, frozen

from zfunc import schedules
from zfunc.core.display import counted
from zfunc.core.dtypes import PRECISIONS
from zfunc.core.setting_values import BY_DEVICE, DISK, TIERS_OF
from zfunc.core.settings import StepSettings
from zfunc.core.shares import words_of
from zfunc.errors import DiskError, about, refuse, setting
from zfunc.models.config_file import LARGEST_SIZE, MOST_LAYERS, check_config_file
from zfunc.models.gpt_config import GPTConfig
from zfunc.optim.by_name import CLASSES
from zfunc.optim.learning_rate_schedules import linear_warmup, warmup_cosine, warmup_linear
from zfunc.options import (
    AUTO,
    count,
    flag_fields,
    json_object,
    multiple,
    not_negative,
    one_of,
    option,
    options_of,
    path,
    positive,
    probability,
    values_of_flags,
    zero_or_more,
)
from zfunc.values import NamedSettings, whole

if TYPE_CHECKING:  # their tables take time to read, which help need not wait for
    from zfunc.train.deepspeed.keys import ConfigValues
    from zfunc.train.trainer.fields import TrainerArgs

DEVICES = ("auto", "cpu", "cuda", "xpu")  # the usual ones; any other that torch has is taken, too
TOKEN_TYPES = ("uint16", "uint32")
FINE_TUNING_LR, LORA_LR = 2e-5, 2e-4
DPO, DPO_LR, DPO_LORA_LR = "dpo", 1e-6, 1e-5  # a rate of fine-tuning would leave the reference at once
LOSSES, DPO_TYPES = ("tokens", DPO), ("sigmoid", "ipo")
GPT2_VOCAB_SIZE = 50_257
FINAL_LR = 0.1  # of the peak, after a decay
LONGEST_WARMUP = 150  # steps, where `warmup` is not given
CPU_BUCKET_SIZE = 1 << 18  # elements, where none is set
PACKINGS = ("stream", "documents")
LONG = ("cut", "drop", "keep-end", "refuse")
LR_SCHEDULES = ("cosine", "linear", "constant")
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "dropout")  # which the config of `hf` has


_names = ", ".join
# Arithmetic alone refuses what would take for ever to plan.
_layers, _size = (partial(whole, least=1, most=most) for most in (MOST_LAYERS, LARGEST_SIZE))
_seed = partial(whole, least=0, most=2**63 - 1)  # a checkpoint holds no larger one

OPTIMIZERS: Mapping[str, tuple[float, float, Mapping[str, Any]]] = {
    name: x.usual for name, x in CLASSES.items()
}
"""Learning rate and weight decay where no setting says them, and other arguments where no configuration does."""


_NO_VARIABLES = (
    "conversations messages tools chat_template return_assistant_tokens_mask continue_final_message "
    "add_generation_prompt"
)


def _template_variables(name: str, value: Any) -> None:
    """Check that `value` is a JSON object without names that transformers itself passes to a chat template."""
    json_object(name, value)
    if taken := {*_NO_VARIABLES.split()} & json.loads(value).keys():
        got = f"{', '.join(sorted(taken))}, which zfunc passes to the template itself"
        refuse(name, got, "variables of its own", "leave it out")


def _by_optimizer(n: int) -> str:
    return _names(f"{x[n]:g} with {kind}" for kind, x in OPTIMIZERS.items())


def _usual(n: int) -> Any:
    """An attrs default by optimizer and kind of model: learning rate for n = 0, weight decay for n = 1."""

    def default(settings: "TrainSettings") -> float:
        if n == 0 and settings.hf is not None and settings.loss == DPO:
            return DPO_LR if settings.lora is None else DPO_LORA_LR
        if n == 0 and settings.hf is not None:
            return FINE_TUNING_LR if settings.lora is None else LORA_LR
        return OPTIMIZERS.get(settings.optimizer, OPTIMIZERS["adamw"])[n]  # an unknown one is refused later

    return attrs.Factory(default, takes_self=True)


_data, _model, _step = (partial(option, group=name) for name in ("data", "model", "step"))
_length, _folder = (partial(option, group=name) for name in ("how long", "run folder"))
_how, _log = (partial(option, group=name) for name in ("how it runs", "log"))

DEVICE = _how(
    "auto", f"{_names(DEVICES)}, or cuda:N; auto: a GPU if there is one", words=DEVICES, common=True
)
HF_CONFIG = _model(
    None,
    "config.json of a Hugging Face model, instead of its folder (default: none)",
    path,
    "FILE",
    common=True,
)
"""Fields that several commands have."""


@frozen(kw_only=True)
class ModelFlags(NamedSettings):
    """Settings of a model, a new GPT or a Hugging Face model, perhaps with adapters, and of the batch's size."""

    hf: Path | None = _model(
        None,
        "folder of a Hugging Face model: config, and to be trained safetensors and tokenizer (default: a new GPT)",
        path,
        "FOLDER",
        common=True,
    )
    text_only: bool = _model(
        False, "of a model of `hf` for images and text, read, train and export the language model alone"
    )
    lora: int | None = _model(
        None,
        "rank of LoRA adapters, which alone are trained: the model of `hf` stays as it is, in the precision of the "
        "device; needs the extra [lora] (default: the whole model is trained)",
        count,
        "RANK",
        common=True,
    )
    quantize: str | None = _model(
        None,
        "format of the frozen weights below adapters, as bitsandbytes has it, decoded where they are read: "
        "nf4 (4.13 bits a weight), nf4-single (4.5) or int8; a quantized folder needs none (default: none)",
        words=("nf4", "nf4-single", "int8"),
        common=True,
    )
    quantize_parameters: str | None = _model(
        None,
        "further tensors that `quantize` packs, which bitsandbytes leaves in 16 bits, as those of experts, by the "
        "ends of their names: experts.gate_up_proj,experts.down_proj (default: none)",
        metavar="NAMES",
    )
    lora_alpha: float | None = _model(
        None, "scale of the adapters, times their rank (default: twice the rank)", positive
    )
    lora_targets: str | None = _model(
        None,
        "modules that get adapters, by the ends of their names: q_proj,v_proj; or all-linear, for all but the head "
        "(default: those that peft has for the model, or its query, value and fused projections)",
        metavar="NAMES",
    )
    lora_target_parameters: str | None = _model(
        None,
        "tensors that get adapters, which are no modules, as those of experts, by the ends of their names: "
        "experts.gate_up_proj,experts.down_proj; modules then get none by default (default: none)",
        metavar="NAMES",
    )
    use_dora: bool = _model(
        False,
        "train a magnitude for each output of an adapted layer too; adapters then turn its weights (DoRA)",
    )
    num_layers: int = _model(4, "transformer blocks", _layers, common=True)
    hidden_size: int = _model(128, "features of a token, a multiple of the heads", _size, common=True)
    num_attention_heads: int = _model(4, "attention heads", _size, common=True)
    vocab_size: int | None = _model(
        None,
        "tokens in the vocabulary (default: those of the tokenizer; of bytes 256, of a .bin 50257 as GPT-2 has)",
        _size,
        common=True,
    )
    seq_length: int = _model(128, "tokens of a sequence", _size, common=True)
    batch_size: int = _step(
        8,
        "sequences of a step, a multiple of the ranks times the micro-batches",
        _size,
        common=True,
    )


@frozen(kw_only=True)
class GPTFlags(ModelFlags):
    """ModelFlags, and settings of the training data, which give a GPT its vocabulary; of the optimizer."""

    data: Path | None = _data(
        None,
        'a text file, JSONL ({"text": ...}, {"prompt": ..., "completion": ...} or {"messages": ...} a line), a '
        "folder of such files, a .bin of tokens as nanoGPT writes them, Parquet files, or a folder that "
        "datasets' save_to_disk wrote, with JSONL's columns, or input_ids and perhaps labels, with the extra "
        "[datasets] (default: the sources of Python's standard library)",
        path,
        common=True,
    )
    tokenizer: Path | None = _data(
        None,
        "a local tokenizer.json, or its folder, for texts (default: that of `hf`; without one, bytes are tokens)",
        path,
        "PATH",
        common=True,
        converter=lambda x: x / "tokenizer.json" if x is not None and x.is_dir() else x,
    )
    optimizer: str = _step(
        "adamw",
        f"{_names(CLASSES)}; SGD with a momentum of 0.9, Muon for hidden matrices beside AdamW",
        one_of(tuple(CLASSES)),
        common=True,
    )


STEP = options_of(StepSettings)
DRAWN = {
    "precision": STEP["precision"].offering(
        (AUTO, *PRECISIONS), f"; {AUTO}: the 16 bits that the device is fast in, fp32 on a CPU"
    ),
    "schedule": STEP["schedule"].offering((BY_DEVICE, *schedules.__all__)),
}
CHOSEN = {
    **DRAWN,
    **{
        name: STEP[name].offering(
            (*STEP[name].words, AUTO), f". {AUTO}: the nearest that fits, and of zfunc plan the fastest"
        )
        for name in (*TIERS_OF, "recompute")
    },
    "update_on": STEP["update_on"].offering(
        (*STEP["update_on"].words, AUTO), f". {AUTO}: where updates take least"
    ),
    "bucket_size": evolve(
        STEP["bucket_size"],
        help=f"{STEP['bucket_size'].help}; on a CPU {CPU_BUCKET_SIZE:,}, to fit its caches",
    ),
}
"""Options of a step that commands know more of than `zfunc.compile`: `DRAWN` in any of them, `CHOSEN` where "auto"
is chosen for the machine."""

step_flags = partial(flag_fields, StepSettings, precision=AUTO, clip=1.0)
StepFlags = step_flags(GPTFlags, CHOSEN)


@frozen(kw_only=True)
class TrainSettings(StepFlags):
    """Settings of `zfunc train`. The defaults' 1,000 steps end within 3 minutes on two slow cores.

    None stands for a default that depends on the machine or the data; the option's help says which. If `epochs` is
    set, `prepare_job` computes `steps`. `config` and `trainer_args` are files as read. Raises ValueError for values
    that cannot be run, alone or together.
    """

    config: "ConfigValues | None" = option(
        None,
        f"a DeepSpeed configuration, JSON. It decides; flags set what it leaves out or has as {AUTO} "
        "(default: none)",
        metavar="FILE",
        group="configuration",
        common=True,
    )
    trainer_args: "TrainerArgs | None" = option(
        None,
        "arguments of transformers' Trainer or of TRL's, JSON or YAML. What they set decides (default: none)",
        metavar="FILE",
        group="configuration",
        common=True,
    )
    eval_data: Path | None = _data(
        None,
        "data to evaluate on, as for `data`, of which all is then trained on (default: about a tenth of `data` is "
        "held out)",
        path,
        common=True,
    )
    stream: bool = _data(
        False,
        "train on JSONL, Parquet and Arrow files as they are read, pass after pass, without packing them first: "
        "`data` is a file, a folder (also of `save_to_disk`) or a pattern such as 'shards/*.jsonl.gz'; a resume "
        "goes on at the next record",
    )
    shuffle_buffer: int | None = _data(
        None,
        "with `stream`, records that are read before they are drawn in a random order; files are, too. 1: as they "
        "are (default: 1000)",
        count,
        "RECORDS",
    )
    packing: str = _data(
        "stream",
        f"how documents are put into sequences: {_names(PACKINGS)}. stream: one after another, cut anywhere; a "
        "token attends to all before it in its sequence. documents: whole ones, each computed as if it were alone; "
        "the rest of the sequence is padding",
        one_of(PACKINGS),
    )
    long_documents: str = _data(
        "cut",
        f"what becomes of documents longer than a sequence, with `packing=documents`: {_names(LONG)}. cut: pieces, "
        "each computed as if it were alone; keep-end: the last tokens of each; refuse: an error",
        one_of(LONG),
    )
    chat_template_args: str | None = _data(
        None,
        'variables of the chat template, as JSON: {"enable_thinking": false} (default: none)',
        _template_variables,
        "JSON",
    )
    dtype: str = _data("uint16", f"dtype of the tokens in a .bin: {_names(TOKEN_TYPES)}", one_of(TOKEN_TYPES))
    loss: str = _step(
        LOSSES[0],
        f"what is learned: {_names(LOSSES)}. dpo: preferences, records of prompt, chosen and rejected answer, "
        "against the model as the run began (its frozen reference); a sequence is a prompt with one answer",
        one_of(LOSSES),
        words=LOSSES,
        common=True,
    )
    dpo_beta: float | None = _step(
        None, "with `loss=dpo`, the strength of the tie to the reference (default: 0.1)", positive
    )
    dpo_type: str | None = _step(
        None, f"with `loss=dpo`: {_names(DPO_TYPES)} (default: {DPO_TYPES[0]})", one_of(DPO_TYPES)
    )
    dropout: float = _model(0.0, "probability of dropping an activation", probability)
    lr: float = _step(
        _usual(0),
        f"peak learning rate (default: {FINE_TUNING_LR:g} with `hf`, {LORA_LR:g} with `lora`, with `loss=dpo` "
        f"{DPO_LR:g} and {DPO_LORA_LR:g}, else {_by_optimizer(0)})",
        positive,
        common=True,
    )
    lr_schedule: str = _step(
        "cosine",
        f"what the learning rate does after the warm-up: {_names(LR_SCHEDULES)}; it falls to a tenth of `lr` at "
        "the last step, or stays",
        one_of(LR_SCHEDULES),
    )
    warmup: int | None = _step(
        None,
        "steps in which the learning rate rises to `lr` (default: a tenth of all, at most 150)",
        zero_or_more,
    )
    weight_decay: float = _step(
        _usual(1),
        f"weight decay of matrices and embeddings, not of norms and biases (default: {_by_optimizer(1)})",
        not_negative,
    )
    steps: int | None = _length(
        1000,
        "steps to train, and of `lr_schedule`; with `seconds` alone there is no limit, and no decay",
        count,
        common=True,
    )
    epochs: float | None = _length(
        None,
        "passes over the data, also parts of one, instead of `steps` (default: 1 with `hf`, where none of `steps`, "
        "`epochs` and `seconds` is given)",
        positive,
        common=True,
    )
    seconds: float | None = _length(
        None,
        "seconds to train, with evaluations and those before a resume: the step in which they have passed is the "
        "last; the learning rate follows `steps`, however many are taken (default: no limit)",
        positive,
        common=True,
    )
    eval_every: int = _length(
        250,
        "steps between held-out evaluations, beside those before the first step and after the last; 0: none at all",
        zero_or_more,
    )
    early_stopping: int | None = _length(
        None,
        "end the training after so many evaluations in a row without a lower held-out loss; the one before the "
        "first step is the first (default: never)",
        count,
        "EVALUATIONS",
    )
    early_stopping_threshold: float = _length(
        0.0,
        "with `early_stopping`, by how much more a held-out loss has to be lower than the least before it, in its "
        "unit: bits per byte or token, of `loss=dpo` its own",
        not_negative,
    )
    no_sample: bool = _length(False, "do not sample from the model at the end")
    out: Path | None = _folder(
        None,
        f"run folder, new or empty, or with `resume={AUTO}` the run's own (default: runs/DATE-TIME)",
        path,
        "FOLDER",
        common=True,
    )
    save_every: int | None = _folder(
        None,
        "steps between checkpoints, beside that of the last step; 0 saves none at all (default: the last step "
        "alone)",
        zero_or_more,
        common=True,
    )
    keep: int = _folder(2, "how many checkpoints to keep; older ones are deleted", count)
    keep_best: bool = _folder(
        False,
        "save a checkpoint after each evaluation whose held-out loss is the least, and keep the best beside the "
        "newest `keep`: `zfunc export RUN` takes it",
    )
    resume: str | None = _folder(
        None,
        f"continue from a checkpoint, or from the newest in a folder of them or in a run; {AUTO}: from the newest "
        "in `out`, or from the beginning if it has none (default: from the beginning)",
        metavar=f"PATH|{AUTO}",
        common=True,
    )
    device: str = DEVICE
    seed: int = _how(0, "seed of initial values, the order of data, dropout and the sample", _seed)
    tensorboard: bool = _log(
        False, "log every step to TensorBoard too, in RUN/tensorboard; needs the extra [tensorboard]"
    )
    wandb: bool = _log(
        False,
        "log every step to Weights & Biases too, in RUN/wandb; offline unless WANDB_MODE says otherwise; needs "
        "the extra [wandb]",
    )
    trackio: bool = _log(
        False, "log every step to trackio too, in RUN/trackio (TRACKIO_DIR); needs the extra [trackio]"
    )

    def recorded(self) -> dict[str, Any]:
        """The settings by name, as a run folder and a checkpoint record them: a file that was read by its path."""
        return attrs.asdict(self, value_serializer=lambda _, __, x: getattr(x, "source", x))

    def warmup_of(self, total: int | None) -> int:
        """The number of warm-up steps in a training of `total` steps, None if their number is not known."""
        usual = LONGEST_WARMUP if total is None else min(LONGEST_WARMUP, total // 10)
        return usual if self.warmup is None else self.warmup

    def learning_rate(self, total: int | None) -> Callable[[int], float]:
        """The learning rate by step: a warm-up, then `lr_schedule` until step `total`; without a `total` it does
        not decay after the warm-up."""
        warmup = self.warmup_of(total)
        if total is None or self.lr_schedule == "constant":
            return linear_warmup(self.lr, warmup)
        decaying = warmup_linear if self.lr_schedule == "linear" else warmup_cosine
        return decaying(self.lr, min(warmup, total - 1), total, final=FINAL_LR * self.lr)

    @property
    def beta(self) -> float:
        """DPO's beta, which weighs how close the model stays to its reference; 0.1 by default."""
        return 0.1 if self.dpo_beta is None else self.dpo_beta

    def __attrs_post_init__(self) -> None:
        for name in ("config", "trainer_args"):
            if isinstance(given := getattr(self, name), str | Path):
                refuse(
                    name, f"the path {given}", "the file as read", "read it first, as the command line does"
                )
        check_together(self)
        if self.config is not None:
            self.config.check(attrs.asdict(self, recurse=False))
        if self.resume == AUTO and self.out is None:
            got = "no `out`"
            refuse(f"`resume={AUTO}`", got, "the run's folder, which may be new", "add such as `out=run`")
        if DISK in words_of(self.state_on) and self.save_every:
            got = f"{self.save_every} with `state_on={self.state_on}`, whose swap space is the checkpoint"
            refuse("save_every", got, "`commit_every`", "pass that instead")
        for name, on in (("early_stopping", self.early_stopping), ("keep_best", self.keep_best)):
            if on and not self.eval_every:
                refuse(name, "it with `eval_every=0`", "evaluations", "raise `eval_every`")
        if self.early_stopping_threshold and self.early_stopping is None:
            refuse("early_stopping_threshold", "it without `early_stopping`", "both", "add `early_stopping`")
        if self.keep_best and (self.save_every == 0 or DISK in words_of(self.state_on)):
            other = "save_every" if self.save_every == 0 else "state_on"
            got = f"it with {setting(other, getattr(self, other))}, which saves no checkpoints"
            refuse("keep_best", got, "some", "leave one out")
        for name in ("dpo_beta", "dpo_type"):
            if self.loss != DPO and getattr(self, name) is not None:
                refuse(name, "it without `loss=dpo`", "both", "add `loss=dpo`")
        for name, usual in {"packing": PACKINGS[0], "tiles": 1}.items() if self.loss == DPO else ():
            if str(getattr(self, name)) not in (str(usual), "None"):
                got = f"{getattr(self, name)} with `loss=dpo`, whose sequences are a prompt with one answer"
                refuse(name, got, "none", "leave it out")
        _check_stream(self)
        if self.loss != DPO and self.packing != "documents" and self.long_documents != "cut":
            got = f"{self.long_documents} with `packing={self.packing}`, which cuts anywhere"
            refuse("long_documents", got, "`packing=documents`", "add it")
        if self.steps is self.epochs is self.seconds is None:
            refuse(("steps", "epochs", "seconds"), "none", "one", "pass such as `steps=1000`")
        if self.steps is not None and self.warmup is not None and self.warmup >= self.steps:
            got = f"{self.warmup} of {counted(self.steps, 'step')}"
            refuse("warmup", got, "fewer", "lower it, or raise `steps`")


ENDLESS = "`stream`, of which nobody knows how long a pass is"
"""What an error says about a number of passes over streamed data."""


def _check_stream(settings: TrainSettings) -> None:
    """Raise ValueError for settings that `stream` rules out, as `epochs`, and for `shuffle_buffer` without it."""
    if not settings.stream:
        if settings.shuffle_buffer is not None:
            refuse("shuffle_buffer", "it without `stream`", "both", "add `stream`")
        return
    if settings.data is None:
        refuse("stream", "it without `data`", "both", "add such as `data=shards`")
    for name, usual in {"packing": PACKINGS[0], "loss": LOSSES[0]}.items():
        if (value := getattr(settings, name)) != usual:
            refuse(name, f"{value} with `stream`", usual, "leave one out")
    if settings.epochs is not None:
        got = f"{settings.epochs:g} with {ENDLESS}"
        refuse("epochs", got, "`steps` or `seconds`", "pass such as `steps=1000`")
    if settings.eval_every and settings.eval_data is None:
        got = "none with `stream`, of which nothing is held out"
        refuse("eval_data", got, "data to evaluate on", "add `eval_data`, or `eval_every=0`")


READ = {
    "data": "what is to be trained on",
    "eval_data": "what is to be evaluated on",
    "tokenizer": "a tokenizer.json, as save_pretrained writes it",
    "resume": "a checkpoint, a folder of them, or a run",
}
"""What a setting that names a file or folder to read is expected to name."""


def check_exists(name: str, place: Path | None) -> None:
    """Raise ValueError unless the path `place`, the value of setting `name`, exists; None passes."""
    if place is not None and not place.exists():
        do = "name the folder, as patterns are for `stream`" if "*" in place.name else "check the path"
        refuse(name, f"{place}, which does not exist", READ[name], do)


@contextmanager
def reading(name: str, place: Path | None) -> Generator[None]:
    """A context that turns an error in reading the data of setting `name` into a ValueError with that name."""
    try:
        yield
    except DiskError:  # of the folder that keeps its tokens
        raise
    except OSError as error:
        got = f"{error.filename or place}, which cannot be read ({error.strerror})"
        expected = "text, JSONL, a folder of them, a dataset or a .bin of tokens"
        refuse(name, got, expected, "check the path and its permissions", cause=error)
    except ValueError as error:
        raise ValueError(about(name, error)) from error


def check_paths(settings: TrainSettings) -> None:
    """Raise ValueError for a missing path, a swap folder in memory, a record among the first that is no
    document, or a chat template that is invalid Jinja or refuses the chats.

    Needs no torch, so that a mistyped path or a malformed chat is reported at once.
    """
    from zfunc.checkpoint.durable_files import check_folders
    from zfunc.train.data.documents import first_look
    from zfunc.train.data.files import stream_files
    from zfunc.train.data.records import CHAT
    from zfunc.train.data.tokenizer import check_chats, check_template

    for name in READ:
        place = getattr(settings, name)
        if name != "data" or not settings.stream:
            check_exists(name, None if place in (None, AUTO) else Path(place))
    if settings.hf is not None:
        try:
            check_config_file(settings.hf)
        except ValueError as error:
            raise ValueError(about("hf", error)) from error
    if settings.swap:
        check_folders([Path(folder).expanduser() for folder in settings.swap])
    chats = dict[str, list[Any]]()
    for name, place in {"data": settings.data, "eval_data": settings.eval_data}.items():
        with reading(name, place):
            places = [] if place is None else [Path(place)]
            if name == "data" and settings.stream and place is not None:
                places = [x for _, x in stream_files(place)[0]]
            looks = (first_look(x, pairs=settings.loss == DPO) for x in places[:10])
            looked = next(filter(None, looks), [])  # the first files may be empty
            chats[name] = [x.values for x in looked if x.kind == CHAT]
    folder = settings.hf if settings.tokenizer is None else settings.tokenizer.parent
    if any(chats.values()) and folder is not None and (template := check_template(folder)) is not None:
        for name, own in chats.items():
            with reading(name, None):
                check_chats(template, own, json.loads(settings.chat_template_args or "{}"))


NEEDED = {
    **dict.fromkeys(("text_only", "lora"), "hf"),
    **dict.fromkeys(("quantize", "quantize_parameters"), "lora"),
    **dict.fromkeys(("lora_alpha", "lora_targets", "lora_target_parameters", "use_dora"), "lora"),
}
"""Settings of a Hugging Face model, and the setting without which each means nothing."""


def check_pretrained(settings: Any) -> None:
    """Raise ValueError for flags that contradict a Hugging Face model, or need one if no model is named."""
    sources = [x for x in ("hf", "hf_config") if getattr(settings, x, None) is not None]
    if len(sources) > 1:
        refuse("hf_config", "it with `hf`", "one of them", "leave one out")
    for name, needs in NEEDED.items():
        missing = not sources if needs == "hf" else getattr(settings, needs) is None
        if getattr(settings, name) not in (None, False) and missing:
            refuse(name, f"it without `{needs}`", "both", f"add `{needs}`")
    for f in attrs.fields(type(settings)) if sources else ():
        if f.name in SIZES and getattr(settings, f.name) != f.default:
            got = f"it with `{sources[0]}`, whose config sets it"
            refuse(f.name, got, "one of them", "leave one out")


def check_rows(batch_size: int, world: int, micro_batches: int, rows: int = 1) -> None:
    """Raise ValueError unless the batch divides into `micro_batches` on each of `world` ranks, in groups of `rows`.

    >>> check_rows(10, 4, 2)
    Traceback (most recent call last):
    zfunc.errors.SettingError: batch_size: got 10 for 4 ranks with 2 micro-batches each, expected ...
    """
    parts = world * micro_batches * rows
    if batch_size % parts:
        each = f" with {micro_batches} micro-batches each" if micro_batches > 1 else ""
        each += " of pairs" if rows > 1 else ""
        do = f"try {setting('batch_size', max(parts, batch_size // parts * parts))}"
        refuse("batch_size", f"{batch_size} for {counted(world, 'rank')}{each}", f"a multiple of {parts}", do)


def step_settings(flags: Any, **changes: Any) -> StepSettings:
    """The StepSettings that a command's `flags` give, with `changes` by field name."""
    return StepSettings(**{**values_of_flags(StepSettings, flags), **changes})


def check_together(settings: Any) -> None:
    """Raise ValueError for training settings that exclude one another, or that no step can have."""
    check_pretrained(settings)
    given = values_of_flags(StepSettings, settings)
    if given["precision"] == AUTO:  # which the machine decides
        del given["precision"]
    StepSettings(**{name: value for name, value in given.items() if value is not None})
    heads, parts = settings.num_attention_heads, settings.micro_batches
    multiple("hidden_size", settings.hidden_size, "num_attention_heads", heads)
    multiple("batch_size", settings.batch_size, "micro_batches", parts)


# --- the GPT of a command's flags, without torch ----------------------------------------------------------


def gpt_config(settings: GPTFlags) -> GPTConfig:
    """The GPTConfig of the model that a command's `settings` describe."""
    return GPTConfig(
        vocab_size=settings.vocab_size or _vocabulary(settings),
        seq_length=settings.seq_length,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        dropout=getattr(settings, "dropout", 0.0),
    )


def _vocabulary(settings: GPTFlags) -> int:
    """The vocabulary size that `prepare_job` will find, without reading the data: GPT-2's for a file of tokens,
    else that of the tokenizer, or 256 for bytes."""
    from zfunc.train.data.documents import holds_tokens
    from zfunc.train.data.tokenizer import BYTES, open_tokenizer

    if settings.data is not None and holds_tokens(settings.data):
        return GPT2_VOCAB_SIZE
    return BYTES.vocab_size if settings.tokenizer is None else open_tokenizer(settings.tokenizer).vocab_size
