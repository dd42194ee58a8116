"""The compiled kernel, loaded so that it shares torch's OpenMP runtime.

The invariant: whoever imports `cpu_adam` has a kernel that works, or an ImportError that says what to do.
"""

import ctypes
import importlib
from types import ModuleType
from typing import Any

import torch as _torch  # noqa: F401  its OpenMP runtime has to be there before the kernel


def _load() -> ModuleType:
    """Import the extension; its OpenMP symbols come from the runtime torch has loaded."""
    try:
        return importlib.import_module("zfunc._cpu_adam")
    except ImportError as first:
        try:
            # By soname: torch's own libgomp, made visible, where there is one; the system's elsewhere.
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
            return importlib.import_module("zfunc._cpu_adam")
        except (ImportError, OSError) as error:
            raise ImportError(
                f"zfunc's host kernel did not load: {first}. If the module is missing, build it: "
                "pip install -e . --no-build-isolation. If an omp_, GOMP_ or __kmpc_ symbol is missing, it was "
                "compiled for another OpenMP runtime than torch's: build with CC=gcc, or install libgomp"
            ) from error


cpu_adam: Any = _load()
