"""`zfunc doctor` on this machine, on sick ones, and on machines that tell nothing."""

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_machines import tree, two_sockets

from zfunc.cli import doctor_gpu as devices
from zfunc.cli import doctor_host as machine
from zfunc.cli.commands.doctor import report_lines, show_checks
from zfunc.cli.doctor_host import UNKNOWN, Check, bandwidth_checks
from zfunc.cli.main import main
from zfunc.planner import bandwidth
from zfunc.planner.bandwidth import Bandwidth
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime import drive_speed
from zfunc.runtime.numa_placement import NumaSlot
from zfunc.runtime.thread_budget import choose_threads

GOOD = Bandwidth(
    nbytes=1 << 30, gigabytes=50.0, reached=0.9, beyond_caches=True, huge=(1 << 30, 1 << 30), others=0.0
)
TWO = "/a/libgomp.so.1", "/b/libiomp5.so"


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def problems(checks: Iterable[Check]) -> list[str]:
    return [check.name for check in checks if check.problem]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_speed, "MEASURED", 2 << 20)
    monkeypatch.setattr(drive_speed, "CHUNK", 1 << 20)


# --- on this machine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Bandwidth:
    patch = pytest.MonkeyPatch()
    patch.setattr(bandwidth, "largest_cache", lambda: 16 << 20)
    with patch.context():
        made = bandwidth.measure_bandwidth(0.2)
    patch.undo()
    return made


def test_bandwidth_is_measured_on_memory_as_a_training_has_it(measured: Bandwidth) -> None:
    assert measured.nbytes == bandwidth.MIN_BYTES // bandwidth.BYTES * bandwidth.BYTES
    assert measured.gigabytes > 0.1
    assert 0.05 < measured.reached < 5
    assert measured.beyond_caches
    assert measured.others is None or 0 <= measured.others < 1024
    if topology.huge_page_mode() in ("always", "madvise") and measured.huge:
        assert measured.huge[0] <= measured.huge[1]


def test_the_command_tells_everything_and_its_exit_code_is_its_verdict(
    measured: Bandwidth, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zfunc.planner.bandwidth.measure_bandwidth", lambda: measured)
    code = main(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    wrong = [check for check in result["checks"] if check["problem"]]
    assert (code, result["problems"]) == (1 if wrong else 0, len(wrong))
    assert all(check["advice"] for check in wrong)
    sections = (
        "versions",
        "processor",
        "threads",
        "memory",
        "host bandwidth",
        "drives",
        "pinned memory",
        "CUDA",
    )
    assert tuple(dict.fromkeys(check["section"] for check in result["checks"])) == sections

    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out  # not a terminal
    assert [line for line in out.splitlines() if line in sections] == list(sections)
    for name in ("instruction set", "OMP_NUM_THREADS", "OpenMP", "huge pages", "rounding", "Adam kernel"):
        assert f" {name} " in out
    assert ("nothing is wrong" in out) == (code == 0)


def test_nothing_to_measure_with_is_unknown_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bandwidth, "available_host_bytes", lambda: 1 << 20)
    main(["doctor"])
    assert "unknown: got 1,048,576 bytes available" in capsys.readouterr().out


# --- sick machines ---------------------------------------------------------------------------------------


def test_drives_on_which_state_should_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, none = (tmp_path / name for name in ("a", "b", "none"))
    a.mkdir()
    b.mkdir()
    monkeypatch.chdir(a)
    monkeypatch.setattr(machine, "measure", lambda folder: drive_speed.DriveSpeeds(5.12e9, 2e9))
    monkeypatch.setattr(machine, "file_system_of", lambda folder: "ext4")
    (here,) = machine.drives(())
    assert here.value.startswith("reads 5.1 GB/s, writes 2.0 GB/s, past the page cache; ext4, ")
    assert here.value.endswith(" GiB free")
    checks = by_name(machine.drives((a, b, none)))
    assert checks.keys() == {str(a), str(b), str(none)}  # this folder is one of them
    assert problems(checks.values()) == [str(b), str(none)]
    assert checks[str(b)].problem == f"{a} is on the same drive: both are as fast as one"
    assert checks[str(none)].advice == "name a folder that exists"
    monkeypatch.setattr(machine, "is_direct", lambda folder: False)
    assert by_name(machine.drives((a,)))[str(a)].problem == (
        "ext4 refuses O_DIRECT: the page cache takes memory and time"
    )
    assert next(machine.drives(())).problem is None
    monkeypatch.setattr(machine, "file_system_of", lambda folder: "tmpfs")
    assert "it is memory" in (by_name(machine.drives((a,)))[str(a)].problem or "")


def test_two_openmp_runtimes_are_a_problem() -> None:
    check = machine.openmp(TWO)
    assert check.value == "/a/libgomp.so.1, /b/libiomp5.so"
    assert "2 OpenMP libraries" in (check.problem or "")
    assert machine.openmp(TWO[:1]).problem is None


@pytest.mark.parametrize(
    ("mode", "got", "wrong"),
    [
        ("madvise", (99, 100), False),
        ("always", None, False),
        ("never", (0, 100), True),
        ("madvise", (10, 100), True),  # fragmented
        (None, None, False),
    ],
)
def test_huge_pages_that_do_not_come_are_a_problem(mode: Any, got: Any, wrong: bool) -> None:
    checks = by_name(machine.memory_checks(mode, got))
    assert (checks["huge pages"].problem is not None) == wrong
    assert checks["huge pages"].value.startswith(mode or UNKNOWN)


def test_pinning_that_is_refused_is_a_problem_and_names_the_limit() -> None:
    def refused() -> None:
        raise RuntimeError("got CUDA error 2 when pinning 100 bytes, expected room for them: and so on")

    checks = by_name(devices.pinned(64 << 10, gpu=True, pin=refused))
    assert checks["pinning"].problem == "got CUDA error 2 when pinning 100 bytes"
    assert "now 64.0 KiB: ulimit -l unlimited" in (checks["pinning"].advice or "")
    assert checks["limit"].value == "64.0 KiB (ulimit -l)"
    assert not problems(devices.pinned(64 << 10, gpu=True, pin=lambda: None))
    assert not problems(devices.pinned(None, gpu=False))


def test_rounding_is_exact_here_and_to_a_power_of_two_in_torch() -> None:
    value = by_name(devices.pinned(None, gpu=False))["rounding"].value
    assert value == "95.4 MiB takes 95.4 MiB, exactly; torch's allocator would take 128.0 MiB"


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        ({}, []),
        ({"OMP_NUM_THREADS": "1"}, []),  # overruled
        ({"OMP_PROC_BIND": "true"}, ["OMP_PROC_BIND"]),
        ({"OMP_PROC_BIND": "FALSE"}, []),
        ({"OMP_WAIT_POLICY": "ACTIVE", "OMP_THREAD_LIMIT": "1"}, ["OMP_THREAD_LIMIT", "OMP_WAIT_POLICY"]),
        ({"OMP_WAIT_POLICY": "passive", "OMP_THREAD_LIMIT": "64"}, []),
    ],
)
def test_what_the_environment_does_to_threads(
    tmp_path: Path, environment: dict[str, str], wrong: list[str]
) -> None:
    decision = choose_threads(environment, frozenset(range(8)), two_sockets(tmp_path))
    checks = list(machine.threads(decision, environment))
    assert problems(checks) == wrong
    assert by_name(checks)["of a sweep"].value.startswith("4 threads: 4 physical cores of 8 CPUs")
    assert by_name(checks)["OMP_NUM_THREADS"].value == environment.get("OMP_NUM_THREADS", "not set")


@pytest.mark.parametrize(
    ("others", "environment", "wrong"),
    [
        (0.2, {}, False),
        (0.9, {}, False),  # eight CPUs are four cores here: there is room for some others
        (4.5, {}, True),
        (4.5, {"GOMP_SPINCOUNT": "1000"}, False),
        (4.5, {"OMP_WAIT_POLICY": "PASSIVE"}, False),
        (None, {}, False),
    ],
)
def test_other_work_on_the_same_cores_is_a_problem_unless_waiting_is_sleeping(
    tmp_path: Path, others: float | None, environment: dict[str, str], wrong: bool
) -> None:
    decision = choose_threads(environment, frozenset(range(8)), two_sockets(tmp_path))
    check = machine.neighbours(others, decision, environment)
    assert (check.problem is not None) == wrong
    assert check.value == (UNKNOWN if others is None else f"{others} of 8 CPUs")


def test_nodes_and_who_runs_on_them(tmp_path: Path) -> None:
    nodes = topology.numa_nodes(two_sockets(tmp_path))
    seats = [NumaSlot(0, frozenset({0})), NumaSlot(1, frozenset({2})), NumaSlot(1, frozenset({2}))]
    values = [check.value for check in machine.numa(nodes, seats)]
    assert values == [
        "4 CPUs, 300.0 KiB free, 1,000.0 KiB in all, 1 threads of a sweep",
        "4 CPUs, 700.0 KiB free, 1,000.0 KiB in all, 2 threads of a sweep",
    ]
    assert [check.value for check in machine.numa((), ())] == [UNKNOWN]


def test_a_kernel_far_below_the_memory_is_a_problem() -> None:
    slow = Bandwidth(nbytes=1 << 30, gigabytes=50.0, reached=0.3, beyond_caches=False, huge=None, others=None)
    assert problems(bandwidth_checks(slow)) == ["Adam kernel"]
    assert "which the caches hold" in by_name(bandwidth_checks(slow))["memory"].value
    assert not problems(bandwidth_checks(GOOD))


# --- CUDA, by a stand-in ---------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    pci = {"current_link_speed": "2.5 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe", "numa_node": "1"}
    pci |= {"current_link_width": "16", "max_link_width": "16"}
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: 12"
    )
    files = {f"sys/bus/pci/devices/0000:1b:00.0/{name}": value for name, value in pci.items()}
    return tree(tmp_path, {"proc/driver/nvidia/version": version, **files})


def fake_cuda(monkeypatch: pytest.MonkeyPatch, bf16: bool, **properties: Any) -> None:
    device = SimpleNamespace(name="Fake 100", major=9, minor=0, **properties)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda _: device,
        "mem_get_info": lambda _: (60 << 30, 80 << 30),
        "is_bf16_supported": lambda including_emulation: bf16 and not including_emulation,
        "device": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_a_device_in_one_line(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, True, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    checks = by_name(devices.gpu_checks(driver))
    assert checks["driver"].value.startswith("550.54.15; torch is built for CUDA ")
    assert checks["device 0"].value == (
        "Fake 100; compute capability 9.0; 60.0 GiB free of 80.0 GiB; computes in bf16; "
        "PCIe 0000:1b:00.0, 2.5 GT/s x16 now of 32.0 GT/s x16, NUMA node 1"
    )


def test_a_device_of_which_little_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, False)
    checks = by_name(devices.gpu_checks(tmp_path))
    assert checks["driver"].value.startswith("unknown; ")
    assert checks["device 0"].value.endswith("no bf16: trains in fp16 or fp32; link unknown")
    assert not problems(checks.values())


def test_a_device_that_does_not_answer_is_a_problem(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, True)

    def fallen(_: Any) -> Any:
        raise RuntimeError("CUDA error: the launch timed out\nand more")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fallen)
    assert by_name(devices.gpu_checks(driver))["device 0"].problem == "CUDA error: the launch timed out"


@pytest.mark.parametrize(
    ("built", "visible", "problem"),
    [
        (None, None, "without CUDA"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES=''"),
        ("12.8", None, "sees no GPU under driver 550"),
    ],
)
def test_a_driver_without_devices_is_a_problem(
    driver: Path, monkeypatch: pytest.MonkeyPatch, built: str | None, visible: str | None, problem: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (check,) = devices.gpu_checks(driver)
    assert problem in (check.problem or "")


# --- ROCm, by a stand-in ---------------------------------------------------------------------------------


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch built for ROCm, and AMD's driver."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.version, "cuda", None)
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tree(tmp_path, {"sys/module/amdgpu/version": "6.12.12"})


def test_a_device_of_rocm_is_told_in_the_words_of_rocm(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, True, gcnArchName="gfx942:sramecc+:xnack-")
    checks = by_name(devices.gpu_checks(rocm))
    assert {check.section for check in checks.values()} == {"ROCm"}
    assert checks["driver"].value == "amdgpu 6.12.12; torch is built for ROCm 6.4.43482"
    assert checks["device 0"].value.startswith("Fake 100; architecture gfx942; 60.0 GiB free of 80.0 GiB; ")
    (rocm / "sys/module/amdgpu/version").unlink()
    assert by_name(devices.gpu_checks(rocm))["driver"].value.startswith("amdgpu of this Linux; ")

    def fallen(_: Any) -> Any:
        raise RuntimeError("HIP error: the launch timed out")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fallen)
    assert "rocm-smi" in (by_name(devices.gpu_checks(rocm))["device 0"].advice or "")


@pytest.mark.parametrize("hiding", [None, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_driver_of_rocm_without_devices_is_a_problem(
    rocm: Path, monkeypatch: pytest.MonkeyPatch, hiding: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if hiding:
        monkeypatch.setenv(hiding, "")
    (check,) = devices.gpu_checks(rocm)
    expected = (
        f"{hiding}='' hides"
        if hiding
        else "built for ROCm 6.4.43482, sees no GPU under driver amdgpu 6.12.12"
    )
    assert (check.section, expected in (check.problem or "")) == ("ROCm", True)
    assert hiding or "rocm-smi: is this user in the groups render and video" in (check.advice or "")


def test_a_gpu_of_amd_without_rocm_is_told_and_no_problem(
    rocm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the one that draws the desktop."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    (check,) = devices.gpu_checks(rocm)
    assert check.value == "none: steps run on the CPU; a GPU of AMD needs a torch built for ROCm"
    assert check.problem is None


def test_a_machine_that_tells_nothing_is_unknown_and_has_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [(c.value, c.problem) for c in devices.gpu_checks(tmp_path)] == [
        ("none: steps run on the CPU", None)
    ]
    checks = by_name([*machine.processor(tmp_path), machine.openmp(topology.openmp_runtimes(tmp_path))])
    assert {checks[name].value for name in ("model", "largest cache", "OpenMP")} == {UNKNOWN}
    assert not problems(checks.values())


# --- the words -------------------------------------------------------------------------------------------


def test_a_problem_comes_with_advice() -> None:
    with pytest.raises(ValueError, match="expected both or neither"):
        Check("a", "b", "c", "broken")


def test_what_is_wrong_stands_at_the_end_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Check("threads", "good", "1"), Check("threads", "bad", "2\x1b[2J", "it is 2", "make it 1")
    show_checks(checks, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "threads",
        "  good  1",
        "! bad   2\\x1b[2J",
        "",
        "1 wrong:",
        "- threads, bad: it is 2",
        "  make it 1",
    ]
    assert [style for style, _ in report_lines(checks[:1])][-1] == "bold green"
