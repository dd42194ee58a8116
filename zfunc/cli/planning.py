"""What `zfunc plan` does: the GPT of the flags, planned; or the largest of its family that fits.

The invariant: the segments are on the meta device and the batch has no data, so nothing is allocated.
"""

from typing import Any

import torch
from attrs import evolve, frozen

from zfunc.cli.plan_settings import PlanSettings
from zfunc.models.gpt import num_parameters
from zfunc.options import AUTO
from zfunc.planner.candidate import Choice, Setup
from zfunc.planner.cost_model import CostModel, precision_for, resolve_hardware
from zfunc.planner.max_layers import max_layers
from zfunc.planner.plan_step import Planned, plan_setup
from zfunc.train.setup import gpt_config, gpt_segments


@frozen(eq=False)
class PlannedModel:
    """A GPT that was planned. `asked` has the number of layers that was found, where the most was asked for."""

    asked: PlanSettings
    planned: Planned

    @property
    def parameters(self) -> int:
        """How many the model has, tied ones counted once."""
        return num_parameters(gpt_config(self.asked))


def plan_model(asked: PlanSettings) -> PlannedModel:
    """Plan what is asked.

    Raises ValueError for what cannot work, FileNotFoundError for hardware that is not known.
    """
    on = resolve_hardware(asked.hardware)
    setup = _setup(asked, precision_for(on, asked.precision))
    if asked.max:
        one = CostModel(gpt_segments(evolve(asked, num_layers=1)), _batch(asked), on)
        most = max_layers(one.job(setup), setup.choice, one.hardware(setup))
        asked = evolve(asked, num_layers=max(1, most))
    task = CostModel(gpt_segments(asked), _batch(asked), on)
    vary, vary_ratio = asked.schedule == AUTO, asked.ratio == AUTO
    return PlannedModel(asked, plan_setup(task, setup, vary=vary, vary_ratio=vary_ratio))


def _batch(asked: PlanSettings) -> tuple[torch.Tensor, torch.Tensor]:
    shape = asked.rows, asked.seq_length
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    return tokens, tokens


def _setup(asked: PlanSettings, precision: str) -> Setup:
    moments: Any = asked.moments
    return Setup(
        precision,
        asked.clip or None,
        asked.micro_batches,
        asked.recompute,
        moments,
        world=asked.world,
        choice=Choice(
            "Overlapped" if asked.schedule == AUTO else asked.schedule,
            asked.bucket_size,
            asked.grad_slots,
            asked.host_slots,
            1.0 if asked.ratio == AUTO else asked.ratio,
            asked.speculate,
            asked.delay,
        ),
    )
