"""The model of a step that is simulated: the GPT of a command's flags, or that of a Hugging Face config.

A GPT needs no torch; any other is traced on the meta device, once: its costs are kept on the disk.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from zfunc.core.hardware import Hardware
from zfunc.errors import CheckpointError
from zfunc.models.config_file import check_config_file, check_flags
from zfunc.models.gpt_config import num_parameters
from zfunc.models.gpt_costs import GPTCosts
from zfunc.options import flag
from zfunc.planner.cost_model import CostModel, SegmentCosts
from zfunc.planner.kept_costs import KeptCosts, ModelFacts, kept
from zfunc.planner.profile import Profile
from zfunc.train.gpt_flags import gpt_config, planned_optimizer
from zfunc.units import format_parameters


@frozen(eq=False)
class SimulatedModel:
    """Sizes of a model, and its costs for so many rows, tokens of each, and ranks.

    Tied parameters count once. `longest` is the most tokens of a sequence, if its config limits that, and `learned`
    says whether these positions are learned. `quantized` is how its config stores the weights, "" for as they are
    trained.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    parameters: int
    trained: int
    costs: Callable[[int, int, int], SegmentCosts]
    longest: int | None = None
    learned: bool = True
    quantized: str = ""

    @property
    def name(self) -> str:
        """Such as "GPT of 4 layers x 128: 1,000 parameters"."""
        size = f"{self.num_layers} layers x {self.hidden_size:,}"
        return f"{self.architecture} of {size}: {format_parameters(self.parameters, self.trained)}"

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

    place: Path = getattr(settings, name).expanduser()
    lora = (settings.lora, settings.lora_alpha, settings.lora_targets, str(settings.hf))
    config = (place if place.suffix == ".json" else place / "config.json").read_text(errors="replace")
    question, optimizer = [config, *lora], planned_optimizer(settings)

    @cache
    def opened() -> Any:
        from zfunc.train.pretrained import described_model

        return described_model(settings)

    def facts() -> ModelFacts:
        from zfunc.engine.compile.compile import buffer_bytes, constant_bytes
        from zfunc.models.hf.families import kind_of_quantization

        model = opened()
        return ModelFacts(
            model.architecture,
            model.sizes["num_layers"],
            model.sizes["hidden_size"],
            model.vocab_size,
            model.longest,
            model.learned,
            kind_of_quantization(model.config),
            constant_bytes(model.segments),
            buffer_bytes(model.segments),
            [s.parameters for s in model.segments],
        )

    def costs(rows: int, seq_length: int, world: int) -> SegmentCosts:
        def traced() -> SegmentCosts:
            import torch

            from zfunc.planner.traced_costs import TracedCosts

            tokens = torch.empty((rows, seq_length), dtype=torch.int64, device="meta")
            return TracedCosts(opened().segments, (tokens, tokens), optimizer, world)

        return KeptCosts(known, question, cache(traced), rows, seq_length, optimizer, world)

    known = kept(question, facts, ModelFacts.plain, ModelFacts.read)
    check_flags(settings, getattr(settings, name), known.longest, known.vocab_size)
    count, trained = (sum(p.numel for p in known.owned if p.trainable >= only) for only in (False, True))
    sizes = known.architecture, known.num_layers, known.hidden_size
    return SimulatedModel(*sizes, count, trained, costs, known.longest, known.learned, known.quantized)
