"""What the commands refuse, and how they say it: on one screen, with the flag, what was got, and what to do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from zfunc.cli import catalogue
from zfunc.cli.main import main
from zfunc.cli.parser import as_typed, shortened
from zfunc.train.setup import _fast_precision, resolve_settings

Out = pytest.CaptureFixture[str]
TINY = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
TINY = [*TINY, "--batch-size", "4"]
HUGE = "99999999999999999999"


@pytest.fixture(autouse=True)
def an_area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong, each in a file or folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("empty").mkdir()
    Path("used").mkdir()
    Path("used/kept.txt").write_text("precious")
    Path("empty.txt").touch()
    Path("empty.toml").touch()
    Path("empty.json").touch()
    Path("short.txt").write_text("so little. " * 40)
    Path("tokens.bin").write_bytes(np.arange(2000, dtype="<u2").tobytes())
    Path("odd.bin").write_bytes(b"123")
    for name in ("bytes.toml", "bytes.json"):
        Path(name).write_bytes(b"\xff\xfe\xfd")
    Path("cut.jsonl").write_text('{"text": "a"}\n{"text": \n')
    Path("cut.toml").write_text("a = [\n")
    Path("list.json").write_text("[1, 2]")
    Path("unknown.json").write_text('{"train_batch_sizes": 4}')
    Path("cut-run").mkdir()
    Path("cut-run/config.json").write_text('{"settings": {"num_layers"')


def refused(capsys: Out, *args: str) -> str:
    """What an error says. Its form is the same everywhere."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"zfunc {args[0]}: error: ")
    assert err.count("\n") <= 12
    assert max(map(len, err.splitlines())) <= 1000
    assert "Traceback" not in out + err
    assert "got " in err or "--config: " in err
    assert any(words in err for words in ("expected ", "did you mean ", "See zfunc "))
    return err


# --- zfunc train -------------------------------------------------------------------------------------------

TRAIN = {
    "unknown schedule": (["--schedule", "Overlaped"], ["Overlaped", "expected one of", "'Overlapped'"]),
    "unknown precision": (["--precision", "fp61"], ["fp61", "expected one of", "did you mean"]),
    "unknown device": (["--device", "cud"], ["cud", "expected", "'cuda'"]),
    "unknown recompute": (["--recompute", "mincut"], ["mincut", "'min-cut'"]),
    "heads": (["--hidden-size", "17"], ["17", "expected a multiple", "16 or 18"]),
    "micro-batches": (["--micro-batches", "3"], ["got 4", "expected a multiple", "3 or 6"]),
    "no steps": (["--steps", "0"], ["--steps: got 0", "at least 1"]),
    "negative layers": (["--num-layers", "-2"], ["--num-layers: got -2", "at least 1"]),
    "no learning rate": (["--lr", "0"], ["--lr: got 0", "above 0"]),
    "a learning rate of nan": (["--lr", "nan"], ["--lr: got nan", "finite"]),
    "a learning rate past all": (["--lr", "1e400"], ["--lr: got inf", "finite"]),
    "negative clip": (["--clip", "-1"], ["--clip: got -1", "0 or above"]),
    "dropout": (["--dropout", "1"], ["--dropout: got 1", "below 1"]),
    "negative seconds": (["--seconds", "-5"], ["--seconds: got -5", "above 0"]),
    "not a number": (["--steps", "many"], ["error: --steps: got 'many'", "expected a whole number"]),
    "many digits": (["--steps", "9" * 5000], ["--steps: got '999", "5,000 letters"]),
    "no value": (["--lr"], ["--lr: got no value", "--lr=VALUE"]),
    "a value too many": (["--compile-segments=yes"], ["--compile-segments: got the value 'yes'", "switch"]),
    "warm-up": (["--steps", "5", "--warmup", "5"], ["--warmup: got 5 of 5", "expected fewer"]),
    "bucket of nothing": (["--bucket-size", "0"], ["--bucket-size: got 0", "at least 1"]),
    "a seed past all": (["--seed", HUGE], ["--seed: got 9999", "at most 9223372036854775807"]),
    "unknown option": (["--num-layer", "3"], ["--num-layer", "no option", "'--num-layers'"]),
    "another's option": (["--json"], ["'--json', which is no option of this command, but one of zfunc plan"]),
    "a word": (["texts"], ["got 'texts'", "options begin with --"]),
    "no such data": (["--data", "nowhere"], ["--data: got nowhere", "does not exist"]),
    "data of no name": (["--data", ""], ["--data: got ''", "name it"]),
    "empty folder": (["--data", "empty"], ["--data: got no text", "expected at least one file"]),
    "empty file": (["--data", "empty.txt"], ["--data: got empty.txt, which is empty"]),
    "a line cut short": (["--data", "cut.jsonl"], ["--data: cut.jsonl, line 2"]),
    "short data": (
        ["--data", "short.txt", "--seq-length", "100"],
        ["tokens for --seq-length 100", "shorter"],
    ),
    "vocabulary of bytes": (
        ["--data", "short.txt", "--vocab-size", "99"],
        ["--vocab-size: got 99", "read as bytes", "256"],
    ),
    "token past the vocabulary": (
        ["--data", "tokens.bin", "--vocab-size", "10"],
        ["expected tokens below --vocab-size 10"],
    ),
    "half a token": (["--data", "odd.bin"], ["multiple of 2", "check that the file is complete"]),
    "out in a file": (["--out", "short.txt/run"], ["--out: got short.txt/run", "cannot be written"]),
    "out in use": (["--out", "used"], ["--out: got used", "holds files already", "name another"]),
    "no such configuration": (["--config", "nowhere"], ["--config: nowhere: No such file"]),
    "an empty configuration": (["--config", "empty.json"], ["--config: empty.json: got nothing"]),
    "a configuration of bytes": (["--config", "bytes.json"], ["--config: bytes.json: got bytes"]),
    "a configuration that is a folder": (["--config", "empty"], ["--config: empty: Is a directory"]),
    "a configuration that is a list": (["--config", "list.json"], ["--config: list.json: got a list"]),
    "a configuration's key": (["--config", "unknown.json"], ["'train_batch_sizes'", "'train_batch_size'"]),
    "no such tokenizer": (["--tokenizer", "nowhere"], ["--tokenizer: got nowhere, which cannot be read"]),
    "a tokenizer that is none": (["--tokenizer", "list.json"], ["--tokenizer: got list.json, which cannot"]),
    "no such checkpoint": (["--resume", "nowhere"], ["--resume: ", "got nothing there"]),
    "a run without checkpoints": (["--resume", "empty"], ["--resume: ", "got no checkpoint in it"]),
    "to go on from nothing": (["--resume", "auto"], ["--resume auto: got no --out", "--out run"]),
    "late and early": (
        ["--delay-from", "1", "--speculate", "2"],
        ["--speculate: got 2 with --delay-from 1"],
    ),
}


@pytest.mark.parametrize("name", TRAIN)
def test_train_refuses(name: str, capsys: Out) -> None:
    args, told = TRAIN[name]
    given = args if "--data" in args else ["--data", "short.txt", *args]
    given = given if "--steps" in args or "--seconds" in args else [*given, "--steps", "2"]
    err = refused(capsys, "train", *TINY, *given)
    for words in told:
        assert words in err
    assert not list(Path("runs").glob("*")), "what was refused leaves no folder"
    assert Path("used/kept.txt").read_text() == "precious"


def test_a_folder_that_is_no_hugging_face_model(capsys: Out) -> None:
    pytest.importorskip("transformers")
    for name in ("nowhere", "empty", "short.txt"):
        err = refused(capsys, "train", "--hf", name, "--data", "short.txt", "--steps", "1")
        assert f"--hf: {name}: got no config.json" in err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--num-layers", "100000000"], "a model of"),
        (["--hidden-size", "10000000000", "--num-attention-heads", "1"], "a model of"),
        (["--batch-size", "1000000000000"], "a batch of"),
    ],
)
@pytest.mark.parametrize("command", ["train", "calibrate"])
def test_absurd_sizes_are_refused_by_arithmetic(
    command: str, flags: list[str], told: str, capsys: Out
) -> None:
    assert main([command, *flags, "--out", "machine.toml"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "bytes of host memory" in err


def test_a_model_that_was_not_trained_is_refused_by_the_flag(capsys: Out) -> None:
    pytest.importorskip("transformers")
    assert main(["train", *TINY, "--data", "short.txt", "--steps", "1", "--out", "run"]) == 0
    Path("model").mkdir()
    small = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 256,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    Path("model/config.json").write_text(json.dumps({"model_type": "gpt2", **small}))
    Path("unknown").mkdir()
    Path("unknown/config.json").write_text("{}")
    capsys.readouterr()
    for folder, told in (
        ("model", "--hf: got one of a model with "),
        ("unknown", "--hf: Unrecognized model"),
    ):
        assert main(["export", "run", "--hf", folder, "--out", "new"]) == 2
        assert f"zfunc export: error: {told}" in capsys.readouterr().err
    assert not Path("new").exists()


def test_too_little_memory_is_said_before_training(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr("zfunc.engine.program.available_host_bytes", lambda: 1000)
    assert main(["train", *TINY, "--data", "short.txt", "--steps", "2", "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert "bytes of host memory, 1,000 are there" in err
    assert not Path("run").exists()


def test_a_world_size_without_a_rank_is_of_some_other_job(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 4}')
    told = ["train", *TINY[:-2], "--config", "ds.json", "--data", "short.txt", "--steps", "1", "--out", "run"]
    assert main([*told, "--save-every", "0"]) == 0
    assert json.loads(Path("run/config.json").read_text())["settings"]["batch_size"] == 4
    capsys.readouterr()


@pytest.mark.parametrize(
    ("asked", "told"),
    [([], ", because a CPU computes fastest in it"), (["--precision", "fp32"], "")],
)
def test_why_a_precision_is_said_where_it_was_chosen(asked: list[str], told: str, capsys: Out) -> None:
    args = [*TINY, "--device", "cpu", "--data", "short.txt", "--steps", "1", "--save-every", "0", *asked]
    assert main(["train", *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x for x in lines if x.startswith("precision: ")] == [f"precision: fp32{told}"]


@pytest.mark.parametrize(("has", "told"), [(True, "bf16, because"), (False, "fp16, because")])
def test_why_a_gpu_computes_in_16_bits(
    has: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """The choice of a GPU with and without bf16, made for a CPU that then trains in it."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: has)
    monkeypatch.setattr(
        "zfunc.train.setup.resolve_settings",
        lambda s: attrs.evolve(resolve_settings(s), precision=_fast_precision()),
    )
    args = [*TINY, "--device", "cpu", "--data", "short.txt", "--steps", "1", "--save-every", "0"]
    assert main(["train", *args]) == 0
    out = capsys.readouterr().out
    assert f"precision: {told} a GPU computes fastest in " in out
    assert ("this one has no bf16" in out) == (not has)


# --- the others --------------------------------------------------------------------------------------------

OTHERS = [
    ("plan --hardware nowhere", "--hardware: got 'nowhere', which is no profile and no file"),
    ("plan --hardware empty", "--hardware: got 'empty', which is no profile and no file"),
    ("plan --hardware empty.toml", "--hardware: empty.toml: [count] devices: got no figure"),
    ("plan --hardware bytes.toml", "--hardware: got bytes.toml, which is no text"),
    ("plan --hardware cut.toml", "--hardware: cut.toml: got Invalid value"),
    ("plan --precision bf16", "--precision: got 'bf16' with --hardware v100-32gb"),
    (f"plan --num-layers {HUGE}", "--num-layers: got 1e+20 layers, expected at most 1e+04"),
    (f"plan --hidden-size {HUGE} --num-attention-heads 1", "--hidden-size, --num-layers, --vocab-size: got"),
    (f"plan --vocab-size {HUGE}", "parameters, expected at most 1e+17"),
    (f"plan --batch-size {HUGE}", "--batch-size, --seq-length: got"),
    (f"plan --seq-length {HUGE}", "elements of an activation, expected at most 1e+17"),
    ("plan --json=yes", "--json: got the value 'yes'"),
    ("draw --hardware bytes.toml", "--hardware: got bytes.toml, which is no text"),
    ("draw --hardware rtx4090 --precision fp61", "--precision: got 'fp61'"),
    (f"draw --num-layers {HUGE}", "--num-layers: got 1e+20 layers"),
    (f"draw --seq-length {HUGE}", "elements of an activation"),
    ("draw --compare nowhere", "--compare: got nowhere without a plan.txt"),
    ("draw --compare short.txt", "--compare: got short.txt without a plan.txt"),
    ("draw --compute-tflops nan", "--compute-tflops: got nan"),
    ("draw --out empty", "--out: got empty, which cannot be written"),
    ("calibrate --out no/x.toml", "--out: got no/x.toml, expected a file in a folder that is there"),
    ("calibrate --out x.txt", "--out: got x.txt, expected a name that ends in .toml"),
    ("calibrate --folder short.txt", "--folder: got short.txt, expected a folder"),
    ("calibrate --turns 0", "--turns: got 0"),
    ("top", "got no RUN, expected one"),
    ("top nowhere", "got nowhere without a config.json"),
    ("top short.txt", "got short.txt without a config.json"),
    ("top cut-run --once", "cut-run"),
    ("top . --every nan", "--every: got nan"),
    ("report empty", "got empty without a config.json"),
    ("report cut-run", "cut-run"),
    ("report a b", "got 'b' where an option was expected"),
    ("export used", "--out: got none"),
    ("export used --out used/kept.txt", "--out: got used/kept.txt, expected the name of a file that ends in"),
    ("export empty --out a.safetensors", "empty: got no checkpoint in it"),
    ("export empty --hf used --out new", "--hf: got used with no config.json in it"),
    ("doctor --jsn", "did you mean '--json'?"),
    ("completion csh", "did you mean 'zsh'?"),
    ("completion", "got no bash|zsh|fish, expected one"),
]


@pytest.mark.parametrize(("line", "told"), OTHERS, ids=[line[:50] for line, _ in OTHERS])
def test_the_others_refuse(line: str, told: str, capsys: Out) -> None:
    assert told in refused(capsys, *line.split())


def test_every_command_is_asked_for_what_is_wrong() -> None:
    assert {line.split()[0] for line, _ in OTHERS} | {"train"} == catalogue.COMMANDS.keys()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["trian"], "did you mean 'train'?"),
        (["--bogus"], "got '--bogus', which is no option of zfunc itself"),
        (["--debug"], "got no command, expected one of train, plan"),
        ([""], "got the command ''"),
        (["\udcff"], r"got the command '\udcff'"),
    ],
)
def test_what_is_no_command(args: list[str], told: str, capsys: Out) -> None:
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("zfunc: error: ")
    assert told in err
    assert err.endswith("See zfunc --help\n")


# --- what is missing, or in the way ------------------------------------------------------------------------


def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    for args in (
        ["train", "--hf", "model", "--data", "short.txt"],
        ["export", "empty", "--hf", "model", "--out", "x"],
    ):
        assert "pip install 'zfunc[hf]'" in refused(capsys, *args)


def test_without_torch_that_is_said() -> None:
    code = "import sys\nfrom zfunc.cli.main import main\n"
    code += "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]"
    done = _python(f"{code}\nsys.exit(main(['doctor']))")
    assert done.returncode == 2
    assert done.stderr.startswith("zfunc doctor: error: got no package ")
    assert "pip install " in done.stderr


@pytest.mark.parametrize("order", [["--debug", "train"], ["train", "--debug"]])
def test_the_traceback_is_shown_for_who_asks(order: list[str], capsys: Out) -> None:
    assert main([*order, "--data", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "zfunc train: error: --data: got nowhere" in err


def test_a_fault_of_zfuncs_own_is_a_failure_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("zfunc.train.history.read_history", fail)
    assert main(["report", "empty"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("zfunc report: error: KeyError: 'lost'")
    assert "--debug" in err


def test_an_error_of_many_lines_fits_on_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("got \x1b[2J" + "\n".join("x" * 5000 for _ in range(100)))

    monkeypatch.setattr("zfunc.train.history.read_history", fail)
    assert main(["report", "empty"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) < 1100
    assert lines[-1] == "... and 80 lines more, with --debug"
    assert "\x1b" not in "".join(lines)


def test_errors_of_the_system_say_the_path(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "run/metrics.jsonl")

    monkeypatch.setattr("zfunc.train.history.read_history", fail)
    assert "run/metrics.jsonl: got 'Permission denied' from the system" in refused(capsys, "report", "empty")


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_an_environment_that_is_none(variable: str, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setenv(variable, "two")
    assert f"{variable}: got 'two'" in refused(capsys, "train", *TINY, "--data", "short.txt", "--steps", "1")


def test_arguments_of_calls_are_told_as_flags() -> None:
    options = catalogue.COMMANDS["export"].options
    assert as_typed("checkpoint: got none", options) == "CHECKPOINT: got none"
    assert as_typed("out: got x with dtype='fp32'", options) == "--out: got x with --dtype 'fp32'"
    assert as_typed("it says: out=3 and lr=3", options) == "it says: --out 3 and lr=3"
    assert as_typed("got 9 tokens for (out=3)", options) == "got 9 tokens for (--out 3)"
    assert shortened("x" * 120) == "x" * 120


@pytest.mark.parametrize(
    "path", ["sweep/lr=3e-4/seed=1", "lr=3", "seed=1/data='x'", "a b/lr=3/x.y", "runs/data=x/"]
)
def test_paths_are_told_as_they_were_typed(path: str, capsys: Out) -> None:
    Path(path).mkdir(parents=True)
    Path(path, "kept.txt").touch()
    wanted = str(Path(path))
    train = ["train", *TINY, "--data", "short.txt", "--steps", "1"]
    for command in (
        [*train, "--out", path],
        [*train, "--resume", path],
        ["report", path],
        ["calibrate", "--out", f"{path}/no/x.toml"],
    ):
        assert wanted in refused(capsys, *command)
    Path(path, "cut.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert f"{wanted}/cut.jsonl, line 2" in refused(capsys, *train, "--data", f"{path}/cut.jsonl")


# --- streams and signals -----------------------------------------------------------------------------------


def _python(code: str, **given: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **given)


def _shell(line: str) -> "subprocess.CompletedProcess[str]":
    whole = line.replace("ZFUNC", f"{sys.executable} -m zfunc")
    return subprocess.run(["bash", "-c", f"set -o pipefail; {whole}"], capture_output=True, text=True)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    done = _shell("ZFUNC completion bash | true")
    assert done.returncode == 1
    assert done.stderr == ""


def test_output_that_the_caller_has_closed_goes_nowhere() -> None:
    assert _shell("ZFUNC completion bash >&-").returncode == 0
    assert _shell("ZFUNC report nowhere >&- 2>&-").returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_failure_that_is_told() -> None:
    done = _shell("ZFUNC completion bash > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("zfunc completion: error: got 'No space left on device' while printing")
    assert done.stderr.count("\n") == 1


def test_names_that_are_no_text_are_spelled_out() -> None:
    done = _shell(r"ZFUNC report $'\xff\e[31m'")
    assert done.returncode == 2
    assert r"got \udcff\x1b[31m without a config.json" in done.stderr


def test_ctrl_c_of_a_command_that_only_computes_is_130(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    """Also where the tests themselves ignore it: a script starts its background jobs so."""
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("zfunc.train.history.read_history", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        assert main(["report", "nowhere"]) == 130
    finally:
        signal.signal(signal.SIGINT, ours)
    assert capsys.readouterr().err == "zfunc report: stopped at once\n"
