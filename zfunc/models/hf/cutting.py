"""`cut_model`: a model of transformers as segments, cut at its layers.

The model is not changed, and its parameters are not copied: segments use them as initial values, under the model's
names, and run copies of the modules that take no memory.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zfunc.engine.compile.segment import Segment, Values, same_modules, segment
from zfunc.models.hf.adapters import base_of, is_adapted, reset_adapters
from zfunc.models.hf.attention import AttentionSettings, implementation_for, register
from zfunc.models.hf.comparison import Loss, compare
from zfunc.models.hf.families import LOSS, check_supported, check_transformers, is_tested
from zfunc.models.hf.parts import EmbedPart, Entry, HeadPart, LayerPart, Skipped, Stop, record_router
from zfunc.models.hf.recording import Recording, record
from zfunc.models.loss import collated_batch
from zfunc.runtime.rng import seeded_sequence

log = logging.getLogger("zfunc")
_Memo = dict[int, Any]


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
    carries, packs = (False, True) if is_tested(base) else compare(cut_layers, base, inputs, targets, loss)
    log.info("hf: attention is scaled_dot_product_attention of shapes alone, instead of the model's")
    return cut_layers(model, inputs, loss, carries_input=carries, packs_documents=packs)


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
    names, in_base = _names(model), cutter.unused
    unused = {names[id(p)] for name, p in base.named_parameters() if name in in_base}
    segments: list[Segment] = []
    owned: set[str] = set()
    for name, cut, own in cutter.cuts(loss):
        segments.append(cut.named(name, own, model, names, owned, unused))
        owned |= {p.name for p in segments[-1].parameters}
    if loss is None:
        segments[-1] = evolve(segments[-1], read_dict=collated_batch)
    return tuple(segments)


def _tokens(model: Any) -> dict[str, Tensor]:
    """Token ids, [2, 9]."""
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(3, min(text.vocab_size, 1000), (2, 9), generator=generator)}


def _by_name(model: Any, inputs: Any) -> dict[str, Tensor]:
    return dict(inputs) if isinstance(inputs, Mapping) else {model.main_input_name: inputs}


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

    def cuts(self, loss: Loss | None) -> Iterator[tuple[str, "_Cut", nn.Module | None]]:
        """The name of each segment with its cut, which layers that are alike share, and its layer."""
        name, part = self.embed()
        yield name, _Cut.of(name, part, self.model), None
        routers = self.routers or [("", 0)] * len(self.layers)
        inside = {id(m) for m in self.layers.modules()}
        around = {id(p) for m in self.model.modules() if id(m) not in inside for p in m._parameters.values()}
        known: list[tuple[int, _Cut]] = []  # the place of each
        for n, own in enumerate(self.layers):
            name, place, router = f"{self.recording.layers}.{n}", self.recording.places[n], routers[n]
            entry = self._entry(own, place, *router)
            tied = any(id(p) in around for p in own.parameters())
            cut = next((x for at, x in known if at == place and not tied and x.fits(entry.layer)), None)
            if cut is None:
                cut = _Cut.of(name, self._layer(own, place, entry, router[0]), self.model, entry.layer)
                known += [] if tied else [(place, cut)]
            yield name, cut, entry.layer
        name, part = self.head(loss)
        yield name, _Cut.of(name, part, self.model), None

    def _entry(self, own: nn.Module, place: int, router: str, index: int) -> Entry:
        """A copy of a layer, as the first one that is given the same; its `router`, if it has one, is recorded."""
        entry = Entry(copy.deepcopy(own, self.configs.memo(own)))
        for module in entry.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
        if router:
            recorded = entry.layer.get_submodule(router)
            vars(recorded)["recorded_index"] = index
            # Not by register_forward_hook: its numbers are never equal.
            recorded._forward_hooks[0] = record_router
        _ready(entry)
        return entry

    def _layer(self, own: nn.Module, place: int, entry: Entry, router: str) -> nn.Module:
        """One layer, in the model."""
        copied, absent = self._copied({self.names[id(p)] for p in own.parameters()}, {place: entry}, dry=True)
        recorded = entry.layer.get_submodule(router) if router else None
        top_k = getattr(self.model, "num_experts_per_tok", 0)
        return LayerPart(copied, self.recording.call, absent, entry=entry, router=recorded, top_k=top_k)

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


@frozen(eq=False)
class _Cut:
    """A part of the model as a segment under its own names. Layers that are alike share one."""

    part: nn.Module
    result: Segment
    constants: Values
    layer: nn.Module | None
    signature: Any

    @classmethod
    def of(cls, name: str, part: nn.Module, model: Any, layer: nn.Module | None = None) -> "_Cut":
        signature = None if layer is None else _signature(layer)
        constants = _take_buffers(part, "", model)
        return cls(part, segment(name, part), constants, layer, signature)

    def fits(self, layer: nn.Module) -> bool:
        """Whether another layer computes the same of its tensors."""
        return self.signature == _signature(layer) and same_modules(self.layer, layer)

    def named(
        self,
        name: str,
        layer: nn.Module | None,
        model: Any,
        names: dict[int, str],
        earlier: set[str],
        unused: set[str],
    ) -> Segment:
        """The segment with the tensors of `layer`, if it is one, its parameters under the model's names; it shares
        those of `earlier` segments."""
        twins, constants = dict[int, Any](), self.constants
        if self.layer is not None and layer is not None and layer is not self.layer:
            twins = {id(a): b for a, b in zip(self.layer.parameters(), layer.parameters(), strict=True)}
            place = next(x for x, m in self.part.named_modules() if m is self.layer)
            constants = {**constants, **_take_buffers(layer, place, model)}
        own = [self.result.origins[p.name] for p in self.result.parameters]
        tensors = dict(zip(self.result.short, (twins.get(id(t), t) for t in own), strict=True))
        full = {short: names.get(id(t), f"{name}.{short}") for short, t in tensors.items()}
        owned = {short: x for short, x in full.items() if x not in earlier}
        on_meta = any(t.is_meta for t in tensors.values())

        def initial(seed: int) -> Values:
            if not on_meta:
                return {x: tensors[short].detach() for short, x in owned.items()}
            values = _draw_values(name, self.part, constants, model, seed)
            return {x: values[short] for short, x in owned.items()}

        return evolve(
            self.result,
            name=name,
            parameters=tuple(
                evolve(p, name=x, trainable=p.trainable and x not in unused)
                for p, x in zip(self.result.parameters, full.values(), strict=True)
            ),
            shared=frozenset(full.values()) & earlier,
            origins={x: tensors[short] for short, x in full.items()},
            initial=initial,
            constants=constants,
            source=None,  # nobody else has the part
        )


def _signature(layer: nn.Module) -> list[Any]:
    """What its modules do not say of a layer: its tensors, and which of them are one."""
    firsts: dict[int, str] = {}
    slots = [
        (f"{x}.{k}", t)
        for x, m in layer.named_modules()
        for k, t in (*m._parameters.items(), *m._buffers.items())
    ]
    return [
        (x, t if t is None else (t.shape, t.dtype, t.requires_grad, t.is_meta, firsts.setdefault(id(t), x)))
        for x, t in slots
    ]


def _take_buffers(part: nn.Module, place: str, model: Any) -> Values:
    """Remove the buffers, and return their values by name, on the CPU, for a part at `place`; those on meta are
    computed."""
    values: Values = {}
    for prefix, module in part.named_modules(prefix=place):
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
