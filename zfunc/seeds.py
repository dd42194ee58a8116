"""Seeds from what random numbers are for, and the default generators seeded with one for a while.

The invariant: nothing depends on the state the generators are in, and they are given back as they were.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_generators = threading.Lock()  # the default generators are everybody's


def key(*parts: Any) -> int:
    """A 63-bit seed from anything that prints: equal parts, equal seed, on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """The default generators seeded with `number`, for one thread at a time, and given back as they were."""
    devices = [device] if device.type == "cuda" else []
    with _generators, torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(number)
        if devices:
            torch.cuda.default_generators[device.index].manual_seed(number)
        yield
