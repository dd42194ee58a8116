"""What an update on the device allocates and computes, from sizes alone: no torch."""

from zfunc.core.layout import ALIGNMENT, round_up

PIECE = 1 << 21  # elements updated together: much for a device, little beside a bucket
EMA_PIECE = 1 << 18  # elements of a moving average at a time, which stay in the caches


def elementwise_workspace(numel: int, state_format: str) -> int:
    """An upper bound of the bytes that an update of `numel` elements allocates beside its arguments.

    They are the gradient, new moments and a rule's temporaries in fp32, and what a state does not have in it.

    >>> elementwise_workspace(1 << 30, "fp32") == elementwise_workspace(PIECE, "fp32") < 30 * PIECE
    True
    """
    n, rows = min(round_up(numel, ALIGNMENT), PIECE), 7 if state_format.endswith("fp32") else 10
    return n * 4 * rows + n // ALIGNMENT * 96 + (1 << 15)  # per block, and what the allocator rounds up


def ema_workspace(numel: int) -> int:
    """The bytes that `zfunc.optim.ema.average_` of `numel` weights allocates on an accelerator."""
    return 2 * 4 * min(numel, EMA_PIECE)
