"""The sets of cases: sizes, types, instruction sets, threads, parts, placements and special values.

The invariant: how a case is run (instruction set, threads, parts, placement) is varied around a result that was
computed once, because it may not change a bit.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy_reference import Array, round_to, split

from zfunc.optim.formats import BLOCK

from .cases import (
    DECAYS,
    DTYPES,
    OPTIMIZERS,
    factored_cases,
    random_grad,
    random_state,
    skeleton_case,
    sum_case,
    update_case,
)
from .stream import Case

MOMENTS = "fp32", "16bit", "8bit"
ROWS = [(name, moments) for name in OPTIMIZERS for moments in MOMENTS] + [("adamw", "fp32-split")]
ADAMS = [row for row in ROWS if row[0] == "adamw"]
TYPES, OUTS = ("fp32", "bf16", "fp16"), ("none", "fp32", "bf16", "fp16")
SIZES = (0, 1, 15, 55, 63, 64, 127, 128, 129, 4097)
OFFSETS = 0, 1, 3, 7, 64  # on and off the lines of the cache
EXTREMES = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 2.0**-126, 2.0**-56, 2.0**-57)
EXTREMES += (2.0**-100, 2.0**-120, 3.4028234663852886e38, 65504.0, 65520.0, 2.0**-24, 2.0**-25)


def on(isas: Iterable[str], cases: Iterable[Case]) -> Iterator[Case]:
    """Every case on every instruction set."""
    return (case._replace(isa=isa) for case, isa in itertools.product(cases, isas))


def held(name: str, state: Sequence[Array]) -> Sequence[Array]:
    """Weights and moments for an optimizer: Adagrad's has no sign."""
    p, m, v = state
    return (p, np.abs(v)) if name == "adagrad" else (p, m, np.abs(v))


def updates(sizes: Sequence[int], rows: Iterable[tuple[str, str]] = ROWS) -> Iterator[Case]:
    """Every rule and format with every size and kind of decay, in place and elsewhere; types of gradient and copy,
    steps and offsets in turn, so that all meet each row. Some gradients are NaN."""
    for name, moments in rows:
        for i, (n, decay, into) in enumerate(itertools.product(sizes, DECAYS, (False, True))):
            if name == "direction" and (into or decay != "none"):  # it leaves the weights
                continue
            grad, out = TYPES[i % 3], OUTS[i // 3 % 4]
            values = random_grad(n, grad, i)
            with np.errstate(all="ignore"):
                if into:
                    values[n // 2 :: 777] = round_to(np.array([np.nan], np.float32), grad)[0]
                how = {"out": out, "decay": decay, "step": 1 + i % 3, "into": into}
                case = update_case(name, held(name, random_state(n, i)), values, grad, moments=moments, **how)
            yield case._replace(offset=OFFSETS[i % 5], threads=1 + 2 * (n > 4096))


def factored(shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """Adafactor: every type of gradient and weights, in place and elsewhere; copies and decay in turn."""
    for i, (shape, kind, halves, into) in enumerate(
        itertools.product(shapes, TYPES, (False, True), (False, True))
    ):
        out, decay = OUTS[i % 4], ("none", "decoupled")[i // 2 % 2]
        for case in factored_cases(shape, kind, halves=halves, out=out, decay=decay, into=into):
            yield case._replace(offset=i % 4, threads=1 + 2 * (case.n > 4096))


def shared(n: int, rows: Iterable[tuple[str, str]] = ADAMS) -> Iterator[Case]:
    """Sizes that several threads work on, whole and in parts; from 262144 on new state bypasses the caches."""
    ways = ((1, ()), (2, ()), (3, (64, 192, n // 2 // 64 * 64)), (5, (64 * 513,)))
    for kind, (name, moments), into in itertools.product(TYPES, rows, (False, True)):
        if name == "direction" and into:  # it leaves the weights
            continue
        decay = "none" if name == "direction" else "decoupled"
        how = {"moments": moments, "out": kind, "decay": decay, "into": into}
        case = update_case(name, held(name, random_state(n)), random_grad(n, kind), kind, **how)
        yield from (case._replace(threads=threads, cuts=cuts) for threads, cuts in ways[2 * into :])
    for case in sums([n], TYPES):
        yield from (case._replace(threads=threads, cuts=cuts) for threads, cuts in ways[1:])
    yield skeleton_case(n, (4, 4, 4), copy=True)._replace(threads=3)


def sums(sizes: Iterable[int], kinds: Sequence[str]) -> Iterator[Case]:
    """Accumulation: the first time, the next, and sums of squares alone."""
    for n, kind in itertools.product(sizes, kinds):
        grad, acc = random_grad(n, kind), random_state(n)[0]
        for held, first in ((acc, True), (acc, False), (None, False)):
            yield sum_case(held, grad, kind, first=first)


def skeletons(sizes: Iterable[int]) -> Iterator[Case]:
    """The yardstick for each kind of state."""
    for n in sizes:
        yield skeleton_case(n, (4, 4, 4), copy=True)
        yield from (
            skeleton_case(n, widths, copy=False) for widths in ((2, 2, 4, 4), (2, 2, 2, 2), (2, 2, 1, 1))
        )


def special(scales: Sequence[float], rows: Sequence[tuple[str, str]] = ROWS) -> Iterator[Case]:
    """Infinities, NaN, denormals, the floors and the largest values meet, in every rule and format."""
    some = (0.0, 1.0, math.inf, math.nan, 2.0**-100, 2.0**-120, 1e-40)
    values = np.array(list(itertools.product(EXTREMES, some, some, EXTREMES)), np.float32)
    values = np.random.default_rng(0).permutation(values)  # else a block of 64 would hold one exponent
    p, m, v, g = values.T.copy()
    for i, (scale, decay, (name, moments)) in enumerate(itertools.product(scales, DECAYS, rows)):
        if name == "direction" and decay != "none":
            continue
        kind, out = TYPES[(i + i // 9) % 3], OUTS[1 + (i // 3 + i) % 3]
        with np.errstate(all="ignore"):
            grad, how = round_to(g, kind), {"moments": moments, "out": out, "decay": decay, "scale": scale}
            for state in ((p, m, v), (p, *small(m, v))):
                yield update_case(name, held(name, state), grad, kind, **how)


def small(*moments: Array) -> list[Array]:
    """The same moments with what is not finite gone: an 8-bit block with one such element has no other."""
    return [np.nan_to_num(x, nan=2.0**-110, posinf=2.0**-90, neginf=-3.0) for x in moments]


def conversions() -> Iterator[Case]:
    """All 16-bit values widen; every exponent, tie and neighbour of a tie rounds."""
    every = np.arange(1 << 16, dtype=np.uint16)
    for kind in ("bf16", "fp16"):
        yield sum_case(np.zeros(every.size, np.float32), every.view(DTYPES[kind]), kind, first=True)
    lows = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    x = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | np.array(lows, np.uint32)).reshape(-1)
    p, zero = x.view(np.float32), np.zeros(x.size, np.float32)
    for out, moments in (("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "fp32-split"), ("fp16", "16bit")):
        with np.errstate(all="ignore"):  # with a zero gradient and learning rate the weights stay
            yield update_case(
                "adamw", (p, zero, zero), zero, "fp32", moments=moments, out=out, step=2, lr=0.0
            )


def codes() -> Iterator[Case]:
    """Every code of both 8-bit formats under many scales, some of which no state has."""
    scales = np.array([0, 8, 3, 0x1001, 0x2002, 0x33F3, 0x3F80, 0x5F41, 0x7F22, 0x7FFB, -1, -32768], np.int16)
    code = np.arange(256, dtype=np.uint8)
    every, blocks = np.tile(code, scales.size), scales.repeat(code.size // BLOCK)
    high, low = split(np.ones(every.size, np.float32))
    names = ("master_high", "master_low", "exp_avg", "exp_avg_sq", "exp_avg_sq_scale")
    values = high, low, np.random.default_rng(0).permutation(every), every, blocks
    state = dict(zip(names, values, strict=True))
    yield update_case("adamw", state, random_grad(every.size, "fp32"), "fp32", moments="8bit", out="fp32")


def full(isas: Sequence[str]) -> Iterator[Case]:
    """Everything."""
    yield from on(isas, itertools.chain(updates(SIZES), shared(32_768 + 3), conversions(), codes()))
    yield from on(isas, itertools.chain(sums((*SIZES, 65_536, 65_537), TYPES), skeletons(SIZES)))
    yield from on(
        isas, itertools.chain(special((1.0, 0.0, -0.5, 2.0**-16, 2.0**80)), shared(262_144 + 67, ROWS))
    )
    yield from on(isas, factored(((1,), (70,), (5, 11), (9, 64), (6, 4, 3, 3), (66, 1200), (3, 129, 700))))


def reduced(isas: Sequence[str]) -> Iterator[Case]:
    """Every kind once, in a second or two."""
    yield from on(isas, itertools.chain(updates((0, 1, 127, 129)), conversions(), codes()))
    yield from on(isas, itertools.chain(sums((0, 55, 65_537), TYPES), skeletons((1, 129)), special((-0.5,))))
    yield from on(isas, factored(((70,), (5, 11), (3, 20, 1200))))
    yield from threads(isas[-1:])


def threads(isas: Sequence[str]) -> Iterator[Case]:
    """What several threads work on."""
    yield from on(isas, itertools.chain(shared(32_768 + 3), shared(262_144 + 67, ROWS[2::5])))
    yield from on(isas, factored(((3, 20, 1200),)))


SETS: dict[str, Callable[[Sequence[str]], Iterator[Case]]] = {
    "full": full,
    "reduced": reduced,
    "threads": threads,
}
