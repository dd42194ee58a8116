"""The ranks of tests/engine/test_disk_ranks.py: `python disk_worker.py FOLDER`. Not a test of its own.

Real processes on gloo train with everything on the disk, in two lives: in the first one a drive fails, or a rank is
killed between the commits of the ranks.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trained
from forked import fork, warm
from small_models import rows_of

import zfunc
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.runtime.direct_io import DirectFile

WORLDS, STEPS, AT = (2, 3), 6, 3
DISTURBED = ("never", "drive", "kill")
SETTINGS: dict[str, Any] = {
    **{"precision": "bf16", "micro_batches": 2, "stage": 3, "defer": True},
    **{"state_on": "disk", "params_on": "disk", "grads_on": "disk", "activations_on": "disk"},
}


def disturb(how: str) -> None:
    """What happens to rank 1 in the step after AT."""

    def gone(file: DirectFile, *_: Any) -> None:
        raise zfunc.DiskError(f"{file.path}: the drive is gone")

    def killed(*_: Any) -> None:
        time.sleep(1)  # the others have committed
        os.kill(os.getpid(), signal.SIGKILL)

    if how == "drive":
        DirectFile.write = gone
    if how == "kill":
        SwapSpace.commit = killed


def live(rank: int, world: int, out: Path, life: int, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{out}/store-{life}", timedelta(seconds=60), world, rank)
    program, batch = trained.compiled("frozen below", **SETTINGS, swap=[out])
    state = zfunc.load(out, program) if life else zfunc.init(program, seed=2)
    seen: list[Any] = []
    try:
        while (number := state.batches) < STEPS:
            if (life, rank, number) == (0, 1, AT):
                disturb(how)
            state, metrics = zfunc.train_step(program, state, rows_of(batch(number), rank, world))
            seen.append([number, metrics.loss, metrics.grad_norm])
    except (zfunc.DiskError, zfunc.errors.RankError) as error:
        seen.append(f"{type(error).__name__}: {error}")
    (out / f"{life}-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    warm()
    for world in WORLDS:
        for how in DISTURBED:
            (out := Path(sys.argv[1]) / f"{how}-{world}").mkdir()
            for life in (0, 1):
                ranks = [fork(partial(live, rank, world, out, life, how)) for rank in range(world)]
                for pid in ranks:
                    os.waitpid(pid, 0)
