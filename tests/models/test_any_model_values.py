"""Any module as segments, where values of the batch decide shapes: a trace for each, the example's, or refused."""

import copy
import inspect
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import Transcriber, ids, spoken
from attrs import evolve
from module_law import CLOSE, WAYS, check
from threaded_ranks import on_every, programs_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

import zfunc
from zfunc.core.hardware import ROUND
from zfunc.core.settings import StepSettings
from zfunc.engine.program.specialize import specialize
from zfunc.engine.trace.batches import unpacked
from zfunc.engine.trace.cost_trace import AllocationTracker
from zfunc.engine.trace.fake_tensors import FakeTensors
from zfunc.errors import RankError
from zfunc.models.cut.module_traces import ModuleTraces
from zfunc.models.cut.modules import cuts
from zfunc.planner.cost_model import CostModel
from zfunc.planner.traced_costs import traced_costs


class Sized(nn.Module):
    """Parts of a row in sizes that an input says, of which a layer sees one at a time, and what a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor, sizes: Tensor, ids: Tensor, extra: Tensor, y: Tensor) -> Tensor:
        ends = torch.repeat_interleave(input=sizes[0].cumsum(0), repeats=sizes[0])
        x = x + (torch.arange(sizes[0].sum()) / ends)[:, None]
        for layer in self.layers:
            x = torch.cat([layer(part).softmax(1) for part in x.split(sizes[0].tolist(), 1)], 1)
            at = ids == 4
            x = x.clone()
            x[at] = x[at] + self.extra(extra.flatten(0, 1))
        if (sizes[0] > 5).any():
            x = x * 2
        return F.mse_loss(x, y)


def sized(*sizes: int, selected: int = 2) -> dict[str, Tensor]:
    x = ids(4, sum(sizes), start=5)
    for n, row in enumerate(x):
        row[torch.randperm(len(row))[: selected if n else 2]] = 4
    rows = {"x": torch.randn(*x.shape, 8), "y": torch.randn(*x.shape, 8), "extra": torch.randn(4, 2, 8)}
    return {**rows, "ids": x, "sizes": torch.tensor(sizes).expand(4, -1)}


@pytest.mark.parametrize("way", ["device", *(pytest.param(x, marks=pytest.mark.slow) for x in [*WAYS][1:])])
def test_values_that_decide_shapes_cost_a_trace_for_each(way: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Sized()
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, sized(2, 1))
    (said,) = caplog.messages
    assert re.search(
        r"values of \['sizes'\] decide shapes.*test_any_model_values.py:\d+: each other ones cost", said
    )
    traces = segments[0].function.args[0]
    for sizes, known in (((2, 1), 1), ((6,), 2), ((2, 1), 2)):
        check(segments, model, sized(*sizes), None, **WAYS[way])
        assert len(traces.known) == known


def test_values_of_more_elements_than_are_computed_beside_a_trace_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = sized(2, 1)
    for largest in (x["sizes"].numel() - 1, x["ids"].numel()):
        monkeypatch.setattr("zfunc.models.cut.known.LARGEST", largest)
        with pytest.raises(ValueError, match="branch on") if largest < x["sizes"].numel() else nullcontext():
            zfunc.segments(Sized(), x)


def test_a_mask_that_selects_another_number_is_no_wrong_result() -> None:
    torch.manual_seed(0)
    model = Sized()
    program = zfunc.compile(model, example=sized(2, 4), precision="fp32", device="cpu")
    state = zfunc.init(program)
    x = sized(4, 2)
    for _ in range(2):
        assert zfunc.evaluate(program, state, x) == pytest.approx(model(**x).item(), rel=CLOSE)
        assert zfunc.apply(program, state, x) == pytest.approx(model(**x).item(), rel=CLOSE)
        x = sized(4, 2)
    for selected in (1, 3):
        with pytest.raises(IndexError, match="out of"):
            zfunc.evaluate(program, state, sized(4, 2, selected=selected))


class Filled(nn.Linear):
    """It writes into what a dropout of 0 returns: in plain PyTorch its input itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.0)
        x[:, 0] = 0.5
        return super().forward(x)


class Halves(nn.Module):
    """Rows in as many parts as a division of Python numbers by torch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(8, 8), nn.Linear(8, 8), Filled(8, 8)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            parts = torch.div(x.size(1), 4, rounding_mode="trunc")  # pyright: ignore
            x = layer(x.reshape(len(x), parts, 4).flatten(1)) * (parts - 0.5)
        return F.mse_loss(x, y)


def test_a_division_by_torch_of_python_numbers_gives_a_shape() -> None:
    """As in Longformer, which was refused: its parts had a size that no memory has."""
    torch.manual_seed(0)
    model, x = Halves(), {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    segments = zfunc.segments(model, x)
    assert len(segments) == 2  # the last two blocks are one, for the write
    check(segments, model, x, None)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    expected = pytest.approx(model.eval()(**x).item(), rel=CLOSE)
    assert zfunc.evaluate(program, zfunc.init(program), x) == expected


class Selected(nn.Module):
    """Rows that are cut where an input says, and doubled where a mask of another says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor, ends: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = torch.cat([x[:, : ends[0]], x[:, ends[0] :] * 0.5], 1)
            x[ids == 4] = x[ids == 4] * 2
        return F.mse_loss(x, y) + 0.1 * x.masked_select((ids == 4)[..., None]).sum()


@pytest.mark.parametrize("selected", [0, 2])
def test_numbers_in_slices_and_masks_that_select_as_many_as_the_example_or_none(selected: int) -> None:
    def given(selected: int) -> dict[str, Tensor]:
        x = {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 6, 8), "ends": torch.tensor([2] * 4)}
        at = torch.randperm(24) < selected
        return {**x, "ids": torch.where(at, 4, 5).view(4, 6)}

    torch.manual_seed(0)
    model = Selected()
    segments = zfunc.segments(model, given(selected))
    assert len(segments) == 2
    check(segments, model, given(selected), None)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    state, x = zfunc.init(program), given(selected)
    assert zfunc.evaluate(program, state, x) == pytest.approx(model(**x).item(), rel=CLOSE)
    for other in {0, 1, 2, 3} - {selected}:
        with pytest.raises(IndexError, match="out of"):
            zfunc.evaluate(program, state, given(other))


class Masked(nn.Module):
    """Layers that assign where `at` selects, and a mask in a buffer and in an attribute that is none."""

    def __init__(self, at: Callable[["Masked", Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.at = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), at
        self.register_buffer("even", torch.arange(8) % 2 == 0)
        self.register_buffer("ready", torch.tensor(True))
        self.odd = ~self.even

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x).tanh()
            x = y.clone()
            x[self.at(self, ids)] = y.sigmoid().mean()[None, None]
        return x


@pytest.mark.parametrize(
    "at",
    [
        lambda model, ids: (slice(None), model.even) if model.ready else ids,
        lambda model, _: (slice(None), model.odd),
        lambda _, ids: ids == 4,
    ],
    ids=["of a buffer", "of an attribute", "of the batch"],
)
def test_what_is_assigned_where_a_mask_selects_has_its_gradient(at: Callable[[Masked, Tensor], Any]) -> None:
    """The shape of which depends on the mask; forward has no such shape."""
    torch.manual_seed(0)
    model, batch = Masked(at), ((torch.randn(4, 8), torch.tensor([4, 0, 4, 1])), torch.randn(4, 8))
    segments = zfunc.segments(model, batch, F.mse_loss)
    assert len(segments) == 3
    check(segments, model, batch, F.mse_loss)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    expected = F.mse_loss(model.eval()(*batch[0]), batch[1]).item()
    assert zfunc.evaluate(program, zfunc.init(program), batch) == pytest.approx(expected, rel=CLOSE)


class Longer(nn.Module):
    """Rows beside as many more as an input says, alive at each cut; of an odd number another tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        rows = torch.cat([x, torch.arange(1.0, 1 + int(more[0]))[:, None].expand(-1, 8)])
        shift = torch.cos(x[:1]) if int(more[0]) % 2 else 0.0
        for layer in self.layers:
            rows = torch.tanh(layer(rows) + shift)
        return F.mse_loss(rows[: len(x)], y) + rows[len(x) :].mean()


class Scaled(Longer):
    """Another tensor of as many rows, which all blocks read, of whole blocks of a disk."""

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        rows = torch.cat([x, torch.arange(1.0, 1 + int(more[0]))[:, None].expand(-1, 8)])
        scale = torch.cos(rows).repeat(1, 128)  # [rows, 1024]
        for layer in self.layers:
            rows = torch.tanh(layer(rows) * scale[:, -8:])
        return F.mse_loss(rows[: len(x)], y) + rows[len(x) :].mean()


class Ends(Longer):
    """A number that eval mode alone reads, and blocks that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y) if self.training else F.mse_loss(x[:, : int(more[0])], y[:, : int(more[0])])


def test_values_that_eval_mode_alone_reads_cost_training_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"x": torch.randn(4, 8), "y": torch.randn(4, 8), "more": torch.tensor([3] * 4)}
    model = Ends()
    *_, coarse, fine = cuts(model, x, most=1000)
    assert (len(coarse.segments), len(fine.segments)) == (2, 4)
    program = zfunc.compile(fine.segments, precision="fp32", device="cpu")
    state, made = zfunc.init(program), list[bool]()
    trace = ModuleTraces._trace
    monkeypatch.setattr(ModuleTraces, "_trace", lambda *given: made.append(given[-1]) or trace(*given))
    for more in (3, 5, 3):
        x["more"] = torch.tensor([more] * 4)
        model.load_state_dict(zfunc.params(program, state))
        loss = model.eval()(**x).item()
        assert zfunc.evaluate(program, state, x) == pytest.approx(loss, rel=CLOSE)
        state, _ = zfunc.train_step(program, state, x)
    assert made == [False, False]


class Crossed(Longer):
    """What is larger at one cut is smaller at the others."""

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        rows = x
        for n, layer in enumerate(self.layers):
            many = int(more[0]) if n == 1 else 2 * (41 - int(more[0]))
            rows = torch.tanh(layer(torch.cat([rows[: len(x)], torch.ones(many, 8)])))
        return F.mse_loss(rows[: len(x)], y) + rows[len(x) :].mean()


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *(("host", Crossed), ("disk", Scaled), ("ranks", Longer)),
        *(pytest.param(x, Longer, marks=pytest.mark.slow) for x in WAYS),
        pytest.param("host", Scaled, marks=pytest.mark.slow),
        pytest.param("two devices", Crossed, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_of_other_values_have_room_for_the_largest_at_each_cut(
    way: str, kind: type[Longer], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def given(*more: int) -> dict[str, Tensor]:
        x = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
        return {**x, "more": torch.tensor(more).repeat_interleave(2)}

    torch.manual_seed(0)
    model = kind()
    settings = {"precision": "fp32", "device": "cpu", "optimizer": zfunc.SGD(lr=0.0), "micro_batches": 2}
    own = {**WAYS, "disk": {"activations_on": "disk", "swap": [tmp_path]}}.get(way, {"pp": 2})
    segments = zfunc.segments(model, given(3, 3))
    programs = programs_of(1, lambda: zfunc.compile(segments, **settings, **own), pp=own.get("pp", 1))
    states = on_every(programs, zfunc.init)
    for more in ((3, 3), (1, 40), (40, 3)):
        x = given(*more)
        caplog.clear()
        for program in programs:  # two threads must not trace at a time
            specialize(program, unpacked(x, program.segments[-1]))
        done = on_every(programs, zfunc.train_step, states, [x] * len(programs))
        states = [state for state, _ in done]
        loss = sum(model(**{k: t[rows] for k, t in x.items()}) for rows in (slice(2), slice(2, 4))) / 2
        norm = nn.utils.get_total_norm(torch.autograd.grad(loss, [*model.parameters()]))
        for _, metrics in done:
            assert (metrics.loss, metrics.grad_norm) == pytest.approx((loss.item(), norm.item()), rel=CLOSE)
        assert not caplog.messages
    if way == "ranks":
        apart = [x, {**x, "more": x["more"].flip(0)}]
        assert all("got other rows" in text for text in on_every(programs, _refusal, states, apart))


def test_a_plan_of_a_larger_batch_has_the_values_of_the_example_again() -> None:
    x = {"x": torch.randn(4, 8), "y": torch.randn(4, 8), "more": torch.tensor([3] * 4)}
    segments = zfunc.segments(Longer(), x)
    costs = traced_costs(segments, unpacked(x, segments[-1]), zfunc.SGD(lr=0.0))
    one, two = (
        CostModel(of, ROUND).step(StepSettings(precision="fp32", recompute="all", micro_batches=n)).seconds
        for of, n in ((costs, 1), (costs.resized(8), 2))
    )
    assert two > one


def _refusal(program: Any, state: Any, x: Any) -> str:
    with pytest.raises(RankError) as error:
        zfunc.train_step(program, evolve(state, batches=100), x)
    return str(error.value)


def test_ranks_whose_values_make_other_plans_are_told_the_values_and_what_to_do() -> None:
    def given(*more: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 8), "y": torch.randn(2, 8), "more": torch.tensor(more)}

    model = Longer()
    settings = {"precision": "fp32", "device": "cpu", "optimizer": zfunc.SGD(lr=0.0)}
    segments = zfunc.segments(model, given(3, 3))
    programs = programs_of(2, lambda: zfunc.compile(segments, **settings))
    states, apart = on_every(programs, zfunc.init), [given(3, 3), given(40, 40)]
    for program, x in zip(programs, apart, strict=True):
        specialize(program, unpacked(x, program.segments[-1]))
    for text in on_every(programs, _refusal, states, apart):
        assert re.search(r"that decide shapes, \[\[(40, 40|3, 3)\]\]: group rows by these values", text), text


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ("in rows", {"reduction": "sum"}),
        ("by masked_select", {}),
        ("by an index", {"reduction": "none"}),
        ("lengths as numbers", {}),
        ("too short", {"zero_infinity": True}),
    ],
)
def test_ctc_of_any_targets_is_torchs_and_costs_one_trace(
    given: str, loss: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, settings = Transcriber(given, **loss), {"optimizer": zfunc.SGD(lr=0.0), "micro_batches": 2}
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, spoken(rows=2))
    assert len(segments) > 3
    assert not caplog.messages
    program = zfunc.compile(segments, precision="fp32", device="cpu", recompute="min-cut", **settings)
    state = zfunc.init(program)
    for longest in (5, 1, 3):
        x = spoken(longest=longest)
        halves = [model(*(t[rows] for t in x)) for rows in (slice(2), slice(2, 4))]
        norm = nn.utils.get_total_norm(torch.autograd.grad(sum(halves) / 2, [*model.parameters()]))
        state, metrics = zfunc.train_step(program, state, x)
        expected = sum(halves).item() / 2, norm.item()
        assert (metrics.loss, metrics.grad_norm) == pytest.approx(expected, rel=CLOSE)
        assert zfunc.evaluate(program, state, x) == pytest.approx(model(*x).item(), rel=CLOSE)
    assert len(segments[0].function.args[0].known) == 2  # of two rows; in evaluation, of four


def test_plans_count_the_tables_of_ctc() -> None:
    """Beside what torch allocates inside, of targets of which one is as long as a row."""
    targets, counts = torch.randint(1, 7, (4, 100)), torch.tensor([[100], [3], [7], [1]])
    lengths = torch.full((4,), 400), counts[:, 0]
    given = torch.randn(400, 4, 7).log_softmax(-1), targets, torch.arange(100) < counts, *lengths, 0, False
    for op, args in (
        (torch.ops.zfunc.ctc_losses, given),
        (torch.ops.zfunc.pull_ctc_losses, (torch.ones(4), *given)),
    ):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            op(*args)
        events = profiled.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
        peak = max(accumulate(x.nbytes() for x in events if x.name() == "[memory]"))
        with FakeTensors() as fake, AllocationTracker() as tracker:
            op(*tree_map_only(Tensor, fake.from_tensor, args))
        assert peak <= tracker.peak <= 1.02 * peak


def test_a_target_beyond_the_classes_of_ctc_is_refused() -> None:
    x, targets = spoken()
    program = zfunc.compile(Transcriber("by an index"), example=(x, targets), precision="fp32", device="cpu")
    with pytest.raises(ValueError, match="^batch: got the target 7 for ctc_loss of 7 classes, expected"):
        zfunc.evaluate(program, zfunc.init(program), (x, targets.clamp(max=1) * 7))


class Checked(Longer):
    """Inputs that forward checks, as models of speech do, and none of whose values it needs."""

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        if more is not None and more.max() >= 100:
            raise ValueError("too many")
        assert (more >= 0).all().item(), "negative"
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y * more[:, None])


class Guarded(Longer):
    """Checks of what it computes, and those of torch's own code; a constant of a copy."""

    lenient = False

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        start = copy.deepcopy(self.layers[0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        assert more is not None and not x.isnan().any(), "NaN"  # noqa: PT018
        if not self.training or not (-2 < x.min() <= x.max() < 2):
            raise ValueError("far")
        if torch.equal(x, 3 * y):
            raise ValueError("alike")
        far, checked = x.abs().max() > 2, True
        if checked and not self.lenient and far:
            raise ValueError("farther")
        scale = F.softplus(x) + 0.1
        normal = torch.distributions.Normal(x, scale)
        apart = torch.distributions.kl_divergence(normal, torch.distributions.Normal(y * 0, torch.ones(8)))
        picked = torch.distributions.Categorical(logits=x).log_prob(more)
        loss = apart.mean() - normal.log_prob(y).mean() - picked.mean()
        return loss + F.gaussian_nll_loss(x, y, scale) + F.mse_loss(x, start(y))


def test_checks_of_values_that_a_trace_lacks_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Those of the model's own code are named. In segments, cut once, the model trains in any way."""
    torch.manual_seed(0)
    x = {"x": torch.randn(4, 8), "y": torch.randn(4, 8), "more": torch.tensor([1, 2, 3, 0])}
    model = Guarded()
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, x)
    lines, first = inspect.getsourcelines(Guarded)
    numbers = [
        first + n
        for n, line in enumerate(lines)
        if any(x in line for x in ('"NaN"', "self.training", "torch.equal", "self.lenient"))
    ]
    assert [
        f"test_any_model_values.py:{n} is left out" in x
        for n, x in zip(numbers, caplog.messages, strict=True)
    ]
    assert len(segments) > 2
    for way in WAYS.values():
        check(segments, model, x, None, **way)


def test_values_that_are_checked_alone_cost_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    def given(more: int) -> dict[str, Tensor]:
        return {"x": torch.randn(4, 8), "y": torch.randn(4, 8), "more": torch.tensor([more] * 4)}

    torch.manual_seed(0)
    model = Checked()
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, given(1))
    assert not caplog.messages
    check(segments, model, given(3), None, **WAYS["host"])
    assert len(segments[0].function.args[0].known) == 1
    with pytest.raises(
        ValueError, match=r"^example: .*ValueError at .*test_any_model_values.py:\d+: too many"
    ):
        zfunc.segments(model, given(100))
