"""The law of rows in tiles: what a segment makes of a row in tiles is what it makes of the whole row."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import zfunc
from zfunc.engine.rows.tiled_vjp import tiled_vjp
from zfunc.engine.trace.host_keys import HostMemory, keys_in
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentVJP, SegmentWeights


def far(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """How far, relative to the norm, or to `least` where that is smaller."""
    return float((got.double() - expected.double()).norm()) / max(
        float(expected.double().norm()), least, 1e-30
    )


Results = dict[str, Tensor]


def floats(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().to(dtype) if t.is_floating_point() else t, tree)


@cache
def _traced_once(function: Any, evaluate: Any, tiles: int, name: str) -> SegmentVJP:
    """As in a program, whose steps have one trace for each shape; here of all tests of a segment."""
    return tiled_vjp(function, PassOptions("all", tiles=tiles), name=name, evaluate=evaluate)


def passes_of(
    segment: zfunc.Segment, values: Results, x: Any, tiles: int, host: HostMemory | None = None
) -> Results:
    """Outputs of a segment, and gradients of its weights and its input, by name; of one tile plain autograd's."""
    own = {short: values[full] for short, full in segment.by_short.items()}
    if tiles == 1:
        return _of_autograd(segment, own, x)
    weights = SegmentWeights(own, segment.constants)
    passes = _traced_once(segment.function, segment.evaluation, tiles, segment.name)
    with keys_in(host):
        y, residuals = passes.forward(weights, (x,))
    with keys_in(host):
        grads, below = passes.backward(weights, (x,), residuals, _cotangents(y))
    return {**_named("y", floats(y)), **grads, **_named("dx", below)}


def _of_autograd(segment: zfunc.Segment, own: Results, x: Any) -> Results:
    leaves = {short: t.detach().requires_grad_() for short, t in own.items()}
    x = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
    given = {**leaves, **{f"dx{n}": t for n, t in enumerate(floats(x))}}
    copied = tree_map_only(Tensor, lambda t: t.clone(), (leaves, x))  # may be written to, as no leaf is
    y = segment.function({**copied[0], **segment.constants}, copied[1])
    grads = torch.autograd.grad(floats(y), [*given.values()], _cotangents(y), materialize_grads=True)
    return {**_named("y", floats(y)), **dict(zip(given, grads, strict=True))}


def _cotangents(y: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=g).bfloat16().to(t.dtype) for t in floats(y)]


def _named(name: str, tensors: list[Tensor]) -> Results:
    return {f"{name}{n}": t.detach() for n, t in enumerate(tensors)}


def in_tiles(
    module: nn.Module, dtype: torch.dtype = torch.float32, shape: Any = (2, 16, 8), tiles: int = 4
) -> bool:
    """Whether it passes in tiles, and then its results and gradients are hardly farther from those in
    fp32 than the row's; else it is refused."""
    own, g = zfunc.segment("piece", module), torch.Generator().manual_seed(1)
    values, x = cast(own.initial(0), dtype), torch.randn(shape, generator=g).to(dtype)
    try:
        got = passes_of(own, values, x, tiles)
    except ValueError:
        return False
    whole, exact = (passes_of(own, cast(values, d), cast(x, d), 1) for d in (dtype, torch.float32))
    # A gradient may be zero but for rounding.
    least = max([1e-3, *(0.1 * float(exact[k].norm()) for k in own.by_short if k in exact)])
    off = {k: (far(t, exact[k], least), far(whole[k], exact[k], least)) for k, t in got.items()}
    most = 1e-5 if dtype == torch.float32 else 2e-2
    assert all(mine < max(most, 1.5 * theirs) for mine, theirs in off.values()), off
    return True
