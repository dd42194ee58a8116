"""Messages between pipeline stages: a pytree's tensors, in a number of bytes that both stages know from the plan,
and a head, the tree's structure in strict JSON.

The invariant: a received message is data. Nothing in a message is run or believed: its size is compared with the
plan's, and its tensors lie in the bytes that have come.
"""

import json
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.state.memory import ActivationSlot, OnHost
from zfunc.errors import RankError

FORM = "tensors, numbers, text and None, in lists, tuples and dicts"


def as_message(tree: Any, nbytes: int, *, pinned: bool = False) -> tuple[bytes, Tensor]:
    """Write a pytree as a message between ranks: its structure as JSON, and its tensors in one host tensor
    [nbytes], `pinned` so that copies from an accelerator need no wait.

    Raises TypeError for a leaf other than a tensor, number, text or None.
    """
    slot = ActivationSlot(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned))
    slot.put(tree)
    return json.dumps(_written(slot.tree)).encode(), slot.flat


def from_message(head: bytes, flat: Tensor) -> Any:
    """The pytree of a message of `as_message`, with tensors that are views of `flat`. Raises RankError for
    another `head`.

    >>> head, flat = as_message({"x": (torch.ones(2), None, "a")}, 512)
    >>> from_message(head, flat)
    {'x': (tensor([1., 1.]), None, 'a')}
    """
    try:
        return _read(json.loads(head), flat)
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise RankError(
            f"got a message with {head[:200]!r} ({type(error).__name__}: {error}), expected {FORM}: start every "
            "rank with the same code and versions"
        ) from error


def _written(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ["tensor", str(x.dtype), x.storage_offset(), [*x.shape], [*x.stride()]]
    if isinstance(x, OnHost):
        return ["host", str(x.value.dtype), x.value.tolist()]
    if type(x) in (list, tuple):
        return [type(x).__name__, *map(_written, x)]
    if type(x) is dict:
        return ["dict", *([_written(key), _written(value)] for key, value in x.items())]
    if x is None or type(x) in (bool, int, float, str):
        return x
    raise TypeError(f"got {type(x).__name__} between two pipeline stages, expected {FORM}: hand on these")


def _read(x: Any, flat: Tensor) -> Any:
    if not isinstance(x, list | dict):
        return x
    kind, *parts = x
    match kind:
        case "tensor":
            dtype, offset, shape, stride = parts
            return flat.view(_dtype(dtype)).as_strided(shape, stride, offset)
        case "host":
            return OnHost(torch.tensor(parts[1], dtype=_dtype(parts[0]), device="cpu"))
        case "list" | "tuple":
            return (list if kind == "list" else tuple)(_read(part, flat) for part in parts)
        case "dict":
            return {_read(key, flat): _read(value, flat) for key, value in parts}
        case _:
            raise ValueError(f"got {kind!r}")


def _dtype(name: str) -> torch.dtype:
    if not isinstance(dtype := getattr(torch, name.removeprefix("torch.")), torch.dtype):
        raise ValueError(f"got the type {name!r}")
    return dtype
