"""The law of a module in segments: the losses and the weights of the module itself; modules that tests share."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_models import ids
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc.engine.trace.batches import unmarked
from zfunc.models.cut.batch_call import call_of
from zfunc.models.cut.called import CalledModel

HOST = {"params_on": "host", "activations_on": "host", "recompute": "all", "bucket_size": 2000}
WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": HOST,
    "two devices": {"devices": 2, "params_on": "host"},
}
STEPS, CLOSE = 3, 2e-6


def trained(model: nn.Module, batch: Any, loss: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of steps of SGD by plain PyTorch, and the tensors after them."""
    model, losses = copy.deepcopy(model), []
    called, optimizer = CalledModel(model, loss), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        y = called._called(unmarked(call_of(batch, loss is not None)[0]))  # buffers assigned as torch does
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
