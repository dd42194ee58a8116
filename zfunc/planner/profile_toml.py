"""Profiles as TOML files: those that come with zfunc, and those that `zfunc calibrate` writes.

The invariant: a Profile that is written reads back as the same, and a file with an unknown name is refused.
"""

import json
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from attrs import asdict, fields

from zfunc.core.hardware import Measured
from zfunc.errors import did_you_mean
from zfunc.planner.profile import ORIGINS, TABLES, Figure, Profile, check_names

log = logging.getLogger("zfunc")
T = TypeVar("T")

FOLDER = Path(__file__).parent / "profiles"
TOP = ("title", "unified", "grouped", "sources", *TABLES, "shared", "measured")


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
    top = _both_ways(top)
    if "attention" not in top.get("reached", ()):
        log.info("%s: has no share of attention: that of products is taken; calibrate again", name)

    def table(where: str, given: Any, read: Callable[[str, Any], T]) -> dict[str, T]:
        found = _checked(f"{name}: [{where}]", given, dict)
        return {key: read(f"{name}: [{where}] {key}", value) for key, value in found.items()}

    shared = _checked(f"{name}: [shared]", top.get("shared", {}), dict)
    return Profile(
        name,
        title=_checked(f"{name}: title", top.get("title", name), str),
        figures={x: table(x, top[x], _figure) for x in TABLES if x in top},
        sources=table("sources", top.get("sources", {}), partial(_checked, kind=str)),
        unified=_checked(f"{name}: unified", top.get("unified", False), bool),
        grouped=_checked(f"{name}: grouped", top.get("grouped", True), bool),
        shared={resource: table(f"shared.{resource}", of, _figure) for resource, of in shared.items()},
        measured=[
            _measured(f"{name}: [[measured]] {n}", x) for n, x in enumerate(top.get("measured", []), 1)
        ],
    )


def _checked(where: str, value: Any, kind: type) -> Any:
    """The value, if it is of that kind; a float may be a whole number."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        called = {dict: "a table", str: "a text", bool: "a bool", float: "a number"}[kind]
        _refuse(where, f"{value!r}", called)
    return value


def _refuse(where: str, got: str, expected: str) -> NoReturn:
    raise ValueError(f"{where}: got {got}, expected {expected}: mend that line")


def _figure(where: str, given: Any) -> Figure:
    form = "{ value = 1e9, source = KEY }, or assumed = REASON, or measured = HOW"
    if not isinstance(given, dict) or given.keys() - {"value", "note", *ORIGINS}:
        _refuse(where, f"{given!r}", form)
    origins = [origin for origin in ORIGINS if origin in given]
    texts = [given.get(key, "") for key in (*origins, "note")]
    if len(origins) != 1 or not all(isinstance(text, str) for text in texts):
        _refuse(where, f"{given!r}", f"one origin, a text: {form}")
    return Figure(_checked(where, given.get("value"), float), origins[0], *texts)


def _measured(where: str, given: Any) -> Measured:
    known = {f.name for f in fields(Measured)}
    if not isinstance(given, dict) or given.keys() | {"attention_flops"} != known:  # which older files lack
        _refuse(where, f"{given!r}", f"{', '.join(sorted(known))}, and nothing else")
    seconds = _checked(where, given["seconds"], float)
    try:
        return Measured(**{**given, "seconds": seconds})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


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


def profile_text(profile: Profile) -> str:
    """The file of a profile; `parse_profile` reads it back."""
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: Profile) -> Iterator[str]:
    yield "# A machine's figures. A table's name is the unit of what is in it."
    yield f"title = {_quoted(profile.title)}"
    if profile.unified:
        yield "unified = true  # the device is the host"
    if not profile.grouped:
        yield "grouped = false  # keys and values are repeated for grouped queries, every expert sees every token"
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
