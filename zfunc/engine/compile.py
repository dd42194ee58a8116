"""`compile`: segments and settings become a Program, planned and verified before anything is allocated.

All arguments are checked here; packages below do not check them again.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from zfunc.core.graph import Graph
from zfunc.core.methods import above
from zfunc.core.plan import Plan, project
from zfunc.core.recipes import Recipe, recipe_of
from zfunc.core.setting_docs import takes_settings
from zfunc.core.settings import StepSettings, settings_with
from zfunc.engine.program.fit_to_memory import (
    first_cut_that_fits,
    first_places_that_fit,
    fit_to_memory,
    log_offload,
)
from zfunc.engine.program.passes import segment_calls
from zfunc.engine.program.program import Program, ProgramCache, make_plan
from zfunc.engine.program.step_spec import check_recipe, choose_optimizer, make_spec
from zfunc.engine.stages.stage_context import Stage
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.trace.batches import Batch, unpacked
from zfunc.engine.trace.joint_graph import check_device_graphs
from zfunc.engine.trace.model_segments import checked_segments, ends_in_loss
from zfunc.engine.trace.pass_options import pass_options
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.thread_modes import refuse_global_modes, refuse_inference_mode
from zfunc.errors import SettingTypeError, refuse, setting
from zfunc.optim.base import Optimizer
from zfunc.runtime.accelerator import (
    are_peers,
    best_precision,
    devices_from,
    on_accelerator,
    pick_device,
    prepare_deterministic,
)
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.executor import Executor
from zfunc.runtime.stage_ranks import ranks_of_stage
from zfunc.runtime.thread_budget import default_threads
from zfunc.schedules import make_schedule
from zfunc.values import number, of_type


@takes_settings()
def compile(
    segments: Sequence[Segment] | nn.Module,
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

    `segments` may be a module with a loss of its own, which `zfunc.segments` cuts by the `example`, and more finely
    than by default where a step would not fit the device otherwise, as the log says; with a loss of (output,
    targets), pass `zfunc.segments(model, example, loss)`. An `nn.Sequential` that ends in a loss
    of (x, targets), such as `nn.CrossEntropyLoss()`, needs no example: each child with parameters is a segment.

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
    of_type("stages", stages, Mapping | None, "a dict or None: pass {verb: function}")
    patience = number("patience", patience, positive=True, most=threading.TIMEOUT_MAX)
    device = pick_device(device)
    refuse_global_modes("compile", device)
    on_gpu = on_accelerator(device)

    # 1. Settings: those by name, and the device's own.
    if settings is None and "precision" not in changes and on_gpu:
        changes["precision"] = best_precision(device)  # bf16, unless it would be emulated
    settings = settings_with(settings, changes).scheduled(on_cpu=not on_gpu)
    settings.check_folders()

    # 2. A module in the coarsest cut that fits, and in place of "auto" the nearest places that fit.
    same = {"optimizer": optimizer, "device": device, "group": group, "recipe": recipe, "stages": stages}
    again = partial(compile, **same, example=example, patience=patience)
    whole = not isinstance(segments, nn.Sequential) or (example is not None and not ends_in_loss(segments))
    if isinstance(segments, nn.Module) and whole:
        if example is None:
            by_hand = "the segments of zfunc.segments(model, example, loss)"
            do = f"pass `example`, to cut the module by, or {by_hand}"
            refuse("example", f"none with a {type(segments).__name__}", "a batch", do)
        return first_cut_that_fits(
            above("cuts")(segments, example), partial(again, settings=settings), example
        )
    segments = checked_segments(segments)
    batch = None if example is None else unpacked(example, segments[-1])
    optimizer, settings = choose_optimizer(optimizer, settings)
    ranks = ranks_of_stage(_ranks(group), settings.pp)
    automatic = [*settings.automatic, *(["state_on"] if settings.fits_state else [])]
    if automatic and batch is None:
        got = " and ".join(setting(name, getattr(settings, name)) for name in automatic)
        expected = "a batch, whose memory decides what fits"
        refuse("example", f"none with {got}", expected, "pass one, or values without 'auto'")
    if settings.automatic:
        return first_places_that_fit(partial(again, segments), settings, optimizer, batch, device, ranks)
    devices = devices_from(device, settings.devices)
    if settings.compile_segments == "reduce-overhead" and on_gpu:
        check_device_graphs(len(devices) > 1)

    # 3. Spec: the layout of the parameters, and what a recipe asks of the settings.
    spec = make_spec(
        [s.parameters for s in segments],
        optimizer,
        settings,
        world=ranks.world,
        stage=ranks.stage,
        peers=are_peers(devices),
        on_gpu=on_gpu,
        constant_bytes=sum(s.constant_bytes for s in segments),
        buffer_bytes=[s.buffer_bytes for s in segments],
    )
    if spec.stateful and spec.swaps:
        buffers = f"buffers that forward changes in segment {segments[spec.stateful[0]].name!r}"
        got = f"{settings.state_on!r} with {buffers} (running statistics), which a swap space does not have"
        do = f"expected {setting('state_on', 'host')}; {setting('activations_on', 'disk')} works"
        refuse("state_on", got, do=do)

    # 4. Graph and plan: the recipe's operations, scheduled and verified. Without a batch they have no costs; with
    #    one they wait for its costs, because many operations take longer to plan than a few segments to trace.
    schedule, functions = make_schedule(settings.schedule), {**STAGES, **(stages or {})}
    if recipe is not None:
        check_recipe(recipe, spec, functions)
    recipe = recipe or recipe_of(spec)
    plan = Plan(Graph(()), (), ())
    if batch is None:
        plan = project(make_plan(spec, schedule, recipe), spec.stage)

    # 5. Program: the passes of the segments, the lanes that run them, and the plan for the shapes of a batch.
    if settings.deterministic:
        prepare_deterministic(device)
    default_threads()  # chosen and logged before any lane runs
    program = Program(
        segments=segments,
        calls=segment_calls(segments, pass_options(spec), spec),
        optimizer=optimizer,
        schedule=schedule,
        devices=devices,
        spec=spec,
        plan=plan,
        stages=functions,
        executor=Executor(*devices, patience=patience, deterministic=settings.deterministic),
        cache=ProgramCache(),
        ranks=ranks,
        recipe=recipe,
    )
    if batch is not None:
        program = fit_to_memory(program, batch)
    return log_offload(program)


def _ranks(group: Any) -> RankGroup:
    if group is not None and not isinstance(group, ProcessGroup):
        expected = "a torch.distributed process group that this rank is in, or None"
        refuse("group", repr(group), expected, "make one with torch.distributed.new_group", SettingTypeError)
    ranks = RankGroup.of(group)
    if ranks.world > 1:
        try:
            (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            got = f"one without a backend for host tensors ({error})"
            refuse("group", got, "one", 'pass init_process_group("cpu:gloo,cuda:nccl")', cause=error)
    return ranks
