"""Ranks in processes of their own with everything on the disk: if one fails all stop, and all resume together."""

import json
from pathlib import Path

import pytest
from disk_worker import AT, DISTURBED, STEPS, WORLDS
from forked import played

pytestmark = pytest.mark.slow  # with threads for ranks: test_disk_faults


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played(Path(__file__).parents[1] / "disk_worker.py", tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", DISTURBED[1:])
def test_a_rank_that_fails_is_named_and_all_go_on_from_one_step(results: Path, how: str, world: int) -> None:
    whole = json.loads((results / f"never-{world}" / "0-0.json").read_text())
    assert len(whole) == STEPS
    for rank in range(world):
        first, second = (results / f"{how}-{world}" / f"{life}-{rank}.json" for life in (0, 1))
        assert json.loads(second.read_text()) == whole[AT:]
        if (how, rank) == ("kill", 1):
            assert not first.exists()
            continue
        *seen, said = json.loads(first.read_text())
        assert seen == whole[:AT]
        if rank == 1:
            assert said.startswith("DiskError: ")
        else:
            assert "rank 1 is gone" in said if how == "kill" else "rank 1 has left" in said
        assert how == "kill" or "the drive is gone" in said
