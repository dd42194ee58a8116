"""Tests of the tests: an executor that forgets one thing is noticed by the laws on the pretend device."""

import inspect
import multiprocessing
import types
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from attrs import evolve
from device_training import compiled, run
from zfunc.schedules import make_schedule

from zfunc.engine.compile.program import rescheduled
from zfunc.runtime import executor as module
from zfunc.runtime.executor import Executor

# What is removed from the executor's source, by what it is for. Serial plans have one lane and need no events.
BROKEN = {
    "streams wait for events": ("stream.wait_event(event)", "None"),
    "the host waits for events": (
        "self._wait_for_device(run, lane, event.query, item.op.name, awaited)",
        "None",
    ),
    "memory is shared by streams": ("record_use(self.device, [run.mem.get(r) for r in item.shared])", "None"),
    "the host waits for its lane's stream": (
        "self._wait_for_device(run, lane, stream.query, item.op.name, previous.op.name)",
        "None",
    ),
    "events are recorded before flags are set": (
        "event.record(stream)",
        "run.flags[item.position].set(); time.sleep(1e-3); event.record(stream)",
    ),
    "lanes wait for the caller's stream": ("stream.wait_stream(caller)", "None"),
}
END = ("self._finish(run)", "None")
TRAININGS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "odd sizes",
        "Overlapped",
        {"bucket_size": 600, "params_on": "host", "activations_on": "host", "recompute": "min-cut"},
    ),
    ("tied GPT", "Overlapped", {"micro_batches": 2}),
    ("tied GPT", "Interleaved", {"clip_norm": 0.5}),
    ("odd sizes", "Overlapped", {"bucket_size": 600, "clip_norm": 2.0, "offload_ratio": 0.5}),
    ("odd sizes", "Serial", {"bucket_size": 600}),
]


def broken(text: str, replacement: str) -> Any:
    """The executor's class, of a source with one change."""
    source = inspect.getsource(module)
    assert source.count(text) == 1, text
    changed = types.ModuleType("broken_executor")
    exec(compile(source.replace(text, replacement), "broken_executor", "exec"), changed.__dict__)
    return changed.Executor


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
            again, same = run(evolve(other, executor=executor(program.device)), batches)
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
