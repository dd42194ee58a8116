"""SuperOffload's speculation: Adam does not wait for the norm, and what was wrong is made again.

Clipping and skipped steps are rare, yet each update of ZeRO-Offload waits for the norm of the whole gradient to
rule them out. Here a bucket is updated as its gradient arrives, as if nothing were clipped, and sent back at
once. When the norm is known and it says otherwise, the buckets are restored and updated anew. The result is
ZeRO-Offload's, bit by bit; a gradient that is not finite skips the step.

A bucket is restored from a copy of its state, made while backward runs: as much host memory again as the state
takes, and nearly twice the host's traffic. So it pays where backward is longer than both. DeepSpeed undoes an
update by arithmetic instead, which needs no copy and is not exact.

Published: up to 2.5 times the throughput of other offloading on one GH200 (abstract), by this and four other
means: weights kept where they fit, larger buckets, casts on the device, and Adam for the cores of Grace.
No row of docs/published.md: "up to" 500 or 600 TFLOPS are of several models, without their batches.

Lian et al., "SuperOffload: Unleashing the Power of Large-Scale LLM Training on Superchips" (2025), arXiv
2509.21271.
"""

import math
from collections.abc import Iterator

from attrs import evolve

from zfunc.core.graph import Op, Region
from zfunc.core.recipes import zero_offload
from zfunc.core.spec import StepSpec
from zfunc.engine.stages.stages import STAGES
from zfunc.errors import NonFiniteError

SETTINGS = {"clip_norm": 1.0, "moments": "fp32"}
PUBLISHED = ()


def speculative(spec: StepSpec) -> Iterator[Op]:
    """The operations of a step in serial order."""
    ops = [*zero_offload(spec)]
    update, send = ({op.index: op for op in ops if op.verb == verb} for verb in ("update", "to_device"))
    gradients = {r: b for b, op in update.items() for r in op.reads if r.role == "grad_shard"}
    complete = {
        gradients[r]: op.name for op in ops for r in op.writes if r in gradients
    }  # by the last of them
    (decision,) = (op for op in ops if op.verb == "decide")
    losses = [r for r in decision.reads if r.role == "loss"]
    for op in ops:
        if op.verb == "update":
            yield evolve(op, verb="settle", reads=(*op.reads, *copies(op)), nbytes=0)  # as nearly always
        elif op.verb == "to_device":
            yield evolve(op, verb="resend", nbytes=0)
        else:
            yield op
        if losses[-1] in op.writes:
            yield Op("guess", (), "host", losses, decision.writes)
        for b in (b for b, name in complete.items() if name == op.name):
            state, copy = update[b].operands("state"), copies(update[b])
            yield Op("keep", b, "host", dict.fromkeys(state), copy, nbytes=2 * sum(r.nbytes for r in copy))
            yield from (update[b], send[b])


def copies(update: Op) -> list[Region]:
    """Memory on the host for what the update of a bucket changes, until the norm is known."""
    state = [r for r in update.writes if r.role == "state"]
    return [evolve(r, buffer=f"old_{r.buffer}", lifetime="program", role=None) for r in state]


def guess(op: Op, mem: dict, step: object) -> None:
    """Decide before the norm is known: the step is made, and nothing is clipped."""
    mem[op.write("decision")] = step.decision()


def keep(op: Op, mem: dict, _: object) -> None:
    """Copy a bucket's optimizer state."""
    for state, copy in zip(op.reads, op.writes, strict=True):
        mem[copy].copy_(mem[state])


def decide(op: Op, mem: dict, step: object) -> None:
    """Decide with the norm; of a gradient that is not finite, to skip the step: refusing it would come too late."""
    try:
        STAGES["decide"](op, mem, step)
    except NonFiniteError:
        mem[op.write("decision")] = step.decision(skip=True, loss=math.nan)


def settle(op: Op, mem: dict, step: object) -> None:
    """Where the guess was wrong, restore a bucket's optimizer state and make the update that was decided."""
    if mem[op.read("decision")] != step.decision():
        for state in (r for r in op.writes if r.role == "state"):
            mem[state].copy_(mem[op.read(f"old_{state.buffer}")])
        STAGES["update"](op, mem, step)
        if mem[op.read("decision")].skip:
            mem[op.write("copy")][: mem[op.write("master")].numel()].copy_(mem[op.write("master")])


def resend(op: Op, mem: dict, step: object) -> None:
    """Where the guess was wrong, copy a bucket's parameters to the device again."""
    if mem[op.read("decision")] != step.decision():
        params = mem[op.write("params")].flat
        params.copy_(mem[op.read("copy")][: params.numel()])


FUNCTIONS = {"guess": guess, "keep": keep, "decide": decide, "settle": settle, "resend": resend}
