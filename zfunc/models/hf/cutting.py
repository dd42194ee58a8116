"""`cut_model`: a causal language model of transformers, cut at its decoder layers.

The invariant: the model is left as it was, and none of it is copied. Segments share its parameters, as initial
values under the names the model has them by; the modules they run are copies without memory.
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
from zfunc.models.hf.attention import AttentionSettings, register
from zfunc.models.hf.families import Family, family_of
from zfunc.models.hf.parts import EmbedSegment, HeadSegment, LayerSegment
from zfunc.runtime.rng import seeded_sequence

log = logging.getLogger("zfunc")
OLDEST, NEWEST = (
    (5, 12),
    (5, 23),
)  # transformers this was tested with; 5.0 computes some of these models otherwise
MISSING = "zfunc.hf: got no transformers, expected version 5.12 or newer: pip install 'zfunc[hf]'"


def cut_model(model: nn.Module) -> tuple[Segment, ...]:
    """A causal language model as segments: embeddings, one for each decoder layer, and the head with the loss.

    GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, with their rotary positions, sliding windows, tied heads,
    embedding scales and soft caps. A batch is `(input_ids, labels)` with the labels already shifted, or what
    `zfunc.hf.batch` makes of them; padding goes at the end. Parameters keep their names in the model, so
    `zfunc.params` is its state dict; those with `requires_grad=False` stay frozen. Dropout is as configured, and
    off in `evaluate` and `apply`. What backward recomputes is said to `zfunc.compile`; the model's own gradient
    checkpointing does not count, nor does its choice of attention.

    The model may be on the meta device: nothing is allocated then, and `zfunc.init` draws weights as transformers
    would, one segment at a time (`load` reads them from a folder). Raises ValueError for a model that is none of
    these, with what to do; ImportError where transformers is missing.
    """
    check_transformers()
    family = family_of(model)
    register()
    given = getattr(model.config, "_attn_implementation", None)
    log.info("hf: attention is scaled_dot_product_attention of shapes alone, instead of %r", given)
    named = {id(p): name for name, p in model.named_parameters()}  # of a tied one, the first
    settings = AttentionSettings(model.config)
    segments: list[Segment] = []
    taken: set[str] = set()
    for name, part in _parts(model, family):
        segments.append(_segment(name, _alone(part, settings), model, named, taken))
        taken |= {p.name for p in segments[-1].parameters}
    return tuple(segments)


def check_transformers() -> None:
    """Raise ImportError, with what to do, where there is no transformers that will do."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(MISSING) from error
    version = tuple(int(x) for x in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(MISSING.replace("no transformers", f"transformers {transformers.__version__}"))
    if version > NEWEST:
        log.info("hf: transformers %s is newer than this was tested with", transformers.__version__)


def _parts(model: Any, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the segments, around the model's own."""
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


def _segment(name: str, part: nn.Module, model: Any, named: dict[int, str], taken: set[str]) -> Segment:
    """`part` as a segment, its parameters under the model's names; those in `taken` are shared."""
    constants = _take_buffers(part)
    result = segment(name, part)
    full = {p.name: named[id(result.origins[p.name])] for p in result.parameters}
    owned = {full[p.name]: short for p, short in zip(result.parameters, result.short, strict=True)}
    owned = {x: short for x, short in owned.items() if x not in taken}
    on_meta = any(t.is_meta for t in result.origins.values())

    def initial(seed: int) -> Values:
        if on_meta:
            values = _drawn(name, part, constants, model, seed)
            return {x: values[short] for x, short in owned.items()}
        return {x: result.origins[f"{name}.{short}"].detach() for x, short in owned.items()}

    return evolve(
        result,
        parameters=tuple(evolve(p, name=full[p.name]) for p in result.parameters),
        shared=frozenset(full.values()) & taken,
        origins={full[x]: t for x, t in result.origins.items()},
        initial=initial,
        constants=constants,
    )


def _alone(part: nn.Module, settings: AttentionSettings) -> nn.Module:
    """A copy of the structure, with the same tensors, of which nothing depends on where in the model it was.

    So equal layers are found to be alike, and share one trace.
    """
    memo: dict[int, Any] = {id(t): t for t in (*part.parameters(), *part.buffers())}
    for module in part.modules():
        for name, value in vars(module).items():
            if isinstance(value, functools.partial):
                memo[id(value)] = _function(value.func, value.args, tuple(value.keywords.items()))
            elif name == "config":  # every one, or the layer would call an attention that wants a mask
                memo[id(value)] = settings if value is settings.config else AttentionSettings(value)
    alone = copy.deepcopy(part, memo).train()
    for module in alone.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0  # of a cache alone, which there is none of
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    return alone


@functools.lru_cache(maxsize=64)
def _function(
    function: Callable[..., Any], args: tuple[Any, ...], given: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """A partial as a function: copies of a function are it, of a partial not."""
    return lambda *more: function(*args, *more, **dict(given))


def _take_buffers(part: nn.Module) -> Values:
    """The buffers' values by name, on the CPU, computed where they are on meta; the modules are left without."""
    values: Values = {}
    for prefix, module in part.named_modules():
        for name, t in [*module._buffers.items()]:
            if t is not None:
                values[f"{prefix}.{name}"] = _computed(module, name) if t.is_meta else t.detach().cpu()
                module._buffers[name] = None
    return values


def _computed(module: Any, name: str) -> Tensor:
    """The value of a buffer on meta, as the module's config says."""
    with torch.device("cpu"):
        if name == "embed_scale":
            return torch.tensor(module.scalar_embed_scale)
        if hasattr(module, "rope_type"):
            return dict(type(module)(config=module.config.config).named_buffers())[name]
    raise ValueError(
        f"model: got a {type(module).__name__} on the meta device whose buffer {name!r} cannot be computed, "
        "expected rotary positions or an embedding's scale: make the model on the CPU"
    )


def _drawn(name: str, part: nn.Module, constants: Values, model: Any, seed: int) -> Values:
    """Initial values of one segment, as transformers draws them."""
    real = copy.deepcopy(part).to_empty(device="cpu").requires_grad_(False)
    for t in real.parameters():
        t.fill_(float("nan"))  # so that what is left out is seen
    for full, t in constants.items():
        owner, _, short = full.rpartition(".")
        real.get_submodule(owner)._buffers[short] = t.clone()
    with seeded_sequence(seed):
        for module in reversed([*real.modules()]):  # children first
            model._init_weights(module)
    values = dict(real.named_parameters(remove_duplicate=False))
    if empty := [x for x, t in values.items() if t.isnan().any()]:
        raise ValueError(
            f"segment {name!r}: got no initial value for {empty}, expected one: load weights instead"
        )
    return values
