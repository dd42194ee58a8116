"""Kill a training, resume it, again and again: does every life load a whole checkpoint, is the end always the same?

`python tests/soak.py --kills 200 --seconds 1500` trains a small model in one process and in two: in memory, saving
every other step, and with state, parameters, gradients and activations on the disk, where each step is committed.
From life to life parameters live elsewhere, micro-batches come in another order, updates are deferred or not. A
life ends by SIGKILL: at a random moment, of one rank or of all, or just before an operation drawn from the plan.
Where one rank of two is killed, the other has to stop by itself and name it. A training that gets to its end is
compared, bit by bit, to one that was not disturbed, and that one on the disk to the one in memory.

A machine on which the seconds do not do is slow, which breaks no law: a line says what was done, and the exit code
is 0.

Lives are forked from a process that has imported torch, which is why there can be hundreds of them.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from forked import fork, global_batch
from small_models import MODELS, rows_of

import zfunc
from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files
from zfunc.checkpoint.directory import has_commit
from zfunc.checkpoint.swap_checkpoint import open_swap_checkpoint
from zfunc.engine.program.specialize import specialize
from zfunc.runtime.fault_injection import Fault

STEPS, EVERY, KEEP = 60, 2, 2  # of a training; from one save to the next; checkpoints kept
LIVES: tuple[dict[str, Any], ...] = (  # settings of one life after the other: none changes the training
    {},
    {"stage": 3, "params_on": "host", "activations_on": "host"},
    {"defer": True, "order": "vertical"},
    {"defer": True, "stage": 3, "params_on": "host", "order": "horizontal"},
)
ON_DISK: dict[str, Any] = {"state_on": "disk", "params_on": "disk", "stage": 3, "slots": 1}
LIVES_ON_DISK: tuple[dict[str, Any], ...] = (
    {"grads_on": "disk", "activations_on": "disk"},
    {"grads_on": "disk", "activations_on": "host,disk", "defer": True, "order": "vertical"},
    {"slots": 1, "order": "horizontal"},
)
PASSES = (
    "load",
    "forward",
    "backward",
)  # operations of a step in every life; the first of each of the others, too
OTHERS = (
    "pack",
    "global_norm",
    "mean_loss",
    "decide",
    "update",
    "write",
    "publish",
    "page_in",
    "page_out",
    "commit",
)
STALL = 300.0  # seconds without a step, of a training that nothing disturbs
PATIENCE = 60.0  # seconds for a survivor to stop by itself
COLLECTIVE = timedelta(seconds=20)  # that a rank waits for another that does not come
STOPPED = ("RankError", "init_process_group", "rendezvous")  # what a survivor says that stops by itself


@frozen
class Kind:
    """How many ranks there are, and whether their swap space is the checkpoint."""

    world: int
    on_disk: bool

    def settings(self, run: Path, life: int) -> dict[str, Any]:
        """Of a life in the folder of its run."""
        if not self.on_disk:
            return LIVES[life % len(LIVES)]
        swap = [run / "checkpoints", run / "second"]
        return {**ON_DISK, **LIVES_ON_DISK[life % len(LIVES_ON_DISK)], "swap": swap}

    def saved_step(self, run: Path) -> int | None:
        """That of the newest checkpoint; None if there is none."""
        folder = run / "checkpoints"
        if not self.on_disk:
            found = checkpoints.find_checkpoint(folder)
        elif not has_commit(folder):
            return None
        else:
            found = open_swap_checkpoint(folder)
        return found.manifest.position.step if found else None


KINDS = [Kind(world, on_disk) for on_disk in (False, True) for world in (1, 2)]


def train(rank: int, run: Path, kind: Kind, life: int, loads: bool, faults: tuple[Fault, ...]) -> None:
    """One rank of one life, from the newest checkpoint if it `loads` one to the end, if it gets there."""
    sys.stderr = (run / f"said-{rank}").open("w", buffering=1)
    world, folder = kind.world, run / "checkpoints"
    if world > 1:
        dist.init_process_group("gloo", f"file://{run}/store", COLLECTIVE, world, rank)
    segments, data = MODELS["odd sizes"]()
    optimizer = zfunc.AdamW(lr=1e-3, moments="8bit" if world > 1 else "fp32")
    settings = {"micro_batches": 2, "clip_norm": 0.5, "bucket_size": 3000, **kind.settings(run, life)}
    program = zfunc.compile(segments, optimizer=optimizer, precision="fp32", device="cpu", **settings)
    state = zfunc.load(folder, program) if loads else zfunc.init(program, seed=1)
    (run / f"loaded-{rank}").write_text(str(state.step))
    while state.step < STEPS:
        saves = not kind.on_disk and state.step > 0 and state.step % EVERY == 0
        batch = rows_of(global_batch(data, state.batches), rank, world)
        save = zfunc.Save(folder, keep=KEEP) if saves else None
        state, metrics = zfunc.train_step(program, state, batch, save=save, faults=faults)
        (run / f"step-{rank}").write_text(str(state.step))
        assert metrics.saved is None or metrics.saved.path is not None, metrics.saved
    zfunc.save(folder, program, state, **({} if kind.on_disk else {"keep": KEEP}))
    digest = hashlib.sha256()
    for name, values in sorted(zfunc.params(program, state).items()):
        digest.update(name.encode() + values.reshape(-1).view(torch.uint8).numpy().tobytes())
    batch = rows_of(global_batch(data, 0), rank, world)
    plan = specialize(program, batch, save=not kind.on_disk, commit=kind.on_disk).plan
    common = [op.name for op in plan.graph if op.verb in PASSES or (op.verb in OTHERS and not any(op.index))]
    (run / f"end-{rank}.json").write_text(json.dumps({"digest": digest.hexdigest(), "ops": common}))


@define
class Training:
    """One training in a folder of its own, in as many lives as it takes; `counts` are of all trainings."""

    kind: Kind
    run: Path
    counts: Counter[str]
    saved: int | None = None  # step of the newest checkpoint
    pids: dict[int, int] = field(factory=dict)  # rank -> process, of those that live
    lives: int = 0

    @classmethod
    def new(cls, kind: Kind, root: Path, counts: Counter[str]) -> "Training":
        run = Path(tempfile.mkdtemp(dir=root))
        for name in ("checkpoints", "second") if kind.on_disk else ():
            (run / name).mkdir()
        return cls(kind, run, counts)

    def begin(self, faults: tuple[Fault, ...] = ()) -> None:
        """The next life."""
        for leftover in (
            x for name in ("store*", "said-*", "end-*", "loaded-*") for x in self.run.glob(name)
        ):
            leftover.unlink()
        of_life = self.run, self.kind, self.lives, self.saved is not None, faults
        self.pids = {r: fork(partial(train, r, *of_life)) for r in range(self.kind.world)}
        self.lives += 1

    def look(self) -> None:
        """Find the newest checkpoint, which is never an older one than before."""
        try:
            found = self.kind.saved_step(self.run)
        except zfunc.errors.CheckpointError as error:
            if self.saved is not None or "no commit that all ranks have" not in str(error):
                raise
            for path in self.run.glob("*/*.swap"):  # as docs/disk.md says: not all made the first commit
                path.unlink()
            found = None
        if self.saved is not None and (found is None or found < self.saved):
            raise AssertionError(f"{self.run}: found step {found}, where {self.saved} was whole")
        self.saved = found

    def wait(self, seconds: float) -> dict[int, int]:
        """Exit codes of the ranks that ended within the seconds; as soon as one has failed."""
        ended: dict[int, int] = {}
        until = time.monotonic() + seconds
        while self.pids and time.monotonic() < until and not any(ended.values()):
            for rank, pid in list(self.pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[rank] = os.waitstatus_to_exitcode(status)
                    del self.pids[rank]
            time.sleep(0.002)
        return ended

    def wait_for_steps(self, until: float) -> dict[int, int]:
        """Exit codes of the ranks that ended by then. Raises AssertionError after STALL seconds without a step."""
        ended, step = dict[int, int](), ""
        while self.pids and not any(ended.values()) and (left := until - time.monotonic()) > 0:
            ended |= self.wait(min(STALL, left))
            before, step = step, self.said("step-0")
            assert not self.pids or left < STALL or step != before, f"{self.run}: no step in {STALL:g} s"
        return ended

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL for those that live."""
        for rank in ranks:
            if rank in self.pids:
                os.kill(self.pids[rank], signal.SIGKILL)

    def said(self, name: str) -> str:
        path = self.run / name
        return path.read_text() if path.exists() else ""

    def ends(self) -> list[Any]:
        """What every rank told at the end."""
        return [json.loads(self.said(f"end-{r}.json")) for r in range(self.kind.world)]

    def live(self, chance: random.Random, ops: list[str], seconds: float) -> bool:
        """A life that is mostly killed, and what is left of it; whether it got to the end of the training."""
        self.look()
        step, world = self.saved or 0, self.kind.world
        victims = [chance.randrange(world)] if chance.random() < 0.6 else list(range(world))
        at_op = chance.random() < 0.4
        # by its number: it saves what the step before it left, on the disk mostly its own
        next_save = (step if self.kind.on_disk else max(step, EVERY)) + 1
        fault = Fault(victims[0], next_save + chance.choice((0, EVERY)), chance.choice(ops), "kill")
        self.begin((fault,) if at_op else ())
        codes = self.wait(PATIENCE + seconds if at_op else chance.uniform(0, seconds))
        if not codes:
            self.kill(victims)
        killed, patience = time.monotonic(), PATIENCE + seconds  # more where all of it takes long
        while self.pids and time.monotonic() < killed + patience:
            codes |= self.wait(patience)
        assert not self.pids, f"{self.run}: ranks {[*self.pids]} did not stop within {patience:g} s"
        if self.saved is not None and (loaded := self.said("loaded-0")):
            assert int(loaded) >= step, f"{self.run}: loaded step {loaded}, where {step} was whole"
            self.counts["resumed"] += 1
        dead = [r for r, code in codes.items() if code == -signal.SIGKILL]
        self.counts["kills"] += len(dead)
        for rank in (r for r, code in codes.items() if code not in (0, -signal.SIGKILL)):
            said = self.said(f"said-{rank}")
            stopped = bool(dead) and any(x in said for x in STOPPED)
            assert stopped, f"{self.run}: rank {rank} failed by itself: {said}"
            self.counts["named"] += any(f"rank {r}" in said for r in dead)
        return not dead


def soak(kills: int, seconds: float, seed: int, root: Path) -> Counter[str]:
    """Until there were so many kills and each kind of training got to its end once, or, with a count "slow", until
    the seconds are over. Raises AssertionError."""
    counts, ended, chance, begun = Counter[str](), Counter[Kind](), random.Random(seed), time.monotonic()
    expected: dict[Kind, tuple[list[Any], float]] = {}
    for kind in KINDS:
        undisturbed, start = Training.new(kind, root, counts), time.monotonic()
        undisturbed.begin()
        codes = undisturbed.wait_for_steps(begun + seconds)
        if undisturbed.pids and not any(codes.values()):
            undisturbed.kill([*range(kind.world)])
            counts["slow"] = 1
            return counts
        assert codes == dict.fromkeys(range(kind.world), 0), undisturbed.said("said-0")
        expected[kind] = undisturbed.ends(), time.monotonic() - start
        in_memory = expected[Kind(kind.world, on_disk=False)][0]
        assert [x["digest"] for x in undisturbed.ends()] == [x["digest"] for x in in_memory], kind
    trainings = {kind: Training.new(kind, root, counts) for kind in KINDS}
    while (few := counts["kills"] < kills) or not all(ended[kind] for kind in KINDS):
        if time.monotonic() > begun + seconds:
            counts["slow"] = 1
            break
        kind = chance.choice([kind for kind in KINDS if few or not ended[kind]])
        ends, length = expected[kind]
        if trainings[kind].live(chance, ends[0]["ops"], length):
            digests = [[x["digest"] for x in of] for of in (trainings[kind].ends(), ends)]
            assert digests[0] == digests[1], (
                f"{trainings[kind].run}: another end than the undisturbed training's"
            )
            ended[kind] += 1
            shutil.rmtree(trainings[kind].run)
            trainings[kind] = Training.new(kind, root, counts)
    counts["finished"], counts["kinds"] = ended.total(), len(ended)
    return counts


def main() -> None:
    options = argparse.ArgumentParser(
        description="Kill trainings at random, resume them, compare their ends."
    )
    options.add_argument("--kills", type=int, default=200, help="SIGKILLs there are to be (default: 200)")
    options.add_argument("--seconds", type=float, default=1500, help="bound on the time (default: 1500)")
    options.add_argument("--seed", type=int, default=0, help="of the moments and operations (default: 0)")
    args, begun = options.parse_args(), time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        durable_files.IN_MEMORY = ()  # it may be there
        counts = soak(args.kills, args.seconds, args.seed, Path(root))
    if counts["slow"]:
        print(f"slow: in {args.seconds:g} s {counts['kills']} of {args.kills} SIGKILLs,", end=" ")
        print(f"{counts['kinds']} of {len(KINDS)} kinds of training ended")
    print(f"{counts['kills']} SIGKILLs")
    print(f"{counts['resumed']} lives began with a checkpoint, each a whole one and the newest")
    print(f"{counts['named']} survivors of a killed rank stopped by themselves and named it")
    print(f"{counts['finished']} trainings got to their end, each with the bits of an undisturbed one")
    print(f"in {time.monotonic() - begun:.0f} s, seed {args.seed}")


if __name__ == "__main__":
    main()
