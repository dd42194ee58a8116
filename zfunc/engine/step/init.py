"""`init` makes the first State, `allocate_state` the zeroed buffers of any State; `replace` sets weights in one.

Initial values depend on the seed, the segments and `params`, never on the layout or the ranks.
"""

from collections.abc import Mapping
from functools import partial

from attrs import evolve
from torch import Tensor

from zfunc.checkpoint.strict_json import MAX_INT as LARGEST_SEED
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.checkpoint.writer import all_or_none
from zfunc.core.memory_model import initial_memory, peak_memory
from zfunc.core.regions import Regions
from zfunc.engine.program.program import (
    Program,
    allocate_on_all,
    check_memory,
    check_program,
    lock_staging,
    module_buffers,
    on_compute_stream,
    staging_buffers,
)
from zfunc.engine.program.specialize import check_modules
from zfunc.engine.state.state import Buffers, State, allocate
from zfunc.engine.state.weights import average_frozen, begin_again, begin_averages, put_weights
from zfunc.engine.step.flush import make_deferred_update
from zfunc.engine.step.run import check_state, resume_hint
from zfunc.engine.step.swap_state import commit_again, commit_state, create_swap, masters_in
from zfunc.engine.trace.module_buffers import copy_buffers
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.thread_modes import refuse_inference_mode
from zfunc.errors import did_you_mean
from zfunc.optim.loss_scale import UNSCALED, LossScale
from zfunc.runtime.host_memory import give_back_freed
from zfunc.runtime.rng import fold_seed
from zfunc.values import of_type, whole


def init(
    program: Program,
    *,
    seed: int = 0,
    params: Mapping[str, Tensor] | None = None,
    loss_scale: LossScale | None = None,
) -> State:
    """Make a new State, with initial values from `params` ({full name: tensor}), else from the segments.

    `params` may have the buffers that forward changes as well (`zfunc.buffers`). `loss_scale` is for fp16 alone.

    Values are created, copied to the fp32 master weights and rounded for the device, one segment at a time. Raises
    OutOfMemory before any allocation if the plan does not fit, RuntimeError in inference mode, and ValueError or
    TypeError for names, shapes or types in `params` that the program does not have.
    """
    refuse_inference_mode("init")
    check_program(program, "init")
    whole("init: seed", seed, -LARGEST_SEED, LARGEST_SEED)
    of_type("init: params", params, Mapping | None, "{full name: tensor}: pass such as zfunc.params returns")
    of_type("init: loss_scale", loss_scale, LossScale | None, "a zfunc.LossScale or None: pass one")
    params = dict(params or {})
    _check_params(program, params)
    check_memory(program, initial_memory(program.spec), action="init")
    with on_compute_stream(program):
        state = _initialized(program, allocate_state(program, "init"), seed, params, loss_scale)
        commit_state(program, state)
        allocate_on_all(program, partial(staging_buffers, program))  # after the initial values are gone
        return state


def _initialized(
    program: Program, buffers: Buffers, seed: int, params: Mapping[str, Tensor], loss_scale: LossScale | None
) -> State:
    layout = program.layout
    spans = {span.name: span for span in (*layout.spans, *layout.frozen)}
    drawn: dict[int, int] = {}  # segments that share one `initial` share its numbers
    for s, segment in enumerate(program.segments):
        place = drawn.setdefault(id(segment.initial), len(drawn))
        if into := module_buffers(program, buffers, s):
            copy_buffers(into, {x: params.get(segment.buffer_name(x), t) for x, t in segment.buffers.items()})
        values = _own_values(segment, fold_seed(seed, "init", place), params)
        for name in sorted(values, key=lambda x: layout.bucket_of(spans[x]).index):  # one bucket at a time
            if program.spec.places[layout.bucket_of(spans[name]).index].owned:
                put_weights(buffers, layout, spans[name], values[name], program.ranks)
        del values  # before the next segment's are made
    begin_averages(buffers, layout, program.ranks)
    program.cache.looks.clear()  # weights changed before are those of the State
    check_modules(program)
    scale = (loss_scale or LossScale()) if program.settings.precision == "fp16" else UNSCALED
    return State(buffers, program.identity, buffers.owner.generation, loss_scale=scale, seed=seed)


def replace(
    program: Program, state: State, params: Mapping[str, Tensor], *, keep_moments: bool = True
) -> State:
    """Set the weights of parameters, trained or frozen, to those of `params` ({full name: tensor}), and return the
    State that has them. `state` is donated; parameters that `params` does not name stay as they are.

    A trained parameter keeps its moments and its moving average; without `keep_moments` both begin as in `init`.
    `params` may have the buffers that forward changes as well. A swap space commits the result, with the `extra` of
    its last commit: a process that is killed goes on with all of these weights or none. With several ranks all of
    them have to call this, with equal values. Raises DonatedStateError for a used state, ValueError or TypeError
    for names, shapes or types that the program does not have, and DiskError where a drive fails or has no room:
    the first call that sets a frozen parameter reserves the bytes of all frozen ones in the swap space once more.
    """
    refuse_inference_mode("replace")
    check_state(program, state, "replace")
    of_type("replace: params", params, Mapping, "{full name: tensor}: pass such as zfunc.params returns")
    _check_params(program, params)
    make_deferred_update(program, state, "replace")
    program.ranks.agree("replace", "what is replaced", f"{[*params]}, keep_moments={keep_moments}")
    buffers, layout, ranks = state.buffers, program.layout, program.ranks
    owner, spans = buffers.owner, [x for x in (*layout.spans, *layout.frozen) if x.name in params]

    def put() -> None:
        for span in (x for x in spans if program.spec.places[layout.bucket_of(x).index].owned):
            value, begins = params[span.name].detach(), not keep_moments and span in layout.spans
            if begins:
                begin_again(buffers, layout, span, value, ranks)
            put_weights(buffers, layout, span, value, ranks, keep_moments=not begins)
        for s, segment in enumerate(program.segments):
            for short, into in module_buffers(program, buffers, s).items():
                into.copy_(params.get(segment.buffer_name(short), into))

    with lock_staging(program, "replace", patience=program.executor.patience), on_compute_stream(program):
        if buffers.swap is not None and any(x.name in params for x in layout.frozen):
            all_or_none(ranks, buffers.swap.make_room)
        owner.generation, owner.lost = owner.generation + 1, f"replace did not finish. {resume_hint(program)}"
        average_frozen(buffers, layout, ranks)  # up to now, with the weights that are replaced
        all_or_none(ranks, put)
        commit_again(program, state, changed={layout.bucket_of(x).index for x in spans})
    owner.lost, buffers.compared = "", False
    return evolve(state, generation=owner.generation)


def _own_values(segment: Segment, seed: int, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The initial fp32 values, by full name, of the parameters that `segment` owns: from `params` if given
    there, else from the segment."""
    given = {**segment.initial(seed), **params}
    own = [p for p in segment.parameters if p.name not in segment.shared]
    if missing := [p.name for p in own if p.name not in given]:
        raise ValueError(
            f"segment {segment.name!r}: got no initial value for {missing}, expected one for each parameter it "
            "owns: return it from initial, or pass it in params"
        )
    for p in own:
        if given[p.name].shape != p.shape:
            raise ValueError(
                f"{p.name}: got initial values of shape {tuple(given[p.name].shape)}, expected {p.shape}: correct "
                "`initial`"
            )
    return {p.name: given[p.name].detach() for p in own}


def allocate_state(
    program: Program,
    action: str,
    swap: SwapSpace | None = None,
    kept: Mapping[str, frozenset[int]] | None = None,
) -> Buffers:
    """Allocate zeroed buffers for a State, on all ranks together: a collective. `kept` has, by field of
    StepSpec, the frozen buckets with fp32 weights or averages. Raises OutOfMemory before any allocation, also
    if no step would fit beside the State.

    Optimizer state on the disk is in the swap space `swap`, or in a new one.
    """
    if swap is not None:
        kept = {"frozen_masters": masters_in(swap, program.spec, program.ranks)}
    spec = evolve(program.spec, **kept or {})
    peaks = peak_memory(program.plan)
    planned, there = (
        sum(r.nbytes for r in Regions(x).state() if r.tier == "host") for x in (program.spec, spec)
    )
    peaks["host"] = evolve(peaks["host"], kept=peaks["host"].kept + there - planned)
    check_memory(program, peaks, action=action)
    swap = swap or create_swap(program, spec)
    if swap is not None:
        give_back_freed()
    make = partial(allocate, spec, program.devices, swap, program.settings.swap)
    return allocate_on_all(program, make)


def _check_params(program: Program, params: Mapping[str, Tensor]) -> None:
    shapes = {span.name: span.shape for span in (*program.layout.spans, *program.layout.frozen)}
    for s in program.segments:
        shapes |= {s.buffer_name(short): tuple(t.shape) for short, t in s.buffers.items()}
    for name, value in params.items():
        if name not in shapes:
            near = did_you_mean(name, list(shapes))
            raise ValueError(
                f"params: got {name!r}, which the program does not have{near}, expected names of zfunc.params: "
                "correct it"
            )
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"params: got {name!r} as {got}, expected a tensor of real numbers: convert it")
        if tuple(value.shape) != shapes[name]:
            got = f"{name!r} of shape {tuple(value.shape)}"
            raise ValueError(f"params: got {got}, expected {shapes[name]}: reshape it, or leave it out")
