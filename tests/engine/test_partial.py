"""Partial offload: the share that was asked for, wherever it is updated the same bits, and what fits."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS, bits
from table import chain, in_pairs, layouts, spec

import zfunc
from zfunc.core.bucketing import resident_buckets
from zfunc.core.layout import make_layout
from zfunc.core.memory_model import peak_memory
from zfunc.core.spec import ALLOCATION
from zfunc.engine.compile import fit_to_memory as partial
from zfunc.engine.compile.fit_to_memory import share_on_host
from zfunc.engine.compile.program import Program
from zfunc.errors import OutOfMemory

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16, clipped": {"precision": "bf16", "clip_norm": 0.5},
    "fp16": {"precision": "fp16"},
    "16 bits": {"precision": "bf16", "moments": "16bit"},
    "8 bits, clipped": {"precision": "fp32", "moments": "8bit", "clip_norm": 0.5},
    "in 3": {"precision": "bf16", "micro_batches": 3, "clip_norm": 0.5},
    "stage 1": {"precision": "fp32", "micro_batches": 2, "stage": 1},
}


def compiled(
    settings: str, ratio: Any, model: str = "tied GPT", **more: Any
) -> tuple[Program, Callable[[int], Any]]:
    options = {"bucket_size": 1000, **SETTINGS[settings], **more}
    return trained.compiled(model, offload_ratio=ratio, **options)


@cache
def weights(
    settings: str, ratio: Any, model: str = "tied GPT", **more: Any
) -> tuple[list[float], dict[str, Any]]:
    program, data = compiled(settings, ratio, model, **more)
    state, losses = zfunc.init(program, seed=1), []
    for i in range(STEPS):
        state, m = zfunc.train_step(program, state, data(i))
        losses.append(m.loss)
    return losses, zfunc.params(program, state)


@pytest.mark.parametrize(
    ("settings", "ratio", "model"),
    [
        *(
            pytest.param(*row.values, "tied GPT", marks=row.marks)
            for row in in_pairs(SETTINGS, [0.0, 0.3, 0.75])
        ),
        *(("fp32", 0.5, model) for model in MODELS),
    ],
)
def test_where_a_bucket_is_updated_changes_no_bit(settings: str, ratio: float, model: str) -> None:
    """Of one layout: with another the norm is summed up in another order."""
    full, some = (weights(settings, r, model, bucket_size=400) for r in (1.0, ratio))
    if settings == "in 3":  # the norm of a sum is taken by another sweep
        assert some[0] == pytest.approx(full[0], abs=1e-3)
        return
    assert some[0] == full[0]
    assert all(torch.equal(some[1][name], x) for name, x in full[1].items())


@given(layouts(), st.floats(0, 1))
def test_the_share_is_as_near_to_the_ratio_as_half_a_bucket(inputs: Any, ratio: float) -> None:
    segments, bucket_size, world = inputs
    layout = make_layout(segments, bucket_size=bucket_size, world=world)
    resident = resident_buckets(layout, ratio)
    on_device = sum(layout.buckets[b].numel for b in resident)
    largest = max(b.numel for b in layout.buckets)
    assert abs(on_device - (1 - ratio) * layout.numel) <= largest / 2 + 1e-6 * layout.numel
    assert len(resident_buckets(layout, 0.0)) == len(layout.buckets)
    assert not resident_buckets(layout, 1.0)


@pytest.mark.parametrize("num_layers", [1, 4, 30])
@pytest.mark.parametrize("bucket_size", [1000, 50_000_000])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_the_ratio_holds_at_any_size_of_model_and_bucket(
    ratio: float, bucket_size: int, num_layers: int
) -> None:
    """A ratio of a half of a model in one bucket is a half all the same: it is cut into more."""
    modules = [
        (f"layer{n}", torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)]))
        for n in range(num_layers)
    ]
    segments = [zfunc.segment(n, m) for n, m in modules]
    program = zfunc.compile(
        segments, offload_ratio=ratio, bucket_size=bucket_size, device="cpu", precision="fp32"
    )
    assert share_on_host(program.spec) == pytest.approx(ratio, abs=1 / 32)


def test_a_ratio_of_0_leaves_nothing_on_the_host() -> None:
    program, data = compiled("bf16, clipped", 0.0)
    state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
    assert {r.tier for r in state.buffers.memory} == {"device"}
    assert not {"to_host", "adam", "to_device"} & {op.verb for op in program.plan.graph}
    assert peak_memory(program.plan)["host"].nbytes < 100_000


def test_resident_buckets_are_planned_on_the_device() -> None:
    (half, _), (full, _) = (compiled("fp32", ratio, "odd sizes", bucket_size=200) for ratio in (0.5, 1.0))
    kept = sum(half.layout.buckets[b].numel for b in half.spec.resident)
    a, b = peak_memory(half.plan), peak_memory(full.plan)
    rounding = a["device"].kept - b["device"].kept - 12 * kept  # of three buffers, to the allocator's units
    assert 0 <= rounding < 3 * ALLOCATION
    assert b["host"].kept - a["host"].kept == 12 * kept


def test_the_share_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="zfunc"):
        program, _ = compiled("fp32", 0.25)
    share = f"{100 * share_on_host(program.spec):.1f}%"
    assert f"offload: {share} of the optimizer's state is on the host (requested: 25%)" in caplog.text


def test_auto_keeps_on_the_device_what_fits_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where all memory is one: then less is needed the more stays where it is."""
    segments, data = MODELS["tied GPT"]()
    options: dict[str, Any] = {"precision": "bf16", "bucket_size": 400, "device": "cpu", "example": data(0)}
    needed = {
        ratio: sum(
            p.nbytes
            for p in peak_memory(zfunc.compile(segments, offload_ratio=ratio, **options).plan).values()
        )
        for ratio in (0.0, 1.0)
    }
    assert needed[0.0] < needed[1.0]
    program = zfunc.compile(segments, offload_ratio="auto", **options)
    assert share_on_host(program.spec) == 0
    state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
    assert state.step == 1
    monkeypatch.setattr(partial, "available_host_bytes", lambda: needed[0.0] // 2)
    with pytest.raises(OutOfMemory, match="offload_ratio 'auto'"):
        zfunc.compile(segments, offload_ratio="auto", **options)
    with pytest.raises(ValueError, match="got 'auto' without an example"):
        zfunc.compile(segments, offload_ratio="auto", device="cpu")


@pytest.mark.parametrize("least", [0.0, 0.3, 0.97, 1.0, None])
def test_the_smallest_ratio_that_fits_is_found(least: float | None) -> None:
    ratio = partial.smallest_ratio(lambda x: least is not None and x >= least)
    assert ratio == (None if least is None else -(-least * 32 // 1) / 32)


@pytest.mark.parametrize("moments", ["fp32", "16bit", "8bit"])
def test_any_ratio_loads_what_any_other_saved(moments: str, tmp_path: Path) -> None:
    program, data = compiled("fp32", 0.5, moments=moments)
    state = zfunc.init(program, seed=3)
    for i in range(2):
        state, _ = zfunc.train_step(program, state, data(i))
    zfunc.save(tmp_path / "half", program, state)
    again, _ = compiled("fp32", 0.5, moments=moments)
    assert all(map(torch.equal, bits(zfunc.load(tmp_path / "half", again)), bits(state)))
    state, expected = zfunc.train_step(program, state, data(2), save=tmp_path / "meanwhile")
    names = sorted(p.name for p in (tmp_path / "half" / "step-00000002").iterdir())
    assert all(
        (tmp_path / "half" / "step-00000002" / n).read_bytes()
        == (tmp_path / "meanwhile" / "step-00000002" / n).read_bytes()
        for n in names
    )
    for ratio in (0.0, 0.2, 1.0):
        other, _ = compiled("fp32", ratio, moments=moments)
        loaded, got = zfunc.train_step(other, zfunc.load(tmp_path / "half", other), data(2))
        assert got.loss == expected.loss
        values = zfunc.params(other, loaded)
        assert all(torch.equal(values[name], x) for name, x in zfunc.params(program, state).items())


def test_unknown_resident_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"resident: got buckets \[7\]"):
        evolve(spec(chain((8, 8))), resident={7})
