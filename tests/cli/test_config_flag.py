"""`zfunc train --config`: a DeepSpeed configuration and a command line together, and what a run makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import small_trainings
from small_trainings import checkpoints, config, rows, summary

from zfunc.cli.main import main
from zfunc.train.deepspeed.cli_merge import merge_flags
from zfunc.train.deepspeed.convert import config_extras
from zfunc.train.deepspeed.lr import WarmupDecayLR
from zfunc.train.deepspeed.reader import read_config_file
from zfunc.train.settings import TrainSettings

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
def configuration(own_folder: Path) -> None:
    Path("ds.json").write_text(FILE)


def train(*more: object, steps: int = 6) -> int:
    """The batch is the file's."""
    data = ("--data", "data.txt", "--config", "ds.json", "--steps", steps)
    return main(["train", *small_trainings.TINY, *map(str, (*data, *more))])


def merged(file: Any, world: int = 1, **flags: Any) -> dict[str, Any]:
    return merge_flags(flags, read_config_file(file), world)


# --- a run -----------------------------------------------------------------------------------------------


def test_a_run_is_what_the_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--micro-batches", 2, "--out", "run") == 0
    out = capsys.readouterr().out
    for words in (
        "zero_optimization.cpu_offload is the old name of",
        "no effect: zero_optimization.overlap_comm: ",
        "train_batch_size: 8 = 4 x 2 micro-batches x 1 ranks",
        "scheduler: WarmupDecayLR(total_num_steps=6, warmup_max_lr=0.002",
        "fp16: a loss scale that starts at 64",
    ):
        assert out.count(f"ds.json: {words}") == 1, words
    printed = [line.split()[1] for line in out.splitlines() if "norm" in line and "loss" in line]
    assert printed == ["3/6", "6/6"]

    rate = WarmupDecayLR(6, warmup_max_lr=0.002, warmup_num_steps=3)
    assert [row["lr"] for row in rows("run")[1:]] == [rate(step) for step in range(1, 7)]
    assert all(row["loss_scale"] == 64 for row in rows("run")[1:])
    settings = config("run")["settings"]
    assert (settings["precision"], settings["clip"], settings["bucket_size"]) == ("fp16", 0.5, 5000)
    assert (settings["batch_size"], settings["micro_batches"], settings["weight_decay"]) == (8, 2, 0.1)
    assert config("run")["deepspeed"]["optimizer"]["params"]["betas"] == [0.7, 0.9]
    manifest = json.loads(next(Path("run/checkpoints").glob("step-*/manifest.json")).read_text())
    optimizer = manifest["optimizer"]
    assert (optimizer["betas"], optimizer["decoupled"], optimizer["clip_norm"]) == ([0.7, 0.9], False, 0.5)


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
    assert [summary("six")["checkpoint"]] == checkpoints("six") == ["step-00000006"]


def test_flags_hold_where_the_file_says_nothing() -> None:
    open_batch = {"train_batch_size": "auto"}
    assert merged(open_batch) == {}
    assert merged(open_batch, micro_batches=2) == {"micro_batches": 2}
    flags = {"lr": 0.5, "batch_size": 12, "micro_batches": 3, "precision": "bf16", "clip": 2.0, "seed": 4}
    assert merged({}, **flags) == flags
    auto = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "gradient_clipping": "auto"}
    assert merged(auto, **flags) == {**flags, "weight_decay": 0.0}
    assert "precision" not in merged(open_batch | auto | {"bf16": {"enabled": "auto"}})
    assert merged(open_batch | {"fp16": {"enabled": False}})["precision"] == "fp32"
    assert merged({"train_micro_batch_size_per_gpu": 3}, world=4)["batch_size"] == 12
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    assert merged(open_batch | adam, lr=1e-3)["lr"] == 1e-3


def test_who_says_no_batch_at_all_is_told_so(capsys: Any) -> None:
    Path("ds.json").write_text("{}")
    assert train() == 2
    assert "ds.json: got neither train_batch_size nor" in capsys.readouterr().err
    assert merged("ds.json", batch_size=6)["batch_size"] == 6


@pytest.mark.parametrize(
    "file",
    [{"bf16": {"bf16_optimizer_states": True}}, {"optimizer": {"params": {"fp32_optimizer_states": False}}}],
)
def test_how_exact_the_moments_are(file: dict[str, Any]) -> None:
    file = {"train_batch_size": 8, **file}
    assert merged(file)["moments"] == "16bit"
    assert merged(file, moments="8bit")["moments"] == "8bit"
    with pytest.raises(ValueError, match="--moments: got fp32, and the dict says"):
        merged(file, moments="fp32")


def test_where_the_optimizers_state_is() -> None:
    def ratio(offload: dict[str, Any], **flags: Any) -> Any:
        file = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
        return merged(file, **flags).get("offload_ratio")

    assert ratio({}) is None
    assert ratio({"device": "cpu"}) == "1.0"
    assert ratio({"device": "cpu", "ratio": 0.25}) == "0.25"
    assert ratio({"device": "none"}) == "0.0"
    assert ratio({"device": "cpu"}, offload_ratio="0.5") == "0.5"
    assert ratio({"device": "cpu"}, offload_ratio="auto") == "auto"
    with pytest.raises(ValueError, match=r"--offload-ratio: got 0\.5.*device none"):
        ratio({"device": "none"}, offload_ratio="0.5")


@pytest.mark.parametrize(
    ("flags", "scheduler", "message"),
    [
        ({"lr": 0.1}, {"type": "LRRangeTest"}, "--lr: got 0.1.*LRRangeTest, which sets"),
        ({"lr": 0.1}, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}}, "--lr: got 0.1.*WarmupLR"),
        ({"lr": 0.1}, {"type": "WarmupDecayLR"}, "--lr: got 0.1.*WarmupDecayLR"),
        ({"warmup": 3}, {"type": "LRRangeTest"}, "--warmup: got 3"),
        ({"warmup": 3}, {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}, "--warmup: got 3.*steps 4"),
    ],
)
def test_flags_that_a_scheduler_would_not_hear(flags: Any, scheduler: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merged({"scheduler": scheduler}, **flags)


def test_settings_made_by_hand_may_not_contradict_their_file() -> None:
    given = {"batch_size": 8, "precision": "fp16", "clip": 0.5, "bucket_size": 5000}
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr 0\.002"):
        config_extras(TrainSettings(config=Path("ds.json"), **given))
