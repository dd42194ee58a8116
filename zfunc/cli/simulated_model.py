"""The model and the hardware of a step that is simulated, for `zfunc plan` and `zfunc draw`.

A GPT needs no torch; any other model is traced on the meta device, once: its costs are kept on the disk.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve, frozen

from zfunc.core.display import counted
from zfunc.core.hardware import Hardware
from zfunc.core.setting_values import tile_counts
from zfunc.errors import CheckpointError, SettingError, about, refuse
from zfunc.models.config_file import check_config_file, check_flags
from zfunc.optim.by_name import NamedOptimizer, make_optimizer
from zfunc.optim.elementwise import matrices_only
from zfunc.options import option
from zfunc.planner.profile import Profile, load_profile, profile_names, replace_figures
from zfunc.runtime.memory_limits import check_addresses
from zfunc.train.settings import HF_CONFIG, NEEDED, OPTIMIZERS, GPTFlags, check_exists, gpt_config
from zfunc.units import format_parameters

if TYPE_CHECKING:
    from zfunc.planner.cost_model import CostModel, SegmentCosts

_hardware = partial(option, group="hardware")


@frozen(kw_only=True)
class SimulatedFlags(GPTFlags):
    """Flags of a model and of the simulated hardware. Without `hardware` the profile is the one that a
    subclass names in `UNNAMED`; where that is None, a machine with round figures."""

    UNNAMED: ClassVar[str | None] = None

    hf_config: Path | None = HF_CONFIG
    hardware: str | None = _hardware(
        None,
        f"{', '.join(profile_names())}, or a file that zfunc calibrate wrote (default: v100-32gb; zfunc "
        "draw: round figures)",
        metavar="NAME|FILE",
        words=profile_names(),
        common=True,
    )
    with_: tuple[str, ...] = _hardware(
        (),
        "replace a figure of that profile, as bytes.host=1.28e11 does, once for each (default: none)",
        metavar="TABLE.KEY=VALUE",
        converter=tuple,
    )

    @property
    def profile(self) -> Profile | None:
        """The profile of the hardware to simulate, with the figures that `with_` replaces."""
        if (name := self.hardware or self.UNNAMED) is None:
            if self.with_:
                refuse("with_", "it without `hardware`", "a profile", "name one")
            return None
        try:
            figures = (text.partition("=") for text in self.with_)
            given = {place: _number(place, value) for place, _, value in figures}
            return replace_figures(load_profile(name), given)
        except FileNotFoundError:  # says all that
            raise
        except (OSError, ValueError) as error:
            got = " ".join([str(name), *self.with_])
            expected = "a profile that zfunc calibrate wrote, and figures such as bytes.host=1.28e11"
            raise SettingError(("hardware", "with_"), got, expected, str(error)) from error


def _number(place: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        do = "write 1.28e11 for 128 GB"
        raise ValueError(f"{place}: got {text!r}, expected a number in the unit of its table: {do}") from None


@frozen(eq=False)
class SimulatedModel:
    """Sizes of a model, and `costs(rows, seq_length, world)`: its segments' costs for `rows` sequences on a rank.

    Tied parameters count once. `longest` is the most tokens of a sequence, None if the config sets no limit.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    parameters: int
    trained: int
    costs: "Callable[[int, int, int], SegmentCosts]"
    longest: int | None = None

    @property
    def name(self) -> str:
        """The model in words, such as "GPT of 4 layers x 128: 1,000 parameters"."""
        size = f"{counted(self.num_layers, 'layer')} x {self.hidden_size:,}"
        return f"{self.architecture} of {size}: {format_parameters(self.parameters, self.trained)}"

    def cost_model(
        self, machine: Profile | Hardware, rows: int, seq_length: int, world: int = 1
    ) -> "CostModel":
        """Costs of the model's segments with `rows` sequences of `seq_length` tokens on each of `world` ranks."""
        from zfunc.planner.cost_model import CostModel

        return CostModel(self.costs(rows, seq_length, world), machine)


def simulated_model(settings: SimulatedFlags) -> SimulatedModel:
    """The model of the settings. Raises ValueError for an unsupported config, or if `data` does not exist."""
    check_exists("data", settings.data)
    if settings.hf is not None or settings.hf_config is not None:
        return _of_config(settings)
    from zfunc.models.gpt_config import num_parameters
    from zfunc.models.gpt_costs import gpt_costs

    config, optimizer = gpt_config(settings), _optimizer(settings)
    count = num_parameters(config)

    def costs(rows: int, seq_length: int, world: int) -> "SegmentCosts":
        return gpt_costs(evolve(config, seq_length=seq_length), rows, optimizer, world)

    return SimulatedModel("GPT", settings.num_layers, settings.hidden_size, count, count, costs)


def _optimizer(settings: SimulatedFlags) -> NamedOptimizer:
    """The optimizer that `zfunc train` would use; its state formats decide the order of parameters."""
    return make_optimizer(settings.optimizer, decay=matrices_only, **OPTIMIZERS[settings.optimizer][2])


def _of_config(settings: SimulatedFlags) -> SimulatedModel:
    """The model of a Hugging Face config. Imports torch and transformers only where no costs are cached on disk."""
    from zfunc.planner.cost_model import SegmentCosts
    from zfunc.planner.kept_costs import ModelFacts, kept, kept_trace

    name = "hf" if settings.hf_config is None else "hf_config"
    place = Path(getattr(settings, name))
    try:
        check_config_file(place)
    except CheckpointError as error:
        raise ValueError(about(name, error)) from error
    config = (place if place.suffix == ".json" else place / "config.json").read_text(errors="replace")
    question = [config, *(getattr(settings, x) for x in NEEDED), str(settings.hf)]
    optimizer = _optimizer(settings)

    @cache
    def opened() -> Any:
        check_addresses()
        from zfunc.train.pretrained import pretrained_model

        if sys.stderr.isatty():
            print("tracing the model once: its costs are kept for the next plan", file=sys.stderr)
        return pretrained_model(settings, weights=False)

    def facts() -> ModelFacts:
        model = opened()
        return ModelFacts(
            model.architecture,
            model.sizes["num_layers"],
            model.sizes["hidden_size"],
            model.vocab_size,
            sum(s.constant_bytes for s in model.segments),
            [s.buffer_bytes for s in model.segments],
            [s.parameters for s in model.segments],
            model.longest,
        )

    def costs(rows: int, seq_length: int, world: int) -> "SegmentCosts":
        @cache
        def traced() -> "SegmentCosts":
            import torch

            from zfunc.planner.traced_costs import traced_costs

            tokens = torch.empty((rows, seq_length), dtype=torch.int64, device="meta")
            return traced_costs(opened().segments, (tokens, tokens), optimizer, world)

        trace = kept_trace([*question, rows, seq_length], lambda *asked: traced().trace(*asked))
        sizes = known.constant_bytes, known.buffer_bytes, tile_counts(seq_length)
        resized = partial(costs, seq_length=seq_length, world=world)
        return SegmentCosts(
            known.parameters, optimizer, rows, rows * seq_length, trace, world, *sizes, resized
        )

    known = kept(question, facts, ModelFacts)
    check_flags(settings, place, known.longest, known.vocab_size)
    count, trained = (
        sum(p.encodes or p.numel for p in known.owned if p.trainable >= only) for only in (False, True)
    )
    sizes = known.architecture, known.num_layers, known.hidden_size
    return SimulatedModel(*sizes, count, trained, costs, known.longest)
