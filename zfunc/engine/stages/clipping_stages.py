"""Gradient norm, clipping, skipping on overflow: the stages that turn a gradient into a `StepDecision`."""

import math
from itertools import accumulate

import torch
from torch import Tensor

from zfunc.core.graph import Op
from zfunc.core.pipeline import F
from zfunc.core.region_table import SUM_PARTS
from zfunc.engine.stages.stage_context import Memory, StepContext, named_like_verbs
from zfunc.engine.state.memory import Squares
from zfunc.errors import NonFiniteError
from zfunc.optim.updates import exact_parts
from zfunc.runtime.accelerator import on_accelerator, synchronize
from zfunc.runtime.torch_dtypes import byte_view


def global_norm(op: Op, mem: Memory, step: StepContext) -> None:
    """Compute the unscaled L2 norm of the whole gradient; with the setting `norms`, also of each parameter's.

    The squares of buckets and ranks are added part by part, without rounding, so how the gradient was cut into
    buckets and slices changes no bit of a norm.
    """
    wait_for_copies(step)
    by_bucket: dict[int, Squares] = {r.index[0]: mem[r] for r in op.reads}  # of this pipeline stage
    sizes = [len(x.spans) if step.spec.settings.norms else 1 for x in step.spec.layout.buckets]
    starts = [0, *accumulate(sizes)]
    rows = torch.zeros(starts[-1], SUM_PARTS, dtype=torch.float64, device="cpu")  # of each parameter
    of_rows, norms = list[int](), list[Tensor]()
    for b, squares in by_bucket.items():
        if squares.rows is None:
            rows[starts[b] : starts[b + 1]] = squares.flat[: sizes[b] * SUM_PARTS].view(-1, SUM_PARTS)
        else:
            of_rows += [starts[b] + row for row in squares.rows]
            norms.append(squares.norms)
    if of_rows:  # of all buckets at once: each is a dozen calls of torch
        squared = torch.cat(norms).double().square_()
        rows.index_add_(0, torch.tensor(of_rows, device="cpu"), exact_parts(squared[:, None]))
    if not op.touches("norms"):
        rows = rows.sum(0, keepdim=True)
    if step.ranks.several:
        sums = torch.tensor(step.ranks.sums(rows.flatten().tolist()), dtype=torch.float64, device="cpu")
        rows = sums.view(-1, SUM_PARTS)
    mem[op.write("norm")] = math.sqrt(math.fsum(rows.sum(0).tolist())) / step.loss_scale
    if op.touches("norms"):
        mem[op.write("norms")] = [math.sqrt(math.fsum(row)) / step.loss_scale for row in rows.tolist()]


def mean_loss(op: Op, mem: Memory, step: StepContext) -> None:
    """Compute the mean loss and mean scalar auxiliary outputs over all micro-batches and ranks, in one
    collective; gather each auxiliary output that has one entry per row of the batch, in one more collective.
    """
    wait_for_copies(step)
    means = _means(op, mem) if op.reads else [0.0] * (1 + len(step.spec.aux))  # another stage has the losses
    loss, *aux = (total / step.ranks.world for total in step.ranks.sums(means))
    mem[op.write("mean_loss")] = loss
    if op.touches("mean_aux"):
        mem[op.write("mean_aux")] = torch.tensor(aux, dtype=torch.float64)
    _write_rows(op, mem, step)


def decide(op: Op, mem: Memory, step: StepContext) -> None:
    """Decide whether this step is skipped (fp16 overflow) or refused, and the factor by which its gradient is
    unscaled and clipped.

    Raises NonFiniteError for a non-finite loss or norm without loss scaling.
    """
    loss, *aux = _means(op, mem)
    _write_rows(op, mem, step)
    norm = mem[op.read("norm")] if op.touches("norm") else 0.0
    finite = math.isfinite(loss) and math.isfinite(norm)
    if not finite and step.spec.settings.precision != "fp16":
        _refuse_step(step, loss, norm)
    factor = clip_factor(norm, step.spec.settings.clip_norm) if finite else 1.0
    mem[op.write("decision")] = step.decision(skip=not finite, factor=factor, loss=loss, aux=aux)


def _means(op: Op, mem: Memory) -> list[float]:
    """The mean of the losses that operation `op` reads, followed by the mean of each auxiliary output."""
    losses = [float(mem[r]) for r in op.reads if r.role == "loss"]
    aux = [mem[r].tolist() for r in op.reads if r.role == "aux"]
    return [sum(values) / len(values) for values in (losses, *zip(*aux, strict=True))]


def _write_rows(op: Op, mem: Memory, step: StepContext) -> None:
    """Write the auxiliary outputs that have one entry per row to host memory, in the order of micro-batches,
    then of ranks. With pp, all ranks get those of the last segment's pipeline stage."""
    if not op.touches("all_rows"):
        return
    spec, ranks = step.spec, step.ranks
    by_micro_batch = [mem[r] for r in op.reads if r.buffer == "aux_rows"]
    outputs = mem[op.write("all_rows")] = dict[str, Tensor]()
    for n, x in enumerate(spec.aux_rows):
        rows = ranks.world * spec.settings.micro_batches * x.shape[0]
        full = torch.empty(rows, *x.shape[1:], dtype=getattr(torch, x.dtype), device="cpu")
        if by_micro_batch:
            mine = torch.cat([rows_of_it[n].cpu() for rows_of_it in by_micro_batch])
            ranks.all_gather(byte_view(full), byte_view(mine)) if ranks.world > 1 else full.copy_(mine)
        if spec.mesh.over_ranks:
            home = spec.mesh.device_of(F, 0, len(spec.costs) - 1)
            byte_view(full).copy_(ranks.from_stage(home, byte_view(full)))  # pyright: ignore  # StageRanks
        outputs[x.name] = full


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """The factor that scales a gradient of this norm down to `clip_norm`, as `torch.nn.utils.clip_grad_norm_`.

    >>> clip_factor(0.5, 1.0), clip_factor(4.0, None), round(clip_factor(4.0, 1.0), 6)
    (1.0, 1.0, 0.25)
    """
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def _refuse_step(step: StepContext, loss: float, norm: float) -> None:
    what = f"a gradient norm of {norm}" if math.isfinite(loss) else f"a loss of {loss}"
    raise NonFiniteError(
        f"step {step.number}: got {what}, expected finite numbers; nothing was updated and the state is unharmed. "
        "Look at this batch, lower the learning rate, or clip"
    )


def wait_for_copies(step: StepContext) -> None:
    """With several ranks, wait for the device's copies to host memory, which the caller reads next."""
    wait_for_device(step, step.devices[0], "copies to the host")


def wait_for_device(step: StepContext, device: torch.device, what: str) -> None:
    """If there are several ranks, wait for `device` and watch for dead ranks; errors say `what` was waited for."""
    if step.ranks.several and on_accelerator(device):
        synchronize(torch.accelerator.current_stream(device), step.patience, what, step.ranks.watch)


CLIPPING_STAGES = named_like_verbs(global_norm, mean_loss, decide)
