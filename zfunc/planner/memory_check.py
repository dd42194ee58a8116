"""Refuses, before anything is allocated, a step that does not fit this machine; the error says what would help.

A step that fits is not traced again. For one that does not, each suggestion was planned for the free memory.
"""

from collections.abc import Collection
from typing import Any

from attrs import evolve

from zfunc.core.hardware import ROUND, Hardware
from zfunc.engine.compile.fit_to_memory import share_on_host
from zfunc.engine.compile.program import Program
from zfunc.engine.compile.specialize import specialize
from zfunc.errors import OutOfMemory
from zfunc.planner.candidate import shortage_text
from zfunc.planner.cost_model import CostModel
from zfunc.planner.suggestions import suggest
from zfunc.planner.traced_costs import traced_costs
from zfunc.runtime.accelerator import available_bytes, on_accelerator
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.thread_budget import local_ranks
from zfunc.units import format_bytes

LARGEST = 3  # buffers of a peak that an error names


def local_hardware(program: Program) -> Hardware:
    """One rank's share of this machine's free memory. Its speed does not matter: those figures are round ones."""
    ranks = min(local_ranks(), program.ranks.world)
    free = {"host": max(1, available_host_bytes() // ranks)}
    if not on_accelerator(program.device):
        return evolve(ROUND, name="this machine", memory=free, unified=True)
    device = max(1, available_bytes(program.device))
    return evolve(ROUND, name="this machine", memory={**free, "device": device})


def check_fits(program: Program, example: tuple[Any, Any], *, settable: Collection[str]) -> None:
    """Raise OutOfMemory unless a step of `program` on such a batch fits this machine.

    `settable` are the names of the settings that the error may suggest to change.
    """
    hardware, peaks = local_hardware(program), specialize(program, example).memory
    if not hardware.lacking({tier: peak.nbytes for tier, peak in peaks.items()}):
        return
    costs = traced_costs(program.segments, example, program.optimizer, program.ranks.world)
    model, ratio = CostModel(costs, hardware), share_on_host(program.spec) if program.spec.resident else 1.0
    step = model.step(evolve(program.settings, schedule=program.schedule, offload_ratio=ratio))
    peak = [*step.held[max(step.lacking, key=lambda tier: step.lacking[tier])].items()][:LARGEST]
    parts = ", ".join(f"{buffer} {format_bytes(nbytes)}" for buffer, nbytes in peak)
    effects = [
        f"{x.arguments} would fit"
        if x.step.fits
        else f"with {x.arguments} it would still be {shortage_text(x.step.lacking)}"
        for x in suggest(model.step, step, rows=costs.rows, settable=settable)
    ]
    raise OutOfMemory(
        f"a step needs more memory than is free: {shortage_text(step.lacking)}, most of what it needs being "
        f"{parts}; nothing was allocated. {'; '.join(effects) or 'no single change that was tried helps'}; or make "
        "the model smaller (num_layers, hidden_size)"
    )
