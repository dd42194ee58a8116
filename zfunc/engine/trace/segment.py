"""A segment of a model: a pure function `(params, x) -> y`, the last one `(params, x, targets) -> loss`.

A segment owns no training state: its function gets the parameters by name, and calling it changes nothing. The
tensors of a module are initial values only.
"""

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zfunc.core.display import counted, html_table
from zfunc.core.layout import Parameter
from zfunc.engine.trace.cost_trace import nbytes
from zfunc.engine.trace.facts import Facts, first_change, held
from zfunc.engine.trace.look import Look, look
from zfunc.engine.trace.module_buffers import changed_by_forward
from zfunc.engine.trace.module_copies import skeleton_of
from zfunc.engine.trace.outside import Outside
from zfunc.engine.trace.tensor_memory import Values, byte_range, storage_of
from zfunc.engine.trace.thread_modes import refuse_inference_mode
from zfunc.errors import refuse, setting
from zfunc.runtime.rng import seeded_sequence
from zfunc.values import of_type

IDLE = "no path from the loss leads there, so a step leaves that as it is, without decay or momentum"


@frozen(eq=False)
class Segment:
    """A pure function with the names, shapes and initial values of its parameters.

    - `function(params, x)`, or `function(params, x, targets)` for the last segment, gets the parameters by short
      name and must not change anything. `short[i]` is the short name of `parameters[i]`, whose `name` is the full
      name.
    - `evaluate` is the function without dropout.
    - `initial(seed)` returns the fp32 values, by full name, of all parameters but the `shared` ones, which other
      segments own.
    - `constants` are tensors by short name that are read and never trained (a module's buffers).
    - `buffers` are the first values, by short name, of tensors that the function changes (running statistics): it
      gets them as parameters, and returns `(y, {short name: new value})`; `evaluate` gets them and returns `y`.
    - `buffer_names` are full names of buffers and constants by short name; the default is `name.short name`.
    - `read_dict`, of the last segment, makes `(inputs, targets)` of a dict, `read_batch` of any batch.
    - `codes` has, by short name, of each weight that the function decodes: the short name of the parameter of its
      bytes, their format, and the weight's shape (`zfunc.quantized`).
    - `outside` has facts of what the function's own traces depend on, if it keeps traces.
    - `origins` (the module's tensors by full name) and `twins` (names tied inside the module) are set by `segment`.

    `zfunc.segment` makes a Segment from a module. A Segment from a function:

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
    read_dict: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = field(default=None, kw_only=True)
    read_batch: Callable[[Any], tuple[Any, ...]] | None = field(default=None, kw_only=True)
    constants: Values = field(factory=dict, kw_only=True)
    buffers: Values = field(factory=dict, kw_only=True)
    buffer_names: dict[str, str] = field(factory=dict, kw_only=True)
    codes: dict[str, tuple[str, str, tuple[int, ...]]] = field(factory=dict, kw_only=True)
    module: nn.Module | None = field(default=None, kw_only=True, repr=False)
    _source: tuple[nn.Module, Facts] | None = field(default=None, kw_only=True, repr=False)
    outside: Outside | None = field(default=None, kw_only=True, repr=False)
    _behaviour: Facts = field(factory=dict, kw_only=True, repr=False)

    def __repr__(self) -> str:
        trained = sum(math.prod(p.shape) for p in self.parameters)
        return f"Segment({self.name!r}, {counted(len(self.parameters), 'parameter')} of {trained:,} elements)"

    def _repr_html_(self) -> str:
        rows = [
            (p.name, tuple(p.shape), "" if p.trainable else "frozen", "shared" * (p.name in self.shared))
            for p in self.parameters
        ]
        return html_table(["parameter", "shape", "", ""], rows, repr(self))

    def __attrs_post_init__(self) -> None:
        expected = "a string: pass such as 'head', the prefix of its parameters"
        of_type("segment: name", self.name, str, expected)
        where, names = f"segment {self.name!r}", [p.name for p in self.parameters]
        for what, several in (("parameters", names), ("short names", self.short)):
            if repeated := sorted(name for name, times in Counter(several).items() if times > 1):
                do = "let the function use one value in several places"
                refuse(where, f"the {what} {repeated} more than once", "each once", do)
        if self.buffers and self.evaluate is None:
            expected = "the function that reads them and does not change them"
            refuse(where, "buffers without evaluate", expected, "pass evaluate=")
        if len(self.parameters) != len(self.short):
            got = f"{len(self.parameters)} parameters and {len(self.short)} short names"
            refuse(where, got, "one for each", "pass the names that the function uses")

    @cached_property
    def by_short(self) -> dict[str, str]:
        """The full name of each parameter of the segment, by its short name."""
        return {short: p.name for short, p in zip(self.short, self.parameters, strict=True)}

    def buffer_name(self, short: str) -> str:
        """The full name of the module buffer or constant that has the name `short` in the segment."""
        return self.buffer_names.get(short, f"{self.name}.{short}")

    @property
    def constant_bytes(self) -> int:
        """Bytes of device memory of the segment's constants."""
        return nbytes(self.constants)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of device memory of the module buffers that the segment's forward changes."""
        return nbytes(self.buffers)

    @property
    def evaluation(self) -> Callable[..., Any]:
        """The segment's function for evaluation: `evaluate`, without dropout, else `function`."""
        return self.evaluate or self.function

    def changed(self) -> str:
        """A description of the first change in the source module since `segment` copied the module, or ""."""
        if self._source is None:
            return ""
        module, facts = self._source
        return first_change(facts, held(module))

    def outside_of_trace(self) -> Outside:
        """What a trace that is made of the segment will depend on outside of it."""
        outside = self.outside or Outside(self.module, self.function)
        return outside if outside.facts is not None else Outside(outside.module, outside.function)

    def look(self) -> Look:
        """A snapshot of the source module as it is now; only if it no longer holds need `changed` be called."""
        return look(None if self._source is None else self._source[0], self.origins)

    @property
    def changed_tensors(self) -> dict[str, int]:
        """The identity of each tensor of the source module that forward changes (`buffers`), by short name."""
        if self._source is None:
            return {}
        buffers = _slots(self._source[0], "_buffers")
        return {short: id(buffers[short]) for short in self.buffers if short in buffers}

    def like(self, other: "Segment") -> bool:
        """Whether this segment computes the same function as `other`, so that both can share traces."""
        signatures = [
            (
                *(x.short, x.twins, [(p.shape, p.trainable) for p in x.parameters], x.codes),
                *([(y, t.shape, t.dtype) for y, t in fixed.items()] for fixed in (x.constants, x.buffers)),
            )
            for x in (self, other)
        ]
        if signatures[0] != signatures[1]:
            return False
        if self.module is None or other.module is None:
            return self.function is other.function
        return self._behaviour == other._behaviour


def segment(name: str, module: nn.Module, *, share: Mapping[str, str] | None = None) -> Segment:
    """An `nn.Module` as a `Segment`, with parameters named `name.<name in the module>`.

    `share` ties a name in the module to the full name of another segment's parameter, whose value is taken.
    Initial values are the module's. A module on the meta device is initialized by `reset_parameters`, one segment
    at a time. Parameters with `requires_grad=False` stay frozen. Buffers are constants in their own dtype, but for
    those that forward changes: BatchNorm's statistics and spectral norm's vectors are kept in the State. Training
    does not change the module, and changing it afterwards (`module.eval()`, `module.drop.p = 0`, another buffer)
    has no effect, which the next step logs, once.

    Raises TypeError for anything but a module, and ValueError for an unknown name in `share`, a module partly on
    the meta device, integer parameters, gradient hooks, a SyncBatchNorm, and two tensors in the same
    memory, one of them trained.

    >>> [(p.name, p.shape) for p in segment("body", nn.Linear(8, 4)).parameters]
    [('body.weight', (4, 8)), ('body.bias', (4,))]
    """
    return make_segment(name, module, share, f"{name}.")


def make_segment(
    name: str,
    module: nn.Module,
    share: Mapping[str, str] | None,
    prefix: str,
    written: Iterable[str] = (),
    source: tuple[nn.Module, Facts] | None = None,
) -> Segment:
    """Make a Segment as `segment` does, with parameters named `prefix` + the name in the module. `written`
    names further buffers that forward changes, beside those that `changed_by_forward` finds. `source` is the
    module whose changes are noticed, with its facts now: `module` itself by default."""
    # 1. What cannot be a function of its parameters.
    where = f"segment {name!r}"
    refuse_inference_mode("segment")
    of_type(where, module, nn.Module, "an nn.Module: for a function construct a zfunc.Segment")
    share, params, buffers = dict(share or {}), _slots(module, "_parameters"), _slots(module, "_buffers")
    for got, expected, do in _unfit(module, params | buffers):
        refuse(where, got, expected, do)
    check_hooks(name, params, module)
    if other := next((x for x in share if x not in params), ""):
        expected = f"names of its parameters {sorted(params)}"
        do = "pass {name in the module: full name of the other segment's parameter}"
        refuse(where, f"share with {other!r}", expected, do)
    on_meta = {t.is_meta for t in params.values()}
    if len(on_meta) > 1:
        got, do = "a module partly on the meta device", "build it under one `with torch.device(...)`"
        refuse(where, got, "all or nothing there", do)

    # 2. Names: full ones of all parameters, of which tied ones have one, and are differentiated by one short name.
    twin: dict[int, str] = {}  # of names tied inside the module, the shared one, else the first
    for short, p in (*((x, params[x]) for x in share), *params.items()):
        twin.setdefault(id(p), short)
    fulls = {x: share.get(x) or share.get(twin[id(p)]) or f"{prefix}{twin[id(p)]}" for x, p in params.items()}
    chosen: dict[str, str] = {}  # full name -> the short name that it is differentiated by
    for short, full in fulls.items():
        chosen.setdefault(full, short)
    twins = {short: chosen[full] for short, full in fulls.items()}
    parameters = tuple(
        Parameter(f, tuple(params[x].shape), params[x].requires_grad) for f, x in chosen.items()
    )

    # 3. Buffers: constants, and those that forward changes.
    changing, types = changed_by_forward(name, module)
    changing = *changing, *sorted({*written} - {*changing})
    check_memory_apart(where, params | buffers, changing)
    meta = on_meta == {True}
    if meta and any(t.is_meta for t in buffers.values()):
        buffers = _real_module(name, module, 0)[1]
    buffers = {x: t.detach().clone() for x, t in buffers.items()}

    # 4. Functions: of a copy without memory, in training mode and in eval mode; and the initial values.
    skeleton = skeleton_of(module, changing)
    owned = {full: short for full, short in chosen.items() if full not in set(share.values())}

    def initial(seed: int) -> Values:
        values = _real_module(name, module, seed)[0] if meta else params
        return {full: values[short].detach() for full, short in owned.items()}

    return Segment(
        name,
        _functional(skeleton, twins, types, changing),
        parameters,
        tuple(chosen.values()),
        initial=initial,
        shared=frozenset(share.values()),
        origins={full: params[short] for full, short in chosen.items()},
        twins={short: twin for short, twin in twins.items() if short != twin},
        evaluate=_functional(skeleton_of(module, changing).eval(), twins, types, changing, returned=False),
        constants={x: t for x, t in buffers.items() if x not in changing},
        buffers={x: buffers[x] for x in changing},
        module=skeleton,
        source=source or (module, held(module)),
        behaviour=held(module, tensors=False),
    )


def _unfit(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, str]]:
    """Yield what no segment can have of `module` or its `tensors`: what is got, what is expected, what to do."""
    if any("_orig_mod" in m._modules for m in module.modules()):
        do = f"pass its `_orig_mod`, and {setting('compile_segments', True)} to zfunc.compile"
        yield "a module that torch.compile returned", "one as it was before", do
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        yield "a module of torch.jit", "one of Python", "leave torch.jit.script out"
    for name, t in tensors.items():
        if is_lazy(t):
            got = f"{name!r} of a lazy module, which has no shape yet"
            yield got, "one with a shape", "call the module with a batch first"
        if isinstance(t, nn.Parameter) and not t.is_floating_point():
            do = "make it a buffer (register_buffer), which is read and never trained"
            if t.is_complex():
                do = "train torch.view_as_real of it, and call view_as_complex in forward"
            yield f"parameter {name!r} of {t.dtype}", "floating point", do
    for path, m in module.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse:
            yield f"{path!r} with sparse=True", "a dense gradient", "leave sparse out"


def check_hooks(name: str, parameters: Mapping[str, Tensor], module: nn.Module | None = None) -> None:
    """Raise ValueError for gradient hooks on `parameters` or in `module`: `torch.func.vjp` does not run hooks."""
    modules = module.named_modules() if module is not None else ()
    on_tensor = "_backward_hooks", "_post_accumulate_grad_hooks"
    hooked = [f"parameter {x!r}" for x, p in parameters.items() if any(getattr(p, h, 0) for h in on_tensor)]
    hooked += [f"module {x!r}" for x, m in modules if m._backward_hooks or m._backward_pre_hooks]
    if hooked:
        do = (
            "to clip, pass `clip_norm` to zfunc.compile; to change a gradient, use a torch.autograd.Function "
            f"in forward; to read gradients, pass {setting('norms', True)} or a stage in place of pack "
            "(docs/recipes.md)"
        )
        refuse(f"segment {name!r}", f"a gradient hook on {hooked[0]}", "none, because it would never run", do)


def check_memory_apart(where: str, tensors: Mapping[str, Tensor], written: Collection[str] = ()) -> None:
    """Raise ValueError, beginning with `where`, if two tensors share memory and one of them is trained, or is
    among the buffers `written` by forward."""
    apart: dict[int, tuple[int, int, int, str, Tensor]] = {}
    for name, t in tensors.items():
        if t.layout is torch.strided and t.numel():
            apart.setdefault(id(t), (storage_of(t), *byte_range(t), name, t))
    before: list[tuple[int, int, int, str, Tensor]] = []
    for x in sorted(apart.values(), key=lambda x: x[:3]):
        storage, start, _, name, t = x
        before = [y for y in before if y[0] == storage and y[2] > start]
        for _, _, _, other, u in before:
            if t.requires_grad or u.requires_grad or name in written or other in written:
                got, do = f"{other!r} and {name!r} in the same memory", "to tie them use one nn.Parameter"
                do += " (between segments, share=), else clone one, or make the view in forward"
                refuse(where, got, "separate memory for each", do)
        before.append(x)


def _slots(module: nn.Module, kind: str) -> dict[str, Any]:
    """The parameters or buffers (`kind`) of a module, by name. A tensor tied under several names is listed
    under each; those of a submodule that occurs twice are listed once."""
    return {
        f"{prefix}.{k}" if prefix else k: t
        for prefix, m in module.named_modules()
        for k, t in getattr(m, kind).items()
        if t is not None
    }


def _functional(
    skeleton: nn.Module,
    twins: Mapping[str, str],
    types: Mapping[str, str],
    changing: tuple[str, ...],
    *,
    returned: bool = True,
) -> Callable[..., Any]:
    """A module as a function of parameters and inputs. `twins` maps a tied tensor's name to that of its
    owner, `types` a tensor to be cast to the one whose dtype it gets. Of buffers `changing`, copies are written;
    if there are any, the function also returns their new values, if `returned`."""
    lock = threading.RLock()  # during the call the skeleton holds the parameters

    def function(params: Mapping[str, Tensor], *inputs: Any, skeleton: nn.Module = skeleton) -> Any:
        tensors = {**params, **{x: params[twin] for x, twin in twins.items()}}
        tensors |= {x: tensors[x].to(tensors[other].dtype) for x, other in types.items() if x in tensors}
        tensors |= {x: tensors[x].clone() for x in changing}  # to be written
        after = dict(tensors)  # functional_call records assignments here
        with lock:
            y = torch.func.functional_call(skeleton, after, inputs, tie_weights=False)
        replaced = [name for name, t in after.items() if t is not tensors[name] and name not in changing]
        if replaced:
            raise ValueError(
                f"got an assignment to {replaced[0]!r} in forward, expected parameters and buffers that stay the "
                "same tensors: write into a buffer with copy_(), or keep what is made anew in a plain attribute"
            )
        return (y, {x: after[x] for x in changing}) if changing and returned else y

    function.module = skeleton  # type: ignore[attr-defined]
    return function


def _real_module(name: str, module: nn.Module, seed: int) -> tuple[Values, Values]:
    """The parameters and the buffers, by name, of a module on the meta device, made on the CPU by its
    `reset_parameters` with random `seed`."""
    real = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        for t in (*real.parameters(), *real.buffers()):
            if t.is_floating_point():
                t.fill_(math.nan)  # to detect what reset_parameters leaves out
    with torch.no_grad(), seeded_sequence(seed):
        for child in reversed([*real.modules()]):  # a module is reset after its children
            reset = getattr(child, "reset_parameters", None)
            if callable(reset):
                reset()
    for what, t in (*real.named_parameters(), *real.named_buffers()):
        if t.is_floating_point() and t.isnan().any():
            got, expected = f"no value for {what}", "reset_parameters of its module or a parent to set it"
            refuse(f"segment {name!r}", got, expected, "define it there, or build the module on the CPU")
    return _slots(real, "_parameters"), _slots(real, "_buffers")
