"""A model that zfunc is not tested with, compared with its segments by loss and every gradient on a tiny batch.

It is the model itself if that is small, else a small one of its class. Its rows are longer than every window, chunk
or other number of tokens that its config names, which are made shorter for that.
"""

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.trace.autograd_functions import applied_by, apply_in_vjp
from zfunc.engine.trace.segment import Segment
from zfunc.models.hf.families import BY_TRACE
from zfunc.models.loss import collated_batch, next_token_loss
from zfunc.runtime.rng import seeded_sequence

SMALL = 30_000_000
"""Parameters of a model, at most, that is compared itself."""
LOSS_CLOSE = 1e-4  # of the loss: a difference that is rounding
GRADIENT_CLOSE = 1e-3  # of the largest of a gradient
ROUNDING = 1e-5  # of the largest of all gradients
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_COUNTS = ("num_attention_heads", "num_key_value_heads")
_TOKENS = re.compile(r"(window|window_size|chunk_size|local_attention|original_max_position_embeddings)$")
"""Names of settings that are numbers of tokens from which on a model computes something else."""
log = logging.getLogger("zfunc")


def compare(
    cut: Callable[..., tuple[Segment, ...]],  # such as `cutting.cut_layers` is
    model: Any,
    ids: Tensor,
) -> bool:
    """Compare a model with its segments, made by `cut`; returns whether they keep the documents of a row apart.

    Raises ValueError if the loss or gradients differ on token ids `ids` [batch, seq], or on longer rows of them.
    """
    name, small = type(model).__name__, _small_copy(model)
    longer = _with_longer_rows(small, ids)
    segments = cut(small, packs=True)
    difference = _difference(segments, small, longer)
    if difference:
        raise ValueError(
            f"model: got a {name} that computes something else in segments ({difference}), expected the same loss "
            f"and gradients: {BY_TRACE}"
        )
    packs = not _difference_of_documents(segments, small, longer)
    log.info(
        "hf: the segments of a %s have its loss and gradients on a tiny batch%s",
        name,
        ", and keep documents of a row apart" if packs else "",
    )
    return packs


def _with_longer_rows(model: Any, ids: Tensor) -> Tensor:
    """Token ids `ids` [batch, seq] with longer rows, by repetition; lengths in the settings of `model`, such as a
    window, are reduced in place below that. `ids` unchanged if no setting is a length."""
    tokens = min(2 * ids.shape[1] + 5, getattr(model.config, "max_position_embeddings", None) or 1 << 30)
    settings = [vars(x) for m in model.modules() for x in (m, vars(m).get("config")) if x is not None]
    shortened = sum(_shorten(x, tokens // 2) for x in settings)
    return ids[:, torch.arange(tokens) % ids.shape[1]] if shortened else ids


def _shorten(settings: dict[str, Any], most: int) -> bool:
    """Reduce each of a model's `settings` that is a number of tokens to at most `most`; returns whether any
    is."""
    found = False
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _shorten(value, most)
        elif _TOKENS.search(str(key)) and isinstance(value, int) and not isinstance(value, bool):
            settings[key], found = min(value, most), True
    return found


def _in_segments(segments: tuple[Segment, ...], values: dict[str, Tensor], x: Any, *targets: Any) -> Any:
    """The output of the last segment for input `x`, with the parameters' `values` by full name."""
    for s in segments:
        params = {short: values[full] for short, full in s.by_short.items()}
        x = s.evaluation({**params, **s.constants}, x, *(targets if s is segments[-1] else ()))
    return x


def _small_copy(model: Any) -> Any:
    """A copy of `model` if small, else a new small model of its class, with shrunken config; in fp32 on the
    CPU, with random values added to its parameters."""
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
    """The config of `model` with two layers, or enough for all layer types, and widths of a small model."""
    from transformers import PreTrainedConfig

    for shrink in (1, 2, 4, 8, 16, 32, 64):
        config = copy.deepcopy(model.config)
        for part in (config, *(x for x in vars(config).values() if isinstance(x, PreTrainedConfig))):
            _shrink(part, shrink)
        try:
            with torch.device("meta"):
                if _size(type(model)(copy.deepcopy(config))) <= SMALL:
                    return config
        except (ValueError, RuntimeError, ZeroDivisionError):  # of sizes that do not go together
            continue
    raise ValueError(
        f"model: got a {type(model).__name__} too large to compare with its segments, and a config that cannot be "
        f"made smaller: {BY_TRACE}"
    )


def _shrink(config: Any, factor: int) -> None:
    """Reduce `config` in place to few layers of each kind, with widths and heads divided by `factor`."""
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None) or [""]
    few = min(layers or 0, max(2, *(kinds.index(x) + 1 for x in kinds)))
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, key, value[:few])
        elif key in (*_WIDTHS, *_COUNTS) and isinstance(value, int):
            setattr(config, key, max(1, value // factor))
    if layers is not None:
        config.num_hidden_layers = few


def _difference(segments: tuple[Segment, ...], model: Any, ids: Tensor) -> str:
    """The first difference of a model and its segments in loss or gradients on token ids `ids` [batch, seq], as
    text; "" for none."""
    own = model(**{model.main_input_name: ids}, labels=ids).loss
    targets = collated_batch({"input_ids": ids, "labels": ids})[1]
    return _compared(model, own, lambda values: _in_segments(segments, values, ids, targets))


def _difference_of_documents(segments: tuple[Segment, ...], model: Any, ids: Tensor) -> str:
    """Text of the first difference between segments run on rows `ids`, each as two documents, and `model` run
    on each document alone, in loss or gradients; "" for none."""
    parts = ids.tensor_split([ids.shape[1] // 2 + 1], 1)
    places = torch.cat([torch.arange(x.shape[1]) for x in parts]).expand_as(ids)
    own = next_token_loss(torch.cat([model(x).logits for x in parts], 1).float(), ids)
    x = {"input_ids": ids, "position_ids": places}
    return _compared(
        model, own, lambda values: next_token_loss(_in_segments(segments, values, x).float(), ids)
    )


def _compared(model: Any, own: Tensor, loss_of: Callable[[dict[str, Tensor]], Tensor]) -> str:
    """Text of the first difference between `own`, the model's loss, and `loss_of(parameters)`, or between
    their gradients; "" for none."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(own, list(named.values()), allow_unused=True, materialize_grads=True)
    try:
        with applied_by(apply_in_vjp):
            y, pullback = torch.func.vjp(loss_of, {name: p.detach() for name, p in named.items()})
        others = pullback(torch.ones_like(y))[0]
    except Exception as error:
        return str(error).strip().partition("\n")[0][:300] or type(error).__name__
    got, expected = float(y.detach()), float(own.detach())
    if not abs(got - expected) <= LOSS_CLOSE * abs(expected):
        return f"a loss of {got:.6g} instead of {expected:.6g}"
    largest = max(float(g.abs().max()) for g in grads)
    for full, g in zip(named, grads, strict=True):
        close = GRADIENT_CLOSE * float(g.abs().max()) + ROUNDING * largest
        if not float((others[full] - g).abs().max()) <= close:
            return f"another gradient of {full!r}"
    return ""
