"""`zfunc report`: a run as one HTML page, written once or, with --follow, anew until the run ends."""

import time
from contextlib import suppress
from pathlib import Path

from attrs import NOTHING, frozen

from zfunc.checkpoint.durable_files import replace_text
from zfunc.cli.parser import EXIT_OK, Command, write_file
from zfunc.cli.terminal import printable
from zfunc.options import file_to_write, option

EVERY = 5.0  # seconds from one page to the next
REST = 20.0  # times as long as it took to write a page: a training needs the cores


@frozen(kw_only=True)
class ReportSettings:
    """A run to show."""

    run: Path = option(
        NOTHING, "run", "folder of the run, such as runs/DATE-TIME", metavar="RUN", positional=True
    )
    out: Path | None = option(
        None, "page", "file to write, or to write anew (default: RUN/report.html)", file_to_write(), "FILE"
    )
    follow: bool = option(False, "page", "write it anew until the run ends; a browser that shows it follows")


def run_report(settings: ReportSettings) -> int:
    """`zfunc report`: one page, or a page and a line every few seconds until the run ends, or Ctrl-C."""
    from zfunc.cli.report_page import headline, report_page
    from zfunc.train.run_folder import read_history

    out = settings.out or settings.run / "report.html"
    run, began = read_history(settings.run), time.monotonic()
    with suppress(*([KeyboardInterrupt] if settings.follow else [])):
        while settings.follow and not run.summary:
            replace_text(out, report_page(run, refresh=EVERY))
            print(printable(headline(run)), flush=True)
            time.sleep(max(EVERY, REST * (time.monotonic() - began)))
            run, began = read_history(settings.run), time.monotonic()
        write_file(out, report_page(run))
        if settings.follow:
            print(printable(headline(run)), flush=True)
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
