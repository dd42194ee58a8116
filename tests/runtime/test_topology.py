"""Cores, quotas, nodes and huge pages as the files of a machine tell them, and the nodes of a rank."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from fake_machines import tree, two_sockets

from zfunc.runtime import cpu_topology as topology
from zfunc.runtime.cpu_topology import (
    NumaNode,
    cpu_list,
    cpu_quota,
    huge_page_mode,
    numa_nodes,
    physical_cores,
)
from zfunc.runtime.thread_budget import share_of_nodes


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


@pytest.mark.parametrize(
    ("cpus", "given", "expected"),
    [
        (range(8), {}, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (range(8), {"rank": 1, "ranks": 2}, [{2, 3, 6, 7}]),
        (range(8), {"rank": 2, "ranks": 4}, [{2, 3, 6, 7}]),
        (range(8), {"rank": 9, "ranks": 4}, [{0, 1, 4, 5}]),  # a rank that cannot be
        ([0, 1, 2], {}, [{0, 1}, {2}]),
        ([0, 1, 4, 5], {}, []),  # one node is left: nothing to bind
    ],
)
def test_a_rank_has_its_share_of_the_nodes(
    tmp_path: Path, cpus: Iterable[int], given: dict[str, int], expected: list[set[int]]
) -> None:
    nodes = (
        *numa_nodes(two_sockets(tmp_path)),
        NumaNode(2, frozenset(), 1 << 30),
    )  # the last has memory alone
    assert [*share_of_nodes(nodes, frozenset(cpus), **given)] == expected
