"""The costs of any segments, traced without data as `zfunc.compile` traces them; and by them, before anything is
allocated, whether a step fits this machine: if not, the error says what would help, each change planned.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.setting_values import tile_counts
from zfunc.core.shares import two_tiers
from zfunc.core.spec import StepSpec
from zfunc.engine.compile import compile
from zfunc.engine.program.passes import segment_calls
from zfunc.engine.program.program import Program, kept_in
from zfunc.engine.program.traced_spec import largest_spec, row_tokens, traced_spec
from zfunc.engine.trace.batches import LABELS, Batch, split_batch, traced_kinds
from zfunc.engine.trace.model_segments import checked_segments
from zfunc.engine.trace.pass_options import PassOptions, pass_options
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.traced_values import ByValue
from zfunc.errors import Message, OutOfMemory
from zfunc.optim.base import Optimizer
from zfunc.planner.candidate import shortage_text
from zfunc.planner.cost_model import CostModel, SegmentCosts, StepCosts
from zfunc.planner.suggestions import suggest
from zfunc.runtime.accelerator import available_bytes, modelled, on_accelerator
from zfunc.runtime.memory_limits import available_host_bytes
from zfunc.runtime.thread_budget import local_ranks
from zfunc.units import format_bytes

LARGEST = 3  # buffers of a peak that an error names


def traced_costs(
    segments: Sequence[Segment], example: Batch, optimizer: Optimizer, world: int = 1
) -> SegmentCosts:
    """The SegmentCosts of `segments` with one rank's batch `example`, (inputs, targets), traced by shapes alone."""
    programs: dict[tuple[Any, ...], Program] = {}

    def program_of(options: tuple[PassOptions, ...], kernels: bool | None) -> Program:
        """The Program of the checked segments, with passes under `options`, for an accelerator with (True) or
        without grouped `kernels`, or the CPU (None). Programs of equal `kernels` share what is traced."""
        if (key := (kernels, options)) not in programs:
            known = (program for other, program in programs.items() if other[0] == kernels)
            base = next(known, None) or compile(segments, schedule="Serial", device="cpu")
            calls = segment_calls(base.segments, options, base.spec, base.cache.joints)
            programs[key] = evolve(base, calls=calls)
        return programs[key]

    def trace(spec: StepSpec, on_gpu: bool, grouped: bool) -> StepCosts:
        kernels = grouped if on_gpu else None
        with modelled(kernels):
            program = evolve(program_of(tuple(x.priced for x in pass_options(spec)), kernels), spec=spec)
            kinds, _ = traced_kinds(example, split_batch(example, spec.settings.micro_batches))
            found = largest_spec([traced_spec(program, x, of_accelerator=on_gpu)[0] for x in kinds.values()])
        return StepCosts(found.costs, found.target_bytes, found.aux, found.aux_rows)

    def resized(count: int) -> SegmentCosts:
        def longer(x: Any) -> Any:
            if isinstance(x, ByValue) and not x.whole:  # the same values again
                return evolve(x, tensor=x.tensor[torch.arange(count) % rows])
            batched = isinstance(x, Tensor) and x.dim() and x.shape[0] == rows
            return x.new_empty((count, *x.shape[1:]), device="meta") if batched else x

        return traced_costs(segments, tree_map(longer, example), optimizer, world)

    segments = checked_segments(segments)
    rows = next((t.shape[0] for t in tree_leaves(example) if isinstance(t, Tensor) and t.dim()), 1)
    return SegmentCosts(
        [s.parameters for s in segments],
        optimizer,
        rows=rows,
        tokens=sum(t.numel() for t in _targets(example)) or rows,
        trace=trace,
        world=world,
        constant_bytes=sum(s.constant_bytes for s in segments),
        buffer_bytes=[s.buffer_bytes for s in segments],
        tile_counts=tile_counts(row_tokens(example)),
        resized=resized,
    )


def _targets(example: Batch) -> list[Tensor]:
    """The target tensors of a batch (inputs, targets); of a cut module, those in the BatchCall it gets."""
    inputs, targets = example[:2]
    if targets is None and hasattr(inputs, "targets"):
        named = inputs.inputs if isinstance(inputs.inputs, Mapping) else {}
        targets = *inputs.targets, named.get(LABELS)
    found = (t.tensor if isinstance(t, ByValue) else t for t in tree_leaves(targets))
    return [t for t in found if isinstance(t, Tensor)]


def local_hardware(program: Program) -> Hardware:
    """One rank's share of this machine's free memory, as Hardware with placeholder rates, which do not matter."""
    ranks = min(local_ranks(), program.ranks.world)
    free = {"host": max(1, available_host_bytes() // ranks)}
    if not on_accelerator(program.device):
        return evolve(ROUND, name="this machine", memory=free, unified=True)
    device = max(1, available_bytes(program.device))
    return evolve(ROUND, name="this machine", memory={**free, "device": device})


def check_fits(program: Program, example: tuple[Any, Any], *, settable: Collection[str]) -> None:
    """Raise OutOfMemory unless a step of `program`, which was compiled for the batch `example`, fits this machine's
    free memory.

    `settable` are the names of the settings that the error may suggest to change.
    """
    hardware = local_hardware(program)
    if not hardware.lacking(program.plan.peak_bytes()):
        return
    costs = traced_costs(program.segments, example, program.optimizer, program.ranks.world)
    model, settings = CostModel(costs, hardware), evolve(program.settings, schedule=program.schedule)
    if settings.fits_state or program.spec.resident:
        settings = evolve(settings, state_on=two_tiers("device", 1 - program.spec.share_on_host, "host"))
    step = model.step(settings)
    peak = [*step.held[max(step.lacking, key=lambda tier: step.lacking[tier])].items()][:LARGEST]
    parts = ", ".join(f"{buffer} {format_bytes(nbytes)}" for buffer, nbytes in peak)
    effects = [
        f"{x.arguments.marked} would fit"
        if x.step.fits
        else f"with {x.arguments.marked} it would still be {shortage_text(x.step.lacking)}"
        for x in suggest(model.step, step, costs.rows, costs.tile_counts, settable=settable)
    ]
    kept = "".join(kept_in(program, tier) for tier in step.lacking)
    text = (
        f"a step needs more memory than is free: {shortage_text(step.lacking)}, most of what it needs being "
        f"{parts}; nothing was allocated{kept}. {'; '.join(effects) or 'no single change that was tried helps'}; "
        "or make the model smaller (`num_layers`, `hidden_size`)"
    )
    raise OutOfMemory(Message(text))
