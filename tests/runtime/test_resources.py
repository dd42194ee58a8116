"""Memory that is there; buffers of exactly the size asked for, in the right pages, released in the right order."""

import ctypes
import errno
import gc
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zfunc.runtime import host_memory as paging
from zfunc.runtime import memory_limits
from zfunc.runtime.host_memory import HUGE_MIN, PAGE, TURN, HostPages, alloc_host, map_pages, touch
from zfunc.runtime.memory_limits import available_host_bytes

CPUS = sorted(os.sched_getaffinity(0))
LARGE = 4 * TURN + 3 * PAGE + 8  # bytes


def flags_of(address: int) -> list[str]:
    """What the kernel says of this process's memory at `address`, in two letters each; [] if it does not tell."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", key):
            first, last = (int(x, 16) for x in key.split("-"))
            inside = first <= address < last
        elif inside and key == "VmFlags:":
            return values
    return []


def resident(pages: HostPages) -> int:
    """How many of its pages have physical memory."""
    flags = (ctypes.c_ubyte * (-(-len(pages) // PAGE)))()
    assert not paging._libc.mincore(ctypes.c_void_p(pages.address), ctypes.c_size_t(len(pages)), flags)
    return sum(flag & 1 for flag in flags)


def test_available_host_memory_is_what_the_kernel_says() -> None:
    assert 0 < available_host_bytes() <= 1 << 50


def test_a_control_group_limits_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_CGROUP", tmp_path)
    unlimited = available_host_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 50\n")
    assert available_host_bytes() == 650  # the page cache can be dropped
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes() == pytest.approx(unlimited, rel=0.5)


def test_the_limit_of_the_process_limits_it() -> None:
    """In a process of its own: two ranks of a machine have a limit each."""
    code = (
        "import psutil, resource\n"
        "from zfunc.runtime.memory_limits import available_host_bytes as free\n"
        "limit = psutil.Process().memory_info().vms + (1 << 28)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "print(free())"
    )
    for ranks, most in ((1, 1 << 28), (2, 1 << 29)):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LOCAL_WORLD_SIZE": str(ranks)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert most * 0.8 < int(ran.stdout) <= most


@pytest.mark.parametrize("numel", [0, 1, 1001, (1 << 20) + 3])
def test_a_buffer_has_exactly_its_size_and_zeros(numel: int) -> None:
    buffer = alloc_host(numel, torch.bfloat16)
    assert buffer.shape == (numel,)
    assert buffer.untyped_storage().nbytes() == 2 * numel
    assert not buffer.any()


def test_a_buffer_begins_at_a_page_of_its_own() -> None:
    buffers = [alloc_host(3000 + n, torch.float32) for n in range(4)]
    spans = sorted((b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers)
    assert all(start % PAGE == 0 for start, _ in spans)
    assert all(-(-stop // PAGE) * PAGE <= start for (_, stop), (start, _) in pairwise(spans))


def test_huge_pages_are_asked_for_from_some_size_on() -> None:
    """ "hg" is the kernel's word that MADV_HUGEPAGE was said of a mapping."""
    large, small = (
        alloc_host(HUGE_MIN, torch.uint8),
        alloc_host(PAGE * 3, torch.uint8),
    )
    flags = [flags_of(buffer.data_ptr()) for buffer in (large, small)]
    if not Path("/sys/kernel/mm/transparent_hugepage").exists() or not flags[0]:
        pytest.skip("this kernel has no transparent huge pages, or does not tell")
    assert "hg" in flags[0]
    assert "sh" not in flags[0]  # shared memory gets huge pages by another setting, mostly none
    assert "hg" not in flags[1]


@pytest.mark.parametrize("nbytes", [PAGE, LARGE])
def test_touched_pages_are_resident(nbytes: int) -> None:
    pages = map_pages(nbytes)
    assert resident(pages) < -(-nbytes // PAGE)
    touch(pages, 3)
    assert resident(pages) == -(-nbytes // PAGE)
    assert not any(pages[i] for i in range(0, nbytes, 997))


def test_pages_lie_on_the_nodes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    touched, populate = dict[int, frozenset[int]](), paging._populate

    def spied(address: int, nbytes: int) -> None:
        assert nbytes <= paging.TURN
        assert threading.get_ident() != caller
        touched[address - pages.address] = frozenset(os.sched_getaffinity(0))
        populate(address, nbytes)

    monkeypatch.setattr(paging, "TURN", 2 * PAGE)
    monkeypatch.setattr(paging, "_populate", spied)
    pages, caller = map_pages(7 * PAGE), threading.get_ident()
    nodes = frozenset({CPUS[0]}), frozenset({CPUS[-1]})
    touch(pages, 1, nodes)
    assert touched == {2 * n * PAGE: nodes[n % 2] for n in range(4)}
    assert sorted(os.sched_getaffinity(0)) == CPUS  # the caller stays where it was
    assert resident(pages) == 7


def test_an_old_kernel_gets_its_pages_written_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(*_: Any) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(paging, "_libc", SimpleNamespace(madvise=too_old, mincore=paging._libc.mincore))
    pages = map_pages(LARGE)
    touch(pages, 2)
    assert resident(pages) == -(-LARGE // PAGE)


def test_a_lack_of_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        MemoryError, match=r"got no memory for .* bytes \(Cannot allocate memory\), expected room"
    ):
        map_pages(1 << 60)

    def full(*_: Any) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    pages = map_pages(LARGE)
    monkeypatch.setattr(paging, "_libc", SimpleNamespace(madvise=full))
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        touch(pages, 2)


def test_pages_are_released_once_nothing_views_them() -> None:
    """What registers pinned memory must be undone before the pages are unmapped, and not while a view lives."""
    released = []
    pages = HostPages(-1, 4096)
    pages.release = lambda: released.append(True)
    tensor = torch.frombuffer(pages, dtype=torch.float32, count=1024)
    view = tensor[10:20]
    del pages, tensor
    gc.collect()
    view.fill_(1.0)
    assert not released
    del view
    gc.collect()
    assert released == [True]


class Cudart:
    """A stand-in for CUDA's registration: which bytes it is given, and when they are given back."""

    def __init__(self, code: int) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.cudaHostRegister = lambda *given: self.calls.append(given) or code
        self.cudaHostUnregister = lambda *given: self.calls.append(given)


@pytest.fixture(params=[0, 2])
def cudart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart(request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return fake


@pytest.mark.parametrize(("hip", "runtime"), [(None, "CUDA"), ("7.0", "HIP")])
def test_pinned_buffers_are_registered_at_their_size_and_kept_from_forks(
    cudart: Cudart, hip: str | None, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 1)
    if cudart.cudaHostRegister():
        with pytest.raises(RuntimeError, match=rf"got {runtime} error 2 when pinning 3,000 bytes.*ulimit -l"):
            alloc_host(1500, torch.bfloat16, pinned_for=device)
        return
    cudart.calls.clear()
    buffer = alloc_host(1500, torch.bfloat16, pinned_for=device)
    address = buffer.data_ptr()
    assert "dc" in (
        flags_of(address) or ["dc"]
    )  # not copied by a fork, which would leave the device the child's pages
    del buffer
    gc.collect()
    portable = 1  # pinned for every device
    assert cudart.calls == [(address, 3000, portable), (address,)]
