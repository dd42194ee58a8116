"""Kill a training, resume it, again and again: does every life load a whole checkpoint, is the end always the same?

`python tests/soak.py --kills 200 --seconds 1500` trains a small model in one process and in two, saving every other
step; from life to life parameters live elsewhere, micro-batches come in another order, updates are deferred or not.
A life ends by SIGKILL: at a random moment, of one rank or of all, or just before an operation drawn from the plan.
Where one rank of two is killed, the other has to stop by itself and name it. A training that gets to its end is
compared, bit by bit, to one that was not disturbed.

Lives are forked from a process that has imported torch, which is why there can be hundreds of them.
"""

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from attrs import define, field
from rank_worker import global_batch, rows_of
from small_models import MODELS

import zfunc
from zfunc.checkpoint import directory as checkpoints
from zfunc.engine.specialize import specialize
from zfunc.runtime.fault_injection import Fault

STEPS, EVERY, KEEP = 60, 2, 2  # of a training; from one save to the next; checkpoints kept
LIVES: tuple[dict[str, Any], ...] = (  # settings of one life after the other: none changes the training
    {},
    {"stage": 3, "params_on": "host", "activations_on": "host"},
    {"defer": True, "accumulate": "vertical"},
    {"defer": True, "stage": 3, "params_on": "host", "accumulate": "horizontal"},
)
PHASES = ("starting", "loading", "in a step", "in a step that saves", "ending")
PASSES = ("load", "forward", "backward")  # operations of a step in every life
OTHERS = ("pack", "global_norm", "mean_loss", "decide", "adam", "write", "publish")  # the first of each, too
PATIENCE = 60.0  # seconds for a survivor to stop by itself
COLLECTIVE = timedelta(seconds=20)  # that a rank waits for another that does not come


def train(rank: int, world: int, run: Path, life: int, faults: tuple[Fault, ...], phase: Any) -> None:
    """One rank of one life, from the newest checkpoint to the end, if it gets there."""
    torch.set_num_threads(1)
    phase[rank] = 0
    if world > 1:
        dist.init_process_group("gloo", f"file://{run}/store", COLLECTIVE, world, rank)
    segments, data = MODELS["odd sizes"]()
    optimizer = zfunc.AdamW(lr=1e-3, moments="8bit" if world > 1 else "fp32")
    settings = {"micro_batches": 2, "clip_norm": 0.5, **LIVES[life % len(LIVES)]}
    program = zfunc.compile(
        segments, optimizer=optimizer, precision="fp32", device="cpu", bucket_size=3000, **settings
    )
    folder = run / "checkpoints"
    phase[rank] = 1
    state = (
        zfunc.load(folder, program) if checkpoints.find_checkpoint(folder) else zfunc.init(program, seed=1)
    )
    (run / f"loaded-{rank}").write_text(str(state.step))
    while state.step < STEPS:
        saves = state.step > 0 and state.step % EVERY == 0
        phase[rank] = 3 if saves else 2
        batch = rows_of(global_batch(data, state.batches), rank, world)
        save = zfunc.Save(folder, keep=KEEP) if saves else None
        state, metrics = zfunc.train_step(program, state, batch, save=save, faults=faults)
        assert metrics.saved is None or metrics.saved.path is not None, metrics.saved
    phase[rank] = 4
    zfunc.save(folder, program, state, keep=KEEP)
    digest = hashlib.sha256()
    for name, values in sorted(zfunc.params(program, state).items()):
        digest.update(name.encode() + values.reshape(-1).view(torch.uint8).numpy().tobytes())
    plan = specialize(program, rows_of(global_batch(data, 0), rank, world), save=True).plan
    common = [op.name for op in plan.graph if op.verb in PASSES or (op.verb in OTHERS and not any(op.index))]
    told = {"digest": digest.hexdigest(), "ops": common}
    (run / f"end-{rank}.json").write_text(json.dumps(told))


def fork(rank: int, world: int, run: Path, life: int, faults: tuple[Fault, ...], phase: Any) -> int:
    """A process that makes this rank's life; what it raised is left in the run's folder."""
    if child := os.fork():
        return child
    _live(rank, world, run, life, faults, phase)


def _live(rank: int, world: int, run: Path, life: int, faults: tuple[Fault, ...], phase: Any) -> NoReturn:
    code = 1
    try:
        train(rank, world, run, life, faults, phase)
        code = 0
    except BaseException:
        (run / f"raised-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


@define
class Figures:
    """What there was of each, over all trainings."""

    kills: Counter[str] = field(factory=Counter)  # by where the killed rank was
    resumed: int = 0
    finished: int = 0
    named: int = 0  # survivors that stopped by themselves
    slowest: float = 0.0  # seconds from a kill until every survivor had stopped
    failures: list[str] = field(factory=list)

    def text(self) -> str:
        """As lines."""
        where = ", ".join(f"{n} {phase}" for phase, n in self.kills.most_common())
        lines = [
            f"{self.kills.total()} SIGKILLs: {where}",
            f"{self.resumed} lives began with a checkpoint, each a whole one and the newest",
            f"{self.named} survivors of a killed rank stopped by themselves and named it, the slowest after "
            f"{self.slowest:.1f} s",
            f"{self.finished} trainings got to their end, each with the bits of an undisturbed one",
        ]
        return "\n".join([*lines, *(f"FAILED: {x}" for x in self.failures)])


@define
class Training:
    """One training, in as many lives as it takes."""

    world: int
    run: Path
    phase: Any
    pids: dict[int, int] = field(factory=dict)  # rank -> process, of those that live
    lives: int = 0

    def begin(self, faults: tuple[Fault, ...] = ()) -> None:
        """The next life."""
        for leftover in (*self.run.glob("store*"), *self.run.glob("raised-*"), *self.run.glob("end-*")):
            leftover.unlink()
        ranks = range(self.world)
        self.pids = {r: fork(r, self.world, self.run, self.lives, faults, self.phase) for r in ranks}
        self.lives += 1

    def wait(self, seconds: float) -> dict[int, int]:
        """Exit codes of the ranks that ended within the seconds; as soon as one has failed."""
        ended: dict[int, int] = {}
        until = time.monotonic() + seconds
        while self.pids and time.monotonic() < until:
            for rank, pid in list(self.pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[rank] = os.waitstatus_to_exitcode(status)
                    del self.pids[rank]
            if any(ended.values()):
                break
            time.sleep(0.002)
        return ended

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL for those that live."""
        for rank in ranks:
            if rank in self.pids:
                os.kill(self.pids[rank], signal.SIGKILL)

    def raised(self, rank: int) -> str:
        """What a rank that failed had to say."""
        path = self.run / f"raised-{rank}"
        return path.read_text() if path.exists() else "nothing"

    def digests(self) -> list[str]:
        """Of every rank at the end."""
        return [json.loads((self.run / f"end-{r}.json").read_text())["digest"] for r in range(self.world)]


def undisturbed(world: int, root: Path) -> tuple[list[str], list[str], float]:
    """The digests at the end, the operations of a step that saves, and the seconds it takes."""
    training = new_training(world, root)
    begun = time.monotonic()
    training.begin()
    codes = training.wait(300)
    if codes != dict.fromkeys(range(world), 0):
        raise SystemExit(f"the undisturbed training failed on {codes}:\n{training.raised(0)}")
    ops = json.loads((training.run / "end-0.json").read_text())["ops"]
    return training.digests(), ops, time.monotonic() - begun


def new_training(world: int, root: Path) -> Training:
    """In a folder of its own."""
    return Training(world, Path(tempfile.mkdtemp(dir=root)), mmap.mmap(-1, 64))


def one_life(training: Training, chance: random.Random, ops: list[str], seconds: float, f: Figures) -> bool:
    """Begin, kill, look at what is left; True if the training got to its end instead."""
    found = checkpoints.find_checkpoint(training.run / "checkpoints")
    step = found.manifest.position.step if found else 0
    victims = [chance.randrange(training.world)] if chance.random() < 0.6 else list(range(training.world))
    at_op = chance.random() < 0.4
    next_save = max(step, EVERY) + 1  # by its number: it saves what the step before it left
    fault = Fault(victims[0], next_save + chance.choice((0, EVERY)), chance.choice(ops), "kill")
    training.begin((fault,) if at_op else ())
    codes = training.wait(PATIENCE + seconds if at_op else chance.uniform(0, seconds))
    if not codes:
        training.kill(victims)
    killed = time.monotonic()
    while training.pids and time.monotonic() < killed + PATIENCE:
        codes |= training.wait(PATIENCE)
    f.resumed += found is not None and (training.run / "loaded-0").exists()
    if found is not None and (loaded := int((training.run / "loaded-0").read_text())) < step:
        f.failures.append(f"{training.run}: loaded step {loaded}, where {step} was whole")
    if training.pids:
        f.failures.append(f"{training.run}: ranks {list(training.pids)} did not stop within {PATIENCE:g} s")
        training.kill(list(training.pids))
        training.wait(10)
    dead = [r for r, code in codes.items() if code == -signal.SIGKILL]
    for rank in dead:
        f.kills[PHASES[training.phase[rank]]] += 1
    for rank in (r for r, code in codes.items() if code not in (0, -signal.SIGKILL)):
        said = training.raised(rank)
        if dead and ("RankError" in said or "init_process_group" in said or "rendezvous" in said):
            f.named += any(f"rank {r}" in said for r in dead)
            f.slowest = max(f.slowest, time.monotonic() - killed)
        else:
            f.failures.append(f"{training.run}: rank {rank} failed by itself: {said}")
    return not dead and not f.failures


def soak(kills: int, seconds: float, seed: int, worlds: tuple[int, ...], root: Path) -> Figures:
    """Until there were so many kills or seconds; at least one training gets to its end in each world."""
    f, chance, begun = Figures(), random.Random(seed), time.monotonic()
    expected = {world: undisturbed(world, root) for world in worlds}
    ended: Counter[int] = Counter()
    trainings = {world: new_training(world, root) for world in worlds}
    while not f.failures and time.monotonic() < begun + seconds:
        enough = f.kills.total() >= kills
        if enough and all(ended[w] for w in worlds):
            break
        world = chance.choice([w for w in worlds if not (enough and ended[w])])
        digests, ops, length = expected[world]
        if not one_life(trainings[world], chance, ops, length, f):
            continue
        if trainings[world].digests() != digests:
            f.failures.append(f"{trainings[world].run}: another end than the undisturbed training's")
        ended[world] += 1
        f.finished += 1
        shutil.rmtree(trainings[world].run)
        trainings[world] = new_training(world, root)
    if not f.failures and not (f.kills.total() >= kills and all(ended[w] for w in worlds)):
        f.failures.append(f"{f.kills.total()} of {kills} kills and {dict(ended)} ends within {seconds:g} s")
    return f


def main() -> int:
    options = argparse.ArgumentParser(
        description="Kill trainings at random, resume them, compare their ends."
    )
    options.add_argument("--kills", type=int, default=200, help="SIGKILLs there are to be (default: 200)")
    options.add_argument("--seconds", type=float, default=1500, help="bound on the time (default: 1500)")
    options.add_argument("--seed", type=int, default=0, help="of the moments and operations (default: 0)")
    args = options.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        f = soak(args.kills, args.seconds, args.seed, (1, 2), Path(root))
    print(f"{f.text()}\n{time.monotonic() - begun:.0f} s, seed {args.seed}")
    return 1 if f.failures else 0


if __name__ == "__main__":
    sys.exit(main())
