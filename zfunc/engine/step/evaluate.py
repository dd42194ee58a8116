"""Reading a State without changing it: its parameters, the model's outputs, the loss of a batch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zfunc.core.dtypes import Precision, one_precision
from zfunc.core.graph import Region
from zfunc.core.pipeline import F
from zfunc.engine.program.program import Program, check_owner, module_buffers, on_compute_stream
from zfunc.engine.stages.outputs import check_aux_rows, described, loss_and_aux, outputs_of_rows
from zfunc.engine.state.memory import Flat
from zfunc.engine.state.state import State
from zfunc.engine.state.weights import (
    bucket_weights,
    gathered,
    parameter_weights,
    rounded,
    segment_weights,
)
from zfunc.engine.step.flush import make_deferred_update
from zfunc.engine.step.run import check_state
from zfunc.engine.trace.batches import Batch, check_has_values, rows_in, unmarked, unpacked
from zfunc.engine.trace.module_buffers import buffer_views
from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.engine.trace.thread_modes import refuse_global_modes
from zfunc.errors import refuse, setting
from zfunc.runtime.accelerator import deterministic_kernels, record_use
from zfunc.runtime.rng import fold_seed, redirected, seeded


def params(program: Program, state: State, *, ema: bool = False) -> dict[str, Tensor]:
    """Every parameter by full name, in fp32 on the host: copies of the master weights, tied ones once.

    With `ema`, the moving averages of the weights. Frozen parameters have the values that the device computes with,
    or those they were rounded from, if kept. All ranks have to call this together, and each gets all parameters.
    Raises DonatedStateError for a used state, ValueError where there is no average.
    """
    check_state(program, state, "params")
    make_deferred_update(program, state, "params")
    program.ranks.agree("params")
    _check_ema(program, ema, "params")
    weights = parameter_weights(state.buffers, program.layout, program.ranks, ema=ema)
    copies = {name: values.clone() for name, values in weights}
    check_owner(
        program, state, "params"
    )  # a step of another thread would have changed some of them meanwhile
    return copies


def weights(
    program: Program,
    state: State,
    *,
    dtype: Precision | torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, trained or frozen, as (full name, tensor) in its shape, a bucket at a time: for
    an engine that generates with the weights. A tied parameter comes once, under the name that owns it.

    Without `dtype` the tensors are what the device computes with; with "fp32", "bf16" or "fp16", or torch's
    dtypes, the master weights, rounded. `device` is the program's unless given. The tensors are for reading,
    and may be views of the State, which the next step changes. Takes memory for the tensor and for one bucket
    (in fp32 on the host, with `dtype`), if each tensor is dropped before the next, as a tensor may keep its
    bucket alive.

    With several ranks all of them have to call this and exhaust the iterator; each gets all parameters.
    Raises DonatedStateError for a used state, also if a step is made before the iterator is exhausted, and
    ValueError for a weight that is too large for `dtype`.
    """
    if dtype is not None:
        dtype = one_precision("weights: dtype", dtype)
    check_state(program, state, "weights")
    make_deferred_update(program, state, "weights")
    program.ranks.agree("weights")
    return _weights(program, state, dtype, program.device if device is None else torch.device(device))


def _weights(
    program: Program, state: State, dtype: Precision | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    buffers, ranks, spec = state.buffers, program.ranks, program.spec
    for bucket in program.layout.all_buckets:
        check_state(program, state, "weights")
        with on_compute_stream(program):
            if dtype is None:
                n = program.local(spec.places[bucket.index].home)
                views = dict(gathered(buffers, spec, bucket, program.devices[n], ranks))
            else:
                views = Flat.of(bucket_weights(buffers, bucket, ranks), bucket).views
        while views:  # whoever takes a tensor is the only one that holds it
            check_owner(program, state, "weights")
            name = next(iter(views))
            yield name, _placed(program, name, views.pop(name), dtype, device)


def _placed(program: Program, name: str, t: Tensor, dtype: Precision | None, device: torch.device) -> Tensor:
    with on_compute_stream(program):
        there = (rounded(name, t, dtype) if dtype else t).to(device)
    if there is not t:
        record_use(there.device, there)
    return there


def _check_ema(program: Program, ema: bool, action: str) -> None:
    if ema and program.spec.settings.ema is None:
        got = f"{setting('ema', True)} for a program that keeps no moving average"
        refuse(action, got, "one that does", f"pass {setting('ema', 0.999)} to zfunc.compile")


def buffers(program: Program, state: State) -> dict[str, Tensor]:
    """The module buffers that forward changes, by full name: copies on the host, as `zfunc.init` takes in `params`.

    Such buffers are running statistics and spectral norm's vectors; other buffers are constants. With several ranks
    each rank gets the buffers of rank 0; with pipeline stages on ranks, which have to call this together, of all
    stages. Raises DonatedStateError for a used state.
    """
    check_state(program, state, "buffers")
    if program.spec.mesh.over_ranks:
        program.ranks.agree("buffers")
    copies = {
        segment.buffer_name(short): t.to("cpu", copy=True)
        for s, segment in enumerate(program.segments)
        for short, t in _module_buffers(program, state, s).items()
    }
    check_owner(program, state, "buffers")
    return copies


def _module_buffers(program: Program, state: State, s: int) -> dict[str, Tensor]:
    """The module buffers that forward of segment `s` changes, by short name: views of the State's memory, or,
    with pp, copies on the host made by a collective."""
    own, like, spec = module_buffers(program, state.buffers, s), program.calls[s].buffers, program.spec
    if not like or not spec.mesh.over_ranks:
        return own
    flat = state.buffers.memory.get(Region("module_buffers", (s,)))
    flat = torch.empty(spec.buffer_bytes[s], dtype=torch.uint8, device="cpu") if flat is None else flat
    there = program.ranks.from_stage(spec.mesh.device_of(F, 0, s), flat)  # pyright: ignore  # StageRanks
    return buffer_views(there, like)


def apply(program: Program, state: State, inputs: Any, *more: Any, ema: bool = False) -> Any:
    """Run the segments forward with the device's parameters, without dropout and gradients; the State is unchanged.

    The last segment gets `more` after its input: the targets for a loss, or nothing if it works without targets
    (such as `zfunc.models.gpt.Head`, which then returns logits). With several devices, the output is on the last
    segment's. An output that shares memory with a parameter is copied. Random numbers that a segment still draws
    depend on the State alone. With `ema`, the moving averages replace the weights. With several ranks and `defer`,
    `ema`, `stage=3` or `pp`, all of them have to call this. Raises DonatedStateError for a used state.
    """
    check_state(program, state, "apply")
    refuse_global_modes("apply", program.device)
    program.executor.check_process("apply")
    inputs, more = unmarked((inputs, more))
    check_has_values((inputs, more))
    for y in outputs(program, state, inputs, [*[()] * (len(program.segments) - 1), more], ema=ema):
        output = y  # only the last is kept
    owned = [x.flat for x in state.buffers.weights.values()]
    owned += [t for constants in program.cache.constants.values() for t in constants.values()]
    owned += [x for r, x in state.buffers.memory.items() if r.role == "module_buffers"]
    storages = {*map(storage_of, owned)}
    return tree_map_only(Tensor, lambda t: t.clone() if storage_of(t) in storages else t, output)


def outputs(
    program: Program, state: State, inputs: Any, more: Sequence[tuple[Any, ...]], *, ema: bool = False
) -> Iterator[Any]:
    """Yield the output of each segment in turn, computed when it is asked for; the last is what `apply`
    returns.

    `more` has, for each segment, the arguments after its input, such as targets, or a
    `zfunc.models.sequences.KVCache` to generate token by token. A collective where `apply` is one.
    """
    check_state(program, state, "apply")
    _check_ema(program, ema, "apply")
    make_deferred_update(program, state, "apply")
    with on_compute_stream(program):
        x = tree_map_only(
            Tensor,
            lambda t: t.to(program.device, program.dtype if t.is_floating_point() else t.dtype),
            inputs,
        )
    for s, (segment, call, extra) in enumerate(zip(program.segments, program.calls, more, strict=True)):
        randomness = seeded(fold_seed(state.seed, state.batches, "apply", segment.name))
        n = program.local(program.spec.mesh.device_of(F, 0, s))
        device = program.devices[n]
        # Not around the yield, where they would leak.
        with (
            on_compute_stream(program, n),
            torch.no_grad(),
            randomness,
            redirected(),
            deterministic_kernels(program.settings.deterministic),
        ):
            x, extra = tree_map_only(Tensor, lambda t, there=device: t.to(there), (x, extra))
            views = segment_weights(state.buffers, program.spec, s, device, program.ranks, ema=ema)
            weights = {short: views[full] for short, full in {**call.trained, **call.fixed}.items()}
            kept = {x: t.to(device) for x, t in _module_buffers(program, state, s).items()}
            x = call.evaluate({**weights, **program.cache.constants[n, s], **kept}, x, *extra)
            del views, weights  # before the next segment's are there
        record_use(device, x)
        check_owner(program, state, "apply")  # a step of another thread would have changed weights meanwhile
        yield x


@overload
def evaluate(
    program: Program,
    state: State,
    batch: Batch | Mapping[str, Any],
    *,
    has_aux: Literal[False] = False,
    ema: bool = False,
) -> float: ...


@overload
def evaluate(
    program: Program,
    state: State,
    batch: Batch | Mapping[str, Any],
    *,
    has_aux: Literal[True],
    ema: bool = False,
) -> tuple[float, dict[str, Any]]: ...


def evaluate(
    program: Program,
    state: State,
    batch: Batch | Mapping[str, Any],
    *,
    has_aux: bool = False,
    ema: bool = False,
) -> float | tuple[float, dict[str, Any]]:
    """The mean loss of `batch = (inputs, targets)`, without dropout; the State is unchanged.

    With `has_aux` the result is `(loss, aux)`, with the last segment's auxiliary outputs by name: floats, and rows
    on the host. With `ema` the moving averages replace the weights. The batch is not split into micro-batches.
    Each rank evaluates its own batch; with `defer`, `ema`, `stage=3` or `pp` all ranks have to call this. Raises
    DonatedStateError for a used state, and RankError where another rank that the device waits for is gone.
    """
    inputs, *more = unpacked(batch, program.segments[-1])
    y = apply(program, state, inputs, *more, ema=ema)
    loss, aux = loss_and_aux(program.segments[-1].name, y)
    if not has_aux:
        return float(loss)
    if rows := outputs_of_rows(aux):
        check_aux_rows(program.segments[-1].name, described(rows), rows_in((inputs, *more)))
    return float(loss), {
        name: x.detach().to("cpu", copy=True) if name in rows else float(x) for name, x in aux.items()
    }
