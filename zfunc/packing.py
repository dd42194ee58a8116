"""Documents packed: tokens one after another with an end token after each, and which of them are learned.

The invariant: what is packed is one file that is mapped, so a batch of it is a pure function of seed and position,
as of any other data (`zfunc.data`), however many documents there are. The file is made once, and made again when a
document's file, the tokenizer or this module's form has changed.
"""

import hashlib
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from attrs import define, field, frozen

from zfunc.data import Corpus, Source, is_held_out, memory_map, open_corpus, stdlib_files, unreadable, walk
from zfunc.documents import JSONL, Document, records, whole
from zfunc.tokenizing import BYTES, Tokenizer

_FORM = 1  # of the file
_AT_ONCE = 64  # documents that are tokenized together
_CHUNK = 1 << 20  # tokens looked at together
_FOOTER = struct.Struct("<8Q")


def open_data(
    path: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    dtype: str = "uint16",
    vocab_size: int = 50257,
) -> Corpus:
    """Open what is at `path` for training: what `zfunc.data.open_corpus` takes, and JSONL, with a tokenizer or as
    bytes.

    - A `.jsonl` file has a document a line: `{"text": ...}`, or `{"prompt": ..., "completion": ...}`, joined as
      they are. Of a prompt no token is learned: its labels are -100. A folder may have such files and text files.
    - With a `tokenizer`, text files and records are its tokens; a text file is one document, in UTF-8. A `.bin` has
      tokens already and takes none.

    Documents follow one another in the order of the files, with the tokenizer's end token after each (zero, for
    bytes), and are cut into sequences wherever those end. Held out are whole files, about 8 %, where that leaves
    neither under 1 % nor over half of the tokens; else whole documents at the end, about 10 %.

    Raises ValueError, with file and line, for what is no document, and as `open_corpus` does.
    """
    path = None if path is None else Path(path)
    tokens = path is not None and holds_tokens(path)
    if tokens and tokenizer is not None:
        raise ValueError(
            f"--tokenizer: got it for {path}, which holds tokens, expected text or JSONL: leave it out"
        )
    if tokens or (path is not None and not path.exists()):
        return open_corpus(path, cache=cache, dtype=dtype, vocab_size=vocab_size)
    sources = _sources(path)
    if tokenizer is None and not any(name.endswith(JSONL) for name, _ in sources):
        return open_corpus(path, cache=cache, dtype=dtype, vocab_size=vocab_size)
    name = "Python standard library" if path is None else str(path)
    return _open(name, sources, Path(cache), tokenizer or BYTES)


def holds_tokens(path: Path) -> bool:
    """Whether `path` is a `.bin`, or a folder with a `train.bin`."""
    return path.suffix == ".bin" or (path / "train.bin").is_file()


def _sources(path: Path | None) -> list[Source]:
    if path is None:
        return list(stdlib_files())
    return walk(path, lambda part: part.startswith(".")) if path.is_dir() else [(path.name, path)]


@frozen
class _Packed:
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


def _open(name: str, sources: list[Source], cache: Path, tokenizer: Tokenizer) -> Corpus:
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in sources]
    key = hashlib.sha256(repr((_FORM, tokenizer.digest, stats)).encode("utf-8", "surrogateescape"))
    path = cache / f".packed-{key.hexdigest()[:16]}.bin"  # hidden: `cache` may lie in the folder that is read
    if not path.is_file():
        _pack(name, sources, path, tokenizer)
    content = memory_map(path, np.dtype(np.uint8))
    got = _Packed(*_FOOTER.unpack(content[-_FOOTER.size :].tobytes()))
    size = tokenizer.dtype.itemsize * got.tokens
    tokens = content[:size].view(tokenizer.dtype)
    learned = content[size : size + got.tokens] if got.pairs else None
    return Corpus(
        name,
        tokens[: got.train],
        tokens[got.train :],
        tokenizer.vocab_size,
        tuple(_lines(name, got, tokenizer, learned)),
        None if learned is None else learned[: got.train],
        None if learned is None else learned[got.train :],
    )


def _lines(name: str, got: _Packed, tokenizer: Tokenizer, learned: np.ndarray | None) -> Iterator[str]:
    unit = "bytes" if tokenizer is BYTES else "tokens"
    yield f"{name}: {got.files:,} files, {got.documents:,} documents, {got.tokens:,} {unit}"
    if tokenizer is not BYTES:
        yield f"tokenizer: {tokenizer.name}, vocabulary {tokenizer.vocab_size:,}, end token {tokenizer.end}"
    if learned is not None:
        count = f"{np.count_nonzero(learned):,} {unit}"
        yield f"learned: {count}, completions and texts; the prompts of {got.pairs:,} are given"
    by_name = f"{got.held_out_files:,} of the files, by a hash of their names"
    how = by_name if got.held_out_files else "the end (too few files to hold whole ones out)"
    yield f"held out: {how}, {got.tokens - got.train:,} {unit}"
    if got.left_out:
        yield f"left out: {got.left_out:,} empty or binary files"
    if got.unused:
        yield f"left out: {got.unused:,} keys of records that are neither text, nor prompt and completion"


@define(eq=False)
class _Packing:
    """Documents on their way into two files: tokens, and which are learned."""

    tokenizer: Tokenizer
    tokens: BinaryIO
    learned: BinaryIO
    total: int = 0
    documents: int = 0
    pairs: int = 0
    unused: Counter[str] = field(factory=Counter[str])

    def add(self, path: Path) -> bool:
        """Append a file; whether there was a document in it."""
        before, documents = self.documents, self._documents(path)
        try:
            while some := list(islice(documents, _AT_ONCE)):
                self._append(some)
        except OSError as error:
            raise unreadable(path, error) from error
        return self.documents > before

    def _documents(self, path: Path) -> Iterator[Document]:
        if path.suffix == JSONL:
            yield from records(path, self.unused)
        elif (one := whole(path)) is not None:
            yield one

    def _append(self, some: list[Document]) -> None:
        prompts = self.tokenizer.encode([x.prompt for x in some])
        texts = self.tokenizer.encode([x.text for x in some])
        for one, prompt, text in zip(some, prompts, texts, strict=True):
            if one.text or one.prompt:
                joined = np.concatenate([prompt, text, [self.tokenizer.end]])
                self.tokens.write(joined.astype(self.tokenizer.dtype).tobytes())
                self.learned.write(bytes(len(prompt)) + b"\1" * (len(text) + 1))
                self.total += len(joined)
                self.documents += 1
                self.pairs += one.prompt != ""


def _pack(name: str, sources: list[Source], target: Path, tokenizer: Tokenizer) -> None:
    """Write the documents into one file and rename it into place when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=target.parent, prefix=".packed-", suffix=".partial")
    try:
        with os.fdopen(descriptor, "w+b") as out, tempfile.TemporaryFile(dir=target.parent) as learned:
            packing = _Packing(tokenizer, out, learned)
            used = sum(packing.add(path) for relative, path in sources if not is_held_out(relative))
            train = packing.total
            held_out = sum(packing.add(path) for relative, path in sources if is_held_out(relative))
            total = packing.total
            if not total:
                raise ValueError(
                    f"got no text in {name} ({len(sources):,} files), expected at least one document: name other "
                    "data, or a .bin of tokens"
                )
            if not 0.01 <= (total - train) / total <= 0.5:
                out.flush()
                train, used, held_out = _split(Path(partial), tokenizer), used + held_out, 0
            if packing.pairs:
                learned.seek(0)
                shutil.copyfileobj(learned, out)
            files = used + held_out
            counts = (packing.documents, packing.pairs, packing.unused.total())
            out.write(_FOOTER.pack(files, held_out, len(sources) - files, *counts, total, train))
        os.replace(partial, target)
    except BaseException:
        os.unlink(partial)
        raise


def _split(path: Path, tokenizer: Tokenizer) -> int:
    """Tokens up to the first end of a document after nine tenths of them; of a long document, up to that."""
    tokens = memory_map(path, tokenizer.dtype)
    least = len(tokens) - max(1, len(tokens) // 10)
    near = tokens[max(0, least - 1) : least + min(len(tokens) // 20, _CHUNK)]
    ends = np.flatnonzero(near == tokenizer.end)
    return max(0, least - 1) + int(ends[0]) + 1 if len(ends) else least
