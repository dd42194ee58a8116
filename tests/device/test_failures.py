"""What a device does wrong is noticed, named, and hides nothing: errors, hangs, too little memory."""

import gc
import inspect
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_training import compiled, weights_of

import zfunc
from zfunc.engine.program import program as programs
from zfunc.engine.program.specialize import specialize
from zfunc.engine.state.state import Buffers
from zfunc.engine.step import release as releasing
from zfunc.errors import DonatedStateError, ExecutionError, LaneTimeout, OutOfMemory

BLOCK = 512  # bytes that an allocation is rounded to


def with_stage(program: Any, verb: str, stage: Any) -> Any:
    """The program with another stage function for `verb`, compiled anew."""
    return zfunc.compile(
        program.segments,
        program.settings,
        optimizer=program.optimizer,
        device=program.device,
        stages={verb: stage},
        patience=program.executor.patience,
    )


def failing_batch(data: Any) -> Any:
    tokens, targets = data(0)
    return tokens.clone().fill_(10_000), targets  # outside the vocabulary: an error of the device, and late


@pytest.mark.parametrize("sticky", [False, True])
def test_an_error_of_the_device_names_its_operation(controls: Any, sticky: bool) -> None:
    program, data = compiled("tied GPT", "pretend")
    controls.set_sticky(sticky)
    with pytest.raises(ExecutionError, match="index out of range.*debug=True") as late:
        zfunc.train_step(program, zfunc.init(program), failing_batch(data))
    assert ("in a new process" in str(late.value)) == sticky
    assert isinstance(late.value.__cause__, torch.AcceleratorError)
    controls.clear_error()
    with pytest.raises(ExecutionError, match=r"^forward\[0,0\] on lane .*index out of range"):
        zfunc.train_step(program, zfunc.init(program), failing_batch(data), debug=True)


def test_a_failing_stage_is_not_hidden_by_what_the_device_says_afterwards(controls: Any) -> None:
    program, data = compiled("tied GPT", "pretend")

    def stage(op: Any, mem: Any, step: Any) -> None:
        raise ZeroDivisionError("of the stage")

    broken = with_stage(program, "global_norm", stage)
    controls.set_sticky(True)
    with pytest.raises(ExecutionError, match="^global_norm on lane .*: ZeroDivisionError: of the stage"):
        zfunc.train_step(broken, zfunc.init(broken), data(0))


def test_a_failed_step_returns_when_the_device_has_finished(controls: Any) -> None:
    """Longer than the pauses of a wait: what is still running writes to memory that the caller may reuse."""
    program, data = compiled("tied GPT", "pretend", schedule="Overlapped")

    def stage(op: Any, mem: Any, step: Any) -> None:
        controls.stall()
        threading.Timer(1.5, controls.end_stalls).start()
        raise ZeroDivisionError

    program = with_stage(program, "to_host", stage)
    with pytest.raises(ExecutionError, match="ZeroDivisionError"):
        zfunc.train_step(program, zfunc.init(program), data(0))
    assert all(stream.query() for stream in program.executor._streams.values())


@pytest.mark.parametrize("verb", ["forward", "to_host", "to_device"])
def test_a_device_that_hangs_is_given_up_and_named(controls: Any, verb: str) -> None:
    """Within `patience`, wherever the step waits for it."""
    program, data = compiled("odd sizes", "pretend", bucket_size=600, schedule="Overlapped")
    plain, hangs = program.stages[verb], False

    def stalled(op: Any, mem: Any, step: Any) -> None:
        if hangs:
            controls.stall()
        plain(op, mem, step)

    program = with_stage(program, verb, stalled)
    state, _ = zfunc.train_step(program, zfunc.init(program), data(0))  # traced: what follows is quick
    hangs, program.executor.patience = True, 1.0
    with pytest.raises(
        LaneTimeout,
        match=r"for (forward|backward|to_host|to_device|lane)\S*.*, which the device has not finished",
    ):
        zfunc.train_step(program, state, data(1))
    controls.end_stalls()
    torch.accelerator.synchronize()


def test_too_little_memory_is_predicted_and_happens_where_the_plan_says(
    controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that does not fit is refused; without the check it runs out at the operation of the plan's peak."""
    gc.collect()  # what the tests before have left in cycles would be freed on the way
    program, data = compiled("tied GPT", "pretend", schedule="Serial")
    batch, others = data(0), torch.accelerator.memory_allocated()
    state = zfunc.init(program, seed=1)
    state, _ = zfunc.train_step(program, state, batch)
    torch.accelerator.reset_peak_memory_stats()
    state, _ = zfunc.train_step(program, state, batch)
    used = torch.accelerator.max_memory_allocated()
    peak = specialize(program, batch).memory["device"]
    assert used - others <= peak.nbytes + BLOCK * len(state.buffers.memory)  # each is rounded up
    rounding = torch.accelerator.memory_allocated() - others - peak.kept
    controls.set_capacity(0, others + peak.nbytes + rounding)
    state, _ = zfunc.train_step(program, state, batch)

    controls.set_capacity(0, others + peak.nbytes + rounding - BLOCK)
    with pytest.raises(OutOfMemory, match=rf"bytes of device memory, .*the peak is at {re.escape(peak.op)}"):
        zfunc.train_step(program, state, batch)
    monkeypatch.setattr("zfunc.engine.step.train_step.memory_shortage", lambda *a, **k: "")
    controls.set_capacity(0, used - BLOCK)
    with pytest.raises(ExecutionError, match="out of memory") as failure:
        zfunc.train_step(program, state, batch)
    assert str(failure.value).startswith(f"{peak.op} on lane")


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Whether `call` was interrupted before it ran this line of those that release a State, or take it back."""
    passed, skipped = 0, inspect.getsourcelines(releasing)[0]
    watched = {releasing.__file__, Buffers.place.__code__, programs.staging_buffers.__code__}
    watched.add(Buffers.drop.__code__)

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal passed
        code = frame.f_code
        if not {code, code.co_filename} & watched:
            return None
        leaves = code.co_filename == releasing.__file__ and "with " in skipped[frame.f_lineno - 1]
        if event == "line" and not leaves:  # Python itself leaves no `with` there
            passed += 1
            if passed == line:
                raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["release", "evaluate"])
def test_an_interrupted_release_or_return_loses_nothing(controls: Any, way: str, every: int) -> None:
    """At any line, by day every third: then the State is used as it is, or released again, with the bits of one
    that never was."""
    gc.collect()
    nothing = torch.accelerator.memory_allocated()  # of this program
    program, data = compiled("odd sizes", "pretend", state_on="device:0.5,host", clip_norm=1.0)
    state, _ = zfunc.train_step(program, zfunc.init(program, seed=1), data(0))
    expected = zfunc.evaluate(program, state, data(9)), weights_of(program, state)
    line, interrupted = 0, True
    while interrupted:
        line += every
        if way == "evaluate":
            zfunc.release(program, state)
        interrupted = interrupted_at(
            line, lambda: getattr(zfunc, way)(program, state, *[data(9)] * (way == "evaluate"))
        )
        if line % 2:
            zfunc.release(program, state)
            assert torch.accelerator.memory_allocated() == nothing
        assert zfunc.evaluate(program, state, data(9)) == expected[0]
        assert torch.equal(weights_of(program, state), expected[1])
    assert line > 20
    zfunc.train_step(program, state, data(1))


def test_what_was_lent_and_not_given_back_is_refused_until_it_is(
    controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    nothing = torch.accelerator.memory_allocated()  # of this program
    program, data = compiled("odd sizes", "pretend", state_on="device:0.5,host")
    state = zfunc.init(program, seed=1)
    expected, before = zfunc.evaluate(program, state, data(9)), torch.accelerator.memory_allocated()
    with (
        monkeypatch.context() as small,
        pytest.raises(OutOfMemory, match=r"^release: .*nothing was released"),
    ):
        small.setattr("zfunc.engine.step.release.available_host_bytes", lambda: 1000)
        zfunc.release(program, state)
    assert torch.accelerator.memory_allocated() == before
    zfunc.release(program, state)
    assert torch.accelerator.memory_allocated() == nothing
    controls.set_capacity(0, before - 512)
    for _ in range(2):
        with pytest.raises(
            OutOfMemory, match=r"^apply: needs [\d,]+ bytes of device memory for what was rel"
        ):
            zfunc.evaluate(program, state, data(9))
        assert torch.accelerator.memory_allocated() == nothing
    controls.set_capacity(0, 1 << 30)
    assert zfunc.evaluate(program, state, data(9)) == expected
    zfunc.train_step(program, state, data(0))
    with pytest.raises(
        DonatedStateError, match=r"^release: got a state that an earlier train_step or replace consumed"
    ):
        zfunc.release(program, state)
