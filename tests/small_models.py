"""Small models for the laws, each with its batch: every shape of thing a model may contain, in seconds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import zfunc
from zfunc.core.layout import Parameter
from zfunc.engine.state.state import State
from zfunc.models.gpt import modules
from zfunc.models.gpt_config import GPTConfig

Batch = tuple[Any, Any]


def tied_gpt(dropout: float = 0.0, num_layers: int = 3) -> tuple[list[zfunc.Segment], Callable[[int], Batch]]:
    """A GPT-2: tied embedding, tokens in, 64 of vocabulary."""
    config = GPTConfig(
        **{"vocab_size": 64, "seq_length": 16, "num_layers": num_layers, "hidden_size": 32},
        **{"num_attention_heads": 2, "dropout": dropout},
    )
    torch.manual_seed(0)
    tied = {"out.weight": "embed.tok.weight"}
    segments = [zfunc.segment(n, m, share=tied if n == "head" else None) for n, m in modules(config)]

    def batch(i: int) -> Batch:
        tokens = torch.randint(0, 64, (12, 17), generator=torch.Generator().manual_seed(i))
        return tokens[:, :-1], tokens[:, 1:]

    return segments, batch


class Loss(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return F.mse_loss(self.out(x.to(self.out.weight.dtype)).squeeze(-1).float(), targets.float())


class LossAndMore(Loss):
    """Auxiliary outputs: one that would have a gradient, one of whole numbers, one that is no tensor."""

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y = self.out(x.to(self.out.weight.dtype)).float()
        return super().forward(x, targets), {"mean": y.mean(), "above": (y > 0).sum(), "rows": len(x)}


class Scale(nn.Module):
    """A parameter of one element, a buffer, and a frozen parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, width))
        self.gain = nn.Parameter(torch.full((width,), 0.9), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.scale + self.shift.to(x.dtype)) * self.gain).to(x.dtype)


class WithEmpty(nn.Module):
    """A module beside parameters without elements."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.columns, self.none = nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.zeros(0))
        self.fixed = nn.Parameter(torch.zeros(0, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.columns.sum() + self.none.sum() + self.fixed.sum()


def regression(batch: int = 12) -> Callable[[int], Batch]:
    def make(i: int) -> Batch:
        g = torch.Generator().manual_seed(i)
        return torch.randn(batch, 8, generator=g), torch.randn(batch, generator=g)

    return make


def odd_sizes() -> tuple[list[zfunc.Segment], Callable[[int], Batch]]:
    """Sizes of 1, frozen parameters, buffers, a segment without parameters, one huge beside many tiny."""
    torch.manual_seed(0)
    parts: list[tuple[str, nn.Module]] = [
        ("inlet", nn.Sequential(nn.Linear(8, 16), nn.GELU())),
        ("scale", Scale(16)),
        ("nothing", nn.Tanh()),
        ("huge", nn.Linear(16, 300)),
        ("back", nn.Linear(300, 16, bias=False)),
        ("loss", LossAndMore(16)),
    ]
    return [zfunc.segment(n, m) for n, m in parts], regression()


def frozen_below() -> tuple[list[zfunc.Segment], Callable[[int], Batch]]:
    """Nothing to train in the first two segments: backward stops above them."""
    torch.manual_seed(0)
    frozen = nn.Linear(8, 16).requires_grad_(False)
    parts = [
        ("frozen", frozen),
        ("act", nn.GELU()),
        ("body", nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2))),
        ("loss", LossAndMore(16)),
    ]
    return [zfunc.segment(n, m) for n, m in parts], regression()


def norms() -> tuple[list[zfunc.Segment], Callable[[int], Batch]]:
    """Buffers that forward changes: of batch norms, one below all that is trained and one in the loss, and of a
    spectral norm."""
    return [zfunc.segment(n, m) for n, m in norm_modules()], regression()


def norm_modules() -> list[tuple[str, nn.Module]]:
    """Its modules. What comes before a norm has no bias, whose gradient would be rounding errors."""
    torch.manual_seed(0)
    plain, last = nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False)
    return [
        ("frozen", nn.Sequential(plain, nn.BatchNorm1d(16)).requires_grad_(False)),
        ("spectral", nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.GELU())),
        ("batch", nn.Sequential(last, nn.BatchNorm1d(16), nn.GELU())),
        ("loss", NormedLoss(16)),
    ]


class NormedLoss(Loss):
    """The loss behind a batch norm without weights."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width, affine=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return super().forward(self.norm(x), targets)


def pairs() -> tuple[list[zfunc.Segment], Callable[[int], Batch]]:
    """Hand-made segments that pass on a tuple with whole numbers, a view of a weight and an expanded tensor; three
    share one weight."""
    w, v = Parameter("a.w", (8, 8)), Parameter("c.v", (8, 8))

    def initial(name: str) -> Callable[[int], dict[str, Tensor]]:
        return lambda seed: {name: torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) / 3}

    segments = [
        zfunc.Segment("a", _first, (w,), ("w",), initial=initial("a.w")),
        zfunc.Segment(
            "b",
            _second,
            (w, Parameter("b.table", (2, 8))),
            ("w", "table"),
            initial=lambda _: {"b.table": torch.zeros(2, 8)},
            shared={"a.w"},
        ),
        zfunc.Segment("c", _third, (v,), ("v",), initial=initial("c.v")),
        zfunc.Segment("d", _last, (w,), ("w",), initial=lambda _: {}, shared={"a.w"}),
    ]
    return segments, regression()


# Of the module, so that the programs of a process share what is traced of them (shared_traces).
def _first(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x @ p["w"]), (x[:, 0] > 0).long()


def _second(p: dict[str, Tensor], xs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    x, sign = xs
    y = torch.tanh(x @ p["w"] + p["table"][sign].to(x.dtype))
    return y, sign, p["table"].t(), x.mean(dim=1, keepdim=True).expand_as(x)


def _third(p: dict[str, Tensor], xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.tanh(xs[0] @ p["v"]), *xs[1:])


def _last(p: dict[str, Tensor], xs: tuple[Tensor, ...], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x, sign, table, mean = xs
    errors = ((x + mean + table[:, sign].t().to(x.dtype)) @ p["w"]).sum(-1).float() - targets.float()
    return errors.square().mean(), {"worst": errors.abs().max(), "positive": sign.sum()}


def edits() -> tuple[list[zfunc.Segment], Callable[[int], Batch]]:
    """Hand-made segments that change copies of their weights and inputs through views."""
    made, names = list[zfunc.Segment](), [*EDITS, "a shifted weight"]
    for n, (name, function) in enumerate(zip(names, (*EDITS.values(), _shifted), strict=True)):
        initial = {f"{name}.w": torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) / 3}
        parameters = (Parameter(f"{name}.w", (8, 8)),)
        made.append(zfunc.Segment(name, function, parameters, ("w",), initial=lambda _, own=initial: own))
    return made, token_rows


def token_rows(i: int) -> Batch:
    g = torch.Generator().manual_seed(i)
    return torch.randn(12, 16, 8, generator=g), torch.randn(12, 16, generator=g)


def _row(p: dict[str, Tensor], x: Tensor) -> Tensor:
    w = p["w"].clone()
    w[0] = 0
    return torch.tanh(x @ w)


def _column(p: dict[str, Tensor], x: Tensor) -> Tensor:
    z = x.clone()
    z[..., 0] = 0
    return torch.tanh(z @ p["w"])


def _diagonal(p: dict[str, Tensor], x: Tensor) -> Tensor:
    y = x @ p["w"].clone().fill_diagonal_(0)
    y[..., 1] += x[..., 0]
    return y


def _scaled(p: dict[str, Tensor], x: Tensor) -> Tensor:
    w, z = p["w"] * 1, x * 1
    w[:, 2].mul_(3)
    z[..., 3:5].mul_(0.5)
    return torch.tanh(z @ w)


def _shifted(p: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
    w = p["w"].clone()
    w[1:, 1:] = p["w"][:-1, :-1]
    return ((x @ w).sum(-1).float() - targets.float()).square().mean()


EDITS = {"a row": _row, "a column": _column, "a diagonal": _diagonal, "a scaled column": _scaled}


def aliases() -> tuple[list[zfunc.Segment], Callable[[int], Batch]]:
    """Rows of tokens, in segments whose results are one tensor, or inputs, and whose gradients are one, or what the
    gradient of the input is."""
    torch.manual_seed(0)
    initial = {name: torch.randn(8, 8) / 3 for name in ("twice.w", "again.w", "sum.v", "sum.w", "sum.u")}
    initial["loss.p"] = torch.randn(2, 16, 8)
    made = list[zfunc.Segment]()
    for function in (_twice, _again, _same, _sum, _loss):
        name = function.__name__.lstrip("_")
        own = {full: t for full, t in initial.items() if full.startswith(f"{name}.")}
        parameters = [Parameter(full, tuple(t.shape)) for full, t in own.items()]
        short = [full[-1] for full in own]
        made.append(zfunc.Segment(name, function, parameters, short, initial=lambda _, own=own: own))
    return made, token_rows


def _twice(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(x @ p["w"])
    return y, y, x


def _again(p: dict[str, Tensor], xs: tuple[Tensor, ...]) -> Tensor:
    return xs[0] * 0.5 + xs[1] + torch.tanh(xs[2] @ p["w"])


def _same(_: dict[str, Tensor], x: Tensor) -> Tensor:
    return x


def _sum(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ (p["v"] + p["w"])) @ p["u"]


def _loss(p: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
    y = x + torch.cat([p["p"]] * (len(x) // 2))  # of two rows the gradient of both is one
    return (torch.tanh(y).sum(-1).float() - targets.float()).square().mean()


def rows_of(batch: Any, rank: int, world: int) -> Any:
    """This rank's rows of a global batch."""
    if isinstance(batch, Tensor):
        size = batch.shape[0] // world
        return batch[rank * size : (rank + 1) * size]
    return tuple(rows_of(x, rank, world) for x in batch)


def bits(state: State) -> list[Tensor]:
    """Everything a step can change, wherever it is kept: copies."""
    memory = state.buffers.memory
    roles = {"params", "state", "module_buffers", "ema"}
    kept = (r for r in sorted(memory, key=str) if r.role in roles and r.tier != "disk")
    on_disk = (state.buffers.state(b) for b in sorted(state.buffers.on_disk))
    return [
        *(getattr(memory[r], "flat", memory[r]).clone() for r in kept),
        *(x.clone() for parts in on_disk for _, x in sorted(parts.items())),
    ]


def flats(state: State, *roles: str) -> dict[str, Tensor]:
    """What the regions of these roles hold, one after the other, by the name of their buffer."""
    found: dict[str, list[Tensor]] = {}
    for r, x in sorted(state.buffers.memory.items(), key=lambda item: item[0].index):
        if r.role in roles:
            found.setdefault(r.buffer, []).append(getattr(x, "flat", x))
    return {name: torch.cat(parts) for name, parts in found.items()}


MODELS: dict[str, Callable[[], tuple[list[zfunc.Segment], Callable[[int], Batch]]]] = {
    "tied GPT": tied_gpt,
    "GPT with dropout": lambda: tied_gpt(0.2),
    "odd sizes": odd_sizes,
    "frozen below": frozen_below,
    "norms": norms,
    "pairs": pairs,
}
IN_FP32 = {  # parameters that may be fp32 beside others in 16 bits
    **dict.fromkeys(("tied GPT", "GPT with dropout"), "*.ln_*"),
    "odd sizes": ["scale", "loss.*"],
    **dict.fromkeys(("frozen below", "norms"), "loss.out"),
    "pairs": "b.table",
    "edits": "a row.w",
    "aliases": ["twice.w", "loss.*"],
}
SHORTER = {  # where many trainings are compared, or a device is told of each operation
    **MODELS,
    "tied GPT": lambda: tied_gpt(num_layers=2),
    "GPT with dropout": lambda: tied_gpt(0.2, num_layers=2),
    "edits": edits,
    "aliases": aliases,
}
