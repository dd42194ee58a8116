"""The seconds of all operations are added up, as if lanes did not run side by side; of activations, only those of
one layer are counted.

Breaks: device_memory, seconds_with_clipping, seconds_without_clipping, seconds_with_a_drive
"""

from passes import host_bytes, moved_bytes, parameters  # noqa: F401


def device_bytes(job):
    p = parameters(job)
    return 2 * p * (job.layers + 3) + 2 * 2 * job.tokens * job.width


def seconds(job, machine):
    n, p = job.layers, parameters(job)
    compute = 8 * p * job.tokens / machine.flops
    copies = 2 * p / machine.d2h + 2 * p / machine.h2d
    drive = 12 * p / machine.read + 12 * p / machine.write if job.state == "disk" else 0
    return n * (compute + copies + 28 * p / machine.host + drive)
