"""A training's metrics as scalars, for the trackers that flags ask for: TensorBoard, Weights & Biases, trackio.

A tracker is made with the run folder and the settings, and has `log(scalars, step)`, in the order of steps, and
`close()`. A scalar is a finite number of metrics.jsonl. When a run resumes, what a tracker has of it in the run
folder is deleted and written again from there, so no point comes twice. A tracker that fails is closed with a
warning, and the training goes on.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from zfunc.errors import install, refuse
from zfunc.train.events import Evaluated, Event, Started, Stepped
from zfunc.train.run_files import METRICS
from zfunc.train.run_folder import RunFolder, jsonable
from zfunc.train.run_history import Row, finite_number, rows_of
from zfunc.train.settings import TrainSettings

WANDB_MODE, OFFLINE = "WANDB_MODE", "offline"
RUN_ID = "zfunc-run-id"  # in the run folder: the name of the run at W&B's server
SCALARS: Mapping[str, str] = {
    **{x: f"train/{x}" for x in ("loss", "lr", "grad_norm", "loss_scale", "skipped", "epoch")},
    **{f"held_out_bits_per_{unit}": f"held_out/bits_per_{unit}" for unit in ("byte", "token")},
    "held_out_loss": "held_out/loss",
    **{x: f"speed/{x}" for x in ("tokens_per_second", "seconds", "host_seconds")},
    **{x: f"memory/{x}" for x in ("device_bytes", "host_bytes")},
}
"""The metrics that are written, and the names of their scalars, against steps."""
GROUPS: Mapping[str, str] = {"aux": "train", "norms": "grad_norm"}
"""The metrics that are several, each with a name, and what the names of their scalars begin with."""
log = logging.getLogger("zfunc")


class TensorBoard:
    """A tracker that writes a run's scalars to a TensorBoard event file in RUN/tensorboard."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(_new_folder(run / "tensorboard")))
        self.close = self._writer.close

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write scalars of a step as TensorBoard events, flushed to the disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandB:
    """A tracker that writes to Weights & Biases, in RUN/wandb, offline unless WANDB_MODE says otherwise; or to
    trackio, which has the same calls, in RUN/trackio unless TRACKIO_DIR or TRACKIO_SPACE_ID say otherwise.

    A W&B server ignores steps that it already has.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], library: str = "wandb") -> None:
        more = _wandb_arguments(run) if library == "wandb" else _trackio_arguments(run)
        self._library = import_module(library)
        self._run = self._library.init(project="zfunc", name=run.name, config=dict(config), **more)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add scalars of a step to the history of the W&B run."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run, and wait until W&B's file is complete: `finish` alone does not."""
        try:
            self._run.finish()
        finally:
            if getattr(self._library, "run", self) is None:  # else the calling program has a run of its own
                self._library.teardown()


def _wandb_arguments(run: Path) -> dict[str, Any]:
    import wandb

    mode, place = os.environ.get(WANDB_MODE) or OFFLINE, run / RUN_ID
    offline = mode in (OFFLINE, "dryrun", "disabled")
    if offline:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # or it looks up its server's address even offline
        _new_folder(run / "wandb")
    if not place.is_file():
        place.write_text(secrets.token_hex(4))
    name = place.read_text().strip()
    upload = f"offline, nothing is sent; to upload: wandb sync {run}/wandb/offline-run-*-{name}"
    log.info("Weights & Biases: %s", upload if offline else f"mode {mode}, run {name}")
    # The calling program may have a run of its own beside this one.
    beside = {"reinit": "create_new", "resume": None if offline else "allow"}
    settings = wandb.Settings(console="off", silent=True, disable_code=True)
    return {"dir": run, "mode": mode, "settings": settings, "id": name, **beside}


def _trackio_arguments(run: Path) -> dict[str, Any]:
    own = str((run / "trackio").absolute())
    if "TRACKIO_SPACE_ID" not in os.environ and os.environ.setdefault("TRACKIO_DIR", own) == own:
        _new_folder(run / "trackio")
    return {"embed": False}


def _new_folder(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    log.info("%s: %s", path.name, path)
    return path


TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": partial(WandB, library="trackio"),
}
"""By the name of the setting, and of the package and the extra that it needs."""


def trackers_of(settings: TrainSettings) -> list[str]:
    """The names of the trackers that the settings switch on."""
    return [kind for kind in TRACKERS if getattr(settings, kind)]


def check_packages(settings: TrainSettings) -> None:
    """Raise ValueError, with what to install, for a tracker that is switched on but whose package is missing."""
    for kind in trackers_of(settings):
        try:
            import_module(kind)
        except ImportError as error:
            refuse(kind, f"no package ({error})", "one", f"{install(kind)}, or leave it out", cause=error)


@contextmanager
def tracking(settings: TrainSettings, run: RunFolder) -> Generator[Callable[[Event], None]]:
    """A context with a function to write an event's scalars to trackers; call it once `run` has the event."""
    trackers: dict[str, Any] = {}

    def write(event: Event) -> None:
        began, rows = isinstance(event, Started), ()
        if began:  # those that are in the run folder
            rows = rows_of((run.path / METRICS).read_bytes())[0]
        elif isinstance(event, Stepped):
            rows = (run.row,)
        elif isinstance(event, Evaluated):  # perhaps after a step whose other figures are written
            rows = ({k: x for k, x in run.row.items() if k == "step" or k.startswith("held_out")},)
        for kind in trackers_of(settings) if began else [*trackers]:
            try:
                if isinstance(event, Started):
                    trackers[kind] = TRACKERS[kind](run.path, _config(event.job))
                for row in rows:
                    if scalars := _scalars(row):
                        trackers[kind].log(scalars, row["step"])
            except Exception as error:  # of any kind: W&B and the disk have their own
                message = f"{type(error).__name__}: {error}"
                log.warning("`%s`: %s: this tracker is closed, training goes on", kind, message)
                close(kind)

    def close(kind: str) -> None:
        with suppress(Exception):
            trackers.pop(kind).close()

    try:
        yield write
    finally:
        for kind in [*trackers]:
            close(kind)


def _config(job: Any) -> dict[str, Any]:
    layout = job.program.layout
    config = {**jsonable(job.settings.recorded()), **job.sizes, **job.machine}
    return {**config, "parameters": layout.num_parameters, "trained": layout.num_trainable}


def _scalars(row: Row) -> dict[str, float]:
    """The finite numbers in a row of metrics.jsonl, by the names that trackers show."""
    values = {SCALARS[name]: x for name, x in row.items() if name in SCALARS}
    for group, begin in GROUPS.items():
        values |= {f"{begin}/{name}": x for name, x in row.get(group, {}).items()}
    numbers = {name: finite_number(int(x) if isinstance(x, bool) else x) for name, x in values.items()}
    return {name: x for name, x in numbers.items() if x is not None}
