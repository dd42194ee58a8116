"""Tokenizers: text to tokens and back, by a local `tokenizer.json`, or bytes.

The invariant: a tokenizer that is opened has an end token, below `vocab_size` as all it gives, and `digest` tells
any two apart that would give other tokens. `tokenizers` is imported when a file is opened: pip install "zfunc[hf]".
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

CONFIG = "tokenizer_config.json"  # beside the file, where transformers writes it
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""Names that tokenizers have for the end of a document, where nothing beside them says which it is."""


@frozen(eq=False)
class Vocabulary:
    """What tokens are told by: they are below `vocab_size`. Alone of data that is tokens already, as they are.

    >>> Vocabulary("below 50257", 50257).dtype
    dtype('uint16')
    """

    digest: str
    vocab_size: int

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The type its tokens are kept in: 8 bits for bytes alone, which tells them from tokens.

        >>> BYTES.dtype
        dtype('uint8')
        """
        return np.dtype("u1" if self is BYTES else "<u2" if self.vocab_size <= 1 << 16 else "<u4")


@frozen(eq=False)
class Tokenizer(Vocabulary):
    """Text to tokens. `end` follows every document."""

    name: str
    end: int
    encode: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Sequence[int]], str]


def _of_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def _to_text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


BYTES = Tokenizer("bytes", 256, "bytes", 0, _of_bytes, _to_text)
"""The one without a file: UTF-8, and zero after a document."""


def open_tokenizer(path: Path, *, end: int | None = None) -> Tokenizer:
    """The tokenizer of a local `tokenizer.json`; nothing is added to a text but the end token after a document.

    The end token is what a `tokenizer_config.json` beside it calls `eos_token`, else `end`, else the first of ENDS
    that it has. Raises ValueError for a file that is no tokenizer or has no end token, ImportError without the
    library.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "--tokenizer: got no library for it, expected tokenizers: pip install 'zfunc[hf]'"
        ) from error
    try:
        content = path.read_bytes()
        made = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises Exception itself
        raise ValueError(
            f"--tokenizer: got {path}, which cannot be read ({error}), expected a tokenizer.json, as "
            "save_pretrained writes it: name that file"
        ) from error
    made.no_padding()
    made.no_truncation()
    size = max(made.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    stop = _end(path, made, end)
    digest = hashlib.sha256(content).hexdigest()[:16] + f"-{stop}"

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        found = made.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]

    return Tokenizer(digest, max(size, stop + 1), str(path), stop, encode, made.decode)


def _end(path: Path, made: Any, given: int | None) -> int:
    name = _configured(path.with_name(CONFIG))
    if name is not None and (found := made.token_to_id(name)) is not None:
        return found
    if given is not None:
        return given
    for known in ENDS:
        if (found := made.token_to_id(known)) is not None:
            return found
    raise ValueError(
        f"--tokenizer: got {path} without an end token, expected one, to follow every document: name it as "
        f"eos_token in a {CONFIG} beside it"
    )


def _configured(path: Path) -> str | None:
    """The eos_token of a configuration, a name or an object with one; None if there is no such file or entry."""
    try:
        told = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: got what cannot be read ({error}), expected an object in JSON: mend it"
        ) from error
    name = told.get("content") if isinstance(told, dict) else told
    return name if isinstance(name, str) else None
