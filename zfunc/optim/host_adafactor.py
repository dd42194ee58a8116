"""Adafactor in host memory: checked calls into the compiled kernel, which reads the gradient in four sweeps.

`adafactor_reference` defines what they compute; what there is one of for each row or column is computed there too.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers
from zfunc.optim.adafactor_reference import (
    SUMMED,
    AdafactorFactors,
    Matrices,
    new_variance,
    rate_of,
    roots,
    unit_of,
)
from zfunc.optim.adam_reference import Array
from zfunc.optim.argument_checks import INTO, checked_threads, update_spans
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam


def host_adafactor_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    state_format: str,
    matrices: Matrices,
    factors: AdafactorFactors,
    out: Tensor | None = None,
    into: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
    isa: int = -1,
) -> None:
    """One step of one parameter over 1-D contiguous host buffers, by name, in place or `into` others.

    `grad`: [n] fp32, bf16 or fp16, read only. `out`: [n] of such a type, receives the rounded new weights. Threads
    and instruction set change no bit. It allocates n / 4 bytes, and 48 for each row and column.
    Raises TypeError or ValueError, with every buffer unchanged, as `zfunc.optim.host_adam.adam_update_` does.
    """
    spans = update_spans(state_format, state, grad, out, into)
    n, team = grad.numel(), (checked_threads(threads), isa)
    if not n:
        return
    (kind,) = moment_buffers(state_format)
    count, rows, columns, _ = matrices
    with np.errstate(all="ignore"):
        k = AdafactorFactors._make(np.float32(x) for x in factors)
        matrix = spans["grad"][0], KERNEL_DTYPES[grad.dtype], rows, columns, k.grad_scale, k.grad_floor
        lines = count * rows, count * columns
        largest = [np.zeros(x, np.float32) for x in lines]
        cpu_adam.factor_largest(matrix, n, *map(_address, largest), *team)
        units = [unit_of(x.astype(np.float64) ** 2, y) for x, y in zip(largest, (columns, rows), strict=True)]
        sums = [np.zeros(x) for x in lines]
        cpu_adam.factor_sums(matrix, n, *map(_address, units), *map(_address, sums), *team)
        kept = sum(matrices.kept)
        variance = new_variance(state[kind.name].numpy()[:kept], *sums, matrices, k)
        scales = [np.ascontiguousarray(x) for x in roots(variance, matrices, k)]
        direction = *map(_address, scales), k.limit
        squares = [np.empty(-(-n // SUMMED)) for _ in range(2)]
        weights = _weights(spans)
        cpu_adam.factor_squares(matrix, n, *direction, weights, *map(_address, squares), *team)
        rate = rate_of(*squares, n, k)
    new = (state if into is None else into)[kind.name].numpy()
    new[:kept], new[kept:] = variance, 0.0
    cpu_adam.factored_update(
        matrix,
        n,
        *direction,
        weights,
        weights if into is None else _weights(spans, INTO),
        spans["out"][0] if out is not None else 0,
        cpu_adam.NONE if out is None else KERNEL_DTYPES[out.dtype],
        bool(factors.decay),
        rate,
        k.decay,
        *team,
    )


def _address(x: Array) -> int:
    return x.ctypes.data


def _weights(spans: Mapping[str, tuple[int, int, str]], prefix: str = "") -> tuple[int, int]:
    """The address of fp32 weights and 0, or those of their halves."""
    if prefix + "master" in spans:
        return spans[prefix + "master"][0], 0
    return spans[prefix + HIGH_HALF][0], spans[prefix + "master_low"][0]
