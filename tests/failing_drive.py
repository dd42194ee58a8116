"""`zfunc` whose drive fails: `torchrun failing_drive.py CALL ERRNO RANK NUMBER train ...`. Not a test of its own.

On that rank a call of `os` ends with an error from its NUMBER on: "pwritev 5 1 40" is a drive of rank 1 that writes
39 times, and then has errors.
"""

import os
import sys
from itertools import count
from typing import Any

from zfunc.cli.main import main

if __name__ == "__main__":
    name, error, rank, number = sys.argv[1], *map(int, sys.argv[2:5])
    right, calls = getattr(os, name), count(1)

    def call(*of: Any) -> Any:
        if next(calls) >= number:
            raise OSError(error, os.strerror(error))
        return right(*of)

    if os.environ["RANK"] == str(rank):
        setattr(os, name, call)
    sys.exit(main(sys.argv[5:]))
