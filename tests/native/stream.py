"""Cases to the program and buffers back, compared bit for bit: the Python side of kernel_cases.c.

The invariant: a case says with names what to run and what must come out; the numbers for those names come from
the program (`kernel_cases describe`), so they are written down once, in C.
"""

import bisect
import itertools
import os
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy_reference import Array, reference_square_sum

from .variants import Variant

HEADER, BUFFER, CALL = struct.Struct("=5I7i2I13d"), struct.Struct("=4IQ"), struct.Struct("=2Q")
BATCH = 32 << 20  # bytes of buffers for one run of the program
Names = dict[str, dict[str, int]]


class MismatchError(AssertionError):
    """The program stopped, or its bits are not those of the reference."""


class Buffer(NamedTuple):
    """One array of a case: before, and what it must hold after."""

    role: str
    before: Array  # [n / per]
    after: Array  # [n / per]
    per: int = 1  # elements an item stands for


class Case(NamedTuple):
    """Calls of one kernel on consecutive parts of n elements."""

    name: str
    op: str
    n: int
    buffers: tuple[Buffer, ...]
    how: tuple[str, ...] = ()  # names of the kernel's constants, and numbers
    sizes: tuple[int, int] = (0, 0)  # dithers, or the rows and columns of Adafactor's matrices
    factors: tuple[float, ...] = ()
    summed: Array | None = None  # [n] fp32 whose squares every call returns the sum of
    isa: str = "baseline"
    threads: int = 1
    cuts: tuple[int, ...] = ()  # where a call ends and the next begins; multiples of 64
    offset: int = 0  # items every buffer is away from the beginning of its block

    @property
    def calls(self) -> list[tuple[int, int]]:
        """Elements of each call."""
        return list(itertools.pairwise([0, *(cut for cut in self.cuts if cut < self.n), self.n]))

    @property
    def sums(self) -> list[float]:
        """What each call returns."""
        if self.summed is None:
            return [0.0] * len(self.calls)
        return [sum(reference_square_sum(self.summed[begin:end]).tolist()) for begin, end in self.calls]

    def __str__(self) -> str:
        how = f"{self.isa}, {self.threads} threads, cuts {self.cuts}, offset {self.offset}"
        return f"{self.op} {self.name}, n={self.n}, {how}"


class Program(NamedTuple):
    """The compiled kernel_cases.c and how it runs here."""

    path: Path
    variant: Variant

    def run(self, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run it with `given` on its standard input."""
        env = {**os.environ, **self.variant.environment}
        call = [*self.variant.runner, str(self.path), *words]
        return subprocess.run(call, input=given, capture_output=True, env=env, check=False)

    def names(self) -> Names:
        """What the numbers in a case stand for; `isa` has only what this CPU runs."""
        done = self.run("describe")
        if done.returncode:
            raise MismatchError(f"`describe` ended with {done.returncode}:\n{done.stderr.decode()}")
        names: Names = {}
        for group, name, value in (line.split() for line in done.stdout.decode().splitlines()):
            names.setdefault(group, {})[name] = int(value)
        return names


def encode(case: Case, names: Names) -> bytes:
    """One case as kernel_cases.c reads it."""
    how = [int(x) if x.isdigit() else names["constant"][x] for x in case.how]
    counts = case.threads, len(case.buffers), len(case.calls)
    op = names["op"][case.op], names["isa"][case.isa]
    numbers = [*how, *[0] * (7 - len(how)), *case.sizes, *case.factors, *[0.0] * (13 - len(case.factors))]
    parts = [HEADER.pack(*op, *counts, *numbers)]
    for b in case.buffers:
        width = b.before.itemsize
        parts += [BUFFER.pack(names["role"][b.role], width, b.per, case.offset * width, b.before.nbytes)]
        parts += [b.before.tobytes()]
    return b"".join([*parts, *(CALL.pack(*call) for call in case.calls)])


def bits(x: Array) -> Array:
    """Bits of an array, every NaN alike: its payload is not promised. uint16 holds bf16."""
    if x.dtype == np.uint16:
        return np.where((x & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), x)
    if x.dtype.kind in "iu":
        return x
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x).view(f"u{x.itemsize}")


def compare(case: Case, got: bytes) -> None:
    """Raise MismatchError at the first item that is not the expected one."""
    expected = [("sum of a call", np.array(case.sums)), *((b.role, b.after) for b in case.buffers)]
    start = 0
    for what, after in expected:
        mine = bits(np.frombuffer(got, after.dtype, after.size, start))
        start += after.nbytes
        wrong = np.flatnonzero(mine != bits(after))
        if wrong.size:
            i = wrong[0]
            raise MismatchError(
                f"{case}: {what}[{i}] has the bits {mine[i]:#x}, the reference {bits(after)[i]:#x}; "
                f"{wrong.size} of {after.size} differ"
            )


def result_bytes(case: Case) -> int:
    """How much the program writes for a case."""
    return 8 * len(case.calls) + sum(b.after.nbytes for b in case.buffers)


def batches(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases in runs of the program of about BATCH bytes."""
    batch: list[Case] = []
    size = 0
    for case in cases:
        batch.append(case)
        size += result_bytes(case)
        if size > BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def check_batch(program: Program, batch: Sequence[Case], names: Names) -> None:
    """Run some cases and compare every buffer; a program that stopped is reported with the case it was in."""
    done = program.run(given=b"".join(encode(case, names) for case in batch))
    starts = list(itertools.accumulate(map(result_bytes, batch), initial=0))
    if done.returncode or len(done.stdout) != starts[-1]:
        finished = bisect.bisect_right(starts, len(done.stdout)) - 1
        where = batch[min(finished, len(batch) - 1)]
        said = done.stderr.decode(errors="replace")[:4000]
        raise MismatchError(
            f"{where}: in or after this case the program ended with {done.returncode}:\n{said}"
        )
    for case, (start, stop) in zip(batch, itertools.pairwise(starts), strict=True):
        compare(case, done.stdout[start:stop])


def check(program: Program, cases: Iterable[Case]) -> int:
    """Run all cases; returns how many there were."""
    names, count = program.names(), 0
    for batch in batches(cases):
        check_batch(program, batch, names)
        count += len(batch)
    return count
