"""Newton-Schulz: a matrix as a nearly orthogonal one of the same row and column spaces, by products alone.

The definition is these torch operations in bfloat16 over a whole matrix. How a library adds up a product is its own
affair, so equal bits need the same library, device and number of threads, as those of forward do.
"""

import torch
from torch import Tensor

from zfunc.optim.workspaces import QUINTIC, Quintic


def orthogonalize_(
    matrix: Tensor, *, steps: int, coefficients: Quintic = QUINTIC, eps: float = 1e-7
) -> Tensor:
    """The matrix [rows, columns] bf16 with its singular values near 1, after division by its norm, at least `eps`.

    The argument may be overwritten. Raises ValueError for anything but a matrix in bfloat16.

    >>> orthogonalize_(torch.eye(2, 3, dtype=torch.bfloat16), steps=5).float().norm() > 0.9
    tensor(True)
    """
    if matrix.dim() != 2 or matrix.dtype != torch.bfloat16:
        raise ValueError(
            f"orthogonalize_: got shape {tuple(matrix.shape)} in {matrix.dtype}, expected a whole matrix in "
            "bfloat16: pass it in its own shape"
        )
    a, b, c = coefficients
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    wide.div_(wide.norm().clamp(min=eps))
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.size(0) <= matrix.size(1) else wide.T
