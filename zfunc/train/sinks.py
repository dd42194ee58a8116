"""Where scalars of a training go: TensorBoard's event files, a run of Weights & Biases, CSV files.

The invariant: a sink that goes on at x holds no scalar of its run at x or later, so nothing is in it twice. Runs
may share a folder, one after another: files keep what another wrote. Only what is in a CSV file before lines that
another run added is not taken back, which is told.
The packages are imported when a sink is opened: pip install "zfunc[tensorboard]", "zfunc[wandb]".
"""

import csv
import importlib
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from attrs import asdict, define, field, frozen

PACKAGES = {"tensorboard": "tensorboard.summary.writer.record_writer", "wandb": "wandb"}
WANDB_MODE, OFFLINE = "WANDB_MODE", "offline"
ID = "zfunc-run-id"  # the file with a run's id, in its folder; Weights & Biases has the run by it
SENT = "zfunc-sent"  # beside what W&B writes, where its server has been sent what there was
LIVES = ".zfunc-lives"  # in a folder of scalars: a line for every life of a run that wrote there
log = logging.getLogger("zfunc")


@frozen
class RunInfo:
    """What begins: the run folder, what is told of it, and the x where it goes on in that folder, if it does."""

    run: Path
    config: Mapping[str, Any]
    x: int | None = None


class Sink(Protocol):
    """Takes scalars in the order of x. `empty`: it holds nothing of this run from before, so all of that is to be
    written anew; else all that is below the x it was opened with.
    """

    @property
    def empty(self) -> bool:
        """Whether nothing of this run is there from before."""
        ...

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """Write them so that they are there when this returns, or raise."""

    def close(self, *, failed: bool) -> None:
        """Nothing more comes."""


def check_package(kind: str, label: str) -> None:
    """Raises ValueError, about what `label` says, if the package that writes `kind` cannot be imported."""
    if kind not in PACKAGES:
        return
    try:
        importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        raise ValueError(
            f"{label}: got no package that writes it ({error}), expected {kind}: pip install 'zfunc[{kind}]'"
        ) from error


# --- whose it is -----------------------------------------------------------------------------------------


@frozen
class _Life:
    """A life of a run that wrote to a folder, and the bytes that each file had before it."""

    run: str
    sizes: Mapping[str, int]


def _lives(path: Path) -> list[_Life]:
    """Those of all runs, oldest first."""
    if not path.exists():
        return []
    try:
        return [_Life(**json.loads(line)) for line in path.read_text().splitlines()]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: got what zfunc did not write ({error}), expected a line for every life of a run: name "
            "another folder"
        ) from error


def _add(path: Path, life: _Life) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(life)) + "\n")


def _goes_on(begin: RunInfo, files: Sequence[Any], lives: Sequence[_Life]) -> bool:
    """Whether the run goes on in a folder with these files, of which some are its own."""
    return bool(files) and begin.x is not None and _id(begin.run) in {life.run for life in lives}


def _id(run: Path) -> str:
    path = run / ID
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


# --- TensorBoard -----------------------------------------------------------------------------------------


@define(eq=False)
class TensorBoard:
    """An event file of its own for every life of a run, in one folder.

    Not `torch.utils.tensorboard`: that writes in a thread, which prints a traceback where the disk is full.
    """

    empty: bool
    _writer: Any
    _event: Any
    _summary: Any

    @classmethod
    def open(cls, folder: Path, begin: RunInfo) -> "TensorBoard":
        """The newest file of `folder`, which readers take in the order of names. Raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        lives, run = folder / f"{LIVES}-tensorboard", _id(begin.run)
        there = [_seconds(path) for path in folder.glob("events.out.tfevents.*")]
        goes_on = _goes_on(begin, there, _lives(lives))
        if there and not goes_on:
            log.warning("%s: it holds events of another run: TensorBoard shows both as one", folder)
        began = max([int(time.time()), *(seconds + 1 for seconds in there)])
        path = folder / f"events.out.tfevents.{began:010}.{socket.gethostname()}.{os.getpid()}.zfunc"
        made = cls(not goes_on, RecordWriter(path.open("xb")), Event, Summary)
        made._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        _add(lives, _Life(run, {}))
        if goes_on:  # what readers know as a restart: they drop what is at x or later, of whatever run
            restart = SessionLog(status=SessionLog.START)
            made._put(Event(wall_time=time.time(), step=begin.x, session_log=restart))
        return made

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """One event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._put(self._event(wall_time=time.time(), step=x, summary=self._summary(value=values)))

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _seconds(path: Path) -> int:
    part = path.name.split(".")[3]
    return int(part) if part.isdecimal() else 0


# --- Weights & Biases ------------------------------------------------------------------------------------


@define(eq=False)
class WandB:
    """One W&B run for all lives, by an id that is kept in the run folder.

    Offline its folder is made anew where a run goes on: W&B cannot take back what is in one. Online the server has
    the steps that were sent, and takes none of them again.
    """

    empty: bool
    _run: Any

    @classmethod
    def open(cls, begin: RunInfo, **given: Any) -> "WandB":
        """`given` are arguments of `wandb.init`. Offline unless WANDB_MODE says otherwise."""
        mode = os.environ.get(WANDB_MODE) or OFFLINE
        offline = mode in (OFFLINE, "dryrun", "disabled")
        if offline:
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # or it asks for its server's address even offline
        import wandb

        folder = begin.run / "wandb"
        folder.mkdir(exist_ok=True)
        run_id, sent = _id(begin.run), folder / SENT
        empty = offline or not sent.exists()
        if offline:
            for old in folder.glob(f"offline-run-*-{run_id}"):
                shutil.rmtree(old)
        run = wandb.init(
            dir=begin.run,
            mode=mode,
            id=run_id,
            resume=None if offline else "allow",
            name=begin.run.name,
            config=dict(begin.config),
            reinit="create_new",  # a program that calls this may have a run of its own
            settings=wandb.Settings(console="off", silent=True, disable_code=True),
            **given,
        )
        told = f"offline, nothing is sent; to upload: wandb sync {folder}/offline-run-*-{run_id}"
        log.info("Weights & Biases: %s", told if offline else f"mode {mode}, run {run_id}")
        if not offline:
            sent.touch()
        return cls(empty, run)

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """One row of its history; more for the same x is added to it."""
        self._run.log(dict(scalars), step=x)

    def close(self, *, failed: bool) -> None:
        """Finish the run, and wait until its file is whole: `finish` alone does not."""
        import wandb

        try:
            self._run.finish(exit_code=int(failed))
        finally:
            if wandb.run is None:  # else a program that calls this has a run of its own in the same service
                wandb.teardown()


# --- CSV, as DeepSpeed's csv_monitor ---------------------------------------------------------------------


@define(eq=False)
class CSV:
    """A file for every scalar, named after it, with a line for every x."""

    folder: Path
    empty: bool
    _known: set[str] = field(factory=set[str])

    @classmethod
    def open(cls, folder: Path, begin: RunInfo) -> "CSV":
        """Lines of another run stay, and those of this one that are at x or later go."""
        folder.mkdir(parents=True, exist_ok=True)
        path, run, files = folder / f"{LIVES}-csv", _id(begin.run), sorted(folder.glob("*.csv"))
        lives = _lives(path)
        goes_on = _goes_on(begin, files, lives)
        if files and not goes_on:
            log.warning("%s: it holds files of another run, which are added to", folder)
        if goes_on and begin.x is not None:
            _take_back(folder, files, begin.x, [*takewhile(lambda x: x.run == run, reversed(lives))])
        sizes = {file.name: file.stat().st_size for file in files}
        _add(path, _Life(run, sizes))
        return cls(folder, not goes_on, {name for name, size in sizes.items() if size})

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """A line in every file."""
        for name, value in scalars.items():
            file = name.replace("/", "_").replace(" ", "_") + ".csv"
            with self.folder.joinpath(file).open("a", newline="") as out:
                rows = csv.writer(out)
                if file not in self._known:
                    self._known.add(file)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([x, value])

    def close(self, *, failed: bool) -> None:
        """Nothing is open."""


def _take_back(folder: Path, files: list[Path], x: int, last: list[_Life]) -> None:
    """Drop what this run wrote at x or later, in the `last` lives, newest first, since another run was there."""
    if not last:
        log.warning(
            "%s: another run has added to it since: what this one wrote from %d on stays, and comes twice",
            *(folder, x),
        )
    for file in files if last else ():
        _cut(file, x, last[-1].sizes.get(file.name, 0))


def _cut(path: Path, x: int, start: int) -> None:
    """Drop the lines at the end that are at x or later; those before the byte `start` are of another run."""
    content = path.read_bytes()
    lines = content[start:].splitlines(keepends=True)
    while lines and not _is_below(lines[-1], x):
        lines.pop()
    os.truncate(path, len(content[:start]) + sum(map(len, lines)))


def _is_below(line: bytes, x: int) -> bool:
    at = line.partition(b",")[0]
    return line.endswith(b"\n") and not (at.isdigit() and int(at) >= x)
