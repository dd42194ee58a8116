"""Joining the ranks that torchrun has started, and leaving them.

torchrun starts all ranks again when one has died, but keeps the store they met in: in it are the addresses of dead
processes, which gloo and NCCL would call (pytorch/pytorch#135712). So the ranks of each life meet in a part of it
that none was in before. Its count of restarts is no way out: every node has its own.

The invariant: without torchrun nothing happens here, and this process trains alone.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from zfunc.errors import RankError
from zfunc.runtime.accelerator import accelerator_type
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.failure_detection import timeout
from zfunc.runtime.thread_budget import local_rank, world_size

log = logging.getLogger("zfunc")
POLL = 0.02  # seconds


@contextmanager
def process_group() -> Iterator[RankGroup]:
    """A context with the RankGroup of all ranks of this job: the default process group, made from torchrun's
    environment variables.

    With accelerators a rank uses device number LOCAL_RANK, or the only device it sees. Device collectives use
    the device's backend (NCCL on CUDA), host collectives gloo. A device collective that does not end is given
    up by `RankGroup.watch`, not by NCCL's watchdog, which would end the process without a message: so
    TORCH_NCCL_ASYNC_ERROR_HANDLING is set to 0 unless it is set.
    """
    if world_size() == 1:
        yield RankGroup()
        return
    device, backend = _own_device(), "gloo"
    if device is not None:
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    patience = timeout()
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        dist.init_process_group(
            backend,
            store=fresh_store(store, rank, world),
            rank=rank,
            world_size=world,
            timeout=patience,
            device_id=device if device is not None and device.type == "cuda" else None,  # NCCL connects now
        )
    except dist.DistError as error:
        raise RankError(
            f"got {error} at the start of rank {os.environ['RANK']}, expected all {os.environ['WORLD_SIZE']} ranks "
            "to meet: see that each of them was started, and start all of them again"
        ) from error
    try:
        yield RankGroup.of()
    finally:
        dist.destroy_process_group()


def _own_device() -> torch.device | None:
    """This rank's accelerator by LOCAL_RANK, or the only one its launcher shows; None on a machine without one."""
    kind = accelerator_type()
    if kind is None:
        return None
    seen, wanted = torch.accelerator.device_count(), local_rank()
    if wanted >= seen > 1:
        raise RankError(
            f"got LOCAL_RANK={wanted}, expected one below {seen}, the {kind} devices this rank sees: start no more "
            "ranks than devices"
        )
    if wanted >= seen:
        log.info("LOCAL_RANK=%d uses %s:0, the only one that this rank sees", wanted, kind)
    return torch.device(kind, wanted if seen > 1 else 0)


def fresh_store(store: Store, rank: int, world: int) -> Store:
    """A view of `store` with a key prefix that rank 0 has just invented; all `world` ranks have to call this
    together. Keys of an earlier start of the job cannot be seen in it.

    Each rank asks rank 0 for the prefix by a fresh request id, then acknowledges it. Raises TimeoutError, or
    torch's own error, if a rank does not come within the store's time-out.
    """
    name = uuid4().hex
    if rank:
        store.set(f"zfunc/ask/{rank}", name)
        name = store.get(f"zfunc/tell/{name}").decode()
        store.set(f"zfunc/{name}/has/{rank}", "")
    else:
        _answer(store, name, world)
    return PrefixStore(f"zfunc/{name}", store)


def _answer(store: Store, name: str, world: int) -> None:
    """Rank 0's side of `fresh_store`: send every rank the `name` until all ranks have acknowledged the name."""
    until = time.monotonic() + store.timeout / timedelta(seconds=1)
    missing = set(range(1, world))
    while missing:
        for rank in missing:
            if store.check([f"zfunc/ask/{rank}"]):
                request = store.get(f"zfunc/ask/{rank}").decode()
                store.set(f"zfunc/tell/{request}", name)
        missing -= {rank for rank in missing if store.check([f"zfunc/{name}/has/{rank}"])}
        if missing and time.monotonic() > until:
            late = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(
                f"rank 0: got no word from ranks {late}, expected all {world}: see what they logged, then start "
                "all of them again"
            )
        time.sleep(POLL)
