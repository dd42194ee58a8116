"""A configuration file as users write it: JSON with comments and trailing commas, parsed by json5; no key twice."""

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from zfunc.checkpoint.strict_json import DuplicateKeyError, unique_keys

LIMIT = 1 << 20  # bytes; such files have a few thousand


@frozen
class ConfigSource:
    """A file or dict as read: its `values`, and the `name` that errors use."""

    name: str
    values: Mapping[str, Any]


def read_config_file(source: str | PathLike[str] | Mapping[str, Any]) -> ConfigSource:
    """Read a file, or take a dict as if it were one.

    Raises ValueError, with the line, for a syntax error and for a key that an object has twice; TypeError for
    anything but a path or a dict.

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
        raise ValueError(f"{path}: {error.strerror}, expected a JSON file: pass an existing one") from error
    if len(raw) > LIMIT:
        raise ValueError(
            f"{path}: got {len(raw):,} bytes, expected a configuration of at most {LIMIT:,}: pass another file"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: got bytes that are not UTF-8 ({error}), expected JSON: pass another file"
        ) from error
    return ConfigSource(str(path), parse_config(text, str(path)))


def parse_config(text: str, name: str = "the text") -> dict[str, Any]:
    """Parse a configuration. Raises ValueError, as `read_config_file` does.

    >>> parse_config('{"fp16": {"enabled": true,},  // as on the old cluster\\n}')
    {'fp16': {'enabled': True}}
    """
    duplicates: list[str] = []  # json5 turns a ValueError of its hook into a message

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return unique_keys(pairs)
        except DuplicateKeyError as error:
            duplicates.append(error.key)
            return {}

    try:
        values = _loads(text, hook)
    except (ValueError, RecursionError) as error:
        at = str(error).removeprefix("<string>:")  # json5 gives line, token and column
        message = f"got line {at}" if at[:1].isdigit() else f"got a text that json5 cannot read ({at})"
        raise ValueError(
            f"{name}: {message}, expected JSON, with // and /* */ comments and trailing commas at most: correct it"
        ) from None
    if duplicates:
        lines = _lines_of_duplicate(text, duplicates[0])
        where = f" on lines {lines[0]} and {lines[1]}" if lines else ""
        raise ValueError(
            f"{name}: got the key {duplicates[0]!r} twice in one object{where}, expected it once: delete one"
        )
    if not isinstance(values, dict):
        raise ValueError(f"{name}: got a {type(values).__name__}, expected a JSON object: put it in {{ }}")
    return cast("dict[str, Any]", values)


def _loads(text: str, hook: Any) -> Any:
    import json5

    return json5.loads(text, object_pairs_hook=hook)


def _lines_of_duplicate(text: str, key: str) -> list[int]:
    """The first two lines where one object has `key`; empty if unknown.

    Every place that may be the key gets its line appended, and the text is parsed again.
    """
    pattern = re.compile(rf"""(?P<quote>["']?)\b{re.escape(key)}\b(?P=quote)(?=\s*:)""")
    mark = "\N{INVISIBLE SEPARATOR}"
    lines: list[int] = []

    def with_line(match: re.Match[str]) -> str:
        return f'"{key}{mark}{text.count(chr(10), 0, match.start()) + 1}"'

    def hook(pairs: Any) -> dict[str, Any]:
        marked = [int(k.partition(mark)[2]) for k, _ in pairs if k.startswith(key + mark)]
        if len(marked) > 1 and not lines:
            lines.extend(marked[:2])
        return dict(pairs)

    try:
        _loads(pattern.sub(with_line, text), hook)
    except ValueError:  # inside a string the pattern was no key
        return []
    return lines
