"""Makes a `StepSpec` of parameters, optimizer and settings, and checks a recipe of your own. Without torch."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from attrs import evolve, field, fields, frozen

from zfunc.core.bucketing import in_buckets, lay_out
from zfunc.core.decision import ops_unguarded_by_decision
from zfunc.core.graph import Graph, Region
from zfunc.core.layout import ELEMENTWISE, Layout, Parameter
from zfunc.core.optimizer_state import Moments, updates_matrices, updates_parameters
from zfunc.core.recipes import Recipe
from zfunc.core.regions import Regions
from zfunc.core.settings import StepSettings
from zfunc.core.spec import SegmentCost, StepSpec
from zfunc.errors import PlanError, SettingTypeError, did_you_mean, refuse, setting
from zfunc.optim.adamw import AdamW
from zfunc.optim.base import Optimizer, has_moments
from zfunc.optim.by_name import CLASSES
from zfunc.optim.groups import GroupedOptimizer
from zfunc.optim.rules import EMA_PIECE
from zfunc.schedules import make_order

DEFAULT_MOMENTS: Moments = fields(StepSettings).moments.default


@frozen(eq=False)
class OptimizedParameters:
    """The parameters of each segment with what `optimizer` says of them (group, state format, update work),
    for `world` ranks; caches layouts in buckets."""

    segments: Sequence[Sequence[Parameter]]
    optimizer: Optimizer
    world: int
    _layouts: dict[Any, Layout] = field(init=False, factory=dict[Any, Layout])

    @cached_property
    def parameters(self) -> list[list[Parameter]]:
        """The parameters of each segment, with group, state format and update work. Raises ValueError for a
        parameter that the optimizer cannot update."""
        if isinstance(self.optimizer, GroupedOptimizer):
            self.optimizer.check_parameters(p for own in self.segments for p in own)
        return [[_in_group(p, self.optimizer, self.world) for p in own] for own in self.segments]

    def layout(self, settings: StepSettings) -> Layout:
        """The layout of the parameters in buckets under `settings`; equal layouts are computed once."""
        return lay_out(self.parameters, settings, self.world, self._layouts)


def make_spec(
    segments: Sequence[Sequence[Parameter]],
    optimizer: Optimizer,
    settings: StepSettings,
    *,
    world: int,
    on_gpu: bool,
    stage: int | None = None,
    peers: bool = False,
    constant_bytes: int = 0,
    buffer_bytes: Sequence[int] | None = None,
    optimized: OptimizedParameters | None = None,
) -> StepSpec:
    """The StepSpec of one rank of `world`, for the parameters of each segment; costs are 0 until a batch is known.

    In a pipeline over ranks, `stage` is the rank's pipeline stage, and `world` the number of ranks in that stage.

    `constant_bytes` is the device memory of the segments' constants, which are not parameters; `buffer_bytes` that
    of the module buffers that the forward of each segment changes. `optimized` caches the layouts of these segments
    under other settings. `peers`: devices read each other's memory; `on_gpu`: they are accelerators.
    """
    optimized = optimized or OptimizedParameters(segments, optimizer, world)
    layout, order = optimized.layout(settings), make_order(settings.order)
    largest = max(b.numel for b in layout.buckets) // world
    averaging = 2 * 4 * min(largest, EMA_PIECE)  # bytes that `updates.average_` takes on an accelerator
    return StepSpec(
        costs=(SegmentCost(),) * len(segments),
        constant_bytes=constant_bytes,
        buffer_bytes=buffer_bytes or (0,) * len(segments),
        world=world,
        stage=stage,
        peers=peers,
        order=order if settings.stages > 1 else None,
        update_workspace=max(optimizer.device_workspace(largest), averaging) if on_gpu else 0,
        **in_buckets(layout, settings),
    )


def _in_group(p: Parameter, optimizer: Optimizer, world: int) -> Parameter:
    """Parameter `p` with the group, state format and update work that `optimizer` gives it. Raises ValueError
    if the optimizer cannot update it."""
    group = optimizer.group(p.name, p.shape)
    state_format, work = optimizer.state_format(group), ELEMENTWISE
    if p.trainable and world > 1 and updates_parameters(state_format):
        refuse(
            "optimizer",
            f"{state_format.partition('-')[0].capitalize()} for {p.name!r} on {world} ranks, which have a slice of "
            "it each",
            "one rank, which updates parameters whole",
            "pass zfunc.AdamW(moments='8bit'), of 6 bytes a parameter, or for several GPUs `devices` or `pp`",
        )
    if p.trainable and updates_matrices(state_format):
        if len(p.shape) != 2:
            got = f"{state_format.partition('-')[0].capitalize()} for {p.name!r} of {p.shape}"
            do = (
                "pass zfunc.groups((rule, zfunc.Muon(...)), zfunc.AdamW(...)) with a rule that does not "
                "match it"
            )
            refuse("optimizer", got, "matrices alone", do)
        work = optimizer.update_work(p.shape, group=group)  # pyright: ignore  # by the format of its state
    return evolve(p, group=group, state_format=state_format, work=work)


def choose_optimizer(optimizer: Optimizer | None, settings: StepSettings) -> tuple[Optimizer, StepSettings]:
    """The optimizer (AdamW if None) and the settings, with the same format of moments: a format that only the
    optimizer or only the settings name is set in the other.

    Raises TypeError for what is no optimizer, ValueError if optimizer and settings name different formats.
    """
    optimizer = AdamW() if optimizer is None else optimizer
    if isinstance(optimizer, type) or not isinstance(optimizer, Optimizer):  # pyright: ignore
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        (nearest,) = get_close_matches(
            kind.__name__, [x.__name__ for x in CLASSES.values()], n=1, cutoff=0.5
        ) or ["AdamW"]
        of_torch = "torch.optim." if kind.__module__.startswith("torch.optim") else ""
        got = f"{'the class' if kind is optimizer else 'a'} {of_torch}{kind.__name__}"
        do = f"pass zfunc.{nearest}(lr=...), or an optimizer that has them"
        refuse("optimizer", got, "the methods of zfunc.optim.base.Optimizer", do, SettingTypeError)
    if has_moments(optimizer) and settings.moments == DEFAULT_MOMENTS:
        settings = evolve(settings, moments=optimizer.moments)
    if has_moments(optimizer) and optimizer.moments not in (DEFAULT_MOMENTS, settings.moments):
        got = f"{settings.moments!r} and {type(optimizer).__name__}(moments={optimizer.moments!r})"
        refuse("moments", got, "one format", "give the optimizer that of the plan")
    return with_moments(optimizer, settings), settings


def with_moments(optimizer: Optimizer, settings: StepSettings) -> Optimizer:
    """The optimizer with its moments in the format that the settings name.

    Raises ValueError for an optimizer that has no choice of moments.
    """
    moments = settings.moments
    if has_moments(optimizer):
        return optimizer.with_moments(moments, split_master=settings.splits_master)
    if moments != DEFAULT_MOMENTS:
        got = (
            f"{moments!r} with {type(optimizer).__name__}, whose state is in the format "
            f"{optimizer.state_format(0)!r}"
        )
        refuse("moments", got, "one of zfunc's optimizers for a choice of moments", "leave it out")
    return optimizer


def check_recipe(recipe: Recipe, spec: StepSpec, stages: Collection[str]) -> None:
    """Raise TypeError if `recipe` is no recipe, and PlanError if a step of its operations could not be run
    with the functions `stages`, reported and saved."""
    if not callable(recipe) or isinstance(recipe, type):
        do = "pass such as zfunc.core.recipes.zero_offload"
        refuse("recipe", repr(recipe), "a function StepSpec -> operations", do, SettingTypeError)
    for name, variant in (("a step", spec), ("a step that saves", evolve(spec, save=True))):
        graph = Graph(recipe(variant))
        written = {r.buffer for op in graph for r in op.writes}
        needed = ["decision", "norm", *(["published"] if variant.save else [])]
        needed += ["module_buffers"] if spec.stateful else []
        if missing := [x for x in needed if x not in written]:
            got = f"{name} in which nothing writes {', '.join(missing)}"
            expected = (
                "what zero_offload's decide, global_norm, with spec.save publish, and with spec.stateful "
                "keep_buffers write"
            )
            refuse("recipe", got, expected, "keep these operations", PlanError)
        if unknown := sorted({op.verb for op in graph} - set(stages)):
            hint = did_you_mean(unknown[0], [*stages], cutoff=0.7)
            got = f"operations {unknown} without a stage"
            refuse("recipe", got, f"a function for each{hint}", "pass them in stages", PlanError)
        if not spec.deferred:
            _check_gradients(graph)
        for op in ops_unguarded_by_decision(graph):
            got = (
                f"{op}, whose effect leaves the step, and which does not depend on the decision whether the "
                "step is skipped"
            )
            refuse("recipe", got, do="let it read the region decision", kind=PlanError)
        state = set(Regions(variant).state())
        if added := [str(r) for r in graph.regions if r.lifetime == "state" and r not in state]:
            got = f"{', '.join(added)} with the lifetime 'state'"
            do = "a checkpoint has no other. Give it the lifetime 'program' or 'operation'"
            refuse("recipe", got, "zero_offload's state alone", do, PlanError)


def _check_gradients(graph: Graph) -> None:
    """Raise PlanError for a step without `defer` that reads a gradient of the step before, or leaves one for
    the step after."""
    written: set[Region] = set()
    for op in graph:
        for r in op.reads:
            if (r.role == "grad_shard" or r.buffer == "decision") and r not in written:
                got = f"{op.name}, which reads {r} before anything writes it"
                do = f"pass {setting('defer', True)} and `clip_norm` for one that waits"
                refuse("recipe", got, "a step that begins without a gradient", do, PlanError)
        written.update(op.writes)
    read = {r for op in graph for r in op.reads}
    if unused := sorted(str(r) for r in written - read if r.role == "grad_shard"):
        got = f"gradients in {', '.join(unused)} that no operation reads"
        do = f"pass {setting('defer', True)} and `clip_norm` for one that waits for the next step"
        refuse("recipe", got, "every one to be used", do, PlanError)
