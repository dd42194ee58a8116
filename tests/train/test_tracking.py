"""TensorBoard, Weights & Biases, CSV: what is in them is what metrics.jsonl has, each figure once."""

import csv
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_trainings
from attrs import fields_dict
from small_trainings import rows
from table import plan_of

from zfunc.train import sinks
from zfunc.train.deepspeed.cli_merge import merge_flags
from zfunc.train.deepspeed.reader import read_config_file
from zfunc.train.events import Evaluated, Event, Saved, Started, Stepped
from zfunc.train.run_folder import create_run, record_event
from zfunc.train.settings import TrainSettings
from zfunc.train.tracking import DEEPSPEED_SCALARS, SCALARS, tracking

JOB = ("--steps", "10", "--eval-every", "3", "--save-every", "3")
SAMPLES = 4  # of a step
Out = pytest.CaptureFixture[str]
Scalars = dict[str, list[tuple[int, float]]]
FLAGS = [kind for kind in sinks.SINKS if kind in fields_dict(TrainSettings)]
PACKAGES = {
    kind for kind, sink in sinks.SINKS.items() if sink.PACKAGE.split(".")[0] not in sys.stdlib_module_names
}


@pytest.fixture(autouse=True)
def a_home_of_its_own(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(own_folder))
    monkeypatch.delenv("WANDB_MODE", raising=False)


def train(*more: object) -> int:
    return small_trainings.train(*JOB, *more)


def config(**blocks: Any) -> tuple[str, str]:
    Path("ds.json").write_text(json.dumps({"train_batch_size": SAMPLES, **blocks}))
    return "--config", "ds.json"


# --- a training without its model -------------------------------------------------------------------------


def settings(**flags: Any) -> TrainSettings:
    needed(flags)
    return TrainSettings(batch_size=SAMPLES, steps=10, **flags)


def configured(**blocks: Any) -> TrainSettings:
    """Settings with a configuration."""
    needed(blocks)
    config(**blocks)
    file = read_config_file("ds.json")
    return TrainSettings(steps=10, **merge_flags({"config": Path("ds.json")}, file, 1))


def needed(names: Iterable[str]) -> None:
    """Skips the test where the package of one of these sinks is not installed."""
    for name in PACKAGES & set(names):
        pytest.importorskip(name)


def events(of: TrainSettings, after: int, until: int) -> Iterator[Event]:
    """As of a training that begins after a step, from a checkpoint of its own if it is not the first."""
    own, plan = Path(f"step-{after:08}") if after else None, plan_of("zero_offload", "tied", "Serial")
    yield Started(
        of,
        *(("data",), "byte", 1000, plan, {}, {"gpu": None}),
        step=after,
        checkpoint=own,
        own=after > 0,
        sequences=after * SAMPLES,
    )
    for step in range(after, until + 1):
        held_out = 8 / (step + 1) if step % 3 == 0 else None
        if step > after:
            if step % 3 == 1 and step > 1:
                yield Saved(step - 1, Path(f"step-{step - 1:08}"), "", None)
            figures = 5 / step if step != 4 else math.nan, 0.1 / step, step / 7
            figures = step, 10, *figures, step == 5, 2.0**step, 1e3, 0.1, 0.05, 0, 1 << 20, None, held_out
            yield Stepped(*figures, aux={"accuracy": step / 10}, norms={"head.weight": step / 3})
        elif held_out is not None:
            yield Evaluated(held_out, step)
    if until % 3:
        yield Evaluated(1.5, until)


def run(of: TrainSettings, out: str, *, after: int = 0, until: int = 10, fails: bool = False) -> None:
    """Keeps and tracks those events as `zfunc train` does. One that `fails` does so before it has ended."""
    folder = create_run(Path(out), again=Path(out).exists())
    try:
        with tracking(of, folder.path) as track:
            for event in events(of, after, until):
                if fails and isinstance(event, Evaluated) and event.step == until:
                    raise InterruptedError
                record_event(folder, event, "byte")
                track(event)
    except InterruptedError:
        pass
    finally:
        folder.close()


def expected(run: str, names: Any = SCALARS, *, fp16: bool = False, samples: int = 1) -> Scalars:
    """What metrics.jsonl has, as scalars."""
    scalars: Scalars = {}
    for row in rows(run):
        groups = {f"train/{name}": x for name, x in row.get("aux", {}).items()}
        groups |= {f"grad_norm/{name}": x for name, x in row.get("norms", {}).items()}
        for name, value in groups.items():
            scalars.setdefault(name, []).append((row["step"] * samples, value))
        for name, value in row.items():
            kept = name in names and value is not None and (fp16 or name not in ("loss_scale", "skipped"))
            if kept and not (name == "device_bytes" and not value):
                scalars.setdefault(names[name], []).append((row["step"] * samples, float(value)))
    return scalars


def same(got: Scalars, wanted: Scalars) -> None:
    assert got.keys() == wanted.keys()
    for name, points in wanted.items():
        assert [x for x, _ in got[name]] == [x for x, _ in points], name
        assert [y for _, y in got[name]] == pytest.approx([y for _, y in points], rel=1e-6), name


def board(folder: str) -> Scalars:
    """As TensorBoard reads it."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def history(run: str) -> Scalars:
    """The history in the one file of W&B's, which is a log as LevelDB's of messages."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = Path(run).glob("wandb/offline-run-*/run-*.wandb")
    data, at, part = path.read_bytes(), 7, b""
    scalars: Scalars = {}
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
            row = {".".join(x.nested_key) or x.key: json.loads(x.value_json) for x in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    scalars.setdefault(name, []).append((row["_step"], value))
    return scalars


def table(folder: str) -> Scalars:
    scalars: Scalars = {}
    for path in Path(folder).glob("*.csv"):
        head, *lines = csv.reader(path.read_text().splitlines())
        assert head[0] == "step"
        assert head[1]
        assert path.stem.endswith(head[1])
        scalars[path.stem] = [(int(x), float(y)) for x, y in lines]
    return scalars


READERS: dict[str, Callable[[str], Scalars]] = {
    "tensorboard": lambda run: board(f"{run}/tensorboard"),
    "wandb": history,
}
"""What a sink with a flag has of a run."""


def in_csv(*runs: str, **more: Any) -> Scalars:
    """What runs have that share a folder of CSV files, one after another."""
    scalars: Scalars = {}
    for run in runs:
        for name, points in expected(run, DEEPSPEED_SCALARS, samples=SAMPLES, **more).items():
            scalars.setdefault(name.replace("/", "_"), []).extend(points)
    return scalars


# --- what is written --------------------------------------------------------------------------------------

PLACE = {"enabled": True, "output_path": "logs", "job_name": "mine"}


def test_a_resumed_training_has_every_scalar_once(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    needed(["tensorboard", "wandb"])
    monkeypatch.setenv("ZFUNC_FAULTS", "rank=0,step=8,op=forward[0,0],do=raise")
    assert train("--tensorboard", "--wandb", "--norms", "--out", "run") == 1
    monkeypatch.delenv("ZFUNC_FAULTS")
    assert [step for step, _ in board("run/tensorboard")["train/loss"]] == [*range(1, 8)]
    assert train("--tensorboard", "--wandb", "--norms", "--out", "run", "--resume", "auto") == 0
    assert len(board("run/tensorboard")["grad_norm/block0.attn_out.bias"]) == 10
    same(board("run/tensorboard"), expected("run"))
    same(history("run"), expected("run"))
    assert len(rows("run")) == 11
    out = capsys.readouterr().out
    assert "tensorboard: run/tensorboard\n" in out
    assert "Weights & Biases: offline, nothing is sent" in out


def test_a_configuration_has_deepspeeds_names_against_samples(capsys: Out) -> None:
    pytest.importorskip("tensorboard")
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    args = config(tensorboard=PLACE, csv_monitor={**PLACE, "output_path": "csv"}, **fp16)
    assert train(*args, "--out", "run") == 0
    scalars = expected("run", DEEPSPEED_SCALARS, fp16=True, samples=SAMPLES)
    assert {"Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"} < scalars.keys()
    same(board("logs/mine"), scalars)
    same(table("csv/mine"), in_csv("run", fp16=True))
    assert Path("csv/mine/Train_Samples_lr.csv").read_text().startswith("step,lr\n")
    assert "no effect: tensorboard" not in capsys.readouterr().out
    assert small_trainings.config("run")["settings"]["tensorboard"] is True


def test_fp16_has_the_loss_scale_and_what_was_skipped() -> None:
    run(settings(tensorboard=True, precision="fp16"), "run")
    same(board("run/tensorboard"), expected("run", fp16=True))
    assert len(board("run/tensorboard")["train/loss_scale"]) == 10
    assert len(board("run/tensorboard")["train/loss"]) == 9, "one is no number"


def test_without_a_sink_no_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorboard", "wandb")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # pyright: ignore[reportArgumentType]
    assert train("--out", "run") == 0
    assert not {"tensorboard", "wandb", sinks.RUN_ID} & {path.name for path in Path("run").iterdir()}


# --- stopped and resumed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "after"), [(1, 0), (7, 6)])  # before the first checkpoint; after one
def test_a_failed_run_resumes_without_a_point_twice(last: int, after: int) -> None:
    both = configured(tensorboard=PLACE, csv_monitor=PLACE)
    run(both, "run", until=last, fails=True)
    run(both, "run", after=after)
    assert len(list(Path("logs/mine").glob("events.*"))) == 2
    same(board("logs/mine"), expected("run", DEEPSPEED_SCALARS, samples=SAMPLES))
    same(table("logs/mine"), in_csv("run"))


def test_events_are_in_order_though_the_clock_went_back() -> None:
    tracked = settings(tensorboard=True)
    run(tracked, "run", until=7, fails=True)
    (file,) = Path("run/tensorboard").iterdir()
    file.rename(file.with_name(file.name.replace("tfevents.1", "tfevents.3")))
    run(tracked, "run", after=6)
    same(board("run/tensorboard"), expected("run"))


def killed(step: int, *more: object) -> None:
    """A training in a process of its own that gets SIGKILL in the middle of a step."""
    fault = f"rank=0,step={step},op=forward[0,0],do=kill"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZFUNC_FAULTS", fault)
        running = small_trainings.start(*JOB, *more)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == -9, errors


@pytest.mark.slow
def test_a_killed_run_resumes_without_a_point_twice() -> None:
    needed(["tensorboard", "wandb"])
    killed(9, "--tensorboard", "--wandb", "--out", "run")
    before = Path("run", sinks.RUN_ID).read_text()
    assert [step for step, _ in board("run/tensorboard")["train/loss"]] == [*range(1, 9)]
    assert train("--tensorboard", "--wandb", "--out", "run", "--resume", "auto") == 0
    assert Path("run", sinks.RUN_ID).read_text() == before
    assert next(Path("run/wandb").glob("offline-run-*")).name.endswith(f"-{before}")
    same(board("run/tensorboard"), expected("run"))
    same(history("run"), expected("run"))


def test_a_sink_added_on_resume_gets_all_steps() -> None:
    run(settings(), "run", until=7, fails=True)
    run(settings(tensorboard=True), "run", after=6)
    same(board("run/tensorboard"), expected("run"))


def test_another_run_from_a_checkpoint_has_its_own_steps() -> None:
    run(settings(tensorboard=True), "run", after=9, until=12)
    assert [step for step, _ in board("run/tensorboard")["train/loss"]] == [10, 11, 12]


def test_an_online_run_of_wandb_gets_the_steps_that_were_never_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **_: None)
    begin = sinks.RunInfo(tmp_path, {}, 5)
    assert sinks.WandB(begin, None).empty
    monkeypatch.setenv("WANDB_MODE", "online")
    assert sinks.WandB(begin, None).empty, "offline nothing was sent"
    assert not sinks.WandB(begin, None).empty


# --- a folder of several runs -----------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "after"), [(0, 0), (1, 0), (7, 6)])
def test_a_resume_keeps_the_lines_of_another_run(last: int, after: int) -> None:
    shared = configured(csv_monitor=PLACE)
    run(shared, "one")
    run(shared, "two", until=last, fails=True)
    run(shared, "two", after=after)
    same(table("logs/mine"), in_csv("one", "two"))


def test_a_sink_added_on_resume_in_a_shared_folder_gets_all_steps(caplog: pytest.LogCaptureFixture) -> None:
    both = configured(tensorboard=PLACE, csv_monitor=PLACE)
    run(both, "one", until=4)
    run(configured(), "two", until=7, fails=True)
    run(configured(tensorboard=PLACE, csv_monitor=PLACE), "two", after=6)
    same(table("logs/mine"), in_csv("one", "two"))
    lr = [
        p
        for run in ("one", "two")
        for p in expected(run, DEEPSPEED_SCALARS, samples=SAMPLES)["Train/Samples/lr"]
    ]
    same({"lr": board("logs/mine")["Train/Samples/lr"]}, {"lr": lr})
    assert "logs/mine: another run has written here" in caplog.text
    assert "logs/mine: it holds events of another run: TensorBoard shows both as one" in caplog.text


def test_lines_that_another_run_appended_stay(caplog: pytest.LogCaptureFixture) -> None:
    shared = configured(csv_monitor=PLACE)
    run(shared, "one", until=7, fails=True)
    run(shared, "two")
    before = table("logs/mine")
    run(shared, "one", after=6)
    assert "logs/mine: another run has written here" in caplog.text
    for name, points in table("logs/mine").items():
        assert points[: len(before[name])] == before[name]
        assert [x for x, _ in points[len(before[name]) :]][-1:] in ([40], []), name
    run(shared, "one", after=9)
    assert [x for x, _ in table("logs/mine")["Train_Samples_lr"]][-5:] == [24, 28, 32, 36, 40]


def test_a_deleted_folder_is_written_again() -> None:
    shared = configured(csv_monitor=PLACE)
    run(shared, "run", until=7, fails=True)
    shutil.rmtree("logs")
    run(shared, "run", after=6)
    same(table("logs/mine"), in_csv("run"))


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
    code = "from pathlib import Path; from zfunc.train.sinks import *; Path('run').mkdir()\n"
    code += (
        "w = WandB(RunInfo(Path('run'), {'lr': 1}), None); w.write(1, {'loss': 2.5}); w.close(failed=False)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
    assert history("run") == {"loss": [(1, 2.5)]}
    assert not visitors
    with socket.create_connection(("127.0.0.1", int(os.environ["HTTP_PROXY"].rpartition(":")[2]))) as client:
        client.sendall(b"somebody")
        client.recv(10)
    assert visitors == [b"somebody"], "else nobody would have been seen"


# --- what fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(PACKAGES))
def test_a_missing_package_is_refused_before_anything(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setitem(sys.modules, sinks.SINKS[kind].PACKAGE, None)  # pyright: ignore[reportArgumentType]
    assert train(f"--{kind}", "--out", "run") == 2
    err = capsys.readouterr().err
    assert f"--{kind}: " in err
    assert f"pip install 'zfunc[{kind}]'" in err
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", FLAGS)
def test_a_full_disk_ends_the_sink_and_not_the_training(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink: Any = sinks.SINKS[kind]
    write = sink.write

    def until_full(self: Any, x: int, scalars: Any) -> None:
        if x == 4:
            raise OSError(28, "No space left on device")
        write(self, x, scalars)

    monkeypatch.setattr(sink, "write", until_full)
    run(settings(**{kind: True}), "run")
    message = f"--{kind}: OSError: [Errno 28] No space left on device: this sink is closed"
    assert caplog.text.count(message) == 1
    assert [step for step, _ in READERS[kind]("run")["train/loss"]] == [1, 2, 3]
    assert len(rows("run")) == 11


def test_a_list_of_runs_that_cannot_be_read_ends_the_sink_and_not_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Path("logs/mine", sinks.CSV_RUNS)
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        run(configured(csv_monitor=PLACE), f"run{text}")
        assert f"ValueError: {path}: not written by zfunc" in caplog.text
        assert not table("logs/mine")
        caplog.clear()


def test_an_unwritable_folder_is_logged_and_training_continues(capsys: Out) -> None:
    Path("logs").write_text("a file")
    assert train(*config(csv_monitor=PLACE), "--out", "run") == 0
    assert capsys.readouterr().out.count("ds.json: csv_monitor: NotADirectoryError") == 1


# --- DeepSpeed's configuration ----------------------------------------------------------------------------


def test_a_configurations_wandb_names_project_group_and_team(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    given: dict[str, Any] = {}
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **arguments: given.update(arguments) or init(**arguments))
    block = {"enabled": True, "project": "p", "group": "g", "team": "t"}
    run(configured(wandb=block), "run")
    assert (given["project"], given["group"], given["entity"]) == ("p", "g", "t")
    same(history("run"), expected("run", DEEPSPEED_SCALARS, samples=SAMPLES))


@pytest.mark.parametrize(
    ("blocks", "folder", "name"),
    [
        ({"tensorboard": {**PLACE, "enabled": "auto"}}, "logs/mine", "Train/Samples/lr"),
        ({}, "run/tensorboard", "train/lr"),
    ],
)
def test_a_flag_holds_where_a_configuration_leaves_it_open(blocks: Any, folder: str, name: str) -> None:
    pytest.importorskip("tensorboard")
    path = Path(config(**blocks)[1]).absolute()  # what a file says is read once in a process
    flags = {"config": path, "tensorboard": True}
    run(TrainSettings(steps=10, **merge_flags(flags, read_config_file(path), 1)), "run")
    assert name in board(folder)


@pytest.mark.slow
def test_only_the_first_rank_writes() -> None:
    pytest.importorskip("tensorboard")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    running = small_trainings.start(*JOB, "--tensorboard", "--out", "run", launch=launch)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    assert len(list(Path("run/tensorboard").glob("events.*"))) == 1
    same(board("run/tensorboard"), expected("run"))
