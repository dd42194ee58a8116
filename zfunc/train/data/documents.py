"""Documents out of files: a text file is one, a JSONL file has one a line, a JSON file an array of them.

The invariant: a file is read a document at a time, and nothing of it is passed over in silence: what is no document
is an error with file and line, and what of a record is not used is counted.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from zfunc.checkpoint.strict_json import unique_keys

LINES = (".jsonl", ".ndjson")  # a record a line
JSON = ".json"  # an array of records, or one after another
USED = frozenset({"text", "prompt", "completion"})
_RECORDS = ({"text"}, {"prompt", "completion"})  # the keys of one
_CHUNK = 1 << 20  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_EXPECTED = 'expected {"text": "..."}, or {"prompt": "...", "completion": "..."}'


@frozen
class Document:
    """A text, of which `prompt` is given and `text` is what is learned."""

    text: str
    prompt: str = ""


def holds_records(path: Path, *, named: bool) -> bool:
    """Whether a file is one of records, by its name. A .json is one if the user `named` it; in a folder, where it
    may be anything, if it begins with a record.
    """
    suffix = path.suffix.lower()
    return suffix in LINES or (suffix == JSON and (named or _begins_with_a_record(path)))


def records(path: Path, unused: Counter[str]) -> Iterator[Document]:
    """Every record of such a file. Empty lines are none; keys that are not used are counted in `unused`.

    Raises ValueError, with file and line or the record's number, for what is no record, and OSError.
    """
    if path.suffix.lower() == JSON:
        for number, told in enumerate(_numbered(path), 1):
            yield _record(told, f"{path}, record {number}", unused)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _record(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}", unused)


def text_of_file(path: Path) -> Document | None:
    """A text file; None where it is binary (with a zero byte). Raises ValueError where it is no UTF-8, OSError."""
    content = path.read_bytes()
    if b"\0" in content:
        return None
    try:
        return Document(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"got {path}, which is no UTF-8 at byte {error.start:,}, expected text for a tokenizer: convert it, or "
            "leave it out"
        ) from error


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        column = isinstance(error, json.JSONDecodeError)
        why = f"{error.msg}, column {error.colno}" if column else str(error)
        raise ValueError(f"{where}: got no JSON ({why}), {_EXPECTED}: mend or delete the line") from error


def _numbered(path: Path) -> Iterator[Any]:
    """The values in a JSON file. Raises ValueError with the number of the one that is none."""
    read = 0
    try:
        for value in _values(path):
            read += 1
            yield value
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(
            f"{path}, record {read + 1}: got no JSON ({why}), expected an array of records, such as "
            '[{"text": "..."}]: mend it, or name it .txt if it is text to train on'
        ) from error


def _values(path: Path) -> Iterator[Any]:
    """The items of the array that a file is, or its values one after another; a few are in memory at a time."""
    decode = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode
    with path.open(encoding="utf-8-sig") as file:
        text, at, first = "", 0, True

        def more() -> bool:
            """Read on; twice as much where a value does not end, so that a long one is not tried over and over."""
            nonlocal text, at
            chunk = file.read(max(_CHUNK, len(text) - at))
            text, at = text[at:] + chunk, 0
            return bool(chunk)

        def peek() -> str:
            """The next character that is no space; "" at the end."""
            nonlocal at
            while True:
                at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
                if at < len(text) or not more():
                    return text[at : at + 1]

        listed = peek() == "["
        at += listed
        while (found := peek()) and not (listed and found == "]"):
            if listed and not first:
                if found != ",":
                    raise ValueError(f"{found!r} where a comma or the end of the array should be")
                at += 1
                peek()
            while True:
                try:
                    value, end = decode(text, at)
                except json.JSONDecodeError:
                    if not more():
                        raise
                else:
                    if end < len(text) or not more():  # a number may go on
                        break
            at, first = end, False
            yield value
        if listed:
            if not found:
                raise ValueError("the array has no end")
            at += 1
            if peek():
                raise ValueError("something after the array")


def _begins_with_a_record(path: Path) -> bool:
    try:
        first = next(_values(path), None)
    except (ValueError, RecursionError, OSError):
        return False
    return isinstance(first, dict) and first.keys() & USED in _RECORDS


def _record(told: Any, where: str, unused: Counter[str]) -> Document:
    if not isinstance(told, dict):
        raise ValueError(f"{where}: got {_short(told)}, {_EXPECTED}: write an object for each document")
    given = told.keys() & USED
    if given not in _RECORDS:
        found = ", ".join(sorted(told)) or "nothing"
        raise ValueError(f"{where}: got an object with {found:.200}, {_EXPECTED}: rename its keys")
    unused.update(told.keys() - USED)
    return _document({name: told[name] for name in given}, where)


def _document(told: dict[str, Any], where: str) -> Document:
    for name in sorted(told):
        _check_text(told[name], f"{where}, {name!r}")
    return Document(told.get("text", told.get("completion", "")), told.get("prompt", ""))


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where}: got {_short(value)}, expected a string: put the text in quotes")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: got half a surrogate pair at character {error.start:,}, expected text: mend its \\u escape"
        ) from error


def _short(value: Any) -> str:
    return f"{json.dumps(value):.60}"
