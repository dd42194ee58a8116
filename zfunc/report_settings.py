"""Settings of `zfunc report` and `zfunc top` as values, and what each option means. No torch here.

The invariant: as in `zfunc.settings`, the fields' defaults are the command line's.
"""

from pathlib import Path

from attrs import frozen

from zfunc.options import Option, anything, check_each, path, positive

_RUN = Option("run", "folder of the run, such as runs/DATE-TIME", anything, metavar="RUN", positional=True)

REPORT = {
    "run": _RUN,
    "out": Option("page", "file to write, or to write anew (default: RUN/report.html)", path, metavar="FILE"),
}

TOP = {
    "run": _RUN,
    "once": Option(
        "screen", "print what there is to see now, and end; in a pipe that is all it does", anything
    ),
    "every": Option("screen", "seconds from one look to the next", positive),
}


@frozen(kw_only=True)
class Report:
    """A run to show."""

    run: Path
    out: Path | None = None

    def __attrs_post_init__(self) -> None:
        check_each(self, REPORT)


@frozen(kw_only=True)
class Watch:
    """A run to watch."""

    run: Path
    once: bool = False
    every: float = 1.0

    def __attrs_post_init__(self) -> None:
        check_each(self, TOP)
