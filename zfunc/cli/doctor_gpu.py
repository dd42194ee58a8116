"""Checks of `zfunc doctor`: pinned memory, and GPUs of NVIDIA (CUDA) and AMD (ROCm)."""

import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from zfunc.cli.doctor_host import UNKNOWN, Check
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime.cpu_topology import ROOT
from zfunc.runtime.host_memory import alloc_host
from zfunc.units import format_bytes

EXAMPLE = 100_000_000  # bytes of a bucket of 50,000,000 elements in 16 bits


def pinned(limit: int | None, *, gpu: bool, pin: Callable[[], object] | None = None) -> Iterator[Check]:
    """The limit of locked memory in bytes, None without one; how sizes are rounded; and whether pinning works."""
    limit_text = "no limit" if limit is None else format_bytes(limit)
    rounded = 1 << (EXAMPLE - 1).bit_length()
    size = format_bytes(EXAMPLE)
    sizes = f"{size} takes {size}, exactly; torch's allocator would take {format_bytes(rounded)}"
    yield Check("pinned memory", "limit", f"{limit_text} (ulimit -l)")
    yield Check("pinned memory", "rounding", sizes)
    if not gpu:
        yield Check("pinned memory", "pinning", "needs a GPU: on a CPU these buffers are ordinary memory")
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


@frozen
class GPUStack:
    """Where a GPU's maker has what is checked: driver, library, tool."""

    name: str
    built: str | None  # the version that torch is built for
    driver: str | None  # the version of the kernel's module, if it is loaded
    hiding: tuple[str, ...]  # environment variables that hide devices
    tool: str
    unseen: str  # what to look at where torch sees no device


def gpu_checks(root: Path = ROOT) -> Iterator[Check]:
    """The driver, and every device torch sees."""
    stack = _stack(root)
    if not torch.cuda.is_available():
        yield _no_devices(stack, root)
        return
    versions = f"{stack.driver or UNKNOWN}; torch is built for {stack.name} {stack.built or UNKNOWN}"
    yield Check(stack.name, "driver", versions)
    for index in range(torch.cuda.device_count()):
        yield _device(stack, index, root)


def _stack(root: Path) -> GPUStack:
    """That of the GPUs which this torch is built for; NVIDIA's for one that is built for none."""
    if torch.version.hip:
        return GPUStack(
            "ROCm",
            torch.version.hip,
            _amd_driver(root),
            ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
            "rocm-smi",
            "is this user in the groups render and video, and in a container: are /dev/kfd and /dev/dri there?",
        )
    return GPUStack(
        "CUDA",
        torch.version.cuda,
        _nvidia_driver(root),
        ("CUDA_VISIBLE_DEVICES",),
        "nvidia-smi",
        "is the driver too old for this torch, or a container without --gpus all?",
    )


def _nvidia_driver(root: Path) -> str | None:
    """The version of NVIDIA's kernel module, if one is loaded."""
    text = topology.read_text(root / "proc/driver/nvidia/version")
    match = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", f"{text} ")
    return match[1] if match else None


def _amd_driver(root: Path) -> str | None:
    """The version of AMD's kernel module, if one is loaded; the one that is part of Linux has none of its own."""
    module = root / "sys/module/amdgpu"
    if not module.is_dir():
        return None
    version = topology.read_text(module / "version")
    return f"amdgpu {version}" if version else "amdgpu of this Linux"


def _no_devices(stack: GPUStack, root: Path) -> Check:
    if stack.driver is None:
        unused = stack.name == "CUDA" and _amd_driver(root) is not None
        note = "; a GPU of AMD needs a torch built for ROCm" if unused else ""
        return Check(stack.name, "devices", f"none: steps run on the CPU{note}")
    hidden = next((f"{x}={os.environ[x]!r}" for x in stack.hiding if x in os.environ), None)
    if stack.built is None:
        problem = f"torch {torch.__version__} is built without {stack.name}"
        advice = f"install a build of torch with {stack.name}"
    elif hidden is not None:
        problem, advice = f"{hidden} hides the devices", "unset it, or name a device in it"
    else:
        problem = f"torch, built for {stack.name} {stack.built}, sees no GPU under driver {stack.driver}"
        advice = f"compare with {stack.tool}: {stack.unseen}"
    return Check(stack.name, "devices", "none that torch sees", problem, advice)


def _device(stack: GPUStack, index: int, root: Path) -> Check:
    try:
        p: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except (RuntimeError, AssertionError) as error:
        advice = f"compare with {stack.tool}: another process may hold the device, or it may need a restart"
        return Check(stack.name, f"device {index}", "does not answer", str(error).splitlines()[0], advice)
    architecture = getattr(p, "gcnArchName", "").partition(":")[0] if stack.name == "ROCm" else ""
    parts = (
        p.name,
        f"architecture {architecture}" if architecture else f"compute capability {p.major}.{p.minor}",
        f"{format_bytes(free)} free of {format_bytes(total)}",
        "computes in bf16" if bf16 else "no bf16: trains in fp16 or fp32",
        _link(p, root),
    )
    return Check(stack.name, f"device {index}", "; ".join(parts))


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
