"""`zfunc train --config`: a DeepSpeed configuration and a command line together, and what a run makes of them."""

import argparse
import json
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import pytest
import small_trainings
from small_trainings import config, rows

from zfunc.cli.catalogue import COMMANDS
from zfunc.cli.main import _parse, _settings, main
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.keys import KEYS
from zfunc.train.deepspeed.learning_rate_schedules import SCHEDULERS, LRSchedule
from zfunc.train.deepspeed.mapping import config_extras, optimizer_params, with_config
from zfunc.train.settings import TrainSettings
from zfunc.train.setup import optimizer_of

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
# The settings of transformers' example for ZeRO-3 with offloading, which its Trainer fills in.
HUGGING_FACE = json.loads("""{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
    "hysteresis": 2, "min_loss_scale": 1},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {
    "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_max_reuse_distance": 1e9,
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false}""")


@pytest.fixture(autouse=True)
def configuration(own_folder: Path) -> None:
    Path("ds.json").write_text(FILE)


def train(*more: object, steps: int = 6) -> int:
    """The batch is the file's."""
    data = ("--data", "data.txt", "--config", "ds.json", "--steps", steps)
    return main(["train", *small_trainings.TINY, *map(str, (*data, *more))])


def merged(file: Any, world: int = 1, **flags: Any) -> dict[str, Any]:
    return {x: y for x, y in with_config({"config": file, **flags}, world).items() if x != "config"}


# --- a run -----------------------------------------------------------------------------------------------


def test_a_run_is_what_the_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--micro-batches", 2, "--out", "run") == 0
    out = capsys.readouterr().out
    for words in (
        "zero_optimization.cpu_offload is the old name of",
        "no effect: zero_optimization.overlap_comm: ",
        "train_batch_size: 8 = 4 x 2 micro-batches x 1 rank",
        "scheduler: WarmupDecayLR: warmup_min_lr 0.0, warmup_max_lr 0.002",
    ):
        assert out.count(f"ds.json: {words}") == 1, words
    printed = [line.split()[1] for line in out.splitlines() if "norm" in line and "loss" in line]
    assert printed == ["3/6", "6/6"]

    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.002, "warmup_num_steps": 3, "warmup_type": "log"}
    rate = LRSchedule("WarmupDecayLR", params | {"total_num_steps": 6})
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
    assert re.search('"auto" is zfunc\'s default, or what was passed: .*stage3_prefetch_bucket_size', out)
    assert "stage3_gather_16bit_weights_on_model_save: `zfunc export" in out
    names = ("stage", "params_on", "slots", "activations_on", "order")
    settings = config("host")["settings"]
    assert [settings[name] for name in names] == [3, "host", 2, "device", "by-device"]
    assert small_trainings.losses("host") == small_trainings.losses("device")


# --- flags and file --------------------------------------------------------------------------------------


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


# --- "auto" ----------------------------------------------------------------------------------------------

RUNS = {"gpt": "", "hf": "--hf model", "lora": "--hf model --lora 8"}


def typed(*words: str) -> TrainSettings:
    """The settings of a command line."""
    args = argparse.Namespace(prog="zfunc", debug=False)
    _parse(["train", *" ".join(words).split()], args)
    return _settings(COMMANDS["train"], args)


def with_file(file: Any, *words: str) -> TrainSettings:
    Path("ds.json").write_text(json.dumps(file))
    return typed("--config ds.json", *words)


def decided(settings: TrainSettings) -> dict[str, Any]:
    """All that a configuration decides of a run."""
    extras = config_extras(settings)
    return {
        **attrs.asdict(settings, filter=lambda field, _: field.name != "config"),
        "made": optimizer_of(settings, extras, settings.lr),
        "loss_scale": extras.loss_scale or LossScale(),
        "steps_per_print": extras.steps_per_print,
    }


def all_auto(names: Iterable[str], **file: Any) -> dict[str, Any]:
    """A file in which these keys are "auto"."""
    for name in names:
        *blocks, last = name.split(".")
        block = file
        for part in blocks:
            block = block.setdefault(part, {})
        block.setdefault(last, AUTO)
    return file


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        pytest.param(run, kind, marks=() if kind == AUTO or (r + k) % len(RUNS) == 0 else pytest.mark.slow)
        for (r, run), (k, kind) in product(enumerate(RUNS), enumerate([*KEYS["optimizer.type"].type, AUTO]))
    ],
)
def test_auto_is_what_holds_without_the_file(run: str, kind: str) -> None:
    """For every key that a file may have, whatever is trained."""
    name = {"Adam": "adamw", AUTO: "adamw"}.get(kind, kind.lower())
    params = {f"optimizer.params.{x}" for x in optimizer_params(name)}
    keys = [x for x in KEYS if not x.startswith(("optimizer.params.", "scheduler.")) or x in params]
    file = all_auto([*keys, "scheduler.type"], optimizer={"type": kind})
    chosen = f"--optimizer {name}"
    assert decided(with_file(file, RUNS[run])) == decided(typed(RUNS[run], chosen))
    assert decided(with_file(file, RUNS[run], "--lr 0.5")) == decided(typed(RUNS[run], chosen, "--lr 0.5"))
    if kind == AUTO:
        assert decided(with_file(file, RUNS[run], "--optimizer lion")) == decided(
            typed(RUNS[run], "--optimizer lion")
        )


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_an_auto_of_a_scheduler_is_the_rate_that_holds_without_it(run: str, kind: str) -> None:
    """From 0, along a line, as many steps up to the same rate; and a cosine falls to the same end."""
    names = [f"scheduler.params.{x}" for x in SCHEDULERS[kind][1]]
    for optimizer in ({}, {"optimizer": {"type": "AdamW", "params": {"lr": AUTO}}}):
        file = all_auto([*names, "train_batch_size"], scheduler={"type": kind}, **optimizer)
        rate, own = (
            config_extras(x).learning_rate(60) for x in (with_file(file, RUNS[run]), typed(RUNS[run]))
        )
        assert [rate(step + 2) for step in range(7)] == pytest.approx([0.0, *map(own, range(1, 7))], rel=1e-3)
        if kind == "WarmupCosineLR":
            assert rate(61) == pytest.approx(own(60))


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


def test_who_says_no_batch_at_all_is_told_so(capsys: Any) -> None:
    Path("ds.json").write_text("{}")
    assert train() == 2
    assert "ds.json: got neither train_batch_size nor" in capsys.readouterr().err
    assert merged("ds.json", batch_size=6)["batch_size"] == 6


def zero(**block: Any) -> dict[str, Any]:
    return {"train_batch_size": AUTO, "zero_optimization": block}


def wait_on_host(yes: bool) -> dict[str, Any]:
    return {"train_batch_size": AUTO, "activation_checkpointing": {"cpu_checkpointing": yes}}


NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}
ON_DISK = {"stage": 3, "state_on": "disk", "swap": ("/a",)}
GIVEN = {"stage": "3", "params_on": "host", "activations_on": "host", "slots": 3}


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ({"train_batch_size": AUTO}, GIVEN, GIVEN),
        (zero(stage=AUTO, offload_param={"device": AUTO}), GIVEN, GIVEN),
        (
            zero(offload_optimizer={"device": "cpu"}),
            {"state_on": "device:0.5,host"},
            {"stage": 1, "state_on": "device:0.5,host"},
        ),
        (zero(**NVME), {"state_on": "disk", "swap": ("/a",)}, ON_DISK),
        (zero(**NVME), {"state_on": AUTO}, ON_DISK | {"state_on": AUTO}),
        (zero(**NVME), {"state_on": "host:0.25,disk"}, ON_DISK | {"state_on": "host:0.25,disk"}),
        ({"train_batch_size": AUTO, "bf16": {"bf16_optimizer_states": True}}, {}, {"moments": "16bit"}),
    ],
)
def test_what_a_file_and_flags_decide(file: Any, flags: dict[str, Any], expected: dict[str, Any]) -> None:
    found = merged(file, **flags)
    assert {x: y for x, y in found.items() if x not in ("precision", "micro_batches")} == expected


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("flag", "value", "file", "key"),
    [
        ("stage", "3", zero(stage=2), "stage 2"),
        ("params_on", "device", zero(stage=3, offload_param={"device": "cpu"}), "offload_param.device cpu"),
        ("params_on", "host", zero(stage=3, offload_param={"device": "none"}), "offload_param.device none"),
        ("slots", 2, zero(stage=3, stage3_prefetch_bucket_size=0), "prefetch_bucket_size 0"),
        ("persistent_params", "9", zero(stage=3, stage3_param_persistence_threshold=8), "threshold 8"),
        ("activations_on", "device", wait_on_host(True), "cpu_checkpointing True"),
        ("state_on", "host", zero(**NVME), "offload_optimizer.device nvme"),
        ("swap", ("/b",), zero(**NVME), "nvme_path /a"),
        ("state_on", "host", zero(offload_optimizer={"device": "none"}), "device none"),
        ("moments", "fp32", {"bf16": {"bf16_optimizer_states": True}}, "bf16_optimizer_states True"),
        ("optimizer", "sgd", {"optimizer": {"type": "Lion"}}, "optimizer.type Lion"),
        ("precision", "bf16", {"fp16": {"enabled": True}}, "fp16.enabled True"),
        ("precision", "fp16", {"fp16": {"enabled": False}}, "fp16.enabled False"),
        ("lr", 0.1, scheduler("LRRangeTest"), "scheduler.type LRRangeTest"),
        ("lr", 0.1, scheduler("WarmupLR", warmup_max_lr=0.2), "warmup_max_lr 0.2"),
        ("lr", 0.1, scheduler("WarmupDecayLR"), "scheduler.type WarmupDecayLR"),
        ("warmup", 3, scheduler("LRRangeTest"), "scheduler.type LRRangeTest"),
        ("warmup", 3, scheduler("WarmupLR", warmup_num_steps=4), "scheduler.type WarmupLR"),
        ("lr_schedule", "linear", scheduler("WarmupLR"), "scheduler.type WarmupLR"),
    ],
)
def test_a_flag_that_contradicts_the_file_is_an_error_that_names_both(
    flag: str, value: Any, file: Any, key: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"^{flag}: got .*, and the dict says .*{key}.*expected one of them"
    ):
        merged({"train_batch_size": 8, **file}, **{flag: value})


def test_settings_made_by_hand_may_not_contradict_their_file() -> None:
    given = {"batch_size": 8, "precision": "fp16", "clip": 0.5, "bucket_size": 5000, "stage": 1}
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr 0\.002"):
        TrainSettings(**given | {"config": with_config({"config": "ds.json"}, 1)["config"]})
