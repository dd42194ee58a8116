"""The arguments of transformers' Trainer as settings of a training, and log lines about fields of no effect.

A field that is not at its default is as good as a flag, and contradicts one; of the others a flag wins. No torch
here, so a wrong file is refused before torch is loaded.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from attrs import evolve, frozen

from zfunc.errors import refuse
from zfunc.train.deepspeed.mapping import PARAM, ConfigExtras
from zfunc.train.run_history import held_out_unit
from zfunc.train.settings import DPO, DPO_TYPES, ENDLESS, TrainSettings
from zfunc.train.trainer.fields import DPO_CLASS, SFT, TrainerArgs, fields_of, read_args
from zfunc.train.trainer.schedules import TrainerSchedule, check_params

MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
STEPS, EPOCHS, OPTIM, KWARGS = "max_steps", "num_train_epochs", "optim", "lr_scheduler_kwargs"
SCHEDULER, WARMUP, RATIO = "lr_scheduler_type", "warmup_steps", "warmup_ratio"
TRACKERS = ("tensorboard", "wandb", "trackio")
EPOCH = "epoch"
BOUNDS = ("steps", "epochs", "seconds")


@frozen
class FromTrainer:
    """Settings by name that a Trainer's arguments and the command line give. `said`: from the command line,
    or from fields that differ from their default. `usual`: from fields at their default, used where nothing
    else decides. `fields`: by setting, the field that it is from."""

    said: dict[str, Any]
    usual: dict[str, Any]
    fields: dict[str, str]  # with the file's name before it


def with_trainer_args(given: Mapping[str, Any], world: int) -> FromTrainer:
    """The settings `given` on a command line, with those of the Trainer's arguments in the file at
    `given["trainer_args"]`, whose content takes the place of its path.

    Raises ValueError for an invalid file, and for a setting that contradicts it."""
    args = read_args(given["trainer_args"], dpo=given.get("loss") == DPO)
    said, usual, written = {**given, "trainer_args": args}, dict[str, Any](), dict[str, str]()
    decided = {"lr_schedule": SCHEDULER, "warmup": _part_of_all(args)}
    for name, field in (decided | _by_pass(args)).items():
        if name in given and field:
            raise args.refused(name, given[name], field)
    for name, value, fields in settings_from(args, world):
        if name in given and given[name] != value:
            if field := next((x for x in fields if x in args.file), None):
                raise args.refused(name, given[name], field)
        elif field := next((x for x in fields if x in args.file), None):
            said[name], written[name] = value, f"{args.source}: {field}"
        else:
            usual[name] = value
    if said.keys() & {*BOUNDS}:
        usual = {name: value for name, value in usual.items() if name not in BOUNDS}
    if given.get("stream") and "epochs" in {**usual, **said}:
        got, do = f"{args[EPOCHS]:g} with {ENDLESS}", f"write {STEPS}, which decides, into the file"
        refuse(f"{args.source}: {EPOCHS}", got, f"{STEPS}, a number of steps", do)
    return FromTrainer(said, usual, written)


def settings_from(args: TrainerArgs, world: int) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The training settings that a Trainer's `args` decide on `world` ranks: name, value, and deciding fields."""
    # Those that one field says
    for field in (x for x in fields_of(args.kind).values() if x.sets):
        value = args[field.name] if field.values is None else field.values.get(str(args[field.name]))
        if value is not None:
            yield field.sets, Path(value) if field.sets in ("out", "config") else value, (field.name,)
    # The batch, in sequences
    rows = 2 if args.kind == DPO_CLASS else 1
    size = args[MICRO] * args[ACCUMULATION] * world * rows
    yield "batch_size", size, (MICRO, ACCUMULATION)
    # How long
    steps = args[STEPS]
    yield ("steps", steps, (STEPS,)) if steps > 0 else ("epochs", args[EPOCHS], (EPOCHS,))
    if not _part_of_all(args):
        yield "warmup", int(args[WARMUP]), (WARMUP, RATIO)
    # The precision
    half = ("bf16", "fp16")
    on = [x for x in half if args[x] and not (x == "bf16" and args["fp16"] and x not in args.file)]
    if len(on) > 1:
        raise ValueError(f"{args.source}: got bf16 and fp16, expected one: leave one out")
    yield "precision", on[0] if on else "fp32", half
    # The optimizer
    family, _, bits = args[OPTIM].removeprefix("paged_").partition("_")
    yield "optimizer", family, (OPTIM,)
    if "8bit" in bits:
        yield "moments", "8bit", (OPTIM,)
    # Evaluations, checkpoints and trackers
    part = partial(_steps_of, args)
    every = "eval_steps" if args["eval_steps"] else "logging_steps"
    if args["eval_strategy"] != EPOCH:
        yield "eval_every", part(every) if args["eval_strategy"] == "steps" else 0, ("eval_strategy",)
    if args["save_strategy"] == "steps" and "save_steps" in args.file:
        yield "save_every", part("save_steps"), ("save_steps",)
    if args["save_strategy"] == "best":
        yield "keep_best", True, ("save_strategy",)
    if threshold := args["early_stopping_threshold"]:  # in nats, as the Trainer's eval_loss
        bits = held_out_unit("", DPO if args.kind == DPO_CLASS else "").nats
        yield "early_stopping_threshold", threshold / bits, ("early_stopping_threshold",)
    wanted = args["report_to"] if isinstance(args["report_to"], list) else [args["report_to"]]
    for tracker in (x for x in wanted if x != "none"):
        if tracker not in TRACKERS:
            names = ", ".join((*TRACKERS, "none"))
            raise ValueError(f"{args.source}: report_to: got {tracker!r}, expected {names}: choose some")
        yield tracker, True, ("report_to",)
    # TRL's
    if args.kind == SFT:
        stream = args["packing"] and args["packing_strategy"] == "wrapped"
        yield "packing", "stream" if stream else "documents", ("packing", "packing_strategy")
    if args.kind == DPO_CLASS:
        yield "loss", DPO, (*args.file,)
        kinds = args["loss_type"] if isinstance(args["loss_type"], list) else [args["loss_type"]]
        if len(kinds) != 1 or kinds[0] not in DPO_TYPES:
            raise ValueError(
                f"{args.source}: loss_type: got {', '.join(map(str, kinds))}, expected one of "
                f"{', '.join(DPO_TYPES)}: choose one"
            )
        yield "dpo_type", kinds[0], ("loss_type",)


def _part_of_all(args: TrainerArgs) -> str:
    """The field that gives the warm-up as a share of all steps; "" if the warm-up is a number of steps."""
    return WARMUP if 0 < args[WARMUP] < 1 else RATIO if args[RATIO] and not args[WARMUP] else ""


def _by_pass(args: TrainerArgs) -> dict[str, str]:
    """For `eval_every` and `save_every`, if once an epoch: the Trainer's field that says so, by setting."""
    fields = {"eval_every": "eval_strategy", "save_every": "save_strategy"}
    return {name: field for name, field in fields.items() if args[field] == EPOCH}


def _steps_of(args: TrainerArgs, name: str) -> int:
    """The number of steps in field `name`, where a value below 1 is a share of `max_steps`."""
    if (value := args[name]) >= 1:
        return int(value)
    if args[STEPS] < 1 or not value:
        raise ValueError(
            f"{args.source}: {name}: got {value:g}, expected a number of steps, or a part of {STEPS}: write it"
        )
    return math.ceil(args[STEPS] * value)


# --- what is no setting -----------------------------------------------------------------------------------


def trainer_extras(settings: TrainSettings, extras: ConfigExtras) -> ConfigExtras:
    """The `extras` of a DeepSpeed file, which decide, with what `settings.trainer_args` adds: optimizer arguments,
    learning rate, printed steps and notes."""
    if (args := settings.trainer_args) is None:
        return extras
    optimizer, every, config = dict(extras.optimizer), extras.steps_per_print, extras.config
    betas = {"betas": (args["adam_beta1"], args["adam_beta2"])}
    own = {"adamw": {**betas, "eps": args["adam_epsilon"]}, "lion": betas, "sgd": {"momentum": 0.0}}
    if args[OPTIM].removeprefix("paged_").startswith(settings.optimizer):
        said = () if config is None else config.file
        taken = own.get(settings.optimizer, {})
        optimizer |= {x: y for x, y in taken.items() if PARAM + x not in said}
    if every is None and "logging_steps" in args.file:
        every = _steps_of(args, "logging_steps")
    kwargs: Any = args[KWARGS]
    try:
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs or {}
        if not isinstance(kwargs, dict):
            raise ValueError(f"got {KWARGS} {kwargs!r}, expected names with values: correct it")
        params = check_params(args[SCHEDULER], cast("dict[str, Any]", kwargs))
    except ValueError as error:
        raise ValueError(f"{args.source}: {SCHEDULER}: {error}") from None
    part = _part_of_all(args)

    def rate(total: int | None) -> Callable[[int], float]:
        if total is None or (config is not None and config["scheduler.type"]):
            return extras.learning_rate(total)
        warmup = math.ceil(args[part] * total) if settings.warmup is None else settings.warmup
        return TrainerSchedule(args[SCHEDULER], params, settings.lr, warmup, total)

    added = {"optimizer": optimizer, "learning_rate": rate, "steps_per_print": every}
    return evolve(extras, **added, notes=tuple(_notes(settings, args)), by_pass=_by_pass(args))


def _notes(settings: TrainSettings, args: TrainerArgs) -> Iterator[str]:
    """Log lines that name the fields of a Trainer's file that have no effect: a line for each reason."""
    idle: dict[str, list[str]] = {}
    for name, reason in _unread(settings, args):
        if name in args.file:
            idle.setdefault(reason, []).append(name)
    for name in args.file:
        if (field := fields_of(args.kind)[name]).fate == "ignored":
            idle.setdefault(field.note, []).append(name)
    yield from (f"{args.source}: no effect: {', '.join(x)}: {reason}" for reason, x in idle.items())


def _unread(settings: TrainSettings, args: TrainerArgs) -> Iterator[tuple[str, str]]:
    """Yield each field of `args` that has no effect beside other fields or the optimizer, with the reason."""
    betas, eps = ("adam_beta1", "adam_beta2"), "adam_epsilon"
    taken = {"adamw": (*betas, eps), "lion": betas}.get(settings.optimizer, ())
    yield from ((x, f"not of the optimizer {settings.optimizer}") for x in (*betas, eps) if x not in taken)
    if args[STEPS] > 0:
        yield EPOCHS, f"`{STEPS}` decides"
    if args[WARMUP]:
        yield RATIO, f"`{WARMUP}` decides"
    if args[SCHEDULER] == "constant":
        yield from ((x, "constant has no warm-up, unlike constant_with_warmup") for x in (WARMUP, RATIO))
    for event in ("eval", "save"):
        if (strategy := args[f"{event}_strategy"]) != "steps":
            yield f"{event}_steps", f"`{event}_strategy` is {strategy}"
    if args.kind == SFT and not args["packing"]:
        yield "packing_strategy", "`packing` is false"
