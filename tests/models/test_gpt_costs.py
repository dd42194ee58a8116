"""The costs of a GPT's segments without a trace are the traced ones, whatever its size and settings."""

from typing import Any

import pytest
import torch
from zfunc.schedules import DualPipeV
from zfunc.schedules.stages import RecomputeAhead

from zfunc.core.settings import StepSettings
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.gpt_costs import gpt_costs, gpt_parameters
from zfunc.optim.adamw import AdamW
from zfunc.planner.traced_costs import traced_costs

NONE, ALL = {"recompute": "none"}, {"recompute": "all"}
MOVED = {"activations_on": "host"}
MOVING = {"recompute": "min-cut", **MOVED}
SPLIT = {"devices": 2, "order": "DualPipeV", "micro_batches": 4}
AHEAD = ALL | SPLIT | {"order": RecomputeAhead(DualPipeV())}
DEALT = ALL | MOVED | {"params_on": "host", "devices": 2, "order": "RoundPipe", "micro_batches": 2}

# rows; vocabulary, tokens, layers, width, heads; whether an accelerator computes, and the settings
CASES: dict[str, tuple[int, tuple[int, ...], bool, list[dict[str, Any]]]] = {
    "on the host": (4, (301, 24, 2, 48, 3), False, [NONE, ALL, MOVING]),
    "fp32": (4, (301, 24, 2, 48, 3), True, [{**ALL, "precision": "fp32"}, {**MOVING, "precision": "fp32"}]),
    "norms in fp32": (4, (301, 24, 2, 48, 3), True, [{**ALL, "fp32_params": "*.ln_*"}]),
    "micro-batches": (6, (17, 70, 1, 10, 2), True, [{**NONE, "micro_batches": 6}]),
    "compiled": (4, (301, 24, 2, 48, 3), True, [{**ALL, "compile_segments": True}]),
    "ones": (1, (1, 1, 1, 1, 1), False, [ALL]),
    "logits in pieces": (4, (50257, 512, 1, 40, 2), False, [NONE, MOVING]),
    "halves": (4, (301, 24, 2, 48, 3), False, [x | SPLIT for x in (NONE, ALL, MOVING, ALL | MOVED)]),
    "halves, fp32": (4, (301, 24, 2, 48, 3), True, [x | SPLIT | {"precision": "fp32"} for x in (NONE, ALL)]),
    "recomputed ahead": (4, (301, 24, 2, 48, 3), False, [AHEAD, AHEAD | MOVED, DEALT]),
    "recomputed ahead, fp32": (
        4,
        (301, 24, 2, 48, 3),
        True,
        [x | {"precision": "fp32"} for x in (AHEAD, DEALT)],
    ),
    "halves, logits in pieces": (8, (50257, 512, 2, 40, 2), True, [NONE | SPLIT, MOVING | SPLIT]),
}


# What they have of two other cases meets in each.
AT_NIGHT = {"halves, fp32", "recomputed ahead, fp32", "halves, logits in pieces"}


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x in AT_NIGHT)) for x in CASES])
def test_the_costs_are_the_traced_ones(case: str) -> None:
    rows, sizes, on_gpu, ways = CASES[case]
    config = GPTConfig(*sizes)
    tokens = torch.empty((rows, config.seq_length), dtype=torch.int64, device="meta")
    traced = traced_costs(gpt_segments(config), (tokens, tokens), AdamW())
    derived = gpt_costs(config, rows, AdamW())
    assert [list(own) for own in traced.parameters] == gpt_parameters(config)
    assert (derived.rows, derived.tokens, derived.world) == (traced.rows, traced.tokens, traced.world)
    for way in ways:
        settings = StepSettings(**way)
        assert derived.traced(settings, on_gpu=on_gpu) == traced.traced(settings, on_gpu=on_gpu), way


def test_a_gpt_with_dropout_has_to_be_traced() -> None:
    with pytest.raises(ValueError, match=r"dropout: got 0\.1, expected 0: pass the segments to zfunc\.plan"):
        gpt_costs(GPTConfig(dropout=0.1), 1, AdamW()).traced(StepSettings(), on_gpu=True)
