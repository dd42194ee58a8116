"""Build of the C kernel; everything else about the package is in pyproject.toml.

The extension is compiled with -fopenmp but not linked to libgomp: a second OpenMP runtime in the process
would double the threads, so its symbols resolve against the one torch brings.
"""

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILE_ARGS = ["-O3", "-std=gnu11", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
# -z now: a missing OpenMP runtime fails the import, where it can be explained, not the first step.
LINK_ARGS = ["-Wl,-z,now"]

HELP = """
zfunc: its host kernel (zfunc/_cpu_adam.pyx, zfunc/_adam_kernel.h) did not compile; the compiler's own
words are above. It needs
  - gcc 9 or newer with its OpenMP header omp.h  (Debian/Ubuntu: apt install gcc libc6-dev;
    Fedora/RHEL: dnf install gcc; conda: conda install -c conda-forge gcc_linux-64)
  - the headers of this Python                    (Debian/Ubuntu: apt install python3-dev;
    Fedora/RHEL: dnf install python3-devel)
If there is another compiler beside the default one, name it: CC=gcc-13 pip install .
"""


class BuildKernel(build_ext):
    """build_ext that says what is missing when the compiler fails."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension; a failure ends the build with one readable message."""
        try:
            super().build_extension(ext)
        except Exception as error:  # their common base depends on the version of setuptools
            raise SystemExit(f"{error}\n{HELP}") from error


kernel = Extension(
    "zfunc._cpu_adam",
    ["zfunc/_cpu_adam.pyx"],
    depends=["zfunc/_adam_kernel.h"],
    include_dirs=["zfunc"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
)

setup(
    packages=["zfunc", "zfunc.schedules"],
    package_dir={"zfunc": "zfunc", "zfunc.schedules": "schedules"},
    package_data={"zfunc": ["py.typed", "*.pyx", "*.h"], "zfunc.schedules": ["py.typed"]},
    ext_modules=cythonize([kernel], show_all_warnings=False, build_dir="build"),
    cmdclass={"build_ext": BuildKernel},
)
