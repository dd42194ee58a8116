"""Joining the ranks that torchrun has started, and leaving them.

The invariant: without torchrun nothing happens here, and this process trains alone.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zfunc.errors import RankError
from zfunc.runtime.accelerator import accelerator_type
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.failure_detection import timeout
from zfunc.runtime.rendezvous import fresh_store
from zfunc.runtime.thread_budget import local_rank, world_size

log = logging.getLogger("zfunc")


@contextmanager
def process_group() -> Iterator[RankGroup]:
    """The ranks of this job: those of the default process group, made from torchrun's environment.

    With accelerators a rank uses the device numbered LOCAL_RANK, or the only one its launcher shows it. Collectives
    on the device are of its own backend (NCCL on CUDA), those on the host gloo's. One on the device that waits in
    vain is given up by `RankGroup.watch`, not by NCCL's watchdog, which would end the process without a word:
    TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 unless it is set.
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
    """This rank's accelerator, or None. A launcher may show each rank all of the machine's, or one of its own."""
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
