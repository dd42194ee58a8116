"""Sweeps beside an update: conversions are torch's, sums exact; and threads are used as they should be."""

import itertools
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy_reference import array, reference_square_sum, round_to, tensor, to_float32
from update_law import ISAS, NAMES, TYPES, assert_same, gradient, placed

import zfunc
from zfunc.core.region_table import SUM_PARTS
from zfunc.optim.kernel_loader import cpu_adam as kernel
from zfunc.optim.updates import accumulate_, exact_parts, square_sum

# ---- conversions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_widens_as_in_torch(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    for isa in ISAS:
        acc = torch.zeros(1 << 16)
        parts = torch.empty(kernel.PARTS, dtype=torch.float64)
        sizes = parts.data_ptr(), every.numel()
        kernel.accumulate(acc.data_ptr(), every.data_ptr(), *sizes, TYPES[dtype], True, 1, isa)
        assert_same((acc,), (every.float(),))
    assert_same((tensor(to_float32(array(every))),), (every.float(),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_rounds_as_torch(dtype: torch.dtype) -> None:
    """The kernel's rounding is that of the reference: test_update.py."""
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
def test_accumulate_and_square_sum(n: int, dtype: torch.dtype) -> None:
    first, second = gradient(n, dtype, 1), gradient(n, dtype, 2)
    total = first.float() + second.float()
    expected = [torch.from_numpy(reference_square_sum(array(x))) for x in (first, total)]
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


def test_the_square_sum_is_the_same_in_any_pieces() -> None:
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
def test_sums_propagate_inf_and_nan(bad: float) -> None:
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


def test_one_openmp_runtime() -> None:
    zfunc.adam_update_(*(torch.zeros(1 << 17) for _ in range(4)), step=1, lr=1e-3, threads=2)
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) == 1


def test_other_threads_run_while_the_kernel_does() -> None:
    n = 1 << 23
    buffers = [torch.ones(n) for _ in range(4)]
    interval: list[float] = []

    def update() -> None:
        start = time.perf_counter()
        zfunc.adam_update_(*buffers, step=1, lr=0.1, threads=1)
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
