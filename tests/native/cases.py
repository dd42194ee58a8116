"""One case: buffers before, and after by the NumPy reference.

The invariant: what a case must give is computed here, from what it begins with and nothing else.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zfunc.core.optimizer_state import moment_buffers
from zfunc.optim.adafactor_reference import (
    AdafactorFactors,
    adafactor_factors,
    matrices_of,
    roots,
    square_sums,
    unit_of,
)
from zfunc.optim.adam_reference import (
    Array,
    coefficients,
    flush_small,
    reference_update,
    round_to,
    to_float32,
)
from zfunc.optim.compact_reference import (
    BLOCK,
    EXP_AVG,
    EXP_AVG_SQ,
    Compact,
    first_dither,
    pack,
    reference_compact_update,
    split,
)
from zfunc.optim.one_buffer_reference import (
    Rule,
    has_sign,
    pack_one_buffer,
    reference_one_buffer_update,
    rule_factors,
)

from .stream import Buffer, Case

DECAYS = {"none": (0.0, True), "decoupled": (0.1, True), "l2": (0.1, False)}
DTYPES = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
STORED = {"fp32": "fp32", "16bit": "bf16"}  # a buffer without a scale
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


def adam_case(
    state: State | Compact,
    grad: Array,
    kind: str,
    *,
    moments: str = "fp32",
    out: str = "none",
    decay: str = "none",
    step: int = 3,
    lr: float = 1e-3,
    scale: float = 0.3,
    into: bool = False,
) -> Case:
    """One Adam step over fp32 or compact state, in place or into other buffers."""
    n, (weight_decay, decoupled) = grad.size, DECAYS[decay]
    setting = {
        "step": step,
        "lr": lr,
        "grad_scale": scale,
        "weight_decay": weight_decay,
        "decoupled": decoupled,
    }
    step_of = fp32_step if moments == "fp32" else compact_step
    buffers, copy = step_of(state, grad, moments, None if out == "none" else out, setting)
    copies = () if copy is None else (Buffer("out", stale(n, out), copy),)
    if into:
        buffers = list(apart(buffers))
    return Case(
        f"moments {moments}, grad {kind}, out {out}, decay {decay}, scale {scale}, into {into}",
        "adam",
        n,
        (*buffers, Buffer("grad", grad, grad), *copies),
        moments,
        kind,
        out,
        decay,
        dither=(first_dither(step, EXP_AVG), first_dither(step, EXP_AVG_SQ)),
        factors=coefficients(betas=(0.9, 0.999), eps=1e-8, **setting),
    )


RULES: tuple[tuple[Rule, str], ...] = (  # with the kind of their state's formats
    ("sgd", "weights"),
    ("sgd", "sgd"),
    ("nesterov", "sgd"),
    ("lion", "lion"),
    ("adagrad", "adagrad"),
    ("direction", "muon"),
)


def one_buffer_case(
    state: tuple[Array, Array],
    grad: Array,
    kind: str,
    rule: Rule,
    state_format: str,
    *,
    out: str = "none",
    decay: str = "none",
    step: int = 3,
    scale: float = 0.3,
    into: bool = False,
) -> Case:
    """One step of a rule from fp32 weights and buffer, which are packed first."""
    weight_decay, decoupled = DECAYS[decay]
    lr = 0.01
    factors = rule_factors(
        grad_scale=scale,
        rate=lr,
        decay=lr * weight_decay if decoupled else weight_decay,
        keep=0.9,
        add=0.25,
        look_keep=0.95,
        look_add=0.05,
        eps=1e-10,
        initial=0.1,
    )
    with np.errstate(all="ignore"):
        before = pack_one_buffer(*state, state_format=state_format, step=step - 1)
        after, copy = reference_one_buffer_update(
            before,
            grad,
            state_format=state_format,
            rule=rule,
            factors=factors,
            step=step,
            decoupled=decoupled,
            out=None if out == "none" else out,
        )
    own = [x.name for x in moment_buffers(state_format)]
    roles = {
        "master_high": "master",
        "master_low": "low",
        **dict(zip(own, ("buffer", "scale"), strict=False)),
    }
    buffers = [
        Buffer(roles.get(name, name), before[name], new, BLOCK if name.endswith("scale") else 1)
        for name, new in after.items()
    ]
    kept = "signed" if has_sign(state_format) else "unsigned"
    buffer = kept if len(own) == 2 else STORED[state_format.partition("-")[2]] if own else "none"
    copies = () if copy is None else (Buffer("out", stale(grad.size, out), copy),)
    return Case(
        f"{state_format}, grad {kind}, out {out}, decay {decay}, scale {scale}, into {into}",
        rule,
        grad.size,
        (*(apart(buffers) if into else buffers), Buffer("grad", grad, grad), *copies),
        f"buffer-{buffer}",
        kind,
        out,
        decay,
        dither=(first_dither(step, EXP_AVG), 0),
        factors=factors,
    )


def factored_cases(
    shape: tuple[int, ...], kind: str, *, halves: bool, out: str, decay: str, into: bool, scale: float = 0.3
) -> Iterator[Case]:
    """The sweeps of one step of Adafactor."""
    matrices = matrices_of(shape)
    _, rows, columns, _ = matrices
    p, grad = random_state(math.prod(shape))[0], random_grad(math.prod(shape), kind)
    settings: Any = {"lr": 0.1, "beta2_decay": -0.8, "eps": (1e-7, 1e-3), "d": 1.0}
    factors = adafactor_factors(step=3, weight_decay=DECAYS[decay][0], grad_scale=scale, **settings)
    k = AdafactorFactors._make(np.float32(x) for x in factors)
    g = (flush_small(to_float32(grad), k.grad_floor) * k.grad_scale).reshape(matrices[:3])
    squares, largest = g.astype(np.float64) ** 2, [np.abs(g).max(2), np.abs(g).max(1)]
    units = [unit_of(x.astype(np.float64) ** 2, y) for x, y in zip(largest, (columns, rows), strict=True)]
    sums = [((squares + x) - x).sum(axis) for x, axis in ((units[0][:, :, None], 2), (units[1][:, None], 1))]
    variance = np.random.default_rng(2).random(sum(matrices.kept), dtype=np.float32)
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
        return Case(name, op, p.size, buffers, "fp32", kind, out, decay, False, (rows, columns), factors)

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


Stepped = tuple[list[Buffer], Array | None]


def fp32_step(state: State, grad: Array, _: str, out: str | None, setting: dict[str, Any]) -> Stepped:
    """The buffers of a step over fp32 state, and the copy."""
    new = reference_update(*state, grad, out=out, **setting)
    roles = ("master", "exp_avg", "exp_avg_sq")
    return [Buffer(*each) for each in zip(roles, state, new[:3], strict=True)], new.out


def compact_step(
    state: State | Compact, grad: Array, moments: str, out: str | None, setting: dict
) -> Stepped:
    """The buffers of a step over compact state, and the copy; fp32 state is packed first."""
    with np.errstate(all="ignore"):
        packed = isinstance(state, Compact)
        before = state if packed else pack(*state, moments=moments, step=setting["step"] - 1)
        after, copy = reference_compact_update(before, grad, out=out, **setting)
    found = []
    for field, old, new in zip(Compact._fields, before, after, strict=True):
        if old is not None:
            role = "master" if field == "high" else field
            found.append(Buffer(role, old, new, BLOCK if field.endswith("scale") else 1))
    return found, copy


def sum_case(acc: Array | None, grad: Array, kind: str, *, first: bool) -> Case:
    """The sum of squares of a gradient, added to `acc` or written to it where there is one."""
    with np.errstate(all="ignore"):
        new = to_float32(grad) if acc is None or first else acc + to_float32(grad)
    name = "without a sum" if acc is None else "first" if first else "next"
    held = () if acc is None else (Buffer("acc", stale(acc.size, "fp32") if first else acc, new),)
    buffers = (*held, Buffer("grad", grad, grad))
    return Case(f"{name}, grad {kind}", "sum", grad.size, buffers, grad=kind, first=first, summed=new)


def skeleton_case(n: int, widths: Sequence[int], *, copy: bool) -> Case:
    """The benchmark's yardstick: state complemented, the gradient copied, or xor-ed into the first of 2 bytes."""
    grad = random_grad(n, "bf16")
    buffers = []
    for role, width in zip(("master", "low", "exp_avg", "exp_avg_sq"), widths, strict=False):
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
