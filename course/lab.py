"""Finds a lab by its number, its laws, and the functions of a student's adapters file."""

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from attrs import frozen

from course.law import Law, Student
from zfunc.errors import refuse

LABS = Path(__file__).parent / "labs"


@frozen
class Lab:
    """A lab: its number, title, folder and laws; `not_imported` are packages that its adapters may not import."""

    number: int
    title: str
    folder: Path
    laws: tuple[Law, ...]
    not_imported: tuple[str, ...]

    @property
    def points(self) -> int:
        """The points of all laws together."""
        return sum(law.points for law in self.laws)


def numbers() -> list[int]:
    """The numbers of all labs that exist."""
    return sorted(int(folder.name[:2]) for folder in LABS.iterdir() if folder.name[:2].isdigit())


def load_lab(number: int) -> Lab:
    """Load lab `number`. Raises SettingError if no lab has this number."""
    found = sorted(LABS.glob(f"{number:02}_*"))
    if not found:
        refuse("lab", str(number), f"one of {', '.join(map(str, numbers()))}")
    module = load(found[0] / "laws.py", f"course_lab_{number}")
    laws = tuple(value for value in vars(module).values() if isinstance(value, Law))
    return Lab(number, module.TITLE, found[0], laws, module.NOT_IMPORTED)


def load_student(path: Path, lab: Lab) -> Student:
    """The functions that the file `path` defines. Raises its own errors, and ImportError by
    `check_imports`."""
    check_imports(path, lab)
    sys.path.insert(0, str(path.parent))  # so it may import files beside it
    return Student(load(path, "adapters"), path)


def check_imports(path: Path, lab: Lab) -> None:
    """Raise ImportError if the file `path` imports a package that the lab forbids."""
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in [of + x.name for x in node.names]:
            if any(f"{name}.".startswith(f"{x}.") for x in lab.not_imported):
                raise ImportError(
                    f"line {node.lineno} imports {name}: in this lab you write what it has, so do without it"
                )


def load(path: Path, name: str) -> ModuleType:
    """Load file `path` as a module called `name`; the file's own name need not be an identifier."""
    spec = spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
