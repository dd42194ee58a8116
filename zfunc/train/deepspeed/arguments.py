"""A file's batch, precision, loss scale, optimizer and offloading, as zfunc's arguments. No torch here."""

from collections.abc import Iterator
from typing import Any, Literal

from attrs import frozen

from zfunc.errors import did_you_mean
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.lr import LR, cycles_betas, onecycle_betas
from zfunc.train.deepspeed.resolved import ResolvedValues

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
ENABLED = {"fp16": "fp16.enabled", "bf16": "bf16.enabled"}
BUCKET_SIZE = "zero_optimization.reduce_bucket_size"
DEVICE, RATIO = "zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.ratio"
NVME_PATH, PARAM_NVME_PATH = (f"zero_optimization.offload_{x}.nvme_path" for x in ("optimizer", "param"))
ON = {"none": "device", "cpu": "host", "nvme": "disk"}  # devices of parameters
STAGE, PARAM_DEVICE = "zero_optimization.stage", "zero_optimization.offload_param.device"
PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
PERSISTENCE = "zero_optimization.stage3_param_persistence_threshold"
CPU_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"
WEIGHT_DECAY = "optimizer.params.weight_decay"
TYPES = ("Adam", "AdamW", "Lion", "Adagrad", "SGD", "Muon")
NAMES = {x.lower(): "adamw" if x == "Adam" else x.lower() for x in TYPES}
PARAMS = {  # arguments of zfunc's with the name of their key
    "adamw": ("betas", "eps"),
    "sgd": ("momentum", "dampening", "nesterov"),
    "lion": ("betas",),
    "adagrad": ("eps", "lr_decay", "initial_accumulator_value"),
    "muon": ("momentum", "betas", "eps"),
}
SWITCHES = {  # keys that have another effect, or none
    "adamw": (
        *("adam_w_mode", "torch_adam", "bias_correction", "amsgrad", "fp32_optimizer_states"),
        *("foreach", "fused", "set_grad_none", "max_grad_norm"),
    ),
    "sgd": ("foreach", "fused"),
    "lion": ("fp32_optimizer_states",),
    "adagrad": ("amsgrad", "fp32_optimizer_states", "foreach", "fused"),
    "muon": ("fp32_optimizer_states", "muon_lr", "adam_lr", "ns_method"),
}
DEFAULTS = ("betas", "eps")  # that differ from zfunc's
ADAGRAD_LR = 1e-2
OF_MUON = {
    "momentum": 0.95,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "adjust_lr_fn": "original",
}  # without the keys


@frozen
class BatchSizes:
    """The batch of a step."""

    train: int  # sequences over all ranks: micro * accumulation * world
    micro: int  # sequences of a micro-batch
    accumulation: int  # micro-batches of a rank
    world: int = 1

    def __str__(self) -> str:
        """Written as a product."""
        return f"{self.train} = {self.micro} x {self.accumulation} micro-batches x {self.world} ranks"


def batch_sizes(values: ResolvedValues, world: int) -> BatchSizes:
    """The batch of a file on `world` ranks.

    Raises ValueError if the three keys contradict each other, or if neither size is set, an error in DeepSpeed too.

    >>> from zfunc.train.deepspeed.reader import read_config_file
    >>> from zfunc.train.deepspeed.resolved import resolve_values
    >>> config = read_config_file({"train_batch_size": 16, "gradient_accumulation_steps": 2})
    >>> str(batch_sizes(resolve_values(config), world=4))
    '16 = 2 x 2 micro-batches x 4 ranks'
    """
    train, micro = values[TRAIN], values[MICRO]
    steps: int | None = values[ACCUMULATION]
    if train is None and micro is None:
        raise ValueError(
            f"{values.source}: got neither {TRAIN} nor {MICRO}, expected one of them, as DeepSpeed does: write "
            f'one, or pass --batch-size, or from_deepspeed(..., given={{"{TRAIN}": ...}})'
        )
    if train is None:
        steps = steps or 1
        return BatchSizes(micro * steps * world, micro, steps, world)
    if micro is None:
        steps = steps or 1
        _check_divides(values, train, steps * world, f"{ACCUMULATION} {steps} x {world} ranks")
        return BatchSizes(train, train // (steps * world), steps, world)
    if steps is None:
        _check_divides(values, train, micro * world, f"{MICRO} {micro} x {world} ranks")
        return BatchSizes(train, micro, train // (micro * world), world)
    if train != micro * steps * world:
        raise ValueError(
            f"{values.source}: got {TRAIN} {train}, {MICRO} {micro} and {ACCUMULATION} {steps} on {world} ranks, "
            f"expected the first to be {micro} x {steps} x {world} = {micro * steps * world}: correct one, or "
            "leave one out"
        )
    return BatchSizes(train, micro, steps, world)


def _check_divides(values: ResolvedValues, train: int, parts: int, product: str) -> None:
    if train % parts:
        near = f"{train // parts * parts} or {(train // parts + 1) * parts}" if train > parts else f"{parts}"
        raise ValueError(
            f"{values.source}: got {TRAIN} {train}, expected a multiple of {product} = {parts}: make it {near}"
        )


def batch_left_open(values: ResolvedValues) -> bool:
    """Whether the batch is "auto" in the file and not given."""
    sizes = TRAIN, MICRO
    return any(name in values.auto for name in sizes) and not any(values.sets(name) for name in sizes)


def precision(values: ResolvedValues) -> str | None:
    """ "fp16", "bf16" or "fp32"; None for a file that leaves it open. Raises ValueError for fp16 and bf16."""
    enabled = [name for name, key in ENABLED.items() if values[key]]
    if len(enabled) > 1:
        raise ValueError(f"{values.source}: got fp16 and bf16 both enabled, expected one: switch one off")
    if enabled:
        return enabled[0]
    return "fp32" if any(values.sets(key) for key in ENABLED.values()) else None


def loss_scale(values: ResolvedValues) -> LossScale:
    """The loss scale of a file that trains in fp16."""
    fixed = values["fp16.loss_scale"]
    if fixed:
        return LossScale(scale=fixed, window=0)
    for name in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
        if not values[name]:
            raise ValueError(
                f"{values.source}: {name}: got 0 for a dynamic loss scale, expected 1 or more: raise it, or set a "
                "fixed scale with fp16.loss_scale"
            )
    power, minimum = values["fp16.initial_scale_power"], values["fp16.min_loss_scale"]
    if 2.0**power < minimum:
        raise ValueError(
            f"{values.source}: got fp16.initial_scale_power {power} and min_loss_scale {minimum}, expected a first "
            f"scale of 2**{power} = {2**power} not below the smallest: raise the power, or lower the minimum"
        )
    return LossScale(
        scale=2.0**power,
        window=values["fp16.loss_scale_window"],
        hysteresis=values["fp16.hysteresis"],
        minimum=float(minimum),
        consecutive=values["fp16.consecutive_hysteresis"],
    )


def optimizer_name(values: ResolvedValues) -> str:
    """The file's optimizer as one of `OPTIMIZER_NAMES`, AdamW without any. Raises ValueError for another."""
    if not values.has("optimizer"):
        return "adamw"
    kind = values["optimizer.type"]
    if kind is None or kind.lower() not in NAMES:
        got = "no type" if kind is None else f"the type {kind!r}"
        raise ValueError(
            f"{values.source}: optimizer: got {got}{did_you_mean(kind or '', [*TYPES])}, expected one of "
            f'{", ".join(TYPES)}: write such as "type": "AdamW"'
        )
    return NAMES[kind.lower()]


def optimizer_arguments(values: ResolvedValues) -> dict[str, Any]:
    """Arguments of the class of `optimizer_name`, without `lr` and `decay`.

    Raises ValueError for another optimizer, and for a parameter that the optimizer does not have.
    """
    name = optimizer_name(values)
    cycled = {"betas": onecycle_betas(values)} if cycles_betas(values) and "betas" in PARAMS[name] else {}
    if not values.has("optimizer"):
        return cycled
    for key in values.file:
        param = key.removeprefix("optimizer.params.")
        if param != key and param not in (*PARAMS[name], *SWITCHES[name], "lr", "weight_decay"):
            raise ValueError(
                f"{values.source}: {key}: got it with the type {values['optimizer.type']}, which does not have it, "
                "expected the optimizer's own parameters: delete it"
            )
    always = () if name in ("adagrad", "muon") else DEFAULTS
    sets = (x for x in PARAMS[name] if x in always or values.sets(f"optimizer.params.{x}"))
    arguments = {x: values[f"optimizer.params.{x}"] for x in sets}
    if name == "muon":
        if not values.sets(LR):
            raise ValueError(
                f"{values.source}: {LR}: got none with the type Muon, for which DeepSpeed has two defaults, "
                "expected one for all parameters: write it"
            )
        arguments = {**OF_MUON, **arguments}
    if name == "adamw":
        kind = values["optimizer.type"].lower()
        arguments["decoupled"] = kind == "adamw" or values["optimizer.params.adam_w_mode"]
    moments = "16bit" if has_16bit_moments(values) else "fp32"
    return {**arguments, **cycled, "weight_decay": weight_decay(values), "moments": moments}


def peak_lr(values: ResolvedValues) -> float:
    """The optimizer's learning rate; without one in the file DeepSpeed's default."""
    is_adagrad = str(values["optimizer.type"]).lower() == "adagrad"
    return ADAGRAD_LR if is_adagrad and not values.sets(LR) else values[LR]


def weight_decay(values: ResolvedValues) -> float:
    """The file's weight decay; by default 0, or 0.01 as in torch with torch_adam and AdamW."""
    of_torch = values["optimizer.params.torch_adam"] and str(values["optimizer.type"]).lower() == "adamw"
    return 0.01 if of_torch and not values.sets(WEIGHT_DECAY) else values[WEIGHT_DECAY]


def has_16bit_moments(values: ResolvedValues) -> bool:
    """Whether the file keeps moments in 16 bits."""
    return values["bf16.bf16_optimizer_states"] or not values["optimizer.params.fp32_optimizer_states"]


def offload_ratio(values: ResolvedValues) -> float:
    """The share of the optimizer state on the host; all of it without `offload_optimizer`."""
    if DEVICE in values.file:
        return 0.0 if values[DEVICE] == "none" else values[RATIO]
    return values[RATIO]


def zero_stage(values: ResolvedValues) -> Literal[1, 2, 3]:
    """The stage for `zfunc.compile`; 0 is 1."""
    return values[STAGE] or 1


def placement(values: ResolvedValues) -> dict[str, Any]:
    """The settings of a step about the ZeRO stage and where parameters and activations live, of keys that are set.

    Raises ValueError for parameters on the host whose optimizer state is on the device.
    """
    return dict(_placement(values))


def _placement(values: ResolvedValues) -> Iterator[tuple[str, Any]]:
    if values.sets(STAGE) or values.has("zero_optimization"):
        yield "stage", zero_stage(values)
    if values.sets(PARAM_DEVICE) and values[STAGE] == 3:
        yield "params_on", ON[values[PARAM_DEVICE]]
        if values.file.get(PARAM_DEVICE) == "nvme" and values[DEVICE] != "nvme":
            raise ValueError(
                f"{values.source}: got {PARAM_DEVICE} nvme and {DEVICE} {values[DEVICE]}, expected the optimizer "
                f"state there too: set {DEVICE} to nvme, with its nvme_path"
            )
        if values[PARAM_DEVICE] == "cpu" and values.sets(DEVICE) and values[DEVICE] == "none":
            raise ValueError(
                f"{values.source}: got {PARAM_DEVICE} cpu and {DEVICE} none, expected the optimizer state on the "
                f"host too: set {DEVICE} to cpu, or leave out offload_param"
            )
    if values.file.get(DEVICE) == "nvme":
        yield "state_on", "disk"
        params = values[STAGE] == 3 and values.file.get(PARAM_DEVICE) == "nvme"
        paths = values[NVME_PATH], values[PARAM_NVME_PATH] if params else None
        yield "swap", tuple(dict.fromkeys(x for x in paths if x))
    if values.sets(PREFETCH) and values[PREFETCH] == 0:
        yield "weight_slots", 1
    if values.sets(PERSISTENCE):
        yield "persistent_params", values[PERSISTENCE]
    if values.sets(CPU_CHECKPOINTING):
        yield "activations_on", "host" if values[CPU_CHECKPOINTING] else "device"
