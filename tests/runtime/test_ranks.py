"""Several ranks on gloo: the results of one, the same bits on every run, and the bytes that theory says.

Four processes run `all_ranks` once; the tests read what they left.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trained
from attrs import evolve
from forked import NIGHT, WORLDS, each_world, global_batch, groups_of, play, played
from gradient_law import RECIPES as GRADIENTS
from gradient_law import check, program_of
from small_models import MODELS, Batch, rows_of
from table import SPECS, Scattered
from torch import Tensor, nn
from zfunc.schedules import make_schedule

import zfunc
from zfunc.core.plan import PlanError
from zfunc.core.recipes import zero_offload
from zfunc.engine.program.program import Program, make_plan, rescheduled
from zfunc.errors import RankError
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.fault_injection import Jitter

STEPS = 4
TIED = {"model": "pairs", "precision": "fp32", "bucket_size": 40}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"model": "odd sizes", "precision": "fp32", "bucket_size": 3000},
    "clipped, accumulated": {**TIED, "clip_norm": 0.5, "micro_batches": 3},
    "stage 1, accumulated": {**TIED, "stage": 1, "micro_batches": 3, "schedule": "Interleaved"},
    "stage 3 on the host": {
        **{**TIED, "clip_norm": 0.5, "micro_batches": 3, "stage": 3, "params_on": "host"},
        **{"activations_on": "host", "defer": True, "ema": 0.9},
    },
    "several optimizers in 16 bits": {
        **{"model": "tied GPT", "precision": "fp32", "stage": 1, "clip_norm": 0.5, "ema": 0.9},
        "optimizer": zfunc.groups(
            ("*.bias", zfunc.SGD(0.1, momentum=0.9, moments="16bit")),
            ("*.ln_*", zfunc.Adagrad(1e-2, moments="16bit")),
            ("block0.*", zfunc.Lion(1e-4, weight_decay=1.0, moments="16bit")),
            ("block1.*", zfunc.AdamW(1e-2, moments="16bit")),
            zfunc.AdamW(1e-3, weight_decay=0.1, moments="16bit"),
        ),
    },
}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "partial, deferred": {"state_on": "device:0.5,host", "defer": True},
    "stage 3": {"stage": 3},
}
GRADIENT_ROWS = [("clipped", "bf16"), ("stage 1", "fp16"), *product(GRADIENTS, ("fp32",))]
# What the others have with a stage or a barrier, or in part, has no other code on ranks.
GRADIENTS_AT_NIGHT = {"no barrier", "all on the device", "moments in 16 bits", "some in fp32"}
SCHEDULES = {  # by world; of one rank tests/engine/test_laws.py says that every schedule has the serial bits
    1: ("Overlapped",),
    2: ("Serial", "Overlapped"),
    4: ("Serial", "Interleaved"),
}
# The recipes that the largest world runs by day: what they do there is unlike what they do on two ranks.
BY_DAY = ("partial, deferred", "stage 3")


def is_run(name: str, world: int, *, night: bool = False) -> bool:
    """Whether a setting trains on a world of this size: by day each on one rank, and on two or on four in turn.
    What they shard, add up and defer, the recipes do on both."""
    return night or world == 1 or (list(SETTINGS).index(name) % 2 == 0) == (world == 4)


OF_WORLDS = [
    pytest.param(name, world, marks=() if is_run(name, world) else pytest.mark.slow)
    for name, world in product(SETTINGS, WORLDS[1:])
]
DISAGREE = {  # the line told
    "buckets": "region",
    "rows": "batch of shapes",
    "weights": "weights of checksum",
    "decay of averages": "ema 0.99",
}


def compiled(model: str, group: Any, **settings: Any) -> tuple[Program, Any]:
    return trained.compiled(model, lr=1e-3, group=group, **{"bucket_size": 20_000, **settings})


def train(
    program: Program, data: Any, *, steps: int, poison: int | None = None, **options: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses, norms, skipped steps, bytes, scales and final parameters of a few steps."""
    state = zfunc.init(program, seed=1, loss_scale=LossScale(scale=2.0**15, window=1000))
    ranks, seen = program.ranks, []
    for i in range(steps):
        inputs, targets = rows_of(global_batch(data, i), ranks.rank, ranks.world)
        if poison == i and ranks.rank == ranks.world - 1 and inputs.is_floating_point():
            inputs = torch.full_like(inputs, 6e4)  # overflows in fp16, on this rank alone
        state, m = zfunc.train_step(program, state, (inputs, targets), **options)
        seen.append((m.loss, m.grad_norm, m.skipped, m.sent_bytes, m.loss_scale))
    final = zfunc.params(program, state)
    if program.spec.settings.ema is not None:
        final |= {f"average of {name}": x for name, x in zfunc.params(program, state, ema=True).items()}
    return seen, final


def compare(group: Any, world: int, out: Path, *, night: bool) -> None:
    """Every setting on a world of this size, and what has to be the same to the bit there."""
    rank = dist.get_rank(group)
    for name, settings in SETTINGS.items():
        if not is_run(name, world, night=night):
            continue
        program, data = compiled(group=group, **settings)
        seen, params = train(program, data, steps=STEPS)
        if rank == 0:
            torch.save({"seen": seen, "params": params}, out / f"{name}-{world}.pt")
            verbs = "reduce_scatter", "gather", "all_gather"
            carries = [op for op in program.plan.graph if op.verb in verbs]
            sizes = {
                "bytes": program.layout.numel * program.dtype.itemsize,
                "planned": sum(op.nbytes for op in carries),
            }
            (out / f"{name}-{world}.json").write_text(json.dumps(sizes))
    recipes = RECIPES if world < max(WORLDS) or night else BY_DAY
    for recipe in recipes:
        more = RECIPES[recipe]
        program, data = compiled("odd sizes", group, clip_norm=2.0, bucket_size=600, **more)
        for schedule in dict.fromkeys((*SCHEDULES[world], *(["Overlapped"] if night else []))):
            jitter = {} if schedule == "Serial" else {"jitter": Jitter(rank, 1e-3)}
            program = rescheduled(program, make_schedule(schedule))  # what was traced is kept
            seen, params = train(program, data, steps=4, **jitter)
            if rank == 0:
                name = f"bits-{recipe}-{schedule}-{world}"
                torch.save({"seen": seen, "params": params}, out / f"{name}.pt")
                sizes = {"bytes": program.layout.numel * program.dtype.itemsize}
                (out / f"{name}.json").write_text(json.dumps(sizes))
    seen, params = train(*compiled("frozen below", group, precision="fp16"), steps=4, poison=2)
    torch.save({"seen": seen, "params": params}, out / f"overflow-{world}-{rank}.pt")


def gradient_rows(*, night: bool) -> list[tuple[str, str]]:
    return [row for row in GRADIENT_ROWS if night or row[0] not in GRADIENTS_AT_NIGHT]


def gradients(group: Any, out: Path, *, night: bool) -> None:
    """What reaches the optimizer on each of these ranks, against autograd's on the batches of all of them."""
    for recipe, precision in (rows := gradient_rows(night=night)):
        check(*program_of("pairs", precision, micro_batches=2, group=group, **GRADIENTS[recipe]))
    (out / f"gradients-{dist.get_rank(group)}.json").write_text(json.dumps(rows))


class Scored(nn.Linear):
    """A loss beside outputs of rows, one of them in another type."""

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        y = super().forward(x)
        return (y[:, 0] - targets).square().mean(), {"scores": y, "best": y.argmax(-1)}


def scored(world: int, **settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Auxiliary outputs of rows on this rank, of `world` that have different rows, and those of one plain call."""
    torch.manual_seed(5)
    body, head, rows = nn.Linear(4, 4), Scored(4, 3), (torch.randn(8, 4), torch.randn(8))
    segments = [zfunc.segment("body", body), zfunc.segment("head", head)]
    program = zfunc.compile(segments, precision="fp32", device="cpu", micro_batches=2, **settings)
    own = rows_of(rows, program.ranks.rank, world)
    return zfunc.train_step(program, zfunc.init(program), own)[1].aux, head(body(rows[0]), rows[1])[1]


def disagree(what: str, out: Path, rank: int) -> None:
    """Rank 2 does something else than the others: all of them are told, and that it is rank 2."""
    other = rank == 2
    segments, data = MODELS["odd sizes"]()
    bucket_size = 200 if other and what == "buckets" else 3000
    ema = 0.99 if other and what == "decay of averages" else 0.9
    program = zfunc.compile(segments, precision="fp32", device="cpu", bucket_size=bucket_size, ema=ema)
    name = program.layout.spans[-1].name
    changed = {name: torch.ones(program.layout.spans[-1].shape)} if other and what == "weights" else None
    state = zfunc.init(program, seed=1, params=changed)
    inputs, targets = global_batch(data, 0)
    rows = 6 if other and what == "rows" else 3
    try:
        zfunc.train_step(program, state, (inputs[:rows], targets[:rows]))
    except zfunc.errors.RankError as error:
        (out / f"disagree-{what}-{rank}.txt").write_text(str(error))


def traced(*, night: bool) -> Iterator[tuple[Program, Batch]]:
    """What the ranks train, with the shapes it has there."""
    for name, settings in SETTINGS.items():
        program, data = compiled(group=None, **settings)
        for world in (n for n in WORLDS if is_run(name, n, night=night)):
            yield program, rows_of(global_batch(data, 0), 0, world)
    for settings in ({"model": "odd sizes"}, {"model": "frozen below", "precision": "fp16"}):
        yield from each_world(*compiled(group=None, **settings))
    for recipe, precision in gradient_rows(night=night):
        program, data = program_of("pairs", precision, micro_batches=2, **GRADIENTS[recipe])
        yield program, rows_of(data(0), 0, 2)


def main(rank: int, world: int, out: Path, *, night: bool) -> None:
    groups = groups_of(rank, world, out)
    for size, group in groups.items():
        if rank < size:
            compare(group, size, out, night=night)
        if size == 2 and rank < size:
            gradients(group, out, night=night)
            torch.save([scored(2, group=group), scored(1, group=group, pp=2)], out / f"scored-{rank}.pt")
    dist.barrier()
    for what in DISAGREE:
        disagree(what, out, rank)
    dist.destroy_process_group()


def all_ranks(out: Path, *night: str) -> None:
    """In a process of its own, which forks them."""
    play(partial(main, night=NIGHT in night), out, traced=traced(night=NIGHT in night))


# --- what they have to have left -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, night: list[str]) -> Path:
    """The folder that four ranks wrote to."""
    return played(all_ranks, tmp_path_factory.mktemp("ranks"), *night)


def of_recipes(names: Iterable[str]) -> list[Any]:
    """Rows of (recipe, world): on four ranks, all but two of the recipes are `slow`."""
    return [
        pytest.param(x, n, marks=pytest.mark.slow if n == max(WORLDS) and x not in BY_DAY else ())
        for x, n in product(names, WORLDS[1:])
    ]


def read(out: Path, name: str) -> dict[str, Any]:
    return torch.load(out / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize(("name", "world"), OF_WORLDS)
def test_any_world_trains_as_one_process_does(results: Path, name: str, world: int) -> None:
    """On the same global batches: to the rounding of fp32 sums in another order."""
    alone, many = read(results, f"{name}-1"), read(results, f"{name}-{world}")
    assert len(alone["seen"]) == STEPS
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
        pytest.param("bits-plain-Interleaved", 4, marks=pytest.mark.slow),
        *(row for row in OF_WORLDS if SETTINGS[row.values[0]].get("stage") == 1),
    ],
)
def test_bytes_sent_are_those_of_the_theory(results: Path, name: str, world: int) -> None:
    """(world - 1) / world of the gradients, and as much of the parameters, where each bucket is reduced once; twice
    that of what is measured."""
    sent = {step[3] for step in read(results, f"{name}-{world}")["seen"]}
    sizes = json.loads((results / f"{name}-{world}.json").read_text())
    assert sent == {2 * sizes["bytes"] * (world - 1) // world}


@pytest.mark.parametrize(("name", "world"), OF_WORLDS)
def test_bytes_sent_are_those_of_the_plan(results: Path, name: str, world: int) -> None:
    sent = {step[3] for step in read(results, f"{name}-{world}")["seen"]}
    assert sent == {json.loads((results / f"{name}-{world}.json").read_text())["planned"]}


@pytest.mark.parametrize(("recipe", "world"), of_recipes(RECIPES))
def test_any_schedule_gives_the_serial_bits_on_any_world(results: Path, recipe: str, world: int) -> None:
    serial = read(results, f"bits-{recipe}-{SCHEDULES[world][0]}-{world}")
    trained = [x.stem for x in results.glob(f"bits-{recipe}-*-{world}.pt")]
    assert len(trained) >= len(SCHEDULES[world])
    for name in trained:  # with random delays that differ from rank to rank
        other = read(results, name)
        assert repr(other["seen"]) == repr(serial["seen"])
        assert all(torch.equal(other["params"][k], v) for k, v in serial["params"].items())


@pytest.mark.parametrize("world", [*WORLDS[:-1], pytest.param(WORLDS[-1], marks=pytest.mark.slow)])
def test_residence_deferral_and_sharding_change_no_bit(results: Path, world: int) -> None:
    plain, partial, sharded = (read(results, f"bits-{r}-{SCHEDULES[world][-1]}-{world}") for r in RECIPES)
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
    alone, many = (read(results, f"bits-{recipe}-{SCHEDULES[n][-1]}-{n}") for n in (1, world))
    for (loss, norm, *_), (other_loss, other_norm, *_) in zip(alone["seen"], many["seen"], strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-2)  # in bf16
        assert other_norm == pytest.approx(norm, rel=2e-2)


@pytest.mark.parametrize("at_night", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_11_what_reaches_the_optimizer_of_two_ranks_is_the_gradient(results: Path, at_night: bool) -> None:
    # Each row was held against autograd there; what was not equal would have ended the rank.
    for rank in range(2):
        held = {row[0] for row in json.loads((results / f"gradients-{rank}.json").read_text())}
        assert held >= GRADIENTS.keys() - (set() if at_night else GRADIENTS_AT_NIGHT)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_the_auxiliary_outputs_of_all_rows_in_order(results: Path, rank: int) -> None:
    for aux, expected in read(results, f"scored-{rank}"):
        for name, value in expected.items():
            torch.testing.assert_close(aux[name], value.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(results: Path, world: int) -> None:
    seen = [read(results, f"overflow-{world}-{rank}")["seen"] for rank in range(world)]
    assert all(repr(x) == repr(seen[0]) for x in seen)
    assert [step[2] for step in seen[0]] == [False, False, True, False]
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


def test_a_wait_for_collectives_ends_with_the_time_out_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no store says who is missing; the device is freed."""
    monkeypatch.setenv("ZFUNC_TIMEOUT", "0.1")
    freed = list[bool]()
    ranks = RankGroup(SimpleNamespace(abort=lambda: freed.append(True)), world=2, members=(0, 1))
    ranks.queued.append(("all_gather", time.monotonic(), SimpleNamespace(is_completed=lambda: False)))
    with pytest.raises(RankError, match="all_gather on rank 0: got a time-out .* the group has no store"):
        ranks.settle()
    assert (freed, [*ranks.queued]) == ([True], [])


def test_a_collective_that_fails_on_the_device_is_an_error_of_the_group() -> None:
    """Its `wait` raises it, in every version of torch."""

    def failed() -> None:
        raise RuntimeError("NCCL error: remote process exited")

    freed = list[bool]()
    ranks = RankGroup(SimpleNamespace(abort=lambda: freed.append(True)), world=2, members=(0, 1))
    work = SimpleNamespace(is_completed=lambda: True, wait=failed)
    ranks.queued.append(("all_gather", time.monotonic(), work))
    with pytest.raises(RankError, match="all_gather on rank 0: got a broken connection") as caught:
        ranks.settle()
    assert "remote process exited" in str(caught.value.__cause__)
    assert (freed, [*ranks.queued]) == ([True], [])


def test_a_world_of_one_sends_nothing() -> None:
    ranks = RankGroup.of(None)
    assert (ranks.rank, ranks.world, ranks.sums([1.5]), ranks.texts("a")) == (0, 1, [1.5], ["a"])
    assert ranks.sent == 0


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stage: got 4"):
        zfunc.compile(MODELS["odd sizes"]()[0], stage=4)  # type: ignore[arg-type]
