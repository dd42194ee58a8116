"""The flags that `zfunc plan` and `zfunc draw` share: model, vocabulary and hardware of a step that is simulated.

Sizes that would take for ever are refused by arithmetic.
"""

from typing import Any

from attrs import evolve

from zfunc.core.dtypes import PRECISIONS
from zfunc.options import AUTO, Option, count
from zfunc.planner.profile_toml import load_profile, profile_names
from zfunc.train.settings import PRECISION, TRAIN

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


def check_precision(hardware: str | None, precision: str) -> None:
    """Raise ValueError for a precision that the profile does not have."""
    available = (AUTO, *(PRECISIONS if hardware is None else load_profile(hardware).precisions))
    if precision not in available:
        raise ValueError(
            f"--precision: got {precision!r} with --hardware {hardware}, expected one that it has: pass "
            f"{' or '.join(available)}"
        )


HARDWARE = Option(
    "hardware",
    f"{', '.join(profile_names())}, or a file that zfunc calibrate wrote",
    check_profile,
    metavar="NAME|FILE",
    words=profile_names(),
)

VOCABULARY = {
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
}
"""What the vocabulary follows from, as in `zfunc train`."""

SIMULATED_PRECISION = PRECISION.offering(
    (AUTO, *PRECISIONS), f"; {AUTO}: the 16 bits that the hardware is fast in"
)
