"""An `nn.Sequential` that ends in a loss trains as plain PyTorch does."""

import copy

import pytest
import torch
from torch import nn

import zfunc

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
