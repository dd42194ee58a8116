"""`zfunc import`."""

from dataclasses import fields
from functools import partial
from pathlib import Path

from attrs import NOTHING, frozen

from zfunc.cli.parser import EXIT_OK, Command
from zfunc.cli.terminal import logged
from zfunc.core.display import counted
from zfunc.errors import SettingError, refuse
from zfunc.options import count, flag, option, path, zero_or_more
from zfunc.runtime.memory_limits import check_addresses

_file = partial(option, group="file")


@frozen(kw_only=True)
class ImportSettings:
    """Settings of `zfunc import`: a checkpoint of another program, and the checkpoint to make of it."""

    source: Path = _file(
        NOTHING,
        "folder of a DCP, or of a checkpoint of Trainer, with or without FSDP and adapters, or of DeepSpeed; of "
        "several steps the last complete one",
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
    quantize_parameters: str | None = _file(
        None,
        "further tensors in that format, as the training has them, by the ends of their names (default: none)",
        metavar="NAMES",
    )
    head_dim: int | None = _file(
        None,
        "size of an attention head, where torchtitan has moments of queries, keys and values in one tensor "
        "(default: that of the model of `hf`)",
        count,
    )
    sequences: int | None = _file(
        None,
        "sequences that were trained on, where the data goes on (default: what the files say, else 0)",
        zero_or_more,
    )
    allow_pickle: bool = _file(
        False, "run the code that pickled files may have; for files of people you trust alone"
    )

    def __attrs_post_init__(self) -> None:
        for name in ("text_only", "quantize"):
            if getattr(self, name) and self.hf is None:
                refuse(name, "it without `hf`", "both", "add `hf`")
        if self.quantize_parameters and not self.quantize:
            refuse("quantize_parameters", "it without `quantize`", "both", "add `quantize`")


def run_import(settings: ImportSettings) -> int:
    """Run `zfunc import`: write another program's run as a checkpoint of zfunc."""
    check_addresses()
    from zfunc.checkpoint.import_run import adapters_in, check_new, find_run, import_run

    with logged(COMMAND.options):
        found = find_run(settings.source, allow_pickle=settings.allow_pickle)
        check_new(settings.out)
        lora = adapters_in(found.folder)
        if settings.quantize is not None and lora is None:
            got = f"it for {found.folder}, which has no adapter_config.json"
            refuse("quantize", got, "a run of adapters", "name its folder, or leave it out")
        segments, groups = (), ()
        if settings.hf is not None:
            from zfunc.models import hf
            from zfunc.train.pretrained import names_in

            given = {"lora": lora, "text_only": settings.text_only}
            packed = {
                "quantize": settings.quantize,
                "quantize_parameters": names_in(settings.quantize_parameters),
            }
            try:
                _, segments = hf.load(settings.hf, **given, **packed)
            except SettingError as error:
                if lora is not None or error.names != ("quantize",):
                    raise
                got = f"{settings.hf}, which is quantized, for {found.folder} without adapter_config.json"
                do = "name that; of a run of adapters copy adapter_config.json there"
                refuse("hf", got, "the model in 16 bits that training began with", do, cause=error)
            groups = hf.trainer_groups(settings.hf, **given) if "groups" in found.takes else ()
        x = import_run(
            found,
            settings.out,
            segments=segments,
            groups=groups,
            head_dim=settings.head_dim,
            sequences=settings.sequences,
            allow_pickle=settings.allow_pickle,
        )
    parameters = counted(x.parameters, "parameter")
    print(f"written: {x.path}: {parameters} of step {x.step}, after {counted(x.sequences, 'sequence')}")
    if lora is not None and settings.hf is not None:
        print(f"adapters: {adapter_flags(lora)}")
    return EXIT_OK


def adapter_flags(folder: Path) -> str:
    """Options of `zfunc train` that make adapters like peft's in `folder`; if no options can, a sentence with
    the fields of peft's config that have no option."""
    from peft import PeftConfig

    from zfunc.models import hf

    theirs = type(hf.lora_config(1)).from_pretrained(str(folder))
    modules, tensors = theirs.target_modules, theirs.target_parameters
    given = {"alpha": theirs.lora_alpha, **({"use_dora": True} if theirs.use_dora else {})}
    if modules:
        given["targets"] = modules if isinstance(modules, str) else ",".join(sorted(modules))
    if tensors:
        given["parameters"] = ",".join(tensors)
    ours = hf.lora_config(theirs.r, **given).to_dict()
    other = [x for x, value in theirs.to_dict().items() if (value or None) != (ours[x] or None)]
    # What configurations of all adapters have changes no training.
    if other := sorted({*other} - {x.name for x in fields(PeftConfig)}):
        python = "go on in Python, with zfunc.hf.load(folder, lora=checkpoint)"
        return f"zfunc train has no option for {', '.join(other)}: {python}"
    names = {"alpha": "lora_alpha", "targets": "lora_targets", "parameters": "lora_target_parameters"}
    # A value is written in full: fewer digits of an alpha would be another scale.
    options = {flag("lora"): theirs.r, **{flag(names.get(x, x)): y for x, y in given.items()}}
    return " ".join(x if y is True else f"{x} {y}" for x, y in options.items())


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
