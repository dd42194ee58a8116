"""The device that computes: the CPU, or whatever accelerator torch has (CUDA and ROCm, XPU, others).

Written against `torch.accelerator`, `torch.Stream` and `torch.Event`. What torch has no neutral call for is in
`VENDORS`, a table by device type; a type without a row gets the stated fallback.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache
from itertools import permutations
from typing import Any, Literal

import torch
from attrs import frozen
from torch.utils._pytree import tree_leaves

from zfunc.core.dtypes import Precision
from zfunc.errors import LaneTimeout, did_you_mean, refuse, setting
from zfunc.options import AUTO
from zfunc.runtime import nvrtc

log = logging.getLogger("zfunc")

CPU = torch.device("cpu")
SPIN = 20e-6  # seconds that a wait for the device spins before it sleeps
LONGEST_SLEEP = 1e-3  # seconds
CHECK_EVERY = 0.5  # seconds between two looks at what else may have failed
LIBRARIES = 256 << 20  # bytes outside of any plan: workspaces, collectives, kernels that are loaded late
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

# ---- which device ----------------------------------------------------------------------------------


def on_accelerator(device: torch.device) -> bool:
    """Whether `device` is an accelerator: torch queues its work on streams. False for the CPU alone."""
    return device.type != "cpu"


def accelerator_type() -> str | None:
    """The type of the accelerator that torch sees here ("cuda" for ROCm, too), or None."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else None  # type: ignore[union-attr]


def device_types() -> tuple[str, ...]:
    """The device types that a program can be compiled for on this machine."""
    found = accelerator_type()
    return ("cpu", found) if found else ("cpu",)


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device to train on, with its index: the one given, else the current accelerator, else the CPU.

    What was chosen for None is logged. Raises ValueError for a device that is not on this machine, and for an
    accelerator without streams.
    """
    types = device_types()
    if device is None or device == AUTO:
        kind = types[-1]
        log.info("device: %s, because torch sees %s", kind, "one" if types[1:] else "no accelerator")
        return pick_device(kind)
    expected = " or ".join(map(repr, types))
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        hint = did_you_mean(str(device), sorted({*types, "cuda"}))
        refuse("device", repr(device), f"{expected}{hint}")
    if chosen.type not in types:
        seen = "torch sees no other device on this machine"
        do = f"{seen}; if it has an accelerator, install a torch built for that"
        refuse("device", repr(str(device)), expected, do)
    if chosen.type == "cpu":
        return CPU
    count = torch.accelerator.device_count()
    if chosen.index is None:
        chosen = torch.device(chosen.type, torch.accelerator.current_device_index())
    if chosen.index >= count:
        refuse("device", repr(str(chosen)), f"{chosen.type}:0 to {chosen.type}:{count - 1}")
    try:
        torch.Stream(chosen)
    except (RuntimeError, NotImplementedError) as error:
        got = f"{str(chosen)!r}, which has no streams ({error})"
        refuse("device", got, "an accelerator with streams", f"use {setting('device', 'cpu')}", cause=error)
    return chosen


def devices_from(device: torch.device, count: int) -> tuple[torch.device, ...]:
    """`count` consecutive devices from `device` on; for the CPU, `count` times the CPU. Raises ValueError where the
    machine has fewer."""
    if not on_accelerator(device):
        return (device,) * count
    first, there = device.index, torch.accelerator.device_count()
    if first + count > there:
        got = f"{count} from {str(device)!r} on"
        refuse("devices", got, f"at most {there - first}", f"torch sees {there} of type {device.type}")
    return tuple(torch.device(device.type, n) for n in range(first, first + count))


def device_name(device: torch.device) -> str | None:
    """The maker's name of `device`, such as "NVIDIA H200"; None for the CPU; its type where torch has no name."""
    if not on_accelerator(device):
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return name(device) if name else device.type


def device_count(device: torch.device) -> int:
    """The number of devices of the type of `device` that this process sees; 1 for the CPU."""
    return torch.accelerator.device_count() if on_accelerator(device) else 1


def best_precision(device: torch.device) -> Precision:
    """The fastest precision that `device` computes in: "fp32" on a CPU, "fp16" where bf16 would be emulated."""
    if not on_accelerator(device):
        return "fp32"
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return "bf16" if supported is None or supported(including_emulation=False) else "fp16"


_GROUPED: ContextVar[bool | None] = ContextVar(
    "the device that is modelled has grouped kernels", default=None
)


@contextmanager
def modelled(grouped: bool | None) -> Iterator[None]:
    """A context in which cost traces on the CPU stand for an accelerator: `grouped` says whether for one that
    `has_grouped_kernels`. With None, traces stand for the CPU itself."""
    before = _GROUPED.set(grouped)
    try:
        yield
    finally:
        _GROUPED.reset(before)


def runs_on_cpu(device: torch.device) -> bool:
    """Whether work on `device` runs CPU kernels; False in a context `modelled`, for an accelerator's
    costs."""
    return not on_accelerator(device) and _GROUPED.get() is None


def has_grouped_kernels(device: torch.device) -> bool:
    """Whether torch has grouped kernels on `device`: fused grouped-query attention, matrix products by expert."""
    if device.type != "cuda" or torch.version.hip:  # not known: what each can do is right everywhere
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def fuses_grouped_queries(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether fused attention on `device` in `dtype` takes fewer key heads than query heads (GQA)."""
    if not on_accelerator(device):
        return (grouped := _GROUPED.get()) is None or (grouped and dtype.itemsize == 2)
    return dtype.itemsize == 2 and has_grouped_kernels(device)


def multiplies_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` has a kernel in `dtype` for grouped matrix products: groups of rows, each times a matrix."""
    grouped = has_grouped_kernels(device) if on_accelerator(device) else _GROUPED.get()
    return dtype == torch.bfloat16 and bool(grouped)


# ---- streams and events ----------------------------------------------------------------------------


_spare_streams: dict[torch.device, list[torch.Stream]] = {}


def work_on(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """A context in which this thread's work is queued on `stream`, of its device; None changes nothing.

    The context is a new `torch.Stream` of the same queue: a stream object keeps the streams to restore, so two
    threads that enter one object restore each other's.
    """
    if stream is None:
        return nullcontext()
    place = {"device_index": stream.device_index, "device_type": stream.device_type}
    return torch.Stream(stream_id=stream.stream_id, **place)


def behind(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """A context that queues this thread's work on `stream`, to begin after all that the current stream has
    queued so far. None changes nothing."""
    if stream is not None:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
    return work_on(stream)


def rejoin(stream: torch.Stream | None) -> None:
    """Let the current stream wait for all work queued on `stream`; None changes nothing."""
    if stream is not None:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)


@contextmanager
def in_turn(stream: torch.Stream | None) -> Iterator[None]:
    """A context that queues this thread's work on `stream`: it begins after the work that the current stream
    has queued, and later work of the current stream waits for it. None changes nothing."""
    with behind(stream):
        yield
    rejoin(stream)


def take_stream(device: torch.device) -> torch.Stream:
    """A stream of `device` that nobody else uses, until `give_back`: a spare one, or a new one. Reuse matters
    because torch has 32 queues, which further streams share."""
    spare = _spare_streams.setdefault(device, [])
    return spare.pop() if spare else torch.Stream(device)


def give_back(streams: Mapping[Any, torch.Stream]) -> None:
    """Return the values of `streams` as spare ones for `take_stream`. Work that a stream still has queued
    runs before the next user's."""
    for stream in streams.values():
        _spare_streams.setdefault(stream.device, []).append(stream)


def copy_stream(device: torch.device, way: Literal["up", "down"]) -> torch.Stream | None:
    """This thread's stream for copies to (`up`) or from (`down`) `device`, beside its compute stream; None on the
    CPU. Each direction has a copy engine."""
    return _copy_stream(device, way, threading.get_ident()) if on_accelerator(device) else None


@cache
def _copy_stream(device: torch.device, *_: object) -> torch.Stream:
    """A stream of `device` for copies, one for each set of the other arguments (direction, thread id)."""
    return torch.Stream(device)


def record_use(device: torch.device, values: Any) -> None:
    """Have torch's allocator not reuse the memory of the tensors in `values` before the work queued so far on
    this thread's current stream is done."""
    if on_accelerator(device):
        stream = torch.accelerator.current_stream(device)
        for t in tree_leaves(values):
            if isinstance(t, torch.Tensor) and on_accelerator(t.device):
                t.record_stream(stream)


def poll(
    done: Callable[[], bool],
    seconds: float,
    given_up: Callable[[], object] = lambda: False,
) -> bool:
    """Poll until `done()` is true; False after `seconds`, or when `given_up()` is true, asked twice a second.

    `done` is called about once a millisecond, in place of a blocking call of the driver: a device that hangs can be
    given up, an interrupt gets through, and no core spins.
    """
    begun = asked = time.monotonic()
    while not done():
        now = time.monotonic()
        if now - begun > seconds:
            return False
        if now - asked > CHECK_EVERY:
            asked = now
            if given_up():
                return False
        if now - begun > SPIN:
            time.sleep(min(LONGEST_SLEEP, (now - begun) / 8))
    return True


def synchronize(
    stream: torch.Stream, seconds: float, what: str, watch: Callable[[], object] = lambda: None
) -> None:
    """Wait until `stream` has done all its queued work. After `seconds` raises LaneTimeout, which names `what`; an
    error of `watch`, called twice a second, is raised."""
    if not poll(stream.query, seconds, lambda: watch() and False):
        raise LaneTimeout(f"{what}: the device has not finished after {seconds:g} s")


# ---- the same bits again ---------------------------------------------------------------------------

_scopes_lock = threading.Lock()
_scopes: list[tuple[bool, bool, bool]] = []  # torch's settings before the first open scope, once for each


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """A context in which, if `wanted`, torch uses deterministic kernels and refuses operations without one.

    torch's setting is of the process: all threads have it while any context is open. The end of the last context
    restores the setting from before the first. New memory is not filled, as torch otherwise does in this mode.
    """
    if not wanted:
        yield
        return
    fill: Any = torch.utils.deterministic
    with _scopes_lock:
        now = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            fill.fill_uninitialized_memory,
        )
        _scopes.append(_scopes[0] if _scopes else now)
        fill.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        with _scopes_lock:
            enabled, warn_only, filled = _scopes.pop()
            if not _scopes:
                torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
                fill.fill_uninitialized_memory = filled


def prepare_deterministic(device: torch.device) -> None:
    """Prepare a device for `deterministic_kernels`. Raises ValueError after the process's first matrix product."""
    if prepare := _vendor(device).prepare_deterministic:
        prepare(device)


# ---- memory ----------------------------------------------------------------------------------------


def available_bytes(device: torch.device) -> int:
    """Memory of an accelerator this process may still allocate, in bytes, torch's unused cached blocks included."""
    info = getattr(torch.accelerator, "get_memory_info", None) or torch.get_device_module(device).mem_get_info
    free, _ = info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes that tensors have on `device` now; 0 for the CPU, where torch does not count them."""
    return torch.accelerator.memory_allocated(device) if on_accelerator(device) else 0


def peak_bytes(device: torch.device) -> int:
    """The peak of the bytes that tensors had on `device` since `reset_peak`; 0 for the CPU."""
    return torch.accelerator.max_memory_allocated(device) if on_accelerator(device) else 0


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of `peak_bytes`, the peak of memory in tensors on `device`."""
    if on_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)


def pinning_of(device: torch.device) -> "Pin | None":
    """The function (device, address, bytes) that page-locks host memory in place, for asynchronous copies of
    `device`, and returns a function to unlock it; it raises RuntimeError if the driver refuses.

    None for a device type without such a call: then torch's pinned allocator is left, which rounds sizes up
    to powers of two.
    """
    return _vendor(device).pin


def unplanned_bytes(device: torch.device) -> int:
    """Bytes of device memory to leave free for libraries' workspaces, which no plan counts; 0 for the CPU."""
    return _vendor(device).unplanned if on_accelerator(device) else 0


def room_for_tensors(device: torch.device) -> int:
    """Bytes of an accelerator's memory that tensors may take: `available_bytes` less `unplanned_bytes`."""
    return available_bytes(device) - unplanned_bytes(device)


# ---- what torch has no neutral call for ------------------------------------------------------------


Compile = Callable[[str, str, Sequence[str]], Callable[..., None]]
"""Compiles CUDA source: text, name of a function in it, options; to be called with grid, block and args."""
Pin = Callable[[torch.device, int, int], Callable[[], object]]


@frozen
class Vendor:
    """Functions that torch offers for one type of device alone; None where a type has no such function."""

    pin: Pin | None = None  # see `pinning_of`
    delay: Callable[[torch.device, float], None] | None = None  # see `delay_stream`
    prepare_deterministic: Callable[[torch.device], None] | None = None
    unplanned: int = LIBRARIES
    peers: Callable[[torch.device, torch.device], bool] | None = None  # see `are_peers`
    compile_kernel: Callable[[torch.device], Compile | None] | None = None  # see `compiler_of`


def _vendor(device: torch.device) -> Vendor:
    return VENDORS.get(device.type, Vendor())


def are_peers(devices: Sequence[torch.device]) -> bool:
    """Whether each of several `devices` copies straight from the memory of every other, not through the host."""
    peers = _vendor(devices[0]).peers
    return len(devices) > 1 and peers is not None and all(peers(*pair) for pair in permutations(devices, 2))


def compiler_of(device: torch.device) -> Compile | None:
    """A function that compiles CUDA source to kernels for `device`; None where torch has none."""
    compile_kernel = _vendor(device).compile_kernel
    return None if compile_kernel is None else compile_kernel(device)


def delay_stream(device: torch.device, seconds: float) -> None:
    """Keep the device's current stream busy for `seconds`; a no-op for device types without such a call."""
    if delay := _vendor(device).delay:
        delay(device, seconds)


def _compiler_cuda(device: torch.device) -> Compile | None:
    def compiled(source: str, name: str, options: Sequence[str]) -> Callable[..., None]:
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        of_torch: Any = torch.cuda._utils
        code = nvrtc.machine_code(of_torch._get_nvrtc_library(), source, architecture, options)
        with torch.cuda.device(device):
            return of_torch._cuda_load_module(code, [name])[name]

    return None if torch.version.hip else compiled


def _pin_cuda(device: torch.device, address: int, nbytes: int) -> Callable[[], object]:
    portable = 1  # for every device, whichever is current
    with torch.cuda.device(device):  # or the driver makes a context, of half a GB, on device 0
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, nbytes, portable))
        if code:
            _forget_cuda_error()
            who = "HIP" if torch.version.hip else "CUDA"
            raise RuntimeError(
                f"got {who} error {code} when pinning {nbytes:,} bytes, expected room for them: lower bucket_size, "
                "or raise the limit of locked memory (ulimit -l)"
            )
    return lambda: runtime.cudaHostUnregister(address)


def _forget_cuda_error() -> None:
    """Clear CUDA's last error, which the next kernel launch would report again."""
    with suppress(OSError, AttributeError):
        # The one that torch has loaded.
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        runtime.cudaGetLastError()


def _delay_cuda(device: torch.device, seconds: float) -> None:
    kilohertz: int = getattr(torch.cuda.get_device_properties(device), "clock_rate", 1_500_000)
    torch.cuda._sleep(int(seconds * kilohertz * 1e3))


def _fix_cublas_workspace(device: torch.device) -> None:
    """Fix the size of cuBLAS's workspaces, and so its order of sums, before torch's first product reads it."""
    os.environ.setdefault(CUBLAS, ":4096:8")
    one = torch.ones(1, 1, device=device)
    try:
        with deterministic_kernels(True):
            torch.mm(one, one)
    except RuntimeError as error:
        got = f"{CUBLAS}={os.environ[CUBLAS]!r}, or a matrix product of this process before it was set"
        do = "export it before the program starts"
        refuse("deterministic", got, "':4096:8' or ':16:8' before any", do, cause=error)


VENDORS: dict[str, Vendor] = {
    "cuda": Vendor(
        pin=_pin_cuda,
        delay=_delay_cuda,
        prepare_deterministic=_fix_cublas_workspace,
        peers=torch.cuda.can_device_access_peer,
        compile_kernel=_compiler_cuda,
    )
}
