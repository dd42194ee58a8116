"""The costs of a model under any settings: segments with a batch, an optimizer and a machine.

A segment is traced without data, once for each precision, kind of recomputation and micro-batch size; all else that
settings change is arithmetic.
"""

import os
from os import PathLike
from typing import Any

from attrs import evolve, field, frozen
from torch.utils._pytree import tree_leaves

from zfunc.core.dtypes import PRECISIONS
from zfunc.core.graph import Graph
from zfunc.core.hardware import Hardware
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.engine.compile import compile, with_moments
from zfunc.engine.program import Program, ProgramCache
from zfunc.engine.segment import Segment
from zfunc.engine.specialize import split_batch, traced_spec
from zfunc.engine.step_spec import make_spec
from zfunc.optim.base import Optimizer
from zfunc.options import AUTO
from zfunc.planner.candidate import PlannedStep
from zfunc.planner.profile import Profile
from zfunc.planner.profile_toml import load_profile
from zfunc.planner.search import SearchResult, search
from zfunc.planner.search_space import SearchSpace
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


@frozen(eq=False)
class CostModel:
    """What is planned, whatever the settings. Costs and programs are kept by the settings that they depend on."""

    segments: tuple[Segment, ...]
    example: tuple[Any, Any]
    machine: Profile | Hardware
    optimizer: Optimizer
    world: int = 1  # ranks
    _costs: dict[tuple[Any, ...], StepSpec] = field(factory=dict[tuple[Any, ...], StepSpec])
    _estimates: dict[StepSettings, Estimate] = field(factory=dict[StepSettings, Estimate])
    _graphs: dict[StepSettings, dict[int, Graph]] = field(factory=dict[StepSettings, dict[int, Graph]])
    _programs: dict[tuple[Any, ...], Program] = field(factory=dict[tuple[Any, ...], Program])

    @property
    def rows(self) -> int:
        """The size of a rank's batch."""
        return next((t.shape[0] for t in tree_leaves(self.example)), 1)

    def hardware(self, settings: StepSettings) -> Hardware:
        """One rank's share of the machine."""
        if isinstance(self.machine, Hardware):
            return self.machine
        return self.machine.hardware(settings.precision, self.world)

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

    def search(self, settings: StepSettings, space: SearchSpace) -> SearchResult:
        """The best settings in `space`, from these on."""
        return search(self.spec, self.hardware(settings), settings, space)

    def spec(self, settings: StepSettings) -> StepSpec:
        """The spec of these settings, with the costs of its segments."""
        by_mode = {x: self._traced(evolve(settings, recompute=x)) for x in settings.recompute.split(",")}
        spec, count = self._spec(settings), len(self.segments)
        traced = [by_mode[settings.recompute_of(s, count)] for s in range(count)]
        return evolve(
            spec,
            costs=[x.costs[s] for s, x in enumerate(traced)],
            target_bytes=traced[0].target_bytes,
            aux=traced[0].aux,
            commit=spec.swaps and settings.commit_every == 1,  # a step like most
            graphed=spec.graphed & {s for s, x in enumerate(traced) if s in x.graphed},
        )

    def _spec(self, settings: StepSettings) -> StepSpec:
        on_gpu = not self.hardware(settings).unified
        optimizer = with_moments(self.optimizer, settings)
        return make_spec(self.segments, optimizer, settings, world=self.world, on_gpu=on_gpu)

    def _traced(self, settings: StepSettings) -> StepSpec:
        """A spec with the costs of segments that all recompute the same."""
        key = (settings.precision, settings.micro_batches, *_passes(settings))
        if key not in self._costs:
            program, spec = self._program(settings), self._spec(settings)
            to_trace = evolve(program, settings=settings, spec=spec, cache=ProgramCache())
            micro = split_batch(self.example, settings.micro_batches)[0]
            of_accelerator = not self.hardware(settings).unified
            self._costs[key], _ = traced_spec(to_trace, micro, of_accelerator=of_accelerator)
        return self._costs[key]

    def _program(self, settings: StepSettings) -> Program:
        """The segments, checked, and compiled with the settings that their forward and backward depend on."""
        recompute, compiled, graphs, moving = key = _passes(settings)
        if key not in self._programs:
            self._programs[key] = compile(
                self.segments,
                recompute=recompute,
                compile_segments=compiled,
                device_graphs=graphs,
                activations_on="host" if moving else "device",
                schedule="Serial",
                device="cpu",
            )
        return self._programs[key]


def _passes(settings: StepSettings) -> tuple[str, bool, bool, bool]:
    """What forward and backward of the segments depend on; only residuals depend on whether these move."""
    moving = settings.recompute == "min-cut" and settings.moves
    return settings.recompute, settings.compile_segments, settings.device_graphs, moving
