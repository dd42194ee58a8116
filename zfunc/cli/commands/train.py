"""`zfunc train`. Its settings are in `zfunc.train.settings`."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

from zfunc.cli.command import EXIT_OK, Command
from zfunc.cli.parser import with_flags
from zfunc.cli.terminal import can_redraw, interrupts, logged, printable
from zfunc.options import AUTO
from zfunc.train.settings import TrainSettings

if TYPE_CHECKING:
    from zfunc.runtime.collectives import RankGroup
    from zfunc.train.resume import ResumePoint
    from zfunc.train.run_folder import RunFolder


class TrainingFailed(Exception):  # noqa: N818
    """Training had begun when it failed; the cause is chained."""


def run_train(settings: TrainSettings) -> int:
    """`zfunc train`."""
    from zfunc.runtime.launch import process_group

    with process_group() as ranks:
        (_follow if ranks.rank else _lead)(settings, ranks)
    return EXIT_OK


def _lead(settings: TrainSettings, ranks: "RankGroup") -> None:
    """As rank 0, which chooses where to begin, and keeps and shows what happens."""
    from zfunc.train import resume, tracking
    from zfunc.train.run_folder import create_run

    with logged(COMMAND.options):
        with resume.broadcasting_errors(ranks):
            tracking.check_packages(settings)
            run = create_run(settings.out, again=settings.resume == AUTO)
        try:
            with resume.broadcasting_errors(ranks):
                start = resume.choose_resume_point(run.path, settings)
            resume.broadcast(ranks, start)
            failure = _train_and_show(settings, run, start)
        finally:
            run.close()
    if failure:
        raise TrainingFailed(f"the last step is not saved: {failure}\n{_kept(run)}")


def _follow(settings: TrainSettings, ranks: "RankGroup") -> None:
    """As any other rank."""
    from zfunc.planner.kept_costs import cache_folder
    from zfunc.train import resume
    from zfunc.train.events import Saved
    from zfunc.train.loop import train_events
    from zfunc.train.setup import prepare_job

    with logged(COMMAND.options):
        start = resume.receive(ranks)
        if start.over:
            return
        job, begun, failure = prepare_job(settings, cache=cache_folder()), False, ""
        try:
            with interrupts(tell=False) as stop:
                for event in train_events(job, stop=stop, start=start):
                    begun, failure = True, event.failure if isinstance(event, Saved) else failure
        except Exception as error:
            if not begun:
                raise
            raise TrainingFailed(str(error)) from error
    if failure:
        raise TrainingFailed(f"the last step is not saved: {failure}")


def _train_and_show(settings: TrainSettings, run: "RunFolder", start: "ResumePoint") -> str:
    """Returns why the last step could not be saved, or ""."""
    from zfunc.cli.train_lines import PlainOutput, progress
    from zfunc.planner.kept_costs import cache_folder
    from zfunc.train.deepspeed.mapping import config_extras
    from zfunc.train.events import Saved
    from zfunc.train.loop import train_events
    from zfunc.train.setup import prepare_job
    from zfunc.train.tracking import tracking

    if start.line:
        print(printable(with_flags(start.line, COMMAND.options)), flush=True)
    if start.over:
        return ""
    live = can_redraw()
    failure = ""
    try:
        job = prepare_job(settings, cache=cache_folder())
        with interrupts(tell=not live) as stop:
            plain = PlainOutput(run, job.corpus.unit, config_extras(job.settings).steps_per_print)
            output = progress(plain, stop) if live else nullcontext(plain)
            with output as screen, tracking(settings, run.path) as track:
                for event in train_events(job, stop=stop, start=start):
                    run.record(event)
                    screen.show(event)
                    track(event)
                    failure = event.failure if isinstance(event, Saved) else failure
    except BaseException as error:
        run.fail(error)
        if not run.begun or not isinstance(error, Exception) or isinstance(error, BrokenPipeError):
            raise
        raise TrainingFailed(f"{error}\n{_kept(run)}") from error
    return failure


def _kept(run: "RunFolder") -> str:
    return f"The run up to here is in {run.path}"


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
