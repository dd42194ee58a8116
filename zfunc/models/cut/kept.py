"""What forward keeps in a copy of the user's model (a loss of its own, features of a hook), shown in the user's
model while a loss runs that closes over it.

A trace calls a copy. Objects of the two are paired by their places before a call; while the loss runs, those of the
user's have the contents of the copy's, and what the loss changes there goes back into the copy.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from zfunc.engine.trace.facts import PLAIN, content_of, is_open
from zfunc.engine.trace.user_caches import set_contents

Pairs = Mapping[int, tuple[Any, Any]]


def counterparts(model: Any, copied: nn.Module) -> Pairs:
    """Pairs of what is at one place in `model` and in its copy, by the identity of the first: modules, objects of
    the user's classes, dicts, lists, functions, and what is in them."""
    found, left = dict[int, tuple[Any, Any]](), [(model, copied)]
    while left:
        a, b = left.pop()
        alike = type(a) is type(b) or (isinstance(a, nn.Module) and isinstance(b, nn.Module))
        if a is b or id(a) in found or not alike or isinstance(a, PLAIN):
            continue
        if not (_written(a) or _contents(a)):
            continue  # what is not looked into, such as a set, is read where it is
        found[id(a)] = a, b
        others = dict(_contents(b))
        left += [(x, others[k]) for k, x in _contents(a) if k in others]
    return found


@contextmanager
def shown(pairs: Pairs) -> Iterator[None]:
    """A context in which the user's objects, the first of each of `pairs`, have the contents of their copies, the
    second. At its end the copies get what was changed meanwhile, unless an error was raised, and the user's objects
    have their own contents again. No other thread may use the user's model meanwhile."""
    users = [(user, [*_contents(user)]) for user, _ in pairs.values() if _written(user)]
    try:
        _copy_contents(((b, a) for a, b in pairs.values()), {id(b): a for a, b in pairs.values()})
        yield
        _copy_contents(pairs.values(), {x: b for x, (_, b) in pairs.items()})
    finally:
        for user, contents in users:
            _set_contents(user, contents)


def _copy_contents(pairs: Iterable[tuple[Any, Any]], others: Mapping[int, Any]) -> None:
    """Give the second of each of `pairs` the contents of the first, but of what has a counterpart in `others`, by
    identity, that."""
    given = [
        (target, [(k, others.get(id(x), x)) for k, x in _contents(source)])
        for source, target in pairs
        if _written(source)
    ]
    for target, contents in given:
        _set_contents(target, contents)


def _contents(x: Any) -> Iterable[tuple[Any, Any]]:
    """What is in an object, by name or place; nothing in an object that is not looked into."""
    if isinstance(x, list | tuple | deque):
        return enumerate(x)
    if isinstance(x, FunctionType):
        return enumerate(content_of(cell) for cell in x.__closure__ or ())
    if isinstance(x, MethodType):
        return (("__self__", x.__self__),)
    if isinstance(x, partial):
        return (("func", x.func), ("args", x.args), ("keywords", x.keywords))
    return x.items() if isinstance(x, dict) else vars(x).items() if _has_attributes(x) else ()


def _has_attributes(x: Any) -> bool:
    return isinstance(x, nn.Module) or is_open(x, called=True)


def _written(x: Any) -> bool:
    return isinstance(x, list | deque | dict) or _has_attributes(x)


def _set_contents(x: Any, contents: list[tuple[Any, Any]]) -> None:
    """Set what is in an object, as of `_contents`, unless it is that."""
    own = [*_contents(x)]
    if len(own) == len(contents) and all(
        k == n and a is b for (k, a), (n, b) in zip(own, contents, strict=True)
    ):
        return
    set_contents(x, dict(contents))
