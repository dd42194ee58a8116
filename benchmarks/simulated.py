"""Does a simulated step take as long as a real one, is the faster schedule told, and does planned memory hold?

For each model a Serial and an overlapped program are traced, and this machine described by what operations took,
as `zfunc calibrate` does. From that alone the step of every schedule is predicted. Traced steps and the steps of
all schedules, which are not traced, take turns; measured is the median. All train one State, so they do the same
work.

Of two schedules the measured order counts unless they tie: unless the ratio of their times, turn by turn, has 1 in
its interquartile range. Device memory is what a step allocates beyond what is always there, under Serial.

    python -m benchmarks.simulated --json benchmarks/results
    python -m benchmarks.simulated --threads 1    # compute on one core: the others are the host's
"""

import argparse
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from attrs import evolve, frozen

import zfunc
from benchmarks.machine import gpt, make_parser, write
from zfunc import schedules
from zfunc.core.graph import Op
from zfunc.core.hardware import Hardware
from zfunc.core.simulator import simulate
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.engine.state.state import State
from zfunc.engine.trace.cost_trace import AllocationTracker
from zfunc.planner.calibrate import (
    MeasuredStep,
    clocked,
    handoff,
    make_profile,
    measure_beside,
    middle_half,
    operation_costs,
)
from zfunc.runtime.accelerator import (
    accelerator_type,
    allocated_bytes,
    best_precision,
    on_accelerator,
    peak_bytes,
    pick_device,
    reset_peak,
)

MODELS = "4x256x4x64x2,4x512x8x64x2,6x768x8x64x2"
TRACED = {"alone": "Serial", "beside": "Overlapped"}  # what the calibration runs
WARM_UP = 3
TARGET, TARGET_MEMORY = 0.15, 0.10


@frozen(eq=False)
class Measured:
    """Measurements of a model: seconds of each turn by schedule, traced steps, and a step's device memory,
    planned and allocated, in bytes."""

    name: str
    programs: dict[str, Program]
    batch: Any
    seconds: dict[str, list[float]]
    traced: list[MeasuredStep]  # one operation at a time
    beside: list[MeasuredStep]  # overlapped
    spent: list[tuple[Op, float]]  # seconds of the thread in each stage, on a device
    planned: int
    allocated: int


def compiled(args: argparse.Namespace, shape: list[int]) -> tuple[dict[str, Program], Any]:
    """A program for each schedule, by name, and a batch; all programs can train the same State."""
    args.num_layers, args.hidden_size, args.num_attention_heads, args.seq_length, rows = shape
    tokens = torch.randint(0, 256, (rows, args.seq_length), generator=torch.Generator().manual_seed(0))
    made: dict[str, Program] = {}
    for name, schedule in {**TRACED, **{s: s for s in args.schedules.split(",")}}.items():
        program = zfunc.compile(
            gpt(args),
            optimizer=zfunc.AdamW(lr=1e-5),
            schedule=schedule,
            precision=args.precision,
            clip_norm=args.clip or None,
            bucket_size=args.bucket_size,
            device=args.device,
            example=(tokens, tokens),
        )
        made[name] = evolve(program, identity=made["alone"].identity) if made else program
    return made, (tokens, tokens)


def measured(args: argparse.Namespace, model: str) -> Measured:
    """Train the model's programs in turns, and measure steps and memory."""
    programs, batch = compiled(args, [int(n) for n in model.split("x")])
    programs["alone"], spent = clocked(programs["alone"])
    state = zfunc.init(programs["alone"])
    plans = {name: specialize(program, batch).plan for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    traced: dict[str, list[MeasuredStep]] = {name: [] for name in TRACED}
    for turn in range(WARM_UP + args.turns):
        for name, program in programs.items():
            state, m = zfunc.train_step(program, state, batch, trace=name in TRACED)
            if turn >= WARM_UP:
                seconds[name].append(m.seconds)
                if m.timeline is not None:
                    traced[name].append(MeasuredStep(plans[name], m.timeline, m.seconds))
    planned, allocated = memory(programs["alone"], state, batch)
    return Measured(model, programs, batch, seconds, *traced.values(), spent, planned, allocated)


def memory(program: Program, state: State, batch: Any) -> tuple[int, int]:
    """Bytes of device memory that a Serial step needs beyond what it keeps: planned, and allocated."""
    planned = specialize(program, batch).memory["device"].transient
    if on_accelerator(program.device):
        torch.accelerator.synchronize(program.device)
        reset_peak(program.device)
        before = allocated_bytes(program.device)
        zfunc.train_step(program, state, batch)
        return planned, peak_bytes(program.device) - before
    with AllocationTracker() as tracker:
        zfunc.train_step(program, state, batch)
    return planned, tracker.peak


def calibrated(args: argparse.Namespace, one: Measured) -> Hardware:
    """A Hardware of this machine, calibrated by the traced steps of the model `one`."""
    program = one.programs["alone"]
    costs, told = operation_costs(middle_half(one.traced)), handoff(middle_half(one.beside)) or 0.0
    machine = measure_beside(program, Path(args.folder))
    return make_profile(machine, costs, told, "a benchmark", one.spent).hardware(args.precision)


def rows(one: Measured, on: Hardware) -> Iterator[dict[str, Any]]:
    """Yield a table row for each schedule, with predicted and measured seconds of a step."""
    for name, program in one.programs.items():
        if name not in TRACED:
            taken = one.seconds[name]
            low, _, high = quantiles(taken, n=4)
            yield {
                "model": one.name,
                "bucket_size": one.programs[name].settings.bucket_size,
                "schedule": name,
                "predicted": simulate(specialize(program, one.batch).plan, on).seconds,
                "measured": median(taken),
                "quartiles": (low, high),
            }


def order(one: Measured, told: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Pairs of schedules, as "a/b", by whether the prediction orders them as measured ("same"), inversely
    ("other"), or the measured difference is within noise ("tie")."""
    predicted = {row["schedule"]: row["predicted"] for row in told}
    found: dict[str, list[str]] = {"same": [], "other": [], "tie": []}
    for a, b in combinations(predicted, 2):
        low, _, high = quantiles([x / y for x, y in zip(one.seconds[a], one.seconds[b], strict=True)], n=4)
        same = (predicted[a] > predicted[b]) == (low > 1)
        found["tie" if low <= 1 <= high else "same" if same else "other"].append(f"{a}/{b}")
    return found


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the models, predict their steps, print tables and return all figures."""
    print(
        f"{'model':>16} {'bucket':>10} {'schedule':>14} {'measured':>10} {'quartiles':>17} {'predicted':>10}  ratio"
    )
    results: dict[str, Any] = {
        "settings": vars(args).copy(),
        "steps": [],
        "order": {},
        "memory": [],
    }
    sizes = [int(size) for size in args.bucket_sizes.split(",")]
    for model, size in product(args.models.split(","), sizes):
        args.bucket_size = size
        one = measured(args, model)
        told = list(rows(one, calibrated(args, one)))
        for row in told:
            low, high = (f"{x * 1e3:.1f}" for x in row["quartiles"])
            taken, said = row["measured"], row["predicted"]
            print(
                f"{model:>16} {args.bucket_size:>10,} {row['schedule']:>14} {taken * 1e3:8.1f}ms "
                f"{low + '..' + high:>17} {said * 1e3:8.1f}ms  {said / taken:.3f}"
            )
        results["steps"] += told
        results["order"][f"{model}, buckets of {args.bucket_size:,}"] = order(one, told)
        results["memory"].append({"model": model, "planned": one.planned, "allocated": one.allocated})
    return results


def judge(results: dict[str, Any]) -> None:
    """Print whether predictions and memory meet the targets."""
    off = [abs(row["predicted"] / row["measured"] - 1) for row in results["steps"]]
    within = sum(x <= TARGET for x in off)
    print(
        f"{within} of {len(off)} predictions within {TARGET:.0%} of the measured; the worst is {max(off):.1%} off"
    )
    pairs = {key: sum(len(of[key]) for of in results["order"].values()) for key in ("same", "other", "tie")}
    print(
        f"order of pairs of schedules: {pairs['same']} as predicted, {pairs['other']} not, {pairs['tie']} tie"
        " (the quartiles of the ratio turn by turn lie on both sides of 1)"
    )
    for row in results["memory"]:
        ratio = row["planned"] / row["allocated"]
        verdict = "within" if 1 <= ratio <= 1 + TARGET_MEMORY else "NOT within"
        print(f"memory of {row['model']}: planned {ratio:.3f} of what was allocated, {verdict} 1 to 1.10")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--models", default=MODELS, help="layers x hidden x heads x tokens x rows, comma separated"
    )
    parser.add_argument(
        "--schedules",
        default=",".join(s for s in schedules.__all__ if s != "Search"),
        help="names, comma separated",
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of compute on the CPU (default: torch's own)")
    parser.add_argument(
        "--clip", type=float, default=0.0, help="largest gradient norm; 0: none, so Adam starts at once"
    )
    parser.add_argument("--precision", default=best_precision(pick_device()))
    parser.add_argument("--bucket-sizes", default=str(1 << 18), help="elements, comma separated")
    parser.add_argument("--device", default=accelerator_type() or "cpu")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    results = report(args)
    judge(results)
    write(args.json, "simulated", results)


if __name__ == "__main__":
    main()
