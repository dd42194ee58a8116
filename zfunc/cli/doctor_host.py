"""What `zfunc doctor` looks at: the machine and this process, each matter in a small function.

The invariant: a check is a value. A function that makes some is given what it judges, so a test can hand it a sick
machine; what cannot be found out is "unknown", never an exception.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy
import torch
from attrs import frozen

import zfunc
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.planner.bandwidth import Bandwidth
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime.cpu_topology import ROOT, NumaNode
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.host_pages import HUGE_MIN
from zfunc.runtime.numa import NumaSlot
from zfunc.runtime.thread_budget import ThreadBudget
from zfunc.units import format_bytes

UNKNOWN = "unknown"
CROWDED = 0.3  # CPUs that have to be shared before it is worth a word
SLOW = 0.5  # of the memory's bandwidth: a kernel below it waits for something else


@frozen
class Check:
    """One thing that was looked at, what was found, and if that is wrong, why and what to do."""

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
    """Of zfunc and of what it runs on."""
    yield Check("versions", "zfunc", zfunc.__version__)
    yield Check("versions", "torch", torch.__version__)
    yield Check("versions", "python", f"{platform.python_version()}, numpy {numpy.__version__}")
    yield Check("versions", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")


def processor(root: Path = ROOT) -> Iterator[Check]:
    """The CPU, and which copy of the kernel it runs."""
    cache = topology.largest_cache(root)
    yield Check("processor", "model", topology.cpu_model(root) or UNKNOWN)
    yield Check("processor", "largest cache", format_bytes(cache) if cache else UNKNOWN)
    there, chosen = ", ".join(cpu_adam.instruction_sets()), cpu_adam.instruction_set()
    yield Check("processor", "instruction set", f"{chosen}, of {there}")


def threads(decision: ThreadBudget, environment: Mapping[str, str]) -> Iterator[Check]:
    """How many threads a sweep gets, and what in the environment is in its way."""
    yield Check("threads", "of a sweep", str(decision))
    yield Check("threads", "of compute", f"{torch.get_num_threads()}, torch's own; zfunc leaves them")
    set_here = {
        name: value for name, value in environment.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    for name, value in sorted({"OMP_NUM_THREADS": "not set", **set_here}.items()):
        yield Check("threads", name, value, *(_hindrance(name, value, decision) or ()))


def _hindrance(name: str, value: str, decision: ThreadBudget) -> tuple[str, str] | None:
    word = value.strip().lower()
    match name:
        case "OMP_PROC_BIND" if word not in ("false", "not set"):
            return (
                "it binds this process's first thread to one place, and what starts later with it",
                "unset it",
            )
        case "OMP_WAIT_POLICY" if word == "active":
            return "threads that wait spin on the cores the others need", "unset it, or set it to passive"
        case "OMP_THREAD_LIMIT" if word.isdecimal() and int(word) < decision.threads:
            return f"sweeps get {word} threads instead of {decision.threads}", "unset it"
        case _:
            return None


def neighbours(others: float | None, decision: ThreadBudget, environment: Mapping[str, str]) -> Check:
    """Whether the CPUs are this process's own. `others`: how many of them other processes keep busy."""
    if others is None:
        return Check("threads", "other work", UNKNOWN)
    value = f"{others:.1f} of {len(decision.cpus)} CPUs"
    patient = environment.get("OMP_WAIT_POLICY", "").lower() == "passive" or "GOMP_SPINCOUNT" in environment
    if others + decision.threads < len(decision.cpus) + CROWDED or patient:
        return Check("threads", "other work", value)
    problem = (
        "threads that wait for one another spin, and one whose core others have keeps all of them waiting"
    )
    advice = (
        "let nothing else run on these cores, or export GOMP_SPINCOUNT=1000, which makes them sleep sooner"
    )
    return Check("threads", "other work", value, problem, advice)


def openmp(runtimes: Sequence[str] | None) -> Check:
    """The OpenMP libraries of this process: one, that of torch."""
    value = UNKNOWN if runtimes is None else ", ".join(runtimes) or "none by name"
    if runtimes is None or len(runtimes) < 2:
        return Check("threads", "OpenMP", value)
    problem = (
        f"{len(runtimes)} OpenMP libraries in one process: each has threads of its own, in each other's way"
    )
    advice = "reinstall numpy and torch from one source, or unset LD_PRELOAD if it names one of these"
    return Check("threads", "OpenMP", value, problem, advice)


def numa(nodes: Sequence[NumaNode], seats: Sequence[NumaSlot]) -> Iterator[Check]:
    """The nodes, what is free on each, and which of them this process's sweeps run on."""
    if not nodes:
        yield Check("memory", "NUMA", UNKNOWN)
    for node in nodes:
        room = ", ".join(
            f"{format_bytes(n)} {what}"
            for n, what in ((node.free_bytes, "free"), (node.total_bytes, "in all"))
            if n is not None
        )
        mine = sum(seat.node == node.index for seat in seats)
        bound = f", {mine} threads of a sweep" if seats else ""
        yield Check("memory", f"NUMA node {node.index}", f"{len(node.cpus)} CPUs, {room or UNKNOWN}{bound}")


def memory_checks(mode: str | None, got: tuple[int, int] | None) -> Iterator[Check]:
    """What is free, and whether large buffers get huge pages. `got`: bytes in huge pages, of how many."""
    try:
        free = format_bytes(available_host_bytes())
    except (OSError, KeyError, ValueError):
        free = UNKNOWN
    yield Check("memory", "available", f"{free} to this process")
    share = got[0] / got[1] if got else None
    value = f"{mode or UNKNOWN}{'' if share is None else f'; {share:.0%} of a large buffer is in them'}"
    yield Check("memory", "huge pages", value, *(_small_pages(mode, share) or ()))


def _small_pages(mode: str | None, share: float | None) -> tuple[str, str] | None:
    if mode == "never":
        why = "large buffers are in small pages: they take longer to make, and sweeps look up more addresses"
        return why, "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    if mode in ("always", "madvise") and share is not None and share < 0.5:
        why = f"huge pages are asked for from {format_bytes(HUGE_MIN)} on, and {share:.0%} came: "
        why += "memory is in small pieces"
        return why, "free memory, then as root: echo 1 > /proc/sys/vm/compact_memory"
    return None


def bandwidth_checks(measured: Bandwidth | str) -> Iterator[Check]:
    """What was measured, or why nothing could be."""
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
        "the update waits for arithmetic or for a core, not for memory" if slow else None,
        "see that nothing else runs on these cores, then run this again" if slow else None,
    )
