"""A plan prepared for execution: for each thread, the operations it issues, with all that is known beforehand."""

from collections.abc import Callable, Mapping

import torch
from attrs import frozen

from zfunc.core.graph import HOST_CODE, Op, Region
from zfunc.core.plan import Plan
from zfunc.runtime.accelerator import on_accelerator

Stage = Callable[..., None]


@frozen(eq=False)
class IssuedOp:
    """One operation of a plan, prepared for execution: its function, lane, waits, and what else is fixed."""

    op: Op
    lane: str
    stage: Stage
    position: int  # in the graph
    waits: tuple[int, ...]
    on_stream: bool
    awaited: bool  # by another lane
    told: bool  # to another thread, when it has been issued
    drops: tuple[Region, ...]  # regions it accesses that do not outlive the step
    shared: tuple[Region, ...]  # those of them that another lane accesses too


@frozen(eq=False)
class PreparedPlan:
    """A plan prepared for execution: for each thread, the operations that it issues, with their functions.
    `main` names the thread whose operations the caller's thread issues."""

    plan: Plan
    threads: dict[str, tuple[IssuedOp, ...]]
    main: str
    sweeping: frozenset[str]  # threads of host operations without compute beside them
    accesses: dict[Region, int]
    events: dict[int, torch.Event]


def prepare_plan(plan: Plan, stages: Mapping[str, Stage], *devices: torch.device) -> PreparedPlan:
    """Prepare `plan` for execution on `devices`: look up each operation's function in `stages`, by verb.
    Raises ValueError for a verb without one."""
    missing = sorted({op.verb for op in plan.graph} - stages.keys())
    if missing:
        raise ValueError(
            f"got operations {missing} in the plan, expected verbs with a stage: {sorted(stages)}. Add a "
            "function for each to the table of stages"
        )
    streams = on_accelerator(devices[0])
    awaited = {n for waits in plan.waits for n in waits}
    told = {n for i in plan.place for n in plan.waits[i] if plan.thread_of(n) != plan.thread_of(i)}
    accesses: dict[Region, int] = {}
    # A lane has a stream on each of its devices, and a peer reads what was made on a stream of another.
    used_on: dict[Region, set[tuple[str, int]]] = {}
    for lane in plan.lanes:
        for op in (plan.graph.ops[i] for i in lane.ops):
            for r in (r for r in op.regions if not r.kept):
                used_on.setdefault(r, set()).add((lane.name, op.device))
    threads: dict[str, tuple[IssuedOp, ...]] = {}
    for thread, ops in plan.threads.items():
        items: list[IssuedOp] = []
        for i in ops:
            op, lane = plan.graph.ops[i], plan.lanes[plan.place[i][0]].name
            drops = tuple(r for r in op.regions if not r.kept)
            for r in drops:
                accesses[r] = accesses.get(r, 0) + 1
            on_stream = streams and op.kind not in HOST_CODE
            shared = tuple(r for r in drops if len(used_on[r]) > 1)
            known = i in awaited, i in told
            items.append(
                IssuedOp(op, lane, stages[op.verb], i, plan.waits[i], on_stream, *known, drops, shared)
            )
        threads[thread] = tuple(items)
    kinds = {thread: {x.op.kind for x in items} for thread, items in threads.items()}
    main = next((thread for thread, of in kinds.items() if "compute" in of), next(iter(threads)))
    sweeping = frozenset(thread for thread, of in kinds.items() if "host" in of and "compute" not in of)
    on_streams = (i for i in awaited if streams and plan.graph.ops[i].kind not in HOST_CODE)
    events = {i: torch.Event(devices[plan.graph.ops[i].device]) for i in on_streams}
    return PreparedPlan(plan, threads, main, sweeping, accesses, events)
