"""How much longer does a step take while something else keeps one core busy?

A loop in a process of its own runs on the last CPU that this process may use. It is stopped for one turn and goes
on for the next, and each contestant makes a step in each turn: the figure is the median of the ratios, busy over
quiet. Twice is what a fair share costs: half of a core is left for a thread that all barriers wait for.

    python -m benchmarks.neighbour [--num-layers 6 --hidden-size 256 ...] [--json FILE_OR_FOLDER]
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.machine import describe, ratios, write
from benchmarks.step import Trial, config_of, made_batches, parser, with_torch, with_zfunc


@contextmanager
def busy_core() -> Iterator["subprocess.Popen[bytes]"]:
    """A context in which a process keeps one core busy with an endless loop; yields that process."""
    last = max(os.sched_getaffinity(0))
    loop = f"import os; os.sched_setaffinity(0, [{last}])\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", loop])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    p = parser()
    p.description = __doc__
    p.set_defaults(device="cpu")
    args = p.parse_args()
    config = config_of(args)
    steps = {"torch": with_torch(config, args), "zfunc": with_zfunc(config, args)}
    steps["zfunc Overlapped"] = partial(with_zfunc, config, args, schedule="Overlapped")()
    trials = {name: (Trial(), Trial()) for name in steps}
    with busy_core() as neighbour:
        for turn, batch in enumerate(made_batches(args, args.warmup + args.turns)):
            for busy in (False, True):
                neighbour.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
                for name, step in steps.items():
                    trials[name][busy].turn(step, batch, counts=turn >= args.warmup)
    print(f"{config}, batch {args.batch_size}, {args.precision}, {describe()}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':20} busy of quiet")
    found = {name: ratios(busy.seconds, quiet.seconds) for name, (quiet, busy) in trials.items()}
    for name, ratio in found.items():
        print(f"{name:20} {ratio:13.2f}")
    write(args.json, "neighbour", {"arguments": vars(args), "busy_of_quiet": found})


if __name__ == "__main__":
    main()
