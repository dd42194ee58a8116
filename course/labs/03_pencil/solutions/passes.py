"""Lab 3, solved."""


def parameters(job):
    return 12 * job.width**2


def device_bytes(job):
    p = parameters(job)
    weights = 2 * p * job.layers
    activations = 2 * job.tokens * job.width * job.layers  # the input of each layer
    slots = 2 * 2 * p  # two gradients on their way to the host
    running = 2 * p + 2 * job.tokens * job.width  # the gradients of one layer: of weights and of its input
    return weights + activations + slots + running


def host_bytes(job):
    p = parameters(job)
    state = 12 * p * (job.layers if job.state == "host" else 3)  # three buckets of a drive's are in memory
    gradients = 2 * p * (job.layers if job.clipping else 2)
    return state + gradients + 2 * 2 * p


def moved_bytes(job):
    p = parameters(job) * job.layers
    disk = 12 * p if job.state == "disk" else 0
    return {"d2h": 2 * p, "h2d": 2 * p + 2 * job.tokens * job.width, "read": disk, "write": disk}


def seconds(job, machine):
    n, p = job.layers, parameters(job)
    forward = n * 2 * p * job.tokens / machine.flops
    backward = 6 * p * job.tokens / machine.flops + 6 * p / machine.memory
    down, update, up = 2 * p / machine.d2h, 28 * p / machine.host, 2 * p / machine.h2d
    if not job.clipping:
        return forward + pipeline(n, backward, down, update, up)
    until_the_norm = forward + pipeline(n, backward, down)
    if job.state == "host":
        return until_the_norm + pipeline(n, update, up)
    drive = 12 * p / machine.read + 12 * p / machine.write
    ahead = min(until_the_norm, 3 * 12 * p / machine.read)  # three buckets are read before the norm is known
    return until_the_norm - ahead + pipeline(n, update, up, drive)


def pipeline(n, *stages):
    """Seconds in which `n` items pass through `stages`, each so many seconds long, one item at a time."""
    return sum(stages) + (n - 1) * max(stages)
