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
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

from zfunc.checkpoint.durable_files import sync
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.chat import Chat
from zfunc.train.data.corpus import Corpus, TokenStream
from zfunc.train.data.documents import (
    JSON,
    LINES,
    AnyDocument,
    Document,
    DocumentSource,
    Tokens,
    holds_tokens,
    is_saved_dataset,
    open_saved,
    stdlib_files,
    text_files,
    unreadable,
    walk,
)
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary

FORMAT = 7  # of the folder, and of what is read as records
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
    whole_documents: int | None = None,
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
    tokenizer's end token (zero, for bytes) after each; sequences are cut from that regardless of documents, or, of
    so many tokens, made of `whole_documents`. About 8 % of the files are held out, by a hash of their names, where
    that is 1 to 50 % of the tokens; else the last documents, about 10 %. Without `split`, only what the data itself
    has as a split is held out. `cache` is the folder of packed documents.

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
            f"packing: got documents for {path}, which does not say where documents end, expected text, JSONL or a "
            "saved dataset: name one of them, or leave `packing` out"
        )
    if tokenized and tokenizer is not None:
        raise ValueError(
            f"tokenizer: got one for {path}, which holds tokens, expected text or JSONL: leave it out"
        )
    if path is not None and tokenized and saved is None:
        return _open_tokens(path, dtype, vocab_size, split)
    vocabulary = Vocabulary(f"below {vocab_size}", vocab_size) if tokenized else tokenizer or BYTES
    text = vocabulary is not BYTES
    if saved is not None:
        source = saved
    elif path is None or path.is_dir():
        source = text_files(stdlib_files() if path is None else walk(path), named=False, text=text)
    elif text or whole_documents or path.suffix.lower() in (*LINES, JSON):
        source = text_files([(path.name, path)], named=True, text=text)
    else:
        content = _memory_map(path, np.dtype(np.uint8))
        said = f"1 file, {len(content):,} bytes"
        return _mapped(path, *_split_by_position(content, split), "the end" * split, BYTES.vocab_size, said)
    return _packed(str(path or STDLIB), source, cache, vocabulary, split, whole_documents)


def _open_tokens(path: Path, dtype: str, vocab_size: int, split: bool) -> Corpus:
    path = path / "train.bin" if path.is_dir() else path
    little = np.dtype(dtype).newbyteorder("<")
    tokens, beside = _memory_map(path, little), path.with_name("val.bin")
    said = f"{{:,}} {dtype} tokens to train on, vocabulary {vocab_size:,}"
    if path.name == "train.bin" and beside.is_file():
        held_out = _memory_map(beside, little)
        return _mapped(path, tokens, held_out, str(beside) * split, vocab_size, said)
    return _mapped(path, *_split_by_position(tokens, split), "the end" * split, vocab_size, said)


def _mapped(
    path: Path, train: np.ndarray, held_out: np.ndarray, where: str, vocab_size: int, said: str
) -> Corpus:
    """A corpus of tokens as they are; `said` is about those to train on, `where` those held out are, if any."""
    unit = "bytes" if train.dtype.itemsize == 1 else "tokens"
    lines = (
        f"{path}: {said.format(len(train))}",
        *([_held_out_line(where, held_out, unit)] if where else ()),
    )
    return Corpus(str(path), TokenStream(train), TokenStream(held_out), vocab_size, lines)


def _split_by_position(tokens: np.ndarray, split: bool) -> tuple[np.ndarray, np.ndarray]:
    end = len(tokens) - max(1, len(tokens) // 10) if split else len(tokens)
    return tokens[:end], tokens[end:]


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


# --- packed documents -------------------------------------------------------------------------------------


def _packed(
    name: str,
    source: DocumentSource,
    cache: Path,
    vocabulary: Vocabulary,
    split: bool,
    whole_documents: int | None,
) -> Corpus:
    """The corpus of the documents of `source`, which are packed unless they are already."""
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in source.files]
    key = repr((FORMAT, vocabulary.digest, stats, source.columns, bool(whole_documents)))
    folder = cache / f".packed-{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
    if not folder.is_dir():  # hidden: `cache` may lie in the folder that is read
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=cache, prefix=".packing-", ignore_cleanup_errors=True
        ) as unfinished:
            _write(Path(unfinished), name, source, vocabulary, bool(whole_documents))
            with suppress(OSError):  # another process was first
                os.rename(unfinished, folder)
    packed = json.loads(folder.joinpath("corpus.json").read_text())
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    mask = np.load(folder / "mask.npy", mmap_mode="r") if packed["masked"] else None
    end: int = packed["train"] if split or source.held_out_split else len(tokens)
    parts = [
        TokenStream(tokens[part], None if mask is None else mask[part])
        for part in (slice(end), slice(end, None))
    ]
    unit = "bytes" if vocabulary is BYTES else "tokens"
    lines = [f"{name}: {packed['counted']}, {len(tokens):,} {unit}"]
    if not isinstance(vocabulary, Tokenizer):
        lines.append(f"tokens below {vocabulary.vocab_size:,}, as they are, without end tokens")
    elif vocabulary is not BYTES:
        size = f"vocabulary {vocabulary.vocab_size:,}"
        lines.append(f"tokenizer: {vocabulary.name}, {size}, end token {vocabulary.end}")
    lines += packed["learned"]
    if split:
        lines.append(_held_out_line(packed["held_out"], parts[1].tokens, unit))
    lines += [*packed["left_out"], *source.notes]
    if whole_documents:
        ends = np.load(folder / "offsets.npy", mmap_mode="r")[1:]
        both = np.append(ends[ends < end], end), ends[ends > end] - end
        parts = [part.of_whole_documents(x, whole_documents) for part, x in zip(parts, both, strict=True)]
        count = parts[0].num_sequences(whole_documents)
        padding = 1 - len(parts[0]) / (count * whole_documents)
        lines.append(
            f"sequences: {count:,} of {whole_documents} tokens, of whole documents, {padding:.0%} padding"
        )
    return Corpus(name, *parts, vocabulary.vocab_size, tuple(lines))


def _write(
    folder: Path, name: str, source: DocumentSource, vocabulary: Vocabulary, whole_documents: bool
) -> None:
    """Write a folder of packed documents. Raises ValueError if there are none."""
    with (
        _NpyFile(folder / "tokens.npy", vocabulary.dtype) as tokens,
        _NpyFile(folder / "mask.npy", bool) as mask,
        _NpyFile(folder / "offsets.npy", np.int64) as offsets,
    ):
        packing = _Packing(vocabulary, tokens, mask, offsets, whole_documents)
        for held_out, documents in source.parts(packing.counts):
            packing.add(documents, held_out=held_out)
        for file in (tokens, mask, offsets):
            file.finish()
    counts, total = packing.counts, tokens.count
    if not total:
        raise ValueError(
            f"got no text in {name} ({counts['empty']} empty and {counts['binary']} binary files), expected at "
            "least one document: name other data, or a .bin of tokens"
        )
    train, where = packing.train, f"the split {source.held_out_split}"
    if not source.held_out_split:
        where = f"{counts['held_out']:,} of the files, by a hash of their names"
        if not 0.01 <= (total - train) / total <= 0.5:
            train, where = packing.nine_tenths(), source.at_the_end
    learned, left_out = list[str](), list[str]()
    if counts["chats"] and isinstance(vocabulary, Tokenizer):
        template = f"by the chat template of {vocabulary.name}"
        plain = "as User: ..., Assistant: ..., for want of a chat template"
        learned.append(f"chats: {counts['chats']:,}, written {template if vocabulary.chat.source else plain}")
    if pairs := counts["pairs"]:
        of_ids = f"the labels of the others, in {pairs:,} documents, are {IGNORE_INDEX}"
        of_texts = f"without the {'other turns' if counts['chats'] else 'prompts'} of {pairs:,} documents"
        unit = "bytes" if vocabulary is BYTES else "tokens"
        learned.append(f"learned: {counts['learned']:,} {unit}, {of_ids if source.tokenized else of_texts}")
    else:
        mask.path.unlink()
    if counts["empty"] or counts["binary"]:
        left_out.append(f"left out: {counts['empty']:,} empty and {counts['binary']:,} binary files")
    if counts["unused"]:
        left_out.append(f"left out: {counts['unused']:,} keys of records that are not read")
    files = len(source.files) - counts["empty"] - counts["binary"]
    said = {
        "counted": f"{files:,} files, {counts['documents']:,} documents",
        **{"learned": learned, "held_out": where, "left_out": left_out, "train": train, "masked": pairs > 0},
    }
    folder.joinpath("corpus.json").write_text(json.dumps(said))


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
    train: int = 0  # tokens that are not held out

    def __attrs_post_init__(self) -> None:
        self.offsets.append(np.zeros(1))

    def add(self, documents: Iterable[AnyDocument], *, held_out: bool) -> None:
        """The documents of a file or a split; those held out come last."""
        rest, before = iter(documents), self.tokens.count
        while some := list(_some(rest)):
            for kind, group in groupby(some, type):
                self.of_documents |= kind is not bytes
                for ids, learned in self._encoded(kind, list(group)):
                    if len(ids):
                        learned = np.ones(len(ids), bool) if learned is None else learned
                        self.tokens.append(ids)
                        self.mask.append(learned)
                        self.offsets.append(np.array([self.tokens.count]))
                        count = int(np.count_nonzero(learned))
                        pair = kind is Chat or count < len(ids)
                        self.counts.update(documents=1, chats=kind is Chat, pairs=pair, learned=count)
        if held_out:
            self.counts["held_out"] += self.tokens.count > before
        else:
            self.train = self.tokens.count

    def nine_tenths(self) -> int:
        """Tokens to train on: nine tenths, and the rest of that document unless it is long."""
        total = self.tokens.count
        least = total - max(1, total // 10)
        ends = np.load(self.offsets.path, mmap_mode="r")
        end = int(ends[np.searchsorted(ends, least)])
        return end if self.of_documents and end <= least + min(total // 20, 1 << 20) else least

    def _encoded(self, kind: type, documents: list[Any]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Tokens, and which of them are learned, of documents of one kind."""
        if kind is bytes:
            yield from ((np.frombuffer(x, np.uint8), None) for x in documents)
        elif kind is Tokens:
            yield from (_below(x, self.vocabulary.vocab_size) for x in documents)
        else:
            assert isinstance(self.vocabulary, Tokenizer)
            yield from (_chats if kind is Chat else _texts)(documents, self.vocabulary)


def _below(document: Tokens, vocab_size: int) -> tuple[np.ndarray, np.ndarray | None]:
    ids = document.ids
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"{document.where}: got tokens from {ids.min()} to {ids.max()}, expected 0 or above and below "
            f"{vocab_size}: pass the `vocab_size` of their tokenizer"
        )
    return ids, document.loss_mask


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
    located = tokenizer.locate([x.text for x in rendered])
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
