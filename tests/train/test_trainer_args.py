"""A Trainer's arguments: every field of transformers is in the table, learning rates are those of get_scheduler,
and a run is what the file says."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import small_trainings
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_trainings import config, rows

from zfunc.cli.catalogue import COMMANDS
from zfunc.cli.main import _parse, _settings, main
from zfunc.train.deepspeed.mapping import ConfigExtras, config_extras, startup_notes
from zfunc.train.evaluations import Evaluation, best_saved, num_without_improvement
from zfunc.train.settings import TrainSettings
from zfunc.train.setup import optimizer_of, prepare_job
from zfunc.train.trainer.fields import (
    CLASSES,
    DPO_CLASS,
    OTHERS,
    SFT,
    TRAINER,
    fields_of,
    read_args,
    read_field,
)
from zfunc.train.trainer.mapping import trainer_extras
from zfunc.train.trainer.schedules import SCHEDULES, TrainerSchedule, check_params

ARGS = "args.json"
transformers: Any = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _in(own_folder: Path) -> None:
    assert own_folder


def settings(file: Any, *flags: object, dump: Any = json.dumps, name: str = ARGS) -> TrainSettings:
    """The settings of a command line with the arguments in a file."""
    import argparse

    Path(name).write_text(dump(file))
    args = argparse.Namespace()
    _parse(["train", "--trainer-args", name, *map(str, flags)], args)
    return _settings(COMMANDS["train"], args)


def extras_of(found: TrainSettings) -> ConfigExtras:
    return trainer_extras(found, config_extras(found))


def refusal(file: Any, *flags: object) -> str:
    with pytest.raises(ValueError, match="expected|not supported|which") as caught:
        extras_of(settings(file, *flags))
    return str(caught.value)


# --- the table -------------------------------------------------------------------------------------------


def test_every_field_of_transformers_is_in_the_table_with_its_default() -> None:
    missing, wrong = list[str](), list[Any]()
    for field in dataclasses.fields(transformers.TrainingArguments):
        if (row := CLASSES[TRAINER].get(field.name)) is None:
            missing.append(field.name)
            continue
        default: Any = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore
        if (getattr(default, "value", default) or None) != (row.default or None):
            wrong.append((field.name, default, row.default))
    assert (missing, wrong) == ([], [])


def test_the_trainers_own_names_are_known_or_refused() -> None:
    assert {x.value for x in transformers.SchedulerType} - {*SCHEDULES} == {"reduce_lr_on_plateau", "greedy"}
    assert {*SCHEDULES} == {*fields_of(TRAINER)["lr_scheduler_type"].type}
    assert "(did you mean 'cosine'?)" in refusal({"lr_scheduler_type": "cosin"})


def test_all_arguments_of_an_object_say_nothing_but_what_was_set() -> None:
    own = transformers.TrainingArguments(output_dir="run", learning_rate=1e-3, use_cpu=True).to_dict()
    found = settings(own, "--seconds", 5)
    made = {"report_to", "accelerator_config", "dataloader_pin_memory"}  # by transformers, when it is made
    assert {*read_args(Path(ARGS)).file} - made == {"output_dir", "learning_rate", "use_cpu"}
    assert len(extras_of(found).notes) <= 2
    assert (found.lr, found.device, found.out, found.epochs) == (1e-3, "cpu", Path("run"), None)


@pytest.mark.parametrize("kind", [TRAINER, SFT, DPO_CLASS])
def test_what_is_refused_says_what_to_do(kind: str) -> None:
    marked = {SFT: {"packing": True}, DPO_CLASS: {"beta": 0.2}}.get(kind, {})
    for field in (x for x in fields_of(kind).values() if x.fate == "unsupported"):
        said = [x for x in (True, False, 0.9, 7, "text") if x != field.default and (x or field.default)]
        value = next(x for x in said if read_field(field.type, x) is not None)
        assert f"{field.name}: got {value!r}, which is not supported: {field.note}" in refusal(
            {**marked, field.name: value}
        )


@pytest.mark.parametrize(
    ("file", "idle"),
    [
        ({"max_steps": 5, "num_train_epochs": 2}, "num_train_epochs: `max_steps` decides"),
        ({"eval_steps": 5}, "eval_steps: `eval_strategy` is no"),
        ({"save_strategy": "no", "save_steps": 5}, "save_steps: `save_strategy` is no"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_ratio: `warmup_steps` decides"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps: constant has no warm-up"),
        ({"optim": "sgd", "adam_beta1": 0.5}, "adam_beta1: not of the optimizer sgd"),
        (
            {"optim": "lion_32bit", "adam_beta1": 0.5, "adam_epsilon": 1e-3},
            "adam_epsilon: not of the optimizer",
        ),
        ({"max_length": 9, "packing_strategy": "wrapped"}, "packing_strategy: `packing` is false"),
        ({"beta": 0.2, "max_prompt_length": 9}, "max_prompt_length: TRL has removed it: `max_length` bounds"),
    ],
)
def test_what_another_field_makes_mean_nothing_is_a_line(file: dict[str, Any], idle: str) -> None:
    (line,) = extras_of(settings(file)).notes
    assert line.startswith(f"{ARGS}: no effect: {idle}")


@pytest.mark.parametrize("program", OTHERS)
def test_a_file_of_another_program_says_what_to_use_instead(program: str) -> None:
    known = {name for kind in CLASSES for name in fields_of(kind)}
    flags = {f"--{x.replace('_', '-')}" for x in (f.name for f in attrs.fields(TrainSettings))}
    for key, instead in OTHERS[program].items():
        assert key not in known
        assert f"got a file of {program}, expected" in (said := refusal({key: "value", "learning_rate": 1}))
        assert f"\n{key}: {instead}" in said
        named = re.findall("`([a-z-][^` ]*)", instead)
        assert {*named} <= known | flags | {"torchrun"}, key


# --- learning rates --------------------------------------------------------------------------------------

RATES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")),
    *((kind, {}) for kind in ("cosine_with_restarts", "polynomial")),
    ("cosine", {"num_cycles": 1.3}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"lr_end": 1e-4, "power": 2.5}),
    ("inverse_sqrt", {"timescale": 20}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.5}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 9}),
    *(
        (
            "warmup_stable_decay",
            {"num_decay_steps": 9, "min_lr_ratio": 0.1, "warmup_type": x, "decay_type": y},
        )
        for x, y in (("linear", "linear"), ("cosine", "1-sqrt"), ("1-sqrt", "cosine"))
    ),
    ("warmup_stable_decay", {"num_decay_steps": 9, "num_stable_steps": 5, "num_cycles": 1.5}),
]


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("kind", "params"), RATES)
@pytest.mark.filterwarnings("ignore:Detected call of|Both num_training_steps")
def test_learning_rates_are_transformers_over_all_steps(
    kind: str, params: dict[str, Any], warmup: int
) -> None:
    sgd: Any = torch.optim.SGD([torch.zeros(1)], lr=0.02)
    given: Any = params or None
    witness: Any = transformers.get_scheduler(kind, sgd, warmup, 31, scheduler_specific_kwargs=given)
    ours = TrainerSchedule(kind, check_params(kind, params), 0.02, warmup, 31)
    for step in range(1, 32):
        assert ours(step) == pytest.approx(sgd.param_groups[0]["lr"], rel=1e-12, abs=1e-18), step
        sgd.step()
        witness.step()


# --- early stopping --------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([1.0, 1.05, 1.1, 1.5, 2.0, math.nan, math.inf]), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.1]),
)
def test_evaluations_without_improvement_are_counted_as_the_callback_does(
    losses: list[float], threshold: float
) -> None:
    """And the best step is that of the Trainer, which hears of a loss after the callback."""
    callback: Any = transformers.EarlyStoppingCallback(99, threshold)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(metric_for_best_model="loss", greater_is_better=False, save_strategy="best"),
        state=transformers.TrainerState(),
    )
    told: list[Evaluation] = []
    for step, loss in enumerate(losses):
        trainer.state.global_step = step
        callback.on_evaluate(trainer.args, trainer.state, None, {"eval_loss": loss})
        transformers.Trainer._determine_best_metric(trainer, {"eval_loss": loss}, None)
        told.append(Evaluation(step, loss if math.isfinite(loss) else math.inf, f"step-{step}"))
        assert num_without_improvement(told, threshold) == callback.early_stopping_patience_counter
        best = best_saved(told)
        assert (best.step if best else None) == trainer.state.best_global_step


def test_strategies_of_the_trainer_are_steps_of_a_pass_and_the_best_checkpoint() -> None:
    file = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "use_cpu": True,
    }
    said = {**file, "metric_for_best_model": "loss", "greater_is_better": False, "early_stopping_patience": 3}
    flags = (*small_trainings.TINY, "--data", "data.txt")
    found = settings({**said, "early_stopping_threshold": 0.1}, *flags)
    job = prepare_job(found, cache=Path("cache"))
    steps = [math.ceil(epochs * job.sequences_per_epoch / 8) for epochs in (1, 1, 3)]
    assert [job.settings.eval_every, job.settings.save_every, job.settings.steps] == steps
    assert (found.keep_best, found.early_stopping) == (True, 3)
    assert found.early_stopping_threshold == pytest.approx(0.1 / math.log(2))
    assert settings({"save_strategy": "best", "eval_strategy": "epoch"}).keep_best


def test_strategies_by_epoch_are_no_steps_of_a_stream() -> None:
    Path("shard.jsonl").write_text('{"text": "abc"}\n' * 40)
    file = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "max_steps": 9,
    }
    flags = (*small_trainings.TINY, "--stream", "--data", "shard.jsonl", "--eval-data", "data.txt")
    with pytest.raises(
        ValueError, match="^eval_strategy, save_strategy: got epoch with `stream`, .* a number"
    ):
        prepare_job(settings(file, *flags), cache=Path("cache"))
    for epochs in (3.0, 5.0):  # the default, and not
        expected = (
            f"^{ARGS}: num_train_epochs: got {epochs:g} with `stream`, .*: write max_steps, .* the file"
        )
        with pytest.raises(ValueError, match=expected):
            settings({"num_train_epochs": epochs}, *flags)
    assert settings({}, *flags, "--steps", 5).steps == 5
    assert settings({"num_train_epochs": 5.0, "max_steps": 7}, *flags).steps == 7


# --- what a file sets ------------------------------------------------------------------------------------

FILE = {
    "output_dir": "run", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6,
    "learning_rate": "2e-3", "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4},
    "warmup_ratio": 0.3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5, "seed": 3, "eval_strategy": "steps", "eval_steps": 0.5, "save_steps": 2,
    "logging_steps": 3, "save_total_limit": 1, "use_cpu": True,
    "dataloader_num_workers": 4, "use_liger_kernel": True,
}  # fmt: skip


def test_a_run_is_what_the_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    from yaml import safe_dump

    Path("args.yaml").write_text(safe_dump(FILE))
    flags = (*small_trainings.TINY, "--data", "data.txt", "--trainer-args", "args.yaml", "--no-sample")
    assert main(["train", *flags]) == 0
    out = capsys.readouterr().out
    assert out.count("args.yaml: no effect: ") == 2
    assert re.search("no effect: dataloader_num_workers: batches are cut", out)
    printed = [line.split()[1] for line in out.splitlines() if "norm" in line and "loss" in line]
    assert printed == ["3/6", "6/6"]
    rate = TrainerSchedule(
        "cosine_with_min_lr", check_params("cosine_with_min_lr", {"min_lr": 1e-4}), 2e-3, 2, 6
    )
    assert [row["lr"] for row in rows("run")[1:]] == [rate(step) for step in range(1, 7)]
    found = config("run")["settings"]
    names = (
        "batch_size",
        "micro_batches",
        "steps",
        "clip",
        "seed",
        "eval_every",
        "save_every",
        "keep",
        "precision",
    )
    assert [found[x] for x in names] == [4, 2, 6, 0.5, 3, 3, 2, 1, "fp32"]
    manifest = json.loads(next(Path("run/checkpoints").glob("step-*/manifest.json")).read_text())["optimizer"]
    assert (manifest["betas"], manifest["eps"], manifest["weight_decay"]) == ([0.8, 0.95], 1e-6, 0.1)


def test_defaults_are_the_class_s_and_flags_hold_where_a_field_is_at_its_default() -> None:
    plain = settings({})
    names = (
        "lr",
        "weight_decay",
        "batch_size",
        "epochs",
        "steps",
        "eval_every",
        "warmup",
        "seed",
        "precision",
    )
    assert [getattr(plain, x) for x in names] == [5e-5, 0.0, 8, 3.0, None, 0, 0, 42, "fp32"]
    sft = settings({"packing": True, "max_length": 512})
    names = ("lr", "seq_length", "packing", "precision", "recompute", "loss")
    assert [getattr(sft, x) for x in names] == [2e-5, 512, "documents", "bf16", "all", "tokens"]
    dpo = settings({"beta": 0.2, "loss_type": ["ipo"], "per_device_train_batch_size": 3})
    names = ("lr", "loss", "dpo_beta", "dpo_type", "batch_size", "seq_length")
    assert [getattr(dpo, x) for x in names] == [1e-6, "dpo", 0.2, "ipo", 6, 1024]
    assert settings({"learning_rate": 5e-5}, "--lr", 0.1, "--steps", 9).lr == 0.1
    assert settings({"num_train_epochs": 2}, "--epochs", 2).epochs == 2


@pytest.mark.parametrize(
    ("optim", "name", "moments", "own"),
    [
        ("adamw_torch", "AdamW", "fp32", {"betas": (0.8, 0.999), "eps": 1e-8}),
        ("paged_adamw_8bit", "AdamW", "8bit", {"betas": (0.8, 0.999)}),
        ("lion_32bit", "Lion", "fp32", {"betas": (0.8, 0.999)}),
        ("sgd", "SGD", "fp32", {"momentum": 0.0}),
        ("adagrad", "Adagrad", "fp32", {"eps": 1e-10}),
    ],
)
def test_optimizers_are_the_trainers(optim: str, name: str, moments: str, own: dict[str, Any]) -> None:
    found = settings({"optim": optim, "adam_beta1": 0.8})
    optimizer: Any = optimizer_of(found, extras_of(found), 0.1)
    assert (type(optimizer).__name__, found.moments) == (name, moments)
    assert {x: getattr(optimizer, x) for x in own} == own


def test_a_deepspeed_file_goes_on_to_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    ds = {
        "train_batch_size": "auto", "gradient_clipping": 0.5, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "auto", "params": {"lr": "auto", "betas": "auto", "eps": 1e-5, "momentum": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }  # fmt: skip
    Path("ds.json").write_text(json.dumps(ds))
    file = {
        "deepspeed": "~/ds.json",
        "learning_rate": 1e-3,
        "adam_beta1": 0.7,
        "max_steps": 20,
        "warmup_steps": 4,
    }
    assert "gradient_clipping 0.5" in refusal({**file, "max_grad_norm": 2.0})
    found = settings(file)
    assert (found.recorded()["config"], found.stage, found.clip, found.lr) == ("~/ds.json", 3, 0.5, 1e-3)
    for read in (ARGS, "ds.json"):  # once, with the command line
        Path(read).unlink()
    extras = extras_of(found)
    assert (extras.optimizer["betas"], extras.optimizer["eps"]) == ((0.7, 0.999), 1e-5)
    rate: Any = extras.learning_rate(20)
    assert (rate.kind, rate.params["warmup_num_steps"]) == ("WarmupLR", 4)
    idle = "ds.json: no effect: optimizer.params.momentum: not of the optimizer adamw"
    assert idle in startup_notes(found, extras.config, 1, rate)


def test_what_yaml_reads_as_another_type_is_what_its_author_means() -> None:
    """YAML 1.1 reads 1e-6 as a text, and no as false, also inside of an object."""
    text = """
    learning_rate: 1e-3
    eval_strategy: no
    lr_scheduler_type: cosine_with_min_lr
    lr_scheduler_kwargs: {min_lr: 1e-6, num_cycles: 5e-1}
    """
    found = settings(text, dump=str, name="args.yaml")
    assert (found.lr, found.eval_every) == (1e-3, 0)
    rate: Any = extras_of(found).learning_rate(20)
    assert rate.params == {"min_lr": 1e-6, "min_lr_rate": None, "num_cycles": 0.5}


@pytest.mark.parametrize(
    ("file", "flags", "reason"),
    [
        ({"learning_rat": 1}, (), "'learning_rat', which TrainingArguments has not .did you mean 'learning_rate'"),
        ({"packin": 1, "max_length": 9}, (), "which SFTConfig has not .did you mean 'packing'"),
        ({"learning_rate": "fast"}, (), "learning_rate: got 'fast', expected float"),
        ({"deepspeed": {"zero_optimization": {}}}, (), "deepspeed: got {.*}, expected text: write it into a file"),
        ({"dataset_text_field": "body"}, (), "got 'body', expected text: the column text is read"),
        ({"optim": "galore_adamw"}, (), "optim: got 'galore_adamw', expected adamw_torch"),
        ({"eval_strategy": "epochs"}, (), "eval_strategy: got 'epochs', expected no, steps, epoch"),
        ({"eval_strategy": "epoch"}, ("--eval-every", 5), "eval_every: got 5, and args.json says eval_str"),
        ({"metric_for_best_model": "f1"}, (), "metric_for_best_model: got 'f1', expected eval_loss, loss"),
        ({"greater_is_better": True}, (), "greater_is_better: got True, expected false"),
        ({"load_best_model_at_end": True}, (), "args.json: load_best_model_at_end: got it with `eval_every=0`"),
        ({"beta": 0}, (), "^args.json: beta: got 0.0, expected a finite number above 0"),
        ({"max_prompt_length": 512, "rpo_alpha": 1}, (), "^args.json: rpo_alpha: got 1, which is not supported"),
        ({"adafactor": True}, (), "pass `--optimizer adafactor`"),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, (), "eval_steps: got 0.1, expected a number of steps"),
        ({"bf16": True, "fp16": True}, (), "got bf16 and fp16"),
        ({"report_to": ["wandb", "mlflow"]}, (), "got 'mlflow', expected tensorboard, wandb, trackio, none"),
        ({"learning_rate": 1e-3}, ("--lr", 0.1), "lr: got 0.1, and args.json says learning_rate 0.001"),
        ({"warmup_ratio": 0.1}, ("--warmup", 2), "warmup: got 2, and args.json says warmup_ratio 0.1"),
        ({"lr_scheduler_kwargs": [1]}, (), "expected names with values"),
        ({}, ("--lr-schedule", "linear"), "says lr_scheduler_type linear"),
        ({"max_steps": 5}, ("--epochs", 1), "epochs.*steps"),
        ({"lr_scheduler_kwargs": {"num_cycle": 1}, "lr_scheduler_type": "cosine"}, (), "did you mean 'num_cycles'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, (), "expected min_lr or min_lr_rate"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, (), "without num_decay_steps"),
        ({"beta": 0.1, "loss_type": "hinge"}, (), "loss_type: got hinge, expected one of sigmoid, ipo"),
        ({"loss_type": "dft", "packing": True}, (), "loss_type: got 'dft', expected nll"),
        ({"a": 1, "fsdp": "full_shard"}, (), r"(?s)'a'.*\nfsdp: got 'full_shard', which is not .*--stage 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(file: dict[str, Any], flags: tuple[object, ...], reason: str) -> None:
    assert re.search(reason, refusal(file, *flags))


FILES = {  # what is wrong with a file as a whole: its name, and its text (None: there is none)
    ("no.json", None): "no.json: got 'No such file or directory', expected a JSON file, or YAML called .yaml",
    ("no.yaml", None): "no.yaml: got 'No such file or directory', expected a YAML or JSON file",
    (
        "args.yaml",
        "seed: 1\nbf16: true\nseed: 2",
    ): "args.yaml: got 'seed' twice, expected each name once: leave one",
    (
        "args.yml",
        "fsdp_config: {version: 1, version: 2}",
    ): "args.yml: got 'version' twice, expected each name",
    (
        "args.yaml",
        "evaluation_strategy: steps\neval_strategy: epoch",
    ): "args.yaml: got 'evaluation_strategy' and 'eval_strategy', expected one of the two: leave one out",
    ("args.json", "seed: 1"): "args.json: got line 1.*expected JSON, with comments .*, or YAML called .yaml",
    ("args.yaml", "a: [1"): "args.yaml: got .*, expected YAML",
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_arguments_says_the_formats(name: tuple[str, str | None]) -> None:
    path, text = Path(name[0]), name[1]
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=FILES[name]):
        read_args(path)
