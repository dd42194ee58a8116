"""What plain PyTorch makes of a model: the gradient of a batch by autograd, summed, unscaled and clipped.

Written without the engine, and as it rounds: in the compute precision, micro-batches added up in fp32. So what it
gives is compared element by element, and a clip or a scale that is off by a thousandth is seen.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from numpy_reference import reference_update
from small_models import rows_of
from torch import Tensor
from torch.utils._pytree import tree_map_only

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.core.layout import Span
from zfunc.core.optimizer_state import HIGH_HALF
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State
from zfunc.engine.trace.batches import split_batch
from zfunc.optim.formats import initial_state, unpack_weights
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

Values = dict[str, Tensor]


@frozen
class Part:
    """One segment of a plain model: a function of parameters and constants by short name."""

    function: Callable[..., Any]
    names: dict[str, str]  # short name -> full name, of its parameters
    constants: dict[str, Tensor]

    @classmethod
    def of(cls, segment: zfunc.Segment) -> "Part":
        """What a segment computes in training."""
        return cls(segment.function, segment.by_short, dict(segment.constants))


def gradient(
    parts: Sequence[Part],
    values: Mapping[str, Tensor],
    trained: set[str],
    batches: Sequence[tuple[Any, Any]],
    *,
    dtype: torch.dtype = torch.float32,
    in_fp32: Collection[str] = (),
    micro_batches: int = 1,
    stage: int = 2,
    loss_scale: float = 1.0,
) -> tuple[float, dict[str, float], Values]:
    """The mean loss over the batches of all ranks, the means of its auxiliary outputs, and its gradient by full
    name, in fp32: unscaled, not clipped.

    A parameter that several parts use has a term for each, as it has a delivery for each. Ranks are added up in
    `dtype`, micro-batches in fp32; with `stage` 1 these too in `dtype`, before the ranks. Parameters `in_fp32` and
    their gradients are that in place of `dtype`.
    """
    loss, aux, of_ranks = 0.0, dict[str, float](), []
    count = micro_batches * len(batches)
    seed = torch.tensor(loss_scale / count)
    for batch in batches:
        terms: dict[str, list[Tensor]] = {}
        for inputs, targets in split_batch(batch, micro_batches):
            mine, own, grads = _one(parts, values, trained, inputs, targets, dtype, in_fp32, seed)
            loss += mine / count
            aux |= {name: aux.get(name, 0.0) + value / count for name, value in own.items()}
            for name, grad in grads:
                terms.setdefault(name, []).append(grad)
        if stage == 1:
            terms = {name: [_sum(of_name)] for name, of_name in terms.items()}
        of_ranks.append(terms)
    total = {
        name: _sum([_sum(of_all).float() for of_all in zip(*(t[name] for t in of_ranks), strict=True)])
        for name in of_ranks[0]
    }
    return loss, aux, {name: grad / loss_scale for name, grad in total.items()}


def _one(
    parts: Sequence[Part],
    values: Mapping[str, Tensor],
    trained: set[str],
    inputs: Any,
    targets: Any,
    dtype: torch.dtype,
    in_fp32: Collection[str],
    seed: Tensor,
    missing: Callable[[Tensor], Any] = torch.zeros_like,
) -> tuple[float, dict[str, float], list[tuple[str, Any]]]:
    """Loss, auxiliary outputs and gradients of one micro-batch on one rank, the last part's first; of a parameter
    that no path leads to what `missing` makes."""
    # Contiguous, as a step loads it: 16-bit products round by the order they are made in.
    x = tree_map_only(Tensor, lambda t: (t.to(dtype) if t.is_floating_point() else t).contiguous(), inputs)
    uses: list[tuple[str, Tensor]] = []
    for part in parts:
        own = {
            short: values[full].to(torch.float32 if full in in_fp32 else dtype, copy=True)
            for short, full in part.names.items()
        }
        for short, full in part.names.items():
            if full in trained:
                uses.append((full, own[short].requires_grad_()))
        x = part.function({**own, **part.constants}, *((x, targets) if part is parts[-1] else (x,)))
    loss, aux = x if isinstance(x, tuple) else (x, {})
    grads = torch.autograd.grad(loss.float(), [t for _, t in uses], seed, allow_unused=True)
    result = [(full, missing(t) if g is None else g) for (full, t), g in zip(uses, grads, strict=True)]
    return float(loss.detach()), {k: float(torch.as_tensor(v).detach()) for k, v in aux.items()}, result[::-1]


def unused(
    parts: Sequence[Part], values: Values, trained: set[str], batch: Any, dtype: torch.dtype
) -> set[str]:
    """The trained parameters that no path from the loss leads to, which torch leaves alone."""
    _, _, grads = _one(parts, values, trained, *batch, dtype, (), torch.tensor(1.0), lambda _: None)
    return trained - {name for name, grad in grads if grad is not None}


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def clipped(grads: Values, clip_norm: float | None) -> tuple[float, Values]:
    """The norm of all of it, and the gradient as `clip_grad_norm_` leaves it."""
    holders = {name: torch.zeros_like(g) for name, g in grads.items()}
    for name, holder in holders.items():
        holder.grad = grads[name].clone()
    limit = torch.inf if clip_norm is None else clip_norm
    norm = torch.nn.utils.clip_grad_norm_([*holders.values()], limit)
    return float(norm), {name: holder.grad for name, holder in holders.items() if holder.grad is not None}


def train(
    parts: Sequence[Part],
    values: Values,
    trained: set[str],
    batch: Callable[[int], tuple[Any, Any]],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    steps: int,
    clip_norm: float | None,
    lr: Callable[[int], float] | None = None,
    late: bool = False,
    **how: Any,
) -> list[float]:
    """The losses of a loop of plain PyTorch. Its optimizers have the values of what is trained, which they change;
    `late` ones get a gradient one step after it was made."""
    losses, waiting = list[float](), Values()
    for i in range(steps):
        loss, _, grads = gradient(parts, values, trained, [batch(i)], **how)
        losses.append(loss)
        made = clipped(grads, clip_norm)[1]
        applied, waiting = (waiting, made) if late else (made, waiting)
        for name, grad in applied.items():
            values[name].grad = grad
        for optimizer in optimizers if applied else ():
            for group in optimizer.param_groups if lr else ():
                group["lr"] = lr(i + 1)
            optimizer.step()
    return losses


def remembering(optimizer: zfunc.AdamW) -> zfunc.AdamW:
    """The same optimizer with beta1 = 0: its first moment is the gradient it was given, to the bit."""
    return evolve(optimizer, betas=(0.0, 0.9))


def _kept(program: Program, state: State) -> Iterator[tuple[Span, slice, Values]]:
    """Every parameter's place, this rank's elements of it, and what is kept of them."""
    for bucket in program.layout.buckets:
        start, stop = bucket.slice_of(program.ranks.rank, program.ranks.world)
        start, stop = bucket.start + start, bucket.start + stop
        for span in bucket.spans:
            a, z = max(span.start, start), min(span.stop, stop)
            if a < z:
                kept = {
                    kind: x[a - start : z - start] for kind, x in state.buffers.state(bucket.index).items()
                }
                yield span, slice(a - span.start, z - span.start), kept


def reached(program: Program, state: State) -> dict[str, tuple[slice, Tensor]]:
    """The gradient that reached the optimizer last, by name: this rank's elements of the flat parameter."""
    return {span.name: (where, kept["exp_avg"]) for span, where, kept in _kept(program, state)}


def assert_reached(program: Program, state: State, expected: Values, tolerance: float) -> None:
    """Every element of the gradient that reached the optimizer is the expected one, to the order of its sums."""
    got = reached(program, state)
    assert program.ranks.world > 1 or expected.keys() <= got.keys()
    for name in expected.keys() & got.keys():
        where, values = got[name]
        want = expected[name].flatten()[where]
        torch.testing.assert_close(
            values.float(),
            want,
            rtol=tolerance,
            atol=tolerance * float(expected[name].abs().max()),
            msg=lambda text, name=name: f"what reached the optimizer of {name}: {text}",
        )


def follow(
    program: Program,
    state: State,
    parts: Sequence[Part],
    batch: Callable[[int], tuple[Any, Any]],
    *,
    steps: int,
    tolerance: float | None,
) -> list[float]:
    """Train with an optimizer that remembers, and hold every step against plain PyTorch at the same weights.

    Loss, norm, and every element that reaches the optimizer; these only with a tolerance, relative to the tensor's
    largest. Returns the norms.
    """
    ranks, trained = program.ranks, {span.name for span in program.layout.spans}
    exact = program.optimizer.moments == "fp32" and tolerance is not None
    norms = list[float]()
    for i in range(steps):
        batches = [rows_of(batch(i), rank, ranks.world) for rank in range(ranks.world)]
        loss, aux, grads = gradient(
            parts,
            _sent(program, zfunc.params(program, state)),
            trained,
            batches,
            dtype=program.dtype,
            in_fp32={x.name for b in program.layout.all_buckets if b.in_fp32 for x in b.spans},
            micro_batches=program.settings.micro_batches,
            stage=program.spec.settings.stage,
            loss_scale=state.loss_scale.scale,
        )
        each = {name: float(grad.norm()) for name, grad in grads.items()}
        norm, grads = clipped(grads, program.settings.clip_norm)
        kept = {x.name: {k: t.clone() for k, t in of.items()} for x, _, of in _kept(program, state)}
        state, metrics = zfunc.train_step(program, state, batches[ranks.rank])
        got, expected = (metrics.loss, metrics.grad_norm), (loss, norm)
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-7), f"loss and norm {got}, expected {expected}"
        assert metrics.aux == pytest.approx(aux, rel=1e-6, abs=1e-6)
        assert metrics.norms == pytest.approx(each if program.settings.norms else {}, rel=1e-5, abs=1e-7)
        if metrics.norms:
            assert math.hypot(*metrics.norms.values()) == pytest.approx(metrics.grad_norm, rel=1e-12)
        norms.append(norm)
        if exact:
            left = unused(parts, zfunc.params(program, state), trained, batches[0], program.dtype)
            _assert_updated(program, kept, state, metrics, left)
        if tolerance is not None:
            assert_reached(program, state, grads, tolerance)
    return norms


def _assert_updated(
    program: Program, before: dict[str, Values], state: State, metrics: Any, left: set[str]
) -> None:
    """Every element was updated once, with its own gradient and its own decay, to the bit; but for those `left`."""
    optimizer = program.optimizer
    for span, _, compact in _kept(program, state):
        kept = _joined(compact)
        decision = StepDecision(False, 1.0, metrics.step, optimizer.factors(metrics.step))
        how = optimizer.rule_step(decision, span.group)._replace(state_format="fp32")
        result = _joined(before[span.name])
        if span.name not in left:
            result, _ = reference_update(how, result, kept["exp_avg"])
        for kind in ("master", "exp_avg_sq"):
            assert (kept[kind] == result[kind]).all(), f"{kind} of {span.name}"
    # What reached it is what was measured.
    if program.ranks.world == 1 and program.settings.clip_norm is None:
        squares = [float(x.double().square().sum()) for _, x in reached(program, state).values()]
        precise = 1e-12 if program.device.type == "cpu" else 1e-6
        assert metrics.grad_norm == pytest.approx(math.sqrt(sum(squares)), rel=precise)


def _joined(kept: Values) -> dict[str, Any]:
    """What is kept beside fp32 moments, as the reference has it: the halves of a split master are one.

    Parameters on the disk, which lie there beside it, are left out.
    """
    moments = {
        kind: x.abs() if kind == "exp_avg_sq" else x for kind, x in kept.items() if kind.startswith("exp")
    }
    return {kind: x.numpy(force=True) for kind, x in {"master": unpack_weights(kept), **moments}.items()}


def _sent(program: Program, values: Values) -> Values:
    """The weights as the device gets them: the high half of a split master rounds a tie away from zero, or to even
    beside squares in fp32."""
    split: dict[str, Values] = {}
    for bucket in program.layout.buckets:
        place = program.spec.places[bucket.index]
        like = {x.name: torch.empty(0, dtype=TORCH_DTYPES[x.dtype]) for x in place.buffers}
        split |= dict.fromkeys((x.name for x in bucket.spans), like) if place.sends_high_half else {}
    return {
        name: initial_state(x.flatten(), split[name])[HIGH_HALF].view(x.shape) if name in split else x
        for name, x in values.items()
    }
