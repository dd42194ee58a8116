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

    built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    built = built if torch.version.hip or torch.version.cuda else "no GPU"
    python = f"python {platform.python_version()}, numpy {numpy.__version__}"
    yield Check("versions", f"zfunc {zfunc.__version__}, torch {torch.__version__} for {built}, {python}")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Check("system", f"{system}, GPU driver {driver(root) or 'none'}")


def driver(root: Path = ROOT) -> str | None:
    """The version of the loaded kernel module, AMD's for a torch built for ROCm, else NVIDIA's."""
    import torch

    from zfunc.runtime.cpu_topology import read_text

    if torch.version.hip:
        module = root / "sys/module/amdgpu"
        return f"amdgpu {read_text(module / 'version') or 'of this Linux'}" if module.is_dir() else None
    match = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", f"{read_text(root / 'proc/driver/nvidia/version')} ")
    return match and match[1]


def processor(environment: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    """The CPU with the kernel's instructions, and the threads of an update with what has a say in them."""
    from zfunc.optim.kernel_loader import cpu_adam
    from zfunc.runtime import cpu_topology
    from zfunc.runtime.accelerator import accelerator_type
    from zfunc.runtime.thread_budget import allowed_cpus, choose_threads

    cache, runtimes = cpu_topology.largest_cache(root), cpu_topology.openmp_runtimes(root)
    size = format_bytes(cache) if cache else UNKNOWN
    model = cpu_topology.cpu_model(root) or UNKNOWN
    yield Check("processor", f"{model}, largest cache {size}, kernel in {cpu_adam.instruction_set()}")
    own = [
        f"{name}={x}" for name, x in sorted(environment.items()) if name.startswith(("OMP_", "GOMP_", "KMP_"))
    ]
    several = "several OpenMP libraries, whose threads compete: install numpy and torch from one source"
    problem = several if runtimes and len(runtimes) > 1 else None
    try:
        threads = str(
            choose_threads(environment, allowed_cpus(), on_accelerator=accelerator_type() is not None)
        )
    except ValueError as error:
        threads, problem = UNKNOWN, str(error)
    openmp = UNKNOWN if runtimes is None else ", ".join(runtimes) or "none by name"
    yield Check("threads", f"{threads}; OpenMP {openmp}, {', '.join(own) or 'no variables'}", problem)


def memory(root: Path = ROOT) -> Iterator[Check]:
    """Free memory by NUMA node, how much may be locked, and what a sweep over it reaches."""
    from zfunc.planner.bandwidth import measure_bandwidth
    from zfunc.runtime import cpu_topology
    from zfunc.runtime.host_memory import available_host_bytes

    try:
        free = f"{format_bytes(available_host_bytes())} free to this process"
    except (OSError, KeyError, ValueError):
        free = UNKNOWN
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = "all of it" if limit == resource.RLIM_INFINITY else f"{format_bytes(limit)} (ulimit -l)"
    huge = cpu_topology.huge_page_mode(root) or UNKNOWN
    yield Check("memory", f"{free}; may be pinned: {pinned}; huge pages {huge}")
    for node in cpu_topology.numa_nodes(root):
        bytes_free, total = (
            UNKNOWN if n is None else format_bytes(n) for n in (node.free_bytes, node.total_bytes)
        )
        yield Check(f"NUMA node {node.index}", f"{len(node.cpus)} CPUs, {bytes_free} free of {total}")
    try:
        measured = measure_bandwidth()
    except (MemoryError, OSError, ValueError, KeyError) as error:
        yield Check("bandwidth", f"{UNKNOWN}: {error}")
        return
    cached = "" if measured.beyond_caches else ", which the caches hold"
    others = UNKNOWN if measured.others is None else f"{measured.others:.1f}"
    yield Check(
        "bandwidth",
        f"{measured.gigabytes:.1f} GB/s over {format_bytes(measured.nbytes)} of memory{cached}, Adam kernel "
        f"{measured.reached:.0%} of that; CPUs busy with other work: {others}",
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
        hint = ", ".join(hidden) or "compare with nvidia-smi or rocm-smi, and with what torch is built for"
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
