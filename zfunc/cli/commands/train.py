"""`zfunc train`. Its settings are in `zfunc.train.settings`."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from zfunc.cli.parser import EXIT_OK, Command
from zfunc.cli.terminal import can_redraw, interrupts, logged
from zfunc.errors import Message, marked
from zfunc.options import AUTO
from zfunc.runtime.memory_limits import check_addresses
from zfunc.train.settings import TrainSettings, check_paths

if TYPE_CHECKING:
    from zfunc.train.events import Event
    from zfunc.train.resume import ResumePoint
    from zfunc.train.run_folder import RunFolder

UNSAVED = "the last step is not saved: "


class TrainingFailed(Exception):  # noqa: N818
    """A training that failed after its first step began; the cause is chained."""


def run_train(settings: TrainSettings) -> int:
    """Run `zfunc train`: rank 0 chooses the checkpoint to begin from, records the run and prints its lines."""
    check_paths(settings)
    check_addresses()
    from zfunc.runtime.launch import process_group
    from zfunc.train import resume, tracking
    from zfunc.train.run_folder import create_run

    run = None

    def begin() -> "ResumePoint":
        nonlocal run
        tracking.check_packages(settings)
        run = stack.enter_context(closing(create_run(settings.out, again=settings.resume == AUTO)))
        return resume.choose_resume_point(run.path, settings)

    with process_group() as ranks, logged(COMMAND.options), ExitStack() as stack:
        start = resume.agreed(ranks, begin)
        _train(settings, run, start)
    return EXIT_OK


def _train(settings: TrainSettings, run: "RunFolder | None", start: "ResumePoint") -> None:
    """Train from `start`; on rank 0, which has `run`, also record the run, print its lines, and tell the trackers.

    Raises TrainingFailed for an error after the first step began, and if saving the last step's checkpoint fails.
    """
    from zfunc.cli.train_lines import TrainingOutput, progress
    from zfunc.planner.kept_costs import cache_folder
    from zfunc.train.events import AT_ONCE, ENDINGS, Saved
    from zfunc.train.loop import train_events
    from zfunc.train.setup import prepare_job
    from zfunc.train.tracking import tracking

    if start.over:
        return
    begun, failure, kept = False, "", "" if run is None else f"\nThe run up to here is in {run.path}"
    try:
        job = prepare_job(settings, cache=cache_folder())
        with ExitStack() as stack:
            stop = stack.enter_context(interrupts(tell=run is not None and not can_redraw()))
            readers: list[Callable[[Event], None]] = []
            if run is not None:
                lines = TrainingOutput(run, job.corpus.unit, job.extras.steps_per_print, stop)
                stack.enter_context(progress(lines) if can_redraw() else ExitStack())
                track = stack.enter_context(tracking(job.settings, run))
                readers += [run.record, lines.show, track]
            for event in train_events(job, stop=stop, start=start):
                for read in readers:
                    read(event)
                begun, failure = True, event.failure if isinstance(event, Saved) else failure
    except BaseException as error:
        if run is not None:
            run.fail(error)
            if type(error) is KeyboardInterrupt:
                known = {None: "stopped before the first step", AT_ONCE: ENDINGS[AT_ONCE]}
                at = known.get(run.summary.get("ended"), f"{AT_ONCE}, after the last step")
                error.args = (f"{at}{kept if run.begun else ''}",)
        if not begun or not isinstance(error, Exception) or isinstance(error, BrokenPipeError):
            raise
        unsaved = f"{UNSAVED}{failure}\n" if failure else ""
        raise TrainingFailed(Message(f"{unsaved}{marked(error)}{kept}")) from error
    if failure:
        raise TrainingFailed(f"{UNSAVED}{failure}{kept}")


COMMAND = Command(
    "train a GPT, or a Hugging Face model",
    "Without options: a small GPT, of bytes, on the sources of Python's standard library, 1,000 steps: within "
    "3 minutes on 2 slow cores. What is chosen for you is printed. A terminal shows a progress bar, a pipe gets "
    "lines.",
    TrainSettings,
    run_train,
    """
    # on your texts, with a checkpoint every 200 steps
    zfunc train --data texts --steps 1000 --save-every 200 --out run
    # go on where that stopped, or begin if it never began
    zfunc train --data texts --steps 1000 --out run --resume auto
    # fine-tune a local Hugging Face model; --lora 16: adapters alone
    zfunc train --hf model --data chats.jsonl --seq-length 512 --epochs 2
    # on two GPUs
    torchrun --nproc-per-node 2 -m zfunc train --data texts
    """,
    "Ctrl-C ends the training after the step under way, with checkpoint, evaluation, summary and sample (exit "
    "code 0); one in the middle of an evaluation ends that too; a second one stops at once (130). SIGTERM and "
    "SIGHUP end it with checkpoint and summary alone (0). Other exit codes: 1 failed while training or to save "
    "the last step, 2 cannot start.",
)
