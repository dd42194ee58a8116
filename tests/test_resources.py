"""Memory that is there, and buffers of exactly the size asked for, released in the right order."""

import gc

import pytest
import torch

from zfunc import resources
from zfunc.resources import _Pages, available_host_bytes, host_buffer


def test_available_host_memory_is_what_the_kernel_says() -> None:
    assert 0 < available_host_bytes() <= 1 << 50


def test_a_control_group_limits_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    unlimited = available_host_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 50\n")
    assert available_host_bytes() == 650  # the page cache can be dropped
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes() == pytest.approx(unlimited, rel=0.5)


def test_a_buffer_has_exactly_its_size_and_zeros() -> None:
    buffer = host_buffer(1001, torch.bfloat16, pinned=False)
    assert buffer.untyped_storage().nbytes() == 2002
    assert not buffer.any()


def test_pages_are_released_once_nothing_views_them() -> None:
    """What registers pinned memory must be undone before the pages are unmapped, and not while a view lives."""
    released = []
    pages = _Pages(-1, 4096)
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
