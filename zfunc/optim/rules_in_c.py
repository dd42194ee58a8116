"""The C of element-wise rules, printed from the rules themselves, and compiled for those of a reader's own.

A rule runs once on names instead of numbers, and what it does to them is written down. A C expression rounds each
operation once to float, as torch does, where neither products are contracted nor extra precision is kept
(`-ffp-contract=off`, SSE and later). `csrc/_rules.h` has all that zfunc comes with, as plain loops, and AdamW's
once more for vectors, in stages.

    python -m zfunc.optim.by_name    # writes csrc/_rules.h; a test holds that it is current

The C of a rule of one's own is compiled once, with the kernel of zfunc's rules (all formats, instruction sets and
threads), and kept in the user's cache. Its library shares torch's OpenMP runtime as the extension does: it is
compiled for OpenMP and linked to none. Where the rule does what C cannot be printed for, or where there is no
compiler, it runs in torch operations instead, to the same bits; one line of the log says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from zfunc.optim import rules
from zfunc.optim.rules import Factors, Rule
from zfunc.runtime import system_calls

RULES_H = Path(__file__).with_name("csrc") / "_rules.h"
SPECIAL = "NAN", "INFINITY"  # of math.h
FLOORS = {rules.GRAD_FLOOR: "grad", rules.EXP_AVG_FLOOR: "exp_avg", rules.EXP_AVG_SQ_FLOOR: "exp_avg_sq"}
# As setup.py compiles the extension.
FLAGS = "-O3", "-std=gnu11", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-w"
ENTRY = """
void zf_own(const uintptr_t *addresses, const int *how, const uint32_t *dither, const float *factors, size_t n,
            int threads, int isa) {
    zf_update_from(addresses, how, dither, factors, n, threads, isa);
}
"""
log = logging.getLogger(__name__)


# ---- a rule as values -----------------------------------------------------------------------------------


def _operator(op: str) -> tuple[Any, Any]:
    return lambda x, y: Value(op, x, value_of(y)), lambda x, y: Value(op, value_of(y), x)


class Value:
    """An expression of type float in C: a name, or an operation on other Values. It has no truth value."""

    def __init__(self, op: str, *args: Value, text: str = "") -> None:
        self.op, self.args, self.text = op, args, text

    __add__, __radd__ = _operator("+")
    __sub__, __rsub__ = _operator("-")
    __mul__, __rmul__ = _operator("*")
    __truediv__, __rtruediv__ = _operator("/")

    def __bool__(self) -> bool:
        raise TypeError("a rule has no branches: its values are arrays")


def name(text: str) -> Value:
    """A Value that is the C variable `text`."""
    return Value("name", text=text)


def value_of(x: Any) -> Value:
    """`x` as a Value: a Value unchanged, a number as a float literal of C."""
    if isinstance(x, Value):
        return x
    rounded = struct.unpack("f", struct.pack("f", x))[0]
    special = f"(float){'-' * (rounded < 0)}{SPECIAL[rounded == rounded]}"
    return name(f"{rounded!r}f" if math.isfinite(rounded) else special)


class _Names:
    """The operations of a rule (`rules.Operations`) that build C expressions (Values), not results."""

    def flush(self, x: Value, floor: Any, /) -> Value:
        return Value("flush", x, floor if isinstance(floor, Value) else Value("floor", text=repr(floor)))

    def sqrt(self, x: Value, /) -> Value:
        return Value("sqrt", x)

    def signed(self, x: Value, size: Any, /) -> Value:
        return Value("signed", x, value_of(size))


def unique(results: Iterable[Value], seen: dict[Value, None] | None = None) -> dict[Value, None]:
    """All Values that occur in the expressions `results`, and those in `seen`, each once, with operands
    before the Values that use them."""
    seen = {} if seen is None else seen
    for x in results:
        if x not in seen:
            unique(x.args, seen)
            seen[x] = None
    return seen


# ---- values as text -------------------------------------------------------------------------------------


class Printer:
    """Prints Values as C: on the vector type of csrc/_vectors.h, or on floats, for a CPU or CUDA."""

    def __init__(self, *, vector: bool = False, on_device: bool = False) -> None:
        self.vector, self.on_device = vector, on_device
        self.names: dict[Value, str] = {}

    def text(self, x: Value) -> str:
        """The C expression of Value `x`: the name of its variable, if the Printer has one, or its operation."""
        if x in self.names or x.op == "name":
            return self.names.get(x, x.text)
        if x.op == "floor":
            return self._floor(float(x.text))
        args = [self.text(y) for y in x.args]
        if x.op == "flush" and self.vector:
            return f"v_flush({args[0]}, k->size, {args[1]})"
        if x.op == "flush":
            floor = args[1] if x.args[1].op == "floor" else f"(int32_t)zf_bits({args[1]})"
            return f"zf_flush({args[0]}, {floor})"
        if x.op == "sqrt":
            return f"{'v_sqrt' if self.vector else '__fsqrt_rn' if self.on_device else 'sqrtf'}({args[0]})"
        if x.op == "/" and self.on_device:
            return f"__fdiv_rn({args[0]}, {args[1]})"
        if x.op == "signed":
            return f"zf_signed({args[0]}, {args[1]})"
        pairs = zip(x.args, args, strict=True)
        left, right = (f"({t})" if y.op in "+-*/" and y not in self.names else t for y, t in pairs)
        if (x.op == "+" and x.args[0].op in "+-*") or (x.op in "+-" and x.args[0].op == "*"):
            left = args[0]  # as C groups them
        if x.op in "+-" and x.args[1].op == "*":
            right = args[1]
        return f"{left} {x.op} {right}"

    def _floor(self, floor: float) -> str:
        known = FLOORS.get(floor)
        if self.vector:
            return f"k->floor_{known}"
        return f"ZF_FLOOR_{known.upper()}" if known else hex(bits_of(floor))

    def lines(self, results: Sequence[Value]) -> Iterator[str]:
        """Yield lines of C that compute `results` (the change of the weights, then new moments): new moments,
        and Values that are used more than once, become variables."""
        uses = Counter(y for x in unique(results) for y in x.args) + Counter(results[1:])
        for x in unique(results):
            # Also of an old moment that becomes another: stores come last.
            if x in results[1:] or (x.op not in ("name", "floor") and uses[x] > 1):
                text = self.text(x)
                self.names[x] = f"t{len(self.names)}"
                yield f"const float {self.names[x]} = {text};"


def bits_of(x: float) -> int:
    """The bits of `x` rounded to float32, as an unsigned integer."""
    return struct.unpack("I", struct.pack("f", x))[0]


def plain_loop(rule: Rule, *, on_device: bool = False) -> str:
    """The C function that applies a rule to n elements in a loop, moments in float arrays; `on_device` for CUDA."""
    k: Any = Factors._make(name(f"k.{x}") for x in Factors._fields)
    o, printer, g, p = _Names(), Printer(on_device=on_device), name("g"), name("p[i]")
    change, *new = rule.update(o, k, g, *(name(f"{x}[i]") for x in rule.state))
    names, moved = printer.text, name("change")
    body = [
        f"float g = {names(rules.scaled(o, k, name('grad[i]')))};",
        *([f"if (decay == ZF_L2) g = {names(rules.with_l2(o, k, g, p))};"] if rule.weights else ()),
        *printer.lines([change, *new]),
        f"float change = {names(change)};",
        *([f"if (decay == ZF_DECOUPLED) change = {names(moved + k.decay * p)};"] if rule.weights else ()),
        *(f"{x}[i] = {names(y)};" for x, y in zip(rule.state, new, strict=False)),
        f"p[i] = {names(p - moved if rule.weights else moved)};",
    ]
    arrays = ", ".join(f"float *restrict {x}" for x in ("p", *rule.state))
    head = f"ZF_INLINE void zf_rule_{rule.name}(const zf_factors *factors, int decay, size_t n,\n"
    head += f"    const float *restrict grad, {arrays}) {{\n    const zf_factors k = *factors;\n"
    head += "    for (size_t i = 0; i < n; i++) {\n"
    return head + "\n".join(f"        {x}" for x in body) + "\n    }\n}"


def staged(rule: Rule) -> str:
    """C functions, on vectors, for the parts of a rule with one square root: `keep` scales old moments,
    `moments` makes new ones, `root` takes the square root, `change` gives the change of the weights."""
    k: Any = Factors._make(name(f"k->{x}") for x in Factors._fields)
    o, g, p, old = _Names(), name("g"), name("p"), [name(f"*{x}") for x in rule.state]
    change, *new = rule.update(o, k, g, *old)
    kept = [y for x in new for y in unique([x]) if y.op == "*" and y.args[1] in old]
    (root,) = [x for x in unique([change]) if x.op == "sqrt"]
    pointers = ", ".join(f"vf *{x}" for x in rule.state)
    values = ", ".join(f"vf {x}" for x in rule.state)
    start, finish = Printer(vector=True), Printer(vector=True)
    start.names = dict(zip(kept, (f"*{x}" for x in rule.state), strict=True))
    finish.names = {root: "root", **dict(zip(new, rule.state, strict=True))}
    moments = [f"*{x} = {start.text(y.args[0])};" for x, y in zip(rule.state, new, strict=True)]
    for x, y in zip(rule.state, new, strict=True):
        start.names[y.args[0]] = f"*{x}"
        # 8-bit codes need the range of the last moment, and flush it only where that is below the floor.
        moments.append(f"{'if (!codes) ' if y is new[-1] else ''}*{x} = {start.text(y)};")
    keep = [f"*{x} = {Printer(vector=True).text(y)};" for x, y in zip(rule.state, kept, strict=True)]
    parts = [
        (f"void v_{rule.name}_keep(const v_call *k, {pointers})", keep),
        (f"void v_{rule.name}_moments(const v_call *k, int codes, vf g, {pointers})", moments),
        (f"vf v_{rule.name}_root({values})", [f"return v_sqrt({finish.text(root.args[0])});"]),
        (f"vf v_{rule.name}_change(const v_call *k, {values}, vf root)", [f"return {finish.text(change)};"]),
        ("vf v_with_l2(const v_call *k, vf g, vf p)", [f"return {start.text(rules.with_l2(o, k, g, p))};"]),
    ]
    lines = ("\n".join([f"ZF_V_INLINE {head} {{", *(f"    {x}" for x in body), "}"]) for head, body in parts)
    return "\n".join(lines)


def header(printed: Sequence[Rule], vectors: Rule | None = None, *, on_device: bool = False) -> str:
    """The text of a C header (CUDA if `on_device`) with the rules `printed`: their numbers, scalars and
    thresholds, a switch over them, and a loop for each. With `vectors`, also the functions that `staged`
    makes of that rule."""
    names = [str(x.name) for x in printed]
    floors = (
        f"#define ZF_FLOOR_{x.upper()} {bits_of(y):#010x} /* bits of {y!r} */" for y, x in FLOORS.items()
    )
    calls = [
        f"{'else ' * (i > 0)}if (a->rule == ZF_{x.upper()}) ZF_BY_DECAY(zf_rule_{x}, "
        + ", ".join(["p", *(f"m[{j}]" for j in range(len(rule.state)))])
        + ");"
        for i, (x, rule) in enumerate(zip(names, printed, strict=True))
    ]
    parts = [
        "/* Printed by `python -m zfunc.optim.by_name` from the rules of the optimizers: not to be edited. */",
        "#ifndef ZF_RULES_H\n#define ZF_RULES_H",
        "enum { " + ", ".join(f"ZF_{x.upper()} = {i}" for i, x in enumerate(names)) + " };",
        "#define ZF_FACTORS(each) \\\n    " + " \\\n    ".join(f"each({x})" for x in Factors._fields),
        "#define ZF_AS_FLOAT(name) float name;\ntypedef struct { ZF_FACTORS(ZF_AS_FLOAT) } zf_factors;",
        "\n".join(floors),
        *(plain_loop(x, on_device=on_device) for x in printed),
        "/* The rule of a call, over the elements of a block: of p and moments m, with gradients g. */\n"
        "#define ZF_APPLY(a, p, m, g, n) \\\n    " + " \\\n    ".join(calls),
        "#endif",
    ]
    if vectors:
        parts.append("#ifdef ZF_RULES_OF_VECTORS\n" + staged(vectors) + "\n#endif")
    return "\n\n".join(parts) + "\n"


# ---- a rule of one's own, compiled ----------------------------------------------------------------------


class CompiledRule:
    """The update function of one rule in the compiled `library`, with room for `num_moments` moments."""

    def __init__(self, library: Path, num_moments: int) -> None:
        self.num_moments = num_moments
        self._call = ctypes.CDLL(str(library)).zf_own
        self._call.restype = None

    def update(self, *args: Any) -> None:
        """Update as `_cpu_adam.update` does, with the same arguments, unchecked; ctypes releases the GIL."""
        *arrays, n, threads, isa = args  # addresses, how, dithers and factors first
        kinds = zip((ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.c_float), arrays, strict=True)
        self._call(*((kind * len(x))(*x) for kind, x in kinds), ctypes.c_size_t(n), threads, isa)

    def update_runs(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Make the updates `calls`, each a tuple of arguments of `update`, as `_cpu_adam.update_runs` does."""
        for call in calls:
            self.update(*call)


def compiled(rule: Rule) -> CompiledRule | None:
    """The kernel for a user's own `rule`, compiled at first use and cached; None if it cannot be compiled, so
    that the rule runs in torch operations."""
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
    """The library compiled from the C code `text` of a rule with `num_moments` moments. Processes with the
    same compiler share its file. None if compilation fails."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return _in_torch("there is no C compiler: apt install gcc, or name one in CC")
    sources = b"".join(x.read_bytes() for x in sorted(RULES_H.parent.glob("_*.h")))
    of = [text, *FLAGS, compiler, str(os.stat(compiler).st_mtime_ns), str(num_moments)]
    digest = hashlib.sha256(sources + "\0".join(of).encode()).hexdigest()[:24]
    try:
        library = _folder() / f"{digest}.so"
        if not library.exists():
            _compile(compiler, text, num_moments, library)
        return CompiledRule(library, num_moments)
    except subprocess.SubprocessError as error:
        return _in_torch(f"{compiler} did not compile it: {getattr(error, 'stderr', None) or error}")
    except (OSError, RuntimeError) as error:
        return _in_torch(f"its library cannot be made or loaded ({error})")


def _folder() -> Path:
    """The user's cache folder of compiled rules, writable by the user alone, as its files are loaded."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zfunc" / "rules"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not system_calls.is_owners_alone(folder.stat()):
        raise PermissionError(f"{folder} is not yours alone: chmod 700 it, or set XDG_CACHE_HOME")
    return folder


def _compile(compiler: str, text: str, num_moments: int, library: Path) -> None:
    log.info("Compiling an optimizer's own rule with %s, once: %s", compiler, library)
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        source, built = Path(work, "own.c"), Path(work, "own.so")
        Path(work, "own_rules.h").write_text(text)
        source.write_text(f'#include "_update_kernel.h"\n{ENTRY}')
        own = ['-DZF_RULES="own_rules.h"', f"-DZF_MOMENTS={num_moments}", f"-I{work}", f"-I{RULES_H.parent}"]
        # In two steps: linking with -fopenmp would bring a second OpenMP runtime.
        for words in (
            [*FLAGS, *own, "-c", str(source), "-o", f"{work}/own.o"],
            ["-shared", f"{work}/own.o", "-o", str(built), "-Wl,-z,now", "-lm"],
        ):
            subprocess.run([compiler, *words], check=True, capture_output=True, text=True, timeout=120)
        if b"GOMP_parallel" not in built.read_bytes():
            raise OSError(f"{compiler} compiles for another OpenMP runtime than torch's")
        built.replace(library)  # another process may have been faster: the same bytes


@cache
def _in_torch(why: str) -> Any:
    """Log, once, why an optimizer's own rule runs in torch operations; returns None."""
    log.info("An optimizer's own rule runs in torch operations on the host: %s", why)
