"""Checks of `zfunc doctor`: pinned memory and CUDA."""

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
    """The limit of locked memory in bytes, None without one; how sizes are rounded; and whether pinning works."""
    limit_text = "no limit" if limit is None else format_bytes(limit)
    rounded = 1 << (EXAMPLE - 1).bit_length()
    size = format_bytes(EXAMPLE)
    sizes = f"{size} takes {size}, exactly; torch's allocator would take {format_bytes(rounded)}"
    yield Check("pinned memory", "limit", f"{limit_text} (ulimit -l)")
    yield Check("pinned memory", "rounding", sizes)
    if not cuda:
        yield Check("pinned memory", "pinning", "needs CUDA: on a CPU these buffers are ordinary memory")
        return
    try:
        (pin or _pin_example)()
    except (RuntimeError, MemoryError) as error:
        advice = f"raise the limit, now {limit_text}: ulimit -l unlimited (docker: --ulimit memlock=-1)"
        yield Check("pinned memory", "pinning", "refused", f"{error}".partition(", expected")[0], advice)
    else:
        yield Check("pinned memory", "pinning", f"{format_bytes(EXAMPLE)} could be pinned")


def _pin_example() -> None:
    alloc_host(EXAMPLE, torch.uint8, pinned_for=torch.device("cuda", torch.cuda.current_device()))


def locked_limit() -> int | None:
    """Bytes this process may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


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
    match = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", f"{text} ")
    return match[1] if match else None


def _no_cuda(driver: str | None) -> Check:
    if driver is None:
        return Check("CUDA", "devices", "none: steps run on the CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        problem, advice = (
            f"torch {torch.__version__} is built without CUDA",
            "install a build of torch with CUDA",
        )
    elif visible is not None:
        problem, advice = (
            f"CUDA_VISIBLE_DEVICES={visible!r} hides the devices",
            "unset it, or name a device in it",
        )
    else:
        problem = f"torch, built for CUDA {torch.version.cuda}, sees no GPU under driver {driver}"
        advice = "compare with nvidia-smi: is the driver too old for this torch, or a container without --gpus all?"
    return Check("CUDA", "devices", "none that torch sees", problem, advice)


def _device(index: int, root: Path) -> Check:
    try:
        p: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except (RuntimeError, AssertionError) as error:
        advice = "compare with nvidia-smi: another process may hold the device, or it may need a restart"
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
    """The PCIe link of a device, now and at its fastest: an idle GPU lowers its speed."""
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
