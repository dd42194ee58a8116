"""The C of rules is printed from the rules: what is committed is what they say; those of one's own are compiled."""

import logging
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from update_law import ROWS, check, fresh, gradient

import zfunc
from zfunc.optim import by_name, rules_in_c
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.optim.rules import Factors, Rule


def test_the_printed_file_is_current() -> None:
    assert rules_in_c.RULES_H.read_text() == by_name.rules_in_c(), "run python -m zfunc.optim.by_name"
    assert len(Factors._fields) == 13  # as _cpu_adam.pyx takes them
    assert all(f"ZF_{name.upper()} = {n}" in by_name.rules_in_c() for name, n in cpu_adam.RULES.items())


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
    assert expected in rules_in_c.plain_loop(Rule(update, ("m", "v"), "own"))


@pytest.mark.parametrize("update", [lambda o, k, g: (g if g else k.rate,), lambda o, k, g: (abs(g),)])
def test_a_rule_that_branches_or_does_more_has_no_c(update) -> None:
    with pytest.raises(TypeError):
        rules_in_c.plain_loop(Rule(update, (), "own"))


# ---- one's own -----------------------------------------------------------------------------------------


@frozen
class Doubled(zfunc.Lion):
    """A rule of its own in a class that has another's."""

    def update(self, o: Any, k: Any, g: Any, m: Any) -> tuple[Any, ...]:
        change, m = super().update(o, k, g, m)
        return change + change, m


@frozen
class Three(zfunc.Adagrad):
    state: ClassVar = ("sum", "n", "p")
    unsigned: ClassVar = ("sum",)

    def update(self, o: Any, k: Any, g: Any, total: Any, n: Any, p: Any) -> tuple[Any, ...]:
        change, total = super().update(o, k, g, total)
        return change - n * 0.5, total, p, n + 1.0


@frozen
class Branching(Doubled):
    def update(self, o: Any, k: Any, g: Any, m: Any) -> tuple[Any, ...]:
        return (k.rate * o.flush(g, 0.0) if g.size == 0 or len(g) else g), m


OWN = {name: x for name, x in ROWS.items() if name.startswith("one's")} | {
    f"{x.__name__}, {y}": x(moments=y) for x in (Doubled, Three, Branching) for y in ("fp32", "8bit")
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """A cache folder of a test's own, and what is said of rules."""
    caplog.set_level(logging.INFO, rules_in_c.__name__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kept in (rules_in_c._of, rules_in_c._library, rules_in_c._in_torch):
        kept.cache_clear()
    return tmp_path


LEVELS = [(row, "" if row.startswith("one's") else "-O1") for row in OWN]


@pytest.mark.parametrize(
    ("row", "level"), [*LEVELS, *(pytest.param(row, "", marks=pytest.mark.slow) for row, x in LEVELS if x)]
)
def test_a_rule_of_ones_own_has_its_bits_in_the_kernel(
    row: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By day one rule is compiled as users' are, the others in a quarter of the time."""
    if level:
        monkeypatch.setattr(rules_in_c, "FLAGS", (*rules_in_c.FLAGS, level))
    for kept in (rules_in_c._of, rules_in_c._library) if not row.startswith("one's") else ():
        kept.cache_clear()
    in_torch = rules_in_c.compiled(OWN[row].rule) is None
    assert in_torch == row.startswith("Branching")
    for n, decay in ((0, 0), (1, 1), (63, 0), (129, 1), (3_001 if in_torch else 300_001, 0)):
        how: dict[str, Any] = {"out": torch.float16, "threads": (1, 2), "group": decay, "offset": n % 3}
        check(OWN[row], fresh(n, OWN[row].state_format()), gradient(n, torch.bfloat16), **how)


def test_it_is_compiled_once_and_brings_no_openmp(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_in_c, "FLAGS", (*rules_in_c.FLAGS, "-O0"))  # in a fifth of the time
    rule = ROWS["one's own, fp32"].rule
    assert rules_in_c.compiled(rule) is rules_in_c.compiled(rule)
    (library,) = cache.rglob("*.so")
    rules_in_c._of.cache_clear()
    rules_in_c._library.cache_clear()
    assert rules_in_c.compiled(rule)
    assert "".join(caplog.messages).count("Compiling an optimizer's own rule") == 1
    mapped = {x.split()[-1] for x in Path("/proc/self/maps").read_text().splitlines()}
    assert sum("gomp" in x or "libomp" in x for x in mapped) == 1
    assert str(library) in mapped


def open_to_all(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda patch, _: patch.setenv("PATH", ""), "there is no C compiler: apt install gcc"),
        (lambda patch, _: patch.setenv("CC", "false"), "false did not compile it"),
        (lambda _, cache: (cache / "zfunc").write_text("a file"), "its library cannot be made or loaded"),
        (lambda _, cache: open_to_all(cache / "zfunc/rules"), "is not yours alone: chmod 700 it"),
    ],
)  # fmt: skip
def test_without_a_compiler_torch_makes_the_update(
    spoil: Any, words: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    spoil(monkeypatch, cache)
    row = ROWS["one's own, 8bit"]
    for _ in range(2):
        check(row, fresh(129, row.state_format()), gradient(129, torch.float32), isas=[0])
    assert "".join(caplog.messages).count(words) == 1
    for kept in (rules_in_c._of, rules_in_c._library):
        kept.cache_clear()
