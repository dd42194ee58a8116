"""Attention of a tile is that of the row, in each kernel."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pairs import in_pairs
from tile_law import far
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from zfunc.engine.rows import row_attention, tile_attention
from zfunc.engine.rows.keys import DeviceKeys
from zfunc.engine.rows.row_attention import attend_row
from zfunc.engine.rows.tile_attention import View, attend_tile, pull_tile
from zfunc.engine.rows.tiles import TiledRow
from zfunc.engine.trace.cost_trace import AllocationTracker

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

    most_keys = 0  # of one call of backward

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
        cls.most_keys = max(cls.most_keys, k.shape[-3])
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
        first = None if starts is None else starts[:, at : at + tile]
        begins = 0 if first is None else int(first.min())
        view = View(at, q.shape[-1] ** -0.5, first, window, begins)
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


@pytest.mark.parametrize("hidden", [(None, 10), (9, None), (9, 150)])
def test_gradients_of_short_documents_and_windows_take_the_keys_of_two_tiles(
    hidden: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of all tiles before, for which the kernel would make room."""
    monkeypatch.setattr(Kernels, "most_keys", 0)
    off = compared((4, 2), 8, 12, 24, hidden, fused=None)
    assert all(mine <= max(1e-5, 1.5 * theirs) for mine, theirs in off.values()), off
    assert Kernels.most_keys == 24


@pytest.mark.parametrize("traced", [False, True])
def test_what_the_host_reads_of_documents_is_counted(traced: bool) -> None:
    """A minimum of each tile, and one copy for all."""
    row = SimpleNamespace(begins={})
    with FakeTensorMode() if traced else nullcontext(), AllocationTracker(of_accelerator=True) as seen:
        firsts = [torch.tensor([4, 2, 3]), torch.tensor([7, 5, 6])]
        before = seen.launches
        TiledRow.look(row, enumerate(firsts))  # type: ignore[arg-type]
    assert seen.launches - before == 2 + 1 + 1
    assert row.begins == ({} if traced else {0: 2, 1: 5})


HIDDEN = [(None, None), (100, None), (None, 90), (100, 90)]


@pytest.mark.parametrize(
    ("hidden", "place", "whole"),
    [
        *in_pairs(HIDDEN, ["cpu", "without kernels"], [False, True]),
        *(pytest.param(x, "cuda", whole, marks=pytest.mark.gpu) for x in HIDDEN for whole in (False, True)),
    ],
)
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


def test_a_gradient_of_the_gradient_of_a_row_is_refused() -> None:
    def squared(x: Tensor) -> Tensor:
        return attend_row(x, x, x, None, 3).square().sum()

    with pytest.raises(NotImplementedError, match="got a gradient of its gradient, expected one"):
        torch.func.grad(lambda x: torch.func.grad(squared)(x).sum())(torch.ones(1, 2, 5, 4))


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
    if expected != "_InTorch":  # an implementation that a user has put in torch's place: tried by nobody
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
        with pytest.raises(ValueError, match="got flash attention replaced by FA4"):
            tile_attention._kernel(pair)
