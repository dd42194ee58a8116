"""A program for the shapes of a batch: planned with real sizes at first use, and cached."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from attrs import evolve

from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import project
from zfunc.core.recipes import Recipe
from zfunc.core.spec import StepSpec
from zfunc.engine.program.program import (
    KindsSeen,
    Program,
    ShapedProgram,
    activation_slots,
    make_plan,
    needed_bytes,
    warn_once,
)
from zfunc.engine.program.traced_spec import largest_spec, traced_spec
from zfunc.engine.stages.outputs import check_aux_rows
from zfunc.engine.trace.batches import Batch, rows_in, split_batch, traced_kinds
from zfunc.engine.trace.facts import first_change
from zfunc.engine.trace.traced_passes import MAX_TRACES, cached
from zfunc.runtime.prepared_plan import prepare_plan

SHAPES = MAX_TRACES  # sets of batch shapes whose costs and plans are cached
log = logging.getLogger("zfunc")


def specialize(
    program: Program,
    batch: Batch,
    micro: Sequence[Batch] = (),
    *,
    save: bool = False,
    commit: bool = False,
) -> ShapedProgram:
    """The program planned for the shapes of `batch`: traced and planned at first use, and cached for the last
    64 sets of shapes. `micro` are its micro-batches, where the caller has them.

    Where values of a batch decide shapes, each distinct layout of a micro-batch is traced, and the plan has
    the largest sizes seen so far. With `save` the step also writes a checkpoint, with `commit` it commits to
    the swap space. Raises ValueError where a segment cannot take its input or the last segment returns no
    scalar.
    """
    micro = micro or split_batch(batch, program.settings.micro_batches)
    check_modules(program)
    _check_outside(program)
    kinds, group = traced_kinds(batch, micro)
    if len(kinds) > SHAPES:
        got = f"micro-batches of {len(kinds)} kinds of values that decide shapes"
        raise ValueError(f"batch: got {got}, expected {SHAPES} at most: sort rows by these values")
    traced = {key: _costs_of(program, key, x) for key, x in kinds.items()}
    (key, (spec, random)), *_ = traced.items()
    if group is not None:
        seen = cached(
            program.cache.seen, group, lambda: KindsSeen(frozenset(), spec, frozenset()), most=SHAPES
        )
        if not traced.keys() <= seen.kinds:
            grown = largest_spec([seen.spec, *(x for x, _ in traced.values())])
            random = seen.random.union(*(x for _, x in traced.values()))
            number = seen.number + (grown.costs != seen.spec.costs)
            seen = KindsSeen(seen.kinds | traced.keys(), grown, random, number)
            program.cache.seen[group] = seen
        key, spec, random = (group, seen.number), seen.spec, seen.random
    if spec.aux_rows:
        check_aux_rows(
            program.segments[-1].name, spec.aux_rows, rows_in(batch) // program.settings.micro_batches
        )
    return cached(
        program.cache.specialized,
        (key, save, commit),
        lambda: _plan(program, evolve(spec, save=save, commit=commit), random, program.recipe),
        most=2 * SHAPES,
    )


def _costs_of(program: Program, key: Any, micro: Batch) -> tuple[StepSpec, frozenset[int]]:
    """The result of `traced_spec` for micro-batch `micro`, cached under `key`, its `layout_of_leaves`."""
    costs = program.cache.costs
    if key not in costs and len(costs) == SHAPES and not program.cache.overflowed:
        program.cache.overflowed = True
        log.warning(
            "batches of more than %d shapes: each new one is traced and planned. Round lengths up to a few "
            "(docs/quickstart.md)",
            SHAPES,
        )
    return cached(costs, key, lambda: traced_spec(program, micro), most=SHAPES)


def specialize_without_batch(program: Program, recipe: Recipe) -> ShapedProgram:
    """The program planned for a `recipe` that needs a State but no batch, such as that of a checkpoint;
    planned at first use and cached."""
    make = partial(_plan, program, program.spec, frozenset[int](), recipe)
    return cached(program.cache.specialized, recipe, make, most=2 * SHAPES)


def _plan(program: Program, spec: StepSpec, random: frozenset[int], recipe: Recipe) -> ShapedProgram:
    whole = make_plan(spec, program.schedule, recipe)
    plan = project(whole, spec.stage)
    prepared = prepare_plan(plan, program.stages, *program.devices)
    peaks = peak_memory(plan)
    needed = needed_bytes(program, peaks, {tier: peak.kept for tier, peak in peaks.items()})
    return ShapedProgram(spec, plan, whole, prepared, peaks, needed, activation_slots(whole), random)


def check_modules(program: Program) -> None:
    """Warn of modules changed after segments were made of them, or since the last call: the changes have no
    effect."""
    cache = program.cache
    for segment in program.segments:
        before = cache.looks.get(segment.name)
        if before is not None and cache.costs and before.holds():
            continue
        look = segment.look()  # at containers, modules and buffers that may have come
        if change := segment.changed() or (before and first_change(before.values, look.values)):
            warn_once(
                program,
                f"segment {segment.name!r}: got {change} changed after the segment was made, which has no effect: "
                "make the segments after such changes, or set weights with zfunc.replace",
                of=(segment.name, change.partition(" (")[0]),
            )
        cache.looks[segment.name] = look


def _check_outside(program: Program) -> None:
    """Warn of changed objects outside of modules on which a trace depends: the changes may have no effect.
    Raises ValueError if a plain value has changed there."""
    of_segments = ((x, x.outside) for x in program.segments if x.outside is not None)
    known = *of_segments, *program.cache.outside.values()
    for segment, outside in {id(x): (s, x) for s, x in known}.values():
        facts = outside.facts
        moved = "" if facts is None else first_change(facts, outside.now())
        what = f"segment {segment.name!r}: got {moved}, changed since the segment was traced"
        action = "pass what changes in the batch, or make the segments anew and compile again"
        if facts and moved and isinstance(facts.get(moved, ""), str):
            raise ValueError(f"{what}, expected the same value in every step: {action}")
        if moved:
            warn_once(program, f"{what}, which may have no effect: {action}")
