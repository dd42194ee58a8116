"""Reading and writing a drive past the page cache, against `dd`, and `fio` where it is installed, in the same run.

Each writes over its file, 8 MiB a request, and waits until the drive has it; then each reads the file. They take
turns, now in this order and now in the other. Ratios are medians of turn by turn, so what else uses the drive hits
all. `dd` has one request under way; `fio` four, and its seconds are those it reports, without its start. A swap
space also sums what it writes, commits it, and compares the sums of what it reads. Processor seconds are of all
threads, in user and kernel mode. With several folders, also their speed all at once over the sum of their speeds
alone: 1 for separate drives; and the speed of a swap space striped over them over that of one in the first alone.

    python -m benchmarks.disk [--folder DIR --folder DIR --gib 1 --turns 5 --json FILE_OR_FOLDER]
"""

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from attrs import define, field

from benchmarks.machine import describe, make_parser, ratios, write
from zfunc.checkpoint.swap_file import new_header
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.core.extents import Extent
from zfunc.runtime import direct_io
from zfunc.runtime.direct_io import REQUEST, THREADS, DirectFile, file_system_of
from zfunc.runtime.host_memory import map_pages

EXTENT = 128 << 20  # bytes of a transfer: a bucket's
DIRECTIONS = ("write", "read")


@define
class Turns:
    """Wall-clock seconds, and CPU seconds, of each turn of one measured call."""

    seconds: list[float] = field(factory=list[float])
    processor: list[float] = field(factory=list[float])

    def add(self, call: Callable[[], float | None]) -> None:
        """Time `call`, with CPU seconds of finished child processes; seconds that `call` returns count."""
        who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
        before, start = [resource.getrusage(x) for x in who], time.perf_counter()
        own = call()
        self.seconds.append(own or time.perf_counter() - start)
        used = [resource.getrusage(x) for x in who]
        times = (
            (b.ru_utime - a.ru_utime) + (b.ru_stime - a.ru_stime) for a, b in zip(before, used, strict=True)
        )
        self.processor.append(sum(times))


def ours(file: DirectFile, data: memoryview, direction: str) -> None:
    """Read or write (`direction`) the whole file, extent by extent, with the buffer `data`."""
    transfer = file.write if direction == "write" else file.read
    for offset in range(0, file.nbytes, data.nbytes):
        transfer(data, offset, "the benchmark")
    file.sync()


def swapped(space: SwapSpace, data: memoryview, direction: str) -> None:
    """Read or write (`direction`) all buckets of a swap space with the buffer `data`, then commit a write."""
    for b in space.header.extents:
        (space.write if direction == "write" else space.read)(b, ["state"], [data])
    if direction == "write":
        space.commit({})


def dd(path: Path, nbytes: int, direction: str) -> None:
    """Read or write (`direction`) a file of `nbytes` with dd, past the page cache. It writes zeros, at the
    same cost as random bytes."""
    common = ["dd", "bs=8M", f"count={nbytes // REQUEST}", "status=none"]
    writing = ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc,fdatasync"]
    reading = [f"if={path}", "of=/dev/null", "iflag=direct"]
    subprocess.run([*common, *(writing if direction == "write" else reading)], check=True)


def fio(path: Path, nbytes: int, direction: str) -> float:
    """Read or write (`direction`) `nbytes` with fio's libaio; returns the seconds that fio reports."""
    given = {"name": "zfunc", "filename": path, "rw": direction, "bs": "8M", "size": nbytes, "direct": 1}
    given |= {"ioengine": "libaio", "iodepth": 4, "end_fsync": int(direction == "write"), "overwrite": 1}
    given |= {"output-format": "json"}
    words = [f"--{key}={value}" for key, value in given.items()]
    done = subprocess.run(["fio", *words], check=True, capture_output=True, text=True)
    return nbytes / json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"]


def measured(folder: Path, nbytes: int, turns: int) -> dict[str, Any]:
    """Seconds per GiB of zfunc's files and swap space in `folder`, by direction, and their speed over that of
    dd and fio."""
    others = {"dd": dd, **({"fio": fio} if shutil.which("fio") else {})}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".disk-", dir=folder)))
        pages = stack.enter_context(closing(map_pages(EXTENT)))
        data = stack.enter_context(memoryview(pages))
        pages[:] = os.urandom(1 << 20) * (EXTENT >> 20)
        for name in others:
            with closing(DirectFile.create(root / name, nbytes)) as theirs:
                ours(theirs, data, "write")
        file = stack.enter_context(closing(DirectFile.create(root / "zfunc", nbytes)))
        ours(file, data, "write")
        calls: dict[str, Callable[[str], float | None]] = {
            "zfunc": lambda direction: ours(file, data, direction)
        }
        space = stack.enter_context(closing(new_swap_space(stack, [folder], nbytes, data)))
        calls["swap space"] = lambda direction: swapped(space, data, direction)
        calls |= {name: lambda way, name=name: others[name](root / name, nbytes, way) for name in others}
        found = {direction: {name: Turns() for name in calls} for direction in DIRECTIONS}
        for turn in range(turns):
            for direction in DIRECTIONS:
                for name in (*calls,) if turn % 2 else (*calls,)[::-1]:
                    found[direction][name].add(lambda call=calls[name], direction=direction: call(direction))
        result: dict[str, Any] = {
            "folder": str(folder),
            "file_system": file_system_of(folder),
            "direct": file.direct,
        }
    gib = nbytes / (1 << 30)
    for direction, of in found.items():
        zfunc = of["zfunc"]
        result[direction] = {
            "seconds_a_GiB": median(zfunc.seconds) / gib,
            "processor_seconds_a_GiB": {name: median(x.processor) / gib for name, x in of.items()},
            "times_the_speed_of": {
                name: ratios(of[name].seconds, zfunc.seconds) for name in of if name != "zfunc"
            },
        }
    return result


def together(folders: list[Path], nbytes: int, turns: int) -> dict[str, float]:
    """By direction, the speed of zfunc's files in all folders at once over the sum of their speeds alone."""
    with ExitStack() as stack:
        files: list[tuple[DirectFile, memoryview]] = []
        for folder in folders:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".disk-", dir=folder)))
            file = stack.enter_context(closing(DirectFile.create(root / "zfunc", nbytes)))
            pages = stack.enter_context(closing(map_pages(EXTENT)))
            files.append((file, stack.enter_context(memoryview(pages))))
            ours(*files[-1], "write")
        pool = stack.enter_context(ThreadPoolExecutor(len(files)))
        found: dict[str, float] = {}
        for direction in DIRECTIONS:
            alone, all_at_once = [Turns() for _ in files], [Turns() for _ in files]

            def one(n: int, turns: Turns, way: str = direction) -> None:
                turns.add(lambda: ours(*files[n], way))

            for _ in range(turns):
                for n, own in enumerate(alone):
                    one(n, own)
                list(pool.map(one, range(len(files)), all_at_once))
            speeds = [[1 / median(x.seconds) for x in of] for of in (all_at_once, alone)]
            found[direction] = sum(speeds[0]) / sum(speeds[1])
    return found


def striped(folders: list[Path], nbytes: int, turns: int) -> dict[str, float]:
    """By direction, the speed of a swap space in all folders over that of one in the first folder."""
    with ExitStack() as stack:
        pages = stack.enter_context(closing(map_pages(EXTENT)))
        data = stack.enter_context(memoryview(pages))
        pages[:] = os.urandom(1 << 20) * (EXTENT >> 20)
        spaces = [
            stack.enter_context(closing(new_swap_space(stack, own, nbytes, data)))
            for own in (folders, folders[:1])
        ]
        found: dict[str, float] = {}
        for direction in DIRECTIONS:
            seconds = [Turns() for _ in spaces]
            for turn in range(turns):
                for n in (0, 1) if turn % 2 else (1, 0):
                    seconds[n].add(
                        lambda space=spaces[n], direction=direction: swapped(space, data, direction)
                    )
            found[direction] = ratios(seconds[1].seconds, seconds[0].seconds)
    return found


def new_swap_space(stack: ExitStack, folders: list[Path], nbytes: int, data: memoryview) -> SwapSpace:
    """A swap space of `nbytes` in new subfolders of `folders`, with both generations of its extents
    written."""
    roots = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".disk-", dir=x))) for x in folders]
    extents = {b: Extent.of([("state", EXTENT)]) for b in range(nbytes // EXTENT)}
    space = SwapSpace.create(new_header(roots, identity={}, run="benchmark", extents=extents))
    for _ in range(2):
        swapped(space, data, "write")
    return space


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument(
        "--folder", type=Path, action="append", help="on the drive that is measured; for each drive one"
    )
    p.add_argument("--gib", type=float, default=1.0, help="of each file")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--threads", type=int, default=THREADS)
    args = p.parse_args()
    folders = args.folder or [Path()]
    nbytes = round(args.gib * (1 << 30) / EXTENT) * EXTENT
    direct_io.THREADS = args.threads
    rows = [measured(folder, nbytes, args.turns) for folder in folders]
    results: dict[str, Any] = {"folders": rows}
    if len(folders) > 1:
        results["together"] = together(folders, nbytes, args.turns)
        results["striped"] = striped(folders, nbytes, args.turns)
    print(describe())
    print(json.dumps(results, indent=2))
    write(args.json, "disk", results)


if __name__ == "__main__":
    main()
