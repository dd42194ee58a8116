"""Do sweeps of the host kernel and compute on the same CPUs leave each other room?

Compute is a loop of small products with GELU, as torch runs it; sweeps are updates of 1 Mi parameters. Each runs
alone, then both at once, for every size of the sweeps' team. A size is measured in a process of its own, because
OpenMP keeps the teams it has made. What each keeps of its rate is the answer; one half is a fair share.

The rule this found: the full team. With a smaller one OpenMP sees no more threads than CPUs, and who waits for
another spins, on the core the other one needs. With a full one it sees more, and who waits sleeps.

    python -m benchmarks.beside [--size 64 --seconds 1 --json FILE_OR_FOLDER]
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.machine import describe, make_parser, write
from zfunc.optim.adamw import adam_update_
from zfunc.runtime.thread_budget import default_threads

PARAMETERS = 1 << 20


def rate(run: Callable[[], None], stop: threading.Event) -> float:
    """Call `run` until `stop` is set; returns calls per second."""
    run()
    count, start = 0, time.perf_counter()
    while not stop.is_set():
        run()
        count += 1
    return count / (time.perf_counter() - start)


def rates(
    compute: Callable[[], None] | None, sweep: Callable[[], None] | None, seconds: float
) -> tuple[float, float]:
    """Calls per second of `compute` on this thread and of `sweep` on another, for `seconds`; 0 for None."""
    stop = threading.Event()
    found = [0.0, 0.0]

    def lane() -> None:
        torch.set_num_threads(1)
        found[1] = rate(sweep, stop) if sweep else 0.0

    thread = threading.Thread(target=lane)
    threading.Timer(seconds, stop.set).start()
    thread.start()
    if compute:
        found[0] = rate(compute, stop)
    thread.join()
    return found[0], found[1]


def measure(threads: int, size: int, seconds: float) -> dict[str, Any]:
    """Measure matrix products and host sweeps with `threads` threads alone and together; returns the share of
    its rate that each keeps when both run."""
    torch.set_num_threads(default_threads())
    x = torch.randn(size, size)
    buffers = [torch.zeros(PARAMETERS) for _ in range(4)]

    def compute() -> None:
        torch.nn.functional.gelu(x @ x)

    def sweep() -> None:
        adam_update_(*buffers, step=1, lr=1e-3, threads=threads)

    rates(compute, sweep, seconds / 3)
    alone = rates(compute, None, seconds)[0], rates(None, sweep, seconds)[1]
    both = [rates(compute, sweep, seconds) for _ in range(3)]
    together = median(c for c, _ in both), median(s for _, s in both)
    keeps = [b / a for a, b in zip(alone, together, strict=True)]
    return {"threads": threads, "compute_keeps": keeps[0], "sweeps_keep": keeps[1], "together": together}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", type=int, default=64, help="of the square matrices")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, help="measure this size of the team alone, in this process")
    args = parser.parse_args()
    if args.threads:
        print(json.dumps(measure(args.threads, args.size, args.seconds)))
        return
    rows = []
    given = ["--size", str(args.size), "--seconds", str(args.seconds)]
    for threads in range(1, default_threads() + 1):
        command = [sys.executable, "-m", "benchmarks.beside", "--threads", str(threads), *given]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    print(f"{describe()}, matrices of {args.size}")
    print(
        f"{'threads':>8}  {'compute keeps':>13}  {'sweeps keep':>11}  {'compute':>8}  {'sweeps':>8}  of full's"
    )
    full = rows[-1]["together"]
    for row in rows:
        row["of_full_team"] = [a / b for a, b in zip(row.pop("together"), full, strict=True)]
        shares = "  ".join(f"{share:8.2f}" for share in row["of_full_team"])
        print(f"{row['threads']:>8}  {row['compute_keeps']:>13.2f}  {row['sweeps_keep']:>11.2f}  {shares}")
    write(args.json, "beside", {"arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
