"""Streams, threads, clocks and rates of a device: no copy overtakes, graphs are where torch has them."""

import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_training import compiled, gpt, needs, weights_of
from small_models import Loss
from torch import Tensor, nn

import zfunc
from zfunc.cli.commands import doctor
from zfunc.core.timeline import Timeline
from zfunc.engine.program.fit_to_memory import measured_rates
from zfunc.engine.program.specialize import specialize
from zfunc.engine.stages import move_stages
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.trace import joint_graph, traced_passes
from zfunc.planner.calibrate import clocked, issue_seconds, measure_launch
from zfunc.runtime.executor import Executor


def test_times_of_several_devices_are_on_one_clock(device: str) -> None:
    """Each operation begins after those that it waits for have ended, whatever device they are on, and whatever one
    of them has to do before the step."""
    program, batch = gpt(device, devices=3, micro_batches=4, tied=False)
    state = zfunc.init(program)
    for _ in range(2):
        busy = torch.eye(64, device=program.devices[2])
        for _ in range(1000):
            busy = busy @ busy
        state, metrics = zfunc.train_step(program, state, batch, trace=True)
    plan, events = metrics.plan, {x.op: x for x in metrics.timeline.events}
    slack = 3e-2 if device == "pretend" else 1e-4  # between the moments at which devices begin to count
    for op, waits in zip(plan.graph, plan.waits, strict=True):
        for n in waits:
            assert events[plan.graph.ops[n].name].end <= events[op.name].start + slack
    assert all(-slack <= x.start <= x.end <= metrics.seconds + slack for x in events.values())
    assert {x.lane for x in events.values()} >= {"compute", "compute:1", "compute:2"}


def test_all_that_a_device_was_given_is_done_when_it_was_synchronized(device: str) -> None:
    busy = torch.eye(64, device=device)
    for _ in range(100):
        busy = busy @ busy
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().query()


def overlap(timeline: Timeline, one: str, other: str) -> float:
    """Seconds in which an operation of each kind was running."""
    spans = [[(e.start, e.end) for e in timeline.events if e.kind == kind] for kind in (one, other)]
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans[0] for b in spans[1])


@pytest.mark.gpu
def test_copies_and_host_updates_really_overlap_compute() -> None:
    program, batch = gpt("cuda")
    state = zfunc.init(program)
    for _ in range(2):
        state, metrics = zfunc.train_step(program, state, batch)
    state, metrics = zfunc.train_step(program, state, batch, trace=True)
    timeline = metrics.timeline
    assert timeline is not None
    assert overlap(timeline, "d2h", "compute") > 0.5 * timeline.seconds_of("d2h")
    assert overlap(timeline, "host", "compute") > 0


@pytest.mark.parametrize(
    ("host", "copies", "expected"),
    [(1e12, 1e9, "host"), (1e9, 1e12, "device"), (1e9, 4e8, "host,device"), (1e9, 2.5e8, "host:0.75,device")],
)
def test_updates_are_where_they_take_least(
    device: str, host: float, copies: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zfunc.engine.program.fit_to_memory.measured_rates", lambda _: (host, copies))
    _, data = compiled("odd sizes", device)
    program, _ = compiled("odd sizes", device, update_on="auto", example=data(0))
    assert program.settings.update_on == expected


def test_the_rates_of_updates_are_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sweep by what no cache holds, of copies both ways at once."""
    swept, copied, update, copy = list[int](), list[str](), zfunc.AdamW.host_update, torch.Tensor.copy_
    synchronize = torch.accelerator.synchronize

    def host_update(_: Any, state: dict[str, Tensor], grad: Tensor, *more: Any, **given: Any) -> None:
        few = {name: x[:4096] for name, x in state.items()}
        swept.append(grad.nbytes + sum(x.nbytes for x in state.values()))
        update(zfunc.AdamW(), few, grad[:4096], *more, **given)

    def copy_(into: Tensor, source: Tensor, **given: Any) -> Tensor:
        copied.append(into.device.type)
        return copy(into[:4096], source[:4096], **given)

    monkeypatch.setattr(zfunc.AdamW, "host_update", host_update)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *x: (synchronize(*x), copied.append("wait")))
    assert min(measured_rates(torch.device(device, 0))) > 1e6
    assert min(swept) >= 1 << 30
    assert copied == [device, "cpu", "wait"] * (len(copied) // 3)


class Slow(nn.Module):
    """Keeps the compute stream busy, so that a copy that does not wait for it takes what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20 if x.device.type == "cuda" else 4):
            x = torch.tanh(x @ self.w)
        return x


def test_a_busy_stream_does_not_let_a_copy_overtake(device: str) -> None:
    class Out(nn.Module):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (x.float() - targets.float()).square().mean()

    def run(schedule: str) -> torch.Tensor:
        torch.manual_seed(0)
        parts = [zfunc.segment(f"slow{i}", Slow()) for i in range(6 if device == "cuda" else 3)]
        program = zfunc.compile(
            [*parts, zfunc.segment("out", Out())], device=device, bucket_size=65536, schedule=schedule
        )
        state = zfunc.init(program)
        g = torch.Generator().manual_seed(0)
        rows = 4096 if device == "cuda" else 64
        batch = torch.randn(rows, 256, generator=g), torch.randn(rows, 256, generator=g)
        for _ in range(3):
            state, _ = zfunc.train_step(program, state, batch)
        return weights_of(program, state)

    assert all(torch.equal(run(s), run("Serial")) for s in ("Overlapped", "Interleaved"))


class WithConstants(nn.Module):
    """A number, a list and a plain tensor attribute, which a trace has as constants on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.layers, self.table = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), torch.linspace(0, 1, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            y = torch.where(x > 0, layer(x), torch.tensor(0.5, device=x.device))
            x = x + y * self.table.to(x.device) * torch.tensor([1.0, 2.0] * 8, device=x.device)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_module_that_was_cut_trains_on_a_device_and_its_constants_are_copied_with_non_blocking(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from the host that waited for the device might hold up the launches behind it, in every pass."""
    graphs, make = list[Any](), traced_passes.runnable
    monkeypatch.setattr(traced_passes, "runnable", lambda x, *how: graphs.append(x) or make(x, *how))
    ids = torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    segments, losses = zfunc.segments(WithConstants(), batch), list[float]()
    for place in ("cpu", device):
        graphs.clear()
        program = zfunc.compile(segments, device=place, precision="fp32")
        state = zfunc.init(program, seed=1)
        state, _ = zfunc.train_step(program, state, batch)
        losses.append(zfunc.train_step(program, state, batch)[1].loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    copies = [
        user
        for x in graphs
        for constant in x.graph.find_nodes(op="get_attr")
        for user in constant.users
        if user.kwargs.get("device") == program.device
    ]
    assert copies
    assert all(x.kwargs["non_blocking"] for x in copies)


@pytest.mark.parametrize("recompute", ["all", "none", "min-cut"])
def test_backward_runs_on_the_lane_that_computes(device: str, recompute: Any) -> None:
    """And not on the thread that autograd has for each accelerator."""
    threads: set[int] = set()

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            threads.add(threading.get_ident())
            return grad * 2

    class Body(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Watched.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return y

    parts = [zfunc.segment("body", Body(8, 8)), zfunc.segment("loss", Loss(8))]
    program = zfunc.compile(parts, device=device, precision="fp32", recompute=recompute)
    zfunc.train_step(program, zfunc.init(program), (torch.ones(4, 8), torch.ones(4)))
    assert threads == {threading.get_ident()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_graphs_of_a_device_are_refused_beside_the_main_thread(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch has none there; another device computes on a thread of its own."""
    run = joint_graph._as_device_graph(lambda *given: [*given])
    for has_them in (True, False):
        monkeypatch.setattr(joint_graph, "GRAPHS_IN_THREADS", has_them)
        run(torch.ones(1, device=device))
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(run, torch.ones(1, device=device))
            assert isinstance(done.exception(), ValueError) != has_them
    with pytest.raises(ValueError, match=r'"reduce-overhead" beside the main thread.*devices=1'):
        needs(2)
        compiled("tied GPT", device, devices=2, micro_batches=2, compile_segments="reduce-overhead")


@pytest.mark.parametrize("verb", ["send_act", "send_grad_act"])
def test_what_passes_between_ranks_is_in_pinned_memory(
    device: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way from a device and on that to another, so that no copy waits."""
    wire: list[Any] = []

    def receive(*_: Any, pinned: bool = False) -> list[Any]:
        assert pinned
        return wire

    ranks = SimpleNamespace(send=lambda _, __, *message: wire.extend(message), receive=receive)
    one = torch.device(device, 0)
    spec = SimpleNamespace(mesh=SimpleNamespace(device_of=lambda *x: x[-1]))
    step: Any = SimpleNamespace(ranks=ranks, devices=[one], calls=[None], spec=spec)
    monkeypatch.setattr(move_stages, "wait_for_copies", lambda _: torch.accelerator.synchronize())
    mem: Any = {"made": {"x": torch.arange(6.0, device=one)}}
    for name, source, target in ((verb, "made", "wire"), (verb.replace("send", "recv"), "wire", "arrived")):
        op: Any = SimpleNamespace(verb=name, index=(0, 1), nbytes=512, reads=[source], writes=[target])
        move_stages._between_ranks(op, mem, step)
    assert wire[1].is_pinned()
    assert mem["arrived"]["x"].device == one
    assert mem["arrived"]["x"].tolist() == [*range(6)]


def test_programs_one_after_another_have_the_same_streams(device: str) -> None:
    """Those of two at once are apart: torch has 32 of a device."""

    def streams(program: Executor) -> set[int]:
        found = [program.stream(lane) for lane in ("compute", "h2d", "d2h")]
        return {x.stream_id for x in found if x is not None}

    one, other = (Executor(torch.device(device, 0)) for _ in range(2))
    first, second = streams(one), streams(other)
    assert len(first | second) == 6
    del one
    gc.collect()
    assert streams(Executor(torch.device(device, 0))) == first


def test_the_plan_counts_launches(device: str, controls: Any) -> None:
    """But for kernels that torch makes of others only while they run, such as a softmax of masked rows."""
    launched: dict[str, int] = {}

    def counting(op: Any, *args: Any) -> None:
        before = controls.launches()
        STAGES[op.verb](op, *args)
        launched[op.name] = controls.launches() - before

    stages = dict.fromkeys(STAGES, counting)
    program, data = compiled("tied GPT", device, schedule="Serial", stages=stages, recompute="none")
    zfunc.train_step(program, zfunc.init(program), data(0))
    passes = [op for op in specialize(program, data(0)).plan.graph if op.launches]
    assert {op.verb for op in passes} == {"forward", "backward"}
    assert all(
        op.launches == launched[op.name] for op in passes if op.verb == "backward" and op.index[1] in (1, 2)
    )
    for op in passes:
        assert op.launches <= launched[op.name] <= 1.25 * op.launches + 1, op


def test_a_launch_is_timed(device: str) -> None:
    assert 1e-7 < measure_launch(torch.device(device, 0)) < 1e-2


def test_what_python_takes_to_issue_each_operation_is_timed(device: str) -> None:
    program, data = compiled("tied GPT", device, schedule="Serial")
    alone, spent = clocked(program)
    zfunc.train_step(alone, zfunc.init(program), data(0))
    assert sorted(op.name for op, _ in spent) == sorted(
        op.name for op in specialize(program, data(0)).plan.graph
    )
    assert {"issue_compute", "issue_d2h", "issue_h2d"} <= issue_seconds(spent).keys()


def test_the_doctor_tells_what_a_device_is_and_how_fast_it_copies(device: str) -> None:
    (told,) = dict(doctor.reads(()))[f"{device}:0"]()
    assert re.search(r" free; (bf16|fp16|fp32); copies [\d.]+ GB/s to it, [\d.]+ GB/s back$", told)
