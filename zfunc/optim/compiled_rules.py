"""A rule of one's own in the compiled kernel: its C is printed, compiled once, and kept in the user's cache.

The kernel is that of zfunc's own rules, with all formats, instruction sets and threads (`csrc/_update_kernel.h`).
Its library shares torch's OpenMP runtime as the extension does: it is compiled for OpenMP and linked to none. A
rule runs in torch operations instead, to the same bits, where it does what C cannot be printed for, or where there
is no compiler; one line of the log says why.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from zfunc.optim.rules import Rule
from zfunc.optim.rules_in_c import RULES_H, header

# As setup.py compiles the extension.
FLAGS = "-O3", "-std=gnu11", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-w"
ENTRY = """
void zf_own(const uintptr_t *addresses, const int *how, const uint32_t *dither, const float *factors, size_t n,
            int threads, int isa) {
    zf_update_from(addresses, how, dither, factors, n, threads, isa);
}
"""
log = logging.getLogger(__name__)


class CompiledRule:
    """A library's update of one rule, in a kernel with room for `num_moments` moments."""

    def __init__(self, library: Path, num_moments: int) -> None:
        self.num_moments = num_moments
        self._call = ctypes.CDLL(str(library)).zf_own
        self._call.restype = None

    def update(
        self,
        addresses: Sequence[int],
        how: Sequence[int],
        dithers: Sequence[int],
        factors: Sequence[float],
        n: int,
        threads: int,
        isa: int,
    ) -> None:
        """As `_cpu_adam.update`, and as little checked. ctypes releases the GIL."""
        kinds = ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.c_float
        arrays = zip(kinds, (addresses, how, dithers, factors), strict=True)
        self._call(*((kind * len(x))(*x) for kind, x in arrays), ctypes.c_size_t(n), threads, isa)


def compiled(rule: Rule) -> CompiledRule | None:
    """The kernel of a rule that zfunc's has not; None where torch operations have to do. A rule is pure, so it is
    printed once."""
    try:
        return _of(rule)
    except TypeError:  # it has no hash
        return _of.__wrapped__(rule)


@lru_cache(64)
def _of(rule: Rule) -> CompiledRule | None:
    moments = tuple(f"m{j}" for j in range(len(rule.state)))
    try:
        text = header([rule._replace(state=moments, name="own")])
    except Exception as error:  # whatever it does with what are not arrays
        return _in_torch(f"no C can be printed for {getattr(rule.update, '__qualname__', 'it')}: {error!r}")
    return _library(text, max(1, len(moments)))


@cache
def _library(text: str, num_moments: int) -> CompiledRule | None:
    """Of the same text by the same compiler there is one library for all processes."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return _in_torch("there is no C compiler: apt install gcc, or name one in CC")
    sources = b"".join(x.read_bytes() for x in sorted(RULES_H.parent.glob("_*.h")))
    of = [text, *FLAGS, compiler, str(os.stat(compiler).st_mtime_ns), str(num_moments)]
    digest = hashlib.sha256(sources + "\0".join(of).encode()).hexdigest()[:24]
    try:
        folder = _folder()
        library = folder / f"{digest}.so"
        if not library.exists():
            _compile(compiler, text, num_moments, library)
        return CompiledRule(library, num_moments)
    except subprocess.SubprocessError as error:
        return _in_torch(f"{compiler} did not compile it: {getattr(error, 'stderr', None) or error}")
    except (OSError, RuntimeError) as error:
        return _in_torch(f"its library cannot be made or loaded ({error})")


def _folder() -> Path:
    """The user's cache, which nobody else may write to: what is there gets loaded."""
    default = Path.home() / ".cache"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or default) / "zfunc" / "rules"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not yours alone: chmod 700 it, or set XDG_CACHE_HOME")
    return folder


def _compile(compiler: str, text: str, num_moments: int, library: Path) -> None:
    log.info("Compiling an optimizer's own rule with %s, once: %s", compiler, library)
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        source, built = Path(work, "own.c"), Path(work, "own.so")
        Path(work, "own_rules.h").write_text(text)
        source.write_text(f'#include "_update_kernel.h"\n{ENTRY}')
        defines = (
            '-DZF_RULES="own_rules.h"',
            f"-DZF_MOMENTS={num_moments}",
            f"-I{work}",
            f"-I{RULES_H.parent}",
        )
        # In two steps: linking with -fopenmp would bring a second OpenMP runtime.
        for words in (
            [compiler, *FLAGS, *defines, "-c", str(source), "-o", f"{work}/own.o"],
            [compiler, "-shared", f"{work}/own.o", "-o", str(built), "-Wl,-z,now", "-lm"],
        ):
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
        if b"GOMP_parallel" not in built.read_bytes():
            raise OSError(f"{compiler} compiles for another OpenMP runtime than torch's")
        built.replace(library)  # another process may have been faster: the same bytes


@cache
def _in_torch(why: str) -> Any:
    """Said once."""
    log.info("An optimizer's own rule runs in torch operations on the host: %s", why)
