"""A drive reads and writes at once at full speed, and has both moments but not the master weights. Backward takes
twice forward's time, though it computes forward again.

Breaks: host_memory, traffic, seconds_with_clipping, seconds_with_a_drive
"""

import passes
from passes import device_bytes, parameters, pipeline  # noqa: F401


def host_bytes(job):
    master = 4 * parameters(job) * (job.layers - 3) if job.state == "disk" else 0
    return passes.host_bytes(job) + master


def moved_bytes(job):
    moved = passes.moved_bytes(job)
    return moved | {kind: moved[kind] * 2 / 3 for kind in ("read", "write")}


def seconds(job, machine):
    n, p = job.layers, parameters(job)
    if not job.clipping:
        return passes.seconds(job, machine)
    before = n * 6 * p * job.tokens / machine.flops
    stages = 28 * p / machine.host, 2 * p / machine.h2d
    drive = (8 * p / machine.read, 8 * p / machine.write) if job.state == "disk" else ()
    return before + pipeline(n, *stages, *drive)
