"""Timelines in the Chrome trace event format, for Perfetto and chrome://tracing; those of zfunc are also read."""

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn, cast

from zfunc.core.graph import KINDS
from zfunc.core.timeline import Event, Timeline
from zfunc.viz.legend import Timelines, timeline_tuple

_PROCESS = "zfunc, "  # and then the timeline's source


def chrome_trace(timelines: Timelines) -> str:
    """JSON in the Chrome trace event format, for Perfetto: a process a timeline, a thread a lane."""
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
    source, lanes, events = "", dict[int, str](), list[Event]()
    for number, entry in enumerate(_entries_of(text)):
        try:
            form, name = entry["ph"], entry["name"]
            if (form, name) == ("M", "process_name"):
                source = _source(entry["args"]["name"], already=source)
            elif (form, name) == ("M", "thread_name"):
                _name(lanes, entry["tid"], entry["args"]["name"])
            elif form == "X":
                events.append(_event(entry, lanes))
            elif (form, name) != ("M", "thread_sort_index"):
                raise ValueError(f"an event of the form {form!r}, {name!r}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            _refuse(f"{str(entry)[:200]} as event {number} ({error!r})", "one that chrome_trace wrote")
    if not source:
        _refuse("a trace that does not say what it is of", f"a process named {_PROCESS!r} and a source")
    _check_once(events)
    return Timeline(events, source)


def _entries_of(text: str) -> list[Any]:
    """The entries of a trace, unchecked."""
    try:
        trace: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(f"text that is not JSON ({error})", "the trace of a step")
    try:
        entries: Any = trace["traceEvents"]
    except (TypeError, LookupError):
        entries = None
    if not isinstance(entries, list) or not entries:
        _refuse("JSON without a list of traceEvents", "the trace of a step")
    return cast("list[Any]", entries)


def _event(entry: dict[str, Any], lanes: dict[int, str]) -> Event:
    name, kind, start, took = entry["name"], entry["cat"], entry["ts"], entry["dur"]
    if not isinstance(name, str) or kind not in KINDS:
        raise ValueError(f"not a name and one of {', '.join(KINDS)}")
    for what, value in (("ts", start), ("dur", took)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{what} is not a number of microseconds, 0 or more")
    end = (start + took) / 1e6
    if end == math.inf:
        raise ValueError("its end is beyond all numbers")
    return Event(lanes[entry["tid"]], name, kind, start / 1e6, end)


def _source(name: object, already: str) -> str:
    if already or not isinstance(name, str) or not name.startswith(_PROCESS):
        raise ValueError("a second process, or one of another program")
    return name.removeprefix(_PROCESS)


def _name(lanes: dict[int, str], thread: int, name: object) -> None:
    if not isinstance(name, str) or thread in lanes or name in lanes.values():
        raise ValueError("two lanes of one name or number")
    lanes[thread] = name


def _check_once(events: list[Event]) -> None:
    seen = set[str]()
    for e in events:
        if e.op in seen:
            _refuse(f"{e.op} twice", "every operation of one step once")
        seen.add(e.op)


def _refuse(got: str, expected: str) -> NoReturn:
    raise ValueError(
        f"got {got}, expected {expected}: give a timeline.json that zfunc train wrote, or `zfunc draw --out x.json`"
    )
