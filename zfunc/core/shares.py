"""The grammar of places and modes by share: "device:0.25,host" is a quarter on the device and the rest on the host.

Parts are divided by commas; those without a number have equal shares of what the others leave. Of items in a row,
segments or buckets, each part has as many as its share says, the first part the first of them.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import groupby, pairwise
from typing import Any

from attrs import frozen

from zfunc.errors import refuse
from zfunc.options import AUTO, OneOf


@cache
def shares_of(text: str) -> dict[str, Fraction]:
    """The share, 0 to 1, of each word of a checked `text` such as "device:0.25,host"; 0 for a share of "auto".

    >>> {word: float(share) for word, share in shares_of("disk:0.25,host,device:0.5").items()}
    {'disk': 0.25, 'host': 0.25, 'device': 0.5}
    """
    shares: dict[str, Fraction] = {}
    for word, end, start in zip(words_of(text), _ends(text), [Fraction(0), *_ends(text)], strict=False):
        shares[word] = shares.get(word, Fraction(0)) + end - start
    return shares


def words_of(text: str) -> list[str]:
    """The words of `text`, such as "device:0.25,host", in order and without their shares.

    >>> words_of("disk:0.25,host")
    ['disk', 'host']
    """
    return [part.partition(":")[0] for part in text.split(",")]


def part_of(text: str, n: int, count: int) -> int:
    """The number, from 0, of the part of `text` (shares such as "device:0.25,host") to which item `n` of
    `count` items belongs.

    >>> [part_of("host:0.75,device", n, 4) for n in range(4)], [part_of("host,device", n, 5) for n in range(5)]
    ([0, 0, 0, 1], [0, 0, 0, 1, 1])
    """
    return next(k for k, end in enumerate(_ends(text)) if n * end.denominator < end.numerator * count)


@cache
def word_of(text: str, n: int, count: int) -> str:
    """The word to which `text` (shares such as "device:0.25,host") assigns item `n` of `count` items.

    >>> word_of("host:0.75,device", 3, 4)
    'device'
    """
    return words_of(text)[part_of(text, n, count)]


def every_part_has_one(text: str, count: int) -> bool:
    """Whether each part of `text` (shares such as "device:0.25,host") gets at least one of `count` items.

    >>> every_part_has_one("host:0.75,device", 2), every_part_has_one("host:0.75,device", 4)
    (False, True)
    """
    return len({part_of(text, n, count) for n in range(count)}) == len(_ends(text))


def as_shares(words: Sequence[str]) -> str:
    """Text of shares, such as "disk:0.25,host", that assigns to item n the word `words[n]`; the shares are
    left out if they are equal.

    >>> as_shares(["disk", "host", "host", "host"]), as_shares(["disk", "disk", "host", "host"])
    ('disk:0.25,host', 'disk,host')
    """
    runs = [(word, len([*same])) for word, same in groupby(words)]
    equal = len({size for _, size in runs}) == 1
    shares = [
        size * 10**6 // len(words) / 10**6 for _, size in runs
    ]  # rounded up, a part would have one more
    numbers = ["" if equal else f":{share:g}" for share in shares[:-1]]
    return ",".join(f"{word}{number}" for (word, _), number in zip(runs, [*numbers, ""], strict=True))


@cache
def _ends(text: str) -> tuple[Fraction, ...]:
    """For each part of `text`, such as "device:0.25,host", the cumulative share at its end: 1/4, 1."""
    numbers = [part.partition(":")[2] for part in text.split(",")]
    given = [Fraction(0 if x == AUTO else x) if x else None for x in numbers]
    rest = 1 - sum((x for x in given if x is not None), Fraction(0))
    each = rest / max(1, given.count(None))
    ends = list[Fraction]()
    for share in given:
        ends.append((ends[-1] if ends else Fraction(0)) + (each if share is None else share))
    return tuple(ends)


@frozen
class InShares(OneOf):
    """A check of a setting: one of `names`, or several with shares of all segments or buckets, such as
    "host:0.25,device" (text, or a list of parts); "auto" cannot have a share."""

    def __call__(self, name: str, value: Any) -> str:
        """Return `value` as text such as "host:0.25,device"; ValueError for a wrong share or an unknown word."""
        parts: list[Any] = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:  # pyright: ignore
            parts = [value]
        shares = [str(x).partition(":")[1:] if isinstance(x, str) else ("", "") for x in parts]
        words = [OneOf.__call__(self, name, x.partition(":")[0] if isinstance(x, str) else x) for x in parts]
        if len(parts) > 1 and AUTO in words:
            refuse(name, repr(value), f"{AUTO!r} alone", "leave the others out")
        numbers = [self._share(name, value, text) if colon else "" for colon, text in shares]
        given = sum(Fraction(x) for x in numbers if x not in ("", AUTO))
        if given > 1 or (given == 1) == ("" in numbers):
            refuse(name, repr(value), "shares that make up 1", "leave out the number of the last")
        return ",".join(f"{word}:{x}" if x else word for word, x in zip(words, numbers, strict=True))

    def _share(self, name: str, value: Any, text: str) -> str:
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            refuse(name, repr(value), "a share between 0 and 1 behind each colon", "pass such as 0.25")
        return str(share)  # unrounded: a third and more is another number of items


@frozen
class InTiers(OneOf):
    """A check of a setting: one of the places `names`, ordered from the nearest to the device, or a share in
    one and the rest in the next, such as "device:0.25,host".

    "device:auto,host", as much on the device as fits, is accepted if "auto" is one of the names.
    """

    def __call__(self, name: str, value: Any) -> str:
        """Return `value` as text such as "device:0.25,host"; ValueError for another place or a wrong share."""
        if not isinstance(value, str) or "," not in value:
            return super().__call__(name, value)
        places = [x for x in self.names if x != AUTO]
        near, _, far = value.partition(",")
        near, _, text = near.partition(":")
        if text == AUTO and AUTO in self.names and (near, far) != (*places[:2],):
            fitting = f"{places[0]}:{AUTO},{places[1]}"
            expected = (
                f"{fitting}, which leaves nothing for another place, or {AUTO!r}, the nearest place of all"
            )
            refuse(name, repr(value), expected, "pass one of them")
        if (near, far) not in pairwise(places):
            known = " or ".join(f"{a}:0.25,{b}" for a, b in pairwise(places))
            expected = f"one of {', '.join(self.names)}, or a share as in {known}"
            refuse(name, repr(value), expected, "pass one of them")
        if text == AUTO and AUTO in self.names:
            return value
        try:
            share = float(text or 0.5)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            refuse(name, repr(value), f"the share of the {near}, 0 to 1", f"pass such as {near}:0.25,{far}")
        return two_tiers(near, share, far)


def two_tiers(near: str, share: float, far: str) -> str:
    """The text for `share` (0 to 1) of some data in place `near` and the rest in `far`; an empty part is left
    out, but for `far` other than "host".

    >>> two_tiers("device", 0.25, "host"), two_tiers("device", 0, "host"), two_tiers("device", 1, "host")
    ('device:0.25,host', 'host', 'device')
    >>> two_tiers("host", 1, "disk")  # where frozen parameters may be
    'host:1,disk'
    """
    text = f"{share:g}"
    if text == "0":
        return far
    return near if (text, far) == ("1", "host") else f"{near}:{text},{far}"
