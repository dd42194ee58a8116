"""How long does it take to make, check and issue a plan, and how does that grow with the number of operations?

The job is a chain of equal segments on two ranks, a bucket each. Times are the best of the repeats, each on
a graph made anew, because what a graph derives it keeps.

    python -m benchmarks.plan --sizes 1000,100000 --repeats 3 --json benchmarks/results

With --many instead: `zfunc plan` of 50 layers with 52 micro-batches, its imports and advice included, with
parameters on the device and on the host, in each order. Then, in one process, the same with activations there too,
and a search of all settings. Steps are planned from a few micro-batches, and, for the ratio, all of them in full.

    python -m benchmarks.plan --many
"""

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from math import log
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.machine import make_parser, write
from zfunc import schedules
from zfunc.cli.commands.plan import PlanSettings, plan_model, plan_text
from zfunc.core.graph import Graph
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan, parse
from zfunc.core.recipes import zero_offload
from zfunc.core.setting_values import PLACES
from zfunc.core.simulator import simulate
from zfunc.core.spec import PassCost, SegmentCost, StepSpec
from zfunc.core.verifier import verify
from zfunc.options import as_flag
from zfunc.planner import candidate
from zfunc.runtime.executor import Executor, RunOptions
from zfunc.runtime.prepared_plan import prepare_plan

SIZES = "1000,3000,10000,30000,100000"
TARGET_OPS, TARGET_SECONDS = 100_000, 5.0
OPS_A_SEGMENT = 9
TARGET_ISSUE = 50e-6  # seconds an operation
MANY = {  # flags of `zfunc plan`
    **{"num_layers": 50, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 1024},
    **{"vocab_size": 50257, "batch_size": 52, "micro_batches": 52},
}
COMMANDS = (
    {},
    {"order": "vertical"},
    {"params_on": "host", "order": "horizontal"},
    {"params_on": "host"},
)
TARGET_COMMAND = 10.0  # seconds
CPU = torch.device("cpu")
EXECUTOR = Executor(CPU)
CHECKED = ("emit", "conflicts", "build", "verify")  # what the target counts


def make_job(num_ops: int) -> StepSpec:
    """The StepSpec of a model whose graph has about `num_ops` operations, with one bucket per segment."""
    num_segments = max(1, round(num_ops / OPS_A_SEGMENT))
    segments = [[Parameter(f"{s}.weight", (1024, 1024))] for s in range(num_segments)]
    layout = make_layout(segments, bucket_size=1024 * 1024, world=2)
    cost = SegmentCost(
        PassCost(10**9, workspace=10**5),
        PassCost(3 * 10**9, workspace=10**5),
        input_bytes=10**6,
        residual_bytes=10**6,
    )
    return StepSpec(layout, (cost,) * num_segments, world=2)


def measure(num_ops: int) -> tuple[int, dict[str, float]]:
    """The number of operations of a graph of about `num_ops`; seconds of making, building, verifying it."""
    job = make_job(num_ops)
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        seconds[name] = time.perf_counter() - start
        return result

    graph: Graph = timed("emit", lambda: Graph(tuple(zero_offload(job))))
    timed("conflicts", lambda: graph.predecessors)
    plan: Plan = timed("build", lambda: schedules.Overlapped()(graph))
    timed("verify", lambda: verify(plan))
    timed("memory", lambda: peak_memory(plan))
    timed("simulate", lambda: simulate(plan))
    timed("interleave", lambda: schedules.Interleaved()(graph))
    text: str = timed("text", plan.text)
    timed("parse", lambda: parse(text))
    stages = dict.fromkeys({op.verb for op in graph}, lambda *_: None)  # issuing alone: the stages do nothing
    ready = prepare_plan(plan, stages, CPU)
    timed("issue", lambda: EXECUTOR.run(ready, {}, None, RunOptions(), {}))
    return len(graph), seconds


def best(num_ops: int, repeats: int) -> dict[str, Any]:
    runs = [measure(num_ops) for _ in range(repeats)]
    return {"ops": runs[0][0], "seconds": {name: min(s[name] for _, s in runs) for name in runs[0][1]}}


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log(seconds) over log(size), fitted by least squares: 1 for linear growth."""
    xs, ys = [log(n) for n in sizes], [log(s) for s in seconds]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


def report(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Print seconds and us per operation, by size and part; returns each part's exponent of growth."""
    names = list(rows[0]["seconds"])
    print(f"{'operations':>18}" + "".join(f"{name:>12}" for name in names))
    for row in rows:
        print(f"{row['ops']:>10,} seconds" + "".join(f"{row['seconds'][name]:>12.4f}" for name in names))
        per_op = "".join(f"{row['seconds'][name] / row['ops'] * 1e6:>12.2f}" for name in names)
        print(f"{'us/op':>18}{per_op}")
    if len(rows) < 2:
        return {}
    sizes = [row["ops"] for row in rows]
    growth = {name: exponent(sizes, [row["seconds"][name] for row in rows]) for name in names}
    print(f"{'growth exponent':>18}" + "".join(f"{growth[name]:>12.2f}" for name in names))
    return growth


def judge(row: dict[str, Any]) -> str:
    """Text on whether the largest plan was built and verified within the target time."""
    seconds = sum(row["seconds"][name] for name in CHECKED)
    if row["ops"] < 0.9 * TARGET_OPS:
        return f"{row['ops']:,} operations are too few to judge the target of {TARGET_OPS:,}"
    issue = row["seconds"]["issue"] / row["ops"]
    issued = (
        f"issuing {issue * 1e6:.1f} us an operation, {'within' if issue <= TARGET_ISSUE else 'NOT within'} 50"
    )
    verdict = "within" if seconds <= TARGET_SECONDS else "NOT within"
    made = f"{' + '.join(CHECKED)} of {row['ops']:,}: {seconds:.2f} s, {verdict} the target of {TARGET_SECONDS:g} s"
    return f"{made}; {issued}"


def run_command(words: list[str]) -> float:
    """CPU seconds, user and system, of running `zfunc plan` with the arguments `words`."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run([sys.executable, "-m", "zfunc", "plan", *words], stdout=subprocess.DEVNULL, check=False)
    return spent() - before


def measure_commands(repeats: int) -> dict[str, float]:
    """CPU seconds of each of COMMANDS, by its flags: the least of `repeats` runs."""
    seconds: dict[str, float] = {}
    for changes in COMMANDS:
        name = " ".join(as_flag(*item) for item in changes.items()) or "as it is"
        words = " ".join(as_flag(*item) for item in (MANY | changes).items()).split()
        seconds[name] = min(run_command(words) for _ in range(repeats))
        verdict = "within" if seconds[name] <= TARGET_COMMAND else "NOT within"
        print(f"{name:>44}{seconds[name]:>8.1f} s, {verdict} {TARGET_COMMAND:g}", flush=True)
    return seconds


def plan_many(**changes: Any) -> float:
    """CPU seconds of planning 50 layers and 52 micro-batches with settings `changes`, torch imported
    before."""
    start = time.process_time()
    settings = PlanSettings(**{**MANY, **changes})
    plan_text(plan_model(settings))
    return time.process_time() - start


def measure_many() -> dict[str, float]:
    """CPU seconds of planning many micro-batches: under some settings, in a search, without extrapolation."""
    plan_model(PlanSettings(num_layers=1, hidden_size=64, num_attention_heads=2))  # imports
    seconds = {
        f"{order}{', streamed' if place == 'host' else ''}": plan_many(
            order=order, params_on=place, activations_on=place
        )
        for place in PLACES
        for order in ("horizontal", "vertical")
    }
    seconds["search"] = plan_many(schedule="auto", params_on="auto", activations_on="auto")
    with patch.object(candidate, "MANY", math.inf):
        seconds["horizontal, in full"] = plan_many(order="horizontal")
    for name, value in seconds.items():
        print(f"{name:>22}{value:>12.1f} s")
    print(f"{'ratio of horizontal':>22}{seconds['horizontal, in full'] / seconds['horizontal']:>12.1f}")
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", default=SIZES, help="operations, comma separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--many", action="store_true", help="50 layers with 52 micro-batches")
    options = parser.parse_args()
    if options.many:
        commands = measure_commands(options.repeats)
        write(options.json, "plan_many", {"commands": commands, "seconds": measure_many()})
        return
    rows = [best(int(size), options.repeats) for size in options.sizes.split(",")]
    growth = report(rows)
    print(judge(rows[-1]))
    write(options.json, "plan", {"rows": rows, "growth_exponents": growth, "verdict": judge(rows[-1])})


if __name__ == "__main__":
    main()
