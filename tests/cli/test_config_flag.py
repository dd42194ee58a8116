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

AUTO = "auto"
HUGGING_FACE = {  # the settings of transformers' example for ZeRO-3 with offloading, which its Trainer fills in
    "fp16": {
        "enabled": AUTO,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), AUTO),
    "steps_per_print": 2000,
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), AUTO),
    "wall_clock_breakdown": False,
}


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


def test_hugging_faces_file_for_stage_3_trains_as_stage_2_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--batch-size", 4, "--micro-batches", 2, "--lr", 1e-3, "--precision", "bf16", "--eval-every", 0)
    on_device = {**HUGGING_FACE, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for name, file in (("host", HUGGING_FACE), ("device", on_device)):
        Path("ds.json").write_text(json.dumps(file))
        assert train(*flags, "--out", name, steps=3) == 0
    out = capsys.readouterr().out
    assert 'stage3_prefetch_bucket_size: "auto" is zfunc\'s default' in out
    assert "stage3_gather_16bit_weights_on_model_save: `zfunc export" in out
    names = ("stage", "params_on", "weight_slots", "activations_on", "accumulate")
    settings = config("host")["settings"]
    assert [settings[name] for name in names] == ["3", "host", 2, "device", "auto"]
    assert small_trainings.losses("host") == small_trainings.losses("device")


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
    assert merged(auto, **flags) == {**flags, "weight_decay": 0.0, "optimizer": "adamw"}
    assert "precision" not in merged(open_batch | auto | {"bf16": {"enabled": "auto"}})
    assert merged(open_batch | {"fp16": {"enabled": False}})["precision"] == "fp32"
    assert merged({"train_micro_batch_size_per_gpu": 3}, world=4)["batch_size"] == 12
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    assert merged(open_batch | adam, lr=1e-3)["lr"] == 1e-3


def test_a_flag_or_the_file_chooses_the_optimizer() -> None:
    Path("ds.json").write_text(
        json.dumps({"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    )
    assert train("--out", "sgd", steps=2) == 0
    Path("ds.json").write_text(json.dumps({"train_batch_size": 8}))
    assert train("--out", "lion", "--optimizer", "lion", "--moments", "8bit", steps=2) == 0
    found = {}
    for name in ("sgd", "lion"):
        manifest = json.loads(next(Path(name, "checkpoints").glob("step-*/manifest.json")).read_text())
        settings = config(name)["settings"]
        found[name] = manifest["moments"], settings["optimizer"], settings["lr"], settings["weight_decay"]
    assert found == {"sgd": ("weights-fp32", "sgd", 0.1, 0.0), "lion": ("lion-8bit", "lion", 1e-3, 0.4)}
    with pytest.raises(
        ValueError, match="--optimizer: got sgd, and .* says optimizer.type Lion, expected one of them"
    ):
        merged({"optimizer": {"type": "Lion"}}, optimizer="sgd")


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


def test_where_parameters_and_activations_are() -> None:
    def places(zero: dict[str, Any], checkpointing: bool | None = None, **flags: Any) -> dict[str, Any]:
        file = {"train_batch_size": "auto", "zero_optimization": zero}
        activations = {"activation_checkpointing": {"cpu_checkpointing": checkpointing}}
        return merged({**file, **activations}, **flags)

    on_host, on_device = {"device": "cpu"}, {"device": "none"}
    assert places({"stage": 3}) == {"stage": 3}
    assert places({"stage": 0}) == places({"overlap_comm": True}) == {"stage": 1}
    assert places({"stage": 3, "offload_param": on_host}) == {"stage": 3, "params_on": "host"}
    assert places({"stage": 2, "offload_param": on_host}) == {"stage": 2}
    assert places({"stage": 1}, checkpointing=True) == {"stage": 1, "activations_on": "host"}
    assert places({"stage": 3, "stage3_prefetch_bucket_size": 0}) == {"stage": 3, "weight_slots": 1}
    given = {"stage": "3", "params_on": "host", "activations_on": "host", "weight_slots": 3}
    assert merged({"train_batch_size": AUTO}, **given) == given
    assert places({"stage": AUTO, "offload_param": {"device": AUTO}}, **given) == given
    for zero, wrong in (
        ({"stage": 2}, {"stage": "3"}),
        ({"stage": 3, "offload_param": on_host}, {"params_on": "device"}),
        ({"stage": 3, "offload_param": on_device}, {"params_on": "host"}),
        ({"stage": 3, "stage3_prefetch_bucket_size": 0}, {"weight_slots": 2}),
        ({"stage": 3, "stage3_param_persistence_threshold": 8}, {"persistent_params": "9"}),
    ):
        ((name, value),) = wrong.items()
        with pytest.raises(
            ValueError, match=f"^--{name.replace('_', '-')}: got {value}, and the dict says zero"
        ):
            places(zero, **wrong)
    nvme = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}
    on_disk = {"stage": 3, "state_on": "disk", "swap": ("/a",), "offload_ratio": "1.0"}
    assert places(nvme) == places(nvme, state_on="disk", swap=("/a",)) == on_disk
    assert places(nvme, state_on=AUTO) == on_disk | {"state_on": AUTO}
    disk = {"activations_on": "disk", "swap": ("/a",)}
    assert places({"stage": 1}, checkpointing=True, **disk) == {"stage": 1, **disk}
    for flags in ({"state_on": "host"}, {"swap": ("/b",)}):
        with pytest.raises(ValueError, match="^--(state-on|swap): got (host|/b), and the dict says zero"):
            places(nvme, **flags)
    with pytest.raises(ValueError, match="^--activations-on: got device.*cpu_checkpointing True"):
        places({}, checkpointing=True, activations_on="device")
    assert places({"stage": 3}, params_on="disk")["params_on"] == "disk"  # which the flag's own check refuses


@pytest.mark.parametrize(
    ("flags", "scheduler", "message"),
    [
        ({"lr": 0.1}, {"type": "LRRangeTest"}, "--lr: got 0.1.*LRRangeTest, which sets"),
        ({"lr": 0.1}, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}}, "--lr: got 0.1.*WarmupLR"),
        ({"lr": 0.1}, {"type": "WarmupDecayLR"}, "--lr: got 0.1.*WarmupDecayLR"),
        ({"warmup": 3}, {"type": "LRRangeTest"}, "--warmup: got 3"),
        ({"lr_schedule": "linear"}, {"type": "WarmupLR"}, "--lr-schedule: got linear.*WarmupLR"),
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
