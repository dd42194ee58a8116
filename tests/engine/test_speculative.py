"""The speculative update: the plain recipe's bits, whatever is clipped, skipped, inf or NaN; and what it buys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from attrs import evolve
from small_models import bits
from table import chain, in_pairs, spec
from trained import injecting
from zfunc.schedules import Overlapped

import zfunc
from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND
from zfunc.core.memory_model import peak_memory
from zfunc.core.recipes import zero_offload
from zfunc.core.simulator import simulate
from zfunc.engine.program import Program
from zfunc.engine.state import State
from zfunc.errors import NonFiniteError

STEPS = 5
SETTINGS: dict[str, dict[str, Any]] = {  # the norms of the first steps are 0.85, 0.59, 0.54, 0.47, 0.52
    "some steps clipped": {"precision": "fp32", "clip_norm": 0.55},
    "bf16, 16 bits": {"precision": "bf16", "clip_norm": 0.55, "moments": "16bit"},
    "8 bits, in 3": {"precision": "bf16", "clip_norm": 0.5, "moments": "8bit", "micro_batches": 3},
    "never clipped": {"precision": "fp32", "clip_norm": 1e6},
    "stage 1": {"precision": "fp32", "clip_norm": 0.55, "stage": 1, "micro_batches": 2},
    "partial": {"precision": "bf16", "clip_norm": 0.55, "offload_ratio": 0.6},
    "fp16": {"precision": "fp16"},
    "fp16, clipped": {"precision": "fp16", "clip_norm": 0.55},
}


def compiled(settings: str, speculate: int, **more: Any) -> tuple[Program, Callable[[int], Any]]:
    return trained.compiled(speculate=speculate, **{**SETTINGS[settings], **more})


def start(program: Program) -> State:
    """With fp16 at a scale that overflows at first, and again when it has grown."""
    return zfunc.init(program, seed=1, loss_scale=zfunc.LossScale(scale=2.0**20, window=2, hysteresis=1))


def masters(state: State) -> set[tuple[int, int]]:
    """Where the master weights of every bucket are: a step that swaps a shadow in moves them."""
    memory = state.buffers.memory
    return {(r.index[0], x.data_ptr()) for r, x in memory.items() if r.buffer in ("master", "master_high")}


def run(
    settings: str, speculate: int, *, step: dict[str, Any] | None = None, **more: Any
) -> tuple[str, Any, Any]:
    program, data = compiled(settings, speculate, **more)
    state, seen = start(program), []
    swaps: list[int] = []
    for i in range(STEPS):
        before = masters(state)
        state, m = zfunc.train_step(program, state, data(i), **(step or {}))
        seen.append((m.loss, m.grad_norm, m.skipped, m.loss_scale))
        swaps.append(len(before - masters(state)))
        shadowed = len(program.spec.shadowed)
        assert m.redone == (0 if m.skipped or swaps[-1] else shadowed)
    return repr(seen), bits(state), swaps


@pytest.mark.parametrize(("settings", "speculate"), in_pairs(SETTINGS, [1, 3, 1000]))
def test_the_bits_are_those_of_the_plain_recipe(settings: str, speculate: int) -> None:
    plain, speculative = run(settings, 0), run(settings, speculate)
    assert speculative[0] == plain[0]
    assert all(map(torch.equal, speculative[1], plain[1]))


@pytest.mark.parametrize("schedule", ["Serial", "Interleaved"])
def test_the_bits_hold_under_any_schedule_with_delays_and_debug(schedule: str) -> None:
    plain = run("some steps clipped", 0)
    jitter = zfunc.Jitter(seed=2, seconds=1e-3)
    for step in ({"jitter": jitter}, {"debug": True}):
        result = run("some steps clipped", 4, schedule=schedule, step=step)
        assert result[0] == plain[0]
        assert all(map(torch.equal, result[1], plain[1]))


def test_a_shadow_is_swapped_in_where_nothing_was_clipped_and_left_where_something_was() -> None:
    assert run("some steps clipped", 3)[2] == [0, 0, 3, 3, 3]
    assert run("never clipped", 3)[2] == [3] * STEPS
    assert run("never clipped", 0)[2] == [0] * STEPS
    _, _, swaps = run("fp16", 3)
    assert {0, 3} == set(swaps)  # an overflow, and none


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_no_trace(value: float) -> None:
    result = [run("fp16", speculate, stages=injecting(value, {2, 4}, bucket=2)) for speculate in (0, 1000)]
    assert result[0][0] == result[1][0]
    assert all(map(torch.equal, result[0][1], result[1][1]))
    assert "True" in result[1][0]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_without_loss_scaling_it_raises_and_the_state_is_unharmed(value: float) -> None:
    program, data = compiled("some steps clipped", 1000, stages=injecting(value, {2}, bucket=2))
    state, _ = zfunc.train_step(program, start(program), data(0))
    before = bits(state)
    with pytest.raises(NonFiniteError, match="the state is unharmed"):
        zfunc.train_step(program, state, data(1))
    assert all(map(torch.equal, before, bits(state)))
    state, m = zfunc.train_step(program, state, data(1))
    assert m.step == 2


def test_a_swapped_shadow_is_saved_and_loaded(tmp_path: Path) -> None:
    program, data = compiled("never clipped", 3)
    state = start(program)
    before = masters(state)
    for i in range(3):
        state, _ = zfunc.train_step(program, state, data(i), save=tmp_path / "meanwhile" if i == 2 else None)
    assert masters(state) != before
    zfunc.save(tmp_path / "after", program, state)
    plain, _ = compiled("never clipped", 0)
    loaded = zfunc.load(tmp_path / "after", plain)
    assert all(map(torch.equal, bits(loaded), bits(state)))
    earlier = zfunc.load(tmp_path / "meanwhile", program)
    earlier, _ = zfunc.train_step(program, earlier, data(2))
    assert all(map(torch.equal, bits(earlier), bits(state)))
    assert all(
        torch.equal(x, zfunc.params(plain, loaded)[n]) for n, x in zfunc.params(program, state).items()
    )


def test_the_plan_counts_the_shadows() -> None:
    """Of fp32 moments 12 bytes a parameter, and a copy of the new parameters that waits."""
    step_spec = spec(chain((64, 64), (64, 64), (64, 64)), bucket_size=4096, barrier=True)
    plain, two = (
        peak_memory(Overlapped()(Graph(tuple(zero_offload(evolve(step_spec, shadows=n)))))) for n in (0, 2)
    )
    numel = sum(step_spec.layout.buckets[b].numel for b in evolve(step_spec, shadows=2).shadowed)
    assert two["host"].nbytes - plain["host"].nbytes == 12 * numel
    assert two["pinned"].nbytes - plain["pinned"].nbytes == 2 * numel
    assert two["device"] == plain["device"]


def test_it_is_faster_than_waiting_and_slower_than_no_clipping() -> None:
    """In simulation, on a host whose Adam takes about as long as backward."""
    step_spec = spec(chain(*[(256, 256)] * 8), bucket_size=256 * 256)
    slow = evolve(ROUND, rates={**ROUND.rates, "host": 1e9}, flops=1e7, latency=0.0)

    def seconds(**settings: Any) -> float:
        return simulate(Overlapped()(Graph(tuple(zero_offload(evolve(step_spec, **settings))))), slow).seconds

    waiting, all_of_them = seconds(barrier=True), seconds(barrier=True, shadows=100)
    assert seconds(barrier=False) <= all_of_them < 0.8 * waiting
    assert all_of_them <= seconds(barrier=True, shadows=3) <= waiting


def test_bad_settings_are_refused_and_idle_ones_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="delay_from=3, expected one of the two"):
        compiled("never clipped", 2, delay_from=3)
    with caplog.at_level("INFO", logger="zfunc"):
        compiled("never clipped", 2, clip_norm=None)
    assert "nothing to speculate on" in caplog.text
