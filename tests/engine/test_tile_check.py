"""What cannot pass in tiles is refused by name: tokens that depend on others outside attention."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import fuzz_models
import pytest
import torch
from pairs import in_pairs
from small_models import bits
from tile_law import in_tiles
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

import zfunc


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights that do not depend on the tests before: in 16 bits, a sort may have ties."""
    torch.manual_seed(0)


class Body(nn.Module):
    """Rows through a layer, and through `function(what there is, x)`."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.layer(x))


class TokenLoss(nn.Module):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return (x.mean(-1).float() - targets).square().mean()


def over_time(layer: nn.Module, pad: int = 0) -> Body:
    mixed = lambda own, x: own.mix(F.pad(x.transpose(1, 2), (pad, 0))).transpose(1, 2)  # noqa: E731
    return Body(mixed, mix=layer)


def attending(**given: Any) -> Body:
    return Body(lambda _, x: scaled_dot_product_attention(*3 * [x[:, None]], **given)[:, 0])


def by_hand(_: Any, x: Tensor) -> Tensor:
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return (x @ x.transpose(1, 2)).masked_fill(~seen, -torch.inf).softmax(-1) @ x


def masked_by(own: Any, x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).masked_fill(own.hidden[: x.shape[1], : x.shape[1]], -torch.inf).softmax(
        -1
    ) @ x


def positions() -> Body:
    return Body(lambda own, x: x + own.at[: x.shape[1]], at=nn.Parameter(torch.rand(64, 8)))


def gated(mixed: Any) -> Body:
    """Tokens mixed behind a gate that is shut at first."""
    return Body(lambda own, x: x + own.gate * mixed(x), gate=nn.Parameter(torch.zeros(8)))


def with_capacity(_: Any, x: Tensor) -> Tensor:
    place = (x[..., :1] > 0).long().flatten(0, 1).cumsum(0).view(*x.shape[:2], 1)
    return x * (place < x.shape[1])


def the_first(_: Any, x: Tensor) -> Tensor:
    return x * ((x[..., :1] > -1).long().cumsum(1) <= 12)


def dropped_before(own: Any, x: Tensor) -> Tensor:
    x = own.drop(x)
    return x + scaled_dot_product_attention(*3 * [x[:, None]], is_causal=True)[:, 0]


def of_the_batch(_: Any, x: Tensor) -> Tensor:
    """As of rows [tokens, batch, features]."""
    x = x.transpose(0, 1)[:, None]
    return scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0].transpose(0, 1)


def in_bags(summed: Any) -> Body:
    """Each token with the sum of three rows of a table, by numbers made of it."""

    def mixed(own: Any, x: Tensor) -> Tensor:
        return x + summed(own, (x[..., :3].detach() * 50).long() % 11).view(x.shape)

    return Body(mixed, bags=nn.EmbeddingBag(11, 8, mode="sum"))


def recurrent() -> Body:
    return Body(lambda own, x: own.rnn(x)[0], rnn=nn.GRU(8, 8, batch_first=True))


ROWS = (2, 64, 8)
OTHERWISE = "got .* expected tokens that depend on others through attention alone, .*: use ti"
MIXING: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {  # a body, its input, what is said
    "a mean": (lambda: Body(lambda _, x: x + x.mean(1, keepdim=True)), ROWS, OTHERWISE),
    "a sum so far": (lambda: Body(lambda _, x: x.cumsum(1)), ROWS, OTHERWISE),
    "the last is the first": (lambda: Body(lambda _, x: x.roll(1, 1)), ROWS, OTHERWISE),
    "positions of its own": (positions, ROWS, r"aten.slice.Tensor .* on their place through torch.arange"),
    "a mean behind a gate": (lambda: gated(lambda x: x.mean(1, keepdim=True)), ROWS, OTHERWISE),
    "a sum so far behind a gate": (lambda: gated(lambda x: x.cumsum(1)), ROWS, OTHERWISE),
    "a scale of the tokens": (
        lambda: Body(lambda _, x: x / x.shape[1]),
        ROWS,
        r"the numbers \[16, 64\] of aten.div.Tensor",
    ),
    "a capacity": (lambda: Body(with_capacity), ROWS, r"the numbers \[16, 64\] of aten.lt.Scalar"),
    "a mask for the row": (
        lambda: Body(lambda _, x: x * (torch.rand(x.shape[0], 1, 1) > 0.5)),
        ROWS,
        r"random numbers of shape \[2, 1, 1\] that are no token's own",
    ),
    "dropped before and after": (
        lambda: Body(dropped_before, drop=nn.Dropout(0.5)),
        ROWS,
        "random numbers before attention that what follows it reads",
    ),
    "another order": (lambda: Body(of_the_batch), (16, 64, 8), r"attention of shape \[64, 1, 16, 8\]"),
    "no heads": (
        lambda: Body(lambda _, x: scaled_dot_product_attention(x, x, x, is_causal=True)),
        ROWS,
        "give one head a dimension",
    ),
    "a norm over tokens": (lambda: over_time(nn.BatchNorm1d(8, track_running_stats=False)), ROWS, OTHERWISE),
    "running statistics": (lambda: over_time(nn.BatchNorm1d(8)), ROWS, r"shape \[8\], expected rows"),
    "neighbours": (lambda: over_time(nn.Conv1d(8, 8, 3, padding=1)), ROWS, OTHERWISE),
    "a convolution": (
        lambda: over_time(nn.Conv1d(8, 8, 3), 2),
        ROWS,
        r"aten.constant_pad_nd.default is not known to keep them apart",
    ),
    "one far back": (lambda: over_time(nn.Conv1d(8, 8, 3, dilation=20), 40), ROWS, OTHERWISE),
    "a recurrence": (recurrent, (2, 8, 8), "got other operations for a row than for a tile"),
    "one that a tile lacks": (
        lambda: Body(lambda _, x: x + x[:, 20].unsqueeze(1)),
        ROWS,
        r"got an error on 16 tokens and none on 64, .*IndexError: index 20",
    ),
    "blocks of tokens": (
        lambda: Body(lambda _, x: x + x.view(2, -1, 32, 8).mean(2).repeat_interleave(32, 1)),
        ROWS,
        "got an error on 16 tokens and none on 64",
    ),
    "one for all": (lambda: Body(lambda _, x: x.mean(1)), ROWS, r"a result of shape \[2, 8\]"),
    "one of all": (lambda: Body(lambda _, x: x[:, 0]), ROWS, r"got a result of shape \[2, 8\]"),
    "bags": (
        lambda: in_bags(lambda own, n: own.bags(n.flatten(0, 1))),
        ROWS,
        "embedding.numbers..sum.-2., or",
    ),
    "the first twelve": (lambda: Body(the_first), ROWS, "aten.cumsum.default is not known to"),
    "attention to all": (attending, ROWS, "got attention with all tokens"),
    "a mask": (lambda: attending(attn_mask=torch.ones(64, 64).bool()), ROWS, "got attention with a mask"),
    "dropped": (lambda: attending(is_causal=True, dropout_p=0.1), ROWS, "dropout, .* set its rate to 0"),
    "attention by hand": (lambda: Body(by_hand), ROWS, r"a constant of shape \[16, 16\] in a tile"),
    "attention by hand, of a buffer": (
        lambda: Body(masked_by, hidden=nn.Buffer(torch.ones(99, 99).bool().triu(1))),
        ROWS,
        "aten.bmm.default is not known to keep them apart",
    ),
    "a buffer as long as the row": (
        lambda: Body(masked_by, hidden=nn.Buffer(torch.ones(64, 64).bool().triu(1))),
        ROWS,
        r"for a tile \(.*aten.slice.Tensor\), .* or a buffer just as long as the row",
    ),
    "each by its number": (
        lambda: Body(lambda _, x: x[:, torch.arange(x.shape[1])]),
        ROWS,
        "got an error on",
    ),
    "another token, by its number": (
        lambda: Body(lambda _, x: x + x[..., 0].detach()[torch.zeros(2, 1).long(), x.argmax(2)][..., None]),
        ROWS,
        "aten.index.Tensor is not known to keep them apart",
    ),
    "made of nothing": (
        lambda: Body(lambda _, x: torch.ones(x.shape)),
        ROWS,
        r"got a result of shape \[2, 16, 8\], .* made of the input",
    ),
    "noise in evaluation": (
        lambda: Body(lambda _, x: x + torch.randn_like(x)),
        ROWS,
        "and no random numbers in evaluation",
    ),
    "a random walk": (
        lambda: Body(lambda own, x: x + own.training * torch.randn_like(x).cumsum(1)),
        ROWS,
        r"got random numbers of tokens in aten.cumsum.default",
    ),
    "two layers": (
        lambda: nn.Sequential(attending(is_causal=True), attending(is_causal=True)),
        ROWS,
        "got 2 attentions in a segment, .* make each layer a segment",
    ),
    "4 does not divide": (lambda: nn.Linear(8, 8), (2, 62, 8), "rows of 62 tokens, .*: use tiles=2"),
    "fewer tokens": (
        lambda: nn.Linear(8, 8),
        (2, 3, 8),
        "rows of 3 tokens, expected a divisor, not 4: use tiles=3",
    ),
    "none": (lambda: nn.Linear(8, 8), (2, 8), r"\[\(2, 8\)\], expected rows \[batch, tokens, features\]"),
}


# What is found in a trace, in a trial and by sizes; others are refused again by the same code.
TWICE = "a scale of the tokens", "a sum so far behind a gate", "4 does not divide"


@pytest.mark.parametrize(
    ("what", "tries"),
    [
        pytest.param(x, n, marks=[] if n == 1 + (x in TWICE) else [pytest.mark.slow])
        for x in MIXING
        for n in (1, 2)
    ],
)
def test_what_tiles_cannot_do_is_refused_by_name(what: str, tries: int) -> None:
    """Whenever it is tried; and the State is as before."""
    make, shape, message = MIXING[what]
    named = [("body", make()), ("loss", TokenLoss())]
    segments = [zfunc.segment(name, module) for name, module in named]
    program = zfunc.compile(segments, precision="fp32", recompute="all", device="cpu", tiles=4)
    state = zfunc.init(program, seed=1)
    before = bits(state)
    for _ in range(tries):
        with pytest.raises((ValueError, zfunc.errors.ExecutionError), match=f"segment 'body': .*{message}"):
            zfunc.train_step(program, state, (torch.rand(shape), torch.rand(shape[:-1])))
    assert all(map(torch.equal, bits(state), before))
    zfunc.params(program, state)


def test_what_is_advised_for_bags_passes_and_is_their_sum() -> None:
    added = lambda own, n: F.embedding(n, own.bags.weight).sum(-2)  # noqa: E731
    body, x = in_bags(added), torch.rand(2, 4, 8)
    assert in_tiles(body, torch.float32)
    bags = in_bags(lambda own, n: own.bags(n.flatten(0, 1)))
    bags.load_state_dict(body.state_dict())
    assert torch.equal(bags(x), body(x))


# --- what is tried, whatever it is called -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), in_pairs(fuzz_models.MIXING, [torch.float32, torch.bfloat16], meet=1)
)
def test_what_mixes_tokens_is_refused_whatever_it_begins_with(name: str, dtype: torch.dtype) -> None:
    """Shut gates, mixes of 1 and weak ones are seen, and what only orders or counts."""
    torch.manual_seed(0)
    assert not in_tiles(fuzz_models.MIXING[name](16, 8), dtype)


def over_features(own: Any, x: Tensor) -> Tensor:
    return x + own.rnn(x.flatten(0, 1)[..., None])[0].mean(-1).view(x.shape)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(nn.LSTM, torch.float32), pytest.param(nn.GRU, torch.bfloat16, marks=pytest.mark.slow)],
)
def test_a_recurrence_over_features_passes(
    kind: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first state is zeros for each token. What a trial takes is in the log."""
    with caplog.at_level("INFO", logger="zfunc"):
        assert in_tiles(Body(over_features, rnn=kind(1, 3, batch_first=True)), dtype)
    assert re.search(r"segment 'piece': tiles=4: no token depends on others, seen in \d+\.\d s", caplog.text)


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {  # which tokens change nothing of what training begins with
    "a sum beyond": lambda x: x.abs().sum((1, 2), keepdim=True, dtype=torch.float32) > 1000,
    "one beyond": lambda x: (x.abs() > 1000).any(1, keepdim=True),
    "a norm below": lambda x: x.norm(dim=(1, 2), keepdim=True, dtype=torch.float32) < 1e-3,
    "all below": lambda x: (x.abs() < 1e-4).all(1, keepdim=True),
    "a mean below": lambda x: x.abs().mean((1, 2), keepdim=True) < 1e-20,
    "no mean beyond": lambda x: ~(x.abs().mean((1, 2), keepdim=True) > 1e-20),
    "two means": lambda x: (x.mean((1, 2), keepdim=True) > 1e3) & (x.amax((1, 2), keepdim=True) <= 1e4),
    "padding": lambda x: (x == 0).all(2, keepdim=True).any(1, keepdim=True),
}


@pytest.mark.parametrize(("what", "dtype"), in_pairs(UNSEEN, [torch.float16, torch.float32], meet=1))
def test_a_threshold_far_from_a_row_is_seen(what: str, dtype: torch.dtype) -> None:
    """Also of fp16, whose largest number hardly reaches it, and behind a bias, which a small row does not pass."""
    layer = nn.Linear(8, 8, bias=dtype == torch.float32)
    assert not in_tiles(Body(lambda _, x: torch.where(UNSEEN[what](x), x * 0.5, x), layer=layer), dtype)


class StraightThrough(torch.autograd.Function):
    """Rounds, and passes the gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


class Cut(StraightThrough):
    """A gradient that is cut where the row's is small."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return torch.where(grad.abs().mean((1, 2), keepdim=True) < 1e-9, 0.0, grad)


def test_a_threshold_of_the_gradient_is_seen() -> None:
    assert not in_tiles(Body(lambda _, x: Cut.apply(x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_thresholds_of_a_token_pass(dtype: torch.dtype) -> None:
    """Whatever comes of each comparison."""
    small = lambda x: x.norm(dim=2, keepdim=True) < 1e-3  # noqa: E731
    odd = lambda x: (x.abs().mean(2, keepdim=True) > 1e-9) & ~(x > 1000).any(2, keepdim=True)  # noqa: E731
    clamped = lambda x: torch.where(small(x) | odd(x), x, x.clamp(-1000, 1000))  # noqa: E731
    assert in_tiles(Body(lambda _, x: clamped(x).sort(2).values * torch.relu(x)), dtype)


def test_what_reaches_farther_than_a_tile_is_refused() -> None:
    """A row of 600 tokens in tiles of 150, of which a convolution sees one 290 before: behind all pieces."""
    assert not in_tiles(fuzz_models.Neighbours(8, dilation=290), shape=(1, 600, 8))


def without_gradient(own: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = own.other(x)
    return x + y


class SineOfBoth(fuzz_models.Sine):
    """A backward that has sines where that of its forward has cosines."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.sin()


def test_a_backward_that_a_trace_loses_is_refused() -> None:
    assert not in_tiles(Body(lambda _, x: StraightThrough.apply(x) + x))
    assert not in_tiles(Body(lambda _, x: SineOfBoth.apply(x)))
    assert not in_tiles(Body(without_gradient, other=nn.Linear(8, 8)))
    assert in_tiles(Body(lambda own, x: x + own.other(x).detach(), other=nn.Linear(8, 8)))


class Steep(StraightThrough):
    """Has a backward of its own that is that of its forward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 200

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad * 100 * 2


def test_gradients_beyond_fp16_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a segment that is tried in its own dtype alone."""
    monkeypatch.setattr("zfunc.engine.rows.check.WAYS", ((None, False),))
    assert in_tiles(Body(lambda _, x: Steep.apply(x)), torch.float16)


def test_each_segment_s_own_constants_are_tried() -> None:
    """Of two that are alike, the second one's buffer lets tokens through."""
    hidden = lambda own, x: torch.where(own.open, x.sort(1).values, x)  # noqa: E731
    made = [Body(hidden, open=nn.Buffer(torch.tensor(n > 0))) for n in range(2)]
    named = [*((f"body{n}", x) for n, x in enumerate(made)), ("loss", TokenLoss())]
    segments = [zfunc.segment(name, module) for name, module in named]
    assert segments[0].like(segments[1])
    program = zfunc.compile(segments, precision="fp32", recompute="all", device="cpu", tiles=4)
    with pytest.raises(zfunc.errors.ExecutionError, match=f"segment 'body1': .*{OTHERWISE}"):
        zfunc.train_step(program, zfunc.init(program), (torch.rand(ROWS), torch.rand(ROWS[:-1])))


class SummedLoss(nn.Module):
    """Says that its loss is a sum over tokens, which it is if nothing is `added`."""

    def __init__(self, added: Any) -> None:
        super().__init__()
        self.out, self.added = nn.Linear(8, 1), added
        self.summed_targets = lambda y: y

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(x + self.added(x))[..., 0] - y).square().sum()


@pytest.mark.parametrize(("added", "fits"), [(torch.tanh, True), (lambda x: 1e-3 * x.sort(1).values, False)])
def test_a_loss_that_is_no_sum_over_tokens_is_refused(added: Any, fits: bool) -> None:
    segments = [zfunc.segment("body", nn.Linear(8, 8)), zfunc.segment("loss", SummedLoss(added))]
    program = zfunc.compile(segments, precision="fp32", recompute="all", device="cpu", tiles=4)
    step = lambda: zfunc.train_step(program, zfunc.init(program), (torch.rand(ROWS), torch.rand(ROWS[:-1])))  # noqa: E731
    if fits:
        step()
    else:
        with pytest.raises(zfunc.errors.ExecutionError, match=f"segment 'loss': .*{OTHERWISE}"):
            step()


class Scored(nn.Module):
    """A sum over tokens, beside an output of rows."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return (x.mean(-1) - y).square().sum(), {"rows": x}


def test_a_loss_in_tiles_has_no_auxiliary_outputs_and_one_that_passes_whole_has() -> None:
    batch, scored = (torch.rand(ROWS), torch.rand(ROWS[:-1])), Scored()
    layer = nn.Linear(8, 8)

    def outputs() -> Tensor:
        segments = [zfunc.segment("body", layer), zfunc.segment("loss", scored)]
        program = zfunc.compile(segments, precision="fp32", recompute="all", device="cpu", tiles=4)
        return zfunc.train_step(program, zfunc.init(program), batch)[1].aux["rows"]

    torch.testing.assert_close(outputs(), layer(batch[0]).detach())
    setattr(scored, "summed_targets", lambda y: y)  # noqa: B010
    with pytest.raises(ValueError, match="tiles: got 4 and a loss with auxiliary outputs.*passes whole"):
        outputs()


# --- torch's operations that have a dimension ---------------------------------------------------------------


def with_a_dimension() -> Iterator[tuple[str, Any]]:
    """Those of torch that change nothing they are given."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and "backward" not in name:
            how = getattr(getattr(torch.ops.aten, packet), overload or "default")
            dims = {str(a.type) for a in how._schema.arguments if a.name in ("dim", "dims")}
            by_number = {"int", "List[int]", "Optional[int]", "Optional[List[int]]"} & dims  # and not by name
            if by_number and not how._schema.is_mutable:
                yield f"{packet}.{how._overloadname}", how


ALONG = dict(with_a_dimension())
SKIPPED = {  # and why they are not tried
    "of sparse tensors": """_sparse_csr_prod.dim_dtype _sparse_csr_sum.dim_dtype _sparse_log_softmax.default
        _sparse_log_softmax.int _sparse_softmax.default _sparse_softmax.int _sparse_sum.dim _sparse_sum.dim_dtype
        _validate_compressed_sparse_indices.default""",
    "numbers": "size.int stride.int sym_size.int sym_stride.int",
    "sizes that depend on values": """narrow.Tensor repeat_interleave.self_Tensor
        tensor_split.tensor_indices_or_sections unique_consecutive.default unique_dim.default
        unique_dim_consecutive.default""",
    "of two dimensions, or of all": """linalg_matrix_norm.default linalg_matrix_norm.str_ord linalg_norm.ord_str
        linalg_tensorsolve.default nuclear_norm.dim permute.default permute_copy.default rot90.default""",
    "of sizes of its own": "cross.default linalg_cross.default select_scatter.default unflatten.int",
    "no derivative, or for the derivative of another": """_aminmax.dim _chunk_cat.default _fft_c2c.default
        _fft_c2r.default _logcumsumexp.default _masked_softmax.default _stack.default
        _weight_norm_interface.default glu_jvp.default linalg__powsum.default slice_inverse.default""",
    "beside another of its name": """gradient.scalarrayarray gradient.scalarrayint gradient.tensorarray
        gradient.tensorarrayint index_fill.int_Tensor nanquantile.default native_norm.ScalarOpt_dim_dtype
        norm.ScalarOpt_dim_dtype quantile.default scatter.reduce scatter.value_reduce""",
}
TRIED = {name: how for name, how in ALONG.items() if name not in " ".join(SKIPPED.values()).split()}
NORMS = ("_weight_norm.default", "norm_except_dim.default", "renorm.default")  # over tokens, of each feature
BY_DAY = ("cumsum.default", "logsumexp.default", "max.dim", "softmax.int", "sort.default", "topk.default")
FILLED = {"int": 1, "bool": False, "number": 2.0, "float": 0.5, "Optional[number]": 2.0}
FILLED |= {"Optional[bool]": True, "str": "mean"}  # a text is how to reduce


def filled(how: Any, x: Tensor, dim: int) -> dict[str, Any]:
    """Arguments of an operation of `x` along a dimension."""
    given, size, flat = dict[str, Any](), x.shape[dim], how._schema.name.startswith("aten::index_")
    for n, a in enumerate(how._schema.arguments):
        kind = str(a.type)
        if a.name in ("dim", "dims"):
            given[a.name] = [dim] if "List" in kind else dim
        elif n == 0:
            given[a.name] = [x, x.cos()] if kind == "List[Tensor]" else x
        elif a.name in ("index", "indices") and kind == "Tensor":
            given[a.name] = torch.arange(size).flip(0) if flat else (x > 0).long()
        elif kind == "Tensor":
            given[a.name] = x.sin()
        elif kind == "List[int]" and not a.has_default_value():
            given[a.name] = [1] if a.name == "shifts" else [size // 2, size - size // 2]
        elif not a.has_default_value():
            given[a.name] = FILLED[kind]
    return given


def along(how: Any, dim: int) -> Body:
    """An operation along a dimension of rows, and what it gives added to them."""

    def run(_: Any, x: Tensor) -> Tensor:
        y = next(t for t in tree_leaves(how(**filled(how, x, dim))) if isinstance(t, Tensor))
        y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
        if y.shape[:2] != x.shape[:2]:
            return x + y.to(x.dtype).mean()
        return x + y.to(x.dtype).reshape(*x.shape[:2], -1).mean(2, keepdim=True)

    return Body(run)


def test_most_operations_that_have_a_dimension_are_tried() -> None:
    """And the others are there, so that no reason outlives them."""
    skipped = " ".join(SKIPPED.values()).split()
    assert {*skipped} <= {*ALONG}
    assert len(TRIED) > 130 > 2 * len(skipped)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in BY_DAY else pytest.mark.slow) for x in TRIED]
)
def test_an_operation_along_tokens_is_that_of_the_row_or_refused(name: str) -> None:
    """Along features each passes but NORMS."""
    for dim in (1, 2):
        body = along(TRIED[name], dim)
        body(torch.randn(2, 16, 8, requires_grad=True)).sum().backward()
        passed = in_tiles(body)
        assert passed or dim == 1 or name in NORMS
