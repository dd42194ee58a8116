"""Files of tokens, which are mapped where they are: a corpus without a copy."""

from pathlib import Path
from typing import Any

import numpy as np

from zfunc.errors import refuse, setting
from zfunc.train.data.corpus import Corpus, two_streams
from zfunc.train.settings import TOKEN_TYPES

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


def map_tokens(path: Path, dtype: "np.dtype[Any]", vocab_size: int, split: bool) -> Corpus:
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
            refuse_tokens_of_others(path, tokens[:8].tobytes())
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
    parts = two_streams(str(path), (train, held_out))
    return Corpus(str(path), *parts, vocab_size, tuple(lines))


def refuse_tokens_of_others(path: Path, begin: bytes) -> None:
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
