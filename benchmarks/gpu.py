"""Everything that wants a GPU, the most valuable first: what `make gpu` runs.

Each command has a time limit of its own, of minutes; one that fails or runs over is noted, and the next runs.
What it measures it writes as JSON into `--results`, under a name with the hardware and the date. So does this
script: what ran, for how long, how it ended, its last lines and every warning. All that it prints is in build/gpu.

    python -m benchmarks.gpu [--only tests,large]
    python -m benchmarks.gpu --list                      # the commands, and nothing runs
    python -m benchmarks.gpu --device pretend --toy      # the same list, in toy sizes, without a GPU
    python -m benchmarks.gpu --gpus 2                    # the list of several GPUs: `make gpu-node`
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from attrs import frozen

from benchmarks.machine import hardware_name, write

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build/gpu"
LAST_LINES = 40


@frozen
class Item:
    """One command of the list: a module to run and its arguments, at full size and at toy size."""

    name: str
    module: str
    shared: str
    full: str
    toy: str
    limit: int  # seconds
    variables: str = ""  # of its environment
    ranks: bool = False  # a process for each GPU, by torchrun


WIDE = "--hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --vocab-size 50257 --batch-size 10"
TOY_GPT = "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --batch-size 2"
# Where tests marked `gpu` are: each of the workers would import all others, too, for half a minute.
GPU_TESTS = "tests/device tests/engine/test_tile_attention.py tests/optim/test_update.py "
GPU_TESTS += "tests/optim/test_whole_parameters.py tests/planner/test_calibrate.py"
TOY_TEST = "tests/device/test_device_memory.py::test_peak_memory_is_as_planned[pretend-settings2]"
ITEMS = (
    Item(
        "tests",
        "pytest",
        "-W default -q",
        f"-n 12 --dist loadgroup --tb=short -m 'gpu and not slow' {GPU_TESTS}",
        f"--device pretend {TOY_TEST}",
        240,
    ),
    Item(
        "calibrate",
        "zfunc",
        "calibrate --device {device} --out {profile} --folder {results}",
        f"--num-layers 2 --precision bf16 --moments 8bit --turns 8 {WIDE}",
        "--num-layers 1 --precision fp32 --turns 3 --vocab-size 64 --hidden-size 128 --seq-length 32",
        120,
    ),
    Item(
        "deepspeed-1.3b",
        "benchmarks.side_by_side",
        "--device {device} --json {results}",
        "--size 1.3b",
        '--size toy --steps 4 --warmup 1 --batch-size 2 --tolerance 1e-3 --contestants "zfunc,FSDP2,torchao bf16"',
        470,
    ),
    Item(
        "planned",
        "benchmarks.planned",
        "--device {device} --hardware {profile} --json {results}",
        "--set ten",
        "--set toy --turns 1 --warmup 1",
        470,
    ),
    Item(
        "hf-8b",
        "benchmarks.planned",
        "--device {device} --hardware {profile} --json {results}",
        "--set hf-8b --turns 3 --limit 150",
        "--set hf-toy --turns 1 --warmup 1",
        470,
    ),
    Item(
        "deepspeed-largest",
        "benchmarks.side_by_side",
        "--size largest --device {device} --json {results}",
        "--steps 4 --warmup 1",
        f'{TOY_GPT} --vocab-size 64 --host-gb 0.0002 --steps 2 --warmup 1 --contestants "zfunc 8bit"',
        470,
    ),
    Item(
        "attention",
        "benchmarks.experiments",
        "attention --device {device} --json {results}",
        "",
        "--tiles 64",
        60,
    ),
    Item(
        "workspace",
        "benchmarks.experiments",
        "workspace --device {device} --json {results}",
        "",
        "--tokens 256 --heads 4 --head-size 16",
        60,
    ),
    Item(
        "threads",
        "benchmarks.experiments",
        "threads --device {device} --json {results}",
        "--num-layers 2",
        f"{TOY_GPT} --num-layers 1 --turns 2 --precision fp32",
        90,
    ),
    Item(
        "small-steps",
        "benchmarks.simulated",
        "--device {device} --folder {results} --json {results} --schedules Serial,Overlapped,TwoThreads",
        "--models 6x768x8x64x2,4x256x4x64x2 --bucket-sizes 262144,2097152,8388608 --turns 5",
        "--models 1x128x2x32x4 --bucket-sizes 16384,262144 --turns 2 --precision fp32",
        240,
    ),
    Item(
        "launches",
        "benchmarks.experiments",
        "launches --device {device} --json {results}",
        "--num-layers 6 --hidden-size 768 --num-attention-heads 8 --seq-length 64 --batch-size 2",
        f"{TOY_GPT} --num-layers 1 --turns 2 --precision fp32",
        60,
    ),
    Item(
        "rates",
        "benchmarks.experiments",
        "rates --device {device} --json {results}",
        "",
        "--elements 65536",
        40,
    ),
    Item(
        "large",
        "benchmarks.large",
        "--device {device} --hardware {profile} --json {results}",
        f"--num-layers 10 --memory-gib 12 --moments 8bit --precision bf16 {WIDE}",
        f"--num-layers 2 --precision fp32 --turns 1 --vocab-size 64 --memory-gib 0.1 {TOY_GPT}",
        150,
    ),
    Item(
        "step",
        "benchmarks.step",
        "--apart --device {device} --json {results}",
        "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --batch-size 8 "
        "--precision bf16 --turns 7 --compile-segments",
        f"--num-layers 1 --turns 1 --warmup 1 {TOY_GPT}",
        240,
    ),
    Item(
        "long-rows",
        "benchmarks.long_rows",
        "--device {device} --json {results}",
        "--num-layers 2 --rows 65536x16 --kernels default,flash,deterministic,deterministic",
        "--num-layers 1 --warmup 0 --precision fp32 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 "
        "--rows 64x1,64x4 --kernels default,deterministic",
        200,
    ),
    Item(
        "deepspeed-2.7b",
        "benchmarks.side_by_side",
        "--device {device} --json {results}",
        "--size 2.7b",
        '--size toy --contestants "torchao fp32"',  # which is not installed: deepspeed-1.3b shows the rest
        470,
    ),
    Item(
        "long-rows-1m",
        "benchmarks.long_rows",
        "--device {device} --json {results} --warmup 0",
        "--num-layers 1 --rows 1048576x256",
        "--num-layers 1 --precision fp32 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 --rows 64x8",
        400,
    ),
    Item(
        "streaming",
        "benchmarks.streaming",
        "--device {device} --json {results}",
        f"--memory-gib 6 --num-layers 10 --moments 8bit --precision bf16 --turns 3 {WIDE}",
        f"--memory-gib 0.1 --num-layers 2 --precision fp32 --turns 1 --vocab-size 64 {TOY_GPT}",
        240,
    ),
    Item(
        "updates",
        "benchmarks.experiments",
        "updates --device {device} --json {results}",
        "--elements 1000000000",
        "--elements 65536 --pinned-gib 0.01",
        120,
    ),
    Item(
        "simulated",
        "benchmarks.simulated",
        "--device {device} --folder {results} --json {results}",
        "--models 4x1024x16x1024x8,8x2048x16x1024x8 --turns 5",
        "--models 1x128x2x32x4 --schedules Serial,Overlapped --turns 2 --precision fp32",
        120,
    ),
    Item(
        "small-step",
        "benchmarks.step",
        "--device {device} --json {results}",
        "",
        f"--num-layers 1 --turns 1 {TOY_GPT}",
        300,
    ),
    Item(
        "launch",
        "benchmarks.launch",
        "--devices cpu,{device} --json {results}",
        "",
        "--num-layers 1 --turns 1",
        200,
    ),
    Item("handoffs", "benchmarks.handoffs", "--json {results}", "", "--num-layers 1 --ops 50 --turns 1", 60),
    Item(
        "adam",
        "benchmarks.adam",
        "--json {results}",
        "--sizes 1Mi,16Mi,128Mi --repeats 7",
        "--sizes 1Mi --repeats 1 --threads 1",
        470,
    ),
    Item(
        "checkpoints",
        "benchmarks.checkpoints",
        "--device {device} --folder {results} --json {results}",
        "",
        f"--parameters 16Mi --turns 1 --num-layers 1 {TOY_GPT}",
        300,
    ),
    Item("plan", "benchmarks.plan", "--json {results}", "", "--sizes 100,200 --repeats 1", 300),
)

# Of a machine with two to eight GPUs.
TOY_NODE = (
    f"{TOY_GPT} --num-layers 2 --turns 4 --elements 65536 --bucket-size 4096 --precision fp32 --limit 5"
)
NODE_ITEMS = (
    Item(
        "collectives",
        "benchmarks.node",
        "collectives --device {device} --ranks {gpus} --json {results}",
        "",
        TOY_NODE,
        180,
    ),
    Item(
        "killed",
        "benchmarks.node",
        "killed --device {device} --ranks {gpus} --json {results}",
        "",
        TOY_NODE,
        120,
    ),
    Item(
        "killed-sockets",
        "benchmarks.node",
        "killed --device {device} --ranks {gpus} --json {results}",
        "",
        TOY_NODE,
        120,
        "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1",
    ),
    Item(
        "stages",
        "benchmarks.node",
        "stages --device {device} --ranks {gpus} --json {results}",
        "",
        TOY_NODE,
        120,
    ),
    Item(
        "devices",
        "benchmarks.node",
        "devices --device {device} --ranks {gpus} --json {results}",
        "--hidden-size 4096 --seq-length 1024 --batch-size 16 --num-layers 2",
        TOY_NODE,
        150,
    ),
    Item(
        "messages",
        "benchmarks.node",
        "messages --device {device} --ranks {gpus} --json {results}",
        "",
        TOY_NODE,
        60,
    ),
    Item(
        "sweeps",
        "benchmarks.node",
        "sweeps --device {device} --ranks {gpus} --json {results}",
        "--elements 67108864",
        TOY_NODE,
        90,
    ),
    Item(
        "ranks",
        "benchmarks.ranks",
        "--json {results}",
        "--worlds 1,{gpus} --num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--batch-size 16 --precision bf16",
        f"--worlds 1,2 --rounds 1 --turns 1 --num-layers 1 {TOY_GPT}",
        240,
    ),
    Item(
        "8b-stage-3",
        "benchmarks.large",
        "--stage 3 --device {device} --json {results}",
        f"--num-layers 39 --memory-gib 70 --precision bf16 {WIDE}",
        f"--num-layers 2 --precision fp32 --turns 1 --vocab-size 64 --memory-gib 0.1 {TOY_GPT}",
        400,
        ranks=True,
    ),
    Item(
        "8b-pp",
        "benchmarks.large",
        "--pp 2 --device {device} --json {results}",
        f"--num-layers 39 --memory-gib 70 --precision bf16 {WIDE}",
        f"--num-layers 2 --precision fp32 --turns 1 --vocab-size 64 --memory-gib 0.1 {TOY_GPT}",
        400,
        ranks=True,
    ),
)


# pytest and the processes that these start load the pretend device themselves.
LOAD_IT = (
    *("pytest", "benchmarks.launch", "benchmarks.node", "benchmarks.ranks"),
    *("benchmarks.side_by_side", "benchmarks.planned"),
)


def command(item: Item, args: argparse.Namespace) -> list[str]:
    """The command line of `item`, as a list for `subprocess`."""
    profile = args.results / f"machine-{hardware_name()}-{date.today()}.toml"
    text = f"{item.shared} {item.toy if args.toy else item.full}"
    named = {"device": args.device, "results": args.results, "profile": profile, "gpus": args.gpus}
    arguments = shlex.split(text.format(**named))
    wrapper = ["benchmarks.on_pretend"] if args.device == "pretend" and item.module not in LOAD_IT else []
    launcher = ["torch.distributed.run", "--nproc-per-node", str(args.gpus), "-m"] if item.ranks else []
    return [sys.executable, "-m", *launcher, *wrapper, item.module, *arguments]


def stopped(process: subprocess.Popen[str]) -> str:
    """Interrupt a process, so that pytest says what has failed, or kill it; returns its output."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=15)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def run(item: Item, args: argparse.Namespace) -> dict[str, Any]:
    """Run `item` until it ends or its time limit is over; returns command, outcome, seconds and output."""
    line = command(item, args)
    print(f"\n== {item.name}, {item.limit} s at most: {shlex.join(line[1:])}", flush=True)
    start = time.perf_counter()
    process = subprocess.Popen(
        line,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # of ninja, which builds extensions
            **dict(x.split("=") for x in item.variables.split()),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what it started ends with it
    )
    try:
        output, _ = process.communicate(timeout=item.limit)
        outcome = "ok" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        output = stopped(process)
        outcome = f"stopped after {item.limit} s"
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{item.name}.log").write_text(output)
    lines = output.splitlines()
    print("\n".join(lines[-LAST_LINES:]))
    seconds = time.perf_counter() - start
    print(f"== {item.name}: {outcome}, {seconds:.0f} s", flush=True)
    return {
        "name": item.name,
        "command": shlex.join(line[1:]),
        "outcome": outcome,
        "seconds": seconds,
        "warnings": sorted({x.strip() for x in lines if "Warning" in x}),
        "output": lines[-LAST_LINES:],
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda")
    p.add_argument("--toy", action="store_true", help="toy sizes")
    p.add_argument("--gpus", type=int, default=1, help="2 to 8: what wants several")
    p.add_argument("--only", help="some of the names that --list prints, comma separated")
    p.add_argument("--list", action="store_true", help="print the commands and end")
    p.add_argument(
        "--results", type=Path, help="a folder (default: benchmarks/results, of toys build/gpu-toy)"
    )
    return p


def main() -> None:
    args = parser().parse_args()
    os.chdir(ROOT)  # names in results are relative to it
    args.results = args.results or Path("build/gpu-toy" if args.toy else "benchmarks/results")
    items = ITEMS if args.gpus == 1 else NODE_ITEMS
    known = [item.name for item in items]
    names = args.only.split(",") if args.only else known
    if unknown := set(names) - {*known}:
        raise SystemExit(f"--only: got {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
    chosen = [item for item in items if item.name in names]
    if args.list:
        for item in chosen:
            print(f"{item.limit:>4} s  {item.name:14} {item.variables} {shlex.join(command(item, args)[1:])}")
        return
    args.results.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    label = "gpu" if args.gpus == 1 else f"gpu{args.gpus}"
    for item in chosen:
        rows.append(run(item, args))
        write(str(args.results), f"{label}-{'-'.join(names) if args.only else 'all'}", {"rows": rows})
    failed = [row for row in rows if row["outcome"] != "ok"]
    print("\n" + "\n".join(f"{row['name']:12} {row['seconds']:6.0f} s  {row['outcome']}" for row in rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
