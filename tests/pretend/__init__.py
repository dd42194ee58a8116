"""The pretend device: what a GPU promises about order and memory, in threads of the CPU, and no more than that.

`load()` builds it (g++ and ninja, half a minute, once) and registers it with torch as the device "pretend", of
which there are four. Its streams are threads that delay every piece of work at random; the host cannot touch its
memory; its allocator is stream-ordered, fills what is freed with NaN and counts exactly; every operation is queued
and done by the CPU's kernel. A missing wait, a read before its event, memory used after it was freed and a wrong
stream all show. It says nothing about a GPU's kernels, drivers or speed.

Renaming torch's spare backend is for the life of a process, and makes it the default accelerator.
"""

import fcntl
import hashlib
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from zfunc.runtime import accelerator

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"  # one, as reading torch's headers is most of a build
BUILD = HERE.parents[1] / "build"
BACKEND = "pretend_ccl"  # of collectives


def missing_tools() -> str:
    """What is needed for a build and not installed, as a text; "" if nothing."""
    return ", ".join(x for x in ("g++", "ninja") if shutil.which(x) is None)


def load() -> Any:
    """The extension, whose functions control the device: delay, stall, set_capacity, set_sticky, launches..."""
    if "torch.pretend" in sys.modules:
        return sys.modules["torch.pretend"].controls
    torch.utils.rename_privateuse1_backend("pretend")
    controls = _build()
    module: Any = types.ModuleType("torch.pretend")
    module.controls = controls
    module.device_count, module.current_device = controls.device_count, controls.current_device
    module.set_device = lambda device: controls.set_device(_index(device))
    module.set_per_process_memory_fraction = lambda fraction, device: controls.set_capacity(
        _index(device), int(fraction * torch.accelerator.get_memory_info(device)[1])
    )
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None  # without it torch 2.11 synchronizes nothing
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.default_generators = tuple(controls.default_generator(i) for i in range(controls.device_count()))
    module.get_rng_state = lambda device="pretend": module.default_generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device="pretend": module.default_generators[
        _index(device)
    ].set_state(state)
    module.manual_seed = lambda seed: module.default_generators[controls.current_device()].manual_seed(seed)
    module.manual_seed_all = lambda seed: [g.manual_seed(seed) for g in module.default_generators]
    torch._register_device_module("pretend", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    accelerator.VENDORS["pretend"] = accelerator.Vendor(pin=_pin, unplanned=0, peers=lambda *_: True)
    dist.Backend.register_backend(BACKEND, _make_backend, devices=["pretend"])
    return controls


def _build() -> Any:
    """The compiled extension, in a folder named after its sources and torch, by one process at a time."""
    texts = [p.read_bytes() for p in sorted([SOURCE, *HERE.glob("*.h")])]
    digest = hashlib.blake2b(b"".join([torch.__version__.encode(), *texts]), digest_size=6).hexdigest()
    folder = BUILD / f"pretend-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "one_at_a_time").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Of a build that was killed: torch would wait for it for ever.
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "pretend_device",
            [str(SOURCE)],
            extra_cflags=["-O1", "-std=c++20", "-w"],
            build_directory=str(folder),
        )


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _pin(device: torch.device, address: int, nbytes: int) -> Any:
    controls = sys.modules["torch.pretend"].controls
    controls.host_register(address, nbytes)
    return lambda: controls.host_unregister(address)


def _make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    return sys.modules["torch.pretend"].controls.Collectives(gloo)
