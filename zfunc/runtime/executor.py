"""Run a plan: threads that issue the operations of lanes and, on an accelerator, a persistent stream for each lane.

The policy:

- The thread of the lane that holds the compute is the calling one; the others are made once. A thread of several
  lanes issues their operations in one order (`Plan.threads`): so one behind an update of the host waits for it.
- An operation of kind "host", "read" or "write" is finished when its stage returns. Any other, on an accelerator,
  is only issued then: it runs on its lane's stream and is finished when the event recorded after it is.
- A wait between two streams is an event: nothing blocks but the stream. A wait of the host for a stream polls its
  event, until `patience` ends; a wait for the host is a flag between threads.
- A device reports an error late, to whichever operation looks next. In debug mode every operation is finished
  before the next of its lane, so the error names the operation it came from.
- A region that is not kept is dropped after its last access, so memory is what `zfunc.core.memory_model` counts.

The invariant: the executor knows no verb. What it may not reorder, it takes from the plan.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import Any

import torch
from attrs import define, field, frozen

from zfunc.core.graph import Kind, Region
from zfunc.core.plan import Plan
from zfunc.core.timeline import Event, Timeline
from zfunc.errors import AbandonedCalls, ExecutionError, LaneTimeout, RankError
from zfunc.runtime.accelerator import (
    delay_stream,
    deterministic_kernels,
    give_back,
    on_accelerator,
    poll,
    record_use,
    take_stream,
    work_on,
)
from zfunc.runtime.access_guard import AccessGuard
from zfunc.runtime.blocking_calls import LEAVE_AFTER
from zfunc.runtime.fault_injection import Fault, Jitter
from zfunc.runtime.prepared_plan import IssuedOp, PreparedPlan
from zfunc.runtime.thread_budget import bind_to_nodes

log = logging.getLogger("zfunc")
SLOW = "if that is only slow (a first compilation, say), pass a larger patience= to zfunc.compile"


@define(eq=False)
class RunningStep:
    """The state of one step while it runs, shared by the threads that issue its operations."""

    prepared: PreparedPlan
    mem: Any  # region -> its content
    step: Any  # what stages get besides
    options: "RunOptions"
    origin: float  # of the host's clock
    flags: dict[int, threading.Event]  # position of one that is told -> its stage has returned
    left: dict[Region, int]  # accesses until the region is dropped
    started: dict[int, bool]  # position -> whether its stage has returned
    lock: threading.Lock = field(factory=threading.Lock)
    one_at_a_time: threading.Lock = field(factory=threading.Lock)  # on the device, in debug mode
    failure: BaseException | None = None
    running: dict[str, str] = field(factory=dict[str, str])  # thread -> operation
    # thread -> operation that it waits for the device to finish
    waiting: dict[str, str] = field(factory=dict[str, str])
    # position, and start and end in seconds since the origin
    spans: list[tuple[int, float, float]] = field(factory=list[tuple[int, float, float]])
    # position -> the events before and after it on its stream
    timed: dict[int, tuple[torch.Event, torch.Event]] = field(
        factory=dict[int, tuple[torch.Event, torch.Event]]
    )


@frozen
class RunOptions:
    """Options for one execution of a plan: random delays, `debug` (checks that operations use only declared
    regions), `trace` (device times of each operation), injected faults.

    `watch` is called repeatedly while the host waits for the device. It raises if the wait is in vain, and
    returns whether a collective is in progress, in which case the host waits up to twice as long.
    """

    jitter: Jitter | None = None
    debug: bool = False
    trace: bool = False
    faults: tuple[Fault, ...] = ()  # of this rank and step
    watch: Callable[[], bool] | None = None


@frozen
class StepRun:
    """The result of executing a plan: the timeline, if it was traced, the seconds it took, and those in host
    operations."""

    timeline: Timeline | None
    seconds: float
    host_seconds: float


class Executor:
    """Executes plans of a program: keeps the threads and device streams of their lanes from step to step,
    because new streams each step would grow torch's memory pools.

    `patience` is how long, in seconds, a lane waits for another before it raises LaneTimeout. `deterministic`
    allows only deterministic kernels.
    """

    def __init__(self, *devices: torch.device, patience: float = 600.0, deterministic: bool = False) -> None:
        self.devices = devices
        self.patience = patience
        self.on_device = on_accelerator(devices[0])
        self.kernels = partial(deterministic_kernels, True) if deterministic else nullcontext
        self._process = 0  # that has made a step
        self._streams: dict[tuple[str, int], torch.Stream] = {}
        weakref.finalize(self, give_back, self._streams)
        self._threads: dict[str, SimpleQueue[Any]] = {}
        # The first call in a process turns MKL's dynamic teams off, for every thread: the bits of a product
        # change with it. Made here, it has happened before any step, whatever lanes come later.
        self._team = torch.get_num_threads()
        torch.set_num_threads(self._team)

    def run(
        self,
        prepared: PreparedPlan,
        mem: dict[Region, Any],
        step: Any,
        options: RunOptions,
        started: dict[int, bool],
    ) -> StepRun:
        """Run every lane of a plan to its end and return when all work, also on streams, is done.

        Stages get `mem`, the content of memory regions, and `step`. `started` receives, also if the run fails, the
        position of each operation begun, and whether its stage function has returned.

        An exception in a lane stops the other lanes and is raised as ExecutionError, with the operation's name;
        zfunc's own errors and interrupts are raised unchanged.
        """
        self._process, plan = os.getpid(), prepared.plan
        flags = {
            x.position: threading.Event() for items in prepared.threads.values() for x in items if x.told
        }
        bases = self._begin(plan, options)  # finished when it returns: both clocks start here
        run = RunningStep(
            prepared, mem, step, options, time.perf_counter(), flags, dict(prepared.accesses), started
        )
        done = {x: threading.Event() for x in prepared.threads if x != prepared.main}
        queues: dict[str, SimpleQueue[Any]] = {}
        try:
            with self.kernels():
                queues = {thread: self._thread(thread) for thread in done}  # before any of them begins
                for thread, queue in queues.items():
                    queue.put((self, run, thread, done[thread]))
                self._drive(run, prepared.main)
                for thread, ended in done.items():
                    self._join(run, ended, thread)
        except BaseException as error:  # an interrupt here, or a thread that never ends
            self._fail(run, error)
            if not isinstance(error, LaneTimeout):
                for thread, queue in queues.items():  # one that has not begun, or has ended, ends at once
                    queue.put((self, run, thread, done[thread]))
                self._let_end(run, [done[thread] for thread in queues])
        self._finish(run)
        if run.failure is not None:
            raise run.failure
        host = sum(end - start for i, start, end in run.spans if plan.graph.ops[i].kind == "host")
        timeline = _timeline(run, bases) if options.trace else None
        return StepRun(timeline, time.perf_counter() - run.origin, host)

    def check_process(self, action: str) -> None:
        """Raise RuntimeError, naming `action`, in a fork of the process that ran a step: its threads are gone."""
        if self._process not in (0, os.getpid()):
            raise RuntimeError(
                f"{action}: got process {os.getpid()}, a fork of process {self._process} that has trained with "
                "this program; expected that process. Neither lanes nor OpenMP threads survive a fork. Fork before "
                'the first step, or start the child with multiprocessing.get_context("spawn")'
            )

    def _begin(self, plan: Plan, options: RunOptions) -> list[torch.Event]:
        """Let the streams of all lanes begin after the work that the caller's stream has queued. With
        `options.trace`, returns an event for each device that marks time 0."""
        if not self.on_device:
            return []
        callers = [torch.accelerator.current_stream(device) for device in self.devices]
        for lane in plan.lanes:
            for n in {plan.graph.ops[i].device for i in lane.ops}:
                if (stream := self.stream(lane.name, n)) is not None:
                    stream.wait_stream(callers[n])  # what the caller has queued comes first
        if not options.trace:
            return []
        bases = [torch.Event(device, enable_timing=True) for device in self.devices]
        for waited in (callers, bases):  # all devices are idle when they record, so at one moment
            for base, caller in zip(bases, callers, strict=True) if waited is bases else ():
                base.record(caller)
            if not poll(lambda done=waited: all(x.query() for x in done), self.patience):
                raise LaneTimeout(
                    f"the device has not done what was queued before the step in {self.patience:g} s"
                )
        return bases

    def stream(self, lane: str, n: int = 0) -> torch.Stream | None:
        """The stream of a lane on device number `n` of the executor's devices; None on the CPU."""
        if not self.on_device:
            return None
        if (lane, n) not in self._streams:
            self._streams[lane, n] = take_stream(self.devices[n])
        return self._streams[lane, n]

    def _thread(self, name: str) -> "SimpleQueue[Any]":
        if name not in self._threads:
            tasks: SimpleQueue[Any] = SimpleQueue()
            weakref.finalize(self, tasks.put, None)
            threading.Thread(target=_work, args=(tasks,), name=f"zfunc {name}", daemon=True).start()
            self._threads[name] = tasks
        return self._threads[name]

    def _join(self, run: RunningStep, done: threading.Event, thread: str) -> None:
        while self._times_out(run, done):
            if run.failure is None:
                self._fail(run, LaneTimeout(_timeout_message("the step", thread, run, self.patience)))
            raise run.failure or AssertionError

    def _let_end(self, run: RunningStep, lanes: list[threading.Event]) -> None:
        """After a failed step, wait until its threads have set the events `lanes`: operations in progress may
        still write memory.

        After an interrupt, do not wait for a drive that does not answer; after a second one, do not wait at
        all.
        """
        began, interrupted = time.monotonic(), not isinstance(run.failure, Exception)
        try:
            for done in lanes:
                while not done.wait(min(self.patience, 1.0)) and time.monotonic() < began + self.patience:
                    if interrupted and time.monotonic() > began + LEAVE_AFTER and self._waits_for_disk(run):
                        break
        except BaseException as error:
            self._fail(run, error)
            interrupted = True
        if interrupted and not all(done.is_set() for done in lanes):
            busy = ", ".join(run.running.values())
            run.failure = AbandonedCalls(f"interrupted, and did not wait for {busy}")

    def _finish(self, run: RunningStep) -> None:
        """Wait for the streams of all lanes; an error is recorded in `run` if it is the step's first."""
        lanes = {lane.name for lane in run.prepared.plan.lanes}
        for (lane, n), stream in self._streams.items():
            if lane not in lanes or isinstance(run.failure, LaneTimeout | RankError):
                continue  # the device hangs, or its collectives do
            try:
                self._wait_for_device(run, lane, stream.query, "the end of the step", lane, lambda: False)
            except BaseException as error:
                self._fail(run, _device_error(error, "the end of the step", self.devices[n]))

    def _wait_for_device(
        self,
        run: RunningStep,
        thread: str,
        done: Callable[[], bool],
        waiter: str,
        awaited: str,
        given_up: Callable[[], bool] | None = None,
    ) -> None:
        """Poll until `done()` or `given_up()`, by default that a thread has failed. Raises LaneTimeout
        (`waiter` waited for `awaited`) after `patience` seconds, and errors of `options.watch`."""
        collective, run.waiting[thread] = False, awaited
        given_up = given_up or (lambda: run.failure is not None)

        def stops() -> bool:
            nonlocal collective
            collective = run.options.watch is not None and run.options.watch()
            return given_up()

        finished = poll(done, self.patience, stops) or (collective and poll(done, self.patience, stops))
        if not finished and not given_up():
            raise LaneTimeout(
                f"{waiter} waited {self.patience:g} s for {awaited}, which the device has not finished: the step "
                f"was stopped; {SLOW}"
            )
        del run.waiting[thread]

    def _drive(self, run: RunningStep, thread: str) -> None:
        """Issue the operations of thread `thread` in order; an exception stops every thread of the step."""
        entered: torch.Stream | None = None
        random = Random(f"{run.options.jitter.seed} {thread}") if run.options.jitter else None
        last: dict[str, tuple[IssuedOp, torch.Stream | None]] = {}  # of each lane
        item: IssuedOp | None = None
        try:
            # The caller's thread is not ours to bind.
            if thread in run.prepared.sweeping and thread != run.prepared.main:
                bind_to_nodes()
            with torch.no_grad(), ExitStack() as working:
                for item in run.prepared.threads[thread]:
                    stream = self.stream(item.lane, item.op.device)
                    if stream is not entered:
                        working.close()
                        working.enter_context(work_on(stream))
                        entered = stream
                    self._await(run, item, thread, stream)
                    previous, before = last.get(item.lane, (None, None))
                    if before is not None and previous is not None and previous.on_stream:
                        if not item.on_stream:
                            self._wait_for_device(run, thread, before.query, item.op.name, previous.op.name)
                        elif stream is not before:
                            stream.wait_stream(before)  # type: ignore[union-attr]
                    if run.failure is not None:
                        return
                    if random is not None:
                        self._delay(item, random, run.options.jitter)  # type: ignore[arg-type]
                    if thread != run.prepared.main:
                        self._size_team(item)
                    self._issue(run, item, thread, stream)
                    last[item.lane] = item, stream
        except BaseException as error:  # also an interrupt: no thread may be left running
            self._fail(run, _named(error, item, self.devices, run.options.debug))
        finally:
            run.running.pop(thread, None)

    def _delay(self, item: IssuedOp, random: Random, jitter: Jitter) -> None:
        """Delay the host before it issues the operation `item`, and the device before it begins the operation."""
        time.sleep(random.random() * jitter.seconds)
        if item.on_stream:
            delay_stream(self.devices[item.op.device], random.random() * jitter.seconds)

    def _size_team(self, item: IssuedOp) -> None:
        """Set the size of this thread's OpenMP team for an operation. Compute gets the caller's size on any lane,
        or the bits of a product would depend on the schedule. Copies and small host work are memory-bound and get
        one thread, or two lanes on two cores would be four spinning threads. The Adam kernel has a team of its own,
        of all cores, even beside compute on the CPU. A smaller team would starve compute: every product waits at
        its barrier for the thread whose core the Adam kernel has, while the other threads spin. With a full team
        there are more threads than CPUs, for which libgomp spins briefly: waiting threads sleep, and are woken
        ahead of the Adam kernel's."""
        wanted = self._team if item.op.kind == "compute" else 1
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    def _await(self, run: RunningStep, item: IssuedOp, thread: str, stream: torch.Stream | None) -> None:
        """Wait for the operations of other lanes that `item` depends on: on the host, or, for work on
        streams, by letting `stream` wait on the device."""
        plan = run.prepared.plan
        for i in item.waits:
            awaited = plan.graph.ops[i].name
            if (flag := run.flags.get(i)) is not None and self._times_out(run, flag):
                what = f"{item.op.name} (lane {item.lane})"
                raise LaneTimeout(_timeout_message(what, plan.thread_of(i), run, self.patience, awaited))
            event = run.prepared.events.get(i)
            if event is None or run.failure is not None or run.options.debug:  # in debug mode it is finished
                continue
            if item.on_stream:
                stream.wait_event(event)  # type: ignore[union-attr]
            else:
                self._wait_for_device(run, thread, event.query, item.op.name, awaited)

    def _times_out(self, run: RunningStep, flag: threading.Event) -> bool:
        """Wait for `flag`; True if it is not set within `patience` seconds, or twice that while another lane
        is in a collective, which times out by itself and then reports which rank is missing."""
        if flag.wait(self.patience):
            return False
        while self._waits_for_disk(run):  # however slow: the state is worth more than the time
            log.warning("a step waits for the disk: %s", ", ".join(run.running.values()))
            if flag.wait(self.patience):
                return False
        return not ("network" in self._kinds(run) and flag.wait(self.patience))

    def _waits_for_disk(self, run: RunningStep) -> bool:
        return not self._kinds(run).isdisjoint(("read", "write"))

    def _kinds(self, run: RunningStep) -> set[Kind]:
        graph = run.prepared.plan.graph
        return {graph.ops[graph.position[name]].kind for name in list(run.running.values())}

    def _issue(self, run: RunningStep, item: IssuedOp, thread: str, stream: torch.Stream | None) -> None:
        run.running[thread] = item.op.name
        run.started[item.position] = False
        timed, device = run.options.trace and item.on_stream, self.devices[item.op.device]
        if item.on_stream and item.shared:
            record_use(device, [run.mem.get(r) for r in item.shared])  # made on another stream, perhaps
        if timed:
            pair = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            run.timed[item.position] = pair
            pair[0].record(stream)
        start = time.perf_counter()
        for fault in run.options.faults:
            if fault.op == item.op.name:
                fault.happen()
        if run.options.debug:
            with run.one_at_a_time if item.on_stream else nullcontext():
                guard = AccessGuard(item.op, run.mem)
                item.stage(item.op, guard, run.step)
                if item.on_stream:
                    self._wait_for_device(run, thread, stream.query, "debug mode", item.op.name)  # type: ignore[union-attr]
                guard.check()
        else:
            item.stage(item.op, run.mem, run.step)
        run.started[item.position] = True
        run.spans.append((item.position, start - run.origin, time.perf_counter() - run.origin))
        if timed:
            run.timed[item.position][1].record(stream)
        if item.drops:
            with run.lock:
                for r in item.drops:
                    run.left[r] -= 1
                    if not run.left[r]:
                        run.mem.pop(r, None)
        run.running.pop(thread, None)
        if item.awaited:
            event = run.prepared.events.get(item.position)
            if event is not None:
                event.record(stream)
        if item.told:  # after the record, or a waiter would see the event of the last step
            run.flags[item.position].set()

    def _fail(self, run: RunningStep, error: BaseException) -> None:
        with run.lock:
            run.failure = run.failure or error
        for flag in run.flags.values():
            flag.set()


def _work(tasks: "SimpleQueue[Any]") -> None:
    """The main loop of an executor thread: for each step run what queue `tasks` brings; None ends it."""
    while (task := tasks.get()) is not None:
        executor, run, thread, done = task
        try:
            executor._drive(run, thread)
        finally:
            del executor, run, task  # or an idle thread would keep the last step's memory
            done.set()


def _named(
    error: BaseException, item: IssuedOp | None, devices: Sequence[torch.device], debug: bool
) -> BaseException:
    """The exception to raise for `error`: zfunc's own errors, interrupts, and errors outside of an operation
    (`item` None) unchanged; any other as ExecutionError with the operation's name. For a device's error the
    name is certain only with `debug`."""
    own = type(error).__module__.startswith("zfunc.") or not isinstance(error, Exception)
    if own or item is None:
        return error
    if isinstance(error, torch.AcceleratorError) and not debug:
        return _device_error(error, f"{item.op.name} on lane {item.lane}", devices[item.op.device])
    named = ExecutionError(f"{item.op.name} on lane {item.lane}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def _device_error(error: BaseException, noticed: str, device: torch.device) -> BaseException:
    """An ExecutionError for `error` if a device reported it: `noticed` names the operation, or the end of the step,
    at which it was reported, perhaps after its cause. Any other `error` is returned unchanged."""
    if not isinstance(error, torch.AcceleratorError):
        return error
    late = ExecutionError(
        f"{noticed}: the device reports {str(error).strip()}. It does so late: an earlier operation may be the "
        f"cause. zfunc.train_step(..., debug=True) finds which{_recovery(device)}"
    )
    late.__cause__ = error
    return late


def _recovery(device: torch.device) -> str:
    """The end of an error message on how to go on: "" or, if the error has made `device` unusable in this
    process, that a new process is needed."""
    try:
        torch.accelerator.current_stream(device).query()
    except RuntimeError:
        return ", in a new process: this one cannot use the device any more"
    return ""


def _timeout_message(what: str, thread: str, run: RunningStep, patience: float, op: str = "the end") -> str:
    now = run.running.get(thread)
    # A thread that is idle may wait for one that waits for the device.
    stuck = thread if now or thread in run.waiting else next(iter(run.waiting.copy()), thread)
    doing = f"is in {now}" if now else "is not in any operation"
    if on_device := run.waiting.get(stuck):
        doing = f"waits for {on_device}, which the device has not finished"
    who = "which" if stuck == thread else f"while lane {stuck}"
    return (
        f"{what} waited {patience:g} s for {op} of lane {thread}, {who} {doing}: the step was stopped; {SLOW}"
    )


def _timeline(run: RunningStep, bases: Sequence[torch.Event]) -> Timeline:
    plan = run.prepared.plan
    times = {i: (start, end) for i, start, end in run.spans}
    for i, (first, last) in run.timed.items():
        base = bases[plan.graph.ops[i].device]
        times[i] = base.elapsed_time(first) / 1e3, base.elapsed_time(last) / 1e3
    events = (
        Event(lane.name, plan.graph.ops[i].name, plan.graph.ops[i].kind, *times[i])
        for lane in plan.lanes
        for i in lane.ops
    )
    return Timeline(tuple(events), "measured")
