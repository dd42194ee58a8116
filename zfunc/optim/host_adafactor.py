"""Adafactor in host memory: checked calls into the compiled kernel, which reads the gradient in four sweeps.

`adafactor_reference` defines what they compute; what there is one of for each row or column is computed there too.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers
from zfunc.optim.adafactor_reference import AdafactorFactors, lines_of, new_variance, rate_of, roots, unit_of
from zfunc.optim.adafactor_rounds import AdafactorRounds, Rectangle
from zfunc.optim.adam_reference import Array
from zfunc.optim.argument_checks import INTO, checked_threads, update_spans
from zfunc.optim.base import ParameterPart
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam


def host_adafactor_(state: Mapping[str, Tensor], grad: Tensor, **arguments: Any) -> None:
    """One step of a part of a parameter over 1-D contiguous host buffers, by name, in place or `into` others.

    `grad`: [n] fp32, bf16 or fp16, read only. `out`: [n] of such a type, receives the rounded new weights. Threads
    and instruction set change no bit. It allocates n / 4 bytes, and 64 for each row and column.
    Raises TypeError or ValueError, with every buffer unchanged, as `zfunc.optim.host_adam.adam_update_` does.
    """
    update = HostAdafactor(state, grad, **arguments)
    if grad.numel():
        with np.errstate(all="ignore"):
            update.finish()


def host_adafactor_round(state: Mapping[str, Tensor], grad: Tensor, **arguments: Any) -> Tensor:
    """What a part of a parameter has of the next round of that step; only the part's room changes."""
    with np.errstate(all="ignore"):
        return HostAdafactor(state, grad, **arguments).measure()


class HostAdafactor(AdafactorRounds):
    """An update under way, by the kernel."""

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
        threads: int | None = None,
        isa: int = -1,
    ) -> None:
        self.spans = update_spans(state_format, state, grad, out, into)
        (kind,) = moment_buffers(state_format)
        super().__init__(part, kind, grad.device)
        self.grad, self.out, self.into, self.team = grad, out, into, (checked_threads(threads), isa)
        self.variances = state[kind.name].numpy(), (state if into is None else into)[kind.name].numpy()
        self.decays = bool(factors.decay)
        with np.errstate(all="ignore"):
            self.k = AdafactorFactors._make(np.float32(x) for x in factors)

    def _lines(self) -> Tensor:
        of_lines, old = np.zeros(self.num_lines), np.zeros(sum(self.matrices.kept))
        old[self.kept] = self.variances[0][: self.kept.stop - self.kept.start]
        for at, own in self.rectangles_of(of_lines):
            found = [np.zeros(x.size, np.float32) for x in own]
            cpu_adam.factor_largest(*self._gradient(at), *map(_address, found), *self.team)
            for x, new in zip(own, found, strict=True):
                np.maximum(x, new, out=x)
        return torch.from_numpy(np.concatenate([of_lines, old]))

    def _line_sums(self) -> Tensor:
        largest, sums = self.largest.numpy()[: self.num_lines], np.zeros(self.num_lines)
        units = np.empty(self.num_lines)
        counts = self.matrices.columns, self.matrices.rows
        for x, unit, count in zip(self._split(largest), self._split(units), counts, strict=True):
            unit[:] = np.where(np.isfinite(x), unit_of(x**2, count), x)
        both = zip(self.rectangles_of(sums), self.rectangles_of(units), strict=True)
        for (at, own), (_, unit) in both:
            found = [np.zeros(x.size) for x in own]
            cpu_adam.factor_sums(*self._gradient(at), *map(_address, (*unit, *found)), *self.team)
            for x, new in zip(own, found, strict=True):
                x += new
        return torch.from_numpy(sums)

    def _largest_blocks(self) -> Tensor:
        blocks = self._blocks
        cpu_adam.factor_squares(
            *self._gradient(), *self._direction, _weights(self.spans), *map(_address, blocks), *self.team
        )
        return torch.from_numpy(blocks.max(1))

    def _block_sums(self) -> Tensor:
        blocks, units = self._blocks, unit_of(self.measures[2].numpy(), self.num_blocks)[:, None]
        blocks += units  # in place, for nobody reads them again: new memory would take most of the time
        blocks -= units
        return torch.from_numpy(blocks.sum(1))

    def _move(self) -> None:
        rate = rate_of(*self.measures[3].numpy(), self.numel, self.k)
        own, new, out = self._variance[self.kept], self.variances[1], self.out
        new[: own.size], new[own.size :] = own, 0.0
        cpu_adam.factored_update(
            *self._gradient(),
            *self._direction,
            _weights(self.spans),
            _weights(self.spans, INTO if self.into else ""),
            self.spans["out"][0] if out is not None else 0,
            cpu_adam.NONE if out is None else KERNEL_DTYPES[out.dtype],
            self.decays,
            rate,
            self.k.decay,
            *self.team,
        )

    def _gradient(self, at: Rectangle | None = None) -> tuple[tuple[Any, ...], int]:
        """As the kernel takes it, and the number of elements: of matrices of its own, or all."""
        address, element = self.spans["grad"][0], self.grad.element_size()
        address, first = (address, self.first) if at is None else (address + at.start * element, 0)
        _, rows, columns, _ = self.matrices if at is None else at.matrices
        kind, k = KERNEL_DTYPES[self.grad.dtype], self.k
        matrix = address, kind, rows, columns, k.grad_scale, k.grad_floor, first
        return matrix, self.grad.numel() if at is None else at.numel

    @cached_property
    def _variance(self) -> Array:
        old = self.largest.numpy()[self.num_lines :].astype(np.float32)
        return new_variance(old, *self._split(self.sums.numpy()), self.matrices, self.k)

    @cached_property
    def _scales(self) -> list[Array]:
        return [np.ascontiguousarray(x) for x in roots(self._variance, self.matrices, self.k)]

    @property
    def _direction(self) -> tuple[int, int, np.float32]:
        left, right = self._scales
        return _address(left), _address(right), self.k.limit

    @property
    def _blocks(self) -> Array:
        return self.blocks.numpy().reshape(2, -1)

    def _split(self, x: Array) -> list[Array]:
        """What there is of every row, and of every column."""
        return np.split(x, lines_of(self.matrices)[:1])


def _address(x: Array) -> int:
    return x.ctypes.data


def _weights(spans: Mapping[str, tuple[int, int, str]], prefix: str = "") -> tuple[int, int]:
    """The address of fp32 weights and 0, or those of their halves."""
    if prefix + "master" in spans:
        return spans[prefix + "master"][0], 0
    return spans[prefix + HIGH_HALF][0], spans[prefix + "master_low"][0]
