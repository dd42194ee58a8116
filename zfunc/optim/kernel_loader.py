"""Loads the compiled kernel `zfunc._cpu_adam`, which shares torch's OpenMP runtime; ImportError if that fails."""

import ctypes
import importlib
from types import ModuleType
from typing import Any

import torch  # its OpenMP runtime has to be loaded before the kernel

from zfunc.core.dtypes import PRECISIONS
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


def _load() -> ModuleType:
    """Import the extension `zfunc._cpu_adam`, with OpenMP symbols from the runtime that torch has loaded."""
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
KERNEL_DTYPES: dict[torch.dtype, int] = {TORCH_DTYPES[x]: getattr(cpu_adam, x.upper()) for x in PRECISIONS}
"""The dtypes of gradients and of copies of the weights, and the kernel's constants for them."""
