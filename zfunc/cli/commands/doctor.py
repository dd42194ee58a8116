"""`zfunc doctor`: what this machine has for a step, a line each. What cannot be read is a problem."""

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from zfunc.cli.parser import EXIT_FAILED, EXIT_OK, Command, version_line
from zfunc.cli.terminal import printable
from zfunc.core.setting_values import BY_DEVICE, schedule_for
from zfunc.options import option
from zfunc.runtime.memory_limits import check_addresses
from zfunc.units import format_bytes

if TYPE_CHECKING:
    import torch

MODULES = Path("/sys/module")  # of the kernel
COPIED, COPIES = 128 << 20, 4  # bytes of a copy to a device or back, and how many are timed


@frozen(kw_only=True)
class DoctorSettings:
    """Settings of `zfunc doctor`: folders whose drives to measure."""

    folder: tuple[Path, ...] = option(
        (),
        "folder on a drive to measure too, with 512 MiB of room; once for each (default: this folder alone)",
        metavar="FOLDER",
        group="measurement",
        converter=tuple,
    )


Read = Callable[[], Iterable[str]]  # what is there, and perhaps what is wrong


def run_doctor(settings: DoctorSettings) -> int:
    """Run `zfunc doctor`: print what this machine has; returns 1 if anything keeps a step from running, else 0."""
    check_addresses()
    wrong = 0
    for name, read in reads(settings.folder):
        try:
            value, *problems = read()
        except (RuntimeError, AssertionError, MemoryError, OSError, ValueError, KeyError) as error:
            value, problems = "unknown", [str(error).partition("\n")[0]]
        for line in (f"  {name:<11}  {value}", *(f"! {problem}" for problem in problems)):
            print(printable(line), flush=True)
        wrong += len(problems)
    return EXIT_FAILED if wrong else EXIT_OK


def reads(folders: Sequence[Path]) -> Iterator[tuple[str, Read]]:
    """Yield, for each line that `zfunc doctor` prints, its name and a function that measures it; the function
    yields the line's text, then a text for each problem found."""
    import torch

    from zfunc.optim.kernel_loader import cpu_adam
    from zfunc.planner.bandwidth import measure_bandwidth
    from zfunc.runtime import accelerator, direct_io, memory_limits, thread_budget

    def threads() -> Iterator[str]:
        cpus, on_accelerator = thread_budget.allowed_cpus(), kind is not None
        yield str(thread_budget.choose_threads(os.environ, cpus, on_accelerator=on_accelerator))

    def memory() -> Iterator[str]:
        limit = memory_limits.locked_limit()
        pinned = "all of it" if limit is None else f"{format_bytes(limit)} (ulimit -l)"
        yield f"{format_bytes(memory_limits.available_host_bytes())} free to this process; may be pinned: {pinned}"

    def bandwidth() -> Iterator[str]:
        swept = measure_bandwidth()
        over = f"{format_bytes(swept.nbytes)} of memory"
        yield f"{swept.gigabytes:.1f} GB/s over {over}; the Adam kernel reaches {swept.reached:.0%}"

    def drive(folder: Path) -> Iterator[str]:
        how, speeds = "past" if direct_io.is_direct(folder) else "through", direct_io.measure(folder)
        rates = f"reads {speeds.read / 1e9:.1f} GB/s, writes {speeds.write / 1e9:.1f} GB/s"
        free = format_bytes(shutil.disk_usage(folder).free)
        yield f"{rates}, {how} the page cache; {direct_io.file_system_of(folder)}, {free} free"

    def no_device() -> Iterator[str]:
        yield f"none: steps run on the CPU, under {schedule_for(BY_DEVICE, on_cpu=True)}"
        if drivers := [name for name in ("nvidia", "amdgpu") if (MODULES / name).is_dir()]:
            hint = "compare with what torch is built for, and look at variables such as CUDA_VISIBLE_DEVICES"
            yield f"driver {drivers[0]} is loaded, but torch sees no device: {hint}"

    def device(device: "torch.device") -> Iterator[str]:
        there, back = (f"{rate / 1e9:.1f} GB/s" for rate in copy_rates(device))
        free, precision = accelerator.available_bytes(device), accelerator.best_precision(device)
        has = f"{accelerator.device_name(device)}; {format_bytes(free)} free; {precision}"
        yield f"{has}; copies {there} to it, {back} back"

    kind, model = accelerator.accelerator_type(), thread_budget.cpu_model()
    yield "versions", lambda: [f"{version_line()}, {platform.system()} {platform.release()}"]
    yield "processor", lambda: [f"{model or 'unknown'}, kernel in {cpu_adam.instruction_set()}"]
    yield from (("threads", threads), ("memory", memory), ("bandwidth", bandwidth))
    if os.path.realpath("") not in map(os.path.realpath, folders):
        yield "this folder", partial(drive, Path())
    yield from ((str(folder), partial(drive, folder)) for folder in folders)
    if kind is None:
        yield "devices", no_device
        return
    for n in range(torch.accelerator.device_count()):
        yield f"{kind}:{n}", partial(device, torch.device(kind, n))


def copy_rates(device: "torch.device") -> tuple[float, float]:
    """Measured bytes per second of copies from pinned host memory to a device, and back."""
    import torch

    from zfunc.runtime.host_memory import alloc_host

    host = alloc_host(COPIED, torch.uint8, pinned_for=device)
    there = torch.empty_like(host, device=device)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        target.copy_(source)  # an idle device wakes up first
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(device)
        return COPIES * COPIED / (time.perf_counter() - start)

    return rate(there, host), rate(host, there)


COMMAND = Command(
    "say what this machine has for a step",
    "It measures for a few seconds: host memory, the Adam kernel, drives, copies to devices. A line with ! says "
    "what keeps a step from running.",
    DoctorSettings,
    run_doctor,
    """
    # for a person
    zfunc doctor
    # the drives that state may live on
    zfunc doctor --folder /mnt/nvme0 --folder /mnt/nvme1
    """,
    "Exit codes: 0 nothing is wrong, 1 something is.",
)
