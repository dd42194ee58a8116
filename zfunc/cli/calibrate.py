"""`zfunc calibrate`: its settings, and what it measures. Torch is imported when it runs.

The invariant: as in settings.py, what exists can be run, as far as that can be told without the machine.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from zfunc.core.settings import StepSettings
from zfunc.options import AUTO, Option, anything, count, flag_fields, options_of, path
from zfunc.train.settings import MODEL, TRAIN, ModelFlags, TrainSettings, check_rows, check_together

if TYPE_CHECKING:
    from zfunc.planner.profile import Profile

# Settings that change nothing of what is measured
UNMEASURED = (
    "schedule",
    "compile_segments",
    "grad_slots",
    "host_slots",
    "offload_ratio",
    "speculate",
    "delay_from",
)

CALIBRATE = {
    **MODEL,
    **{name: TRAIN[name] for name in options_of(StepSettings, without=UNMEASURED)},
    "vocab_size": Option("model", "tokens there are", count),
    "device": TRAIN["device"],
    "turns": Option("measurement", "steps that are measured, after 3 that are not", count),
    "folder": Option(
        "measurement", "folder on the disk that is measured, with 64 MB of room", anything, metavar="FOLDER"
    ),
    "out": Option("measurement", "file to write, or to write anew, that ends in .toml", path, metavar="FILE"),
}


MeasuredStepFlags = flag_fields(
    StepSettings, ModelFlags, without=UNMEASURED, precision=AUTO, clip=1.0, bucket_size=None
)


@frozen(kw_only=True)
class CalibrateSettings(MeasuredStepFlags):
    """What to measure. The defaults are the model of `zfunc train`: measure with the one you want to plan for."""

    vocab_size: int = 256
    device: str = "auto"
    turns: int = 20
    folder: Path = Path(".")
    out: Path = Path("machine.toml")

    def __attrs_post_init__(self) -> None:
        """Check values alone and together. Raises ValueError."""
        check_together(self, CALIBRATE)
        if self.out.suffix != ".toml":
            raise ValueError(
                f"--out: got {self.out}, expected a name that ends in .toml: pass such as machine.toml"
            )
        if not self.out.parent.is_dir():  # said before minutes of measuring
            raise ValueError(
                f"--out: got {self.out}, expected a file in a folder that is there: make {self.out.parent}"
            )
        if not self.folder.is_dir():
            raise ValueError(
                f"--folder: got {self.folder}, expected a folder that is there: make it, or name another"
            )

    def training(self) -> TrainSettings:
        """The training whose steps are measured; under Serial, and slow to learn, so that nothing overflows."""
        model = {
            f.name: getattr(self, f.name)
            for f in attrs.fields(TrainSettings)
            if f.name in attrs.fields_dict(CalibrateSettings) and f.name != "out"
        }
        return TrainSettings(**model, schedule="Serial", lr=1e-5, warmup=0)


def measure_machine(asked: CalibrateSettings) -> "Profile":
    """The Profile of this machine, by a GPT as `asked`, as `zfunc train` would run it. All ranks call it together.

    Raises what `zfunc.planner.calibrate.calibrate` does, and ValueError for a batch that cannot be dealt out to the
    ranks.
    """
    import torch

    from zfunc.planner.calibrate import calibrate
    from zfunc.runtime.collectives import RankGroup
    from zfunc.train.setup import check_size, compile_job, resolve_settings

    settings = resolve_settings(asked.training())
    ranks = RankGroup.of()
    check_rows(settings.batch_size, ranks.world, settings.micro_batches)
    check_size(settings, ranks)
    shape = settings.batch_size // ranks.world, settings.seq_length
    tokens = torch.randint(0, asked.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = tokens, tokens
    return calibrate(compile_job(settings, batch), batch, turns=asked.turns, folder=asked.folder)
