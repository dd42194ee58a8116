"""Tables: the rows of Parquet and Arrow files, and of datasets that Hugging Face's `datasets` saved.

Rows are read a few at a time and without the columns that nothing reads, so a table's size does not bound memory.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from zfunc.errors import install
from zfunc.train.data.files import PARQUET, TRAIN, is_saved_to_disk
from zfunc.train.data.records import EXPECTED, IDS, read_keys, refuse_media

# Bytes of a column of a Parquet file that are read at once, and of its rows.
_BUFFER, _BATCH = 1 << 20, 1 << 24


def open_splits(path: Path) -> dict[str, Any]:
    """The splits of the dataset at `path` by name, of which nothing is read yet. Raises ValueError for damage."""
    datasets = _datasets(path)
    with _reading(path):
        if path.is_file():
            return {TRAIN: _TableRows.of([str(path)])}
        if is_saved_to_disk(path):
            loaded = datasets.load_from_disk(str(path))
            return dict(loaded) if isinstance(loaded, dict) else {TRAIN: loaded}
        builder = datasets.load_dataset_builder(str(path))
        if (kind := builder.info.builder_name) != "parquet":
            raise ValueError(f"it takes it for {kind} and would leave out the Parquet files")
        return {x: _TableRows.of([*files]) for x, files in builder.config.data_files.items()}


def _datasets(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading {path} needs datasets ({error}): {install('datasets')}") from error
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # nothing is sent
    return datasets


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
    for number, row in enumerate(records_in(path, evolve(rows, first=first), columns), first):
        refuse_media(row, others, f"{path}, row {number}")
        yield without_nulls(row, rows.features)


def records_in(path: Path, split: Any, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `split` of the dataset at `path` as records of `columns`. ValueError: damage."""
    with _reading(path):
        rows = split if isinstance(split, _TableRows) else split.with_format(None)
        yield from rows.select_columns([*columns])


def without_nulls(value: Any, feature: Any) -> Any:
    """`value`, a record's value, without the null keys that Arrow adds to an object because other rows of its
    column, of type `feature`, have them."""
    if isinstance(value, dict) and isinstance(feature, Mapping):  # not what is JSON, which has its own
        return {k: without_nulls(x, feature[k]) for k, x in value.items() if x is not None}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and not hasattr(inner, "dtype"):
        return [without_nulls(x, inner) for x in value]
    return value


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except Exception as error:  # of pyarrow, fsspec and datasets
        raise ValueError(
            f"got {path}, which datasets cannot read ({type(error).__name__}: {error!s:.300}), expected "
            "Parquet files or what save_to_disk writes: copy or save it again"
        ) from error
