"""Recipes: the operations of a training step in the paper's order, which defines the reference result.

A recipe is a generator of operations. Lanes, streams and waits follow from the regions of the operations
(`zfunc.core.ops`) and from the schedule.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps

from attrs import fields

from zfunc.core.graph import Op
from zfunc.core.ops import OpBuilder
from zfunc.core.pipeline import PASSES, B, F, I, R, W
from zfunc.core.places import BucketPlaces
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.errors import PlanError, refuse, setting

Recipe = Callable[[StepSpec], Iterable[Op]]
Update = Callable[[StepSpec, OpBuilder, int], Iterator[Op]]
# What `plain` reads, or what changes no operation of a step on one device.
# fmt: off
PLAIN = {
    "micro_batches", "clip_norm", "precision", "schedule", "recompute", "compile_segments", "deterministic",
    "bucket_size", "slots", "moments", "order",
}
# fmt: on


def recipe_of(spec: StepSpec) -> Recipe:
    """The recipe for a training step of `spec`: `deferred` if the spec defers updates, else `zero_offload`."""
    return deferred if spec.deferred else zero_offload


def plain(spec: StepSpec) -> Iterator[Op]:
    """The simplest case of `zero_offload`, written to be read first: parameters on one device, optimizer
    state and updates on the host. Only a few settings may differ from their defaults, such as `micro_batches`
    and `clip_norm`.

    Raises PlanError for other settings, several ranks, tied parameters and updates of whole matrices.
    """
    _check_plain(spec)
    emit, last = OpBuilder(spec), spec.settings.micro_batches - 1

    def deliver(m: int, b: int) -> Iterator[Op]:
        if not last:
            yield emit.square_sum(b, waits=False)
            yield emit.squares_to_host(b)
        yield emit.to_host(m, b, 0)
        if last:
            yield emit.accumulate(m, b, 0, first=m == 0)

    def update(b: int) -> Iterator[Op]:
        yield emit.update(b)
        yield emit.to_device(b)

    if spec.save:
        yield from _write(spec, emit)
    for m in range(last + 1):
        yield emit.load(m, 0)
        for s in range(spec.num_segments):
            yield emit.forward(m, s)
        if m == last and not spec.barrier:  # without clipping no update waits for the norm
            yield emit.decide()
        for s in reversed(range(spec.layout.first_trainable, spec.num_segments)):
            yield emit.backward(m, s)
            for b, _, segments in spec.layout.contributions(s):
                yield emit.pack(m, b, s, first=s == segments[0])
                if s == segments[-1]:
                    yield from deliver(m, b)
                    if m == last and not spec.barrier:
                        yield from update(b)
    yield emit.global_norm()
    if spec.barrier:
        yield emit.decide()
        for bucket in reversed(spec.layout.buckets):
            yield from update(bucket.index)
    yield from _keep_buffers(spec, emit)
    if spec.save:
        yield emit.publish(last=True)


def _check_plain(spec: StepSpec) -> None:
    """Raise PlanError for a spec whose step has other operations than those of the recipe `plain`."""
    changed = {f.name for f in fields(StepSettings) if getattr(spec.settings, f.name) != f.default}
    others = any(
        len(b.deliveries) > 1 or x.matrices for b, x in zip(spec.layout.buckets, spec.places, strict=False)
    )
    if changed - PLAIN or others or spec.world > 1 or spec.settings.group_size > 1:
        other = "ranks, groups, tied parameters or updates of whole matrices"
        got, do = ", ".join(sorted(changed - PLAIN)) or other, "use zero_offload"
        raise PlanError(f"plain: got {got}, expected one device and settings of recipes.PLAIN: {do}")


def zero_offload(spec: StepSpec) -> Iterator[Op]:
    """ZeRO-Offload: master weights and Adam on the host, and, with `params_on`, the parameters too.

    During backward, gradients leave the device a bucket at a time, through `slots` slots. With a barrier
    (clipping, fp16) every update waits for the norm of the whole gradient; without one, Adam of a bucket follows
    its gradient. Each rank reduces, copies, updates and sends back its slice of every bucket (ZeRO stage 2); with
    `stage` 1, gradients are added up on the device first. The buckets in `spec.resident` stay on the device.
    With `spec.save` the step also writes a checkpoint.

    Micro-batches pass the segments in groups of `group_size`. Where parameters are not on the device (ZeRO-3
    Offload), or not whole (stage 3), a segment's are fetched and gathered into slots before each pass of a group.

    Sources: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), sections 4 and 5;
    Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021).
    """
    emit = OpBuilder(spec)
    if spec.save:
        yield from _write(spec, emit)
    yield from _passes(spec, emit, update=not spec.barrier)
    yield emit.global_norm()
    if spec.barrier:
        yield emit.decide()
        yield from _update_all(spec, emit, reversed(range(len(spec.layout.buckets))))
    yield from _keep_buffers(spec, emit)
    if spec.commit:
        yield emit.commit()
    if spec.save:
        yield emit.publish(last=True)


def deferred(spec: StepSpec) -> Iterator[Op]:
    """ZeRO-Offload with deferred updates: a step ends with its decision, and the next step begins by making
    the updates that this one decided, while its forward runs.

    The results are those of `zero_offload`: each bucket is updated just before the first segment that reads
    its parameters. In the first step, where no gradient waits, the previous decision counts as "skip". A
    checkpoint has the state after the updates. Buckets in `spec.resident` are updated in their own step.

    Raises PlanError for a spec whose updates are not deferred.
    """
    if not spec.deferred:
        got = "a spec that defers no update"
        refuse("deferred", got, "one", f"pass {setting('defer', True)} and `clip_norm`", PlanError)
    emit = OpBuilder(spec)
    passes = _passes(spec, emit, update=False)
    for _ in _loaded_before(spec, 0):
        yield next(passes)  # a batch: behind the parameters on its lane, forward would wait for all of them
    ahead = spec.settings.params_on == "disk" or any(
        x.staged or (x.matrices and x.state != "device") for x in spec.places
    )
    if ahead and not spec.save:
        yield from _updates_ahead(spec, emit, passes)
    else:
        yield from _update_offloaded(spec, emit)
        if spec.save:
            yield from _write(spec, emit)
        yield from passes
    yield from _decide(spec, emit)


def _updates_ahead(spec: StepSpec, emit: OpBuilder, passes: Iterator[Op]) -> Iterator[Op]:
    """Yield `passes` with deferred updates of buckets in between: before an operation that reads a bucket's
    parameters come the updates of that bucket and of the next `slots` buckets.

    So neither the lane that reads parameters nor the first forward waits for all updates.
    """
    # Buckets in the order in which forward reads them: the last one of the host, the last one that has been read
    # or is about to be, the last one whose update has begun.
    last, read, updated = spec.offloaded[-1], -1, -1
    ahead = spec.settings.slots
    for op in passes:
        # What the next operation of the passes reads; backward comes after all of forward, so after all updates.
        if op.verb in ("backward", "backward_input"):
            read = last
        elif op.verb in ("page_in_weights", "fetch", "gather") and op.index[-1] <= last:
            read = max(read, op.index[-1])
        elif op.verb == "forward":
            used = spec.layout.buckets_of(op.index[1])
            read = max([read, *(b for b in used if b <= last and not spec.places[b].streamed)])
        # Its updates come before it, and those of so many more buckets as have slots for their states.
        if updated < (until := min(last, read + ahead)) and read >= 0:
            for b in (x for x in spec.offloaded if updated < x <= until):
                yield from _update(spec, emit, b)
            if until == last and spec.commit:
                yield from _end_updates(spec, emit)
                yield emit.commit()
            updated = until
        # The device makes one more bucket orthogonal while the host ends what is read.
        yield from _end_updates(spec, emit, left=sum(b > read + 1 for b in emit.begun))
        yield op


def flush_recipe(spec: StepSpec) -> Iterator[Op]:
    """The operations that make only the updates deferred by the last step; there is no batch."""
    yield from _update_offloaded(spec, OpBuilder(spec))


def checkpoint(spec: StepSpec) -> Iterator[Op]:
    """The operations that write a checkpoint between two steps."""
    emit = OpBuilder(spec)
    yield from _write(spec, emit)
    yield emit.publish()


def _write(spec: StepSpec, emit: OpBuilder) -> Iterator[Op]:
    """Write the State before this step to a checkpoint, bucket by bucket in the order of their updates."""
    trained, frozen = ([x for x in spec.places if x.trainable is y] for y in (True, False))
    for place in (*(trained if spec.deferred else reversed(trained)), *frozen):
        emit.at.device = place.home
        if place.state == "disk":
            yield emit.page_in(place.index)
        elif not place.trainable:
            yield from _read_weights(emit, place)
        yield emit.write(place.index)
    if spec.stateful:
        yield emit.write_buffers()


def _passes(spec: StepSpec, emit: OpBuilder, *, update: bool) -> Iterator[Op]:
    """Yield forward and backward of all micro-batches. With `update`, each bucket is updated as soon as its
    gradient is complete.

    Also decides the step once the losses of all micro-batches are known, before the last backward, unless the
    decision has to wait for the norm.
    """
    here: dict[int, int] = {}  # the segment whose weights a device has fetched last
    for way, m, s, device, ended in spec.passes:
        emit.at.device = device
        if not ended:
            if (way, s) == (F, 0):
                yield from _load(spec, emit, _loaded_before(spec, m))
            if way != W and here.get(device) != s:
                yield from _fetch(spec, emit, s)
                here[device] = s
            yield from _begin(spec, emit, way, m, s)
        elif way == F:
            yield from _end_forward(spec, emit, m, s)
        elif way != R:
            yield from _end_backward(spec, emit, way, m, s, update=update)
    yield from _end_updates(spec, emit)


def _loaded_before(spec: StepSpec, m: int) -> Sequence[int]:
    """The micro-batches to copy to the first device just before the first pass of micro-batch `m`: all of its
    group if it is the group's first; with several devices, the one after `m`, and at first `m` itself."""
    total, size = spec.settings.micro_batches, spec.settings.group_size
    if spec.mesh.made_on:
        return range(m + (m > 0), min(m + 2, total))
    return range(m, min(m + size, total)) if m % size == 0 else ()


def _load(spec: StepSpec, emit: OpBuilder, micro_batches: Iterable[int]) -> Iterator[Op]:
    """Copy inputs of micro-batches to the device of the first segment, and targets to that of the last segment."""
    here, last = emit.at.device, spec.num_segments - 1
    for m in micro_batches:
        for s in {0, last}:
            emit.at.device = spec.mesh.device_of(F, m, s)
            if s == 0 or emit.at.device != spec.mesh.device_of(F, m, 0):
                yield emit.load(m, s)
    emit.at.device = here


def _begin(spec: StepSpec, emit: OpBuilder, way: str, m: int, s: int) -> Iterator[Op]:
    """Yield the operation for a pass of kind `way` ("F" forward, "B" backward, "R" recomputation, "I" and "W"
    halves of backward) through segment `s`. Before backward, first copy back activations that were offloaded.
    """
    first = way == R if (R, s) in spec.mesh.parts else way in (B, I)
    if first and spec.activations[s] == "disk":
        yield emit.unspill_act(m, s)
    if first and spec.activations[s] != "device":
        yield emit.unstash(m, s)
    yield getattr(emit, PASSES[way].verb)(m, s)


def _end_forward(spec: StepSpec, emit: OpBuilder, m: int, s: int) -> Iterator[Op]:
    """After forward of micro-batch `m` through segment `s`: offload its activations, send its output to the
    next segment's device. After the step's last loss, decide the step unless that needs the norm."""
    last = spec.num_segments - 1
    if spec.activations[s] != "device":
        yield emit.stash(m, s)
    if spec.activations[s] == "disk":
        yield emit.spill_act(m, s)
    if s < last and (there := spec.mesh.device_of(F, m, s + 1)) != emit.at.device:
        if not spec.mesh.peers:
            yield emit.send_act(m, s + 1)
        emit.at.device = there
        yield emit.recv_act(m, s + 1)
    if (m, s) == (spec.settings.micro_batches - 1, last):
        if spec.mesh.several_ranks:
            yield emit.mean_loss()
        if not spec.barrier:
            yield emit.decide()


def _keep_buffers(spec: StepSpec, emit: OpBuilder) -> Iterator[Op]:
    """Yield, for each device, the copy of the module buffers that forward changed into the State."""
    for device in sorted({spec.mesh.device_of(F, 0, s) for s in spec.stateful}):
        emit.at.device = device
        yield emit.keep_buffers()


def _fetch(spec: StepSpec, emit: OpBuilder, s: int) -> Iterator[Op]:
    """Copy to the device, and gather, the streamed parameters of segment `s` that no slot there has yet."""
    streamed = [b for b in spec.layout.weights_of(s) if spec.places[b].streamed]
    for place in (spec.places[b] for b in emit.at.ring("weight_slot").take(streamed)):
        yield from _read_weights(emit, place)
        if place.params != "device":
            yield emit.fetch(place.index)
        if place.sharded:
            yield emit.gather(place.index)


def _read_weights(emit: OpBuilder, place: BucketPlaces) -> Iterator[Op]:
    """Read the bucket's parameters, if they live on the disk, into a pinned slot unless a slot has them."""
    if place.params == "disk" and emit.at.ring("weight_page").take([place.index]):
        yield emit.page_in_weights(place.index)


def _end_backward(spec: StepSpec, emit: OpBuilder, way: str, m: int, s: int, *, update: bool) -> Iterator[Op]:
    """After a pass of kind `way` that made gradients in segment `s`: send the input's gradient to the device
    of the segment below, and pack those of weights into buckets. Each bucket with a complete gradient is
    reduced, copied off the device and, with `update`, updated.

    At most one bucket is incomplete at a time, so a single slot for a bucket's gradient is enough.
    """
    layout, here = spec.layout, emit.at.device
    if way != W and s > layout.first_trainable and (there := spec.mesh.device_of(B, m, s - 1)) != here:
        if not spec.mesh.peers:
            yield emit.send_grad_act(m, s)
        emit.at.device = there
        yield emit.recv_grad_act(m, s)
        emit.at.device = here
    if way == I:
        return
    summed = [b for b in layout.buckets_of(s) if spec.places[b].summed]
    emit.at.ring("sum_slot").take(summed)
    emit.at.ring("sum_slot").kept |= {*summed}
    for b, d, group in layout.contributions(s):
        if spec.settings.stage == 1:
            yield from _add_up(spec, emit, m, b, d, s, update=update)
            continue
        yield emit.pack(m, b, s, first=s == group[0])
        if s == group[-1]:
            yield from _deliver(spec, emit, m, b, d, update=update)


def _add_up(spec: StepSpec, emit: OpBuilder, m: int, b: int, d: int, s: int, *, update: bool) -> Iterator[Op]:
    """ZeRO stage 1: add the gradients of segment `s` to the sum of bucket `b` on the device. After the step's
    last addition the sum is reduced and copied off the device, and, with `update`, the bucket is updated."""
    deliveries = spec.layout.buckets[b].deliveries
    if m == 0 and d == 0:
        yield emit.pack(m, b, s, first=s == deliveries[0][0])
    else:
        yield emit.add(m, b, s)
    if m == spec.settings.micro_batches - 1 and s == deliveries[-1][-1]:
        yield from _deliver(spec, emit, m, b, d, update=update)


def _deliver(spec: StepSpec, emit: OpBuilder, m: int, b: int, d: int, *, update: bool) -> Iterator[Op]:
    """Take the gradient of bucket `b` (delivery `d`: tied parameters have one for each segment) to where it
    is updated: reduce it over ranks, sum its squares, copy or add it. With `update`, the last one also starts
    the update."""
    place, last = spec.places[b], m == spec.settings.micro_batches - 1
    complete = last and (spec.settings.stage == 1 or d == len(spec.layout.buckets[b].deliveries) - 1)
    begins = d == 0 or place.apart  # a sum of its own
    # On the device: the ranks' gradients become one, each with its slice, whose squares are summed if complete.
    if spec.world > 1:
        yield emit.reduce_scatter(m, b, d)
    if not place.added:
        yield emit.square_sum(b, waits=False)
    # To where it is updated: it is added to what came before, or waits for the norm, or is in a slot.
    if place.gradient == "device":
        if place.waits:
            yield emit.hold(m, b, d, first=not place.added or (m == 0 and begins))
    else:
        if place.summed:
            yield emit.hold(m, b, d, first=m == 0)
            if not last:
                return
        if not place.added:  # ahead of the gradient, so a norm need not wait for that
            yield emit.squares_to_host(b)
        yield emit.to_host(m, b, d)
        if place.summed:
            emit.at.ring("sum_slot").kept -= {b}
        if place.added:
            yield emit.accumulate(m, b, d, first=(m == 0 or place.summed) and begins)
        if place.gradient == "disk":
            yield emit.spill(b)
    # The last delivery completes the gradient: the norm gets the squares, and without a barrier the update begins.
    if place.apart and last and d > 0:
        yield emit.join_sums(b, d)
    if complete and place.gradient == "device":
        if place.added:
            yield emit.square_sum(b, waits=True)
        yield emit.squares_to_host(b)
    if complete and update:
        yield from _update(spec, emit, b)


def _update_all(spec: StepSpec, emit: OpBuilder, buckets: Iterable[int]) -> Iterator[Op]:
    """Yield the complete updates of `buckets`, whose gradients are waiting, in the order given."""
    for b in buckets:
        yield from _update(spec, emit, b)
    yield from _end_updates(spec, emit)


def _at_home(made: Update) -> Update:
    """A decorator of a generator `made`: the operations that it yields for a bucket run on the device (or
    stage) that keeps the bucket."""

    @wraps(made)
    def at_home(spec: StepSpec, emit: OpBuilder, b: int) -> Iterator[Op]:
        here, emit.at.device = emit.at.device, spec.places[b].home
        yield from made(spec, emit, b)
        emit.at.device = here

    return at_home


@_at_home
def _update(spec: StepSpec, emit: OpBuilder, b: int) -> Iterator[Op]:
    """Yield the update of bucket `b`: of its optimizer state, and of its parameters on all devices.

    For optimizers of whole matrices this is only the first part of the update: the device orthogonalizes
    while the host begins the next bucket.
    """
    place = spec.places[b]
    # The slot of a state that lives elsewhere is occupied until its update has ended.
    if place.matrices or place.state == "disk" or place.staged:
        yield from _end_updates(spec, emit, left=spec.settings.slots - 1 if place.matrices else 0)
    if place.gradient == "disk":
        yield emit.unspill(b)
    if place.state == "disk":
        yield emit.page_in(b)
    if place.staged:
        yield emit.state_to_device(b)
    if not place.matrices:
        yield from _end_update(spec, emit, b)
        return
    emit.begun.append(b)
    yield emit.momentum(b)
    if place.update == "host":
        yield emit.direction_to_device(b)


def _end_updates(spec: StepSpec, emit: OpBuilder, *, left: int = 0) -> Iterator[Op]:
    """End the updates that have begun, of buckets of whole matrices, oldest first, except the last `left`."""
    while len(emit.begun) > left:
        yield from _end_update(spec, emit, emit.begun.pop(0))


@_at_home
def _end_update(spec: StepSpec, emit: OpBuilder, b: int) -> Iterator[Op]:
    """The second part of the update of bucket `b` of whole matrices: orthogonalize the directions, update the
    weights, copy them to where they are used and kept."""
    place = spec.places[b]
    if place.matrices:
        if spec.world > 1:
            yield emit.gather_direction(b)
        yield emit.orthogonalize(b)
        if place.update == "host":
            yield emit.direction_to_host(b)
    yield emit.update(b)
    if place.staged:
        yield emit.state_to_host(b)
    elif place.update == "host" and place.params == "device":
        yield emit.to_device(b)
    if spec.world > 1 and not place.streamed:
        yield emit.all_gather(b)
    if spec.settings.ema is not None:
        yield emit.average(b)
    if spec.swaps and spec.commit and place.in_memory:
        yield emit.copy_state(b)
        yield emit.page_out_all(b)
    elif place.state == "disk":
        yield emit.page_out(b)


def _update_offloaded(spec: StepSpec, emit: OpBuilder) -> Iterator[Op]:
    """Apply the previous step's gradients to offloaded buckets, in the order in which forward reads them."""
    yield from _update_all(spec, emit, spec.offloaded)
    if spec.commit:
        yield emit.commit()


def _decide(spec: StepSpec, emit: OpBuilder) -> Iterator[Op]:
    """The end of a deferred step: norm, decision, updates of resident buckets, module buffers, publish."""
    yield emit.global_norm()
    yield emit.decide()
    yield from _update_all(spec, emit, sorted(spec.resident, reverse=True))
    yield from _keep_buffers(spec, emit)
    if spec.save:
        yield emit.publish(last=True)
