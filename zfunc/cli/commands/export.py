"""`zfunc export`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import NOTHING, frozen

from zfunc.cli.parser import EXIT_OK, Command, in_flags
from zfunc.cli.terminal import logged
from zfunc.core.display import counted
from zfunc.core.dtypes import PRECISIONS
from zfunc.errors import SettingError, refuse, setting
from zfunc.options import one_of, option, path
from zfunc.runtime.memory_limits import check_addresses
from zfunc.units import format_bytes

if TYPE_CHECKING:
    from zfunc.checkpoint.export import ExportedWeights

FORMATS = ("safetensors", "dcp")
_file = partial(option, group="file")


@frozen(kw_only=True)
class ExportSettings:
    """Settings of `zfunc export`: a checkpoint, and which of its weights to write in which format."""

    checkpoint: Path = _file(
        NOTHING,
        "folder of a checkpoint; or of several, or of a run, whose newest complete one is taken, or with "
        "--keep-best the best",
        metavar="CHECKPOINT",
        positional=True,
    )
    out: Path = _file(
        NOTHING,
        "new file to write, which ends in .safetensors; with `hf` or `format` dcp a new folder; to be given",
        path,
    )
    hf: Path | None = _file(
        None,
        "folder of the Hugging Face model that training began with: write one like it (default: one file)",
        path,
        "FOLDER",
    )
    adapter_only: bool = _file(
        False, "of a run with --lora write the adapters alone, as peft does, and do not merge them"
    )
    format: str = _file(
        "safetensors",
        "safetensors; or dcp, fp32 weights and Adam's moments for torch.distributed.checkpoint",
        one_of(FORMATS),
        "|".join(FORMATS),
    )
    ema: bool = _file(False, "the moving average of the weights, of a training with --ema")
    dtype: str = _file(
        "fp32", f"type of the weights: {', '.join(PRECISIONS)}; fp32 is exact", one_of(PRECISIONS)
    )

    def __attrs_post_init__(self) -> None:
        if self.adapter_only and self.hf is None:
            refuse("adapter_only", "it without `hf`", "the adapters' model", "add `hf`")
        if self.format == "dcp" and (self.hf is not None or self.ema or self.dtype != "fp32"):
            refuse("format", "dcp beside `hf`, `ema` or `dtype`", "it alone", "leave those out")


def run_export(settings: ExportSettings) -> int:
    """Run `zfunc export`: write weights of a checkpoint as a file or a Hugging Face folder."""
    check_addresses()
    from zfunc.checkpoint.export import SUFFIX, export_weights
    from zfunc.train.run_history import best_checkpoint, settings_of

    source = best_checkpoint(settings.checkpoint) or settings.checkpoint
    out, given = settings.out, {"dtype": settings.dtype, "ema": settings.ema}
    trained = settings_of(source)
    if settings.format == "dcp":
        from zfunc.checkpoint.dcp import export_dcp

        x = export_dcp(source, out)
        print(_written(x))
        return EXIT_OK
    if settings.hf is None and (began := trained.get("hf")):
        like = f"add {setting('hf', began)} for a folder like the Hugging Face model that training began with"
        if out.suffix != SUFFIX:
            refuse("out", str(out), f"a name that ends in {SUFFIX} for one file", like)
        print(in_flags(f"one file: {like}", COMMAND.options))
    with logged(COMMAND.options):
        if settings.hf is None:
            x = export_weights(source, out, **given)
        else:
            from zfunc.models import hf
            from zfunc.train.pretrained import adapters

            lora, alone = adapters(trained), settings.adapter_only
            try:
                x = hf.export(source, out, config=settings.hf, lora=lora, adapter_only=alone, **given)
            except SettingError as error:
                if error.names != ("config",):
                    raise
                do = f"name the model that training began with, {trained.get('hf') or 'or leave it out'}"
                got = f"{settings.hf}, {error.got.removeprefix('one ')}"
                refuse("hf", got, error.expected, do, cause=error)
    print(_written(x))
    return EXIT_OK


def _written(x: "ExportedWeights") -> str:
    what = f"{counted(x.parameters, 'parameter')} of step {x.step} as {x.dtype}, {format_bytes(x.bytes)}"
    return f"written: {x.path}: {what}"


COMMAND = Command(
    "write a checkpoint's weights for other programs",
    "As one safetensors file; or, with --hf, as a folder that from_pretrained loads. Adapters of --lora are merged "
    "into the model.",
    ExportSettings,
    run_export,
    """
    # the newest checkpoint of a run
    zfunc export run --out weights.safetensors
    # one of them, in bf16
    zfunc export run/checkpoints/step-00001000 --dtype bf16 \\
        --out weights.safetensors
    # a fine-tuned Hugging Face model
    zfunc export run --hf model --out tuned
    # its adapters alone, for peft
    zfunc export run --hf model --adapter-only --out adapter
    """,
)
