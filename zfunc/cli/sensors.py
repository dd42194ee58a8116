"""The load of this machine: cores, memory and GPUs, for the page of a run that is under way."""

from typing import Any

import psutil

from zfunc.units import format_bytes

SECONDS = 0.3  # that the cores are watched for


def machine_load() -> list[tuple[str, str]]:
    """Cores, host memory, and every GPU that NVIDIA's driver lists, as names and values."""
    cpus = psutil.Process().cpu_affinity()
    shares = psutil.cpu_percent(SECONDS, percpu=True)
    busy = sum(shares[cpu] for cpu in cpus if cpu < len(shares)) / 100
    memory = psutil.virtual_memory()
    in_use = memory.total - memory.available
    return [
        ("cores", f"{busy:.1f} of {len(cpus)} busy"),
        ("memory", f"{format_bytes(in_use)} of {format_bytes(memory.total)} in use"),
        *gpu_load(),
    ]


def gpu_load() -> list[tuple[str, str]]:
    """A row for each GPU; one row with the reason where they are unknown."""
    try:
        import pynvml
    except ImportError:
        return [("GPU", "unknown: pip install 'zfunc[gpu]'")]
    try:
        pynvml.nvmlInit()
        return [(f"GPU {n}", _gpu(pynvml, n)) for n in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError_LibraryNotFound:  # no driver of NVIDIA
        return []
    except pynvml.NVMLError as error:
        return [("GPU", f"unknown: {error}")]


def _gpu(pynvml: Any, index: int) -> str:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    busy, memory = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu, pynvml.nvmlDeviceGetMemoryInfo(handle)
    in_use = f"{format_bytes(memory.used)} of {format_bytes(memory.total)} in use"
    return f"{pynvml.nvmlDeviceGetName(handle)}: {busy} % busy, {in_use}"
