"""Imports go down only, what needs no torch imports none, and nothing that interprets a plan knows a verb."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from table import RECIPES, SPECS

import zfunc
from zfunc.cli.catalogue import COMMANDS
from zfunc.core.graph import KINDS
from zfunc.options import flag

ROOT = Path(__file__).parents[1]
INDEX = "zfunc"  # zfunc/__init__.py, which only the command line may call, as users do
GROUND = ("_version", "errors", "units", "values", "options")
ORDER = (
    *(*GROUND, "core", "schedules", "runtime", "optim", "checkpoint", "engine"),
    *("viz", "planner", "models", "lr", "hf", "train", "cli"),
)  # from the ground up
FLOORS = (
    "trace",
    "rows",
    "state",
    "stages",
    "program",
    "step",
    "compile",
)  # of the engine, from the ground up
TORCH_FREE = (*GROUND, "core", "schedules", "viz")
STARTS_WITHOUT_TORCH = (
    "--help",
    "train --help",
    "draw --compare runs/none",
    "report runs/none",
    "report runs/none --follow",
    "--version",
    "completion bash",
)
INTERPRETERS = (
    *("core.plan", "core.verifier", "core.simulator", "core.hardware", "core.memory_model", "core.timeline"),
    "core.critical_path",
    *("core.graph", "runtime.executor", "cli.report_page"),
)

# Lines of Python that a package, or the tests, may have. A number falls with what is cut; a commit of its own
# raises one, and says what was bought. The ground is the modules of zfunc.
BUDGETS = {
    "core": 7_756,
    "schedules and ground": 1_589,
    "runtime": 3_829,
    "optim": 3_220,
    "checkpoint": 4_535,
    "engine": 12_162,
    "viz": 1_241,
    "planner": 3_775,
    "models": 7_563,
    "train": 6_961,
    "cli": 2_843,
    "tests": 56_420,
    "course": 5_357,
    "benchmarks": 6_260,
    "docs": 1_785,
}


def modules() -> dict[str, Path]:
    """Every module by its name without "zfunc."; a package by its own."""
    names: dict[str, Path] = {}
    for folder, prefix in ((ROOT / "zfunc", ()), (ROOT / "schedules", ("schedules",))):
        for path in sorted(folder.rglob("*.py")):
            name = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            names[".".join(name).removesuffix(".__init__")] = path
    del names["__init__"], names["__main__"]
    return names


MODULES = modules()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str) -> Iterator[str]:
    """Every import of a module, those inside functions too, by the name of a module or of what is in it."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # The only folder that a type checker finds elsewhere.
            base = "zfunc.schedules." if node.level else ""
            yield from (f"{base}{node.module}.{alias.name}" for alias in node.names)


@cache
def imported(module: str) -> set[str]:
    """The modules of zfunc it imports, by their names here; INDEX for the package itself."""
    names = set[str]()
    for name in imports(module):
        first, _, rest = name.partition(".")
        if first == "zfunc":
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]
            names.add(rest or INDEX)
    return names - {module}


def package(module: str) -> str:
    return module.partition(".")[0]


def test_imports_go_down_only() -> None:
    for module, target in ((m, x) for m in MODULES for x in imported(m)):
        if target == INDEX:
            assert package(module) == "cli", f"{module} imports zfunc: import the module that has the name"
        elif package(target) != package(module):
            assert ORDER.index(package(target)) < ORDER.index(package(module)), (
                f"{module} imports {target}, which is not below it: move what both need to a lower package"
            )


def test_imports_of_the_engine_go_down_only() -> None:
    arrows = [
        (m, x) for m in MODULES for x in imported(m) if m.startswith("engine.") and x.startswith("engine.")
    ]
    assert {floor for arrow in arrows for floor in map(floor_of, arrow)} == {*FLOORS}
    up = [arrow for arrow in arrows if FLOORS.index(floor_of(arrow[1])) > FLOORS.index(floor_of(arrow[0]))]
    assert not up, f"{up} import from a floor above: move what both need to the lower one"


def floor_of(module: str) -> str:
    return module.split(".")[1]


def test_the_application_imports_what_is_public() -> None:
    """`train` and `cli` are clients, as users are, of names of zfunc and of the paths that docs/design.md names."""
    page = (ROOT / "docs/design.md").read_text().partition("## What is public\n")[2].partition("\n## ")[0]
    rows = [row.partition(" |")[0] for row in page.splitlines() if row.startswith("| `")]
    paths = {path for row in rows for path in re.findall(r"`(zfunc[.a-z_]+\w*)`", row)}
    names = {f"{module}.{name}" for module, name in zfunc._homes().values()}
    names |= {"zfunc.schedules", "zfunc._version.__version__"}
    used = set[str]()
    for module in (m for m in MODULES if package(m) in ("train", "cli")):
        for name in (x for x in imports(module) if x.startswith("zfunc.")):
            way = {name, name.rpartition(".")[0]} & names  # of zfunc, or of a module such as zfunc.hf
            way |= {".".join(name.split(".")[:n]) for n in range(2, name.count(".") + 2)} & paths
            assert way or name.split(".")[1] in ("train", "cli"), (
                f"{module} imports {name}: use a name of zfunc, or a path of docs/design.md"
            )
            used |= way
    assert paths <= used, "no application needs these any more: docs/design.md names too much"


def test_only_the_command_line_names_its_flags() -> None:
    """Elsewhere help and errors have names of settings, which it shows as flags; a whole command may be quoted."""
    flags = {flag(name) for command in COMMANDS.values() for name in command.options}
    for module in (m for m in MODULES if package(m) != "cli"):
        nodes = [*ast.walk(tree(module))]
        docs = {id(x.value) for x in nodes if isinstance(x, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                said = re.sub(r"(zfunc|hf|pip) [a-z]+ [^`;,:]*", "", node.value)
                named = flags & {*re.findall(r"--[a-z][a-z-]+", said)}
                assert not named, (
                    f"{module}, line {node.lineno}: {', '.join(named)}: write `name` of the setting"
                )


def test_no_class_or_public_function_has_the_name_of_another() -> None:
    """But for stages, which have the names of their verbs."""
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in tree(module).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            if "overload" not in map(ast.unparse, node.decorator_list):
                homes.setdefault(node.name, []).append(module)
    stages = tuple(f"engine.stages.{x}stages" for x in ("", "clipping_", "move_", "update_"))
    assert not {name: x for name, x in homes.items() if len(x) > 1 and not set(x) & set(stages)}


def test_there_are_no_cycles() -> None:
    TopologicalSorter({module: imported(module) - {INDEX} for module in MODULES}).prepare()


def test_packages_keep_to_their_budgets() -> None:
    lines = dict.fromkeys(BUDGETS, 0)
    folders = ("zfunc", "schedules", "tests", "course", "benchmarks", "docs")
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        first, *inner = path.relative_to(ROOT).parts[:-1]
        name = first if first in folders[2:] else inner[0] if inner else "schedules and ground"
        lines[name] += len(path.read_text().splitlines())
    over = {name: n - BUDGETS[name] for name, n in lines.items() if n > BUDGETS[name]}
    assert not over, f"lines over their package's budget: {over}; cut something, in another commit"
    slack = {name: BUDGETS[name] - n for name, n in lines.items() if BUDGETS[name] - n > 100}
    assert not slack, f"lines that were cut: {slack}; lower the budgets by them, so that they stay cut"


@pytest.mark.parametrize("module", MODULES)
def test_no_error_spells_a_setting_by_hand(module: str) -> None:
    """Python and a command each write a setting their way, from `setting`, the names of `refuse` or backquotes; so
    no text of a module spells one. The arguments of a call, as in `AdamW(lr=...)`, are Python in either."""
    names = "|".join({name for command in COMMANDS.values() for name in command.options})
    by_hand = re.compile(rf"(?:^| |(?<=.)\()(?:{names})=(?!=)|^(?:{names}): got ")
    every = [*ast.walk(tree(module))]
    pages = {id(x.value) for x in every if isinstance(x, ast.Expr)}  # docstrings
    texts = [x for x in every if isinstance(x, ast.Constant) and type(x.value) is str and id(x) not in pages]
    by_line = {x.lineno: x.value for x in texts if by_hand.search(re.sub(r"\w+\([^()]*\)?", "", x.value))}
    assert not by_line


ROOMS = tuple(n for n in MODULES if n.startswith("engine.") and n.count(".") == 1)


@pytest.mark.parametrize("name", [n for n in (*ORDER, *ROOMS) if any(m.startswith(f"{n}.") for m in MODULES)])
def test_the_page_of_a_package_lists_its_modules(name: str) -> None:
    """In its docstring, one line a module: what there is, before how to add to it."""
    docstring = ast.get_docstring(tree(name)) or ""
    rows = [
        row.strip().partition("  ")[0].split(", ") for row in docstring.splitlines() if row.startswith("    ")
    ]
    modules = {m.removeprefix(f"{name}.").split(".")[0] for m in MODULES if m.startswith(f"{name}.")}
    assert sorted(x for row in rows for x in row) == sorted(modules)


def test_what_needs_no_torch_imports_none() -> None:
    for module in MODULES:
        if package(module) in TORCH_FREE:
            first = {name.partition(".")[0] for name in imports(module)}
            assert not first & {"torch", "functorch", "numpy"}, module


def test_they_work_where_there_is_no_torch() -> None:
    names = [f"zfunc.{m}" for m in MODULES if package(m) in TORCH_FREE]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'functorch', 'numpy')))\n"
        "from importlib import import_module\n"
        f"for name in {names}: import_module(name)\n"
        "from zfunc.cli.main import main\n"
        f"for line in {STARTS_WITHOUT_TORCH}: main(line.split())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr


def test_dynamo_is_not_imported_before_something_is_traced() -> None:
    """That takes longer than torch itself, and `zfunc --help`, `init` and `load` need none of it."""
    code = "import sys, zfunc.engine.compile, zfunc.train.loop, zfunc.cli.main"
    code += "; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def literals(module: str) -> set[str]:
    return {
        n.value for n in ast.walk(tree(module)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def test_no_interpreter_or_schedule_knows_a_verb() -> None:
    verbs = {op.verb for recipe in RECIPES.values() for spec in SPECS.values() for op in recipe(spec)}
    verbs -= {*KINDS}  # "write" is both
    assert len(verbs) >= 13
    interpreters = [m for m in MODULES if m in INTERPRETERS or package(m) in ("schedules", "viz")]
    assert {*INTERPRETERS} < {*interpreters}
    for module in interpreters:
        assert not literals(module) & verbs, (
            f"{module} tells operations apart by verb: derive it from what they touch"
        )


def test_the_tests_that_pages_and_the_makefile_name_are_there() -> None:
    pages = (ROOT / "Makefile", *(ROOT / "docs").glob("*.md"))
    named = {name for page in pages for name in re.findall(r"\btest_\w+\.py\b", page.read_text())}
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
