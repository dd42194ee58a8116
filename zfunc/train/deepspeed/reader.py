"""A configuration file as users write it: JSON with comments and trailing commas, every key once.

json5 parses it. Only where a key stands twice, each place that may be it is renamed and the text parsed again, to
name the lines of both.
"""

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from attrs import frozen

LIMIT = 1 << 20  # bytes; such files have some thousand


@frozen
class ConfigSource:
    """What a file, or a dict, says: `values` by key, and the `name` that errors call it by."""

    name: str
    values: Mapping[str, Any]


class _Twice(Exception):  # noqa: N818
    """Inside a parse: a key that one object has twice, at two lines if they are known."""

    def __init__(self, key: str, lines: tuple[int, ...] = ()) -> None:
        super().__init__(key)
        self.key, self.lines = key, lines


def read_config_file(source: str | PathLike[str] | Mapping[str, Any]) -> ConfigSource:
    """The contents of a file, or of a dict that is one already.

    Raises ValueError, with the line, for what is no JSON even with comments and trailing commas, and for a key that
    an object has twice; TypeError for anything but a path or a dict.

    >>> read_config_file({"train_batch_size": 8}).values["train_batch_size"]
    8
    """
    if isinstance(source, Mapping):
        return ConfigSource("the dict", dict(source))
    if not isinstance(source, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"got a {type(source).__name__}, expected the path of a JSON file, or a dict: pass one"
        )
    path = Path(source).expanduser()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, expected a JSON file: name one that is there") from error
    if len(raw) > LIMIT:
        raise ValueError(
            f"{path}: got {len(raw):,} bytes, expected a configuration of at most {LIMIT:,}: name it"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: got bytes that are no UTF-8 text ({error}), expected JSON: name it"
        ) from error
    return ConfigSource(str(path), parse_config(text, str(path)))


def parse_config(text: str, name: str = "the text") -> dict[str, Any]:
    """The object that `text` is. Raises ValueError; see `read_config_file`.

    >>> parse_config('{"fp16": {"enabled": true,},  // as on the old cluster\\n}')
    {'fp16': {'enabled': True}}
    """
    try:
        values = _parsed(text, _unique)
    except _Twice as twice:
        lines = _lines(text, twice.key)
        where = f" on lines {lines[0]} and {lines[1]}" if lines else ""
        raise ValueError(
            f"{name}: got the key {twice.key!r} twice in one object{where}, expected it once: delete one of them"
        ) from None
    except (ValueError, RecursionError) as error:
        at = str(error).removeprefix("<string>:")  # json5 says line, what it met there, and column
        message = f"got line {at}" if at[:1].isdigit() else f"got nothing that json5 reads ({at})"
        raise ValueError(
            f"{name}: {message}, expected JSON, with // and /* */ comments and trailing commas at most: correct it"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"{name}: got a {type(values).__name__}, expected a JSON object: put it in {{ }}")
    return cast("dict[str, Any]", values)


def _parsed(text: str, hook: Any) -> Any:
    import json5

    return json5.loads(text, object_pairs_hook=hook)


def _unique(pairs: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Twice(key)
        result[key] = value
    return result


def _lines(text: str, key: str) -> tuple[int, ...]:
    """The lines of the first two places where one object has `key`, or nothing."""
    pattern = re.compile(rf"""(?P<quote>["']?)\b{re.escape(key)}\b(?P=quote)(?=\s*:)""")
    mark = "\N{INVISIBLE SEPARATOR}"

    def renamed(match: re.Match[str]) -> str:
        return f'"{key}{mark}{text.count(chr(10), 0, match.start()) + 1}"'

    def hook(pairs: Any) -> dict[str, Any]:
        lines = [int(k.partition(mark)[2]) for k, _ in pairs if k.startswith(key + mark)]
        if len(lines) > 1:
            raise _Twice(key, tuple(lines[:2]))
        return dict(pairs)

    try:
        _parsed(pattern.sub(renamed, text), hook)
    except _Twice as twice:
        return twice.lines
    except ValueError:  # the renaming hit a text that looks like a key
        return ()
    return ()
