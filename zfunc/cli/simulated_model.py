"""The model of a step that is simulated: the GPT of a command's flags, or that of a Hugging Face config.

A GPT needs no torch; any other is traced on the meta device.
"""

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from zfunc.core.hardware import Hardware
from zfunc.errors import CheckpointError
from zfunc.models.config_file import check_config_file
from zfunc.models.gpt_config import num_parameters
from zfunc.models.gpt_costs import GPTCosts
from zfunc.options import flag
from zfunc.planner.cost_model import CostModel, SegmentCosts
from zfunc.planner.profile import Profile
from zfunc.train.gpt_flags import gpt_config, planned_optimizer


@frozen(eq=False)
class SimulatedModel:
    """Sizes of a model, and its costs for so many rows, tokens of each, and ranks.

    Tied parameters count once. `longest` is the most tokens of a sequence, if that is limited.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    parameters: int
    trained: int
    costs: Callable[[int, int, int], SegmentCosts]
    longest: int | None = None

    @property
    def name(self) -> str:
        """Such as "GPT of 4 layers x 128: 1,000 parameters"."""
        share = f", {self.trained:,} of them trained" if self.trained < self.parameters else ""
        size = f"{self.num_layers} layers x {self.hidden_size:,}"
        return f"{self.architecture} of {size}: {self.parameters:,} parameters{share}"

    def cost_model(
        self, machine: Profile | Hardware, rows: int, seq_length: int, world: int = 1
    ) -> CostModel:
        """Its costs with so many sequences of so many tokens on each of the ranks."""
        return CostModel(self.costs(rows, seq_length, world), machine)


def simulated_model(settings: Any) -> SimulatedModel:
    """The model of the settings. Raises ValueError for a config that is not supported."""
    if settings.hf is not None or settings.hf_config is not None:
        return _described(settings)
    config, optimizer = gpt_config(settings), planned_optimizer(settings)
    count = num_parameters(config)

    def costs(rows: int, seq_length: int, world: int) -> SegmentCosts:
        return GPTCosts(evolve(config, seq_length=seq_length), rows, optimizer, world)

    return SimulatedModel("GPT", settings.num_layers, settings.hidden_size, count, count, costs)


def _described(settings: Any) -> SimulatedModel:
    name = "hf" if settings.hf_config is None else "hf_config"
    try:
        check_config_file(getattr(settings, name).expanduser())
    except CheckpointError as error:
        raise ValueError(f"{flag(name)}: {error}") from error

    import torch

    from zfunc.planner.traced_costs import TracedCosts
    from zfunc.train.pretrained import described_model

    model, optimizer = described_model(settings), planned_optimizer(settings)
    assert model is not None
    owned = [p for s in model.segments for p in s.parameters if p.name not in s.shared]
    count, trained = (sum(p.numel for p in owned if p.trainable >= only) for only in (False, True))

    def costs(rows: int, seq_length: int, world: int) -> SegmentCosts:
        tokens = torch.empty((rows, seq_length), dtype=torch.int64, device="meta")
        return TracedCosts(model.segments, (tokens, tokens), optimizer, world)

    layers, width = model.sizes["num_layers"], model.sizes["hidden_size"]
    return SimulatedModel(model.architecture, layers, width, count, trained, costs, model.longest)
