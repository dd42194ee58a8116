"""What DeepSpeed's own schedulers and loss scaler give, as JSON: `python tests/deepspeed_reference.py`, with
DeepSpeed installed, prints tests/goldens/deepspeed.json. Nothing of zfunc is used here.
"""

import json
import logging
import random
from typing import Any

STEPS = 40
_CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
_LONG = {**_CYCLE, "cycle_first_step_size": 7, "cycle_second_step_size": 11}
_DECAY = {"decay_step_size": 4, "decay_lr_rate": 0.5}
_STAIRS = {"cycle_first_stair_count": 3, "cycle_second_stair_count": 4}
_THIRTY = {"total_num_steps": 30, "warmup_num_steps": 8}
_LINEAR = {"warmup_type": "linear"}
_STEPS = {"lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.5}
SCHEDULES: list[tuple[str, float, dict[str, Any]]] = [  # scheduler, lr of the optimizer, params
    ("LRRangeTest", 1e-3, {}),
    ("LRRangeTest", 1e-3, {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 7}),
    ("LRRangeTest", 1e-3, {**_STEPS, "lr_range_test_staircase": True}),
    ("OneCycle", 1e-3, {**_CYCLE, "cycle_first_step_size": 9}),
    ("OneCycle", 1e-3, {**_LONG, **_DECAY}),
    (
        "OneCycle",
        1e-3,
        {**_CYCLE, "cycle_first_step_size": 8, "cycle_second_step_size": 13}
        | {**_STAIRS, "decay_step_size": 3, "decay_lr_rate": 0.1},
    ),
    (
        "OneCycle",
        1e-3,
        {**_CYCLE, "cycle_first_step_size": 6, "cycle_second_step_size": 0, "cycle_first_stair_count": 2},
    ),
    ("OneCycle", 1e-3, {**_CYCLE, "cycle_first_step_size": 9, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95}),
    ("OneCycle", 1e-3, {**_LONG, "cycle_first_stair_count": 3, **_DECAY, "decay_mom_rate": -0.05}),
    ("OneCycle", 1e-3, {**_CYCLE, "cycle_first_step_size": 9, "cycle_momentum": False}),
    ("WarmupLR", 7e-4, {}),
    ("WarmupLR", 7e-4, {"warmup_max_lr": 3e-4, "warmup_num_steps": 10}),
    ("WarmupLR", 7e-4, {"warmup_min_lr": 1e-5, "warmup_num_steps": 12, **_LINEAR}),
    ("WarmupLR", 7e-4, {"warmup_num_steps": 1}),
    ("WarmupDecayLR", 1e-3, {"total_num_steps": 30, "warmup_max_lr": 3e-4, "warmup_num_steps": 10}),
    ("WarmupDecayLR", 1e-3, {"total_num_steps": 25, "warmup_min_lr": 1e-5, "warmup_num_steps": 5, **_LINEAR}),
    ("WarmupDecayLR", 1e-3, {"total_num_steps": 4, "warmup_num_steps": 9}),
    ("WarmupCosineLR", 2e-3, _THIRTY),
    ("WarmupCosineLR", 2e-3, {**_THIRTY, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05, **_LINEAR}),
    ("WarmupCosineLR", 2e-3, {"total_num_steps": 5, "warmup_num_steps": 8}),
]


def rates(kind: str, lr: float, params: dict[str, Any]) -> dict[str, list[Any]]:
    """Learning rates and betas of the first updates, as an engine has them: an update, then the scheduler."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, group = getattr(lr_schedules, kind)(optimizer, **params), optimizer.param_groups[0]
    seen: dict[str, list[Any]] = {"rates": [], "betas": []}
    for _ in range(STEPS):
        seen["rates"].append(float(group["lr"]))
        seen["betas"].append([float(beta) for beta in group["betas"]])
        scheduler.step()
    return seen if kind == "OneCycle" else {"rates": seen["rates"]}


def scales(seed: int) -> dict[str, Any]:
    """The loss scale after each of a few steps, some of which overflow."""
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist.get_rank = lambda *_: 1  # outside a process group; rank 0 logs
    r = random.Random(seed)
    window, hysteresis, minimum = r.choice((1, 2, 3, 5, 10)), r.choice((1, 2, 3)), r.choice((1, 4, 1024))
    consecutive, share = r.random() < 0.5, r.choice((0.05, 0.12, 0.4))
    overflows = [r.random() < share for _ in range(60)]
    scaler, seen = loss_scaler.DynamicLossScaler(2.0**16, window, minimum, hysteresis, consecutive), []
    for overflow in overflows:
        try:
            scaler.update_scale(overflow)
        except Exception:  # already at its minimum
            break
        seen.append(scaler.cur_scale)
    settings = {"window": window, "hysteresis": hysteresis, "minimum": minimum, "consecutive": consecutive}
    return {"told": settings, "overflows": [int(x) for x in overflows], "scales": seen}


def main() -> None:
    """Print a case a line."""
    logging.disable(logging.CRITICAL)
    schedules = [{"type": kind, "lr": lr, "params": p, **rates(kind, lr, p)} for kind, lr, p in SCHEDULES]
    cases = {"schedules": schedules, "loss_scales": [scales(seed) for seed in range(16)]}
    parts = []
    for name, rows in cases.items():
        lines = ",\n".join(json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    print("{\n" + ",\n".join(parts) + "\n}")


if __name__ == "__main__":
    main()
