"""Documents packed into one file: their tokens, an end token after each document, and the loss mask.

The file is memory-mapped, so a batch is a pure function of seed and position, as from any other data
(`zfunc.train.data.corpus`). It is written once, a few documents in memory at a time, and again when a source file,
the tokenizer or the file's format changes.
"""

import hashlib
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from attrs import define, evolve, field, frozen

from zfunc.checkpoint.durable_files import atomic_replace
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.arrow_dataset import (
    SavedDataset,
    Tokens,
    holds_tokens,
    is_saved_dataset,
    open_saved,
    rows,
)
from zfunc.train.data.chat import Chat
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

FORMAT = 4  # of the file, and of what is read as records
_DOCUMENTS = 64  # tokenized in one call
_CHUNK = 1 << 20  # tokens
_FOOTER = struct.Struct("<9Q")


@frozen
class SourceReader:
    """How source files are read: their `documents`, and which files are `held_out`, by name.

    `vocabulary` is a Tokenizer where there is text. With `splits`, the data itself says what is held out; else it
    is the end of the data where the held-out files are too few or too many.
    """

    vocabulary: Vocabulary
    documents: Callable[[Path, Counter[str]], Iterator[Document | Chat | Tokens]]
    held_out: Callable[[str], bool]
    splits: bool = False


@frozen
class PackedTokens:
    """The footer of a packed file.

    The file has its tokens, those held out last; then, if there are pairs, the loss mask, a byte a token; then the
    ends of the documents, 8 bytes each.
    """

    files: int
    held_out_files: int  # 0: split by documents
    left_out: int  # empty and binary files
    documents: int
    pairs: int  # documents of which some tokens are not learned
    chats: int  # documents that are chats
    unused: int  # keys of records that are not read, each time they occur
    tokens: int
    train: int  # tokens of them

    @classmethod
    def of(cls, content: np.ndarray) -> "PackedTokens":
        """Read it from the end of a file, [bytes]."""
        return cls(*_FOOTER.unpack(content[-_FOOTER.size :].tobytes()))


def open_data(
    path: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    dtype: str = "uint16",
    vocab_size: int = 50257,
    split: bool = True,
    whole_documents: bool = False,
) -> Corpus:
    """Open the data at `path`: what `zfunc.train.data.corpus.open_corpus` takes, JSON records, or a folder that
    `datasets.save_to_disk` wrote, tokenized or as bytes.

    - A `.jsonl` or `.ndjson` file has a document a line: `{"text": ...}`, or `{"prompt": ..., "completion": ...}`,
      joined without a separator. The labels of a prompt are -100. A chat has `messages`, `conversations`, or
      `instruction` and `output` (`zfunc.train.data.chat`). The tokenizer's chat template writes it, and all labels
      but those of the assistant's turns are -100. A `.json` has an array of such records, or one after another. A
      folder may mix such files with text files; a `.json` in it that does not begin with a record is text.
    - A `tokenizer` makes tokens of text files (one document each, in UTF-8) and records. A `.bin` has tokens
      already and takes none.
    - A saved dataset has the columns of JSONL; or `input_ids` below `vocab_size`, of which those with an
      `attention_mask` of 0 are dropped, and `labels`, the same tokens or -100. Of a DatasetDict, the split train is
      read, and validation or test is held out.

    Documents are concatenated in the order of the files, with the tokenizer's end token (zero, for bytes) after
    each; sequences are cut from that regardless of documents, or with `whole_documents` made of them, for which the
    corpus says where they end. About 8 % of the files are held out where that is 1
    to 50 % of the tokens; else the last documents, about 10 %. Without `split`, only what the data itself has as a
    split is held out.

    Raises ValueError, with file and line, for what is not a document, and what `open_corpus` raises.
    """
    path = None if path is None else Path(path)
    saved = open_saved(path) if path is not None and is_saved_dataset(path) else None
    tokenized = path is not None and (holds_tokens(path) if saved is None else saved.tokenized)
    if whole_documents and tokenized and saved is None:
        raise ValueError(
            f"--packing documents: got {path}, which does not say where documents end, expected text, JSONL or a "
            "saved dataset: name one of them, or leave --packing out"
        )
    if tokenized and tokenizer is not None:
        raise ValueError(
            f"--tokenizer: got one for {path}, which holds tokens, expected text or JSONL: leave it out"
        )
    if saved is not None:
        given = Vocabulary(f"below {vocab_size}", vocab_size)
        reader = _row_reader(given if saved.tokenized else tokenizer or BYTES, saved)
        return _open(str(path), _rows_of(saved), Path(cache), reader, split, whole_documents, saved)
    if tokenized or (path is not None and not path.exists()):
        return open_corpus(path, cache=cache, dtype=dtype, vocab_size=vocab_size, split=split)
    sources = _sources(path)
    named = path is not None and path.is_file()
    records_or_rows = whole_documents or any(holds_records(file, named=named) for _, file in sources)
    if tokenizer is None and not records_or_rows:
        return open_corpus(path, cache=cache, dtype=dtype, vocab_size=vocab_size, split=split)
    name = "Python standard library" if path is None else str(path)
    read = partial(_documents, named=named)
    reader = SourceReader(tokenizer or BYTES, read, is_held_out)
    return _open(name, sources, Path(cache), reader, split, whole_documents)


def _sources(path: Path | None) -> list[Source]:
    if path is None:
        return list(stdlib_files())
    return walk(path, lambda part: part.startswith(".")) if path.is_dir() else [(path.name, path)]


def _rows_of(saved: SavedDataset) -> list[Source]:
    return [(_name_of(path), path) for path in (*saved.train, *saved.held_out)]


def _name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _row_reader(vocabulary: Vocabulary, saved: SavedDataset) -> SourceReader:
    held_out = {_name_of(path) for path in saved.held_out}
    read = partial(_rows, columns=saved.columns, vocab_size=vocabulary.vocab_size)
    return SourceReader(vocabulary, read, held_out.__contains__, bool(held_out))


def _documents(path: Path, unused: Counter[str], named: bool) -> Iterator[Document | Chat]:
    if holds_records(path, named=named):
        yield from records(path, unused)
    elif (document := text_of_file(path)) is not None:
        yield document


def _rows(
    path: Path, _: Counter[str], columns: tuple[str, ...], vocab_size: int
) -> Iterator[Document | Chat | Tokens]:
    for number, row in enumerate(rows(path, columns)):
        if isinstance(row, Tokens) and len(row.ids) and not 0 <= row.ids.min() <= row.ids.max() < vocab_size:
            raise ValueError(
                f"{path}, row {number}: got tokens from {row.ids.min()} to {row.ids.max()}, expected 0 or above "
                f"and below {vocab_size}: pass the --vocab-size of their tokenizer"
            )
        yield row


def _open(
    name: str,
    sources: list[Source],
    cache: Path,
    reader: SourceReader,
    split: bool,
    whole_documents: bool,
    saved: SavedDataset | None = None,
) -> Corpus:
    vocabulary = reader.vocabulary
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in sources]
    dataset = () if saved is None else (saved.columns, len(saved.held_out))
    key = hashlib.sha256(
        repr((FORMAT, vocabulary.digest, stats, *dataset)).encode("utf-8", "surrogateescape")
    )
    path = cache / f".packed-{key.hexdigest()[:16]}.bin"  # hidden: `cache` may lie in the folder that is read
    if not path.is_file():
        pack_documents(name, sources, path, reader)
    content = memory_map(path, np.dtype(np.uint8))
    packed = PackedTokens.of(content)
    size = vocabulary.dtype.itemsize * packed.tokens
    tokens = content[:size].view(vocabulary.dtype)
    loss_mask = content[size : size + packed.tokens] if packed.pairs else None
    end = packed.train if split or reader.splits else packed.tokens
    corpus = Corpus(
        name,
        tokens[:end],
        tokens[end:],
        vocabulary.vocab_size,
        tuple(_notes(name, packed, vocabulary, loss_mask, split, saved)),
        loss_mask=None if loss_mask is None else loss_mask[:end],
        held_out_loss_mask=None if loss_mask is None else loss_mask[end:],
    )
    if not whole_documents:
        return corpus
    ends = content[-_FOOTER.size - 8 * packed.documents : -_FOOTER.size].view("<u8").astype(np.int64)
    return evolve(corpus, ends=np.append(ends[ends < end], end), held_out_ends=ends[ends > end] - end)


def _notes(
    name: str,
    packed: PackedTokens,
    vocabulary: Vocabulary,
    loss_mask: np.ndarray | None,
    split: bool,
    saved: SavedDataset | None,
) -> Iterator[str]:
    unit = "bytes" if vocabulary is BYTES else "tokens"
    yield f"{name}: {packed.files:,} files, {packed.documents:,} documents, {packed.tokens:,} {unit}"
    if not isinstance(vocabulary, Tokenizer):
        yield f"tokens below {vocabulary.vocab_size:,}, as they are, without end tokens"
    elif vocabulary is not BYTES:
        yield f"tokenizer: {vocabulary.name}, vocabulary {vocabulary.vocab_size:,}, end token {vocabulary.end}"
    if packed.chats and isinstance(vocabulary, Tokenizer):
        how = f"by the chat template of {vocabulary.name}"
        if not vocabulary.chat.source:
            how = "as User: ..., Assistant: ..., for want of a chat template"
        yield f"chats: {packed.chats:,}, written {how}"
    if loss_mask is not None:
        count = f"{np.count_nonzero(loss_mask):,} {unit}"
        of_ids = f"the labels of the others, in {packed.pairs:,} documents, are {IGNORE_INDEX}"
        pairs = f"without the {'other turns' if packed.chats else 'prompts'} of {packed.pairs:,} documents"
        yield f"learned: {count}, {of_ids if saved is not None and saved.tokenized else pairs}"
    held_out = f"{packed.held_out_files:,} of the files, by a hash of their names"
    if saved is not None:
        held_out = f"the split {saved.held_out_split}" if saved.held_out else "the end"
    elif not packed.held_out_files:
        held_out = "the end (too few files to hold whole ones out)"
    if split:
        yield f"held out: {held_out}, {packed.tokens - packed.train:,} {unit}"
    if packed.left_out:
        yield f"left out: {packed.left_out:,} empty or binary files"
    if packed.unused:
        yield f"left out: {packed.unused:,} keys of records that are not read"
    yield from () if saved is None else saved.notes


# --- the file ---------------------------------------------------------------------------------------------


@define(eq=False)
class _Packing:
    """Documents being written to three files: tokens, loss mask, and where each document ends."""

    reader: SourceReader
    tokens: BinaryIO
    loss_mask: BinaryIO
    ends: BinaryIO
    total: int = 0
    documents: int = 0
    pairs: int = 0
    chats: int = 0
    unused: Counter[str] = field(factory=Counter[str])

    def add(self, path: Path) -> bool:
        """Append a file. Returns whether it had a document."""
        before, rows_of_file = self.documents, self.reader.documents(path, self.unused)
        try:
            while documents := list(islice(rows_of_file, _DOCUMENTS)):
                self._append(documents)
        except OSError as error:
            raise unreadable(path, error) from error
        return self.documents > before

    def _append(self, documents: list[Any]) -> None:
        for kind, some in groupby(documents, type):
            if kind is Tokens:
                self._add_tokens(some)
            elif kind is Chat:
                self._encode_chats(some)
            else:
                self._encode([x for x in some if x.text or x.prompt])

    def _add_tokens(self, documents: Iterable[Tokens]) -> None:
        for document in documents:
            if len(document.ids):
                mask = (
                    document.loss_mask if document.loss_mask is not None else np.ones(len(document.ids), bool)
                )
                self._write(document.ids, mask.tobytes(), pair=not mask.all())

    def _encode_chats(self, chats: Iterable[Chat]) -> None:
        tokenizer = self.tokenizer
        end = tokenizer.chat.end
        if not tokenizer.chat.source and tokenizer.encode([end])[0].tolist() != [tokenizer.end]:
            raise ValueError(
                f"--tokenizer: got {tokenizer.name} without a chat template, whose end token is not recognised in "
                "text, expected a template, for chats: write a chat_template.jinja beside it"
            )
        rendered = [x for chat in chats for x in tokenizer.chat.render(chat)]
        located = tokenizer.encode_located([x.text for x in rendered])
        for chat, (tokens, spans) in zip(rendered, located, strict=True):
            mask = np.zeros(len(tokens), bool)
            for first, last in chat.learned:
                mask |= (spans[:, 1] > first) & (
                    spans[:, 0] < last
                )  # a token may begin with a space of the prompt
            self._write(tokens, mask.tobytes(), pair=True)
        self.chats += len(rendered)

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary, where there is text."""
        assert isinstance(self.reader.vocabulary, Tokenizer)
        return self.reader.vocabulary

    def _encode(self, documents: list[Document]) -> None:
        tokenizer = self.tokenizer
        prompts = tokenizer.encode([x.prompt for x in documents])
        texts = tokenizer.encode([x.text for x in documents])
        for document, prompt, text in zip(documents, prompts, texts, strict=True):
            tokens = np.concatenate([prompt, text, [tokenizer.end]])
            self._write(tokens, bytes(len(prompt)) + b"\1" * (len(text) + 1), pair=document.prompt != "")

    def _write(self, tokens: np.ndarray, loss_mask: bytes, *, pair: bool) -> None:
        self.tokens.write(tokens.astype(self.reader.vocabulary.dtype).tobytes())
        self.loss_mask.write(loss_mask)
        self.total += len(tokens)
        self.documents += 1
        self.pairs += pair
        self.ends.write(self.total.to_bytes(8, "little"))


def pack_documents(name: str, sources: Sequence[Source], target: Path, reader: SourceReader) -> None:
    """Write the documents of `sources` into one file.

    Raises ValueError, with `name`, if they are all empty, and what reading them raises.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_replace(target, mode=PRIVATE) as out,
        tempfile.TemporaryFile(dir=target.parent) as loss_mask,
        tempfile.NamedTemporaryFile(dir=target.parent) as ends,
    ):
        packing = _Packing(reader, out, loss_mask, ends)
        used = sum(packing.add(path) for relative, path in sources if not reader.held_out(relative))
        train = packing.total
        held_out = sum(packing.add(path) for relative, path in sources if reader.held_out(relative))
        total = packing.total
        if not total:
            raise ValueError(
                f"got no text in {name} ({len(sources):,} files), expected at least one document: name other "
                "data, or a .bin of tokens"
            )
        if not reader.splits and not 0.01 <= (total - train) / total <= 0.5:
            ends.flush()
            train, used, held_out = _split(Path(ends.name), total), used + held_out, 0
        if packing.pairs:
            loss_mask.seek(0)
            shutil.copyfileobj(loss_mask, out)
        ends.seek(0)
        shutil.copyfileobj(ends, out)
        files = used + held_out
        counts = (packing.documents, packing.pairs, packing.chats, packing.unused.total())
        out.write(_FOOTER.pack(files, held_out, len(sources) - files, *counts, total, train))


def _split(path: Path, total: int) -> int:
    """Tokens to train on: nine tenths, and the rest of that document unless it is long."""
    ends, least = memory_map(path, np.dtype("<u8")), total - max(1, total // 10)
    end = int(ends[np.searchsorted(ends, least)])
    return end if end <= least + min(total // 20, _CHUNK) else least
