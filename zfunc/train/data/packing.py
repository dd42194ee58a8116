"""Documents packed: tokens one after another with an end token after each, and which of them are learned.

The invariant: what is packed is one file that is mapped, so a batch of it is a pure function of seed and position,
as of any other data (`zfunc.train.data.corpus`), however many documents there are. The file is made once, and made
again when a document's file, the tokenizer or this module's form has changed.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.arrow_dataset import SavedDataset, Tokens, is_saved_dataset, open_saved, rows
from zfunc.train.data.corpus import Corpus, Source, is_held_out, memory_map, open_corpus, stdlib_files, walk
from zfunc.train.data.documents import Document, holds_records, records, text_of_file
from zfunc.train.data.packed import FORM, PackedTokens, Reading, pack_documents
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary


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
    got = PackedTokens.of(content)
    size = vocabulary.dtype.itemsize * got.tokens
    tokens = content[:size].view(vocabulary.dtype)
    learned = content[size : size + got.tokens] if got.pairs else None
    return Corpus(
        name,
        tokens[: got.train],
        tokens[got.train :],
        vocabulary.vocab_size,
        tuple(_lines(name, got, vocabulary, learned, saved)),
        None if learned is None else learned[: got.train],
        None if learned is None else learned[got.train :],
    )


def _lines(
    name: str,
    got: PackedTokens,
    vocabulary: Vocabulary,
    learned: np.ndarray | None,
    saved: SavedDataset | None,
) -> Iterator[str]:
    unit = "bytes" if vocabulary is BYTES else "tokens"
    yield f"{name}: {got.files:,} files, {got.documents:,} documents, {got.tokens:,} {unit}"
    if not isinstance(vocabulary, Tokenizer):
        yield f"tokens as they are, below {vocabulary.vocab_size:,}; nothing is put between documents"
    elif vocabulary is not BYTES:
        yield f"tokenizer: {vocabulary.name}, vocabulary {vocabulary.vocab_size:,}, end token {vocabulary.end}"
    if learned is not None:
        count = f"{np.count_nonzero(learned):,} {unit}"
        of_ids = f"the labels of the others, in {got.pairs:,} documents, are {IGNORE_INDEX}"
        pairs = f"completions and texts; the prompts of {got.pairs:,} are given"
        yield f"learned: {count}, {of_ids if saved is not None and saved.tokens else pairs}"
    how = f"{got.held_out_files:,} of the files, by a hash of their names"
    if saved is not None:
        how = f"the split {saved.held_out[0].parent.name}" if saved.held_out else "the end"
    elif not got.held_out_files:
        how = "the end (too few files to hold whole ones out)"
    yield f"held out: {how}, {got.tokens - got.train:,} {unit}"
    if got.left_out:
        yield f"left out: {got.left_out:,} empty or binary files"
    if got.unused:
        yield f"left out: {got.unused:,} keys of records that are neither text, nor prompt and completion"
    yield from () if saved is None else saved.lines
