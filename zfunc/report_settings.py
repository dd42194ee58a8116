"""Settings of `zfunc report` as a value, and what each option means. No torch here.

The invariant: as in `zfunc.settings`, the fields' defaults are the command line's.
"""

from pathlib import Path

from attrs import frozen

from zfunc.options import Option, check_each, path

REPORT = {
    "run": Option("run", "its folder, such as runs/DATE-TIME", path, metavar="RUN", positional=True),
    "out": Option("page", "file to write, or to write anew (default: RUN/report.html)", path),
}


@frozen(kw_only=True)
class Report:
    """A run to show."""

    run: Path
    out: Path | None = None

    def __attrs_post_init__(self) -> None:
        check_each(self, REPORT)
