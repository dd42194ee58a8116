"""Cores, quotas, nodes and huge pages as the files of a machine tell them, and who runs and touches what."""

import math
from pathlib import Path

import pytest
from fake_machines import PAGE, tree, two_sockets
from hypothesis import given
from hypothesis import strategies as st

from zfunc.runtime import cpu_topology as topology
from zfunc.runtime.cpu_topology import (
    NumaNode,
    cpu_list,
    cpu_quota,
    huge_page_mode,
    numa_nodes,
    physical_cores,
)
from zfunc.runtime.numa_placement import FirstTouch, NumaSlot, first_touches, numa_slots


def test_hyperthreads_are_one_core(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    assert physical_cores(range(8), root) == 4
    assert physical_cores([0, 4], root) == 1
    assert physical_cores([0, 1, 9], root) == 3  # an unknown CPU is a core of its own


@pytest.mark.parametrize(
    ("text", "expected"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1,4-5\n", {0, 1, 4, 5})]
)
def test_a_list_of_cpus(text: str, expected: set[int]) -> None:
    assert cpu_list(text) == expected


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "300000 100000"}, 3.0),
        ("3:cpu,cpuacct:/x", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ("3:cpu:/x", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("5:memory:/x", {}, math.inf),
        ("0::/", {"cpu.max": "what is this"}, math.inf),
    ],
)
def test_cgroup_quota(tmp_path: Path, cgroup: str, files: dict[str, str], expected: float) -> None:
    tree(tmp_path, {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}})
    assert cpu_quota(tmp_path) == expected


def test_nodes_with_their_memory(tmp_path: Path) -> None:
    first, second = numa_nodes(two_sockets(tmp_path))
    assert first == NumaNode(0, frozenset({0, 1, 4, 5}), 1000 << 10, 300 << 10)
    assert (second.index, second.free_bytes) == (1, 700 << 10)


def test_nodes_in_order_of_their_numbers(tmp_path: Path) -> None:
    tree(tmp_path, {f"sys/devices/system/node/node{n}/cpulist": str(n) for n in (10, 9, 2)})
    assert [node.index for node in numa_nodes(tmp_path)] == [2, 9, 10]


def test_missing_files_mean_unknown(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == ()
    assert cpu_quota(tmp_path) == math.inf
    assert physical_cores([0, 1], tmp_path) == 2
    assert (
        huge_page_mode(tmp_path) is topology.openmp_runtimes(tmp_path) is topology.cpu_model(tmp_path) is None
    )
    assert topology.largest_cache(tmp_path) is None
    assert topology.mapping_of(0, tmp_path) == {}


@pytest.mark.parametrize("mode", ["always", "madvise", "never"])
def test_the_mode_of_huge_pages(tmp_path: Path, mode: str) -> None:
    text = "always madvise never".replace(mode, f"[{mode}]")
    assert huge_page_mode(tree(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})) == mode


def test_openmp_libraries_by_what_is_mapped(tmp_path: Path) -> None:
    maps = "\n".join(
        f"0-1 r-xp 0 0:0 7   {path}" for path in ("/a b/libgomp-a34b.so.1", "/x/libm.so", "/c/libiomp5.so")
    )
    tree(tmp_path, {"proc/self/maps": f"{maps}\n2-3 rw-p 0 0:0 0\n{maps}"})
    assert topology.openmp_runtimes(tmp_path) == ("/a b/libgomp-a34b.so.1", "/c/libiomp5.so")


def test_the_fields_of_a_mapping(tmp_path: Path) -> None:
    first, second = "1000-2000 rw-p 0 0:0 0", "2000-3000 rw-p 0 0:0 0"
    text = f"{first}\nAnonHugePages:   4 kB\n{second}\nAnonHugePages:   8 kB\nVmFlags: rd hg"
    root = tree(tmp_path, {"proc/self/smaps": text})
    assert topology.mapping_of(0x2000, root) == {"AnonHugePages": "8 kB", "VmFlags": "rd hg"}
    assert topology.mapping_of(0x1FFF, root)["AnonHugePages"] == "4 kB"


def test_how_long_cpus_have_worked(tmp_path: Path) -> None:
    text = (
        "cpu  9 9 9 9\ncpu0 1 2 4 1000 1000 8 16 32 0 0\ncpu1 1 0 0 7 7 0 0 0 0 0\ncpu10 5 0 0 0 0 0 0 0 0 0"
    )
    root = tree(tmp_path, {"proc/stat": text})
    assert topology.busy_ticks([0], root) == 1 + 2 + 4 + 8 + 16 + 32
    assert topology.busy_ticks([0, 1], root) == 64
    assert topology.busy_ticks([7], root) is None


# --- who runs where --------------------------------------------------------------------------------------


def nodes_of_slots(tmp_path: Path, cpus: set[int], **given: int) -> list[int]:
    root = two_sockets(tmp_path)
    cores = {n: physical_cores(node.cpus & cpus, root) for n, node in enumerate(numa_nodes(root))}
    result = numa_slots(numa_nodes(root), frozenset(cpus), cores=lambda c: physical_cores(c, root), **given)
    assert all(slot.cpus <= cpus and slot.cpus == numa_nodes(root)[slot.node].cpus & cpus for slot in result)
    assert all(cores[slot.node] for slot in result)
    return [slot.node for slot in result]


@pytest.mark.parametrize(
    ("cpus", "given", "expected"),
    [
        (set(range(8)), {"threads": 4}, [0, 0, 1, 1]),
        (set(range(8)), {"threads": 2, "rank": 0, "ranks": 2}, [0, 0]),
        (set(range(8)), {"threads": 2, "rank": 1, "ranks": 2}, [1, 1]),
        (set(range(8)), {"threads": 1, "rank": 2, "ranks": 4}, [1]),
        (set(range(8)), {"threads": 1, "rank": 9, "ranks": 4}, [0]),  # a rank that cannot be: still a seat
        (set(range(8)), {"threads": 2}, [0, 1]),  # a quota: fewer threads than cores, spread
        ({0, 1, 2}, {"threads": 3}, [0, 0, 1]),
        ({0, 1, 4, 5}, {"threads": 2}, []),  # one node is left: nothing to bind
    ],
)
def test_threads_are_spread_over_the_nodes_of_their_rank(
    tmp_path: Path, cpus: set[int], given: dict[str, int], expected: list[int]
) -> None:
    assert nodes_of_slots(tmp_path, cpus, **given) == expected


def test_a_node_without_cpus_gets_no_slot() -> None:
    far = NumaNode(2, frozenset(), 1 << 30)
    assert numa_slots([NumaNode(0, frozenset({0})), far], frozenset({0, 1}), threads=1) == ()
    two = NumaNode(0, frozenset({0})), far, NumaNode(3, frozenset({1}))
    assert numa_slots(two, frozenset({0, 1}), threads=2) == (
        NumaSlot(0, frozenset({0})),
        NumaSlot(3, frozenset({1})),
    )


# --- who touches what ------------------------------------------------------------------------------------


@given(
    st.integers(1, 50_000),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 9),
    st.lists(st.integers(0, 50_000), max_size=6),
)
def test_touches_cover_every_page_once(numel: int, itemsize: int, threads: int, edges: list[int]) -> None:
    marks = sorted({edge for edge in edges if edge < numel})
    sweeps = list(zip(marks[::2], marks[1::2], strict=False))
    result = first_touches(numel, itemsize, threads=threads, page=PAGE, sweeps=sweeps)
    assert [t.start for t in result] == [0, *(t.stop for t in result[:-1])]
    assert result[-1].stop == numel * itemsize
    assert all(t.start % PAGE == 0 and t.start < t.stop and 0 <= t.rank < threads for t in result)


def test_the_thread_that_sweeps_over_a_page_touches_it() -> None:
    """The kernel's partition: rank r of T has the units [u * r / T, u * (r + 1) / T), of 128 elements."""
    numel, threads = 1_000_003, 3
    units = -(-numel // 128)
    for start, stop, rank in (
        (t.start, t.stop, t.rank) for t in first_touches(numel, 4, threads=threads, page=PAGE)
    ):
        assert abs(start - units * rank // threads * 128 * 4) < PAGE
        assert abs(stop - min(numel, units * (rank + 1) // threads * 128) * 4) < PAGE


def test_every_sweep_is_divided_anew() -> None:
    page = PAGE // 4  # elements
    result = first_touches(6 * page, 4, threads=2, page=PAGE, sweeps=[(0, 4 * page), (4 * page, 6 * page)])
    assert result == (
        FirstTouch(0, 2 * PAGE, 0),
        FirstTouch(2 * PAGE, 4 * PAGE, 1),
        FirstTouch(4 * PAGE, 5 * PAGE, 0),
        FirstTouch(5 * PAGE, 6 * PAGE, 1),
    )
