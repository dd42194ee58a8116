"""Timelines in the Chrome trace event format, for Perfetto and chrome://tracing; those of zfunc are also read."""

import json
import math
from collections.abc import Iterator
from typing import Any

from zfunc.core.graph import KINDS
from zfunc.core.timeline import Event, Timeline
from zfunc.viz.legend import Timelines, timeline_tuple

_PROCESS = "zfunc, "  # and then the timeline's source


def chrome_trace(timelines: Timelines) -> str:
    """The timelines as JSON in the Chrome trace event format: a process a timeline, a thread a lane."""
    trace = [entry for pid, t in enumerate(timeline_tuple(timelines)) for entry in _entries(pid, t)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": trace}, separators=(",", ":"))


def _entries(pid: int, timeline: Timeline) -> Iterator[dict[str, object]]:
    lanes = {lane: n for n, lane in enumerate(timeline.lanes)}
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{_PROCESS}{timeline.source}"}}
    for lane, n in lanes.items():
        yield {"ph": "M", "pid": pid, "tid": n, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "pid": pid, "tid": n, "name": "thread_sort_index", "args": {"sort_index": n}}
    for e in timeline.events:
        times = {"ts": round(e.start * 1e6, 3), "dur": round(e.seconds * 1e6, 3)}
        yield {"ph": "X", "pid": pid, "tid": lanes[e.lane], "name": e.op, "cat": e.kind, **times}


def read_chrome_trace(text: str) -> Timeline:
    """The timeline that `chrome_trace` wrote, exact to the nanosecond.

    Raises ValueError, with the event, for any other text.

    >>> timeline = Timeline((Event("gpu", "use[0]", "compute", 0.0, 2e-3),), "measured")
    >>> read_chrome_trace(chrome_trace(timeline)) == timeline
    True
    """
    source, lanes, events = "", dict[int, str](), dict[str, Event]()
    entry: Any = text
    try:
        for entry in _checked(json.loads(text)["traceEvents"], list):
            form, name = entry["ph"], _checked(entry["name"], str)
            if (form, name) == ("M", "process_name") and not source:
                known, source = _checked(entry["args"]["name"], str).split(_PROCESS, 1)
                _check(not known and source)
            elif (form, name) == ("M", "thread_name"):
                lane = _checked(entry["args"]["name"], str)
                _check(entry["tid"] not in lanes and lane not in lanes.values())
                lanes[entry["tid"]] = lane
            elif form == "X":
                times = entry["ts"], entry["dur"]
                _check(name not in events and entry["cat"] in KINDS and {*map(type, times)} <= {int, float})
                _check(min(times) >= 0 and sum(times) < math.inf)
                lane, end = lanes[entry["tid"]], sum(times) / 1e6
                events[name] = Event(lane, name, entry["cat"], entry["ts"] / 1e6, end)
            else:
                _check((form, name) == ("M", "thread_sort_index"))
        _check(source)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"got {str(entry)[:200]!r} in a trace, expected those of one step: give a timeline.json that zfunc "
            "train wrote, or zfunc draw as a chrome trace"
        ) from error
    return Timeline(tuple(events.values()), source)


def _check(good: object) -> None:
    if not good:
        raise ValueError


def _checked(value: Any, kind: type) -> Any:
    _check(isinstance(value, kind))
    return value
