"""Compact state: packed formats are exact where they can be, unbiased where not. Its kernel: test_update.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy_reference import (
    array,
    dither,
    join,
    pack,
    pack_bf16,
    pack_exp_avg,
    pack_floats,
    round_to,
    split,
    tensor,
    unpack_exp_avg,
    unpack_floats,
    unpack_moments,
    unpack_weights,
)
from pairs import in_pairs

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.core.layout import ALIGNMENT
from zfunc.optim.formats import (
    BLOCK,
    EXP_AVG,
    EXP_AVG_SQ,
    HIGHEST_CODE,
    LIMIT,
    MIN_SHIFT,
    NUM_SHIFTS,
    initial_state,
    master_weights,
)
from zfunc.optim.kernel_loader import cpu_adam as kernel

MOMENTS = ("16bit", "8bit")
ALL = np.arange(1 << 16, dtype=np.uint32)
floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


def packed(p, m, v, moments, step=1):
    return pack(p, [m, v], moments, step)


def unpacked(state, moments):
    return unpack_weights(state), *unpack_moments(state, moments)


def updated(state, grad, moments, step, **settings):
    """One step of Adam over such a state, by the kernel: test_update.py says that it has the reference's bits."""
    split_master = moments == "fp32-split"
    adam = zfunc.AdamW(**{"lr": 1e-3, "weight_decay": 0.0, **settings}).with_moments(
        moments.removesuffix("-split"), split_master=split_master
    )
    old = {name: tensor(x) for name, x in state.items()}
    new = {name: torch.empty_like(x) for name, x in old.items()}
    decision = StepDecision(False, 1.0, step, adam.factors(step))
    adam.host_update(old, tensor(grad), decision, group=0, into=new, threads=1)
    return {name: array(x) for name, x in new.items()}


def of_floats(p, m, v):
    return {"master": p, "exp_avg": m, "exp_avg_sq": v}


def some(fractions):
    """Dithers, of 2^32, for every element of some blocks."""
    return (fractions >> np.uint32(1)).astype(np.int32).reshape(-1, BLOCK)


def pack_exp_avg_sq(x, spread):
    return pack_floats(x, spread, signed=False)


def unpack_exp_avg_sq(codes, scale):
    return unpack_floats(codes, scale, signed=False)


def from_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def same(got, expected):
    """Equal bits, every NaN alike."""
    got, expected = (np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32) for x in (got, expected))
    np.testing.assert_array_equal(got, expected)


def test_the_kernel_and_the_layout_have_the_same_blocks():
    assert kernel.SHARED == BLOCK == ALIGNMENT
    assert kernel.UNIT % BLOCK == 0


# ---- the split master --------------------------------------------------------------------------------


def test_a_split_master_is_exact():
    for low in (0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        same(join(*split(from_bits((ALL << 16) | low))), from_bits((ALL << 16) | low))
    for high in (0x0000, 0x8000, 0x0001, 0x3F80, 0xBF80, 0x3F7F, 0x7F7F, 0xFF7F):
        same(join(*split(from_bits((high << 16) | ALL))), from_bits((high << 16) | ALL))


@given(st.lists(floats, min_size=1, max_size=70))
def test_a_split_master_of_any_float_is_exact(values):
    x = np.array(values, np.float32)
    same(join(*split(x)), x)


def test_high_half_is_the_nearest_bfloat16():
    x = from_bits(np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint64))
    high = split(x)[0]
    ties = (x.view(np.uint32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(high[~ties & ~np.isnan(x)], round_to(x, "bf16")[~ties & ~np.isnan(x)])
    assert np.isnan(from_bits(high.astype(np.uint32) << 16)[np.isnan(x)]).all()
    assert (split(from_bits([0x3F808000, 0xBF818000]))[0] == [0x3F81, 0xBF82]).all()  # ties: away from zero


def assert_split_of(state, p, m, v):
    """The state is the fp32 one to the bit, and its high half the bf16 copy that goes to the device with that."""
    for got, expected in zip(unpacked(state, "fp32-split"), (p, m, v), strict=True):
        same(got, expected)
    same(*(from_bits(x.astype(np.uint32) << 16) for x in (state["master_high"], round_to(p, "bf16"))))


def test_every_tie_and_its_neighbours_beside_fp32_moments():
    for low in (0x7FFF, 0x8000, 0x8001):
        exact = from_bits((ALL << 16) | low), *np.zeros((2, ALL.size), np.float32)
        assert_split_of(packed(*exact, "fp32-split"), *exact)


@given(st.lists(st.tuples(floats, floats, floats, floats), min_size=1, max_size=70))
def test_fp32_moments_beside_a_split_master_are_the_same_training(rows):
    p, m, v, g = np.array(rows, np.float32).T.copy()
    with np.errstate(all="ignore"):
        exact = p, m, np.abs(v)
        state, exact = packed(*exact, "fp32-split"), of_floats(*exact)
        for step in range(1, 4):
            how = {"step": step, "lr": 2.0**-9, "weight_decay": 0.1}
            exact = updated(exact, g, "fp32", **how)
            state = updated(state, g, "fp32-split", **how)
            assert_split_of(state, *exact.values())


def test_split_of_tensors():
    x = torch.randn(1000)
    halves = initial_state(x, {})
    assert torch.equal(master_weights(halves, 0, 1000), x)
    torch.testing.assert_close(halves["master_high"].float(), x, rtol=2**-8, atol=0)


# ---- bfloat16 moments --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 1_000_000])
def test_every_bfloat16_is_exact(step):
    packed = pack_bf16(from_bits(ALL << 16), dither(step, EXP_AVG, ALL))
    same(from_bits(packed.astype(np.uint32) << 16), from_bits(ALL << 16))


@pytest.mark.parametrize("x", [1.001, -3.3e-7, 1.17e-38, 255.9])
def test_rounding_to_bfloat16_is_unbiased_over_every_dither(x):
    packed = pack_bf16(np.full(1 << 16, x, np.float32), some(ALL << 16))
    mean = from_bits(packed.astype(np.uint32) << 16).astype(np.float64).mean()
    assert mean == np.float32(x)


# ---- 8-bit moments -----------------------------------------------------------------------------------


def kept(m, v, step=1, n=None):
    """The values of m and v after they were packed."""
    n = np.size(v) if n is None else n
    m, v = (np.broadcast_to(np.float32(x), n).copy() for x in (m, v))
    return unpack_moments(pack(None, [m, v], "8bit", step), "8bit")


@pytest.mark.parametrize("choice", range(NUM_SHIFTS))
def test_every_code_of_exp_avg_sq_under_every_scale_is_exact(choice):
    """Each block has the highest code and code 1, so that its scale is the same again."""
    shift = MIN_SHIFT + choice
    tops = np.arange((HIGHEST_CODE << shift) + (1 << 23) >> 21, (LIMIT >> 21) + 1, dtype=np.int64) << 21
    bases = tops - (HIGHEST_CODE << shift)
    scales = (bases >> 16 | choice).astype(np.int16).repeat(5)
    codes = np.zeros((5, BLOCK), np.uint8)
    codes[:, :2], codes[:, 2:] = (1, HIGHEST_CODE), np.resize(np.arange(HIGHEST_CODE + 1), (5, BLOCK - 2))
    codes = np.tile(codes.ravel(), tops.size)
    values = unpack_exp_avg_sq(codes, scales)
    assert np.isfinite(values).all()
    assert ((values > 0) == (codes > 0)).all()
    again, found = pack_exp_avg_sq(values, dither(choice, EXP_AVG_SQ, values))
    np.testing.assert_array_equal(found, scales)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("exponent", [-60, -9, 0, 7, 62])
def test_every_code_of_exp_avg_in_units_of_a_power_of_two_is_exact(exponent):
    for root in (2.0**exponent, 1.9 * 2.0**exponent):
        v = np.full(256, root, np.float32) ** 2
        packed = pack_exp_avg_sq(v, dither(1, EXP_AVG_SQ, v))
        codes = np.arange(256, dtype=np.uint8)
        values = unpack_exp_avg(codes, *packed)
        np.testing.assert_array_equal(pack_exp_avg(values, dither(3, EXP_AVG, v), *packed), codes)
        assert values.max() == -values.min() == 31 * 2.0**exponent
        assert (np.diff(values[:128]) > 0).all()
        assert np.diff(values[:32]).max() == 2.0 ** (exponent - 6)  # subnormals at the spacing above them


@pytest.mark.parametrize("x", [1.001, 0.3, 1e-4, 2.0**-30 * 0.77, 2.0**-61 * 1.3])
def test_rounding_exp_avg_sq_is_unbiased_over_every_dither(x):
    n = 1 << 18
    values = np.full(n, x, np.float32)
    values[::BLOCK] = 1.5
    packed = pack_exp_avg_sq(values, some(np.arange(n, dtype=np.uint32) << np.uint32(14)))
    got = unpack_exp_avg_sq(*packed).astype(np.float64).reshape(-1, BLOCK)[:, 1:]
    np.testing.assert_allclose(got.mean(), np.float32(x), rtol=3e-4)


@pytest.mark.parametrize("x", [1.001, -0.3, 1e-2, 17.3])
def test_rounding_exp_avg_is_unbiased_over_every_dither(x):
    n = 1 << 18
    packed = pack_exp_avg_sq(np.full(n, 1.1, np.float32), some(np.zeros(n, np.uint32)))
    codes = pack_exp_avg(
        np.full(n, x, np.float32), some(np.arange(n, dtype=np.uint32) << np.uint32(14)), *packed
    )
    np.testing.assert_allclose(unpack_exp_avg(codes, *packed).astype(np.float64).mean(), x, rtol=3e-4)


@given(values=st.lists(floats, min_size=1, max_size=200), step=st.integers(1, 1 << 40))
def test_exp_avg_sq_of_anything(values, step):
    """Within one unit in each of 64 binades; above 0 stays so; infinite and NaN are one element's matter."""
    x = np.abs(np.array(values, np.float32))
    (_, got), finite = kept(0, x, step), np.abs(x) <= from_bits(LIMIT)
    assert (np.isinf(got) == ~finite).all()
    assert ((got > 0) == ~(x == 0)).all()
    for start in range(0, x.size, BLOCK):
        ok = finite[start : start + BLOCK]
        block, out = (y[start : start + BLOCK][ok].astype(np.float64) for y in (x, got))
        largest = block.max(initial=2.0**-126)
        assert (np.abs(out - block) <= np.maximum(block / 4, 2.0**-62 * largest)).all()
        wide = block[block > 0].min(initial=largest)
        if wide >= max(largest / 64, 2.0**-110):
            assert (np.abs(out - block) <= block / 32).all()


@given(st.lists(st.tuples(floats, st.floats(2.0**-60, 2.0**60, width=32)), min_size=1, max_size=200))
def test_exp_avg_of_anything_beside_its_root(pairs):
    """Precise by its own root alone: 1/16, or 2^-6 of the unit, and up to 15.5 roots."""
    m, root = (np.array(x, np.float32) for x in zip(*pairs, strict=True))
    got, v = kept(m, root * root)
    assert np.isfinite(got).all()
    unit = 2.0 ** np.floor(np.log2(np.sqrt(v.astype(np.float64))))
    exact = np.clip(np.nan_to_num(m.astype(np.float64), nan=np.inf), -31 * unit, 31 * unit)
    assert (np.abs(got - exact) <= np.maximum(np.abs(exact) / 16, 2.0**-6 * unit)).all()


def test_zeroed_bytes_are_zero_moments():
    packed = np.zeros(64, np.uint8), np.zeros(1, np.int16)
    assert (unpack_exp_avg_sq(*packed).view(np.uint32) == 0).all()
    assert (unpack_exp_avg(np.zeros(64, np.uint8), *packed).view(np.uint32) == 0).all()


def test_second_moments_never_become_zero():
    x = np.full(BLOCK, 2.0**-119, np.float32)
    x[0] = 1e30
    for step in range(1, 200):
        assert (kept(0, x, step)[1] > 0).all()


# ---- beside others in a block --------------------------------------------------------------------------


def side_by_side(gradient, steps, *kinds, n=64 * 8):
    """States of some kinds after each step of `gradient(step, weights)`, from zeros on."""
    states = [packed(*np.zeros((3, n), np.float32), x) for x in kinds]
    for step in range(1, steps + 1):
        with np.errstate(all="ignore"):
            grads = [gradient(step, unpack_weights(x)) for x in states]
            states = [updated(*x, step) for x in zip(states, grads, kinds, strict=True)]
        yield states


def trained_both_ways(gradient, steps, n=64 * 8):
    """fp32 and 8-bit weights after some steps of `gradient(step, weights)`."""
    *_, states = side_by_side(gradient, steps, "fp32", "8bit", n=n)
    return [unpack_weights(x).astype(np.float64) for x in states]


@pytest.mark.parametrize("octaves", [9, 10, 14, 20, 24])
def test_weights_far_below_the_largest_of_their_block_still_move(octaves):
    """The share of the true update: with exponents of a block alone 0.04 at 2^-14 and 0.004 at 2^-20."""
    n = 64 * 8
    small = np.arange(n) % BLOCK != 0
    rng = np.random.default_rng(0)
    scale = np.where(small, 2.0**-octaves, 1.0) * np.exp2(rng.uniform(-0.5, 0.5, n))
    noise = 1 + 2 * rng.standard_normal((301, n))
    exact, got = trained_both_ways(lambda step, _: (scale * noise[step]).astype(np.float32), 300)
    exact, got = exact[small], got[small]
    share = (exact * got).sum() / (exact * exact).sum()
    assert 0.95 < share < 1.07
    assert np.abs(got - exact).mean() < 0.15 * np.abs(exact).mean()


@pytest.mark.parametrize("spike", [1e6, -1e20])
def test_one_spike_leaves_its_neighbours_as_they_are(spike):
    """1e20 is finite and its square is not: fp32 has no NaN after it, and there is none here."""
    n, steps = 64 * 4, 1000
    rng = np.random.default_rng(3)
    target, noise = rng.standard_normal(n) * 0.3, 0.1 * rng.standard_normal((steps + 1, n))

    def gradient(step, weights):
        g = (weights - target + noise[step]).astype(np.float32)
        g[::BLOCK] = spike if step == 20 else g[::BLOCK]
        return g

    exact, got = trained_both_ways(gradient, steps, n)
    neighbours = np.arange(n) % BLOCK != 0
    off, allowed = (np.abs(x - target)[neighbours].mean() for x in (got, exact))
    assert np.isfinite(exact).all()
    assert np.isfinite(got).all()
    assert off < 1.5 * allowed


# ---- over many steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moments", "of"), in_pairs(MOMENTS, [(0.95, 300), (0.99, 599), (0.995, 1199), (0.999, 3000)])
)
def test_moments_without_gradients_decay_as_they_should(moments, of):
    """On the mean of many elements: each takes its own way down, and none stands still."""
    beta2, steps = of
    n = 64 * 32
    v = np.random.default_rng(0).random(n, dtype=np.float32) + np.float32(0.5)
    zero = np.zeros(n, np.float32)
    state = packed(zero, zero, v, moments)
    for step in range(1, steps + 1):
        state = updated(state, zero, moments, step, betas=(0.9, beta2))
    ratio = unpack_moments(state, moments)[1].astype(np.float64) / (v.astype(np.float64) * beta2**steps)
    assert abs(ratio.mean() - 1) < {"16bit": 0.02, "8bit": 0.1}[moments]
    assert ratio.max() < {"16bit": 1.5, "8bit": 5}[moments]


def test_rounded_to_nearest_a_moment_would_stand_still():
    """What the dither is for: 0.1 % a step is less than half a unit of bfloat16."""
    v = np.linspace(0.5, 1.5, 100, dtype=np.float32)
    for _ in range(3000):
        v = from_bits(round_to(v * np.float32(0.999), "bf16").astype(np.uint32) << 16)
    assert (v > 0.4).all()  # the true value is a twentieth


@pytest.mark.parametrize("period", [2, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5))])
def test_gradients_that_come_regularly_bias_no_moment(period):
    """A dither that was regular itself would fall in step with them."""
    grad = np.exp2(np.random.default_rng(1).uniform(-3, 0, 64 * 8)).astype(np.float32)
    ratios, trained = [], side_by_side(lambda step, _: grad * (step % period == 0), 1200, "fp32", *MOMENTS)
    for exact, *others in list(trained)[600:]:
        own = [unpack_moments(x, kind)[1] for x, kind in zip(others, MOMENTS, strict=True)]
        ratios.append([np.sqrt(v / exact["exp_avg_sq"]).mean() for v in own])
    assert (np.abs(np.mean(ratios, 0) - 1) < (0.003, 0.02)).all()


def test_moments_track_those_in_fp32():
    """Under noisy gradients of sizes that differ a thousandfold inside a block."""
    n, steps, rng = 512, 500, np.random.default_rng(1)
    scale = np.exp2(rng.uniform(-10, 0, n)).astype(np.float32)
    noise = (rng.standard_normal((steps, n)).astype(np.float32) + np.float32(0.3)) * scale
    errors, trained = [], [*side_by_side(lambda step, _: noise[step - 1], steps, "fp32", *MOMENTS)]
    for exact, *others in trained[steps // 2 :]:
        own = [unpack_moments(x, kind)[1].astype(np.float64) for x, kind in zip(others, MOMENTS, strict=True)]
        errors.append([np.sqrt(v) / np.sqrt(exact["exp_avg_sq"]) - 1 for v in own])
    late = np.array(errors)
    assert (np.abs(late.mean((0, 2))) < (0.001, 0.03)).all()
    assert (late.std((0, 2)) < (0.015, 0.16)).all()
    exact, *others = map(unpack_weights, trained[-1])
    for got, allowed in zip(others, (0.01, 0.1), strict=True):
        assert np.abs(got - exact).mean() < allowed * np.abs(exact).mean()


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38, 1e-45])
def test_a_special_gradient_is_its_own_elements_matter(moments, bad):
    rng = np.random.default_rng(0)
    p, m, g = rng.standard_normal((3, 200)).astype(np.float32)
    g[77] = bad
    state = packed(p, m, np.square(m), moments)
    p, m, v = unpacked(updated(state, g, moments, 1), moments)
    if not np.isfinite(bad):
        assert np.isnan(p[77])
        assert not np.isfinite(v[77])
    for x in (p, m, v):
        assert np.isfinite(np.delete(x, 77)).all()


def test_codes_with_a_sign_are_found_again_and_reach_over_63_binades():
    values = np.concatenate([np.exp2(np.linspace(0, x, 32)) for x in (-7, -15, -30, -62)]).astype(np.float32)
    x = np.stack([values, -values], axis=1).reshape(-1)
    packed = pack_floats(x, some(np.zeros(x.size, np.uint32)), signed=True)
    got = unpack_floats(*packed, signed=True)
    assert (np.sign(got) == np.sign(x)).all()
    again = pack_floats(got, dither(7, 0, x), signed=True)
    assert all((a == b).all() for a, b in zip(packed, again, strict=True))
    for i, mantissa_bits in enumerate((4, 3, 2, 1)):
        block = slice(64 * i, 64 * i + 64)
        assert (np.abs(got - x)[block] <= np.abs(x)[block] * 2.0**-mantissa_bits).all()
