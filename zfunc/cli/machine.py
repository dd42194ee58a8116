"""The lines of `zfunc doctor`, each a value made by a small function. What cannot be read is "unknown"."""

import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy
import torch
from attrs import frozen

import zfunc
from zfunc.core.settings import BY_DEVICE, schedule_for
from zfunc.errors import DiskError
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.planner.bandwidth import Bandwidth
from zfunc.runtime import cpu_topology
from zfunc.runtime.accelerator import accelerator_type, available_bytes, best_precision, device_name
from zfunc.runtime.cpu_topology import ROOT, read_text
from zfunc.runtime.direct_io import file_system_of
from zfunc.runtime.drive_speed import is_direct, measure
from zfunc.runtime.host_memory import alloc_host, available_host_bytes
from zfunc.runtime.thread_budget import allowed_cpus, choose_threads
from zfunc.units import format_bytes

UNKNOWN = "unknown"
COPIED, COPIES = 128 << 20, 4  # bytes of a copy to a device or back, and how many are timed
HIDING = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@frozen
class Check:
    """A line: its section and name, what was read, and what is wrong with that, if it keeps a step from running."""

    section: str
    name: str
    value: str
    problem: str | None = None


def versions(root: Path = ROOT) -> Iterator[Check]:
    """Of zfunc, of what it runs on, and of the GPUs' driver."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPU"
    built = f"ROCm {torch.version.hip}" if torch.version.hip else built
    yield Check("versions", "zfunc", zfunc.__version__)
    yield Check("versions", "torch", f"{torch.__version__}, built for {built}")
    yield Check("versions", "python", f"{platform.python_version()}, numpy {numpy.__version__}")
    yield Check("versions", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Check("versions", "driver", driver(root) or "none")


def driver(root: Path = ROOT) -> str | None:
    """The version of the loaded kernel module, AMD's for a torch built for ROCm, else NVIDIA's."""
    if torch.version.hip:
        module = root / "sys/module/amdgpu"
        return f"amdgpu {read_text(module / 'version') or 'of this Linux'}" if module.is_dir() else None
    match = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", f"{read_text(root / 'proc/driver/nvidia/version')} ")
    return match and match[1]


def processor(environment: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    """The CPU, the instructions of the kernel, the threads of a sweep, and what has a say in those."""
    accelerator = accelerator_type() is not None
    cache, runtimes = cpu_topology.largest_cache(root), cpu_topology.openmp_runtimes(root)
    size = format_bytes(cache) if cache else UNKNOWN
    yield Check("processor", "model", f"{cpu_topology.cpu_model(root) or UNKNOWN}, largest cache {size}")
    instructions = f"{cpu_adam.instruction_set()}, of {', '.join(cpu_adam.instruction_sets())}"
    yield Check("processor", "instruction set", instructions)
    try:
        budget = choose_threads(environment, allowed_cpus(), on_accelerator=accelerator)
        yield Check("processor", "threads", str(budget))
    except ValueError as error:
        yield Check("processor", "threads", UNKNOWN, str(error))
    several = "their threads compete for the cores: install numpy and torch from one source"
    shown = UNKNOWN if runtimes is None else ", ".join(runtimes) or "none by name"
    yield Check("processor", "OpenMP", shown, several if runtimes and len(runtimes) > 1 else None)
    own = [
        f"{name}={x}" for name, x in sorted(environment.items()) if name.startswith(("OMP_", "GOMP_", "KMP_"))
    ]
    yield Check("processor", "environment", ", ".join(own) or "nothing for OpenMP")
    yield Check("processor", "schedule", f"{schedule_for(BY_DEVICE, on_cpu=not accelerator)} by default")


def memory(huge: tuple[int, int] | None, root: Path = ROOT) -> Iterator[Check]:
    """Free memory, NUMA nodes, pages, and how much may be locked; `huge` is bytes in huge pages, of how many."""
    try:
        yield Check("memory", "available", f"{format_bytes(available_host_bytes())} to this process")
    except (OSError, KeyError, ValueError):
        yield Check("memory", "available", UNKNOWN)
    for node in cpu_topology.numa_nodes(root):
        free, total = (UNKNOWN if n is None else format_bytes(n) for n in (node.free_bytes, node.total_bytes))
        yield Check("memory", f"NUMA node {node.index}", f"{len(node.cpus)} CPUs, {free} free of {total}")
    share = f"; {huge[0] / huge[1]:.0%} of a large buffer is in them" if huge else ""
    yield Check("memory", "huge pages", f"{cpu_topology.huge_page_mode(root) or UNKNOWN}{share}")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = "no limit" if limit == resource.RLIM_INFINITY else f"{format_bytes(limit)} at most (ulimit -l)"
    yield Check("memory", "pinned", pinned)


def bandwidth(measured: Bandwidth | str) -> Iterator[Check]:
    """What a sweep over host memory reaches, and Adam of that; or why it could not be measured."""
    if isinstance(measured, str):
        yield Check("bandwidth", "memory", f"{UNKNOWN}: {measured}")
        return
    cached = "" if measured.beyond_caches else ", which the caches hold"
    others = UNKNOWN if measured.others is None else f"{measured.others:.1f}"
    swept = f"sweeping over {format_bytes(measured.nbytes)}{cached}"
    yield Check("bandwidth", "memory", f"{measured.gigabytes:.1f} GB/s, {swept}")
    yield Check(
        "bandwidth", "Adam kernel", f"{measured.reached:.0%} of that; CPUs busy with other work: {others}"
    )


def drives(folders: Sequence[Path]) -> Iterator[Check]:
    """The drive of this folder, and those of `folders`, on which state is to live."""
    here = [] if Path().resolve() in [folder.resolve() for folder in folders] else [Path()]
    for folder in (*here, *folders):
        name = "this folder" if folder in here else str(folder)
        try:
            how, speeds = "past" if is_direct(folder) else "through", measure(folder)
            free = format_bytes(shutil.disk_usage(folder).free)
        except DiskError as error:
            yield Check("drives", name, UNKNOWN, None if folder in here else str(error))
            continue
        rates = f"reads {speeds.read / 1e9:.1f} GB/s, writes {speeds.write / 1e9:.1f} GB/s"
        yield Check("drives", name, f"{rates}, {how} the page cache; {file_system_of(folder)}, {free} free")


def devices(root: Path = ROOT) -> Iterator[Check]:
    """Every accelerator that torch sees; or that there is none, and what may be wrong where a driver is loaded."""
    if (kind := accelerator_type()) is None:
        hidden = [f"{name}={os.environ[name]!r} may hide it" for name in HIDING if name in os.environ]
        hint = ", ".join(hidden) or "compare with nvidia-smi or rocm-smi, and with what torch is built for"
        problem = (
            f"driver {driver(root)} is loaded, but torch sees no device: {hint}" if driver(root) else None
        )
        yield Check("devices", "none", "steps run on the CPU", problem)
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind, index)
        try:
            there, back = (f"{rate / 1e9:.1f} GB/s" for rate in copy_rates(device))
            free, precision = format_bytes(available_bytes(device)), best_precision(device)
            copies = f"copies {there} to it, {back} back"
            yield Check("devices", str(device), f"{device_name(device)}; {free} free; {precision}; {copies}")
        except (RuntimeError, AssertionError, MemoryError) as error:
            yield Check("devices", str(device), "does not answer", str(error).splitlines()[0])


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second from pinned memory to a device, and back."""
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
