"""A compiled training step, and what it becomes once the shapes of a batch are known.

The invariant: a Program holds no training state and does not change. What it makes on first need (the plan for
a batch's shapes, staging buffers, threads) is determined by it and kept for every later step.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from zfunc.core.graph import Graph, Region, Tier
from zfunc.core.layout import Layout
from zfunc.core.memory_model import Peak, peak_memory
from zfunc.core.plan import Plan, PlanError
from zfunc.core.recipes import Recipe, recipe_of, zero_offload
from zfunc.core.settings import Schedule, StepSettings
from zfunc.core.spec import SegmentCost, StepSpec
from zfunc.core.verifier import verify
from zfunc.engine.closure_facts import CapturedFacts
from zfunc.engine.cost_trace import Trace, nbytes, run_on_fake_tensors, silence_fake_errors, trace
from zfunc.engine.purity import check_deterministic
from zfunc.engine.segment import Segment
from zfunc.engine.stage_context import CompiledSegment, Stage
from zfunc.engine.state import State, allocate_regions
from zfunc.engine.vjp import MAX_TRACES, SegmentWeights
from zfunc.errors import OutOfMemory
from zfunc.optim.base import Optimizer
from zfunc.runtime.accelerator import available_bytes, on_accelerator, unplanned_bytes
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.executor import Executor, PreparedPlan, prepare_plan
from zfunc.runtime.host_memory import available_host_bytes
from zfunc.runtime.torch_dtypes import TORCH_DTYPES
from zfunc.values import of_type

T = TypeVar("T")

SHAPES = MAX_TRACES  # sets of batch shapes whose costs and plans are kept: a new one is traced
log = logging.getLogger("zfunc")
_identities = itertools.count(1)


@frozen(eq=False)
class Program:
    """A compiled training step: segments, layout, settings, schedule. Made by `zfunc.compile`.

    `plan` is the verified plan. Until a batch has been seen its activations count as 0 bytes, unless
    `compile` was given an example.
    """

    segments: tuple[Segment, ...] = field(repr=lambda s: f"<{len(s)} segments>")
    calls: tuple[CompiledSegment, ...] = field(repr=False)
    layout: Layout = field(repr=False)
    settings: StepSettings
    optimizer: Optimizer
    schedule: Schedule
    device: torch.device
    spec: StepSpec = field(repr=False)
    plan: Plan = field(repr=False)
    stages: dict[str, Stage] = field(repr=False)
    executor: Executor = field(repr=False)
    cache: "ProgramCache" = field(repr=False)
    ranks: RankGroup = field(factory=RankGroup, repr=False)
    recipe: Recipe = field(default=zero_offload, repr=False)  # of its plan
    identity: int = field(factory=_identities.__next__)

    @property
    def dtype(self) -> torch.dtype:
        """The precision parameters and gradients have on the device."""
        return TORCH_DTYPES[self.settings.precision]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """What its steps do: the first is that of the plan; they may need buffers the others do not."""
        later = (self.settings.delay_from or 0) > 1
        return (self.recipe, *((zero_offload,) if later else ()))


@frozen(eq=False)
class ShapedProgram:
    """A program for the shapes of one batch: the plan with real sizes, ready to issue."""

    spec: StepSpec
    plan: Plan
    prepared: PreparedPlan
    memory: dict[Tier, Peak]
    random: frozenset[int]  # segments that draw random numbers


@define(eq=False)
class ProgramCache:
    """What a Program keeps: costs and plans for the last SHAPES sets of batch shapes, and the staging buffers."""

    costs: dict[Any, tuple[StepSpec, frozenset[int]]] = field(factory=dict)
    specialized: dict[Any, ShapedProgram] = field(factory=dict)
    reached: dict[int, tuple[str, CapturedFacts]] = field(
        factory=dict
    )  # Python values that traced segments depend on
    overflowed: bool = False  # more shapes have come than are kept
    staging: dict[Region, Tensor] | None = None
    busy: threading.Lock = field(factory=threading.Lock)  # staging serves one step at a time


def check_program(program: Any, action: str) -> None:
    """Raise TypeError for what is no Program."""
    of_type(f"{action}: program", program, Program, "what zfunc.compile returns: pass that")


def check_state(program: Any, state: Any, action: str) -> None:
    """Raise unless `state` is one of `program`'s that may be used: TypeError, ValueError or DonatedStateError."""
    check_program(program, action)
    of_type(f"{action}: state", state, State, "what zfunc.init or the last step returned: pass that")
    state.check(program.identity, action)


def make_plan(spec: StepSpec, schedule: Schedule, recipe: Recipe | None = None) -> Plan:
    """Emit the recipe, let the schedule plan it, verify what it says."""
    graph = graph_of(recipe or recipe_of(spec), spec)
    plan = schedule(graph)
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"schedule: got {plan!r:.200} from {schedule!r:.200}, expected a Plan: return zfunc.core.plan.build("
            "graph, lanes), with the operations of each lane by their position in the graph"
        )
    verify(plan)
    if plan.graph != graph:
        raise PlanError(
            "got a plan of another graph, expected one of the graph the schedule was handed: return "
            "zfunc.core.plan.build(graph, lanes)"
        )
    networks = [lane.name for lane in plan.lanes if any(graph.ops[i].kind == "network" for i in lane.ops)]
    if spec.world > 1 and len(networks) > 1:
        raise PlanError(
            f"got collectives on the lanes {', '.join(networks)}, expected them on one: ranks must issue them in "
            "the same order, and two lanes have none. Put every operation of kind 'network' on one lane"
        )
    # The recipe's own graph has lifetimes and roles, which a plan that was read from text has not.
    return plan if plan.graph is graph else evolve(plan, graph=graph)


def graph_of(recipe: Recipe, spec: StepSpec) -> Graph:
    """The operations of a recipe. Raises TypeError or ValueError for a recipe that makes anything else."""
    ops = recipe(spec)
    if not isinstance(ops, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"recipe: got {ops!r:.200}, expected operations: yield each, or return a list of them"
        )
    return Graph(ops)


def rescheduled(program: Program, schedule: Schedule) -> Program:
    """The same program under another schedule, for the same States; what was traced is kept."""
    return evolve(
        program,
        schedule=schedule,
        plan=make_plan(program.spec, schedule, program.recipe),
        cache=ProgramCache(costs=program.cache.costs, reached=program.cache.reached),
    )


def specialize(
    program: Program, batch: tuple[Any, Any], *, save: bool = False, recipe: Recipe | None = None
) -> ShapedProgram:
    """The program for the shapes of `batch`; traced and planned the first time they are seen, and again if SHAPES
    others have come since. With `save` its steps write a checkpoint too. `recipe` is that of the program's plan, or
    another.

    Raises ValueError where a segment cannot take its input or the last one returns no scalar.
    """
    key = batch_key(program, batch)
    recipe = recipe or program.recipe
    _check_reached(program)
    cached, costs = program.cache.specialized, program.cache.costs
    if key not in costs:
        if not costs:
            _say_changed(program.segments)
        if len(costs) == SHAPES and not program.cache.overflowed:
            program.cache.overflowed = True
            log.warning(
                "batches of more than %d shapes: each that comes anew is traced and planned. Round lengths up to a "
                "few (docs/quickstart.md)",
                SHAPES,
            )
    spec, random = _recent(
        costs,
        key,
        lambda: traced_spec(program, split_batch(batch, program.settings.micro_batches)[0]),
        most=SHAPES,
    )
    made = (key, recipe, save)
    return _recent(
        cached, made, lambda: plan_recipe(program, evolve(spec, save=save), random, recipe), most=2 * SHAPES
    )


def _recent(cache: dict[Any, T], key: Any, make: Callable[[], T], *, most: int) -> T:
    """`cache[key]`, made if it is not there; of more than `most` the one longest unused is dropped."""
    cache[key] = value = cache.pop(key) if key in cache else make()
    while len(cache) > most:
        del cache[next(iter(cache))]
    return value


def _say_changed(segments: Iterable[Segment]) -> None:
    """Log what was changed in modules after segments were made of them: it has no effect."""
    for segment in segments:
        if what := segment.changed():
            log.warning(
                "segment %r: %s was changed after zfunc.segment copied the module, which has no effect: call "
                "zfunc.segment after such changes",
                segment.name,
                what,
            )


def _check_reached(program: Program) -> None:
    """Raise ValueError where a Python value has changed that a segment was traced with."""
    for name, facts in program.cache.reached.values():
        if moved := facts.moved():
            raise ValueError(
                f"segment {name!r}: got {moved}, changed since the segment was traced, expected the same value in "
                "every step: pass what changes in the batch, or compile again"
            )


def batch_key(program: Program, batch: tuple[Any, Any]) -> Any:
    """What batches have in common that a plan is good for."""
    leaves, structure = tree_flatten(split_batch(batch, program.settings.micro_batches)[0])
    return structure, tuple((t.shape, t.dtype) for t in leaves)


def specialize_without_batch(program: Program, recipe: Recipe, *, pending: bool) -> ShapedProgram:
    """What is done with a State without a batch, such as a checkpoint; planned the first time."""
    cached = program.cache.specialized
    if (recipe, pending) not in cached:
        spec = evolve(program.spec, pending=pending)
        cached[recipe, pending] = plan_recipe(program, spec, frozenset(), recipe)
    return cached[recipe, pending]


def split_batch(batch: tuple[Any, Any], micro_batches: int) -> list[tuple[Any, Any]]:
    """`batch` in equal parts along the first dimension of every tensor, as views."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"batch: got {type(batch).__name__}, expected a pair (inputs, targets)")
    strangers = {type(t).__name__ for t in tree_leaves(tuple(batch)) if not isinstance(t, Tensor)}
    if strangers:
        raise TypeError(f"batch: got {sorted(strangers)} in it, expected tensors: use torch.from_numpy, say")
    sizes = {t.shape[0] if t.dim() else 0 for t in tree_leaves(tuple(batch))}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"batch: got tensors of {sorted(sizes)} rows, expected one number above 0: give every tensor of "
            "inputs and targets the batch as its first dimension"
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


def staging_buffers(program: Program) -> dict[Region, Tensor]:
    """The program's own buffers: slots, sums, squares. Made once, pinned ones at their exact size."""
    if program.cache.staging is None:
        graphs = [graph_of(recipe, program.spec) for recipe in program.recipes]
        own = dict.fromkeys(r for graph in graphs for r in graph.regions if r.lifetime == "program")
        program.cache.staging = allocate_regions(own, program.dtype, program.device)
    return program.cache.staging


@contextmanager
def lock_staging(program: Program, action: str, refusal: str) -> Iterator[None]:
    """The program's staging buffers for one caller. RuntimeError, with `refusal`, where another has them."""
    program.executor.check_process(action)
    if not program.cache.busy.acquire(blocking=False):
        raise RuntimeError(f"{action}: {refusal}")
    try:
        yield
    finally:
        program.cache.busy.release()


def check_memory(program: Program, needed: dict[Tier, Peak], *, held: dict[Tier, int], action: str) -> None:
    """Raise OutOfMemory if `needed`, less what is `held` already, is more than there is."""
    want = {tier: peak.nbytes - held.get(tier, 0) for tier, peak in needed.items()}
    host = want["host"] + want["pinned"]
    on_cpu = not on_accelerator(program.device)
    checks = [("host", host + (want["device"] if on_cpu else 0), available_host_bytes())]
    if not on_cpu:
        free = available_bytes(program.device) - unplanned_bytes(program.device)
        checks.append(("device", want["device"], free))
    for what, bytes_needed, there in checks:
        if bytes_needed > there:
            at = needed["device"].op if what == "device" or on_cpu else ""
            raise OutOfMemory(
                f"{action}: needs {bytes_needed:,} bytes of {what} memory, {there:,} are there"
                f"{f' (the peak is at {at})' if at else ''}; nothing was allocated or started. Use more "
                "micro_batches, a smaller bucket_size, recompute='all', or a smaller model"
            )


def traced_spec(program: Program, micro: tuple[Any, Any]) -> tuple[StepSpec, frozenset[int]]:
    """The spec with the costs of such a micro-batch, and the segments that draw random numbers."""
    traces, random = _trace_all(program, micro)
    inputs = [nbytes(micro[0]), *(t.output_bytes for t in traces[:-1])]
    costs = tuple(
        _cost(t, size, program.spec.grad_bytes(i), call.passes.keeps)
        for i, (t, size, call) in enumerate(zip(traces, inputs, program.calls, strict=True))
    )
    return evolve(program.spec, costs=costs, target_bytes=nbytes(micro[1])), random


def plan_recipe(program: Program, spec: StepSpec, random: frozenset[int], recipe: Recipe) -> ShapedProgram:
    """A spec's recipe as the program's schedule plans it."""
    plan = make_plan(spec, program.schedule, recipe)
    return ShapedProgram(
        spec, plan, prepare_plan(plan, program.stages, program.device), peak_memory(plan), random
    )


def _cost(t: Trace, input_bytes: int, grad_bytes: int, keeps: bool) -> SegmentCost:
    """What a pass returns is a region of its own; what else its peak holds is workspace."""
    kept = t.residual_bytes if keeps else 0
    return SegmentCost(
        flops=t.forward_flops,
        backward_flops=t.backward_flops,
        input_bytes=input_bytes,
        residual_bytes=kept,
        forward_workspace=max(0, t.forward_peak - t.output_bytes - kept),
        backward_workspace=max(0, t.backward_peak - grad_bytes),
    )


def _trace_all(program: Program, micro: tuple[Any, Any]) -> tuple[list[Trace], frozenset[int]]:
    """Trace every segment on what its predecessor hands it, alike segments with alike inputs once; and find
    which draw random numbers."""
    seen: dict[Any, Trace] = {}
    traces: list[Trace] = []
    random: set[int] = set()
    x = tree_map_only(Tensor, lambda t: _fake(program, t), micro[0])
    targets = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), micro[1])
    last = len(program.segments) - 1
    for s, call in enumerate(program.calls):
        leaves, structure = tree_flatten(x)
        _check_real(program, s, leaves)
        key = (id(call.passes), structure, tuple((t.shape, t.stride(), t.dtype) for t in leaves))
        if key not in seen:
            seen[key] = _trace_one(program, s, (x, targets) if s == last else (x,))
        traces.append(seen[key])
        random |= {s} if seen[key].random else set()
        x = seen[key].out
    return traces, frozenset(random)


def _check_real(program: Program, s: int, leaves: list[Any]) -> None:
    """What segment `s` is handed: tensors, and none that a gradient would be lost of."""
    for t in leaves:
        if not isinstance(t, Tensor):
            got, mend = f"a {type(t).__name__}", "pass tensors, or close over it"
        elif t.is_complex():
            got, mend = "a complex tensor", "pass torch.view_as_real(x)"
        else:
            continue
        raise ValueError(
            f"segment {program.segments[s].name!r}: got {got} in its input, expected real tensors alone: {mend}"
        )


def _fake(program: Program, t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=program.dtype if t.is_floating_point() else t.dtype, device="meta")


@silence_fake_errors()
def _trace_one(program: Program, s: int, inputs: tuple[Any, ...]) -> Trace:
    segment, call, device = program.segments[s], program.calls[s], program.device
    values = {
        short: torch.empty(p.shape, dtype=program.dtype, device="meta")
        for short, p in zip(segment.short, segment.parameters, strict=True)
    }
    weights = (
        {short: values[short] for short in call.trained},
        {**{short: values[short] for short in call.fixed}, **call.constants},
    )

    def check(trained: Any, fixed: Any, inputs: Any) -> Any:
        y, facts = check_deterministic(segment, {**trained, **fixed}, inputs)
        program.cache.reached.setdefault(id(call.passes), (segment.name, facts))
        last = s == len(program.segments) - 1
        return y.float() if last and isinstance(y, Tensor) else y  # the loss is in fp32

    def prepare(trained: Any, fixed: Any, inputs: Any) -> None:
        call.plain.prepare(SegmentWeights(trained, fixed), inputs, y)

    def forward(trained: Any, fixed: Any, inputs: Any) -> Any:
        return call.plain.forward(SegmentWeights(trained, fixed), inputs)

    def backward(trained: Any, fixed: Any, inputs: Any, residuals: Any, cotangents: Any) -> Any:
        return call.plain.backward(SegmentWeights(trained, fixed), inputs, residuals, cotangents)

    try:
        y = run_on_fake_tensors(check, *weights, inputs, device=device)
        pulled = backward if s >= program.layout.first_trainable else None
        return trace(forward, pulled, *weights, inputs, device=device, prepare=prepare)
    except ValueError as error:
        if f"{segment.name!r}" in str(error):
            raise
        raise ValueError(f"segment {segment.name!r}: {error}") from error
    except DataDependentOutputException as error:
        raise ValueError(
            f"segment {segment.name!r}: got a branch on the value of a tensor, expected operations that depend "
            "on shapes alone: write it with torch.where, or move it between segments"
        ) from error
    except Exception as error:
        shapes = [tuple(t.shape) for t in tree_leaves(inputs)]
        raise ValueError(
            f"segment {segment.name!r}: got an error on inputs of shape {shapes}, expected it to run: "
            f"{type(error).__name__}: {error}"
        ) from error
