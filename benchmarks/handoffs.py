"""What does an operation cost that does nothing, and what to hand over from one lane to another?

A chain of operations that do nothing runs on one lane, and in turn on several, where each waits for one on another:
the difference is that of the hand-overs. Then the plan of a small GPT's step runs with stages that do nothing, and
with stages that hold the interpreter lock, each for as long, under Serial, Overlapped and TwoThreads: threads of
Python have one such lock, so lanes hide no such time, and fewer threads hand over less. Last, the operations that
torch dispatches in each stage of a real step, of which those that are no views are launches on a device; and an
update of few elements, whose buffers are checked in each step (as in debug mode) or once for a State, and of three
runs of such, each a call of the kernel, or all one call.

    python -m benchmarks.handoffs [--num-layers 6] [--json FILE_OR_FOLDER]
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zfunc
from benchmarks.machine import describe, gpt, make_parser, ratios, write
from zfunc import schedules
from zfunc.core.decision import StepDecision
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.plan import Plan, build
from zfunc.engine.program.program import rescheduled
from zfunc.engine.program.specialize import specialize
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.trace.operation_kernels import is_launched
from zfunc.optim.updates import CheckedState, KernelCalls
from zfunc.runtime.executor import Executor, RunOptions
from zfunc.runtime.prepared_plan import prepare_plan

CPU = torch.device("cpu")


class Dispatches(TorchDispatchMode):
    """A mode that counts the operations that torch dispatches, and the kernels a device would launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.launched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.launched += is_launched(func)
        return func(*args, **(kwargs or {}))


def chain(num_ops: int, num_lanes: int) -> Plan:
    """A plan of `num_ops` operations on `num_lanes` lanes in turn; each waits for the one before it."""
    x = Region("x")
    graph = Graph(tuple(Op(f"nothing{i}", (), "host", reads=(x,), writes=(x,)) for i in range(num_ops)))
    return build(graph, {f"lane{n}": range(n, num_ops, num_lanes) for n in range(num_lanes)})


def hand_overs(plan: Plan) -> int:
    """The number of waits in `plan` between operations on different threads."""
    return sum(plan.thread_of(n) != plan.thread_of(i) for i, waits in enumerate(plan.waits) for n in waits)


def runner(executor: Executor, plan: Plan, hold: float = 0.0) -> Callable[[], float]:
    """A function that runs `plan` and returns its seconds; each stage holds Python's lock for `hold` seconds."""

    def stage(*_: Any) -> None:
        end = time.perf_counter() + hold
        while time.perf_counter() < end:
            pass

    ready = prepare_plan(plan, dict.fromkeys({op.verb for op in plan.graph}, stage), CPU)
    return lambda: executor.run(ready, dict.fromkeys(plan.graph.regions), None, RunOptions(), {}).seconds


def in_turns(turns: int, runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of each of `runs`, by name, one number per turn. All run once before, which does not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns + 1):
        for name, run in runs.items():
            found[name].append(run())
    return {name: seconds[1:] for name, seconds in found.items()}


def chains(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of an operation on one lane, and of a hand-over on two and on four lanes, by name."""
    plans = {n: chain(args.ops, n) for n in (1, 2, 4)}
    executor = Executor(CPU)
    taken = in_turns(args.turns, {str(n): runner(executor, plan) for n, plan in plans.items()})
    alone = median(taken["1"])
    found = {"an operation": alone / args.ops}
    for n in (2, 4):
        found[f"a hand-over, {n} lanes"] = (median(taken[str(n)]) - alone) / hand_overs(plans[n])
    return found


def step_plans(args: argparse.Namespace) -> tuple[dict[str, Plan], dict[str, tuple[int, int, int]]]:
    """The plans of a GPT's step, by schedule; by verb, numbers of operations, dispatches and launches."""
    counts, dispatched, launched = Counter[str](), Counter[str](), Counter[str]()

    def counted(verb: str) -> Callable[..., None]:
        def stage(*given: Any) -> None:
            with Dispatches() as seen:
                STAGES[verb](*given)
            counts[verb] += 1
            dispatched[verb] += seen.count
            launched[verb] += seen.launched

        return stage

    program = zfunc.compile(
        gpt(args),
        bucket_size=args.bucket_size,
        clip_norm=1.0,
        precision="fp32",
        schedule="Serial",
        device="cpu",
        stages={verb: counted(verb) for verb in STAGES},
    )
    tokens = torch.randint(
        0, 256, (args.batch_size, args.seq_length), generator=torch.Generator().manual_seed(0)
    )
    state, _ = zfunc.train_step(program, zfunc.init(program), (tokens, tokens))  # traces
    for counter in (counts, dispatched, launched):
        counter.clear()
    zfunc.train_step(program, state, (tokens, tokens))
    ways = [schedules.Serial(), schedules.Overlapped(), schedules.TwoThreads()]
    beside = {type(x).__name__: rescheduled(program, x) for x in ways}
    plans = {name: specialize(x, (tokens, tokens)).plan for name, x in beside.items()}
    return plans, {verb: (n, dispatched[verb], launched[verb]) for verb, n in counts.items()}


def updates(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and Python calls of host updates of 64 elements, with buffers checked in each step or once, and
    for three buffers one by one or in one call."""
    optimizer = zfunc.AdamW()
    every = {name: torch.zeros(64) for name in ("master", "exp_avg", "exp_avg_sq")}
    decision, grad, out = StepDecision(False, 1.0, 1, optimizer.factors(1)), torch.ones(64), torch.zeros(64)

    def run(states: list[dict[str, torch.Tensor]], at_once: bool, times: int = 1000) -> float:
        start = time.perf_counter()
        for _ in range(times):
            calls: KernelCalls = {}
            how = {"calls": calls} if at_once else {}
            for state in states:
                optimizer.host_update(state, grad, decision, group=0, out=out, threads=1, **how)
            for kernel, own in calls.items():
                kernel.update_runs(own)
        return (time.perf_counter() - start) / times

    runs = [CheckedState(every) for _ in range(3)]
    ways: dict[str, Any] = {
        **{"each step": ([every], False), "once a State": ([CheckedState(every)], False)},
        **{"three runs alone": (runs, False), "three runs at once": (runs, True)},
    }
    taken, calls = in_turns(args.turns, {name: partial(run, *way) for name, way in ways.items()}), {}
    for name, way in ways.items():
        seen = Counter[str]()
        sys.setprofile(lambda _, event, __, seen=seen: seen.update([event]))
        try:
            run(*way, 1)
        finally:
            sys.setprofile(None)
        calls[name] = seen["call"] + seen["c_call"]
    return {
        **{name: {"seconds": median(of), "calls": calls[name]} for name, of in taken.items()},
        "ratio": ratios(taken["once a State"], taken["each step"]),
        "at once": ratios(taken["three runs at once"], taken["three runs alone"]),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every figure of this benchmark, as a value for JSON."""
    seconds = chains(args)
    plans, verbs = step_plans(args)
    executor = Executor(CPU)
    steps: dict[str, dict[str, float]] = {}
    for hold in (0.0, args.hold * 1e-6):
        taken = in_turns(args.turns, {name: runner(executor, plan, hold) for name, plan in plans.items()})
        steps[f"{hold * 1e6:.0f} us each"] = {
            **{name: median(of) for name, of in taken.items()},
            "ratio": ratios(taken["Overlapped"], taken["Serial"]),
            "two threads": ratios(taken["TwoThreads"], taken["Overlapped"]),
        }
    sizes = {name: {"operations": len(p.graph), "hand_overs": hand_overs(p)} for name, p in plans.items()}
    return {"seconds": seconds, "plans": sizes, "steps": steps, "dispatches": verbs, "updates": updates(args)}


def show(found: dict[str, Any]) -> None:
    print(f"{describe()}, load {os.getloadavg()[0]:.1f}")
    for name, seconds in found["seconds"].items():
        times = seconds / found["seconds"]["an operation"]
        print(f"{name:32}{seconds * 1e6:>10.1f} us{times:>10.1f} operations")
    for name, of in found["plans"].items():
        print(f"{name:32}{of['operations']:>10} operations{of['hand_overs']:>6} hand-overs")
    for name, of in found["steps"].items():
        own = ", ".join(f"{schedule} {of[schedule] * 1e3:.1f} ms" for schedule in found["plans"])
        print(f"stages of {name:22}{own}, Overlapped / Serial {of['ratio']:.2f}", end=", ")
        print(f"TwoThreads / Overlapped {of['two threads']:.2f}")
    print(f"{'verb':32}{'a step':>10}{'dispatches':>12}{'launches':>10}  an operation")
    for verb, (n, dispatched, launched) in found["dispatches"].items():
        print(f"{verb:32}{n:>10}{dispatched / n:>12.1f}{launched / n:>10.1f}")
    n, dispatched, launched = (sum(column) for column in zip(*found["dispatches"].values(), strict=True))
    print(f"{'all':32}{n:>10}{dispatched / n:>12.1f}{launched / n:>10.1f}")
    of = found["updates"]
    for name in [x for x in of if isinstance(of[x], dict)]:
        print(f"update, {name:24}{of[name]['seconds'] * 1e6:>10.1f} us{of[name]['calls']:>10} calls")
    print(f"once a State / each step {of['ratio']:.2f}, at once / alone {of['at once']:.2f}")


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__, num_layers=6, hidden_size=64, num_attention_heads=2, seq_length=8, batch_size=2)
    p.add_argument("--bucket-size", type=int, default=8192, help="elements")
    p.add_argument("--ops", type=int, default=1000, help="of a chain")
    p.add_argument("--hold", type=float, default=100.0, help="microseconds that a stage holds the lock")
    p.add_argument("--turns", type=int, default=9)
    return p


def main() -> None:
    args = parser().parse_args()
    found = measure(args)
    show(found)
    write(args.json, "handoffs", {"arguments": vars(args), **found})


if __name__ == "__main__":
    main()
