"""A model that zfunc is not tested with, compared with its segments by loss and every gradient on a tiny batch.

It is the model itself if that is small, else a small one of its class.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.compile.segment import Segment
from zfunc.models.hf.recording import BY_HAND
from zfunc.models.loss import collated_batch
from zfunc.runtime.rng import seeded_sequence

SMALL = 30_000_000
"""Parameters of a model, at most, that is compared itself."""
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_COUNTS = ("num_attention_heads", "num_key_value_heads")
log = logging.getLogger("zfunc")
Loss = Callable[[Any, Any], Tensor]


def compare(
    cut: Callable[..., tuple[Segment, ...]],  # such as `cutting.cut_layers` is
    model: Any,
    inputs: dict[str, Tensor],
    targets: Any,
    loss: Loss | None,
) -> None:
    """Raise ValueError if the segments of a model compute something else than it does."""
    name, small = type(model).__name__, _small(model)
    difference = _difference(cut(small, inputs, loss), small, inputs, targets, loss)
    if difference:
        raise ValueError(
            f"model: got a {name} that computes something else in segments ({difference}), expected the same loss "
            f"and gradients: {BY_HAND}"
        )
    log.info("hf: the segments of a %s have its loss and gradients on a tiny batch", name)


def _in_segments(segments: tuple[Segment, ...], values: dict[str, Tensor], x: Any, *targets: Any) -> Any:
    """The last segment's output for these values of parameters, by name."""
    for s in segments:
        params = {short: values[full] for short, full in s.by_short.items()}
        x = s.evaluation({**params, **s.constants}, x, *(targets if s is segments[-1] else ()))
    return x


def _small(model: Any) -> Any:
    """A copy of a small model, or a small one of its class, with random values added to its parameters."""
    if _size(model) <= SMALL and not any(p.is_meta for p in model.parameters()):
        small = copy.deepcopy(model).to("cpu")
    else:
        with seeded_sequence(0):
            small = type(model)(_small_config(model))
    small = small.float().eval().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in small.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
    return small


def _size(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def _small_config(model: Any) -> Any:
    """The config of a model with one layer of each kind, at least two, as much narrower as it has to be."""
    layers = model.config.num_hidden_layers
    kinds = getattr(model.config, "layer_types", None) or [""]
    few = min(layers, max(2, *(kinds.index(x) + 1 for x in kinds)))
    for shrink in (1, 2, 4, 8, 16, 32, 64):
        config = copy.deepcopy(model.config)
        for key, value in vars(config).items():
            if isinstance(value, list) and len(value) == layers:
                setattr(config, key, value[:few])
            elif key in (*_WIDTHS, *_COUNTS) and isinstance(value, int):
                setattr(config, key, max(1, value // shrink))
        config.num_hidden_layers = few
        try:
            with torch.device("meta"):
                if _size(type(model)(copy.deepcopy(config))) <= SMALL:
                    return config
        except (ValueError, RuntimeError, ZeroDivisionError):  # of sizes that do not go together
            continue
    raise ValueError(
        f"model: got a {type(model).__name__} too large to compare with its segments, and a config that cannot be "
        f"made smaller: {BY_HAND}"
    )


def _difference(
    segments: tuple[Segment, ...], model: Any, inputs: dict[str, Tensor], targets: Any, loss: Loss | None
) -> str:
    """The first difference between a model and its segments, or ""."""
    named, ids = dict(model.named_parameters()), inputs[model.main_input_name]
    if loss is None:
        own = model(**inputs, labels=ids).loss
        targets = collated_batch({"input_ids": ids, "labels": ids})[1]
    else:
        own = _first(loss(model(**inputs), targets))
    grads = torch.autograd.grad(own, list(named.values()), allow_unused=True, materialize_grads=True)
    x = inputs if len(inputs) > 1 else ids
    try:
        y, pullback = torch.func.vjp(
            lambda values: _first(_in_segments(segments, values, x, targets)),
            {name: p.detach() for name, p in named.items()},
        )
        others = pullback(torch.ones_like(y))[0]
    except Exception as error:
        return str(error).strip().partition("\n")[0][:300] or type(error).__name__
    got, expected = float(y.detach()), float(own.detach())
    if not abs(got - expected) <= 1e-4 * abs(expected):
        return f"a loss of {got:.6g} instead of {expected:.6g}"
    largest = max(float(g.abs().max()) for g in grads)
    for full, g in zip(named, grads, strict=True):
        if not float((others[full] - g).abs().max()) <= 1e-3 * float(g.abs().max()) + 1e-5 * largest:
            return f"another gradient of {full!r}"
    return ""


def _first(loss: Any) -> Tensor:
    """The loss, without auxiliary outputs."""
    return loss[0] if isinstance(loss, tuple) else loss
