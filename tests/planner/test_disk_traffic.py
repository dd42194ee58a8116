"""What a plan says of the drives: the formulae of the tiers, and no less than what is allocated."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from small_models import tied_gpt
from trained import adam_of

import zfunc
from zfunc.core.extents import BLOCK
from zfunc.core.hardware import ROUND
from zfunc.core.setting_values import TIERS_OF
from zfunc.engine.program.program import staging_buffers
from zfunc.planner.candidate import DRIVES
from zfunc.planner.plan_step import plan
from zfunc.planner.planned import Planned
from zfunc.planner.search import WORTH

SETTINGS: dict[str, Any] = {"precision": "bf16", "state_on": "disk", "bucket_size": 1 << 12, "clip_norm": 1.0}
EVERYTHING = {"params_on": "disk", "grads_on": "disk", "defer": True}
# Bytes a parameter that a step reads, writes, and writes if it commits. A tied gradient of two deliveries waits in
# memory; parameters on the disk are read for forward and for backward, those that are left in a slot once.
PLACES: dict[str, tuple[dict[str, Any], float, float, float]] = {
    "16 bits": ({"moments": "16bit", "params_on": "host"}, 6, 6, 8),
    "8 bits": ({"moments": "8bit", "params_on": "host"}, 4, 4, 6),
    "fp32": ({"precision": "fp32", "params_on": "host"}, 12, 12, 12),
    "parameters on the device": ({"moments": "16bit"}, 8, 8, 8),
    "everything": ({"moments": "16bit", **EVERYTHING}, 8 + 2 + 4, 8 + 2, 8 + 2),
    "half of it": ({"moments": "16bit", "params_on": "host", "state_on": "host:0.5,disk"}, 3, 3, 8),
}


def planned(**settings: Any) -> Planned:
    segments, batch = tied_gpt()
    hardware = evolve(ROUND, memory={"disk": 1 << 30})
    return plan(segments, batch(0), hardware=hardware, advice=False, **adam_of(**{**SETTINGS, **settings}))


@pytest.mark.parametrize("name", PLACES)
def test_bytes_a_step_are_those_of_the_formulae(name: str) -> None:
    settings, *expected = PLACES[name]
    p, q = planned(**settings), planned(**settings, commit_every=2)
    assert p.disk is not None
    assert q.disk is not None
    assert (p.disk.step_bytes, p.disk.commit_bytes) == (q.disk.commit_bytes, q.disk.commit_bytes)
    layout = p.step.spec.layout
    got = q.disk.step_bytes["read"], q.disk.step_bytes["write"], q.disk.commit_bytes["write"]
    padding = len(layout.buckets) * 8 * BLOCK
    tied = 4 * max(b.numel for b in layout.buckets)
    for nbytes, each in zip(got, expected, strict=True):
        assert each * layout.numel - tied * (name in ("everything", "half of it")) <= nbytes + 64
        assert nbytes <= each * layout.numel * (1.05 if name == "8 bits" else 1) + padding + tied
    assert p.bus_bytes["write"] == p.disk.commit_bytes["write"]
    assert p.disk.written == p.disk.commit_bytes["write"]


@pytest.mark.parametrize("every", [1, 4])
def test_the_report_says_what_the_planned_step_moves_and_what_a_commit_adds_where_not_all_commit(
    every: int,
) -> None:
    p = planned(moments="16bit", params_on="host", commit_every=every)
    assert p.disk is not None
    lines = str(p).splitlines()
    said = next(x for x in lines if x.startswith("the disk: "))
    moved = (f"{kind}s {p.bus_bytes[kind] / 1e9:,.4g} GB" for kind in DRIVES)
    assert said == f"the disk: a step {' and '.join(moved)}"
    commits = f"{p.disk.commit_bytes['write'] / 1e9:,.4g} GB"
    assert [x for x in lines if x.startswith("  commits ")] == [
        "  commits  every step" if every == 1 else f"  commits  every 4 steps; such a step writes {commits}"
    ]


@pytest.mark.parametrize("name", ["16 bits", "everything", "half of it"])
def test_what_is_allocated_is_no_more_than_planned(name: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, **PLACES[name][0]}
    p = planned(**settings)
    program = zfunc.compile(tied_gpt()[0], device="cpu", swap=[tmp_path], **adam_of(**settings))
    state = zfunc.init(program)
    held = dict.fromkeys(("pinned", "host"), 0)
    for region in {*state.buffers.memory, *(r for r in staging_buffers(program) if r.tier != "disk")}:
        if region.tier in held:
            held[region.tier] += region.nbytes
    assert all(nbytes <= p.memory[tier] for tier, nbytes in held.items())
    swap: Any = program.cache.swap
    files = sum(x.stat().st_size for x in tmp_path.iterdir() if x.is_file())
    files += sum(
        r.nbytes for r in {*state.buffers.memory, *staging_buffers(program)} if r.buffer == "spilled"
    )
    assert p.memory["disk"] - 2 * BLOCK - p.memory["disk"] // 100 <= files <= p.memory["disk"] == p.disk.space
    swap.close()


def test_wear_and_rates_follow_from_the_bytes() -> None:
    disk = planned(moments="16bit", commit_every=4).disk
    assert disk is not None
    assert disk.written == (3 * disk.step_bytes["write"] + disk.commit_bytes["write"]) / 4
    assert disk.busy == pytest.approx(sum(disk.needed[x] / disk.available[x] for x in DRIVES))
    assert planned(state_on="host").disk is None
    spilled = planned(state_on="host", activations_on="disk", micro_batches=2, order="vertical")
    assert spilled.disk is not None
    assert {*spilled.disk.step_bytes.values(), *spilled.disk.commit_bytes.values()} == {
        spilled.memory["disk"]
    }


def test_automatic_places_are_as_fast_as_any_that_fit() -> None:
    """Those of a search, at every size of the host that one of the fixed places needs."""

    def with_host(nbytes: int, **places: str) -> Planned:
        hardware = evolve(ROUND, memory={"device": 1 << 40, "disk": 1 << 40, "host": nbytes})
        segments, batch = tied_gpt()
        return plan(segments, batch(0), hardware=hardware, advice=False, **{**SETTINGS, **places})

    fixed = [
        {"state_on": "host"},
        {"state_on": "disk"},
        {"state_on": "disk", "grads_on": "disk"},
        {"state_on": "disk", "params_on": "host"},
        {"state_on": "disk", "params_on": "disk", "grads_on": "disk"},
    ]
    steps = [with_host(1 << 40, **places) for places in fixed]
    needed = [p.memory["host"] + p.memory["pinned"] for p in steps]
    for nbytes in sorted(needed)[::2]:
        found = with_host(nbytes, **dict.fromkeys(TIERS_OF, "auto"))
        assert found.fits
        fitting = (p.step_seconds for p, n in zip(steps, needed, strict=True) if n <= nbytes)
        assert found.step_seconds <= min(fitting) * (1 + WORTH)
