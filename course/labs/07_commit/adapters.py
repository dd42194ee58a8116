"""Lab 7: a commit that survives 1,000 power cuts. Copy this file, fill the functions, and grade it:

    python -m course.grade 7 --adapters PATH

A state is a dict of its parts: their bytes by name, such as {"weights": b"...", "step": b"7"}. The drive has

    create(name), write(name, offset, data), read(name), rename(old, new), delete(name), names()
    sync(name)      waits until the bytes of a file are lasting
    sync_names()    waits until the names are: files that were created, renamed or deleted

and nothing else. Nothing but the drive lasts: after a power cut a new process calls `recover`. So keep nothing in
global variables.
"""

from course.forgetful import Drive


def commit(drive: Drive, state: dict[str, bytes]) -> None:
    """Store `state` in place of the one before. Once this has returned, no power cut takes it away."""
    raise NotImplementedError


def recover(drive: Drive) -> dict[str, bytes] | None:
    """The last committed state; None if there is none. After a cut in a commit: the one before or the new."""
    raise NotImplementedError
