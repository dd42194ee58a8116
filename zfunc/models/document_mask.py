"""Sequences of several documents, of which each is computed as if it were alone.

Tokens come with `position_ids`, which start at 0 in each document, as transformers has it for packed sequences.
"""

import torch
from torch import Tensor


def document_mask(position_ids: Tensor) -> Tensor:
    """Who attends to whom, bool [batch, 1, seq, seq], of `position_ids` [batch, seq].

    A token (a row) attends to those (columns) of its own document, up to itself.

    >>> document_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    at = torch.arange(position_ids.shape[-1], device=position_ids.device)
    starts = at - position_ids  # where a token's document begins
    own = starts[:, :, None] == starts[:, None, :]
    return (own & (at[:, None] >= at))[:, None]
