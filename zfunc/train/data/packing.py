"""Documents packed on disk: a folder of NumPy files, which `np.load` reads, made once and kept.

`tokens.npy`, those held out last, with an end token after each document; `offsets.npy`, where each document begins
and the last one ends; and, where some tokens are not learned, `mask.npy`, false for these. They are written once, a
few documents in memory at a time, and again when a source file, the tokenizer, or the code that reads them changes.
So a batch is a pure function of seed and position, as from any other data (`zfunc.train.data.corpus`).
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from zfunc.checkpoint.durable_files import sync
from zfunc.core.display import counted
from zfunc.errors import DiskError, explain_os_errors, refuse, setting
from zfunc.planner.kept_costs import code_digest
from zfunc.train.data.corpus import Corpus, TokenStream, two_streams
from zfunc.train.data.documents import DocumentSource
from zfunc.train.data.encoding import encoded_documents
from zfunc.train.data.files import named
from zfunc.train.data.records import CHAT
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary

SOURCES = Path(__file__).parent  # what they make of the same files changes with them, and with these packages
PACKAGES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow")


def pack_documents(
    name: str,
    source: DocumentSource,
    cache: Path,
    vocabulary: Vocabulary,
    split: bool,
    rows: tuple[int, str] | None,
    pairs: bool,
) -> Corpus:
    """The corpus of the documents of `source`, tokenized into a folder in `cache`, or read from that folder
    if it exists. `rows`, for sequences of whole documents: their length and `long_documents`. `split`,
    `pairs`: as in `open_data`."""
    folder = _packed_folder(name, source, cache, vocabulary, bool(rows), pairs)
    # What was packed
    # What was packed
    packed = json.loads(folder.joinpath("corpus.json").read_text())
    tokens, offsets = (np.load(folder / f"{x}.npy", mmap_mode="r") for x in ("tokens", "offsets"))
    mask = np.load(folder / "mask.npy", mmap_mode="r") if packed["masked"] else None
    unit = "bytes" if vocabulary is BYTES else "tokens"
    lines = [f"{name}: {packed['counted']}, {len(tokens):,} {unit}"]
    if not isinstance(vocabulary, Tokenizer):
        lines.append(f"tokens below {vocabulary.vocab_size:,}, as they are, without end tokens")
    elif vocabulary is not BYTES:
        size = f"vocabulary {vocabulary.vocab_size:,}"
        lines.append(f"tokenizer: {vocabulary.name}, {size}, end token {vocabulary.end}")
        if len(vocabulary.before):
            lines.append(f"documents begin with {vocabulary.before.tolist()}, as the tokenizer has it")
    lines += [*packed["lines"], *source.notes]
    # What is trained on, and what is held out
    end: int = packed["train"] if split or source.held_out_split else len(tokens)
    masks = (None, None) if mask is None else (mask[:end], mask[end:])
    parts = two_streams(name, (tokens[:end], tokens[end:]), masks)
    lines += [f"held out: {packed['held_out']}, {len(parts[1]):,} {unit}"] if split else []
    if rows is not None:
        ends = offsets[1:]
        both = np.append(ends[ends < end], end), ends[ends > end] - end
        parts = [part.of_whole_documents(x, *rows, pairs) for part, x in zip(parts, both, strict=True)]
        lines += _rows(parts[0], both[0], *rows)
    return Corpus(name, *parts, vocabulary.vocab_size, tuple(lines))


def _packed_folder(
    name: str, source: DocumentSource, cache: Path, vocabulary: Vocabulary, whole: bool, pairs: bool
) -> Path:
    """The folder in `cache` that has the tokens of the documents of `source`; made, in place of older ones of the
    same data, unless it exists. `whole`: whether sequences have whole documents."""
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in source.files]
    code = code_digest(SOURCES, *PACKAGES)
    of = (source.columns, source.held_out_split, whole, pairs)
    data = (os.path.abspath(name), vocabulary.digest, *of)
    begin = f".packed-{_short_hash(data)}-"  # hidden: `cache` may lie in the folder that is read
    folder = cache / f"{begin}{_short_hash((code, stats))}"
    if folder.is_dir():
        return folder
    with _keeping_tokens(cache):
        cache.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=cache, prefix=".packing-", ignore_cleanup_errors=True)
    with made as unfinished:
        with _keeping_tokens(cache, errno.ENOSPC, errno.EDQUOT):  # other errors are of the data
            _write(Path(unfinished), name, source, vocabulary, whole, pairs)
        with suppress(OSError):  # another process was first
            os.rename(unfinished, folder)
    for older in cache.glob(f"{begin}*"):  # of the same data, by what it was or how it was read then
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)
    return folder


@contextmanager
def _keeping_tokens(cache: Path, *codes: int) -> Generator[None]:
    """A context that turns an OSError, of one of the `codes` if given, into a DiskError of the folder `cache`."""
    try:
        yield
    except OSError as error:
        if codes and error.errno not in codes:
            raise
        do = "set XDG_CACHE_HOME to a folder with room that can be written"
        with explain_os_errors(
            DiskError, cache, "keeping the data's tokens", dict.fromkeys(errno.errorcode, do)
        ):
            raise


def _short_hash(values: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr(values).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _rows(stream: TokenStream, ends: np.ndarray, seq_length: int, long: str) -> list[str]:
    """Log lines on how documents (`ends`: token offsets) fill sequences. Raises ValueError if none is filled."""
    count, used = stream.num_sequences(seq_length), 0 if stream.bounds is None else int(stream.bounds[-1])
    longer, of_all = np.count_nonzero(np.diff(ends, prepend=0) > seq_length), counted(len(ends), "document")
    if not count:
        got = (
            f"{of_all}, {longer:,} of them longer than {setting('seq_length', seq_length)}, and none with a "
        )
        got += "label in a sequence"
        refuse((), got, "one at least", "raise `seq_length`" if longer else "give it a label")
    what = {
        "drop": "dropped",
        "keep-end": "their ends alone are kept",
        "cut": "cut into pieces, each of which sees nothing of the others; long_documents says otherwise",
    }
    if stream.pairs:
        what |= {"drop": "dropped, with the other answer", "cut": "their beginnings alone are kept"}
    lines = [
        f"sequences: {count:,} of {seq_length} tokens, of whole documents, "
        f"{1 - used / (count * seq_length):.0%} padding"
    ]
    lines += [f"longer than that: {longer:,} of {of_all}: {what[long]}"] if longer else []
    left_out = len(stream) - used
    return [*lines, f"left out: {counted(left_out, 'token')} that no label needs"] if left_out else lines


class _GrowingArray:
    """A NumPy file of one dimension at `path`, which grows by `append`; `close` writes its length."""

    def __init__(self, path: Path, dtype: "np.dtype[Any]") -> None:
        self.path, self.length, self._dtype = path, 0, dtype
        self._file = path.open("wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype))
        self.length += len(values)

    def close(self) -> None:
        with self._file:
            self._write_header()

    def _write_header(self) -> None:  # NumPy's has room for any length
        self._file.seek(0)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _write(
    folder: Path, name: str, source: DocumentSource, vocabulary: Vocabulary, whole: bool, pairs: bool
) -> None:
    """Write the tokens of `source` as NumPy files in `folder`, and corpus.json, which describes them. `whole`:
    sequences have whole documents; `pairs`: as in `open_data`. Raises ValueError if nothing is to be learned."""
    counts, train, of_bytes = Counter[str](), 0, True
    with ExitStack() as stack:

        def array(name: str, dtype: "np.dtype[Any]") -> _GrowingArray:
            return stack.enter_context(closing(_GrowingArray(folder / f"{name}.npy", dtype)))

        tokens, mask = array("tokens", vocabulary.dtype), array("mask", np.dtype(bool))
        offsets = array("offsets", np.dtype(np.int64))
        offsets.append(np.zeros(1))
        for is_held_out, documents in source.parts(counts):
            for kind, (ids, learned) in encoded_documents(documents, vocabulary, whole=pairs):
                learned = np.ones(len(ids), bool) if learned is None else learned
                tokens.append(ids)
                mask.append(learned)
                offsets.append(np.array([tokens.length]))
                known = int(np.count_nonzero(learned))
                counts.update(documents=1, masked=kind == CHAT or known < len(ids), learned=known)
                of_bytes &= kind == "bytes"
            train = train if is_held_out else tokens.length
    _refuse_nothing_to_learn(name, counts, tokens.length)
    for x in (tokens, mask, offsets):
        sync(x.path)
    if not counts["masked"]:
        mask.path.unlink()
    if source.held_out_split:
        held_out = f"the split {source.held_out_split}"
    elif 0.01 <= (tokens.length - train) / tokens.length <= 0.5:
        held_out = "files, by a hash of their names"
    else:
        ends = np.load(offsets.path, mmap_mode="r")
        train, held_out = _end_of_training(ends, pairs, anywhere=of_bytes and not whole), "the end"
    read = len(source.files) - counts["empty"] - counts["binary"]
    about = {
        "counted": f"{counted(read, 'file')}, {counted(counts['documents'], 'document')}",
        "lines": _notes(counts, tokens.length),
        **{"held_out": held_out, "train": train, "masked": counts["masked"] > 0},
    }
    folder.joinpath("corpus.json").write_text(json.dumps(about))


def _refuse_nothing_to_learn(name: str, counts: Counter[str], tokens: int) -> None:
    """Raise ValueError if the data called `name` has no `tokens`, or none that is learned."""
    if not tokens:
        left_out = _left_out_files(counts)
        got = f"got no text in {name}{left_out and f' ({left_out})'}, expected at least one document"
        do = "save UTF-16 as UTF-8, or " * (counts["binary"] > 0)
        raise ValueError(f"{got}: {do}name other data, or a .bin of tokens")
    if not counts["learned"]:
        got = f"nothing to learn in {counted(counts['documents'], 'document')} of {name}"
        do = "look at their weights or labels, and at the chat template"
        refuse((), got, "a label at least", do, ValueError)


def _end_of_training(offsets: np.ndarray, pairs: bool, anywhere: bool) -> int:
    """The token at which the held-out end begins, about 10 % of all tokens before the last: `anywhere`, or where
    a document begins, if one begins near; with `pairs` between two pairs of documents. `offsets` [documents + 1]
    has the first token of each document, and the end of the last."""
    tokens = int(offsets[-1])
    wanted = tokens - max(1, tokens // 10)
    if pairs:
        offsets = offsets[::2]
        pair = int(np.searchsorted(offsets, wanted))
        return int(offsets[max(1, min(pair, len(offsets) - 2))])  # of several pairs one at least is held out
    near = int(offsets[np.searchsorted(offsets, wanted)])
    return wanted if anywhere or near > wanted + min(tokens // 20, 1 << 20) else near


def _left_out_files(counts: Counter[str]) -> str:
    return " and ".join(counted(counts[x], f"{x} file") for x in ("empty", "binary") if counts[x])


def _notes(counts: Counter[str], tokens: int) -> list[str]:
    """Log lines on what of a number of `tokens` is learned and what of the data is left out, by its `counts`."""
    files, keys = (
        named(sorted(x.removeprefix(kind) for x in counts if x.startswith(kind)))
        for kind in ("file ", "key ")
    )
    left_out, masked, turns = _left_out_files(counts), counts["masked"], counts["turns"]
    notes = (
        (masked, f"learned: {counts['learned']:,} of {tokens:,}, in {counted(masked, 'document')} not all"),
        (left_out, f"left out: {left_out}{files and ': ' + files}"),
        (keys, f"left out: keys of records that are not read: {keys}"),
        (turns, f"left out: {counted(turns, 'message')} after the last turn of the assistant"),
    )
    return [note for count, note in notes if count]
