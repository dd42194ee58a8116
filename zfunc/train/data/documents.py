"""Documents: which files data is in, and what of them is a document.

A text file is one document, a JSONL file has one a line, a JSON file an array of them. A record is a text, a prompt
with its completion, or a chat. Nothing is skipped silently: what is not a document raises an error with file and
line, and keys that are not read are counted. JSON is read by the standard library: Arrow, of which `datasets` makes
rows, would take a text like a date for a time, and give every record the keys of all others.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from zfunc.checkpoint.strict_json import unique_keys
from zfunc.train.data.chat import Chat, chat_of

Source = tuple[str, Path]  # a name, the same on every machine, and the path on this one
LINES, JSON = (".jsonl", ".ndjson"), ".json"
EXPECTED = "expected text, or prompt and completion, or messages, or conversations, or instruction and output"
_SPACE = re.compile(r"[ \t\n\r]*")
_TEXTS = ({"text"}, {"prompt", "completion"})  # the keys of a record, without the others'
_CHATS = (  # the keys that make a record a chat, and those that it may have besides
    (("messages",), ("tools",)),
    (("conversations",), ("system", "tools")),
    (("instruction", "output"), ("input", "system")),
)
_HELD_OUT_PERCENT = 8
# Left out of the standard library: tests (half of the bytes, and many distributions ship without them), packages
# that distributions split off or newer versions dropped, and generated tables, which are not programs. The rest is
# nearly the same on every machine with the same version of Python.
_NOT_IN_STDLIB = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)


@frozen
class Document:
    """A text to learn, after a `prompt` that is not learned."""

    text: str
    prompt: str = ""


@frozen(eq=False)
class Tokens:
    """A document that is tokenized already: `ids` [tokens], and `loss_mask`, false where no loss counts."""

    ids: np.ndarray
    loss_mask: np.ndarray | None = None


AnyDocument = Document | Chat | Tokens | bytes  # bytes: a text file that is trained on as it is


# --- files ------------------------------------------------------------------------------------------------


def walk(root: Path, skipped: Callable[[str], bool] = lambda part: part.startswith(".")) -> list[Source]:
    """The regular files under `root`, sorted by name. Links to files are followed, links to folders are not."""

    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [part for part in folders if not skipped(part)]
        paths += [Path(folder, part) for part in files if not skipped(part)]
    return sorted((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())


def stdlib_files() -> list[Source]:
    """The .py sources of Python's standard library, without tests, GUI, packaging tools and generated tables."""
    files = walk(Path(sysconfig.get_paths()["stdlib"]), _NOT_IN_STDLIB.__contains__)
    generated = ("_sysconfigdata", "config-")  # the build of this machine's Python
    return [(name, path) for name, path in files if name.endswith(".py") and not name.startswith(generated)]


def is_held_out(name: str) -> bool:
    """Whether a file of this relative name is held out: 8 % of names are, the same on every machine.

    >>> is_held_out("turtle.py"), is_held_out("ast.py")
    (True, False)
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_PERCENT


def unreadable(path: Path, error: OSError) -> ValueError:
    """The error for a file that the system does not let us read."""
    return ValueError(
        f"got {path}, which cannot be read ({error.strerror}); expected a readable file; "
        "change its permissions, or leave it out"
    )


def file_documents(path: Path, unused: Counter[str], *, named: bool, text: bool) -> Iterator[AnyDocument]:
    """The documents of a file; none of a binary one, which has a zero byte, unless it is of records.

    A .json holds records if the user `named` it; in a folder, where it may be anything, if it begins with one. With
    `text` a text file must be UTF-8, else it is bytes.
    """
    suffix = path.suffix.lower()
    if suffix in LINES:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield document_of(_parsed(line, where), where, unused)
    elif suffix == JSON and (named or _begins_with_record(path)):
        for number, value in enumerate(_numbered(path), 1):
            yield document_of(value, f"{path}, record {number}", unused)
    elif (content := path.read_bytes()) and b"\0" not in content:
        try:
            yield Document(content.decode()) if text else content + b"\0"
        except UnicodeDecodeError as error:
            raise ValueError(
                f"got {path}, which is not UTF-8 at byte {error.start:,}, expected text for a tokenizer: convert "
                "it, or leave it out"
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
    count = 0
    try:
        for value in _values(path):
            count += 1
            yield value
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}, record {count + 1}: got invalid JSON ({error}), expected an array of records, such as "
            '[{"text": "..."}]: correct it, or name it .txt if it is text to train on'
        ) from error


def _values(path: Path) -> Iterator[Any]:
    """The items of the array in a file, or the values one after another."""
    text = path.read_text(encoding="utf-8-sig").strip()
    if text.startswith("["):
        yield from json.loads(text, object_pairs_hook=unique_keys)
        return
    decode, at = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode, 0
    while at < len(text):
        value, at = decode(text, at)
        yield value
        at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]


def _begins_with_record(path: Path) -> bool:
    try:
        first = next(_values(path), None)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and read_keys(first) != ()


# --- records ----------------------------------------------------------------------------------------------


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


def document_of(record: Any, where: str, unused: Counter[str]) -> Document | Chat:
    """The document of a record. Raises ValueError, with `where` it is, for anything else."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {record!r:.60}, {EXPECTED}: write one object a document")
    read = read_keys(record)
    if not read:
        names = ", ".join(sorted(record)) or "nothing"
        raise ValueError(f"{where}: got an object with {names:.200}, {EXPECTED}: rename its keys")
    unused.update(record.keys() - set(read))
    try:
        json.dumps([record[name] for name in read], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: got half a surrogate pair, expected text: fix its \\u escape") from error
    if {*read} not in _TEXTS:
        return chat_of(record, where)
    for name in read:
        if not isinstance(record[name], str):
            raise ValueError(
                f"{where}, {name!r}: got {record[name]!r:.60}, expected a string: put the text in quotes"
            )
    return Document(record.get("text", record.get("completion", "")), record.get("prompt", ""))
