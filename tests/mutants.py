"""Small mutations of the package, one at a time: do the tests that should notice notice?

    python tests/mutants.py --number 40 --seed 0        # a sample, the same every time
    python tests/mutants.py --modules stages updates --number 100000 --seconds 14400
    python tests/mutants.py --modules stages --like 1e-06

A mutation changes one operator, constant or condition, drops one call, one yield or one element of a tuple, or
swaps two arguments. Survivors are printed, and each has to be killed by a test or explained in mutants.txt: some
change nothing that a test could notice. A mutant lives in a forked process that imports the changed module in place
of the one on disk; nothing is written. A test that does not end counts as noticing.
"""

import argparse
import ast
import importlib.util
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[1]
ALREADY_IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis, before the forks
EXPLAINED = Path(__file__).with_suffix(".txt")

GRADIENTS = ["tests/engine/test_gradients.py", "-k", "bf16 or two_ranks or clipped and fp16"]
SKIPPED = ["tests/engine/test_train_step.py", "-k", "overflow or scale or finite"]
SAVED = [
    "tests/engine/test_saving.py",
    "-k",
    "step_that_saves and tied or sends_the_device or first_8_bit or resume and fp16",
]
WAITS = ["tests/engine/test_deferred.py"]
DROPOUT = ["tests/engine/test_laws.py", "-k", "no_way and dropout"]
RESUMED = ["tests/engine/test_saving.py", "-k", "load_it_too or any_program_loads"]
WATCHED: dict[str, list[list[str]]] = {
    "engine/step/stages": [GRADIENTS, DROPOUT, SKIPPED, SAVED, WAITS],
    "engine/step/clipping_stages": [GRADIENTS, SKIPPED],
    "engine/step/update_stages": [
        GRADIENTS,
        ["tests/engine/test_laws.py", "-k", "no_way and on_the_device"],
    ],
    "engine/step/stage_context": [GRADIENTS],
    "core/recipes": [
        ["tests/core/test_recipe.py", "tests/core/test_graph.py", "tests/core/test_plan.py"],
        GRADIENTS,
    ],
    "core/ops": [
        ["tests/core/test_recipe.py", "tests/core/test_graph.py", "tests/core/test_memory.py"],
        GRADIENTS,
    ],
    "engine/compile/vjp": [
        GRADIENTS,
        ["tests/engine/test_laws.py", "-k", "no_way and pairs"],
        ["tests/engine/test_passes.py", "-k", "vjp_to_the_bit"],
    ],
    "optim/host_update": [
        ["zfunc/optim/host_update.py", "tests/optim/test_sums.py", "tests/optim/test_update_refused.py"],
        ["tests/optim/test_update.py", "-k", "public or sizes or bypasses"],
    ],
    "optim/ema": [["tests/engine/test_ema.py", "-k", "numpy"]],
    "optim/loss_scale": [
        [
            "zfunc/optim/loss_scale.py",
            "tests/train/test_deepspeed.py",
            "-k",
            "scal or tutorial",
        ],
        SKIPPED,
        ["tests/test_values.py", "-k", "LossScale"],
    ],
    "core/layout": [["zfunc/core/layout.py", "tests/core/test_layout.py"]],
    "runtime/direct_io": [["tests/runtime/test_direct_io.py"]],
    "checkpoint/safetensors_file": [
        ["tests/checkpoint/test_shards.py"],
        ["tests/checkpoint/test_hostile.py", "-k", "false_sizes or hostile_manifest"],
    ],
    "checkpoint/swap_stripes": [["tests/checkpoint/test_swap_space.py"]],
    "checkpoint/swap_file": [
        ["tests/checkpoint/test_swap_space.py", "tests/checkpoint/test_swap_checkpoint.py"]
    ],
    "checkpoint/swap_folders": [["tests/checkpoint/test_swap_space.py"]],
    "checkpoint/swap_space": [
        ["tests/checkpoint/test_swap_space.py", "tests/checkpoint/test_swap_faults.py"],
        ["tests/checkpoint/test_swap_crashes.py", "-k", "killed_anywhere or power_cut"],
    ],
    "checkpoint/swap_checkpoint": [["tests/checkpoint/test_swap_checkpoint.py"]],
    "checkpoint/snapshot": [SAVED, WAITS, RESUMED],
    "checkpoint/reader": [
        ["tests/checkpoint/test_manifest.py", "-k", "any_ranks or reads_fill or planned"],
        RESUMED,
    ],
    "engine/state/restore": [
        SAVED,
        WAITS,
        RESUMED,
        ["tests/engine/test_laws.py", "-k", "checkpoint_of_any_way"],
    ],
}
"""Modules by their path in the package, and the tests that should notice, the quickest first, in turn."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@frozen
class Mutant:
    """One change of one module. `name` says where and what, and stays when lines move."""

    module: str
    number: int
    name: str

    @property
    def path(self) -> Path:
        """The module's source."""
        return path_of(self.module)

    def source(self) -> str:
        """The module with the change made."""
        tree = ast.parse(self.path.read_text())
        for number, (_, replace, new) in enumerate(places(tree)):
            if number == self.number:
                replace(new)
                return ast.unparse(ast.fix_missing_locations(tree))
        raise LookupError(self.name)


def path_of(module: str) -> Path:
    """Where a module's source is."""
    return ROOT / "zfunc" / f"{module}.py"


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
    for parent, name, value in _fields(tree):
        items: list[Any] = value if isinstance(value, list) else [value]
        for i, node in enumerate(items):
            if not isinstance(node, ast.AST) or _left_alone(parent, name, node):
                continue

            def put(new: Any, value: Any = value, i: int = i, name: str = name) -> None:
                if isinstance(value, list):
                    value[i] = new
                else:
                    setattr(tree, name, new)

            for new in changes(parent, node):
                yield f"{where}: {_short(node)} -> {_short(new)}", put, new
            inner = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            yield from places(node, f"{where}.{node.name}".strip(".") if inner else where)


def _fields(node: ast.AST) -> list[tuple[ast.AST, str, Any]]:
    return [(node, name, value) for name, value in ast.iter_fields(node)]


def _left_alone(parent: ast.AST, name: str, node: ast.AST) -> bool:
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


class _Instead:
    """Imports one module from a source of its own."""

    def __init__(self, module: str, source: str) -> None:
        self.name, self.path, self.source = f"zfunc.{module.replace('/', '.')}", path_of(module), source

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Called by the import system."""
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=_Loader(self.source, name, str(self.path))
        )


class _Loader(SourceFileLoader):
    def __init__(self, source: str, name: str, path: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> Any:  # noqa: ARG002
        return compile(self.source, self.path, "exec")


def notices(module: str, source: str, tests: list[str], seconds: float) -> tuple[bool, float]:
    """Whether the tests fail, or do not end, with this source of the module; and how long that took."""
    began = time.monotonic()
    child = os.fork()
    if not child:
        _test(module, source, tests)
    try:
        while time.monotonic() < began + seconds:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return status != 0, time.monotonic() - began
            time.sleep(0.05)
        return True, seconds
    finally:
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _test(module: str, source: str, tests: list[str]) -> None:
    """In the fork: never returns."""
    import pytest
    from hypothesis import Phase
    from hypothesis import settings as hypothesis

    found = (Phase.explicit, Phase.generate)  # no time is spent on a smaller example
    hypothesis.register_profile("mutants", deadline=None, derandomize=True, phases=found)
    code = 1
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        sys.meta_path.insert(0, _Instead(module, source))
        plain = (
            "--assert=plain"  # or pytest would read a module with doctests from the disk, to rewrite asserts
        )
        options = ["-x", "-q", plain, "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
        code = pytest.main([*options, "-W", ALREADY_IMPORTED, *tests])
    finally:
        os._exit(int(code))


def survives(mutant: Mutant, bounds: dict[str, float]) -> bool:
    """Whether all tests of its module pass with it."""
    source = mutant.source()
    try:
        compile(source, str(mutant.path), "exec")
    except SyntaxError:
        return False
    return not any(notices(mutant.module, source, t, bounds[str(t)])[0] for t in WATCHED[mutant.module])


def alternatives(tests: list[str]) -> Iterator[list[str]]:
    """The tests that each name after -k stands for: a name that no test has any more would watch nothing.

    >>> list(alternatives(["test_x.py", "-k", "one or two and three"]))
    [['test_x.py', '-k', 'one'], ['test_x.py', '-k', 'two and three']]
    """
    *others, names = tests
    return ([*others, name] for name in names.split(" or "))


def chosen(modules: list[str], number: int, seed: int, like: str) -> list[Mutant]:
    """A sample of the mutants that nothing is known of."""
    known = explained()
    every = [m for module in modules for m in mutants(module) if m.name not in known and like in m.name]
    return random.Random(seed).sample(every, min(number, len(every)))


def main() -> int:
    options = argparse.ArgumentParser(description="Mutants of the package, and the tests that should notice.")
    options.add_argument(
        "--modules", nargs="+", default=[*WATCHED], choices=[*WATCHED], help="(default: all)"
    )
    options.add_argument("--number", type=int, default=40, help="of mutants, drawn from all (default: 40)")
    options.add_argument("--seconds", type=float, default=3600, help="bound on the time (default: 3600)")
    options.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    options.add_argument("--like", default="", help="only mutants in whose names this is")
    args = options.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "tests"))
    import functorch.compile  # noqa: F401  what takes longest to import, before the forks
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `notices` ends its child
    began, bounds = time.monotonic(), dict[str, float]()
    sample = chosen(args.modules, args.number, args.seed, args.like)
    for module in {m.module for m in sample}:
        for tests in WATCHED[module]:
            if str(tests) not in bounds:
                seconds = 0.0
                for part in alternatives(tests):
                    failed, more = notices(module, path_of(module).read_text(), part, 600)
                    if failed:
                        raise SystemExit(f"pytest {' '.join(part)} fails without a mutant, or has no test")
                    seconds += more
                bounds[str(tests)] = 30 + 4 * seconds
                print(f"{seconds:5.1f} s  pytest {' '.join(tests)}", flush=True)
    tried, left = 0, list[str]()
    try:
        for mutant in sample:
            if time.monotonic() - began > args.seconds:
                break
            if survives(mutant, bounds):
                left.append(mutant.name)
                print(f"SURVIVED {mutant.name}", flush=True)
            tried += 1
    finally:  # also where it is stopped
        took = time.monotonic() - began
        print(f"{tried} mutants in {took:.0f} s, seed {args.seed}: {tried - len(left)} noticed", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
