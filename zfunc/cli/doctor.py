"""`zfunc doctor`: everything about this machine that decides how fast a step is, and what is wrong with it.

The invariant: this file only gathers and renders. What is looked at, and what is wrong, is in
machine.py and devices.py.
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import groupby

import attrs
import torch
from rich.console import Console
from rich.text import Text

from zfunc.cli.doctor_cuda import cuda, locked_limit, pinned
from zfunc.cli.doctor_host import (
    UNKNOWN,
    Check,
    memory_checks,
    neighbours,
    numa,
    openmp,
    processor,
    threads,
    versions,
)
from zfunc.cli.terminal import printable
from zfunc.planner.bandwidth import Bandwidth, measure_bandwidth
from zfunc.runtime import cpu_topology as topology
from zfunc.runtime.thread_budget import allowed_cpus, choose_threads, default_numa_slots
from zfunc.units import format_bytes

SLOW = 0.5  # of the memory's bandwidth: a kernel below it waits for something else


def run_checks() -> tuple[Check, ...]:
    """Look at everything, in a few seconds."""
    wrong: tuple[Check, ...] = ()
    try:
        decision, seats = choose_threads(os.environ, allowed_cpus()), default_numa_slots()
    except ValueError as error:
        wrong = (Check("threads", "local ranks", UNKNOWN, str(error), "unset it, or let torchrun set it"),)
        decision, seats = choose_threads({**os.environ, "LOCAL_WORLD_SIZE": "1"}, allowed_cpus()), ()
    try:
        measured: Bandwidth | str = measure_bandwidth()
    except (MemoryError, OSError, ValueError, KeyError) as error:
        measured = str(error)
    found = measured if isinstance(measured, Bandwidth) else None
    return (
        *versions(),
        *processor(),
        *wrong,
        *threads(decision, os.environ),
        openmp(topology.openmp_runtimes()),
        neighbours(found and found.others, decision, os.environ),
        *memory_checks(topology.huge_page_mode(), found and found.huge),
        *numa(topology.numa_nodes(), seats),
        *bandwidth_checks(measured),
        *pinned(locked_limit(), cuda=torch.cuda.is_available()),
        *cuda(),
    )


def bandwidth_checks(measured: Bandwidth | str) -> Iterator[Check]:
    """What was measured, or why nothing could be."""
    if isinstance(measured, str):
        yield Check("host bandwidth", "memory", f"{UNKNOWN}: {measured}")
        return
    note = "" if measured.beyond_caches else ", which the caches hold"
    yield Check(
        "host bandwidth",
        "memory",
        f"{measured.gigabytes:.1f} GB/s, sweeping over {format_bytes(measured.nbytes)}{note}",
    )
    slow = measured.reached < SLOW
    yield Check(
        "host bandwidth",
        "Adam kernel",
        f"{measured.reached:.0%} of that",
        "the update waits for arithmetic or for a core, not for memory" if slow else None,
        "see that nothing else runs on these cores, then run this again" if slow else None,
    )


def report_lines(checks: Sequence[Check]) -> Iterator[tuple[str, str]]:
    """Style and text of every line: the sections, then what is wrong with what to do."""
    wide = max((len(check.name) for check in checks), default=0)
    for section, group in groupby(checks, key=_section):
        yield "bold", section
        for check in group:
            mark, style = ("!", "red") if check.problem else (" ", "")
            yield style, f"{mark} {check.name:<{wide}}  {check.value}"
    wrong = [check for check in checks if check.problem]
    yield "", ""
    yield ("bold red", f"{len(wrong)} wrong:") if wrong else ("bold green", "nothing is wrong")
    for check in wrong:
        yield "", f"- {check.section}, {check.name}: {check.problem}"
        yield "", f"  {check.advice}"


def _section(check: Check) -> str:
    return check.section


def show_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print them: as JSON, or as lines, in colour on a terminal."""
    if as_json:
        wrong = sum(check.problem is not None for check in checks)
        print(json.dumps({"problems": wrong, "checks": [attrs.asdict(check) for check in checks]}, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for style, text in report_lines(checks):
        console.print(Text(printable(text), style=style))


def all_well(checks: Sequence[Check]) -> bool:
    """Whether nothing is wrong."""
    return not any(check.problem for check in checks)
