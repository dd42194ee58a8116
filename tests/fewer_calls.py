"""A module as a command on a system that lacks what Linux has: `python fewer_calls.py MODULE ARGUMENTS`. No test.

Calls, constants and modules that macOS or Windows lack are gone before MODULE runs, and so are the files that the
kernel of Linux makes under /proc and /sys. What commands that train import (torch, psutil) has found its own
beforehand: these libraries have versions for each system.
"""

import importlib
import mmap
import os
import pathlib
import runpy
import shutil
import signal
import sys
from types import ModuleType
from typing import Any

MISSING: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("preadv", "pwritev", "pread", "pwrite", "posix_fallocate", "posix_fadvise", "fdatasync"),
        *("sched_getaffinity", "sched_setaffinity", "getuid", "fork", "register_at_fork", "mkfifo"),
        *("O_DIRECT", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"),
    ),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE", "MADV_DONTFORK"),
    signal: ("SIGHUP",),
}
MODULES = ("fcntl", "resource", "pwd", "grp", "termios")


def take_away() -> None:
    """Take away what this process lacks from now on."""
    for module, names in MISSING.items():
        for name in names:
            delattr(module, name)
    sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type]
    os.supports_dir_fd.clear()  # as on Windows
    importlib.reload(shutil)  # which chose its calls at import
    right = pathlib.Path.open

    def missing(path: pathlib.Path, *of: Any, **more: Any) -> Any:
        if path.as_posix().startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(path)
        return right(path, *of, **more)

    pathlib.Path.open = missing  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if "train" in sys.argv:
        import psutil  # noqa: F401
        import torch._dynamo
        import torch.distributed  # noqa: F401
    take_away()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
