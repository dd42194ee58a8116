"""`zfunc top`: what it shows is what the run wrote up to now, while it is written, and what the machine does."""

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from html_pages import HOSTILE
from hypothesis import given
from hypothesis import strategies as st
from run_folders import STEPS, row, written

from zfunc.cli.commands.top import TopView
from zfunc.cli.main import main
from zfunc.cli.sensors import GPU, Cores, cores, gpus, host_memory, process_of
from zfunc.train.history import METRICS, LiveHistory, typical

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # all but line feeds
Out = pytest.CaptureFixture[str]


def frame(run: Path, **given: Any) -> dict[str, str]:
    """A frame as names and texts."""
    lines = (re.split(r"\s{2,}", line, maxsplit=1) for line in TopView(run, **given).frame())
    return dict(lines)


# --- one frame -------------------------------------------------------------------------------------------


def test_once_prints_a_frame(tmp_path: Path, capsys: Out) -> None:
    run = written(tmp_path, [*STEPS, row(9, skipped=True, loss_scale=4.0)], step=True)
    assert main(["top", str(run), "--once"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not CONTROL.search(out)
    for words in ("9 of 9", "0.5556", "held out 8.0000 bits per byte", "1.00e-03", "skipped 1", "scale 4"):
        assert words in out
    assert "900 tokens/s, a step in 200 ms" in out
    assert "host operations are 25% of the step, at" in out
    assert "3.0 MiB by the training" in out


def test_host_bandwidth_is_planned_bytes_over_host_seconds(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS, step=True)
    top = TopView(run)
    assert top.history.step is not None
    nbytes = sum(op.nbytes for op in top.history.step.plan.graph if op.kind == "host")
    assert f"at {nbytes / 0.05 / 1e9:.1f} GB/s" in frame(run)["optimizer"]
    (run / "timeline.json").unlink()
    assert "known once a step was measured" in frame(run)["optimizer"]


def test_lanes_are_as_busy_as_in_the_measured_step(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS, step=True)
    step = LiveHistory(run).step
    assert step is not None
    shown = {name: text for name, text in frame(run).items() if name.startswith("lane ")}
    assert shown.keys() == {f"lane {lane}" for lane in step.timeline.lanes}
    for lane in step.timeline.lanes:
        assert shown[f"lane {lane}"].split()[0] == f"{step.timeline.busy(lane):.0%}"


@pytest.mark.parametrize("rows", [[], STEPS[:1]], ids=["nothing", "an evaluation"])
def test_a_run_before_its_first_step(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert frame(written(tmp_path, rows))["step"] == "none is done yet"


def test_figures_that_are_no_numbers_are_unknown(tmp_path: Path) -> None:
    bad = row(
        1, loss=None, lr="x", grad_norm=None, tokens_per_second=[], seconds=0, host_seconds=None, total="?"
    )
    shown = frame(written(tmp_path, [bad]))
    assert shown["loss"] == "unknown"
    assert shown["optimizer"] == "unknown"
    assert shown["step"].startswith("1,")


def test_no_text_reaches_the_terminal_as_an_order(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS)
    config = json.loads((run / "config.json").read_text())
    config["settings"]["precision"] = config["unit"] = f"\x1b[2J{HOSTILE}"
    config["machine"]["gpu"] = "\x9b2J"
    (run / "config.json").write_text(json.dumps(config))
    assert not CONTROL.search("\n".join(TopView(run).frame()))


def test_ascii_where_there_is_nothing_else(tmp_path: Path) -> None:
    assert "\n".join(TopView(written(tmp_path, STEPS, step=True), plain=True).frame()).isascii()


# --- as it grows -----------------------------------------------------------------------------------------


@given(
    steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.none() | st.floats(0, 9)), max_size=8),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_however_it_is_cut_what_was_read_is_what_is_there(
    steps: list[tuple[bool, bool, float | None]], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [
        row(n, skipped=skipped, loss=loss) | ({"held_out_bits_per_byte": float(n)} if held_out else {})
        for n, (skipped, held_out, loss) in enumerate(steps, 1)
    ]
    run = written(tmp_path_factory.mktemp("top"), [])
    text = "".join(json.dumps(r) + "\n" for r in rows)
    following = LiveHistory(run)
    for cut in [*sorted(cuts), len(text)]:
        with (run / METRICS).open("r+") as file:
            file.write(text[:cut])
        following.update()
    assert following.curve == [loss for _, _, loss in steps if loss is not None]
    assert following.overflows == sum(skipped for skipped, _, _ in steps)
    assert following.last_held_out == max((n for n, s in enumerate(steps, 1) if s[1]), default=None)
    assert [r["step"] for r in following.rows] == [r["step"] for r in rows]


def test_what_is_added_to_the_last_line_is_seen(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS[:3])
    following = LiveHistory(run)
    with (run / METRICS).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b', "held_out_bits_per_byte": 3.5}\n')
    following.update()
    assert following.last_held_out == 3.5
    assert len(following.rows) == 2


def test_a_run_that_goes_on_from_a_checkpoint_is_read_anew(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS)
    following = LiveHistory(run)
    new = run / "new"
    new.write_text("".join(json.dumps(r) + "\n" for r in [*STEPS[:4], row(4, loss=1.0)]))
    new.replace(run / METRICS)
    following.update()
    assert [r["step"] for r in following.rows] == [1, 2, 3, 4]
    assert following.curve[-1] == 1.0


def test_typical_is_the_median_of_what_is_known() -> None:
    assert typical([row(1, seconds=s) for s in (3.0, None, 1.0, 9.0)], "seconds") == 3.0
    assert typical([], "seconds") is None


# --- the machine -----------------------------------------------------------------------------------------


def test_cores_and_memory_are_those_of_this_machine() -> None:
    before = cores()
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass
    busy = cores().busy_since(before)
    assert busy is not None
    assert 0.3 < busy <= before.count
    memory = host_memory()
    assert memory is not None
    assert 0 < memory[0] < memory[1]


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None
    assert cores(tmp_path).worked is None
    now = Cores(2.0, 4.0, 8)
    assert now.busy_since(evolve(now, at=1.0, worked=None)) is None
    assert now.busy_since(now) is None
    assert now.busy_since(Cores(0.0, 1.0, 8)) == 1.5


class Driver(SimpleNamespace):
    """What is used of pynvml, for two GPUs."""

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda n: n,
            "nvmlDeviceGetName": lambda n: [b"one", "two"][n],
            "nvmlDeviceGetMemoryInfo": lambda n: SimpleNamespace(used=n + 1, total=9),
            "nvmlDeviceGetUtilizationRates": lambda n: SimpleNamespace(gpu=50 * n),
        }[name]


def refusing() -> None:
    raise RuntimeError("no driver")


def test_gpus_are_what_the_driver_tells() -> None:
    assert gpus(Driver()) == (GPU("one", 0.0, 1, 9), GPU("two", 0.5, 2, 9))
    assert gpus(Driver(nvmlInit=refusing)) == "none that the driver lists (no driver)"
    assert gpus(Driver(nvmlDeviceGetCount=refusing)) == "unknown: no driver"
    assert gpus(Driver(nvmlDeviceGetCount=lambda: 0)) == "none"


def test_who_trains_in_a_folder_is_found_by_its_lock(tmp_path: Path) -> None:
    if not Path("/proc/locks").exists():
        pytest.skip("this kernel tells of no locks")
    assert process_of(tmp_path) is None
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        assert process_of(tmp_path) == os.getpid()
    finally:
        os.close(fd)
    assert process_of(tmp_path / "none") is None


# --- on a terminal ---------------------------------------------------------------------------------------


def test_it_draws_anew_and_ends_with_the_run(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS[:3])
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "zfunc", "top", str(run), "--every", "0.2"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    running = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    shown = b""
    while b"2 of 9" not in shown:
        shown += os.read(ours, 4096)
    with (run / METRICS).open("a") as file:
        file.write(json.dumps(row(7)) + "\n")
    while b"7 of 9" not in shown:
        shown += os.read(ours, 4096)
    (run / "summary.json").write_text('{"ended": "steps"}')
    while b"all steps done" not in shown:
        shown += os.read(ours, 4096)
    assert running.wait(timeout=60) == 0
    os.close(ours)
