"""What each command does, once its arguments are settings: every function is a command, and returns its exit code.

The invariant: what a command needs is imported when it runs, so that help and mistakes do not wait for torch.
"""

import os
import shutil
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from zfunc.cli.calibrate import CalibrateSettings, measure_machine
from zfunc.cli.draw_settings import DrawSettings
from zfunc.cli.plan_settings import PlanSettings
from zfunc.cli.report_settings import DoctorSettings, ExportSettings, ReportSettings, TopSettings
from zfunc.cli.terminal import interrupts, logged, printable
from zfunc.train.settings import AUTO, TrainSettings
from zfunc.units import format_bytes

if TYPE_CHECKING:
    from zfunc.runtime.collectives import RankGroup
    from zfunc.train.resume import ResumePoint
    from zfunc.train.run_folder import RunFolder

EXIT_OK, EXIT_FAILED = 0, 1  # exit codes
SUFFIXES = {".svg": "svg", ".html": "html", ".json": "chrome"}


class TrainingFailed(Exception):  # noqa: N818
    """Training had begun when it failed; the cause is chained."""


def run_train(settings: TrainSettings) -> int:
    """`zfunc train`."""
    from zfunc.runtime.launch import process_group

    with process_group() as ranks:
        (_follow if ranks.rank else _lead)(settings, ranks)
    return EXIT_OK


def _lead(settings: TrainSettings, ranks: "RankGroup") -> None:
    """As rank 0, which decides where to begin, and keeps and shows what happens."""
    from zfunc.train import resume as resuming
    from zfunc.train import run_folder as runs
    from zfunc.train import tracking

    with logged():
        with resuming.broadcasting_errors(ranks):
            tracking.check_packages(settings)
            run = runs.create_run(settings.out, again=settings.resume == AUTO)
        try:
            with resuming.broadcasting_errors(ranks):
                start = resuming.choose_resume_point(run.path, settings)
            resuming.broadcast(ranks, start)
            failure = _train_and_show(settings, run, start)
        finally:
            run.close()
    if failure:
        raise TrainingFailed(f"the last step is not saved: {failure}\nWhat there is up to then: {run.path}")


def _follow(settings: TrainSettings, ranks: "RankGroup") -> None:
    """As any other rank."""
    from zfunc.train import resume as resuming
    from zfunc.train.events import Saved
    from zfunc.train.loop import train_events as events
    from zfunc.train.setup import prepare_job

    with logged():
        start = resuming.receive(ranks)
        if start.over:
            return
        job, last = prepare_job(settings, cache=cache_folder()), None
        begun = False
        try:
            with interrupts(tell=False) as stop:
                for event in events(job, stop=stop, start=start):
                    begun, last = True, event if isinstance(event, Saved) else last
        except Exception as error:
            if not begun:
                raise
            raise TrainingFailed(str(error)) from error
    if last is not None and last.failure:
        raise TrainingFailed(f"the last step is not saved: {last.failure}")


def _train_and_show(settings: TrainSettings, run: "RunFolder", start: "ResumePoint") -> str:
    """Returns why the last step is not saved, if it should be."""
    from zfunc.cli import console, panel
    from zfunc.cli.deepspeed_lines import DeepSpeedLines
    from zfunc.train import run_folder as runs
    from zfunc.train import tracking
    from zfunc.train.deepspeed.convert import config_extras
    from zfunc.train.events import Saved
    from zfunc.train.loop import train_events as events
    from zfunc.train.setup import prepare_job

    if start.line:
        print(printable(start.line), flush=True)
    if start.over:
        return ""
    theirs = settings.log_style == "deepspeed"
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not theirs
    failure = ""
    try:
        job = prepare_job(settings, cache=cache_folder())
        with interrupts(tell=not live) as stop:
            plain = console.PlainOutput(run, job.unit, config_extras(job.settings).steps_per_print)
            lines = DeepSpeedLines(plain) if theirs else plain
            shown = panel.live_panel(run, job.unit, stop) if live else nullcontext(lines)
            with shown as screen, tracking.tracking(settings, run.path) as track:
                for event in events(job, stop=stop, start=start):
                    runs.record_event(run, event, job.unit)
                    screen.show(event)
                    track(event)
                    failure = event.failure if isinstance(event, Saved) else failure
    except BaseException as error:
        runs.record_failure(run, error)
        if not run.begun or not isinstance(error, Exception) or isinstance(error, BrokenPipeError):
            raise
        raise TrainingFailed(f"{error}\nWhat there is up to then: {run.path}") from error
    return failure


def run_draw(sketch: DrawSettings) -> int:
    """`zfunc draw`."""
    form = _form(sketch)
    from zfunc.cli.step_pictures import compare_run, comparison_rows, picture

    if sketch.compare is not None:
        try:
            made = {"": compare_run(sketch)}
        except ValueError as error:
            raise ValueError(f"--compare: {error}") from error
        print("\n".join(map(printable, comparison_rows(made[""]).splitlines())))
    else:
        from zfunc.cli.unrun_step import draw_unrun_step

        made = draw_unrun_step(sketch)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    pictures = {name: picture(one, form, width=max(60, columns)) for name, one in made.items()}
    out = sketch.out
    if sketch.compare is not None and form != "text":
        out = out or sketch.compare / f"compare{next(s for s, of in SUFFIXES.items() if of == form)}"
    if out is None:
        print("\n".join(pictures.values()), end="")
        return EXIT_OK
    if form == "text":
        files = {out: "\n".join(pictures.values())}
    else:
        many = len(pictures) > 1
        files = {
            out.with_stem(f"{out.stem}-{name.lower()}") if many else out: text
            for name, text in pictures.items()
        }
    _write(files)
    return EXIT_OK


def _form(sketch: DrawSettings) -> str:
    """The form asked for, or that the file's name says, or that suits what is drawn."""
    suffix = sketch.out.suffix if sketch.out else ""
    if sketch.format is None and suffix not in ("", ".txt", ".md", *SUFFIXES):
        *most, last = (*SUFFIXES, ".txt")
        raise ValueError(
            f"--out: got {sketch.out}, expected a name that ends in {', '.join(most)} or {last}: or say --format"
        )
    unsaid = "html" if sketch.compare and not suffix else "text"
    form = sketch.format or SUFFIXES.get(suffix, unsaid)
    if sketch.schedule == "all" and sketch.out is None and form != "text":
        raise ValueError(
            f"--schedule all: got --format {form} without --out, expected a file: add --out FILE"
        )
    return form


def _write(files: dict[Path, str]) -> None:
    from zfunc.checkpoint.durable_files import replace_text

    for path, text in files.items():
        try:
            replace_text(path, text)
        except OSError as error:
            raise ValueError(
                f"--out: got {path}, which cannot be written ({error.strerror}), expected a file in a folder "
                "that is there: name another"
            ) from error
        print(f"written: {path}")


def run_plan(asked: PlanSettings) -> int:
    """`zfunc plan`: 0 if it fits, 1 if it does not."""
    from zfunc.cli.plan_report import as_json, plan_text
    from zfunc.cli.planning import plan_model

    answered = plan_model(asked)
    print(
        as_json(answered) if asked.json else plan_text(answered), end="\n" if asked.json else "", flush=True
    )
    return EXIT_OK if answered.planned.fits else EXIT_FAILED


def run_calibrate(asked: CalibrateSettings) -> int:
    """`zfunc calibrate`: all ranks measure, one writes."""
    from zfunc.planner.profile_toml import profile_text
    from zfunc.runtime.launch import process_group

    with process_group() as ranks, logged():
        profile = measure_machine(asked)
        if not ranks.rank:
            _write({asked.out: profile_text(profile)})
            print(f"next: zfunc plan --hardware {asked.out}")
    return EXIT_OK


def run_top(asked: TopSettings) -> int:
    """`zfunc top`, of which Ctrl-C is a good end."""
    with suppress(KeyboardInterrupt):
        from zfunc.cli.top import show_run

        show_run(asked.run, once=asked.once, every=asked.every)
    return EXIT_OK


def run_report(asked: ReportSettings) -> int:
    """`zfunc report`."""
    from zfunc.cli.report import report_page as page
    from zfunc.train.history import read_history

    _write({asked.out or asked.run / "report.html": page(read_history(asked.run))})
    return EXIT_OK


def run_export(asked: ExportSettings) -> int:
    """`zfunc export`."""
    from zfunc.checkpoint.export import export_weights as write

    with logged():
        if asked.hf is None:
            done = write(asked.checkpoint, asked.out, dtype=asked.dtype)
        else:
            from zfunc.models.hf import export as write_folder

            try:
                done = write_folder(asked.checkpoint, asked.out, config=asked.hf, dtype=asked.dtype)
            except ValueError as error:
                if not str(error).startswith("config: "):
                    raise
                raise ValueError(f"--hf: {str(error).removeprefix('config: ')}") from error
    told = f"{done.parameters} parameters of step {done.step} as {done.dtype}, {format_bytes(done.bytes)}"
    print(f"written: {done.path}: {told}")
    return EXIT_OK


def run_doctor(asked: DoctorSettings) -> int:
    """`zfunc doctor`."""
    from zfunc.cli.doctor import all_well, run_checks, show_checks

    checks = run_checks()
    show_checks(checks, as_json=asked.json)
    return EXIT_OK if all_well(checks) else EXIT_FAILED


def cache_folder() -> Path:
    """Where gathered sources are kept from run to run: `$XDG_CACHE_HOME/zfunc`, or `~/.cache/zfunc`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache") / "zfunc"
