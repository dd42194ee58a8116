"""Keys of a row in tiles: on the host they are the same, and each is put there once."""

from itertools import product
from typing import Any

import pytest
import torch
from hf_models import layers, rows
from pairs import in_pairs
from tile_law import cast, passes_of

from zfunc.engine.rows.keys import DeviceKeys, HostKeys
from zfunc.engine.trace.host_keys import HostMemory


@pytest.mark.parametrize(
    ("way", "name"),
    in_pairs(product([True, False], [torch.float32, torch.bfloat16]), ["GPT-2", "Mistral, window", "Qwen3"]),
)
def test_keys_on_the_host_change_no_bit(way: tuple[bool, torch.dtype], name: str) -> None:
    """And nothing is written behind the bytes that they say they take."""
    documents, dtype = way
    segment, values, x = next(layers(name, rows(documents)))
    values, x = cast(values, dtype), cast(x, dtype)
    for tiles in (2, 8):
        host = HostMemory(torch.full((1 << 20,), 255, dtype=torch.uint8))
        on_host = passes_of(segment, values, x, tiles, host)
        assert all(map(torch.equal, on_host.values(), passes_of(segment, values, x, tiles).values()))
        assert host.flat is not None
        assert 0 < host.nbytes < 1 << 20
        assert (host.flat[host.nbytes :] == 255).all()
        assert host.copied_bytes


@pytest.mark.parametrize("place", [DeviceKeys, HostKeys])
def test_a_pass_keeps_the_keys_of_a_tile_once(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though backward makes them twice."""
    kept, put = list[Any](), place.put
    monkeypatch.setattr(
        place, "put", lambda keys, part, made: (kept.append((keys, part)), put(keys, part, made))
    )
    host = HostMemory(torch.empty(1 << 20, dtype=torch.uint8)) if place is HostKeys else None
    segment, values, x = next(layers("GPT-2", rows(documents=False)))
    passes_of(segment, values, x, 4, host)
    assert len(kept) >= 2 * 4  # alive, so that each has a number of its own
    assert len({(id(keys), part) for keys, part in kept}) == len(kept)
