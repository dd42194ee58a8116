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
    if isinstance(segments, nn.Sequential):
        segments = segments_of_sequential(segments)
    if isinstance(segments, type) and issubclass(segments, nn.Module):
        of_type("segments", segments, nn.Module, "a model, or a list of Segments")
    of_type(
        "segments",
        segments,
        Iterable,
        "a list of Segments: pass [segment, ...], an nn.Sequential that ends in a loss, or for a causal "
        "language model of transformers zfunc.hf.segments(model)",
    )
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
    known: dict[str, Parameter] = {}
    origins: dict[int, str] = {}
    for s in segments:
        owned = {p.name: p for p in s.parameters if p.name not in s.shared}
        for name, p in owned.items():
            if name in known:
                got = f"two parameters named {name!r}"
                refuse("segments", got, "unique names", f"rename segment {s.name!r}, or tie them with share=")
            known[name] = p
        check_hooks(s.name, s.origins)
        for name, tensor in s.origins.items():
            if origins.setdefault(id(tensor), name) != name and name not in s.shared:
                got = f"one tensor as {origins[id(tensor)]!r} and {name!r}"
                do = f"segment({s.name!r}, ..., share={{...: {origins[id(tensor)]!r}}})"
                refuse("segments", got, "tied parameters to be declared", do)
    check_memory_apart("segments", {name: t for s in segments for name, t in s.origins.items()})
    changed: dict[int, str] = {}
    for s in segments:
        for short, tensor in s.changed_tensors.items():
            other = changed.setdefault(tensor, name := f"{s.name}.{short}")
            if other != name:
                got = f"one buffer as {other!r} and {name!r}, which forward changes in both"
                expected = "each segment to have its own"
                refuse("segments", got, expected, "put both uses into one segment, or copy the module")
    for s in segments:
        for short, p in zip(s.short, s.parameters, strict=True):
            if p.name not in known:
                raise ValueError(
                    f"segment {s.name!r}: {short} is shared with {p.name!r}, which no segment has"
                    f"{did_you_mean(p.name, list(known))}: pass the full name, 'segment.name in its module'"
                )
            if p.shape != known[p.name].shape:
                raise ValueError(
                    f"segment {s.name!r}: {short} has shape {p.shape}, but {p.name!r}, which it shares, has "
                    f"{known[p.name].shape}: tied parameters have one shape"
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
    loss = module[-1]
    if not ends_in_loss(module):
        got = f"an nn.Sequential that ends in a {type(loss).__name__}"
        do = "append such as nn.CrossEntropyLoss(), or pass zfunc.segments(model, example)"
        refuse("segments", got, "a loss of (x, targets) as the last", do)
    groups: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for name, child in module._modules.items():
        if _has_parameters(child) and any(map(_has_parameters, groups[-1].values())):
            groups.append(OrderedDict())
        groups[-1][name] = child
    known: dict[int, str] = {}  # the name of each parameter so far
    made: list[Segment] = []
    for group in groups:
        name = next((x for x, child in group.items() if _has_parameters(child)), next(iter(group)))
        part = EndsInLoss(group) if group is groups[-1] else nn.Sequential(group)
        named = part.named_parameters(remove_duplicate=False)
        share = {short: known[id(p)] for short, p in named if id(p) in known}
        made.append(make_segment(name, part, share, ""))
        for full, p in made[-1].origins.items():
            known.setdefault(id(p), full)
    return tuple(made)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
