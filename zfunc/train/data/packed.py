"""Documents in one file: their tokens one after another, those held out last, and which of them are learned.

The invariant: the file is there whole, or not at all. At most a few documents are in memory at a time, however many
there are.
"""

import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from attrs import define, field, frozen

from zfunc.checkpoint.durable_files import atomic_replace
from zfunc.train.data.arrow_dataset import Tokens
from zfunc.train.data.corpus import PRIVATE, Source, memory_map, unreadable
from zfunc.train.data.documents import Document
from zfunc.train.data.tokenizer import Tokenizer, Vocabulary

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


@define(eq=False)
class _Packing:
    """Documents on their way into three files: tokens, which are learned, and where each document ends."""

    reading: Reading
    tokens: BinaryIO
    learned: BinaryIO
    ends: BinaryIO
    total: int = 0
    documents: int = 0
    pairs: int = 0
    unused: Counter[str] = field(factory=Counter[str])

    def add(self, path: Path) -> bool:
        """Append a file; whether there was a document in it."""
        before, documents = self.documents, self.reading.documents(path, self.unused)
        try:
            while some := list(islice(documents, _AT_ONCE)):
                self._append(some)
        except OSError as error:
            raise unreadable(path, error) from error
        return self.documents > before

    def _append(self, some: list[Document | Tokens]) -> None:
        for one in some:
            if isinstance(one, Tokens) and len(one.ids):
                learned = one.learned if one.learned is not None else np.ones(len(one.ids), bool)
                self._write(one.ids, learned.tobytes(), given=not learned.all())
        self._encode([x for x in some if isinstance(x, Document) and (x.text or x.prompt)])

    def _encode(self, some: list[Document]) -> None:
        if not some:
            return
        tokenizer = self.reading.vocabulary
        assert isinstance(tokenizer, Tokenizer)
        prompts, texts = tokenizer.encode([x.prompt for x in some]), tokenizer.encode([x.text for x in some])
        for one, prompt, text in zip(some, prompts, texts, strict=True):
            joined = np.concatenate([prompt, text, [tokenizer.end]])
            self._write(joined, bytes(len(prompt)) + b"\1" * (len(text) + 1), given=one.prompt != "")

    def _write(self, tokens: np.ndarray, learned: bytes, *, given: bool) -> None:
        self.tokens.write(tokens.astype(self.reading.vocabulary.dtype).tobytes())
        self.learned.write(learned)
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
        tempfile.TemporaryFile(dir=target.parent) as learned,
        tempfile.NamedTemporaryFile(dir=target.parent) as ends,
    ):
        packing = _Packing(reading, out, learned, ends)
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
            learned.seek(0)
            shutil.copyfileobj(learned, out)
        files = used + held_out
        counts = (packing.documents, packing.pairs, packing.unused.total())
        out.write(_FOOTER.pack(files, held_out, len(sources) - files, *counts, total, train))


def _split(path: Path, total: int) -> int:
    """Tokens up to the first end of a document after nine tenths of them; of a long document, up to that."""
    ends, least = memory_map(path, np.dtype("<u8")), total - max(1, total // 10)
    end = int(ends[np.searchsorted(ends, least)])
    return end if end <= least + min(total // 20, _CHUNK) else least
