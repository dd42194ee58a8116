"""`cut_model`: a causal language model of transformers, cut at its decoder layers.

The model is not changed, and its parameters are not copied: segments use them as initial values, under the model's
names, and run copies of the modules that take no memory.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from zfunc.engine.segment import Segment, Values, segment
from zfunc.models.hf.adapters import base_of, is_adapted, reset_adapters
from zfunc.models.hf.attention import AttentionSettings, register
from zfunc.models.hf.families import Family, family_of
from zfunc.models.hf.parts import EmbedSegment, HeadSegment, LayerSegment
from zfunc.models.loss import collated_batch
from zfunc.runtime.rng import seeded_sequence

log = logging.getLogger("zfunc")
# Transformers that is tested; 5.0 computes some of these models differently.
OLDEST, NEWEST = (
    (5, 12),
    (5, 23),
)
MISSING = "zfunc.hf: got no transformers, expected version 5.12 or newer: pip install 'zfunc[hf]'"


def cut_model(model: nn.Module) -> tuple[Segment, ...]:
    """A causal language model as segments: embeddings, one for each decoder layer, and the head with the loss.

    Models of the classes in `zfunc.models.hf.families.FAMILIES`, with their rotary positions, sliding windows, tied
    heads, embedding scales and soft caps. A batch is `(input_ids, labels)` with shifted labels, or what
    `zfunc.hf.batch` makes of them, or the dict of a collator of transformers; pad at the end. Parameters keep their
    names, so `zfunc.params` is the model's state dict; those with `requires_grad=False` stay frozen. Dropout is as
    configured, and off in `evaluate` and `apply`. The model's own gradient checkpointing and attention
    implementation are ignored; `zfunc.compile(recompute=)` is the setting.

    The model may be a `peft.PeftModel` with LoRA. Only the adapters are trained; frozen parameters are kept in the
    compute precision, without gradients and optimizer state.

    A model on the meta device takes no memory; `zfunc.init` draws its weights as transformers would, one segment at
    a time (`load` reads them from a folder). Raises ValueError for any other model, ImportError without
    transformers.
    """
    check_transformers()
    base = base_of(model)
    family = family_of(base)
    register()
    configured = getattr(model.config, "_attn_implementation", None)
    log.info("hf: attention is scaled_dot_product_attention of shapes alone, instead of %r", configured)
    names = {id(p): name for name, p in model.named_parameters()}  # the first of a tied one
    settings = AttentionSettings(model.config)
    segments: list[Segment] = []
    owned: set[str] = set()
    for name, part in _parts(base, family):
        segments.append(_segment(name, _standalone(part, settings), model, names, owned))
        owned |= {p.name for p in segments[-1].parameters}
    segments[-1] = evolve(segments[-1], read_dict=collated_batch)
    return tuple(segments)


def check_transformers() -> None:
    """Raise ImportError unless a supported version of transformers is installed."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(MISSING) from error
    version = tuple(int(x) for x in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(MISSING.replace("no transformers", f"transformers {transformers.__version__}"))
    if version > NEWEST:
        log.info("hf: transformers %s is newer than the versions that are tested", transformers.__version__)


def _parts(model: Any, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the segments, which wrap the model's."""
    base = getattr(model, family.base)
    rotary = getattr(base, family.rotary) if family.rotary else None
    by_kind = isinstance(getattr(rotary, "rope_type", None), dict)
    positions, dropout = (getattr(base, x) if x else None for x in (family.positions, family.dropout))
    yield f"{family.base}.{family.tokens}", EmbedSegment(getattr(base, family.tokens), positions, dropout)
    for n, layer in enumerate(getattr(base, family.layers)):
        kind = model.config.layer_types[n] if by_kind else None
        yield f"{family.base}.{family.layers}.{n}", LayerSegment(layer, rotary, kind)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    yield "lm_head", HeadSegment(getattr(base, family.norm), model.lm_head, softcap)


def _segment(name: str, part: nn.Module, model: Any, names: dict[int, str], earlier: set[str]) -> Segment:
    """`part` as a segment, its parameters under the model's names; it shares those of `earlier` segments."""
    constants = _take_buffers(part)
    result = segment(name, part)
    full = {p.name: names[id(result.origins[p.name])] for p in result.parameters}
    owned = {full[p.name]: short for p, short in zip(result.parameters, result.short, strict=True)}
    owned = {x: short for x, short in owned.items() if x not in earlier}
    on_meta = any(t.is_meta for t in result.origins.values())

    def initial(seed: int) -> Values:
        if on_meta:
            values = _draw_values(name, part, constants, model, seed)
            return {x: values[short] for x, short in owned.items()}
        return {x: result.origins[f"{name}.{short}"].detach() for x, short in owned.items()}

    return evolve(
        result,
        parameters=tuple(evolve(p, name=full[p.name]) for p in result.parameters),
        shared=frozenset(full.values()) & earlier,
        origins={full[x]: t for x, t in result.origins.items()},
        initial=initial,
        constants=constants,
    )


def _standalone(part: nn.Module, settings: AttentionSettings) -> nn.Module:
    """A copy of the structure, with the same tensors, independent of its place in the model.

    Equal layers then compare equal, and share one trace.
    """
    memo: dict[int, Any] = {id(t): t for t in (*part.parameters(), *part.buffers())}
    for module in part.modules():
        for name, value in vars(module).items():
            if isinstance(value, functools.partial):
                memo[id(value)] = _function(value.func, value.args, tuple(value.keywords.items()))
            elif name == "config":  # any other would make the layer call an attention that needs a mask
                memo[id(value)] = settings if value is settings.config else AttentionSettings(value)
    copied = copy.deepcopy(part, memo).train()
    for module in copied.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0  # only for transformers' own cache
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
        if hasattr(module, "lora_A"):
            module.kwargs = {}  # its place, from when peft made it
    return copied


@functools.lru_cache(maxsize=64)
def _function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """A partial as a function: deepcopy keeps functions as they are, but copies partials."""
    return lambda *more: function(*args, *more, **dict(kwargs))


def _take_buffers(part: nn.Module) -> Values:
    """Remove the buffers, and return their values by name, on the CPU; those on meta are computed."""
    values: Values = {}
    for prefix, module in part.named_modules():
        for name, t in [*module._buffers.items()]:
            if t is not None:
                values[f"{prefix}.{name}"] = _compute_buffer(module, name) if t.is_meta else t.detach().cpu()
                module._buffers[name] = None
    return values


def _compute_buffer(module: Any, name: str) -> Tensor:
    """The value of a buffer on meta, from the module's config."""
    with torch.device("cpu"):
        if name == "embed_scale":
            return torch.tensor(module.scalar_embed_scale)
        if hasattr(module, "rope_type"):
            return dict(type(module)(config=module.config.config).named_buffers())[name]
    raise ValueError(
        f"model: got a {type(module).__name__} on the meta device whose buffer {name!r} cannot be computed, "
        "expected rotary positions or an embedding's scale: make the model on the CPU"
    )


def _draw_values(name: str, part: nn.Module, constants: Values, model: Any, seed: int) -> Values:
    """Initial values of one segment, as transformers draws them."""
    real = copy.deepcopy(part).to_empty(device="cpu").requires_grad_(False)
    for t in real.parameters():
        t.fill_(float("nan"))  # to find those that are not set
    for full, t in constants.items():
        owner, _, short = full.rpartition(".")
        real.get_submodule(owner)._buffers[short] = t.clone()
    with seeded_sequence(seed):
        for module in reversed([*real.modules()]):  # children first
            base_of(model)._init_weights(module)
        if is_adapted(model):
            reset_adapters(real, *model.peft_config.values())
    values = dict(real.named_parameters(remove_duplicate=False))
    if empty := [x for x, t in values.items() if t.isnan().any()]:
        raise ValueError(f"segment {name!r}: got no initial value for {empty}: load weights instead")
    return values
