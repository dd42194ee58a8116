"""The one-step delayed update: what it computes, where the last gradient waits, and that a resume is exact."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
import trained
from attrs import evolve
from small_models import bits, flats
from table import chain, in_pairs, spec
from torch import Tensor
from trained import injecting, steps
from zfunc.schedules import Overlapped

import zfunc
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.manifest import PENDING
from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND
from zfunc.core.memory_model import peak_memory
from zfunc.core.recipes import delayed, steadily_delayed, zero_offload
from zfunc.core.simulator import simulate
from zfunc.engine.program import Program
from zfunc.errors import CheckpointError, DonatedStateError, NonFiniteError

NAN = float("nan")
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16, clipped": {"precision": "bf16", "clip_norm": 0.55},
    "fp16 in 2": {"precision": "fp16", "micro_batches": 2},
    "16 bits": {"precision": "bf16", "moments": "16bit"},
    "8 bits in 3, clipped": {"precision": "bf16", "moments": "8bit", "micro_batches": 3, "clip_norm": 0.55},
    "half on the device": {"precision": "fp32", "offload_ratio": 0.5, "clip_norm": 0.55},
}


def compiled(settings: str, delay_from: int | None = 1, **more: Any) -> tuple[Program, Callable[[int], Any]]:
    options = {**SETTINGS[settings], **more}
    return trained.compiled(lr=zfunc.lr.linear_warmup(1e-2, 4), delay_from=delay_from, **options)


# --- what it computes ----------------------------------------------------------------------------------------


def in_plain_pytorch(
    program: Program, batch: Any, delay_from: int, num_steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """From a step on, the gradient goes into the optimizer one step later."""
    parts = [plain.Part.of(segment) for segment in program.segments]
    values = zfunc.params(program, zfunc.init(program, seed=1))
    names = {span.name for span in program.layout.spans}
    groups = [
        {
            "params": [
                values[name] for name in names if zfunc.matrices_only(name, values[name].shape) == decayed
            ]
        }
        | {"weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses: list[float] = []
    waiting: list[dict[str, Tensor]] = []
    for i in range(num_steps):
        loss, _, grads = plain.gradient(parts, values, names, [batch(i)])
        losses.append(loss)
        waiting.append(plain.clipped(grads, program.settings.clip_norm)[1])
        last = i + 1 == num_steps
        while len(waiting) > (0 if last or i + 1 < delay_from else 1):
            for name, grad in waiting.pop(0).items():
                values[name].grad = grad
            optimizer.step()
    return losses, values


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("delay_from", [1, 2, 10, 31])
def test_it_is_the_delayed_update_of_plain_pytorch(delay_from: int, clip: float | None) -> None:
    program, batch = trained.compiled(
        "odd sizes", precision="fp32", clip_norm=clip, delay_from=delay_from, bucket_size=100
    )
    state, seen = steps(program, zfunc.init(program, seed=1), batch, 0, 30)
    expected, weights = in_plain_pytorch(program, batch, delay_from, 30)
    losses = [loss for _, loss, *_ in seen]
    assert losses == pytest.approx(expected, abs=2e-4)
    assert losses[0] == pytest.approx(expected[0], abs=1e-6)
    for name, value in zfunc.params(program, zfunc.flush(program, state)).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=3e-4)


def test_before_the_first_delayed_step_every_bit_is_the_plain_recipes() -> None:
    """Before it every bit is that of the plain recipe; two steps after it no loss is any more."""
    (late, data), (plain, _) = compiled("bf16, clipped", 3), compiled("bf16, clipped", None)
    _, a = steps(late, zfunc.init(late, seed=1), data, 0, 6)
    _, b = steps(plain, zfunc.init(plain, seed=1), data, 0, 6)
    assert a[:3] == b[:3]
    assert [x[1] != y[1] for x, y in zip(a[3:], b[3:], strict=True)] == [True] * 3
    assert [x[0] for x in a] == [1, 2, 3, 4, 5, 6]
    assert [x[3] for x in a] == [x[3] for x in b]


# --- where the gradient waits --------------------------------------------------------------------------------


def test_two_states_of_one_program_do_not_mix() -> None:
    program, data = compiled("bf16, clipped")
    alone = [steps(program, zfunc.init(program, seed=s), data, 0, 4)[1] for s in (1, 2)]
    states, seen = [zfunc.init(program, seed=s) for s in (1, 2)], [list[Any](), list[Any]()]
    for i in range(4):
        for n in (0, 1):
            states[n], more = steps(program, states[n], data, i, i + 1)
            seen[n] += more
    assert seen == alone


@pytest.mark.parametrize("settings", SETTINGS)
def test_flush_applies_the_waiting_gradient_once(settings: str) -> None:
    program, data = compiled(settings)
    state, _ = steps(program, zfunc.init(program, seed=1), data, 0, 3)
    assert state.pending is not None
    before = zfunc.params(program, state)
    flushed = zfunc.flush(program, state)
    with pytest.raises(DonatedStateError):
        zfunc.flush(program, state)
    after = zfunc.params(program, flushed)
    assert flushed.pending is None
    assert flushed.step == state.step
    changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
    resident = {x.name for b in program.spec.resident for x in program.layout.buckets[b].spans}
    assert changed == after.keys() - resident
    assert zfunc.flush(program, flushed) is flushed
    state, seen = steps(program, flushed, data, 3, 5)
    assert [x[0] for x in seen] == [4, 5]


def test_a_program_that_does_not_delay_has_nothing_to_flush() -> None:
    program, data = compiled("fp32", None)
    state, _ = steps(program, zfunc.init(program), data, 0, 1)
    assert zfunc.flush(program, state) is state


def test_an_overflow_is_not_applied_a_step_later_either() -> None:
    program, data = compiled("fp16 in 2")
    state = zfunc.init(program, seed=1, loss_scale=zfunc.LossScale(scale=2.0**24, window=3, hysteresis=1))
    values = []
    skipped = []
    for i in range(12):
        state, m = zfunc.train_step(program, state, data(i))
        values.append(flats(state, "params")["params"])
        skipped.append(m.skipped)
        assert torch.isfinite(values[-1]).all()
    assert any(skipped)
    assert not all(skipped)
    for i in range(1, 12):  # a step applies the gradient of the one before it
        assert torch.equal(values[i], values[i - 1]) == skipped[i - 1]
    assert state.step == skipped.count(False)


def test_a_gradient_that_is_not_finite_is_never_applied() -> None:
    """In the first delayed step nothing was updated; in a later one the update before it was, and it says so."""
    program, data = compiled("fp32", 2, stages=injecting(NAN, {2}))
    state, _ = steps(program, zfunc.init(program), data, 0, 1)
    with pytest.raises(NonFiniteError, match="nothing was updated and the state is unharmed"):
        zfunc.train_step(program, state, data(1))
    assert zfunc.params(program, state)
    program, data = compiled("fp32", 1, stages=injecting(NAN, {3}))
    state, _ = steps(program, zfunc.init(program), data, 0, 2)
    with pytest.raises(
        NonFiniteError, match=r"the delayed update before it was made: go on from its \.state"
    ) as error:
        zfunc.train_step(program, state, data(2))
    with pytest.raises(DonatedStateError):
        zfunc.params(program, state)
    expected, _ = compiled("fp32", 1)
    flushed, _ = steps(expected, zfunc.init(expected), data, 0, 2)
    flushed = zfunc.flush(expected, flushed)
    assert error.value.state.pending is None
    assert all(map(torch.equal, bits(error.value.state), bits(flushed)))
    state, seen = steps(program, error.value.state, data, 4, 5)
    assert seen[0][0] == 3


def test_an_overflow_at_the_smallest_scale_is_dropped_too() -> None:
    program, data = compiled("fp16 in 2", stages=injecting(NAN, {3}))
    state = zfunc.init(program, seed=1, loss_scale=zfunc.LossScale(scale=1.0, minimum=1.0, hysteresis=1))
    state, _ = steps(program, state, data, 0, 2)
    with pytest.raises(NonFiniteError, match=r"at its minimum.*go on from its \.state") as error:
        zfunc.train_step(program, state, data(2))
    state, seen = steps(program, error.value.state, data, 3, 6)
    assert [x[0] for x in seen] == [3, 4, 5]
    assert torch.isfinite(flats(state, "params")["params"]).all()


def test_with_all_state_on_the_device_nothing_is_delayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="zfunc"):
        program, data = compiled("fp32", 1, offload_ratio=0.0)
    assert "nothing is on the host, so nothing is delayed" in caplog.text
    state, seen = steps(program, zfunc.init(program, seed=1), data, 0, 3)
    assert state.pending is None
    assert zfunc.flush(program, state) is state
    plain, _ = compiled("fp32", None)
    assert [x[1] for x in steps(plain, zfunc.init(plain, seed=1), data, 0, 3)[1]] == [x[1] for x in seen]
    zfunc.save(tmp_path, program, state)
    assert zfunc.load(tmp_path, plain).step == 3


def test_a_waiting_gradient_of_a_wider_type_is_refused(tmp_path: Path) -> None:
    """fp16 holds no more than 65504, and the sum of micro-batches is in fp32."""
    program, data = compiled("fp16 in 2")
    state, _ = steps(program, zfunc.init(program, seed=5), data, 0, 3)
    zfunc.save(tmp_path, program, state)
    other, _ = compiled("fp16 in 2", micro_batches=1)
    with pytest.raises(
        CheckpointError, match="pending gradient in F32, expected F16, whose range is smaller"
    ):
        zfunc.load(tmp_path, other)


# --- checkpoints ---------------------------------------------------------------------------------------------


@cache
def programs(settings: str) -> list[tuple[Program, Callable[[int], Any]]]:
    """One that saves and one that resumes, for all that is tried of them."""
    return [compiled(settings, 2) for _ in range(2)]


@pytest.mark.parametrize(("settings", "meanwhile"), in_pairs(SETTINGS, [False, True]))
def test_a_resume_is_the_training_that_was_not_interrupted(
    settings: str, meanwhile: bool, tmp_path: Path
) -> None:
    (program, data), (again, _) = programs(settings)
    for at in (1, 4) if meanwhile else (2,):  # before the first delayed step, later; after the first
        state, _ = steps(program, zfunc.init(program, seed=5), data, 0, at)
        folder = tmp_path / str(at)
        if meanwhile:
            state, first = steps(program, state, data, at, at + 1, save=folder)
        else:
            zfunc.save(folder, program, state)
            state, first = steps(program, state, data, at, at + 1)
        state, rest = steps(program, state, data, at + 1, at + 3)
        resumed, seen = steps(again, zfunc.load(folder, again), data, at, at + 3)
        assert repr(seen) == repr(first + rest)
        assert resumed.pending == state.pending
        assert all(map(torch.equal, bits(resumed), bits(state)))


def test_a_checkpoint_without_the_waiting_betas_is_refused(tmp_path: Path) -> None:
    program, data = compiled("fp32")
    state, _ = steps(program, zfunc.init(program, seed=5), data, 0, 3)
    path = zfunc.save(tmp_path, program, state) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["position"]["pending"]["betas"], manifest["checksum"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="the betas of the pending update: flush with the zfunc"):
        zfunc.load(path.parent, program)


def test_any_layout_precision_and_moments_reads_what_waits(tmp_path: Path) -> None:
    program, data = compiled("fp32")
    state, _ = steps(program, zfunc.init(program, seed=5), data, 0, 3)
    stored = open_checkpoint(zfunc.save(tmp_path, program, state)).manifest.shards[0].by_name
    assert all(stored[f"{x.name}/{PENDING}"].shape == x.shape for x in program.layout.spans)
    expected = zfunc.params(program, zfunc.flush(program, state))
    same, _ = compiled("fp32", bucket_size=400, schedule="Serial")
    got = zfunc.params(same, zfunc.flush(same, zfunc.load(tmp_path, same)))
    assert all(torch.equal(got[name], x) for name, x in expected.items())
    for settings in ("bf16, clipped", "16 bits", "8 bits in 3, clipped"):
        other, _ = compiled(settings)
        got = zfunc.params(other, zfunc.flush(other, zfunc.load(tmp_path, other)))
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=0, atol=5e-3)


@pytest.mark.parametrize(("settings", "delay_from"), [("fp32", None), ("half on the device", 1)])
def test_a_program_without_delay_refuses_a_waiting_gradient(
    settings: str, delay_from: int | None, tmp_path: Path
) -> None:
    program, data = compiled("fp32")
    state, _ = steps(program, zfunc.init(program, seed=5), data, 0, 3)
    zfunc.save(tmp_path / "waits", program, state)
    other, _ = compiled(settings, delay_from)
    with pytest.raises(
        CheckpointError,
        match=r"pending gradient of .* parameters, from delayed updates.*zfunc\.flush and save it again",
    ):
        zfunc.load(tmp_path / "waits", other)
    zfunc.save(tmp_path / "flushed", program, zfunc.flush(program, state))
    assert zfunc.load(tmp_path / "flushed", other).step == 3


# --- what it buys and needs ----------------------------------------------------------------------------------


def test_the_host_works_while_all_of_forward_and_backward_goes_on() -> None:
    step_spec = spec(chain(*[(256, 256)] * 8), bucket_size=256 * 256, barrier=True)
    slow = evolve(ROUND, rates={**ROUND.rates, "host": 1e9}, flops=1e7, latency=0.0)
    plain, late = (
        simulate(Overlapped()(Graph(tuple(r(step_spec)))), slow) for r in (zero_offload, steadily_delayed)
    )
    longest = max(late.seconds_of("compute"), late.seconds_of("host"))
    assert longest <= late.seconds < 1.1 * longest
    assert plain.seconds > 1.5 * late.seconds


def test_the_plan_counts_the_waiting_gradients() -> None:
    step_spec = spec(chain((64, 64), (64, 64), (64, 64)), bucket_size=4096, barrier=True)
    numel = step_spec.layout.numel
    graphs = [Graph(tuple(r(step_spec))) for r in (zero_offload, steadily_delayed, delayed)]
    plain, late, first = (peak_memory(Overlapped()(graph)) for graph in graphs)
    slots = sum(r.nbytes for r in graphs[0].regions if r.buffer == "param_slot")
    copies = 2 * numel - slots  # of new parameters, all of which wait for backward
    assert late["pinned"].nbytes - plain["pinned"].nbytes == copies
    assert late["device"] == plain["device"]
    assert first["pinned"].nbytes < late["pinned"].nbytes
