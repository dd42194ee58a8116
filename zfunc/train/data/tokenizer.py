"""Tokenizers: text to tokens and back, by a local `tokenizer.json`, or as bytes; and chats to text.

Every tokenizer has an end token; all its tokens are below `vocab_size`; and two that would give different tokens
have different digests. `tokenizers` is imported when a file is opened: pip install ".[hf]".
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from zfunc.errors import install

Located = tuple[np.ndarray, np.ndarray]  # int64 tokens [tokens], and the characters of each, [tokens, 2]
CALL, PIECE = 1 << 20, 1 << 16  # characters of a call of the library, which holds about 150 bytes for each
SAME = 8  # tokens that two pieces of a text must share
_CONFIG = "tokenizer_config.json"  # beside the file, where transformers writes it
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""What tokenizers call the end of a document, in the order in which they are tried."""

Message = dict[str, Any]  # "role", "content", and what else the template reads
Span = tuple[int, int]  # characters
ASSISTANT = "assistant"
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")  # in a template, around what the assistant writes


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
    """Text to tokens. `end` follows every document; a chat ends as the template, `chat`, has it, if there is one.

    `locate(texts)` returns the tokens of each text, int64 [tokens], and each one's characters, [tokens, 2].
    """

    name: str
    end: int
    locate: Callable[[Sequence[str]], list[Located]]
    decode: Callable[[Sequence[int]], str]
    chat: "ChatTemplate | None"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, int64 [tokens]."""
        return [ids for ids, _ in self.locate(texts)]

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a document or a turn of a chat: in a sample nothing follows them."""
        asked, after = Chat(({"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "_|_"}), ""), ""
        with suppress(ValueError, ImportError):  # a template for other chats
            for text, _ in () if self.chat is None else self.chat.render(asked):
                after = text[text.rindex("_|_") + 3 :].strip()
        return frozenset({self.end, *self.encode([after])[0][:1].tolist()})


def _locate_bytes(texts: Sequence[str]) -> list[Located]:
    every = (np.frombuffer(text.encode(), np.uint8) for text in texts)
    return [(ids, np.zeros((0, 2), np.int64)) for ids in every]  # no chats, so nobody asks where they are


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


BYTES = Tokenizer("bytes", 256, "bytes", 0, _locate_bytes, _decode_bytes, None)
"""UTF-8, with zero after a document."""


def open_tokenizer(path: Path, *, end: int | None = None) -> Tokenizer:
    """The tokenizer of a local `tokenizer.json`. Nothing is added to a text but the end token after a document.

    The end token is the `eos_token` in a `tokenizer_config.json` beside it, else `end`, else the first of
    END_TOKENS that it has. The chat template is that of a `chat_template.jinja` beside it, or in the same
    `tokenizer_config.json`. Raises ValueError for a file that is not a tokenizer or has no end token, ImportError
    without the library.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"tokenizer: it needs the library tokenizers: {install('hf')}") from error
    try:
        content = path.read_bytes()
        loaded = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises Exception itself
        raise ValueError(
            f"tokenizer: got {path}, which cannot be read ({error}), expected a tokenizer.json, as "
            "save_pretrained writes it: name that file"
        ) from error
    loaded.no_padding()
    loaded.no_truncation()
    config = _read_config(path.with_name(_CONFIG))
    end = _end_token(path, loaded, config, end)
    chat = _chat_template(path, config)
    digest = hashlib.sha256(content).hexdigest()[:16] + f"-{end}"
    if chat is not None:
        digest += "-" + hashlib.sha256(repr(chat).encode()).hexdigest()[:16]

    def locate(texts: Sequence[str]) -> list[Located]:
        encodings = loaded.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(x.ids, np.int64), np.array(x.offsets, np.int64).reshape(-1, 2)) for x in encodings]

    size = max(end, *loaded.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(digest, size, str(path), end, partial(in_calls, locate), loaded.decode, chat)


# --- long texts ------------------------------------------------------------------------------------------


def in_calls(locate: Callable[[Sequence[str]], list[Located]], texts: Sequence[str]) -> list[Located]:
    """`locate` of texts in calls of about CALL characters at most, and in pieces of each that is longer than PIECE.

    So memory is bounded, and an interrupt is heard between two calls.
    """
    short = [text for text in texts if len(text) <= PIECE]
    done: list[Located] = []
    for _, call in groupby(zip(short, accumulate(map(len, short)), strict=True), lambda x: x[1] // CALL):
        done += locate([text for text, _ in call])
    rest = iter(done)
    return [next(rest) if len(text) <= PIECE else in_pieces(locate, text) for text in texts]


def in_pieces(locate: Callable[[Sequence[str]], list[Located]], text: str) -> Located:
    """The tokens of a long text, and their characters, as `locate` gives them for the whole.

    Pieces overlap, and are joined where two have the same tokens; larger ones, until they have.
    """
    size = PIECE
    while size < len(text):
        shared = size // 32
        starts = range(0, len(text) - shared, size - shared)
        joined: list[Located] = []
        for n in range(0, len(starts), max(1, CALL // size)):
            some = starts[n : n + max(1, CALL // size)]
            pieces = locate([text[at : at + size] for at in some])
            joined += [(ids, spans + at) for at, (ids, spans) in zip(some, pieces, strict=True)]
        if all(_join(joined, n) for n in range(1, len(joined))):
            ids, spans = zip(*joined, strict=True)
            return np.concatenate(ids), np.concatenate(spans)
        size *= 4
    return locate([text])[0]


def _join(pieces: list[Located], n: int) -> bool:
    """Cut piece `n` and the one before it where both have the same tokens; False if there is no such place."""
    (before, places), (after, spans) = pieces[n - 1], pieces[n]
    first = int(np.searchsorted(places[:, 0], spans[0, 0])) if len(spans) else len(before)
    left = list(zip(before[first:].tolist(), map(tuple, places[first:].tolist()), strict=True))
    count = 2 * len(left) + SAME
    right = list(zip(after[:count].tolist(), map(tuple, spans[:count].tolist()), strict=True))
    at = {token: j for j, token in enumerate(right)}
    for i in sorted(range(len(left) - SAME), key=lambda i: abs(2 * i - len(left))):  # far from both ends
        j = at.get(left[i])
        if j is not None and left[i : i + SAME] == right[j : j + SAME]:
            pieces[n - 1] = before[: first + i], places[: first + i]
            pieces[n] = after[j:], spans[j:]
            return True
    return False


def _end_token(path: Path, tokenizer: Any, config: dict[str, Any], default: int | None) -> int:
    name = _token_text(config.get("eos_token"))
    if name is not None and (token := tokenizer.token_to_id(name)) is not None:
        return token
    if default is not None:
        return default
    for known in END_TOKENS:
        if (token := tokenizer.token_to_id(known)) is not None:
            return token
    raise ValueError(
        f"tokenizer: got {path} without an end token, expected one, to follow every document: name it as "
        f"eos_token in a {_CONFIG} beside it"
    )


def _read_config(path: Path) -> dict[str, Any]:
    """The configuration of a tokenizer; empty without the file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: got a file that cannot be read ({error}), expected a JSON object: correct it"
        ) from error
    return config


def _token_text(entry: Any) -> str | None:
    """A token in a configuration: its text, or an object with it."""
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None


# --- chats ------------------------------------------------------------------------------------------------
#
# What is learned of a chat is what the assistant wrote, as the tokenizer's template writes it: from the end of the
# prompt that the model would be given, to the end of the turn. The template is in Jinja, rendered by transformers.


@frozen
class Chat:
    """The messages of a record, which is `where`. A turn of the assistant with a weight of 0 is not learned."""

    messages: tuple[Message, ...]
    where: str
    tools: list[Any] | None = None
    weights: tuple[float, ...] = ()  # of the messages; () is 1 for each


@frozen
class ChatTemplate:
    """A tokenizer's template of chats: a Jinja `source`, with special tokens as its variables."""

    source: str
    variables: Mapping[str, str] = field(factory=dict[str, str])

    def render(self, chat: Chat) -> Iterator[tuple[str, list[Span]]]:
        """Texts of a chat, each with the ranges of its characters that are learned, in ascending order. It is one
        text, or one for each turn of the assistant where the template writes earlier turns otherwise than the last
        (as Qwen 3's, which drops their thoughts).

        Raises ValueError, with the record, for a chat that the template refuses.
        """
        learns = [*chat.weights] or [1.0] * len(chat.messages)
        turns = [n for n, m in enumerate(chat.messages) if m["role"] == ASSISTANT]
        text, marked = self._text(chat, len(learns), marks=_MARKS.search(self.source) is not None)
        if marked and len(marked) == len(turns):
            yield text, [x for n, x in zip(turns, marked, strict=True) if learns[n]]
            return
        spans: dict[str, list[Span]] = {}  # by the text that they are in
        for n in turns:
            prompt, until = self._text(chat, n, prompt=True)[0], self._text(chat, n + 1)[0]
            if not until.startswith(prompt):
                raise ValueError(
                    f"{chat.where}: got a chat template that writes turn {n + 1} otherwise than it asks for it, "
                    "expected its generation prompt to begin the turn: use another template, or mark what the "
                    "assistant writes in it by {% generation %}"
                )
            if learns[n]:
                whole = text if text.startswith(until) else until
                spans.setdefault(whole, []).append((len(prompt), len(until)))
        yield from (spans or {text: []}).items()

    def _text(
        self, chat: Chat, count: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The first `count` messages as text, with the beginning of the assistant's turn after a `prompt`; and the
        ranges that the template itself marks as the assistant's.
        """
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ImportError(f"data: a chat template needs transformers: {install('hf')}") from error
        try:
            texts, marked = render_jinja_template(
                [[*chat.messages[:count]]],
                tools=chat.tools,
                chat_template=self.source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except Exception as error:  # Jinja's own, and whatever a template can do wrong
            raise ValueError(
                f"{chat.where}: got a chat that the chat template refuses ({error}), expected its roles in its "
                "order: change the chat, or the template"
            ) from error
        return texts[0], [(start, end) for one in marked for start, end in one]


def chat_of(record: Mapping[str, Any], where: str) -> Chat:
    """The chat of a record with `messages` and perhaps `tools`, as OpenAI's.

    Raises ValueError, with the record, for messages without a role or content, and for a last turn that is not the
    assistant's.
    """
    given = record["messages"]
    if not isinstance(given, list) or not all(isinstance(x, Mapping) for x in given):
        raise ValueError(
            f"{where}: got {given!r:.60}, expected a list of objects, as in {EXAMPLE}: write it so"
        )
    messages = [{k: x for k, x in m.items() if x is not None} for m in given]  # Arrow has None for no key
    for n, m in enumerate(messages, 1):
        missing = [k for k in ("role", "content") if not isinstance(m.get(k), str)]
        if missing and not (missing == ["content"] and "content" not in m and "tool_calls" in m):
            got = m.get(missing[0])
            raise ValueError(
                f"{where}, message {n}: got {got!r:.60} as {missing[0]}, expected text, as in {EXAMPLE}: correct it"
            )
    last = messages[-1]["role"] if messages else None
    if last != ASSISTANT:
        raise ValueError(
            f"{where}: got a chat whose last turn is of the role {last!r}, expected the assistant's, because its "
            "turns are learned: add it, or leave out what is after the last one"
        )
    weights = tuple(m.pop("weight", 1.0) for m in messages)
    return Chat(tuple(messages), where, record.get("tools"), weights)


def _chat_template(path: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """The template beside a tokenizer, where transformers writes it."""
    file = path.with_name("chat_template.jinja")
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        return None
    named = {name: _token_text(x) for name, x in config.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: x for name, x in named.items() if x is not None})
