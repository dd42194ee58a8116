"""`zfunc train --config`: a DeepSpeed configuration and a command line together, and what a run makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from zfunc.cli.main import main
from zfunc.train.deepspeed.cli_merge import merge_flags
from zfunc.train.deepspeed.lr import WarmupDecayLR
from zfunc.train.deepspeed.reader import read_config_file
from zfunc.train.settings import TrainSettings

TINY = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
FILE = """{
  "train_batch_size": 8,
  "gradient_accumulation_steps": "auto",
  "steps_per_print": 3,  // lines
  "optimizer": {"type": "Adam", "params": {
    "lr": 0.002, "betas": [0.7, 0.9], "adam_w_mode": false, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {
    "warmup_num_steps": 3, "warmup_max_lr": "auto", "total_num_steps": "auto"}},
  "fp16": {"enabled": true, "initial_scale_power": 6, "hysteresis": 1},
  "gradient_clipping": 0.5,
  "zero_optimization": {"stage": 1, "cpu_offload": true, "overlap_comm": true, "reduce_bucket_size": 5e3},
}
"""


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for n in range(30):
        text = " ".join(f"{k * k % 97} and {k % 7}" for k in range(n, n + 80))
        tmp_path.joinpath("texts").mkdir(exist_ok=True)
        tmp_path.joinpath("texts", f"{n}.txt").write_text(text)
    tmp_path.joinpath("ds.json").write_text(FILE)


def train(*more: object, steps: int = 6) -> int:
    args = ["train", *TINY, "--data", "texts", "--config", "ds.json", "--steps", steps, *more]
    return main([str(x) for x in args])


def rows(run: str) -> list[dict[str, Any]]:
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


# --- a run -----------------------------------------------------------------------------------------------


def test_a_run_is_what_the_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--micro-batches", 2, "--out", "run") == 0
    out = capsys.readouterr().out
    for told in (
        "zero_optimization.cpu_offload is the old name of",
        "no effect here: zero_optimization.overlap_comm: ",
        "train_batch_size: 8 = 4 x 2 micro-batches x 1 ranks",
        "scheduler: WarmupDecayLR(total_num_steps=6, warmup_max_lr=0.002",
        "fp16: a loss scale that begins at 64",
    ):
        assert out.count(f"ds.json: {told}") == 1, told
    assert [line.split()[1] for line in out.splitlines() if "norm" in line and "loss" in line] == [
        "3/6",
        "6/6",
    ]

    rate = WarmupDecayLR(6, warmup_max_lr=0.002, warmup_num_steps=3)
    assert [row["lr"] for row in rows("run")] == [rate(step) for step in range(1, 7)]
    assert all(row["loss_scale"] == 64 for row in rows("run"))
    config = json.loads(Path("run/config.json").read_text())
    settings = config["settings"]
    assert (settings["precision"], settings["clip"], settings["bucket_size"]) == ("fp16", 0.5, 5000)
    assert (settings["batch_size"], settings["micro_batches"], settings["weight_decay"]) == (8, 2, 0.1)
    assert config["deepspeed"]["optimizer"]["params"]["betas"] == [0.7, 0.9]
    manifest = json.loads(next(Path("run/checkpoints").glob("step-*/manifest.json")).read_text())
    optimizer = manifest["optimizer"]
    assert (optimizer["betas"], optimizer["decoupled"], optimizer["clip_norm"]) == ([0.7, 0.9], False, 0.5)


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped() -> None:
    assert train("--out", "whole", steps=8) == 0
    assert train("--out", "parts", "--save-every", 3, steps=8) == 0
    newest = Path("parts/checkpoints/step-00000006")
    assert train("--resume", newest, "--out", "again", steps=8) == 0
    assert [row["loss"] for row in rows("whole")][6:] == [row["loss"] for row in rows("again")]
    assert [row["lr"] for row in rows("whole")][6:] == [row["lr"] for row in rows("again")]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--lr", "1e-2"), "--lr: got 0.01, and ds.json says optimizer.params.lr 0.002"),
        (("--precision", "bf16"), "--precision: got bf16, and ds.json says fp16.enabled True"),
        (("--batch-size", "16"), "--batch-size: got 16, and ds.json says train_batch_size 8"),
        (("--clip", "2"), "--clip: got 2.0, and ds.json says gradient_clipping 0.5"),
        (("--weight-decay", "0"), "--weight-decay: got 0.0, and ds.json says"),
        (("--micro-batches", "3"), "got train_batch_size 8, expected a multiple of"),
        (("--offload-ratio", "much"), "--offload-ratio: got much, expected 0"),
        (("--batch-size", "0"), "--batch-size: got 0, expected a whole number of at least 1"),
        (("--config", "nowhere.json"), "nowhere.json: No such file"),
    ],
)
def test_what_contradicts_the_file_is_an_error(
    args: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*args) == 2
    err = capsys.readouterr().err
    assert err.startswith("zfunc train: error: ")
    assert told in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"fp16"', '"fp61"', "did you mean 'fp16'?"),
        ('"steps_per_print": 3,', '"steps_per_print": 3, "steps_per_print": 4,', "'steps_per_print' twice"),
        ('"stage": 1', '"stage": 3', "use stage 2"),
        ("5e3},\n}", "5e3},\n", "expected JSON"),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    old: str, new: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ds.json").write_text(FILE.replace(old, new))
    assert train() == 2
    assert told in capsys.readouterr().err


# --- flags and file --------------------------------------------------------------------------------------


def test_a_file_by_which_an_update_cannot_be_made_is_refused_before_the_first(capsys: Any) -> None:
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2, "decay_step_size": 1}
    file = {
        "train_batch_size": 8,
        "scheduler": {"type": "OneCycle", "params": {**cycle, "decay_mom_rate": 0.1}},
    }
    Path("ds.json").write_text(json.dumps(file))
    assert train(steps=8) == 2
    assert "ds.json: betas at step 7: got (1.08, 0.99)" in capsys.readouterr().err
    assert train("--out", "six", steps=6) == 0  # and what there is after the last of six, nobody asks for
    assert json.loads(Path("six/summary.json").read_text())["checkpoint"] == "step-00000006"


def test_flags_hold_where_the_file_says_nothing() -> None:
    open_batch = {"train_batch_size": "auto"}
    assert merge_flags({}, read_config_file(open_batch), 1) == {}
    assert merge_flags({"micro_batches": 2}, read_config_file(open_batch), 1) == {"micro_batches": 2}
    flags = {"lr": 0.5, "batch_size": 12, "micro_batches": 3, "precision": "bf16", "clip": 2.0, "seed": 4}
    assert merge_flags(flags, read_config_file({}), 1) == flags
    auto = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "gradient_clipping": "auto"}
    assert merge_flags(flags, read_config_file(auto), 1) == {**flags, "weight_decay": 0.0}
    both = {**auto, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    assert "precision" not in merge_flags({}, read_config_file(open_batch | both), 1)
    assert (
        merge_flags({}, read_config_file(open_batch | {"fp16": {"enabled": False}}), 1)["precision"] == "fp32"
    )
    assert merge_flags({}, read_config_file({"train_micro_batch_size_per_gpu": 3}), 4)["batch_size"] == 12
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    assert merge_flags({"lr": 1e-3}, read_config_file(open_batch | adam), 1)["lr"] == 1e-3


def test_who_says_no_batch_at_all_is_told_so_as_there(capsys: Any) -> None:
    Path("ds.json").write_text("{}")
    assert train() == 2
    assert "ds.json: got neither train_batch_size nor" in capsys.readouterr().err
    assert merge_flags({"batch_size": 6}, read_config_file("ds.json"), 1)["batch_size"] == 6


@pytest.mark.parametrize(
    "file",
    [{"bf16": {"bf16_optimizer_states": True}}, {"optimizer": {"params": {"fp32_optimizer_states": False}}}],
)
def test_how_exact_the_moments_are(file: dict[str, Any]) -> None:
    file = {"train_batch_size": 8, **file}
    assert merge_flags({}, read_config_file(file), 1)["moments"] == "16bit"
    assert merge_flags({"moments": "8bit"}, read_config_file(file), 1)["moments"] == "8bit"
    with pytest.raises(ValueError, match="--moments: got fp32, and the dict says"):
        merge_flags({"moments": "fp32"}, read_config_file(file), 1)


def test_where_the_optimizers_state_is() -> None:
    def ratio(flags: dict[str, Any], **offload: Any) -> Any:
        file = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
        return merge_flags(flags, read_config_file(file), 1).get("offload_ratio")

    assert ratio({}) is None
    assert ratio({}, device="cpu") == "1.0"
    assert ratio({}, device="cpu", ratio=0.25) == "0.25"
    assert ratio({}, device="none") == "0.0"
    assert ratio({"offload_ratio": "0.5"}, device="cpu") == "0.5"
    assert ratio({"offload_ratio": "auto"}, device="cpu") == "auto"
    with pytest.raises(ValueError, match=r"--offload-ratio: got 0\.5.*device none"):
        ratio({"offload_ratio": "0.5"}, device="none")


@pytest.mark.parametrize(
    ("flags", "scheduler", "told"),
    [
        ({"lr": 0.1}, {"type": "LRRangeTest"}, "--lr: got 0.1.*LRRangeTest, which sets"),
        ({"lr": 0.1}, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}}, "--lr: got 0.1.*WarmupLR"),
        ({"lr": 0.1}, {"type": "WarmupDecayLR"}, "--lr: got 0.1.*WarmupDecayLR"),
        ({"warmup": 3}, {"type": "LRRangeTest"}, "--warmup: got 3"),
        ({"warmup": 3}, {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}, "--warmup: got 3.*steps 4"),
    ],
)
def test_flags_that_a_scheduler_would_not_hear(flags: Any, scheduler: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        merge_flags(flags, read_config_file({"scheduler": scheduler}), 1)


def test_settings_made_by_hand_may_not_contradict_their_file() -> None:
    from zfunc.train.deepspeed.convert import config_extras

    with pytest.raises(ValueError, match=r"optimizer\.params\.lr 0\.002"):
        config_extras(
            TrainSettings(config=Path("ds.json"), batch_size=8, precision="fp16", clip=0.5, bucket_size=5000)
        )
