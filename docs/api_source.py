"""zfunc as griffe reads it: definitions, docstrings and signatures, without importing anything of it.

The invariant: an attrs class has the parameters that its fields make, in the order in which attrs takes them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import griffe

ROOT = Path(__file__).parents[1]


def load() -> griffe.Module:
    """The package, with zfunc.schedules where it is installed."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(AttrsClasses))
    schedules, package = loader.load("schedules"), cast("griffe.Module", loader.load("zfunc"))
    loader.resolve_aliases(external=False)
    package.set_member("schedules", schedules)
    return package


def definition(package: griffe.Module, path: str) -> Any:
    """Where the name of a path such as zfunc.compile is defined."""
    x = package[path.removeprefix("zfunc.")]
    return x.final_target if x.is_alias else x


class AttrsClasses(griffe.Extension):
    """Gives an attrs class the `__init__` that its fields make, as griffe does for dataclasses."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """All modules are there, so that bases can be found."""
        for class_ in _classes(pkg):
            if _is_attrs(class_) and "__init__" not in class_.members:
                lineage = [x for x in (*reversed(class_.mro()), class_) if _is_attrs(x)]
                found = {p.name: p for x in lineage for p in _parameters(x)}
                ordered = sorted(found.values(), key=lambda p: p.kind is griffe.ParameterKind.keyword_only)
                init = griffe.Function("__init__", parameters=griffe.Parameters(*ordered), parent=class_)
                class_.set_member("__init__", init)


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from _classes(member)


def _is_attrs(class_: griffe.Class) -> bool:
    return any(d.callable_path in ("attrs.frozen", "attrs.define") for d in class_.decorators)


def _parameters(class_: griffe.Class) -> Iterator[griffe.Parameter]:
    """What `__init__` takes for the fields of one class."""
    for x in class_.members.values():
        if not isinstance(x, griffe.Attribute) or x.annotation is None or "property" in x.labels:
            continue
        given: dict[str, Any] = {"default": x.value}
        if isinstance(x.value, griffe.ExprCall) and x.value.canonical_path in ("attrs.field", "attr.field"):
            given = {a.name: a.value for a in x.value.arguments if isinstance(a, griffe.ExprKeyword)}
        if str(given.get("init")) == "False":
            continue
        default = f"{given['factory']}()" if "factory" in given else given.get("default")
        default = "..." if str(default).startswith("_") else default  # private
        named = str(given.get("kw_only")) == "True"
        kind = griffe.ParameterKind.keyword_only if named else griffe.ParameterKind.positional_or_keyword
        yield griffe.Parameter(x.name.lstrip("_"), annotation=x.annotation, kind=kind, default=default)
