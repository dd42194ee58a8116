"""`cut_model`: segments of a model of transformers, which compute what the model itself computes.

The models of `families.FAMILIES` are tested with zfunc. Segments of any other are compared with it here, by loss
and every gradient, on a tiny batch: with the model itself if it is small, else with a small one of its class.
"""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.engine.segment import Segment
from zfunc.models.hf.adapters import base_of
from zfunc.models.hf.attention import NAME, implementation_for
from zfunc.models.hf.cutting import Loss, cut_layers
from zfunc.models.hf.families import LOSS, check_supported, check_transformers, is_tested
from zfunc.models.hf.recording import BY_HAND
from zfunc.models.loss import IGNORE_INDEX
from zfunc.runtime.rng import seeded_sequence

SMALL = 30_000_000
"""Parameters of a model, at most, that is compared itself."""
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_COUNTS = ("num_attention_heads", "num_key_value_heads")
log = logging.getLogger("zfunc")


def cut_model(
    model: nn.Module, *, loss: Loss | None = None, example: tuple[Any, Any] | None = None
) -> tuple[Segment, ...]:
    """A model of transformers as segments: embeddings, one for each of its layers, and the rest with the loss.

    A causal language model brings its loss. A batch is `(input_ids, labels)` with shifted labels, or what
    `zfunc.hf.batch` makes of them, or the dict of a collator of transformers; pad at the end. The loss of its
    routers is part of it where the config has `output_router_logits`.

    Any other model, such as an encoder with a head, needs `loss(output, targets)`, the mean over a micro-batch
    given what the model returns, and an `example`, a tiny batch `(inputs, targets)`. Inputs are the model's main
    one, or a dict by name, such as `input_ids` and `attention_mask`.

    Models other than those of `zfunc.models.hf.families.FAMILIES` are compared with their segments first, by loss
    and gradients on a tiny batch. Parameters keep their names, so `zfunc.params` is the model's state dict; those
    with `requires_grad=False`, and those that nothing depends on, stay as they are. Dropout is as configured, and
    off in `evaluate` and `apply`. The model's own gradient checkpointing and attention implementation are ignored;
    `zfunc.compile(recompute=)` is the setting.

    The model may be a `peft.PeftModel` with LoRA. Only the adapters are trained; frozen parameters are kept in the
    compute precision, without gradients and optimizer state.

    A model on the meta device takes no memory; `zfunc.init` draws its weights as transformers would, one segment at
    a time (`load` reads them from a folder). Raises ValueError for a model that cannot be cut, or that
    computes something else in segments; ImportError without transformers.
    """
    check_transformers()
    base = base_of(model)
    check_supported(base, loss=loss is not None)
    if loss is not None and example is None:
        raise ValueError(f"example: got none with a loss, expected a tiny batch: {LOSS}")
    inputs, targets = (_tokens(base), None) if example is None else (_by_name(base, example[0]), example[1])
    carries, packs = (False, True) if is_tested(base) else _compare(base, inputs, targets, loss)
    log.info("hf: attention is scaled_dot_product_attention of shapes alone, instead of the model's")
    return cut_layers(model, inputs, loss, carries_input=carries, packs_documents=packs)


def _tokens(model: Any) -> dict[str, Tensor]:
    """Token ids, [2, 9]."""
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(3, min(text.vocab_size, 1000), (2, 9), generator=generator)}


def _by_name(model: Any, inputs: Any) -> dict[str, Tensor]:
    return dict(inputs) if isinstance(inputs, Mapping) else {model.main_input_name: inputs}


def _compare(model: Any, inputs: dict[str, Tensor], targets: Any, loss: Loss | None) -> tuple[bool, bool]:
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
        difference = _difference(small, inputs, targets, loss, carries)
        if not difference:
            log.info("hf: the segments of a %s have its loss and gradients on a tiny batch", name)
            return carries, loss is not None or _keeps_documents_apart(small, inputs["input_ids"], carries)
    raise ValueError(
        f"model: got a {name} that computes something else in segments ({difference}), expected the same loss and "
        f"gradients: {BY_HAND}"
    )


def _keeps_documents_apart(model: Any, ids: Tensor, carries: bool) -> bool:
    """Whether a document has the same logits after another as alone."""
    if implementation_for(model) != NAME:
        return False  # the model looks for documents itself, if it does, which reads data
    segments = cut_layers(model, {"input_ids": ids}, None, carries_input=carries)
    named, length = dict(model.named_parameters()), ids.shape[1]
    positions = torch.arange(length).expand_as(ids)
    x: Any = {"input_ids": ids.flatten()[None], "position_ids": positions.flatten()[None]}
    try:
        with torch.no_grad():
            alone = model(input_ids=ids[-1:]).logits
            for s in segments:
                x = s.evaluation(
                    {**{short: named[full] for short, full in s.by_short.items()}, **s.constants}, x
                )
    except (TypeError, ValueError, RuntimeError):  # it takes no positions
        return False
    return torch.allclose(x[:, -length:], alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))


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


def _difference(model: Any, inputs: dict[str, Tensor], targets: Any, loss: Loss | None, carries: bool) -> str:
    """What differs between a model and its segments, or ""."""
    segments = cut_layers(model, inputs, loss, carries_input=carries)
    named = dict(model.named_parameters())
    output = model(**inputs, **({"labels": inputs["input_ids"]} if loss is None else {}))
    own = output.loss if loss is None else _first(loss(output, targets))
    grads = torch.autograd.grad(own, list(named.values()), allow_unused=True, materialize_grads=True)

    def in_segments(values: dict[str, Tensor]) -> Tensor:
        x: Any = inputs if len(inputs) > 1 else inputs[model.main_input_name]
        for s in segments:
            params = {short: values[full] for short, full in s.by_short.items()}
            x = s.evaluation({**params, **s.constants}, x, *([targets] if s is segments[-1] else []))
        return _first(x)

    try:
        y, pullback = torch.func.vjp(in_segments, {name: p.detach() for name, p in named.items()})
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
