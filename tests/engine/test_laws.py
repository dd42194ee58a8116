"""The laws that need tensors: one table of models x settings x schedules, and what must hold for every row.

The laws of plans alone are in test_plan.py, test_verify.py and their neighbours; law 8 is in test_adam_bits.py.
"""

import atexit
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import trained
from attrs import evolve
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from small_models import MODELS as ALL_MODELS
from small_models import bits
from table import Scattered, in_pairs
from torch import Tensor

import zfunc
from zfunc import schedules
from zfunc.core.layout import Parameter
from zfunc.engine.compile.cost_trace import AllocationTracker
from zfunc.engine.compile.program import Program, rescheduled
from zfunc.engine.compile.specialize import specialize
from zfunc.errors import DonatedStateError
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.executor import Jitter

SWAPS = mkdtemp()
atexit.register(rmtree, SWAPS, ignore_errors=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16 clipped": {"precision": "bf16", "clip_norm": 0.1},
    "fp16 in 3 micro-batches": {"precision": "fp16", "micro_batches": 3},
    "fp32 in 2, one slot, moments in 8 bits": {
        "precision": "fp32",
        "micro_batches": 2,
        "grad_slots": 1,
        "host_slots": 1,
        "moments": "8bit",
    },
    "bf16, moments in 16 bits": {"precision": "bf16", "moments": "16bit"},
    "stage 1, fp32 in 2, clipped": {"precision": "fp32", "stage": 1, "micro_batches": 2, "clip_norm": 0.5},
    "half on the device, bf16 in 2, clipped": {
        "precision": "bf16",
        "micro_batches": 2,
        "clip_norm": 0.1,
        "offload_ratio": 0.5,
        "ema": 0.9,
    },
    "a third on the host, fp32": {"precision": "fp32", "offload_ratio": 0.3, "moments": "8bit"},
    "fp16": {"precision": "fp16"},
    "deferred, bf16, 16 bits, clipped in part": {
        "precision": "bf16",
        "clip_norm": 0.85,
        "defer": True,
        "moments": "16bit",
        "ema": 0.75,
    },
    "on the disk, 16 bits, in 3, clipped, deferred": {
        "precision": "bf16",
        "state_on": "disk",
        "params_on": "disk",
        "grads_on": "disk",
        "activations_on": "disk,host",
        "swap": [SWAPS],
        "micro_batches": 3,
        "clip_norm": 0.1,
        "moments": "16bit",
        "bucket_size": 300,
        "defer": True,
    },
    "half on the host, fp32, two of 3 at a time": {
        "precision": "fp32",
        "params_on": "host",
        "weight_slots": 1,
        "offload_ratio": 0.5,
        "micro_batches": 3,
        "accumulate": 2,
    },
    "deferred, bf16 in 2, clipped, small buckets": {
        "precision": "bf16",
        "micro_batches": 2,
        "clip_norm": 1.0,
        "bucket_size": 100,
        "defer": True,
        "ema": 0.9,
    },
}
MODELS = [  # the GPT with dropout is the tied one, and draws; "norms" is frozen below
    name for name in ALL_MODELS if name not in ("tied GPT", "frozen below")
]
SCHEDULES = [*schedules.__all__, Scattered(0), Scattered(1, num_lanes=3)]
RECOMPUTE = ("all", "none", "min-cut")
STEPS = 3


def rows(*axes: Any) -> list[Any]:
    """The pairs of the table, but for what is refused: a swap space does not have modules' buffers."""
    refused = {"norms", "on the disk, 16 bits, in 3, clipped, deferred"}
    return [row for row in in_pairs(*axes) if not refused <= {x for x in row.values if isinstance(x, str)}]


def program(model: str, settings: str, **more: Any) -> tuple[Program, Any]:
    """All have micro-batches of one shape, so that a segment is traced once for each precision."""
    made, batch = trained.compiled(model, **{**SETTINGS[settings], **more})
    rows = 4 * made.settings.micro_batches
    return with_own_swap(made), lambda i: tuple(x[:rows] for x in batch(i))


def with_own_swap(made: Program) -> Program:
    """With a swap space, if it has any, that no other run writes."""
    if not made.settings.swap:
        return made
    return evolve(made, settings=evolve(made.settings, swap=[mkdtemp(dir=SWAPS)]))


_traced: dict[tuple[str, str, str], tuple[Program, Any]] = {}


def under(schedule: Any, model: str, settings: str, recompute: str = "all") -> tuple[Program, Any]:
    """That program under a schedule. Segments are traced once for all laws: that takes most of the time."""
    if recompute == "none" and SETTINGS[settings].get("params_on") in ("host", "disk"):
        recompute = "min-cut"  # what autograd keeps would be parameters that have left
    key = (model, settings, recompute)
    if key not in _traced:
        _traced[key] = program(model, settings, recompute=recompute)
    made, batch = _traced[key]
    made = rescheduled(made, getattr(schedules, schedule)() if isinstance(schedule, str) else schedule)
    return with_own_swap(made), batch


def result(made: Program, batch: Any, **step: Any) -> tuple[Any, ...]:
    """Losses, norms, scale, parameters and moments after a few steps: everything a step can change."""
    state = zfunc.init(made, seed=1)
    seen = []
    for i in range(STEPS):
        state, m = zfunc.train_step(made, state, batch(i), **step)
        seen.append((m.loss, m.grad_norm, m.skipped, m.loss_scale, m.aux))
    return seen, bits(zfunc.flush(made, state))


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return repr(a[0]) == repr(b[0]) and all(map(torch.equal, a[1], b[1]))  # a skipped step's norm is NaN


_serial: dict[tuple[str, str], tuple[Any, ...]] = {}


def serial(model: str, settings: str) -> tuple[Any, ...]:
    """The reference result: the recipe, top to bottom."""
    if (model, settings) not in _serial:
        _serial[model, settings] = result(*under("Serial", model, settings))
    return _serial[model, settings]


@pytest.mark.parametrize(("settings", "schedule", "model"), rows(SETTINGS, SCHEDULES, MODELS))
def test_2_any_schedule_gives_the_serial_bits(model: str, settings: str, schedule: Any) -> None:
    assert same(result(*under(schedule, model, settings)), serial(model, settings))


@pytest.mark.parametrize(("model", "settings", "seed"), rows(MODELS, SETTINGS, [0, 1]))
def test_3_and_10_random_delays_change_nothing_nor_do_stages_that_are_watched(
    model: str, settings: str, seed: int
) -> None:
    """Every stage does with what it declares: with `debug` it gets nothing else."""
    schedule = [schedules.Overlapped(), Scattered(seed)][seed]
    delayed = result(*under(schedule, model, settings), jitter=Jitter(seed, 3e-4), debug=True)
    assert same(delayed, serial(model, settings))


@pytest.mark.parametrize(("model", "settings", "recompute"), rows(MODELS, SETTINGS, RECOMPUTE[1:]))
def test_recompute_changes_nothing(model: str, settings: str, recompute: str) -> None:
    assert same(result(*under("Overlapped", model, settings, recompute)), serial(model, settings))


@pytest.mark.parametrize(("settings", "model"), rows(SETTINGS, MODELS[1:]))
def test_norms_of_parameters_change_nothing_not_even_the_norm_of_all(model: str, settings: str) -> None:
    assert same(result(*program(model, settings, norms=True, schedule="Serial")), serial(model, settings))


@pytest.mark.parametrize(("model", "moments"), in_pairs(MODELS, ["fp32", "16bit", "8bit"]))
def test_the_size_of_buckets_changes_no_weight(model: str, moments: str) -> None:
    """A block of compact state begins with its parameter, wherever that lies. (The norm is summed by bucket.)"""
    made = []
    for bucket_size in (64, 700, 100_000):
        compiled, batch = program(model, "fp32", moments=moments, bucket_size=bucket_size)
        state = zfunc.init(compiled, seed=1)
        for i in range(STEPS):
            state, _ = zfunc.train_step(compiled, state, batch(i))
        made.append(zfunc.params(compiled, state))
    for other in made[1:]:
        assert all(torch.equal(other[name], value) for name, value in made[0].items())


@pytest.mark.parametrize("model", MODELS)
def test_one_bucket_or_many_is_the_same_but_for_the_order_of_the_norm(model: str) -> None:
    full = result(*program(model, "fp32", bucket_size=10**6))
    small = result(*program(model, "fp32", bucket_size=64))
    assert [loss for loss, *_ in full[0]] == [loss for loss, *_ in small[0]]


@pytest.mark.parametrize(("model", "settings", "recompute"), rows(MODELS, SETTINGS, RECOMPUTE))
def test_9_measured_memory_stays_within_the_plan(model: str, settings: str, recompute: str) -> None:
    made, batch = under("Serial", model, settings, recompute)
    state = zfunc.init(made)
    state, _ = zfunc.train_step(made, state, batch(0))
    rows = batch(1)
    with AllocationTracker() as measured:
        zfunc.train_step(made, state, rows)
    planned = specialize(made, rows).memory["device"].transient
    assert 0 < measured.peak <= planned
    # Autograd frees residuals while backward runs. In small models, each scalar counts 512 bytes.
    slack = 1.1 if "none" in recompute else 1.0
    assert planned <= slack * measured.peak + 12 * 512
    assert measured.live == 0  # nothing is left behind


@st.composite
def layouts(draw: st.DrawFn) -> list[list[tuple[str, tuple[int, ...], bool]]]:
    """Segments as lists of (name, shape, trainable): many tiny, one huge, sizes of 1, tied, frozen, none."""
    shapes = st.sampled_from([(), (1,), (1, 1), (3,), (2, 5), (7, 9), (700,)])
    segments: list[list[tuple[str, tuple[int, ...], bool]]] = []
    for s in range(draw(st.integers(1, 5))):
        own = draw(st.lists(st.tuples(shapes, st.integers(0, 4)), max_size=4))
        segments.append([(f"s{s}.p{i}", shape, bool(kind)) for i, (shape, kind) in enumerate(own)])
    earlier = [p for own in segments for p in own]
    for own in segments:
        if earlier and draw(st.booleans()):
            tied = draw(st.sampled_from(earlier))
            own += [tied] if tied not in own else []
    segments[-1].append(("last.w", (1,), True))
    return segments


def from_layout(layout: list[list[tuple[str, tuple[int, ...], bool]]]) -> list[zfunc.Segment]:
    def function(params: dict[str, Tensor], x: Tensor, *targets: Tensor) -> Tensor:
        for name in sorted(params):
            x = torch.sin(x + params[name].mean())
        return (x - targets[0]).float().square().mean() if targets else x

    owner = {name: s for s, own in reversed([*enumerate(layout)]) for name, *_ in own}
    segments = []
    for s, own in enumerate(layout):
        parameters = [Parameter(*p) for p in own]
        mine = {p.name: p.shape for p in parameters if owner[p.name] == s}
        segments.append(
            zfunc.Segment(
                f"segment{s}",
                function,
                parameters,
                [p.name for p in parameters],
                initial=lambda seed, mine=mine: {
                    k: torch.randn(v, generator=torch.Generator().manual_seed(seed)) for k, v in mine.items()
                },
                shared={p.name for p in parameters} - mine.keys(),
            )
        )
    return segments


@given(
    layouts(),
    st.sampled_from([1, 70, 200, 10_000]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 0.01]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.integers(0, 5),
)
@examples(max_examples=10)
def test_2_and_10_on_any_layout(
    layout: Any, bucket_size: int, micro_batches: int, clip: float | None, precision: Any, seed: int
) -> None:
    x, y = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(1, 0, 24).view(6, 4)
    results = []
    made = zfunc.compile(
        from_layout(layout),
        bucket_size=bucket_size,
        micro_batches=micro_batches,
        clip_norm=clip,
        precision=precision,
        device="cpu",
        grad_slots=1 + seed % 2,
        host_slots=1 + seed % 3,
    )
    for schedule, debug in (
        (schedules.Serial(), False),
        (Scattered(seed), False),
        (schedules.Interleaved(), True),
    ):
        made = rescheduled(made, schedule)
        state = zfunc.init(made, loss_scale=LossScale(2.0**10))
        for _ in range(2):
            state, m = zfunc.train_step(made, state, (x, y), debug=debug)
        results.append(([m.loss, m.grad_norm], bits(state)))
    assert all(same(r, results[0]) for r in results)
    assert results[0][0][1] > 0


def test_7_a_donated_state_raises_with_what_to_do() -> None:
    made, batch = program("pairs", "fp32")
    old = zfunc.init(made)
    new, _ = zfunc.train_step(made, old, batch(0))
    for use in (lambda: zfunc.train_step(made, old, batch(1)), lambda: zfunc.params(made, old)):
        with pytest.raises(DonatedStateError, match=r"state, metrics = zfunc\.train_step"):
            use()
    zfunc.train_step(made, new, batch(1))
