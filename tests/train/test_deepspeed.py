"""DeepSpeed's files: read leniently, checked strictly, nothing of them dropped in silence; and its learning rates,
betas and loss scales, as DeepSpeed itself gives them."""

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import zfunc
from zfunc.errors import NonFiniteError
from zfunc.optim.adamw import AdamW
from zfunc.optim.elementwise import matrices_only
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.keys import BLOCKS, KEYS, OLD_NAMES, ConfigValues, read_value, read_values
from zfunc.train.deepspeed.learning_rate_schedules import (
    SCHEDULERS,
    LRSchedule,
    lr_schedule,
)
from zfunc.train.deepspeed.mapping import DeepSpeedSettings, named_optimizer, notes, with_config

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "deepspeed.json"
CASES: dict[str, list[dict[str, Any]]] = json.loads(GOLDEN.read_text())
BATCH, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
AUTO = "auto"
TUTORIAL = """{
  "train_batch_size": 10,
  "gradient_accumulation_steps": 1,
  "steps_per_print": 1,
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {
      "device": "cpu",       // the one line that matters
    },
    "contiguous_gradients": true,
    "overlap_comm": true
  },
  /* "optimizer": given by the program, */
  "gradient_clipping": 1.0,
  "wall_clock_breakdown": false,
  "zero_allow_untested_optimizer": true,
  "fp16": { "enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1, },
  "activation_checkpointing": { "partition_activations": false, "contiguous_memory_optimization": false },
}
"""


def from_deepspeed(file: Any, **more: Any) -> DeepSpeedSettings:
    """What a file says; a dict that says nothing of the batch gets one."""
    if isinstance(file, dict) and not any("batch" in name or "accumulation" in name for name in file):
        file = {BATCH: 8, **file}
    return zfunc.from_deepspeed(file, **more)


def nested(name: str, value: Any) -> dict[str, Any]:
    """The file that has one key, by its dotted name."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def zero(**block: Any) -> dict[str, Any]:
    return {"zero_optimization": block}


def adam(kind: str = "Adam", /, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def rate(kind: str | None, /, **params: Any) -> dict[str, Any]:
    return {**adam(lr=0.5), "scheduler": {"type": kind, "params": params}}


def optimizer(kind: str, **params: Any) -> Any:
    return from_deepspeed(adam(kind, **params)).compile["optimizer"]


def refusal(file: Any, **more: Any) -> str:
    with pytest.raises(ValueError, match="expected|not supported|unknown|does not") as caught:
        from_deepspeed(file, **more)
    return str(caught.value)


# --- what is refused -------------------------------------------------------------------------------------

NO_BATCH = "got neither train_batch_size nor train_micro_batch_size_per_gpu, exp"
MESSAGES: list[tuple[Any, str]] = [
    ({"train_batch_sise": 4}, "'train_batch_sise' in the file itself.*did you mean 'train_batch_size'"),
    ({"fp16": {"enable": True}}, "'enable' in fp16.*did you mean 'enabled'"),
    (zero(offload_optimizer={"devise": "cpu"}), "offload_optimizer.*did you mean 'device'"),
    (nested("optimizer.params.beta", 1), "'beta' in optimizer.params.*did you mean 'betas'"),
    (nested("aio.block_sizes", 1), "did you mean 'block_size'"),
    (
        zero(aio={"block_size": 1 << 20}),
        "'aio' in zero_optimization, which is unknown: move it to the file itself",
    ),
    ({"stage": 2}, "'stage' in the file itself, which is unknown: move it to zero_optimization"),
    ({"fp16": True}, "fp16 True, expected an object"),
    ({"fp16": {"_comment": "DeepSpeed refuses it, too"}}, "'_comment' in fp16, which is unknown"),
    ({"of_a_plugin": {"enabled": True}}, "'of_a_plugin' in the file itself, which is unknown"),
    ({"a1": 1, "fp16": {"b2": 1, "loss_scale": "x"}}, r"'a1'.*\n.*'b2'.*\nfp16.loss_scale: got 'x'"),
    ({"gradient_allreduce_op": "sum"}, 'use "mean"'),
    (adam(amsgrad=True), "AMSGrad"),
    (adam(max_grad_norm=1.0), "gradient_clipping"),
    (adam(bias_correction=False), "leave it out"),
    (adam("Lamb"), "got 'Lamb', expected Adam, AdamW, Lion, Adagrad, SGD, Muon"),
    (adam("OneBitAdam", lr=1e-3, freeze_step=400), r"(?s)optimizer.type: got 'OneBitAdam'(?!.*freeze_step)"),
    (adam(lr="1e-3"), "got '1e-3', expected float, 0 or more"),
    (adam("Muon"), "got none with the type Muon"),
    (adam("Muon", lr=1e-2, adam_lr=1e-3), "one learning rate: write lr"),
    (adam("Muon", lr=1e-2, ns_method="gram"), "zfunc has the standard Newton-Schulz: write"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
    (
        nested("zero_optimization.offload_optimizer", {"device": "nvme", "nvme_path": "/a", "ratio": 0.75}),
        r"got zero_optimization.offload_optimizer.ratio 0.75 with device nvme, expected 1",
    ),
    ({"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}}, r"first scale of 2\*\*4"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window 0"),
    ({"fp16": {"loss_scale": float("inf")}}, "expected float"),
    ({"fp16": {"min_loss_scale": 0.5}}, "expected int"),
    ({"compile": {"deepcompile": True}}, "not supported"),
    ({"tensor_parallel": {"autotp_size": 2}}, "not supported"),
    (zero(cpu_offload=True, offload_optimizer={"device": "cpu"}), "its name today"),
    ({BATCH: None}, NO_BATCH),
    ({"gradient_accumulation_steps": 2}, NO_BATCH),
    ({MICRO: AUTO}, NO_BATCH),
    (
        {BATCH: None, "optimizer": {"params": {"lr": 1}}, "scheduler": {"params": {}}},
        f"{NO_BATCH}.*\ngot optimizer without",
    ),
    (rate("WarmupDecayLR"), "without total_num_steps"),
    (rate("WarmupCosineLR", total_num_steps=AUTO), "without total_num_steps"),
    (rate("OneCycle", cycle_momentum=False), "without cycle_min_lr and cycle_max_lr"),
    (rate("WarmupLR", warmup_type="cubic"), "expected log, linear"),
    (rate("Warmup"), "did you mean 'WarmupLR'"),
    (rate(None, warmup_num_steps=3), "got scheduler without a type"),
    (
        {BATCH: 32, MICRO: 4, "gradient_accumulation_steps": 3},
        r"got train_batch_size 32, expected 4 x 3 .* = 12",
    ),
    ({BATCH: 10, MICRO: 4}, r"expected 4 x 2 .* = 8: correct"),
    ({BATCH: 10, "gradient_accumulation_steps": 3}, r"expected 3 x 3 .* = 9"),
]


@pytest.mark.parametrize(("file", "reason"), MESSAGES)
def test_what_is_wrong_is_said(file: dict[str, Any], reason: str) -> None:
    assert re.search(reason, refusal(file), re.DOTALL)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"b": {"c": 1},\n"d": {"c": 1,\n"x": "c",\n c: 2}}', 'Duplicate key "c"'),
        ('{"a": 1\n"b": 2}', 'line 2 Unexpected """ at column 1'),
        ('{\n# no comment here\n"b": 2}', "line 2 .*with comments as // and /"),
        ("[1]", "got a list, expected a JSON object"),
        ("", "expected JSON"),
        ("[" * 5000, "expected JSON"),
        ('{"train_batch_size": "\udcff"}', "invalid start byte"),
    ],
)
def test_what_is_no_json_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert re.search(rf"(?s)^{path}: .*{reason}", refusal(path))
    assert "No such file" in refusal(tmp_path / "missing.json")


def test_given_values_fill_what_is_open_and_contradict_nothing() -> None:
    message = refusal({"gradient_clipping": 1.0}, given={"gradient_clipping": 2.0})
    assert "given['gradient_clipping']: got 2.0, and the dict says gradient_clipping 1.0" in message
    assert "did you mean 'optimizer.params.lr'" in refusal({}, given={"optimizer.params.lrr": 1.0})
    assert "expected float" in refusal({}, given={"optimizer.params.lr": "1e-3"})
    assert zfunc.from_deepspeed({}, given={BATCH: 8}).train_batch_size == 8


# --- the table -------------------------------------------------------------------------------------------


def test_every_key_accepts_its_default() -> None:
    """A file that says a default means what one without it does; a wrong kind of value is refused by name."""
    for key in KEYS.values():
        assert key.name in refusal(nested(key.name, [object()]))
        if key.default is not None:
            values = read_values(nested(key.name, key.default))
            assert values[key.name] == key.default
            idle = [x for x in notes(values, "", None) if x.startswith(f"no effect: {key.name}: ")]
            assert bool(idle) == (key.fate == "ignored"), key
    assert set(OLD_NAMES.values()) <= KEYS.keys()
    assert not OLD_NAMES.keys() & (KEYS.keys() | BLOCKS)


def test_what_is_refused_says_what_to_do() -> None:
    for key in (k for k in KEYS.values() if k.fate == "unsupported"):
        tried = [True, False, 8, "sum", "gram", {"enabled": True}, {"topk_ratio": 0.1}]
        value = next(x for x in tried if (y := read_value(key.type, x)) is not None and key.acts(y))
        message = refusal(nested(key.name, value))
        assert f"{key.name}: got" in message
        assert "not supported" in message


# --- what it means ---------------------------------------------------------------------------------------


def test_the_file_of_deepspeeds_tutorial(tmp_path: Path) -> None:
    path = tmp_path / "ds_zero_offload.config"
    path.write_bytes(b"\xef\xbb\xbf" + TUTORIAL.encode())  # as editors of other systems begin a file
    config = zfunc.from_deepspeed(path)
    assert dict(config.compile) == {
        **{"optimizer": AdamW(1e-3), "precision": "fp16", "clip_norm": 1.0, "micro_batches": 1},
        **{"stage": 2, "state_on": "host"},
    }
    assert config.loss_scale == LossScale()
    assert (config.train_batch_size, config.steps_per_print) == (10, 1)
    idle = "\n".join(line for line in config.notes if line.startswith("no effect:"))
    for key in (
        "contiguous_gradients",
        "overlap_comm",
        "zero_allow_untested_optimizer",
        "partition_activations",
    ):
        assert len(re.findall(rf"\b{key}\b", idle)) == 1, key
    assert "gradient_clipping" not in idle


NVME = {"device": "nvme", "nvme_path": "/a"}
SWAPPED = {"state_on": "disk", "swap": ("/a",)}
PLACES = ("params_on", "slots", "activations_on", "persistent_params", "state_on", "swap")
MEANING: list[tuple[dict[str, Any], dict[str, Any]]] = [  # files, and what they set of `zfunc.compile`
    ({}, {"stage": 1, "clip_norm": 1.0, "precision": "fp32"}),
    ({"gradient_clipping": 0}, {"clip_norm": None}),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"precision": "bf16"}),
    ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
    (zero(stage=0, reduce_bucket_size=2e5), {"stage": 1, "bucket_size": 200_000}),
    ({"zero_optimization": True}, {"stage": 1}),
    (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), {"state_on": "device:0.5,host"}),
    (zero(offload_optimizer={"device": "none"}), {"state_on": "device"}),
    (zero(cpu_offload=True, max_live_parameters=5), {"state_on": "host"}),
    (zero(cpu_offload=False), {"state_on": "device"}),
    (zero(stage=3), {"stage": 3}),
    (zero(stage=3, offload_param={"device": "none"}), {"params_on": "device"}),
    (zero(stage=3, offload_param={"device": "cpu"}), {"params_on": "host"}),
    (zero(stage=3, cpu_offload_param=True), {"params_on": "host"}),
    (zero(offload_optimizer=NVME, offload_param=NVME), {"stage": 1, **SWAPPED}),
    (
        zero(stage=3, offload_optimizer=NVME, offload_param={"device": "nvme", "nvme_path": "/b"}),
        {"params_on": "disk", "state_on": "disk", "swap": ("/a", "/b")},
    ),
    (zero(stage=2, offload_param={"device": "cpu"}), {"stage": 2}),
    (zero(stage=3, stage3_prefetch_bucket_size=0), {"slots": 1}),
    (zero(stage=3, stage3_prefetch_bucket_size=5e7), {"stage": 3}),
    (zero(stage=3, param_persistence_threshold=1e4), {"persistent_params": 10_000}),
    (nested("activation_checkpointing.cpu_checkpointing", True), {"activations_on": "host"}),
    (nested("activation_checkpointing.cpu_checkpointing", False), {"activations_on": "device"}),
    ({"elasticity": {"enabled": False}, "compile": {"deepcompile": False, "passes": []}}, {}),
    ({**zero(zenflow=None), "tensor_parallel": {"dtype": "fp16"}, "torch_autocast": {"enabled": AUTO}}, {}),
]


@pytest.mark.parametrize(("file", "expected"), MEANING)
def test_what_a_file_sets(file: dict[str, Any], expected: dict[str, Any]) -> None:
    """And nothing else of where state, parameters and activations are; so it does of a training's settings."""
    config = from_deepspeed(file)
    assert {x: config.compile[x] for x in config.compile if x in (*expected, *PLACES)} == expected
    trained = with_config({"config": {BATCH: 8, **file}}, 1)
    for name in config.compile.keys() & trained.keys() - {"optimizer"}:
        assert trained[name] == config.compile[name], name
    block = file.get("zero_optimization")
    offloaded = isinstance(block, dict) and "offload_param" in block and block.get("stage") != 3
    assert any("offload_param.device: for stage 3 only" in line for line in config.notes) == offloaded


def test_what_has_no_effect_is_said() -> None:
    aio = {"block_size": 1 << 18, "thread_count": 1, "fancy": 3}  # nothing of DeepSpeed reads the last two
    blocks = {"flops_profiler": {"enabled": True, "of_a_later_version": 1}, "comet": {"mode": "x"}}
    blocks |= {"_comment": "a comment", "optimizer": {"type": "Adam", "_": 1}, "comms_config": {"a": 1}}
    blocks |= {"of_a_plugin": {"enabled": False, "level": 2}, "wandb": {"enabled": True}}
    notes = from_deepspeed({**blocks, "aio": aio, **zero(cpu_offload=True)}).notes
    idle = {line.split(": ")[1] for line in notes if line.startswith("no effect:")}
    unread = "_comment, optimizer._, of_a_plugin, aio.thread_count, aio.fancy"
    assert idle == {"flops_profiler", "comet", "wandb", "comms_config", "aio.block_size", unread}
    for file, words in (
        (adam("SGD", betas=[0.9, 0.99]), "optimizer.params.betas: not of the optimizer SGD"),
        (adam("Adagrad", adam_w_mode=True), "optimizer.params.adam_w_mode: not of the optimizer Adagrad"),
        (rate("WarmupLR", total_num_steps=3), "total_num_steps: not of the scheduler WarmupLR"),
        (
            rate("WarmupCosineLR", warmup_max_lr=3, total_num_steps=9),
            "warmup_max_lr: not of the scheduler WarmupCosineLR",
        ),
        (rate("LRRangeTest"), "optimizer.params.lr: LRRangeTest sets the learning rate alone"),
    ):
        (line,) = (x for x in from_deepspeed(file).notes if x.startswith("no effect: "))
        assert words in line
    assert any("cpu_offload is the old name of" in line for line in notes)
    assert any("wandb: pass `--wandb` to `zfunc train`" in line for line in notes)


def test_any_two_batch_sizes_give_the_third() -> None:
    sizes = {BATCH: 24, MICRO: 4, "gradient_accumulation_steps": 3}
    left_out: list[dict[str, Any]] = [{}, *({name: None} for name in sizes)]
    files = [(sizes | out, (24, 3)) for out in left_out]
    for file, expected in [*files, ({BATCH: 24}, (24, 1)), ({MICRO: 4}, (8, 1))]:
        config = from_deepspeed(file, world=2)
        assert (config.train_batch_size, config.compile["micro_batches"]) == expected


OPTIMIZERS: list[tuple[str, dict[str, Any], Any]] = [  # with the defaults of DeepSpeed's own classes
    ("Adam", {}, AdamW(1e-3, weight_decay=0.0)),  # without `adam_w_mode` it decays as AdamW
    ("adam", {"adam_w_mode": False}, AdamW(1e-3, weight_decay=0.0, decoupled=False)),
    ("AdamW", {"adam_w_mode": False}, AdamW(1e-3, weight_decay=0.0)),
    ("AdamW", {"torch_adam": True}, AdamW(1e-3, weight_decay=0.01)),
    ("Adam", {"torch_adam": True}, AdamW(1e-3, weight_decay=0.0)),
    ("AdamW", {"torch_adam": True, "weight_decay": 0.2}, AdamW(1e-3, weight_decay=0.2)),
    (
        "AdamW",
        {"lr": 1, "betas": [0.8, 0.9], "eps": 1e-6},
        AdamW(1.0, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0),
    ),
    ("Adam", {"fp32_optimizer_states": False}, AdamW(1e-3, weight_decay=0.0, moments="16bit")),
    ("lion", {}, zfunc.Lion(1e-3, betas=(0.9, 0.999))),
    ("Lion", {"fp32_optimizer_states": False}, zfunc.Lion(1e-3, betas=(0.9, 0.999), moments="16bit")),
    ("Adagrad", {}, zfunc.Adagrad(1e-2)),
    ("Adagrad", {"lr": 0.5, "eps": 1e-6, "lr_decay": 0.1}, zfunc.Adagrad(0.5, eps=1e-6, lr_decay=0.1)),
    (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        zfunc.SGD(0.1, momentum=0.9, weight_decay=0.1),
    ),
    (
        "SGD",
        {"momentum": 0.9, "nesterov": True},
        zfunc.SGD(1e-3, momentum=0.9, nesterov=True, weight_decay=0.0),
    ),
]


@pytest.mark.parametrize(("kind", "params", "expected"), OPTIMIZERS)
def test_optimizers_are_deepspeeds(kind: str, params: dict[str, Any], expected: Any) -> None:
    assert optimizer(kind, **params) == expected


def test_muon_has_adamw_beside_it_and_decay_is_the_callers() -> None:
    hidden, rest = optimizer("Muon", lr=0.02, momentum=0.9, weight_decay=0.1).optimizers
    assert hidden == zfunc.Muon(0.02, momentum=0.9, weight_decay=0.1)
    assert rest == zfunc.AdamW(0.02, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    assert from_deepspeed(adam(), decay=matrices_only).compile["optimizer"].decay is matrices_only


def test_loss_scales() -> None:
    def scale_of(**fp16: Any) -> LossScale | None:
        return from_deepspeed({"fp16": {"enabled": True, **fp16}}).loss_scale

    assert scale_of() == LossScale(2.0**16, window=1000, hysteresis=2, minimum=1.0)
    assert scale_of(loss_scale=128, loss_scale_window=0, min_loss_scale=0) == LossScale(128.0, window=0)
    moving = {"initial_scale_power": 20, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 4.0}
    expected = LossScale(2.0**20, window=5, hysteresis=3, minimum=4.0, consecutive=True)
    assert scale_of(**moving, consecutive_hysteresis=True) == expected
    assert from_deepspeed({"bf16": {"enabled": True}}).loss_scale is None


def test_a_scheduler_takes_open_keys_from_the_optimizer_or_the_caller() -> None:
    def scheduled(kind: str, **params: Any) -> Any:
        given = {"scheduler.params.total_num_steps": 50} if kind != "WarmupLR" else None
        return from_deepspeed(rate(kind, **params), given=given).compile["optimizer"].lr

    usual = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.5, "warmup_num_steps": 1000, "warmup_type": "log"}
    made = scheduled("WarmupDecayLR", warmup_max_lr=AUTO, total_num_steps=AUTO)
    assert made.params == usual | {"total_num_steps": 50}
    made = scheduled("WarmupDecayLR", warmup_num_steps=AUTO)
    assert (made.params["warmup_max_lr"], made.params["total_num_steps"]) == (1e-3, 50)
    assert scheduled("WarmupLR") == LRSchedule("WarmupLR", usual)
    assert scheduled("WarmupCosineLR").params["lr"] == 0.5


def test_auto_is_what_is_given_or_the_default() -> None:
    file = {
        **dict.fromkeys((BATCH, "gradient_accumulation_steps", "gradient_clipping"), AUTO),
        **{"fp16": {"enabled": AUTO}, "bf16": {"enabled": AUTO}},
        **adam("AdamW", lr=AUTO, betas=AUTO, weight_decay=AUTO),
        **zero(stage=AUTO, reduce_bucket_size=AUTO, offload_optimizer={"ratio": AUTO}),
    }
    config = from_deepspeed({**file, MICRO: 4})
    assert dict(config.compile) == {"optimizer": AdamW(), "micro_batches": 1}
    for fp16, bf16, precision in (
        *((AUTO, AUTO, None), (AUTO, None, None), (None, AUTO, None), (False, AUTO, None)),
        *((AUTO, False, "fp32"), (False, False, "fp32"), (None, None, "fp32"), (True, AUTO, "fp16")),
    ):  # None: the default of zfunc.compile, bf16
        switches = {"fp16": {"enabled": fp16}, "bf16": {"enabled": bf16}, MICRO: 1}
        assert from_deepspeed(switches).compile.get("precision") == precision
    for kind, more in (("SGD", {}), ("Lion", {"betas": AUTO}), ("Adagrad", {}), ("Adam", {})):
        made = optimizer(kind, lr=AUTO, weight_decay=AUTO, **more)
        assert made == (AdamW if kind == "Adam" else getattr(zfunc, kind))()
    given = {"optimizer.params.lr": 0.25, BATCH: 6, "bf16.enabled": True, "gradient_clipping": 3.0}
    config = from_deepspeed(file, given=given)
    assert (config.compile["optimizer"].lr, config.train_batch_size) == (0.25, 6)
    assert (config.compile["clip_norm"], config.compile["precision"]) == (3.0, "bf16")
    (line,) = [line for line in config.notes if line.startswith('"auto"')]
    assert "zero_optimization.reduce_bucket_size" in line
    assert "optimizer.params.lr" not in line


# --- curves ----------------------------------------------------------------------------------------------


def name(case: dict[str, Any]) -> str:
    return f"{case['type']} {' '.join(case['params'])}"


def values(case: dict[str, Any]) -> ConfigValues:
    """A file that has this case."""
    scheduler = {"type": case["type"], "params": case["params"]}
    return read_values({**adam(lr=case["lr"]), "scheduler": scheduler})


def test_every_scheduler_has_cases() -> None:
    assert {case["type"] for case in CASES["schedules"]} == set(SCHEDULERS)


@pytest.mark.parametrize("case", CASES["schedules"], ids=name)
def test_learning_rates_equal_deepspeeds_at_every_update(case: dict[str, Any]) -> None:
    rate = lr_schedule(values(case), lr=case["lr"])
    assert rate is not None
    rates = [rate(step) for step in range(1, len(case["rates"]) + 1)]
    # Equal bits where it was recorded; the last one of a logarithm or cosine is the C library's.
    assert all(abs(a - b) <= 2 * math.ulp(b) for a, b in zip(rates, case["rates"], strict=True))
    assert rates == [rate(step) for step in range(1, len(rates) + 1)]
    with pytest.raises(ValueError, match="counted from 1"):
        rate(0)


@pytest.mark.parametrize("case", [case for case in CASES["schedules"] if "betas" in case], ids=name)
def test_betas_of_one_cycle_equal_deepspeeds_at_every_update(case: dict[str, Any]) -> None:
    adam = AdamW(betas=named_optimizer(values(case))[1]["betas"])
    assert [list(adam.factors(step)["betas"]) for step in range(1, len(case["betas"]) + 1)] == case["betas"]


def test_an_update_whose_beta_has_risen_to_1_is_refused() -> None:
    params = {"cycle_first_step_size": 2, "decay_step_size": 1, "decay_mom_rate": 0.1}
    file = rate("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, **params)
    adam = from_deepspeed(file).compile["optimizer"]
    assert adam.factors(6)["betas"][0] == pytest.approx(0.99)
    with pytest.raises(ValueError, match=r"^betas at step 7: got \(1\.08"):
        adam.factors(7)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_nothing_decays_while_the_end_is_not_known(kind: str) -> None:
    rate = lr_schedule(read_values({"scheduler": {"type": kind}}), lr=1e-3, total_num_steps=None)
    assert rate is not None
    assert rate(2000) == rate(10_000) == 1e-3


@pytest.mark.parametrize("case", CASES["loss_scales"], ids=lambda case: str(case["told"]))
def test_loss_scales_equal_deepspeeds_at_every_step(case: dict[str, Any]) -> None:
    scale, seen = LossScale(**case["told"]), []
    for overflow in case["overflows"]:
        try:
            scale = scale.update(overflow=bool(overflow))
        except NonFiniteError:
            break
        seen.append(scale.scale)
    assert seen == case["scales"]


def test_the_goldens_are_what_deepspeed_gives() -> None:
    python = os.environ.get("DEEPSPEED_PYTHON")
    if python is None:
        pytest.skip("DEEPSPEED_PYTHON names no Python that has DeepSpeed")
    script = ROOT / "tests" / "deepspeed_reference.py"
    done = subprocess.run([python, script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == CASES


def test_the_pages_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(code, {"__name__": "page"})
    assert "learning rate 3.01e-04" in capsys.readouterr().out
