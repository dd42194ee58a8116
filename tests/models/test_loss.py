"""Laws of the loss in pieces: value and gradients of the whole, equal bits in every mode, few logits at once."""

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from zfunc.core.setting_values import RECOMPUTE
from zfunc.engine.trace.cost_trace import nbytes, trace
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.engine.trace.vjp import make_vjp
from zfunc.models.loss import linear_next_token_loss

VOCAB, SEQ, HIDDEN = 300, 75, 16  # four rows are three pieces of tokens, and as many of the vocabulary
COTANGENT = 64.0
Result = tuple[Tensor, Tensor, Tensor]  # loss, gradient of x, gradient of the weight
CASES: dict[str, tuple[torch.dtype, float | None, bool]] = {
    "fp32": (torch.float32, None, False),
    "fp32, capped, weighted": (torch.float32, 5.0, True),
    "bf16": (torch.bfloat16, None, True),
    "bf16, capped": (torch.bfloat16, 5.0, False),
    "fp16, capped": (torch.float16, 5.0, False),
}


def inputs(dtype: torch.dtype, weighted: bool) -> tuple[Tensor, Tensor, Any]:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, SEQ, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g)
    labels = torch.randint(VOCAB, (4, SEQ), generator=g)
    labels[1, 30:] = labels[3] = -100
    return x.to(dtype), weight.to(dtype), (labels, torch.rand(4, generator=g) / SEQ) if weighted else labels


def by_autograd(
    x: Tensor, weight: Tensor, targets: Any, softcap: float | None, logits_bytes: int | None
) -> Result:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    size = {} if logits_bytes is None else {"logits_bytes": logits_bytes}
    loss = linear_next_token_loss(x, weight, targets, softcap=softcap, **size)
    return loss.detach(), *torch.autograd.grad(loss * COTANGENT, [x, weight])


def error(of: Result, exact: Result) -> list[float]:
    """Relative to the largest element."""
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(of, exact, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_pieces_of_any_size_are_as_exact_as_the_whole(case: str) -> None:
    dtype, softcap, weighted = CASES[case]
    x, weight, targets = inputs(dtype, weighted)
    exact = by_autograd(x.double(), weight.double(), targets, softcap, None)
    whole = by_autograd(x, weight, targets, softcap, None)
    for logits_bytes in (0, 4 * VOCAB * 128, 4 * VOCAB * 256):
        got = by_autograd(x, weight, targets, softcap, logits_bytes)
        assert [t.dtype for t in got] == [torch.float32, dtype, dtype]
        torch.testing.assert_close(got[0], whole[0], rtol=3e-7, atol=0)
        for mine, others in zip(error(got, exact), error(whole, exact), strict=True):
            assert mine <= 2 * others + 1e-6
        if dtype == torch.float32:
            torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["fp32, capped, weighted", "bf16"])
def test_bits_are_autograds_and_no_logits_are_kept(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whether backward runs eagerly or as a traced graph, where min-cut might keep what it should compute again."""
    dtype, softcap, weighted = CASES[case]
    x, weight, targets = inputs(dtype, weighted)
    expected = by_autograd(x, weight, targets, softcap, 0)

    def head(params: dict[str, Tensor], x: Tensor, targets: Any) -> Tensor:
        return linear_next_token_loss(x, params["w"], targets, softcap=softcap, logits_bytes=0)

    for recompute in RECOMPUTE:
        pair = make_vjp(head, PassOptions(recompute, last=True), name="head")
        passed = SegmentWeights({"w": weight}, {}), (x, targets)
        loss, residuals = pair.forward(*passed)
        grads, below = pair.backward(*passed, residuals, [torch.tensor(COTANGENT)])
        assert all(map(torch.equal, (loss, *below, grads["w"]), expected)), recompute
        if recompute == "min-cut":
            assert all(t.numel() < 4 * SEQ * 128 or t.shape == x.shape for t in residuals)
    assert caplog.get_records("call") == [r for r in caplog.records if r.levelno < logging.WARNING]


@pytest.mark.parametrize("recompute", ["none", "min-cut"])
def test_the_peak_does_not_grow_with_the_product_of_tokens_and_vocabulary(recompute: Any) -> None:
    """Of 2,048 tokens and the vocabulary of GPT-2, 412 MB of fp32 logits: on the meta device."""
    tokens, vocab, hidden, size = 2_048, 50_257, 64, 128 << 20

    def head(params: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
        return linear_next_token_loss(x, params["w"], targets, logits_bytes=size)

    options = PassOptions(recompute, last=True)
    pair = make_vjp(head, options)
    weight, x = (torch.empty(n, hidden, dtype=torch.bfloat16, device="meta") for n in (vocab, tokens))
    args = (
        SegmentWeights({"w": weight}, {}),
        (x[None], torch.empty(1, tokens, dtype=torch.int64, device="meta")),
    )
    guess = lambda *_: torch.empty((), device="meta")  # noqa: E731
    traced = trace(pair, options, *args, device=torch.device("meta"), guess=guess)
    cost = traced.cost
    results = 2 * weight.nbytes + 10 * x.nbytes  # old and new, the sum of x in fp32
    assert cost.forward.workspace + cost.residual_bytes + nbytes(traced.out) < 2.5 * size
    assert cost.backward.workspace < 2.5 * size + results < 4 * tokens * vocab
    assert cost.backward.flops == 3 * cost.forward.flops


@pytest.mark.parametrize("logits_bytes", [0, 1 << 30])
def test_what_does_not_count_and_what_is_wrong_is_as_in_torch(logits_bytes: int) -> None:
    x, weight, labels = inputs(torch.float32, weighted=False)
    nothing = linear_next_token_loss(x, weight, torch.full_like(labels, -100), logits_bytes=logits_bytes)
    assert math.isnan(float(nothing))
    x[3] = torch.nan  # ignored
    loss = linear_next_token_loss(x, weight, labels, logits_bytes=logits_bytes)
    assert math.isfinite(float(loss))
    for label in (-1, VOCAB):
        labels[0, 0] = label
        with pytest.raises(IndexError, match="out of bounds"):
            linear_next_token_loss(x, weight, labels, logits_bytes=logits_bytes)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight, labels = inputs(torch.float32, weighted=False)
    expected = by_autograd(x, weight, labels, None, 0)
    _, pull = torch.func.vjp(lambda x: linear_next_token_loss(x, weight, labels, logits_bytes=0), x)
    assert torch.equal(pull(torch.tensor(COTANGENT))[0], expected[1])
