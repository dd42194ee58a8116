"""`zfunc.plan(...)`: it answers of the very plan that `zfunc.compile` makes, allocates nothing and needs no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from small_models import Loss, tied_gpt
from torch import nn
from trained import adam_of

import zfunc
from zfunc.core.critical_path import bound_by, bounds_in_words, critical_path_of
from zfunc.core.hardware import ROUND
from zfunc.core.memory_model import initial_memory
from zfunc.engine.program.program import Program
from zfunc.errors import OutOfMemory
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.planner import traced_costs as room
from zfunc.planner.plan_step import plan
from zfunc.planner.planned import Planned
from zfunc.planner.profile import load_profile, profile_text
from zfunc.planner.traced_costs import check_fits

CPU = evolve(ROUND, name="a CPU", memory={"host": 1 << 40}, unified=True)
SMALL = {"bucket_size": 1 << 12, "precision": "fp32"}


def planned(segments: Any = None, example: Any = None, **given: Any) -> Planned:
    of_gpt, batch = tied_gpt()
    segments = of_gpt if segments is None else segments
    return plan(
        segments, example or batch(0), **{"hardware": CPU, "advice": False, **SMALL, **adam_of(**given)}
    )


# --- the plan is compile's ---------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clipped": {"clip_norm": 1.0},
    "fp16": {"precision": "fp16"},
    "micro-batches": {"micro_batches": 3, "clip_norm": 1.0},
    "serial, min-cut": {"schedule": "Serial", "recompute": "min-cut"},
    "slots": {"slots": 4},
    "half on the device": {"state_on": "device:0.5,host"},
    "deferred": {"defer": True, "clip_norm": 0.5},
    "8 bits": {"moments": "8bit", "precision": "bf16"},
    "stage 1": {"stage": 1},
    "streamed": {"params_on": "host", "activations_on": "host", "micro_batches": 2, "recompute": "min-cut"},
    "streamed, bf16": {"params_on": "host", "precision": "bf16", "clip_norm": 1.0, "defer": True},
    "for this hardware": {"schedule": "CriticalPath", "micro_batches": 2},
    "searched": {"schedule": "auto", "clip_norm": 1.0},
    "ratio alone": {"state_on": "device:auto,host", "clip_norm": 1.0},
    "recomputation alone": {"recompute": "auto"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_plan_is_the_one_compile_makes(name: str) -> None:
    segments, batch = tied_gpt()
    p = planned(**SETTINGS[name])
    program = zfunc.compile(
        segments,
        optimizer=zfunc.AdamW(moments=p.step.settings.moments),
        device="cpu",
        example=batch(0),
        **p.settings,
    )
    assert program.plan.text() == p.plan.text()


def test_a_schedule_of_ones_own_is_taken_as_it_is() -> None:
    own = zfunc.schedules.CriticalPath(CPU)
    assert planned(schedule=own).settings["schedule"] is own
    named = planned(schedule="CriticalPath")
    assert named.plan == own(named.plan.graph), "one by name is made for the hardware that is planned for"


# --- what is said -------------------------------------------------------------------------------------------


def test_what_is_said_is_of_the_simulated_step() -> None:
    p = planned(micro_batches=2, clip_norm=1.0)
    assert p.step_seconds == p.timeline.seconds > 0
    assert p.tokens == 12 * 16
    assert p.tokens_per_second == pytest.approx(12 * 16 / p.step_seconds)
    assert set(p.memory) == {"device", "pinned", "host", "disk"}
    assert p.lanes == {lane: p.timeline.busy(lane) for lane in p.timeline.lanes}
    assert all(0 < share <= 1 for share in p.lanes.values())
    assert p.bound == bounds_in_words(bound_by(critical_path_of(p.plan, p.timeline)))
    for tier, parts in p.held.items():
        assert sum(parts.values()) == p.memory[tier]
    assert p.fits
    assert p.advice == ()


def test_tflops_count_forward_and_twice_as_much_for_backward() -> None:
    """Of the model alone: recomputing does not make it larger."""
    again, once = planned(recompute="all"), planned(recompute="none")
    forward = sum(cost.forward.flops for cost in again.step.spec.costs)
    assert again.tflops == pytest.approx(3 * forward / again.step_seconds / 1e12)
    assert again.tflops * again.step_seconds == pytest.approx(once.tflops * once.step_seconds)
    parts = planned(recompute="all", micro_batches=2)
    assert parts.tflops * parts.step_seconds == pytest.approx(again.tflops * again.step_seconds)


def test_what_leaves_the_device_between_steps_and_comes_back_is_told() -> None:
    """Of the resident half masters and moments, not the parameters, which are made again; and those of the rest."""
    assert planned().release is None
    assert "released" not in str(planned())
    p = planned(hardware=ROUND, precision="bf16", state_on="device:0.5,host")
    resident, rest = (
        sum(x.numel for x in p.step.spec.layout.buckets if (x.index in p.step.spec.resident) == there)
        for there in (True, False)
    )
    assert p.release is not None
    assert (p.release.bytes_out, p.release.bytes_back) == (12 * resident, 12 * resident + 2 * rest)
    assert p.release.seconds_back == p.release.bytes_back / 20e9
    assert "\n  released between steps: " in str(p)
    disk = planned(hardware=ROUND, precision="bf16", state_on="disk").release
    assert disk is not None
    assert disk.seconds_back > disk.bytes_back / 20e9 + 12 / 2 * disk.bytes_back / 8e9
    of_three = planned(
        hardware=ROUND, precision="bf16", world=3
    ).release  # which no rank can make again alone
    assert of_three is not None
    assert of_three.bytes_out == of_three.bytes_back


def test_many_ranks_need_no_process_group() -> None:
    one, many = (planned(world=n, hardware="h100", precision="auto") for n in (1, 64))
    assert many.step.spec.world == 64
    assert "reduce_scatter" in {op.verb for op in many.plan.graph}
    assert many.tokens_per_second == pytest.approx(64 * 12 * 16 / many.step_seconds)
    assert one.tokens_per_second == pytest.approx(12 * 16 / one.step_seconds)
    assert "network" in many.lanes
    assert many.memory["host"] < one.memory["host"]


@pytest.mark.parametrize(
    ("hardware", "precision"), [("v100-32gb", "fp16"), ("h100", "bf16"), (ROUND, "bf16")]
)
def test_precision_is_chosen_by_the_hardware(hardware: Any, precision: str) -> None:
    assert planned(hardware=hardware, precision="auto").settings["precision"] == precision


def test_what_fits_is_told_by_the_hardwares_memory() -> None:
    needed = planned(hardware=ROUND).memory
    for tier, nbytes in (("device", needed["device"]), ("host", needed["host"] + needed["pinned"])):
        for memory, fits in (({tier: nbytes}, True), ({tier: nbytes - 1}, False)):
            p = planned(hardware=evolve(ROUND, memory=memory))
            assert (p.fits, set(p.step.lacking)) == (fits, set() if fits else {tier})


def test_what_fits_has_room_for_the_initial_values_of_a_segment_beside_the_state() -> None:
    """Those of a model in one segment take more than a step stages of its small buckets."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    model = [zfunc.segment("all", layers), zfunc.segment("loss", Loss(64))]
    step = planned(model, (torch.ones(2, 64), torch.ones(2)), hardware=ROUND)
    first = initial_memory(step.step.spec)
    room = first["host"].nbytes + first["pinned"].nbytes
    assert room > step.memory["host"] + step.memory["pinned"]
    for nbytes, lacking in ((room, {}), (room - 1, {"host": 1})):
        p = evolve(step, step=evolve(step.step, hardware=evolve(ROUND, memory={"host": nbytes})))
        p = evolve(p, hardware=p.step.hardware)
        assert (p.step.fits, p.fits, p.lacking) == (not lacking, not lacking, lacking)
        assert ("it fits" in str(p), "init does not" in str(p)) == (not lacking, bool(lacking))


def test_what_is_advised_does_what_it_says() -> None:
    needed = planned(hardware=ROUND, clip_norm=1.0).memory
    tight = evolve(ROUND, memory={"device": needed["device"] - 2000})
    p = planned(hardware=tight, clip_norm=1.0, advice=True)
    assert not p.fits
    assert p.advice == tuple(map(str, p.suggestions))
    assert p.suggestions
    for advice in p.suggestions[:2]:
        again = planned(hardware=tight, clip_norm=1.0, **advice.changes)
        assert again.fits
        assert again.memory == advice.step.memory
    faster = planned(hardware=ROUND, clip_norm=1.0, advice=True)
    assert faster.suggestions[0].changes == {"defer": True}
    assert faster.suggestions[0].step.memory == faster.memory
    for advice in faster.suggestions[:2]:
        assert planned(hardware=ROUND, clip_norm=1.0, **advice.changes).step_seconds < faster.step_seconds


def test_a_search_says_why_and_what_it_tried() -> None:
    p = planned(schedule="auto", clip_norm=1.0)
    assert p.reasons
    assert p.step in p.tried or p.step_seconds in [x.seconds for x in p.tried]
    assert p.step_seconds < planned(clip_norm=1.0).step_seconds


# --- nothing is allocated -----------------------------------------------------------------------------------


def test_a_model_of_a_trillion_parameters_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.engine.trace.segment._real_module", lambda *_: pytest.fail("made real"))
    segments = gpt_segments(
        GPTConfig(50_000, 2048, num_layers=4, hidden_size=144_000, num_attention_heads=144)
    )
    tokens = torch.empty(8, 2048, dtype=torch.int64, device="meta")
    p = zfunc.plan(segments, (tokens, tokens), hardware="gh200", world=64, advice=False)
    assert p.step.spec.layout.num_trainable > 1e12
    assert not p.fits


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"hardware": "v100"}, "did you mean 'v100-32gb'?"),
        ({"schedule": "Overlaped"}, "did you mean 'Overlapped'?"),
        (
            {"precision": "bf16", "hardware": "v100-32gb"},
            "v100-32gb: got precision 'bf16', expected one it has",
        ),
        ({"precision": "fp17"}, "did you mean 'fp1"),
        ({"micro_batches": 5}, "12 rows for 5 micro-batches"),
        ({"world": 0, "hardware": "h100", "precision": "bf16"}, "a world of 0"),
        ({"segments": ()}, "segments: got none"),
        ({"hardware": 3}, "hardware: got a int, expected a name, a path"),
        ({"example": (torch.zeros(3, 4), torch.zeros(2))}, "tensors of [2, 3] rows"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(given: dict[str, Any], reason: str) -> None:
    """What settings refuse by themselves is in tests/core/test_settings.py."""
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as error:
        planned(**given)
    assert reason in str(error.value)


def test_a_profile_may_be_a_file_a_path_or_a_value(tmp_path: Path) -> None:
    profile = load_profile("h100")
    path = tmp_path / "mine.toml"
    path.write_text(profile_text(profile))
    seconds = {planned(hardware=x, precision="bf16").step_seconds for x in ("h100", profile, str(path), path)}
    assert len(seconds) == 1


# --- is there room on this machine --------------------------------------------------------------------------


def fitted(**given: Any) -> tuple[Program, Any]:
    segments, batch = tied_gpt()
    return zfunc.compile(segments, device="cpu", example=batch(0), **given), batch(0)


def test_room_is_asked_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    program, batch = fitted(**SMALL)
    check_fits(program, batch, settable=())
    total = sum(planned(hardware=CPU).memory.values())
    monkeypatch.setattr(room, "available_host_bytes", lambda: total)
    check_fits(program, batch, settable=())
    monkeypatch.setattr(room, "available_host_bytes", lambda: total - 1)
    with pytest.raises(OutOfMemory) as error:
        check_fits(program, batch, settable=("micro_batches", "moments"))
    for words in ("1 B of host memory short", "nothing was allocated", "micro_batches=2 would fit"):
        assert words in str(error.value)
    monkeypatch.setattr(room, "available_host_bytes", lambda: 1000)
    with pytest.raises(OutOfMemory, match="nothing was allocated; params_on='host' keeps"):
        check_fits(*fitted(**SMALL, params_on="host"), settable=())
    assert "--precision" not in str(error.value), "what cannot be set is not advised"


def test_what_a_machine_has_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has memory of its own; ranks of one machine share its host."""
    program, _ = fitted()
    monkeypatch.setattr(room, "available_host_bytes", lambda: 1000)
    monkeypatch.setattr(room, "available_bytes", lambda device: 500)
    on = room.local_hardware(evolve(program, devices=(torch.device("cuda", 0),)))
    assert (on.memory, on.unified) == ({"host": 1000, "device": 500}, False)
    assert room.local_hardware(program).memory == {"host": 1000}
    monkeypatch.setattr(room, "local_ranks", lambda: 4)
    for world, nbytes in ((8, 250), (2, 500)):
        ranks = type(program.ranks)(world=world)
        assert room.local_hardware(evolve(program, ranks=ranks)).memory == {"host": nbytes}


def test_larger_buckets_are_advised_where_hand_overs_take_long() -> None:
    """Of a step that has little else to do; not where a hand-over takes no time, nor an operation any to start."""
    for seconds in (0.0, 1e-3):
        fast = dict.fromkeys(ROUND.rates, 1000000000000.0)
        on = evolve(ROUND, flops=1e15, rates=fast, latency=0.0, latencies={}, handoff=seconds)
        advised = {name for x in planned(hardware=on, advice=True).suggestions for name in x.changes}
        assert ("bucket_size" in advised) == (seconds > 0)
