"""Adafactor in torch operations, for buckets whose optimizer state stays on the device.

The bits are those of `adafactor_reference` on any device with IEEE arithmetic, by the rules of `device_adam`. Its
sums are exact, so the order in which a device adds does not matter.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers
from zfunc.optim.adafactor_reference import SUMMED, AdafactorFactors, Matrices, lines_of
from zfunc.optim.adafactor_rounds import AdafactorRounds
from zfunc.optim.adam_reference import EXP_AVG_SQ_FLOOR
from zfunc.optim.argument_checks import update_spans
from zfunc.optim.base import ParameterPart
from zfunc.optim.device_formats import Scratch, flush_, join_, load_, split_
from zfunc.optim.workspaces import ADAFACTOR_PIECE


def device_adafactor_(state: Mapping[str, Tensor], grad: Tensor, **arguments: Any) -> None:
    """One step of a part of a parameter over 1-D contiguous buffers of one device, in place, with the bits on the
    host.

    Raises TypeError or ValueError as `zfunc.optim.host_adafactor.host_adafactor_`, with every buffer unchanged.
    """
    update = DeviceAdafactor(state, grad, **arguments)
    if grad.numel():
        with torch.no_grad():
            update.finish()


def device_adafactor_round(state: Mapping[str, Tensor], grad: Tensor, **arguments: Any) -> Tensor:
    """What a part of a parameter has of the next round of that step, as `host_adafactor_round` says it."""
    with torch.no_grad():
        return DeviceAdafactor(state, grad, **arguments).measure()


class DeviceAdafactor(AdafactorRounds):
    """An update under way, in torch operations."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        *,
        state_format: str,
        part: ParameterPart,
        factors: AdafactorFactors,
        out: Tensor | None = None,
    ) -> None:
        update_spans(state_format, state, grad, out, device=None)
        (kind,) = moment_buffers(state_format)
        super().__init__(part, kind, grad.device)
        self.state, self.grad, self.out, self.variance = state, grad, out, state[kind.name]
        with np.errstate(over="ignore"):  # grad_floor may be infinite
            self.k = AdafactorFactors._make(float(np.float32(x)) for x in factors)
        few, device = min(grad.numel(), ADAFACTOR_PIECE), grad.device
        self.floats = torch.empty(4 * few, device=device)
        self.mask = torch.empty(few, dtype=torch.bool, device=device)

    def _lines(self) -> Tensor:
        largest, old = self._zeros(self.num_lines), self._zeros(sum(self.matrices.kept))
        old[self.kept] = self.variance[: self.kept.stop - self.kept.start].double()
        for view, lines in self._tiles(largest):
            size = view.abs()
            for x, along in zip(lines, (2, 1), strict=True):
                x.copy_(torch.maximum(x, size.amax(along)))
        return torch.cat([largest, old])

    def _line_sums(self) -> Tensor:
        sums, units = self._zeros(self.num_lines), self.largest[: self.num_lines].square()
        counts = self.matrices.columns, self.matrices.rows
        for x, count in zip(self._split(units), counts, strict=True):
            x.copy_(_unit_of(x, count))
        both = zip(self._tiles(sums), self._tiles(units), strict=True)
        for (view, own), (_, unit) in both:
            square = view.double().square_()
            rows, columns = unit[0][:, :, None], unit[1][:, None]
            own[0].add_((square + rows).sub_(rows).sum(2))
            own[1].add_(square.add_(columns).sub_(columns).sum(1))
        return sums

    def _largest_blocks(self) -> Tensor:
        u, blocks = self._direction, self.blocks.view(2, -1)
        for start, stop in _pieces(self.grad.numel()):
            at = slice(start // SUMMED, -(-stop // SUMMED))
            p, temporaries = self._scratch(stop - start)
            _load_weights_(p, self.state, start, temporaries)
            blocks[0, at] = _square_sums(u[start:stop])
            blocks[1, at] = _square_sums(p)
        return blocks.amax(1)

    def _block_sums(self) -> Tensor:
        units = _unit_of(self.measures[2], self.num_blocks)[:, None]
        return (self.blocks.view(2, -1) + units).sub_(units).sum(1)

    def _move(self) -> None:
        k, out = self.k, self.out
        u, rate = self._direction, _rate(self.measures[3], self.numel, k)
        own = self._new_variance[self.kept]
        self.variance[: own.numel()].copy_(own)
        for start, stop in _pieces(self.grad.numel()):
            p, temporaries = self._scratch(stop - start)
            _load_weights_(p, self.state, start, temporaries)
            change = torch.mul(u[start:stop], rate, out=temporaries.b)
            if k.decay:
                change.add_(torch.mul(p, k.decay, out=temporaries.a))
            p.sub_(change)
            if out is not None:
                out[start:stop].copy_(p)
            _store_weights_(p, self.state, start, temporaries)

    def _scratch(self, size: int) -> tuple[Tensor, Scratch]:
        """Room for weights, and temporaries, of a piece of `size`."""
        p, a, _, b = self.floats[: 4 * size].view(4, size)
        return p, Scratch(a, b, self.floats[2 * size : 4 * size].view(torch.float64), self.mask[:size])

    def _zeros(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.float64, device=self.grad.device)

    def _split(self, x: Tensor) -> list[Tensor]:
        """What there is of every row, and of every column."""
        return list(x.split(lines_of(self.matrices)))

    @cached_property
    def _gradient(self) -> Tensor:
        """As an update takes it: [n] fp32. It becomes the direction."""
        g = torch.empty_like(self.grad, dtype=torch.float32)
        for start, stop in _pieces(g.numel()):
            piece = g[start:stop]
            load_(piece, self.grad[start:stop])
            flush_(piece, self.k.grad_floor, self._scratch(stop - start)[1]).mul_(self.k.grad_scale)
        return g

    def _tiles(self, of_lines: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """The gradient [count, rows, columns] in tiles of ADAFACTOR_PIECE elements, and of `of_lines` their rows
        [count, rows] and columns [count, columns]."""
        for at, lines in self.rectangles_of(of_lines):
            count, rows, columns, _ = at.matrices
            g = self._gradient[at.start : at.start + at.numel].view(count, rows, columns)
            row, column = (x.view(count, -1) for x in lines)
            few, wide = max(1, ADAFACTOR_PIECE // (rows * columns)), min(columns, ADAFACTOR_PIECE)
            high = max(1, ADAFACTOR_PIECE // wide)
            for m, r, c in product(_cut(count, few), _cut(rows, high), _cut(columns, wide)):
                yield g[m, r, c], [row[m, r], column[m, c]]

    @cached_property
    def _new_variance(self) -> Tensor:
        old, k = self.largest[self.num_lines :].float(), self.k
        rows, columns = self._split(self.sums)
        kept = self.matrices.kept
        means = [
            *([_over(rows, self.matrices.columns)] if kept[0] else []),
            *([_over(columns, self.matrices.rows)] if kept[1] else []),
        ]
        new = old.mul_(k.keep).add_(torch.cat(means).mul_(k.add))
        return new.masked_fill_(new.abs() < EXP_AVG_SQ_FLOOR, 0.0)

    @cached_property
    def _direction(self) -> Tensor:
        """[n] fp32, in place of the gradient."""
        factors = _roots(self._new_variance, self.matrices, self.k)
        for view, (left, right) in self._tiles(torch.cat([x.view(-1) for x in factors])):
            view.mul_((left[:, :, None] * right[:, None]).clamp_(max=self.k.limit))
        return self._gradient


def _cut(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]


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


def _over(sums: Tensor, count: int) -> Tensor:
    """Means in float32."""
    return sums.div(torch.full_like(sums, count)).float()


def _roots(variance: Tensor, matrices: Matrices, k: AdafactorFactors) -> tuple[Tensor, Tensor]:
    """What a gradient is multiplied by for its row [count, rows] and for its column [count, columns]."""
    count, rows, columns, factored = matrices
    kept, others = matrices.kept
    if not factored:
        return variance.new_ones(1, 1), _inverse_root(variance.view(1, -1))
    row, column = (x.view(count, -1) if x.numel() else None for x in variance.split([kept, others]))
    if row is None:
        assert column is not None
        row = _mean(column, columns)
    column = _mean(row, rows) if column is None else column
    return _inverse_root(row / _mean(row, rows).clamp_(min=k.least_mean)), _inverse_root(column)


def _rate(sums: Tensor, numel: int, k: AdafactorFactors) -> Tensor:
    of_update, of_weights = _root(_over(sums, numel))
    size = of_weights.clamp_(min=k.least_size).mul_(k.rate)
    return size / (of_update / torch.full_like(of_update, k.threshold)).clamp_(min=1.0)


def _mean(x: Tensor, count: int) -> Tensor:
    return _over(_exact_sum(x.double()), count)[:, None]


def _inverse_root(x: Tensor) -> Tensor:
    root = _root(x)
    return torch.ones_like(root) / root


def _root(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()
