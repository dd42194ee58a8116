"""`zfunc import`."""

from functools import partial
from pathlib import Path

from attrs import NOTHING, frozen

from zfunc.cli.parser import EXIT_OK, Command
from zfunc.cli.terminal import logged
from zfunc.errors import refuse
from zfunc.options import flag, option, path
from zfunc.runtime.host_memory import check_addresses

_file = partial(option, group="file")
# Fields of a LoraConfig that change no training
_OF_FILES = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)


@frozen(kw_only=True)
class ImportSettings:
    """Settings of `zfunc import`: a checkpoint of another program, and the checkpoint to make of it."""

    source: Path = _file(
        NOTHING,
        "folder of a DCP, or of a checkpoint of Trainer, with or without FSDP and adapters, or of DeepSpeed",
        metavar="FOLDER",
        positional=True,
    )
    out: Path = _file(NOTHING, "new folder, to resume from; to be given", path, "FOLDER")
    hf: Path | None = _file(
        None,
        "folder of the Hugging Face model that training began with; it says what is frozen, tied or a buffer "
        "(default: every parameter is trained)",
        path,
        "FOLDER",
    )
    text_only: bool = _file(False, "of a model of images and text the language model alone")
    quantize: str | None = _file(
        None,
        "nf4, nf4-single or int8: format of the frozen weights below adapters, as the training has it that goes on "
        "(default: none)",
        words=("nf4", "nf4-single", "int8"),
    )
    sequences: int | None = _file(
        None, "sequences that were trained on, where the data goes on (default: what the files say, else 0)"
    )
    allow_pickle: bool = _file(
        False, "run the code that pickled files may have; for files of people you trust alone"
    )

    def __attrs_post_init__(self) -> None:
        for name in ("text_only", "quantize"):
            if getattr(self, name) and self.hf is None:
                refuse(name, "it without `hf`", "both", "add `hf`")


def run_import(settings: ImportSettings) -> int:
    """Run `zfunc import`: write another program's run as a checkpoint of zfunc."""
    check_addresses()
    from zfunc.checkpoint.import_run import adapters_in, import_run, is_trainer

    lora = adapters_in(settings.source)
    if settings.quantize is not None and lora is None:
        got = f"it for {settings.source}, which has no adapter_config.json"
        refuse("quantize", got, "a run of adapters", "name its folder, or leave it out")
    with logged(COMMAND.options):
        segments, groups = (), ()
        if settings.hf is not None:
            from zfunc.models import hf

            given = {"lora": lora, "text_only": settings.text_only}
            segments = hf.load(settings.hf, **given, quantize=settings.quantize)[1]
            groups = hf.trainer_groups(settings.hf, **given) if is_trainer(settings.source) else ()
        x = import_run(
            settings.source,
            settings.out,
            segments=segments,
            groups=groups,
            sequences=settings.sequences,
            allow_pickle=settings.allow_pickle,
        )
    print(f"written: {x.path}: {x.parameters} parameters of step {x.step}, after {x.sequences:,} sequences")
    if lora is not None and settings.hf is not None:
        print(f"adapters: {adapter_flags(lora)}")
    return EXIT_OK


def adapter_flags(folder: Path) -> str:
    """The options of `zfunc train` for peft's adapters in `folder`, or a sentence on what none of them can set."""
    from zfunc.models import hf

    theirs = type(hf.lora_config(1)).from_pretrained(str(folder))
    modules, tensors = theirs.target_modules, theirs.target_parameters
    given = {"alpha": theirs.lora_alpha}
    if modules:
        given["targets"] = modules if isinstance(modules, str) else ",".join(sorted(modules))
    if tensors:
        given["parameters"] = ",".join(tensors)
    ours = hf.lora_config(theirs.r, **given).to_dict()
    other = [x for x, value in theirs.to_dict().items() if (value or None) != (ours[x] or None)]
    if other := sorted({*other} - {*_OF_FILES}):
        python = "go on in Python, with zfunc.hf.load(folder, lora=checkpoint)"
        return f"zfunc train has no option for {', '.join(other)}: {python}"
    names = {"alpha": "lora_alpha", "targets": "lora_targets", "parameters": "lora_target_parameters"}
    # A value is written in full: fewer digits of an alpha would be another scale.
    return " ".join([f"{flag('lora')} {theirs.r}", *(f"{flag(names[x])} {y}" for x, y in given.items())])


COMMAND = Command(
    "take up a training of FSDP2, torchtitan, Trainer or DeepSpeed",
    "Weights, both moments of Adam and the step become a checkpoint of zfunc, to the bit. zfunc train --resume "
    "goes on from it; learning rate, weight decay and data are those of its own options.",
    ImportSettings,
    run_import,
    """
    # a Trainer's checkpoint with FSDP; then zfunc train --hf model --resume taken
    zfunc import out/checkpoint-500 --hf model --out taken
    # the last checkpoint of DeepSpeed, of any stage
    zfunc import out --out taken
    """,
)
