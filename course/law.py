"""What the laws of a lab are made of.

A law is a function of a student's functions and random numbers. It returns if the functions keep the law, and
raises `Broken`, with the smallest counterexample that it found, if they do not.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from traceback import extract_tb
from types import ModuleType
from typing import Any, TypeVar

from attrs import frozen

Case = TypeVar("Case")


@frozen
class Picture:
    """A counterexample drawn twice: as text for a terminal, and as an SVG file."""

    text: str
    svg: str


class Broken(Exception):  # noqa: N818
    """Raised for a law that a student's functions break: what was got, what was expected, and a picture."""

    def __init__(self, message: str, picture: Picture | None = None) -> None:
        super().__init__(message)
        self.message, self.picture = message, picture


@frozen
class Kept:
    """The result of a law that holds: a picture, and a number for the leaderboard, the less the better."""

    picture: Picture
    measure: float
    unit: str = "seconds"


@frozen
class Law:
    """A graded law: its name, what it says in one line, its points, and the function that checks it."""

    name: str
    says: str
    points: int
    check: "Callable[[Student, Random], object]"


def law(points: int) -> "Callable[[Callable[[Student, Random], object]], Law]":
    """Make a Law from a function; the first line of its docstring is the law's text for students."""

    def make(check: "Callable[[Student, Random], object]") -> Law:
        return Law(check.__name__, (check.__doc__ or "").strip().splitlines()[0], points, check)

    return make


class Student:
    """The functions of an adapters file. If a call raises an error, Broken names the line that raised it."""

    def __init__(self, module: ModuleType, path: Path) -> None:
        self._module, self._path = module, path

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name, None)
        if not callable(function):
            raise Broken(
                f"{self._path.name} has no function {name}: take its signature from the lab's adapters.py"
            )

        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except NotImplementedError:
                raise Broken(f"{name} is not written yet") from None
            except BaseException as error:
                raise Broken(f"{name} raised {raised(error, self._path)}") from None

        return call

    def raises(self, kind: type[Exception], name: str, *args: Any) -> bool:
        """Whether the student's function `name` raises `kind`. Raises Broken for any other error."""
        try:
            getattr(self._module, name)(*args)
        except kind:
            return True
        except BaseException:
            getattr(self, name)(*args)
        return False


def raised(error: BaseException, path: Path) -> str:
    """Text of an error, with the last line of the file `path` that led to it."""
    try:
        text = f"{type(error).__name__}: {error}".strip().rstrip(":")[:2_000]
    except Exception:  # a class of the student's, whose own text fails
        text = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{type(error).__name__} in line {error.lineno} of {path.name}: {error.msg}"
    lines = [frame for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    if not lines:
        return text
    first, newline, rest = text.partition("\n")
    return f"{first} (line {lines[-1].lineno} of {path.name}: {lines[-1].line}){newline}{rest}"


def smallest(
    case: Case, smaller: Callable[[Case], Iterable[Case]], check: Callable[[Case], object]
) -> Broken:
    """The `Broken` of the smallest case found on which `check` raises, beginning with `case`, which does.

    `smaller` yields smaller cases of a case; the first of them that also breaks the check replaces the case,
    until none does.
    """
    found = broken_by(case, check)
    assert found
    while True:
        for other in smaller(case):
            if broken := broken_by(other, check):
                case, found = other, broken
                break
        else:
            return found


def broken_by(case: Case, check: Callable[[Case], object]) -> Broken | None:
    """The Broken that `check` raises for `case`; None if it raises none."""
    try:
        check(case)
    except Broken as broken:
        return broken
    return None


def every(
    cases: Iterable[Case], check: Callable[[Case], object], smaller: Callable[[Case], Iterable[Case]]
) -> None:
    """Check each case; raises the Broken of the first counterexample after `smaller` has shrunk it."""
    for case in cases:
        if broken_by(case, check):
            raise smallest(case, smaller, check)


def without_one(items: tuple[Case, ...]) -> Iterator[tuple[Case, ...]]:
    """Yield `items` with one item left out, for each item."""
    return (items[:n] + items[n + 1 :] for n in range(len(items)))


def pairs_of(name: str, got: Any, num_ops: int) -> set[tuple[int, int]]:
    """A student's pairs of operation numbers, checked, from function `name`. Raises Broken if they are
    none."""
    expected = f"a set of pairs (i, j) of numbers of operations, 0 to {num_ops - 1}"
    try:
        pairs = {(i, j) for i, j in got}
    except (TypeError, ValueError):
        raise Broken(f"{name}: got {got!r:.200}, expected {expected}") from None
    for pair in pairs:
        if not all(type(i) is int and 0 <= i < num_ops for i in pair):
            raise Broken(f"{name}: got the pair {pair!r}, expected {expected}")
    return pairs


def sets_of(name: str, got: Any, num_ops: int) -> list[set[int]]:
    """A student's set of operation numbers for each operation, from function `name`. Raises Broken if
    none."""
    expected = f"a list of {num_ops} sets, one for each operation, of numbers of operations"
    try:
        sets = [set(some) for some in got]
    except TypeError:
        raise Broken(f"{name}: got {got!r:.200}, expected {expected}") from None
    if len(sets) != num_ops:
        raise Broken(f"{name}: got {len(sets)} sets, expected {expected}")
    for i, some in enumerate(sets):
        if not all(type(n) is int and 0 <= n < num_ops for n in some):
            raise Broken(f"{name}: got {some} for operation {i}, expected {expected}")
    return sets


def number_of(name: str, got: Any) -> float:
    """Check and return a student's finite number, from function `name`. Raises Broken otherwise."""
    if isinstance(got, bool) or not isinstance(got, int | float) or not abs(got) < float("inf"):
        raise Broken(f"{name}: got {got!r:.200}, expected a number")
    return float(got)
