"""Documents: which files and splits data is in, and what of them is a document.

A text file is one document, a JSONL file has one a line, a JSON file an array of them, a dataset, which Hugging
Face's `datasets` reads, one a row. A record is a text, a prompt with its completion, a chat, or tokens. Nothing is
skipped silently: what is not a document raises an error with file and line, and keys that are not read are counted.
JSON is read by the standard library: Arrow, of which `datasets` makes rows, would take a text like a date for a
time, and give every record the keys of all others.
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
from zfunc.models.loss_pieces import IGNORE_INDEX
from zfunc.train.data.chat import Chat, chat_of

File = tuple[str, Path]  # a name, the same on every machine, and the path on this one
PARQUET = ".parquet"
TRAIN, HELD_OUT = "train", ("validation", "valid", "val", "dev", "eval", "test")
IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"
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
    where: str = ""


AnyDocument = Document | Chat | Tokens | bytes  # bytes: a text file that is trained on as it is
Parts = Iterator[
    tuple[bool, Iterator[AnyDocument]]
]  # whether they are held out, and the documents of a file or split


@frozen(eq=False)
class DocumentSource:
    """Where documents are. `parts(counts)` has those of each file or split, those held out last, and counts what is
    left out.
    """

    files: list[File]  # which are as they were where their sizes and times are
    parts: Callable[[Counter[str]], Parts]
    at_the_end: str  # what is held out, where no part is
    held_out_split: str = ""  # of a dataset that has one
    columns: tuple[str, ...] = ()  # of a dataset, that are read
    notes: tuple[str, ...] = ()  # what is left out of a dataset

    @property
    def tokenized(self) -> bool:
        """Whether its documents are tokens."""
        return IDS in self.columns


# --- files ------------------------------------------------------------------------------------------------


def walk(root: Path, skipped: Callable[[str], bool] = lambda part: part.startswith(".")) -> list[File]:
    """The regular files under `root`, sorted by name. Links to files are followed, links to folders are not."""

    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [part for part in folders if not skipped(part)]
        paths += [Path(folder, part) for part in files if not skipped(part)]
    return sorted((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())


def stdlib_files() -> list[File]:
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


def text_files(files: list[File], *, named: bool, text: bool) -> DocumentSource:
    """Files of documents, of which a share is held out.

    A .json holds records if the user `named` it; in a folder, where it may be anything, if it begins with one. With
    `text` a text file must be UTF-8, else it is bytes.
    """

    def parts(counts: Counter[str]) -> Parts:
        for name, path in sorted(files, key=lambda x: is_held_out(x[0])):
            yield is_held_out(name), documents(path, counts)

    def documents(path: Path, counts: Counter[str]) -> Iterator[AnyDocument]:
        try:
            if not path.stat().st_size:
                counts["empty"] += 1
            elif path.suffix.lower() in LINES or (
                path.suffix.lower() == JSON and (named or _begins_with_record(path))
            ):
                yield from (document_of(value, where, counts) for where, value in _records(path))
            elif b"\0" in (content := path.read_bytes()):
                counts["binary"] += 1
            else:
                yield Document(content.decode()) if text else content + b"\0"
        except OSError as error:
            raise unreadable(path, error) from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"got {path}, which is not UTF-8 at byte {error.start:,}, expected text for a tokenizer: convert "
                "it, or leave it out"
            ) from error

    return DocumentSource(files, parts, "the end (too few files to hold whole ones out)")


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each record of a file is, and its value."""
    lines, where = path.suffix.lower() in LINES, f"{path}, record 1"
    try:
        if not lines:
            for number, value in enumerate(_values(path), 2):
                yield where, value
                where = f"{path}, record {number}"
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, json.loads(line.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        reason, do = str(error), f"{EXPECTED}: correct or delete the line"
        if lines and isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        if not lines:
            do = 'expected an array of records, such as [{"text": "..."}]: correct it, or name it .txt'
        raise ValueError(f"{where}: got invalid JSON ({reason}), {do}") from error


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


def document_of(record: Any, where: str, counts: Counter[str]) -> Document | Chat:
    """The document of a record, of which keys that are not read are counted as `unused`.

    Raises ValueError, with `where` it is, for anything else.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {record!r:.60}, {EXPECTED}: write one object a document")
    read = read_keys(record)
    if not read:
        names = ", ".join(sorted(record)) or "nothing"
        raise ValueError(f"{where}: got an object with {names:.200}, {EXPECTED}: rename its keys")
    counts["unused"] += len(record.keys() - set(read))
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


# --- datasets ---------------------------------------------------------------------------------------------


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `save_to_disk` wrote, of a Dataset or a DatasetDict, or has Parquet files."""
    if path.is_file():
        return path.suffix == PARQUET
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return saved or any(next(path.glob(pattern + PARQUET), None) is not None for pattern in ("*", "*/*"))


def holds_tokens(path: Path) -> bool:
    """Whether `path` is a `.bin`, a folder with a `train.bin`, or a saved dataset that is tokenized."""
    if is_saved_dataset(path):
        try:
            return open_saved(path).tokenized
        except ValueError as error:
            raise ValueError(f"data: {error}") from error
    return path.suffix == ".bin" or (path / "train.bin").is_file()


def open_saved(path: Path) -> DocumentSource:
    """The dataset at `path`. Raises ValueError for other columns or splits, and for what cannot be read."""
    splits = _splits(path)
    train = TRAIN if TRAIN in splits else next(iter(splits), None)
    if train is None or (train != TRAIN and len(splits) > 1):
        raise ValueError(
            f"got {path} with the splits {', '.join(splits) or 'none'}, expected one called {TRAIN}: name "
            "the folder of one"
        )
    held_out = next((name for name in HELD_OUT if name in splits and name != train), None)
    columns, unused = _columns(path, splits[train])
    if held_out is not None and (others := _columns(path, splits[held_out])[0]) != columns:
        raise ValueError(
            f"got {path} with {', '.join(columns)} in {train} and {', '.join(others)} in {held_out}, "
            "expected the same: name the one to train on"
        )
    rest = [name for name in splits if name not in (train, held_out)]
    left_out = (("columns", unused), ("splits", rest))
    notes = tuple(f"left out: the {kind} {', '.join(names)}" for kind, names in left_out if names)
    files = walk(path) if path.is_dir() else [(path.name, path)]

    def parts(_: Counter[str]) -> Parts:
        for name in (train, held_out):
            if name is not None:
                yield name == held_out, _rows(path, splits[name], columns)

    return DocumentSource(files, parts, "the end", held_out or "", columns, notes)


def _rows(path: Path, split: Any, columns: tuple[str, ...]) -> Iterator[AnyDocument]:
    """The documents of a split. Raises ValueError with the row."""
    for number, row in enumerate(_read(path, split, columns)):
        where = f"{path}, row {number}"
        given = {k: v for k, v in row.items() if v is not None}
        yield _tokens(row, where) if IDS in columns else document_of(given, where, Counter())


def _read(path: Path, split: Any, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    try:
        yield from split.select_columns([*columns])
    except Exception as error:  # of pyarrow, fsspec and datasets
        raise _not_read(path, error) from error


def _splits(path: Path) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading {path} needs datasets ({error}): pip install 'zfunc[datasets]'") from error
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # nothing is sent
    try:
        if path.is_file():
            loaded = datasets.load_dataset("parquet", data_files=str(path), streaming=True)
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), streaming=True)
    except Exception as error:  # of pyarrow, fsspec and datasets
        raise _not_read(path, error) from error
    return dict(loaded) if isinstance(loaded, dict) else {TRAIN: loaded}


def _not_read(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"got {path}, which datasets cannot read ({type(error).__name__}: {error!s:.300}), expected "
        "Parquet files or what save_to_disk writes: copy or save it again"
    )


def _columns(path: Path, split: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that are read, of those of a split, and the others."""
    names = split.column_names or next(iter(split), {}).keys()
    read = tuple(name for name in (IDS, LABELS, MASK) if name in names) if IDS in names else read_keys(names)
    if not read:
        raise ValueError(
            f"got {path} with the columns {', '.join(names) or 'none':.300}, {EXPECTED}, or {IDS} with or "
            f"without {LABELS}: rename them with rename_column"
        )
    return read, tuple(name for name in names if name not in read)


def _tokens(row: dict[str, Any], where: str) -> Tokens:
    columns = {name: _integers(value, f"{where}: got {name}") for name, value in row.items()}
    ids = columns[IDS]
    for name, numbers in columns.items():
        if len(numbers) != len(ids):
            raise ValueError(f"{where}: got {len(numbers)} {name} for {len(ids)} {IDS}, expected as many")
    loss_mask = columns[LABELS] != IGNORE_INDEX if LABELS in columns else None
    if loss_mask is not None and (bad := np.flatnonzero(loss_mask & (columns[LABELS] != ids))).size:
        raise ValueError(
            f"{where}: got the label {columns[LABELS][bad[0]]} for the token {ids[bad[0]]}, expected the token "
            f"itself, or {IGNORE_INDEX} where no loss counts: do not shift labels"
        )
    kept = columns[MASK] != 0 if MASK in columns else slice(None)  # padding is dropped
    return Tokens(ids[kept], None if loss_mask is None else loss_mask[kept], where)


def _integers(value: Any, got: str) -> np.ndarray:
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of several lengths
        numbers = np.asarray(None)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"{got} {value!r:.60}, expected a list of whole numbers: tokenize it again")
    return numbers.astype(np.int64)
