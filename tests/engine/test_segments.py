"""Segments: modules as pure functions, alike ones recognised, initial values where they are needed; an
`nn.Sequential` that ends in a loss trains as plain PyTorch does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc
from zfunc.models.gpt import modules
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
    with pytest.raises(ValueError, match="segment 'bare': got no value for w, .*reset_parameters"):
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
