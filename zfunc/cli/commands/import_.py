"""`zfunc import`."""

from functools import partial
from pathlib import Path

from attrs import NOTHING, frozen

from zfunc.cli.parser import EXIT_OK, Command
from zfunc.cli.terminal import logged
from zfunc.options import option, path
from zfunc.runtime.host_memory import check_addresses

_file = partial(option, group="file")


@frozen(kw_only=True)
class ImportSettings:
    """Settings of `zfunc import`: a checkpoint of another program, and the checkpoint to make of it."""

    source: Path = _file(
        NOTHING,
        "folder of a DCP, of a Trainer's checkpoint with FSDP, or of a checkpoint of DeepSpeed",
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
    sequences: int | None = _file(
        None, "sequences that were trained on, where the data goes on (default: what the files say, else 0)"
    )
    allow_pickle: bool = _file(
        False, "run the code that pickled files may have; for files of people you trust alone"
    )


def run_import(settings: ImportSettings) -> int:
    """Run `zfunc import`: write another program's run as a checkpoint of zfunc."""
    check_addresses()
    from zfunc.checkpoint.import_run import import_run

    with logged(COMMAND.options):
        segments = ()
        if settings.hf is not None:
            from zfunc.models import hf

            segments = hf.load(settings.hf, text_only=settings.text_only)[1]
        x = import_run(
            settings.source,
            settings.out,
            segments=segments,
            sequences=settings.sequences,
            allow_pickle=settings.allow_pickle,
        )
    print(f"written: {x.path}: {x.parameters} parameters of step {x.step}, after {x.sequences:,} sequences")
    return EXIT_OK


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
