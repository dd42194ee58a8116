"""A store in which the ranks of this life meet, and nothing of an earlier one is found.

torchrun starts all ranks again when one has died, but keeps the store they met in: in it are the addresses of dead
processes, which gloo and NCCL would call (pytorch/pytorch#135712). Its count of restarts is no way out: every node
has its own.

The invariant: the ranks that get a store get the same one, are all alive, and use it alone.
"""

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store

POLL = 0.02  # seconds


def fresh_store(store: Store, rank: int, world: int) -> Store:
    """A part of `store` under a name that rank 0 has just made up. All `world` ranks have to call this.

    Each other rank sends a fresh request id, so a reply cannot come from a previous incarnation; it then
    acknowledges. Raises TimeoutError, or torch's own error, if a rank does not come within the store's time-out.
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
    """Send every rank the name, until all have acknowledged it."""
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
