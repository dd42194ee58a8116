"""`zfunc doctor`: what this machine has for a step, a line each. What cannot be read is "unknown"."""

import json
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from zfunc.cli.command import EXIT_FAILED, EXIT_OK, Command
from zfunc.cli.terminal import printable
from zfunc.core.settings import BY_DEVICE, schedule_for
from zfunc.errors import DiskError
from zfunc.options import option
from zfunc.units import format_bytes

if TYPE_CHECKING:
    import torch

ROOT = Path("/")
UNKNOWN = "unknown"
COPIED, COPIES = 128 << 20, 4  # bytes of a copy to a device or back, and how many are timed
HIDING = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


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
    checks = [*versions(), *processor(os.environ), *memory(), *drives(settings.folder), *devices()]
    wrong = sum(check.problem is not None for check in checks)
    if settings.json:
        print(json.dumps({"problems": wrong, "checks": [attrs.asdict(check) for check in checks]}, indent=2))
    else:
        show_checks(checks)
    return EXIT_FAILED if wrong else EXIT_OK


def show_checks(checks: Sequence[Check]) -> None:
    """Print them as lines, what is wrong below its own, in red on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console, width = Console(highlight=False, soft_wrap=True), max(len(check.name) for check in checks)
    for check in checks:
        console.print(Text(printable(f"  {check.name:<{width}}  {check.value}")))
        if check.problem:
            console.print(Text(printable(f"! {check.problem}"), "red"))


# --- the checks ------------------------------------------------------------------------------------------


def versions(root: Path = ROOT) -> Iterator[Check]:
    """Of zfunc, of what it runs on, and of the GPUs' driver."""
    import numpy
    import torch

    import zfunc

    built = torch.version.hip and f"ROCm {torch.version.hip}"
    built = built or (f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPU")
    python = f"python {platform.python_version()}, numpy {numpy.__version__}"
    system = f"{platform.system()} {platform.release()}, GPU driver {driver(root) or 'none'}"
    yield Check(
        "versions", f"zfunc {zfunc.__version__}, torch {torch.__version__} for {built}, {python}, {system}"
    )


def driver(root: Path = ROOT) -> str | None:
    """The version of the kernel module of NVIDIA or AMD that is loaded, and its name."""
    files = {"nvidia": root / "proc/driver/nvidia/version", "amdgpu": root / "sys/module/amdgpu/version"}
    for name, path in files.items():
        if path.is_file():
            return " ".join([name, *re.findall(r"\d+[.]\d+[.\d]*", path.read_text())[:1]])
    return None


def processor(environment: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    """The CPU with the kernel's instructions, and the threads of an update."""
    from zfunc.optim.kernel_loader import cpu_adam
    from zfunc.runtime import cpu_topology
    from zfunc.runtime.accelerator import accelerator_type
    from zfunc.runtime.thread_budget import allowed_cpus, choose_threads

    model, runtimes = cpu_topology.cpu_model(root) or UNKNOWN, cpu_topology.openmp_runtimes(root)
    yield Check("processor", f"{model}, kernel in {cpu_adam.instruction_set()}")
    several = "several OpenMP libraries, whose threads compete: install numpy and torch from one source"
    problem = several if runtimes and len(runtimes) > 1 else None
    try:
        on_accelerator = accelerator_type() is not None
        threads = str(choose_threads(environment, allowed_cpus(), on_accelerator=on_accelerator))
    except ValueError as error:
        threads, problem = UNKNOWN, str(error)
    openmp = UNKNOWN if runtimes is None else ", ".join(runtimes) or "none by name"
    yield Check("threads", f"{threads}; OpenMP {openmp}", problem)


def memory() -> Iterator[Check]:
    """Free memory, how much of it may be locked, and what a sweep over it reaches."""
    from zfunc.planner.bandwidth import measure_bandwidth
    from zfunc.runtime.host_memory import available_host_bytes

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = "all of it" if limit == resource.RLIM_INFINITY else f"{format_bytes(limit)} (ulimit -l)"
    try:
        yield Check(
            "memory", f"{format_bytes(available_host_bytes())} free to this process; may be pinned: {pinned}"
        )
        measured = measure_bandwidth()
    except (MemoryError, OSError, ValueError, KeyError) as error:
        yield Check("bandwidth", f"{UNKNOWN}: {error}")
        return
    cached = "" if measured.beyond_caches else ", which the caches hold"
    yield Check(
        "bandwidth",
        f"{measured.gigabytes:.1f} GB/s over {format_bytes(measured.nbytes)} of memory{cached}; the Adam kernel "
        f"reaches {measured.reached:.0%}",
    )


def drives(folders: Sequence[Path]) -> Iterator[Check]:
    """The drive of this folder, and those of `folders`, on which state is to live."""
    from zfunc.runtime.direct_io import file_system_of, is_direct, measure

    here = [] if Path().resolve() in [folder.resolve() for folder in folders] else [Path()]
    for folder in (*here, *folders):
        name = "this folder" if folder in here else str(folder)
        try:
            how, speeds = "past" if is_direct(folder) else "through", measure(folder)
            free = format_bytes(shutil.disk_usage(folder).free)
        except DiskError as error:
            yield Check(name, UNKNOWN, None if folder in here else str(error))
            continue
        rates = f"reads {speeds.read / 1e9:.1f} GB/s, writes {speeds.write / 1e9:.1f} GB/s"
        yield Check(name, f"{rates}, {how} the page cache; {file_system_of(folder)}, {free} free")


def devices(root: Path = ROOT) -> Iterator[Check]:
    """Every accelerator that torch sees; or that there is none, and what may be wrong where a driver is loaded."""
    import torch

    from zfunc.runtime.accelerator import accelerator_type, available_bytes, best_precision, device_name

    if (kind := accelerator_type()) is None:
        hidden = [f"{name}={os.environ[name]!r} may hide it" for name in HIDING if name in os.environ]
        hint = ", ".join(hidden) or "compare with what torch is built for"
        problem = f"driver {driver(root)} is loaded, but torch sees no device: {hint}"
        default = schedule_for(BY_DEVICE, on_cpu=True)
        yield Check(
            "devices", f"none: steps run on the CPU, under {default}", problem if driver(root) else None
        )
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind, index)
        try:
            there, back = (f"{rate / 1e9:.1f} GB/s" for rate in copy_rates(device))
            free, precision = format_bytes(available_bytes(device)), best_precision(device)
            copies = f"copies {there} to it, {back} back"
            yield Check(str(device), f"{device_name(device)}; {free} free; {precision}; {copies}")
        except (RuntimeError, AssertionError, MemoryError) as error:
            yield Check(str(device), "does not answer", str(error).splitlines()[0])


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
