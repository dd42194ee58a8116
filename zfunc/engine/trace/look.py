"""A look at a segment's module before each step: cheap to take, to see whether facts need to be compared."""

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from zfunc.engine.trace.facts import MAX_DEPTH, MOST, is_open, version_of


@frozen(eq=False)
class Look:
    """A snapshot of a module, cheap to make, to see whether it has changed, made by `of`. `shown`: attributes and
    values in containers, compared by identity; `numbers`: how often buffers were written in place, and whether
    containers are empty; `values`: how often parameters were, and whether they are trained, by description."""

    of: "Watched"
    shown: list[Any]
    numbers: list[int]
    values: dict[str, int]

    def holds(self) -> bool:
        """Whether another snapshot, taken now of the same, shows no change."""
        other = self.of.look()
        alike = self.numbers == other.numbers and self.values == other.values
        return alike and len(self.shown) == len(other.shown) and all(map(is_, self.shown, other.shown))


@frozen(eq=False)
class Watched:
    """What a look at a module compares: functions that return the values of attributes and containers; the
    containers that are empty; the buffers; the parameters, by full name."""

    spaces: list[Callable[[], Iterable[Any]]]
    empty: list[Any]
    buffers: list[Tensor]
    parameters: Mapping[str, Tensor]

    def look(self) -> Look:
        """A snapshot of the module."""
        values = {f"the values of {x}": version_of(p) for x, p in self.parameters.items()}
        values |= {f"requires_grad of {x}": p.requires_grad for x, p in self.parameters.items()}
        shown = [x for space in self.spaces for x in space()]
        return Look(self, shown, [any(self.empty), *map(version_of, self.buffers)], values)


def look(module: nn.Module | None, parameters: Mapping[str, Tensor]) -> Look:
    """A snapshot of `module`, with `parameters` by full name; of nothing but these if it is None."""
    modules = [] if module is None else [*module.modules()]
    inside: dict[int, Any] = {}
    for m in modules:
        for x in vars(m).values():
            _enter(x, inside, 0)
    full = [*map(vars, modules), *(x for x in inside.values() if 0 < len(x) <= MOST)]
    spaces = [x.values if isinstance(x, dict) else x.__iter__ for x in full]
    buffers = [t for m in modules for t in m._buffers.values() if t is not None]
    return Watched(spaces, [x for x in inside.values() if not x], buffers, parameters).look()


def _enter(x: Any, inside: dict[int, Any], depth: int) -> None:
    """Enter in `inside`, by identity, the dicts and lists in `x`, those of the attributes of objects too."""
    content = x if isinstance(x, dict | list) else vars(x) if is_open(x) else None
    if content is None or id(content) in inside or depth == MAX_DEPTH:
        return
    inside[id(content)] = content
    if len(content) <= MOST:
        for y in [*content.values()] if isinstance(content, dict) else content:
            _enter(y, inside, depth + 1)
