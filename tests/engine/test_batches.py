"""Batches are trees, of which tensors with rows are split; a dict has its labels for targets; auxiliary outputs."""

import copy
from collections import UserDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attrs import evolve
from pairs import in_pairs
from small_models import regression
from threaded_ranks import on_every, programs_of
from torch import Tensor, nn

import zfunc
from zfunc.core.plan import PlanError
from zfunc.engine.program.program import Program
from zfunc.engine.stages.metrics import Metrics
from zfunc.engine.trace.batches import split_batch
from zfunc.engine.trace.traced_passes import TracedPasses


class Body(nn.Linear):
    """Passes on what is no tensor."""

    def forward(self, x: dict[str, Any]) -> tuple[Tensor, int | None]:
        y = super().forward(x["rows"])
        return torch.tanh(y if x.get("scale") is None else y * x["scale"]), x.get("power")


class Head(nn.Linear):
    def forward(
        self, passed: tuple[Tensor, int | None], targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        x, power = passed
        errors = (super().forward(x).squeeze(-1) - targets).abs() ** (power or 1)
        return (errors if weights is None else errors * weights).mean()


ROWS, TARGETS = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 8)
SCALE = torch.tensor(0.5)


def loss_and_norm(batch: Any, **settings: Any) -> tuple[float, float]:
    torch.manual_seed(0)
    segments = [zfunc.segment("body", Body(4, 4)), zfunc.segment("head", Head(4, 1))]
    program = zfunc.compile(
        segments, micro_batches=2, precision="fp32", device="cpu", example=batch, **settings
    )
    state = zfunc.init(program)
    loss = zfunc.evaluate(program, state, batch)
    _, metrics = zfunc.train_step(program, state, batch, debug=True)
    assert metrics.loss == pytest.approx(loss, rel=1e-6)
    return metrics.loss, metrics.grad_norm


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_longer_ones_are_traced_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tokens but the last of each row are: the step runs what was planned, also of one row, which is
    contiguous in any strides."""
    segments = [zfunc.segment("body", Body(4, 4)), zfunc.segment("head", Head(4, 1))]
    longer = torch.linspace(-1, 1, 10 * rows).view(2 * rows, 5)
    batch = {"rows": longer[:, :-1]}, TARGETS[: 2 * rows]
    program = zfunc.compile(segments, micro_batches=2, precision="fp32", device="cpu", example=batch)
    monkeypatch.setattr(TracedPasses, "_trace", lambda *_: pytest.fail("traced again"))
    zfunc.train_step(program, zfunc.init(program), batch)


@pytest.mark.parametrize("recompute", ["all", "none", "min-cut"])
def test_trees_with_none_numbers_and_tensors_without_rows(
    recompute: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run(inputs: dict[str, Any], *more: Any) -> tuple[float, float]:
        where = "device" if recompute == "none" else "host"
        return loss_and_norm((inputs, *more), recompute=recompute, activations_on=where)

    plain = run({"rows": ROWS}, TARGETS)
    assert run({"rows": ROWS, "scale": None, "power": 1}, TARGETS, None) == plain
    assert run({"rows": ROWS}, TARGETS, torch.ones(8)) == plain
    halved = run({"rows": ROWS, "scale": SCALE}, TARGETS)
    assert run({"rows": ROWS, "scale": 0.5}, TARGETS) == pytest.approx(halved, rel=1e-6)
    assert run({"rows": ROWS, "power": 2}, TARGETS) != plain
    assert "cannot be traced" not in caplog.text


def test_a_dict_has_labels() -> None:
    pair = loss_and_norm(({"rows": ROWS}, TARGETS))
    assert loss_and_norm({"rows": ROWS, "labels": TARGETS}) == pair
    assert loss_and_norm(UserDict({"rows": ROWS, "labels": TARGETS})) == pair
    with pytest.raises(ValueError, match=r"got a dict of \['rows'\], expected 'labels'.*\(batch, None\)"):
        loss_and_norm({"rows": ROWS})
    both = [{"rows": ROWS, "labels": TARGETS}] * 2
    for several, got in ((both, "2 batches"), ((*both,), "2 batches"), (iter(both), "a list_iterator")):
        with pytest.raises(TypeError, match=f"batch: got {got}, expected one batch: call it for each"):
            loss_and_norm(several)


def test_parts_are_rows_of_each_tensor() -> None:
    first, second = split_batch(((ROWS, None, SCALE), {"y": TARGETS}, 3), 2)
    assert torch.equal(torch.cat([first[0][0], second[0][0]]), ROWS)
    assert torch.equal(second[1]["y"], TARGETS[4:])
    assert (first[0][1:], first[2]) == ((None, SCALE), 3)


# --- what the last segment returns; that auxiliary outputs are those of a plain loop is a law (plain.follow) ---


class Distance(nn.Linear):
    """An auxiliary output whose name depends on the number of rows."""

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
        distance = (super().forward(x).squeeze(-1) - targets).abs()
        return distance.mean(), {"largest" if len(x) > 2 else "only": distance.max(), "constant": 2}


def test_evaluation_returns_them_on_request_and_every_batch_has_the_same_names() -> None:
    program = zfunc.compile([zfunc.segment("s", Distance(8, 1))], precision="fp32", device="cpu")
    state, (inputs, targets) = zfunc.init(program), regression(4)(0)
    loss, aux = zfunc.evaluate(program, state, (inputs, targets), has_aux=True)
    assert loss == zfunc.evaluate(program, state, (inputs, targets))
    assert aux["constant"] == 2
    assert aux["largest"] > loss
    state, metrics = zfunc.train_step(program, state, (inputs, targets))
    assert (metrics.loss, metrics.aux) == (loss, aux)
    with pytest.raises(
        ValueError, match=r"'s': got the auxiliary outputs \('constant', 'only'\).*same names"
    ):
        zfunc.train_step(program, state, (inputs[:2], targets[:2]))
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'targets'"):
        zfunc.apply(program, state, inputs)
    assert torch.is_tensor(zfunc.apply(program, state, inputs, targets)[1]["largest"])


class Tabled(nn.Linear):
    """Adds a table that has as many rows as a batch, or others."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        rows, table = x
        return super().forward(rows + table.sum(0)), None


@pytest.mark.parametrize("rows", [8, 3])
def test_every_micro_batch_gets_all_of_a_tensor_that_is_whole(rows: int) -> None:
    table = torch.linspace(0, 1, rows * 4).view(rows, 4)
    seen: list[list[Tensor]] = []
    inputs, loss = (ROWS, zfunc.Whole(table)), 0.0
    for micro_batches in (2, 1):
        torch.manual_seed(0)
        segments = [zfunc.segment("body", Tabled(4, 4)), zfunc.segment("head", Head(4, 1))]
        program = zfunc.compile(segments, micro_batches=micro_batches, precision="fp32", device="cpu")
        state = zfunc.init(program)
        loss = zfunc.evaluate(program, state, (inputs, TARGETS))
        state, metrics = zfunc.train_step(program, state, (inputs, TARGETS))
        assert metrics.loss == pytest.approx(loss, rel=1e-6)
        assert state.sequences == 8
        seen.append([*zfunc.params(program, state).values()])
    torch.manual_seed(0)
    plain = Tabled(4, 4), Head(4, 1)
    expected = plain[1](plain[0]((ROWS, table)), TARGETS)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*seen, strict=True))


class Contrastive(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        del targets
        y = torch.tanh(super().forward(x))
        return nn.functional.cross_entropy(y @ y.T, torch.arange(len(y)))


class Masked(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        errors, seen = (super().forward(x)[:, 0] - targets).abs(), targets > 0.3
        return (errors * seen).sum() / seen.sum()


class Mean(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return (super().forward(x)[:, 0] - targets).abs().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("loss", [Contrastive, Masked, Mean])
def test_a_loss_that_is_no_mean_over_rows_has_a_line(
    loss: type[nn.Linear], micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    program = zfunc.compile(
        [zfunc.segment("loss", loss(4, 3))], micro_batches=micro_batches, precision="fp32", device="cpu"
    )
    state = zfunc.init(program)
    for _ in range(2):
        state, _ = zfunc.train_step(program, state, (ROWS * 3, TARGETS), debug=True)
    said = [x.message for x in caplog.records if "no mean over rows" in x.message]
    assert len(said) == (micro_batches == 2 and loss is not Mean)


class Scored(nn.Linear):
    """Outputs of rows in three dtypes, one a view of the input and one of the targets, beside a scalar."""

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
        scores = super().forward(x)
        named = {"scores": scores, "best": scores.argmax(-1), "right": scores > 0, "x": x[:, :2]}
        loss = nn.functional.mse_loss(scores[:, 0], targets)
        return loss, {**named, "targets": targets, "largest": scores.max(-1).values.mean()}


def scored() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), Scored(4, 3)]


def compiled(modules: list[nn.Module], **settings: Any) -> Program:
    segments = [zfunc.segment(str(n), module) for n, module in enumerate(modules)]
    return zfunc.compile(segments, precision="fp32", device="cpu", **settings)


def check_same(aux: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert isinstance(aux["largest"], float)
    assert aux.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(aux[name]), value.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "micro_batches"),
    in_pairs(
        [
            {},
            {"recompute": "all", "params_on": "host"},
            {"recompute": "min-cut"},
            {"world": 2},
            {"pp": 2},
            {"pp": 2, "world": 2, "order": "DualPipeV"},
        ],
        [1, 2, 4],
    ),
)
def test_auxiliary_outputs_of_rows_are_those_of_the_whole_batch(
    micro_batches: int, settings: dict[str, Any]
) -> None:
    """The witness is one plain call on all rows, of which each rank has its part."""
    *body, head = scored()
    _, expected = head(nn.Sequential(*body)(ROWS), TARGETS)
    pp, world = settings.get("pp", 1), settings.get("world", 1)
    more = {name: x for name, x in settings.items() if name != "world"}
    parts = [*zip(ROWS.chunk(world), TARGETS.chunk(world), strict=True)]
    programs = programs_of(
        world, lambda: compiled(scored(), micro_batches=micro_batches, **more), parts[0], pp
    )

    def train(program: Program, part: tuple[Tensor, Tensor]) -> tuple[Metrics, Metrics]:
        state, metrics = zfunc.train_step(program, zfunc.init(program), part, debug=True)
        return metrics, zfunc.train_step(program, state, (part[0] + 1, part[1] + 1))[1]

    for metrics, other in on_every(programs, train, pp * parts):
        check_same(metrics.aux, expected)  # in memory that the other step has not changed
        assert metrics == copy.deepcopy(metrics)
        assert metrics != evolve(metrics, aux=other.aux)
    if pp == world == 1:
        (program,) = programs
        check_same(zfunc.evaluate(program, zfunc.init(program), parts[0], has_aux=True)[1], expected)


class Turned(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y = super().forward(x)
        return nn.functional.mse_loss(y[:, 0], targets), {"turned": y.T}


def test_other_shapes_are_refused_by_name() -> None:
    program = compiled([Turned(4, 3)], micro_batches=2)
    state = zfunc.init(program)
    with pytest.raises(
        ValueError, match=r"'turned': got shape \(3, 4\) for 4 rows.*turned\.mean\(\), or rows"
    ):
        zfunc.train_step(program, state, (ROWS, TARGETS))
    with pytest.raises(ValueError, match=r"'turned': got shape \(3, 8\) for 8 rows"):
        zfunc.evaluate(program, state, (ROWS, TARGETS), has_aux=True)


class Error(nn.Module):
    """A loss without parameters, which no weights keep on one device."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return ((x.squeeze(-1) - targets) ** 2).mean()


def last_in_turn(devices: int, segments: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """The last segment of each micro-batch on the next device, of the others the first one on device 0."""
    every = [("F", m, s) for m in range(micro_batches) for s in range(segments)]
    every += [("B", m, s) for m in range(micro_batches) for s in reversed(range(segments))]
    last = segments - 1
    return [[x for x in every if (x[1] if x[2] == last else x[2] > 0) % devices == n] for n in range(devices)]


@pytest.mark.parametrize(("order", "refused"), [("GPipe", False), (last_in_turn, True)])
def test_a_last_segment_without_parameters_has_its_losses_on_one_rank(order: Any, refused: bool) -> None:
    """Losses of other ranks would be another mean."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 1), Error()]
    expected = float(nn.Sequential(*layers[:2])(ROWS).squeeze(-1).sub(TARGETS).square().mean().detach())
    settings: dict[str, Any] = {"micro_batches": 4, "precision": "fp32", "device": "cpu", "order": order}

    def made() -> Program:
        return zfunc.compile([zfunc.segment(str(n), x) for n, x in enumerate(layers)], pp=2, **settings)

    with pytest.raises(PlanError, match="segment 2, whose losses one rank") if refused else nullcontext():
        programs = programs_of(1, made, (ROWS, TARGETS), 2)
        losses = on_every(
            programs, lambda p, x: zfunc.train_step(p, zfunc.init(p), x)[1].loss, [(ROWS, TARGETS)] * 2
        )
        assert losses == pytest.approx([expected] * 2)
