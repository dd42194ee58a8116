"""How many threads a sweep gets, where they run, and that compute beside it is left alone."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_machines import tree, two_sockets
from small_models import MODELS

import zfunc
import zfunc.runtime.thread_budget as threads
from zfunc.optim import host_adam as sweeps
from zfunc.optim.host_adam import square_sum
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime import team_binding as teams
from zfunc.runtime.numa_placement import NumaSlot
from zfunc.runtime.thread_budget import choose_threads

ROOT = Path(__file__).parents[2]
CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs, this process may use one")


# --- how many --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "quota", "expected"), [("1", "max", 4), ("2", "max", 2), ("16", "max", 1), ("1", "250000", 2)]
)
def test_physical_cores_up_to_the_quota_over_the_local_ranks(
    tmp_path: Path, ranks: str, quota: str, expected: int
) -> None:
    tree(two_sockets(tmp_path), {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    decision = choose_threads({"LOCAL_WORLD_SIZE": ranks}, frozenset(range(8)), tmp_path)
    assert (decision.threads, decision.cores, decision.ranks) == (expected, 4, int(ranks))


@pytest.mark.parametrize(("ranks", "expected"), [(1, 3), (2, 1), (4, 1)])
def test_with_an_accelerator_one_core_is_left_for_launching(
    tmp_path: Path, ranks: int, expected: int
) -> None:
    environment, cpus = {"LOCAL_WORLD_SIZE": str(ranks)}, frozenset(range(8))
    budget = choose_threads(environment, cpus, two_sockets(tmp_path), on_accelerator=True)
    assert budget.threads == expected
    assert ("one core left for launching" in str(budget)) == (ranks < 4)  # of four ranks each has but one


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, ""),
        ({"OMP_NUM_THREADS": "4"}, ""),  # what it would be anyway
        ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS=1 is overruled"),
        (
            {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"},
            "OMP_NUM_THREADS=1, set by torchrun, is overruled",
        ),
        (
            {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"},
            "OMP_NUM_THREADS=1, set by torchrun, is overruled",
        ),
        ({"OMP_NUM_THREADS": "8,2"}, "OMP_NUM_THREADS=8,2 is overruled"),
    ],
)
def test_omp_num_threads_is_overruled_with_a_message(
    tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    decision = choose_threads(environment, frozenset(range(8)), two_sockets(tmp_path))
    assert decision.threads == 4
    assert str(decision).partition("; ")[2] == message


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
        os.sched_setaffinity(0, {CPUS[0]})  # as a NUMA slot does
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
        "from zfunc.optim.host_adam import square_sum\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "for _ in range(3): square_sum(torch.ones(1 << 20))\n"
        "print('team', 1 + len(os.listdir('/proc/self/task')) - before, 'compute', torch.get_num_threads())\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "LOCAL_"))}
    environment |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    expected = choose_threads({}, frozenset(CPUS)).threads
    assert done.stdout.split() == ["team", str(expected), "compute", "1"], done.stderr
    (line,) = (x for x in done.stderr.splitlines() if "host Adam" in x)
    assert line.startswith(f"host Adam uses {expected} threads: ")
    assert expected == 1 or line.endswith("OMP_NUM_THREADS=1, set by torchrun, is overruled")


# --- where -----------------------------------------------------------------------------------------------


def affinities() -> dict[int, str]:
    """Of every thread of this process: the CPUs it may run on."""
    affinity = {}
    for task in Path("/proc/self/task").iterdir():
        text = topology.read_text(task / "status")
        if text is None:  # it has ended meanwhile
            continue
        affinity[int(task.name)] = re.search(r"Cpus_allowed_list:\s*(\S+)", text).group(1)  # type: ignore[union-attr]
    return affinity


def in_a_thread(run: Any) -> None:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@two_cpus
def test_a_team_takes_its_slots_and_the_kernel_runs_on_them() -> None:
    """Two CPUs stand for two nodes; the sweeps that follow use the bound team, and no others are bound."""
    first, second = CPUS[:2]
    slots = [NumaSlot(0, frozenset({first})), NumaSlot(1, frozenset({second}))]
    before = affinities()

    def lane() -> None:
        assert teams.bind_team(slots)
        own = {t: cpus for t, cpus in affinities().items() if t not in before}
        assert own.pop(threading.get_native_id()) == str(first)
        assert list(own.values()) == [str(second)]
        expected = square_sum(torch.ones(1 << 20), threads=1)
        assert torch.equal(square_sum(torch.ones(1 << 20), threads=2), expected)
        assert {t for t in affinities() if t not in before} == {*own, threading.get_native_id()}

    in_a_thread(lane)
    assert all(before.get(t, cpus) == cpus for t, cpus in affinities().items())


@two_cpus
def test_only_the_lane_of_sweeps_takes_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute's thread, which is the caller's, keeps its CPUs; a step still has the bits of one without slots."""
    segments, data = MODELS["odd sizes"]()
    settings: Any = {"device": "cpu", "precision": "fp32", "clip_norm": 1.0}

    def trained(schedule: str) -> torch.Tensor:
        program = zfunc.compile(segments, schedule=schedule, **settings)
        state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
        return torch.cat([p.flatten() for p in zfunc.params(program, state).values()])

    plain = trained("Overlapped")
    bound: list[str] = []
    slots = tuple(NumaSlot(n, frozenset({cpu})) for n, cpu in enumerate(CPUS[:2]))
    monkeypatch.setattr(teams, "default_numa_slots", lambda: slots)
    monkeypatch.setattr(teams, "bind_team", lambda _: bound.append(threading.current_thread().name))
    assert torch.equal(trained("Overlapped"), plain)
    assert bound == ["zfunc host"]
    assert torch.equal(trained("Serial"), plain)
    assert bound == ["zfunc host"]  # one lane is the caller's: nobody sits
    assert sorted(os.sched_getaffinity(0)) == CPUS


def test_on_one_node_nothing_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "default_numa_slots", lambda: ())
    monkeypatch.setattr(teams, "bind_team", lambda _: pytest.fail("bound"))
    in_a_thread(teams.bind_default_team)


def test_an_openmp_runtime_without_the_call_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(teams.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert not teams.bind_team([NumaSlot(0, frozenset(CPUS))])
    assert "not bound to its NUMA nodes" in caplog.text


def test_slots_are_chosen_once_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zfunc")
    root = two_sockets(tmp_path)
    monkeypatch.setattr(threads, "numa_nodes", lambda: topology.numa_nodes(root))
    monkeypatch.setattr(threads, "physical_cores", lambda cpus: topology.physical_cores(cpus, root))
    monkeypatch.setattr(threads, "allowed_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(threads, "default_threads", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [seat.node for seat in threads.default_numa_slots.__wrapped__()] == [1, 1]
    assert "host Adam on NUMA nodes: 2 on node 1" in caplog.text


# --- beside compute --------------------------------------------------------------------------------------


def test_a_sweep_beside_compute_has_the_full_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule: a lane's copies get one thread, its sweeps all there are, whatever compute does meanwhile."""
    calls: list[tuple[str, int, int]] = []
    kernel = sweeps.cpu_adam

    def spied(*given: Any, **into: Any) -> Any:
        calls.append((threading.current_thread().name, torch.get_num_threads(), given[-2]))
        return kernel.adam_update(*given, **into)

    monkeypatch.setattr(sweeps, "cpu_adam", Spied(kernel, adam_update=spied))
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
    """Half of its rate is a fair share. `python -m benchmarks.beside` shows what a smaller team does to compute."""
    command = [sys.executable, "-m", "benchmarks.beside", "--threads", str(threads.default_threads())]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [*command, "--seconds", "0.5"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    shares = json.loads(done.stdout)
    assert shares["compute_keeps"] > 1 / 8, shares
    assert shares["sweeps_keep"] > 1 / 8, shares


@two_cpus
@pytest.mark.slow
def test_a_core_that_is_busy_at_most_doubles_a_step(tmp_path: Path) -> None:
    """What a fair share costs: half of a core is left for the thread that all barriers wait for."""
    command = [sys.executable, "-m", "benchmarks.neighbour", "--warmup", "1", "--turns", "5"]
    size = ["--batch-size", "1", "--seq-length", "128", "--json", str(tmp_path)]
    subprocess.run([*command, *size], check=True, cwd=ROOT, capture_output=True)
    (result,) = tmp_path.iterdir()
    assert json.loads(result.read_text())["results"]["busy_of_quiet"]["zfunc"] < 2
