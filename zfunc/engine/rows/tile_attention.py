"""Causal attention of one tile of queries over all keys so far: `attend_tile`, and `pull_tile` for its gradients.

Attention of a tile is exact: as in FlashAttention-2, results for parts of keys are joined by their log-sum-exp,
and backward takes each part with the log-sum-exp of all keys. A fused kernel of the device that takes a part
computes it; else torch operations do, with fp32 `_scores` of a tile by as many keys.
"""

import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zfunc.engine.rows.keys import DeviceKeys, HostKeys, Part
from zfunc.engine.trace.fake_tensors import counted_times
from zfunc.errors import refuse, setting
from zfunc.runtime.accelerator import fuses_grouped_queries, runs_on_cpu

aten = torch.ops.aten
Keys = DeviceKeys | HostKeys
DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"  # of the environment: torch takes flash attention first
FEW = 3  # tiles of fake tensors, at most, that all run; of more, some stand for all
# The tokens of the row whose tile is traced: a model's own code may choose by them, as whether a window hides any.
ROW_TOKENS: ContextVar[int | None] = ContextVar("tokens of the row", default=None)


@frozen
class View:
    """Which keys of a row the queries of one tile see: none after the query, none before the `first` [batch,
    tile] of its document, at most `window`. `at` is the index in the row of the tile's first query; `begins`
    is a lower bound of all `first`."""

    at: int
    scale: float
    first: Tensor | None = None  # [batch, tile]
    window: int | None = None
    begins: int = 0

    @property
    def hides(self) -> bool:
        """Whether document starts or a window hide keys from queries, in addition to causality."""
        return self.first is not None or self.window is not None

    def start(self, tile: int) -> int:
        """The row index of the first key that the tile may see, rounded down to a multiple of `tile`."""
        near = 0 if self.window is None else self.at - self.window + 1
        return max(0, near, self.begins) // tile * tile

    def parts(self, tile: int) -> Iterator[Part]:
        """Yield the ranges (start, stop) of keys to attend to, of at most `tile` keys: first the tile's own,
        in which every query sees a key, then the earlier ones."""
        yield self.at, self.at + tile
        yield from ((i, min(i + tile, self.at)) for i in range(self.start(tile), self.at, tile))


@frozen(eq=False)
class Attended:
    """The result of attention for one tile of a row, as backward needs it: the queries `q`, their `view`, the
    result `out`, and the fp32 log-sum-exp of scores, `lse`."""

    q: Tensor  # [batch, heads, tile, features]
    view: View
    out: Tensor  # [batch, heads, tile, value features]
    lse: Tensor  # [batch, heads, tile] fp32


@frozen(eq=False)
class Pair:
    """The operands of one call of attention: a tile's queries, keys and values of one range of the row."""

    q: Tensor  # [batch, heads, tile, features]
    k: Tensor  # [batch, key heads, keys, features]
    v: Tensor  # [batch, key heads, keys, value features]
    view: View
    part: Part

    @property
    def causal(self) -> bool:
        """Whether the keys are the tile's own, so that a query sees only those up to its own position."""
        return self.part[0] == self.view.at


def attend_tile(q: Tensor, row: Keys, view: View) -> Attended:
    """Attention of one tile's queries `q` [batch, heads, tile, features] over those keys and values of `row`
    that `view` shows."""
    if by_ranges(q, row, view):
        return _attend_ranges(q, row, view)
    out = lse = None
    for pair, _ in _pairs(q, row, view):
        o, own = _kernel(pair).forward(pair)  # [batch, heads, tile, value features], [batch, heads, tile]
        if out is None or lse is None:
            out, lse = o, own
            continue
        both = torch.logaddexp(lse, own)
        joined = out * (lse - both).exp()[..., None]
        out, lse = joined.add_(o * (own - both).exp()[..., None]), both
    assert out is not None
    assert lse is not None
    return Attended(q, view, _by_token(out.to(q.dtype)), lse)


def pull_tile(cotangent: Tensor, tile: Attended, row: Keys) -> Tensor:
    """Backward of `attend_tile`, given the gradient `cotangent` of its result `tile`: returns the queries'
    gradient, and adds those of keys and values to the sums in `row`."""
    q, view = tile.q, tile.view
    if by_ranges(q, row, view):
        return _pull_ranges(cotangent, tile, row)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # [batch, heads, tile, features]
    # A kernel has gradients of keys for every query head while it runs: of no more keys than a tile at once.
    for pair, sums in _pairs(q, row, view, sums=True):
        own, *others = _kernel(pair).backward(pair, cotangent, tile)
        dq.add_(own)
        for total, x in zip(sums, others, strict=True):
            heads = total.shape[1]  # of total [batch, key heads, keys, features]
            total.add_(x.unflatten(1, (heads, -1)).sum(2) if x.shape[1] > heads else x)
    return dq.to(q.dtype)


def _pairs(q: Tensor, row: Keys, view: View, *, sums: bool = False) -> Iterator[tuple[Pair, list[Tensor]]]:
    """Yield a `Pair` of queries `q` with each part of the keys of `row` that `view` shows, and with `sums`
    that part's gradient sums. In a trace on fake tensors the third part stands for all later ones, whose
    costs are equal."""
    parts = list(view.parts(q.shape[2]))
    times = _times(len(parts), fake=isinstance(q, FakeTensor))
    parts = parts[: len(times)]
    visits = zip(row.visit(parts, sums=sums), parts, strict=True)
    for (k, v, *own), part in counted_times(zip(visits, times, strict=True)):
        if isinstance(row, HostKeys):
            row.host.count(*((k, v) if row.still_here(part) is None else ()), *own, *own)
        yield Pair(q, k, v, view, part), own


def tile_numbers(tiles: int, grown: int, *, fake: bool, backward: bool = False) -> Iterator[int]:
    """Yield the indices of a row's `tiles`, from the last one if `backward`. In a trace (`fake`) only a few
    are yielded, which count for the others: between the first `grown` tiles and the last one, the cost rises
    evenly."""
    between, times = tiles - 1 - grown, dict.fromkeys(range(tiles), 1)
    if between > FEW and fake:
        ends = {grown: between // 2, tiles - 2: between // 2}
        middle = {(tiles - 1 + grown) // 2: 1} if between % 2 else {}
        times = dict(sorted({**dict.fromkeys(range(grown), 1), **ends, **middle, tiles - 1: 1}.items()))
    return counted_times(reversed(times.items()) if backward else times.items())


def _times(count: int, *, fake: bool) -> list[int]:
    return [1, 1, count - 2] if fake and count > 2 else [1] * count


def _by_token(x: Tensor) -> Tensor:
    """`x` [batch, heads, tile, features], copied if need be so that a token's features are contiguous in
    memory, as in results of fused kernels."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# --- a pair in torch operations: the reference, and the way of pairs that no kernel takes -----------------------


class _InTorch:
    """Attention of a `Pair` (a tile's queries, as many keys of a row) in torch operations, with fp32 scores."""

    @staticmethod
    def forward(pair: Pair) -> tuple[Tensor, Tensor]:
        scores = _scores(pair)  # [batch, key heads, group, tile, keys]
        lse = scores.logsumexp(-1)  # [batch, key heads, group, tile]
        seen = lse.masked_fill(lse == -torch.inf, 0)  # of a query that sees no key of this part
        out = scores.sub_(seen[..., None]).exp_() @ pair.v.float()[:, :, None]
        return out.flatten(1, 2), lse.flatten(1, 2)

    @staticmethod
    def backward(pair: Pair, cotangent: Tensor, of_all: Attended) -> tuple[Tensor, Tensor, Tensor]:
        k, v = pair.k.float(), pair.v.float()  # [batch, key heads, keys, features], the others with groups
        q, given, out, total = (
            x.unflatten(1, (k.shape[1], -1)).float() for x in (pair.q, cotangent, of_all.out, of_all.lse)
        )
        p = _scores(pair).sub_(total[..., None]).exp_()  # [batch, key heads, group, tile, keys]
        dv = (p.transpose(3, 4) @ given).sum(2)  # [batch, key heads, keys, value features]
        dot = (given * out).sum(-1)[..., None]  # [batch, key heads, group, tile, 1]
        ds = p.mul_((given @ v.transpose(2, 3)[:, :, None]).sub_(dot)).mul_(pair.view.scale)
        return (ds @ k[:, :, None]).flatten(1, 2), (ds.transpose(3, 4) @ q).sum(2), dv


def _scores(pair: Pair) -> Tensor:
    """Attention scores of a pair, fp32 [batch, key heads, group, tile, keys]; minus infinity for hidden keys."""
    grouped = pair.q.unflatten(1, (pair.k.shape[1], -1)).float()  # [batch, key heads, group, tile, features]
    scores = grouped @ pair.k.float().transpose(2, 3)[:, :, None] * pair.view.scale
    return scores.masked_fill_(_hidden(pair)[:, None, None], -torch.inf)


def _hidden(pair: Pair) -> Tensor:
    """Bool mask [batch or 1, tile, keys] of a pair: True where a query does not see a key."""
    view, device = pair.view, pair.q.device
    rows = torch.arange(view.at, view.at + pair.q.shape[2], device=device)[:, None]
    columns = torch.arange(*pair.part, device=device)
    hidden = (columns > rows)[None]
    if view.first is not None:
        hidden = hidden | (columns < view.first[..., None])
    if view.window is not None:
        hidden = hidden | (columns <= rows - view.window)
    return hidden


# --- fused kernels ----------------------------------------------------------------------------------------------


class _OnCpu:
    """The CPU's flash attention of a `Pair` (queries of a tile, keys of its row): keys are repeated for every query
    head; a mask is used if documents or a window hide keys."""

    @staticmethod
    def forward(pair: Pair) -> tuple[Tensor, Tensor]:
        run, mask = aten._scaled_dot_product_flash_attention_for_cpu, _mask(pair)
        how = {"attn_mask": mask, "scale": pair.view.scale}
        out, lse = run(pair.q, *_repeated(pair), 0.0, mask is None and pair.causal, **how)
        if mask is not None:  # a query that sees no key of this part has 0 of the kernel
            lse.masked_fill_(mask.isneginf().all(-1), -torch.inf)
        return out, lse

    @staticmethod
    def backward(pair: Pair, cotangent: Tensor, of_all: Attended) -> Any:
        run, mask = aten._scaled_dot_product_flash_attention_for_cpu_backward, _mask(pair)
        given = cotangent, pair.q, *_repeated(pair), of_all.out, of_all.lse
        return run(*given, 0.0, mask is None and pair.causal, attn_mask=mask, scale=pair.view.scale)


def _mask(pair: Pair) -> Tensor | None:
    if not pair.view.hides:
        return None
    hidden = _hidden(pair)[:, None]  # [batch or 1, 1, tile, keys]
    return pair.q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _repeated(pair: Pair) -> tuple[Tensor, ...]:
    groups = pair.q.shape[1] // pair.k.shape[1]
    grouped = pair.k, pair.v
    return grouped if groups == 1 else tuple(x.repeat_interleave(groups, dim=1) for x in grouped)


class _OnCuda:
    """CUDA's 16-bit flash attention of a `Pair` (a tile's queries, keys of a row); query heads may share keys."""

    @staticmethod
    def forward(pair: Pair) -> tuple[Tensor, Tensor]:
        run = aten._scaled_dot_product_flash_attention
        out, lse, *_ = run(pair.q, pair.k, pair.v, 0.0, pair.causal, False, scale=pair.view.scale)
        return out, lse

    @staticmethod
    def backward(pair: Pair, cotangent: Tensor, of_all: Attended) -> Any:
        q, k, v, out, lse = pair.q, pair.k, pair.v, of_all.out, of_all.lse
        unused = torch.empty((), dtype=torch.uint64, device=q.device)  # the seed of a dropout
        lengths = None, None, q.shape[2], k.shape[2]
        run = aten._scaled_dot_product_flash_attention_backward
        given = cotangent, q, k, v, out, lse, *lengths, 0.0, pair.causal, unused, unused
        return run(*given, scale=pair.view.scale)


class _OnCudnn:
    """cuDNN's 16-bit attention of a `Pair` (a tile's queries, keys of a row), compiled for each number of keys."""

    @staticmethod
    def forward(pair: Pair) -> tuple[Tensor, Tensor]:
        run, scale = aten._scaled_dot_product_cudnn_attention, pair.view.scale
        out, lse, *_ = run(pair.q, pair.k, pair.v, None, True, 0.0, pair.causal, False, scale=scale)
        return out, lse.squeeze(-1)

    @staticmethod
    def backward(pair: Pair, cotangent: Tensor, of_all: Attended) -> Any:
        q, k, v, out, lse = pair.q, pair.k, pair.v, of_all.out, of_all.lse
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the seed of a dropout
        lengths = None, None, q.shape[2], k.shape[2]
        found = out, lse[..., None].contiguous(), unused, unused, None
        run = aten._scaled_dot_product_cudnn_attention_backward
        return run(cotangent, q, k, v, *found, *lengths, 0.0, pair.causal, scale=pair.view.scale)


def _fits(q: Tensor, v: Tensor) -> bool:
    """Whether CUDA's flash attention accepts queries `q` and values `v`; with 193 to 224 features, only large
    GPUs have its backward.

    Raises ValueError if the process has replaced torch's flash attention, because windows and ranges may
    differ then.
    """
    alike = (size := q.shape[-1]) == v.shape[-1] <= 256 and not size % 8
    if not alike or runs_on_cpu(q.device) or not fuses_grouped_queries(q.device, q.dtype):
        return False
    if q.is_cuda and (other := getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()):
        got = f"flash attention replaced by {other} (activate_flash_attention_impl)"
        do = f"call torch.nn.attention.restore_flash_attention_impl, or train with {setting('tiles', 1)}"
        refuse("tiles", got, "torch's, as windows and documents may differ", do)
    return not (q.is_cuda and 192 < size <= 224) or _capability(q) in ((8, 0), (9, 0), (10, 0))


def _capability(q: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(q.device)


def _fits_cudnn(q: Tensor, k: Tensor) -> bool:
    """Whether cuDNN's attention is known to be right for queries `q` and keys `k`: on Hopper, where torch
    itself prefers cuDNN (`check_prefer_cudnn_attention` in its sdp_utils.cpp), and for multiples of 128 keys
    and queries, as backward is wrong for a partial block (pytorch/pytorch#196678)."""
    if not q.is_cuda or _capability(q) != (9, 0) or q.shape[-1] > 128:
        return False
    whole, preferred = not (q.shape[2] % 128 or k.shape[2] % 128), os.environ.get(DEPRIORITIZED, "0") == "0"
    newer = (torch.backends.cudnn.version() or 0) > 91500 and torch.backends.cuda.cudnn_sdp_enabled()
    return whole and preferred and newer and not torch.are_deterministic_algorithms_enabled()


def _kernel(pair: Pair) -> Any:
    """The class that computes attention of `pair`: a fused kernel that accepts it, else torch operations."""
    q = pair.q
    if _fits(q, pair.v) and not pair.view.hides:
        # On one H200 cuDNN took 0.6 of the time of flash attention.
        return _OnCudnn if _fits_cudnn(q, pair.k) else _OnCuda
    return _OnCpu if runs_on_cpu(q.device) and q.shape[-1] == pair.v.shape[-1] else _InTorch


def by_ranges(q: Tensor, row: Keys, view: View) -> TypeGuard[DeviceKeys]:
    """Whether CUDA's flash attention for variable-length sequences can compute a tile's queries `q` over the
    keys of `row` in one call."""
    return isinstance(row, DeviceKeys) and view.hides and _fits(q, row.kept[1])


# --- CUDA's flash attention of documents and windows: ranges of queries and of keys -----------------------------

BLOCK = 256  # tokens at most; a document in a block is attended in torch, as a kernel has room for each range
AT_ONCE = 2048  # tokens, at most, of blocks that are attended in torch at a time


@frozen(eq=False)
class Ranges:
    """The parts of a tile that a variable-length attention kernel treats as separate sequences. A tile is
    divided into blocks of tokens; each has two parts, the document continued from the block before, and the
    rest. Either may be empty, so shapes do not depend on data."""

    queries: Tensor  # int32 [2 blocks + 1], where ranges begin in the tile, and the end of the last
    keys: Tensor  # int32 [2 blocks + 1], where ranges begin in the row, and the end of the last
    across: Tensor  # bool [tile, 1, 1]: the queries of documents that go on from the block before


def _ranges(first: Tensor, at: int, block: int) -> Ranges:
    """The `Ranges` of a tile in blocks of `block` tokens, whose first query is token `at` of the row; `first`
    [tile] is the first key that each query sees.

    >>> found = _ranges(torch.tensor([3, 3, 6, 7, 7, 7]), at=4, block=2)
    >>> found.queries.tolist(), found.keys.tolist()
    ([0, 2, 2, 2, 3, 6, 6], [3, 6, 6, 6, 7, 10, 10])
    """
    end, first = at + len(first), first.clamp_min(0)
    begins = torch.arange(at, end, block, device=first.device)  # [blocks]
    starts = first[::block].contiguous()  # [blocks]
    ends = at + torch.searchsorted(first, starts, right=True)  # [blocks]
    cuts = torch.stack([torch.where(starts < begins, x, begins) for x in (starts, ends)], 1).flatten()
    cuts = torch.cat([cuts, cuts.new_full((1,), end)]).cummax(0).values  # a document over many blocks is one
    queries = (cuts - at).clamp_min(0)
    number = torch.searchsorted(queries, torch.arange(len(first), device=first.device), right=True)
    return Ranges(queries.int(), cuts.int(), (number % 2 == 1)[:, None, None])


def _block(tile: int) -> int:
    """The number of tokens of a block of a tile: the largest divisor of `tile` (tokens) up to 256."""
    return next(n for n in range(min(BLOCK, tile), 0, -1) if tile % n == 0)


def _in_blocks(view: View, first: Tensor, *tensors: Tensor) -> Iterator[tuple[View, list[Tensor]]]:
    """Yield the `tensors` [tile, heads, ...] of a tile in blocks, as [blocks, heads, block, ...], about 2048
    tokens at a time, each with the `View` of keys inside a block."""
    tile = len(first)
    block = _block(tile)
    begins = torch.arange(view.at, view.at + tile, block, device=first.device)
    seen = first - begins.repeat_interleave(block)  # [tile]
    for parts in zip(*(x.split(max(1, AT_ONCE // block) * block) for x in (seen, *tensors)), strict=True):
        own, *parts = (x.unflatten(0, (-1, block)) for x in parts)
        yield View(0, view.scale, own, view.window), [x.transpose(1, 2) for x in parts]


def _given(view: View) -> dict[str, Any]:
    seen = {} if view.window is None else {"window_size_left": view.window - 1, "window_size_right": 0}
    return {"scale": view.scale, **seen}


def _attend_ranges(queries: Tensor, row: DeviceKeys, view: View) -> Attended:
    tile, end = queries.shape[2], view.at + queries.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (queries, *(x[:, :, :end] for x in row.kept)))
    run = aten._flash_attention_forward  # of [batch, tokens, heads, features]; of ranges without batch
    if view.first is None:
        out, lse, *_ = run(q, k, v, None, None, tile, end, 0.0, True, False, **_given(view))
        return Attended(queries, view, out.transpose(1, 2), lse)
    rows: list[tuple[Tensor, Tensor]] = []
    for *x, first in zip(q, k, v, view.first, strict=True):
        found = _ranges(first, view.at, _block(tile))
        out, lse, *_ = run(*x, found.queries, found.keys, tile, end, 0.0, True, False, **_given(view))
        others, their_lse = torch.empty_like(out), torch.empty_like(lse)  # [tile, heads, ...], [heads, tile]
        of_tile = others, their_lse.T, x[0], *(t[view.at :] for t in x[1:])
        for seen, (o, own, *qkv) in _in_blocks(view, first, *of_tile):
            made = _InTorch.forward(Pair(*qkv, seen, (0, o.shape[2])))
            o.copy_(made[0])
            own.copy_(made[1])
        rows.append(
            (torch.where(found.across, out, others), torch.where(found.across[:, 0, 0], lse, their_lse))
        )
    out, lse = (torch.stack(x) for x in zip(*rows, strict=True))
    return Attended(queries, view, out.transpose(1, 2), lse)


def _pull_ranges(cotangent: Tensor, attended: Attended, row: DeviceKeys) -> Tensor:
    q, view, sums = attended.q, attended.view, row.sums
    tile, end = q.shape[2], view.at + q.shape[2]
    start = view.start(tile)
    given = cotangent, q, *(x[:, :, start:end] for x in row.kept), attended.out
    g, q, k, v, out = (x.transpose(1, 2) for x in given)  # [batch, tokens, heads, features]
    unused = torch.empty((), dtype=torch.uint64, device=q.device)  # the seed of a dropout

    def pull(x: Any, lse: Tensor, ranges: Sequence[Any], most: int) -> Any:
        longest = (*ranges, tile, most, 0.0, True, unused, unused)
        return aten._flash_attention_backward(*x, lse, *longest, **_given(view))

    if view.first is None:
        dq, *others = pull((g, q, k, v, out), attended.lse, (None, None), end - start)
        for total, x in zip(sums, others, strict=True):
            total[:, :, start:end].add_(x.transpose(1, 2))
        return dq.transpose(1, 2)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for b, first in enumerate(view.first):
        found, x, lse = (
            _ranges(first.clamp_min(start), view.at, _block(tile)),  # a window hides what is before
            [t[b] for t in (g, q, k, v, out)],
            attended.lse[b],
        )
        totals = dq[b], *(t[b, :, start:end].transpose(0, 1) for t in sums)  # [tokens, heads, features]
        across = found.across[:, 0, 0]
        # 1. Documents that go on: a launch for the first, which may have begun long ago, one for others, in the
        # tile, as a launch makes room for the longest. A launch leaves tokens outside of its ranges unwritten.
        own = lse.masked_fill(~across, torch.inf)  # of queries that see nothing
        for those, low in ((slice(2), start), (slice(1, None), view.at))[view.at == 0 :]:
            seen = slice(low - start, None)
            queries, keys = found.queries[those].contiguous(), found.keys[those] - low
            given = *x[:2], *(t[seen] for t in x[2:4]), x[4]
            made = pull(given, own, (queries, keys), end - low)
            into = totals[0], *(t[seen] for t in totals[1:])
            for total, grad, at in zip(into, made, (queries, keys, keys), strict=True):
                index = torch.arange(len(grad), device=q.device)
                within = (index >= at[0]) & (index < at[-1])
                total.add_(torch.where(within[:, None, None], grad, 0))
        # 2. Documents within a block.
        own = lse.masked_fill(across, torch.inf)
        of_tile = own.T, *(t if len(t) == tile else t[view.at - start :] for t in (*totals, *x))
        for seen, (own, *parts) in _in_blocks(view, first, *of_tile):
            sums_of, (given, *qkv, o) = parts[:3], parts[3:]
            pair = Pair(*qkv, seen, (0, o.shape[2]))
            grads = _InTorch.backward(pair, given, Attended(pair.q, seen, o, own))
            for total, grad in zip(sums_of, grads, strict=True):
                total.add_(grad)
    return dq.to(attended.q.dtype).transpose(1, 2)
