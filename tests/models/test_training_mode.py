"""Models are run in eval mode for what that alone reads, unless a trace in training mode shows it reads no more."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc
from zfunc.models.cut import modules


class Layer(nn.Linear):
    """Asks nobody for its mode; those below read `gate` in eval mode, each in a way of its own."""

    rate, other = 0.0, 0.0

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gate, self.drop = nn.Parameter(torch.ones(8)), nn.Dropout(0.5)

    def gated(self, x: Tensor) -> Tensor:
        return x * self.gate

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Branches(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else self.gated(y)


class AsksByName(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (self.gated, torch.relu)[getattr(self, "training")](y)  # noqa: B009


class AsksAnother(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(super().forward(x))
        return y if self.drop.training else self.gated(y)


class Rate(Layer):
    """What attention of transformers does."""

    rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        y, p = super().forward(x), 0.0 if not self.training else self.rate
        return y if p == self.rate else self.gated(y)


class EqualRate(Rate):
    rate = 0.0


class CalledRate(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (self.gated(y).sum() if not self.training else 0.0)


class Drops(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class Switched(Layer):
    """Keeps its mode in an attribute of its own."""

    gates = False

    def train(self, mode: bool = True) -> "Switched":
        self.gates = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.gated(y) if self.gates else y


class NoRate(Switched):
    """Has in training mode no rate of the other."""

    def forward(self, x: Tensor) -> Tensor:
        y = Layer.forward(self, x)
        if self.gates:
            p = 1.0
        p = 0.0 if self.training else p
        return self.gated(y) if p else y


class OwnProperty(Layer):
    own = True

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.own

    @training.setter
    def training(self, mode: bool) -> None:
        self.own = mode

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.own else self.gated(y)


class Model(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def late(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The names that each run of `model` in eval mode found to be read there alone."""
    found, find = list[Any](), modules._find_late

    def finding(traces: Any, *given: Any) -> None:
        find(traces, *given)
        found.append({x.rpartition(".")[2] for x in traces.late})

    monkeypatch.setattr(modules, "_find_late", finding)
    x = torch.randn(4, 8)
    zfunc.segments(model, (x, x))
    assert "training" not in vars(nn.Module)
    return found


@pytest.mark.parametrize(
    "layer", [Branches, AsksByName, AsksAnother, Rate, CalledRate, Switched, NoRate, OwnProperty]
)
def test_what_depends_on_the_mode_is_run_in_eval_mode(
    layer: type[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert late(Model(layer).train(), monkeypatch) == [{"gate"}]


@pytest.mark.parametrize("layer", [Layer, Drops, EqualRate])
def test_what_does_not_is_not(layer: type[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not late(Model(layer).train(), monkeypatch)


def test_nor_is_a_layer_that_trains_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(Branches).train()
    for layer in model.layers:
        layer.eval()
    assert not late(model, monkeypatch)
