"""Which labels count, and how the logits of a large vocabulary are cut into pieces: no torch."""

IGNORE_INDEX = -100  # the label of a token that does not count, as in torch
LOGITS_BYTES = 256 << 20  # of fp32 logits that exist at once
_ALIGNMENT = 128  # of a piece, in rows of its products
_MOST_PIECES = 64  # each is traced, and launched, by itself


def piece(rows: int, width: int, logits_bytes: int) -> int:
    """The rows in each piece of `rows` by `width` logits: what fits `logits_bytes`, or a 64th of `rows` if more."""
    fitting, least = logits_bytes // (4 * width * _ALIGNMENT), -(-rows // (_MOST_PIECES * _ALIGNMENT))
    return max(1, fitting, least) * _ALIGNMENT
