"""Files: which of a folder are read, and what their names say of splits.

The regular files under a folder, sorted, so that what is read is the same on every machine; the split that a file's
name names; and which files of a folder or dataset a streamed training reads.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from glob import glob
from pathlib import Path

from zfunc.train.data.formats import LINES, holds_records, suffix_of
from zfunc.train.run_files import files_of_runs

File = tuple[str, Path]  # a name, the same on every machine, and the path on this one
PARQUET, ARROW = ".parquet", ".arrow"
TABLES = (PARQUET, ARROW)
_CACHED = "cache-*.arrow"  # what `map` and `filter` of datasets leave beside the data
TRAIN, HELD_OUT = "train", ("validation", "valid", "val", "dev", "eval", "test")
_HELD_OUT_PERCENT = 8
# Left out of the standard library: tests (half of the bytes, and many distributions ship without them), packages
# that distributions split off or newer versions dropped, and generated tables, which are not programs. The rest is
# nearly the same on every machine with the same version of Python.
_NOT_IN_STDLIB = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)


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


def split_of(name: str) -> str | None:
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


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `datasets` saved or that has Parquet files, or a Parquet or Arrow
    file."""
    if path.is_file():
        return path.suffix in TABLES
    return is_saved_to_disk(path) or any(
        next(path.glob(pattern + PARQUET), None) is not None for pattern in ("*", "*/*")
    )


def is_saved_to_disk(path: Path) -> bool:
    """Whether `path` is a folder that `save_to_disk` of a dataset wrote."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def training_split(path: Path, splits: Sequence[str]) -> str:
    """The one of the names `splits` of the dataset at `path` that is trained on. Raises ValueError if none is."""
    if TRAIN in splits or len(splits) == 1:
        return TRAIN if TRAIN in splits else splits[0]
    got = f"{path} with the splits {', '.join(splits) or 'none'}"
    raise ValueError(f"got {got}, expected one called {TRAIN}: name the folder of one")


def stream_files(path: Path) -> tuple[list[File], list[str]]:
    """The files of records to stream from `path`, sorted by name, and the names of the files left out. `path`
    is a JSONL, Parquet or Arrow file, a pattern, a folder, or a dataset by `save_to_disk`; held-out splits of
    a folder or dataset are left out. Raises ValueError if no file can be streamed."""
    if path.is_dir() and is_saved_to_disk(path):
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
        read = [x for x in read if x[1].suffix in TABLES or holds_records(x[1])] or read
        read = [x for x in read if not x[1].match(_CACHED)] or read
        read = [x for x in read if split_of(x[0]) in (TRAIN, None)] or read
    return read, [name for name, x in found if (name, x) not in read]


def _saved_files(path: Path) -> tuple[list[File], list[str]]:
    """The Arrow files of the training split of what `save_to_disk` wrote, and the names of other splits."""
    try:
        if (each := path / "dataset_dict.json").is_file():
            splits = json.loads(each.read_text())["splits"]
            train = training_split(path, splits)
            return _saved_files(path / train)[0], [x for x in splits if x != train]
        names = [x["filename"] for x in json.loads((path / "state.json").read_text())["_data_files"]]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        got = f"{path}, whose list of files cannot be read ({type(error).__name__}: {error!s:.200})"
        raise ValueError(f"got {got}, expected what save_to_disk writes: save it again") from error
    return [(x, path / x) for x in names], []
