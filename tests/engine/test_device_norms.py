"""Norms that a device sends and the host squares: the bits of squares summed on the device, in four launches."""

import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

import zfunc
from zfunc.core.layout import Bucket
from zfunc.core.region_table import SUM_PARTS
from zfunc.engine.program.specialize import specialize
from zfunc.engine.stages import clipping_stages, stages
from zfunc.engine.state.memory import allocate_regions
from zfunc.optim.updates import exact_parts

CPU = torch.device("cpu")
NOTHING = torch.zeros(SUM_PARTS, dtype=torch.float64)
VIEWS = ("aten.slice", "aten.view", "aten.detach")


class Dispatches(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "on_accelerator", lambda device: True)


def measured(
    norms: bool, grads: dict[int, torch.Tensor], program: Any, graph: Any
) -> tuple[Any, Counter[str]]:
    """What `global_norm` writes for these gradients, and the dispatches of one bucket's `square_sum`."""
    of = SimpleNamespace(
        spec=SimpleNamespace(layout=program.layout, settings=SimpleNamespace(norms=norms)),
        shards=[slice(0, x.numel) for x in program.layout.buckets],
        ranks=SimpleNamespace(several=False, sums=list),
        devices=(CPU,),
        loss_scale=1.0,
    )
    regions = [r for r in graph.regions if r.role == "squares"]
    mem: dict[Any, Any] = allocate_regions(regions, [CPU], [])
    for op in (x for x in graph if x.verb in ("square_sum", "squares_to_host")):
        (b,) = op.index
        for r in op.reads if op.verb == "square_sum" else ():
            mem[r] = grads[b]
        with Dispatches() as dispatches:
            stages.STAGES[op.verb](op, mem, of)  # type: ignore[arg-type]
        if op.verb == "square_sum":
            count = dispatches.count
    (norm,) = (x for x in graph if x.verb == "global_norm")
    clipping_stages.global_norm(norm, mem, of)  # type: ignore[arg-type]
    return {r.buffer: mem[r] for r in norm.writes}, count


def norms_of(bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
    """The norm of each parameter, as a device has them."""
    pieces = [grad[first:last] for first, last, _ in bucket.spans_within(0, bucket.numel)]
    return torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float32))


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("norms", [False, True])
def test_the_bits_are_those_of_squares_summed_on_the_device(norms: bool) -> None:
    """200 random gradients from 1e-30 to 1e20, in buckets of one to dozens of parameters; some not finite."""
    segments, data = MODELS["odd sizes"]()
    random.seed(0)
    for size in (600, 1 << 20):
        program = zfunc.compile(segments, optimizer=zfunc.AdamW(), bucket_size=size, norms=norms)
        graph = specialize(program, data(0)).plan.graph
        for case in range(50):
            torch.manual_seed(case)
            sizes = {b.index: (b.numel, 10.0 ** random.uniform(-30, 20)) for b in program.layout.buckets}
            grads = {b: torch.randn(n) * scale for b, (n, scale) in sizes.items()}
            if case % 10 == 0:
                grads[0][random.randrange(10)] = random.choice([math.inf, math.nan, 1e30])
            of_device = [norms_of(b, grads[b.index]) for b in program.layout.buckets]
            found, _ = measured(norms, grads, program, graph)
            parts = sum((exact_parts(row.double().square_()) for row in of_device), NOTHING)
            assert repr(found["norm"]) == repr(math.sqrt(math.fsum(parts.tolist())))
            each = [[x**2 for x in row.tolist()] for row in of_device]
            if case % 10:  # fsum raises for NaN beside inf
                assert found["norm"] == math.sqrt(math.fsum(x for row in each for x in row))
            if norms:
                assert [repr(x) for x in found["norms"]] == [repr(math.sqrt(x)) for row in each for x in row]


@pytest.mark.usefixtures("as_on_a_device")
def test_a_bucket_is_measured_in_a_norm_and_a_stack() -> None:
    """Each dispatch is a launch, and all launches wait for one interpreter; views are none."""
    segments, data = MODELS["odd sizes"]()
    program = zfunc.compile(segments, optimizer=zfunc.AdamW(), bucket_size=1 << 20)
    graph = specialize(program, data(0)).plan.graph
    grads = {b.index: torch.ones(b.numel) for b in program.layout.buckets}
    _, count = measured(False, grads, program, graph)
    launched = {name: n for name, n in count.items() if name not in VIEWS}
    assert launched == {"aten._foreach_norm": 1, "aten.stack": 1}
