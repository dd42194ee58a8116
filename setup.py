"""Build of the C kernel; everything else about the package is in pyproject.toml.

The invariant: what installs also loads. A compile that fails says what it lacks, and one for another OpenMP
runtime than torch's fails here, because it would fail at first use. The extension is compiled with -fopenmp
but not linked to libgomp: a second OpenMP runtime in the process would double the threads, so its symbols
resolve against the one torch brings.

ZFUNC_KERNEL=0 builds none: what plans, verifies, simulates and draws a step is Python.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

WITH_KERNEL = os.environ.get("ZFUNC_KERNEL") != "0"

try:
    from Cython import __version__ as cython_version
    from Cython.Build import cythonize
except ImportError:
    cython_version = "none"
too_old = cython_version == "none" or tuple(map(int, cython_version.split(".")[:2])) < (3, 1)
if WITH_KERNEL and too_old:
    raise SystemExit(
        f"zfunc: its build needs Cython 3.1 or newer, got {cython_version}: pip install 'cython>=3.1', "
        "or leave out --no-build-isolation and pip brings it"
    )

# One build serves this Python and every later one; free-threaded Pythons have no stable ABI and get their own.
OLDEST_PYTHON = (3, 11)
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

# On macOS torch brings LLVM's OpenMP runtime, and clang only hands -fopenmp on.
MAC = sys.platform == "darwin"
HANDED_ON = ["-Xpreprocessor"] if MAC else []  # before -fopenmp
CALLED = b"__kmpc_fork_call" if MAC else b"GOMP_parallel"  # of that runtime, by the kernel
COMPILE_ARGS = ["-fopenmp", "-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"]
# -z now: a missing OpenMP runtime fails the import, where it can be explained, not the first step.
LINK_ARGS = [] if MAC else ["-Wl,-z,now"]

GET_COMPILER = """gcc 9 or newer, with the headers of the C library
    Debian/Ubuntu: apt install gcc libc6-dev;  Fedora/RHEL: dnf install gcc
    conda: conda install -c conda-forge gcc_linux-64
    or name the one there is: CC=gcc-13 pip install -e ."""
GET_PYTHON = """Python.h, the headers of this Python
    Debian/Ubuntu: apt install python3-dev;  Fedora/RHEL: dnf install python3-devel"""
GET_OPENMP = """omp.h, the header of OpenMP; gcc brings its own, other compilers do not
    Debian/Ubuntu: apt install gcc;  Fedora/RHEL: dnf install gcc;  then CC=gcc pip install -e .
    macOS: brew install libomp;  then CPATH="$(brew --prefix libomp)/include" pip install -e ."""
GET_GCC = """a compiler for GNU's OpenMP runtime, which torch brings; this one compiles for another or for none
    Debian/Ubuntu: apt install gcc;  Fedora/RHEL: dnf install gcc;  then CC=gcc pip install -e ."""
UNKNOWN = """Linux, gcc 9 or newer and Cython 3.1 or newer
    (their headers are all there: the first error above says what is wrong)"""

# What is asked of the compiler, one after the other; the first it cannot compile is what is missing.
PROBES = (
    ("#include <stdlib.h>", GET_COMPILER),
    ("#include <Python.h>", GET_PYTHON),
    ("#include <omp.h>", GET_OPENMP),
)


def missing(command: list[str]) -> str:
    """What a compiler command lacks, and how to get it, once a compile with it has failed."""
    if not shutil.which(command[0]):
        return f"{GET_COMPILER}\n    ({command[0]} is not there)"
    for source, lacking in PROBES:
        probe = [*command, *HANDED_ON, "-fopenmp", "-fsyntax-only", "-x", "c", "-"]
        if subprocess.run(probe, input=source.encode(), capture_output=True).returncode:
            return f"{lacking}\n    ({command[0]} does not compile: {source})"
    return UNKNOWN


def refusal(reason: str, need: str) -> SystemExit:
    """The one message a failed build ends with."""
    return SystemExit(f"\nzfunc: its host kernel was not built: {reason}\nIt needs {need}\n")


class BuildKernel(build_ext):
    """build_ext that says what is missing, and refuses what would only fail at first use."""

    def run(self) -> None:
        """Build; an editable install gets the sources' folder on sys.path as well.

        The finder that setuptools installs is asked after sys.path. In the folder that contains a clone, the clone
        itself is a namespace package `zfunc`, which would be found first; a regular package on sys.path wins.
        """
        super().run()
        if self.editable_mode:  # then this is the unpacked wheel
            wheel = Path(self.get_finalized_command("install").install_lib)
            wheel.joinpath("zfunc.pth").write_bytes(os.fsencode(f"{Path.cwd()}\n"))

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension; a failure ends the build with one readable message."""
        linker = self.compiler.linker_so  # this Python's own library folder has no place in a wheel
        self.compiler.linker_so = [word for word in linker if not word.startswith("-Wl,-rpath")]
        try:
            super().build_extension(ext)
        except Exception as error:  # their common base depends on the version of setuptools
            include = [f"-I{folder}" for folder in self.include_dirs]
            reason = str(error) if len(str(error)) < 200 else "its compile failed, in the words above"
            raise refusal(reason, missing([*self.compiler.compiler_so, *include])) from error
        built = Path(self.get_ext_fullpath(ext.name))
        if CALLED not in built.read_bytes():
            built.unlink()
            raise refusal(f"{self.compiler.compiler_so[0]} does not call {CALLED.decode()}", GET_GCC)

    def copy_extensions_to_source(self) -> None:
        """Build in place; a build under this Python's own suffix would be imported before the new one."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for ext in self.extensions:
            Path(*ext.name.split(".")).with_suffix(suffix).unlink(missing_ok=True)
        super().copy_extensions_to_source()


kernel = Extension(
    "zfunc._cpu_adam",
    ["zfunc/_cpu_adam.pyx"],
    depends=sorted(glob("zfunc/optim/csrc/*.h")),
    include_dirs=["zfunc/optim/csrc"],
    define_macros=[("Py_LIMITED_API", "0x{:02X}{:02X}0000".format(*OLDEST_PYTHON))] if STABLE_ABI else [],
    py_limited_api=STABLE_ABI,
    extra_compile_args=[*HANDED_ON, *COMPILE_ARGS],
    extra_link_args=LINK_ARGS,
)

tagged = WITH_KERNEL and STABLE_ABI

setup(
    packages=[*find_packages(include=["zfunc", "zfunc.*"]), "zfunc.schedules"],
    package_dir={"zfunc": "zfunc", "zfunc.schedules": "schedules"},
    package_data={
        "zfunc": ["py.typed"],
        "zfunc.optim": ["csrc/*.h"],  # rules of a reader's own are compiled with them
        "zfunc.models": ["gpt2.toml"],
        "zfunc.planner": ["profiles/*.toml"],
        "zfunc.train.deepspeed": ["keys.toml"],
        "zfunc.train.trainer": ["fields.toml"],
        "zfunc.viz": ["colours.toml", "web/*"],
    },
    include_package_data=False,  # the kernel's other sources are for the sdist
    ext_modules=cythonize([kernel], show_all_warnings=False, build_dir="build") if WITH_KERNEL else [],
    cmdclass={"build_ext": BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp{}{}".format(*OLDEST_PYTHON)}} if tagged else {},
)
