"""Where scalars go: TensorBoard event files, Weights & Biases, DeepSpeed's CSV files. SINKS lists them.

A sink opened at x drops what its run wrote at x or later, so no scalar is written twice. Runs may share a folder:
what another run wrote stays, and a warning is logged. Only if another run has appended to a CSV file since do the
lines of this one from x on stay too.
"""

import csv
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

WANDB_MODE, OFFLINE = "WANDB_MODE", "offline"
RUN_ID = "zfunc-run-id"  # in the run folder: the run's name in every sink
SENT = "zfunc-sent"  # beside W&B's files, once its server has the run
CSV_RUNS = ".zfunc-runs"  # in a folder of CSV files: the runs that wrote to it
log = logging.getLogger("zfunc")


@frozen
class RunInfo:
    """The run folder and the run's configuration. `x` is where a resumed run goes on; None for a new one."""

    path: Path
    config: Mapping[str, Any]
    x: int | None = None

    @property
    def id(self) -> str:
        """The same in every session of the run."""
        path = self.path / RUN_ID
        if not path.is_file():
            path.write_text(secrets.token_hex(4))
        return path.read_text().strip()


class Sink(Protocol):
    """Takes scalars in the order of x. `block` is the sink's block of DeepSpeed's configuration, if there is one.

    `empty`: the sink has nothing of this run, so all of its scalars are due; else it has those below the run's x.
    """

    PACKAGE: str
    """The package that it imports."""
    empty: bool

    def __init__(self, run: RunInfo, block: Mapping[str, Any] | None) -> None: ...

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """Write them to disk, or raise."""

    def close(self, *, failed: bool) -> None:
        """Nothing more comes; `failed` says whether the training ended with an error."""


class TensorBoard:
    """One event file a session, all in one folder.

    Not SummaryWriter: on a full disk its thread prints a traceback, and it names files by the clock, which may go
    back, while readers order events by file name and a restart drops what files before it have at x or later.
    """

    PACKAGE = "tensorboard.summary.writer.record_writer"

    def __init__(self, run: RunInfo, block: Mapping[str, Any] | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = _folder(run, block, "tensorboard")
        files = list(folder.glob("events.out.tfevents.*"))
        self.empty = run.x is None or not any(path.suffix == f".{run.id}" for path in files)
        if files and self.empty:
            log.warning("%s: it holds events of another run: TensorBoard shows both as one", folder)
        times = [int(part) for path in files if (part := path.name.split(".")[3]).isdecimal()]
        began = max([int(time.time()), *(1 + t for t in times)])
        name = f"events.out.tfevents.{began:010}.{socket.gethostname()}.{os.getpid()}.{run.id}"
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = RecordWriter((folder / name).open("xb"))
        self._put(file_version="brain.Event:2")
        if not self.empty:
            self._put(step=run.x, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """One event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._put(step=x, summary=self._summary(value=values))

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()

    def _put(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()


class WandB:
    """One W&B run for all sessions, offline unless WANDB_MODE says otherwise.

    Offline, every session replaces the run's folder, because W&B cannot delete from one. Online, the server has the
    steps that were sent and ignores repeated ones.
    """

    PACKAGE = "wandb"

    def __init__(self, run: RunInfo, block: Mapping[str, Any] | None) -> None:
        mode = os.environ.get(WANDB_MODE) or OFFLINE
        offline = mode in (OFFLINE, "dryrun", "disabled")
        if offline:
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # or it looks up its server's address even offline
        import wandb

        folder = run.path / "wandb"
        folder.mkdir(exist_ok=True)
        self.empty = offline or not (folder / SENT).exists()
        for old in folder.glob(f"offline-run-*-{run.id}") if offline else ():
            shutil.rmtree(old)
        place = {} if block is None else {"group": block["group"], "entity": block["team"]}
        self._run: Any = wandb.init(
            dir=run.path,
            mode=mode,  # pyright: ignore[reportArgumentType]
            id=run.id,
            resume=None if offline else "allow",
            name=run.path.name,
            config=dict(run.config),
            reinit="create_new",  # the calling program may have a run of its own
            settings=wandb.Settings(console="off", silent=True, disable_code=True),
            project="zfunc" if block is None else block["project"],
            **place,
        )
        upload = f"offline, nothing is sent; to upload: wandb sync {folder}/offline-run-*-{run.id}"
        log.info("Weights & Biases: %s", upload if offline else f"mode {mode}, run {run.id}")
        if not offline:
            (folder / SENT).touch()

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """Add to the row of x in the run's history."""
        self._run.log(dict(scalars), step=x)

    def close(self, *, failed: bool) -> None:
        """Finish the run, and wait until its file is complete: `finish` alone does not."""
        import wandb

        try:
            self._run.finish(exit_code=int(failed))
        finally:
            if wandb.run is None:  # else the calling program has a run in the same service
                wandb.teardown()


class CSV:
    """One file a scalar, with one line for every x, as DeepSpeed's csv_monitor writes them.

    CSV_RUNS has the runs that wrote to the folder, and the size of each file before the last of them.
    """

    PACKAGE = "csv"

    def __init__(self, run: RunInfo, block: Mapping[str, Any] | None) -> None:
        self._folder = _folder(run, block, "csv_monitor")
        record, files = self._folder / CSV_RUNS, sorted(self._folder.glob("*.csv"))
        runs, sizes = _read_runs(record)
        self.empty = not files or run.x is None or run.id not in runs
        if run.x is not None and not self.empty and runs[-1] == run.id:
            for file in files:
                _truncate_from(file, run.x, sizes.get(file.name, 0))
            return
        if files:
            log.warning("%s: another run has written here: what the files hold stays", self._folder)
        sizes = {file.name: file.stat().st_size for file in files}
        record.write_text(json.dumps({"runs": [*runs, run.id], "sizes": sizes}))

    def write(self, x: int, scalars: Mapping[str, float]) -> None:
        """A line in every file."""
        for name, value in scalars.items():
            file = name.replace("/", "_").replace(" ", "_") + ".csv"
            with self._folder.joinpath(file).open("a", newline="") as out:
                rows = csv.writer(out)
                if not out.tell():
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([x, value])

    def close(self, *, failed: bool) -> None:
        """Nothing is open."""


SINKS: Mapping[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "csv_monitor": CSV}
"""By the name of the setting, and of the block in DeepSpeed's configuration."""


def _folder(run: RunInfo, block: Mapping[str, Any] | None, kind: str) -> Path:
    """The folder of the block; without one, a folder in the run folder."""
    folder = run.path / kind
    if block is not None:
        folder = Path(block["output_path"], block["job_name"]).expanduser()
    log.info("%s: %s", kind, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read_runs(path: Path) -> tuple[list[str], dict[str, int]]:
    if not path.exists():
        return [], {}
    try:
        content = json.loads(path.read_text())
        return content["runs"], content["sizes"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not written by zfunc ({error}): name another folder") from error


def _truncate_from(path: Path, x: int, start: int) -> None:
    """Drop the lines at the end that are at x or later; the first `start` bytes are another run's."""
    content = path.read_bytes()
    lines = content[start:].splitlines(keepends=True)
    while lines and not _is_below(lines[-1], x):
        lines.pop()
    os.truncate(path, len(content[:start]) + sum(map(len, lines)))


def _is_below(line: bytes, x: int) -> bool:
    at = line.partition(b",")[0]
    return line.endswith(b"\n") and not (at.isdigit() and int(at) >= x)
