"""Lab 8: pipelines. Copy this file, fill the functions, and grade it:

    python -m course.grade 8 --adapters PATH

A pass is a tuple `(way, micro-batch, stage)`: "F" forward, "B" backward, or its halves "I", the gradient of the
input, and "W", that of the weights. An order is a list for each device of its passes, in the order in which it
makes them. Stage s is on device s.
"""


def times(order, seconds) -> dict:
    """When each pass begins and ends, as early as can be: a dict of pairs by pass.

    A pass begins once the one before it on its device has ended, and all whose results it needs. `seconds` says how
    long a pass takes, by its way. No order that you get has a deadlock.

    >>> times([[("F", 0, 0), ("B", 0, 0)]], {"F": 1.0, "B": 2.0})
    {('F', 0, 0): (0.0, 1.0), ('B', 0, 0): (1.0, 3.0)}
    """
    raise NotImplementedError


def cycle(order) -> list:
    """Passes of which each waits for the next one, and the last for the first; an empty list if all can run.

    >>> cycle([[("B", 0, 0), ("F", 0, 0)]])
    [('B', 0, 0), ('F', 0, 0)]
    """
    raise NotImplementedError


def one_f_one_b(devices: int, micro_batches: int) -> list:
    """1F1B: passes "F" and "B"; device d is devices - 1 - d forwards ahead."""
    raise NotImplementedError


def split(devices: int, micro_batches: int) -> list:
    """An order of "F", "I" and "W" in which four devices idle for less than 12 %, with the memory of 1F1B."""
    raise NotImplementedError
