"""What `zfunc plan` does: the GPT of the flags, planned; or the largest of its family that fits.

The invariant: the segments are on the meta device and the batch has no data, so nothing is allocated.
"""

import torch
from attrs import evolve, frozen

from zfunc.cli.plan_settings import PlanSettings
from zfunc.models.gpt import num_parameters
from zfunc.planner.cost_model import CostModel, precision_for, resolve_hardware
from zfunc.planner.max_layers import max_layers
from zfunc.planner.plan_step import Planned, plan_settings, search_start
from zfunc.train.settings import step_settings
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
    settings = step_settings(
        asked, precision=precision_for(on, asked.precision), delay_from=1 if asked.delay else None
    )
    if asked.max:
        one = CostModel(gpt_segments(evolve(asked, num_layers=1)), _batch(asked), on, asked.world)
        start = search_start(settings)
        most = max_layers(one.spec(start), start, one.hardware(start))
        asked = evolve(asked, num_layers=max(1, most))
    return PlannedModel(
        asked, plan_settings(CostModel(gpt_segments(asked), _batch(asked), on, asked.world), settings)
    )


def _batch(asked: PlanSettings) -> tuple[torch.Tensor, torch.Tensor]:
    shape = asked.rows, asked.seq_length
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    return tokens, tokens
