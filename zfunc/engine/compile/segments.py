"""A model as its segments, checked together.

An `nn.Sequential` becomes one for each child that has parameters, with those after it that have none.
"""

import inspect
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn

from zfunc.core.layout import Parameter
from zfunc.engine.compile.segment import Segment, check_hooks, check_memory_apart, make_segment
from zfunc.errors import did_you_mean
from zfunc.values import of_type


def checked_segments(segments: Iterable[Segment] | nn.Sequential) -> tuple[Segment, ...]:
    """The segments of a model, checked together: their names, what they share and what they must not."""
    if isinstance(segments, nn.Sequential):
        segments = segments_of_sequential(segments)
    of_type(
        "segments",
        segments,
        Iterable,
        "a list of Segments: pass [segment, ...], an nn.Sequential that ends in a loss, or for a model of "
        "transformers zfunc.hf.segments(model)",
    )
    segments = tuple(segments)
    if not segments:
        raise ValueError(
            "segments: got none, expected at least one: pass them, the last one ending in the loss"
        )
    for s in segments:
        if not isinstance(s, Segment):
            raise TypeError(
                f"segments: got a {type(s).__name__}, expected Segments: use zfunc.segment(name, module)"
            )
    for name, times in Counter(s.name for s in segments).items():
        if times > 1:
            raise ValueError(f"segments: got two named {name!r}, expected unique names: rename one")
    known: dict[str, Parameter] = {}
    origins: dict[int, str] = {}
    for s in segments:
        owned = {p.name: p for p in s.parameters if p.name not in s.shared}
        for name, p in owned.items():
            if name in known:
                raise ValueError(
                    f"segments: got two parameters named {name!r}, expected unique names: rename "
                    f"segment {s.name!r}, or tie them with share="
                )
            known[name] = p
        check_hooks(s.name, s.origins)
        for name, tensor in s.origins.items():
            if origins.setdefault(id(tensor), name) != name and name not in s.shared:
                raise ValueError(
                    f"segments: got one tensor as {origins[id(tensor)]!r} and {name!r}, expected tied parameters "
                    f"to be declared: segment({s.name!r}, ..., share={{...: {origins[id(tensor)]!r}}})"
                )
    check_memory_apart("segments", {name: t for s in segments for name, t in s.origins.items()})
    changed: dict[int, str] = {}
    for s in segments:
        for short, tensor in s.changed_tensors.items():
            other = changed.setdefault(tensor, name := f"{s.name}.{short}")
            if other != name:
                raise ValueError(
                    f"segments: got one buffer as {other!r} and {name!r}, which forward changes in both, expected "
                    "each segment to have its own: put both uses into one segment, or copy the module"
                )
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
    """Modules that run one after the other, of which the last gets the targets."""

    def forward(self, x: Any, *targets: Any) -> Any:
        """The loss with targets; without, what it would get."""
        *before, loss = self
        for child in before:
            x = child(x)
        return loss(x, *targets) if targets else x


def segments_of_sequential(module: nn.Sequential) -> tuple[Segment, ...]:
    """The children of `module` as segments. Parameters have the names of its state dict, tied ones the first.

    Raises ValueError unless the last child is a loss of (x, targets).
    """
    if not len(module):
        return ()
    loss = module[-1]
    try:
        inspect.signature(loss.forward).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"segments: got an nn.Sequential that ends in a {type(loss).__name__}, expected a loss of (x, targets) "
            "as the last: append such as nn.CrossEntropyLoss()"
        ) from error
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
