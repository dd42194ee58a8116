"""The costs of any segments, traced without data as `zfunc.compile` traces them."""

from typing import Any

from attrs import evolve, field, frozen
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.engine.batches import Batch, split_batch
from zfunc.engine.compile import compile, spec_of
from zfunc.engine.program import Program, ProgramCache
from zfunc.engine.segment import Segment
from zfunc.engine.specialize import traced_spec
from zfunc.engine.step_spec import with_moments
from zfunc.optim.base import Optimizer
from zfunc.planner.cost_model import passes_key


@frozen(eq=False)
class TracedCosts:
    """Segments and one rank's batch `(inputs, targets)`, of which only shapes count."""

    segments: tuple[Segment, ...]
    example: Batch
    optimizer: Optimizer
    world: int = 1
    _programs: dict[tuple[Any, ...], Program] = field(factory=dict[tuple[Any, ...], Program])

    @property
    def rows(self) -> int:
        """The size of a rank's batch."""
        return next((t.shape[0] for t in tree_leaves(self.example) if isinstance(t, Tensor) and t.dim()), 1)

    @property
    def tokens(self) -> int:
        """The elements of its targets."""
        return sum(t.numel() for t in tree_leaves(self.example[1]) if isinstance(t, Tensor))

    def untraced(self, settings: StepSettings, *, on_gpu: bool) -> StepSpec:
        """The spec of these settings, with costs of 0."""
        optimizer = with_moments(self.optimizer, settings)
        return spec_of(self.segments, optimizer, settings, world=self.world, on_gpu=on_gpu)

    def traced(self, settings: StepSettings, *, on_gpu: bool) -> StepSpec:
        """The same with the costs of a micro-batch, traced for an accelerator if there is one."""
        program, spec = self._program(settings), self.untraced(settings, on_gpu=on_gpu)
        to_trace = evolve(program, settings=settings, spec=spec, cache=ProgramCache())
        micro = split_batch(self.example, settings.micro_batches)[0]
        return traced_spec(to_trace, micro, of_accelerator=on_gpu)[0]

    def _program(self, settings: StepSettings) -> Program:
        """The segments, checked, and compiled with the settings that their forward and backward depend on."""
        recompute, compiled, graphs, moving = key = passes_key(settings)
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
