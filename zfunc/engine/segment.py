"""Segments: a model as a tuple of pure functions `(params, x) -> y`, the last one ending in the loss.

The invariant: a segment owns no training state. Its function gets the parameters by name and the input, and
calling it changes nothing; what a module held is only the initial values.
"""

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zfunc.core.layout import Parameter
from zfunc.engine.closure_facts import CapturedFacts, captured
from zfunc.engine.state import refuse_inference_mode
from zfunc.runtime.rng import seeded_sequence
from zfunc.values import of_type

Values = dict[str, Tensor]


@frozen(eq=False)
class Segment:
    """A pure function with the names, shapes and initial values of its parameters.

    `function(params, x)`, or `function(params, x, targets)` for the last one, takes the parameters by their
    short names (`short[i]` is the short name of `parameters[i]`, whose own name is the full one) and must not
    change anything. `evaluate` is the same without dropout. `initial(seed)` returns fp32 values by full name
    of the parameters this segment owns: all but the `shared` ones, which are another's. `constants` are
    tensors by short name that are read and never trained (a module's buffers). `origins` (the module's own
    tensors, by full name) and `twins` (names tied inside the module) are what `segment` found out.

    Usually made by `segment` from a module; made by hand from a function:

    >>> from zfunc.core.layout import Parameter
    >>> double = Segment(
    ...     "double",
    ...     lambda p, x: x * p["w"],
    ...     (Parameter("double.w", ()),),
    ...     ("w",),
    ...     initial=lambda seed: {"double.w": torch.tensor(2.0)},
    ... )
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...] = field(converter=tuple)
    short: tuple[str, ...] = field(converter=tuple)
    initial: Callable[[int], Values] = field(kw_only=True)
    evaluate: Callable[..., Any] | None = field(default=None, kw_only=True)
    shared: frozenset[str] = field(default=frozenset(), converter=frozenset, kw_only=True)
    origins: dict[str, nn.Parameter] = field(factory=dict, kw_only=True, repr=False)
    twins: dict[str, str] = field(factory=dict, kw_only=True, repr=False)
    constants: Values = field(factory=dict, kw_only=True)
    module: nn.Module | None = field(default=None, kw_only=True, repr=False)
    _source: tuple[nn.Module, CapturedFacts] | None = field(default=None, kw_only=True, repr=False)

    def __attrs_post_init__(self) -> None:
        _check_name(self.name)
        for what, function in (
            ("function", self.function),
            ("evaluate", self.evaluation),
            ("initial", self.initial),
        ):
            of_type(f"segment {self.name!r}: {what}", function, Callable, "a function: pass one")
        for what, names in (("parameters", [p.name for p in self.parameters]), ("short names", self.short)):
            if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
                raise ValueError(
                    f"segment {self.name!r}: got the {what} {repeated} more than once, expected each once: let "
                    "the function use one value in several places"
                )
        if len(self.parameters) != len(self.short):
            raise ValueError(
                f"segment {self.name!r}: got {len(self.parameters)} parameters and {len(self.short)} short "
                "names, expected one for each: name every parameter as the function knows it"
            )

    @cached_property
    def by_short(self) -> dict[str, str]:
        """Full name of each short one."""
        return {short: p.name for short, p in zip(self.short, self.parameters, strict=True)}

    @property
    def evaluation(self) -> Callable[..., Any]:
        """The function to evaluate with: without dropout if there is such a one."""
        return self.evaluate or self.function

    def changed(self) -> str:
        """What has been changed in the module after `segment` copied it, in words, or nothing."""
        if self._source is None:
            return ""
        module, facts = self._source
        return facts.change(captured(module, tensors=True))

    def like(self, other: "Segment") -> bool:
        """Whether both compute the same function, so that one trace or compilation serves both."""
        if self.short != other.short or [p.shape for p in self.parameters] != [
            p.shape for p in other.parameters
        ]:
            return False
        if [p.trainable for p in self.parameters] != [p.trainable for p in other.parameters]:
            return False
        if self.twins != other.twins:
            return False
        if self.module is None or other.module is None:
            return self.function is other.function and not self.constants and not other.constants
        return _same(self.module, other.module)


def segment(name: str, module: nn.Module, *, share: Mapping[str, str] | None = None) -> Segment:
    """An `nn.Module` as a `Segment`; its parameters are named `name.<name in the module>`.

    `share` ties a name in the module to another segment's parameter, by full name; that one's value counts.
    Initial values are the module's own; a module on the meta device is made real one segment at a time by
    `reset_parameters`, and never all at once. Parameters with `requires_grad=False` stay frozen. Buffers are
    constants, kept in their own dtype. The module itself is not changed by training, and changing it from now on
    (`module.eval()`, `module.drop.p = 0`, another buffer) changes nothing here: the first step says so in the log.

    Raises TypeError for what is no module, and ValueError for a name with no parameter in `share`, a module that is
    partly on meta, parameters with gradient hooks, and for two tensors in the same memory, one of them trained.

    >>> [(p.name, p.shape) for p in segment("body", nn.Linear(8, 4)).parameters]
    [('body.weight', (4, 8)), ('body.bias', (4,))]
    """
    refuse_inference_mode("segment")
    _check_name(name)
    of_type(f"segment {name!r}", module, nn.Module, "an nn.Module: make a Segment by hand from a function")
    of_type(
        f"segment {name!r}: share",
        {} if share is None else share,
        Mapping,
        "a dict: {'name in the module': 'segment.name'}",
    )
    share = dict(share or {})
    for full in share.values():
        of_type(
            f"segment {name!r}: share", full, str, "full names of other segments' parameters: give strings"
        )
    own = _slots(module, "_parameters")
    _check_hooks(name, module)
    check_memory_apart(f"segment {name!r}", {**own, **_slots(module, "_buffers")})
    for short, p in own.items():
        if is_lazy(p):
            raise ValueError(
                f"segment {name!r}: got the lazy parameter {short!r}, expected one with a shape: call the module "
                "on an input first"
            )
        if not p.is_floating_point():
            raise ValueError(
                f"segment {name!r}: got parameter {short!r} of {p.dtype}, expected floating point: make it a "
                "buffer (register_buffer), which is read and never trained"
            )
    for short in share:
        if short not in own:
            raise ValueError(
                f"segment {name!r}: share names {short!r}, expected one of its parameters {sorted(own)}: "
                "give the name inside the module, then the full name of the other segment's parameter"
            )
    twin: dict[int, str] = {}  # tied inside the module: the shared name, else the first, counts
    for short, p in (*((x, own[x]) for x in share), *own.items()):
        twin.setdefault(id(p), short)
    fulls = {x: share.get(x) or share.get(twin[id(p)]) or f"{name}.{twin[id(p)]}" for x, p in own.items()}
    chosen: dict[str, str] = {}  # full name -> the one name it is differentiated by
    for short, full in fulls.items():
        chosen.setdefault(full, short)
    twins = {short: chosen[full] for short, full in fulls.items()}
    parameters = tuple(Parameter(f, tuple(own[x].shape), own[x].requires_grad) for f, x in chosen.items())
    on_meta = {t.is_meta for t in own.values()}
    if len(on_meta) > 1:
        raise ValueError(
            f"segment {name!r}: got a module partly on the meta device, expected all of it there or none: "
            "build it under one `with torch.device(...)`"
        )
    skeleton = _skeleton(module)
    owned = {full: short for full, short in chosen.items() if full not in set(share.values())}
    meta = on_meta == {True}
    constants = _slots(module, "_buffers")
    if meta and constants:
        constants = _real_module(name, module, 0)[1]

    def initial(seed: int) -> Values:
        values = _real_module(name, module, seed)[0] if meta else own
        return {full: values[short].detach() for full, short in owned.items()}

    return Segment(
        name,
        _functional(skeleton, twins),
        parameters,
        tuple(chosen.values()),
        initial=initial,
        shared=frozenset(share.values()),
        origins={full: own[short] for full, short in chosen.items()},
        twins={short: twin for short, twin in twins.items() if short != twin},
        evaluate=_functional(_skeleton(module).eval(), twins),
        constants={k: v.detach().clone() for k, v in constants.items()},
        module=skeleton,
        source=(module, captured(module, tensors=True)),
    )


def _check_name(name: Any) -> None:
    of_type("segment: name", name, str, "a string, by which its parameters are called: pass such as 'head'")
    if not name:
        raise ValueError(
            "segment: name: got '', expected a name: parameters are called by it. Pass such as 'head'"
        )


def _check_hooks(name: str, module: nn.Module) -> None:
    """Raise ValueError for gradient hooks: gradients come from `vjp`, which runs none of them."""
    hooked = [
        *(f"parameter {x!r}" for x, p in module.named_parameters() if gradient_hooks(p)),
        *(f"module {x!r}" for x, m in module.named_modules() if m._backward_hooks or m._backward_pre_hooks),
    ]
    if hooked:
        refuse_hooks(name, hooked[0])


def gradient_hooks(p: Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called on a parameter."""
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def refuse_hooks(name: str, what: str) -> NoReturn:
    """Raise for a gradient hook, with what to use instead."""
    raise ValueError(
        f"segment {name!r}: got a gradient hook on {what}, expected none, because it would never run: to clip, "
        "pass clip_norm to zfunc.compile; to change a gradient, use a torch.autograd.Function in forward; to read "
        "gradients or do more with them, add a stage (zfunc.compile's recipe and stages)"
    )


def check_memory_apart(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError where two tensors, one of them trained, have memory in common without being one tensor."""
    of_storage: dict[int, dict[int, tuple[int, int, str, Tensor]]] = {}
    for name, t in tensors.items():
        if is_lazy(t) or t.layout is not torch.strided or not t.numel():
            continue
        start = t.storage_offset() * t.element_size()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        there = of_storage.setdefault(t.untyped_storage()._cdata, {})
        there.setdefault(id(t), (start, start + extent * t.element_size(), name, t))
    for there in of_storage.values():
        known: list[tuple[int, int, str, Tensor]] = []
        for start, end, name, t in sorted(there.values(), key=lambda x: x[:2]):
            known = [x for x in known if x[1] > start]
            for _, _, other, u in known:
                if (t.requires_grad or u.requires_grad) and _overlap(t, u):
                    raise ValueError(
                        f"{where}: got {other!r} and {name!r} in the same memory, expected memory of its own "
                        "for each: to tie them use one nn.Parameter (between segments, share=), else clone one"
                    )
            known.append((start, end, name, t))


def _overlap(t: Tensor, u: Tensor) -> bool:
    """Whether two tensors whose ends overlap have an element in common."""
    if t.dtype != u.dtype or (t.is_contiguous() and u.is_contiguous()):
        return True
    taken = torch.zeros(t.untyped_storage().nbytes() // t.element_size(), dtype=torch.bool)
    taken.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
    return bool(taken.as_strided(u.shape, u.stride(), u.storage_offset()).any())


def _slots(module: nn.Module, kind: str) -> dict[str, Any]:
    """Every parameter or buffer by name, once for each place that holds it: a module used twice has its once."""
    return {
        f"{prefix}.{k}" if prefix else k: t
        for prefix, m in module.named_modules()
        for k, t in getattr(m, kind).items()
        if t is not None
    }


def _functional(skeleton: nn.Module, twins: Mapping[str, str]) -> Callable[..., Any]:
    lock = threading.RLock()  # the call puts the parameters into the skeleton for as long as it runs

    def function(params: Mapping[str, Tensor], *inputs: Any) -> Any:
        given = {**params, **{x: params[twin] for x, twin in twins.items()}}
        left = dict(given)
        with lock:
            y = torch.func.functional_call(skeleton, left, inputs, tie_weights=False)
        if replaced := [name for name, t in left.items() if t is not given[name]]:
            raise ValueError(
                f"got {replaced[0]!r} replaced in forward, expected a pure function: parameters and buffers "
                "cannot be assigned to (running statistics cannot be kept)"
            )
        return y

    return function


def _skeleton(module: nn.Module) -> nn.Module:
    """The module's structure on the meta device: a copy that holds no memory."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {}
    for t in tensors:
        meta = t.detach().to("meta")
        memo[id(t)] = nn.Parameter(meta, t.requires_grad) if isinstance(t, nn.Parameter) else meta
    return copy.deepcopy(module, memo)


def _real_module(name: str, module: nn.Module, seed: int) -> tuple[Values, Values]:
    """Parameters and buffers of a meta module, made on the CPU and filled by `reset_parameters`."""
    real = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        for t in (*real.parameters(), *real.buffers()):
            if t.is_floating_point():
                t.fill_(math.nan)  # so that what reset_parameters leaves out is seen
    with torch.no_grad(), seeded_sequence(seed):
        for child in reversed([*real.modules()]):  # a module's own reset comes after its children's
            reset = getattr(child, "reset_parameters", None)
            if callable(reset):
                reset()
    for what, t in (*real.named_parameters(), *real.named_buffers()):
        if t.is_floating_point() and t.isnan().any():
            raise ValueError(
                f"segment {name!r}: {what} has no value, expected reset_parameters of the module or one above "
                "it to fill it: define it there, or build the module on the CPU"
            )
    return _slots(real, "_parameters"), _slots(real, "_buffers")


def _same(a: Any, b: Any) -> bool:
    """Whether two modules, or two of their attributes, are sure to behave alike. In doubt, they are not."""
    if isinstance(a, nn.Module) and type(a) is type(b):
        # Buffers are constants, handed to the function by name, so their values do not matter here.
        skip = {"_parameters", "_buffers", "_modules"}
        mine, theirs = ({k: v for k, v in vars(x).items() if k not in skip} for x in (a, b))
        children = _same(dict(a._modules), dict(b._modules))
        return children and _same(mine, theirs) and a._buffers.keys() == b._buffers.keys()
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (set, frozenset)) and type(a) is type(b):
        return a == b
    return a is b or (type(a) is type(b) and _is_value(a) and a == b)


def _is_value(a: Any) -> bool:
    """Whether equality means the same for ever: its type defines it, and can be hashed. A tensor is not one."""
    kind = type(a)
    return kind.__eq__ is not object.__eq__ and kind.__hash__ is not None and not isinstance(a, Tensor)
