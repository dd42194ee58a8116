"""The rows for batches, precision, optimizer and learning rate: what decides how a training goes.

The invariant: every default is the one there, also where zfunc's own differs.
"""

import math

from zfunc.train.deepspeed.key import Key, honoured, idle, refused
from zfunc.train.deepspeed.takes import (
    COUNT,
    FLAG,
    LIST,
    MOMENTUM,
    NUMBER,
    PAIR,
    SIZE,
    TEXT,
    number,
    one_of,
    whole,
)

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_MEAN = "gradients are always divided by the ranks before they are added up, which is the same mean"
_MASTER = "master weights are always exact fp32; `moments` is what makes the host's state smaller"
_PRECISION = (
    "`precision`; with neither of `fp16` and `bf16` fp32, or in `zfunc train` what `--precision` says"
)
_DYNAMIC = "`LossScale` of `zfunc.init`"

BATCH: tuple[Key, ...] = (
    honoured(
        "train_batch_size",
        COUNT,
        None,
        "sequences of a step, of all ranks together: `train_micro_batch_size_per_gpu` x "
        "`gradient_accumulation_steps` x ranks; any two give the third; a contradiction is an error, and so is "
        "a file that says neither size",
    ),
    honoured("train_micro_batch_size_per_gpu", COUNT, None, "see `train_batch_size`"),
    honoured("gradient_accumulation_steps", COUNT, None, "`micro_batches`: all of them in one `train_step`"),
    honoured(
        "managed_gradient_accumulation",
        FLAG,
        True,
        "a step takes the whole batch and splits it itself",
        False,
        instead="a step takes the whole batch here and splits it itself: leave it out",
    ),
    honoured("gradient_clipping", NUMBER, 1.0, "`clip_norm`; 0 does not clip, and without the key it is 1.0"),
    honoured(
        "steps_per_print", COUNT, None, "steps from one printed line to the next; without it, seconds decide"
    ),
    idle("prescale_gradients", FLAG, False, _MEAN),
    idle("gradient_predivide_factor", number(0.0), 1.0, _MEAN),
    honoured(
        "gradient_allreduce_op",
        one_of("mean", "sum"),
        "mean",
        "the gradient is the mean over the batch",
        "sum",
        instead='the gradient is always a mean: use "mean"; Adam takes the same steps but for eps and clipping',
    ),
    idle("communication_data_type", one_of("fp32", "fp16", "bf16"), None, "gradients travel in `precision`"),
    idle("dataloader_drop_last", FLAG, False, "every step takes a whole batch"),
)

PRECISION: tuple[Key, ...] = (
    honoured("fp16.enabled", FLAG, False, _PRECISION),
    idle("fp16.auto_cast", FLAG, False, "inputs are cast by the model's own segments"),
    honoured("fp16.loss_scale", NUMBER, 0.0, f"{_DYNAMIC}: 0 is dynamic, another number is fixed"),
    honoured(
        "fp16.initial_scale_power", whole(0, 126), 16, f"{_DYNAMIC}: the first `scale` is 2 to this power"
    ),
    honoured("fp16.loss_scale_window", SIZE, 1000, f"{_DYNAMIC}: `window`"),
    honoured("fp16.hysteresis", COUNT, 2, f"{_DYNAMIC}: `hysteresis`"),
    honoured("fp16.consecutive_hysteresis", FLAG, False, f"{_DYNAMIC}: `consecutive`"),
    honoured("fp16.min_loss_scale", SIZE, 1, f"{_DYNAMIC}: `minimum`"),
    idle("fp16.fp16_master_weights_and_grads", FLAG, False, _MASTER),
    honoured("bf16.enabled", FLAG, False, _PRECISION),
    idle("bf16.immediate_grad_update", FLAG, False, "when gradients are added up is the plan's choice"),
    idle(
        "bf16.check_grad_overflow",
        FLAG,
        True,
        "in bf16 a gradient that is not finite ends the training with an error, it is never skipped in silence",
    ),
    idle("bf16.bf16_master_weights_and_grads", FLAG, False, _MASTER),
    honoured("bf16.bf16_optimizer_states", FLAG, False, '`AdamW(moments="16bit")`'),
    refused("torch_autocast.enabled", "use bf16, which computes in it from end to end"),
    idle("torch_autocast.dtype", TEXT, None, "autocast is not there"),
    idle("torch_autocast.lower_precision_safe_modules", LIST, None, "autocast is not there"),
)

OPTIMIZER: tuple[Key, ...] = (
    honoured(
        "optimizer.type",
        TEXT,
        None,
        "`AdamW`, for Adam and AdamW in any case; Adam without `adam_w_mode` decays as AdamW, as it does there. "
        "Others are refused",
    ),
    honoured("optimizer.params.lr", NUMBER, 1e-3, "`AdamW(lr=)`; the `scheduler` may set it instead"),
    honoured("optimizer.params.betas", PAIR, (0.9, 0.999), "`AdamW(betas=)`"),
    honoured("optimizer.params.eps", NUMBER, 1e-8, "`AdamW(eps=)`"),
    honoured(
        "optimizer.params.weight_decay",
        NUMBER,
        0.0,
        "`AdamW(weight_decay=)`, of every parameter; `zfunc train` leaves out norms and biases. With `torch_adam` "
        "and AdamW it is 0.01 without the key, as in torch",
    ),
    honoured(
        "optimizer.params.adam_w_mode",
        FLAG,
        True,
        "`AdamW(decoupled=)`: false makes L2 of Adam's weight decay; for the type AdamW it says nothing, as there",
    ),
    idle(
        "optimizer.params.torch_adam",
        FLAG,
        False,
        "there is one Adam here, in the kernel; see `weight_decay`",
    ),
    honoured(
        "optimizer.params.bias_correction",
        FLAG,
        True,
        "moments are always corrected",
        False,
        instead="moments are always corrected for their start at 0: leave it out",
    ),
    refused("optimizer.params.amsgrad", "AMSGrad is not there: leave it out"),
    honoured("optimizer.params.fp32_optimizer_states", FLAG, True, 'false is `AdamW(moments="16bit")`'),
    *(
        idle(f"optimizer.params.{name}", FLAG, None, "there is one Adam here, in the kernel")
        for name in ("foreach", "fused", "set_grad_none")
    ),
    refused("optimizer.params.max_grad_norm", 'use the key "gradient_clipping" of the file', NUMBER, 0.0),
    idle("optimizer.legacy_fusion", FLAG, False, "there is one Adam here, in the kernel"),
    idle("zero_allow_untested_optimizer", FLAG, False, "Adam and AdamW are the optimizers there are"),
    idle("zero_force_ds_cpu_optimizer", FLAG, True, "the kernel updates what is on the host, always"),
)

_P = "scheduler.params."

SCHEDULER: tuple[Key, ...] = (
    honoured(
        "scheduler.type",
        one_of(*SCHEDULERS),
        None,
        "a learning rate of `zfunc.train.deepspeed.schedules`, equal to the one there at every update; without a "
        "scheduler it is constant, but in `zfunc train`, which warms up and decays along a cosine",
    ),
    honoured(_P + "lr_range_test_min_lr", NUMBER, 1e-3, "LRRangeTest"),
    honoured(_P + "lr_range_test_step_size", COUNT, 2000, "LRRangeTest"),
    honoured(_P + "lr_range_test_step_rate", NUMBER, 1.0, "LRRangeTest"),
    honoured(_P + "lr_range_test_staircase", FLAG, False, "LRRangeTest"),
    honoured(_P + "cycle_min_lr", NUMBER, None, "OneCycle, which needs it"),
    honoured(_P + "cycle_max_lr", NUMBER, None, "OneCycle, which needs it"),
    honoured(_P + "decay_lr_rate", NUMBER, 0.0, "OneCycle"),
    honoured(_P + "cycle_first_step_size", COUNT, 2000, "OneCycle"),
    honoured(_P + "cycle_second_step_size", whole(0), None, "OneCycle; as the first without it"),
    honoured(_P + "cycle_first_stair_count", whole(0), 0, "OneCycle"),
    honoured(_P + "cycle_second_stair_count", whole(0), None, "OneCycle; as the first without it"),
    honoured(_P + "decay_step_size", whole(0), 0, "OneCycle"),
    honoured(
        _P + "cycle_momentum",
        FLAG,
        True,
        "OneCycle, unless it is false: beta1 goes down while the rate goes up; beta2 is 0.99 whatever `betas` says",
    ),
    honoured(_P + "cycle_min_mom", MOMENTUM, 0.8, "OneCycle"),
    honoured(_P + "cycle_max_mom", MOMENTUM, 0.9, "OneCycle"),
    honoured(
        _P + "decay_mom_rate",
        number(-math.inf),
        0.0,
        "OneCycle; an update for which it has raised beta1 to 1 is refused",
    ),
    honoured(_P + "warmup_min_lr", NUMBER, 0.0, "WarmupLR, WarmupDecayLR"),
    honoured(
        _P + "warmup_max_lr",
        NUMBER,
        None,
        'WarmupLR, WarmupDecayLR; "auto" is the optimizer\'s lr, without it WarmupLR takes it, the other 0.001',
    ),
    honoured(_P + "warmup_num_steps", COUNT, 1000, "WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    honoured(_P + "warmup_type", one_of("log", "linear"), "log", "WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    honoured(
        _P + "total_num_steps",
        COUNT,
        None,
        'WarmupDecayLR, WarmupCosineLR; "auto" or without it: the steps of `zfunc train`',
    ),
    honoured(_P + "warmup_min_ratio", NUMBER, 0.0, "WarmupCosineLR"),
    honoured(_P + "cos_min_ratio", NUMBER, 0.0001, "WarmupCosineLR"),
    refused(_P + "last_batch_iteration", "a resume knows its step by itself: leave it out", whole(-1), -1),
)

MAIN_KEYS: tuple[Key, ...] = (*BATCH, *PRECISION, *OPTIMIZER, *SCHEDULER)
