"""Data on disk as a corpus: tokens that are mapped where they are, or documents that are packed first.

Packed documents are a folder of NumPy files, which `np.load` reads: `tokens.npy`, those held out last, with an end
token after each document; `offsets.npy`, where each document begins and the last one ends; and, where some tokens
are not learned, `mask.npy`, false for these. They are written once, a few documents in memory at a time, and
again when a source file, the tokenizer, or the code that reads them changes. So a batch is a pure function of seed
and position, as from any other data (`zfunc.train.data.corpus`).
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from zfunc.checkpoint.durable_files import sync
from zfunc.core.display import counted
from zfunc.errors import DiskError, explain_os_errors, refuse, setting
from zfunc.models.loss_pieces import IGNORE_INDEX
from zfunc.planner.kept_costs import code_digest
from zfunc.train.data.corpus import Corpus, TokenStream
from zfunc.train.data.documents import (
    DocumentSource,
    file_documents,
    holds_tokens,
    is_saved_dataset,
    named,
    open_saved,
    stdlib_files,
    walk,
)
from zfunc.train.data.formats import COMPRESSED, FORMATS, is_packed, opened, suffix_of
from zfunc.train.data.records import CHAT, IDS, LABELS, MASK, Document, preference_of
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary
from zfunc.train.settings import TOKEN_TYPES

SOURCES = Path(__file__).parent  # what they make of the same files changes with them, and with these packages
PACKAGES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow")
STDLIB = "Python standard library"
_HEADER = "which llm.c or modded-nanogpt wrote, with 1,024 bytes before the tokens"
_OF_OTHERS = {  # what files begin with whose tokens are in another form: what they are, and what to do
    b"\x93NUMPY": (
        "which is an array of NumPy",
        "write its numbers by array.astype('uint16').tofile('tokens.bin')",
    ),
    **{
        number.to_bytes(4, "little"): (_HEADER, f"cut them off, by tail -c +1025 OLD > NEW.bin{more}")
        for number, more in ((20240520, ""), (20240801, f", and pass {setting('dtype', 'uint32')}"))
    },
}
_FIRST = 256  # tokens by which the width of a file's numbers is told
_DOCUMENTS = 64  # tokenized in one call
_LONG = 1 << 20  # characters of a document after which no more are read in one call
Encoded = tuple[
    np.ndarray, np.ndarray | None
]  # tokens of a document, and which are learned; None: all of them


def open_data(
    path: Path | None = None,
    *,
    cache: Path,
    tokenizer: Tokenizer | None = None,
    dtype: str = "uint16",
    vocab_size: int = 50257,
    split: bool = True,
    whole_documents: int | None = None,
    long_documents: str = "cut",
    pairs: bool = False,
) -> Corpus:
    """Open the data at `path`; without a path, the sources of Python's standard library.

    A `.bin`, or a folder with a `train.bin`, has tokens of the `dtype`, compared with `vocab_size` batch by
    batch, and a `val.bin` beside it is held out. Other data is documents, with the tokenizer's end token
    after each: text, records (JSONL, JSON, CSV), a folder of them, Parquet or a saved dataset
    (docs/finetuning.md has their keys). Without a tokenizer, bytes are the tokens, and zero is the end.
    Sequences are cut regardless of documents, or have whole documents, up to `whole_documents` tokens;
    `long_documents` tells how to treat longer. With `pairs`, records are preferences: a sequence has a prompt
    with one answer, the chosen before the rejected.

    The held-out part is a dataset's split validation or test; or about 8 % of the files, by a hash of their
    names, where that is 1 to 50 % of the tokens; else the last documents, about 10 %. Without `split`, only a
    split of the data itself is held out. `cache` is the folder of packed documents.

    Raises OSError for what cannot be read, and ValueError, with file and line, for what is not a document.
    """
    if path is not None and path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"got {path}, which is no file (a pipe?), expected a file or a folder: write it to one"
        )
    saved = None if path is None or not is_saved_dataset(path) else open_saved(path, pairs=pairs)
    tokenized = saved is not None and saved.tokenized
    numbered = path is not None and saved is None and holds_tokens(path)
    if pairs and (path is None or numbered):
        preference_of("tokens" if numbered else "texts", str(path or STDLIB), Counter())
    if numbered and whole_documents:
        got = f"documents for {path}, which does not say where documents end"
        refuse("packing", got, "text, JSONL or a saved dataset", "name one of them, or leave `packing` out")
    if (numbered or tokenized) and tokenizer is not None:
        refuse("tokenizer", f"one for {path}, which holds tokens", "text or JSONL", "leave it out")
    if path is not None and numbered:
        path = path / "train.bin" if path.is_dir() else path
        return _mapped(path, np.dtype(dtype).newbyteorder("<"), vocab_size, split)
    vocabulary = Vocabulary(f"below {vocab_size}", vocab_size) if tokenized else tokenizer or BYTES
    text, folder = vocabulary is not BYTES, path is None or path.is_dir()
    plain = path is not None and not (saved or folder) and suffix_of(path) not in FORMATS
    if path is not None and plain:
        with opened(path) as file:
            if is_packed(begin := file.read(16)):
                raise ValueError(f"got {path}, which is compressed, expected what is in it: unpack it")
        _refuse_tokens_of_others(path, begin)
        if not (text or whole_documents or pairs or path.suffix.lower() in COMPRESSED):
            return _mapped(path, np.dtype(np.uint8), BYTES.vocab_size, split)
    files = stdlib_files() if path is None else walk(path) if folder else [(path.name, path)]
    source = saved or file_documents(files, text=text, folder=folder, pairs=pairs)
    rows = None if whole_documents is None else (whole_documents, long_documents)
    return _packed(str(path or STDLIB), source, cache, vocabulary, split, rows, pairs)


def _refuse_tokens_of_others(path: Path, begin: bytes) -> None:
    """Raise ValueError for a file at `path` that begins with the bytes `begin` of tokens in another form."""
    for head, (got, do) in _OF_OTHERS.items():
        if begin.startswith(head):
            refuse((), f"{path}, {got}", "tokens alone, as a .bin", do, ValueError)


def _refuse_wider(path: Path, first: np.ndarray) -> None:
    """Raise ValueError if of the `first` tokens of the file at `path` every second is 0, as halves of wider ones
    are."""
    if len(first) < _FIRST or first[1::2].any() or not first.any():
        return
    wider = f"uint{16 * first.dtype.itemsize}"
    do = f"pass {setting('dtype', wider)}" if wider in TOKEN_TYPES else f"write them as {TOKEN_TYPES[-1]}"
    got = f"{path}, in which every second {first.dtype.name} is 0, as if it were written as {wider}"
    refuse((), got, "tokens", do, ValueError)


def _mapped(path: Path, dtype: "np.dtype[Any]", vocab_size: int, split: bool) -> Corpus:
    """The corpus of the memory-mapped tokens at `path`; held out is `val.bin` beside it, or its end if `split`."""

    def opened(path: Path) -> np.ndarray:
        size = path.stat().st_size
        if size == 0:
            raise ValueError(f"got {path}, which is empty; expected data to train on; check how it was made")
        if size % dtype.itemsize:
            raise ValueError(
                f"got {path} of {size:,} bytes; expected a multiple of {dtype.itemsize} "
                f"({dtype.name}); check that the file is complete, and the dtype it was written in"
            )
        tokens = np.memmap(path, dtype, mode="r")
        if dtype.itemsize > 1:
            _refuse_tokens_of_others(path, tokens[:8].tobytes())
            _refuse_wider(path, tokens[:_FIRST])
        return tokens

    train, beside = opened(path), path.with_name("val.bin")
    if path.name == "train.bin" and beside.is_file():
        held_out, where = opened(beside), str(beside)
    else:
        end = len(train) - (max(1, len(train) // 10) if split else 0)
        train, held_out, where = train[:end], train[end:], "the end"
    unit, kind = ("bytes", "") if dtype.itemsize == 1 else ("tokens", f"{dtype.name} ")
    lines = [f"{path}: {len(train):,} {kind}{unit} to train on, vocabulary {vocab_size:,}"]
    lines += [f"held out: {where}, {len(held_out):,} {unit}"] if split else []
    parts = _streams(str(path), (train, held_out))
    return Corpus(str(path), *parts, vocab_size, tuple(lines))


def _streams(
    name: str, tokens: Iterable[np.ndarray], masks: Iterable[Any] = (None, None)
) -> list[TokenStream]:
    """The TokenStreams of training and of held-out `tokens`, each with its loss mask, named after `name`."""
    names = (name, f"the held-out part of {name}")
    return [TokenStream(*part) for part in zip(tokens, masks, names, strict=True)]


# --- packed documents -------------------------------------------------------------------------------------


def _packed(
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
    parts = _streams(name, (tokens[:end], tokens[end:]), masks)
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


# --- documents as tokens ----------------------------------------------------------------------------------


def encoded_documents(
    documents: Iterable[Document], vocabulary: Vocabulary, *, whole: bool = False
) -> Iterator[tuple[str, Encoded]]:
    """Yield the kind and the tokens of each document, without those of no tokens. Documents of one kind are
    tokenized together.

    With `whole`, for documents that come in pairs, raises ValueError for a document of no tokens.
    """
    rest = iter(documents)
    while some := list(_some(rest)):
        for kind, group in groupby(some, lambda x: x.kind):
            group = list(group)
            for encoded in _TOKENS_OF[kind](group, vocabulary):
                if len(encoded[0]):
                    yield kind, encoded
                elif whole:
                    raise ValueError(
                        f"{group[0].where}: got a preference of no tokens there, or soon after it, expected a "
                        "prompt and answers that the tokenizer knows: correct it"
                    )


def _some(documents: Iterator[Document]) -> Iterator[Document]:
    for document in islice(documents, _DOCUMENTS):
        yield document
        text = document.values["text"] if document.kind == "text" else document.values
        if isinstance(text, str | bytes) and len(text) > _LONG:
            break


def _bytes(documents: list[Document], _: Vocabulary) -> Iterator[Encoded]:
    yield from ((np.frombuffer(x.values, np.uint8), None) for x in documents)


def _tokens(documents: list[Document], vocabulary: Vocabulary) -> Iterator[Encoded]:
    """Tokens of each tokenized document without padding, and a mask: false where its labels exclude the loss."""
    for document in documents:
        columns, where = document.values, document.where
        for name, value in columns.items():
            if not isinstance(value, list) or any(type(x) is not int for x in value):
                raise ValueError(
                    f"{where}: got {name} {value!r:.60}, expected a list of whole numbers: tokenize it again"
                )
            if len(value) != (length := len(columns[IDS])):
                raise ValueError(f"{where}: got {len(value)} {name} for {length} {IDS}, expected as many")
        ids, labels = (np.array(columns.get(x, columns[IDS]), np.int64) for x in (IDS, LABELS))
        kept = np.array(columns[MASK], bool) if MASK in columns else slice(None)
        learned = labels != IGNORE_INDEX
        if (bad := np.flatnonzero(learned & (labels != ids))).size:
            raise ValueError(
                f"{where}: got the label {labels[bad[0]]} for the token {ids[bad[0]]}, expected the token itself, "
                f"or {IGNORE_INDEX} where no loss counts: do not shift labels"
            )
        ids = ids[kept]
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary.vocab_size:
            got = f"tokens from {ids.min()} to {ids.max()}"
            expected = f"0 or above and below {vocabulary.vocab_size}"
            refuse(where, got, expected, "pass the `vocab_size` of their tokenizer")
        yield ids, learned[kept]


def _texts(documents: list[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    for document in documents:
        for name, value in document.values.items():
            if not isinstance(value, str):
                mixed = name != "text" and isinstance(value, list)
                do = "write both of the pair as texts or as messages" if mixed else "write it as one"
                do = "write a text, or leave the record out" if value is None else do
                raise ValueError(f"{document.where}, {name!r}: got {value!r:.60}, expected a string: {do}")
    pairs = [("", *x.values.values())[-2:] for x in documents]  # a prompt, or none, and what follows it
    pairs = [pair for pair in pairs if any(pair)]
    located = tokenizer.locate([prompt + text for prompt, text in pairs])
    for (prompt, text), (ids, places) in zip(pairs, located, strict=True):
        asked = int(np.searchsorted(places[:, 0], len(prompt)))
        if prompt and (not asked or places[asked - 1, 1] > len(prompt)):  # a token of both, or bytes
            before, after = tokenizer.encode([prompt, text])
            ids, asked = np.concatenate([before, after]), len(before)
        tokens, begun = tokenizer.document(ids)
        asked = begun + asked if documents[0].kind == "prompt" else 0
        learned = np.ones(len(tokens), bool)
        learned[:asked] = False
        yield tokens, learned


def _chats(documents: list[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    chats = [x.values for x in documents]
    if (template := tokenizer.chat) is None:
        raise ValueError(
            f"{chats[0].where}: got a chat for {tokenizer.name}, without a chat template, expected a tokenizer "
            "with one: write a chat_template.jinja beside it, or prompt and completion instead of messages"
        )
    rendered = [x for chat in chats for x in template.render(chat)]
    located = tokenizer.locate([text for text, _ in rendered])
    for (_, spans), (tokens, places) in zip(rendered, located, strict=True):
        learned = np.zeros(len(tokens), bool)
        for first, last in spans:  # a token may begin with a space of the prompt
            learned |= (places[:, 1] > first) & (places[:, 0] < last)
        yield tokens, learned


_TOKENS_OF: dict[str, Any] = {
    **{"bytes": _bytes, IDS: _tokens, CHAT: _chats, "prompt": _texts, "text": _texts}
}
