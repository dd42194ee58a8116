"""Documents out of files: a text file is one, a JSONL file has one a line.

The invariant: a file is read a document at a time, and nothing of it is passed over in silence: what is no document
is an error with file and line, and what of a record is not used is counted.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

JSONL = ".jsonl"
USED = frozenset({"text", "prompt", "completion"})
_EXPECTED = 'expected {"text": "..."}, or {"prompt": "...", "completion": "..."}'


@frozen
class Document:
    """A text, of which `prompt` is given and `text` is what is learned."""

    text: str
    prompt: str = ""


def records(path: Path, unused: Counter[str]) -> Iterator[Document]:
    """Every record of a JSONL file. Empty lines are none; keys that are not used are counted in `unused`.

    Raises ValueError, with file and line, for a line that is no record, and OSError.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _record(line, f"{path}, line {number}", unused)


def whole(path: Path) -> Document | None:
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


def _record(line: bytes, where: str, unused: Counter[str]) -> Document:
    try:
        told = json.loads(line.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        column = isinstance(error, json.JSONDecodeError)
        why = f"{error.msg}, column {error.colno}" if column else str(error)
        raise ValueError(f"{where}: got no JSON ({why}), {_EXPECTED}: mend or delete the line") from error
    if not isinstance(told, dict):
        raise ValueError(f"{where}: got {_short(told)}, {_EXPECTED}: write an object a line")
    given = told.keys() & USED
    if given not in ({"text"}, {"prompt", "completion"}):
        found = ", ".join(sorted(told)) or "nothing"
        raise ValueError(f"{where}: got an object with {found:.200}, {_EXPECTED}: rename its keys")
    unused.update(told.keys() - USED)
    return _document({name: told[name] for name in given}, where)


def _document(told: dict[str, Any], where: str) -> Document:
    for name in sorted(told):
        _check_text(told[name], f"{where}, {name!r}")
    return Document(told.get("text", told.get("completion", "")), told.get("prompt", ""))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


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
