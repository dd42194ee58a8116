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
from zfunc.models.hf.attention import NAME, implementation_for
from zfunc.models.hf.recording import BY_HAND
from zfunc.models.loss import IGNORE_INDEX
from zfunc.runtime.rng import seeded_sequence

SMALL = 30_000_000
"""Parameters of a model, at most, that is compared itself."""
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_COUNTS = ("num_attention_heads", "num_key_value_heads")
log = logging.getLogger("zfunc")
Loss = Callable[[Any, Any], Tensor]
Cut = Callable[..., tuple[Segment, ...]]  # `cutting.cut_layers`


def compare(
    cut_layers: Cut, model: Any, inputs: dict[str, Tensor], targets: Any, loss: Loss | None
) -> tuple[bool, bool]:
    """Whether segments compute what the model does only if they hand on its main input, and whether they keep the
    documents of a sequence apart; with a loss of the user's, that is the user's.

    Raises ValueError if they do not compute it in either way.
    """
    name = type(model).__name__
    small = _small(model)
    if targets is None:
        ids = inputs["input_ids"]
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORE_INDEX)], 1)
    difference = ""
    for carries in (False, True):
        difference = _difference(
            cut_layers(small, inputs, loss, carries_input=carries), small, inputs, targets, loss
        )
        if not difference:
            log.info("hf: the segments of a %s have its loss and gradients on a tiny batch", name)
            return carries, loss is not None or _keeps_documents_apart(cut_layers, small, inputs, carries)
    raise ValueError(
        f"model: got a {name} that computes something else in segments ({difference}), expected the same loss and "
        f"gradients: {BY_HAND}"
    )


def _keeps_documents_apart(cut_layers: Cut, model: Any, inputs: dict[str, Tensor], carries: bool) -> bool:
    """Whether a document has the same logits after another as alone."""
    if implementation_for(model) != NAME:
        return False  # the model looks for documents itself, if it does, which reads data
    ids = inputs["input_ids"]
    segments, length = cut_layers(model, {"input_ids": ids}, None, carries_input=carries), ids.shape[1]
    positions = torch.arange(length).expand_as(ids)
    both = {"input_ids": ids.flatten()[None], "position_ids": positions.flatten()[None]}
    try:
        with torch.no_grad():
            alone = model(input_ids=ids[-1:]).logits
            logits = _in_segments(segments, dict(model.named_parameters()), both)
    except (TypeError, ValueError, RuntimeError):  # it takes no positions
        return False
    return torch.allclose(logits[:, -length:], alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))


def _in_segments(segments: tuple[Segment, ...], values: dict[str, Tensor], x: Any, *targets: Any) -> Any:
    """What the last segment returns for these values of parameters, by name."""
    for s in segments:
        params = {short: values[full] for short, full in s.by_short.items()}
        x = s.evaluation({**params, **s.constants}, x, *(targets if s is segments[-1] else ()))
    return x


def _small(model: Any) -> Any:
    """A copy of a small model, or a small one of its class, with random values added to its parameters."""
    if sum(p.numel() for p in model.parameters()) <= SMALL and not any(p.is_meta for p in model.parameters()):
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


def _small_config(model: Any) -> Any:
    """The config of a model with fewer and narrower layers."""
    for shrink in (1, 2, 4, 8, 16, 32, 64):
        config = copy.deepcopy(model.config)
        layers = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or [""]
        few = min(layers, max(2, *(kinds.index(x) + 1 for x in kinds)))
        for key, value in vars(config).items():
            if isinstance(value, list) and len(value) == layers:
                setattr(config, key, value[:few])
        config.num_hidden_layers = few
        for key in (*_WIDTHS, *_COUNTS):
            if isinstance(getattr(config, key, None), int):
                setattr(config, key, max(1, getattr(config, key) // shrink))
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in type(model)(copy.deepcopy(config)).parameters())
        except (ValueError, RuntimeError, ZeroDivisionError):
            continue
        if size <= SMALL:
            return config
    raise ValueError(
        f"model: got a {type(model).__name__} too large to compare with its segments, and a config that cannot be "
        f"made smaller: {BY_HAND}"
    )


def _first(loss: Any) -> Tensor:
    """The loss, without auxiliary outputs."""
    return loss[0] if isinstance(loss, tuple) else loss


def _difference(
    segments: tuple[Segment, ...], model: Any, inputs: dict[str, Tensor], targets: Any, loss: Loss | None
) -> str:
    """What differs between a model and its segments, or ""."""
    named = dict(model.named_parameters())
    output = model(**inputs, **({"labels": inputs["input_ids"]} if loss is None else {}))
    own = output.loss if loss is None else _first(loss(output, targets))
    grads = torch.autograd.grad(own, list(named.values()), allow_unused=True, materialize_grads=True)
    x = inputs if len(inputs) > 1 else inputs[model.main_input_name]
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
