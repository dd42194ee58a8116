"""Shares of places and modes: which item is in which part, with numbers and without."""

from itertools import product
from typing import Any

import pytest

from zfunc.core.settings import StepSettings
from zfunc.core.shares import as_shares, every_part_has_one, shares_of, two_tiers, word_of
from zfunc.errors import SettingError

WORDS = ("disk", "host", "device")


@pytest.mark.parametrize("count", range(1, 9))
def test_parts_without_numbers_are_equal(count: int) -> None:
    for words in (x for k in range(1, 5) for x in product(WORDS, repeat=k)):
        text = ",".join(words)
        found = [word_of(text, n, count) for n in range(count)]
        assert found == [words[n * len(words) // count] for n in range(count)]
        assert every_part_has_one(text, count) == (len(words) <= count)
        again = as_shares(found)
        assert [word_of(again, n, count) for n in range(count)] == found
        assert StepSettings(activations_on=again, swap="/a" if "disk" in again else ()).activations_on


def test_a_number_is_the_share_of_the_items() -> None:
    for percent in range(1, 100):
        text = StepSettings(activations_on=f"host:{percent / 100},device").activations_on
        assert [word_of(text, n, 100) for n in range(100)].count("host") == percent
        assert shares_of(text)["host"] == shares_of(two_tiers("host", percent / 100, "disk"))["host"]
    for share, hosts in (("0.6666666", 2), ("0.6666667", 3)):
        text = StepSettings(activations_on=f"host:{share},device").activations_on
        assert [word_of(text, n, 3) for n in range(3)].count("host") == hosts


REFUSED = {
    "recompute": ("all:0.5", "all:1,none", "all:0.6,min-cut:0.6", "all:x,none", "all:auto,none"),
    "state_on": ("host,device", "device:0.5,disk", "device:1.5,host", "host:auto,disk", "device:0.5"),
}


@pytest.mark.parametrize("given", [{name: x} for name, of in REFUSED.items() for x in of])
def test_other_shares_are_refused_with_what_there_is(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(SettingError, match=f"^{name}: got '") as caught:
        StepSettings(**given)
    assert caught.value.names == (name,)
    assert all((caught.value.expected, caught.value.do))
