"""Caches of the user's code (dicts, lists, attributes of objects and classes, `functools.cache`): none keeps
tensors of a trace, without values."""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.facts import MAX_DEPTH, MOST, is_open, of_library

CACHED = type(cache(repr))  # of a function with a cache


@contextmanager
def without_traced(values: Iterable[Any]) -> Iterator[None]:
    """A context in which a trace is made. Afterwards the caches among `values` and in them are as before if they
    have got tensors without values; functions with a cache that have been called have the results from before, and
    forget all if the cache is of a limited size."""
    undo = [_undo(x) for x in _caches(values)]
    try:
        yield
    finally:
        for f in undo:
            f()


def _undo(x: Any) -> Callable[[], None]:
    """A function that sets the contents of `x` to those of now, if it has got tensors without values by then."""
    if isinstance(x, CACHED):
        return partial(_forget_results, x, x.cache_info(), {**_results_of(x)})
    return partial(_set_back, x, _contents(x))


def _forget_results(f: Any, info: Any, before: Mapping[Any, Any]) -> None:
    if f.cache_info() != info:
        f.cache_clear()
        _results_of(f).update(before)


def _set_back(x: Any, before: Mapping[Any, Any]) -> None:
    now = _contents(x)
    if not _has_traced([v for k, v in now.items() if k not in before or before[k] is not v]):
        return
    if isinstance(x, type):
        for name in now.keys() - before.keys():
            delattr(x, name)
        for name in (k for k, v in before.items() if now.get(k) is not v):
            setattr(x, name, before[name])
    else:
        set_contents(x, before)


def set_contents(x: Any, contents: Mapping[Any, Any]) -> None:
    """Set what is in a list, deque or dict `x`, or in attributes of an object, by place, key or name."""
    if isinstance(x, list | deque):
        x.clear()
        x.extend(contents.values())
    else:
        own = x if isinstance(x, dict) else vars(x)
        own.clear()
        own.update(contents)


def _caches(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what may keep tensors among `values` and in them: dicts, lists, the user's objects and classes, and
    functions with a cache."""
    seen, queue = dict[int, Any](), [(x, 0) for x in values]
    while queue:
        x, depth = queue.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        mine = is_open(x, called=True) or (isinstance(x, type) and not of_library(x))
        if mine or isinstance(x, dict | list | CACHED):
            yield x
        if (
            (mine or isinstance(x, Mapping | list))
            and depth < MAX_DEPTH
            and len(inside := _contents(x)) <= MOST
        ):
            queue += [(y, depth + 1) for y in inside.values()]


def _contents(x: Any) -> dict[Any, Any]:
    """What is in a container, by key or place, or in attributes of an object or class, by name."""
    if isinstance(x, list):
        return dict(enumerate(x))
    return dict(x.items()) if isinstance(x, dict) or not hasattr(x, "__dict__") else {**vars(x)}


def _has_traced(values: list[Any], depth: int = 0) -> bool:
    """Whether there are tensors without values among `values`, in containers, or in attributes of objects."""
    leaves = tree_leaves(values)
    inside = [[*_contents(x).values()] for x in leaves if isinstance(x, Mapping) or is_open(x, called=True)]
    return any(map(is_fake, leaves)) or (depth < MAX_DEPTH and any(_has_traced(x, depth + 1) for x in inside))


def _results_of(f: Any) -> dict[Any, Any]:
    """The dict in which a function with a cache keeps results; an empty one for a cache of a limited size, whose
    own has no results but places in a list."""
    if f.cache_parameters()["maxsize"] is not None:
        return {}
    return next(x for x in gc.get_referents(f) if type(x) is dict and x is not vars(f))
