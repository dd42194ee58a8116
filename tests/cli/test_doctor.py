"""`zfunc doctor` on this machine, on sick ones, and on machines that tell nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from zfunc.cli.commands import doctor
from zfunc.cli.main import main
from zfunc.planner import bandwidth
from zfunc.planner.bandwidth import Bandwidth
from zfunc.runtime import accelerator, direct_io

NAMES = ["versions", "processor", "threads", "memory", "bandwidth", "this folder"]
SLOW = Bandwidth(nbytes=1 << 30, gigabytes=50.0, reached=0.3)
Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MEASURED", 2 << 20)
    monkeypatch.setattr(direct_io, "CHUNK", 1 << 20)
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda: SLOW)


def test_bandwidth_is_measured_on_memory_as_a_training_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(bandwidth, "largest_cache", lambda: 16 << 20)
    measured = bandwidth.measure_bandwidth(0.2)
    assert measured.nbytes == bandwidth.MIN_BYTES // bandwidth.BYTES * bandwidth.BYTES
    assert measured.gigabytes > 0.1
    assert 0.05 < measured.reached < 5


def told(capsys: Out, *folders: object) -> tuple[int, dict[str, str], str]:
    """Exit code, what is said of each name, and what is wrong."""
    code = main(["doctor", *(word for folder in folders for word in ("--folder", str(folder)))])
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line[2:].split("  ", 1) for line in out.splitlines() if not line.startswith("!")]
    wrong = "\n".join(line for line in out.splitlines() if line.startswith("!"))
    assert code == (1 if wrong else 0), "its verdict"
    return code, {name: value.strip() for name, value in lines}, wrong


def test_the_command_tells_everything(capsys: Out) -> None:
    _, lines, _ = told(capsys)
    assert [*lines][: len(NAMES)] == NAMES
    assert len(lines) > len(NAMES), "a line for the devices"
    for name, words in zip(
        NAMES, ("torch", "kernel in", "local rank", "may be pinned", "", "reads "), strict=True
    ):
        assert words in lines[name]
    swept = "50.0 GB/s over 1.0 GiB of memory; the Adam kernel reaches 30%"
    assert lines["bandwidth"] == swept


def test_what_a_drive_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(direct_io, "measure", lambda folder: direct_io.DriveSpeeds(5.12e9, 2e9))
    monkeypatch.setattr(direct_io, "is_direct", lambda folder: folder != Path())
    monkeypatch.setattr(direct_io, "file_system_of", lambda folder: "ext4")
    _, lines, _ = told(capsys, tmp_path)
    assert "this folder" not in lines, "it is one of them"
    assert lines[str(tmp_path)].startswith("reads 5.1 GB/s, writes 2.0 GB/s, past the page cache; ext4, ")
    here = told(capsys)[1]["this folder"]
    assert "through the page cache" in here
    assert here.endswith("iB free")


def test_what_cannot_be_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """Whatever it is of: a drive, the launcher's variables, memory, a device."""

    def lost(device: torch.device) -> Any:
        raise RuntimeError(f"CUDA error: the launch on {device} timed out\x1b[2J\nand more")

    monkeypatch.undo()
    monkeypatch.setattr(direct_io, "measure", lambda x: direct_io.DriveSpeeds(1, x.stat().st_dev))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "x")
    monkeypatch.setattr(bandwidth, "available_host_bytes", lambda: 1 << 20)
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "copy_rates", lost)
    (loop := tmp_path / "loop").symlink_to(loop)
    _, lines, wrong = told(capsys, "none", loop)
    unknown = {"threads", "bandwidth", "none", str(loop), "cuda:0"}
    assert {name for name in lines if lines[name] == "unknown"} == unknown
    for words in (
        "none",
        "LOCAL_WORLD_SIZE: got 'x'",
        "got 1,048,576 bytes available",
        "! CUDA error: the launch on cuda:0 timed out\\x1b[2J",
    ):
        assert words in wrong
    assert "and more" not in wrong


@pytest.mark.parametrize("driver", ["", "nvidia", "amdgpu"])
def test_a_driver_without_devices_is_a_problem(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    (tmp_path / driver).mkdir(exist_ok=True)
    monkeypatch.setattr(doctor, "MODULES", tmp_path)
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: None)
    _, lines, wrong = told(capsys)
    assert lines["devices"] == "none: steps run on the CPU, under SharedCores"
    assert (f"! driver {driver} is loaded, but torch sees no device: " in wrong) == bool(driver)


def test_a_device_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    for name, value in {
        "available_bytes": 60 << 30,
        "best_precision": "bf16",
        "device_name": "Fake 100",
    }.items():
        monkeypatch.setattr(accelerator, name, lambda _, x=value: x)
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "copy_rates", lambda _: (25.26e9, 24e9))
    line = "Fake 100; 60.0 GiB free; bf16; copies 25.3 GB/s to it, 24.0 GB/s back"
    assert told(capsys)[1]["cuda:0"] == line
