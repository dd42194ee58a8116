"""Checks of `zfunc doctor`: the host and this process.

A check is a value, made by a small function from readings of the machine; a test can pass in those of a sick one.
What cannot be read is "unknown", never an exception.
"""

import platform
import shutil
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
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime.cpu_topology import ROOT, NumaNode
from zfunc.runtime.direct_io import file_system_of
from zfunc.runtime.drive_speed import is_direct, measure
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.numa_placement import NumaSlot
from zfunc.runtime.thread_budget import ThreadBudget
from zfunc.units import format_bytes

IN_MEMORY = ("tmpfs", "ramfs")  # file systems
UNKNOWN = "unknown"
CROWDED = 0.3  # CPUs that have to be shared for a problem
SLOW = 0.5  # of the memory's bandwidth: a kernel below it waits for something else


@frozen
class Check:
    """A section and a name, the value that was read, and if that is wrong, the problem and what to do."""

    section: str
    name: str
    value: str
    problem: str | None = None
    advice: str | None = None

    def __attrs_post_init__(self) -> None:
        """A problem comes with advice."""
        if (self.problem is None) != (self.advice is None):
            raise ValueError(
                f"{self.name}: got {self.problem!r}, {self.advice!r}, expected both or neither: add one"
            )


def versions() -> Iterator[Check]:
    """Of zfunc and what it runs on."""
    yield Check("versions", "zfunc", zfunc.__version__)
    yield Check("versions", "torch", torch.__version__)
    yield Check("versions", "python", f"{platform.python_version()}, numpy {numpy.__version__}")
    yield Check("versions", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")


def processor(root: Path = ROOT) -> Iterator[Check]:
    """The CPU, and the instructions that the kernel uses."""
    cache = topology.largest_cache(root)
    yield Check("processor", "model", topology.cpu_model(root) or UNKNOWN)
    yield Check("processor", "largest cache", format_bytes(cache) if cache else UNKNOWN)
    available = ", ".join(cpu_adam.instruction_sets())
    yield Check("processor", "instruction set", f"{cpu_adam.instruction_set()}, of {available}")


def threads(budget: ThreadBudget, environment: Mapping[str, str]) -> Iterator[Check]:
    """How many threads a sweep gets, and the variables of the environment that hinder it."""
    yield Check("threads", "of a sweep", str(budget))
    yield Check("threads", "of compute", f"{torch.get_num_threads()}, torch's own; zfunc leaves them")
    variables = {
        name: value for name, value in environment.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    for name, value in sorted({"OMP_NUM_THREADS": "not set", **variables}.items()):
        yield Check("threads", name, value, *(_hindrance(name, value, budget) or ()))


def _hindrance(name: str, value: str, budget: ThreadBudget) -> tuple[str, str] | None:
    word = value.strip().lower()
    match name:
        case "OMP_PROC_BIND" if word not in ("false", "not set"):
            return (
                "it binds the first thread of this process to one place, and with it all threads that it starts",
                "unset it",
            )
        case "OMP_WAIT_POLICY" if word == "active":
            return "waiting threads spin on cores that others need", "unset it, or set it to passive"
        case "OMP_THREAD_LIMIT" if word.isdecimal() and int(word) < budget.threads:
            return f"sweeps get {word} threads instead of {budget.threads}", "unset it"
        case _:
            return None


def default_schedule(*, accelerator: bool) -> Check:
    """The schedule of a step that names none, and why."""
    schedule = schedule_for(BY_DEVICE, on_cpu=not accelerator)
    why = (
        "copies and updates run beside compute" if accelerator else "lanes of their own would share the cores"
    )
    return Check("threads", "schedule", f"{schedule} by default: {why}")


def neighbours(others: float | None, budget: ThreadBudget, environment: Mapping[str, str]) -> Check:
    """Whether other processes use the CPUs of this one; `others` is how many they keep busy."""
    if others is None:
        return Check("threads", "other work", UNKNOWN)
    value = f"{others:.1f} of {len(budget.cpus)} CPUs"
    sleeps_soon = (
        environment.get("OMP_WAIT_POLICY", "").lower() == "passive" or "GOMP_SPINCOUNT" in environment
    )
    if others + budget.threads < len(budget.cpus) + CROWDED or sleeps_soon:
        return Check("threads", "other work", value)
    problem = "threads spin while they wait for one another, and all of them wait for one whose core is taken"
    advice = "run nothing else on these cores, or export GOMP_SPINCOUNT=1000, so that threads sleep sooner"
    return Check("threads", "other work", value, problem, advice)


def openmp(runtimes: Sequence[str] | None) -> Check:
    """The OpenMP libraries of this process, which should be torch's alone."""
    value = UNKNOWN if runtimes is None else ", ".join(runtimes) or "none by name"
    if runtimes is None or len(runtimes) < 2:
        return Check("threads", "OpenMP", value)
    problem = f"{len(runtimes)} OpenMP libraries in one process: their threads compete for the cores"
    advice = "reinstall numpy and torch from one source, or unset LD_PRELOAD if it names one of these"
    return Check("threads", "OpenMP", value, problem, advice)


def numa(nodes: Sequence[NumaNode], slots: Sequence[NumaSlot]) -> Iterator[Check]:
    """The nodes, their free memory, and how many threads of a sweep run on each."""
    if not nodes:
        yield Check("memory", "NUMA", UNKNOWN)
    for node in nodes:
        memory = ", ".join(
            f"{format_bytes(n)} {what}"
            for n, what in ((node.free_bytes, "free"), (node.total_bytes, "in all"))
            if n is not None
        )
        mine = sum(slot.node == node.index for slot in slots)
        bound = f", {mine} threads of a sweep" if slots else ""
        yield Check("memory", f"NUMA node {node.index}", f"{len(node.cpus)} CPUs, {memory or UNKNOWN}{bound}")


def memory_checks(mode: str | None, huge: tuple[int, int] | None) -> Iterator[Check]:
    """Free memory, and whether large buffers get huge pages; `huge` is bytes in huge pages, of how many."""
    try:
        free = format_bytes(available_host_bytes())
    except (OSError, KeyError, ValueError):
        free = UNKNOWN
    yield Check("memory", "available", f"{free} to this process")
    share = huge[0] / huge[1] if huge else None
    value = f"{mode or UNKNOWN}{'' if share is None else f'; {share:.0%} of a large buffer is in them'}"
    yield Check("memory", "huge pages", value, *(_small_pages(mode, share) or ()))


def _small_pages(mode: str | None, share: float | None) -> tuple[str, str] | None:
    if mode == "never":
        problem = "large buffers are in small pages, which are slower to allocate and to sweep over"
        return problem, "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    if mode in ("always", "madvise") and share is not None and share < 0.5:
        problem = f"{share:.0%} of a large buffer is in huge pages: memory is fragmented"
        return problem, "free memory, then as root: echo 1 > /proc/sys/vm/compact_memory"
    return None


def bandwidth_checks(measured: Bandwidth | str) -> Iterator[Check]:
    """The bandwidth that was measured, or why none could be."""
    if isinstance(measured, str):
        yield Check("host bandwidth", "memory", f"{UNKNOWN}: {measured}")
        return
    note = "" if measured.beyond_caches else ", which the caches hold"
    yield Check(
        "host bandwidth",
        "memory",
        f"{measured.gigabytes:.1f} GB/s, sweeping over {format_bytes(measured.nbytes)}{note}",
    )
    slow = measured.reached < SLOW
    yield Check(
        "host bandwidth",
        "Adam kernel",
        f"{measured.reached:.0%} of that",
        "the update is bound by arithmetic or waits for a core, not by memory" if slow else None,
        "run nothing else on these cores, and zfunc doctor again" if slow else None,
    )


def drives(folders: Sequence[Path]) -> Iterator[Check]:
    """The drive of this folder, and those of `folders`, on which state is to live."""
    here = Path()
    if here.resolve() not in [folder.resolve() for folder in folders]:
        value, _ = _drive(here)
        yield Check("drives", "this folder", value)
    first: dict[int, Path] = {}
    for folder in folders:
        value, found = _drive(folder)
        if found is None and (other := first.setdefault(folder.stat().st_dev, folder)) is not folder:
            found = f"{other} is on the same drive: both are as fast as one", "name a folder on another drive"
        yield Check("drives", str(folder), value, *(found or ()))


def _drive(folder: Path) -> tuple[str, tuple[str, str] | None]:
    """What a drive is and does, and what is wrong with it for state."""
    try:
        direct, speeds = is_direct(folder), measure(folder)
        free = format_bytes(shutil.disk_usage(folder).free)
    except DiskError as error:
        return f"{UNKNOWN}: {error}", ("state cannot live there", str(error).rpartition(": ")[2])
    kind, how = file_system_of(folder), "past" if direct else "through"
    rates = f"reads {speeds.read / 1e9:.1f} GB/s, writes {speeds.write / 1e9:.1f} GB/s"
    value = f"{rates}, {how} the page cache; {kind}, {free} free"
    if kind in IN_MEMORY:
        return value, ("it is memory, which state is to leave free", "name a folder on a drive")
    if not direct:
        return value, (f"{kind} refuses O_DIRECT: the page cache takes memory and time", "use ext4 or xfs")
    return value, None
