"""Two ranks with pretend devices: collectives that are queued, not done, when they return, as NCCL's.

Each rank of `all_scenarios` leaves what it has seen in a folder: {SCENARIO}-{RANK}.json.
"""

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch
import torch.distributed as dist
from device_training import compiled, run
from forked import fork, played, warm
from torch import Tensor
from zfunc.schedules import make_schedule

import zfunc
from zfunc.engine.program.program import rescheduled
from zfunc.engine.stages.stages import STAGES
from zfunc.errors import RankError
from zfunc.runtime.collectives import _all_gather, _reduce_scatter
from zfunc.runtime.fault_injection import Jitter

WORLD = 2
DIES = 9  # the exit code of a rank that is to die
# Seconds that a collective waits: LONG where the other rank only is slow, as while a dozen processes start on two
# cores; TIMEOUT from the step on in which rank 1 dies or comes late, in scenarios in which rank 0 waits so long.
LONG = 120.0
TIMEOUT = dict.fromkeys(
    ("late", "dies", "gathers", "begins", "weights", "params", "average", "evaluate", "stages"), 3.0
)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"micro_batches": 2},
    "clipped": {"clip_norm": 0.5, "stage": 1, "precision": "fp32"},
    "resident": {
        "micro_batches": 2,
        "state_on": "device:0.5,host",
        "optimizer": zfunc.groups(("huge.*", zfunc.Lion(1e-2)), zfunc.AdamW(1e-2)),
    },
    "stage 3": {"micro_batches": 2, "stage": 3},
    "stage 3 on the host": {"micro_batches": 2, "stage": 3, "params_on": "host", "activations_on": "host"},
    "pipeline": {"micro_batches": 2, "pp": 2},
}
DEFAULT_STREAMS = range(4)  # of the four pretend devices


def bits(rank: int) -> dict[str, Any]:
    """Whether every schedule has the serial bits, and what those are."""
    seen: dict[str, Any] = {}
    issued, messages = pretend.load().issued, watched_messages()
    for n, (name, settings) in enumerate(SETTINGS.items()):
        program, data = compiled(
            "odd sizes", f"pretend:{rank}", bucket_size=600, schedule="Serial", **settings
        )
        losses, params = run(program, data)
        seen[name] = {
            "bits": [[loss for loss, _ in losses], params.double().sum().item()],
            "norms": [norm for _, norm in losses],
        }
        for schedule in ("Overlapped", "Interleaved")[n % 2 :][:1]:
            other = rescheduled(program, make_schedule(schedule))
            again, same = run(other, data, jitter=Jitter(rank, 3e-4))
            seen[f"{name} {schedule}"] = repr(again) == repr(losses) and torch.equal(same, params)
        calls = issued()
        seen[f"{name} issued"] = [call[:3] for call in calls]
        seen[f"{name} streams"] = sorted({stream for *_, stream in calls})
        seen[f"{name} messages"] = dict(Counter(messages))
        seen[f"{name} remembered"] = len(program.ranks.queued)
        messages.clear()
    seen["refused"] = refused(rank)
    return seen


def watched_messages() -> list[str]:
    """What this process sends and receives from now on, by tag and size; from rank 0 to 1 as 1 has it, and back."""
    found: list[str] = []

    def watched(issue: Any, sent: bool) -> Any:
        def message(part: Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
            assert part.is_contiguous(), "expected a dense tensor"
            assert (part.device.type, part.dtype) in (("cpu", torch.uint8), ("cpu", torch.int64)), part
            found.append(f"to {peer if sent else 1 - peer}, tag {tag}: {part.numel()} {part.dtype}")
            return issue(part, peer, group=group, tag=tag)

        return message

    dist.isend, dist.irecv = watched(dist.isend, True), watched(dist.irecv, False)
    return found


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "strides": lambda x: dist.all_reduce(x.view(4, 4).t()),
    "which NCCL has not": lambda x: dist.all_reduce(x.to(torch.int16)),
    "communicator": lambda x: dist.all_reduce(torch.ones(4, device=f"pretend:{3 - x.device.index}")),
    "expected one": lambda x: _all_gather(x, x[:8].to(torch.bfloat16)),
    "times as many": lambda x: _all_gather(x, x[:5].clone()),
    "overlaps": lambda x: _reduce_scatter(x[4:12], x),
}


def refused(rank: int) -> list[str]:
    """What the pretend backend says of collectives that gloo takes, and NCCL does not."""
    found: list[str] = []
    x = torch.ones(16, device=f"pretend:{rank}")
    for what, issue in WRONG.items():
        try:
            issue(x)
            found.append(f"{what}: taken")
        except RuntimeError as error:
            found.append("" if what in str(error) else str(error))
    return found


def failing(rank: int, action: str) -> dict[str, Any]:
    """Rank 1 dies, fails or comes late inside the third step; what rank 0 is told, and how soon."""
    due = False

    def backward(op: Any, mem: Any, step: Any) -> None:
        if due and op.index == (0, 1):
            if action in ("dies", "reports"):
                os._exit(DIES)
            if action == "fails":
                raise ZeroDivisionError("of rank 1")
            time.sleep(LONG)
        STAGES["backward"](op, mem, step)

    def gather(op: Any, mem: Any, step: Any) -> None:
        if due and op.index == (0, 1):
            os._exit(DIES)
        STAGES["gather"](op, mem, step)

    settings: dict[str, Any] = {"bucket_size": 40, "schedule": "Overlapped"}
    if action == "reports":
        pretend.load().report_link_errors(True)
        settings["patience"] = 15.0
    if action == "begins":
        settings |= {"stage": 3, "stages": {"gather": gather}}
    elif action in READS:
        settings |= {"pp": 2} if action == "stages" else {"stage": 3, "ema": 0.5}
    elif action == "gathers":
        settings |= {"stage": 3, "params_on": "host", "stages": {"gather": gather}}
    else:
        settings["stages"] = {"backward": backward}
    model = "norms" if action == "stages" else "pairs"  # with buffers, which evaluation reads of all stages
    program, data = compiled(model, f"pretend:{rank}", **settings)
    state, begun = zfunc.init(program, seed=1), 0.0
    try:
        for i in range(4):
            if i == 2 * (action != "begins"):
                begun, due = time.monotonic(), rank == 1
                limit_collectives(TIMEOUT.get(action, LONG))
            if action in READS and i == 2:
                READS[action](program, state, data(i), dies=rank == 1)
            state, _ = zfunc.train_step(program, state, data(i))
    except RankError as error:
        return {"error": str(error), "seconds": time.monotonic() - begun, "free": _is_free(program.device)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def limit_collectives(seconds: float) -> None:
    """Let every collective of this process, of all its groups, wait so long for the others."""
    limit = timedelta(seconds=seconds)
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(limit, group)
        group.get_group_store().set_timeout(limit)


def read_weights(program: Any, state: Any, _: Any, dies: bool) -> None:
    """Copy each bucket to the host, behind its gather, which a rank that dies does not issue."""
    weights = zfunc.weights(program, state, device="cpu")
    if dies:
        os._exit(DIES)
    dict(weights)


def read_params(program: Any, state: Any, _: Any, dies: bool, *, ema: bool = False) -> None:
    """Gather each bucket's weights or averages on the host, behind an agreement, after which a rank may die."""
    if dies:
        program.ranks.agree("params")
        os._exit(DIES)
    zfunc.params(program, state, ema=ema)


def evaluate(program: Any, state: Any, batch: Any, dies: bool) -> None:
    if dies:
        os._exit(DIES)
    zfunc.evaluate(program, state, batch)


READS = {
    "weights": read_weights,
    "params": read_params,
    "average": partial(read_params, ema=True),
    "evaluate": evaluate,
    "stages": evaluate,
}


def _is_free(device: torch.device) -> bool:
    """Whether the device works again soon: what waited on it has been aborted, which it reports once."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            torch.accelerator.synchronize(device)
            return float(torch.ones(2, device=device).sum()) == 2.0
        except torch.AcceleratorError:
            time.sleep(0.01)
    return False


def rank_main(scenario: str, rank: int, folder: Path) -> None:
    pretend.load().delay(3e-4, rank)
    torch.accelerator.set_device_index(rank)
    patience = timedelta(seconds=LONG)
    store = dist.FileStore(str(folder / f"{scenario}.store"), WORLD)
    store.set_timeout(patience)
    backends = f"cpu:gloo,pretend:{pretend.BACKEND}"
    dist.init_process_group(backends, store=store, rank=rank, world_size=WORLD, timeout=patience)
    seen = bits(rank) if scenario == "bits" else failing(rank, scenario)
    (folder / f"{scenario}-{rank}.json").write_text(json.dumps(seen))


def all_scenarios(folder: Path) -> None:
    """In a process of its own, which forks the ranks."""
    warm()
    ranks: list[tuple[str, int]] = []
    for scenario in ("bits", "dies", "gathers", "begins", *READS, "reports", "fails", "late"):
        for rank in range(WORLD):
            pid = fork(lambda s=scenario, r=rank: rank_main(s, r, folder))
            ranks.append((f"{scenario}-{rank}", pid))
        # Or one that waits for a busy machine times out as well.
        if scenario in ("bits", "gathers", "begins", "reports"):
            join(ranks)
        if scenario == "late":  # when rank 0 has given it up, nobody waits for rank 1
            late = ranks.pop()
            join([ranks.pop()])
            os.kill(late[1], signal.SIGKILL)
            os.waitpid(late[1], 0)
    join(ranks)


def join(ranks: list[tuple[str, int]]) -> None:
    """Wait for the processes (name, pid) of `ranks`, and empty it; one that ended neither well nor by `DIES` is an
    error of this process."""
    while ranks:
        name, pid = ranks.pop()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, DIES), f"{name} ended with {code}"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank of each scenario left, by SCENARIO-RANK."""
    if request.config.getoption("--device") != "pretend" or pretend.missing_tools():
        pytest.skip("runs in a process of its own: pytest --device pretend tests/device")
    folder = played(all_scenarios, tmp_path_factory.mktemp("ranks"))
    return {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json")}


def test_every_schedule_has_the_serial_bits_on_all_ranks(outcomes: dict[str, Any]) -> None:
    first, second = outcomes["bits-0"], outcomes["bits-1"]
    assert [name for name, seen in first.items() if seen is False] == []
    collectives = len(first["stage 3 issued"])
    assert max(seen.pop("stage 3 remembered") for seen in (first, second)) < 50 < collectives / 2
    assert {k: v for k, v in first.items() if "streams" not in k and "remembered" not in k} == {
        k: v for k, v in second.items() if "streams" not in k and "remembered" not in k
    }  # losses, norms and parameters, too
    assert first["stage 3"] == first["stage 3 on the host"]
    assert first["stage 3"]["bits"] == first["plain"]["bits"] == first["pipeline"]["bits"]


def test_collectives_and_messages_are_such_as_nccl_takes(outcomes: dict[str, Any]) -> None:
    """Tensors on the rank's device, dense, of one type and of sizes that fit, as the pretend backend checks; on one
    stream of a program, which is not the device's own; the same and in one order on all ranks. Messages are bytes
    on the host, each sent as it is received."""
    first, second = outcomes["bits-0"], outcomes["bits-1"]
    assert first["refused"] == second["refused"] == [""] * len(WRONG)
    for name, settings in SETTINGS.items():
        calls, messages = first[f"{name} issued"], first[f"{name} messages"]
        assert calls == second[f"{name} issued"]
        assert messages == second[f"{name} messages"]
        if name == "pipeline":
            assert (calls, len(messages) > 4) == ([], True)
            continue
        gradients = {type for what, type, _ in calls if what == "reduce_scatter"}
        assert gradients == {"Float" if settings.get("precision") == "fp32" else "BFloat16"}
        for seen in (first, second):
            assert 1 <= len(seen[f"{name} streams"]) <= 2  # that of each of the two programs
            assert not {*seen[f"{name} streams"]} & {*DEFAULT_STREAMS}
        assert messages == {}


@pytest.mark.parametrize(
    ("scenario", "why", "within"),
    [
        ("dies", "(reduce_scatter|all_gather) on rank 0.*rank 1 did not come", 60.0),
        ("gathers", "(all_gather|all_reduce|reduce_scatter) on rank 0.*rank 1 did not come", 60.0),
        ("begins", "(all_gather|all_reduce|reduce_scatter) on rank 0.*rank 1 did not come", 60.0),
        *((read, "(all_gather|all_reduce|broadcast).*rank 1 (did not come|is gone)", 60.0) for read in READS),
        ("reports", "rank 0: got a broken connection.*rank 1 is gone", 12.0),
        ("fails", "rank 1 has left: step 3 failed with ExecutionError: backward.*of rank 1", 30.0),
        ("late", "(reduce_scatter|all_gather) on rank 0.*rank 1 did not come", 60.0),
    ],
)
def test_a_collective_in_vain_is_given_up_and_the_rank_is_named(
    outcomes: dict[str, Any], scenario: str, why: str, within: float
) -> None:
    seen = outcomes[f"{scenario}-0"]
    assert re.search(why, seen["error"]), seen
    assert seen["seconds"] < within
    assert seen["free"]
