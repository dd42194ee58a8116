"""What the commands refuse, and how they say it: on one screen, with the flag, what was got, and what to do."""

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from small_trainings import ON_DATA, config, start, summary, train

from zfunc.__main__ import main as started
from zfunc.checkpoint.durable_files import locked
from zfunc.cli import catalogue
from zfunc.cli.main import main
from zfunc.options import flag
from zfunc.runtime.accelerator import best_precision
from zfunc.train.setup import resolve_settings

Out = pytest.CaptureFixture[str]
FILES: dict[str, str | bytes] = {
    "used/kept.txt": "precious",
    "empty.txt": "",
    "empty.toml": "",
    "empty.json": "",
    "short.txt": "so little. " * 40,
    "tokens.bin": np.arange(2000, dtype="<u2").tobytes(),
    "odd.bin": b"123",
    "bytes.toml": b"\xff\xfe\xfd",
    "bytes.json": b"\xff\xfe\xfd",
    "cut.jsonl": '{"text": "a"}\n{"text": \n',
    "chat.jsonl": '{"messages": [{"role": "assistant", "content": "a"}]}',
    "cut.toml": "a = [\n",
    "list.json": "[1, 2]",
    "unknown.json": '{"train_batch_sizes": 4}',
    "twice.json": '{"train_batch_size": 4, "train_batch_size": 8}',
    "ds.json": """{"train_batch_size": 4, "gradient_accumulation_steps": "auto", "fp16": {"enabled": true},
        "optimizer": {"type": "Adam", "params": {"lr": 0.002, "weight_decay": 0.1}}, "gradient_clipping": 0.5}""",
    "cut-run/config.json": '{"settings": {"num_layers"',
    "broken/config.json": '{"settings": {}, "plan": {}}',
    "broken/checkpoints/step-00000003/none": "",
    "model/config.json": '{"architectures": []}',
    "whole/optimizer.pt": "",
}
HUGE = "99999999999999999999"


@pytest.fixture(autouse=True)
def wrong_files(own_folder: Path) -> None:
    """What is wrong, each in a file or folder of its own."""
    for name, content in FILES.items():
        path = own_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    Path("empty").mkdir()
    Path("loop").symlink_to("loop")


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
    known = catalogue.COMMANDS.get(args[0])
    names = "|".join(known.options) if known else "x"
    rest = err
    for typed in " ".join(args).replace("/", " ").split():  # a path stays as it is
        rest = rest.replace(typed, "") if "=" in typed else rest
    assert not re.findall(rf"(?:^|[ (])(?:{names})=(?!=)", rest), "Python's spelling of an option"
    return err


# --- what is refused ---------------------------------------------------------------------------------------

MESSAGES: list[tuple[str, ...]] = [  # what is typed, and what is said
    ("train --schedule Overlaped", "Overlaped", "expected one of", "'Overlapped'"),
    ("train --precision fp61", "fp61", "expected one of", "did you mean"),
    ("train --device cud", "cud", "expected", "'cuda'"),
    ("train --recompute mincut", "mincut", "'min-cut'"),
    ("train --hidden-size 17", "17", "expected a multiple", "try --hidden-size 16"),
    ("train --micro-batches 3", "got 4", "expected a multiple", "try --batch-size 3"),
    ("train --steps 0", "--steps: got 0", "at least 1"),
    ("train --num-layers -2", "--num-layers: got -2", "at least 1"),
    ("train --lr 0", "--lr: got 0", "above 0"),
    ("train --lr nan", "--lr: got nan", "finite"),
    ("train --lr 1e400", "--lr: got inf", "finite"),
    ("train --clip -1", "--clip: got -1", "of at least 0: pass 0 to go without"),
    ("train --dropout 1", "--dropout: got 1", "below 1"),
    ("train --seconds -5", "--seconds: got -5", "above 0"),
    ("train --steps many", "error: --steps: got 'many'", "expected a whole number"),
    (f"train --steps {'9' * 5000}", "--steps: got '999", "999..."),
    ("train --lr", "--lr: got no value", "--lr=VALUE"),
    ("train --compile-segments=yes", "--compile-segments: got the value 'yes'", "switch"),
    ("train --epochs 2 --steps 5", "--epochs: got 2 with --steps 5, expected one of them"),
    ("train --epochs 0 --seconds 5", "--epochs: got 0", "above 0"),
    ("train --lr-schedule cosin", "cosin", "'cosine'"),
    ("train --eval-data empty.txt", "--eval-data: got empty.txt, which is empty"),
    ("train --eval-data tokens.bin", "tokens.bin, which is read as tokens, with --data that is bytes"),
    ("train --steps 5 --warmup 5", "--warmup: got 5 of 5", "expected fewer"),
    ("train --bucket-size 0", "--bucket-size: got 0", "at least 1"),
    (f"train --seed {HUGE}", "--seed: got 9999", "at most 9223372036854775807"),
    ("train --num-layer 3", "--num-layer", "no option", "'--num-layers'"),
    ("train --json", "got '--json', which is no option of zfunc train"),
    ("train texts", "got 'texts'", "options begin with --"),
    ("train --learning_rate=3", "got '--learning_rate', which is no option of zfunc train: write --lr"),
    ("train --qlora", "which is no option of zfunc train: write --quantize nf4 with --lora 16"),
    ("train --batch_size 4", "got '--batch_size', which is no option of zfunc train: write --batch-size"),
    ("plan --config ds.json", "'--config', which is no option of zfunc plan (did", "), but of zfunc train\n"),
    ("report --hf model", "'--hf', which is no option of zfunc report, but of zfunc train, plan, draw"),
    ("plan --ranks 2", "which is no option of zfunc plan: write torchrun --nproc-per-node N"),
    ("draw --d2h-gbs 2", "'--d2h-gbs', which is gone: name a profile with --hardware"),
    ("train --delay-from 100", "'--delay-from', which is gone: pass defer, which hides the host"),
    ("train --log-style deepspeed", "which is gone: metrics.jsonl in the run folder"),
    ("train --data nowhere", "--data: got nowhere, which does not exist", ": check the path"),
    (
        "train --data used/*.jsonl",
        "which does not exist, ",
        ": name the folder, as patterns are for --stream",
    ),
    ("train --data=", "--data: got ''", "name it"),
    ("train --data /", "--data: got '/'", "name it"),
    ("train --data empty", "--data: got no text", "expected at least one document"),
    ("train --data empty.txt", "--data: got empty.txt, which is empty"),
    ("train --data cut.jsonl", "--data: cut.jsonl, line 2"),
    ("train --data chat.jsonl", "a chat for bytes, ", "a model that has one with --hf, or with --tokenizer"),
    ("train --data short.txt --seq-length 100", "tokens for --seq-length 100", "shorter"),
    ("train --data short.txt --vocab-size 99", "--vocab-size: got 99", "read as bytes", "256"),
    ("train --data tokens.bin --vocab-size 10", "expected tokens below 10: pass the --vocab-size"),
    ("train --data odd.bin", "multiple of 2", "check that the file is complete"),
    ("train --out short.txt/run", "--out: got short.txt/run", "cannot be written"),
    ("train --out used", "--out: got used", "holds files already", "name another"),
    ("train --out broken", "--out: got broken", "resume the run in it with --resume auto"),
    ("train --tokenizer nowhere", "--tokenizer: got nowhere, which does not exist"),
    ("train --tokenizer model", "--tokenizer: got model/tokenizer.json, which does not exist"),
    ("train --tokenizer list.json", "--tokenizer: got list.json, which cannot"),
    ("train --keep 0", "--keep: got 0, expected a whole number of at least 1"),
    ("train --save-every -1", "--save-every: got -1"),
    ("train --grads-on disk", "--grads-on: got 'disk' with --state-on host, expected --state-on disk: pass"),
    ("train --resume nowhere", "--resume: got nowhere, which does not exist"),
    ("train --resume=", "--resume: ", "got no checkpoint in it"),
    ("train --resume empty", "--resume: ", "got no checkpoint in it"),
    ("train --resume auto", "--resume auto: got no --out", "add such as --out run"),
    ("train --resume auto --out used", "no config.json of a run"),
    ("train --resume auto --out model", "no config.json of a run"),
    ("train --resume auto --out short.txt", "--out: got short.txt, which is no folder, expected"),
    ("train --state-on disk --swap loop", "loop: got something else, expected a folder: mount the drive"),
    ("train --out loop", "--out: got loop, which is no folder, expected"),
    ("train --out loop/run", "--out: got loop/run, which cannot be written (Too many levels"),
    ("train --resume auto --out broken", "got no complete checkpoint"),
    ("train --resume auto --out empty", "in which another process is at work"),
    ("train --config nowhere", "nowhere: got 'No such file"),
    ("train --config empty.json", "empty.json: got Empty strings"),
    ("train --config bytes.json", "bytes.json: got 'utf-8' codec"),
    ("train --config empty", "empty: got 'Is a directory"),
    ("train --config list.json", "list.json: got a list"),
    ("train --config unknown.json", "'train_batch_sizes'", "'train_batch_size'"),
    ("train --config twice.json", "twice.json", 'Duplicate key "train_batch_size"'),
    ("train --config ds.json --lr 1e-2", "--lr: got 0.01, and ds.json says optimizer.params.lr 0.002"),
    ("train --config ds.json --precision bf16", "--precision: got bf16, and ds.json says fp16.enabled True"),
    ("train --config ds.json --batch-size 16", "--batch-size: got 16, and ds.json says train_batch_size 4"),
    ("train --config ds.json --clip 2", "--clip: got 2.0, and ds.json says gradient_clipping 0.5"),
    ("train --config ds.json --weight-decay 0", "--weight-decay: got 0.0, and ds.json says"),
    ("train --config ds.json --micro-batches 3", "got train_batch_size 4, expected 1 x 3 micro-batches"),
    (
        "train --config ds.json --state-on much",
        "--state-on: got 'much', expected one of device, host, disk, auto",
    ),
    ("train --hf nowhere --data short.txt --steps 1", "--hf: nowhere: got no config.json"),
    ("train --hf empty --data short.txt --steps 1", "--hf: empty: got no config.json"),
    ("train --hf short.txt --data short.txt --steps 1", "--hf: short.txt: got no config.json"),
    ("plan --hardware nowhere", "--hardware: got 'nowhere', which is no profile and no file"),
    ("plan --hardware empty", "--hardware: got 'empty', which is no profile and no file"),
    (
        "plan --hardware empty.toml",
        "got empty.toml, expected a profile that zfunc calibrate wrote, and",
        "empty.toml: count.devices: got no figure",
    ),
    ("plan --hardware bytes.toml", "--hardware, --with: got bytes.toml, expected", "codec can't decode"),
    ("plan --hardware cut.toml", "cut.toml: got Invalid value"),
    ("plan --precision bf16", "v100-32gb: got precision 'bf16', expected one it has: use fp32, fp16"),
    *(
        (
            f"plan {flag} {HUGE}",
            f"{flag}: got {HUGE}, expected a whole number of at least 1 and at most {most}: pass",
        )
        for flag, most in {"--num-layers": 10_000, "--vocab-size": 1 << 24, "--batch-size": 1 << 24}.items()
    ),
    ("draw --seq-length 99999999", "--seq-length: got 99999999", "at most 16777216"),
    ("plan --data nowhere", "--data: got nowhere, which does not exist, expected what is to be trained on"),
    ("draw --data nowhere --vocab-size 9", "--data: got nowhere, which does not exist"),
    ("plan --hardware h10", "did you mean 'h100'?"),
    ("plan --schedule critical", "did you mean 'CriticalPath'?"),
    (
        "plan --state-on device:1.2,host",
        "got 'device:1.2,host', expected the share of the device, 0 to 1: pass",
    ),
    ("plan --state-on device:nan,host", "--state-on: got 'device:nan,host'"),
    ("plan --offload-ratio 0.5", "got the option '--offload-ratio', which is gone: pass"),
    ("plan --world 0", "--world: got 0"),
    ("plan --batch-size 4 --world 3", "--batch-size: got 4 for 3 ranks, expected a multiple of 3: try"),
    ("plan --batch-size 4 --world 4 --micro-batches 2", "got 4 for 4 ranks with 2 micro-batches each, expec"),
    ("plan --batch-size 4 --micro-batches 3", "got 4 with --micro-batches 3, expected a multiple of it"),
    ("plan --num-attention-heads 3", "expected a multiple"),
    ("plan --micro-batches 99999999", "at most 65536: pass 65536 or less"),
    (
        "plan --params-on disk",
        "got 'disk' with --state-on host, expected --state-on disk: pass that, or leave it",
    ),
    (
        "plan --ema 1",
        "--ema: got 1.0, expected a finite number above 0 and below 1: pass a decay such as 0.999",
    ),
    (
        "draw --state-on disk",
        "--swap: got no folder with --state-on disk, expected one on each drive to use: pass --s",
    ),
    ("plan --pp 2 --micro-batches 2 --batch-size 2", "--pp: got 2, expected 1 in a plan: pass --devices 2, "),
    ("plan --json=yes", "--json: got the value 'yes'"),
    ("draw --hardware bytes.toml", "got bytes.toml, expected a profile that zfunc calibrate wrote"),
    ("draw --hardware rtx4090 --precision fp61", "--precision: got 'fp61'"),
    ("draw --compare nowhere", "--compare: got nowhere, whose plan.txt cannot be read (No such file"),
    ("draw --compare short.txt", "--compare: got short.txt, whose plan.txt cannot be read (Not a directory"),
    ("draw --compare used --num-layers 3", "--num-layers: got it with --compare, which draws the run's own"),
    ("draw --compare used --precision fp16", "--precision: got it with --compare"),
    ("draw --compare used --hardware h1000", "did you mean 'h100'"),
    ("draw --compare Seriall", "name one that `zfunc train` wrote, or a schedule, CriticalPath, "),
    (
        "draw --compare Serial --schedule Serial",
        "--compare: got Serial, which is drawn already, expected another",
    ),
    (
        "draw --compare Serial --schedule all",
        "--schedule: got all with --compare, expected Serial beside one",
    ),
    ("draw --schedule Seriall", "did you mean 'Serial'?"),
    (
        "draw --live --out x.svg",
        "--out: got x.svg with --live, which is a page, expected a name that ends in .html",
    ),
    ("draw --live --compare Serial", "--compare: got Serial with --live, whose page compares its plans"),
    ("draw --format svg", "'--format', which is gone: the suffix of --out says it: .svg, .html, .json for"),
    ("draw --out x.png", "expected a name that ends in .svg or .html or .json or .txt"),
    ("draw --out no/x.svg", "--out: got no/x.svg, expected a file in a folder that exists"),
    ("draw --out empty", "--out: got empty, expected a file"),
    ("calibrate --out no/x.toml", "--out: got no/x.toml, expected a file in a folder that exists"),
    (
        "calibrate --out /proc/sys/x.toml",
        "--out: got /proc/sys/x.toml, whose folder cannot be written, expected",
    ),
    ("report used --out x.txt", "--out: got x.txt, expected a name that ends in .html"),
    ("calibrate --out x.txt", "--out: got x.txt, expected a name that ends in .toml"),
    ("calibrate --folder short.txt", "--folder: got short.txt, expected a folder"),
    ("calibrate --turns 0", "--turns: got 0, expected a whole number of at least 1"),
    (
        "calibrate --hidden-size 33 --num-attention-heads 2",
        "got 33 with --num-attention-heads 2, expected a m",
    ),
    ("calibrate --batch-size 3 --micro-batches 2", "--batch-size: got 3 with --micro-batches 2"),
    ("calibrate --device tpu", "--device: got 'tpu', expected 'cpu'"),
    ("report", "got no RUN, expected one"),
    ("report nowhere", "got nowhere, whose config.json cannot be read (No such file"),
    ("report short.txt", "got short.txt, whose config.json cannot be read (Not a directory"),
    ("report cut-run --follow", "cut-run/config.json: got invalid JSON"),
    ("report empty", "got empty, whose config.json cannot be read"),
    ("report cut-run", "cut-run/config.json: got invalid JSON"),
    ("report a b", "got 'b' where an option was expected"),
    ("export used", "got no --out, expected one"),
    ("export used --out used/kept.txt", "--out: got used/kept.txt, expected the name of a file that ends in"),
    ("export empty --out a.safetensors", "empty: got no checkpoint in it"),
    ("import empty --out new", "empty: got neither .metadata nor"),
    ("import empty --out new --sequences -5", "--sequences: got -5, expected a whole number of at least 0"),
    ("import empty --out new --text-only", "--text-only: got it without --hf, expected both: add --hf"),
    ("import empty --out new --quantize nf4", "--quantize: got it without --hf, expected both: add --hf"),
    (
        "import whole --out new --hf model --quantize nf4",
        "--quantize: got it for whole, which has no adapter_config.json, expected a run of adapters: name its",
    ),
    ("export empty --hf used --out new", "empty: got no checkpoint in it"),
    ("doctor --foldr x", "did you mean '--folder'?"),
    ("completion csh", "did you mean 'zsh'?"),
    ("completion", "got no bash|zsh|fish, expected one"),
]


@pytest.mark.parametrize("row", MESSAGES, ids=[line[:50] for line, *_ in MESSAGES])
def test_what_is_wrong_is_refused(row: tuple[str, ...], capsys: Out) -> None:
    """And leaves nothing behind. A training that says neither how long nor on what gets both."""
    line, *words = row
    before = set(Path().rglob("*"))
    length = () if "--steps" in line or "--seconds" in line else ("--steps", "2")
    command, *given = line.split(" ")
    on_data = (*ON_DATA, *length) if command == "train" and "--hf" not in line else ()
    with locked(Path("empty")):
        err = refused(capsys, command, *on_data, *given)
    assert [word for word in words if word not in err] == [], err
    new = {path for path in set(Path().rglob("*")) - before if path.parts[0] != "cache"}
    assert new <= {Path("runs")}, "nothing is left of it"


def test_every_command_is_asked_for_what_is_wrong() -> None:
    assert {line.split()[0] for line, *_ in MESSAGES} == catalogue.COMMANDS.keys()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "did you mean 'train'?"),
        (["top", "run", "--once"], "which is gone: watch a running folder with zfunc report RUN --follow"),
        (["--bogus"], "got '--bogus', which is no option of zfunc"),
        (["--debug"], "got no command, expected one of train, plan"),
        ([""], "got the command ''"),
        (["\udcff"], r"got the command '\udcff'"),
    ],
)
def test_what_is_no_command(args: list[str], words: str, capsys: Out) -> None:
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("zfunc: error: ")
    assert words in err
    assert err.endswith("See zfunc --help\n")


@pytest.mark.parametrize("command", ["train", "calibrate"])
def test_absurd_sizes_are_refused_by_arithmetic(command: str, capsys: Out) -> None:
    for flags, what in (
        ("--num-layers 10000 --hidden-size 4096", "a model of"),
        ("--hidden-size 1000000 --num-attention-heads 1", "a model of"),
        ("--batch-size 1000000 --seq-length 1000000", "a batch of"),
    ):
        assert main([command, *flags.split(), "--out", "machine.toml"]) == 2
        err = capsys.readouterr().err
        assert what in err
        assert "bytes of host memory" in err


def test_a_model_that_was_not_trained_is_refused_by_the_flag(capsys: Out) -> None:
    pytest.importorskip("transformers")
    assert train("--steps", 1, "--out", "run") == 0
    small = '"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 16, "bos_token_id": 0'
    Path("model/config.json").write_text(f'{{"model_type": "gpt2", {small}, "eos_token_id": 0}}')
    Path("empty/config.json").write_text("{}")
    for folder, words in (
        ("model", "--hf: got model, whose model has no 'embed.tok.weight' (did"),
        ("empty", "config: empty: got what transformers"),
    ):
        capsys.readouterr()
        assert main(["export", "run", "--hf", folder, "--out", "new"]) == 2
        assert f"zfunc export: error: {words}" in capsys.readouterr().err
    assert not Path("new").exists()


def test_too_little_memory_is_said_before_training(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr("zfunc.engine.program.program.available_host_bytes", lambda: 1000)
    assert train("--steps", 2, "--out", "run") == 2
    assert "bytes of host memory, 1,000 are free" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_world_size_without_a_rank_is_of_some_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 4}')
    assert train("--config", "ds.json", "--steps", 1, "--save-every", 0, "--out", "run") == 0
    assert config("run")["settings"]["batch_size"] == 4


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_computes_in_16_bits(
    has_bf16: bool, precision: str, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """The choice of a GPU with and without bf16, made for a CPU that then trains in it."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: has_bf16)
    monkeypatch.setattr(
        "zfunc.train.setup.resolve_settings",
        lambda s: attrs.evolve(resolve_settings(s), precision=best_precision(torch.device("cuda"))),
    )
    assert train("--device", "cpu", "--steps", 1, "--save-every", 0) == 0
    assert f"precision: {precision}\n" in capsys.readouterr().out


# --- what is missing, or in the way ------------------------------------------------------------------------


def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for line in ("train --hf model --data short.txt", "export empty --hf model --out x"):
        assert 'pip install -e ".[hf]"' in refused(capsys, *line.split())


def test_without_torch_that_is_said() -> None:
    code = "import sys\nfrom zfunc.cli.main import main\n"
    code += "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]"
    done = _python(f"{code}\nsys.exit(main(['doctor']))")
    assert done.returncode == 2
    assert done.stderr.startswith("zfunc doctor: error: package ")
    assert "pip install " in done.stderr


@pytest.mark.parametrize("order", [["--debug", "train"], ["train", "--debug"]])
def test_the_traceback_is_shown_for_who_asks(order: list[str], capsys: Out) -> None:
    assert main([*order, "--data", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "zfunc train: error: --data: got nowhere" in err


@pytest.fixture
def reading_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Lets `zfunc report` raise this."""

    def raising(error: BaseException) -> None:
        def read(*_: Any) -> None:
            raise error

        monkeypatch.setattr("zfunc.train.run_history.read_history", read)

    return raising


def test_a_fault_of_zfuncs_own_is_a_failure_that_says_so(reading_fails: Any, capsys: Out) -> None:
    reading_fails(KeyError("lost"))
    assert main(["report", "empty"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("zfunc report: error: KeyError: 'lost'")
    assert "--debug" in err


def test_short_memory_says_what_to_do_and_which_limit_there_is(
    reading_fails: Any, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    said = "RLIMIT_AS gives this process 3.0 GiB of addresses: raise it by ulimit -v"
    reading_fails(MemoryError())
    assert "got no memory, expected more: make the model" in refused(capsys, "report", "empty")
    monkeypatch.setattr("zfunc.cli.main.address_limit", lambda: 3 << 30)
    assert said in refused(capsys, "report", "empty")
    reading_fails(ValueError("got no number, expected one"))
    assert said not in refused(capsys, "report", "empty")


def test_an_error_of_many_lines_fits_on_a_screen(reading_fails: Any, capsys: Out) -> None:
    reading_fails(ValueError("got \x1b[2J" + "\n".join("x" * 5000 for _ in range(100))))
    assert main(["report", "empty"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) < 1100
    assert lines[-1] == "... and 80 lines more, with --debug"
    assert "\x1b" not in "".join(lines)


def test_errors_of_the_system_say_the_path(reading_fails: Any, capsys: Out) -> None:
    reading_fails(PermissionError(13, "Permission denied", "run/metrics.jsonl"))
    assert main(["report", "empty"]) == 2
    assert "run/metrics.jsonl: Permission denied: check the path" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_an_environment_that_is_none(variable: str, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setenv(variable, "two")
    assert f"{variable}: got 'two'" in refused(capsys, "train", *ON_DATA, "--steps", "1")


@pytest.mark.parametrize(
    "path", ["sweep/lr=3e-4/seed=1", "lr=3", "seed=1/data='x'", "a b/lr=3/x.y", "runs/data=x/"]
)
def test_paths_are_told_as_they_were_typed(path: str, capsys: Out) -> None:
    Path(path).mkdir(parents=True)
    Path(path, "kept.txt").touch()
    name = str(Path(path))
    short = ("train", *ON_DATA, "--steps", "1")
    for command in (
        (*short, "--out", path),
        (*short, "--resume", path),
        ("report", path),
        ("calibrate", "--out", f"{path}/no/x.toml"),
    ):
        assert name in refused(capsys, *command)
    Path(path, "cut.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert f"{name}/cut.jsonl, line 2" in refused(capsys, *short, "--data", f"{path}/cut.jsonl")


# --- streams and signals -----------------------------------------------------------------------------------


def _python(code: str, **given: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **given)


def _shell(line: str) -> "subprocess.CompletedProcess[str]":
    command = line.replace("ZFUNC", f"{sys.executable} -m zfunc")
    return subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)


def test_output_that_nobody_reads_is_no_traceback() -> None:
    done = _shell("ZFUNC completion bash | true")
    assert (done.returncode, done.stderr) == (1, "")
    assert _shell("ZFUNC completion bash >&-").returncode == 0
    assert _shell("ZFUNC report nowhere >&- 2>&-").returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_failure_that_is_told() -> None:
    done = _shell("ZFUNC completion bash > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("zfunc completion: error: got 'No space left on device' while printing")
    assert done.stderr.count("\n") == 1
    # A training goes to its end without a log.
    with open("/dev/full", "w") as log:
        running = start("--steps", 2, "--out", "run", stdout=log)
        told = running.communicate(timeout=60)[1]
    assert (running.returncode, told.count("\n"), summary("run")["steps"]) == (1, 1, 2)
    assert told.startswith("zfunc train: error: got 'No space left on device' while printing")


def test_a_disk_that_is_full_is_told_with_the_file(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(["draw", "--out", "a.svg"]) == 1
    told = "a.svg: got 'No space left on device' while writing it: free some space\n"
    assert capsys.readouterr().err.endswith(told)
    assert not [*Path().glob("*a.svg*")]


def test_a_loop_of_links_is_replaced_by_the_file() -> None:
    Path("loop.svg").symlink_to("loop.svg")
    assert main(["draw", "--out", "loop.svg"]) == 0
    assert Path("loop.svg").read_text().startswith("<svg")


def test_names_that_are_no_text_are_spelled_out() -> None:
    done = _shell(r"ZFUNC report $'\xff\e[31m'")
    assert done.returncode == 2
    assert r"got \udcff\x1b[31m, whose config.json cannot be read" in done.stderr


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_of_a_command_that_only_computes_is_130(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr(
        "zfunc.train.run_history.read_history", lambda *_: os.kill(os.getpid(), signal.SIGINT)
    )
    assert main(["report", "nowhere"]) == 130
    assert capsys.readouterr().err == "zfunc report: stopped at once\n"


def test_ctrl_c_while_the_command_is_imported_is_130(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def find_spec(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "zfunc.cli.main")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec)])
    assert started() == 130
    assert capsys.readouterr().err == "zfunc: stopped at once\n"


def test_options_of_other_programs_lead_to_ours() -> None:
    known = {flag(name): option for name, option in catalogue.COMMANDS["train"].options.items()}
    assert not known.keys() & catalogue.FOREIGN.keys()
    for instead in catalogue.ELSEWHERE:
        named = {*re.findall(r"--[a-z][a-z-]+", instead)} - {"--nproc-per-node", "--gpus"}
        assert named <= known.keys(), instead
