"""Joining the ranks that torchrun has started, and leaving them.

The invariant: without torchrun nothing happens here, and this process trains alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from zfunc.ranks import Ranks
from zfunc.threads import local_rank

TIMEOUT = timedelta(minutes=10)  # that a collective waits for the others


@contextmanager
def launched() -> Iterator[Ranks]:
    """The ranks of this job: those of the default process group, made from torchrun's environment.

    On GPUs a rank uses the device numbered LOCAL_RANK; NCCL moves what is there, gloo what is on the host.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield Ranks.of()
    finally:
        dist.destroy_process_group()
