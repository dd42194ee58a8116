"""`release`: a State leaves the device between two steps, and is copied back when a call needs the State.

Every call that uses a State begins with `run.check_state`, which brings a released State back. A copy replaces its
source only when complete, so an interrupt loses nothing.
"""

import torch
from attrs import evolve

from zfunc.core.graph import Region
from zfunc.core.recipes import recipe_of
from zfunc.core.regions import Regions
from zfunc.engine.program.program import (
    Program,
    check_owner,
    lock_staging,
    on_compute_stream,
    staging_buffers,
)
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.state.memory import allocate_regions, flat_of
from zfunc.engine.state.state import Buffers, State
from zfunc.engine.state.weights import send_weights
from zfunc.errors import Message, OutOfMemory, setting
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.memory_limits import available_host_bytes


def release(program: Program, state: State) -> State:
    """Free the device's memory between steps, such as for generation; returns `state`, which stays valid.

    What a step keeps on the device goes to host memory: optimizer state and averages on the device, module buffers,
    and parameters of which the host or the disk has no master. The next call that uses the State, such as a step or
    `evaluate`, makes the other parameters again from their masters, and allocates slots and constants again. No bit
    changes. Memory for the copies, pinned for an accelerator, is kept for the next release. Tensors that you hold,
    such as views of `zfunc.weights`, keep their memory, and so do a library's workspaces.

    Each rank may call this alone. Raises DonatedStateError for a used state, RuntimeError during a step, and
    OutOfMemory, before anything is released, where the host has no room.
    """
    check_owner(program, state, "release")
    buffers = state.buffers
    with lock_staging(program, "release"), torch.inference_mode(False):
        if not buffers.released:
            # A recipe or stages of one's own may have made other parameters of the masters.
            usual = program.recipe is recipe_of(program.spec) and program.stages == STAGES
            there = Regions(evolve(program.spec, frozen_masters=buffers.masters)).on_device()
            remade = [r for r, again in there.items() if again and usual]
            if on_accelerator(program.device):
                _park(program, buffers, [r for r in there if r not in remade])
            # From here on the State is what was copied: the rest may end anywhere.
            buffers.released = (*remade, *buffers.parked)
        _free(program, buffers)
    return state


def _park(program: Program, buffers: Buffers, regions: list[Region]) -> None:
    """Copy a State's `regions` from the device to host memory, allocated at the first release and reused."""
    if not buffers.parked and regions:
        needed, free = sum(r.nbytes for r in regions), available_host_bytes()
        if needed > free:
            way_on = f"Keep more of the state on the host, as by {setting('state_on', 'host')}"
            needs = f"needs {needed:,} bytes of host memory, {free:,} are free; nothing was released"
            raise OutOfMemory(Message(f"release: {needs}. {way_on}"))
        on_host = (evolve(r, tier="pinned", role=None, device=0) for r in regions)
        parked = allocate_regions(on_host, program.devices, ())
        buffers.parked = {r: parked[r] for r in regions}
    with on_compute_stream(program):
        for r, copy in buffers.parked.items():
            copy.copy_(flat_of(buffers.memory[r]))  # done when it returns


def _free(program: Program, buffers: Buffers) -> None:
    """Free the device memory of a State's released regions, and of the program's staging buffers and constants."""
    cache = program.cache
    cache.prepared.clear()  # it holds on to both
    buffers.drop(buffers.released)
    cache.released = tuple({*cache.released, *(r for r in cache.staging if r.tier == "device")})
    for r in cache.released:
        cache.staging.pop(r, None)
    cache.constants = {}  # a program with another schedule has the others too, perhaps in a step
    if on_accelerator(program.device):
        torch.accelerator.empty_cache()


def take_back(program: Program, state: State, action: str) -> None:
    """Bring a released State and its program back to the device, for the call `action`, or raise OutOfMemory."""
    buffers, layout, devices = state.buffers, program.layout, program.devices
    with lock_staging(program, action, patience=program.executor.patience), torch.inference_mode(False):
        regions = buffers.released
        try:
            with on_compute_stream(program):
                staging_buffers(program)  # from here on the program is back
                buffers.place(allocate_regions(regions, devices, ()), layout)
                for r in (r for r in regions if r in buffers.parked):
                    flat_of(buffers.memory[r]).copy_(buffers.parked[r])
                remade = (layout.all_buckets[r.index[0]] for r in regions if r not in buffers.parked)
                send_weights(buffers, remade, program.ranks)
        except torch.OutOfMemoryError as error:
            _free(program, buffers)
            needed = sum(r.nbytes for r in (*regions, *program.cache.released))
            raise OutOfMemory(
                f"{action}: needs {needed:,} bytes of device memory for what was released, which are not free; it "
                f"stays released. Free what the device was lent to ({str(error).splitlines()[0]})"
            ) from error
        buffers.released = ()
