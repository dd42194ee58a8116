"""Settings of the commands that look at what is there: a run, a checkpoint, this machine. No torch here.

The invariant: as in `zfunc.train.settings`, the fields' defaults are the command line's.
"""

from pathlib import Path

from attrs import frozen

from zfunc.core.dtypes import PRECISIONS
from zfunc.options import Option, anything, check_each, one_of, path, positive

_RUN = Option("run", "folder of the run, such as runs/DATE-TIME", anything, metavar="RUN", positional=True)

REPORT = {
    "run": _RUN,
    "out": Option("page", "file to write, or to write anew (default: RUN/report.html)", path, metavar="FILE"),
}

TOP = {
    "run": _RUN,
    "once": Option(
        "screen", "print what there is to see now, and end; in a pipe that is all it does", anything
    ),
    "every": Option("screen", "seconds from one look to the next", positive),
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
    "dtype": Option(
        "file", f"type of the weights: {', '.join(PRECISIONS)}; fp32 is exact", one_of(PRECISIONS)
    ),
}

DOCTOR = {"json": Option("output", "print one JSON object, for programs", anything)}


@frozen(kw_only=True)
class ReportSettings:
    """A run to show."""

    run: Path
    out: Path | None = None

    def __attrs_post_init__(self) -> None:
        check_each(self, REPORT)


@frozen(kw_only=True)
class TopSettings:
    """A run to watch."""

    run: Path
    once: bool = False
    every: float = 1.0

    def __attrs_post_init__(self) -> None:
        check_each(self, TOP)


@frozen(kw_only=True)
class ExportSettings:
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
class DoctorSettings:
    """How to tell what is found."""

    json: bool = False
