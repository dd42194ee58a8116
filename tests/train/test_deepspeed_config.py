"""DeepSpeed's configuration files: read leniently, checked strictly, and nothing of them dropped in silence."""

import re
from pathlib import Path
from typing import Any

import pytest

import zfunc
from zfunc.optim.adamw import AdamW
from zfunc.optim.loss_scale import LossScale
from zfunc.optim.optimizer_settings import matrices_only
from zfunc.train.deepspeed.convert import DeepSpeedSettings
from zfunc.train.deepspeed.keys import BLOCKS, KEYS, OLD_NAMES, parse_table
from zfunc.train.deepspeed.lr import SCHEDULERS
from zfunc.train.deepspeed.reader import parse_config, read_config_file
from zfunc.train.deepspeed.resolved import resolve_values

ROOT = Path(__file__).parents[2]
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


BATCH, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"


def optimizer(kind: str, **params: Any) -> Any:
    return from_deepspeed({"optimizer": {"type": kind, "params": params}}).compile["optimizer"]


def refusal(file: Any, **more: Any) -> str:
    with pytest.raises(ValueError, match="expected|not supported|unknown") as caught:
        from_deepspeed(file, **more)
    return str(caught.value)


# --- reading ---------------------------------------------------------------------------------------------


def test_the_file_of_deepspeeds_tutorial(tmp_path: Path) -> None:
    path = tmp_path / "ds_zero_offload.config"
    path.write_text(TUTORIAL)
    config = zfunc.from_deepspeed(path)
    assert dict(config.compile) == {
        "optimizer": AdamW(1e-3),
        "precision": "fp16",
        "clip_norm": 1.0,
        "micro_batches": 1,
        "stage": 2,
        "offload_ratio": 1.0,
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


def test_files_of_other_editors(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"train_batch_size": 4}')
    assert from_deepspeed(str(path)).train_batch_size == 4
    assert parse_config('{"a": 5e8}') == {"a": 5e8}
    path.write_bytes(b'{"train_batch_size": "\xff"}')
    assert "not UTF-8" in refusal(path)
    assert "No such file" in refusal(tmp_path / "missing.json")
    with pytest.raises(TypeError, match="expected the path of a JSON file, or a dict"):
        from_deepspeed(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1,\n"b": 2, /* "b": 9 */\n"c": {"b": 1},\n"b": 3}', "'b' twice .* lines 2 and 4"),
        ('{"b": {"c": 1},\n"d": {"c": 1,\n"x": "c",\n c: 2}}', "'c' twice .* lines 2 and 4"),
        ('{"a": 1\n"b": 2}', 'line 2 Unexpected """ at column 1'),
        ('{\n# no comment here\n"b": 2}', "line 2 .*with // and /"),
        ("[1]", "got a list, expected a JSON object"),
        ("", "cannot read"),
        ("[" * 5000, "expected JSON"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^f\.json: .*{reason}"):
        parse_config(text, "f.json")


# --- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ({"train_batch_sise": 4}, "'train_batch_sise' at the top level.*did you mean 'train_batch_size'"),
        ({"fp16": {"enable": True}}, "'enable' in 'fp16'.*did you mean 'enabled'"),
        (nested("zero_optimization.stge", 2), "'stge' in 'zero_optimization'.*did you mean 'stage'"),
        (
            nested("zero_optimization.offload_optimizer.devise", "cpu"),
            "offload_optimizer'.*did you mean 'device'",
        ),
        (nested("optimizer.params.beta", 1), "'beta' in 'optimizer.params'.*did you mean 'betas'"),
        (nested("scheduler.params.warmup_steps", 1), "did you mean 'warmup_num_steps'"),
        (nested("aio.block_sizes", 1), "did you mean 'block_size'"),
        (nested("flops_profiler.enable", True), "did you mean 'enabled'"),
        (nested("activation_checkpointing.cpu_checkpoint", True), "did you mean 'cpu_checkpointing'"),
        ({"stage": 2}, "it belongs in 'zero_optimization'"),
        (nested("fp16.gradient_clipping", 2), "it belongs at the top level"),
        ({"fp16": True}, "fp16 True, expected an object"),
    ],
)
def test_an_unknown_key_at_any_level_is_an_error_with_the_nearest(file: dict[str, Any], reason: str) -> None:
    assert re.search(reason, refusal(file))


def test_all_unknown_keys_are_named_at_once() -> None:
    message = refusal({"a1": 1, "fp16": {"b2": 1}, "aio": {"c3": 1}})
    assert all(key in message for key in ("a1", "b2", "c3"))


def test_every_key_accepts_its_default() -> None:
    """A file that says a default means what one without it does; a wrong kind of value is refused by name."""
    wrong = object()
    for key in KEYS.values():
        if key.type.read(wrong) is None:
            assert key.name in refusal(nested(key.name, wrong))
        if key.default is not None and key.default not in key.exceptions:
            values = resolve_values(read_config_file(nested(key.name, key.default)))
            assert values[key.name] == key.default
            assert list(values.ignored().values()) == ([[key.name]] if key.fate == "ignored" else []), key


def test_what_is_refused_says_what_to_do() -> None:
    for key in (k for k in KEYS.values() if k.fate == "unsupported" or k.exceptions):
        tried = [*key.exceptions, True, 8, "cpu", {"enabled": True}, {"topk_ratio": 0.1}]
        value = next(x for x in tried if (y := key.type.read(x)) is not None and key.refusal(y))
        message = refusal(nested(key.name, value))
        assert key.name in message
        assert "not supported" in message


def test_blocks_that_are_switched_off_are_skipped() -> None:
    off = {"elasticity": {"enabled": False}, "amp": {"enabled": False}, "hybrid_engine": {"enabled": False}}
    assert from_deepspeed({**off, "zero_optimization": {"zenflow": None}}).compile["precision"] == "fp32"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "state there too: set zero",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "none"},
                    "offload_param": {"device": "cpu"},
                }
            },
            "offload_optimizer.device to cpu",
        ),
        ({"gradient_allreduce_op": "sum"}, 'use "mean"'),
        (nested("optimizer", {"type": "Adam", "params": {"amsgrad": True}}), "AMSGrad"),
        (nested("optimizer", {"type": "Adam", "params": {"max_grad_norm": 1.0}}), "gradient_clipping"),
        (nested("optimizer", {"type": "Adam", "params": {"bias_correction": False}}), "leave it out"),
        (nested("optimizer", {"type": "Lamb"}), "expected one of Adam, AdamW, Lion, Adagrad, SGD"),
        (nested("optimizer", {"params": {"lr": 1e-3}}), "got no type"),
        (nested("optimizer", {"type": "Adam", "params": {"lr": "1e-3"}}), "got '1e-3', expected a number"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ({"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}}, "2\\*\\*4 = 16"),
        ({"fp16": {"loss_scale": float("inf")}}, "expected a number"),
    ],
)
def test_unsupported_values_say_what_to_use_instead(file: dict[str, Any], reason: str) -> None:
    assert re.search(reason, refusal(file))


def test_old_names_set_the_new_keys() -> None:
    config = from_deepspeed(
        {"zero_optimization": {"stage": 1, "cpu_offload": True, "max_live_parameters": 5}}
    )
    assert (config.compile["stage"], config.compile["offload_ratio"]) == (1, 1.0)
    assert any("cpu_offload is the old name of" in line for line in config.notes)
    assert from_deepspeed({"zero_optimization": True}).compile["stage"] == 1
    assert from_deepspeed({"bfloat16": {"enabled": True}}).compile["precision"] == "bf16"
    assert from_deepspeed(nested("zero_optimization.cpu_offload", False)).compile["offload_ratio"] == 0.0
    both = {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}}
    assert "its name today" in refusal(both)
    assert all(one.key in KEYS for one in OLD_NAMES.values())
    assert not OLD_NAMES.keys() & (KEYS.keys() | BLOCKS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{ type = "int 1.." }', "expected type"),
        ('{ type = "int 1..", supported = "x", ignored = "y" }', "expected type"),
        ('{ type = "int 1..", supported = "x", note = "y" }', "expected type"),
        ('{ type = "int 1..", supported = "x", except = [3] }', "expected type"),
        ('{ supported = "x" }', "expected type"),
        ('{ type = "integer", supported = "x" }', "got 'integer'"),
        ('{ type = "int one..", supported = "x" }', "could not convert"),
        ('{ type = "int 1..", ignored = "{mean}" }', "got 'mean'"),
        ('{ type = "int 1..", default = 0, ignored = "x" }', "got 0, expected a whole number of at least 1"),
    ],
)
def test_a_wrong_row_of_the_table_is_refused(row: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^a.b: .*{message}"):
        parse_table(f'[notes]\n[keys]\n"a.b" = {row}\n[old]')


def test_an_old_name_stands_for_a_key_and_is_none() -> None:
    good = '{ type = "bool", ignored = "x" }'
    for name, key in (("c", "d"), ("a", "a")):
        with pytest.raises(ValueError, match=f"^old name {name}: got {key}"):
            parse_table(f'[notes]\n[keys]\na = {good}\n[old]\n{name} = "{key}"')


# --- what it means ---------------------------------------------------------------------------------------


def batch_of(world: int = 2, **sizes: Any) -> tuple[int | None, int]:
    names = {"train": BATCH, "micro": MICRO, "steps": "gradient_accumulation_steps"}
    config = from_deepspeed({names[name]: n for name, n in sizes.items()}, world=world)
    return config.train_batch_size, config.compile["micro_batches"]


def test_any_two_batch_sizes_give_the_third() -> None:
    sizes = {"train": 24, "micro": 4, "steps": 3}
    for left_out in (*sizes, ""):
        assert batch_of(**{name: n for name, n in sizes.items() if name != left_out}) == (24, 3)
    assert batch_of(train=24) == (24, 1)
    assert batch_of(micro=4) == (8, 1)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"train": 32, "micro": 4, "steps": 3}, ("32", "4 x 3 x 2 = 24")),
        ({"train": 10, "micro": 4, "world": 1}, ("10", "4 x 1 ranks = 4", "8 or 12")),
        ({"train": 10, "steps": 2, "world": 3}, ("10", "2 x 3 ranks = 6", "6 or 12")),
        ({"train": 1}, ("make it 2",)),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_an_error(sizes: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="got train_batch_size") as caught:
        batch_of(**sizes)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("file", [{}, {"gradient_accumulation_steps": 2}, {BATCH: None}, {MICRO: "auto"}])
def test_a_file_without_a_batch_size_is_an_error_as_in_deepspeed(file: dict[str, Any]) -> None:
    """DeepSpeed: 'Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided'."""
    with pytest.raises(
        ValueError, match="got neither train_batch_size nor train_micro_batch_size_per_gpu, exp"
    ):
        zfunc.from_deepspeed(file)
    assert zfunc.from_deepspeed(file, given={BATCH: 8}).train_batch_size == 8


def test_adam_is_deepspeeds() -> None:
    """Without `adam_w_mode` Adam decays as AdamW, and a weight decay that nobody says is 0."""
    assert optimizer("Adam") == AdamW(1e-3, weight_decay=0.0)
    assert not optimizer("adam", adam_w_mode=False).decoupled
    assert optimizer("AdamW", adam_w_mode=False).decoupled
    assert optimizer("AdamW", torch_adam=True).weight_decay == 0.01
    assert optimizer("Adam", torch_adam=True).weight_decay == 0.0
    assert optimizer("AdamW", torch_adam=True, weight_decay=0.2).weight_decay == 0.2
    given = optimizer("AdamW", lr=1, betas=[0.8, 0.99], eps=1e-6, weight_decay=3e-7)
    assert given == AdamW(1.0, betas=(0.8, 0.99), eps=1e-6, weight_decay=3e-7)
    assert optimizer("Adam", fp32_optimizer_states=False).moments == "16bit"
    config = from_deepspeed({"optimizer": {"type": "Adam"}}, decay=matrices_only)
    assert config.compile["optimizer"].decay is matrices_only


def test_the_other_optimizers_are_deepspeeds() -> None:
    """With the defaults of its own classes: betas of Lion, the rate and eps of Adagrad, Muon's and its Adam's."""
    assert optimizer("lion") == zfunc.Lion(1e-3, betas=(0.9, 0.999))
    assert optimizer("Lion", weight_decay=0.2, fp32_optimizer_states=False).moments == "16bit"
    assert optimizer("Adagrad") == zfunc.Adagrad(1e-2)
    assert optimizer("Adagrad", lr=0.5, eps=1e-6, lr_decay=0.1) == zfunc.Adagrad(0.5, eps=1e-6, lr_decay=0.1)
    sgd = optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    assert sgd == zfunc.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    hidden, rest = optimizer("Muon", lr=0.02, momentum=0.9, weight_decay=0.1).optimizers
    assert hidden == zfunc.Muon(0.02, momentum=0.9, weight_decay=0.1)
    assert rest == zfunc.AdamW(0.02, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    assert "got none with the type Muon" in refusal(nested("optimizer", {"type": "Muon"}))
    assert "one learning rate: write lr" in refusal(
        nested("optimizer", {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-3}})
    )
    assert "zfunc has the standard Newton-Schulz: write" in refusal(
        nested("optimizer", {"type": "Muon", "params": {"lr": 1e-2, "ns_method": "gram"}})
    )
    for kind, wrong in (("SGD", "betas"), ("Lion", "eps"), ("AdamW", "momentum"), ("Adagrad", "adam_w_mode")):
        value = {"betas": [0.9, 0.99], "adam_w_mode": True}.get(wrong, 0.5)
        message = refusal(nested("optimizer", {"type": kind, "params": {wrong: value}}))
        assert f"optimizer.params.{wrong}: got it with the type {kind}, which does not have it" in message


def test_loss_scales() -> None:
    def scale_of(**fp16: Any) -> LossScale | None:
        return from_deepspeed({"fp16": {"enabled": True, **fp16}}).loss_scale

    assert scale_of() == LossScale(2.0**16, window=1000, hysteresis=2, minimum=1.0)
    assert scale_of(loss_scale=128, loss_scale_window=5) == LossScale(128.0, window=0)
    moving = {"initial_scale_power": 20, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 4}
    expected = LossScale(2.0**20, window=5, hysteresis=3, minimum=4.0, consecutive=True)
    assert scale_of(**moving, consecutive_hysteresis=True) == expected
    assert from_deepspeed({"bf16": {"enabled": True}}).loss_scale is None


@pytest.mark.parametrize("name", ["min_loss_scale", "loss_scale_window"])
def test_bounds_of_the_loss_scale_are_whole_numbers_as_in_deepspeed_and_0_only_where_the_scale_is_fixed(
    name: str,
) -> None:
    """DeepSpeed 0.19 declares them as int, and since 0.19.6 refuses 0 for a scale that moves."""
    for wrong in (0.5, 2.5, -1, float("inf")):
        assert f"fp16.{name}: got {wrong}" in refusal(nested(f"fp16.{name}", wrong))
    assert from_deepspeed({"fp16": {"enabled": True, name: 4.0}}).loss_scale is not None
    assert f"fp16.{name}: got 0 for a dynamic loss scale" in refusal({"fp16": {"enabled": True, name: 0}})
    fixed = from_deepspeed({"fp16": {"enabled": True, "loss_scale": 128, name: 0}})
    assert fixed.loss_scale == LossScale(128.0, window=0)


def test_settings_of_compile() -> None:
    offload = {"device": "cpu", "ratio": 0.5}
    config = from_deepspeed(
        {
            "gradient_clipping": 0,
            "wall_clock_breakdown": True,
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 0, "reduce_bucket_size": 2e5, "offload_optimizer": offload},
        }
    )
    assert dict(config.compile) == {
        **{"optimizer": AdamW(1e-3), "precision": "bf16", "clip_norm": None, "micro_batches": 1},
        **{"stage": 1, "bucket_size": 200_000, "offload_ratio": 0.5},
    }
    assert config.wall_clock_breakdown
    assert from_deepspeed({}).compile["clip_norm"] == 1.0  # DeepSpeed's default
    nowhere = nested("zero_optimization.offload_optimizer.device", "none")
    assert from_deepspeed(nowhere).compile["offload_ratio"] == 0


NVME = {"device": "nvme", "nvme_path": "/a"}
SWAPPED = {"state_on": "disk", "swap": ("/a",)}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({}, {"stage": 1}),
        ({"stage": 3}, {"stage": 3}),
        ({"stage": 3, "offload_param": {"device": "none"}}, {"stage": 3, "params_on": "device"}),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, {"stage": 3, "params_on": "host"}),
        ({"stage": 3, "cpu_offload_param": True}, {"stage": 3, "params_on": "host"}),
        ({"offload_optimizer": NVME, "offload_param": NVME}, {"stage": 1, **SWAPPED}),
        (
            {"stage": 3, "offload_optimizer": NVME, "offload_param": {"device": "nvme", "nvme_path": "/b"}},
            {"stage": 3, "params_on": "disk", "state_on": "disk", "swap": ("/a", "/b")},
        ),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, {"stage": 2}),
        ({"stage": 3, "stage3_prefetch_bucket_size": 0}, {"stage": 3, "weight_slots": 1}),
        ({"stage": 3, "stage3_prefetch_bucket_size": 5e7}, {"stage": 3}),
        ({"stage": 3, "param_persistence_threshold": 1e4}, {"stage": 3, "persistent_params": 10_000}),
    ],
)
def test_where_parameters_live(zero: dict[str, Any], expected: dict[str, Any]) -> None:
    config = from_deepspeed({"zero_optimization": zero})
    names = ("stage", "params_on", "weight_slots", "activations_on", "persistent_params", "state_on", "swap")
    assert {name: config.compile[name] for name in names if name in config.compile} == expected
    without_effect = any("offload_param.device: for stage 3 only" in line for line in config.notes)
    assert without_effect == ("offload_param" in zero and zero.get("stage") != 3)


@pytest.mark.parametrize(("value", "place"), [(True, "host"), (False, "device")])
def test_where_activations_wait(value: bool, place: str) -> None:
    config = from_deepspeed(nested("activation_checkpointing.cpu_checkpointing", value))
    assert config.compile["activations_on"] == place


# --- schedulers and "auto" -------------------------------------------------------------------------------


def scheduled(kind: str, given: dict[str, Any] | None = None, **params: Any) -> Any:
    """The learning rate."""
    adam = {"type": "Adam", "params": {"lr": 0.5}}
    file = {"optimizer": adam, "scheduler": {"type": kind, "params": params}}
    return from_deepspeed(file, given=given).compile["optimizer"].lr


def test_a_scheduler_takes_open_keys_from_the_optimizer_or_the_caller() -> None:
    total = {"scheduler.params.total_num_steps": 50}
    rate = scheduled("WarmupDecayLR", total, warmup_max_lr="auto", total_num_steps="auto")
    assert (rate.warmup_max_lr, rate.total_num_steps, rate.warmup_num_steps) == (0.5, 50, 1000)
    rate = scheduled("WarmupDecayLR", total, warmup_num_steps="auto")
    assert (rate.warmup_max_lr, rate.total_num_steps) == (1e-3, 50)
    assert scheduled("WarmupLR") == SCHEDULERS["WarmupLR"](warmup_max_lr=0.5)
    assert scheduled("WarmupCosineLR", total).lr == 0.5


@pytest.mark.parametrize(
    ("kind", "params", "reason"),
    [
        ("WarmupDecayLR", {}, "without its total_num_steps"),
        ("WarmupCosineLR", {"total_num_steps": "auto"}, "without its total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_momentum": False}, "without cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_max_mom": 1}, "below 1"),
        ("WarmupLR", {"total_num_steps": 3}, "WarmupLR does not take"),
        ("WarmupLR", {"cycle_min_mom": 0.3}, "WarmupLR does not take"),
        ("WarmupCosineLR", {"warmup_max_lr": 3}, "WarmupCosineLR does not take.*'warmup_min_ratio'"),
        ("WarmupLr", {"warmup_type": "cubic"}, "expected log, linear"),
        ("Warmup", {}, "did you mean 'WarmupLR'"),
        (None, {"warmup_num_steps": 3}, "a scheduler without a type"),
    ],
)
def test_invalid_schedulers_are_refused(kind: Any, params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        scheduled(kind, **params)


def test_auto_is_what_is_given_or_the_default() -> None:
    params = {"lr": "auto", "betas": "auto", "weight_decay": "auto"}
    file = {
        **dict.fromkeys((BATCH, "gradient_accumulation_steps", "gradient_clipping"), "auto"),
        **{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}},
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"reduce_bucket_size": "auto", "offload_optimizer": {"ratio": "auto"}},
    }
    config = from_deepspeed({**file, MICRO: 4})
    assert config.compile["optimizer"] == AdamW(1e-3, weight_decay=0.0)
    assert (config.compile["clip_norm"], config.compile["precision"]) == (1.0, "fp32")
    given = {"optimizer.params.lr": 0.25, BATCH: 6, "bf16.enabled": True, "gradient_clipping": 3.0}
    config = from_deepspeed(file, given=given)
    assert config.compile["optimizer"].lr == 0.25
    assert (config.compile["clip_norm"], config.compile["precision"]) == (3.0, "bf16")
    assert config.train_batch_size == 6
    assert 'optimizer.params.lr: "auto" is 0.25' in config.notes
    assert not any(line.startswith('optimizer.params.eps: "auto"') for line in config.notes)
    assert 'zero_optimization.reduce_bucket_size: "auto" is zfunc\'s default' in config.notes


def test_a_given_value_that_the_file_contradicts_is_an_error_with_both() -> None:
    message = refusal({"gradient_clipping": 1.0}, given={"gradient_clipping": 2.0})
    assert "given['gradient_clipping']: got 2.0, and the dict says gradient_clipping 1.0" in message
    assert "did you mean 'optimizer.params.lr'" in refusal({}, given={"optimizer.params.lrr": 1.0})
    assert "expected a number" in refusal({}, given={"optimizer.params.lr": "1e-3"})


# --- the page --------------------------------------------------------------------------------------------


def test_the_pages_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(code, {"__name__": "page"})
    assert "learning rate 3.01e-04" in capsys.readouterr().out
