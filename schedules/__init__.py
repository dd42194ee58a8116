"""Schedules: each a callable `Graph -> Plan` that chooses lanes and the order on each, and nothing else.

    plain           the graph's order on one lane or one for each kind, readiness, what shares cores or a thread
    critical_path   a list scheduler for given hardware
    search          the fastest of those for an accelerator that fits into memory, by simulation

All have default arguments. A new schedule is one file here and its line in the list above, the imports and
`__all__`; the laws in `tests/table.py` take it from there.

Orders of the passes on several devices, for the setting `order`, are in `ORDERS`:

    stages          runs of segments, which the others place on devices
    gpipe           all forwards, then all backwards
    one_f_one_b     a forward and a backward in turn; interleaved, with several stages on each device
    looped_bfs      a stage of each device after another, all micro-batches through each
    round_pipe      stages dealt to the devices in turn, forward and backward cut differently
    csv_file        an order in a file of torch.distributed.pipelining, read and written
    zero_bubble     1F1B whose gradients of weights fill the waiting
    dual_pipe_v     two stages on each device, down and up a V, micro-batches from both sides
"""

from typing import Any

import attrs

from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.pipeline import InGroups, Order
from zfunc.core.setting_values import BY_DEVICE, ONE_DEVICE, Schedule, schedule_for
from zfunc.errors import refuse
from zfunc.options import one_of

from .critical_path import CriticalPath
from .csv_file import FromCSV
from .dual_pipe_v import DualPipeV
from .gpipe import GPipe
from .looped_bfs import LoopedBFS
from .one_f_one_b import Interleaved1F1B, OneFOneB
from .plain import Interleaved, Overlapped, Serial, SharedCores, TwoThreads
from .round_pipe import RoundPipe
from .search import Search
from .zero_bubble import ZeroBubble

_ORDERS = GPipe, OneFOneB, Interleaved1F1B, LoopedBFS, ZeroBubble, DualPipeV, RoundPipe
ORDERS = {x.__name__: x for x in _ORDERS}
__all__ = ["CriticalPath", "Interleaved", "Overlapped", "Search", "Serial", "SharedCores", "TwoThreads"]


def make_order(order: str | int | Order) -> Order:
    """The order of pipeline passes that the setting `order` means: a class of this package by name, such as
    "GPipe"; "by-device", the default for several devices; the path of a .csv file; for one device
    "horizontal", "vertical" or the number of micro-batches in a group. An order object is returned unchanged.

    After a colon, a name may be followed by the number of segments of each stage; for RoundPipe
    forward/backward.

    >>> make_order("OneFOneB:5,4"), make_order("RoundPipe:2,2/1,2,2").backward
    (OneFOneB(cut=(5, 4)), (1, 2, 2))
    """
    if isinstance(order, int):
        return InGroups(order)
    if not isinstance(order, str):
        return order
    if order in ONE_DEVICE:
        return InGroups(ONE_DEVICE[order])
    if order == BY_DEVICE:
        return OneFOneB()
    if order.endswith(".csv"):
        return FromCSV(order)
    name, _, cuts = order.partition(":")
    one_of((*ORDERS, *ONE_DEVICE))("order", name)
    kind: Any = ORDERS[name]
    names = [f.name for f in attrs.fields(kind) if f.name != "stages"]
    parts = cuts.split("/") if cuts else []
    if len(parts) > len(names) or not all(x.isdecimal() for part in parts for x in part.split(",")):
        expected = "/".join([",".join("54444")] * len(names))
        refuse("order", repr(order), f"such as '{name}:{expected}', or the name alone")
    given = {x: [*map(int, part.split(","))] for x, part in zip(names, parts, strict=False)}
    return kind(**given)


def order_name(order: str | int | Order) -> str:
    """Text for an order of passes, such as "OneFOneB:5,4", of which `make_order` makes the same order; where
    there is none, the function's name or the object's repr.

    >>> order_name(OneFOneB((5, 4))), order_name(ZeroBubble(2))
    ('OneFOneB:5,4', 'ZeroBubble(stages=2, cut=())')
    """
    if isinstance(order, str | int):
        return "OneFOneB" if order == BY_DEVICE else str(order)
    if type(order) not in ORDERS.values():
        return getattr(order, "__name__", type(order).__name__)
    values: list[Any] = [x for x in attrs.astuple(order) if isinstance(x, tuple)]
    cuts = [",".join(map(str, x)) for x in values if x]
    name = ":".join([type(order).__name__, *(["/".join(cuts)] if cuts else [])])
    return name if make_order(name) == order else str(order)


def make_schedule(schedule: str | Schedule, hardware: Hardware = ROUND) -> Schedule:
    """The schedule with the name `schedule`, for `hardware` if its class takes one; an object is returned as it is.

    >>> make_schedule("CriticalPath").hardware is ROUND
    True
    """
    schedule = schedule_for(schedule, on_cpu=hardware.unified)
    if not isinstance(schedule, str):
        return schedule
    one_of((*__all__, BY_DEVICE))("schedule", schedule)
    kind: Any = globals()[schedule]
    takes_hardware = any(f.name == "hardware" for f in attrs.fields(kind))
    return kind(hardware=hardware) if takes_hardware else kind()
