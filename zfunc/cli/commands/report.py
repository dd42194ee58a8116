"""`zfunc report`."""

from pathlib import Path

from attrs import frozen

from zfunc.cli.command import EXIT_OK, Command, write_files
from zfunc.options import Option, anything, check_each, path

RUN = Option("run", "folder of the run, such as runs/DATE-TIME", anything, metavar="RUN", positional=True)

REPORT = {
    "run": RUN,
    "out": Option("page", "file to write, or to write anew (default: RUN/report.html)", path, metavar="FILE"),
}


@frozen(kw_only=True)
class ReportSettings:
    """A run to show."""

    run: Path
    out: Path | None = None

    def __attrs_post_init__(self) -> None:
        check_each(self, REPORT)


def run_report(settings: ReportSettings) -> int:
    """`zfunc report`."""
    from zfunc.cli.report_page import report_page
    from zfunc.train.history import read_history

    write_files({settings.out or settings.run / "report.html": report_page(read_history(settings.run))})
    return EXIT_OK


COMMAND = Command(
    "show a run as one HTML page",
    "Curves, memory against the plan, the measured step, settings, machine, checkpoints; the page needs no "
    "script and no other file.",
    ReportSettings,
    REPORT,
    run_report,
    """
    # into the run's folder
    zfunc report runs/20261121-050604
    # into a file of its own
    zfunc report runs/20261121-050604 --out report.html
    """,
)
