"""Documents: which files and splits data is in, and what of them is a document.

A text file is one document, a JSONL file has one a line, a dataset, which Hugging Face's `datasets` reads, one a
row. Where there are records, texts beside them describe them. Nothing is skipped silently: what is not a document
raises an error with file and line, and files and keys that are not read are named.
"""

import hashlib
import json
import os
import re
import sysconfig
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from itertools import chain, islice
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from zfunc.errors import install
from zfunc.train.data.formats import (
    FORMATS,
    LINES,
    holds_records,
    is_packed,
    last_line,
    opened,
    records_of,
    suffix_of,
)
from zfunc.train.data.records import (
    EXPECTED,
    IDS,
    LABELS,
    PREFERENCES,
    RECORDS,
    Document,
    preference_of,
    read_keys,
    record_documents,
    refuse_media,
    refuse_preferences,
)
from zfunc.train.run_files import files_of_runs

File = tuple[str, Path]  # a name, the same on every machine, and the path on this one
PARQUET, ARROW = ".parquet", ".arrow"
TABLES = (PARQUET, ARROW)
_CACHED = "cache-*.arrow"  # what `map` and `filter` of datasets leave beside the data
TRAIN, HELD_OUT = "train", ("validation", "valid", "val", "dev", "eval", "test")
_HELD_OUT_PERCENT = 8
# Records that are looked at before a training, and their characters, in about half a second; and bytes of arrays,
# which are read whole.
_FIRST, _CHARACTERS, _WHOLE = 10_000, 1 << 24, 1 << 24
# Bytes of a column of a Parquet file that are read at once, and of its rows.
_BUFFER, _BATCH = 1 << 20, 1 << 24
_DESCRIPTION = re.compile("README|LICEN[CS]E|dataset_info")  # of a folder as the Hub has it
# Left out of the standard library: tests (half of the bytes, and many distributions ship without them), packages
# that distributions split off or newer versions dropped, and generated tables, which are not programs. The rest is
# nearly the same on every machine with the same version of Python.
_NOT_IN_STDLIB = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)


# Whether they are held out, and the documents of a file or split.
Parts = Iterator[tuple[bool, Iterator[Document]]]


@frozen(eq=False)
class DocumentSource:
    """The documents of a file, folder or dataset. `parts(counts)` yields, for each file or split, whether it is
    held out, and its documents; held-out ones come last. `counts` counts what is left out, by reason."""

    files: list[File]  # which are as they were where their sizes and times are
    parts: Callable[[Counter[str]], Parts]
    held_out_split: str = ""  # of a dataset that has one
    columns: tuple[str, ...] = ()  # of a dataset, that are read
    notes: tuple[str, ...] = ()  # what is left out of a dataset

    @property
    def tokenized(self) -> bool:
        """Whether the documents of this source are already tokens."""
        return IDS in self.columns


# --- files ------------------------------------------------------------------------------------------------


def walk(root: Path, skipped: Callable[[str], bool] = lambda part: part.startswith(".")) -> list[File]:
    """The regular files under `root`, sorted, except `skipped` names; and links to folders, which are not followed,
    to be named as left out."""

    def fail(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [part for part in folders if not skipped(part)]
        paths += [x for part in files if not skipped(part) and (x := Path(folder, part)).is_file()]
        paths += [x for part in folders if (x := Path(folder, part)).is_symlink()]
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)


def stdlib_files() -> list[File]:
    """The .py sources of Python's standard library, without tests, GUI, packaging tools and generated tables."""
    files = walk(Path(sysconfig.get_paths()["stdlib"]), _NOT_IN_STDLIB.__contains__)
    generated = ("_sysconfigdata", "config-")  # the build of this machine's Python
    return [(name, path) for name, path in files if name.endswith(".py") and not name.startswith(generated)]


def is_held_out(name: str) -> bool:
    """Whether the file with the relative name `name` is held out: 8 % of names are, the same on every machine.

    >>> is_held_out("turtle.py"), is_held_out("ast.py")
    (True, False)
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_PERCENT


def file_documents(files: list[File], *, text: bool, folder: bool, pairs: bool = False) -> DocumentSource:
    """The documents of one file or, if `folder`, of a folder: of its files of records, else of its text files.

    Files whose names name a split, as "validation", are held out, of texts where all names do; without such
    names, a share of the files is. With `text` a text file must be UTF-8, else its document is bytes. With
    `pairs` records are preferences, two documents each; texts are refused.
    """
    runs = files_of_runs(x for x, _ in files)
    own = [x for x in files if x[0] not in runs and not x[1].is_dir()]
    holds = {name: holds_records(path) if folder else suffix_of(path) in FORMATS for name, path in own}
    told = {x for name, x in holds.items() if not _DESCRIPTION.match(name)}
    kind = next((x for x in (True, False, None) if x in told), False)
    read = [x for x in own if holds[x[0]] is kind]
    splits, held_out = dict.fromkeys(holds), ""
    if folder and kind:  # one format of them, as they may be the same records in several
        first = min((suffix_of(path) for _, path in read), key=[*FORMATS].index)
        read = [x for x in read if suffix_of(x[1]) == first]
    if folder and kind is not None:
        splits = {name: _split_of(name) for name, _ in read if kind or not _DESCRIPTION.match(name)}
        told = {*splits.values()}
        # Texts have splits where all are named so: among others, a test is a text.
        whole = {TRAIN, None} & told if kind else TRAIN in told and None not in told
        held_out = next((x for x in HELD_OUT if x in told and whole), "")
        read = [x for x in read if not held_out or splits.get(x[0], "") in (held_out, TRAIN, None)]

    def parts(counts: Counter[str]) -> Parts:
        apart = {name: splits[name] == held_out if held_out else is_held_out(name) for name, _ in read}
        for name, path in sorted(read, key=lambda x: apart[x[0]]):
            yield apart[name], documents(name, path, counts)

    def documents(name: str, path: Path, counts: Counter[str]) -> Iterator[Document]:
        if not path.stat().st_size:
            counts["empty"] += 1
        elif kind is not False:
            for where, record in records_of(path):
                yield from record_documents(record, where, counts, pairs=pairs)
        elif pairs:
            preference_of("a text", str(path), counts)
        else:
            with opened(path) as file:
                content = file.read()
            if b"\0" in content or is_packed(content):
                counts.update(["binary", f"file {name}"])
            else:
                yield _text_of(path, content, as_text=text)

    names = [name for name, path in files if (name, path) not in read]
    return DocumentSource(read, parts, held_out, notes=(f"left out: {named(names)}",) if names else ())


def first_look(path: Path, *, pairs: bool = False) -> list[Document]:
    """The first documents of the records in a file, folder or dataset, and each file's last record, read
    without torch or tokenizer, so that a damaged record is reported at once. With `pairs` records are
    preferences. [] for other data.

    Raises ValueError, with file and line, for a record that is no document.
    """
    if not (path.is_file() or path.is_dir()) or (not pairs and holds_tokens(path)):
        return []
    if saved := is_saved_dataset(path):
        source = open_saved(path, pairs=pairs)
    else:
        files = walk(path) if path.is_dir() else [(path.name, path)]
        if sum(x.stat().st_size for _, x in files if suffix_of(x) == ".json") > _WHOLE:
            return []
        source = file_documents(files, text=False, folder=path.is_dir(), pairs=pairs)
        if not all(suffix_of(x) in FORMATS for _, x in source.files):
            return []
    every = chain.from_iterable(documents for _, documents in source.parts(Counter()))
    found, characters = list[Document](), 0
    for document in islice(every, _FIRST):
        found.append(document)
        if (characters := characters + len(str(document.values))) > _CHARACTERS:
            break
    ends = (last_line(x) for _, x in source.files if not saved)
    last = (record_documents(record, where, Counter(), pairs=pairs) for end in ends for where, record in end)
    return [*found, *chain.from_iterable(last)]


def _text_of(path: Path, content: bytes, *, as_text: bool) -> Document:
    if not as_text:
        return Document("bytes", content + b"\0")
    try:
        return Document("text", {"text": content.removeprefix(BOM_UTF8).decode()})
    except UnicodeDecodeError as error:
        raise ValueError(
            f"got {path}, which is not UTF-8 at byte {error.start:,}, expected text for a tokenizer: convert it, "
            "or leave it out"
        ) from error


def _split_of(name: str) -> str | None:
    """The split (train, validation, ...) whose name is a word of the file name `name`; None if there is none."""
    words = {*re.split("[^a-z]+", name.lower())}
    return next((x for x in (TRAIN, *HELD_OUT) if x in words), None)


def named(names: Iterable[str], most: int = 5) -> str:
    """The first `most` of `names` as text, and how many more there are.

    >>> named("abcdefg", most=3)
    'a, b, c and 4 more'
    """
    every = [*names]
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


# --- datasets ---------------------------------------------------------------------------------------------


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `datasets` saved or that has Parquet files, or a Parquet or Arrow
    file."""
    if path.is_file():
        return path.suffix in TABLES
    return _from_disk(path) or any(
        next(path.glob(pattern + PARQUET), None) is not None for pattern in ("*", "*/*")
    )


def _from_disk(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def holds_tokens(path: Path) -> bool:
    """Whether the data at `path` is tokens: a `.bin`, a folder with a `train.bin`, a tokenized dataset, or a
    pattern whose first file is one."""
    if not path.exists():
        named = (Path(x) for x in sorted(glob(str(path), recursive=True)) if x.endswith(TABLES))
        first = next((x for x in named if x.is_file()), None)
        return path.suffix == ".bin" if first is None else holds_tokens(first)
    if is_saved_dataset(path):
        return open_saved(path).tokenized
    return path.suffix == ".bin" or (path / "train.bin").is_file()


def open_saved(path: Path, *, pairs: bool = False) -> DocumentSource:
    """The documents of the saved dataset at `path`; with `pairs`, two documents of each preference. Raises
    ValueError for unknown columns or splits, or damage."""
    splits = _splits(path)
    train = _train_of(path, [*splits])
    names = splits[train].column_names
    kinds = PREFERENCES if pairs else RECORDS
    if pairs and not read_keys(names, kinds):
        preference_of(dict.fromkeys(names), str(path), Counter())
    if not pairs:
        refuse_preferences(next(iter(splits[train]), {}), str(path))
    if not (columns := read_keys(names, kinds)):
        raise ValueError(
            f"got {path} with the columns {', '.join(names) or 'none':.300}, {EXPECTED}, or {IDS} with or "
            f"without {LABELS}: rename them with rename_column"
        )
    held_out = next((name for name in HELD_OUT if name in splits and name != train), None)
    files = walk(path) if path.is_dir() else [(path.name, path)]
    left_out = {
        "columns": [name for name in names if name not in columns],
        "splits": [name for name in splits if name not in (train, held_out)],
        "files": [] if _from_disk(path) else [x for x, p in files if p.suffix not in TABLES],
    }
    notes = tuple(f"left out: the {kind} {named(names)}" for kind, names in left_out.items() if names)

    def rows(name: str, counts: Counter[str]) -> Iterator[Document]:
        features = splits[name].features or dict.fromkeys(columns)
        for number, row in enumerate(_each(path, splits[name], columns)):
            row, where = _without_nulls(row, features), f"{path}, row {number}"
            refuse_media(row, left_out["columns"], where)
            yield from record_documents(row, where, counts, RECORDS, pairs=pairs)

    def parts(counts: Counter[str]) -> Parts:
        yield from ((name == held_out, rows(name, counts)) for name in (train, held_out) if name is not None)

    files = [x for x in files if not x[1].is_dir()]
    return DocumentSource(files, parts, held_out or "", columns, notes)


def _train_of(path: Path, splits: Sequence[str]) -> str:
    if TRAIN in splits or len(splits) == 1:
        return TRAIN if TRAIN in splits else splits[0]
    got = f"{path} with the splits {', '.join(splits) or 'none'}"
    raise ValueError(f"got {got}, expected one called {TRAIN}: name the folder of one")


def _datasets(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading {path} needs datasets ({error}): {install('datasets')}") from error
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # nothing is sent
    return datasets


def _splits(path: Path) -> dict[str, Any]:
    datasets = _datasets(path)
    with _reading(path):
        if path.is_file():
            return {TRAIN: _TableRows.of([str(path)])}
        if _from_disk(path):
            loaded = datasets.load_from_disk(str(path))
            return dict(loaded) if isinstance(loaded, dict) else {TRAIN: loaded}
        builder = datasets.load_dataset_builder(str(path))
        if (kind := builder.info.builder_name) != "parquet":
            raise ValueError(f"it takes it for {kind} and would leave out the Parquet files")
        return {x: _TableRows.of([*files]) for x, files in builder.config.data_files.items()}


@frozen(eq=False)
class _TableRows:
    """The rows of one split of a dataset in Parquet or Arrow files, read a few at a time and without unread columns
    (`datasets` itself reads a whole group of rows, which may be a whole file)."""

    files: list[str]
    column_names: list[str]
    features: Any  # of the columns whose types `datasets` has: it has none for a map
    first: int = 0  # the row that iteration begins at, in each file

    @classmethod
    def of(cls, files: list[str]) -> "_TableRows":
        from datasets import Features
        from pyarrow import ipc, memory_map, parquet, schema

        if files[0].endswith(PARQUET):
            whole = parquet.read_schema(files[0])
        else:
            with memory_map(files[0]) as file:
                whole = ipc.open_stream(file).schema
        features = Features()
        for field in whole:
            with suppress(ValueError):
                features.update(Features.from_arrow_schema(schema([field], whole.metadata)))
        return cls(files, [*whole.names], features)

    def select_columns(self, names: list[str]) -> "_TableRows":
        if unknown := [x for x in names if x not in self.features]:
            raise ValueError(f"it has no type for the column {unknown[0]!r}")
        return evolve(self, features=type(self.features)({x: self.features[x] for x in names}))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path in self.files:
            batches = _parquet_batches if path.endswith(PARQUET) else _arrow_batches
            for batch in batches(path, [*self.features], self.first):
                yield from map(self.features.decode_example, batch.to_pylist())


def _rows_at_once(rows: int, size: int) -> int:
    return min(1024, max(1, _BATCH * rows // max(1, size)))


def _parquet_batches(path: str, columns: list[str], first: int) -> Iterator[Any]:
    """The rows of a Parquet file from row `first` on, a few in each table."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, buffer_size=_BUFFER) as file:
        groups = [*map(file.metadata.row_group, range(file.num_row_groups))]
        rows = _rows_at_once(file.metadata.num_rows, sum(x.total_byte_size for x in groups))
        whole = 0  # groups that are before `first`
        while whole < len(groups) and first >= groups[whole].num_rows:
            first, whole = first - groups[whole].num_rows, whole + 1
        left = [*range(whole, len(groups))]
        for batch in file.iter_batches(rows, row_groups=left, columns=columns):
            yield batch.slice(passed := min(first, batch.num_rows))
            first -= passed


def _arrow_batches(path: str, columns: list[str], first: int) -> Iterator[Any]:
    """The rows of an Arrow file from row `first` on, a few in each table; memory-mapped, so only rows read take
    memory."""
    from pyarrow import ipc, memory_map

    with memory_map(path) as file:
        for batch in ipc.open_stream(file):
            rows = _rows_at_once(batch.num_rows, batch.nbytes)
            passed = min(first, batch.num_rows)
            first -= passed
            for n in range(passed, batch.num_rows, rows):
                yield batch.select(columns).slice(n, rows)


def stream_files(path: Path) -> tuple[list[File], list[str]]:
    """The files of records to stream from `path`, sorted by name, and the names of the files left out. `path`
    is a JSONL, Parquet or Arrow file, a pattern, a folder, or a dataset by `save_to_disk`; held-out splits of
    a folder or dataset are left out. Raises ValueError if no file can be streamed."""
    if path.is_dir() and _from_disk(path):
        return _saved_files(path)
    names = [Path(x) for x in glob(str(path), recursive=True)]
    found = walk(path) if path.is_dir() else sorted((str(x), x) for x in names if x.is_file())
    runs = files_of_runs(x for x, _ in found)
    known = (x for x in found if suffix_of(x[1]) in LINES or x[1].suffix in TABLES)
    read = [x for x in known if x[0] not in runs and x[1].is_file()]
    if not read:
        got = f"{path}, where {named(x for x, _ in found)} is" if found else f"{path}, which names no file"
        expected = "JSONL, Parquet or Arrow files, a folder or a pattern of them"
        raise ValueError(f"got {got}, expected {expected}: correct it, or leave `stream` out")
    if path.is_dir():
        read = [x for x in read if not x[1].match(_CACHED)] or read
        read = [x for x in read if _split_of(x[0]) in (TRAIN, None)] or read
    return read, [name for name, x in found if (name, x) not in read]


def _saved_files(path: Path) -> tuple[list[File], list[str]]:
    """The Arrow files of the training split of what `save_to_disk` wrote, and the names of other splits."""
    try:
        if (each := path / "dataset_dict.json").is_file():
            splits = json.loads(each.read_text())["splits"]
            train = _train_of(path, splits)
            return _saved_files(path / train)[0], [x for x in splits if x != train]
        names = [x["filename"] for x in json.loads((path / "state.json").read_text())["_data_files"]]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        got = f"{path}, whose list of files cannot be read ({type(error).__name__}: {error!s:.200})"
        raise ValueError(f"got {got}, expected what save_to_disk writes: save it again") from error
    return [(x, path / x) for x in names], []


def table_rows(path: Path, first: int) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet or Arrow file from row `first` on, with columns that zfunc reads; few are in memory at
    once."""
    _datasets(path)
    with _reading(path):
        rows = _TableRows.of([str(path)])
    if not (columns := read_keys(rows.column_names)):
        names = ", ".join(rows.column_names)
        raise ValueError(f"got {path} with the columns {names:.300}, {EXPECTED}, or {IDS}: rename them")
    others = {*rows.column_names} - {*columns}
    for number, row in enumerate(_each(path, evolve(rows, first=first), columns), first):
        refuse_media(row, others, f"{path}, row {number}")
        yield _without_nulls(row, rows.features)


def _without_nulls(value: Any, feature: Any) -> Any:
    """`value`, a record's value, without the null keys that Arrow adds to an object because other rows of its
    column, of type `feature`, have them."""
    if isinstance(value, dict) and isinstance(feature, Mapping):  # not what is JSON, which has its own
        return {k: _without_nulls(x, feature[k]) for k, x in value.items() if x is not None}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and not hasattr(inner, "dtype"):
        return [_without_nulls(x, inner) for x in value]
    return value


def _each(path: Path, split: Any, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    with _reading(path):
        rows = split if isinstance(split, _TableRows) else split.with_format(None)
        yield from rows.select_columns([*columns])


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except Exception as error:  # of pyarrow, fsspec and datasets
        raise ValueError(
            f"got {path}, which datasets cannot read ({type(error).__name__}: {error!s:.300}), expected "
            "Parquet files or what save_to_disk writes: copy or save it again"
        ) from error
