"""Data as a corpus: tokens that are mapped where they are, or documents that are packed first."""

from collections import Counter
from pathlib import Path

import numpy as np

from zfunc.errors import refuse
from zfunc.train.data.corpus import Corpus
from zfunc.train.data.documents import file_documents, holds_tokens, open_saved
from zfunc.train.data.files import is_saved_dataset, stdlib_files, walk
from zfunc.train.data.formats import (
    FORMATS,
    LOOKED_AT,
    is_binary,
    is_compressed,
    opened,
    refuse_packed,
    suffix_of,
)
from zfunc.train.data.packing import pack_documents
from zfunc.train.data.records import preference_of
from zfunc.train.data.token_files import map_tokens, refuse_tokens_of_others
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary

STDLIB = "Python standard library"


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
    rows = None if whole_documents is None else (whole_documents, long_documents)
    vocabulary: Vocabulary = tokenizer or BYTES
    text = vocabulary is not BYTES
    if path is None:
        if pairs:
            preference_of("texts", STDLIB, Counter())
        source = file_documents(stdlib_files(), text=text, folder=True)
    elif path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"got {path}, which is no file (a pipe?), expected a file or a folder: write it to one"
        )
    elif is_saved_dataset(path):
        source = open_saved(path, pairs=pairs)
        if source.tokenized:
            _refuse_tokenizer(path, tokenizer)
            vocabulary = Vocabulary(f"below {vocab_size}", vocab_size)
    elif holds_tokens(path):
        if pairs:
            preference_of("tokens", str(path), Counter())
        if whole_documents:
            got = f"documents for {path}, which does not say where documents end"
            do = "name one of them, or leave `packing` out"
            refuse("packing", got, "text, JSONL or a saved dataset", do)
        _refuse_tokenizer(path, tokenizer)
        path = path / "train.bin" if path.is_dir() else path
        return map_tokens(path, np.dtype(dtype).newbyteorder("<"), vocab_size, split)
    elif path.is_dir():
        source = file_documents(walk(path), text=text, folder=True, pairs=pairs)
    else:
        if suffix_of(path) not in FORMATS:
            _refuse_what_is_no_text(path)
            if not (text or whole_documents or pairs or is_compressed(path)):
                return map_tokens(path, np.dtype(np.uint8), BYTES.vocab_size, split)
        source = file_documents([(path.name, path)], text=text, folder=False, pairs=pairs)
    return pack_documents(str(path or STDLIB), source, cache, vocabulary, split, rows, pairs)


def _refuse_tokenizer(path: Path, tokenizer: Tokenizer | None) -> None:
    """Raise SettingError if a `tokenizer` is given for the data at `path`, which is tokens."""
    if tokenizer is not None:
        refuse("tokenizer", f"one for {path}, which holds tokens", "text or JSONL", "leave it out")


def _refuse_what_is_no_text(path: Path) -> None:
    """Raise ValueError if the file at `path` is compressed in an unknown form, tokens of another form, or other
    binary content."""
    with opened(path) as file:
        begin = file.read(LOOKED_AT)
    refuse_packed(path, begin)
    refuse_tokens_of_others(path, begin)
    if is_binary(begin):
        got = f"{path}, which is binary, as a PDF or a text in UTF-16 is"
        refuse((), got, "text in UTF-8", "convert it, or name another file", ValueError)
