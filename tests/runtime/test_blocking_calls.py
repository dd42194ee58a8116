"""Calls on threads: whenever an interrupt comes, none is under way when it is raised, and none begins after it."""

import sys
import time
from itertools import count
from typing import Any

from zfunc.runtime import blocking_calls
from zfunc.runtime.blocking_calls import DaemonThreads, call_each


def test_an_interrupt_at_any_moment_leaves_no_call_under_way() -> None:
    """Before every bytecode of the thread that waits, which has two queues."""
    threads, begun, ended, former = DaemonThreads(2, "test"), list[int](), list[int](), sys.gettrace()

    def call(item: int) -> None:
        begun.append(item)
        time.sleep(0.0005)
        ended.append(item)

    for at in count(1):
        begun.clear()
        ended.clear()
        events, at_once = count(1), list[int]()

        def trace(
            frame: Any, event: str, _: Any, at: int = at, events: Any = events, at_once: Any = at_once
        ) -> Any:
            if frame.f_code.co_filename != blocking_calls.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and next(events) == at:
                time.sleep(0.0002)  # what was submitted begins
                at_once[:] = begun
                raise KeyboardInterrupt
            return trace

        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it in settrace alone
        sys.settrace(trace)
        try:
            call_each(threads, call, range(4), range(4, 8))
            break
        except KeyboardInterrupt:
            so_far = len(begun)
            assert so_far == len(ended) <= len(at_once) + threads.count
            time.sleep(0.001)
            assert so_far == len(begun)
        finally:
            sys.settrace(former)
    assert next(events) - 1 < at
    assert at > 100
    threads.close()
