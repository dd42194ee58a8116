"""What torchtitan's models have otherwise than those of transformers: names, and rows of queries and keys.

As its own files models/*/state_dict_adapter.py have it. Moments of Adam have the rows of their weights.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from attrs import evolve, frozen
from torch import Tensor

from zfunc.checkpoint.durable_files import reject
from zfunc.checkpoint.foreign_run import ForeignRun, ForeignTensor
from zfunc.errors import refuse

EMBEDDING = "tok_embeddings.weight"  # of torchtitan's models, and of no model of transformers
_FUSED = re.compile(r"(.*\.)wqkv\.(weight|bias)")  # a parameter that torchtitan saves as three
_LAYER = re.compile(r"layers\.\d+\.")
log = logging.getLogger("zfunc")


@frozen
class Family:
    """A family of torchtitan's models: transformers' name of each module with a weight, by torchtitan's, both
    without `layers.N.`; and, by transformers' names, modules whose rows rotary positions turn in pairs of
    neighbours, where transformers turns rows of the first half of a head with those of the second."""

    names: Mapping[str, str]
    paired: tuple[str, ...] = ()


_LLAMA = {
    **{"tok_embeddings": "embed_tokens", "norm": "norm", "output": "lm_head", "lm_head": "lm_head"},
    **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"attention.qkv_linear.w{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"feed_forward.w{n}": f"mlp.{x}_proj" for n, x in ((1, "gate"), (2, "down"), (3, "up"))},
    **{"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}
FAMILIES = {  # a run is of the first that has all its names
    "llama3": Family(_LLAMA, ("self_attn.q_proj", "self_attn.k_proj")),
    "qwen3": Family({**_LLAMA, **{f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}}),
}


def head_dim_of(segments: Iterable[Any], given: int | None) -> int | None:
    """The size of an attention head: `given`, else the `head_dim` of the modules of `segments`. Raises ValueError
    for a `given` that no module has: it may divide all rows, and take them apart at wrong places."""
    modules = (m for s in segments if s.module is not None for m in s.module.modules())
    known = {x for m in modules if isinstance(x := getattr(m, "head_dim", None), int)}
    if known and given not in (None, *known):
        refuse(
            "head_dim",
            f"{given}",
            f"{' or '.join(map(str, sorted(known)))}, as the model has it",
            "leave it out",
        )
    return known.pop() if given is None and len(known) == 1 else given


def as_transformers(run: ForeignRun, head_dim: int | None) -> ForeignRun:
    """`run`, of torchtitan, with the names of transformers and the rows that its models have. Raises
    CheckpointError for a model of none of `FAMILIES`, and where rows are paired in heads of no `head_dim`."""
    modules = {x: _LAYER.sub("", x).removesuffix(".weight") for x in run.weights}
    kind = next((x for x, family in FAMILIES.items() if {*modules.values()} <= family.names.keys()), None)
    if kind is None:
        known = {x for family in FAMILIES.values() for x in family.names}
        got = f"{next(x for x, module in modules.items() if module not in known)!r} beside {EMBEDDING!r}"
        do = "pass segments of its model, by zfunc.segments, or let it convert its weights and begin new moments"
        reject(run.place, got, f"a {' or '.join(FAMILIES)} of torchtitan", do)
    log.info("import: torchtitan's names of a %s, and its rows of queries and keys, are mapped", kind)
    family = FAMILIES[kind]
    weights: dict[str, ForeignTensor] = {}
    moments: dict[str, Mapping[str, ForeignTensor]] = {}
    for theirs, weight in run.weights.items():
        layer, own = _LAYER.match(theirs), family.names[modules[theirs]]
        name = f"{'' if own == 'lm_head' else 'model.'}{layer[0] if layer else ''}{own}.weight"
        state = {"": weight, **run.moments.get(theirs, {})}
        if own in family.paired:
            if head_dim is None or head_dim % 2 or weight.shape[0] % head_dim:
                _reject_head_dim(run.place, head_dim, f"{theirs!r}, whose rows are paired", weight.shape[0])
            state = {k: evolve(t, read=partial(_halves_of_pairs, head_dim, t)) for k, t in state.items()}
        weights[name], moments[name] = state.pop(""), state
    return evolve(run, weights=weights, moments=moments)


def _halves_of_pairs(head_dim: int, pairs: ForeignTensor) -> Tensor:
    # [heads, pair, 2, ...] -> [heads, 2, pair, ...]
    return pairs.read().view(-1, head_dim // 2, 2, *pairs.shape[1:]).transpose(1, 2).reshape(pairs.shape)


def without_fused(
    folder: Path,
    moments: Mapping[str, Mapping[str, ForeignTensor]],
    weights: Mapping[str, ForeignTensor],
    head_dim: int | None,
) -> dict[str, dict[str, ForeignTensor]]:
    """`moments` under the names in `weights`. torchtitan's moments of `wqkv`, one tensor whose rows alternate
    by head, are split into those of `wq`, `wk` and `wv`, as it saves the weights."""
    found: dict[str, dict[str, ForeignTensor]] = {}
    for name, own in moments.items():
        m = _FUSED.fullmatch(name)
        parts = [f"{m[1]}w{x}.{m[2]}" for x in "qkv"] if m and name not in weights else []
        if not parts or not {*parts} <= weights.keys():
            found[name] = {**own}
            continue
        queries, keys, _ = (weights[x].shape[0] for x in parts)
        if head_dim is None or keys % head_dim or queries % keys:
            _reject_head_dim(folder, head_dim, f"{name!r}, in which heads take turns", keys)
        for n, part in enumerate(parts):
            read = partial(_part_of_fused, n, queries // keys, head_dim)
            found[part] = {
                k: evolve(t, shape=weights[part].shape, read=partial(read, t)) for k, t in own.items()
            }
    return found


def _part_of_fused(n: int, heads: int, head_dim: int, fused: ForeignTensor) -> Tensor:
    # Of each group heads of queries, then one of keys and one of values.
    groups = fused.read().view(-1, heads + 2, head_dim, *fused.shape[1:])
    part = (groups[:, :heads], groups[:, heads], groups[:, heads + 1])[n]
    return part.reshape(-1, *fused.shape[1:])


def _reject_head_dim(place: Path, head_dim: int | None, what: str, rows: int) -> NoReturn:
    got = f"{'no' if head_dim is None else head_dim} `head_dim` for {what}"
    expected = f"the size of an attention head, which divides {rows} rows"
    reject(place, got, expected, "pass `head_dim`: the model's dim divided by its n_heads, mostly")
