"""The flags that `zfunc plan` and `zfunc draw` share: model, vocabulary and hardware of a step that is simulated.

Sizes that would take for ever are refused by arithmetic.
"""

from typing import Any

from attrs import evolve

from zfunc.core.dtypes import PRECISIONS
from zfunc.options import AUTO, Option, count, option
from zfunc.planner.profile import Profile, replace_figures
from zfunc.planner.profile_toml import load_profile, profile_names
from zfunc.train.settings import DESCRIBED, STEP, TRAIN

MOST_LAYERS = 10_000  # each takes time
MOST_ELEMENTS = 10**17  # torch counts bytes in 63 bits


def check_profile(name: str, value: Any) -> None:
    """A profile that comes with zfunc, or a file of one."""
    try:
        load_profile(value)
    except FileNotFoundError as error:  # its message names the argument of zfunc.plan
        raise ValueError(f"{name}: {str(error).partition(': ')[2]}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: got {value}, which is no text, expected TOML: name a file that zfunc calibrate wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def check_sizes(model: Any) -> None:
    """Raise ValueError for too many layers, or for more elements than torch can count."""
    layers, width, tokens = model.num_layers, model.hidden_size, model.batch_size * model.seq_length
    vocab_size = model.vocab_size or 0
    parameters = (12 * layers * width + vocab_size) * width
    widest = max(4 * width, vocab_size, model.num_attention_heads * model.seq_length)
    for flags, what, got, most in (
        ("--num-layers", "layers", layers, MOST_LAYERS),
        ("--hidden-size, --num-layers, --vocab-size", "parameters", parameters, MOST_ELEMENTS),
        ("--batch-size, --seq-length", "elements of an activation", tokens * widest, MOST_ELEMENTS),
    ):
        if got > most:
            raise ValueError(f"{flags}: got {got:.3g} {what}, expected at most {most:.3g}: make it smaller")


def profile_of(settings: Any) -> Profile | None:
    """The profile of `--hardware` with the figures of `--with`; None without one."""
    if settings.hardware is None:
        if settings.with_:
            raise ValueError("--with: got it without --hardware, expected the profile of a figure: name one")
        return None
    values = dict(_assignment("--with", text) for text in settings.with_)
    try:
        return replace_figures(load_profile(settings.hardware), values)
    except ValueError as error:
        raise ValueError(f"--with: {error}") from error


def check_precision(settings: Any) -> None:
    """Raise ValueError for a figure of `--with` or a precision that the profile does not have."""
    profile = profile_of(settings)
    available = (AUTO, *(PRECISIONS if profile is None else profile.precisions))
    if settings.precision not in available:
        raise ValueError(
            f"--precision: got {settings.precision!r} with --hardware {settings.hardware}, expected one that it "
            f"has: pass {' or '.join(available)}"
        )


def _check_assignments(name: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        _assignment(name, text)


def _assignment(name: str, text: str) -> tuple[str, float]:
    """Table and key of a figure, and its value: "bytes.host=1.28e11"."""
    place, _, value = text.rpartition("=")
    try:
        if not all(place.rpartition(".")):
            raise ValueError(place)
        return place, float(value)
    except ValueError:
        raise ValueError(
            f"{name}: got {text!r}, expected TABLE.KEY=NUMBER: write such as bytes.host=1.28e11"
        ) from None


def hardware(default: str | None, note: str = "") -> Any:
    """The field of `--hardware`."""
    help = f"{', '.join(profile_names())}, or a file that zfunc calibrate wrote{note}"
    return option(default, "hardware", help, check_profile, "NAME|FILE", words=profile_names())


def figures() -> Any:
    """The field of `--with`."""
    help = "replace a figure of that profile, as bytes.host=1.28e11 does, once for each (default: none)"
    return option((), "hardware", help, _check_assignments, "TABLE.KEY=VALUE", converter=tuple)


SIMULATED = {
    **DESCRIBED,
    "vocab_size": Option(
        "model",
        "tokens in the vocabulary (default: those of --data, as zfunc train has them; of bytes 256)",
        count,
    ),
    "data": evolve(
        TRAIN["data"],
        help="the data to train on, for its vocabulary alone: a .bin has 50257 tokens, text and JSONL those of "
        "--tokenizer, or bytes (default: bytes)",
    ),
    "tokenizer": evolve(
        TRAIN["tokenizer"], help="a local tokenizer.json, for text and JSONL (default: bytes)"
    ),
    "optimizer": TRAIN["optimizer"],
    "precision": STEP["precision"].offering(
        (AUTO, *PRECISIONS), f"; {AUTO}: the 16 bits that the hardware is fast in"
    ),
}
"""The options of the model, its vocabulary and its optimizer, as `zfunc train` has them."""
