"""Folders that Hugging Face's `datasets` wrote with `save_to_disk`, and Parquet files, as the Hub has them: which
splits and columns are read, and their rows as documents. It imports `datasets`: pip install "zfunc[datasets]".
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from zfunc.models.loss_pieces import IGNORE_INDEX
from zfunc.train.data.chat import Chat
from zfunc.train.data.documents import EXPECTED, Document, Tokens, document_of, read_keys

PARQUET = ".parquet"
TRAIN, HELD_OUT = "train", ("validation", "valid", "val", "dev", "eval", "test")
IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"


@frozen(eq=False)
class SavedDataset:
    """The split of a dataset to train on, and the one that is held out, if any; each is iterated by rows.

    Of the rows, `columns` are read; `notes` say what is left out.
    """

    path: Path
    train: Any
    held_out: Any | None
    held_out_split: str
    columns: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def tokenized(self) -> bool:
        """Whether its rows are tokens."""
        return IDS in self.columns

    def documents(self, split: Any, vocab_size: int) -> Iterator[Document | Chat | Tokens]:
        """The rows of a split. Raises ValueError with the row."""
        for number, row in enumerate(self._rows(split)):
            where = f"{self.path}, row {number}"
            if self.tokenized:
                yield _tokens(row, where, vocab_size)
            else:
                yield document_of({k: v for k, v in row.items() if v is not None}, where, Counter())

    def _rows(self, split: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from split.select_columns([*self.columns])
        except Exception as error:  # of pyarrow, fsspec and datasets
            raise _not_read(self.path, error) from error


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `save_to_disk` wrote, of a Dataset or a DatasetDict, or has Parquet files."""
    if path.is_file():
        return path.suffix == PARQUET
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return saved or any(next(path.glob(pattern + PARQUET), None) is not None for pattern in ("*", "*/*"))


def holds_tokens(path: Path) -> bool:
    """Whether `path` is a `.bin`, a folder with a `train.bin`, or a saved dataset that is tokenized."""
    if is_saved_dataset(path):
        return open_saved(path).tokenized
    return path.suffix == ".bin" or (path / "train.bin").is_file()


def open_saved(path: Path) -> SavedDataset:
    """The dataset at `path`. Raises ValueError for other columns or splits, and for what cannot be read."""
    splits = _splits(path)
    train = TRAIN if TRAIN in splits else next(iter(splits), None)
    if train is None or (train != TRAIN and len(splits) > 1):
        raise ValueError(
            f"data: got {path} with the splits {', '.join(splits) or 'none'}, expected one called {TRAIN}: name "
            "the folder of one"
        )
    held_out = next((name for name in HELD_OUT if name in splits and name != train), None)
    columns, unused = _columns(path, splits[train])
    if held_out is not None and (others := _columns(path, splits[held_out])[0]) != columns:
        raise ValueError(
            f"data: got {path} with {', '.join(columns)} in {train} and {', '.join(others)} in {held_out}, "
            "expected the same: name the one to train on"
        )
    rest = [name for name in splits if name not in (train, held_out)]
    left_out = (("columns", unused), ("splits", rest))
    notes = tuple(f"left out: the {kind} {', '.join(names)}" for kind, names in left_out if names)
    return SavedDataset(path, splits[train], splits.get(held_out), held_out or "", columns, notes)


def _splits(path: Path) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data: reading {path} needs datasets ({error}): pip install 'zfunc[datasets]'"
        ) from error
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
        f"data: got {path}, which datasets cannot read ({type(error).__name__}: {error!s:.300}), expected "
        "Parquet files or what save_to_disk writes: copy or save it again"
    )


def _columns(path: Path, split: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that are read, of those of a split, and the others."""
    names = split.column_names or next(iter(split), {}).keys()
    read = tuple(name for name in (IDS, LABELS, MASK) if name in names) if IDS in names else read_keys(names)
    if not read:
        raise ValueError(
            f"data: got {path} with the columns {', '.join(names) or 'none':.300}, {EXPECTED}, or {IDS} with or "
            f"without {LABELS}: rename them with rename_column"
        )
    return read, tuple(name for name in names if name not in read)


def _tokens(row: dict[str, Any], where: str, vocab_size: int) -> Tokens:
    columns = {name: _integers(value, f"{where}: got {name}") for name, value in row.items()}
    ids = columns[IDS]
    for name, numbers in columns.items():
        if len(numbers) != len(ids):
            raise ValueError(f"{where}: got {len(numbers)} {name} for {len(ids)} {IDS}, expected as many")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"{where}: got tokens from {ids.min()} to {ids.max()}, expected 0 or above and below {vocab_size}: "
            "pass the `vocab_size` of their tokenizer"
        )
    loss_mask = columns[LABELS] != IGNORE_INDEX if LABELS in columns else None
    if loss_mask is not None and (bad := np.flatnonzero(loss_mask & (columns[LABELS] != ids))).size:
        raise ValueError(
            f"{where}: got the label {columns[LABELS][bad[0]]} for the token {ids[bad[0]]}, expected the token "
            f"itself, or {IGNORE_INDEX} where no loss counts: do not shift labels"
        )
    kept = columns[MASK] != 0 if MASK in columns else slice(None)  # padding is dropped
    return Tokens(ids[kept], None if loss_mask is None else loss_mask[kept])


def _integers(value: Any, got: str) -> np.ndarray:
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of several lengths
        numbers = np.asarray(None)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"{got} {value!r:.60}, expected a list of whole numbers: tokenize it again")
    return numbers.astype(np.int64)
