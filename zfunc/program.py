"""`compile`: segments and settings become a Program, its graph planned and verified before anything is allocated.

The invariant: a Program holds no training state and does not change. What it makes on first need (the plan for
a batch's shapes, staging buffers, threads) is determined by it and kept for every later step.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zfunc import schedules
from zfunc.adam import AdamW
from zfunc.emit import Job, SegmentCost
from zfunc.errors import OutOfMemory, nearest
from zfunc.execute import Executor, Prepared, prepare
from zfunc.graph import Graph, Region, Tier
from zfunc.layout import Layout, make_layout
from zfunc.memory import Peak, memory
from zfunc.passes import RECOMPUTE, Passes, Recompute, Weights, passes
from zfunc.plan import Plan
from zfunc.recipes import zero_offload
from zfunc.resources import available_device_bytes, available_host_bytes, host_buffer
from zfunc.segments import Segment
from zfunc.stages import STAGES, SegmentCall, Stage
from zfunc.tracing import Trace, nbytes, trace
from zfunc.verify import verify

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Schedule = Callable[[Graph], Plan]
log = logging.getLogger("zfunc")
_identities = itertools.count(1)


@frozen(eq=False)
class Program:
    """A compiled training step: segments, layout, recipe settings, schedule. Made by `zfunc.compile`.

    `plan` is the verified plan. Until a batch has been seen its activations count as 0 bytes, unless
    `compile` was given an example.
    """

    segments: tuple[Segment, ...] = field(repr=lambda s: f"<{len(s)} segments>")
    calls: tuple[SegmentCall, ...] = field(repr=False)
    layout: Layout = field(repr=False)
    optimizer: AdamW
    schedule: Schedule
    precision: Precision
    clip_norm: float | None
    micro_batches: int
    device: torch.device
    recompute: Recompute
    job: Job = field(repr=False)
    plan: Plan = field(repr=False)
    stages: dict[str, Stage] = field(repr=False)
    executor: Executor = field(repr=False)
    cache: "Cache" = field(repr=False)
    identity: int = field(factory=_identities.__next__)

    @property
    def dtype(self) -> torch.dtype:
        """The precision parameters and gradients have on the device."""
        return DTYPES[self.precision]


@frozen(eq=False)
class Specialized:
    """A program for the shapes of one batch: the plan with real sizes, ready to issue."""

    plan: Plan
    prepared: Prepared
    memory: dict[Tier, Peak]
    random: frozenset[int]  # segments that draw random numbers


@define(eq=False)
class Cache:
    """What a Program makes once: one Specialized for each set of batch shapes, and the staging buffers."""

    specialized: dict[Any, Specialized] = field(factory=dict)
    staging: dict[Region, Tensor] | None = None


def compile(
    segments: Sequence[Segment],
    *,
    optimizer: AdamW | None = None,
    schedule: Schedule | str | None = None,
    precision: Precision = "bf16",
    clip_norm: float | None = None,
    micro_batches: int = 1,
    bucket_size: int = 50_000_000,
    device: torch.device | str | None = None,
    group: None = None,
    recompute: Recompute = "all",
    compile_segments: bool = False,
    grad_slots: int = 2,
    host_slots: int = 2,
    example: tuple[Any, Any] | None = None,
    stages: dict[str, Stage] | None = None,
    patience: float = 600.0,
) -> Program:
    """Compile `segments` into a Program: lay them out, emit the recipe, plan it, verify the plan.

    - `schedule`: anything callable `Graph -> Plan`, or the name of a class in `zfunc.schedules`; by default
      `Overlapped()`.
    - `precision`: of parameters and gradients on the device; master weights are fp32 always. "fp16" trains with
      dynamic loss scaling.
    - `clip_norm`: clip the global gradient norm, as `torch.nn.utils.clip_grad_norm_`; a barrier before Adam.
    - `micro_batches`: equal parts of a batch, accumulated in fp32.
    - `bucket_size`: elements of a bucket; `grad_slots` of them are on the device, `host_slots` in pinned memory.
    - `recompute`: what a segment keeps for backward: "all" (only its input), "none", "min-cut".
    - `compile_segments`: put every distinct segment through `torch.compile`.
    - `example`: a batch `(inputs, targets)`, of which only shapes count, to plan memory with right away.
    - `stages`: more stage functions, or others, by verb. `patience`: seconds a lane waits for another.

    Raises ValueError or TypeError for arguments that cannot work, PlanError for a schedule whose plan is wrong.
    """
    segments = _checked(segments)
    _one_of("precision", precision, list(DTYPES))
    _one_of("recompute", recompute, list(RECOMPUTE))
    optimizer = optimizer or AdamW()
    _positive(
        micro_batches=micro_batches, grad_slots=grad_slots, host_slots=host_slots, bucket_size=bucket_size
    )
    if clip_norm is not None and not 0 < clip_norm < float("inf"):
        raise ValueError(f"clip_norm: got {clip_norm}, expected a positive number, or None not to clip")
    if group is not None:
        raise ValueError(f"group: got {group!r}, expected None: this version trains in one process")
    if compile_segments and recompute == "none":
        raise ValueError("compile_segments: got it with recompute='none', expected 'all' or 'min-cut'")
    where = pick_device(device)

    layout = make_layout(
        [[evolve(p, decay=bool(optimizer.decay(p.name, p.shape))) for p in s.parameters] for s in segments],
        bucket_size=bucket_size,
    )
    last = len(segments) - 1
    job = Job(
        layout,
        costs=(SegmentCost(),) * len(segments),
        recompute=tuple(recompute == "all" and s != last for s in range(len(segments))),
        element_bytes=DTYPES[precision].itemsize,
        micro_batches=micro_batches,
        barrier=clip_norm is not None or precision == "fp16",
        grad_slots=grad_slots,
        host_slots=host_slots,
        constant_bytes=sum(nbytes(s.constants) for s in segments),
    )
    chosen = _schedule(schedule)
    program = Program(
        segments=segments,
        calls=_calls(segments, layout, recompute, compile_segments, where),
        layout=layout,
        optimizer=optimizer,
        schedule=chosen,
        precision=precision,
        clip_norm=clip_norm,
        micro_batches=micro_batches,
        device=where,
        recompute=recompute,
        job=job,
        plan=make_plan(job, chosen),
        stages={**STAGES, **(stages or {})},
        executor=Executor(where, patience=patience),
        cache=Cache(),
    )
    if example is None:
        return program
    return evolve(program, plan=specialize(program, example).plan)


def make_plan(job: Job, schedule: Schedule) -> Plan:
    """Emit the recipe, let the schedule plan it, verify what it says."""
    return verify(schedule(Graph(tuple(zero_offload(job)))))


def pick_device(device: torch.device | str | None) -> torch.device:
    """The device to train on: the one asked for, else CUDA where there is one; what was chosen is logged."""
    if device is None:
        found = "cuda" if torch.cuda.is_available() else "cpu"
        log.info("device: %s, because torch %s", found, "sees a GPU" if found == "cuda" else "sees no GPU")
        return torch.device(found, torch.cuda.current_device()) if found == "cuda" else torch.device("cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device: got {device!r}, expected 'cpu' or 'cuda'{nearest(str(device), ['cpu', 'cuda'])}"
        ) from None
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {str(device)!r}, expected 'cpu' or 'cuda'")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: got {str(device)!r}, but torch sees no GPU: use device='cpu', or install CUDA"
        )
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where


def specialize(program: Program, batch: tuple[Any, Any]) -> Specialized:
    """The program for the shapes of `batch`; traced and planned the first time they are seen.

    Raises ValueError where a segment cannot take its input or the last one returns no scalar.
    """
    micro = split(batch, program.micro_batches)[0]
    leaves = tree_leaves(micro)
    key = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves)
    if key not in program.cache.specialized:
        program.cache.specialized[key] = _specialize(program, micro)
    return program.cache.specialized[key]


def split(batch: tuple[Any, Any], micro_batches: int) -> list[tuple[Any, Any]]:
    """`batch` in equal parts along the first dimension of every tensor, as views."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"batch: got {type(batch).__name__}, expected a pair (inputs, targets)")
    sizes = {t.shape[0] if t.dim() else None for t in tree_leaves(batch) if isinstance(t, Tensor)}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        raise ValueError(
            f"batch: got tensors with first dimensions {sizes}, expected one and the same, not 0"
        )
    (rows,) = sizes
    if rows % micro_batches:
        raise ValueError(
            f"batch: got {rows} rows for {micro_batches} micro-batches, expected a multiple: give "
            f"{rows - rows % micro_batches or micro_batches} rows, or another micro_batches"
        )
    size = rows // micro_batches
    return [
        tree_map_only(Tensor, lambda t, m=m: t[m * size : (m + 1) * size], tuple(batch))
        for m in range(micro_batches)
    ]


def staging(program: Program) -> dict[Region, Tensor]:
    """The program's own buffers: slots, sums, squares. Made once, pinned ones at their exact size."""
    if program.cache.staging is None:
        program.cache.staging = {r: _buffer(program, r) for r in _staged(program)}
    return program.cache.staging


def check_memory(program: Program, needed: dict[Tier, Peak], *, held: dict[Tier, int], action: str) -> None:
    """Raise OutOfMemory if `needed`, less what is `held` already, is more than there is."""
    want = {tier: peak.nbytes - held.get(tier, 0) for tier, peak in needed.items()}
    host = want["host"] + want["pinned"]
    on_cpu = program.device.type == "cpu"
    checks = [("host", host + (want["device"] if on_cpu else 0), available_host_bytes())]
    if not on_cpu:
        checks.append(("device", want["device"], available_device_bytes(program.device)))
    for what, bytes_needed, there in checks:
        if bytes_needed > there:
            at = needed["device"].op
            raise OutOfMemory(
                f"{action}: needs {bytes_needed:,} bytes of {what} memory, {there:,} are there"
                f"{f' (the peak is at {at})' if at else ''}; nothing was allocated. Use more micro_batches, a "
                "smaller bucket_size, recompute='all', or a smaller model"
            )


def _checked(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    segments = tuple(segments)
    if not segments:
        raise ValueError("segments: got none, expected at least one: the last ends in the loss")
    for s in segments:
        if not isinstance(s, Segment):
            raise TypeError(
                f"segments: got a {type(s).__name__}, expected Segments: use zfunc.segment(name, module)"
            )
    names = [s.name for s in segments]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"segments: got two named {name!r}, expected a name of its own for each")
    known = {name: p for s in segments for name, p in _owned(s).items()}
    for s in segments:
        for short, p in zip(s.short, s.parameters, strict=True):
            if p.name not in known:
                raise ValueError(
                    f"segment {s.name!r}: {short} is shared with {p.name!r}, which no segment has"
                    f"{nearest(p.name, list(known))}: give the full name, 'segment.name in its module'"
                )
            if p.shape != known[p.name].shape:
                raise ValueError(
                    f"segment {s.name!r}: {short} has shape {p.shape}, {p.name!r} it is shared with has "
                    f"{known[p.name].shape}: tied parameters have one shape"
                )
    return segments


def _owned(segment: Segment) -> dict[str, Any]:
    return {p.name: p for p in segment.parameters if p.name not in segment.shared}


def _calls(
    segments: Sequence[Segment], layout: Layout, recompute: Recompute, compiled: bool, device: torch.device
) -> tuple[SegmentCall, ...]:
    """One pair of passes for each distinct segment, so that it is traced or compiled once."""
    trainable = {span.name for span in layout.spans}
    made: list[tuple[Segment, tuple[Any, ...], Passes]] = []
    calls: list[SegmentCall] = []
    last = len(segments) - 1
    for s, segment in enumerate(segments):
        keep: Recompute = recompute
        if s == last and recompute == "all":
            keep = "min-cut" if compiled else "none"
        settings = (keep, s > layout.first_trainable, s == last)
        pair = next((p for other, seen, p in made if seen == settings and segment.like(other)), None)
        if pair is None:
            function = _scalar(segment) if s == last else segment.function
            pair = passes(function, recompute=keep, wrt_input=settings[1], compiled=compiled)
            made.append((segment, settings, pair))
        names = segment.by_short
        calls.append(
            SegmentCall(
                pair,
                {short: full for short, full in names.items() if full in trainable},
                {short: full for short, full in names.items() if full not in trainable},
                {short: t.to(device) for short, t in segment.constants.items()},
            )
        )
    return tuple(calls)


def _scalar(segment: Segment) -> Callable[..., Tensor]:
    """The last segment, its loss checked and in fp32: a loss scale of 2**16 has no fp16."""

    def loss(*args: Any) -> Tensor:
        y = segment.function(*args)
        if not isinstance(y, Tensor) or y.dim() != 0 or not y.is_floating_point():
            got = f"shape {tuple(y.shape)}, {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"segment {segment.name!r}: got {got} from the last segment, expected a scalar: the mean loss of "
                "its micro-batch, as from F.cross_entropy(logits, targets)"
            )
        return y.float()

    return loss


def _specialize(program: Program, micro: tuple[Any, Any]) -> Specialized:
    traces = _trace_all(program, micro)
    inputs = [nbytes(micro[0]), *(t.output_bytes for t in traces[:-1])]
    costs = [_cost(t, size, keeps) for t, size, keeps in zip(traces, inputs, _keeps(program), strict=True)]
    # The output and the gradients are regions of their own; what is left of a peak is workspace.
    job = evolve(program.job, costs=tuple(costs), target_bytes=nbytes(micro[1]))
    plan = make_plan(job, program.schedule)
    random = frozenset(s for s, t in enumerate(traces) if t.random)
    return Specialized(plan, prepare(plan, program.stages, program.device), memory(plan), random)


def _keeps(program: Program) -> list[bool]:
    return [call.passes.keeps for call in program.calls]


def _cost(t: Trace, input_bytes: int, keeps: bool) -> SegmentCost:
    return SegmentCost(
        flops=t.flops,
        input_bytes=input_bytes,
        residual_bytes=t.residual_bytes if keeps else 0,
        forward_workspace=max(0, t.forward_peak - t.output_bytes - (t.residual_bytes if keeps else 0)),
        backward_workspace=t.backward_peak,
    )


def _trace_all(program: Program, micro: tuple[Any, Any]) -> list[Trace]:
    """Trace every segment on the shapes its predecessor hands it; alike segments with alike inputs once."""
    seen: dict[Any, Trace] = {}
    traces: list[Trace] = []
    x = tree_map_only(Tensor, lambda t: _fake(program, t), micro[0])
    targets = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), micro[1])
    last = len(program.segments) - 1
    for s, (segment, call) in enumerate(zip(program.segments, program.calls, strict=True)):
        key = (id(call.passes), tuple((t.shape, t.dtype) for t in tree_leaves(x)))
        if key not in seen:
            inputs = (x, targets) if s == last else (x,)
            seen[key] = _trace_one(program, segment, call, s, inputs)
        traces.append(seen[key])
        x = seen[key].out
    return traces


def _fake(program: Program, t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=program.dtype if t.is_floating_point() else t.dtype, device="meta")


def _trace_one(
    program: Program, segment: Segment, call: SegmentCall, s: int, inputs: tuple[Any, ...]
) -> Trace:
    shapes = {p.name: p.shape for p in segment.parameters}
    values = {
        short: torch.empty(shapes[full], dtype=program.dtype, device="meta")
        for short, full in segment.by_short.items()
    }

    def run(values: Any, constants: Any, inputs: Any) -> Any:
        trained = {short: values[short] for short in call.trained}
        weights = Weights(trained, {**{short: values[short] for short in call.fixed}, **constants})
        y, residuals = call.passes.forward(weights, inputs)
        if s < program.layout.first_trainable:
            return y, None, None
        return y, residuals, lambda c: call.passes.backward(weights, inputs, residuals, c)

    try:
        return trace(
            run, values, call.constants, inputs, device=program.device, warm=program.recompute == "min-cut"
        )
    except ValueError as error:
        if segment.name in str(error):
            raise
        raise ValueError(f"segment {segment.name!r}: {error}") from error
    except Exception as error:
        shapes_of = [tuple(t.shape) for t in tree_leaves(inputs)]
        raise ValueError(
            f"segment {segment.name!r}: got an error on inputs of shape {shapes_of}, expected it to run: "
            f"{type(error).__name__}: {error}"
        ) from error


def _staged(program: Program) -> list[Region]:
    state = {"params", "frozen", "master", "exp_avg", "exp_avg_sq", "batch", "norm", "verdict"}
    return [r for r in program.plan.graph.regions if r.kept and r.buffer not in state]


def _buffer(program: Program, r: Region) -> Tensor:
    if r.buffer in ("squares", "host_squares"):
        dtype, shape = torch.float64, ()
    else:
        dtype = torch.float32 if r.buffer == "grad_sum" else program.dtype
        shape = (r.nbytes // dtype.itemsize,)
    if r.tier == "device":
        return torch.zeros(shape, dtype=dtype, device=program.device)
    pinned = r.tier == "pinned" and program.device.type == "cuda"
    return host_buffer(r.nbytes // dtype.itemsize, dtype, pinned=pinned).view(shape)


def _schedule(schedule: Schedule | str | None) -> Schedule:
    if schedule is None:
        return schedules.Overlapped()
    if isinstance(schedule, str):
        _one_of("schedule", schedule, schedules.__all__)
        return getattr(schedules, schedule)()
    if isinstance(schedule, type):
        schedule = schedule()
    if not callable(schedule):
        raise TypeError(
            f"schedule: got a {type(schedule).__name__}, expected something callable Graph -> Plan"
        )
    return schedule


def _one_of(what: str, got: Any, known: list[str]) -> None:
    if got not in known:
        raise ValueError(f"{what}: got {got!r}, expected one of {', '.join(known)}{nearest(str(got), known)}")


def _positive(**counts: int) -> None:
    for what, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{what}: got {value!r}, expected a whole number of at least 1")
