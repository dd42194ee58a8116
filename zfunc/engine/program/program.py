"""`Program`: a compiled training step, its verified plan and its staging buffers.

A Program holds no training state. Plans for the shapes of a batch, staging buffers and threads follow from its
fields; they are created on first use and cached for later steps.
"""

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.checkpoint.writer import all_or_none
from zfunc.core.display import brief, html_table
from zfunc.core.graph import Graph, Region, Tier, of_stage
from zfunc.core.layout import Layout
from zfunc.core.memory_model import Peak
from zfunc.core.methods import in_notebook
from zfunc.core.pipeline import B, F
from zfunc.core.plan import Plan, project
from zfunc.core.recipes import Recipe, flush_recipe, zero_offload
from zfunc.core.setting_values import TIERS_OF, Schedule
from zfunc.core.settings import StepSettings
from zfunc.core.shares import words_of
from zfunc.core.spec import StepSpec
from zfunc.core.verifier import plan_with
from zfunc.engine.stages.stage_context import CompiledSegment, Stage
from zfunc.engine.state.memory import allocate_regions
from zfunc.engine.state.state import Buffers, State
from zfunc.engine.trace.fake_tensors import FakeTensors
from zfunc.engine.trace.joint_graph import Joints
from zfunc.engine.trace.look import Look
from zfunc.engine.trace.module_buffers import buffer_views
from zfunc.engine.trace.outside import Outside
from zfunc.engine.trace.segment import Segment
from zfunc.errors import PlanError, setting
from zfunc.optim.base import Optimizer
from zfunc.runtime.accelerator import in_turn, on_accelerator, room_for_tensors
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.executor import Executor
from zfunc.runtime.memory_limits import available_host_bytes
from zfunc.runtime.prepared_plan import PreparedPlan
from zfunc.runtime.torch_dtypes import TORCH_DTYPES
from zfunc.values import of_type

Made = TypeVar("Made")
_identities = itertools.count(1)
log = logging.getLogger("zfunc")


@frozen(eq=False)
class Program:
    """A compiled training step: segments, layout, settings, schedule. Made by `zfunc.compile`.

    `plan` is the verified plan. If `compile` got no `example`, the plan counts activations as 0 bytes.
    """

    segments: tuple[Segment, ...] = field(repr=lambda s: f"<{len(s)} segments>")
    calls: tuple[CompiledSegment, ...] = field(repr=False)
    optimizer: Optimizer
    schedule: Schedule
    devices: tuple[torch.device, ...]
    spec: StepSpec = field(repr=False)
    plan: Plan = field(repr=False)
    stages: dict[str, Stage] = field(repr=False)
    executor: Executor = field(repr=False)
    cache: "ProgramCache" = field(repr=False)
    ranks: RankGroup = field(factory=RankGroup, repr=False)
    recipe: Recipe = field(default=zero_offload, repr=False)  # of `plan`
    identity: int = field(factory=_identities.__next__)

    def __repr__(self) -> str:
        return brief(self, "segments", "settings", "optimizer", "device", "plan")

    def _repr_html_(self) -> str:
        rows = [(name, getattr(self, name)) for name in ("settings", "optimizer", "device", "layout")]
        return html_table(["program", ""], rows) + in_notebook("plan", self.plan)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Program has threads and memory of this process and cannot be copied or pickled: call zfunc.compile "
            "again, there"
        )

    @property
    def device(self) -> torch.device:
        """The device that the program runs on, or the first of several."""
        return self.devices[0]

    def local(self, device: int) -> int:
        """The index in this process's `devices` of device number `device` of the plan; with pp 0, as a rank
        has one device."""
        return device if len(self.devices) > 1 else 0

    @cached_property
    def memories(self) -> dict[Tier, torch.device]:
        """The program's accelerators by the name of their memory in plans, as "device:1"; {} on a CPU."""
        apart = self.devices if on_accelerator(self.device) else ()
        return {Region("", device=n).place: device for n, device in enumerate(apart)}

    @property
    def layout(self) -> Layout:
        """The layout of the parameters of the program's model in buckets."""
        return self.spec.layout

    @property
    def settings(self) -> StepSettings:
        """The settings of the program's steps."""
        return self.spec.settings

    @property
    def dtype(self) -> torch.dtype:
        """The dtype, by the setting `precision`, of inputs and most parameters and gradients on devices."""
        return TORCH_DTYPES[self.settings.precision]

    @cached_property
    def shards(self) -> tuple[slice, ...]:
        """This rank's elements of each bucket, relative to the start of the bucket."""
        return tuple(map(self.ranks.shard, self.layout.all_buckets))

    @property
    def swap_folders(self) -> list[Path]:
        """The absolute paths of the folders for data on the disk, one for each drive; [] if no optimizer
        state is there."""
        folders = self.settings.swap if self.spec.swaps else ()
        return [Path(folder).expanduser().absolute() for folder in folders]

    def commits(self, step: int) -> bool:
        """Whether, by the setting `commit_every`, the step that follows `step` updates commits a State to the
        swap space: the State after it, or with `defer` the State before it, whose update this step makes."""
        committed = step if self.spec.deferred else step + 1
        return self.spec.swaps and committed % self.settings.commit_every == 0

    def close_swap(self) -> None:
        """Close the program's swap space (files of training state on disk), if it is open. Only the last
        commit remains there."""
        former = self.cache.swap
        if former is not None:
            former.close()
        self.cache.swap = None


@frozen(eq=False)
class ShapedProgram:
    """A program planned for batches of certain shapes: `plan`, this rank's, with real sizes and prepared for
    execution, and `whole`, that of all pipeline stages."""

    spec: StepSpec
    plan: Plan
    whole: Plan
    prepared: PreparedPlan
    memory: dict[Tier, Peak]
    needed: dict[str, int]  # bytes that a step allocates and frees again, as `needed_bytes`
    slots: tuple[Region, ...]  # those in `whole` for activations, which wait in them for backward
    random: frozenset[int]  # segments that draw random numbers


@frozen(eq=False)
class KindsSeen:
    """For batches of equal shapes whose values also decide what is traced: the kinds of micro-batches seen so
    far, `spec` with the largest sizes of any of them (`number` counts its changes), and `random`, the
    segments that draw random numbers."""

    kinds: frozenset[Any]
    spec: StepSpec
    random: frozenset[int]
    number: int = 0


@define(eq=False)
class ProgramCache:
    """What a program makes at first use: costs and plans for the last 64 batch shapes, staging buffers."""

    costs: OrderedDict[Any, tuple[StepSpec, frozenset[int]]] = field(factory=OrderedDict)
    seen: OrderedDict[Any, KindsSeen] = field(factory=OrderedDict)  # by layout of a batch, values left out
    specialized: OrderedDict[Any, ShapedProgram] = field(factory=OrderedDict)
    outside: dict[int, tuple[Segment, Outside]] = field(factory=dict)  # of traces that it made itself
    checked: dict[Any, Any] = field(factory=dict)  # outputs of pure segments, by name and layout of the input
    _fake: FakeTensors | None = field(default=None, init=False)
    joints: dict[str, Joints] = field(factory=dict)  # by segment, where programs share this cache
    overflowed: bool = False  # more shapes have come than are cached
    looks: dict[str, Look] = field(factory=dict)  # at the modules of segments, before the last step
    compared_loss: bool = False  # whether a step has compared a loss with those of its halves
    said: set[Any] = field(factory=set)  # warnings that have been logged, each once, and of what
    staging: dict[Region, Any] = field(factory=dict)  # of activations those of the largest batch so far
    # By State, updates over its buffers and those of staging, which `release` drops.
    prepared: WeakKeyDictionary[Buffers, dict[Any, Any]] = field(factory=WeakKeyDictionary[Buffers, Any])
    # Bytes of the slots for activations in `staging`, of other stages too.
    slots: dict[Region, int] = field(factory=dict)
    released: tuple[Region, ...] = ()  # those of `staging` that `release` has freed
    # Of segments, by device and segment number: those of all or, at first and after `release`, of none.
    constants: dict[tuple[int, int], dict[str, Tensor]] = field(factory=dict)
    swap: SwapSpace | None = None  # of its last State
    busy: threading.Lock = field(factory=threading.Lock)  # staging serves one step at a time

    @property
    def fake(self) -> FakeTensors:
        """The mode of the program's traces, made at the first, as torch formats the caller's stack for each mode.
        Traces of one program come one at a time, under `busy`."""
        self._fake = self._fake or FakeTensors(allow_non_fake_inputs=True)
        return self._fake


def warn_once(program: Program, warning: str, names: tuple[str, ...] = (), of: Any = None) -> None:
    """Log `warning`, followed by parameters' `names`, unless this program has logged it for these names; or, if
    given, of the same `of`."""
    if (key := (names, of or warning)) not in program.cache.said:
        program.cache.said.add(key)
        log.warning("%s%s", f"{', '.join(names)}: " if names else "", warning)


def check_program(program: Any, action: str) -> None:
    """Raise TypeError, for the call `action`, unless `program` is a Program."""
    of_type(f"{action}: program", program, Program, "the Program that zfunc.compile returned: pass it")


def check_owner(program: Any, state: Any, action: str) -> None:
    """Raise TypeError, ValueError or DonatedStateError, for the call `action`, unless `program` may use `state`."""
    check_program(program, action)
    of_type(f"{action}: state", state, State, "the State that zfunc.init or the last step returned: pass it")
    if state.program != program.identity:
        raise ValueError(
            f"{action}: got a state made by another program, expected one from zfunc.init with this "
            "program, because programs lay out their buffers differently: pass zfunc.params of the other to "
            "init(program, params=...)"
        )
    state.buffers.owner.check(state.generation, state.step, action)


def make_plan(spec: StepSpec, schedule: Schedule, recipe: Recipe) -> Plan:
    """The verified plan of a step: the recipe's operations for `spec`, of all pipeline stages, put on lanes
    by `schedule`. Raises PlanError for a wrong plan."""
    plan = plan_with(schedule, Graph(recipe(spec)))
    ops = plan.graph.ops
    networks: dict[tuple[bool, int], dict[str, None]] = {}  # of each stage, and of all together
    for lane in plan.lanes:
        for op in (ops[i] for i in lane.ops if ops[i].kind == "network"):
            networks.setdefault((op.joint, op.device), {})[lane.name] = None
    most = max(networks.values(), key=len, default={})
    if spec.mesh.several_ranks and len(most) > 1:
        raise PlanError(
            f"got collectives on the lanes {', '.join(most)}, expected them on one: ranks have to issue "
            "them in one order. Put every operation of kind 'network' on one lane"
        )
    return plan


def rescheduled(program: Program, schedule: Schedule) -> Program:
    """The program with another schedule, for the same States; both share traces, and constants till a release."""
    cache = program.cache
    return evolve(
        program,
        schedule=schedule,
        plan=project(make_plan(program.spec, schedule, program.recipe), program.spec.stage),
        cache=ProgramCache(costs=cache.costs, outside=cache.outside, constants=cache.constants),
    )


def allocate_on_all(program: Program, allocate: Callable[[], Made]) -> Made:
    """Return `allocate()`. If the program uses the disk, this is a collective: a failure on one rank raises
    on every rank."""
    return all_or_none(program.ranks, allocate) if program.spec.uses_disk else allocate()


def staging_buffers(program: Program, shaped: ShapedProgram | None = None) -> dict[Region, Any]:
    """The memory of regions whose content lives for one step, by region: slots, gradient sums, sums of
    squares. Allocated at the first call and kept; activation slots are allocated anew if the plan of `shaped`
    needs larger ones. What `release` has freed is brought back, and constants of segments are
    copied to the devices that use them, unless they are there.

    A collective if some of the buffers are on the disk.
    """
    staging = program.cache.staging
    allocate = partial(allocate_regions, devices=program.devices, folders=program.settings.swap)
    if not (staging or program.cache.released):
        spec = evolve(program.spec, commit=program.spec.swaps)  # a step that commits needs all of them
        recipes = (program.recipe, *((flush_recipe,) if spec.deferred else ()))  # yours may have other copies
        of_all = (r for recipe in recipes for r in Graph(recipe(spec)).regions)
        regions = dict.fromkeys(of_stage(of_all, spec.stage))
        staging.update(allocate(r for r in regions if r.lifetime == "program" and r.role != "act"))
    if program.cache.released:
        staging.update(allocate(program.cache.released))
        program.cache.released = ()
    if not program.cache.constants:
        program.cache.constants.update(_constants(program))
    if shaped is not None and _lacks_slots(program, shaped):
        for r in [r for r in staging if r.role == "act"]:  # before the new ones are allocated
            del staging[r]
        program.cache.slots.clear()
        staging.update(allocate_on_all(program, partial(allocate, activation_slots(shaped.plan))))
        program.cache.slots |= {r: r.nbytes for r in shaped.slots}
    return staging


def _constants(program: Program) -> dict[tuple[int, int], dict[str, Tensor]]:
    """The constants of segments, by device and segment number, on the devices that use them."""
    every, mesh = range(len(program.segments)), program.spec.mesh
    return {
        (n, s): {x: t.to(device) for x, t in program.segments[s].constants.items()}
        for n, device in enumerate(program.devices)
        for s in (every if mesh.over_ranks else mesh.segments_on(n, F, B))
    }


def module_buffers(program: Program, buffers: Buffers, s: int) -> dict[str, Tensor]:
    """The module buffers that forward of segment `s` changes, by short name, as views of memory in a State's
    `buffers`; {} if another rank has them."""
    flat = buffers.memory.get(Region("module_buffers", (s,)))
    return {} if flat is None else buffer_views(flat, program.calls[s].buffers)


def activation_slots(plan: Plan) -> tuple[Region, ...]:
    """The regions in `plan` of all slots for activations, which wait in them for backward."""
    return tuple(r for r in plan.graph.regions if r.role == "act")


def _lacks_slots(program: Program, shaped: ShapedProgram) -> bool:
    """Whether activation slots, of this or another pipeline stage, are too few or small for `shaped`."""
    return any(program.cache.slots.get(r, -1) < r.nbytes for r in shaped.slots)


def left_to_allocate(program: Program, shaped: ShapedProgram) -> dict[str, int]:
    """Bytes that the next step has yet to allocate, as `needed_bytes`: not what is kept between steps, but
    activation slots where those of earlier steps are too small."""
    if not _lacks_slots(program, shaped):
        return shaped.needed
    allocated = {tier: peak.kept for tier, peak in shaped.memory.items()}
    for r in activation_slots(shaped.plan):
        allocated[r.place] -= r.nbytes
    for r, slot in program.cache.staging.items():
        allocated[r.place] += slot.nbytes if r.role == "act" else 0  # freed before
    return needed_bytes(program, shaped.memory, allocated)


@contextmanager
def on_compute_stream(program: Program, device: int = 0) -> Iterator[None]:
    """A context for device work outside of a step: it is queued on the streams of the compute lanes, and
    `device` is the current device. Torch has memory pools by stream, so memory freed here can serve the next
    step."""
    with ExitStack() as working:
        for n in sorted(range(len(program.memories)), key=device.__eq__):  # it is the current one
            working.enter_context(in_turn(program.executor.stream(_computing(program.plan, n), n)))
        yield


def _computing(plan: Plan, device: int) -> str:
    """The name of the first lane of `plan` with a compute operation of device number `device`."""
    ops = plan.graph.ops
    computing = (
        x.name for x in plan.lanes for i in x.ops if (ops[i].kind, ops[i].device) == ("compute", device)
    )
    return next(computing, plan.lanes[0].name)


@contextmanager
def lock_staging(program: Program, action: str, *, patience: float = 0.0) -> Iterator[None]:
    """A context in which the caller alone uses the staging buffers. Raises RuntimeError for `action` if
    another caller has them for `patience` seconds."""
    program.executor.check_process(action)
    busy, held = program.cache.busy, list[bool]()
    try:
        # One call of C: an interrupt comes before it or after it.
        held += map(busy.acquire, (True,), (patience,))
        if not held[0]:
            raise RuntimeError(
                f"{action}: got a program that is in a step already, expected one call at a time, because its "
                "staging buffers are shared: call it after the step, to save in one pass save= to train_step, or "
                "compile a second program for a second thread"
            )
        yield
    finally:
        if held and held[0]:  # no call, or an interrupt could come before the next line
            busy.release()


def check_memory(program: Program, peaks: dict[Tier, Peak], *, action: str) -> None:
    """Raise OutOfMemory, on every rank, if on any the planned `peaks` exceed free memory. A collective."""
    shortage = memory_shortage(program, peaks, needed_bytes(program, peaks), action=action)
    program.ranks.agree(action, shortage=shortage)


def needed_bytes(
    program: Program, peaks: Mapping[Tier, Peak], allocated: Mapping[Tier, int] | None = None
) -> dict[str, int]:
    """Bytes still to be allocated: `peaks` less `allocated`, by memory: each device, then "host"; on a CPU
    all in "host"."""
    left = {place: peak.nbytes - (allocated or {}).get(place, 0) for place, peak in peaks.items()}
    devices = {place: n for place, n in left.items() if place.startswith("device")}
    host = left["host"] + left["pinned"]
    if on_accelerator(program.device):
        return {**devices, "host": host}
    return {"host": host + sum(devices.values())}


def memory_shortage(
    program: Program, peaks: dict[Tier, Peak], needed: Mapping[str, int], *, action: str
) -> str:
    """The message of an OutOfMemory error if the bytes `needed`, of a plan with `peaks`, exceed this rank's
    free memory; "" if they fit."""
    apart = program.memories
    free = {"host": available_host_bytes(), **{x: room_for_tensors(device) for x, device in apart.items()}}
    for memory, available in free.items():
        if needed.get(memory, 0) > available:
            op = "" if apart and memory == "host" else peaks[memory if apart else "device"].op
            several = len(apart) > 1 and memory in apart
            fewer = " fewer segments on it (`cut` of the order)," if several else ""
            return (
                f"{action}: needs {needed[memory]:,} bytes of {memory} memory, {available:,} are free"
                f"{f' (the peak is at {op})' if op else ''}; nothing was allocated or started"
                f"{kept_in(program, memory)}. Use{fewer} "
                f"more `micro_batches`, a smaller `bucket_size`, {setting('recompute', 'all')}, or a smaller model"
            )
    return ""


def kept_in(program: Program, memory: str) -> str:
    """A clause for error messages that names the settings which keep data in `memory` ("host" or a device's)
    that could be elsewhere; "" if there is none."""
    spec, settings, usual = program.spec, program.settings, StepSettings()
    placed = (
        (x, getattr(settings, x)) for x in (*TIERS_OF, "keys_on") if memory == "host" and x != "state_on"
    )
    kept = [x for x, place in placed if "host" in words_of(place) and place != getattr(usual, x)]
    if memory != "host" or not on_accelerator(program.device):
        persistent = settings.streams and any(x.persistent for x in spec.layout.all_buckets)
        kept += ["state_on"] * bool(spec.resident) + ["persistent_params"] * persistent
    reasons = " and ".join(setting(x, getattr(settings, x)) for x in kept)
    return f"; {reasons} keeps state, parameters or activations there" if kept else ""
