"""`zfunc doctor`: what this machine has for a step. The checks are in `machine`; they are run and printed here."""

import json
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from zfunc.cli.command import EXIT_FAILED, EXIT_OK, Command
from zfunc.cli.terminal import printable
from zfunc.options import option

if TYPE_CHECKING:
    from zfunc.cli.machine import Check


@frozen(kw_only=True)
class DoctorSettings:
    """Drives to measure, and how to print the checks."""

    folder: tuple[Path, ...] = option(
        (),
        "measurement",
        "folder on a drive to measure too, with 512 MiB of room; once for each (default: this folder alone)",
        metavar="FOLDER",
        converter=tuple,
    )
    json: bool = option(False, "output", "print one JSON object, for programs")


def run_doctor(settings: DoctorSettings) -> int:
    """`zfunc doctor`: 0 if nothing is wrong, 1 if something is."""
    checks = run_checks(settings.folder)
    show_checks(checks, as_json=settings.json)
    return EXIT_FAILED if any(check.problem for check in checks) else EXIT_OK


def run_checks(folders: Sequence[Path] = ()) -> "tuple[Check, ...]":
    """Every check, in a few seconds; `folders` are on drives for the optimizer's state."""
    from zfunc.cli import machine
    from zfunc.planner.bandwidth import Bandwidth, measure_bandwidth

    try:
        measured: Bandwidth | str = measure_bandwidth()
    except (MemoryError, OSError, ValueError, KeyError) as error:
        measured = str(error)
    return (
        *machine.versions(),
        *machine.processor(os.environ),
        *machine.memory(measured.huge if isinstance(measured, Bandwidth) else None),
        *machine.bandwidth(measured),
        *machine.drives(folders),
        *machine.devices(),
    )


def show_checks(checks: "Sequence[Check]", *, as_json: bool) -> None:
    """Print them: as JSON, or as lines, with what is wrong below its own, in red on a terminal."""
    if as_json:
        wrong = sum(check.problem is not None for check in checks)
        print(json.dumps({"problems": wrong, "checks": [attrs.asdict(check) for check in checks]}, indent=2))
        return
    from rich.console import Console
    from rich.text import Text

    console, width = Console(highlight=False, soft_wrap=True), max(len(check.name) for check in checks)
    for section, group in groupby(checks, key=lambda check: check.section):
        console.print(Text(section, "bold"))
        for check in group:
            console.print(Text(printable(f"  {check.name:<{width}}  {check.value}")))
            if check.problem:
                console.print(Text(printable(f"! {check.problem}"), "red"))


COMMAND = Command(
    "say what this machine has for a step",
    "It measures for a few seconds: host memory, the Adam kernel, drives, copies to devices. A line with ! says "
    "what keeps a step from running.",
    DoctorSettings,
    run_doctor,
    """
    # for a person
    zfunc doctor
    # the drives that state may live on
    zfunc doctor --folder /mnt/nvme0 --folder /mnt/nvme1
    # for a program
    zfunc doctor --json
    """,
    "Exit codes: 0 nothing is wrong, 1 something is.",
)
