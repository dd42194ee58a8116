"""The executor: what it waits for, what it says when it waits in vain, what its delays and guard show."""

import sys
import threading
import time
from typing import Any

import pytest
import torch
from attrs import evolve
from small_models import tied_gpt
from trained import compiled

import zfunc
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.plan import Plan, PlanError, build
from zfunc.core.verifier import races, verify
from zfunc.engine.program.program import lock_staging
from zfunc.engine.program.specialize import specialize
from zfunc.engine.stages.stages import STAGES, forward
from zfunc.engine.stages.update_stages import update
from zfunc.errors import ExecutionError, LaneTimeout, UndeclaredAccess
from zfunc.runtime.access_guard import AccessGuard
from zfunc.runtime.executor import Executor, RunOptions
from zfunc.runtime.fault_injection import Fault, InjectedFault, Jitter, check_faults
from zfunc.runtime.prepared_plan import prepare_plan

CPU = torch.device("cpu")
X, Y = Region("x", lifetime="value"), Region("y")


def run(
    plan: Plan,
    stages: dict[str, Any],
    mem: dict[Region, Any] | None = None,
    patience: float = 10.0,
    **options: Any,
) -> Any:
    mem = {} if mem is None else mem
    executor = Executor(CPU, patience=patience)
    return executor.run(prepare_plan(plan, stages, CPU), mem, None, RunOptions(**options), {})


def nothing(*_: Any) -> None:
    pass


def two_lanes(kind: Any = "host") -> Plan:
    graph = Graph((Op("make", (), "compute", writes=(X,)), Op("use", (), kind, reads=(X,), writes=(Y,))))
    return build(graph, {"gpu": [0], "cpu": [1]})


def test_a_lane_that_waits_too_long_or_never_ends_is_named_with_its_operation() -> None:
    release = threading.Event()
    stages = {"make": lambda *_: time.sleep(0.3), "use": nothing}
    said = r"use \(lane cpu\) waited 0.1 s for make of lane gpu, which is in make"
    with pytest.raises(LaneTimeout, match=said):
        run(two_lanes(), stages, patience=0.1)
    graph = Graph((Op("make", (), "compute", writes=(X,)), Op("stuck", (), "host")))
    stages = {"make": nothing, "stuck": lambda *_: release.wait()}
    with pytest.raises(LaneTimeout, match="the end of lane cpu, which is in stuck"):
        run(build(graph, {"gpu": [0], "cpu": [1]}), stages, patience=0.1)
    release.set()


def test_a_verb_without_a_stage_is_refused_before_anything_runs() -> None:
    with pytest.raises(
        ValueError, match=r"got operations \['use'\] in the plan, expected verbs with a stage"
    ):
        prepare_plan(two_lanes(), {"make": nothing}, CPU)


def test_a_region_is_dropped_after_its_last_access() -> None:
    z = Region("z")
    graph = Graph(
        (
            Op("make", (0,), "compute", writes=(Y,)),
            Op("use", (0,), "host", reads=(Y,), writes=(z,)),
            Op("use", (1,), "compute", reads=(Y,)),
            Op("last", (), "compute", reads=(z,)),
        )
    )
    seen: dict[str, set[str]] = {}

    def stage(op: Op, mem: Any, step: Any) -> None:
        seen[op.name] = {r.buffer for r in mem}
        for r in op.writes:
            mem[r] = object()

    mem: dict[Region, Any] = {}
    run(build(graph, {"gpu": [0, 2, 3], "cpu": [1]}), dict.fromkeys(("make", "use", "last"), stage), mem)
    assert seen["last"] == {"z"}
    assert mem == {}


def test_threads_end_with_the_executor() -> None:
    executor = Executor(CPU)
    stages = {"make": nothing, "use": nothing}
    plan = build(two_lanes().graph, {"gpu": [0], "its-own": [1]})
    executor.run(prepare_plan(plan, stages, CPU), {}, None, RunOptions(), {})
    (thread,) = (t for t in threading.enumerate() if t.name == "zfunc its-own")
    del executor
    thread.join(5)
    assert not thread.is_alive()


# --- threads that cannot start, and interrupts between two instructions ----------------------------------


def test_a_thread_that_cannot_start_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is waited for: no lane has begun."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start {thread.name}")

    seen, waited = list[str](), list[threading.Event]()
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(Executor, "_let_end", lambda _, __, lanes: waited.extend(lanes))
    with pytest.raises(RuntimeError, match="can't start zfunc cpu"):
        run(two_lanes(), dict.fromkeys(("make", "use"), lambda op, *_: seen.append(op.verb)))
    assert seen == waited == []


def interrupt(n: int, work: Any, code: Any) -> bool:
    """Whether `work()` was interrupted before the n-th instruction of `code`: it may have fewer."""
    left = n

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes, left = True, left - (event == "opcode")
        if event == "call":
            sys.settrace(trace)  # again, or Python 3.12.1 has no events of opcodes yet
        if event == "opcode" and left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt as error:
        if type(error) is not KeyboardInterrupt:  # lanes were left behind, and with them the State
            raise
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_between_two_lanes_that_begin_loses_nothing() -> None:
    executor, stages = Executor(CPU, patience=5.0), {"make": nothing, "use": nothing}
    prepared, number = prepare_plan(two_lanes(), stages, CPU), 1
    step = lambda: executor.run(prepared, {}, None, RunOptions(), {})  # noqa: E731
    while interrupt(number, step, Executor.run.__code__):
        number += 1
    assert number > 100
    step()


def test_an_interrupt_on_the_way_into_a_program_does_not_lock_it() -> None:
    program, number = compiled()[0], 1

    def enter() -> None:
        with lock_staging(program, "train_step"):
            sys.settrace(None)

    while interrupt(number, enter, lock_staging.__wrapped__.__code__):  # type: ignore[attr-defined]
        assert not program.cache.busy.locked(), number
        number += 1
    assert number > 20
    assert not program.cache.busy.locked()


# --- faults and kinds of operations ---------------------------------------------------------------------


def test_a_fault_happens_just_before_the_stage_of_its_operation_if_that_is_run() -> None:
    seen: list[str] = []
    stages = {name: lambda op, *_: seen.append(op.verb) for name in ("make", "use")}
    with pytest.raises(InjectedFault, match="use: got the injected fault rank=0,step=1,op=use"):
        run(two_lanes(), stages, faults=(Fault(0, 1, "use", "raise"),))
    assert seen == ["make"]
    run(two_lanes(), stages, faults=(Fault(0, 1, "used", "raise"),))
    check_faults([Fault(0, 1, "use", "kill")], two_lanes())
    with pytest.raises(ValueError, match=r"'used', expected one of the plan's 2 \(did you mean 'use'\?\)"):
        check_faults([Fault(0, 1, "used", "kill")], two_lanes())


def test_disk_operations_run_on_a_thread_of_one_and_are_no_host_seconds() -> None:
    seen: list[tuple[str, int]] = []

    def use(*_: Any) -> None:
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        time.sleep(0.01)

    seconds = [
        run(two_lanes(kind), {"make": nothing, "use": use}).host_seconds for kind in ("read", "write", "host")
    ]
    assert seconds[:2] == [0, 0]
    assert seconds[2] >= 0.01
    assert seen == [("zfunc cpu", 1)] * 3


def test_while_a_lane_is_in_a_collective_the_others_wait_twice_as_long() -> None:
    """It has a time-out of its own, and knows more: who is missing."""
    graph = Graph(
        (Op("load", (), "compute"), Op("send", (), "network", writes=(X,)), Op("use", (), "compute", (X,)))
    )

    def send(*_: Any) -> None:
        time.sleep(0.6)
        raise RuntimeError("rank 1 is gone")

    stages = {"load": nothing, "send": send, "use": nothing}
    with pytest.raises(ExecutionError, match="rank 1 is gone"):
        run(build(graph, {"gpu": [0, 2], "net": [1]}), stages, patience=0.4)


# --- what verify prevents -------------------------------------------------------------------------------


def test_without_one_wait_verify_complains_and_delays_show_the_wrong_result() -> None:
    """The copy to the host must wait for the bucket to be packed; without that wait it takes what was there."""
    segments, data = tied_gpt()
    program = zfunc.compile(segments, device="cpu", precision="fp32", bucket_size=4000, schedule="Overlapped")
    good = program.plan
    victim = next(i for i, op in enumerate(good.graph) if op.verb == "to_host" and good.waits[i])
    broken = evolve(good, waits=tuple(() if i == victim else w for i, w in enumerate(good.waits)))
    assert list(races(broken))
    with pytest.raises(PlanError, match="to_host"):
        verify(broken)

    def result(plan: Plan, seed: int) -> torch.Tensor:
        settings = {"precision": "fp32", "bucket_size": 4000, "schedule": "Overlapped"}
        other = zfunc.compile(segments, device="cpu", **settings)
        state = zfunc.init(other, seed=1)
        special = specialize(other, data(0))
        smuggled = evolve(special.plan, waits=plan.waits)  # past compile, which verifies
        ready = evolve(special, plan=smuggled, prepared=prepare_plan(smuggled, other.stages, CPU))
        for shape in other.cache.specialized:
            other.cache.specialized[shape] = ready
        state, _ = zfunc.train_step(other, state, data(0), jitter=Jitter(seed, 5e-3))
        return torch.cat([p.flatten() for p in zfunc.params(other, state).values()])

    reference = result(good, 0)
    assert all(torch.equal(result(good, seed), reference) for seed in range(3))
    assert not all(torch.equal(result(broken, seed), reference) for seed in range(8))


# --- debug mode -----------------------------------------------------------------------------------------


def with_stage(verb: str, stage: Any) -> Any:
    program, data = compiled("odd sizes", precision="fp32", clip_norm=1.0, stages={verb: stage})
    return program, zfunc.init(program), data(0)


def peeks(op: Op, mem: Any, step: Any) -> None:
    mem[Region("master", (0,))]
    forward(op, mem, step)


def scribbles(op: Op, mem: Any, step: Any) -> None:
    STAGES["to_host"](op, mem, step)
    mem[Region("norm")] = 0.0


def spoils(op: Op, mem: Any, step: Any) -> None:
    update(op, mem, step)
    mem[op.read("host_grad")].zero_()


@pytest.mark.parametrize(
    ("verb", "stage", "message"),
    [
        ("forward", peeks, r"forward\[0,0\] reads master\[0\], expected one of.*zfunc\.core\.ops"),
        ("to_host", scribbles, "to_host.* writes norm"),
        ("update", spoils, r"update\[.\] changed host_grad\[.\], which it declares as read"),
    ],
)
def test_an_undeclared_access_fails_in_debug_mode_with_operation_and_region(
    verb: str, stage: Any, message: str
) -> None:
    program, state, batch = with_stage(verb, stage)
    with pytest.raises(UndeclaredAccess, match=message):
        zfunc.train_step(program, state, batch, debug=True)
    if verb == "forward":  # without debug mode it goes unnoticed
        zfunc.train_step(program, state, batch)


def test_memory_that_is_written_is_in_no_region_that_is_not_declared_as_written() -> None:
    """Of a slot each part may be in a region of its own."""
    own, other, slot = Region("grad_act", (0, 1)), Region("grads", (0, 1)), torch.ones(8)
    op = Op("backward", (0, 0), "compute", (own,), (own,))
    AccessGuard(op, {own: [slot[:4]], other: {"w": slot[4:]}})
    with pytest.raises(UndeclaredAccess, match=r"writes grad_act\[0,1\], whose memory grads\[0,1\] has, too"):
        AccessGuard(op, {own: [slot[:5]], other: {"w": slot[4:]}})


def test_a_read_of_a_write_only_region_shows_in_debug_mode() -> None:
    def adds(op: Op, mem: Any, step: Any) -> None:
        before = mem[op.write("host_grad")].clone()
        STAGES["to_host"](op, mem, step)
        mem[op.write("host_grad")].add_(before)

    program, state, batch = with_stage("to_host", adds)
    with pytest.raises(zfunc.NonFiniteError):
        for _ in range(2):
            state, _ = zfunc.train_step(program, state, batch, debug=True)
