"""Segments: modules as pure functions, alike ones recognised, initial values where they are needed; an
`nn.Sequential` that ends in a loss trains as plain PyTorch does."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import tied_gpt
from torch import Tensor, nn

import zfunc
from zfunc.models.gpt import gpt_segments, modules
from zfunc.models.gpt_config import GPTConfig


class Rotary(nn.Module):
    """A module with a buffer that reset_parameters rebuilds."""

    def __init__(self, angle: float) -> None:
        super().__init__()
        self.angle = angle
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("table", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.table.copy_(torch.arange(4) * self.angle)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.table


def test_names_and_values_are_the_modules() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    s = zfunc.segment("body", module)
    assert [p.name for p in s.parameters] == ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]
    assert all(torch.equal(s.initial(0)[f"body.{k}"], v) for k, v in module.named_parameters())


def test_calling_a_segment_is_calling_the_module() -> None:
    module = Rotary(0.5)
    s = zfunc.segment("r", module)
    x = torch.randn(2, 4)
    values = {short: s.initial(0)[full] for short, full in s.by_short.items()}
    assert torch.equal(s.function({**values, **s.constants}, x), module(x))


def test_a_meta_module_is_made_real_by_its_own_reset_the_same_for_the_same_seed() -> None:
    with torch.device("meta"):
        module = Rotary(0.5)
    s = zfunc.segment("r", module)
    assert torch.equal(s.constants["table"], torch.arange(4) * 0.5)
    assert torch.equal(s.initial(3)["r.weight"], s.initial(3)["r.weight"])
    assert not torch.equal(s.initial(3)["r.weight"], s.initial(4)["r.weight"])
    assert module.weight.is_meta


def test_a_meta_module_without_a_reset_is_refused_by_the_parameters_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(4))

    with torch.device("meta"):
        module = Bare()
    with pytest.raises(ValueError, match="segment 'bare': w has no value.*reset_parameters"):
        zfunc.segment("bare", module).initial(0)


def test_a_module_partly_on_meta_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="partly on the meta device"):
        zfunc.segment("mixed", module)


def test_a_module_tied_inside_has_one_parameter() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    s = zfunc.segment("body", module)
    assert [p.name for p in s.parameters] == ["body.0.weight"]
    assert list(s.initial(0)) == ["body.0.weight"]


def test_segments_that_compute_the_same_are_alike() -> None:
    def block(**change: Any) -> zfunc.Segment:
        config = GPTConfig(**{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, **change})
        return zfunc.segment("b", dict(modules(config))["block0"])

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert block().like(block())
    assert not block().like(block(dropout=0.1))
    assert not block().like(block(num_attention_heads=4))
    assert not zfunc.segment("a", nn.Linear(2, 2)).like(zfunc.segment("b", Twice(2, 2)))
    assert not zfunc.segment("a", nn.LayerNorm(4, eps=1e-5)).like(
        zfunc.segment("b", nn.LayerNorm(4, eps=1e-6))
    )
    frozen = zfunc.segment("c", nn.Linear(2, 2).requires_grad_(False))
    assert not zfunc.segment("a", nn.Linear(2, 2)).like(frozen)
    assert zfunc.segment("a", Rotary(0.5)).like(zfunc.segment("b", Rotary(0.5)))
    assert not zfunc.segment("a", Rotary(0.5)).like(zfunc.segment("b", Rotary(0.7)))  # the attribute differs


def test_alike_segments_share_one_trace() -> None:
    segments = [zfunc.segment(n, m) for n, m in modules(GPTConfig(num_layers=5, hidden_size=8, tied=False))]
    program = zfunc.compile(segments, device="cpu")
    assert len({id(call.passes) for call in program.calls}) == 3


# --- an nn.Sequential ---------------------------------------------------------------------------------------

BATCH = (torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 4, 5]))


def tied() -> nn.Sequential:
    """Its first and its third linear layer are one; it has children without parameters at both ends."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    return nn.Sequential(
        nn.Flatten(), layer, nn.GELU(), nn.Linear(8, 8, bias=False), layer, nn.CrossEntropyLoss()
    )


def test_a_sequential_trains_as_in_pytorch_with_the_names_of_its_state_dict() -> None:
    model = tied()
    program = zfunc.compile(
        model, optimizer=zfunc.SGD(lr=0.1), precision="fp32", device="cpu", micro_batches=2
    )
    assert [s.name for s in program.segments] == ["1", "3", "4"]
    state = zfunc.init(program)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = plain[-1](plain[:-1](BATCH[0]), BATCH[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state, metrics = zfunc.train_step(program, state, BATCH)
        assert abs(metrics.loss - float(loss.detach())) < 1e-6
    trained = zfunc.params(program, state)
    assert trained.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.allclose(trained[name], p, atol=1e-6) for name, p in plain.named_parameters())
    assert torch.allclose(zfunc.apply(program, state, BATCH[0]), plain[:-1](BATCH[0]), atol=1e-5)


def test_a_sequential_without_a_loss_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"ends in a Linear, expected a loss .*append such as nn\.CrossEntropyLoss"
    ):
        zfunc.compile(tied()[:-1])
    with pytest.raises(ValueError, match="segments: got none"):
        zfunc.compile(nn.Sequential())


# --- halves -------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A block of the kinds that may be cut, or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attn, self.mlp, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.last = nn.BatchNorm1d(5) if kind == "batch norm" else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "parallel":
            return x + self.attn(self.norm(x)) + self.mlp(self.norm(x))
        if self.kind == "one mask":
            kept = (torch.rand(len(x), 1, 1) > 0.5).float()
            x = x + self.attn(x) * kept
            return x + self.mlp(x) * kept
        if self.kind == "chain":
            return self.mlp(torch.tanh(self.attn(x)))
        x = x + self.attn(self.norm(x)) * torch.tensor(2.0)
        if self.kind == "in place":
            return x.add_(self.mlp(x))
        if self.kind == "no gradient":
            with torch.no_grad():
                return x + self.mlp(x)
        if self.kind == "three":
            x = x + self.mlp(x)
        if self.kind == "edited":
            y = x + self.mlp(x)
            y[..., 0].mul_(2)
            return y
        return x + self.last(self.mlp(self.norm(x) if self.kind == "shared" else x))


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


ROWS = torch.randn(4, 5, 8), torch.randint(0, 4, (4, 5))


def blocks(kind: str) -> list[zfunc.Segment]:
    torch.manual_seed(0)
    return [zfunc.segment(f"b{i}", Residual(kind)) for i in range(2)] + [zfunc.segment("loss", Classes())]


def trained(segments: Any, batch: Any = ROWS, **settings: Any) -> tuple[Any, ...]:
    """What two steps tell and leave, and an evaluation."""
    program = zfunc.compile(
        segments, **{"precision": "fp32", "device": "cpu", "bucket_size": 900, **settings}
    )
    state = zfunc.init(program, seed=1)
    told: list[Any] = []
    for _ in range(2):
        state, m = zfunc.train_step(program, state, batch)
        told.append((m.loss, m.grad_norm))
    values = {name: x.clone() for name, x in sorted(zfunc.params(program, state).items())}
    return [*told, zfunc.evaluate(program, state, batch)], values, program, state


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """To the bit."""
    equal = all(torch.equal(x, other[1][name]) for name, x in one[1].items())
    return one[0] == other[0] and one[1].keys() == other[1].keys() and equal


@pytest.mark.parametrize(
    ("kind", "after", "first"),
    [
        ("plain", None, {"attn", "norm"}),
        ("plain", "attn", {"attn", "norm"}),
        ("shared", None, {"attn", "norm"}),
        ("edited", "attn", {"attn", "norm"}),
        ("three", "attn", {"attn", "norm"}),
        ("chain", "attn", {"attn", "norm"}),  # what nobody reads is the first half's
    ],
)
def test_blocks_in_halves_are_trained_as_whole_ones(kind: str, after: str | None, first: set[str]) -> None:
    whole = blocks(kind)
    halves = zfunc.cut_blocks(whole, after=after, example=ROWS)
    assert [s.name for s in halves] == ["b0/1", "b0/2", "b1/1", "b1/2", "loss"]
    assert {x.partition(".")[0] for x in halves[0].short} == first
    assert halves[1].shared == ({"b0.norm.weight", "b0.norm.bias"} if kind == "shared" else set())
    assert [s.like(halves[0]) for s in halves] == [True, False, True, False, False]
    for recompute in ("all", "none"):
        assert same(trained(whole, recompute=recompute), trained(halves, recompute=recompute))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "parallel",
            "no value through which all paths go, expected one, the sum after attention: leave it whole",
        ),
        ("in place", "no value .*changed in place"),
        ("three", "2 values .*: pass after=, the name of a submodule before it"),
        ("chain", "2 values"),
        ("no gradient", r"other operations in halves than in the whole, .*torch\.no_grad .*leave it whole"),
        ("one mask", "random numbers that both halves read"),
        ("batch norm", "buffers that forward changes"),
    ],
)
def test_what_cannot_be_cut_stays_whole_and_says_why(
    kind: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = blocks(kind)
    with caplog.at_level("INFO"):
        assert list(zfunc.cut_blocks(whole, example=ROWS)) == whole
    assert re.search(f"whole: b0, b1: got {message}", caplog.text)
    if kind not in ("three", "chain"):
        with pytest.raises(ValueError, match="segment 'b0': got"):
            zfunc.cut_blocks(whole, after="attn", example=ROWS)


def test_a_name_or_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="after: got 'self_attn', expected the name of a submodule"):
        zfunc.cut_blocks(blocks("plain"), after="self_attn", example=ROWS)
    with pytest.raises(ValueError, match="no value after 'mlp' through which"):
        zfunc.cut_blocks(blocks("plain"), after="mlp", example=ROWS)
    with pytest.raises(ValueError, match=r"segment 'b0': got an error .*pass example=\(inputs, targets\)"):
        zfunc.cut_blocks(blocks("plain"))
    half = zfunc.cut_blocks(blocks("plain"), example=ROWS)[0]
    with pytest.raises(
        ValueError, match="got a cache for half a block, expected none: generate with the whole"
    ):
        half.evaluation({}, ROWS[0], None)


DOCUMENTS = torch.cat([torch.arange(10), torch.arange(6)]).expand(12, 16).contiguous()
ELSEWHERE = {"params_on": "host", "activations_on": "host", "micro_batches": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "min-cut"},
        {"recompute": "none", "precision": "bf16", "fp32_params": "*.ln_*"},
        {"tiles": 2, **ELSEWHERE},
        pytest.param({"precision": "bf16", **ELSEWHERE}, marks=pytest.mark.slow),
        pytest.param({"tiles": 4, "precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_gpt_in_halves_is_trained_as_the_whole(settings: Any, packed: bool, tmp_path: Path) -> None:
    """On sequences of one document or two; a checkpoint of either goes on in the other."""
    segments, batch = tied_gpt(num_layers=2)
    inputs, targets = batch(0)
    rows = ({"input_ids": inputs, "position_ids": DOCUMENTS} if packed else inputs, targets)
    whole, halves = (trained(s, rows, **settings) for s in (segments, zfunc.cut_blocks(segments)))
    assert same(whole, halves)
    paths = [zfunc.save(tmp_path / name, *x[2:]) for name, x in (("whole", whole), ("halves", halves))]
    loaded = [zfunc.params(p, zfunc.load(f, p)) for f, p in ((paths[0], halves[2]), (paths[1], whole[2]))]
    assert all(torch.equal(x, values[name]) for values in loaded for name, x in whole[1].items())
    if "params_on" in settings:
        slots, smaller = (
            sum(r.nbytes for r in p.plan.graph.regions if r.buffer == "weight_slot")
            for *_, p, _ in (whole, halves)
        )
        assert smaller < slots


def test_a_meta_model_in_halves_has_the_initial_values_of_the_whole() -> None:
    segments = gpt_segments(GPTConfig(vocab_size=64, seq_length=16, num_layers=2, hidden_size=32))
    whole, halves = (
        zfunc.params(p, zfunc.init(p, seed=3))
        for p in (zfunc.compile(s, device="cpu") for s in (segments, zfunc.cut_blocks(segments)))
    )
    assert all(torch.equal(x, halves[name]) for name, x in whole.items())
