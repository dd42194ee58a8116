"""A grammar of small models: random chains of what users put into a segment, as data that prints and builds again.

A value between two pieces is [batch, rows, width], with even sizes. Every piece takes one and gives one; what it
does on the way is what tends to break tracing: transposed and strided results, recurrent layers, tensors made
inside, operations with their own backward, weights used twice.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from attrs import field, frozen
from plain import Part
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc.engine.rows.row_attention import attend_row

ROWS, WIDTH, VOCAB, BATCH = 4, 8, 10, 6
Size = tuple[int, int]  # rows, width


class Apply(nn.Module):
    """Children by name, and what is computed with them; attributes that are no modules are kept in the closure."""

    def __init__(self, call: Callable[..., Tensor], **children: Any) -> None:
        super().__init__()
        self.call = call
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs: Any) -> Tensor:
        return self.call(self, *inputs)


class Sine(torch.autograd.Function):
    """With a backward of its own, in the form that torch.func takes."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.cos() * grad


def causal(self: Any, x: Tensor) -> Tensor:
    mask = torch.tril(torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=torch.bool))
    return self.inner(x, x, x, attn_mask=~mask, need_weights=False)[0]


def positions(self: Any, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    return x + self.inner(at) * torch.ones(x.shape[-1], device=x.device, dtype=x.dtype)


def recurrent(kind: type[nn.Module]) -> Callable[[int, int], nn.Module]:
    return lambda rows, width: Apply(
        lambda self, x: self.inner(x)[0], inner=kind(width, width, batch_first=True)
    )


def tied_inside(rows: int, width: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    made[2].weight = made[0].weight
    return made


def used_twice(rows: int, width: int) -> nn.Module:
    one = nn.Linear(width, width)
    return nn.Sequential(one, nn.GELU(), one)


def pure(call: Callable[[Tensor], Tensor]) -> Callable[[int, int], nn.Module]:
    """A piece without parameters."""
    return lambda rows, width: Apply(lambda self, x: call(x))


class Scaled(nn.Module):
    """A parameter of one element, a buffer, a frozen one and one that is not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))
        self.spare = nn.Parameter(torch.ones(3))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift.to(x.dtype)) * self.gain


class Conformer(nn.Module):
    """Its convolution module: a gate, a convolution of each channel, a batch norm over channels, a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.depthwise = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 3, 1, 1, 1, width)
        self.norm = nn.BatchNorm1d(width, track_running_stats=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(F.glu(self.gate(x.transpose(1, 2)), 1))
        return x + self.out(F.silu(self.norm(y)).transpose(1, 2))


def over_channels(width: int, last: nn.Module) -> nn.Module:
    """A batch norm over the last dimension, and what follows it."""
    return Apply(
        lambda self, x: self.last(self.norm(x.transpose(1, 2)).transpose(1, 2)),
        norm=nn.BatchNorm1d(width, track_running_stats=False),
        last=last,
    )


def temporal(self: Any, x: Tensor) -> Tensor:
    y = self.norm(self.conv(F.pad(x.transpose(1, 2), (2, 0))))
    return x + self.out(y.relu().transpose(1, 2))


def masked_by(fill: Callable[[Tensor], Any]) -> Callable[[int, int], nn.Module]:
    """A mask in memory that is first uninitialised and then filled by random operations in place."""

    def call(x: Tensor) -> Tensor:
        mask = torch.empty_like(x, memory_format=torch.contiguous_format)
        fill(mask)
        return x * mask

    return pure(call)


def half_by_half(mask: Tensor) -> None:
    mask[..., ::2].bernoulli_(0.7)
    mask[..., 1::2].uniform_(0.5, 1.5)


def through_out(mask: Tensor) -> None:
    torch.rand(mask[:, :1].shape, out=mask[:, :1])
    mask[:, 1:].fill_(1.0)


def edited(x: Tensor) -> Tensor:
    """A copy that is changed through views of it."""
    z = x.clone()
    z.mT[..., 0] *= 0.5
    z[..., 0] = 0
    return z


def dropped(x: Tensor) -> Tensor:
    kept = x + 0.0
    F.dropout(kept[:, 1:], 0.3, inplace=True)
    return kept


RANDOM: dict[str, Callable[[int, int], nn.Module]] = {
    "dropout": lambda rows, width: nn.Dropout(0.3),
    "rrelu": lambda rows, width: nn.RReLU(),
    "dropout in place": pure(dropped),
    "flat mask": masked_by(lambda m: m.view(-1).bernoulli_(0.7)),
    "mask by rows": masked_by(lambda m: [row.normal_(1.0, 0.1) for row in m]),
    "mask by chunks": masked_by(lambda m: [part.uniform_(0.5, 1.5) for part in m.chunk(2, -1)]),
    "mask by halves": masked_by(half_by_half),
    "mask through out": masked_by(through_out),
    "mask by copies": masked_by(lambda m: m.transpose(0, 1).copy_(torch.rand_like(m).transpose(0, 1))),
    "lstm with dropout": lambda rows, width: Apply(
        lambda self, x: self.inner(x)[0], inner=nn.LSTM(width, width, 2, batch_first=True, dropout=0.3)
    ),
    "attention with dropout": lambda rows, width: Apply(
        lambda self, x: self.inner(x, x, x)[0],
        inner=nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.3),
    ),
}
"""Pieces that draw random numbers, and keep rows and width."""

KEEPING: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": lambda rows, width: nn.Linear(width, width),
    "frozen": lambda rows, width: nn.Linear(width, width).requires_grad_(False),
    "residual": lambda rows, width: Apply(
        lambda self, x: x + self.inner(x), inner=nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
    ),
    "norm": lambda rows, width: nn.LayerNorm(width),
    "gelu": lambda rows, width: nn.GELU(),
    "mixer": lambda rows, width: Apply(
        lambda self, x: x + self.inner(x.transpose(1, 2)).transpose(1, 2), inner=nn.Linear(rows, rows)
    ),
    "mixed": lambda rows, width: Apply(lambda self, x: self.inner(x.mT).mT, inner=nn.Linear(rows, rows)),
    "conv": lambda rows, width: Apply(
        lambda self, x: self.inner(x.transpose(1, 2)).transpose(1, 2),
        inner=nn.Conv1d(width, width, 3, padding=1),
    ),
    "attention": lambda rows, width: Apply(
        lambda self, x: self.inner(x, x, x)[0], inner=nn.MultiheadAttention(width, 2, batch_first=True)
    ),
    "causal": lambda rows, width: Apply(causal, inner=nn.MultiheadAttention(width, 2, batch_first=True)),
    "rnn": recurrent(nn.RNN),
    "gru": recurrent(nn.GRU),
    "lstm": recurrent(nn.LSTM),
    "positions": lambda rows, width: Apply(positions, inner=nn.Embedding(rows, width)),
    "tied inside": tied_inside,
    "used twice": used_twice,
    "scaled": lambda rows, width: Scaled(width),
    "own backward": pure(lambda x: Sine.apply(x) + x),
    "fft": pure(lambda x: torch.fft.irfft(torch.fft.rfft(x.float())).to(x.dtype) + 0.1 * x),
    "flip": pure(lambda x: x.flip(1) + x),
    "expand": pure(lambda x: x[:, :1].expand_as(x) * 0.5 + x),
    "rolled": pure(lambda x: torch.cat([x[:, 1:], x[:, :1]], 1)),
    "largest": pure(lambda x: x - x.max(2, keepdim=True).values.tanh()),
    "masked": pure(lambda x: torch.where(x > 0, x + 0.1 * x * x, x)),  # no kink, whose side rounding decides
    "detached": pure(lambda x: x + 0.5 * x.detach()),
    "edited": pure(edited),
    "edited weight": lambda rows, width: Apply(
        lambda self, x: F.linear(x, edited(self.inner.weight)), inner=nn.Linear(width, width, bias=False)
    ),
    "softmax": pure(lambda x: torch.softmax(x, 1) + x),
    "strided": pure(lambda x: torch.stack([x, -x], -1)[..., 0]),
    "einsum": pure(lambda x: torch.einsum("btc,bsc->bts", x, x).tanh() @ x),
    "conformer": lambda rows, width: Conformer(width),
    "patches": lambda rows, width: over_channels(width, nn.Linear(width, width)),
    "temporal": lambda rows, width: Apply(
        temporal,
        conv=nn.Conv1d(width, width, 3),
        norm=nn.BatchNorm1d(width, track_running_stats=False),
        out=nn.Linear(width, width),
    ),
    "log sigmoid": lambda rows, width: Apply(
        lambda self, x: self.inner(F.logsigmoid(x.mT).mT), inner=nn.Linear(width, width)
    ),
    **RANDOM,
}
"""Pieces that keep rows and width."""


class Depths(nn.Module):
    """Tokens that a router chooses of its row pass a layer: mixture of depths, or an expert's choice."""

    def __init__(self, width: int, chosen: int | None) -> None:
        super().__init__()
        self.router, self.layer, self.chosen = nn.Linear(width, 1), nn.Linear(width, width), chosen

    def forward(self, x: Tensor) -> Tensor:
        score, at = self.router(x)[..., 0].topk(self.chosen or x.shape[1] // 4, 1)
        at = at[..., None].expand(-1, -1, x.shape[2])
        return x.scatter_add(1, at, self.layer(x.gather(1, at)) * score.sigmoid()[..., None])


class Beside(nn.Module):
    """A token, and what `other` makes of the row, by weights that begin at `start`; `mix` joins them."""

    def __init__(self, width: int, start: float, mix: Callable[..., Tensor], other: Any) -> None:
        super().__init__()
        self.weight, self.mix = nn.Parameter(torch.full((width,), start)), mix
        self.other = other(width) if isinstance(other, type) else other

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, self.other(x), self.weight)


class Neighbours(nn.Conv1d):
    """A weak causal convolution of each feature."""

    def __init__(self, width: int, dilation: int = 1) -> None:
        super().__init__(width, width, 2, padding=dilation, dilation=dilation, groups=width)
        self.weight.data.mul_(1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Table(nn.Module):
    """Positions of a table by other means than their numbers."""

    def __init__(self, width: int, how: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.table, self.how = nn.Parameter(torch.randn(64, width)), how

    def forward(self, x: Tensor) -> Tensor:
        return x + self.how(self.table, x.shape[1])


def _stretched(table: Tensor, rows: int) -> Tensor:
    return F.interpolate(table.T[None], size=rows, mode="linear")[0].T


def _cross_covariance(x: Tensor) -> Tensor:
    q = F.normalize(x, dim=1)
    return x + x @ (q.transpose(1, 2) @ q).softmax(-1)


def _shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))


def _lerp(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x * w + y * (1 - w)


def _gate(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x + y * torch.sigmoid(w)


def _clipped(x: Tensor) -> Tensor:
    norm = x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype)
    return torch.where(norm > 1000, x * (1000 / norm), x)


class ClippedGradient(Sine):
    """Rows whose gradient has a norm above 1,000 get a smaller one."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _clipped(Sine.backward(ctx, grad))


MIXING: dict[str, Callable[[int, int], nn.Module]] = {
    "mixture of depths": lambda rows, width: Depths(width, None),
    "expert choice": lambda rows, width: Depths(width, 3),
    "capacity": pure(lambda x: x * (x[..., :1] >= x[..., :1].topk(4, 1).values[:, -1:])),
    "shift that begins at 1": lambda rows, width: Beside(width, 1.0, _lerp, _shifted),
    "the first token": lambda rows, width: Beside(width, 0.0, lambda x, y, w: x + y * w, lambda x: x[:, :1]),
    "gate that begins closed": lambda rows, width: Beside(width, -30.0, _gate, Neighbours),
    "weak convolution": lambda rows, width: Beside(width, 1.0, lambda x, y, w: x + y * w, Neighbours),
    "norm over the row": pure(lambda x: x + x / x.norm(dim=(1, 2), keepdim=True)),
    "clipped norm": lambda rows, width: Apply(
        lambda self, x: _clipped(self.inner(x)), inner=nn.Linear(width, width)
    ),
    "clipped norm of the gradient": pure(ClippedGradient.apply),
    "GRN": pure(lambda x: x + x * (g := x.norm(dim=1, keepdim=True)) / (g.mean(-1, keepdim=True) + 1e-6)),
    "cross-covariance": pure(_cross_covariance),
    "positions by split": lambda rows, width: Table(width, lambda t, n: t.split(n)[0]),
    "positions by interpolation": lambda rows, width: Table(width, _stretched),
    "a number by keyword": pure(lambda x: torch.add(x, x, alpha=1 / x.shape[1])),
    "variance": pure(lambda x: x + x.var(1, keepdim=True)),
    "sorted": pure(lambda x: x + 0.1 * x.sort(1).values),
    "spectrum": pure(lambda x: x + torch.fft.fft(x.float(), dim=1).real.to(x.dtype) * 1e-2),
    "groups": lambda rows, width: Apply(
        lambda self, x: x + self.inner(x.transpose(1, 2)).transpose(1, 2), inner=nn.GroupNorm(2, width)
    ),
}
"""Pieces that keep rows and width, in which rows depend on others: not seen in a sum or a mean alone."""

APART = (
    *("edited weight", "log sigmoid"),
    *("linear", "frozen", "residual", "norm", "gelu", "positions", "tied inside", "used twice", "scaled"),
    *("own backward", "fft", "largest", "masked", "detached", "strided"),
)
"""Pieces of which a row depends on no other; on others it does."""


class Heads(nn.Module):
    """Causal attention of two heads: to a window of tokens, to those of a document, or to all before."""

    def __init__(self, width: int, window: int | None = None, document: int | None = None) -> None:
        super().__init__()
        self.qkv, self.window, self.document = nn.Linear(width, 3 * width), window, document

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 6, -1).transpose(1, 2).chunk(3, 1)
        if self.window or self.document:
            at = torch.arange(x.shape[1], device=x.device)
            first = (at - at % self.document).expand(x.shape[:2]) if self.document else None
            y = attend_row(q, k, v, first, self.window)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


ATTENDING: dict[str, Callable[[int, int], nn.Module]] = {
    "heads": lambda rows, width: Heads(width),
    "heads with a window": lambda rows, width: Heads(width, window=5),
    "heads of documents": lambda rows, width: Heads(width, document=6),
    "heads of both": lambda rows, width: Heads(width, window=3, document=7),
}
"""Pieces in which a row depends on those before through attention, which one of a segment may."""


@frozen
class Rows:
    """A segment for rows in tiles, by its pieces, and the rows that it gets."""

    pieces: tuple[str, ...]
    tokens: int = 16
    tiles: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def fits(self) -> bool:
        """Whether tokens depend on others through one attention alone. Of fewer than 32 a trial has pieces of one,
        which have other operations behind a log sigmoid than the row, and so it is refused."""
        apart = {*self.pieces} <= {*APART, *ATTENDING} - ({"log sigmoid"} if self.tokens < 32 else set())
        return apart and sum(x in ATTENDING for x in self.pieces) < 2

    def module(self) -> nn.Module:
        torch.manual_seed(self.seed)
        known = {**KEEPING, **MIXING, **ATTENDING}
        return nn.Sequential(*(known[x](self.tokens, WIDTH) for x in self.pieces))


def draw_rows(random: Random) -> Rows:
    """A segment without random numbers, in half of all cases one that fits."""
    pieces = random.choices(APART, k=random.randint(1, 3))
    unknown = (*RANDOM, *APART, "clipped norm")  # behind a norm it has nothing to clip
    others = [x for x in (*KEEPING, *MIXING, *ATTENDING) if x not in unknown]
    for more in (ATTENDING, others):
        if random.random() < 0.5:
            pieces.insert(random.randint(0, len(pieces)), random.choice([*more]))
    tokens, tiles = random.choice([(16, 2), (16, 4), (16, 16), (24, 3), (15, 5), (48, 4)])
    dtype = random.choice([torch.float32, torch.float32, torch.bfloat16])
    if "scaled" in pieces:
        dtype = torch.float32  # the gradient of one element may cancel between tiles, rounded one by one
    return Rows(tuple(pieces), tokens, tiles, dtype, random.randrange(1000))


CHANGING: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[int, int], Size]]] = {
    "wider": (lambda rows, width: nn.Linear(width, width + 2), lambda rows, width: (rows, width + 2)),
    "transposed": (pure(lambda x: x.transpose(1, 2)), lambda rows, width: (width, rows)),
    "turned": (
        lambda rows, width: Apply(lambda self, x: self.inner(x).mT, inner=nn.Linear(width, width)),
        lambda rows, width: (width, rows),
    ),
    "every other": (
        pure(lambda x: torch.cat([x, x], 1)[:, ::2, :]),
        lambda rows, width: (rows, width),
    ),
}

LOSSES: dict[str, tuple[int, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "sum": (1, lambda self, x, y: F.mse_loss(self.out(x.sum(1)).squeeze(-1).float(), y.float())),
    "mean": (1, lambda self, x, y: (self.out(x).mean((1, 2)).float() - y).square().mean()),
    "last": (VOCAB, lambda self, x, y: F.cross_entropy(self.out(x[:, -1]).float(), y.abs().long())),
    "every": (
        VOCAB,
        lambda self, x, y: F.cross_entropy(
            self.out(x).transpose(1, 2).float(), y.abs().long()[:, None].expand(x.shape[:2])
        ),
    ),
    "norm": (VOCAB, lambda self, x, y: torch.linalg.vector_norm(self.out(x).float(), dim=(1, 2)).mean()),
}
"""How wide the output layer is, and the mean loss of [batch, rows, width] and targets [batch]."""

BETWEEN = ("tensor", "tuple", "dict", "tuple with counts", "nested", "twice", "views", "passed on")


@frozen
class Model:
    """A chain of segments, each a chain of pieces by name; what is handed on between them; a loss.

    `ties` are pairs of places in the list of all weights of equal shapes: as far as there are such, and their
    segments differ, the second is shared with the first.
    """

    segments: tuple[tuple[str, ...], ...]
    between: tuple[str, ...]  # one fewer than segments, and one for the loss
    loss: str
    tokens: bool = False
    ties: tuple[tuple[int, int], ...] = ()
    seed: int = field(default=0)

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(piece in RANDOM for pieces in self.segments for piece in pieces)

    def modules(self) -> list[tuple[str, nn.Module]]:
        """The segments' modules by name, the same every time."""
        torch.manual_seed(self.seed)
        size, made = (ROWS, WIDTH), list[tuple[str, nn.Module]]()
        takes = "tokens" if self.tokens else "tensor"
        for s, (pieces, gives) in enumerate(zip(self.segments, self.between, strict=True)):
            body: list[nn.Module] = [nn.Embedding(VOCAB, WIDTH)] if takes == "tokens" else []
            for piece in pieces:
                build, resize = CHANGING.get(piece) or (KEEPING[piece], lambda rows, width: (rows, width))
                body.append(build(*size))
                size = resize(*size)
            made.append((f"s{s}", Link(nn.Sequential(*body), takes, gives)))
            takes = gives
        width, call = LOSSES[self.loss]
        loss = Apply(lambda self, x, y: call(self, unpacked(x, takes), y), out=nn.Linear(size[1], width))
        return [*made, ("loss", loss)]

    def shares(self, modules: list[tuple[str, nn.Module]]) -> dict[str, dict[str, str]]:
        """Of each segment by name what it shares: its own short name to the full name of another's."""
        weights = [
            (name, short, p.shape)
            for name, module in modules
            for short, p in module.named_parameters()
            if p.requires_grad and p.dim() == 2
        ]
        shares: dict[str, dict[str, str]] = {name: {} for name, _ in modules}
        owners: set[str] = set()
        for first, second in self.ties:
            name, short, shape = weights[first % len(weights)]
            alike = [(n, x) for n, x, other in weights if other == shape and n != name]
            if not alike or short in shares[name]:
                continue
            other, other_short = alike[second % len(alike)]
            full = f"{name}.{short}"
            if (
                other_short in shares[other]
                or f"{other}.{other_short}" in owners
                or full in shares[other].values()
            ):
                continue
            shares[other][other_short] = full
            owners.add(full)
        return shares

    def built(self) -> tuple[list[zfunc.Segment], list[Part], dict[str, Tensor]]:
        """As segments, and as plain parts with their values by full name: frozen ones too."""
        modules = self.modules()
        shares = self.shares(modules)
        segments = [zfunc.segment(name, module, share=shares[name]) for name, module in modules]
        parts, values = [], {}
        for name, module in self.modules():  # of its own, so that nothing can be shared by accident
            names = {x: shares[name].get(x, f"{name}.{x}") for x, _ in module.named_parameters()}
            values.update(
                {names[x]: p.detach() for x, p in module.named_parameters() if x not in shares[name]}
            )
            parts.append(Part(functional(module), names, {}))
        return segments, parts, values

    def batch(self, i: int) -> tuple[Any, Tensor]:
        """Inputs and targets of a step."""
        g = torch.Generator().manual_seed(1000 * self.seed + i)
        y = torch.randint(0, VOCAB, (BATCH,), generator=g)
        if self.tokens:
            return torch.randint(0, VOCAB, (BATCH, ROWS), generator=g), y
        return torch.randn(BATCH, WIDTH, ROWS, generator=g).mT, y


class Link(nn.Module):
    """A body between what the segment before handed on and what this one does."""

    def __init__(self, body: nn.Module, takes: str, gives: str) -> None:
        super().__init__()
        self.body, self.takes, self.gives = body, takes, gives

    def forward(self, given: Any) -> Any:
        x = unpacked(given, self.takes)
        return packed(self.body(x), x, self.gives)


def packed(x: Tensor, before: Tensor, how: str) -> Any:
    """A value as it is handed on, and for "passed on" what the segment was given, too."""
    if how == "twice":
        return x, x
    if how == "views":
        return x[..., ::2], {"turned": x.mT, "whole": x}
    if how == "passed on":
        return x, before, x
    if how == "tuple":
        return x, x.mean(1)
    if how == "dict":
        return {"x": x, "bias": x[:, :1].tanh()}
    if how == "tuple with counts":
        return x.transpose(0, 1), (x > 0).sum(1)
    return ([x], {"half": x * 0.5}) if how == "nested" else x


def unpacked(given: Any, how: str) -> Tensor:
    """And as it is taken."""
    if how == "twice":
        return given[0] * 0.5 + given[1].tanh()
    if how == "views":
        return given[1]["whole"] + given[1]["turned"].mT.tanh() - given[0].mean(-1, keepdim=True)
    if how == "passed on":
        mean = given[1].flatten(1).to(given[0].dtype).mean(1)  # of what may be tokens
        return given[0] + mean[:, None, None] - 0.3 * given[2]
    if how == "tuple":
        return given[0] + given[1][:, None]
    if how == "dict":
        return given["x"] - given["bias"]
    if how == "tuple with counts":
        return given[0].transpose(0, 1) + 0.1 * given[1][:, None].to(given[0].dtype)
    return given[0][0] + given[1]["half"] if how == "nested" else given


def functional(module: nn.Module) -> Callable[..., Any]:
    return lambda params, *inputs: torch.func.functional_call(module, dict(params), inputs)


def draw(random: Random) -> Model:
    """Any model of the grammar."""
    segments = []
    for _ in range(random.randint(1, 3)):
        pieces = [random.choice([*KEEPING, *CHANGING]) for _ in range(random.randint(1, 3))]
        segments.append(tuple(pieces))
    between = tuple(random.choice(BETWEEN) if random.random() < 0.4 else "tensor" for _ in segments)
    ties = tuple((random.randrange(20), random.randrange(20)) for _ in range(random.choice([0, 0, 1, 2])))
    return Model(
        tuple(segments),
        between,
        random.choice([*LOSSES]),
        tokens=random.random() < 0.3,
        ties=ties,
        seed=random.randrange(1000),
    )
