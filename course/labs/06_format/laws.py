"""The graded laws of lab 6."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy

from course.drawing import Cell, Row, table
from course.law import Broken, Kept, Picture, Student, every, law

TITLE = "a number format in 8.03 bits"
NOT_IMPORTED = ("zfunc",)
BLOCKS, BLOCK = 8, 64
SIZE = BLOCKS * BLOCK  # elements of a page
ROOM = SIZE + 2 * BLOCKS // 8  # bytes that it may take
BOUND, OUTLIER = 0.02, 0.04  # of the error, and with an outlier
PAGES = 40  # random ones of a law
Array = Any  # of NumPy
np: Any = numpy


def random_page(random: Random, outlier: float = 1.0) -> tuple[Array, Array]:
    """Random first and second moments of a page, as training makes them: both depend on the noise of a
    weight's gradient.

    The noise is log-normal: it varies within a decade or two from block to block, that is from a row of a
    matrix to another, and from weight to weight in a block. One element is `outlier` times as large.
    """
    by = np.random.default_rng(random.getrandbits(32))
    noise = np.repeat(10 ** by.normal(-4, 1, BLOCKS), BLOCK) * np.exp(by.normal(0, 1.2, SIZE))
    noise[by.integers(SIZE)] *= outlier
    second = (noise**2 * by.gamma(4, 0.25, SIZE)).astype(np.float32)
    return (noise * by.normal(0, 0.25, SIZE)).astype(np.float32), second


def round_trip(student: Student, page: Array, signed: bool) -> Array:
    """The page [512] after the student's encode and decode, float32. Raises Broken for any other result."""
    data = encoded(student, page, signed)
    got = student.decode(data, signed)
    if not isinstance(got, np.ndarray) or got.shape != (SIZE,) or got.dtype != np.float32:
        what = f"an array {got.shape} of {got.dtype}" if isinstance(got, np.ndarray) else type(got).__name__
        raise Broken(f"decode: got {what}, expected a NumPy array ({SIZE},) of float32")
    return got.copy()


def encoded(student: Student, page: Array, signed: bool) -> bytes:
    """The bytes that the student's `encode` returns for a page. Raises Broken if it returns anything else."""
    data = student.encode(page.copy(), signed)
    if not isinstance(data, bytes):
        raise Broken(f"encode: got {type(data).__name__}, expected bytes")
    return data


def error_of(got: Array, page: Array, second: Array, signed: bool) -> Array:
    """The error of each element in an update, first / root(second): of a first moment over the root of the
    second; of a second moment the relative error of its root, at most 1."""
    root = np.sqrt(second.astype(np.float64))
    wide = got.astype(np.float64)
    return (
        (wide - page) / root if signed else np.minimum(1.0, np.abs(np.sqrt(np.maximum(wide, 0)) / root - 1))
    )


def rms(x: Array) -> float:
    """The root mean square of `x`."""
    return float(np.sqrt(np.mean(x**2)))


def drawn(title: str, page: Array, got: Array, marked: Array) -> Picture:
    """A picture of a page before and after the round trip: at most eight elements, of the indices
    `marked`."""
    rows: list[Row] = [
        [str(i), str(i // BLOCK), f"{page[i]:.4g}", Cell(f"{got[i]:.4g}", "wrong")]
        for i in sorted(map(int, marked[:8]))
    ]
    return table(title, ["element", "block", "encoded", "decoded"], rows)


def smaller(page: Array) -> Iterator[Array]:
    """Yield the page with fewer elements that are not 0, and with rounder ones."""
    there = np.flatnonzero(page)
    halves = there[: len(there) // 2], there[len(there) // 2 :]
    for kept in (*halves, *(np.delete(there, i) for i in range(min(len(there), 8)))):
        if 0 < len(kept) < len(there):
            other = np.zeros_like(page)
            other[kept] = page[kept]
            yield other
    plain = np.array([float(f"{x:.1g}") for x in page], np.float32)
    if not np.array_equal(plain, page):
        yield plain


def over_pages(
    student: Student,
    random: Random,
    check: Callable[[Array, Array, bool], None],
    make: Callable[[bool], Array],
) -> None:
    """Call `check(page, got, signed)` for random pages of both kinds, from `make(signed)`, and round
    trips."""
    for signed in (False, True):

        def one(page: Array, signed: bool = signed) -> None:
            check(page, round_trip(student, page, signed), signed)

        every((make(signed) for _ in range(PAGES)), one, smaller)


@law(points=5)
def sizes(student: Student, random: Random) -> None:
    """a page takes at most 514 bytes, the same ones every time"""
    for signed in (False, True):
        page = random_page(random)[not signed]
        data = encoded(student, page, signed)
        if len(data) > ROOM:
            raise Broken(
                f"encode: got {len(data)} bytes, that is {len(data) * 8 / SIZE:.2f} bits an element, expected "
                f"{ROOM} at most: {SIZE} elements of 8 bits, and 2 bits for each of {BLOCKS} blocks"
            )
        if encoded(student, page, signed) != data:
            raise Broken(
                "encode: got other bytes the second time, expected the same: a run has to be repeatable"
            )
        round_trip(student, page, signed)


@law(points=5)
def zeros(student: Student, random: Random) -> None:
    """zero stays zero, alone, in a block of zeros, and in a page of them"""

    def make(signed: bool) -> Array:
        page = random_page(random)[not signed]
        page[random.sample(range(SIZE), random.randrange(SIZE))] = 0
        page[BLOCK * random.randrange(BLOCKS) :][:BLOCK] = 0
        return page if random.random() < 0.8 else page * 0

    def check(page: Array, got: Array, signed: bool) -> None:
        wrong = np.flatnonzero((page == 0) & (got != 0))
        if len(wrong):
            raise Broken(
                f"got {got[wrong[0]]:.4g} for element {wrong[0]}, which was 0 (signed={signed}), expected 0: "
                f"{np.count_nonzero(page)} elements of the page are not",
                drawn("Zeros that are none", page, got, wrong),
            )

    over_pages(student, random, check, make)


@law(points=15)
def positive(student: Student, random: Random) -> None:
    """what is decoded is finite, and a positive second moment stays positive: an update divides by its root"""

    def make(signed: bool) -> Array:
        page = random_page(random)[not signed]
        wide = page.astype(np.float64) * 10.0 ** random.uniform(-18, 24)
        sign = np.where(page < 0, -1, 1)
        return (sign * np.clip(np.abs(wide), 1e-30, 1e30)).astype(np.float32)

    def check(page: Array, got: Array, signed: bool) -> None:
        infinite = np.flatnonzero(~np.isfinite(got))
        wrong = (
            infinite if signed else np.flatnonzero(~np.isfinite(got) | (got < 0) | ((page > 0) & (got == 0)))
        )
        if len(wrong):
            i = wrong[0]
            raise Broken(
                f"got {got[i]:.4g} for element {i}, which was {page[i]:.4g} (signed={signed}), expected it "
                f"{'finite' if signed else 'positive'}",
                drawn("Moments that an update cannot use", page, got, wrong),
            )

    over_pages(student, random, check, make)


@law(points=10)
def monotone(student: Student, random: Random) -> None:
    """within a block, the larger of two moments is not decoded as the smaller one"""

    def check(page: Array, got: Array, signed: bool) -> None:
        for first in range(0, SIZE, BLOCK):
            order = first + np.argsort(page[first : first + BLOCK], kind="stable")
            falls = np.flatnonzero((np.diff(got[order]) < 0) & (np.diff(page[order]) > 0))
            if len(falls):
                a, b = order[falls[0]], order[falls[0] + 1]
                raise Broken(
                    f"got {got[a]:.4g} and {got[b]:.4g} for elements {a} and {b}, which were {page[a]:.4g} and "
                    f"{page[b]:.4g} (signed={signed}), expected the same order",
                    drawn("Two moments that change places", page, got, np.array([a, b])),
                )

    over_pages(student, random, check, lambda signed: random_page(random)[not signed])


def errors(student: Student, random: Random, signed: bool, outlier: float, bound: float) -> Kept:
    """The mean error on random pages, with a picture of the worst page. Raises Broken if above `bound`."""
    found: list[float] = []
    worst: tuple[float, Array, Array, Array] | None = None
    for _ in range(PAGES):
        first, second = random_page(random, outlier)
        page = first if signed else second
        got = round_trip(student, page, signed)
        error = error_of(got, page, second, signed)
        if outlier > 1:
            error[np.argmax(second)] = 0
        found.append(rms(error))
        if worst is None or found[-1] > worst[0]:
            worst = found[-1], page, got, np.argsort(-np.abs(error), kind="stable")[:8]
    assert worst
    mean = sum(found) / PAGES
    what = (
        "first moments, beside the root of the second"
        if signed
        else "roots of second moments, beside themselves"
    )
    picture = drawn(f"The worst of {PAGES} pages, error {worst[0]:.2%}; the mean is {mean:.2%}", *worst[1:])
    if not mean <= bound:
        raise Broken(f"got a mean error of {mean:.2%} of {what}, expected {bound:.0%} at most", picture)
    return Kept(picture, round(mean, 6), "error")


@law(points=20)
def outlier(student: Student, random: Random) -> None:
    """beside one element of 10,000 times the gradient, the error of the others is at most 4 %"""
    for signed in (False, True):
        errors(student, random, signed, 1e4, OUTLIER)


@law(points=25)
def second(student: Student, random: Random) -> Kept:
    """the error of second moments is at most 2 %"""
    return errors(student, random, False, 1.0, BOUND)


@law(points=20)
def first(student: Student, random: Random) -> Kept:
    """the error of first moments is at most 2 %"""
    return errors(student, random, True, 1.0, BOUND)
