"""Adafactor in torch operations, for buckets whose optimizer state stays on the device.

The bits are those of `adafactor_reference` on any device with IEEE arithmetic, by the rules of `device_adam`. Its
sums are exact, so the order in which a device adds does not matter.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers
from zfunc.optim.adafactor_reference import SUMMED, AdafactorFactors, Matrices
from zfunc.optim.adam_reference import EXP_AVG_SQ_FLOOR
from zfunc.optim.argument_checks import update_spans
from zfunc.optim.device_formats import Scratch, flush_, join_, load_, split_
from zfunc.optim.workspaces import ADAFACTOR_PIECE


def device_adafactor_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    state_format: str,
    matrices: Matrices,
    factors: AdafactorFactors,
    out: Tensor | None = None,
) -> None:
    """One step of one parameter over 1-D contiguous buffers of one device, in place, with the bits on the host.

    Raises TypeError or ValueError as `zfunc.optim.host_adafactor.host_adafactor_`, with every buffer unchanged.
    """
    update_spans(state_format, state, grad, out, device=None)
    n, device = grad.numel(), grad.device
    if not n:
        return
    with np.errstate(over="ignore"):  # grad_floor may be infinite
        k = AdafactorFactors._make(float(np.float32(x)) for x in factors)
    (kind,) = moment_buffers(state_format)
    with torch.no_grad():
        u = torch.empty(n, device=device)  # fp32: the gradient, then the direction
        floats = torch.empty(4 * min(n, ADAFACTOR_PIECE), device=device)
        mask = torch.empty(min(n, ADAFACTOR_PIECE), dtype=torch.bool, device=device)

        def scratch(size: int) -> tuple[Tensor, Scratch]:
            """Room for weights, and temporaries, of a piece of `size`."""
            p, a, _, b = floats[: 4 * size].view(4, size)
            return p, Scratch(a, b, floats[2 * size : 4 * size].view(torch.float64), mask[:size])

        for start, stop in _pieces(n):
            g = u[start:stop]
            load_(g, grad[start:stop])
            flush_(g, k.grad_floor, scratch(stop - start)[1]).mul_(k.grad_scale)
        for elements, part, variances in _parts(matrices, state[kind.name]):
            view = u[elements].view(part[:3])
            _update_variance_(variances, view, k, part)
            _multiply_(view, *_roots(variances, k, part), k.limit, part)
        sums = [torch.empty(-(-n // SUMMED), dtype=torch.float64, device=device) for _ in range(2)]
        for start, stop in _pieces(n):
            blocks = slice(start // SUMMED, -(-stop // SUMMED))
            p, temporaries = scratch(stop - start)
            _load_weights_(p, state, start, temporaries)
            sums[0][blocks] = _square_sums(u[start:stop])
            sums[1][blocks] = _square_sums(p)
        rate = _rate(*sums, n, k)
        for start, stop in _pieces(n):
            p, temporaries = scratch(stop - start)
            _load_weights_(p, state, start, temporaries)
            change = torch.mul(u[start:stop], rate, out=temporaries.b)
            if k.decay:
                change.add_(torch.mul(p, k.decay, out=temporaries.a))
            p.sub_(change)
            if out is not None:
                out[start:stop].copy_(p)
            _store_weights_(p, state, start, temporaries)


def _pieces(n: int) -> Iterator[tuple[int, int]]:
    return ((start, min(n, start + ADAFACTOR_PIECE)) for start in range(0, n, ADAFACTOR_PIECE))


# ---- the weights ------------------------------------------------------------------------------------------


def _load_weights_(p: Tensor, state: Mapping[str, Tensor], start: int, scratch: Scratch) -> None:
    piece = slice(start, start + p.numel())
    if "master" in state:
        p.copy_(state["master"][piece])
    else:
        join_(p, state[HIGH_HALF][piece], state["master_low"][piece], scratch)


def _store_weights_(p: Tensor, state: Mapping[str, Tensor], start: int, scratch: Scratch) -> None:
    piece = slice(start, start + p.numel())
    if "master" in state:
        state["master"][piece].copy_(p)
    else:
        split_(state[HIGH_HALF][piece], state["master_low"][piece], p, scratch)


# ---- arithmetic, as the functions of adafactor_reference ----------------------------------------------------


def _unit_of(largest: Tensor, count: int) -> Tensor:
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent + count.bit_length())


def _exact_sum(terms: Tensor) -> Tensor:
    """Of the last dimension."""
    unit = _unit_of(terms.amax(-1, keepdim=True), terms.shape[-1])
    return ((terms + unit) - unit).sum(-1)


def _square_sums(x: Tensor) -> Tensor:
    padded = (
        torch.nn.functional.pad(x, (0, -x.numel() % SUMMED)).double().square_().view(-1, SUMMED // 16, 16)
    )
    lanes = padded[:, 0]
    for i in range(1, SUMMED // 16):
        lanes = lanes + padded[:, i]
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]


def _parts(matrices: Matrices, variance: Tensor) -> Iterator[tuple[slice, Matrices, list[Tensor | None]]]:
    """Matrices that need nothing of each other: their elements, and their variances of rows and of columns."""
    count, rows, columns, factored = matrices
    kept, others = matrices.kept
    if not factored:
        for start, stop in _pieces(columns):
            yield slice(start, stop), Matrices(1, 1, stop - start, False), [None, variance[start:stop]]
        return
    few = max(1, ADAFACTOR_PIECE // (rows * columns))
    for m in range(0, count, few):
        n = min(count, m + few)
        row = variance[m * rows : n * rows] if kept else None
        column = variance[kept + m * columns : kept + n * columns] if others else None
        yield slice(m * rows * columns, n * rows * columns), Matrices(n - m, *matrices[1:]), [row, column]


def _tiles(matrices: Matrices) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of ADAFACTOR_PIECE elements at a time, of a part."""
    _, rows, columns, _ = matrices
    wide = min(columns, ADAFACTOR_PIECE)
    high = max(1, ADAFACTOR_PIECE // wide) if matrices.count == 1 else rows
    for r in range(0, rows, high):
        for c in range(0, columns, wide):
            yield slice(r, min(rows, r + high)), slice(c, min(columns, c + wide))


def _update_variance_(variances: list[Tensor | None], g: Tensor, k: AdafactorFactors, part: Matrices) -> None:
    """Of g [count, rows, columns]."""
    count, rows, columns, _ = part
    largest = [torch.zeros(count, x, dtype=torch.float64, device=g.device) for x in (rows, columns)]
    for r, c in _tiles(part):
        size = g[:, r, c].abs()
        for x, along, at in ((largest[0], 2, r), (largest[1], 1, c)):
            x[:, at] = torch.maximum(x[:, at], size.amax(along))
    units = [_unit_of(x.square_(), y) for x, y in zip(largest, (columns, rows), strict=True)]
    sums = [x.zero_() for x in largest]
    for r, c in _tiles(part):
        square = g[:, r, c].double().square_()
        row_unit, column_unit = units[0][:, r, None], units[1][:, None, c]
        sums[0][:, r] += (square + row_unit).sub_(row_unit).sum(2)
        sums[1][:, c] += square.add_(column_unit).sub_(column_unit).sum(1)
    for variance, x, size in zip(variances, sums, (columns, rows), strict=True):
        if variance is not None:
            new = variance.mul(k.keep).add_(_over(x.view(-1), size).mul_(k.add))
            variance.copy_(new.masked_fill_(new.abs() < EXP_AVG_SQ_FLOOR, 0.0))


def _over(sums: Tensor, count: int) -> Tensor:
    """Means in float32."""
    return sums.div(torch.full_like(sums, count)).float()


def _roots(variances: list[Tensor | None], k: AdafactorFactors, part: Matrices) -> tuple[Tensor, Tensor]:
    row, column = (None if x is None else x.view(part.count, -1) for x in variances)
    if row is None:
        assert column is not None
        if not part.factored:
            return column.new_ones(1, 1), _inverse_root(column)
        row = _mean(column, part.columns)
    column = _mean(row, part.rows) if column is None else column
    return _inverse_root(row / _mean(row, part.rows).clamp_(min=k.least_mean)), _inverse_root(column)


def _multiply_(u: Tensor, left: Tensor, right: Tensor, limit: float, part: Matrices) -> None:
    """u [count, rows, columns] *= left [count, rows] * right [count, columns], or the limit."""
    for r, c in _tiles(part):
        u[:, r, c] *= (left[:, r, None] * right[:, None, c]).clamp_(max=limit)


def _rate(update: Tensor, weights: Tensor, numel: int, k: AdafactorFactors) -> Tensor:
    of_update, of_weights = (_root(_over(_exact_sum(x), numel)) for x in (update, weights))
    size = of_weights.clamp_(min=k.least_size).mul_(k.rate)
    return size / (of_update / torch.full_like(of_update, k.threshold)).clamp_(min=1.0)


def _mean(x: Tensor, count: int) -> Tensor:
    return _over(_exact_sum(x.double()), count)[:, None]


def _inverse_root(x: Tensor) -> Tensor:
    root = _root(x)
    return torch.ones_like(root) / root


def _root(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()
