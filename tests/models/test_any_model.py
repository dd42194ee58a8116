"""Any module as segments: the loss and the weights of the module itself, whatever is where."""

import copy
import inspect
import logging
import math
import re
from collections import Counter, UserDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from any_models import MODELS, ids
from module_law import CLOSE, HOST, WAYS, Block, Late, Tied, batch, check
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.compiler import is_exporting
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_torchdynamo_compiling

import zfunc
from zfunc.checkpoint.export import export_weights
from zfunc.core.extents import BLOCK, whole_blocks
from zfunc.core.layout import round_up
from zfunc.engine.program.fit_to_memory import first_cut_that_fits
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.errors import Message, OutOfMemory, SettingError, marked, setting
from zfunc.models.cut.modules import cuts
from zfunc.runtime.direct_io import DirectFile

BY_DAY = {  # one of a kind and a way each; GPT-2 and DiT train by day where places are chosen by a loop's batch,
    # what an encoder's states and CTC are made of in a Translator below and a Transcriber of test_any_model_values
    "BERT, classes": "device",
    "BLOOM": "host",
    "CLIP": "two devices",
    "LSTM seq2seq": "host",
    "OLMoE": "two devices",
    "ResNet": "two devices",
    "U-Net": "two devices",
    "graph network": "device",
}


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


class Residual(nn.Module):
    """A layer of `Layers`, which adds one of `tables` to the input of its residual, or none."""

    def __init__(self, table: int | None) -> None:
        super().__init__()
        self.table, self.up, self.down = table, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        y = x if self.table is None else x + tables[self.table]
        return x + self.down(self.up(y).relu())


class Layers(nn.Module):
    """Layers with a residual between two projections; layer n reads the table number `reads[n]`."""

    def __init__(self, reads: tuple[int | None, ...]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 24), nn.Linear(8, 2)
        self.layers = nn.ModuleList(map(Residual, reads))

    def forward(self, x: Tensor) -> Tensor:
        x, *tables = self.before(x).chunk(3, -1)
        for layer in self.layers:
            x = layer(x, tables)
        return self.after(x)


@pytest.mark.parametrize("reads", [(None,) * 3, (0,) * 3, (0, 1, 0, 1, 0)])
@pytest.mark.parametrize("halves", [1, 2])
def test_equal_layers_share_functions_part_by_part(reads: tuple[int | None, ...], halves: int) -> None:
    """Also the last layer, whose output no other reads, and the last one that reads a table."""
    torch.manual_seed(0)
    model, batch = Layers(reads), (torch.randn(4, 8), torch.randn(4, 2))
    made = zfunc.segments(model, batch, F.mse_loss, most=300 // halves)  # elements of parameters
    _, *layers, _ = made
    kinds = [(n % halves, None if n % halves else reads[n // halves]) for n in range(len(layers))]
    functions = [s.function for s in layers]
    assert len(layers) == halves * len(reads)
    assert len({*functions}) == len({*kinds}) == len({*zip(functions, kinds, strict=True)})
    check(made, model, batch, F.mse_loss, **HOST)


def test_what_early_layers_alone_read_is_not_passed_to_the_end() -> None:
    """Of six layers two read the table, a third of what reaches them."""
    model, batch = Layers((0, 0, None, None, None, None)), (torch.randn(4, 8), torch.randn(4, 2))
    program = zfunc.compile(
        zfunc.segments(model, batch, F.mse_loss, most=300), device="cpu", precision="fp32"
    )
    shaped = specialize(program, program.segments[-1].read_batch(batch))  # pyright: ignore
    (*_, first, second), rest = (
        [c.input_bytes for c in own] for own in (shaped.spec.costs[:4], shaped.spec.costs[4:])
    )
    assert first == second
    assert {*rest} == {first // 3 * 2}


def test_a_cut_calls_a_model_four_times() -> None:
    """Once for the graph, twice to compare calls (in the first a mode of fake tensors asks for more), and once in
    eval mode."""
    calls = list[bool]()

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.training)
            return super().forward(x)

    batch = torch.ones(2, 4), torch.ones(2, 4)
    zfunc.segments(Counted(nn.Linear(4, 4), nn.Linear(4, 4)), batch, F.mse_loss)
    assert calls == [True, True, True, False]


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


IN_ONE_WAY = [("device", Block), ("two devices", Block), ("host", InAutocast)]
IN_ANOTHER = [
    pytest.param(*x, marks=pytest.mark.slow) for x in (("host", Block), ("two devices", InAutocast))
]


@cache
def tied(block: type[Block] = Block) -> tuple[nn.Module, Any]:
    """A model, and its segments, of which all tests share the traces."""
    torch.manual_seed(0)
    model = Tied(block=block)
    return model, zfunc.segments(model, batch())


@pytest.mark.parametrize(("way", "block"), [*IN_ONE_WAY, *IN_ANOTHER])
def test_tied_frozen_no_grad_and_autocast(way: str, block: type[Block]) -> None:
    torch.manual_seed(0)
    model, segments = tied(block)
    check(segments, model, batch(), None, **WAYS[way])


MIXED: list[dict[str, Any]] = [
    {"activations_on": "host,device,host"},
    {"devices": 2, "micro_batches": 2},
    {"recompute": "min-cut"},  # what is passed on is a residual, too
]


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
    each, also those of several devices, and residuals; and the results are the module's."""
    torch.manual_seed(0)
    if name in MODELS:
        model, data, loss = MODELS[name]()
        segments = zfunc.segments(model.train(), data, loss)
    else:
        (model, segments), data, loss = tied(), batch(), None
    check(segments, model, data, loss, **{**HOST, **share})
    program = zfunc.compile(segments, precision="fp32", device="cpu", **{**HOST, **share})
    count = share.get("micro_batches", 1)
    shaped = specialize(program, segments[-1].read_batch(data))  # pyright: ignore
    at_cuts = waiting(program, data, "host")
    distinct = dict(chain(*(x.items() for x in at_cuts)))
    residuals = sum(
        cost.stash_bytes - sum(round_up(t.nbytes, 512) for t in own.values())
        for own, cost in zip(at_cuts, shaped.spec.costs, strict=False)
        if own
    )
    planned = {r: r.nbytes for r in shaped.plan.graph.regions if r.buffer in ("host_act", "host_shared")}
    once = residuals + sum(round_up(t.nbytes, 512) for t in distinct.values())
    assert sum(planned.values()) == count * once


def waiting(program: Program, data: Any, place: str) -> list[dict[Any, Tensor]]:
    """The tensors that plain code has in the input of each segment, where those wait in `place`: of a micro-batch,
    by their memory and dtype."""
    values, (inputs, *_) = zfunc.params(program, zfunc.init(program)), program.segments[-1].read_batch(data)
    x = tree_map_only(Tensor, lambda t: t[: len(t) // program.settings.micro_batches], inputs)
    found: list[dict[Any, Tensor]] = []
    kept: list[Any] = []  # as other memory would get the address
    for segment, where in zip(program.segments[:-1], program.spec.activations, strict=False):
        tensors = [t for t in tree_leaves(x) if isinstance(t, Tensor)]
        found.append({(t.untyped_storage().data_ptr(), t.dtype): t for t in tensors if where == place})
        own = {short: values[full] for short, full in segment.by_short.items()}
        kept.append(x := segment.function({**own, **segment.constants}, x))
    return found


class Attending(nn.Module):
    """A block of rows that reads a mask, and others' states."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.read = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, states: Tensor) -> Tensor:
        seen = torch.softmax((x @ states.mT).masked_fill(mask, -9.0), -1) @ self.read(states)
        return x + F.dropout(torch.tanh(self.mix(x) + seen), 0.1, self.training)


class Translator(nn.Module):
    """States of an encoder, which all blocks of the decoder read, and a mask that all blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.encoder, self.decoder = (nn.ModuleList(Attending() for _ in range(3)) for _ in range(2))
        self.head = nn.Linear(16, 61)

    def forward(self, input_ids: Tensor, decoder_ids: Tensor, labels: Tensor) -> Tensor:
        mask = (input_ids == 0)[:, None] | (decoder_ids == 1)[:, :, None]  # 4 KiB of a row
        states = self.embed(input_ids)
        for block in self.encoder:
            states = block(states, mask, states)
        x = self.embed(decoder_ids)
        for block in self.decoder:
            x = block(x, mask, states)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def translator() -> Any:
    """Segments of a Translator, of which all tests share the traces."""
    torch.manual_seed(0)
    return zfunc.segments(Translator().train(), translated())


def translated(rows: int = 4) -> dict[str, Tensor]:
    return {name: torch.randint(61, (rows, 64)) for name in ("input_ids", "decoder_ids", "labels")}


def trained_bits(segments: Any, data: Any, **settings: Any) -> tuple[Program, list[Any], dict[str, Tensor]]:
    """The program, losses and norms of two steps of SGD, and the weights after them."""
    numbers: dict[str, Any] = {
        "precision": "fp32",
        "clip_norm": 0.5,
        "optimizer": zfunc.SGD(lr=0.1),
        **settings,
    }
    program = zfunc.compile(segments, device="cpu", **numbers)
    state, results = zfunc.init(program, seed=3), []
    for _ in range(2):
        state, metrics = zfunc.train_step(program, state, data)
        results += metrics.loss, metrics.grad_norm
    return program, results, zfunc.params(program, state)


def counted(transfer: Callable[..., None], of: Counter[str]) -> Callable[..., None]:
    """`transfer` of a DirectFile, whose bytes are added up in `of` by what is moved."""

    def counting(self: DirectFile, data: Any, offset: int, what: str = "") -> None:
        of[what] += sum(part.nbytes for part in data)
        transfer(self, data, offset, what)

    return counting


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"devices": 2, "params_on": "host", "schedule": "CriticalPath"},
    ],
)
def test_what_segments_on_host_and_disk_share_is_on_the_host(more: dict[str, Any], tmp_path: Path) -> None:
    """Also where the first of them is on the disk: the bits are those of activations on the device."""
    torch.manual_seed(0)
    segments, data, numbers = translator(), translated(), {"micro_batches": 2, "recompute": "all"}
    _, expected, weights = trained_bits(segments, data, **numbers)
    places = {"activations_on": "disk,host,disk,disk", "swap": [tmp_path]}
    program, got, same = trained_bits(segments, data, **numbers, **places, **more)
    assert repr(got) == repr(expected)
    assert all(torch.equal(t, weights[name]) for name, t in same.items())
    regions = specialize(program, program.segments[-1].read_batch(data)).plan.graph.regions
    shared = {r.index[1:]: r for r in regions if r.buffer.endswith("_shared")}
    assert {program.spec.activations[first] for first, _ in shared} >= {"disk"}
    assert {r.place for r in shared.values() if r.nbytes >= 2 * BLOCK} == {"pinned"}


class Modulated(nn.Module):
    """Blocks that read three parts of one tensor, interleaved in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.layers = nn.Linear(64, 192), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.parts(x).chunk(3, -1)
        for layer in self.layers:
            x = torch.tanh(layer(x) * scale + shift) * torch.sin(gate)
        return F.mse_loss(x, y)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_residuals_that_are_views_of_tensors_in_one_memory_find_them_apart(
    place: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = {"x": torch.randn(64, 64), "y": torch.randn(64, 64)}
    segments = zfunc.segments(Modulated(), data)
    _, expected, weights = trained_bits(segments, data, recompute="min-cut")
    swap = {"swap": [tmp_path]} if place == "disk" else {}
    _, got, same = trained_bits(segments, data, recompute="min-cut", activations_on=place, **swap)
    assert repr(got) == repr(expected)
    assert all(torch.equal(t, weights[name]) for name, t in same.items())


@pytest.mark.parametrize("order", [pytest.param("horizontal", marks=pytest.mark.slow), "vertical"])
def test_the_disk_has_one_copy_of_what_many_segments_read(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole blocks; so it is planned, written and read. The bits are those of activations on the device."""
    torch.manual_seed(0)
    segments, data = translator(), translated()
    numbers: dict[str, Any] = {"micro_batches": 2, "order": order, "recompute": "all"}
    _, expected, weights = trained_bits(segments, data, **numbers)
    moved, folders = {"write": Counter[str](), "read": Counter[str]()}, [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for name, of in moved.items():
        monkeypatch.setattr(DirectFile, name, counted(getattr(DirectFile, name), of))
    program, got, same = trained_bits(segments, data, **numbers, activations_on="disk", swap=folders)
    assert repr(got) == repr(expected)
    assert all(torch.equal(t, weights[name]) for name, t in same.items())
    at_cuts = waiting(program, data, "disk")
    times = Counter(chain(*at_cuts))
    shared = {at: t.nbytes for x in at_cuts for at, t in x.items() if times[at] > 1 and t.nbytes >= BLOCK}
    own = [sum(round_up(t.nbytes, 512) for at, t in x.items() if at not in shared) for x in at_cuts]
    assert len(shared) == 2
    once = sum(map(whole_blocks, (*own, *shared.values())))
    again = sum(whole_blocks(nbytes) * (times[at] - 1) for at, nbytes in shared.items())
    regions = specialize(program, program.segments[-1].read_batch(data)).plan.graph.regions
    assert sum(r.nbytes for r in regions if r.tier == "disk") == program.settings.in_flight * once
    assert sum(moved["write"].values()) == 4 * once  # of two micro-batches, in two steps
    assert sum(moved["read"].values()) == 4 * (once + again)


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
    (model, segments), how = tied(), {"precision": "fp32", "device": "cpu", "micro_batches": 2}
    program = zfunc.compile(segments, optimizer=zfunc.SGD(lr=0.0), **how)
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
        ("LoHa", {"r": 4}),
        pytest.param("LoKr", {"r": 4}, marks=pytest.mark.slow),
        pytest.param("C3A", {"block_size": 8}, marks=pytest.mark.slow),
        pytest.param("RandLora", {"r": 4}, marks=pytest.mark.slow),
        pytest.param("BOFT", {"boft_block_size": 4}, marks=pytest.mark.slow),
        pytest.param("OFT", {"r": 0, "oft_block_size": 4}, marks=pytest.mark.slow),
        pytest.param("Vera", {"r": 4}, marks=pytest.mark.slow),
        pytest.param("HRA", {"r": 4}, marks=pytest.mark.slow),  # reads .data
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
class Mapped(Block):
    """A vmap in a vmap, of values with a gradient, and of what forward makes."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table)
        apart = torch.vmap(torch.vmap(lambda a, b: (a - b).abs_(), (None, 0)), (0, None))
        distance = apart(torch.arange(8.0), torch.arange(8.0) / 2)
        return y + 0.1 * torch.vmap(lambda row: (row - row.mean()) @ distance.softmax(-1))(y)


class Edited(Block):
    """A constant of the batch that is copied, and the copy written to."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            halved = 0.5 * table
            halved.to(torch.float32, copy=True).zero_()
        return super().forward(x, halved)


@pytest.mark.parametrize(
    "way", [pytest.param(x, marks=() if x == "host" else pytest.mark.slow) for x in WAYS]
)
def test_a_vmap_is_cut_as_the_operations_that_it_makes(way: str) -> None:
    torch.manual_seed(0)
    model = Tied(block=Mapped)
    segments = zfunc.segments(model, batch())
    assert len(segments) == 5
    check(segments, model, batch(), None, **WAYS[way])


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


def test_an_lstm_that_gets_the_states_of_another_is_cut_where_torch_mistakes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by torch before 2.13, whose exports had them with a dimension too many."""
    layer = decompositions.one_layer_lstm

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        y, states = layer(*args, **kwargs)
        return y, tuple(x.view(1, *x.shape[-2:]) for x in states)

    monkeypatch.setattr(decompositions, "one_layer_lstm", mistaken)
    assert len(zfunc.segments(*MODELS["LSTM seq2seq"]())) > 3


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
    weight and bias in fp32. One without such statistics is in bf16."""
    torch.manual_seed(0)
    last = nn.utils.parametrizations.spectral_norm(nn.Linear(288, 4))
    of_batch = nn.BatchNorm2d(8, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), of_batch, nn.Flatten(), last)
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
    x = torch.randn(4, 8), torch.randn(4, 8)
    for model, num in ((Late(), 7), (Ends(), 5)):
        segments = zfunc.segments(model, x)
        assert len(segments) == num
        check(segments, model, x, None)
        program = zfunc.compile(segments, precision="fp32", device="cpu")
        expected = model.eval()(*x).item()
        assert zfunc.evaluate(program, zfunc.init(program), x) == pytest.approx(expected, rel=CLOSE)


class Ends(Late):
    """In eval mode neither the first block nor the last one is called."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (*self.layers, self.out) if self.training else self.layers[1:]:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class Gated(nn.Linear):
    """A block with a parameter and a buffer that eval mode alone reads, which the second block of a list lacks."""

    def __init__(self, gated: bool) -> None:
        super().__init__(8, 8)
        self.gate = nn.Parameter(torch.randn(8)) if gated else None
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        if self.training or self.gate is None:
            return y
        return y * self.gate + self.shift


class Later(nn.Module):
    """And a block and a head that eval mode alone calls, and a weight of a block that it reads once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(n != 1) for n in range(4))
        self.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (*self.layers, *(() if self.training else self.more)):
            x = layer(x)
        return F.mse_loss(x if self.training else self.head(x) @ self.more[0].weight, y)


@pytest.mark.parametrize(
    "way", [pytest.param(x, marks=[pytest.mark.slow] * (x != "two devices")) for x in WAYS]
)
def test_what_eval_mode_alone_reads_stays_as_it_is_and_evaluates(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Later(), (torch.randn(4, 8), torch.randn(4, 8))
    before, kept = copy.deepcopy(model.state_dict()), {}
    check(zfunc.segments(model, x), model, x, None, **WAYS[way])
    program = zfunc.compile(model, example=x, precision="fp32", device="cpu", **WAYS[way])
    state, _ = zfunc.train_step(program, zfunc.init(program), x)
    for again in (state, zfunc.load(zfunc.save(tmp_path / "run", program, state), program)):
        kept = {**zfunc.params(program, again), **zfunc.buffers(program, again)}
        mine = copy.deepcopy(model)
        mine.load_state_dict(kept, strict=False)
        assert zfunc.evaluate(program, again, x) == pytest.approx(mine.eval()(*x).item(), rel=CLOSE)
    same = {name for name, t in before.items() if kept.get(name, t).equal(t)}
    assert same == {x for x in before if "gate" in x or "shift" in x or x.startswith(("more", "head"))}


class Elsewhere(nn.Module):
    """Blocks, of which the last reads in eval mode a weight that the first trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x if self.training else x @ self.layers[0].weight, y)


class Remembers(Elsewhere):
    """Keeps tensors, of which it reads a mask, made in a first call, and ones, made for each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.ones = None, dict[int, Tensor]()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.delta = x - y  # as Qwen3-VL does
        if self.mask is None:
            self.mask = (torch.arange(8) > 2).float()
        if len(x) not in self.ones:
            self.ones[len(x)] = torch.ones(len(x), 1)
        for layer in self.layers:
            x = layer(x) * self.mask + self.ones[len(x)]
        self.last = x  # with its graph
        return F.mse_loss(x, y)


@pytest.mark.parametrize("ran", [False, True])
def test_what_forward_keeps_of_a_call_is_the_callers(ran: bool) -> None:
    """The module has none of a trace's tensors, and no trace has those of another."""
    torch.manual_seed(0)
    model, x, more = Remembers(), *((torch.randn(n, 8), torch.randn(n, 8)) for n in (4, 6))
    plain = copy.deepcopy(model)
    if ran:
        model(*x)
    before = {**vars(model), "ones": {**model.ones}}
    program = zfunc.compile(zfunc.segments(model, x), precision="fp32", device="cpu")
    state = zfunc.init(program)
    for data in (x, more):
        _, metrics = zfunc.train_step(program, zfunc.init(program), data)
        expected = pytest.approx(plain(*data).item(), rel=CLOSE)
        assert metrics.loss == zfunc.evaluate(program, state, data) == expected
    assert {**vars(model), "ones": {**model.ones}} == before


class Assigned(Elsewhere):
    """Buffers of each block and of the model that forward assigns: what follows them, one another, and a value
    that is written into later. One beside them is None."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self, *self.layers):
            module.register_buffer("none", None)
            for n, name in enumerate(("steps", "mean", "before")):
                module.register_buffer(name, torch.full((8,), n / 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps = self.steps + 1
        self.mean, self.before = self.before, self.mean
        for layer in self.layers:
            old = layer.mean
            x = layer(x)
            layer.steps = written = layer.steps + x.detach().mean()
            layer.before, layer.mean = layer.mean, 0.9 * layer.mean + 0.1 * x.detach().mean(0)
            written.mul_(0.5)
            x = torch.tanh(x - old) + layer.mean + layer.before
        return F.mse_loss(x, y)


def test_buffers_that_forward_assigns_are_written_where_the_value_is_made() -> None:
    """torch.export writes them last, which would make one segment of all that reads them."""
    torch.manual_seed(0)
    model, data = Assigned(), (torch.randn(4, 8), torch.randn(4, 8))
    segments = zfunc.segments(model, data)
    assert len(segments) == len(model.layers)
    check(segments, model, data, None)


class Kept(Elsewhere):
    """Assigns to the buffer "kept" of a block what `value` makes of the model."""

    def __init__(self, kept: Tensor | None, value: Callable[[nn.Module], Tensor | None]) -> None:
        super().__init__()
        self.value = value
        for layer, t in zip(self.layers, (kept, torch.ones(8)), strict=False):
            layer.register_buffer("kept", t)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        self.layers[0].kept = self.value(self)
        return loss + self.layers[1].kept.sum()


def test_assignments_that_no_write_stands_for_are_refused() -> None:
    """Plain PyTorch goes on with a buffer where none was, or with one tensor under two names."""
    kept, tied = torch.zeros(8), Kept(torch.zeros(8), lambda m: m.layers[0].kept + 1)
    tied.layers[1].kept = tied.layers[0].kept
    of_other = Kept(kept, lambda m: m.layers[1].kept)
    for model, got in (
        (Kept(None, lambda _: torch.ones(8)), r"of torch.float32\[8\] to the buffer .*, expected its None"),
        (Kept(kept, lambda _: None), r"of None to the buffer .*, expected its torch.float32\[8\]"),
        (of_other, "to the buffer 'layers.0.kept', whose memory another tensor"),
        (Kept(kept, lambda m: m.layers[1].bias.detach()), "to .*, whose memory another tensor"),
        (tied, "to .*, whose memory another tensor"),
    ):
        with pytest.raises(SettingError, match=f"model: got an assignment {got}"):
            zfunc.segments(model, (torch.randn(4, 8), torch.randn(4, 8)))


class Whole(Elsewhere):
    """One segment; writes into one buffer, and assigns another one of a block, in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("steps", torch.zeros(()))
            layer.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            layer.steps += 1
            layer.passes = layer.passes + 1
        return super().forward(x, y) + torch.func.grad(torch.sin)(y.mean())


def test_evaluation_of_one_segment_changes_no_buffer() -> None:
    data = torch.randn(4, 8), torch.randn(4, 8)
    segments = zfunc.segments(Whole(), data)
    assert len(segments) == 1
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    state, _ = zfunc.train_step(program, zfunc.init(program), data)
    for _ in range(2):
        zfunc.evaluate(program, state, data)
    buffers = zfunc.buffers(program, state)
    assert len(buffers) == 8
    assert {*map(float, buffers.values())} == {1.0}


class Made(Elsewhere):
    """A table in a buffer that is made anew for a batch, and read in all blocks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = torch.arange(8) / 8
        if len(self.table) == 8:
            self.table.copy_(made)
        else:
            self.table = made
        for layer in self.layers:
            x = layer(x) + self.table
        return F.mse_loss(x, y)


def test_why_segments_are_one_names_blocks_and_another_shape_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = torch.randn(4, 8), torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, "zfunc"):
        assert len(zfunc.segments(Made(8), data)) == 1
    assert "the code before layers.0 and the code after layers.3 are one" in caplog.text
    with pytest.raises(
        ValueError, match=r"float32\[8\] to the buffer 'table', expected its torch.float32\[3\]"
    ):
        zfunc.segments(Made(3), data)


class Stepped(Elsewhere):
    """A counter that blocks read and assign."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.count
            self.count = self.count + 1
        return F.mse_loss(x, y)


def test_a_write_of_an_assigned_buffer_is_at_the_line_that_makes_the_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "zfunc"):
        assert len(zfunc.segments(Stepped(), (torch.randn(4, 8), torch.randn(4, 8)))) == 1
    line = inspect.getsourcelines(Stepped)[1] + 10
    assert caplog.text.rstrip().endswith(f"is written at {__file__}:{line}")


def test_a_second_call_that_finds_what_a_first_kept_is_no_change() -> None:
    """Fake tensors keep results: of the calls that are compared, the first alone asks for a device."""
    assert len(zfunc.segments(*MODELS["SD3"]())) == 11


class Again(Elsewhere):
    """Checkpoints of blocks that count their calls, by an assignment, and have running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in self.layers)
        self.register_buffer("calls", torch.zeros(()))

    def block(self, n: int, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.norms[n](self.layers[n](x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for n in range(len(self.layers)):
            x = checkpoint(self.block, n, x, use_reentrant=False)
        return F.mse_loss(x, y)


def test_buffers_that_plain_pytorch_writes_again_in_backward_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, model = (torch.randn(4, 8), torch.randn(4, 8)), Again()
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, data)
    assert re.search(
        r"checkpoint at .*test_any_model.py:\d+ writes the buffer '[a-z_.0]+' and 4 more once a step",
        caplog.text,
    )
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    state, _ = zfunc.train_step(program, zfunc.init(program), data)
    model(*data).backward()
    assert zfunc.buffers(program, state)["calls"] == 4
    assert model.calls == 8


class Reentrant(Elsewhere):
    """Checkpoints in torch's older way, of which one is in another, and a loss of one element."""

    def inner(self, x: Tensor) -> Tensor:
        return torch.sin(checkpoint(torch.tanh, x, use_reentrant=True))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(self.inner, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        return F.mse_loss(x, checkpoint(torch.tanh, y, use_reentrant=True))[None]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("way", WAYS)
def test_reentrant_checkpoints_and_a_loss_of_one_element_train(way: str) -> None:
    torch.manual_seed(0)
    data, model = (torch.randn(4, 8), torch.randn(4, 8)), Reentrant()
    segments = zfunc.segments(model, data)
    assert len(segments) == 4
    check(segments, model, data, None, **WAYS[way])
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    check(zfunc.segments(plain, data, lambda y, t: F.mse_loss(y, t).view(1, 1)), plain, data, F.mse_loss)


class Vocoder(Elsewhere):
    """Filters of a wave's spectrum, of which torch.istft makes a wave again."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        way: Any = {"n_fft": 14, "hop_length": 7, "window": torch.hann_window(14)}
        spectrum = torch.stft(x, **way, return_complex=True).mT  # [rows, times, 8]
        for layer in self.layers:
            spectrum = spectrum * torch.sigmoid(layer(spectrum.abs()))
        return F.mse_loss(torch.istft(spectrum.mT, **way, length=56), y)


def test_a_wave_is_made_of_a_spectrum() -> None:
    torch.manual_seed(0)
    model, data = Vocoder(), (torch.randn(4, 56), torch.randn(4, 56))
    segments = zfunc.segments(model, data)
    assert len(segments) > 1
    check(segments, model, data, None)


class Recorded(Elsewhere):
    """Blocks that a profiler sees by name."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            with torch.profiler.record_function(f"layer {n}"):
                x = layer(x)
        return F.mse_loss(x, y)


def test_blocks_that_a_profiler_sees_train() -> None:
    model, data = Recorded(), (torch.randn(4, 8), torch.randn(4, 8))
    segments = zfunc.segments(model, data)
    assert len(segments) > 1
    check(segments, model, data, None)


WATCHED: Any = None


def watch(_: nn.Module, __: Any, out: Tensor) -> None:
    WATCHED.seen[-1] = out


class Hooked(Elsewhere):
    """The loss reads what hooks of blocks write into an attribute of the model, which they close over or find in a
    global, and an attribute of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = dict[int, Tensor]()
        for n, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda _, given, out, n=n: self.seen.update({n: given[0] - out}))
        self.layers[0].register_forward_hook(watch)
        self.layers[0].weight.share = 0.5  # type: ignore[assignment]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        share: Any = self.layers[0].weight.share
        return F.mse_loss(x, y) + share * sum(t.pow(2).mean() for t in self.seen.values())


def test_hooks_of_a_copy_write_into_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they add to the loss was left out of it, and the module had the tensors of traces."""
    torch.manual_seed(0)
    model, x = Hooked(), (torch.randn(4, 8), torch.randn(4, 8))
    monkeypatch.setitem(globals(), "WATCHED", model)
    program = zfunc.compile(zfunc.segments(model, x), precision="fp32", device="cpu")
    assert len(program.segments) > 1
    assert not model.seen
    _, metrics = zfunc.train_step(program, zfunc.init(program), x)
    assert metrics.loss == pytest.approx(model(*x).item(), rel=CLOSE)


class Reused(Elsewhere):
    """In eval mode a block and the code behind all read what earlier code trains, and a constant once more, and
    nothing calls the head. Or, if `early`, the first block reads what the last one trains."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.embed, self.head = early, nn.Embedding(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x) * self.table
        for n, layer in enumerate(self.layers):
            x = layer(x)
            if not self.training and n == (0 if self.early else 2):
                x = x + self.layers[3 if self.early else 0].bias
        x = self.head(x) if self.training else x @ self.layers[0].weight @ self.embed.weight * self.table
        return F.mse_loss(x, y)


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_reads_what_earlier_blocks_train(way: str) -> None:
    torch.manual_seed(0)
    x = torch.randint(8, (4,)), torch.randn(4, 8)
    for early in (False, *[True] * (way == "device")):
        model = Reused(early)
        program = zfunc.compile(model, example=x, precision="fp32", device="cpu", **WAYS[way])
        state, _ = zfunc.train_step(program, zfunc.init(program), x)
        model.load_state_dict(zfunc.params(program, state), strict=False)
        says = "other parameters in eval mode.*: read there what this or an earlier block trains"
        with pytest.raises(ValueError, match=says) if early else nullcontext():
            assert zfunc.evaluate(program, state, x) == pytest.approx(model.eval()(*x).item(), rel=CLOSE)


class Sometimes(Elsewhere):
    """Blocks that follow their weights in a buffer, and count evaluations; a loss that falls with each step, by a
    counter that the first block reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        for layer in self.layers:
            layer.register_buffer("mean", torch.randn(8))
            layer.register_buffer("evaluations", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        for n, layer in enumerate(self.layers):
            x = layer(x) + (self.steps if n < 2 else 0)
            if self.training:
                layer.mean.lerp_(layer.weight.detach().mean(0), 0.5)
            else:
                layer.evaluations.add_(1)
            x = torch.tanh(x + layer.mean) + layer.evaluations
        return F.mse_loss(x, y)


def test_evaluation_is_cut_where_training_is_though_it_writes_other_buffers() -> None:
    """Blocks that are one, for what training writes into buffers, were several in evaluation, which was refused."""
    torch.manual_seed(0)
    model, x = Sometimes(), (torch.randn(4, 8), torch.randn(4, 8))
    segments = zfunc.segments(model, x)
    assert len(segments) > 2
    check(segments, model, x, None)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    state, _ = zfunc.train_step(program, zfunc.init(program), x)
    model.load_state_dict({**zfunc.params(program, state), **zfunc.buffers(program, state)}, strict=False)
    expected = model.eval()(*x).item()
    for _ in range(2):
        assert zfunc.evaluate(program, state, x) == pytest.approx(expected, rel=CLOSE)


class Wondering(Block):
    """How it runs decides what it computes; a module is cast to what it is, and read are `.data`, a constant of
    complex numbers, and a part of a list of parameters."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.shifts = nn.ParameterList(torch.full((8,), n / 4) for n in range(3))
        self.turns = torch.polar(torch.ones(8), torch.linspace(0, 1, 8))  # complex numbers

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table) + x @ (self.up.weight.T @ self.up.weight.data)
        y = y * (2 if is_torchdynamo_compiling() or is_exporting() else 1)
        y = y + 0.1 * (x * self.turns).real
        y = y * (1 if torch.is_grad_enabled() and y.requires_grad else 0.5) + nn.LayerNorm(8)(x).mean()
        return self.down.to(x.device, x.dtype)(self.up.float()(y)) + 0.1 * sum(self.shifts[1:])


def test_code_that_asks_how_it_runs_computes_what_it_does_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    model, x = Tied(block=Wondering), batch()
    segments = zfunc.segments(model, x)
    assert len(segments) > 3
    check(segments, model, x, None, **HOST)
    program = zfunc.compile(segments, precision="fp32", device="cpu", **HOST)
    with torch.no_grad():
        expected = model.eval()(**x).item()
    assert zfunc.evaluate(program, zfunc.init(program), x) == pytest.approx(expected, rel=CLOSE)


def test_a_parameter_of_another_class_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Parameter): ...

    model, x = Elsewhere(), (torch.randn(4, 8), torch.randn(4, 8))
    model.layers[1].bias = Own(torch.zeros(8))
    zfunc.segments(model, x)
    assert "forward gets a tensor for 'layers.1.bias', which is no Own there" in caplog.text


def test_a_checkpoint_goes_on_in_another_program_and_its_weights_are_the_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = (
        Tied(num_layers=2, p=0.5, block=Stateful),
        UserDict(batch()),
    )  # as collators of transformers return
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
        pytest.param(1, "host", 12, marks=pytest.mark.slow),
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
