"""A constant that switches behaviour, or says how much is looked at, is right on both sides of itself.

Each has a case whose size is `at`: it runs with the constant below that, at it and above it, against a witness.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc.engine.rows import row_attention, tile_attention
from zfunc.engine.trace import purity
from zfunc.engine.trace.vjp import SegmentWeights, make_vjp
from zfunc.models.loss import linear_next_token_loss

ROOT = Path(__file__).parents[1]
MARKED = (
    "models",
    "engine/trace",
    "engine/rows",
    "engine/program",
    "engine/compile.py",
    "planner/candidate.py",
)
NONE = {  # numbers of another kind, and why no result depends on them
    "models.loss_pieces.IGNORE_INDEX": "torch's",
    "models.gpt._INIT_STD": "of initial values",
    "models.hf.families.OLDEST": "a version",
    "models.hf.adapters.OLDEST": "a version",
    "engine.program.specialize.SHOWN": "names in a message",
    "engine.trace.purity.MOST": "of a look before each step, which finds what it can in microseconds",
    "engine.rows.keys.SLOTS": "two by construction",
    "engine.trace.cost_trace.MULTIPROCESSORS": "of a plan's memory for a GPU that is not here, an upper bound",
    **{
        f"engine.program.fit_to_memory.{x}": "of a measurement"
        for x in ("STEPS", "MEASURED", "REPEATS", "HEADROOM")
    },
}
ELSEWHERE = {  # tests with cases on both sides
    f"planner.candidate.{x}": ("planner/test_steady_state.py", "extrapolated_right_or_not_at_all")
    for x in ("FEW", "MANY", "CLOSE")
} | {
    f"engine.rows.check.{x}": ("engine/test_tile_check.py", "what_reaches_farther_than_a_tile_is_refused")
    for x in ("FEW", "SIZES")
}


LLAMA = 27168  # parameters
OFF = 4.99e-4


@frozen
class Row:
    """A case of this size, which raises where its witness differs; it gets the constant that runs."""

    at: Any
    check: Callable[[Any, pytest.MonkeyPatch], None]
    step: Any = 1


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def close(run: Callable[..., Tensor], witness: Callable[..., Tensor], *given: Tensor) -> None:
    """Values and gradients of two functions."""
    results = []
    for f in (run, witness):
        leaves = [t.clone().requires_grad_() for t in given]
        y = f(*leaves)
        results.append([y, *torch.autograd.grad((y * random(*y.shape).to(y.dtype)).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def windows(_: int, patch: pytest.MonkeyPatch) -> None:
    from hf_models import MIXED, assert_plain, model_of

    model, x = model_of(MIXED["Qwen2"](12)), torch.arange(2 * 30).view(2, 30)
    segments = zfunc.hf.segments(model)
    assert_plain(segments, model, x, F.pad(x[:, 1:], (0, 1), value=-100), model(x, labels=x).loss)


def small_model(most: int, _: pytest.MonkeyPatch) -> None:
    from hf_models import random_model

    from zfunc.models.hf.comparison import _small

    own = random_model("Llama")
    found = sum(p.numel() for p in _small(own).parameters())
    assert found == LLAMA if most >= LLAMA else found <= most


def compared(bound: float, _: pytest.MonkeyPatch, *, loss: bool) -> None:
    """A loss, or a gradient, that is OFF of it off is refused where no more than `bound` may be."""
    from zfunc.models.hf.comparison import _compared

    model, x = nn.Linear(4, 1), random(3, 4).float()
    off = (lambda y: y + OFF * y.detach()) if loss else (lambda y: y + OFF * (y - y.detach()))
    said = _compared(
        model,
        model(x).square().mean(),
        lambda values: off(torch.func.functional_call(model, values, x).square().mean()),
    )
    assert bool(said) == (bound < OFF), said


def of_largest(bound: float, _: pytest.MonkeyPatch) -> None:
    from zfunc.models.hf.comparison import _compared

    model = nn.ParameterDict({"large": torch.ones(()), "none": torch.ones(())})
    said = _compared(model, model["large"] * 1.0, lambda values: values["large"] + OFF * (values["none"] - 1))
    assert bool(said) == (bound < OFF), said


def loss_in_pieces(logits_bytes: int, _: Any) -> None:
    labels = torch.arange(2 * 12).view(2, 12) % 31
    labels[1, 5:] = -100
    close(
        lambda x, w: linear_next_token_loss(x, w, labels, logits_bytes=logits_bytes),
        lambda x, w: F.cross_entropy((x @ w.T).flatten(0, 1), labels.flatten()),
        random(2, 12, 4).float(),
        random(31, 4).float(),
    )


def many_pieces(_: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.import_module("zfunc.models.loss_pieces"), "_ALIGNMENT", 1)
    loss_in_pieces(0, patch)


def rows(_: int, __: pytest.MonkeyPatch) -> None:
    """With a window, with documents, with both."""
    q, at = random(3, 2, 4, 24, 8).float(), torch.arange(24)
    first = torch.tensor([[0] * 10 + [10] * 14, [0] + [1] * 23])
    for window, begins in ((5, None), (None, first), (5, first)):
        seen = (at[:, None] >= at) & (at > at[:, None] - (window or 24))
        mask = seen if begins is None else (seen & (at >= begins[..., None]))[:, None]
        close(
            lambda *x, w=window, f=begins: row_attention.attend_row(*x, f, w),
            lambda *x, m=mask: F.scaled_dot_product_attention(*x, attn_mask=m),
            *q,
        )


def blocks(_: int, __: pytest.MonkeyPatch) -> None:
    """Documents that begin in their block; those that began before are another kernel's."""
    q, k, v = random(3, 16, 2, 4).float()
    first = torch.tensor([0, 0, 2, 2, 2, 5, 6, 7, 8, 8, 10, 10, 12, 13, 13, 13])
    parts = tile_attention._in_blocks(tile_attention.View(0, 0.5, first), first, q, k, v)
    got = torch.cat(
        [
            tile_attention._InTorch.forward(tile_attention.Pair(*x, seen, (0, x[0].shape[2])))[0]
            .transpose(1, 2)
            .flatten(0, 1)
            for seen, x in parts
        ]
    )
    at = torch.arange(16)
    mask = (at[:, None] >= at) & (at >= first[:, None])
    own = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), mask, scale=0.5)
    inside = first >= at // tile_attention._block(16) * tile_attention._block(16)
    torch.testing.assert_close(got[inside], own.transpose(0, 1)[inside])


def tiles(_: int, __: pytest.MonkeyPatch) -> None:
    """A few tiles that are counted as all have the costs of all, which grow evenly behind the first."""
    for backward in (False, True):
        counted = [
            (i, tile_attention.COUNTED.get())
            for i in tile_attention.tile_numbers(9, 2, fake=True, backward=backward)
        ]
        assert sum(i * times for i, times in counted) == sum(range(9))
        assert sum(times for _, times in counted) == 9


def shapes(_: int, __: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    body = nn.Linear(8, 8)
    pair = make_vjp(
        lambda p, x: torch.func.functional_call(body, p, x).cos(), recompute="none", wrt_input=True
    )
    weights = SegmentWeights({k: p.detach() for k, p in body.named_parameters()}, {})
    for tokens in (2, 3, 4, 3, 2, 4):
        x = random(tokens, 8).float()
        y, kept = pair.forward(weights, (x,))
        own, _below = pair.backward(weights, (x,), kept, [torch.ones_like(y)])
        expected = torch.autograd.grad(body(x).cos().sum(), [*body.parameters()])
        for a, b in zip(own.values(), expected, strict=True):
            torch.testing.assert_close(a, b)


class Scaled(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept


def told_apart(make: Callable[[float], Any]) -> Callable[..., None]:
    """Modules that keep other values do not share a trace."""

    def check(_: int, __: pytest.MonkeyPatch) -> None:
        assert purity.held(Scaled(make(1.0))) != purity.held(Scaled(make(2.0)))

    return check


def nested(value: float) -> list[Any]:
    return [[[value]]]


def strides(_: int, __: pytest.MonkeyPatch) -> None:
    """A kernel that returns other strides than its fake one says, and then a view."""
    pair = make_vjp(
        lambda p, x: F.smooth_l1_loss(x.mT * p["w"], x.mT.cos(), reduction="none").mT,
        recompute="none",
        wrt_input=True,
    )
    w, x = random(4, 6).float(), random(6, 4).float()
    y, kept = pair.forward(SegmentWeights({"w": w}, {}), (x,))
    own, (below,) = pair.backward(SegmentWeights({"w": w}, {}), (x,), kept, [torch.ones_like(y)])
    a, b = w.clone().requires_grad_(), x.clone().requires_grad_()
    expected = torch.autograd.grad(F.smooth_l1_loss(b.mT * a, b.mT.cos(), reduction="sum"), [a, b])
    torch.testing.assert_close([own["w"], below], [*expected])


def groups_of_queries(_: int, patch: pytest.MonkeyPatch) -> None:
    from zfunc.models.hf import attention

    patch.setattr(attention, "fuses_grouped_queries", lambda *_: True)
    close(
        lambda *x: attention.attend(nn.Identity(), *x, None)[0].transpose(1, 2),
        lambda q, *x: F.scaled_dot_product_attention(
            q, *(t.repeat_interleave(2, 1) for t in x), is_causal=True
        ),
        random(2, 4, 7, 16).float(),
        *random(2, 2, 2, 7, 16).float(),
    )


ROWS = {
    "models.hf.cutting.RECORDED": Row(12, windows),
    "models.hf.comparison.SMALL": Row(LLAMA, small_model),
    "models.hf.comparison.LOSS_CLOSE": Row(5e-4, lambda *x: compared(*x, loss=True), 2e-5),
    "models.hf.comparison.GRADIENT_CLOSE": Row(5e-4, lambda *x: compared(*x, loss=False), 2e-5),
    "models.hf.comparison.ROUNDING": Row(5e-4, of_largest, 2e-5),
    "models.hf.attention._FUSED_GQA": Row(16, groups_of_queries),
    "models.loss_pieces.LOGITS_BYTES": Row(4 * 24 * 31, loss_in_pieces),
    "models.loss_pieces._ALIGNMENT": Row(24, lambda _, patch: loss_in_pieces(0, patch)),
    "models.loss_pieces._MOST_PIECES": Row(24, many_pieces),
    "engine.rows.row_attention.TILE": Row(24, rows),
    "engine.rows.tile_attention.FEW": Row(6, tiles),
    "engine.rows.tile_attention.BLOCK": Row(4, blocks),
    "engine.rows.tile_attention.AT_ONCE": Row(16, blocks),
    "engine.trace.vjp.MAX_TRACES": Row(3, shapes),
    "engine.trace.purity.MAX_DEPTH": Row(3, told_apart(nested)),
    "engine.trace.purity.MAX_HASHED": Row(64, told_apart(lambda x: np.full(8, x))),
    "engine.trace.tensor_memory.MOST_RUN": Row(72, strides),
}


def constants() -> Iterator[str]:
    """The numbers of marked modules, by name."""
    for place in MARKED:
        path = ROOT / "zfunc" / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            module = ".".join(file.relative_to(ROOT / "zfunc").with_suffix("").parts)
            for node in ast.parse(file.read_text()).body:
                name = node.targets[0] if isinstance(node, ast.Assign) else None
                if isinstance(name, ast.Name) and name.id.isupper() and is_number(node.value):
                    yield f"{module}.{name.id}"


def is_number(value: ast.expr) -> bool:
    """Whether a literal, or a product or sum of some, is a number, or several."""
    names = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple
    inside = [x.value for x in ast.walk(value) if isinstance(x, ast.Constant)]
    return isinstance(value, names) and bool(inside) and all(type(x) in (int, float) for x in inside)


def test_every_constant_of_a_marked_module_is_in_a_row() -> None:
    found = {*constants()}
    assert found - {*ROWS, *ELSEWHERE, *NONE} == set(), (
        "a row with a case on both sides, or the reason for none"
    )
    assert {*ROWS, *ELSEWHERE, *NONE} - found == set()
    for file, name in ELSEWHERE.values():
        assert name in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("side", [-1, 0, 1], ids=["below", "at", "above"])
@pytest.mark.parametrize("name", ROWS)
def test_both_sides_of_a_constant_have_the_results_of_its_witness(
    name: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, (module, _, short) = ROWS[name], name.rpartition(".")
    if module.startswith("models.hf"):
        pytest.importorskip("transformers")
    value = row.at + side * row.step
    monkeypatch.setattr(importlib.import_module(f"zfunc.{module}"), short, value)
    row.check(value, monkeypatch)
