"""Tokenizers: text to tokens and back, by a local `tokenizer.json`, or as bytes.

Every tokenizer has an end token; all its tokens are below `vocab_size`; and two that would give different tokens
have different digests. `tokenizers` is imported when a file is opened: pip install "zfunc[hf]".
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

_CONFIG = "tokenizer_config.json"  # beside the file, where transformers writes it
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""What tokenizers call the end of a document, in the order in which they are tried."""


@frozen(eq=False)
class Vocabulary:
    """Tokens below `vocab_size`. Data that is tokenized already has only this.

    >>> Vocabulary("below 50257", 50257).dtype
    dtype('uint16')
    """

    digest: str
    vocab_size: int

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The type its tokens are stored in. Only bytes take 8 bits, which marks them as bytes.

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


def _encode_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


BYTES = Tokenizer("bytes", 256, "bytes", 0, _encode_bytes, _decode_bytes)
"""UTF-8, with zero after a document."""


def open_tokenizer(path: Path, *, end: int | None = None) -> Tokenizer:
    """The tokenizer of a local `tokenizer.json`. Nothing is added to a text but the end token after a document.

    The end token is the `eos_token` in a `tokenizer_config.json` beside it, else `end`, else the first of
    END_TOKENS that it has. Raises ValueError for a file that is not a tokenizer or has no end token, ImportError
    without the library.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("--tokenizer: it needs the library tokenizers: pip install 'zfunc[hf]'") from error
    try:
        content = path.read_bytes()
        loaded = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises Exception itself
        raise ValueError(
            f"--tokenizer: got {path}, which cannot be read ({error}), expected a tokenizer.json, as "
            "save_pretrained writes it: name that file"
        ) from error
    loaded.no_padding()
    loaded.no_truncation()
    size = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    end = _end_token(path, loaded, end)
    digest = hashlib.sha256(content).hexdigest()[:16] + f"-{end}"

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = loaded.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    return Tokenizer(digest, max(size, end + 1), str(path), end, encode, loaded.decode)


def _end_token(path: Path, tokenizer: Any, default: int | None) -> int:
    name = _configured(path.with_name(_CONFIG))
    if name is not None and (token := tokenizer.token_to_id(name)) is not None:
        return token
    if default is not None:
        return default
    for known in END_TOKENS:
        if (token := tokenizer.token_to_id(known)) is not None:
            return token
    raise ValueError(
        f"--tokenizer: got {path} without an end token, expected one, to follow every document: name it as "
        f"eos_token in a {_CONFIG} beside it"
    )


def _configured(path: Path) -> str | None:
    """The eos_token of a configuration, a name or an object with one; None without the file or the entry."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: got a file that cannot be read ({error}), expected a JSON object: correct it"
        ) from error
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None
