"""Documents: what of some data is a document, and whether it is held out.

A text file is one document, a JSONL file has one a line, a dataset, which Hugging Face's `datasets` reads, one a
row. Where there are records, texts beside them describe them. Nothing is skipped silently: what is not a document
raises an error with file and line, and files and keys that are not read are named.
"""

import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from glob import glob
from itertools import chain, islice
from pathlib import Path

from attrs import frozen

from zfunc.train.data.files import (
    HELD_OUT,
    TABLES,
    TRAIN,
    File,
    is_held_out,
    is_saved_dataset,
    is_saved_to_disk,
    named,
    split_of,
    training_split,
    walk,
)
from zfunc.train.data.formats import (
    FORMATS,
    holds_records,
    is_binary,
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
from zfunc.train.data.tables import open_splits, records_in, without_nulls
from zfunc.train.run_files import files_of_runs

# Records that are looked at before a training, and their characters, in about half a second; and bytes of arrays,
# which are read whole.
_FIRST, _CHARACTERS, _WHOLE = 10_000, 1 << 24, 1 << 24
_DESCRIPTION = re.compile("README|LICEN[CS]E|dataset_info")  # of a folder as the Hub has it
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


def file_documents(files: list[File], *, text: bool, folder: bool, pairs: bool = False) -> DocumentSource:
    """The documents of one file or, if `folder`, of a folder: of its files of records, else of its text files.

    Files whose names name a split, as "validation", are held out, of texts where all names do; without such
    names, a share of the files is. With `text` a text file must be UTF-8, else its document is bytes. With
    `pairs` records are preferences, two documents each; texts are refused.
    """
    runs = files_of_runs(x for x, _ in files)
    read, records = [x for x in files if x[0] not in runs and not x[1].is_dir()], False
    splits, held_out = dict[str, str | None](), ""
    if not folder:
        records = all(suffix_of(path) in FORMATS for _, path in read)
    else:
        read, records = _of_one_kind(read)
        if records is not None:
            described = (name for name, _ in read if records or not _DESCRIPTION.match(name))
            splits = {name: split_of(name) for name in described}
            held_out = _held_out_split({*splits.values()}, records)
        read = [x for x in read if not held_out or splits.get(x[0], "") in (held_out, TRAIN, None)]

    def parts(counts: Counter[str]) -> Parts:
        apart = {name: splits[name] == held_out if held_out else is_held_out(name) for name, _ in read}
        for name, path in sorted(read, key=lambda x: apart[x[0]]):
            yield apart[name], documents(name, path, counts)

    def documents(name: str, path: Path, counts: Counter[str]) -> Iterator[Document]:
        if not path.stat().st_size:
            counts["empty"] += 1
        elif records is not False:
            for where, record in records_of(path):
                yield from record_documents(record, where, counts, pairs=pairs)
        elif pairs:
            preference_of("a text", str(path), counts)
        else:
            with opened(path) as file:
                content = file.read()
            if is_binary(content):
                counts.update(["binary", f"file {name}"])
            else:
                yield _text_of(path, content, as_text=text)

    names = [name for name, path in files if (name, path) not in read]
    return DocumentSource(read, parts, held_out, notes=(f"left out: {named(names)}",) if names else ())


def _of_one_kind(files: list[File]) -> tuple[list[File], bool | None]:
    """Those of a folder's `files` that are read, and what they hold, as `holds_records` says: records rather than
    texts, texts rather than tables of unknown keys. Records are of one format, as several may hold the same."""
    holds = {name: holds_records(path) for name, path in files}
    told = {x for name, x in holds.items() if not _DESCRIPTION.match(name)}
    kind = next((x for x in (True, False, None) if x in told), False)
    read = [x for x in files if holds[x[0]] is kind]
    if kind:
        first = min((suffix_of(path) for _, path in read), key=[*FORMATS].index)
        read = [x for x in read if suffix_of(x[1]) == first]
    return read, kind


def _held_out_split(splits: Collection[str | None], records: bool) -> str:
    """The split that is held out of the `splits` that names of files name (None: a name without one), "" if none
    is. Texts have splits only where every name has one: among others, a test is a text."""
    trained = {TRAIN, None} & {*splits} if records else TRAIN in splits and None not in splits
    return next((x for x in HELD_OUT if x in splits and trained), "")


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


def open_saved(path: Path, *, pairs: bool = False) -> DocumentSource:
    """The documents of the saved dataset at `path`; with `pairs`, two documents of each preference. Raises
    ValueError for unknown columns or splits, or damage."""
    splits = open_splits(path)
    train = training_split(path, [*splits])
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
        "files": [] if is_saved_to_disk(path) else [x for x, p in files if p.suffix not in TABLES],
    }
    notes = tuple(f"left out: the {kind} {named(names)}" for kind, names in left_out.items() if names)

    def rows(name: str, counts: Counter[str]) -> Iterator[Document]:
        features = splits[name].features or dict.fromkeys(columns)
        for number, row in enumerate(records_in(path, splits[name], columns)):
            row, where = without_nulls(row, features), f"{path}, row {number}"
            refuse_media(row, left_out["columns"], where)
            yield from record_documents(row, where, counts, RECORDS, pairs=pairs)

    def parts(counts: Counter[str]) -> Parts:
        yield from ((name == held_out, rows(name, counts)) for name in (train, held_out) if name is not None)

    files = [x for x in files if not x[1].is_dir()]
    return DocumentSource(files, parts, held_out or "", columns, notes)


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
