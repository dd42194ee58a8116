"""`cut_layers`: a model of transformers as segments, cut at its layers.

The model is not changed, and its parameters are not copied: segments use them as initial values, under the model's
names, and run copies of the modules that take no memory.
"""

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zfunc.engine.segment import Segment, Values, segment
from zfunc.models.hf.adapters import base_of, is_adapted, reset_adapters
from zfunc.models.hf.attention import AttentionSettings, implementation_for, register
from zfunc.models.hf.parts import EmbedPart, Entry, HeadPart, LayerPart, Skipped, Stop, record_router
from zfunc.models.hf.recording import Recording, record
from zfunc.models.loss import collated_batch
from zfunc.runtime.rng import seeded_sequence

log = logging.getLogger("zfunc")
Loss = Callable[[Any, Any], Tensor]
_Memo = dict[int, Any]


def cut_layers(
    model: Any,
    inputs: Mapping[str, Tensor],
    loss: Loss | None,
    *,
    carries_input: bool = False,
    packs_documents: bool = True,
) -> tuple[Segment, ...]:
    """Embeddings, one segment for each layer, and what follows them with the loss; inputs are such as `inputs`.

    With `carries_input` segments hand on the main input, for models whose layers depend on its values; without
    `packs_documents` they refuse several documents in a sequence. Raises ValueError for a model in which no layers
    are found.
    """
    register()
    base = base_of(model)
    configs = _Configs(implementation_for(base))
    with FakeTensorMode():
        recording = record(base, _shadow(base, configs), inputs)
    recording = evolve(recording, call=evolve(recording.call, carries=carries_input, packs=packs_documents))
    cutter = _Cutter(base, recording, configs, _names(base), base.get_submodule(recording.layers))
    names = _names(model)
    unused = {names[id(p)] for name, p in base.named_parameters() if name in cutter.unused}
    parts = [cutter.embed(), *(cutter.layer(n) for n in range(len(cutter.layers))), cutter.head(loss)]
    segments: list[Segment] = []
    owned: set[str] = set()
    for name, part in parts:
        segments.append(_segment(name, part, model, names, owned, unused))
        owned |= {p.name for p in segments[-1].parameters}
    if loss is None:
        segments[-1] = evolve(segments[-1], read_dict=collated_batch)
    return tuple(segments)


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, the first of a tied one."""
    return {id(p): name for name, p in model.named_parameters()}


@define(eq=False)
class _Configs:
    """The configs of a model with zfunc's attention, each made once, so that equal modules compare equal."""

    implementation: str
    made: dict[int, AttentionSettings] = field(factory=dict[int, AttentionSettings])

    def memo(self, module: nn.Module) -> _Memo:
        """For deepcopy: the same tensors, these configs, and functions instead of partials."""
        memo: _Memo = {id(t): t for t in (*module.parameters(), *module.buffers())}
        for part in module.modules():
            for name, value in vars(part).items():
                if isinstance(value, functools.partial):
                    memo[id(value)] = _function(value.func, value.args, tuple(value.keywords.items()))
                elif name == "config" and value is not None:
                    memo[id(value)] = self.made.setdefault(
                        id(value), AttentionSettings(value, self.implementation)
                    )
                elif name in ("generation_config", "peft_config"):  # nothing in forward reads them
                    memo[id(value)] = False
        return memo


@functools.lru_cache(maxsize=64)
def _function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """A partial as a function: deepcopy keeps functions as they are, but copies partials."""
    return lambda *more: function(*args, *more, **dict(kwargs))


def _shadow(model: nn.Module, configs: _Configs) -> nn.Module:
    """A copy of fake tensors, in a FakeTensorMode."""
    memo = configs.memo(model)
    for t in (*model.parameters(), *model.buffers()):
        fake = torch.empty(t.shape, dtype=t.dtype, device="cpu")
        memo[id(t)] = nn.Parameter(fake, t.is_floating_point()) if isinstance(t, nn.Parameter) else fake
    return _ready(copy.deepcopy(model, memo)).eval()


def _ready(module: nn.Module) -> nn.Module:
    for m in module.modules():
        if hasattr(m, "gradient_checkpointing"):
            m.gradient_checkpointing = False
        if hasattr(m, "warn_if_padding_and_no_attention_mask"):
            m.warn_if_padding_and_no_attention_mask = _ignore  # it reads the values of tokens
        if hasattr(m, "lora_A"):
            m.kwargs = {}  # its place, from when peft made it
    return module.train()


def _ignore(*_: Any, **__: Any) -> None: ...


@define(eq=False)
class _Cutter:
    """Makes the modules of the segments, each with its name."""

    model: Any
    recording: Recording
    configs: _Configs
    names: dict[int, str]
    layers: Any
    router_class: Any = None

    @property
    def unused(self) -> frozenset[str]:
        """Parameters that nothing depends on."""
        used = (
            {self.names[id(p)] for p in self.layers.parameters()} | self.recording.embed | self.recording.head
        )
        return frozenset(self.names.values()) - used

    @property
    def routers(self) -> list[tuple[str, int]]:
        """Of each layer, where its router is, and the index of the logits in what that returns; ("", 0) for none.

        Nothing, if the model has no loss of its routers, or it is turned off.
        """
        if not getattr(self.model.config, "output_router_logits", False):
            return []
        if not hasattr(self.model, "router_aux_loss_coef"):
            return []
        specs = [
            (getattr(m, "_can_record_outputs", None) or {}).get("router_logits") for m in self.model.modules()
        ]
        spec = next((x for x in specs if x is not None), None)
        kind, index = getattr(spec, "target_class", spec), getattr(spec, "index", 0)
        return [
            next(((x, index) for x, m in layer.named_modules() if isinstance(m, kind)), ("", 0))
            for layer in self.layers
        ]

    def embed(self) -> tuple[str, nn.Module]:
        """Everything before the first layer."""
        tokens = self.model.get_input_embeddings()
        name = next((x for x, m in self.model.named_modules() if m is tokens), "embed")
        most = getattr(self.model.config, "max_position_embeddings", None)
        learned = most is not None and any(
            isinstance(m, nn.Embedding) and m is not tokens and m.num_embeddings >= most
            for x, m in self.model.named_modules()
            if x in self.recording.before
        )
        experts = self.model.num_experts if any(x for x, _ in self.routers) else 0
        copied, absent = self._copied(self.recording.embed, {0: Stop()})
        call = self.recording.call
        return name, EmbedPart(copied, call, absent, longest=most if learned else None, experts=experts)

    def layer(self, n: int) -> tuple[str, nn.Module]:
        """Layer `n`, in the place of the first one that is given the same."""
        place, own = self.recording.places[n], self.layers[n]
        entry = Entry(copy.deepcopy(own, self.configs.memo(own)))
        for module in entry.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
        router = None
        if self.routers and self.routers[n][0]:
            path, index = self.routers[n]
            router = entry.layer.get_submodule(path)
            vars(router)["recorded_index"] = index
            router._forward_hooks[0] = (
                record_router  # not by register_forward_hook: its numbers are never equal
            )
        copied, absent = self._copied({self.names[id(p)] for p in own.parameters()}, {place: entry}, dry=True)
        top_k = getattr(self.model, "num_experts_per_tok", 0)
        part = LayerPart(copied, self.recording.call, absent, entry=entry, router=router, top_k=top_k)
        return f"{self.recording.layers}.{n}", part

    def head(self, loss: Loss | None) -> tuple[str, nn.Module]:
        """Everything after the last layer."""
        last = len(self.layers) - 1
        entry = Entry(Skipped(self.layers[last], self.recording.as_tuple))
        path = self.recording.linear if loss is None else None
        linear = None if path is None else self.model.get_submodule(path)
        stop = None if linear is None else Stop(copy.deepcopy(linear, self.configs.memo(linear)))
        memo: _Memo = {} if linear is None else {id(linear): stop}
        copied, absent = self._copied(self.recording.head | self.unused, {last: entry}, memo, dry=True)
        part = HeadPart(
            copied,
            self.recording.call,
            absent,
            entry=entry,
            linear=None if stop is None else stop.linear,
            softcap=self.model.config.final_logit_softcapping if self.recording.capped else None,
            loss=loss,
            routers=sum(bool(x) for x, _ in self.routers),
            balance=getattr(self.model, "router_aux_loss_coef", 0.0),
        )
        output = self.model.get_output_embeddings()
        return next(
            (x for x, m in self.model.named_modules() if output is not None and m is output), "head"
        ), part

    def _copied(
        self, kept: Any, places: Mapping[int, nn.Module], memo: _Memo | None = None, *, dry: bool = False
    ) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
        """A copy of the model with other layers, and only the parameters `kept`; the shapes of the others.

        It does not depend on its place in the model, so that equal layers compare equal, and share one trace. A
        `dry` one has no dropout before the layers, which is another segment's.
        """
        skipped = [Skipped(x, self.recording.as_tuple) for x in self.layers]
        layers = nn.ModuleList([places.get(n, x) for n, x in enumerate(skipped)])
        copied = copy.deepcopy(self.model, {**self._outer_memo(), id(self.layers): layers, **(memo or {})})
        _ready(copied)
        absent: dict[str, tuple[int, ...]] = {}
        inside = {id(m) for m in layers.modules()}
        for path, module in copied.named_modules():
            if dry and path in self.recording.before:
                module.eval()
            for name, p in module._parameters.items():
                if p is not None and id(module) not in inside and self.names[id(p)] not in kept:
                    absent[f"{path}.{name}" if path else name] = tuple(p.shape)
                    module._parameters[name] = None
        return copied, absent

    def _outer_memo(self) -> _Memo:
        return self.configs.memo(self.model)


def _segment(
    name: str, part: nn.Module, model: Any, names: dict[int, str], earlier: set[str], unused: set[str]
) -> Segment:
    """`part` as a segment, its parameters under the model's names; it shares those of `earlier` segments."""
    constants = _take_buffers(part, model)
    result = segment(name, part)
    full = {p.name: names.get(id(result.origins[p.name]), p.name) for p in result.parameters}
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
        parameters=tuple(
            evolve(p, name=full[p.name], trainable=p.trainable and full[p.name] not in unused)
            for p in result.parameters
        ),
        shared=frozenset(full.values()) & earlier,
        origins={full[x]: t for x, t in result.origins.items()},
        initial=initial,
        constants=constants,
    )


def _take_buffers(part: nn.Module, model: Any) -> Values:
    """Remove the buffers, and return their values by name, on the CPU; those on meta are computed."""
    values: Values = {}
    for prefix, module in part.named_modules():
        for name, t in [*module._buffers.items()]:
            if t is not None:
                value = _compute_buffer(module, name, model) if t.is_meta else t.detach().cpu()
                values[f"{prefix}.{name}"] = value
                module._buffers[name] = None
    return values


def _compute_buffer(module: Any, name: str, model: Any) -> Tensor:
    """The value of a buffer on meta, from the module's config."""
    with torch.device("cpu"):
        if name == "embed_scale":
            return torch.tensor(module.scalar_embed_scale)
        if hasattr(module, "rope_type"):
            return dict(type(module)(config=module.config.config).named_buffers())[name]
        if name in module.state_dict():  # not computed, but saved
            real = copy.deepcopy(module).to_empty(device="cpu")
            real._buffers[name].fill_(float("nan"))
            base_of(model)._init_weights(real)
            if not real._buffers[name].isnan().any():
                return real._buffers[name]
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
            own = module._parameters.values()
            if not own or any(p is not None for p in own):  # else they are other segments'
                base_of(model)._init_weights(module)
        if is_adapted(model):
            reset_adapters(real, *model.peft_config.values())
    values = dict(real.named_parameters(remove_duplicate=False))
    if empty := [x for x, t in values.items() if t.isnan().any()]:
        raise ValueError(f"segment {name!r}: got no initial value for {empty}: load weights instead")
    return values
