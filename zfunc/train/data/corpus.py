"""Corpora and batches: where tokens come from and the order in which they are trained on.

A corpus is a memory map, so the disk bounds its size and not memory. A batch is a pure function of (seed,
position): nothing is iterated, so a checkpoint needs one integer. Position counts sequences since the start of
training, not steps, so a run resumed with another batch size or number of ranks continues where it stopped.
"""

import hashlib
import math
import os
import struct
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np
import torch
from torch import Tensor

from zfunc.checkpoint.durable_files import atomic_replace
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.document_rows import DocumentRows, document_rows

__all__ = ["Corpus", "batch_at", "held_out_batches", "is_held_out", "open_corpus", "stdlib_files"]

_BYTE_VOCAB_SIZE = 256
_HELD_OUT_PERCENT = 8
_CHUNK = 1 << 20  # bytes read at a time
PRIVATE = 0o600  # of a cached copy of somebody's data
_ROUNDS = 3  # of the Feistel network; each mixes both halves
# Left out of the standard library: tests (half of the bytes, and many distributions ship without them), packages
# that distributions split off or newer versions dropped, and generated tables, which are not programs. The rest is
# nearly the same on every machine with the same version of Python.
_NOT_IN_STDLIB = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)

Source = tuple[str, Path]  # a name, the same on every machine, and the path on this one


@attrs.frozen(eq=False)
class Corpus:
    """Tokens to train on and tokens held out, both memory-mapped, and a description of what was read."""

    name: str
    train: np.ndarray  # [tokens] uint8, uint16 or uint32
    held_out: np.ndarray  # [tokens] of the same dtype
    vocab_size: int
    description: tuple[str, ...]  # lines for the log: counts, what is held out and how, what is left out
    held_out_name: str = ""  # where that is other data
    loss_mask: np.ndarray | None = None  # [tokens of `train`] uint8: 0 where no loss counts; None: all 1
    held_out_loss_mask: np.ndarray | None = None
    ends: np.ndarray | None = None  # [documents] of `train`, where each ends; None where that is not known
    held_out_ends: np.ndarray | None = None
    rows: DocumentRows | None = None  # sequences of whole documents; None: windows of the tokens
    held_out_rows: DocumentRows | None = None

    def __str__(self) -> str:
        return "\n".join(self.description)

    def sample_prompt(self, seq_length: int) -> list[int]:
        """Tokens to continue in a sample: the first prompt of the held-out data that leaves a quarter of a sequence
        free, or the end of the first one; without prompts, the beginning.
        """
        mask = None if self.held_out_loss_mask is None else self.held_out_loss_mask[:_CHUNK] != 0
        if mask is None or mask.all() or not mask.any():
            return self.held_out[: (seq_length + 1) // 2].tolist()
        before = np.append(True, mask[:-1])
        starts, ends = np.flatnonzero(before & ~mask), np.flatnonzero(~before & mask)
        prompts = [self.held_out[a:b] for a, b in zip(starts, ends, strict=False)]
        fitting = (x for x in prompts if 4 * len(x) <= 3 * seq_length)
        return next(fitting, prompts[0][-((seq_length + 1) // 2) :]).tolist()

    def of_whole_documents(self, seq_length: int) -> "Corpus":
        """With sequences of whole documents."""
        assert self.ends is not None
        assert self.held_out_ends is not None
        rows, held_out = document_rows(self.ends, seq_length), document_rows(self.held_out_ends, seq_length)
        padding = 1 - len(self.train) / (len(rows) * seq_length)
        line = f"sequences: {len(rows):,} of {seq_length} tokens, of whole documents, {padding:.0%} padding"
        return attrs.evolve(self, rows=rows, held_out_rows=held_out, description=(*self.description, line))

    def sequences_per_epoch(self, seq_length: int) -> int:
        """How many sequences there are."""
        return num_windows(len(self.train), seq_length) if self.rows is None else len(self.rows)


def open_corpus(
    path: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str],
    dtype: str = "uint16",
    vocab_size: int = 50257,
    split: bool = True,
) -> Corpus:
    """Open the data at `path`; without a path, the sources of Python's standard library.

    - A `.bin` file, or a folder with a `train.bin`: little-endian tokens, as nanoGPT writes them, mapped and not
      scanned. `dtype` is "uint16" or "uint32"; tokens are compared with `vocab_size` batch by batch. A `val.bin`
      beside `train.bin` is held out; without one, the last 10 % are.
    - Any other file: its bytes, mapped in place; the last 10 % are held out.
    - Any other folder, and the standard library: the bytes of its text files, a zero byte after each. About 8 % of
      the files are held out, by a hash of their names, or the last 10 % of the bytes where that would be under 1 %
      or over half of them. Hidden, empty and binary files (with a zero byte) are left out. The bytes are gathered
      into a file in the folder `cache` once, and again when a name, a size or a modification time changes.

    Bytes are tokens of a vocabulary of 256. Without `split`, nothing is held out but a `val.bin`.

    Raises FileNotFoundError if `path` does not exist, ValueError if it
    holds no text, is not a whole number of tokens or cannot be read.
    """
    if path is None:
        return _open_files("Python standard library", stdlib_files(), Path(cache), split)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"got {path}, which does not exist; expected a text file, a folder, or a .bin of tokens; "
            "check the path, or name none to use the Python standard library"
        )
    if path.is_dir() and not (path / "train.bin").is_file():
        return _open_files(str(path), walk(path, lambda part: part.startswith(".")), Path(cache), split)
    path = path / "train.bin" if path.is_dir() else path
    return _open_tokens(path, dtype, vocab_size, split) if path.suffix == ".bin" else _open_bytes(path, split)


def batch_at(
    tokens: np.ndarray,
    position: int,
    *,
    batch_size: int,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    loss_mask: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """The `batch_size` sequences from `position` on: inputs and targets, int64 [batch, seq].

    The target of a token that is 0 in `loss_mask` is -100. An epoch visits all non-overlapping windows once; each
    has its own order and its own offset of the windows. Rank r of n reads its part of a batch at `position + r *
    batch_size // n`. Raises ValueError for data shorter than `seq_length + 1` and for a token of `vocab_size` or
    more.

    >>> tokens = np.arange(1000, dtype=np.uint16)
    >>> inputs, targets = batch_at(tokens, 10, batch_size=4, seq_length=8, seed=0)
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([4, 8]), True)
    >>> bool((batch_at(tokens, 12, batch_size=1, seq_length=8, seed=0)[0] == inputs[2]).all())
    True
    """
    _check_request(tokens, batch_size, seq_length)
    if position < 0:
        raise ValueError(
            f"got position={position}; expected 0 or more; count sequences since the start of training"
        )
    starts = [_start(len(tokens), p, seq_length, seed) for p in range(position, position + batch_size)]
    return _read(tokens, starts, seq_length, vocab_size, loss_mask)


def held_out_batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    seq_length: int,
    limit: int,
    vocab_size: int | None = None,
    loss_mask: np.ndarray | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """At most `limit` evenly spaced windows, in batches like those of `batch_at`.

    The windows are the same for any `batch_size`, so held-out losses compare across batch sizes. The last batch may
    be smaller: weight losses by rows. Raises what `batch_at` raises.

    >>> [len(x) for x, _ in held_out_batches(np.zeros(100, np.uint8), batch_size=4, seq_length=9, limit=10)]
    [4, 4, 2]
    """
    _check_request(tokens, batch_size, seq_length)
    if limit < 1:
        raise ValueError(f"got limit={limit} windows; expected 1 or more; pass the most to read")
    windows = (len(tokens) - 1) // seq_length
    count = min(limit, windows)
    starts = [index * windows // count * seq_length for index in range(count)]
    chunks = (starts[first : first + batch_size] for first in range(0, count, batch_size))
    return (_read(tokens, chunk, seq_length, vocab_size, loss_mask) for chunk in chunks)


def stdlib_files() -> tuple[Source, ...]:
    """The .py sources of the standard library as (relative name, path), sorted by name.

    Tests, GUI and packaging tools, which are not installed everywhere, and generated tables are left out.
    """
    files = walk(Path(sysconfig.get_paths()["stdlib"]), _NOT_IN_STDLIB.__contains__)
    generated = ("_sysconfigdata", "config-")  # the build of this machine's Python
    return tuple(
        (name, path) for name, path in files if name.endswith(".py") and not name.startswith(generated)
    )


def is_held_out(name: str) -> bool:
    """Whether a file of this relative name is held out: 8 % of names are, the same on every machine.

    >>> is_held_out("turtle.py"), is_held_out("ast.py")
    (True, False)
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_PERCENT


def _open_tokens(path: Path, dtype: str, vocab_size: int, split: bool) -> Corpus:
    if dtype not in ("uint16", "uint32"):
        raise ValueError(
            f'got dtype={dtype!r}; expected "uint16" or "uint32"; pass the one {path} was written in'
        )
    little = np.dtype(dtype).newbyteorder("<")
    tokens, beside = memory_map(path, little), path.with_name("val.bin")
    if path.name == "train.bin" and beside.is_file():
        train, held_out, where = tokens, memory_map(beside, little), str(beside)
    else:
        (train, held_out), where = split_by_position(tokens, split), "the end"
    first = f"{path}: {len(train):,} {dtype} tokens to train on, vocabulary {vocab_size:,}"
    lines = (first, f"held out: {where}, {len(held_out):,} tokens")
    return Corpus(str(path), train, held_out, vocab_size, lines[: 1 + split])


def _open_bytes(path: Path, split: bool) -> Corpus:
    train, held_out = split_by_position(memory_map(path, np.dtype(np.uint8)), split)
    first = f"{path}: 1 file, {len(train) + len(held_out):,} bytes"
    lines = (first, f"held out: the end, {len(held_out):,} bytes")
    return Corpus(str(path), train, held_out, _BYTE_VOCAB_SIZE, lines[: 1 + split])


@attrs.frozen
class _Gathered:
    """The footer of a gathered file, which has the bytes to train on, then those held out."""

    num_files: int
    num_held_out: int  # 0: split by position
    num_empty: int
    num_binary: int
    num_bytes: int
    train_bytes: int


_FOOTER = struct.Struct("<6Q")


def _open_files(name: str, sources: Sequence[Source], cache: Path, split: bool) -> Corpus:
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in sources]
    key = hashlib.sha256(repr(stats).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    path = cache / f".corpus-{key}.bin"  # hidden: `cache` may lie in the folder that is read
    if not path.is_file():
        _gather(name, sources, path)
    tokens = memory_map(path, np.dtype(np.uint8))
    footer = _Gathered(*_FOOTER.unpack(tokens[-_FOOTER.size :].tobytes()))
    end = footer.train_bytes if split else footer.num_bytes
    train, held_out = tokens[:end], tokens[end : footer.num_bytes]
    by_name = f"{footer.num_held_out:,} of the files, by a hash of their names"
    where = by_name if footer.num_held_out else "the end (too few files to hold whole ones out)"
    lines = (
        f"{name}: {footer.num_files:,} files, {footer.num_bytes:,} bytes",
        *([f"held out: {where}, {len(held_out):,} bytes"] if split else []),
        f"left out: {footer.num_empty:,} empty and {footer.num_binary:,} binary files",
    )
    return Corpus(name, train, held_out, _BYTE_VOCAB_SIZE, lines)


def _gather(name: str, sources: Sequence[Source], target: Path) -> None:
    """Write the sources into one file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(target, mode=PRIVATE) as out:
        train = Counter(_append(out, path) for relative, path in sources if not is_held_out(relative))
        split = out.tell()
        held_out = Counter(_append(out, path) for relative, path in sources if is_held_out(relative))
        kinds, total, num_held_out = train + held_out, out.tell(), held_out["text"]
        if not total:
            raise ValueError(
                f"got no text in {name} ({kinds['empty']} empty and {kinds['binary']} binary files); "
                "expected at least one file of text; name another folder, or a .bin of tokens"
            )
        if not 0.01 <= (total - split) / total <= 0.5:
            split, num_held_out = total - max(1, total // 10), 0
        out.write(_FOOTER.pack(kinds["text"], num_held_out, kinds["empty"], kinds["binary"], total, split))


def _append(out: BinaryIO, path: Path) -> str:
    start = out.tell()
    try:
        with path.open("rb") as source:
            while chunk := source.read(_CHUNK):
                if b"\0" in chunk:  # binary; and zero is the separator
                    out.seek(start)
                    out.truncate()
                    return "binary"
                out.write(chunk)
    except OSError as error:
        raise unreadable(path, error) from error
    if out.tell() == start:
        return "empty"
    out.write(b"\0")
    return "text"


def walk(root: Path, skipped: Callable[[str], bool]) -> list[Source]:
    """The regular files under `root`, sorted by name. Links to files are followed, links to folders are not."""

    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [part for part in folders if not skipped(part)]
        paths += [Path(folder, part) for part in files if not skipped(part)]
    return sorted((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())


def memory_map(path: Path, dtype: "np.dtype[np.generic]") -> np.ndarray:
    try:
        size = path.stat().st_size
        if size == 0:
            raise ValueError(f"got {path}, which is empty; expected data to train on; check how it was made")
        if size % dtype.itemsize:
            raise ValueError(
                f"got {path} of {size:,} bytes; expected a multiple of {dtype.itemsize} "
                f"({dtype.name}); check that the file is complete, and the dtype it was written in"
            )
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"got {path}, which cannot be read ({error.strerror}); expected a readable file; "
        "change its permissions, or leave it out"
    )


def split_by_position(tokens: np.ndarray, split: bool) -> tuple[np.ndarray, np.ndarray]:
    end = len(tokens) - max(1, len(tokens) // 10) if split else len(tokens)
    return tokens[:end], tokens[end:]


def _check_request(tokens: np.ndarray, batch_size: int, seq_length: int) -> None:
    if batch_size < 1 or seq_length < 1:
        raise ValueError(
            f"got batch_size={batch_size}, seq_length={seq_length}; expected 1 or more of each; "
            "pass positive numbers"
        )
    if len(tokens) <= seq_length:
        raise ValueError(
            f"got {len(tokens):,} tokens for seq_length={seq_length}, expected at least {seq_length + 1:,} (inputs "
            "and targets are one apart): use more data or shorter sequences"
        )


def numbers_at(sequences: int, position: int, batch_size: int, seed: int) -> list[int]:
    """The numbers, below `sequences`, of the `batch_size` sequences from `position` on. An epoch has each once."""
    places = (divmod(p, sequences) for p in range(position, position + batch_size))
    return [_permute(index, sequences, seed, epoch) for epoch, index in places]


def num_windows(num_tokens: int, seq_length: int) -> int:
    """How many sequences `batch_at` makes of so many tokens in one epoch.

    One window fewer than fits (where two do): then every offset leaves room for the same number of windows, and the
    epoch of a position is a plain division.
    """
    return max(1, (num_tokens - seq_length) // seq_length)


def _start(num_tokens: int, position: int, seq_length: int, seed: int) -> int:
    windows = num_windows(num_tokens, seq_length)
    epoch, index = divmod(position, windows)
    room = min(seq_length, num_tokens - windows * seq_length)
    return _draw(seed, epoch) % room + _permute(index, windows, seed, epoch) * seq_length


def _permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Map range(size) onto itself: a Feistel network on a rectangle barely larger, walked until inside."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(_ROUNDS):
            row = (row + _draw(seed, epoch, turn, 0, column)) % rows
            column = (column + _draw(seed, epoch, turn, 1, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def _draw(*key: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def _read(
    tokens: np.ndarray,
    starts: Sequence[int],
    seq_length: int,
    vocab_size: int | None,
    loss_mask: np.ndarray | None,
) -> tuple[Tensor, Tensor]:
    rows = np.array([tokens[start : start + seq_length + 1] for start in starts], np.int64)
    if vocab_size is not None and rows.max() >= vocab_size:
        row, column = np.argwhere(rows >= vocab_size)[0]
        raise ValueError(
            f"got token {rows[row, column]} at position {starts[row] + column:,} of the data, expected tokens "
            f"below {vocab_size:,}: pass the --vocab-size and the --dtype that the file was written with"
        )
    block = torch.from_numpy(rows)  # [batch, seq + 1]
    inputs, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()
    if loss_mask is not None:
        kept = np.array([loss_mask[start + 1 : start + seq_length + 1] for start in starts])
        # Not in place: of one row, inputs and targets are the same memory.
        targets = targets.masked_fill(torch.from_numpy(kept == 0), IGNORE_INDEX)
    return inputs, targets
