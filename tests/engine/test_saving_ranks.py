"""Checkpoints of several ranks: resumed to the bit, read by any other world, and refused by all or by none.

Four processes run tests/save_worker.py once; the tests read what they left.
"""

import json
from pathlib import Path

import pytest
import torch
from forked import played
from rank_worker import WORLDS
from save_worker import BY_NIGHT, SAVED_AT, SETTINGS

from zfunc.checkpoint import directory as checkpoints

HERE = Path(__file__).parents[1]
every_setting = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x == BY_NIGHT else ()) for x in SETTINGS]
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, night: list[str]) -> Path:
    """The folder that four ranks wrote to."""
    return played(HERE / "save_worker.py", tmp_path_factory.mktemp("saving"), *night)


@pytest.mark.parametrize("world", WORLDS)
@every_setting
def test_a_resume_on_as_many_ranks_is_exact(results: Path, name: str, world: int) -> None:
    assert all(json.loads((results / f"resumed-{name}-{world}-{r}.json").read_text()) for r in range(world))


@pytest.mark.parametrize("reader", WORLDS)
@pytest.mark.parametrize("writer", WORLDS)
@every_setting
def test_any_world_reads_what_any_other_wrote(results: Path, name: str, writer: int, reader: int) -> None:
    """The weights to the bit; the next step to the rounding of sums in another order."""
    weights = torch.load(results / f"weights-{name}-{writer}.pt", weights_only=True)
    read = torch.load(results / f"{name}-{writer}-read-by-{reader}.pt", weights_only=True)
    assert read["weights"].keys() == weights.keys()
    assert all(torch.equal(read["weights"][k], v) for k, v in weights.items())
    alone = torch.load(results / f"{name}-{writer}-read-by-1.pt", weights_only=True)
    within = 2e-5 if "8 bits" not in name else 2e-3
    assert read["seen"][0][0] == pytest.approx(alone["seen"][0][0], rel=within)


@every_setting
def test_no_padding_reaches_a_checkpoint(results: Path, name: str) -> None:
    """Whatever the world, the same parameters with the same number of elements, in as many files as ranks."""
    checkpoint_of = {world: checkpoints.find_checkpoint(results / f"{name}-{world}") for world in WORLDS}
    sizes = {}
    for world, checkpoint in checkpoint_of.items():
        assert checkpoint is not None
        assert checkpoint.path.name == f"step-{SAVED_AT:08d}"
        assert len(list(checkpoint.path.glob("*.safetensors"))) == world
        stored = [t for shard in checkpoint.manifest.shards for t in shard.tensors]
        sizes[world] = sum(t.nbytes for t in stored)
    assert len(set(sizes.values())) == 1


def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(results: Path) -> None:
    messages = [json.loads((results / f"failing-{rank}.json").read_text()) for rank in range(4)]
    assert all(x == messages[0] for x in messages)
    before, within, after, left = messages[0]
    for text in (before, within):
        assert text.startswith("rank 1: ")
        assert "rank-00001-of-00004.safetensors: got 'No space left on device'" in text
    assert after == ""
    assert left == ["latest", "step-00000001"]
