"""Profiles as TOML files: those that come with zfunc, and those that `zfunc calibrate` writes.

The invariant: a Profile that is written reads back as the same, and a file with an unknown name is refused.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from attrs import asdict, fields

from zfunc.core.hardware import Measured
from zfunc.errors import did_you_mean
from zfunc.planner.profile import ORIGINS, TABLES, Figure, Profile, check_names

FOLDER = Path(__file__).parent / "profiles"
TOP = ("title", "unified", "sources", *TABLES, "shared", "measured")


def profile_names() -> tuple[str, ...]:
    """The profiles that come with zfunc.

    >>> "v100-32gb" in profile_names()
    True
    """
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_profile(name: str | Path) -> Profile:
    """The profile of that name, or in a file of that path.

    Raises FileNotFoundError where there is neither, and ValueError for a file that is not a profile.

    >>> load_profile("h100").value("count", "devices")
    8
    """
    if name in profile_names():
        path = FOLDER / f"{name}.toml"
    elif not (path := Path(name)).is_file():
        similar = [known for known in profile_names() if name and known.startswith(str(name).lower())]
        hint = did_you_mean(str(name), similar or list(profile_names()))
        hint = hint or ": zfunc calibrate writes one of this machine"
        raise FileNotFoundError(
            f"hardware: got {str(name)!r}, which is no profile and no file, expected one of "
            f"{', '.join(profile_names())}, or a path{hint}"
        )
    return parse_profile(path.read_text(), str(path) if path.parent != FOLDER else path.stem)


def parse_profile(text: str, name: str) -> Profile:
    """The profile that `profile_text` wrote; `name` is its name, also in errors. Raises ValueError.

    >>> parse_profile("titel = 'mine'", "mine.toml")
    Traceback (most recent call last):
    ValueError: mine.toml: titel: got an unknown name, expected one of title, ... (did you mean 'title'?)
    """
    try:
        top = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: got {error}, expected TOML: mend that place") from error
    check_names(name, "", top, TOP)
    top, read = _both_ways(top), _Reader(name)
    return Profile(
        name,
        title=read.typed(top, "title", str, name),
        figures={table: read.figures(table, top.get(table, {})) for table in TABLES if table in top},
        sources=read.texts("sources", top.get("sources", {})),
        unified=read.typed(top, "unified", bool, False),
        shared={
            resource: read.figures(f"shared.{resource}", of)
            for resource, of in read.table("shared", top.get("shared", {})).items()
        },
        measured=read.measured(top.get("measured", [])),
    )


def _both_ways(tables: dict[str, Any]) -> dict[str, Any]:
    """`tables` of a file from before reads and writes had figures of their own: its "disk" is for both."""

    def split(table: Any) -> Any:
        if not isinstance(table, dict) or "disk" not in table:
            return table
        both = cast("dict[str, Any]", table)
        return {"read": both["disk"], "write": both["disk"], **{k: f for k, f in both.items() if k != "disk"}}

    rates = {name: split(tables[name]) for name in ("bytes_per_s", "seconds", "reached") if name in tables}
    shared = tables.get("shared", {})
    if isinstance(shared, dict):
        rates["shared"] = {resource: split(of) for resource, of in cast("dict[str, Any]", shared).items()}
    return {**tables, **rates}


class _Reader:
    """Values of the types that a Profile has, or an error with the place."""

    def __init__(self, name: str) -> None:
        self._name = name

    def typed(self, table: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
        value = table.get(key, default)
        if not isinstance(value, kind):
            self._refuse(key, f"{value!r}", f"a {kind.__name__}")
        return value

    def table(self, where: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            self._refuse(f"[{where}]", f"{given!r}", "a table")
        return given

    def texts(self, where: str, given: Any) -> dict[str, str]:
        for key, value in self.table(where, given).items():
            if not isinstance(value, str):
                self._refuse(f"[{where}] {key}", f"{value!r}", "a text")
        return given

    def figures(self, where: str, given: Any) -> dict[str, Figure]:
        return {key: self._figure(f"[{where}] {key}", of) for key, of in self.table(where, given).items()}

    def _figure(self, where: str, given: Any) -> Figure:
        form = "{ value = 1e9, source = KEY }, or assumed = REASON, or measured = HOW"
        if not isinstance(given, dict) or given.keys() - {"value", "note", *ORIGINS}:
            self._refuse(where, f"{given!r}", form)
        origins = [origin for origin in ORIGINS if origin in given]
        texts = [given.get(key, "") for key in (*origins, "note")]
        if len(origins) != 1 or not all(isinstance(text, str) for text in texts):
            self._refuse(where, f"{given!r}", f"one origin, a text: {form}")
        return Figure(self.number(where, given.get("value")), origins[0], *texts)

    def number(self, where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(where, f"{value!r}", "a number")
        return value

    def measured(self, given: Any) -> Iterator[Measured]:
        known = {f.name for f in fields(Measured)}
        for n, entry in enumerate(given, start=1):
            where = f"[[measured]] {n}"
            if not isinstance(entry, dict) or entry.keys() != known:
                self._refuse(where, f"{entry!r}", f"{', '.join(sorted(known))}, and nothing else")
            try:
                yield Measured(**{**entry, "seconds": self.number(where, entry["seconds"])})
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self._name}: {where}: {error}") from error

    def _refuse(self, where: str, got: str, expected: str) -> None:
        raise ValueError(f"{self._name}: {where}: got {got}, expected {expected}: mend that line")


def profile_text(profile: Profile) -> str:
    """The file of a profile; `parse_profile` reads it back."""
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: Profile) -> Iterator[str]:
    yield "# A machine's figures. A table's name is the unit of what is in it."
    yield f"title = {_quoted(profile.title)}"
    if profile.unified:
        yield "unified = true  # the device is the host"
    if profile.sources:
        yield from ["", "[sources]"]
        yield from (f"{_key(key)} = {_quoted(value)}" for key, value in profile.sources.items())
    for table, figures in profile.figures.items():
        yield from ["", f"[{table}]", *_figure_lines(figures)]
    for resource, shares in profile.shared.items():
        yield from ["", f"[shared.{_key(resource)}]  # what one operation takes while it runs alone"]
        yield from _figure_lines(shares)
    for entry in profile.measured:
        yield from ["", "[[measured]]"]
        yield from (f"{key} = {_plain(value)}" for key, value in asdict(entry).items())


def _figure_lines(figures: Mapping[str, Figure]) -> Iterator[str]:
    for key, f in figures.items():
        note = f", note = {_quoted(f.note)}" if f.note else ""
        yield f"{_key(key)} = {{ value = {_plain(f.value)}, {f.origin} = {_quoted(f.words)}{note} }}"


def _plain(value: str | float) -> str:
    """A value as TOML: a number in as few digits as are exact."""
    if isinstance(value, str):
        return _quoted(value)
    short = f"{value:g}"
    return short if isinstance(value, float) and "e" in short and float(short) == value else repr(value)


def _quoted(words: str) -> str:
    return json.dumps(words, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _quoted(key)
