"""The work of a segment with many parameters, each in a bucket of its own, and of planning many segments, grows as
their number and no faster."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import table
import torch
from torch import Tensor

from zfunc.core.graph import Region
from zfunc.core.layout import Bucket, Parameter, make_layout
from zfunc.core.pipeline import B, F
from zfunc.core.slots import Ring
from zfunc.engine.stages.stages import _weights, pack  # pyright: ignore
from zfunc.engine.state.memory import Flat
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.engine.trace.vjp import paths_of, pull_of

FEW, MANY = 1_000, 4_000  # four times as much, with the square sixteen times
MOST = 9


def segment(n: int) -> tuple[Any, tuple[Bucket, ...]]:
    names = {f"w{i}": f"w{i}" for i in range(n)}
    layout = make_layout([[Parameter(name, (1,)) for name in names]], bucket_size=64)
    assert len(layout.buckets) == n
    call = SimpleNamespace(trained=names, fixed={}, name="s")
    return SimpleNamespace(
        spec=SimpleNamespace(layout=layout), calls=[call], constants={(0, 0): {}}
    ), layout.buckets


def reading_weights(n: int) -> Callable[[], Any]:
    step, buckets = segment(n)
    mem: Any = {Region("params", (x.index,)): Flat.of(torch.zeros(x.numel), x) for x in buckets}
    op: Any = SimpleNamespace(operands=lambda _: mem, device=0, index=(0, 0))  # pyright: ignore
    return lambda: _weights(op, mem, step, {})


def packing(n: int) -> Callable[[], Any]:
    step, buckets = segment(n)
    slot, grad = Region("grad_slot", (0,)), torch.ones(1)
    mem: Any = {slot: torch.empty(64), "grads": {x.name: grad for b in buckets for x in b.spans}}
    parts: dict[str, Any] = {"write": lambda _: slot, "read": lambda _: "grads", "reads": ()}  # pyright: ignore
    ops: Any = [SimpleNamespace(index=(0, b.index, 0), **parts) for b in buckets]
    return lambda: [pack(op, mem, step) for op in ops]


def taking_slots(n: int) -> Callable[[], Any]:
    ring = Ring.reused(Region("slot"), dict.fromkeys(range(n), 64), [range(n)], depth=1)
    return lambda: (ring.take(range(n)), ring.take(range(n)[::-1]))


def passing_through(n: int) -> Callable[[], Any]:
    return lambda: Ring.passing(Region("slot"), dict.fromkeys(range(n // 20), 0), range(n // 20), depth=2)


def finding_paths(n: int) -> Callable[[], Any]:
    def function(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for w in params.values():
            x = x + w
        return x

    weights = SegmentWeights({f"w{i}": torch.zeros(1) for i in range(n)}, {}, "s")
    return lambda: paths_of(pull_of(function, True, False), weights, (torch.zeros(1),))


def following_runs(n: int) -> Callable[[], Any]:
    mesh = table.spec([[Parameter(f"p{s}", (8,))] for s in range(n // 4)]).mesh
    return lambda: [mesh.run_of(way, 0, s) for way in (F, B) for s in range(n // 4)]


MAKERS = reading_weights, packing, taking_slots, passing_through, finding_paths, following_runs


@pytest.mark.parametrize("make", MAKERS)
def test_its_work_grows_as_their_number(make: Callable[[int], Callable[[], Any]]) -> None:
    def seconds(n: int) -> float:
        work, times = make(n), list[float]()
        for _ in range(3):
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds(MANY) < MOST * seconds(FEW)
