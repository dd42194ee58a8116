"""Buffers that forward changes: what plain PyTorch keeps of them, saved, on several ranks, and what is refused.

That no schedule, recomputation or order of micro-batches changes a bit of them is a law: the model "norms".
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from safetensors.torch import load_file
from small_models import Loss, bits, norm_modules, regression, rows_of
from threaded_ranks import on_every, programs_of
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc.checkpoint.export import export_weights
from zfunc.core.layout import Parameter
from zfunc.core.recipes import zero_offload
from zfunc.engine.program.program import Program
from zfunc.errors import NonFiniteError

BATCH = regression()
STEPS, MICRO = 5, 3


def program(**settings: Any) -> Program:
    chosen = {"precision": "fp32", "micro_batches": MICRO, "bucket_size": 300, **settings}
    return trained.compiled("norms", **chosen)[0]


def loaded(values: dict[str, Tensor]) -> list[tuple[str, nn.Module]]:
    """The modules with these parameters and buffers, and no others."""
    modules = norm_modules()
    for name, m in modules:
        own = {k.removeprefix(f"{name}."): v for k, v in values.items() if k.startswith(f"{name}.")}
        m.load_state_dict(own, strict=True)
    return modules


def loss_of(modules: list[tuple[str, nn.Module]], x: Tensor, y: Tensor) -> Tensor:
    for _, m in modules[:-1]:
        x = m(x)
    return modules[-1][1](x, y)


def values(made: Program, state: Any) -> dict[str, Tensor]:
    return {**zfunc.params(made, state), **zfunc.buffers(made, state)}


def plain_training() -> tuple[list[float], list[tuple[str, nn.Module]]]:
    """What a loop over the same modules makes of them."""
    modules, losses = norm_modules(), []
    parameters = [p for _, m in modules for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.05)
    for i in range(STEPS):
        optimizer.zero_grad()
        x, y = BATCH(i)
        total = 0.0
        for x_m, y_m in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
            loss = loss_of(modules, x_m, y_m) / MICRO
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, modules


def test_a_training_is_that_of_a_plain_loop_and_an_evaluation_its_modules_in_eval_mode() -> None:
    losses, modules = plain_training()
    made = program(optimizer=zfunc.SGD(0.05))
    state, seen = trained.steps(made, zfunc.init(made), BATCH, 0, STEPS)
    assert [m[1] for m in seen] == pytest.approx(losses, rel=1e-5)
    expected = {f"{name}.{k}": v for name, m in modules for k, v in m.state_dict().items()}
    got = values(made, state)
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert got["batch.1.num_batches_tracked"] == STEPS * MICRO
    for _, m in modules:
        m.eval()
    with torch.no_grad():
        assert zfunc.evaluate(made, state, BATCH(9)) == pytest.approx(
            float(loss_of(modules, *BATCH(9))), rel=1e-5
        )


@pytest.mark.parametrize("during", [False, True])
def test_they_are_saved_loaded_exported_and_passed_to_init(tmp_path: Path, during: bool) -> None:
    made = program()
    state, _ = trained.steps(made, zfunc.init(made), BATCH, 0, 2)
    before = values(made, state)
    if during:
        state, metrics = zfunc.train_step(made, state, BATCH(2), save=tmp_path)
        path = metrics.saved.path
    else:
        path = zfunc.save(tmp_path, made, state)
        state, _ = zfunc.train_step(made, state, BATCH(2))
    again = program(schedule="Overlapped", recompute="min-cut", bucket_size=1000)
    resumed = zfunc.load(path, again)
    assert all(torch.equal(x, before[name]) for name, x in values(again, resumed).items())
    resumed, _ = zfunc.train_step(again, resumed, BATCH(2))
    assert all(torch.equal(x, values(made, state)[name]) for name, x in values(again, resumed).items())
    export_weights(path, tmp_path / "weights.safetensors")
    exported = load_file(tmp_path / "weights.safetensors")
    assert exported.keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in exported.items())
    loaded(exported)
    third = zfunc.init(again, params=before)
    assert zfunc.evaluate(again, third, BATCH(9)) == zfunc.evaluate(again, zfunc.load(path, again), BATCH(9))


def test_a_step_that_fails_or_is_skipped_leaves_them_as_they_were() -> None:
    made = program()
    state, _ = trained.steps(made, zfunc.init(made), BATCH, 0, 1)
    before, (x, y) = bits(state), BATCH(1)
    with pytest.raises(NonFiniteError):
        zfunc.train_step(made, state, (x, y * float("inf")))
    assert all(map(torch.equal, bits(state), before))
    half = program(precision="fp16")
    state = zfunc.init(half, loss_scale=zfunc.LossScale(2.0**24))
    before = zfunc.buffers(half, state)
    state, metrics = zfunc.train_step(half, state, (x, 100 * y))
    assert metrics.skipped
    assert all(torch.equal(x, before[name]) for name, x in zfunc.buffers(half, state).items())


def test_several_ranks_keep_those_of_rank_0() -> None:
    world = 2
    make = partial(program, micro_batches=2)
    programs = programs_of(world, make, rows_of(BATCH(0), 0, world))

    def one(made: Program) -> dict[str, Tensor]:
        state, _ = zfunc.train_step(made, zfunc.init(made), rows_of(BATCH(0), made.ranks.rank, world))
        return zfunc.buffers(made, state)

    got = on_every(programs, one)
    modules, (x, y) = norm_modules(), rows_of(BATCH(0), 0, world)
    for x_m, y_m in zip(x.chunk(2), y.chunk(2), strict=True):
        loss_of(modules, x_m, y_m)
    own = {f"{name}.{k}": v for name, m in modules for k, v in m.named_buffers()}
    for name, kept in got[0].items():
        assert torch.equal(kept, got[1][name])
        torch.testing.assert_close(kept, own[name])


class Counting(nn.Module):
    """A buffer that forward changes, which zfunc does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


def compiled_with(module: nn.Module, **settings: Any) -> Program:
    segments = [zfunc.segment("s", module), zfunc.segment("loss", Loss(8))]
    return zfunc.compile(segments, device="cpu", precision="fp32", **settings)


REFUSED: dict[str, tuple[Any, str]] = {
    "another buffer": (
        lambda: zfunc.train_step(
            made := compiled_with(nn.Sequential(Counting())), zfunc.init(made), BATCH(0)
        ),
        r"segment 's': got an in-place .* of 'calls' of the Counting '0'.*zfunc\.Segment with buffers=",
    ),
    "on the disk": (
        lambda: compiled_with(nn.BatchNorm1d(8), state_on="disk", swap=["none"]),
        "state_on: got 'disk' with buffers that forward changes in segment 's'.*expected state_on='host'",
    ),
    "a norm that sends": (
        lambda: compiled_with(nn.SyncBatchNorm(8)),
        "got the SyncBatchNorm.*nn.BatchNorm2d",
    ),
    "a cumulative mean": (
        lambda: compiled_with(nn.BatchNorm1d(8, momentum=None)),
        "segment 's': got momentum=None of the BatchNorm1d.*set its momentum",
    ),
    "a recipe that forgets them": (
        lambda: compiled_with(
            nn.BatchNorm1d(8),
            recipe=lambda spec: (op for op in zero_offload(spec) if op.verb != "keep_buffers"),
        ),
        "recipe: got a step in which nothing writes module_buffers.*keep_buffers",
    ),
    "no function to evaluate": (
        lambda: zfunc.Segment(
            "s", lambda p, x: (x, {}), (), (), initial=lambda _: {}, buffers={"n": torch.zeros(())}
        ),
        "segment 's': got buffers without evaluate.*pass evaluate=",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_have_them_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_one_norm_in_two_segments_is_refused() -> None:
    norm = nn.BatchNorm1d(8, affine=False)
    segments = [zfunc.segment("a", nn.Sequential(norm)), zfunc.segment("b", norm)]
    with pytest.raises(ValueError, match=r"got one buffer as 'a\.0\.running_mean' and 'b\.running_mean'"):
        zfunc.compile([*segments, zfunc.segment("loss", Loss(8))])


def test_statistics_stay_in_fp32_in_16_bits_and_a_norm_in_eval_mode_is_constant() -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval())
    segments = [zfunc.segment("s", module), zfunc.segment("loss", Loss(8))]
    made = zfunc.compile(segments, device="cpu", precision="bf16")
    state, _ = zfunc.train_step(made, zfunc.init(made), BATCH(0))
    got = zfunc.buffers(made, state)
    assert sorted(got) == [f"s.0.{x}" for x in ("num_batches_tracked", "running_mean", "running_var")]
    mean = BATCH(0)[0].bfloat16().float().mean(0)
    torch.testing.assert_close(got["s.0.running_mean"], 0.1 * mean, rtol=1e-5, atol=1e-6)


def test_a_function_of_ones_own_returns_them() -> None:
    def scaled(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * p["w"] + p["mean"], {"mean": 0.5 * p["mean"] + 0.5 * x.float().mean()}

    def last(p: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return F.mse_loss(x.sum(-1) * p["v"], y), wrong or {"count": p["count"] + 1}

    def segments() -> list[zfunc.Segment]:
        return [
            zfunc.Segment(
                "a",
                scaled,
                (Parameter("a.w", ()),),
                ("w",),
                initial=lambda _: {"a.w": torch.ones(())},
                evaluate=lambda p, x: x * p["w"] + p["mean"],
                buffers={"mean": torch.zeros(())},
            ),
            zfunc.Segment(
                "b",
                last,
                (Parameter("b.v", ()),),
                ("v",),
                initial=lambda _: {"b.v": torch.ones(())},
                evaluate=lambda p, x, y: last(p, x, y)[0],
                buffers={"count": torch.zeros((), dtype=torch.int64)},
            ),
        ]

    wrong: Any = None
    settings: dict[str, Any] = {"device": "cpu", "precision": "fp32", "micro_batches": 2}
    programs = programs_of(2, lambda: zfunc.compile(segments(), **settings), BATCH(0))

    def one(made: Program) -> dict[str, Tensor]:
        return zfunc.buffers(made, zfunc.train_step(made, zfunc.init(made), BATCH(0))[0])

    first, second = (x.mean() for x in BATCH(0)[0].chunk(2))
    for got in on_every(programs, one):
        assert got["b.count"] == 2
        torch.testing.assert_close(got["a.mean"], 0.25 * first + 0.5 * second)
    wrong = {"counts": torch.zeros(())}
    made = zfunc.compile(segments(), device="cpu", precision="fp32")
    with pytest.raises(ValueError, match=r"segment 'b': got the buffers \['counts'\].*expected \['count'\]"):
        zfunc.train_step(made, zfunc.init(made), BATCH(0))


class Queue(nn.Module):
    """Contrast with keys of batches before, as MoCo keeps them (He et al. 2020); `at` is the next to replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("keys", F.normalize(torch.randn(16, 4), dim=-1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        q, k = F.normalize(self.query(x), dim=-1), F.normalize(self.key(x + 0.1), dim=-1).detach()
        known = self.keys.clone()
        self.keys.index_copy_(0, (self.at + torch.arange(len(k))) % len(known), k)
        self.at.add_(len(k)).remainder_(len(known))
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ known.T], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"micro_batches": 2}, marks=pytest.mark.slow),
        {"micro_batches": 3, "recompute": "all"},
    ],
    ids=str,
)
def test_a_queue_of_keys_goes_on_in_the_next_micro_batch_and_batch(settings: dict[str, Any]) -> None:
    plain, micro = Queue(), settings.get("micro_batches", 1)
    made = zfunc.compile(
        zfunc.segments(Queue(), BATCH(0)),
        **{"optimizer": zfunc.SGD(0.1), "precision": "fp32", "device": "cpu", **settings},
    )
    state, optimizer = zfunc.init(made), torch.optim.SGD(plain.query.parameters(), 0.1)
    for i in range(STEPS):
        optimizer.zero_grad()
        losses = [plain(x, x) / micro for x in BATCH(i)[0].chunk(micro)]
        sum(losses, torch.zeros(())).backward()
        optimizer.step()
        state, metrics = zfunc.train_step(made, state, BATCH(i))
        assert metrics.loss == pytest.approx(sum(x.item() for x in losses), rel=1e-5)
    torch.testing.assert_close(values(made, state), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
    assert int(plain.at) == STEPS * 12 % 16
