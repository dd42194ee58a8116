"""Law 8 for state by name: whoever makes an update, in place or into other buffers, it has the reference's bits."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from adam_states import around, assert_same, placed
from torch import Tensor

from zfunc.core.optimizer_state import STATE_FORMATS
from zfunc.optim.compact import as_state, as_tensor
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.optim.one_buffer_reference import pack_one_buffer

State = dict[str, Tensor]


def tensors(arrays: Mapping[str, np.ndarray], state_format: str) -> State:
    """The state that the arrays of a reference are, by name."""
    return as_state((arrays[x.name] for x in STATE_FORMATS[state_format]), state_format)


def one_buffer_state(p: np.ndarray, m: np.ndarray, state_format: str) -> State:
    """A state of such fp32 weights and buffer."""
    with np.errstate(all="ignore"):
        return tensors(pack_one_buffer(p.copy(), m.copy(), state_format=state_format, step=1), state_format)


def clone(state: State, change: Callable[[Tensor], Tensor] = Tensor.clone) -> State:
    return {name: change(x) for name, x in state.items()}


def check_update(
    state: State,
    grad: Tensor,
    expected: State,
    expected_copy: np.ndarray | None,
    host_update: Callable[..., None],
    device_update: Callable[..., None],
    *,
    out: torch.dtype | None = None,
    threads: tuple[int, ...] = (1,),
    offset: int = 0,
    device: str = "cpu",
) -> None:
    """One step by the kernel, on every instruction set, and in torch operations.

    Buffers of the kernel begin `offset` elements into their storage, which it leaves as it is around them.
    """
    before = grad.clone()

    def one(update: Callable[..., None], mine: State, where: str = "cpu", **more: Any) -> None:
        copy = None if out is None else torch.zeros(grad.numel(), dtype=out, device=where)
        update(mine, grad.to(where), out=copy, **more)
        assert_same(more.get("into", mine).values(), expected.values())
        if copy is not None:
            assert_same([copy], [as_tensor(expected_copy).view(copy.dtype)])

    for isa, team in itertools.product(range(len(cpu_adam.instruction_sets())), threads):
        mine = clone(state, lambda x: placed(x, offset))
        into = clone(state, lambda x: placed(torch.ones_like(x), offset))
        outside = [around(x) for x in (*mine.values(), *into.values())]
        one(host_update, mine, into=into, threads=team, isa=isa)
        one(host_update, mine, threads=team, isa=isa)
        assert all(map(torch.equal, outside, (around(x) for x in (*mine.values(), *into.values()))))
    one(device_update, clone(state, lambda x: x.to(device, copy=True)), device)
    assert_same([grad], [before])
