"""The costs of any segments, traced without data as `zfunc.compile` traces them."""

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.engine.compile.compile import compile
from zfunc.engine.compile.passes import segment_calls
from zfunc.engine.compile.program import Program
from zfunc.engine.compile.segment import Segment
from zfunc.engine.compile.segments import checked_segments
from zfunc.engine.compile.specialize import traced_spec
from zfunc.engine.compile.step_spec import passes_key
from zfunc.engine.step.batches import Batch, split_batch
from zfunc.optim.base import Optimizer
from zfunc.planner.cost_model import SegmentCosts, StepCosts
from zfunc.runtime.accelerator import modelled


def traced_costs(
    segments: Sequence[Segment], example: Batch, optimizer: Optimizer, world: int = 1
) -> SegmentCosts:
    """Of segments and one rank's batch `(inputs, targets)`, of which only shapes count."""
    programs: dict[tuple[Any, ...], Program] = {}

    def program_of(settings: StepSettings, kernels: bool | None) -> Program:
        """The segments, checked, with the passes for what of the settings these depend on. All for the same kernels
        share what is traced, however they recompute."""
        recompute, compiled, moving = passes_key(settings)
        if (key := (kernels, recompute, compiled, moving)) not in programs:
            known = (program for other, program in programs.items() if other[0] == kernels)
            base = next(known, None) or compile(segments, schedule="Serial", device="cpu")
            passes = StepSettings(
                recompute=recompute,
                compile_segments=compiled,
                activations_on="host" if moving else "device",
            )
            calls = segment_calls(base.segments, base.layout, passes, base.device, base.cache.joints)
            programs[key] = evolve(base, calls=calls)
        return programs[key]

    def trace(settings: StepSettings, spec: StepSpec, on_gpu: bool, grouped: bool) -> StepCosts:
        kernels = grouped if on_gpu else None
        with modelled(kernels):
            program = evolve(program_of(settings, kernels), spec=spec)
            micro = split_batch(example, settings.micro_batches)[0]
            found = traced_spec(program, micro, of_accelerator=on_gpu)[0]
        return StepCosts(found.costs, found.target_bytes, found.aux)

    segments = checked_segments(segments)
    tensors, targets = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in (example, example[1]))
    return SegmentCosts(
        [s.parameters for s in segments],
        optimizer,
        rows=next((t.shape[0] for t in tensors if t.dim()), 1),
        tokens=sum(t.numel() for t in targets),
        trace=trace,
        world=world,
        constant_bytes=sum(s.constant_bytes for s in segments),
        buffer_bytes=[s.buffer_bytes for s in segments],
    )
