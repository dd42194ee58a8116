"""One case: buffers before, and after by the NumPy reference.

The invariant: what a case must give is computed here, from what it begins with and nothing else.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy_reference import NUMPY, Array, pack, reference_update, round_to, split, square_sums, to_float32

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import moment_buffers
from zfunc.optim.adafactor import Adafactor, AdafactorFactors, Matrices
from zfunc.optim.adagrad import Adagrad
from zfunc.optim.adamw import AdamW
from zfunc.optim.formats import BLOCK, kernel_layout
from zfunc.optim.lion import Lion
from zfunc.optim.muon import Muon
from zfunc.optim.rules import first_dither
from zfunc.optim.sgd import SGD

from .adafactor import roots, unit_of
from .stream import Buffer, Case

DECAY_NAMES = {"none": "no_decay", "decoupled": "decoupled", "l2": "l2"}
DECAYS = {"none": (0.0, True), "decoupled": (0.1, True), "l2": (0.1, False)}
DTYPES = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
State = Sequence[Array]  # master, exp_avg, exp_avg_sq: [n] fp32


def random_state(n: int, seed: int = 0) -> State:
    """Weights and moments of usual size."""
    rng = np.random.default_rng(seed)
    p, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    return p, m * np.float32(0.1), rng.random(n, dtype=np.float32)


def random_grad(n: int, kind: str, seed: int = 1) -> Array:
    """A gradient of unit size, of the type `kind`."""
    return round_to(np.random.default_rng(seed).standard_normal(n).astype(np.float32), kind)


def stale(n: int, kind: str) -> Array:
    """What a buffer that is only written holds before: bits no result has."""
    return np.full(n * np.dtype(DTYPES[kind]).itemsize, 0xA5, np.uint8).view(DTYPES[kind])


# ---- one case --------------------------------------------------------------------------------------


OPTIMIZERS = {
    "adamw": AdamW(1e-3),
    "sgd": SGD(0.01, momentum=0.9, dampening=0.75),
    "sgd without": SGD(0.01),
    "nesterov": SGD(0.01, momentum=0.9, nesterov=True),
    "lion": Lion(0.01, betas=(0.95, 0.9)),
    "adagrad": Adagrad(0.01, initial_accumulator_value=0.1),
    "direction": Muon(0.01),
    "muon": Muon(0.01),
}
ROLES = "master", "low", "moment_0", "moment_1", "scale_0", "scale_1"


def update_case(
    name: str,
    state: State | dict[str, Array],
    grad: Array,
    kind: str,
    *,
    moments: str = "fp32",
    out: str = "none",
    decay: str = "none",
    step: int = 3,
    scale: float = 0.3,
    into: bool = False,
    lr: float | None = None,
) -> Case:
    """One step of an optimizer, in place or into other buffers, from fp32 weights and moments, which are packed
    first, or from a packed state."""
    optimizer: Any = OPTIMIZERS[name].with_moments(
        moments.removesuffix("-split"), split_master="split" in moments
    )
    decision = StepDecision(False, scale, step, optimizer.factors(step) | ({} if lr is None else {"lr": lr}))
    how = (
        optimizer.direction_step(decision)
        if name == "direction"
        else optimizer.rule_step(decision, 0, (1, 1))
    )
    weight_decay, decoupled = DECAYS[decay]
    shrink = weight_decay * (decision.factors["lr"] if decoupled else 1.0)
    how = how._replace(decay=decay, factors=how.factors._replace(decay=shrink))
    own, weights = moment_buffers(how.state_format), how.rule.weights
    with np.errstate(all="ignore"):
        before = state
        if not isinstance(before, dict):
            moments = state[1 : 1 + sum(x.shared == 1 for x in own)]
            before = pack(state[0] if weights else None, moments, how.state_format, step - 1)
        after, copy = reference_update(how, before, grad, out=None if out == "none" else out)
    names, kept = kernel_layout(how.state_format, weights=weights)
    roles = dict(zip(names, ROLES, strict=True))
    buffers = [
        Buffer(roles[x], before[x], new, BLOCK if x.endswith("scale") else 1) for x, new in after.items()
    ]
    copies = () if copy is None else (Buffer("out", stale(grad.size, out), copy),)
    return Case(
        f"{name}, {how.state_format}, grad {kind}, out {out}, decay {decay}, scale {scale}, into {into}",
        "update",
        grad.size,
        (*(apart(buffers) if into else buffers), Buffer("grad", grad, grad), *copies),
        (how.rule.name, kind, out, DECAY_NAMES[decay], *kept),
        sizes=(first_dither(step, 0), first_dither(step, 1)),
        factors=tuple(how.factors),
    )


def factored_cases(
    shape: tuple[int, ...], kind: str, *, halves: bool, out: str, decay: str, into: bool, scale: float = 0.3
) -> Iterator[Case]:
    """The sweeps of one step of Adafactor."""
    matrices = Matrices.of(shape)
    _, rows, columns, _ = matrices
    p, grad = random_state(math.prod(shape))[0], random_grad(math.prod(shape), kind)
    optimizer = Adafactor(0.1, eps=(1e-7, 1e-3), weight_decay=DECAYS[decay][0])
    decision = StepDecision(False, scale, 3, optimizer.factors(3))
    factors = optimizer.checked_factors(decision, 0)
    k = AdafactorFactors._make(np.float32(x) for x in factors)
    g = (NUMPY.flush(to_float32(grad), k.grad_floor) * k.grad_scale).reshape(matrices[:3])
    squares, largest = g.astype(np.float64) ** 2, [np.abs(g).max(2), np.abs(g).max(1)]
    units = [unit_of(x.astype(np.float64) ** 2, y) for x, y in zip(largest, (columns, rows), strict=True)]
    sums = [((squares + x) - x).sum(axis) for x, axis in ((units[0][:, :, None], 2), (units[1][:, None], 1))]
    variance = np.random.default_rng(2).random(matrices.num_kept, dtype=np.float32)
    scales = roots(variance, matrices, k)
    u = (g * np.minimum(scales[0][..., None] * scales[1][:, None], k.limit)).reshape(-1)
    new = p - (k.rate * u + k.decay * p if factors.decay else k.rate * u)
    before, after = (zip(("master", "low"), split(x) if halves else (x,), strict=False) for x in (p, new))
    weights = [Buffer(role, a, b) for (role, a), (_, b) in zip(before, after, strict=True)]
    copies = () if out == "none" else (Buffer("out", stale(p.size, out), round_to(new, out)),)
    given = Buffer("grad", grad, grad)

    def case(op: str, *buffers: Buffer, out: str = "none") -> Case:
        name = f"{shape}, grad {kind}, out {out}, decay {decay}, halves {halves}, into {into}"
        buffers = (
            given,
            *(x._replace(before=x.before.reshape(-1), after=x.after.reshape(-1)) for x in buffers),
        )
        how = op, kind, out, DECAY_NAMES[decay]
        numbers = factors.grad_scale, factors.grad_floor, factors.limit, factors.rate, factors.decay
        return Case(name, "factor", p.size, buffers, how, (rows, columns), numbers)

    def lines(role: str, before: Sequence[Array], after: Sequence[Array]) -> list[Buffer]:
        names = f"{role}rows", f"{role}columns"
        return [Buffer(*x) for x in zip(names, before, after, strict=True)]

    of = lines("", scales, scales)
    of_64 = [square_sums(u), square_sums(p)]
    still = [x._replace(after=x.before) for x in weights]
    yield case("largest", *lines("new_", [np.zeros_like(x) for x in largest], largest))
    yield case(
        "factor_sums", *lines("", units, units), *lines("new_", [np.zeros_like(x) for x in sums], sums)
    )
    yield case("factor_squares", *of, *still, *lines("new_", [np.full_like(x, -1) for x in of_64], of_64))
    yield case("factored", *of, *(apart(weights) if into else weights), *copies, out=out)


def apart(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """The old state, left as it is, and others that receive the new one."""
    for b in buffers:
        yield b._replace(after=b.before)
        yield b._replace(
            role=f"into_{b.role}", before=np.full(b.after.nbytes, 0xA5, np.uint8).view(b.after.dtype)
        )


def sum_case(acc: Array | None, grad: Array, kind: str, *, first: bool) -> Case:
    """The sum of squares of a gradient, added to `acc` or written to it where there is one."""
    with np.errstate(all="ignore"):
        new = to_float32(grad) if acc is None or first else acc + to_float32(grad)
    name = "without a sum" if acc is None else "first" if first else "next"
    held = () if acc is None else (Buffer("acc", stale(acc.size, "fp32") if first else acc, new),)
    buffers = (*held, Buffer("grad", grad, grad))
    return Case(f"{name}, grad {kind}", "sum", grad.size, buffers, (kind, str(int(first))), summed=new)


def skeleton_case(n: int, widths: Sequence[int], *, copy: bool) -> Case:
    """The benchmark's yardstick: state complemented, the gradient copied, or xor-ed into the first of 2 bytes."""
    grad = random_grad(n, "bf16")
    buffers = []
    for role, width in zip(("master", "low", "moment_0", "moment_1"), widths, strict=False):
        before = np.arange(n * width).astype(np.uint8).view(f"u{width}")
        mixed = role == "master" and not copy
        buffers.append(Buffer(role, before, ~before ^ grad if mixed else ~before))
    buffers.append(Buffer("grad", grad, grad))
    if copy:
        buffers.append(Buffer("out", stale(n, "bf16"), grad))
    return Case(f"widths {widths}", "skeleton", n, tuple(buffers))


def race() -> Case:
    """Not a case to pass: all threads write one element."""
    x = np.zeros(1, np.float32)
    return Case("on purpose", "race", 1, (Buffer("master", x, x + 2),), threads=2)
