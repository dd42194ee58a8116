"""TensorBoard, Weights & Biases, trackio: what is in them is what metrics.jsonl has, each figure once."""

import json
import math
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_trainings
import torch
from small_trainings import rows
from table import plan_of

from zfunc.train import tracking
from zfunc.train.events import Evaluated, Event, Saved, Started, Stepped
from zfunc.train.run_folder import create_run
from zfunc.train.settings import TrainSettings
from zfunc.train.tracking import SCALARS, TRACKERS

JOB = ("--steps", "10", "--eval-every", "3", "--save-every", "3")
Out = pytest.CaptureFixture[str]
Scalars = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def a_home_of_its_own(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(own_folder))
    for name in ("WANDB_MODE", "TRACKIO_DIR", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)


def train(*more: object) -> int:
    return small_trainings.train(*JOB, *more)


# --- a training without its model -------------------------------------------------------------------------


def settings(**flags: Any) -> TrainSettings:
    for kind in TRACKERS.keys() & flags:
        pytest.importorskip(kind)
    return TrainSettings(batch_size=4, steps=10, **flags)


def events(of: TrainSettings, after: int, until: int) -> Iterator[Event]:
    """As of a training that begins after a step, from a checkpoint of its own if it is not the first."""
    own = Path(f"step-{after:08}") if after else None
    plan, layout = (
        plan_of("zero_offload", "tied", "Serial"),
        SimpleNamespace(num_parameters=9, num_trainable=8),
    )
    program, corpus = SimpleNamespace(plan=plan, layout=layout), SimpleNamespace(description=(), unit="byte")
    given = {"architecture": "", "sizes": {}, "planned_bytes": {}, "machine": {"gpu": None}}
    job: Any = SimpleNamespace(settings=of, corpus=corpus, program=program, **given)
    yield Started(job, after, own, after > 0)
    for step in range(after, until + 1):
        held_out = 8 / (step + 1) if step % 3 == 0 else None
        if step > after:
            if step % 3 == 1 and step > 1:
                yield Saved(step - 1, Path(f"step-{step - 1:08}"))
            figures = {"loss": 5 / step if step != 4 else math.nan, "lr": 0.1 / step, "grad_norm": step / 7}
            more = {"aux": {"accuracy": step / 10, "rows": torch.ones(2)}, "norms": {"head.weight": step / 3}}
            speed = {"skipped": step == 5, "loss_scale": 2.0**step, "seconds": 0.1, "host_seconds": 0.05}
            metrics: Any = SimpleNamespace(**figures, **speed, **more)
            yield Stepped(step, metrics, 1e3, 0, 1 << 20, None, held_out)
        elif held_out is not None:
            yield Evaluated(held_out, step)
    if until % 3:
        yield Evaluated(1.5, until)


def run(of: TrainSettings, out: str, *, after: int = 0, until: int = 10, fails: bool = False) -> None:
    """Keeps and tracks those events as `zfunc train` does. One that `fails` does so before it has ended."""
    folder = create_run(Path(out), again=Path(out).exists())
    try:
        with tracking.tracking(of, folder) as track:
            for event in events(of, after, until):
                if fails and isinstance(event, Evaluated) and event.step == until:
                    raise InterruptedError
                folder.record(event)
                track(event)
    except InterruptedError:
        pass
    finally:
        folder.close()


def expected(run: str) -> Scalars:
    """What metrics.jsonl has, as scalars."""
    scalars: Scalars = {}
    for row in rows(run):
        groups = {f"train/{name}": x for name, x in row.get("aux", {}).items()}
        groups |= {f"grad_norm/{name}": x for name, x in row.get("norms", {}).items()}
        values = {SCALARS[name]: x for name, x in row.items() if name in SCALARS}
        for name, value in (groups | values).items():
            if value is not None:
                scalars.setdefault(name, []).append((row["step"], float(value)))
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


READERS: dict[str, Callable[[str], Scalars]] = {
    "tensorboard": lambda run: board(f"{run}/tensorboard"),
    "wandb": history,
}
"""What a tracker has of a run."""


# --- what is written --------------------------------------------------------------------------------------


def test_a_resumed_training_has_every_scalar_once(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    settings(tensorboard=True, wandb=True)
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


def test_fp16_has_the_loss_scale_and_what_was_skipped() -> None:
    run(settings(tensorboard=True, precision="fp16"), "run")
    same(board("run/tensorboard"), expected("run"))
    assert len(board("run/tensorboard")["train/loss_scale"]) == 10
    assert len(board("run/tensorboard")["train/loss"]) == 9, "one is no number"


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(("last", "after"), [(1, 0), (7, 6)])  # before the first checkpoint; after one
def test_a_failed_run_resumes_without_a_point_twice(kind: str, last: int, after: int) -> None:
    run(settings(**{kind: True}), "run", until=last, fails=True)
    run(settings(**{kind: True}), "run", after=after)
    same(READERS[kind]("run"), expected("run"))


def test_a_tracker_added_on_resume_gets_all_steps() -> None:
    run(settings(), "run", until=7, fails=True)
    run(settings(tensorboard=True), "run", after=6)
    same(board("run/tensorboard"), expected("run"))
    run(settings(tensorboard=True), "other", after=9, until=12)  # another run, from a checkpoint of the first
    assert [step for step, _ in board("other/tensorboard")["train/loss"]] == [10, 11, 12]


@pytest.mark.slow
def test_a_killed_run_resumes_without_a_point_twice() -> None:
    both = ("--tensorboard", "--wandb", "--out", "run")
    settings(tensorboard=True, wandb=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZFUNC_FAULTS", "rank=0,step=9,op=forward[0,0],do=kill")
        running = small_trainings.start(*JOB, *both)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == -9, errors
    before = Path("run", tracking.RUN_ID).read_text()
    assert [step for step, _ in board("run/tensorboard")["train/loss"]] == [*range(1, 9)]
    assert train(*both, "--resume", "auto") == 0
    assert next(Path("run/wandb").glob("offline-run-*")).name.endswith(f"-{before}")
    same(board("run/tensorboard"), expected("run"))
    same(history("run"), expected("run"))


def test_trackio_has_the_calls_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module with trackio's `init` and its run's `log` and `finish`, as they are in 0.43."""
    logged: Scalars = {}
    given: dict[str, Any] = {}
    ended: list[str] = []

    def log(metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            logged.setdefault(name, []).append((step or 0, value))

    def init(project: str, name: str, config: dict[str, Any], embed: bool = True) -> Any:
        given.update(project=project, name=name, embed=embed, lr=config["lr"])
        return SimpleNamespace(log=log, finish=lambda: ended.append("finished"))

    module: Any = SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "trackio", module)
    run(settings(trackio=True), "run")
    same(logged, expected("run"))
    assert given == {"project": "zfunc", "name": "run", "embed": False, "lr": settings().lr}
    assert ended == ["finished"]
    assert os.environ.pop("TRACKIO_DIR") == str(Path("run/trackio").absolute())


# --- nothing is sent --------------------------------------------------------------------------------------


@pytest.fixture
def visitors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What comes to a server that takes the place of W&B's, and of any proxy."""
    came: list[bytes] = []

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            came.append(self.rfile.readline().strip())
            self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_address[1]}")
        yield came
        server.shutdown()


@pytest.mark.slow  # W&B takes its time to start
def test_offline_wandb_sends_nothing(visitors: list[bytes]) -> None:
    pytest.importorskip("wandb")
    code = "from pathlib import Path; from zfunc.train.tracking import *; Path('run').mkdir()\n"
    code += "w = WandB(Path('run'), {'lr': 1}); w.log({'loss': 2.5}, 1); w.close()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
    assert history("run") == {"loss": [(1, 2.5)]}
    assert not visitors
    with socket.create_connection(("127.0.0.1", int(os.environ["HTTP_PROXY"].rpartition(":")[2]))) as client:
        client.sendall(b"somebody\n")
        client.recv(10)
    assert visitors == [b"somebody"], "else nobody would have been seen"


# --- what fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_missing_package_is_refused_before_anything(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)  # pyright: ignore[reportArgumentType]
    assert train(f"--{kind}", "--out", "run") == 2
    err = capsys.readouterr().err
    assert f"--{kind}: " in err
    assert f'pip install -e ".[{kind}]"' in err
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", READERS)
def test_a_full_disk_ends_the_tracker_and_not_the_training(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker: Any = TRACKERS[kind]
    log = tracker.log

    def until_full(self: Any, metrics: Any, step: int) -> None:
        if step == 4:
            raise OSError(28, "No space left on device")
        log(self, metrics, step)

    monkeypatch.setattr(tracker, "log", until_full)
    run(settings(**{kind: True}), "run")
    message = f"`{kind}`: OSError: [Errno 28] No space left on device: this tracker is closed"
    assert caplog.text.count(message) == 1
    assert [step for step, _ in READERS[kind]("run")["train/loss"]] == [1, 2, 3]
    assert len(rows("run")) == 11


@pytest.mark.slow
def test_only_the_first_rank_writes() -> None:
    pytest.importorskip("tensorboard")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    running = small_trainings.start(*JOB, "--tensorboard", "--out", "run", launch=launch)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    assert len(list(Path("run/tensorboard").glob("events.*"))) == 1
    same(board("run/tensorboard"), expected("run"))
