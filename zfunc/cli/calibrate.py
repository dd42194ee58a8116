"""`zfunc calibrate`: its settings, and what it measures. Torch is imported when it runs.

The invariant: as in settings.py, what exists can be run, as far as that can be told without the machine.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from zfunc.options import Option, anything, count, path
from zfunc.train.settings import COMMON, TRAIN, TrainSettings, check_rows, check_together

if TYPE_CHECKING:
    from zfunc.planner.profile import Profile

CALIBRATE = {
    **{
        name: option
        for name, option in COMMON.items()
        if name not in ("schedule", "grad_slots", "host_slots")
    },
    "vocab_size": Option("model", "tokens there are", count),
    "bucket_size": TRAIN["bucket_size"],
    "device": TRAIN["device"],
    "turns": Option("measurement", "steps that are measured, after 3 that are not", count),
    "folder": Option(
        "measurement", "folder on the disk that is measured, with 64 MB of room", anything, metavar="FOLDER"
    ),
    "out": Option("measurement", "file to write, or to write anew, that ends in .toml", path, metavar="FILE"),
}


@frozen(kw_only=True)
class CalibrateSettings:
    """What to measure. The defaults are the model of `zfunc train`: measure with the one you want to plan for."""

    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    seq_length: int = 128
    vocab_size: int = 256
    batch_size: int = 8
    micro_batches: int = 1
    clip: float = 1.0
    device: str = "auto"
    precision: str = "auto"
    moments: str = "fp32"
    recompute: str = "all"
    bucket_size: int | None = None
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
            if f.name in CALIBRATE and f.name != "out"
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
