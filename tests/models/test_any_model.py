"""Any module as segments: the loss and the weights of the module itself, whatever is where."""

import copy
import logging
import math
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from any_models import MODELS, ids
from attrs import evolve
from safetensors.torch import load_file
from threaded_ranks import on_every, programs_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import zfunc
from zfunc.checkpoint.export import export_weights
from zfunc.core.hardware import ROUND
from zfunc.core.layout import round_up
from zfunc.core.settings import StepSettings
from zfunc.engine.program.fit_to_memory import first_cut_that_fits
from zfunc.engine.program.specialize import specialize
from zfunc.engine.trace.batches import unmarked, unpacked
from zfunc.errors import Message, OutOfMemory, RankError, marked, setting
from zfunc.models.cut.called import CalledModel, call_of
from zfunc.models.cut.modules import cuts
from zfunc.planner.cost_model import CostModel
from zfunc.planner.traced_costs import traced_costs

HOST = {"params_on": "host", "activations_on": "host", "recompute": "all", "bucket_size": 2000}
WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": HOST,
    "two devices": {"devices": 2, "params_on": "host"},
}
STEPS, CLOSE = 3, 2e-6
BY_DAY = {  # a way each
    "BERT, classes": "device",
    "CLIP": "two devices",
    "ConvNeXt": "host",
    "DiT": "host",
    "GPT-2": "host",
    "Gemma 3": "device",
    "LSTM seq2seq": "host",
    "OLMoE": "two devices",
    "ResNet": "two devices",
    "RoBERTa, tokens": "two devices",
    "T5": "host",
    "U-Net": "two devices",
    "ViT": "device",
    "Wan": "two devices",
    "graph network": "device",
}


def trained(model: nn.Module, batch: Any, loss: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of steps of SGD by plain PyTorch, and the tensors after them."""
    model, losses = copy.deepcopy(model), []
    called, optimizer = CalledModel(model, loss), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        y = called(unmarked(call_of(batch, loss is not None)[0]))
        optimizer.zero_grad()
        y.backward()
        optimizer.step()
        losses.append(y.item())
    return losses, model.state_dict()


def check(segments: Any, model: nn.Module, batch: Any, loss: Any, **way: Any) -> None:
    """Train in segments and in plain PyTorch: the same losses, and every parameter and buffer."""
    expected, tensors = trained(model, batch, loss)
    optimizer = zfunc.SGD(lr=0.1)
    program = zfunc.compile(segments, optimizer=optimizer, precision="fp32", device="cpu", **way)
    state, losses = zfunc.init(program), []
    for _ in range(STEPS):
        state, metrics = zfunc.train_step(program, state, batch)
        losses.append(metrics.loss)
    assert losses == pytest.approx(expected, rel=CLOSE)
    assert losses[-1] < losses[0]
    params, buffers = zfunc.params(program, state), zfunc.buffers(program, state)
    mine = copy.deepcopy(model)
    mine.load_state_dict({**params, **buffers}, strict=False)  # a tied one has one name
    assert params.keys() == dict(model.named_parameters()).keys()
    for name, t in mine.state_dict().items():
        torch.testing.assert_close(
            t, tensors[name], rtol=1e-5, atol=CLOSE, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")  # peft calls it
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if BY_DAY.get(name) == way else pytest.mark.slow)
        for name in MODELS
        for way in WAYS
    ],
)
def test_a_model_in_segments_trains_as_the_model_does(name: str, way: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = MODELS[name]()
    segments = zfunc.segments(model.train(), batch, loss)
    assert len(segments) > 3
    check(segments, model, batch, loss, **WAYS[way])


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(8, 16), nn.Linear(16, 8), p

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + F.dropout(self.down(torch.relu(self.up(x))), self.p, self.training) * table.to(x.dtype)


class Tied(nn.Module):
    """An embedding that is the head, a frozen table, a no_grad inside."""

    def __init__(
        self, num_layers: int = 3, p: float = 0.0, block: Callable[[float], nn.Module] = Block
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 8)
        self.layers = nn.ModuleList(block(p) for _ in range(num_layers))
        self.head = nn.Linear(8, 61)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))
        self.embed.requires_grad_(True)
        self.head.bias.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        with torch.no_grad():
            table = self.table + self.embed(labels).mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, table)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    return {"input_ids": ids(), "labels": ids()}


class InAutocast(Block):
    """In bf16 inside, on whichever device it runs."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = super().forward(x, table)
        with torch.autocast(x.device.type, enabled=False):
            return y.float()


@pytest.mark.parametrize("name", ["GPT-2", "DiT"])
def test_places_are_chosen_by_the_batch_of_a_loop(name: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = MODELS[name]()
    segments = zfunc.segments(model, batch, loss) if loss else model.train()
    check(segments, model.train(), batch, loss, example=batch, params_on="auto")


@pytest.mark.parametrize(
    ("way", "block"), [*((way, Block) for way in WAYS), ("host", InAutocast), ("two devices", InAutocast)]
)
def test_tied_frozen_no_grad_and_autocast(way: str, block: type[Block]) -> None:
    torch.manual_seed(0)
    model = Tied(block=block)
    check(zfunc.segments(model, batch()), model, batch(), None, **WAYS[way])


MIXED: list[dict[str, Any]] = [{"activations_on": "host,device,host"}, {"devices": 2, "micro_batches": 2}]


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("Tied", share) for share in MIXED),
        *(
            pytest.param(name, share, marks=pytest.mark.slow)
            for name in ("T5", "BERT, classes", "U-Net")  # states of an encoder, masks, skips
            for share in ({}, MIXED[0], {"devices": 2})
        ),
    ],
)
def test_the_host_has_one_copy_of_what_many_segments_read(name: str, share: dict[str, Any]) -> None:
    """Beside the tensors that plain code has where the module is cut: the plan has those that wait on the host once
    each, also those of several devices; and the results are the module's."""
    torch.manual_seed(0)
    model, data, loss = MODELS[name]() if name in MODELS else (Tied(), batch(), None)
    segments = zfunc.segments(model.train(), data, loss)
    check(segments, model, data, loss, **{**HOST, **share})
    program = zfunc.compile(segments, precision="fp32", device="cpu", **{**HOST, **share})
    inputs = segments[-1].read_batch(data)  # pyright: ignore
    count = share.get("micro_batches", 1)
    shaped = specialize(program, inputs)
    values = zfunc.params(program, zfunc.init(program))
    x, distinct = tree_map_only(Tensor, lambda t: t[: len(t) // count], inputs[0]), dict[Any, Tensor]()
    for segment, place in zip(segments[:-1], shaped.spec.activations, strict=False):
        waits = [t for t in tree_leaves(x) if isinstance(t, Tensor)] if place == "host" else []
        distinct |= {(t.untyped_storage().data_ptr(), t.dtype): t for t in waits}
        own = {short: values[full] for short, full in segment.by_short.items()}
        x = segment.function({**own, **segment.constants}, x)
    planned = {r: r.nbytes for r in shaped.plan.graph.regions if r.buffer == "host_act"}
    assert sum(planned.values()) == count * sum(round_up(t.nbytes, 512) for t in distinct.values())


def test_equal_blocks_share_a_trace_and_16_bit_weights_have_their_own() -> None:
    torch.manual_seed(0)
    model, x = Tied(num_layers=5), batch()
    segments = zfunc.segments(model, x)
    assert [s.name for s in segments] == ["embed", *(f"layers.{i}" for i in range(5)), "head"]
    assert all(s.like(segments[1]) for s in segments[2:-1])
    program = zfunc.compile(segments, precision="bf16", device="cpu")
    assert len({id(call.passes) for call in program.calls}) == 3
    _, metrics = zfunc.train_step(program, zfunc.init(program), x)
    assert metrics.loss == pytest.approx(model(**x).item(), rel=2e-2)


def losses_of(model: nn.Module, steps: int = 3, **settings: Any) -> list[float]:
    x = batch()
    program = zfunc.compile(
        model, example=x, optimizer=zfunc.SGD(lr=0.0), precision="fp32", device="cpu", **settings
    )
    state, losses = zfunc.init(program), []
    for _ in range(steps):
        state, metrics = zfunc.train_step(program, state, x)
        losses.append(metrics.loss)
    assert zfunc.evaluate(program, state, x) == pytest.approx(model.eval()(**x).item(), rel=CLOSE)
    return losses


def test_dropout_draws_by_step_and_not_in_evaluation() -> None:
    torch.manual_seed(0)
    model = Tied(num_layers=2, p=0.5)
    torch.manual_seed(1)
    losses = losses_of(model)
    assert len({*losses}) == 3
    torch.manual_seed(1)
    assert losses == losses_of(model.train(), recompute="none")


def test_batches_of_other_shapes_and_micro_batches_are_traced_anew() -> None:
    torch.manual_seed(0)
    model = Tied()
    program = zfunc.compile(
        zfunc.segments(model, batch()),
        optimizer=zfunc.SGD(lr=0.0),
        precision="fp32",
        device="cpu",
        micro_batches=2,
    )
    state = zfunc.init(program)
    for rows, length in ((4, 10), (2, 5)):
        x = {"input_ids": ids(rows, length), "labels": ids(rows, length)}
        state, metrics = zfunc.train_step(program, state, x)
        assert metrics.loss == pytest.approx(sum(_halves(model, x)) / 2, rel=CLOSE)


def _halves(model: nn.Module, x: dict[str, Tensor]) -> list[float]:
    rows = len(next(iter(x.values()))) // 2
    return [model(**{k: t[i : i + rows] for k, t in x.items()}).item() for i in (0, rows)]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("LoKr", {"r": 4}),
        pytest.param("BOFT", {"boft_block_size": 4}, marks=pytest.mark.slow),
        pytest.param("OFT", {"r": 0, "oft_block_size": 4}, marks=pytest.mark.slow),
        pytest.param("Vera", {"r": 4}, marks=pytest.mark.slow),
        pytest.param("IA3", {"feedforward_modules": []}, marks=pytest.mark.slow),
        pytest.param("AdaLora", {"r": 4, "total_step": 10}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")
def test_adapters_of_peft_train_as_in_plain_pytorch(kind: str, given: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, batch, loss = MODELS["Llama"]()
    config = getattr(peft, f"{kind}Config")(target_modules=["v_proj", "down_proj"], **given)
    model = peft.get_peft_model(model, config).train()
    for p in model.parameters():
        if p.requires_grad and not p.any():
            nn.init.normal_(p, std=0.1)
    segments = zfunc.segments(model, batch, loss)
    assert len(segments) > 3
    check(segments, model, batch, loss, **WAYS["host"])


# --- what is refused, and what is one segment ---------------------------------------------------------------


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return grads[0] * 0.5


class OwnBackward(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return Halved.apply(super().forward(x, table))


class Branch(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) if x.sum() > 0 else x


class Mapped(Block):
    """A vmap in a vmap, of values with a gradient, and of what forward makes."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table)
        apart = torch.vmap(torch.vmap(lambda a, b: (a - b).abs(), (None, 0)), (0, None))
        distance = apart(torch.arange(8.0), torch.arange(8.0) / 2)
        return y + 0.1 * torch.vmap(lambda row: (row - row.mean()) @ distance.softmax(-1))(y)


class Differentiated(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) + torch.func.grad(lambda z: z.sin().sum())(x)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (OwnBackward, "has no HalvedBackward"),
        (Differentiated, r"has _unwrap_for_grad at .*test_any_model.py:\d+, as torch.func.grad"),
    ],
)
def test_what_a_trace_would_lose_leaves_one_segment(
    block: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Tied(block=block)
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, batch())
    assert [s.name for s in segments] == ["model"]
    assert re.search(f"one segment, because its trace .*{why}", caplog.text)
    check(segments, model, batch(), None)


class Edited(Block):
    """A constant of the batch that is copied, and the copy written to."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            halved = 0.5 * table
            halved.to(torch.float32, copy=True).zero_()
        return super().forward(x, halved)


@pytest.mark.parametrize("way", WAYS)
def test_a_vmap_is_cut_as_the_operations_that_it_makes(way: str) -> None:
    torch.manual_seed(0)
    model = Tied(block=Mapped)
    segments = zfunc.segments(model, batch())
    assert len(segments) == 5
    check(segments, model, batch(), None, **WAYS[way])


class Sized(nn.Module):
    """Parts of a row in sizes that an input says, of which a layer sees one at a time, and what a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
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
        segments = zfunc.segments(model, sized(2, 3, 1))
    (said,) = caplog.messages
    assert re.search(
        r"values of \['sizes'\] decide shapes.*test_any_model.py:\d+: each other ones cost", said
    )
    traces = segments[0].function.args[0]
    for sizes, known in (((2, 3, 1), 1), ((1, 1, 4), 2), ((2, 3, 1), 2), ((6, 1), 3)):
        check(segments, model, sized(*sizes), None, **WAYS[way])
        assert len(traces.known) == known


def test_values_of_more_elements_than_are_computed_beside_a_trace_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = sized(2, 3, 1)
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


class Selected(nn.Module):
    """Rows that are cut where an input says, and doubled where a mask of another says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

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
    assert len(segments) == 3
    check(segments, model, given(selected), None)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    state, x = zfunc.init(program), given(selected)
    assert zfunc.evaluate(program, state, x) == pytest.approx(model(**x).item(), rel=CLOSE)
    for other in {0, 1, 2, 3} - {selected}:
        with pytest.raises(IndexError, match="out of"):
            zfunc.evaluate(program, state, given(other))


class Longer(nn.Module):
    """Rows beside as many more as an input says, alive at each cut; of an odd number another tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        rows = torch.cat([x, torch.arange(1.0, 1 + int(more[0]))[:, None].expand(-1, 8)])
        shift = torch.cos(x[:1]) if int(more[0]) % 2 else 0.0
        for layer in self.layers:
            rows = torch.tanh(layer(rows) + shift)
        return F.mse_loss(rows[: len(x)], y) + rows[len(x) :].mean()


class Ends(Longer):
    """A number that eval mode alone reads."""

    def forward(self, x: Tensor, more: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y) if self.training else F.mse_loss(x[:, : int(more[0])], y[:, : int(more[0])])


def test_values_that_eval_mode_alone_reads_are_refused_there() -> None:
    x = {"x": torch.randn(4, 8), "y": torch.randn(4, 8), "more": torch.tensor([3] * 4)}
    program = zfunc.compile(Ends(), example=x, precision="fp32", device="cpu")
    state, _ = zfunc.train_step(program, zfunc.init(program), x)
    with pytest.raises(
        ValueError, match=r"test_any_model.py:\d+, .*Python number.*this is eval mode, which knows"
    ):
        zfunc.evaluate(program, state, x)


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
        *(("host", Longer), ("host", Crossed), ("ranks", Longer)),
        *(pytest.param(x, Longer, marks=pytest.mark.slow) for x in WAYS if x != "host"),
        pytest.param("two devices", Crossed, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_of_other_values_have_room_for_the_largest_at_each_cut(
    way: str, kind: type[Longer], caplog: pytest.LogCaptureFixture
) -> None:
    def given(*more: int) -> dict[str, Tensor]:
        x = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
        return {**x, "more": torch.tensor(more).repeat_interleave(2)}

    torch.manual_seed(0)
    model = kind()
    settings = {"precision": "fp32", "device": "cpu", "optimizer": zfunc.SGD(lr=0.0), "micro_batches": 2}
    own = WAYS.get(way, {"pp": 2})
    make = lambda: zfunc.compile(zfunc.segments(model, given(3, 3)), **settings, **own)  # noqa: E731
    programs = programs_of(1, make, pp=own.get("pp", 1))
    states = on_every(programs, zfunc.init)
    for more in ((3, 3), (1, 40), (40, 2), (2, 1)):
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
    programs = programs_of(2, lambda: zfunc.compile(zfunc.segments(model, given(3, 3)), **settings))
    states, apart = on_every(programs, zfunc.init), [given(3, 3), given(40, 40)]
    for program, x in zip(programs, apart, strict=True):
        specialize(program, unpacked(x, program.segments[-1]))
    for text in on_every(programs, _refusal, states, apart):
        assert re.search(r"that decide shapes, \[\[(40, 40|3, 3)\]\]: group rows by these values", text), text


class Weighted(nn.Module):
    """Arguments of which one may be None, a frozen block first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor, weights: Tensor | None, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x - y) if weights is None else weights * (x - y)).square().mean()


def test_copies_arguments_of_none_and_a_frozen_first_block_are_the_models() -> None:
    torch.manual_seed(0)
    model = Tied(block=Edited)
    check(zfunc.segments(model, batch()), model, batch(), None)
    weighted, given = Weighted(), (torch.randn(4, 8), None, torch.randn(4, 8))
    segments = zfunc.segments(weighted, given)
    assert [s.name for s in segments] == ["layers.0", "layers.2", "layers.3"]
    check(segments, weighted, given, None)


class Stateful(Block):
    """Buffers that forward writes, a value written in place, and classes as vectors."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(p)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table) + F.one_hot((x > 0).sum(-1) % 8, 8)
        y = F.relu(y, inplace=True)
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return y - self.mean


class Late(nn.Module):
    """Blocks, and a list of them, that run in training alone; a counter that all of the model increments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.extra = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 8)
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        x = x / self.steps
        for n, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if self.training or n != 1 else x
        extra = torch.zeros(())
        for layer in self.extra if self.training else ():
            extra = torch.relu(layer(x)).mean() + extra
        return F.mse_loss(self.out(x), y) + extra


def test_buffers_that_forward_writes_are_state(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Tied(block=Stateful)
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, batch())
        assert len(segments) == 5
        check(segments, model, batch(), None, recompute="min-cut")
    assert not caplog.records


def test_batch_norm_in_16_bits_has_fp32_statistics() -> None:
    """Beside torch's mixed batch norm: the rest of the module in bf16, with vectors of spectral norm; statistics,
    weight and bias in fp32."""
    torch.manual_seed(0)
    last = nn.utils.parametrizations.spectral_norm(nn.Linear(288, 4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), last)
    x, y = torch.randn(16, 3, 8, 8), torch.randn(16, 4)
    segments, optimizer = zfunc.segments(model, (x, y), F.mse_loss), zfunc.SGD(lr=0.1)
    program = zfunc.compile(segments, optimizer=optimizer, precision="bf16", device="cpu")
    state, metrics = zfunc.train_step(program, zfunc.init(program), (x, y))
    model.bfloat16()[1].float()
    loss = F.mse_loss(model(x.bfloat16()), y.bfloat16())
    assert metrics.loss == pytest.approx(loss.item(), rel=0.01)
    buffers = zfunc.buffers(program, state)
    assert {t.dtype for name, t in buffers.items() if "running" in name} == {torch.float32}
    for name, t in model[1].named_buffers():
        torch.testing.assert_close(buffers[f"1.{name}"], t, rtol=0.02, atol=1e-3)


def test_blocks_that_run_in_training_alone_are_passed_in_evaluation() -> None:
    torch.manual_seed(0)
    model, x = Late(), (torch.randn(4, 8), torch.randn(4, 8))
    segments = zfunc.segments(model, x)
    assert len(segments) == 7
    check(segments, model, x, None)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    assert zfunc.evaluate(program, zfunc.init(program), x) == pytest.approx(
        model.eval()(*x).item(), rel=CLOSE
    )


def test_a_checkpoint_goes_on_in_another_program_and_its_weights_are_the_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Tied(num_layers=2, p=0.5, block=Stateful), batch()
    ways: tuple[dict[str, Any], ...] = ({}, HOST)
    one, two = (zfunc.compile(model, example=x, precision="fp32", device="cpu", **way) for way in ways)
    state, _ = zfunc.train_step(one, zfunc.init(one), x)
    path = zfunc.save(tmp_path / "run", one, state)
    loaded = zfunc.load(path, two)
    for _ in range(2):
        state, metrics = zfunc.train_step(one, state, x)
        loaded, others = zfunc.train_step(two, loaded, x)
        assert metrics.loss == others.loss
    named = [{**zfunc.params(p, s), **zfunc.buffers(p, s)} for p, s in ((one, state), (two, loaded))]
    assert all(t.equal(named[1][name]) for name, t in named[0].items())
    # Exported, they are the model's own: but for the second name of a tied one, and constants.
    zfunc.save(tmp_path / "last", two, loaded)
    export_weights(tmp_path / "last", out := tmp_path / "model.safetensors", dtype="fp32")
    keys = model.load_state_dict(load_file(out), strict=False)
    assert {*keys.missing_keys} == {"head.weight", "table"}
    assert not keys.unexpected_keys
    assert zfunc.evaluate(two, loaded, x) == pytest.approx(model.eval()(**x).item(), rel=CLOSE)


class Deep(nn.Module):
    """Six residual MLPs in one module without a list, wide inside."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(6):
            self.add_module(f"up{i}", nn.Linear(8, 32))
            self.add_module(f"down{i}", nn.Linear(32, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i in range(6):
            x = x + getattr(self, f"down{i}")(torch.tanh(getattr(self, f"up{i}")(x)))
        return F.mse_loss(x, y)


@pytest.mark.parametrize(
    ("most", "way", "parts"),
    [
        (None, "two devices", 12),  # one operation each: two have more than an eighth
        (1, "host", 12),
        (552, "device", 6),
        (1200, "host", 3),
    ],
)
def test_no_segment_is_larger_than_asked_or_than_what_one_operation_reads(
    most: int | None, way: str, parts: int
) -> None:
    torch.manual_seed(0)
    model, x = Deep(), (torch.randn(4, 8), torch.randn(4, 8))
    segments = zfunc.segments(model, x, most=most)
    sizes = [[math.prod(p.shape) for p in s.parameters] for s in segments]
    assert max(map(sum, sizes)) <= max(most or sum(map(sum, sizes)) // 8, 8 * 32 + 32)
    # The cuts are where 8 values a row are alive, not 32.
    assert [s.name for s in segments] == [
        f"{'down' if parts == 12 and i % 2 else 'up'}{i * 6 // parts}" for i in range(parts)
    ]
    check(segments, model, x, None, **WAYS[way])
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    other = (torch.randn(2, 8), torch.randn(2, 8))
    assert zfunc.evaluate(program, zfunc.init(program), other) == pytest.approx(
        model(*other).item(), rel=CLOSE
    )


def test_what_refuses_each_cut_names_the_largest_part_and_keeps_its_settings() -> None:
    def refused(_: Any) -> Any:
        raise OutOfMemory(Message(said))

    said, x = f"use {setting('tiles', 2)}", (torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(OutOfMemory, match="use tiles=2; .*the largest part is .*, of 288 elements") as error:
        first_cut_that_fits(cuts(Deep(), x), refused, x)
    assert marked(error.value).startswith(said)


class Spaced(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(y=super().forward(x))


def test_an_output_that_is_no_tree_of_tensors_is_for_a_loss_alone() -> None:
    x = torch.randn(4, 8), torch.randn(4, 8)
    segments = zfunc.segments(Spaced(8, 8), x, lambda out, y: F.mse_loss(out.y, y))
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    state, _ = zfunc.train_step(program, zfunc.init(program), x)
    with pytest.raises(
        ValueError, match=r"model: got a batch that cannot be cut in eval mode.*SimpleNamespace, .*register_"
    ):
        zfunc.apply(program, state, x[0])


class Looped(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(super().forward(x))
        return F.mse_loss(x, y)


class Cast(Late):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, y)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Looped(8, 8), r"Looped in .*test_any_model.py reads its parameters .*several times"),
        (Cast, r"torch.autocast .* at .*test_any_model.py:\d+$"),
    ],
)
def test_a_model_of_one_segment_says_why(model: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zfunc"):
        assert len(zfunc.segments(model(), (torch.randn(4, 8), torch.randn(4, 8)))) == 1
    assert re.search(f"^model: one segment, because .*{why}", caplog.messages[-1])


class Counted(Block):
    calls = 0

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, table) * self.calls


class DataRead(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) + x @ (self.up.weight.T @ self.up.weight.data)


class Legacy(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 1

    backward = Halved.backward


class WithLegacy(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return Legacy.apply(super().forward(x, table))


class Drawn(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) + random.random()


class Noisy(Block):
    """What random numbers select, whose values no input decides."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table)
        drop = torch.zeros_like(y[..., 0]).uniform_() > 0.5
        y[drop] = y[drop] * 2
        return y


class Written(Block):
    """A parameter that forward changes, as of a teacher that follows."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.bias.mul_(0.9)
        return super().forward(x, table)


class Widened(Block):
    """A value in fp32, which meets another."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.lerp(x.float(), super().forward(x, table), 0.5)


class Packed(nn.GRU):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return super().forward(packed)[1].square().mean()


class Hooked(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table)
        y.register_hook(lambda grad: 0.1 * grad) if y.requires_grad else None
        return y


def test_a_gradient_hook_on_a_tensor_leaves_one_segment(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(Tied(block=Hooked), batch())
    assert [s.name for s in segments] == ["model"]
    assert "registers a gradient hook" in caplog.text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: zfunc.segments(Tied(block=Branch), batch()),
            r"branch on the value of a tensor.*test_any_model.py",
        ),
        (
            lambda: zfunc.segments(Tied(block=DataRead), batch()),
            r"got .data of .*test_any_model.py:\d+, whose",
        ),
        (lambda: zfunc.segments(Tied(block=WithLegacy), batch()), "got Legacy of .*without setup_context"),
        (
            lambda: zfunc.segments(Tied(block=Noisy), batch()),
            r"number of a tensor's value at .*test_any_model.py",
        ),
        (
            lambda: zfunc.segments(Tied(block=Written), batch()),
            r"write into the parameter 'layers.0.down.bias' at .*test_any_model.py:\d+.*register_buffer",
        ),
        (
            lambda: zfunc.segments(Packed(4, 4), (torch.ones(2, 3, 4), torch.tensor([3, 2]))),
            r"branch on the value of a tensor.*test_any_model.py:\d+.*mask with torch.where",
        ),
        (
            lambda: zfunc.compile(Tied(block=Widened), example=batch(), precision="bf16", device="cpu"),
            r"parameters and inputs in bfloat16 \(.*test_any_model.py:\d+.*precision='fp32'",
        ),
        (lambda: zfunc.segments(nn.Sequential(nn.LazyLinear(4)), ids()), r"'0\.weight' of a lazy module"),
        (lambda: zfunc.segments(torch.compile(Tied()), batch()), "that torch.compile returned"),  # pyright: ignore
        (lambda: zfunc.segments(Tied(block=Drawn), batch()), "random numbers from Python's random module"),
        (lambda: zfunc.segments(Tied(block=Counted), batch()), r"calls \(.*changes from call to call"),
        (lambda: zfunc.segments(Tied(), {"input_ids": ids()}), r"does not fit the model .*labels"),
        (lambda: zfunc.segments(Late(), (torch.ones(2, 9), torch.ones(2, 8))), r"fit the model .*2, 9\]"),
        (lambda: zfunc.segments(nn.Linear(4, 4), (torch.ones(2, 4), None)), r"no loss .*expected a scalar"),
        (lambda: zfunc.segments(nn.Linear(4, 4, device="meta"), (torch.ones(2, 4), None)), "meta device"),
        (lambda: zfunc.compile(Tied()), "example: got none with a Tied"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch.compile
def test_what_cannot_be_traced_says_what_to_change(
    make: Callable[[], Any], says: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=says):
        make()
    assert not caplog.messages
    assert capfd.readouterr() == ("", "")
