"""What the host pays to launch a step: Python microseconds of its threads by verb, and launches on a device.

A GPT that is tiny in width and has hundreds of parameters, so that arithmetic hardly counts. On the CPU a stage
computes in the thread that is timed; on the pretend device of the tests it only launches, and the launches are
counted. Time is that of a thread on its core: what else runs here does not count. `executor` is what the lanes
spend between stages, `outside` what `train_step` spends before and after the lanes.

    python -m benchmarks.launch [--devices cpu,pretend] [--json benchmarks/results]
    python -m benchmarks.launch --against ../other    # another checkout, built; both take turns, for the ratio

Without g++ and ninja there is no pretend device, which is said.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import zfunc
from zfunc.engine.stages.stages import STAGES
from zfunc.models.gpt import modules
from zfunc.models.gpt_config import GPTConfig

HERE = Path(__file__).resolve().parents[1]
STEPS = 5  # of a turn


class Clock:
    """CPU seconds of each thread, number of calls and kernel launches, by verb or by part of an operation."""

    def __init__(self) -> None:
        self.seconds, self.calls, self.launches = Counter[str](), Counter[str](), Counter[str]()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its calls, and CPU seconds of their threads, are added up under `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - start
                self.calls[name] += 1

        return run

    def counted(
        self, name: str, launches: Callable[[], int], stage: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap `stage` so that its kernel launches are added up under `name`; right only if no stage runs
        beside it."""

        def run(*args: Any) -> None:
            before = launches()
            stage(*args)
            self.launches[name] += launches() - before

        return run


def prepared(args: argparse.Namespace, device: str) -> Callable[[], dict[str, Any]]:
    """Compile for `device`; returns a function that takes STEPS steps and returns the figures of a step."""
    launches: Callable[[], int] = lambda: 0  # noqa: E731
    if device == "pretend":
        import pretend

        controls = pretend.load()
        controls.delay(0.0, 0)
        launches = controls.launches
    clock = Clock()
    stages: dict[str, Any] = {
        verb: clock.counted(verb, launches, clock.timed(verb, stage)) for verb, stage in STAGES.items()
    }
    config = GPTConfig(
        vocab_size=64, seq_length=8, num_layers=args.num_layers, hidden_size=16, num_attention_heads=2
    )
    torch.manual_seed(0)
    tied = {"out.weight": "embed.tok.weight"}
    segments = [zfunc.segment(n, m, share=tied if n == "head" else None) for n, m in modules(config)]
    program = zfunc.compile(
        segments,
        precision="fp32",
        clip_norm=1.0,
        bucket_size=20_000,
        schedule="Serial",
        recompute=args.recompute,
        device=device,
        stages=stages,
    )
    executor: Any = program.executor
    executor._drive = clock.timed("lanes", executor._drive)
    executor.run = clock.timed("run", executor.run)
    tokens = torch.randint(64, (2, config.seq_length + 1))
    batch, states = (tokens[:, :-1], tokens[:, 1:]), [zfunc.init(program)]

    def turn() -> dict[str, Any]:
        whole = 0.0
        for counter in (clock.seconds, clock.calls, clock.launches):
            counter.clear()
        for _ in range(STEPS):
            start = time.thread_time()
            states[0], _ = zfunc.train_step(program, states[0], batch)
            whole += time.thread_time() - start
        verbs = [v for v in STAGES if clock.calls[v]]
        in_stages = sum(clock.seconds[v] for v in verbs)
        ops = sum(clock.calls[v] for v in verbs)
        return {
            "parameters": len({p.name for s in segments for p in s.parameters}),
            "operations": ops // STEPS,
            "calls": {v: clock.calls[v] / STEPS for v in verbs},
            "launches": {v: clock.launches[v] / STEPS for v in verbs},
            "microseconds_an_operation": {
                **{v: 1e6 * clock.seconds[v] / clock.calls[v] for v in verbs},
                "executor": 1e6 * (clock.seconds["lanes"] - in_stages) / ops,
            },
            "microseconds_a_step": {
                "stages": 1e6 * in_stages / STEPS,
                "executor": 1e6 * (clock.seconds["lanes"] - in_stages) / STEPS,
                "outside": 1e6 * (whole - clock.seconds["run"]) / STEPS,
            },
        }

    return turn


def serve(args: argparse.Namespace) -> None:
    """Warm up, then answer each line of standard input with the figures of one turn, as a line of JSON."""
    turn = prepared(args, args.serve)
    turn()
    for _ in sys.stdin:
        print(json.dumps(turn()), flush=True)


def start(args: argparse.Namespace, device: str, checkout: Path) -> subprocess.Popen[str]:
    """Start this benchmark in a process that imports zfunc from `checkout` and measures turns on request."""
    path = os.pathsep.join(map(str, (checkout, HERE, HERE / "tests")))
    sizes = ["--num-layers", str(args.num_layers), "--recompute", args.recompute]
    return subprocess.Popen(
        [sys.executable, __file__, *sizes, "--serve", device],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Have `process` measure one turn; returns the turn's figures."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the measuring process ended with {process.wait()}: its error is above")
    return json.loads(line)


def middle(turns: list[dict[str, Any]], key: str) -> dict[str, float]:
    """By name, the medians over all turns of the numbers that each turn has under `key`."""
    return {name: median(t[key][name] for t in turns) for name in turns[0][key]}


def measure(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """The figures of one device; with `--against`, also ratios to the other checkout, turn by turn."""
    checkouts = [HERE, *([Path(args.against).resolve()] if args.against else [])]
    processes = [start(args, device, checkout) for checkout in checkouts]
    try:
        turns = [[answer(p) for p in processes] for _ in range(args.turns)]
    finally:
        for p in processes:
            p.communicate()  # ends its input, and waits
    ours = [t[0] for t in turns]
    keys = ("calls", "launches", "microseconds_an_operation", "microseconds_a_step")
    result = {
        "device": device,
        **{k: ours[0][k] for k in ("parameters", "operations")},
        **{k: middle(ours, k) for k in keys},
    }
    if args.against:
        result["against"] = {k: middle([t[1] for t in turns], k) for k in keys[2:]}
        result["ratio"] = {
            k: {name: median(t[0][k][name] / t[1][k][name] for t in turns) for name in ours[0][k]}
            for k in keys[2:]
        }
    return result


def show(result: dict[str, Any]) -> None:
    ratio = result.get("ratio")
    print(f"{result['device']}: {result['parameters']} parameters, {result['operations']} operations a step")
    print(f"{'':16}{'a step':>8}{'launches':>10}{'us each':>9}" + ("    ratio" if ratio else ""))
    for name, each in result["microseconds_an_operation"].items():
        calls, launches = result["calls"].get(name, result["operations"]), result["launches"].get(name)
        line = f"{name:16}{calls:>8.0f}{f'{launches:.0f}' if launches else '':>10}{each:>9.1f}"
        print(line + (f"{ratio['microseconds_an_operation'][name]:>9.2f}" if ratio else ""))
    for name, each in result["microseconds_a_step"].items():
        line = f"{name + ', a step':34}{each:>9.0f}"
        print(line + (f"{ratio['microseconds_a_step'][name]:>9.2f}" if ratio else ""))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--devices", default="cpu,pretend", help="of cpu, pretend, cuda; cpu has no launches")
    p.add_argument("--num-layers", type=int, default=48, help="12 parameters each")
    p.add_argument("--recompute", default="all")
    p.add_argument("--turns", type=int, default=9, help=f"of {STEPS} steps")
    p.add_argument(
        "--against", metavar="CHECKOUT", help="another checkout of zfunc, built, to take turns with"
    )
    p.add_argument("--serve", metavar="DEVICE", help=argparse.SUPPRESS)
    p.add_argument("--json", help="a file, or a folder for a file named after the hardware and the date")
    return p


def main() -> None:
    args = parser().parse_args()
    if args.serve:
        serve(args)
        return
    sys.path.insert(0, str(HERE / "tests"))
    import pretend

    from benchmarks.machine import write

    results: list[dict[str, Any]] = []
    for device in args.devices.split(","):
        if device == "pretend" and (missing := pretend.missing_tools()):
            print(f"pretend: skipped, it needs {missing} to be built")
            continue
        results.append(measure(args, device))
        show(results[-1])
    sizes = {name: getattr(args, name) for name in ("num_layers", "recompute", "turns")}
    write(args.json, "launch", {"arguments": sizes, "rows": results})


if __name__ == "__main__":
    main()
