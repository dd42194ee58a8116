"""Imports go down only, the lower floors need no torch, and nothing that interprets a plan knows a verb."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from table import JOBS, RECIPES

ROOT = Path(__file__).parents[1]

# From the bottom up: a module imports from the floors below its own, never from its own or one above.
TORCH_FREE = (
    {"values", "_version"},
    {"layout", "graph", "errors", "lr", "topology", "rollcall", "verdict", "sinks"},
    {"moments", "loss_scale", "placement", "options"},
    {"regions", "pages", "threads", "checkpoint", "deepspeed"},
    {"emit"},
    {"recipes"},
    {"plan", "timeline", "hardware"},
    {"verify", "simulate", "memory", "faults", "profile", "legend", "critical"},
    {"schedules", "profile_file", "fitting", "chrome", "compare"},
    {"draw", "page", "recorded", "calibrated", "choices", "charts"},
    {"alternatives", "largest", "history"},
    {"search", "advice"},
    {"settings"},
    {"draw_settings"},
    {"progress", "plan_settings", "report_settings", "events"} | {"arguments", "completion"},
    {"terminal"},
    {"pictures", "report_tables"},
    {"report", "following", "sensors"},
)
INDEX = "zfunc"  # the public index, zfunc/__init__.py, by which the floors above it may call what it names
WITH_TORCH = (
    {"adam_reference", "captured", "teams", "ranks", "rendezvous", "seeds", "_cpu_adam"},
    {"compact_reference", "kernel", "launch", "resources"},
    {"checks", "export"},
    {"compact", "device_formats", "tracing"},
    {"adam", "sweeps", "passes", "segments", "state", "guard", "kv_cache"},
    {"saving", "device_adam", "purity"},
    {"stage"},
    {"updates", "execute", "bandwidth", "weights"},
    {"stages", "loading", "configured"},
    {"program"},
    {"jobs", "partial", "reading", "beginning"},
    {"compiling", "checkpointing"},
    {"task"},
    {"planner", "room"},
    {"agreement"},
    {"step"},
    {INDEX},
    {"loss"},
    {"data"},
    {"gpt", "hf", "documents", "tokenizing"},
    {"saved_datasets"},
    {"packed"},
    {"packing"},
    {"finetuning", "batches"},
    {"job", "resuming"},
    {"sketch", "train", "calibrate", "planning"},
    {"plan_report"},
    {"runs", "tracking"},
    {"console"},
    {"panel", "machine", "deepspeed_lines"},
    {"top"},
    {"devices"},
    {"doctor"},
    {"calibrate_settings"},
    {"commands"},
    {"catalogue"},
    {"cli"},
    {"__main__"},
)
FLOORS = (*TORCH_FREE, *WITH_TORCH)
FLOOR_OF = {module: n for n, modules in enumerate(FLOORS) for module in modules}
INTERPRETERS = (
    *("plan", "verify", "simulate", "hardware", "memory", "timeline", "graph", "execute"),
    *("draw", "legend", "chrome", "critical", "compare", "page", "charts", "report", "report_tables"),
)


def sources() -> Iterator[tuple[str, Path]]:
    """Every module under the name its floor lists it by; a package stands for its files."""
    for path in sorted((ROOT / "zfunc").glob("*.py")):
        if path.stem != "__init__":
            yield path.stem, path
    for package in sorted(p.parent for p in (ROOT / "zfunc").glob("*/__init__.py")):
        yield from ((package.name, path) for path in sorted(package.glob("*.py")))
    if not (ROOT / "zfunc" / "schedules").exists():
        yield from (("schedules", path) for path in sorted((ROOT / "schedules").glob("*.py")))


SOURCES = list(sources())
every_module = pytest.mark.parametrize(("module", "path"), SOURCES, ids=[f"{m}-{p.stem}" for m, p in SOURCES])


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Every import of a file, those inside functions too, as a dotted name in parts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ("zfunc",) if path.parent.name == "zfunc" else ("zfunc", path.parent.name)
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = node.module.split(".") if node.module else ()
            yield from ((*base, *module, alias.name) for alias in node.names)


def is_torch_free(module: str) -> bool:
    return FLOOR_OF.get(module, len(FLOORS)) < len(TORCH_FREE)


@every_module
def test_every_module_has_a_floor(module: str, path: Path) -> None:
    assert module in FLOOR_OF, f"{path.name} is on no floor: add it to the list in {__file__}"


@every_module
def test_imports_go_down_only(module: str, path: Path) -> None:
    for name in imports(path):
        if name[0] != "zfunc":
            continue
        target = name[1] if len(name) > 1 and name[1] in FLOOR_OF else INDEX
        if target == module and module in ("schedules", "checkpoint", "deepspeed", "hf"):
            continue
        assert FLOOR_OF[target] < FLOOR_OF.get(module, len(FLOORS)), (
            f"{path.name} imports {'.'.join(name)}, which is not below it: move what both need to a lower floor"
        )


@every_module
def test_the_lower_floors_do_not_import_torch(module: str, path: Path) -> None:
    if is_torch_free(module):
        assert not {name[0] for name in imports(path)} & {"torch", "functorch", "numpy"}


def test_the_lower_floors_work_where_there_is_no_torch() -> None:
    modules = [f"zfunc.{m}" for floor in TORCH_FREE for m in sorted(floor)]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'functorch', 'numpy')))\n"
        "from importlib import import_module\n"
        f"for name in {modules}: import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dynamo_is_not_imported_before_something_is_traced() -> None:
    """That takes longer than torch itself, and `zfunc --help`, `init` and `load` need none of it."""
    code = "import sys, zfunc.compiling, zfunc.train, zfunc.cli; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def literals(path: Path) -> set[str]:
    return {
        n.value
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


@every_module
def test_no_interpreter_or_schedule_knows_a_verb(module: str, path: Path) -> None:
    verbs = {op.verb for recipe in RECIPES.values() for job in JOBS.values() for op in recipe(job)}
    assert len(verbs) >= 13
    if module in INTERPRETERS or module == "schedules":
        assert not literals(path) & verbs, (
            f"{path.name} tells operations apart by verb: derive it from what they touch"
        )
