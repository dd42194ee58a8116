"""What `zfunc plan` does: the GPT of the flags, planned; or the largest of its family that fits.

The invariant: the segments are on the meta device and the batch has no data, so nothing is allocated.
"""

import torch
from attrs import evolve, frozen

from zfunc.cli.plan_settings import PlanSettings
from zfunc.core.hardware import Hardware
from zfunc.models.gpt import gpt_segments, num_parameters
from zfunc.optim.adamw import AdamW
from zfunc.planner.cost_model import CostModel, precision_for, resolve_hardware
from zfunc.planner.max_layers import max_layers
from zfunc.planner.plan_step import Planned, plan_settings, search_start
from zfunc.planner.profile import Profile
from zfunc.train.settings import step_settings
from zfunc.train.setup import gpt_config


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
        one = _cost_model(evolve(asked, num_layers=1), on)
        start = search_start(settings)
        most = max_layers(one.spec(start), start, one.hardware(start))
        asked = evolve(asked, num_layers=max(1, most))
    return PlannedModel(asked, plan_settings(_cost_model(asked, on), settings))


def _cost_model(asked: PlanSettings, on: Profile | Hardware) -> CostModel:
    """The GPT of the flags, of a batch without data."""
    tokens = torch.empty((asked.rows, asked.seq_length), dtype=torch.int64, device="meta")
    return CostModel(gpt_segments(gpt_config(asked)), (tokens, tokens), on, AdamW(), asked.world)
