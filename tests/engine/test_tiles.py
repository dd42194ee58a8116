"""A segment in tiles is the segment: outputs, gradients, losses, trainings, and the masks of dropout."""

from itertools import product
from typing import Any

import plain
import pytest
import torch
import trained
from attrs import evolve
from hf_models import CONFIGS, VOCAB, cut, layers, random_model, rows
from pairs import in_pairs
from small_models import aliases, edits, tied_gpt
from tile_law import Results, cast, far, passes_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

import zfunc
from zfunc.engine.program.fit_to_memory import products_are_tf32
from zfunc.engine.rows import check as tile_check
from zfunc.engine.rows.keys import DeviceKeys, HostKeys
from zfunc.engine.rows.row_attention import attend_row
from zfunc.engine.rows.tiled_vjp import tiled_vjp
from zfunc.engine.step.evaluate import outputs
from zfunc.engine.trace import vjp
from zfunc.engine.trace.host_keys import HostMemory
from zfunc.engine.trace.joint_graph import OtherOutputError, joint_graph
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.models.gpt import Head, gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.hf.adapters import lora_config
from zfunc.models.sequences import KVCache
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.rng import seeded

# Some layers of theirs cannot pass in tiles: what is said of them.
REFUSED = {
    "Gemma 2": "attention by hand, as with a softcap",
    "GPT-OSS": "expected rows",  # beside a sum over all tokens, of its routers
    "Mixtral": "expected rows",
    "Qwen3 MoE": "expected rows",
}
# Layers in which tiles meet something new; those of the others are made of what is in these.
BY_DAY = ("GPT-2", "Llama 4", "Qwen3", "Phi-3, long positions", "OLMo 2", "Mistral, window")
WAYS = [*product((2, 4, 8), (False, True))]
LAYERS = in_pairs(BY_DAY, WAYS)
LAYERS += [
    pytest.param(x, way, marks=pytest.mark.slow)
    for x in CONFIGS
    if x not in (*REFUSED, *BY_DAY)
    for way in WAYS
]


# --- layers and losses --------------------------------------------------------------------------------------


def assert_same_with_keys_on_the_host(got: Results, *given: Any) -> None:
    """To the bit; and nothing is written behind the bytes that they say they take."""
    host = HostMemory(torch.full((1 << 20,), 255, dtype=torch.uint8))
    assert all(map(torch.equal, passes_of(*given, host).values(), got.values()))
    assert host.flat is not None
    assert 0 < host.nbytes < 1 << 20
    assert (host.flat[host.nbytes :] == 255).all()
    assert host.copied_bytes


@pytest.mark.parametrize(("name", "way"), LAYERS)
def test_a_layer_in_tiles_is_the_layer(
    name: str, way: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, in fp32 to the order of sums. What is known by its trace runs no trial, so that
    layers of models take no more memory than was planned."""
    if name in ("GPT-2", "Qwen3", "OLMo 2"):
        monkeypatch.setattr(tile_check, "_in_pieces", lambda *_: pytest.fail("tried"))
    tiles, documents = way
    for segment, values, x in layers(name, rows(documents)):
        whole, got = (passes_of(segment, values, x, n) for n in (1, tiles))
        assert got.keys() == whole.keys()
        off = {k: far(t, whole[k]) for k, t in got.items()}
        assert max(off.values()) < 3e-6, (segment.name, off)
        assert_same_with_keys_on_the_host(got, segment, values, x, tiles)


@pytest.mark.parametrize(
    ("name", "tiles", "documents"),
    in_pairs(["GPT-2", "Mistral, window", "Qwen3"], [2, 4, 8], [True, False], meet=1),
)
def test_a_layer_in_tiles_of_16_bits_is_no_farther_from_exact(name: str, tiles: int, documents: bool) -> None:
    """Over all gradients, as one of a few elements differs by chance."""
    segment, values, x = next(layers(name, rows(documents)))
    values, x = cast(values, torch.bfloat16), cast(x, torch.bfloat16)
    exact = passes_of(segment, cast(values, torch.float32), cast(x, torch.float32), 1)
    whole, got = (passes_of(segment, values, x, n) for n in (1, tiles))
    mine, theirs = (sum(far(t, exact[k]) ** 2 for k, t in of.items()) ** 0.5 for of in (got, whole))
    assert mine < 1.1 * theirs
    assert_same_with_keys_on_the_host(got, segment, values, x, tiles)


@pytest.mark.parametrize("place", [DeviceKeys, HostKeys])
def test_a_pass_keeps_the_keys_of_a_tile_once(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though backward makes them twice."""
    kept, put = list[Any](), place.put
    monkeypatch.setattr(
        place, "put", lambda keys, part, made: (kept.append((keys, part)), put(keys, part, made))
    )
    host = HostMemory(torch.empty(1 << 20, dtype=torch.uint8)) if place is HostKeys else None
    segment, values, x = next(layers("GPT-2", rows(documents=False)))
    passes_of(segment, values, x, 4, host)
    assert len(kept) >= 2 * 4  # alive, so that each has a number of its own
    assert len({(id(keys), part) for keys, part in kept}) == len(kept)


def test_a_part_of_a_tile_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward together, as what comes out of it is known from the cut."""

    def found(*given: Any) -> Any:
        try:
            return joint_graph(*given)
        except OtherOutputError:
            pytest.fail("traced for its output alone")

    monkeypatch.setattr(vjp, "joint_graph", found)
    segment, values, x = next(layers("GPT-2", rows(documents=False)))
    trained = {short: values[full] for short, full in segment.by_short.items()}
    weights = SegmentWeights(trained, segment.constants)
    tiled_vjp(segment.function, PassOptions("all", tiles=4)).forward(weights, (x,))


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_is_none_of_rows_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        for segment, values, x in layers(name, rows(False)):
            passes_of(segment, values, x, 2)


@pytest.mark.parametrize(("name", "weighted"), in_pairs(["Qwen3", "Gemma 2", "GPT-2"], [False, True]))
def test_a_loss_in_tiles_is_the_loss(name: str, weighted: bool) -> None:
    """Of labels of which some do not count, alone or with weights of the rows."""
    *below, head = cut(name)
    assert head.module is not None
    values, x = {k: t for segment in (*below, head) for k, t in segment.initial(0).items()}, rows(False)
    labels = torch.where(x % 3 > 0, x, -100)
    targets = (labels, torch.tensor([0.3, 0.1])) if weighted else labels
    for segment in below:
        x = segment.function({**{k: values[v] for k, v in segment.by_short.items()}, **segment.constants}, x)
    weights = SegmentWeights({k: values[v] for k, v in head.by_short.items()}, head.constants)
    found = list[list[Tensor]]()
    for tiles in (1, 2, 4):
        options = PassOptions("none", last=True, tiles=tiles)
        passes = tiled_vjp(head.function, options, summed=head.module.summed_targets)
        loss, residuals = passes.forward(weights, (x, targets))
        grads, below_x = passes.backward(weights, (x, targets), residuals, [torch.tensor(3.0)])
        assert (residuals is None) == (tiles > 1)
        found.append([loss, *(grads[k] for k in sorted(grads)), *below_x])
    assert max(far(t, whole) for got in found[1:] for t, whole in zip(got, found[0], strict=True)) < 3e-6


# --- trainings ----------------------------------------------------------------------------------------------


def frozen_gpt() -> tuple[Any, Any]:
    """Nothing to train below the second block, nor some of what is in it."""
    segments, batch = tied_gpt()
    still = ("embed.", "block0.", "block1.qkv")
    return [
        evolve(x, parameters=[evolve(p, trainable=not p.name.startswith(still)) for p in x.parameters])
        for x in segments
    ], batch


def lora_llama() -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(random_model("Llama"), lora_config(rank=4))
    for full, p in model.named_parameters():
        p.data.add_(torch.randn_like(p) * 0.05 * ("lora" in full))
    tokens = torch.randint(VOCAB, (4, 17), generator=torch.Generator().manual_seed(0))
    return zfunc.hf.segments(model), lambda _: (tokens[:, :-1], tokens[:, 1:])


TRAININGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (tied_gpt, {"precision": "fp32"}),
    "micro-batches": (tied_gpt, {"precision": "fp32", "micro_batches": 3, "order": 2}),
    "frozen": (frozen_gpt, {"precision": "fp32", "micro_batches": 2, "params_on": "host"}),
    "LoRA": (lora_llama, {"precision": "fp32", "micro_batches": 2, "activations_on": "host"}),
    "bf16": (tied_gpt, {"precision": "bf16", "micro_batches": 2}),
    "fp16": (tied_gpt, {"precision": "fp16", "micro_batches": 2}),
    "edits": (edits, {"precision": "fp32"}),
    "aliases": (aliases, {"precision": "fp32", "micro_batches": 6}),
}
TRAINED = ("frozen", "edits", "aliases")  # by day


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in TRAINED else pytest.mark.slow) for x in TRAININGS]
)
def test_what_reaches_the_optimizer_is_the_gradient_of_the_row(name: str) -> None:
    """Law 11. With fp16 it was made at a scale, which is taken out again."""
    made, settings = TRAININGS[name]
    given, results = {"recompute": "all", "clip_norm": None, **settings}, list[Any]()
    for more in ({"tiles": 2}, {}, *([{"precision": "fp32"}] if given["precision"] != "fp32" else [])):
        program, batch = trained.compiled(made(), **{**given, **more})
        program = evolve(program, optimizer=plain.remembering(program.optimizer))
        state = zfunc.init(program, seed=1, loss_scale=LossScale(2.0**12) if name == "fp16" else None)
        state, metrics = zfunc.train_step(program, state, batch(0))
        results.append((metrics.loss, {k: t.clone() for k, (_, t) in plain.reached(program, state).items()}))
    (loss, got), (expected, whole), (_, exact) = *results[:2], results[-1]
    assert got.keys() == whole.keys()
    off, theirs = ({k: far(t, exact[k]) for k, t in x.items()} for x in (got, whole))
    if given["precision"] == "fp32":
        assert loss == pytest.approx(expected, rel=1e-6)
        assert max(off.values()) < 3e-6, off
    else:
        assert loss == pytest.approx(expected, rel=1e-3)
        assert sum(x * x for x in off.values()) < 1.1**2 * sum(x * x for x in theirs.values()), (off, theirs)


def test_an_evaluation_is_in_tiles_where_they_divide_its_rows() -> None:
    """And token by token behind those of the past as ever."""
    made, (_, batch) = (
        [trained.compiled(precision="fp32", recompute="all", tiles=n)[0] for n in (4, 1)],
        tied_gpt(),
    )
    results = []
    for program in made:
        state, (x, y) = zfunc.init(program, seed=1), batch(0)
        losses = [zfunc.evaluate(program, state, (x[:, :n], y[:, :n])) for n in (16, 8, 7)]
        caches = [*((KVCache(),) for _ in program.segments[:-1]), ()]
        *_, logits = outputs(program, state, x[:, :4], caches)
        *_, last = outputs(program, state, x[:, 4:5], caches)
        results.append((losses, logits, last))
    (losses, *logits), (expected, *theirs) = results
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[2] == expected[2]
    assert all(map(torch.equal, logits, theirs))


class Pair(nn.Module):
    """Two rows of one, one of two, and weights whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.rand(8, 8) / 8) for _ in range(2))

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Any:
        if isinstance(x, Tensor):
            return F.linear(x, self.a + self.b), x * 2
        y, z = x
        return (
            scaled_dot_product_attention(*3 * [F.linear(y, self.a + self.b)[:, None]], is_causal=True)[:, 0]
            + y
            + z
        )


@pytest.mark.parametrize("tiles", [2, 8, 16])
def test_gradients_in_one_tensor_are_added_once(tiles: int) -> None:
    """Of two weights that are used as their sum, and of two rows, of which neither has the other's memory."""
    pair, x = zfunc.segment("pair", Pair()), torch.randn(1, 16, 8)
    for rows_in in (x, (x, x * 3)):
        whole, got = (passes_of(pair, pair.initial(0), rows_in, n) for n in (1, tiles))
        assert max(far(t, whole[k]) for k, t in got.items()) < 3e-6


class Dropped(nn.Module):
    """2 x where dropout before attention, by which a token sees itself, keeps it; and 8 x where that after does."""

    def forward(self, x: Tensor) -> Tensor:
        v = F.dropout(x, 0.5, self.training)[:, None]
        itself = torch.arange(x.shape[1]).expand(x.shape[0], x.shape[1])
        return attend_row(v, v, v, itself)[:, 0] + 4 * F.dropout(x, 0.5, self.training)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 16, 8))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return (self.weight * x).sum()


def test_no_two_parts_of_a_step_draw_the_same_mask() -> None:
    """Steps, micro-batches, tiles, and the two halves of each, by the gradient of what they are multiplied with."""
    segments = [zfunc.segment("drop", Dropped()), zfunc.segment("loss", Weighted())]
    how: dict[str, Any] = {"precision": "fp32", "micro_batches": 2, "recompute": "all", "clip_norm": None}
    optimizer = plain.remembering(zfunc.AdamW(1e-3))
    program = zfunc.compile(segments, optimizer=optimizer, device="cpu", tiles=4, **how)
    state, x = zfunc.init(program, seed=1), torch.ones(4, 16, 8)
    x[2:] = 100.0  # the second micro-batch
    masks = list[bytes]()
    for _ in range(2):
        state, _ = zfunc.train_step(program, state, (x, torch.zeros(4)))
        gradient = plain.reached(program, state)["loss.weight"][1].view(2, 16, 8) * 2
        for own in (gradient % 100, gradient // 100):
            assert {*own.flatten().tolist()} == {0.0, 2.0, 8.0, 10.0}
            masks += [part.numpy().tobytes() for half in (own % 8, own // 8) for part in half.split(4, 1)]
    assert len({*masks}) == len(masks) == 2 * 2 * 2 * 4


def test_backward_of_a_tile_has_the_masks_of_its_forward() -> None:
    run, weights = (lambda _, x: Dropped()(x)), SegmentWeights({}, {})
    evaluate = lambda _, x: Dropped().eval()(x)  # noqa: E731
    passes = tiled_vjp(run, PassOptions("all", tiles=4), evaluate=evaluate)
    x = torch.ones(2, 16, 8)
    with seeded(3):
        y, _ = passes.forward(weights, (x,))
    with seeded(3):
        _, (dx,) = passes.backward(weights, (x,), None, [x.clone()])
    assert {*y.flatten().tolist()} == {0.0, 2.0, 8.0, 10.0}
    assert torch.equal(dx, y)


def test_a_tile_may_be_one_token() -> None:
    segment, values, x = next(layers("Llama", rows(False)[:, :5]))
    whole, got = (passes_of(segment, values, x, n) for n in (1, 5))
    assert max(far(t, whole[k]) for k, t in got.items()) < 3e-6


class Doubled(Head):
    """Another loss than the one whose targets can be summed."""

    def forward(self, passed: Any, targets: Any = None) -> Any:
        return super().forward(passed, targets).square()


def test_a_loss_of_its_own_passes_whole() -> None:
    """A head that inherits how targets are summed has a loss that is no sum over tokens."""
    config, tokens = GPTConfig(64, 32, 1, 16, 2), torch.randint(64, (2, 33))
    batch, losses = (tokens[:, :-1], tokens[:, 1:]), list[list[float]]()
    for tiles in (1, 4):
        torch.manual_seed(0)
        segments = (*gpt_segments(config)[:-1], zfunc.segment("head", Doubled(config)))
        program = zfunc.compile(segments, precision="fp32", tiles=tiles, device="cpu")
        state = zfunc.init(program, seed=1)
        losses.append([])
        for _ in range(2):
            state, metrics = zfunc.train_step(program, state, batch)
            losses[-1].append(metrics.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_that_products_of_tiles_are_tf32_is_said_where_they_are(
    precision: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On CUDA alone: programs of CPUs have no such line."""
    before, devices = torch.get_float32_matmul_precision(), {x: torch.device(x) for x in ("cpu", "cuda")}
    torch.set_float32_matmul_precision(precision)
    try:
        found = {(n, x) for n in (1, 4, "auto") for x, d in devices.items() if products_are_tf32(n, [d])}
        assert found == ({(4, "cuda"), ("auto", "cuda")} if precision == "high" else set())
        for on_cuda in (False, True):
            if on_cuda:
                monkeypatch.setattr(
                    "zfunc.engine.program.fit_to_memory.products_are_tf32",
                    lambda n, _: products_are_tf32(n, [devices["cuda"]]),
                )
            zfunc.compile(gpt_segments(GPTConfig(64, 32, 1, 16, 2)), tiles=4, device="cpu")
            assert ("are TF32" in caplog.text) == (precision == "high" and on_cuda)
    finally:
        torch.set_float32_matmul_precision(before)
