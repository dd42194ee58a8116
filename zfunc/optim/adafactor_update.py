"""Adafactor's update of a part of a parameter, in rounds: defined in torch operations, and by the kernel.

Each operation is rounded once to float32, but for sums:

    g = grad * grad_scale                     0 where |grad * grad_scale| < 2^-56
    r, c = keep * r + add * mean(g * g)       of rows and columns; 0 where they are below 2^-120
    f = 1 / sqrt(r / max(mean(r), least_mean)) * (1 / sqrt(c))          at most `limit`
    u = g * f
    size = max(least_size, root mean square of p)
    rate = rate * size / max(1, root mean square of u / threshold)
    p = p - (rate * u + decay * p)            without decay * p where nothing decays

A vector has no r, its c has every element, and f is 1 / sqrt(c).

A sum of float64 depends on its order where it rounds, and here none does: every term is first rounded to a multiple
of one unit, so small that the largest keeps 52 bits less those of the number of terms (Demmel & Nguyen, "Fast
Reproducible Floating-Point Summation", 2013). So threads, vector units, devices and ranks may add in any order. A
rank without the whole parameter measures its part, and the ranks take the largest of each number in even rounds,
and the sum in odd ones:

    0   the largest gradient of every row and column, and the variances, which lie in the slices of the ranks
    1   the sums of squares of every row and column; a vector has none, as each element is its own column
    2   the largest sum of squares of 64 elements, of the direction u and of the weights
    3   the sums of these
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from math import lcm, prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, measuring_room, moment_buffers
from zfunc.optim.adafactor_matrices import PIECE, SUMMED, AdafactorFactors, Matrices, matrices_of
from zfunc.optim.base import ParameterPart
from zfunc.optim.formats import pack_weights, unpack_weights
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam
from zfunc.optim.rules import EXP_AVG_SQ_FLOOR
from zfunc.optim.updates import CPU, checked_threads, update_spans

NUM_ROUNDS = 4
# Buffers of the kernel, in the order of csrc/_adafactor_kernel.h
POINTERS = (
    "grad",
    "row_largest",
    "column_largest",
    "row_unit",
    "column_unit",
    "row_sum",
    "column_sum",
    "left",
    "right",
)
POINTERS += "direction_squares", "weight_squares", "master", "low", "into_master", "into_low", "out"


class Rectangle(NamedTuple):
    """Whole matrices, whole rows of one, or a part of a row, from element `start` of a part on."""

    start: int
    shape: tuple[int, int, int]  # matrices, rows and columns
    rows: slice  # in a tensor of what there is of all rows, then of all columns
    columns: slice

    @property
    def elements(self) -> slice:
        """Of the part."""
        return slice(self.start, self.start + prod(self.shape))

    def of(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Its rows [matrices, rows] and columns [matrices, columns]."""
        return lines[self.rows].view(self.shape[0], -1), lines[self.columns].view(self.shape[0], -1)


def rectangles(matrices: Matrices, start: int, stop: int) -> Iterator[Rectangle]:
    """Elements `start` to `stop` of a parameter: at most five.

    >>> [x.shape for x in rectangles(Matrices(3, 2, 4, True), 2, 23)]
    [(1, 1, 2), (1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 1, 3)]
    """
    count, rows, columns, _ = matrices
    at = start
    while at < stop:
        row, column = divmod(at, columns)
        matrix, left = row // rows, stop - at
        if column or left < columns:
            shape = 1, 1, min(left, columns - column)
        elif row % rows or left < rows * columns:
            shape = 1, min(left // columns, rows - row % rows), columns
        else:
            shape = left // (rows * columns), rows, columns
        first = (count * rows) + matrix * columns + column
        lines = slice(row, row + shape[0] * shape[1]), slice(first, first + shape[0] * shape[2])
        yield Rectangle(at - start, shape, *lines)
        at += prod(shape)


class AdafactorUpdate:
    """An update under way of 1-D contiguous buffers, by name, in place or `into` others.

    `out`: [n] fp32, bf16 or fp16, receives the rounded new weights. Raises TypeError or ValueError with every
    buffer unchanged. What is measured is 0 or more, and 0 where the part has none.
    """

    place: ClassVar[torch.device | None] = None  # of the buffers; None: one device, whichever

    def __init__(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        *,
        state_format: str,
        part: ParameterPart,
        factors: AdafactorFactors,
        out: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        update_spans(state_format, state, grad, out, into, device=self.place)
        (kind,) = moment_buffers(state_format)
        whole, n = matrices_of(part.shape), grad.numel()
        # Of a vector, the variances of a part are there with it.
        self.matrices = whole if whole.factored else Matrices(1, 1, n, factored=False)
        self.first = part.start if whole.factored else 0
        self.numel, self.num_kept = prod(part.shape), sum(self.matrices.kept)
        self.state, self.into, self.grad, self.out = state, into or state, grad, out
        self.variance, self.state_format = kind.name, state_format
        edges = (min(kind.numel(x), self.num_kept) for x in (self.first, self.first + n))
        self.kept = slice(*edges)  # of the variances, which its buffer begins with
        with np.errstate(over="ignore"):  # grad_floor may be infinite
            self.k = AdafactorFactors._make(float(np.float32(x)) for x in factors)
        self.measures = [*part.measures]
        room = (
            grad.new_empty(measuring_room(0, n).stop, dtype=torch.float64) if part.room is None else part.room
        )
        self.blocks = room.view(2, -1)  # sums of squares of every SUMMED elements: direction, weights

    @torch.no_grad()
    def measure(self) -> Tensor:
        """What the part has of the next round: [of `Adafactor.update_work`] fp64. Only the part's room changes."""
        rounds = self._largest, self._sums, self._largest_blocks, self._block_sums
        return rounds[len(self.measures)]()

    @torch.no_grad()
    def finish(self) -> None:
        """The rounds that are left, as if the part were the whole, and the update."""
        if not self.grad.numel():
            return
        while len(self.measures) < NUM_ROUNDS:
            self.measures.append(self.measure())
        new, own = self.into[self.variance], self._new_variance[self.kept]
        new[: own.numel()].copy_(own)
        new[own.numel() :].zero_()
        self._move(self._rate)

    # ---- rounds: what there is one of for each row and column -----------------------------------------------

    def _largest(self) -> Tensor:
        if not self.matrices.factored:
            return self._zeros(0)
        largest = self.grad.new_zeros(self.matrices.num_lines, dtype=torch.float32)
        old = self._zeros(self.num_kept)
        old[self.kept] = self.state[self.variance][: self.kept.stop - self.kept.start].double()
        for at in self._rectangles():
            self._largest_in(at, largest)
        return torch.cat([largest.double(), old])

    def _sums(self) -> Tensor:
        if not self.matrices.factored:
            return self._zeros(0)
        sums, units = self._zeros(self.matrices.num_lines), self._units()
        for at in self._rectangles():
            self._sums_in(at, units, sums)
        return sums

    def _units(self) -> Tensor:
        """What rounds the squares of every row and of every column: fp64."""
        rows, columns = self._split(self.measures[0][: self.matrices.num_lines].square())
        return torch.cat([_unit_of(rows, self.matrices.columns), _unit_of(columns, self.matrices.rows)])

    def _largest_blocks(self) -> Tensor:
        self._fill_blocks()
        return self.blocks.amax(1)

    def _block_sums(self) -> Tensor:
        units = _unit_of(self.measures[2], -(-self.numel // SUMMED))[:, None]
        # In place, for nobody reads them again: new memory would take most of the time.
        return self.blocks.add_(units).sub_(units).sum(1)

    @cached_property
    def _new_variance(self) -> Tensor:
        matrices, k = self.matrices, self.k
        if matrices.factored:
            old = self.measures[0][matrices.num_lines :].float()
            both = zip(self._split(self.measures[1]), (matrices.columns, matrices.rows), strict=True)
            means = [_over(sums, n) for (sums, n), kept in zip(both, matrices.kept, strict=True) if kept]
            mean = torch.cat(means)
        else:
            old, mean = self.state[self.variance].clone(), self._loaded.square()
        new = old.mul_(k.keep).add_(mean.mul_(k.add))
        return new.masked_fill_(new.abs() < EXP_AVG_SQ_FLOOR, 0.0)

    @cached_property
    def _lines(self) -> Tensor:
        """What a gradient is multiplied by for its row, then for its column: fp32."""
        matrices, variance, k = self.matrices, self._new_variance, self.k
        if not matrices.factored:
            return torch.cat([variance.new_ones(1), _inverse_root(variance)])
        row, column = (x.view(matrices.count, -1) for x in variance.split([*matrices.kept]))
        row = row if row.numel() else _mean(column, matrices.columns)
        column = column if column.numel() else _mean(row, matrices.rows)
        row = row / _mean(row, matrices.rows).clamp_(min=k.least_mean)
        return torch.cat([_inverse_root(x).view(-1) for x in (row, column)])

    @property
    def _rate(self) -> Tensor:
        of_update, of_weights = _root(_over(self.measures[3], self.numel))
        size = of_weights.clamp_(min=self.k.least_size).mul_(self.k.rate)
        return size / (of_update / torch.full_like(of_update, self.k.threshold)).clamp_(min=1.0)

    def _zeros(self, n: int) -> Tensor:
        return self.grad.new_zeros(n, dtype=torch.float64)

    def _split(self, lines: Tensor) -> list[Tensor]:
        """What there is of every row, and of every column."""
        rows = self.matrices.count * self.matrices.rows
        return [lines[:rows], lines[rows:]]

    # ---- sweeps in torch operations, by the rules of `updates` ----------------------------------------------

    def _pieces(self) -> Iterator[slice]:
        """The part in multiples of SUMMED elements, and in whole rows if PIECE has room for them."""
        unit, n = lcm(SUMMED, max(1, self.matrices.columns)), self.grad.numel()
        size = max(1, PIECE // unit) * unit if unit <= PIECE else PIECE
        edges = [0, *range(size - self.first % size, n, size), n]
        return (slice(*x) for x in pairwise(edges))

    def _rectangles(self) -> Iterator[Rectangle]:
        for piece in self._pieces():
            for at in rectangles(self.matrices, self.first + piece.start, self.first + piece.stop):
                yield at._replace(start=at.start + piece.start)

    def _largest_in(self, at: Rectangle, largest: Tensor) -> None:
        size = self._loaded[at.elements].abs().view(at.shape)
        for line, along in zip(at.of(largest), (2, 1), strict=True):
            line.copy_(torch.maximum(line, size.amax(along)))

    def _sums_in(self, at: Rectangle, units: Tensor, sums: Tensor) -> None:
        square = self._loaded[at.elements].double().square_().view(at.shape)
        rows, columns = at.of(units)[0][:, :, None], at.of(units)[1][:, None]
        at.of(sums)[0].add_((square + rows).sub_(rows).sum(2))
        at.of(sums)[1].add_(square.add_(columns).sub_(columns).sum(1))

    @cached_property
    def _loaded(self) -> Tensor:
        """The gradient as an update takes it, [n] fp32, which becomes the direction."""
        loaded = torch.empty_like(self.grad, dtype=torch.float32)
        for piece in self._pieces():
            g = self.grad[piece].to(torch.float32, copy=True)
            loaded[piece] = g.masked_fill_(g.abs() < self.k.grad_floor, 0.0).mul_(self.k.grad_scale)
        return loaded

    @cached_property
    def _direction(self) -> Tensor:
        for at in self._rectangles():
            left, right = at.of(self._lines)
            factor = (left[:, :, None] * right[:, None]).clamp_(max=self.k.limit)
            self._loaded[at.elements].view(at.shape).mul_(factor)
        return self._loaded

    def _weights(self, state: Mapping[str, Tensor], piece: slice) -> dict[str, Tensor]:
        return {name: x[piece] for name, x in state.items() if name.startswith("master")}

    def _fill_blocks(self) -> None:
        for piece in self._pieces():
            at = slice(piece.start // SUMMED, -(-piece.stop // SUMMED))
            self.blocks[0, at] = _square_sums(self._direction[piece])
            self.blocks[1, at] = _square_sums(unpack_weights(self._weights(self.state, piece)))

    def _move(self, rate: Tensor) -> None:
        for piece in self._pieces():
            p = unpack_weights(self._weights(self.state, piece))
            change = self._direction[piece].mul_(rate)
            p = p - (change.add_(p * self.k.decay) if self.k.decay else change)
            if self.out is not None:
                self.out[piece].copy_(p)
            for name, x in pack_weights(p, self.state_format, {}).items():
                self.into[name][piece].copy_(x)


class KernelAdafactor(AdafactorUpdate):
    """By the compiled kernel in host memory: four sweeps over the gradient.

    Threads and instruction set change no bit. It allocates n / 4 bytes, and 64 for each row and column.
    """

    place = CPU

    def __init__(self, *args: Any, threads: int | None = None, isa: int = -1, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.team = checked_threads(threads), isa

    def _rectangles(self) -> Iterator[Rectangle]:
        return rectangles(self.matrices, self.first, self.first + self.grad.numel())

    def _largest_in(self, at: Rectangle, largest: Tensor) -> None:
        self._sweep(cpu_adam.LARGEST, at, zip(("row_largest", "column_largest"), at.of(largest), strict=True))

    def _sums_in(self, at: Rectangle, units: Tensor, sums: Tensor) -> None:
        names = "row_unit", "column_unit", "row_sum", "column_sum"
        self._sweep(cpu_adam.FACTOR_SUMS, at, zip(names, (*at.of(units), *at.of(sums)), strict=True))

    def _units(self) -> Tensor:
        """A sum that is infinite or NaN is that of its unit."""
        largest = self.measures[0][: self.matrices.num_lines]
        return torch.where(largest.isfinite(), super()._units(), largest)

    def _fill_blocks(self) -> None:
        squares = zip(("direction_squares", "weight_squares"), self.blocks, strict=True)
        self._sweep(cpu_adam.FACTOR_SQUARES, None, (*squares, *self._of_lines, *self._named(self.state)))

    def _move(self, rate: Tensor) -> None:
        copy = () if self.out is None else (("out", self.out),)
        into = self._named(self.into, "into_")
        moved = (*self._of_lines, *self._named(self.state), *into, *copy)
        self._sweep(cpu_adam.FACTORED, None, moved, rate.item())

    def _sweep(
        self, sweep: int, at: Rectangle | None, given: Iterable[tuple[str, Tensor]], rate: float = 0.0
    ) -> None:
        """One of the kernel's over matrices of their own, or over the whole part, with these tensors by name."""
        grad = self.grad if at is None else self.grad[at.elements]
        _, rows, columns = self.matrices[:3] if at is None else at.shape
        known = {"grad": grad, **dict(given)}
        out, k = known.get("out"), self.k
        cpu_adam.factor(
            sweep,
            [known[x].data_ptr() if x in known else 0 for x in POINTERS],
            (rows, columns, self.first if at is None else 0),
            (
                KERNEL_DTYPES[grad.dtype],
                cpu_adam.NONE if out is None else KERNEL_DTYPES[out.dtype],
                bool(k.decay),
            ),
            (k.grad_scale, k.grad_floor, k.limit, rate, k.decay),
            grad.numel(),
            *self.team,
        )

    @property
    def _of_lines(self) -> Iterable[tuple[str, Tensor]]:
        return zip(("left", "right"), self._split(self._lines), strict=True)

    def _named(self, state: Mapping[str, Tensor], prefix: str = "") -> Iterable[tuple[str, Tensor]]:
        """fp32 weights, or their halves."""
        names = ("master",) if "master" in state else (HIGH_HALF, "master_low")
        return [(prefix + role, state[x]) for role, x in zip(("master", "low"), names, strict=False)]


# ---- arithmetic --------------------------------------------------------------------------------------------


def _unit_of(largest: Tensor, count: int) -> Tensor:
    """What a term of an exact sum of `count` is added to and freed of again, the `largest` being such.

    >>> unit = _unit_of(torch.tensor([1.0], dtype=torch.float64), 3)
    >>> unit.item(), ((0.1 + unit) - unit).item()
    (8.0, 0.09999999999999964)
    """
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent + count.bit_length())


def exact_sum(terms: Tensor) -> Tensor:
    """Sums of float64 along the last dimension, from 0 up, which no order changes."""
    unit = _unit_of(terms.amax(-1, keepdim=True), terms.shape[-1])
    return ((terms + unit) - unit).sum(-1)


def _square_sums(x: Tensor) -> Tensor:
    """The sums of squares of every 64 elements of x [n], in the kernel's order: [ceil(n / 64)]."""
    squares = torch.nn.functional.pad(x, (0, -x.numel() % SUMMED)).double().square_()
    lanes, *others = squares.view(-1, SUMMED // 16, 16).unbind(1)
    for other in others:
        lanes = lanes + other
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]


def _over(sums: Tensor, count: int) -> Tensor:
    """Means in float32."""
    return sums.div(torch.full_like(sums, count)).float()  # by a tensor: a device may multiply by 1 / count


def _mean(x: Tensor, count: int) -> Tensor:
    """Of each row of x [matrices, count] fp32: [matrices, 1]."""
    return _over(exact_sum(x.double()), count)[:, None]


def _inverse_root(x: Tensor) -> Tensor:
    root = _root(x)
    return torch.ones_like(root) / root


def _root(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()  # rounded right on any device
