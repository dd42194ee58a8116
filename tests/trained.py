"""Programs of the small models, steps of them, and stages that put what is not finite into a gradient."""

from collections.abc import Callable
from typing import Any

from small_models import MODELS, Batch

import zfunc
from zfunc.engine.program.program import Program
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.state.state import State


def compiled(
    model: Any = "tied GPT",
    *,
    lr: Any = 1e-2,
    betas: Any = (0.9, 0.999),
    moments: Any = "fp32",
    split_master: bool = False,
    optimizer: Any = None,
    **settings: Any,
) -> tuple[Program, Callable[[int], Batch]]:
    """One of MODELS, or segments and batches, on the CPU, in buckets that make several of it; and its batches."""
    segments, batch = MODELS[model]() if isinstance(model, str) else model
    state = {"moments": moments, "split_master": split_master}
    if optimizer is None:
        optimizer = zfunc.AdamW(lr, betas=betas, weight_decay=0.1, decay=zfunc.matrices_only, **state)
    else:
        settings |= adam_of(moments, optimizer)
    usual = {"bucket_size": 3000, "device": "cpu"}
    return zfunc.compile(segments, **{**usual, "optimizer": optimizer, **settings}), batch


def adam_of(moments: Any = "fp32", optimizer: Any = None, **settings: Any) -> dict[str, Any]:
    """The settings with their optimizer, or AdamW, whose moments are in the format that is among them."""
    optimizer = zfunc.AdamW() if optimizer is None else optimizer
    if moments != "fp32":
        optimizer = optimizer.with_moments(moments, split_master=False)
    return {"optimizer": optimizer, **settings}


def steps(
    program: Program, state: State, batch: Callable[[int], Batch], start: int, stop: int, **more: Any
) -> tuple[State, list[tuple[Any, ...]]]:
    """Steps on the batches `start` to `stop`, and of each (step, loss, grad_norm, lr, skipped, loss_scale)."""
    seen: list[tuple[Any, ...]] = []
    for i in range(start, stop):
        state, m = zfunc.train_step(program, state, batch(i), **more)
        seen.append((m.step, m.loss, m.grad_norm, m.lr, m.skipped, m.loss_scale))
    return state, seen


def injecting(value: float, at: set[int], *, bucket: int | None = None) -> dict[str, Any]:
    """Stages that put `value` into the gradient of a bucket, or of each, in some calls of train_step, from 1."""

    def load(op: Any, mem: Any, step: Any) -> None:
        calls.append(op.name) if op.index == (0,) else None
        STAGES["load"](op, mem, step)

    def pack(op: Any, mem: Any, step: Any) -> None:
        STAGES["pack"](op, mem, step)
        if len(calls) in at and bucket in (None, op.index[1]):
            mem[op.write("grad_slot")][0] = value

    calls: list[str] = []
    return {"load": load, "pack": pack}
