"""The rows for batches, precision, optimizer and learning rate: what decides how a training goes.

The invariant: every default is the one there, also where zfunc's own differs.
"""

import math

from zfunc.train.deepspeed.key import Key, ignored, supported, unsupported
from zfunc.train.deepspeed.takes import (
    COUNT,
    FLAG,
    LIST,
    MOMENTUM,
    NUMBER,
    PAIR,
    SIZE,
    TEXT,
    choice_of,
    finite_between,
    whole_number,
)

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_MEAN = "gradients are always divided by the ranks before they are added up, which is the same mean"
_MASTER = "master weights are always exact fp32; `moments` is what makes the host's state smaller"
_PRECISION = (
    "`precision`; with neither of `fp16` and `bf16` fp32, or in `zfunc train` what `--precision` says"
)
_DYNAMIC = "`LossScale` of `zfunc.init`"

BATCH: tuple[Key, ...] = (
    supported(
        "train_batch_size",
        COUNT,
        None,
        "sequences of a step, of all ranks together: `train_micro_batch_size_per_gpu` x "
        "`gradient_accumulation_steps` x ranks; any two give the third; a contradiction is an error, and so is "
        "a file that says neither size",
    ),
    supported("train_micro_batch_size_per_gpu", COUNT, None, "see `train_batch_size`"),
    supported("gradient_accumulation_steps", COUNT, None, "`micro_batches`: all of them in one `train_step`"),
    supported(
        "managed_gradient_accumulation",
        FLAG,
        True,
        "a step takes the whole batch and splits it itself",
        False,
        instead="a step takes the whole batch here and splits it itself: leave it out",
    ),
    supported(
        "gradient_clipping", NUMBER, 1.0, "`clip_norm`; 0 does not clip, and without the key it is 1.0"
    ),
    supported(
        "steps_per_print", COUNT, None, "steps from one printed line to the next; without it, seconds decide"
    ),
    ignored("prescale_gradients", FLAG, False, _MEAN),
    ignored("gradient_predivide_factor", finite_between(0.0), 1.0, _MEAN),
    supported(
        "gradient_allreduce_op",
        choice_of("mean", "sum"),
        "mean",
        "the gradient is the mean over the batch",
        "sum",
        instead='the gradient is always a mean: use "mean"; Adam takes the same steps but for eps and clipping',
    ),
    ignored(
        "communication_data_type", choice_of("fp32", "fp16", "bf16"), None, "gradients travel in `precision`"
    ),
    ignored("dataloader_drop_last", FLAG, False, "every step takes a whole batch"),
)

PRECISION: tuple[Key, ...] = (
    supported("fp16.enabled", FLAG, False, _PRECISION),
    ignored("fp16.auto_cast", FLAG, False, "inputs are cast by the model's own segments"),
    supported("fp16.loss_scale", NUMBER, 0.0, f"{_DYNAMIC}: 0 is dynamic, another number is fixed"),
    supported(
        "fp16.initial_scale_power",
        whole_number(0, 126),
        16,
        f"{_DYNAMIC}: the first `scale` is 2 to this power",
    ),
    supported("fp16.loss_scale_window", SIZE, 1000, f"{_DYNAMIC}: `window`"),
    supported("fp16.hysteresis", COUNT, 2, f"{_DYNAMIC}: `hysteresis`"),
    supported("fp16.consecutive_hysteresis", FLAG, False, f"{_DYNAMIC}: `consecutive`"),
    supported("fp16.min_loss_scale", SIZE, 1, f"{_DYNAMIC}: `minimum`"),
    ignored("fp16.fp16_master_weights_and_grads", FLAG, False, _MASTER),
    supported("bf16.enabled", FLAG, False, _PRECISION),
    ignored("bf16.immediate_grad_update", FLAG, False, "when gradients are added up is the plan's choice"),
    ignored(
        "bf16.check_grad_overflow",
        FLAG,
        True,
        "in bf16 a gradient that is not finite ends the training with an error, it is never skipped in silence",
    ),
    ignored("bf16.bf16_master_weights_and_grads", FLAG, False, _MASTER),
    supported("bf16.bf16_optimizer_states", FLAG, False, '`AdamW(moments="16bit")`'),
    unsupported("torch_autocast.enabled", "use bf16, which computes in it from end to end"),
    ignored("torch_autocast.dtype", TEXT, None, "autocast is not there"),
    ignored("torch_autocast.lower_precision_safe_modules", LIST, None, "autocast is not there"),
)

OPTIMIZER: tuple[Key, ...] = (
    supported(
        "optimizer.type",
        TEXT,
        None,
        "`AdamW`, for Adam and AdamW in any case; Adam without `adam_w_mode` decays as AdamW, as it does there. "
        "Others are refused",
    ),
    supported("optimizer.params.lr", NUMBER, 1e-3, "`AdamW(lr=)`; the `scheduler` may set it instead"),
    supported("optimizer.params.betas", PAIR, (0.9, 0.999), "`AdamW(betas=)`"),
    supported("optimizer.params.eps", NUMBER, 1e-8, "`AdamW(eps=)`"),
    supported(
        "optimizer.params.weight_decay",
        NUMBER,
        0.0,
        "`AdamW(weight_decay=)`, of every parameter; `zfunc train` leaves out norms and biases. With `torch_adam` "
        "and AdamW it is 0.01 without the key, as in torch",
    ),
    supported(
        "optimizer.params.adam_w_mode",
        FLAG,
        True,
        "`AdamW(decoupled=)`: false makes L2 of Adam's weight decay; for the type AdamW it says nothing, as there",
    ),
    ignored(
        "optimizer.params.torch_adam",
        FLAG,
        False,
        "there is one Adam here, in the kernel; see `weight_decay`",
    ),
    supported(
        "optimizer.params.bias_correction",
        FLAG,
        True,
        "moments are always corrected",
        False,
        instead="moments are always corrected for their start at 0: leave it out",
    ),
    unsupported("optimizer.params.amsgrad", "AMSGrad is not there: leave it out"),
    supported("optimizer.params.fp32_optimizer_states", FLAG, True, 'false is `AdamW(moments="16bit")`'),
    *(
        ignored(f"optimizer.params.{name}", FLAG, None, "there is one Adam here, in the kernel")
        for name in ("foreach", "fused", "set_grad_none")
    ),
    unsupported("optimizer.params.max_grad_norm", 'use the key "gradient_clipping" of the file', NUMBER, 0.0),
    ignored("optimizer.legacy_fusion", FLAG, False, "there is one Adam here, in the kernel"),
    ignored("zero_allow_untested_optimizer", FLAG, False, "Adam and AdamW are the optimizers there are"),
    ignored("zero_force_ds_cpu_optimizer", FLAG, True, "the kernel updates what is on the host, always"),
)

_P = "scheduler.params."

SCHEDULER: tuple[Key, ...] = (
    supported(
        "scheduler.type",
        choice_of(*SCHEDULERS),
        None,
        "a learning rate of `zfunc.train.deepspeed.schedules`, equal to the one there at every update; without a "
        "scheduler it is constant, but in `zfunc train`, which warms up and decays along a cosine",
    ),
    supported(_P + "lr_range_test_min_lr", NUMBER, 1e-3, "LRRangeTest"),
    supported(_P + "lr_range_test_step_size", COUNT, 2000, "LRRangeTest"),
    supported(_P + "lr_range_test_step_rate", NUMBER, 1.0, "LRRangeTest"),
    supported(_P + "lr_range_test_staircase", FLAG, False, "LRRangeTest"),
    supported(_P + "cycle_min_lr", NUMBER, None, "OneCycle, which needs it"),
    supported(_P + "cycle_max_lr", NUMBER, None, "OneCycle, which needs it"),
    supported(_P + "decay_lr_rate", NUMBER, 0.0, "OneCycle"),
    supported(_P + "cycle_first_step_size", COUNT, 2000, "OneCycle"),
    supported(_P + "cycle_second_step_size", whole_number(0), None, "OneCycle; as the first without it"),
    supported(_P + "cycle_first_stair_count", whole_number(0), 0, "OneCycle"),
    supported(_P + "cycle_second_stair_count", whole_number(0), None, "OneCycle; as the first without it"),
    supported(_P + "decay_step_size", whole_number(0), 0, "OneCycle"),
    supported(
        _P + "cycle_momentum",
        FLAG,
        True,
        "OneCycle, unless it is false: beta1 goes down while the rate goes up; beta2 is 0.99 whatever `betas` says",
    ),
    supported(_P + "cycle_min_mom", MOMENTUM, 0.8, "OneCycle"),
    supported(_P + "cycle_max_mom", MOMENTUM, 0.9, "OneCycle"),
    supported(
        _P + "decay_mom_rate",
        finite_between(-math.inf),
        0.0,
        "OneCycle; an update for which it has raised beta1 to 1 is refused",
    ),
    supported(_P + "warmup_min_lr", NUMBER, 0.0, "WarmupLR, WarmupDecayLR"),
    supported(
        _P + "warmup_max_lr",
        NUMBER,
        None,
        'WarmupLR, WarmupDecayLR; "auto" is the optimizer\'s lr, without it WarmupLR takes it, the other 0.001',
    ),
    supported(_P + "warmup_num_steps", COUNT, 1000, "WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    supported(
        _P + "warmup_type", choice_of("log", "linear"), "log", "WarmupLR, WarmupDecayLR, WarmupCosineLR"
    ),
    supported(
        _P + "total_num_steps",
        COUNT,
        None,
        'WarmupDecayLR, WarmupCosineLR; "auto" or without it: the steps of `zfunc train`',
    ),
    supported(_P + "warmup_min_ratio", NUMBER, 0.0, "WarmupCosineLR"),
    supported(_P + "cos_min_ratio", NUMBER, 0.0001, "WarmupCosineLR"),
    unsupported(
        _P + "last_batch_iteration", "a resume knows its step by itself: leave it out", whole_number(-1), -1
    ),
)

MAIN_KEYS: tuple[Key, ...] = (*BATCH, *PRECISION, *OPTIMIZER, *SCHEDULER)
