"""Grades an adapters file: starts the process that judges it, ends it where it hangs, collects what it found."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

from attrs import frozen

from course.lab import Lab
from course.law import Law, Picture

ROOT = Path(__file__).parents[1]
SECONDS = 48.0  # that the laws of a lab may take together
MOST = 10.0  # seconds that one law may take
START = 30.0  # seconds in which the process that judges has to start, on a busy machine
SHOWN = 2_000  # letters of what a student's functions print


@frozen
class Result:
    """The judgement of one law: the points, and why they are not all given."""

    law: Law
    score: int
    message: str = ""
    picture: Picture | None = None
    measure: float | None = None  # for a leaderboard
    unit: str = ""  # of the measure


@frozen
class Report:
    """The results of all laws of a lab for one adapters file, what it printed, and the seconds that it took."""

    lab: Lab
    adapters: Path
    results: tuple[Result, ...]
    printed: str
    seconds: float

    @property
    def score(self) -> int:
        """The points of all laws together."""
        return sum(result.score for result in self.results)

    @property
    def broken(self) -> list[str]:
        """The names of the laws that the adapters file breaks."""
        return [x.law.name for x in self.results if not x.score]

    @property
    def unusable(self) -> str:
        """Text on an error of the whole adapters file, such as a syntax error, which breaks all laws; else
        ""."""
        found = {x.law.name if x.picture else x.message for x in self.results}
        return found.pop() if len(found) == 1 < len(self.results) else ""


def grade(lab: Lab, adapters: Path, seed: str = "0") -> Report:
    """Judge the file `adapters` by the laws of a lab, with random numbers from `seed`."""
    began = time.monotonic()
    results: list[Result] = []
    printed = ""
    limit = min(MOST, SECONDS / len(lab.laws))
    while len(results) < len(lab.laws):
        found, more = _judged(lab, adapters, seed, len(results), limit)
        printed += more
        if found and isinstance(found[0], str):  # the same for each
            results += [Result(law, 0, found[0]) for law in lab.laws[len(results) :]]
        results += [x for x in found if isinstance(x, Result)]
    return Report(lab, adapters, tuple(results), printed[:SHOWN], time.monotonic() - began)


def _judged(lab: Lab, adapters: Path, seed: str, first: int, limit: float) -> tuple[list[Result | str], str]:
    """Judge laws from number `first` on in one process, for at most `limit` seconds each. Returns the
    results, at least one, or texts on why a law has none; and what the process printed."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found"
        found.touch()
        with _process(lab.number, adapters, seed, first, found) as (process, printed):
            why = _wait(process, found, limit)
        lines = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    return list(_results(lab, lines, why)), "".join(printed)


@contextmanager
def _process(
    number: int, adapters: Path, seed: str, first: int, found: Path
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A context with a process that judges a file, and the list of what it prints. Its child processes end
    with it, where the system can."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    env["PYTHONIOENCODING"] = "utf-8:replace"
    process = subprocess.Popen(
        [sys.executable, "-m", "course.runner", str(number), str(adapters.resolve()), str(first), str(found)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        cwd=adapters.resolve().parent,
    )
    assert process.stdin
    assert process.stdout
    printed: list[str] = []
    reader = Thread(target=_read, args=(process.stdout, printed), daemon=True)
    reader.start()
    try:
        with suppress(OSError), process.stdin:
            process.stdin.write(f"{seed}\n")
        yield process, printed
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()
        reader.join(timeout=2)


def _read(stream: IO[str], printed: list[str]) -> None:
    """Read `stream` to its end and append the first SHOWN letters to `printed`."""
    room = SHOWN
    with stream:
        while text := stream.read(4096 if room else 1 << 20):
            printed.append(text[:room])
            room -= len(printed[-1])


def _wait(process: "subprocess.Popen[str]", found: Path, limit: float) -> str:
    """Wait for `process` to end; returns why it failed, or took over `limit` seconds for a law, or ""."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.02)
        if (now := found.stat().st_size) != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > (limit if size else START):
            return f"took longer than {limit:.0f} s: does a loop never end?"
    return f"ended the grader's process (exit code {process.returncode})" if process.returncode else ""


def _results(lab: Lab, lines: list[dict[str, Any]], why: str) -> Iterator[Result | str]:
    laws = {law.name: law for law in lab.laws}
    for line in lines:
        if "imported" in line:
            yield line["imported"]
        elif "ended" in line:
            law, message = laws[line["ended"]], line.get("message", "")
            picture = Picture(line["text"], line["svg"]) if "text" in line else None
            score = 0 if message else law.points
            yield Result(law, score, message, picture, line.get("measure"), line.get("unit", ""))
    if not lines or "starts" in lines[-1]:
        yield f"importing it {why or 'told nothing'}"
    elif "begins" in lines[-1]:
        yield Result(laws[lines[-1]["begins"]], 0, f"this law {why or 'was not judged to its end'}")
