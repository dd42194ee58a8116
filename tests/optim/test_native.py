"""The kernel without torch and Python: the bits of the reference in every build this machine can make.

Compilers take a minute a build, so these are tests of the night, and of continuous integration.
"""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from native import cases, sets
from native.stream import Case, MismatchError, Program, check
from native.variants import SANITIZE, VARIANTS, build, missing

pytestmark = pytest.mark.slow


def program(name: str) -> Program:
    """A build, or a skip with the reason."""
    if why := missing(name):
        pytest.skip(why)
    return Program(build(VARIANTS[name]), VARIANTS[name])


@pytest.fixture(scope="module", autouse=True)
def _built(request: pytest.FixtureRequest) -> None:
    """Compile what the selected tests need side by side: most of the time here goes to the compilers."""
    asked = (
        getattr(item, "callspec", None)
        for item in request.session.items
        if getattr(item, "module", None) is request.module
    )
    names = {call.params["name"] for call in asked if call and "name" in call.params}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: missing(name) or build(VARIANTS[name]), sorted(names)))


SANITIZERS = [name for name, variant in VARIANTS.items() if variant.flags == SANITIZE]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bits_of_the_reference(name: str) -> None:
    built = program(name)
    isas = list(built.names()["isa"])
    if built.variant.threads_only:
        assert check(built, sets.threads(isas[-1:])) > 100
    else:
        assert check(built, sets.reduced(isas)) > 300


# ---- each kind of build sees what it is there for ---------------------------------------------------


def compact_step(n: int, *, into: bool = False) -> Case:
    state, grad = cases.random_state(n), cases.random_grad(n, "bf16")
    return cases.update_case("adamw", state, grad, "bf16", moments="8bit", out="bf16", into=into)


def without_the_last_item(case: Case, role: str) -> Case:
    buffers = (
        b._replace(before=b.before[:-1], after=b.after[:-1]) if b.role == role else b for b in case.buffers
    )
    return case._replace(buffers=tuple(buffers))


@pytest.mark.parametrize("name", SANITIZERS)
@pytest.mark.parametrize("role", ["master", "low", "moment_1", "scale_1", "grad", "out"])
def test_one_item_too_far_is_seen(name: str, role: str) -> None:
    with pytest.raises(MismatchError, match="heap-buffer-overflow"):
        check(program(name), [without_the_last_item(compact_step(129), role)])


@pytest.mark.parametrize("name", SANITIZERS)
@pytest.mark.parametrize("role", ["moment_0", "into_master", "into_low", "into_moment_1", "into_scale_1"])
def test_one_item_too_far_of_a_state_elsewhere_is_seen(name: str, role: str) -> None:
    with pytest.raises(MismatchError, match="heap-buffer-overflow"):
        check(program(name), [without_the_last_item(compact_step(129, into=True), role)])


def test_a_race_is_seen() -> None:
    with pytest.raises(MismatchError, match="data race"):
        check(program("clang-thread"), [cases.race()])


def test_a_contracted_product_is_seen() -> None:
    """On AArch64 compilers contract by themselves: there the flag of setup.py decides about the bits."""
    built = program("aarch64-clang")
    variant = built.variant._replace(flags=(*built.variant.flags, "-O1", "-ffp-contract=fast"))
    with pytest.raises(MismatchError, match="the reference"):
        check(Program(build(variant), variant), sets.updates((129,), sets.ADAMS))


def test_a_wrong_bit_is_seen() -> None:
    case = compact_step(129)
    for i, item in itertools.product(range(len(case.buffers)), (0, -1)):
        wrong = case.buffers[i].after.copy()
        wrong[item] ^= 1
        buffers = [b._replace(after=wrong) if j == i else b for j, b in enumerate(case.buffers)]
        with pytest.raises(MismatchError, match=rf"{case.buffers[i].role}\["):
            check(program("gcc-sanitize"), [case._replace(buffers=tuple(buffers))])


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name, variant in VARIANTS.items():
        assert f"{variant.compiler} is not installed; Debian: apt install" in missing.__wrapped__(name)
