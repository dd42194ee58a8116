"""`cut_model`: a model of transformers as segments, cut at its layers.

The model is not changed, and its parameters are not copied: segments use them as initial values, under the model's
names, and run copies of the modules that take no memory.
"""

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from zfunc.engine.trace.facts import held
from zfunc.engine.trace.fake_tensors import FakeMode
from zfunc.engine.trace.segment import IDLE, Segment, segment
from zfunc.engine.trace.tensor_memory import Values
from zfunc.models.hf.adapters import base_name, base_of, is_adapted, make_pure, reset_adapters
from zfunc.models.hf.attention import AttentionSettings, implementation_for, register
from zfunc.models.hf.comparison import compare
from zfunc.models.hf.families import check_supported, check_transformers, in_fp32, is_tested
from zfunc.models.hf.parts import EmbedPart, HeadPart, LayerPart, LayerPlace, stop_before
from zfunc.models.hf.recording import record
from zfunc.models.hf.rotary import follows_length, replace_forward
from zfunc.models.loss import collated_batch
from zfunc.runtime.rng import seeded_sequence

RECORDED = 9  # tokens in a row on which a model is recorded
log = logging.getLogger("zfunc")


def cut_model(model: nn.Module) -> tuple[Segment, ...]:
    """A causal language model of transformers as segments: embeddings, each of its layers, and the rest with
    the model's loss. `zfunc.segments` cuts any other model.

    A batch is `(input_ids, labels)` with shifted labels, or what `zfunc.hf.batch` makes of them, or the dict of
    a collator of transformers; pad at the end. The routers' loss is added where the config has
    `output_router_logits`.

    Models other than those of `zfunc.models.hf.families.FAMILIES` are compared with their segments first, by
    loss and gradients on a tiny batch. Parameters keep their names. Frozen parameters
    (`requires_grad=False`), and those that do not affect the loss, are not trained. Dropout is as configured,
    and off in `evaluate` and `apply`. The model's own gradient checkpointing and attention implementation are
    ignored.

    The model may be a `peft.PeftModel` with LoRA: only the adapters are trained. A model on the meta device
    takes no memory; `zfunc.init` draws its weights as transformers would, one segment at a time. Raises
    ValueError for a model that cannot be cut, or that computes something else in segments; ImportError
    without transformers.
    """
    check_transformers()
    base: Any = base_of(model)
    check_supported(base)
    packs = is_tested(base) or compare(cut_layers, base, _example_ids(base))
    log.info("hf: attention is scaled_dot_product_attention of shapes alone, instead of the model's")
    segments = cut_layers(model, packs=packs)
    named = {
        p.name: p.trainable or not s.origins[p.name].requires_grad for s in segments for p in s.parameters
    }
    if idle := [x for x, expected in named.items() if not expected]:
        log.warning("%s: %s", ", ".join(idle), IDLE)
    return segments


def _example_ids(model: Any) -> Tensor:
    """Token ids, two short rows, on which a model is run once to find its layers."""
    vocabulary = min(model.config.get_text_config().vocab_size, 1000)
    return torch.randint(3, vocabulary, (2, RECORDED), generator=torch.Generator().manual_seed(0))


def cut_layers(model: Any, *, packs: bool) -> tuple[Segment, ...]:
    """Cut a model into segments: embeddings, each layer, and the rest with the loss. To find its layers, the
    model runs once on two short rows. `packs` is whether a row may have several documents.

    Raises ValueError for a model in which no layers are found.
    """
    register()
    cutter = _Cutter(base_of(model), packs=packs)
    names = {id(p): name for name, p in model.named_parameters()}  # the first of a tied one
    segments: list[Segment] = []
    owned = set[str]()
    for name, cut, own in cutter.cuts():
        segments.append(_named(name, cut, own, model, names, frozenset(owned), cutter))
        owned |= {p.name for p in segments[-1].parameters}
    given = {"typed": "token_type_ids" in inspect.signature(cutter.model.forward).parameters}
    given["counts"] = any(cutter.routers)
    segments[-1] = evolve(segments[-1], read_dict=partial(collated_batch, **given))
    return tuple(segments)


# --- the parts of a model -----------------------------------------------------------------------------------


class _Cut:
    """One part of a model as a module, its buffers and a Segment with the part's own tensor names; equal
    layers share a cut, and each renames the tensors."""

    def __init__(self, name: str, part: nn.Module, buffers: Mapping[int, Tensor]) -> None:
        self.part, self.constants = part, _take_buffers(part, buffers)
        self.segment = segment(name, part)


class _Cutter:
    """Makes the parts of a transformers model, its embeddings, layers and head, that become segments."""

    def __init__(self, model: Any, *, packs: bool) -> None:
        self.model, self.implementation = model, implementation_for(model)
        self.buffers = _compute_buffers(model)
        self.configs: dict[int, AttentionSettings] = {}
        with FakeMode():
            fakes: dict[int, Any] = {}
            for t in (*model.parameters(), *model.buffers()):
                fake = torch.empty(t.shape, dtype=t.dtype, device="cpu")
                fakes[id(t)] = nn.Parameter(fake) if isinstance(t, nn.Parameter) else fake
            self.recording = record(model, self.copied(model, fakes).eval(), _example_ids(model), packs=packs)
        self.layers: Any = model.get_submodule(self.recording.layers)
        used = self.recording.embed | self.recording.head | {id(p) for p in self.layers.parameters()}
        self.unused = frozenset(id(p) for p in model.parameters()) - used  # nothing depends on them
        self.routers, self.router_index = self._routers()

    def copied(self, module: nn.Module, replaced: Mapping[int, Any]) -> Any:
        """A copy of `module` with the same tensors. Objects whose id is in `replaced` are replaced, and each
        config becomes one AttentionSettings, so that equal modules compare equal."""
        memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        for part in module.modules():
            config: Any = vars(part).get("config")
            if config is not None:
                own = AttentionSettings(config, self.implementation)
                memo[id(config)] = self.configs.setdefault(id(config), own)
        module = copy.deepcopy(module, {**memo, **replaced})
        for m in module.modules():
            if hasattr(m, "gradient_checkpointing"):
                m.gradient_checkpointing = False
            if hasattr(m, "warn_if_padding_and_no_attention_mask"):
                m.warn_if_padding_and_no_attention_mask = _ignore  # it reads the values of tokens
            if follows_length(m):
                replace_forward(m)
            if hasattr(m, "lora_A"):
                make_pure(m)
        return module.train()

    def _routers(self) -> tuple[list[str | None], int]:
        """The name of each layer's router, None without one; and the logits' index in a router's output.

        All names are None if the model has no loss of routers, or has it turned off.
        """
        config, kind, index = self.model.config, (), 0
        if getattr(config, "output_router_logits", False) and hasattr(self.model, "router_aux_loss_coef"):
            specs = [getattr(m, "_can_record_outputs", None) or {} for m in self.model.modules()]
            spec = next((x["router_logits"] for x in specs if "router_logits" in x), ())
            kind, index = getattr(spec, "target_class", spec), getattr(spec, "index", 0)
        found = ((x for x, m in layer.named_modules() if isinstance(m, kind)) for layer in self.layers)
        return [next(names, None) for names in found], index

    def cuts(self) -> Iterator[tuple[str, _Cut, nn.Module]]:
        """Yield for each segment its name, its `_Cut`, and a module with the segment's tensors under the
        cut's names; equal layers have the same cut."""
        model, inside = self.model, {id(m) for m in self.layers.modules()}
        cut = _Cut(self._name(model.get_input_embeddings(), "embed"), self._embed(), self.buffers)
        yield cut.segment.name, cut, cut.part
        around = {id(p) for m in model.modules() if id(m) not in inside for p in m._parameters.values()}
        known: list[tuple[Any, _Cut]] = []
        for n, own in enumerate(self.layers):
            name, layer = f"{self.recording.layers}.{n}", self.copied(own, {})
            for m in layer.modules():
                if hasattr(m, "layer_idx"):
                    m.layer_idx = self.recording.places[n]
            behaviour = held(layer, tensors=False)
            signature = self.recording.places[n], self.routers[n], _signature(layer, around), behaviour
            cut = next((x for s, x in known if s == signature), None)
            if cut is None:
                cut = _Cut(name, self._layer(n, layer), self.buffers)
                known.append((signature, cut))
            yield name, cut, nn.ModuleDict({"layer": layer})
        cut = _Cut(self._name(model.get_output_embeddings(), "head"), self._head(), self.buffers)
        yield cut.segment.name, cut, cut.part

    def _name(self, module: nn.Module | None, otherwise: str) -> str:
        return next((x for x, m in self.model.named_modules() if m is module), otherwise)

    def _embed(self) -> nn.Module:
        """The module of the first segment: everything in the model before its first layer."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        before = [m for x, m in self.model.named_modules() if x in self.recording.before]
        tables = [
            m for m in before if isinstance(m, nn.Embedding) and m is not self.model.get_input_embeddings()
        ]
        learned = most is not None and any(m.num_embeddings >= most for m in tables)
        return self._part(
            *(EmbedPart, 0, self.recording.embed),
            longest=most if learned else None,
            experts=self.model.num_experts if any(self.routers) else 0,
        )

    def _layer(self, n: int, layer: nn.Module) -> nn.Module:
        """The module of the segment of layer number `n`, inside a copy of the model."""
        place, kept = self.recording.places[n], {id(p) for p in layer.parameters()}
        router, top_k = self.routers[n], getattr(self.model, "num_experts_per_tok", 0)
        given = {"router": router, "index": self.router_index, "top_k": top_k}
        return self._part(LayerPart, place, kept, layer=layer, **given)

    def _head(self) -> nn.Module:
        """The module of the last segment: everything in the model after its last layer."""
        part = self._part(
            *(HeadPart, len(self.layers) - 1, self.recording.head | self.unused),
            linear=self.recording.linear,
            softcap=getattr(self.model.config.get_text_config(), "final_logit_softcapping", None),
            routers=sum(x is not None for x in self.routers),
            balance=getattr(self.model, "router_aux_loss_coef", 0.0),
        )
        if part.linear is not None:
            stop_before(part.model.get_submodule(part.linear))
        return part

    def _part(
        self, kind: Any, place: int, kept: Set[int], *, layer: nn.Module | None = None, **given: Any
    ) -> Any:
        """A copy of the model as `kind(..., **given)`, in which stand-ins replace the layers; stand-in number
        `place` runs `layer`, if given. Only parameters with ids in `kept` stay, and only an EmbedPart has
        dropout."""
        values = self.recording.values
        places = [LayerPlace(x, values) for x in self.layers]
        places[place] = LayerPlace(self.layers[place], values, stops=kind is not HeadPart, layer=layer)
        copied = self.copied(self.model, {id(self.layers): nn.ModuleList(places)})
        inside = {id(m) for x in places for m in x.modules()}
        absent: dict[str, tuple[int, ...]] = {}
        for path, module in copied.named_modules():
            if kind is not EmbedPart and path in self.recording.before:
                module.eval()
            for name, p in module._parameters.items():
                if p is not None and id(module) not in inside and id(p) not in kept:
                    absent[f"{path}.{name}" if path else name] = tuple(p.shape)
                    module._parameters[name] = None
        return kind(copied, places[place], self.recording.call, absent, **given)


def _ignore(*_: Any, **__: Any) -> None: ...


def _signature(layer: nn.Module, around: Set[int]) -> list[Any]:
    """A key that is equal for two layers that can share a segment: shape, dtype and the like of each tensor,
    which tensors are tied in the layer, and which are also outside, with ids in `around`."""
    found: list[Any] = []
    firsts: dict[int, str] = {}
    for path, module in layer.named_modules():
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            facts = None if t is None else (t.shape, t.dtype, t.requires_grad, t.is_meta)
            tied = firsts.setdefault(id(t), f"{path}.{name}"), id(t) if id(t) in around else 0
            found.append((path, name, facts, tied))
    return found


# --- their names and values ---------------------------------------------------------------------------------


def _named(
    name: str,
    cut: _Cut,
    own: nn.Module,
    model: Any,
    names: dict[int, str],
    earlier: Set[str],
    cutter: _Cutter,
) -> Segment:
    """The segment `name` of `cut` with the tensors of module `own`. Parameters get the model's `names` (by id
    of tensor); those with a name in `earlier`, of segments before, are shared with these."""
    tensors = {short: own.get_parameter(short) for short in cut.segment.short}
    constants = {**cut.constants, **_take_buffers(own, cutter.buffers)}
    full = {short: names[id(t)] for short, t in tensors.items()}
    on_meta = any(t.is_meta for t in tensors.values())

    def initial(seed: int) -> Values:
        values = _draw_values(name, cut.part, constants, model, seed) if on_meta else tensors
        return {x: values[short].detach() for short, x in full.items() if x not in earlier}

    return evolve(
        cut.segment,
        name=name,
        parameters=tuple(
            evolve(
                p,
                name=full[short],
                trainable=t.requires_grad and id(t) not in cutter.unused,
                fp32_in=in_fp32(cutter.model, base_name(full[short])),
            )
            for p, (short, t) in zip(cut.segment.parameters, tensors.items(), strict=True)
        ),
        shared=earlier & {*full.values()},
        origins={full[short]: t for short, t in tensors.items()},
        initial=initial,
        constants=constants,
        source=None,  # nobody else has the part
    )


def _take_buffers(part: nn.Module, real: Mapping[int, Tensor]) -> Values:
    """Remove the buffers of `part`; returns their values on the CPU by name, meta ones from `real` by id."""
    values: Values = {}
    for path, module in part.named_modules():
        own = {name: t for name, t in module._buffers.items() if t is not None}
        values |= {f"{path}.{name}": real.get(id(t), t).detach().cpu() for name, t in own.items()}
        module._buffers.update(dict.fromkeys(own))
    return values


def _compute_buffers(model: Any) -> dict[int, Tensor]:
    """The values of a model's buffers on meta, by id, as transformers sets them. Parameters stay on meta."""
    real: dict[int, Tensor] = {}
    for t in model.buffers():
        if t.is_meta and t.dtype != torch.bool:
            real[id(t)] = torch.full(t.shape, _unset_value(t), dtype=t.dtype, device="cpu")
    if real:
        without = {id(p): p.to("meta") for p in model.parameters()}  # and of what is real, a copy
        copied = copy.deepcopy(model, {**without, **real})
        with torch.no_grad(), seeded_sequence(0):
            copied.initialize_weights()
    for name, t in model.named_buffers():
        got = real.get(id(t))
        if t.is_meta and (got is None or (got.isnan() | (got == _unset_value(t))).any()):
            raise ValueError(
                f"model: got one on the meta device whose buffer {name!r} cannot be computed, expected one that "
                f"a {type(model).__name__} sets with its initial weights: make the model on the CPU"
            )
    return real


def _unset_value(t: Tensor) -> float | int:
    """The value that marks a buffer like `t` as not yet set: NaN, or the least integer of its dtype."""
    return torch.nan if t.is_floating_point() else torch.iinfo(t.dtype).min


def _draw_values(name: str, part: nn.Module, constants: Values, model: Any, seed: int) -> Values:
    """Initial values of the parameters of one segment, by short name, as transformers draws them."""
    real = copy.deepcopy(part).to_empty(device="cpu").requires_grad_(False)
    for t in real.parameters():
        t.fill_(torch.nan)  # to find those that are not set
    for full, t in constants.items():
        owner, _, short = full.rpartition(".")
        real.get_submodule(owner)._buffers[short] = t.clone()
    with seeded_sequence(seed):
        for module in reversed([*real.modules()]):  # children first
            own = module._parameters.values()
            around = not own and any(isinstance(m, LayerPlace) for m in module.modules())
            # Else they are other segments', as are the layers around which a module is.
            if not around and (not own or any(p is not None for p in own)):
                base_of(model)._init_weights(module)
        if is_adapted(model):
            reset_adapters(real, *model.peft_config.values())
    values = dict(real.named_parameters(remove_duplicate=False))
    if empty := [x for x, t in values.items() if t.isnan().any()]:
        raise ValueError(f"segment {name!r}: got no initial value for {empty}: load weights instead")
    return values
