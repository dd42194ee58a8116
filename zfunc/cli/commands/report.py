"""`zfunc report`: a run as one HTML page, written once or, with --follow, anew until the run ends."""

import time
from contextlib import suppress
from pathlib import Path

from attrs import NOTHING, frozen

from zfunc.cli.command import EXIT_OK, Command, write_files
from zfunc.cli.terminal import printable
from zfunc.options import check_each, option, path

EVERY = 5.0  # seconds from one page to the next
REST = 20.0  # times as long as it took to write a page: a training needs the cores


@frozen(kw_only=True)
class ReportSettings:
    """A run to show."""

    run: Path = option(
        NOTHING, "run", "folder of the run, such as runs/DATE-TIME", metavar="RUN", positional=True
    )
    out: Path | None = option(
        None, "page", "file to write, or to write anew (default: RUN/report.html)", path, "FILE"
    )
    follow: bool = option(False, "page", "write it anew until the run ends; a browser that shows it follows")

    def __attrs_post_init__(self) -> None:
        check_each(self)


def run_report(settings: ReportSettings) -> int:
    """`zfunc report`: one page, or a page and a line every few seconds until the run ends, or Ctrl-C."""
    from zfunc.cli.report_page import headline, report_page
    from zfunc.train.history import read_history

    out = settings.out or settings.run / "report.html"
    ends_well = (KeyboardInterrupt,) if settings.follow else ()
    with suppress(*ends_well):
        while True:
            began = time.monotonic()
            run = read_history(settings.run)
            ended = bool(run.summary) or not settings.follow
            write_files({out: report_page(run, refresh=None if ended else EVERY)}, tell=ended)
            if settings.follow:
                print(printable(headline(run)), flush=True)
            if ended:
                break
            time.sleep(max(EVERY, REST * (time.monotonic() - began)))
    return EXIT_OK


COMMAND = Command(
    "show a run as one HTML page, also while it goes on",
    "Curves, memory against the plan, the measured step, settings, machine, checkpoints; the page needs no "
    "script and no other file. The run goes on undisturbed: only its folder is read.",
    ReportSettings,
    run_report,
    """
    # into the run's folder
    zfunc report runs/20261121-050604
    # into a file of its own
    zfunc report runs/20261121-050604 --out report.html
    # watch a run, in a browser and in lines
    zfunc report runs/20261121-050604 --follow
    """,
    "With --follow it ends with the run, or at Ctrl-C (exit code 0).",
)
