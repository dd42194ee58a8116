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
from contextlib import ExitStack, contextmanager, suppress
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
    stats = [(relative, path.stat().st_size, path.stat().st_mtime_ns) for relative, path in source.files]
    code = code_digest(SOURCES, *PACKAGES)
    of = (source.columns, source.held_out_split, bool(rows), pairs)
    data = (os.path.abspath(name), vocabulary.digest, *of)
    begin = f".packed-{_short_hash(data)}-"  # hidden: `cache` may lie in the folder that is read
    folder = cache / f"{begin}{_short_hash((code, stats))}"
    if not folder.is_dir():
        with _keeping_tokens(cache):
            cache.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(dir=cache, prefix=".packing-", ignore_cleanup_errors=True)
        with made as unfinished:
            with _keeping_tokens(cache, errno.ENOSPC, errno.EDQUOT):  # other errors are of the data
                _write(Path(unfinished), name, source, vocabulary, bool(rows), pairs)
            with suppress(OSError):  # another process was first
                os.rename(unfinished, folder)
        for older in cache.glob(f"{begin}*"):  # of the same data, by what it was or how it was read then
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)
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
    # What of it is trained on, and what is held out
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


def _write(
    folder: Path,
    name: str,
    source: DocumentSource,
    vocabulary: Vocabulary,
    whole_documents: bool,
    pairs_of_answers: bool,
) -> None:
    """Write the tokens of `source` as NumPy files in `folder`. Raises ValueError without a document."""
    counts, train, of_bytes = Counter[str](), 0, not whole_documents
    dtypes = {"tokens": vocabulary.dtype, "mask": np.dtype(bool), "offsets": np.dtype(np.int64)}
    paths, lengths = {x: folder / f"{x}.npy" for x in dtypes}, Counter[str]()
    with ExitStack() as stack:
        files = {x: stack.enter_context(path.open("wb")) for x, path in paths.items()}

        def write_headers() -> None:  # NumPy's has room for any length
            for x, dtype in dtypes.items():
                files[x].seek(0)
                header = {"descr": dtype.str, "fortran_order": False, "shape": (lengths[x],)}
                np.lib.format.write_array_header_1_0(files[x], header)

        def append(**values: np.ndarray) -> None:
            for x, more in values.items():
                files[x].write(np.ascontiguousarray(more, dtypes[x]))
                lengths[x] += len(more)

        write_headers()
        append(offsets=np.zeros(1))
        for held_out, documents in source.parts(counts):
            for kind, (ids, learned) in encoded_documents(documents, vocabulary, whole=pairs_of_answers):
                learned = np.ones(len(ids), bool) if learned is None else learned
                append(tokens=ids, mask=learned)
                append(offsets=np.array([lengths["tokens"]]))
                of_bytes &= kind == "bytes"
                known = int(np.count_nonzero(learned))
                pair = kind == CHAT or known < len(ids)
                counts.update(documents=1, pairs=pair, learned=known)
            train = train if held_out else lengths["tokens"]
        write_headers()
    total, empty, binary = lengths["tokens"], counts["empty"], counts["binary"]
    left_out = " and ".join(counted(counts[x], f"{x} file") for x in ("empty", "binary") if counts[x])
    if not total:
        got = f"got no text in {name}{left_out and f' ({left_out})'}, expected at least one document"
        do = "save UTF-16 as UTF-8, or " * (binary > 0)
        raise ValueError(f"{got}: {do}name other data, or a .bin of tokens")
    if not counts["learned"]:
        got = f"nothing to learn in {counted(counts['documents'], 'document')} of {name}"
        do = "look at their weights or labels, and at the chat template"
        refuse((), got, "a label at least", do, ValueError)
    for path in paths.values():
        sync(path)
    if not counts["pairs"]:
        paths["mask"].unlink()
    # What is held out: a split, files, or the end, from a document on where that is near
    where = f"the split {source.held_out_split}"
    if not source.held_out_split:
        where = "files, by a hash of their names"
        if not 0.01 <= (total - train) / total <= 0.5:
            train, where = total - max(1, total // 10), "the end"
            ends = np.load(paths["offsets"], mmap_mode="r")[:: 2 if pairs_of_answers else 1]
            at = int(np.searchsorted(ends, train))
            end = int(ends[at])
            if pairs_of_answers:
                train = int(ends[max(1, min(at, len(ends) - 2))])  # whole pairs, the last of several held out
            elif not of_bytes and end <= train + min(total // 20, 1 << 20):
                train = end
    pairs, turns, read = counts["pairs"], counts["turns"], len(source.files) - empty - binary
    keys, files_of = (
        named(sorted(x.removeprefix(kind) for x in counts if x.startswith(kind)))
        for kind in ("key ", "file ")
    )
    said = (
        (pairs, f"learned: {counts['learned']:,} of {total:,}, in {counted(pairs, 'document')} not all"),
        (left_out, f"left out: {left_out}{files_of and ': ' + files_of}"),
        (keys, f"left out: keys of records that are not read: {keys}"),
        (turns, f"left out: {counted(turns, 'message')} after the last turn of the assistant"),
    )
    meta = {
        "counted": f"{counted(read, 'file')}, {counted(counts['documents'], 'document')}",
        "lines": [line for count, line in said if count],
        **{"held_out": where, "train": train, "masked": pairs > 0},
    }
    folder.joinpath("corpus.json").write_text(json.dumps(meta))
