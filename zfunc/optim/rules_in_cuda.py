"""One CUDA kernel for an update on a device, printed from the optimizer's rule, and compiled by NVRTC.

A thread has one element, or a block of 64 where elements share a scale. The rule's arithmetic is printed as for the
host (`rules_in_c`), with `__fdiv_rn` and `__fsqrt_rn`, and compiled with `--fmad=false`; the formats are the C of
the host (`csrc/_number_formats.h`). So the bits are those of the host and of torch's operations, and each buffer is
passed once.

Where a device type has no such compiler (`Vendor.compile_kernel`), or it refuses, the update is a sequence of torch
operations; one line of the log says why.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from torch import Tensor
from torch import device as Device

from zfunc.core.layout import ALIGNMENT
from zfunc.core.optimizer_state import state_slice
from zfunc.optim.formats import kernel_layout
from zfunc.optim.kernel_loader import KERNEL_DTYPES
from zfunc.optim.rules import Factors, Rule, RuleStep, first_dither
from zfunc.optim.rules_in_c import RULES_H, header
from zfunc.runtime.accelerator import compiler_of

# A compiler may not contract, approximate or flush; nor warn of the formats' functions that a rule leaves out.
OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--disable-warnings")
THREADS = 256  # of a block
LONGEST = 1 << 30  # elements of a launch, whose arguments are 32-bit
TYPES = ("", "float", "uint16_t", "uint16_t")  # by the kernel's number of a dtype
FROM = (
    "",
    "((const float *){0})[at + i]",
    *(f"zf_from_{x}(((const uint16_t *){{0}})[at + i])" for x in ("bf16", "fp16")),
)
TO = "", "{0}", "zf_to_bf16({0})", "zf_to_fp16({0})"
HEAD = """\
#undef __x86_64__
#undef __aarch64__
typedef signed char int8_t; typedef short int16_t; typedef int int32_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
#ifndef NAN
#define NAN __uint_as_float(0x7fc00000u)
#define INFINITY __uint_as_float(0x7f800000u)
#endif
enum { ZF_NO_DECAY = 0, ZF_DECOUPLED = 1, ZF_L2 = 2 };
"""
log = logging.getLogger(__name__)


class Variant(NamedTuple):
    """What one CUDA kernel is compiled for: the rule, the state format, the kind of weight decay, and the
    kernel's numbers for the dtypes of gradient (`grad`) and new weights (`out`)."""

    rule: Rule
    state_format: str
    decay: str
    grad: int
    out: int


def device_kernel(step: RuleStep, grad: Tensor, out: Tensor | None) -> Callable[..., None] | None:
    """The CUDA kernel for the rule of `step` with the dtypes of `grad` and `out`, compiled at first use; None
    where torch operations are used instead."""
    if compiler_of(grad.device) is None:
        return None
    types = [0 if x is None else KERNEL_DTYPES[x.dtype] for x in (grad, out)]
    try:
        return _compiled(Variant(step.rule, step.state_format, step.decay, *types), grad.device)
    except TypeError:  # a rule without a hash
        return None


@cache
def _compiled(variant: Variant, device: Device) -> Callable[..., None] | None:
    compiler = compiler_of(device)
    assert compiler is not None
    try:
        return compiler(kernel_text(variant), "zf_update", OPTIONS)
    except Exception as error:  # of a driver, a compiler, or a rule that cannot be printed
        log.info(
            "Updates of %s on %s are torch operations: %s", variant.rule.name or "an own rule", device, error
        )
        return None


def launch(
    kernel: Callable[..., None], step: RuleStep, state: Mapping[str, Tensor], grad: Tensor, out: Tensor | None
) -> None:
    """Queue update `step` by `kernel` on the device's current stream, in one launch; tensors are checked."""
    room = len(step.rule.state)
    names, _ = kernel_layout(step.state_format, room, weights=step.rule.weights)
    dithers = [first_dither(step.number, moment) for moment in range(room)]
    numbers = [x - (x >> 31 << 32) for x in dithers], [float(x) for x in step.factors]
    for start in range(0, grad.numel(), LONGEST):
        stop = min(grad.numel(), start + LONGEST)
        part = state_slice(step.state_format, state, start, stop)
        own = [grad[start:stop], grad if out is None else out[start:stop]]
        buffers = [*own, *(part.get(name, grad) for name in names)]
        threads = -(-(stop - start) // per_thread(step.state_format, room))
        grid = -(-threads // THREADS), 1, 1
        kernel(grid=grid, block=(THREADS, 1, 1), args=[*buffers, stop - start, *numbers[0], *numbers[1]])


def per_thread(state_format: str, room: int) -> int:
    """How many elements one CUDA thread updates of a state in `state_format`, with `room` moments: 1, or with
    scales the 64 elements that share one."""
    _, kept = kernel_layout(state_format, room)
    return 1 if all(x.startswith("KEPT_") for x in kept[1 : room + 1]) else ALIGNMENT


def kernel_text(variant: Variant) -> str:
    """The CUDA source of the kernel for `variant`: number formats, the rule, and a function `zf_update`."""
    rule, room = variant.rule._replace(name="own"), len(variant.rule.state)
    names, kept = kernel_layout(variant.state_format, room, weights=rule.weights)
    how, *kinds = kept[: room + 1]
    moments, scales = [f"m{j}" for j in range(room)], names[2 + room :]
    buffers = [
        "master",
        "low",
        *(f"moment{j}" for j in range(room)),
        *(f"scale{j}" for j in range(len(scales))),
    ]
    arguments = [
        "const void *grad, void *out",
        *(f"void *{x}" for x in buffers),
        "int n",
        *(f"int dither{j}" for j in range(room)),
        *(f"double k_{x}" for x in Factors._fields),
    ]
    shared = per_thread(variant.state_format, room)
    each = "for (size_t i = 0; i < few; i++)"
    body = [
        f"const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * {shared};",
        "if (at >= (size_t)n) return;",
        f"const size_t few = {'1' if shared == 1 else f'(size_t)n - at < {shared} ? (size_t)n - at : {shared}'};",
        f"zf_factors k = {{{', '.join(f'(float)k_{x}' for x in Factors._fields)}}};",
        f"float g[{shared}], p[{shared}]{''.join(f', {m}[{shared}]' for m in moments)};",
        f"{each} g[i] = {FROM[variant.grad].format('grad')};",
    ]
    high, low = "(uint16_t *)master + at", "(int16_t *)low + at"
    body += [_unpacked(kinds, j) for j in reversed(range(room)) if how != "HALVES_TO_EVEN" or j != 1]
    body += {
        "NO_WEIGHTS": [],
        "MASTER": [f"{each} p[i] = ((const float *)master)[at + i];"],
        "HALVES": [f"zf_join(p, {high}, {low}, few);"],
        "HALVES_TO_EVEN": [f"zf_join_even(p, m1, {high}, {low}, (const float *)moment1 + at, few);"],
    }[how]
    body += [f"zf_rule_own(&k, ZF_{DECAYS[variant.decay]}, few, {', '.join(['g', 'p', *moments])});"]
    for j in reversed(range(room)):  # codes beside others need these
        if kinds[j] != "KEPT_FP32" and kinds[j] != "KEPT_NONE":
            body += [f"uint32_t d{j}[{shared}];"]
            body += [f"{each} d{j}[i] = (uint32_t)dither{j} + (uint32_t)((at + i) % ZF_SHARED) * ZF_SPREAD;"]
        if how != "HALVES_TO_EVEN" or j != 1:
            body += [_packed(kinds, j)]
    body += {
        "NO_WEIGHTS": [],
        "MASTER": [f"{each} ((float *)master)[at + i] = p[i];"],
        "HALVES": [f"zf_split({high}, {low}, p, few);"],
        "HALVES_TO_EVEN": [f"zf_split_even({high}, {low}, (float *)moment1 + at, p, m1, few);"],
    }[how]
    if variant.out:
        body += [f"{each} (({TYPES[variant.out]} *)out)[at + i] = {TO[variant.out].format('p[i]')};"]
    formats = RULES_H.with_name("_number_formats.h").read_text()
    lines = "\n".join(f"    {x}" for x in body if x)
    head = f'extern "C" __global__ void zf_update(\n    {", ".join(arguments)}) {{'
    return "\n".join([HEAD, formats, header([rule], on_device=True), f"{head}\n{lines}\n}}\n"])


DECAYS = {"none": "NO_DECAY", "decoupled": "DECOUPLED", "l2": "L2"}  # their names in the kernels' C


def _unpacked(kinds: list[str], j: int) -> str:
    """CUDA code that reads moment number `j` as fp32; `kinds` has the kernel's words for how moments are
    stored, such as "KEPT_BF16"."""
    of, codes = f"m{j}, (const uint16_t *)moment{j} + at, few", f"(const uint8_t *)moment{j} + at"
    return {
        "KEPT_NONE": f"for (size_t i = 0; i < few; i++) m{j}[i] = 0.0f;",
        "KEPT_FP32": f"for (size_t i = 0; i < few; i++) m{j}[i] = ((const float *)moment{j})[at + i];",
        "KEPT_BF16": f"zf_unpack_bf16({of});",
        "UNSIGNED": f"zf_decode(m{j}, {codes}, ((const int16_t *)scale{j})[at / ZF_SHARED], few, 0);",
        "SIGNED": f"zf_decode(m{j}, {codes}, ((const int16_t *)scale{j})[at / ZF_SHARED], few, 1);",
        "BESIDE": f"zf_decode_beside(m{j}, {codes}, (const uint8_t *)moment1 + at, "
        "((const int16_t *)scale1)[at / ZF_SHARED], few);",
    }[kinds[j]]


def _packed(kinds: list[str], j: int) -> str:
    """CUDA code that rounds and stores moment number `j`; `kinds` has the kernel's words for how moments are
    stored, such as "KEPT_BF16"."""
    codes, scale = f"(uint8_t *)moment{j} + at", f"((int16_t *)scale{j})[at / ZF_SHARED]"
    return {
        "KEPT_NONE": "",
        "KEPT_FP32": f"for (size_t i = 0; i < few; i++) ((float *)moment{j})[at + i] = m{j}[i];",
        "KEPT_BF16": f"zf_pack_bf16((uint16_t *)moment{j} + at, m{j}, few, d{j});",
        "UNSIGNED": f"{scale} = zf_encode({codes}, m{j}, few, d{j}, 0);",
        "SIGNED": f"{scale} = zf_encode({codes}, m{j}, few, d{j}, 1);",
        "BESIDE": f"zf_encode_beside({codes}, m{j}, (const uint8_t *)moment1 + at, "
        f"((const int16_t *)scale1)[at / ZF_SHARED], few, d{j});",
    }[kinds[j]]
