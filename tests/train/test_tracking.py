"""TensorBoard, Weights & Biases, CSV: what is in them is what metrics.jsonl has, each figure once."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zfunc.cli.main import main
from zfunc.train import sinks
from zfunc.train.tracking import OURS, THEIRS

TINY = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
JOB = [
    *TINY,
    "--batch-size",
    "4",
    "--data",
    "data.txt",
    "--steps",
    "10",
    "--eval-every",
    "3",
    "--save-every",
    "3",
]
FP16 = ["--precision", "fp16"]
CLOCK = {"speed/tokens_per_second", "speed/seconds", "speed/host_seconds", "memory/host_bytes"}
Out = pytest.CaptureFixture[str]
Scalars = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 5)
    Path("data.txt").write_text(" ".join(f"{k * k % 97} and {k % 7}" for k in range(600)))


def train(*more: object) -> int:
    return main(["train", *JOB, *map(str, more)])


def stopped(monkeypatch: pytest.MonkeyPatch, step: int, *more: object) -> None:
    """A training that fails in the middle of a step."""
    monkeypatch.setenv("ZFUNC_FAULTS", f"rank=0,step={step},op=forward[0,0],do=raise")
    assert train(*more) == 1
    monkeypatch.delenv("ZFUNC_FAULTS")


def killed(step: int, *more: object) -> None:
    """A training in a process of its own that gets SIGKILL in the middle of a step."""
    fault = f"rank=0,step={step},op=forward[0,0],do=kill"
    command = [sys.executable, "-m", "zfunc", "train", *JOB, *map(str, more)]
    done = subprocess.run(
        command, env={**os.environ, "ZFUNC_FAULTS": fault}, capture_output=True, timeout=300
    )
    assert done.returncode == -9, done.stderr.decode()


def rows(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def expected(run: str, names: Any = OURS, *, fp16: bool = False, samples: int = 1) -> Scalars:
    """What metrics.jsonl has, as scalars."""
    found: Scalars = {}
    for row in rows(run):
        for name, value in row.items():
            kept = name in names and value is not None and (fp16 or name not in ("loss_scale", "skipped"))
            if kept and not (name == "device_bytes" and not value):
                found.setdefault(names[name], []).append((row["step"] * samples, float(value)))
    return found


def same(got: Scalars, told: Scalars) -> None:
    assert got.keys() == told.keys()
    for name, points in told.items():
        assert [x for x, _ in got[name]] == [x for x, _ in points], name
        assert [y for _, y in got[name]] == pytest.approx([y for _, y in points], rel=1e-6), name


def board(folder: str) -> Scalars:
    """As TensorBoard reads it."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def history(run: str) -> Scalars:
    """The history in the one file of W&B's, which is a log as LevelDB's of messages."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = Path(run).glob("wandb/offline-run-*/run-*.wandb")
    data, at, part = path.read_bytes(), 7, b""
    found: Scalars = {}
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole message, or the last part of one
            record = messages.Record.FromString(part)
            part = b""
            told = {".".join(x.nested_key) or x.key: json.loads(x.value_json) for x in record.history.item}
            for name, value in told.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((told["_step"], value))
    return found


# --- what is written --------------------------------------------------------------------------------------


def test_tensorboard_has_what_the_metrics_have(capsys: Out) -> None:
    pytest.importorskip("tensorboard")
    assert train("--tensorboard", "--out", "run") == 0
    same(board("run/tensorboard"), expected("run"))
    assert {"train/loss", "train/lr", "train/grad_norm", "held_out/bits_per_byte"} < board(
        "run/tensorboard"
    ).keys()
    assert "tensorboard: run/tensorboard\n" in capsys.readouterr().out


def test_fp16_has_the_loss_scale_and_what_was_skipped() -> None:
    pytest.importorskip("tensorboard")
    assert train("--tensorboard", *FP16, "--out", "run") == 0
    same(board("run/tensorboard"), expected("run", fp16=True))
    assert len(board("run/tensorboard")["train/loss_scale"]) == 10


def test_wandb_has_what_the_metrics_have(capsys: Out) -> None:
    pytest.importorskip("wandb")
    assert train("--wandb", "--out", "run") == 0
    same(history("run"), expected("run"))
    assert "Weights & Biases: offline, nothing is sent" in capsys.readouterr().out


def test_nobody_asked_so_nothing_is_imported_or_written() -> None:
    code = f"import sys; from zfunc.cli.main import main; main({['train', *JOB, '--out', 'run']}); "
    code += "assert not {'tensorboard', 'wandb'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
    assert not {"tensorboard", "wandb"} & {path.name for path in Path("run").iterdir()}


# --- stopped and resumed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 6])  # before the first checkpoint; beside one that is written
def test_a_run_that_failed_goes_on_without_a_point_twice(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    assert train("--tensorboard", "--out", "whole") == 0
    stopped(monkeypatch, step, "--tensorboard", "--out", "run")
    assert train("--tensorboard", "--out", "run", "--resume", "auto") == 0
    same(board("run/tensorboard"), expected("run"))
    got, whole = board("run/tensorboard"), board("whole/tensorboard")
    assert {k: v for k, v in got.items() if k not in CLOCK} == {
        k: v for k, v in whole.items() if k not in CLOCK
    }


@pytest.mark.slow
def test_so_does_one_that_was_killed() -> None:
    pytest.importorskip("tensorboard")
    killed(9, "--tensorboard", "--out", "run")
    assert [step for step, _ in board("run/tensorboard")["train/loss"]] == [*range(1, 9)]
    assert train("--tensorboard", "--out", "run", "--resume", "auto") == 0
    assert len(list(Path("run/tensorboard").glob("events.*"))) == 2
    same(board("run/tensorboard"), expected("run"))


def test_who_asks_for_it_later_gets_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    stopped(monkeypatch, 8, "--out", "run")
    assert train("--tensorboard", "--out", "run", "--resume", "auto") == 0
    same(board("run/tensorboard"), expected("run"))


def test_another_run_from_a_checkpoint_has_its_own_steps() -> None:
    pytest.importorskip("tensorboard")
    assert train("--out", "first") == 0
    newest = "first/checkpoints/step-00000009"
    assert train("--tensorboard", "--out", "run", "--resume", newest, "--steps", 12) == 0
    assert [step for step, _ in board("run/tensorboard")["train/loss"]] == [10, 11, 12]


@pytest.mark.slow
def test_wandb_goes_on_as_the_same_run_without_a_step_twice() -> None:
    pytest.importorskip("wandb")
    killed(8, "--wandb", "--out", "run")
    before = Path("run", sinks.ID).read_text()
    assert train("--wandb", "--out", "run", "--resume", "auto") == 0
    assert Path("run", sinks.ID).read_text() == before
    assert next(Path("run/wandb").glob("offline-run-*")).name.endswith(f"-{before}")
    same(history("run"), expected("run"))


def test_an_online_run_of_wandb_gets_the_steps_that_were_never_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **_: None)
    begin = sinks.RunInfo(tmp_path, {}, 5)
    assert sinks.WandB.open(begin).empty
    monkeypatch.setenv("WANDB_MODE", "online")
    assert sinks.WandB.open(begin).empty, "offline nothing was sent"
    assert not sinks.WandB.open(begin).empty


# --- nothing is sent --------------------------------------------------------------------------------------


@pytest.fixture
def visitors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What comes to a server that takes the place of W&B's, and of any proxy."""
    came: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"http://127.0.0.1:{server.getsockname()[1]}"

        def listen() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(5)
                    came.append(client.recv(200))
                    client.sendall(
                        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )

        thread = threading.Thread(target=listen)
        thread.start()
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, here)
        yield came
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_offline_wandb_sends_nothing(visitors: list[bytes]) -> None:
    pytest.importorskip("wandb")
    command = [sys.executable, "-m", "zfunc", "train", *JOB, "--wandb", "--out", "run"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    same(history("run"), expected("run"))
    assert not visitors
    with socket.create_connection(("127.0.0.1", int(os.environ["HTTP_PROXY"].rpartition(":")[2]))) as client:
        client.sendall(b"somebody")
        client.recv(10)
    assert visitors == [b"somebody"], "else nobody would have been seen"


# --- what fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_before_anything(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setitem(sys.modules, sinks.PACKAGES[kind], None)  # pyright: ignore[reportArgumentType]
    assert train(f"--{kind}", "--out", "run") == 2
    assert f"--{kind}: got no package" in (told := capsys.readouterr().err)
    assert f"pip install 'zfunc[{kind}]'" in told
    assert not Path("run").exists()


def test_a_full_disk_ends_the_sink_and_not_the_training(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    pytest.importorskip("tensorboard")
    write = sinks.TensorBoard.write

    def until_full(self: Any, x: int, scalars: Any) -> None:
        if x == 4:
            raise OSError(28, "No space left on device")
        write(self, x, scalars)

    monkeypatch.setattr(sinks.TensorBoard, "write", until_full)
    assert train("--tensorboard", "--out", "run") == 0
    told = "--tensorboard: got OSError: [Errno 28] No space left on device: nothing more is written there"
    assert capsys.readouterr().out.count(told) == 1
    assert [step for step, _ in board("run/tensorboard")["train/loss"]] == [1, 2, 3]
    assert len(rows("run")) == 11


def test_wandb_that_died_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    pytest.importorskip("wandb")
    write = sinks.WandB.write

    def fail(self: Any, x: int, scalars: Any) -> None:
        write(self, x, scalars)
        if x == 4:
            raise ConnectionResetError("wandb-core is gone")

    monkeypatch.setattr(sinks.WandB, "write", fail)
    assert train("--wandb", "--out", "run") == 0
    assert capsys.readouterr().out.count("--wandb: got ConnectionResetError") == 1


# --- DeepSpeed's configuration ----------------------------------------------------------------------------


def config(**blocks: Any) -> list[str]:
    Path("ds.json").write_text(json.dumps({"train_batch_size": 4, **blocks}))
    return ["--config", "ds.json"]


PLACE = {"enabled": True, "output_path": "logs", "job_name": "mine"}


def table(folder: str) -> Scalars:
    found: Scalars = {}
    for path in Path(folder).glob("*.csv"):
        head, *lines = csv.reader(path.read_text().splitlines())
        assert head[0] == "step"
        assert head[1]
        assert path.stem.endswith(head[1])
        found[path.stem] = [(int(x), float(y)) for x, y in lines]
    return found


def test_a_configuration_has_its_names_against_samples(capsys: Out) -> None:
    pytest.importorskip("tensorboard")
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    assert (
        train(*config(tensorboard=PLACE, csv_monitor={**PLACE, "output_path": "csv"}, **fp16), "--out", "run")
        == 0
    )
    told = expected("run", THEIRS, fp16=True, samples=4)
    assert {"Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"} < told.keys()
    same(board("logs/mine"), told)
    same(table("csv/mine"), {name.replace("/", "_"): points for name, points in told.items()})
    assert Path("csv/mine/Train_Samples_lr.csv").read_text().startswith("step,lr\n")
    assert "no effect here: tensorboard" not in capsys.readouterr().out
    assert json.loads(Path("run/config.json").read_text())["settings"]["tensorboard"] is True


def test_so_it_has_when_it_failed_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    args = [*config(tensorboard=PLACE, csv_monitor={**PLACE, "output_path": "csv"}), *FP16, "--out", "run"]
    stopped(monkeypatch, 8, *args)
    assert train(*args, "--resume", "auto") == 0
    told = expected("run", THEIRS, fp16=True, samples=4)
    same(board("logs/mine"), told)
    same(table("csv/mine"), {name.replace("/", "_"): points for name, points in told.items()})


def points_of(*runs: str) -> Scalars:
    """What runs that share a folder of CSV have there, one after another."""
    found: Scalars = {}
    for run in runs:
        for name, points in expected(run, THEIRS, samples=4).items():
            found.setdefault(name.replace("/", "_"), []).extend(points)
    return found


# before any loss is there; before the first checkpoint; after it
@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 8]
)
def test_lines_of_another_run_stay_where_one_goes_on(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = config(csv_monitor=PLACE)
    assert train(*shared, "--out", "one") == 0
    stopped(monkeypatch, step, *shared, "--out", "two")
    assert train(*shared, "--out", "two", "--resume", "auto") == 0
    same(table("logs/mine"), points_of("one", "two"))


def test_who_asks_later_for_a_folder_of_another_run_gets_all_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    pytest.importorskip("tensorboard")
    both = {"csv_monitor": PLACE, "tensorboard": PLACE}
    assert train(*config(**both), "--out", "one", "--steps", 4) == 0
    stopped(monkeypatch, 8, *config(), "--out", "two")
    assert train(*config(**both), "--out", "two", "--resume", "auto") == 0
    same(table("logs/mine"), points_of("one", "two"))
    names = ("one", "two")
    same(
        {"lr": board("logs/mine")["Train/Samples/lr"]},
        {"lr": [p for run in names for p in expected(run, THEIRS, samples=4)["Train/Samples/lr"]]},
    )
    assert "logs/mine: it holds files of another run, which are added to" in capsys.readouterr().out


def test_what_another_run_added_since_stays(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    shared = config(csv_monitor=PLACE)
    stopped(monkeypatch, 8, *shared, "--out", "one")
    assert train(*shared, "--out", "two") == 0
    before = table("logs/mine")
    assert train(*shared, "--out", "one", "--resume", "auto") == 0
    assert "logs/mine: another run has added to it since: what this one wrote" in capsys.readouterr().out
    for name, points in table("logs/mine").items():
        assert points[: len(before[name])] == before[name]
        assert [x for x, _ in points[len(before[name]) :]][-1:] in ([40], []), name


def test_a_folder_that_was_taken_away_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = config(csv_monitor=PLACE)
    stopped(monkeypatch, 8, *shared, "--out", "run")
    shutil.rmtree("logs")
    assert train(*shared, "--out", "run", "--resume", "auto") == 0
    same(table("logs/mine"), points_of("run"))


def test_a_list_of_runs_that_cannot_be_read_ends_the_sink_and_not_the_training(capsys: Out) -> None:
    path = Path("logs/mine", sinks.LIVES + "-csv")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert train(*config(csv_monitor=PLACE), "--out", "run") == 0
    assert f"ValueError: {path}: got what zfunc did not write" in capsys.readouterr().out
    assert not table("logs/mine")


def test_a_configurations_wandb_names_project_group_and_team(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    given: dict[str, Any] = {}
    begin: Callable[..., Any] = sinks.WandB.open

    def seen(begun: Any, **more: Any) -> Any:
        given.update(more)
        return begin(begun, **more)

    monkeypatch.setattr(sinks.WandB, "open", seen)
    block = {"enabled": True, "project": "p", "group": "g", "team": "t"}
    assert train(*config(wandb=block), "--out", "run") == 0
    assert given == {"project": "p", "group": "g", "entity": "t"}
    same(history("run"), expected("run", THEIRS, samples=4))


def test_a_flag_that_a_configuration_contradicts(capsys: Out) -> None:
    off = config(tensorboard={**PLACE, "enabled": False})
    assert train(*off, "--tensorboard", "--out", "run") == 2
    assert "--tensorboard: got True, and ds.json says tensorboard.enabled False" in capsys.readouterr().err


def test_a_flag_holds_where_a_configuration_leaves_it_open() -> None:
    pytest.importorskip("tensorboard")
    assert train(*config(tensorboard={**PLACE, "enabled": "auto"}), "--tensorboard", "--out", "run") == 0
    assert "Train/Samples/lr" in board("logs/mine")
    assert train(*config(), "--tensorboard", "--out", "run2") == 0
    assert "train/lr" in board("run2/tensorboard")


def test_a_place_that_cannot_be_written_is_told_and_training_goes_on(capsys: Out) -> None:
    Path("logs").write_text("a file")
    assert train(*config(csv_monitor=PLACE), "--out", "run") == 0
    assert capsys.readouterr().out.count("ds.json: csv_monitor: got NotADirectoryError") == 1


def test_only_the_first_rank_writes() -> None:
    pytest.importorskip("tensorboard")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "zfunc", "train", *JOB, "--tensorboard", "--out", "run"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert len(list(Path("run/tensorboard").glob("events.*"))) == 1
    same(board("run/tensorboard"), expected("run"))
