"""`compile`: segments and settings become a Program, planned and verified before anything is allocated.

All arguments are checked here, and nothing below checks them again.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from torch.distributed import ProcessGroup

from zfunc.core.keyword_settings import settings_with, takes_settings
from zfunc.core.layout import Layout, Parameter
from zfunc.core.recipes import Recipe, recipe_of
from zfunc.core.settings import Recompute, StepSettings
from zfunc.core.spec import StepSpec
from zfunc.engine.compile.cost_trace import nbytes
from zfunc.engine.compile.fit_to_memory import first_that_fits, fit_to_memory, log_offload
from zfunc.engine.compile.loss_outputs import checked_loss
from zfunc.engine.compile.program import Program, ProgramCache, make_plan
from zfunc.engine.compile.segment import Segment, check_memory_apart, gradient_hooks, refuse_hooks
from zfunc.engine.compile.sequential import segments_of_sequential
from zfunc.engine.compile.specialize import specialize
from zfunc.engine.compile.step_spec import check_recipe, choose_optimizer, make_spec, with_moments
from zfunc.engine.compile.vjp import Detached, Joints, SegmentVJP, make_vjp
from zfunc.engine.state.module_buffers import buffers_nbytes
from zfunc.engine.state.state import refuse_global_modes, refuse_inference_mode
from zfunc.engine.step.batches import Batch, unpacked
from zfunc.engine.step.stage_context import CompiledSegment, Stage
from zfunc.engine.step.stages import STAGES
from zfunc.errors import did_you_mean
from zfunc.optim.base import Optimizer
from zfunc.options import AUTO
from zfunc.runtime.accelerator import (
    best_precision,
    on_accelerator,
    pick_device,
    prepare_deterministic,
)
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.executor import Executor
from zfunc.runtime.thread_budget import default_threads
from zfunc.schedules import make_schedule
from zfunc.values import number, of_type

log = logging.getLogger("zfunc")


@takes_settings()
def compile(
    segments: Sequence[Segment] | nn.Sequential,
    settings: StepSettings | None = None,
    *,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    group: Any = None,
    recipe: Recipe | None = None,
    example: Batch | Mapping[str, Any] | None = None,
    stages: dict[str, Stage] | None = None,
    patience: float = 600.0,
    **changes: Any,
) -> Program:
    """Compile `segments` into a Program: lay them out, emit the recipe, plan it, verify the plan.

    `segments` may be an `nn.Sequential` that ends in a loss of (x, targets), such as `nn.CrossEntropyLoss()`: each
    child with parameters is a segment then.

    - `group`: the `torch.distributed` process group of the ranks; None is the default group if there is one. Each
      rank updates its slice of every bucket and passes its own rows of a batch.
    - `example`: a batch, as for `zfunc.train_step`, of which only shapes matter, to plan memory now.
    - `recipe`: the operations of a step in serial order: `zfunc.core.recipes.zero_offload`, or your own. New
      operations need a function each in `stages`.
    - `stages`: stage functions by verb, in addition to the built-in ones or instead of them.
    - `patience`: seconds that a lane waits for another before the step fails.

    The settings of the step, as `settings` or by name; names take precedence:

    {settings}

    Raises ValueError or TypeError for bad arguments, PlanError for a schedule whose plan is wrong.
    """
    refuse_inference_mode("compile")
    segments = _checked_segments(segments)
    example = None if example is None else unpacked(example, segments[-1])
    of_type("stages", stages, Mapping | None, "a dict or None: pass {verb: function}")
    patience = number("patience", patience, positive=True, most=threading.TIMEOUT_MAX)
    ranks, device = _ranks(group), pick_device(device)
    refuse_global_modes("compile", device)

    # Settings: by name, of the device, and what is "auto".
    by_default = settings is None and "precision" not in changes
    optimizer, settings = choose_optimizer(optimizer, settings_with(settings, changes))
    settings.check_folders()
    if by_default and on_accelerator(device):
        settings = evolve(settings, precision=best_precision(device))  # bf16, unless it would be emulated
    automatic = [*settings.automatic, *(["offload_ratio"] if settings.offload_ratio == AUTO else [])]
    if automatic and example is None:
        raise ValueError(
            f"{', '.join(automatic)}: got 'auto' without an example, expected one: pass a batch to plan memory"
        )
    if settings.automatic:
        same = {"optimizer": optimizer, "device": device, "group": group, "recipe": recipe, "stages": stages}
        make = partial(compile, segments, **same, example=example, patience=patience)
        ways = settings.placed(ranks.world, disk=bool(settings.swap))
        program = first_that_fits((partial(make, way) for way in ways), example)
        chosen = ", ".join(f"{name}={getattr(program.settings, name)!r}" for name in settings.automatic)
        log.info("chosen where the settings say auto: %s", chosen)
        return program
    optimizer = with_moments(optimizer, settings)
    settings = settings.scheduled(on_cpu=not on_accelerator(device))

    # Spec: the layout of the parameters, and what a recipe asks of the settings.
    spec = spec_of(segments, optimizer, settings, world=ranks.world, on_gpu=on_accelerator(device))
    if spec.stateful and spec.swaps:
        raise ValueError(
            f"state_on: got {settings.state_on!r} with buffers that forward changes in segment "
            f"{segments[spec.stateful[0]].name!r} (running statistics), which a swap space does not have: expected "
            "state_on='host'; activations_on='disk' works"
        )

    # Graph and plan: the recipe's operations, scheduled and verified.
    schedule, functions = make_schedule(settings.schedule), {**STAGES, **(stages or {})}
    if recipe is not None:
        check_recipe(recipe, spec, functions)
    recipe = recipe or recipe_of(spec)
    plan = make_plan(spec, schedule, recipe)

    # Program: the passes of the segments, and the lanes that run them.
    if settings.deterministic:
        prepare_deterministic(device)
    default_threads()  # chosen and logged before any lane runs
    program = Program(
        segments=segments,
        calls=segment_calls(segments, spec.layout, settings, device),
        settings=settings,
        optimizer=optimizer,
        schedule=schedule,
        device=device,
        spec=spec,
        plan=plan,
        stages=functions,
        executor=Executor(device, patience=patience, deterministic=settings.deterministic),
        cache=ProgramCache(),
        ranks=ranks,
        recipe=recipe,
    )
    if example is not None:
        program = fit_to_memory(program, example) if settings.offload_ratio == AUTO else program
        program = evolve(program, plan=specialize(program, example).plan)
    return log_offload(program)


def spec_of(
    segments: Sequence[Segment], optimizer: Optimizer, settings: StepSettings, *, world: int, on_gpu: bool
) -> StepSpec:
    """The spec of one rank of `world`; the costs are 0 until the shapes of a batch are known."""
    spec = make_spec([s.parameters for s in segments], optimizer, settings, world=world, on_gpu=on_gpu)
    return evolve(spec, constant_bytes=constant_bytes(segments), buffer_bytes=buffer_bytes(segments))


def constant_bytes(segments: Sequence[Segment]) -> int:
    """Device memory of what the segments read and never train, beside parameters."""
    return sum(nbytes(s.constants) for s in segments)


def buffer_bytes(segments: Sequence[Segment]) -> list[int]:
    """Device memory of what the forward of each segment changes."""
    return [buffers_nbytes(s.buffers) for s in segments]


def _checked_segments(segments: Sequence[Segment] | nn.Sequential) -> tuple[Segment, ...]:
    if isinstance(segments, nn.Sequential):
        segments = segments_of_sequential(segments)
    of_type(
        "segments",
        segments,
        Iterable,
        "a list of Segments: pass [segment, ...], an nn.Sequential that ends in a loss, or for a model of "
        "transformers zfunc.hf.segments(model)",
    )
    segments = tuple(segments)
    if not segments:
        raise ValueError(
            "segments: got none, expected at least one: pass them, the last one ending in the loss"
        )
    for s in segments:
        if not isinstance(s, Segment):
            raise TypeError(
                f"segments: got a {type(s).__name__}, expected Segments: use zfunc.segment(name, module)"
            )
    for name, times in Counter(s.name for s in segments).items():
        if times > 1:
            raise ValueError(f"segments: got two named {name!r}, expected unique names: rename one")
    known: dict[str, Parameter] = {}
    origins: dict[int, str] = {}
    for s in segments:
        for name, p in _owned(s).items():
            if name in known:
                raise ValueError(
                    f"segments: got two parameters named {name!r}, expected unique names: rename "
                    f"segment {s.name!r}, or tie them with share="
                )
            known[name] = p
        for name, tensor in s.origins.items():
            if gradient_hooks(tensor):
                refuse_hooks(s.name, f"parameter {name!r}")
            if origins.setdefault(id(tensor), name) != name and name not in s.shared:
                raise ValueError(
                    f"segments: got one tensor as {origins[id(tensor)]!r} and {name!r}, expected tied parameters "
                    f"to be declared: segment({s.name!r}, ..., share={{...: {origins[id(tensor)]!r}}})"
                )
    check_memory_apart("segments", {name: t for s in segments for name, t in s.origins.items()})
    changed: dict[int, str] = {}
    for s in segments:
        for short, tensor in s.changed_tensors.items():
            other = changed.setdefault(tensor, name := f"{s.name}.{short}")
            if other != name:
                raise ValueError(
                    f"segments: got one buffer as {other!r} and {name!r}, which forward changes in both, expected "
                    "each segment to have its own: put both uses into one segment, or copy the module"
                )
    for s in segments:
        for short, p in zip(s.short, s.parameters, strict=True):
            if p.name not in known:
                raise ValueError(
                    f"segment {s.name!r}: {short} is shared with {p.name!r}, which no segment has"
                    f"{did_you_mean(p.name, list(known))}: pass the full name, 'segment.name in its module'"
                )
            if p.shape != known[p.name].shape:
                raise ValueError(
                    f"segment {s.name!r}: {short} has shape {p.shape}, but {p.name!r}, which it shares, has "
                    f"{known[p.name].shape}: tied parameters have one shape"
                )
    return segments


def _owned(segment: Segment) -> dict[str, Parameter]:
    return {p.name: p for p in segment.parameters if p.name not in segment.shared}


def segment_calls(
    segments: Sequence[Segment],
    layout: Layout,
    settings: StepSettings,
    device: torch.device,
    joints: dict[str, Joints] | None = None,
) -> tuple[CompiledSegment, ...]:
    """The segments with their forward and backward; equal segments share these, to be traced or compiled once; with
    the same `joints` also those that recompute otherwise."""
    compiled = settings.compile_segments
    trainable = {span.name for span in layout.spans}
    pairs: list[tuple[Segment, tuple[Any, ...], tuple[SegmentVJP, SegmentVJP]]] = []
    calls: list[CompiledSegment] = []
    last = len(segments) - 1
    for s, segment in enumerate(segments):
        keep: Recompute = settings.recompute_of(s, len(segments))
        if s == last and keep == "all":
            keep = "min-cut" if compiled else "none"
        options = (keep, s > layout.first_trainable, s == last)
        pair = next((p for other, same, p in pairs if same == options and segment.like(other)), None)
        if pair is None:
            function = _with_buffers(segment, checked_loss if s == last else _function)
            make = partial(
                make_vjp,
                function,
                recompute=keep,
                wrt_input=options[1],
                last=s == last,
                moving=settings.moves,
                name=segment.name,
                joints=None if joints is None else joints.setdefault(segment.name, {}),
            )
            eager = make()
            pair = make(compiled=True) if compiled else eager, eager
            pairs.append((segment, options, pair))
        names = segment.by_short
        calls.append(
            CompiledSegment(
                segment.name,
                *pair,
                {short: full for short, full in names.items() if full in trainable},
                {short: full for short, full in names.items() if full not in trainable},
                {short: t.to(device) for short, t in segment.constants.items()},
                {short: t.to("meta") for short, t in segment.buffers.items()},
            )
        )
    return tuple(calls)


def _function(segment: Segment) -> Callable[..., Any]:
    return segment.function


def _with_buffers(segment: Segment, checked: Callable[[Segment], Callable[..., Any]]) -> Callable[..., Any]:
    """`checked(segment)`; if it changes buffers it returns `(y, buffers)`, and only `y` is differentiated."""
    if not segment.buffers:
        return checked(segment)

    def function(*args: Any) -> tuple[Any, Detached]:
        changed: list[Any] = []

        def output(*args: Any) -> Any:
            y, buffers = segment.function(*args)
            changed.append(buffers)
            return y

        y = checked(evolve(segment, function=output))(*args)
        return y, Detached((), *changed)

    return function


def _ranks(group: Any) -> RankGroup:
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group: got {group!r}, expected a torch.distributed process group that this rank is in, or None: "
            "make one with torch.distributed.new_group"
        )
    ranks = RankGroup.of(group)
    if ranks.world > 1:
        try:
            (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            raise ValueError(
                f"group: got one without a backend for host tensors ({error}), expected one: pass "
                'init_process_group("cpu:gloo,cuda:nccl")'
            ) from error
    return ranks
