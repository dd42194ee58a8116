"""A setting of a step is one field: each call and command that takes it has its default, help and check."""

import inspect
import re
from functools import partial
from typing import Any

import pytest
import torch
from attrs import Attribute, evolve, fields, fields_dict, frozen
from small_models import Loss
from threaded_ranks import programs_of
from zfunc.schedules import make_order

import zfunc
from zfunc.cli import catalogue
from zfunc.cli.commands.calibrate import CalibrateSettings
from zfunc.cli.commands.draw import DrawSettings
from zfunc.cli.commands.plan import PlanSettings
from zfunc.cli.parser import make_parser, with_flags
from zfunc.core.bucketing import default_bucket_size
from zfunc.core.setting_values import CHECK, HELP, OPTION, make_setting, one_or_more
from zfunc.core.settings import StepSettings, named_settings, settings_with
from zfunc.errors import SettingTypeError
from zfunc.options import flag_fields, options_of, values_of_flags
from zfunc.train.deepspeed.mapping import from_deepspeed
from zfunc.train.settings import ModelFlags, TrainSettings, step_settings

FIELDS = {f.name: f for f in fields(StepSettings)}
NAMED = named_settings()  # all but those of the optimizer
FLAGS = {f.metadata[OPTION].name or name: f for name, f in FIELDS.items() if f.metadata[OPTION].group}
COMMANDS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "train": (TrainSettings, options_of(TrainSettings)),
    "plan": (PlanSettings, options_of(PlanSettings)),
    "draw": (DrawSettings, options_of(DrawSettings)),
    "calibrate": (CalibrateSettings, options_of(CalibrateSettings)),
}
OWN_DEFAULTS = {"precision", "clip", "bucket_size"}  # of commands: chosen by the machine, and clipping at 1
OTHERS: dict[str, Any] = {
    "precision": "fp32",
    "fp32_params": ("loss.out",),
    "schedule": "Serial",
    "recompute": "none",
    "tiles": 2,
    "compile_segments": True,
    "deterministic": True,
    "micro_batches": 2,
    "clip_norm": 0.5,
    "norms": True,
    "devices": 2,
    "pp": 2,
    "order": "vertical",
    "stage": 1,
    "ema": 0.9,
    "params_on": "host",
    "persistent_params": 100,
    "activations_on": "host",
    "keys_on": "host",
    "bucket_size": 64,
    "slots": 3,
    "defer": True,
    "state_on": "disk",
    "update_on": "device",
    "grads_on": "disk",
    "swap": ("/swap",),
    "commit_every": 10,
}
ON_DISK = {"state_on": "disk", "swap": ("/swap",)}
ONE = [zfunc.segment("loss", Loss(8))]  # of which tiles are, too
TWO = [zfunc.segment("first", torch.nn.Linear(8, 8)), *ONE]
NEEDS: dict[str, dict[str, Any]] = dict.fromkeys(("state_on", "grads_on", "swap"), ON_DISK)
every_name = pytest.mark.parametrize("field", NAMED.values(), ids=NAMED)
every_flag = pytest.mark.parametrize("flag", FLAGS)


def _segments(settings: StepSettings | None, given: dict[str, Any]) -> list[zfunc.Segment]:
    return TWO if 2 in (given.get(name, getattr(settings, name, 1)) for name in ("devices", "pp")) else ONE


def compiled(settings: StepSettings | None = None, **given: Any) -> Any:
    stages = 2 if given.get("pp", getattr(settings, "pp", 1)) == 2 else 1
    make = partial(zfunc.compile, _segments(settings, given), settings, device="cpu", **given)
    return programs_of(1, make, pp=stages)[0]


def planned(settings: StepSettings | None = None, **given: Any) -> Any:
    batch = torch.ones(4, 8), torch.ones(4)
    return zfunc.plan(_segments(settings, given), batch, settings, advice=False, **given)


@every_name
def test_compile_and_plan_have_each_field_with_default_and_help(field: "Attribute[Any]") -> None:
    for call in (zfunc.compile, zfunc.plan):
        parameter = inspect.signature(call).parameters[field.name]
        own = call is zfunc.plan and field.name == "precision"
        assert parameter.default == ("auto" if own else field.default)
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert field.metadata[HELP] in " ".join((call.__doc__ or "").split())


@every_name
def test_compile_and_plan_apply_each_field(field: "Attribute[Any]") -> None:
    """By name, as one value, or a change of one; a plan says how large its buckets are, and refuses stages."""
    other, needed = OTHERS[field.name], NEEDS.get(field.name, {})
    assert other != field.default
    given = {"schedule": "Serial", **needed, field.name: other}  # compile names the default for its device
    as_value = StepSettings(**given)
    assert compiled(**given).settings == compiled(as_value).settings == as_value
    base = StepSettings(precision="fp32")
    changed = evolve(base, **given)
    assert compiled(base, **given).settings == changed
    sized = evolve(changed, bucket_size=changed.bucket_size or default_bucket_size(1))
    if field.name == "pp":
        with pytest.raises(ValueError, match=r"^pp: got 2, expected 1 in a plan: pass devices=2"):
            planned(base, **given)
    else:
        assert planned(base, **given).step.settings == sized


def test_an_order_of_one_device_is_its_number() -> None:
    assert StepSettings(order=make_order(2), micro_batches=4) == StepSettings(order=2, micro_batches=4)


@every_name
def test_each_field_has_one_check(field: "Attribute[Any]") -> None:
    errors: list[str] = []
    for make in (StepSettings, compiled, planned):
        with pytest.raises((ValueError, TypeError), match=f"^{field.name}: got .*expected") as caught:
            make(**{field.name: object()})
        errors.append(re.sub("0x[0-9a-f]+", "", str(caught.value)))
    assert errors[0] == errors[1] == errors[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_its_flags_with_default_and_help(command: str) -> None:
    settings, options = COMMANDS[command]
    own = fields_dict(settings)
    assert own.keys() == options.keys()
    typed = settings()
    help_text = " ".join(make_parser(catalogue.COMMANDS, everything=True)[1][command].format_help().split())
    for flag, field in FLAGS.items():
        if flag in own:
            assert with_flags(field.metadata[OPTION].help, options).partition(":")[0] in help_text
            assert options[flag].group == field.metadata[OPTION].group
            if flag not in OWN_DEFAULTS:
                value = getattr(typed, flag)
                assert value == field.default or field.metadata[CHECK](flag, value) == field.default
    given = {name: value for name, value in values_of_flags(StepSettings, typed).items() if value is not None}
    assert step_settings(typed, precision="fp32", bucket_size=1) == StepSettings(
        **{**given, "precision": "fp32", "bucket_size": 1}
    )


@every_flag
def test_zfunc_train_has_every_flag(flag: str) -> None:
    assert flag in fields_dict(TrainSettings)
    assert (
        f"--{flag.replace('_', '-')}"
        in make_parser(catalogue.COMMANDS, everything=True)[1]["train"].format_help()
    )


def test_a_new_field_is_a_flag_at_once() -> None:
    @frozen(kw_only=True)
    class Extended(StepSettings):
        streams: int = make_setting(1, one_or_more, "offload", "copies at a time")

    assert options_of(Extended)["streams"].help == "copies at a time"
    flags = flag_fields(Extended, ModelFlags, {}, without=["ema"], clip=1.0)
    typed = flags(streams=3)
    assert (typed.clip, flags().streams, hasattr(typed, "ema")) == (1.0, 1, False)
    assert values_of_flags(Extended, typed)["streams"] == 3


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        SettingTypeError, match="bach_size: got an unknown setting.*did you mean 'batch_size'"
    ):
        TrainSettings(bach_size=1)  # pyright: ignore[reportCallIssue]
    by_hand: Any = StepSettings
    for call in (compiled, planned, by_hand):
        with pytest.raises(TypeError, match="bucketsize: got an unknown setting.*did you mean 'bucket_size'"):
            call(bucketsize=1)
        with pytest.raises(TypeError, match="speculate: got a setting that is gone, expected .*: pass defer"):
            call(speculate=1)
        with pytest.raises(
            TypeError, match="lr: got an unknown setting, expected one of [^?]*: pass it to the optimizer"
        ):
            call(lr=1e-3)
    assert by_hand(moments="8bit").moments == "8bit"
    with pytest.raises(TypeError, match="settings: got a dict, expected a zfunc.core.settings.StepSettings"):
        settings_with({}, {})  # type: ignore[arg-type]


def test_moments_are_the_optimizers_and_those_that_a_plan_has_varied() -> None:
    eight, varied = zfunc.AdamW(moments="8bit"), StepSettings(moments="8bit")
    for program in (compiled(optimizer=eight), compiled(varied), compiled(varied, optimizer=eight)):
        assert program.settings.moments == program.optimizer.moments == program.layout.state_format == "8bit"
    with pytest.raises(
        ValueError, match="moments: got '16bit' and AdamW.moments='8bit'., expected one format: give"
    ):
        compiled(StepSettings(moments="16bit"), optimizer=eight)
    for call in (compiled, planned):
        with pytest.raises(TypeError, match="moments: got a setting that is gone, .*: pass it to the opt"):
            call(moments="8bit")


def test_a_deepspeed_file_sets_fields() -> None:
    config = from_deepspeed(
        {"train_batch_size": 8, "zero_optimization": {"stage": 1, "reduce_bucket_size": 64}}
    )
    assert config.compile.keys() - {"optimizer"} <= FIELDS.keys()
    assert compiled(**config.compile).settings.bucket_size == 64
