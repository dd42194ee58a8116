"""The C of rules is printed from the rules: what is committed is what they say."""

import math

import pytest

from zfunc.optim import rules_in_c
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.optim.rules import Factors, Rule


def test_the_printed_file_is_current() -> None:
    assert rules_in_c.RULES_H.read_text() == rules_in_c.built_in(), "run python -m zfunc.optim.rules_in_c"
    assert len(Factors._fields) == 13  # as _cpu_adam.pyx takes them
    assert all(f"ZF_{name.upper()} = {n}" in rules_in_c.built_in() for name, n in cpu_adam.RULES.items())


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (lambda o, k, g, m, v: (k.rate * (g - (m - v)), v, m), "change = k.rate * (g - (t0 - t1));"),
        (lambda o, k, g, m, v: (k.rate, v, m), "m[i] = t0;"),
        (lambda o, k, g, m, v: (o.signed(m / (g / v), 2), m, v), "zf_signed(t0 / (g / t1), 2.0f)"),
        (lambda o, k, g, m, v: (g, m * m * 0.1, v), "(m[i] * m[i]) * 0.10000000149011612f"),
        (lambda o, k, g, m, v: ((y := g * g) + y * (y - math.inf), m, v), "t0 + t0 * (t0 - (float)INFINITY)"),
        (lambda o, k, g, m, v: (o.flush(o.sqrt(g + 1.0), 2.0**-30), m, v), "zf_flush(sqrtf(g + 1.0f), 0x30800000)"),
    ],
)  # fmt: skip
def test_a_rule_is_printed_as_it_is_written(update, expected) -> None:
    """Old moments have names of their own: the new ones, which may be they, are stored last."""
    assert expected in rules_in_c.plain(Rule(update, ("m", "v"), "own"))


@pytest.mark.parametrize("update", [lambda o, k, g: (g if g else k.rate,), lambda o, k, g: (abs(g),)])
def test_a_rule_that_branches_or_does_more_has_no_c(update) -> None:
    with pytest.raises(TypeError):
        rules_in_c.plain(Rule(update, (), "own"))
