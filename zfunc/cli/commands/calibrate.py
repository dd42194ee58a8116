"""`zfunc calibrate`: measure this machine into a hardware profile, by training a few steps."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from zfunc.cli.parser import EXIT_OK, Command, write_file
from zfunc.cli.terminal import logged
from zfunc.errors import refuse
from zfunc.options import count, file_to_write, option
from zfunc.runtime.memory_limits import check_addresses
from zfunc.train.settings import (
    CHOSEN,
    DEVICE,
    HF_CONFIG,
    NEEDED,
    ModelFlags,
    TrainSettings,
    check_rows,
    check_together,
    step_flags,
    step_settings,
)

if TYPE_CHECKING:
    from zfunc.planner.profile import Profile

# Settings that change nothing of what is measured
UNMEASURED = ("schedule", "compile_segments", "slots", "defer")
_measured = partial(option, group="measurement", common=True)

MeasuredStepFlags = step_flags(ModelFlags, CHOSEN, without=UNMEASURED)


@frozen(kw_only=True)
class CalibrateSettings(MeasuredStepFlags):
    """Settings of `zfunc calibrate`: the model to measure with. It should be like the models to be planned
    later."""

    hf_config: Path | None = HF_CONFIG
    device: str = DEVICE
    turns: int = _measured(20, "steps that are measured, after 3 that are not", count)
    folder: Path = _measured(
        Path("."), "folder on the drive that is measured; 512 MiB of room", metavar="FOLDER"
    )
    out: Path = _measured(Path("machine.toml"), "file to write, or to replace, .toml", file_to_write(".toml"))

    def __attrs_post_init__(self) -> None:
        check_together(self)
        if not self.folder.is_dir():  # refused before minutes of measuring
            refuse("folder", str(self.folder), "a folder that exists", "make it")


def run_calibrate(settings: CalibrateSettings) -> int:
    """Run `zfunc calibrate`: all ranks measure the machine, rank 0 writes the profile."""
    check_addresses()
    from zfunc.planner.profile import profile_text
    from zfunc.runtime.launch import process_group

    with process_group() as ranks, logged(COMMAND.options):
        profile = measure_machine(settings)
        if not ranks.rank:
            write_file(settings.out, profile_text(profile))
            print(f"next: zfunc plan --hardware {settings.out}")
    return EXIT_OK


def measure_machine(settings: CalibrateSettings) -> "Profile":
    """Measure this machine's Profile by training the settings' model as `zfunc train` would, on all ranks together.

    Raises what `zfunc.planner.calibrate.calibrate` does, and ValueError for a batch that cannot be dealt out to the
    ranks.
    """
    import torch

    from zfunc.engine.compile import compile
    from zfunc.planner.calibrate import calibrate
    from zfunc.runtime.collectives import RankGroup
    from zfunc.train.data.tokenizer import BYTES
    from zfunc.train.deepspeed.mapping import config_extras
    from zfunc.train.pretrained import pretrained_model
    from zfunc.train.setup import optimizer_of, resolve_settings, segments_of

    model, ranks = pretrained_model(settings, weights=False), RankGroup.of()
    own = {"out", "hf", *NEEDED}
    names = attrs.fields_dict(TrainSettings).keys() & attrs.fields_dict(CalibrateSettings).keys() - own
    trained = {name: getattr(settings, name) for name in names}
    # It learns so slowly that nothing overflows.
    resolved = resolve_settings(TrainSettings(**trained, schedule="Serial", lr=1e-5, warmup=0))
    check_rows(resolved.batch_size, ranks.world, resolved.micro_batches)
    segments = segments_of(resolved, model)
    vocab_size = (settings.vocab_size or BYTES.vocab_size) if model is None else model.vocab_size
    shape = resolved.batch_size // ranks.world, resolved.seq_length
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = tokens, tokens
    extras = config_extras(resolved)
    optimizer = optimizer_of(resolved, extras, extras.learning_rate(resolved.steps))
    step, device = step_settings(resolved), resolved.device
    program = compile(segments, step, optimizer=optimizer, device=device, example=batch)
    return calibrate(program, batch, turns=settings.turns, folder=settings.folder)


COMMAND = Command(
    "measure this machine into a hardware profile",
    "It trains a few steps of the model of the options, so choose one like yours; zfunc plan and zfunc draw "
    "take the profile as --hardware.",
    CalibrateSettings,
    run_calibrate,
    """
    # with a model of 12 layers
    zfunc calibrate --num-layers 12 --hidden-size 768 --num-attention-heads 12
    # with the drive that checkpoints go to
    zfunc calibrate --folder runs --out machine.toml
    # the network too, between two GPUs
    torchrun --nproc-per-node 2 -m zfunc calibrate
    """,
)
