"""`zfunc report`: a run as one HTML page, written once or, with --follow, anew until the run ends."""

import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from attrs import NOTHING, frozen

from zfunc.checkpoint.durable_files import replace_text
from zfunc.cli.parser import EXIT_OK, Command, write_file
from zfunc.cli.terminal import printable
from zfunc.options import file_to_write, option

EVERY = 5.0  # seconds from one page to the next
REST = 20.0  # times as long as it took to write a page: a training needs the cores
_page = partial(option, group="page")


@frozen(kw_only=True)
class ReportSettings:
    """Settings of `zfunc report`: the folder of the run to show."""

    run: Path = option(
        NOTHING, "folder of the run, such as runs/DATE-TIME", metavar="RUN", group="run", positional=True
    )
    out: Path | None = _page(
        None, "file to write, or to replace (default: RUN/report.html)", file_to_write(".html", "")
    )
    follow: bool = _page(False, "write it anew until the run ends; a browser that shows it follows")


def run_report(settings: ReportSettings) -> int:
    """Run `zfunc report`: write a run's page; with --follow every few seconds until its end or Ctrl-C."""
    from zfunc.cli.report_page import headline, report_page
    from zfunc.train.run_history import read_history

    out = settings.out or settings.run / "report.html"
    began, run = time.monotonic(), read_history(settings.run)
    with suppress(*([KeyboardInterrupt] if settings.follow else [])):
        while settings.follow and not run.summary:
            replace_text(out, report_page(run, refresh=EVERY))
            print(printable(headline(run)), flush=True)
            time.sleep(max(EVERY, REST * (time.monotonic() - began)))
            began, run = time.monotonic(), read_history(settings.run)
        write_file(out, report_page(run))
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
