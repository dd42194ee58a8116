"""Builds of kernel_cases.c: which compiler, which flags, what runs the program, and what to install for it.

The invariant: every build has the flags of the extension, read from setup.py, and adds to them. A build that a
machine cannot make is named with its reason and its Debian packages, never left out quietly.
"""

import ast
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("kernel_cases.c")
BUILDS = ROOT / "build" / "native"
# With -O0 a report names the line, and the build takes a third of the time; the other builds keep -O3.
SANITIZE = ("-O0", "-g1", "-DZF_INLINED=", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# What a call of the kernel does, twice: a thread sanitizer that knows no barrier of OpenMP reports the second one.
PROBE = """
#ifdef _OPENMP
#include <omp.h>
#endif
static int run(volatile int *seen, int round) {
    volatile int shared = round;
#pragma omp parallel num_threads(2)
    if (shared != round) *seen = 0;
    return *seen;
}
int main(void) {
    volatile int seen = 1;
    return run(&seen, 1) + run(&seen, 2) - 2;
}
"""
COMPLAINTS = "error:", "ERROR:", "cannot find", "ThreadSanitizer:"


class Variant(NamedTuple):
    """One way to build and run the program."""

    compiler: str
    packages: str  # of Debian, all that it needs
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()  # what runs the program on this machine
    environment: Mapping[str, str] = {}
    openmp: bool = True
    threads_only: bool = False  # only the cases that several threads work on


# Threads are checked with clang and libomp, whose tool Archer (libarcher.so, in Debian's libomp-*-dev, which
# libomp loads by itself) tells the sanitizer what OpenMP's barriers order. gcc's libgomp has no such tool: under
# gcc's thread sanitizer whatever follows a parallel region is a false report.
THREAD = Variant(
    "clang",
    "clang libomp-dev libclang-rt-dev",
    ("-O1", "-g1", "-fsanitize=thread"),
    environment={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},
    threads_only=True,
)
VARIANTS = {
    "gcc": Variant("gcc", "gcc libc6-dev"),
    "clang": Variant("clang", "clang libomp-dev"),
    "gcc-sanitize": Variant("gcc", "gcc libc6-dev", SANITIZE),
    # libomp leaks memory of its own; whether the kernel does is what gcc-sanitize says.
    "clang-sanitize": Variant(
        "clang", "clang libomp-dev libclang-rt-dev", SANITIZE, environment={"ASAN_OPTIONS": "detect_leaks=0"}
    ),
    "clang-thread": THREAD,
    "aarch64-gcc": Variant(
        "aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu qemu-user", ("-static",), ("qemu-aarch64",)
    ),
    # Debian has no libomp for another architecture: this one runs in one thread.
    "aarch64-clang": Variant(
        "clang",
        "clang gcc-aarch64-linux-gnu qemu-user",
        ("--target=aarch64-linux-gnu", "-static"),
        ("qemu-aarch64",),
        openmp=False,
    ),
}
GROUPS = {
    "native": ("gcc", "clang"),
    "sanitize": ("gcc-sanitize", "clang-sanitize", "clang-thread"),
    "aarch64": ("aarch64-gcc", "aarch64-clang"),
}


@functools.cache
def compile_args() -> tuple[str, ...]:
    """The flags of the extension, as setup.py has them."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILE_ARGS":
            return tuple(ast.literal_eval(node.value))
    raise LookupError("setup.py has no COMPILE_ARGS: the flags of the kernel are expected there")


def command(variant: Variant, source: Path, program: Path) -> list[str]:
    """The compiler call."""
    args = [flag for flag in compile_args() if variant.openmp or flag != "-fopenmp"]
    include = f"-I{ROOT / 'zfunc/optim/csrc'}"
    return [variant.compiler, *args, *variant.flags, include, str(source), "-o", str(program), "-lm"]


@functools.cache
def missing(name: str) -> str:
    """Why this machine cannot make or run a build, with what to install; "" where it can."""
    variant = VARIANTS[name]
    install = f"Debian: apt install {variant.packages}"
    for tool in (variant.compiler, *variant.runner[:1]):
        if not shutil.which(tool):
            return f"{name}: {tool} is not installed; {install}"
    if why := _probe(variant):
        return f"{name}: {variant.compiler} {' '.join(variant.flags)} does not work here: {why}; {install}"
    return ""


def _probe(variant: Variant) -> str:
    """Build and run a small program; the first complaint, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text(PROBE)
        done = _run(command(variant, source, program))
        if done.returncode == 0:
            done = _run([*variant.runner, str(program)], env={**os.environ, **variant.environment})
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip(" =")]
        first = next(
            (line for line in lines if any(word in line for word in COMPLAINTS)), [*lines, "no message"][0]
        )
        return first if done.returncode else ""


def _run(words: list[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, env=env, check=False)


def build(variant: Variant) -> Path:
    """Compile the program, or find it compiled from the same sources by the same command."""
    sources = [SOURCE, *sorted((ROOT / "zfunc/optim/csrc").glob("*.h"))]
    told = " ".join(command(variant, SOURCE, Path("program"))).encode()
    digest = hashlib.sha256(told + b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    program = BUILDS / f"{variant.compiler}-{digest}"
    if not program.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        fresh = BUILDS / f"{program.name}.{os.getpid()}"  # another run may be building the same
        done = _run(command(variant, SOURCE, fresh))
        if done.returncode:
            raise RuntimeError(f"{variant.compiler} could not compile {SOURCE.name}:\n{done.stderr}")
        fresh.replace(program)
    return program
