"""Small mutations of the package, one at a time: do the tests that should notice notice?

    python tests/mutants.py --number 40 --seed 0        # a sample, the same every time
    python tests/mutants.py --modules engine/stages/stages --like 1e-06

A mutation changes one operator, constant or condition, drops one call, one yield or one element of a tuple, or
swaps two arguments. Survivors are printed, and each has to be killed by a test or explained in mutants.txt: some
change nothing that a test could notice. Nothing is written: pytest has this file as a plugin, which imports the
changed module in place of the one on the disk. Tests that do not end count as noticing.
"""

import argparse
import ast
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[1]
EXPLAINED = Path(__file__).with_suffix(".txt")
ASKED = "ZFUNC_MUTANT"  # the module and the number of the one that a process of pytest has

WATCHED = (
    # Modules by their path in the package; arguments of pytest for tests that should notice, the quickest first.
    ("core/*", "tests/core"),
    ("optim/*", "zfunc/optim tests/optim"),
    ("optim/loss_scale", "tests/test_values.py tests/train/test_deepspeed.py"),
    ("checkpoint/*", "tests/checkpoint"),
    ("runtime/*", "tests/runtime"),
    ("models/cut/*", "tests/models/test_any_model_values.py tests/models/test_any_model_refused.py"),
    ("models/cut/*", "tests/models/test_any_model.py"),
    ("planner/*", "tests/planner/test_planner.py"),
    ("planner/*", "tests/planner"),
    ("core/[or]*", "tests/engine/test_gradients.py"),
    ("engine/trace/*", "zfunc/engine/trace"),
    ("engine/trace/[jtv]*", "tests/engine/test_passes.py"),
    ("engine/*", "tests/engine/test_gradients.py tests/engine/test_train_step.py"),
    ("engine/*", "tests/engine/test_saving.py tests/engine/test_deferred.py"),
    ("engine/*", "tests/engine/test_laws.py -k 'no_way or checkpoint'"),
    ("checkpoint/*", "tests/engine/test_saving.py"),
)
PAIRS = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitOr, ast.BitAnd), (ast.LShift, ast.RShift)),
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    (ast.And, ast.Or),
)
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {a: b for x, y in PAIRS for a, b in ((x, y), (y, x))}
SWAPPED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}


def modules() -> list[str]:
    """Those that are watched."""
    paths = (x.relative_to(ROOT / "zfunc").with_suffix("") for x in sorted((ROOT / "zfunc").rglob("*.py")))
    return [str(x) for x in paths if x.name != "__init__" and tests_of(str(x))]


def path_of(module: str) -> Path:
    """Where a module's source is."""
    return ROOT / "zfunc" / f"{module}.py"


def tests_of(module: str) -> list[str]:
    """Arguments of pytest, the quickest first."""
    return [arguments for pattern, arguments in WATCHED if fnmatch(module, pattern)]


@frozen
class Mutant:
    """One change of one module. `name` says where and what, and stays when lines move."""

    module: str
    number: int
    name: str

    def source(self) -> str:
        """The module with the change made."""
        tree = ast.parse(path_of(self.module).read_text())
        for number, (_, replace, new) in enumerate(places(tree)):
            if number == self.number:
                replace(new)
                return ast.unparse(ast.fix_missing_locations(tree))
        raise LookupError(self.name)


def mutants(module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its source."""
    result: list[Mutant] = []
    seen: Counter[str] = Counter()
    for number, (change, _, _) in enumerate(places(ast.parse(path_of(module).read_text()))):
        seen[change] += 1
        again = f" ({seen[change]})" if seen[change] > 1 else ""
        result.append(Mutant(module, number, f"{module}: {change}{again}"))
    return result


def places(tree: ast.AST, where: str = "") -> Iterator[tuple[str, Callable[[Any], None], ast.AST]]:
    """What could be changed: in words, how it is put there, and what is."""
    for name, value in ast.iter_fields(tree):
        items: list[Any] = value if isinstance(value, list) else [value]
        for i, node in enumerate(items):
            if not isinstance(node, ast.AST) or _left_alone(name, node):
                continue

            def put(new: Any, value: Any = value, i: int = i, name: str = name) -> None:
                if isinstance(value, list):
                    value[i] = new
                else:
                    setattr(tree, name, new)

            for new in changes(tree, node):
                yield f"{where}: {_short(node)} -> {_short(new)}", put, new
            inner = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            yield from places(node, f"{where}.{node.name}".strip(".") if inner else where)


def _left_alone(name: str, node: ast.AST) -> bool:
    """What a program does not do: annotations, decorators, words of errors and of the log; checks and hints."""
    if isinstance(node, ast.keyword) and node.arg in ("strict", "non_blocking"):
        return True
    if name in ("annotation", "returns", "decorator_list", "bases", "slice_annotation"):
        return True
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("log.", "refuse", "warnings."))


def changes(parent: ast.AST, node: ast.AST) -> Iterator[ast.AST]:
    """What a node could be instead."""
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED:
            yield _like(node, op=SWAPPED[type(op)]())
        case ast.BoolOp(op=op):
            yield _like(node, op=SWAPPED[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield _like(node, ops=[SWAPPED[type(op)]()])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(1000 * value if value else 1.0)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield _like(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield ast.Pass()
        case ast.Call(func=ast.Name(id="min" | "max")):
            pass  # in any order
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            if not isinstance(second, ast.Starred) and ast.dump(first) != ast.dump(second):
                yield _like(node, args=[second, first, *rest])
        case ast.Tuple(elts=elements, ctx=ast.Load()) if isinstance(
            parent, (ast.Call, ast.Assign, ast.Return)
        ):
            for i in range(len(elements)):
                yield _like(node, elts=elements[:i] + elements[i + 1 :])
        case _:
            pass


def _like(node: ast.AST, **changed: Any) -> ast.AST:
    return type(node)(**{**{name: getattr(node, name) for name in node._fields}, **changed})


def _short(node: ast.AST) -> str:
    """A node in one line: of a statement with a body the first."""
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]


def explained() -> dict[str, str]:
    """Mutants that no test can notice, and why: two lines each in mutants.txt."""
    lines = [x for x in EXPLAINED.read_text().splitlines() if x and not x.startswith("#")]
    return dict(zip(lines[::2], (x.strip() for x in lines[1::2]), strict=True))


class Instead:
    """Imports one module from a source of its own; the others as they are."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.path = f"zfunc.{mutant.module.replace('/', '.')}", str(path_of(mutant.module))
        self.source = mutant.source()

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Called by the import system."""
        loader = SourceFileLoader(name, self.path)
        loader.get_code = lambda _: compile(self.source, self.path, "exec")  # pyright: ignore
        return spec_from_file_location(name, self.path, loader=loader) if name == self.name else None


if ASKED in os.environ:  # in a process of pytest
    _module, _number = os.environ[ASKED].split()
    sys.meta_path.insert(0, Instead(Mutant(_module, int(_number), "")))


def passes(tests: str, seconds: float, mutant: Mutant | None = None) -> tuple[bool, float]:
    """Whether these tests pass within the seconds, and how long that took."""
    # pytest rewrites asserts of modules with doctests, which it would read from the disk for that
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "mutants"]
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(tests)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    if mutant is not None:
        environment[ASKED] = f"{mutant.module} {mutant.number}"
    began, quiet = time.monotonic(), subprocess.DEVNULL
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        return child.wait(seconds) == 0, time.monotonic() - began
    except subprocess.TimeoutExpired:
        return False, seconds
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> int:
    options = argparse.ArgumentParser(description="Mutants of the package, and the tests that should notice.")
    options.add_argument(
        "--modules", nargs="+", default=modules(), choices=modules(), metavar="M", help="(all)"
    )
    options.add_argument("--number", type=int, default=40, help="of mutants, drawn from all (default: 40)")
    options.add_argument("--seconds", type=float, default=3600, help="bound on the time (default: 3600)")
    options.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    options.add_argument("--like", default="", help="only mutants in whose names this is")
    args = options.parse_args()
    began, bounds, tried, left = time.monotonic(), dict[str, float](), 0, list[str]()
    every = [m for module in args.modules for m in mutants(module) if args.like in m.name]
    every = [m for m in every if m.name not in explained()]
    for mutant in random.Random(args.seed).sample(every, min(args.number, len(every))):
        if time.monotonic() - began > args.seconds:
            break
        for tests in tests_of(mutant.module):
            if tests not in bounds:
                passed, seconds = passes(tests, 900)
                if not passed:
                    raise SystemExit(f"pytest {tests} fails without a mutant, or has no test")
                bounds[tests] = 30 + 4 * seconds
                print(f"{seconds:5.1f} s  pytest {tests}", flush=True)
            if not passes(tests, bounds[tests], mutant)[0]:
                break
        else:
            left.append(mutant.name)
            print(f"SURVIVED {mutant.name}", flush=True)
        tried += 1
    took = time.monotonic() - began
    print(f"{tried} mutants in {took:.0f} s, seed {args.seed}: {tried - len(left)} noticed", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
