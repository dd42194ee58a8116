"""SGD, Lion and Adagrad in host memory: a checked call into the compiled kernel.

`one_buffer_reference` defines what it computes. A call that raises has changed no buffer.
"""

from collections.abc import Mapping

from torch import Tensor

from zfunc.core.optimizer_state import moment_buffers, weight_buffers
from zfunc.optim.argument_checks import INTO, Span, checked_step, checked_threads, update_spans
from zfunc.optim.compact_reference import EXP_AVG, first_dither
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam
from zfunc.optim.one_buffer_reference import Rule, RuleFactors, has_sign

KERNEL_RULES: dict[Rule, int] = {
    "sgd": cpu_adam.SGD,
    "nesterov": cpu_adam.NESTEROV,
    "lion": cpu_adam.LION,
    "adagrad": cpu_adam.ADAGRAD,
    "direction": cpu_adam.DIRECTION,
}


def host_one_buffer_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    state_format: str,
    rule: Rule,
    factors: RuleFactors,
    step: int,
    decoupled: bool,
    out: Tensor | None = None,
    into: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
    isa: int = -1,
) -> None:
    """One step over 1-D contiguous host buffers, by name, in place or `into` others, in one pass over memory.

    `grad`: [n] fp32, bf16 or fp16, read only. `out`: [n] of such a type, receives the rounded new weights, or the
    direction. Threads and instruction set change no bit. Raises TypeError or ValueError, with every buffer
    unchanged, as `zfunc.optim.host_adam.adam_update_` does.
    """
    spans = update_spans(state_format, state, grad, out, into, weights=rule != "direction")
    decay = cpu_adam.NO_DECAY if not factors.decay else cpu_adam.DECOUPLED if decoupled else cpu_adam.L2
    cpu_adam.one_buffer_update(
        KERNEL_RULES[rule],
        buffer_type(state_format),
        *_addresses(spans, state_format),
        first_dither(checked_step(step), EXP_AVG),
        spans["grad"][0],
        spans["out"][0] if out is not None else 0,
        grad.numel(),
        KERNEL_DTYPES[grad.dtype],
        cpu_adam.NONE if out is None else KERNEL_DTYPES[out.dtype],
        decay,
        *factors,
        checked_threads(threads),
        isa,
        _addresses(spans, state_format, INTO) if into is not None else (),
    )


def buffer_type(state_format: str) -> int:
    """What the kernel calls the type of the buffer in this format."""
    own = moment_buffers(state_format)
    if len(own) == 2:
        return cpu_adam.BUFFER_SIGNED if has_sign(state_format) else cpu_adam.BUFFER_UNSIGNED
    kinds = {"fp32": cpu_adam.BUFFER_FP32, "bf16": cpu_adam.BUFFER_BF16}
    return kinds[own[0].dtype] if own else cpu_adam.BUFFER_NONE


def _addresses(spans: Mapping[str, Span], state_format: str, prefix: str = "") -> list[int]:
    """Weights, low half, buffer and scale in the kernel's order, 0 for what the format does not have."""
    masters, own = weight_buffers(state_format), [x.name for x in moment_buffers(state_format)]
    names = [*masters, ""][:2] + [*own, "", ""][:2]
    return [spans[prefix + name][0] if prefix + name in spans else 0 for name in names]
