"""What a step asks of the drives: bytes by direction, the rates that would hide them, space and wear.

A step that commits also writes what memory has of the state, so where only some do, both kinds are counted.
"""

from collections.abc import Mapping

from attrs import evolve, frozen

from zfunc.core.graph import Graph, Kind
from zfunc.planner.candidate import PlannedStep, operations_of

DRIVES: tuple[Kind, ...] = ("read", "write")


@frozen
class DiskTraffic:
    """What one rank's step moves between memory and its share of the drives.

    - `step_bytes`, `commit_bytes`: bytes of a step by direction, "read" and "write": of the planned one, which
      commits if all do, and of one that commits.
    - `needed`, `available`: bytes a second by direction: what hides the planned step's transfers behind the
      busiest other kind of work, and what the hardware has. Directions share the drives, so a step whose `busy`,
      the sum of needed over available, is above 1 waits for them.
    - `space`: bytes of two generations of the state, of frozen parameters, and of gradients and activations that
      wait.
    - `written`: bytes a step on average. `steps`: until the rated endurance is used up; None where it is not known.
    - `drive_writes`: how often an average step writes all of the disk's bytes; None where these are not known.
    """

    step_bytes: Mapping[Kind, int]
    commit_bytes: Mapping[Kind, int]
    commit_every: int
    needed: Mapping[Kind, float]
    available: Mapping[Kind, float]
    space: int
    written: float
    steps: int | None
    drive_writes: float | None

    @property
    def busy(self) -> float:
        """Seconds of the drives in one of the busiest other kind of work."""
        return sum(self.needed[kind] / self.available[kind] for kind in DRIVES)


def disk_traffic(step: PlannedStep, endurance: float | None) -> DiskTraffic | None:
    """The traffic of `step`, whose share of the drives may write `endurance` bytes; None where it uses none."""
    if not step.spec.uses_disk:
        return None

    def bytes_of(graph: Graph) -> dict[Kind, int]:
        return {kind: sum(op.nbytes for op in graph if op.kind == kind) for kind in DRIVES}

    planned = bytes_of(step.graph)
    commits = bytes_of(operations_of(evolve(step.spec, commit=step.spec.swaps)))
    busiest = max(seconds for kind, seconds in step.work.items() if kind not in DRIVES)
    every = step.settings.commit_every
    written = planned["write"] + (commits["write"] - planned["write"]) / every
    capacity = step.hardware.memory.get("disk")
    return DiskTraffic(
        planned,
        commits,
        every,
        {kind: planned[kind] / busiest for kind in DRIVES},
        {kind: step.hardware.rates[kind] for kind in DRIVES},
        step.memory["disk"],
        written,
        None if endurance is None else int(endurance / written),
        written / capacity if capacity else None,
    )
