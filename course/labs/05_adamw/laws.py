"""The graded laws of lab 5."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy

from course.drawing import Cell, table
from course.law import Broken, Picture, Student, every, law

TITLE = "AdamW to the bit"
NOT_IMPORTED = ("zfunc", "torch.optim")
CASES = 30  # random runs of a law
MOST = 2.0  # seconds of a step of a million elements
Array = Any  # of NumPy
np: Any = numpy  # arrays of any dtype


def f32(x: Any) -> Array:
    """`x` as a float32 array or scalar."""
    return np.array(x, np.float32)


class Settings(NamedTuple):
    """The settings of AdamW."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


class Step(NamedTuple):
    """A step: its gradients, and its chunks in the order of updates, as pairs (first element, end)."""

    grads: tuple[float, ...]
    chunks: tuple[tuple[int, int], ...]


class Run(NamedTuple):
    """A training: initial weights, and the steps that change them."""

    settings: Settings
    weights: tuple[float, ...]
    steps: tuple[Step, ...]


# ---- the rule, and what it is mistaken for ------------------------------------------------------------------


def rule(k: dict[str, Array], p: Array, m: Array, v: Array, g: Array) -> list[Array]:
    """AdamW as the lab's text defines it, rounded after each operation: new weights p and moments m, v."""
    m = k["keep"] * m + k["add"] * g
    v = k["keep_sq"] * v + k["add_sq"] * (g * g)
    change = k["rate"] * (m / (np.sqrt(v) * k["root_scale"] + k["eps"]))
    return [p - (change + k["decay"] * p), m, v]


def in_float64(k: dict[str, Array], *buffers: Array) -> list[Array]:
    """The rule in float64, rounded to float32 once, at its end: a mistake that the grader knows."""
    wide = {name: np.float64(x) for name, x in k.items()}
    return [x.astype(np.float32) for x in rule(wide, *(x.astype(np.float64) for x in buffers))]


def fused(k: dict[str, Array], p: Array, m: Array, v: Array, g: Array) -> list[Array]:
    """The rule with fused multiply-adds: a mistake that the grader knows."""

    def fma(a: Array, b: Array, c: Array) -> Array:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    m, v = fma(k["keep"], m, k["add"] * g), fma(k["keep_sq"], v, k["add_sq"] * (g * g))
    change = k["rate"] * (m / fma(np.sqrt(v), k["root_scale"], k["eps"]))
    return [p - fma(k["decay"], p, change), m, v]


def eps_inside(k: dict[str, Array], p: Array, m: Array, v: Array, g: Array) -> list[Array]:
    """The rule with eps below the root: a mistake that the grader knows."""
    _, m, v = rule(k, p, m, v, g)
    change = k["rate"] * (m / np.sqrt(v * k["root_scale"] * k["root_scale"] + k["eps"]))
    return [p - (change + k["decay"] * p), m, v]


def eps_inside_unscaled(k: dict[str, Array], p: Array, m: Array, v: Array, g: Array) -> list[Array]:
    """The rule with eps below the root, scaled afterwards: a mistake that the grader knows."""
    _, m, v = rule(k, p, m, v, g)
    change = k["rate"] * (m / (np.sqrt(v + k["eps"]) * k["root_scale"]))
    return [p - (change + k["decay"] * p), m, v]


def decay_after(k: dict[str, Array], *buffers: Array) -> list[Array]:
    """The rule with weight decay of the updated weight: a mistake that the grader knows."""
    p, m, v = rule(k | {"decay": f32(0)}, *buffers)
    return [p - k["decay"] * p, m, v]


def decay_before(k: dict[str, Array], p: Array, *others: Array) -> list[Array]:
    """The rule with weight decay before the update, as torch has it: a mistake that the grader knows."""
    return rule(k | {"decay": f32(0)}, p * (f32(1) - k["decay"]), *others)


def uncorrected(k: dict[str, Array], *buffers: Array) -> list[Array]:
    """The rule without bias correction: a mistake that the grader knows."""
    return rule(k | {"rate": k["lr"], "root_scale": f32(1)}, *buffers)


MISTAKES: dict[str, Callable[..., list[Array]]] = {
    "float64 in between: round every operation to float32": in_float64,
    "a fused multiply-add: round the product before the sum": fused,
    "eps inside the root: it is added to the root": eps_inside,
    "eps inside the root, before its scale: it is added to the root": eps_inside_unscaled,
    "decay of the weight that is already updated: both changes are of the old weight": decay_after,
    "decay before the update, as torch has it: here change and decay are added first": decay_before,
    "no bias correction": uncorrected,
}


def factors(settings: Settings, step: int) -> dict[str, Array]:
    """The scalars of step number `step`, by name, computed in float64 and rounded to float32 once."""
    lr, beta1, beta2, eps, weight_decay = settings
    found = {"keep": beta1, "add": 1.0 - beta1, "keep_sq": beta2, "add_sq": 1.0 - beta2}
    found |= {"rate": lr / (1.0 - beta1**step), "root_scale": 1.0 / math.sqrt(1.0 - beta2**step)}
    found |= {"eps": eps, "decay": lr * weight_decay, "lr": lr}
    return {name: f32(x) for name, x in found.items()}


def reference(run: Run, by: Callable[..., list[Array]] = rule) -> list[Array]:
    """The weights after each step of `run`, updated by the rule `by`."""
    state = [f32(run.weights), *np.zeros((2, len(run.weights)), np.float32)]
    found: list[Array] = []
    for n, step in enumerate(run.steps, start=1):
        state = by(factors(run.settings, n), *state, f32(step.grads))
        found.append(state[0])
    return found


def bf16(x: Array) -> Array:
    """The bits of the bfloat16 nearest to each of `x`, found by the float64 distances to both neighbours."""
    low = x.view(np.uint32) >> 16
    with np.errstate(invalid="ignore"):
        wide, below, above = (
            y.astype(np.float64) for y in (x, *((low + n << 16).view(np.float32) for n in (0, 1)))
        )
        above = np.where(np.isinf(above), np.copysign(2.0**128, wide), above)  # what comes after the largest
        down, up = abs(wide - below), abs(above - wide)
    found = np.where((up < down) | ((up == down) & (low & 1 == 1)), low + 1, low)
    return np.where(np.isnan(x), 0x7FC0, np.where(np.isinf(x), low, found)).astype(np.uint16)


# ---- runs -------------------------------------------------------------------------------------------------


def random_run(random: Random, steps: int, *, chunked: bool = False, shuffled: bool = False) -> Run:
    """Random weights and steps; a step is one chunk, or several if `chunked`, in random order if
    `shuffled`."""
    n = random.randint(20, 60)
    settings = Settings(
        10 ** random.uniform(-4, -1),
        random.choice((0.9, 0.8, 0.95)),
        random.choice((0.999, 0.99, 0.95)),
        random.choice((1e-8, 1e-6, 1e-4)),
        random.choice((0.01, 0.1)),
    )
    made: list[Step] = []
    for _ in range(steps):
        grads = tuple(random.gauss(0, 1) * 10 ** random.uniform(-5, 1) for _ in range(n))
        cuts = sorted(random.sample(range(1, n - 1), random.randint(1, 6))) if chunked else []
        cuts += [n - 1] if chunked and random.random() < 0.5 else []  # a tail of one element
        chunks = [*pairwise([0, *cuts, n])]
        if shuffled:
            random.shuffle(chunks)
        made.append(Step(grads, tuple(chunks)))
    return Run(settings, tuple(random.gauss(0, 1) for _ in range(n)), tuple(made))


def smaller(run: Run) -> Iterator[Run]:
    """Yield smaller runs: `run` with fewer steps, elements or chunks, or with rounder numbers."""
    n = len(run.weights)
    for k in reversed(range(1, len(run.steps))):
        yield run._replace(steps=run.steps[:k])
    for length in (n // 2, n // 4, 4, 2, 1):  # elements that are left: of the beginning, or of the end
        if 0 < length < n:
            yield _of(run, range(length))
            yield _of(run, range(n - length, n))
    if n <= 16:
        yield from (_of(run, [*range(i), *range(i + 1, n)]) for i in range(n) if n > 1)
    simple = tuple(float(f"{x:.1g}") for x in run.weights)
    yield from (x for x in (run._replace(settings=Settings()), run._replace(weights=simple)) if x != run)
    for k, step in enumerate(run.steps):
        simple = step._replace(grads=tuple(float(f"{x:.1g}") for x in step.grads))
        if simple != step:
            yield run._replace(steps=(*run.steps[:k], simple, *run.steps[k + 1 :]))
    for k, step in enumerate(run.steps):
        for c in range(len(step.chunks)):
            for d in range(c + 1, len(step.chunks)):
                (a, b), (x, y) = step.chunks[c], step.chunks[d]
                if b == x or y == a:
                    merged = [*step.chunks[:c], (min(a, x), max(b, y)), *step.chunks[c + 1 : d]]
                    other = step._replace(chunks=(*merged, *step.chunks[d + 1 :]))
                    yield run._replace(steps=(*run.steps[:k], other, *run.steps[k + 1 :]))


def _of(run: Run, kept: Iterable[int]) -> Run:
    """The part of `run` with the elements `kept` alone."""
    place = {i: n for n, i in enumerate(kept)}

    def step(x: Step) -> Step:
        spans = [[place[i] for i in range(*chunk) if i in place] for chunk in x.chunks]
        return Step(tuple(x.grads[i] for i in place), tuple((s[0], s[-1] + 1) for s in spans if s))

    return Run(run.settings, tuple(run.weights[i] for i in place), tuple(map(step, run.steps)))


def whole(run: Run) -> Run:
    """`run` with the chunks of each step joined into one."""
    return run._replace(steps=tuple(x._replace(chunks=((0, len(x.grads)),)) for x in run.steps))


def array_of(name: str, got: Any, like: Array) -> Array:
    """What the student's function `name` returned, as an array shaped as `like`. Raises Broken if it is
    none."""
    if not isinstance(got, np.ndarray) or got.shape != like.shape or got.dtype != like.dtype:
        what = f"an array {got.shape} of {got.dtype}" if isinstance(got, np.ndarray) else type(got).__name__
        raise Broken(f"{name}: got {what}, expected a NumPy array {like.shape} of {like.dtype}")
    return got.copy()


def step_of(student: Student, state: Any, step: Step) -> None:
    """Make a student's state do one step, chunk by chunk."""
    student.begin_step(state)
    grads = f32(step.grads)
    for first, end in step.chunks:
        student.update_chunk(state, first, grads[first:end].copy())


def student_run(student: Student, run: Run, saved: int = 0) -> list[Array]:
    """The student's weights after each step of `run`; after step `saved` the state is saved and loaded."""
    weights = f32(run.weights)
    state = student.start(weights.copy(), run.settings)
    if state is None:
        raise Broken("start: got None, expected a state: return whatever your other functions take")
    found: list[Array] = []
    for n, step in enumerate(run.steps, start=1):
        step_of(student, state, step)
        found.append(array_of("master", student.master(state), weights))
        if np.array_equal(found[-1], weights) and len(weights) >= 20:
            raise Broken(
                "update_chunk: got a master that no step has changed, expected new weights in the state"
            )
        copy = array_of("copy", student.copy(state), weights.astype(np.uint16))
        own = array_of("to_bf16", student.to_bf16(found[-1].copy()), copy)
        if (copy != own).any():
            i = int(np.flatnonzero(copy != own)[0])
            raise Broken(
                f"copy: got bits {copy[i]:04x} for element {i} after step {n}, expected {own[i]:04x}, what "
                f"your to_bf16 makes of the new weight {found[-1][i]:.9g}\n{told(run)}"
            )
        if n == saved:
            data = student.save(state)
            if not isinstance(data, bytes):
                raise Broken(f"save: got {type(data).__name__}, expected bytes")
            step_of(student, state, step)  # what goes on must not change what was saved
            state = student.load(data, run.settings)
            if state is None:
                raise Broken("load: got None, expected a state like that of start")
    return found


# ---- what is told -----------------------------------------------------------------------------------------


def hexed(x: Any) -> str:
    """Text of a float32: its bits and its value."""
    return f"{f32(x).view(np.uint32):08x} ({x:.9g})"


def told(run: Run) -> str:
    """Text of a run, with some of its elements if it has many."""
    s = run.settings
    lines = [
        f"a buffer of {len(run.weights)}, settings lr={s.lr:.6g} beta1={s.beta1} beta2={s.beta2} eps={s.eps} "
        f"weight_decay={s.weight_decay}"
    ]
    if len(run.weights) <= 4:
        lines.append(f"weights {', '.join(f'{f32(x):.9g}' for x in run.weights)}")
    for n, step in enumerate(run.steps, start=1):
        chunks = " ".join(f"[{a}:{b}]" for a, b in step.chunks)
        grads = (
            f", gradients {', '.join(f'{f32(x):.9g}' for x in step.grads)}" if len(step.grads) <= 4 else ""
        )
        lines.append(f"step {n}: chunks {chunks}{grads}")
    return "\n".join(lines)


def compare(run: Run, got: list[Array], expected: list[Array], why: str) -> None:
    """Raise Broken, with `why`, at the first weight of any step whose bits in `got` and `expected` differ."""
    for n, (a, b) in enumerate(zip(got, expected, strict=True), start=1):
        differ = np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))
        if len(differ):
            i = int(differ[0])
            raise Broken(
                f"weight {i} after step {n}: got {hexed(a[i])}, expected {hexed(b[i])}{why}\n{told(run)}",
                bits_of(f"Weight {i} after step {n}", a[i], b[i]),
            )


def bits_of(title: str, got: Any, expected: Any) -> Picture:
    """A picture of two float32 numbers as bits, with marks where they differ."""
    numbers = (expected, got)
    bits = [f"{f32(x).view(np.uint32):032b}" for x in numbers]
    bits.append("".join(" ^"[a != b] for a, b in zip(*bits, strict=True)))
    parts = [[x[:1], x[1:9], x[9:]] for x in bits]
    colours = ["wrong" if "^" in x else "" for x in parts[2]]
    rows = [
        ["expected", *parts[0], f"{expected:.9g}"],
        ["got", *map(Cell, parts[1], colours), f"{got:.9g}"],
        ["", *parts[2], ""],
    ]
    return table(title, ["", "sign", "exponent", "mantissa", "value"], rows)


def mistaken(student: Student, run: Run, got: list[Array]) -> str:
    """Text on a known mistake that gives exactly the student's weights, also in a long run, as a short run
    may agree by chance; else on rounding if the weights are close, or ""."""
    long = random_run(Random(0), 3)
    for name, by in MISTAKES.items():
        if same(got, reference(run, by)) and same(student_run(student, long), reference(long, by)):
            return f". Your bits are those of {name}"
    expected = reference(run)
    near = all(np.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(got, expected, strict=True))
    return ". A rounding differs: is an operation in float64, or in another order?" if near else ""


def same(got: list[Array], expected: list[Array]) -> bool:
    """Whether two lists of weights, one array a step, are equal to the bit."""
    return all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- the laws ---------------------------------------------------------------------------------------------


@law(points=15)
def rounded(student: Student, random: Random) -> None:
    """to_bf16 rounds to the nearest, ties to even, and NaN stays NaN"""
    special = (0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF, 0x80000000)
    ties = [
        x << 17 | d for x in random.sample(range(1 << 15), 99) for d in (0x8000, 0x8001, 0x18000, 0x18001)
    ]
    bits = np.array([*special, *ties, *(random.getrandbits(32) for _ in range(2_000))], np.uint32)
    numbers = bits.view(np.float32)
    expected = bf16(numbers)
    got = array_of("to_bf16", student.to_bf16(numbers.copy()), expected)
    nan = np.isnan(numbers)
    wrong = np.flatnonzero(np.where(nan, (got & 0x7F80 != 0x7F80) | (got & 0x7F == 0), got != expected))
    if len(wrong):
        i = min((int(x) for x in wrong), key=lambda i: (nan[i], bin(bits[i]).count("1")))
        raise Broken(
            f"to_bf16: got bits {got[i]:04x} for {hexed(numbers[i])}, expected "
            f"{'any NaN, such as 7fc0' if nan[i] else f'{expected[i]:04x}'}",
            bits_of("to_bf16", *((x.astype(np.uint32) << 16).view(np.float32)[i] for x in (got, expected))),
        )


def against_reference(student: Student, random: Random, steps: int) -> None:
    """Compare a student's runs of `steps` steps, each in one chunk, with the rule. Raises Broken."""

    def check(run: Run) -> None:
        got = student_run(student, run)
        compare(run, got, reference(run), mistaken(student, run, got))

    every((random_run(random, steps) for _ in range(CASES)), check, smaller)


@law(points=25)
def one_step(student: Student, random: Random) -> None:
    """the first step of a buffer, as one chunk, has the bits of the rule"""
    against_reference(student, random, 1)


@law(points=25)
def ten_steps(student: Student, random: Random) -> None:
    """so have ten steps, with the bias correction of each"""
    against_reference(student, random, 10)


def chunking(student: Student, random: Random, *, shuffled: bool) -> None:
    """Compare a student's runs in chunks with the same in one chunk a step. Raises Broken if bits differ."""

    def check(run: Run) -> None:
        got, alone = student_run(student, run), student_run(student, whole(run))
        compare(run, got, alone, ", as with one chunk a step")

    every((random_run(random, 3, chunked=True, shuffled=shuffled) for _ in range(CASES)), check, smaller)


@law(points=15)
def any_chunking(student: Student, random: Random) -> None:
    """a step in chunks, also of one element, has the bits that you get with one chunk"""
    chunking(student, random, shuffled=False)


@law(points=5)
def any_order(student: Student, random: Random) -> None:
    """so has a step whose chunks come in any order"""
    chunking(student, random, shuffled=True)


@law(points=10)
def resumed(student: Student, random: Random) -> None:
    """a state that was saved and loaded goes on with the bits of one that was not"""

    def check(run: Run) -> None:
        if len(run.steps) < 2:
            return
        got = student_run(student, run, saved=len(run.steps) - 1)
        saved = f", as without save and load after step {len(run.steps) - 1}"
        compare(run, got, student_run(student, run), saved)

    every((random_run(random, 4) for _ in range(CASES)), check, smaller)


@law(points=5)
def quick(student: Student, random: Random) -> None:
    """a step of a million elements in 64 chunks takes less than 2 s"""
    n = 1 << 20
    weights = np.random.default_rng(random.getrandbits(32)).standard_normal(n, np.float32)
    state = student.start(weights.copy(), Settings())
    began = time.perf_counter()
    student.begin_step(state)
    for first in range(0, n, n // 64):
        student.update_chunk(state, first, weights[first : first + n // 64].copy())
        if time.perf_counter() - began > MOST:
            raise Broken(
                f"update_chunk: got no step of {n:,} elements within {MOST:.0f} s, expected one: work on "
                "whole arrays, without a loop over elements"
            )
    if np.array_equal(array_of("master", student.master(state), weights), weights):
        raise Broken("update_chunk: got a master that the step has not changed, expected new weights")
