"""Caches of the user's code (dicts, lists, `functools.cache`): none keeps tensors of a trace, without values."""

import copy
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.facts import MAX_DEPTH, MOST, is_open, of_library

CACHED = type(cache(repr))  # of a function with a cache


@contextmanager
def without_traced(values: Iterable[Any]) -> Iterator[None]:
    """A context in which a trace is made. Afterwards the caches among `values` and in them are as before if they
    have got tensors without values; functions with a cache of a limited size that have been called forget all
    results."""
    caches = [(x, x.cache_info() if isinstance(x, CACHED) else copy.copy(x)) for x in _caches(values)]
    try:
        yield
    finally:
        for x, before in caches:
            if isinstance(x, CACHED) and x.cache_info() != before:
                x.cache_clear()
            elif not isinstance(x, CACHED) and any(map(is_fake, tree_leaves(_inside(x)))):
                x.clear()
                (x.update if isinstance(x, dict) else x.extend)(before)


def _caches(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the dicts, lists and functions with a cache among `values` and in them."""
    seen, queue = dict[int, Any](), [(x, 0) for x in values]
    while queue:
        x, depth = queue.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, dict | list | CACHED):
            yield _results_of(x) if isinstance(x, CACHED) else x
        mine = isinstance(x, type) and not of_library(x)
        inside = vars(x) if mine or is_open(x, called=True) else x
        if isinstance(inside, Mapping | list) and len(inside) <= MOST and depth < MAX_DEPTH:
            queue += [(y, depth + 1) for y in _inside(inside)]


def _results_of(f: Any) -> Any:
    """The dict in which a function with a cache keeps results; of one of a limited size, whose dict has no results
    but places in a list, the function itself."""
    if f.cache_parameters()["maxsize"] is not None:
        return f
    return next(x for x in gc.get_referents(f) if type(x) is dict and x is not vars(f))


def _inside(x: Mapping[Any, Any] | list[Any]) -> list[Any]:
    return x if isinstance(x, list) else [*x.values()]
