"""Two ranks with pretend devices: collectives that are queued, not done, when they return, as NCCL's."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pretend
import pytest

WORKER = Path(__file__).with_name("device_rank_worker.py")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank of each scenario left, by SCENARIO-RANK."""
    if request.config.getoption("--device") != "pretend" or pretend.missing_tools():
        pytest.skip("runs in a process of its own: pytest --device pretend tests/device")
    folder = tmp_path_factory.mktemp("ranks")
    ended = subprocess.run(
        [sys.executable, WORKER, folder], capture_output=True, text=True, timeout=300, check=False
    )
    seen = {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json")}
    assert "bits-0" in seen, ended.stderr[-3000:]
    return seen


def test_every_schedule_has_the_serial_bits_on_all_ranks(outcomes: dict[str, Any]) -> None:
    first, second = outcomes["bits-0"], outcomes["bits-1"]
    assert [name for name, seen in first.items() if seen is False] == []
    assert first == second  # losses, norms and parameters, too
    assert first["stage 3"] == first["stage 3 on the host"]
    assert first["stage 3"]["bits"] == first["plain"]["bits"]


@pytest.mark.parametrize(
    ("scenario", "why", "within"),
    [
        ("dies", "(reduce_scatter|all_gather) on rank 0.*rank 1 did not come", 60.0),
        ("gathers", "(all_gather|all_reduce|reduce_scatter) on rank 0.*rank 1 did not come", 60.0),
        ("fails", "rank 1 has left: step 3 failed with ExecutionError: backward.*of rank 1", 30.0),
        ("late", "(reduce_scatter|all_gather) on rank 0.*rank 1 did not come", 60.0),
    ],
)
def test_a_collective_in_vain_is_given_up_and_the_rank_is_named(
    outcomes: dict[str, Any], scenario: str, why: str, within: float
) -> None:
    seen = outcomes[f"{scenario}-0"]
    assert re.search(why, seen["error"]), seen
    assert seen["seconds"] < within
    assert seen["free"]
