"""What the commands of the course share: what their user can do wrong is told in a line, with exit code 2."""

import sys
from collections.abc import Callable
from pathlib import Path

from zfunc.errors import DiskError, SettingError, refuse


def answer(program: str, run: Callable[[], int]) -> int:
    """The exit code that a command's function `run` returns; 2 where it raises SettingError or DiskError. What
    the terminal cannot show is printed as "?"."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # pyright: ignore
    try:
        return run()
    except (SettingError, DiskError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def check_adapters(path: Path) -> None:
    """Raise SettingError unless the adapters file `path` is a file."""
    if not path.is_file():
        refuse("--adapters", f"{path}, which is no file", "", "pass your copy of the lab's adapters.py")
