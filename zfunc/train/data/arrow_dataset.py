"""Folders that Hugging Face's `datasets` wrote with `save_to_disk`, and Parquet files, as the Hub has them: their
splits, and their rows as documents.

A row is a document, or an error with file and row. Files are memory-mapped, and read a record batch at a time with
pyarrow: pip install "zfunc[datasets]". The `datasets` library itself would replace only the reading of its small
JSON files, and brings pandas; columns, splits and rows have to be checked either way.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from zfunc.models.loss_pieces import IGNORE_INDEX
from zfunc.train.data.chat import Chat
from zfunc.train.data.documents import EXPECTED, Document, document_of, read_keys

DICT, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"
TRAIN, HELD_OUT = "train", ("validation", "valid", "val", "dev", "eval", "test")
IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"
PARQUET = ".parquet"
_PARQUET_ROWS = 1024  # read at a time
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


@frozen(eq=False)
class Tokens:
    """A document that is tokenized already: `ids` [tokens], and a `loss_mask` that is false where no loss counts.

    Without a mask, the loss of every token counts.
    """

    ids: np.ndarray
    loss_mask: np.ndarray | None = None


@frozen
class SavedDataset:
    """The files of the split to train on and of the one held out (none without such a split), and the `columns`
    that are read. `notes` say what is left out.
    """

    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    columns: tuple[str, ...]
    notes: tuple[str, ...]
    held_out_split: str = ""

    @property
    def tokenized(self) -> bool:
        """Whether its rows are tokens."""
        return IDS in self.columns


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `save_to_disk` wrote, of a Dataset or a DatasetDict, or has Parquet files."""
    return (
        bool(_parquet_files(path))
        or (path / DICT).is_file()
        or ((path / STATE).is_file() and (path / INFO).is_file())
    )


def open_saved(path: Path) -> SavedDataset:
    """The files to read of a folder. Raises ValueError for other columns or splits, and for missing files."""
    parquet: dict[str, tuple[Path, ...]] = {}
    for file in _parquet_files(path):
        parquet[_split_of(file)] = (*parquet.get(_split_of(file), ()), file)
    if parquet:
        splits = [*parquet]
    else:  # the only split of a Dataset is its own folder
        splits = (
            _strings(_object(path / DICT).get("splits"), path / DICT) if (path / DICT).is_file() else [""]
        )

    def files_of(split: str) -> tuple[Path, ...]:
        return parquet[split] if parquet else _files(path / split)

    def columns_of(split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        names = _parquet_columns(parquet[split][0]) if parquet else _saved_columns(path / split)
        return _columns(path / split if not parquet else path, names)

    train = TRAIN if TRAIN in splits else splits[0] if len(splits) == 1 else None
    if train is None:
        raise ValueError(
            f"--data: got {path} with the splits {', '.join(splits) or 'none'}, expected one called {TRAIN}: name "
            f"the folder of one, such as {path / (splits[0] if splits else TRAIN)}"
        )
    held_out = next((name for name in HELD_OUT if name in splits and name != train), None)
    columns, unused = columns_of(train)
    if held_out is not None and (others := columns_of(held_out)[0]) != columns:
        raise ValueError(
            f"--data: got {path} with {', '.join(columns)} in {train} and {', '.join(others)} in {held_out}, "
            f"expected the same: name the folder {path / train}"
        )
    rest = [name for name in splits if name not in (train, held_out)]
    files = () if held_out is None else files_of(held_out)
    notes = tuple(_left_out(unused, rest))
    return SavedDataset(files_of(train), files, columns, notes, held_out or "")


def _parquet_files(path: Path) -> list[Path]:
    """A Parquet file, or those in a folder and the folders in it."""
    if path.is_file():
        return [path] if path.suffix == PARQUET else []
    return sorted(x for pattern in ("*", "*/*") for x in path.glob(pattern + PARQUET) if x.is_file())


def _split_of(file: Path) -> str:
    """The split of a file, by its name, such as train-00000-of-00002.parquet, or its folder's; else train."""
    words = (re.split(r"[-_.]", file.name)[0], file.parent.name)
    return next((x for x in words if x in (TRAIN, *HELD_OUT)), TRAIN)


def holds_tokens(path: Path) -> bool:
    """Whether `path` is a `.bin`, a folder with a `train.bin`, or a saved dataset that is tokenized."""
    if is_saved_dataset(path):
        return open_saved(path).tokenized
    return path.suffix == ".bin" or (path / "train.bin").is_file()


def _left_out(columns: tuple[str, ...], splits: list[str]) -> Iterator[str]:
    for kind, names in (("columns", columns), ("splits", splits)):
        if names:
            yield f"left out: the {kind} {', '.join(names)}"


def _saved_columns(path: Path) -> tuple[str, ...]:
    features = _object(path / INFO).get("features")
    return tuple(features) if isinstance(features, dict) else ()


def _parquet_columns(path: Path) -> tuple[str, ...]:
    pa = _pyarrow(path)
    from pyarrow import parquet

    try:
        return tuple(parquet.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: got no Parquet file ({error}), expected one: copy it again") from error


def _columns(path: Path, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that are read, of those of a Dataset, and the others."""
    read = tuple(name for name in (IDS, LABELS, MASK) if name in names) if IDS in names else read_keys(names)
    if not read:
        got = ", ".join(names) or "none"
        raise ValueError(
            f"--data: got {path} with the columns {got:.300}, {EXPECTED}, or {IDS} with or without {LABELS}: "
            "rename them with rename_column"
        )
    return read, tuple(name for name in names if name not in read)


def _files(path: Path) -> tuple[Path, ...]:
    state = _object(path / STATE)
    if state.get("_indices_data_files"):
        raise ValueError(
            f"--data: got {path}, whose rows are selected by an indices table, as old versions of datasets stored "
            "it, expected the rows alone: call flatten_indices and save it again"
        )
    listed = state.get("_data_files")
    names = [x.get("filename") if isinstance(x, dict) else None for x in listed or ()]
    files = tuple(path / Path(name).name for name in _strings(names, path / STATE))
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"--data: got {path} without {file.name}, which its {STATE} lists: copy it there"
            )
    if not files:
        raise ValueError(f"--data: got {path} without data files, expected one row at least: name other data")
    return files


# --- rows ------------------------------------------------------------------------------------------------


def rows(path: Path, columns: tuple[str, ...]) -> Iterator[Document | Chat | Tokens]:
    """The rows of one file, of which `columns` are read. Raises OSError, and ValueError with file and row."""
    number = 0
    for batch in _batches(path, columns):
        for row in _tokens(batch, path, number) if IDS in batch else _documents(batch, path, number):
            yield row
            number += 1


def _batches(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Its record batches: the Arrow arrays of `columns`, fully validated."""
    pa = _pyarrow(path)
    if path.suffix == PARQUET:
        yield from _parquet_batches(path, columns)
        return
    _check_end(path)
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                arrays = {name: batch.column(name) for name in columns}
                for column in arrays.values():
                    column.validate(full=True)
                yield arrays
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(
            f"{path}: got no complete Arrow stream with {', '.join(columns)} ({error}), expected what save_to_disk "
            "writes: save or copy it again"
        ) from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ValueError(
            f"--data: {path.parent} is a saved dataset, and reading it needs pyarrow ({error}): "
            "pip install 'zfunc[datasets]'"
        ) from error
    return pa


def _parquet_batches(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    pa = _pyarrow(path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[*columns]):
                yield {name: batch.column(name) for name in columns}
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(
            f"{path}: got no complete Parquet file with {', '.join(columns)} ({error}), expected one: copy it again"
        ) from error


def _check_end(path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - len(_END)))
        if file.read() != _END:
            raise ValueError(
                f"{path}: got {size:,} bytes without an end of stream, expected a complete file: copy it again"
            )


def _documents(batch: dict[str, Any], path: Path, first: int) -> Iterator[Document | Chat]:
    plain = {*batch} <= {"text", "prompt", "completion"}
    values = [_texts(x, name, path, first) if plain else x.to_pylist() for name, x in batch.items()]
    for number, row in enumerate(zip(*values, strict=True), first):
        record = {name: value for name, value in zip(batch, row, strict=True) if value is not None}
        yield document_of(record, f"{path}, row {number}", Counter())


def _texts(column: Any, name: str, path: Path, first: int) -> list[str]:
    if not _is_text(column.type):
        chat = "struct" in str(column.type)
        action = "make one column messages of a chat" if chat else "map it to text"
        raise ValueError(f"{path}: got {name} of type {column.type!s:.200}, expected text: {action}")
    texts = column.to_pylist()
    if None in texts:
        raise ValueError(
            f"{path}, row {first + texts.index(None)}: got no {name}, expected text: filter such rows"
        )
    return texts


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return str(kind) in ("string", "large_string", "string_view")  # pyarrow 15 has no is_string_view


def _tokens(batch: dict[str, Any], path: Path, first: int) -> Iterator[Tokens]:
    flat = {name: _numbers(column, name, path) for name, column in batch.items()}
    lengths = flat[IDS][1]
    for name, (_, other) in flat.items():
        if (bad := np.flatnonzero(other != lengths)).size:
            raise ValueError(
                f"{path}, row {first + int(bad[0])}: got {other[bad[0]]} {name} for {lengths[bad[0]]} {IDS}, "
                "expected as many: tokenize it again"
            )
    ids, ends = flat[IDS][0], np.cumsum(lengths)
    attended = flat[MASK][0] != 0 if MASK in flat else None  # padding is dropped
    loss_mask = flat[LABELS][0] != IGNORE_INDEX if LABELS in flat else None
    if loss_mask is not None and (bad := np.flatnonzero(loss_mask & (flat[LABELS][0] != ids))).size:
        row = first + int(np.searchsorted(ends, bad[0], side="right"))
        raise ValueError(
            f"{path}, row {row}: got the label {flat[LABELS][0][bad[0]]} for the token {ids[bad[0]]}, expected the "
            f"token itself, or {IGNORE_INDEX} where no loss counts: do not shift labels"
        )
    for start, end in zip(ends - lengths, ends, strict=True):
        kept = slice(start, end) if attended is None else start + np.flatnonzero(attended[start:end])
        yield Tokens(ids[kept], None if loss_mask is None else loss_mask[kept])


def _numbers(column: Any, name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of a column of lists, one after another, and the length of each list."""
    import pyarrow.compute as pc
    from pyarrow import types

    lists = types.is_list(column.type) or types.is_large_list(column.type)
    lists = lists or types.is_fixed_size_list(column.type)
    integers = lists and types.is_integer(column.type.value_type)
    values = column.flatten() if integers else None
    if values is None or column.null_count or values.null_count:
        counts = {"rows": column.null_count, "numbers": 0 if values is None else values.null_count}
        empty = " and ".join(f"{n:,} empty {kind}" for kind, n in counts.items() if n)
        raise ValueError(
            f"{path}: got {name} of type {column.type!s:.200}{empty and ' with '}{empty}, expected lists of whole "
            "numbers: tokenize it again"
        )
    return values.to_numpy(), pc.list_value_length(column).to_numpy().astype(np.int64)


# --- JSON ------------------------------------------------------------------------------------------------


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path}: got a file that cannot be read ({reason}), expected what save_to_disk writes: save it again"
        ) from error
    return content


def _strings(value: Any, path: Path) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"{path}: got {value!r:.80} for a list of names, expected what save_to_disk writes")
    return value
