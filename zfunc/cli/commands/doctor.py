"""`zfunc doctor`: everything about this machine that decides how fast a step is, and what is wrong with it.

The checks are in `doctor_host` and `doctor_gpu`; this module runs and prints them.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import field, frozen

from zfunc.cli.command import EXIT_FAILED, EXIT_OK, Command
from zfunc.cli.terminal import printable
from zfunc.options import Option, anything

if TYPE_CHECKING:
    from zfunc.cli.doctor_host import Check

DOCTOR = {
    "folder": Option(
        "measurement",
        "folder on a drive to measure too, with 512 MiB of room; once for each (default: this folder alone)",
        anything,
        metavar="FOLDER",
    ),
    "json": Option("output", "print one JSON object, for programs", anything),
}


@frozen(kw_only=True)
class DoctorSettings:
    """Drives to measure, and how to print the checks."""

    folder: tuple[Path, ...] = field(default=(), converter=tuple)
    json: bool = False


def run_doctor(settings: DoctorSettings) -> int:
    """`zfunc doctor`: 0 if nothing is wrong, 1 if something is."""
    checks = run_checks(settings.folder)
    show_checks(checks, as_json=settings.json)
    return EXIT_FAILED if any(check.problem for check in checks) else EXIT_OK


def run_checks(folders: Sequence[Path] = ()) -> "tuple[Check, ...]":
    """Every check, in a few seconds; `folders` are on drives for the optimizer's state."""
    import torch

    from zfunc.cli import doctor_gpu, doctor_host
    from zfunc.planner.bandwidth import Bandwidth, measure_bandwidth
    from zfunc.runtime import cpu_topology
    from zfunc.runtime.accelerator import accelerator_type
    from zfunc.runtime.thread_budget import allowed_cpus, choose_threads, default_numa_slots

    bad_ranks: tuple[Check, ...] = ()
    budget_of = partial(choose_threads, cpus=allowed_cpus(), on_accelerator=accelerator_type() is not None)
    try:
        budget, slots = budget_of(os.environ), default_numa_slots()
    except ValueError as error:
        advice = "unset it, or let torchrun set it"
        bad_ranks = (doctor_host.Check("threads", "local ranks", doctor_host.UNKNOWN, str(error), advice),)
        budget, slots = budget_of({**os.environ, "LOCAL_WORLD_SIZE": "1"}), ()
    try:
        measured: Bandwidth | str = measure_bandwidth()
    except (MemoryError, OSError, ValueError, KeyError) as error:
        measured = str(error)
    bandwidth = measured if isinstance(measured, Bandwidth) else None
    return (
        *doctor_host.versions(),
        *doctor_host.processor(),
        *bad_ranks,
        *doctor_host.threads(budget, os.environ),
        doctor_host.default_schedule(accelerator=accelerator_type() is not None),
        doctor_host.openmp(cpu_topology.openmp_runtimes()),
        doctor_host.neighbours(bandwidth and bandwidth.others, budget, os.environ),
        *doctor_host.memory_checks(cpu_topology.huge_page_mode(), bandwidth and bandwidth.huge),
        *doctor_host.numa(cpu_topology.numa_nodes(), slots),
        *doctor_host.bandwidth_checks(measured),
        *doctor_host.drives(folders),
        *doctor_gpu.pinned(doctor_gpu.locked_limit(), gpu=torch.cuda.is_available()),
        *doctor_gpu.gpu_checks(),
    )


def show_checks(checks: "Sequence[Check]", *, as_json: bool) -> None:
    """Print them: as JSON, or as lines, in colour on a terminal."""
    if as_json:
        wrong = sum(check.problem is not None for check in checks)
        print(json.dumps({"problems": wrong, "checks": [attrs.asdict(check) for check in checks]}, indent=2))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for style, text in report_lines(checks):
        console.print(Text(printable(text), style=style))


def report_lines(checks: "Sequence[Check]") -> Iterator[tuple[str, str]]:
    """Style and text of every line: the sections, then each problem with its advice."""
    width = max((len(check.name) for check in checks), default=0)
    for section, group in groupby(checks, key=lambda check: check.section):
        yield "bold", section
        for check in group:
            mark, style = ("!", "red") if check.problem else (" ", "")
            yield style, f"{mark} {check.name:<{width}}  {check.value}"
    wrong = [check for check in checks if check.problem]
    yield "", ""
    yield ("bold red", f"{len(wrong)} wrong:") if wrong else ("bold green", "nothing is wrong")
    for check in wrong:
        yield "", f"- {check.section}, {check.name}: {check.problem}"
        yield "", f"  {check.advice}"


COMMAND = Command(
    "say what this machine has for a step, and what is wrong",
    "It measures for a few seconds: threads, memory, the host's bandwidth and the Adam kernel, drives, "
    "pinned memory, GPUs.",
    DoctorSettings,
    DOCTOR,
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
