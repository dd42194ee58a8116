"""How many threads a sweep gets, where they run, and that compute beside it is left alone; cores, quotas, nodes and
huge pages as the files of a machine tell them."""

import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_machines import tree, two_sockets
from small_models import MODELS

import zfunc
import zfunc.runtime.thread_budget as threads
from benchmarks import handoffs
from zfunc.core.display import counted
from zfunc.optim import updates as sweeps
from zfunc.optim.updates import square_sum
from zfunc.runtime.thread_budget import (
    choose_threads,
    cpu_list,
    cpu_quota,
    numa_nodes,
    physical_cores,
    share_of_nodes,
)

ROOT = Path(__file__).parents[2]
CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs, this process may use one")


# --- how many --------------------------------------------------------------------------------------------

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}
NO_NUMBER = "OMP_NUM_THREADS={} is no number of threads, and does not count"
BUDGETS: list[tuple[dict[str, str], dict[str, Any], int, str]] = [
    # variables, quota or accelerator; threads of a machine with four cores, and the end of what is said
    ({"LOCAL_WORLD_SIZE": "1"}, {}, 4, "quota none, 1 local rank"),
    ({"LOCAL_WORLD_SIZE": "2"}, {}, 2, "quota none, 2 local ranks"),
    ({"LOCAL_WORLD_SIZE": "16"}, {}, 1, "quota none, 16 local ranks"),
    ({"LOCAL_WORLD_SIZE": "1"}, {"quota": "250000"}, 2, "quota 2.5, 1 local rank"),
    ({"LOCAL_WORLD_SIZE": "1"}, {"on_accelerator": True}, 3, "1 local rank, one core left for launching"),
    ({"LOCAL_WORLD_SIZE": "2"}, {"on_accelerator": True}, 1, "2 local ranks, one core left for launching"),
    ({"LOCAL_WORLD_SIZE": "4"}, {"on_accelerator": True}, 1, "4 local ranks"),  # each has but one
    # OMP_NUM_THREADS is followed if a person may have set it: torchrun sets 1 where it starts several processes.
    ({"OMP_NUM_THREADS": " "}, {}, 4, "1 local rank"),
    ({"OMP_NUM_THREADS": "3"}, {}, 3, "; OMP_NUM_THREADS=3 is followed"),
    ({"OMP_NUM_THREADS": "1", **TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, {}, 1, "; OMP_NUM_THREADS=1 is followed"),
    ({"OMP_NUM_THREADS": "1", **TORCHRUN}, {}, 2, "; OMP_NUM_THREADS=1 is torchrun's, and does not count"),
    ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, {}, 1, "; OMP_NUM_THREADS=1 is followed"),
    ({"OMP_NUM_THREADS": "3", **TORCHRUN}, {}, 3, "; OMP_NUM_THREADS=3 is followed"),
    ({"OMP_NUM_THREADS": "6,2"}, {}, 6, "; OMP_NUM_THREADS=6,2 is followed"),
    ({"OMP_NUM_THREADS": "1000"}, {}, 8, "; OMP_NUM_THREADS=1000 is followed"),
    ({"OMP_NUM_THREADS": "0"}, {}, 4, f"; {NO_NUMBER.format(0)}"),
    ({"OMP_NUM_THREADS": "all"}, {}, 4, f"; {NO_NUMBER.format('all')}"),
]


@pytest.mark.parametrize(("environment", "given", "expected", "said"), BUDGETS)
def test_threads_are_physical_cores_up_to_the_quota_over_the_local_ranks(
    tmp_path: Path, environment: dict[str, str], given: dict[str, Any], expected: int, said: str
) -> None:
    quota, more = given.get("quota", "max"), {k: v for k, v in given.items() if k != "quota"}
    root = tree(
        two_sockets(tmp_path), {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"}
    )
    budget = choose_threads(environment, frozenset(range(8)), root, **more)
    assert budget.threads == expected
    assert str(budget).startswith(f"{counted(expected, 'thread')}: 4 physical cores of 8 CPUs, quota ")
    assert str(budget).endswith(said)


@pytest.mark.parametrize("value", ["two", "0", "-1", "", "1.5"])
def test_a_bad_number_of_ranks_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE: got .*, expected a whole number of at least 1"):
        choose_threads({"LOCAL_WORLD_SIZE": value}, frozenset({0}))


def test_too_many_threads_are_clamped_to_the_cpus_of_the_process_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads.limit_threads.cache_clear()
    most, sums = [], []

    def lane() -> None:
        os.sched_setaffinity(0, {CPUS[0]})  # as a lane is bound
        most.append(threads.limit_threads(10_000))
        sums.append(float(square_sum(torch.ones(4), threads=10_000).sum()))

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    threads.limit_threads.cache_clear()
    assert (most, sums) == ([len(CPUS)], [4.0])
    assert caplog.text.count("10000 threads asked for") == 1


def test_torchrun_gets_one_line_and_the_full_team() -> None:
    """As torchrun starts a rank: torch computes with one thread, the kernel with all there are."""
    code = (
        "import logging, os, threading, torch; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from zfunc.optim.updates import square_sum\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "for _ in range(3): square_sum(torch.ones(1 << 20))\n"
        "print('team', 1 + len(os.listdir('/proc/self/task')) - before, 'compute', torch.get_num_threads())\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "LOCAL_"))}
    environment |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    expected = choose_threads({"LOCAL_WORLD_SIZE": "2"}, frozenset(CPUS)).threads
    assert done.stdout.split() == ["team", str(expected), "compute", "1"], done.stderr
    (line,) = (x for x in done.stderr.splitlines() if "host Adam" in x)
    assert line.startswith(f"host Adam uses {counted(expected, 'thread')}: ")
    assert expected == 1 or line.endswith("OMP_NUM_THREADS=1 is torchrun's, and does not count")


# --- where -----------------------------------------------------------------------------------------------


def affinities() -> dict[int, str]:
    """Of every thread of this process: the CPUs it may run on."""
    affinity = {}
    for task in Path("/proc/self/task").iterdir():
        text = threads.read_text(task / "status")
        if text is None:  # it has ended meanwhile
            continue
        affinity[int(task.name)] = re.search(r"Cpus_allowed_list:\s*(\S+)", text).group(1)  # type: ignore[union-attr]
    return affinity


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs of this machine stand for two nodes."""
    monkeypatch.setattr(threads, "default_nodes", lambda: tuple(frozenset({cpu}) for cpu in CPUS[:2]))


@two_cpus
def test_a_lane_and_its_team_stay_on_their_nodes(two_nodes: None) -> None:
    before = affinities()

    def lane() -> None:
        threads.bind_to_nodes()
        expected = square_sum(torch.ones(1 << 20), threads=1)
        assert torch.equal(square_sum(torch.ones(1 << 20), threads=2), expected)
        own = {t: cpus for t, cpus in affinities().items() if t not in before}
        assert len(own) > 1, "no team"
        assert {*own.values()} <= {f"{CPUS[0]}-{CPUS[1]}", f"{CPUS[0]},{CPUS[1]}"}

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lane).result()
    assert all(before.get(t, cpus) == cpus for t, cpus in affinities().items() if t in before)


@two_cpus
def test_only_the_lane_of_sweeps_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute's thread, which is the caller's, keeps its CPUs; a step still has the bits of one without nodes."""
    segments, data = MODELS["odd sizes"]()
    settings: Any = {"device": "cpu", "precision": "fp32", "clip_norm": 1.0}

    def trained(schedule: str) -> torch.Tensor:
        program = zfunc.compile(segments, schedule=schedule, **settings)
        state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
        return torch.cat([p.flatten() for p in zfunc.params(program, state).values()])

    plain, bound, bind = trained("Overlapped"), list[str](), os.sched_setaffinity
    monkeypatch.setattr(threads, "default_nodes", lambda: tuple(frozenset({cpu}) for cpu in CPUS[:2]))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda *x: (bound.append(threading.current_thread().name), bind(*x))
    )
    for schedule in ("Overlapped", "Serial"):  # whose one lane is the caller's
        assert torch.equal(trained(schedule), plain)
        assert bound == ["zfunc host"]


def test_nodes_are_chosen_once_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zfunc")
    nodes = numa_nodes(two_sockets(tmp_path))
    monkeypatch.setattr(threads, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(threads, "allowed_cpus", lambda: frozenset(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert threads.default_nodes.__wrapped__() == (frozenset({2, 3, 6, 7}),)
    assert "host Adam runs on 1 NUMA nodes: CPUs [[2, 3, 6, 7]]" in caplog.text


# --- beside compute --------------------------------------------------------------------------------------


def test_a_sweep_beside_compute_has_the_full_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule: a lane's copies get one thread, its sweeps all there are, whatever compute does meanwhile."""
    calls: list[tuple[str, int, int]] = []
    kernel = sweeps.cpu_adam

    def spied(*given: Any, **into: Any) -> Any:
        calls.append((threading.current_thread().name, torch.get_num_threads(), given[-2]))
        return kernel.update(*given, **into)

    monkeypatch.setattr(sweeps, "cpu_adam", Spied(kernel, update=spied))
    segments, data = MODELS["odd sizes"]()
    program = zfunc.compile(segments, device="cpu", precision="fp32", schedule="Overlapped")
    zfunc.train_step(program, zfunc.init(program), data(0))
    assert set(calls) == {("zfunc host", 1, threads.default_threads())}


class Spied:
    """A module with some functions exchanged."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update({name: getattr(module, name) for name in dir(module)}, **others)


@two_cpus
def test_neither_compute_nor_sweeps_starve_beside_each_other() -> None:
    """Half of its rate is a fair share; beside a smaller team compute keeps a hundredth (`benchmarks.beside`)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    team = choose_threads(environment, threads.allowed_cpus()).threads
    command = [sys.executable, "-m", "benchmarks.beside", "--threads", str(team), "--seconds", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    shares = json.loads(done.stdout)
    assert min(shares["compute_keeps"], shares["sweeps_keep"]) > 1 / 16, shares


@two_cpus
@pytest.mark.slow
def test_a_core_that_is_busy_at_most_doubles_a_step(tmp_path: Path) -> None:
    """What a fair share costs: half of a core is left for the thread that all barriers wait for."""
    command = [sys.executable, "-m", "benchmarks.neighbour", "--warmup", "1", "--turns", "5"]
    size = ["--batch-size", "1", "--seq-length", "128", "--json", str(tmp_path)]
    subprocess.run([*command, *size], check=True, cwd=ROOT, capture_output=True)
    (result,) = tmp_path.iterdir()
    assert json.loads(result.read_text())["results"]["busy_of_quiet"]["zfunc"] < 2


def test_operations_hand_overs_and_dispatches_are_counted() -> None:
    found = handoffs.measure(
        handoffs.parser().parse_args(["--num-layers", "1", "--ops", "50", "--turns", "1"])
    )
    serial, overlapped, threads = found["plans"].values()
    assert (
        sum(n for n, *_ in found["dispatches"].values()) == serial["operations"] == overlapped["operations"]
    )
    assert serial["hand_overs"] == 0 < threads["hand_overs"] < overlapped["hand_overs"]
    assert handoffs.hand_overs(handoffs.chain(50, 4)) == 49
    n, dispatched, launched = found["dispatches"]["to_device"]
    assert (dispatched, launched) == (2 * n, n)  # a view and a copy
    assert found["dispatches"]["update"][2] == 0, "an update on the host is the kernel's"


# --- what the files of a machine tell ------------------------------------------------------------------------


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


def test_nodes_in_order_of_their_numbers(tmp_path: Path) -> None:
    tree(tmp_path, {f"sys/devices/system/node/node{n}/cpulist": str(n) for n in (10, 9, 2)})
    assert numa_nodes(tmp_path) == ({2}, {9}, {10})


def test_missing_files_mean_unknown(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == ()
    assert cpu_quota(tmp_path) == math.inf
    assert physical_cores([0, 1], tmp_path) == 2
    assert threads.cpu_model(tmp_path) is threads.largest_cache(tmp_path) is None


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
    nodes = *numa_nodes(two_sockets(tmp_path)), frozenset[int]()  # the last has memory alone
    assert [*share_of_nodes(nodes, frozenset(cpus), **given)] == expected
