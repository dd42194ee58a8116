"""The costs of a model under any settings: segments with a batch and an optimizer, on a machine.

The costs of the segments' passes are asked for once for each precision, kind of recomputation and micro-batch size;
all else that settings change is arithmetic. `traced_costs` traces any segments; `zfunc.models.gpt_costs` has those
of a GPT without torch.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from attrs import asdict, evolve, field, frozen

from zfunc.checkpoint.strict_json import Count, Text
from zfunc.core.dtypes import PRECISIONS
from zfunc.core.hardware import Hardware
from zfunc.core.layout import Parameter
from zfunc.core.settings import StepSettings
from zfunc.core.shares import words_of
from zfunc.core.spec import RowsOutput, SegmentCost, StepSpec
from zfunc.engine.program.step_spec import OptimizedParameters, make_spec, with_moments
from zfunc.engine.trace.pass_options import PassOptions, pass_options
from zfunc.optim.base import Optimizer
from zfunc.options import AUTO
from zfunc.planner.candidate import PlannedStep
from zfunc.planner.profile import Profile


def precision_for(machine: Profile | Hardware, precision: str) -> str:
    """`precision`, or if that is "auto": bf16 of a Hardware; of a Profile bf16, else fp16, and fp32 on a CPU."""
    if precision != AUTO:
        return precision
    if isinstance(machine, Hardware):
        return "bf16"
    order = PRECISIONS if machine.unified else ("bf16", "fp16", "fp32")
    return next(p for p in order if p in machine.precisions)


@frozen
class StepCosts:
    """The costs of a micro-batch by segment, the bytes of the micro-batch's targets, and its auxiliary outputs."""

    costs: tuple[SegmentCost, ...] = field(converter=tuple[SegmentCost, ...])
    target_bytes: Count
    aux: tuple[Text, ...] = ()
    aux_rows: tuple[RowsOutput, ...] = ()


# The costs in a step of a spec, for an accelerator or not, which has grouped kernels or not.
Tracer: TypeAlias = Callable[[StepSpec, bool, bool], StepCosts]


@frozen(eq=False)
class SegmentCosts:
    """What planning needs of a model: its segments' `parameters`, an optimizer, and one rank's batch of
    `rows` rows with `tokens` target elements. `trace` returns the costs of passes under settings.
    `resized(rows)` makes the SegmentCosts of another batch size (None: it cannot change). `tile_counts` are
    the numbers of tiles of a row that a search tries."""

    parameters: Sequence[Sequence[Parameter]]
    optimizer: Optimizer
    rows: int
    tokens: int
    trace: Tracer
    world: int = 1
    constant_bytes: int = 0
    buffer_bytes: Sequence[int] = ()
    tile_counts: Sequence[int] = (1,)
    resized: Callable[[int], "SegmentCosts"] | None = None
    _optimized: list[OptimizedParameters] = field(init=False, factory=list[OptimizedParameters])

    def untraced(self, settings: StepSettings, *, on_gpu: bool) -> StepSpec:
        """The StepSpec of the segments under `settings`, with costs of 0."""
        optimizer = with_moments(self.optimizer, settings)
        known = next((x for x in self._optimized if x.optimizer == optimizer), None)
        if known is None:
            known = OptimizedParameters(self.parameters, optimizer, self.world)
            self._optimized.append(known)
        return make_spec(
            self.parameters,
            optimizer,
            settings,
            world=self.world,
            on_gpu=on_gpu,
            constant_bytes=self.constant_bytes,
            buffer_bytes=self.buffer_bytes,
            optimized=known,
        )

    def traced(self, settings: StepSettings, *, on_gpu: bool, grouped: bool = True) -> StepSpec:
        """The StepSpec under `settings` with traced costs of a micro-batch, by grouped kernels if `grouped`."""
        spec = self.untraced(settings, on_gpu=on_gpu)
        return evolve(spec, **asdict(self.trace(spec, on_gpu, grouped), recurse=False))


@frozen(eq=False)
class CostModel:
    """A model, its batch and a machine, to plan with any settings. Caches traced costs and planned steps."""

    segments: SegmentCosts
    machine: Profile | Hardware
    _costs: dict[tuple[Any, ...], StepSpec] = field(factory=dict[tuple[Any, ...], StepSpec])
    _steps: dict[StepSettings, PlannedStep] = field(factory=dict[StepSettings, PlannedStep])

    def hardware(self, settings: StepSettings) -> Hardware:
        """One rank's share of the machine, as Hardware, for the precision and number of devices of `settings`."""
        if isinstance(self.machine, Hardware):
            return self.machine
        return self.machine.hardware(settings.precision, self.segments.world, settings.devices)

    def step(self, settings: StepSettings) -> PlannedStep:
        """The planned step of `settings`, cached. Raises ValueError for settings that cannot work together."""
        if settings not in self._steps:
            self._steps[settings] = PlannedStep(self.spec(settings), self.hardware(settings))
        return self._steps[settings]

    def spec(self, settings: StepSettings) -> StepSpec:
        """The StepSpec of `settings`, with the traced costs of each segment in its own mode of recomputation."""
        spec = self.segments.untraced(settings, on_gpu=not self.hardware(settings).unified)
        modes = words_of(settings.recompute)
        options = pass_options(spec)
        by_mode = {x: self._traced(settings, [evolve(own, recompute=x) for own in options]) for x in modes}
        count = spec.num_segments
        traced = [by_mode[settings.recompute_of(s, count)] for s in range(count)]
        return evolve(
            spec,
            costs=[x.costs[s] for s, x in enumerate(traced)],
            target_bytes=traced[0].target_bytes,
            aux=traced[0].aux,
            aux_rows=traced[0].aux_rows,
            commit=spec.swaps and settings.commit_every == 1,  # a step like most
            like=spec,
        )

    def _traced(self, settings: StepSettings, options: Sequence[PassOptions]) -> StepSpec:
        """The StepSpec with traced costs of passes under `options`, all of one mode of recomputation. Cached."""
        priced = (x.priced for x in options)
        key = settings.precision, settings.fp32_params, settings.micro_batches, *priced
        if key not in self._costs:
            settings = evolve(settings, recompute=options[0].recompute)
            on = self.hardware(settings)
            self._costs[key] = self.segments.traced(settings, on_gpu=not on.unified, grouped=on.grouped)
        return self._costs[key]
