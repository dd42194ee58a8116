"""What is to be planned: segments with a batch on a machine, and what they cost under any setup.

The invariant: a segment is traced once for each precision, way of recomputing and micro-batch, without data; all
else about a setup is arithmetic.
"""

import os
from os import PathLike
from typing import Any

from attrs import evolve, field, frozen
from torch.utils._pytree import tree_leaves

from zfunc.core.hardware import Hardware
from zfunc.core.ops import StepSpec
from zfunc.engine.compile import compile
from zfunc.engine.jobs import make_spec
from zfunc.engine.program import Program, ProgramCache, split_batch, with_costs
from zfunc.engine.segment import Segment
from zfunc.optim.adamw import AdamW
from zfunc.options import AUTO
from zfunc.planner.candidate import PlannedStep, Setup, play_through
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
    costs: dict[tuple[str, str, int], StepSpec] = field(factory=dict[tuple[str, str, int], StepSpec])
    programs: dict[str, Program] = field(factory=dict[str, Program])

    @property
    def rows(self) -> int:
        """The size of a rank's batch."""
        return next((t.shape[0] for t in tree_leaves(self.example)), 1)

    def hardware(self, setup: Setup) -> Hardware:
        """What one rank gets."""
        if isinstance(self.on, Hardware):
            return self.on
        return self.on.hardware(setup.precision, setup.world)

    def step(self, setup: Setup) -> PlannedStep:
        """The step of these settings. Raises ValueError for settings that cannot work."""
        return play_through(self.job(setup), setup.choice, self.hardware(setup))

    def search(self, setup: Setup, space: SearchSpace) -> SearchResult:
        """The best choice from that of the setup on."""
        return search(self.job(setup), self.hardware(setup), setup.choice, space)

    def job(self, setup: Setup) -> StepSpec:
        """The job of these settings, with what its segments cost."""
        program = self._program(setup.recompute)  # which also checks the segments
        choice = setup.choice
        settings: Any = {"precision": setup.precision, "recompute": setup.recompute}
        job = make_spec(
            program.segments,
            AdamW(moments=setup.moments),
            **settings,
            clip_norm=setup.clip_norm,
            micro_batches=setup.micro_batches,
            bucket_size=choice.bucket_size,
            stage=setup.stage,
            world=setup.world,
            grad_slots=choice.grad_slots,
            host_slots=choice.host_slots,
            offload_ratio=choice.offload_ratio,
            speculate=choice.speculate,
            delay_from=1 if choice.delay else None,
            on_gpu=not self.hardware(setup).unified,
        )
        key = setup.precision, setup.recompute, setup.micro_batches
        if key not in self.costs:
            given: Any = {"precision": setup.precision, "micro_batches": setup.micro_batches}
            like = evolve(program, job=job, cache=ProgramCache(), **given)
            self.costs[key] = with_costs(like, split_batch(self.example, setup.micro_batches)[0])[0]
        traced = self.costs[key]
        return evolve(job, costs=traced.costs, target_bytes=traced.target_bytes)

    def _program(self, recompute: str) -> Program:
        """The segments compiled for one way of recomputing: what a trace of any batch begins with."""
        if recompute not in self.programs:
            way: Any = recompute
            made = compile(self.segments, recompute=way, schedule="Serial", device="cpu")
            self.programs[recompute] = made
        return self.programs[recompute]
