"""Learning rates and loss scales of DeepSpeed's configurations, against what DeepSpeed itself gives."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zfunc.errors import NonFiniteError
from zfunc.optim.adamw import AdamW
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.arguments import optimizer_arguments
from zfunc.train.deepspeed.lr import (
    SCHEDULERS,
    LRSchedule,
    OneCycle,
    OneCycleBetas,
    WarmupCosineLR,
    WarmupDecayLR,
    lr_schedule,
)
from zfunc.train.deepspeed.reader import read_config_file
from zfunc.train.deepspeed.resolved import ResolvedValues, resolve_values

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepspeed.json"
CASES: dict[str, list[dict[str, Any]]] = json.loads(GOLDEN.read_text())


def name(case: dict[str, Any]) -> str:
    return f"{case['type']} {' '.join(case['params'])}"


def values(case: dict[str, Any]) -> ResolvedValues:
    """A file that has this case."""
    return resolve_values(
        read_config_file(
            {
                "optimizer": {"type": "Adam", "params": {"lr": case["lr"]}},
                "scheduler": {"type": case["type"], "params": case["params"]},
            }
        )
    )


def scheduler(case: dict[str, Any]) -> LRSchedule:
    rate = lr_schedule(values(case), lr=case["lr"])
    assert rate is not None
    return rate


def test_every_scheduler_has_cases() -> None:
    assert {case["type"] for case in CASES["schedules"]} == set(SCHEDULERS)


@pytest.mark.parametrize("case", CASES["schedules"], ids=name)
def test_learning_rates_equal_deepspeeds_at_every_update(case: dict[str, Any]) -> None:
    rate = scheduler(case)
    rates = [rate(step) for step in range(1, len(case["rates"]) + 1)]
    # Equal bits where it was recorded; the last one of a logarithm or cosine is the C library's.
    assert all(abs(a - b) <= 2 * math.ulp(b) for a, b in zip(rates, case["rates"], strict=True))
    assert rates == [rate(step) for step in range(1, len(rates) + 1)]
    with pytest.raises(ValueError, match="counted from 1"):
        rate(0)


@pytest.mark.parametrize("case", [case for case in CASES["schedules"] if "betas" in case], ids=name)
def test_betas_of_one_cycle_equal_deepspeeds_at_every_update(case: dict[str, Any]) -> None:
    adam = AdamW(betas=optimizer_arguments(values(case))["betas"])
    assert [list(adam.betas_at(step)) for step in range(1, len(case["betas"]) + 1)] == case["betas"]


def test_an_update_whose_beta_has_risen_to_1_is_refused() -> None:
    cycle = OneCycle(0.1, 1.0, cycle_first_step_size=2, decay_step_size=1)
    adam = AdamW(betas=OneCycleBetas(cycle, decay_mom_rate=0.1))
    assert adam.betas_at(6)[0] == pytest.approx(0.99)
    with pytest.raises(ValueError, match=r"^betas at step 7: got \(1\.08"):
        adam.betas_at(7)


@pytest.mark.parametrize("rate", [WarmupDecayLR(None, warmup_num_steps=4), WarmupCosineLR(None, lr=1e-3)])
def test_nothing_decays_while_the_end_is_not_known(rate: LRSchedule) -> None:
    assert rate(2000) == rate(10_000) == 1e-3


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0}),
        ("LRRangeTest", {"lr_range_test_step_size": 0}),
        ("WarmupLR", {"warmup_max_lr": math.nan}),
        ("WarmupDecayLR", {"total_num_steps": 10, "warmup_type": "cubic"}),
        ("WarmupCosineLR", {"total_num_steps": 10, "lr": -1.0}),
    ],
)
def test_values_out_of_range_are_refused_when_made(kind: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{kind}: {list(wrong)[-1]} is"):
        SCHEDULERS[kind](**wrong)


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
    script = Path(__file__).parents[1] / "deepspeed_reference.py"
    done = subprocess.run([python, script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == CASES
