"""Lab 3: with a pencil. Copy this file, fill the functions, and grade it:

    python -m course.grade 3 --adapters PATH

A job has the fields

    layers       number of equal layers
    width        numbers a token between layers, n; a layer has 12 n^2 parameters
    tokens       tokens of a step
    clipping     whether gradients are clipped by their global norm
    state        where the optimizer's state is: "host" or "disk"

and a machine has FLOP/s and bytes a second:

    flops            of matrix products on the device
    memory           of the device's memory
    d2h, h2d         of the bus, to the host and to the device
    host             of the host's memory, as the update of the optimizer uses it
    read, write      of the drive, each alone; it does one or the other, or both at half the speed
"""


def device_bytes(job) -> float:
    """The most bytes that the device needs at once."""
    raise NotImplementedError


def host_bytes(job) -> float:
    """The most bytes of host memory that are needed at once, pinned and pageable together."""
    raise NotImplementedError


def moved_bytes(job) -> dict[str, float]:
    """The bytes that a step moves: "d2h", "h2d", "read" (from the drive) and "write", each 0 if there are none."""
    raise NotImplementedError


def seconds(job, machine) -> float:
    """The seconds of a step, with a lane for each kind of operation."""
    raise NotImplementedError
