"""Documents out of files: a text file is one, a JSONL file has one a line, a JSON file an array of them.

A record is a text, a prompt with its completion, or a chat.

A file is read a document at a time, and nothing is skipped silently: what is not a document raises an error with
file and line, and keys of records that are not read are counted.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from zfunc.checkpoint.strict_json import unique_keys
from zfunc.train.data.chat import Chat, chat_of

LINES = (".jsonl", ".ndjson")  # a record a line
JSON = ".json"  # an array of records, or records one after another
_TEXTS = ({"text"}, {"prompt", "completion"})  # the keys of a record, without the others'
_CHATS = (  # the keys that make a record a chat, and those that it may have besides
    (("messages",), ("tools",)),
    (("conversations",), ("system", "tools")),
    (("instruction", "output"), ("input", "system")),
)
_CHUNK = 1 << 20  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
EXPECTED = "expected text, or prompt and completion, or messages, or conversations, or instruction and output"


@frozen
class Document:
    """A text to learn, after a `prompt` that is not learned."""

    text: str
    prompt: str = ""


def read_keys(names: Collection[str]) -> tuple[str, ...]:
    """The keys of a record, or columns of a table, that are read; none if it is no document.

    Chats come first: a record may have a text that somebody made of its messages.

    >>> read_keys(["id", "text"]), read_keys(["text", "messages"]), read_keys(["id"])
    (('text',), ('messages',), ())
    """
    for needed, more in _CHATS:
        if all(name in names for name in needed):
            return (*needed, *(name for name in more if name in names))
    texts = {"prompt", "completion", "text"} & set(names)
    return tuple(sorted(texts, reverse=True)) if texts in _TEXTS else ()


def holds_records(path: Path, *, named: bool) -> bool:
    """Whether a file holds records, by its name.

    A .json does if the user `named` it; in a folder, where it may be anything, if it begins with a record.
    """
    suffix = path.suffix.lower()
    return suffix in LINES or (suffix == JSON and (named or _begins_with_record(path)))


def records(path: Path, unused: Counter[str]) -> Iterator[Document | Chat]:
    """The documents of a file of records. Empty lines are skipped; keys that are not read are counted in `unused`.

    Raises OSError, and ValueError with the file and the line or the record's number.
    """
    if path.suffix.lower() == JSON:
        for number, value in enumerate(_numbered(path), 1):
            yield document_of(value, f"{path}, record {number}", unused)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield document_of(_parsed(line, where), where, unused)


def text_of_file(path: Path) -> Document | None:
    """A text file; None for a binary one (with a zero byte). Raises OSError, and ValueError unless it is UTF-8."""
    content = path.read_bytes()
    if b"\0" in content:
        return None
    try:
        return Document(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"got {path}, which is not UTF-8 at byte {error.start:,}, expected text for a tokenizer: convert it, "
            "or leave it out"
        ) from error


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(
            f"{where}: got invalid JSON ({reason}), {EXPECTED}: correct or delete the line"
        ) from error


def _numbered(path: Path) -> Iterator[Any]:
    """The values in a JSON file. Raises ValueError with the number of the first invalid one."""
    count = 0
    try:
        for value in _values(path):
            count += 1
            yield value
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(
            f"{path}, record {count + 1}: got invalid JSON ({reason}), expected an array of records, such as "
            '[{"text": "..."}]: correct it, or name it .txt if it is text to train on'
        ) from error


def _values(path: Path) -> Iterator[Any]:
    """The items of the array in a file, or the values one after another; a few are in memory at a time."""
    decode = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode
    with path.open(encoding="utf-8-sig") as file:
        text, at, first = "", 0, True

        def more() -> bool:
            """Read on; twice as much where a value does not end, so that a long one is not retried too often."""
            nonlocal text, at
            chunk = file.read(max(_CHUNK, len(text) - at))
            text, at = text[at:] + chunk, 0
            return bool(chunk)

        def peek() -> str:
            """The next character that is not white space; "" at the end."""
            nonlocal at
            while True:
                at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
                if at < len(text) or not more():
                    return text[at : at + 1]

        listed = peek() == "["
        at += listed
        while (character := peek()) and not (listed and character == "]"):
            if listed and not first:
                if character != ",":
                    raise ValueError(f"{character!r} where a comma or the end of the array should be")
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
            if not character:
                raise ValueError("the array has no end")
            at += 1
            if peek():
                raise ValueError("something after the array")


def _begins_with_record(path: Path) -> bool:
    try:
        first = next(_values(path), None)
    except (ValueError, RecursionError, OSError):
        return False
    return isinstance(first, dict) and read_keys(first) != ()


def document_of(record: Any, where: str, unused: Counter[str]) -> Document | Chat:
    """The document of a record. Raises ValueError, with `where` it is, for anything else."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {_short(record)}, {EXPECTED}: write one object a document")
    read = read_keys(record)
    if not read:
        names = ", ".join(sorted(record)) or "nothing"
        raise ValueError(f"{where}: got an object with {names:.200}, {EXPECTED}: rename its keys")
    unused.update(record.keys() - set(read))
    if {read} & {("text",), ("prompt", "completion")}:
        for name in sorted(read):
            _check_text(record[name], f"{where}, {name!r}")
        return Document(record.get("text", record.get("completion", "")), record.get("prompt", ""))
    _check_encodable(json.dumps(record, ensure_ascii=False, default=str), where)
    return chat_of(record, where)


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where}: got {_short(value)}, expected a string: put the text in quotes")
    _check_encodable(value, where)


def _check_encodable(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: got half a surrogate pair at character {error.start:,}, expected text: fix its \\u escape"
        ) from error


def _short(value: Any) -> str:
    return f"{json.dumps(value):.60}"
