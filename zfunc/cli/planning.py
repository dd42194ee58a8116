"""What `zfunc plan` does: the GPT of the flags, planned; or the largest of its family that fits.

The invariant: the segments are on the meta device and the batch has no data, so nothing is allocated.
"""

from typing import Any

import torch
from attrs import evolve, frozen

from zfunc.cli.plan_settings import Planning
from zfunc.models.gpt import num_parameters
from zfunc.options import AUTO
from zfunc.planner.candidate import Choice, Setup
from zfunc.planner.cost_model import Task, machine, precision_for
from zfunc.planner.max_layers import largest
from zfunc.planner.plan_step import Planned, planned
from zfunc.train.setup import config, segments


@frozen(eq=False)
class Answer:
    """A GPT that was planned. `asked` has the number of layers that was found, where the most was asked for."""

    asked: Planning
    planned: Planned

    @property
    def parameters(self) -> int:
        """How many the model has, tied ones counted once."""
        return num_parameters(config(self.asked))


def answer(asked: Planning) -> Answer:
    """Plan what is asked.

    Raises ValueError for what cannot work, FileNotFoundError for hardware that is not known.
    """
    on = machine(asked.hardware)
    setup = _setup(asked, precision_for(on, asked.precision))
    if asked.max:
        one = Task(segments(evolve(asked, num_layers=1)), _batch(asked), on)
        most = largest(one.job(setup), setup.choice, one.hardware(setup))
        asked = evolve(asked, num_layers=max(1, most))
    task = Task(segments(asked), _batch(asked), on)
    vary, vary_ratio = asked.schedule == AUTO, asked.ratio == AUTO
    return Answer(asked, planned(task, setup, vary=vary, vary_ratio=vary_ratio))


def _batch(asked: Planning) -> tuple[torch.Tensor, torch.Tensor]:
    shape = asked.rows, asked.seq_length
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    return tokens, tokens


def _setup(asked: Planning, precision: str) -> Setup:
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
