"""Random numbers that depend on a key alone: on no other thread, and no other thread on them.

The invariant: torch's default generators, which belong to every thread of the process, are neither seeded nor
advanced. Each draw of a segment has a seed of its own, folded from a key, the pass it is made in (forward or
backward) and its number there, so a recomputed forward draws the same numbers in whatever order they are needed.
Eager code is redirected operation by operation (`redirected`); traced code names its draws (`number_draws`).
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, count, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BACKWARD = 1 << 32  # number of the first draw of a backward; those of its forward count from 0
_default_generator = threading.Lock()
# .draws: those of the pass that this thread is in; .generators: one for each device.
_thread = threading.local()


def fold_seed(*parts: Any) -> int:
    """A 63-bit seed from the `repr` of `parts`: equal parts give an equal seed, on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Draws:
    """The random draws of one pass (a forward or backward of a segment): `count` were made so far; draw
    number n has a generator seeded by (`key`, n)."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.count = 0

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator on `device`, seeded for the next random draw of this pass."""
        self.count += 1
        return self.generator_of(self.count - 1, device)

    def generator_of(self, n: int, device: torch.device) -> torch.Generator:
        """A generator on `device`, seeded for random draw number `n` of this pass."""
        own: dict[torch.device, torch.Generator] = _thread.__dict__.setdefault("generators", {})
        if device not in own:
            own[device] = torch.Generator(device)
        return own[device].manual_seed(fold_seed(self.key, n))


@contextmanager
def seeded(number: int | None) -> Iterator[None]:
    """A context in which passes of segments in this thread take their random numbers from the seed `number`;
    with None, from torch's own generators."""
    before = getattr(_thread, "draws", None)
    _thread.draws = None if number is None else Draws(number)
    try:
        yield
    finally:
        _thread.draws = before


@contextmanager
def seeded_part(*part: int) -> Iterator[None]:
    """A context for a part of the pass that this thread is in, such as a tile: random draws are seeded by the
    pass's seed and the numbers `part`."""
    draws: Draws | None = getattr(_thread, "draws", None)
    with seeded(None if draws is None else fold_seed(draws.key, *part)):
        yield


def enter_backward() -> None:
    """Let this thread count random draws from a fixed number on, so that backward draws the same numbers
    whether it runs right after its forward or later."""
    draws: Draws | None = getattr(_thread, "draws", None)
    if draws is not None:
        draws.count = BACKWARD


def redirected() -> AbstractContextManager[Any]:
    """A context in which torch's random operations use generators seeded for the pass that this thread is in
    (`seeded`); without such a pass, nothing changes."""
    draws: Draws | None = getattr(_thread, "draws", None)
    return nullcontext() if draws is None else _Redirect(draws.generator)


def seeded_sequence(number: int) -> AbstractContextManager[Any]:
    """A context in which random operations on the CPU share one generator, seeded with `number`."""
    generator = torch.Generator().manual_seed(number)
    return _Redirect(lambda _device: generator)


class _Redirect(TorchDispatchMode):
    """A dispatch mode in which random operations use the generator that a function gives their device."""

    def __init__(self, generator: Callable[[torch.device], torch.Generator]) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        return _draw(func, args, kwargs, self._generator(_device(args, kwargs)))


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; attention, tagged as random, does not without dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for declared, given in zip_longest(func._schema.arguments, args, fillvalue=None):
        if declared is not None and declared.name == "dropout_p":
            value = given if given is not None else kwargs.get("dropout_p", declared.default_value)
            return bool(value)
    return True


def count_draws(graph: Graph) -> int:
    """The number of random operations in a traced graph."""
    return sum(is_draw_node(node) for node in graph.nodes)


def number_draws(graph: Graph, num_forward: int) -> None:
    """Number the random operations of a traced graph in the order of an eager run; the first `num_forward` of
    them are the forward's, the others the backward's. A node keeps its number when it is copied or moved."""
    numbers = chain(range(num_forward), count(BACKWARD))
    for node in graph.nodes:
        if is_draw_node(node):
            node.meta["draw"] = next(numbers)


def is_draw_node(node: Node) -> bool:
    """Whether a node of a graph draws random numbers."""
    return node.op == "call_function" and is_draw(node.target, node.args, node.kwargs)


def redirect_draws(graph: Graph, *, compiled: bool) -> None:
    """Change the numbered random operations of a traced graph: each uses a generator seeded by its number and
    the pass that runs the graph. `compiled`: whether torch.compile compiles the graph."""
    numbered = [node for node in graph.nodes if node.op == "call_function" and "draw" in node.meta]
    # Naming torch.compiler.disable imports Dynamo, which takes a second: not before something is compiled.
    drawn = torch.compiler.disable(_drawn) if numbered and compiled else _drawn
    for node in numbered:
        node.args = (node.meta.pop("draw"), node.target, *node.args)
        node.target = drawn


def _drawn(n: int, func: Any, *args: Any, **kwargs: Any) -> Any:
    draws: Draws | None = getattr(_thread, "draws", None)
    if draws is None:  # while costs are traced
        return func(*args, **kwargs)
    return _draw(func, args, kwargs, draws.generator_of(n, _device(args, kwargs)))


def _draw(func: Any, args: Any, kwargs: Any, generator: torch.Generator) -> Any:
    """The result of `func(*args, **kwargs)` with random numbers from `generator`."""
    if (overload := _with_generator(func)) is not None:
        return overload(*args, **{**kwargs, "generator": generator})
    if func is torch.ops.aten.native_dropout.default:
        return _native_dropout(*args, generator=generator, **kwargs)
    # Fused attention and cuDNN's recurrent layers take the default generator and no other. It is seeded for this
    # one operation and given back: a draw that another thread makes in that moment is lost.
    where = generator.device
    on_cpu = where.type == "cpu"
    shared = (
        torch.default_generator if on_cpu else torch.get_device_module(where).default_generators[where.index]
    )
    with _default_generator:
        before = shared.get_state()
        shared.manual_seed(generator.initial_seed())
        try:
            return func(*args, **kwargs)
        finally:
            shared.set_state(before)


def _with_generator(func: Any) -> Any:
    """The torch operator `func` if it takes a generator, else its overload with a generator, or None."""
    names = [a.name for a in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func._overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        others = [(a.name, str(a.type)) for a in overload._schema.arguments if a.name != "generator"]
        if len(others) < len(overload._schema.arguments) and others == [
            (a.name, str(a.type)) for a in func._schema.arguments
        ]:
            return overload
    return None


def _native_dropout(
    x: Tensor, p: float, train: bool | None = True, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute `aten.native_dropout` with a generator: the output, and the mask for its backward."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return (x * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask  # in place: a plan counts the two alone


def _device(args: Any, kwargs: Any) -> torch.device:
    """The device on which a random operation draws: the one named in its arguments, else that of its tensors."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor):
            return t.device
    return torch.device("cpu")
