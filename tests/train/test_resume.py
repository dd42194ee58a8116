"""A training that was stopped goes on as if it had not been: checkpoints on the way, `--resume`, signals, kills."""

import errno
import gzip
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_trainings
import torch.distributed as dist
from pairs import in_pairs
from small_trainings import (
    checkpoints,
    config,
    fail,
    files,
    losses,
    measured,
    rows,
    start,
    summary,
    wait_for_rows,
)
from text_data import write_jsonl

from zfunc.checkpoint.durable_files import write_all
from zfunc.checkpoint.manifest import FILE, read_manifest, to_json
from zfunc.cli.main import main
from zfunc.engine.step import save_load
from zfunc.errors import CheckpointError
from zfunc.runtime.launch import fresh_store
from zfunc.train.events import INTERRUPT
from zfunc.train.resume import changed_settings, elapsed_in, end_reason, saved_extra
from zfunc.train.settings import TrainSettings

Out = pytest.CaptureFixture[str]
JOB = ("--steps", "10", "--eval-every", "4")

pytestmark = pytest.mark.usefixtures("own_folder")


def train(*more: object) -> int:
    return small_trainings.train(*JOB, *more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of JOB that nothing disturbed, with a checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        small_trainings.move_into(folder, patch)
        assert train("--out", "run", "--save-every", 5) == 0
    return folder / "run"


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# --- exact -----------------------------------------------------------------------------------------------

ROWS = ["--data", "short.jsonl", "--packing", "documents", "--seq-length", 128, "--batch-size", 2]
EIGHT_BITS = ["--moments", "8bit", "--precision", "bf16", "--clip", 0]
STREAM = ["--stream", "--data", "shards/*", "--eval-data", "data.txt", "--shuffle-buffer", 5]
SETTINGS = {
    "the default": ([], (9, 5)),  # the checkpoint of 6 is there; then that of 3
    "accumulated, 8 bits, dropout": ([*EIGHT_BITS, "--micro-batches", 2, "--dropout", 0.1], (8,)),
    "fp16, Interleaved": (["--precision", "fp16", "--schedule", "Interleaved"], (8,)),
    # Of 100 documents of 3 to 21 bytes: an epoch is some steps long, and a row has more than any of them.
    # Of three files, one compressed: some passes, of a few buffers each.
    "a stream": (STREAM, (8,)),
    "rows of many documents": ([*ROWS, "--dropout", 0], (8,)),
    "rows of many documents, in tiles": ([*ROWS, "--tiles", 2, "--recompute", "all", "--dropout", 0], (8,)),
}
AT_NIGHT = {"fp16, Interleaved", "rows of many documents, in tiles"}  # by day tests/engine/test_laws.py


def write_shards() -> None:
    Path("shards").mkdir()
    for n, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.jsonl")):
        write_jsonl(path := Path("shards", name), *({"text": f"{n} {k} " * (k % 9)} for k in range(12)))
        path.write_bytes(gzip.compress(path.read_bytes()) if name.endswith("gz") else path.read_bytes())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in AT_NIGHT)) for x in SETTINGS]
)
def test_a_failed_run_resumes_to_the_bit(name: str, at_step: Any, capsys: Any) -> None:
    settings, failing = SETTINGS[name]
    write_jsonl(Path("short.jsonl"), *({"text": "abc" * (1 + n % 7)} for n in range(100)))
    write_shards()
    more = (*settings, "--save-every", 3)
    assert train(*more, "--out", "whole") == 0
    for number in failing:
        at_step(number, fail)
        assert train(*more, "--out", number) == 1
        assert f"got this in the middle\nThe run up to here is in {number}" in capsys.readouterr().err
        assert summary(str(number))["ended"] == "failed"
        assert train(*more, "--out", number, "--resume", "auto") == 0
        assert measured(str(number)) == measured("whole")
        ends = [summary(run) for run in ("whole", str(number))]
        assert all(
            ends[0][k] == ends[1][k] for k in ("ended", "steps", "loss", "sample", "held_out_bits_per_byte")
        )
        assert [row.get("saved") for row in rows(str(number))] == [row.get("saved") for row in rows("whole")]


@pytest.mark.slow
def test_a_stream_that_is_killed_resumes_to_the_bit() -> None:
    write_shards()
    more = (*STREAM, "--save-every", 7, "--steps", 60, "--eval-every", 0, "--no-sample")
    with start(*JOB, *more, "--out", "killed") as running:
        wait_for_rows("killed", 31, running)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    assert train(*more, "--out", "whole") == 0
    assert train(*more, "--out", "killed", "--resume", "auto") == 0
    assert config("killed")["resumed_from"]
    assert measured("killed") == measured("whole")


# After one of the steps an evaluation is due.
@pytest.mark.parametrize(("number", "step"), in_pairs([signal.SIGINT, signal.SIGTERM], [4, 7]))
def test_a_run_ended_by_a_signal_resumes_to_the_bit(
    number: int, step: int, at_step: Any, undisturbed: Path
) -> None:
    at_step(step, send(number))
    assert train("--out", "run") == 0
    terminated = number == signal.SIGTERM
    end, last = summary("run"), rows("run")[-1]
    assert (end["ended"], end["steps"]) == ("terminated" if terminated else "interrupt", step)
    assert last["saved"] == end["checkpoint"] == f"step-{step:08d}"
    assert ("held_out_bits_per_byte" in last, bool(end["sample"])) == (not terminated, not terminated)
    assert train("--out", "run", "--resume", "auto") == 0
    assert measured("run") == measured(undisturbed)
    assert summary("run")["loss"] == summary(undisturbed)["loss"]


@pytest.mark.parametrize(("path", "step"), [("step-00000005", 5), ("", 10), ("..", 10)])
def test_a_checkpoint_starts_another_run(path: str, step: int, undisturbed: Path, capsys: Out) -> None:
    """A checkpoint, a folder of them, a run."""
    steps = 10 if step < 10 else 11
    assert train("--out", "run", "--resume", undisturbed / "checkpoints" / path, "--steps", steps) == 0
    assert Path(config("run")["resumed_from"]).name == f"step-{step:08d}"
    assert f"goes on after step {step}" in capsys.readouterr().out
    own = [row for row in measured("run") if row["step"] > step]
    assert [row["step"] for row in own] == [*range(step + 1, steps + 1)]
    assert checkpoints("run") == [f"step-{steps:08d}"]
    if steps == 10:
        assert own == measured(undisturbed)[step + 1 :]
        assert summary("run")["held_out_bits_per_byte"] == summary(undisturbed)["held_out_bits_per_byte"]


def test_a_resumed_run_may_have_its_parameters_elsewhere(undisturbed: Path) -> None:
    elsewhere = ("--stage", 3, "--params-on", "host", "--activations-on", "host", "--defer")
    assert train("--out", "run", "--resume", undisturbed / "checkpoints/step-00000005", *elsewhere) == 0
    assert losses("run") == losses(undisturbed)[5:]
    settings = config("run")["settings"]
    assert [settings[name] for name in ("stage", "params_on", "defer")] == [3, "host", True]


def add_to_saved(settings: dict[str, Any], folder: Path) -> None:
    """Add to the settings of `zfunc train` that a checkpoint has."""
    manifest = read_manifest(folder)
    manifest.extra["train"]["settings"] |= settings
    (folder / FILE).write_bytes(to_json(manifest))


def test_a_run_resumes_whose_settings_had_a_name_that_is_gone(undisturbed: Path) -> None:
    """Of an older version: `accumulate`, and the name of an order of several devices on one."""
    shutil.copytree(undisturbed, "run", ignore=shutil.ignore_patterns("step-00000010", "summary.json"))
    older = {"accumulate": "device", "order": "OneFOneB"}
    folder, said = Path("run/checkpoints/step-00000005"), config("run")
    Path("run/config.json").write_text(json.dumps({**said, "settings": {**said["settings"], **older}}))
    add_to_saved(older, folder)
    assert train("--out", "run", "--resume", "auto") == 0
    assert measured("run") == measured(undisturbed)
    assert summary("run")["loss"] == summary(undisturbed)["loss"]


def test_a_run_from_a_checkpoint_resumes_from_it_until_it_has_its_own(
    at_step: Any, undisturbed: Path
) -> None:
    at_step(8, fail)
    assert train("--out", "run", "--resume", undisturbed / "checkpoints/step-00000005") == 1
    assert train("--out", "run", "--resume", "auto") == 0
    assert measured("run") == measured(undisturbed)[6:]


# --- checkpoints on the way ------------------------------------------------------------------------------


def test_checkpoints_are_those_asked_for(undisturbed: Path, capsys: Out) -> None:
    assert train("--out", "three", "--save-every", 4, "--keep", 3) == 0
    assert checkpoints("three") == ["step-00000004", "step-00000008", "step-00000010"]
    saved = {row["step"]: row["saved"] for row in rows("three") if "saved" in row}
    assert saved == {4: "step-00000004", 8: "step-00000008", 10: "step-00000010"}
    assert "saved three/checkpoints/step-00000008\n" in capsys.readouterr().out
    assert train("--out", "last") == 0
    assert checkpoints("last") == ["step-00000010"]
    assert train("--out", "none", "--save-every", 0) == 0
    assert not Path("none/checkpoints").exists()
    assert summary("none")["checkpoint"] is None
    assert measured("none") == measured("last") == measured("three") == measured(undisturbed)


def test_a_failed_save_is_logged_once_and_training_continues(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """There is no room for the checkpoint of step 3; the disk fails in the middle of that of step 6."""
    begin = save_load.begin_writing

    def begin_badly(content: Any, *args: Any) -> Any:
        if content.position.step == 3:
            raise CheckpointError("no room")
        begun = begin(content, *args)
        if content.position.step == 6:
            begun._failure = "pulled the plug"
        return begun

    monkeypatch.setattr(save_load, "begin_writing", begin_badly)
    assert train("--out", "run", "--save-every", 3) == 0
    out = capsys.readouterr().out
    assert out.count("checkpoint: none was saved of step 3: no room") == out.count("no room") == 1
    assert out.count("checkpoint: none was saved of step 6: pulled the plug") == out.count("plug") == 1
    assert measured("run") == measured(undisturbed)
    assert checkpoints("run") == ["step-00000009", "step-00000010"]
    assert (rows("run")[3]["not_saved"], rows("run")[6]["not_saved"]) == ("no room", "pulled the plug")


def test_where_the_last_step_cannot_be_saved_the_exit_code_is_1(at_step: Any, capsys: Out) -> None:
    at_step(10, lambda: Path("run/checkpoints").touch())
    assert train("--out", "run") == 1
    err = capsys.readouterr().err
    assert err.startswith("zfunc train: error: the last step is not saved: ")
    assert "run/checkpoints: got 'File exists'" in err
    end = summary("run")
    assert (end["ended"], end["steps"], end["checkpoint"]) == ("steps", 10, None)
    assert end["sample"]
    assert rows("run")[-1]["not_saved"]


@pytest.mark.parametrize(("until", "code"), [(9, 0), (10**6, 1)])
def test_lines_wait_for_a_full_disk(
    until: int, code: int, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """From the fourth line on there is room for half of what is written: to the end, or for some steps."""
    calls = itertools.count(1)

    def write(fd: int, data: memoryview, offset: int) -> None:
        full = 4 <= next(calls) <= until
        write_all(fd, data[: len(data) // 2] if full else data, offset)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zfunc.train.run_folder.write_all", write)
    assert train("--out", "run") == code
    out, err = capsys.readouterr()
    full = "run/metrics.jsonl: got 'No space left on device' while writing it: free some space"
    assert out.count(f"{full}; training goes on\n") == 1
    assert err == code * f"zfunc train: error: {full}\nThe run up to here is in run\n"
    assert checkpoints("run") == ["step-00000010"]
    if not code:
        assert measured("run") == measured(undisturbed)


# --- going on in a folder --------------------------------------------------------------------------------


def test_metrics_end_at_the_step_that_is_resumed(at_step: Any, undisturbed: Path, capsys: Out) -> None:
    at_step(9, fail)
    assert train("--out", "run", "--save-every", 3) == 1
    before = Path("run/metrics.jsonl").read_bytes().splitlines(keepends=True)
    with Path("run/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 9, "los')  # as a kill may leave it
    Path("run/.config.json.123.partial").write_text("{")
    assert [json.loads(line)["step"] for line in before] == list(range(9))
    at_step(7, fail)
    assert train("--out", "run", "--resume", "auto") == 1
    assert Path("run/metrics.jsonl").read_bytes() == b"".join(before[:7])
    assert config("run")["resumed_from"] == str(Path("run/checkpoints/step-00000006").absolute())
    assert "goes on after step 6" in capsys.readouterr().out
    assert not list(Path("run").glob(".*"))
    assert train("--out", "run", "--resume", "auto") == 0
    assert measured("run") == measured(undisturbed)


def test_lost_lines_are_logged(at_step: Any, capsys: Out) -> None:
    at_step(8, send(signal.SIGTERM))
    assert train("--out", "run") == 0
    lines = Path("run/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("run/metrics.jsonl").write_text("".join(lines[:5]))
    assert train("--out", "run", "--resume", "auto") == 0
    assert "got no line of step 8" in capsys.readouterr().out
    steps = [row["step"] for row in rows("run")]
    assert steps == [0, 1, 2, 3, 4, 8, 9, 10], "the evaluation of 8 is made again"


def test_a_finished_run_is_not_changed(capsys: Out) -> None:
    assert train("--out", "run") == 0
    before = files("run")
    assert train("--out", "run", "--resume", "auto") == 0
    assert "it ended at step 10: nothing is left to train" in capsys.readouterr().out
    assert files("run") == before
    assert train("--out", "run", "--resume", "auto", "--steps", 12) == 0  # but for who wants more
    assert "settings have changed: steps 10 is now 12" in capsys.readouterr().out
    assert [row["step"] for row in rows("run")] == list(range(13))


def test_auto_refuses_a_finished_run_without_a_checkpoint(capsys: Out) -> None:
    """Hours of figures are not for a new training to write over."""
    assert train("--out", "run", "--save-every", 0) == 0
    before = files("run")
    assert train("--out", "run", "--save-every", 0, "--resume", "auto") == 2
    assert "whose training ended without a checkpoint" in capsys.readouterr().err
    assert files("run") == before


def test_a_run_without_summary_gets_one_without_a_step(capsys: Out) -> None:
    """Killed after its last checkpoint."""
    assert train("--out", "run") == 0
    expected = summary("run"), measured("run")
    Path("run/summary.json").unlink()
    assert train("--out", "run", "--resume", "auto") == 0
    assert "all steps done: 10 steps" in capsys.readouterr().out
    assert measured("run") == expected[1]
    names = ("ended", "steps", "loss", "held_out_bits_per_byte", "sample", "checkpoint")
    assert all(summary("run")[k] == expected[0][k] for k in names)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-8] + bytes([raw[-8] ^ 1]) + raw[-7:], "is loaded instead of a later one"),
        (lambda raw: raw[:-8], "is the newest complete one"),
    ],
)
def test_a_damaged_checkpoint_is_skipped(
    damage: Callable[[bytes], bytes], said: str, at_step: Any, undisturbed: Path, capsys: Any
) -> None:
    """One line says so."""
    at_step(9, fail)
    assert train("--out", "run", "--save-every", 3) == 1
    shard = next(Path("run/checkpoints/step-00000006").glob("*.safetensors"))
    shard.write_bytes(damage(shard.read_bytes()))
    assert train("--out", "run", "--resume", "auto", "--save-every", 3) == 0
    assert capsys.readouterr().out.count(f"step-00000003 {said}") == 1
    assert measured("run") == measured(undisturbed)


def test_changed_settings_are_logged_with_both_values(at_step: Any, capsys: Out) -> None:
    at_step(3, send(signal.SIGTERM))
    assert train("--out", "run") == 0
    Path("data.txt").write_text(Path("data.txt").read_text() + "and more")
    assert train("--out", "run", "--resume", "auto", "--lr", 1e-3, "--seed", 7, "--batch-size", 2) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("resume: "))
    assert "batch_size 4 is now 2, seed 0 is now 7, lr 0.004 is now 0.001, the data " in line
    assert line.count("is now") == 4


@pytest.mark.parametrize("flags", [("--steps", 10), ("--steps", 99, "--seconds", 1e-9)])
def test_a_new_run_that_has_nothing_to_train_is_refused(
    flags: tuple[Any, ...], undisturbed: Path, capsys: Any
) -> None:
    """Its checkpoint's steps and seconds count, as in a run that goes on."""
    assert train("--out", "run", "--resume", undisturbed, *flags) == 2
    assert re.search(rf"--resume: .*0010, after which {flags[-2]} \S+ leaves noth", capsys.readouterr().err)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--hidden-size", 32, "size: got 32, where .*03 was trained with 16, .* run: pass --hidden-size 16"),
        ("--num-layers", 2, "layers: got 2, where .*03 was trained with 1, .* run: pass --num-layers 1"),
        ("--seq-length", 8, "got a checkpoint of another model.* pass --hf and --lora, or --num-layers"),
        ("--optimizer", "sgd", "0003: 'embed.tok.weight': got opt.*load it with the optimizer that saved"),
    ],
)
def test_another_model_is_refused_and_nothing_changes(
    flag: str, value: Any, message: str, at_step: Any, capsys: Any
) -> None:
    at_step(3, send(signal.SIGTERM))
    assert train("--out", "run") == 0
    before = files("run")
    capsys.readouterr()
    assert train("--out", "run", "--resume", "auto", flag, value) == 2
    assert re.search(message, capsys.readouterr().err)
    assert files("run") == before


@pytest.mark.parametrize(("resume", "out"), [("auto", "run"), ("run", "new")])
def test_the_model_of_a_run_is_asked_for(resume: str, out: str, undisturbed: Path, capsys: Out) -> None:
    """Before the data: chats would be refused for want of its template."""
    shutil.copytree(undisturbed, "run")
    add_to_saved({"hf": "model"}, Path("run/checkpoints/step-00000010"))
    write_jsonl(Path("data.jsonl"), {"messages": [{"role": "assistant", "content": "a"}]})
    assert train("--out", out, "--resume", resume, "--data", "data.jsonl") == 2
    err = capsys.readouterr().err
    assert re.search("--hf: got none, where .*0010 was trained with model, .* run: pass --hf model\n", err)


def test_auto_starts_a_new_run(capsys: Out) -> None:
    Path("empty").mkdir()
    Path("killed").mkdir()  # before its config was written
    Path("killed/metrics.jsonl").touch()
    Path("killed/.config.json.77.partial").write_text('{"sett')
    for out in ("empty", "killed"):
        assert train("--out", out, "--resume", "auto", "--steps", 2) == 0
        assert f"no checkpoint in {out} yet: starting at the first step" in capsys.readouterr().out
        assert [row["step"] for row in rows(out)] == [0, 1, 2]
        assert config(out)["resumed_from"] is None


# --- the clock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "seconds", "step", "elapsed", "why"),
    [
        (10, None, 9, 1e9, INTERRUPT),
        (10, None, 10, 1.0, "steps"),
        (10, 5.0, 9, 4.9, INTERRUPT),
        (10, 5.0, 9, 5.0, "seconds"),
        (10, 5.0, 10, 5.0, "steps"),  # all that were requested
        (None, 5.0, 10**6, 4.9, INTERRUPT),
        (None, 5.0, 1, 5.1, "seconds"),
    ],
)
def test_what_ends_a_training(
    steps: int | None, seconds: float | None, step: int, elapsed: float, why: str
) -> None:
    settings = TrainSettings(steps=steps, seconds=seconds)
    assert end_reason(settings, step, elapsed, stopping=INTERRUPT) == why


def test_a_checkpoint_has_the_seconds_of_all_sessions() -> None:
    """And those that were written before had more: losses, and what the pace was counted from."""
    settings = TrainSettings(steps=1000, seconds=100.0)
    for older in ({}, {"skipped": 1, "losses": [2.0, None]}, {"total": 400, "looks": 2, "cold": 3.5}):
        extra = json.loads(json.dumps(saved_extra(settings, 60.0, ("data",))))
        extra["train"] |= older
        assert elapsed_in(extra) == 60.0
        assert not list(changed_settings(extra, settings, ("data",)))
    assert elapsed_in({}) == 0


@pytest.mark.parametrize("value", [-1, "many", None, True, [1]])
def test_a_damaged_clock_is_refused(value: Any) -> None:
    extra = saved_extra(TrainSettings(), 0.0, ())
    extra["train"]["elapsed"] = value
    with pytest.raises(CheckpointError, match="extra.train.elapsed: got"):
        elapsed_in(extra)


# --- other ends ------------------------------------------------------------------------------------------


def test_a_run_by_the_clock_ends_with_its_seconds(at_step: Any, capsys: Out) -> None:
    """There is no last step to decay to, which is said."""
    given = ("--seconds", 1, "--eval-every", 0, "--out", "run", "--resume", "auto")
    at_step(10, send(signal.SIGTERM))
    assert small_trainings.train(*given) == 0
    first = summary("run")
    assert small_trainings.train(*given) == 0
    out = capsys.readouterr().out
    assert out.count("learning rate: --seconds alone says no last step to fall to: it stays") == 2
    assert re.search(r"goes on after step \d+, \d+\.\d of 1 s\n", out)
    end = summary("run")
    assert (first["ended"], end["ended"]) == ("terminated", "seconds")
    assert first["seconds"] < end["seconds"] < 15
    assert [row["step"] for row in rows("run")] == list(range(1, end["steps"] + 1))
    assert [row["lr"] for row in rows("run")] == [
        pytest.approx(4e-3 * min(1, n / 150)) for n in range(1, end["steps"] + 1)
    ]


def test_seconds_end_a_run_and_change_none_of_its_steps(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """The learning rate is that of the steps; with more seconds the run goes on as if it had never ended."""
    clock = itertools.count()  # a second a look
    monkeypatch.setattr("zfunc.train.loop.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    assert train("--out", "run", "--seconds", 21) == 0
    end, seen = summary("run"), measured("run")
    assert (end["ended"], 4 < end["steps"] < 10) == ("seconds", True)
    taken = [{k: row[k] for k in row if not k.startswith("held_out")} for row in seen]
    assert taken == [
        {k: row[k] for k in taken[n]} for n, row in enumerate(measured(undisturbed)[: len(seen)])
    ]
    before = files("run")
    assert train("--out", "run", "--seconds", 21, "--resume", "auto") == 0
    assert "nothing is left to train without more --steps, --epochs or --seconds" in capsys.readouterr().out
    assert files("run") == before
    assert train("--out", "run", "--seconds", 999, "--resume", "auto") == 0
    assert measured("run") == measured(undisturbed)


# --- ranks -----------------------------------------------------------------------------------------------


def test_the_store_of_a_restart_has_nothing_of_the_run_before() -> None:
    shared = dist.HashStore()
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(lambda rank: fresh_store(shared, rank, 3), range(3)))
        assert not any(store.check(["address"]) for store in stores)
        stores[1].set("address", "here")
        assert all(store.get("address") == b"here" for store in stores)
    shared.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match="no word from ranks 1, 2, expected all 3"):
        fresh_store(shared, 0, 3)


STAGED = ("--pp", 2, "--order", "DualPipeV", "--micro-batches", 2, "--num-layers", 2)
ON_DISK = ("--state-on", "disk", "--params-on", "disk", "--grads-on", "disk", "--commit-every", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "saves"),
    [((), ("--save-every", 10)), (STAGED, ("--save-every", 10)), (STAGED, ON_DISK)],
    ids=["ranks", "stages", "stages on the disk"],
)
def test_torchrun_restarts_after_a_killed_rank_and_the_bits_are_the_same(
    given: tuple[object, ...], saves: tuple[object, ...]
) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 3)
    more = (*given, *saves, "--steps", 60, "--eval-every", 25, "--resume", "auto")
    folders = [Path(f"swap-{out}") for out in ("killed", "whole")]
    for folder in folders:
        folder.mkdir()
    runs = [
        start(
            *JOB,
            "--out",
            folder.name[5:],
            *more,
            *(["--swap", folder] if saves is ON_DISK else []),
            launch=launch,
        )
        for folder in folders
    ]
    try:
        wait_for_rows("killed", 31, runs[0])
        os.kill(rank_of(runs[0].pid, 1), signal.SIGKILL)
        outputs = [run.communicate(timeout=300) for run in runs]
    finally:
        for run in runs:
            run.terminate()  # which torchrun hands on to its ranks
            run.communicate()
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert "goes on after step " in outputs[0][0]
    assert measured("killed") == measured("whole")
    assert summary("killed")["sample"] == summary("whole")["sample"]


@pytest.mark.slow
def test_two_stages_of_two_ranks_have_the_bits_of_two_ranks_and_each_resumes_the_other() -> None:
    given = (*JOB, "--micro-batches", 2, "--num-layers", 2, "--save-every", 5, "--resume", "auto")
    ways = {"staged": (4, ("--pp", 2, "--order", "DualPipeV")), "plain": (2, ())}
    for way, last in (("staged", 10), ("plain", 10), ("staged", 16), ("plain", 16)):
        out = {"staged": "plain", "plain": "staged"}[way] if last == 16 else way
        count, more = ways[way]
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count)
        run = start(*given, *more, "--lr-schedule", "constant", "--steps", last, "--out", out, launch=launch)
        said = run.communicate(timeout=300)
        assert run.returncode == 0, said
    assert measured("staged") == measured("plain")
    assert summary("staged")["sample"] == summary("plain")["sample"]
    assert "the first of 2 stages" in Path("plain/timeline.svg").read_text()  # by those stages, last


def test_stages_without_ranks_are_refused(capsys: Out) -> None:
    assert train("--pp", 2) == 2
    assert "--pp: got 2 stages for 1 rank, expected a number" in capsys.readouterr().err


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank that a launcher has started."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    raise ProcessLookupError(f"no child of {launcher} has rank {rank}")


# --- the best checkpoint, and early stopping --------------------------------------------------------------

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.1, 10: 1.9}  # held out, by step, in nats


@pytest.fixture
def held_out_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations say LOSSES."""

    def evaluate(job: Any, program: Any, state: Any, stop: Any) -> float:
        return LOSSES.get(state.batches, 5.0)

    monkeypatch.setattr("zfunc.train.loop.evaluate_held_out", evaluate)


BEST = ("--eval-every", 2, "--keep-best", "--keep", 1)


@pytest.mark.usefixtures("held_out_losses")
@pytest.mark.parametrize("failing", [6, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8))])
def test_the_best_checkpoint_is_kept_by_a_run_that_is_resumed(
    failing: int, at_step: Any, capsys: Out
) -> None:
    steps, stopping = ("--save-every", 3, "--steps", 9), ("--early-stopping", 3)
    assert train(*BEST, *steps, "--out", "whole") == 0
    assert checkpoints("whole") == ["step-00000004", "step-00000009"]
    assert {x["step"]: x["saved"][-1] for x in rows("whole") if "saved" in x} == {
        n: str(n) for n in (2, 3, 4, 6, 9)
    }
    at_step(failing, fail)
    assert train(*BEST, *steps, "--out", "run") == 1
    assert train(*BEST, *steps, "--out", "run", "--resume", "auto") == 0
    assert checkpoints("run") == checkpoints("whole")
    assert [row.get("saved") for row in rows("run")] == [row.get("saved") for row in rows("whole")]
    assert measured("run") == measured("whole")
    assert summary("run")["best"] == "step-00000004"
    assert "after step 4, in run/checkpoints/step-00000004" in capsys.readouterr().out
    assert main(["export", "run", "--out", "weights.safetensors"]) == 0
    assert "of step 4 " in capsys.readouterr().out
    # It is resumed from the newest, and the evaluations of all sessions count
    assert train(*BEST, *stopping, "--out", "run", "--resume", "auto", "--steps", 20) == 0
    assert (summary("run")["ended"], summary("run")["steps"]) == ("early stopping", 16)
    assert checkpoints("run") == ["step-00000010", "step-00000016"]


@pytest.mark.usefixtures("held_out_losses")
@pytest.mark.parametrize("failing", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8))])
def test_a_run_stops_early_wherever_it_was_resumed(failing: int, at_step: Any, capsys: Out) -> None:
    stopping = ("--eval-every", 2, "--early-stopping", 2, "--save-every", 1, "--steps", 20)
    at_step(failing, fail)
    assert train(*stopping, "--out", "run") == 1
    for _ in range(2):  # a run that ended stays so
        assert train(*stopping, "--out", "run", "--resume", "auto") == 0
        assert (summary("run")["ended"], summary("run")["steps"]) == ("early stopping", 8)
        assert checkpoints("run") == ["step-00000007", "step-00000008"]
    assert "nothing is left to train without more --early-stopping" in capsys.readouterr().out
    assert train(*stopping, "--out", "run", "--resume", "auto", "--early-stopping", 3) == 0
    assert (summary("run")["ended"], summary("run")["steps"]) == ("early stopping", 16)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"keep_best": True, "eval_every": 0}, "keep_best: got it with `eval_every=0`"),
        ({"early_stopping": 1, "eval_every": 0}, "early_stopping: got it with `eval_every=0`"),
        ({"early_stopping_threshold": 0.1}, "without `early_stopping`"),
        ({"keep_best": True, "save_every": 0}, "keep_best: got it with save_every=0"),
        (
            {"keep_best": True, "state_on": "disk", "swap": ("swap",)},
            "keep_best: got it with state_on='disk'",
        ),
    ],
)
def test_what_has_no_best_checkpoint_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainSettings(**given)
