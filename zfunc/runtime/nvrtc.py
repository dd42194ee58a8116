"""Machine code of CUDA source by NVRTC, a compiler that comes with torch and asks for no GPU.

`torch.cuda._compile_kernel` calls it too, but only where a toolkit of CUDA is installed, whose headers nothing here
includes; and in torch 2.9 it writes `extern "C"` before the first line, whatever that is.
"""

import ctypes
from collections.abc import Sequence
from typing import Literal


def machine_code(
    nvrtc: ctypes.CDLL,
    source: str,
    architecture: str,
    options: Sequence[str] = (),
    form: Literal["CUBIN", "PTX"] = "CUBIN",
) -> bytes:
    """`source`, CUDA that includes nothing, compiled by the library `nvrtc` for `architecture`, such as "sm_90".

    Returns machine code (CUBIN) or text (PTX). Raises RuntimeError with the compiler's messages.
    """
    program = ctypes.c_void_p()

    def result(kind: str) -> bytes:
        size = ctypes.c_size_t()
        nvrtc[f"nvrtcGet{kind}Size"](program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        nvrtc[f"nvrtcGet{kind}"](program, found)
        return found.raw

    flags = [x.encode() for x in (f"--gpu-architecture={architecture}", *options)]
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)):
            raise RuntimeError(f"NVRTC refuses the source: {result('ProgramLog').rstrip(bytes(1)).decode()}")
        return result(form)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
