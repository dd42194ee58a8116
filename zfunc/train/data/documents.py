"""Documents: which files and splits data is in, and what of them is a document.

A text file is one document, a JSONL file has one a line, a dataset, which Hugging Face's `datasets` reads, one a
row. A record is a text, a prompt with its completion, a chat, or tokens. Nothing is skipped silently: what is not a
document raises an error with file and line, and keys that are not read are counted. JSONL is read by the standard
library: Arrow, of which `datasets` makes rows, would take a text like a date for a time, and give every record the
keys of all others.
"""

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from zfunc.checkpoint.strict_json import unique_keys
from zfunc.errors import install

File = tuple[str, Path]  # a name, the same on every machine, and the path on this one
PARQUET, LINES = ".parquet", (".jsonl", ".ndjson")
TRAIN, HELD_OUT = "train", ("validation", "valid", "val", "dev", "eval", "test")
IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"
RECORDS = (  # the keys that make a record a document of a kind, and those that it may have besides; the first holds
    ((IDS,), (LABELS, MASK)),
    (("messages",), ("tools",)),  # before the text that somebody made of them
    (("prompt", "completion"), ()),
    (("text",), ()),
)
EXPECTED = "expected text, or prompt and completion, or messages"
_HELD_OUT_PERCENT = 8
# Left out of the standard library: tests (half of the bytes, and many distributions ship without them), packages
# that distributions split off or newer versions dropped, and generated tables, which are not programs. The rest is
# nearly the same on every machine with the same version of Python.
_NOT_IN_STDLIB = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)


@frozen(eq=False)
class Document:
    """A document as the data has it: the values of the keys that are read; of the kind "bytes", a text file's."""

    kind: str  # the first key in RECORDS that it has, or "bytes"
    values: Any
    where: str = ""


# Whether they are held out, and the documents of a file or split.
Parts = Iterator[tuple[bool, Iterator[Document]]]


@frozen(eq=False)
class DocumentSource:
    """The documents of some data. `parts(counts)` has those of each file or split, those held out last, and counts
    what is left out.
    """

    files: list[File]  # which are as they were where their sizes and times are
    parts: Callable[[Counter[str]], Parts]
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
        raise error

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


def text_files(files: list[File], *, text: bool) -> DocumentSource:
    """Files of documents, of which a share is held out. With `text` a text file must be UTF-8, else it is bytes."""

    def parts(counts: Counter[str]) -> Parts:
        for name, path in sorted(files, key=lambda x: is_held_out(x[0])):
            yield is_held_out(name), documents(path, counts)

    def documents(path: Path, counts: Counter[str]) -> Iterator[Document]:
        if not path.stat().st_size:
            counts["empty"] += 1
        elif path.suffix.lower() in LINES:
            yield from _records(path, counts)
        elif b"\0" in (content := path.read_bytes()):
            counts["binary"] += 1
        elif not text:
            yield Document("bytes", content + b"\0")
        else:
            try:
                yield Document("text", {"text": content.decode()})
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"got {path}, which is not UTF-8 at byte {error.start:,}, expected text for a tokenizer: "
                    "convert it, or leave it out"
                ) from error

    return DocumentSource(files, parts)


def _records(path: Path, counts: Counter[str]) -> Iterator[Document]:
    """The document of each line. Raises ValueError with the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line.decode(), object_pairs_hook=unique_keys)
                if b"\\ud" in line.lower():  # half a surrogate pair cannot be encoded
                    json.dumps(record, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: got invalid JSON ({error}), {EXPECTED}: correct or delete the line"
                ) from error
            yield document_of(record, where, counts)


# --- records ----------------------------------------------------------------------------------------------


def read_keys(names: Collection[str], kinds: Any = RECORDS) -> tuple[str, ...]:
    """The keys of a record, or columns of a table, that are read; none if it is no document of these kinds.

    >>> read_keys(["id", "text"]), read_keys(["text", "messages"]), read_keys(["id"])
    (('text',), ('messages',), ())
    """
    found = ((*keys, *(x for x in more if x in names)) for keys, more in kinds if {*keys} <= {*names})
    return next(found, ())


def document_of(record: Any, where: str, counts: Counter[str], kinds: Any = RECORDS[1:]) -> Document:
    """The document of a record, of which keys that are not read are counted as `unused`.

    Raises ValueError, with `where` it is, for anything else.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {record!r:.60}, {EXPECTED}: write one object a document")
    if not (read := read_keys(record, kinds)):
        names = ", ".join(sorted(record)) or "nothing"
        raise ValueError(f"{where}: got an object with {names:.200}, {EXPECTED}: rename its keys")
    counts["unused"] += len(record.keys() - set(read))
    return Document(read[0], {name: record[name] for name in read}, where)


# --- datasets ---------------------------------------------------------------------------------------------


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `save_to_disk` wrote, of a Dataset or a DatasetDict, or has Parquet files."""
    if path.is_file():
        return path.suffix == PARQUET
    return _from_disk(path) or any(
        next(path.glob(pattern + PARQUET), None) is not None for pattern in ("*", "*/*")
    )


def _from_disk(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def holds_tokens(path: Path) -> bool:
    """Whether `path` is a `.bin`, a folder with a `train.bin`, or a saved dataset that is tokenized."""
    if is_saved_dataset(path):
        return open_saved(path).tokenized
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
    names = splits[train].column_names or next(iter(splits[train]), {}).keys()
    if not (columns := read_keys(names)):
        raise ValueError(
            f"got {path} with the columns {', '.join(names) or 'none':.300}, {EXPECTED}, or {IDS} with or "
            f"without {LABELS}: rename them with rename_column"
        )
    held_out = next((name for name in HELD_OUT if name in splits and name != train), None)
    left_out = {
        "columns": [name for name in names if name not in columns],
        "splits": [name for name in splits if name not in (train, held_out)],
    }
    notes = tuple(f"left out: the {kind} {', '.join(names)}" for kind, names in left_out.items() if names)

    def rows(name: str) -> Iterator[Document]:
        for number, row in enumerate(_each(path, splits[name], columns)):
            given = {k: v for k, v in row.items() if v is not None}
            yield document_of(given, f"{path}, row {number}", Counter(), RECORDS)

    def parts(_: Counter[str]) -> Parts:
        yield from ((name == held_out, rows(name)) for name in (train, held_out) if name is not None)

    files = walk(path) if path.is_dir() else [(path.name, path)]
    return DocumentSource(files, parts, held_out or "", columns, notes)


def _splits(path: Path) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading {path} needs datasets ({error}): {install('datasets')}") from error
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # nothing is sent
    with _reading(path):
        if path.is_file():
            loaded = datasets.load_dataset("parquet", data_files=str(path), streaming=True)
        elif _from_disk(path):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), streaming=True)
    return dict(loaded) if isinstance(loaded, dict) else {TRAIN: loaded}


def _each(path: Path, split: Any, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    with _reading(path):
        yield from split.with_format(None).select_columns([*columns])


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except Exception as error:  # of pyarrow, fsspec and datasets
        raise ValueError(
            f"got {path}, which datasets cannot read ({type(error).__name__}: {error!s:.300}), expected "
            "Parquet files or what save_to_disk writes: copy or save it again"
        ) from error
