"""The CUDA kernel of an update, without a GPU: its very text, compiled by g++ behind a header, over all threads.

So is the PTX that NVRTC makes of it, where that is installed: with a torch for CUDA, or by `make nightly`.
"""

import ctypes
import logging
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ptx_on_host
import pytest
import torch
from torch import Tensor
from update_law import ADAMS, ROWS, check, fresh, gradient, random_bytes

import zfunc
from benchmarks.handoffs import Dispatches
from zfunc.core.decision import StepDecision
from zfunc.optim import formats, rules_in_cuda
from zfunc.runtime import accelerator, nvrtc
from zfunc.runtime.accelerator import VENDORS, Vendor

SHIM = Path(__file__).with_name("on_host.h")
FLAGS = ("-x", "c++", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-w", "-shared", "-fPIC")
NVRTC = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"))


def of_text(source: str, name: str, options: Sequence[str]) -> str:
    """C++ with a function that runs a CUDA kernel: its text, in a loop over all threads."""
    assert "--fmad=false" in options
    (arguments,) = re.findall(rf"__global__ void {name}\(\s*(.*)\) {{", source)
    names = ", ".join(x.split()[-1].lstrip("*") for x in arguments.split(", "))
    loop = (
        f'extern "C" void run(unsigned grid, unsigned block, {arguments}) {{ blockDim.x = block;\n'
        "for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)\n"
        f"for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) {name}({names}); }}"
    )
    return f'#include "{SHIM}"\n{source}\n{loop}\n'


def of_ptx(source: str, name: str, options: Sequence[str]) -> str:
    """The same of what NVRTC makes of the text; it makes machine code for two GPUs, too."""
    library = ctypes.CDLL(str(NVRTC[-1]))
    for architecture in ("sm_80", "sm_90"):
        assert nvrtc.machine_code(library, source, architecture, options).startswith(b"\x7fELF")
    ptx = nvrtc.machine_code(library, source, "sm_90", options, "PTX").rstrip(bytes(1)).decode()
    return ptx_on_host.on_host(ptx, name)


def on_host(
    folder: Path, launched: list[int], of: Callable[[str, str, Sequence[str]], str]
) -> Callable[[str, str, Sequence[str]], Callable[..., None]]:
    """A compiler as torch's, which runs the C++ that `of` makes; `launched` gets the elements of each launch."""

    def compiled(source: str, name: str, options: Sequence[str]) -> Callable[..., None]:
        text, library = folder / f"{len([*folder.iterdir()])}.cu", folder / f"{len([*folder.iterdir()])}.so"
        text.write_text(of(source, name, options))
        subprocess.run(["g++", *FLAGS, str(text), "-o", str(library)], check=True)
        run = ctypes.CDLL(str(library)).run

        def kernel(*, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
            kinds = {int: ctypes.c_int, float: ctypes.c_double}
            run(
                *(ctypes.c_uint(x[0]) for x in (grid, block)),
                *(
                    ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else kinds[type(x)](x)
                    for x in args
                ),
            )
            launched.append(next(x for x in args if isinstance(x, int)))

        return kernel

    return compiled


NEEDS_NVRTC = pytest.mark.skipif(not NVRTC, reason="no NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.fixture(params=[of_text, pytest.param(of_ptx, marks=[pytest.mark.slow, NEEDS_NVRTC])])
def launched(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates in torch's operations are the kernel's instead; the elements of each launch."""
    launched = list[int]()
    compiler = on_host(tmp_path, launched, request.param)
    rules_in_cuda._compiled.cache_clear()
    monkeypatch.setitem(VENDORS, "cpu", Vendor(compile_kernel=lambda _: compiler))
    monkeypatch.setattr(rules_in_cuda, "LONGEST", 640)
    return launched


OFTEN = *ADAMS, "Adam, fp32", "Lion, 8bit"


@pytest.mark.parametrize("row", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in ROWS])
def test_the_kernel_has_the_bits_of_the_reference(row: str, launched: list[int]) -> None:
    """Of every rule, format and decay, for states of any bits, in launches of 640 elements."""
    optimizer = ROWS[row]
    for n, step in ((63, 1), (1000, 1 << 33)):
        state, grad = fresh(n, optimizer.state_format()), gradient(n, torch.bfloat16)
        state = check(optimizer, state, grad, step=step, out=torch.float16, isas=[0])
        wild = {name: x if x.dtype == torch.int16 else random_bytes(x, 3) for name, x in state.items()}
        check(optimizer, wild, random_bytes(grad, n), step=step, out=torch.float16, isas=[0])
    assert launched == [63, 63, *[640, 360] * 2]


@pytest.mark.parametrize(
    ("grad", "out"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float16, torch.float32)],
)
def test_in_every_dtype(grad: torch.dtype, out: torch.dtype | None, launched: list[int]) -> None:
    state = fresh(200, "fp32")
    check(ROWS["AdamW, fp32"], state, gradient(200, grad), out=out, isas=[0])
    check(ROWS["AdamW, fp32"], state, random_bytes(gradient(200, grad), 5), out=out, isas=[0])
    assert launched == [200, 200]


def test_muons_direction_has_no_weights(launched: list[int]) -> None:
    muon = zfunc.Muon(0.02, momentum=0.8, nesterov=True)
    decision = StepDecision(False, 0.5, 3, muon.factors(3))
    found = []
    for _ in range(2):
        state, out = (
            {"momentum_buffer": gradient(130, torch.float32, 2)},
            torch.zeros(130, dtype=torch.bfloat16),
        )
        step = muon.direction_step(decision)
        found.append((state["momentum_buffer"], out))
        if len(found) == 1:
            zfunc.optim.updates.device_update_(step, state, gradient(130, torch.float32), out=out)
        else:
            zfunc.optim.updates.host_update_(step, state, gradient(130, torch.float32), out=out)
    assert all(map(torch.equal, *found))
    assert launched == [130]


def test_where_it_does_not_compile_torch_makes_the_update(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> Any:
        raise RuntimeError("no NVRTC here")

    caplog.set_level(logging.INFO, rules_in_cuda.__name__)
    rules_in_cuda._compiled.cache_clear()
    monkeypatch.setitem(VENDORS, "cpu", Vendor(compile_kernel=lambda _: refuses))
    for n in (63, 130):
        check(ROWS["AdamW, fp32"], fresh(n, "fp32"), gradient(n, torch.float32), isas=[0])
    assert "".join(caplog.messages).count("Updates of adamw on cpu are torch operations: no NVRTC here") == 1


@pytest.mark.slow
@NEEDS_NVRTC
def test_no_toolkit_of_cuda_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    def loaded(code: bytes, names: list[str]) -> dict[str, bytes]:
        return dict.fromkeys(names, code)

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda._utils, "_get_nvrtc_library", lambda: ctypes.CDLL(str(NVRTC[-1])))
    monkeypatch.setattr(torch.cuda._utils, "_cuda_load_module", loaded)
    compiler = accelerator.compiler_of(torch.device("cuda", 0))
    assert compiler is not None
    found: Any = compiler('extern "C" __global__ void nothing() {}', "nothing", ["--fmad=false"])
    assert found.startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match='NVRTC refuses the source: .*"everything" is undefined'):
        compiler("__global__ void nothing() { everything; }", "nothing", [])


@pytest.mark.parametrize(
    ("row", "read", "most"), [("AdamW, fp32", 0, 38), ("AdamW, 16bit", 2, 84), ("AdamW, 8bit", 2, 188)]
)
def test_torchs_operations_make_no_dither_that_nobody_reads(
    row: str, read: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, grad, made = ROWS[row], gradient(128, torch.float32), list[int]()
    state, decision = fresh(128, optimizer.state_format()), StepDecision(False, 1.0, 1, optimizer.factors(1))

    def dither(step: int, moment: int, like: Tensor, make: Any = formats.dither) -> Tensor:
        made.append(moment)
        return make(step, moment, like)

    monkeypatch.setattr(formats, "dither", dither)
    with Dispatches() as seen:
        optimizer.device_update(state, grad, decision, group=0)
    assert len(made) == read
    assert seen.launched <= most
