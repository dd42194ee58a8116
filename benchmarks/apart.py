"""Rows of a benchmark, each measured by a process of its own, started one after another.

Peaks of device and host are then a row's own. A process that fails, runs over its time or would use up the host's
memory is noted with its error, and the next runs. Results are written after each row, so a kill loses none.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import describe

ROOT = Path(__file__).resolve().parents[1]
LEAST_FREE = 3 << 30  # bytes of the host that a process may not use: below, the kernel ends any process
PATIENCE = 2.0  # seconds that so little may be free: some virtual machines get memory as they use it
POLL = 0.05  # seconds
SHOWN = 40  # last lines of a process that failed
RESULT = "RESULT"  # a file: a variable of the process's environment

Row = dict[str, Any]


def run_apart(module: str, words: Sequence[str], *, device: str, limit: float) -> Row:
    """The row that `python -m module words...` leaves by `leave`, or one with its "error"."""
    wrapper = ["benchmarks.on_pretend"] if device == "pretend" else []
    before, most = host_memory()[0], 0
    enough = start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder, "row.json"), Path(folder, "said")
        with said.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *wrapper, module, *words],
                cwd=ROOT,
                env={**os.environ, RESULT: str(result), "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what it started ends with it
            )
            ended = ""
            try:
                while process.poll() is None and not ended:
                    used, free = host_memory()
                    most, now = max(most, used), time.monotonic()
                    enough = now if free > LEAST_FREE else enough
                    if now - start > limit:
                        ended = f"stopped after {limit:.0f} s"
                    elif now - enough > PATIENCE:
                        ended = f"stopped, as {free / 1e9:.1f} GB of host memory were left"
                    time.sleep(POLL)
            finally:  # an interruption ends it too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if result.exists():
            return {
                **json.loads(result.read_text()),
                "host_used_bytes": most - before,
                "whole_seconds": time.monotonic() - start,
            }
        lines = [x for x in said.read_text(errors="replace").splitlines() if x.strip()]
        last = lines[-1].strip() if lines else f"exit code {process.returncode}"
        return {"error": ended or last, "output": lines[-SHOWN:]}


def leave(row: Row) -> None:
    """Leave `row` to the process that started this one by `run_apart`, else print it."""
    text = json.dumps(row, default=str)
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(text)
    else:
        print(text)


def each_apart(
    names: Sequence[str],
    run: Callable[[str, float], Row],
    *,
    seconds: float,
    limit: float,
    keep: Callable[[Row], None],
) -> None:
    """Give `keep` the row of each of `names` in turn, of `run(name, its limit)`: `limit` seconds each at most,
    and `seconds` in all; those for which no time is left have an "error" that says so."""
    end = time.monotonic() + seconds
    for name in names:
        left = end - time.monotonic()
        if left < min(20.0, limit / 2):
            row: Row = {"error": f"not started: {seconds:.0f} s in all were given"}
        else:
            row = run(name, min(limit, left))
        keep({"name": name, **row})


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that are used, and that processes can still take, by the kernel's estimate."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    told = {row[0]: int(row[1]) * 1024 for row in rows}
    return told["MemTotal:"] - told["MemAvailable:"], told["MemAvailable:"]


def of_process(name: str) -> int:
    """The kernel's figure `name` of this process, such as its peak memory, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def timed(step: Callable[[Any], float], batches: Iterable[Any], *, warmup: int, device: torch.device) -> Row:
    """Train on each of `batches` by `step`, which returns a loss; a row with losses, peaks of these steps, the
    seconds of each, and the median of those after the first `warmup`."""
    reset_peaks(device)
    losses, stamps = list[float](), [synchronized()]
    for batch in batches:
        losses.append(step(batch))
        stamps.append(synchronized())
    seconds = [b - a for a, b in pairwise(stamps)]
    return {"seconds": median(seconds[warmup:]), "all_seconds": seconds, "losses": losses, **peaks(device)}


def peaks(device: torch.device) -> Row:
    """Peak bytes of this process: of the device since `reset_peaks`, of the host since its start.

    What a driver page-locks itself may not count as resident: `pinned_bytes` is what torch's allocator took so,
    and `host_used_bytes` of `run_apart` what the machine used more while the process ran.
    """
    row: Row = {"host_resident_bytes": of_process("VmHWM")}
    if device.type != "cpu":
        row["device_bytes"] = torch.accelerator.max_memory_allocated(device)
        row["device_reserved_bytes"] = torch.accelerator.max_memory_reserved(device)
    if device.type == "cuda":
        stats = getattr(torch.cuda, "host_memory_stats", dict[str, int])()  # not in torch 2.9
        row["pinned_bytes"] = stats.get("allocated_bytes.peak")
    return row


def reset_peaks(device: torch.device) -> None:
    """Begin the peaks of the device anew, with nothing that only the start took in torch's cache."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def synchronized() -> float:
    """Seconds of a clock, once the device's work is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def about() -> Row:
    """What a result says of its machine: card, versions, the command."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = ("deepspeed", "torchao", "transformers", "peft")
    return {
        **describe(),
        **{name: installed(name) for name in names},
        "command": " ".join(sys.argv),
        "host_free_bytes": host_memory()[1],
    }
