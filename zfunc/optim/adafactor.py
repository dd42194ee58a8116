"""Adafactor: its settings, and its update of a whole parameter, by the kernel or in torch operations.

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
Reproducible Floating-Point Summation", 2013). So threads, vector units and devices may add in any order. Four
sweeps measure a parameter before its update:

    the largest gradient of every row and column
    the sums of squares of every row and column; a vector has none, as each element is its own column
    the largest sum of squares of 64 elements, of the direction u and of the weights
    the sums of these

A rank without the whole parameter could measure a part of it alone, so several ranks are refused.

torch is imported where an update needs it: settings, formats and plans need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import inf, lcm, prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import attrs

from zfunc.core.decision import StepDecision
from zfunc.core.layout import ALIGNMENT
from zfunc.core.optimizer_state import MOMENTS, STATE_FORMATS, StateBuffer, weight_buffers
from zfunc.errors import refuse
from zfunc.optim.elementwise import KernelOptimizer, LearningRate, lr_field, number_field
from zfunc.optim.rules import EXP_AVG_SQ_FLOOR, as_float32, grad_floor_of
from zfunc.values import FLOAT32_MAX, number

if TYPE_CHECKING:
    from torch import Tensor

FP32_EPS = 2.0**-23
PIECE = 1 << 20  # elements whose temporaries are there at a time, on a device
SUMMED = 64  # elements whose squares have a sum in a fixed order

# Each parameter has the means of its rows, then those of its columns, in the elements that are its own.
for _moments in MOMENTS:
    _weights = STATE_FORMATS[f"weights-{_moments}"]
    _factored = StateBuffer("row_col_variance", "fp32", shared=ALIGNMENT, whole=True)
    STATE_FORMATS[f"adafactor-{_moments}"] = (*_weights, _factored)
    STATE_FORMATS[f"adafactor-small-{_moments}"] = (*_weights, StateBuffer("variance", "fp32", whole=True))


# ---- a parameter as Adafactor sees it -------------------------------------------------------------------


class Matrices(NamedTuple):
    """A parameter as Adafactor sees it: `count` matrices, of its last two dimensions; a vector is one row.
    "Lines" are the rows of all matrices, then their columns."""

    count: int
    rows: int
    columns: int
    factored: bool  # a vector is not

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Matrices:
        """The matrices into which `torch.optim.Adafactor` divides a parameter of shape `shape`.

        >>> Matrices.of((8, 4, 3, 3)), Matrices.of((8,)).kept, Matrices.of((8, 4)).kept
        (Matrices(count=32, rows=3, columns=3, factored=True), slice(1, 9, None), slice(0, 12, None))
        """
        return cls(prod(shape[:-2]), *shape[-2:], True) if len(shape) > 1 else cls(1, 1, prod(shape), False)

    @property
    def num_rows(self) -> int:
        """The number of rows of all matrices of the parameter."""
        return self.count * self.rows

    @property
    def num_lines(self) -> int:
        """The number of lines (rows and columns) of all matrices of the parameter."""
        return self.count * (self.rows + self.columns)

    def split(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Split `lines`, a value for each row and each column, into (values of rows, values of columns)."""
        return lines[: self.num_rows], lines[self.num_rows :]

    @property
    def kept(self) -> slice:
        """The slice of the lines (all rows, then all columns of the parameter's matrices) for which the state
        stores a mean squared gradient.

        Where matrices have a single row or column, only the means of its elements are stored, not its own
        mean.
        """
        if not prod(self[:3]):
            return slice(0, 0)
        rows = self.factored and self.rows > 1
        columns = self.columns > 1 or not rows
        return slice(0 if rows else self.num_rows, self.num_lines if columns else self.num_rows)

    @property
    def num_kept(self) -> int:
        """For how many rows and columns of the parameter the state stores a mean squared gradient."""
        return self.kept.stop - self.kept.start

    def rectangles(self, start: int, stop: int) -> Iterator[Rectangle]:
        """Yield at most five rectangles (whole matrices, whole rows, parts of rows) that make up the elements
        `start` to `stop` of the parameter.

        >>> [x.shape for x in Matrices(3, 2, 4, True).rectangles(2, 23)]
        [(1, 1, 2), (1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 1, 3)]
        """
        at = start
        while at < stop:
            row, column = divmod(at, self.columns)
            matrix, left = row // self.rows, stop - at
            if column or left < self.columns:
                shape = 1, 1, min(left, self.columns - column)
            elif row % self.rows or left < self.rows * self.columns:
                shape = 1, min(left // self.columns, self.rows - row % self.rows), self.columns
            else:
                shape = left // (self.rows * self.columns), self.rows, self.columns
            below = self.num_rows + matrix * self.columns + column
            lines = slice(row, row + shape[0] * shape[1]), slice(below, below + shape[0] * shape[2])
            yield Rectangle(slice(at, at + prod(shape)), shape, *lines)
            at += prod(shape)


class Rectangle(NamedTuple):
    """A part of a parameter: whole matrices, whole rows of a matrix, or a part of a row."""

    elements: slice
    shape: tuple[int, int, int]  # matrices, rows and columns
    rows: slice  # of the lines
    columns: slice

    def of(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Values in `lines` of the rectangle's rows [matrices, rows, 1] and its columns [matrices, 1, columns]."""
        count = self.shape[0]
        return lines[self.rows].view(count, -1, 1), lines[self.columns].view(count, 1, -1)


# ---- the optimizer ----------------------------------------------------------------------------------------


class AdafactorFactors(NamedTuple):
    """The scalars of an Adafactor update, in float64; each is rounded once to float32 where it is used."""

    grad_scale: float
    grad_floor: float
    keep: float  # variance = keep * variance + add * mean of squares
    add: float
    least_mean: float  # of the rows' means, where they divide
    limit: float  # of what a gradient is multiplied by
    rate: float  # relative to the weights' size
    least_size: float
    threshold: float  # of the update's size
    decay: float


def _eps(value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        refuse("eps", repr(value), "two numbers", "pass such as (1e-7, 1e-3)")
    first = FP32_EPS if value[0] is None else value[0]
    return number("eps[0]", first, least=0), number("eps[1]", value[1], least=0)


@attrs.frozen
class Adafactor(KernelOptimizer):
    """Adafactor (Shazeer & Stern 2018), with the settings and the results of `torch.optim.Adafactor`.

    The state has the mean squared gradients of a matrix's rows and columns, or of a vector's elements; these
    means decay by 1 - step**beta2_decay. A step is min(lr, 1 / sqrt(step)) times the root mean square of the
    parameter, which counts as `eps[1]` at least; an update whose root mean square exceeds `d` is scaled down
    to it. `eps[0]` bounds from below what gradients are divided by (None: 2^-23). Weight decay is decoupled:
    lr * weight_decay.

    `lr` is a value or a pure function of the step, counted from 1; `decay(name, shape)` says whether weight
    decay applies to a parameter. The state takes 4.06 bytes a parameter, of vectors and small matrices 8.
    `moments` is the format of the master weights alone: whole with "fp32", in two exact 16-bit halves with
    "16bit" and "8bit"; the high half is the bf16 copy for the device.

    Raises ValueError or TypeError for values out of range.

    >>> Adafactor(lr=1e-2, moments="16bit").state_format()
    'adafactor-16bit'
    """

    usual: ClassVar = 5e-2, 0.0, {}

    lr: LearningRate = lr_field(1e-2)
    beta2_decay: float = number_field("beta2_decay", -0.8, least=-inf, most=0.0)
    eps: tuple[float, float] = attrs.field(default=(None, 1e-3), kw_only=True, converter=_eps)
    d: float = number_field("d", 1.0, least=1.0)

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """The number of a parameter's group: 0 with weight decay, 1 without; plus 2 for a vector or a small
        matrix, for which the state has a mean for each element."""
        matrices = Matrices.of(shape)
        small = not matrices.factored or matrices.num_kept > -(-prod(shape) // ALIGNMENT)
        return super().group(name, shape) + 2 * small

    def state_format(self, group: int = 0) -> str:
        """The name of Adafactor's state format for `group`, in `zfunc.core.optimizer_state.STATE_FORMATS`."""
        return f"adafactor-{'small-' if group & 2 else ''}{self.moments}"

    def device_workspace(self, numel: int) -> int:
        """Upper bound, in bytes, of what `device_update` allocates for a parameter of `numel` elements.

        The bound holds for matrices of at least 64 rows and columns, and for any parameter below 2^20
        elements.
        """
        return 6 * numel + 128 * min(numel + SUMMED, PIECE) + (1 << 16)

    def checked_factors(self, decision: StepDecision, group: int) -> AdafactorFactors:
        """The scalars of the update of `group` under `decision`; ValueError if float32 cannot hold one."""
        lr, add = decision.factors["lr"], decision.number**self.beta2_decay
        grad_scale = number("grad_scale", decision.grad_scale, computed=True)
        decay = lr * (0.0 if group & 1 else self.weight_decay)
        number("Adafactor's settings (as decay)", decay)
        return AdafactorFactors(
            grad_scale,
            grad_floor_of(grad_scale),
            keep=1.0 - add,
            add=add,
            least_mean=max(self.eps[0], EXP_AVG_SQ_FLOOR),
            limit=1.0 / max(self.eps[0], 1.0 / FLOAT32_MAX),
            rate=min(lr, 1.0 / decision.number**0.5),
            least_size=self.eps[1],
            threshold=self.d,
            decay=decay,
        )

    def host_update(self, *args: Any, **given: Any) -> None:
        """Update a parameter in host memory by the compiled kernel; arguments as in `Optimizer.host_update`."""
        self._run(KernelUpdate, *args, **given)

    def device_update(self, *args: Any, **given: Any) -> None:
        """Update a parameter on the tensors' device, in torch operations; arguments and bits as of
        `host_update`."""
        self._run(Update, *args, **given)

    def _run(self, kind: type[Update], *args: Any, group: int, **how: Any) -> None:
        from torch import no_grad

        *tensors, decision = args
        factors = self.checked_factors(decision, group)
        with no_grad():
            kind(self.state_format(group), factors, *tensors, **how).run()


# ---- an update in torch operations, by the rules of `updates` ---------------------------------------------


class Update:
    """An Adafactor update of one parameter in torch operations. Buffers are 1-D, contiguous, given by name,
    and updated in place, or `into` other buffers.

    `out`, [n] fp32, bf16 or fp16, receives the rounded new weights. The constructor raises TypeError or
    ValueError for wrong buffers, before any is changed.
    """

    on_host: ClassVar = False  # whether the buffers have to be there; else on one device, whichever

    def __init__(
        self,
        state_format: str,
        factors: AdafactorFactors,
        state: Mapping[str, Tensor],
        grad: Tensor,
        *,
        shape: tuple[int, ...],
        out: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        from zfunc.optim.updates import CPU, update_spans

        update_spans(state_format, state, grad, out, into, device=CPU if self.on_host else None)
        self.state, self.into, self.grad, self.out = state, into or state, grad, out
        self.masters, self.k = weight_buffers(state_format), as_float32(factors)
        self.matrices = Matrices.of(shape)
        variance = STATE_FORMATS[state_format][-1].name
        self.variance, self.new_variance = state[variance], self.into[variance]

    def run(self) -> None:
        """Update the parameter: measure it, then write its new mean squared gradients and its new weights."""
        if not self.grad.numel():
            return
        kept = self.matrices.num_kept
        self.new_variance[:kept].copy_(self._means)
        self.new_variance[kept:].zero_()
        self._move(self._rate)

    def _zeros(self, n: int) -> Tensor:
        return self.grad.new_zeros(n).double()

    # What is measured

    @cached_property
    def _sums(self) -> Tensor:
        """The sum of squared gradients of each line (row or column) of the parameter, in fp64."""
        n = self.matrices.num_lines
        largest, sums = self._zeros(n).float(), self._zeros(n)
        for at in self._rectangles():
            self._largest_in(at, largest)
        largest = largest.double()
        units = _unit_of(largest.square(), self._counts.frexp().exponent).where(largest.isfinite(), largest)
        for at in self._rectangles():
            self._sums_in(at, units, sums)
        return sums.where(units.isfinite(), units)  # infinite or NaN as the largest

    @cached_property
    def _counts(self) -> Tensor:
        """The number of elements of each line (row or column) of the parameter, in fp64."""
        rows, columns = self.matrices.split(counts := self._zeros(self.matrices.num_lines))
        rows.fill_(self.matrices.columns), columns.fill_(self.matrices.rows)
        return counts

    @cached_property
    def _means(self) -> Tensor:
        """The new mean squared gradients, fp32, of the rows and columns for which the state stores means."""
        old = self.variance[: self.matrices.num_kept].clone()
        if self.matrices.factored:
            mean = _over(self._sums, self._counts)[self.matrices.kept]
        else:
            mean = self._loaded.square()
        new = old.mul_(self.k.keep).add_(mean.mul_(self.k.add))
        return new.masked_fill_(new.abs() < EXP_AVG_SQ_FLOOR, 0.0)

    @cached_property
    def _lines(self) -> Tensor:
        """For each row and each column of the parameter, an fp32 factor: the direction of an element is its
        gradient times the factor of its row and that of its column."""
        kept, lines = self.matrices.kept, self._zeros(self.matrices.num_lines).float()
        lines[kept] = self._means
        row, column = (x.view(self.matrices.count, -1) for x in self.matrices.split(lines))
        if self.matrices.factored:
            # The mean that is not kept is that of the others.
            row.copy_(row if kept.start == 0 else _mean(column))
            column.copy_(column if kept.stop > self.matrices.num_rows else _mean(row))
            row.div_(_mean(row).clamp_(min=self.k.least_mean))
        else:
            row.fill_(1.0)
        root = _root(lines)
        return root.new_ones(()) / root

    @property
    def _rate(self) -> Tensor:
        """The learning rate of this parameter: proportional to the root mean square of its weights, and
        reduced if that of the update direction exceeds the threshold `d`."""
        n = self.grad.numel()
        blocks = self._zeros(2 * -(-n // SUMMED)).view(2, -1)  # sums of squares: direction, weights
        self._fill_blocks(*blocks)
        units = _unit_of(blocks.amax(1), blocks.shape[1].bit_length())[:, None]
        # In place, for nobody reads them again: new memory would take most of the time.
        of_update, of_weights = _root(_over(blocks.add_(units).sub_(units).sum(1), n))
        size = of_weights.clamp_(min=self.k.least_size).mul_(self.k.rate)
        return size / (of_update / of_update.new_full((), self.k.threshold)).clamp_(min=1.0)

    # Its sweeps

    def _pieces(self) -> Iterator[slice]:
        """Yield slices of the parameter's elements, to be processed one after the other: at most 2^20
        elements each, whole rows and multiples of 64 where possible."""
        unit, n = lcm(SUMMED, max(1, self.matrices.columns)), self.grad.numel()
        size = max(1, PIECE // unit) * unit if unit <= PIECE else PIECE
        return (slice(at, min(at + size, n)) for at in range(0, n, size))

    def _rectangles(self) -> Iterator[Rectangle]:
        for piece in self._pieces():
            yield from self.matrices.rectangles(piece.start, piece.stop)

    def _largest_in(self, at: Rectangle, largest: Tensor) -> None:
        size = self._loaded[at.elements].abs().view(at.shape)
        for line, along in zip(at.of(largest), (2, 1), strict=True):
            line.copy_(line.maximum(size.amax(along, keepdim=True)))

    def _sums_in(self, at: Rectangle, units: Tensor, sums: Tensor) -> None:
        square = self._loaded[at.elements].double().square_().view(at.shape)
        for total, unit, along in zip(at.of(sums), at.of(units), (2, 1), strict=True):
            total.add_((square + unit).sub_(unit).sum(along, keepdim=True))

    @cached_property
    def _loaded(self) -> Tensor:
        """The gradient [n] fp32 times `grad_scale`; later overwritten by the update direction."""
        loaded = self.grad.float() if self.grad.dtype.itemsize < 4 else self.grad.clone()
        for piece in map(loaded.__getitem__, self._pieces()):
            piece.masked_fill_(piece.abs() < self.k.grad_floor, 0.0).mul_(self.k.grad_scale)
        return loaded

    @cached_property
    def _direction(self) -> Tensor:
        for at in self._rectangles():
            row, column = at.of(self._lines)
            self._loaded[at.elements].view(at.shape).mul_((row * column).clamp_(max=self.k.limit))
        return self._loaded

    def _weights(self, piece: slice) -> Tensor:
        from zfunc.optim.formats import unpack_weights

        return unpack_weights({x: self.state[x][piece] for x in self.masters})

    def _fill_blocks(self, of_direction: Tensor, of_weights: Tensor) -> None:
        for piece in self._pieces():
            at = slice(piece.start // SUMMED, -(-piece.stop // SUMMED))
            of_direction[at] = _square_sums(self._direction[piece])
            of_weights[at] = _square_sums(self._weights(piece))

    def _move(self, rate: Tensor) -> None:
        from zfunc.optim.formats import pack

        for piece in self._pieces():
            p, change = self._weights(piece), self._direction[piece].mul_(rate)
            p = p - (change.add_(p * self.k.decay) if self.k.decay else change)
            if self.out is not None:
                self.out[piece].copy_(p)
            for name, x in pack(p, (), f"weights-{('fp32', '16bit')[len(self.masters) - 1]}", 0).items():
                self.into[name][piece].copy_(x)


# ---- by the compiled kernel -------------------------------------------------------------------------------

POINTERS = [  # its buffers, in the order of csrc/_adafactor_kernel.h
    "grad", "row_largest", "column_largest", "row_unit", "column_unit", "row_sum", "column_sum", "left", "right",
    "direction_squares", "weight_squares", "master", "low", "into_master", "into_low", "out",
]  # fmt: skip


class KernelUpdate(Update):
    """An Adafactor update of one parameter in host memory by the compiled kernel, in four passes over the
    gradient.

    The number of threads and the instruction set change no bit. Allocates n / 4 bytes for n elements, and 64
    bytes for each row and column.
    """

    on_host = True

    def __init__(self, *args: Any, threads: int | None = None, isa: int = -1, **given: Any) -> None:
        from zfunc.optim.updates import checked_threads

        super().__init__(*args, **given)
        self.team = checked_threads(threads), isa

    def _rectangles(self) -> Iterator[Rectangle]:
        return self.matrices.rectangles(0, self.grad.numel())

    def _largest_in(self, at: Rectangle, largest: Tensor) -> None:
        row, column = at.of(largest)
        self._sweep("LARGEST", at, row_largest=row, column_largest=column)

    def _sums_in(self, at: Rectangle, units: Tensor, sums: Tensor) -> None:
        (row, column), (row_unit, column_unit) = at.of(sums), at.of(units)
        given = {"row_sum": row, "column_sum": column, "row_unit": row_unit, "column_unit": column_unit}
        self._sweep("FACTOR_SUMS", at, **given)

    def _fill_blocks(self, of_direction: Tensor, of_weights: Tensor) -> None:
        self._sweep("FACTOR_SQUARES", direction_squares=of_direction, weight_squares=of_weights)

    def _move(self, rate: Tensor) -> None:
        self._sweep("FACTORED", rate=rate.item())

    def _sweep(self, sweep: str, at: Rectangle | None = None, *, rate: float = 0.0, **known: Tensor) -> None:
        """Run one pass of the compiled kernel over the gradient: the one named `sweep`, on the elements of
        rectangle `at` (None: all), with learning rate `rate` and tensors `known` from earlier passes."""
        from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam

        k, known["grad"] = self.k, self.grad if at is None else self.grad[at.elements]
        if at is None:
            known["left"], known["right"] = self.matrices.split(self._lines)
            for role, name in zip(("master", "low"), self.masters, strict=False):
                known[role], known[f"into_{role}"] = self.state[name], self.into[name]
            known |= {} if self.out is None else {"out": self.out}
        _, rows, columns = self.matrices[:3] if at is None else at.shape
        types = (KERNEL_DTYPES[known[x].dtype] if x in known else cpu_adam.NONE for x in ("grad", "out"))
        cpu_adam.factor(
            getattr(cpu_adam, sweep),
            [known[x].data_ptr() if x in known else 0 for x in POINTERS],
            (rows, columns),
            (*types, bool(k.decay)),
            (k.grad_scale, k.grad_floor, k.limit, rate, k.decay),
            known["grad"].numel(),
            *self.team,
        )


# ---- arithmetic -------------------------------------------------------------------------------------------


def _unit_of(largest: Tensor, bits: int | Tensor) -> Tensor:
    """The number to add to each term and subtract again, to round the terms so that their fp64 sum is exact:
    a power of two, from the `largest` term [n] fp64 and `bits`, the bit length of the number of terms.

    >>> import torch
    >>> unit = _unit_of(torch.tensor([1.0], dtype=torch.float64), 2)
    >>> unit.item(), ((0.1 + unit) - unit).item()
    (8.0, 0.09999999999999964)
    """
    return largest.new_ones(largest.shape).ldexp(largest.frexp().exponent + bits)


def exact_sum(terms: Tensor) -> Tensor:
    """The sum of float64 `terms`, none negative, along the last dimension; the same bits in any order."""
    unit = _unit_of(terms.amax(-1, keepdim=True), terms.shape[-1].bit_length())
    return ((terms + unit) - unit).sum(-1)


def _square_sums(x: Tensor) -> Tensor:
    """The sums of squares of every 64 elements of x [n], in the kernel's order: [ceil(n / 64)]."""
    squares = x.new_zeros(-(-x.numel() // SUMMED) * SUMMED).double()
    squares[: x.numel()] = x.double().square_()
    lanes, *others = squares.view(-1, SUMMED // 16, 16).unbind(1)
    for other in others:
        lanes = lanes + other
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]


def _over(sums: Tensor, count: int | Tensor) -> Tensor:
    """The means `sums / count`: float64 `sums` of `count` terms each, divided and rounded to float32."""
    return (sums / (sums.new_ones(()) * count)).float()  # by a tensor: a device may multiply by 1 / count


def _mean(x: Tensor) -> Tensor:
    """The mean of each row of x [matrices, n] fp32: [matrices, 1]."""
    return _over(exact_sum(x.double()), x.shape[1])[:, None]


def _root(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()  # rounded right on any device
