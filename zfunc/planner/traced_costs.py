"""The costs of any segments, traced without data as `zfunc.compile` traces them."""

from typing import Any

from attrs import evolve, field, frozen
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.engine.compile.compile import compile
from zfunc.engine.compile.passes import segment_calls
from zfunc.engine.compile.program import Program
from zfunc.engine.compile.segment import Segment
from zfunc.engine.compile.specialize import traced_spec
from zfunc.engine.compile.step_spec import make_spec, passes_key, with_moments
from zfunc.engine.step.batches import Batch, split_batch
from zfunc.optim.base import Optimizer
from zfunc.runtime.accelerator import modelled


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
        return make_spec(
            [s.parameters for s in self.segments],
            optimizer,
            settings,
            world=self.world,
            on_gpu=on_gpu,
            constant_bytes=sum(s.constant_bytes for s in self.segments),
            buffer_bytes=[s.buffer_bytes for s in self.segments],
        )

    def traced(self, settings: StepSettings, *, on_gpu: bool, grouped: bool = True) -> StepSpec:
        """The same with the costs of a micro-batch, traced for an accelerator if there is one."""
        kernels = grouped if on_gpu else None
        with modelled(kernels):
            program = self._program(settings, kernels)
            program = evolve(program, spec=self.untraced(settings, on_gpu=on_gpu))
            micro = split_batch(self.example, settings.micro_batches)[0]
            return traced_spec(program, micro, of_accelerator=on_gpu)[0]

    def _program(self, settings: StepSettings, kernels: bool | None) -> Program:
        """The segments, checked, with the passes for what of the settings these depend on. All for the same kernels
        share what is traced, however they recompute."""
        recompute, compiled, moving = passes_key(settings)
        key = kernels, recompute, compiled, moving
        if key not in self._programs:
            known = (program for other, program in self._programs.items() if other[0] == kernels)
            base = next(known, None) or compile(self.segments, schedule="Serial", device="cpu")
            passes = StepSettings(
                recompute=recompute,
                compile_segments=compiled,
                activations_on="host" if moving else "device",
            )
            calls = segment_calls(self.segments, base.layout, passes, base.device, base.cache.joints)
            self._programs[key] = evolve(base, calls=calls)
        return self._programs[key]
