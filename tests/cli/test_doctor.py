"""`zfunc doctor` on this machine, on sick ones, and on machines that tell nothing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_machines import tree, two_sockets

from zfunc.cli import machine
from zfunc.cli.commands.doctor import show_checks
from zfunc.cli.machine import UNKNOWN, Check
from zfunc.cli.main import main
from zfunc.planner import bandwidth
from zfunc.planner.bandwidth import Bandwidth
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime import drive_speed

SECTIONS = ["versions", "processor", "memory", "bandwidth", "drives", "devices"]
NVIDIA = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: 12"
Out = pytest.CaptureFixture[str]


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def problems(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.problem for check in checks if check.problem}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_speed, "MEASURED", 2 << 20)
    monkeypatch.setattr(drive_speed, "CHUNK", 1 << 20)


# --- on this machine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Bandwidth:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "largest_cache", lambda: 16 << 20)
        return bandwidth.measure_bandwidth(0.2)


def test_bandwidth_is_measured_on_memory_as_a_training_has_it(measured: Bandwidth) -> None:
    assert measured.nbytes == bandwidth.MIN_BYTES // bandwidth.BYTES * bandwidth.BYTES
    assert measured.gigabytes > 0.1
    assert 0.05 < measured.reached < 5
    assert measured.beyond_caches
    assert measured.others is None or 0 <= measured.others < 1024
    if topology.huge_page_mode() in ("always", "madvise") and measured.huge:
        assert measured.huge[0] <= measured.huge[1]


def test_the_command_tells_everything_and_its_exit_code_is_its_verdict(
    measured: Bandwidth, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda: measured)
    code = main(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    wrong = [check for check in result["checks"] if check["problem"]]
    assert (code, result["problems"]) == (1 if wrong else 0, len(wrong))
    assert list(dict.fromkeys(check["section"] for check in result["checks"])) == SECTIONS

    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out  # not a terminal
    assert [line for line in out.splitlines() if line in SECTIONS] == SECTIONS
    for name in ("driver", "instruction set", "threads", "OpenMP", "huge pages", "pinned", "Adam kernel"):
        assert f"  {name} " in out


def test_nothing_to_measure_with_is_unknown_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr(bandwidth, "available_host_bytes", lambda: 1 << 20)
    main(["doctor"])
    assert "unknown: got 1,048,576 bytes available" in capsys.readouterr().out


# --- sick machines ---------------------------------------------------------------------------------------


def test_what_a_drive_reaches_and_a_folder_that_cannot_hold_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "measure", lambda folder: drive_speed.DriveSpeeds(5.12e9, 2e9))
    monkeypatch.setattr(machine, "is_direct", lambda folder: folder != Path())
    monkeypatch.setattr(machine, "file_system_of", lambda folder: "ext4")
    (here,) = machine.drives(())
    assert here.value.startswith("reads 5.1 GB/s, writes 2.0 GB/s, through the page cache; ext4, ")
    assert here.value.endswith("iB free")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    checks = by_name(machine.drives((tmp_path, tmp_path / "none")))
    assert checks.keys() == {str(tmp_path), str(tmp_path / "none")}  # this folder is one of them
    assert "name a folder that exists" in problems(checks.values())[str(tmp_path / "none")]


ENVIRONMENTS: dict[str, tuple[dict[str, str], tuple[str, ...] | None, str]] = {
    "nothing": ({}, None, ""),
    "variables": ({"OMP_PROC_BIND": "true", "GOMP_SPINCOUNT": "9", "OTHER": "x"}, ("/a/libgomp.so.1",), ""),
    "two libraries": ({}, ("/a/libgomp.so.1", "/b/libiomp5.so"), "OpenMP: their threads compete"),
    "bad ranks": ({"LOCAL_WORLD_SIZE": "x"}, (), "threads: LOCAL_WORLD_SIZE: got 'x'"),
}


@pytest.mark.parametrize("row", ENVIRONMENTS)
def test_what_the_environment_does_to_threads(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, runtimes, problem = ENVIRONMENTS[row]
    monkeypatch.setattr(topology, "openmp_runtimes", lambda root: runtimes)
    checks = list(machine.processor(environment, tmp_path))
    (told,) = problems(checks).items() or [("", "")]
    assert ": ".join(told).startswith(problem)
    assert bool(problem) == any(told)
    shown = {name: check.value for name, check in by_name(checks).items()}
    assert shown["environment"] == (
        "GOMP_SPINCOUNT=9, OMP_PROC_BIND=true" if row == "variables" else "nothing for OpenMP"
    )
    assert shown["model"] == f"{UNKNOWN}, largest cache {UNKNOWN}"
    assert (shown["OpenMP"] == UNKNOWN) == (runtimes is None)


def test_nodes_and_pages(tmp_path: Path) -> None:
    checks = by_name(machine.memory((1, 4), two_sockets(tmp_path)))
    assert checks["NUMA node 0"].value == "4 CPUs, 300.0 KiB free of 1,000.0 KiB"
    assert checks["NUMA node 1"].value == "4 CPUs, 700.0 KiB free of 1,000.0 KiB"
    assert checks["huge pages"].value.endswith("; 25% of a large buffer is in them")
    assert by_name(machine.memory(None, tmp_path / "none"))["huge pages"].value == UNKNOWN


def test_bandwidth_in_words() -> None:
    slow = Bandwidth(nbytes=1 << 30, gigabytes=50.0, reached=0.3, beyond_caches=False, huge=None, others=None)
    assert [check.value for check in machine.bandwidth(slow)] == [
        "50.0 GB/s, sweeping over 1.0 GiB, which the caches hold",
        "30% of that; CPUs busy with other work: unknown",
    ]


# --- devices, by a stand-in ------------------------------------------------------------------------------


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(machine, "accelerator_type", lambda: None)
    for name in machine.HIDING:
        monkeypatch.delenv(name, raising=False)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, None)
    return monkeypatch


DRIVERS: dict[str, tuple[dict[str, str], str | None, str | None]] = {  # files, torch's ROCm, driver
    "none": ({}, None, None),
    "NVIDIA's": ({"proc/driver/nvidia/version": NVIDIA}, None, "550.54.15"),
    "AMD's": ({"sys/module/amdgpu/version": "6.12.12"}, "6.4", "amdgpu 6.12.12"),
    "AMD's of Linux": ({"sys/module/amdgpu/refcnt": "1"}, "6.4", "amdgpu of this Linux"),
    "AMD's of the desktop": ({"sys/module/amdgpu/version": "6.12.12"}, None, None),
}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("row", DRIVERS)
def test_a_driver_without_devices_is_a_problem(
    row: str, hidden: bool, tmp_path: Path, no_device: pytest.MonkeyPatch
) -> None:
    files, hip, driver = DRIVERS[row]
    no_device.setattr(torch.version, "hip", hip)
    if hidden:
        no_device.setenv("HIP_VISIBLE_DEVICES", "")
    root = tree(tmp_path, files)
    assert by_name(machine.versions(root))["driver"].value == (driver or "none")
    (check,) = machine.devices(root)
    assert check.value == "steps run on the CPU"
    hint = "HIP_VISIBLE_DEVICES='' may hide it" if hidden else "compare with nvidia-smi or rocm-smi"
    assert (check.problem is None) == (driver is None)
    assert driver is None or f"driver {driver} is loaded, but torch sees no device: {hint}" in str(
        check.problem
    )


def test_a_device_in_one_line_and_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(device: torch.device) -> tuple[float, float]:
        if device.index:
            raise RuntimeError("CUDA error: the launch timed out\nand more")
        return 25.26e9, 24e9

    stand_ins: dict[str, Any] = {
        "accelerator_type": lambda: "cuda",
        "copy_rates": rates,
        "available_bytes": lambda _: 60 << 30,
        "best_precision": lambda _: "bf16",
        "device_name": lambda _: "Fake 100",
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    one, two = machine.devices()
    copies = "copies 25.3 GB/s to it, 24.0 GB/s back"
    assert (one.name, one.value) == ("cuda:0", f"Fake 100; 60.0 GiB free; bf16; {copies}")
    assert problems([one, two]) == {"cuda:1": "CUDA error: the launch timed out"}


# --- the words -------------------------------------------------------------------------------------------


def test_what_is_wrong_stands_below_its_line(capsys: Out) -> None:
    checks = Check("memory", "good", "1"), Check("memory", "bad", "2\x1b[2J", "it is 2: make it 1")
    show_checks(checks, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        *("memory", "  good  1", "  bad   2\\x1b[2J", "! it is 2: make it 1"),
    ]
