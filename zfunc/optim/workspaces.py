"""What an update on the device allocates and computes, from sizes alone: no torch."""

from zfunc.core.layout import UpdateWork, round_up
from zfunc.core.optimizer_state import AdamFormat
from zfunc.core.spec import ALLOCATION
from zfunc.optim.adafactor_reference import SUMMED
from zfunc.optim.compact_reference import BLOCK

PIECE = 1 << 22  # elements updated together: much for a device, little beside a bucket
EMA_PIECE = 1 << 18  # elements of a moving average at a time, which stay in the caches
ADAFACTOR_PIECE = 1 << 20  # elements whose temporaries are there at a time
ONE_BUFFER_FLOATS = 7  # rows of scratch: the gradient, two for float64, a term, weights, buffer, direction

Quintic = tuple[float, float, float]
QUINTIC: Quintic = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5: steep at 0, so that singular values come near 1 in few steps (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks")."""


def adam_workspace(numel: int, state_format: AdamFormat) -> int:
    """An upper bound of the bytes that an update of `numel` elements allocates beside its arguments.

    >>> adam_workspace(1 << 30, "fp32") == adam_workspace(PIECE, "fp32") < 14 * PIECE
    True
    """
    n = min(round_up(numel, BLOCK), PIECE)
    small = n // BLOCK * 32 + (1 << 14)  # per block, and what the allocator rounds up
    return n * (4 * num_floats(state_format) + 1) + small


def num_floats(state_format: AdamFormat) -> int:
    """Rows of scratch: the gradient, float64, a term; and in float32 what a state does not have in it."""
    return {"fp32": 3, "fp32-split": 4}.get(state_format, 6)


def one_buffer_workspace(numel: int) -> int:
    """An upper bound of the bytes that an update of `numel` elements allocates beside its arguments."""
    n = min(round_up(numel, BLOCK), PIECE)
    return n * (4 * ONE_BUFFER_FLOATS + 2) + n // BLOCK * 32 + (1 << 14)


def adafactor_workspace(numel: int) -> int:
    """An upper bound of the bytes that an update of a parameter of `numel` elements allocates beside its arguments.

    It holds for matrices of at least 64 rows and columns, and for any other one below ADAFACTOR_PIECE elements.
    """
    return 6 * numel + 128 * min(numel + SUMMED, ADAFACTOR_PIECE) + (1 << 16)


def newton_schulz_work(shape: tuple[int, ...], steps: int) -> UpdateWork:
    """The work of one matrix. A step has 4 m m n + 2 m m m FLOPs with n the longer side: 6 h a parameter if square.

    >>> newton_schulz_work((1024, 1024), 5).flops / 1024**2 / 1024
    30.0
    """
    m, n = sorted(shape)
    two_wide, two_square = (2 * round_up(2 * x, ALLOCATION) for x in (m * n, m * m))
    return UpdateWork(
        steps * (4 * m * m * n + 2 * m**3), two_wide + two_square + 3 * ALLOCATION, 3 * steps + 3
    )


def ema_workspace(numel: int) -> int:
    """The bytes that `zfunc.optim.ema.average_` of `numel` weights allocates on an accelerator."""
    return 2 * 4 * min(numel, EMA_PIECE)
