"""A model as a tuple of segments: checks of what they share, and the segments of an `nn.Sequential`, one for each
child that has parameters, with the children after it that have none."""

import inspect
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn

from zfunc.core.layout import Parameter
from zfunc.engine.trace.segment import Segment, check_hooks, check_memory_apart, make_segment
from zfunc.errors import SettingTypeError, did_you_mean, refuse
from zfunc.values import of_type

NO_LOSS = (
    "a function of (output, targets)",
    "pass zfunc.segments(model, (inputs, targets), torch.nn.functional.cross_entropy), or a loss of your own",
)
"""What is expected where a model has no loss of its own, and what to do."""


def checked_segments(segments: Iterable[Segment] | nn.Sequential) -> tuple[Segment, ...]:
    """The segments of a model as a tuple, after checks of their names, tied parameters, hooks and memory."""
    # 1. Whether they are segments.
    if isinstance(segments, nn.Sequential):
        segments = segments_of_sequential(segments)
    if isinstance(segments, type) and issubclass(segments, nn.Module):
        of_type("segments", segments, nn.Module, "a model, or a list of Segments")
    expected = (
        "a model or a list of Segments: pass an nn.Module with `example`, [segment, ...], or for a causal "
        "language model of transformers zfunc.hf.segments(model)"
    )
    of_type("segments", segments, Iterable, expected)
    segments = tuple(segments)
    if not segments:
        refuse("segments", "none", "at least one", "pass them, the last one ending in the loss")
    for s in segments:
        if not isinstance(s, Segment):
            got = f"a {type(s).__name__}"
            refuse("segments", got, "Segments", "use zfunc.segment(name, module)", SettingTypeError)
    for name, times in Counter(s.name for s in segments).items():
        if times > 1:
            refuse("segments", f"two named {name!r}", "unique names", "rename one")
    # 2. Whether each parameter, tensor and buffer that forward changes has one owner.
    owned: dict[str, Parameter] = {}
    origins: dict[int, str] = {}
    changed: dict[int, str] = {}
    for s in segments:
        for p in (p for p in s.parameters if p.name not in s.shared):
            if p.name in owned:
                got = f"two parameters named {p.name!r}"
                refuse("segments", got, "unique names", f"rename segment {s.name!r}, or tie them with share=")
            owned[p.name] = p
        check_hooks(s.name, s.origins)
        for name, tensor in s.origins.items():
            if (other := origins.setdefault(id(tensor), name)) != name and name not in s.shared:
                got, do = f"one tensor as {other!r} and {name!r}", f"share={{...: {other!r}}})"
                refuse("segments", got, "tied parameters to be declared", f"segment({s.name!r}, ..., {do}")
        for short, tensor in s.changed_tensors.items():
            if (other := changed.setdefault(tensor, name := f"{s.name}.{short}")) != name:
                got = f"one buffer as {other!r} and {name!r}, which forward changes in both"
                do = "put both uses into one segment, or copy the module"
                refuse("segments", got, "each segment to have its own", do)
    check_memory_apart("segments", {name: t for s in segments for name, t in s.origins.items()})
    # 3. Whether shared parameters are those of another segment.
    for s in segments:
        for short, p in zip(s.short, s.parameters, strict=True):
            if p.name not in owned:
                raise ValueError(
                    f"segment {s.name!r}: {short} is shared with {p.name!r}, which no segment has"
                    f"{did_you_mean(p.name, list(owned))}: pass the full name, 'segment.name in its module'"
                )
            if p.shape != owned[p.name].shape:
                raise ValueError(
                    f"segment {s.name!r}: {short} has shape {p.shape}, but {p.name!r}, which it shares, has "
                    f"{owned[p.name].shape}: tied parameters have one shape"
                )
    return segments


class EndsInLoss(nn.Sequential):
    """An nn.Sequential whose last module is a loss, which also gets the targets."""

    def forward(self, x: Any, *targets: Any) -> Any:
        """The loss of input `x` and `targets`; without targets, the output of all modules but the loss."""
        *before, loss = self
        for child in before:
            x = child(x)
        return loss(x, *targets) if targets else x


def check_loss(loss: Any) -> None:
    """Raise SettingTypeError unless `loss` is a function or a module of (output, targets), or None."""
    if isinstance(loss, type):
        refuse("loss", f"the class {loss.__name__}", NO_LOSS[0], f"pass {loss.__name__}()", SettingTypeError)
    if loss is not None and not callable(loss):
        refuse("loss", f"an object of class {type(loss).__name__}", *NO_LOSS, SettingTypeError)


def ends_in_loss(module: nn.Module) -> bool:
    """Whether a module is an `nn.Sequential` that is empty, or whose last child takes (x, targets)."""
    if not isinstance(module, nn.Sequential) or not len(module):
        return isinstance(module, nn.Sequential)
    try:
        inspect.signature(module[-1].forward).bind(None, None)
    except TypeError:
        return False
    return True


def segments_of_sequential(module: nn.Sequential) -> tuple[Segment, ...]:
    """The children of `module` as segments. Parameters are named as in its state dict, tied ones by the first name.

    Raises ValueError unless the last child is a loss of (x, targets).
    """
    if not len(module):
        return ()
    if not ends_in_loss(module):
        got = f"an nn.Sequential that ends in a {type(module[-1]).__name__}"
        do = "append such as nn.CrossEntropyLoss(), or pass zfunc.segments(model, example)"
        refuse("segments", got, "a loss of (x, targets) as the last", do)
    groups: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for name, child in module._modules.items():
        if _has_parameters(child) and any(map(_has_parameters, groups[-1].values())):
            groups.append(OrderedDict())
        groups[-1][name] = child
    known: dict[int, str] = {}  # the name of each parameter so far
    segments: list[Segment] = []
    for group in groups:
        name = next((x for x, child in group.items() if _has_parameters(child)), next(iter(group)))
        part = EndsInLoss(group) if group is groups[-1] else nn.Sequential(group)
        named = part.named_parameters(remove_duplicate=False)
        share = {short: known[id(p)] for short, p in named if id(p) in known}
        segments.append(make_segment(name, part, share, ""))
        for full, p in segments[-1].origins.items():
            known.setdefault(id(p), full)
    return tuple(segments)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
