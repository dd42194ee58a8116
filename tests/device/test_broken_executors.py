"""Tests of the tests: an executor that forgets one thing is noticed by the laws on the pretend device."""

import inspect
import multiprocessing
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pretend
import pytest
import torch
from attrs import evolve
from device_training import compiled, run
from table import Scattered
from torch import Tensor
from zfunc.schedules import make_schedule

from zfunc.core.graph import Graph, Op, Region
from zfunc.engine.program.program import rescheduled
from zfunc.engine.rows import keys as tile_keys
from zfunc.engine.trace.host_keys import HostMemory, keys_in
from zfunc.runtime import accelerator, prepared_plan
from zfunc.runtime import executor as module
from zfunc.runtime.executor import Executor, RunOptions
from zfunc.runtime.host_memory import alloc_host

# What is removed from the executor's source, by what it is for. Serial plans have one lane and need no events.
BROKEN = {
    "streams wait for events": ("stream.wait_event(event)", "None"),
    "streams wait for events of their own thread": (
        "stream.wait_event(event)",
        "plan.thread_of(i) == thread or stream.wait_event(event)",
    ),
    "the host waits for events": (
        "self._wait_for_device(run, thread, event.query, item.op.name, awaited)",
        "None",
    ),
    "memory is shared by streams": ("record_use(device, [run.mem.get(r) for r in item.shared])", "None"),
    "the host waits for its lane's stream": (
        "self._wait_for_device(run, thread, before.query, item.op.name, previous.op.name)",
        "None",
    ),
    "a thread knows what each of its lanes did before": (
        "last[item.lane] = item, stream",
        "last = {item.lane: (item, stream)}",
    ),
    "events are recorded before flags are set": (
        "event.record(stream)",
        "not item.told or run.flags[item.position].set(); time.sleep(1e-3); event.record(stream)",
    ),
    "a lane waits for its stream on the device before": ("stream.wait_stream(before)", "None"),
    "lanes wait for the caller's stream": ("stream.wait_stream(callers[n])", "None"),
}
ONE_LANE = ("(lane.name, op.device)", "lane.name")  # which has a stream on each device
END = ("self._finish(run)", "None")
TRAININGS: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "odd sizes",
        "Overlapped",
        {"bucket_size": 600, "params_on": "host", "activations_on": "host", "recompute": "min-cut"},
    ),
    ("tied GPT", "Overlapped", {"micro_batches": 2}),
    ("tied GPT", "Interleaved", {"micro_batches": 2, "clip_norm": 0.5}),
    ("odd sizes", "Overlapped", {"bucket_size": 600, "clip_norm": 2.0, "state_on": "device:0.5,host"}),
    ("odd sizes", "Serial", {"bucket_size": 600}),
    ("odd sizes", "TwoThreads", {"bucket_size": 600, "params_on": "host"}),
    ("odd sizes", Scattered(16, 3, num_threads=1), {"bucket_size": 600}),
    ("odd sizes", "Overlapped", {"devices": 2, "micro_batches": 3, "clip_norm": 2.0}),
    ("odd sizes", Scattered(0, num_lanes=2), {"devices": 3, "order": "GPipe", "micro_batches": 3}),
]


def changed_module(of: types.ModuleType, text: str, replacement: str) -> Any:
    """A module of the source of another, with one change."""
    source = inspect.getsource(of)
    assert source.count(text) == 1, text
    changed = types.ModuleType("broken")
    exec(compile(source.replace(text, replacement), "broken", "exec"), changed.__dict__)
    return changed


def broken(text: str, replacement: str) -> Any:
    """The executor's class, of a source with one change."""
    return changed_module(module, text, replacement).Executor


def queued(data: Any, i: int) -> Any:
    """A batch that is only queued on the device when the step begins."""
    batch = data(i)
    for _ in range(20):
        batch = tuple(t.to("pretend", non_blocking=True).mul(1) for t in batch)
    return batch


@cache
def sound(n: int) -> tuple[Any, Any, Any]:
    """The program of a training, its batches, and what a sound executor makes of them in one lane."""
    model, _, settings = TRAININGS[n]
    program, data = compiled(model, "pretend", schedule="Serial", **settings)
    batches = partial(queued, data)
    return program, batches, run(program, batches)


def outcomes(executor: Any) -> Iterator[bool]:
    """Whether each training has the bits of a sound one."""
    for n, (_, schedule, _) in enumerate(TRAININGS):
        program, batches, (losses, params) = sound(n)
        other = rescheduled(program, make_schedule(schedule))
        try:
            again, same = run(evolve(other, executor=executor(*program.devices)), batches)
        except Exception:  # noticed as well
            yield False
        else:
            yield repr(again) == repr(losses) and torch.equal(same, params)


def test_the_executor_as_it_is_gives_the_bits(controls: Any) -> None:
    assert all(outcomes(Executor))


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_what_the_executor_forgets_is_noticed(controls: Any, change: tuple[str, str]) -> None:
    controls.delay(1e-3, 3)
    assert not all(outcomes(broken(*change)))


@pytest.mark.slow
def test_a_step_that_does_not_wait_for_its_end_is_noticed(controls: Any) -> None:
    """In a process of its own, which may well crash."""
    process = multiprocessing.get_context("spawn").Process(target=_without_the_end)
    process.start()
    process.join(120)
    assert process.exitcode != 0


def _without_the_end() -> None:
    import pretend

    pretend.load().delay(1e-3, 3)
    if not all(outcomes(broken(*END))):
        raise SystemExit(1)


# --- copies from device to device --------------------------------------------------------------------------------


def peer_sums(schedule: str, of: Any = module, plans: Any = prepared_plan, rounds: int = 12) -> Tensor:
    """A sum on device 1 of what device 0 makes, copied there past the host; two slots receive in turn. `of` and
    `plans` are the modules of the executor and of prepared plans."""
    devices = [torch.device("pretend", n) for n in range(2)]
    total, *slots = (Region(x, tier="device", lifetime="value", device=1) for x in ("total", "even", "odd"))
    ops: list[Op] = []
    for n in range(rounds):
        made, slot = Region("made", (n,), tier="device"), slots[n % 2]
        ops.append(Op("make", (n,), "compute", writes=(made,)))
        ops.append(Op("copy", (n,), "h2d", (made,), (slot,)))  # on a stream of the device that receives it
        ops.append(Op("add", (n,), "compute", (slot, total), (total,)))

    def make(op: Op, mem: Any, _: Any) -> None:
        mem[op.writes[0]] = torch.arange(512.0, device=devices[0]).add(op.index[0]).sqrt()

    def copy(op: Op, mem: Any, _: Any) -> None:
        mem[op.writes[0]].copy_(mem[op.reads[0]], non_blocking=True)

    def add(op: Op, mem: Any, _: Any) -> None:
        mem[total].mul_(0.75).add_(mem[op.reads[0]])

    prepared = plans.prepare_plan(
        make_schedule(schedule)(Graph(ops)).verify(), {f.__name__: f for f in (make, copy, add)}, *devices
    )
    mem: dict[Region, Any] = {r: torch.zeros(512, device=devices[1]) for r in (total, *slots)}
    of.Executor(*devices).run(prepared, mem, None, RunOptions(), {})
    return mem[total].cpu()


@pytest.mark.parametrize(
    ("schedule", "change"),
    [
        *(("Overlapped", x) for x in (None, "streams wait for events", "memory is shared by streams")),
        *(("Serial", x) for x in (None, "a lane waits for its stream on the device before", "one lane")),
    ],
)
def test_a_copy_between_devices_that_waits_for_too_little_is_noticed(
    controls: Any, schedule: str, change: str | None
) -> None:
    """It needs what the one device has made and what the other has read, on streams of both."""
    controls.delay(0.0, 0)
    expected = peer_sums("Serial")
    executor = changed_module(module, *BROKEN[change]) if change in BROKEN else module
    plans = changed_module(prepared_plan, *ONE_LANE) if change == "one lane" else prepared_plan

    def same(seed: int) -> bool:
        controls.delay(1e-3, seed)
        return torch.equal(peer_sums(schedule, executor, plans), expected)

    assert all(map(same, range(3, 9))) if change is None else not all(map(same, range(3, 13)))


# --- copies of keys, inside of one operation ---------------------------------------------------------------------

KEYS = {  # what is removed from keys.py
    "a copy waits for who used its slot": ("with behind(up)", "with (up)"),
    "attention waits for its part": (".wait_event(ready)", ""),
    "sums are taken when they have been added": (
        "with behind(down):\n                        self.sums",
        "with down:\n                        self.sums",
    ),
    "sums are taken before others come": ("up.wait_stream(down)", "None"),
    "keys are taken when they have been put": (
        "with behind(down):\n                self.kept",
        "with down:\n                self.kept",
    ),
    "keys are put where none are on their way": (".wait_event(sent)", ""),
    "slots outlive their copies": ("rejoin(down)", "None"),
}


def sums_of_keys(module: Any, place: str, rounds: int = 30) -> list[torch.Tensor]:
    """Sums by parts that are visited in several orders; what was in a slot is overwritten soon."""
    g, parts = torch.Generator().manual_seed(0), [(8 * i, 8 * i + 8) for i in range(5)]
    made = [[torch.rand(1, 2, 8, 4, generator=g).to("pretend") for _ in range(2)] for _ in parts]
    host = HostMemory(alloc_host(1 << 16, torch.uint8, pinned_for=made[0][0].device))
    with keys_in(host if place == "host" else None):
        keys = module.keys_like(made[0], len(parts))
    if place == "host":  # whose copies of keys begin late
        with accelerator.work_on(accelerator.copy_stream(made[0][0].device, "down")):
            pretend.load().stall()
    for part, own in zip(parts, made, strict=True):
        keys.put(part, own)
    time.sleep(0.1)
    pretend.load().end_stalls()
    keys.start_sums()
    for n in range(rounds):
        for k, v, *sums in keys.visit(parts[n % 5 :] + parts[: n % 3], sums=True):
            sums[0].add_(k * n)
            sums[1].add_(v)
        del k, v, sums
        [torch.full((128,), torch.nan, device="pretend") for _ in range(4)]
    found = [x.cpu() for part in parts for x in keys.sums_of(part)]
    torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("change", [None, *KEYS.values()], ids=["as it is", *KEYS])
def test_what_copies_of_keys_forget_is_noticed(controls: Any, change: tuple[str, str] | None) -> None:
    """As it is, keys on the host give the bits of keys on the device under any delay."""
    expected = sums_of_keys(tile_keys, "device")
    module = changed_module(tile_keys, *change) if change else tile_keys

    def same(seed: int) -> bool:
        controls.delay(1e-3, seed)
        return all(map(torch.equal, sums_of_keys(module, "host"), expected))

    if change is None:
        assert same(3)
    else:  # on a busy machine the delays of one seed may fall where they show nothing
        assert not all(map(same, range(3, 13)))


# --- two threads at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("enter", [accelerator.work_on, accelerator.in_turn, lambda stream: stream])
def test_threads_that_meet_on_a_stream_come_out_on_their_own(controls: Any, enter: Any) -> None:
    """Also where the first to enter is the first to leave; which torch's own object does not do."""
    shared, meets = torch.Stream("pretend"), threading.Barrier(2, timeout=10)

    def stays(_: int) -> bool:
        with torch.Stream("pretend") as own:
            meets.wait()
            try:
                with enter(shared):
                    meets.wait()
                    assert torch.accelerator.current_stream() == shared
            except RuntimeError:  # up to torch 2.11
                meets.abort()
                return False
            meets.wait()
            return torch.accelerator.current_stream() == own

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(stays, range(2))) == enter.__module__.startswith("zfunc")


def test_threads_have_keys_on_the_host_at_once(controls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of one, though each is in the middle of a copy when the other begins and ends one."""
    expected, meets = sums_of_keys(tile_keys, "device", 2), threading.Barrier(2, timeout=30)
    controls.delay(3e-4, 3)

    @contextmanager
    def behind(stream: Any) -> Iterator[None]:
        with accelerator.behind(stream):
            meets.wait()
            yield
            meets.wait()

    def own(stream: Any) -> list[torch.Tensor]:
        with stream:
            return sums_of_keys(tile_keys, "host", 2)

    monkeypatch.setattr(tile_keys, "behind", behind)
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(own, [torch.Stream("pretend") for _ in range(2)])]
    assert all(all(map(torch.equal, x, expected)) for x in found)
