"""Joining the ranks that torchrun has started, and leaving them.

The invariant: without torchrun nothing happens here, and this process trains alone.

ZFUNC_TIMEOUT, in seconds, is how long a rank waits in a collective for the others before it says who is missing.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from zfunc.errors import RankError
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.rendezvous import fresh_store
from zfunc.runtime.thread_budget import local_rank, world_size

TIMEOUT = timedelta(minutes=10)  # that a collective waits for the others, if nothing else is said
LONGEST = 10**6  # seconds
VARIABLE = "ZFUNC_TIMEOUT"


def timeout(environment: Mapping[str, str] = os.environ) -> timedelta:
    """How long a collective waits: ZFUNC_TIMEOUT seconds, or TIMEOUT. Raises ValueError for what is no such time.

    gloo raises then; NCCL's watchdog ends the process.

    >>> timeout({"ZFUNC_TIMEOUT": "90"})
    datetime.timedelta(seconds=90)
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds <= LONGEST:
        raise ValueError(
            f"{VARIABLE}: got {text!r}, expected seconds from 0.001 to {LONGEST:,}: set it to 600, say, or unset it"
        )
    return timedelta(seconds=seconds)


@contextmanager
def process_group() -> Iterator[RankGroup]:
    """The ranks of this job: those of the default process group, made from torchrun's environment.

    On GPUs a rank uses the device numbered LOCAL_RANK; NCCL moves what is there, gloo what is on the host.
    """
    if world_size() == 1:
        yield RankGroup()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    patience = timeout()
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=fresh_store(store, rank, world),
            rank=rank,
            world_size=world,
            timeout=patience,
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
