"""`zfunc doctor`: what this machine has for a step, a line each. What cannot be read is a problem."""

import json
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from zfunc.cli.parser import EXIT_FAILED, EXIT_OK, Command, version_line
from zfunc.cli.terminal import printable
from zfunc.core.settings import BY_DEVICE, schedule_for
from zfunc.options import option
from zfunc.units import format_bytes

if TYPE_CHECKING:
    import torch

MODULES = Path("/sys/module")  # of the kernel
UNKNOWN = "unknown"
COPIED, COPIES = 128 << 20, 4  # bytes of a copy to a device or back, and how many are timed


@frozen(kw_only=True)
class DoctorSettings:
    """Drives to measure, and how to print the checks."""

    folder: tuple[Path, ...] = option(
        (),
        "measurement",
        "folder on a drive to measure too, with 512 MiB of room; once for each (default: this folder alone)",
        metavar="FOLDER",
        converter=tuple,
    )
    json: bool = option(False, "output", "print one JSON object, for programs")


@frozen
class Check:
    """A line: what was read of something, and what is wrong with that, if it keeps a step from running."""

    name: str
    value: str
    problem: str | None = None


def run_doctor(settings: DoctorSettings) -> int:
    """`zfunc doctor`: 0 if nothing is wrong, 1 if something is."""
    import torch

    from zfunc.runtime.accelerator import accelerator_type

    here = [] if Path().resolve() in [folder.resolve() for folder in settings.folder] else [Path()]
    drives = {
        "this folder" if folder in here else str(folder): folder for folder in (*here, *settings.folder)
    }
    count = torch.accelerator.device_count() if (kind := accelerator_type()) else 0
    checks = [
        *(check_of(read.__name__, read) for read in (versions, processor, threads, memory, bandwidth)),
        *(check_of(name, partial(drive, folder)) for name, folder in drives.items()),
        *(check_of(f"{kind}:{n}", partial(device, torch.device(kind or "", n))) for n in range(count)),
        *([] if count else [no_device()]),
    ]
    wrong = sum(check.problem is not None for check in checks)
    if settings.json:
        print(json.dumps({"problems": wrong, "checks": [attrs.asdict(check) for check in checks]}, indent=2))
    else:
        show_checks(checks)
    return EXIT_FAILED if wrong else EXIT_OK


def check_of(name: str, read: Callable[[], str]) -> Check:
    """The line of what `read` returns; what it raises is a problem."""
    try:
        return Check(name, read())
    except (RuntimeError, AssertionError, MemoryError, OSError, ValueError, KeyError) as error:
        return Check(name, UNKNOWN, str(error).partition("\n")[0])


def show_checks(checks: Sequence[Check]) -> None:
    """Print them as lines, what is wrong below its own."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(printable(f"  {check.name:<{width}}  {check.value}"))
        if check.problem:
            print(printable(f"! {check.problem}"))


# --- what is read ----------------------------------------------------------------------------------------


def versions() -> str:
    """Of zfunc, and of what it runs on."""
    return f"{version_line()}, {platform.system()} {platform.release()}"


def processor() -> str:
    """The CPU with the kernel's instructions."""
    from zfunc.optim.kernel_loader import cpu_adam
    from zfunc.runtime.thread_budget import cpu_model

    return f"{cpu_model() or UNKNOWN}, kernel in {cpu_adam.instruction_set()}"


def threads() -> str:
    """The threads of an update."""
    from zfunc.runtime.accelerator import accelerator_type
    from zfunc.runtime.thread_budget import allowed_cpus, choose_threads

    on_accelerator = accelerator_type() is not None
    return str(choose_threads(os.environ, allowed_cpus(), on_accelerator=on_accelerator))


def memory() -> str:
    """Free memory, and how much of it may be locked."""
    from zfunc.runtime.host_memory import available_host_bytes

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = "all of it" if limit == resource.RLIM_INFINITY else f"{format_bytes(limit)} (ulimit -l)"
    return f"{format_bytes(available_host_bytes())} free to this process; may be pinned: {pinned}"


def bandwidth() -> str:
    """What a sweep over memory reaches, and the Adam kernel of that."""
    from zfunc.planner.bandwidth import measure_bandwidth

    measured = measure_bandwidth()
    cached = "" if measured.beyond_caches else ", which the caches hold"
    swept = f"{measured.gigabytes:.1f} GB/s over {format_bytes(measured.nbytes)} of memory{cached}"
    return f"{swept}; the Adam kernel reaches {measured.reached:.0%}"


def drive(folder: Path) -> str:
    """What the drive of a folder reaches, and what is free on it."""
    from zfunc.runtime.direct_io import file_system_of, is_direct, measure

    how, speeds = "past" if is_direct(folder) else "through", measure(folder)
    rates = f"reads {speeds.read / 1e9:.1f} GB/s, writes {speeds.write / 1e9:.1f} GB/s"
    free = format_bytes(shutil.disk_usage(folder).free)
    return f"{rates}, {how} the page cache; {file_system_of(folder)}, {free} free"


def no_device(modules: Path = MODULES) -> Check:
    """That there is no accelerator, and what may be wrong where a driver is loaded."""
    drivers = [name for name in ("nvidia", "amdgpu") if (modules / name).is_dir()]
    hint = "compare with what torch is built for, and look at variables such as CUDA_VISIBLE_DEVICES"
    problem = f"driver {' '.join(drivers)} is loaded, but torch sees no device: {hint}"
    value = f"none: steps run on the CPU, under {schedule_for(BY_DEVICE, on_cpu=True)}"
    return Check("devices", value, problem if drivers else None)


def device(device: "torch.device") -> str:
    """What an accelerator is, has free, computes fastest in, and gets from pinned memory and gives back."""
    from zfunc.runtime.accelerator import available_bytes, best_precision, device_name

    there, back = (f"{rate / 1e9:.1f} GB/s" for rate in copy_rates(device))
    free, precision = format_bytes(available_bytes(device)), best_precision(device)
    return f"{device_name(device)}; {free} free; {precision}; copies {there} to it, {back} back"


def copy_rates(device: "torch.device") -> tuple[float, float]:
    """Bytes per second from pinned memory to a device, and back."""
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
    # for a program
    zfunc doctor --json
    """,
    "Exit codes: 0 nothing is wrong, 1 something is.",
)
