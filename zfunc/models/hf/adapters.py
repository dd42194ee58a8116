"""LoRA by peft: the adapters of a model, drawn, written as peft writes them, and merged into the model's weights.

Adapters are those of modules, or of tensors alone (`target_parameters`), as the experts of a mixture are held. peft
computes all of it, but the forward of the latter; here one layer is handled at a time, so that a model needs no
second copy. peft is imported when adapters are asked for: `pip install -e ".[lora]"`.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zfunc.engine.trace.tensor_memory import Values
from zfunc.errors import CheckpointError, SettingTypeError, install, refuse
from zfunc.models.hf.families import check_package
from zfunc.runtime.rng import seeded_sequence
from zfunc.values import whole

MISSING = f"zfunc.hf: got no peft, expected version 0.18 or newer: {install('lora')}"
MISSING_OF_TENSORS = (
    f"zfunc.hf: got no peft for adapters of tensors, expected version 0.21 or newer: {install('lora')}"
)
OLDEST = (0, 18)
OLDEST_OF_TENSORS = (0, 21)  # in older ones the order of a tensor's dimensions is another
DRAWN = (True, "gaussian")  # values of init_lora_weights that need no weights of the model
# Where peft has no targets for a model: those that it has of these.
TARGETS = ("q_proj", "v_proj", "qkv_proj", "gate_up_proj")


def lora_config(
    rank: int,
    *,
    alpha: float | None = None,
    targets: str | None = None,
    parameters: str | None = None,
    use_dora: bool = False,
    base: Path | None = None,
) -> Any:
    """A `peft.LoraConfig` of `rank`. `alpha` is twice the rank by default; `targets` are by default those
    that peft has for the model's type.

    `targets` are names of modules, separated by commas, or "all-linear": all linear layers but the head.
    `parameters` are names of tensors of experts that get adapters, such as "experts.gate_up_proj"; with them there
    are no `targets` by default. With `use_dora` each output of an adapted layer has a magnitude (DoRA).
    `base` is the folder of the model, which peft keeps with the adapters.
    """
    check_package("peft", OLDEST, MISSING)
    from peft import LoraConfig

    tensors = None if parameters is None else parameters.split(",")
    if targets not in (None, "all-linear"):
        modules: Any = targets.split(",")
    else:
        modules = [] if targets is None and tensors else targets
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=modules,
        target_parameters=tensors,
        use_dora=use_dora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base is None else str(base),
    )


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is a module of peft, such as a model with its adapters."""
    return type(model).__module__.startswith("peft.")


def base_of(model: Any) -> Any:
    """The base model below peft's adapters, else `model`. ValueError for adapters that cannot be trained."""
    if not is_adapted(model):
        return model
    check_package("peft", OLDEST, MISSING)
    if len(model.peft_config) > 1:
        raise ValueError(
            f"model: got the adapters {', '.join(model.peft_config)}, expected one: delete_adapter the others"
        )
    (config,) = model.peft_config.values()
    _check_config(config)
    _check_trained(model)
    return model.get_base_model()


def adapt(model: nn.Module, lora: Any) -> Any:
    """Add adapters to a model on the meta device. `lora` is a `peft.LoraConfig`, or a folder with
    adapter_config.json.

    Returns peft's model. Raises ValueError for a configuration whose adapters cannot be drawn without the model's
    weights, and for names of modules that the model lacks.
    """
    check_package("peft", OLDEST, MISSING)
    from peft import LoraConfig, get_peft_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as OF_PEFT

    config = _read_config(lora) if isinstance(lora, str | Path) else copy.deepcopy(lora)
    if not isinstance(config, LoraConfig):
        got = f"a {type(config).__name__}"
        refuse("lora", got, "a peft.LoraConfig, or a folder with one", kind=SettingTypeError)
    _check_config(config)
    config.inference_mode = False  # as peft saves it
    given, tensors = (
        config.target_modules,
        [*(config.target_parameters or ())],
    )  # peft changes them, and the model
    products = (
        x for x, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    )
    linear = sorted({x.rpartition(".")[2] for x in products})  # Conv1D is GPT-2's
    modules = f"target_modules, such as {', '.join(linear)}"
    found = found_tensors("lora.target_parameters", model, tensors, modules)
    if config.use_dora and tensors:
        refuse("lora.use_dora", "it with target_parameters", "adapters of modules", "leave one out")
    if given is None and not tensors:  # for mixtures peft forgets what it has
        of_peft = OF_PEFT.get(model.config.model_type)  # pyright: ignore
        config.target_modules = of_peft or [x for x in TARGETS if x in linear] or None
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft calls what transformers deprecates
            return get_peft_model(model, config)
    except ValueError as error:  # peft's own, of a model that it has no default for, or without such modules
        twice = {x for x, _ in _lora_layers(model)}.intersection(x.rpartition(".")[0] for x in found)
        if twice:
            got = f"{tensors!r}, the weight of {min(twice)}, whose module has adapters already"
            expected, do = "tensors of other modules", "leave it out, or its module out of target_modules"
            refuse("lora.target_parameters", got, expected, do, cause=error)
        expected = f"ends of names of modules, such as {', '.join(linear)}, or 'all-linear' ({error})"
        refuse("lora.target_modules", repr(given), expected, cause=error)


def found_tensors(setting: str, model: nn.Module, targets: Sequence[str], instead: str) -> list[str]:
    """The names of the parameters of `model` that end in one of `targets`, the value of `setting`. ValueError
    for a target that no name ends in, or a tensor that is neither a matrix nor a stack of matrices; if the
    model has no stacks, the error says to pass `instead`."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    stacked = sorted({".".join(x.split(".")[-2:]) for x, shape in shapes.items() if len(shape) == 3})
    expected = f"ends of names of tensors of 2 or 3 dimensions, such as {', '.join(stacked)}"
    if not stacked:
        expected = f"{instead}, as the model has no stacked experts"
    found: list[str] = []
    for target in targets:
        own = [x for x in shapes if f".{x}".endswith(f".{target}")]
        odd = [f"of shape {shapes[x]}" for x in own if len(shapes[x]) not in (2, 3)]
        if odd or not own:
            got = f"{targets!r}, of which {target!r} is {odd[0] if odd else 'no parameter'}"
            refuse(setting, got, expected)
        found += own
    return found


def base_name(name: str) -> str:
    """The base model's name of a parameter of peft's model, or of the copy of a parameter that peft trains.

    >>> base_name("base_model.model.lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    inserted = r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)"
    return re.sub(inserted, "", name.removeprefix("base_model.model."))


def adapted_modules(model: Any) -> list[str]:
    """The last two parts of the names of adapted tensors ("experts.down_proj"), the last part of adapted
    modules ("q_proj"), sorted, without repeats."""
    names = ((x.replace(".base_layer", "").rpartition(".")[2], m) for x, m in _lora_layers(model))
    return sorted({f"{x}.{m.parameter_name}" if _of_tensor(m) else x for x, m in names})


def _read_config(folder: str | Path) -> Any:
    """The peft.LoraConfig of a folder's adapter_config.json. Raises CheckpointError if it has none."""
    from peft import LoraConfig

    why = ""
    try:
        config = LoraConfig.from_pretrained(str(folder))
        if isinstance(config, LoraConfig):
            return config
        why = f"a {type(config).__name__}"
    except (LookupError, OSError, TypeError, ValueError) as error:  # peft's own, of any other file
        why = f"what peft does not read ({type(error).__name__}: {error!s:.200})"
    place, do = (
        f"{folder}/adapter_config.json",
        "copy it again, or write it by peft_config.save_pretrained(folder)",
    )
    refuse(place, why, "a LoraConfig of peft", do, CheckpointError)


def _check_config(config: Any) -> None:
    if config.peft_type != "LORA" or config.trainable_token_indices:
        kind = "trainable_token_indices" if config.peft_type == "LORA" else config.peft_type.value
        raise ValueError(f"model: got adapters of peft with {kind}, expected LoRA alone: use peft.LoraConfig")
    whole("lora.r", config.r, 1)
    if getattr(config, "ensure_weight_tying", False):
        raise ValueError(
            "model: got adapters of peft with ensure_weight_tying, expected each module to have its own: "
            "leave it out"
        )


def _check_trained(model: nn.Module) -> None:
    """Raise ValueError if an adapter of `model` is merged or disabled."""
    for name, layer in _lora_layers(model):
        if layer.merged or layer.disable_adapters:
            raise ValueError(
                f"model: got {name!r} with merged or disabled adapters, which would not be trained: call "
                "unmerge_adapter() and enable_adapter_layers() first"
            )


def _lora_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, m) for name, m in module.named_modules() if isinstance(m, LoraLayer))


# --- adapters of tensors ------------------------------------------------------------------------------------


def _of_tensor(layer: Any) -> bool:
    """Whether `layer` is a peft layer (ParamWrapper) whose adapters change one tensor of the module that it
    wraps, not the whole module. Layers for several tensors of one module wrap each other."""
    if not is_adapted(layer):  # peft need not be installed
        return False
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(layer, ParamWrapper)


def make_pure(layer: Any) -> None:
    """Make the forward of a peft layer a pure function, in place: peft's forward for adapters of a tensor
    swaps the module's parameter while it runs. Raises ImportError if the installed peft is too old."""
    layer.kwargs = {}  # its place, from when peft made it
    if _of_tensor(layer):
        check_package("peft", OLDEST_OF_TENSORS, MISSING_OF_TENSORS)
        layer.__class__ = _pure_class()


def with_pure_adapters(model: nn.Module) -> nn.Module:
    """A copy of `model` in which peft layers that adapt tensors have a pure forward; `model` itself if it has
    no such layers. Raises ValueError if their adapters are merged or disabled."""
    if not any(map(_of_tensor, model.modules())):
        return model
    _check_trained(model)
    copied = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for m in copied.modules():
        if _of_tensor(m):
            make_pure(m)
    return copied


@cache
def _pure_class() -> type:
    from peft.tuners.lora.layer import ParamWrapper

    class AdaptedTensor(ParamWrapper):
        """A module called with one tensor replaced by the sum of that tensor and the products of its adapters."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            whole = self.get_param()
            for adapter in (a for a in self.active_adapters if a in self.lora_A):
                left, right, scale = self.get_delta_factors(adapter)  # of each expert
                if whole.dim() == 3:
                    whole = torch.baddbmm(whole, left, right, alpha=scale)
                else:  # [features out, in], of which the factors are transposed
                    whole = torch.addmm(whole, right[0].T, left[0].T, alpha=scale)
            owner, base = self.base_layer, self.get_base_layer()
            path = next(name for name, m in owner.named_modules() if m is base)
            named = {f"{path}.{self.parameter_name}".lstrip("."): whole}
            return torch.func.functional_call(owner, named, (x, *args), kwargs, tie_weights=False)

    return AdaptedTensor


# --- initial values -----------------------------------------------------------------------------------------


def reset_adapters(part: nn.Module, config: Any, read: Callable[[str], Tensor | None] | None = None) -> None:
    """Draw the adapters in `part`, in place, as peft does. DoRA's magnitudes are norms of base weights, which
    `read` returns by short name; None for one that the segment lacks. ValueError if DoRA, or another kind of
    draw, needs weights that are not given."""
    if config.init_lora_weights not in DRAWN or (config.use_dora and read is None):
        got = "use_dora" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
        got = f"{got} for a model without weights yet"
        expected = f"init_lora_weights to be one of {', '.join(map(repr, DRAWN))}"
        adapted = "adapt it with peft.get_peft_model and pass it to zfunc.hf.segments"
        refuse("lora", got, expected, f"or load the model with from_pretrained, {adapted}")
    for name, layer in _lora_layers(part):
        own = any(True for kind in layer.adapter_layer_names for _ in getattr(layer, kind).parameters())
        for adapter in layer.active_adapters if own else ():  # else it is another segment's
            layer.reset_lora_parameters(adapter, config.init_lora_weights)
            for dora in (layer.lora_magnitude_vector[adapter],) if config.use_dora and read else ():
                if (weight := read(f"{name}.base_layer.weight")) is None or weight.ndim != 2:
                    got, do = f"use_dora of {name!r}", "leave it out of target_modules"
                    refuse("lora", got, "linear layers, whose weight is not tied", do)
                weight = weight.T if dora.fan_in_fan_out else weight
                dora.weight.copy_(torch.linalg.norm(weight, dim=1))  # of a drawn adapter, which is zero


def draw_adapters(part: nn.Module, config: Any, seed: int, read: Callable[[str], Tensor | None]) -> Values:
    """Draw adapters for `part`, a module on the meta device, from `seed`; returns their values by short name.
    `read` returns a base weight by short name, or None; `part` is not changed."""
    part = copy.deepcopy(part)
    for _, layer in _lora_layers(part):
        for kind in layer.adapter_layer_names:
            getattr(layer, kind).to_empty(device="cpu")
    with torch.no_grad(), seeded_sequence(seed):
        reset_adapters(part, config, read)
    return {name: p.detach() for name, p in part.named_parameters() if not p.is_meta}


# --- trained values -----------------------------------------------------------------------------------------


class AdaptedWeights:
    """Turns the trained weights of a peft model into the tensors of a folder.

    Tensors have the names of the base model, into which adapters are merged, or, for adapters alone, the
    names that peft writes. `shapes` are of the tensors to write, `expected` of the trained parameters. If
    tied weights are no longer equal after merging, `unties` is true, and all of them are written.
    """

    def __init__(self, base: nn.Module, lora: Any, *, adapter_only: bool) -> None:
        from peft import get_peft_model_state_dict

        tied = {name: id(p) for name, p in base.named_parameters(remove_duplicate=False)}
        firsts = dict(base.named_parameters()).keys()
        self.model = adapt(base, lora)
        ((adapter, self.config),) = self.model.peft_config.items()
        parameters = dict(self.model.named_parameters())
        self.expected = {name: tuple(p.shape) for name, p in parameters.items()}
        self.layers = {} if adapter_only else _outermost(self.model)
        self.owners = {
            f"{x}.{short}": x for x, layer in self.layers.items() for short, _ in layer.named_parameters()
        }
        trained = {id(p): name for name, p in parameters.items()}  # of tied ones the first
        trained = {x: trained[id(p)] for x, p in self.model.named_parameters(remove_duplicate=False)}
        self.uses: dict[str, list[str]] = {}  # of what was trained
        for name, first in trained.items():
            self.uses.setdefault(first, []).append(name)
        self.unties = False
        if adapter_only:
            given = {"adapter_name": adapter, "save_embedding_layers": False}
            saved = get_peft_model_state_dict(self.model, parameters, **given)
            names = {id(p): name for name, p in saved.items()}
            self.names = {name: names[id(p)] for name, p in parameters.items() if id(p) in names}
        else:
            whole = (x for x in trained if ".original_module." not in x)  # peft trains a copy of that
            self.names = {x: base_name(x) for x in whole if base_name(x) in tied}
            made_of = {(tied[to], self.owners.get(x, trained[x])) for x, to in self.names.items()}
            self.unties = len(made_of) > len({*tied.values()})
            if not self.unties:
                self.names = {x: to for x, to in self.names.items() if to in firsts}
        self.shapes = {to: self.expected[trained[x]] for x, to in self.names.items()}

    def write_config(self, folder: Path, origin: Path | None) -> None:
        """Write adapter_config.json for inference; `origin` is the model's folder, if the config names none."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        config.base_model_name_or_path = config.base_model_name_or_path or (origin and str(origin))
        config.save_pretrained(str(folder))

    def written(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors to write, from trained fp32 `weights` by name. A layer with adapters is
        merged when its last weight has come."""
        waiting: dict[str, Values] = {x: {} for x in self.layers}
        for first, values in weights:
            for name in self.uses[first]:
                prefix = self.owners.get(name)
                if prefix is not None:
                    waiting[prefix][name.removeprefix(f"{prefix}.")] = values
                    if len(waiting[prefix]) == sum(1 for _ in self.layers[prefix].named_parameters()):
                        yield from self._merged(prefix, waiting.pop(prefix))
                elif name in self.names:
                    yield self.names[name], values

    def _merged(self, prefix: str, values: Values) -> Iterator[tuple[str, Tensor]]:
        whole = copy.deepcopy(self.layers[prefix])
        whole.load_state_dict(values, assign=True)
        for _, layer in _lora_layers(whole):
            layer.merge(safe_merge=True)  # into a copy: the values may be the State's own
        for short, p in whole.named_parameters():
            if name := self.names.get(f"{prefix}.{short}"):
                yield name, p.detach()


def _outermost(model: Any) -> dict[str, Any]:
    """The layers of `model` with peft's adapters, by name, without layers inside another adapted layer."""
    found: dict[str, Any] = {}
    for name, layer in _lora_layers(model):  # a layer before what is in it
        if not (found and name.startswith(f"{next(reversed(found))}.")):
            found[name] = layer
    return found
