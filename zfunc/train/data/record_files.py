"""Records of JSONL, Parquet and Arrow files, trained on as they are read, none of them in memory or packed first.

Records are drawn from a shuffle buffer: so many are read, and passed on in an order drawn by seed and place, before
the next are. So a place is a few numbers, where the buffer begins and how many of it were passed on: it is filled
again on a resume, and no record is lost or seen twice. A pass over all files is followed by one in another order.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, define, evolve, field, frozen

from zfunc.checkpoint.strict_json import Count, JsonNode
from zfunc.core.display import counted
from zfunc.train.data.corpus import Corpus, TokenStream, permute
from zfunc.train.data.encoding import encoded_documents
from zfunc.train.data.files import TABLES, File, named, stream_files
from zfunc.train.data.formats import lines_after, parsed
from zfunc.train.data.records import IDS, RECORDS, record_documents
from zfunc.train.data.stream import PackedStream, StreamedBatches
from zfunc.train.data.tables import table_rows
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary

Record = tuple[str, Any]  # its place, for errors; and a line, or a row


@frozen
class RecordPlace:
    """A place in RecordFiles: where the shuffle buffer's records begin, and how many of them were `taken`.
    `epoch` counts passes over the files, `file` files of that pass; `offset` is in bytes (in rows for a
    table), `line` in lines."""

    epoch: Count = 0
    file: Count = 0
    offset: Count = 0
    line: Count = 0
    taken: Count = 0


@define(eq=False)
class RecordFiles:
    """The records of `files`, pass after pass, without an end: a source of a PackedStream. `buffer` is the number
    of records that are shuffled together; with 1 they come in the order of the files."""

    files: list[File]
    buffer: int
    seed: int
    _place: RecordPlace = field(init=False, factory=RecordPlace)

    def state_dict(self) -> dict[str, Any]:
        """The place of the next record, for `load_state_dict`."""
        return asdict(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the place `state`, which `state_dict` returned."""
        self._place = JsonNode(state, "the place in a stream").read(RecordPlace)

    def __iter__(self) -> Iterator[Record]:
        """Iterate over records from the current place on, without end. Raises ValueError if there are none."""
        records = self._from(self._place)
        while True:
            begin, filled = self._place, [*islice(records, self.buffer)]
            if not filled:
                if begin == RecordPlace(begin.epoch):
                    raise ValueError(f"got no record in {named(x for x, _ in self.files)}: name other data")
                self._place = RecordPlace(begin.epoch + 1)
                records = self._from(self._place)
                continue
            key = self.seed, begin.epoch, begin.file, begin.offset
            for n in range(begin.taken, len(filled)):
                self._place = evolve(begin, taken=n + 1)
                yield filled[permute(n, len(filled), *key)][0]
            self._place = filled[-1][1]

    def _from(self, begin: RecordPlace) -> Iterator[tuple[Record, RecordPlace]]:
        """Yield the records from `begin` to the end of a pass over the files, each with the place after
        it."""
        for number in range(begin.file, count := len(self.files)):
            index = permute(number, count, self.seed, begin.epoch) if self.buffer > 1 else number
            path, offset = self.files[index][1], begin.offset if number == begin.file else 0
            if path.suffix in TABLES:
                for n, row in enumerate(table_rows(path, offset), offset):
                    yield (f"{path}, row {n}", row), RecordPlace(begin.epoch, number, n + 1)
            else:
                for where, content, *after in lines_after(path, offset, begin.line if offset else 0):
                    yield (where, content), RecordPlace(begin.epoch, number, *after)


def open_stream(
    path: Path,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    seq_length: int,
    batch_size: int,
    buffer: int,
    seed: int,
) -> Corpus:
    """The records of the files at `path` (`stream_files` says which), as a corpus that is read while
    training. Its held-out tokens are the first of the data, and serve only as the prompt of samples.
    `vocab_size` is for data of tokens. Raises ValueError, with file and line, for a record that is no
    document."""
    (files, left_out), counts = stream_files(path), Counter[str]()
    rows = (row for _, x in files if x.suffix in TABLES for row in table_rows(x, 0))
    tokenized = IDS in next(rows, {})
    vocabulary = Vocabulary(f"below {vocab_size}", vocab_size) if tokenized else tokenizer or BYTES

    def source() -> RecordFiles:
        return RecordFiles(files, buffer, seed)

    tokens = _tokens_of(vocabulary, counts)
    first, read = np.zeros(0, np.int64), source()
    for record in read:
        if len(first) > seq_length or read.state_dict()["epoch"]:
            break
        first = np.concatenate([first, tokens(record)])
    if not len(first):
        raise ValueError(f"got no text in {path}, expected at least one document: name other data")
    ids = np.where(first < 0, ~first, first).astype(vocabulary.dtype)
    begin = TokenStream(ids, None if (first >= 0).all() else first >= 0, str(path))
    keys = named(sorted(x.removeprefix("key ") for x in counts if x.startswith("key ")))
    size = sum(x.stat().st_size for _, x in files)
    all_files = counted(len(files), "file")
    lines = [f"{path}: a stream of {all_files}, {size:,} bytes: {named(x for x, _ in files)}"]
    lines += [f"left out: {named(left_out)}"] if left_out else []
    lines += [f"left out: keys of records that are not read: {keys}"] if keys else []
    packed = PackedStream(source(), tokens, seq_length=seq_length, batch_size=batch_size)
    stream = StreamedBatches(packed)
    return Corpus(str(path), begin, begin, vocabulary.vocab_size, tuple(lines), stream=stream)


def _tokens_of(vocabulary: Vocabulary, counts: Counter[str]) -> Callable[[Record], np.ndarray]:
    def tokens(record: Record) -> np.ndarray:
        where, value = record
        value = parsed(value, where) if isinstance(value, bytes) else value
        kinds = RECORDS if isinstance(record[1], dict) else RECORDS[1:]
        made = record_documents(value, where, counts, kinds)
        each = [
            ids if learned is None else np.where(learned, ids, ~ids.astype(np.int64))
            for _, (ids, learned) in encoded_documents(made, vocabulary)
        ]
        return np.concatenate([np.zeros(0, np.int64), *each])

    return tokens
