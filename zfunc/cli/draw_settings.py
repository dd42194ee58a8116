"""Settings of `zfunc draw` as a value, and what it has in common with `zfunc plan`: steps that are not run.

The invariant: as in `zfunc.train.settings`, what exists can be drawn; sizes that would take for ever are refused by
arithmetic. No torch here.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, frozen

from zfunc import schedules
from zfunc.core.dtypes import PRECISIONS
from zfunc.core.hardware import ROUND
from zfunc.core.settings import StepSettings
from zfunc.options import AUTO, Option, count, flag, flag_fields, one_of, options_of, path, positive
from zfunc.planner.profile_toml import load_profile
from zfunc.planner.profile_toml import profile_names as profiles
from zfunc.train.settings import MODEL, PRECISION, STEP, TRAIN, GPTFlags, check_together

FORMATS = ("text", "svg", "chrome", "html")
UNDRAWN = ("compile_segments", "offload_ratio", "speculate", "delay_from")  # settings without a flag here
MOST_LAYERS = 10_000  # of what is planned: each takes time
MOST_ELEMENTS = 10**17  # torch counts bytes in 63 bits

_names = ", ".join


def check_profile(name: str, value: Any) -> None:
    """A profile that comes with zfunc, or a file of one."""
    try:
        load_profile(value)
    except FileNotFoundError as error:  # which names the argument of zfunc.plan
        raise ValueError(f"{name}: {str(error).partition(': ')[2]}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: got {value}, which is no text, expected TOML: name a file that zfunc calibrate wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def check_sizes(model: Any) -> None:
    """Refuse sizes that cannot be planned, by arithmetic: too many segments, or more elements than are counted."""
    layers, width, tokens = model.num_layers, model.hidden_size, model.batch_size * model.seq_length
    vocab_size = model.vocab_size or 0
    widest = max(4 * width, vocab_size, model.num_attention_heads * model.seq_length)
    for flags, what, got, most in (
        ("--num-layers", "layers", layers, MOST_LAYERS),
        (
            "--hidden-size, --num-layers, --vocab-size",
            "parameters",
            (12 * layers * width + vocab_size) * width,
            MOST_ELEMENTS,
        ),
        ("--batch-size, --seq-length", "elements of an activation", tokens * widest, MOST_ELEMENTS),
    ):
        if got > most:
            raise ValueError(f"{flags}: got {got:.3g} {what}, expected at most {most:.3g}: make it smaller")


def check_precision(hardware: str | None, precision: str) -> None:
    """Refuse a precision that a profile does not have."""
    there = (AUTO, *load_profile(hardware).precisions) if hardware is not None else (AUTO, *PRECISIONS)
    if precision not in there:
        raise ValueError(
            f"--precision: got {precision!r} with --hardware {hardware}, expected one that it has: pass "
            f"{' or '.join(there)}"
        )


HARDWARE = Option(
    "hardware",
    f"{_names(profiles())}, or a file that zfunc calibrate wrote",
    check_profile,
    metavar="NAME|FILE",
    words=profiles(),
)

VOCABULARY = {
    "vocab_size": Option(
        "model",
        "tokens there are (default: those of --data, as zfunc train has them; of bytes there are 256)",
        count,
    ),
    "data": evolve(
        TRAIN["data"],
        help="what would be trained on, for its vocabulary alone: a .bin has 50257 tokens, text and JSONL those of "
        "--tokenizer, or bytes (default: bytes)",
    ),
    "tokenizer": evolve(
        TRAIN["tokenizer"], help="a local tokenizer.json, for text and JSONL (default: bytes)"
    ),
}
"""What the vocabulary of a step that is not run follows from, as in `zfunc train`."""

UNRUN_PRECISION = PRECISION.offering(
    (AUTO, *PRECISIONS), f"; {AUTO}: the 16 bits that the hardware is fast in"
)

DRAW = {
    **MODEL,
    **options_of(StepSettings, without=UNDRAWN),
    **VOCABULARY,
    "precision": UNRUN_PRECISION,
    "schedule": STEP["schedule"].offering((*schedules.__all__, "all")),
    "hardware": evolve(HARDWARE, help=f"{HARDWARE.help} (default: the figures below)"),
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


DrawnStepFlags = flag_fields(StepSettings, GPTFlags, without=UNDRAWN, precision=AUTO, clip=1.0)


@frozen(kw_only=True)
class DrawSettings(DrawnStepFlags):
    """A step to draw, by default on round-number hardware."""

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
        check_together(self, DRAW)
        check_sizes(self)
        check_precision(self.hardware, self.precision)
        if self.hardware is not None:
            self._check_alone("hardware", ("hardware",), "which has these figures")
        if self.compare is not None:
            groups = "data", "model", "step", "how it runs", "offload"
            self._check_alone("compare", groups, "which draws the run's own plan")

    def _check_alone(self, name: str, groups: Collection[str], why: str) -> None:
        """Refuse what would be ignored beside option `name`."""
        for f in attrs.fields(DrawSettings):
            given = getattr(self, f.name) != f.default
            if given and f.name != name and DRAW[f.name].group in groups:
                raise ValueError(
                    f"{flag(f.name)}: got it with {flag(name)}, {why}, expected one of them: leave one out"
                )
