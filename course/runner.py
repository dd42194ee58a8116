"""Judges a student's functions by the laws of a lab, in a process of its own: what they do to it is theirs.

`python -m course.runner LAB ADAPTERS FIRST FOUND` judges from law number FIRST on, and appends a line of JSON to
the file FOUND when a law begins and when it has ended. The seed is a line of stdin.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from course.lab import Lab, load_lab, load_student
from course.law import Broken, Kept, Law, Picture, Student, raised

MEMORY = 8 << 30  # bytes of addresses that it may use, where the system can limit them


def main() -> None:
    """Judge the laws of the command line's lab, then exit without waiting for threads of the student."""
    number, adapters, first, found = sys.argv[1:]
    seed = sys.stdin.readline().strip()
    with Path(found).open("a", encoding="utf-8") as lines:

        def tell(**what: Any) -> None:
            print(json.dumps(what), file=lines, flush=True)

        lab = load_lab(int(number))
        tell(starts=lab.number)  # from here on it is the student's time
        limit_memory()
        student = importing(Path(adapters), lab)
        if isinstance(student, str):
            tell(imported=student)
        else:
            for law in lab.laws[int(first) :]:
                tell(begins=law.name)
                tell(ended=law.name, **judge(law, student, f"{seed} {law.name}"))
    with suppress(ValueError, OSError):  # a student may have closed it
        sys.stdout.flush()
    os._exit(0)


def limit_memory() -> None:
    """Limit this process's memory, so that an allocation beyond MEMORY raises MemoryError."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))


def importing(path: Path, lab: Lab) -> Student | str:
    """Import a student's adapters file; returns its functions, or text on why it cannot be imported."""
    try:
        return load_student(path, lab)
    except BaseException as error:
        return f"{path.name} cannot be imported: {raised(error, path)}"


def judge(law: Law, student: Student, seed: str) -> dict[str, Any]:
    """Check a law; returns for JSON the message and picture of a broken law, or a holding law's measure."""
    try:
        found = law.check(student, Random(seed))
    except Broken as broken:
        return {"message": broken.message, **drawn(broken.picture)}
    except BaseException as error:  # of a value that no check of the law expected
        what = f"{type(error).__name__}: {error}"[:500]
        return {
            "message": f"the law cannot use what your functions returned ({what}): compare its type with the "
            "docstring in the lab's adapters.py; if it is right, tell your instructor"
        }
    if not isinstance(found, Kept):
        return {}
    return {"measure": found.measure, "unit": found.unit, **drawn(found.picture)}


def drawn(picture: Picture | None) -> dict[str, str]:
    """A picture as text for JSON, its terminal text and its SVG; {} for None."""
    return {"text": picture.text, "svg": picture.svg} if picture else {}


if __name__ == "__main__":
    main()
