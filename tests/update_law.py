"""Law 8: whoever makes an update, in place or into other buffers, it has the bits of the NumPy reference.

States of every optimizer and format by name, and one step in every way: by the kernel on each instruction set, any
number of threads, in any parts and places, and in the torch operations that a device runs.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import frozen
from numpy_reference import array, pack, reference_update, tensor
from torch import Tensor

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import STATE_FORMATS, moment_buffers
from zfunc.optim.elementwise import Elementwise, lr_field, number_field
from zfunc.optim.formats import BLOCK
from zfunc.optim.kernel_loader import cpu_adam as kernel
from zfunc.optim.rules import EXP_AVG_FLOOR

State = dict[str, Tensor]
TYPES = {torch.float32: kernel.FP32, torch.bfloat16: kernel.BF16, torch.float16: kernel.FP16}
NAMES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ISAS = range(len(kernel.instruction_sets()))


@frozen
class CountingSignum(Elementwise):
    """One of one's own, which the kernel does not have: SGD by the signs of its momentum."""

    state: ClassVar = ("exp_avg", "steps_so_far")
    decoupled: ClassVar = True

    lr: Any = lr_field(0.01)
    weight_decay: float = number_field("weight_decay", 0.1)

    def update(self, o: Any, k: Any, g: Any, m: Any, n: Any) -> tuple[Any, ...]:
        m = o.flush(k.keep * m + k.add * g, EXP_AVG_FLOOR)
        return o.signed(m, k.rate), m, n + 1.0

    def scalars(self, step: int, lr: float) -> dict[str, float]:
        return {"rate": lr / step, "keep": 0.9, "add": 0.1}


RULES: dict[str, Elementwise] = {
    "AdamW": zfunc.AdamW(1e-3, weight_decay=0.1),
    "Adam": zfunc.AdamW(1e-3, weight_decay=0.1, decoupled=False, eps=0.0),
    "SGD": zfunc.SGD(0.1),
    "momentum": zfunc.SGD(0.1, momentum=0.9, dampening=0.25, weight_decay=0.1),
    "Nesterov": zfunc.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lion": zfunc.Lion(0.01, weight_decay=0.1),
    "Adagrad": zfunc.Adagrad(0.1, weight_decay=0.1, lr_decay=0.01),
    "Adagrad from 0.1": zfunc.Adagrad(0.1, initial_accumulator_value=0.1),
    "one's own": CountingSignum(),
}
ROWS: dict[str, Elementwise] = {
    f"{name}, {moments}": rule.with_moments(moments, split_master=False)
    for name, rule in RULES.items()
    for moments in ("fp32", "16bit", "8bit")
}
ROWS["AdamW, fp32-split"] = zfunc.AdamW(1e-3, weight_decay=0.1, split_master=True)
ADAMS = [name for name in ROWS if name.startswith("AdamW")]  # a format each


# ---- buffers -----------------------------------------------------------------------------------------


def placed(x: Tensor, offset: int) -> Tensor:
    """A copy of x that begins `offset` elements into its storage, with a block of room after it."""
    store = torch.zeros(x.numel() + offset + BLOCK, dtype=x.dtype)
    store[offset : offset + x.numel()] = x
    return store[offset : offset + x.numel()]


def around(x: Tensor) -> Tensor:
    """What lies before and after a buffer in its storage, as bytes."""
    storage = torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage())
    start = x.storage_offset() * x.element_size()
    return torch.cat([storage[:start], storage[start + x.nbytes :]])


def random_bytes(x: Tensor, seed: int) -> Tensor:
    """A buffer of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (x.nbytes,), generator=generator, dtype=torch.uint8).view(x.dtype)


def gradient(n: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor) -> Tensor:
    """The bits of a buffer."""
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def bits(x: Tensor) -> Tensor:
    """The bits of a buffer, every NaN alike: its payload is not promised."""
    return exact(torch.where(x.isnan(), torch.full_like(x, torch.nan), x) if x.is_floating_point() else x)


def assert_same(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        if torch.equal(exact(one.cpu()), exact(other)):
            continue
        wrong = (bits(one.cpu()) != bits(other)).nonzero().flatten()
        assert not wrong.numel(), f"{wrong.numel()} of {other.numel()} differ, the first is {wrong[0]}"


# ---- states ------------------------------------------------------------------------------------------


def clone(state: State, change: Callable[[Tensor], Tensor] = Tensor.clone) -> State:
    return {name: change(x) for name, x in state.items()}


def tensors(arrays: Mapping[str, np.ndarray], state_format: str) -> State:
    """The state that the arrays of a reference are, by name, in the order of its format."""
    return {x.name: tensor(arrays[x.name]) for x in STATE_FORMATS[state_format]}


def packed(state_format: str, p: np.ndarray, *moments: np.ndarray) -> State:
    """A state of such fp32 weights and moments."""
    with np.errstate(all="ignore"):
        return clone(tensors(pack(p, moments, state_format, 1), state_format))


def fresh(n: int, state_format: str, seed: int = 0) -> State:
    """Weights of unit size, moments that differ by powers of ten inside a block."""
    rng = np.random.default_rng(seed)
    kinds = [x for x in moment_buffers(state_format) if x.shared == 1]
    p, *moments = (rng.standard_normal(n).astype(np.float32) for _ in range(1 + max(2, len(kinds))))
    moments = [x * np.exp2(rng.uniform(-20, 0, n)).astype(np.float32) for x in moments]
    own = [m if x.signed else np.square(m) for x, m in zip(kinds, moments, strict=False)]
    return packed(state_format, p, *own)


# ---- the law -----------------------------------------------------------------------------------------


def check(
    optimizer: Elementwise, state: State, grad: Tensor, *, step: int = 3, scale: float = 0.3,
    group: int = 0, out: torch.dtype | None = None, **given: Any,
) -> State:  # fmt: skip
    """One step in every way has the bits of the reference; returns the new state."""
    decision = StepDecision(False, scale, step, optimizer.factors(step))
    how = optimizer.rule_step(decision, group)
    new, copy = reference_update(how, clone(state, array), array(grad), out=out and NAMES[out])
    expected = tensors(new, how.state_format)
    check_update(optimizer, state, grad, expected, copy, decision, out=out, group=group, **given)
    return expected


def check_update(
    optimizer: Any, state: State, grad: Tensor, expected: State, expected_copy: np.ndarray | None,
    decision: StepDecision, *, out: torch.dtype | None = None, threads: Sequence[int] = (1,), offset: int = 0,
    device: str = "cpu", isas: Sequence[int] = ISAS, **given: Any,
) -> None:  # fmt: skip
    """One step by the kernel, on every instruction set, and in torch operations.

    Buffers of the kernel begin `offset` elements into their storage, which it leaves as it is around them.
    """
    before = grad.clone()

    def one(update: Callable[..., None], mine: State, where: str = "cpu", **more: Any) -> None:
        copy = None if out is None else torch.zeros(grad.numel(), dtype=out, device=where)
        update(mine, grad.to(where), decision, out=copy, **given, **more)
        assert_same(more.get("into", mine).values(), expected.values())
        if copy is not None:
            assert expected_copy is not None
            assert_same([copy], [tensor(expected_copy)])

    for isa, team in itertools.product(isas, threads):
        mine = clone(state, lambda x: placed(x, offset))
        into = clone(state, lambda x: placed(torch.ones_like(x), offset))
        outside = [around(x) for x in (*mine.values(), *into.values())]
        one(optimizer.host_update, mine, into=into, threads=team, isa=isa)
        assert_same(mine.values(), state.values())
        one(optimizer.host_update, mine, threads=team, isa=isa)
        assert all(map(torch.equal, outside, (around(x) for x in (*mine.values(), *into.values()))))
    one(optimizer.device_update, clone(state, lambda x: x.to(device, copy=True)), device)
    assert_same([grad], [before])
