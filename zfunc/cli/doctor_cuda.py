"""What `zfunc doctor` looks at, second part: pinned memory and CUDA.

The invariant: as in machine.py, a check is a value, and what cannot be found out is "unknown".
"""

import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zfunc.cli.doctor_host import UNKNOWN, Check
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime.cpu_topology import ROOT
from zfunc.runtime.host_memory import alloc_host
from zfunc.units import format_bytes

EXAMPLE = 100_000_000  # bytes of a bucket of 50,000,000 elements in 16 bits


def pinned(limit: int | None, *, cuda: bool, pin: Callable[[], object] | None = None) -> Iterator[Check]:
    """How pinned memory is rounded, and whether there is any. `limit`: bytes one may lock; None: no limit."""
    told = "no limit" if limit is None else format_bytes(limit)
    rounded = 1 << (EXAMPLE - 1).bit_length()
    size = format_bytes(EXAMPLE)
    sizes = f"{size} takes {size}, exactly; torch's allocator would take {format_bytes(rounded)}"
    yield Check("pinned memory", "limit", f"{told} (ulimit -l)")
    yield Check("pinned memory", "rounding", sizes)
    if not cuda:
        yield Check("pinned memory", "pinning", "needs CUDA: on a CPU these buffers are ordinary memory")
        return
    try:
        (pin or _pin_example)()
    except (RuntimeError, MemoryError) as error:
        advice = (
            f"raise the limit of locked memory, now {told}: ulimit -l unlimited (docker: --ulimit memlock=-1)"
        )
        yield Check("pinned memory", "pinning", "refused", f"{error}".partition(", expected")[0], advice)
    else:
        yield Check("pinned memory", "pinning", f"{format_bytes(EXAMPLE)} could be pinned")


def _pin_example() -> None:
    alloc_host(EXAMPLE, torch.uint8, pinned_for=torch.device("cuda", torch.cuda.current_device()))


def locked_limit() -> int | None:
    """Bytes this process may lock; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


# ---- CUDA -----------------------------------------------------------------------------------------------


def cuda(root: Path = ROOT) -> Iterator[Check]:
    """The driver, and every device torch sees."""
    driver = _driver(root)
    if not torch.cuda.is_available():
        yield _no_cuda(driver)
        return
    yield Check(
        "CUDA", "driver", f"{driver or UNKNOWN}; torch is built for CUDA {torch.version.cuda or UNKNOWN}"
    )
    for index in range(torch.cuda.device_count()):
        yield _device(index, root)


def _driver(root: Path) -> str | None:
    """The version of NVIDIA's kernel module, if one is loaded."""
    text = topology.read_text(root / "proc/driver/nvidia/version")
    found = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", f"{text} ")
    return found.group(1) if found else None


def _no_cuda(driver: str | None) -> Check:
    if driver is None:
        return Check("CUDA", "devices", "none: steps run on the CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        why, advice = f"torch {torch.__version__} is built without CUDA", "install a build of torch with CUDA"
    elif visible is not None:
        why, advice = (
            f"CUDA_VISIBLE_DEVICES={visible!r} hides what there is",
            "unset it, or name a device in it",
        )
    else:
        why = f"torch, built for CUDA {torch.version.cuda}, sees no GPU under driver {driver}"
        advice = "compare with nvidia-smi: is the driver too old for this torch, or a container without --gpus all?"
    return Check("CUDA", "devices", "none that torch sees", why, advice)


def _device(index: int, root: Path) -> Check:
    try:
        p: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except (RuntimeError, AssertionError) as error:
        advice = (
            "compare with nvidia-smi; another process may hold the device, or it may have to be restarted"
        )
        return Check("CUDA", f"device {index}", "does not answer", str(error).splitlines()[0], advice)
    parts = (
        p.name,
        f"compute capability {p.major}.{p.minor}",
        f"{format_bytes(free)} free of {format_bytes(total)}",
        "computes in bf16" if bf16 else "no bf16: trains in fp16 or fp32",
        _link(p, root),
    )
    return Check("CUDA", f"device {index}", "; ".join(parts))


def _link(properties: Any, root: Path) -> str:
    """The PCIe link of a device. At rest a GPU lowers its speed, so the most it can do is told as well."""
    try:
        p = properties
        place = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    except AttributeError:  # an older torch
        return f"link {UNKNOWN}"
    folder = root / "sys/bus/pci/devices" / place
    names = "current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node"
    speed, width, most, widest, node = (topology.read_text(folder / name) for name in names)
    if not speed or not width:
        return f"PCIe {place}, link {UNKNOWN}"
    near = f", NUMA node {node}" if node and node != "-1" else ""
    now, best = (
        f"{s.removesuffix(' PCIe')} x{w}" for s, w in ((speed, width), (most or UNKNOWN, widest or "?"))
    )
    return f"PCIe {place}, {now} now of {best}{near}"
