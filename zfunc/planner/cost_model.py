"""The costs of a model under any settings: segments with a batch and an optimizer, on a machine.

The costs of the segments' passes are asked for once for each precision, kind of recomputation and micro-batch size;
all else that settings change is arithmetic. `traced_costs` traces any segments; `zfunc.models.gpt_costs` has those
of a GPT without torch.
"""

import os
from os import PathLike
from typing import Any, Protocol

from attrs import evolve, field, frozen

from zfunc.core.dtypes import PRECISIONS
from zfunc.core.graph import Graph
from zfunc.core.hardware import Hardware
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.engine.compile.step_spec import passes_key
from zfunc.options import AUTO
from zfunc.planner.candidate import PlannedStep
from zfunc.planner.moves import Space
from zfunc.planner.profile import Profile
from zfunc.planner.profile_toml import load_profile
from zfunc.planner.search import SearchResult, search
from zfunc.planner.steady_state import Estimate


def resolve_hardware(hardware: Any) -> Profile | Hardware:
    """The profile of that name or file; a Profile or a Hardware as it is."""
    if isinstance(hardware, Profile | Hardware):
        return hardware
    if isinstance(hardware, str):
        return load_profile(hardware)
    if isinstance(hardware, PathLike):
        return load_profile(os.fspath(hardware))  # pyright: ignore
    raise TypeError(
        f"hardware: got a {type(hardware).__name__}, expected a name, a path, a Profile or a Hardware"
    )


def precision_for(machine: Profile | Hardware, precision: str) -> str:
    """The precision; for "auto" bf16 where a profile has it, else fp16; fp32 where the device is the host."""
    if precision != AUTO:
        return precision
    if isinstance(machine, Hardware):
        return "bf16"
    order = PRECISIONS if machine.unified else ("bf16", "fp16", "fp32")
    return next(p for p in order if p in machine.precisions)


class SegmentCosts(Protocol):
    """Segments, a batch and an optimizer, by their costs."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        ...

    @property
    def rows(self) -> int:
        """The size of a rank's batch."""
        ...

    @property
    def tokens(self) -> int:
        """The elements of its targets."""
        ...

    def untraced(self, settings: StepSettings, *, on_gpu: bool) -> StepSpec:
        """The spec of these settings, with costs of 0."""
        ...

    def traced(self, settings: StepSettings, *, on_gpu: bool, grouped: bool) -> StepSpec:
        """The same with the costs of a micro-batch, on `grouped` Hardware or not. Segments recompute alike."""
        ...


@frozen(eq=False)
class CostModel:
    """What is planned, whatever the settings. Costs are kept by the settings that they depend on."""

    segments: SegmentCosts
    machine: Profile | Hardware
    _costs: dict[tuple[Any, ...], StepSpec] = field(factory=dict[tuple[Any, ...], StepSpec])
    _estimates: dict[StepSettings, Estimate] = field(factory=dict[StepSettings, Estimate])
    _graphs: dict[StepSettings, dict[int, Graph]] = field(factory=dict[StepSettings, dict[int, Graph]])

    def hardware(self, settings: StepSettings) -> Hardware:
        """One rank's share of the machine."""
        if isinstance(self.machine, Hardware):
            return self.machine
        return self.machine.hardware(settings.precision, self.segments.world)

    def step(self, settings: StepSettings) -> PlannedStep:
        """The step of these settings. Raises ValueError for settings that cannot work."""
        return self.estimate(settings).exact_step

    def estimate(self, settings: StepSettings) -> Estimate:
        """The same, of many micro-batches from a few; kept, for who asks again."""
        if settings not in self._estimates:
            graphs = self._graphs_of(evolve(settings, schedule=""))
            self._estimates[settings] = Estimate(
                self.spec(settings), settings, self.hardware(settings), graphs
            )
        return self._estimates[settings]

    def _graphs_of(self, unscheduled: StepSettings) -> dict[int, Graph]:
        """Where an estimate keeps its operations: until the next one with others, but for the first one's."""
        for other in [] if unscheduled in self._graphs else [*self._graphs][1:]:
            self._graphs.pop(other).clear()
        return self._graphs.setdefault(unscheduled, {})

    def search(self, settings: StepSettings, space: Space) -> SearchResult:
        """The best settings in `space`, from these on."""
        return search(self.spec, self.hardware(settings), settings, space)

    def spec(self, settings: StepSettings) -> StepSpec:
        """The spec of these settings, with the costs of its segments."""
        by_mode = {x: self._traced(evolve(settings, recompute=x)) for x in settings.recompute.split(",")}
        spec = self.segments.untraced(settings, on_gpu=self._on_gpu(settings))
        count = spec.num_segments
        traced = [by_mode[settings.recompute_of(s, count)] for s in range(count)]
        return evolve(
            spec,
            costs=[x.costs[s] for s, x in enumerate(traced)],
            target_bytes=traced[0].target_bytes,
            aux=traced[0].aux,
            commit=spec.swaps and settings.commit_every == 1,  # a step like most
        )

    def _on_gpu(self, settings: StepSettings) -> bool:
        return not self.hardware(settings).unified

    def _traced(self, settings: StepSettings) -> StepSpec:
        """A spec with the costs of segments that all recompute the same."""
        key = (settings.precision, settings.micro_batches, *passes_key(settings))
        if key not in self._costs:
            on_gpu, grouped = self._on_gpu(settings), self.hardware(settings).grouped
            self._costs[key] = self.segments.traced(settings, on_gpu=on_gpu, grouped=grouped)
        return self._costs[key]
