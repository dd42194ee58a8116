"""Documents packed into one file: tokens one after another with an end token after each, and their loss mask.

The file is mapped, so a batch of it is a pure function of seed and position, as of any other data
(`zfunc.train.data.corpus`), however many documents there are; at most a few are in memory while it is written. It
is written once, and again when a document's file, the tokenizer or the form of the file has changed.
"""

import hashlib
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from attrs import define, field, frozen

from zfunc.checkpoint.durable_files import atomic_replace
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.arrow_dataset import SavedDataset, Tokens, is_saved_dataset, open_saved, rows
from zfunc.train.data.corpus import (
    PRIVATE,
    Corpus,
    Source,
    is_held_out,
    memory_map,
    open_corpus,
    stdlib_files,
    unreadable,
    walk,
)
from zfunc.train.data.documents import Document, holds_records, records, text_of_file
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary

FORM = 2  # of the file, and of what is read as records
_AT_ONCE = 64  # documents that are tokenized together
_CHUNK = 1 << 20  # tokens
_FOOTER = struct.Struct("<8Q")


@frozen
class Reading:
    """How sources are read: their `documents`, and which are `held_out`, by name.

    `vocabulary` is that of their tokens, a tokenizer where there is text. `splits`: the data says itself what is
    held out. Else it is the end, where those files are too few or too many.
    """

    vocabulary: Vocabulary
    documents: Callable[[Path, Counter[str]], Iterator[Document | Tokens]]
    held_out: Callable[[str], bool]
    splits: bool = False


@frozen
class PackedTokens:
    """The footer of a packed file: first its tokens, those held out last; then, if there are pairs, a byte for each
    token, 1 where it is learned.
    """

    files: int
    held_out_files: int  # 0: split by documents
    left_out: int  # empty and binary files
    documents: int
    pairs: int
    unused: int  # keys of records, counted where they are
    tokens: int
    train: int

    @classmethod
    def of(cls, content: np.ndarray) -> "PackedTokens":
        """That at the end of a file, [bytes]."""
        return cls(*_FOOTER.unpack(content[-_FOOTER.size :].tobytes()))


def open_data(
    path: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    dtype: str = "uint16",
    vocab_size: int = 50257,
) -> Corpus:
    """Open what is at `path` for training: what `zfunc.train.data.corpus.open_corpus` takes, and JSONL or a folder
    that `datasets.save_to_disk` wrote, with a tokenizer or as bytes.

    - A `.jsonl` or `.ndjson` file has a document a line: `{"text": ...}`, or `{"prompt": ..., "completion": ...}`,
      joined as they are. Of a prompt no token is learned: its labels are -100. A `.json` has an array of such
      records, or one after another. A folder may have such files and text files; a `.json` in it that does not
      begin with a record is text.
    - With a `tokenizer`, text files and records are its tokens; a text file is one document, in UTF-8. A `.bin`
      has tokens already and takes none.
    - A saved dataset has the columns of JSONL; or `input_ids`, tokens below `vocab_size`, as they are, but for
      those where `attention_mask` is 0; `labels` are the same tokens, or -100 where they are not learned. Of a
      DatasetDict the split train is read, and its validation or test is held out.

    Documents follow one another in the order of the files, with the tokenizer's end token after each (zero, for
    bytes), and are cut into sequences wherever those end. Held out are whole files, about 8 %, where that leaves
    neither under 1 % nor over half of the tokens; else whole documents at the end, about 10 %.

    Raises ValueError, with file and line, for what is no document, and as `open_corpus` does.
    """
    path = None if path is None else Path(path)
    saved = open_saved(path) if path is not None and is_saved_dataset(path) else None
    tokens = path is not None and (holds_tokens(path) if saved is None else saved.tokens)
    if tokens and tokenizer is not None:
        raise ValueError(
            f"--tokenizer: got it for {path}, which holds tokens, expected text or JSONL: leave it out"
        )
    if saved is not None:
        below = Vocabulary(f"below {vocab_size}", vocab_size)
        reading = _reading_rows(below if saved.tokens else tokenizer or BYTES, saved)
        return _open(str(path), _rows_of(saved), Path(cache), reading, saved)
    if tokens or (path is not None and not path.exists()):
        return open_corpus(path, cache=cache, dtype=dtype, vocab_size=vocab_size)
    sources = _sources(path)
    named = path is not None and path.is_file()
    if tokenizer is None and not any(holds_records(file, named=named) for _, file in sources):
        return open_corpus(path, cache=cache, dtype=dtype, vocab_size=vocab_size)
    name = "Python standard library" if path is None else str(path)
    read = partial(_documents, named=named)
    return _open(name, sources, Path(cache), Reading(tokenizer or BYTES, read, is_held_out))


def holds_tokens(path: Path) -> bool:
    """Whether `path` is a `.bin`, a folder with a `train.bin`, or a saved dataset that is tokenized."""
    if is_saved_dataset(path):
        return open_saved(path).tokens
    return path.suffix == ".bin" or (path / "train.bin").is_file()


def _sources(path: Path | None) -> list[Source]:
    if path is None:
        return list(stdlib_files())
    return walk(path, lambda part: part.startswith(".")) if path.is_dir() else [(path.name, path)]


def _rows_of(saved: SavedDataset) -> list[Source]:
    return [(f"{path.parent.name}/{path.name}", path) for path in (*saved.train, *saved.held_out)]


def _reading_rows(vocabulary: Vocabulary, saved: SavedDataset) -> Reading:
    held_out = {path.parent.name for path in saved.held_out}
    read = partial(_rows, columns=saved.columns, vocab_size=vocabulary.vocab_size)
    return Reading(vocabulary, read, lambda name: name.partition("/")[0] in held_out, bool(held_out))


def _documents(path: Path, unused: Counter[str], named: bool) -> Iterator[Document]:
    if holds_records(path, named=named):
        yield from records(path, unused)
    elif (one := text_of_file(path)) is not None:
        yield one


def _rows(
    path: Path, _: Counter[str], columns: tuple[str, ...], vocab_size: int
) -> Iterator[Document | Tokens]:
    for number, row in enumerate(rows(path, columns)):
        if isinstance(row, Tokens) and len(row.ids) and not 0 <= row.ids.min() <= row.ids.max() < vocab_size:
            raise ValueError(
                f"{path}, row {number}: got tokens from {row.ids.min()} to {row.ids.max()}, expected 0 or above "
                f"and below {vocab_size}: pass the --vocab-size of their tokenizer"
            )
        yield row


def _open(
    name: str, sources: list[Source], cache: Path, reading: Reading, saved: SavedDataset | None = None
) -> Corpus:
    vocabulary = reading.vocabulary
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in sources]
    read_as = () if saved is None else (saved.columns, len(saved.held_out))
    key = hashlib.sha256(repr((FORM, vocabulary.digest, stats, *read_as)).encode("utf-8", "surrogateescape"))
    path = cache / f".packed-{key.hexdigest()[:16]}.bin"  # hidden: `cache` may lie in the folder that is read
    if not path.is_file():
        pack_documents(name, sources, path, reading)
    content = memory_map(path, np.dtype(np.uint8))
    packed = PackedTokens.of(content)
    size = vocabulary.dtype.itemsize * packed.tokens
    tokens = content[:size].view(vocabulary.dtype)
    loss_mask = content[size : size + packed.tokens] if packed.pairs else None
    return Corpus(
        name,
        tokens[: packed.train],
        tokens[packed.train :],
        vocabulary.vocab_size,
        tuple(_lines(name, packed, vocabulary, loss_mask, saved)),
        None if loss_mask is None else loss_mask[: packed.train],
        None if loss_mask is None else loss_mask[packed.train :],
    )


def _lines(
    name: str,
    packed: PackedTokens,
    vocabulary: Vocabulary,
    loss_mask: np.ndarray | None,
    saved: SavedDataset | None,
) -> Iterator[str]:
    unit = "bytes" if vocabulary is BYTES else "tokens"
    yield f"{name}: {packed.files:,} files, {packed.documents:,} documents, {packed.tokens:,} {unit}"
    if not isinstance(vocabulary, Tokenizer):
        yield f"tokens as they are, below {vocabulary.vocab_size:,}; nothing is put between documents"
    elif vocabulary is not BYTES:
        yield f"tokenizer: {vocabulary.name}, vocabulary {vocabulary.vocab_size:,}, end token {vocabulary.end}"
    if loss_mask is not None:
        count = f"{np.count_nonzero(loss_mask):,} {unit}"
        of_ids = f"the labels of the others, in {packed.pairs:,} documents, are {IGNORE_INDEX}"
        pairs = f"completions and texts; the prompts of {packed.pairs:,} are given"
        yield f"learned: {count}, {of_ids if saved is not None and saved.tokens else pairs}"
    how = f"{packed.held_out_files:,} of the files, by a hash of their names"
    if saved is not None:
        how = f"the split {saved.held_out[0].parent.name}" if saved.held_out else "the end"
    elif not packed.held_out_files:
        how = "the end (too few files to hold whole ones out)"
    yield f"held out: {how}, {packed.tokens - packed.train:,} {unit}"
    if packed.left_out:
        yield f"left out: {packed.left_out:,} empty or binary files"
    if packed.unused:
        yield f"left out: {packed.unused:,} keys of records that are neither text, nor prompt and completion"
    yield from () if saved is None else saved.lines


# --- the file ---------------------------------------------------------------------------------------------


@define(eq=False)
class _Packing:
    """Documents on their way into three files: tokens, which are learned, and where each document ends."""

    reading: Reading
    tokens: BinaryIO
    loss_mask: BinaryIO
    ends: BinaryIO
    total: int = 0
    documents: int = 0
    pairs: int = 0
    unused: Counter[str] = field(factory=Counter[str])

    def add(self, path: Path) -> bool:
        """Append a file; whether there was a document in it."""
        before, rows_of_file = self.documents, self.reading.documents(path, self.unused)
        try:
            while documents := list(islice(rows_of_file, _AT_ONCE)):
                self._append(documents)
        except OSError as error:
            raise unreadable(path, error) from error
        return self.documents > before

    def _append(self, documents: list[Document | Tokens]) -> None:
        for one in documents:
            if isinstance(one, Tokens) and len(one.ids):
                loss_mask = one.loss_mask if one.loss_mask is not None else np.ones(len(one.ids), bool)
                self._write(one.ids, loss_mask.tobytes(), given=not loss_mask.all())
        self._encode([x for x in documents if isinstance(x, Document) and (x.text or x.prompt)])

    def _encode(self, documents: list[Document]) -> None:
        if not documents:
            return
        tokenizer = self.reading.vocabulary
        assert isinstance(tokenizer, Tokenizer)
        prompts = tokenizer.encode([x.prompt for x in documents])
        texts = tokenizer.encode([x.text for x in documents])
        for one, prompt, text in zip(documents, prompts, texts, strict=True):
            joined = np.concatenate([prompt, text, [tokenizer.end]])
            self._write(joined, bytes(len(prompt)) + b"\1" * (len(text) + 1), given=one.prompt != "")

    def _write(self, tokens: np.ndarray, loss_mask: bytes, *, given: bool) -> None:
        self.tokens.write(tokens.astype(self.reading.vocabulary.dtype).tobytes())
        self.loss_mask.write(loss_mask)
        self.total += len(tokens)
        self.documents += 1
        self.pairs += given
        self.ends.write(self.total.to_bytes(8, "little"))


def pack_documents(name: str, sources: Sequence[Source], target: Path, reading: Reading) -> None:
    """Write the documents of `sources` into one file.

    Raises ValueError, by `name`, where there is nothing in them, and what reading them raises.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_replace(target, mode=PRIVATE) as out,
        tempfile.TemporaryFile(dir=target.parent) as loss_mask,
        tempfile.NamedTemporaryFile(dir=target.parent) as ends,
    ):
        packing = _Packing(reading, out, loss_mask, ends)
        used = sum(packing.add(path) for relative, path in sources if not reading.held_out(relative))
        train = packing.total
        held_out = sum(packing.add(path) for relative, path in sources if reading.held_out(relative))
        total = packing.total
        if not total:
            raise ValueError(
                f"got no text in {name} ({len(sources):,} files), expected at least one document: name other "
                "data, or a .bin of tokens"
            )
        if not reading.splits and not 0.01 <= (total - train) / total <= 0.5:
            ends.flush()
            train, used, held_out = _split(Path(ends.name), total), used + held_out, 0
        if packing.pairs:
            loss_mask.seek(0)
            shutil.copyfileobj(loss_mask, out)
        files = used + held_out
        counts = (packing.documents, packing.pairs, packing.unused.total())
        out.write(_FOOTER.pack(files, held_out, len(sources) - files, *counts, total, train))


def _split(path: Path, total: int) -> int:
    """Tokens up to the first end of a document after nine tenths of them; of a long document, up to that."""
    ends, least = memory_map(path, np.dtype("<u8")), total - max(1, total // 10)
    end = int(ends[np.searchsorted(ends, least)])
    return end if end <= least + min(total // 20, _CHUNK) else least
