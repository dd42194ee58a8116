"""What is to be planned: segments with a batch on a machine, and what they cost under any settings.

The invariant: a segment is traced once for each precision, way of recomputing and micro-batch, without data; all
else about settings is arithmetic.
"""

import os
from os import PathLike
from typing import Any

from attrs import evolve, field, frozen
from torch.utils._pytree import tree_leaves

from zfunc.core.hardware import Hardware
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.engine.compile import compile, with_moments
from zfunc.engine.program import Program, ProgramCache, split_batch, traced_spec
from zfunc.engine.segment import Segment
from zfunc.engine.step_spec import make_spec
from zfunc.optim.base import Optimizer
from zfunc.options import AUTO
from zfunc.planner.candidate import PlannedStep, simulate_choice
from zfunc.planner.profile import Profile
from zfunc.planner.profile_toml import load_profile
from zfunc.planner.search import SearchResult, search
from zfunc.planner.search_space import SearchSpace


def resolve_hardware(hardware: Any) -> Profile | Hardware:
    """What is named, or in a file of that path; a value as it is."""
    if isinstance(hardware, Profile | Hardware):
        return hardware
    if isinstance(hardware, str):
        return load_profile(hardware)
    if isinstance(hardware, PathLike):
        return load_profile(os.fspath(hardware))  # pyright: ignore
    raise TypeError(
        f"hardware: got a {type(hardware).__name__}, expected a name, a path, a Profile or a Hardware"
    )


def precision_for(on: Profile | Hardware, asked: str) -> str:
    """The one asked for; "auto" is bf16 where a profile has it, else fp16; fp32 where the device is the host."""
    if asked != AUTO:
        return asked
    if isinstance(on, Hardware):
        return "bf16"
    order = ("fp32", "bf16", "fp16") if on.unified else ("bf16", "fp16", "fp32")
    return next(p for p in order if p in on.precisions)


@frozen(eq=False)
class CostModel:
    """What is planned, whatever the settings. `costs` are traced once for each precision, way and micro-batch."""

    segments: tuple[Segment, ...]
    example: tuple[Any, Any]
    on: Profile | Hardware
    optimizer: Optimizer
    world: int = 1  # ranks
    costs: dict[tuple[Any, ...], StepSpec] = field(factory=dict[tuple[Any, ...], StepSpec])
    programs: dict[tuple[Any, ...], Program] = field(factory=dict[tuple[Any, ...], Program])

    @property
    def rows(self) -> int:
        """The size of a rank's batch."""
        return next((t.shape[0] for t in tree_leaves(self.example)), 1)

    def hardware(self, settings: StepSettings) -> Hardware:
        """What one rank gets."""
        return self.on if isinstance(self.on, Hardware) else self.on.hardware(settings.precision, self.world)

    def step(self, settings: StepSettings) -> PlannedStep:
        """The step of these settings. Raises ValueError for settings that cannot work."""
        return simulate_choice(self.spec(settings), settings, self.hardware(settings))

    def search(self, settings: StepSettings, space: SearchSpace) -> SearchResult:
        """The best settings from these on."""
        return search(self.spec(settings), self.hardware(settings), settings, space)

    def spec(self, settings: StepSettings) -> StepSpec:
        """The spec of these settings, with what its segments cost."""
        program = self._program(settings)  # which also checks the segments
        on_gpu = not self.hardware(settings).unified
        optimizer = with_moments(self.optimizer, settings.moments)
        spec = make_spec(program.segments, optimizer, settings, world=self.world, on_gpu=on_gpu)
        key = settings.precision, settings.micro_batches, *_way(settings)
        if key not in self.costs:
            like = evolve(program, settings=settings, spec=spec, cache=ProgramCache())
            self.costs[key] = traced_spec(like, split_batch(self.example, settings.micro_batches)[0])[0]
        traced = self.costs[key]
        return evolve(spec, costs=traced.costs, target_bytes=traced.target_bytes)

    def _program(self, settings: StepSettings) -> Program:
        """The segments compiled for one way of recomputing: what a trace of any batch begins with."""
        way = _way(settings)
        if way not in self.programs:
            recompute, compiled = way
            self.programs[way] = compile(
                self.segments, recompute=recompute, compile_segments=compiled, schedule="Serial", device="cpu"
            )
        return self.programs[way]


def _way(settings: StepSettings) -> tuple[Any, ...]:
    """What the passes of a segment depend on."""
    return settings.recompute, settings.compile_segments
