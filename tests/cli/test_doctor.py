"""`zfunc doctor` on this machine, on sick ones, and on machines that tell nothing."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from zfunc.cli.commands import doctor
from zfunc.cli.commands.doctor import Check, check_of, show_checks
from zfunc.cli.main import main
from zfunc.planner import bandwidth
from zfunc.planner.bandwidth import Bandwidth
from zfunc.runtime import direct_io

NAMES = ["versions", "processor", "threads", "memory", "bandwidth", "this folder"]
SLOW = Bandwidth(nbytes=1 << 30, gigabytes=50.0, reached=0.3, beyond_caches=False)
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
    assert measured.beyond_caches


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
    assert [line.split("  ")[1] for line in out.splitlines() if line.startswith("  ")] == names
    for words in ("torch", "kernel in", "local ranks", "may be pinned", "Adam kernel"):
        assert words in out


def test_what_is_wrong_stands_below_its_line(capsys: Out) -> None:
    show_checks([Check("good", "1"), Check("bad", "2\x1b[2J", "it is 2: make it 1")])
    assert capsys.readouterr().out.splitlines() == ["  good  1", "  bad   2\\x1b[2J", "! it is 2: make it 1"]


def test_what_a_drive_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) in (0, 1)
    names = [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
    assert str(tmp_path) in names
    assert "this folder" not in names, "it is one of them"
    monkeypatch.setattr(direct_io, "measure", lambda folder: direct_io.DriveSpeeds(5.12e9, 2e9))
    monkeypatch.setattr(direct_io, "is_direct", lambda folder: folder != Path())
    monkeypatch.setattr(direct_io, "file_system_of", lambda folder: "ext4")
    here = doctor.drive(Path())
    assert here.startswith("reads 5.1 GB/s, writes 2.0 GB/s, through the page cache; ext4, ")
    assert here.endswith("iB free")


def test_what_cannot_be_read_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is of: a drive, the launcher's variables, memory, a device."""

    def lost(_: torch.device) -> Any:
        raise RuntimeError("CUDA error: the launch timed out\nand more")

    monkeypatch.undo()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "x")
    monkeypatch.setattr(bandwidth, "available_host_bytes", lambda: 1 << 20)
    monkeypatch.setattr(doctor, "copy_rates", lost)
    for read, problem in (
        (partial(doctor.drive, Path("none")), "name a folder that exists"),
        (doctor.threads, "LOCAL_WORLD_SIZE: got 'x'"),
        (doctor.bandwidth, "got 1,048,576 bytes available"),
        (partial(doctor.device, torch.device("cuda", 1)), "CUDA error: the launch timed out"),
    ):
        check = check_of("it", read)
        assert check.value == "unknown"
        assert problem in (check.problem or "")
        assert "\n" not in (check.problem or "")


def test_what_a_sweep_over_memory_reaches() -> None:
    swept = "50.0 GB/s over 1.0 GiB of memory, which the caches hold; the Adam kernel reaches 30%"
    assert doctor.bandwidth() == swept


@pytest.mark.parametrize("driver", ["", "nvidia", "amdgpu"])
def test_a_driver_without_devices_is_a_problem(driver: str, tmp_path: Path) -> None:
    (tmp_path / driver).mkdir(exist_ok=True)
    check = doctor.no_device(tmp_path)
    assert (check.name, check.value) == ("devices", "none: steps run on the CPU, under SharedCores")
    told = f"driver {driver} is loaded, but torch sees no device: "
    assert check.problem is None if not driver else (check.problem or "").startswith(told)


def test_a_device_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "available_bytes": 60 << 30,
        "best_precision": "bf16",
        "device_name": "Fake 100",
    }.items():
        monkeypatch.setattr(f"zfunc.runtime.accelerator.{name}", lambda _, x=value: x)
    monkeypatch.setattr(doctor, "copy_rates", lambda _: (25.26e9, 24e9))
    told = "Fake 100; 60.0 GiB free; bf16; copies 25.3 GB/s to it, 24.0 GB/s back"
    assert doctor.device(torch.device("cuda", 0)) == told
