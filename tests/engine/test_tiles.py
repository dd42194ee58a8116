"""Rows in tiles: attention of a tile is that of the row, a segment in tiles is the segment, and what neither can be
is refused by name."""

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from random import Random
from types import SimpleNamespace
from typing import Any

import fuzz_models
import plain
import pytest
import torch
import trained
from attrs import evolve
from hf_models import CONFIGS, VOCAB, random_model
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from small_models import aliases, bits, edits, tied_gpt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map_only

import zfunc
from zfunc.engine.rows import check as tile_check
from zfunc.engine.rows import row_attention, tile_attention
from zfunc.engine.rows.check import check_tokens
from zfunc.engine.rows.keys import DeviceKeys, HostKeys, HostMemory, keys_in
from zfunc.engine.rows.row_attention import attend_row
from zfunc.engine.rows.tile_attention import View, attend_tile, pull_tile
from zfunc.engine.step.evaluate import outputs
from zfunc.engine.trace.vjp import SegmentWeights, make_vjp
from zfunc.models.gpt import Head, gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.hf.adapters import lora_config
from zfunc.models.sequences import KVCache
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.rng import seeded

# --- the law of attention -----------------------------------------------------------------------------------


def far(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """How far, relative to the norm, or to `least` where that is smaller."""
    return float((got.double() - expected.double()).norm()) / max(
        float(expected.double().norm()), least, 1e-30
    )


Hidden = tuple[int | None, int | None]  # a window of so many tokens, documents of so many


def by_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: Tensor) -> list[Tensor]:
    """Result and gradients of torch's own attention."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = scaled_dot_product_attention(*leaves, mask, is_causal=mask is None, enable_gqa=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, given.to(y.dtype))]


def by_row(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None, given: Tensor
) -> list[Tensor]:
    """Result and gradients of the operation of models."""
    y, pull = torch.func.vjp(lambda *x: attend_row(*x, starts, window), q, k, v)
    return [y, *pull(given.to(y.dtype))]


class Kernels:
    """torch's operations, of which those of ranges are these, on any device: what is in no range has no value."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)

    @staticmethod
    def scores(q: Tensor, k: Tensor, how: dict[str, Any]) -> Tensor:
        """Of one range, whose queries are the last of its keys."""
        far = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        hidden = (far < 0) | (far > how.get("window_size_left", len(k)))
        return (torch.einsum("qhd,khd->hqk", q, k) * how["scale"]).masked_fill(hidden, -torch.inf)

    @staticmethod
    def ranges(q: Tensor, queries: Tensor | None, keys: Tensor | None) -> Iterator[tuple[Any, Any]]:
        if queries is None or keys is None:
            yield from ((n, n) for n in range(len(q)))
            return
        assert len(queries) == len(keys) <= 2 * len(q) // tile_attention._block(len(q)) + 1
        for a, b in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
            assert 0 <= a[1] - a[0] <= b[1] - b[0]
            if a[0] < a[1]:
                yield slice(*a), slice(*b)

    @classmethod
    def _flash_attention_forward(cls, q: Tensor, k: Tensor, v: Tensor, *more: Any, **how: Any) -> Any:
        heads, out = q.shape[-2], torch.full_like(q, torch.nan)
        lse = torch.full_like(q[..., 0], torch.nan)
        for a, b in cls.ranges(q, *more[:2]):
            own_k, own_v = (x[b].repeat_interleave(heads // x.shape[-2], 1) for x in (k, v))
            scores = cls.scores(q[a], own_k, how)
            out[a] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), own_v)
            lse[a] = scores.logsumexp(-1).T
        return out, lse.transpose(-1, -2)

    @classmethod
    def _flash_attention_backward(
        cls, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, **how: Any
    ) -> Any:
        heads, made = (q.shape[-2], k.shape[-2]), [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for a, b in cls.ranges(q, *more[:2]):
            own_k, own_v = (x[b].repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
            p = (cls.scores(q[a], own_k, how) - lse.transpose(-1, -2)[a].T[..., None]).exp()
            of_p = torch.einsum("qhd,khd->hqk", g[a], own_v) - (g[a] * out[a]).sum(-1).T[..., None]
            ds = p * of_p * how["scale"]
            grads = [torch.einsum("hqk,qhd->khd", x, y) for x, y in ((ds, q[a]), (p, g[a]))]
            made[0][a] = torch.einsum("hqk,khd->qhd", ds, own_k)
            for total, x in zip(made[1:], grads, strict=True):
                total[b] = x.unflatten(1, (heads[1], -1)).sum(2)
        return made


def by_tiles(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None, given: Tensor, tile: int
) -> list[Tensor]:
    row = DeviceKeys((k, v))
    row.start_sums()
    out, dq = list[Tensor](), list[Tensor]()
    for at in range(0, q.shape[2], tile):
        own, g = q[:, :, at : at + tile], given[:, :, at : at + tile].to(q.dtype)
        view = View(at, q.shape[-1] ** -0.5, None if starts is None else starts[:, at : at + tile], window)
        attended = attend_tile(own, row, view)
        out.append(attended.out)
        dq.append(pull_tile(g, attended, row))
    return [torch.cat(out, 2), torch.cat(dq, 2), *row.sums]


def compared(
    heads: tuple[int, int],
    features: int,
    tile: int,
    tiles: int,
    hidden: Hidden = (None, None),
    *,
    fused: bool | None = True,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, tuple[float, float]]:
    """How far result and gradients in tiles are from exact ones, and how far torch's of a row are; `fused` None is
    by ranges."""
    g, (window, document), tokens = torch.Generator().manual_seed(tile * tiles), hidden, tile * tiles
    random = lambda n: torch.randn(2, n, tokens, features, generator=g).to(device, dtype)  # noqa: E731
    q, k, v, given = (random(n) for n in (heads[0], heads[1], heads[1], heads[0]))
    at = torch.arange(tokens, device=device)
    # Documents of a row begin elsewhere than those of the next.
    shift = 3 * torch.arange(2, device=device)[:, None]
    starts = (at - (at + shift) % document).clamp_min(0) if document else None
    near = at > at[:, None] - window if window else at == at
    mask = (
        (at <= at[:, None])
        & near
        & (at >= (torch.zeros_like(at)[None] if starts is None else starts)[..., None])
    )
    mask = mask[:, None] if window or document else None
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(tile_attention, "_kernel", lambda *_: tile_attention._InTorch)
            patch.setattr(row_attention, "runs_on_cpu", lambda *_: False)
        if fused is None:
            hides = lambda _q, _row, view: view.hides  # noqa: E731
            for module in (row_attention, tile_attention):
                patch.setattr(module, "by_ranges", hides)
            patch.setattr(tile_attention, "aten", Kernels())
            patch.setattr(tile_attention, "BLOCK", 4)
            patch.setattr(tile_attention, "AT_ONCE", 10)
        patch.setattr(row_attention, "TILE", tile)
        seen = starts, window, given
        got = by_row(q, k, v, *seen) if whole else by_tiles(q, k, v, *seen, tile)
    of_keys = dtype if whole else torch.float32
    assert [x.dtype for x in got] == [dtype, dtype, of_keys, of_keys]
    row, exact = by_rows(q, k, v, mask, given), by_rows(q.double(), k.double(), v.double(), mask, given)
    parts = zip(("out", "dq", "dk", "dv"), got, row, exact, strict=True)
    return {name: (far(x, true, 1.0), far(y, true, 1.0)) for name, x, y, true in parts}


@given(
    group=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    features=st.sampled_from([4, 8, 20]),
    tile=st.integers(1, 12),
    tiles=st.integers(1, 6),
    hidden=st.tuples(st.none() | st.integers(1, 20), st.none() | st.integers(1, 20)),
    fused=st.sampled_from([True, False, None]),
    whole=st.booleans(),
)
@example(1, 4, 16, 64, 4, (None, None), True, False)
@example(4, 1, 16, 32, 8, (100, None), False, False)
@example(2, 2, 16, 32, 8, (40, 70), False, True)
@example(2, 2, 16, 32, 8, (40, 70), True, True)
@example(2, 2, 8, 12, 5, (None, 7), None, False)
@example(2, 2, 8, 12, 5, (9, 23), None, False)
@example(1, 2, 8, 12, 5, (None, 3), None, True)
@examples(max_examples=40)
def test_attention_in_tiles_is_that_of_the_row(
    group: int,
    key_heads: int,
    features: int,
    tile: int,
    tiles: int,
    hidden: Hidden,
    fused: bool | None,
    whole: bool,
) -> None:
    """Forward and backward, in the fused kernel, in operations of torch and by ranges: groups of heads that share
    keys, a window, documents, both. So is that of the row as one operation, which makes no mask."""
    off = compared((group * key_heads, key_heads), features, tile, tiles, hidden, fused=fused, whole=whole)
    assert all(mine <= max(1e-5, 1.5 * theirs) for mine, theirs in off.values()), off


@pytest.mark.parametrize("place", ["cpu", "without kernels", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("hidden", [(None, None), (100, None), (None, 90), (100, 90)])
@pytest.mark.parametrize("whole", [False, True])
def test_attention_in_tiles_of_16_bits_is_no_farther_from_exact(
    hidden: Hidden, place: str, whole: bool
) -> None:
    """A fused kernel rounds what it returns of a part of the keys."""
    fused = place != "without kernels"
    for heads, tiles in (((4, 4), 2), ((4, 2), 4), ((8, 1), 8)):
        off = compared(
            *(heads, 32, 64, tiles, hidden),
            fused=fused,
            whole=whole,
            dtype=torch.bfloat16,
            device="cuda" if place == "cuda" else "cpu",
        )
        most = 1.2 if fused else 1.0
        assert all(mine <= most * theirs for mine, theirs in off.values()), off


# --- the law of tiles: of segments --------------------------------------------------------------------------


Results = dict[str, Tensor]
# Some layers of theirs cannot pass in tiles: what is said of them.
REFUSED = {
    "Gemma 2": "attention by hand, as with a softcap",
    "GPT-OSS": "expected rows",  # beside a sum over all tokens, of its routers
    "Mixtral": "expected rows",
    "Qwen3 MoE": "expected rows",
}


def floats(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().to(dtype) if t.is_floating_point() else t, tree)


def passes_of(
    segment: zfunc.Segment, values: Results, x: Any, tiles: int, host: HostMemory | None = None
) -> Results:
    """Outputs of a segment, and gradients of its weights and its input, by name."""
    weights = SegmentWeights(
        {short: values[full] for short, full in segment.by_short.items()}, segment.constants
    )
    how: Any = {"recompute": "all", "wrt_input": True, "name": segment.name, "evaluate": segment.evaluation}
    how["check"] = check_tokens
    passes = make_vjp(segment.function, tiles=tiles, **how)
    with keys_in(host):
        y, residuals = passes.forward(weights, (x,))
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(t.shape, generator=g).bfloat16().to(t.dtype) for t in floats(y)]
    outputs = {f"y{n}": t for n, t in enumerate(floats(y))}
    with keys_in(host):
        grads, below = passes.backward(weights, (x,), residuals, given)
    return {**outputs, **grads, **{f"dx{n}": t for n, t in enumerate(below)}}


def layers(name: str, ids: Any) -> Iterator[tuple[zfunc.Segment, Results, Any]]:
    """The different layers of a model, their values and their inputs."""
    segments = zfunc.hf.segments(random_model(name))
    values = {k: t for segment in segments for k, t in segment.initial(0).items()}
    seen, x = list[zfunc.Segment](), ids
    for n, segment in enumerate(segments[:-1]):
        if n and not any(segment.like(other) for other in seen):
            seen.append(segment)
            yield segment, values, x
        x = segment.function({**{k: values[v] for k, v in segment.by_short.items()}, **segment.constants}, x)


def rows(documents: bool, tokens: int = 32) -> Any:
    ids = torch.randint(VOCAB, (2, tokens), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(tokens - 12), torch.arange(12)]).expand(2, tokens)
    return {"input_ids": ids, "position_ids": places} if documents else ids


LAYERS = [
    pytest.param(name, documents, tiles, marks=[pytest.mark.slow] * ((n + k) % 6 > 0))
    for n, name in enumerate(x for x in CONFIGS if x not in REFUSED)
    for k, (tiles, documents) in enumerate(product((2, 4, 8), (False, True)))
]


@pytest.mark.parametrize(("name", "documents", "tiles"), LAYERS)
def test_a_layer_in_tiles_is_the_layer(name: str, documents: bool, tiles: int) -> None:
    """Outputs and gradients, in fp32 to the order of sums."""
    for segment, values, x in layers(name, rows(documents)):
        whole, got = (passes_of(segment, values, x, n) for n in (1, tiles))
        assert got.keys() == whole.keys()
        off = {k: far(t, whole[k]) for k, t in got.items()}
        assert max(off.values()) < 3e-6, (segment.name, off)


@pytest.mark.parametrize(
    ("documents", "dtype"),
    [
        (True, torch.float32),
        (False, torch.bfloat16),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
        pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["GPT-2", "Mistral, window", "Qwen3"])
def test_keys_on_the_host_change_no_bit(name: str, documents: bool, dtype: torch.dtype) -> None:
    """And nothing is written behind the bytes that they say they take."""
    segment, values, x = next(layers(name, rows(documents)))
    values, x = cast(values, dtype), cast(x, dtype)
    for tiles in (2, 8):
        host = HostMemory(torch.full((1 << 20,), 255, dtype=torch.uint8))
        on_host = passes_of(segment, values, x, tiles, host)
        assert all(map(torch.equal, on_host.values(), passes_of(segment, values, x, tiles).values()))
        assert host.flat is not None
        assert 0 < host.nbytes < 1 << 20
        assert (host.flat[host.nbytes :] == 255).all()
        assert host.copied_bytes


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


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "Mistral, window", "Qwen3"])
def test_a_layer_in_tiles_of_16_bits_is_no_farther_from_exact(name: str, documents: bool) -> None:
    """Over all gradients, as one of a few elements differs by chance."""
    segment, values, x = next(layers(name, rows(documents)))
    values, x = cast(values, torch.bfloat16), cast(x, torch.bfloat16)
    exact = passes_of(segment, cast(values, torch.float32), cast(x, torch.float32), 1)
    of_all = lambda got: sum(far(t, exact[k]) ** 2 for k, t in got.items()) ** 0.5  # noqa: E731
    theirs = of_all(passes_of(segment, values, x, 1))
    assert all(of_all(passes_of(segment, values, x, tiles)) < 1.1 * theirs for tiles in (2, 4, 8))


def test_a_gradient_of_the_gradient_of_a_row_is_refused() -> None:
    def squared(x: Tensor) -> Tensor:
        return attend_row(x, x, x, None, 3).square().sum()

    with pytest.raises(NotImplementedError, match="got a gradient of its gradient, expected one"):
        torch.func.grad(lambda x: torch.func.grad(squared)(x).sum())(torch.ones(1, 2, 5, 4))


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_is_none_of_rows_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        for segment, values, x in layers(name, rows(False)):
            passes_of(segment, values, x, 2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "GPT-2"])
def test_a_loss_in_tiles_is_the_loss(name: str, weighted: bool) -> None:
    """Of labels of which some do not count, alone or with weights of the rows."""
    *below, head = zfunc.hf.segments(random_model(name))
    assert head.module is not None
    values, x = {k: t for segment in (*below, head) for k, t in segment.initial(0).items()}, rows(False)
    labels = torch.where(x % 3 > 0, x, -100)
    targets = (labels, torch.tensor([0.3, 0.1])) if weighted else labels
    for segment in below:
        x = segment.function({**{k: values[v] for k, v in segment.by_short.items()}, **segment.constants}, x)
    weights = SegmentWeights({k: values[v] for k, v in head.by_short.items()}, head.constants)
    found = list[list[Tensor]]()
    for tiles in (1, 2, 4):
        how: Any = {"wrt_input": True, "last": True, "tiles": tiles, "summed": head.module.summed_targets}
        how["check"] = check_tokens
        passes = make_vjp(head.function, recompute="none", **how)
        loss, residuals = passes.forward(weights, (x, targets))
        grads, below_x = passes.backward(weights, (x, targets), residuals, [torch.tensor(3.0)])
        assert (residuals is None) == (tiles > 1)
        found.append([loss, *(grads[k] for k in sorted(grads)), *below_x])
    assert max(far(t, whole) for got in found[1:] for t, whole in zip(got, found[0], strict=True)) < 3e-6


# --- the law of tiles: of trainings -------------------------------------------------------------------------


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
    "micro-batches": (tied_gpt, {"precision": "fp32", "micro_batches": 3, "accumulate": 2}),
    "frozen": (frozen_gpt, {"precision": "fp32", "micro_batches": 2, "params_on": "host"}),
    "LoRA": (lora_llama, {"precision": "fp32", "micro_batches": 2, "activations_on": "host"}),
    "bf16": (tied_gpt, {"precision": "bf16", "micro_batches": 2}),
    "fp16": (tied_gpt, {"precision": "fp16", "micro_batches": 2}),
    "edits": (edits, {"precision": "fp32"}),
    "aliases": (aliases, {"precision": "fp32", "micro_batches": 6}),
}


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")
@pytest.mark.parametrize("name", TRAININGS)
def test_what_reaches_the_optimizer_is_the_gradient_of_the_row(name: str) -> None:
    """Law 11. With fp16 it was made at a scale, which is taken out again."""
    made, settings = TRAININGS[name]
    given, results = {"recompute": "all", "clip_norm": None, **settings}, list[Any]()
    for more in ({"tiles": 4}, {}, {"precision": "fp32"}):
        program, batch = trained.compiled(made(), **{**given, **more})
        program = evolve(program, optimizer=plain.remembering(program.optimizer))
        state = zfunc.init(program, seed=1, loss_scale=LossScale(2.0**12) if name == "fp16" else None)
        state, metrics = zfunc.train_step(program, state, batch(0))
        results.append((metrics.loss, {k: t.clone() for k, (_, t) in plain.reached(program, state).items()}))
    (loss, got), (expected, whole), (_, exact) = results
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
    passes = make_vjp(run, recompute="all", wrt_input=True, tiles=4, evaluate=evaluate, check=check_tokens)
    x = torch.ones(2, 16, 8)
    with seeded(3):
        y, _ = passes.forward(weights, (x,))
    with seeded(3):
        _, (dx,) = passes.backward(weights, (x,), None, [x.clone()])
    assert {*y.flatten().tolist()} == {0.0, 2.0, 8.0, 10.0}
    assert torch.equal(dx, y)


# --- what cannot pass in tiles ------------------------------------------------------------------------------


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
    "a norm over tokens": (
        lambda: over_time(nn.BatchNorm1d(8, track_running_stats=False)),
        ROWS,
        OTHERWISE,
    ),
    "running statistics": (lambda: over_time(nn.BatchNorm1d(8)), ROWS, r"shape \[8\], expected rows"),
    "neighbours": (lambda: over_time(nn.Conv1d(8, 8, 3, padding=1)), ROWS, OTHERWISE),
    "a convolution": (
        lambda: over_time(nn.Conv1d(8, 8, 3), 2),
        ROWS,
        r"aten.constant_pad_nd.default is not known to keep them apart",
    ),
    "one far back": (lambda: over_time(nn.Conv1d(8, 8, 3, dilation=20), 40), ROWS, OTHERWISE),
    "a recurrence": (recurrent, ROWS, "got other operations for a row than for a tile"),
    "one for all": (lambda: Body(lambda _, x: x.mean(1)), ROWS, r"a result of shape \[2, 8\]"),
    "one of all": (lambda: Body(lambda _, x: x[:, 0]), ROWS, r"got a result of shape \[2, 8\]"),
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


@pytest.mark.parametrize("what", MIXING)
def test_what_tiles_cannot_do_is_refused_by_name(what: str) -> None:
    """Whenever it is tried; and the State is as before."""
    make, shape, message = MIXING[what]
    named = [("body", make()), ("loss", TokenLoss())]
    segments = [zfunc.segment(name, module) for name, module in named]
    program = zfunc.compile(segments, precision="fp32", recompute="all", device="cpu", tiles=4)
    state = zfunc.init(program, seed=1)
    before = bits(state)
    for _ in range(2):
        with pytest.raises((ValueError, zfunc.ExecutionError), match=f"segment 'body': .*{message}"):
            zfunc.train_step(program, state, (torch.rand(shape), torch.rand(shape[:-1])))
    assert all(map(torch.equal, bits(state), before))
    zfunc.params(program, state)


def test_a_tile_may_be_one_token() -> None:
    segment, values, x = next(layers("Llama", rows(False, 13)))
    whole, got = (passes_of(segment, values, x, n) for n in (1, 13))
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


# --- what is tried, whatever it is called -------------------------------------------------------------------


def in_tiles(
    module: nn.Module, dtype: torch.dtype = torch.float32, shape: Any = (2, 16, 8), tiles: int = 4
) -> bool:
    """Whether it passes in tiles, and then its results and gradients are those of the row; else it is refused."""
    own, g = zfunc.segment("piece", module), torch.Generator().manual_seed(1)
    values, x = cast(own.initial(0), dtype), torch.randn(shape, generator=g).to(dtype)
    try:
        got = passes_of(own, values, x, 4)
    except (ValueError, RuntimeError):  # a tile of what takes rows of one length has no forward
        return False
    whole = passes_of(own, values, x, 1)
    off = {k: far(t, whole[k], 1e-3) for k, t in got.items()}
    assert max(off.values()) < (1e-5 if dtype == torch.float32 else 2e-2), off
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", fuzz_models.MIXING)
def test_what_mixes_tokens_is_refused_whatever_it_begins_with(name: str, dtype: torch.dtype) -> None:
    """Shut gates, mixes of 1 and weak ones are seen, and what only orders or counts."""
    torch.manual_seed(0)
    assert not in_tiles(fuzz_models.MIXING[name](16, 8), dtype)


def test_what_reaches_farther_than_a_tile_is_refused() -> None:
    """A row of 600 tokens in tiles of 150, of which a convolution sees one 290 before: behind all pieces."""
    assert not in_tiles(fuzz_models.Neighbours(8, dilation=290), shape=(1, 600, 8))


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


def without_gradient(own: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = own.other(x)
    return x + y


def test_a_backward_that_a_trace_loses_is_refused() -> None:
    assert not in_tiles(Body(lambda _, x: StraightThrough.apply(x) + x))
    assert not in_tiles(Body(without_gradient, other=nn.Linear(8, 8)))
    assert in_tiles(Body(lambda own, x: x + own.other(x).detach(), other=nn.Linear(8, 8)))


def test_what_is_known_by_its_trace_runs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """So layers of models take no more memory than was planned."""
    monkeypatch.setattr(tile_check, "_in_pieces", lambda *_: pytest.fail("tried"))
    for name in ("GPT-2", "Qwen3", "OLMo 2"):
        segment, values, x = next(layers(name, rows(False)))
        passes_of(segment, values, x, 2)


def test_each_segment_s_own_constants_are_tried() -> None:
    """Of two that are alike, the second one's buffer lets tokens through."""
    hidden = lambda own, x: torch.where(own.open, x.sort(1).values, x)  # noqa: E731
    made = [Body(hidden, open=nn.Buffer(torch.tensor(n > 0))) for n in range(2)]
    named = [*((f"body{n}", x) for n, x in enumerate(made)), ("loss", TokenLoss())]
    segments = [zfunc.segment(name, module) for name, module in named]
    assert segments[0].like(segments[1])
    program = zfunc.compile(segments, precision="fp32", recompute="all", device="cpu", tiles=4)
    with pytest.raises(zfunc.ExecutionError, match=f"segment 'body1': .*{OTHERWISE}"):
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
        with pytest.raises(zfunc.ExecutionError, match=f"segment 'loss': .*{OTHERWISE}"):
            step()


def takes(how: Any) -> bool:
    """Whether an operation takes a tensor, a dimension and what can be filled in."""
    own = how._schema.arguments
    required = {str(a.type) for a in own[1:] if not a.has_default_value() and a.name != "dim"}
    dims = {str(a.type) for a in own if a.name == "dim"}
    return str(own[0].type) == "Tensor" and bool(dims) and required <= {*FILLED}


FILLED = {"int": 1, "bool": False, "number": 2.0}
ALONG = {
    f"{name}.{overload}": how
    for name in sorted(dir(torch.ops.aten))
    if not name.endswith(("_", "out", "backward"))
    and hasattr(packet := getattr(torch.ops.aten, name), "overloads")
    for overload in packet.overloads()
    if "out" not in overload and "Dimname" not in overload and takes(how := getattr(packet, overload))
}
BY_DAY = ("cumsum.default", "logsumexp.default", "max.dim", "softmax.int", "sort.default", "topk.default")


def along(how: Any, dim: int) -> Body:
    """An operation along a dimension of rows, and what it gives added to them."""

    def run(_: Any, x: Tensor) -> Tensor:
        more = {a.name: FILLED[str(a.type)] for a in how._schema.arguments[1:] if takes_value(a)}
        given = (
            [dim]
            if str(next(a.type for a in how._schema.arguments if a.name == "dim")) == "List[int]"
            else dim
        )
        y = next(t for t in tree_leaves(how(x, **{**more, "dim": given})) if isinstance(t, Tensor))
        y = torch.view_as_real(y) if y.is_complex() else y
        if y.shape[:2] != x.shape[:2]:
            return x + y.to(x.dtype).mean()
        return x + y.to(x.dtype).reshape(*x.shape[:2], -1).mean(2, keepdim=True)

    takes_value = lambda a: a.name != "dim" and not a.has_default_value()  # noqa: E731
    return Body(run)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in BY_DAY else pytest.mark.slow) for x in ALONG]
)
def test_an_operation_along_tokens_is_that_of_the_row_or_refused(name: str) -> None:
    """All of torch's that have a dimension. Along features each passes, but where features are made rows."""
    for dim in (1, 2):
        body = along(ALONG[name], dim)
        try:
            body(torch.randn(2, 16, 8, requires_grad=True)).sum().backward()
        except (RuntimeError, NotImplementedError, IndexError, StopIteration) as error:
            pytest.skip(f"it takes other things: {error}")
        passed = in_tiles(body)
        assert passed or dim == 1 or name == "renorm.default"  # of which each feature is a norm over tokens


@pytest.mark.parametrize(
    "seeds",
    [range(3), *(pytest.param(range(n, n + 100), marks=pytest.mark.slow) for n in range(3, 1003, 100))],
)
def test_random_pieces_are_those_of_the_row_or_refused(seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        pieces = fuzz_models.draw_rows(Random(seed))
        made = [{**fuzz_models.KEEPING, **fuzz_models.MIXING}[name](16, 8) for name in pieces]
        assert in_tiles(nn.Sequential(*made)) or not {*pieces} <= {*fuzz_models.APART}, (seed, pieces)


ON_HOPPER = {"capability": (9, 0), "version": 91900, "tokens": (512, 384), "size": 128, "said": None}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "_OnCudnn"),
        ({"size": 64}, "_OnCudnn"),
        ({"said": "0"}, "_OnCudnn"),
        ({"version": 91500}, "_OnCuda"),  # its own fix came after
        ({"version": None}, "_OnCuda"),
        ({"capability": (10, 0)}, "_OnCuda"),
        ({"capability": (10, 3)}, "_OnCuda"),
        ({"capability": (8, 0)}, "_OnCuda"),
        ({"tokens": (512, 192)}, "_OnCuda"),
        ({"tokens": (320, 512)}, "_OnCuda"),
        ({"tokens": (32, 32)}, "_OnCuda"),
        ({"size": 192}, "_OnCuda"),
        ({"said": "1"}, "_OnCuda"),
        ({"said": "yes"}, "_OnCuda"),
        ({"size": 224, "capability": (8, 0)}, "_OnCuda"),
        ({"size": 224}, "_OnCuda"),
        *(({"size": 200, "capability": x}, "_InTorch") for x in ((8, 6), (8, 9), (12, 0))),
        *(({"size": n, "capability": (8, 9)}, "_OnCuda") for n in (192, 256)),
    ],
)
def test_a_kernel_of_cuda_is_taken_where_it_is_known_to_be_right(
    changed: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch itself has it, and no cut block of cuDNN's."""
    given = {**ON_HOPPER, **changed}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: given["capability"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: given["version"])
    monkeypatch.delenv(tile_attention.DEPRIORITIZED, raising=False)
    if given["said"] is not None:
        monkeypatch.setenv(tile_attention.DEPRIORITIZED, given["said"])
    like = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "is_cuda": True}
    q, k = (SimpleNamespace(shape=(1, 4, n, given["size"]), **like) for n in given["tokens"])
    pair: Any = tile_attention.Pair(q, k, k, View(512, 1.0), (0, 512))  # pyright: ignore[reportArgumentType]
    assert tile_attention._kernel(pair).__name__ == expected
