"""Data on disk as a corpus: tokens that are mapped where they are, or documents that are packed first.

Packed documents are a folder of NumPy files, which `np.load` reads: `tokens.npy`, those held out last, with an end
token after each document; `offsets.npy`, where each document begins and the last one ends; and, where some tokens
are not learned, `mask.npy`, false for these. They are written once, a few documents in memory at a time, and
again when a source file, the tokenizer or the format changes. So a batch is a pure function of seed and position,
as from any other data (`zfunc.train.data.corpus`).
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, define, field, frozen

from zfunc.checkpoint.durable_files import sync
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.chat import Chat
from zfunc.train.data.corpus import Corpus
from zfunc.train.data.documents import (
    JSON,
    LINES,
    AnyDocument,
    Document,
    Source,
    Tokens,
    file_documents,
    is_held_out,
    stdlib_files,
    unreadable,
    walk,
)
from zfunc.train.data.saved_dataset import SavedDataset, holds_tokens, is_saved_dataset, open_saved
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary

FORMAT = 5  # of the folder, and of what is read as records
STDLIB = "Python standard library"
_DOCUMENTS = 64  # tokenized in one call
_LONG = 1 << 20  # characters of a document after which no more are read in one call


def open_data(
    path: Path | None = None,
    *,
    cache: Path,
    tokenizer: Tokenizer | None = None,
    dtype: str = "uint16",
    vocab_size: int = 50257,
    split: bool = True,
    whole_documents: bool = False,
) -> Corpus:
    """Open the data at `path`; without a path, the sources of Python's standard library.

    - A `.bin` file, or a folder with a `train.bin`: little-endian tokens, as nanoGPT writes them, mapped and not
      scanned. `dtype` is "uint16" or "uint32"; tokens are compared with `vocab_size` batch by batch. A `val.bin`
      beside `train.bin` is held out; without one, the last 10 % are. It takes no `tokenizer`.
    - A `.jsonl` or `.ndjson` file has a document a line, a `.json` an array of them, or one after another:
      `{"text": ...}`, or `{"prompt": ..., "completion": ...}`, joined without a separator. The labels of a prompt
      are -100. A chat has `messages`, `conversations`, or `instruction` and `output` (`zfunc.train.data.chat`). The
      tokenizer's chat template writes it, and all labels but those of the assistant's turns are -100.
    - Any other file is text: one document, in UTF-8 for a tokenizer, else any bytes.
    - A folder of these; hidden, empty and binary files (with a zero byte) are left out, and a `.json` in it that
      does not begin with a record is text.
    - A folder that `datasets.save_to_disk` wrote, or Parquet files, with the columns of JSONL; or `input_ids` below
      `vocab_size`, of which those with an `attention_mask` of 0 are dropped, and `labels`, the same tokens or -100.
      The split train is read, and validation or test is held out.

    Without a tokenizer, bytes are the tokens. Documents are concatenated in the order of the files, with the
    tokenizer's end token (zero, for bytes) after each; sequences are cut from that regardless of documents, or with
    `whole_documents` made of them, for which the corpus says where they end. About 8 % of the files are held out,
    by a hash of their names, where that is 1 to 50 % of the tokens; else the last documents, about 10 %. Without
    `split`, only what the data itself has as a split is held out. `cache` is the folder of packed documents.

    Raises FileNotFoundError, and ValueError, with file and line, for what is not a document or cannot be read.
    """
    if path is not None and not path.exists():
        raise FileNotFoundError(
            f"got {path}, which does not exist; expected a text file, a folder, or a .bin of tokens; "
            "check the path, or name none to use the Python standard library"
        )
    saved = open_saved(path) if path is not None and is_saved_dataset(path) else None
    tokenized = saved.tokenized if saved is not None else path is not None and holds_tokens(path)
    if whole_documents and tokenized and saved is None:
        raise ValueError(
            f"packing: got {path}, which does not say where documents end, expected text, JSONL or a "
            "saved dataset: name one of them, or leave `packing` out"
        )
    if tokenized and tokenizer is not None:
        raise ValueError(
            f"tokenizer: got one for {path}, which holds tokens, expected text or JSONL: leave it out"
        )
    vocabulary = tokenizer or BYTES
    if saved is not None:
        vocabulary = Vocabulary(f"below {vocab_size}", vocab_size) if tokenized else vocabulary
        sources = walk(saved.path) if saved.path.is_dir() else [(saved.path.name, saved.path)]
        return _packed(str(path), sources, cache, vocabulary, split, whole_documents, saved)
    if path is not None and tokenized:
        return _open_tokens(path, dtype, vocab_size, split)
    if path is None or path.is_dir():
        sources = stdlib_files() if path is None else walk(path)
        return _packed(str(path or STDLIB), sources, cache, vocabulary, split, whole_documents, None)
    if tokenizer is not None or whole_documents or path.suffix.lower() in (*LINES, JSON):
        return _packed(
            str(path), [(path.name, path)], cache, vocabulary, split, whole_documents, None, named=True
        )
    train, held_out = _split_by_position(_memory_map(path, np.dtype(np.uint8)), split)
    lines = (
        f"{path}: 1 file, {len(train) + len(held_out):,} bytes",
        _held_out_line("the end", held_out, "bytes"),
    )
    return Corpus(str(path), train, held_out, BYTES.vocab_size, lines[: 1 + split])


def _open_tokens(path: Path, dtype: str, vocab_size: int, split: bool) -> Corpus:
    path = path / "train.bin" if path.is_dir() else path
    little = np.dtype(dtype).newbyteorder("<")
    tokens, beside = _memory_map(path, little), path.with_name("val.bin")
    if path.name == "train.bin" and beside.is_file():
        train, held_out, where = tokens, _memory_map(beside, little), str(beside)
    else:
        (train, held_out), where = _split_by_position(tokens, split), "the end"
    first = f"{path}: {len(train):,} {dtype} tokens to train on, vocabulary {vocab_size:,}"
    lines = (first, _held_out_line(where, held_out, "tokens"))
    return Corpus(str(path), train, held_out, vocab_size, lines[: 1 + split])


def _held_out_line(where: str, tokens: np.ndarray, unit: str) -> str:
    return f"held out: {where}, {len(tokens):,} {unit}"


def _memory_map(path: Path, dtype: "np.dtype[np.generic]") -> np.ndarray:
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


def _split_by_position(tokens: np.ndarray, split: bool) -> tuple[np.ndarray, np.ndarray]:
    end = len(tokens) - max(1, len(tokens) // 10) if split else len(tokens)
    return tokens[:end], tokens[end:]


# --- packed documents -------------------------------------------------------------------------------------


@frozen
class Packed:
    """What is in a packed folder, beside its arrays: `corpus.json`."""

    files: int
    held_out_files: int  # 0: split at the end
    empty: int  # files
    binary: int
    documents: int
    pairs: int  # documents of which some tokens are not learned
    chats: int  # documents that are chats
    unused: int  # keys of records that are not read, each time they occur
    train: int  # tokens of them


def _packed(
    name: str,
    sources: list[Source],
    cache: Path,
    vocabulary: Vocabulary,
    split: bool,
    whole_documents: bool,
    saved: SavedDataset | None,
    *,
    named: bool = False,
) -> Corpus:
    """The corpus of the documents in files, which are packed unless they are already."""
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in sources]
    columns = () if saved is None else saved.columns
    key = repr((FORMAT, vocabulary.digest, stats, columns, whole_documents))
    folder = cache / f".packed-{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
    if not folder.is_dir():  # hidden: `cache` may lie in the folder that is read
        cache.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(
                dir=cache, prefix=".packing-", ignore_cleanup_errors=True
            ) as unfinished,
            _NpyFile(Path(unfinished, "tokens.npy"), vocabulary.dtype) as tokens,
            _NpyFile(Path(unfinished, "mask.npy"), bool) as mask,
            _NpyFile(Path(unfinished, "offsets.npy"), np.int64) as offsets,
        ):
            packing = _Packing(vocabulary, tokens, mask, offsets, whole_documents)
            if saved is not None:
                packing.add_rows(saved)
            else:
                packing.add_files(sources, named=named)
            packing.finish(name, len(sources), saved)
            with suppress(OSError):  # another process was first
                os.rename(unfinished, folder)
    packed = Packed(**json.loads(folder.joinpath("corpus.json").read_text()))
    tokens, offsets = (np.load(folder / f"{x}.npy", mmap_mode="r") for x in ("tokens", "offsets"))
    mask = np.load(folder / "mask.npy", mmap_mode="r") if packed.pairs else None
    end = packed.train if split or (saved is not None and saved.held_out is not None) else len(tokens)
    ends = offsets[1:]
    lines = _description(name, packed, vocabulary, tokens[end:], mask, split, saved)
    return Corpus(
        name,
        tokens[:end],
        tokens[end:],
        vocabulary.vocab_size,
        (f"{lines[0]}, {len(tokens):,} {_unit(vocabulary)}", *lines[1:]),
        loss_mask=None if mask is None else mask[:end],
        held_out_loss_mask=None if mask is None else mask[end:],
        ends=np.append(ends[ends < end], end) if whole_documents else None,
        held_out_ends=ends[ends > end] - end if whole_documents else None,
    )


def _unit(vocabulary: Vocabulary) -> str:
    return "bytes" if vocabulary is BYTES else "tokens"


def _description(
    name: str,
    packed: Packed,
    vocabulary: Vocabulary,
    held_out: np.ndarray,
    loss_mask: np.ndarray | None,
    split: bool,
    saved: SavedDataset | None,
) -> list[str]:
    unit = _unit(vocabulary)
    lines = [f"{name}: {packed.files:,} files, {packed.documents:,} documents"]
    if not isinstance(vocabulary, Tokenizer):
        lines.append(f"tokens below {vocabulary.vocab_size:,}, as they are, without end tokens")
    elif vocabulary is not BYTES:
        lines.append(
            f"tokenizer: {vocabulary.name}, vocabulary {vocabulary.vocab_size:,}, end token {vocabulary.end}"
        )
    if packed.chats and isinstance(vocabulary, Tokenizer):
        template = f"by the chat template of {vocabulary.name}"
        plain = "as User: ..., Assistant: ..., for want of a chat template"
        lines.append(f"chats: {packed.chats:,}, written {template if vocabulary.chat.source else plain}")
    if loss_mask is not None:
        of_ids = f"the labels of the others, in {packed.pairs:,} documents, are {IGNORE_INDEX}"
        pairs = f"without the {'other turns' if packed.chats else 'prompts'} of {packed.pairs:,} documents"
        labels = of_ids if saved is not None and saved.tokenized else pairs
        lines.append(f"learned: {np.count_nonzero(loss_mask):,} {unit}, {labels}")
    where = f"{packed.held_out_files:,} of the files, by a hash of their names"
    if saved is not None:
        where = f"the split {saved.held_out_split}" if saved.held_out_split else "the end"
    elif not packed.held_out_files:
        where = "the end (too few files to hold whole ones out)"
    if split:
        lines.append(_held_out_line(where, held_out, unit))
    if packed.empty or packed.binary:
        lines.append(f"left out: {packed.empty:,} empty and {packed.binary:,} binary files")
    if packed.unused:
        lines.append(f"left out: {packed.unused:,} keys of records that are not read")
    return [*lines, *(() if saved is None else saved.notes)]


class _NpyFile:
    """A one-dimensional array that grows in a `.npy` file. NumPy's header has room for any length."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype), 0
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def __enter__(self) -> "_NpyFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(self, values: np.ndarray) -> None:
        self.file.write(values.astype(self.dtype).tobytes())
        self.count += len(values)

    def finish(self) -> None:
        """Write the length, and wait until the file is on the disk."""
        self.file.seek(0)
        self._write_header()
        self.file.close()
        sync(self.path)


@define(eq=False)
class _Packing:
    """Documents being written to the files of a folder."""

    vocabulary: Vocabulary
    tokens: _NpyFile
    mask: _NpyFile
    offsets: _NpyFile
    of_documents: bool  # the held-out end begins with a document, not at any byte
    counts: Counter[str] = field(factory=Counter[str])
    unused: Counter[str] = field(factory=Counter[str])
    train: int = 0

    def add_rows(self, saved: SavedDataset) -> None:
        """The splits of a dataset."""
        read = partial(saved.documents, vocab_size=self.vocabulary.vocab_size)
        self.offsets.append(np.zeros(1))
        self._add(read(saved.train))
        self.train = self.tokens.count
        self._add(() if saved.held_out is None else read(saved.held_out))

    def add_files(self, sources: list[Source], *, named: bool) -> None:
        """Files, those held out last. Raises ValueError with the one that cannot be read."""
        self.offsets.append(np.zeros(1))
        for name, path in sorted(sources, key=lambda x: is_held_out(x[0])):
            before = self.counts["documents"]
            text = self.vocabulary is not BYTES
            try:
                self._add(file_documents(path, self.unused, named=named, text=text))
            except OSError as error:
                raise unreadable(path, error) from error
            if self.counts["documents"] == before:
                self.counts["binary" if path.stat().st_size else "empty"] += 1
            else:
                self.counts["held_out_files"] += is_held_out(name)
            self.train = self.train if is_held_out(name) else self.tokens.count

    def finish(self, name: str, files: int, saved: SavedDataset | None) -> None:
        """Close the files. Raises ValueError, with `name`, if there is nothing in them."""
        for file in (self.tokens, self.mask, self.offsets):
            file.finish()
        total, counts = self.tokens.count, self.counts
        if not total:
            raise ValueError(
                f"got no text in {name} ({counts['empty']} empty and {counts['binary']} binary files), expected at "
                "least one document: name other data, or a .bin of tokens"
            )
        if not counts["pairs"]:
            self.mask.path.unlink()
        if (saved is None or saved.held_out is None) and not 0.01 <= (total - self.train) / total <= 0.5:
            counts["held_out_files"], self.train = 0, self._nine_tenths(total)
        used = files - counts["empty"] - counts["binary"]
        names = ("held_out_files", "empty", "binary", "documents", "pairs", "chats")
        packed = Packed(used, *(counts[x] for x in names), unused=self.unused.total(), train=self.train)
        self.tokens.path.with_name("corpus.json").write_text(json.dumps(asdict(packed)))

    def _nine_tenths(self, total: int) -> int:
        """Tokens to train on: nine tenths, and the rest of that document unless it is long."""
        least = total - max(1, total // 10)
        ends = np.load(self.offsets.path, mmap_mode="r")
        end = int(ends[np.searchsorted(ends, least)])
        return end if self.of_documents and end <= least + min(total // 20, 1 << 20) else least

    def _add(self, documents: Iterable[AnyDocument]) -> None:
        rest = iter(documents)
        while some := list(_some(rest)):
            for kind, group in groupby(some, type):
                self.of_documents |= kind is not bytes
                for ids, learned in self._encoded(kind, list(group)):
                    if len(ids):
                        self.tokens.append(ids)
                        self.mask.append(np.ones(len(ids)) if learned is None else learned)
                        self.offsets.append(np.array([self.tokens.count]))
                        pair = learned is not None and (kind is Chat or not learned.all())
                        self.counts.update(documents=1, chats=kind is Chat, pairs=pair)

    def _encoded(self, kind: type, documents: list[Any]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Tokens, and which of them are learned, of documents of one kind."""
        if kind is bytes:
            yield from ((np.frombuffer(x, np.uint8), None) for x in documents)
        elif kind is Tokens:
            yield from ((x.ids, x.loss_mask) for x in documents)
        else:
            assert isinstance(self.vocabulary, Tokenizer)
            yield from (_chats if kind is Chat else _texts)(documents, self.vocabulary)


def _texts(documents: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    documents = [x for x in documents if x.text or x.prompt]
    prompts, texts = (tokenizer.encode([getattr(x, part) for x in documents]) for part in ("prompt", "text"))
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.concatenate([prompt, text, [tokenizer.end]])
        yield tokens, np.arange(len(tokens)) >= len(prompt)


def _chats(chats: list[Chat], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if not tokenizer.chat.source and tokenizer.encode([tokenizer.chat.end])[0].tolist() != [tokenizer.end]:
        raise ValueError(
            f"tokenizer: got {tokenizer.name} without a chat template, whose end token is not recognised in "
            "text, expected a template, for chats: write a chat_template.jinja beside it"
        )
    rendered = [x for chat in chats for x in tokenizer.chat.render(chat)]
    located = tokenizer.encode_located([x.text for x in rendered])
    for chat, (tokens, spans) in zip(rendered, located, strict=True):
        learned = np.zeros(len(tokens), bool)
        for first, last in chat.learned:  # a token may begin with a space of the prompt
            learned |= (spans[:, 1] > first) & (spans[:, 0] < last)
        yield tokens, learned


def _some(documents: Iterator[AnyDocument]) -> Iterator[AnyDocument]:
    for document in islice(documents, _DOCUMENTS):
        yield document
        if isinstance(document, Document | bytes) and len(getattr(document, "text", document)) > _LONG:
            break
