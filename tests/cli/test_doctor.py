"""`zfunc doctor` on this machine, on sick ones, and on machines that tell nothing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_machines import tree

from zfunc.cli.commands import doctor
from zfunc.cli.commands.doctor import UNKNOWN, Check, show_checks
from zfunc.cli.main import main
from zfunc.planner import bandwidth
from zfunc.planner.bandwidth import Bandwidth
from zfunc.runtime import cpu_topology, direct_io

NAMES = ["versions", "processor", "threads", "memory", "bandwidth", "this folder"]
NVIDIA = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: 12"
SLOW = Bandwidth(nbytes=1 << 30, gigabytes=50.0, reached=0.3, beyond_caches=False, huge=None, others=None)
Out = pytest.CaptureFixture[str]


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MEASURED", 2 << 20)
    monkeypatch.setattr(direct_io, "CHUNK", 1 << 20)
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda: SLOW)


# --- on this machine -------------------------------------------------------------------------------------


def test_bandwidth_is_measured_on_memory_as_a_training_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(bandwidth, "largest_cache", lambda: 16 << 20)
    measured = bandwidth.measure_bandwidth(0.2)
    assert measured.nbytes == bandwidth.MIN_BYTES // bandwidth.BYTES * bandwidth.BYTES
    assert measured.gigabytes > 0.1
    assert 0.05 < measured.reached < 5
    assert measured.beyond_caches
    assert measured.others is None or 0 <= measured.others < 1024
    if cpu_topology.huge_page_mode() in ("always", "madvise") and measured.huge:
        assert measured.huge[0] <= measured.huge[1]


def test_the_command_tells_everything_and_its_exit_code_is_its_verdict(capsys: Out) -> None:
    code = main(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    wrong = [check for check in result["checks"] if check["problem"]]
    assert (code, result["problems"]) == (1 if wrong else 0, len(wrong))
    names = [check["name"] for check in result["checks"]]
    assert names[: len(NAMES)] == NAMES
    assert len(names) > len(NAMES), "a line for the devices"
    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out  # not a terminal
    assert [line.split("  ")[1] for line in out.splitlines() if line.startswith("  ")] == names
    for words in ("GPU driver", "kernel in", "OpenMP", "may be pinned", "Adam kernel"):
        assert words in out


def test_what_is_wrong_stands_below_its_line(capsys: Out) -> None:
    show_checks([Check("good", "1"), Check("bad", "2\x1b[2J", "it is 2: make it 1")])
    assert capsys.readouterr().out.splitlines() == ["  good  1", "  bad   2\\x1b[2J", "! it is 2: make it 1"]


# --- sick machines ---------------------------------------------------------------------------------------


def test_what_a_drive_reaches_and_a_folder_that_cannot_hold_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checks = by_name(doctor.drives((tmp_path, tmp_path / "none")))
    assert checks.keys() == {str(tmp_path), str(tmp_path / "none")}  # this folder is one of them
    assert "name a folder that exists" in (checks[str(tmp_path / "none")].problem or "")
    monkeypatch.setattr(direct_io, "measure", lambda folder: direct_io.DriveSpeeds(5.12e9, 2e9))
    monkeypatch.setattr(direct_io, "is_direct", lambda folder: folder != Path())
    monkeypatch.setattr("zfunc.runtime.direct_io.file_system_of", lambda folder: "ext4")
    (here,) = doctor.drives(())
    assert here.value.startswith("reads 5.1 GB/s, writes 2.0 GB/s, through the page cache; ext4, ")
    assert here.value.endswith("iB free")


THREADS: dict[str, tuple[dict[str, str], tuple[str, ...] | None, str, str]] = {  # told, and what is wrong
    "nothing": ({}, None, f"; OpenMP {UNKNOWN}", ""),
    "one library": ({}, ("/a/libgomp.so.1",), "; OpenMP /a/libgomp.so.1", ""),
    "two": (
        {},
        ("/a/libgomp.so.1", "/b/libiomp5.so"),
        "/b/libiomp5.so",
        "several OpenMP libraries, whose threads",
    ),
    "bad ranks": ({"LOCAL_WORLD_SIZE": "x"}, (), "none by name", "LOCAL_WORLD_SIZE: got 'x'"),
}


@pytest.mark.parametrize("row", THREADS)
def test_what_the_environment_does_to_threads(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, runtimes, told, problem = THREADS[row]
    monkeypatch.setattr(cpu_topology, "openmp_runtimes", lambda root: runtimes)
    processor, threads = doctor.processor(environment, tmp_path)
    assert processor.value.startswith(f"{UNKNOWN}, kernel in ")
    assert threads.value.endswith(told)
    assert (threads.problem or "").startswith(problem)
    assert bool(threads.problem) == bool(problem)


def test_what_a_sweep_over_memory_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(doctor.memory())["bandwidth"].value == (
        "50.0 GB/s over 1.0 GiB of memory, which the caches hold; the Adam kernel reaches 30%"
    )
    monkeypatch.undo()
    monkeypatch.setattr(bandwidth, "available_host_bytes", lambda: 1 << 20)
    assert by_name(doctor.memory())["bandwidth"].value.startswith("unknown: got 1,048,576 bytes available")


# --- devices, by a stand-in ------------------------------------------------------------------------------

DRIVERS: dict[str, tuple[dict[str, str], str | None]] = {
    "none": ({}, None),
    "NVIDIA's": ({"proc/driver/nvidia/version": NVIDIA}, "nvidia 550.54.15"),
    "AMD's": ({"sys/module/amdgpu/version": "6.12.12"}, "amdgpu 6.12.12"),
}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("row", DRIVERS)
def test_a_driver_without_devices_is_a_problem(
    row: str, hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, driver = DRIVERS[row]
    monkeypatch.setattr("zfunc.runtime.accelerator.accelerator_type", lambda: None)
    for name in doctor.HIDING:
        monkeypatch.delenv(name, raising=False)
    if hidden:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    root = tree(tmp_path, files)
    (told,) = doctor.versions(root)
    assert told.value.endswith(f", GPU driver {driver or 'none'}")
    (check,) = doctor.devices(root)
    assert check.value == "none: steps run on the CPU, under SharedCores"
    hint = "HIP_VISIBLE_DEVICES='' may hide it" if hidden else "compare with what torch is built for"
    assert check.problem == (driver and f"driver {driver} is loaded, but torch sees no device: {hint}")


def test_a_device_in_one_line_and_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(device: torch.device) -> tuple[float, float]:
        if device.index:
            raise RuntimeError("CUDA error: the launch timed out\nand more")
        return 25.26e9, 24e9

    stand_ins: dict[str, Any] = {
        "accelerator_type": lambda: "cuda",
        "available_bytes": lambda _: 60 << 30,
        "best_precision": lambda _: "bf16",
        "device_name": lambda _: "Fake 100",
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(f"zfunc.runtime.accelerator.{name}", value)
    monkeypatch.setattr(doctor, "copy_rates", rates)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    copies = "copies 25.3 GB/s to it, 24.0 GB/s back"
    assert [*doctor.devices()] == [
        Check("cuda:0", f"Fake 100; 60.0 GiB free; bf16; {copies}"),
        Check("cuda:1", "does not answer", "CUDA error: the launch timed out"),
    ]
