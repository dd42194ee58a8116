"""Several ranks on gloo: the results of one, the same bits on every run, and the bytes that theory says.

Four processes run tests/rank_worker.py once; the tests read what they left.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from forked import played
from rank_worker import BY_DAY, DISAGREE, FEWER, GRADIENTS, RECIPES, SCHEDULES, SETTINGS, STEPS, WORLDS
from small_models import MODELS
from table import SPECS, Scattered

import zfunc
from zfunc.core.plan import PlanError
from zfunc.core.recipes import zero_offload
from zfunc.engine.compile.program import make_plan
from zfunc.runtime.collectives import RankGroup

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, night: list[str]) -> Path:
    """The folder that four ranks wrote to."""
    return played(HERE / "rank_worker.py", tmp_path_factory.mktemp("ranks"), *night)


def of_recipes(names: Iterable[str]) -> list[Any]:
    """Rows of (recipe, world): on four ranks, all but two of the recipes are `slow`."""
    return [
        pytest.param(x, n, marks=pytest.mark.slow if n == max(WORLDS) and x not in BY_DAY else ())
        for x, n in product(names, WORLDS[1:])
    ]


def read(out: Path, name: str) -> dict[str, Any]:
    return torch.load(out / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", SETTINGS)
def test_any_world_trains_as_one_process_does(results: Path, name: str, world: int) -> None:
    """On the same global batches: to the rounding of fp32 sums in another order."""
    alone, many = read(results, f"{name}-1"), read(results, f"{name}-{world}")
    assert len(alone["seen"]) == STEPS.get(name, FEWER)
    for (loss, norm, *_), (other_loss, other_norm, *_) in zip(alone["seen"], many["seen"], strict=True):
        assert other_loss == pytest.approx(loss, rel=2e-5)
        assert other_norm == pytest.approx(norm, rel=1e-3)
    # bf16 moments round a difference in the last bit up to one of theirs.
    far = 2e-3 if "16" in name else 1e-4
    for key, value in alone["params"].items():
        torch.testing.assert_close(many["params"][key], value, rtol=1e-4, atol=far)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("bits-plain-Overlapped", 2),
        pytest.param("bits-plain-Overlapped", 4, marks=pytest.mark.slow),
        *product((x for x in SETTINGS if SETTINGS[x].get("stage") == 1), WORLDS[1:]),
    ],
)
def test_bytes_sent_are_those_of_the_theory(results: Path, name: str, world: int) -> None:
    """(world - 1) / world of the gradients, and as much of the parameters, where each bucket is reduced once; twice
    that of what is measured."""
    sent = {step[3] for step in read(results, f"{name}-{world}")["seen"]}
    sizes = json.loads((results / f"{name}-{world}.json").read_text())
    assert sent == {2 * sizes["bytes"] * (world - 1) // world}


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", SETTINGS)
def test_bytes_sent_are_those_of_the_plan(results: Path, name: str, world: int) -> None:
    sent = {step[3] for step in read(results, f"{name}-{world}")["seen"]}
    assert sent == {json.loads((results / f"{name}-{world}.json").read_text())["planned"]}


@pytest.mark.parametrize(("recipe", "world"), of_recipes(RECIPES))
def test_any_schedule_gives_the_serial_bits_on_any_world(results: Path, recipe: str, world: int) -> None:
    serial, *others = SCHEDULES[world]
    serial = read(results, f"bits-{recipe}-{serial}-{world}")
    for schedule in others:  # with random delays that differ from rank to rank
        other = read(results, f"bits-{recipe}-{schedule}-{world}")
        assert repr(other["seen"]) == repr(serial["seen"])
        assert all(torch.equal(other["params"][k], v) for k, v in serial["params"].items())


@pytest.mark.parametrize("world", [*WORLDS[:-1], pytest.param(WORLDS[-1], marks=pytest.mark.slow)])
def test_residence_deferral_and_sharding_change_no_bit(results: Path, world: int) -> None:
    plain, partial, sharded = (read(results, f"bits-{r}-Overlapped-{world}") for r in RECIPES)
    norms = [step[1] for step in plain["seen"]]
    assert min(norms) < 2.0 < max(norms)  # some steps are clipped
    assert repr(partial["seen"]) == repr(plain["seen"])
    assert all(torch.equal(partial["params"][k], v) for k, v in plain["params"].items())
    # Its buckets are cut at segments: norms are summed by bucket, and gloo's order of more than two ranks follows
    # the place of an element in its bucket.
    assert [step[0] for step in sharded["seen"]] == pytest.approx(
        [step[0] for step in plain["seen"]], rel=1e-2
    )
    if world <= 2:
        assert [step[0] for step in sharded["seen"]] == [step[0] for step in plain["seen"]]
        assert all(torch.equal(sharded["params"][k], v) for k, v in plain["params"].items())


@pytest.mark.parametrize(("recipe", "world"), of_recipes(RECIPES))
def test_any_world_trains_alike_with_any_recipe(results: Path, recipe: str, world: int) -> None:
    alone, many = (read(results, f"bits-{recipe}-Overlapped-{n}") for n in (1, world))
    for (loss, norm, *_), (other_loss, other_norm, *_) in zip(alone["seen"], many["seen"], strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-2)  # in bf16
        assert other_norm == pytest.approx(norm, rel=2e-2)


def test_11_what_reaches_the_optimizer_of_two_ranks_is_the_gradient(results: Path) -> None:
    # Each row was held against autograd there; what was not equal would have ended the rank.
    for rank in range(2):
        assert {row[0] for row in json.loads((results / f"gradients-{rank}.json").read_text())} == {
            *GRADIENTS
        }


@pytest.mark.parametrize("world", WORLDS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(results: Path, world: int) -> None:
    seen = [read(results, f"overflow-{world}-{rank}")["seen"] for rank in range(world)]
    assert all(repr(x) == repr(seen[0]) for x in seen)
    assert [step[2] for step in seen[0]] == [False, False, False, True, False, False]
    params = [read(results, f"overflow-{world}-{rank}")["params"] for rank in range(world)]
    assert all(torch.equal(p[k], v) for p in params for k, v in params[0].items())


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree_are_named_on_all(results: Path, what: str) -> None:
    messages = {(results / f"disagree-{what}-{rank}.txt").read_text() for rank in range(4)}
    assert len(messages) == 1
    text = messages.pop()
    assert "on rank 2 than on rank 0" in text
    assert DISAGREE[what] in text


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(tmp_path: Path) -> None:
    """The same batches in the same order, whatever the number of ranks; rank 0 alone keeps the run."""
    small = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"]
    data = tmp_path / "data.txt"
    data.write_text("Every rank reads its part of the batch. " * 400)
    job = ["-m", "zfunc", "train", "--steps", "5", "--eval-every", "5", "--data", str(data), *small]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    losses = []
    for name, start in (("one", []), ("two", launch)):
        ran = subprocess.run(
            [sys.executable, *start, *job, "--out", str(tmp_path / name)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=200,
        )
        assert ran.returncode == 0, ran.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines[1:]])
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_collectives_on_two_lanes_are_refused() -> None:
    job = evolve(SPECS["tied barrier"], layout=SPECS["tied accumulated"].layout, world=2)
    with pytest.raises(PlanError, match="collectives on the lanes lane"):
        make_plan(job, Scattered(), zero_offload)


def test_a_world_of_one_sends_nothing() -> None:
    ranks = RankGroup.of(None)
    assert (ranks.rank, ranks.world, ranks.sums([1.5]), ranks.texts("a")) == (0, 1, [1.5], ["a"])
    assert ranks.sent == 0


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stage: got 4"):
        zfunc.compile(MODELS["odd sizes"]()[0], stage=4)  # type: ignore[arg-type]
