"""Kill a training, resume it, again and again: does every life load a whole checkpoint, is the end always the same?

`python tests/soak.py --kills 200 --seconds 1500` trains a small model in one process and in two: in memory, saving
every other step, and with state, parameters, gradients and activations on the disk, where each step is committed.
From life to life parameters live elsewhere, micro-batches come in another order, updates are deferred or not. A
life ends by SIGKILL: at a random moment, of one rank or of all, or just before an operation drawn from the plan.
Where one rank of two is killed, the other has to stop by itself and name it. A training that gets to its end is
compared, bit by bit, to one that was not disturbed, and that one on the disk to the one in memory.

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
from attrs import define, field, frozen
from rank_worker import global_batch, rows_of
from small_models import MODELS

import zfunc
from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import swap_folders
from zfunc.checkpoint.swap_checkpoint import has_commit, open_swap_checkpoint
from zfunc.engine.compile.specialize import specialize
from zfunc.runtime.fault_injection import Fault

STEPS, EVERY, KEEP = 60, 2, 2  # of a training; from one save to the next; checkpoints kept
LIVES: tuple[dict[str, Any], ...] = (  # settings of one life after the other: none changes the training
    {},
    {"stage": 3, "params_on": "host", "activations_on": "host"},
    {"defer": True, "accumulate": "vertical"},
    {"defer": True, "stage": 3, "params_on": "host", "accumulate": "horizontal"},
)
ON_DISK: dict[str, Any] = {"state_on": "disk", "params_on": "disk", "stage": 3, "state_slots": 1}
LIVES_ON_DISK: tuple[dict[str, Any], ...] = (
    {"grads_on": "disk", "activations_on": "disk"},
    {"grads_on": "disk", "activations_on": "host,disk", "defer": True, "accumulate": "vertical"},
    {"weight_slots": 1, "accumulate": "horizontal"},
)
PHASES = ("starting", "loading", "in a step", "in a step that saves", "ending")
PASSES = ("load", "forward", "backward")  # operations of a step in every life
# the first of each, too
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
    "page_out_all",
    "commit",
)
PATIENCE = 60.0  # seconds for a survivor to stop by itself
COLLECTIVE = timedelta(seconds=20)  # that a rank waits for another that does not come


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


def train(
    rank: int, run: Path, kind: Kind, life: int, loads: bool, faults: tuple[Fault, ...], phase: Any
) -> None:
    """One rank of one life, from the newest checkpoint if it `loads` one to the end, if it gets there."""
    world = kind.world
    torch.set_num_threads(1)
    phase[rank] = 0
    if world > 1:
        dist.init_process_group("gloo", f"file://{run}/store", COLLECTIVE, world, rank)
    segments, data = MODELS["odd sizes"]()
    optimizer = zfunc.AdamW(lr=1e-3, moments="8bit" if world > 1 else "fp32")
    settings = {"micro_batches": 2, "clip_norm": 0.5, **kind.settings(run, life)}
    program = zfunc.compile(
        segments, optimizer=optimizer, precision="fp32", device="cpu", bucket_size=3000, **settings
    )
    folder = run / "checkpoints"
    phase[rank] = 1
    state = zfunc.load(folder, program) if loads else zfunc.init(program, seed=1)
    (run / f"loaded-{rank}").write_text(str(state.step))
    while state.step < STEPS:
        saves = not kind.on_disk and state.step > 0 and state.step % EVERY == 0
        phase[rank] = 3 if saves or kind.on_disk else 2
        batch = rows_of(global_batch(data, state.batches), rank, world)
        save = zfunc.Save(folder, keep=KEEP) if saves else None
        state, metrics = zfunc.train_step(program, state, batch, save=save, faults=faults)
        assert metrics.saved is None or metrics.saved.path is not None, metrics.saved
    phase[rank] = 4
    zfunc.save(folder, program, state, **({} if kind.on_disk else {"keep": KEEP}))
    digest = hashlib.sha256()
    for name, values in sorted(zfunc.params(program, state).items()):
        digest.update(name.encode() + values.reshape(-1).view(torch.uint8).numpy().tobytes())
    batch = rows_of(global_batch(data, 0), rank, world)
    plan = specialize(program, batch, save=not kind.on_disk, commit=kind.on_disk, recipe=program.recipe).plan
    common = [op.name for op in plan.graph if op.verb in PASSES or (op.verb in OTHERS and not any(op.index))]
    told = {"digest": digest.hexdigest(), "ops": common}
    (run / f"end-{rank}.json").write_text(json.dumps(told))


def fork(rank: int, run: Path, *of_life: Any) -> int:
    """A process that makes this rank's life; what it raised is left in the run's folder."""
    if child := os.fork():
        return child
    _live(rank, run, *of_life)


def _live(rank: int, run: Path, *of_life: Any) -> NoReturn:
    code = 1
    try:
        train(rank, run, *of_life)
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

    kind: Kind
    run: Path
    phase: Any
    saved: int | None = None  # step of the newest checkpoint
    pids: dict[int, int] = field(factory=dict)  # rank -> process, of those that live
    lives: int = 0

    def begin(self, faults: tuple[Fault, ...] = ()) -> None:
        """The next life."""
        for name in ("store*", "raised-*", "end-*", "loaded-*"):
            for leftover in self.run.glob(name):
                leftover.unlink()
        of_life = self.kind, self.lives, self.saved is not None, faults, self.phase
        self.pids = {r: fork(r, self.run, *of_life) for r in range(self.kind.world)}
        self.lives += 1

    def look(self) -> None:
        """Find the newest checkpoint, which is never an older one than before."""
        try:
            found = self.kind.saved_step(self.run)
        except zfunc.CheckpointError as error:
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
        return [
            json.loads((self.run / f"end-{r}.json").read_text())["digest"] for r in range(self.kind.world)
        ]


def undisturbed(kind: Kind, root: Path) -> tuple[list[str], list[str], float]:
    """The digests at the end, the operations of a step that saves, and the seconds it takes."""
    training = new_training(kind, root)
    begun = time.monotonic()
    training.begin()
    codes = training.wait(300)
    if codes != dict.fromkeys(range(kind.world), 0):
        raise SystemExit(f"the undisturbed training failed on {codes}:\n{training.raised(0)}")
    ops = json.loads((training.run / "end-0.json").read_text())["ops"]
    return training.digests(), ops, time.monotonic() - begun


def new_training(kind: Kind, root: Path) -> Training:
    """In a folder of its own."""
    run = Path(tempfile.mkdtemp(dir=root))
    for name in ("checkpoints", "second") if kind.on_disk else ():
        (run / name).mkdir()
    return Training(kind, run, mmap.mmap(-1, 64))


def one_life(training: Training, chance: random.Random, ops: list[str], seconds: float, f: Figures) -> bool:
    """Begin, kill, look at what is left; True if the training got to its end instead."""
    training.look()
    step, kind = training.saved or 0, training.kind
    victims = [chance.randrange(kind.world)] if chance.random() < 0.6 else list(range(kind.world))
    at_op = chance.random() < 0.4
    # by its number: it saves what the step before it left, on the disk mostly its own
    next_save = (step if kind.on_disk else max(step, EVERY)) + 1
    fault = Fault(victims[0], next_save + chance.choice((0, EVERY)), chance.choice(ops), "kill")
    training.begin((fault,) if at_op else ())
    codes = training.wait(PATIENCE + seconds if at_op else chance.uniform(0, seconds))
    if not codes:
        training.kill(victims)
    killed = time.monotonic()
    while training.pids and time.monotonic() < killed + PATIENCE:
        codes |= training.wait(PATIENCE)
    loaded = training.run / "loaded-0"
    f.resumed += training.saved is not None and loaded.exists()
    if training.saved is not None and loaded.exists() and int(loaded.read_text()) < step:
        f.failures.append(f"{training.run}: loaded step {loaded.read_text()}, where {step} was whole")
    if training.pids:
        f.failures.append(f"{training.run}: ranks {list(training.pids)} did not stop within {PATIENCE:g} s")
        training.kill(list(training.pids))
        training.wait(10)
    dead = [r for r, code in codes.items() if code == -signal.SIGKILL]
    for rank in dead:
        where = PHASES[training.phase[rank]]
        f.kills[f"{where}, on the disk" if kind.on_disk else where] += 1
    for rank in (r for r, code in codes.items() if code not in (0, -signal.SIGKILL)):
        said = training.raised(rank)
        if dead and ("RankError" in said or "init_process_group" in said or "rendezvous" in said):
            f.named += any(f"rank {r}" in said for r in dead)
            f.slowest = max(f.slowest, time.monotonic() - killed)
        else:
            f.failures.append(f"{training.run}: rank {rank} failed by itself: {said}")
    return not dead and not f.failures


def soak(kills: int, seconds: float, seed: int, root: Path) -> Figures:
    """Until there were so many kills or seconds; at least one training of each kind gets to its end."""
    f, chance, begun = Figures(), random.Random(seed), time.monotonic()
    expected = {kind: undisturbed(kind, root) for kind in KINDS}
    f.failures += [
        f"{kind}: another end than in memory"
        for kind in KINDS
        if expected[kind][0] != expected[Kind(kind.world, on_disk=False)][0]
    ]
    ended: Counter[Kind] = Counter()
    trainings = {kind: new_training(kind, root) for kind in KINDS}
    while not f.failures and time.monotonic() < begun + seconds:
        enough = f.kills.total() >= kills
        if enough and all(ended[kind] for kind in KINDS):
            break
        kind = chance.choice([kind for kind in KINDS if not (enough and ended[kind])])
        digests, ops, length = expected[kind]
        if not one_life(trainings[kind], chance, ops, length, f):
            continue
        if trainings[kind].digests() != digests:
            f.failures.append(f"{trainings[kind].run}: another end than the undisturbed training's")
        ended[kind] += 1
        f.finished += 1
        shutil.rmtree(trainings[kind].run)
        trainings[kind] = new_training(kind, root)
    if not f.failures and not (f.kills.total() >= kills and all(ended[kind] for kind in KINDS)):
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
        swap_folders.IN_MEMORY = ()  # it may be there
        f = soak(args.kills, args.seconds, args.seed, Path(root))
    print(f"{f.text()}\n{time.monotonic() - begun:.0f} s, seed {args.seed}")
    return 1 if f.failures else 0


if __name__ == "__main__":
    sys.exit(main())
