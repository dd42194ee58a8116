"""Adam on the host: the reference is Adam, conversions and sums are exact, threads are used as they should be."""

import itertools
import math
import threading
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from adam_states import DECAYS, NAMES, TYPES, array, assert_same, gradient, placed, tensor

from zfunc.core.regions import SUM_PARTS
from zfunc.optim.adam_reference import reference_square_sum, reference_update, round_to, to_float32
from zfunc.optim.adamw import AdamW
from zfunc.optim.device_adam import exact_parts
from zfunc.optim.host_adam import accumulate_, adam_update_, square_sum
from zfunc.optim.kernel_loader import cpu_adam as kernel
from zfunc.optim.optimizer_settings import matrices_only

ISAS = range(len(kernel.instruction_sets()))


# ---- it is Adam ------------------------------------------------------------------------------------


def usual(n, step):
    """Weights well above one update, moments as gradients of about unit size leave them."""
    rng = np.random.default_rng(step)
    p = rng.uniform(0.02, 2.0, n) * rng.choice([-1.0, 1.0], n)
    v = rng.uniform(0.1, 2.0, n) * (1.0 - 0.999 ** (step - 1))
    m = rng.uniform(-1.0, 1.0, n) * np.sqrt(v) * (1.0 - 0.9 ** (step - 1))
    return tuple(x.astype(np.float32) for x in (p, m, v, rng.standard_normal(n)))


def cancelling(n, step):
    """Moments that a gradient cancels, to any number of bits, and weights down to far below one update."""
    rng = np.random.default_rng(step)
    p, _, v, g = usual(n, step)
    m = -0.1 / 0.9 * g * (1.0 + rng.choice([0.0, 1e-7, 1e-4, 1e-2], n) * rng.standard_normal(n))
    p = p * rng.choice([1e-6, 1e-3, 1.0], n)
    return p.astype(np.float32), m.astype(np.float32), v, g


@pytest.mark.parametrize("state", [usual, cancelling])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("step", [1, 2, 10, 1000])
def test_within_two_ulp_of_float64(decay, step, state):
    weight_decay, decoupled = DECAYS[decay].values()
    lr, b1, b2, eps = 1e-3, 0.9, 0.999, 1e-8
    before = state(100_000, step)
    kind = {"step": step, "lr": lr, "weight_decay": weight_decay, "decoupled": decoupled}
    got = reference_update(*before, **kind)
    p, m, v, g = (x.astype(np.float64) for x in before)
    l2 = 0.0 if decoupled else weight_decay * p
    m1 = b1 * m + (1 - b1) * (g + l2)
    v1 = b2 * v + (1 - b2) * (g + l2) ** 2
    rate = lr / (1 - b1**step) / (np.sqrt(v1 / (1 - b2**step)) + eps)
    p1 = p - rate * m1 - (lr * weight_decay * p if decoupled else 0.0)
    # An ulp is that of the sum of the terms' sizes: no arithmetic keeps the last bits of what cancels. The update
    # is one of the weights' terms, with the terms of the moments in it.
    # The moments carry the rounded 1 - beta, exp_avg_sq a squared gradient's error.
    size = np.abs(g) + np.abs(l2)
    m_terms, v_terms = b1 * np.abs(m) + (1 - b1) * size, b2 * v + (1 - b2) * size**2
    p_terms = np.abs(p) + rate * (m_terms + np.abs(m1) * v_terms / v1)
    cases = zip(got[:3], (p1, m1, v1), (p_terms, m_terms, v_terms), (2.0, 3.0, 5.0), strict=True)
    for mine, exact, terms, most in cases:
        ulp = np.spacing(terms.astype(np.float32)).astype(np.float64)
        assert (np.abs(mine - exact) / ulp).max() <= most
    # It does, or this would be the same test twice: in ulp of the result no bound holds.
    if state is cancelling:
        ulp = np.spacing(np.abs(m1).astype(np.float32)).astype(np.float64)
        assert (np.abs(got[1] - m1) / ulp).max() > 1e6


@pytest.mark.parametrize(
    ("kind", "weight_decay", "decoupled"),
    [(torch.optim.AdamW, 0.1, True), (torch.optim.Adam, 0.1, False), (torch.optim.AdamW, 0.0, True)],
)
def test_hundred_steps_of_torch(kind, weight_decay, decoupled):
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(1000, generator=generator))
    mine, m, v = theirs.detach().clone(), torch.zeros(1000), torch.zeros(1000)
    optimizer = kind([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=weight_decay)
    for step in range(1, 101):
        theirs.grad = torch.randn(1000, generator=generator)
        grad = theirs.grad * 8  # the scale must undo exactly this
        optimizer.step()
        options = {"weight_decay": weight_decay, "decoupled": decoupled, "grad_scale": 0.125}
        adam_update_(mine, m, v, grad, step=step, lr=1e-2, betas=(0.9, 0.99), **options)
    torch.testing.assert_close(mine, theirs.detach(), rtol=2e-5, atol=2e-6)


def test_decayed_moments_become_zero_and_nan_does_not():
    p, m, v = torch.ones(3), torch.full((3,), 1e-40), torch.full((3,), 1e-40)
    g = torch.tensor([0.0, 1e-20, math.nan])
    adam_update_(p, m, v, g, step=9, lr=1e-3)
    assert m[:2].tolist() == v[:2].tolist() == [0.0, 0.0]
    assert p[:2].tolist() == [1.0, 1.0]
    assert all(x[2].isnan() for x in (p, m, v))


# ---- conversions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_widens_as_in_torch(dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    for isa in ISAS:
        acc = torch.zeros(1 << 16)
        parts = torch.empty(kernel.PARTS, dtype=torch.float64)
        sizes = parts.data_ptr(), every.numel()
        kernel.accumulate(acc.data_ptr(), every.data_ptr(), *sizes, TYPES[dtype], True, 1, isa)
        assert_same((acc,), (every.float(),))
    assert_same((tensor(to_float32(array(every))),), (every.float(),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_rounds_as_torch(dtype):
    """The kernel's rounding is that of the reference: test_adam_bits.py."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    x = (high[:, None] | np.array(lows, np.uint32)).reshape(-1)  # every exponent; the ties; their neighbours
    more = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([x, more]).view(np.float32)
    with np.errstate(all="ignore"):
        assert_same((tensor(round_to(x, NAMES[dtype])),), (torch.from_numpy(x).to(dtype),))


# ---- the other sweeps ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 15, 55, 127, 65_536, 65_537, 100_003, (1 << 20) + 1])
def test_accumulate_and_square_sum(n, dtype):
    first, second = gradient(n, dtype, 1), gradient(n, dtype, 2)
    total = first.float() + second.float()
    expected = [tensor(reference_square_sum(array(x))) for x in (first, total)]
    parts = torch.empty(kernel.PARTS, dtype=torch.float64)
    for isa, threads, offset in itertools.product(ISAS, (1, 3), (0, 1)):
        acc, a = placed(torch.full((n,), torch.nan), offset), placed(first, offset)
        rest = parts.data_ptr(), n, TYPES[dtype]
        kernel.accumulate(acc.data_ptr(), a.data_ptr(), *rest, True, threads, isa)
        assert_same((parts,), (expected[0],))
        kernel.accumulate(acc.data_ptr(), second.data_ptr(), *rest, False, threads, isa)
        assert_same((acc, parts), (total, expected[1]))
        kernel.accumulate(0, a.data_ptr(), *rest, True, threads, isa)
        assert_same((parts,), (expected[0],))
    assert math.fsum(expected[0]) == pytest.approx(float(first.double().square().sum()), rel=1e-12)


def test_the_square_sum_is_the_same_in_any_pieces():
    """Of any sizes of numbers, and as a device adds up sums."""
    x = gradient(100_003, torch.float32, 3) * torch.randint(-60, 60, (100_003,)).float().exp2()
    whole = square_sum(x)
    for cuts in ([64], [128, 64_000], list(range(640, 100_000, 640))):
        pieces = [square_sum(piece) for piece in torch.tensor_split(x, cuts)]
        total = torch.stack(pieces).sum(0)
        assert math.fsum(total) == math.fsum(whole)
        rounded = torch.stack([piece.sum() for piece in pieces])
        assert math.fsum(exact_parts(rounded)) == math.fsum(rounded)
    tiny, huge = torch.full((64,), 2.0**-149), torch.full((1 << 20,), 3.4e38)
    for values in (tiny, huge):
        assert math.fsum(square_sum(values)) == values.numel() * float(values[0]) ** 2
    assert kernel.PARTS == SUM_PARTS


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_sums_propagate_inf_and_nan(bad):
    grad = torch.ones(50_000)
    grad[40_000] = bad
    acc = torch.zeros(50_000)
    for parts in (
        square_sum(grad),
        square_sum(grad.half()),
        accumulate_(acc, grad.bfloat16(), first=False),
        accumulate_(acc, torch.ones(50_000), first=False),
        exact_parts(grad.double().square()),
    ):
        assert repr(math.fsum(parts)) == repr(abs(bad))


# ---- threads and the runtime -----------------------------------------------------------------------


def test_one_openmp_runtime():
    adam_update_(*(torch.zeros(1 << 17) for _ in range(4)), step=1, lr=1e-3, threads=2)
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) == 1


# ---- the optimizer as a value ----------------------------------------------------------------------


def test_optimizer_is_a_frozen_value():
    assert AdamW(1e-3, betas=[0.9, 0.99]) == AdamW(lr=1e-3, betas=(0.9, 0.99))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        AdamW().lr = 1.0
    assert AdamW(lr=lambda step: 0.1 / step).lr_at(2) == 0.05
    chosen = AdamW(decay=matrices_only)
    assert chosen.decay("a.weight", (2, 2))
    assert not chosen.decay("a.bias", (2,))
    assert AdamW().decay("a.bias", (2,))


@pytest.mark.parametrize("value", [math.nan, -1e-3, math.inf])
def test_a_bad_learning_rate_names_its_step(value):
    with pytest.raises(ValueError, match="step 12"):
        AdamW(lr=lambda _: value).lr_at(12)


def test_other_threads_run_while_the_kernel_does():
    n = 1 << 23
    buffers = [torch.ones(n) for _ in range(4)]
    interval: list[float] = []

    def update() -> None:
        start = time.perf_counter()
        adam_update_(*buffers, step=1, lr=0.1, threads=1)
        interval.extend((start, time.perf_counter()))

    update()
    interval.clear()
    worker, beats = threading.Thread(target=update), []
    worker.start()
    while worker.is_alive():
        beats.append(time.perf_counter())
    start, end = interval
    middle = [t for t in beats if start + (end - start) / 4 < t < end - (end - start) / 4]
    assert len(middle) > 3  # with the GIL held there would be none
