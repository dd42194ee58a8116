"""Is there room on this machine for a program's step? Asked before anything is allocated; if not, what would help.

The invariant: nothing is traced again where there is room; where there is none, what is advised was planned for the
memory that is free here.
"""

from collections.abc import Collection
from typing import Any

from attrs import evolve

from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.memory_model import peak_breakdown
from zfunc.core.settings import StepSettings
from zfunc.engine.offload_ratio import share_on_host
from zfunc.engine.program import Program, specialize
from zfunc.errors import OutOfMemory
from zfunc.planner.candidate import shortage_text
from zfunc.planner.cost_model import CostModel
from zfunc.planner.suggestions import Suggestion, suggest
from zfunc.runtime.accelerator import available_bytes
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.thread_budget import local_ranks
from zfunc.units import format_bytes

LARGEST = 3  # buffers of a peak that are named


def local_hardware(program: Program) -> Hardware:
    """This machine's free memory, as one rank may take it. Its speed is not asked: the figures are round ones."""
    ranks = min(local_ranks(), program.ranks.world)
    room = {"host": max(1, available_host_bytes() // ranks)}
    if program.device.type == "cpu":
        return evolve(ROUND, name="this machine", memory=room, unified=True)
    device = max(1, available_bytes(program.device))
    return evolve(ROUND, name="this machine", memory={**room, "device": device})


def check_fits(program: Program, example: tuple[Any, Any], *, settable: Collection[str]) -> None:
    """Raise OutOfMemory unless there is room for a step of `program` on such a batch.

    `settable` are the names of what may be advised to change.
    """
    on, peaks = local_hardware(program), specialize(program, example).memory
    if on.lacking({tier: peak.nbytes for tier, peak in peaks.items()}):
        task = CostModel(program.segments, example, on, program.optimizer, program.ranks.world)
        raise OutOfMemory(_no_room(task, _settings(program), settable))


def _settings(program: Program) -> StepSettings:
    """What a program was compiled with; of its state on the host, what that came to."""
    ratio = share_on_host(program.spec) if program.spec.resident else 1.0
    return evolve(program.settings, schedule=program.schedule, offload_ratio=ratio)


def _no_room(task: CostModel, settings: StepSettings, settable: Collection[str]) -> str:
    """What a step lacks, and what would help: each change planned."""
    made = task.step(settings)
    tier = max(made.lacking, key=lambda name: made.lacking[name])
    parts = [f"{name} {format_bytes(n)}" for name, n in [*peak_breakdown(made.plan)[tier].items()][:LARGEST]]
    advice = suggest(settings, made, rows=task.rows, replan=task.step, settable=settable)
    would = "; ".join(map(_would, advice)) or "no single change that was tried helps"
    return (
        f"a step needs more memory than is free: {shortage_text(made.lacking)}, most of what it needs being "
        f"{', '.join(parts)}; nothing was allocated. {would}; or make the model smaller (--num-layers, "
        "--hidden-size)"
    )


def _would(advice: Suggestion) -> str:
    if advice.step.fits:
        return f"{advice.flags} would fit"
    return f"with {advice.flags} it would still be {shortage_text(advice.step.lacking)}"
