"""Forward and backward of a segment: the bits of `torch.func.vjp` however much is kept, and randomness of a key."""

import functools
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import shared_traces
import torch
import trained
from fuzz_models import CHANGING, KEEPING, Apply, Sine
from pairs import in_pairs
from small_models import EDITS, Loss, bits, regression, tied_gpt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import zfunc
from zfunc.core.setting_values import RECOMPUTE
from zfunc.engine.program.specialize import specialize
from zfunc.engine.trace import fake_tensors, traced_passes
from zfunc.engine.trace.cost_trace import trace
from zfunc.engine.trace.fake_tensors import FakeMode, FakeTensors, keep_device_guard
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.engine.trace.tensor_memory import empty_like_strided
from zfunc.engine.trace.vjp import make_vjp
from zfunc.runtime.rng import redirected, seeded

pytestmark = pytest.mark.usefixtures("poisoned")

Params = dict[str, Tensor]


class Noisy(torch.autograd.Function):
    """A backward that draws, and noise that only the backward needs."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.rand_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad * ctx.saved_tensors[0] + torch.randn_like(grad)


def branching(params: Params, x: Tensor) -> Tensor:
    return x @ params["w"] if float(x.detach().sum()) > 0 else x @ params["w"].T


def rows_of_a_cast(params: Params, x: Tensor) -> Tensor:
    wide = x.detach().double()
    for row in wide:
        row.cos_()
    return (x @ params["w"] * wide).float()


def draws_of_all_kinds(params: Params, x: Tensor) -> Tensor:
    x = F.dropout(x @ params["w"], 0.3) + torch.rand(8) * torch.randn_like(x) + torch.randint(0, 3, (8,))
    torch.rand(3)  # drawn for nothing
    x = x * torch.bernoulli(torch.sigmoid(x.detach())) + torch.randperm(8) * 0.1
    return F.dropout(x.relu_(), 0.5) + torch.normal(0.0, 1.0, (8,))


def noise_beside_the_result(params: Params, x: Tensor) -> Tensor:
    y = x @ params["w"]
    leak, noise = torch.empty(y.shape), torch.empty(y.shape)
    torch.ops.aten.rrelu_with_noise.out(y.detach(), noise, 0.1, 0.3, True, out=leak)
    return y * leak


FUNCTIONS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "unused parameter, in place": lambda p, x: torch.tanh(x @ p["w"]).clone().mul_(p["unused"].sum() * 0 + 2),
    "unused parameter": lambda p, x: torch.tanh(x @ p["w"]),
    "a weight handed on": lambda p, _: p["w"].mT,
    "constants made inside": lambda p, x: (x @ p["w"]) * torch.ones(8) + torch.arange(8),
    "mask made inside": lambda p, x: (
        (x @ x.mT).masked_fill(torch.tril(torch.ones(3, 3)) == 0, 0.0) @ x @ p["w"]
    ),
    "fourier": lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p["w"])),
    "conjugated": lambda p, x: (lambda z: (z @ z.mH @ z).real)(torch.polar(x.exp(), x @ p["w"]).mT),
    "negated": lambda p, x: torch.polar(x.exp(), x @ p["w"]).conj().imag * x.cos(),
    "autograd Function": lambda p, x: Sine.apply(x @ p["w"]),
    "expanded": lambda p, x: (x @ p["w"])[:, :1].expand(-1, 3, -1),
    "sum over time": lambda p, x: (x @ p["w"]).sum(1),
    "residuals that are empty": lambda p, x: F.batch_norm(x @ p["w"], torch.zeros(3), torch.ones(3)),
    "branch on data": branching,
    "rows of a cast": rows_of_a_cast,
    "draws": draws_of_all_kinds,
    "noise beside the result": noise_beside_the_result,
    **EDITS,
    "draws in backward": lambda p, x: Noisy.apply(F.dropout(x @ p["w"], 0.5))[0],
}


def first(self: Any, x: Tensor) -> Tensor:
    return self.inner(x)[0]


class Turned(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT.contiguous()).mT


def attention() -> nn.Module:
    inner = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.2)
    return Apply(lambda self, x: self.inner(x, x, x)[0], inner=inner)


PIECES = ("conv", "gru", "rnn", "conformer", "patches", "temporal", "log sigmoid", "mask by halves")
MODULES: dict[str, Callable[[], nn.Module]] = {
    "mixer": lambda: nn.Sequential(KEEPING["mixed"](3, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
    "attention": attention,
    **{x: functools.partial(KEEPING[x], 3, 8) for x in PIECES},
    "RReLU": nn.RReLU,
    "LSTM": lambda: Apply(first, inner=nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)),
}
BY_DAY = ("unused parameter, in place", "a weight handed on", "branch on data", "draws in backward", "LSTM")
IN_PLACE = UNSIZED = ("min-cut",)  # a view is changed in place; a workspace that moves has no size in a trace
NOT_TRACED = {
    "branch on data": RECOMPUTE,
    "gru": IN_PLACE,
    "rows of a cast": IN_PLACE,
    "RReLU": IN_PLACE,
    "mask by halves": IN_PLACE,
    "noise beside the result": IN_PLACE,
    **dict.fromkeys([*EDITS][1:], IN_PLACE),
    "fourier": IN_PLACE,
    "LSTM": UNSIZED,
}


def functional(name: str) -> tuple[Callable[[Params, Tensor], Tensor], Params]:
    """A function of the table and its parameters."""
    torch.manual_seed(0)
    if name in FUNCTIONS:
        return FUNCTIONS[name], {"w": torch.randn(8, 8), "unused": torch.ones(2)}
    segment = zfunc.segment("m", MODULES[name]())
    values = segment.initial(0)
    return segment.function, {
        k: values[p.name].clone() for k, p in zip(segment.short, segment.parameters, strict=True)
    }


def spoil(tree: Any) -> None:
    """Fill the floating-point tensors with NaN."""
    for t in tree_leaves(tree):
        if isinstance(t, Tensor) and t.is_floating_point():
            t.fill_(torch.nan)


def test_fake_views_have_the_strides_of_real_ones() -> None:
    """Of an image in one row, seen from tokens, group_norm chose channels last in the trace alone."""
    for shape, dims, view in (
        ((1, 64, 16), (1, 2), (1, 16, 8, 8)),
        ((64, 1, 16), (0, 2), (16, 1, 8, 8)),
        ((8, 1, 4), (0, 2), (4, 1, 1, 8)),
    ):
        real = torch.empty(shape).transpose(*dims)
        with FakeTensors() as mode:
            fake = mode.from_tensor(real)
            strides = {fake.view(view).stride(), fake.reshape(view).stride()}
        assert strides == {real.view(view).stride()}


@pytest.mark.parametrize(
    ("name", "also_first"),
    [
        *((x, x in BY_DAY) for x in (*FUNCTIONS, *MODULES)),
        *(pytest.param(x, True, marks=pytest.mark.slow) for x in FUNCTIONS if x not in BY_DAY),
    ],
)
def test_gradients_are_those_of_vjp_to_the_bit(
    name: str, also_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`also_first`: as the first segment too, whose input gets no gradient."""
    function, params = functional(name)
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    with torch.enable_grad(), seeded(5), redirected():
        y, pull = torch.func.vjp(function, params, x)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    if y.dim() == 3:
        cotangent = cotangent.mT.contiguous().mT  # not as y is laid out
    laid_out = torch.empty_like(y).copy_(cotangent)
    if name != "draws in backward":
        with seeded(5), redirected():
            expected, below = pull(laid_out, retain_graph=False, create_graph=False)
    joints: Any = {True: {}, False: {}}  # traced once
    for recompute in RECOMPUTE:
        caplog.clear()
        for wrt_input in (True, False) if also_first else (True,):
            moving = wrt_input and recompute != "none"  # then slots are filled anew, with NaN here
            options = PassOptions(recompute, wrt_input=wrt_input, moving=moving, split=True)
            pair = make_vjp(function, options, name="this one", joints=joints[wrt_input])
            if joints[wrt_input]:  # of other fakes than these
                with FakeTensors(allow_non_fake_inputs=True):
                    fakes = empty_like_strided((params, x, y))
                    pair.prepare(SegmentWeights(fakes[0], {}), (fakes[1],), fakes[2])
            for _ in range(2):  # traced, then from the cache
                weights, again = ({k: v.clone() for k, v in params.items()} for _ in range(2))
                with torch.no_grad(), seeded(5):
                    mine, residuals = pair.forward(SegmentWeights(weights, {}), (x,))
                marked = [t for t in tree_leaves((mine, residuals)) if isinstance(t, Tensor)]
                assert not moving or not any(t.is_conj() or t.is_neg() for t in marked), "in bytes"
                slot = tree_map_only(Tensor, torch.clone, (x, residuals) if moving else (x, None))
                spoil(weights if moving else {})
                with torch.no_grad(), seeded(5):
                    x_again, kept = slot if moving else (x, residuals)
                    given = SegmentWeights(again, {}), (x_again,), kept, [cotangent]
                    halved = NOT_TRACED.get(name) != RECOMPUTE
                    first, (run, pending) = pair.backward_input(*given) if halved else ([], (dict, []))
                    grads, moved = pair.backward(*given)
                spoil((again, slot) if moving else {})
                with torch.no_grad(), seeded(5):
                    later = run(*pending)
                assert not halved or all(
                    map(torch.equal, [*later.values(), *first], [*grads.values(), *moved])
                )
                if name == "draws in backward" and (recompute, wrt_input) == (RECOMPUTE[0], True):
                    expected, (below,) = grads, moved  # the numbers of its draws are zfunc's own
                assert torch.equal(mine, y), recompute
                assert mine.stride() == y.stride()
                assert all(torch.equal(grads[k], expected[k]) for k in params), recompute
                assert [torch.equal(m, below) for m in moved] == [True] * wrt_input, recompute
                assert all(m.stride() == x.stride() for m in moved)
        assert ("'this one' runs with" in caplog.text) == (recompute in NOT_TRACED.get(name, ()))


class Watched(torch.fx.Interpreter):
    """Runs a graph, and notes the results that are not laid out as they were traced."""

    others: list[str]

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        for traced, real in zip(tree_leaves(n.meta.get("val", result)), tree_leaves(result), strict=True):
            sized = [i for i, size in enumerate(real.shape) if size > 1] if isinstance(real, Tensor) else []
            if any(traced.stride(i) != real.stride(i) for i in sized):
                self.others.append(f"{n.target}: {traced.stride()} was traced, {real.stride()} is real")
        return result


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        *((x, [n % 3]) for n, x in enumerate((*KEEPING, *CHANGING))),
        *(pytest.param(x, [0, 1, 2], marks=pytest.mark.slow) for x in (*KEEPING, *CHANGING)),
    ],
)
def test_every_result_is_laid_out_as_it_was_traced(
    name: str, inputs: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every piece of the fuzzer's models, beside a product and a norm that see what it is laid out as."""
    rows, width = 4, 8
    piece = CHANGING[name][0] if name in CHANGING else KEEPING[name]
    y = (module := piece(rows, width))(torch.randn(3, rows, width))
    module = nn.Sequential(module, nn.LayerNorm(y.shape[-1]), nn.Linear(y.shape[-1], 5), nn.LogSoftmax(1))
    params = {k: p.detach() for k, p in module.named_parameters()}
    fixed = dict(module.named_buffers())
    others = list[str]()
    monkeypatch.setattr(Watched, "others", others, raising=False)
    monkeypatch.setattr(traced_passes, "runnable", lambda graph, _: Watched(graph).run)
    pair = make_vjp(lambda p, x: torch.func.functional_call(module, p, x), PassOptions("all"))
    laid_out = torch.randn(3, rows, width), torch.randn(3, width, rows).mT, torch.randn(rows, 3, width)
    for x in (laid_out[n] if n < 2 else laid_out[n].transpose(0, 1) for n in inputs):
        with torch.no_grad():
            y, _ = pair.forward(SegmentWeights(params, fixed), (x,))
            for cotangent in (torch.ones_like(y), torch.ones(y.mT.shape).mT):
                pair.backward(SegmentWeights(params, fixed), (x,), None, [cotangent])
    assert "without being traced" not in caplog.text
    assert others == []


def attending(p: Params, x: Tensor, *, keys: int = 4, dropout: float = 0.0, mask: str = "causal") -> Tensor:
    """Attention of 4 heads over `keys` heads of keys, with a mask made inside or a trained bias."""
    q, k = ((x @ p[name]).unflatten(-1, (n, -1)).transpose(1, 2) for name, n in (("q", 4), ("k", keys)))
    bias = {"causal": None, "window": torch.ones(5, 5).tril().bool(), "trained": p["bias"]}[mask]
    y = F.scaled_dot_product_attention(
        q, k, k * 2, bias, dropout, bias is None, scale=0.1, enable_gqa=keys < 4
    )
    return y.transpose(1, 2).flatten(2)


def attention_kernels(graph: Any) -> list[str]:
    names = [getattr(n.target, "_opname", str(n.target)) for n in graph.nodes]
    return [x for x in names if ("attention" in x or "softmax" in x) and "backward" not in x]


ATTENTIONS: dict[str, tuple[dict[str, Any], bool]] = {  # and whether its kernel is the fused one
    "causal": ({}, True),
    "grouped": ({"keys": 2}, True),
    "window": ({"mask": "window"}, True),
    "dropout": ({"dropout": 0.1}, False),
    "trained mask": ({"mask": "trained"}, False),  # fused where nothing requires a gradient
}


@pytest.mark.parametrize(("kind", "size", "recompute"), in_pairs(ATTENTIONS, [8, 300], ["all", "min-cut"]))
def test_forward_has_the_attention_kernel_that_backward_differentiates(
    kind: str, size: int, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch chooses by what requires a gradient: both passes come from one trace, with gradients."""
    graphs: list[Any] = []
    (settings, fused), runnable, width = ATTENTIONS[kind], traced_passes.runnable, 8
    monkeypatch.setattr(
        traced_passes, "runnable", lambda g, compiled: graphs.append(g.graph) or runnable(g, compiled)
    )
    heads = {"q": 4, "k": settings.get("keys", 4)}
    params = {name: torch.randn(width, n * size) for name, n in heads.items()}
    params["bias"] = torch.randn(5, 5)
    pair = make_vjp(functools.partial(attending, **settings), PassOptions(recompute))
    with torch.no_grad(), seeded(5):
        pair.forward(SegmentWeights(params, {}), (torch.randn(2, 5, width),))
    forward, backward = map(attention_kernels, graphs)
    assert len(forward) == 1
    assert ("flash" in forward[0]) == fused
    names, kept = ([x.strip("_") for x in graph] for graph in (backward, forward))
    assert names in (kept, [])  # [] if it keeps the result
    assert backward or recompute == "min-cut"


def test_residuals_of_min_cut_are_tensors_and_fewer_bytes_than_autograd_keeps() -> None:
    def block(params: Params, x: Tensor) -> Tensor:
        return x + torch.relu(torch.sin(x @ params["w"]).exp()) @ params["w"]

    params, x = {"w": torch.randn(64, 64)}, torch.randn(256, 64)
    _, residuals = make_vjp(block, PassOptions("min-cut")).forward(SegmentWeights(params, {}), (x,))
    assert all(isinstance(t, Tensor) for t in residuals)
    own = sum(t.nbytes for t in residuals if t.data_ptr() not in (x.data_ptr(), params["w"].data_ptr()))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block({"w": params["w"].clone().requires_grad_()}, x.clone().requires_grad_())
    assert own < sum(t.nbytes for t in saved)


def test_backward_holds_what_forward_widens_in_16_bits_until_it_reads_it() -> None:
    """Norms in fp32 of a stream in bf16: of eight wide copies one is alive at a time."""

    def norms(_: Params, x: Tensor) -> Tensor:
        for _ in range(8):
            wide = x.float()
            x = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
        return x

    pair = make_vjp(norms, options := PassOptions("all"))
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    cost = trace(
        pair, options, SegmentWeights({}, {}), (x,), device=torch.device("meta"), guess=lambda *_: x
    ).cost
    assert cost.backward.workspace < 16 * x.nbytes  # 22 with all of them


# --- a whole step ---------------------------------------------------------------------------------------


def chain(*modules: Callable[[], nn.Module]) -> list[zfunc.Segment]:
    class Last(Loss):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return super().forward(x.sum(1), targets)

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), *(make() for make in modules), Last(8)]
    return [zfunc.segment(f"m{i}", m) for i, m in enumerate(layers)]


@pytest.mark.parametrize(
    ("precision", "modules"),
    [
        ("bf16", [lambda: nn.Sequential(Turned(nn.BatchNorm1d(8)), nn.Linear(8, 8))]),
        *(pytest.param(x, [*MODULES.values()], marks=pytest.mark.slow) for x in ("fp32", "bf16")),
    ],
    ids=["statistics", "all", "all in bf16"],
)
def test_ordinary_modules_train_alike_with_any_recompute(precision: Any, modules: list[Any]) -> None:
    results = []
    for recompute in RECOMPUTE:
        segments = chain(*modules)
        program = zfunc.compile(
            segments, precision=precision, recompute=recompute, device="cpu", bucket_size=64
        )
        state = zfunc.init(program)
        for i in range(2):
            x, y = regression(4)(i)
            state, m = zfunc.train_step(program, state, (x[:, None].expand(-1, 3, -1), y))
        results.append((m.loss, m.grad_norm, zfunc.params(program, state)))
    (loss, norm, params), *others = results
    for other_loss, other_norm, other_params in others:
        assert (other_loss, other_norm) == (loss, norm)
        assert all(torch.equal(v, params[k]) for k, v in other_params.items())


@pytest.mark.parametrize(("name", "why"), [("gru", "aten."), ("LSTM", "backward reads ")])
def test_a_segment_that_min_cut_cannot_take_is_named(
    name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And trains, its residuals on the host."""
    segments = chain(MODULES["conv"], MODULES[name])
    program = zfunc.compile(
        segments, precision="fp32", recompute="min-cut", activations_on="host", device="cpu"
    )
    with caplog.at_level(logging.WARNING):
        x, y = regression(4)(0)
        zfunc.train_step(program, zfunc.init(program), (x[:, None].expand(-1, 3, -1), y))
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith(f"segment 'm2' runs with `recompute=all`, because it cannot be traced: {why}")


# --- randomness -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["all", "min-cut"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_or_not_a_segment_draws_the_same(
    backend: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = drawn("all", compiled=False)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    assert drawn(recompute, compiled=True) == pytest.approx(eager, rel=1e-5)
    assert eager == pytest.approx([4.1547, 4.1617], rel=1e-3)


def drawn(recompute: Any, *, compiled: bool) -> list[float]:
    """Losses of two steps with dropout."""
    segments, data = tied_gpt(0.3)
    program = zfunc.compile(
        segments, device="cpu", precision="fp32", recompute=recompute, compile_segments=compiled
    )
    state, m = zfunc.train_step(program, zfunc.init(program), data(0))
    return [m.loss, zfunc.train_step(program, state, data(1))[1].loss]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_thread_that_draws_all_the_time_changes_nothing_and_is_not_disturbed(recompute: Any) -> None:
    segments, data = tied_gpt(0.3)
    program = zfunc.compile(segments, device="cpu", precision="fp32", recompute=recompute)
    start = zfunc.params(program, zfunc.init(program))

    def train() -> list[float]:
        state, seen = zfunc.init(program, params=start), []
        for i in range(4):
            state, m = zfunc.train_step(program, state, data(i))
            seen += [m.loss, m.grad_norm]
        return seen

    alone = train()
    drawn: list[float] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(float(torch.rand(())))

    torch.manual_seed(11)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        beside = train()
        zfunc.init(program)
    finally:
        stop.set()
        thread.join()
    assert beside == alone
    torch.manual_seed(11)
    assert drawn == [float(torch.rand(())) for _ in drawn]
    assert len(drawn) > 100


def test_a_segment_that_draws_in_evaluation_depends_on_the_state_alone() -> None:
    class Drops(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5)  # also in eval mode

    program = zfunc.compile([zfunc.segment("a", Drops(8, 8)), zfunc.segment("loss", Loss(8))], device="cpu")
    state, before = zfunc.init(program), torch.get_rng_state()
    assert zfunc.evaluate(program, state, regression(4)(0)) == zfunc.evaluate(
        program, state, regression(4)(0)
    )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("recompute", ["all", "min-cut"])
def test_a_wrong_guess_of_output_shapes_changes_nothing(recompute: Any) -> None:
    """What a segment returns is a guess: with any other the graphs are those that are traced without one."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    parameters, x = dict(module.named_parameters()), torch.randn(3, 4)
    weights = SegmentWeights({name: p.detach() for name, p in parameters.items()}, {})
    results: list[Any] = []
    for guess in (
        torch.empty(3, 6),
        torch.empty(6, 3).T,
        torch.empty(3, 6).half(),
        [torch.empty(3)] * 2,
        None,
    ):
        pair = make_vjp(lambda p, x: torch.func.functional_call(module, p, x), PassOptions(recompute))
        pair.prepare(weights, (x,), guess)
        y, residuals = pair.forward(weights, (x,))
        grads, below = pair.backward(weights, (x,), residuals, [torch.ones_like(y)])
        results.append([y, *grads.values(), *below])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_the_first_step_runs_a_segment_three_times_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice to see that it is pure, once to trace it, which sees what the loss depends on."""
    monkeypatch.setattr(shared_traces, "SHARED", ())  # another test may have traced the like
    plain, calls = nn.Linear.forward, list[int]()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (calls.append(1), plain(self, x))[1])
    segments = [zfunc.segment("body", nn.Linear(8, 16)), zfunc.segment("loss", Loss(16))]
    program = zfunc.compile(segments, device="cpu", precision="bf16")
    calls.clear()
    x, targets = regression()(0)
    specialize(program, (x, targets))
    # The last segment keeps its pullback: it is checked twice and costed, and never traced.
    assert len(calls) == 3 + 3


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_kernel_may_return_other_strides_than_were_traced(
    recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that no table knows: a view is a copy then, where its memory is not written."""
    module = nn.Sequential(KEEPING["patches"](4, 8), nn.Linear(8, 5))
    params, x = {k: p.detach() for k, p in module.named_parameters()}, torch.randn(3, 4, 8)

    def gradients() -> list[Tensor]:
        call = lambda p, x: torch.func.functional_call(module, p, x)  # noqa: E731
        pair = make_vjp(call, PassOptions(recompute))
        with torch.no_grad():
            y, residuals = pair.forward(SegmentWeights(params, {}), (x,))
            own, below = pair.backward(SegmentWeights(params, {}), (x,), residuals, [y.cos()])
        return [y, *own.values(), *below]

    known = gradients()
    monkeypatch.setattr(fake_tensors, "MOST_RUN", 0)
    assert all(torch.equal(a, b) for a, b in zip(known, gradients(), strict=True))


def test_a_graph_is_there_for_other_threads_while_one_looks_it_up() -> None:
    """Devices may run passes of one segment at once: what one of them found missing would be traced again."""
    held, seen = OrderedDict[Any, str](), list[int]()

    class Key:
        def __hash__(self) -> int:
            seen.append(len(held))  # another thread may go on here
            return 0

    key = Key()
    for _ in range(3):
        assert traced_passes.cached(held, key, lambda: "graphs", most=2) == "graphs"
    assert all(seen[2:])  # but when it was made


def test_threads_trace_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """make_fx patches the process: two traces at once would fail, and segments would run without being traced."""

    def step(_: int) -> Any:
        program, batch = trained.compiled("pairs", precision="fp32")
        state, metrics = zfunc.train_step(program, zfunc.init(program), batch(0))
        return metrics.loss, bits(state)

    caplog.set_level(logging.INFO, "zfunc")
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            (loss, one), *others = threads.map(step, range(4))
    finally:
        sys.setswitchinterval(5e-3)
    assert all(x == loss and all(map(torch.equal, y, one)) for x, y in others)
    assert "without being traced" not in caplog.text


def test_fake_tensors_of_a_thread_leave_nothing_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a torch for CUDA without a GPU. There a second cut of any module was a segmentation fault."""
    keep_device_guard.cache_clear()
    owners = list[threading.Thread]()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch._C, "_ensureCUDADeviceGuardSet", lambda: owners.append(threading.current_thread())
    )

    def enter() -> None:
        with FakeMode():
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert owners[0].is_alive()
    assert owners[1] is thread
